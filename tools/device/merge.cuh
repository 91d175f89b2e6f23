// Weighted sums by log-sum-exp: the merge of a plan's splits.

#ifndef KMLA_TILE // support kernels

KMLA_DEVICE float load_number(uint64_t base, int64_t index, int type) {
    if (type == KMLA_FP32) {
        return ((const float*)base)[index];
    }
    return bits_float((uint32_t)((const uint16_t*)base)[index] << 16);
}

// Four neighbouring elements at once; index is a multiple of 4.
KMLA_DEVICE void load_numbers(uint64_t base, int64_t index, int type, float (&x)[4]) {
    if (type == KMLA_FP32) {
        word4 bits = *(const word4*)((const float*)base + index);
        x[0] = bits_float(bits.x), x[1] = bits_float(bits.y);
        x[2] = bits_float(bits.z), x[3] = bits_float(bits.w);
    } else {
        word2 bits = *(const word2*)((const uint16_t*)base + index);
        x[0] = bf16_low(bits.x), x[1] = bf16_high(bits.x);
        x[2] = bf16_low(bits.y), x[3] = bf16_high(bits.y);
    }
}

KMLA_DEVICE void store_numbers(uint64_t base, int64_t index, int type, const float (&x)[4]) {
    if (type == KMLA_FP32) {
        word4 bits = {float_bits(x[0]), float_bits(x[1]), float_bits(x[2]), float_bits(x[3])};
        *(word4*)((float*)base + index) = bits;
    } else {
        word2 bits = {pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3])};
        *(word2*)((uint16_t*)base + index) = bits;
    }
}

// out = sum(w o) / sum(w), lse = m + ln(sum w), w = exp(lse - m), m = max lse; parts ascending.
// A part of weight 0 is not read. Parts with a NaN lse make the vector NaN if `keep_nan`; else
// they, and infinite ones, are empty. One block a vector, four dims a thread.
template <bool keep_nan> KMLA_DEVICE void weighted_sum(const kmla_i_combine_args& args) {
    const float log2_e = 1.44269504f, ln_2 = 0.693147181f;
    int head = block_x(), row = block_y(), dim = thread_index() * 4;
    uint64_t part_lse = args.part_lse + 4 * (row * args.part_lse_row_stride +
                                             head * args.part_lse_head_stride);
    int64_t part_out = row * args.part_row_stride + head * args.part_head_stride + dim;

    float top = -infinity();
    bool nan = false;
    for (int part = 0; part < args.parts; part++) {
        float lse = load_number(part_lse, part * args.part_lse_stride, KMLA_FP32);
        nan |= !(lse == lse);
        if (lse < infinity()) {
            top = maximum(top, lse);
        }
    }
    float sum = 0, out[4] = {0, 0, 0, 0};
    for (int part = 0; part < args.parts; part++) {
        float lse = load_number(part_lse, part * args.part_lse_stride, KMLA_FP32);
        float weight = 0;
        if (lse > -infinity() && lse < infinity()) {
            weight = exp2_fast((lse - top) * log2_e);
        }
        if (weight > 0) {
            float x[4];
            load_numbers(args.part_out, part_out + part * args.part_out_stride, args.part_type, x);
            sum += weight;
            for (int i = 0; i < 4; i++) {
                out[i] += weight * x[i];
            }
        }
    }
    float lse = top + log2_fast(sum) * ln_2;
    for (int i = 0; i < 4; i++) {
        out[i] = sum > 0 ? divide(out[i], sum) : 0;
    }
    if (sum == 0) {
        lse = -infinity();
    }
    if (keep_nan && nan) {
        lse = out[0] = out[1] = out[2] = out[3] = bits_float(0x7FFFFFFF);
    }
    store_numbers(args.out, row * args.out_row_stride + head * args.out_head_stride + dim,
                  args.out_type, out);
    if (args.lse && dim == 0) {
        ((float*)args.lse)[row * args.lse_row_stride + head * args.lse_head_stride] = lse;
    }
}

KMLA_KERNEL(kmla_merge, kmla_i_combine_args, KMLA_I_SUPPORT_THREADS, 8) {
    wait_dependency();
    weighted_sum<true>(args);
}

#endif
