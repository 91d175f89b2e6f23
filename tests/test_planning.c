// test_planning.c - host tests of everything that needs no card: status codes, record numbers,
// head geometry, lengths, splits, workspaces, whole plans and the checks of arguments.
//
// Expected numbers come from the definitions, worked out here a second time in the plainest way,
// or from published vectors; never from the functions that are tested.

#define KIMI_MLA_IMPLEMENTATION
#include "kimi_mla.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <string.h>

#define COUNT(array) ((int)(sizeof(array) / sizeof((array)[0])))

// =============================================================================
// Helpers
// =============================================================================

static uint64_t random_state;

static uint64_t next_random(void) { // splitmix64
    uint64_t z = random_state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

static int64_t random_between(int64_t low, int64_t high) {
    return low + (int64_t)(next_random() % (uint64_t)(high - low + 1));
}

static void fill_bytes(void* memory, int byte, size_t bytes) { memset(memory, byte, bytes); }

static void expect_bytes(const void* memory, int byte, size_t bytes) {
    for (size_t i = 0; i < bytes; ++i) {
        assert_int_equal(((const uint8_t*)memory)[i], byte);
    }
}

// A failure of the wanted kind, whose message has the given text.
static void expect_failure(kmla_status status, const kmla_error* error, kmla_status wanted,
                           const char* named) {
    if (status != wanted || !strstr(error->message, named)) {
        fail_msg("wanted %s naming '%s'; got %s: %s", kmla_status_name(wanted), named,
                 kmla_status_name(status), status == KMLA_OK ? "" : error->message);
    }
    assert_int_equal(error->status, wanted);
    assert_int_equal(error->cuda_result, 0);
    assert_int_equal(error->nvrtc_version, 0);
    assert_int_equal(error->library[0], 0);
}

static void expect_ok(kmla_status status, const kmla_error* error) {
    if (status != KMLA_OK) {
        fail_msg("%s: %s", kmla_status_name(status), error->message);
    }
}

static kmla_error dirty_error(void) {
    kmla_error error;
    fill_bytes(&error, 0x55, sizeof error);
    return error;
}

// One wrong field of an otherwise right struct, and what is to come of it.
typedef enum field_kind { FIELD_I32, FIELD_I64, FIELD_U64, FIELD_F32 } field_kind;
typedef struct mutation {
    const char* named; // what the message has to have
    size_t offset;
    field_kind kind;
    int64_t integer;
    double real;
    kmla_status wanted;
} mutation;

#define I32(type, field, value, wanted) \
    {#field, offsetof(type, field), FIELD_I32, value, 0, wanted}
#define I64(type, field, value, wanted) \
    {#field, offsetof(type, field), FIELD_I64, value, 0, wanted}
#define U64(type, field, value, wanted) \
    {#field, offsetof(type, field), FIELD_U64, (int64_t)(value), 0, wanted}
#define F32(type, field, value, wanted) \
    {#field, offsetof(type, field), FIELD_F32, 0, value, wanted}

static void mutate(void* object, const mutation* m) {
    uint8_t* at = (uint8_t*)object + m->offset;
    int32_t i32 = (int32_t)m->integer;
    float f32 = (float)m->real;
    switch (m->kind) {
        case FIELD_I32: memcpy(at, &i32, sizeof i32); break;
        case FIELD_I64:
        case FIELD_U64: memcpy(at, &m->integer, sizeof m->integer); break;
        case FIELD_F32: memcpy(at, &f32, sizeof f32); break;
    }
}

// =============================================================================
// Status codes and errors
// =============================================================================

static void status_names(void** state) {
    (void)state;
    assert_string_equal(kmla_status_name(KMLA_OK), "KMLA_OK");
    assert_string_equal(kmla_status_name(KMLA_ERROR_PAGE), "KMLA_ERROR_PAGE");
    assert_string_equal(kmla_status_name(KMLA_ERROR_MEMORY), "KMLA_ERROR_MEMORY");
    assert_string_equal(kmla_status_text(KMLA_OK), "success");
    for (int a = 0; a < KMLA_STATUS_COUNT_; ++a) {
        assert_true(strlen(kmla_status_text(a)) > 0);
        for (int b = 0; b < a; ++b) {
            assert_string_not_equal(kmla_status_name(a), kmla_status_name(b));
        }
    }
    assert_non_null(kmla_status_name(-1));
    assert_non_null(kmla_status_text(KMLA_STATUS_COUNT_));
}

static void errors_are_whole_and_optional(void** state) {
    (void)state;
    kmla_error error = dirty_error();
    kmla_dcp dcp = {2, 0, 1};
    int64_t tokens = -7;
    expect_ok(kmla_local_length(&dcp, 9, &tokens, &error), &error);
    assert_int_equal(tokens, 5);
    expect_bytes(&error, 0x55, sizeof error); // a success writes nothing
    dcp.rank = 2;
    tokens = -7;
    expect_failure(kmla_local_length(&dcp, 9, &tokens, &error), &error, KMLA_ERROR_ARGUMENT,
                   "dcp.rank");
    assert_int_equal(tokens, -7); // a failure writes the error only
    assert_int_equal(kmla_local_length(&dcp, 9, &tokens, NULL), KMLA_ERROR_ARGUMENT);
}

// =============================================================================
// Records
// =============================================================================

static void record_bytes(void** state) {
    (void)state;
    assert_int_equal(kmla_kv_record_bytes(KMLA_KV_PACKED), 656);
    assert_int_equal(kmla_kv_record_bytes(KMLA_KV_E4M3), 576);
    assert_int_equal(kmla_kv_record_bytes(KMLA_KV_BF16), 1152);
    assert_int_equal(kmla_query_record_bytes(KMLA_QUERY_BF16), 1152);
    assert_int_equal(kmla_query_record_bytes(KMLA_QUERY_PACKED), 656);
    assert_int_equal(kmla_query_record_bytes(KMLA_QUERY_E4M3), 576);
    assert_int_equal(kmla_kv_record_bytes(3), 0);
    assert_int_equal(kmla_kv_record_bytes(-1), 0);
    assert_int_equal(kmla_query_record_bytes(3), 0);
}

// The value of a finite E4M3 magnitude, from the definition.
static double e4m3_magnitude(int code) {
    int exponent = code >> 3, mantissa = code & 7;
    return exponent == 0 ? ldexp(mantissa, -9) : ldexp(8 + mantissa, exponent - 10);
}

// The code by search: nearest of all finite ones, even at a tie, the largest beyond the largest.
static uint8_t nearest_e4m3(float value) {
    if (isnan(value)) {
        return 0x7F;
    }
    double wanted = fabs((double)value);
    int best = 0;
    for (int code = 1; code <= 0x7E; ++code) {
        double distance = fabs(wanted - e4m3_magnitude(code));
        double best_distance = fabs(wanted - e4m3_magnitude(best));
        if (distance < best_distance || (distance == best_distance && code % 2 == 0)) {
            best = code;
        }
    }
    if (isinf(value)) {
        best = 0x7E;
    }
    return (uint8_t)(best | (signbit(value) ? 0x80 : 0));
}

static void expect_nearest_e4m3(float value) {
    uint8_t wanted = nearest_e4m3(value), got = kmla_float_to_e4m3(value);
    if (wanted != got) {
        fail_msg("%a: wanted %02x, got %02x", (double)value, wanted, got);
    }
}

static void e4m3_decodes(void** state) { // FP-01, FP-04
    (void)state;
    assert_true(kmla_e4m3_to_float(0x01) == 0.001953125f);
    assert_true(kmla_e4m3_to_float(0x08) == 0.015625f);
    assert_true(kmla_e4m3_to_float(0x38) == 1.0f);
    assert_true(kmla_e4m3_to_float(0x7E) == 448.0f);
    assert_true(kmla_e4m3_to_float(0x7E) * 0.75f == 336.0f);
    assert_true((float)(kmla_e4m3_to_float(0x7E) * 0.66964287f) == 300.0f);
    for (int code = 0; code < 256; ++code) {
        float value = kmla_e4m3_to_float((uint8_t)code);
        if ((code & 0x7F) == 0x7F) {
            assert_true(isnan(value));
            assert_int_equal(kmla_float_to_e4m3(value), 0x7F);
            continue;
        }
        assert_true(fabs((double)value) == e4m3_magnitude(code & 0x7F));
        assert_int_equal(!!signbit(value), code >> 7);
        assert_int_equal(kmla_float_to_e4m3(value), code);
    }
}

static void e4m3_encodes(void** state) { // FP-03
    (void)state;
    const float values[] = {448, 449, 464, 465, 1000, -1000, 0x1p-10f, 1.0001f * 0x1p-10f,
                            3 * 0x1p-10f, NAN};
    const uint8_t codes[] = {0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x00, 0x01, 0x02, 0x7F};
    for (int i = 0; i < COUNT(values); ++i) {
        assert_int_equal(kmla_float_to_e4m3(values[i]), codes[i]);
    }
    assert_int_equal(kmla_float_to_e4m3(-NAN), 0x7F);
    assert_int_equal(kmla_float_to_e4m3(INFINITY), 0x7E);
    assert_int_equal(kmla_float_to_e4m3(-INFINITY), 0xFE);
    assert_int_equal(kmla_float_to_e4m3(-0.0f), 0x80);
    assert_int_equal(kmla_float_to_e4m3(0x1p-149f), 0x00);
    for (int code = 0; code <= 0x7E; ++code) { // every code, every halfway point, both neighbours
        double here = e4m3_magnitude(code);
        double above = code < 0x7E ? e4m3_magnitude(code + 1) : 480;
        const float points[] = {(float)here, (float)((here + above) / 2)};
        for (int i = 0; i < COUNT(points); ++i) {
            for (int sign = -1; sign <= 1; sign += 2) {
                float point = (float)sign * points[i];
                expect_nearest_e4m3(point);
                expect_nearest_e4m3(nextafterf(point, INFINITY));
                expect_nearest_e4m3(nextafterf(point, -INFINITY));
            }
        }
    }
    random_state = 1;
    for (int i = 0; i < 20000; ++i) {
        uint32_t bits = (uint32_t)next_random();
        float any;
        memcpy(&any, &bits, sizeof any);
        expect_nearest_e4m3(any); // of any size, NaN too
        expect_nearest_e4m3(ldexpf(1.0f + (float)(bits >> 9) * 0x1p-23f, (int)(bits % 22) - 12));
    }
}

// The nearer of the two BF16 values around a float, the even one at a tie.
static uint16_t nearest_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint16_t below = (uint16_t)(bits >> 16), above = (uint16_t)(below + 1);
    uint32_t below_bits = (uint32_t)below << 16;
    float low;
    memcpy(&low, &below_bits, sizeof low);
    double gap = (below & 0x7F80) ? ldexp(1, (below >> 7 & 0xFF) - 127 - 7) : ldexp(1, -133);
    double rest = (fabs((double)value) - fabs((double)low)) / gap;
    return rest < 0.5 || (rest == 0.5 && below % 2 == 0) ? below : above;
}

static void bf16_both_ways(void** state) {
    (void)state;
    assert_true(kmla_bf16_to_float(0x3F80) == 1.0f);
    assert_true(kmla_bf16_to_float(0xC2F7) == -123.5f);
    assert_int_equal(kmla_float_to_bf16(1.00390625f), 0x3F80); // a tie, to even
    assert_int_equal(kmla_float_to_bf16(1.01171875f), 0x3F82); // a tie, to even, upwards
    assert_int_equal(kmla_float_to_bf16(3.4028235e38f), 0x7F80);
    assert_int_equal(kmla_float_to_bf16(-INFINITY), 0xFF80);
    assert_int_equal(kmla_float_to_bf16(-0.0f), 0x8000);
    for (uint32_t bits = 0; bits < 65536; ++bits) {
        float value = kmla_bf16_to_float((uint16_t)bits);
        uint16_t back = kmla_float_to_bf16(value);
        if (isnan(value)) {
            assert_true(isnan(kmla_bf16_to_float(back)));
        } else {
            assert_int_equal(back, bits);
        }
    }
    const uint32_t nans[] = {0x7F800001u, 0xFF800001u, 0x7FFFFFFFu, 0xFFFFFFFFu};
    for (int i = 0; i < COUNT(nans); ++i) { // no payload may round to infinity or wrap to zero
        float nan;
        memcpy(&nan, &nans[i], sizeof nan);
        assert_true(isnan(kmla_bf16_to_float(kmla_float_to_bf16(nan))));
    }
    random_state = 2;
    for (int i = 0; i < 100000; ++i) {
        uint32_t bits = (uint32_t)next_random();
        bits = i % 4 ? bits : (bits & 0xFFFF0000u) | 0x8000u; // every fourth a tie
        float value;
        memcpy(&value, &bits, sizeof value);
        if (isfinite(value)) {
            assert_int_equal(kmla_float_to_bf16(value), nearest_bf16(value));
        }
    }
}

// =============================================================================
// Heads
// =============================================================================

static kmla_heads heads_of(int32_t local, int32_t ranks, int32_t kv_format, int32_t padding) {
    kmla_heads_desc desc = {local, ranks, kv_format, padding};
    kmla_heads heads;
    kmla_error error;
    expect_ok(kmla_plan_heads(&desc, &heads, &error), &error);
    return heads;
}

static void head_tiles(void** state) { // HT-02, HT-06 and their neighbours
    (void)state;
    // local, ranks, effective; packed: tile, padded, tiles; E4M3 and BF16: padded, tiles of 8
    const int32_t rows[][8] = {
        {11, 9, 99, 16, 112, 7, 104, 13}, {12, 8, 96, 16, 96, 6, 96, 12},
        {6, 16, 96, 16, 96, 6, 96, 12},   {8, 8, 64, 16, 64, 4, 64, 8},
        {16, 4, 64, 16, 64, 4, 64, 8},    {6, 8, 48, 16, 48, 3, 48, 6},
        {24, 1, 24, 16, 32, 2, 24, 3},    {17, 1, 17, 16, 32, 2, 24, 3},
        {16, 1, 16, 8, 16, 2, 16, 2},     {6, 2, 12, 8, 16, 2, 16, 2},
        {11, 1, 11, 8, 16, 2, 16, 2},     {12, 1, 12, 8, 16, 2, 16, 2},
        {9, 1, 9, 8, 16, 2, 16, 2},       {8, 1, 8, 8, 8, 1, 8, 1},
        {6, 1, 6, 8, 8, 1, 8, 1},         {1, 0, 1, 8, 8, 1, 8, 1},
    };
    for (int i = 0; i < COUNT(rows); ++i) {
        const int32_t* r = rows[i];
        kmla_heads packed = heads_of(r[0], r[1], KMLA_KV_PACKED, KMLA_PAD_TILE);
        assert_int_equal(packed.effective, r[2]);
        assert_int_equal(packed.tile, r[3]);
        assert_int_equal(packed.padded, r[4]);
        assert_int_equal(packed.tiles, r[5]);
        assert_int_equal(packed.launches, 1);
        for (int32_t format = KMLA_KV_E4M3; format <= KMLA_KV_BF16; ++format) {
            kmla_heads wide = heads_of(r[0], r[1], format, KMLA_PAD_TILE);
            assert_int_equal(wide.effective, r[2]);
            assert_int_equal(wide.tile, 8);
            assert_int_equal(wide.padded, r[6]);
            assert_int_equal(wide.tiles, r[7]);
            assert_int_equal(wide.launches, 1);
        }
    }
    kmla_heads eight = heads_of(11, 9, KMLA_KV_PACKED, KMLA_PAD_EIGHT);
    assert_int_equal(eight.padded, 104);
    assert_int_equal(eight.tiles, 7);
    assert_int_equal(eight.launches, 2); // 6 whole tiles, and 8 heads that are left
    kmla_heads sixteen = heads_of(11, 9, KMLA_KV_PACKED, KMLA_PAD_TILE);
    assert_int_equal(4 * 24 * sixteen.launches, 96);
    assert_int_equal(4 * 24 * eight.launches, 192);
}

static void head_invariants(void** state) {
    (void)state;
    for (int32_t local = 1; local <= 130; ++local) {
        for (int32_t ranks = 1; ranks <= 17; ++ranks) {
            for (int32_t format = 0; format <= 2; ++format) {
                for (int32_t padding = 0; padding <= 1; ++padding) {
                    kmla_heads h = heads_of(local, ranks, format, padding);
                    assert_int_equal(h.effective, local * ranks);
                    assert_true(h.padded >= h.effective && h.padded - h.effective < h.tile);
                    assert_true(h.tiles * h.tile >= h.padded);
                    assert_true((h.tiles - 1) * h.tile < h.padded);
                    assert_int_equal(h.launches == 1, h.padded == h.tiles * h.tile);
                    assert_true(padding == KMLA_PAD_EIGHT || h.launches == 1);
                }
            }
        }
    }
}

static void head_errors(void** state) {
    (void)state;
    const mutation mutations[] = {
        I32(kmla_heads_desc, local_heads, 0, KMLA_ERROR_ARGUMENT),
        I32(kmla_heads_desc, local_heads, -1, KMLA_ERROR_ARGUMENT),
        I32(kmla_heads_desc, local_heads, 4097, KMLA_ERROR_ARGUMENT),
        I32(kmla_heads_desc, dcp_ranks, -1, KMLA_ERROR_ARGUMENT),
        I32(kmla_heads_desc, dcp_ranks, 95326, KMLA_ERROR_OVERFLOW), // 11 times it is 2^20 + 10
        I32(kmla_heads_desc, dcp_ranks, INT32_MAX, KMLA_ERROR_OVERFLOW),
        I32(kmla_heads_desc, kv_format, 3, KMLA_ERROR_ARGUMENT),
        I32(kmla_heads_desc, kv_format, -1, KMLA_ERROR_ARGUMENT),
        I32(kmla_heads_desc, padding, 2, KMLA_ERROR_ARGUMENT),
    };
    kmla_error error;
    kmla_heads heads;
    for (int i = 0; i < COUNT(mutations); ++i) {
        kmla_heads_desc desc = {11, 9, KMLA_KV_PACKED, KMLA_PAD_TILE};
        mutate(&desc, &mutations[i]);
        fill_bytes(&heads, 0x55, sizeof heads);
        error = dirty_error();
        expect_failure(kmla_plan_heads(&desc, &heads, &error), &error, mutations[i].wanted,
                       mutations[i].named);
        expect_bytes(&heads, 0x55, sizeof heads);
    }
    kmla_heads_desc desc = {4096, 256, KMLA_KV_PACKED, KMLA_PAD_TILE}; // exactly 2^20
    expect_ok(kmla_plan_heads(&desc, &heads, &error), &error);
    error = dirty_error();
    expect_failure(kmla_plan_heads(NULL, &heads, &error), &error, KMLA_ERROR_ARGUMENT, "desc");
    error = dirty_error();
    expect_failure(kmla_plan_heads(&desc, NULL, &error), &error, KMLA_ERROR_ARGUMENT, "out");
}

// =============================================================================
// Lengths
// =============================================================================

static int64_t local_of(int32_t ranks, int32_t rank, int32_t interleave, int64_t tokens) {
    kmla_dcp dcp = {ranks, rank, interleave};
    kmla_error error;
    int64_t local = -1;
    expect_ok(kmla_local_length(&dcp, tokens, &local, &error), &error);
    return local;
}

static void local_lengths(void** state) { // DL-01, DL-02, DL-03
    (void)state;
    for (int32_t rank = 0; rank < 8; ++rank) {
        assert_int_equal(local_of(8, rank, 1, 3), rank < 3);
        assert_int_equal(local_of(8, rank, 1, 6), rank < 6);
    }
    const int64_t four[] = {64, 64, 64, 8};
    for (int32_t rank = 0; rank < 4; ++rank) {
        assert_int_equal(local_of(4, rank, 64, 200), four[rank]);
    }
    assert_int_equal(local_of(2, 0, 64, 130), 66);
    assert_int_equal(local_of(2, 1, 64, 130), 64);
    const int64_t verify[] = {4, 4, 5};
    const int64_t fourteen_on[] = {2, 3, 4, 4};
    for (int i = 0; i < 3; ++i) {
        assert_int_equal(local_of(2, 1, 1, 8 + i), verify[i]);
        assert_int_equal(local_of(2, 0, 64, 64 + i), 64);
        assert_int_equal(local_of(2, 1, 64, 64 + i), i);
    }
    for (int i = 0; i < 4; ++i) {
        assert_int_equal(local_of(4, 3, 2, 14 + i), fourteen_on[i]);
    }
    for (int32_t rank = 0; rank < 9; ++rank) {
        assert_int_equal(local_of(9, rank, 64, 131072), rank < 5 ? 14592 : 14528);
        assert_int_equal(local_of(9, rank, 1, 1000), rank < 1 ? 112 : 111);
    }
    assert_int_equal(local_of(0, 0, 0, 77), 77); // zero means one rank, one token
    assert_int_equal(local_of(3, 1, 4, -5), 0);
    assert_int_equal(local_of(1, 0, 1, INT64_MAX), INT64_MAX);
    assert_int_equal(local_of(INT32_MAX, INT32_MAX - 1, INT32_MAX, INT64_MAX),
                     2 * (int64_t)INT32_MAX); // two whole rounds, and not its turn in the third
}

static void shard_capacities(void** state) {
    (void)state;
    const int64_t rows[][4] = {{8, 64, 1048576, 131072}, {9, 1, 1048576, 116509},
                               {1, 1, 77, 77},           {4, 64, 1, 64},
                               {4, 64, 0, 0},            {4, 64, 257, 128}};
    kmla_error error;
    int64_t tokens;
    for (int i = 0; i < COUNT(rows); ++i) {
        kmla_dcp dcp = {(int32_t)rows[i][0], 0, (int32_t)rows[i][1]};
        expect_ok(kmla_shard_capacity(&dcp, rows[i][2], &tokens, &error), &error);
        assert_int_equal(tokens, rows[i][3]);
    }
    kmla_dcp dcp = {9, 0, 1};
    error = dirty_error();
    expect_failure(kmla_shard_capacity(&dcp, -1, &tokens, &error), &error, KMLA_ERROR_ARGUMENT,
                   "context_tokens");
    error = dirty_error();
    expect_failure(kmla_shard_capacity(&dcp, INT64_MAX, &tokens, &error), &error,
                   KMLA_ERROR_ARGUMENT, "context_tokens");
    error = dirty_error();
    expect_failure(kmla_shard_capacity(&dcp, 5, NULL, &error), &error, KMLA_ERROR_ARGUMENT,
                   "shard_tokens");
}

// Deals tokens out one by one, and compares all three functions with the piles.
static void shards_by_dealing(void** state) {
    (void)state;
    random_state = 3;
    for (int trial = 0; trial < 300; ++trial) {
        int32_t ranks = (int32_t)random_between(1, 12);
        int32_t interleave = (int32_t)(trial % 3 ? random_between(1, 9) : 64);
        int64_t length = random_between(0, 700);
        int64_t piles[12] = {0};
        kmla_error error;
        for (int64_t token = 0; token < length; ++token) {
            kmla_dcp dcp = {ranks, 0, interleave};
            int32_t owner = (int32_t)(token / interleave % ranks), rank = -1;
            int64_t local = -1;
            expect_ok(kmla_token_owner(&dcp, token, &rank, &local, &error), &error);
            assert_int_equal(rank, owner);
            assert_int_equal(local, piles[owner]); // the next free place there
            ++piles[owner];
        }
        int64_t sum = 0, capacity;
        kmla_dcp first = {ranks, 0, interleave};
        expect_ok(kmla_shard_capacity(&first, length, &capacity, &error), &error);
        for (int32_t rank = 0; rank < ranks; ++rank) {
            int64_t local = local_of(ranks, rank, interleave, length);
            assert_int_equal(local, piles[rank]);
            assert_true(local <= capacity);
            sum += local;
        }
        assert_int_equal(sum, length);
        assert_true(capacity < piles[0] + interleave);
    }
}

static void dcp_errors(void** state) {
    (void)state;
    const mutation mutations[] = {
        I32(kmla_dcp, ranks, -1, KMLA_ERROR_ARGUMENT),
        I32(kmla_dcp, ranks, 2, KMLA_ERROR_ARGUMENT), // its rank, 3, is too high then
        I32(kmla_dcp, rank, 4, KMLA_ERROR_ARGUMENT),
        I32(kmla_dcp, rank, -1, KMLA_ERROR_ARGUMENT),
        I32(kmla_dcp, interleave, -1, KMLA_ERROR_ARGUMENT),
    };
    kmla_error error;
    for (int i = 0; i < COUNT(mutations); ++i) {
        kmla_dcp dcp = {4, 3, 2};
        const char* named = i == 1 ? "dcp.rank is 3" : mutations[i].named;
        int64_t tokens = -7;
        int32_t rank = -7;
        mutate(&dcp, &mutations[i]);
        error = dirty_error();
        expect_failure(kmla_local_length(&dcp, 5, &tokens, &error), &error, KMLA_ERROR_ARGUMENT,
                       named);
        error = dirty_error();
        expect_failure(kmla_token_owner(&dcp, 5, &rank, &tokens, &error), &error,
                       KMLA_ERROR_ARGUMENT, named);
        error = dirty_error();
        expect_failure(kmla_shard_capacity(&dcp, 5, &tokens, &error), &error, KMLA_ERROR_ARGUMENT,
                       named);
        assert_int_equal(tokens, -7);
        assert_int_equal(rank, -7);
    }
    kmla_dcp dcp = {4, 3, 2};
    int64_t tokens;
    error = dirty_error();
    expect_failure(kmla_token_owner(&dcp, -1, NULL, &tokens, &error), &error, KMLA_ERROR_ARGUMENT,
                   "global_token");
    error = dirty_error();
    expect_failure(kmla_local_length(NULL, 1, &tokens, &error), &error, KMLA_ERROR_ARGUMENT, "dcp");
    error = dirty_error();
    expect_failure(kmla_local_length(&dcp, 1, NULL, &error), &error, KMLA_ERROR_ARGUMENT,
                   "local_tokens");
    expect_ok(kmla_token_owner(&dcp, 5, NULL, NULL, &error), &error);
}

static kmla_length_rule length_rule(int32_t lengths_kind, int32_t rows_kind, int32_t window,
                                    int32_t ranks, int32_t rank, int32_t interleave) {
    kmla_length_rule rule;
    memset(&rule, 0, sizeof rule);
    rule.lengths_kind = lengths_kind;
    rule.rows_kind = rows_kind;
    rule.window_tokens = window;
    rule.dcp.ranks = ranks;
    rule.dcp.rank = rank;
    rule.dcp.interleave = interleave;
    return rule;
}

static void expect_ranges(kmla_length_rule rule, int64_t length, int32_t rows,
                          const int64_t* begins, const int64_t* ends) {
    int64_t got_begins[8], got_ends[8];
    kmla_error error;
    expect_ok(kmla_row_ranges(&rule, length, rows, got_begins, got_ends, &error), &error);
    for (int32_t row = 0; row < rows; ++row) {
        assert_int_equal(got_begins[row], begins[row]);
        assert_int_equal(got_ends[row], ends[row]);
    }
}

static void row_ranges(void** state) { // SD-03, DL-03
    (void)state;
    const int64_t zeros[8] = {0};
    const int64_t causal[] = {8, 9, 10}, draft[] = {10, 10, 10}, again[] = {6, 7, 8};
    const int64_t short_causal[] = {0, 0, 0, 1}, ones[] = {1, 1, 1, 1};
    kmla_length_rule verify = length_rule(KMLA_LENGTHS_PER_REQUEST, KMLA_ROWS_CAUSAL, 0, 0, 0, 0);
    kmla_length_rule block = length_rule(KMLA_LENGTHS_PER_REQUEST, KMLA_ROWS_DRAFT, 0, 0, 0, 0);
    kmla_length_rule own = length_rule(KMLA_LENGTHS_PER_ROW, KMLA_ROWS_CAUSAL, 0, 0, 0, 0);
    expect_ranges(verify, 10, 3, zeros, causal);
    expect_ranges(block, 10, 3, zeros, draft);
    expect_ranges(verify, 8, 3, zeros, again); // two rejected: from the new length, not from 8
    expect_ranges(verify, 1, 4, zeros, short_causal);
    expect_ranges(block, 1, 4, zeros, ones);
    expect_ranges(verify, -3, 4, zeros, zeros);
    expect_ranges(verify, INT64_MIN, 4, zeros, zeros);
    expect_ranges(own, 10, 1, zeros, draft);
    expect_ranges(own, -1, 1, zeros, zeros);

    const int64_t window_begins[] = {6, 7, 8}, window_short[] = {0, 1, 2};
    const int64_t three_on[] = {3, 4, 5};
    verify.window_tokens = 2;
    expect_ranges(verify, 10, 3, window_begins, causal);
    verify.window_tokens = 3;
    expect_ranges(verify, 5, 3, window_short, three_on);
    block.window_tokens = 4096;
    const int64_t long_begins[] = {904, 904}, long_ends[] = {5000, 5000};
    const int64_t fits_ends[] = {4096, 4096};
    expect_ranges(block, 5000, 2, long_begins, long_ends);
    expect_ranges(block, 4096, 2, zeros, fits_ends);
    own.window_tokens = 4;
    const int64_t six[] = {6}, ten[] = {10};
    expect_ranges(own, 10, 1, six, ten);

    const int64_t rank_ends[] = {4, 4, 5}; // 3, 4, 5 would subtract in local tokens
    expect_ranges(length_rule(KMLA_LENGTHS_PER_REQUEST, KMLA_ROWS_CAUSAL, 0, 2, 1, 1), 10, 3,
                  zeros, rank_ends);
    // Window [2, 10) of two ranks: rank 1 holds tokens 1, 3, 5, 7, 9 and sees the last four.
    const int64_t one[] = {1}, five[] = {5};
    expect_ranges(length_rule(KMLA_LENGTHS_PER_REQUEST, KMLA_ROWS_DRAFT, 8, 2, 1, 1), 10, 1, one,
                  five);
}

// Every visible global token of a row is in exactly one rank's range, and nothing else is.
static void row_ranges_of_all_ranks(void** state) {
    (void)state;
    random_state = 4;
    for (int trial = 0; trial < 300; ++trial) {
        int32_t ranks = (int32_t)random_between(1, 6), interleave = (int32_t)random_between(1, 5);
        int32_t rows = (int32_t)random_between(1, 8), kind = (int32_t)random_between(0, 1);
        int32_t window = trial % 2 ? (int32_t)random_between(1, 40) : 0;
        int64_t length = random_between(0, 90);
        int64_t begins[6][8], ends[6][8], next[6] = {0};
        kmla_error error;
        for (int32_t rank = 0; rank < ranks; ++rank) {
            kmla_length_rule rule =
                length_rule(KMLA_LENGTHS_PER_REQUEST, kind, window, ranks, rank, interleave);
            expect_ok(kmla_row_ranges(&rule, length, rows, begins[rank], ends[rank], &error),
                      &error);
        }
        for (int64_t token = 0; token < length; ++token) {
            int64_t owner = token / interleave % ranks, local = next[owner]++;
            for (int32_t row = 0; row < rows; ++row) {
                int64_t bound = kind == KMLA_ROWS_DRAFT ? length : length - rows + 1 + row;
                int visible = token < bound && (window == 0 || token >= bound - window);
                assert_int_equal(local >= begins[owner][row] && local < ends[owner][row], visible);
            }
        }
        for (int32_t rank = 0; rank < ranks; ++rank) {
            for (int32_t row = 0; row < rows; ++row) {
                assert_true(ends[rank][row] <= next[rank]);
            }
        }
    }
}

static void row_range_errors(void** state) {
    (void)state;
    const mutation mutations[] = {
        I32(kmla_length_rule, lengths_kind, 2, KMLA_ERROR_ARGUMENT),
        I32(kmla_length_rule, lengths_kind, -1, KMLA_ERROR_ARGUMENT),
        I32(kmla_length_rule, lengths_kind, KMLA_LENGTHS_PER_ROW, KMLA_ERROR_ARGUMENT), // 2 ranks
        I32(kmla_length_rule, rows_kind, 2, KMLA_ERROR_ARGUMENT),
        I32(kmla_length_rule, window_tokens, -1, KMLA_ERROR_ARGUMENT),
        I32(kmla_length_rule, dcp.ranks, -2, KMLA_ERROR_ARGUMENT),
        I32(kmla_length_rule, dcp.rank, 2, KMLA_ERROR_ARGUMENT),
        I32(kmla_length_rule, dcp.interleave, -64, KMLA_ERROR_ARGUMENT),
    };
    int64_t begins[2] = {-7, -7}, ends[2] = {-7, -7};
    kmla_error error;
    for (int i = 0; i < COUNT(mutations); ++i) {
        kmla_length_rule rule =
            length_rule(KMLA_LENGTHS_PER_REQUEST, KMLA_ROWS_CAUSAL, 4, 2, 1, 64);
        mutate(&rule, &mutations[i]);
        error = dirty_error();
        expect_failure(kmla_row_ranges(&rule, 9, 2, begins, ends, &error), &error,
                       mutations[i].wanted, mutations[i].named);
    }
    kmla_length_rule rule = length_rule(KMLA_LENGTHS_PER_REQUEST, KMLA_ROWS_CAUSAL, 0, 0, 0, 0);
    error = dirty_error();
    expect_failure(kmla_row_ranges(&rule, 9, 0, begins, ends, &error), &error, KMLA_ERROR_ARGUMENT,
                   "rows");
    error = dirty_error();
    expect_failure(kmla_row_ranges(&rule, 9, 2, NULL, ends, &error), &error, KMLA_ERROR_ARGUMENT,
                   "begins");
    error = dirty_error();
    expect_failure(kmla_row_ranges(&rule, 9, 2, begins, NULL, &error), &error, KMLA_ERROR_ARGUMENT,
                   "ends");
    error = dirty_error();
    expect_failure(kmla_row_ranges(NULL, 9, 2, begins, ends, &error), &error, KMLA_ERROR_ARGUMENT,
                   "rule");
    rule.lengths_kind = KMLA_LENGTHS_PER_ROW;
    error = dirty_error();
    expect_failure(kmla_row_ranges(&rule, 9, 2, begins, ends, &error), &error, KMLA_ERROR_ARGUMENT,
                   "rows");
    for (int i = 0; i < 2; ++i) {
        assert_int_equal(begins[i], -7);
        assert_int_equal(ends[i], -7);
    }
}

// =============================================================================
// Splits and workspace
// =============================================================================

typedef struct part {
    int64_t begin, end;
} part;

static part part_of(int32_t mode, int32_t splits, int32_t split, int64_t capacity, int32_t single,
                    int64_t begin, int64_t end) {
    part p = {-7, -7};
    kmla_error error;
    expect_ok(kmla_split_range(mode, splits, split, capacity, single, begin, end, &p.begin, &p.end,
                               &error),
              &error);
    return p;
}

static void expect_part(part p, int64_t begin, int64_t end) {
    assert_int_equal(p.begin, begin);
    assert_int_equal(p.end, end);
}

static void split_ranges(void** state) {
    (void)state;
    // Static: shares come from the capacity, 2 chunks here. The row has 300 tokens, 5 chunks.
    expect_part(part_of(KMLA_SPLIT_STATIC, 4, 0, 512, 0, 0, 300), 0, 128);
    expect_part(part_of(KMLA_SPLIT_STATIC, 4, 1, 512, 0, 0, 300), 128, 256);
    expect_part(part_of(KMLA_SPLIT_STATIC, 4, 2, 512, 0, 0, 300), 256, 300);
    part none = part_of(KMLA_SPLIT_STATIC, 4, 3, 512, 0, 0, 300);
    assert_int_equal(none.begin, none.end);
    // Balanced: 5 chunks over 4 splits, the first takes 2.
    expect_part(part_of(KMLA_SPLIT_BALANCED, 4, 0, 512, 0, 0, 300), 0, 128);
    expect_part(part_of(KMLA_SPLIT_BALANCED, 4, 1, 512, 0, 0, 300), 128, 192);
    expect_part(part_of(KMLA_SPLIT_BALANCED, 4, 3, 512, 0, 0, 300), 256, 300);
    // A window's first chunk is cut at its beginning: 100..300 are chunks 1 to 4.
    expect_part(part_of(KMLA_SPLIT_BALANCED, 4, 0, 512, 0, 100, 300), 100, 128);
    expect_part(part_of(KMLA_SPLIT_STATIC, 4, 0, 512, 0, 100, 300), 100, 128);
    // Five live chunks, all of them split 0's up to a threshold of five.
    for (int32_t mode = 0; mode <= 1; ++mode) {
        expect_part(part_of(mode, 4, 0, 512, 5, 0, 300), 0, 300);
        none = part_of(mode, 4, 1, 512, 5, 0, 300);
        assert_int_equal(none.begin, none.end);
        expect_part(part_of(mode, 4, 0, 512, 4, 0, 300), 0, 128);
        none = part_of(mode, 4, 0, 512, 0, 0, 0);
        assert_int_equal(none.begin, none.end);
        expect_part(part_of(mode, 1, 0, 512, 0, 0, 5000), 0, 512); // clamped to the capacity
        none = part_of(mode, 1, 0, 512, 0, 600, 5000);
        assert_int_equal(none.begin, none.end);
    }
    expect_part(part_of(KMLA_SPLIT_STATIC, 16, 0, 100, 0, 0, 100), 0, 64); // SK-01
    expect_part(part_of(KMLA_SPLIT_STATIC, 16, 1, 100, 0, 0, 100), 64, 100);
}

static void split_properties(void** state) {
    (void)state;
    random_state = 5;
    for (int trial = 0; trial < 4000; ++trial) {
        int32_t mode = (int32_t)random_between(0, 1), splits = (int32_t)random_between(1, 40);
        int32_t single = trial % 3 ? 0 : (int32_t)random_between(0, 12);
        int64_t capacity = random_between(1, 4000);
        int64_t end = random_between(0, capacity + 200), begin = random_between(0, end);
        int64_t last = end < capacity ? end : capacity, first = begin < last ? begin : last;
        int64_t live = first < last ? (last + 63) / 64 - first / 64 : 0;
        int64_t share = ((capacity + 63) / 64 + splits - 1) / splits;
        int64_t next = first, used = 0, fewest = INT64_MAX, most = 0;
        for (int32_t split = 0; split < splits; ++split) {
            part p = part_of(mode, splits, split, capacity, single, begin, end);
            assert_true(p.begin <= p.end);
            if (p.begin == p.end) {
                continue;
            }
            assert_int_equal(p.begin, next); // ascending, no token twice, none left out
            assert_true(p.begin == first || p.begin % 64 == 0);
            assert_true(p.end == last || p.end % 64 == 0);
            next = p.end;
            int64_t chunks = (p.end + 63) / 64 - p.begin / 64;
            fewest = chunks < fewest ? chunks : fewest;
            most = chunks > most ? chunks : most;
            ++used;
            if (live <= single) {
                assert_int_equal(split, 0);
            } else if (mode == KMLA_SPLIT_STATIC) {
                assert_true(p.begin >= split * share * 64 && p.end <= (split + 1) * share * 64);
            }
        }
        assert_int_equal(next, last);
        if (mode == KMLA_SPLIT_BALANCED && live > single) {
            assert_int_equal(used, live < splits ? live : splits);
            assert_true(most - fewest <= 1);
        }
    }
}

static void split_errors(void** state) {
    (void)state;
    const struct {
        const char* named;
        int64_t mode, splits, split, capacity, single, begin, end;
    } rows[] = {
        {"split_mode", 2, 4, 0, 512, 0, 0, 300}, {"split_mode", -1, 4, 0, 512, 0, 0, 300},
        {"splits", 0, 0, 0, 512, 0, 0, 300},     {"splits", 0, 1025, 0, 512, 0, 0, 300},
        {"split", 0, 4, 4, 512, 0, 0, 300},      {"split", 0, 4, -1, 512, 0, 0, 300},
        {"capacity_tokens", 0, 4, 0, 0, 0, 0, 300},
        {"capacity_tokens", 0, 4, 0, 67108865, 0, 0, 300},
        {"single_split_chunks", 0, 4, 0, 512, -1, 0, 300},
        {"begin", 0, 4, 0, 512, 0, -1, 300},     {"end", 0, 4, 0, 512, 0, 10, 9},
    };
    part p = {-7, -7};
    kmla_error error;
    for (int i = 0; i < COUNT(rows); ++i) {
        error = dirty_error();
        expect_failure(kmla_split_range((int32_t)rows[i].mode, (int32_t)rows[i].splits,
                                        (int32_t)rows[i].split, rows[i].capacity,
                                        (int32_t)rows[i].single, rows[i].begin, rows[i].end,
                                        &p.begin, &p.end, &error),
                       &error, KMLA_ERROR_ARGUMENT, rows[i].named);
    }
    error = dirty_error();
    expect_failure(kmla_split_range(0, 1, 0, 1, 0, 0, 1, NULL, &p.end, &error), &error,
                   KMLA_ERROR_ARGUMENT, "part_begin");
    error = dirty_error();
    expect_failure(kmla_split_range(0, 1, 0, 1, 0, 0, 1, &p.begin, NULL, &error), &error,
                   KMLA_ERROR_ARGUMENT, "part_end");
    expect_part(p, -7, -7);
}

static void workspaces(void** state) { // WS-02
    (void)state;
    const struct {
        int32_t rows, heads, splits, type;
        uint64_t bytes;
    } rows[] = {
        {4, 112, 16, KMLA_FP32, UINT64_C(14708736)}, {4, 99, 16, KMLA_FP32, UINT64_C(13001472)},
        {4, 99, 16, KMLA_BF16, UINT64_C(6513408)},   {4, 99, 1, KMLA_FP32, 0},
        {1, 1, 2, KMLA_BF16, 2056},
        {65535, 4096, 1024, KMLA_FP32, UINT64_C(564040858337280)},
    };
    kmla_error error;
    uint64_t bytes;
    for (int i = 0; i < COUNT(rows); ++i) {
        expect_ok(kmla_workspace_bytes(rows[i].rows, rows[i].heads, rows[i].splits, rows[i].type,
                                       &bytes, &error),
                  &error);
        assert_int_equal(bytes, rows[i].bytes);
    }
    const struct {
        const char* named;
        int32_t rows, heads, splits, type;
        kmla_status wanted;
    } bad[] = {
        {"rows", 0, 99, 16, KMLA_BF16, KMLA_ERROR_ARGUMENT},
        {"heads", 4, -1, 16, KMLA_BF16, KMLA_ERROR_ARGUMENT},
        {"splits", 4, 99, 0, KMLA_BF16, KMLA_ERROR_ARGUMENT},
        {"partial_type", 4, 99, 16, 2, KMLA_ERROR_ARGUMENT},
        {"splits", INT32_MAX, INT32_MAX, INT32_MAX, KMLA_BF16, KMLA_ERROR_OVERFLOW},
        {"heads", INT32_MAX, INT32_MAX, 2, KMLA_FP32, KMLA_ERROR_OVERFLOW},
    };
    bytes = 7;
    for (int i = 0; i < COUNT(bad); ++i) {
        error = dirty_error();
        expect_failure(kmla_workspace_bytes(bad[i].rows, bad[i].heads, bad[i].splits, bad[i].type,
                                            &bytes, &error),
                       &error, bad[i].wanted, bad[i].named);
        assert_int_equal(bytes, 7);
    }
    error = dirty_error();
    expect_failure(kmla_workspace_bytes(1, 1, 1, 0, NULL, &error), &error, KMLA_ERROR_ARGUMENT,
                   "bytes");
}

// =============================================================================
// Whole plans
// =============================================================================

static kmla_device device_of(int32_t major, int32_t minor, int32_t sms, int32_t shared_bytes,
                             int32_t shared_bytes_sm) {
    kmla_device device;
    device.compute_major = major;
    device.compute_minor = minor;
    device.multiprocessors = sms;
    device.shared_bytes = shared_bytes;
    device.shared_bytes_sm = shared_bytes_sm;
    return device;
}

static kmla_device h200(void) { return device_of(9, 0, 132, 232448, 233472); }
static kmla_device rtx_pro_6000(void) { return device_of(12, 0, 188, 101376, 102400); }

static const int32_t portable_tiles[] = {8, 16, 32};
static const int32_t hopper_tiles[] = {8, 16, 24, 32, 40, 48, 56};

static kmla_shape shape_of(int32_t requests, int32_t rows_per_request, int32_t heads,
                           int64_t capacity) {
    kmla_shape shape;
    memset(&shape, 0, sizeof shape);
    shape.requests = requests;
    shape.rows_per_request = rows_per_request;
    shape.heads = heads;
    shape.capacity_tokens = capacity;
    return shape;
}

static kmla_plan plan_of(const kmla_shape* shape, const kmla_device* device) {
    kmla_plan plan;
    kmla_error error;
    expect_ok(kmla_plan_decode(shape, device, &plan, &error), &error);
    return plan;
}

static void plan_of_kimi_k3(void** state) {
    (void)state;
    kmla_device card = h200();
    kmla_shape shape = shape_of(1, 4, 99, 16384);
    shape.tile = 32;
    shape.splits = 8;
    kmla_plan plan = plan_of(&shape, &card);
    assert_int_equal(plan.version, KMLA_VERSION);
    assert_int_equal(plan.reader, KMLA_READER_HOPPER);
    assert_int_equal(plan.shape.rows, 4);
    assert_int_equal(plan.shape.page_tokens, 64);
    assert_int_equal(plan.shape.lengths.dcp.ranks, 1);
    assert_int_equal(plan.shape.lengths.dcp.interleave, 1);
    assert_int_equal(plan.shape.reader, KMLA_READER_HOPPER);
    assert_int_equal(plan.shape.tile, 32);
    assert_int_equal(plan.shape.splits, 8);
    assert_int_equal(plan.device.multiprocessors, 132);
    assert_int_equal(plan.tile, 32);
    assert_int_equal(plan.tiles_per_request, 13);
    assert_int_equal(plan.groups, 1);
    assert_int_equal(plan.splits, 8);
    assert_int_equal(plan.splits_chosen_by, KMLA_CHOSEN_BY_CALLER);
    assert_int_equal(plan.chunks, 256);
    assert_int_equal(plan.chunks_per_split, 32);
    assert_int_equal(plan.threads, 512);
    assert_int_equal(plan.resident, 1);
    assert_int_equal(plan.stages, 8); // runs of 32 tokens: a ninth does not fit 232,448 bytes
    assert_int_equal(plan.launches, 2);
    assert_int_equal(plan.workspace_bytes, 8 * 396 * 1028);
    assert_non_null(strstr(plan.reason, "Hopper, tile 32 (caller)"));
    assert_non_null(strstr(plan.reason, "396 vectors are 13 tiles"));
    assert_non_null(strstr(plan.reason, "104 blocks on 132 SMs"));
#ifndef KIMI_MLA_NO_GPU
    assert_int_equal(kmla_plan_variant(&plan), 20032);
    assert_int_equal(kmla_plan_variant(NULL), 0);
#endif
    shape.reader = KMLA_READER_PORTABLE;
    plan = plan_of(&shape, &card);
    assert_int_equal(plan.reader, KMLA_READER_PORTABLE);
    assert_int_equal(plan.threads, 256);
    assert_non_null(strstr(plan.reason, "portable, tile 32 (caller)"));
#ifndef KIMI_MLA_NO_GPU
    assert_int_equal(kmla_plan_variant(&plan), 10032);
#endif
    shape.reader = shape.tile = shape.splits = 0;
    plan = plan_of(&shape, &card);
    assert_int_equal(plan.splits_chosen_by, KMLA_CHOSEN_BY_PLANNER);
    assert_non_null(strstr(plan.reason, "(planner): 396 vectors"));
    assert_true(plan.splits > 1); // or most of the card would idle
    kmla_plan again = plan_of(&shape, &card);
    assert_memory_equal(&plan, &again, sizeof plan);
}

static void plan_of_host(void** state) {
    (void)state;
    kmla_device none = device_of(0, 0, 0, 0, 0);
    kmla_shape shape = shape_of(2, 3, 12, 1000);
    kmla_plan plan = plan_of(&shape, NULL);
    kmla_plan same = plan_of(&shape, &none);
    assert_memory_equal(&plan, &same, sizeof plan);
    assert_int_equal(plan.reader, KMLA_READER_HOST);
    assert_int_equal(plan.splits, 1);
    assert_int_equal(plan.splits_chosen_by, KMLA_CHOSEN_BY_PLANNER);
    assert_int_equal(plan.workspace_bytes, 0);
    assert_int_equal(plan.chunks, 16);
    assert_int_equal(plan.chunks_per_split, 16);
    shape.splits = 5;
    plan = plan_of(&shape, NULL);
    assert_int_equal(plan.splits, 5);
    assert_int_equal(plan.splits_chosen_by, KMLA_CHOSEN_BY_CALLER);
    assert_int_equal(plan.chunks_per_split, 4);
    assert_int_equal(plan.workspace_bytes, 5 * 6 * 12 * 1028);
    shape = shape_of(7, 0, 12, 1000); // one row of each request is the default
    plan = plan_of(&shape, NULL);
    assert_int_equal(plan.shape.rows_per_request, 1);
    assert_int_equal(plan.shape.rows, 7);
}

// The best reader of a card and KV format, and what becomes of one that was asked for.
static void plan_reader(void** state) {
    (void)state;
    const struct {
        int32_t major, minor, kv_format, asked, reader; // reader 0: unsupported
    } rows[] = {
        {9, 0, KMLA_KV_PACKED, 0, KMLA_READER_HOPPER},
        {9, 0, KMLA_KV_E4M3, 0, KMLA_READER_HOPPER},
        {9, 0, KMLA_KV_BF16, 0, KMLA_READER_PORTABLE},
        {8, 0, KMLA_KV_PACKED, 0, KMLA_READER_PORTABLE},
        {8, 9, KMLA_KV_E4M3, 0, KMLA_READER_PORTABLE},
        {9, 1, KMLA_KV_PACKED, 0, KMLA_READER_PORTABLE}, // wgmma is 9.0's alone
        {10, 0, KMLA_KV_PACKED, 0, KMLA_READER_PORTABLE},
        {12, 0, KMLA_KV_PACKED, 0, KMLA_READER_PORTABLE},
        {9, 0, KMLA_KV_PACKED, KMLA_READER_PORTABLE, KMLA_READER_PORTABLE},
        {9, 0, KMLA_KV_E4M3, KMLA_READER_PORTABLE, KMLA_READER_PORTABLE},
        {9, 0, KMLA_KV_PACKED, KMLA_READER_HOPPER, KMLA_READER_HOPPER},
        {9, 0, KMLA_KV_BF16, KMLA_READER_HOPPER, 0},
        {8, 0, KMLA_KV_PACKED, KMLA_READER_HOPPER, 0},
        {12, 0, KMLA_KV_PACKED, KMLA_READER_HOPPER, 0},
    };
    for (int i = 0; i < COUNT(rows); ++i) {
        kmla_device card = device_of(rows[i].major, rows[i].minor, 132, 232448, 233472);
        kmla_shape shape = shape_of(1, 4, 99, 4096);
        shape.kv_format = rows[i].kv_format;
        shape.reader = rows[i].asked;
        if (rows[i].reader) {
            kmla_plan plan = plan_of(&shape, &card);
            assert_int_equal(plan.reader, rows[i].reader);
            assert_int_equal(plan.shape.reader, rows[i].reader);
        } else {
            kmla_error error = dirty_error();
            kmla_plan plan;
            expect_failure(kmla_plan_decode(&shape, &card, &plan, &error), &error,
                           KMLA_ERROR_UNSUPPORTED, "shape.reader");
        }
    }
    kmla_shape shape = shape_of(1, 4, 99, 4096); // the host reader takes the place of either
    for (shape.reader = 0; shape.reader <= KMLA_READER_HOPPER; ++shape.reader) {
        assert_int_equal(plan_of(&shape, NULL).reader, KMLA_READER_HOST);
    }
}

// The caller's tile is taken, or refused where the reader has no such.
static void plan_tiles(void** state) {
    (void)state;
    kmla_device card = h200(), small = rtx_pro_6000();
    for (int32_t reader = KMLA_READER_PORTABLE; reader <= KMLA_READER_HOPPER; ++reader) {
        for (int i = 0; i < COUNT(hopper_tiles); ++i) {
            kmla_shape shape = shape_of(3, 4, 99, 4096);
            int32_t tile = shape.tile = hopper_tiles[i];
            shape.reader = reader;
            if (reader == KMLA_READER_PORTABLE && tile != 8 && tile != 16 && tile != 32) {
                kmla_error error = dirty_error();
                kmla_plan plan;
                expect_failure(kmla_plan_decode(&shape, &card, &plan, &error), &error,
                               KMLA_ERROR_ARGUMENT, "shape.tile");
                shape.reader = 0; // the planner's reader is the portable one, too
                expect_failure(kmla_plan_decode(&shape, &small, &plan, &error), &error,
                               KMLA_ERROR_ARGUMENT, "shape.tile");
                continue;
            }
            kmla_plan plan = plan_of(&shape, &card);
            assert_int_equal(plan.tile, tile);
            assert_int_equal(plan.tiles_per_request, (396 + tile - 1) / tile);
            assert_int_equal(plan.groups, 3);
            shape.slot_list = 1; // each row reads tokens of its own
            plan = plan_of(&shape, &card);
            assert_int_equal(plan.tiles_per_request, (99 + tile - 1) / tile);
            assert_int_equal(plan.groups, 12);
        }
    }
    kmla_shape few = shape_of(30, 1, 4, 4096); // a larger tile would hold nothing more
    assert_int_equal(plan_of(&few, &card).tile, 8);
    assert_int_equal(plan_of(&few, &small).tile, 8);
}

static void plan_ragged(void** state) {
    (void)state;
    kmla_device card = h200();
    kmla_shape shape = shape_of(5, 4, 12, 4096);
    shape.ragged = 1;
    shape.rows = 13;
    shape.lengths.lengths_kind = KMLA_LENGTHS_PER_REQUEST;
    shape.tile = 32;
    shape.splits = 2;
    kmla_plan plan = plan_of(&shape, &card);
    assert_int_equal(plan.shape.rows, 13);
    assert_int_equal(plan.groups, 5);
    assert_int_equal(plan.tiles_per_request, 2);
    assert_int_equal(plan.workspace_bytes, 2 * 13 * 12 * 1028);
}

static int32_t kv_pitch(int32_t kv_format) {
    return kv_format == KMLA_KV_PACKED ? 656 : kv_format == KMLA_KV_E4M3 ? 592 : 1168;
}

// Two stages of 64 tokens (BF16: 32), what warps exchange of scores (of three other groups at once,
// or one if there is more), weights (two for BF16 KV: high and low), a packed step's ratios and
// exponents, and 32 copies of packed records.
static int32_t portable_bytes(int32_t kv_format, int32_t tile) {
    int packed = kv_format == KMLA_KV_PACKED, bf16 = kv_format == KMLA_KV_BF16;
    int32_t step = bf16 ? 32 : 64, scores = tile * step * 4;
    return 128 + 28 * tile + 2 * step * kv_pitch(kv_format) +
           scores * (tile * step > 1024 ? 1 : 3) + tile * (step + 8) * 2 * (bf16 ? 2 : 1) +
           (packed ? step * 4 * 2 + step * 4 + 32 * 32 : 0);
}

// A kilobyte or two of barriers and of what is said of each vector, query, two buffers of weights
// of 64 tokens, a ring of runs of 32 records, a packed step's ratios twice, seven numbers of each
// vector, and what each of 256 threads that score keeps of every eight: 8 bytes.
static int32_t hopper_bytes(int32_t kv_format, int32_t tile, int32_t runs) {
    int32_t small = 256 + 28 * tile <= 1024 ? 1024 : 2048;
    return small + tile * 576 * 2 + 2 * tile * 64 * 2 + runs * 32 * kv_pitch(kv_format) +
           (kv_format == KMLA_KV_PACKED ? 2 * 4 * 64 * 2 : 0) + 7 * tile * 4 +
           256 * (tile / 8) * 8;
}

// The most runs for which there is room, of 5 to 10.
static int32_t longest_ring(int32_t kv_format, int32_t tile, int32_t shared_bytes) {
    int32_t runs = 5;
    while (runs < 10 && hopper_bytes(kv_format, tile, runs + 1) <= shared_bytes) {
        ++runs;
    }
    return runs;
}

// Every variant of the portable reader fits the smallest cards, whether one block or two share an
// SM.
static void plan_shared_memory(void** state) {
    (void)state;
    for (int32_t format = 0; format <= 2; ++format) {
        for (int i = 0; i < COUNT(portable_tiles); ++i) {
            int32_t tile = portable_tiles[i];
            kmla_shape shape = shape_of(1, 4, 99, 4096);
            shape.kv_format = format;
            shape.reader = KMLA_READER_PORTABLE;
            shape.tile = tile;
            for (int32_t resident = 1; resident <= 2; ++resident) {
                int registers = format != KMLA_KV_BF16 && tile <= 16;
                int32_t bytes = portable_bytes(format, tile);
                kmla_device card = h200();
                card.shared_bytes_sm = resident * (bytes + 1024);
                kmla_plan plan = plan_of(&shape, &card);
                assert_int_equal(plan.resident, registers ? resident : 1);
                assert_int_equal(plan.stages, 2);
                assert_int_equal(plan.shared_bytes, bytes);
                assert_true(bytes % 16 == 0 && bytes <= 101376);
                card.shared_bytes_sm -= resident == 2; // a byte less, and one block is alone
                assert_int_equal(plan_of(&shape, &card).resident, 1);
            }
        }
    }
}

// Every variant of the Hopper reader fits its card, with as long a ring as there is room for.
static void plan_ring(void** state) {
    (void)state;
    for (int32_t format = 0; format <= KMLA_KV_E4M3; ++format) {
        for (int i = 0; i < COUNT(hopper_tiles); ++i) {
            int32_t tile = hopper_tiles[i];
            kmla_device card = h200();
            kmla_shape shape = shape_of(1, 4, 99, 4096);
            shape.kv_format = format;
            shape.tile = tile;
            kmla_plan plan = plan_of(&shape, &card);
            assert_int_equal(plan.reader, KMLA_READER_HOPPER);
            assert_int_equal(plan.resident, 1);
            assert_int_equal(plan.stages, longest_ring(format, tile, 232448));
            assert_int_equal(plan.shared_bytes, hopper_bytes(format, tile, plan.stages));
            assert_true(plan.shared_bytes % 16 == 0 && plan.shared_bytes <= 232448);
            for (int32_t runs = 5; runs <= 10; ++runs) {
                card.shared_bytes = hopper_bytes(format, tile, runs);
                plan = plan_of(&shape, &card);
                assert_int_equal(plan.stages, runs);
                assert_int_equal(plan.shared_bytes, card.shared_bytes);
                card.shared_bytes = hopper_bytes(format, tile, runs + 1) - 1;
                assert_int_equal(plan_of(&shape, &card).stages, runs);
            }
        }
    }
}

// A byte less than a tile needs: the planner takes a smaller one, and none if the caller insists.
static void plan_fits_shared_memory(void** state) { // WS-04
    (void)state;
    for (int32_t reader = KMLA_READER_PORTABLE; reader <= KMLA_READER_HOPPER; ++reader) {
        int hopper = reader == KMLA_READER_HOPPER;
        for (int32_t format = 0; format <= (hopper ? KMLA_KV_E4M3 : KMLA_KV_BF16); ++format) {
            for (int i = 0; i < (hopper ? COUNT(hopper_tiles) : COUNT(portable_tiles)); ++i) {
                int32_t tile = hopper ? hopper_tiles[i] : portable_tiles[i];
                int32_t need = hopper ? hopper_bytes(format, tile, 5)
                                      : portable_bytes(format, tile);
                kmla_device card = device_of(9, 0, 132, need, 0);
                kmla_shape shape = shape_of(1, 4, 99, 4096);
                kmla_error error = dirty_error();
                kmla_plan plan;
                char both[2][16];
                snprintf(both[0], sizeof both[0], "%d", (int)need - 1);
                snprintf(both[1], sizeof both[1], "%d", (int)need);
                shape.kv_format = format;
                shape.reader = reader;
                shape.tile = tile;
                assert_int_equal(plan_of(&shape, &card).shared_bytes, need);
                card.shared_bytes = need - 1;
                fill_bytes(&plan, 0x55, sizeof plan);
                expect_failure(kmla_plan_decode(&shape, &card, &plan, &error), &error,
                               KMLA_ERROR_UNSUPPORTED, both[0]);
                assert_non_null(strstr(error.message, both[1]));
                assert_non_null(strstr(error.message, "device.shared_bytes"));
                expect_bytes(&plan, 0x55, sizeof plan);
                shape.tile = 0;
                if (tile > 8) { // the portable reader's largest may need less than the next
                    plan = plan_of(&shape, &card);
                    assert_true(plan.tile != tile && plan.shared_bytes < need);
                } else if (hopper) { // the portable reader needs less
                    shape.reader = 0;
                    assert_int_equal(plan_of(&shape, &card).reader, KMLA_READER_PORTABLE);
                }
            }
        }
    }
}

static void plan_device_errors(void** state) {
    (void)state;
    const mutation mutations[] = {
        I32(kmla_device, compute_major, 7, KMLA_ERROR_UNSUPPORTED),
        I32(kmla_device, compute_major, 0, KMLA_ERROR_UNSUPPORTED),
        I32(kmla_device, compute_major, -1, KMLA_ERROR_ARGUMENT),
        I32(kmla_device, compute_minor, -1, KMLA_ERROR_ARGUMENT),
        I32(kmla_device, multiprocessors, 0, KMLA_ERROR_ARGUMENT),
        I32(kmla_device, multiprocessors, -1, KMLA_ERROR_ARGUMENT),
        I32(kmla_device, shared_bytes, 0, KMLA_ERROR_UNSUPPORTED),
        I32(kmla_device, shared_bytes, 49152, KMLA_ERROR_UNSUPPORTED),
        I32(kmla_device, shared_bytes, -1, KMLA_ERROR_ARGUMENT),
        I32(kmla_device, shared_bytes_sm, -1, KMLA_ERROR_ARGUMENT),
    };
    kmla_shape shape = shape_of(1, 4, 99, 4096);
    for (int i = 0; i < COUNT(mutations); ++i) {
        kmla_device device = h200();
        kmla_error error = dirty_error();
        kmla_plan plan;
        mutate(&device, &mutations[i]);
        expect_failure(kmla_plan_decode(&shape, &device, &plan, &error), &error,
                       mutations[i].wanted, mutations[i].named);
    }
    kmla_device turing = device_of(7, 5, 72, 65536, 65536);
    kmla_error error = dirty_error();
    kmla_plan plan;
    expect_failure(kmla_plan_decode(&shape, &turing, &plan, &error), &error,
                   KMLA_ERROR_UNSUPPORTED, "7.5");
    assert_non_null(strstr(error.message, "8.0"));
    kmla_device unknown_sm = h200();
    unknown_sm.shared_bytes_sm = 0;
    plan_of(&shape, &unknown_sm);
}

static void plan_shape_errors(void** state) {
    (void)state;
    const mutation mutations[] = {
        I32(kmla_shape, requests, 0, KMLA_ERROR_ARGUMENT),
        I32(kmla_shape, requests, -1, KMLA_ERROR_ARGUMENT),
        I32(kmla_shape, requests, 65536, KMLA_ERROR_ARGUMENT),
        I32(kmla_shape, requests, 3, KMLA_ERROR_ARGUMENT), // rows is 8, as of two requests
        I32(kmla_shape, rows, 7, KMLA_ERROR_ARGUMENT),
        I32(kmla_shape, rows, -8, KMLA_ERROR_ARGUMENT),
        I32(kmla_shape, rows, 65536, KMLA_ERROR_ARGUMENT),
        I32(kmla_shape, rows_per_request, -1, KMLA_ERROR_ARGUMENT),
        I32(kmla_shape, rows_per_request, 65536, KMLA_ERROR_ARGUMENT),
        I32(kmla_shape, heads, 0, KMLA_ERROR_ARGUMENT),
        I32(kmla_shape, heads, 4097, KMLA_ERROR_ARGUMENT),
        I32(kmla_shape, kv_format, 3, KMLA_ERROR_ARGUMENT),
        I32(kmla_shape, kv_format, -1, KMLA_ERROR_ARGUMENT),
        I32(kmla_shape, query_format, 3, KMLA_ERROR_ARGUMENT),
        I32(kmla_shape, mode, 2, KMLA_ERROR_ARGUMENT),
        I32(kmla_shape, page_tokens, -1, KMLA_ERROR_ARGUMENT),
        I64(kmla_shape, capacity_tokens, 0, KMLA_ERROR_ARGUMENT),
        I64(kmla_shape, capacity_tokens, -1, KMLA_ERROR_ARGUMENT),
        I64(kmla_shape, capacity_tokens, 67108865, KMLA_ERROR_ARGUMENT),
        I64(kmla_shape, capacity_tokens, INT64_MAX, KMLA_ERROR_ARGUMENT),
        I32(kmla_shape, split_mode, 2, KMLA_ERROR_ARGUMENT),
        I32(kmla_shape, splits, -1, KMLA_ERROR_ARGUMENT),
        I32(kmla_shape, splits, 1025, KMLA_ERROR_ARGUMENT),
        I32(kmla_shape, single_split_chunks, -1, KMLA_ERROR_ARGUMENT),
        I32(kmla_shape, partial_type, 2, KMLA_ERROR_ARGUMENT),
        I32(kmla_shape, tile, 12, KMLA_ERROR_ARGUMENT),
        I32(kmla_shape, tile, 64, KMLA_ERROR_ARGUMENT),
        I32(kmla_shape, tile, -8, KMLA_ERROR_ARGUMENT),
        I32(kmla_shape, reader, 3, KMLA_ERROR_ARGUMENT),
        I32(kmla_shape, reader, -1, KMLA_ERROR_ARGUMENT),
        I32(kmla_shape, ragged, 2, KMLA_ERROR_ARGUMENT),
        I32(kmla_shape, slot_list, 2, KMLA_ERROR_ARGUMENT),
        I32(kmla_shape, slot_list, 1, KMLA_ERROR_ARGUMENT), // lengths are per request
        I32(kmla_shape, lengths.lengths_kind, 2, KMLA_ERROR_ARGUMENT),
        I32(kmla_shape, lengths.lengths_kind, KMLA_LENGTHS_PER_ROW, KMLA_ERROR_ARGUMENT), // 9 ranks
        I32(kmla_shape, lengths.rows_kind, 2, KMLA_ERROR_ARGUMENT),
        I32(kmla_shape, lengths.window_tokens, -1, KMLA_ERROR_ARGUMENT),
        I32(kmla_shape, lengths.dcp.ranks, -1, KMLA_ERROR_ARGUMENT),
        I32(kmla_shape, lengths.dcp.rank, 9, KMLA_ERROR_ARGUMENT),
        I32(kmla_shape, lengths.dcp.rank, -1, KMLA_ERROR_ARGUMENT),
        I32(kmla_shape, lengths.dcp.interleave, -1, KMLA_ERROR_ARGUMENT),
    };
    kmla_device card = h200();
    kmla_plan plan;
    kmla_error error;
    kmla_shape good = shape_of(2, 4, 99, 4096);
    good.rows = 8;
    good.lengths = length_rule(KMLA_LENGTHS_PER_REQUEST, KMLA_ROWS_CAUSAL, 0, 9, 8, 1);
    plan_of(&good, &card);
    for (int i = 0; i < COUNT(mutations); ++i) {
        kmla_shape shape = good;
        const char* dot = strrchr(mutations[i].named, '.');
        mutate(&shape, &mutations[i]);
        fill_bytes(&plan, 0x55, sizeof plan);
        error = dirty_error();
        expect_failure(kmla_plan_decode(&shape, &card, &plan, &error), &error, mutations[i].wanted,
                       dot ? dot + 1 : mutations[i].named);
        expect_bytes(&plan, 0x55, sizeof plan);
        error = dirty_error(); // the host reader's plans are checked no less
        expect_failure(kmla_plan_decode(&shape, NULL, &plan, &error), &error, mutations[i].wanted,
                       dot ? dot + 1 : mutations[i].named);
    }
    kmla_shape shape = good;
    shape.ragged = 1;
    shape.rows = 0;
    error = dirty_error();
    expect_failure(kmla_plan_decode(&shape, &card, &plan, &error), &error, KMLA_ERROR_ARGUMENT,
                   "shape.rows");
    shape.rows = 65535;
    shape.requests = 65535; // the grid has no room for the layer of dead rows
    error = dirty_error();
    expect_failure(kmla_plan_decode(&shape, &card, &plan, &error), &error, KMLA_ERROR_ARGUMENT,
                   "shape.requests");
    shape = shape_of(2, 4, 99, 4096);
    shape.slot_list = 1;
    plan_of(&shape, &card);
    shape.ragged = 1;
    shape.rows = 8;
    error = dirty_error();
    expect_failure(kmla_plan_decode(&shape, &card, &plan, &error), &error, KMLA_ERROR_ARGUMENT,
                   "slot_list");
    shape = shape_of(65535, 65535, 99, 4096); // the product is no row count, and no UB
    error = dirty_error();
    expect_failure(kmla_plan_decode(&shape, &card, &plan, &error), &error, KMLA_ERROR_ARGUMENT,
                   "shape.rows");
    error = dirty_error();
    expect_failure(kmla_plan_decode(NULL, &card, &plan, &error), &error, KMLA_ERROR_ARGUMENT,
                   "shape");
    error = dirty_error();
    expect_failure(kmla_plan_decode(&good, &card, NULL, &error), &error, KMLA_ERROR_ARGUMENT,
                   "plan");
}

static void expect_waves(const kmla_shape* shape, const kmla_device* device, const char* wanted) {
    kmla_plan plan = plan_of(shape, device);
    if (!strstr(plan.reason, wanted)) {
        fail_msg("wanted '%s' in '%s'", wanted, plan.reason);
    }
}

// Two blocks of the portable reader share an SM, if its shared memory has room for them and its
// registers, too: never with BF16 KV or the large tile.
static void plan_waves(void** state) {
    (void)state;
    kmla_device large = h200(), small = rtx_pro_6000();
    kmla_shape shape = shape_of(64, 1, 12, 8192);
    shape.splits = 4; // 256 blocks
    shape.tile = 16;
    shape.reader = KMLA_READER_PORTABLE;
    expect_waves(&shape, &large, "256 blocks on 132 SMs in 1 wave,");
    expect_waves(&shape, &small, "256 blocks on 188 SMs in 2 waves,");
    shape.kv_format = KMLA_KV_BF16;
    expect_waves(&shape, &large, "in 2 waves,");
    shape.tile = 32;
    shape.kv_format = KMLA_KV_E4M3;
    expect_waves(&shape, &large, "in 2 waves,");
    shape.tile = 16;
    expect_waves(&shape, &large, "in 1 wave,");
    shape.kv_format = KMLA_KV_PACKED;
    shape.reader = KMLA_READER_HOPPER;
    expect_waves(&shape, &large, "in 2 waves,");
}

static kmla_shape random_shape(void) {
    kmla_shape shape = shape_of((int32_t)random_between(1, 256), (int32_t)random_between(1, 8),
                                (int32_t)random_between(1, 130), random_between(1, 200000));
    shape.kv_format = (int32_t)random_between(0, 2);
    shape.partial_type = (int32_t)random_between(0, 1);
    shape.split_mode = (int32_t)random_between(0, 1);
    return shape;
}

// Tile and splits together have the least estimated time of all that the caller could ask for; of
// equals the smaller tile, then the fewer splits.
static void expect_best_choice(const kmla_shape* shape, const kmla_device* card) {
    kmla_plan chosen = plan_of(shape, card);
    double least_us = kmla_i_decode_us(&chosen, chosen.splits);
    int32_t most = chosen.chunks < 1024 ? chosen.chunks : 1024;
    for (int i = 0; i < COUNT(hopper_tiles); ++i) {
        kmla_shape forced = *shape;
        kmla_plan other;
        forced.tile = hopper_tiles[i];
        forced.splits = 1;
        if (kmla_plan_decode(&forced, card, &other, NULL) != KMLA_OK) {
            continue; // the reader has no such tile, or the card no room for it
        }
        for (forced.splits = shape->splits ? shape->splits : 1; forced.splits <= most;
             ++forced.splits) {
            other = plan_of(&forced, card);
            double us = kmla_i_decode_us(&other, other.splits);
            int smaller = other.tile < chosen.tile ||
                          (other.tile == chosen.tile && other.splits < chosen.splits);
            if (us < least_us || (us == least_us && smaller)) {
                fail_msg("chosen: %s\nbetter: %s", chosen.reason, other.reason);
            }
            if (shape->splits) {
                break;
            }
        }
    }
}

static void plan_is_best(void** state) {
    (void)state;
    random_state = 16;
    for (int trial = 0; trial < 120; ++trial) {
        kmla_device card = trial % 2 ? h200() : rtx_pro_6000();
        kmla_shape shape = random_shape();
        shape.reader = (int32_t)random_between(0, 1);
        if (trial % 4 == 0) {
            shape.requests = (int32_t)random_between(1, 4); // where splits matter most
        }
        shape.capacity_tokens = random_between(1, 20000);
        shape.splits = trial % 5 ? 0 : (int32_t)random_between(1, 1 + shape.capacity_tokens / 64);
        expect_best_choice(&shape, &card);
    }
}

// What the benchmark times: plans are whole, fill the card, and the reason has what was chosen. The
// tile and splits are those of the Hopper reader on an H200: but for the first shape they fill at
// least 95 of 100 SMs in every wave.
static void plan_of_benchmark(void** state) {
    (void)state;
    const int32_t rows[][6] = {
        // requests, rows, heads, tokens; tile, splits (0: any)
        {1, 4, 99, 2048, 32, 8},     {1, 4, 99, 8192, 56, 16},    {1, 4, 99, 16384, 56, 16},
        {1, 4, 99, 65536, 56, 16},   {1, 1, 99, 16384, 32, 32},   {8, 4, 99, 8192, 56, 2},
        {1, 1, 12, 131072, 16, 0},   {64, 1, 12, 8192, 16, 2},    {128, 1, 8, 8192, 8, 1},
        {128, 1, 128, 4096, 48, 1},  {128, 2, 128, 4096, 56, 1},  {32, 4, 12, 16384, 48, 4},
    };
    for (int i = 0; i < COUNT(rows) * 3; ++i) {
        const int32_t* r = rows[i / 3];
        kmla_device card = i % 3 == 2 ? rtx_pro_6000() : h200();
        kmla_shape shape = shape_of(r[0], r[1], r[2], r[3]);
        shape.reader = i % 3 == 1 ? KMLA_READER_PORTABLE : 0;
        kmla_plan plan = plan_of(&shape, &card);
        char numbers[64];
        int32_t vectors = r[1] * r[2], tiles = (vectors + plan.tile - 1) / plan.tile;
        assert_int_equal(plan.reader, i % 3 ? KMLA_READER_PORTABLE : KMLA_READER_HOPPER);
        assert_int_equal(plan.tiles_per_request, tiles);
        assert_int_equal(plan.groups, r[0]);
        assert_int_equal(plan.chunks, r[3] / 64);
        assert_int_equal(plan.chunks_per_split, (plan.chunks + plan.splits - 1) / plan.splits);
        assert_int_equal(plan.launches, plan.splits > 1 ? 2 : 1);
        assert_int_equal(plan.workspace_bytes,
                         plan.splits > 1 ? (uint64_t)plan.splits * (uint64_t)(r[0] * vectors) * 1028
                                         : 0);
        if (i % 3 == 0) {
            assert_int_equal(plan.tile, r[4]);
            assert_true(r[5] == 0 || plan.splits == r[5]);
            assert_int_equal(plan.shared_bytes,
                             hopper_bytes(KMLA_KV_PACKED, plan.tile, plan.stages));
        } else {
            assert_int_equal(plan.shared_bytes, portable_bytes(KMLA_KV_PACKED, plan.tile));
        }
        int64_t blocks = (int64_t)tiles * r[0] * plan.splits;
        assert_true(2 * blocks > card.multiprocessors); // not half of the card idles
        snprintf(numbers, sizeof numbers, "splits %d (planner): %lld blocks on %d SMs",
                 (int)plan.splits, (long long)blocks, (int)card.multiprocessors);
        assert_non_null(strstr(plan.reason, numbers));
        expect_best_choice(&shape, &card);
    }
}

static void plan_properties(void** state) {
    (void)state;
    random_state = 6;
    for (int trial = 0; trial < 400; ++trial) {
        kmla_device card = trial % 2 ? h200() : rtx_pro_6000();
        kmla_shape shape = random_shape();
        shape.splits = trial % 5 ? 0 : (int32_t)random_between(1, 1024);
        kmla_plan plan = plan_of(&shape, &card);
        int64_t vectors = (int64_t)shape.rows_per_request * shape.heads;
        int64_t chunks = (shape.capacity_tokens + 63) / 64;
        assert_true((int64_t)plan.tile * plan.tiles_per_request >= vectors);
        assert_true((int64_t)plan.tile * (plan.tiles_per_request - 1) < vectors);
        assert_int_equal(plan.chunks, chunks);
        assert_true(plan.splits >= 1 && plan.splits <= 1024);
        assert_true((int64_t)plan.chunks_per_split * plan.splits >= chunks);
        assert_true((int64_t)(plan.chunks_per_split - 1) * plan.splits < chunks);
        assert_int_equal(plan.launches, plan.splits > 1 ? 2 : 1);
        assert_true(plan.shared_bytes <= card.shared_bytes);
        assert_true(strlen(plan.reason) < sizeof plan.reason - 1);
        if (shape.splits) {
            assert_int_equal(plan.splits, shape.splits);
        } else {
            assert_true(plan.splits <= chunks); // no split is empty by construction
        }
        uint64_t vector_bytes = shape.partial_type == KMLA_FP32 ? 2052 : 1028;
        uint64_t all_vectors = (uint64_t)vectors * (uint64_t)shape.requests;
        assert_int_equal(plan.workspace_bytes,
                         plan.splits > 1 ? (uint64_t)plan.splits * all_vectors * vector_bytes : 0);
    }
    kmla_device card = h200();
    kmla_shape full = shape_of(512, 1, 128, 2048); // four tiles each: 16 waves without splits
    assert_int_equal(plan_of(&full, &card).splits, 1);
    kmla_shape lone = shape_of(1, 1, 12, 131072); // one tile: all SMs idle without splits
    assert_true(plan_of(&lone, &card).splits >= 32);
    kmla_shape most = shape_of(65535, 1, 4096, KMLA_MAX_CAPACITY_TOKENS); // nothing overflows
    most.splits = 1024;
    assert_true(strlen(plan_of(&most, &card).reason) < sizeof(((kmla_plan*)0)->reason) - 1);
    most.splits = 0;
    plan_of(&most, &card);
}

// =============================================================================
// Row capacities
// =============================================================================

static void expect_pick(const kmla_plan* const* plans, int32_t count, int32_t requests,
                        int32_t rows, int64_t tokens, int32_t wanted) {
    kmla_error error;
    int32_t index = -1;
    expect_ok(kmla_pick_plan(plans, count, requests, rows, tokens, &index, &error), &error);
    assert_int_equal(index, wanted);
}

static void row_capacities(void** state) {
    (void)state;
    enum { PLANS = 6 };
    // Not in order; 8 requests twice, for short and long contexts; one with fewer rows each.
    static const int32_t requests[PLANS] = {4, 1, 8, 2, 8, 8};
    static const int32_t rows[PLANS] = {4, 4, 4, 4, 4, 1};
    static const int64_t capacities[PLANS] = {4096, 4096, 131072, 4096, 4096, 4096};
    kmla_plan plans[PLANS];
    const kmla_plan* list[PLANS];
    kmla_error error = dirty_error();
    int32_t index = 77;
    for (int i = 0; i < PLANS; ++i) {
        const kmla_shape shape = shape_of(requests[i], rows[i], 6, capacities[i]);
        plans[i] = plan_of(&shape, NULL);
        list[i] = &plans[i];
    }
    expect_pick(list, PLANS, 0, 0, 0, 1);
    expect_pick(list, PLANS, 1, 4, 4096, 1);
    expect_pick(list, PLANS, 2, 5, 1, 3);
    expect_pick(list, PLANS, 1, 5, 1, 3);    // rows count, too
    expect_pick(list, PLANS, 3, 12, 100, 0);
    expect_pick(list, PLANS, 5, 5, 100, 5);  // 8 rows are less than 32
    expect_pick(list, PLANS, 5, 9, 100, 4);
    expect_pick(list, PLANS, 1, 1, 4097, 2); // only one is so long
    expect_pick(list, PLANS, 8, 32, 131072, 2);
    expect_failure(kmla_pick_plan(list, PLANS, 9, 0, 0, &index, &error), &error,
                   KMLA_ERROR_ARGUMENT, "9 requests");
    error = dirty_error();
    expect_failure(kmla_pick_plan(list, PLANS, 0, 33, 0, &index, &error), &error,
                   KMLA_ERROR_ARGUMENT, "33 rows");
    error = dirty_error();
    expect_failure(kmla_pick_plan(list, PLANS, 0, 0, 131073, &index, &error), &error,
                   KMLA_ERROR_ARGUMENT, "131073 tokens");
    error = dirty_error();
    expect_failure(kmla_pick_plan(list, 0, 0, 0, 0, &index, &error), &error, KMLA_ERROR_ARGUMENT,
                   "count");
    error = dirty_error();
    expect_failure(kmla_pick_plan(list, 1, -1, 0, 0, &index, &error), &error,
                   KMLA_ERROR_ARGUMENT, "requests");
    error = dirty_error();
    expect_failure(kmla_pick_plan(NULL, 1, 0, 0, 0, &index, &error), &error, KMLA_ERROR_ARGUMENT,
                   "plans");
    error = dirty_error();
    expect_failure(kmla_pick_plan(list, 1, 0, 0, 0, NULL, &error), &error, KMLA_ERROR_ARGUMENT,
                   "index");
    list[3] = NULL;
    error = dirty_error();
    expect_failure(kmla_pick_plan(list, PLANS, 0, 0, 0, &index, &error), &error,
                   KMLA_ERROR_ARGUMENT, "plans[i]");
    assert_int_equal(index, 77);
}

// =============================================================================
// Gathers
// =============================================================================

static kmla_gather_desc gather_desc(int32_t heads, int32_t ranks, int32_t rank, int32_t rows) {
    kmla_gather_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.heads = heads;
    desc.ranks = ranks;
    desc.rank = rank;
    desc.rows = rows;
    return desc;
}

static kmla_gather gather_of(const kmla_gather_desc* desc) {
    kmla_gather gather;
    kmla_error error;
    expect_ok(kmla_plan_gather(desc, &gather, &error), &error);
    return gather;
}

static void gathers_of_kimi_k3(void** state) { // HT-06 among them
    (void)state;
    static const int32_t record_bytes[] = {1152, 656, 576};
    for (int32_t format = 0; format < 3; ++format) {
        kmla_gather_desc desc = gather_desc(99, 9, 4, 1);
        desc.query_format = format;
        kmla_gather one = gather_of(&desc);
        assert_int_equal(one.exchanges, 1);
        assert_int_equal(one.gathered_heads, 99);
        assert_int_equal(one.first_head, 44);
        assert_int_equal(one.local_heads, 11);
        // What a rank sends a row: 12,672 bytes of BF16, 7,216 packed, 6,336 E4M3.
        assert_int_equal(one.query.slice_bytes, 11 * record_bytes[format]);
        assert_int_equal(one.query.offset_bytes, 44 * record_bytes[format]);
        desc.rows = 4;
        desc.stored_heads = 112;
        desc.out_type = KMLA_FP32;
        kmla_gather four = gather_of(&desc);
        assert_int_equal(four.query.slice_bytes, 4 * one.query.slice_bytes);
        assert_int_equal(four.query.row_stride, record_bytes[format]);
        assert_int_equal(four.query.head_stride, 4 * record_bytes[format]);
        assert_int_equal(four.query.bytes, 112 * 4 * record_bytes[format]);
        assert_int_equal(four.out.row_stride, 512);
        assert_int_equal(four.out.head_stride, 4 * 512);
        assert_int_equal(four.out.offset_bytes, 44 * 4 * 512 * 4);
        assert_int_equal(four.out.slice_bytes, 11 * 4 * 512 * 4);
        assert_int_equal(four.out.bytes, 112 * 4 * 512 * 4);
        assert_int_equal(four.lse.row_stride, 1);
        assert_int_equal(four.lse.head_stride, 4);
        assert_int_equal(four.lse.offset_bytes, 44 * 4 * 4);
        assert_int_equal(four.lse.slice_bytes, 11 * 4 * 4);
        assert_int_equal(four.lse.bytes, 112 * 4 * 4);
    }
    kmla_gather_desc desc = gather_desc(64, 4, 3, 1); // head h of rank r is r * 16 + h
    assert_int_equal(gather_of(&desc).first_head, 48);
    assert_int_equal(gather_of(&desc).gathered_heads, 64);
    desc = gather_desc(96, 0, 0, 2);                  // a replicated cache
    assert_int_equal(gather_of(&desc).exchanges, 0);
    assert_int_equal(gather_of(&desc).desc.ranks, 1);
    assert_int_equal(gather_of(&desc).local_heads, 96);
}

// Slices follow one another, cover the heads once, and are as the heads are dealt.
static void expect_slices(int32_t heads, int32_t ranks, int32_t equal) {
    int32_t next_head = 0, own[64] = {0}, widest = 0;
    for (int32_t head = 0; head < heads; ++head) {
        widest = ++own[head % ranks] > widest ? own[head % ranks] : widest;
    }
    for (int32_t rank = 0; rank < ranks; ++rank) {
        kmla_gather_desc desc = gather_desc(heads, ranks, rank, 3);
        desc.equal_slices = equal;
        kmla_gather gather = gather_of(&desc);
        assert_int_equal(gather.local_heads, own[rank]);
        assert_int_equal(gather.slice_heads, equal ? widest : own[rank]);
        assert_int_equal(gather.first_head, next_head);
        assert_int_equal(gather.gathered_heads, equal ? ranks * widest : heads);
        assert_int_equal(gather.desc.stored_heads, gather.gathered_heads);
        assert_int_equal(gather.query.offset_bytes, (int64_t)next_head * 3 * 1152);
        assert_int_equal(gather.query.slice_bytes, (int64_t)gather.slice_heads * 3 * 1152);
        next_head += gather.slice_heads;
        assert_true(gather.lse.offset_bytes + gather.lse.slice_bytes <= gather.lse.bytes);
    }
    assert_int_equal(next_head, equal ? ranks * widest : heads);
}

static void gather_slices(void** state) {
    (void)state;
    for (int32_t ranks = 1; ranks <= 16; ++ranks) {
        for (int32_t heads = 1; heads <= 130; ++heads) { // fewer than ranks, too
            expect_slices(heads, ranks, 0);
            expect_slices(heads, ranks, 1);
        }
    }
}

static void gather_errors(void** state) {
    (void)state;
    const mutation mutations[] = {
        I32(kmla_gather_desc, heads, 0, KMLA_ERROR_ARGUMENT),
        I32(kmla_gather_desc, heads, 4097, KMLA_ERROR_ARGUMENT),
        I32(kmla_gather_desc, ranks, -1, KMLA_ERROR_ARGUMENT),
        I32(kmla_gather_desc, ranks, 1025, KMLA_ERROR_ARGUMENT),
        I32(kmla_gather_desc, rank, -1, KMLA_ERROR_ARGUMENT),
        I32(kmla_gather_desc, rank, 9, KMLA_ERROR_ARGUMENT),
        I32(kmla_gather_desc, rows, 0, KMLA_ERROR_ARGUMENT),
        I32(kmla_gather_desc, rows, 65536, KMLA_ERROR_ARGUMENT),
        I32(kmla_gather_desc, query_format, 3, KMLA_ERROR_ARGUMENT),
        I32(kmla_gather_desc, out_type, 2, KMLA_ERROR_ARGUMENT),
        I32(kmla_gather_desc, equal_slices, 2, KMLA_ERROR_ARGUMENT),
        I32(kmla_gather_desc, stored_heads, 98, KMLA_ERROR_ARGUMENT),
        I32(kmla_gather_desc, stored_heads, 4097, KMLA_ERROR_ARGUMENT),
    };
    kmla_gather gather;
    for (int i = 0; i < COUNT(mutations); ++i) {
        kmla_gather_desc desc = gather_desc(99, 9, 2, 4);
        kmla_error error = dirty_error();
        fill_bytes(&gather, 0x55, sizeof gather);
        mutate(&desc, &mutations[i]);
        expect_failure(kmla_plan_gather(&desc, &gather, &error), &error, mutations[i].wanted,
                       mutations[i].named);
        expect_bytes(&gather, 0x55, sizeof gather);
    }
    kmla_gather_desc desc = gather_desc(4096, 9, 2, 4);
    kmla_error error = dirty_error();
    desc.equal_slices = 1; // 9 slices of 456 are 4,104
    expect_failure(kmla_plan_gather(&desc, &gather, &error), &error, KMLA_ERROR_ARGUMENT,
                   "equal_slices");
    error = dirty_error();
    expect_failure(kmla_plan_gather(NULL, &gather, &error), &error, KMLA_ERROR_ARGUMENT, "desc");
    error = dirty_error();
    expect_failure(kmla_plan_gather(&desc, NULL, &error), &error, KMLA_ERROR_ARGUMENT, "out");
}

// Filled arguments pass the checks of their calls, name the right places, and keep other fields.
static void gather_arguments(void** state) {
    (void)state;
    kmla_gather_desc desc = gather_desc(96, 9, 7, 4); // 10 heads, from 6 * 11 + 10 on
    desc.query_format = KMLA_QUERY_PACKED;
    desc.stored_heads = 112;
    kmla_gather gather = gather_of(&desc);
    kmla_error error;
    kmla_query_write write;
    memset(&write, 0, sizeof write);
    write.source = 0x1000;
    write.source_type = KMLA_FP32;
    expect_ok(kmla_gather_write(&gather, 0x10000, &write, &error), &error);
    expect_ok(kmla_check_query_write(&write, &error), &error);
    assert_int_equal(write.rows, 4);
    assert_int_equal(write.heads, 10);
    assert_int_equal(write.query_format, KMLA_QUERY_PACKED);
    assert_int_equal(write.source_type, KMLA_FP32);
    assert_int_equal(write.query, 0x10000 + 76 * 4 * 656);
    assert_int_equal(write.query_row_stride_bytes, 656);
    assert_int_equal(write.query_head_stride_bytes, 4 * 656);

    kmla_decode decode;
    memset(&decode, 0, sizeof decode);
    decode.scale = 0.25f;
    expect_ok(kmla_gather_decode(&gather, 0x10000, 0x20000, 0x30000, &decode, &error), &error);
    assert_true(decode.scale == 0.25f && decode.query == 0x10000 && decode.out == 0x20000);
    assert_int_equal(decode.query_head_stride_bytes, 4 * 656);
    assert_int_equal(decode.out_row_stride, 512);
    assert_int_equal(decode.out_head_stride, 2048);
    assert_int_equal(decode.lse, 0x30000);
    assert_int_equal(decode.lse_row_stride, 1);
    assert_int_equal(decode.lse_head_stride, 4);

    kmla_combine combine;
    memset(&combine, 0, sizeof combine);
    combine.out = 0x50000;
    combine.lse = 0x60000;
    combine.out_type = KMLA_FP32;
    expect_ok(kmla_gather_combine(&gather, KMLA_TRANSPORT_ALL_TO_ALL, 0x20000, 0x30000, &combine,
                                  &error),
              &error);
    expect_ok(kmla_check_combine(&combine, &error), &error);
    assert_int_equal(combine.parts, 9);
    assert_int_equal(combine.heads, 10);
    assert_int_equal(combine.share, 0);
    assert_int_equal(combine.part_out_stride, 10 * 4 * 512);
    assert_int_equal(combine.part_lse_stride, 10 * 4);
    assert_int_equal(combine.out_type, KMLA_FP32); // the caller's, in its own layout
    assert_int_equal(combine.out_row_stride, 0);

    expect_ok(kmla_gather_combine(&gather, KMLA_TRANSPORT_REDUCE_SCATTER, 0x20000, 0x30000,
                                  &combine, &error),
              &error);
    expect_ok(kmla_check_combine(&combine, &error), &error);
    assert_int_equal(combine.heads, 96);
    assert_int_equal(combine.share, 8);
    assert_int_equal(combine.part_lse_stride, 112 * 4); // whole arrays are gathered
    assert_int_equal(combine.out_type, KMLA_BF16);
    assert_int_equal(combine.out_head_stride, 2048);
    assert_int_equal(combine.lse_head_stride, 4);

    error = dirty_error();
    expect_failure(kmla_gather_combine(&gather, 2, 16, 16, &combine, &error), &error,
                   KMLA_ERROR_ARGUMENT, "transport");
    desc = gather_desc(3, 8, 5, 4);
    gather = gather_of(&desc); // a rank without heads
    expect_ok(kmla_gather_combine(&gather, KMLA_TRANSPORT_REDUCE_SCATTER, 0x20000, 0x30000,
                                  &combine, &error),
              &error);
    error = dirty_error();
    expect_failure(kmla_gather_combine(&gather, KMLA_TRANSPORT_ALL_TO_ALL, 16, 16, &combine,
                                       &error),
                   &error, KMLA_ERROR_ARGUMENT, "local_heads");
    error = dirty_error();
    expect_failure(kmla_gather_write(&gather, 16, &write, &error), &error, KMLA_ERROR_ARGUMENT,
                   "local_heads");
    error = dirty_error();
    expect_failure(kmla_gather_write(NULL, 16, &write, &error), &error, KMLA_ERROR_ARGUMENT,
                   "gather");
    error = dirty_error();
    expect_failure(kmla_gather_decode(&gather, 16, 16, 16, NULL, &error), &error,
                   KMLA_ERROR_ARGUMENT, "args");
}

// =============================================================================
// Checks of arguments
// =============================================================================

// Shapes whose arguments look different.
enum { PACKED, CODES, RAGGED, SLOTS, ONE_SPLIT };

static kmla_plan plan_kind(int kind) {
    kmla_shape shape = shape_of(2, 3, 11, 1000);
    kmla_device card = h200();
    shape.splits = kind == ONE_SPLIT ? 1 : 4;
    if (kind == CODES) {
        shape.kv_format = KMLA_KV_E4M3;
        shape.query_format = KMLA_QUERY_E4M3;
    }
    if (kind == RAGGED) {
        shape.ragged = 1;
        shape.rows = 6;
        shape.lengths.lengths_kind = KMLA_LENGTHS_PER_REQUEST;
    }
    shape.slot_list = kind == SLOTS;
    return plan_of(&shape, &card);
}

static kmla_decode decode_kind(int kind, const kmla_plan* plan) {
    kmla_decode args;
    memset(&args, 0, sizeof args);
    args.query = 0x10000;
    args.scale = 0.07216878f;
    args.query_scale = kind == CODES ? 0.5f : 0.0f;
    args.kv_scale = kind == CODES ? 0.25f : 0.0f;
    args.kv = 0x200000;
    args.kv_pages = 100;
    args.lengths = 0x3004;
    args.out = 0x40010;
    args.lse = 0x50004;
    if (kind == SLOTS) {
        args.slot_list = 0x60004;
        args.slot_list_width = 1000;
    } else {
        args.block_table = 0x70004;
        args.block_table_width = 16; // 1,000 tokens are 15.6 pages
    }
    args.row_offsets = kind == RAGGED ? 0x80004 : 0;
    if (kind != ONE_SPLIT) {
        args.workspace = 0x90000;
        args.workspace_bytes = plan->workspace_bytes;
    }
    return args;
}

static void expect_decode_failures(int kind, const mutation* mutations, int count) {
    kmla_plan plan = plan_kind(kind);
    kmla_error error;
    for (int i = 0; i < count; ++i) {
        kmla_decode args = decode_kind(kind, &plan);
        expect_ok(kmla_check_decode(&plan, &args, &error), &error);
        mutate(&args, &mutations[i]);
        error = dirty_error();
        expect_failure(kmla_check_decode(&plan, &args, &error), &error, mutations[i].wanted,
                       mutations[i].named);
        assert_int_equal(kmla_check_decode(&plan, &args, NULL), mutations[i].wanted);
    }
}

static void decode_errors(void** state) {
    (void)state;
    const int64_t huge = INT64_C(1) << 60;
    const mutation any[] = {
        U64(kmla_decode, query, 0, KMLA_ERROR_ARGUMENT),
        U64(kmla_decode, query, 0x10008, KMLA_ERROR_ARGUMENT),
        I64(kmla_decode, query_row_stride_bytes, -1152, KMLA_ERROR_ARGUMENT),
        I64(kmla_decode, query_row_stride_bytes, 12680, KMLA_ERROR_ARGUMENT),
        I64(kmla_decode, query_row_stride_bytes, huge, KMLA_ERROR_OVERFLOW),
        I64(kmla_decode, query_head_stride_bytes, -16, KMLA_ERROR_ARGUMENT),
        I64(kmla_decode, query_head_stride_bytes, 1160, KMLA_ERROR_ARGUMENT),
        I64(kmla_decode, query_head_stride_bytes, INT64_MAX - 15, KMLA_ERROR_OVERFLOW),
        I64(kmla_decode, query_head_stride_bytes, INT64_MIN, KMLA_ERROR_ARGUMENT),
        F32(kmla_decode, scale, 0, KMLA_ERROR_ARGUMENT),
        F32(kmla_decode, scale, -1, KMLA_ERROR_ARGUMENT),
        F32(kmla_decode, scale, NAN, KMLA_ERROR_ARGUMENT),
        F32(kmla_decode, scale, INFINITY, KMLA_ERROR_ARGUMENT),
        I32(kmla_decode, check_pages, 2, KMLA_ERROR_ARGUMENT),
        I32(kmla_decode, check_pages, -1, KMLA_ERROR_ARGUMENT),
        U64(kmla_decode, kv, 0, KMLA_ERROR_ARGUMENT),
        U64(kmla_decode, kv, 0x200008, KMLA_ERROR_ARGUMENT),
        U64(kmla_decode, kv, UINT64_MAX - 15, KMLA_ERROR_OVERFLOW),
        U64(kmla_decode, kv_pages, 0, KMLA_ERROR_ARGUMENT),
        U64(kmla_decode, kv_pages, UINT64_MAX, KMLA_ERROR_OVERFLOW),
        U64(kmla_decode, kv_pages, (UINT64_C(1) << 31) + 1, KMLA_ERROR_OVERFLOW),
        U64(kmla_decode, page_pitch_bytes, 64 * 656 - 16, KMLA_ERROR_ARGUMENT),
        U64(kmla_decode, page_pitch_bytes, 64 * 656 + 8, KMLA_ERROR_ARGUMENT),
        U64(kmla_decode, page_pitch_bytes, UINT64_MAX - 15, KMLA_ERROR_OVERFLOW),
        U64(kmla_decode, block_table, 0, KMLA_ERROR_ARGUMENT),
        U64(kmla_decode, block_table, 0x70002, KMLA_ERROR_ARGUMENT),
        I64(kmla_decode, block_table_width, 0, KMLA_ERROR_ARGUMENT),
        I64(kmla_decode, block_table_width, 15, KMLA_ERROR_ARGUMENT),
        I64(kmla_decode, block_table_width, -1, KMLA_ERROR_ARGUMENT),
        I64(kmla_decode, block_table_width, INT64_MAX, KMLA_ERROR_ARGUMENT),
        I64(kmla_decode, block_table_stride, -1, KMLA_ERROR_ARGUMENT),
        I64(kmla_decode, block_table_stride, huge, KMLA_ERROR_OVERFLOW),
        U64(kmla_decode, slot_list, 0x60000, KMLA_ERROR_ARGUMENT),
        U64(kmla_decode, row_offsets, 0x80000, KMLA_ERROR_ARGUMENT),
        U64(kmla_decode, lengths, 0, KMLA_ERROR_ARGUMENT),
        U64(kmla_decode, lengths, 0x3002, KMLA_ERROR_ARGUMENT),
        U64(kmla_decode, out, 0, KMLA_ERROR_ARGUMENT),
        U64(kmla_decode, out, 0x40008, KMLA_ERROR_ARGUMENT),
        I64(kmla_decode, out_row_stride, -512, KMLA_ERROR_ARGUMENT),
        I64(kmla_decode, out_row_stride, 11 * 512 - 8, KMLA_ERROR_ARGUMENT), // rows overlap
        I64(kmla_decode, out_row_stride, 11 * 512 + 4, KMLA_ERROR_ARGUMENT), // 8 bytes
        I64(kmla_decode, out_row_stride, huge, KMLA_ERROR_OVERFLOW),
        I64(kmla_decode, out_head_stride, 504, KMLA_ERROR_ARGUMENT), // heads overlap
        I64(kmla_decode, out_head_stride, 516, KMLA_ERROR_ARGUMENT),
        I64(kmla_decode, out_head_stride, -512, KMLA_ERROR_ARGUMENT),
        I64(kmla_decode, out_head_stride, huge, KMLA_ERROR_OVERFLOW),
        I32(kmla_decode, out_type, 2, KMLA_ERROR_ARGUMENT),
        I32(kmla_decode, out_type, -1, KMLA_ERROR_ARGUMENT),
        I32(kmla_decode, lse_unused_, 1, KMLA_ERROR_ARGUMENT),
        U64(kmla_decode, lse, 0x50002, KMLA_ERROR_ARGUMENT),
        I64(kmla_decode, lse_row_stride, -1, KMLA_ERROR_ARGUMENT),
        I64(kmla_decode, lse_row_stride, 10, KMLA_ERROR_ARGUMENT),
        I64(kmla_decode, lse_row_stride, huge, KMLA_ERROR_OVERFLOW),
        I64(kmla_decode, lse_head_stride, -1, KMLA_ERROR_ARGUMENT),
        I64(kmla_decode, lse_head_stride, huge, KMLA_ERROR_OVERFLOW),
        U64(kmla_decode, workspace, 0, KMLA_ERROR_WORKSPACE),
        U64(kmla_decode, workspace, 0x90008, KMLA_ERROR_ARGUMENT),
        U64(kmla_decode, workspace_bytes, 0, KMLA_ERROR_WORKSPACE),
        U64(kmla_decode, workspace_bytes, 4 * 66 * 1028 - 1, KMLA_ERROR_WORKSPACE),
    };
    const mutation codes[] = {
        F32(kmla_decode, query_scale, 0, KMLA_ERROR_ARGUMENT),
        F32(kmla_decode, query_scale, NAN, KMLA_ERROR_ARGUMENT),
        F32(kmla_decode, query_scale, -0.5, KMLA_ERROR_ARGUMENT),
        F32(kmla_decode, kv_scale, 0, KMLA_ERROR_ARGUMENT),
        F32(kmla_decode, kv_scale, INFINITY, KMLA_ERROR_ARGUMENT),
        F32(kmla_decode, kv_scale, -1, KMLA_ERROR_ARGUMENT),
        U64(kmla_decode, page_pitch_bytes, 64 * 576 - 16, KMLA_ERROR_ARGUMENT),
    };
    const mutation ragged[] = {
        U64(kmla_decode, row_offsets, 0, KMLA_ERROR_ARGUMENT),
        U64(kmla_decode, row_offsets, 0x80002, KMLA_ERROR_ARGUMENT),
    };
    const mutation slots[] = {
        U64(kmla_decode, slot_list, 0, KMLA_ERROR_ARGUMENT),
        U64(kmla_decode, slot_list, 0x60002, KMLA_ERROR_ARGUMENT),
        I64(kmla_decode, slot_list_width, 999, KMLA_ERROR_ARGUMENT),
        I64(kmla_decode, slot_list_stride, -1, KMLA_ERROR_ARGUMENT),
        I64(kmla_decode, slot_list_stride, huge, KMLA_ERROR_OVERFLOW),
        U64(kmla_decode, block_table, 0x70000, KMLA_ERROR_ARGUMENT),
        U64(kmla_decode, kv_pages, (UINT64_C(1) << 31) / 64 + 1, KMLA_ERROR_OVERFLOW),
    };
    expect_decode_failures(PACKED, any, COUNT(any));
    expect_decode_failures(CODES, codes, COUNT(codes));
    expect_decode_failures(RAGGED, ragged, COUNT(ragged));
    expect_decode_failures(SLOTS, slots, COUNT(slots));
}

static void decode_accepts(void** state) {
    (void)state;
    kmla_error error;
    kmla_plan plan = plan_kind(ONE_SPLIT);
    kmla_decode args = decode_kind(ONE_SPLIT, &plan); // one split needs no workspace
    expect_ok(kmla_check_decode(&plan, &args, &error), &error);
    args.lse = 0; // not wanted
    expect_ok(kmla_check_decode(&plan, &args, &error), &error);

    args = decode_kind(ONE_SPLIT, &plan); // stored 112 wide, page pitch of a hybrid cache
    args.query_row_stride_bytes = 112 * 1152;
    args.out_row_stride = 112 * 512;
    args.lse_row_stride = 112;
    args.page_pitch_bytes = 45056;
    expect_ok(kmla_check_decode(&plan, &args, &error), &error);

    args = decode_kind(ONE_SPLIT, &plan); // heads outside, rows inside
    args.out_row_stride = 512;
    args.out_head_stride = 6 * 512;
    args.lse_row_stride = 1;
    args.lse_head_stride = 6;
    expect_ok(kmla_check_decode(&plan, &args, &error), &error);
    args.out_head_stride = 6 * 512 - 8;
    error = dirty_error();
    expect_failure(kmla_check_decode(&plan, &args, &error), &error, KMLA_ERROR_ARGUMENT,
                   "head_stride");

    args = decode_kind(ONE_SPLIT, &plan); // one query for all heads is an input's right
    args.query_head_stride_bytes = 16;
    expect_ok(kmla_check_decode(&plan, &args, &error), &error);

    args = decode_kind(ONE_SPLIT, &plan); // 4 fp32 elements are 16 bytes
    args.out_type = KMLA_FP32;
    args.out_head_stride = 516;
    expect_ok(kmla_check_decode(&plan, &args, &error), &error);

    plan = plan_kind(PACKED);
    args = decode_kind(PACKED, &plan);
    args.workspace_bytes = plan.workspace_bytes - 1;
    error = dirty_error();
    expect_failure(kmla_check_decode(&plan, &args, &error), &error, KMLA_ERROR_WORKSPACE, "271392");
    assert_non_null(strstr(error.message, "271391"));
}

static void plan_tampering(void** state) {
    (void)state;
    const mutation mutations[] = {
        I32(kmla_plan, version, KMLA_VERSION + 1, KMLA_ERROR_ARGUMENT),
        I32(kmla_plan, version, 0, KMLA_ERROR_ARGUMENT),
        I32(kmla_plan, reader, 3, KMLA_ERROR_ARGUMENT),
        I32(kmla_plan, reader, -1, KMLA_ERROR_ARGUMENT),
        I32(kmla_plan, tile, 0, KMLA_ERROR_ARGUMENT),
        I32(kmla_plan, tiles_per_request, 0, KMLA_ERROR_ARGUMENT),
        I32(kmla_plan, groups, 0, KMLA_ERROR_ARGUMENT),
        I32(kmla_plan, splits, 0, KMLA_ERROR_ARGUMENT),
        I32(kmla_plan, splits, 1025, KMLA_ERROR_ARGUMENT),
        I32(kmla_plan, chunks_per_split, 0, KMLA_ERROR_ARGUMENT),
        I32(kmla_plan, shape.heads, 0, KMLA_ERROR_ARGUMENT),
        I32(kmla_plan, shape.page_tokens, 0, KMLA_ERROR_ARGUMENT),
        I32(kmla_plan, shape.kv_format, 3, KMLA_ERROR_ARGUMENT),
    };
    kmla_error error;
    kmla_plan good = plan_kind(PACKED);
    kmla_decode args = decode_kind(PACKED, &good);
    for (int i = 0; i < COUNT(mutations); ++i) {
        kmla_plan plan = good;
        mutate(&plan, &mutations[i]);
        error = dirty_error();
        expect_failure(kmla_check_decode(&plan, &args, &error), &error, mutations[i].wanted,
                       mutations[i].named);
    }
    error = dirty_error();
    expect_failure(kmla_check_decode(NULL, &args, &error), &error, KMLA_ERROR_ARGUMENT, "plan");
    error = dirty_error();
    expect_failure(kmla_check_decode(&good, NULL, &error), &error, KMLA_ERROR_ARGUMENT, "args");
}

static kmla_combine good_combine(void) {
    kmla_combine args;
    memset(&args, 0, sizeof args);
    args.parts = 9;
    args.rows = 4;
    args.heads = 11;
    args.part_out = 0x10000;
    args.part_lse = 0x20004;
    args.out = 0x30000;
    args.lse = 0x40004;
    return args;
}

static void combine_errors(void** state) {
    (void)state;
    const int64_t huge = INT64_C(1) << 60;
    const mutation mutations[] = {
        I32(kmla_combine, parts, 0, KMLA_ERROR_ARGUMENT),
        I32(kmla_combine, parts, 1025, KMLA_ERROR_ARGUMENT),
        I32(kmla_combine, rows, 0, KMLA_ERROR_ARGUMENT),
        I32(kmla_combine, rows, 65536, KMLA_ERROR_ARGUMENT),
        I32(kmla_combine, heads, -1, KMLA_ERROR_ARGUMENT),
        I32(kmla_combine, heads, 4097, KMLA_ERROR_ARGUMENT),
        I32(kmla_combine, part_type, 2, KMLA_ERROR_ARGUMENT),
        I32(kmla_combine, out_type, 2, KMLA_ERROR_ARGUMENT),
        I32(kmla_combine, share, 1000, KMLA_ERROR_ARGUMENT),
        I32(kmla_combine, share, -1, KMLA_ERROR_ARGUMENT),
        U64(kmla_combine, part_out, 0, KMLA_ERROR_ARGUMENT),
        U64(kmla_combine, part_out, 0x10004, KMLA_ERROR_ARGUMENT),
        I64(kmla_combine, part_out_stride, -8, KMLA_ERROR_ARGUMENT),
        I64(kmla_combine, part_out_stride, 4, KMLA_ERROR_ARGUMENT),
        I64(kmla_combine, part_out_stride, huge, KMLA_ERROR_OVERFLOW),
        I64(kmla_combine, part_row_stride, -8, KMLA_ERROR_ARGUMENT),
        I64(kmla_combine, part_row_stride, huge, KMLA_ERROR_OVERFLOW),
        I64(kmla_combine, part_head_stride, 513, KMLA_ERROR_ARGUMENT),
        I64(kmla_combine, part_head_stride, INT64_MAX, KMLA_ERROR_OVERFLOW),
        U64(kmla_combine, part_lse, 0, KMLA_ERROR_ARGUMENT),
        U64(kmla_combine, part_lse, 0x20001, KMLA_ERROR_ARGUMENT),
        I64(kmla_combine, part_lse_stride, -1, KMLA_ERROR_ARGUMENT),
        I64(kmla_combine, part_lse_row_stride, -1, KMLA_ERROR_ARGUMENT),
        I64(kmla_combine, part_lse_head_stride, -1, KMLA_ERROR_ARGUMENT),
        I64(kmla_combine, part_lse_head_stride, huge, KMLA_ERROR_OVERFLOW),
        U64(kmla_combine, out, 0, KMLA_ERROR_ARGUMENT),
        U64(kmla_combine, out, 0x30008, KMLA_ERROR_ARGUMENT),
        I64(kmla_combine, out_row_stride, 512, KMLA_ERROR_ARGUMENT),
        I64(kmla_combine, out_head_stride, 256, KMLA_ERROR_ARGUMENT),
        U64(kmla_combine, lse, 0x40001, KMLA_ERROR_ARGUMENT),
        I64(kmla_combine, lse_row_stride, 1, KMLA_ERROR_ARGUMENT),
        I64(kmla_combine, lse_head_stride, -1, KMLA_ERROR_ARGUMENT),
    };
    kmla_error error;
    kmla_combine args = good_combine();
    expect_ok(kmla_check_combine(&args, &error), &error);
    for (int i = 0; i < COUNT(mutations); ++i) {
        args = good_combine();
        mutate(&args, &mutations[i]);
        error = dirty_error();
        expect_failure(kmla_check_combine(&args, &error), &error, mutations[i].wanted,
                       mutations[i].named);
    }
    error = dirty_error();
    expect_failure(kmla_check_combine(NULL, &error), &error, KMLA_ERROR_ARGUMENT, "args");
    args = good_combine(); // 66 heads stored 80 wide, no lse
    args.heads = 66;
    args.part_row_stride = 80 * 512;
    args.part_lse_row_stride = 80;
    args.lse = 0;
    expect_ok(kmla_check_combine(&args, &error), &error);
}

static kmla_kv_write good_kv_write(int32_t format) {
    kmla_kv_write args;
    memset(&args, 0, sizeof args);
    args.tokens = 7;
    args.kv_format = format;
    args.kv_scale = format == KMLA_KV_E4M3 ? 0.5f : 0.0f;
    args.latent = 0x10000;
    args.rope = 0x20000;
    args.slots = 0x30008;
    args.kv = 0x40000;
    args.kv_pages = 3;
    return args;
}

static void kv_write_errors(void** state) {
    (void)state;
    const int64_t huge = INT64_C(1) << 60;
    const mutation mutations[] = {
        I32(kmla_kv_write, tokens, 0, KMLA_ERROR_ARGUMENT),
        I32(kmla_kv_write, tokens, -1, KMLA_ERROR_ARGUMENT),
        I32(kmla_kv_write, kv_format, 3, KMLA_ERROR_ARGUMENT),
        I32(kmla_kv_write, source_type, 2, KMLA_ERROR_ARGUMENT),
        I32(kmla_kv_write, scale_rule, 2, KMLA_ERROR_ARGUMENT),
        I32(kmla_kv_write, page_tokens, -1, KMLA_ERROR_ARGUMENT),
        U64(kmla_kv_write, latent, 0, KMLA_ERROR_ARGUMENT),
        U64(kmla_kv_write, latent, 0x10008, KMLA_ERROR_ARGUMENT),
        I64(kmla_kv_write, latent_stride, -512, KMLA_ERROR_ARGUMENT),
        I64(kmla_kv_write, latent_stride, 516, KMLA_ERROR_ARGUMENT),
        I64(kmla_kv_write, latent_stride, huge, KMLA_ERROR_OVERFLOW),
        U64(kmla_kv_write, rope, 0, KMLA_ERROR_ARGUMENT),
        U64(kmla_kv_write, rope, 0x20002, KMLA_ERROR_ARGUMENT),
        I64(kmla_kv_write, rope_stride, 65, KMLA_ERROR_ARGUMENT),
        I64(kmla_kv_write, rope_stride, -64, KMLA_ERROR_ARGUMENT),
        U64(kmla_kv_write, slots, 0, KMLA_ERROR_ARGUMENT),
        U64(kmla_kv_write, slots, 0x30004, KMLA_ERROR_ARGUMENT),
        U64(kmla_kv_write, kv, 0, KMLA_ERROR_ARGUMENT),
        U64(kmla_kv_write, kv, 0x40008, KMLA_ERROR_ARGUMENT),
        U64(kmla_kv_write, kv_pages, 0, KMLA_ERROR_ARGUMENT),
        U64(kmla_kv_write, kv_pages, UINT64_MAX / 2, KMLA_ERROR_OVERFLOW),
        U64(kmla_kv_write, page_pitch_bytes, 64 * 656 - 16, KMLA_ERROR_ARGUMENT),
        U64(kmla_kv_write, page_pitch_bytes, 64 * 656 + 1, KMLA_ERROR_ARGUMENT),
    };
    const mutation codes[] = {
        F32(kmla_kv_write, kv_scale, 0, KMLA_ERROR_ARGUMENT),
        F32(kmla_kv_write, kv_scale, NAN, KMLA_ERROR_ARGUMENT),
    };
    kmla_error error;
    kmla_kv_write args;
    for (int32_t format = 0; format <= 2; ++format) {
        args = good_kv_write(format);
        expect_ok(kmla_check_kv_write(&args, &error), &error);
    }
    for (int i = 0; i < COUNT(mutations); ++i) {
        args = good_kv_write(KMLA_KV_PACKED);
        mutate(&args, &mutations[i]);
        error = dirty_error();
        expect_failure(kmla_check_kv_write(&args, &error), &error, mutations[i].wanted,
                       mutations[i].named);
    }
    for (int i = 0; i < COUNT(codes); ++i) {
        args = good_kv_write(KMLA_KV_E4M3);
        mutate(&args, &codes[i]);
        error = dirty_error();
        expect_failure(kmla_check_kv_write(&args, &error), &error, codes[i].wanted,
                       codes[i].named);
    }
    error = dirty_error();
    expect_failure(kmla_check_kv_write(NULL, &error), &error, KMLA_ERROR_ARGUMENT, "args");
}

static kmla_query_write good_query_write(int32_t format) {
    kmla_query_write args;
    memset(&args, 0, sizeof args);
    args.rows = 4;
    args.heads = 99;
    args.query_format = format;
    args.query_scale = format == KMLA_QUERY_E4M3 ? 2.0f : 0.0f;
    args.source = 0x10000;
    args.query = 0x800000;
    return args;
}

static void query_write_errors(void** state) {
    (void)state;
    const int64_t huge = INT64_C(1) << 60;
    const mutation mutations[] = {
        I32(kmla_query_write, rows, 0, KMLA_ERROR_ARGUMENT),
        I32(kmla_query_write, rows, 65536, KMLA_ERROR_ARGUMENT),
        I32(kmla_query_write, heads, 0, KMLA_ERROR_ARGUMENT),
        I32(kmla_query_write, heads, 4097, KMLA_ERROR_ARGUMENT),
        I32(kmla_query_write, query_format, 3, KMLA_ERROR_ARGUMENT),
        I32(kmla_query_write, source_type, -1, KMLA_ERROR_ARGUMENT),
        I32(kmla_query_write, unused_, 1, KMLA_ERROR_ARGUMENT),
        U64(kmla_query_write, source, 0, KMLA_ERROR_ARGUMENT),
        U64(kmla_query_write, source, 0x10002, KMLA_ERROR_ARGUMENT),
        I64(kmla_query_write, source_row_stride, -576, KMLA_ERROR_ARGUMENT),
        I64(kmla_query_write, source_row_stride, huge, KMLA_ERROR_OVERFLOW),
        I64(kmla_query_write, source_head_stride, 577, KMLA_ERROR_ARGUMENT),
        U64(kmla_query_write, query, 0, KMLA_ERROR_ARGUMENT),
        U64(kmla_query_write, query, 0x800008, KMLA_ERROR_ARGUMENT),
        I64(kmla_query_write, query_row_stride_bytes, 656, KMLA_ERROR_ARGUMENT), // rows overlap
        I64(kmla_query_write, query_row_stride_bytes, 99 * 656 + 8, KMLA_ERROR_ARGUMENT),
        I64(kmla_query_write, query_head_stride_bytes, -656, KMLA_ERROR_ARGUMENT),
        I64(kmla_query_write, query_head_stride_bytes, huge, KMLA_ERROR_OVERFLOW),
    };
    kmla_error error;
    kmla_query_write args;
    for (int32_t format = 0; format <= 2; ++format) {
        args = good_query_write(format);
        expect_ok(kmla_check_query_write(&args, &error), &error);
    }
    for (int i = 0; i < COUNT(mutations); ++i) {
        args = good_query_write(KMLA_QUERY_PACKED);
        mutate(&args, &mutations[i]);
        error = dirty_error();
        expect_failure(kmla_check_query_write(&args, &error), &error, mutations[i].wanted,
                       mutations[i].named);
    }
    args = good_query_write(KMLA_QUERY_PACKED); // records too close to each other
    args.query_head_stride_bytes = 640;
    error = dirty_error();
    expect_failure(kmla_check_query_write(&args, &error), &error, KMLA_ERROR_ARGUMENT,
                   "head_stride");
    args = good_query_write(KMLA_QUERY_E4M3);
    args.query_scale = INFINITY;
    error = dirty_error();
    expect_failure(kmla_check_query_write(&args, &error), &error, KMLA_ERROR_ARGUMENT,
                   "query_scale");
    error = dirty_error();
    expect_failure(kmla_check_query_write(NULL, &error), &error, KMLA_ERROR_ARGUMENT, "args");
}

// The defaults of strides, which the checks and every reader and writer take from one place.
static void dense_strides(void** state) {
    (void)state;
    kmla_plan plan = plan_kind(PACKED); // 11 heads, BF16 queries, packed KV, pages of 64
    kmla_decode args = decode_kind(PACKED, &plan);
    kmla_decode d = kmla_i_dense_decode(&plan, &args);
    assert_int_equal(d.query_head_stride_bytes, 1152);
    assert_int_equal(d.query_row_stride_bytes, 11 * 1152);
    assert_int_equal(d.page_pitch_bytes, 64 * 656);
    assert_int_equal(d.block_table_stride, 16);
    assert_int_equal(d.out_head_stride, 512);
    assert_int_equal(d.out_row_stride, 11 * 512);
    assert_int_equal(d.lse_head_stride, 1);
    assert_int_equal(d.lse_row_stride, 11);
    plan = plan_kind(SLOTS);
    args = decode_kind(SLOTS, &plan);
    args.out_head_stride = 520; // an outer default follows the inner stride
    args.lse_head_stride = 3;
    d = kmla_i_dense_decode(&plan, &args);
    assert_int_equal(d.slot_list_stride, 1000);
    assert_int_equal(d.out_row_stride, 11 * 520);
    assert_int_equal(d.lse_row_stride, 33);

    kmla_combine combine = good_combine(); // 9 parts, 4 rows, 11 heads
    kmla_combine c = kmla_i_dense_combine(&combine);
    assert_int_equal(c.part_head_stride, 512);
    assert_int_equal(c.part_row_stride, 11 * 512);
    assert_int_equal(c.part_out_stride, 4 * 11 * 512);
    assert_int_equal(c.part_lse_head_stride, 1);
    assert_int_equal(c.part_lse_row_stride, 11);
    assert_int_equal(c.part_lse_stride, 44);
    assert_int_equal(c.out_head_stride, 512);
    assert_int_equal(c.out_row_stride, 11 * 512);
    assert_int_equal(c.lse_head_stride, 1);
    assert_int_equal(c.lse_row_stride, 11);

    kmla_kv_write kv_write = good_kv_write(KMLA_KV_BF16);
    kmla_kv_write k = kmla_i_dense_kv_write(&kv_write);
    assert_int_equal(k.page_tokens, 64);
    assert_int_equal(k.latent_stride, 512);
    assert_int_equal(k.rope_stride, 64);
    assert_int_equal(k.page_pitch_bytes, 64 * 1152);

    kmla_query_write query_write = good_query_write(KMLA_QUERY_E4M3); // 99 heads
    kmla_query_write q = kmla_i_dense_query_write(&query_write);
    assert_int_equal(q.source_head_stride, 576);
    assert_int_equal(q.source_row_stride, 99 * 576);
    assert_int_equal(q.query_head_stride_bytes, 576);
    assert_int_equal(q.query_row_stride_bytes, 99 * 576);
}

// =============================================================================
// Checks of tables
// =============================================================================

static void block_table_pages(void** state) {
    (void)state;
    kmla_plan plan = plan_kind(PACKED); // 2 requests x 3 rows, 16 pages each, pool of 100
    kmla_decode args = decode_kind(PACKED, &plan);
    int32_t table[2][20], lengths[6] = {1000, 65, 64, 0, -5, 2000000000};
    kmla_error error;
    args.block_table_stride = 20;
    fill_bytes(table, 0xFF, sizeof table); // -1 wherever nothing may be read
    for (int i = 0; i < 16; ++i) {
        table[0][i] = 99 - i;
        table[1][i] = i;
    }
    expect_ok(kmla_check_pages(&plan, &args, &table[0][0], lengths, NULL, &error), &error);
    table[0][15] = 100; // of tokens 960..999, which row 0 alone sees
    error = dirty_error();
    expect_failure(kmla_check_pages(&plan, &args, &table[0][0], lengths, NULL, &error), &error,
                   KMLA_ERROR_PAGE, "row 0, token 960: page 100");
    lengths[0] = 960;
    expect_ok(kmla_check_pages(&plan, &args, &table[0][0], lengths, NULL, &error), &error);
    table[0][1] = -1;
    error = dirty_error();
    expect_failure(kmla_check_pages(&plan, &args, &table[0][0], lengths, NULL, &error), &error,
                   KMLA_ERROR_PAGE, "row 0, token 64: page -1");
    lengths[0] = 64; // row 1 sees one token of that page still
    error = dirty_error();
    expect_failure(kmla_check_pages(&plan, &args, &table[0][0], lengths, NULL, &error), &error,
                   KMLA_ERROR_PAGE, "row 1, token 64: page -1");
    lengths[1] = 64;
    expect_ok(kmla_check_pages(&plan, &args, &table[0][0], lengths, NULL, &error), &error);
    table[1][15] = INT32_MAX; // row 5's length is clamped to the capacity: page 15 is its last
    error = dirty_error();
    expect_failure(kmla_check_pages(&plan, &args, &table[0][0], lengths, NULL, &error), &error,
                   KMLA_ERROR_PAGE, "row 5, token 960: page 2147483647");
    error = dirty_error();
    expect_failure(kmla_check_pages(&plan, &args, NULL, lengths, NULL, &error), &error,
                   KMLA_ERROR_ARGUMENT, "table");
    error = dirty_error();
    expect_failure(kmla_check_pages(&plan, &args, &table[0][0], NULL, NULL, &error), &error,
                   KMLA_ERROR_ARGUMENT, "lengths");
    args.scale = 0;
    error = dirty_error();
    expect_failure(kmla_check_pages(&plan, &args, &table[0][0], lengths, NULL, &error), &error,
                   KMLA_ERROR_ARGUMENT, "scale");
}

static void windowed_pages(void** state) {
    (void)state;
    kmla_shape shape = shape_of(1, 1, 11, 1000);
    shape.page_tokens = 4;
    shape.lengths.window_tokens = 6;
    kmla_plan plan = plan_of(&shape, NULL);
    kmla_decode args = decode_kind(ONE_SPLIT, &plan);
    int32_t table[250], length = 15;
    kmla_error error;
    args.block_table_width = 250;
    fill_bytes(table, 0xFF, sizeof table);
    table[2] = 5; // the window is [9, 15): pages 2 and 3
    table[3] = 6;
    expect_ok(kmla_check_pages(&plan, &args, table, &length, NULL, &error), &error);
    length = 14; // [8, 14)
    expect_ok(kmla_check_pages(&plan, &args, table, &length, NULL, &error), &error);
    length = 13; // [7, 13)
    error = dirty_error();
    expect_failure(kmla_check_pages(&plan, &args, table, &length, NULL, &error), &error,
                   KMLA_ERROR_PAGE, "token 7: page -1");
    table[1] = 4;
    table[3] = -1; // its only token, 12, is not a whole page after 7
    error = dirty_error();
    expect_failure(kmla_check_pages(&plan, &args, table, &length, NULL, &error), &error,
                   KMLA_ERROR_PAGE, "token 12: page -1");
    length = 2000000000; // clamped to 1,000, and then the window is [994, 1000)
    table[249] = 7;
    error = dirty_error();
    expect_failure(kmla_check_pages(&plan, &args, table, &length, NULL, &error), &error,
                   KMLA_ERROR_PAGE, "token 994: page -1");
    table[248] = 8;
    expect_ok(kmla_check_pages(&plan, &args, table, &length, NULL, &error), &error);
}

static void ragged_pages(void** state) {
    (void)state;
    kmla_plan plan = plan_kind(RAGGED); // at most 3 rows of each of 2 requests, 6 in all
    kmla_decode args = decode_kind(RAGGED, &plan);
    int32_t table[2][16], lengths[2] = {130, 66}, offsets[3] = {0, 2, 4};
    kmla_error error;
    fill_bytes(table, 0xFF, sizeof table);
    table[0][0] = 1;
    table[0][1] = 2;
    table[0][2] = 3;
    table[1][0] = 4;
    table[1][1] = 5;
    expect_ok(kmla_check_pages(&plan, &args, &table[0][0], lengths, offsets, &error), &error);
    table[1][1] = -1; // causal rows 2 and 3 end at 65 and 66
    error = dirty_error();
    expect_failure(kmla_check_pages(&plan, &args, &table[0][0], lengths, offsets, &error), &error,
                   KMLA_ERROR_PAGE, "row 2, token 64: page -1");
    lengths[1] = 65; // now 64 and 65
    error = dirty_error();
    expect_failure(kmla_check_pages(&plan, &args, &table[0][0], lengths, offsets, &error), &error,
                   KMLA_ERROR_PAGE, "row 3, token 64: page -1");
    offsets[2] = 2; // the request has no rows any more
    expect_ok(kmla_check_pages(&plan, &args, &table[0][0], lengths, offsets, &error), &error);
    const int32_t bad[][3] = {{1, 2, 4}, {0, 4, 6}, {0, 2, 1}, {0, 3, 7}, {-1, 0, 1},
                              {0, INT32_MIN, INT32_MAX}};
    for (int i = 0; i < COUNT(bad); ++i) {
        error = dirty_error();
        expect_failure(kmla_check_pages(&plan, &args, &table[0][0], lengths, bad[i], &error),
                       &error, KMLA_ERROR_ARGUMENT, "row_offsets");
    }
    error = dirty_error();
    expect_failure(kmla_check_pages(&plan, &args, &table[0][0], lengths, NULL, &error), &error,
                   KMLA_ERROR_ARGUMENT, "row_offsets");
    kmla_shape few = plan.shape; // room for 4 rows, though two requests may have 6
    few.rows = 4;
    plan = plan_of(&few, NULL);
    offsets[1] = 3;
    offsets[2] = 5;
    error = dirty_error();
    expect_failure(kmla_check_pages(&plan, &args, &table[0][0], lengths, offsets, &error), &error,
                   KMLA_ERROR_ARGUMENT, "row_offsets[2] is 5");
}

static void sharded_pages(void** state) {
    (void)state;
    kmla_shape shape = shape_of(1, 3, 11, 1000);
    shape.lengths = length_rule(KMLA_LENGTHS_PER_REQUEST, KMLA_ROWS_CAUSAL, 0, 2, 1, 64);
    kmla_plan plan = plan_of(&shape, NULL);
    kmla_decode args = decode_kind(ONE_SPLIT, &plan);
    int32_t table[16], length = 192; // bounds 190, 191, 192: rank 1 holds 64 of each
    kmla_error error;
    fill_bytes(table, 0xFF, sizeof table);
    table[0] = 0;
    expect_ok(kmla_check_pages(&plan, &args, table, &length, NULL, &error), &error);
    length = 193; // row 2 sees token 192 too, rank 1's local token 64
    error = dirty_error();
    expect_failure(kmla_check_pages(&plan, &args, table, &length, NULL, &error), &error,
                   KMLA_ERROR_PAGE, "row 2, token 64: page -1");
    length = 258; // bounds 256, 257, 258: rank 1 holds 128 of each
    error = dirty_error();
    expect_failure(kmla_check_pages(&plan, &args, table, &length, NULL, &error), &error,
                   KMLA_ERROR_PAGE, "row 0, token 64: page -1");
    table[1] = 1;
    expect_ok(kmla_check_pages(&plan, &args, table, &length, NULL, &error), &error);
}

static void slot_list_slots(void** state) {
    (void)state;
    kmla_plan plan = plan_kind(SLOTS); // 6 rows, pool of 100 pages: slots 0..6399
    kmla_decode args = decode_kind(SLOTS, &plan);
    static int32_t slots[6][1000];
    int32_t lengths[6] = {1000, 1, 0, -1, 7, 2000};
    kmla_error error;
    for (int row = 0; row < 6; ++row) {
        for (int token = 0; token < 1000; ++token) {
            slots[row][token] = token < lengths[row] ? (token * 7 + row) % 6400 : -99;
        }
    }
    slots[0][500] = -1; // no token there
    slots[0][999] = 6399;
    expect_ok(kmla_check_pages(&plan, &args, &slots[0][0], lengths, NULL, &error), &error);
    slots[0][999] = 6400;
    error = dirty_error();
    expect_failure(kmla_check_pages(&plan, &args, &slots[0][0], lengths, NULL, &error), &error,
                   KMLA_ERROR_PAGE, "row 0, token 999: slot 6400");
    lengths[0] = 999;
    expect_ok(kmla_check_pages(&plan, &args, &slots[0][0], lengths, NULL, &error), &error);
    slots[4][6] = -2;
    error = dirty_error();
    expect_failure(kmla_check_pages(&plan, &args, &slots[0][0], lengths, NULL, &error), &error,
                   KMLA_ERROR_PAGE, "row 4, token 6: slot -2");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(status_names),
        cmocka_unit_test(errors_are_whole_and_optional),
        cmocka_unit_test(record_bytes),
        cmocka_unit_test(e4m3_decodes),
        cmocka_unit_test(e4m3_encodes),
        cmocka_unit_test(bf16_both_ways),
        cmocka_unit_test(head_tiles),
        cmocka_unit_test(head_invariants),
        cmocka_unit_test(head_errors),
        cmocka_unit_test(local_lengths),
        cmocka_unit_test(shard_capacities),
        cmocka_unit_test(shards_by_dealing),
        cmocka_unit_test(dcp_errors),
        cmocka_unit_test(row_ranges),
        cmocka_unit_test(row_ranges_of_all_ranks),
        cmocka_unit_test(row_range_errors),
        cmocka_unit_test(split_ranges),
        cmocka_unit_test(split_properties),
        cmocka_unit_test(split_errors),
        cmocka_unit_test(workspaces),
        cmocka_unit_test(plan_of_kimi_k3),
        cmocka_unit_test(plan_of_host),
        cmocka_unit_test(plan_reader),
        cmocka_unit_test(plan_tiles),
        cmocka_unit_test(plan_ragged),
        cmocka_unit_test(plan_shared_memory),
        cmocka_unit_test(plan_ring),
        cmocka_unit_test(plan_fits_shared_memory),
        cmocka_unit_test(plan_device_errors),
        cmocka_unit_test(plan_shape_errors),
        cmocka_unit_test(plan_waves),
        cmocka_unit_test(plan_is_best),
        cmocka_unit_test(plan_of_benchmark),
        cmocka_unit_test(plan_properties),
        cmocka_unit_test(row_capacities),
        cmocka_unit_test(gathers_of_kimi_k3),
        cmocka_unit_test(gather_slices),
        cmocka_unit_test(gather_errors),
        cmocka_unit_test(gather_arguments),
        cmocka_unit_test(decode_errors),
        cmocka_unit_test(decode_accepts),
        cmocka_unit_test(plan_tampering),
        cmocka_unit_test(combine_errors),
        cmocka_unit_test(kv_write_errors),
        cmocka_unit_test(query_write_errors),
        cmocka_unit_test(dense_strides),
        cmocka_unit_test(block_table_pages),
        cmocka_unit_test(windowed_pages),
        cmocka_unit_test(ragged_pages),
        cmocka_unit_test(sharded_pages),
        cmocka_unit_test(slot_list_slots),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
