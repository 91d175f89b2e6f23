// serve_loop.c - a small serving engine around kimi_mla.h: what happens around one MLA layer.
//
// Requests come and go. Each has turns: tokens are appended (a prompt), then tokens are decoded, up
// to 1 + DRAFTS rows a step, of which the drafts are accepted or rejected. Records live in pages of
// one pool; page 0 is the null block that unused table entries name, and like every page that is
// not in use it holds NaN bytes. For 1, 2, 4, 8 requests there is one plan and, on a GPU, one
// captured graph: it writes the step's records, reads, and merges. The smallest that covers the
// live requests is replayed; what is left over in it are dead rows, whose inputs are NaN.
//
// Random latents and queries stand for the model. The same requests are served several times:
//
//     padded     every request has 1 + DRAFTS rows, each with its own length; unused ones are dead
//     ragged     rows are packed, row offsets say whose they are; one length a request
//     reuse      a request's first tokens arrive as records of another pool with other pages
//     direct     no graphs, the same launches
//
// Every step is checked against an uncached fp64 run, and every request must end with the same
// bits in all runs: with static splits they do not depend on the batch. Exit code 1 on any
// mismatch and on any value that is not finite.

#define KIMI_MLA_IMPLEMENTATION
#include "../kimi_mla.h"

#include "machine.h"

#include <math.h>

enum { DRAFTS = 3, ROWS = 1 + DRAFTS, PAGE = 64, NULL_PAGE = 0 };
enum { CAPACITIES = 4, MOST_REQUESTS = 8, MOST_ROWS = MOST_REQUESTS * ROWS };

#define SCALE 0.07216878f // Kimi-K3: 192^-0.5

static int32_t pages_of(int32_t tokens) { return (tokens + PAGE - 1) / PAGE; }

// =============================================================================
// The model's stand-in: random numbers that depend on request, position and version only
// =============================================================================

enum { RANDOM_TOKEN = 1, RANDOM_QUERY, RANDOM_DRAFTS, RANDOM_ACCEPT, RANDOM_PAGES };
enum { VERSION_TRUE = 0, VERSION_REJECTED = 1 };

static uint64_t seed_of(int kind, int32_t request, int32_t position, int version) {
    uint64_t state = (uint64_t)kind;
    state = next_random(&state) ^ (uint64_t)request;
    state = next_random(&state) ^ (uint64_t)position;
    state = next_random(&state) ^ (uint64_t)version;
    return next_random(&state);
}

// =============================================================================
// What is asked for
// =============================================================================

enum { REQUESTS = 9, TURNS = 3 };

typedef struct script {
    int32_t arrives;       // at this step
    int32_t prefix_tokens; // of the first append, that a reuse run gets as records
    struct {
        int32_t append_tokens, decode_tokens;
    } turns[TURNS];
} script;

typedef struct sizes {
    int32_t factor; // of prefixes and appended tokens
    int32_t heads;
    int32_t checked_heads; // of each row, against fp64; others every step
    int32_t splits;
} sizes;

static const sizes gpu_sizes = {64, 96, 1, 16}; // the long prefix has 9,216 tokens
static const sizes small_sizes = {1, 6, 3, 4};

// A second append follows a decode; a turn that decodes nothing is followed by another append.
static const script scripts[REQUESTS] = {
    {0, 0, {{1, 9}, {0, 0}, {0, 0}}},    {0, 144, {{170, 6}, {40, 5}, {9, 4}}},
    {1, 0, {{63, 7}, {0, 0}, {0, 0}}},   {2, 64, {{90, 12}, {30, 0}, {7, 5}}},
    {2, 0, {{30, 16}, {0, 0}, {0, 0}}},  {3, 77, {{77, 8}, {51, 8}, {0, 0}}},
    {3, 0, {{5, 20}, {0, 0}, {0, 0}}},   {4, 0, {{128, 10}, {1, 3}, {0, 0}}},
    {14, 0, {{20, 6}, {20, 6}, {0, 0}}},
};

static int32_t script_tokens(const script* s, int32_t factor) {
    int32_t tokens = 0;
    for (int i = 0; i < TURNS; i++) {
        tokens += s->turns[i].append_tokens * factor + s->turns[i].decode_tokens;
    }
    return tokens;
}

// =============================================================================
// The paged allocator
// =============================================================================

typedef struct pool {
    uint64_t kv;
    int32_t pages;      // page 0 included
    int32_t free_count; // pages that nobody has
    int32_t promised;   // pages that admitted requests may come to need
    int32_t* free_pages;
} pool;

