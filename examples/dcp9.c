// dcp9.c - Kimi-K3 on 9 GPUs: 11 heads a rank, the context sharded over the ranks (DCP).
//
// Plans it, then simulates the 9 ranks of a verify step (4 causal rows) one after the other on the
// first GPU, or on the host reader where there is none, at smaller sizes:
//
//     1. every rank's KV writer packs the tokens that the rank owns into its own paged pool;
//     2. the queries of all ranks are gathered: 9 x 11 = 99 heads;
//     3. every rank decodes the 99 heads over its shard;
//     4. every rank combines what the ranks have for its own 11 heads, by their lse.
//
// The result is checked against fp64 over the same records, unsharded. Steps 2 to 4 are done with
// heads stored 99, 104 and 112 wide, the padding full of NaN: the 99 heads' bits must not change.
// Exit code 1 on any mismatch.

#define KIMI_MLA_IMPLEMENTATION
#include "../kimi_mla.h"

#include "machine.h"

enum { RANKS = 9, LOCAL_HEADS = 11, HEADS = RANKS * LOCAL_HEADS, ROWS = 4, PAGE = 64 };
enum { STORED_KINDS = 3, SIZES = 3 };

static const int32_t stored_heads[STORED_KINDS] = {HEADS, 104, 112};
static const int64_t gpu_local_tokens[SIZES] = {2048, 8192, 16384};
static const int64_t host_local_tokens[SIZES] = {64, 128, 256};

#define SCALE 0.07216878f // Kimi-K3: 192^-0.5

// =============================================================================
// The plan of the heads
// =============================================================================

static void print_heads(const char* name, int32_t kv_format, int32_t padding, int32_t want_padded,
                        int32_t want_tiles, int32_t want_launches) {
    const int32_t steps_times_layers = 4 * 24;
    kmla_heads_desc desc = {LOCAL_HEADS, RANKS, kv_format, padding};
    kmla_heads heads;
    must(kmla_plan_heads(&desc, &heads, &error));
    printf("  %-23s %3d -> %3d  %3d of %2d  %8d  %8d\n", name, (int)heads.effective,
           (int)heads.padded, (int)heads.tiles, (int)heads.tile, (int)heads.launches,
           (int)(heads.launches * steps_times_layers));
    expect(heads.padded == want_padded && heads.tiles == want_tiles &&
               heads.launches == want_launches,
           name);
}

static void plan_heads(void) {
    printf("11 heads x 9 ranks, for a reader whose launches have whole tiles only\n"
           "  KV, padding                 heads     tiles  launches  in 4 steps x 24 layers\n");
    print_heads("packed, to the tile", KMLA_KV_PACKED, KMLA_PAD_TILE, 112, 7, 1);
    print_heads("packed, to eight", KMLA_KV_PACKED, KMLA_PAD_EIGHT, 104, 7, 2);
    print_heads("E4M3, to the tile", KMLA_KV_E4M3, KMLA_PAD_TILE, 104, 13, 1);
    printf("The reader of kimi_mla.h needs no padding: 99 heads, one launch.\n\n");
}

// =============================================================================
// A context, sharded
// =============================================================================

typedef struct context {
    int64_t tokens; // global
    int32_t interleave;
    int64_t shard_tokens; // room of a shard
    int64_t pages;        // of a shard
    size_t shard_bytes;
    const uint16_t* values; // [tokens][576] BF16: what is cached
    uint64_t shard[RANKS];  // packed records, in pages
    uint64_t table;         // int32 [pages]; the same in every rank
    int32_t* host_table;
} context;

static kmla_dcp dcp_of(const context* c, int32_t rank) {
    kmla_dcp dcp = {RANKS, rank, c->interleave};
    return dcp;
}

static int64_t slot_of(const context* c, int64_t local_token) {
    return (int64_t)c->host_table[local_token / PAGE] * PAGE + local_token % PAGE;
}

