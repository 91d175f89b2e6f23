// test_host.c - the host reader, merge, combine and writers against fp64 and against each
// reported fault that concerns them. Case ids are those of the list of known faults.
//
//     gcc -std=c99 -O2 -I.. test_host.c -lcmocka -lm -lpthread

#define _DEFAULT_SOURCE // mmap's MAP_ANONYMOUS and MAP_NORESERVE

#define KIMI_MLA_IMPLEMENTATION
#define KIMI_MLA_NO_GPU
#include "kimi_mla.h"

#include "reference.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <sys/mman.h>

#include <cmocka.h>

// The bounds of a BF16 output that every reader has to keep.
#define BOUND_EXACT 2e-3
#define BOUND_E4M3_QUERY 3e-3
#define BOUND_BF16_PARTIALS 3e-3 // two roundings of about 1.7e-3 that do not add up linearly
#define BOUND_LSE 3e-4
#define BOUND_VECTOR 4e-3        // any one vector
// And what fp32 arithmetic does far better than: shows a weight rounded to BF16, for example.
#define BOUND_FP32 1e-5

// =============================================================================
// Helpers
// =============================================================================

static uint64_t address_of(const void* pointer) { return (uint64_t)(uintptr_t)pointer; }

static void build(ref_case* c) { assert_int_equal(ref_build(c, NULL), KMLA_OK); }

static void plan_again(ref_case* c) { assert_int_equal(ref_plan(c, NULL), KMLA_OK); }

// A case of `requests` requests of one row each, with one length for all.
static ref_case simple_case(int32_t requests, int32_t heads, int32_t capacity,
                            const int32_t* lengths) {
    ref_case c;
    memset(&c, 0, sizeof(c));
    c.seed = 1;
    c.shape.requests = requests;
    c.shape.heads = heads;
    c.shape.capacity_tokens = capacity;
    c.shape.splits = 1;
    c.lengths = lengths;
    return c;
}

static void decode_with(ref_case* c, const kmla_parallel* parallel) {
    kmla_error error;
    ref_clear(c);
    const kmla_status status = kmla_host_decode(&c->plan, &c->args, parallel, &error);
    if (status != KMLA_OK) {
        fail_msg("%s", error.message);
    }
    assert_true(ref_untouched(c));
}

static void decode(ref_case* c) { decode_with(c, NULL); }

// One vector's outputs.
static const uint8_t* out_of(const ref_case* c, int32_t row, int32_t head) {
    const size_t index = (size_t)row * (size_t)c->stored_heads + (size_t)head;
    return c->out.data + index * REF_D * (c->out_type == KMLA_FP32 ? 4 : 2);
}

static double out_at(const ref_case* c, int32_t row, int32_t head, int32_t d) {
    return ref_element(out_of(c, row, head), c->out_type, d);
}

static double lse_at(const ref_case* c, int32_t row, int32_t head) {
    return ref_float_at(c->lse.data + ((size_t)row * (size_t)c->stored_heads + (size_t)head) * 4);
}

// Vectors of two cases with the same bits, in out and lse.
static void assert_same_vector(const ref_case* a, int32_t row_a, int32_t head_a,
                               const ref_case* b, int32_t row_b, int32_t head_b) {
    assert_int_equal(a->out_type, b->out_type);
    const double lse_a = lse_at(a, row_a, head_a);
    const double lse_b = lse_at(b, row_b, head_b);
    assert_memory_equal(out_of(a, row_a, head_a), out_of(b, row_b, head_b),
                        REF_D * (a->out_type == KMLA_FP32 ? 4 : 2));
    assert_memory_equal(&lse_a, &lse_b, sizeof(lse_a));
}

// The outputs of a case, kept for a comparison after another decode.
typedef struct kept_outputs {
    ref_buffer out;
    ref_buffer lse;
} kept_outputs;

static kept_outputs keep_outputs(const ref_case* c) {
    kept_outputs kept;
    kept.out = ref_buffer_make(c->out.bytes, 0);
    kept.lse = ref_buffer_make(c->lse.bytes, 0);
    memcpy(kept.out.data, c->out.data, c->out.bytes);
    memcpy(kept.lse.data, c->lse.data, c->lse.bytes);
    return kept;
}

static void assert_outputs_kept(const ref_case* c, const kept_outputs* kept) {
    assert_memory_equal(c->out.data, kept->out.data, kept->out.bytes);
    assert_memory_equal(c->lse.data, kept->lse.data, kept->lse.bytes);
}

static void free_outputs(kept_outputs* kept) {
    ref_buffer_free(&kept->out);
    ref_buffer_free(&kept->lse);
}

static void assert_near(double value, double right, double tolerance) {
    if (!(fabs(value - right) <= tolerance)) {
        fail_msg("%.9g is not within %g of %.9g", value, tolerance, right);
    }
}

static void assert_at_most(double value, double bound, const char* what) {
    if (!(value <= bound)) {
        fail_msg("%s: %.4g is above %.4g", what, value, bound);
    }
}

// Decodes a built case with several splits, modes and partials, and compares each with fp64.
static void check_all_splits(ref_case* c) {
    static const int32_t splits[] = {1, 3, 16};
    const size_t vectors = (size_t)c->plan.shape.rows * (size_t)c->plan.shape.heads;
    double* out = (double*)malloc(vectors * REF_D * sizeof(double));
    double* lse = (double*)malloc(vectors * sizeof(double));
    ref_decode(c, out, lse);
    double one_split = 0.0;
    for (int i = 0; i < 12; i++) {
        c->shape.splits = splits[i / 4];
        c->shape.split_mode = i & 2 ? KMLA_SPLIT_BALANCED : KMLA_SPLIT_STATIC;
        c->shape.partial_type = i & 1 ? KMLA_FP32 : KMLA_BF16;
        plan_again(c);
        decode(c);
        const ref_errors errors = ref_judge(c, out, lse);
        const int rounded_partials = c->shape.splits > 1 && c->shape.partial_type == KMLA_BF16;
        assert_int_equal(errors.wrong, 0);
        assert_at_most(errors.lse, BOUND_FP32, "lse");
        assert_at_most(errors.lse, BOUND_LSE, "lse");
        assert_at_most(errors.worst_vector, BOUND_VECTOR, "worst vector");
        if (rounded_partials) {
            assert_at_most(errors.out, BOUND_BF16_PARTIALS, "BF16 partials");
        } else if (c->out_type == KMLA_FP32) {
            assert_at_most(errors.out, BOUND_FP32, "FP32 output");
        } else {
            const double bound =
                c->plan.shape.mode == KMLA_MODE_EXACT ? BOUND_EXACT : BOUND_E4M3_QUERY;
            assert_at_most(errors.out, ref_bound(&errors, bound), "BF16 output");
        }
        if (i == 0) {
            one_split = errors.out;
        } else if (c->shape.splits > 1 && !rounded_partials && c->out_type == KMLA_BF16) {
            assert_at_most(errors.out, one_split * 1.05, "FP32 partials, against one split");
        }
    }
    free(out);
    free(lse);
}

// =============================================================================
// Formats
// =============================================================================

static void fp_04_codes_survive_a_round_trip(void** state) {
    (void)state;
    for (int code = 0; code < 256; code++) {
        const float value = kmla_e4m3_to_float((uint8_t)code);
        const double right = ref_e4m3((uint8_t)code);
        if (isnan(right)) {
            assert_true(isnan(value));
            assert_int_equal(kmla_float_to_e4m3(value) & 0x7f, 0x7f);
        } else {
            assert_true((double)value == right);
            assert_int_equal(kmla_float_to_e4m3(value), code);
        }
    }
}

static void fp_03_codes_are_rounded_to_even_and_saturate(void** state) {
    (void)state;
    const float tiny = 0.0009765625f; // 2^-10: half of the least code, a tie
    const float values[10] = {448.0f,  449.0f, 464.0f,         465.0f,      1000.0f,
                              -1000.0f, tiny,  1.0001f * tiny, 3.0f * tiny, NAN};
    const uint8_t codes[10] = {0x7e, 0x7e, 0x7e, 0x7e, 0x7e, 0xfe, 0x00, 0x01, 0x02, 0x7f};
    for (int i = 0; i < 10; i++) {
        assert_int_equal(kmla_float_to_e4m3(values[i]), codes[i]);
    }
    assert_int_equal(kmla_float_to_e4m3(INFINITY), 0x7e);
    assert_int_equal(kmla_float_to_e4m3(-INFINITY), 0xfe);
    // Their neighbours: every midpoint of two codes, and the floats on both sides of it.
    for (int code = 0; code < 0x7e; code++) {
        const double middle = (ref_e4m3((uint8_t)code) + ref_e4m3((uint8_t)(code + 1))) / 2;
        const float around[3] = {nextafterf((float)middle, 0.0f), (float)middle,
                                 nextafterf((float)middle, 1000.0f)};
        for (int i = 0; i < 3; i++) {
            assert_int_equal(kmla_float_to_e4m3(around[i]), ref_to_e4m3(around[i]));
            assert_int_equal(kmla_float_to_e4m3(-around[i]), ref_to_e4m3(-around[i]));
        }
    }
}

