// device_backend.h - where the device tests get memory and launches from: a GPU through libcuda, an
// emulated one (a library that exports the same functions), or the host reader.
//
// Device memory is only touched through this file, so that every test is written once. Each buffer
// has exactly the bytes asked for, between two canaries, and begins 16 bytes past an aligned
// address, so that nothing can count on more alignment than the API asks for.

#ifndef KMLA_TESTS_DEVICE_BACKEND_H
#define KMLA_TESTS_DEVICE_BACKEND_H

#include <dlfcn.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

// =============================================================================
// The driver, without cuda.h
// =============================================================================

typedef struct cuda_location {
    int32_t type; // 1: a device
    int32_t id;
} cuda_location;

typedef struct cuda_allocation { // CUmemAllocationProp
    int32_t type;         // 1: pinned
    int32_t handle_types; // 0: not to be shared
    cuda_location location;
    void* win32_meta_data;
    unsigned char flags[8];
} cuda_allocation;

typedef struct cuda_access { // CUmemAccessDesc
    cuda_location location;
    int32_t flags; // 3: read and write
} cuda_access;

typedef struct cuda_resource { // CUdevResource, of CUDA 12.4 to 13
    int32_t type; // 1: multiprocessors
    char padding[92];
    uint32_t multiprocessors;
    char rest[44];
} cuda_resource;

enum { CUDA_CAPTURE_GLOBAL = 0, CUDA_CAPTURE_THREAD_LOCAL = 1, CUDA_CAPTURE_RELAXED = 2 };
enum { CUDA_CAPTURE_ACTIVE = 1 }; // a status

// X(field, symbol, parameters). The optional ones are NULL where a library lacks them.
#define DRIVER_NEEDED(X)                                                                        \
    X(init, "cuInit", (unsigned flags))                                                         \
    X(device_get, "cuDeviceGet", (int* device, int ordinal))                                    \
    X(device_name, "cuDeviceGetName", (char* name, int bytes, int device))                      \
    X(context_retain, "cuDevicePrimaryCtxRetain", (void** context, int device))                 \
    X(context_set, "cuCtxSetCurrent", (void* context))                                          \
    X(context_get, "cuCtxGetCurrent", (void** context))                                         \
    X(synchronize, "cuCtxSynchronize", (void))                                                  \
    X(error_name, "cuGetErrorName", (int result, const char** name))                            \
    X(alloc, "cuMemAlloc_v2", (uint64_t* address, size_t bytes))                                \
    X(release, "cuMemFree_v2", (uint64_t address))                                              \
    X(to_device, "cuMemcpyHtoD_v2", (uint64_t to, const void* from, size_t bytes))              \
    X(to_host, "cuMemcpyDtoH_v2", (void* to, uint64_t from, size_t bytes))                      \
    X(set, "cuMemsetD8_v2", (uint64_t to, unsigned char value, size_t bytes))                   \
    X(stream_create, "cuStreamCreate", (void** stream, unsigned flags))                         \
    X(stream_destroy, "cuStreamDestroy_v2", (void* stream))

#define DRIVER_OPTIONAL(X)                                                                      \
    X(context_create, "cuCtxCreate_v2", (void** context, unsigned flags, int device))           \
    X(context_destroy, "cuCtxDestroy_v2", (void* context))                                      \
    X(device_count, "cuDeviceGetCount", (int* count))                                           \
    X(device_resource, "cuDeviceGetDevResource",                                                \
      (int device, cuda_resource* resource, int type))                                          \
    X(resource_split, "cuDevSmResourceSplitByCount",                                            \
      (cuda_resource* groups, unsigned* count, const cuda_resource* of, cuda_resource* rest,    \
       unsigned flags, unsigned least))                                                         \
    X(resource_describe, "cuDevResourceGenerateDesc",                                           \
      (void** description, cuda_resource* resources, unsigned count))                           \
    X(green_create, "cuGreenCtxCreate",                                                         \
      (void** green, void* description, int device, unsigned flags))                            \
    X(green_destroy, "cuGreenCtxDestroy", (void* green))                                        \
    X(green_context, "cuCtxFromGreenCtx", (void** context, void* green))                        \
    X(memory_info, "cuMemGetInfo_v2", (size_t* left, size_t* total))                            \
    X(capture_begin, "cuStreamBeginCapture_v2", (void* stream, int mode))                       \
    X(capture_status, "cuStreamIsCapturing", (void* stream, int* status))                       \
    X(capture_end, "cuStreamEndCapture", (void* stream, void** graph))                          \
    X(graph_instantiate, "cuGraphInstantiateWithFlags",                                         \
      (void** executable, void* graph, unsigned long long flags))                               \
    X(graph_launch, "cuGraphLaunch", (void* executable, void* stream))                          \
    X(graph_exec_destroy, "cuGraphExecDestroy", (void* executable))                             \
    X(graph_destroy, "cuGraphDestroy", (void* graph))                                           \
    X(address_reserve, "cuMemAddressReserve",                                                   \
      (uint64_t* address, size_t bytes, size_t alignment, uint64_t wanted,                      \
       unsigned long long flags))                                                               \
    X(address_free, "cuMemAddressFree", (uint64_t address, size_t bytes))                       \
    X(memory_create, "cuMemCreate",                                                             \
      (uint64_t* handle, size_t bytes, const cuda_allocation* what, unsigned long long flags))  \
    X(memory_release, "cuMemRelease", (uint64_t handle))                                        \
    X(memory_map, "cuMemMap",                                                                   \
      (uint64_t address, size_t bytes, size_t offset, uint64_t handle,                          \
       unsigned long long flags))                                                               \
    X(memory_unmap, "cuMemUnmap", (uint64_t address, size_t bytes))                             \
    X(memory_access, "cuMemSetAccess",                                                          \
      (uint64_t address, size_t bytes, const cuda_access* access, size_t count))

