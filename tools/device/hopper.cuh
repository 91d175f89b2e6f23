// The Hopper reader: sm_90a, wgmma. FP8 KV; BF16 KV is the portable reader's.
//
// As in the portable reader tokens are the M side of S^T = K q^T, latent dims that of O^T = V^T P^T,
// and A comes from registers, converted from raw bytes. B, the query and the weights, lies in shared
// memory. A step is 128 tokens: each of two warpgroups takes 64 of them through QK and softmax,
// then 256 of the 512 dims through PV over all 128. Scores never leave registers.
//
// Weights are computed with the references that are there; a vote says whether some vector has
// outgrown its own, and only then maxima are taken and the step's weights computed again. A vector's
// value depends on its own scores alone.

#if defined(KMLA_TILE) && defined(KMLA_HOPPER)

constexpr int kBlocksOf64 = KMLA_QUERY_DIMS / 64; // of dims: 128 swizzled bytes a vector each
constexpr int kGroupSteps = KMLA_GROUP_DIMS / 16; // k16 steps of a scale's dims
constexpr int kRopeSteps = KMLA_ROPE_DIMS / 16;
constexpr int kBatchSteps = 4; // of QK: converted while the batch before is multiplied
constexpr int kBatches = KMLA_LATENT_DIMS / 16 / kBatchSteps;
constexpr int kRunTokens = KMLA_I_STEP_TOKENS;    // of one bulk copy: they lie in one page
constexpr int kRuns = kStep / kRunTokens;

// ---- shared memory

constexpr int kStageBytes = kStep * kPitch;
constexpr int kStagesAt = (kSmallBytes + 1023) / 1024 * 1024;
constexpr int kQueryAt = kStagesAt + kStages * kStageBytes;      // f16 [9][tile][64], swizzled
constexpr int kWeightsAt = kQueryAt + kBlocksOf64 * kTile * 128; // f16 [2][tile][64 tokens], swizzled
constexpr int kRatiosAt = kWeightsAt + 2 * kTile * 128;          // f16 [4][128 tokens]
constexpr int kTopsAt = kRatiosAt + (kPacked ? kStep * kGroups * 2 : 0); // fp32 [8 warps][tile][2]
constexpr int kStateAt = kTopsAt + kWarps * kTile * 8;           // fp32 [4][tile]
static_assert(kStateAt + 4 * kTile * 4 == KMLA_SHARED_BYTES, "host and device layouts differ");
static_assert(kStageBytes % 1024 == 0, "swizzled blocks behind the stages stay aligned");

KMLA_DEVICE uint8_t* stage_of(int step) {
    return shared_memory() + kStagesAt + step % kStages * kStageBytes;
}
KMLA_DEVICE uint8_t* query_block(int block) {
    return shared_memory() + kQueryAt + block * kTile * 128;
}
KMLA_DEVICE uint8_t* weight_block(int block) {
    return shared_memory() + kWeightsAt + block * kTile * 128;
}
// 16 bytes of row n of a swizzled block.
KMLA_DEVICE uint8_t* swizzled(uint8_t* block, int n, int chunk) {
    return block + n * 128 + ((chunk ^ (n & 7)) * 16);
}
KMLA_DEVICE uint16_t* ratios_of(int group) {
    return (uint16_t*)(shared_memory() + kRatiosAt) + group * kStep;
}
KMLA_DEVICE float* tops_of(int warp) { return (float*)(shared_memory() + kTopsAt) + warp * kTile; }
// Of each vector, log2 units: the scale of its scores; the references as in the portable reader, but
// a vector that has seen no token yet has kNoReference, which every score outgrows.
KMLA_DEVICE float* score_scales() { return (float*)(shared_memory() + kStateAt); }
KMLA_DEVICE float* sum_references() { return score_scales() + kTile; }
KMLA_DEVICE float* weight_references() { return score_scales() + 2 * kTile; }
KMLA_DEVICE float* sum_factors() { return score_scales() + 3 * kTile; }

constexpr float kNoReference = -3.40282347e38f;

typedef float accumulators[kColumns * 4]; // of 16 rows a warp x the tile

struct reader_state : block_place {
    int half, tokens;           // warpgroup; first of the warp's 16 tokens of a step
    accumulators out[4];        // O^T, as in store_results
    float sum[kColumns][2];     // of the thread's two tokens' weights, by vector
};

// ---- the query: 8 lanes a vector, 16 dims of each 128 a lane

KMLA_DEVICE void codes_to_bf16(const word4& codes, float scale, uint32_t (&pair)[8]) {
    uint32_t word[4] = {codes.x, codes.y, codes.z, codes.w};
    for (int i = 0; i < 8; i++) {
        uint32_t two = word[i / 2] >> (16 * (i % 2));
        pair[i] = pack_bf16(e4m3_to_float(two & 0xFF) * scale, e4m3_to_float(two >> 8 & 0xFF) * scale);
    }
}