// A case with one token a row whose record the test writes, read by a query of zeros.
static ref_case one_token_case(int32_t kv_format) {
    static const int32_t one = 1;
    ref_case c = simple_case(1, 1, 1, &one);
    c.shape.kv_format = kv_format;
    c.shape.page_tokens = 1;
    c.out_type = KMLA_FP32;
    build(&c);
    memset(c.query.data, 0, c.query.bytes);
    return c;
}

static void fp_01_scales_are_used_as_they_are(void** state) {
    (void)state;
    static const float scales[4] = {0.75f, 0.66964287f, 0.0f, 3.0f};
    static const double right[4] = {336.0, 300.0, 0.0, 1344.0};
    ref_case c = one_token_case(KMLA_KV_PACKED);
    uint8_t* record = ref_token_record(&c, 0, 0);
    memset(record, 0, 656);
    memset(record, 0x7e, 512);
    for (int group = 0; group < 4; group++) {
        ref_put_group_scale(record, group, scales[group]);
    }
    decode(&c);
    for (int d = 0; d < REF_D; d++) {
        assert_near(out_at(&c, 0, 0, d), right[d / 128], 2e-5);
    }
    ref_free(&c);

    c = one_token_case(KMLA_KV_E4M3);
    memset(ref_token_record(&c, 0, 0), 0x7e, 576);
    c.args.kv_scale = 0.75f;
    decode(&c);
    assert_true(out_at(&c, 0, 0, 511) == 336.0);
    ref_free(&c);
}

// Through the whole reader: a lone token comes out as it is stored.
static void fp_04_reader_returns_every_code(void** state) {
    (void)state;
    for (int format = KMLA_KV_PACKED; format <= KMLA_KV_E4M3; format++) {
        ref_case c = one_token_case(format);
        uint8_t* record = ref_token_record(&c, 0, 0);
        c.args.kv_scale = 1.0f;
        for (int d = 0; d < 576; d++) {
            record[d] = (uint8_t)(d % 128 == 0x7f ? 0 : d % 256);
        }
        if (format == KMLA_KV_PACKED) {
            memset(record + 512, 0, 144);
            for (int group = 0; group < 4; group++) {
                ref_put_group_scale(record, group, 1.0f);
            }
        }
        decode(&c);
        for (int d = 0; d < REF_D; d++) {
            assert_true(out_at(&c, 0, 0, d) == ref_e4m3(record[d]));
        }
        record[300] = 0xff; // one NaN code, and the vector is NaN
        decode(&c);
        assert_true(isnan(out_at(&c, 0, 0, 0)) && isnan(out_at(&c, 0, 0, 511)));
        assert_true(isnan(lse_at(&c, 0, 0)));
        ref_free(&c);
    }
}

// =============================================================================
// Writers
// =============================================================================

enum { WRITE_TOKENS = 12, WRITE_STRIDE = 600 };

// Random sources with rows 600 apart: tiny, huge, zero, NaN and infinite groups among them.
static void fill_source(float* values) {
    ref_random random = {7};
    static const float sizes[6] = {1.0f, 1e-30f, 1e30f, 0.0f, 1e-4f, 1e-41f};
    for (int i = 0; i < WRITE_TOKENS * WRITE_STRIDE; i++) {
        const int group = i / 128;
        values[i] = (float)ref_normal(&random) * sizes[group % 6];
    }
    values[5 * WRITE_STRIDE + 3] = NAN;
    values[6 * WRITE_STRIDE + 3] = INFINITY;
    values[6 * WRITE_STRIDE + 200] = -INFINITY;
    for (int i = 0; i < 128; i++) {
        values[7 * WRITE_STRIDE + 256 + i] = NAN;
    }
}

// The same as BF16, each the nearest; not for rounding tests, only to have BF16 sources.
static void round_source(const float* values, uint16_t* rounded) {
    for (int i = 0; i < WRITE_TOKENS * WRITE_STRIDE; i++) {
        rounded[i] = kmla_float_to_bf16(values[i]);
    }
    rounded[2 * WRITE_STRIDE + 520] = 0x7f81; // a NaN whose payload has to survive
}

static ref_buffer make_source(int32_t type) {
    ref_buffer values = ref_buffer_make(WRITE_TOKENS * WRITE_STRIDE * sizeof(float), 0);
    fill_source((float*)(void*)values.data);
    if (type == KMLA_FP32) {
        return values;
    }
    ref_buffer rounded = ref_buffer_make(WRITE_TOKENS * WRITE_STRIDE * sizeof(uint16_t), 0);
    round_source((const float*)(void*)values.data, (uint16_t*)(void*)rounded.data);
    ref_buffer_free(&values);
    return rounded;
}

// The fp32 scale of a group by the KV rule.
static float right_kv_scale(const float* values, int power_of_two) {
    float maximum = 0.0f;
    for (int i = 0; i < 128; i++) {
        const float magnitude = isnan(values[i])   ? 0.0f
                                : isinf(values[i]) ? FLT_MAX
                                                   : fabsf(values[i]);
        maximum = magnitude > maximum ? magnitude : maximum;
    }
    const float scale = maximum / 448.0f > FLT_MIN ? maximum / 448.0f : FLT_MIN;
    int exponent;
    const float fraction = frexpf(scale, &exponent);
    return !power_of_two ? scale : ldexpf(1.0f, fraction == 0.5f ? exponent - 1 : exponent);
}

static float source_at(const void* source, int32_t type, int64_t index) {
    return (float)ref_element((const uint8_t*)source, type, index);
}

static void right_rope(const void* source, int32_t type, int64_t first, uint8_t* to) {
    for (int d = 0; d < 64; d++) {
        uint16_t bits;
        if (type == KMLA_BF16) {
            memcpy(&bits, (const uint8_t*)source + (first + d) * 2, 2);
        } else {
            bits = ref_to_bf16(source_at(source, type, first + d));
        }
        ref_put_little(to + d * 2, bits, 2);
    }
}

static void right_packed(const void* source, int32_t type, int64_t first, int power_of_two,
                         int query, uint8_t* record) {
    for (int group = 0; group < 4; group++) {
        float values[128];
        for (int d = 0; d < 128; d++) {
            values[d] = source_at(source, type, first + group * 128 + d);
        }
        float scale = right_kv_scale(values, power_of_two);
        if (query) {
            float maximum = 0.0f;
            for (int d = 0; d < 128; d++) {
                const float magnitude = isinf(values[d]) ? FLT_MAX : fabsf(values[d]);
                maximum = magnitude > maximum ? magnitude : maximum;
            }
            scale = (float)ref_query_scale(maximum);
        }
        ref_put_group_scale(record, group, scale);
        for (int d = 0; d < 128; d++) {
            record[group * 128 + d] = ref_to_e4m3((float)(values[d] / scale));
        }
    }
    right_rope(source, type, first + 512, record + 528);
}

static void right_e4m3(const void* source, int32_t type, int64_t first, float scale,
                       uint8_t* record) {
    for (int d = 0; d < 576; d++) {
        record[d] = ref_to_e4m3((float)(source_at(source, type, first + d) / scale));
    }
}

// Every format, source and rule: the records byte for byte, skipped slots and gaps untouched.
static void kv_writer_writes_exactly_its_records(void** state) {
    (void)state;
    // 5 pages of 3: slots below 0, at the pool's end, and ones that 32 bits would wrap to 1 and 0.
    const int64_t slots[WRITE_TOKENS] = {4,  0, 14, -1, 15, 2, 7, 11,
                                         (int64_t)1 << 32 | 1, INT64_MAX, INT64_MIN, 9};
    for (int i = 0; i < 12; i++) {
        const int32_t format = i / 4;
        const int32_t type = i & 1 ? KMLA_FP32 : KMLA_BF16;
        const int32_t rule = i & 2 ? KMLA_SCALE_POWER_OF_TWO : KMLA_SCALE_EXACT;
        ref_buffer source_buffer = make_source(type);
        const void* source = source_buffer.data;
        const int64_t record_bytes = ref_record_bytes(ref_kv_layout(format));
        const int64_t pitch = 3 * record_bytes + 48;
        ref_buffer pool = ref_buffer_make((size_t)(5 * pitch), 0xee);
        ref_buffer right = ref_buffer_make((size_t)(5 * pitch), 0xee);
        for (int token = 0; token < WRITE_TOKENS; token++) {
            if (slots[token] < 0 || slots[token] >= 15) {
                continue;
            }
            uint8_t* record =
                right.data + slots[token] / 3 * pitch + slots[token] % 3 * record_bytes;
            const int64_t first = (int64_t)token * WRITE_STRIDE;
            if (format == KMLA_KV_PACKED) {
                right_packed(source, type, first, rule == KMLA_SCALE_POWER_OF_TWO, 0, record);
            } else if (format == KMLA_KV_E4M3) {
                right_e4m3(source, type, first, 0.3f, record);
            } else {
                for (int part = 0; part < 9; part++) {
                    right_rope(source, type, first + part * 64, record + part * 128);
                }
            }
        }
        kmla_kv_write write;
        kmla_error error;
        memset(&write, 0, sizeof(write));
        write.tokens = WRITE_TOKENS;
        write.kv_format = format;
        write.source_type = type;
        write.scale_rule = format == KMLA_KV_PACKED ? rule : KMLA_SCALE_EXACT;
        write.kv_scale = 0.3f;
        write.page_tokens = 3;
        write.latent = address_of(source);
        write.latent_stride = WRITE_STRIDE;
        write.rope = address_of(source) + 512u * (type == KMLA_FP32 ? 4 : 2);
        write.rope_stride = WRITE_STRIDE;
        write.slots = address_of(slots);
        write.kv = ref_address(&pool);
        write.kv_pages = 5;
        write.page_pitch_bytes = (uint64_t)pitch;
        assert_int_equal(kmla_host_write_kv(&write, &error), KMLA_OK);
        for (size_t byte = 0; byte < pool.bytes; byte++) {
            if (pool.data[byte] != right.data[byte]) {
                fail_msg("format %d type %d rule %d: byte %zu is %02x, not %02x", (int)format,
                         (int)type, (int)rule, byte, pool.data[byte], right.data[byte]);
            }
        }
        assert_true(ref_canary_whole(&pool));
        ref_buffer_free(&pool);
        ref_buffer_free(&right);
        ref_buffer_free(&source_buffer);
    }
}

