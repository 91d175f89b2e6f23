// bench.c - times kimi_mla.h on the first card, and checks what it timed.
//
//     make -C tools bench [ARGS="--csv table.csv"]
//
// Time: a CUDA graph of 20 decode calls (reader and merge), which rotate over pools of random
// records with shuffled pages; the median over replays of the graph, divided by the calls. Pools
// are as many as make 1 GiB, 2 to 8: of small shapes all pools together may fit the L2 cache
// (column "pools MB" has their size; --pools N takes more and does not fit).
// Useful work: 2,176 FLOP per token and query vector (1,088 multiply-adds), and the bytes of a
// record per token and request, however often a kernel computes or reads them.
// Check: after the last replay, 2 random vectors of its last call against fp64 over the very same
// records. A wrong one ends the program with 1.

#define KIMI_MLA_IMPLEMENTATION
#include "../kimi_mla.h"

#include "../examples/driver.h"
#include "../examples/stand_in.h"

#include <time.h>

typedef struct bench_case {
    int32_t requests, rows, heads; // rows of one request, causal
    int64_t tokens;                // of each request
    // FlashMLA's FP8 sparse reader (2026-04), which reads the same 656-byte records and takes 64 or
    // 128 heads only; measured on one H200 on 2026-12-01 in the way described above.
    double flashmla_us;
} bench_case;

static const bench_case bench_cases[] = {
    {1, 4, 99, 2048, 18.1},   {1, 4, 99, 8192, 36.2},   {1, 4, 99, 16384, 59.1},
    {1, 4, 99, 65536, 172},   {1, 1, 99, 16384, 39.6},  {8, 4, 99, 8192, 178},
    {1, 1, 12, 131072, 91.8}, {64, 1, 12, 8192, 225},   {128, 1, 8, 8192, 415},
    {128, 1, 128, 4096, 369}, {128, 2, 128, 4096, 671}, {32, 4, 12, 16384, 797},
};
enum { BENCH_CASES = sizeof bench_cases / sizeof bench_cases[0] };

#define BENCH_SCALE 0.07216878f  // Kimi-K3: 192^-0.5
#define BENCH_KV_SCALE 0.015625f // of E4M3 pools: 7 sigma at 448
#define BENCH_FLOP 2176.0        // per token and query vector
#define BENCH_PAGE 64            // tokens
#define BENCH_SET_BYTES (1u << 30)

typedef struct options {
    int32_t splits, tile, reader, partial_type, split_mode, mode, kv_format;
    int32_t only;  // 1.. of the cases, 0 = all
    int32_t pools; // 0 = 2 to 8
    int32_t calls; // of a graph
    int32_t replays;
    int64_t tokens;   // 0 = the case's
    int64_t capacity; // of plans, 0 = the tokens
    int sweep, pad, spec;
    const char* csv;
    const char* library; // libcuda and NVRTC in one, for an emulator
} options;

typedef struct bench {
    options option;
    driver cuda;
    kmla_gpu* gpu;
    kmla_device card;
    uint64_t source; // random BF16 [SOURCE_TOKENS][576] on the card
    uint64_t random; // state
    FILE* csv;
} bench;

enum { SOURCE_TOKENS = 24576, SOURCE_PIECE = 8192 };

static void must(kmla_status status, const kmla_error* error) {
    if (status != KMLA_OK) {
        fprintf(stderr, "%s: %s\n", kmla_status_name(status), error->message);
        exit(1);
    }
}

static uint64_t address_of(const void* memory) { return (uint64_t)(uintptr_t)memory; }

// =============================================================================
// Random data
// =============================================================================

static int64_t random_below(uint64_t* state, int64_t count) {
    return (int64_t)(next_random(state) % (uint64_t)count);
}


static void shuffle(uint64_t* state, int32_t* values, int32_t count) {
    for (int32_t i = 0; i < count; i++) {
        values[i] = i;
    }
    for (int32_t i = count - 1; i > 0; i--) {
        int32_t j = (int32_t)random_below(state, i + 1);
        int32_t kept = values[i];
        values[i] = values[j];
        values[j] = kept;
    }
}

// =============================================================================
// One case's data on the card
// =============================================================================

// What fp64 has for one vector.
typedef struct answer {
    int32_t row, head;
    double out[KMLA_LATENT_DIMS];
    double lse;
} answer;
enum { ANSWERS = 2 };

typedef struct job {
    kmla_shape shape;     // without tile and splits
    int32_t stored_heads; // >= shape.heads: how wide queries and outputs are stored
    int32_t pools;
    int64_t tokens; // of each request; shape has the capacity
    int64_t pages_per_request;
    int64_t pages;       // of a pool
    int64_t table_width; // pages that the capacity covers; no page beyond a request's own
    uint64_t pool_bytes;
    uint64_t kv, tables, query, lengths, out, lse; // on the card
    int32_t* host_tables;                          // [pools][requests][pages_per_request]
    uint16_t* host_query;                          // [rows][stored heads][576]
    answer answers[ANSWERS];                       // of a graph's last call
} job;

// Every pool has its turn in a graph.
static int32_t calls_of_graph(const bench* b, const job* work) {
    return work->pools > b->option.calls ? work->pools : b->option.calls;
}

static uint64_t pool_of(const job* work, int32_t pool) {
    return work->kv + (uint64_t)pool * work->pool_bytes;
}

