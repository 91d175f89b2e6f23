// device_cases.h - runs a reference.h case through the backend and judges it; keeps the score of
// the test groups.

#ifndef KMLA_TESTS_DEVICE_CASES_H
#define KMLA_TESTS_DEVICE_CASES_H

#include "device_backend.h"

#include <pthread.h>
#include <unistd.h>

// =============================================================================
// The score
// =============================================================================

#define MOST_ONLY 24

static struct options {
    int quick;
    const char* only[MOST_ONLY]; // substrings of the names of groups
    int only_count;              // 0: all groups
    const char* skip[MOST_ONLY]; // likewise, of groups that do not run
    int skip_count;
    int32_t reader;              // KMLA_READER_*, 0 = the planner's
    uint64_t seed;
} options;

static struct score {
    const char* group;
    int cases, failures;                       // of the group
    double worst_bf16, worst_fp32, worst_lse;  // errors of the group
    int groups_passed, groups_failed, skipped; // of the program
    const char* skip_reason;
    uint64_t draw; // so that no two cases of a group have the same numbers
} score;

#define DETAILS 6 // failures of a group that are told in full

// Counts a failure of the current group and says what it is.
static void fail(const char* format, ...) {
    va_list values;
    if (score.failures++ >= DETAILS) {
        return;
    }
    va_start(values, format);
    printf("     %s: ", score.group);
    vprintf(format, values);
    printf("\n");
    va_end(values);
    fflush(stdout);
}

// Counts a case. Returns the condition.
static int expect(int condition, const char* format, ...) {
    va_list values;
    char text[1024];
    score.cases++;
    if (!condition) {
        va_start(values, format);
        vsnprintf(text, sizeof text, format, values);
        va_end(values);
        fail("%s", text);
    }
    return condition;
}

static void skip(const char* reason) { score.skip_reason = reason; }

// A seed of its own for each case.
static uint64_t draw(void) { return options.seed * 1000003u + score.draw++; }

// =============================================================================
// A case on the device
// =============================================================================

typedef struct loaded {
    device_buffer pool, table, lengths, offsets, query, out, lse, workspace;
    kmla_decode args; // device addresses
} loaded;

static void load_workspace(const ref_case* c, loaded* l) {
    device_free(&l->workspace);
    l->workspace = device_make((size_t)c->plan.workspace_bytes, 0xff);
    l->args.workspace = l->workspace.address;
    l->args.workspace_bytes = c->plan.workspace_bytes;
}

static void load(const ref_case* c, loaded* l) {
    memset(l, 0, sizeof *l);
    l->pool = device_copy(c->pool.data, c->pool.bytes);
    l->table = device_copy(c->table.data, c->table.bytes);
    l->lengths = device_copy(c->length_buffer.data, c->length_buffer.bytes);
    l->offsets = device_copy(c->offset_buffer.data, c->offset_buffer.bytes);
    l->query = device_copy(c->query.data, c->query.bytes);
    l->out = device_make(c->out.bytes, 0xff);
    l->lse = device_make(c->lse.bytes, 0xff);
    l->args = c->args;
    l->args.kv = l->pool.address;
    l->args.block_table = c->plan.shape.slot_list ? 0 : l->table.address;
    l->args.slot_list = c->plan.shape.slot_list ? l->table.address : 0;
    l->args.lengths = l->lengths.address;
    l->args.row_offsets = l->offsets.address;
    l->args.query = l->query.address;
    l->args.out = l->out.address;
    l->args.lse = l->lse.address;
    load_workspace(c, l);
}

static void unload(loaded* l) {
    device_free(&l->pool);
    device_free(&l->table);
    device_free(&l->lengths);
    device_free(&l->offsets);
    device_free(&l->query);
    device_free(&l->out);
    device_free(&l->lse);
    device_free(&l->workspace);
}

// 1 if the device still holds what was loaded. Large pools only by their first bytes.
static int input_whole(const device_buffer* buffer, const ref_buffer* from) {
    const size_t bytes = from->bytes < ((size_t)4 << 20) ? from->bytes : (size_t)4 << 20;
    uint8_t* now = (uint8_t*)malloc(bytes + 1);
    copy_to_host(now, buffer->address, bytes);
    const int same = memcmp(now, from->data, bytes) == 0;
    free(now);
    return same && device_canaries_whole(buffer);
}

