// device.c - the reader, the merge, the combine and the writers against fp64, on a GPU, on the
// emulated device, or on the host reader. Needs no test framework: a GPU machine may have only a C
// compiler.
//
//     device_test [--library PATH] [--quick] [--only SUBSTRING]... [--skip SUBSTRING]...
//                 [--reader portable|hopper]
//                 [--seed N] [--host] [--watched]
//
//     --library PATH   a library that stands for both libcuda and NVRTC: the emulator
//     --host           the same cases through kmla_host_*
//     --quick          a subset that the emulator takes a minute for
//     --only           groups whose name has SUBSTRING; several times: one of them
//     --skip           not those
//     --reader         this reader in all cases that it can read, not the planner's
//     --seed           other random numbers
//     --watched        compute-sanitizer watches the ends of buffers: they have no canaries
//
// One line per group of cases, "N passed, N failed" at the end, exit code 1 if any failed. Groups
// whose name begins with a case id are the cases of that id in the project's list of known faults.

#define _DEFAULT_SOURCE // MAP_ANONYMOUS
#define KIMI_MLA_IMPLEMENTATION
#include "../kimi_mla.h"

#include "reference.h"

#include "device_cases.h"

#include <limits.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static const int32_t kv_formats[] = {KMLA_KV_PACKED, KMLA_KV_E4M3, KMLA_KV_BF16};

#define COUNT(array) ((int)(sizeof(array) / sizeof(array)[0]))

// The tiles of a reader.
typedef struct tile_list {
    int count;
    int32_t tiles[8];
} tile_list;

static const tile_list tile_lists[] = {
    {1, {8}},                             // KMLA_READER_HOST has none, so that any will do
    {3, {8, 16, 32}},                     // KMLA_READER_PORTABLE
    {7, {8, 16, 24, 32, 40, 48, 56}},     // KMLA_READER_HOPPER
};

static int pick(int quick, int full) { return options.quick ? quick : full; }

// One request of one row, which tests change.
static ref_case plain_case(int32_t heads, int64_t capacity) {
    ref_case c;
    memset(&c, 0, sizeof c);
    c.shape.requests = 1;
    c.shape.rows_per_request = 1;
    c.shape.heads = heads;
    c.shape.capacity_tokens = capacity;
    c.shape.splits = 1;
    return c;
}

// Of the reader that KV of this format gets here.
static const tile_list* tiles_for(int32_t kv_format) {
    ref_case c = plain_case(1, 64);
    c.shape.kv_format = kv_format;
    plan_case(&c);
    ref_free(&c); // the plan made a workspace
    return &tile_lists[c.plan.reader];
}

// =============================================================================
// Formats, splits, tiles
// =============================================================================

typedef struct split_kind {
    const char* name;
    int32_t splits, mode, partial_type, single_split_chunks;
} split_kind;

static const split_kind split_kinds[] = {
    {"one split", 1, KMLA_SPLIT_STATIC, KMLA_BF16, 0}, // first: others are compared with it
    {"2 static", 2, KMLA_SPLIT_STATIC, KMLA_BF16, 0},
    {"4 static, fp32", 4, KMLA_SPLIT_STATIC, KMLA_FP32, 0},
    {"16 static", 16, KMLA_SPLIT_STATIC, KMLA_BF16, 0},
    {"3 balanced", 3, KMLA_SPLIT_BALANCED, KMLA_BF16, 0},
    {"8 balanced, fp32", 8, KMLA_SPLIT_BALANCED, KMLA_FP32, 0},
    {"4 static, single below 3", 4, KMLA_SPLIT_STATIC, KMLA_FP32, 2},
    {"3 balanced, single below 2", 3, KMLA_SPLIT_BALANCED, KMLA_BF16, 1},
};

static void set_splits(ref_case* c, const split_kind* kind) {
    c->shape.splits = kind->splits;
    c->shape.split_mode = kind->mode;
    c->shape.partial_type = kind->partial_type;
    c->shape.single_split_chunks = kind->single_split_chunks;
}

// Relative L2 distance of the outputs from others.
static double distance(const ref_case* c, const bits* other) {
    const int64_t count = (int64_t)c->plan.shape.rows * c->stored_heads * REF_D;
    double off = 0.0, norm = 0.0;
    for (int64_t i = 0; i < count; i++) {
        const double a = ref_element(c->out.data, c->out_type, i);
        const double b = ref_element(other->data, c->out_type, i);
        off += (a - b) * (a - b);
        norm += a * a;
    }
    return off == 0.0 ? 0.0 : sqrt(off / norm);
}

// The device's outputs in c against the host reader's, which replace them.
static void compare_with_host(ref_case* c, const char* what) {
    kmla_plan plan;
    kmla_error error;
    const bits device = bits_of(c);
    if (kmla_plan_decode(&c->shape, NULL, &plan, &error) != KMLA_OK ||
        kmla_host_decode(&plan, &c->args, NULL, &error) != KMLA_OK) {
        fail("%s: host: %s", what, error.message);
    } else {
        const double apart = distance(c, &device);
        expect(apart <= 1.5 * out_bound(c), "%s: device and host are %.2e apart; %s", what, apart,
               describe(c));
    }
    free(device.data);
}

static void check_all_splits(ref_case* c, loaded* l, const answer* right) {
    const tile_list* list = &tile_lists[c->plan.reader];
    for (int t = 0; t < list->count; t++) {
        double one_split = 0.0;
        for (int k = 0; k < COUNT(split_kinds); k++) {
            if (options.quick && k > 0 && (k + t + c->shape.query_format) % 3 != 0) {
                continue;
            }
            c->shape.tile = list->tiles[t];
            set_splits(c, &split_kinds[k]);
            plan_again(c, l);
            if (!launch(c, l, split_kinds[k].name)) {
                continue;
            }
            judge(c, right, split_kinds[k].name);
            const double out = errors_of(c, right).out;
            one_split = k == 0 ? out : one_split;
            if (split_kinds[k].partial_type == KMLA_FP32 && c->out_type == KMLA_BF16) {
                expect(out <= 1.05 * one_split, "fp32 partials: %.2e, one split: %.2e; %s", out,
                       one_split, describe(c));
            }
            if (t == 0 && !on_host()) {
                compare_with_host(c, split_kinds[k].name);
            }
        }
    }
}

static void check_formats(int32_t kv, int32_t query, int32_t mode, int32_t out_type) {
    const int32_t lengths[] = {258, 259, 40, 41}; // 5 chunks: 2, 2 and 1 of 3 balanced splits
    ref_case c = plain_case(7, 320);
    loaded l;
    c.shape.requests = 2;
    c.shape.rows_per_request = 2;
    c.shape.kv_format = kv;
    c.shape.query_format = query;
    c.shape.mode = mode;
    c.out_type = out_type;
    c.logit_sigma = 2.0;
    c.lengths = lengths;
    build(&c);
    answer right = answer_of(&c);
    load(&c, &l);
    check_all_splits(&c, &l, &right);
    unload(&l);
    answer_free(&right);
    ref_free(&c);
}

static void test_formats(void) {
    for (int32_t kv = 0; kv < 3; kv++) {
        for (int32_t query = 0; query < 3; query++) {
            for (int32_t mode = 0; mode < 2; mode++) {
                for (int32_t type = 0; type < 2; type++) {
                    if (!options.quick || type == (kv + query + mode) % 2) {
                        check_formats(kv, query, mode, type);
                    }
                }
            }
        }
    }
}

// In e4m3 mode a BF16 query and the packed record of it give the same bits.
static void test_packed_query_bits(void) {
    const int32_t lengths[] = {150};
    for (int f = 0; f < COUNT(kv_formats); f++) {
        ref_case c = plain_case(9, 150), p;
        c.shape.kv_format = kv_formats[f];
        c.shape.mode = KMLA_MODE_E4M3_QUERY;
        c.lengths = lengths;
        build(&c);
        p = c; // the same cache and tables, other queries and outputs
        p.shape.query_format = KMLA_QUERY_PACKED;
        p.workspace.data = NULL;
        p.query = ref_buffer_make(9 * 656, 0);
        p.out = ref_buffer_make(c.out.bytes, 0xff);
        p.lse = ref_buffer_make(c.lse.bytes, 0xff);
        plan_case(&p);
        p.args.query_head_stride_bytes = 656;
        p.args.query_row_stride_bytes = 9 * 656;
        kmla_query_write write;
        memset(&write, 0, sizeof write);
        write.rows = 1;
        write.heads = 9;
        write.query_format = KMLA_QUERY_PACKED;
        write.source_type = KMLA_BF16;
        write.source = ref_address(&c.query);
        write.query = ref_address(&p.query);
        kmla_host_write_query(&write, NULL);
        if (load_and_launch(&c, "bf16 query") && load_and_launch(&p, "packed query")) {
            const bits kept = bits_of(&c);
            expect(same_bits(&kept, &p), "kv format %d: bits differ", kv_formats[f]);
            free(kept.data);
        }
        ref_buffer_free(&p.query);
        ref_buffer_free(&p.out);
        ref_buffer_free(&p.lse);
        ref_buffer_free(&p.workspace);
        ref_free(&c);
    }
}

// A row of at most single_split_chunks live chunks has the bits of a one-split launch.
static void test_single_split_bits(void) {
    const int32_t lengths[] = {128, 30, 129, 0}; // 2 and 1 chunks; 3, which are shared; none
    for (int variant = 0; variant < 3 * 2 * 2 * 2; variant++) {
        ref_case c = plain_case(5, 512);
        loaded l;
        bits one;
        c.shape.requests = 4;
        c.shape.kv_format = variant % 3;
        c.out_type = variant / 3 % 2;
        c.lengths = lengths;
        build(&c);
        load(&c, &l);
        launch(&c, &l, "one split");
        one = bits_of(&c);
        c.shape.splits = 4;
        c.shape.single_split_chunks = 2;
        c.shape.partial_type = variant / 6 % 2;
        c.shape.split_mode = variant / 12 % 2;
        plan_again(&c, &l);
        if (launch(&c, &l, "several splits")) {
            const ref_case as_one = c;
            ref_case kept = as_one;
            kept.out.data = one.data;
            kept.lse.data = one.data + one.out_bytes;
            for (int32_t row = 0; row < 4; row++) {
                for (int32_t head = 0; head < 5 && row != 2; head++) {
                    expect(same_vector(&c, row, head, &kept, row, head),
                           "row %d head %d is not that of one split; %s", row, head, describe(&c));
                }
            }
        }
        free(one.data);
        unload(&l);
        ref_free(&c);
    }
}

// =============================================================================
// Shapes
// =============================================================================

static void test_page_sizes(void) {
    static const int32_t sizes[] = {1, 2, 16, 32, 63, 64, 128, 944, 1536};
    static const int64_t gaps[] = {0, 16, 1008};
    for (int s = 0; s < COUNT(sizes); s++) {
        for (int f = 0; f < COUNT(kv_formats); f++) {
            for (int slots = 0; slots < 2; slots++) {
                const int32_t page = sizes[s];
                const int32_t lengths[] = {page + 1, page < 300 ? 2 * page : page - 1, 100};
                ref_case c = plain_case(3, page + 1 > 256 ? page + 1 : 256);
                c.shape.requests = 3;
                c.shape.page_tokens = page;
                c.shape.kv_format = kv_formats[f];
                c.shape.slot_list = slots;
                c.shape.splits = 1 + s % 3;
                c.out_type = (s + f) % 2;
                c.pitch_extra_bytes = gaps[(s + f + slots) % COUNT(gaps)];
                c.lengths = lengths;
                check_case(&c, "page size");
            }
        }
    }
}

static void test_heads(void) {
    static const int32_t few[] = {1, 2, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 66, 99, 128};
    for (int i = 0; i < pick(COUNT(few), 128); i++) {
        const int32_t lengths[] = {70 + i};
        ref_case c = plain_case(options.quick ? few[i] : i + 1, 200);
        c.shape.kv_format = i % 3;
        c.shape.query_format = i / 3 % 3;
        c.shape.splits = 1 + i % 2 * 3;
        c.out_type = i / 2 % 2;
        c.lengths = lengths;
        check_case(&c, "heads");
    }
}

static void test_rows_and_requests(void) {
    static const int32_t requests[] = {1, 3, 64};
    for (int32_t rows = 1; rows <= 8; rows++) {
        for (int i = 0; i < COUNT(requests); i++) {
            int32_t lengths[64];
            ref_case c = plain_case(rows % 2 ? 6 : 11, 192);
            ref_random random = {draw()};
            if (options.quick && requests[i] == 64 && rows % 4 != 0) {
                continue;
            }
            for (int32_t r = 0; r < requests[i]; r++) {
                lengths[r] = requests[i] == 64 ? ref_below(&random, 40) : ref_below(&random, 193);
            }
            c.shape.requests = requests[i];
            c.shape.rows_per_request = rows;
            c.shape.lengths.lengths_kind = KMLA_LENGTHS_PER_REQUEST;
            c.shape.kv_format = (rows + i) % 3;
            c.shape.splits = 1 + rows % 3;
            c.out_type = rows / 2 % 2;
            c.lengths = lengths;
            check_case(&c, "rows");
        }
    }
}

static void test_lengths(void) {
    static const int32_t lengths[] = {0, 1, 63, 64, 65, 100, 257, 4096, 16384, 131072};
    const int count = options.quick || backend.kind != BACKEND_GPU ? 8 : COUNT(lengths);
    for (int i = 0; i < count; i++) {
        for (int f = 0; f < COUNT(kv_formats); f++) {
            for (int splits = 0; splits < 2; splits++) {
                const int32_t length[] = {lengths[i], lengths[i] + 1, lengths[i] + 2};
                ref_case c = plain_case(2, lengths[i] + 2);
                if (lengths[i] > 1000 && options.quick && (f + splits) % 3 != 0) {
                    continue;
                }
                c.shape.requests = lengths[i] > 1000 ? 1 : 3;
                c.shape.kv_format = kv_formats[f];
                c.shape.splits = splits ? 0 : 1; // 0: the planner's
                c.shape.partial_type = KMLA_FP32;
                c.out_type = i % 2;
                c.lengths = length;
                check_case(&c, "length");
            }
        }
    }
}

// The step that Kimi-K3 takes on a rank of DCP9: 4 verify rows of 99 gathered heads.
static void test_k3_step(void) {
    static const int32_t capacities[] = {2048, 8192, 16384};
    const tile_list* list = tiles_for(KMLA_KV_PACKED);
    for (int i = 0; i < pick(1, 3); i++) {
        for (int t = 0; t < list->count; t++) {
            const int32_t lengths[] = {9 * (options.quick ? 300 : capacities[i]) - 5};
            ref_case c = plain_case(99, capacities[i]);
            c.shape.rows_per_request = 4;
            c.shape.splits = 0;
            c.shape.tile = list->tiles[t];
            c.shape.lengths.lengths_kind = KMLA_LENGTHS_PER_REQUEST;
            c.shape.lengths.dcp.ranks = 9;
            c.shape.lengths.dcp.rank = i;
            c.lengths = lengths;
            check_case(&c, "K3");
        }
    }
}