// Writes a pool's records, a piece of the source for every piece of the tokens: where in the
// source it begins is random, so that a reader of a wrong page gets wrong numbers.
static void write_pool(bench* b, const job* work, int32_t pool) {
    const int32_t* table = work->host_tables + pool * work->pages;
    int64_t* slots = (int64_t*)allocate(SOURCE_PIECE * sizeof *slots);
    uint64_t device_slots = driver_alloc(&b->cuda, SOURCE_PIECE * sizeof *slots);
    int64_t tokens = work->pages * BENCH_PAGE;
    for (int64_t first = 0; first < tokens; first += SOURCE_PIECE) {
        int64_t count = tokens - first < SOURCE_PIECE ? tokens - first : SOURCE_PIECE;
        int64_t begin = random_below(&b->random, SOURCE_TOKENS - SOURCE_PIECE);
        kmla_kv_write args;
        kmla_error error;
        for (int64_t i = 0; i < count; i++) {
            int64_t token = first + i;
            slots[i] = (int64_t)table[token / BENCH_PAGE] * BENCH_PAGE + token % BENCH_PAGE;
        }
        driver_upload(&b->cuda, device_slots, slots, (size_t)count * sizeof *slots);
        memset(&args, 0, sizeof args);
        args.tokens = (int32_t)count;
        args.kv_format = work->shape.kv_format;
        args.kv_scale = BENCH_KV_SCALE;
        args.page_tokens = BENCH_PAGE;
        args.latent = b->source + (uint64_t)begin * KMLA_BF16_BYTES;
        args.latent_stride = KMLA_QUERY_DIMS;
        args.rope = args.latent + KMLA_LATENT_DIMS * 2;
        args.rope_stride = KMLA_QUERY_DIMS;
        args.slots = device_slots;
        args.kv = pool_of(work, pool);
        args.kv_pages = (uint64_t)work->pages;
        must(kmla_gpu_write_kv(b->gpu, &args, NULL, &error), &error);
        driver_must(&b->cuda, b->cuda.context_synchronize(), "cuCtxSynchronize");
    }
    driver_free(&b->cuda, device_slots);
    free(slots);
}

// The tables as wide as the capacity; past the tokens they name no page of the pool.
static void upload_tables(const bench* b, job* work) {
    int64_t rows = (int64_t)work->pools * work->shape.requests;
    size_t bytes = (size_t)(rows * work->table_width) * sizeof(int32_t);
    int32_t* tables = (int32_t*)allocate(bytes);
    memset(tables, 0x7f, bytes);
    for (int64_t row = 0; row < rows; row++) {
        memcpy(tables + row * work->table_width, work->host_tables + row * work->pages_per_request,
               (size_t)work->pages_per_request * sizeof(int32_t));
    }
    work->tables = driver_alloc(&b->cuda, bytes);
    driver_upload(&b->cuda, work->tables, tables, bytes);
    free(tables);
}

static void make_pools(bench* b, job* work) {
    size_t entries = (size_t)work->pools * (size_t)work->pages;
    work->host_tables = (int32_t*)allocate(entries * sizeof *work->host_tables);
    work->kv = driver_alloc(&b->cuda, (size_t)work->pools * work->pool_bytes);
    for (int32_t pool = 0; pool < work->pools; pool++) {
        shuffle(&b->random, work->host_tables + pool * work->pages, (int32_t)work->pages);
        write_pool(b, work, pool);
    }
    upload_tables(b, work);
}

static void make_queries(bench* b, job* work) {
    size_t vectors = (size_t)work->shape.rows * (size_t)work->stored_heads;
    int32_t* lengths = (int32_t*)allocate((size_t)work->shape.requests * sizeof *lengths);
    work->host_query = (uint16_t*)allocate(vectors * KMLA_BF16_BYTES);
    fill_normal(&b->random, work->host_query, vectors * KMLA_QUERY_DIMS);
    work->query = driver_alloc(&b->cuda, vectors * KMLA_BF16_BYTES);
    driver_upload(&b->cuda, work->query, work->host_query, vectors * KMLA_BF16_BYTES);
    for (int32_t i = 0; i < work->shape.requests; i++) {
        lengths[i] = (int32_t)work->tokens;
    }
    work->lengths = driver_alloc(&b->cuda, (size_t)work->shape.requests * sizeof *lengths);
    driver_upload(&b->cuda, work->lengths, lengths, (size_t)work->shape.requests * sizeof *lengths);
    free(lengths);
    work->out = driver_alloc(&b->cuda, vectors * KMLA_LATENT_DIMS * 2);
    work->lse = driver_alloc(&b->cuda, vectors * 4);
}

// The values of a record, exactly.
static void read_any_record(int32_t format, const uint8_t* record, double* values) {
    static double code_values[256];
    if (code_values[1] == 0.0) {
        for (int code = 0; code < 256; code++) {
            code_values[code] = (double)kmla_e4m3_to_float((uint8_t)code);
        }
    }
    const uint8_t* bf16 = format == KMLA_KV_PACKED ? record + KMLA_PACKED_ROPE_OFFSET : record;
    int32_t codes = format == KMLA_KV_PACKED ? KMLA_LATENT_DIMS
                    : format == KMLA_KV_E4M3 ? KMLA_QUERY_DIMS
                                             : 0;
    for (int32_t i = 0; i < codes; i++) {
        float scale = BENCH_KV_SCALE;
        if (format == KMLA_KV_PACKED) {
            memcpy(&scale, record + KMLA_PACKED_SCALE_OFFSET + i / KMLA_GROUP_DIMS * 4, 4);
        }
        values[i] = code_values[record[i]] * (double)scale;
    }
    for (int32_t i = codes; i < KMLA_QUERY_DIMS; i++) {
        uint16_t bits;
        memcpy(&bits, bf16 + (i - codes) * 2, 2);
        values[i] = (double)kmla_bf16_to_float(bits);
    }
}