// A rank's writer sees every new token; those of other ranks have slot -1 and are skipped.
static void write_shard(const machine* m, const context* c, uint64_t values, int32_t rank) {
    size_t bytes = (size_t)c->tokens * sizeof(int64_t);
    int64_t* slots = (int64_t*)allocate(bytes);
    uint64_t slots_there = machine_alloc(m, bytes);
    kmla_dcp dcp = dcp_of(c, rank);
    kmla_kv_write args;
    for (int64_t token = 0; token < c->tokens; token++) {
        int32_t owner;
        int64_t local;
        must(kmla_token_owner(&dcp, token, &owner, &local, &error));
        slots[token] = owner == rank ? slot_of(c, local) : -1;
    }
    machine_write(m, slots_there, slots, bytes);
    memset(&args, 0, sizeof args);
    args.tokens = (int32_t)c->tokens;
    args.kv_format = KMLA_KV_PACKED;
    args.source_type = KMLA_BF16;
    args.page_tokens = PAGE;
    args.latent = values;
    args.latent_stride = KMLA_QUERY_DIMS;
    args.rope = values + KMLA_LATENT_DIMS * sizeof(uint16_t);
    args.rope_stride = KMLA_QUERY_DIMS;
    args.slots = slots_there;
    args.kv = c->shard[rank];
    args.kv_pages = (uint64_t)c->pages;
    machine_write_kv(m, &args, NULL);
    machine_free(m, slots_there); // waits for the writer
    free(slots);
}

static void context_make(const machine* m, context* c, int64_t tokens, int32_t interleave,
                         const uint16_t* values) {
    size_t value_bytes = (size_t)tokens * KMLA_BF16_BYTES;
    uint64_t values_there = machine_alloc(m, value_bytes);
    kmla_dcp dcp;
    memset(c, 0, sizeof *c);
    c->tokens = tokens;
    c->interleave = interleave;
    c->values = values;
    dcp = dcp_of(c, 0);
    must(kmla_shard_capacity(&dcp, tokens, &c->shard_tokens, &error));
    c->pages = (c->shard_tokens + PAGE - 1) / PAGE;
    c->shard_bytes = (size_t)c->pages * PAGE * KMLA_PACKED_BYTES;
    c->host_table = (int32_t*)allocate((size_t)c->pages * sizeof(int32_t));
    for (int64_t i = 0; i < c->pages; i++) { // even pages upwards, odd ones back down
        c->host_table[i] = (int32_t)(i < (c->pages + 1) / 2 ? 2 * i : 2 * (c->pages - i) - 1);
    }
    c->table = machine_alloc(m, (size_t)c->pages * sizeof(int32_t));
    machine_write(m, c->table, c->host_table, (size_t)c->pages * sizeof(int32_t));
    machine_write(m, values_there, values, value_bytes);
    for (int32_t rank = 0; rank < RANKS; rank++) {
        c->shard[rank] = machine_alloc(m, c->shard_bytes);
        write_shard(m, c, values_there, rank);
    }
    machine_free(m, values_there);
}

static void context_free(const machine* m, context* c) {
    for (int32_t rank = 0; rank < RANKS; rank++) {
        machine_free(m, c->shard[rank]);
    }
    machine_free(m, c->table);
    free(c->host_table);
}

// =============================================================================
// A verify step of all ranks, with heads stored so wide
// =============================================================================

typedef struct step {
    const machine* m;
    const context* c;
    int32_t stored;
    kmla_plan plans[RANKS];
    uint64_t query;    // [ROWS][stored] BF16 records, gathered
    uint64_t length;   // int32 [1], global
    uint64_t part_out; // BF16 [RANKS][ROWS][stored][512]
    uint64_t part_lse; // fp32 [RANKS][ROWS][stored]
    uint64_t out;      // BF16 [RANKS][ROWS][LOCAL_HEADS][512]: every rank's own heads
    uint64_t lse;      // fp32 [RANKS][ROWS][LOCAL_HEADS]
    uint64_t workspace;
    size_t out_bytes, lse_bytes;
} step;

// The gathered index of a head is rank * LOCAL_HEADS + head. The padding stays NaN.
static void gather_queries(step* s, const uint16_t* queries) {
    for (int32_t row = 0; row < ROWS; row++) {
        machine_write(s->m, s->query + (uint64_t)(row * s->stored) * KMLA_BF16_BYTES,
                      queries + (size_t)row * HEADS * KMLA_QUERY_DIMS, HEADS * KMLA_BF16_BYTES);
    }
}

// Bits do not depend on how many heads are stored as long as the splits are the same ones.
static void step_plan(step* s, int32_t splits) {
    kmla_shape shape;
    memset(&shape, 0, sizeof shape);
    shape.requests = 1;
    shape.rows_per_request = ROWS;
    shape.heads = s->stored;
    shape.capacity_tokens = s->c->shard_tokens;
    shape.page_tokens = PAGE;
    shape.splits = splits;
    shape.lengths.lengths_kind = KMLA_LENGTHS_PER_REQUEST; // global, localised by the reader
    for (int32_t rank = 0; rank < RANKS; rank++) {
        shape.lengths.dcp = dcp_of(s->c, rank);
        s->plans[rank] = machine_plan(s->m, &shape);
    }
}