KMLA_DEVICE void load_bf16(uint64_t at, uint32_t (&pair)[8]) {
    word4 low = ((const word4*)at)[0], high = ((const word4*)at)[1];
    pair[0] = low.x, pair[1] = low.y, pair[2] = low.z, pair[3] = low.w;
    pair[4] = high.x, pair[5] = high.y, pair[6] = high.z, pair[7] = high.w;
}

// Dims 16 * block .. + 15 of a query record, exactly, as BF16. An E4M3 query's one scale is in
// score_scale.
KMLA_DEVICE void load_query_block(const kmla_i_reader_args& args, uint64_t record, int block,
                                  uint32_t (&pair)[8]) {
    const int rope = KMLA_LATENT_DIMS / 16;
    if (args.query_format == KMLA_QUERY_BF16) {
        load_bf16(record + 32 * block, pair);
    } else if (args.query_format == KMLA_QUERY_PACKED && block >= rope) {
        load_bf16(record + KMLA_PACKED_ROPE_OFFSET + 32 * (block - rope), pair);
    } else {
        float scale = args.query_format == KMLA_QUERY_PACKED
                          ? ((const float*)(record + KMLA_PACKED_SCALE_OFFSET))[block / kGroupSteps]
                          : 1.0f;
        codes_to_bf16(*(const word4*)(record + 16 * block), scale, pair);
    }
}

KMLA_DEVICE float lane_amax(const uint32_t (&pair)[8], float amax) {
    for (int i = 0; i < 8; i++) {
        uint32_t magnitude = pair[i] & 0x7FFF7FFFu;
        amax = maximum(amax, maximum(bf16_low(magnitude), bf16_high(magnitude)));
    }
    return amax;
}

// Over the 8 lanes of a vector.
KMLA_DEVICE float vector_amax(float amax) {
    amax = maximum(amax, shuffle_xor(amax, 1));
    amax = maximum(amax, shuffle_xor(amax, 2));
    return maximum(amax, shuffle_xor(amax, 4));
}

// What the packed query writer would store of the lane's dims of a group, read back.
KMLA_DEVICE void round_to_packed(uint32_t (&pair)[8]) {
    float amax = vector_amax(lane_amax(pair, 0));
    const float largest = bits_float(0x7F7FFFFFu);
    float scale = packed_query_scale(amax > largest ? largest : amax);
    float inverse = power_of_two_inverse(scale);
    for (int i = 0; i < 8; i++) {
        pair[i] = pack_bf16(round_to_e4m3(bf16_low(pair[i]) * inverse) * scale,
                            round_to_e4m3(bf16_high(pair[i]) * inverse) * scale);
    }
}

constexpr int kQueryParts = (KMLA_QUERY_DIMS / 16 + 7) / 8; // of 16 dims a lane

// One lane's 16 dims into the swizzled block, normalised as in the portable reader. k order is 0 1
// 4 5 8 9 12 13, 2 3 6 7 ..: that of A fragments read as 4-byte words.
KMLA_DEVICE void store_query_block(int n, int block, const uint32_t (&pair)[8], float factor) {
    bool to_f16 = kE4m3 || block < KMLA_LATENT_DIMS / 16; // packed rope is BF16, like its KV
    uint32_t out[8];
    for (int w = 0; w < 8; w++) {
        float low = bf16_low(pair[w]) * factor, high = bf16_high(pair[w]) * factor;
        out[w] = to_f16 ? pack_f16(low, high) : pack_bf16(low, high);
    }
    uint8_t* rows = query_block(block / 4);
    *(word4*)swizzled(rows, n, block % 4 * 2) = word4{out[0], out[2], out[4], out[6]};
    *(word4*)swizzled(rows, n, block % 4 * 2 + 1) = word4{out[1], out[3], out[5], out[7]};
}

// A lane's part i of a vector: loaded, and in e4m3 mode rounded.
KMLA_DEVICE void load_query_part(const kmla_i_reader_args& args, uint64_t record, bool exists, int i,
                                 int part, uint32_t (&pair)[8]) {
    int block = 8 * i + part;
    for (int w = 0; w < 8; w++) {
        pair[w] = 0;
    }
    if (exists && block < KMLA_QUERY_DIMS / 16) {
        load_query_block(args, record, block, pair);
    }
    if (args.e4m3_query && args.query_format == KMLA_QUERY_BF16 && i < kGroups) {
        round_to_packed(pair);
    }
}

