// reference.h - what the tests judge by: an fp64 decode straight from the definition, and random
// paged caches of every format.
//
// Only ref_build uses the library, and only its writers, to make records out of random numbers.
// Everything that judges (decoding of formats, addressing, lengths, softmax, merging) is written
// here a second time, in double, in the plainest way, and shares no code with kimi_mla.h.
// C99 and C++11. Every function is static: include it wherever it is needed.

#ifndef KMLA_TESTS_REFERENCE_H
#define KMLA_TESTS_REFERENCE_H

#include "kimi_mla.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__GNUC__)
#define REF_API static __attribute__((unused))
#else
#define REF_API static
#endif

#define REF_D 512 // latent dims
#define REF_Q 576 // with the rope lanes
#define REF_K3_SCALE 0.07216878f

// =============================================================================
// Random numbers: the same on every machine
// =============================================================================

typedef struct ref_random {
    uint64_t state;
} ref_random;

REF_API uint64_t ref_next(ref_random* random) { // splitmix64
    uint64_t z = random->state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

// In [0, 1).
REF_API double ref_uniform(ref_random* random) {
    return (double)(ref_next(random) >> 11) / 9007199254740992.0;
}

// In [0, count).
REF_API int32_t ref_below(ref_random* random, int32_t count) {
    return (int32_t)(ref_next(random) % (uint64_t)count);
}

// Normal with sigma 1 but for the tails past 6: the sum of 12 uniform numbers, which needs no
// function of the maths library and so has the same bits everywhere.
REF_API double ref_normal(ref_random* random) {
    double sum = -6.0;
    for (int i = 0; i < 12; i++) {
        sum += ref_uniform(random);
    }
    return sum;
}

// =============================================================================
// Buffers with a canary
// =============================================================================

#if defined(__SANITIZE_ADDRESS__)
#define REF_CANARY_BYTES 0 // the sanitizer watches the very next byte
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define REF_CANARY_BYTES 0
#endif
#endif
#ifndef REF_CANARY_BYTES
#define REF_CANARY_BYTES 256
#endif

// As malloc and free. Memory for records is a multiple of 16, which 32-bit Windows' malloc does not
// promise.
#if defined(_WIN32)
#include <malloc.h>
#define ref_malloc(bytes) _aligned_malloc(bytes, 16)
#define ref_release(memory) _aligned_free(memory)
#else
#define ref_malloc(bytes) malloc(bytes)
#define ref_release(memory) free(memory)
#endif

typedef struct ref_buffer {
    uint8_t* data; // 16-byte aligned
    size_t bytes;
} ref_buffer;

REF_API ref_buffer ref_buffer_make(size_t bytes, int fill) {
    ref_buffer buffer;
    buffer.bytes = bytes;
    buffer.data = (uint8_t*)ref_malloc(bytes + REF_CANARY_BYTES + (bytes + REF_CANARY_BYTES == 0));
    if (buffer.data == NULL) {
        fprintf(stderr, "reference.h: no memory for %zu bytes\n", bytes);
        abort();
    }
    memset(buffer.data, fill, bytes);
#if REF_CANARY_BYTES > 0
    memset(buffer.data + bytes, 0xa5, REF_CANARY_BYTES);
#endif
    return buffer;
}

REF_API void ref_buffer_free(ref_buffer* buffer) {
    ref_release(buffer->data);
    buffer->data = NULL;
    buffer->bytes = 0;
}

REF_API uint64_t ref_address(const ref_buffer* buffer) {
    return (uint64_t)(uintptr_t)buffer->data;
}

// 1 if all bytes of a range have one value.
REF_API int ref_all_bytes(const uint8_t* data, size_t bytes, int value) {
    for (size_t i = 0; i < bytes; i++) {
        if (data[i] != value) {
            return 0;
        }
    }
    return 1;
}

REF_API int ref_canary_whole(const ref_buffer* buffer) {
    return buffer->data == NULL ||
           ref_all_bytes(buffer->data + buffer->bytes, REF_CANARY_BYTES, 0xa5);
}

// =============================================================================
// Number formats, from their definitions
// =============================================================================

REF_API double ref_e4m3(uint8_t code) {
    const int exponent = code >> 3 & 15;
    const int mantissa = code & 7;
    const double sign = code & 0x80 ? -1.0 : 1.0;
    if (exponent == 15 && mantissa == 7) {
        return (double)NAN;
    }
    return sign * (exponent == 0 ? ldexp(mantissa, -9) : ldexp(8 + mantissa, exponent - 10));
}

// The nearest code by trying them all; of two equally near the even one. Past 448: 448.
REF_API uint8_t ref_to_e4m3(double value) {
    if (isnan(value)) {
        return 0x7f;
    }
    int nearest = 0;
    for (int code = 1; code <= 0x7e; code++) {
        const double here = fabs(fabs(value) - ref_e4m3((uint8_t)code));
        const double best = fabs(fabs(value) - ref_e4m3((uint8_t)nearest));
        if (here < best || (here == best && code % 2 == 0)) {
            nearest = code;
        }
    }
    nearest = isinf(value) ? 0x7e : nearest;
    return (uint8_t)(nearest | (signbit(value) ? 0x80 : 0));
}

REF_API double ref_float_at(const uint8_t* from) {
    float value;
    memcpy(&value, from, 4);
    return value;
}

REF_API double ref_bf16(uint16_t bf16) {
    const uint32_t bits = (uint32_t)bf16 << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

REF_API double ref_bf16_at(const uint8_t* from) {
    uint16_t bits;
    memcpy(&bits, from, 2);
    return ref_bf16(bits);
}

// Numbers of records are little-endian, those of plain arrays are in the machine's order.
REF_API uint32_t ref_little(const uint8_t* from, int bytes) {
    uint32_t bits = 0;
    for (int i = 0; i < bytes; i++) {
        bits |= (uint32_t)from[i] << (8 * i);
    }
    return bits;
}

REF_API void ref_put_little(uint8_t* to, uint32_t bits, int bytes) {
    for (int i = 0; i < bytes; i++) {
        to[i] = (uint8_t)(bits >> (8 * i));
    }
}

REF_API float ref_group_scale(const uint8_t* record, int group) {
    const uint32_t bits = ref_little(record + 512 + group * 4, 4);
    float scale;
    memcpy(&scale, &bits, 4);
    return scale;
}

REF_API void ref_put_group_scale(uint8_t* record, int group, float scale) {
    uint32_t bits;
    memcpy(&bits, &scale, 4);
    ref_put_little(record + 512 + group * 4, bits, 4);
}

// Round to nearest even in 8 bits of significand, fewer below 2^-126. NaN: 0x7fff, as PTX's
// cvt.rn.bf16.f32 gives.
REF_API uint16_t ref_to_bf16(float value) {
    if (isnan(value)) {
        return 0x7fff;
    }
    int exponent;
    frexp(value, &exponent);
    const int quantum = exponent - 8 > -133 ? exponent - 8 : -133;
    const float rounded = (float)ldexp(nearbyint(ldexp(value, -quantum)), quantum);
    uint32_t bits;
    memcpy(&bits, &rounded, 4);
    return (uint16_t)(bits >> 16);
}

// One element of a plain array, or of an output.
REF_API double ref_element(const uint8_t* array, int32_t type, int64_t index) {
    return type == KMLA_FP32 ? ref_float_at(array + index * 4) : ref_bf16_at(array + index * 2);
}

typedef enum ref_layout { REF_PACKED, REF_E4M3, REF_BF16 } ref_layout;

REF_API ref_layout ref_kv_layout(int32_t kv_format) {
    return kv_format == KMLA_KV_PACKED ? REF_PACKED
           : kv_format == KMLA_KV_E4M3 ? REF_E4M3
                                       : REF_BF16;
}

REF_API ref_layout ref_query_layout(int32_t query_format) {
    return query_format == KMLA_QUERY_PACKED ? REF_PACKED
           : query_format == KMLA_QUERY_E4M3 ? REF_E4M3
                                             : REF_BF16;
}

REF_API int64_t ref_record_bytes(ref_layout layout) {
    return layout == REF_PACKED ? 656 : layout == REF_E4M3 ? 576 : 1152;
}

// The 576 values of a record, exactly. `codes` is the table that ref_codes fills.
REF_API void ref_record(ref_layout layout, const uint8_t* record, double tensor_scale,
                        const double* codes, double* values) {
    for (int d = 0; d < REF_Q; d++) {
        if (layout == REF_BF16) {
            values[d] = ref_bf16((uint16_t)ref_little(record + 2 * d, 2));
        } else if (layout == REF_E4M3) {
            values[d] = codes[record[d]] * tensor_scale;
        } else if (d < REF_D) {
            values[d] = codes[record[d]] * ref_group_scale(record, d / 128);
        } else {
            values[d] = ref_bf16((uint16_t)ref_little(record + 528 + 2 * (d - REF_D), 2));
        }
    }
}

REF_API void ref_codes(double* codes) {
    for (int code = 0; code < 256; code++) {
        codes[code] = ref_e4m3((uint8_t)code);
    }
}

// The packed query rule: a power-of-two scale, found by frexp.
REF_API double ref_query_scale(float maximum) {
    const float exact = maximum * (float)(1.0 / 448.0), raw = exact > 1e-4f ? exact : 1e-4f;
    int exponent;
    const double fraction = frexp(raw, &exponent);
    return ldexp(1.0, fraction == 0.5 ? exponent - 1 : exponent);
}

// What a query becomes when it is packed: the latent part rounded, the rope lanes as they are.
REF_API void ref_round_query(double* values) {
    for (int first = 0; first < REF_D; first += 128) {
        double maximum = 0.0;
        for (int d = first; d < first + 128; d++) {
            maximum = fabs(values[d]) > maximum ? fabs(values[d]) : maximum;
        }
        const double scale = ref_query_scale((float)maximum);
        for (int d = first; d < first + 128; d++) {
            values[d] = ref_e4m3(ref_to_e4m3(values[d] / scale)) * scale;
        }
    }
}

// =============================================================================
// A case: everything that one decode reads and writes
// =============================================================================

typedef struct ref_case {
    // Set these (zero takes the default in brackets), then call ref_build.
    kmla_shape shape;
    const int32_t* lengths;     // [R] or [requests], as shape.lengths says
    const int32_t* row_offsets; // [requests + 1] if shape.ragged
    float scale;                // [Kimi-K3's]
    double logit_sigma;         // [1]
    uint64_t seed;
    int64_t pitch_extra_bytes;  // of garbage after each page, a multiple of 16
    int32_t stored_heads;       // heads that query, out and lse buffers have room for [heads]
    int32_t out_type;           // KMLA_BF16 or KMLA_FP32
    double hole_share;          // share of table entries that say "no token"
    int32_t unused_fill;        // byte of slots and gaps that hold no token [0xff: NaN]
    int32_t spare_pages;        // pages that no table names

    // Made by ref_build.
    kmla_plan plan;
    kmla_decode args;      // host addresses
    ref_buffer pool;       // kv
    ref_buffer table;      // block table or slot list
    ref_buffer length_buffer;
    ref_buffer offset_buffer;
    ref_buffer query;
    ref_buffer out;        // prefilled with 0xff
    ref_buffer lse;        // prefilled with 0xff
    ref_buffer workspace;  // prefilled with 0xff
    double codes[256];
} ref_case;

// Tokens below a global length that a rank holds, by counting them.
REF_API int64_t ref_local_tokens(const kmla_dcp* dcp, int64_t length) {
    const int64_t ranks = dcp->ranks == 0 ? 1 : dcp->ranks;
    const int64_t interleave = dcp->interleave == 0 ? 1 : dcp->interleave;
    int64_t tokens = 0;
    for (int64_t token = 0; token < length; token++) {
        tokens += token / interleave % ranks == dcp->rank;
    }
    return tokens;
}

// The request of a row: its number, the row's index in it and its rows. 0 for a dead row.
REF_API int ref_find_request(const ref_case* c, int32_t row, int32_t* request, int32_t* index,
                             int32_t* rows) {
    const int32_t uniform = c->plan.shape.rows_per_request;
    for (int32_t i = 0; i < c->plan.shape.requests; i++) {
        const int32_t first = c->plan.shape.ragged ? c->row_offsets[i] : i * uniform;
        const int32_t end = c->plan.shape.ragged ? c->row_offsets[i + 1] : first + uniform;
        if (row >= first && row < end) {
            *request = i;
            *index = row - first;
            *rows = end - first;
            return 1;
        }
    }
    return 0;
}

// The local tokens that a row sees.
REF_API void ref_row_range(const ref_case* c, int32_t row, int64_t* begin, int64_t* end) {
    const kmla_length_rule* rule = &c->plan.shape.lengths;
    const int64_t capacity = c->plan.shape.capacity_tokens;
    int32_t request, index, rows;
    *begin = 0;
    *end = 0;
    if (!ref_find_request(c, row, &request, &index, &rows)) {
        return;
    }
    const int per_row = rule->lengths_kind == KMLA_LENGTHS_PER_ROW;
    int64_t bound = per_row ? c->lengths[row] : c->lengths[request];
    if (!per_row && rule->rows_kind == KMLA_ROWS_CAUSAL) {
        bound += index + 1 - rows;
    }
    if (per_row && bound > capacity) {
        bound = capacity;
    }
    const int64_t from =
        rule->window_tokens > 0 && bound > rule->window_tokens ? bound - rule->window_tokens : 0;
    *begin = per_row ? from : ref_local_tokens(&rule->dcp, from);
    *end = per_row ? bound : ref_local_tokens(&rule->dcp, bound);
    *end = *end < 0 ? 0 : *end > capacity ? capacity : *end;
    *begin = *begin > *end ? *end : *begin;
}

// Plans c->shape again, e.g. with other splits, and makes a new workspace full of NaN.
REF_API kmla_status ref_plan(ref_case* c, const kmla_device* device) {
    kmla_error error;
    const kmla_status status = kmla_plan_decode(&c->shape, device, &c->plan, &error);
    if (status != KMLA_OK) {
        fprintf(stderr, "reference.h: %s\n", error.message);
        return status;
    }
    ref_buffer_free(&c->workspace);
    c->workspace = ref_buffer_make((size_t)c->plan.workspace_bytes, 0xff);
    c->args.workspace = c->plan.workspace_bytes == 0 ? 0 : ref_address(&c->workspace);
    c->args.workspace_bytes = c->plan.workspace_bytes;
    return KMLA_OK;
}

// Fills outputs with NaN again.
REF_API void ref_clear(ref_case* c) {
    memset(c->out.data, 0xff, c->out.bytes);
    memset(c->lse.data, 0xff, c->lse.bytes);
    memset(c->workspace.data, 0xff, c->workspace.bytes);
}

// 1 if no canary was hurt and the room of heads that are only stored is as it was.
REF_API int ref_untouched(const ref_case* c) {
    const int32_t heads = c->plan.shape.heads;
    const size_t vector_bytes = REF_D * (size_t)(c->out_type == KMLA_FP32 ? 4 : 2);
    for (int32_t row = 0; row < c->plan.shape.rows; row++) {
        const size_t first = (size_t)row * (size_t)c->stored_heads + (size_t)heads;
        const size_t spare = (size_t)(c->stored_heads - heads);
        if (!ref_all_bytes(c->out.data + first * vector_bytes, spare * vector_bytes, 0xff) ||
            !ref_all_bytes(c->lse.data + first * 4, spare * 4, 0xff)) {
            return 0;
        }
    }
    return ref_canary_whole(&c->pool) && ref_canary_whole(&c->table) &&
           ref_canary_whole(&c->length_buffer) && ref_canary_whole(&c->offset_buffer) &&
           ref_canary_whole(&c->query) && ref_canary_whole(&c->out) &&
           ref_canary_whole(&c->lse) && ref_canary_whole(&c->workspace);
}

REF_API void ref_free(ref_case* c) {
    ref_buffer_free(&c->pool);
    ref_buffer_free(&c->table);
    ref_buffer_free(&c->length_buffer);
    ref_buffer_free(&c->offset_buffer);
    ref_buffer_free(&c->query);
    ref_buffer_free(&c->out);
    ref_buffer_free(&c->lse);
    ref_buffer_free(&c->workspace);
}

// Shuffled 0 .. count-1; the caller frees it.
REF_API int64_t* ref_shuffled(ref_random* random, int64_t count) {
    int64_t* numbers = (int64_t*)malloc((size_t)count * sizeof(int64_t));
    for (int64_t i = 0; i < count; i++) {
        numbers[i] = i;
    }
    for (int64_t i = count - 1; i > 0; i--) {
        const int64_t other = ref_below(random, (int32_t)(i + 1));
        const int64_t kept = numbers[i];
        numbers[i] = numbers[other];
        numbers[other] = kept;
    }
    return numbers;
}

// Tokens that each request (or with a slot list, each row) needs: the longest row's.
REF_API int64_t ref_tokens_of_table(const ref_case* c, int32_t table) {
    int64_t most = 0;
    for (int32_t row = 0; row < c->plan.shape.rows; row++) {
        int32_t request, index, rows;
        if (ref_find_request(c, row, &request, &index, &rows) &&
            (c->plan.shape.slot_list ? row : request) == table) {
            int64_t begin, end;
            ref_row_range(c, row, &begin, &end);
            most = end > most ? end : most;
        }
    }
    return most;
}

// Writes normal records to slots of the pool. latent sigma 1, rope sigma 1.
REF_API kmla_status ref_write_tokens(ref_case* c, ref_random* random, const int64_t* slots,
                                     int32_t tokens) {
    float* values = (float*)ref_malloc((size_t)tokens * REF_Q * sizeof(float));
    for (int64_t i = 0; i < (int64_t)tokens * REF_Q; i++) {
        values[i] = (float)ref_normal(random);
    }
    kmla_kv_write write;
    kmla_error error;
    memset(&write, 0, sizeof(write));
    write.tokens = tokens;
    write.kv_format = c->plan.shape.kv_format;
    write.source_type = KMLA_FP32;
    write.kv_scale = c->args.kv_scale;
    write.page_tokens = c->plan.shape.page_tokens;
    write.latent = (uint64_t)(uintptr_t)values;
    write.latent_stride = REF_Q;
    write.rope = (uint64_t)(uintptr_t)(values + REF_D);
    write.rope_stride = REF_Q;
    write.slots = (uint64_t)(uintptr_t)slots;
    write.kv = c->args.kv;
    write.kv_pages = c->args.kv_pages;
    write.page_pitch_bytes = c->args.page_pitch_bytes;
    const kmla_status status = kmla_host_write_kv(&write, &error);
    if (status != KMLA_OK) {
        fprintf(stderr, "reference.h: %s\n", error.message);
    }
    ref_release(values);
    return status;
}

// Normal queries whose scores have sigma logit_sigma. Heads that are only stored hold NaN.
REF_API kmla_status ref_write_queries(ref_case* c, ref_random* random) {
    const kmla_shape* shape = &c->plan.shape;
    const double sigma = c->logit_sigma / (24.0 * c->scale); // 24 = sqrt(576)
    const int64_t count = (int64_t)shape->rows * shape->heads * REF_Q;
    float* values = (float*)ref_malloc((size_t)count * sizeof(float));
    for (int64_t i = 0; i < count; i++) {
        values[i] = (float)(sigma * ref_normal(random));
    }
    kmla_query_write write;
    kmla_error error;
    memset(&write, 0, sizeof(write));
    write.rows = shape->rows;
    write.heads = shape->heads;
    write.query_format = shape->query_format;
    write.source_type = KMLA_FP32;
    write.query_scale = c->args.query_scale = (float)(sigma * 6.0 / 448.0);
    write.source = (uint64_t)(uintptr_t)values;
    write.query = c->args.query;
    write.query_row_stride_bytes = c->args.query_row_stride_bytes;
    write.query_head_stride_bytes = c->args.query_head_stride_bytes;
    const kmla_status status = kmla_host_write_query(&write, &error);
    if (status != KMLA_OK) {
        fprintf(stderr, "reference.h: %s\n", error.message);
    }
    ref_release(values);
    return status;
}

// Tables that name shuffled pages or slots. Entries past a length are garbage: the largest int32.
REF_API kmla_status ref_build_tables(ref_case* c, ref_random* random) {
    const kmla_shape* shape = &c->plan.shape;
    const int32_t tables = shape->slot_list ? shape->rows : shape->requests;
    const int32_t entry_tokens = shape->slot_list ? 1 : shape->page_tokens;
    const int64_t width = (shape->capacity_tokens + entry_tokens - 1) / entry_tokens;
    int64_t live_entries = 0;
    for (int32_t table = 0; table < tables; table++) {
        live_entries += (ref_tokens_of_table(c, table) + entry_tokens - 1) / entry_tokens;
    }
    const int64_t pages =
        (shape->slot_list ? live_entries / shape->page_tokens + 1 : live_entries) +
        (c->spare_pages == 0 ? 1 : c->spare_pages);
    const ref_layout layout = ref_kv_layout(shape->kv_format);
    const int64_t pitch =
        shape->page_tokens * ref_record_bytes(layout) + c->pitch_extra_bytes;
    c->pool = ref_buffer_make((size_t)(pages * pitch), c->unused_fill == 0 ? 0xff : c->unused_fill);
    c->args.kv = ref_address(&c->pool);
    c->args.kv_pages = (uint64_t)pages;
    c->args.page_pitch_bytes = (uint64_t)pitch;

    c->table = ref_buffer_make((size_t)(tables * width) * 4, 0xff);
    int32_t* entries = (int32_t*)(void*)c->table.data;
    int64_t* slots = (int64_t*)malloc((size_t)(pages * shape->page_tokens + 1) * sizeof(int64_t));
    const int64_t names_per_page = shape->slot_list ? shape->page_tokens : 1;
    int64_t* free_entries = ref_shuffled(random, pages * names_per_page);
    int64_t used = 0;
    int32_t tokens = 0;
    for (int32_t table = 0; table < tables; table++) {
        const int64_t live = ref_tokens_of_table(c, table);
        for (int64_t i = 0; i < width; i++) {
            int32_t* entry = &entries[table * width + i];
            *entry = INT32_MAX;
            if (i * entry_tokens >= live) {
                continue;
            }
            const int64_t name = free_entries[used++];
            *entry = ref_uniform(random) < c->hole_share ? -1 : (int32_t)name;
            for (int64_t k = 0; *entry >= 0 && k < entry_tokens; k++) {
                if (i * entry_tokens + k < live) {
                    slots[tokens++] = name * entry_tokens + k;
                }
            }
        }
    }
    const kmla_status status =
        tokens == 0 ? KMLA_OK : ref_write_tokens(c, random, slots, tokens);
    free(slots);
    free(free_entries);
    if (shape->slot_list) {
        c->args.slot_list = ref_address(&c->table);
        c->args.slot_list_width = width;
    } else {
        c->args.block_table = ref_address(&c->table);
        c->args.block_table_width = width;
    }
    return status;
}

// Plans, allocates and fills a case for host addresses. `device` NULL plans for the host.
REF_API kmla_status ref_build(ref_case* c, const kmla_device* device) {
    ref_random random;
    random.state = c->seed;
    c->scale = c->scale == 0.0f ? REF_K3_SCALE : c->scale;
    c->logit_sigma = c->logit_sigma == 0.0 ? 1.0 : c->logit_sigma;
    ref_codes(c->codes);
    kmla_status status = ref_plan(c, device);
    if (status != KMLA_OK) {
        return status;
    }
    const kmla_shape* shape = &c->plan.shape;
    c->stored_heads = c->stored_heads == 0 ? shape->heads : c->stored_heads;
    c->args.scale = c->scale;
    c->args.kv_scale = 0.0137f; // about 6 sigma / 448, and no power of two
    const size_t stored = (size_t)shape->rows * (size_t)c->stored_heads;
    const int64_t query_bytes = ref_record_bytes(ref_query_layout(shape->query_format));
    c->query = ref_buffer_make(stored * (size_t)query_bytes, 0xff);
    c->args.query = ref_address(&c->query);
    c->args.query_head_stride_bytes = query_bytes;
    c->args.query_row_stride_bytes = query_bytes * c->stored_heads;
    status = ref_write_queries(c, &random);
    if (status != KMLA_OK) {
        return status;
    }
    c->out = ref_buffer_make(stored * REF_D * (c->out_type == KMLA_FP32 ? 4 : 2), 0xff);
    c->args.out = ref_address(&c->out);
    c->args.out_type = c->out_type;
    c->args.out_head_stride = REF_D;
    c->args.out_row_stride = (int64_t)REF_D * c->stored_heads;
    c->lse = ref_buffer_make(stored * 4, 0xff);
    c->args.lse = ref_address(&c->lse);
    c->args.lse_head_stride = 1;
    c->args.lse_row_stride = c->stored_heads;
    const int per_row = shape->lengths.lengths_kind == KMLA_LENGTHS_PER_ROW;
    c->length_buffer = ref_buffer_make((size_t)(per_row ? shape->rows : shape->requests) * 4, 0);
    memcpy(c->length_buffer.data, c->lengths, c->length_buffer.bytes);
    c->args.lengths = ref_address(&c->length_buffer);
    if (shape->ragged) {
        c->offset_buffer = ref_buffer_make((size_t)(shape->requests + 1) * 4, 0);
        memcpy(c->offset_buffer.data, c->row_offsets, c->offset_buffer.bytes);
        c->args.row_offsets = ref_address(&c->offset_buffer);
    }
    return ref_build_tables(c, &random);
}

// =============================================================================
// The decode, from its definition: all scores, then their maximum, then the weighted sum
// =============================================================================

// Where a row's token lies in the pool, NULL if the table says that there is none.
REF_API uint8_t* ref_token_record(const ref_case* c, int32_t row, int64_t token) {
    const kmla_shape* shape = &c->plan.shape;
    const int64_t record_bytes = ref_record_bytes(ref_kv_layout(shape->kv_format));
    const int64_t pitch = shape->page_tokens * record_bytes + c->pitch_extra_bytes;
    const int32_t* entries = (const int32_t*)(const void*)c->table.data;
    int32_t request, index, rows;
    int64_t slot;
    if (!ref_find_request(c, row, &request, &index, &rows)) {
        return NULL;
    }
    if (shape->slot_list) {
        slot = entries[row * c->args.slot_list_width + token];
    } else {
        const int64_t page =
            entries[request * c->args.block_table_width + token / shape->page_tokens];
        slot = page < 0 ? -1 : page * shape->page_tokens + token % shape->page_tokens;
    }
    return slot < 0 ? NULL
                    : c->pool.data + slot / shape->page_tokens * pitch +
                          slot % shape->page_tokens * record_bytes;
}

// The values of a row's token. 0 if there is none.
REF_API int ref_token(const ref_case* c, int32_t row, int64_t token, double* values) {
    const uint8_t* record = ref_token_record(c, row, token);
    if (record != NULL) {
        ref_record(ref_kv_layout(c->plan.shape.kv_format), record, c->args.kv_scale, c->codes,
                   values);
    }
    return record != NULL;
}

REF_API void ref_query(const ref_case* c, int32_t row, int32_t head, double* values) {
    const ref_layout layout = ref_query_layout(c->plan.shape.query_format);
    const int64_t index = (int64_t)row * c->stored_heads + head;
    ref_record(layout, c->query.data + index * ref_record_bytes(layout), c->args.query_scale,
               c->codes, values);
    if (layout == REF_BF16 && c->plan.shape.mode == KMLA_MODE_E4M3_QUERY) {
        ref_round_query(values);
    }
}

// All heads of one row over tokens [begin, end): out[heads][512], lse[heads]. NaN spreads.
REF_API void ref_decode_row(const ref_case* c, int32_t row, int64_t begin, int64_t end,
                            double* out, double* lse) {
    const int32_t heads = c->plan.shape.heads;
    const int64_t tokens = end > begin ? end - begin : 0;
    double* queries = (double*)malloc((size_t)heads * REF_Q * sizeof(double));
    double* scores = (double*)malloc((size_t)(heads * tokens + 1) * sizeof(double));
    double* total = (double*)calloc((size_t)heads, sizeof(double));
    double* maximum = (double*)malloc((size_t)heads * sizeof(double));
    double values[REF_Q];
    for (int32_t head = 0; head < heads; head++) {
        ref_query(c, row, head, queries + (int64_t)head * REF_Q);
        maximum[head] = -(double)INFINITY;
    }
    for (int64_t t = 0; t < tokens; t++) {
        const int there = ref_token(c, row, begin + t, values);
        for (int32_t head = 0; head < heads; head++) {
            const double* query = queries + (int64_t)head * REF_Q;
            double sum[4] = {0};
            for (int d = 0; there && d < REF_Q; d += 4) {
                sum[0] += query[d] * values[d];
                sum[1] += query[d + 1] * values[d + 1];
                sum[2] += query[d + 2] * values[d + 2];
                sum[3] += query[d + 3] * values[d + 3];
            }
            const double score = c->scale * (sum[0] + sum[1] + sum[2] + sum[3]);
            scores[head * tokens + t] = score;
            if (there && (isnan(score) || score > maximum[head])) {
                maximum[head] = score; // once NaN it stays so: nothing is above NaN
            }
        }
    }
    memset(out, 0, (size_t)heads * REF_D * sizeof(double));
    for (int64_t t = 0; t < tokens; t++) {
        if (!ref_token(c, row, begin + t, values)) {
            continue;
        }
        for (int32_t head = 0; head < heads; head++) {
            const double weight = exp(scores[head * tokens + t] - maximum[head]);
            total[head] += weight;
            for (int d = 0; d < REF_D; d++) {
                out[(int64_t)head * REF_D + d] += weight * values[d];
            }
        }
    }
    for (int32_t head = 0; head < heads; head++) {
        lse[head] = total[head] == 0.0 ? -(double)INFINITY : maximum[head] + log(total[head]);
        for (int d = 0; d < REF_D && total[head] != 0.0; d++) {
            out[(int64_t)head * REF_D + d] /= total[head];
        }
    }
    free(queries);
    free(scores);
    free(total);
    free(maximum);
}

// The whole case: out[R][H][512] and lse[R][H], dense.
REF_API void ref_decode(const ref_case* c, double* out, double* lse) {
    const int64_t heads = c->plan.shape.heads;
    for (int32_t row = 0; row < c->plan.shape.rows; row++) {
        int64_t begin, end;
        ref_row_range(c, row, &begin, &end);
        ref_decode_row(c, row, begin, end, out + row * heads * REF_D, lse + row * heads);
    }
}

// One vector's combine: out[512] and *lse of parts. part_out[p] may be NULL where empty.
REF_API void ref_combine(int32_t parts, const double* part_lse, const double* const* part_out,
                         double* out, double* lse) {
    double maximum = -(double)INFINITY;
    double total = 0.0;
    memset(out, 0, REF_D * sizeof(double));
    for (int32_t p = 0; p < parts; p++) {
        if (isfinite(part_lse[p]) && part_lse[p] > maximum) {
            maximum = part_lse[p];
        }
    }
    for (int32_t p = 0; p < parts; p++) {
        if (isfinite(part_lse[p])) {
            const double weight = exp(part_lse[p] - maximum);
            total += weight;
            for (int d = 0; d < REF_D; d++) {
                out[d] += weight * part_out[p][d];
            }
        }
    }
    *lse = total == 0.0 ? -(double)INFINITY : maximum + log(total);
    for (int d = 0; d < REF_D && total != 0.0; d++) {
        out[d] /= total;
    }
}

// =============================================================================
// Judging
// =============================================================================

// Relative L2 error of one vector of an output.
REF_API double ref_relative_error(const uint8_t* out, int32_t type, const double* right) {
    double off = 0.0;
    double norm = 0.0;
    for (int d = 0; d < REF_D; d++) {
        const double difference = ref_element(out, type, d) - right[d];
        off += difference * difference;
        norm += right[d] * right[d];
    }
    return off == 0.0 ? 0.0 : sqrt(off / norm);
}

typedef struct ref_errors {
    double out;          // relative L2 error of the whole output
    double rounding;     // the part of it that rounding the right answer to BF16 costs
    double worst_vector; // and of its worst vector
    double lse;          // the worst |lse - right| / max(1, |right|)
    int wrong;           // vectors whose emptiness (out exactly 0, lse -inf) or NaN is wrong
} ref_errors;

// Compares a case's outputs with ref_decode's.
REF_API ref_errors ref_judge(const ref_case* c, const double* right_out,
                             const double* right_lse) {
    const int64_t heads = c->plan.shape.heads;
    const int64_t vector_bytes = REF_D * (c->out_type == KMLA_FP32 ? 4 : 2);
    ref_errors errors = {0.0, 0.0, 0.0, 0.0, 0};
    double all_off = 0.0;
    double all_rounding = 0.0;
    double all_norm = 0.0;
    for (int64_t i = 0; i < (int64_t)c->plan.shape.rows * heads; i++) {
        const int64_t stored = i / heads * c->stored_heads + i % heads;
        const uint8_t* out = c->out.data + stored * vector_bytes;
        const double lse = ref_float_at(c->lse.data + stored * 4);
        const double right = right_lse[i];
        int nans = 0;
        double off = 0.0;
        double norm = 0.0;
        double rounding = 0.0;
        for (int d = 0; d < REF_D; d++) {
            const double value = ref_element(out, c->out_type, d);
            const double difference = value - right_out[i * REF_D + d];
            const double rounded = ref_bf16(ref_to_bf16((float)right_out[i * REF_D + d]));
            const double cost = rounded - right_out[i * REF_D + d];
            rounding += c->out_type == KMLA_BF16 ? cost * cost : 0.0;
            nans += isnan(value) != 0;
            off += difference * difference;
            norm += right_out[i * REF_D + d] * right_out[i * REF_D + d];
        }
        if (isnan(right)) {
            errors.wrong += nans != REF_D || !isnan(lse);
        } else if (isinf(right)) {
            errors.wrong += lse != right || !ref_all_bytes(out, (size_t)vector_bytes, 0);
        } else if (nans > 0 || isnan(lse)) {
            errors.wrong++;
        } else {
            const double vector_error = off == 0.0 ? 0.0 : sqrt(off / norm);
            const double lse_error = fabs(lse - right) / (fabs(right) > 1.0 ? fabs(right) : 1.0);
            errors.worst_vector =
                vector_error > errors.worst_vector ? vector_error : errors.worst_vector;
            errors.lse = lse_error > errors.lse ? lse_error : errors.lse;
            all_off += off;
            all_rounding += rounding;
            all_norm += norm;
        }
    }
    errors.out = all_off == 0.0 ? 0.0 : sqrt(all_off / all_norm);
    errors.rounding = all_rounding == 0.0 ? 0.0 : sqrt(all_rounding / all_norm);
    return errors;
}

// The bound for a BF16 output. Bounds are meant for many different numbers, whose rounding to
// BF16 costs about 1.7e-3. Rows of one token hold few different numbers (E4M3: a hundred), which
// chance may round worse; no reader can do better than rounding the right answer.
REF_API double ref_bound(const ref_errors* errors, double bound) {
    return errors->rounding * 1.02 > bound ? errors->rounding * 1.02 : bound;
}

// Decodes the reference and compares. What most tests need.
REF_API ref_errors ref_check(const ref_case* c) {
    const size_t vectors = (size_t)c->plan.shape.rows * (size_t)c->plan.shape.heads;
    double* out = (double*)malloc(vectors * REF_D * sizeof(double));
    double* lse = (double*)malloc(vectors * sizeof(double));
    ref_decode(c, out, lse);
    const ref_errors errors = ref_judge(c, out, lse);
    free(out);
    free(lse);
    return errors;
}

#endif // KMLA_TESTS_REFERENCE_H