// Rows of a request that see different tokens, lengths and windows of every kind.
static void test_length_rules(void) {
    static const int32_t windows[] = {0, 1, 50, 64, 130};
    static const int32_t interleaves[] = {1, 16, 64};
    int n = 0;
    for (int draft = 0; draft < 2; draft++) {
        for (int w = 0; w < COUNT(windows); w++) {
            for (int32_t ranks = 1; ranks <= 3; ranks++) {
                for (int32_t rank = 0; rank < ranks; rank++, n++) {
                    const int32_t lengths[] = {500, 2, 65, 0, -7, 192};
                    ref_case c = plain_case(5, 260); // 500 of one rank: clamped
                    c.shape.requests = 6;
                    c.shape.rows_per_request = 4;
                    c.shape.lengths.lengths_kind = KMLA_LENGTHS_PER_REQUEST;
                    c.shape.lengths.rows_kind = draft;
                    c.shape.lengths.window_tokens = windows[w];
                    c.shape.lengths.dcp.ranks = ranks;
                    c.shape.lengths.dcp.rank = rank;
                    c.shape.lengths.dcp.interleave = interleaves[n % 3];
                    c.shape.kv_format = n % 3;
                    c.shape.splits = 1 + n % 4;
                    c.shape.split_mode = n / 2 % 2;
                    c.out_type = n / 3 % 2;
                    c.lengths = lengths;
                    check_case(&c, "length rule");
                }
            }
        }
    }
}

static void test_dead_rows(void) {
    const int32_t lengths[] = {0, -1, INT32_MIN, 300, INT32_MAX, 64, 1, -100};
    for (int n = 0; n < 3 * 3 * 2; n++) {
        ref_case c = plain_case(9, 256); // 300 and INT32_MAX are clamped
        c.shape.requests = 4;
        c.shape.rows_per_request = 2;
        c.shape.kv_format = n % 3;
        c.shape.splits = n / 3 % 3 == 0 ? 1 : 5;
        c.shape.split_mode = n / 3 % 3 == 2;
        c.shape.lengths.window_tokens = n / 9 * 100;
        c.out_type = n % 2;
        c.lengths = lengths;
        check_case(&c, "dead rows");
    }
}

static void test_ragged(void) {
    const int32_t offsets[] = {0, 1, 1, 4, 9, 9}; // requests without rows, too
    const int32_t row_lengths[] = {64, 10, 0, 100, 200, 130, 131, -3, 5, 77, 88, 99};
    const int32_t request_lengths[] = {64, 90, 100, 200, 7};
    for (int n = 0; n < 24; n++) {
        ref_case c = plain_case(3 + n % 4, 200);
        c.shape.ragged = 1;
        c.shape.requests = 5;
        c.shape.rows_per_request = 5;
        c.shape.rows = n % 3 == 2 ? 9 : 12; // 3 dead rows at the end, or none
        c.shape.lengths.lengths_kind = n / 2 % 2 ? KMLA_LENGTHS_PER_REQUEST : KMLA_LENGTHS_PER_ROW;
        c.shape.lengths.rows_kind = n / 4 % 2;
        c.shape.kv_format = n % 3;
        c.shape.splits = n / 3 % 2 ? 4 : 1;
        c.shape.split_mode = n / 6 % 2;
        c.out_type = n / 12;
        c.row_offsets = offsets;
        c.lengths = n / 2 % 2 ? request_lengths : row_lengths;
        check_case(&c, "ragged");
    }
}

static void test_slot_lists(void) {
    static const double holes[] = {0.0, 0.1, 0.6, 1.0};
    const int32_t lengths[] = {100, 99, 0, 200, 33, 1};
    for (int h = 0; h < COUNT(holes); h++) {
        for (int n = 0; n < 6; n++) {
            ref_case c = plain_case(4, 200);
            c.shape.requests = 3;
            c.shape.rows_per_request = 2;
            c.shape.slot_list = 1;
            c.shape.page_tokens = n % 2 ? 64 : 7;
            c.shape.kv_format = n % 3;
            c.shape.splits = n / 3 ? 4 : 1;
            c.out_type = (n + h) % 2;
            c.hole_share = holes[h];
            c.lengths = lengths;
            check_case(&c, "slot list");
        }
    }
}

// Random shapes of everything at once.
static void random_shape(ref_random* random, ref_case* c, int32_t* lengths, int32_t* offsets) {
    static const int32_t pages[] = {1, 3, 16, 32, 64, 64, 64, 96, 128};
    kmla_shape* s = &c->shape;
    s->requests = 1 + ref_below(random, 4);
    s->rows_per_request = 1 + ref_below(random, 5);
    s->heads = 1 + ref_below(random, ref_below(random, 4) ? 12 : 50);
    s->capacity_tokens = 1 + ref_below(random, ref_below(random, 4) ? 300 : 1200);
    s->kv_format = ref_below(random, 3);
    s->query_format = ref_below(random, 3);
    s->mode = ref_below(random, 2);
    s->page_tokens = pages[ref_below(random, COUNT(pages))];
    s->split_mode = ref_below(random, 2);
    s->splits = ref_below(random, 3) ? 1 + ref_below(random, 12) : 0;
    s->single_split_chunks = ref_below(random, 3) ? 0 : ref_below(random, 5);
    s->partial_type = ref_below(random, 2);
    const tile_list* list = tiles_for(s->kv_format);
    s->tile = ref_below(random, 2) ? 0 : list->tiles[ref_below(random, list->count)];
    s->slot_list = ref_below(random, 4) == 0;
    s->ragged = !s->slot_list && ref_below(random, 3) == 0;
    s->lengths.window_tokens =
        ref_below(random, 3) ? 0 : 1 + ref_below(random, (int32_t)s->capacity_tokens);
    if (!s->slot_list && ref_below(random, 2)) {
        s->lengths.lengths_kind = KMLA_LENGTHS_PER_REQUEST;
        s->lengths.rows_kind = ref_below(random, 2);
        s->lengths.dcp.ranks = 1 + ref_below(random, 4);
        s->lengths.dcp.rank = ref_below(random, s->lengths.dcp.ranks);
        s->lengths.dcp.interleave = 1 + ref_below(random, 70);
    }
    offsets[0] = 0;
    for (int32_t i = 0; i < s->requests; i++) {
        offsets[i + 1] = offsets[i] + ref_below(random, s->rows_per_request + 1);
    }
    s->rows = s->ragged ? offsets[s->requests] + ref_below(random, 3) : 0;
    s->rows += s->ragged && s->rows == 0;
    for (int32_t i = 0; i < 64; i++) {
        const int32_t ranks = s->lengths.dcp.ranks ? s->lengths.dcp.ranks : 1;
        lengths[i] = ref_below(random, (int32_t)(s->capacity_tokens * ranks * 11 / 10) + 2) - 1;
    }
    c->lengths = lengths;
    c->row_offsets = s->ragged ? offsets : NULL;
    c->out_type = ref_below(random, 2);
    c->stored_heads = ref_below(random, 3) ? 0 : s->heads + ref_below(random, 9);
    c->pitch_extra_bytes = ref_below(random, 2) ? 0 : 16 * ref_below(random, 40);
    c->logit_sigma = 0.2 + 3.8 * ref_uniform(random);
    c->hole_share = s->slot_list && ref_below(random, 2) ? 0.3 : 0.0;
}

static void test_random_shapes(void) {
    for (int i = 0; i < pick(50, 600); i++) {
        ref_case c;
        int32_t lengths[64], offsets[8];
        ref_random random = {draw()};
        memset(&c, 0, sizeof c);
        c.seed = random.state + 1;
        random_shape(&random, &c, lengths, offsets);
        check_case(&c, "random");
    }
}

// Entries that no row reads: past the length, and below every window, name no page of the pool.
static void test_unread_entries(void) {
    for (int n = 0; n < 6; n++) {
        const int32_t lengths[] = {230, 229};
        ref_case c = plain_case(5, 400);
        c.shape.rows_per_request = 2;
        c.shape.page_tokens = 16;
        c.shape.kv_format = n % 3;
        c.shape.splits = n / 3 ? 4 : 1;
        c.shape.lengths.window_tokens = 100;
        c.lengths = lengths;
        build(&c);
        int32_t* pages = (int32_t*)(void*)c.table.data;
        for (int page = 0; page < 129 / 16; page++) { // row 1 sees tokens from 129 on
            pages[page] = INT32_MAX;
        }
        expect(pages[15] == INT32_MAX, "the table is full");
        check_built(&c, "unread entries");
        ref_free(&c);
    }
}

// =============================================================================
// Heads: HT
// =============================================================================

// Reads c as if its padding heads were heads, whose queries are NaN.
static void read_padded(ref_case* c, const char* what) {
    const int32_t heads = c->shape.heads;
    c->shape.heads = c->stored_heads;
    plan_case(c);
    load_and_launch(c, what);
    c->shape.heads = heads;
    plan_case(c);
}

static void test_ht_02(void) {
    for (int f = 0; f < COUNT(kv_formats); f++) {
        static const int32_t stored[] = {99, 104, 112};
        const int32_t lengths[] = {100, 101};
        const uint64_t seed = draw();
        ref_case dense, c;
        for (int i = 0; i < 2 * COUNT(stored); i++) {
            ref_case* to = i == 0 ? &dense : &c;
            *to = plain_case(99, 200);
            to->shape.rows_per_request = 2;
            to->shape.kv_format = kv_formats[f];
            to->shape.splits = 2;
            to->stored_heads = stored[i / 2];
            to->seed = seed;
            to->lengths = lengths;
            build(to);
            if (i == 0) {
                check_built(to, "99 heads");
                continue;
            }
            if (i % 2) {
                read_padded(to, "padding heads read");
            } else {
                load_and_launch(to, "padding heads left out");
            }
            for (int32_t v = 0; v < 2 * 99; v++) {
                expect(same_vector(&dense, v / 99, v % 99, to, v / 99, v % 99),
                       "row %d head %d of %d differs from dense; %s", v / 99, v % 99, stored[i / 2],
                       describe(to));
            }
            ref_free(to);
        }
        ref_free(&dense);
    }
}

static void test_ht_03(void) {
    int32_t lengths[30];
    ref_random random = {draw()};
    ref_case c = plain_case(4, options.quick ? 600 : 4096);
    for (int i = 0; i < 30; i++) {
        lengths[i] = 1 + ref_below(&random, (int32_t)c.shape.capacity_tokens);
    }
    c.shape.requests = 30;
    c.shape.splits = 0;
    c.lengths = lengths;
    build(&c);
    expect(on_host() || c.plan.tile == 8, "tile %d", c.plan.tile);
    check_built(&c, "4 heads");
    ref_free(&c);
}

// =============================================================================
// Combine: LC
// =============================================================================

typedef struct combine_case {
    kmla_combine args;                       // counts, types and strides; 0 is dense
    ref_buffer part_out, part_lse, out, lse; // host copies; outputs full of NaN
    int64_t part_out_stride, part_row_stride, part_head_stride;
    int64_t part_lse_stride, part_lse_row_stride, part_lse_head_stride;
    int64_t out_row_stride, out_head_stride, lse_row_stride, lse_head_stride;
} combine_case;

static int64_t or_dense(int64_t stride, int64_t dense) { return stride == 0 ? dense : stride; }

static void combine_make(combine_case* k) {
    const kmla_combine* a = &k->args;
    k->part_head_stride = or_dense(a->part_head_stride, REF_D);
    k->part_row_stride = or_dense(a->part_row_stride, a->heads * k->part_head_stride);
    k->part_out_stride = or_dense(a->part_out_stride, a->rows * k->part_row_stride);
    k->part_lse_head_stride = or_dense(a->part_lse_head_stride, 1);
    k->part_lse_row_stride = or_dense(a->part_lse_row_stride, a->heads * k->part_lse_head_stride);
    k->part_lse_stride = or_dense(a->part_lse_stride, a->rows * k->part_lse_row_stride);
    k->out_head_stride = or_dense(a->out_head_stride, REF_D);
    k->out_row_stride = or_dense(a->out_row_stride, a->heads * k->out_head_stride);
    k->lse_head_stride = or_dense(a->lse_head_stride, 1);
    k->lse_row_stride = or_dense(a->lse_row_stride, a->heads * k->lse_head_stride);
    // To the last element, not to the last stride: what is behind is not the library's.
    const int64_t last_part = (a->parts - 1) * k->part_out_stride +
                              (a->rows - 1) * k->part_row_stride +
                              (a->heads - 1) * k->part_head_stride + REF_D;
    const int64_t last_lse = (a->parts - 1) * k->part_lse_stride +
                             (a->rows - 1) * k->part_lse_row_stride +
                             (a->heads - 1) * k->part_lse_head_stride + 1;
    const int64_t last_out =
        (a->rows - 1) * k->out_row_stride + (a->heads - 1) * k->out_head_stride + REF_D;
    const int64_t last_out_lse =
        (a->rows - 1) * k->lse_row_stride + (a->heads - 1) * k->lse_head_stride + 1;
    k->part_out = ref_buffer_make((size_t)last_part * (a->part_type == KMLA_FP32 ? 4 : 2), 0xff);
    k->part_lse = ref_buffer_make((size_t)last_lse * 4, 0xff);
    k->out = ref_buffer_make((size_t)last_out * (a->out_type == KMLA_FP32 ? 4 : 2), 0xff);
    k->lse = ref_buffer_make((size_t)last_out_lse * 4, 0xff);
}

static void combine_free(combine_case* k) {
    ref_buffer_free(&k->part_out);
    ref_buffer_free(&k->part_lse);
    ref_buffer_free(&k->out);
    ref_buffer_free(&k->lse);
}

static int64_t part_at(const combine_case* k, int32_t part, int32_t row, int32_t head) {
    return part * k->part_out_stride + row * k->part_row_stride + head * k->part_head_stride;
}

static uint8_t* part_lse_at(const combine_case* k, int32_t part, int32_t row, int32_t head) {
    return k->part_lse.data + 4 * (part * k->part_lse_stride + row * k->part_lse_row_stride +
                                   head * k->part_lse_head_stride);
}

static void put_element(ref_buffer* array, int32_t type, int64_t index, float value) {
    if (type == KMLA_FP32) {
        put_float(array->data + index * 4, value);
    } else {
        const uint16_t bits16 = kmla_float_to_bf16(value);
        memcpy(array->data + index * 2, &bits16, 2);
    }
}

static void put_part(combine_case* k, int32_t part, int32_t row, int32_t head, float lse,
                     float value) {
    put_float(part_lse_at(k, part, row, head), lse);
    for (int d = 0; d < REF_D; d++) {
        put_element(&k->part_out, k->args.part_type, part_at(k, part, row, head) + d, value);
    }
}

static void combine_run(combine_case* k) {
    device_buffer part_out = device_copy(k->part_out.data, k->part_out.bytes);
    device_buffer part_lse = device_copy(k->part_lse.data, k->part_lse.bytes);
    device_buffer out = device_copy(k->out.data, k->out.bytes);
    device_buffer lse = device_copy(k->lse.data, k->lse.bytes);
    kmla_error error;
    prepare(NULL);
    // A share's part_out is its own part's alone.
    k->args.part_out = part_out.address + (uint64_t)((k->args.share > 0 ? k->args.share - 1 : 0) *
                                                     k->part_out_stride *
                                                     (k->args.part_type == KMLA_FP32 ? 4 : 2));
    k->args.part_lse = part_lse.address;
    k->args.out = out.address;
    k->args.lse = lse.address;
    if (call_combine(&k->args, &error) != KMLA_OK) {
        fail("combine: %s", error.message);
    }
    copy_to_host(k->out.data, out.address, out.bytes);
    copy_to_host(k->lse.data, lse.address, lse.bytes);
    expect(device_canaries_whole(&out) && device_canaries_whole(&lse), "combine: canary hurt");
    device_free(&part_out);
    device_free(&part_lse);
    device_free(&out);
    device_free(&lse);
}