#define DRIVER_FIELD(field, symbol, parameters) int(*field) parameters;
typedef struct driver_functions {
    DRIVER_NEEDED(DRIVER_FIELD)
    DRIVER_OPTIONAL(DRIVER_FIELD)
} driver_functions;
#undef DRIVER_FIELD

typedef enum backend_kind { BACKEND_GPU, BACKEND_EMULATED, BACKEND_HOST } backend_kind;

static struct backend {
    backend_kind kind;
    const char* library; // of the emulator, NULL for the real ones
    driver_functions driver;
    int ordinal;
    char name[128];
    void* context;
    void* stream;
    kmla_gpu* gpu;
    kmla_device card;
    size_t canary_bytes; // 0 where a sanitizer watches
} backend;

// Ends the program: without its device no test can go on.
static void backend_stop(const char* format, ...) {
    va_list values;
    va_start(values, format);
    printf("STOP: ");
    vprintf(format, values);
    printf("\n");
    va_end(values);
    exit(1);
}

static void driver_check(int result, const char* call) {
    const char* name = NULL;
    if (result != 0) {
        backend.driver.error_name(result, &name);
        backend_stop("%s: %s (%d)", call, name == NULL ? "unknown error" : name, result);
    }
}

static int on_host(void) { return backend.kind == BACKEND_HOST; }

// The card to plan for; NULL for the host reader.
static const kmla_device* backend_card(void) { return on_host() ? NULL : &backend.card; }

static void backend_load_driver(void* library) {
    void* symbol;
#define DRIVER_FIND(field, name, parameters)                                                    \
    symbol = dlsym(library, name);                                                              \
    memcpy(&backend.driver.field, &symbol, sizeof symbol);
#define DRIVER_REQUIRE(field, name, parameters)                                                 \
    DRIVER_FIND(field, name, parameters)                                                        \
    if (symbol == NULL) {                                                                       \
        backend_stop("the driver has no %s", name);                                             \
    }
    DRIVER_NEEDED(DRIVER_REQUIRE)
    DRIVER_OPTIONAL(DRIVER_FIND)
#undef DRIVER_FIND
#undef DRIVER_REQUIRE
}

static void backend_open_gpu(void) {
    const char* path = backend.library == NULL ? "libcuda.so.1" : backend.library;
    void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    kmla_gpu_desc desc;
    kmla_error error;
    if (library == NULL) {
        backend_stop("%s", dlerror());
    }
    backend_load_driver(library);
    driver_check(backend.driver.init(0), "cuInit");
    driver_check(backend.driver.device_get(&backend.ordinal, 0), "cuDeviceGet");
    driver_check(backend.driver.device_name(backend.name, sizeof backend.name, backend.ordinal),
                 "cuDeviceGetName");
    driver_check(backend.driver.context_retain(&backend.context, backend.ordinal),
                 "cuDevicePrimaryCtxRetain");
    driver_check(backend.driver.context_set(backend.context), "cuCtxSetCurrent");
    // Flags 0: ordered with the copies, which use the legacy stream.
    driver_check(backend.driver.stream_create(&backend.stream, 0), "cuStreamCreate");
    memset(&desc, 0, sizeof desc);
    desc.cuda_path = backend.library;
    desc.nvrtc_path = backend.library;
    if (kmla_gpu_open(&desc, &backend.gpu, &error) != KMLA_OK ||
        kmla_gpu_device(backend.gpu, &backend.card, &error) != KMLA_OK) {
        backend_stop("%s", error.message);
    }
}

