// The portable reader: sm_80 and up, mma.sync.
//
// Operands are swapped: tokens are the M side of S^T = K q^T, latent dims the M side of
// O^T = V^T P^T, vectors the N side, whose step is 8. So each record is converted once a block, from
// raw bytes straight into fragments, and 99 heads pad to 104, not to 128.
//
// A step is 64 tokens (BF16 KV: 32). In QK its warps are 2 halves of the tokens x 4 groups of 128
// dims (and 16 rope lanes), whose query stays in registers. What they have is in units of 16 tokens
// x 8 vectors. The four warps of a half exchange their sums so that each unit has one owner, which
// sees it through softmax; each counts units from its own on, so that registers need no index. In PV
// a warp has 64 dims. A vector's bits do not depend on how vectors are tiled: no sum's order does.
//
// Exactness: codes and a query normalised by a power of two are exact in f16; scales enter in fp32
// after the sum over their group. P is f16, whose range is kept by a reference per vector: a
// token's weight carries the exponent of its largest scale, V only the rest (in (0,1]). Weights are
// computed by the references that are there; a vote says whether some vector has outgrown its own,
// and only then maxima are taken and the step's weights computed again.
//
// At 2,048 tokens a block runs four steps, and what it runs once costs most for being fetched. So the
// query is staged by rolled loops, and what a usual step does not need lies outside of its code.

#if defined(KMLA_TILE) && !defined(KMLA_HOPPER)

constexpr int kLatentSteps = KMLA_GROUP_DIMS / 16; // k16 steps of a warp's latent group
constexpr int kQuerySteps = kLatentSteps + 1;      // and one of 16 rope lanes
constexpr int kTokenTiles = kStep / 32;            // of 16 tokens: of a warp in QK
constexpr int kStepTiles = kStep / 16;
constexpr int kUnits = kColumns * kTokenTiles;     // of a half; unit u is of tile u % kTokenTiles
constexpr int kOwners = kUnits < kGroups ? kUnits : kGroups; // warps of a half: u % kOwners is owner
constexpr int kSlots = kUnits / kOwners;                     // units that an owner has
constexpr int kSources = kSlots > 1 ? 1 : kGroups - 1; // groups exchanged at a time: as room allows
constexpr int kWeightPitch = kStep + 8;            // so that rows fall into different banks
constexpr float kNoReference = -3.40282347e38f;    // of a vector without a token: any outgrows it

// ---- shared memory, in this order; the host computes the same sum

constexpr int kStagesAt = kSmallBytes;
// fp32 [2 halves][owners][slots][sources][32 lanes][4]
constexpr int kExchangeAt = kStagesAt + kStages * kStep * kPitch;
constexpr int kWeightsAt = kExchangeAt + 2 * kUnits * kSources * 512; // [1|2][tile][pitch]
constexpr int kRatiosAt = kWeightsAt + kTile * kWeightPitch * 2 * (kBf16 ? 2 : 1);
constexpr int kExponentsAt = kRatiosAt + (kPacked ? kStep * kGroups * 2 : 0); // f16 [4][step]
constexpr int kRunsAt = kExponentsAt + (kPacked ? kStep * 4 : 0);             // fp32 [step]
constexpr int kEnd = kRunsAt + (kPacked ? 32 * 32 : 0);                       // [32]
constexpr int kFreeAt = kFactsAt + (int)sizeof(tile_facts);                   // barriers
static_assert(kEnd == KMLA_SHARED_BYTES, "host and device layouts differ");
static_assert(kFreeAt + 8 * kStages <= kRangesAt, "more barriers fit");
static_assert((2 * kStepTiles) * kTile * 4 <= kWeightsAt - kExchangeAt, "maxima fit");
// The query on its way to registers: where the second step will be.
constexpr int kQueryAt = kStagesAt + kStep * kPitch;
static_assert(kTile * KMLA_QUERY_DIMS * 2 <= kStep * kPitch, "the query fits");

// Softmax of a unit: the lane's vectors are 2 * column and the next, its tokens row_in_quad and + 8.
struct unit_state {
    float sum_reference[2];    // log2; sum has exp2(score - sum_reference)
    float weight_reference[2]; // above that: weights are exp2(score - sum_reference + exponent - it)
    float sum[2];              // of the lane's own tokens
    float scale[2];            // what makes scores of sums, in log2 units
};

struct reader_state : block_place {
    int dims, half;     // in QK: the warp's group of dims, its half of the step's tokens
    int owner;          // whose units the warp counts from: dims, if that is an owner
    word2 query[kQuerySteps][kColumns]; // B fragments, of columns as column_of counts them
    unit_state unit[kSlots];
    float out[4][kColumns][4]; // O^T, as in store_results
};

KMLA_DEVICE uint8_t* stage_of(int step) {
    return shared_memory() + kStagesAt + step % kStages * kStep * kPitch;
}
KMLA_DEVICE uint16_t* weights() { return (uint16_t*)(shared_memory() + kWeightsAt); }
KMLA_DEVICE uint16_t* ratios_of(int group) {
    return (uint16_t*)(shared_memory() + kRatiosAt) + group * kStep;
}
KMLA_DEVICE float* exponents() { return (float*)(shared_memory() + kExponentsAt); }
// A lane's sums of an owner's unit from another group, which is `other` = its number ^ the owner's.
KMLA_DEVICE word4& exchanged(const reader_state& s, int owner, int slot, int other) {
    int row = ((s.half * kOwners + owner) * kSlots + slot) * kSources + (other - 1) % kSources;
    return ((word4*)(shared_memory() + kExchangeAt))[row * 32 + s.lane];
}
// By vector, of 16 tokens each: maxima, in the end sums. Where scores are exchanged, between times.
KMLA_DEVICE float* of_tokens(int tile) {
    return (float*)(shared_memory() + kExchangeAt) + tile * kTile;
}

// The warp's tile `i` of its half's tokens, its column `i` of vectors, as indices of the step's and of
// the tile's. Its tile and columns i * kOwners / kTokenTiles, 0 in the first slot, are those it owns.
KMLA_DEVICE int tile_of(const reader_state& s, int i) {
    return s.half * kTokenTiles + (i ^ s.owner % kTokenTiles);
}
KMLA_DEVICE int column_of(const reader_state& s, int i) { return i ^ s.owner / kTokenTiles; }
constexpr int kSlotColumns = kOwners / kTokenTiles; // from a slot's column to the next one's
// The lane's first vector of a slot, and whether there is such a slot.
KMLA_DEVICE int vector_of(const reader_state& s, int slot) {
    return 8 * column_of(s, slot * kSlotColumns) + 2 * s.column;
}
KMLA_DEVICE bool owns(const reader_state& s) { return kOwners == kGroups || s.owner == s.dims; }

