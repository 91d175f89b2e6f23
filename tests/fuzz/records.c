// Numbers and records under libFuzzer: conversions against their definitions, the host's writers
// and combine against the rules of their comments in the header, the device's against the host's:
// the writers byte for byte. The input's bytes are the numbers' own bits.
//
//     build/records --library=../emulator/build/libcuda_emulated_sm90.so FILE
//
// runs one input again, e.g. build/records-crash-... `make fuzz TIME=600` looks for new ones.

#define KIMI_MLA_IMPLEMENTATION
#include "../../kimi_mla.h"

#include "../reference.h"
#include "card.h"
#include "fuzz.h"

#include <float.h>

// =============================================================================
// Numbers
// =============================================================================

static float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static void try_numbers(fuzz_bytes* in) {
    while (in->left > 0) {
        const float value = float_of((uint32_t)fuzz_word(in, 4));
        const uint8_t code = kmla_float_to_e4m3(value);
        const uint16_t bf16 = kmla_float_to_bf16(value);
        FUZZ_CHECK(code == ref_to_e4m3(value));
        FUZZ_CHECK(isinf(value) || bf16 == ref_to_bf16(value));
        FUZZ_CHECK(isnan(value) || kmla_float_to_e4m3(kmla_e4m3_to_float(code)) == code);
        FUZZ_CHECK(isnan(value) || kmla_float_to_bf16(kmla_bf16_to_float(bf16)) == bf16);
        FUZZ_CHECK(isnan(value) || kmla_e4m3_to_float(code) == ref_e4m3(code));
    }
}

// `count` numbers of a plain array: each one of eight of the input's.
static ref_buffer any_array(fuzz_bytes* in, int64_t count, int32_t type) {
    ref_buffer array = ref_buffer_make((size_t)count * (type == KMLA_FP32 ? 4 : 2), 0);
    uint32_t palette[8];
    for (int i = 0; i < 8; i++) {
        palette[i] = (uint32_t)fuzz_word(in, 4);
    }
    const uint32_t step = 1 + fuzz_byte(in), run = 1 + fuzz_byte(in);
    for (int64_t i = 0; i < count; i++) {
        const uint32_t number = palette[(uint32_t)i / run * step % 8];
        if (type == KMLA_FP32) {
            memcpy(array.data + 4 * i, &number, 4);
        } else {
            memcpy(array.data + 2 * i, (const uint8_t*)&number + 2, 2);
        }
    }
    return array;
}

// =============================================================================
// Writers
// =============================================================================

static float number_at(const uint8_t* array, int32_t type, int64_t index) {
    return (float)ref_element(array, type, index);
}