static void backend_open(int host, const char* library, int watched) {
    void* self = dlopen(NULL, RTLD_NOW);
    watched = watched || (self != NULL && dlsym(self, "__asan_init") != NULL);
    backend.canary_bytes = watched ? 0 : 256;
    backend.kind = host ? BACKEND_HOST : library == NULL ? BACKEND_GPU : BACKEND_EMULATED;
    backend.library = library;
    snprintf(backend.name, sizeof backend.name, "host reader");
    if (!host) {
        backend_open_gpu();
    }
}

// =============================================================================
// Memory
// =============================================================================

static void copy_to_device(uint64_t to, const void* from, size_t bytes) {
    if (bytes == 0) {
        return;
    }
    if (on_host()) {
        memcpy((void*)(uintptr_t)to, from, bytes);
    } else {
        driver_check(backend.driver.to_device(to, from, bytes), "cuMemcpyHtoD");
    }
}

static void copy_to_host(void* to, uint64_t from, size_t bytes) {
    if (bytes == 0) {
        return;
    }
    if (on_host()) {
        memcpy(to, (const void*)(uintptr_t)from, bytes);
    } else {
        driver_check(backend.driver.to_host(to, from, bytes), "cuMemcpyDtoH");
    }
}

static void fill_device(uint64_t to, int value, size_t bytes) {
    if (bytes == 0) {
        return;
    }
    if (on_host()) {
        memset((void*)(uintptr_t)to, value, bytes);
    } else {
        driver_check(backend.driver.set(to, (unsigned char)value, bytes), "cuMemsetD8");
    }
}

static void synchronize(void) {
    if (!on_host()) {
        driver_check(backend.driver.synchronize(), "cuCtxSynchronize");
    }
}

#define FRONT_BYTES 16 // of canary; an address that is a multiple of 16 and of no more
#define CANARY 0xa5

typedef struct device_buffer {
    uint64_t address; // 0 if there are no bytes
    size_t bytes;
} device_buffer;

static device_buffer device_make(size_t bytes, int fill) {
    const size_t all = FRONT_BYTES + bytes + backend.canary_bytes;
    device_buffer buffer = {0, bytes};
    uint64_t base = 0;
    if (bytes == 0) {
        return buffer;
    }
    if (on_host()) {
        base = (uint64_t)(uintptr_t)malloc(all);
        if (base == 0) {
            backend_stop("no memory for %zu bytes", all);
        }
    } else {
        driver_check(backend.driver.alloc(&base, all), "cuMemAlloc");
    }
    buffer.address = base + FRONT_BYTES;
    fill_device(base, CANARY, FRONT_BYTES);
    fill_device(buffer.address, fill, bytes);
    fill_device(buffer.address + bytes, CANARY, backend.canary_bytes);
    return buffer;
}

static device_buffer device_copy(const void* from, size_t bytes) {
    const device_buffer buffer = device_make(bytes, 0);
    copy_to_device(buffer.address, from, bytes);
    return buffer;
}

static void device_free(device_buffer* buffer) {
    if (buffer->address != 0 && on_host()) {
        free((void*)(uintptr_t)(buffer->address - FRONT_BYTES));
    } else if (buffer->address != 0) {
        driver_check(backend.driver.release(buffer->address - FRONT_BYTES), "cuMemFree");
    }
    buffer->address = 0;
    buffer->bytes = 0;
}

// 1 if all device bytes of a range have one value.
static int device_all_bytes(uint64_t address, size_t bytes, int value) {
    uint8_t part[4096];
    for (size_t at = 0; at < bytes; at += sizeof part) {
        const size_t count = bytes - at < sizeof part ? bytes - at : sizeof part;
        copy_to_host(part, address + at, count);
        for (size_t i = 0; i < count; i++) {
            if (part[i] != value) {
                return 0;
            }
        }
    }
    return 1;
}

static int device_canaries_whole(const device_buffer* buffer) {
    return buffer->address == 0 ||
           (device_all_bytes(buffer->address - FRONT_BYTES, FRONT_BYTES, CANARY) &&
            device_all_bytes(buffer->address + buffer->bytes, backend.canary_bytes, CANARY));
}

// =============================================================================
// A pool of many gigabytes of which only a few places exist
// =============================================================================

#define SPARSE_PLACES 8
#define SPARSE_PLACE_BYTES ((size_t)4 << 20) // at least a page of any format; 2 MiB granules

typedef struct sparse_pool {
    uint64_t address; // 0: there is no such memory here
    size_t bytes;     // reserved
    size_t offsets[SPARSE_PLACES];
    uint64_t handles[SPARSE_PLACES];
    int places;
} sparse_pool;

static cuda_allocation sparse_allocation(void) {
    cuda_allocation what;
    memset(&what, 0, sizeof what);
    what.type = 1;
    what.location.type = 1;
    what.location.id = backend.ordinal;
    return what;
}