// ---- the query: B fragments, f16 normalised by a power of two, or BF16 for BF16 KV
//
// A fragment is of 8 vectors and 16 dims. Lane l has vector l/4 and, of dims that meet codes, 4(l%4)..+3,
// the k order of the records' 4-byte words, so that A fragments need no shuffling; else mma's own order.
// Staging takes 16 lanes a vector and 8 dims a lane at a time: half of four lanes' fragments.

constexpr int kQueryChunks = (KMLA_QUERY_DIMS + 127) / 128; // of 16 lanes x 8 dims: groups, rope
KMLA_DEVICE constexpr bool meets_codes(bool rope) { return kE4m3 || (kPacked && !rope); }

// The fragment of a group's k16 step k and the tile's column j.
KMLA_DEVICE word2* staged_query(int group, int k, int j) {
    return (word2*)(shared_memory() + kQueryAt) + ((group * kQuerySteps + k) * kColumns + j) * 32;
}

// What a lane stages of vector n's chunk i.
struct query_piece {
    int dim;      // its first
    word4* at;    // as 8 BF16, in the end as fragments
    bool exists;  // rope is half a chunk
};
KMLA_DEVICE query_piece piece_of(const reader_state& s, int n, int i) {
    int part = s.lane % 16, group = i, step = part / 2; // of 16 dims
    if (i == kGroups) {
        group = step;
        step = kLatentSteps;
    }
    int lane = n % 8 * 4 + part % 2 * 2; // which has the first four
    return query_piece{128 * i + 8 * part,
                       (word4*)(staged_query(group % kGroups, step, n / 8) + lane),
                       i < kGroups || part < KMLA_ROPE_DIMS / 8};
}

KMLA_DEVICE int first_staged(const reader_state& s) { return thread_index() / 16; }
constexpr int kStagedAtOnce = KMLA_I_READER_THREADS / 16; // vectors

KMLA_DEVICE uint64_t query_record(const kmla_i_reader_args& args, const reader_state& s, int n) {
    int vector = s.first_vector + n;
    return args.query + (s.first_row + vector / args.heads) * args.query_row_stride +
           vector % args.heads * args.query_head_stride;
}

// Starts the copies of the query as it is: BF16, or in the upper half of a piece codes.
KMLA_DEVICE void load_query(const kmla_i_reader_args& args, const reader_state& s) {
#pragma unroll 1
    for (int n = first_staged(s); n < kTile; n += kStagedAtOnce) {
        bool exists = s.first_vector + n < s.vectors;
        uint64_t record = exists ? query_record(args, s, n) : args.query;
#pragma unroll 1
        for (int i = 0; i < kQueryChunks; i++) {
            query_piece piece = piece_of(s, n, i);
            bool packed_rope = args.query_format == KMLA_QUERY_PACKED && i == kGroups;
            if (!piece.exists) {
                continue;
            }
            if (!exists || args.query_format == KMLA_QUERY_BF16 || packed_rope) {
                uint64_t from = record + (packed_rope ? KMLA_PACKED_ROPE_OFFSET - 2 * KMLA_LATENT_DIMS
                                                      : 0);
                copy_async_16(piece.at, (const void*)(exists ? from + 2 * piece.dim : record), exists);
            } else {
                copy_async_8((word2*)piece.at + 1, (const void*)(record + piece.dim));
            }
        }
    }
    copy_async_commit();
}

// Eight codes times a scale, exactly, as BF16. An E4M3 query's one scale is in score_scale.
KMLA_DEVICE word4 codes_to_bf16(uint32_t low, uint32_t high, float scale) {
    float x[8];
    for (int i = 0; i < 4; i++) {
        x[i] = e4m3_to_float(low >> (8 * i) & 0xFF) * scale;
        x[4 + i] = e4m3_to_float(high >> (8 * i) & 0xFF) * scale;
    }
    return word4{pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]),
                 pack_bf16(x[6], x[7])};
}

KMLA_DEVICE float amax_of_pair(float amax, uint32_t pair) {
    pair &= 0x7FFF7FFFu;
    return maximum(amax, maximum(bf16_low(pair), bf16_high(pair)));
}
KMLA_DEVICE float amax_of_piece(float amax, const word4& x) {
    return amax_of_pair(amax_of_pair(amax_of_pair(amax_of_pair(amax, x.x), x.y), x.z), x.w);
}
// Over the 16 lanes of a vector.
KMLA_DEVICE float vector_amax(float amax) {
    for (int mask = 1; mask < 16; mask *= 2) {
        amax = maximum(amax, shuffle_xor(amax, mask));
    }
    return amax;
}

KMLA_DEVICE uint32_t round_pair_to_e4m3(uint32_t pair, float scale, float inverse) {
    return pack_bf16(round_to_e4m3(bf16_low(pair) * inverse) * scale,
                     round_to_e4m3(bf16_high(pair) * inverse) * scale);
}

// What the packed query writer would store of a group, read back: exact in BF16.
KMLA_DEVICE word4 round_to_packed(const word4& x) {
    const float largest = bits_float(0x7F7FFFFFu);
    float amax = vector_amax(amax_of_piece(0, x));
    float scale = packed_query_scale(amax > largest ? largest : amax);
    float inverse = power_of_two_inverse(scale);
    return word4{round_pair_to_e4m3(x.x, scale, inverse), round_pair_to_e4m3(x.y, scale, inverse),
                 round_pair_to_e4m3(x.z, scale, inverse), round_pair_to_e4m3(x.w, scale, inverse)};
}

KMLA_DEVICE uint32_t normalise_pair(uint32_t pair, float factor, bool to_f16) {
    float low = bf16_low(pair) * factor, high = bf16_high(pair) * factor;
    return to_f16 ? pack_f16(low, high) : pack_bf16(low, high);
}

