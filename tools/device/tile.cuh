// What both readers share: which vectors and tokens a block reads, and where results go.
//
// A block reads one split of one group's tokens for KMLA_TILE query vectors (rows x heads of one
// request, row-major). A group is a request, or with a slot list a row.

#ifdef KMLA_TILE // an image holds one reader, or all of the support kernels

#ifdef KMLA_HOPPER
constexpr bool kHopper = true;
#else
constexpr bool kHopper = false;
#endif
constexpr int kTile = KMLA_TILE;
constexpr int kColumns = kTile / 8; // N steps of a tile
constexpr bool kPacked = KMLA_KV_FORMAT == KMLA_KV_PACKED;
constexpr bool kE4m3 = KMLA_KV_FORMAT == KMLA_KV_E4M3;
constexpr bool kBf16 = KMLA_KV_FORMAT == KMLA_KV_BF16;
constexpr int kRecordBytes = kPacked ? KMLA_PACKED_BYTES : kE4m3 ? KMLA_E4M3_BYTES : KMLA_BF16_BYTES;
constexpr int kPitch = kPacked ? KMLA_I_PITCH_PACKED
                       : kE4m3 ? KMLA_I_PITCH_E4M3
                               : KMLA_I_PITCH_BF16;
constexpr int kStages = KMLA_STAGES;
constexpr int kResident = KMLA_RESIDENT; // blocks that are to share an SM
constexpr int kWarps = (kHopper ? KMLA_I_HOPPER_THREADS : KMLA_I_READER_THREADS) / 32;
constexpr int kStep = kHopper ? KMLA_I_HOPPER_STEP_TOKENS
                      : kBf16 ? KMLA_I_STEP_TOKENS
                              : KMLA_I_FP8_STEP_TOKENS;
constexpr int kWarpTokens = kStep / kWarps; // of the portable reader's step, for look-ups and copies
constexpr int kGroups = KMLA_LATENT_DIMS / KMLA_GROUP_DIMS;
constexpr int kLanesPerVector = kHopper ? 4 : 8; // that know a vector's range

struct block_place {
    // Where the thread is.
    int lane, warp;
    int row_in_quad, column; // of mma fragments: lane / 4, lane % 4
    int vector, quad;        // the vector of the tile that kLanesPerVector lanes share, which lane
    // What the block reads.
    int group, first_row, rows, vectors; // vectors = rows * heads of the group
    int first_vector;                    // of the tile
    int split;
    bool bulk; // a step's records lie in whole pages of packed records: bulk copies
};

KMLA_DEVICE void find_place(const kmla_i_reader_args& args, block_place& s) {
    unsigned thread = (unsigned)thread_index(); // so that divisions are shifts
    s.lane = (int)(thread % 32);
    s.warp = (int)(thread / 32);
    s.row_in_quad = (int)(thread % 32 / 4);
    s.column = (int)(thread % 4);
    s.vector = (int)(thread / kLanesPerVector);
    s.quad = (int)(thread % kLanesPerVector);
    s.group = block_z();
    s.split = block_y();
    s.first_vector = block_x() * kTile;
    s.first_row = s.group * args.rows_per_group;
    s.rows = args.rows_per_group;
    if (args.ragged) {
        const int32_t* offsets = (const int32_t*)args.row_offsets;
        s.first_row = offsets[s.group];
        s.rows = offsets[s.group + 1] - s.first_row;
    }
    s.vectors = s.rows * args.heads;
    s.bulk = !args.slot_list && args.page_tokens % KMLA_I_STEP_TOKENS == 0;
}

// ---- the first bytes of shared memory: small things

// The tile's tokens: the union of its vectors' ranges, and their intersection, where every vector
// sees every token.
struct tile_bounds {
    int begin, end, full_begin, full_end;
};
// What is needed once a step or at the end, and so is not worth registers.
struct tile_facts : tile_bounds {
    int first_row, vectors, unused[2]; // as in block_place
};
// What this split reads of a vector's tokens. `whole`: all of them.
struct vector_range {
    int begin, end, whole, unused;
};

