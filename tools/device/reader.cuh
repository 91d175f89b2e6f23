// The portable reader: sm_80 and up, mma.sync.
//
// Operands are swapped: tokens are the M side of S^T = K q^T, latent dims the M side of
// O^T = V^T P^T, vectors the N side, whose step is 8. So each record is converted once a block, from
// raw bytes straight into fragments, and 99 heads pad to 104, not to 128.
//
// A step is 32 tokens. Its warps are 2 halves of the tokens x 4 groups of 128 dims (and 16 rope
// lanes) in QK, 8 slices of 64 dims in PV; in softmax 8 lanes share a vector, 4 tokens each. This
// does not change with KMLA_TILE, so a vector's bits do not depend on how vectors are tiled.
//
// Exactness: codes and a query normalised by a power of two are exact in f16; scales enter in fp32
// after the sum over their group. P is f16, whose range is kept by a reference per vector: a
// token's weight carries the exponent of its largest scale, V only the rest (in (0,1]).

#if defined(KMLA_TILE) && !defined(KMLA_HOPPER)

// Where an SM has room for two large blocks, they share it and leave the query's fragments in shared
// memory; a block alone keeps them in registers.
constexpr bool kQueryShared = kResident > 1 && kTile > 16;
constexpr int kBlocks = kStep / 16;                // token halves in QK, k16 steps in PV
constexpr int kLatentSteps = KMLA_GROUP_DIMS / 16; // k16 steps of a warp's latent group
constexpr int kQuerySteps = kLatentSteps + 1;      // and one of 16 rope lanes

// ---- shared memory, in this order; the host computes the same sum

constexpr int kStagesAt = kSmallBytes;
constexpr int kScoresAt = kStagesAt + kStages * kStep * kPitch;      // fp32 [4][tile][36]
constexpr int kWeightsAt = kScoresAt + kGroups * kTile * KMLA_I_SCORE_PITCH * 4; // [1|2][tile][40]
constexpr int kRatiosAt = kWeightsAt + kTile * KMLA_I_WEIGHT_PITCH * 2 * (kBf16 ? 2 : 1);
constexpr int kExponentsAt = kRatiosAt + (kPacked ? kStep * kGroups * 2 : 0); // f16 [4][32]
constexpr int kEnd = kExponentsAt + (kPacked ? kStep * 4 : 0);                // fp32 [32]
// The query's fragments: behind all that, or, on their way to registers, in the last stage and the
// scores.
constexpr int kQueryBytes = kTile * KMLA_QUERY_DIMS * 2;
constexpr int kQueryAt = kQueryShared ? kEnd : kStagesAt + (kStages - 1) * kStep * kPitch;
static_assert(kQueryShared || kQueryAt + kQueryBytes <= kWeightsAt, "the query fits");
static_assert(kEnd + (kQueryShared ? kQueryBytes : 0) == KMLA_SHARED_BYTES,
              "host and device layouts differ");

struct reader_state : block_place {
    int dims, half; // in QK: the warp's group of dims, its half of the step's tokens
    // Fragments that live through the loop.
    word2 query[kQueryShared ? 1 : kQuerySteps][kColumns];
    float out[4][kColumns][4]; // O^T, as in store_results
    // Softmax of the thread's vector; shared by 8 lanes, each sums its own 4 tokens of a step.
    float scale;            // of scores, to log2 units
    float sum_reference;    // log2; sum has exp2(score - sum_reference)
    float weight_reference; // above that: weights are exp2(score - sum_reference + exponent - it)
    float sum;
};

KMLA_DEVICE uint8_t* stage_of(int step) {
    return shared_memory() + kStagesAt + step % kStages * kStep * kPitch;
}
KMLA_DEVICE float* scores_of(int group) {
    return (float*)(shared_memory() + kScoresAt) + group * kTile * KMLA_I_SCORE_PITCH;
}
KMLA_DEVICE uint16_t* weights() { return (uint16_t*)(shared_memory() + kWeightsAt); }
KMLA_DEVICE uint16_t* ratios_of(int group) {
    return (uint16_t*)(shared_memory() + kRatiosAt) + group * kStep;
}
KMLA_DEVICE float* exponents() { return (float*)(shared_memory() + kExponentsAt); }
// Largest magnitude of each vector's dims of one group (and its 16 rope lanes), where weights will be.
KMLA_DEVICE float* amax_of(int group) { return (float*)weights() + group * kTile; }