KMLA_DEVICE void stage_vector(const kmla_i_reader_args& args, const reader_state& s, int n) {
    int vector = s.first_vector + n, part = s.lane % 8;
    bool exists = vector < s.vectors;
    uint64_t record = args.query + (s.first_row + vector / args.heads) * args.query_row_stride +
                      vector % args.heads * args.query_head_stride;
    float amax = 0, factor;
    uint32_t kept[kQueryParts][8];
    bool plain = args.query_format == KMLA_QUERY_BF16 && !args.e4m3_query;
    if (plain) { // the usual case: all loads at once
#pragma unroll
        for (int i = 0; i < kQueryParts; i++) {
            bool inside = exists && 8 * i + part < KMLA_QUERY_DIMS / 16;
            load_bf16(inside ? record + 32 * (8 * i + part) : args.query, kept[i]);
            for (int w = 0; w < 8; w++) {
                kept[i][w] = inside ? kept[i][w] : 0;
            }
        }
#pragma unroll
        for (int i = 0; i < kQueryParts; i++) {
            amax = lane_amax(kept[i], amax);
        }
    } else {
#pragma unroll 1
        for (int i = 0; i < kQueryParts; i++) {
            uint32_t pair[8];
            load_query_part(args, record, exists, i, part, pair);
            amax = lane_amax(pair, amax);
        }
    }
    amax = vector_amax(amax);
    int exponent = minimum(maximum((int)(float_bits(amax) >> 23), 64), 254);
    factor = bits_float((uint32_t)(127 + 14 + 127 - exponent) << 23);
    if (plain) {
#pragma unroll
        for (int i = 0; i < kQueryParts; i++) {
            if (8 * i + part < KMLA_QUERY_DIMS / 16) {
                store_query_block(n, 8 * i + part, kept[i], factor);
            }
        }
    } else {
#pragma unroll 1
        for (int i = 0; i < kQueryParts; i++) {
            uint32_t pair[8];
            load_query_part(args, record, exists, i, part, pair);
            if (8 * i + part < KMLA_QUERY_DIMS / 16) {
                store_query_block(n, 8 * i + part, pair, factor);
            }
        }
    }
    if (part == 0) {
        score_scales()[n] = args.score_scale * bits_float((uint32_t)(exponent - 14) << 23);
        sum_references()[n] = kNoReference;
        weight_references()[n] = kPacked ? kNoReference : 0;
    }
}

KMLA_DEVICE void stage_query(const kmla_i_reader_args& args, const reader_state& s) {
#pragma unroll 1
    for (int n = thread_index() / 8; n < kTile; n += KMLA_I_READER_THREADS / 8) {
        stage_vector(args, s, n);
    }
    fence_async_reads();
}

// ---- KV to shared memory

KMLA_DEVICE bool copies_in_bulk(const reader_state& s) { return kPitch == kRecordBytes && s.bulk; }
KMLA_DEVICE bool is_copier(const reader_state& s) { return s.warp == 0; }

// The entry of the token that this lane answers for, a step ahead of the copy that needs it.
KMLA_DEVICE int look_up(const kmla_i_reader_args& args, const reader_state& s, int token) {
    if (copies_in_bulk(s)) { // lane i: the run i, if any of its tokens is wanted
        token += s.lane % kRuns * kRunTokens;
        bool wanted = token < bounds().end && token + kRunTokens > bounds().begin;
        return wanted && is_copier(s) ? table_entry(args, s.group, token) : -1;
    }
    token += s.warp * kWarpTokens + s.lane % kWarpTokens;
    bool wanted = token >= bounds().begin && token < bounds().end;
    return wanted ? table_entry(args, s.group, token) : -1;
}

KMLA_DEVICE void start_bulk_copies(const kmla_i_reader_args& args, const reader_state& s, int step,
                                   int token, int entry) {
    int run = s.lane % kRuns, at = token + run * kRunTokens;
    int first = minimum(maximum(bounds().begin - at, 0), kRunTokens);
    int last = entry < 0 ? first : maximum(minimum(bounds().end - at, kRunTokens), first);
    // Warp w's 16 tokens are half a run.
    uint64_t both = shuffle((uint64_t)((uint32_t)first << 16 | (uint32_t)last),
                            s.lane * kWarpTokens / kRunTokens % kRuns);
    if (s.lane < kWarps) {
        token_masks_of(step)[s.lane] = mask_of_tokens(s.lane * kWarpTokens % kRunTokens,
                                                      (int)(both >> 16), (int)(both & 0xFFFF));
    }
    if (s.lane < kRuns) {
        uint32_t bytes = (uint32_t)((last - first) * kRecordBytes);
        barrier_arrive_expect(arrival_of(step), bytes);
        if (bytes) {
            uint64_t from = record_address(args, entry, at + first, kRecordBytes);
            copy_bulk(stage_of(step) + (run * kRunTokens + first) * kPitch, (const void*)from,
                      bytes, arrival_of(step));
        }
    }
}

