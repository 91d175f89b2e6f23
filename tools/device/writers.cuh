// Writers of KV and query records, byte for byte those of the host. One warp a record, 16 latent
// dims a lane, so that 8 lanes share a scale; 2 rope lanes a lane.

#ifndef KMLA_TILE // support kernels

KMLA_DEVICE int warp_index() { return thread_index() / 32; }
KMLA_DEVICE int lane_index() { return thread_index() % 32; }

// The largest magnitude among the numbers of a lane's 16 dims and its 7 group mates'.
KMLA_DEVICE float group_amax(const float (&x)[16]) {
    float amax = 0;
    for (int i = 0; i < 16; i++) {
        amax = maximum(amax, x[i] < 0 ? -x[i] : x[i]);
    }
    amax = maximum(amax, shuffle_xor(amax, 1));
    amax = maximum(amax, shuffle_xor(amax, 2));
    amax = maximum(amax, shuffle_xor(amax, 4));
    const float largest = bits_float(0x7F7FFFFFu);
    return amax > largest ? largest : amax; // an infinity saturates, it does not blind its group
}

KMLA_DEVICE void load_numbers_16(uint64_t base, int64_t index, int type, float (&x)[16]) {
    for (int i = 0; i < 16; i++) {
        x[i] = load_number(base, index + i, type);
    }
}

// Sixteen codes in one store.
KMLA_DEVICE void store_codes(uint8_t* to, const uint32_t (&code)[16]) {
    uint32_t word[4];
    for (int i = 0; i < 4; i++) {
        word[i] = code[4 * i] | code[4 * i + 1] << 8 | code[4 * i + 2] << 16 | code[4 * i + 3] << 24;
    }
    *(word4*)to = word4{word[0], word[1], word[2], word[3]};
}

// BF16 bits are copied as they are, NaN payloads too.
KMLA_DEVICE uint32_t load_bf16_bits(uint64_t base, int64_t index, int type) {
    if (type == KMLA_BF16) {
        return ((const uint16_t*)base)[index];
    }
    return float_to_bf16(((const float*)base)[index]);
}

KMLA_DEVICE void store_bf16(uint8_t* to, uint64_t base, int64_t index, int type, int count) {
    for (int i = 0; i < count; i++) {
        ((uint16_t*)to)[i] = (uint16_t)load_bf16_bits(base, index + i, type);
    }
}

// A whole record in the E4M3 format, for KV and queries alike: code = E4M3(x / scale).
KMLA_DEVICE void write_e4m3(uint8_t* record, uint64_t latent, int64_t latent_index, uint64_t rope,
                            int64_t rope_index, int type, float scale) {
    int lane = lane_index();
    float x[16];
    uint32_t code[16];
    load_numbers_16(latent, latent_index + 16 * lane, type, x);
    for (int i = 0; i < 16; i++) {
        code[i] = float_to_e4m3(divide(x[i], scale));
    }
    store_codes(record + 16 * lane, code);
    for (int i = 0; i < 2; i++) {
        float r = load_number(rope, rope_index + 2 * lane + i, type);
        record[KMLA_LATENT_DIMS + 2 * lane + i] = (uint8_t)float_to_e4m3(divide(r, scale));
    }
}

KMLA_DEVICE void write_bf16(uint8_t* record, uint64_t latent, int64_t latent_index, uint64_t rope,
                            int64_t rope_index, int type) {
    int lane = lane_index();
    store_bf16(record + 32 * lane, latent, latent_index + 16 * lane, type, 16);
    store_bf16(record + 2 * KMLA_LATENT_DIMS + 4 * lane, rope, rope_index + 2 * lane, type, 2);
}

// The packed framing: codes, the group's scale from its first lane, rope.
KMLA_DEVICE void write_packed(uint8_t* record, const uint32_t (&code)[16], float scale,
                              uint64_t rope, int64_t rope_index, int type) {
    int lane = lane_index();
    store_codes(record + 16 * lane, code);
    if (lane % 8 == 0) {
        ((float*)(record + KMLA_PACKED_SCALE_OFFSET))[lane / 8] = scale;
    }
    store_bf16(record + KMLA_PACKED_ROPE_OFFSET + 4 * lane, rope, rope_index + 2 * lane, type, 2);
}

KMLA_KERNEL(kmla_write_kv, kmla_i_kv_write_args, KMLA_I_SUPPORT_THREADS, 4) {
    int token = block_x() * (KMLA_I_SUPPORT_THREADS / 32) + warp_index();
    if (token >= args.tokens) {
        return;
    }
    int64_t slot = ((const int64_t*)args.slots)[token];
    if (slot < 0 || (uint64_t)slot >= args.kv_slots) {
        return;
    }
    int record_bytes = args.kv_format == KMLA_KV_PACKED ? KMLA_PACKED_BYTES
                       : args.kv_format == KMLA_KV_E4M3 ? KMLA_E4M3_BYTES
                                                        : KMLA_BF16_BYTES;
    uint8_t* record = (uint8_t*)args.kv + slot / args.page_tokens * args.page_pitch +
                      slot % args.page_tokens * record_bytes;
    int64_t latent = token * args.latent_stride, rope = token * args.rope_stride;
    if (args.kv_format == KMLA_KV_E4M3) {
        write_e4m3(record, args.latent, latent, args.rope, rope, args.source_type, args.kv_scale);
    } else if (args.kv_format == KMLA_KV_BF16) {
        write_bf16(record, args.latent, latent, args.rope, rope, args.source_type);
    } else {
        float x[16];
        uint32_t code[16];
        load_numbers_16(args.latent, latent + 16 * lane_index(), args.source_type, x);
        const float smallest_normal = bits_float(0x00800000u);
        float scale = maximum(divide(group_amax(x), 448.0f), smallest_normal);
        if (args.power_of_two) {
            scale = round_up_to_power_of_two(scale);
        }
        for (int i = 0; i < 16; i++) {
            code[i] = float_to_e4m3(divide(x[i], scale));
        }
        write_packed(record, code, scale, args.rope, rope, args.source_type);
    }
}

KMLA_KERNEL(kmla_write_query, kmla_i_query_write_args, KMLA_I_SUPPORT_THREADS, 4) {
    int vector = block_x() * (KMLA_I_SUPPORT_THREADS / 32) + warp_index();
    if (vector >= args.rows * args.heads) {
        return;
    }
    int row = vector / args.heads, head = vector % args.heads;
    uint8_t* record =
        (uint8_t*)args.query + row * args.query_row_stride + head * args.query_head_stride;
    int64_t latent = row * args.source_row_stride + head * args.source_head_stride;
    int64_t rope = latent + KMLA_LATENT_DIMS;
    if (args.query_format == KMLA_QUERY_E4M3) {
        write_e4m3(record, args.source, latent, args.source, rope, args.source_type,
                   args.query_scale);
    } else if (args.query_format == KMLA_QUERY_BF16) {
        write_bf16(record, args.source, latent, args.source, rope, args.source_type);
    } else {
        float x[16];
        uint32_t code[16];
        load_numbers_16(args.source, latent + 16 * lane_index(), args.source_type, x);
        float scale = packed_query_scale(group_amax(x));
        float inverse = power_of_two_inverse(scale);
        for (int i = 0; i < 16; i++) {
            code[i] = float_to_e4m3(multiply(x[i], inverse));
        }
        write_packed(record, code, scale, args.source, rope, args.source_type);
    }
}

#endif
