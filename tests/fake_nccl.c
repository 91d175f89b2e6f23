// fake_nccl.c - the functions of NCCL that examples/dcp_nccl.c calls, between processes of one
// machine, for device memory that is memory of the host: the emulator's.
//
// A call has ended when it returns, so a stream means nothing and nothing can be captured. What
// NCCL would refuse or wait for ever for is an error: ranks whose calls differ, messages of another
// size than is received, results in place that lie in another place than a rank's own.

#define _DEFAULT_SOURCE // process-shared barriers
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

enum { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5 };
enum { TYPE_BYTE = 0, TYPE_BF16 = 9, SUM = 0 };
enum { MOST_RANKS = 8, MOST_CALLS = 64, MESSAGE_BYTES = 1 << 20 };

typedef enum call_kind { ALL_GATHER, BROADCAST, SEND, RECEIVE, REDUCE, REDUCE_SCATTER } call_kind;

typedef struct call {
    call_kind kind;
    const uint8_t* from;
    uint8_t* to;
    size_t bytes; // that this rank sends, or of a reduce-scatter receives
    int peer;     // or root
} call;

typedef struct message {
    size_t bytes;
    uint8_t data[MESSAGE_BYTES];
} message;

typedef struct world { // in a file that all ranks map
    pthread_barrier_t barrier;
    volatile int ready;
    call_kind kinds[MOST_RANKS]; // of the collective that is under way
    message messages[MOST_RANKS][MOST_RANKS]; // from, to; a collective's are in [rank][rank]
} world;

typedef struct id {
    char bytes[128]; // the file's name
} id;

typedef struct comm {
    world* w;
    int ranks, rank;
} comm;

static comm* grouped; // whose calls wait for the group's end
static call calls[MOST_CALLS];
static int call_count, in_group;

EXPORT int ncclGetVersion(int* version) {
    *version = 0;
    return SUCCESS;
}

EXPORT const char* ncclGetErrorString(int result) {
    return result == SUCCESS            ? "no error"
           : result == INVALID_ARGUMENT ? "invalid argument"
           : result == INVALID_USAGE    ? "invalid usage"
                                        : "system error";
}

EXPORT int ncclGetUniqueId(id* made) {
    memset(made, 0, sizeof *made);
    snprintf(made->bytes, sizeof made->bytes, "/tmp/kmla_fake_nccl_XXXXXX");
    const int file = mkstemp(made->bytes);
    if (file < 0 || ftruncate(file, sizeof(world)) != 0) {
        return SYSTEM_ERROR;
    }
    close(file);
    return SUCCESS;
}