// The query that the mode computes with: as it is, or as the packed query writer stores it.
static void read_query(const job* work, int64_t vector, double* values) {
    const uint16_t* bf16 = work->host_query + vector * KMLA_QUERY_DIMS;
    if (work->shape.mode == KMLA_MODE_EXACT) {
        read_any_record(KMLA_KV_BF16, (const uint8_t*)bf16, values);
    } else {
        uint64_t aligned[KMLA_BF16_BYTES / 8 + 2], packed[KMLA_PACKED_BYTES / 8 + 2];
        uint64_t from = (address_of(aligned) + 15) / 16 * 16;
        uint64_t to = (address_of(packed) + 15) / 16 * 16;
        kmla_query_write args;
        kmla_error error;
        memcpy((void*)(uintptr_t)from, bf16, KMLA_BF16_BYTES);
        memset(&args, 0, sizeof args);
        args.rows = 1;
        args.heads = 1;
        args.query_format = KMLA_QUERY_PACKED;
        args.source_type = KMLA_BF16;
        args.source = from;
        args.query = to;
        must(kmla_host_write_query(&args, &error), &error);
        read_any_record(KMLA_KV_PACKED, (const uint8_t*)(uintptr_t)to, values);
    }
}

// Decodes one vector in fp64, page by page with a running maximum.
static void answer_vector(const bench* b, const job* work, int32_t pool, answer* a) {
    const kmla_shape* shape = &work->shape;
    int32_t rows = shape->rows_per_request, row = a->row;
    double* out = a->out;
    int64_t visible = work->tokens - rows + 1 + row % rows;
    const int32_t* table =
        work->host_tables + pool * work->pages + row / rows * work->pages_per_request;
    size_t record_bytes = kmla_kv_record_bytes(shape->kv_format);
    uint8_t* page = (uint8_t*)allocate(BENCH_PAGE * record_bytes);
    double query[KMLA_QUERY_DIMS], key[KMLA_QUERY_DIMS];
    double most = -HUGE_VAL, sum = 0.0;
    read_query(work, (int64_t)row * work->stored_heads + a->head, query);
    memset(out, 0, sizeof a->out);
    for (int64_t token = 0; token < visible; token++) {
        double score = 0.0, weight;
        if (token % BENCH_PAGE == 0) {
            uint64_t number = (uint64_t)table[token / BENCH_PAGE];
            driver_download(&b->cuda, page,
                            pool_of(work, pool) + number * BENCH_PAGE * record_bytes,
                            BENCH_PAGE * record_bytes);
        }
        read_any_record(shape->kv_format, page + token % BENCH_PAGE * (int64_t)record_bytes, key);
        for (int i = 0; i < KMLA_QUERY_DIMS; i++) {
            score += query[i] * key[i];
        }
        score *= (double)BENCH_SCALE;
        if (score > most) {
            double shrink = exp(most - score);
            for (int i = 0; i < KMLA_LATENT_DIMS; i++) {
                out[i] *= shrink;
            }
            sum *= shrink;
            most = score;
        }
        weight = exp(score - most);
        sum += weight;
        for (int i = 0; i < KMLA_LATENT_DIMS; i++) {
            out[i] += weight * key[i];
        }
    }
    for (int i = 0; i < KMLA_LATENT_DIMS; i++) {
        out[i] /= sum;
    }
    free(page);
    a->lse = most + log(sum);
}

static void job_make(bench* b, const bench_case* what, int32_t stored_heads, job* work) {
    const options* o = &b->option;
    memset(work, 0, sizeof *work);
    work->shape.requests = what->requests;
    work->shape.rows = what->requests * what->rows;
    work->shape.rows_per_request = what->rows;
    work->shape.heads = what->heads;
    work->shape.kv_format = o->kv_format;
    work->shape.mode = o->mode;
    work->shape.page_tokens = BENCH_PAGE;
    work->tokens = o->tokens ? o->tokens : what->tokens;
    work->shape.capacity_tokens = o->capacity > work->tokens ? o->capacity : work->tokens;
    work->shape.split_mode = o->split_mode;
    work->shape.splits = o->splits;
    work->shape.tile = o->tile;
    work->shape.reader = o->reader;
    work->shape.partial_type = o->partial_type;
    work->shape.lengths.lengths_kind = KMLA_LENGTHS_PER_REQUEST;
    work->stored_heads = stored_heads;
    work->pages_per_request = (work->tokens + BENCH_PAGE - 1) / BENCH_PAGE;
    work->table_width = (work->shape.capacity_tokens + BENCH_PAGE - 1) / BENCH_PAGE;
    work->pages = work->pages_per_request * what->requests;
    work->pool_bytes = (uint64_t)work->pages * BENCH_PAGE * kmla_kv_record_bytes(o->kv_format);
    uint64_t wanted = (BENCH_SET_BYTES + work->pool_bytes - 1) / work->pool_bytes;
    work->pools = o->pools ? o->pools : wanted < 2 ? 2 : wanted > 8 ? 8 : (int32_t)wanted;
    make_pools(b, work);
    make_queries(b, work);
    for (int i = 0; i < ANSWERS; i++) {
        work->answers[i].row = (int32_t)random_below(&b->random, work->shape.rows);
        work->answers[i].head = (int32_t)random_below(&b->random, work->shape.heads);
        answer_vector(b, work, (calls_of_graph(b, work) - 1) % work->pools, &work->answers[i]);
    }
}

static void job_free(const bench* b, job* work) {
    const uint64_t owned[] = {work->kv,      work->tables, work->query,
                              work->lengths, work->out,    work->lse};
    for (size_t i = 0; i < sizeof owned / sizeof owned[0]; i++) {
        driver_free(&b->cuda, owned[i]);
    }
    free(work->host_tables);
    free(work->host_query);
}

// =============================================================================
// One decode, of one or two launches of the reader
// =============================================================================

enum { MOST_PARTS = 2 };

typedef struct step {
    const bench* b;
    const job* work;
    int parts;
    kmla_plan plans[MOST_PARTS]; // of so many heads each
    int32_t first_head[MOST_PARTS];
    uint64_t workspace[MOST_PARTS];
} step;