// ---- the query: B fragments, f16 normalised by a power of two, or BF16 for BF16 KV
//
// Lane l holds vector 8j + l/4 and, of 16 dims, dims 4(l%4)..+3: the k order of the records' 4-byte
// words, so that A fragments need no shuffling. Of the two warps of a group of dims each prepares
// every other column j, in shared memory, where both then read.

// The fragments of k16 step k and column j, 8 bytes a lane.
KMLA_DEVICE word2& staged_query(int group, int k, int j, int lane) {
    return ((word2*)(shared_memory() + kQueryAt))[((group * kQuerySteps + k) * kColumns + j) * 32 +
                                                  lane];
}

KMLA_DEVICE word2 codes_to_bf16(uint32_t codes, float scale) {
    float x[4];
    for (int i = 0; i < 4; i++) {
        x[i] = e4m3_to_float(codes >> (8 * i) & 0xFF) * scale;
    }
    return word2{pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3])};
}

// Stages column j's vector of this lane exactly, as BF16. An E4M3 query's one scale is in
// score_scale.
KMLA_DEVICE void load_query_column(const kmla_i_reader_args& args, const reader_state& s, int j) {
    int group = s.dims;
    int latent = group * KMLA_GROUP_DIMS + 4 * s.column, rope = 16 * group + 4 * s.column;
    int vector = s.first_vector + 8 * j + s.row_in_quad;
    if (vector >= s.vectors) {
        for (int k = 0; k < kQuerySteps; k++) {
            staged_query(group, k, j, s.lane) = word2{0, 0};
        }
        return;
    }
    uint64_t record = args.query + (s.first_row + vector / args.heads) * args.query_row_stride +
                      vector % args.heads * args.query_head_stride;
    if (args.query_format == KMLA_QUERY_BF16) {
#pragma unroll
        for (int k = 0; k < kQuerySteps; k++) {
            int dim = k < kLatentSteps ? latent + 16 * k : KMLA_LATENT_DIMS + rope;
            copy_async_8(&staged_query(group, k, j, s.lane), (const void*)(record + 2 * dim));
        }
        return;
    }
    bool packed = args.query_format == KMLA_QUERY_PACKED;
    float scale = packed ? ((const float*)(record + KMLA_PACKED_SCALE_OFFSET))[group] : 1.0f;
#pragma unroll 1
    for (int k = 0; k < kQuerySteps; k++) {
        word2 pair;
        if (packed && k == kLatentSteps) {
            pair = *(const word2*)(record + KMLA_PACKED_ROPE_OFFSET + 2 * rope);
        } else {
            int dim = k < kLatentSteps ? latent + 16 * k : KMLA_LATENT_DIMS + rope;
            pair = codes_to_bf16(*(const uint32_t*)(record + dim), scale);
        }
        staged_query(group, k, j, s.lane) = pair;
    }
}

KMLA_DEVICE void load_query(const kmla_i_reader_args& args, const reader_state& s) {
#pragma unroll 1
    for (int j = s.half; j < kColumns; j += 2) {
        load_query_column(args, s, j);
    }
    copy_async_commit();
}

KMLA_DEVICE float amax_of_pair(float amax, uint32_t pair) {
    pair &= 0x7FFF7FFFu;
    return maximum(amax, maximum(bf16_low(pair), bf16_high(pair)));
}

// Largest magnitude of the first `steps` k16 steps; the 4 lanes of a vector agree.
KMLA_DEVICE float staged_amax(const reader_state& s, int j, int steps) {
    float amax = 0;
    for (int k = 0; k < steps; k++) {
        word2 pair = staged_query(s.dims, k, j, s.lane);
        amax = amax_of_pair(amax_of_pair(amax, pair.x), pair.y);
    }
    amax = maximum(amax, shuffle_xor(amax, 1));
    return maximum(amax, shuffle_xor(amax, 2));
}

KMLA_DEVICE uint32_t round_pair_to_e4m3(uint32_t pair, float scale, float inverse) {
    return pack_bf16(round_to_e4m3(bf16_low(pair) * inverse) * scale,
                     round_to_e4m3(bf16_high(pair) * inverse) * scale);
}