static void query_writer_writes_exactly_its_records(void** state) {
    (void)state;
    for (int i = 0; i < 6; i++) {
        const int32_t format = i / 2;
        const int32_t type = i & 1 ? KMLA_FP32 : KMLA_BF16;
        ref_buffer source_buffer = make_source(type);
        const void* source = source_buffer.data;
        const int64_t record_bytes = ref_record_bytes(ref_query_layout(format));
        const int64_t row_stride = 5 * record_bytes + 16; // 4 heads, room for 5, and a gap
        ref_buffer query = ref_buffer_make((size_t)(3 * row_stride), 0xee);
        ref_buffer right = ref_buffer_make((size_t)(3 * row_stride), 0xee);
        for (int vector = 0; vector < WRITE_TOKENS; vector++) {
            uint8_t* record = right.data + vector / 4 * row_stride + vector % 4 * record_bytes;
            const int64_t first = (int64_t)vector * WRITE_STRIDE;
            if (format == KMLA_QUERY_PACKED) {
                right_packed(source, type, first, 0, 1, record);
            } else if (format == KMLA_QUERY_E4M3) {
                right_e4m3(source, type, first, 0.3f, record);
            } else {
                for (int part = 0; part < 9; part++) {
                    right_rope(source, type, first + part * 64, record + part * 128);
                }
            }
        }
        kmla_query_write write;
        kmla_error error;
        memset(&write, 0, sizeof(write));
        write.rows = 3;
        write.heads = 4;
        write.query_format = format;
        write.source_type = type;
        write.query_scale = 0.3f;
        write.source = address_of(source);
        write.source_head_stride = WRITE_STRIDE;
        write.source_row_stride = 4 * WRITE_STRIDE;
        write.query = ref_address(&query);
        write.query_head_stride_bytes = record_bytes;
        write.query_row_stride_bytes = row_stride;
        assert_int_equal(kmla_host_write_query(&write, &error), KMLA_OK);
        for (size_t byte = 0; byte < query.bytes; byte++) {
            if (query.data[byte] != right.data[byte]) {
                fail_msg("format %d type %d: byte %zu is %02x, not %02x", (int)format, (int)type,
                         byte, query.data[byte], right.data[byte]);
            }
        }
        assert_true(ref_canary_whole(&query));
        ref_buffer_free(&query);
        ref_buffer_free(&right);
        ref_buffer_free(&source_buffer);
    }
}

// Packs one query whose four groups hold one value each, dense strides; scales and first codes.
static void pack_query(const float* group_values, float* scales, uint8_t* codes) {
    float source[576] = {0};
    uint8_t record[656];
    kmla_query_write write;
    kmla_error error;
    memset(&write, 0, sizeof(write));
    for (int group = 0; group < 4; group++) {
        source[group * 128 + 17] = group_values[group];
    }
    ref_buffer to = ref_buffer_make(656, 0xff);
    ref_buffer from = ref_buffer_make(sizeof(source), 0);
    memcpy(from.data, source, sizeof(source));
    write.rows = 1;
    write.heads = 1;
    write.query_format = KMLA_QUERY_PACKED;
    write.source_type = KMLA_FP32;
    write.source = ref_address(&from);
    write.query = ref_address(&to);
    assert_int_equal(kmla_host_write_query(&write, &error), KMLA_OK);
    memcpy(record, to.data, 656);
    for (int group = 0; group < 4; group++) {
        scales[group] = ref_group_scale(record, group);
        codes[group] = record[group * 128 + 17];
    }
    ref_buffer_free(&to);
    ref_buffer_free(&from);
}

static void query_scales_are_powers_of_two_rounded_up(void** state) {
    (void)state;
    const float first[4] = {336.0f, 224.0f, -224.0001f, 448.0f};
    const float second[4] = {5e-5f, 0.0f, 1e-4f, FLT_MAX};
    float scales[4];
    uint8_t codes[4];
    pack_query(first, scales, codes);
    assert_true(scales[0] == 1.0f && codes[0] == ref_to_e4m3(336.0));
    assert_true(scales[1] == 0.5f && codes[1] == 0x7e);
    assert_true(scales[2] == 1.0f && codes[2] == ref_to_e4m3(-224.0));
    assert_true(scales[3] == 1.0f && codes[3] == 0x7e);
    // The floor of 1e-4 is on the quotient, and 2^-13 is the next power of two.
    pack_query(second, scales, codes);
    assert_true(scales[0] == ldexpf(1.0f, -13) && codes[0] == 0x2d);
    assert_true(scales[1] == ldexpf(1.0f, -13) && codes[1] == 0);
    assert_true(scales[2] == ldexpf(1.0f, -13) && codes[2] == ref_to_e4m3(0.8192));
    assert_true(scales[3] == ldexpf(1.0f, 120) && codes[3] == ref_to_e4m3(256.0));
}

static void pg_06_pages_are_found_by_their_pitch(void** state) {
    (void)state;
    const int64_t slots[1] = {64};
    ref_buffer pool = ref_buffer_make(2 * 45056, 0xff);
    ref_buffer source = ref_buffer_make(576 * 4, 0);
    kmla_kv_write write;
    kmla_error error;
    for (int d = 0; d < 576; d++) {
        ((float*)(void*)source.data)[d] = 448.0f;
    }
    memset(&write, 0, sizeof(write));
    write.tokens = 1;
    write.source_type = KMLA_FP32;
    write.latent = ref_address(&source);
    write.rope = ref_address(&source) + 512 * 4;
    write.slots = address_of(slots);
    write.kv = ref_address(&pool);
    write.kv_pages = 2;
    write.page_pitch_bytes = 45056;
    assert_int_equal(kmla_host_write_kv(&write, &error), KMLA_OK);
    assert_true(ref_all_bytes(pool.data, 45056, 0xff));
    assert_true(ref_all_bytes(pool.data + 45056, 512, 0x7e));
    assert_true(ref_all_bytes(pool.data + 45056 + 656, 45056 - 656, 0xff));
    ref_buffer_free(&pool);
    ref_buffer_free(&source);

    static const int32_t lengths[2] = {200, 77};
    ref_case c = simple_case(2, 5, 256, lengths);
    c.pitch_extra_bytes = 45056 - 64 * 656;
    build(&c);
    check_all_splits(&c);
    ref_free(&c);
}

// =============================================================================
// Combine
// =============================================================================

// Combines up to three parts of one vector whose payloads hold one number each.
static void combine_numbers(int32_t parts, const float* lse, const float* out, double* got_out,
                            double* got_lse) {
    ref_buffer payload = ref_buffer_make((size_t)parts * REF_D * 4, 0);
    ref_buffer part_lse = ref_buffer_make((size_t)parts * 4, 0);
    ref_buffer to = ref_buffer_make(REF_D * 4, 0xff);
    ref_buffer to_lse = ref_buffer_make(4, 0xff);
    kmla_combine combine;
    kmla_error error;
    for (int32_t i = 0; i < parts * REF_D; i++) {
        memcpy(payload.data + i * 4, &out[i / REF_D], 4);
    }
    memcpy(part_lse.data, lse, (size_t)parts * 4);
    memset(&combine, 0, sizeof(combine));
    combine.parts = parts;
    combine.rows = 1;
    combine.heads = 1;
    combine.part_type = KMLA_FP32;
    combine.part_out = ref_address(&payload);
    combine.part_lse = ref_address(&part_lse);
    combine.out = ref_address(&to);
    combine.out_type = KMLA_FP32;
    combine.lse = ref_address(&to_lse);
    assert_int_equal(kmla_host_combine(&combine, &error), KMLA_OK);
    *got_out = ref_float_at(to.data);
    *got_lse = ref_float_at(to_lse.data);
    for (int d = 0; d < REF_D; d++) {
        assert_memory_equal(to.data + d * 4, to.data, 4);
    }
    assert_true(ref_canary_whole(&to) && ref_canary_whole(&to_lse));
    ref_buffer_free(&payload);
    ref_buffer_free(&part_lse);
    ref_buffer_free(&to);
    ref_buffer_free(&to_lse);
}