// Plans and prepares a decode of `heads` heads from first_head on.
static void step_add(step* s, bench* b, const job* work, kmla_shape shape, int32_t first_head,
                     int32_t heads) {
    kmla_error error;
    kmla_plan* plan = &s->plans[s->parts];
    shape.heads = heads;
    must(kmla_plan_decode(&shape, &b->card, plan, &error), &error);
    must(kmla_gpu_prepare(b->gpu, plan, NULL, &error), &error);
    s->b = b;
    s->work = work;
    s->first_head[s->parts] = first_head;
    s->workspace[s->parts] = driver_alloc(&b->cuda, (size_t)plan->workspace_bytes);
    s->parts++;
}

static void step_free(step* s) {
    for (int i = 0; i < s->parts; i++) {
        driver_free(&s->b->cuda, s->workspace[i]);
    }
    s->parts = 0;
}

static void step_launch(const step* s, int32_t pool, void* stream) {
    const job* work = s->work;
    for (int i = 0; i < s->parts; i++) {
        kmla_decode args;
        kmla_error error;
        uint64_t first = (uint64_t)s->first_head[i];
        memset(&args, 0, sizeof args);
        args.query = work->query + first * KMLA_BF16_BYTES;
        args.query_row_stride_bytes = (int64_t)work->stored_heads * KMLA_BF16_BYTES;
        args.scale = BENCH_SCALE;
        args.kv_scale = BENCH_KV_SCALE;
        args.kv = pool_of(work, pool);
        args.kv_pages = (uint64_t)work->pages;
        args.block_table =
            work->tables + (uint64_t)(pool * work->shape.requests * work->table_width) * 4;
        args.block_table_width = work->table_width;
        args.lengths = work->lengths;
        args.out = work->out + first * KMLA_LATENT_DIMS * 2;
        args.out_row_stride = (int64_t)work->stored_heads * KMLA_LATENT_DIMS;
        args.out_type = KMLA_BF16;
        args.lse = work->lse + first * 4;
        args.lse_row_stride = work->stored_heads;
        args.workspace = s->workspace[i];
        args.workspace_bytes = s->plans[i].workspace_bytes;
        must(kmla_gpu_decode(s->b->gpu, &s->plans[i], &args, stream, &error), &error);
    }
}

static void launch_graph(void* data, void* stream) {
    const step* s = (const step*)data;
    for (int32_t call = 0; call < calls_of_graph(s->b, s->work); call++) {
        step_launch(s, call % s->work->pools, stream);
    }
}

// =============================================================================
// The check
// =============================================================================

typedef struct difference {
    double rel_l2; // of out
    double lse;    // absolute, over max(1, |lse|)
    int right;
} difference;

// Compares what lies in the output buffers now, which a graph's last call left there.
static difference check(const bench* b, const step* s) {
    const job* work = s->work;
    const kmla_shape* shape = &s->plans[0].shape;
    // One rounding of out to BF16 is in the first bound; partials in BF16 are one more.
    int rounded_partials = s->plans[0].splits > 1 && shape->partial_type == KMLA_BF16;
    double bound = (shape->mode == KMLA_MODE_EXACT ? 2e-3 : 3e-3) + (rounded_partials ? 1e-3 : 0);
    difference worst = {0.0, 0.0, 1};
    for (int i = 0; i < ANSWERS; i++) {
        const answer* want = &work->answers[i];
        uint64_t vector = (uint64_t)want->row * (uint64_t)work->stored_heads + want->head;
        double error = 0.0, size = 0.0, rel_l2, lse_error;
        uint16_t got[KMLA_LATENT_DIMS];
        float lse;
        driver_download(&b->cuda, got, work->out + vector * sizeof got, sizeof got);
        driver_download(&b->cuda, &lse, work->lse + vector * sizeof lse, sizeof lse);
        for (int d = 0; d < KMLA_LATENT_DIMS; d++) {
            double off = (double)kmla_bf16_to_float(got[d]) - want->out[d];
            error += off * off;
            size += want->out[d] * want->out[d];
        }
        rel_l2 = sqrt(error / size);
        lse_error = fabs((double)lse - want->lse) / fmax(1.0, fabs(want->lse));
        worst.right = worst.right && rel_l2 <= bound && lse_error <= 3e-4; // false for NaN too
        worst.rel_l2 = rel_l2 > worst.rel_l2 || rel_l2 != rel_l2 ? rel_l2 : worst.rel_l2;
        worst.lse = lse_error > worst.lse || lse_error != lse_error ? lse_error : worst.lse;
    }
    return worst;
}

// =============================================================================
// Measuring and printing
// =============================================================================

typedef struct measured {
    double us, least_us, tflops, gbs; // of a call
    int kernels;                      // of the graph
    difference off;
} measured;

static measured measure(bench* b, step* s) {
    const kmla_shape* shape = &s->work->shape;
    double tokens = (double)s->work->tokens * shape->requests;
    double flop = BENCH_FLOP * tokens * shape->rows_per_request * shape->heads;
    double bytes = tokens * (double)kmla_kv_record_bytes(shape->kv_format);
    size_t vectors = (size_t)shape->rows * (size_t)s->work->stored_heads;
    int32_t calls = calls_of_graph(b, s->work);
    measured m;
    driver_time time;
    driver_must(&b->cuda, b->cuda.memory_set(s->work->out, 0xff, vectors * KMLA_LATENT_DIMS * 2),
                "cuMemsetD8");
    time = driver_time_graph(&b->cuda, launch_graph, s, b->option.replays);
    m.us = time.median_us / calls;
    m.least_us = time.least_us / calls;
    m.tflops = m.us > 0 ? flop / m.us * 1e-6 : 0;
    m.gbs = m.us > 0 ? bytes / m.us * 1e-3 : 0;
    m.kernels = time.kernels;
    m.off = check(b, s);
    return m;
}

static const char* kv_name(int32_t format) {
    return format == KMLA_KV_PACKED ? "packed" : format == KMLA_KV_E4M3 ? "e4m3" : "bf16";
}