static void pool_make(const machine* m, pool* p, int32_t pages) {
    uint64_t seed = seed_of(RANDOM_PAGES, pages, 0, 0);
    p->kv = machine_alloc(m, (size_t)pages * PAGE * KMLA_PACKED_BYTES);
    p->pages = pages;
    p->promised = 0;
    p->free_pages = (int32_t*)allocate((size_t)pages * sizeof *p->free_pages);
    p->free_count = 0;
    for (int32_t page = NULL_PAGE + 1; page < pages; page++) { // in random order
        int32_t other = (int32_t)(next_random(&seed) % (uint64_t)(p->free_count + 1));
        p->free_pages[p->free_count] = p->free_pages[other];
        p->free_pages[other] = page;
        p->free_count++;
    }
}

static int null_block_is_untouched(const machine* m, const pool* p) {
    static uint8_t page[PAGE * KMLA_PACKED_BYTES];
    int untouched = 1;
    machine_read(m, page, p->kv + (uint64_t)NULL_PAGE * sizeof page, sizeof page);
    for (size_t i = 0; i < sizeof page; i++) {
        untouched &= page[i] == 0xff;
    }
    return untouched;
}

static void pool_free(const machine* m, pool* p) {
    expect(p->free_count == p->pages - 1 && p->promised == 0, "pages that came back");
    free(p->free_pages);
    machine_free(m, p->kv);
}

static int32_t pool_take(pool* p) {
    if (p->free_count == 0) {
        fprintf(stderr, "the pool has no page left, although it promised one\n");
        exit(1);
    }
    return p->free_pages[--p->free_count];
}

static void pool_give_back(const machine* m, pool* p, int32_t page) {
    const uint64_t page_bytes = (uint64_t)PAGE * KMLA_PACKED_BYTES;
    machine_poison(m, p->kv + (uint64_t)page * page_bytes, (size_t)page_bytes);
    p->free_pages[p->free_count++] = page;
}

// =============================================================================
// A request
// =============================================================================

typedef struct request {
    const script* script;
    int32_t id;
    int32_t finished;
    int32_t turn;
    int32_t to_decode; // tokens, in this turn
    int32_t tokens;    // that are cached and accepted
    int32_t page_count;
    int32_t* pages;
    double* keys;    // [tokens + rows][576]: what was cached, for the uncached run
    uint64_t digest; // of all outputs
    // of this step
    int32_t rows, accepted; // 1 + drafts, and how many of the drafts were right
    int32_t first_row;      // in the batch
} request;

static int64_t slot_of(const request* r, int32_t token) {
    return (int64_t)r->pages[token / PAGE] * PAGE + token % PAGE;
}

static void request_make(request* r, int32_t id, int32_t factor) {
    size_t room = (size_t)script_tokens(&scripts[id], factor);
    memset(r, 0, sizeof *r);
    r->script = &scripts[id];
    r->id = id;
    r->turn = -1;
    r->pages = (int32_t*)allocate((size_t)pages_of((int32_t)room) * sizeof *r->pages);
    r->keys = (double*)allocate(room * KMLA_QUERY_DIMS * sizeof *r->keys);
    r->digest = DIGEST_BEGIN;
}

static void request_free(request* r) {
    free(r->pages);
    free(r->keys);
}

// Has pages for so many tokens, and no more.
static void request_resize(const machine* m, pool* p, request* r, int32_t tokens) {
    while (r->page_count < pages_of(tokens)) {
        r->pages[r->page_count++] = pool_take(p);
    }
    while (r->page_count > pages_of(tokens)) {
        pool_give_back(m, p, r->pages[--r->page_count]);
    }
}

static kmla_kv_write kv_write_of(uint64_t kv, int32_t pages, int32_t page_tokens, uint64_t values,
                                 uint64_t slots, int32_t tokens) {
    kmla_kv_write args;
    memset(&args, 0, sizeof args);
    args.tokens = tokens;
    args.kv_format = KMLA_KV_PACKED;
    args.source_type = KMLA_BF16;
    args.page_tokens = page_tokens;
    args.latent = values;
    args.latent_stride = KMLA_QUERY_DIMS;
    args.rope = values + KMLA_LATENT_DIMS * sizeof(uint16_t);
    args.rope_stride = KMLA_QUERY_DIMS;
    args.slots = slots;
    args.kv = kv;
    args.kv_pages = (uint64_t)pages;
    return args;
}