// NaN does not count and an infinity is the largest number.
static float largest_of(const uint8_t* values, int32_t type) {
    float largest = 0.0f;
    for (int d = 0; d < 128; d++) {
        const float magnitude = fabsf(number_at(values, type, d));
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest > FLT_MAX ? FLT_MAX : largest;
}

static float power_of_two_from(float value) {
    int exponent;
    const double fraction = frexp(value, &exponent);
    return (float)ldexp(1.0, fraction == 0.5 ? exponent - 1 : exponent);
}

static float kv_scale_of(float largest, int32_t scale_rule) {
    const float exact = largest / 448.0f, scale = exact > FLT_MIN ? exact : FLT_MIN;
    return scale_rule == KMLA_SCALE_POWER_OF_TWO ? power_of_two_from(scale) : scale;
}

static void check_codes(const uint8_t* codes, const uint8_t* values, int32_t type, int32_t count,
                        float scale) {
    for (int d = 0; d < count; d++) {
        FUZZ_CHECK(codes[d] == ref_to_e4m3(number_at(values, type, d) / scale));
    }
}

// `kv`: by the KV rule, else by the query's.
static void check_packed(const uint8_t* record, const uint8_t* latent, int32_t type, int kv,
                         int32_t scale_rule) {
    for (int g = 0; g < 4; g++) {
        const uint8_t* values = latent + 128 * g * (type == KMLA_FP32 ? 4 : 2);
        const float largest = largest_of(values, type);
        const float scale =
            kv ? kv_scale_of(largest, scale_rule) : (float)ref_query_scale(largest);
        FUZZ_CHECK((float)ref_float_at(record + 512 + 4 * g) == scale);
        check_codes(record + 128 * g, values, type, 128, scale);
    }
}

static void expect_same(const ref_buffer* device, const ref_buffer* host) {
    FUZZ_CHECK(memcmp(device->data, host->data, host->bytes) == 0);
}

static void try_write_kv(fuzz_bytes* in) {
    enum { TOKENS = 3, PAGES = 3 };
    kmla_kv_write write;
    kmla_error error;
    int64_t slots[TOKENS];
    memset(&write, 0, sizeof write);
    write.tokens = TOKENS;
    write.kv_format = fuzz_below(in, 3);
    write.source_type = fuzz_below(in, 2);
    write.scale_rule = fuzz_below(in, 2);
    write.kv_scale = 0.0137f;
    write.page_tokens = 1 + fuzz_below(in, 3);
    write.kv_pages = PAGES;
    for (int i = 0; i < TOKENS; i++) {
        slots[i] = fuzz_chance(in, 8) ? (int64_t)fuzz_word(in, 8) | INT64_C(1) << 40 : i;
    }
    ref_buffer latent = any_array(in, TOKENS * 512, write.source_type);
    ref_buffer rope = any_array(in, TOKENS * 64, write.source_type);
    const size_t record = kmla_kv_record_bytes(write.kv_format);
    const size_t bytes = record * PAGES * (size_t)write.page_tokens;
    ref_buffer host = ref_buffer_make(bytes, 0xee), device = ref_buffer_make(bytes, 0xee);
    write.latent = ref_address(&latent);
    write.rope = ref_address(&rope);
    write.slots = (uint64_t)(uintptr_t)slots;
    write.kv = ref_address(&host);
    FUZZ_CHECK(kmla_host_write_kv(&write, &error) == KMLA_OK);
    for (int i = 0; i < TOKENS && write.kv_format == KMLA_KV_PACKED; i++) {
        const uint8_t* written = host.data + record * (size_t)i;
        if (slots[i] == i && i < PAGES * write.page_tokens) {
            check_packed(written, latent.data + i * 512 * (write.source_type == KMLA_FP32 ? 4 : 2),
                         write.source_type, 1, write.scale_rule);
        }
    }
    if (card.gpu != NULL) {
        write.kv = ref_address(&device);
        FUZZ_CHECK(kmla_gpu_write_kv(card.gpu, &write, NULL, &error) == KMLA_OK);
        expect_same(&device, &host);
    }
    ref_buffer_free(&latent);
    ref_buffer_free(&rope);
    ref_buffer_free(&host);
    ref_buffer_free(&device);
}

static void try_write_query(fuzz_bytes* in) {
    kmla_query_write write;
    kmla_error error;
    memset(&write, 0, sizeof write);
    write.rows = 1;
    write.heads = 3;
    write.query_format = fuzz_below(in, 3);
    write.source_type = fuzz_below(in, 2);
    write.query_scale = 0.021f;
    ref_buffer source = any_array(in, 3 * 576, write.source_type);
    const size_t record = kmla_query_record_bytes(write.query_format);
    ref_buffer host = ref_buffer_make(3 * record, 0xee), device = ref_buffer_make(3 * record, 0xee);
    write.source = ref_address(&source);
    write.query = ref_address(&host);
    FUZZ_CHECK(kmla_host_write_query(&write, &error) == KMLA_OK);
    for (int i = 0; i < 3 && write.query_format == KMLA_QUERY_PACKED; i++) {
        check_packed(host.data + record * (size_t)i,
                     source.data + i * 576 * (write.source_type == KMLA_FP32 ? 4 : 2),
                     write.source_type, 0, 0);
    }
    if (card.gpu != NULL) {
        write.query = ref_address(&device);
        FUZZ_CHECK(kmla_gpu_write_query(card.gpu, &write, NULL, &error) == KMLA_OK);
        expect_same(&device, &host);
    }
    ref_buffer_free(&source);
    ref_buffer_free(&host);
    ref_buffer_free(&device);
}

// =============================================================================
// Combine
// =============================================================================

static void check_combined(const uint8_t* out, const uint8_t* lse, const double* right_out,
                           double right_lse) {
    const double mine = ref_float_at(lse);
    FUZZ_CHECK(isinf(right_lse) ? mine == right_lse
                                : fabs(mine - right_lse) <= 2e-6 * (1.0 + fabs(right_lse)));
    for (int d = 0; d < REF_D; d++) {
        const double off = fabs(ref_element(out, KMLA_FP32, d) - right_out[d]);
        FUZZ_CHECK(off <= 1e-5); // of numbers from -1 to 1
    }
}

// What one part adds to the sum, where part_out is its payload alone.
static void check_share(kmla_combine combine, int32_t part, double part_lse, double right_lse,
                        const double* values, const ref_buffer* out, const ref_buffer* lse) {
    const double weight = isfinite(part_lse) ? exp(part_lse - right_lse) : 0.0;
    double right[REF_D];
    kmla_error error;
    for (int d = 0; d < REF_D; d++) {
        right[d] = weight > 0.0 ? weight * values[d] : 0.0;
    }
    combine.share = part + 1;
    combine.part_out += (uint64_t)part * REF_D * 4;
    FUZZ_CHECK(kmla_host_combine(&combine, &error) == KMLA_OK);
    check_combined(out->data, lse->data, right, right_lse);
    if (card.gpu != NULL) {
        memset(out->data, 0xee, out->bytes);
        FUZZ_CHECK(kmla_gpu_combine(card.gpu, &combine, NULL, &error) == KMLA_OK);
        check_combined(out->data, lse->data, right, right_lse);
    }
}

// Any bits as lse; payloads are numbers where they count, and NaN where they do not.
static void try_combine(fuzz_bytes* in) {
    enum { MOST_PARTS = 40 };
    kmla_combine combine;
    kmla_error error;
    double values[MOST_PARTS][REF_D], part_lse[MOST_PARTS], right_out[REF_D], right_lse;
    const double* part_out[MOST_PARTS];
    memset(&combine, 0, sizeof combine);
    combine.parts = 1 + fuzz_below(in, MOST_PARTS);
    combine.rows = combine.heads = 1;
    combine.part_type = combine.out_type = KMLA_FP32;
    ref_buffer payload = ref_buffer_make((size_t)combine.parts * REF_D * 4, 0xff);
    ref_buffer lses = ref_buffer_make((size_t)combine.parts * 4, 0);
    ref_buffer out = ref_buffer_make(REF_D * 4, 0xee), lse = ref_buffer_make(4, 0xee);
    for (int p = 0; p < combine.parts; p++) {
        const uint32_t word = (uint32_t)fuzz_word(in, 3);
        const float number = word % 4 ? (float)(word % 4096) / 64.0f - 32.0f : float_of(word << 8);
        memcpy(lses.data + 4 * p, &number, 4);
        part_lse[p] = number;
        part_out[p] = values[p];
        for (int d = 0; d < REF_D && isfinite(number); d++) {
            const float element = (float)((int)((word + (uint32_t)(d * p)) % 201) - 100) / 100.0f;
            memcpy(payload.data + 4 * (p * REF_D + d), &element, 4);
            values[p][d] = element;
        }
    }
    combine.part_out = ref_address(&payload);
    combine.part_lse = ref_address(&lses);
    combine.out = ref_address(&out);
    combine.lse = ref_address(&lse);
    ref_combine(combine.parts, part_lse, part_out, right_out, &right_lse);
    FUZZ_CHECK(kmla_host_combine(&combine, &error) == KMLA_OK);
    check_combined(out.data, lse.data, right_out, right_lse);
    if (card.gpu != NULL) {
        memset(out.data, 0xee, out.bytes);
        memset(lse.data, 0xee, lse.bytes);
        FUZZ_CHECK(kmla_gpu_combine(card.gpu, &combine, NULL, &error) == KMLA_OK);
        check_combined(out.data, lse.data, right_out, right_lse);
    }
    const int32_t part = fuzz_below(in, combine.parts);
    check_share(combine, part, part_lse[part], right_lse, values[part], &out, &lse);
    ref_buffer_free(&payload);
    ref_buffer_free(&lses);
    ref_buffer_free(&out);
    ref_buffer_free(&lse);
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
    static int prepared;
    fuzz_bytes in = {data, bytes};
    kmla_error error;
    if (!prepared && card.gpu != NULL) {
        FUZZ_CHECK(kmla_gpu_prepare(card.gpu, NULL, NULL, &error) == KMLA_OK);
    }
    prepared = 1;
    switch (fuzz_byte(&in) % 4) {
        case 0: try_numbers(&in); break;
        case 1: try_write_kv(&in); break;
        case 2: try_write_query(&in); break;
        case 3: try_combine(&in); break;
    }
    return 0;
}