// What the packed query writer would store, read back: exact in BF16.
KMLA_DEVICE void round_query_to_packed(const reader_state& s, int j) {
    float amax = staged_amax(s, j, kLatentSteps);
    const float largest = bits_float(0x7F7FFFFFu);
    float scale = packed_query_scale(amax > largest ? largest : amax);
    float inverse = power_of_two_inverse(scale);
#pragma unroll 1
    for (int k = 0; k < kLatentSteps; k++) {
        word2& pair = staged_query(s.dims, k, j, s.lane);
        pair.x = round_pair_to_e4m3(pair.x, scale, inverse);
        pair.y = round_pair_to_e4m3(pair.y, scale, inverse);
    }
}

// Exponent field of the power of two that a vector's query is divided by, so that its largest
// element lies in [2^14, 2^15). What f16 then drops is below 2^-38 of the largest.
KMLA_DEVICE int norm_exponent(int n) {
    float amax = maximum(maximum(amax_of(0)[n], amax_of(1)[n]),
                         maximum(amax_of(2)[n], amax_of(3)[n]));
    return minimum(maximum((int)(float_bits(amax) >> 23), 64), 254);
}
KMLA_DEVICE float norm_of(int n) { return bits_float((uint32_t)(norm_exponent(n) - 14) << 23); }

KMLA_DEVICE uint32_t normalise_pair(uint32_t pair, float factor, bool to_f16) {
    float low = bf16_low(pair) * factor, high = bf16_high(pair) * factor;
    return to_f16 ? pack_f16(low, high) : pack_bf16(low, high);
}

KMLA_DEVICE void normalise_query(const reader_state& s, int j) {
    float factor =
        bits_float((uint32_t)(127 + 14 + 127 - norm_exponent(8 * j + s.row_in_quad)) << 23);
#pragma unroll 3
    for (int k = 0; k < kQuerySteps; k++) {
        word2& pair = staged_query(s.dims, k, j, s.lane);
        bool to_f16 = kE4m3 || k < kLatentSteps; // packed rope is BF16, like its KV
        pair.x = normalise_pair(pair.x, factor, to_f16);
        pair.y = normalise_pair(pair.y, factor, to_f16);
    }
}

// From values to fragments.
KMLA_DEVICE void finish_query(const kmla_i_reader_args& args, reader_state& s) {
    copy_async_wait<kStages - 1>(); // all but the first steps' records
    int group = s.dims;
    for (int j = s.half; j < kColumns; j += 2) {
        if (args.e4m3_query && args.query_format == KMLA_QUERY_BF16) {
            round_query_to_packed(s, j);
        }
        float amax = staged_amax(s, j, kQuerySteps);
        if (s.column == 0) {
            amax_of(group)[8 * j + s.row_in_quad] = amax;
        }
    }
    sync_block();
    s.scale = args.score_scale;
    if (!kBf16) {
        for (int j = s.half; j < kColumns; j += 2) {
            normalise_query(s, j);
        }
        if (s.vector < kTile) {
            s.scale *= norm_of(s.vector);
        }
    }
    sync_block();
    if (!kQueryShared) {
#pragma unroll
        for (int k = 0; k < kQuerySteps; k++) {
            for (int j = 0; j < kColumns; j++) {
                s.query[k][j] = staged_query(group, k, j, s.lane);
            }
        }
    }
}

// ---- KV to shared memory

KMLA_DEVICE bool copies_in_bulk(const reader_state& s) {
    return KMLA_HAS_BULK_COPY && kPitch == kRecordBytes && s.bulk;
}

// The warp that starts bulk copies: the last, which small tiles leave idle in softmax.
KMLA_DEVICE bool is_copier(const reader_state& s) {
    return s.warp == KMLA_I_READER_THREADS / 32 - 1;
}

// The table look-up for the step that begins at `token`, a step ahead of the copy that needs it: the
// entry of the token that this lane answers for (lanes l and l + 4 the same), -1 if not wanted.
KMLA_DEVICE int look_up(const kmla_i_reader_args& args, const reader_state& s, int token) {
    int mine = copies_in_bulk(s) ? token : token + 4 * s.warp + s.lane % 4;
    bool wanted = mine < bounds().end && (copies_in_bulk(s) || mine >= bounds().begin);
    return wanted ? table_entry(args, s.group, mine) : -1;
}