static void csv_line(bench* b, const step* s, const char* kind, const measured* m) {
    const kmla_shape* shape = &s->work->shape;
    if (b->csv) {
        fprintf(b->csv, "%s,%s,%d,%d,%d,%lld,%s,%s,%s,%s,%d,%d,%.3f,%.3f,%.2f,%.1f,%.3e,%.3e,%d\n",
                b->cuda.card, kind, (int)shape->requests, (int)shape->rows_per_request,
                (int)shape->heads, (long long)s->work->tokens, kv_name(shape->kv_format),
                shape->mode == KMLA_MODE_EXACT ? "exact" : "e4m3",
                shape->partial_type == KMLA_BF16 ? "bf16" : "fp32",
                shape->split_mode == KMLA_SPLIT_STATIC ? "static" : "balanced",
                (int)s->plans[0].tile, (int)s->plans[0].splits, m->us, m->least_us, m->tflops,
                m->gbs, m->off.rel_l2, m->off.lse, m->off.right);
        fflush(b->csv);
    }
}

static void print_case(const job* work) {
    const kmla_shape* shape = &work->shape;
    printf("%3d x %d x %3d, %6lld", (int)shape->requests, (int)shape->rows_per_request,
           (int)shape->heads, (long long)work->tokens);
}

// The table: every case by its plan.
static int run_table(bench* b, int from, int to) {
    int wrong = 0;
    printf("requests x rows x heads,\n"
           "           tokens each  FlashMLA*      us   least  TFLOP/s    GB/s  tile splits "
           "pools MB    rel L2  right\n");
    for (int i = from; i < to; i++) {
        job work;
        step s;
        measured m;
        char flashmla[16];
        memset(&s, 0, sizeof s);
        job_make(b, &bench_cases[i], bench_cases[i].heads, &work);
        step_add(&s, b, &work, work.shape, 0, work.shape.heads);
        m = measure(b, &s);
        if (b->option.tokens) {
            snprintf(flashmla, sizeof flashmla, "-"); // measured at the case's own tokens
        } else {
            snprintf(flashmla, sizeof flashmla, "%.1f", bench_cases[i].flashmla_us);
        }
        printf("   ");
        print_case(&work);
        printf("  %9s %7.1f %7.1f  %7.1f %7.0f  %4d %6d %8.0f  %.2e  %s\n", flashmla, m.us,
               m.least_us, m.tflops, m.gbs, (int)s.plans[0].tile, (int)s.plans[0].splits,
               (double)work.pool_bytes * work.pools * 1e-6, m.off.rel_l2,
               m.off.right ? "yes" : "NO");
        fflush(stdout);
        csv_line(b, &s, "plan", &m);
        wrong += !m.off.right;
        step_free(&s);
        job_free(b, &work);
    }
    printf("* us of FlashMLA's FP8 sparse reader (2026-04) over the same 656-byte records,\n"
           "  64 or 128 heads, measured on one H200 on 2026-12-01 in the same way.\n");
    return wrong;
}

// Every case by many tiles and splits, to calibrate the planner with.
static int run_sweep(bench* b, int from, int to) {
    static const int32_t tiles[] = {8, 16, 24, 32, 40, 48, 56};
    static const int32_t splits[] = {1,  2,  3,  4,  5,  6,  8,  10, 11, 12, 13,  16,  20,
                                     22, 24, 26, 32, 40, 44, 52, 64, 80, 96, 128, 192, 256};
    int wrong = 0;
    for (int i = from; i < to; i++) {
        job work;
        step s;
        measured planned;
        double best_us = HUGE_VAL;
        int32_t best_tile = 0, best_splits = 0;
        memset(&s, 0, sizeof s);
        job_make(b, &bench_cases[i], bench_cases[i].heads, &work);
        step_add(&s, b, &work, work.shape, 0, work.shape.heads);
        planned = measure(b, &s);
        wrong += !planned.off.right;
        csv_line(b, &s, "plan", &planned);
        print_case(&work);
        printf(": planner %.1f us, tile %d, %d splits\n  %s\n", planned.us, (int)s.plans[0].tile,
               (int)s.plans[0].splits, s.plans[0].reason);
        step_free(&s);
        for (size_t t = 0; t < sizeof tiles / sizeof tiles[0]; t++) {
            kmla_shape tried = work.shape;
            kmla_plan plan;
            tried.tile = tiles[t];
            if (kmla_plan_decode(&tried, &b->card, &plan, NULL) != KMLA_OK) {
                continue; // not a tile of this reader
            }
            printf("  tile %2d, splits:us ", (int)tiles[t]);
            for (size_t n = 0; n < sizeof splits / sizeof splits[0]; n++) {
                kmla_shape shape = work.shape;
                measured m;
                if (splits[n] * KMLA_CHUNK_TOKENS >= work.tokens + KMLA_CHUNK_TOKENS) {
                    break;
                }
                shape.tile = tiles[t];
                shape.splits = splits[n];
                step_add(&s, b, &work, shape, 0, shape.heads);
                m = measure(b, &s);
                wrong += !m.off.right;
                csv_line(b, &s, "sweep", &m);
                printf(" %d:%.1f%s", (int)splits[n], m.us, m.off.right ? "" : "(WRONG)");
                fflush(stdout);
                if (m.us < best_us) {
                    best_us = m.us;
                    best_tile = tiles[t];
                    best_splits = splits[n];
                }
                step_free(&s);
            }
            printf("\n");
        }
        printf("  best %.1f us, tile %d, %d splits; the planner's takes %.2f of it\n", best_us,
               (int)best_tile, (int)best_splits, planned.us / best_us);
        job_free(b, &work);
    }
    return wrong;
}

// 99 gathered heads as they are, padded to 8 and run as readers of whole 16-head tiles must (a
// launch of 96 and one of 8), and padded to the tile. All in buffers 112 heads wide.
typedef struct head_way {
    const char* name;
    int parts;
    int32_t first[MOST_PARTS], heads[MOST_PARTS];
} head_way;
static const head_way head_ways[] = {
    {"99 in one launch", 1, {0, 0}, {99, 0}},
    {"104 in two launches, 96 and 8", 2, {0, 96}, {96, 8}},
    {"112 in one launch", 1, {0, 0}, {112, 0}},
};
enum { HEAD_WAYS = sizeof head_ways / sizeof head_ways[0] };

