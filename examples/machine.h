// machine.h - where an example runs: the same calls for a GPU and for the host reader. Include
// kimi_mla.h first. What fails ends the program.

#ifndef MACHINE_H
#define MACHINE_H

#include "driver.h"
#include "stand_in.h"

static kmla_error error;
static int mismatches;
static char speaker[16]; // in messages, e.g. " on rank 3"

static inline void expect(int right, const char* what) {
    if (!right) {
        printf("MISMATCH%s: %s\n", speaker, what);
        fflush(stdout);
        mismatches++;
    }
}

static inline void must(kmla_status status) {
    if (status != KMLA_OK) {
        fprintf(stderr, "%s%s: %s\n", kmla_status_name(status), speaker, error.message);
        exit(1);
    }
}

typedef struct machine {
    kmla_gpu* gpu; // NULL: the host
    driver cuda;
    kmla_device card; // all zero on the host
    void* stream;     // that waits for no other
    int has_graphs;
} machine;

// The card `ordinal`, prepared for writers and combine; below 0 the host. NULL, or why it is the
// host although a card was asked for.
static inline const char* machine_open(machine* m, const char* library, int ordinal) {
    const char* why_not = NULL;
    kmla_gpu_desc desc;
    memset(m, 0, sizeof *m);
    if (ordinal < 0 || !driver_open_card(&m->cuda, library, ordinal, &why_not)) {
        return why_not;
    }
    memset(&desc, 0, sizeof desc);
    desc.cuda_handle = m->cuda.library;
    desc.nvrtc_handle = library ? m->cuda.library : NULL;
    must(kmla_gpu_open(&desc, &m->gpu, &error));
    must(kmla_gpu_device(m->gpu, &m->card, &error));
    must(kmla_gpu_prepare(m->gpu, NULL, NULL, &error));
    driver_must(&m->cuda, m->cuda.stream_create(&m->stream, DRIVER_STREAM_NON_BLOCKING),
                "cuStreamCreate");
    m->has_graphs = m->cuda.capture_begin && m->cuda.capture_end && m->cuda.graph_instantiate &&
                    m->cuda.graph_launch && m->cuda.graph_exec_destroy && m->cuda.graph_destroy;
    return NULL;
}

// Opens the first card, or the host, and says which.
static inline void machine_open_first(machine* m, const char* library) {
    const char* why_not = machine_open(m, library, 0);
    if (why_not) {
        printf("ran on: host reader (%s)\n\n", why_not);
    } else {
        printf("ran on: %s, compute capability %d.%d%s\n\n", m->cuda.card,
               (int)m->card.compute_major, (int)m->card.compute_minor,
               m->has_graphs ? "" : ", a driver without graphs");
    }
}

static inline void machine_close(machine* m) {
    if (m->gpu) {
        driver_must(&m->cuda, m->cuda.stream_destroy(m->stream), "cuStreamDestroy");
    }
    kmla_gpu_close(m->gpu);
}

// For all streams.
static inline void machine_wait(const machine* m) {
    if (m->gpu) {
        driver_must(&m->cuda, m->cuda.context_synchronize(), "cuCtxSynchronize");
    }
}

// ---- memory: what these calls write has landed, for every stream, when they return

static inline void machine_poison(const machine* m, uint64_t address, size_t bytes) { // NaN of any type
    if (m->gpu) {
        driver_must(&m->cuda, m->cuda.memory_set(address, 0xff, bytes), "cuMemsetD8");
        machine_wait(m);
    } else {
        memset((void*)(uintptr_t)address, 0xff, bytes);
    }
}

// Full of NaN.
static inline uint64_t machine_alloc(const machine* m, size_t bytes) {
    uint64_t address =
        m->gpu ? driver_alloc(&m->cuda, bytes) : (uint64_t)(uintptr_t)allocate(bytes);
    machine_poison(m, address, bytes ? bytes : 1);
    return address;
}

static inline void machine_free(const machine* m, uint64_t address) {
    if (m->gpu) {
        driver_free(&m->cuda, address);
    } else {
        free((void*)(uintptr_t)address);
    }
}

static inline void machine_write(const machine* m, uint64_t to, const void* from, size_t bytes) {
    if (m->gpu) {
        driver_upload(&m->cuda, to, from, bytes);
    } else {
        memcpy((void*)(uintptr_t)to, from, bytes);
    }
}

// Waits for what was launched.
static inline void machine_read(const machine* m, void* to, uint64_t from, size_t bytes) {
    if (m->gpu) {
        driver_download(&m->cuda, to, from, bytes);
    } else {
        memcpy(to, (const void*)(uintptr_t)from, bytes);
    }
}

// ---- the library

static inline kmla_plan machine_plan(const machine* m, const kmla_shape* shape) {
    kmla_plan plan;
    must(kmla_plan_decode(shape, &m->card, &plan, &error));
    if (m->gpu) {
        must(kmla_gpu_prepare(m->gpu, &plan, NULL, &error)); // before any capture
    }
    return plan;
}

static inline void machine_write_kv(const machine* m, const kmla_kv_write* args, void* stream) {
    must(m->gpu ? kmla_gpu_write_kv(m->gpu, args, stream, &error)
                : kmla_host_write_kv(args, &error));
}

static inline void machine_write_query(const machine* m, const kmla_query_write* args,
                                       void* stream) {
    must(m->gpu ? kmla_gpu_write_query(m->gpu, args, stream, &error)
                : kmla_host_write_query(args, &error));
}

static inline void machine_decode(const machine* m, const kmla_plan* plan, const kmla_decode* args,
                                  void* stream) {
    must(m->gpu ? kmla_gpu_decode(m->gpu, plan, args, stream, &error)
                : kmla_host_decode(plan, args, NULL, &error));
}

static inline void machine_combine(const machine* m, const kmla_combine* args, void* stream) {
    must(m->gpu ? kmla_gpu_combine(m->gpu, args, stream, &error) : kmla_host_combine(args, &error));
}

#endif