static void step_make(step* s, const machine* m, const context* c, int32_t stored, int32_t splits,
                      const uint16_t* queries) {
    const size_t vectors = (size_t)ROWS * (size_t)stored;
    int32_t length = (int32_t)c->tokens;
    memset(s, 0, sizeof *s);
    s->m = m;
    s->c = c;
    s->stored = stored;
    step_plan(s, splits);
    s->out_bytes = RANKS * ROWS * LOCAL_HEADS * KMLA_LATENT_DIMS * sizeof(uint16_t);
    s->lse_bytes = RANKS * ROWS * LOCAL_HEADS * sizeof(float);
    s->query = machine_alloc(m, vectors * KMLA_BF16_BYTES);
    s->length = machine_alloc(m, sizeof length);
    s->part_out = machine_alloc(m, RANKS * vectors * KMLA_LATENT_DIMS * sizeof(uint16_t));
    s->part_lse = machine_alloc(m, RANKS * vectors * sizeof(float));
    s->out = machine_alloc(m, s->out_bytes);
    s->lse = machine_alloc(m, s->lse_bytes);
    s->workspace = machine_alloc(m, (size_t)s->plans[0].workspace_bytes + 16);
    machine_write(m, s->length, &length, sizeof length);
    gather_queries(s, queries);
}

static void step_free(step* s) {
    const uint64_t owned[] = {s->query, s->length, s->part_out, s->part_lse,
                              s->out,   s->lse,    s->workspace};
    for (size_t i = 0; i < sizeof owned / sizeof owned[0]; i++) {
        machine_free(s->m, owned[i]);
    }
}

static void decode_rank(const step* s, int32_t rank, void* stream) {
    uint64_t vectors = (uint64_t)ROWS * (uint64_t)s->stored;
    kmla_decode args;
    memset(&args, 0, sizeof args);
    args.query = s->query;
    args.scale = SCALE;
    args.kv = s->c->shard[rank];
    args.kv_pages = (uint64_t)s->c->pages;
    args.block_table = s->c->table;
    args.block_table_width = s->c->pages;
    args.lengths = s->length;
    args.out = s->part_out + (uint64_t)rank * vectors * KMLA_LATENT_DIMS * sizeof(uint16_t);
    args.out_type = KMLA_BF16;
    args.lse = s->part_lse + (uint64_t)rank * vectors * sizeof(float);
    args.workspace = s->workspace;
    args.workspace_bytes = s->plans[rank].workspace_bytes;
    machine_decode(s->m, &s->plans[rank], &args, stream);
}

static void decode_all_ranks(void* data, void* stream) {
    const step* s = (const step*)data;
    for (int32_t rank = 0; rank < RANKS; rank++) {
        decode_rank(s, rank, stream);
    }
}

static void combine_rank(const step* s, int32_t rank) {
    uint64_t first = (uint64_t)rank * LOCAL_HEADS;
    uint64_t own = (uint64_t)rank * ROWS * LOCAL_HEADS;
    kmla_combine args;
    memset(&args, 0, sizeof args);
    args.parts = RANKS;
    args.rows = ROWS;
    args.heads = LOCAL_HEADS;
    args.part_type = KMLA_BF16;
    args.part_out = s->part_out + first * KMLA_LATENT_DIMS * sizeof(uint16_t);
    args.part_row_stride = (int64_t)s->stored * KMLA_LATENT_DIMS;
    args.part_lse = s->part_lse + first * sizeof(float);
    args.part_lse_row_stride = s->stored;
    args.out = s->out + own * KMLA_LATENT_DIMS * sizeof(uint16_t);
    args.out_type = KMLA_BF16;
    args.lse = s->lse + own * sizeof(float);
    machine_combine(s->m, &args, NULL);
}

// What all ranks have in the end.
typedef struct result {
    uint16_t out[RANKS][ROWS][LOCAL_HEADS][KMLA_LATENT_DIMS]; // BF16
    float lse[RANKS][ROWS][LOCAL_HEADS];
} result;

static void step_run(step* s, result* r) {
    decode_all_ranks(s, NULL);
    for (int32_t rank = 0; rank < RANKS; rank++) {
        combine_rank(s, rank);
    }
    machine_read(s->m, r->out, s->out, s->out_bytes);
    machine_read(s->m, r->lse, s->lse, s->lse_bytes);
}

static uint64_t result_digest(const result* r) {
    uint64_t hash = digest(DIGEST_BEGIN, r->out, sizeof r->out);
    return digest(hash, r->lse, sizeof r->lse);
}