static void lc_01_empty_shards_are_not_read(void** state) {
    (void)state;
    const float payloads[3] = {5.0f, NAN, INFINITY};
    const float empties[3] = {-INFINITY, INFINITY, NAN};
    for (int i = 0; i < 9; i++) {
        const float lse[2] = {logf(8.0f), empties[i / 3]};
        const float out[2] = {9.0f, payloads[i % 3]};
        const float lse_turned[2] = {lse[1], lse[0]};
        const float out_turned[2] = {out[1], out[0]};
        double got_out, got_lse;
        combine_numbers(2, lse, out, &got_out, &got_lse);
        assert_true(got_out == 9.0);
        assert_near(got_lse, 2.0794415, 1e-6);
        combine_numbers(2, lse_turned, out_turned, &got_out, &got_lse);
        assert_true(got_out == 9.0);
        assert_near(got_lse, 2.0794415, 1e-6);
    }
}

static void lc_02_logarithms_are_natural(void** state) {
    (void)state;
    const float lse[2] = {logf(2.0f), logf(8.0f)};
    const float out[2] = {0.0f, 10.0f};
    double got_out, got_lse;
    combine_numbers(2, lse, out, &got_out, &got_lse);
    assert_near(got_out, 8.0, 1e-6);
    assert_near(got_lse, 2.302585, 1e-6);
}

static void lc_03_empty_states_combine_to_an_empty_state(void** state) {
    (void)state;
    const float lse[3] = {-INFINITY, -INFINITY, 0.0f};
    const float out[3] = {NAN, 7.0f, 3.0f};
    double got_out, got_lse;
    combine_numbers(2, lse, out, &got_out, &got_lse);
    assert_true(got_out == 0.0 && got_lse == -(double)INFINITY);
    combine_numbers(3, lse, out, &got_out, &got_lse);
    assert_true(got_out == 3.0 && got_lse == 0.0);
}

static void lc_06_payloads_of_weight_zero_are_not_read(void** state) {
    (void)state;
    const float lse[3] = {0.0f, -INFINITY, -INFINITY};
    const float far_apart[3] = {0.0f, -200.0f, -1e30f}; // exp of it is 0 too
    const float out[3] = {3.0f, NAN, INFINITY};
    double got_out, got_lse;
    combine_numbers(3, lse, out, &got_out, &got_lse);
    assert_true(got_out == 3.0 && got_lse == 0.0);
    combine_numbers(3, far_apart, out, &got_out, &got_lse);
    assert_true(got_out == 3.0 && got_lse == 0.0);
}

static void sk_04_combine_rounds_only_what_is_stored(void** state) {
    (void)state;
    // Equal weights. FP32 parts: the mean 1.0048828 rounds to 1.0078125 in BF16. BF16 parts are
    // 1.0 and 1.0078125, whose mean is a tie that goes to the even 1.0.
    static const float values[2] = {1.0029296875f, 1.0068359375f};
    for (int type = KMLA_BF16; type <= KMLA_FP32; type++) {
        ref_buffer payload = ref_buffer_make(2 * REF_D * 4, 0);
        ref_buffer lse = ref_buffer_make(8, 0);
        ref_buffer out = ref_buffer_make(REF_D * 2, 0xff);
        kmla_combine combine;
        kmla_error error;
        for (int i = 0; i < 2 * REF_D; i++) {
            const uint16_t bits = ref_to_bf16(values[i / REF_D]);
            if (type == KMLA_FP32) {
                memcpy(payload.data + i * 4, &values[i / REF_D], 4);
            } else {
                memcpy(payload.data + i * 2, &bits, 2);
            }
        }
        memset(&combine, 0, sizeof(combine));
        combine.parts = 2;
        combine.rows = 1;
        combine.heads = 1;
        combine.part_type = type;
        combine.part_out = ref_address(&payload);
        combine.part_lse = ref_address(&lse);
        combine.out = ref_address(&out);
        assert_int_equal(kmla_host_combine(&combine, &error), KMLA_OK); // and no lse wanted
        for (int d = 0; d < REF_D; d++) {
            assert_true(ref_bf16_at(out.data + d * 2) == (type == KMLA_FP32 ? 1.0078125 : 1.0));
        }
        assert_true(ref_canary_whole(&out));
        ref_buffer_free(&payload);
        ref_buffer_free(&lse);
        ref_buffer_free(&out);
    }
}

// 66 heads stored 80 wide, each input and output with its own strides: element (1,0) is at 80.
static void combine_honours_strides(void** state) {
    (void)state;
    enum { PARTS = 3, ROWS = 2, HEADS = 66, WIDE = 80, LSE_WIDE = 70, OUT_WIDE = 67 };
    ref_random random = {11};
    ref_buffer payload = ref_buffer_make((size_t)PARTS * ROWS * WIDE * REF_D * 4, 0xff);
    ref_buffer part_lse = ref_buffer_make(((size_t)PARTS * ROWS * LSE_WIDE + 5) * 4, 0xff);
    ref_buffer out = ref_buffer_make((size_t)ROWS * OUT_WIDE * REF_D * 4, 0xff);
    ref_buffer lse = ref_buffer_make((size_t)ROWS * WIDE * 2 * 4, 0xff);
    for (int i = 0; i < PARTS * ROWS * HEADS; i++) {
        const int part = i / (ROWS * HEADS);
        const int row = i / HEADS % ROWS;
        const int head = i % HEADS;
        const float value = head % 7 == part ? -INFINITY : (float)(3 * ref_normal(&random));
        const size_t vector = (size_t)((part * ROWS + row) * WIDE + head);
        memcpy(part_lse.data + ((part * ROWS + row) * LSE_WIDE + head) * 4, &value, 4);
        for (int d = 0; d < REF_D && !isinf(value); d++) {
            const float element = (float)ref_normal(&random);
            memcpy(payload.data + (vector * REF_D + (size_t)d) * 4, &element, 4);
        }
    }
    kmla_combine combine;
    kmla_error error;
    memset(&combine, 0, sizeof(combine));
    combine.parts = PARTS;
    combine.rows = ROWS;
    combine.heads = HEADS;
    combine.part_type = KMLA_FP32;
    combine.part_out = ref_address(&payload);
    combine.part_row_stride = WIDE * REF_D;
    combine.part_lse = ref_address(&part_lse);
    combine.part_lse_row_stride = LSE_WIDE;
    combine.out = ref_address(&out);
    combine.out_row_stride = OUT_WIDE * REF_D;
    combine.out_type = KMLA_FP32;
    combine.lse = ref_address(&lse);
    combine.lse_head_stride = 2;
    combine.lse_row_stride = WIDE * 2;
    assert_int_equal(kmla_host_combine(&combine, &error), KMLA_OK);
    for (int row = 0; row < ROWS; row++) {
        for (int head = 0; head < HEADS; head++) {
            double values[PARTS][REF_D];
            const double* payloads[PARTS];
            double lses[PARTS];
            double right[REF_D];
            double right_lse;
            for (int part = 0; part < PARTS; part++) {
                const size_t vector = (size_t)((part * ROWS + row) * WIDE + head);
                for (int d = 0; d < REF_D; d++) {
                    values[part][d] =
                        ref_float_at(payload.data + (vector * REF_D + (size_t)d) * 4);
                }
                payloads[part] = values[part];
                lses[part] =
                    ref_float_at(part_lse.data + ((part * ROWS + row) * LSE_WIDE + head) * 4);
            }
            ref_combine(PARTS, lses, payloads, right, &right_lse);
            const uint8_t* got = out.data + (size_t)(row * OUT_WIDE + head) * REF_D * 4;
            assert_at_most(ref_relative_error(got, KMLA_FP32, right), 1e-6, "combined out");
            assert_near(ref_float_at(lse.data + (row * WIDE + head) * 2 * 4), right_lse, 1e-5);
        }
        const size_t gap = (size_t)(row * OUT_WIDE + HEADS) * REF_D * 4;
        assert_true(ref_all_bytes(out.data + gap, REF_D * 4, 0xff));
        for (int i = 0; i < WIDE * 2; i++) {
            if (i % 2 == 1 || i >= HEADS * 2) {
                assert_true(ref_all_bytes(lse.data + (row * WIDE * 2 + i) * 4, 4, 0xff));
            }
        }
    }
    assert_true(ref_canary_whole(&out) && ref_canary_whole(&lse));
    ref_buffer_free(&payload);
    ref_buffer_free(&part_lse);
    ref_buffer_free(&out);
    ref_buffer_free(&lse);
}

// =============================================================================
// Reader: accuracy
// =============================================================================

// Every KV format, query format and mode, over lengths around the borders of chunks.
static void accuracy_of_every_format(void** state) {
    (void)state;
    static const int32_t lengths[12] = {0, 1, 63, 64, 65, 130, 191, 192, 193, 2, 128, 257};
    static const double sigmas[3] = {0.2, 1.0, 4.0};
    for (int i = 0; i < 36; i++) {
        ref_case c = simple_case(6, 5, 257, lengths);
        c.seed = (uint64_t)i + 100;
        c.shape.rows_per_request = 2;
        c.shape.page_tokens = 16;
        c.shape.kv_format = i % 3;
        c.shape.query_format = i / 3 % 3;
        c.shape.mode = i / 9 % 2;
        c.out_type = i / 18;
        c.logit_sigma = sigmas[i % 3 == 0 ? i / 3 % 3 : (i + 1) % 3];
        build(&c);
        check_all_splits(&c);
        ref_free(&c);
    }
}