// A piece in mma's own order: its neighbour lane has the other 8 of 16 dims.
KMLA_DEVICE word4 order_piece(const reader_state& s, const word4& x) {
    bool upper = s.lane % 2;
    uint32_t a = shuffle_xor(upper ? x.x : x.z, 1), b = shuffle_xor(upper ? x.y : x.w, 1);
    return upper ? word4{a, x.z, b, x.w} : word4{x.x, a, x.y, b};
}

// Exactly, as BF16. Returns the lane's largest magnitude.
KMLA_DEVICE float decode_query(const kmla_i_reader_args& args, const reader_state& s, int n) {
    bool codes = args.query_format != KMLA_QUERY_BF16 && s.first_vector + n < s.vectors;
    bool packed = args.query_format == KMLA_QUERY_PACKED;
    bool rounds = args.e4m3_query && args.query_format == KMLA_QUERY_BF16;
    float amax = 0;
#pragma unroll 1
    for (int i = 0; i < kQueryChunks; i++) {
        query_piece piece = piece_of(s, n, i);
        word4 x = {0, 0, 0, 0};
        if (piece.exists) {
            x = *piece.at;
        }
        if (codes && !(packed && i == kGroups)) {
            float scale = packed ? ((const float*)(query_record(args, s, n) +
                                                   KMLA_PACKED_SCALE_OFFSET))[i]
                                 : 1.0f;
            x = codes_to_bf16(x.z, x.w, scale);
        }
        if (rounds && i < kGroups) {
            x = round_to_packed(x);
        }
        amax = amax_of_piece(amax, x);
        if (piece.exists) {
            *piece.at = x;
        }
    }
    return amax;
}

// From values to fragments. What f16 drops is below 2^-38 of the vector's largest element, which lies
// in [2^14, 2^15).
KMLA_DEVICE void normalise_query(const kmla_i_reader_args& args, const reader_state& s, int n,
                                 float amax) {
    int exponent = minimum(maximum((int)(float_bits(amax) >> 23), 64), 254);
    float factor = kBf16 ? 1.0f : bits_float((uint32_t)(127 + 14 + 127 - exponent) << 23);
    float norm = kBf16 ? 1.0f : bits_float((uint32_t)(exponent - 14) << 23);
#pragma unroll 1
    for (int i = 0; i < kQueryChunks; i++) {
        query_piece piece = piece_of(s, n, i);
        bool codes = meets_codes(i == kGroups), to_f16 = codes; // packed rope is BF16, like its KV
        word4 x = {0, 0, 0, 0};
        if (piece.exists) {
            x = *piece.at;
        }
        if (!kBf16) {
            x = word4{normalise_pair(x.x, factor, to_f16), normalise_pair(x.y, factor, to_f16),
                      normalise_pair(x.z, factor, to_f16), normalise_pair(x.w, factor, to_f16)};
        }
        if (!codes) {
            x = order_piece(s, x);
        }
        if (piece.exists) {
            *piece.at = x;
        }
    }
    if (s.lane % 16 == 0) {
        of_tokens(0)[n] = args.score_scale * norm;
    }
}

// Into registers. Its barriers also show ranges, places and the first step's masks to all.
KMLA_DEVICE void finish_query(const kmla_i_reader_args& args, reader_state& s) {
    copy_async_wait<1>(); // all but the first step's records
#pragma unroll 1
    for (int n = first_staged(s); n < (kTile + 1) / 2 * 2; n += kStagedAtOnce) {
        normalise_query(args, s, n, vector_amax(decode_query(args, s, n)));
    }
    sync_block();
#pragma unroll
    for (int k = 0; k < kQuerySteps; k++) {
        for (int j = 0; j < kColumns; j++) {
            s.query[k][j] = staged_query(s.dims, k, column_of(s, j))[s.lane];
        }
    }
#pragma unroll
    for (int slot = 0; slot < kSlots; slot++) {
        for (int i = 0; i < 2; i++) {
            s.unit[slot].scale[i] = of_tokens(0)[vector_of(s, slot) + i];
        }
    }
    fence_async_reads();
    sync_block(); // before the second step's records come, and scores are exchanged
}

// ---- KV to shared memory

constexpr int kRunTokens = KMLA_I_STEP_TOKENS; // of one bulk copy: they lie in one page
constexpr int kRuns = kStep / kRunTokens;
constexpr int kLookUpSteps = 32 / kRuns; // whose runs the lanes of a warp look up at once

KMLA_DEVICE bool copies_in_bulk(const reader_state& s) {
    return KMLA_HAS_BULK_COPY && kPitch == kRecordBytes && s.bulk;
}

// The warp that starts bulk copies: the last, which small tiles leave idle in softmax.
KMLA_DEVICE bool is_copier(const reader_state& s) {
    return s.warp == KMLA_I_READER_THREADS / 32 - 1;
}

// Table look-ups for copies that are to come, of the step that begins at `token` on. In bulk: the
// entry of the lane's run, of 32. Else that of the token of this step that the lane answers for, -1
// if it is not wanted.
template <bool bulk>
KMLA_DEVICE int look_up(const kmla_i_reader_args& args, const reader_state& s,
                        const tile_bounds& tokens, int token) {
    if (bulk) {
        token += s.lane * kRunTokens;
        return is_copier(s) && token < args.capacity ? table_entry(args, s.group, token) : -1;
    }
    token += s.warp * kWarpTokens + s.lane % kWarpTokens;
    bool wanted = token >= tokens.begin && token < tokens.end;
    return wanted ? table_entry(args, s.group, token) : -1;
}

// Where the split's first step most likely begins: with neither a window nor balanced splits.
KMLA_DEVICE int likely_first(const kmla_i_reader_args& args, const reader_state& s) {
    return s.split * args.chunks_per_split * KMLA_CHUNK_TOKENS;
}

#if KMLA_HAS_BULK_COPY
// Bulk copies are made ready 32 runs at a time, a run a lane, so that starting one is quick.
struct alignas(32) run_copy {
    uint64_t from;         // its first record
    uint32_t to, bytes;    // from the begin of the stage
    warp_mask masks[4];    // of its tokens' warps: those that are wanted
    uint32_t unused[2];
};
static_assert(sizeof(run_copy) == 32, "as the host counts");
static_assert(!kPacked || kRunTokens == 4 * kWarpTokens, "a run is four warps' tokens");
KMLA_DEVICE run_copy& run_of_lane(const reader_state& s) {
    return ((run_copy*)(shared_memory() + kRunsAt))[s.lane];
}
// Tells that all warps are done with a stage's records.
KMLA_DEVICE uint64_t* free_of(int step) {
    return (uint64_t*)(shared_memory() + kFreeAt) + step % kStages;
}