KMLA_DEVICE void start_record_copies(const kmla_i_reader_args& args, const reader_state& s,
                                     int step, int token, int entry) {
    uint32_t exists = ballot(entry >= 0) & ((1u << kWarpTokens) - 1);
    uint64_t address = record_address(args, entry, token + s.warp * kWarpTokens + s.lane % kWarpTokens,
                                      kRecordBytes);
    address = entry >= 0 ? address : 0;
    if (s.lane == 0) {
        token_masks_of(step)[s.warp] = (warp_mask)exists;
    }
    uint8_t* stage = stage_of(step) + s.warp * kWarpTokens * kPitch;
#pragma unroll 1
    for (int i = 0; i < kWarpTokens; i++) {
        uint64_t record = shuffle(address, i);
        for (int at = 16 * s.lane; at < kRecordBytes; at += 16 * 32) {
            copy_async_16(stage + i * kPitch + at, (const void*)((record ? record : args.kv) + at),
                          record != 0);
        }
    }
}

// Starts the copy of the step that begins at `token` and looks the next one up.
KMLA_DEVICE int start_copy(const kmla_i_reader_args& args, const reader_state& s, int step,
                           int token, int entry) {
    if (!copies_in_bulk(s)) {
        start_record_copies(args, s, step, token, entry);
    } else if (is_copier(s)) {
        start_bulk_copies(args, s, step, token, entry);
    }
    copy_async_commit();
    return look_up(args, s, token + kStep);
}

KMLA_DEVICE void wait_for_copy(const reader_state& s, int step) {
    if (copies_in_bulk(s)) {
        barrier_wait(arrival_of(step), (uint32_t)(step / kStages) & 1);
    } else {
        copy_async_wait<0>();
    }
}

// ---- QK: scores of the warpgroup's 64 tokens

KMLA_DEVICE uint64_t query_descriptor(int block, int k) {
    return matrix_descriptor(query_block(0)) + (uint64_t)(block * kTile * 128 / 16 + k % 4 * 2);
}

// Raw words of a batch of k16 steps: of the thread's two tokens.
typedef uint32_t raw_batch[kBatchSteps][2];
typedef uint32_t fragment_batch[kBatchSteps][4];

KMLA_DEVICE void load_codes(const uint8_t* record, int batch, raw_batch& raw) {
#pragma unroll
    for (int k = 0; k < kBatchSteps; k++) {
        const uint8_t* at = record + 16 * (batch * kBatchSteps + k);
        raw[k][0] = *(const uint32_t*)at;
        raw[k][1] = *(const uint32_t*)(at + 8 * kPitch);
    }
}

KMLA_DEVICE void codes_to_fragment(const uint32_t (&raw)[2], uint32_t (&a)[4]) {
    uint32_t low[2], high[2];
    e4m3x4_to_f16(raw[0], low);
    e4m3x4_to_f16(raw[1], high);
    a[0] = low[0], a[1] = high[0], a[2] = low[1], a[3] = high[1];
}

KMLA_DEVICE void multiply_rope(const uint8_t* record, int column, accumulators& score) {
    uint32_t a[kRopeSteps][4];
#pragma unroll
    for (int k = 0; k < kRopeSteps; k++) {
        if (kPacked) {
            const uint32_t* low =
                (const uint32_t*)(record + KMLA_PACKED_ROPE_OFFSET + 2 * (16 * k + 4 * column));
            const uint32_t* high = low + 8 * kPitch / 4;
            a[k][0] = low[0], a[k][1] = high[0], a[k][2] = low[1], a[k][3] = high[1];
        } else {
            const uint8_t* at = record + KMLA_LATENT_DIMS + 16 * k + 4 * column;
            uint32_t raw[2] = {*(const uint32_t*)at, *(const uint32_t*)(at + 8 * kPitch)};
            codes_to_fragment(raw, a[k]);
        }
    }
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kRopeSteps; k++) {
        if (kPacked) {
            wgmma_bf16(score, a[k], query_descriptor(kBlocksOf64 - 1, k), true);
        } else {
            wgmma_f16(score, a[k], query_descriptor(kBlocksOf64 - 1, k), true);
        }
    }
    wgmma_commit();
    wgmma_wait<0>();
}

KMLA_DEVICE void codes_to_fragments(const raw_batch& raw, fragment_batch& a) {
#pragma unroll
    for (int k = 0; k < kBatchSteps; k++) {
        codes_to_fragment(raw[k], a[k]);
    }
}