// One long row of many heads: the bounds hold where sums are long.
static void accuracy_of_a_long_row(void** state) {
    (void)state;
    static const int32_t length = 2500;
    for (int format = 0; format < 3; format++) {
        ref_case c = simple_case(1, 12, 3000, &length);
        c.shape.kv_format = format;
        c.logit_sigma = 4.0;
        build(&c);
        check_all_splits(&c);
        ref_free(&c);
    }
}

// 131,072 tokens through one split: one of weight 1, the others of weight 0.3 each. A plain fp32
// running total would lose up to 0.6 percent of each.
static void long_sums_do_not_drift(void** state) {
    (void)state;
    enum { LONG = 131072 };
    static int32_t slots[LONG];
    static const int32_t length = LONG;
    static const int32_t built_length = 2; // the long list names the same two records again
    ref_case c = simple_case(1, 1, LONG, &built_length);
    c.shape.slot_list = 1;
    c.shape.page_tokens = 1;
    c.shape.kv_format = KMLA_KV_BF16;
    c.out_type = KMLA_FP32;
    c.scale = logf(0.3f) * -1.0f;
    build(&c);
    for (int token = 0; token < LONG; token++) {
        slots[token] = token > 0;
    }
    c.args.slot_list = address_of(slots);
    memcpy(c.length_buffer.data, &length, 4);
    memset(c.pool.data, 0, 2 * 1152);
    memset(c.query.data, 0, 1152);
    for (int d = 0; d < 2; d++) { // the first token: latent 1 in dim 0 and score -ln 0.3
        static const uint8_t one[2] = {0x80, 0x3f};
        memcpy(c.pool.data + d * 1024, one, 2);
        memcpy(c.query.data + 1024, one, 2);
    }
    memcpy(c.pool.data + 1152 + 2, c.pool.data, 2); // the others: latent 1 in dim 1, score 0
    decode(&c);
    const double total = 1.0 + (LONG - 1) * 0.3;
    assert_near(out_at(&c, 0, 0, 0) * total, 1.0, 1e-4);
    assert_near(out_at(&c, 0, 0, 1), 1.0 - 1.0 / total, 1e-6);
    assert_near(lse_at(&c, 0, 0), log(total / 0.3), 1e-4);
    ref_free(&c);
}

static void page_sizes_and_pitches(void** state) {
    (void)state;
    static const int32_t sizes[5] = {1, 2, 16, 63, 64};
    static const int32_t lengths[3] = {100, 1, 64};
    for (int i = 0; i < 15; i++) {
        ref_case c = simple_case(3, 2, 128, lengths);
        c.shape.kv_format = i / 5;
        c.shape.page_tokens = sizes[i % 5];
        c.pitch_extra_bytes = 16 * 3;
        build(&c);
        check_all_splits(&c);
        ref_free(&c);
    }
}

static void head_counts(void** state) {
    (void)state;
    static const int32_t heads[4] = {1, 5, 12, 99};
    static const int32_t lengths[6] = {70, 71, 72, 0, 1, 2};
    for (int i = 0; i < 4; i++) {
        ref_case c = simple_case(2, heads[i], 80, lengths);
        c.shape.rows_per_request = 3;
        c.stored_heads = heads[i] + 3;
        build(&c);
        check_all_splits(&c);
        ref_free(&c);
    }
}

static void ht_03_few_heads_and_many_requests(void** state) {
    (void)state;
    int32_t lengths[30];
    for (int i = 0; i < 30; i++) {
        lengths[i] = 1 + i * 4095 / 29;
    }
    ref_case c = simple_case(30, 4, 4096, lengths);
    c.shape.splits = 4;
    build(&c);
    decode(&c);
    const ref_errors errors = ref_check(&c);
    assert_int_equal(errors.wrong, 0);
    assert_at_most(errors.out, BOUND_BF16_PARTIALS, "out");
    assert_at_most(errors.worst_vector, BOUND_VECTOR, "worst vector");
    assert_at_most(errors.lse, BOUND_FP32, "lse");
    ref_free(&c);
}

// Ragged requests, one of them empty, dead rows at the end, negative lengths.
static void ragged_and_dead_rows(void** state) {
    (void)state;
    static const int32_t offsets[6] = {0, 1, 1, 5, 7, 7};
    static const int32_t lengths[9] = {100, 65, -5, 30, 128, INT32_MIN, 64, 99, 99};
    ref_case c = simple_case(5, 3, 130, lengths);
    c.shape.rows = 9;
    c.shape.rows_per_request = 4;
    c.shape.ragged = 1;
    c.row_offsets = offsets;
    build(&c);
    check_all_splits(&c);
    for (int head = 0; head < 3; head++) { // rows 2, 5: no length; 7, 8: no request
        static const int32_t dead[4] = {2, 5, 7, 8};
        for (int i = 0; i < 4; i++) {
            assert_true(ref_all_bytes(out_of(&c, dead[i], head), REF_D * 2, 0));
            assert_true(lse_at(&c, dead[i], head) == -(double)INFINITY);
        }
        assert_true(lse_at(&c, 6, head) > 0.0);
    }
    ref_free(&c);
}

static void holes_in_tables_are_no_tokens(void** state) {
    (void)state;
    static const int32_t lengths[4] = {100, 1, 128, 64};
    for (int i = 0; i < 6; i++) {
        ref_case c = simple_case(2, 3, 130, lengths);
        c.seed = (uint64_t)i;
        c.shape.rows_per_request = 2;
        c.shape.page_tokens = 4;
        c.shape.kv_format = i % 3;
        c.shape.slot_list = i / 3;
        c.hole_share = i == 5 ? 1.0 : 0.3; // at last no token at all
        build(&c);
        check_all_splits(&c);
        assert_true(i != 5 || lse_at(&c, 0, 0) == -(double)INFINITY);
        ref_free(&c);
    }
}

// Per-request lengths: causal and draft rows, windows, DCP shards, lengths past the capacity.
static void length_rules(void** state) {
    (void)state;
    static const int32_t offsets[6] = {0, 4, 6, 7, 7, 11};
    static const int32_t lengths[5] = {1, 150, 333, 5, 1400};
    static const int32_t ranks[4] = {1, 2, 4, 9};
    static const int32_t interleaves[4] = {1, 64, 2, 1};
    static const int32_t windows[3] = {0, 3, 100};
    for (int i = 0; i < 24; i++) {
        ref_case c = simple_case(5, 2, 160, lengths);
        c.seed = (uint64_t)i;
        c.shape.rows = 12;
        c.shape.rows_per_request = 4;
        c.shape.ragged = 1;
        c.shape.page_tokens = 16;
        c.shape.lengths.lengths_kind = KMLA_LENGTHS_PER_REQUEST;
        c.shape.lengths.rows_kind = i % 2;
        c.shape.lengths.window_tokens = windows[i / 2 % 3];
        c.shape.lengths.dcp.ranks = ranks[i / 6];
        c.shape.lengths.dcp.rank = ranks[i / 6] - 1;
        c.shape.lengths.dcp.interleave = interleaves[i / 6];
        c.row_offsets = offsets;
        build(&c);
        check_all_splits(&c);
        ref_free(&c);
    }
    // Causal rows of a request that is shorter than they are: 0, 0, 0, 1.
    ref_case c = simple_case(1, 1, 64, lengths);
    c.shape.rows_per_request = 4;
    c.shape.lengths.lengths_kind = KMLA_LENGTHS_PER_REQUEST;
    build(&c);
    decode(&c);
    assert_true(lse_at(&c, 2, 0) == -(double)INFINITY && isfinite(lse_at(&c, 3, 0)));
    ref_free(&c);
}

// A row's own length is clamped to the capacity before its window is taken.
static void lengths_past_the_capacity_keep_their_window(void** state) {
    (void)state;
    static const int32_t clamped[2] = {130, 90};
    static const int32_t beyond[2] = {INT32_MAX, 90};
    ref_case a = simple_case(2, 2, 130, clamped);
    ref_case b = simple_case(2, 2, 130, beyond);
    a.shape.lengths.window_tokens = b.shape.lengths.window_tokens = 50;
    build(&a);
    build(&b);
    check_all_splits(&b);
    decode(&a);
    b.shape = a.shape;
    plan_again(&b);
    decode(&b);
    assert_same_vector(&a, 0, 1, &b, 0, 1);
    assert_true(isfinite(lse_at(&b, 0, 0)));
    ref_free(&a);
    ref_free(&b);
}

// =============================================================================
// Reader: bits that must not change
// =============================================================================