#if KMLA_HAS_BULK_COPY
// One warp copies the records of tokens [begin, end) of the step.
KMLA_DEVICE void start_bulk_copy(const kmla_i_reader_args& args, const reader_state& s, int step,
                                 int token, int entry) {
    int first = maximum(bounds().begin - token, 0);
    int last = entry < 0 ? first : minimum(bounds().end - token, kStep);
    if (s.lane < kWarps) {
        token_masks_of(step)[s.lane] = mask_of_tokens(s.lane * kWarpTokens, first, last);
    }
    if (s.lane == 0) {
        uint32_t bytes = (uint32_t)((last - first) * kRecordBytes);
        barrier_arrive_expect(arrival_of(step), bytes);
        if (bytes) {
            uint64_t from = record_address(args, entry, token + first, kRecordBytes);
            copy_bulk(stage_of(step) + first * kPitch, (const void*)from, bytes, arrival_of(step));
        }
    }
}
#endif

// Every warp copies four records, 16 bytes a lane; one that does not exist becomes zeros.
KMLA_DEVICE void start_record_copies(const kmla_i_reader_args& args, const reader_state& s,
                                     int step, int token, int entry) {
    uint32_t exists = ballot(entry >= 0) & 0xF;
    uint64_t address =
        record_address(args, entry, token + 4 * s.warp + s.lane % 4, kRecordBytes);
    address = entry >= 0 ? address : 0;
    if (s.lane == 0) {
        token_masks_of(step)[s.warp] = (warp_mask)exists;
    }
    uint8_t* stage = stage_of(step) + 4 * s.warp * kPitch;
#pragma unroll 1
    for (int i = 0; i < 4; i++) {
        uint64_t record = shuffle(address, i);
        for (int at = 16 * s.lane; at < kRecordBytes; at += 16 * 32) {
            copy_async_16(stage + i * kPitch + at, (const void*)((record ? record : args.kv) + at),
                          record != 0);
        }
    }
}

// Starts the copy of the step that begins at `token` and looks the next one up. Tokens outside the
// tile's bounds are not read.
KMLA_DEVICE int start_copy(const kmla_i_reader_args& args, const reader_state& s, int step,
                           int token, int entry) {
#if KMLA_HAS_BULK_COPY
    if (copies_in_bulk(s)) {
        if (!is_copier(s)) {
            return -1;
        }
        start_bulk_copy(args, s, step, token, entry);
        return look_up(args, s, token + kStep);
    }
#endif
    start_record_copies(args, s, step, token, entry);
    return look_up(args, s, token + kStep);
}

KMLA_DEVICE void wait_for_copy(const reader_state& s, int step) {
#if KMLA_HAS_BULK_COPY
    if (copies_in_bulk(s)) {
        barrier_wait(arrival_of(step), (uint32_t)(step / kStages) & 1);
        return;
    }
#endif
    copy_async_wait<kStages - 2>();
}

// ---- QK: S^T of 16 tokens x the tile over one group of dims, into the score buffer

// A fragment of 16 tokens x 16 dims from the records of tokens row_in_quad and + 8.
KMLA_DEVICE void load_codes_fragment(const uint8_t* at, uint32_t (&a)[4]) {
    uint32_t low[2], high[2];
    e4m3x4_to_f16(*(const uint32_t*)at, low);
    e4m3x4_to_f16(*(const uint32_t*)(at + 8 * kPitch), high);
    a[0] = low[0], a[1] = high[0], a[2] = low[1], a[3] = high[1];
}

KMLA_DEVICE void load_bf16_fragment(const uint8_t* at, uint32_t (&a)[4]) {
    const uint32_t *low = (const uint32_t*)at, *high = (const uint32_t*)(at + 8 * kPitch);
    a[0] = low[0], a[1] = high[0], a[2] = low[1], a[3] = high[1];
}

// Sums of codes times the tokens' scales of the group: sums of numbers.
KMLA_DEVICE void scale_scores(const uint8_t* record, int group, float (&score)[kColumns][4]) {
    const uint8_t* at = record + KMLA_PACKED_SCALE_OFFSET + 4 * group;
    float scale[2] = {*(const float*)at, *(const float*)(at + 8 * kPitch)};
#pragma unroll
    for (int j = 0; j < kColumns; j++) {
        for (int i = 0; i < 4; i++) {
            score[j][i] *= scale[i / 2];
        }
    }
}