// scales: of the thread's two tokens by group.
KMLA_DEVICE void multiply_keys(const reader_state& s, const uint8_t* stage,
                               const float (&scales)[2][kGroups], accumulators& score) {
    const int per_group = kBatches / kGroups;
    const uint8_t* record = stage + (s.tokens + s.row_in_quad) * kPitch;
    accumulators sum_of_group;
    raw_batch raw;
    fragment_batch a[2];
    load_codes(record + 4 * s.column, 0, raw);
    codes_to_fragments(raw, a[0]);
    load_codes(record + 4 * s.column, 1, raw);
#pragma unroll
    for (int batch = 0; batch < kBatches; batch++) {
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kBatchSteps; k++) {
            uint64_t b = query_descriptor(batch, k);
            if (kPacked) {
                wgmma_f16(sum_of_group, a[batch % 2][k], b, batch % per_group + k > 0);
            } else {
                wgmma_f16(score, a[batch % 2][k], b, batch + k > 0);
            }
        }
        wgmma_commit();
        if (batch + 1 < kBatches) {
            wgmma_wait<1>(); // the batch before is done with its registers
            codes_to_fragments(raw, a[(batch + 1) % 2]);
        }
        if (batch + 2 < kBatches) {
            load_codes(record + 4 * s.column, batch + 2, raw);
        }
        if (kPacked && batch % per_group == per_group - 1) {
            int g = batch / per_group;
            wgmma_wait<0>();
            for (int i = 0; i < kColumns * 4; i++) {
                float scaled = sum_of_group[i] * scales[i / 2 % 2][g];
                score[i] = g == 0 ? scaled : score[i] + scaled;
            }
        }
    }
    multiply_rope(record, s.column, score);
}

// ---- scales of packed records: as in the portable reader, 2^exponent goes with the score, the rest
// here with V

KMLA_DEVICE void load_scales(const reader_state& s, const uint8_t* stage, float (&scales)[2][kGroups],
                             float (&exponent)[2]) {
    for (int i = 0; i < 2; i++) {
        int token = s.tokens + s.row_in_quad + 8 * i;
        exponent[i] = 0;
        if (!kPacked) {
            continue;
        }
        word4 bits = *(const word4*)(stage + token * kPitch + KMLA_PACKED_SCALE_OFFSET);
        uint32_t of_group[kGroups] = {bits.x, bits.y, bits.z, bits.w}, largest = 0;
        for (int g = 0; g < kGroups; g++) {
            scales[i][g] = bits_float(of_group[g]);
            uint32_t magnitude = of_group[g] & 0x7FFFFFFFu;
            of_group[g] = magnitude < 0x7F800000u ? of_group[g] : 0;
            largest = maximum(largest, magnitude < 0x7F800000u ? magnitude : 0);
        }
        uint32_t power = (largest + 0x007FFFFFu) & 0x7F800000u; // 2^e
        power = power < (253u << 23) ? power : 253u << 23;      // so that its inverse is normal
        exponent[i] = (float)((int)(power >> 23) - 127);
        // The four lanes of a token store a group each.
        uint32_t mine = s.column == 0   ? of_group[0]
                        : s.column == 1 ? of_group[1]
                        : s.column == 2 ? of_group[2]
                                        : of_group[3];
        float ratio = bits_float(mine) * bits_float((254u << 23) - power);
        ratios_of(s.column)[token] = (uint16_t)pack_f16(ratio, 0.0f);
    }
}

// ---- softmax, in registers: the thread has two tokens and every fourth pair of vectors

// What a vector does not see has the score -inf.
KMLA_DEVICE void mask_scores(const reader_state& s, int first_token, const warp_mask* masks,
                             accumulators& score) {
    int token = first_token + s.tokens + s.row_in_quad;
    uint32_t mask = (uint32_t)masks[s.warp] >> s.row_in_quad;
#pragma unroll
    for (int j = 0; j < kColumns; j++) {
        for (int i = 0; i < 2; i++) {
            vector_range range = range_of(8 * j + 2 * s.column + i);
            bool low = token >= range.begin && token < range.end && (mask & 1);
            bool high = token + 8 >= range.begin && token + 8 < range.end && (mask >> 8 & 1);
            score[4 * j + i] = low ? score[4 * j + i] : -infinity();
            score[4 * j + 2 + i] = high ? score[4 * j + 2 + i] : -infinity();
        }
    }
}

// The entries of the thread's two vectors of column j.
struct of_two {
    float value[2];
};
KMLA_DEVICE of_two load_two(const reader_state& s, const float* of_vectors, int j) {
    word2 bits = *(const word2*)(of_vectors + 8 * j + 2 * s.column);
    return of_two{{bits_float(bits.x), bits_float(bits.y)}};
}