static void ht_02_padding_heads_change_no_bit(void** state) {
    (void)state;
    static const int32_t lengths[2] = {150, 64};
    static const int32_t stored[3] = {99, 104, 112};
    for (int format = 0; format < 3; format++) {
        ref_case cases[3];
        for (int i = 0; i < 3; i++) { // the caller's 99 heads in buffers for more, NaN there
            cases[i] = simple_case(2, 99, 160, lengths);
            cases[i].shape.kv_format = format;
            cases[i].shape.splits = 2;
            cases[i].stored_heads = stored[i];
            build(&cases[i]);
            decode(&cases[i]);
            for (int head = 0; head < 99; head++) {
                assert_same_vector(&cases[0], 1, head, &cases[i], 1, head);
                assert_same_vector(&cases[0], 0, head, &cases[i], 0, head);
            }
        }
        const ref_errors errors = ref_check(&cases[0]);
        assert_int_equal(errors.wrong, 0);
        assert_at_most(errors.out, BOUND_BF16_PARTIALS, "out");
        for (int fill = 0; fill < 2; fill++) { // all 112 read, the last 13 zeros, then NaN
            for (int row = 0; row < 2; row++) {
                memset(cases[2].query.data + (size_t)(row * 112 + 99) * 1152, fill ? 0xff : 0,
                       13 * 1152);
            }
            cases[2].shape.heads = 112;
            plan_again(&cases[2]);
            decode(&cases[2]);
            for (int head = 0; head < 99; head++) {
                assert_same_vector(&cases[0], 0, head, &cases[2], 0, head);
                assert_same_vector(&cases[0], 1, head, &cases[2], 1, head);
            }
        }
        for (int i = 0; i < 3; i++) {
            ref_free(&cases[i]);
        }
    }
}

// 640 keys of score 0 and value 0, but one of score ln 639 and value 1.
static void sk_03_late_maximum_rescales_what_came_before(void** state) {
    (void)state;
    static const int32_t lengths[4] = {640, 640, 640, 640};
    static const int32_t places[5] = {639, 0, 63, 64, 320};
    for (int i = 0; i < 60; i++) {
        ref_case c = simple_case(1, 3, 640, lengths);
        c.shape.rows_per_request = i / 5 % 2 == 0 ? 1 : 4;
        c.shape.splits = i / 10 % 2 == 0 ? 1 : 10;
        c.shape.kv_format = i / 20;
        c.shape.partial_type = KMLA_FP32;
        c.out_type = KMLA_FP32;
        c.scale = logf(639.0f);
        build(&c);
        c.args.kv_scale = 1.0f;
        for (int token = 0; token < 640; token++) {
            uint8_t* record = ref_token_record(&c, 0, token);
            const int64_t bytes = ref_record_bytes(ref_kv_layout(c.shape.kv_format));
            memset(record, 0, (size_t)bytes);
            for (int group = 0; group < 4 && c.shape.kv_format == KMLA_KV_PACKED; group++) {
                ref_put_group_scale(record, group, 1.0f);
            }
            for (int d = 0; token == places[i % 5] && d < 513; d++) { // latent and one lane
                const int is_bf16 = c.shape.kv_format == KMLA_KV_BF16 ||
                                    (c.shape.kv_format == KMLA_KV_PACKED && d >= 512);
                const int base = c.shape.kv_format == KMLA_KV_PACKED && d >= 512 ? 528 - 1024 : 0;
                if (is_bf16) {
                    record[base + d * 2] = 0x80; // 0x3f80 is 1
                    record[base + d * 2 + 1] = 0x3f;
                } else {
                    record[d] = 0x38; // 1
                }
            }
        }
        memset(c.query.data, 0, c.query.bytes);
        for (int vector = 0; vector < c.plan.shape.rows * 3; vector++) {
            c.query.data[vector * 1152 + 1024] = 0x80;
            c.query.data[vector * 1152 + 1025] = 0x3f;
        }
        decode(&c);
        for (int row = 0; row < c.plan.shape.rows; row++) {
            for (int d = 0; d < REF_D; d++) {
                assert_near(out_at(&c, row, 2, d), 0.5, 1e-6);
            }
            assert_near(lse_at(&c, row, 0), 7.1530516, 2e-6);
        }
        ref_free(&c);
    }
}

static void sk_04_partials_are_rounded_as_the_plan_says(void** state) {
    (void)state;
    static const int32_t length = 128;
    for (int type = KMLA_BF16; type <= KMLA_FP32; type++) {
        ref_case c = simple_case(1, 1, 128, &length);
        c.shape.splits = 2;
        c.shape.partial_type = type;
        build(&c);
        memset(c.query.data, 0, c.query.bytes); // equal scores
        for (int token = 0; token < 128; token++) {
            uint8_t* record = ref_token_record(&c, 0, token);
            const float value = token < 64 ? 1.0029296875f : 1.0068359375f;
            memset(record, 0x38, 512); // 1, times the scale
            for (int group = 0; group < 4; group++) {
                ref_put_group_scale(record, group, value);
            }
        }
        decode(&c);
        for (int d = 0; d < REF_D; d++) {
            assert_true(out_at(&c, 0, 0, d) == (type == KMLA_FP32 ? 1.0078125 : 1.0));
        }
        ref_free(&c);
    }
}

// SK-06: one row alone, as a row of 64 requests, and with other rows of its request.
static void sk_06_neighbours_change_no_bit(void** state) {
    (void)state;
    int32_t lengths[256];
    for (int i = 0; i < 256; i++) {
        lengths[i] = i % 64 == 0 ? 200 : (i * 37) % 256;
    }
    for (int i = 0; i < 6; i++) {
        ref_case many = simple_case(64, 3, 256, lengths);
        many.shape.rows_per_request = i % 2 == 0 ? 1 : 4;
        many.shape.splits = 3;
        many.shape.kv_format = i / 2;
        build(&many);
        decode(&many);
        ref_case alone = simple_case(1, 1, 256, lengths);
        alone.shape.splits = 3;
        alone.shape.kv_format = i / 2;
        build(&alone);
        alone.args.kv = many.args.kv;
        alone.args.kv_pages = many.args.kv_pages;
        alone.args.block_table = many.args.block_table;
        for (int head = 0; head < 3; head++) {
            alone.args.query = many.args.query + (uint64_t)head * 1152;
            decode(&alone);
            assert_same_vector(&alone, 0, 0, &many, 0, head);
        }
        ref_free(&alone);
        ref_free(&many);
    }
}

// A row that one split reads whole has the bits of a plan with one split, whatever partials are.
static void single_split_rows_equal_one_split(void** state) {
    (void)state;
    static const int32_t lengths[6] = {128, 1, 129, 512, 64, 0};
    for (int i = 0; i < 12; i++) {
        ref_case c = simple_case(6, 2, 512, lengths);
        c.shape.kv_format = i % 3;
        c.out_type = i / 3 % 2;
        build(&c);
        decode(&c);
        kept_outputs one = keep_outputs(&c);
        c.shape.splits = 8;
        c.shape.split_mode = i / 6;
        c.shape.single_split_chunks = 2;
        c.shape.partial_type = KMLA_BF16;
        plan_again(&c);
        decode(&c);
        const size_t bytes = 2 * REF_D * (size_t)(c.out_type == KMLA_FP32 ? 4 : 2);
        static const int32_t whole[4] = {0, 1, 4, 5};
        for (int k = 0; k < 4; k++) {
            assert_memory_equal(out_of(&c, whole[k], 0), one.out.data + (size_t)whole[k] * bytes,
                                bytes);
            assert_memory_equal(c.lse.data + whole[k] * 8, one.lse.data + whole[k] * 8, 8);
        }
        // And the others did go through partials: BF16 ones show in an FP32 output.
        if (c.out_type == KMLA_FP32) {
            assert_memory_not_equal(out_of(&c, 3, 0), one.out.data + 3 * bytes, bytes);
        }
        free_outputs(&one);
        ref_free(&c);
    }
}

static void sk_01_runs_repeat_with_any_workspace(void** state) {
    (void)state;
    static const int32_t lengths[2] = {100, 1};
    static const int fills[3] = {0xff, 0x00, 0x7f};
    ref_case c = simple_case(2, 2, 2048, lengths);
    c.shape.splits = 32;
    build(&c);
    decode(&c);
    kept_outputs first = keep_outputs(&c);
    for (int i = 0; i < 3; i++) {
        kmla_error error;
        memset(c.workspace.data, fills[i], c.workspace.bytes);
        assert_int_equal(kmla_host_decode(&c.plan, &c.args, NULL, &error), KMLA_OK);
        assert_outputs_kept(&c, &first);
    }
    free_outputs(&first);
    ref_free(&c);
}

static void pg_04_unused_slots_change_no_bit(void** state) {
    (void)state;
    static const int32_t length = 13;
    for (int format = 0; format < 3; format++) {
        ref_case c = simple_case(1, 3, 16, &length);
        c.shape.page_tokens = 4;
        c.shape.kv_format = format;
        build(&c);
        const size_t bytes = (size_t)ref_record_bytes(ref_kv_layout(format));
        uint8_t* unused = ref_token_record(&c, 0, 13);
        memset(unused, 0, 3 * bytes);
        decode(&c);
        kept_outputs zeros = keep_outputs(&c);
        memset(unused, 0xff, 3 * bytes); // NaN in codes, scales and rope
        decode(&c);
        assert_outputs_kept(&c, &zeros);
        const ref_errors errors = ref_check(&c);
        assert_int_equal(errors.wrong, 0);
        assert_at_most(errors.out, BOUND_EXACT, "out");
        free_outputs(&zeros);
        ref_free(&c);
    }
}

