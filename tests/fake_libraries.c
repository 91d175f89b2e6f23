#define KIMI_MLA_STATIC // for the sizes of the kernels' arguments
#define KIMI_MLA_IMPLEMENTATION
#include "../kimi_mla.h"

#include "fake_libraries.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

fake_state fake; // found by dlsym

#define FAIL_IF_ASKED(name)                                                                        \
    if (fake.failing_call && strcmp(fake.failing_call, name) == 0) {                               \
        return fake.failing_result;                                                                \
    }

// ---- libcuda

int cuInit(unsigned int flags) {
    FAIL_IF_ASKED("cuInit")
    return flags != 0;
}
int cuDriverGetVersion(int* version) {
    *version = fake.driver_version;
    return 0;
}
int cuGetErrorName(int result, const char** name) {
    (void)result;
    *name = "CUDA_ERROR_FAKE";
    return 0;
}
int cuGetErrorString(int result, const char** string) {
    (void)result;
    *string = "a test asked for it";
    return 0;
}
int cuCtxGetCurrent(void** context) {
    FAIL_IF_ASKED("cuCtxGetCurrent")
    *context = fake.context;
    return 0;
}
int cuCtxGetDevice(int* device) {
    *device = 3;
    return 0;
}
int cuCtxPushCurrent_v2(void* context) {
    FAIL_IF_ASKED("cuCtxPushCurrent")
    return context == NULL;
}
int cuCtxPopCurrent_v2(void** context) {
    (void)context;
    return 0;
}
int cuCtxGetId(void* context, unsigned long long* id) {
    (void)context;
    *id = fake.context_id;
    return 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
    FAIL_IF_ASKED("cuDeviceGetAttribute")
    *value = attribute == 75   ? fake.compute_major
             : attribute == 76 ? fake.compute_minor
             : attribute == 16 ? 132
             : attribute == 97 ? fake.shared_bytes
             : attribute == 81 ? fake.shared_bytes + 1024
                               : -1;
    return device != 3;
}
int cuModuleLoadData(void** module, const void* image) {
    static int modules[64];
    FAIL_IF_ASKED("cuModuleLoadData")
    *module = &modules[fake.modules_loaded++ % 64];
    return memcmp(image, "cubin", 5) != 0;
}
int cuModuleUnload(void* module) {
    ++fake.modules_unloaded;
    return module == NULL;
}
int cuModuleGetFunction(void** function, void* module, const char* name) {
    FAIL_IF_ASKED("cuModuleGetFunction")
    FAIL_IF_ASKED(name)
    *function = (void*)name; // the header's literal
    return module == NULL;
}
int cuFuncLoad(void* function) {
    ++fake.functions_loaded;
    return function == NULL;
}
int cuFuncGetAttribute(int* value, int attribute, void* function) {
    *value = attribute;
    return function == NULL;
}
int cuFuncSetAttribute(void* function, int attribute, int value) {
    FAIL_IF_ASKED("cuFuncSetAttribute")
    if (attribute == 8) {
        fake.dynamic_shared_bytes = value;
    }
    return function == NULL;
}
static size_t args_bytes(const char* kernel) {
    return strcmp(kernel, "kmla_reader") == 0        ? sizeof(struct kmla_i_reader_args)
           : strcmp(kernel, "kmla_write_kv") == 0    ? sizeof(struct kmla_i_kv_write_args)
           : strcmp(kernel, "kmla_write_query") == 0 ? sizeof(struct kmla_i_query_write_args)
                                                     : sizeof(struct kmla_i_combine_args);
}
static int note_launch(const void* function, const unsigned int* grid, unsigned int threads,
                       unsigned int shared_bytes, void* stream, void** parameters,
                       int programmatic) {
    fake_launch* launch = &fake.launches[fake.launch_count % FAKE_MAX_LAUNCHES];
    FAIL_IF_ASKED("cuLaunchKernel")
    snprintf(launch->kernel, sizeof launch->kernel, "%s", (const char*)function);
    memcpy(launch->grid, grid, sizeof launch->grid);
    launch->threads = threads;
    launch->shared_bytes = shared_bytes;
    launch->stream = stream;
    launch->programmatic = programmatic;
    memcpy(launch->args, parameters[0], args_bytes(launch->kernel));
    ++fake.launch_count;
    return 0;
}
int cuLaunchKernel(void* function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                   unsigned int block_x, unsigned int block_y, unsigned int block_z,
                   unsigned int shared_bytes, void* stream, void** parameters, void** extra) {
    const unsigned int grid[3] = {grid_x, grid_y, grid_z};
    return extra ? 1
                 : note_launch(function, grid, block_x * block_y * block_z, shared_bytes, stream,
                               parameters, 0);
}
int cuLaunchKernelEx(const void* config, void* function, void** parameters, void** extra) {
    // As cuda.h lays it out on 64-bit machines: 7 uint32, stream, attributes, their count.
    unsigned int numbers[7], count;
    void *stream, *attributes;
    memcpy(numbers, config, sizeof numbers);
    memcpy(&stream, (const char*)config + 32, sizeof stream);
    memcpy(&attributes, (const char*)config + 40, sizeof attributes);
    memcpy(&count, (const char*)config + 48, sizeof count);
    // An attribute: uint32 id, padding, then 64 bytes that begin with the value.
    return extra || count != 1 || *(int*)attributes != 6
               ? 1
               : note_launch(function, numbers, numbers[3] * numbers[4] * numbers[5], numbers[6],
                             stream, parameters, ((int*)attributes)[2]);
}
int cuMemcpyDtoHAsync_v2(void* host, uint64_t device, size_t bytes, void* stream) {
    (void)stream;
    FAIL_IF_ASKED("cuMemcpyDtoHAsync")
    memcpy(host, (const void*)(uintptr_t)device, bytes);
    ++fake.copies;
    return 0;
}
int cuStreamIsCapturing(void* stream, int* capturing) {
    (void)stream;
    FAIL_IF_ASKED("cuStreamIsCapturing")
    *capturing = fake.capturing;
    return 0;
}
int cuStreamSynchronize(void* stream) {
    (void)stream;
    ++fake.synchronisations;
    return 0;
}