// The values of a token; the request's uncached keys get what a record makes of them. The record
// is made on the host, so the machine's writer is judged, too.
static void make_token(request* r, int32_t position, int version, uint16_t* values) {
    // Room to align by hand, which C99 has no word for.
    uint8_t room[KMLA_PACKED_BYTES + 15];
    uint8_t* record = room + (16 - (uintptr_t)room % 16) % 16;
    int64_t slot = 0;
    kmla_kv_write args = kv_write_of((uint64_t)(uintptr_t)record, 1, 1, (uint64_t)(uintptr_t)values,
                                     (uint64_t)(uintptr_t)&slot, 1);
    uint64_t seed = seed_of(RANDOM_TOKEN, r->id, position, version);
    fill_normal(&seed, values, KMLA_QUERY_DIMS);
    must(kmla_host_write_kv(&args, &error));
    read_record(record, r->keys + (size_t)position * KMLA_QUERY_DIMS);
}

// =============================================================================
// Appending: the writer, or records that another engine wrote
// =============================================================================

static void write_tokens(const machine* m, uint64_t kv, int32_t pages, int32_t page_tokens,
                         const uint16_t* values, const int64_t* slots, int32_t tokens) {
    size_t value_bytes = (size_t)tokens * KMLA_BF16_BYTES, slot_bytes = (size_t)tokens * 8;
    uint64_t values_there = machine_alloc(m, value_bytes);
    uint64_t slots_there = machine_alloc(m, slot_bytes);
    kmla_kv_write args = kv_write_of(kv, pages, page_tokens, values_there, slots_there, tokens);
    machine_write(m, values_there, values, value_bytes);
    machine_write(m, slots_there, slots, slot_bytes);
    machine_write_kv(m, &args, m->stream);
    machine_wait(m);
    machine_free(m, values_there);
    machine_free(m, slots_there);
}

// Another engine's records of a prefix: larger pages, from the last to the first, read out. The
// last page is full of NaN behind the prefix.
enum { OTHER_PAGE = 80 };

static uint8_t* other_pool(const machine* m, const uint16_t* values, int32_t tokens,
                           int64_t* slots) {
    int32_t pages = (tokens + OTHER_PAGE - 1) / OTHER_PAGE;
    size_t bytes = (size_t)pages * OTHER_PAGE * KMLA_PACKED_BYTES;
    uint64_t kv = machine_alloc(m, bytes);
    uint8_t* records = (uint8_t*)allocate(bytes);
    for (int32_t t = 0; t < tokens; t++) {
        slots[t] = (int64_t)(pages - 1 - t / OTHER_PAGE) * OTHER_PAGE + t % OTHER_PAGE;
    }
    write_tokens(m, kv, pages, OTHER_PAGE, values, slots, tokens);
    machine_read(m, records, kv, bytes);
    machine_free(m, kv);
    return records;
}

// Copies the records of tokens 0.. into the request's pages. A record holds nothing of where it
// is, so pages need not match; of the partial last page only the tokens that exist are written.
static void import_prefix(const machine* m, const pool* p, const request* r, const uint16_t* values,
                          int32_t tokens) {
    int64_t* slots = (int64_t*)allocate((size_t)tokens * sizeof *slots);
    uint8_t* records = other_pool(m, values, tokens, slots);
    uint8_t* page = (uint8_t*)allocate(PAGE * KMLA_PACKED_BYTES);
    for (int32_t first = 0; first < tokens; first += PAGE) {
        int32_t count = tokens - first < PAGE ? tokens - first : PAGE;
        for (int32_t i = 0; i < count; i++) {
            memcpy(page + (size_t)i * KMLA_PACKED_BYTES,
                   records + (size_t)slots[first + i] * KMLA_PACKED_BYTES, KMLA_PACKED_BYTES);
        }
        machine_write(m, p->kv + (uint64_t)slot_of(r, first) * KMLA_PACKED_BYTES, page,
                      (size_t)count * KMLA_PACKED_BYTES);
    }
    free(page);
    free(records);
    free(slots);
}

static void append(const machine* m, pool* p, request* r, int32_t tokens, int32_t imported) {
    uint16_t* values = (uint16_t*)allocate((size_t)tokens * KMLA_BF16_BYTES);
    int64_t* slots = (int64_t*)allocate((size_t)tokens * sizeof *slots);
    request_resize(m, p, r, r->tokens + tokens);
    for (int32_t t = 0; t < tokens; t++) {
        make_token(r, r->tokens + t, VERSION_TRUE, values + (size_t)t * KMLA_QUERY_DIMS);
        slots[t] = slot_of(r, r->tokens + t);
    }
    if (imported > 0) {
        import_prefix(m, p, r, values, imported);
    }
    if (tokens > imported) {
        write_tokens(m, p->kv, p->pages, PAGE, values + (size_t)imported * KMLA_QUERY_DIMS,
                     slots + imported, tokens - imported);
    }
    r->tokens += tokens;
    free(slots);
    free(values);
}