// Measures a way of reading a job's heads; `shape` has the rest. Counts a wrong one.
static measured measure_way(bench* b, const job* work, const head_way* way, kmla_shape shape,
                            const char* kind, step* s, int* wrong) {
    measured m;
    memset(s, 0, sizeof *s);
    for (int part = 0; part < way->parts; part++) {
        step_add(s, b, work, shape, way->first[part], way->heads[part]);
    }
    m = measure(b, s);
    csv_line(b, s, kind, &m);
    *wrong += !m.off.right;
    step_free(s);
    return m;
}

static int run_pad(bench* b) {
    static const int64_t tokens[] = {2048, 8192, 16384};
    int wrong = 0;
    printf("us of a decode of 4 rows x 99 heads, stored 112 wide\n");
    for (size_t i = 0; i < sizeof tokens / sizeof tokens[0]; i++) {
        bench_case what = {1, 4, 99, 0, 0.0};
        job work;
        what.tokens = tokens[i];
        job_make(b, &what, 112, &work);
        for (int w = 0; w < HEAD_WAYS; w++) {
            step s;
            measured m = measure_way(b, &work, &head_ways[w], work.shape, head_ways[w].name, &s,
                                     &wrong);
            printf("  %6lld tokens, %-30s %7.1f  (tile %d, %d splits)  %s\n",
                   (long long)work.tokens, head_ways[w].name, m.us, (int)s.plans[0].tile,
                   (int)s.plans[0].splits, m.off.right ? "right" : "WRONG");
            fflush(stdout);
        }
        job_free(b, &work);
    }
    return wrong;
}

// =============================================================================
// The figures that a reader of 656-byte records gave on an RTX PRO 6000 (SM120, 188 SMs), measured
// here in the same shape: 4 verify rows, capacity 116,736, 64 splits
// =============================================================================

enum { SPEC_CAPACITY = 116736, SPEC_SPLITS = 64, SPEC_SIZES = 3, SPEC_LAYERS = 24 };

typedef struct spec_line {
    int32_t reader, way, split_mode, partial_type;
} spec_line;
enum { SPEC_LINES = 2 * HEAD_WAYS * 2 * 2 };

static spec_line spec_line_of(int i) {
    const spec_line line = {1 + i / (HEAD_WAYS * 4), i / 4 % HEAD_WAYS, i / 2 % 2, i % 2};
    return line;
}

// Whether the plan's reader is what was asked for: the card may have no other than the portable.
static int spec_has_reader(const bench* b, int32_t reader) {
    return reader == KMLA_READER_PORTABLE ||
           (b->card.compute_major == 9 && b->card.compute_minor == 0);
}

static void spec_job(bench* b, int64_t tokens, job* work) {
    bench_case what = {1, 4, 99, 0, 0.0};
    what.tokens = tokens;
    b->option.capacity = SPEC_CAPACITY;
    job_make(b, &what, 112, work);
}

static int run_spec_splits(bench* b) {
    static const int64_t tokens[SPEC_SIZES] = {2048, 8192, 16384};
    double us[SPEC_LINES][SPEC_SIZES];
    int wrong = 0;
    for (int size = 0; size < SPEC_SIZES; size++) {
        job work;
        spec_job(b, tokens[size], &work);
        for (int i = 0; i < SPEC_LINES; i++) {
            const spec_line line = spec_line_of(i);
            kmla_shape shape = work.shape;
            step s;
            shape.reader = line.reader;
            shape.splits = SPEC_SPLITS;
            shape.split_mode = line.split_mode;
            shape.partial_type = line.partial_type;
            us[i][size] = !spec_has_reader(b, line.reader)
                              ? 0.0
                              : measure_way(b, &work, &head_ways[line.way], shape, "spec splits",
                                            &s, &wrong)
                                    .us;
        }
        job_free(b, &work);
    }
    printf("4 rows, capacity 116,736, 64 splits; us of a decode of so many tokens\n"
           "  reader    heads                          splits    partials     2,048    8,192   "
           "16,384\n");
    for (int i = 0; i < SPEC_LINES; i++) {
        const spec_line line = spec_line_of(i);
        if (spec_has_reader(b, line.reader)) {
            printf("  %-8s  %-29s  %-8s  %-8s  %8.1f %8.1f %8.1f\n",
                   line.reader == KMLA_READER_HOPPER ? "Hopper" : "portable",
                   head_ways[line.way].name, line.split_mode ? "balanced" : "static",
                   line.partial_type ? "FP32" : "BF16", us[i][0], us[i][1], us[i][2]);
        }
    }
    printf("  RTX PRO 6000, another reader: 104 heads in two launches, static, BF16, plain loads\n"
           "    296 / 299 / 426, vector loads 195 / 199 / 287; 112 in one, vector loads 108.5 /\n"
           "    112.6 / 212.4; 112, balanced, FP32 38.4 / 90.6 / 210.9. Here there is no switch of\n"
           "    loads, every record is read by 16 bytes or in bulk: the readers stand instead.\n\n");
    return wrong;
}

