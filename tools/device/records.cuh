// Record formats: codes to numbers and back, which tokens a row sees, where a token's record is.

// ---- E4M3 ("fn"): 1 sign, 4 exponent (bias 7), 3 mantissa bits; 0x7F and 0xFF are NaN

// Four codes, exactly, as two pairs of f16: pair[0] has bytes 0 and 1, pair[1] bytes 2 and 3.
KMLA_DEVICE void e4m3x4_to_f16(uint32_t codes, uint32_t (&pair)[2]) {
#if KMLA_HAS_E4M3_CONVERT
    e4m3x4_to_f16x2(codes, pair[0], pair[1]);
#else
    // Moved into f16's fields a code is its value times 2^-8, subnormals included.
    const uint32_t two_to_8 = 0x5C005C00u;
    for (int i = 0; i < 2; i++) {
        uint32_t high_bytes = permute_bytes(codes, 0, i == 0 ? 0x1404 : 0x3424);
        uint32_t magnitude = high_bytes & 0x7F007F00u;
        uint32_t nan = ((magnitude + 0x01000100u) & 0x80008000u) >> 15;
        uint32_t small = (magnitude >> 1) | (high_bytes & 0x80008000u);
        pair[i] = multiply_f16x2(small, two_to_8) | nan * 0x7FFFu;
    }
#endif
}

KMLA_DEVICE float e4m3_to_float(uint32_t code) {
    uint32_t magnitude = code & 0x7F;
    float value = bits_float(magnitude << 20) * bits_float((127 + 120) << 23);
    if (magnitude == 0x7F) {
        value = bits_float(0x7FFFFFFF);
    }
    return code & 0x80 ? -value : value;
}

// Nearest-even, saturating at 448; NaN becomes 0x7F.
KMLA_DEVICE uint32_t float_to_e4m3(float value) {
    uint32_t bits = float_bits(value);
    uint32_t magnitude = bits & 0x7FFFFFFFu;
    uint32_t code;
    if (magnitude > 0x7F800000u) {
        return 0x7F;
    }
    if (magnitude > float_bits(448.0f)) {
        magnitude = float_bits(448.0f);
    }
    if (magnitude < float_bits(0.015625f)) { // subnormal: a count of 2^-9, rounded by the adder
        const float one_and_a_half_2_23 = 12582912.0f;
        code = float_bits(bits_float(magnitude) * 512.0f + one_and_a_half_2_23) -
               float_bits(one_and_a_half_2_23);
    } else {
        uint32_t rounded = magnitude + 0x7FFFFu + ((magnitude >> 20) & 1);
        code = (rounded >> 20) - ((127 - 7) << 3);
    }
    return code | ((bits >> 24) & 0x80);
}

// e4m3_to_float(float_to_e4m3(value)) for numbers, by one rounding addition.
KMLA_DEVICE float round_to_e4m3(float value) {
    uint32_t magnitude = float_bits(value) & 0x7FFFFFFFu;
    if (magnitude > float_bits(448.0f) && magnitude <= 0x7F800000u) {
        magnitude = float_bits(448.0f);
    }
    uint32_t exponent = magnitude & 0x7F800000u;
    if (exponent < float_bits(0.015625f)) {
        exponent = float_bits(0.015625f);
    }
    // Adding 1.5 * 2^20 times the leading bit leaves 3 bits below it.
    float rounder = bits_float(exponent + (20u << 23)) * 1.5f;
    float rounded = (bits_float(magnitude) + rounder) - rounder;
    return float_bits(value) >> 31 ? -rounded : rounded;
}

KMLA_DEVICE float bf16_low(uint32_t pair) { return bits_float(pair << 16); }
KMLA_DEVICE float bf16_high(uint32_t pair) { return bits_float(pair & 0xFFFF0000u); }

KMLA_DEVICE uint32_t float_to_bf16(float value) { return pack_bf16(value, 0.0f) & 0xFFFFu; }

// Scale of a packed query's group: max(amax * (1/448), 1e-4), rounded up to a power of two.
KMLA_DEVICE float round_up_to_power_of_two(float value) {
    uint32_t bits = float_bits(value);
    return bits_float((bits & 0x7F800000u) + ((bits & 0x007FFFFFu) ? 0x00800000u : 0));
}
KMLA_DEVICE float packed_query_scale(float amax) {
    return round_up_to_power_of_two(maximum(multiply(amax, 1.0f / 448.0f), 1e-4f));
}
// 1 / scale of a power of two, from its exponent.
KMLA_DEVICE float power_of_two_inverse(float scale) {
    return bits_float((254u << 23) - float_bits(scale));
}

