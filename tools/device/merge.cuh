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

// The lse of the part that this lane answers for, of those from `first` on.
KMLA_DEVICE float load_lse(const kmla_i_combine_args& args, int row, int head, int first) {
    int part = first + thread_index() % 32;
    int64_t index = part * args.part_lse_stride + row * args.part_lse_row_stride +
                    head * args.part_lse_head_stride;
    return part < args.parts ? ((const float*)args.part_lse)[index] : -infinity();
}

// What all parts of a vector say together.
struct part_tops {
    float top;       // the largest lse that counts
    int part;        // whose it is
    bool nan, done;  // this lane saw a NaN, or +inf
};

KMLA_DEVICE part_tops find_tops(const kmla_i_combine_args& args, int row, int head) {
    part_tops t = {-infinity(), 0, false, false};
    for (int first = 0; first < args.parts; first += 32) {
        float lse = load_lse(args, row, head, first);
        t.nan = t.nan || !(lse == lse);
        t.done = t.done || lse == infinity();
        if (lse > t.top && lse < infinity()) {
            t.top = lse;
            t.part = first + thread_index() % 32;
        }
    }
    for (int mask = 16; mask > 0; mask /= 2) {
        float other = shuffle_xor(t.top, mask);
        int other_part = (int)shuffle_xor((uint32_t)t.part, mask);
        if (other > t.top) {
            t.top = other;
            t.part = other_part;
        }
    }
    return t;
}

// The weight of the part that this lane answers for, of those from `first` on.
KMLA_DEVICE float load_weight(const kmla_i_combine_args& args, int row, int head, int first,
                              float top) {
    const float log2_e = 1.44269504f;
    float lse = load_lse(args, row, head, first);
    bool counts = lse > -infinity() && lse < infinity();
    return counts ? exp2_fast((lse - top) * log2_e) : 0;
}

// Stores a vector's four dims of this thread, o / sum, and its lse. No weight at all: 0 and -inf.
KMLA_DEVICE void store_weighted(const kmla_i_combine_args& args, int row, int head, float top,
                                float sum, bool nan, float (&out)[4]) {
    const float ln_2 = 0.693147181f;
    int dim = thread_index() * 4;
    bool empty = sum == 0;
    float lse = empty ? -infinity() : top + log2_fast(sum) * ln_2;
    for (int d = 0; d < 4; d++) {
        out[d] = empty ? 0 : divide(out[d], sum);
    }
    if (nan) {
        lse = out[0] = out[1] = out[2] = out[3] = bits_float(0x7FFFFFFF);
    }
    store_numbers(args.out, row * args.out_row_stride + head * args.out_head_stride + dim,
                  args.out_type, out);
    if (args.lse && dim == 0) {
        ((float*)args.lse)[row * args.lse_row_stride + head * args.lse_head_stride] = lse;
    }
}

// out = sum(w o) / sum(w), lse = m + ln(sum w), w = exp(lse - m), m = max lse; parts ascending.
// A part of weight 0 is not read. In the merge a NaN lse makes the vector NaN, and +inf says that
// its split has written the result itself; in the combine both are empty parts, like -inf. One
// block a vector, four dims a thread; each warp finds the weights, a part a lane.
template <bool is_merge> KMLA_DEVICE void weighted_sum(const kmla_i_combine_args& args) {
    int head = block_x(), row = block_y(), dim = thread_index() * 4;
    part_tops all = find_tops(args, row, head);
    if (is_merge && ballot(all.done)) {
        return;
    }
    float sum = 0, out[4] = {0, 0, 0, 0};
    int64_t at = row * args.part_row_stride + head * args.part_head_stride + dim;
    for (int first = 0; first < args.parts && all.top > -infinity(); first += 32) {
        float mine = load_weight(args, row, head, first, all.top);
        int count = minimum(args.parts - first, 32);
#pragma unroll 8
        for (int i = 0; i < count; i++) {
            float weight = shuffle(mine, i), x[4];
            // Without a branch, so that loads overlap: what weighs nothing is replaced by the top.
            int part = weight > 0 ? first + i : all.part;
            load_numbers(args.part_out, at + part * args.part_out_stride, args.part_type, x);
            sum += weight;
            for (int d = 0; d < 4; d++) {
                out[d] += weight * x[d];
            }
        }
    }
    store_weighted(args, row, head, all.top, sum, is_merge && ballot(all.nan), out);
}

// What one part adds to that sum, w o / sum(w). Its payload is all that is read of any.
KMLA_DEVICE void weighted_share(const kmla_i_combine_args& args) {
    int head = block_x(), row = block_y(), dim = thread_index() * 4, own = args.share - 1;
    part_tops all = find_tops(args, row, head);
    float sum = 0, own_weight = 0, out[4] = {0, 0, 0, 0};
    for (int first = 0; first < args.parts && all.top > -infinity(); first += 32) {
        float mine = load_weight(args, row, head, first, all.top);
        int count = minimum(args.parts - first, 32);
        for (int i = 0; i < count; i++) {
            float weight = shuffle(mine, i);
            sum += weight;
            own_weight = first + i == own ? weight : own_weight;
        }
    }
    if (own_weight > 0) { // else 0, whatever the payload holds
        int64_t at = row * args.part_row_stride + head * args.part_head_stride + dim;
        load_numbers(args.part_out, at, args.part_type, out);
        for (int d = 0; d < 4; d++) {
            out[d] = own_weight * out[d];
        }
    }
    store_weighted(args, row, head, all.top, sum, false, out);
}

KMLA_KERNEL(kmla_merge, kmla_i_combine_args, KMLA_I_SUPPORT_THREADS, 8) {
    wait_dependency();
    weighted_sum<true>(args);
}

#endif
