// Small decodes under libFuzzer: the host reader against the fp64 reference, and the device source,
// run by the emulator, against the host reader. The input's bytes choose shape, lengths, tables and
// the seed of the numbers; then some change records, to NaN and to uneven scales.
//
//     build/decode --library=../emulator/build/libcuda_emulated_sm90.so FILE
//
// runs one input again, e.g. build/decode-crash-...; it prints the case first. Without --library
// only the host reader runs. `make fuzz TIME=600` looks for new ones.

#define KIMI_MLA_IMPLEMENTATION
#include "../../kimi_mla.h"

#include "../reference.h"
#include "card.h"
#include "fuzz.h"

enum { MOST_REQUESTS = 3, MOST_ROWS = 4, MOST_DEAD_ROWS = 5 };

// =============================================================================
// A case out of bytes
// =============================================================================

static void any_lengths_rule(fuzz_bytes* in, kmla_length_rule* rule) {
    rule->lengths_kind = fuzz_below(in, 2);
    if (rule->lengths_kind == KMLA_LENGTHS_PER_REQUEST) {
        rule->rows_kind = fuzz_below(in, 2);
        rule->dcp.ranks = 1 + fuzz_below(in, 4);
        rule->dcp.rank = fuzz_below(in, rule->dcp.ranks);
        rule->dcp.interleave = fuzz_chance(in, 2) ? 1 + fuzz_below(in, 70) : 1;
    }
}

// A card of compute capability 9.0 has two readers of FP8 KV, with tiles of their own.
static void any_reader(fuzz_bytes* in, kmla_shape* shape) {
    const uint8_t byte = fuzz_byte(in);
    if (card.device.compute_major == 9 && shape->kv_format != KMLA_KV_BF16) {
        shape->reader = byte % 2 ? KMLA_READER_HOPPER : KMLA_READER_PORTABLE;
        shape->tile = byte % 2 ? byte / 2 % 6 * 8 : shape->tile;
    }
}

static void any_shape(fuzz_bytes* in, kmla_shape* shape) {
    static const int32_t pages[] = {64, 1, 2, 7, 16, 32, 63, 128, 96};
    static const int32_t tiles[] = {0, 8, 16, 32};
    const uint8_t formats = fuzz_byte(in);
    shape->kv_format = formats % 3;
    shape->tile = tiles[formats / 3 % 4];
    shape->query_format = formats / 12 % 3;
    shape->mode = formats / 36 % 2;
    any_reader(in, shape);
    shape->requests = 1 + fuzz_below(in, MOST_REQUESTS);
    shape->rows_per_request = 1 + fuzz_below(in, MOST_ROWS);
    shape->rows = shape->requests * shape->rows_per_request;
    shape->heads = 1 + fuzz_below(in, 20);
    shape->page_tokens = pages[fuzz_below(in, 9)];
    shape->capacity_tokens = 1 + fuzz_below(in, 400);
    shape->splits = fuzz_chance(in, 2) ? 1 + fuzz_below(in, 9) : 1;
    shape->split_mode = fuzz_below(in, 2);
    shape->single_split_chunks = fuzz_chance(in, 2) ? fuzz_below(in, 4) : 0;
    shape->partial_type = fuzz_below(in, 2);
    shape->slot_list = fuzz_chance(in, 4);
    shape->lengths.window_tokens = fuzz_chance(in, 3) ? 1 + fuzz_below(in, 200) : 0;
    if (!shape->slot_list) {
        any_lengths_rule(in, &shape->lengths);
        shape->ragged = fuzz_chance(in, 3);
        shape->rows += shape->ragged ? fuzz_below(in, MOST_DEAD_ROWS + 1) : 0;
    }
}

// Also below zero, and past the capacity.
static int32_t any_length(fuzz_bytes* in, int32_t capacity) {
    const int32_t length = fuzz_below(in, capacity + 1);
    return fuzz_chance(in, 8) ? -length : fuzz_chance(in, 8) ? capacity + length : length;
}