// =============================================================================
// The engine: a plan and a graph for each capacity, all on the same buffers
// =============================================================================

typedef struct run {
    const char* name;
    int32_t ragged, reuse, direct;
    int32_t most_live; // requests at a time
} run;

typedef struct capacity {
    int32_t requests;
    kmla_plan plan;
    kmla_kv_write write;
    kmla_decode decode;
    void* graph; // executable; NULL: launch directly
} capacity;

// What changes from step to step: here on the host, and at `there` on the machine.
typedef struct inputs {
    uint16_t values[MOST_ROWS][KMLA_QUERY_DIMS]; // first, as the writer wants them 16-byte aligned
    int64_t slots[MOST_ROWS];
    int32_t lengths[MOST_ROWS]; // padded: of rows; ragged: of requests
    int32_t row_offsets[MOST_REQUESTS + 1];
} inputs;

typedef struct engine {
    const machine* m;
    const sizes* size;
    const run* run;
    pool pool;
    capacity capacities[CAPACITIES];
    int32_t width;                   // of the block table
    inputs* in;
    int32_t* table;    // [requests][width]
    uint16_t* queries; // [rows][heads][576]
    uint16_t* out;     // [rows][heads][512]
    float* lse;        // [rows][heads]
    double* scores;    // of one uncached vector
    size_t table_bytes, query_bytes, out_bytes, lse_bytes;
    uint64_t in_there, table_there, queries_there, out_there, lse_there, workspace;
} engine;

// The capacity that wastes least for so many live requests.
static const capacity* engine_pick(const engine* e, int32_t live) {
    const kmla_plan* plans[CAPACITIES];
    int32_t index;
    for (int i = 0; i < CAPACITIES; i++) {
        plans[i] = &e->capacities[i].plan;
    }
    must(kmla_pick_plan(plans, CAPACITIES, live, 0, 0, &index, &error));
    return &e->capacities[index];
}

static void engine_launch(const engine* e, const capacity* c) {
    machine_write_kv(e->m, &c->write, e->m->stream);
    machine_decode(e->m, &c->plan, &c->decode, e->m->stream);
}

// One number of splits for all: then a row's bits do not depend on the capacity that it runs in.
static void capacity_plan(const engine* e, capacity* c, int32_t requests, int32_t tokens) {
    kmla_shape shape;
    memset(&shape, 0, sizeof shape);
    shape.requests = requests;
    shape.rows = requests * ROWS;
    shape.rows_per_request = ROWS;
    shape.heads = e->size->heads;
    shape.page_tokens = PAGE;
    shape.capacity_tokens = tokens;
    shape.split_mode = KMLA_SPLIT_STATIC;
    shape.splits = e->size->splits;
    shape.partial_type = KMLA_FP32;
    shape.ragged = e->run->ragged;
    shape.lengths.lengths_kind = e->run->ragged ? KMLA_LENGTHS_PER_REQUEST : KMLA_LENGTHS_PER_ROW;
    shape.lengths.rows_kind = KMLA_ROWS_CAUSAL;
    c->requests = requests;
    c->plan = machine_plan(e->m, &shape);
}

static void capacity_bind(const engine* e, capacity* c) {
    kmla_decode* args = &c->decode;
    c->write = kv_write_of(e->pool.kv, e->pool.pages, PAGE, e->in_there + offsetof(inputs, values),
                           e->in_there + offsetof(inputs, slots), c->requests * ROWS);
    memset(args, 0, sizeof *args);
    args->query = e->queries_there;
    args->scale = SCALE;
    args->kv = e->pool.kv;
    args->kv_pages = (uint64_t)e->pool.pages;
    args->block_table = e->table_there;
    args->block_table_width = e->width;
    args->row_offsets = e->run->ragged ? e->in_there + offsetof(inputs, row_offsets) : 0;
    args->lengths = e->in_there + offsetof(inputs, lengths);
    args->out = e->out_there;
    args->out_type = KMLA_BF16;
    args->lse = e->lse_there;
    args->workspace = e->workspace;
    args->workspace_bytes = c->plan.workspace_bytes;
}

// Captured before any request exists: what a graph knows are addresses and the capacity.
static void capacity_capture(const engine* e, capacity* c) {
    const driver* cuda = &e->m->cuda;
    void* graph;
    driver_must(cuda, cuda->capture_begin(e->m->stream, DRIVER_CAPTURE_THREAD_LOCAL),
                "cuStreamBeginCapture");
    engine_launch(e, c);
    driver_must(cuda, cuda->capture_end(e->m->stream, &graph), "cuStreamEndCapture");
    driver_must(cuda, cuda->graph_instantiate(&c->graph, graph, 0), "cuGraphInstantiate");
    driver_must(cuda, cuda->graph_destroy(graph), "cuGraphDestroy");
}