// One vector of constant parts; the outputs are to be these.
static void check_combine(const char* what, int32_t parts, const float* lse, const float* out,
                          float right_out, float right_lse) {
    for (int type = 0; type < 4; type++) {
        combine_case k;
        memset(&k, 0, sizeof k);
        k.args.parts = parts;
        k.args.rows = 1;
        k.args.heads = 1;
        k.args.part_type = type % 2;
        k.args.out_type = type / 2;
        combine_make(&k);
        for (int32_t p = 0; p < parts; p++) {
            put_part(&k, p, 0, 0, lse[p], out[p]);
        }
        combine_run(&k);
        const double got = ref_float_at(k.lse.data);
        expect(isinf(right_lse) ? got == right_lse : fabs(got - right_lse) <= 1e-6,
               "%s: lse %.9g, not %.9g", what, got, right_lse);
        for (int d = 0; d < REF_D; d += 73) {
            const double value = ref_element(k.out.data, k.args.out_type, d);
            expect(right_out == 0.0f ? value == 0.0 : fabs(value - right_out) <= 2e-6 * right_out,
                   "%s: out %.9g, not %.9g", what, value, right_out);
        }
        combine_free(&k);
    }
}

static void test_lc(void) {
    const float shard_lse[] = {2.0794415f, -INFINITY}, shard_out[] = {9.0f, 5.0f};
    const float two_lse[] = {0.6931472f, 2.0794415f}, two_out[] = {0.0f, 10.0f};
    const float empty_lse[] = {-INFINITY, -INFINITY, 0.0f}, empty_out[] = {NAN, NAN, 3.0f};
    const float poison_lse[] = {0.0f, -INFINITY, -INFINITY}, poison_out[] = {3.0f, NAN, INFINITY};
    const float odd_lse[] = {NAN, INFINITY, 1.0f}, odd_out[] = {5.0f, 6.0f, 7.0f};
    const float far_lse[] = {-1000.0f, 0.0f}, far_out[] = {NAN, 4.0f};
    check_combine("LC-01", 2, shard_lse, shard_out, 9.0f, 2.0794415f);
    check_combine("LC-02", 2, two_lse, two_out, 8.0f, 2.302585f);
    check_combine("LC-03", 2, empty_lse, empty_out, 0.0f, -INFINITY);
    check_combine("LC-03", 3, empty_lse, empty_out, 3.0f, 0.0f);
    check_combine("LC-06", 3, poison_lse, poison_out, 3.0f, 0.0f);
    check_combine("odd lse", 3, odd_lse, odd_out, 7.0f, 1.0f);
    check_combine("all odd", 2, odd_lse, odd_out, 0.0f, -INFINITY);
    check_combine("far below", 2, far_lse, far_out, 4.0f, 0.0f);
}

// Random parts, some empty or odd with NaN behind them, against fp64.
static void fill_parts(combine_case* k, ref_random* random) {
    for (int32_t p = 0; p < k->args.parts; p++) {
        for (int32_t row = 0; row < k->args.rows; row++) {
            for (int32_t head = 0; head < k->args.heads; head++) {
                static const float odd[] = {-INFINITY, NAN, INFINITY};
                const int32_t kind = ref_below(random, 8);
                const float lse = kind < 3 ? odd[kind] : (float)(5.0 * ref_normal(random));
                put_part(k, p, row, head, lse, NAN);
                for (int d = 0; kind >= 3 && d < REF_D; d++) {
                    put_element(&k->part_out, k->args.part_type, part_at(k, p, row, head) + d,
                                (float)ref_normal(random));
                }
            }
        }
    }
}

// The combine of a vector's parts, in fp64.
static void part_answer(const combine_case* k, int32_t row, int32_t head, double* right,
                        double* right_lse) {
    double part_lse[64];
    double* parts = (double*)malloc((size_t)k->args.parts * REF_D * sizeof(double));
    const double* part_out[64];
    for (int32_t p = 0; p < k->args.parts; p++) {
        part_lse[p] = ref_float_at(part_lse_at(k, p, row, head));
        part_out[p] = parts + p * REF_D;
        for (int d = 0; d < REF_D; d++) {
            parts[p * REF_D + d] =
                ref_element(k->part_out.data, k->args.part_type, part_at(k, p, row, head) + d);
        }
    }
    ref_combine(k->args.parts, part_lse, part_out, right, right_lse);
    free(parts);
}

static void judge_combined(const combine_case* k, int32_t row, int32_t head) {
    double right[REF_D], right_lse, off = 0.0, norm = 0.0;
    part_answer(k, row, head, right, &right_lse);
    const int64_t at = row * k->out_row_stride + head * k->out_head_stride;
    const double lse =
        ref_float_at(k->lse.data + 4 * (row * k->lse_row_stride + head * k->lse_head_stride));
    for (int d = 0; d < REF_D; d++) {
        const double difference = ref_element(k->out.data, k->args.out_type, at + d) - right[d];
        off += difference * difference;
        norm += right[d] * right[d];
    }
    const double bound = k->args.out_type == KMLA_FP32 ? 2e-6 : 2e-3;
    expect(off == 0.0 ? norm == 0.0 || norm > 0.0 : sqrt(off / norm) <= bound,
           "row %d head %d of %d parts: out is %.2e off", row, head, k->args.parts,
           norm == 0.0 ? off : sqrt(off / norm));
    expect(lse == right_lse || fabs(lse - right_lse) <= 2e-6 * (1.0 + fabs(right_lse)),
           "row %d head %d of %d parts: lse %.9g, not %.9g", row, head, k->args.parts, lse,
           right_lse);
}

// Sizes of the n-th of many; types and strides are the caller's.
static combine_case small_combine(int32_t parts, int n) {
    combine_case k;
    memset(&k, 0, sizeof k);
    k.args.parts = parts;
    k.args.rows = 1 + n % 3;
    k.args.heads = 1 + n * 7 % 12;
    return k;
}

static void test_combine(void) {
    static const int32_t parts[] = {1, 2, 9, 64};
    for (int n = 0; n < COUNT(parts) * 8; n++) {
        combine_case k = small_combine(parts[n % COUNT(parts)], n);
        ref_random random = {draw()};
        k.args.part_type = n / 4 % 2;
        k.args.out_type = n / 8 % 2;
        if (n >= 16) { // strides: heads inside rows inside parts, padded; lse heads outermost
            k.args.part_head_stride = 528;
            k.args.part_row_stride = 528 * 14;
            k.args.part_out_stride = 528 * 14 * 4 + 8;
            k.args.part_lse_head_stride = 300;
            k.args.part_lse_row_stride = 67;
            k.args.part_lse_stride = 1;
            k.args.out_head_stride = 520;
            k.args.out_row_stride = 520 * 13;
            k.args.lse_row_stride = 80; // 66 heads stored 80 wide: element (1, 0) is at 80
        }
        combine_make(&k);
        fill_parts(&k, &random);
        combine_run(&k);
        for (int32_t v = 0; v < k.args.rows * k.args.heads; v++) {
            judge_combined(&k, v / k.args.heads, v % k.args.heads);
        }
        for (size_t at = 0; n >= 16 && at < k.lse.bytes / 4; at++) {
            if (at % 80 >= (size_t)k.args.heads) {
                expect(ref_all_bytes(k.lse.data + 4 * at, 4, 0xff), "lse gap %zu written", at);
            }
        }
        combine_free(&k);
    }
}

// =============================================================================
// Splits: SK
// =============================================================================

static void test_sk_01(void) {
    static const int32_t lengths[] = {100, 1};
    static const int32_t splits[] = {16, 32};
    for (int n = 0; n < 2 * 3 * 2; n++) {
        ref_case c = plain_case(3, 64 * splits[n % 2]);
        loaded l;
        c.shape.kv_format = n / 2 % 3;
        c.shape.partial_type = n / 6;
        c.shape.splits = splits[n % 2];
        c.lengths = &lengths[n % 2];
        build(&c);
        answer right = answer_of(&c);
        load(&c, &l);
        launch(&c, &l, "first run");
        judge(&c, &right, "first run");
        const bits first = bits_of(&c);
        for (int run = 1; run < pick(4, 20); run++) {
            launch(&c, &l, "another run");
            expect(same_bits(&first, &c), "run %d has other bits; %s", run, describe(&c));
        }
        c.shape.splits = 1;
        plan_again(&c, &l);
        launch(&c, &l, "one split");
        judge(&c, &right, "one split");
        expect(distance(&c, &first) <= 4e-3, "one split is %.1e away", distance(&c, &first));
        free(first.data);
        unload(&l);
        answer_free(&right);
        ref_free(&c);
    }
}

static void test_sk_03(void) {
    for (int n = 0; n < 3 * 2 * 2 * 2; n++) {
        const int32_t lengths[] = {640, 640, 640, 640};
        ref_case c = plain_case(2, 640);
        c.shape.rows_per_request = n / 6 % 2 ? 4 : 1;
        c.shape.kv_format = n % 3;
        c.shape.splits = n / 3 % 2 ? 10 : 1;
        c.shape.partial_type = n / 12;
        c.scale = 6.45990f; // ln 639
        c.out_type = n / 12;
        c.lengths = lengths;
        build(&c);
        c.args.kv_scale = 1.0f;
        c.args.scale = c.scale;
        put_plain_query(&c, 1.0);
        for (int64_t token = 0; token < 640; token++) {
            put_plain_record(&c, record_of(&c, 0, token), token == 639, token == 639);
        }
        load_and_launch(&c, "late maximum");
        for (int32_t v = 0; v < c.plan.shape.rows * 2; v++) {
            const double lse = ref_float_at(lse_of(&c, v / 2, v % 2));
            expect(fabs(lse - 7.1530516) <= 5e-5, "lse %.7f; %s", lse, describe(&c));
            for (int d = 0; d < REF_D; d++) {
                const double out = ref_element(out_of(&c, v / 2, v % 2), c.out_type, d);
                expect(fabs(out - 0.5) <= 5e-4, "out %.7f at %d; %s", out, d, describe(&c));
            }
        }
        ref_free(&c);
    }
}

// Two splits of equal lse, whose outputs BF16 cannot hold: what partials are shows in the mean.
static void test_sk_04(void) {
    static const double values[] = {1.0029296875, 1.0068359375};
    const int32_t lengths[] = {128};
    for (int partial = 0; partial < 2; partial++) {
        ref_case c = plain_case(2, 128);
        c.shape.splits = 2;
        c.shape.partial_type = partial;
        c.lengths = lengths;
        build(&c);
        put_plain_query(&c, 0.0);
        for (int64_t token = 0; token < 128; token++) {
            put_plain_record(&c, record_of(&c, 0, token), values[token / 64], 0.0);
        }
        load_and_launch(&c, "equal lse");
        const double right = partial == KMLA_FP32 ? 1.0078125 : 1.0;
        for (int d = 0; d < REF_D; d++) {
            const double out = ref_element(out_of(&c, 0, 1), KMLA_BF16, d);
            expect(out == right, "%s partials: out %.9g at %d, not %.9g", partial ? "fp32" : "bf16",
                   out, d, right);
        }
        ref_free(&c);
    }
}

// Copies what one row of a case reads into a row of another.
static void copy_row(const ref_case* from, int32_t from_row, const ref_case* to, int32_t to_row,
                     int64_t tokens) {
    const size_t record = (size_t)ref_record_bytes(ref_kv_layout(from->plan.shape.kv_format));
    const size_t query = (size_t)ref_record_bytes(ref_query_layout(from->plan.shape.query_format));
    for (int64_t token = 0; token < tokens; token++) {
        memcpy(record_of(to, to_row, token), record_of(from, from_row, token), record);
    }
    for (int32_t head = 0; head < from->plan.shape.heads && head < to->plan.shape.heads; head++) {
        memcpy(query_of(to, to_row, head), query_of(from, from_row, head), query);
    }
}

typedef struct company { // in which a row is read
    const char* name;
    int32_t requests, rows, heads;
} company;

static void test_sk_06(void) {
    static const company companies[] = {
        {"with 9 heads", 1, 1, 9},
        {"as row 0 of 64", 64, 1, 1},
        {"with 4 rows", 1, 4, 3},
        {"of 3 requests with 5 rows of 9 heads", 3, 5, 9},
    };
    static const int32_t splits[] = {1, 4};
    for (int n = 0; n < pick(6, 12); n++) {
        int32_t lengths[64];
        ref_case alone = plain_case(1, 250);
        for (int i = 0; i < 64; i++) {
            lengths[i] = i < 5 ? 200 : i;
        }
        alone.shape.kv_format = n % 3;
        alone.shape.mode = n / 6;
        alone.shape.splits = splits[n / 3 % 2];
        alone.shape.tile = 8;
        alone.lengths = lengths;
        build(&alone);
        check_built(&alone, "alone");
        const tile_list* list = &tile_lists[alone.plan.reader];
        for (int i = 0; i < COUNT(companies) * list->count; i += pick(3, 1)) {
            const company* with = &companies[i % COUNT(companies)];
            ref_case c = plain_case(with->heads, 250);
            c.shape = alone.shape;
            c.shape.rows = 0;
            c.shape.heads = with->heads;
            c.shape.requests = with->requests;
            c.shape.rows_per_request = with->rows;
            c.shape.tile = list->tiles[i / COUNT(companies)];
            c.lengths = lengths;
            build(&c);
            copy_row(&alone, 0, &c, 0, 200);
            load_and_launch(&c, with->name);
            expect(same_vector(&alone, 0, 0, &c, 0, 0), "%s: other bits than alone; %s", with->name,
                   describe(&c));
            ref_free(&c);
        }
        ref_free(&alone);
    }
}

// The bits of all vectors are the same for every tile, also with ragged lengths in a tile.
static void test_tile_bits(void) {
    const int32_t lengths[] = {300, 299, 120, 7};
    for (int n = 0; n < 3 * 2; n++) {
        ref_case c = plain_case(11, 320);
        loaded l;
        bits first = {NULL, 0, 0};
        c.shape.rows_per_request = 4;
        c.shape.kv_format = n % 3;
        c.shape.splits = n / 3 ? 3 : 1;
        c.lengths = lengths;
        build(&c);
        load(&c, &l);
        const tile_list* list = &tile_lists[c.plan.reader];
        for (int t = 0; t < list->count; t++) {
            c.shape.tile = list->tiles[t];
            plan_again(&c, &l);
            launch(&c, &l, "tile");
            if (t == 0) {
                first = bits_of(&c);
            }
            expect(same_bits(&first, &c), "tile %d has other bits than tile 8; %s",
                   list->tiles[t], describe(&c));
        }
        free(first.data);
        unload(&l);
        ref_free(&c);
    }
}

static void test_run_to_run(void) {
    const int32_t lengths[] = {500, 501, 502, 503};
    for (int f = 0; f < COUNT(kv_formats); f++) {
        ref_case c = plain_case(12, 512);
        loaded l;
        bits first;
        c.shape.rows_per_request = 4;
        c.shape.kv_format = kv_formats[f];
        c.shape.splits = 4;
        c.shape.split_mode = KMLA_SPLIT_BALANCED;
        c.lengths = lengths;
        build(&c);
        load(&c, &l);
        launch(&c, &l, "first");
        first = bits_of(&c);
        for (int run = 1; run < pick(3, 20); run++) {
            launch(&c, &l, "again");
            expect(same_bits(&first, &c), "run %d has other bits; %s", run, describe(&c));
        }
        free(first.data);
        unload(&l);
        ref_free(&c);
    }
}

// =============================================================================
// FP8: FP
// =============================================================================

static void test_fp_01(void) {
    static const float scales[] = {0.75f, 0.66964287f};
    static const double right[] = {336.0, 300.0};
    const int32_t lengths[] = {1};
    for (int n = 0; n < 8; n++) {
        ref_case c = plain_case(1, 64);
        c.shape.kv_format = n / 2 % 2; // packed, E4M3
        c.out_type = n / 4;
        c.lengths = lengths;
        build(&c);
        uint8_t* record = record_of(&c, 0, 0);
        memset(record, 0x7e, 512);
        memset(record + 512, 0, (size_t)(c.shape.kv_format == KMLA_KV_PACKED ? 144 : 64));
        for (int g = 0; g < 4 && c.shape.kv_format == KMLA_KV_PACKED; g++) {
            put_float(scale_of(record, g), scales[n % 2]);
        }
        c.args.kv_scale = scales[n % 2];
        load_and_launch(&c, "one token");
        for (int d = 0; d < REF_D; d++) {
            const double out = ref_element(out_of(&c, 0, 0), c.out_type, d);
            const double room = c.out_type == KMLA_FP32 ? 5e-4 * right[n % 2] : 0.0;
            expect(fabs(out - right[n % 2]) <= room, "0x7E x %g is %.7g; %s", scales[n % 2], out,
                   describe(&c));
        }
        ref_free(&c);
    }
}