// Weights by the references as they are, into shared memory, and their sums. Returns whether some
// vector has outgrown its reference, which makes both worthless.
KMLA_DEVICE bool store_weights(const reader_state& s, const accumulators& score,
                               const float (&exponent)[2], float (&sum)[kColumns][2]) {
    float top = -infinity(); // above the references, of all
    uint8_t* block = weight_block(s.half);
    int chunk = s.tokens % 64 / 8 + s.lane / 8 % 2;
#pragma unroll
    for (int j = 0; j < kColumns; j++) {
        of_two scale = load_two(s, score_scales(), j), reference = load_two(s, sum_references(), j);
        of_two above = load_two(s, weight_references(), j);
        float weight[4];
        for (int i = 0; i < 2; i++) {
            // Rounded before the difference, as the reference was: huge scores cancel exactly.
            float low = score[4 * j + i] * scale.value[i] - reference.value[i];
            float high = score[4 * j + 2 + i] * scale.value[i] - reference.value[i];
            float p_low = exp2_fast(low), p_high = exp2_fast(high);
            top = maximum(top, maximum(low, high));
            sum[j][i] = p_low + p_high;
            if (kPacked) {
                low = low + exponent[0] - above.value[i];
                high = high + exponent[1] - above.value[i];
                top = maximum(top, maximum(low, high));
                p_low = exp2_fast(low);
                p_high = exp2_fast(high);
            }
            weight[i] = p_low;
            weight[2 + i] = p_high;
        }
        store_matrix_x2_transposed(swizzled(block, 8 * j + s.lane % 8, chunk),
                                   pack_f16(weight[0], weight[1]), pack_f16(weight[2], weight[3]));
    }
    return top > KMLA_I_REFERENCE_GROWTH;
}

// Largest of the warp's 16 tokens, of one vector a lane pair.
KMLA_DEVICE float top_of_warp(float low, float high) {
    float top = maximum(low, high);
    top = maximum(top, shuffle_xor(top, 4));
    top = maximum(top, shuffle_xor(top, 8));
    return maximum(top, shuffle_xor(top, 16));
}

// A first reference for vectors that have none, from the step's first 16 tokens: good enough in most
// cases to spare the whole tile's maxima. For the first warp; a block barrier must follow.
KMLA_DEVICE void guess_references(const reader_state& s, const accumulators& score,
                                  const float (&exponent)[2]) {
#pragma unroll
    for (int j = 0; j < kColumns; j++) {
        of_two scale = load_two(s, score_scales(), j), reference = load_two(s, sum_references(), j);
        for (int i = 0; i < 2; i++) {
            float low = score[4 * j + i] * scale.value[i];
            float high = score[4 * j + 2 + i] * scale.value[i];
            float guess = top_of_warp(low, high) - KMLA_I_REFERENCE_BELOW;
            float above = 0;
            if (kPacked) {
                above = top_of_warp(low - guess + exponent[0], high - guess + exponent[1]) -
                        KMLA_I_REFERENCE_BELOW;
            }
            bool wanted = reference.value[i] == kNoReference && guess > kNoReference;
            if (wanted && s.row_in_quad == 0) {
                sum_references()[8 * j + 2 * s.column + i] = guess;
                weight_references()[8 * j + 2 * s.column + i] = above;
            }
        }
    }
}

// The tile's maxima of scores or, `with_exponent`, of what weighs V above the sum's reference.
KMLA_DEVICE void store_tops(const reader_state& s, const accumulators& score,
                            const float (&exponent)[2], bool with_exponent) {
#pragma unroll
    for (int j = 0; j < kColumns; j++) {
        of_two scale = load_two(s, score_scales(), j), reference = load_two(s, sum_references(), j);
        for (int i = 0; i < 2; i++) {
            float low = score[4 * j + i] * scale.value[i];
            float high = score[4 * j + 2 + i] * scale.value[i];
            if (with_exponent) {
                low = low - reference.value[i] + exponent[0];
                high = high - reference.value[i] + exponent[1];
            }
            float top = top_of_warp(low, high);
            if (s.row_in_quad == 0) {
                tops_of(s.warp)[8 * j + 2 * s.column + i] = top;
            }
        }
    }
}

KMLA_DEVICE float raised_reference(int n, float reference) {
    float top = -infinity();
    for (int w = 0; w < kWarps; w++) {
        top = maximum(top, tops_of(w)[n]);
    }
    return top > reference + KMLA_I_REFERENCE_GROWTH ? top - KMLA_I_REFERENCE_BELOW : reference;
}