static void engine_make(engine* e, const machine* m, const sizes* size, const run* how) {
    size_t vectors = (size_t)MOST_ROWS * (size_t)size->heads;
    uint64_t workspace_bytes = 0;
    int32_t most_tokens = 0, all_pages = 0;
    memset(e, 0, sizeof *e);
    e->m = m;
    e->size = size;
    e->run = how;
    for (int i = 0; i < REQUESTS; i++) {
        int32_t tokens = script_tokens(&scripts[i], size->factor);
        most_tokens = tokens > most_tokens ? tokens : most_tokens;
        all_pages += pages_of(tokens);
    }
    pool_make(m, &e->pool, 1 + all_pages * 3 / 4); // so some must wait until others have gone
    e->width = pages_of(most_tokens);
    e->table_bytes = (size_t)MOST_REQUESTS * (size_t)e->width * sizeof *e->table;
    e->query_bytes = vectors * KMLA_BF16_BYTES;
    e->out_bytes = vectors * KMLA_LATENT_DIMS * sizeof *e->out;
    e->lse_bytes = vectors * sizeof *e->lse;
    e->in = (inputs*)allocate(sizeof *e->in);
    e->table = (int32_t*)allocate(e->table_bytes);
    e->queries = (uint16_t*)allocate(e->query_bytes);
    e->out = (uint16_t*)allocate(e->out_bytes);
    e->lse = (float*)allocate(e->lse_bytes);
    e->scores = (double*)allocate((size_t)most_tokens * sizeof *e->scores);
    for (int i = 0; i < CAPACITIES; i++) {
        capacity_plan(e, &e->capacities[i], 1 << i, most_tokens);
        if (e->capacities[i].plan.workspace_bytes > workspace_bytes) {
            workspace_bytes = e->capacities[i].plan.workspace_bytes;
        }
    }
    e->in_there = machine_alloc(m, sizeof *e->in);
    e->table_there = machine_alloc(m, e->table_bytes);
    e->queries_there = machine_alloc(m, e->query_bytes);
    e->out_there = machine_alloc(m, e->out_bytes);
    e->lse_there = machine_alloc(m, e->lse_bytes);
    e->workspace = machine_alloc(m, (size_t)workspace_bytes);
    for (int i = 0; i < CAPACITIES; i++) {
        capacity_bind(e, &e->capacities[i]);
        if (m->has_graphs && !how->direct) {
            capacity_capture(e, &e->capacities[i]);
        }
    }
}

static void engine_free(engine* e) {
    const uint64_t there[] = {e->in_there,  e->table_there, e->queries_there,
                              e->out_there, e->lse_there,   e->workspace};
    for (int i = 0; i < CAPACITIES; i++) {
        if (e->capacities[i].graph) {
            driver_must(&e->m->cuda, e->m->cuda.graph_exec_destroy(e->capacities[i].graph),
                        "cuGraphExecDestroy");
        }
    }
    for (size_t i = 0; i < sizeof there / sizeof there[0]; i++) {
        machine_free(e->m, there[i]);
    }
    pool_free(e->m, &e->pool);
    free(e->in);
    free(e->table);
    free(e->queries);
    free(e->out);
    free(e->lse);
    free(e->scores);
}

// =============================================================================
// A step: fill the batch, replay, check, accept
// =============================================================================

// Everything dead: NaN values and queries, slots that are skipped, lengths of every kind that
// means "none", tables that name the null block.
static void batch_clear(engine* e) {
    static const int32_t none[] = {0, -1, -70000, INT32_MIN};
    memset(e->in, 0xff, sizeof *e->in); // slots become -1
    memset(e->queries, 0xff, e->query_bytes);
    for (int32_t i = 0; i < MOST_ROWS; i++) {
        e->in->lengths[i] = none[i % 4];
    }
    for (int32_t i = 0; i < MOST_REQUESTS * e->width; i++) {
        e->table[i] = NULL_PAGE;
    }
    memset(e->in->row_offsets, 0, sizeof e->in->row_offsets);
}

// Rows of this step: the next token and some drafts, of which the first `accepted` are right.
static void request_draft(request* r) {
    int32_t most = r->to_decode < ROWS ? r->to_decode : ROWS;
    r->rows = 1 + (int32_t)(seed_of(RANDOM_DRAFTS, r->id, r->tokens, 0) % (uint64_t)most);
    r->accepted = (int32_t)(seed_of(RANDOM_ACCEPT, r->id, r->tokens, 0) % (uint64_t)r->rows);
}