// NaN in a visible token: the rows that see it are NaN, the others keep every bit.
static void nan_reaches_exactly_the_rows_that_see_it(void** state) {
    (void)state;
    static const int32_t lengths[3] = {70, 71, 140};
    for (int i = 0; i < 6; i++) {
        ref_case c = simple_case(1, 3, 192, lengths);
        c.shape.rows_per_request = 3;
        c.shape.kv_format = i % 3;
        c.shape.splits = i / 3 == 0 ? 1 : 3;
        build(&c);
        decode(&c);
        kept_outputs clean = keep_outputs(&c);
        uint8_t* record = ref_token_record(&c, 0, 70);
        const int64_t last = ref_record_bytes(ref_kv_layout(i % 3)) - 2;
        record[last] = 0xff; // in the rope lanes: only the score is NaN
        record[last + 1] = 0x7f;
        decode(&c);
        assert_int_equal(ref_check(&c).wrong, 0);
        assert_memory_equal(c.out.data, clean.out.data, 3 * REF_D * 2);
        assert_memory_equal(c.lse.data, clean.lse.data, 3 * 4);
        assert_true(isnan(lse_at(&c, 1, 0)) && isnan(out_at(&c, 2, 2, 511)));
        free_outputs(&clean);
        ref_free(&c);
    }
}

// A score of minus infinity has weight 0; scores of plus infinity have no answer but NaN.
static void infinite_scores(void** state) {
    (void)state;
    static const int32_t length = 3;
    ref_case c = simple_case(1, 1, 64, &length);
    c.shape.kv_format = KMLA_KV_BF16;
    c.out_type = KMLA_FP32;
    c.scale = 1e30f;
    build(&c);
    memset(c.query.data, 0, c.query.bytes);
    c.query.data[1025] = 0x40; // lane 0 is 2
    for (int token = 0; token < 3; token++) {
        memset(ref_token_record(&c, 0, token), 0, 1152);
    }
    static const uint8_t large[2] = {0x00, 0xff}; // about -1.7e38: times 2e30 is -infinity
    memcpy(ref_token_record(&c, 0, 0) + 1024, large, 2);
    decode(&c);
    assert_near(lse_at(&c, 0, 0), log(2.0), 1e-6);
    assert_true(out_at(&c, 0, 0, 0) == 0.0);
    static const uint8_t one[2] = {0x80, 0x3f};
    static const uint8_t minus_infinity[2] = {0x80, 0xff};
    memcpy(c.query.data + 7 * 2, one, 2);
    memcpy(ref_token_record(&c, 0, 0) + 7 * 2, minus_infinity, 2); // with weight 0 it is not seen
    decode(&c);
    assert_near(lse_at(&c, 0, 0), log(2.0), 1e-6);
    assert_true(out_at(&c, 0, 0, 7) == 0.0);
    ref_token_record(&c, 0, 1)[1025] = 0x7f; // and +infinity
    decode(&c);
    assert_true(isnan(lse_at(&c, 0, 0)) && isnan(out_at(&c, 0, 0, 5)));
    ref_free(&c);
}

// In e4m3 mode a BF16 query and its packed record give the same bits.
static void e4m3_mode_equals_packed_queries(void** state) {
    (void)state;
    static const int32_t lengths[2] = {100, 64};
    for (int format = 0; format < 3; format++) {
        ref_case c = simple_case(2, 5, 128, lengths);
        c.shape.kv_format = format;
        c.shape.mode = KMLA_MODE_E4M3_QUERY;
        c.logit_sigma = 2.0;
        build(&c);
        memset(c.query.data + 1152, 0, 1024); // one vector whose latent part is zero
        decode(&c);
        kept_outputs rounded_inside = keep_outputs(&c);
        ref_buffer packed = ref_buffer_make(2 * 5 * 656, 0xff);
        ref_buffer source = ref_buffer_make(c.query.bytes, 0); // in the machine's byte order
        for (size_t i = 0; i < c.query.bytes; i += 2) {
            const uint16_t bits = (uint16_t)ref_little(c.query.data + i, 2);
            memcpy(source.data + i, &bits, 2);
        }
        kmla_query_write write;
        kmla_error error;
        memset(&write, 0, sizeof(write));
        write.rows = 2;
        write.heads = 5;
        write.query_format = KMLA_QUERY_PACKED;
        write.source_type = KMLA_BF16;
        write.source = ref_address(&source);
        write.query = ref_address(&packed);
        assert_int_equal(kmla_host_write_query(&write, &error), KMLA_OK);
        c.args.query = ref_address(&packed);
        c.args.query_head_stride_bytes = 0;
        c.args.query_row_stride_bytes = 0;
        for (int mode = 0; mode < 2; mode++) {
            c.shape.query_format = KMLA_QUERY_PACKED;
            c.shape.mode = mode;
            plan_again(&c);
            decode(&c);
            assert_outputs_kept(&c, &rounded_inside);
        }
        c.args.query = ref_address(&c.query); // rounding was no empty act
        c.shape.query_format = KMLA_QUERY_BF16;
        c.shape.mode = KMLA_MODE_EXACT;
        plan_again(&c);
        decode(&c);
        assert_memory_not_equal(c.out.data, rounded_inside.out.data, c.out.bytes);
        free_outputs(&rounded_inside);
        ref_buffer_free(&packed);
        ref_buffer_free(&source);
        ref_free(&c);
    }
}

// =============================================================================
// Reader: pages past 2^31 and 2^32 bytes, in a reserved range of addresses
// =============================================================================

enum { HIGH_PAGES = 102400, HIGH_PITCH = 64 * 656 };

static void write_high(uint8_t* pool, const float* source, int64_t first_slot, int32_t tokens) {
    int64_t slots[64];
    kmla_kv_write write;
    kmla_error error;
    for (int i = 0; i < tokens; i++) {
        slots[i] = first_slot + i;
    }
    memset(&write, 0, sizeof(write));
    write.tokens = tokens;
    write.source_type = KMLA_FP32;
    write.latent = address_of(source);
    write.latent_stride = REF_Q;
    write.rope = address_of(source + REF_D);
    write.rope_stride = REF_Q;
    write.slots = address_of(slots);
    write.kv = address_of(pool);
    write.kv_pages = HIGH_PAGES;
    assert_int_equal(kmla_host_write_kv(&write, &error), KMLA_OK);
}

static void pg_01_pg_02_high_pages(void** state) {
    (void)state;
    if (sizeof(void*) < 8) {
        skip(); // no 32-bit machine has so many addresses
    }
    static const int64_t pages[4] = {51150, 51151, 51192, 102301};
    static const int32_t length = 64;
    const size_t bytes = (size_t)HIGH_PAGES * HIGH_PITCH;
    uint8_t* pool = (uint8_t*)mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    assert_true(pool != MAP_FAILED);
    ref_case low = simple_case(1, 3, 64, &length);
    build(&low);
    float* source = (float*)ref_malloc(64 * REF_Q * sizeof(float));
    ref_random random = {3};
    for (int i = 0; i < 64 * REF_Q; i++) {
        source[i] = (float)ref_normal(&random);
    }
    low.args.kv = address_of(pool);
    low.args.kv_pages = HIGH_PAGES;
    int32_t* table = (int32_t*)(void*)low.table.data;
    for (int slot_list = 0; slot_list < 2; slot_list++) {
        int32_t slots[64];
        write_high(pool, source, 64, 64); // page 1 is the low one
        table[0] = 1;
        low.shape.slot_list = 0;
        low.args.slot_list = 0;
        low.args.block_table = address_of(table);
        plan_again(&low);
        decode(&low);
        kept_outputs right = keep_outputs(&low);
        memset(pool, 0xff, 2 * HIGH_PITCH); // where a 32-bit offset would wrap to
        low.shape.slot_list = slot_list;
        if (slot_list) {
            low.args.slot_list = address_of(slots);
            low.args.slot_list_width = 64;
            low.args.block_table = 0;
        }
        plan_again(&low);
        for (int i = 0; i < 4; i++) {
            write_high(pool, source, pages[i] * 64, 64);
            table[0] = (int32_t)pages[i];
            for (int token = 0; token < 64; token++) {
                slots[token] = (int32_t)pages[i] * 64 + token;
            }
            decode(&low);
            assert_outputs_kept(&low, &right);
            memset(pool + (size_t)pages[i] * HIGH_PITCH, 0xff, HIGH_PITCH);
        }
        free_outputs(&right);
    }
    // Both borders to the byte: the last slot before, the first past, and the page named above.
    static const int64_t slots[4] = {3273603, 3273604, 3276288, 6547207};
    static const uint64_t offsets[4] = {2147483568u, 2147484224u, 2149244928u, 4294967792u};
    for (int i = 0; i < 4; i++) {
        write_high(pool, source, slots[i], 1);
        assert_memory_equal(pool + offsets[i] + 528, pool + offsets[0] + 528, 128);
        assert_false(ref_all_bytes(pool + offsets[i], 512, 0xff));
    }
    assert_true(ref_all_bytes(pool, 2 * HIGH_PITCH, 0xff));
    ref_release(source);
    ref_free(&low);
    munmap(pool, bytes);
}