// =============================================================================
// fp64, unsharded
// =============================================================================

enum { MOST_VECTORS = ROWS * HEADS };
#define REFERENCE_WORK 1000000 // token-vector pairs: takes about a second

typedef struct vector {
    int32_t row, head; // of the 99
    double query[KMLA_QUERY_DIMS];
    double out[KMLA_LATENT_DIMS];
    double most, sum; // running maximum of the scores, and sum of the weights below it
} vector;

static void add_token(vector* v, const double* key) {
    double score = 0.0, weight;
    for (int i = 0; i < KMLA_QUERY_DIMS; i++) {
        score += v->query[i] * key[i];
    }
    score *= (double)SCALE;
    if (score > v->most) {
        double shrink = exp(v->most - score);
        for (int i = 0; i < KMLA_LATENT_DIMS; i++) {
            v->out[i] *= shrink;
        }
        v->sum *= shrink;
        v->most = score;
    }
    weight = exp(score - v->most);
    v->sum += weight;
    for (int i = 0; i < KMLA_LATENT_DIMS; i++) {
        v->out[i] += weight * key[i];
    }
}

typedef struct accuracy {
    int vectors;      // that were compared
    double worst_out; // relative L2
    double worst_lse; // absolute, over max(1, |lse|)
    double records;   // relative L2 that packing costs the latents
} accuracy;

// All vectors where that is quick, else some spread over rows and heads.
static int choose_vectors(vector* vectors, int64_t tokens, const uint16_t* queries) {
    int64_t affordable = REFERENCE_WORK / tokens;
    int count = affordable > MOST_VECTORS ? MOST_VECTORS : affordable < 4 ? 4 : (int)affordable;
    for (int i = 0; i < count; i++) {
        vector* v = &vectors[i];
        int which =
            count == MOST_VECTORS ? i : (int)((int64_t)i * (MOST_VECTORS - 1) / (count - 1));
        memset(v, 0, sizeof *v);
        v->row = which % ROWS;
        v->head = which / ROWS;
        v->most = -HUGE_VAL;
        for (int d = 0; d < KMLA_QUERY_DIMS; d++) {
            size_t at = (size_t)(v->row * HEADS + v->head) * KMLA_QUERY_DIMS + (size_t)d;
            v->query[d] = (double)kmla_bf16_to_float(queries[at]);
        }
    }
    return count;
}

// Walks the global context once, every token from the shard that holds it; row i sees the tokens
// before position tokens - ROWS + 1 + i.
static accuracy compare(const machine* m, const context* c, const result* r,
                        const uint16_t* queries) {
    vector* vectors = (vector*)allocate(MOST_VECTORS * sizeof *vectors);
    uint8_t* shards = (uint8_t*)allocate(RANKS * c->shard_bytes);
    double key[KMLA_QUERY_DIMS], lost = 0.0, all = 0.0;
    accuracy a = {0, 0.0, 0.0, 0.0};
    kmla_dcp dcp = dcp_of(c, 0);
    a.vectors = choose_vectors(vectors, c->tokens, queries);
    for (int32_t rank = 0; rank < RANKS; rank++) {
        machine_read(m, shards + (size_t)rank * c->shard_bytes, c->shard[rank], c->shard_bytes);
    }
    for (int64_t token = 0; token < c->tokens; token++) {
        int32_t rank;
        int64_t local;
        must(kmla_token_owner(&dcp, token, &rank, &local, &error));
        read_record(shards + (size_t)rank * c->shard_bytes +
                        (size_t)slot_of(c, local) * KMLA_PACKED_BYTES,
                    key);
        for (int d = 0; d < KMLA_LATENT_DIMS; d++) {
            double value = (double)kmla_bf16_to_float(c->values[token * KMLA_QUERY_DIMS + d]);
            lost += (key[d] - value) * (key[d] - value);
            all += value * value;
        }
        for (int i = 0; i < a.vectors; i++) {
            if (token < c->tokens - ROWS + 1 + vectors[i].row) {
                add_token(&vectors[i], key);
            }
        }
    }
    a.records = sqrt(lost / all);
    for (int i = 0; i < a.vectors; i++) {
        const vector* v = &vectors[i];
        int32_t rank = v->head / LOCAL_HEADS, head = v->head % LOCAL_HEADS;
        double off = 0.0, size = 0.0, lse = v->most + log(v->sum);
        for (int d = 0; d < KMLA_LATENT_DIMS; d++) {
            double want = v->out[d] / v->sum;
            double got = (double)kmla_bf16_to_float(r->out[rank][v->row][head][d]);
            off += (got - want) * (got - want);
            size += want * want;
        }
        a.worst_out = worse(sqrt(off / size), a.worst_out);
        a.worst_lse = worse(fabs((double)r->lse[rank][v->row][head] - lse) / fmax(1.0, fabs(lse)),
                            a.worst_lse);
    }
    free(vectors);
    free(shards);
    return a;
}

