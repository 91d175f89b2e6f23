// The Hopper reader: sm_90a, wgmma. FP8 KV; BF16 KV is the portable reader's.
//
// As in the portable reader tokens are the M side of S^T = K q^T, latent dims that of O^T = V^T
// P^T, and A comes from registers, converted from raw bytes. B, the query and the weights, lies in
// shared memory. A step is 64 tokens. Four warpgroups share the work: two score (QK and softmax, 16
// tokens a warp), one the even steps and one the odd, each into a weight buffer of its own; two
// weigh values with these (PV, 64 dims a warp) and copy records into a ring of runs of 32 tokens.
// The score groups take turns at softmax, so that each step's references are the next's.
//
// Weights are computed with the references that are there; a vote says whether some vector has
// outgrown its own, and only then maxima are taken and the step's weights computed again. A
// vector's value depends on its own scores alone.

#if defined(KMLA_TILE) && defined(KMLA_HOPPER)

constexpr int kScoreWarps = 4; // of a group
constexpr int kValueWarps = kWarps - 2 * kScoreWarps;
constexpr int kScoreThreads = 32 * kScoreWarps, kValueThreads = 32 * kValueWarps;
// Registers of a thread that scores and of one that weighs; all start with 128.
constexpr int kScoreRegisters = kTile > 48 ? 96 : kTile > 40 ? 112 : 128;
constexpr int kValueRegisters = 256 - kScoreRegisters;
// Named barriers; 0 is the block's.
constexpr uint32_t kEndBarrier = 1, kSumBarrier = 2;
constexpr uint32_t kScoreBarrier = 3; // of the first score group, + 1 of the second
constexpr uint32_t kTurnBarrier = 5;  // likewise: the group may begin its softmax

constexpr int kBlocksOf64 = KMLA_QUERY_DIMS / 64; // of dims: 128 swizzled bytes a vector each
constexpr int kGroupSteps = KMLA_GROUP_DIMS / 16; // k16 steps of a scale's dims
constexpr int kBatchSteps = kTile <= 32 ? 4 : 2; // of QK: converted while others are multiplied
constexpr int kBatches = KMLA_QUERY_DIMS / 16 / kBatchSteps;
constexpr int kLatentBatches = KMLA_LATENT_DIMS / 16 / kBatchSteps;
constexpr int kRunTokens = KMLA_I_STEP_TOKENS; // of one bulk copy: they lie in one page
static_assert(kStep == 2 * kRunTokens, "a step is two runs");

// ---- shared memory

constexpr int kQueryAt = (kSmallBytes + 1023) / 1024 * 1024;     // f16 [9][tile][64], swizzled
constexpr int kWeightsAt = kQueryAt + kBlocksOf64 * kTile * 128; // f16 [2][tile][64 tokens], swizzled
constexpr int kRunsAt = kWeightsAt + 2 * kTile * 128;
constexpr int kRatiosAt = kRunsAt + kStages * kRunTokens * kPitch; // f16 [2][4][64 tokens]
constexpr int kStateAt = kRatiosAt + (kPacked ? 2 * kGroups * kStep * 2 : 0); // fp32 [7][tile]
constexpr int kSumsAt = kStateAt + 7 * kTile * 4; // fp32 pairs [tile / 8][threads that score]
static_assert(kSumsAt + kColumns * 2 * kScoreThreads * 8 == KMLA_SHARED_BYTES,
              "host and device layouts differ");

// Behind what both readers have there: barriers of the weight buffers, votes, what a step says.
constexpr int kReadyAt = kFactsAt + (int)sizeof(tile_facts);
constexpr int kVotesAt = kReadyAt + 4 * 8;
constexpr int kSaidAt = kVotesAt + 2 * 16;
static_assert(kSaidAt + 8 <= kRangesAt, "small things fit");

KMLA_DEVICE uint64_t* weights_ready(int buffer) { // by the score warps
    return (uint64_t*)(shared_memory() + kReadyAt) + buffer;
}
KMLA_DEVICE uint64_t* weights_free(int buffer) { // by each of the value warps, done with a step
    return (uint64_t*)(shared_memory() + kReadyAt) + 2 + buffer;
}
KMLA_DEVICE uint32_t* votes_of(int buffer) {
    return (uint32_t*)(shared_memory() + kVotesAt) + 4 * buffer;
}
// Whether V products and sums before this step are to be multiplied by its factors.
KMLA_DEVICE int& rescaled(int buffer) { return ((int*)(shared_memory() + kSaidAt))[buffer]; }
// Of a run: a bit a token, it exists.
KMLA_DEVICE uint32_t& run_tokens(int slot) {
    return ((uint32_t*)(shared_memory() + opaque(kMasksAt)))[slot]; // no register for its base
}

KMLA_DEVICE uint8_t* query_block(int block) {
    return shared_memory() + kQueryAt + block * kTile * 128;
}
KMLA_DEVICE uint8_t* weight_block(int buffer) {
    return shared_memory() + kWeightsAt + buffer * kTile * 128;
}
KMLA_DEVICE uint8_t* records_of(int slot) {
    return shared_memory() + kRunsAt + slot * kRunTokens * kPitch;
}
// 16 bytes of row n of a swizzled block.
KMLA_DEVICE uint8_t* swizzled(uint8_t* block, int n, int chunk) {
    return block + n * 128 + ((chunk ^ (n & 7)) * 16);
}
KMLA_DEVICE uint16_t* ratios_of(int buffer, int group) {
    return (uint16_t*)(shared_memory() + kRatiosAt) + (buffer * kGroups + group) * kStep;
}
// Of each pair of vectors: the scales of their scores, to log2, and the references that their
// weights of the sum, 2^(score - reference), are relative to: kNoReference, which every score
// outgrows, until a vector sees a token.
struct alignas(16) pair_terms {
    float scale[2], reference[2];
};
KMLA_DEVICE pair_terms* terms() { return (pair_terms*)(shared_memory() + kStateAt); }
KMLA_DEVICE float& reference_of(int n) { return terms()[n / 2].reference[n % 2]; }
// Of each vector: 2^(kMidExponent - a), where 2^-a is what V's weights times besides.
KMLA_DEVICE float* weight_scales() { return (float*)(shared_memory() + kStateAt) + 2 * kTile; }
// What V products and sums before a step are to be multiplied by, if the step says so.
KMLA_DEVICE float* rescales_of(int buffer) { return weight_scales() + (1 + buffer) * kTile; }
KMLA_DEVICE float* sum_factors_of(int buffer) { return weight_scales() + (3 + buffer) * kTile; }