KMLA_DEVICE void multiply_keys(const reader_state& s, const uint8_t* stage) {
    int group = s.dims, token = s.half * 16 + s.row_in_quad;
    const uint8_t* record = stage + token * kPitch;
    float score[kColumns][4];
    uint32_t a[4];
#pragma unroll
    for (int j = 0; j < kColumns; j++) {
        for (int i = 0; i < 4; i++) {
            score[j][i] = 0;
        }
    }
#pragma unroll
    for (int k = 0; k < kQuerySteps; k++) {
        bool rope = k == kLatentSteps;
        int dim = rope ? KMLA_LATENT_DIMS + 16 * group : group * KMLA_GROUP_DIMS + 16 * k;
        dim += 4 * s.column;
        if (kBf16) {
            load_bf16_fragment(record + 2 * dim, a);
        } else if (kPacked && rope) {
            scale_scores(record, group, score); // the rope has none
            load_bf16_fragment(record + KMLA_PACKED_ROPE_OFFSET + 2 * (dim - KMLA_LATENT_DIMS), a);
        } else {
            load_codes_fragment(record + dim, a);
        }
#pragma unroll
        for (int j = 0; j < kColumns; j++) {
            word2 b = kQueryShared ? staged_query(group, k, j, s.lane) : s.query[k][j];
            if (kBf16 || (kPacked && rope)) {
                mma_bf16(score[j], a, b.x, b.y);
            } else {
                mma_f16(score[j], a, b.x, b.y);
            }
        }
    }
    float* scores = scores_of(group);
#pragma unroll
    for (int j = 0; j < kColumns; j++) {
        for (int i = 0; i < 4; i++) {
            int n = 8 * j + 2 * s.column + i % 2;
            scores[n * KMLA_I_SCORE_PITCH + token + i / 2 * 8] = score[j][i];
        }
    }
}

// ---- scales of packed records: 2^exponent goes with the score, the rest with the f16 weight

// Exponent e with the largest scale of the token in (2^(e-1), 2^e]; per group the f16 ratio
// scale / 2^e. A scale that is no number has ratio 0: such a token's score is no number either,
// which is what its readers get. Each warp takes four tokens, a lane one scale.
KMLA_DEVICE void split_scales(const reader_state& s, const uint8_t* stage) {
    if (!kPacked) {
        return;
    }
    int group = s.column, token = 4 * s.warp + s.row_in_quad % 4;
    uint32_t bits = *(const uint32_t*)(stage + token * kPitch + KMLA_PACKED_SCALE_OFFSET + 4 * group);
    uint32_t magnitude = bits & 0x7FFFFFFFu;
    bits = magnitude < 0x7F800000u ? bits : 0;
    uint32_t largest = magnitude < 0x7F800000u ? magnitude : 0;
    largest = maximum(largest, shuffle_xor(largest, 1));
    largest = maximum(largest, shuffle_xor(largest, 2));
    uint32_t power = (largest + 0x007FFFFFu) & 0x7F800000u; // 2^e
    power = power < (253u << 23) ? power : 253u << 23;      // so that its inverse is normal
    if (s.lane < 16) {
        float ratio = bits_float(bits) * bits_float((254u << 23) - power);
        ratios_of(group)[token] = (uint16_t)pack_f16(ratio, 0.0f);
        if (group == 0) {
            exponents()[token] = (float)((int)(power >> 23) - 127);
        }
    }
}

// ---- softmax: 8 lanes a vector, 4 tokens a lane

KMLA_DEVICE float top_of(const float (&x)[4]) {
    return maximum(maximum(x[0], x[1]), maximum(x[2], x[3]));
}

KMLA_DEVICE bool outgrown(float top, float reference) {
    return top > reference + KMLA_I_REFERENCE_GROWTH;
}

// A new reference for a vector whose maximum has outgrown the old one; its 8 lanes agree.
KMLA_DEVICE float raised_reference(float top, float reference) {
    top = maximum(top, shuffle_xor(top, 1));
    top = maximum(top, shuffle_xor(top, 2));
    top = maximum(top, shuffle_xor(top, 4));
    return outgrown(top, reference) ? top - KMLA_I_REFERENCE_BELOW : reference;
}

// x - reference; a vector that has seen no token yet has no reference, and only -inf.
KMLA_DEVICE void subtract_reference(const float (&x)[4], float reference, float (&d)[4]) {
    float base = reference == -infinity() ? 0 : reference;
    for (int i = 0; i < 4; i++) {
        d[i] = x[i] - base;
    }
}

KMLA_DEVICE void exponentials(const float (&d)[4], float (&p)[4]) {
    for (int i = 0; i < 4; i++) {
        p[i] = exp2_fast(d[i]);
    }
}