// Writes one token of 512 fp32 values as E4M3 with scale 1; its codes.
static void write_codes(const float* values, uint8_t* codes) {
    const float rope[64] = {0};
    const int64_t slot = 0;
    device_buffer latent = device_copy(values, REF_D * 4), ropes = device_copy(rope, sizeof rope);
    device_buffer slots = device_copy(&slot, 8), kv = device_make(576, 0xff);
    kmla_kv_write write;
    kmla_error error;
    prepare(NULL);
    memset(&write, 0, sizeof write);
    write.tokens = 1;
    write.kv_format = KMLA_KV_E4M3;
    write.source_type = KMLA_FP32;
    write.kv_scale = 1.0f;
    write.page_tokens = 1;
    write.latent = latent.address;
    write.rope = ropes.address;
    write.slots = slots.address;
    write.kv = kv.address;
    write.kv_pages = 1;
    if (call_write_kv(&write, &error) != KMLA_OK) {
        fail("%s", error.message);
    }
    copy_to_host(codes, kv.address, REF_D);
    expect(device_canaries_whole(&kv), "canary hurt");
    device_free(&latent);
    device_free(&ropes);
    device_free(&slots);
    device_free(&kv);
}

static void test_fp_03(void) {
    static const uint8_t right[] = {0x7e, 0x7e, 0x7e, 0x7e, 0x7e, 0xfe, 0x00, 0x01, 0x02, 0x7f};
    const float values[] = {448.0f,
                            449.0f,
                            464.0f,
                            465.0f,
                            1000.0f,
                            -1000.0f,
                            0.0009765625f,
                            1.0001f * 0.0009765625f,
                            3.0f * 0.0009765625f,
                            NAN};
    float source[REF_D];
    uint8_t codes[REF_D];
    for (int d = 0; d < REF_D; d++) {
        source[d] = values[d % 10];
    }
    write_codes(source, codes);
    for (int d = 0; d < REF_D; d++) {
        expect(codes[d] == right[d % 10], "%g becomes %02x, not %02x", source[d], codes[d],
               right[d % 10]);
    }
}

// Every code through the reader, as the only token's latent, and back through the writer.
static void test_fp_04(void) {
    const int32_t lengths[] = {1};
    const tile_list* list = tiles_for(KMLA_KV_E4M3); // packed KV has the same
    for (int n = 0; n < 2 * list->count; n++) {
        ref_case c = plain_case(1, 64);
        float values[REF_D];
        uint8_t codes[REF_D], back[REF_D];
        c.shape.kv_format = n % 2;
        c.shape.tile = list->tiles[n / 2];
        c.out_type = KMLA_FP32;
        c.lengths = lengths;
        build(&c);
        c.args.kv_scale = 1.0f;
        uint8_t* record = record_of(&c, 0, 0);
        memset(record, 0, 576);
        for (int d = 0; d < REF_D; d++) { // the second half is shifted: other lanes get a code
            codes[d] = (uint8_t)(d < 256 ? d : d * 5 + 3);
            codes[d] = (codes[d] & 0x7f) == 0x7f ? 0 : codes[d]; // NaN would be the whole output
            record[d] = codes[d];
        }
        for (int g = 0; g < 4 && c.shape.kv_format == KMLA_KV_PACKED; g++) {
            put_float(scale_of(record, g), 1.0f);
            memset(record + 528, 0, 128);
        }
        load_and_launch(&c, "all codes");
        memcpy(values, out_of(&c, 0, 0), sizeof values);
        for (int d = 0; d < REF_D; d++) {
            expect(values[d] == ref_e4m3(codes[d]), "code %02x reads as %g; %s", codes[d],
                   values[d], describe(&c));
        }
        write_codes(values, back);
        for (int d = 0; d < REF_D; d++) { // a sum that began at +0 has no -0
            expect(back[d] == (codes[d] == 0x80 ? 0 : codes[d]), "code %02x comes back as %02x",
                   codes[d], back[d]);
        }
        for (int code = 0x7f; code <= 0xff; code += 0x80) {
            record[200] = (uint8_t)code;
            load_and_launch(&c, "NaN code");
            memcpy(values, out_of(&c, 0, 0), sizeof values);
            expect(isnan(values[200]) && isnan(ref_float_at(lse_of(&c, 0, 0))),
                   "code %02x reads as %g", code, values[200]);
            write_codes(values, back);
            expect(back[200] == 0x7f, "NaN becomes %02x", back[200]);
        }
        ref_free(&c);
    }
}

// =============================================================================
// Numbers that are hard
// =============================================================================

// A NaN token poisons the rows that see it and no other, whatever part of the record it is in.
static void put_nan(const ref_case* c, uint8_t* record, int part, int dim) {
    const int32_t format = c->plan.shape.kv_format;
    if (format == KMLA_KV_BF16) {
        put_bf16(record + 2 * (part == 1 ? 512 + dim % 64 : dim), 1.0);
        record[2 * (part == 1 ? 512 + dim % 64 : dim) + 1] = dim % 2 ? 0x7f : 0xff;
        record[2 * (part == 1 ? 512 + dim % 64 : dim)] = 0xc0;
    } else if (part == 0) {
        record[dim] = dim % 2 ? 0x7f : 0xff;
    } else if (format == KMLA_KV_E4M3) {
        record[512 + dim % 64] = 0x7f;
    } else if (part == 1) {
        memset(record + 528 + 2 * (dim % 64), 0xff, 2);
    } else {
        put_float(scale_of(record, dim / 128), NAN);
    }
}

static void test_nan_tokens(void) {
    static const int32_t offsets_from_end[] = {1, 2, 3}; // seen by 1, 2, 3 of the 4 causal rows
    static const int dims[] = {0, 77, 130, 511};
    const int32_t lengths[] = {115, 64};
    int n = 0;
    for (int f = 0; f < COUNT(kv_formats); f++) {
        const tile_list* list = tiles_for(kv_formats[f]);
        for (int part = 0; part < (kv_formats[f] == KMLA_KV_PACKED ? 3 : 2); part++) {
            for (int e = 0; e < COUNT(offsets_from_end); e++) {
                for (int d = 0; d < COUNT(dims); d++, n++) {
                    ref_case c = plain_case(5, 128);
                    c.shape.requests = 2;
                    c.shape.rows_per_request = 4;
                    c.shape.kv_format = kv_formats[f];
                    c.shape.lengths.lengths_kind = KMLA_LENGTHS_PER_REQUEST;
                    c.shape.tile = list->tiles[n % list->count];
                    c.shape.splits = 1 + n / list->count % 2;
                    c.lengths = lengths;
                    build(&c);
                    put_nan(&c, record_of(&c, 3, 115 - offsets_from_end[e]), part, dims[d]);
                    check_built(&c, "NaN token");
                    ref_free(&c);
                }
            }
        }
    }
}

static void test_nan_queries(void) {
    const int32_t lengths[] = {90, 90};
    for (int n = 0; n < 3 * 2 * 2; n++) {
        ref_case c = plain_case(9, 128);
        c.shape.rows_per_request = 2;
        c.shape.kv_format = n % 3;
        c.shape.mode = n / 3 % 2;
        c.lengths = lengths;
        build(&c);
        memset(query_of(&c, 0, 4) + (n / 6 ? 1030 : 300), 0xff, 2);
        memset(query_of(&c, 1, 8) + (n / 6 ? 1150 : 0), 0xff, 2);
        check_built(&c, "NaN query");
        ref_free(&c);
    }
}

static double log_uniform(ref_random* random, double low, double high) {
    return pow(2.0, low + (high - low) * ref_uniform(random));
}

// Packed scales of any size in one row, in some cases larger from token to token, some negative, some
// 0, some tokens with all four 0. Query 0 makes all weights equal; small ones make the scores of the
// largest tokens of order 1; normal ones leave one token, which must come out as it is however large
// its score. `range`: exponents of the first token, low and high, and what each token adds.
static void put_extreme_scales(const ref_case* c, const double* range, ref_random* random) {
    for (int64_t token = 0; token < 200; token++) {
        uint8_t* record = record_of(c, 0, token);
        for (int g = 0; g < 4; g++) {
            const int32_t kind = ref_below(random, 20);
            const double rise = range[2] * (double)token;
            const double scale = log_uniform(random, range[0] + rise, range[1] + rise);
            put_float(scale_of(record, g), (float)(kind == 0 ? 0.0 : kind == 1 ? -scale : scale));
        }
        if (token % 17 == 0) { // it counts and weighs nothing
            memset(scale_of(record, 0), 0, 16);
        }
    }
}

static void multiply_query(const ref_case* c, int32_t row, int32_t head, double factor) {
    uint8_t* query = query_of(c, row, head);
    for (int d = 0; d < REF_Q; d++) {
        put_bf16(query + 2 * d, ref_bf16_at(query + 2 * d) * factor);
    }
}

static void test_extreme_scales(void) {
    static const double ranges[][3] = {{-60.0, 40.0, 0.0},    {-126.0, -100.0, 0.0},
                                       {-149.0, -126.0, 0.0}, {-3.0, 3.0, 0.0},
                                       {20.0, 60.0, 0.0},     {-60.0, -50.0, 0.0},
                                       {-40.0, -39.0, 0.25}};
    const int32_t lengths[] = {200, 137};
    for (int n = 0; n < COUNT(ranges) * 3 * 2; n++) {
        const double* range = ranges[n % COUNT(ranges)];
        const double top = range[1] + 200 * range[2];
        const double factors[] = {0.0, top > -8.0 ? pow(2.0, -top - 8.0) : 1.0, 1.0};
        ref_random random = {draw()};
        ref_case c = plain_case(9, 256);
        c.shape.rows_per_request = 2;
        c.shape.splits = n / COUNT(ranges) / 3 ? 3 : 1;
        c.shape.partial_type = KMLA_FP32;
        c.out_type = KMLA_FP32;
        c.lengths = lengths;
        build(&c);
        put_extreme_scales(&c, range, &random);
        for (int32_t v = 0; v < 2 * 9; v++) {
            multiply_query(&c, v / 9, v % 9, factors[n / COUNT(ranges) % 3]);
        }
        check_built(&c, "extreme scales");
        ref_free(&c);
    }
}

static void test_query_magnitudes(void) {
    static const double magnitudes[] = {1e-20, 1e20, 1e-3, 1.0, 1e-36, 1e4};
    const int32_t lengths[] = {200, 137};
    for (int n = 0; n < 3 * 2 * 2; n++) {
        ref_case c = plain_case(9, 256);
        c.shape.rows_per_request = 2;
        c.shape.kv_format = n % 3;
        c.shape.mode = n / 3 % 2;
        c.out_type = n / 6;
        c.lengths = lengths;
        build(&c);
        for (int32_t v = 0; v < 2 * 9; v++) {
            multiply_query(&c, v / 9, v % 9, magnitudes[v % COUNT(magnitudes)]);
        }
        check_built(&c, "query magnitudes");
        ref_free(&c);
    }
}

static void test_bf16_magnitudes(void) {
    static const double magnitudes[] = {1e30, 1e-30, 1e6};
    const int32_t lengths[] = {200};
    for (int n = 0; n < COUNT(magnitudes) * 2; n++) {
        const double magnitude = magnitudes[n / 2];
        ref_case c = plain_case(9, 256);
        c.shape.kv_format = KMLA_KV_BF16;
        c.out_type = n % 2;
        c.lengths = lengths;
        build(&c);
        for (int64_t token = 0; token < 200; token++) {
            uint8_t* record = record_of(&c, 0, token);
            for (int d = 0; d < 576; d++) {
                put_bf16(record + 2 * d, ref_bf16_at(record + 2 * d) * magnitude);
            }
        }
        for (int32_t head = 0; head < 9; head++) {
            multiply_query(&c, 0, head, 1.0 / magnitude);
        }
        check_built(&c, "BF16 magnitudes");
        ref_free(&c);
    }
}

// Logits from almost flat to almost one-hot, rising, falling, and late maxima over many chunks.
static void test_logits(void) {
    static const double sigmas[] = {0.01, 0.2, 1.0, 4.0, 12.0, 40.0};
    const int32_t lengths[] = {700};
    for (int n = 0; n < COUNT(sigmas) * 3; n++) {
        ref_case c = plain_case(8, 704);
        c.shape.kv_format = n % 3;
        c.shape.splits = 1 + n % 2 * 3;
        c.shape.partial_type = n / 2 % 2;
        c.out_type = n / 3 % 2;
        c.logit_sigma = sigmas[n / 3];
        c.lengths = lengths;
        check_case(&c, "logit sigma");
    }
    for (int n = 0; n < 3 * 2 * 2; n++) {
        ref_case c = plain_case(8, 704);
        c.shape.kv_format = n % 3;
        c.shape.splits = n / 3 % 2 ? 4 : 1;
        c.shape.partial_type = KMLA_FP32;
        c.out_type = KMLA_FP32;
        c.scale = 1.0f;
        c.logit_sigma = 0.5;
        c.lengths = lengths;
        build(&c);
        for (int32_t head = 0; head < 8; head++) { // rope lane 0 alone makes a slope
            put_bf16(query_of(&c, 0, head) + 1024, head - 4);
        }
        for (int64_t token = 0; token < 700; token++) {
            uint8_t* record = record_of(&c, 0, token);
            const double slope = (n / 6 ? 1.0 : -1.0) * (double)(token - 350) / 8.0;
            if (c.shape.kv_format == KMLA_KV_E4M3) {
                record[512] = ref_to_e4m3(slope * 4.0);
            } else {
                put_bf16(record + (c.shape.kv_format == KMLA_KV_PACKED ? 528 : 1024), slope);
            }
        }
        check_built(&c, "slope");
        ref_free(&c);
    }
}

// A first token that takes most of the weight and has no value ("attention sink"): the output is
// what the many small weights make of the rest.
static void test_sinks(void) {
    static const double nats[] = {3.0, 6.0, 9.0};
    const int32_t lengths[] = {400};
    for (int n = 0; n < COUNT(nats) * 3 * 2; n++) {
        ref_case c = plain_case(8, 400);
        c.shape.kv_format = n % 3;
        c.shape.splits = n / 9 ? 3 : 1;
        c.out_type = n / 3 % 2;
        c.lengths = lengths;
        build(&c);
        const int64_t rope = c.shape.kv_format == KMLA_KV_E4M3     ? 512
                             : c.shape.kv_format == KMLA_KV_PACKED ? 528
                                                                   : 1024;
        for (int64_t token = 0; token < 400; token++) {
            memset(record_of(&c, 0, token) + rope, 0, c.shape.kv_format == KMLA_KV_E4M3 ? 1 : 2);
        }
        put_plain_record(&c, record_of(&c, 0, 0), 0.0, 1.0);
        for (int32_t head = 0; head < 8; head++) {
            const double rope_scale = c.shape.kv_format == KMLA_KV_E4M3 ? c.args.kv_scale : 1.0;
            put_bf16(query_of(&c, 0, head) + 1024, nats[n % 9 / 3] / (REF_K3_SCALE * rope_scale));
        }
        check_built(&c, "sink");
        ref_free(&c);
    }
}

// =============================================================================
// Pages: PG
// =============================================================================