constexpr float kNoReference = -3.40282347e38f;

typedef float accumulators[kColumns * 4]; // of 16 rows a warp x the tile

// What a block walks over.
struct token_walk {
    int first, steps; // a step's multiple; how many
    int odd;          // 1 if the first step is odd, of all steps since token 0
};

KMLA_DEVICE token_walk find_walk() {
    token_walk walk;
    walk.first = bounds().begin / kStep * kStep;
    walk.steps = maximum(bounds().end - walk.first + kStep - 1, 0) / kStep;
    walk.odd = walk.first / kStep % 2;
    return walk;
}

// A slot of the ring of runs, and the parity of its barrier's phase.
struct ring_place {
    int slot;
    uint32_t parity;
};
KMLA_DEVICE ring_place place_after(ring_place at, int runs) { // at most kStages of them
    int slot = at.slot + runs;
    bool wraps = slot >= kStages;
    return ring_place{wraps ? slot - kStages : slot, at.parity ^ (uint32_t)wraps};
}

// Waits for both runs of the step from `token` on. Whether every vector of the tile sees all 64.
KMLA_DEVICE bool wait_for_runs(int token, ring_place low, ring_place high) {
    barrier_wait(arrival_of(low.slot), low.parity);
    barrier_wait(arrival_of(high.slot), high.parity);
    return token >= bounds().full_begin && token <= bounds().full_end - kStep &&
           (run_tokens(low.slot) & run_tokens(high.slot)) == 0xFFFFFFFFu;
}

// ---- the query: 8 or 16 lanes a vector, so that few threads idle; 16 dims a lane and part

constexpr int kQueryLanes = KMLA_I_HOPPER_THREADS >= 16 * kTile ? 16 : 8;
constexpr int kQueryParts = (KMLA_QUERY_DIMS / 16 + kQueryLanes - 1) / kQueryLanes;

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

// Over the 8 lanes of 128 dims; over those of a vector.
KMLA_DEVICE float group_amax(float amax) {
    amax = maximum(amax, shuffle_xor(amax, 1));
    amax = maximum(amax, shuffle_xor(amax, 2));
    return maximum(amax, shuffle_xor(amax, 4));
}
KMLA_DEVICE float vector_amax(float amax) {
    amax = group_amax(amax);
    return kQueryLanes > 8 ? maximum(amax, shuffle_xor(amax, 8)) : amax;
}

// What the packed query writer would store of the lane's dims of a group, read back.
KMLA_DEVICE void round_to_packed(uint32_t (&pair)[8]) {
    float amax = group_amax(lane_amax(pair, 0));
    const float largest = bits_float(0x7F7FFFFFu);
    float scale = packed_query_scale(amax > largest ? largest : amax);
    float inverse = power_of_two_inverse(scale);
    for (int i = 0; i < 8; i++) {
        pair[i] = pack_bf16(round_to_e4m3(bf16_low(pair[i]) * inverse) * scale,
                            round_to_e4m3(bf16_high(pair[i]) * inverse) * scale);
    }
}

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
    int block = kQueryLanes * i + part;
    for (int w = 0; w < 8; w++) {
        pair[w] = 0;
    }
    if (exists && block < KMLA_QUERY_DIMS / 16) {
        load_query_block(args, record, block, pair);
    }
    if (args.e4m3_query && args.query_format == KMLA_QUERY_BF16 &&
        block < KMLA_LATENT_DIMS / 16) {
        round_to_packed(pair);
    }
}

// A thread's part of the query: one vector of the tile, if that has so many.
struct query_share {
    int n, part;     // which vector; which lane of it
    uint64_t record; // its address
    bool exists, plain;
    uint32_t pair[kQueryParts][8]; // plain BF16, the usual case: all loads at once, and early
};
static_assert(kTile * kQueryLanes <= KMLA_I_HOPPER_THREADS, "a vector each");

KMLA_DEVICE void load_query(const kmla_i_reader_args& args, const block_place& s, query_share& q) {
    int vector;
    q.n = thread_index() / kQueryLanes;
    q.part = s.lane % kQueryLanes;
    vector = s.first_vector + q.n;
    q.exists = q.n < kTile && vector < s.vectors;
    q.plain = args.query_format == KMLA_QUERY_BF16 && !args.e4m3_query;
    q.record = args.query + (s.first_row + vector / args.heads) * args.query_row_stride +
               vector % args.heads * args.query_head_stride;
    if (!q.plain) {
        return;
    }
#pragma unroll
    for (int i = 0; i < kQueryParts; i++) {
        int block = kQueryLanes * i + q.part;
        for (int w = 0; w < 8; w++) {
            q.pair[i][w] = 0;
        }
        if (q.exists && block < KMLA_QUERY_DIMS / 16) {
            load_bf16(q.record + 32 * block, q.pair[i]);
        }
    }
}

KMLA_DEVICE void stage_vector(const kmla_i_reader_args& args, const query_share& q) {
    int n = q.n, part = q.part;
    float amax = 0, factor;
    if (q.plain) {
#pragma unroll
        for (int i = 0; i < kQueryParts; i++) {
            amax = lane_amax(q.pair[i], amax);
        }
    } else {
#pragma unroll 1
        for (int i = 0; i < kQueryParts; i++) {
            uint32_t pair[8];
            load_query_part(args, q.record, q.exists, i, part, pair);
            amax = lane_amax(pair, amax);
        }
    }
    amax = vector_amax(amax);
    int exponent = minimum(maximum((int)(float_bits(amax) >> 23), 64), 254);
    factor = bits_float((uint32_t)(127 + 14 + 127 - exponent) << 23);
    if (q.plain) {
#pragma unroll
        for (int i = 0; i < kQueryParts; i++) {
            if (kQueryLanes * i + part < KMLA_QUERY_DIMS / 16) {
                store_query_block(n, kQueryLanes * i + part, q.pair[i], factor);
            }
        }
    } else {
#pragma unroll 1
        for (int i = 0; i < kQueryParts; i++) {
            uint32_t pair[8];
            load_query_part(args, q.record, q.exists, i, part, pair);
            if (kQueryLanes * i + part < KMLA_QUERY_DIMS / 16) {
                store_query_block(n, kQueryLanes * i + part, pair, factor);
            }
        }
    }
    if (part == 0) {
        terms()[n / 2].scale[n % 2] =
            args.score_scale * bits_float((uint32_t)(exponent - 14) << 23);
        reference_of(n) = kNoReference;
        weight_scales()[n] = 1;
    }
}