// All MLA layers of a Kimi-K3 verify step in one graph, each with a pool of its own.
static int run_spec_layers(bench* b) {
    static const int64_t local_tokens[] = {1821, 3641, 7282, 14564}; // 16 to 128 Ki over 9 ranks
    static const struct {
        const char* name;
        int32_t splits, split_mode, partial_type;
    } kinds[] = {
        {"64 static, BF16", SPEC_SPLITS, KMLA_SPLIT_STATIC, KMLA_BF16},
        {"64 balanced, FP32", SPEC_SPLITS, KMLA_SPLIT_BALANCED, KMLA_FP32},
        {"planner's, balanced", 0, KMLA_SPLIT_BALANCED, KMLA_BF16},
    };
    int wrong = 0;
    b->option.pools = SPEC_LAYERS;
    b->option.calls = SPEC_LAYERS;
    printf("24 layers, 4 rows, capacity 116,736, in one graph\n"
           "  local tokens  splits, partials      heads                          kernels  "
           "us of a step\n");
    for (size_t size = 0; size < sizeof local_tokens / sizeof local_tokens[0]; size++) {
        job work;
        spec_job(b, local_tokens[size], &work);
        for (size_t k = 0; k < sizeof kinds / sizeof kinds[0]; k++) {
            for (int w = 0; w < HEAD_WAYS; w++) {
                kmla_shape shape = work.shape;
                step s;
                measured m;
                shape.splits = kinds[k].splits;
                shape.split_mode = kinds[k].split_mode;
                shape.partial_type = kinds[k].partial_type;
                m = measure_way(b, &work, &head_ways[w], shape, "spec layers", &s, &wrong);
                printf("  %12lld  %-20s  %-29s  %7d  %12.1f  %s\n", (long long)work.tokens,
                       kinds[k].name, head_ways[w].name, m.kernels, m.us * SPEC_LAYERS,
                       m.off.right ? "right" : "WRONG");
                fflush(stdout);
            }
        }
        job_free(b, &work);
    }
    printf("  RTX PRO 6000, another reader, 7,282 tokens: 7,500 us with 104 heads, 2,830 with\n"
           "    112\n");
    return wrong;
}

// What a rank sends, by the library's own layout.
static void print_gather(void) {
    static const char* const formats[] = {"BF16", "packed", "E4M3"}; // as KMLA_QUERY_*
    printf("11 heads x 9 ranks; bytes that a rank sends a row:");
    for (int32_t format = 0; format < 3; format++) {
        kmla_gather_desc desc;
        kmla_gather gather;
        kmla_error error;
        memset(&desc, 0, sizeof desc);
        desc.heads = 99;
        desc.ranks = 9;
        desc.rows = 1;
        desc.query_format = format;
        must(kmla_plan_gather(&desc, &gather, &error), &error);
        printf("%s %llu %s", format ? "," : "", (unsigned long long)gather.query.slice_bytes,
               formats[format]);
    }
    printf("\n\n");
}

static int run_spec(bench* b) {
    int wrong;
    print_gather();
    wrong = run_spec_splits(b);
    return wrong + run_spec_layers(b);
}

// =============================================================================
// Start
// =============================================================================

// The driver's release, as its kernel module tells it: the first word with a dot in its first
// line.
static void driver_release(char* release, size_t room) {
    FILE* file = fopen("/proc/driver/nvidia/version", "r");
    char line[256] = "";
    release[0] = 0;
    if (file) {
        if (fgets(line, sizeof line, file)) {
            for (char* word = strtok(line, " \n"); word; word = strtok(NULL, " \n")) {
                if (strchr(word, '.')) {
                    strncat(release, word, room - 1);
                    break;
                }
            }
        }
        fclose(file);
    }
}

// Version of the NVRTC that the library has loaded.
static void nvrtc_version(const bench* b, int* major, int* minor) {
    static const char* const names[] = {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11.2",
                                        "libnvrtc.so"};
    int (*version)(int*, int*);
    void* library = b->option.library ? b->cuda.library : NULL;
    *major = *minor = 0;
    for (size_t i = 0; !library && i < sizeof names / sizeof names[0]; i++) {
        library = dlopen(names[i], RTLD_NOW | RTLD_NOLOAD);
    }
    if (library && driver_find(library, "nvrtcVersion", &version)) {
        version(major, minor);
    }
}

static void bench_open(bench* b) {
    const char* why = "";
    kmla_gpu_desc desc;
    kmla_error error;
    char release[64], date[32];
    int nvrtc_major, nvrtc_minor;
    time_t now = time(NULL);
    size_t values = (size_t)SOURCE_TOKENS * KMLA_QUERY_DIMS;
    uint16_t* source = (uint16_t*)allocate(values * sizeof *source);
    if (!driver_open(&b->cuda, b->option.library, &why)) {
        fprintf(stderr, "bench needs a GPU: %s\n", why);
        exit(1);
    }
    memset(&desc, 0, sizeof desc);
    desc.cuda_handle = b->cuda.library;
    desc.nvrtc_handle = b->option.library ? b->cuda.library : NULL;
    must(kmla_gpu_open(&desc, &b->gpu, &error), &error);
    must(kmla_gpu_device(b->gpu, &b->card, &error), &error);
    must(kmla_gpu_prepare(b->gpu, NULL, NULL, &error), &error); // the writers
    b->random = 1;
    fill_normal(&b->random, source, values);
    b->source = driver_alloc(&b->cuda, values * sizeof *source);
    driver_upload(&b->cuda, b->source, source, values * sizeof *source);
    free(source);
    driver_release(release, sizeof release);
    nvrtc_version(b, &nvrtc_major, &nvrtc_minor);
    strftime(date, sizeof date, "%Y-%m-%d", gmtime(&now));
    printf("%s, sm_%d%d, %d SMs; driver %s (CUDA %d.%d); NVRTC %d.%d; kimi_mla.h %d.%d.%d; %s\n",
           b->cuda.card, (int)b->card.compute_major, (int)b->card.compute_minor,
           (int)b->card.multiprocessors, release[0] ? release : "?", b->cuda.version / 1000,
           b->cuda.version % 1000 / 10, nvrtc_major, nvrtc_minor, KMLA_VERSION_MAJOR,
           KMLA_VERSION_MINOR, KMLA_VERSION_PATCH, date);
    printf("%s KV, BF16 queries, %s mode, %s partials, %s splits; %d calls a graph, %d replays\n",
           kv_name(b->option.kv_format), b->option.mode == KMLA_MODE_EXACT ? "exact" : "e4m3-query",
           b->option.partial_type == KMLA_BF16 ? "BF16" : "FP32",
           b->option.split_mode == KMLA_SPLIT_STATIC ? "static" : "balanced", (int)b->option.calls,
           (int)b->option.replays);
    if (!b->cuda.can_time) {
        printf("this driver has no graphs: nothing is timed, all us are 0\n");
    }
    printf("\n");
}