// Decodes once more, outputs and workspace full of NaN, and brings the outputs to c->out and
// c->lse. Returns 0, and has said why, when that went wrong.
static int launch(ref_case* c, loaded* l, const char* what) {
    kmla_error error;
    fill_device(l->out.address, 0xff, l->out.bytes);
    fill_device(l->lse.address, 0xff, l->lse.bytes);
    fill_device(l->workspace.address, 0xff, l->workspace.bytes);
    prepare(&c->plan);
    if (call_decode(&c->plan, &l->args, &error) != KMLA_OK) {
        fail("%s: %s", what, error.message);
        return 0;
    }
    copy_to_host(c->out.data, l->out.address, l->out.bytes);
    copy_to_host(c->lse.data, l->lse.address, l->lse.bytes);
    if (!ref_untouched(c) || !device_canaries_whole(&l->out) || !device_canaries_whole(&l->lse) ||
        !device_canaries_whole(&l->workspace)) {
        fail("%s: wrote outside its outputs", what);
        return 0;
    }
    if (!input_whole(&l->pool, &c->pool) || !input_whole(&l->query, &c->query) ||
        !input_whole(&l->table, &c->table) || !input_whole(&l->lengths, &c->length_buffer)) {
        fail("%s: changed an input", what);
        return 0;
    }
    return 1;
}

static int load_and_launch(ref_case* c, const char* what) {
    loaded l;
    load(c, &l);
    const int done = launch(c, &l, what);
    unload(&l);
    return done;
}

// The reader that was asked for; BF16 KV has only the portable one.
static int32_t reader_for(int32_t kv_format) {
    return kv_format == KMLA_KV_BF16 && options.reader == KMLA_READER_HOPPER ? KMLA_READER_PORTABLE
                                                                             : options.reader;
}

static void plan_case(ref_case* c) {
    c->shape.reader = reader_for(c->shape.kv_format);
    if (ref_plan(c, backend_card()) != KMLA_OK) {
        backend_stop("a case cannot be planned");
    }
}

static void build(ref_case* c) {
    c->seed = c->seed == 0 ? draw() : c->seed;
    c->shape.reader = reader_for(c->shape.kv_format);
    if (ref_build(c, backend_card()) != KMLA_OK) {
        backend_stop("a case cannot be built");
    }
}

// Plans again after a change of c->shape, and makes a workspace for it.
static void plan_again(ref_case* c, loaded* l) {
    plan_case(c);
    load_workspace(c, l);
}

// =============================================================================
// The right answer: fp64, on all cores, for all heads or a few
// =============================================================================

// The same case for heads [first, first + heads) only.
static ref_case some_heads(const ref_case* c, int32_t first, int32_t heads) {
    const int64_t record = ref_record_bytes(ref_query_layout(c->plan.shape.query_format));
    const int64_t vector = REF_D * (c->out_type == KMLA_FP32 ? 4 : 2);
    ref_case some = *c;
    some.plan.shape.heads = heads;
    some.query.data += first * record;
    some.out.data += first * vector;
    some.lse.data += first * 4;
    return some;
}

#define ANSWER_WINDOWS 3 // of heads: the first, one in the middle, the last

typedef struct answer {
    int32_t windows, heads; // heads of each window
    int32_t first[ANSWER_WINDOWS];
    double* out[ANSWER_WINDOWS]; // [R][heads][512]
    double* lse[ANSWER_WINDOWS];
} answer;

#define ANSWER_BLOCK 4 // heads that a thread takes at a time

typedef struct answer_job {
    const ref_case* c;
    answer* to;
    int32_t thread, threads;
} answer_job;