KMLA_DEVICE void stage_query(const kmla_i_reader_args& args, const query_share& q) {
    if (q.n < kTile) { // whole warps
        stage_vector(args, q);
    }
    fence_async_reads();
}

// ---- KV to shared memory, by the value warps: runs of 32 tokens

KMLA_DEVICE bool copies_in_bulk(const block_place& s) { return kPitch == kRecordBytes && s.bulk; }

// In bulk: lanes 0, 1 .. of the first value warp take a run each.

// The table's entry for the page of a run, -1 if none of its tokens is wanted.
KMLA_DEVICE int look_up_run(const kmla_i_reader_args& args, const block_place& s, int token) {
    bool wanted = token < bounds().end && token > bounds().begin - kRunTokens;
    return wanted ? table_entry(args, s.group, token) : -1;
}

KMLA_DEVICE void copy_run_in_bulk(const kmla_i_reader_args& args, int slot, int token, int entry) {
    int first = minimum(maximum(bounds().begin - token, 0), kRunTokens);
    int last = entry < 0 ? first : maximum(minimum(bounds().end - token, kRunTokens), first);
    uint32_t bytes = (uint32_t)((last - first) * kRecordBytes);
    run_tokens(slot) = bytes ? 0xFFFFFFFFu << first & 0xFFFFFFFFu >> (kRunTokens - last) : 0;
    barrier_arrive_expect(arrival_of(slot), bytes);
    if (bytes) {
        uint64_t from = record_address(args, entry, token + first, kRecordBytes);
        copy_bulk(records_of(slot) + first * kPitch, (const void*)from, bytes, arrival_of(slot));
    }
}

// Record by record: all value warps take a share of each run.

// The table's entry for this lane's token of a run, -1 if it is not wanted.
KMLA_DEVICE int look_up_record(const kmla_i_reader_args& args, const block_place& s, int token) {
    token += s.lane;
    bool wanted = token >= bounds().begin && token < bounds().end;
    return wanted ? table_entry(args, s.group, token) : -1;
}

// Zeros where there is no record.
KMLA_DEVICE void copy_run_of_records(const kmla_i_reader_args& args, const block_place& s, int slot,
                                     int token, int entry) {
    const int share = kRunTokens / kValueWarps;
    uint64_t address = record_address(args, entry, token + s.lane, kRecordBytes);
    address = entry >= 0 ? address : 0;
    uint32_t exists = ballot(entry >= 0);
#pragma unroll 1
    for (int i = s.warp * share; i < (s.warp + 1) * share; i++) {
        uint64_t record = shuffle(address, i);
        for (int at = 16 * s.lane; at < kRecordBytes; at += 16 * 32) {
            copy_async_16(records_of(slot) + i * kPitch + at,
                          (const void*)((record ? record : args.kv) + at), record != 0);
        }
    }
    copy_arrive(arrival_of(slot));
    if (s.warp == 0 && s.lane == 0) {
        run_tokens(slot) = exists;
        barrier_arrive(arrival_of(slot));
    }
}

// Arrivals that complete a run: of the lane that copies in bulk, or of all that copy records and of
// the one that says which there are.
KMLA_DEVICE uint32_t run_arrivals(const block_place& s) {
    return copies_in_bulk(s) ? 1 : kValueThreads + 1;
}

// Fills the ring.
KMLA_DEVICE void copy_first_runs(const kmla_i_reader_args& args, const block_place& s,
                                 const token_walk& walk) {
    int runs = minimum(kStages, 2 * walk.steps);
    if (copies_in_bulk(s)) {
        if (s.warp == 0 && s.lane < runs) {
            int token = walk.first + s.lane * kRunTokens;
            copy_run_in_bulk(args, s.lane, token, look_up_run(args, s, token));
        }
        return;
    }
    int entry = look_up_record(args, s, walk.first);
#pragma unroll 1
    for (int run = 0; run < runs; run++) {
        int token = walk.first + run * kRunTokens;
        int next = run + 1 < runs ? look_up_record(args, s, token + kRunTokens) : -1;
        copy_run_of_records(args, s, run, token, entry);
        entry = next;
    }
}

// What a value thread needs to start the copies of the two runs that take the place of a step's.
struct next_copies {
    int run;      // the first of the two
    int entry[2]; // in bulk only the lane's own
};

KMLA_DEVICE void look_ahead(const kmla_i_reader_args& args, const block_place& s,
                            const token_walk& walk, next_copies& next) {
    if (next.run >= 2 * walk.steps) {
        return; // and nowhere near the largest token
    }
    int token = walk.first + next.run * kRunTokens;
    if (!copies_in_bulk(s)) {
        next.entry[0] = look_up_record(args, s, token);
        if (next.run + 1 < 2 * walk.steps) {
            next.entry[1] = look_up_record(args, s, token + kRunTokens);
        }
    } else if (s.warp == 0 && s.lane < 2 && next.run + s.lane < 2 * walk.steps) {
        next.entry[0] = look_up_run(args, s, token + s.lane * kRunTokens);
    }
}

// `place`: of the first of the two runs whose place is free now.
KMLA_DEVICE void copy_next_runs(const kmla_i_reader_args& args, const block_place& s,
                                const token_walk& walk, ring_place place, next_copies& next) {
    int left = 2 * walk.steps - next.run;
    int token = left > 0 ? walk.first + next.run * kRunTokens : 0;
    if (!copies_in_bulk(s)) {
        for (int i = 0; i < 2 && i < left; i++) {
            copy_run_of_records(args, s, place_after(place, i).slot, token + i * kRunTokens,
                                next.entry[i]);
        }
    } else if (s.warp == 0 && s.lane < 2 && s.lane < left) {
        copy_run_in_bulk(args, place_after(place, s.lane).slot, token + s.lane * kRunTokens,
                         next.entry[0]);
    }
    next.run += 2;
    look_ahead(args, s, walk, next);
}

