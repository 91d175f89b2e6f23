// dcp_nccl.c - decode context parallelism for real: a process per rank, a GPU each, NCCL between.
//
//     dcp_nccl [--ranks N] [--nccl PATH] [--memory] [--library PATH]
//
//     --ranks N        so many ranks [one per GPU; without a GPU 3]
//     --nccl PATH      libnccl, e.g. of a Python package [libnccl.so.2, if GPUs suffice]
//     --memory         ranks exchange through memory of the host, not by NCCL: any number of ranks
//                      shares the GPUs. So it is, too, where there is no GPU or no NCCL
//     --library PATH   libcuda and NVRTC in one library
//
// Every rank holds a shard of one request's tokens. A verify step of 4 causal rows, on each rank:
//
//     gather     writes the queries of its own heads into its slice of a gathered buffer; an
//                all-gather in place fills the others
//     read       decodes all heads over its shard
//     combine    by lse, over the ranks, for its own heads: all-to-all of outputs and lse, then
//                kmla_gpu_combine; or all-gather of lse, shares by kmla_gpu_combine, reduce-scatter
//
// With one rank nothing is exchanged and what it reads is the result. Checked on every rank, for
// heads that divide among the ranks and heads that do not, for BF16 and packed queries, and for a
// context so short that some shards are empty:
//
//     - all-to-all has the bits of one GPU that plays all ranks by itself;
//     - both transports are within a bound of one GPU that decodes the unsharded context;
//     - a packed gather has the bits of a BF16 gather, as all is decoded in e4m3-query mode;
//     - all ranks have the same bits of lse;
//     - with NCCL a captured graph of the whole step, collectives included, has the bits of direct
//       launches, and each part of the step is timed by a graph of its own.
//
// Exit code 1 on any mismatch.

#define _DEFAULT_SOURCE // MAP_ANONYMOUS, process-shared barriers
#define KIMI_MLA_IMPLEMENTATION
#include "../kimi_mla.h"

#include "machine.h"

#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { ROWS = 4, PAGE = 64, MOST_RANKS = 16, MOST_HEADS = 128, INTERLEAVE = 64 };

#define SCALE 0.07216878f // Kimi-K3: 192^-0.5

static int32_t my_rank;

// =============================================================================
// NCCL, without nccl.h
// =============================================================================

typedef struct nccl_id {
    char bytes[128];
} nccl_id;

enum { NCCL_BYTE = 0, NCCL_FLOAT = 7, NCCL_BF16 = 9, NCCL_SUM = 0 };

#define NCCL_FUNCTIONS(X)                                                                          \
    X(int, version, "ncclGetVersion", (int* version))                                              \
    X(const char*, error_string, "ncclGetErrorString", (int result))                               \
    X(int, unique_id, "ncclGetUniqueId", (nccl_id * id))                                           \
    X(int, init, "ncclCommInitRank", (void** comm, int ranks, nccl_id id, int rank))               \
    X(int, destroy, "ncclCommDestroy", (void* comm))                                               \
    X(int, group_start, "ncclGroupStart", (void))                                                  \
    X(int, group_end, "ncclGroupEnd", (void))                                                      \
    X(int, all_gather, "ncclAllGather",                                                            \
      (const void* from, void* to, size_t count, int type, void* comm, void* stream))              \
    X(int, broadcast, "ncclBroadcast",                                                             \
      (const void* from, void* to, size_t count, int type, int root, void* comm, void* stream))    \
    X(int, send, "ncclSend",                                                                       \
      (const void* from, size_t count, int type, int peer, void* comm, void* stream))              \
    X(int, receive, "ncclRecv",                                                                    \
      (void* to, size_t count, int type, int peer, void* comm, void* stream))                      \
    X(int, reduce, "ncclReduce",                                                                   \
      (const void* from, void* to, size_t count, int type, int operation, int root, void* comm,    \
       void* stream))                                                                              \
    X(int, reduce_scatter, "ncclReduceScatter",                                                    \
      (const void* from, void* to, size_t count, int type, int operation, void* comm,              \
       void* stream))

typedef struct nccl {
#define NCCL_POINTER(result, field, symbol, parameters) result(*field) parameters;
    NCCL_FUNCTIONS(NCCL_POINTER)
#undef NCCL_POINTER
} nccl;