static void* answer_thread(void* data) {
    const answer_job* job = (const answer_job*)data;
    const ref_case* c = job->c;
    int64_t item = 0;
    for (int32_t w = 0; w < job->to->windows; w++) {
        for (int32_t row = 0; row < c->plan.shape.rows; row++) {
            int64_t begin, end;
            ref_row_range(c, row, &begin, &end);
            for (int32_t h = 0; h < job->to->heads; h += ANSWER_BLOCK, item++) {
                const int32_t left = job->to->heads - h;
                const int64_t at = (int64_t)row * job->to->heads + h;
                if (item % job->threads != job->thread) {
                    continue;
                }
                const ref_case some =
                    some_heads(c, job->to->first[w] + h, left < ANSWER_BLOCK ? left : ANSWER_BLOCK);
                ref_decode_row(&some, row, begin, end, job->to->out[w] + at * REF_D,
                               job->to->lse[w] + at);
            }
        }
    }
    return NULL;
}

#define ANSWER_THREADS 64
#define ANSWER_MOST 400000000.0 // vectors x tokens x 576 of a full answer; else a few heads

static answer answer_of(const ref_case* c) {
    const kmla_shape* shape = &c->plan.shape;
    const long cores = sysconf(_SC_NPROCESSORS_ONLN);
    const long most = cores > ANSWER_THREADS ? ANSWER_THREADS : cores;
    const int32_t threads = most < 1 ? 1 : (int32_t)most;
    pthread_t handles[ANSWER_THREADS];
    answer_job jobs[ANSWER_THREADS];
    double work = 0.0;
    answer right;
    memset(&right, 0, sizeof right);
    for (int32_t row = 0; row < shape->rows; row++) {
        int64_t begin, end;
        ref_row_range(c, row, &begin, &end);
        work += (double)(end - begin) * shape->heads * REF_Q;
    }
    const int few = work > ANSWER_MOST && shape->heads > ANSWER_WINDOWS;
    right.windows = few ? ANSWER_WINDOWS : 1;
    right.heads = few ? 1 : shape->heads;
    right.first[1] = shape->heads / 2;
    right.first[2] = shape->heads - 1;
    for (int32_t w = 0; w < right.windows; w++) {
        const size_t vectors = (size_t)shape->rows * (size_t)right.heads;
        right.out[w] = (double*)malloc(vectors * REF_D * sizeof(double));
        right.lse[w] = (double*)malloc(vectors * sizeof(double));
    }
    for (int32_t i = 0; i < threads; i++) {
        const answer_job job = {c, &right, i, threads};
        jobs[i] = job;
        if (i > 0 && pthread_create(&handles[i], NULL, answer_thread, &jobs[i]) != 0) {
            backend_stop("no thread");
        }
    }
    answer_thread(&jobs[0]);
    for (int32_t i = 1; i < threads; i++) {
        pthread_join(handles[i], NULL);
    }
    return right;
}

static void answer_free(answer* right) {
    for (int32_t w = 0; w < right->windows; w++) {
        free(right->out[w]);
        free(right->lse[w]);
    }
}

static ref_errors errors_of(const ref_case* c, const answer* right) {
    ref_errors worst;
    memset(&worst, 0, sizeof worst);
    for (int32_t w = 0; w < right->windows; w++) {
        const ref_case some = some_heads(c, right->first[w], right->heads);
        const ref_errors errors = ref_judge(&some, right->out[w], right->lse[w]);
        worst.out = errors.out > worst.out ? errors.out : worst.out;
        worst.rounding = errors.rounding > worst.rounding ? errors.rounding : worst.rounding;
        worst.worst_vector =
            errors.worst_vector > worst.worst_vector ? errors.worst_vector : worst.worst_vector;
        worst.lse = errors.lse > worst.lse ? errors.lse : worst.lse;
        worst.wrong += errors.wrong;
    }
    return worst;
}

// =============================================================================
// Bounds
// =============================================================================

#define LSE_BOUND 3e-4 // times max(1, |lse|)