// ---- QK: scores of a score warp's 16 tokens of a step

// Where a score thread is.
struct score_place {
    int group; // which of the two; its weight buffer
    int thread, warp, lane, row_in_quad, column;
    int token; // of its two, the first within the step; the other is 8 on
};

// Descriptor of a k16 step of the query, from that of the first.
KMLA_DEVICE uint64_t query_descriptor(uint64_t first, int step_of_16) {
    return first + (uint64_t)(step_of_16 / 4 * kTile * 128 / 16 + step_of_16 % 4 * 2);
}

// Raw words of a batch of k16 steps: of the thread's two tokens, one of codes or two of BF16.
typedef uint32_t raw_batch[kBatchSteps][4];
typedef uint32_t fragment_batch[kBatchSteps][4];

KMLA_DEVICE void load_batch(const uint8_t* codes, raw_batch& raw) {
#pragma unroll
    for (int k = 0; k < kBatchSteps; k++) {
        raw[k][0] = *(const uint32_t*)(codes + 16 * k);
        raw[k][1] = *(const uint32_t*)(codes + 16 * k + 8 * kPitch);
    }
}

KMLA_DEVICE void load_rope(const uint8_t* record, int column, int batch, raw_batch& raw) {
#pragma unroll
    for (int k = 0; k < kBatchSteps; k++) {
        const uint8_t* at = record + KMLA_PACKED_ROPE_OFFSET + 32 * (batch * kBatchSteps + k) +
                            8 * column;
        word2 low = *(const word2*)at, high = *(const word2*)(at + 8 * kPitch);
        raw[k][0] = low.x, raw[k][1] = high.x, raw[k][2] = low.y, raw[k][3] = high.y;
    }
}

KMLA_DEVICE void batch_to_fragments(const raw_batch& raw, bool rope_of_bf16, fragment_batch& a) {
#pragma unroll
    for (int k = 0; k < kBatchSteps; k++) {
        if (rope_of_bf16) {
            for (int i = 0; i < 4; i++) {
                a[k][i] = raw[k][i];
            }
            continue;
        }
        uint32_t low[2], high[2];
        e4m3x4_to_f16(raw[k][0], low);
        e4m3x4_to_f16(raw[k][1], high);
        a[k][0] = low[0], a[k][1] = high[0], a[k][2] = low[1], a[k][3] = high[1];
    }
}

// Codes are multiplied as they are, group by group into the same sums. Between groups these are
// multiplied by the token's scale of the group before over that of the next, in the end by the
// last.
struct key_scales {
    float factor[2][kGroups]; // of the thread's two tokens: behind each group
};

// A scale below 2^-kFaintGroup of the token's largest, as that of zeros, would overflow such a
// quotient. It is taken for that much: less than rounding of any sum that the group is part of.
constexpr int kFaintGroup = 80;

KMLA_DEVICE key_scales load_key_scales(const uint8_t* record) {
    key_scales scales;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        word4 bits = *(const word4*)(record + i * 8 * kPitch + KMLA_PACKED_SCALE_OFFSET);
        uint32_t of_group[kGroups] = {bits.x, bits.y, bits.z, bits.w}, largest = 0;
#pragma unroll
        for (int g = 0; g < kGroups; g++) {
            largest = maximum(largest, of_group[g] & 0x7FFFFFFFu);
        }
        // Scales are brought near 1, so that the least is a normal number: times 2^-e of the
        // largest.
        uint32_t power = largest & 0x7F800000u;
        float to_one = bits_float((254u << 23) - (power < 253u << 23 ? power : 253u << 23));
        float before = 1;
#pragma unroll
        for (int g = 0; g < kGroups; g++) {
            float scale = bits_float(of_group[g]) * to_one;
            const float least = bits_float((uint32_t)(127 - kFaintGroup) << 23);
            scale = maximum(scale, -scale) < least ? least : scale;
            if (g > 0) {
                scales.factor[i][g - 1] = before * reciprocal(scale);
            }
            before = scale;
        }
        // A scale that is no number makes the score none; scales that are all 0 make it 0.
        float last = before * bits_float(power > 0 ? power : 1u << 23);
        last = largest == 0 ? 0 : last;
        scales.factor[i][kGroups - 1] = largest < 0x7F800000u ? last : bits_float(0x7FC00000u);
    }
    return scales;
}

KMLA_DEVICE void scale_scores(accumulators& score, const key_scales& scales, int group) {
#pragma unroll
    for (int i = 0; i < kColumns * 4; i++) {
        score[i] *= scales.factor[i / 2 % 2][group];
    }
}

KMLA_DEVICE bool is_rope_of_bf16(int batch) { return kPacked && batch >= kLatentBatches; }

KMLA_DEVICE void load_any_batch(const uint8_t* record, int column, int batch, raw_batch& raw) {
    if (is_rope_of_bf16(batch)) {
        load_rope(record, column, batch - kLatentBatches, raw);
    } else {
        load_batch(record + 16 * kBatchSteps * batch + 4 * column, raw);
    }
}

// A batch is multiplied while the next is converted and the raw words of the one after it come.
KMLA_DEVICE void multiply_keys(const score_place& s, const uint8_t* record, accumulators& score) {
    const int per_group = kGroupSteps / kBatchSteps;
    key_scales scales;
    raw_batch raw;
    fragment_batch a[2];
    uint64_t query = matrix_descriptor(query_block(opaque(0))); // takes no register elsewhere
    load_any_batch(record, s.column, 0, raw);
    if (kPacked) {
        scales = load_key_scales(record);
    }
    batch_to_fragments(raw, false, a[0]);
    load_any_batch(record, s.column, 1, raw);
#pragma unroll
    for (int batch = 0; batch < kBatches; batch++) {
        if (kPacked && batch > 0 && batch <= kLatentBatches && batch % per_group == 0) {
            wgmma_wait<0>();
            scale_scores(score, scales, batch / per_group - 1);
        }
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kBatchSteps; k++) {
            uint64_t b = query_descriptor(query, batch * kBatchSteps + k);
            if (is_rope_of_bf16(batch)) {
                wgmma_bf16(score, a[batch % 2][k], b, true);
            } else {
                wgmma_f16(score, a[batch % 2][k], b, batch + k > 0);
            }
        }
        wgmma_commit();
        if (batch + 1 < kBatches) {
            wgmma_wait<1>(); // the batch before is done with its registers
            batch_to_fragments(raw, is_rope_of_bf16(batch + 1), a[(batch + 1) % 2]);
        }
        if (batch + 2 < kBatches) {
            load_any_batch(record, s.column, batch + 2, raw);
        }
    }
    wgmma_wait<0>();
}