constexpr int kMaskBytes = kHopper ? 4 : 16; // of a stage: which of its tokens exist
constexpr int kMasksAt = (8 * kStages + 15) / 16 * 16;
constexpr int kFactsAt = (kMasksAt + kStages * kMaskBytes + 15) / 16 * 16;
constexpr int kRangesAt = kHopper ? KMLA_I_HOPPER_MISC_BYTES : KMLA_I_MISC_BYTES;
constexpr int kFactorsAt = kRangesAt + kTile * 16;
constexpr int kTargetsAt = kFactorsAt + kTile * 4;
constexpr int kSmallBytes = kTargetsAt + kTile * 8;
static_assert(kFactsAt + (int)sizeof(tile_facts) <= kRangesAt, "barriers, masks and facts fit");
static_assert(sizeof(vector_range) == 16, "one load");

KMLA_DEVICE uint64_t* arrival_of(int stage) { return (uint64_t*)shared_memory() + stage % kStages; }
KMLA_DEVICE tile_facts& bounds() { return *(tile_facts*)(shared_memory() + kFactsAt); }
KMLA_DEVICE vector_range& range_of(int n) {
    return ((vector_range*)(shared_memory() + kRangesAt))[n];
}
// What a vector's accumulators times: to rescale them, in the end to make them results.
KMLA_DEVICE float* factors() { return (float*)(shared_memory() + kFactorsAt); }
// Where each vector's result goes: the address of its first element, + 1 if they are fp32 and not
// BF16; 0: nowhere.
KMLA_DEVICE uint64_t* targets() { return (uint64_t*)(shared_memory() + kTargetsAt); }
KMLA_DEVICE uint64_t target_of(uint64_t base, int64_t element, int type) {
    return base + (uint64_t)(element * (type == KMLA_FP32 ? 4 : 2)) + (type == KMLA_FP32);
}

#ifndef KMLA_HOPPER
// A bit a token of a step: it exists. Word w is of warp w's tokens.
typedef uint16_t warp_mask;
KMLA_DEVICE warp_mask* token_masks_of(int step) {
    return (warp_mask*)(shared_memory() + kMasksAt) + step % kStages * kWarps;
}

// Of the kWarpTokens tokens from `token` on, those in [first, last).
KMLA_DEVICE warp_mask mask_of_tokens(int token, int first, int last) {
    const uint32_t all = (1u << kWarpTokens) - 1;
    if (last <= token || first >= token + kWarpTokens) {
        return 0;
    }
    uint32_t from_first = all << maximum(first - token, 0);
    uint32_t to_last = all >> maximum(token + kWarpTokens - last, 0);
    return (warp_mask)(from_first & to_last & all);
}

// All tokens of the step exist.
KMLA_DEVICE bool all_exist(const warp_mask* masks) {
    const uint32_t all = ((1u << kWarpTokens) - 1) * 0x10001u;
    word4 m = *(const word4*)masks;
    return (m.x & m.y & m.z & m.w) == all;
}
#endif

// ---- ranges

KMLA_DEVICE tile_bounds join(tile_bounds a, tile_bounds b) {
    return tile_bounds{minimum(a.begin, b.begin), maximum(a.end, b.end),
                       maximum(a.full_begin, b.full_begin), minimum(a.full_end, b.full_end)};
}

// Of the lanes whose numbers differ in bits from `least` on.
KMLA_DEVICE tile_bounds join_lanes(tile_bounds mine, int least) {
    for (int mask = 16; mask >= least; mask /= 2) {
        tile_bounds other = {(int)shuffle_xor((uint32_t)mine.begin, mask),
                             (int)shuffle_xor((uint32_t)mine.end, mask),
                             (int)shuffle_xor((uint32_t)mine.full_begin, mask),
                             (int)shuffle_xor((uint32_t)mine.full_end, mask)};
        mine = join(mine, other);
    }
    return mine;
}

