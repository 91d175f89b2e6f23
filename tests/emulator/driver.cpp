// A CUDA driver and an NVRTC that run the device source on the CPU, under the names that
// kimi_mla.h looks up. Two cards of the architecture that the library was built for. NVRTC is the
// host's C++ compiler, a "CUBIN" the path of a shared object; launches are done when the call
// returns. Faults of device code abort; misuse of the API gets the driver's error codes.
//
// The Makefile defines KMLA_ARCH, KMLA_EMULATOR_COMPILE and KMLA_EMULATOR_LINK (a compiler and
// flags), KMLA_EMULATOR_SOURCES (this directory), KMLA_EMULATOR_IMAGES (where shared objects go).

#include "emulator.h"

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <map>
#include <mutex>
#include <string>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

typedef int CUresult;
enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    NO_BINARY_FOR_GPU = 209,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901,
};

// =============================================================================
// The cards
// =============================================================================

// Opt-in limit of a block; an SM has 1 KiB more for the system.
static const int shared_optin = KMLA_ARCH == 80 ? 166912 : KMLA_ARCH == 90 ? 232448 : 101376;
static const int shared_default = 49152;
static const int driver_version = 13000;

static const int device_count = 2;

struct context {
    unsigned long long id;
    int device;
    bool alive;
};

static bool initialised;
static context primaries[device_count] = {{1, 0, true}, {2, 1, true}};
static thread_local std::vector<context*> current_contexts; // as pushed

static context* current_context() {
    return current_contexts.empty() ? nullptr : current_contexts.back();
}

// Also for calls about a device, which need no context.
#define NEED_DEVICE(device)                                                                        \
    if (!initialised) {                                                                            \
        return NOT_INITIALIZED;                                                                    \
    }                                                                                              \
    if ((device) < 0 || (device) >= device_count) {                                                \
        return INVALID_DEVICE;                                                                     \
    }

// Every call but a few starts with this.
#define NEED_CONTEXT                                                                               \
    if (!initialised) {                                                                            \
        return NOT_INITIALIZED;                                                                    \
    }                                                                                              \
    if (!current_context() || !current_context()->alive) {                                         \
        return INVALID_CONTEXT;                                                                    \
    }

EXPORT CUresult cuInit(unsigned flags) {
    initialised = true;
    return flags == 0 ? SUCCESS : INVALID_VALUE;
}

EXPORT CUresult cuDriverGetVersion(int* version) {
    *version = driver_version;
    return SUCCESS;
}

EXPORT CUresult cuDeviceGetCount(int* count) {
    *count = device_count;
    return initialised ? SUCCESS : NOT_INITIALIZED;
}

EXPORT CUresult cuDeviceGet(int* device, int ordinal) {
    NEED_DEVICE(ordinal)
    *device = ordinal;
    return SUCCESS;
}

EXPORT CUresult cuDeviceGetName(char* name, int bytes, int device) {
    NEED_DEVICE(device)
    snprintf(name, (size_t)bytes, "emulated sm_%d", KMLA_ARCH);
    return SUCCESS;
}

EXPORT CUresult cuDeviceGetAttribute(int* value, int attribute, int device) {
    static const int attributes[][2] = {
        {1, 1024},                 // threads of a block
        {8, shared_default},       // shared memory of a block
        {10, 32},                  // threads of a warp
        {16, 4},                   // SMs: few, so that plans have few splits
        {75, KMLA_ARCH / 10},      // compute capability
        {76, KMLA_ARCH % 10},      //
        {81, shared_optin + 1024}, // shared memory of an SM
        {97, shared_optin},        // shared memory of a block that asks for it
    };
    NEED_DEVICE(device)
    for (const int(&each)[2] : attributes) {
        if (each[0] == attribute) {
            *value = each[1];
            return SUCCESS;
        }
    }
    emulator::die("cuDeviceGetAttribute: attribute %d", attribute);
}

// ---- contexts

EXPORT CUresult cuCtxCreate_v2(context** made, unsigned, int device) {
    NEED_DEVICE(device)
    // Never freed, so that the handle of a dead one stays a name for it.
    static std::vector<context*>& all = *new std::vector<context*>;
    *made = new context{all.size() + 1 + device_count, device, true};
    all.push_back(*made);
    current_contexts.push_back(*made);
    return SUCCESS;
}