static sparse_pool sparse_reserve(size_t bytes) {
    sparse_pool pool;
    memset(&pool, 0, sizeof pool);
    pool.bytes = (bytes / SPARSE_PLACE_BYTES + 2) * SPARSE_PLACE_BYTES;
    if (backend.kind != BACKEND_GPU) { // device addresses are host addresses
        void* memory = mmap(NULL, pool.bytes, PROT_NONE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        pool.address = memory == MAP_FAILED ? 0 : (uint64_t)(uintptr_t)memory;
    } else if (backend.driver.address_reserve != NULL) {
        const int result = backend.driver.address_reserve(&pool.address, pool.bytes,
                                                          SPARSE_PLACE_BYTES, 0, 0);
        driver_check(result, "cuMemAddressReserve");
    }
    return pool;
}

// Makes the place around an offset exist, filled with one byte. A place made before stays.
static void sparse_touch(sparse_pool* pool, size_t offset, int fill) {
    const size_t at = offset / SPARSE_PLACE_BYTES * SPARSE_PLACE_BYTES;
    const uint64_t address = pool->address + at;
    for (int i = 0; i < pool->places; i++) {
        if (pool->offsets[i] == at) {
            return;
        }
    }
    if (pool->places == SPARSE_PLACES) {
        backend_stop("a sparse pool has %d places", SPARSE_PLACES);
    }
    if (backend.kind != BACKEND_GPU) {
        if (mprotect((void*)(uintptr_t)address, SPARSE_PLACE_BYTES, PROT_READ | PROT_WRITE) != 0) {
            backend_stop("mprotect failed");
        }
    } else {
        const cuda_allocation what = sparse_allocation();
        cuda_access access;
        uint64_t* handle = &pool->handles[pool->places];
        access.location = what.location;
        access.flags = 3;
        driver_check(backend.driver.memory_create(handle, SPARSE_PLACE_BYTES, &what, 0),
                     "cuMemCreate");
        driver_check(backend.driver.memory_map(address, SPARSE_PLACE_BYTES, 0, *handle, 0),
                     "cuMemMap");
        driver_check(backend.driver.memory_access(address, SPARSE_PLACE_BYTES, &access, 1),
                     "cuMemSetAccess");
    }
    pool->offsets[pool->places++] = at;
    fill_device(address, fill, SPARSE_PLACE_BYTES);
}

static void sparse_free(sparse_pool* pool) {
    if (pool->address != 0 && backend.kind != BACKEND_GPU) {
        munmap((void*)(uintptr_t)pool->address, pool->bytes);
        return;
    }
    for (int i = 0; i < pool->places; i++) {
        driver_check(backend.driver.memory_unmap(pool->address + pool->offsets[i],
                                                 SPARSE_PLACE_BYTES), "cuMemUnmap");
        driver_check(backend.driver.memory_release(pool->handles[i]), "cuMemRelease");
    }
    if (pool->address != 0) {
        driver_check(backend.driver.address_free(pool->address, pool->bytes),
                     "cuMemAddressFree");
    }
}

// =============================================================================
// Calls
// =============================================================================

// What the last launch wrote is there when these return.

static kmla_status call_decode(const kmla_plan* plan, const kmla_decode* args,
                               kmla_error* error) {
    kmla_status status;
    if (on_host()) {
        return kmla_host_decode(plan, args, NULL, error);
    }
    status = kmla_gpu_decode(backend.gpu, plan, args, backend.stream, error);
    synchronize();
    return status;
}

static kmla_status call_combine(const kmla_combine* args, kmla_error* error) {
    kmla_status status;
    if (on_host()) {
        return kmla_host_combine(args, error);
    }
    status = kmla_gpu_combine(backend.gpu, args, backend.stream, error);
    synchronize();
    return status;
}

static kmla_status call_write_kv(const kmla_kv_write* args, kmla_error* error) {
    kmla_status status;
    if (on_host()) {
        return kmla_host_write_kv(args, error);
    }
    status = kmla_gpu_write_kv(backend.gpu, args, backend.stream, error);
    synchronize();
    return status;
}

static kmla_status call_write_query(const kmla_query_write* args, kmla_error* error) {
    kmla_status status;
    if (on_host()) {
        return kmla_host_write_query(args, error);
    }
    status = kmla_gpu_write_query(backend.gpu, args, backend.stream, error);
    synchronize();
    return status;
}

// A plan's kernels, or with NULL the writers and the combine. Does nothing the second time.
static void prepare(const kmla_plan* plan) {
    kmla_error error;
    if (!on_host() && kmla_gpu_prepare(backend.gpu, plan, NULL, &error) != KMLA_OK) {
        backend_stop("kmla_gpu_prepare: %s", error.message);
    }
}

#endif // KMLA_TESTS_DEVICE_BACKEND_H