static void any_case(fuzz_bytes* in, ref_case* c, int32_t* lengths, int32_t* offsets) {
    static const double sigmas[] = {1.0, 0.2, 4.0, 12.0};
    any_shape(in, &c->shape);
    const int32_t ranks = c->shape.lengths.dcp.ranks > 1 ? c->shape.lengths.dcp.ranks : 1;
    for (int32_t i = 0; i < c->shape.rows; i++) {
        lengths[i] = any_length(in, (int32_t)c->shape.capacity_tokens * ranks);
    }
    offsets[0] = 0;
    for (int32_t i = 0; i < c->shape.requests; i++) {
        const int32_t most = c->shape.rows_per_request;
        offsets[i + 1] = offsets[i] + (c->shape.ragged ? fuzz_below(in, most + 1) : most);
    }
    c->lengths = lengths;
    c->row_offsets = offsets;
    c->logit_sigma = sigmas[fuzz_below(in, 4)];
    c->pitch_extra_bytes = 16 * fuzz_below(in, 3);
    c->stored_heads = c->shape.heads + fuzz_below(in, 3);
    c->out_type = fuzz_below(in, 2);
    c->hole_share = fuzz_chance(in, 4) ? 0.2 : 0.0;
    c->seed = fuzz_word(in, 2);
}

static void print_case(const ref_case* c) {
    const kmla_shape* s = &c->plan.shape;
    fprintf(stderr,
            "reader %d, kv %d, query %d, mode %d, tile %d, %d requests of %d rows (%d), %d heads, "
            "pages of %d, capacity %d, %d splits (mode %d, single %d, partials %d), slot list %d, "
            "ragged %d, lengths %d/%d, window %d, rank %d of %d by %d, first length %d, sigma %g, "
            "out %d, holes %g, seed %d\n",
            c->plan.reader, s->kv_format, s->query_format, s->mode, s->tile, s->requests,
            s->rows_per_request, s->rows, s->heads, s->page_tokens, (int)s->capacity_tokens,
            s->splits, s->split_mode, s->single_split_chunks, s->partial_type, s->slot_list,
            s->ragged, s->lengths.lengths_kind, s->lengths.rows_kind, s->lengths.window_tokens,
            s->lengths.dcp.rank, s->lengths.dcp.ranks, s->lengths.dcp.interleave, c->lengths[0],
            c->logit_sigma, c->out_type, c->hole_share, (int)c->seed);
}

static void fail(const ref_case* c, const char* who, const char* what) {
    print_case(c);
    fprintf(stderr, "%s: %s\n", who, what);
    abort();
}

// =============================================================================
// Records that no writer makes
// =============================================================================

// The record of some token below a row's length, whether its window shows it or not; or NULL.
static uint8_t* any_record(fuzz_bytes* in, const ref_case* c) {
    const int32_t row = fuzz_below(in, c->plan.shape.rows);
    const int32_t token = fuzz_below(in, (int32_t)c->plan.shape.capacity_tokens);
    int64_t begin, end;
    ref_row_range(c, row, &begin, &end);
    return token < end ? ref_token_record(c, row, token) : NULL;
}

// A NaN somewhere in a record: every row that sees the token becomes NaN, and no other.
static void poison(fuzz_bytes* in, const ref_case* c) {
    uint8_t* record = any_record(in, c);
    const int32_t dim = fuzz_below(in, REF_Q);
    const uint16_t bf16_nan = 0x7fc1;
    if (record == NULL) {
        return;
    }
    switch (ref_kv_layout(c->plan.shape.kv_format)) {
        case REF_BF16: memcpy(record + 2 * dim, &bf16_nan, 2); break;
        case REF_E4M3: record[dim] = dim % 2 ? 0xff : 0x7f; break;
        case REF_PACKED:
            if (dim < REF_D) {
                record[dim] = dim % 2 ? 0xff : 0x7f;
            } else {
                memcpy(record + 528 + 2 * (dim - REF_D), &bf16_nan, 2);
            }
            break;
    }
}

// Packed scales of a token's groups that lie far apart, or are 0.
static void unbalance(fuzz_bytes* in, const ref_case* c) {
    uint8_t* record = any_record(in, c);
    for (int group = 0; group < 4; group++) {
        const int32_t shift = fuzz_below(in, 16);
        if (record != NULL && c->plan.shape.kv_format == KMLA_KV_PACKED) {
            const float scale = shift == 15 ? 0.0f
                                            : (float)ldexp(ref_float_at(record + 512 + 4 * group),
                                                           -shift);
            memcpy(record + 512 + 4 * group, &scale, 4);
        }
    }
}