// =============================================================================
// The caller's threads
// =============================================================================

static void run_backwards(void* user, uint32_t count, kmla_task task, void* data) {
    ++*(int*)user;
    for (uint32_t i = count; i > 0; i--) {
        task(data, i - 1);
    }
}

typedef struct thread_pool {
    pthread_mutex_t lock;
    uint32_t next;
    uint32_t count;
    kmla_task task;
    void* data;
} thread_pool;

static void* work(void* argument) {
    thread_pool* pool = (thread_pool*)argument;
    for (;;) {
        pthread_mutex_lock(&pool->lock);
        const uint32_t index = pool->next++;
        pthread_mutex_unlock(&pool->lock);
        if (index >= pool->count) {
            return NULL;
        }
        pool->task(pool->data, index);
    }
}

static void run_on_threads(void* user, uint32_t count, kmla_task task, void* data) {
    thread_pool* pool = (thread_pool*)user;
    pthread_t threads[4];
    pool->next = 0;
    pool->count = count;
    pool->task = task;
    pool->data = data;
    for (int i = 0; i < 4; i++) {
        assert_int_equal(pthread_create(&threads[i], NULL, work, pool), 0);
    }
    for (int i = 0; i < 4; i++) {
        pthread_join(threads[i], NULL);
    }
}

static void threads_and_order_change_no_bit(void** state) {
    (void)state;
    static const int32_t lengths[6] = {300, 0, 64, 65, 300, 128};
    for (int i = 0; i < 6; i++) {
        ref_case c = simple_case(3, 7, 320, lengths);
        c.shape.rows_per_request = 2;
        c.shape.kv_format = i % 3;
        c.shape.splits = i / 3 == 0 ? 1 : 5;
        build(&c);
        decode(&c);
        kept_outputs right = keep_outputs(&c);
        int runs = 0;
        const kmla_parallel backwards = {run_backwards, &runs};
        decode_with(&c, &backwards);
        assert_outputs_kept(&c, &right);
        assert_int_equal(runs, c.shape.splits > 1 ? 2 : 1);
        thread_pool pool;
        memset(&pool, 0, sizeof(pool));
        pthread_mutex_init(&pool.lock, NULL);
        const kmla_parallel threads = {run_on_threads, &pool};
        decode_with(&c, &threads);
        assert_outputs_kept(&c, &right);
        pthread_mutex_destroy(&pool.lock);
        free_outputs(&right);
        ref_free(&c);
    }
}

// =============================================================================
// Bad input
// =============================================================================

static void assert_refused(ref_case* c, kmla_status wanted, const char* named) {
    kmla_error error;
    memset(&error, 0, sizeof(error));
    ref_clear(c);
    assert_int_equal(kmla_host_decode(&c->plan, &c->args, NULL, &error), wanted);
    assert_int_equal(error.status, wanted);
    if (strstr(error.message, named) == NULL) {
        fail_msg("\"%s\" does not name %s", error.message, named);
    }
    assert_true(ref_all_bytes(c->out.data, c->out.bytes, 0xff));
    assert_true(ref_all_bytes(c->lse.data, c->lse.bytes, 0xff));
    assert_true(ref_all_bytes(c->workspace.data, c->workspace.bytes, 0xff));
}

static void bad_decodes_write_nothing(void** state) {
    (void)state;
    static const int32_t lengths[2] = {100, 30};
    ref_case c = simple_case(2, 2, 128, lengths);
    c.shape.splits = 2;
    build(&c);
    const kmla_decode good = c.args;
    c.args.workspace_bytes--;
    assert_refused(&c, KMLA_ERROR_WORKSPACE, "workspace");
    c.args = good;
    c.args.scale = 0.0f;
    assert_refused(&c, KMLA_ERROR_ARGUMENT, "scale");
    c.args = good;
    c.args.kv += 8;
    assert_refused(&c, KMLA_ERROR_ARGUMENT, "kv");
    c.args = good;
    c.args.out = 0;
    assert_refused(&c, KMLA_ERROR_ARGUMENT, "out");
    c.args = good;
    c.args.check_pages = 1;
    decode(&c); // garbage past the lengths is allowed
    int32_t* table = (int32_t*)(void*)c.table.data;
    const int32_t page = table[1];
    table[1] = (int32_t)c.args.kv_pages;
    assert_refused(&c, KMLA_ERROR_PAGE, "page");
    table[1] = page;
    decode(&c);
    ref_free(&c);
}

static void bad_writes_and_combines_write_nothing(void** state) {
    (void)state;
    ref_buffer pool = ref_buffer_make(64 * 656, 0xee);
    ref_buffer source = ref_buffer_make(576 * 4, 0);
    const int64_t slot = 0;
    kmla_error error;
    kmla_kv_write write;
    memset(&write, 0, sizeof(write));
    write.tokens = 1;
    write.source_type = KMLA_FP32;
    write.latent = ref_address(&source);
    write.rope = ref_address(&source) + 512 * 4;
    write.slots = address_of(&slot);
    write.kv = ref_address(&pool);
    write.kv_pages = 1;
    write.page_pitch_bytes = 64 * 656 - 16;
    assert_int_equal(kmla_host_write_kv(&write, &error), KMLA_ERROR_ARGUMENT);
    assert_non_null(strstr(error.message, "page_pitch_bytes"));
    kmla_query_write query;
    memset(&query, 0, sizeof(query));
    query.rows = 1;
    query.heads = 1;
    query.query_format = KMLA_QUERY_E4M3; // and no query_scale
    query.source_type = KMLA_FP32;
    query.source = ref_address(&source);
    query.query = ref_address(&pool);
    assert_int_equal(kmla_host_write_query(&query, &error), KMLA_ERROR_ARGUMENT);
    assert_non_null(strstr(error.message, "query_scale"));
    kmla_combine combine;
    memset(&combine, 0, sizeof(combine));
    combine.parts = 0;
    combine.rows = 1;
    combine.heads = 1;
    combine.part_out = ref_address(&source);
    combine.part_lse = ref_address(&source);
    combine.out = ref_address(&pool);
    assert_int_equal(kmla_host_combine(&combine, &error), KMLA_ERROR_ARGUMENT);
    assert_non_null(strstr(error.message, "parts"));
    assert_true(ref_all_bytes(pool.data, pool.bytes, 0xee));
    ref_buffer_free(&pool);
    ref_buffer_free(&source);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fp_04_codes_survive_a_round_trip),
        cmocka_unit_test(fp_03_codes_are_rounded_to_even_and_saturate),
        cmocka_unit_test(fp_01_scales_are_used_as_they_are),
        cmocka_unit_test(fp_04_reader_returns_every_code),
        cmocka_unit_test(kv_writer_writes_exactly_its_records),
        cmocka_unit_test(query_writer_writes_exactly_its_records),
        cmocka_unit_test(query_scales_are_powers_of_two_rounded_up),
        cmocka_unit_test(pg_06_pages_are_found_by_their_pitch),
        cmocka_unit_test(lc_01_empty_shards_are_not_read),
        cmocka_unit_test(lc_02_logarithms_are_natural),
        cmocka_unit_test(lc_03_empty_states_combine_to_an_empty_state),
        cmocka_unit_test(lc_06_payloads_of_weight_zero_are_not_read),
        cmocka_unit_test(sk_04_combine_rounds_only_what_is_stored),
        cmocka_unit_test(combine_honours_strides),
        cmocka_unit_test(accuracy_of_every_format),
        cmocka_unit_test(accuracy_of_a_long_row),
        cmocka_unit_test(long_sums_do_not_drift),
        cmocka_unit_test(page_sizes_and_pitches),
        cmocka_unit_test(head_counts),
        cmocka_unit_test(ht_03_few_heads_and_many_requests),
        cmocka_unit_test(ragged_and_dead_rows),
        cmocka_unit_test(holes_in_tables_are_no_tokens),
        cmocka_unit_test(length_rules),
        cmocka_unit_test(lengths_past_the_capacity_keep_their_window),
        cmocka_unit_test(ht_02_padding_heads_change_no_bit),
        cmocka_unit_test(sk_03_late_maximum_rescales_what_came_before),
        cmocka_unit_test(sk_04_partials_are_rounded_as_the_plan_says),
        cmocka_unit_test(sk_06_neighbours_change_no_bit),
        cmocka_unit_test(single_split_rows_equal_one_split),
        cmocka_unit_test(sk_01_runs_repeat_with_any_workspace),
        cmocka_unit_test(pg_04_unused_slots_change_no_bit),
        cmocka_unit_test(nan_reaches_exactly_the_rows_that_see_it),
        cmocka_unit_test(infinite_scores),
        cmocka_unit_test(e4m3_mode_equals_packed_queries),
        cmocka_unit_test(pg_01_pg_02_high_pages),
        cmocka_unit_test(threads_and_order_change_no_bit),
        cmocka_unit_test(bad_decodes_write_nothing),
        cmocka_unit_test(bad_writes_and_combines_write_nothing),
    };
    return cmocka_run_group_tests_name("host", tests, NULL, NULL);
}