static const uint16_t* query_of(const engine* e, int32_t row, int32_t head) {
    return e->queries + ((size_t)row * (size_t)e->size->heads + (size_t)head) * KMLA_QUERY_DIMS;
}

static void batch_add(engine* e, request* r, int32_t index, int32_t first_row) {
    size_t query_values = (size_t)e->size->heads * KMLA_QUERY_DIMS;
    r->first_row = first_row;
    request_resize(e->m, &e->pool, r, r->tokens + r->rows);
    memcpy(e->table + (size_t)index * (size_t)e->width, r->pages,
           (size_t)r->page_count * sizeof *r->pages);
    for (int32_t i = 0; i < r->rows; i++) {
        int32_t row = first_row + i, position = r->tokens + i;
        int version = i <= r->accepted ? VERSION_TRUE : VERSION_REJECTED;
        uint64_t seed = seed_of(RANDOM_QUERY, r->id, position, version);
        make_token(r, position, version, e->in->values[row]);
        e->in->slots[row] = slot_of(r, position);
        fill_normal(&seed, e->queries + (size_t)row * query_values, query_values);
        if (!e->run->ragged) {
            e->in->lengths[row] = position + 1;
        }
    }
    if (e->run->ragged) {
        e->in->lengths[index] = r->tokens + r->rows;
    }
}

// Returns the live rows.
static int32_t batch_fill(engine* e, request** live, int32_t count) {
    int32_t rows = 0;
    batch_clear(e);
    for (int32_t i = 0; i < count; i++) {
        request_draft(live[i]);
        batch_add(e, live[i], i, e->run->ragged ? rows : i * ROWS);
        rows += live[i]->rows;
        e->in->row_offsets[i + 1] = rows;
    }
    for (int32_t i = count; i < MOST_REQUESTS; i++) {
        e->in->row_offsets[i + 1] = rows;
    }
    return rows;
}

static void batch_run(engine* e, const capacity* c) {
    const machine* m = e->m;
    machine_write(m, e->in_there, e->in, sizeof *e->in);
    machine_write(m, e->table_there, e->table, e->table_bytes);
    machine_write(m, e->queries_there, e->queries, e->query_bytes);
    machine_poison(m, e->out_there, e->out_bytes); // so that a vector nobody wrote is seen
    machine_poison(m, e->lse_there, e->lse_bytes);
    if (c->graph) {
        driver_must(&m->cuda, m->cuda.graph_launch(c->graph, m->stream), "cuGraphLaunch");
    } else {
        engine_launch(e, c);
    }
    machine_read(m, e->out, e->out_there, e->out_bytes); // waits
    machine_read(m, e->lse, e->lse_there, e->lse_bytes);
}

// ---- checks

typedef struct accuracy {
    double out; // worst relative L2
    double lse; // worst absolute, over max(1, |lse|)
} accuracy;

// One vector from its definition, over keys that never were in a page. Returns its lse.
static double uncached(const double* keys, int32_t tokens, const uint16_t* query, double* scores,
                       double* out) {
    double values[KMLA_QUERY_DIMS], most = -HUGE_VAL, sum = 0.0;
    for (int d = 0; d < KMLA_QUERY_DIMS; d++) {
        values[d] = (double)SCALE * (double)kmla_bf16_to_float(query[d]);
    }
    for (int32_t t = 0; t < tokens; t++) {
        const double* key = keys + (size_t)t * KMLA_QUERY_DIMS;
        scores[t] = 0.0;
        for (int d = 0; d < KMLA_QUERY_DIMS; d++) {
            scores[t] += values[d] * key[d];
        }
        most = scores[t] > most ? scores[t] : most;
    }
    memset(out, 0, KMLA_LATENT_DIMS * sizeof *out);
    for (int32_t t = 0; t < tokens; t++) {
        const double weight = exp(scores[t] - most);
        for (int d = 0; d < KMLA_LATENT_DIMS; d++) {
            out[d] += weight * keys[(size_t)t * KMLA_QUERY_DIMS + (size_t)d];
        }
        sum += weight;
    }
    for (int d = 0; d < KMLA_LATENT_DIMS; d++) {
        out[d] /= sum;
    }
    return most + log(sum);
}