static void change_records(fuzz_bytes* in, const ref_case* c) {
    for (int changes = fuzz_below(in, 4); changes > 0; changes--) {
        unbalance(in, c);
    }
    if (fuzz_chance(in, 3)) {
        poison(in, c);
    }
}

// =============================================================================
// Runs and verdicts
// =============================================================================

// With rounding to BF16 of partials and output, each up to 2^-9; else the reader's own error: f16
// weights are off by up to 2^-12.
static double bound_of(const ref_case* c) {
    const int rounded = c->out_type == KMLA_BF16 ||
                        (c->plan.splits > 1 && c->plan.shape.partial_type == KMLA_BF16);
    return rounded ? 4e-3 : 1e-3;
}

static void judge(const ref_case* c, const char* who, const double* out, const double* lse,
                  double bound) {
    const ref_errors errors = ref_judge(c, out, lse);
    if (errors.wrong || !(errors.out <= bound) || !(errors.lse <= 3e-4)) {
        fprintf(stderr, "out %.3e (bound %.1e), lse %.3e, wrong vectors %d\n", errors.out, bound,
                errors.lse, errors.wrong);
        fail(c, who, "wrong result");
    }
    if (!ref_untouched(c)) {
        fail(c, who, "wrote where it should not");
    }
}

// The case's outputs, as numbers to judge another reader's by.
static void take_outputs(const ref_case* c, double* out, double* lse) {
    const int64_t heads = c->plan.shape.heads;
    for (int64_t i = 0; i < c->plan.shape.rows * heads; i++) {
        const int64_t stored = i / heads * c->stored_heads + i % heads;
        lse[i] = ref_float_at(c->lse.data + 4 * stored);
        for (int d = 0; d < REF_D; d++) {
            out[i * REF_D + d] = ref_element(c->out.data, c->out_type, stored * REF_D + d);
        }
    }
}

// Block tables with holes are for readers only: the checking mode wants pages.
static void run_host(ref_case* c) {
    kmla_error error;
    c->args.check_pages = c->hole_share == 0.0 || c->plan.shape.slot_list;
    if (kmla_host_decode(&c->plan, &c->args, NULL, &error) != KMLA_OK) {
        fail(c, "host reader", error.message);
    }
    c->args.check_pages = 0;
}

static void run_device(ref_case* c, uint8_t schedule) {
    kmla_error error;
    ref_clear(c);
    card.seed(schedule);
    if (kmla_gpu_prepare(card.gpu, &c->plan, NULL, &error) != KMLA_OK ||
        kmla_gpu_decode(card.gpu, &c->plan, &c->args, NULL, &error) != KMLA_OK) {
        fail(c, "device", error.message);
    }
}

static void try_decode(fuzz_bytes* in) {
    int32_t lengths[MOST_REQUESTS * MOST_ROWS + MOST_DEAD_ROWS], offsets[MOST_REQUESTS + 1];
    ref_case c;
    memset(&c, 0, sizeof c);
    any_case(in, &c, lengths, offsets);
    if (ref_build(&c, card.gpu == NULL ? NULL : &card.device) != KMLA_OK) {
        fail(&c, "plan or writer", "cannot be built");
    }
    change_records(in, &c);
    const size_t vectors = (size_t)c.plan.shape.rows * (size_t)c.plan.shape.heads;
    double* out = (double*)malloc(vectors * REF_D * sizeof(double));
    double* lse = (double*)malloc(vectors * sizeof(double));
    ref_decode(&c, out, lse);
    run_host(&c);
    judge(&c, "host reader against fp64", out, lse, bound_of(&c));
    if (card.gpu != NULL) {
        take_outputs(&c, out, lse);
        run_device(&c, fuzz_byte(in));
        judge(&c, "device against host reader", out, lse, 1.5 * bound_of(&c));
    }
    free(out);
    free(lse);
    ref_free(&c);
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
    fuzz_bytes in = {data, bytes};
    try_decode(&in);
    return 0;
}
