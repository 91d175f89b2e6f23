#define KIMI_MLA_STATIC // for the sizes of the kernels' arguments
#define KIMI_MLA_IMPLEMENTATION
#include "../kimi_mla.h"

#include "fake_libraries.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

fake_state fake; // found by dlsym

enum {
    INVALID_VALUE = 1,
    NOT_INITIALISED = 3,
    STUB_LIBRARY = 34,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    NVRTC_COMPILATION = 6,
    NVRTC_BUILTINS = 7
};

static int add(int* counter, int amount) { // threads share the state
    return __atomic_fetch_add(counter, amount, __ATOMIC_SEQ_CST);
}

// Takes note of a call; 1 if it is to fail.
static int is_failing(const char* name) {
    int number = add(&fake.call_count, 1) + 1;
    fake.calls[(number - 1) % FAKE_MAX_CALLS] = name;
    return number == fake.failing_number ||
           (fake.failing_call && strcmp(fake.failing_call, name) == 0);
}

#define CALL(name)                                                                                 \
    if (is_failing(name)) {                                                                        \
        return fake.failing_result;                                                                \
    }

// ---- libcuda: contexts

#define MOST_CONTEXTS 8 // pushed on a thread

static int initialised_by; // process
static __thread fake_context* contexts[MOST_CONTEXTS];
static __thread int context_count, context_was_set;

static fake_context* current_context(void) {
    return context_count > 0 ? contexts[context_count - 1]
                             : context_was_set ? NULL : fake.context;
}

static int is_forked(void) { return initialised_by && initialised_by != (int)getpid(); }

#define NEED_DRIVER                                                                                \
    if (!initialised_by || is_forked()) {                                                          \
        return NOT_INITIALISED;                                                                    \
    }
#define NEED_CONTEXT                                                                               \
    NEED_DRIVER                                                                                    \
    if (!current_context() || current_context()->dead) {                                           \
        return INVALID_CONTEXT;                                                                    \
    }

int CUDA_CALL cuInit(unsigned int flags) {
    CALL("cuInit")
    if (is_forked()) {
        return NOT_INITIALISED;
    }
    initialised_by = (int)getpid();
    return fake.stub ? STUB_LIBRARY : flags != 0;
}
int CUDA_CALL cuDriverGetVersion(int* version) {
    CALL("cuDriverGetVersion")
    *version = fake.driver_version;
    return 0;
}
int CUDA_CALL cuGetErrorName(int result, const char** name) {
    (void)result;
    CALL("cuGetErrorName")
    *name = "CUDA_ERROR_FAKE";
    return 0;
}
int CUDA_CALL cuGetErrorString(int result, const char** string) {
    (void)result;
    CALL("cuGetErrorString")
    *string = "a test asked for it";
    return 0;
}
int CUDA_CALL cuCtxGetCurrent(void** context) {
    CALL("cuCtxGetCurrent")
    NEED_DRIVER
    *context = current_context();
    return 0;
}
int CUDA_CALL cuCtxSetCurrent(void* context) { // for tests; the header never calls it
    context_was_set = 1;
    contexts[0] = (fake_context*)context;
    context_count = context != NULL;
    return 0;
}
int CUDA_CALL cuCtxGetDevice(int* device) {
    CALL("cuCtxGetDevice")
    NEED_CONTEXT
    *device = 3 + current_context()->device;
    return 0;
}
int CUDA_CALL cuCtxPushCurrent_v2(void* context) {
    CALL("cuCtxPushCurrent_v2")
    NEED_DRIVER
    if (!context || ((fake_context*)context)->dead || context_count == MOST_CONTEXTS) {
        return INVALID_CONTEXT;
    }
    contexts[context_count++] = (fake_context*)context;
    return 0;
}
int CUDA_CALL cuCtxPopCurrent_v2(void** context) {
    CALL("cuCtxPopCurrent_v2")
    NEED_CONTEXT
    if (context) {
        *context = current_context();
    }
    --context_count;
    return 0;
}
int CUDA_CALL cuCtxGetId(void* context, unsigned long long* id) {
    CALL("cuCtxGetId")
    NEED_DRIVER
    *id = ((fake_context*)context)->id;
    return 0;
}
int CUDA_CALL cuCtxGetDevResource(void* context, void* resource, int type) {
    const fake_context* of = (const fake_context*)context;
    unsigned int count;
    CALL("cuCtxGetDevResource")
    NEED_DRIVER
    count = (unsigned int)(of->multiprocessors > 0   ? of->multiprocessors
                           : of->multiprocessors < 0 ? 0
                                                     : fake.devices[of->device].multiprocessors);
    memset(resource, 0, 144); // as cuda.h 12.4 to 13.0 lay it out: type, 92 bytes, SMs, ...
    memcpy(resource, &type, sizeof type);
    memcpy((char*)resource + 96, &count, sizeof count);
    return type != 1;
}
int CUDA_CALL cuDeviceGetAttribute(int* value, int attribute, int device) {
    const fake_device* of = &fake.devices[(device - 3) % FAKE_DEVICES];
    CALL("cuDeviceGetAttribute")
    NEED_DRIVER
    *value = attribute == 75   ? of->compute_major
             : attribute == 76 ? of->compute_minor
             : attribute == 16 ? of->multiprocessors
             : attribute == 97 ? of->shared_bytes
             : attribute == 81 ? of->shared_bytes + 1024
                               : -1;
    return device < 3;
}