// =============================================================================
// All sizes
// =============================================================================

enum { REPLAYS = 21 };

// A decode whose out is rounded to BF16 once is right to 2e-3. Here the ranks' parts and the
// combined out are rounded, and the partials of splits too: independent, so they add as squares.
static void judge(const accuracy* a, int32_t splits) {
    double roundings = splits > 1 ? 3 : 2;
    expect(a->worst_out <= 2e-3 * sqrt(roundings), "out against fp64");
    expect(a->worst_lse <= 3e-4, "lse against fp64");
    expect(a->records <= 0.04, "records against what was written");
}

static void run_size(const machine* m, int64_t local_tokens, int32_t interleave,
                     const uint16_t* values, const uint16_t* queries) {
    result* r = (result*)allocate(sizeof *r);
    uint64_t digests[STORED_KINDS];
    double us[STORED_KINDS];
    int32_t splits = 0; // the planner's, for 99 heads
    accuracy a = {0, 0.0, 0.0, 0.0};
    context c;
    context_make(m, &c, local_tokens * RANKS, interleave, values);
    for (int kind = 0; kind < STORED_KINDS; kind++) {
        step s;
        step_make(&s, m, &c, stored_heads[kind], splits, queries);
        splits = s.plans[0].splits;
        step_run(&s, r);
        digests[kind] = result_digest(r);
        if (kind == 0) {
            a = compare(m, &c, r, queries);
        }
        us[kind] =
            m->gpu ? driver_time_graph(&m->cuda, decode_all_ranks, &s, REPLAYS).median_us / RANKS
                   : 0.0;
        step_free(&s);
    }
    printf("  %6lld  %10d  %6d  %016llx  %-16s  %.1e  %.1e  %7d", (long long)local_tokens,
           (int)interleave, (int)splits, (unsigned long long)digests[0],
           digests[1] == digests[0] && digests[2] == digests[0] ? "the same" : "DIFFERENT",
           a.worst_out, a.worst_lse, a.vectors);
    if (m->gpu && m->cuda.can_time) {
        printf("  %6.1f %6.1f %6.1f", us[0], us[1], us[2]);
    }
    printf("\n");
    fflush(stdout);
    expect(digests[1] == digests[0], "digest of 104 stored heads");
    expect(digests[2] == digests[0], "digest of 112 stored heads");
    judge(&a, splits);
    context_free(m, &c);
    free(r);
}

int main(int count, char** words) {
    static const int32_t interleaves[] = {1, 64};
    static machine m;
    const char* library = count == 3 && strcmp(words[1], "--library") == 0 ? words[2] : NULL;
    const int64_t* sizes;
    int small;
    uint16_t *values, *queries;
    if (count != 1 && !library) {
        fprintf(stderr, "usage: dcp9 [--library PATH]    PATH: libcuda and NVRTC in one library\n");
        return 1;
    }
    plan_heads();
    machine_open_first(&m, library);
    small = !m.gpu || !m.cuda.can_time; // a host, or a driver that only emulates a card
    sizes = small ? host_local_tokens : gpu_local_tokens;
    values = normal_bf16(1, (size_t)(sizes[SIZES - 1] * RANKS) * KMLA_QUERY_DIMS);
    queries = normal_bf16(2, (size_t)MOST_VECTORS * KMLA_QUERY_DIMS);
    printf(
        "9 ranks, 4 causal verify rows, 99 heads, packed KV; BF16 queries, partials and outputs\n"
        "  tokens                      digest of out and lse              off fp64, of%s\n"
        "  a rank  interleave  splits  99 heads stored   104 and 112       out      lse  vectors"
        "%s\n",
        small ? "" : "           us a rank, 99, 104", small ? "" : "  and 112 heads stored");
    for (int i = 0; i < SIZES; i++) {
        for (int k = 0; k < 2; k++) {
            run_size(&m, sizes[i], interleaves[k], values, queries);
        }
    }
    free(values);
    free(queries);
    machine_close(&m);
    printf(mismatches ? "\n%d MISMATCHES\n" : "\nall as expected\n", mismatches);
    return mismatches ? 1 : 0;
}