// ---- which tokens a row sees

struct token_range {
    int begin, end; // local tokens; empty if begin == end
};

// Tokens of a global length that this rank holds.
KMLA_DEVICE int local_length(const kmla_i_reader_args& args, int global) {
    if (args.dcp_ranks == 1) {
        return global;
    }
    int64_t period = (int64_t)args.dcp_ranks * args.dcp_interleave;
    int64_t rest = global % period - (int64_t)args.dcp_rank * args.dcp_interleave;
    rest = rest < 0 ? 0 : rest > args.dcp_interleave ? args.dcp_interleave : rest;
    return (int)(global / period * args.dcp_interleave + rest);
}

// What the caller says of a row's length. Apart from row_range so that other work can hide the load.
KMLA_DEVICE int row_length(const kmla_i_reader_args& args, int group, int row) {
    return ((const int32_t*)args.lengths)[args.per_request ? group : row];
}

// A row with that length is row `i` of its group's `rows`.
KMLA_DEVICE token_range row_range(const kmla_i_reader_args& args, int length, int group, int i,
                                  int rows) {
    token_range range;
    if (group == args.groups) { // rows after the last request are dead
        return token_range{0, 0};
    }
    if (args.per_request) {
        int64_t bound = length;
        bound = args.draft ? bound : bound - rows + 1 + i;
        bound = bound < 0 ? 0 : bound;
        int64_t first = args.window && bound > args.window ? bound - args.window : 0;
        range.begin = local_length(args, (int)first);
        range.end = minimum(local_length(args, (int)bound), args.capacity);
    } else {
        range.end = minimum(maximum(length, 0), args.capacity);
        range.begin = args.window ? maximum(range.end - args.window, 0) : 0;
    }
    range.begin = minimum(range.begin, range.end);
    return range;
}

// The part of a row's range that split `split` reads.
KMLA_DEVICE token_range split_range(const kmla_i_reader_args& args, token_range row, int split) {
    if (row.begin >= row.end) {
        return token_range{0, 0};
    }
    int first_chunk = row.begin / KMLA_CHUNK_TOKENS;
    int live = (row.end + KMLA_CHUNK_TOKENS - 1) / KMLA_CHUNK_TOKENS - first_chunk;
    int chunk = 0, chunks = 0;
    if (args.splits == 1 || live <= args.single_split_chunks) {
        if (split != 0) {
            return token_range{0, 0};
        }
        return row;
    }
    if (args.balanced) {
        int used = minimum(args.splits, live);
        if (split < used) {
            int share = live / used, longer = live % used;
            chunk = first_chunk + split * share + minimum(split, longer);
            chunks = share + (split < longer ? 1 : 0);
        }
    } else {
        chunk = split * args.chunks_per_split;
        chunks = args.chunks_per_split;
    }
    token_range part;
    part.begin = maximum(row.begin, chunk * KMLA_CHUNK_TOKENS);
    part.end = minimum(row.end, (chunk + chunks) * KMLA_CHUNK_TOKENS);
    return part.begin < part.end ? part : token_range{0, 0};
}

// ---- where a token's record is

// A token's page in its group's block table or its slot in the list; negative: there is none. Apart
// from record_address so that the load can run a step ahead of its use.
KMLA_DEVICE int table_entry(const kmla_i_reader_args& args, int group, int token) {
    const int32_t* table = (const int32_t*)args.table + group * args.table_stride;
    if (args.slot_list) {
        return table[token];
    }
    return table[args.page_shift >= 0 ? token >> args.page_shift : token / args.page_tokens];
}

KMLA_DEVICE uint64_t record_address(const kmla_i_reader_args& args, int entry, int token,
                                    int record_bytes) {
    int slot = args.slot_list ? entry : token, page, offset;
    if (args.page_shift >= 0) {
        page = slot >> args.page_shift;
        offset = slot & (args.page_tokens - 1);
    } else {
        page = slot / args.page_tokens;
        offset = slot - page * args.page_tokens;
    }
    page = args.slot_list ? page : entry;
    return args.kv + (uint64_t)page * args.page_pitch + (uint32_t)(offset * record_bytes);
}