// The relative L2 error that an output may have. An fp32 output without BF16 partials has only the
// rounding of the weights: 11 bits, independent from token to token.
static double out_bound(const ref_case* c) {
    const kmla_shape* shape = &c->plan.shape;
    const double one_split = shape->mode == KMLA_MODE_E4M3_QUERY ? 3e-3 : 2e-3;
    const int bf16_partials = c->plan.splits > 1 && shape->partial_type == KMLA_BF16;
    if (c->out_type == KMLA_FP32 && !bf16_partials) {
        return 6e-4;
    }
    return !bf16_partials ? one_split : (c->out_type == KMLA_FP32 ? 1.25 : 1.5) * one_split;
}

static const char* describe(const ref_case* c) {
    static const char* const kv[] = {"packed", "e4m3", "bf16"};
    static const char* const query[] = {"bf16", "packed", "e4m3"};
    static char text[360];
    static const char* const readers[] = {"host", "portable", "Hopper"};
    const kmla_shape* s = &c->plan.shape;
    snprintf(text, sizeof text,
             "%s reader, kv %s query %s%s, %d requests x %d rows (%d) x %d heads, capacity %lld, "
             "page %d%s, tile %d, %s%d splits of %s, single %d, out %s, %s%s window %d "
             "dcp %d/%d/%d, seed %llu",
             readers[c->plan.reader], kv[s->kv_format], query[s->query_format],
             s->mode ? " in e4m3 mode" : "", s->requests, s->rows_per_request, s->rows, s->heads,
             (long long)s->capacity_tokens, s->page_tokens, s->slot_list ? " slots" : "",
             c->plan.tile, s->split_mode ? "balanced " : "", c->plan.splits,
             s->partial_type ? "fp32" : "bf16", s->single_split_chunks,
             c->out_type ? "fp32" : "bf16", s->lengths.lengths_kind ? "global" : "local",
             s->lengths.rows_kind ? " draft" : "", s->lengths.window_tokens, s->lengths.dcp.rank,
             s->lengths.dcp.ranks, s->lengths.dcp.interleave, (unsigned long long)c->seed);
    return text;
}

// Compares what was read with the right answer; 1 if it is within the bounds.
static int judge(const ref_case* c, const answer* right, const char* what) {
    const ref_errors e = errors_of(c, right);
    double* worst = c->out_type == KMLA_FP32 ? &score.worst_fp32 : &score.worst_bf16;
    *worst = e.out > *worst ? e.out : *worst;
    score.worst_lse = e.lse > score.worst_lse ? e.lse : score.worst_lse;
    // One vector has a little more than the whole: its 512 errors are few.
    const double bound = ref_bound(&e, out_bound(c));
    const int good =
        e.wrong == 0 && e.out <= bound && e.worst_vector <= 1.5 * bound && e.lse <= LSE_BOUND;
    return expect(good, "%s: out %.2e (vector %.2e, bound %.1e), lse %.1e, %d wrong vectors; %s",
                  what, e.out, e.worst_vector, bound, e.lse, e.wrong, describe(c));
}

// Builds, reads, judges and frees: what most groups need.
static void check_case(ref_case* c, const char* what) {
    build(c);
    if (load_and_launch(c, what)) {
        answer right = answer_of(c);
        judge(c, &right, what);
        answer_free(&right);
    }
    ref_free(c);
}

// Reads a case that was built, and perhaps changed; judges, and keeps it.
static int check_built(ref_case* c, const char* what) {
    int good = 0;
    if (load_and_launch(c, what)) {
        answer right = answer_of(c);
        good = judge(c, &right, what);
        answer_free(&right);
    }
    return good;
}

// =============================================================================
// Single records, and bits
// =============================================================================

// Where the pool holds a row's token, which must exist.
static uint8_t* record_of(const ref_case* c, int32_t row, int64_t token) {
    const kmla_shape* shape = &c->plan.shape;
    const int32_t* entries = (const int32_t*)(const void*)c->table.data;
    const int64_t record = ref_record_bytes(ref_kv_layout(shape->kv_format));
    int32_t request = 0, index, rows;
    int64_t slot;
    ref_find_request(c, row, &request, &index, &rows);
    if (shape->slot_list) {
        slot = entries[row * c->args.slot_list_width + token];
    } else {
        slot = (int64_t)entries[request * c->args.block_table_width + token / shape->page_tokens] *
                   shape->page_tokens +
               token % shape->page_tokens;
    }
    return c->pool.data + slot / shape->page_tokens * (int64_t)c->args.page_pitch_bytes +
           slot % shape->page_tokens * record;
}