// ---- scales of values in packed records: as in the portable reader, 2^exponent goes with the
// weight, the rest with V

// From kLeastExponent to 126. 2^(exponent - kMidExponent), its inverse and products of it with
// weights are normal floats.
constexpr int kLeastExponent = -118, kMidExponent = 8;

KMLA_DEVICE float power_of(int exponent) { return bits_float((uint32_t)(127 + exponent) << 23); }
// Of 2^(exponent - kMidExponent).
KMLA_DEVICE int exponent_of(float power) {
    return kMidExponent + (int)(float_bits(power) >> 23) - 127;
}

// 2^(exponent - kMidExponent) of the thread's two tokens; the ratios of all four groups to the
// buffer.
KMLA_DEVICE void store_ratios(const score_place& s, const uint8_t* record, int buffer,
                              float (&of_token)[2]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        word4 bits = *(const word4*)(record + i * 8 * kPitch + KMLA_PACKED_SCALE_OFFSET);
        uint32_t of_group[kGroups] = {bits.x, bits.y, bits.z, bits.w}, largest = 0;
        for (int g = 0; g < kGroups; g++) {
            uint32_t magnitude = of_group[g] & 0x7FFFFFFFu;
            of_group[g] = magnitude < 0x7F800000u ? of_group[g] : 0;
            largest = maximum(largest, magnitude < 0x7F800000u ? magnitude : 0);
        }
        uint32_t power = (largest + 0x007FFFFFu) & 0x7F800000u; // 2^exponent
        power = power < (253u << 23) ? power : 253u << 23;
        power = maximum(power, (uint32_t)(127 + kLeastExponent) << 23);
        of_token[i] = bits_float(power - ((uint32_t)kMidExponent << 23));
        // The four lanes of a token store a group each.
        uint32_t mine = s.column == 0   ? of_group[0]
                        : s.column == 1 ? of_group[1]
                        : s.column == 2 ? of_group[2]
                                        : of_group[3];
        float ratio = bits_float(mine) * bits_float((254u << 23) - power);
        ratios_of(buffer, s.column)[s.token + 8 * i] = (uint16_t)pack_f16(ratio, 0.0f);
    }
}

// ---- softmax, in registers: the thread has two tokens and every fourth pair of vectors

// What a vector does not see has the score -inf. `tokens`: those of the warp that exist.
KMLA_DEVICE void mask_scores(const score_place& s, int first_token, uint32_t tokens,
                             accumulators& score) {
    int token = first_token + s.token;
    tokens >>= s.row_in_quad;
#pragma unroll
    for (int j = 0; j < kColumns; j++) {
        for (int i = 0; i < 2; i++) {
            vector_range range = range_of(8 * j + 2 * s.column + i);
            bool low = token >= range.begin && token < range.end && (tokens & 1);
            bool high = token + 8 >= range.begin && token + 8 < range.end && (tokens >> 8 & 1);
            score[4 * j + i] = low ? score[4 * j + i] : -infinity();
            score[4 * j + 2 + i] = high ? score[4 * j + 2 + i] : -infinity();
        }
    }
}

// The two entries of the thread's vectors of column j.
struct of_two {
    float value[2];
};
KMLA_DEVICE of_two load_two(const score_place& s, const float* of_vectors, int j) {
    word2 bits = *(const word2*)(of_vectors + 8 * j + 2 * s.column);
    return of_two{{bits_float(bits.x), bits_float(bits.y)}};
}
KMLA_DEVICE pair_terms load_terms(const score_place& s, int j) {
    word4 bits = *(const word4*)(terms() + 4 * j + s.column);
    return pair_terms{{bits_float(bits.x), bits_float(bits.y)},
                      {bits_float(bits.z), bits_float(bits.w)}};
}

// A step's weights of a column by the references as they are. `power`: of the thread's two tokens.
struct column_weights {
    float sum[2];     // of the two tokens', as the sum takes them, by vector
    uint32_t of_v[2]; // f16 pairs of vectors: the first token's, the second's
};
KMLA_DEVICE column_weights weigh_column(const score_place& s, const accumulators& score, int j,
                                        const float (&power)[2]) {
    pair_terms of = load_terms(s, j);
    column_weights weights;
    float low[2], high[2];
    for (int i = 0; i < 2; i++) {
        // Rounded before the difference, as the reference was: huge scores cancel exactly.
        low[i] = exp2_fast(score[4 * j + i] * of.scale[i] - of.reference[i]);
        high[i] = exp2_fast(score[4 * j + 2 + i] * of.scale[i] - of.reference[i]);
        weights.sum[i] = low[i] + high[i];
    }
    if (kPacked) {
        of_two of_v = load_two(s, weight_scales(), j);
        for (int i = 0; i < 2; i++) {
            low[i] = low[i] * power[0] * of_v.value[i];
            high[i] = high[i] * power[1] * of_v.value[i];
        }
    }
    weights.of_v[0] = pack_f16(low[0], low[1]);
    weights.of_v[1] = pack_f16(high[0], high[1]);
    return weights;
}

constexpr float kLargestSum = 1.15292150e18f; // 2^60; far more and sums might overflow

// An f16 weight above 2^growth, or infinite.
KMLA_DEVICE bool is_large(uint32_t weight) {
    return weight > (15u + KMLA_I_REFERENCE_GROWTH) << 10;
}