static const char usage[] =
    "bench [options]        times the 12 shapes; every row is checked\n"
    "  --only N             shape N, 1..12\n"
    "  --tokens N           so many tokens, whatever the shape says\n"
    "  --kv packed|e4m3|bf16, --mode exact|e4m3, --partial bf16|fp32, --balanced\n"
    "  --reader portable|hopper, --splits S, --tile N   instead of the planner's choice\n"
    "  --sweep              every shape by many tiles and splits, against the planner's choice\n"
    "  --pad                99 heads in one launch, 104 in two, 112 in one\n"
    "  --spec               the same with 64 splits of a capacity of 116,736, and 24 layers of it\n"
    "  --capacity N         of the plans; less than the tokens is those\n"
    "  --pools N, --calls N, --replays N\n"
    "  --csv PATH           all figures to a file as well\n"
    "  --library PATH       libcuda and NVRTC in one library\n";

static void bad_usage(const char* what) {
    fprintf(stderr, "%s is not understood\n%s", what, usage);
    exit(1);
}

static int32_t choice(const char* value, const char* const* names, int32_t count) {
    for (int32_t i = 0; i < count; i++) {
        if (strcmp(value, names[i]) == 0) {
            return i;
        }
    }
    bad_usage(value);
    return 0;
}

static int32_t positive(const char* value) {
    char* end;
    long number = strtol(value, &end, 10);
    if (*end || end == value || number < 1 || number > 1 << 30) {
        bad_usage(value);
    }
    return (int32_t)number;
}

static void read_options(int count, char** words, options* o) {
    static const char* const formats[] = {"packed", "e4m3", "bf16"}; // as KMLA_KV_*
    static const char* const modes[] = {"exact", "e4m3"};            // as KMLA_MODE_*
    static const char* const types[] = {"bf16", "fp32"};             // as KMLA_BF16, KMLA_FP32
    static const char* const readers[] = {"planner", "portable", "hopper"}; // as KMLA_READER_*
    memset(o, 0, sizeof *o);
    o->calls = 20;
    for (int i = 1; i < count; i++) {
        const char* word = words[i];
        const char* value;
        if (strcmp(word, "--sweep") == 0) {
            o->sweep = 1;
        } else if (strcmp(word, "--pad") == 0) {
            o->pad = 1;
        } else if (strcmp(word, "--spec") == 0) {
            o->spec = 1;
        } else if (strcmp(word, "--balanced") == 0) {
            o->split_mode = KMLA_SPLIT_BALANCED;
        } else if (strcmp(word, "--help") == 0) {
            printf("%s", usage);
            exit(0);
        } else if (++i == count) {
            bad_usage(word);
        } else if (value = words[i], strcmp(word, "--only") == 0) {
            o->only = positive(value);
            if (o->only > BENCH_CASES) {
                bad_usage(value);
            }
        } else if (strcmp(word, "--tokens") == 0) {
            o->tokens = positive(value);
        } else if (strcmp(word, "--capacity") == 0) {
            o->capacity = positive(value);
        } else if (strcmp(word, "--kv") == 0) {
            o->kv_format = choice(value, formats, 3);
        } else if (strcmp(word, "--mode") == 0) {
            o->mode = choice(value, modes, 2);
        } else if (strcmp(word, "--partial") == 0) {
            o->partial_type = choice(value, types, 2);
        } else if (strcmp(word, "--reader") == 0) {
            o->reader = choice(value, readers, 3);
        } else if (strcmp(word, "--splits") == 0) {
            o->splits = positive(value);
        } else if (strcmp(word, "--tile") == 0) {
            o->tile = positive(value);
        } else if (strcmp(word, "--pools") == 0) {
            o->pools = positive(value);
        } else if (strcmp(word, "--calls") == 0) {
            o->calls = positive(value);
        } else if (strcmp(word, "--replays") == 0) {
            o->replays = positive(value);
        } else if (strcmp(word, "--csv") == 0) {
            o->csv = value;
        } else if (strcmp(word, "--library") == 0) {
            o->library = value;
        } else {
            bad_usage(word);
        }
    }
    o->replays = o->replays ? o->replays : o->sweep ? 7 : 21;
}

int main(int count, char** words) {
    static bench b;
    int from, to, wrong;
    read_options(count, words, &b.option);
    if (b.option.csv) {
        b.csv = fopen(b.option.csv, "w");
        if (!b.csv) {
            fprintf(stderr, "%s cannot be written\n", b.option.csv);
            return 1;
        }
        fprintf(b.csv, "card,kind,requests,rows,heads,tokens,kv,mode,partial,split_mode,tile,"
                       "splits,us,least_us,tflops,gbs,rel_l2,lse_error,right\n");
    }
    bench_open(&b);
    from = b.option.only ? b.option.only - 1 : 0;
    to = b.option.only ? b.option.only : BENCH_CASES;
    wrong = b.option.spec    ? run_spec(&b)
            : b.option.pad   ? run_pad(&b)
            : b.option.sweep ? run_sweep(&b, from, to)
                             : run_table(&b, from, to);
    driver_free(&b.cuda, b.source);
    kmla_gpu_close(b.gpu);
    driver_must(&b.cuda, b.cuda.context_release(0), "cuDevicePrimaryCtxRelease");
    if (b.csv) {
        fclose(b.csv);
    }
    if (wrong) {
        printf("%d rows are WRONG\n", wrong);
    }
    return wrong ? 1 : 0;
}
