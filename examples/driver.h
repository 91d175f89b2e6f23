// driver.h - the CUDA driver calls that an engine has anyway, for the example and the benchmark.
//
// libcuda is opened at run time and no CUDA header is needed. Every failure ends the program with
// a message, as in a program it may; kimi_mla.h itself never does that.

#ifndef EXAMPLES_DRIVER_H
#define EXAMPLES_DRIVER_H

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// X(field, symbol, parameters). Symbols carry the suffix of the ABI that is meant.
#define DRIVER_FUNCTIONS(X)                                                                        \
    X(init, "cuInit", (unsigned flags))                                                            \
    X(driver_version, "cuDriverGetVersion", (int* version))                                        \
    X(error_name, "cuGetErrorName", (int result, const char** name))                               \
    X(device_count, "cuDeviceGetCount", (int* count))                                              \
    X(device_get, "cuDeviceGet", (int* device, int ordinal))                                       \
    X(device_name, "cuDeviceGetName", (char* name, int bytes, int device))                         \
    X(context_retain, "cuDevicePrimaryCtxRetain", (void** context, int device))                    \
    X(context_release, "cuDevicePrimaryCtxRelease_v2", (int device))                               \
    X(context_set, "cuCtxSetCurrent", (void* context))                                             \
    X(context_synchronize, "cuCtxSynchronize", (void))                                             \
    X(memory_alloc, "cuMemAlloc_v2", (uint64_t * address, size_t bytes))                           \
    X(memory_free, "cuMemFree_v2", (uint64_t address))                                             \
    X(memory_set, "cuMemsetD8_v2", (uint64_t address, unsigned char value, size_t bytes))          \
    X(copy_to_device, "cuMemcpyHtoD_v2", (uint64_t to, const void* from, size_t bytes))            \
    X(copy_to_host, "cuMemcpyDtoH_v2", (void* to, uint64_t from, size_t bytes))                    \
    X(stream_create, "cuStreamCreate", (void** stream, unsigned flags))                            \
    X(stream_destroy, "cuStreamDestroy_v2", (void* stream))                                        \
    X(stream_synchronize, "cuStreamSynchronize", (void* stream))

// What timing needs; a driver without graphs computes as well, untimed.
#define DRIVER_TIMING_FUNCTIONS(X)                                                                 \
    X(capture_begin, "cuStreamBeginCapture_v2", (void* stream, int mode))                          \
    X(capture_end, "cuStreamEndCapture", (void* stream, void** graph))                             \
    X(graph_instantiate, "cuGraphInstantiateWithFlags",                                            \
      (void** executable, void* graph, unsigned long long flags))                                  \
    X(graph_launch, "cuGraphLaunch", (void* executable, void* stream))                             \
    X(graph_exec_destroy, "cuGraphExecDestroy", (void* executable))                                \
    X(graph_destroy, "cuGraphDestroy", (void* graph))                                              \
    X(event_create, "cuEventCreate", (void** event, unsigned flags))                               \
    X(event_record, "cuEventRecord", (void* event, void* stream))                                  \
    X(event_synchronize, "cuEventSynchronize", (void* event))                                      \
    X(event_elapsed, "cuEventElapsedTime", (float* milliseconds, void* begin, void* end))          \
    X(event_destroy, "cuEventDestroy_v2", (void* event))

// What may be missing without harm.
#define DRIVER_OPTIONAL_FUNCTIONS(X)                                                               \
    X(graph_nodes, "cuGraphGetNodes", (void* graph, void** nodes, size_t* count))                  \
    X(graph_node_type, "cuGraphNodeGetType", (void* node, int* type))

#define DRIVER_NODE_KERNEL 0
#define DRIVER_CAPTURE_THREAD_LOCAL 1
#define DRIVER_STREAM_NON_BLOCKING 1

typedef struct driver {
#define DRIVER_POINTER(field, symbol, parameters) int(*field) parameters;
    DRIVER_FUNCTIONS(DRIVER_POINTER)
    DRIVER_TIMING_FUNCTIONS(DRIVER_POINTER)
    DRIVER_OPTIONAL_FUNCTIONS(DRIVER_POINTER)
#undef DRIVER_POINTER
    void* library; // handle, also for kmla_gpu_desc
    int can_time;
    int version; // 13000 is CUDA 13.0
    char card[128];
} driver;