// ---- libcuda: modules and launches

int CUDA_CALL cuModuleLoadData(void** module, const void* image) {
    fake_module* loaded;
    CALL("cuModuleLoadData")
    NEED_CONTEXT
    if (memcmp(image, "cubin", 5) != 0 || fake.refused_loads > 0) {
        fake.refused_loads -= fake.refused_loads > 0;
        return INVALID_IMAGE;
    }
    loaded = &fake.modules[add(&fake.modules_loaded, 1) % FAKE_MAX_MODULES];
    loaded->context = current_context();
    loaded->loaded = 1;
    *module = loaded;
    return 0;
}
int CUDA_CALL cuModuleUnload(void* module) {
    fake_module* loaded = (fake_module*)module;
    CALL("cuModuleUnload")
    NEED_CONTEXT
    if (!loaded || !loaded->loaded || loaded->context != current_context()) {
        return INVALID_HANDLE;
    }
    loaded->loaded = 0;
    add(&fake.modules_unloaded, 1);
    return 0;
}
int CUDA_CALL cuModuleGetFunction(void** function, void* module, const char* name) {
    fake_function* found;
    CALL("cuModuleGetFunction")
    if (fake.failing_call && strcmp(fake.failing_call, name) == 0) {
        return fake.failing_result;
    }
    NEED_CONTEXT
    found = &fake.functions[add(&fake.function_count, 1) % FAKE_MAX_MODULES];
    found->module = (fake_module*)module;
    found->resident = 0;
    snprintf(found->name, sizeof found->name, "%s", name);
    *function = found;
    return module == NULL;
}
int CUDA_CALL cuFuncLoad(void* function) {
    CALL("cuFuncLoad")
    NEED_CONTEXT
    ((fake_function*)function)->resident = 1;
    add(&fake.functions_loaded, 1);
    return 0;
}
int CUDA_CALL cuFuncGetAttribute(int* value, int attribute, void* function) {
    CALL("cuFuncGetAttribute")
    NEED_CONTEXT
    ((fake_function*)function)->resident = 1;
    *value = attribute;
    return 0;
}
int CUDA_CALL cuFuncSetAttribute(void* function, int attribute, int value) {
    CALL("cuFuncSetAttribute")
    NEED_CONTEXT
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
static int note_launch(void* function, const unsigned int* grid, unsigned int threads,
                       unsigned int shared_bytes, void* stream, void** parameters,
                       int programmatic) {
    const fake_function* launched = (const fake_function*)function;
    fake_launch launch;
    NEED_CONTEXT
    // A function that is not resident would be loaded by its first launch, maybe in a capture.
    if (!launched->module->loaded || launched->module->context != current_context() ||
        !launched->resident) {
        return INVALID_HANDLE;
    }
    memset(&launch, 0, sizeof launch);
    snprintf(launch.kernel, sizeof launch.kernel, "%s", launched->name);
    memcpy(launch.grid, grid, sizeof launch.grid);
    launch.threads = threads;
    launch.shared_bytes = shared_bytes;
    launch.stream = stream;
    launch.context = current_context();
    launch.programmatic = programmatic;
    memcpy(launch.args, parameters[0], args_bytes(launch.kernel));
    fake.launches[add(&fake.launch_count, 1) % FAKE_MAX_LAUNCHES] = launch;
    if (fake.launched) {
        fake.launched(&launch);
    }
    return 0;
}
int CUDA_CALL cuLaunchKernel(void* function, unsigned int grid_x, unsigned int grid_y,
                             unsigned int grid_z, unsigned int block_x, unsigned int block_y,
                             unsigned int block_z, unsigned int shared_bytes, void* stream,
                             void** parameters, void** extra) {
    const unsigned int grid[3] = {grid_x, grid_y, grid_z};
    CALL("cuLaunchKernel")
    return extra ? INVALID_VALUE
                 : note_launch(function, grid, block_x * block_y * block_z, shared_bytes, stream,
                               parameters, 0);
}
int CUDA_CALL cuLaunchKernelEx(const void* config, void* function, void** parameters,
                               void** extra) {
    // As cuda.h lays it out: 7 uint32, stream, attributes, their count. The first ends at byte 28,
    // of which the pointers' alignment on 64-bit machines makes 32.
    const size_t wide = sizeof(void*), at = (28 + wide - 1) / wide * wide;
    unsigned int numbers[7], count;
    void *stream, *attributes;
    CALL("cuLaunchKernelEx")
    memcpy(numbers, config, sizeof numbers);
    memcpy(&stream, (const char*)config + at, sizeof stream);
    memcpy(&attributes, (const char*)config + at + wide, sizeof attributes);
    memcpy(&count, (const char*)config + at + 2 * wide, sizeof count);
    // An attribute: uint32 id, padding, then 64 bytes that begin with the value.
    return extra || count != 1 || *(int*)attributes != 6
               ? INVALID_VALUE
               : note_launch(function, numbers, numbers[3] * numbers[4] * numbers[5], numbers[6],
                             stream, parameters, ((int*)attributes)[2]);
}
int CUDA_CALL cuMemcpyDtoHAsync_v2(void* host, uint64_t device, size_t bytes, void* stream) {
    (void)stream;
    CALL("cuMemcpyDtoHAsync_v2")
    NEED_CONTEXT
    memcpy(host, (const void*)(uintptr_t)device, bytes);
    add(&fake.copies, 1);
    return 0;
}
int CUDA_CALL cuStreamIsCapturing(void* stream, int* capturing) {
    (void)stream;
    CALL("cuStreamIsCapturing")
    NEED_CONTEXT
    *capturing = fake.capturing;
    return 0;
}
int CUDA_CALL cuStreamSynchronize(void* stream) {
    (void)stream;
    CALL("cuStreamSynchronize")
    NEED_CONTEXT
    add(&fake.synchronisations, 1);
    return 0;
}

// ---- NVRTC

typedef struct fake_program {
    int is_probe; // not of the device source
    const char* log;
} fake_program;

int nvrtcVersion(int* major, int* minor) {
    CALL("nvrtcVersion")
    *major = fake.nvrtc_major;
    *minor = 1;
    return 0;
}
const char* nvrtcGetErrorString(int result) {
    (void)result;
    return "NVRTC_ERROR_FAKE";
}
int nvrtcGetNumSupportedArchs(int* count) {
    CALL("nvrtcGetNumSupportedArchs")
    *count = fake.architecture_count;
    return 0;
}
int nvrtcGetSupportedArchs(int* architectures) {
    CALL("nvrtcGetSupportedArchs")
    memcpy(architectures, fake.architectures, (size_t)fake.architecture_count * sizeof(int));
    return 0;
}
int nvrtcCreateProgram(void** program, const char* source, const char* name, int header_count,
                       const char* const* headers, const char* const* header_names) {
    fake_program* made;
    (void)name, (void)headers, (void)header_names;
    CALL("nvrtcCreateProgram")
    made = (fake_program*)malloc(sizeof *made);
    made->is_probe = !strstr(source, "kmla_reader");
    made->log = "";
    *program = made;
    add(&fake.programs_alive, 1);
    return header_count != 0;
}
int nvrtcCompileProgram(void* program, int option_count, const char* const* options) {
    fake_program* compiled = (fake_program*)program;
    char said[sizeof fake.options] = "";
    int i;
    CALL("nvrtcCompileProgram")
    if (fake.without_builtins) {
        compiled->log = "nvrtc: error: failed to open libnvrtc-builtins.so.12.1.\n";
        return NVRTC_BUILTINS;
    }
    if (compiled->is_probe) {
        return NVRTC_COMPILATION;
    }
    compiled->log = fake.log;
    add(&fake.compiles, 1);
    for (i = 0; i < option_count; ++i) {
        strcat(strcat(said, options[i]), " ");
    }
    memcpy(fake.options, said, sizeof said);
    return 0;
}
static const char* log_of(const void* program) { // a compile that was told to fail left none
    const char* log = ((const fake_program*)program)->log;
    return log[0] ? log : fake.log;
}
int nvrtcGetProgramLogSize(void* program, size_t* bytes) {
    CALL("nvrtcGetProgramLogSize")
    *bytes = strlen(log_of(program)) + 1;
    return 0;
}
int nvrtcGetProgramLog(void* program, char* log) {
    CALL("nvrtcGetProgramLog")
    strcpy(log, log_of(program));
    return 0;
}
static size_t cubin_bytes(void) { return fake.cubin_bytes ? (size_t)fake.cubin_bytes : 6; }
int nvrtcGetCUBINSize(void* program, size_t* bytes) {
    (void)program;
    CALL("nvrtcGetCUBINSize")
    *bytes = cubin_bytes();
    return 0;
}
int nvrtcGetCUBIN(void* program, char* cubin) {
    size_t i;
    (void)program;
    CALL("nvrtcGetCUBIN")
    for (i = 0; i < cubin_bytes(); ++i) {
        cubin[i] = i < 6 ? "cubin"[i] : (char)(i * 37);
    }
    return 0;
}
int nvrtcDestroyProgram(void** program) {
    add(&fake.programs_alive, -1); // also if it fails: what it keeps then is its own affair
    free(*program);
    *program = NULL;
    CALL("nvrtcDestroyProgram")
    return 0;
}