static int nccl_open(nccl* n, const char* path) {
    void* library = dlopen(path ? path : "libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    int all = library != NULL;
#define NCCL_FIND(result, field, symbol, parameters)                                               \
    all = all && driver_find(library, symbol, &n->field);
    NCCL_FUNCTIONS(NCCL_FIND)
#undef NCCL_FIND
    return all;
}

static void nccl_must(const nccl* n, int result, const char* call) {
    if (result != 0) {
        fprintf(stderr, "rank %d: %s: %s (%d)\n", (int)my_rank, call, n->error_string(result),
                result);
        exit(1);
    }
}

// =============================================================================
// Ranks and what they exchange
// =============================================================================

enum { PARTS_OF_A_STEP = 4 }; // gather, read, combine, all of them in one graph
enum { AREA_BYTES = MOST_HEADS * ROWS * KMLA_LATENT_DIMS * 4 };

// Memory that all ranks see.
typedef struct shared {
    pthread_barrier_t barrier;
    nccl_id id;
    int cards, has_nccl;
    uint64_t digests[MOST_RANKS];
    double us[MOST_RANKS][PARTS_OF_A_STEP];
    uint8_t area[MOST_RANKS][AREA_BYTES]; // of each rank, for exchanges through memory
} shared;

typedef struct comm {
    const machine* m;
    shared* all;
    int32_t ranks, rank;
    nccl n;
    void* nccl_comm; // NULL: through memory
} comm;

static void* pointer(uint64_t address) { return (void*)(uintptr_t)address; }

static void comm_wait(const comm* c) {
    machine_wait(c->m);
    pthread_barrier_wait(&c->all->barrier);
}

static void comm_open(comm* c, const machine* m, shared* all, int32_t ranks,
                      const char* nccl_path) {
    memset(c, 0, sizeof *c);
    c->m = m;
    c->all = all;
    c->ranks = ranks;
    c->rank = my_rank;
    if (all->has_nccl && nccl_open(&c->n, nccl_path)) {
        if (my_rank == 0) {
            nccl_must(&c->n, c->n.unique_id(&all->id), "ncclGetUniqueId");
        }
        comm_wait(c);
        nccl_must(&c->n, c->n.init(&c->nccl_comm, ranks, all->id, my_rank), "ncclCommInitRank");
    }
}

static void comm_close(comm* c) {
    if (c->nccl_comm) {
        nccl_must(&c->n, c->n.destroy(c->nccl_comm), "ncclCommDestroy");
    }
}

// Puts bytes of this rank where the others find them, and waits until all have.
static void publish(const comm* c, uint64_t from, size_t bytes) {
    comm_wait(c); // nobody reads the last exchange any more
    machine_read(c->m, c->all->area[c->rank], from, bytes);
    comm_wait(c);
}

// Every rank's slice of an array, in place: `of` is all ranks' layouts of it.
static void all_gather_slices(const comm* c, uint64_t array, const kmla_slices* of, int equal,
                              void* stream) {
    const kmla_slices* own = &of[c->rank];
    if (!c->nccl_comm) {
        publish(c, array + own->offset_bytes, (size_t)own->slice_bytes);
        for (int32_t r = 0; r < c->ranks; r++) {
            if (r != c->rank) {
                machine_write(c->m, array + of[r].offset_bytes, c->all->area[r],
                              (size_t)of[r].slice_bytes);
            }
        }
    } else if (equal) {
        nccl_must(&c->n,
                  c->n.all_gather(pointer(array + own->offset_bytes), pointer(array),
                                  (size_t)own->slice_bytes, NCCL_BYTE, c->nccl_comm, stream),
                  "ncclAllGather");
    } else {
        nccl_must(&c->n, c->n.group_start(), "ncclGroupStart");
        for (int32_t r = 0; r < c->ranks; r++) {
            void* slice = pointer(array + of[r].offset_bytes);
            if (of[r].slice_bytes > 0) {
                nccl_must(&c->n,
                          c->n.broadcast(slice, slice, (size_t)of[r].slice_bytes, NCCL_BYTE, r,
                                         c->nccl_comm, stream),
                          "ncclBroadcast");
            }
        }
        nccl_must(&c->n, c->n.group_end(), "ncclGroupEnd");
    }
}

// An array of every rank, one after the other.
static void all_gather_arrays(const comm* c, uint64_t array, uint64_t to, size_t bytes,
                              void* stream) {
    if (!c->nccl_comm) {
        publish(c, array, bytes);
        for (int32_t r = 0; r < c->ranks; r++) {
            machine_write(c->m, to + (uint64_t)r * bytes, c->all->area[r], bytes);
        }
    } else {
        nccl_must(&c->n,
                  c->n.all_gather(pointer(array), pointer(to), bytes, NCCL_BYTE, c->nccl_comm,
                                  stream),
                  "ncclAllGather");
    }
}

// This rank's slice of every rank's array, one after the other.
static void all_to_all(const comm* c, uint64_t array, uint64_t to, const kmla_slices* of,
                       void* stream) {
    const kmla_slices* own = &of[c->rank];
    const size_t own_bytes = (size_t)own->slice_bytes;
    if (!c->nccl_comm) {
        publish(c, array, (size_t)own->bytes);
        for (int32_t r = 0; r < c->ranks; r++) {
            machine_write(c->m, to + (uint64_t)r * own_bytes,
                          c->all->area[r] + own->offset_bytes, own_bytes);
        }
        return;
    }
    nccl_must(&c->n, c->n.group_start(), "ncclGroupStart");
    for (int32_t r = 0; r < c->ranks; r++) {
        if (of[r].slice_bytes > 0) {
            nccl_must(&c->n,
                      c->n.send(pointer(array + of[r].offset_bytes), (size_t)of[r].slice_bytes,
                                NCCL_BYTE, r, c->nccl_comm, stream),
                      "ncclSend");
        }
        if (own_bytes > 0) {
            nccl_must(&c->n,
                      c->n.receive(pointer(to + (uint64_t)r * own_bytes), own_bytes, NCCL_BYTE, r,
                                   c->nccl_comm, stream),
                      "ncclRecv");
        }
    }
    nccl_must(&c->n, c->n.group_end(), "ncclGroupEnd");
}

// BF16 sums of all ranks' arrays: this rank's slice of them, in its own array.
static void reduce_scatter(const comm* c, uint64_t array, const kmla_slices* of, int equal,
                           void* stream) {
    const kmla_slices* own = &of[c->rank];
    if (!c->nccl_comm) {
        size_t count = (size_t)own->slice_bytes / 2;
        uint16_t* sums = (uint16_t*)allocate((size_t)own->slice_bytes);
        publish(c, array, (size_t)own->bytes);
        for (size_t i = 0; i < count; i++) {
            float sum = 0.0f;
            for (int32_t r = 0; r < c->ranks; r++) {
                uint16_t bits;
                memcpy(&bits, c->all->area[r] + own->offset_bytes + i * 2, 2);
                sum += kmla_bf16_to_float(bits);
            }
            sums[i] = kmla_float_to_bf16(sum);
        }
        machine_write(c->m, array + own->offset_bytes, sums, (size_t)own->slice_bytes);
        free(sums);
    } else if (equal) {
        nccl_must(&c->n,
                  c->n.reduce_scatter(pointer(array), pointer(array + own->offset_bytes),
                                      (size_t)own->slice_bytes / 2, NCCL_BF16, NCCL_SUM,
                                      c->nccl_comm, stream),
                  "ncclReduceScatter");
    } else {
        nccl_must(&c->n, c->n.group_start(), "ncclGroupStart");
        for (int32_t r = 0; r < c->ranks; r++) {
            void* slice = pointer(array + of[r].offset_bytes);
            if (of[r].slice_bytes > 0) {
                nccl_must(&c->n,
                          c->n.reduce(slice, slice, (size_t)of[r].slice_bytes / 2, NCCL_BF16,
                                      NCCL_SUM, r, c->nccl_comm, stream),
                          "ncclReduce");
            }
        }
        nccl_must(&c->n, c->n.group_end(), "ncclGroupEnd");
    }
}

// =============================================================================
// The model's stand-in, the same on all ranks
// =============================================================================

enum { SOURCE_TOKENS = 9973 }; // global token g has the values of source token g mod this

typedef struct pool {
    uint64_t kv, table;
    int64_t tokens, pages;
} pool;

// The packed records of the tokens of `context` that a rank owns (all of them, for one rank). The
// writer is shown every token; the slots of others' are -1.
static pool pool_make(const machine* m, uint64_t values, int64_t context, kmla_dcp dcp) {
    int64_t* slots = (int64_t*)allocate(SOURCE_TOKENS * sizeof *slots);
    uint64_t slots_there = machine_alloc(m, SOURCE_TOKENS * sizeof *slots);
    int32_t* table;
    pool p;
    must(kmla_shard_capacity(&dcp, context, &p.tokens, &error));
    p.pages = (p.tokens + PAGE - 1) / PAGE;
    p.kv = machine_alloc(m, (size_t)p.pages * PAGE * KMLA_PACKED_BYTES);
    p.table = machine_alloc(m, (size_t)p.pages * sizeof *table);
    table = (int32_t*)allocate((size_t)p.pages * sizeof *table);
    for (int64_t i = 0; i < p.pages; i++) { // even pages upwards, odd ones back down
        table[i] = (int32_t)(i < (p.pages + 1) / 2 ? 2 * i : 2 * (p.pages - i) - 1);
    }
    machine_write(m, p.table, table, (size_t)p.pages * sizeof *table);
    for (int64_t first = 0; first < context; first += SOURCE_TOKENS) {
        int64_t left = context - first;
        int32_t count = (int32_t)(left < SOURCE_TOKENS ? left : SOURCE_TOKENS);
        kmla_kv_write args;
        for (int32_t i = 0; i < count; i++) {
            int32_t owner;
            int64_t local;
            must(kmla_token_owner(&dcp, first + i, &owner, &local, &error));
            slots[i] = owner == dcp.rank ? table[local / PAGE] * (int64_t)PAGE + local % PAGE : -1;
        }
        machine_wait(m); // for the writer of the last piece
        machine_write(m, slots_there, slots, (size_t)count * sizeof *slots);
        memset(&args, 0, sizeof args);
        args.tokens = count;
        args.kv_format = KMLA_KV_PACKED;
        args.source_type = KMLA_BF16;
        args.page_tokens = PAGE;
        args.latent = values;
        args.latent_stride = KMLA_QUERY_DIMS;
        args.rope = values + KMLA_LATENT_DIMS * sizeof(uint16_t);
        args.rope_stride = KMLA_QUERY_DIMS;
        args.slots = slots_there;
        args.kv = p.kv;
        args.kv_pages = (uint64_t)p.pages;
        machine_write_kv(m, &args, m->stream);
    }
    machine_wait(m);
    machine_free(m, slots_there);
    free(slots);
    free(table);
    return p;
}

static void pool_free(const machine* m, pool* p) {
    machine_free(m, p->kv);
    machine_free(m, p->table);
}

// One request's tokens: as shards, and whole.
typedef struct context {
    int64_t tokens;
    pool shards[MOST_RANKS], whole;
    uint64_t length; // int32, global
} context;

static context context_make(const comm* c, uint64_t values, int64_t tokens) {
    int32_t length = (int32_t)tokens;
    kmla_dcp one = {1, 0, 1};
    context made;
    memset(&made, 0, sizeof made);
    made.tokens = tokens;
    for (int32_t r = 0; r < c->ranks; r++) {
        kmla_dcp dcp = {c->ranks, r, INTERLEAVE};
        made.shards[r] = pool_make(c->m, values, tokens, dcp);
    }
    made.whole = pool_make(c->m, values, tokens, one);
    made.length = machine_alloc(c->m, sizeof length);
    machine_write(c->m, made.length, &length, sizeof length);
    return made;
}

static void context_free(const comm* c, context* made) {
    for (int32_t r = 0; r < c->ranks; r++) {
        pool_free(c->m, &made->shards[r]);
    }
    pool_free(c->m, &made->whole);
    machine_free(c->m, made->length);
}

// =============================================================================
// A step
// =============================================================================

typedef struct way {
    int32_t heads, equal_slices, query_format, transport;
} way;

typedef struct step {
    const comm* c;
    const context* ctx;
    way how;
    kmla_gather gathers[MOST_RANKS];
    kmla_slices query_slices[MOST_RANKS], out_slices[MOST_RANKS], lse_slices[MOST_RANKS];
    kmla_plan plans[MOST_RANKS]; // all ranks', which one GPU can play
    uint64_t source;             // BF16 [R][heads][576], of all heads
    uint64_t query, out, lse;    // as the gather lays them out; BF16 out
    uint64_t parts, part_lse;    // received
    uint64_t result, result_lse; // of own heads: fp32 [R][local][512], [R][local]; all-to-all
    uint64_t all_lse;            // of all heads, [heads][R]; reduce-scatter
    uint64_t workspace;
} step;

static kmla_shape step_shape(const step* s, int32_t heads) {
    kmla_shape shape;
    memset(&shape, 0, sizeof shape);
    shape.requests = 1;
    shape.rows_per_request = ROWS;
    shape.heads = heads;
    shape.query_format = s->how.query_format;
    shape.mode = KMLA_MODE_E4M3_QUERY; // so that both query formats are to have the same bits
    shape.page_tokens = PAGE;
    shape.lengths.lengths_kind = KMLA_LENGTHS_PER_REQUEST; // global, localised by the reader
    return shape;
}

static void step_plan(step* s) {
    const comm* c = s->c;
    for (int32_t r = 0; r < c->ranks; r++) {
        kmla_gather_desc desc;
        kmla_shape shape;
        memset(&desc, 0, sizeof desc);
        desc.heads = s->how.heads;
        desc.ranks = c->ranks;
        desc.rank = r;
        desc.rows = ROWS;
        desc.query_format = s->how.query_format;
        desc.equal_slices = s->how.equal_slices;
        must(kmla_plan_gather(&desc, &s->gathers[r], &error));
        s->query_slices[r] = s->gathers[r].query;
        s->out_slices[r] = s->gathers[r].out;
        s->lse_slices[r] = s->gathers[r].lse;
        shape = step_shape(s, s->gathers[r].gathered_heads);
        shape.capacity_tokens = s->ctx->shards[r].tokens;
        shape.lengths.dcp.ranks = c->ranks;
        shape.lengths.dcp.rank = r;
        shape.lengths.dcp.interleave = INTERLEAVE;
        s->plans[r] = machine_plan(c->m, &shape);
    }
}

static void step_make(step* s, const comm* c, const context* ctx, way how, uint64_t source) {
    const kmla_gather* g = &s->gathers[c->rank];
    const machine* m = c->m;
    size_t own;
    memset(s, 0, sizeof *s);
    s->c = c;
    s->ctx = ctx;
    s->how = how;
    s->source = source;
    step_plan(s);
    own = (size_t)ROWS * (size_t)g->local_heads;
    s->query = machine_alloc(m, (size_t)g->query.bytes);
    s->out = machine_alloc(m, (size_t)g->out.bytes);
    s->lse = machine_alloc(m, (size_t)g->lse.bytes);
    s->parts = machine_alloc(m, (size_t)g->out.slice_bytes * (size_t)c->ranks);
    s->part_lse = machine_alloc(m, (size_t)g->lse.bytes * (size_t)c->ranks);
    s->result = machine_alloc(m, own * KMLA_LATENT_DIMS * sizeof(float));
    s->result_lse = machine_alloc(m, own * sizeof(float));
    s->all_lse = machine_alloc(m, (size_t)g->lse.bytes);
    s->workspace = machine_alloc(m, (size_t)s->plans[0].workspace_bytes);
}

static void step_free(step* s) {
    const uint64_t owned[] = {s->query,  s->out,        s->lse,     s->parts,    s->part_lse,
                              s->result, s->result_lse, s->all_lse, s->workspace};
    for (size_t i = 0; i < sizeof owned / sizeof owned[0]; i++) {
        machine_free(s->c->m, owned[i]);
    }
}

// A rank's own heads from the source into its slice of a gathered buffer.
static void write_slice(const step* s, int32_t rank, uint64_t query, void* stream) {
    kmla_query_write args;
    int32_t first_head = 0;
    for (int32_t r = 0; r < rank; r++) {
        first_head += s->gathers[r].local_heads;
    }
    if (s->gathers[rank].local_heads == 0) {
        return;
    }
    memset(&args, 0, sizeof args);
    args.source_type = KMLA_BF16;
    args.source = s->source + (uint64_t)first_head * KMLA_BF16_BYTES;
    args.source_row_stride = (int64_t)s->how.heads * KMLA_QUERY_DIMS;
    must(kmla_gather_write(&s->gathers[rank], query, &args, &error));
    machine_write_query(s->c->m, &args, stream);
}

static void decode_shard(const step* s, int32_t rank, uint64_t query, uint64_t out, uint64_t lse,
                         void* stream) {
    const pool* shard = &s->ctx->shards[rank];
    kmla_decode args;
    memset(&args, 0, sizeof args);
    args.scale = SCALE;
    args.kv = shard->kv;
    args.kv_pages = (uint64_t)shard->pages;
    args.block_table = shard->table;
    args.block_table_width = shard->pages;
    args.lengths = s->ctx->length;
    args.workspace = s->workspace;
    args.workspace_bytes = s->plans[rank].workspace_bytes;
    must(kmla_gather_decode(&s->gathers[rank], query, out, lse, &args, &error));
    machine_decode(s->c->m, &s->plans[rank], &args, stream);
}

static void launch_gather(const void* data, void* stream) {
    const step* s = (const step*)data;
    write_slice(s, s->c->rank, s->query, stream);
    if (s->gathers[0].exchanges) {
        all_gather_slices(s->c, s->query, s->query_slices, s->how.equal_slices, stream);
    }
}

static void launch_read(const void* data, void* stream) {
    const step* s = (const step*)data;
    decode_shard(s, s->c->rank, s->query, s->out, s->lse, stream);
}

static void combine_own(const step* s, uint64_t parts, uint64_t part_lse, void* stream) {
    kmla_combine args;
    memset(&args, 0, sizeof args);
    args.out = s->result;
    args.out_type = KMLA_FP32;
    args.lse = s->result_lse;
    must(kmla_gather_combine(&s->gathers[s->c->rank], KMLA_TRANSPORT_ALL_TO_ALL, parts, part_lse,
                             &args, &error));
    machine_combine(s->c->m, &args, stream);
}

static void launch_combine(const void* data, void* stream) {
    const step* s = (const step*)data;
    const comm* c = s->c;
    const kmla_gather* g = &s->gathers[c->rank];
    if (!g->exchanges) {
        return;
    }
    if (s->how.transport == KMLA_TRANSPORT_ALL_TO_ALL) {
        all_to_all(c, s->out, s->parts, s->out_slices, stream);
        all_to_all(c, s->lse, s->part_lse, s->lse_slices, stream);
        if (g->local_heads > 0) {
            combine_own(s, s->parts, s->part_lse, stream);
        }
    } else {
        kmla_combine args;
        all_gather_arrays(c, s->lse, s->part_lse, (size_t)g->lse.bytes, stream);
        memset(&args, 0, sizeof args);
        args.out = s->out; // in place
        args.lse = s->all_lse;
        must(kmla_gather_combine(g, KMLA_TRANSPORT_REDUCE_SCATTER, s->out, s->part_lse, &args,
                                 &error));
        machine_combine(c->m, &args, stream);
        reduce_scatter(c, s->out, s->out_slices, s->how.equal_slices, stream);
    }
}

static void launch_step(const void* data, void* stream) {
    launch_gather(data, stream);
    launch_read(data, stream);
    launch_combine(data, stream);
}

// =============================================================================
// What a rank has in the end
// =============================================================================

typedef struct result {
    float out[ROWS][MOST_HEADS][KMLA_LATENT_DIMS]; // of own heads
    float lse[ROWS][MOST_HEADS];
} result;

// Of fp32 [R][local]..., as a combine of own heads leaves them.
static void read_own(const step* s, result* r) {
    const machine* m = s->c->m;
    const uint64_t local = (uint64_t)s->gathers[s->c->rank].local_heads;
    for (uint64_t row = 0; row < ROWS; row++) {
        machine_read(m, r->out[row], s->result + row * local * sizeof r->out[0][0],
                     local * sizeof r->out[0][0]);
        machine_read(m, r->lse[row], s->result_lse + row * local * sizeof(float),
                     local * sizeof(float));
    }
}

// Of BF16 and fp32 arrays with heads outermost: what one rank decodes, and a reduce-scatter leaves.
static void read_slices(const step* s, uint64_t lse_array, result* r) {
    const kmla_gather* g = &s->gathers[s->c->rank];
    const size_t bytes = (size_t)g->out.bytes;
    uint16_t* out = (uint16_t*)allocate(bytes);
    float* lse = (float*)allocate((size_t)g->lse.bytes);
    machine_read(s->c->m, out, s->out, bytes);
    machine_read(s->c->m, lse, lse_array, (size_t)g->lse.bytes);
    for (int32_t row = 0; row < ROWS; row++) {
        for (int32_t head = 0; head < g->local_heads; head++) {
            const int32_t at = g->first_head + head;
            const uint16_t* from = out + at * g->out.head_stride + row * g->out.row_stride;
            for (int d = 0; d < KMLA_LATENT_DIMS; d++) {
                r->out[row][head][d] = kmla_bf16_to_float(from[d]);
            }
            r->lse[row][head] = lse[at * g->lse.head_stride + row * g->lse.row_stride];
        }
    }
    free(out);
    free(lse);
}

static void read_result(const step* s, result* r) {
    memset(r, 0, sizeof *r);
    if (!s->gathers[0].exchanges) {
        read_slices(s, s->lse, r);
    } else if (s->how.transport == KMLA_TRANSPORT_ALL_TO_ALL) {
        read_own(s, r);
    } else {
        read_slices(s, s->all_lse, r);
    }
}

static void poison_results(const step* s) {
    const kmla_gather* g = &s->gathers[s->c->rank];
    const machine* m = s->c->m;
    const size_t own = (size_t)ROWS * (size_t)g->local_heads;
    machine_poison(m, s->query, (size_t)g->query.bytes);
    machine_poison(m, s->out, (size_t)g->out.bytes);
    machine_poison(m, s->lse, (size_t)g->lse.bytes);
    machine_poison(m, s->all_lse, (size_t)g->lse.bytes);
    if (own > 0) {
        machine_poison(m, s->result, own * KMLA_LATENT_DIMS * sizeof(float));
        machine_poison(m, s->result_lse, own * sizeof(float));
    }
}

// =============================================================================
// The same from one GPU
// =============================================================================

// Plays all ranks, one after the other, and combines this rank's own heads: no exchange at all.
static void play_all_ranks(const step* s, result* r) {
    const comm* c = s->c;
    const kmla_gather* g = &s->gathers[c->rank];
    const machine* m = c->m;
    uint64_t query = machine_alloc(m, (size_t)g->query.bytes);
    uint64_t outs = machine_alloc(m, (size_t)g->out.bytes * (size_t)c->ranks);
    uint64_t lses = machine_alloc(m, (size_t)g->lse.bytes * (size_t)c->ranks);
    memset(r, 0, sizeof *r);
    for (int32_t rank = 0; rank < c->ranks; rank++) {
        write_slice(s, rank, query, m->stream);
    }
    for (int32_t rank = 0; rank < c->ranks; rank++) {
        decode_shard(s, rank, query, outs + (uint64_t)rank * g->out.bytes,
                     lses + (uint64_t)rank * g->lse.bytes, m->stream);
    }
    if (g->local_heads > 0) {
        kmla_combine args;
        memset(&args, 0, sizeof args);
        args.out = s->result;
        args.out_type = KMLA_FP32;
        args.lse = s->result_lse;
        must(kmla_gather_combine(g, KMLA_TRANSPORT_ALL_TO_ALL, outs + g->out.offset_bytes,
                                 lses + g->lse.offset_bytes, &args, &error));
        args.part_out_stride = (int64_t)(g->out.bytes / sizeof(uint16_t)); // whole arrays apart
        args.part_lse_stride = (int64_t)(g->lse.bytes / sizeof(float));
        machine_combine(m, &args, m->stream);
        read_own(s, r);
    }
    machine_wait(m);
    machine_free(m, query);
    machine_free(m, outs);
    machine_free(m, lses);
}

// Decodes own heads over the whole context, with FP32 partials into FP32.
static void decode_whole(const step* s, result* r) {
    const comm* c = s->c;
    const kmla_gather* g = &s->gathers[c->rank];
    const machine* m = c->m;
    kmla_shape shape = step_shape(s, g->local_heads);
    kmla_plan plan;
    kmla_decode args;
    uint64_t query, workspace;
    memset(r, 0, sizeof *r);
    if (g->local_heads == 0) {
        return;
    }
    shape.capacity_tokens = s->ctx->whole.tokens;
    shape.partial_type = KMLA_FP32;
    plan = machine_plan(m, &shape);
    query = machine_alloc(m, (size_t)g->query.bytes);
    workspace = machine_alloc(m, (size_t)plan.workspace_bytes);
    write_slice(s, c->rank, query, m->stream);
    memset(&args, 0, sizeof args);
    args.query = query + g->query.offset_bytes;
    args.query_row_stride_bytes = g->query.row_stride;
    args.query_head_stride_bytes = g->query.head_stride;
    args.scale = SCALE;
    args.kv = s->ctx->whole.kv;
    args.kv_pages = (uint64_t)s->ctx->whole.pages;
    args.block_table = s->ctx->whole.table;
    args.block_table_width = s->ctx->whole.pages;
    args.lengths = s->ctx->length;
    args.out = s->result;
    args.out_type = KMLA_FP32;
    args.lse = s->result_lse;
    args.workspace = workspace;
    args.workspace_bytes = plan.workspace_bytes;
    machine_decode(m, &plan, &args, m->stream);
    read_own(s, r);
    machine_free(m, query);
    machine_free(m, workspace);
}

// Relative L2 of the outputs, and the worst lse, over max(1, |lse|).
static double out_apart(const step* s, const result* a, const result* b) {
    double off = 0.0, size = 0.0;
    for (int row = 0; row < ROWS; row++) {
        for (int32_t head = 0; head < s->gathers[s->c->rank].local_heads; head++) {
            for (int d = 0; d < KMLA_LATENT_DIMS; d++) {
                const double left = (double)a->out[row][head][d];
                const double right = (double)b->out[row][head][d];
                off += (left - right) * (left - right);
                size += right * right;
            }
        }
    }
    return off == 0.0 ? 0.0 : sqrt(off / size);
}

static double lse_apart(const step* s, const result* a, const result* b) {
    double worst = 0.0;
    for (int row = 0; row < ROWS; row++) {
        for (int32_t head = 0; head < s->gathers[s->c->rank].local_heads; head++) {
            const double right = (double)b->lse[row][head];
            const double off = fabs((double)a->lse[row][head] - right) / fmax(1.0, fabs(right));
            worst = off > worst || off != off ? off : worst;
        }
    }
    return worst;
}

// What rounding to BF16 may cost, 2e-3 a time, independent: partials of splits and a rank's part;
// with reduce-scatter also its share, and the sums of ranks on their way, half of them on average.
static double out_bound(const step* s) {
    double roundings = 2.0;
    if (s->how.transport == KMLA_TRANSPORT_REDUCE_SCATTER) {
        roundings += 1.0 + s->c->ranks / 2.0;
    }
    return 2e-3 * sqrt(roundings);
}

// =============================================================================
// Graphs and times
// =============================================================================

typedef void (*launcher)(const void* data, void* stream);

static int has_graphs(const comm* c) {
    return c->m->gpu && c->m->cuda.can_time && (c->nccl_comm || c->ranks == 1);
}

static void* capture(const step* s, launcher launch) {
    const driver* cuda = &s->c->m->cuda;
    void* stream = s->c->m->stream;
    void *graph, *executable;
    driver_must(cuda, cuda->capture_begin(stream, DRIVER_CAPTURE_THREAD_LOCAL),
                "cuStreamBeginCapture");
    launch(s, stream);
    driver_must(cuda, cuda->capture_end(stream, &graph), "cuStreamEndCapture");
    driver_must(cuda, cuda->graph_instantiate(&executable, graph, 0), "cuGraphInstantiate");
    driver_must(cuda, cuda->graph_destroy(graph), "cuGraphDestroy");
    return executable;
}

enum { WARM_UPS = 10, REPLAYS = 51 };

// Median time of a graph. All ranks replay it as often, as its collectives wait for one another.
static double time_graph(const step* s, void* executable) {
    const driver* cuda = &s->c->m->cuda;
    void* stream = s->c->m->stream;
    float times[REPLAYS];
    void *begin, *end;
    driver_must(cuda, cuda->event_create(&begin, 0), "cuEventCreate");
    driver_must(cuda, cuda->event_create(&end, 0), "cuEventCreate");
    comm_wait(s->c);
    for (int i = 0; i < WARM_UPS; i++) {
        driver_replay(cuda, executable, stream, begin, end);
    }
    for (int i = 0; i < REPLAYS; i++) {
        times[i] = driver_replay(cuda, executable, stream, begin, end);
    }
    driver_must(cuda, cuda->event_destroy(begin), "cuEventDestroy");
    driver_must(cuda, cuda->event_destroy(end), "cuEventDestroy");
    qsort(times, REPLAYS, sizeof times[0], driver_compare_floats);
    return 1e3 * times[REPLAYS / 2];
}

// Replays the whole step: the bits of direct launches. Then times its parts; the worst of ranks.
static void time_step(const step* s, const result* direct, result* r, double* us) {
    static const launcher parts[PARTS_OF_A_STEP] = {launch_gather, launch_read, launch_combine,
                                                    launch_step};
    const comm* c = s->c;
    const driver* cuda = &c->m->cuda;
    for (int i = PARTS_OF_A_STEP - 1; i >= 0; i--) { // the whole first: its outputs are looked at
        void* executable = capture(s, parts[i]);
        if (parts[i] == launch_step) {
            poison_results(s);
            comm_wait(c);
            driver_must(cuda, cuda->graph_launch(executable, c->m->stream), "cuGraphLaunch");
            read_result(s, r);
            expect(memcmp(r, direct, sizeof *r) == 0, "a graph has other bits than launches");
        }
        c->all->us[c->rank][i] = time_graph(s, executable);
        driver_must(cuda, cuda->graph_exec_destroy(executable), "cuGraphExecDestroy");
    }
    comm_wait(c);
    for (int i = 0; i < PARTS_OF_A_STEP; i++) {
        us[i] = 0.0;
        for (int32_t rank = 0; rank < c->ranks; rank++) {
            us[i] = c->all->us[rank][i] > us[i] ? c->all->us[rank][i] : us[i];
        }
    }
    comm_wait(c);
}

// =============================================================================
// All ways
// =============================================================================

static void expect_same_on_all_ranks(const comm* c, uint64_t own, const char* what) {
    c->all->digests[c->rank] = own;
    comm_wait(c);
    for (int32_t r = 0; r < c->ranks; r++) {
        expect(c->all->digests[r] == c->all->digests[0], what);
    }
    comm_wait(c);
}

static void check_lse_of_all(const step* s) {
    const size_t bytes = (size_t)s->how.heads * ROWS * sizeof(float);
    if (s->gathers[0].exchanges && s->how.transport == KMLA_TRANSPORT_REDUCE_SCATTER) {
        float* lse = (float*)allocate(bytes);
        machine_read(s->c->m, lse, s->all_lse, bytes);
        expect_same_on_all_ranks(s->c, digest(DIGEST_BEGIN, lse, bytes),
                                 "lse differs between ranks");
        free(lse);
    }
}

// One way. Returns the digest of its result; only rank 0 prints.
static uint64_t run_way(const comm* c, const context* ctx, way how, uint64_t source) {
    static result got, played, whole, replayed;
    double us[PARTS_OF_A_STEP] = {0}, out, lse;
    step s;
    step_make(&s, c, ctx, how, source);
    poison_results(&s);
    comm_wait(c);
    launch_step(&s, c->m->stream);
    read_result(&s, &got);
    check_lse_of_all(&s);
    play_all_ranks(&s, &played);
    decode_whole(&s, &whole);
    out = out_apart(&s, &got, &whole);
    lse = lse_apart(&s, &got, &whole);
    expect(out <= out_bound(&s), "out against one GPU, unsharded");
    expect(lse <= 3e-4, "lse against one GPU, unsharded");
    if (how.transport == KMLA_TRANSPORT_ALL_TO_ALL) {
        expect(memcmp(&got, &played, sizeof got) == 0, "other bits than one GPU as all ranks");
    }
    if (has_graphs(c)) {
        time_step(&s, &got, &replayed, us);
    }
    if (c->rank == 0) {
        printf("  %6lld  %5d  %-5s  %-6s  %-14s  %6llu  %.1e %.1e",
               (long long)ctx->shards[0].tokens, (int)how.heads,
               how.equal_slices ? "equal" : "own",
               how.query_format == KMLA_QUERY_BF16 ? "BF16" : "packed",
               how.transport == KMLA_TRANSPORT_ALL_TO_ALL ? "all-to-all" : "reduce-scatter",
               (unsigned long long)(s.gathers[0].exchanges ? s.gathers[0].query.slice_bytes / ROWS
                                                           : 0),
               out, lse);
        if (has_graphs(c)) {
            printf("  %6.1f %6.1f %6.1f %6.1f", us[0], us[1], us[2], us[3]);
        }
        printf("\n");
        fflush(stdout);
    }
    step_free(&s);
    return digest(DIGEST_BEGIN, &got, sizeof got);
}

// Heads that divide among the ranks, and heads that do not, with slices of their own size and equal
// ones; each by both query formats and transports.
static void run_size(const comm* c, uint64_t values, uint64_t source, int64_t tokens) {
    const int32_t even = 99 / c->ranks * c->ranks;
    const way ways[] = {{even, 1, 0, 0}, {even - 1, 0, 0, 0}, {even - 1, 1, 0, 0}};
    const int all = c->ranks > 1; // one rank has no slices and no transport
    context ctx = context_make(c, values, tokens);
    for (int i = 0; i < (all ? 3 : 1); i++) {
        for (int32_t transport = 0; transport < (all ? 2 : 1); transport++) {
            way how = ways[i];
            uint64_t bf16, packed;
            how.transport = transport;
            bf16 = run_way(c, &ctx, how, source);
            how.query_format = KMLA_QUERY_PACKED;
            packed = run_way(c, &ctx, how, source);
            expect(bf16 == packed, "a packed gather has other bits than a BF16 gather");
        }
    }
    context_free(c, &ctx);
}

enum { RANK_MISMATCHED = 3 }; // exit code of a rank that ran to its end all the same

static int run_rank(shared* all, int32_t ranks, const char* nccl_path, const char* library) {
    static machine m;
    int64_t sizes[] = {2048, 8192, 16384};
    uint16_t *values, *queries;
    uint64_t values_there, source;
    size_t value_bytes = (size_t)SOURCE_TOKENS * KMLA_BF16_BYTES;
    size_t query_bytes = (size_t)ROWS * MOST_HEADS * KMLA_BF16_BYTES;
    const char* why_not;
    comm c;
    why_not = machine_open(&m, library, all->cards > 0 ? my_rank % all->cards : -1);
    if (why_not) {
        fprintf(stderr, "rank %d: %s\n", (int)my_rank, why_not);
        exit(1);
    }
    comm_open(&c, &m, all, ranks, nccl_path);
    if (!m.gpu || !m.cuda.can_time) { // a host, or a driver that only emulates a card: small
        sizes[0] = 100;
        sizes[1] = 0;
    }
    values = normal_bf16(1, (size_t)SOURCE_TOKENS * KMLA_QUERY_DIMS);
    queries = normal_bf16(2, (size_t)ROWS * MOST_HEADS * KMLA_QUERY_DIMS);
    values_there = machine_alloc(&m, value_bytes);
    source = machine_alloc(&m, query_bytes);
    machine_write(&m, values_there, values, value_bytes);
    machine_write(&m, source, queries, query_bytes);
    if (my_rank == 0) {
        printf("%d rank%s on %s, %s; interleave %d, 4 causal verify rows, packed KV, e4m3-query "
               "mode\n"
               "  tokens                                 bytes sent  off one GPU, of%s\n"
               " a shard  heads  slices query   transport       a row      out     lse%s\n",
               (int)ranks, ranks == 1 ? "" : "s", m.gpu ? m.cuda.card : "host readers",
               ranks == 1    ? "nothing is exchanged"
               : c.nccl_comm ? "NCCL"
                             : "exchanges through memory of the host",
               INTERLEAVE, has_graphs(&c) ? "   us, worst rank, of" : "",
               has_graphs(&c) ? "     gather   read combine  step" : "");
        fflush(stdout);
    }
    run_size(&c, values_there, source, INTERLEAVE); // only the first shard is not empty
    for (int i = 0; i < 3 && sizes[i] > 0; i++) {
        run_size(&c, values_there, source, sizes[i] * ranks);
    }
    machine_free(&m, values_there);
    machine_free(&m, source);
    free(values);
    free(queries);
    comm_close(&c);
    machine_close(&m);
    return mismatches ? RANK_MISMATCHED : 0;
}

// =============================================================================
// Processes
// =============================================================================

// Looks for GPUs and NCCL in a process of its own: one that has touched CUDA must not fork ranks.
static void look_around(shared* all, const char* nccl_path, const char* library) {
    pid_t child = fork();
    if (child == 0) {
        nccl n;
        driver cuda;
        const char* why_not;
        if (driver_open(&cuda, library, &why_not)) {
            cuda.device_count(&all->cards);
            all->has_nccl = nccl_open(&n, nccl_path);
        } else {
            printf("no GPU: %s\n", why_not);
            fflush(stdout);
        }
        _exit(0);
    }
    waitpid(child, NULL, 0);
}

// Waits for all ranks. One that did not come to its end ends the others, which would wait for it
// for ever.
static int wait_for_ranks(const pid_t* children, int32_t ranks) {
    int failed = 0, ended[MOST_RANKS] = {0};
    for (int32_t left = ranks; left > 0; left--) {
        int status;
        pid_t child = wait(&status);
        const int code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
        failed = failed || code != 0;
        for (int32_t r = 0; r < ranks; r++) {
            ended[r] = ended[r] || children[r] == child;
            if (code != 0 && code != RANK_MISMATCHED && !ended[r]) {
                kill(children[r], SIGTERM);
            }
        }
    }
    return failed;
}

static int usage(void) {
    fprintf(stderr, "usage: dcp_nccl [--ranks N] [--nccl PATH] [--memory] [--library PATH]\n");
    return 2;
}

int main(int count, char** words) {
    const char *library = NULL, *nccl_path = NULL;
    pthread_barrierattr_t attributes;
    pid_t children[MOST_RANKS];
    int32_t ranks = 0;
    int memory = 0, failed;
    shared* all;
    for (int i = 1; i < count; i++) {
        if (strcmp(words[i], "--memory") == 0) {
            memory = 1;
        } else if (i + 1 == count) {
            return usage();
        } else if (strcmp(words[i], "--ranks") == 0) {
            ranks = atoi(words[++i]);
            if (ranks < 1 || ranks > MOST_RANKS) {
                fprintf(stderr, "1 to %d ranks\n", MOST_RANKS);
                return 2;
            }
        } else if (strcmp(words[i], "--nccl") == 0) {
            nccl_path = words[++i];
        } else if (strcmp(words[i], "--library") == 0) {
            library = words[++i];
        } else {
            return usage();
        }
    }
    all = (shared*)mmap(NULL, sizeof *all, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1,
                        0);
    if (all == (shared*)MAP_FAILED) {
        fprintf(stderr, "no shared memory\n");
        return 1;
    }
    look_around(all, nccl_path, library);
    ranks = ranks ? ranks : all->cards > MOST_RANKS ? MOST_RANKS : all->cards ? all->cards : 3;
    if (all->cards > 0 && ranks > 1 && !memory && !all->has_nccl) {
        printf("no NCCL: %s was not found or lacks a function; --nccl PATH names another\n",
               nccl_path ? nccl_path : "libnccl.so.2");
    } else if (all->has_nccl && !memory && ranks > all->cards && !nccl_path) {
        printf("no NCCL: it wants a GPU for each of %d ranks, there are %d\n", (int)ranks,
               all->cards);
        memory = 1;
    }
    all->has_nccl = all->has_nccl && !memory && ranks > 1;
    fflush(stdout);
    pthread_barrierattr_init(&attributes);
    pthread_barrierattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(&all->barrier, &attributes, (unsigned)ranks);
    for (my_rank = 0; my_rank < ranks; my_rank++) {
        children[my_rank] = fork();
        if (children[my_rank] == 0) {
            snprintf(speaker, sizeof speaker, " on rank %d", (int)my_rank);
            exit(run_rank(all, ranks, nccl_path, library));
        }
    }
    failed = wait_for_ranks(children, ranks);
    printf(failed ? "\nMISMATCHES or errors, see above\n" : "\nall as expected\n");
    return failed;
}