KMLA_DEVICE float sum_of_groups(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    return (bits_float(a) + bits_float(b)) + (bits_float(c) + bits_float(d));
}

// Turns the scores of the step into weights. Returns whether this thread's vector was rescaled.
// `masked`: some vector may not see some token.
template <bool masked>
KMLA_DEVICE bool softmax_step(reader_state& s, int first_token, const warp_mask* masks) {
    int n = s.vector, quad = s.quad;
    if (n >= kTile) {
        return false;
    }
    float x[4], d[4], y[4], p[4];
    word4 part[kGroups];
    for (int g = 0; g < kGroups; g++) {
        part[g] = *(const word4*)(scores_of(g) + n * KMLA_I_SCORE_PITCH + 4 * quad);
    }
    x[0] = sum_of_groups(part[0].x, part[1].x, part[2].x, part[3].x);
    x[1] = sum_of_groups(part[0].y, part[1].y, part[2].y, part[3].y);
    x[2] = sum_of_groups(part[0].z, part[1].z, part[2].z, part[3].z);
    x[3] = sum_of_groups(part[0].w, part[1].w, part[2].w, part[3].w);
    uint32_t exists = masked ? masks[quad] : 0xF;
    word4 four = {0, 0, 0, 0};
    if (kPacked) {
        four = ((const word4*)exponents())[quad];
    }
    float exponent[4] = {bits_float(four.x), bits_float(four.y), bits_float(four.z),
                         bits_float(four.w)};
    vector_range range = masked ? range_of(n) : vector_range{0, 0, 0, 0};
    for (int i = 0; i < 4; i++) {
        int token = first_token + 4 * quad + i;
        bool visible = token >= range.begin && token < range.end && (exists >> i & 1);
        x[i] = !masked || visible ? x[i] * s.scale : -infinity();
    }
    subtract_reference(x, s.sum_reference, d);
    for (int i = 0; i < 4; i++) {
        y[i] = d[i] + exponent[i];
    }
    float factor = 1;
    bool grown = outgrown(top_of(x), s.sum_reference) ||
                 (kPacked && outgrown(top_of(y), s.weight_reference));
    if (ballot(grown)) {
        float raised = raised_reference(top_of(x), s.sum_reference);
        if (raised != s.sum_reference) {
            factor = exp2_fast(s.sum_reference - raised);
            s.weight_reference -= raised - s.sum_reference; // the same as before, above the new one
            s.sum *= factor;
            s.sum_reference = raised;
            subtract_reference(x, raised, d);
        }
        if (kPacked) {
            for (int i = 0; i < 4; i++) {
                y[i] = d[i] + exponent[i];
            }
            raised = raised_reference(top_of(y), s.weight_reference);
            factor = exp2_fast(s.weight_reference - raised);
            factor = raised == s.weight_reference ? 1 : factor;
            s.weight_reference = raised;
        }
    }
    exponentials(d, p);
    s.sum += (p[0] + p[1]) + (p[2] + p[3]);
    if (kPacked) {
        subtract_reference(y, s.weight_reference, y);
        exponentials(y, p);
    }
    uint16_t* to = weights() + n * KMLA_I_WEIGHT_PITCH + 4 * quad;
    if (kBf16) { // BF16 has fp32's range but 8 bits: two terms
        word2 high = {pack_bf16(p[0], p[1]), pack_bf16(p[2], p[3])};
        word2 low = {pack_bf16(p[0] - bf16_low(high.x), p[1] - bf16_high(high.x)),
                     pack_bf16(p[2] - bf16_low(high.y), p[3] - bf16_high(high.y))};
        *(word2*)to = high;
        *(word2*)(to + kTile * KMLA_I_WEIGHT_PITCH) = low;
    } else {
        *(word2*)to = word2{pack_f16(p[0], p[1]), pack_f16(p[2], p[3])};
    }
    if (quad == 0) {
        factors()[n] = factor;
    }
    return factor != 1.0f;
}

// ---- PV: O^T of the warp's 64 dims

KMLA_DEVICE void rescale_out(reader_state& s) {
#pragma unroll
    for (int j = 0; j < kColumns; j++) {
        float low = factors()[8 * j + 2 * s.column], high = factors()[8 * j + 2 * s.column + 1];
        for (int m = 0; m < 4; m++) {
            s.out[m][j][0] *= low, s.out[m][j][1] *= high;
            s.out[m][j][2] *= low, s.out[m][j][3] *= high;
        }
    }
}