// Writes two pages' tokens by the device into high pages of a sparse pool, and reads them there.
// Both are to have the bytes and bits of the same in low pages.
static void check_high_pages(int32_t format, int32_t first_page, int32_t second_page, int poison,
                             int32_t slots_from) {
    const int32_t lengths[] = {100, 99};
    const int64_t record = ref_record_bytes(ref_kv_layout(format));
    const int64_t page = 64 * record;
    const int32_t high[] = {first_page, second_page};
    ref_case c = plain_case(9, 128);
    loaded l;
    c.shape.rows_per_request = slots_from ? 1 : 2;
    c.shape.kv_format = format;
    c.shape.slot_list = slots_from != 0;
    c.shape.splits = 2;
    c.lengths = lengths;
    build(&c);
    check_built(&c, "low pages");
    const bits low = bits_of(&c);
    load(&c, &l);
    sparse_pool pool = sparse_reserve((size_t)(second_page + 1) * (size_t)page);
    if (pool.address == 0) {
        skip("no address space can be reserved here");
    } else {
        int32_t* entries = (int32_t*)(void*)c.table.data;
        ref_buffer low_table = ref_buffer_make(c.table.bytes, 0);
        ref_case low_case = c; // finds the low records when the table names high ones
        memcpy(low_table.data, c.table.data, c.table.bytes);
        low_case.table = low_table;
        for (int i = 0; i < 2; i++) {
            sparse_touch(&pool, (size_t)high[i] * (size_t)page, 0xff);
            sparse_touch(&pool, (size_t)high[i] * (size_t)page + (size_t)page - 1, 0xff);
        }
        if (poison) { // where an address of 32 bits would end up
            sparse_touch(&pool, 0, 0xff);
        }
        for (int64_t token = 0; token < 100; token++) {
            const int64_t slot =
                slots_from ? slots_from + token : high[token / 64] * (int64_t)64 + token % 64;
            copy_to_device(pool.address + (uint64_t)(slot * record), record_of(&low_case, 0, token),
                           (size_t)record);
            if (slots_from) {
                entries[token] = (int32_t)slot;
            } else {
                entries[token / 64] = (int32_t)(slot / 64);
            }
        }
        copy_to_device(l.table.address, entries, c.table.bytes);
        l.args.kv = pool.address;
        l.args.kv_pages = (uint64_t)second_page + 1;
        l.args.page_pitch_bytes = 0;
        launch(&c, &l, "high pages");
        expect(same_bits(&low, &c), "format %d, pages %d and %d: other bits than low pages", format,
               first_page, second_page);
        ref_buffer_free(&low_table);
    }
    sparse_free(&pool);
    free(low.data);
    unload(&l);
    ref_free(&c);
}

// The writer's records in high slots are those that the host writes into low ones.
static void check_high_slots(int32_t format, int64_t first_slot, int32_t count) {
    const int64_t record = ref_record_bytes(ref_kv_layout(format));
    const int64_t last = first_slot + count - 1;
    ref_random random = {draw()};
    float* source = (float*)malloc((size_t)count * REF_Q * sizeof(float));
    int64_t* slots = (int64_t*)malloc((size_t)count * sizeof(int64_t));
    ref_buffer right = ref_buffer_make((size_t)(count * record), 0xff);
    uint8_t* got = (uint8_t*)malloc((size_t)(count * record));
    sparse_pool pool = sparse_reserve((size_t)((last / 64 + 1) * 64 * record));
    kmla_kv_write write;
    kmla_error error;
    for (int64_t i = 0; i < (int64_t)count * REF_Q; i++) {
        source[i] = (float)ref_normal(&random);
    }
    memset(&write, 0, sizeof write);
    write.tokens = count;
    write.kv_format = format;
    write.source_type = KMLA_FP32;
    write.kv_scale = 0.0137f;
    write.latent_stride = REF_Q;
    write.rope_stride = REF_Q;
    write.latent = (uint64_t)(uintptr_t)source;
    write.rope = (uint64_t)(uintptr_t)(source + REF_D);
    write.slots = (uint64_t)(uintptr_t)slots;
    write.kv = ref_address(&right);
    write.kv_pages = (uint64_t)count;
    write.page_tokens = 1;
    for (int32_t i = 0; i < count; i++) {
        slots[i] = i;
    }
    kmla_host_write_kv(&write, NULL);
    if (pool.address == 0) {
        skip("no address space can be reserved here");
    } else {
        for (int32_t i = 0; i < count; i++) {
            slots[i] = first_slot + i;
            sparse_touch(&pool, (size_t)(slots[i] * record), 0xff);
            sparse_touch(&pool, (size_t)(slots[i] * record + record - 1), 0xff);
        }
        device_buffer values = device_copy(source, (size_t)count * REF_Q * sizeof(float));
        device_buffer list = device_copy(slots, (size_t)count * sizeof(int64_t));
        prepare(NULL);
        write.latent = values.address;
        write.rope = values.address + REF_D * sizeof(float);
        write.slots = list.address;
        write.kv = pool.address;
        write.kv_pages = (uint64_t)(last / 64 + 1);
        write.page_tokens = 64;
        if (call_write_kv(&write, &error) != KMLA_OK) {
            fail("%s", error.message);
        }
        copy_to_host(got, pool.address + (uint64_t)(first_slot * record), (size_t)(count * record));
        expect(memcmp(got, right.data, (size_t)(count * record)) == 0,
               "format %d, slots from %lld: other bytes than in low slots", format,
               (long long)first_slot);
        device_free(&values);
        device_free(&list);
    }
    sparse_free(&pool);
    free(got);
    free(slots);
    free(source);
    ref_buffer_free(&right);
}

static void test_pg_01(void) {
    static const int64_t limits[] = {(int64_t)1 << 31, (int64_t)1 << 32};
    check_high_pages(KMLA_KV_PACKED, 51150, 51151, 0, 0); // the limit of 2^31 bytes is between
    check_high_pages(KMLA_KV_PACKED, 51189, 51190, 0, 0);
    check_high_pages(KMLA_KV_PACKED, 51149, 51151, 0, 3273560); // slots over the limit
    check_high_slots(KMLA_KV_PACKED, 3273600, 8);
    check_high_slots(KMLA_KV_PACKED, 3276288, 4); // byte 2,149,244,928
    for (int f = 0; f < COUNT(kv_formats); f++) {
        const int64_t record = ref_record_bytes(ref_kv_layout(kv_formats[f]));
        for (int i = 0; i < COUNT(limits); i++) {
            const int32_t page = (int32_t)(limits[i] / (64 * record));
            check_high_pages(kv_formats[f], page, page + 1, 0, 0);
            check_high_slots(kv_formats[f], limits[i] / record - 3, 8);
        }
    }
}

static void test_pg_02(void) {
    check_high_pages(KMLA_KV_PACKED, 102300, 102301, 1, 0);
    check_high_pages(KMLA_KV_E4M3, 116508, 116509, 1, 0);
    check_high_pages(KMLA_KV_BF16, 58254, 58255, 1, 0);
}

// Slots that hold no token have no influence, and neither have gaps behind pages.
static void test_pg_04_and_06(void) {
    for (int n = 0; n < 3 * 2 * 2; n++) {
        bits first = {NULL, 0, 0};
        const int small = n / 3 % 2 == 0;
        const int32_t lengths[] = {small ? 13 : 100};
        const uint64_t seed = draw();
        for (int fill = 0; fill < 2; fill++) {
            ref_case c = plain_case(5, 128);
            const int64_t page = 64 * ref_record_bytes(ref_kv_layout(n % 3));
            c.shape.kv_format = n % 3;
            c.shape.page_tokens = small ? 4 : 64;
            c.shape.splits = 1 + n / 6;
            c.pitch_extra_bytes = small ? 0 : n % 3 == KMLA_KV_PACKED ? 45056 - page : 3072;
            c.unused_fill = fill ? 0xff : 1; // NaN, or tiny codes; the bits of neither count
            c.seed = seed;
            c.lengths = lengths;
            build(&c);
            if (!small && c.shape.kv_format == KMLA_KV_PACKED) {
                expect(c.args.page_pitch_bytes == 45056, "pitch");
            }
            check_built(&c, "unused slots");
            if (fill == 0) {
                first = bits_of(&c);
            } else {
                expect(same_bits(&first, &c), "NaN in unused slots or gaps shows; %s",
                       describe(&c));
            }
            ref_free(&c);
        }
        free(first.data);
    }
}

// =============================================================================
// Writers: byte for byte the host's
// =============================================================================

enum { SOURCE_NORMAL, SOURCE_TIES, SOURCE_BITS, SOURCE_EDGES, SOURCE_KINDS };

// One source element: normal numbers; halfway between codes, and a bit beside; any bits at all;
// the ends of every range.
static float source_value(ref_random* random, int kind) {
    static const float edges[] = {
        0.0f,           -0.0f,    448.0f,    -448.0f, 464.0f,        1e-4f,
        5e-5f,          1e-38f,   1e-45f,    -1e-42f, 3.4028235e38f, -3.4028235e38f,
        1.1754944e-38f, INFINITY, -INFINITY, NAN,     0.0009765625f, 1e30f};
    if (kind == SOURCE_NORMAL) {
        return (float)ref_normal(random);
    }
    if (kind == SOURCE_EDGES) {
        return edges[ref_below(random, COUNT(edges))];
    }
    if (kind == SOURCE_TIES) {
        const uint8_t code = (uint8_t)ref_below(random, 0x7e);
        float tie = (float)((ref_e4m3(code) + ref_e4m3((uint8_t)(code + 1))) / 2.0);
        uint32_t bits32;
        memcpy(&bits32, &tie, 4);
        bits32 += (uint32_t)ref_below(random, 3) - 1u; // a bit below, on it, above
        bits32 |= ref_below(random, 2) ? 0x80000000u : 0;
        memcpy(&tie, &bits32, 4);
        return tie;
    }
    const uint32_t any = (uint32_t)ref_next(random);
    float value;
    memcpy(&value, &any, 4);
    return value;
}

static ref_buffer make_source(int64_t count, int32_t type, int kind, uint64_t seed) {
    ref_random random = {seed};
    ref_buffer source = ref_buffer_make((size_t)count * (type == KMLA_FP32 ? 4 : 2), 0);
    for (int64_t i = 0; i < count; i++) {
        const float value = source_value(&random, kind);
        if (type == KMLA_BF16 && kind == SOURCE_BITS) { // NaN payloads too
            const uint16_t any = (uint16_t)ref_next(&random);
            memcpy(source.data + i * 2, &any, 2);
        } else {
            put_element(&source, type, i, value);
        }
        if (kind == SOURCE_TIES && i % 128 == 0) {
            put_element(&source, type, i, 448.0f); // scale 1: ties stay ties
        }
    }
    return source;
}

static void report_difference(const char* what, const uint8_t* got, const uint8_t* right,
                              size_t bytes, size_t record) {
    for (size_t i = 0; i < bytes; i++) {
        if (got[i] != right[i]) {
            expect(0, "%s: record %zu byte %zu is %02x, the host's %02x", what, i / record,
                   i % record, got[i], right[i]);
            return;
        }
    }
    expect(1, "%s", what);
}

static void check_kv_writer(int32_t format, int32_t type, int32_t rule, int kind, int strided) {
    enum { TOKENS = 37 };
    static const int64_t odd_slots[] = {
        -1, INT64_MIN, 1000000, INT64_MAX, (int64_t)1 << 32, -((int64_t)1 << 32), 160};
    const int32_t page = strided ? 5 : 64;
    const int32_t pages = strided ? 32 : 3; // 160 slots, 192 slots
    const size_t record = (size_t)ref_record_bytes(ref_kv_layout(format));
    const uint64_t pitch = (uint64_t)page * record + (strided ? 32 : 0);
    const int64_t latent_stride = strided ? 528 : 512, rope_stride = strided ? 80 : 64;
    ref_buffer latent = make_source(TOKENS * latent_stride, type, kind, draw());
    ref_buffer rope = make_source(TOKENS * rope_stride, type, kind, draw());
    ref_buffer right = ref_buffer_make((size_t)pages * pitch, 0xff);
    ref_buffer got = ref_buffer_make((size_t)pages * pitch, 0xff);
    ref_random random = {draw()};
    int64_t* slots = ref_shuffled(&random, (int64_t)page * pages);
    kmla_kv_write write;
    kmla_error error;
    char what[160];
    for (int i = 0; strided && i < COUNT(odd_slots); i++) {
        slots[3 * i] = odd_slots[i];
    }
    memset(&write, 0, sizeof write);
    write.tokens = TOKENS;
    write.kv_format = format;
    write.source_type = type;
    write.scale_rule = rule;
    write.kv_scale = 0.02317f;
    write.page_tokens = page;
    write.latent_stride = strided ? latent_stride : 0;
    write.rope_stride = strided ? rope_stride : 0;
    write.page_pitch_bytes = strided ? pitch : 0;
    write.kv_pages = (uint64_t)pages;
    write.latent = ref_address(&latent);
    write.rope = ref_address(&rope);
    write.slots = (uint64_t)(uintptr_t)slots;
    write.kv = ref_address(&right);
    if (kmla_host_write_kv(&write, &error) != KMLA_OK) {
        fail("%s", error.message);
    }
    device_buffer d_latent = device_copy(latent.data, latent.bytes);
    device_buffer d_rope = device_copy(rope.data, rope.bytes);
    device_buffer d_slots = device_copy(slots, TOKENS * sizeof(int64_t));
    device_buffer d_kv = device_make(right.bytes, 0xff);
    write.latent = d_latent.address;
    write.rope = d_rope.address;
    write.slots = d_slots.address;
    write.kv = d_kv.address;
    prepare(NULL);
    if (call_write_kv(&write, &error) != KMLA_OK) {
        fail("%s", error.message);
    }
    copy_to_host(got.data, d_kv.address, got.bytes);
    snprintf(what, sizeof what, "kv format %d from type %d, rule %d, source %d, %s", format, type,
             rule, kind, strided ? "strided" : "dense");
    report_difference(what, got.data, right.data, got.bytes, record);
    expect(device_canaries_whole(&d_kv), "%s: canary hurt", what);
    device_free(&d_latent);
    device_free(&d_rope);
    device_free(&d_slots);
    device_free(&d_kv);
    ref_buffer_free(&latent);
    ref_buffer_free(&rope);
    ref_buffer_free(&right);
    ref_buffer_free(&got);
    free(slots);
}

static void test_kv_writer(void) {
    for (int n = 0; n < 3 * 2 * 2 * SOURCE_KINDS * 2; n++) {
        check_kv_writer(n % 3, n / 3 % 2, n / 6 % 2, n / 12 % SOURCE_KINDS, n / 12 / SOURCE_KINDS);
    }
}