// Weights into the buffer, and their sums. Whether some vector has outgrown its reference, which
// makes both worthless.
KMLA_DEVICE bool store_weights(const score_place& s, const accumulators& score,
                               const float (&power)[2], float (&sum)[kColumns][2]) {
    uint8_t* block = weight_block(s.group);
    int chunk = s.warp * 2 + s.lane / 8 % 2;
    uint32_t top = 0;
    float top_sum = 0;
    // Some columns are computed, then stored: stores are in order, what is between them need not
    // be.
    constexpr int some = kColumns > 5 ? 3 : 5;
#pragma unroll
    for (int first = 0; first < kColumns; first += some) {
        uint32_t of_v[some][2];
#pragma unroll
        for (int j = first; j < first + some && j < kColumns; j++) {
            column_weights weights = weigh_column(s, score, j, power);
            for (int i = 0; i < 2; i++) {
                sum[j][i] = weights.sum[i];
                of_v[j - first][i] = weights.of_v[i];
                top_sum = maximum(top_sum, weights.sum[i]);
                top = maximum_f16x2(top, weights.of_v[i]);
            }
        }
#pragma unroll
        for (int j = first; j < first + some && j < kColumns; j++) {
            store_matrix_x2_transposed(swizzled(block, 8 * j + s.lane % 8, chunk),
                                       of_v[j - first][0], of_v[j - first][1]);
        }
    }
    return top_sum > kLargestSum || is_large(top & 0xFFFFu) || is_large(top >> 16);
}

KMLA_DEVICE void meet_group(const score_place& s) {
    named_barrier_sync(kScoreBarrier + (uint32_t)s.group, kScoreThreads);
}

// Whether any thread of the group says so. They meet here.
KMLA_DEVICE bool any_of_group(const score_place& s, bool mine) {
    uint32_t lanes = ballot(mine);
    if (s.lane == 0) {
        votes_of(s.group)[s.warp] = lanes;
    }
    meet_group(s);
    word4 votes = *(const word4*)votes_of(s.group);
    return (votes.x | votes.y | votes.z | votes.w) != 0;
}

// ---- references, the rare case: maxima of each vector over the step

// What is looked for: the largest score; the largest log2 of what weighs V above the reference of
// the sum; 1 if it has outgrown its reference.
enum top_kind { kTopScore, kTopWeight, kOutgrown };

// Scratch: a weight buffer that is the group's, fp32 [tile][32], one of each warp's eight rows. A
// vector's are rotated, so that neither stores nor loads of a warp fall into the same banks.
KMLA_DEVICE float* scratch_of(const score_place& s, int n) {
    return (float*)weight_block(s.group) + 32 * n;
}

template <top_kind kind>
KMLA_DEVICE void store_tops(const score_place& s, const accumulators& score,
                            const float (&power)[2]) {
#pragma unroll
    for (int j = 0; j < kColumns; j++) {
        pair_terms of = load_terms(s, j);
        column_weights weights = weigh_column(s, score, j, power);
        for (int i = 0; i < 2; i++) {
            float low = score[4 * j + i] * of.scale[i], high = score[4 * j + 2 + i] * of.scale[i];
            float of_low = (float)exponent_of(power[0]), of_high = (float)exponent_of(power[1]);
            float top = maximum(low, high);
            if (kind == kTopWeight) {
                top = maximum(low - of.reference[i] + of_low, high - of.reference[i] + of_high);
            } else if (kind == kOutgrown) {
                top = weights.sum[i] > kLargestSum || is_large(weights.of_v[0] >> 16 * i & 0xFFFFu) ||
                      is_large(weights.of_v[1] >> 16 * i & 0xFFFFu);
            }
            int row = s.warp * 8 + s.row_in_quad;
            scratch_of(s, 8 * j + 2 * s.column + i)[(row + 8 * s.column) % 32] = top;
        }
    }
}

// The largest over the step's tokens, of the thread's vector n < kTile.
template <top_kind kind>
KMLA_DEVICE float find_top(const score_place& s, const accumulators& score,
                           const float (&power)[2]) {
    float top = -infinity();
    meet_group(s); // the scratch is free, and what it is computed from up to date
    store_tops<kind>(s, score, power);
    meet_group(s);
    if (s.thread < kTile) {
        for (int i = 0; i < 8; i++) {
            word4 four = *(const word4*)(scratch_of(s, s.thread) + 4 * ((i + s.thread) % 8));
            top = maximum(top, maximum(maximum(bits_float(four.x), bits_float(four.y)),
                                       maximum(bits_float(four.z), bits_float(four.w))));
        }
    }
    return top;
}

KMLA_DEVICE float round_up(float x) { // |x| < 2^22
    float rounded = (x + 12582912.0f) - 12582912.0f;
    return rounded < x ? rounded + 1 : rounded;
}

KMLA_DEVICE float weight_scale(int a) { return power_of(kMidExponent - a); }
KMLA_DEVICE int exponent_of_scale(float scale) {
    return kMidExponent + 127 - (int)(float_bits(scale) >> 23);
}

// New references where there are none yet or weights have outgrown them, and factors for what was
// summed under the old ones. `first`: no vector has one yet. All threads of the group come here,
// and have met again when it ends.
KMLA_DEVICE void raise_references(const score_place& s, bool first, const accumulators& score,
                                  const float (&power)[2]) {
    int n = s.thread;
    bool mine = n < kTile;
    float old = mine ? reference_of(n) : 0, before = mine ? weight_scales()[n] : 1;
    bool grown = first || find_top<kOutgrown>(s, score, power) > 0;
    float top = find_top<kTopScore>(s, score, power);
    float factor = 1, now = before;
    grown = mine && grown && top > -infinity();
    if (grown) {
        float raised = maximum(old, top - KMLA_I_REFERENCE_BELOW);
        factor = old == kNoReference ? 0 : exp2_fast(old - raised);
        reference_of(n) = raised;
    }
    if (kPacked) {
        float top_weight = find_top<kTopWeight>(s, score, power);
        bool outgrown = top_weight - (float)exponent_of_scale(before) >
                        KMLA_I_REFERENCE_GROWTH - KMLA_I_REFERENCE_BELOW;
        if (grown && (old == kNoReference || outgrown)) {
            int a = (int)round_up(maximum(top_weight, -200.0f)) - KMLA_I_REFERENCE_BELOW;
            now = weight_scale(maximum(minimum(a, 126), kLeastExponent));
            weight_scales()[n] = now;
        }
    }
    if (mine) {
        sum_factors_of(s.group)[n] = factor;
        rescales_of(s.group)[n] = factor * now * bits_float((254u << 23) - float_bits(before));
    }
    meet_group(s);
}