static void check_vector(const engine* e, const request* r, int32_t i, int32_t head, accuracy* a) {
    double want[KMLA_LATENT_DIMS], off = 0.0, size = 0.0;
    size_t vector = (size_t)(r->first_row + i) * (size_t)e->size->heads + (size_t)head;
    double lse =
        uncached(r->keys, r->tokens + 1 + i, query_of(e, r->first_row + i, head), e->scores, want);
    for (int d = 0; d < KMLA_LATENT_DIMS; d++) {
        double got = (double)kmla_bf16_to_float(e->out[vector * KMLA_LATENT_DIMS + (size_t)d]);
        off += (got - want[d]) * (got - want[d]);
        size += want[d] * want[d];
    }
    a->out = worse(sqrt(off / size), a->out);
    a->lse = worse(fabs((double)e->lse[vector] - lse) / fmax(1.0, fabs(lse)), a->lse);
}

// 1 if all heads of a row are finite, or for a dead row zero with lse -inf.
static int row_is_sound(const engine* e, int32_t row, int live) {
    size_t heads = (size_t)e->size->heads, first = (size_t)row * heads;
    int sound = 1;
    for (size_t v = first; v < first + heads; v++) {
        sound &= live ? isfinite(e->lse[v]) != 0 : e->lse[v] == -HUGE_VALF;
        for (size_t d = v * KMLA_LATENT_DIMS; d < (v + 1) * KMLA_LATENT_DIMS; d++) {
            sound &= live ? isfinite(kmla_bf16_to_float(e->out[d])) != 0 : e->out[d] == 0;
        }
    }
    return sound;
}

static accuracy batch_check(const engine* e, const capacity* c, request** live, int32_t count,
                            int32_t step) {
    char is_live[MOST_ROWS] = {0};
    size_t row_values = (size_t)e->size->heads * KMLA_LATENT_DIMS;
    accuracy a = {0.0, 0.0};
    for (int32_t k = 0; k < count; k++) {
        request* r = live[k];
        for (int32_t i = 0; i < r->rows; i++) {
            size_t row = (size_t)(r->first_row + i);
            is_live[row] = 1;
            for (int32_t j = 0; j < e->size->checked_heads; j++) {
                check_vector(e, r, i, (step + i + j) % e->size->heads, &a);
            }
            r->digest = digest(r->digest, e->out + row * row_values, row_values * 2);
            r->digest = digest(r->digest, e->lse + row * (size_t)e->size->heads,
                               (size_t)e->size->heads * sizeof *e->lse);
        }
    }
    for (int32_t row = 0; row < c->requests * ROWS; row++) {
        expect(row_is_sound(e, row, is_live[row]),
               is_live[row] ? "a value is not finite" : "a dead row is not 0 with lse -inf");
    }
    expect(null_block_is_untouched(e->m, &e->pool), "the null block");
    // The bound of one split; FP32 partials may cost 5 % more.
    expect(a.out <= 2e-3 * 1.05, "out against the uncached run");
    expect(a.lse <= 3e-4, "lse against the uncached run");
    return a;
}

// Rejected tokens are forgotten: their pages go back, their slots are written again.
static void request_accept(const machine* m, pool* p, request* r) {
    r->tokens += 1 + r->accepted;
    r->to_decode -= 1 + r->accepted;
    request_resize(m, p, r, r->tokens);
}

// =============================================================================
// Serving
// =============================================================================

// Goes on until there is something to decode; appends of turns that decode nothing follow one
// another. Without turns left, the request is finished and its pages go back.
static void request_advance(engine* e, request* r) {
    int32_t factor = e->size->factor;
    while (r->to_decode == 0 && ++r->turn < TURNS) {
        int32_t appended = r->script->turns[r->turn].append_tokens * factor;
        int32_t imported = e->run->reuse && r->turn == 0 ? r->script->prefix_tokens * factor : 0;
        if (appended > 0) {
            append(e->m, &e->pool, r, appended, imported);
        }
        r->to_decode = r->script->turns[r->turn].decode_tokens;
    }
    if (r->to_decode == 0) {
        request_resize(e->m, &e->pool, r, 0);
        e->pool.promised -= pages_of(script_tokens(r->script, factor));
        r->finished = 1;
    }
}

// Admits in order of arrival, while there is room in the batch and in the pool.
static void engine_admit(engine* e, request** live, int32_t* count, request* requests,
                         int32_t* admitted, int32_t step) {
    while (*admitted < REQUESTS && scripts[*admitted].arrives <= step &&
           *count < e->run->most_live) {
        int32_t pages = pages_of(script_tokens(&scripts[*admitted], e->size->factor));
        if (e->pool.promised + pages > e->pool.pages - 1) {
            break;
        }
        e->pool.promised += pages;
        live[*count] = &requests[*admitted];
        request_make(live[*count], *admitted, e->size->factor);
        request_advance(e, live[*count]);
        *count += 1;
        *admitted += 1;
    }
}