KMLA_DEVICE void prepare_run(const kmla_i_reader_args& args, const reader_state& s,
                             const tile_bounds& tokens, int token, int entry) {
    token += s.lane * kRunTokens;
    int first = minimum(maximum(tokens.begin - token, 0), kRunTokens);
    int last = entry < 0 ? first : maximum(minimum(tokens.end - token, kRunTokens), first);
    run_copy& run = run_of_lane(s);
    run.from = record_address(args, entry, token + first, kRecordBytes);
    run.to = (uint32_t)((s.lane % kRuns * kRunTokens + first) * kPitch);
    run.bytes = (uint32_t)((last - first) * kRecordBytes);
#pragma unroll 1
    for (int w = 0; w < 4; w++) {
        run.masks[w] = mask_of_tokens(w * kWarpTokens, first, last);
    }
}

// By the lanes that have the step's runs.
KMLA_DEVICE void start_bulk_copies(const reader_state& s, int step) {
    int run = s.lane - step % kLookUpSteps * kRuns;
    if (run < 0 || run >= kRuns) {
        return;
    }
    const run_copy& copy = run_of_lane(s);
    *(word2*)(token_masks_of(step) + 4 * run) = *(const word2*)copy.masks;
    barrier_arrive_expect(arrival_of(step), copy.bytes);
    if (copy.bytes) {
        copy_bulk(stage_of(step) + copy.to, (const void*)copy.from, copy.bytes, arrival_of(step));
    }
}
#endif

// Every warp copies its records, 16 bytes a lane; one that does not exist becomes zeros.
KMLA_DEVICE void start_record_copies(const kmla_i_reader_args& args, const reader_state& s,
                                     int step, int token, int entry) {
    uint32_t exists = ballot(entry >= 0) & ((1u << kWarpTokens) - 1);
    uint64_t address = record_address(
        args, entry, token + s.warp * kWarpTokens + s.lane % kWarpTokens, kRecordBytes);
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
    copy_async_commit();
}

// Starts the copy of a step, which begins at `token`, when its stage is free. Tokens outside the
// tile's bounds are not read. `entry`: the look-up, if not in bulk.
template <bool bulk>
KMLA_DEVICE void start_copy(const kmla_i_reader_args& args, const reader_state& s, int step,
                            int token, int entry) {
#if KMLA_HAS_BULK_COPY
    if (bulk) {
        if (is_copier(s)) {
            if (step >= kStages) {
                barrier_wait(free_of(step), (uint32_t)(step / kStages - 1) & 1);
            }
            start_bulk_copies(s, step);
        }
        return;
    }
#endif
    start_record_copies(args, s, step, token, entry);
}

// What the copies of steps from `step` on need, made ready from a look-up.
template <bool bulk>
KMLA_DEVICE void prepare_copies(const kmla_i_reader_args& args, const reader_state& s,
                                const tile_bounds& tokens, int token, int entry) {
#if KMLA_HAS_BULK_COPY
    if (bulk && is_copier(s)) {
        prepare_run(args, s, tokens, token, entry);
    }
#endif
}

// Until the step is here, for all threads; if each copied its part, nobody is in the step before.
template <bool bulk> KMLA_DEVICE void wait_for_copy(int step) {
#if KMLA_HAS_BULK_COPY
    if (bulk) {
        barrier_wait(arrival_of(step), (uint32_t)(step / kStages) & 1);
        return;
    }
#endif
    copy_async_wait<0>();
    sync_block();
}

// The warp is done with the step's records.
template <bool bulk> KMLA_DEVICE void release_step(const reader_state& s, int step) {
#if KMLA_HAS_BULK_COPY
    if (bulk && s.lane == 0) {
        barrier_arrive(free_of(step));
    }
#endif
}

// ---- QK: S^T of the warp's tokens x the tile over one group of dims

typedef float group_scores[kTokenTiles][kColumns][4];

KMLA_DEVICE void codes_to_fragment(uint32_t low_rows, uint32_t high_rows, uint32_t (&a)[4]) {
    uint32_t low[2], high[2];
    e4m3x4_to_f16(low_rows, low);
    e4m3x4_to_f16(high_rows, high);
    a[0] = low[0], a[1] = high[0], a[2] = low[1], a[3] = high[1];
}

KMLA_DEVICE void multiply_codes(const reader_state& s, int tile, int k, uint32_t low_rows,
                                uint32_t high_rows, group_scores& score) {
    uint32_t a[4];
    codes_to_fragment(low_rows, high_rows, a);
#pragma unroll
    for (int j = 0; j < kColumns; j++) {
        mma_f16(score[tile][j], a, s.query[k][j].x, s.query[k][j].y);
    }
}

KMLA_DEVICE void multiply_bf16(const reader_state& s, int tile, int k, const uint32_t (&a)[4],
                               group_scores& score) {
#pragma unroll
    for (int j = 0; j < kColumns; j++) {
        mma_bf16(score[tile][j], a, s.query[k][j].x, s.query[k][j].y);
    }
}

// Sums of codes times the tokens' scales of the group: sums of numbers.
KMLA_DEVICE void scale_scores(const uint8_t* scales, float (&score)[kColumns][4]) {
    float scale[2] = {*(const float*)scales, *(const float*)(scales + 8 * kPitch)};
#pragma unroll
    for (int j = 0; j < kColumns; j++) {
        for (int i = 0; i < 4; i++) {
            score[j][i] *= scale[i / 2];
        }
    }
}

// Of the tokens of tile_of(s, tile).
KMLA_DEVICE void multiply_rope(const reader_state& s, int tile, const uint8_t* rows,
                               const uint8_t* record, group_scores& score) {
    const int latent = KMLA_LATENT_DIMS + 16 * s.dims;
    if (kE4m3) {
        const uint8_t* at = record + latent + 4 * s.column;
        multiply_codes(s, tile, kLatentSteps, *(const uint32_t*)at,
                       *(const uint32_t*)(at + 8 * kPitch), score);
        return;
    }
    uint32_t raw[4];
    load_matrix_x4(raw, rows + (kPacked ? KMLA_PACKED_ROPE_OFFSET + 32 * s.dims : 2 * latent));
    if (kPacked) { // the rope has no scale
        scale_scores(record + KMLA_PACKED_SCALE_OFFSET + 4 * s.dims, score[tile]);
    }
    multiply_bf16(s, tile, kLatentSteps, raw, score);
}