// The thread's sums of weights, of its two vectors of column j: used once a step, not worth
// registers.
KMLA_DEVICE word2& sums_of(const score_place& s, int j) {
    return ((word2*)(shared_memory() + kSumsAt))[(2 * j + s.group) * kScoreThreads + s.thread];
}

KMLA_DEVICE void scale_sums(const score_place& s, int buffer) {
#pragma unroll
    for (int j = 0; j < kColumns; j++) {
        of_two factor = load_two(s, sum_factors_of(buffer), j);
        word2 sum = sums_of(s, j);
        sums_of(s, j) = word2{float_bits(bits_float(sum.x) * factor.value[0]),
                              float_bits(bits_float(sum.y) * factor.value[1])};
    }
}

KMLA_DEVICE void add_to_sums(const score_place& s, const float (&of_step)[kColumns][2]) {
#pragma unroll
    for (int j = 0; j < kColumns; j++) {
        word2 sum = sums_of(s, j);
        sums_of(s, j) = word2{float_bits(bits_float(sum.x) + of_step[j][0]),
                              float_bits(bits_float(sum.y) + of_step[j][1])};
    }
}

// ---- the walk of a score group over its steps

// Before a group's softmax the other's of the step before is done: what that left counts.
KMLA_DEVICE void take_turn(const score_place& s) {
    named_barrier_sync(kTurnBarrier + (uint32_t)s.group, 2 * kScoreThreads);
    if (rescaled(1 - s.group)) {
        scale_sums(s, 1 - s.group);
    }
}
KMLA_DEVICE void pass_turn(const score_place& s) {
    named_barrier_arrive(kTurnBarrier + (uint32_t)(1 - s.group), 2 * kScoreThreads);
}

// Weights of the step, in the group's buffer when its threads have met at the end. `first`: no
// vector has a reference yet.
KMLA_DEVICE void softmax_step(const score_place& s, bool first, const accumulators& score,
                              const float (&power)[2]) {
    float of_step[kColumns][2];
    bool grown = first;
    if (!first) {
        grown = store_weights(s, score, power, of_step);
        fence_async_reads();
        grown = any_of_group(s, grown);
    }
    if (s.thread == 0) {
        rescaled(s.group) = grown;
    }
    if (grown) {
        raise_references(s, first, score, power);
        scale_sums(s, s.group);
        store_weights(s, score, power, of_step);
        fence_async_reads();
        meet_group(s);
    }
    pass_turn(s); // of the references nothing is read any more
    add_to_sums(s, of_step);
}

// Sums over lanes, then warps and groups ascending; factors and targets of the results. The scratch
// is the buffer of the step behind the last.
KMLA_DEVICE void finish_softmax(const kmla_i_reader_args& args, const score_place& s, int buffer) {
    float* rows = (float*)weight_block(buffer);
#pragma unroll
    for (int j = 0; j < kColumns; j++) {
        word2 sum = sums_of(s, j);
        for (int i = 0; i < 2; i++) {
            float of_warp = bits_float(i ? sum.y : sum.x);
            of_warp += shuffle_xor(of_warp, 4);
            of_warp += shuffle_xor(of_warp, 8);
            of_warp += shuffle_xor(of_warp, 16);
            if (s.row_in_quad == 0) {
                rows[(s.group * kScoreWarps + s.warp) * kTile + 8 * j + 2 * s.column + i] = of_warp;
            }
        }
    }
    named_barrier_sync(kSumBarrier, 2 * kScoreThreads);
    int n = s.thread;
    if (s.group == 0 && n < kTile) {
        float total = 0;
        for (int row = 0; row < 2 * kScoreWarps; row++) {
            total += rows[row * kTile + n];
        }
        float scale = kPacked ? exp2_wide((float)exponent_of_scale(weight_scales()[n]))
                              : args.kv_scale;
        finish_vector(args, n, total, reference_of(n), scale);
    }
}

// A buffer is free for step i when the values of step i - 2 are weighed.
KMLA_DEVICE void take_buffer(int buffer, int step) {
    if (step >= 2) {
        barrier_wait(weights_free(buffer), (uint32_t)(step / 2 - 1) & 1);
    }
}

KMLA_DEVICE score_place find_score_place(int of_block) {
    score_place s;
    unsigned thread = (unsigned)of_block; // so that divisions are shifts
    s.group = (int)(thread / kScoreThreads);
    s.thread = (int)(thread % kScoreThreads);
    s.warp = (int)(thread % kScoreThreads / 32);
    s.lane = (int)(thread % 32);
    s.row_in_quad = (int)(thread % 32 / 4);
    s.column = (int)(thread % 4);
    s.token = 16 * s.warp + s.row_in_quad;
    return s;
}

KMLA_DEVICE void score_tokens(const kmla_i_reader_args& args) {
    score_place s = find_score_place(opaque(thread_index()));
    token_walk walk = find_walk();
    for (int j = 0; j < kColumns; j++) {
        sums_of(s, j) = word2{0, 0};
    }
    int step = s.group ^ walk.odd; // the group's first
    ring_place low = place_after(ring_place{0, 0}, 2 * step);
#pragma unroll 1
    for (; step < walk.steps; step += 2) {
        s = find_score_place(opaque(thread_index())); // places take no registers from step to step
        ring_place high = place_after(low, 1);
        int token = bounds().begin / kStep * kStep + step * kStep;
        bool full = wait_for_runs(token, low, high);
        int slot = s.warp < 2 ? low.slot : high.slot;
        uint32_t tokens = run_tokens(slot) >> (s.warp % 2 * 16);
        const uint8_t* record =
            records_of(slot) + (s.warp % 2 * 16 + s.row_in_quad) * kPitch;
        accumulators score;
        float power[2] = {1, 1};
        multiply_keys(s, record, score);
        s = find_score_place(opaque(thread_index()));
        take_buffer(s.group, step);
        if (kPacked) {
            store_ratios(s, record, s.group, power);
        }
        if (!full) {
            mask_scores(s, token, tokens, score);
        }
        if (step > 0) {
            take_turn(s);
            s = find_score_place(opaque(thread_index()));
        }
        softmax_step(s, step == 0, score, power);
        if (s.thread == 0) {
            barrier_arrive(weights_ready(s.group));
        }
        low = place_after(low, 4);
    }
    launch_dependents();
    if (step == walk.steps && step > 0) { // the last step was the other group's
        take_turn(s);
    }
    int next = (walk.steps + walk.odd) % 2;
    take_buffer(next, walk.steps);
    finish_softmax(args, s, next);
    if (s.group == 0) {
        named_barrier_arrive(kEndBarrier, kScoreThreads + kValueThreads);
    }
}