// NaN and infinity to 0, lane by lane.
KMLA_DEVICE uint32_t only_numbers_bf16(uint32_t pair) {
    uint32_t bad = (((pair & 0x7F807F80u) + 0x00800080u) & 0x80008000u) >> 15;
    return pair & ~(bad * 0xFFFFu);
}

// V^T fragments: row_in_quad owns 8 dims; the tokens of a fragment column pair are neighbours, whose
// bytes are woven together. `masked`: some vector may not see some token, and 0 * NaN must not
// reach it; a vector that does see the token has its NaN from the score.
template <bool masked> KMLA_DEVICE void load_code_values(const uint8_t* at, uint32_t (&a)[4][4]) {
    const uint32_t largest = 0x7BFF7BFFu; // 65504
    word2 token[4] = {*(const word2*)at, *(const word2*)(at + kPitch),
                      *(const word2*)(at + 8 * kPitch), *(const word2*)(at + 9 * kPitch)};
#pragma unroll
    for (int half = 0; half < 2; half++) {
        word2 even = token[2 * half], odd = token[2 * half + 1];
        uint32_t woven[4] = {
            permute_bytes(even.x, odd.x, 0x5140), permute_bytes(even.x, odd.x, 0x7362),
            permute_bytes(even.y, odd.y, 0x5140), permute_bytes(even.y, odd.y, 0x7362)};
#pragma unroll
        for (int m = 0; m < 4; m++) {
            uint32_t pair[2];
            e4m3x4_to_f16(woven[m], pair);
            for (int i = 0; i < 2; i++) {
                a[m][2 * half + i] = masked ? minimum_f16x2(pair[i], largest) : pair[i];
            }
        }
    }
}

template <bool masked> KMLA_DEVICE void load_bf16_values(const uint8_t* at, uint32_t (&a)[4][4]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        word4 even = *(const word4*)(at + 8 * half * kPitch);
        word4 odd = *(const word4*)(at + (8 * half + 1) * kPitch);
        uint32_t e[4] = {even.x, even.y, even.z, even.w}, o[4] = {odd.x, odd.y, odd.z, odd.w};
#pragma unroll
        for (int m = 0; m < 4; m++) {
            uint32_t low = permute_bytes(e[m], o[m], 0x5410);
            uint32_t high = permute_bytes(e[m], o[m], 0x7632);
            a[m][2 * half] = masked ? only_numbers_bf16(low) : low;
            a[m][2 * half + 1] = masked ? only_numbers_bf16(high) : high;
        }
    }
}

// Weights as B fragments of one column of vectors. FP8 KV: registers 2k and 2k + 1 are k16 step k's,
// all 32 tokens at once. BF16 KV: the two of step k's high term, then the two of its low term.
KMLA_DEVICE void load_weights(const reader_state& s, int k, uint32_t (&weight)[kColumns][4]) {
    int matrix = s.lane / 8;
    int term = kBf16 ? matrix / 2 : 0, token = kBf16 ? 16 * k + matrix % 2 * 8 : matrix * 8;
#pragma unroll
    for (int j = 0; j < kColumns; j++) {
        int row = term * kTile + 8 * j + s.lane % 8;
        load_matrix_x4(weight[j], weights() + row * KMLA_I_WEIGHT_PITCH + token);
    }
}

// Packed: the rest of the scales of the warp's group of dims.
KMLA_DEVICE void scale_weights(const reader_state& s, uint32_t (&weight)[kColumns][4]) {
    const uint32_t* ratios = (const uint32_t*)ratios_of(s.warp / 2) + s.column;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32_t ratio = ratios[4 * i]; // of tokens 8i + 2 * column and the next
        for (int j = 0; j < kColumns; j++) {
            weight[j][i] = multiply_f16x2(weight[j][i], ratio);
        }
    }
}