// New references where maxima have outgrown them; factors for what was summed under the old ones.
KMLA_DEVICE void raise_references(const reader_state& s, const accumulators& score,
                                  const float (&exponent)[2]) {
    int n = thread_index();
    store_tops(s, score, exponent, false);
    sync_block();
    if (n < kTile) {
        float old = sum_references()[n], raised = raised_reference(n, old);
        bool same = raised == old;
        float factor = same ? 1.0f : exp2_fast(old - raised);
        sum_factors()[n] = factor;
        factors()[n] = factor;
        if (!same) {
            sum_references()[n] = raised;
            weight_references()[n] -= kPacked ? raised - old : 0;
        }
    }
    if (!kPacked) {
        sync_block();
        return;
    }
    sync_block();
    store_tops(s, score, exponent, true);
    sync_block();
    if (n < kTile) {
        float old = weight_references()[n], raised = raised_reference(n, old);
        factors()[n] = raised == old ? 1.0f : exp2_fast(old - raised);
        weight_references()[n] = raised;
    }
    sync_block();
}

KMLA_DEVICE void rescale(reader_state& s) {
#pragma unroll
    for (int j = 0; j < kColumns; j++) {
        of_two of_sum = load_two(s, sum_factors(), j), factor = load_two(s, factors(), j);
        for (int i = 0; i < 2; i++) {
            s.sum[j][i] *= of_sum.value[i];
            for (int m = 0; m < 4; m++) {
                s.out[m][4 * j + i] *= factor.value[i];
                s.out[m][4 * j + 2 + i] *= factor.value[i];
            }
        }
    }
}

// `fresh`: some vector may have no reference yet.
KMLA_DEVICE void softmax_step(reader_state& s, bool fresh, const accumulators& score,
                              const float (&exponent)[2]) {
    float sum[kColumns][2];
    if (fresh) {
        if (s.warp == 0) {
            guess_references(s, score, exponent);
        }
        sync_block();
    }
    bool grown = store_weights(s, score, exponent, sum);
    fence_async_reads();
    if (sync_block_or(grown)) {
        raise_references(s, score, exponent);
        rescale(s);
        store_weights(s, score, exponent, sum);
        fence_async_reads();
        sync_block();
    }
    for (int j = 0; j < kColumns; j++) {
        s.sum[j][0] += sum[j][0];
        s.sum[j][1] += sum[j][1];
    }
}

// ---- PV

// Raw bytes of a k16 step: 8 dims of tokens 2c, 2c + 1, 2c + 8, 2c + 9.
KMLA_DEVICE void load_values(const uint8_t* at, word2 (&token)[4]) {
    token[0] = *(const word2*)at;
    token[1] = *(const word2*)(at + kPitch);
    token[2] = *(const word2*)(at + 8 * kPitch);
    token[3] = *(const word2*)(at + 9 * kPitch);
}

// To V^T fragments, as in the portable reader, times the tokens' ratios.
template <bool masked>
KMLA_DEVICE void values_to_fragments(const word2 (&token)[4], const uint32_t* ratios,
                                     uint32_t (&a)[4][4]) {
    const uint32_t largest = 0x7BFF7BFFu; // 65504
#pragma unroll
    for (int half = 0; half < 2; half++) {
        word2 even = token[2 * half], odd = token[2 * half + 1];
        uint32_t ratio = kPacked ? ratios[4 * half] : 0;
        uint32_t woven[4] = {
            permute_bytes(even.x, odd.x, 0x5140), permute_bytes(even.x, odd.x, 0x7362),
            permute_bytes(even.y, odd.y, 0x5140), permute_bytes(even.y, odd.y, 0x7362)};
#pragma unroll
        for (int m = 0; m < 4; m++) {
            uint32_t pair[2];
            e4m3x4_to_f16(woven[m], pair);
            for (int i = 0; i < 2; i++) {
                uint32_t value = kPacked ? multiply_f16x2(pair[i], ratio) : pair[i];
                a[m][2 * half + i] = masked ? minimum_f16x2(value, largest) : value;
            }
        }
    }
}

// The first `steps` k16 steps of tokens.
template <bool masked>
KMLA_DEVICE void multiply_values(reader_state& s, const uint8_t* stage, int steps) {
    const uint8_t* records = stage + 2 * s.column * kPitch + 64 * s.warp + 8 * s.row_in_quad;
    const uint32_t* ratios = (const uint32_t*)ratios_of(s.warp / 2) + s.column;
    uint64_t b = matrix_descriptor(weight_block(0));
    word2 token[4];
    uint32_t a[2][4][4];
    load_values(records, token);
#pragma unroll 2
    for (int k = 0; k < steps; k++) {
        values_to_fragments<masked>(token, ratios + 8 * k, a[k % 2]);
        if (k + 1 < steps) {
            load_values(records + 16 * (k + 1) * kPitch, token);
        }
        wgmma_fence();
#pragma unroll
        for (int m = 0; m < 4; m++) {
            wgmma_f16(s.out[m], a[k % 2][m],
                      b + (uint64_t)(k / 4 * kTile * 128 / 16 + k % 4 * 2), true);
        }
        wgmma_commit();
        wgmma_wait<1>(); // the step before is done with its registers
    }
    wgmma_wait<0>();
}