// ---- PV: 64 dims a value warp

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

// Converted values of a k16 step; with registers to spare those of two.
constexpr int kValueBuffers = kTile <= 32 ? 2 : 1;

// V^T P^T of a step's first `steps` k16 steps. `token`: raw bytes of the first.
template <bool masked>
KMLA_DEVICE void multiply_values(const block_place& s, const uint8_t* low, const uint8_t* high,
                                 int steps, int buffer, word2 (&token)[4],
                                 accumulators (&out)[4]) {
    const uint32_t* ratios = (const uint32_t*)ratios_of(buffer, s.warp / 2) + s.column;
    uint64_t b = matrix_descriptor(weight_block(buffer));
    constexpr int buffers = masked ? 1 : kValueBuffers;
    uint32_t a[buffers][4][4];
#pragma unroll
    for (int k = 0; k < kStep / 16; k++) {
        if (masked && k >= steps) {
            break;
        }
        values_to_fragments<masked>(token, ratios + 8 * k, a[k % buffers]);
        if (k + 1 < kStep / 16) {
            load_values((k + 1 < 2 ? low : high) + (k + 1) % 2 * 16 * kPitch, token);
        }
        wgmma_fence();
#pragma unroll
        for (int m = 0; m < 4; m++) {
            wgmma_f16(out[m], a[k % buffers][m], b + (uint64_t)(2 * k), true);
        }
        wgmma_commit();
        wgmma_wait<buffers - 1>();
    }
    wgmma_wait<0>();
}

KMLA_DEVICE void rescale(const block_place& s, int buffer, accumulators (&out)[4]) {
#pragma unroll
    for (int j = 0; j < kColumns; j++) {
        word2 bits = *(const word2*)(rescales_of(buffer) + 8 * j + 2 * s.column);
        float factor[2] = {bits_float(bits.x), bits_float(bits.y)};
        for (int m = 0; m < 4; m++) {
            for (int i = 0; i < 4; i++) {
                out[m][4 * j + i] *= factor[i % 2];
            }
        }
    }
}

// s.warp counts from the first value warp.
KMLA_DEVICE void weigh_values(const kmla_i_reader_args& args, const block_place& s,
                              const token_walk& walk) {
    accumulators out[4];
#pragma unroll
    for (int m = 0; m < 4; m++) {
        for (int i = 0; i < kColumns * 4; i++) {
            out[m][i] = 0;
        }
    }
    int offset = 2 * s.column * kPitch + 64 * s.warp + 8 * s.row_in_quad; // of the thread's bytes
    next_copies next = {kStages, {-1, -1}};
    look_ahead(args, s, walk, next);
    ring_place place = {0, 0}, before = {0, 0};
#pragma unroll 1
    for (int step = 0; step < walk.steps; step++) {
        int buffer = (step + walk.odd) % 2, token = walk.first + step * kStep;
        word2 raw[4];
        if (step > 0) { // a step late, so that nobody waits for the slowest warp
            barrier_wait(weights_free(1 - buffer), (uint32_t)((step - 1) / 2) & 1);
            copy_next_runs(args, s, walk, before, next);
        }
        ring_place after = place_after(place, 1);
        bool full = wait_for_runs(token, place, after);
        const uint8_t* low = records_of(place.slot) + offset;
        const uint8_t* high = records_of(after.slot) + offset;
        load_values(low, raw);
        barrier_wait(weights_ready(buffer), (uint32_t)(step / 2) & 1);
        if (rescaled(buffer)) {
            rescale(s, buffer, out);
        }
        if (full) {
            multiply_values<false>(s, low, high, kStep / 16, buffer, raw, out);
        } else {
            int steps = (minimum(bounds().end - token, kStep) + 15) / 16;
            multiply_values<true>(s, low, high, steps, buffer, raw, out);
        }
        if (s.lane == 0) {
            barrier_arrive(weights_free(buffer));
        }
        before = place;
        place = place_after(after, 1);
    }
    named_barrier_sync(kEndBarrier, kScoreThreads + kValueThreads);
    store_results(args, s, out);
}

// ---- the block

KMLA_DEVICE void init_barriers(const block_place& s) {
    for (int slot = 0; slot < kStages; slot++) {
        barrier_init(arrival_of(slot), run_arrivals(s));
    }
    for (int buffer = 0; buffer < 2; buffer++) {
        barrier_init(weights_ready(buffer), 1);
        barrier_init(weights_free(buffer), kValueWarps);
    }
    barrier_init_fence();
}

KMLA_KERNEL(kmla_reader, kmla_i_reader_args, KMLA_I_HOPPER_THREADS, 1) {
    wait_dependency();
    if (block_z() == args.groups) {
        clear_dead_rows(args);
        return;
    }
    block_place s;
    find_place(args, s);
    if (s.first_vector >= s.vectors) {
        return;
    }
    if (thread_index() == 0) {
        init_barriers(s);
    }
    query_share q;
    load_query(args, s, q); // under way while the ranges are found
    find_ranges(args, s, weight_block(0));
    sync_block();
    token_walk walk = find_walk();
    bool scores = s.warp < 2 * kScoreWarps;
    s.warp -= 2 * kScoreWarps;
    if (!scores) {
        copy_first_runs(args, s, walk);
    }
    stage_query(args, q);
    sync_block();
    if (scores) {
        registers_release<kScoreRegisters>();
        score_tokens(args);
    } else {
        registers_take<kValueRegisters>();
        weigh_values(args, s, walk);
    }
}

#endif