// Forgets finished requests; the others keep their order.
static int32_t drop_finished(request** live, int32_t count) {
    int32_t kept = 0;
    for (int32_t i = 0; i < count; i++) {
        if (!live[i]->finished) {
            live[kept++] = live[i];
        }
    }
    return kept;
}

static void print_step(const engine* e, const capacity* c, request** live, int32_t count,
                       int32_t rows, int32_t step, const accuracy* a) {
    int32_t tokens = 0, drafts = 0, accepted = 0;
    for (int32_t i = 0; i < count; i++) {
        tokens += live[i]->tokens + live[i]->rows;
        drafts += live[i]->rows - 1;
        accepted += live[i]->accepted;
    }
    printf("  %4d  %4d  %4d  %8d  %6d  %4d/%-4d  %3d of %2d  %.1e  %.1e\n", (int)step, (int)count,
           (int)rows, (int)c->requests, (int)tokens, (int)(e->pool.pages - 1 - e->pool.free_count),
           (int)(e->pool.pages - 1), (int)accepted, (int)drafts, a->out, a->lse);
    fflush(stdout);
}

static void serve(const machine* m, const sizes* size, const run* how, uint64_t* digests) {
    static request requests[REQUESTS];
    request* live[MOST_REQUESTS];
    int32_t count = 0, admitted = 0, step = 0;
    engine e;
    engine_make(&e, m, size, how);
    printf("\n%s%s\n"
           "                   graph            pages    drafts     off fp64, of\n"
           "  step  live  rows  capacity  tokens   of pool  accepted      out      lse\n",
           how->name, e.capacities[0].graph ? "" : " (no graphs)");
    for (; admitted < REQUESTS || count > 0; step++) {
        engine_admit(&e, live, &count, requests, &admitted, step);
        if (count > 0) {
            const capacity* c = engine_pick(&e, count);
            int32_t rows = batch_fill(&e, live, count);
            accuracy a;
            batch_run(&e, c);
            a = batch_check(&e, c, live, count, step);
            print_step(&e, c, live, count, rows, step, &a);
            for (int32_t i = 0; i < count; i++) {
                request_accept(m, &e.pool, live[i]);
                request_advance(&e, live[i]);
            }
            count = drop_finished(live, count);
        }
    }
    for (int i = 0; i < REQUESTS; i++) {
        digests[i] = requests[i].digest;
        request_free(&requests[i]);
    }
    engine_free(&e);
}

static const run runs[] = {
    {"cold, padded", 0, 0, 0, MOST_REQUESTS},
    {"cold, ragged", 1, 0, 0, MOST_REQUESTS},
    {"prefix reuse, ragged, at most 2 requests at a time", 1, 1, 0, 2},
    {"prefix reuse, padded, direct launches", 0, 1, 1, MOST_REQUESTS},
};
enum { RUNS = sizeof runs / sizeof runs[0] };

static void compare_runs(uint64_t digests[RUNS][REQUESTS]) {
    printf("\nrequest  digest of all its outputs, cold  other runs\n");
    for (int i = 0; i < REQUESTS; i++) {
        int same = 1;
        for (int k = 1; k < RUNS; k++) {
            same &= digests[k][i] == digests[0][i];
        }
        printf("  %5d  %016llx                 %s\n", i, (unsigned long long)digests[0][i],
               same ? "the same" : "DIFFERENT");
        expect(same, "a request's bits depend on the run");
    }
}

int main(int count, char** words) {
    static machine m;
    const char* library = count == 3 && strcmp(words[1], "--library") == 0 ? words[2] : NULL;
    uint64_t digests[RUNS][REQUESTS];
    const sizes* size;
    if (count != 1 && !library) {
        fprintf(stderr,
                "usage: serve_loop [--library PATH]    PATH: libcuda and NVRTC in one library\n");
        return 1;
    }
    machine_open_first(&m, library);
    // A host, or a driver that only emulates a card: small.
    size = m.gpu && m.cuda.can_time ? &gpu_sizes : &small_sizes;
    printf("%d heads, packed KV, BF16 queries and outputs, FP32 partials, %d static splits, "
           "1 + %d rows a request\n",
           (int)size->heads, (int)size->splits, DRAFTS);
    for (int i = 0; i < RUNS; i++) {
        serve(&m, size, &runs[i], digests[i]);
    }
    compare_runs(digests);
    machine_close(&m);
    printf(mismatches ? "\n%d MISMATCHES\n" : "\nall as expected\n", mismatches);
    return mismatches ? 1 : 0;
}