EXPORT int ncclCommInitRank(comm** made, int ranks, id of, int rank) {
    const int file = open(of.bytes, O_RDWR);
    pthread_barrierattr_t shared;
    comm* c = (comm*)calloc(1, sizeof *c);
    if (file < 0 || !c || ranks > MOST_RANKS) {
        return SYSTEM_ERROR;
    }
    c->w = (world*)mmap(NULL, sizeof *c->w, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (c->w == (world*)MAP_FAILED) {
        return SYSTEM_ERROR;
    }
    c->ranks = ranks;
    c->rank = rank;
    if (rank == 0) {
        pthread_barrierattr_init(&shared);
        pthread_barrierattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
        pthread_barrier_init(&c->w->barrier, &shared, (unsigned)ranks);
        c->w->ready = 1;
    }
    while (!c->w->ready) {
        usleep(1000);
    }
    pthread_barrier_wait(&c->w->barrier);
    unlink(of.bytes);
    *made = c;
    return SUCCESS;
}

EXPORT int ncclCommDestroy(comm* c) {
    munmap(c->w, sizeof *c->w);
    free(c);
    return SUCCESS;
}

// =============================================================================
// Calls
// =============================================================================

static int post(const comm* c, int to, const uint8_t* from, size_t bytes) {
    message* m = &c->w->messages[c->rank][to];
    if (bytes > MESSAGE_BYTES) {
        return SYSTEM_ERROR;
    }
    m->bytes = bytes;
    memcpy(m->data, from, bytes);
    return SUCCESS;
}

// A part of what lies in a rank's own message, if that is as large as everybody's.
static const uint8_t* posted(const comm* c, int rank, size_t bytes) {
    const message* m = &c->w->messages[rank][rank];
    return m->bytes == bytes ? m->data : NULL;
}

static float bf16(const uint8_t* from) {
    uint16_t bits;
    float value;
    memcpy(&bits, from, 2);
    const uint32_t wide = (uint32_t)bits << 16;
    memcpy(&value, &wide, 4);
    return value;
}

static int add_all(const comm* c, size_t all_bytes, size_t offset, size_t bytes, uint8_t* to) {
    for (size_t i = 0; i < bytes; i += 2) {
        float sum = 0.0f;
        uint32_t bits;
        for (int r = 0; r < c->ranks; r++) {
            const uint8_t* from = posted(c, r, all_bytes);
            if (!from) {
                return INVALID_USAGE;
            }
            sum += bf16(from + offset + i);
        }
        memcpy(&bits, &sum, 4);
        const uint16_t rounded = (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
        memcpy(to + i, &rounded, 2);
    }
    return SUCCESS;
}

static int take_collective(const comm* c, const call* what) {
    const size_t n = what->bytes, own = (size_t)c->rank * n;
    switch (what->kind) {
        case ALL_GATHER:
            for (int r = 0; r < c->ranks; r++) {
                const uint8_t* from = posted(c, r, n);
                if (!from) {
                    return INVALID_USAGE;
                }
                memcpy(what->to + (size_t)r * n, from, n);
            }
            return SUCCESS;
        case BROADCAST:
            if (!posted(c, what->peer, n)) {
                return INVALID_USAGE;
            }
            memcpy(what->to, posted(c, what->peer, n), n);
            return SUCCESS;
        case REDUCE: return c->rank == what->peer ? add_all(c, n, 0, n, what->to) : SUCCESS;
        default: return add_all(c, n * (size_t)c->ranks, own, n, what->to);
    }
}

static int run_collective(const comm* c, const call* what) {
    const size_t n = what->bytes;
    const size_t sent = what->kind == REDUCE_SCATTER ? n * (size_t)c->ranks : n;
    int result = post(c, c->rank, what->from, sent);
    c->w->kinds[c->rank] = what->kind;
    pthread_barrier_wait(&c->w->barrier);
    for (int r = 0; r < c->ranks; r++) {
        result = c->w->kinds[r] != what->kind ? INVALID_USAGE : result;
    }
    if (result == SUCCESS) {
        result = take_collective(c, what);
    }
    pthread_barrier_wait(&c->w->barrier);
    return result;
}

// All sends, then all receives.
static int run_messages(const comm* c) {
    int result = SUCCESS;
    for (int i = 0; i < call_count && result == SUCCESS; i++) {
        if (calls[i].kind == SEND) {
            result = post(c, calls[i].peer, calls[i].from, calls[i].bytes);
        }
    }
    pthread_barrier_wait(&c->w->barrier);
    for (int i = 0; i < call_count && result == SUCCESS; i++) {
        message* m = &c->w->messages[calls[i].peer][c->rank];
        if (calls[i].kind == RECEIVE) {
            result = m->bytes == calls[i].bytes ? SUCCESS : INVALID_USAGE;
            memcpy(calls[i].to, m->data, m->bytes < calls[i].bytes ? m->bytes : calls[i].bytes);
            m->bytes = 0;
        }
    }
    pthread_barrier_wait(&c->w->barrier);
    return result;
}

static int run_calls(void) {
    int result = SUCCESS, messages = 0;
    for (int i = 0; i < call_count; i++) {
        messages += calls[i].kind == SEND || calls[i].kind == RECEIVE;
    }
    if (messages > 0) {
        result = messages == call_count ? run_messages(grouped) : INVALID_USAGE;
    }
    for (int i = 0; i < call_count && messages == 0 && result == SUCCESS; i++) {
        result = run_collective(grouped, &calls[i]);
    }
    call_count = 0;
    return result;
}

static int add_call(comm* c, call what) {
    if (call_count == MOST_CALLS || (call_count > 0 && grouped != c)) {
        return INVALID_USAGE;
    }
    grouped = c;
    calls[call_count++] = what;
    return in_group ? SUCCESS : run_calls();
}

EXPORT int ncclGroupStart(void) {
    in_group++;
    return SUCCESS;
}

EXPORT int ncclGroupEnd(void) {
    in_group--;
    return in_group ? SUCCESS : run_calls();
}

// The part of `whole`, parts of n bytes, that a rank in place uses is its own.
static int in_own_place(const comm* c, const void* part, const void* whole, size_t n) {
    const uintptr_t at = (uintptr_t)part, begin = (uintptr_t)whole;
    return at + n <= begin || at >= begin + n * (size_t)c->ranks ||
           at == begin + n * (size_t)c->rank;
}

EXPORT int ncclAllGather(const void* from, void* to, size_t count, int type, comm* c,
                         void* stream) {
    const call what = {ALL_GATHER, (const uint8_t*)from, (uint8_t*)to, count, 0};
    (void)stream;
    return type == TYPE_BYTE && in_own_place(c, from, to, count) ? add_call(c, what)
                                                                 : INVALID_ARGUMENT;
}

EXPORT int ncclBroadcast(const void* from, void* to, size_t count, int type, int root, comm* c,
                         void* stream) {
    const call what = {BROADCAST, (const uint8_t*)from, (uint8_t*)to, count, root};
    (void)stream;
    return type == TYPE_BYTE ? add_call(c, what) : INVALID_ARGUMENT;
}

EXPORT int ncclSend(const void* from, size_t count, int type, int peer, comm* c, void* stream) {
    const call what = {SEND, (const uint8_t*)from, NULL, count, peer};
    (void)stream;
    return type == TYPE_BYTE ? add_call(c, what) : INVALID_ARGUMENT;
}

EXPORT int ncclRecv(void* to, size_t count, int type, int peer, comm* c, void* stream) {
    const call what = {RECEIVE, NULL, (uint8_t*)to, count, peer};
    (void)stream;
    return type == TYPE_BYTE ? add_call(c, what) : INVALID_ARGUMENT;
}

EXPORT int ncclReduce(const void* from, void* to, size_t count, int type, int operation, int root,
                      comm* c, void* stream) {
    const call what = {REDUCE, (const uint8_t*)from, (uint8_t*)to, count * 2, root};
    (void)stream;
    return type == TYPE_BF16 && operation == SUM ? add_call(c, what) : INVALID_ARGUMENT;
}

EXPORT int ncclReduceScatter(const void* from, void* to, size_t count, int type, int operation,
                             comm* c, void* stream) {
    const call what = {REDUCE_SCATTER, (const uint8_t*)from, (uint8_t*)to, count * 2, 0};
    (void)stream;
    return type == TYPE_BF16 && operation == SUM && in_own_place(c, to, from, count * 2)
               ? add_call(c, what)
               : INVALID_ARGUMENT;
}