KMLA_DEVICE int vector_length(const kmla_i_reader_args& args, const block_place& s, int n) {
    int vector = s.first_vector + n;
    bool exists = n < kTile && vector < s.vectors;
    return exists ? row_length(args, s.group, s.first_row + vector / args.heads) : 0;
}

// The range of the tile's vector n, of a row of that length; `bounds` are those of a tile of it alone,
// or of nothing.
KMLA_DEVICE vector_range find_range(const kmla_i_reader_args& args, const block_place& s, int n,
                                    int length, tile_bounds& bounds) {
    int vector = s.first_vector + n;
    vector_range range = {0, 0, 0, 0};
    bounds = tile_bounds{0x7FFFFFFF, 0, 0, 0x7FFFFFFF};
    if (n < kTile && vector < s.vectors) {
        int i = vector / args.heads;
        token_range row = row_range(args, length, s.group, i, s.rows);
        token_range part = split_range(args, row, s.split);
        range.begin = part.begin;
        range.end = part.end;
        range.whole = part.begin == row.begin && part.end == row.end;
        bounds.full_begin = range.begin;
        bounds.full_end = range.end;
        if (range.begin < range.end) {
            bounds.begin = range.begin;
            bounds.end = range.end;
        }
    }
    return range;
}

// Finds the range of each vector, and the tile's bounds. A block barrier must follow. `scratch`: shared
// memory of 16 bytes a warp.
KMLA_DEVICE void find_ranges(const kmla_i_reader_args& args, const block_place& s, void* scratch) {
    tile_bounds mine;
    vector_range range =
        find_range(args, s, s.vector, vector_length(args, s, s.vector), mine);
    if (s.vector < kTile && s.quad == 0) {
        range_of(s.vector) = range;
    }
    mine = join_lanes(mine, kLanesPerVector);
    tile_bounds* of_warp = (tile_bounds*)scratch;
    if (s.lane == 0) {
        of_warp[s.warp] = mine;
    }
    sync_block();
    if (thread_index() == 0) {
        for (int w = 1; w < kWarps; w++) {
            mine = join(mine, of_warp[w]);
        }
        (tile_bounds&)bounds() = mine;
        bounds().first_row = s.first_row;
        bounds().vectors = s.vectors;
    }
}

// ---- results

// Index of a partial: [S][R][H].
KMLA_DEVICE int64_t part_index(const kmla_i_reader_args& args, int split, int64_t row, int head) {
    return (split * (int64_t)args.rows + row) * args.heads + head;
}

// `final`: this is the row's result, not a part of it. Its partial's lse is then +inf, which tells
// the merge so.
KMLA_DEVICE void store_lse(const kmla_i_reader_args& args, int split, int64_t row, int head,
                           float lse, bool final) {
    if (args.splits > 1) {
        float part_lse = final ? infinity() : lse;
        ((float*)args.part_lse)[part_index(args, split, row, head)] = part_lse;
    }
    if (final && args.lse) {
        ((float*)args.lse)[row * args.lse_row_stride + head * args.lse_head_stride] = lse;
    }
}

// For store_results: where vector n's result goes if its split finds tokens of it. `first_row` and
// `vectors` as in block_place.
KMLA_DEVICE void place_vector(const kmla_i_reader_args& args, int n, int first_row, int vectors) {
    int vector = block_x() * kTile + n;
    if (vector >= vectors) {
        targets()[n] = 0;
        return;
    }
    int64_t row = first_row + vector / args.heads;
    int head = vector % args.heads;
    bool final = args.splits == 1 || range_of(n).whole;
    targets()[n] =
        final ? target_of(args.out, row * args.out_row_stride + head * args.out_head_stride,
                          args.out_type)
              : target_of(args.part_out, part_index(args, block_y(), row, head) * KMLA_LATENT_DIMS,
                          args.partial_type);
}