EXPORT CUresult cuCtxDestroy_v2(context* gone) {
    gone->alive = false;
    if (current_context() == gone) {
        current_contexts.pop_back();
    }
    return SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRetain(context** result, int device) {
    NEED_DEVICE(device)
    *result = &primaries[device];
    return SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRelease_v2(int) { return SUCCESS; }

EXPORT CUresult cuCtxSetCurrent(context* next) {
    if (!current_contexts.empty()) {
        current_contexts.pop_back();
    }
    if (next) {
        current_contexts.push_back(next);
    }
    return SUCCESS;
}

EXPORT CUresult cuCtxPushCurrent_v2(context* next) {
    current_contexts.push_back(next);
    return SUCCESS;
}

EXPORT CUresult cuCtxPopCurrent_v2(context** popped) {
    NEED_CONTEXT
    if (popped) {
        *popped = current_context();
    }
    current_contexts.pop_back();
    return SUCCESS;
}

EXPORT CUresult cuCtxGetCurrent(context** result) {
    *result = current_context();
    return initialised ? SUCCESS : NOT_INITIALIZED;
}

EXPORT CUresult cuCtxGetDevice(int* device) {
    NEED_CONTEXT
    *device = current_context()->device;
    return SUCCESS;
}

EXPORT CUresult cuCtxGetId(context* of, unsigned long long* id) {
    of = of ? of : current_context();
    if (!of || !of->alive) {
        return INVALID_CONTEXT;
    }
    *id = of->id;
    return SUCCESS;
}

// ---- errors

static const struct {
    CUresult code;
    const char* name;
} error_names[] = {
    {SUCCESS, "CUDA_SUCCESS"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE"},
    {INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"},
    {NO_BINARY_FOR_GPU, "CUDA_ERROR_NO_BINARY_FOR_GPU"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND"},
    {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED"},
    {CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"},
    {CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"},
};

EXPORT CUresult cuGetErrorName(CUresult error, const char** name) {
    for (const auto& known : error_names) {
        if (known.code == error) {
            *name = known.name;
            return SUCCESS;
        }
    }
    *name = nullptr;
    return INVALID_VALUE;
}

EXPORT CUresult cuGetErrorString(CUresult error, const char** text) {
    return cuGetErrorName(error, text);
}

// =============================================================================
// Streams and graphs: a graph is the launches that a stream was given while it was captured
// =============================================================================

struct recorded_launch {
    std::vector<char> args;
    emulator::launch shape; // its args are the vector's, set when it runs
};

struct stream {
    context* home;
    bool capturing = false, strict = false, valid = true;
    std::vector<recorded_launch> launches = {};
};
typedef std::vector<recorded_launch> graph;

static std::vector<stream*> strict_captures; // streams under capture that forbid what may block

// What allocates, copies, loads or waits breaks every strict capture, as the driver has it.
static bool breaks_capture() {
    for (stream* each : strict_captures) {
        each->valid = false;
    }
    return !strict_captures.empty();
}
#define NOT_IN_CAPTURE                                                                             \
    if (breaks_capture()) {                                                                        \
        return CAPTURE_UNSUPPORTED;                                                                \
    }

EXPORT CUresult cuStreamCreate(stream** made, unsigned) {
    NEED_CONTEXT
    *made = new stream{current_context()};
    return SUCCESS;
}

EXPORT CUresult cuStreamDestroy_v2(stream* gone) {
    delete gone;
    return SUCCESS;
}

EXPORT CUresult cuStreamSynchronize(stream* in) {
    NEED_CONTEXT
    NOT_IN_CAPTURE
    if (in && in->capturing) {
        in->valid = false;
        return CAPTURE_UNSUPPORTED;
    }
    return SUCCESS;
}

EXPORT CUresult cuCtxSynchronize() {
    NEED_CONTEXT
    NOT_IN_CAPTURE
    return SUCCESS;
}

EXPORT CUresult cuStreamIsCapturing(stream* in, int* status) {
    NEED_CONTEXT
    *status = !in || !in->capturing ? 0 : in->valid ? 1 : 2;
    return SUCCESS;
}

// Modes: 0 global, 1 thread-local (here as global), 2 relaxed.
EXPORT CUresult cuStreamBeginCapture_v2(stream* in, int mode) {
    NEED_CONTEXT
    if (!in || in->capturing) {
        return INVALID_VALUE;
    }
    in->capturing = in->valid = true;
    if (mode != 2) {
        strict_captures.push_back(in);
    }
    return SUCCESS;
}

EXPORT CUresult cuStreamEndCapture(stream* in, graph** made) {
    NEED_CONTEXT
    *made = nullptr;
    if (!in || !in->capturing) {
        return INVALID_VALUE;
    }
    in->capturing = false;
    for (size_t i = 0; i < strict_captures.size(); ++i) {
        if (strict_captures[i] == in) {
            strict_captures.erase(strict_captures.begin() + (long)i);
            break;
        }
    }
    if (in->valid) {
        *made = new graph(in->launches);
    }
    in->launches.clear();
    return in->valid ? SUCCESS : CAPTURE_INVALIDATED;
}

EXPORT CUresult cuGraphInstantiateWithFlags(graph** made, const graph* from, unsigned long long) {
    *made = new graph(*from);
    return SUCCESS;
}

EXPORT CUresult cuGraphLaunch(const graph* what, stream*) {
    NEED_CONTEXT
    NOT_IN_CAPTURE
    for (const recorded_launch& each : *what) {
        emulator::launch work = each.shape;
        work.args = each.args.data();
        emulator::run(work);
    }
    return SUCCESS;
}

EXPORT CUresult cuGraphExecDestroy(graph* gone) {
    delete gone;
    return SUCCESS;
}

EXPORT CUresult cuGraphDestroy(graph* gone) {
    delete gone;
    return SUCCESS;
}

// =============================================================================
// Memory: device addresses are host addresses, and one card's mean nothing to the other
// =============================================================================

struct allocation {
    size_t bytes;
    context* home;
};
static std::mutex allocations_mutex;
static std::map<uint64_t, allocation> allocations; // by address

// The card whose memory an address is in, -1 for what is no allocation.
static int device_of(uint64_t address) {
    std::lock_guard<std::mutex> lock(allocations_mutex);
    auto after = allocations.upper_bound(address);
    if (after == allocations.begin()) {
        return -1;
    }
    const auto& [begin, found] = *std::prev(after);
    return address - begin < found.bytes ? found.home->device : -1;
}

// To the byte, so that ASan sees the first access past it. Filled with NaN.
EXPORT CUresult cuMemAlloc_v2(uint64_t* address, size_t bytes) {
    void* memory = nullptr;
    NEED_CONTEXT
    NOT_IN_CAPTURE
    if (bytes == 0) {
        return INVALID_VALUE;
    }
    if (posix_memalign(&memory, 256, bytes)) {
        return OUT_OF_MEMORY;
    }
    memset(memory, 0xff, bytes);
    *address = (uint64_t)(uintptr_t)memory;
    std::lock_guard<std::mutex> lock(allocations_mutex);
    allocations[*address] = {bytes, current_context()};
    return SUCCESS;
}

EXPORT CUresult cuMemFree_v2(uint64_t address) {
    NEED_CONTEXT
    NOT_IN_CAPTURE
    std::lock_guard<std::mutex> lock(allocations_mutex);
    if (allocations.erase(address) == 0) {
        return INVALID_VALUE;
    }
    free((void*)(uintptr_t)address);
    return SUCCESS;
}

static CUresult copy(void* to, const void* from, size_t bytes) {
    NEED_CONTEXT
    NOT_IN_CAPTURE
    memcpy(to, from, bytes);
    return SUCCESS;
}

EXPORT CUresult cuMemcpyHtoD_v2(uint64_t to, const void* from, size_t bytes) {
    return copy((void*)(uintptr_t)to, from, bytes);
}

EXPORT CUresult cuMemcpyDtoH_v2(void* to, uint64_t from, size_t bytes) {
    return copy(to, (const void*)(uintptr_t)from, bytes);
}

EXPORT CUresult cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, stream* in) {
    if (in && in->capturing) {
        emulator::die("cuMemcpyDtoHAsync: graphs hold launches only");
    }
    return copy(to, (const void*)(uintptr_t)from, bytes);
}

EXPORT CUresult cuMemsetD8_v2(uint64_t to, unsigned char value, size_t bytes) {
    NEED_CONTEXT
    NOT_IN_CAPTURE
    memset((void*)(uintptr_t)to, value, bytes);
    return SUCCESS;
}

// =============================================================================
// Modules and launches
// =============================================================================

// What a "CUBIN" is.
struct image {
    char magic[8];
    int32_t arch;
    char path[1024]; // of a shared object made of image.cpp
};
static const char image_magic[8] = {'K', 'M', 'L', 'A', 'E', 'M', 'U', '1'};

struct module;
struct function {
    module* home;
    const emulator::kernel* kernel;
    int shared_limit = shared_default;
};
struct module {
    context* home;
    const emulator::kernel* kernels;
    std::vector<function*> functions;
};

EXPORT CUresult cuModuleLoadData(module** loaded, const void* data) {
    image wanted;
    NEED_CONTEXT
    NOT_IN_CAPTURE
    memcpy(&wanted, data, sizeof wanted);
    if (memcmp(wanted.magic, image_magic, sizeof image_magic)) {
        return INVALID_IMAGE;
    }
    if (wanted.arch != KMLA_ARCH) {
        return NO_BINARY_FOR_GPU;
    }
    // Never closed: the object holds no state, and another module may be of the same path.
    void* object = dlopen(wanted.path, RTLD_NOW | RTLD_LOCAL);
    const emulator::kernel* (*kernels)() = nullptr;
    if (object) {
        *(void**)&kernels = dlsym(object, "kmla_emulator_kernels");
    }
    if (!kernels) {
        emulator::die("%s", dlerror());
    }
    *loaded = new module{current_context(), kernels(), {}};
    return SUCCESS;
}

EXPORT CUresult cuModuleUnload(module* gone) {
    NEED_CONTEXT
    for (function* each : gone->functions) {
        delete each;
    }
    delete gone;
    return SUCCESS;
}

EXPORT CUresult cuModuleGetFunction(function** found, module* from, const char* name) {
    NEED_CONTEXT
    for (const emulator::kernel* each = from->kernels; each; each = each->next) {
        if (strcmp(each->name, name) == 0) {
            *found = new function{from, each};
            from->functions.push_back(*found);
            return SUCCESS;
        }
    }
    return NOT_FOUND;
}

EXPORT CUresult cuFuncLoad(function*) {
    NEED_CONTEXT
    return SUCCESS;
}

EXPORT CUresult cuFuncGetAttribute(int* value, int attribute, const function* of) {
    NEED_CONTEXT
    switch (attribute) {
    case 0:
        *value = of->kernel->max_threads;
        break;
    case 1:
        *value = 0;
        break; // static shared memory
    case 3:
        *value = 0;
        break; // local memory
    case 4:
        *value = 32;
        break; // registers
    case 8:
        *value = of->shared_limit;
        break;
    default:
        emulator::die("cuFuncGetAttribute: attribute %d", attribute);
    }
    return SUCCESS;
}

EXPORT CUresult cuFuncSetAttribute(function* of, int attribute, int value) {
    NEED_CONTEXT
    switch (attribute) {
    case 8: // dynamic shared memory
        if (value < 0 || value > shared_optin) {
            return INVALID_VALUE;
        }
        of->shared_limit = value;
        break;
    case 9: // preferred carve-out, a hint in percent
        return value >= -1 && value <= 100 ? SUCCESS : INVALID_VALUE;
    default:
        emulator::die("cuFuncSetAttribute: attribute %d", attribute);
    }
    return SUCCESS;
}

// What a card makes of the other's memory is an illegal access, for one has no way into the other.
static void check_card_of_args(const emulator::kernel* what, const char* args, int device) {
    uint64_t word;
    for (size_t at = 0; at + sizeof word <= what->args_bytes; at += sizeof word) {
        memcpy(&word, args + at, sizeof word);
        int owner = device_of(word);
        if (owner >= 0 && owner != device) {
            emulator::die("%s on card %d: its argument at byte %zu is memory of card %d",
                          what->name, device, at, owner);
        }
    }
}

static CUresult launch(const function* what, const unsigned (&grid)[3], const unsigned (&block)[3],
                       unsigned shared_bytes, stream* in, bool programmatic, void** params,
                       void** extra) {
    NEED_CONTEXT
    uint64_t threads = (uint64_t)block[0] * block[1] * block[2];
    if (!what || what->home->home != current_context() || (in && in->home != current_context())) {
        return INVALID_HANDLE;
    }
    if (!grid[0] || !grid[1] || !grid[2] || grid[0] > 0x7fffffffu || grid[1] > 65535 ||
        grid[2] > 65535 || threads == 0 || threads > (uint64_t)what->kernel->max_threads ||
        shared_bytes > (unsigned)what->shared_limit || !params || extra) {
        return INVALID_VALUE;
    }
    if (block[1] != 1 || block[2] != 1) {
        emulator::die("%s: a block of %u x %u x %u threads", what->kernel->name, block[0], block[1],
                      block[2]);
    }
    const char* args = (const char*)params[0];
    check_card_of_args(what->kernel, args, current_context()->device);
    recorded_launch now = {{args, args + what->kernel->args_bytes},
                           {what->kernel,
                            nullptr,
                            {(int)grid[0], (int)grid[1], (int)grid[2]},
                            (int)threads,
                            shared_bytes,
                            programmatic}};
    if (in && in->capturing) {
        in->launches.push_back(now);
        return SUCCESS;
    }
    if (!in) { // the legacy stream waits for all others
        NOT_IN_CAPTURE
    }
    now.shape.args = now.args.data();
    emulator::run(now.shape);
    return SUCCESS;
}

EXPORT CUresult cuLaunchKernel(const function* what, unsigned grid_x, unsigned grid_y,
                               unsigned grid_z, unsigned block_x, unsigned block_y,
                               unsigned block_z, unsigned shared_bytes, stream* in, void** params,
                               void** extra) {
    return launch(what, {grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes, in,
                  false, params, extra);
}

struct CUlaunchAttribute {
    int id;
    int pad;
    union {
        char pad[64];
        int programmatic_allowed;
    } value;
};
struct CUlaunchConfig {
    unsigned grid[3];
    unsigned block[3];
    unsigned shared_bytes;
    stream* in;
    CUlaunchAttribute* attributes;
    unsigned attribute_count;
};

EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig* config, const function* what, void** params,
                                 void** extra) {
    bool programmatic = false;
    for (unsigned i = 0; i < config->attribute_count; ++i) {
        if (config->attributes[i].id != 6) { // programmatic stream serialization
            emulator::die("cuLaunchKernelEx: attribute %d", config->attributes[i].id);
        }
        programmatic = config->attributes[i].value.programmatic_allowed != 0;
    }
    if (programmatic && KMLA_ARCH < 90) {
        return NOT_SUPPORTED;
    }
    return launch(what, config->grid, config->block, config->shared_bytes, config->in, programmatic,
                  params, extra);
}

// =============================================================================
// NVRTC
// =============================================================================

typedef int nvrtcResult;
enum {
    NVRTC_SUCCESS = 0,
    NVRTC_INVALID_INPUT = 3,
    NVRTC_INVALID_OPTION = 5,
    NVRTC_COMPILATION = 6,
};

struct program {
    std::string source;
    std::string log;
    image cubin; // arch 0: none yet
};

// What NVRTC 13.0 knows.
static const int known_archs[] = {75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121};
static const int known_arch_count = sizeof known_archs / sizeof known_archs[0];

EXPORT nvrtcResult nvrtcVersion(int* major, int* minor) {
    *major = 13;
    *minor = 0;
    return NVRTC_SUCCESS;
}

EXPORT nvrtcResult nvrtcGetNumSupportedArchs(int* count) {
    *count = known_arch_count;
    return NVRTC_SUCCESS;
}

EXPORT nvrtcResult nvrtcGetSupportedArchs(int* archs) {
    memcpy(archs, known_archs, sizeof known_archs);
    return NVRTC_SUCCESS;
}

EXPORT const char* nvrtcGetErrorString(nvrtcResult error) {
    return error == NVRTC_SUCCESS          ? "NVRTC_SUCCESS"
           : error == NVRTC_INVALID_OPTION ? "NVRTC_ERROR_INVALID_OPTION"
           : error == NVRTC_COMPILATION    ? "NVRTC_ERROR_COMPILATION"
                                           : "NVRTC_ERROR_INVALID_INPUT";
}

EXPORT nvrtcResult nvrtcCreateProgram(program** made, const char* source, const char*, int headers,
                                      const char* const*, const char* const*) {
    if (!source || headers != 0) {
        return NVRTC_INVALID_INPUT;
    }
    *made = new program{source, "", {}};
    return NVRTC_SUCCESS;
}

EXPORT nvrtcResult nvrtcDestroyProgram(program** gone) {
    delete *gone;
    *gone = nullptr;
    return NVRTC_SUCCESS;
}

// The source but for its instructions file, which instructions.h stands in for; "" if it is not
// where it should be: after the facts, before the argument structs.
static std::string without_instructions(const std::string& source) {
    size_t begin = source.find("#line 1 \"instructions.cuh\"\n");
    size_t end = source.find("struct kmla_i_reader_args", begin);
    if (begin == std::string::npos || end == std::string::npos) {
        return "";
    }
    return source.substr(0, begin) + source.substr(end);
}

static std::string read_file(const std::string& path) {
    std::string content;
    FILE* file = fopen(path.c_str(), "rb");
    for (int c; file && (c = fgetc(file)) != EOF;) {
        content += (char)c;
    }
    if (file) {
        fclose(file);
    }
    return content;
}

static bool write_file(const std::string& path, const std::string& content) {
    FILE* file = fopen(path.c_str(), "wb");
    return file && fwrite(content.data(), 1, content.size(), file) == content.size() &&
           fclose(file) == 0;
}

// The path of the library that this function is in: images are linked against it.
static std::string own_path() {
    Dl_info info;
    char* path = dladdr((void*)&own_path, &info) ? realpath(info.dli_fname, nullptr) : nullptr;
    std::string result = path ? path : "";
    free(path);
    return result;
}

// Compiles unless an image of this very text and options is there from before.
static nvrtcResult compile(program* what, int arch, const std::string& defines) {
    std::string text = without_instructions(what->source);
    std::string flags = " -DKMLA_ARCH=" + std::to_string(arch) + defines;
    uint64_t hash = 0xcbf29ce484222325ull; // FNV-1a
    for (char c : text + flags) {
        hash = (hash ^ (unsigned char)c) * 0x100000001b3ull;
    }
    char name[32];
    snprintf(name, sizeof name, "/%016llx", (unsigned long long)hash);
    std::string path = std::string(KMLA_EMULATOR_IMAGES) + name;
    std::string mine = path + "." + std::to_string(getpid()); // until it is complete
    if (text.empty()) {
        what->log = "emulator: the source has no instructions.cuh\n";
        return NVRTC_COMPILATION;
    }
    if (access((path + ".so").c_str(), R_OK)) {
        std::string command = std::string(KMLA_EMULATOR_COMPILE) + flags +
                              " '-DKMLA_EMULATOR_TEXT=\"" + mine + ".inc\"' -c -o " + mine +
                              ".o " + KMLA_EMULATOR_SOURCES + "/image.cpp 2>" + mine +
                              ".log && " + KMLA_EMULATOR_LINK + " -shared -o " + mine + ".so " +
                              mine + ".o " + own_path() + " 2>>" + mine + ".log";
        bool good = write_file(mine + ".inc", text) && system(command.c_str()) == 0 &&
                    rename((mine + ".so").c_str(), (path + ".so").c_str()) == 0;
        what->log = read_file(mine + ".log");
        remove((mine + ".inc").c_str());
        remove((mine + ".log").c_str());
        remove((mine + ".o").c_str());
        if (!good) {
            return NVRTC_COMPILATION;
        }
    }
    memcpy(what->cubin.magic, image_magic, sizeof image_magic);
    snprintf(what->cubin.path, sizeof what->cubin.path, "%s.so", path.c_str());
    what->cubin.arch = arch;
    return NVRTC_SUCCESS;
}

EXPORT nvrtcResult nvrtcCompileProgram(program* what, int count, const char* const* options) {
    static const std::string architecture = "--gpu-architecture=sm_";
    std::string defines;
    int arch = 0;
    bool known = false;
    for (int i = 0; i < count; ++i) {
        std::string option = options[i];
        if (option.compare(0, architecture.size(), architecture) == 0) {
            arch = atoi(option.c_str() + architecture.size());
            if (option.back() == 'a') {
                defines += " -DKMLA_ARCH_SPECIFIC";
            }
        } else if (option.compare(0, 2, "-D") == 0) {
            defines += " '" + option + "'";
        }
    }
    for (int each : known_archs) {
        known |= each == arch;
    }
    if (!known) {
        what->log = "emulator: unknown architecture\n";
        return NVRTC_INVALID_OPTION;
    }
    return compile(what, arch, defines);
}

EXPORT nvrtcResult nvrtcGetProgramLogSize(program* of, size_t* bytes) {
    *bytes = of->log.size() + 1;
    return NVRTC_SUCCESS;
}

EXPORT nvrtcResult nvrtcGetProgramLog(program* of, char* log) {
    memcpy(log, of->log.c_str(), of->log.size() + 1);
    return NVRTC_SUCCESS;
}

EXPORT nvrtcResult nvrtcGetCUBINSize(program* of, size_t* bytes) {
    *bytes = of->cubin.arch ? sizeof of->cubin : 0;
    return NVRTC_SUCCESS;
}

EXPORT nvrtcResult nvrtcGetCUBIN(program* of, char* cubin) {
    memcpy(cubin, &of->cubin, sizeof of->cubin);
    return of->cubin.arch ? NVRTC_SUCCESS : NVRTC_INVALID_INPUT;
}