template <bool masked> KMLA_DEVICE void multiply_values(reader_state& s, const uint8_t* stage) {
    int dim = 64 * s.warp + 8 * s.row_in_quad;
    uint32_t weight[kColumns][4];
    if (!kBf16) {
        load_weights(s, 0, weight);
    }
    if (kPacked) {
        scale_weights(s, weight);
    }
#pragma unroll
    for (int k = 0; k < kBlocks; k++) {
        const uint8_t* records = stage + (16 * k + 2 * s.column) * kPitch;
        uint32_t a[4][4];
        if (kBf16) {
            load_weights(s, k, weight);
            load_bf16_values<masked>(records + 2 * dim, a);
        } else {
            load_code_values<masked>(records + dim, a);
        }
#pragma unroll
        for (int m = 0; m < 4; m++) {
#pragma unroll
            for (int j = 0; j < kColumns; j++) {
                if (kBf16) {
                    mma_bf16(s.out[m][j], a[m], weight[j][0], weight[j][1]);
                } else {
                    mma_f16(s.out[m][j], a[m], weight[j][2 * k], weight[j][2 * k + 1]);
                }
            }
            for (int j = 0; j < kColumns && kBf16; j++) {
                mma_bf16(s.out[m][j], a[m], weight[j][2], weight[j][3]);
            }
        }
    }
}

// ---- results

KMLA_DEVICE void finish_softmax(const kmla_i_reader_args& args, reader_state& s) {
    if (s.vector >= kTile) {
        return;
    }
    s.sum += shuffle_xor(s.sum, 1);
    s.sum += shuffle_xor(s.sum, 2);
    s.sum += shuffle_xor(s.sum, 4);
    if (s.quad == 0) {
        float scale = kPacked ? exp2_wide(s.weight_reference) : args.kv_scale;
        finish_vector(args, s.vector, s.sum, s.sum_reference, scale);
    }
}

// ---- the block

// Softmax and PV of a step whose scores are there.
template <bool masked>
KMLA_DEVICE void weigh_values(reader_state& s, int token, const uint8_t* stage,
                              const warp_mask* masks) {
    if (sync_block_or(softmax_step<masked>(s, token, masks))) {
        rescale_out(s);
    }
    multiply_values<masked>(s, stage);
}

// Starts the copies of the first steps, all but one stage.
KMLA_DEVICE int fill_stages(const kmla_i_reader_args& args, const reader_state& s, int first,
                            int steps) {
    int entry = look_up(args, s, first);
#pragma unroll 1
    for (int step = 0; step < kStages - 1; step++) {
        if (step < steps) {
            entry = start_copy(args, s, step, first + step * kStep, entry);
        }
        copy_async_commit();
    }
    return entry;
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
    int entry = fill_stages(args, s, first, steps);
    finish_query(args, s);
    for (int step = 0; step < steps; step++) {
        int token = first + step * kStep, ahead = step + kStages - 1;
        const uint8_t* stage = stage_of(step);
        const warp_mask* masks = token_masks_of(step);
        wait_for_copy(s, step);
        sync_block(); // this step is here for all, and all are done with the one before
        if (kStages == 2 && ahead < steps) {
            entry = start_copy(args, s, ahead, first + ahead * kStep, entry);
        }
        split_scales(s, stage);
        multiply_keys(s, stage);
        sync_block();
        if (kStages > 2 && ahead < steps) { // later, where it holds up fewer warps
            entry = start_copy(args, s, ahead, first + ahead * kStep, entry);
        }
        copy_async_commit();
        if (step >= full_begin && step < full_end && all_exist(masks)) {
            weigh_values<false>(s, token, stage, masks);
        } else {
            weigh_values<true>(s, token, stage, masks);
        }
    }
    sync_block();
}

KMLA_KERNEL(kmla_reader, kmla_i_reader_args, KMLA_I_READER_THREADS, kResident) {
    wait_dependency();
    if (block_z() == args.groups) {
        clear_dead_rows(args);
        return;
    }
    reader_state s;
    find_place(args, s);
    s.dims = s.warp % kGroups;
    s.half = s.warp / kGroups;
    if (s.first_vector >= s.vectors) {
        return;
    }
    s.weight_reference = s.sum_reference = -infinity();
    s.sum = 0;
#pragma unroll
    for (int m = 0; m < 4; m++) {
        for (int j = 0; j < kColumns; j++) {
            for (int i = 0; i < 4; i++) {
                s.out[m][j][i] = 0;
            }
        }
    }
#if KMLA_HAS_BULK_COPY
    if (thread_index() == 0) {
        for (int stage = 0; stage < kStages; stage++) {
            barrier_init(arrival_of(stage), 1);
        }
        barrier_init_fence();
    }
#endif
    load_query(args, s); // first, for its latency
    find_ranges(args, s, weights());
    sync_block();
    read_tokens(args, s);
    launch_dependents();
    finish_softmax(args, s);
    sync_block();
    store_results(args, s, (const float(&)[4][kColumns * 4])s.out);
}

#endif