// ---- NVRTC

int nvrtcVersion(int* major, int* minor) {
    *major = fake.nvrtc_major;
    *minor = 1;
    return 0;
}
const char* nvrtcGetErrorString(int result) {
    (void)result;
    return "NVRTC_ERROR_FAKE";
}
int nvrtcGetNumSupportedArchs(int* count) {
    *count = fake.architecture_count;
    return 0;
}
int nvrtcGetSupportedArchs(int* architectures) {
    memcpy(architectures, fake.architectures, (size_t)fake.architecture_count * sizeof(int));
    return 0;
}
int nvrtcCreateProgram(void** program, const char* source, const char* name, int header_count,
                       const char* const* headers, const char* const* header_names) {
    (void)name, (void)headers, (void)header_names;
    FAIL_IF_ASKED("nvrtcCreateProgram")
    *program = &fake;
    ++fake.programs_alive;
    return header_count != 0 || !strstr(source, "kmla_reader");
}
int nvrtcCompileProgram(void* program, int option_count, const char* const* options) {
    int i;
    ++fake.compiles;
    fake.options[0] = 0;
    for (i = 0; i < option_count; ++i) {
        strcat(strcat(fake.options, options[i]), " ");
    }
    FAIL_IF_ASKED("nvrtcCompileProgram")
    return program != &fake;
}
int nvrtcGetProgramLogSize(void* program, size_t* bytes) {
    (void)program;
    *bytes = strlen(fake.log) + 1;
    return 0;
}
int nvrtcGetProgramLog(void* program, char* log) {
    (void)program;
    strcpy(log, fake.log);
    return 0;
}
int nvrtcGetCUBINSize(void* program, size_t* bytes) {
    (void)program;
    *bytes = 6;
    return 0;
}
int nvrtcGetCUBIN(void* program, char* cubin) {
    (void)program;
    FAIL_IF_ASKED("nvrtcGetCUBIN")
    memcpy(cubin, "cubin", 6);
    return 0;
}
int nvrtcDestroyProgram(void** program) {
    --fake.programs_alive;
    *program = NULL;
    return 0;
}