// For store_results: what vector n's accumulators times, `scale` of what they lack over `sum`. One
// without tokens gets zeros as its output, but no partial: its weight is 0.
KMLA_DEVICE void weigh_vector(const kmla_i_reader_args& args, int n, float sum, float scale) {
    bool empty = sum == 0;
    factors()[n] = empty ? 0 : divide(scale, sum);
    if (empty && args.splits > 1) {
        targets()[n] = 0;
    }
}

// Stores the lse of vector n; `sum` is of exp2(score - reference).
KMLA_DEVICE void store_vector_lse(const kmla_i_reader_args& args, int n, float sum,
                                  float reference) {
    const float ln_2 = 0.693147181f;
    int vector = block_x() * kTile + n;
    bool empty = sum == 0;
    bool final = args.splits == 1 || (!empty && range_of(n).whole);
    float lse = empty ? -infinity() : (reference + log2_fast(sum)) * ln_2;
    if (vector < bounds().vectors) {
        store_lse(args, block_y(), bounds().first_row + vector / args.heads, vector % args.heads,
                  lse, final);
    }
}

KMLA_DEVICE void finish_vector(const kmla_i_reader_args& args, int n, float sum, float reference,
                               float scale) {
    place_vector(args, n, bounds().first_row, bounds().vectors);
    weigh_vector(args, n, sum, scale);
    store_vector_lse(args, n, sum, reference);
}

// Eight neighbouring dims of one vector, from `dim` on.
KMLA_DEVICE void store_out(uint64_t target, int dim, const float (&x)[8]) {
    if (target & 1) {
        word4* to = (word4*)(target - 1 + 4 * (uint32_t)dim);
        to[0] = word4{float_bits(x[0]), float_bits(x[1]), float_bits(x[2]), float_bits(x[3])};
        to[1] = word4{float_bits(x[4]), float_bits(x[5]), float_bits(x[6]), float_bits(x[7])};
    } else if (target) {
        *(word4*)(target + 2 * (uint32_t)dim) = word4{pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]),
                                                      pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7])};
    }
}

// `out`: O^T of the warp's 64 dims; tile m has dims 8 * row_in_quad + 2m and + 2m + 1.
KMLA_DEVICE void store_results(const kmla_i_reader_args& args, const block_place& s,
                               const float (&out)[4][kColumns * 4]) {
    int dim = 64 * s.warp + 8 * s.row_in_quad;
#pragma unroll
    for (int j = 0; j < kColumns; j++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float x[8], factor = factors()[8 * j + 2 * s.column + i];
#pragma unroll
            for (int m = 0; m < 4; m++) {
                x[2 * m] = factor == 0 ? 0 : out[m][4 * j + i] * factor;
                x[2 * m + 1] = factor == 0 ? 0 : out[m][4 * j + 2 + i] * factor;
            }
            store_out(targets()[8 * j + 2 * s.column + i], dim, x);
        }
    }
}

// Rows behind the last request of a ragged batch: no tokens.
KMLA_DEVICE void clear_dead_rows(const kmla_i_reader_args& args) {
    int first = ((const int32_t*)args.row_offsets)[args.groups];
    for (int64_t row = first + block_x(); row < args.rows; row += grid_x()) {
        for (int head = 0; head < args.heads; head++) {
            const float zeros[8] = {0, 0, 0, 0, 0, 0, 0, 0};
            int dim = 8 * thread_index();
            if (args.splits == 1 && dim < KMLA_LATENT_DIMS) {
                store_out(target_of(args.out, row * args.out_row_stride + head * args.out_head_stride,
                                    args.out_type),
                          dim, zeros);
            }
            if (dim == 0) {
                store_lse(args, block_y(), row, head, -infinity(), args.splits == 1);
            }
        }
    }
}

#endif