static inline void driver_must(const driver* cuda, int result, const char* call) {
    if (result != 0) {
        const char* name = NULL;
        cuda->error_name(result, &name);
        fprintf(stderr, "%s: %s (%d)\n", call, name ? name : "unknown error", result);
        exit(1);
    }
}

static inline int driver_find(void* library, const char* symbol, void* pointer) {
    void* found = dlsym(library, symbol); // copied, as C knows no cast to a function pointer
    memcpy(pointer, &found, sizeof found);
    return found != NULL;
}

// Opens libcuda (`path` NULL: by its usual name) and makes a card's primary context current. 1 if
// there is such a card, else 0 and why.
static inline int driver_open_card(driver* cuda, const char* path, int ordinal, const char** why) {
    int count = 0, device;
    void* context;
    memset(cuda, 0, sizeof *cuda);
    cuda->library = dlopen(path ? path : "libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!cuda->library) {
        *why = "libcuda was not found";
        return 0;
    }
#define DRIVER_NEED(field, symbol, parameters)                                                     \
    if (!driver_find(cuda->library, symbol, &cuda->field)) {                                       \
        *why = "libcuda has no " symbol;                                                           \
        return 0;                                                                                  \
    }
    DRIVER_FUNCTIONS(DRIVER_NEED)
#undef DRIVER_NEED
    cuda->can_time = 1;
#define DRIVER_TRY(field, symbol, parameters)                                                      \
    cuda->can_time &= driver_find(cuda->library, symbol, &cuda->field);
    DRIVER_TIMING_FUNCTIONS(DRIVER_TRY)
#undef DRIVER_TRY
#define DRIVER_LOOK(field, symbol, parameters)                                                     \
    driver_find(cuda->library, symbol, &cuda->field);
    DRIVER_OPTIONAL_FUNCTIONS(DRIVER_LOOK)
#undef DRIVER_LOOK
    if (cuda->init(0) != 0 || cuda->device_count(&count) != 0 || count == 0) {
        *why = "libcuda sees no card";
        return 0;
    }
    if (ordinal >= count) {
        *why = "libcuda sees fewer cards";
        return 0;
    }
    driver_must(cuda, cuda->device_get(&device, ordinal), "cuDeviceGet");
    driver_must(cuda, cuda->driver_version(&cuda->version), "cuDriverGetVersion");
    driver_must(cuda, cuda->device_name(cuda->card, (int)sizeof cuda->card, device),
                "cuDeviceGetName");
    driver_must(cuda, cuda->context_retain(&context, device), "cuDevicePrimaryCtxRetain");
    driver_must(cuda, cuda->context_set(context), "cuCtxSetCurrent");
    return 1;
}

// The first card.
static inline int driver_open(driver* cuda, const char* path, const char** why) {
    return driver_open_card(cuda, path, 0, why);
}

static inline uint64_t driver_alloc(const driver* cuda, size_t bytes) {
    uint64_t address = 0;
    driver_must(cuda, cuda->memory_alloc(&address, bytes ? bytes : 1), "cuMemAlloc");
    return address;
}

static inline void driver_free(const driver* cuda, uint64_t address) {
    driver_must(cuda, cuda->memory_free(address), "cuMemFree");
}

static inline void driver_upload(const driver* cuda, uint64_t to, const void* from, size_t bytes) {
    driver_must(cuda, cuda->copy_to_device(to, from, bytes), "cuMemcpyHtoD");
    // A copy of pageable memory may return while its last part is under way, and a stream that does
    // not block would not wait for it.
    driver_must(cuda, cuda->context_synchronize(), "cuCtxSynchronize");
}

// Waits for everything launched so far.
static inline void driver_download(const driver* cuda, void* to, uint64_t from, size_t bytes) {
    driver_must(cuda, cuda->context_synchronize(), "cuCtxSynchronize");
    driver_must(cuda, cuda->copy_to_host(to, from, bytes), "cuMemcpyDtoH");
}

static inline int driver_compare_floats(const void* left, const void* right) {
    float a = *(const float*)left, b = *(const float*)right;
    return (a > b) - (a < b);
}

// Milliseconds of one replay.
static inline float driver_replay(const driver* cuda, void* executable, void* stream, void* begin,
                                  void* end) {
    float milliseconds = 0;
    driver_must(cuda, cuda->event_record(begin, stream), "cuEventRecord");
    driver_must(cuda, cuda->graph_launch(executable, stream), "cuGraphLaunch");
    driver_must(cuda, cuda->event_record(end, stream), "cuEventRecord");
    driver_must(cuda, cuda->event_synchronize(end), "cuEventSynchronize");
    driver_must(cuda, cuda->event_elapsed(&milliseconds, begin, end), "cuEventElapsedTime");
    return milliseconds;
}