static void check_query_writer(int32_t format, int32_t type, int kind, int strided) {
    enum { ROWS = 3, HEADS = 7 };
    const int64_t record = ref_record_bytes(ref_query_layout(format));
    const int64_t source_head = strided ? 592 : 576, source_row = strided ? 592 * 9 : 576 * HEADS;
    const int64_t head = strided ? record + 16 : record, row = strided ? head * 8 : head * HEADS;
    ref_buffer source = make_source(ROWS * source_row, type, kind, draw());
    ref_buffer right = ref_buffer_make((size_t)(ROWS * row), 0xff);
    ref_buffer got = ref_buffer_make((size_t)(ROWS * row), 0xff);
    kmla_query_write write;
    kmla_error error;
    char what[160];
    memset(&write, 0, sizeof write);
    write.rows = ROWS;
    write.heads = HEADS;
    write.query_format = format;
    write.source_type = type;
    write.query_scale = 0.0073f;
    write.source_row_stride = strided ? source_row : 0;
    write.source_head_stride = strided ? source_head : 0;
    write.query_row_stride_bytes = strided ? row : 0;
    write.query_head_stride_bytes = strided ? head : 0;
    write.source = ref_address(&source);
    write.query = ref_address(&right);
    if (kmla_host_write_query(&write, &error) != KMLA_OK) {
        fail("%s", error.message);
    }
    device_buffer d_source = device_copy(source.data, source.bytes);
    device_buffer d_query = device_make(right.bytes, 0xff);
    write.source = d_source.address;
    write.query = d_query.address;
    prepare(NULL);
    if (call_write_query(&write, &error) != KMLA_OK) {
        fail("%s", error.message);
    }
    copy_to_host(got.data, d_query.address, got.bytes);
    snprintf(what, sizeof what, "query format %d from type %d, source %d, %s", format, type, kind,
             strided ? "strided" : "dense");
    report_difference(what, got.data, right.data, got.bytes, (size_t)head);
    expect(device_canaries_whole(&d_query), "%s: canary hurt", what);
    device_free(&d_source);
    device_free(&d_query);
    ref_buffer_free(&source);
    ref_buffer_free(&right);
    ref_buffer_free(&got);
}

static void test_query_writer(void) {
    for (int n = 0; n < 3 * 2 * SOURCE_KINDS * 2; n++) {
        check_query_writer(n % 3, n / 3 % 2, n / 6 % SOURCE_KINDS, n / 6 / SOURCE_KINDS);
    }
}

// The vectors of the specification, on whatever writes here.
static void test_query_scale_vectors(void) {
    static const float amax[] = {336.0f, 224.0f, 5e-5f};
    static const float scales[] = {1.0f, 0.5f, 1.0f / 8192.0f};
    static const uint8_t codes[] = {0x7a, 0x7e, 0x2d}; // 336 ties to 320
    for (int i = 0; i < COUNT(amax); i++) {
        float source[576] = {0};
        uint8_t record[656];
        kmla_query_write write;
        kmla_error error;
        for (int g = 0; g < 4; g++) {
            source[128 * g + 31 * g] = amax[i];
        }
        device_buffer from = device_copy(source, sizeof source), to = device_make(656, 0xff);
        memset(&write, 0, sizeof write);
        write.rows = 1;
        write.heads = 1;
        write.query_format = KMLA_QUERY_PACKED;
        write.source_type = KMLA_FP32;
        write.source = from.address;
        write.query = to.address;
        prepare(NULL);
        if (call_write_query(&write, &error) != KMLA_OK) {
            fail("%s", error.message);
        }
        copy_to_host(record, to.address, sizeof record);
        for (int g = 0; g < 4; g++) {
            const double scale = ref_float_at(scale_of(record, g));
            expect(scale == scales[i], "amax %g: scale %g, not %g", amax[i], scale, scales[i]);
            expect(record[128 * g + 31 * g] == codes[i], "amax %g: code %02x, not %02x", amax[i],
                   record[128 * g + 31 * g], codes[i]);
        }
        device_free(&from);
        device_free(&to);
    }
}

// =============================================================================
// Bad arguments, and the checking mode
// =============================================================================

// A call that is to fail: the status, a message that names the argument, outputs still NaN.
static void expect_refusal(kmla_status status, kmla_status wanted, const kmla_error* error,
                           const char* names, const device_buffer* out) {
    expect(status == wanted, "%s: %s, not %s", names, kmla_status_name(status),
           kmla_status_name(wanted));
    expect(status == KMLA_OK || strstr(error->message, names) != NULL, "\"%s\" does not name %s",
           error->message, names);
    expect(device_all_bytes(out->address, out->bytes, 0xff), "%s: outputs were written", names);
}