static uint8_t* query_of(const ref_case* c, int32_t row, int32_t head) {
    return c->query.data + row * c->args.query_row_stride_bytes +
           head * c->args.query_head_stride_bytes;
}

static void put_float(uint8_t* to, float value) { memcpy(to, &value, 4); }

static void put_bf16(uint8_t* to, double value) {
    const uint16_t bits = value == 0.0 ? 0 : ref_to_bf16((float)value);
    memcpy(to, &bits, 2);
}

// Packed record only: the scale of a group.
static uint8_t* scale_of(uint8_t* record, int group) { return record + 512 + 4 * group; }

// A record whose latent dims are all `latent` and whose rope lanes are 0 but the first, `rope`.
// FP8 codes can hold 0 and 1 only; a packed record holds other values by its scales.
static void put_plain_record(const ref_case* c, uint8_t* record, double latent, double rope) {
    const int32_t format = c->plan.shape.kv_format;
    memset(record, 0, (size_t)ref_record_bytes(ref_kv_layout(format)));
    for (int d = 0; d < REF_D; d++) {
        if (format == KMLA_KV_BF16) {
            put_bf16(record + 2 * d, latent);
        } else {
            record[d] = latent == 0.0 ? 0 : 0x38;
        }
    }
    for (int g = 0; format == KMLA_KV_PACKED && g < 4; g++) {
        put_float(scale_of(record, g), latent == 0.0 ? 1.0f : (float)latent);
    }
    if (format == KMLA_KV_E4M3) {
        record[512] = rope == 0.0 ? 0 : 0x38;
    } else {
        put_bf16(record + (format == KMLA_KV_PACKED ? 528 : 1024), rope);
    }
}

// A BF16 query of zeros but for the first rope lane.
static void put_plain_query(const ref_case* c, double rope) {
    for (int32_t row = 0; row < c->plan.shape.rows; row++) {
        for (int32_t head = 0; head < c->plan.shape.heads; head++) {
            memset(query_of(c, row, head), 0, 1152);
            put_bf16(query_of(c, row, head) + 1024, rope);
        }
    }
}

// One vector's output bits.
static const uint8_t* out_of(const ref_case* c, int32_t row, int32_t head) {
    const int64_t vector = REF_D * (c->out_type == KMLA_FP32 ? 4 : 2);
    return c->out.data + ((int64_t)row * c->stored_heads + head) * vector;
}

static const uint8_t* lse_of(const ref_case* c, int32_t row, int32_t head) {
    return c->lse.data + ((int64_t)row * c->stored_heads + head) * 4;
}

static int same_vector(const ref_case* a, int32_t row_a, int32_t head_a, const ref_case* b,
                       int32_t row_b, int32_t head_b) {
    const size_t vector = REF_D * (size_t)(a->out_type == KMLA_FP32 ? 4 : 2);
    return memcmp(out_of(a, row_a, head_a), out_of(b, row_b, head_b), vector) == 0 &&
           memcmp(lse_of(a, row_a, head_a), lse_of(b, row_b, head_b), 4) == 0;
}

// A copy of a case's outputs, to compare later ones with.
typedef struct bits {
    uint8_t* data;
    size_t out_bytes, lse_bytes;
} bits;

static bits bits_of(const ref_case* c) {
    bits kept = {(uint8_t*)malloc(c->out.bytes + c->lse.bytes), c->out.bytes, c->lse.bytes};
    memcpy(kept.data, c->out.data, c->out.bytes);
    memcpy(kept.data + c->out.bytes, c->lse.data, c->lse.bytes);
    return kept;
}

static int same_bits(const bits* kept, const ref_case* c) {
    return memcmp(kept->data, c->out.data, kept->out_bytes) == 0 &&
           memcmp(kept->data + kept->out_bytes, c->lse.data, kept->lse_bytes) == 0;
}

#endif // KMLA_TESTS_DEVICE_CASES_H