KMLA_DEVICE void multiply_keys(const reader_state& s, const uint8_t* stage, group_scores& score) {
    // What the lane points matrix loads at, 16 tokens, two times 16 bytes; and its own first token.
    const uint8_t *rows[kTokenTiles], *record[kTokenTiles];
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; tile++) {
        const uint8_t* tokens = stage + 16 * tile_of(s, tile) * kPitch;
        rows[tile] = tokens + s.lane % 16 * kPitch + s.lane / 16 * 16;
        record[tile] = tokens + s.row_in_quad * kPitch;
        for (int j = 0; j < kColumns; j++) {
            for (int i = 0; i < 4; i++) {
                score[tile][j][i] = 0;
            }
        }
    }
#pragma unroll
    for (int k = 0; k < kLatentSteps; k += kBf16 ? 1 : 2) {
        int dim = s.dims * KMLA_GROUP_DIMS + 16 * k;
        uint32_t raw[kTokenTiles][4];
#pragma unroll
        for (int tile = 0; tile < kTokenTiles; tile++) {
            load_matrix_x4(raw[tile], rows[tile] + dim * (kBf16 ? 2 : 1));
        }
#pragma unroll
        for (int tile = 0; tile < kTokenTiles; tile++) {
            if (kBf16) {
                multiply_bf16(s, tile, k, raw[tile], score);
            } else {
                multiply_codes(s, tile, k, raw[tile][0], raw[tile][1], score);
                multiply_codes(s, tile, k + 1, raw[tile][2], raw[tile][3], score);
            }
        }
    }
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; tile++) {
        multiply_rope(s, tile, rows[tile], record[tile], score);
    }
}

// Adds the groups up: each owner gets the scores of its units. (0 + 1) + (2 + 3), whoever it is.
KMLA_DEVICE void exchange_scores(const reader_state& s, const group_scores& score,
                                 float (&x)[kSlots][4]) {
    float sum[kSlots][kGroups][4];
#pragma unroll
    for (int first = 1; first < kGroups; first += kSources) {
        if (first > 1) {
            sync_block();
        }
#pragma unroll
        for (int unit = 0; unit < kUnits; unit++) { // as the warp counts
            const float(&from)[4] = score[unit % kTokenTiles][unit / kTokenTiles];
            int owner = s.owner ^ unit % kOwners, other = owner ^ s.dims;
            if (kOwners == kGroups) {
                other = unit % kOwners;
            }
            if (other >= first && other < first + kSources) {
                exchanged(s, owner, unit / kOwners, other) = word4{
                    float_bits(from[0]), float_bits(from[1]), float_bits(from[2]), float_bits(from[3])};
            }
        }
        sync_block();
#pragma unroll
        for (int slot = 0; slot < kSlots; slot++) {
            for (int other = first; other < first + kSources; other++) {
                word4 from = exchanged(s, s.owner, slot, other);
                sum[slot][other][0] = bits_float(from.x), sum[slot][other][1] = bits_float(from.y);
                sum[slot][other][2] = bits_float(from.z), sum[slot][other][3] = bits_float(from.w);
            }
        }
    }
#pragma unroll
    for (int slot = 0; slot < kSlots; slot++) {
        for (int i = 0; i < 4; i++) {
            float all = (score[0][slot * kSlotColumns][i] + sum[slot][1][i]) +
                        (sum[slot][2][i] + sum[slot][3][i]);
            x[slot][i] = all * s.unit[slot].scale[i % 2];
        }
    }
}

// ---- scales of packed records: 2^exponent goes with the score, the rest with the f16 weight

// Exponent e with the largest scale of the token in (2^(e-1), 2^e]. A lane has one scale, a warp the
// tokens that it answers for. Returns the ratio scale / 2^e, for store_ratio. A scale that is no
// number has ratio 0: such a token's score is no number either, which is what its readers get.
KMLA_DEVICE float split_scales(const reader_state& s, const uint8_t* stage) {
    if (!kPacked) {
        return 0;
    }
    int group = s.column, token = 8 * s.warp + s.row_in_quad;
    uint32_t bits = *(const uint32_t*)(stage + token * kPitch + KMLA_PACKED_SCALE_OFFSET + 4 * group);
    uint32_t magnitude = bits & 0x7FFFFFFFu;
    bits = magnitude < 0x7F800000u ? bits : 0;
    uint32_t largest = magnitude < 0x7F800000u ? magnitude : 0;
    largest = maximum(largest, shuffle_xor(largest, 1));
    largest = maximum(largest, shuffle_xor(largest, 2));
    uint32_t power = (largest + 0x007FFFFFu) & 0x7F800000u; // 2^e
    power = power < (253u << 23) ? power : 253u << 23;      // so that its inverse is normal
    if (group == 0) {
        exponents()[token] = (float)((int)(power >> 23) - 127);
    }
    return bits_float(bits) * bits_float((254u << 23) - power);
}

// When nobody is in the PV of the step before.
KMLA_DEVICE void store_ratio(const reader_state& s, float ratio) {
    if (kPacked) {
        ratios_of(s.column)[8 * s.warp + s.row_in_quad] = (uint16_t)pack_f16(ratio, 0.0f);
    }
}

// ---- softmax: the owner of a unit has all its scores in registers, as mma left them

// What a vector does not see has the score -inf.
KMLA_DEVICE void mask_scores(const reader_state& s, int first_token, const warp_mask* masks,
                             float (&x)[kSlots][4]) {
    int in_step = 16 * tile_of(s, 0) + s.row_in_quad;
#pragma unroll
    for (int slot = 0; slot < kSlots; slot++) {
        for (int i = 0; i < 4; i++) {
            int at = in_step + i / 2 * 8, token = first_token + at;
            vector_range range = range_of(vector_of(s, slot) + i % 2);
            bool exists = masks[at / kWarpTokens] >> at % kWarpTokens & 1;
            bool visible = token >= range.begin && token < range.end && exists;
            x[slot][i] = visible ? x[slot][i] : -infinity();
        }
    }
}

