// Weighted sums by log-sum-exp: the merge of a plan's splits.

#ifndef KMLA_TILE // support kernels

KMLA_DEVICE float load_number(uint64_t base, int64_t index, int type) {
    if (type == KMLA_FP32) {
        return ((const float*)base)[index];
    }
    return bits_float((uint32_t)((const uint16_t*)base)[index] << 16);
}

// Four neighbouring elements as they lie in memory.
KMLA_DEVICE void numbers_of(const word4& fp32, float (&x)[4]) {
    x[0] = bits_float(fp32.x), x[1] = bits_float(fp32.y);
    x[2] = bits_float(fp32.z), x[3] = bits_float(fp32.w);
}
KMLA_DEVICE void numbers_of(const word2& bf16, float (&x)[4]) {
    x[0] = bf16_low(bf16.x), x[1] = bf16_high(bf16.x);
    x[2] = bf16_low(bf16.y), x[3] = bf16_high(bf16.y);
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

struct weighted {
    float sum, out[4]; // of weights; of weights times elements
};

// Adds the parts from `first` on, `count` <= 32 of them; lane i has the weight of part first + i.
// `at` is in elements, of which `four` is four. Eight loads at once: what weighs nothing is
// not read, but replaced by the top, so that there is no branch between them.
template <typename four>
KMLA_DEVICE void add_parts(const kmla_i_combine_args& args, int64_t at, int first, int count,
                           float lane_weight, int top_part, weighted& all) {
    const int at_once = 8;
    const four* from = (const four*)args.part_out + (uint64_t)at / 4;
    const uint64_t stride = (uint64_t)args.part_out_stride / 4;
#pragma unroll 1
    for (int i = 0; i < count; i += at_once) {
        four bits[at_once];
        float weight[at_once], x[4];
#pragma unroll
        for (int k = 0; k < at_once; k++) {
            weight[k] = shuffle(lane_weight, i + k);
            int part = weight[k] > 0 ? first + i + k : top_part;
            bits[k] = from[(uint32_t)part * stride];
        }
#pragma unroll
        for (int k = 0; k < at_once; k++) {
            numbers_of(bits[k], x);
            all.sum += weight[k];
            for (int d = 0; d < 4; d++) {
                all.out[d] += weight[k] * x[d];
            }
        }
    }
}

// Adds the weights of those parts, but elements of one part only: the share's, which part_out is
// of. Where that weighs nothing they are not read, whatever they hold.
KMLA_DEVICE void add_share(const kmla_i_combine_args& args, int64_t at, int first, int count,
                           float lane_weight, weighted& all) {
    for (int i = 0; i < count; i++) {
        float weight = shuffle(lane_weight, i), x[4];
        all.sum += weight;
        if (weight > 0 && first + i == args.share - 1) {
            if (args.part_type == KMLA_FP32) {
                numbers_of(((const word4*)args.part_out)[at / 4], x);
            } else {
                numbers_of(((const word2*)args.part_out)[at / 4], x);
            }
            for (int d = 0; d < 4; d++) {
                all.out[d] = weight * x[d];
            }
        }
    }
}

// out = sum(w o) / sum(w), lse = m + ln(sum w), w = exp(lse - m), m = max lse; parts ascending.
// A part of weight 0 is not read. In the merge a NaN lse makes the vector NaN, and +inf says that
// its split has written the result itself; in the combine both are empty parts, like -inf. One
// block a vector, four dims a thread; each warp finds the weights, a part a lane.
template <bool is_merge, bool is_share>
KMLA_DEVICE void weighted_sum(const kmla_i_combine_args& args) {
    const float log2_e = 1.44269504f, ln_2 = 0.693147181f;
    int head = block_x(), row = block_y(), dim = thread_index() * 4;
    float top = -infinity();
    int top_part = 0;
    bool nan = false, done = false;
#pragma unroll 1
    for (int first = 0; first < args.parts; first += 32) {
        float lse = load_lse(args, row, head, first);
        nan = nan || !(lse == lse);
        done = done || lse == infinity();
        if (lse > top && lse < infinity()) {
            top = lse;
            top_part = first + thread_index() % 32;
        }
    }
    for (int mask = 16; mask > 0; mask /= 2) {
        float other = shuffle_xor(top, mask);
        int other_part = (int)shuffle_xor((uint32_t)top_part, mask);
        if (other > top) {
            top = other;
            top_part = other_part;
        }
    }
    if (is_merge && ballot(done)) {
        return;
    }
    weighted all = {0, {0, 0, 0, 0}};
    int64_t at = row * args.part_row_stride + head * args.part_head_stride + dim;
#pragma unroll 1
    for (int first = 0; first < args.parts && top > -infinity(); first += 32) {
        float lse = load_lse(args, row, head, first);
        bool counts = lse > -infinity() && lse < infinity();
        float weight = counts ? exp2_fast((lse - top) * log2_e) : 0;
        int count = minimum(args.parts - first, 32);
        if (is_share) {
            add_share(args, at, first, count, weight, all);
        } else if (args.part_type == KMLA_FP32) {
            add_parts<word4>(args, at, first, count, weight, top_part, all);
        } else {
            add_parts<word2>(args, at, first, count, weight, top_part, all);
        }
    }
    bool empty = all.sum == 0;
    float lse = empty ? -infinity() : top + log2_fast(all.sum) * ln_2, out[4];
    for (int d = 0; d < 4; d++) {
        out[d] = empty ? 0 : divide(all.out[d], all.sum);
    }
    if (is_merge && ballot(nan)) {
        lse = out[0] = out[1] = out[2] = out[3] = bits_float(0x7FFFFFFF);
    }
    store_numbers(args.out, row * args.out_row_stride + head * args.out_head_stride + dim,
                  args.out_type, out);
    if (args.lse && dim == 0) {
        ((float*)args.lse)[row * args.lse_row_stride + head * args.lse_head_stride] = lse;
    }
}

KMLA_KERNEL(kmla_merge, kmla_i_combine_args, KMLA_I_SUPPORT_THREADS, 6) {
    wait_dependency();
    weighted_sum<true, false>(args);
}

#endif