#define REFUSED_DECODE(field, value, wanted)                                                       \
    do {                                                                                           \
        kmla_decode args = l.args;                                                                 \
        args.field = value;                                                                        \
        const kmla_status status = call_decode(&c.plan, &args, &error);                            \
        expect_refusal(status, wanted, &error, #field, &l.out);                                    \
    } while (0)

#define REFUSED_PLAN(field, value)                                                                 \
    do {                                                                                           \
        kmla_plan plan = c.plan;                                                                   \
        plan.field = value;                                                                        \
        const kmla_status status = call_decode(&plan, &l.args, &error);                            \
        expect(status == KMLA_ERROR_ARGUMENT, "plan." #field ": %s", kmla_status_name(status));    \
        expect(device_all_bytes(l.out.address, l.out.bytes, 0xff), #field ": written");            \
    } while (0)

static void test_bad_decode(void) {
    const int32_t lengths[] = {100, 90};
    ref_case c = plain_case(5, 128);
    loaded l;
    kmla_error error;
    c.shape.rows_per_request = 2;
    c.shape.kv_format = KMLA_KV_E4M3;
    c.shape.query_format = KMLA_QUERY_E4M3;
    c.shape.splits = 2;
    c.lengths = lengths;
    build(&c);
    load(&c, &l);
    prepare(&c.plan);
    REFUSED_DECODE(query, 0, KMLA_ERROR_ARGUMENT);
    REFUSED_DECODE(query, l.args.query + 8, KMLA_ERROR_ARGUMENT);
    REFUSED_DECODE(kv, 0, KMLA_ERROR_ARGUMENT);
    REFUSED_DECODE(kv, l.args.kv + 4, KMLA_ERROR_ARGUMENT);
    REFUSED_DECODE(kv_pages, 0, KMLA_ERROR_ARGUMENT);
    REFUSED_DECODE(page_pitch_bytes, l.args.page_pitch_bytes + 8, KMLA_ERROR_ARGUMENT);
    REFUSED_DECODE(page_pitch_bytes, l.args.page_pitch_bytes - 16, KMLA_ERROR_ARGUMENT);
    REFUSED_DECODE(scale, 0.0f, KMLA_ERROR_ARGUMENT);
    REFUSED_DECODE(scale, -1.0f, KMLA_ERROR_ARGUMENT);
    REFUSED_DECODE(scale, NAN, KMLA_ERROR_ARGUMENT);
    REFUSED_DECODE(scale, INFINITY, KMLA_ERROR_ARGUMENT);
    REFUSED_DECODE(kv_scale, 0.0f, KMLA_ERROR_ARGUMENT);
    REFUSED_DECODE(kv_scale, NAN, KMLA_ERROR_ARGUMENT);
    REFUSED_DECODE(query_scale, 0.0f, KMLA_ERROR_ARGUMENT);
    REFUSED_DECODE(query_scale, INFINITY, KMLA_ERROR_ARGUMENT);
    REFUSED_DECODE(block_table, 0, KMLA_ERROR_ARGUMENT);
    REFUSED_DECODE(block_table, l.args.block_table + 2, KMLA_ERROR_ARGUMENT);
    REFUSED_DECODE(block_table_width, 1, KMLA_ERROR_ARGUMENT);
    REFUSED_DECODE(block_table_stride, -1, KMLA_ERROR_ARGUMENT);
    REFUSED_DECODE(slot_list, l.args.block_table, KMLA_ERROR_ARGUMENT);
    REFUSED_DECODE(row_offsets, l.args.lengths, KMLA_ERROR_ARGUMENT);
    REFUSED_DECODE(lengths, 0, KMLA_ERROR_ARGUMENT);
    REFUSED_DECODE(lengths, l.args.lengths + 1, KMLA_ERROR_ARGUMENT);
    REFUSED_DECODE(out, 0, KMLA_ERROR_ARGUMENT);
    REFUSED_DECODE(out, l.args.out + 2, KMLA_ERROR_ARGUMENT);
    REFUSED_DECODE(out_type, 2, KMLA_ERROR_ARGUMENT);
    REFUSED_DECODE(out_head_stride, 511, KMLA_ERROR_ARGUMENT);
    REFUSED_DECODE(out_row_stride, 512, KMLA_ERROR_ARGUMENT);
    REFUSED_DECODE(lse, l.args.lse + 2, KMLA_ERROR_ARGUMENT);
    REFUSED_DECODE(lse_row_stride, 1, KMLA_ERROR_ARGUMENT);
    REFUSED_DECODE(query_head_stride_bytes, 577, KMLA_ERROR_ARGUMENT);
    REFUSED_DECODE(query_row_stride_bytes, -16, KMLA_ERROR_ARGUMENT);
    REFUSED_DECODE(check_pages, 2, KMLA_ERROR_ARGUMENT);
    REFUSED_DECODE(workspace, 0, KMLA_ERROR_WORKSPACE);
    REFUSED_DECODE(workspace, l.args.workspace + 8, KMLA_ERROR_ARGUMENT);
    REFUSED_DECODE(workspace_bytes, l.args.workspace_bytes - 1, KMLA_ERROR_WORKSPACE);
    REFUSED_PLAN(version, 0);
    REFUSED_PLAN(reader, 3);
    REFUSED_PLAN(shape.heads, 0);
    REFUSED_PLAN(shape.rows, 0);
    REFUSED_PLAN(shape.kv_format, 3);
    REFUSED_PLAN(splits, 0);
    if (!on_host()) {
        kmla_gpu* gpu = backend.gpu;
        expect(kmla_gpu_decode(gpu, NULL, &l.args, NULL, &error) == KMLA_ERROR_ARGUMENT, "no plan");
        expect(kmla_gpu_decode(gpu, &c.plan, NULL, NULL, &error) == KMLA_ERROR_ARGUMENT, "no args");
        expect(kmla_gpu_decode(NULL, &c.plan, &l.args, NULL, &error) == KMLA_ERROR_ARGUMENT,
               "no gpu");
    }
    launch(&c, &l, "good arguments"); // nothing of the above stuck
    answer right = answer_of(&c);
    judge(&c, &right, "good arguments");
    answer_free(&right);
    unload(&l);
    ref_free(&c);
}

#define REFUSED(call, type, good, field, value)                                                    \
    do {                                                                                           \
        type args = good;                                                                          \
        args.field = value;                                                                        \
        const kmla_status status = call(&args, &error);                                            \
        expect_refusal(status, KMLA_ERROR_ARGUMENT, &error, #field, &out);                         \
    } while (0)

static void test_bad_combine(void) {
    device_buffer parts = device_make(2 * 3 * REF_D * 4, 0), part_lse = device_make(2 * 3 * 4, 0);
    device_buffer out = device_make(3 * REF_D * 4, 0xff), lse = device_make(3 * 4, 0xff);
    kmla_combine good;
    kmla_error error;
    prepare(NULL);
    memset(&good, 0, sizeof good);
    good.parts = 2;
    good.rows = 1;
    good.heads = 3;
    good.part_type = KMLA_FP32;
    good.out_type = KMLA_FP32;
    good.part_out = parts.address;
    good.part_lse = part_lse.address;
    good.out = out.address;
    good.lse = lse.address;
#define BAD(field, value) REFUSED(call_combine, kmla_combine, good, field, value)
    BAD(parts, 0);
    BAD(parts, 1025);
    BAD(rows, 0);
    BAD(heads, 0);
    BAD(part_type, 2);
    BAD(out_type, -1);
    BAD(part_out, 0);
    BAD(part_out, parts.address + 4);
    BAD(part_lse, 0);
    BAD(part_lse, part_lse.address + 1);
    BAD(out, 0);
    BAD(out, out.address + 8);
    BAD(lse, lse.address + 2);
    BAD(part_head_stride, 513);
    BAD(part_row_stride, -512);
    BAD(out_head_stride, 256);
#undef BAD
    device_free(&parts);
    device_free(&part_lse);
    device_free(&out);
    device_free(&lse);
}

static void test_bad_writes(void) {
    device_buffer source = device_make(2 * 576 * 4, 0), slots = device_make(16, 0);
    device_buffer out = device_make(2 * 656, 0xff);
    kmla_kv_write kv;
    kmla_query_write query;
    kmla_error error;
    prepare(NULL);
    memset(&kv, 0, sizeof kv);
    kv.tokens = 2;
    kv.kv_format = KMLA_KV_E4M3;
    kv.source_type = KMLA_FP32;
    kv.kv_scale = 1.0f;
    kv.page_tokens = 1;
    kv.latent = source.address;
    kv.rope = source.address + 2048;
    kv.slots = slots.address;
    kv.kv = out.address;
    kv.kv_pages = 2;
#define BAD(field, value) REFUSED(call_write_kv, kmla_kv_write, kv, field, value)
    BAD(tokens, 0);
    BAD(kv_format, 3);
    BAD(source_type, 2);
    BAD(scale_rule, 2);
    BAD(kv_scale, 0.0f);
    BAD(kv_scale, NAN);
    BAD(page_tokens, -1);
    BAD(latent, 0);
    BAD(latent, source.address + 4);
    BAD(latent_stride, 514);
    BAD(rope, 0);
    BAD(slots, 0);
    BAD(slots, slots.address + 4);
    BAD(kv, out.address + 8);
    BAD(kv_pages, 0);
    BAD(page_pitch_bytes, 560);
#undef BAD
    memset(&query, 0, sizeof query);
    query.rows = 1;
    query.heads = 2;
    query.query_format = KMLA_QUERY_E4M3;
    query.source_type = KMLA_FP32;
    query.query_scale = 1.0f;
    query.source = source.address;
    query.query = out.address;
#define BAD(field, value) REFUSED(call_write_query, kmla_query_write, query, field, value)
    BAD(rows, 0);
    BAD(heads, 0);
    BAD(query_format, 3);
    BAD(source_type, -1);
    BAD(query_scale, -1.0f);
    BAD(source, 0);
    BAD(source, source.address + 4);
    BAD(query, 0);
    BAD(query, out.address + 4);
    BAD(source_head_stride, 577);
    BAD(query_head_stride_bytes, 560);
#undef BAD
    device_free(&source);
    device_free(&slots);
    device_free(&out);
}

static void test_checking_mode(void) {
    const int32_t lengths[] = {100, 30, 100, 0};
    for (int n = 0; n < 4; n++) {
        ref_case c = plain_case(3, 128);
        loaded l;
        kmla_error error;
        c.shape.requests = 2;
        c.shape.rows_per_request = 2;
        c.shape.page_tokens = 16;
        c.shape.slot_list = n % 2;
        c.lengths = lengths;
        build(&c);
        load(&c, &l);
        prepare(&c.plan);
        l.args.check_pages = 1;
        launch(&c, &l, "good tables, checked");
        int32_t* entries = (int32_t*)(void*)c.table.data;
        const int64_t tables_entry =
            n % 2 ? 2 * c.args.slot_list_width + 99 : 1 * c.args.block_table_width + 99 / 16;
        const int32_t most = n % 2 ? (int32_t)c.args.kv_pages * 16 : (int32_t)c.args.kv_pages;
        entries[tables_entry] = n / 2 ? -2 : most; // one below the least, one past the last
        copy_to_device(l.table.address, entries, c.table.bytes);
        fill_device(l.out.address, 0xff, l.out.bytes);
        const kmla_status status = call_decode(&c.plan, &l.args, &error);
        expect(status == KMLA_ERROR_PAGE, "%s: %s", n % 2 ? "slot" : "page",
               kmla_status_name(status));
        expect(strstr(error.message, n % 2 ? "token 99" : "token 96") != NULL, "\"%s\"",
               error.message);
        expect(device_all_bytes(l.out.address, l.out.bytes, 0xff), "outputs were written");
        unload(&l);
        ref_free(&c);
    }
}

// =============================================================================
// Streams and graphs: CG
// =============================================================================

static kmla_status launch_only(const ref_case* c, const loaded* l, kmla_error* error) {
    return kmla_gpu_decode(backend.gpu, &c->plan, &l->args, backend.stream, error);
}

static void graph_case(ref_case* c, const int32_t* lengths, int32_t kv_format, int32_t splits) {
    *c = plain_case(6, 256);
    c->shape.rows_per_request = 2;
    c->shape.kv_format = kv_format;
    c->shape.splits = splits;
    c->lengths = lengths;
    build(c);
}

// An object in which only the support kernels are prepared.
static kmla_gpu* open_unprepared(void) {
    kmla_gpu_desc desc;
    kmla_gpu* gpu = NULL;
    kmla_error error;
    memset(&desc, 0, sizeof desc);
    desc.cuda_path = backend.library;
    desc.nvrtc_path = backend.library;
    if (kmla_gpu_open(&desc, &gpu, &error) != KMLA_OK) {
        backend_stop("%s", error.message);
    }
    return gpu;
}

static void test_cg_05(void) {
    const int32_t lengths[] = {200, 100};
    ref_case c;
    loaded l;
    kmla_error error;
    void *graph = NULL, *executable = NULL;
    int state = 0;
    if (on_host()) {
        skip("the host reader needs no preparation");
        return;
    }
    graph_case(&c, lengths, KMLA_KV_PACKED, 2);
    load(&c, &l);
    prepare(&c.plan);
    kmla_gpu* gpu = open_unprepared();
    const int graphs = backend.driver.capture_begin != NULL;
    if (graphs) {
        driver_check(backend.driver.capture_begin(backend.stream, CUDA_CAPTURE_GLOBAL),
                     "cuStreamBeginCapture");
    }
    kmla_status status = kmla_gpu_decode(gpu, &c.plan, &l.args, backend.stream, &error);
    expect(status == KMLA_ERROR_NOT_PREPARED, "nothing prepared: %s", kmla_status_name(status));
    if (graphs) {
        driver_check(backend.driver.capture_status(backend.stream, &state), "cuStreamIsCapturing");
        expect(state == CUDA_CAPTURE_ACTIVE, "capture is %d, not active", state);
        expect(launch_only(&c, &l, &error) == KMLA_OK, "%s", error.message);
        driver_check(backend.driver.capture_end(backend.stream, &graph), "cuStreamEndCapture");
    }
    // The other way to forget: another plan was prepared.
    status = kmla_gpu_prepare(gpu, NULL, NULL, &error);
    expect(status == KMLA_OK, "%s", error.message);
    status = kmla_gpu_decode(gpu, &c.plan, &l.args, backend.stream, &error);
    expect(status == KMLA_ERROR_NOT_PREPARED, "no reader prepared: %s", kmla_status_name(status));
    synchronize();
    expect(device_all_bytes(l.out.address, l.out.bytes, 0xff), "outputs were written");
    if (graphs) {
        driver_check(backend.driver.graph_instantiate(&executable, graph, 0), "cuGraphInstantiate");
        driver_check(backend.driver.graph_launch(executable, backend.stream), "cuGraphLaunch");
        synchronize();
        copy_to_host(c.out.data, l.out.address, l.out.bytes);
        copy_to_host(c.lse.data, l.lse.address, l.lse.bytes);
        answer right = answer_of(&c);
        judge(&c, &right, "captured after the error");
        answer_free(&right);
        driver_check(backend.driver.graph_exec_destroy(executable), "cuGraphExecDestroy");
        driver_check(backend.driver.graph_destroy(graph), "cuGraphDestroy");
    }
    kmla_gpu_close(gpu);
    unload(&l);
    ref_free(&c);
}

static void* capture_decode(const ref_case* c, const loaded* l) {
    void *graph = NULL, *executable = NULL;
    kmla_error error;
    driver_check(backend.driver.capture_begin(backend.stream, CUDA_CAPTURE_GLOBAL),
                 "cuStreamBeginCapture");
    expect(launch_only(c, l, &error) == KMLA_OK, "%s", error.message);
    driver_check(backend.driver.capture_end(backend.stream, &graph), "cuStreamEndCapture");
    driver_check(backend.driver.graph_instantiate(&executable, graph, 0), "cuGraphInstantiate");
    driver_check(backend.driver.graph_destroy(graph), "cuGraphDestroy");
    return executable;
}

// Two graphs of different shapes, replayed in turn, then eager: the same bits each time. Lengths
// are read when a graph runs.
static void test_cg_03(void) {
    static const int32_t lengths[][2] = {{200, 100}, {256, 0}};
    ref_case c[2];
    loaded l[2];
    bits first[2];
    void* graphs[2];
    size_t free_before = 0, free_after = 0, total;
    if (backend.kind == BACKEND_HOST || backend.driver.capture_begin == NULL) {
        skip("no graphs here");
        return;
    }
    for (int i = 0; i < 2; i++) {
        graph_case(&c[i], lengths[i], i, 2 + 2 * i);
        load(&c[i], &l[i]);
        prepare(&c[i].plan); // and no launch before the capture: the first use is captured
        graphs[i] = capture_decode(&c[i], &l[i]);
    }
    for (int run = 0; run < pick(20, 200); run++) {
        const int i = run % 2;
        fill_device(l[i].out.address, 0xff, l[i].out.bytes);
        fill_device(l[i].workspace.address, 0xff, l[i].workspace.bytes);
        driver_check(backend.driver.graph_launch(graphs[i], backend.stream), "cuGraphLaunch");
        synchronize();
        copy_to_host(c[i].out.data, l[i].out.address, l[i].out.bytes);
        copy_to_host(c[i].lse.data, l[i].lse.address, l[i].lse.bytes);
        if (run < 2) {
            answer right = answer_of(&c[i]);
            judge(&c[i], &right, "graph");
            answer_free(&right);
            first[i] = bits_of(&c[i]);
        }
        expect(same_bits(&first[i], &c[i]), "replay %d has other bits", run);
    }
    for (int i = 0; i < 2; i++) {
        kmla_error error;
        launch(&c[i], &l[i], "eager");
        expect(same_bits(&first[i], &c[i]), "eager has other bits than the graph");
        if (backend.driver.memory_info != NULL) {
            driver_check(backend.driver.memory_info(&free_before, &total), "cuMemGetInfo");
        }
        for (int run = 0; run < pick(5, 50); run++) {
            expect(launch_only(&c[i], &l[i], &error) == KMLA_OK, "%s", error.message);
        }
        synchronize();
        if (backend.driver.memory_info != NULL) {
            driver_check(backend.driver.memory_info(&free_after, &total), "cuMemGetInfo");
            expect(free_after >= free_before, "launches took %zu bytes", free_before - free_after);
        }
        // Fewer live rows than captured.
        const int32_t dead[] = {17, -1};
        memcpy(c[i].length_buffer.data, dead, sizeof dead);
        c[i].lengths = dead;
        copy_to_device(l[i].lengths.address, dead, sizeof dead);
        driver_check(backend.driver.graph_launch(graphs[i], backend.stream), "cuGraphLaunch");
        synchronize();
        copy_to_host(c[i].out.data, l[i].out.address, l[i].out.bytes);
        copy_to_host(c[i].lse.data, l[i].lse.address, l[i].lse.bytes);
        answer right = answer_of(&c[i]);
        judge(&c[i], &right, "graph with other lengths");
        answer_free(&right);
        driver_check(backend.driver.graph_exec_destroy(graphs[i]), "cuGraphExecDestroy");
        free(first[i].data);
        unload(&l[i]);
        ref_free(&c[i]);
    }
}

// The legacy stream, no lse, and a context that stays what it was.
static void test_streams(void) {
    const int32_t lengths[] = {200, 100};
    ref_case c;
    loaded l;
    kmla_error error;
    void* context = NULL;
    if (on_host()) {
        skip("the host reader has no streams");
        return;
    }
    graph_case(&c, lengths, KMLA_KV_BF16, 3);
    load(&c, &l);
    prepare(&c.plan);
    l.args.lse = 0;
    expect(kmla_gpu_decode(backend.gpu, &c.plan, &l.args, NULL, &error) == KMLA_OK, "%s",
           error.message);
    synchronize();
    expect(device_all_bytes(l.lse.address, l.lse.bytes, 0xff), "lse was not wanted");
    l.args.lse = l.lse.address;
    expect(kmla_gpu_decode(backend.gpu, &c.plan, &l.args, NULL, &error) == KMLA_OK, "%s",
           error.message);
    synchronize();
    copy_to_host(c.out.data, l.out.address, l.out.bytes);
    copy_to_host(c.lse.data, l.lse.address, l.lse.bytes);
    answer right = answer_of(&c);
    judge(&c, &right, "legacy stream");
    answer_free(&right);
    driver_check(backend.driver.context_get(&context), "cuCtxGetCurrent");
    expect(context == backend.context, "the current context changed");
    // Without a current context: an error, no crash, nothing written.
    fill_device(l.out.address, 0xff, l.out.bytes);
    driver_check(backend.driver.context_set(NULL), "cuCtxSetCurrent");
    const kmla_status status = launch_only(&c, &l, &error);
    driver_check(backend.driver.context_set(backend.context), "cuCtxSetCurrent");
    expect(status == KMLA_ERROR_CONTEXT, "no context: %s", kmla_status_name(status));
    expect(device_all_bytes(l.out.address, l.out.bytes, 0xff), "outputs were written");
    unload(&l);
    ref_free(&c);
}

// Decodes on an object whose context this thread has made current, and judges.
static void decode_in_context(kmla_gpu* gpu, ref_case* c, loaded* l, const answer* right,
                              const char* what) {
    kmla_error error;
    fill_device(l->out.address, 0xff, l->out.bytes);
    fill_device(l->lse.address, 0xff, l->lse.bytes);
    if (kmla_gpu_decode(gpu, &c->plan, &l->args, NULL, &error) != KMLA_OK) {
        fail("%s: %s", what, error.message);
        return;
    }
    synchronize();
    copy_to_host(c->out.data, l->out.address, l->out.bytes);
    copy_to_host(c->lse.data, l->lse.address, l->lse.bytes);
    judge(c, right, what);
}

// One of two contexts with all that a decode needs there. The first is the tests' own.
typedef struct place {
    const char* name;
    void* context;
    kmla_gpu* gpu;
    loaded l;
} place;

static void settle(place* p, const ref_case* c) {
    kmla_error error;
    driver_check(backend.driver.context_set(p->context), "cuCtxSetCurrent");
    load(c, &p->l);
    p->gpu = p->context == backend.context ? backend.gpu : open_unprepared();
    expect(kmla_gpu_prepare(p->gpu, &c->plan, NULL, &error) == KMLA_OK, "%s: %s", p->name,
           error.message);
}

static void vacate(place* p) {
    driver_check(backend.driver.context_set(p->context), "cuCtxSetCurrent");
    unload(&p->l);
    if (p->gpu != backend.gpu) {
        kmla_gpu_close(p->gpu);
    }
    driver_check(backend.driver.context_set(backend.context), "cuCtxSetCurrent");
}

// The same variant in two places, in turn; an object is of use in its own context only.
static void take_turns(place* places, ref_case* c, const answer* right) {
    void* current = NULL;
    kmla_error error;
    for (int run = 0; run < 6; run++) {
        place *here = &places[run % 2], *there = &places[1 - run % 2];
        driver_check(backend.driver.context_set(here->context), "cuCtxSetCurrent");
        decode_in_context(here->gpu, c, &here->l, right, here->name);
        const kmla_status status = kmla_gpu_decode(there->gpu, &c->plan, &there->l.args, NULL,
                                                   &error);
        expect(status == KMLA_ERROR_CONTEXT, "the other's object: %s", kmla_status_name(status));
        driver_check(backend.driver.context_get(&current), "cuCtxGetCurrent");
        expect(current == here->context, "the current context changed");
    }
}

static void test_rt_06(void) {
    const int32_t lengths[] = {200, 100};
    ref_case c;
    place places[2] = {{.name = "first context"}, {.name = "second context"}};
    if (on_host() || backend.driver.context_create == NULL) {
        skip("no contexts to create here");
        return;
    }
    graph_case(&c, lengths, KMLA_KV_PACKED, 2);
    answer right = answer_of(&c);
    places[0].context = backend.context;
    driver_check(backend.driver.context_create(&places[1].context, 0, backend.ordinal),
                 "cuCtxCreate");
    settle(&places[0], &c);
    settle(&places[1], &c);
    take_turns(places, &c, &right);
    vacate(&places[1]);
    driver_check(backend.driver.context_destroy(places[1].context), "cuCtxDestroy");
    vacate(&places[0]);
    answer_free(&right);
    ref_free(&c);
}

// A thread that never touched CUDA gets an error code.
static void* decode_on_thread(void* data) {
    kmla_status* status = (kmla_status*)data;
    kmla_device device;
    *status = kmla_gpu_device(backend.gpu, &device, NULL);
    return NULL;
}

static void test_rt_07(void) {
    kmla_status status = KMLA_OK;
    pthread_t thread;
    if (on_host()) {
        skip("the host reader has no contexts");
        return;
    }
    if (pthread_create(&thread, NULL, decode_on_thread, &status) != 0) {
        backend_stop("no thread");
    }
    pthread_join(thread, NULL);
    expect(status == KMLA_ERROR_CONTEXT, "%s", kmla_status_name(status));
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

// An object of its own in a context that this thread has made current: prepared, used, closed.
static void live_in_context(ref_case* c, const answer* right, const char* what) {
    kmla_gpu* gpu = open_unprepared();
    kmla_error error;
    loaded l;
    load(c, &l);
    if (expect(kmla_gpu_prepare(gpu, &c->plan, NULL, &error) == KMLA_OK, "%s: %s", what,
               error.message)) {
        decode_in_context(gpu, c, &l, right, what);
    }
    unload(&l);
    kmla_gpu_close(gpu);
}

// A context of 16 of the card's multiprocessors: planned for those, in a capture too.
static void test_green_context(void) {
    const int32_t lengths[] = {200, 100};
    ref_case c;
    kmla_device card;
    kmla_error error;
    cuda_resource all, group, rest;
    void *description, *green, *context, *current = NULL;
    unsigned groups = 1;
    if (on_host() || backend.driver.green_create == NULL || backend.driver.green_context == NULL ||
        backend.driver.device_resource(backend.ordinal, &all, 1) != 0 ||
        backend.driver.resource_split(&group, &groups, &all, &rest, 0, 16) != 0) {
        skip("no green contexts here");
        return;
    }
    driver_check(backend.driver.resource_describe(&description, &group, 1),
                 "cuDevResourceGenerateDesc");
    driver_check(backend.driver.green_create(&green, description, backend.ordinal, 1),
                 "cuGreenCtxCreate");
    driver_check(backend.driver.green_context(&context, green), "cuCtxFromGreenCtx");
    driver_check(backend.driver.context_set(context), "cuCtxSetCurrent");
    if (expect(kmla_gpu_device(backend.gpu, &card, &error) != KMLA_OK, "the other's object")) {
        expect(error.status == KMLA_ERROR_CONTEXT, "%s", error.message);
    }
    kmla_gpu* gpu = open_unprepared();
    expect(kmla_gpu_device(gpu, &card, &error) == KMLA_OK, "%s", error.message);
    kmla_gpu_close(gpu);
    expect(card.multiprocessors == (int32_t)group.multiprocessors, "%d multiprocessors, not %u",
           card.multiprocessors, group.multiprocessors);
    graph_case(&c, lengths, KMLA_KV_PACKED, 0);
    expect(kmla_plan_decode(&c.shape, &card, &c.plan, &error) == KMLA_OK, "%s", error.message);
    answer right = answer_of(&c);
    live_in_context(&c, &right, "green context");
    driver_check(backend.driver.context_get(&current), "cuCtxGetCurrent");
    expect(current == context, "the current context changed");
    driver_check(backend.driver.context_set(backend.context), "cuCtxSetCurrent");
    driver_check(backend.driver.green_destroy(green), "cuGreenCtxDestroy");
    live_in_context(&c, &right, "the whole card after it");
    answer_free(&right);
    ref_free(&c);
}

enum { LAUNCHING_THREADS = 4 };

typedef struct launching {
    const ref_case* c;
    void* context;
    kmla_gpu* gpu;
    loaded l;
    int launches;
    int failed;
} launching;

static void* launch_on_thread(void* data) {
    launching* mine = (launching*)data;
    void* stream = NULL;
    mine->failed = backend.driver.context_set(mine->context) != 0 ||
                   backend.driver.stream_create(&stream, 1) != 0; // 1: waits for no other stream
    for (int i = 0; i < mine->launches && !mine->failed; i++) {
        mine->failed =
            kmla_gpu_decode(mine->gpu, &mine->c->plan, &mine->l.args, stream, NULL) != KMLA_OK;
    }
    if (stream) { // when its work is done
        backend.driver.stream_destroy(stream);
    }
    return NULL;
}

static void run_threads(launching* each, int count) {
    pthread_t threads[LAUNCHING_THREADS];
    for (int i = 0; i < count; i++) {
        if (pthread_create(&threads[i], NULL, launch_on_thread, &each[i]) != 0) {
            backend_stop("no thread");
        }
    }
    for (int i = 0; i < count; i++) {
        pthread_join(threads[i], NULL);
        expect(!each[i].failed, "thread %d failed", i);
    }
}

// One object, four threads, each with a stream, outputs and a workspace of its own.
static void test_launches_from_threads(void) {
    const int32_t lengths[] = {200, 100};
    ref_case c;
    launching each[LAUNCHING_THREADS];
    if (on_host()) {
        skip("the host reader has no streams");
        return;
    }
    graph_case(&c, lengths, KMLA_KV_PACKED, 3);
    answer right = answer_of(&c);
    prepare(&c.plan);
    for (int i = 0; i < LAUNCHING_THREADS; i++) {
        each[i].c = &c;
        each[i].context = backend.context;
        each[i].gpu = backend.gpu;
        each[i].launches = pick(3, 200);
        load(&c, &each[i].l);
    }
    synchronize(); // the copies
    run_threads(each, LAUNCHING_THREADS);
    synchronize();
    for (int i = 0; i < LAUNCHING_THREADS; i++) {
        copy_to_host(c.out.data, each[i].l.out.address, each[i].l.out.bytes);
        copy_to_host(c.lse.data, each[i].l.lse.address, each[i].l.lse.bytes);
        judge(&c, &right, "from a thread");
        unload(&each[i].l);
    }
    answer_free(&right);
    ref_free(&c);
}

// Takes the outputs of a place's last launches and judges them.
static void judge_place(place* p, ref_case* c, const answer* right) {
    driver_check(backend.driver.context_set(p->context), "cuCtxSetCurrent");
    synchronize();
    copy_to_host(c->out.data, p->l.out.address, p->l.out.bytes);
    copy_to_host(c->lse.data, p->l.lse.address, p->l.lse.bytes);
    judge(c, right, p->name);
}

// An object on each card: in turn from this thread, then both at once from a thread for each.
static void test_two_devices(void) {
    const int32_t lengths[] = {200, 100};
    ref_case c;
    place places[2] = {{.name = "first card"}, {.name = "second card"}};
    launching each[2];
    int count = 0, device;
    if (on_host() || backend.driver.device_count == NULL ||
        backend.driver.device_count(&count) != 0 || count < 2) {
        skip("one card");
        return;
    }
    graph_case(&c, lengths, KMLA_KV_PACKED, 2);
    answer right = answer_of(&c);
    for (int i = 0; i < 2; i++) {
        driver_check(backend.driver.device_get(&device, i), "cuDeviceGet");
        driver_check(backend.driver.context_retain(&places[i].context, device),
                     "cuDevicePrimaryCtxRetain");
        settle(&places[i], &c);
    }
    take_turns(places, &c, &right);
    for (int i = 0; i < 2; i++) {
        driver_check(backend.driver.context_set(places[i].context), "cuCtxSetCurrent");
        fill_device(places[i].l.out.address, 0xff, places[i].l.out.bytes);
        fill_device(places[i].l.lse.address, 0xff, places[i].l.lse.bytes);
        synchronize();
        each[i] = (launching){&c, places[i].context, places[i].gpu, places[i].l, pick(3, 200), 0};
    }
    run_threads(each, 2);
    for (int i = 0; i < 2; i++) {
        judge_place(&places[i], &c, &right);
    }
    vacate(&places[1]);
    vacate(&places[0]);
    answer_free(&right);
    ref_free(&c);
}

// In a forked child every call is an error, and returns.
static int fails_in_child(const ref_case* c, const loaded* l) {
    kmla_device card;
    kmla_gpu_desc desc;
    kmla_gpu* gpu = NULL;
    int good = 1;
    memset(&desc, 0, sizeof desc);
    desc.cuda_path = backend.library;
    desc.without_nvrtc = 1;
    good = good && kmla_gpu_decode(backend.gpu, &c->plan, &l->args, NULL, NULL) != KMLA_OK;
    good = good && kmla_gpu_device(backend.gpu, &card, NULL) != KMLA_OK;
    good = good && kmla_gpu_prepare(backend.gpu, &c->plan, NULL, NULL) != KMLA_OK;
    good = good && kmla_gpu_open(&desc, &gpu, NULL) != KMLA_OK;
    kmla_gpu_close(backend.gpu);
    return good;
}

static void test_fork(void) {
    const int32_t lengths[] = {200, 100};
    ref_case c;
    loaded l;
    int status = 0;
    if (backend.kind != BACKEND_GPU) {
        skip("only a real driver minds forks");
        return;
    }
    graph_case(&c, lengths, KMLA_KV_PACKED, 2);
    load(&c, &l);
    prepare(&c.plan);
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        alarm(30);
        _exit(fails_in_child(&c, &l) ? 0 : 1);
    }
    expect(child > 0 && waitpid(child, &status, 0) == child, "no child");
    expect(WIFEXITED(status), "the child was ended by signal %d", WTERMSIG(status));
    expect(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a call succeeded in the child");
    answer right = answer_of(&c);
    launch(&c, &l, "after the fork");
    judge(&c, &right, "after the fork");
    answer_free(&right);
    unload(&l);
    ref_free(&c);
}

// The second object takes from files what the first has compiled.
static void test_cache(void) {
    const int32_t lengths[] = {200, 100};
    char directory[] = "/tmp/kmla_cache_XXXXXX";
    char command[64];
    kmla_cache cache;
    kmla_error error;
    ref_case c;
    if (on_host()) {
        skip("the host reader compiles nothing");
        return;
    }
    if (mkdtemp(directory) == NULL || kmla_cache_files(directory, &cache, &error) != KMLA_OK) {
        backend_stop("no folder for a cache");
    }
    graph_case(&c, lengths, KMLA_KV_E4M3, 2);
    answer right = answer_of(&c);
    for (int run = 0; run < 2; run++) {
        kmla_gpu_desc desc;
        kmla_gpu* gpu;
        loaded l;
        memset(&desc, 0, sizeof desc);
        desc.cuda_path = backend.library;
        desc.nvrtc_path = backend.library;
        desc.cache = cache;
        if (kmla_gpu_open(&desc, &gpu, &error) != KMLA_OK) {
            backend_stop("%s", error.message);
        }
        load(&c, &l);
        const double begin = now();
        expect(kmla_gpu_prepare(gpu, &c.plan, NULL, &error) == KMLA_OK, "%s", error.message);
        const double seconds = now() - begin;
        expect(run == 0 || seconds < 0.5, "prepare from files took %.1f s", seconds);
        decode_in_context(gpu, &c, &l, &right, run == 0 ? "compiled" : "from files");
        unload(&l);
        kmla_gpu_close(gpu);
    }
    snprintf(command, sizeof command, "rm -rf %s", directory);
    expect(system(command) == 0, "%s failed", command);
    answer_free(&right);
    ref_free(&c);
}
#include "device_serving.h"

// =============================================================================
// Groups
// =============================================================================

typedef struct group {
    const char* name;
    void (*test)(void);
} group;

static const group groups[] = {
    {"formats, modes, splits, tiles", test_formats},
    {"packed query bits", test_packed_query_bits},
    {"single split bits", test_single_split_bits},
    {"page sizes", test_page_sizes},
    {"heads", test_heads},
    {"rows and requests", test_rows_and_requests},
    {"lengths", test_lengths},
    {"Kimi-K3 step", test_k3_step},
    {"length rules", test_length_rules},
    {"dead rows", test_dead_rows},
    {"ragged rows", test_ragged},
    {"slot lists", test_slot_lists},
    {"unread table entries", test_unread_entries},
    {"random shapes", test_random_shapes},
    {"HT-02 99 heads as 99, 104, 112", test_ht_02},
    {"HT-03 4 heads, 30 requests", test_ht_03},
    {"LC-01 LC-02 LC-03 LC-06 combine", test_lc},
    {"combine against fp64", test_combine},
    {"LC-06 shares of a combine", test_shares},
    {"DL-01 DL-02 DL-03 shards", test_dl_vectors},
    {"SD-03 verify and draft rows", test_sd_03},
    {"rows across shard boundaries", test_straddling},
    {"ranks and transports", test_ranks},
    {"one rank", test_one_rank},
    {"SK-01 empty splits", test_sk_01},
    {"SK-03 late maximum", test_sk_03},
    {"SK-04 partial types", test_sk_04},
    {"SK-06 company", test_sk_06},
    {"tile bits", test_tile_bits},
    {"run to run bits", test_run_to_run},
    {"FP-01 code x scale", test_fp_01},
    {"FP-03 saturation", test_fp_03},
    {"FP-04 all codes", test_fp_04},
    {"NaN tokens", test_nan_tokens},
    {"NaN queries", test_nan_queries},
    {"extreme scales", test_extreme_scales},
    {"query magnitudes", test_query_magnitudes},
    {"BF16 magnitudes", test_bf16_magnitudes},
    {"logits", test_logits},
    {"attention sinks", test_sinks},
    {"PG-04 PG-06 unused slots and gaps", test_pg_04_and_06},
    {"KV writer", test_kv_writer},
    {"query writer", test_query_writer},
    {"query scale vectors", test_query_scale_vectors},
    {"bad decode arguments", test_bad_decode},
    {"bad combine arguments", test_bad_combine},
    {"bad writer arguments", test_bad_writes},
    {"checking mode", test_checking_mode},
    {"CG-05 unprepared in a capture", test_cg_05},
    {"CG-03 two graphs in turn", test_cg_03},
    {"captures in every mode", test_capture_modes},
    {"graph replays", test_replays},
    {"graph of 112 rows, 100 live", test_padded_batches},
    {"graph of a growing request", test_growing_length},
    {"prefix reuse and turns", test_reuse},
    {"streams and contexts", test_streams},
    {"RT-06 two contexts", test_rt_06},
    {"RT-06 two cards", test_two_devices},
    {"RT-06 green context", test_green_context},
    {"RT-06 launches from threads", test_launches_from_threads},
    {"RT-07 thread without a context", test_rt_07},
    {"RT-07 forked child", test_fork},
    {"cache of images", test_cache},
    // Last, as pools with holes: a stray read would leave no context for another group.
    {"PG-01 past 2^31 and 2^32 bytes", test_pg_01},
    {"PG-02 past 2^32 bytes, page 0 NaN", test_pg_02},
};

static void print_score(const group* g, double seconds) {
    if (score.failures > DETAILS) {
        printf("     %s: and %d more\n", g->name, score.failures - DETAILS);
    }
    if (score.skip_reason != NULL && score.cases == 0) {
        score.skipped++;
        printf("skip %s: %s\n", g->name, score.skip_reason);
        return;
    }
    printf("%-4s %s (%d cases", score.failures ? "FAIL" : "ok", g->name, score.cases);
    if (score.failures) {
        printf(", %d failed", score.failures);
    }
    if (score.worst_bf16 > 0.0) {
        printf(", worst out %.1e", score.worst_bf16);
    }
    if (score.worst_fp32 > 0.0) {
        printf(", worst fp32 out %.1e", score.worst_fp32);
    }
    if (score.worst_lse > 0.0) {
        printf(", worst lse %.0e", score.worst_lse);
    }
    printf(", %.1f s)\n", seconds);
    score.groups_failed += score.failures > 0;
    score.groups_passed += score.failures == 0;
}

static int is_wanted(const group* g) {
    int wanted = options.only_count == 0;
    for (int i = 0; i < options.only_count; i++) {
        wanted = wanted || strstr(g->name, options.only[i]) != NULL;
    }
    for (int i = 0; i < options.skip_count; i++) {
        wanted = wanted && strstr(g->name, options.skip[i]) == NULL;
    }
    return wanted;
}

static void run_group(const group* g) {
    const double begin = now();
    if (!is_wanted(g)) {
        return;
    }
    score.group = g->name;
    score.cases = 0;
    score.failures = 0;
    score.worst_bf16 = 0.0;
    score.worst_fp32 = 0.0;
    score.worst_lse = 0.0;
    score.skip_reason = NULL;
    score.draw = 1;
    g->test();
    print_score(g, now() - begin);
    fflush(stdout);
}

static int usage(const char* program) {
    fprintf(stderr,
            "usage: %s [--library PATH] [--quick] [--only SUBSTRING]... [--skip SUBSTRING]... "
            "[--reader portable|hopper] [--seed N] [--host] [--watched]\n",
            program);
    return 2;
}

int main(int count, char** words) {
    static const char* const readers[] = {"planner's", "portable", "hopper"}; // KMLA_READER_*
    const char* library = NULL;
    int host = 0, watched = 0;
    options.seed = 1;
    for (int i = 1; i < count; i++) {
        if (strcmp(words[i], "--quick") == 0) {
            options.quick = 1;
        } else if (strcmp(words[i], "--host") == 0) {
            host = 1;
        } else if (strcmp(words[i], "--watched") == 0) {
            watched = 1;
        } else if (i + 1 == count) {
            return usage(words[0]);
        } else if (strcmp(words[i], "--library") == 0) {
            library = words[++i];
        } else if (strcmp(words[i], "--only") == 0 && options.only_count < MOST_ONLY) {
            options.only[options.only_count++] = words[++i];
        } else if (strcmp(words[i], "--skip") == 0 && options.skip_count < MOST_ONLY) {
            options.skip[options.skip_count++] = words[++i];
        } else if (strcmp(words[i], "--seed") == 0) {
            options.seed = strtoull(words[++i], NULL, 10);
        } else if (strcmp(words[i], "--reader") == 0 && strcmp(words[i + 1], readers[1]) == 0) {
            options.reader = KMLA_READER_PORTABLE;
            i++;
        } else if (strcmp(words[i], "--reader") == 0 && strcmp(words[i + 1], readers[2]) == 0) {
            options.reader = KMLA_READER_HOPPER;
            i++;
        } else {
            return usage(words[0]);
        }
    }
    backend_open(host, library, watched);
    printf("on %s", backend.name);
    if (!host) {
        printf(", compute capability %d.%d, %d multiprocessors, %s reader",
               backend.card.compute_major, backend.card.compute_minor,
               backend.card.multiprocessors, readers[options.reader]);
    }
    printf("\n");
    if (!host && options.reader == KMLA_READER_HOPPER &&
        (backend.card.compute_major != 9 || backend.card.compute_minor != 0)) {
        printf("STOP: the Hopper reader is for compute capability 9.0\n");
        return 1;
    }
    for (int i = 0; i < COUNT(groups); i++) {
        run_group(&groups[i]);
    }
    kmla_gpu_close(backend.gpu);
    printf("%d passed, %d failed", score.groups_passed, score.groups_failed);
    if (score.skipped > 0) {
        printf(", %d skipped", score.skipped);
    }
    printf("\n");
    const int ran = score.groups_passed + score.groups_failed + score.skipped;
    return score.groups_failed > 0 || ran == 0; // a wrong --only names none
}