// Weights by the references as they are, into shared memory, and their sums. Returns whether some
// vector has outgrown its reference, which makes both worthless.
KMLA_DEVICE bool store_weights(const reader_state& s, const float (&x)[kSlots][4],
                               const float (&exponent)[2], float (&sum)[kSlots][2]) {
    float top = -infinity(); // above the references, of all
    if (!owns(s)) {
        return false;
    }
#pragma unroll
    for (int slot = 0; slot < kSlots; slot++) {
        const unit_state& unit = s.unit[slot];
        float p[4];
        for (int i = 0; i < 4; i++) {
            float d = x[slot][i] - unit.sum_reference[i % 2];
            p[i] = exp2_fast(d);
            top = maximum(top, d);
        }
        sum[slot][0] = p[0] + p[2];
        sum[slot][1] = p[1] + p[3];
        for (int i = 0; i < 4 && kPacked; i++) {
            float d = x[slot][i] - unit.sum_reference[i % 2] + exponent[i / 2] -
                      unit.weight_reference[i % 2];
            p[i] = exp2_fast(d);
            top = maximum(top, d);
        }
        uint16_t* to = weights() + vector_of(s, slot) * kWeightPitch + 16 * tile_of(s, 0) +
                       s.row_in_quad;
        for (int i = 0; i < 4; i++) {
            uint16_t* at = to + i % 2 * kWeightPitch + i / 2 * 8;
            if (kBf16) { // BF16 has fp32's range but 8 bits: two terms
                uint32_t high = float_to_bf16(p[i]);
                at[0] = (uint16_t)high;
                at[kTile * kWeightPitch] = (uint16_t)float_to_bf16(p[i] - bf16_low(high));
            } else {
                at[0] = (uint16_t)pack_f16(p[i], 0.0f);
            }
        }
    }
    return top > KMLA_I_REFERENCE_GROWTH;
}

// Of the unit's 16 tokens, two a lane; lanes of a column agree.
KMLA_DEVICE float top_of_unit(float low, float high) {
    float top = maximum(low, high);
    top = maximum(top, shuffle_xor(top, 4));
    top = maximum(top, shuffle_xor(top, 8));
    return maximum(top, shuffle_xor(top, 16));
}

KMLA_DEVICE float raised_reference(float top, float reference) {
    return top - reference > KMLA_I_REFERENCE_GROWTH ? top - KMLA_I_REFERENCE_BELOW : reference;
}

// A step's maxima for all to see: of scores; and above these, tile by tile, of what weighs V.
KMLA_DEVICE void store_tops(const reader_state& s, const float (&x)[kSlots][4],
                            const float (&exponent)[2]) {
#pragma unroll
    for (int slot = 0; slot < kSlots; slot++) {
        for (int i = 0; i < 2 && owns(s); i++) {
            int n = vector_of(s, slot) + i;
            float low = x[slot][i], high = x[slot][2 + i];
            float top = top_of_unit(low, high), base = top == -infinity() ? 0 : top;
            float above = kPacked ? top_of_unit(low - base + exponent[0], high - base + exponent[1])
                                  : 0;
            if (s.row_in_quad == 0) {
                of_tokens(tile_of(s, 0))[n] = top;
                of_tokens(kStepTiles + tile_of(s, 0))[n] = above;
            }
        }
    }
}

// New references where maxima have outgrown them, sums by the new ones, and factors for O.
KMLA_DEVICE void raise_references(reader_state& s, const float (&x)[kSlots][4],
                                  const float (&exponent)[2]) {
    store_tops(s, x, exponent);
    sync_block();
#pragma unroll
    for (int slot = 0; slot < kSlots; slot++) {
        for (int i = 0; i < 2 && owns(s); i++) {
            unit_state& unit = s.unit[slot];
            int n = vector_of(s, slot) + i;
            float top = -infinity(), above = -infinity();
            for (int tile = 0; tile < kStepTiles; tile++) {
                top = maximum(top, of_tokens(tile)[n]);
            }
            float old = unit.sum_reference[i], raised = raised_reference(top, old);
            bool same = raised == old;
            float factor = same ? 1.0f : exp2_fast(old - raised);
            unit.sum[i] *= factor;
            unit.sum_reference[i] = raised;
            if (kPacked) {
                for (int tile = 0; tile < kStepTiles; tile++) {
                    above = maximum(above, of_tokens(tile)[n] - raised +
                                               of_tokens(kStepTiles + tile)[n]);
                }
                old = unit.weight_reference[i] - (same ? 0 : raised - old); // where it was
                raised = raised_reference(above, old);
                factor = raised == old ? 1.0f : exp2_fast(old - raised);
                unit.weight_reference[i] = raised;
            }
            if (tile_of(s, 0) == 0 && s.row_in_quad == 0) {
                factors()[n] = factor;
            }
        }
    }
}

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

// Turns scores into weights that all may read.
KMLA_DEVICE void softmax_step(reader_state& s, const float (&x)[kSlots][4]) {
    float exponent[2] = {0, 0}, sum[kSlots][2];
    if (kPacked) {
        const float* of_lane = exponents() + 16 * tile_of(s, 0) + s.row_in_quad;
        exponent[0] = of_lane[0];
        exponent[1] = of_lane[8];
    }
    if (sync_block_or(store_weights(s, x, exponent, sum))) {
        raise_references(s, x, exponent);
        store_weights(s, x, exponent, sum);
        sync_block();
        rescale_out(s);
    }
#pragma unroll
    for (int slot = 0; slot < kSlots; slot++) {
        for (int i = 0; i < 2 && owns(s); i++) {
            s.unit[slot].sum[i] += sum[slot][i];
        }
    }
}

// ---- PV: O^T of the warp's 64 dims

// NaN and infinity to 0, lane by lane.
KMLA_DEVICE uint32_t only_numbers_bf16(uint32_t pair) {
    uint32_t bad = (((pair & 0x7F807F80u) + 0x00800080u) & 0x80008000u) >> 15;
    return pair & ~(bad * 0xFFFFu);
}

// NaN codes, 0x7F and 0xFF, to the numbers before them, byte by byte.
KMLA_DEVICE uint32_t only_numbers_e4m3(uint32_t codes) {
    return codes - (((codes & 0x7F7F7F7Fu) + 0x01010101u & 0x80808080u) >> 7);
}