// ---- the block

// Softmax and PV.
template <bool masked>
KMLA_DEVICE void weigh_values(reader_state& s, bool first, int token, int steps,
                              const uint8_t* stage, const warp_mask* masks,
                              const float (&exponent)[2], accumulators& score) {
    if (masked) {
        mask_scores(s, token, masks, score);
    }
    softmax_step(s, first || masked, score, exponent);
    multiply_values<masked>(s, stage, steps);
}

KMLA_DEVICE void read_tokens(const kmla_i_reader_args& args, reader_state& s) {
    int first = bounds().begin / kStep * kStep;
    int steps = maximum(bounds().end - first + kStep - 1, 0) / kStep;
    if (steps == 0) {
        return;
    }
    // Steps of which every vector of the tile sees every token that exists.
    int full_begin = (bounds().full_begin - first + kStep - 1) / kStep;
    int full_end = (bounds().full_end - first) / kStep;
    int entry = look_up(args, s, first);
    entry = start_copy(args, s, 0, first, entry);
    stage_query(args, s);
    for (int step = 0; step < steps; step++) {
        const uint8_t* stage = stage_of(step);
        const warp_mask* masks = token_masks_of(step);
        int token = first + step * kStep;
        accumulators score;
        float scales[2][kGroups], exponent[2];
        wait_for_copy(s, step);
        sync_block(); // this step is here for all, and all are done with the one before
        load_scales(s, stage, scales, exponent);
        multiply_keys(s, stage, scales, score);
        // The second half of the step's tokens may lie behind the end.
        int value_steps = bounds().end - token <= kStep / 2 ? kStep / 32 : kStep / 16;
        if (step + 1 < steps) {
            entry = start_copy(args, s, step + 1, token + kStep, entry);
        }
        if (step >= full_begin && step < full_end && all_exist(masks)) {
            weigh_values<false>(s, step == 0, token, value_steps, stage, masks, exponent, score);
        } else {
            weigh_values<true>(s, step == 0, token, value_steps, stage, masks, exponent, score);
        }
    }
}

// Sums over lanes, then warps ascending.
KMLA_DEVICE void finish_softmax(const kmla_i_reader_args& args, reader_state& s) {
#pragma unroll
    for (int j = 0; j < kColumns; j++) {
        for (int i = 0; i < 2; i++) {
            float sum = s.sum[j][i];
            sum += shuffle_xor(sum, 4);
            sum += shuffle_xor(sum, 8);
            sum += shuffle_xor(sum, 16);
            if (s.row_in_quad == 0) {
                tops_of(s.warp)[8 * j + 2 * s.column + i] = sum;
            }
        }
    }
    sync_block();
    int n = thread_index();
    if (n < kTile) {
        float sum = 0;
        for (int w = 0; w < kWarps; w++) {
            sum += tops_of(w)[n];
        }
        float scale = kPacked ? exp2_wide(weight_references()[n]) : args.kv_scale;
        finish_vector(args, n, sum, sum_references()[n], scale);
    }
}

KMLA_KERNEL(kmla_reader, kmla_i_reader_args, KMLA_I_READER_THREADS, 1) {
    wait_dependency();
    if (block_z() == args.groups) {
        clear_dead_rows(args);
        return;
    }
    reader_state s;
    find_place(args, s);
    if (s.first_vector >= s.vectors) {
        return;
    }
    s.half = s.warp / 4;
    s.tokens = s.warp * kWarpTokens;
#pragma unroll
    for (int j = 0; j < kColumns; j++) {
        s.sum[j][0] = s.sum[j][1] = 0;
        for (int m = 0; m < 4; m++) {
            for (int i = 0; i < 4; i++) {
                s.out[m][4 * j + i] = 0;
            }
        }
    }
    if (thread_index() == 0) {
        for (int stage = 0; stage < kStages; stage++) {
            barrier_init(arrival_of(stage), kRuns);
        }
        barrier_init_fence();
    }
    find_ranges(args, s, tops_of(0));
    sync_block();
    read_tokens(args, s);
    launch_dependents();
    finish_softmax(args, s);
    sync_block();
    store_results(args, s, s.out);
}

#endif