typedef struct driver_time {
    double median_us; // of one replay of the graph
    double least_us;
    int kernels; // nodes of the graph that are kernels; 0 where the driver does not tell
} driver_time;

#define DRIVER_WARM_UP_MILLISECONDS 30 // clocks rise, caches fill
#define DRIVER_MOST_REPLAYS 1000

static inline driver_time driver_time_replays(const driver* cuda, void* executable, void* stream,
                                              int replays) {
    float times[DRIVER_MOST_REPLAYS], warmed = 0;
    void *begin, *end;
    driver_time result;
    replays = replays < 1 ? 1 : replays > DRIVER_MOST_REPLAYS ? DRIVER_MOST_REPLAYS : replays;
    driver_must(cuda, cuda->event_create(&begin, 0), "cuEventCreate");
    driver_must(cuda, cuda->event_create(&end, 0), "cuEventCreate");
    while (warmed < DRIVER_WARM_UP_MILLISECONDS) {
        warmed += driver_replay(cuda, executable, stream, begin, end);
    }
    for (int i = 0; i < replays; i++) {
        times[i] = driver_replay(cuda, executable, stream, begin, end);
    }
    driver_must(cuda, cuda->event_destroy(begin), "cuEventDestroy");
    driver_must(cuda, cuda->event_destroy(end), "cuEventDestroy");
    qsort(times, (size_t)replays, sizeof times[0], driver_compare_floats);
    result.median_us = 1e3 * times[replays / 2];
    result.least_us = 1e3 * times[0];
    result.kernels = 0;
    return result;
}

static inline int driver_kernels(const driver* cuda, void* graph) {
    size_t count = 0;
    void** nodes;
    int kernels = 0;
    if (!cuda->graph_nodes || !cuda->graph_node_type) {
        return 0;
    }
    driver_must(cuda, cuda->graph_nodes(graph, NULL, &count), "cuGraphGetNodes");
    nodes = (void**)malloc((count + 1) * sizeof *nodes);
    if (!nodes) {
        fprintf(stderr, "no memory for %lu nodes\n", (unsigned long)count);
        exit(1);
    }
    driver_must(cuda, cuda->graph_nodes(graph, nodes, &count), "cuGraphGetNodes");
    for (size_t i = 0; i < count; i++) {
        int type = -1;
        driver_must(cuda, cuda->graph_node_type(nodes[i], &type), "cuGraphNodeGetType");
        kernels += type == DRIVER_NODE_KERNEL;
    }
    free(nodes);
    return kernels;
}

// Captures what `launch` launches into a graph, replays it and times every replay. Where the
// driver has no graphs, launches once and leaves the times 0.
static inline driver_time driver_time_graph(const driver* cuda,
                                            void (*launch)(void* data, void* stream), void* data,
                                            int replays) {
    driver_time result = {0.0, 0.0, 0};
    void *stream, *graph, *executable;
    // The stream does not wait for copies of the default stream; this does.
    driver_must(cuda, cuda->context_synchronize(), "cuCtxSynchronize");
    driver_must(cuda, cuda->stream_create(&stream, DRIVER_STREAM_NON_BLOCKING), "cuStreamCreate");
    if (cuda->can_time) {
        driver_must(cuda, cuda->capture_begin(stream, DRIVER_CAPTURE_THREAD_LOCAL),
                    "cuStreamBeginCapture");
        launch(data, stream);
        driver_must(cuda, cuda->capture_end(stream, &graph), "cuStreamEndCapture");
        driver_must(cuda, cuda->graph_instantiate(&executable, graph, 0), "cuGraphInstantiate");
        result = driver_time_replays(cuda, executable, stream, replays);
        result.kernels = driver_kernels(cuda, graph);
        driver_must(cuda, cuda->graph_exec_destroy(executable), "cuGraphExecDestroy");
        driver_must(cuda, cuda->graph_destroy(graph), "cuGraphDestroy");
    } else {
        launch(data, stream);
        driver_must(cuda, cuda->stream_synchronize(stream), "cuStreamSynchronize");
    }
    driver_must(cuda, cuda->stream_destroy(stream), "cuStreamDestroy");
    return result;
}

#endif