// In a step in which some vector may not see some token, 0 * NaN must not reach it: no value that the
// warp will multiply stays NaN. A vector that does see the token has its NaN from the score.
KMLA_DEVICE void clean_values(const reader_state& s, uint8_t* stage) {
    const int words = 64 * (kBf16 ? 2 : 1) / 4; // of the warp's dims of a token
#pragma unroll 1
    for (int i = s.lane; i < kStep * words; i += 32) {
        uint32_t* at = (uint32_t*)(stage + i / words * kPitch) + words * s.warp + i % words;
        *at = kBf16 ? only_numbers_bf16(*at) : only_numbers_e4m3(*at);
    }
#if KMLA_HAS_BULK_COPY
    fence_async_reads(); // and copies into the stage come after that
#endif
}

// Codes of 8 dims, which row_in_quad owns, of tokens 2 * column, + 1, + 8, + 9 of a k16 step.
struct code_values {
    word2 token[4];
};
KMLA_DEVICE code_values load_code_values(const reader_state& s, const uint8_t* stage, int k) {
    const uint8_t* at =
        stage + (16 * k + 2 * s.column) * kPitch + 64 * s.warp + 8 * s.row_in_quad;
    return code_values{{*(const word2*)at, *(const word2*)(at + kPitch),
                        *(const word2*)(at + 8 * kPitch), *(const word2*)(at + 9 * kPitch)}};
}

// V^T fragments: the tokens of a fragment column pair are neighbours, whose bytes are woven together.
KMLA_DEVICE void weave_code_values(const code_values& codes, uint32_t (&a)[4][4]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        word2 even = codes.token[2 * half], odd = codes.token[2 * half + 1];
        uint32_t woven[4] = {
            permute_bytes(even.x, odd.x, 0x5140), permute_bytes(even.x, odd.x, 0x7362),
            permute_bytes(even.y, odd.y, 0x5140), permute_bytes(even.y, odd.y, 0x7362)};
#pragma unroll
        for (int m = 0; m < 4; m++) {
            uint32_t pair[2];
            e4m3x4_to_f16(woven[m], pair);
            for (int i = 0; i < 2; i++) {
                a[m][2 * half + i] = pair[i];
            }
        }
    }
}

KMLA_DEVICE void load_bf16_values(const uint8_t* at, uint32_t (&a)[4][4]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        word4 even = *(const word4*)(at + 8 * half * kPitch);
        word4 odd = *(const word4*)(at + (8 * half + 1) * kPitch);
        uint32_t e[4] = {even.x, even.y, even.z, even.w}, o[4] = {odd.x, odd.y, odd.z, odd.w};
#pragma unroll
        for (int m = 0; m < 4; m++) {
            a[m][2 * half] = permute_bytes(e[m], o[m], 0x5410);
            a[m][2 * half + 1] = permute_bytes(e[m], o[m], 0x7632);
        }
    }
}

// Weights as B fragments of 32 tokens from `token` on. FP8 KV: registers 2k and 2k + 1 are k16 step
// k's. BF16 KV, 16 tokens: the two of the high term, then the two of the low term.
KMLA_DEVICE void load_weights(const reader_state& s, int token, uint32_t (&weight)[kColumns][4]) {
    int matrix = s.lane / 8;
    int term = kBf16 ? matrix / 2 : 0;
    token += kBf16 ? matrix % 2 * 8 : matrix * 8;
#pragma unroll
    for (int j = 0; j < kColumns; j++) {
        int row = term * kTile + 8 * j + s.lane % 8;
        load_matrix_x4(weight[j], weights() + row * kWeightPitch + token);
    }
}

// Packed: the rest of the scales of the warp's group of dims.
KMLA_DEVICE void scale_weights(const reader_state& s, int token, uint32_t (&weight)[kColumns][4]) {
    const uint32_t* ratios = (const uint32_t*)(ratios_of(s.warp / 2) + token) + s.column;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32_t ratio = ratios[4 * i]; // of tokens 8i + 2 * column and the next
        for (int j = 0; j < kColumns; j++) {
            weight[j][i] = multiply_f16x2(weight[j][i], ratio);
        }
    }
}

// `codes`: those of the first k16 step.
KMLA_DEVICE void multiply_values(reader_state& s, const uint8_t* stage, code_values codes) {
    int dim = 64 * s.warp + 8 * s.row_in_quad;
    uint32_t weight[kColumns][4];
#pragma unroll
    for (int k = 0; k < kStepTiles; k++) {
        const uint8_t* records = stage + (16 * k + 2 * s.column) * kPitch;
        uint32_t a[4][4];
        if (kBf16) {
            load_weights(s, 16 * k, weight);
            load_bf16_values(records + 2 * dim, a);
        } else {
            weave_code_values(codes, a);
            codes = load_code_values(s, stage, k < kStepTiles - 1 ? k + 1 : k);
            if (k % 2 == 0) {
                load_weights(s, 16 * k, weight);
            }
            if (kPacked && k % 2 == 0) {
                scale_weights(s, 16 * k, weight);
            }
        }
#pragma unroll
        for (int m = 0; m < 4; m++) {
#pragma unroll
            for (int j = 0; j < kColumns; j++) {
                if (kBf16) {
                    mma_bf16(s.out[m][j], a[m], weight[j][0], weight[j][1]);
                } else {
                    mma_f16(s.out[m][j], a[m], weight[j][k % 2 * 2], weight[j][k % 2 * 2 + 1]);
                }
            }
            for (int j = 0; j < kColumns && kBf16; j++) {
                mma_bf16(s.out[m][j], a[m], weight[j][2], weight[j][3]);
            }
        }
    }
}

// ---- results

KMLA_DEVICE float* sum_references() { return of_tokens(kStepTiles); }
KMLA_DEVICE float* weight_references() { return of_tokens(kStepTiles + 1); }

// Of each vector: the sums of its units, and the references, for all to see. Nobody may be in softmax.
KMLA_DEVICE void join_sums(reader_state& s) {
#pragma unroll
    for (int slot = 0; slot < kSlots; slot++) {
        for (int i = 0; i < 2 && owns(s); i++) {
            const unit_state& unit = s.unit[slot];
            int n = vector_of(s, slot) + i;
            float sum = unit.sum[i];
            sum += shuffle_xor(sum, 4);
            sum += shuffle_xor(sum, 8);
            sum += shuffle_xor(sum, 16);
            if (s.row_in_quad == 0) {
                of_tokens(tile_of(s, 0))[n] = sum;
            }
            if (s.row_in_quad == 0 && tile_of(s, 0) == 0) {
                sum_references()[n] = unit.sum_reference[i];
                weight_references()[n] = unit.weight_reference[i];
            }
        }
    }
    sync_block();
}

// O and lse of the split.
KMLA_DEVICE void store_split(const kmla_i_reader_args& args, reader_state& s) {
    int n = thread_index();
    float sum = 0, reference = 0;
    join_sums(s);
    if (n < kTile) {
        for (int tile = 0; tile < kStepTiles; tile++) {
            sum += of_tokens(tile)[n];
        }
        reference = sum_references()[n];
        weigh_vector(args, n, sum, kPacked ? exp2_wide(weight_references()[n]) : args.kv_scale);
    }
    sync_block();
    store_results(args, s, (const float(&)[4][kColumns * 4])s.out);
    if (n < kTile) {
        store_vector_lse(args, n, sum, reference);
    }
}

// ---- the block

// Every warp finds the range of every vector, one a lane, so that no barrier holds up the first copies;
// the first warp stores what all may read behind a block barrier. `length`: of the lane's. Returns
// the tile's bounds.
KMLA_DEVICE tile_bounds find_ranges(const kmla_i_reader_args& args, const reader_state& s,
                                    int length) {
    static_assert(kTile <= 32, "a vector a lane");
    tile_bounds mine;
    vector_range range = find_range(args, s, s.lane, length, mine);
    mine = join_lanes(mine, 1);
    if (thread_index() == 0) {
        (tile_bounds&)bounds() = mine;
        bounds().first_row = s.first_row;
        bounds().vectors = s.vectors;
    }
    if (thread_index() < kTile) {
        range_of(s.lane) = range;
        place_vector(args, s.lane, s.first_row, s.vectors);
    }
    return mine;
}

KMLA_DEVICE void clear_state(reader_state& s) {
#pragma unroll
    for (int slot = 0; slot < kSlots; slot++) {
        for (int i = 0; i < 2; i++) {
            s.unit[slot].sum_reference[i] = s.unit[slot].weight_reference[i] = kNoReference;
            s.unit[slot].sum[i] = 0;
        }
    }
#pragma unroll
    for (int m = 0; m < 4; m++) {
        for (int j = 0; j < kColumns; j++) {
            for (int i = 0; i < 4; i++) {
                s.out[m][j][i] = 0;
            }
        }
    }
}

// QK, softmax and PV of a step. `whole`: every vector of the tile sees every token of it.
KMLA_DEVICE void take_step(reader_state& s, int token, int step, bool whole) {
    uint8_t* stage = stage_of(step);
    group_scores score;
    float x[kSlots][4];
    multiply_keys(s, stage, score);
    float ratio = split_scales(s, stage);
    exchange_scores(s, score, x); // behind its barrier all are done with the step before
    store_ratio(s, ratio);
    if (!whole) {
        mask_scores(s, token, token_masks_of(step), x);
        clean_values(s, stage);
        sync_block(); // between a warp's lanes
    }
    code_values codes; // before the barrier, for its latency
    if (!kBf16) {
        codes = load_code_values(s, stage, 0);
    }
    softmax_step(s, x);
    multiply_values(s, stage, codes);
}

// `likely`: bulk look-ups from likely_first on.
template <bool bulk>
KMLA_DEVICE void read_tokens(const kmla_i_reader_args& args, reader_state& s,
                             const tile_bounds& tokens, int likely) {
    int first = tokens.begin / kStep * kStep;
    int steps = maximum(tokens.end - first + kStep - 1, 0) / kStep;
    if (steps == 0) {
        clear_state(s);
        return;
    }
    // Steps of which every vector of the tile sees every token that exists.
    int full_begin = (tokens.full_begin - first + kStep - 1) / kStep;
    int full_end = (tokens.full_end - first) / kStep;
    int entry =
        bulk && first == likely_first(args, s) ? likely : look_up<bulk>(args, s, tokens, first);
    prepare_copies<bulk>(args, s, tokens, first, entry);
    start_copy<bulk>(args, s, 0, first, entry);
    copy_async_commit();
    entry = bulk ? -1 : look_up<false>(args, s, tokens, first + kStep);
    finish_query(args, s);
    clear_state(s);
#pragma unroll 1
    for (int step = 0; step < steps;) {
        int ahead = step + 1, stop = steps; // until copies have to be made ready again
        if (bulk) {
            stop = minimum(steps, (ahead / kLookUpSteps + 1) * kLookUpSteps - 1);
            if (ahead % kLookUpSteps == 0 && ahead < steps) {
                int token = first + ahead * kStep;
                prepare_copies<bulk>(args, s, bounds(), token,
                                     look_up<bulk>(args, s, bounds(), token));
            }
        }
#pragma unroll 1
        for (; step < stop; step++) {
            int token = first + step * kStep;
            bool whole = step >= full_begin && step < full_end && all_exist(token_masks_of(step));
            wait_for_copy<bulk>(step);
            if (step + 1 < steps) {
                start_copy<bulk>(args, s, step + 1, token + kStep, entry);
                copy_async_commit();
                entry = bulk ? -1 : look_up<false>(args, s, bounds(), token + 2 * kStep);
            }
            take_step(s, token, step, whole);
            release_step<bulk>(s, step);
        }
    }
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
    s.owner = s.dims % kOwners;
    if (s.first_vector >= s.vectors) {
        return;
    }
#if KMLA_HAS_BULK_COPY
    if (is_copier(s) && s.lane == 0) { // which needs them before the first block barrier
        for (int stage = 0; stage < kStages; stage++) {
            barrier_init(arrival_of(stage), kRuns);
            barrier_init(free_of(stage), kWarps);
        }
        barrier_init_fence();
    }
#endif
    // First, for their latency.
    int likely =
        copies_in_bulk(s) ? look_up<true>(args, s, tile_bounds{}, likely_first(args, s)) : -1;
    int length = vector_length(args, s, s.lane);
    load_query(args, s);
    tile_bounds tokens = find_ranges(args, s, length);
    if (copies_in_bulk(s)) {
        read_tokens<true>(args, s, tokens, likely);
    } else {
        read_tokens<false>(args, s, tokens, likely);
    }
    launch_dependents();
    store_split(args, s);
}

#endif
