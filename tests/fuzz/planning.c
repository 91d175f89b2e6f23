// Planning under libFuzzer: every pure function of the header with any arguments at all. Nothing
// may be undefined (the sanitizers watch), a failure says so and writes nothing, and what succeeds
// has the properties that its comment in the header promises, computed here a second time.
//
//     build/planning FILE        runs one input again, e.g. build/planning-crash-...
//     make fuzz TIME=600         looks for new ones

#define KIMI_MLA_IMPLEMENTATION
#define KIMI_MLA_NO_GPU
#include "../../kimi_mla.h"

#include "fuzz.h"

typedef __int128 wide;

// =============================================================================
// Arguments
// =============================================================================

// Small numbers mostly, and the neighbours of every limit.
static int64_t any_number(fuzz_bytes* in) {
    static const int64_t edges[] = {
        0,         1,         8,         16,        32,        63,        64,
        65,        1024,      4096,      65535,     1 << 20,   1 << 26,   INT32_MAX,
        INT32_MIN, INT64_MAX, INT64_MIN, 100352,    101376,    232448,    INT64_MAX / 4,
    };
    switch (fuzz_byte(in) % 8) {
        case 0: return 0;
        case 1:
        case 2: return fuzz_byte(in);
        case 3: return (int64_t)fuzz_word(in, 2);
        case 4: return (int64_t)fuzz_word(in, 3);
        case 5: return (int32_t)fuzz_word(in, 4);
        case 6: return (int64_t)fuzz_word(in, 8);
    }
    const int64_t edge = edges[fuzz_below(in, sizeof edges / sizeof edges[0])];
    return (int64_t)((uint64_t)edge + (uint64_t)fuzz_below(in, 3) - 1);
}

static int32_t any_int(fuzz_bytes* in) { return (int32_t)any_number(in); }

// One of an enum's values, rarely none of them.
static int32_t any_of(fuzz_bytes* in, int32_t values) {
    return fuzz_chance(in, 32) ? any_int(in) : fuzz_below(in, values);
}

static float any_float(fuzz_bytes* in) {
    static const float usual[] = {0.07216878f, 1.0f, 0.0137f};
    const uint32_t bits = (uint32_t)fuzz_word(in, 4);
    float value;
    if (bits % 4 != 0) {
        return usual[bits % 3];
    }
    memcpy(&value, &bits, sizeof value);
    return value;
}

static kmla_dcp any_dcp(fuzz_bytes* in) {
    kmla_dcp dcp = {any_int(in), 0, any_int(in)};
    dcp.rank = any_int(in);
    if (dcp.ranks > 0 && !fuzz_chance(in, 16)) {
        dcp.rank = (int32_t)((uint32_t)dcp.rank % (uint32_t)dcp.ranks);
    }
    return dcp;
}

static kmla_length_rule any_rule(fuzz_bytes* in) {
    kmla_length_rule rule;
    memset(&rule, 0, sizeof rule);
    rule.lengths_kind = any_of(in, 2);
    rule.rows_kind = any_of(in, 2);
    rule.window_tokens = fuzz_chance(in, 2) ? any_int(in) : 0;
    if (fuzz_chance(in, 2)) {
        rule.dcp = any_dcp(in);
    }
    return rule;
}

static kmla_shape any_shape(fuzz_bytes* in) {
    kmla_shape shape;
    memset(&shape, 0, sizeof shape);
    shape.requests = any_int(in);
    shape.rows_per_request = any_int(in);
    shape.rows = fuzz_chance(in, 4) ? any_int(in) : 0;
    shape.heads = any_int(in);
    shape.kv_format = any_of(in, 3);
    shape.query_format = any_of(in, 3);
    shape.mode = any_of(in, 2);
    shape.page_tokens = any_int(in);
    shape.capacity_tokens = any_number(in);
    shape.split_mode = any_of(in, 2);
    shape.splits = any_int(in);
    shape.single_split_chunks = any_int(in);
    shape.partial_type = any_of(in, 2);
    shape.tile = fuzz_chance(in, 2) ? 8 * fuzz_below(in, 7) : fuzz_chance(in, 8) ? any_int(in) : 0;
    shape.reader = fuzz_chance(in, 3) ? any_of(in, 3) : 0;
    shape.ragged = any_of(in, 2);
    shape.slot_list = any_of(in, 2);
    if (!shape.slot_list || fuzz_chance(in, 8)) {
        shape.lengths = any_rule(in);
    }
    return shape;
}

static kmla_device any_device(fuzz_bytes* in) {
    static const kmla_device cards[] = {
        {8, 0, 108, 166912, 167936}, {8, 9, 128, 101376, 102400},   {9, 0, 132, 232448, 233472},
        {12, 0, 188, 101376, 102400}, {10, 0, 148, 232448, 233472}, {0, 0, 0, 0, 0},
    };
    const int32_t card = fuzz_below(in, 8);
    kmla_device device;
    if (card < 6) {
        return cards[card];
    }
    device.compute_major = any_int(in);
    device.compute_minor = any_int(in);
    device.multiprocessors = any_int(in);
    device.shared_bytes = any_int(in);
    device.shared_bytes_sm = any_int(in);
    return device;
}

// =============================================================================
// Statuses and errors
// =============================================================================

static const kmla_error unwritten = {-1, -2, -3, -4, -5, "unwritten", "unwritten"};

// A success leaves the error alone, a failure fills it; both say the same as the status.
static void check_error(kmla_status status, const kmla_error* error) {
    if (status == KMLA_OK) {
        FUZZ_CHECK(memcmp(error, &unwritten, sizeof unwritten) == 0);
        return;
    }
    FUZZ_CHECK(status > 0 && status < KMLA_STATUS_COUNT_);
    FUZZ_CHECK(error->status == status);
    FUZZ_CHECK(error->message[0] != '\0' && memchr(error->message, 0, sizeof error->message));
    FUZZ_CHECK(strcmp(error->message, "unwritten") != 0);
    FUZZ_CHECK(error->cuda_result == 0 && error->nvrtc_result == 0 && error->library[0] == '\0');
}

// =============================================================================
// Heads
// =============================================================================

static void try_heads(fuzz_bytes* in) {
    const kmla_heads_desc desc = {any_int(in), any_int(in), any_of(in, 3), any_of(in, 2)};
    const kmla_heads nothing = {-1, -1, -1, -1, -1};
    kmla_heads heads = nothing;
    kmla_error error = unwritten;
    const kmla_status status = kmla_plan_heads(&desc, &heads, &error);
    check_error(status, &error);
    const int64_t effective = (int64_t)desc.local_heads * (desc.dcp_ranks ? desc.dcp_ranks : 1);
    if (status != KMLA_OK) {
        FUZZ_CHECK(memcmp(&heads, &nothing, sizeof nothing) == 0);
        FUZZ_CHECK(status != KMLA_ERROR_OVERFLOW || effective > 1 << 20);
        return;
    }
    const int32_t tile = desc.kv_format == KMLA_KV_PACKED && effective > 16 ? 16 : 8;
    const int32_t unit = desc.padding == KMLA_PAD_EIGHT ? 8 : tile;
    FUZZ_CHECK(effective >= 1 && effective <= 1 << 20);
    FUZZ_CHECK(heads.effective == effective && heads.tile == tile);
    FUZZ_CHECK(heads.padded >= effective && heads.padded - effective < unit);
    FUZZ_CHECK(heads.padded % unit == 0);
    FUZZ_CHECK(heads.tiles * tile >= heads.padded && (heads.tiles - 1) * tile < heads.padded);
    FUZZ_CHECK(heads.launches == (heads.padded % tile == 0 ? 1 : 2));
}

// =============================================================================
// Lengths
// =============================================================================

static int64_t ranks_of(const kmla_dcp* dcp) { return dcp->ranks ? dcp->ranks : 1; }
static int64_t interleave_of(const kmla_dcp* dcp) { return dcp->interleave ? dcp->interleave : 1; }

static int64_t local_of(kmla_dcp dcp, int32_t rank, int64_t tokens) {
    kmla_error error = unwritten;
    int64_t local = -1;
    dcp.rank = rank;
    FUZZ_CHECK(kmla_local_length(&dcp, tokens, &local, &error) == KMLA_OK);
    return local;
}

// Token g is where its owner's tokens before it end, and nobody else has it.
static void check_owner(const kmla_dcp* dcp, int64_t g) {
    kmla_error error = unwritten;
    int32_t owner = -1, rank = dcp->rank;
    int64_t index = -1;
    FUZZ_CHECK(kmla_token_owner(dcp, g, &owner, &index, &error) == KMLA_OK);
    FUZZ_CHECK(owner == g / interleave_of(dcp) % ranks_of(dcp));
    FUZZ_CHECK(local_of(*dcp, owner, g) == index);
    if (g < INT64_MAX) {
        FUZZ_CHECK(local_of(*dcp, owner, g + 1) == index + 1);
        FUZZ_CHECK(local_of(*dcp, rank, g + 1) - local_of(*dcp, rank, g) == (rank == owner));
    }
}

static void check_sum_of_ranks(const kmla_dcp* dcp, int64_t tokens) {
    wide sum = 0;
    for (int32_t rank = 0; rank < ranks_of(dcp); rank++) {
        const int64_t local = local_of(*dcp, rank, tokens);
        FUZZ_CHECK(local >= 0);
        sum += local;
    }
    FUZZ_CHECK(sum == (tokens < 0 ? 0 : tokens));
}

static void check_shard(const kmla_dcp* dcp, int64_t tokens, int64_t shard) {
    const wide round = (wide)ranks_of(dcp) * interleave_of(dcp);
    const wide whole_rounds = (tokens + round - 1) / round;
    FUZZ_CHECK(shard == whole_rounds * interleave_of(dcp));
    FUZZ_CHECK(local_of(*dcp, dcp->rank, tokens) <= shard);
}

static void try_dcp(fuzz_bytes* in) {
    const kmla_dcp dcp = any_dcp(in);
    const int64_t tokens = any_number(in);
    int64_t local = -77, shard = -77, index = -77;
    int32_t owner = -77;
    kmla_error error = unwritten;
    const kmla_status status = kmla_local_length(&dcp, tokens, &local, &error);
    check_error(status, &error);
    FUZZ_CHECK((status == KMLA_OK) == (dcp.ranks >= 0 && dcp.interleave >= 0 && dcp.rank >= 0 &&
                                       dcp.rank < ranks_of(&dcp)));
    error = unwritten;
    const kmla_status owned = kmla_token_owner(&dcp, tokens, &owner, &index, &error);
    check_error(owned, &error);
    FUZZ_CHECK((owned == KMLA_OK) == (status == KMLA_OK && tokens >= 0));
    error = unwritten;
    const kmla_status sharded = kmla_shard_capacity(&dcp, tokens, &shard, &error);
    check_error(sharded, &error);
    FUZZ_CHECK(sharded != KMLA_OK || owned == KMLA_OK);
    if (status != KMLA_OK) {
        FUZZ_CHECK(local == -77);
    } else if (ranks_of(&dcp) <= 64) {
        check_sum_of_ranks(&dcp, tokens);
    }
    if (owned == KMLA_OK) {
        check_owner(&dcp, tokens);
    } else {
        FUZZ_CHECK(owner == -77 && index == -77);
    }
    if (sharded == KMLA_OK) {
        check_shard(&dcp, tokens, shard);
    } else {
        FUZZ_CHECK(shard == -77);
    }
}

// Row i of q: global tokens [max(0, bound - W), bound), each end localised.
static void check_row(const kmla_length_rule* rule, int64_t length, int32_t rows, int32_t row,
                      int64_t begin, int64_t end) {
    const int causal = rule->lengths_kind == KMLA_LENGTHS_PER_REQUEST &&
                       rule->rows_kind == KMLA_ROWS_CAUSAL;
    wide bound = causal ? (wide)length - rows + 1 + row : length;
    bound = bound < 0 || length < 0 ? 0 : bound;
    wide first = rule->window_tokens > 0 ? bound - rule->window_tokens : 0;
    first = first < 0 ? 0 : first;
    FUZZ_CHECK(end == local_of(rule->dcp, rule->dcp.rank, (int64_t)bound));
    FUZZ_CHECK(begin == local_of(rule->dcp, rule->dcp.rank, (int64_t)first));
    FUZZ_CHECK(begin >= 0 && begin <= end && end <= (length > 0 ? length : 0));
}

static void try_rows(fuzz_bytes* in) {
    enum { MOST_ROWS = 16 };
    const kmla_length_rule rule = any_rule(in);
    const int64_t length = any_number(in);
    const int32_t rows = fuzz_chance(in, 8) ? -fuzz_below(in, 4) : 1 + fuzz_below(in, MOST_ROWS);
    int64_t begins[MOST_ROWS + 1], ends[MOST_ROWS + 1];
    kmla_error error = unwritten;
    for (int i = 0; i <= MOST_ROWS; i++) {
        begins[i] = ends[i] = -77;
    }
    const kmla_status status = kmla_row_ranges(&rule, length, rows, begins, ends, &error);
    check_error(status, &error);
    for (int32_t i = 0; i <= MOST_ROWS; i++) {
        if (status == KMLA_OK && i < rows) {
            check_row(&rule, length, rows, i, begins[i], ends[i]);
        } else {
            FUZZ_CHECK(begins[i] == -77 && ends[i] == -77);
        }
    }
}

// =============================================================================
// Splits and workspace
// =============================================================================

typedef struct split_args {
    int32_t mode, splits, single;
    int64_t capacity, begin, end;
} split_args;

static int64_t chunks_of(int64_t tokens) { return tokens / 64 + (tokens % 64 != 0); }

// What split s of the row may hold, by the rule.
static void check_split(const split_args* a, int32_t split, int64_t begin, int64_t end,
                        int64_t live_begin, int64_t live_end) {
    const int64_t live = chunks_of(live_end) - live_begin / 64;
    const int64_t share = chunks_of(a->capacity) / a->splits +
                          (chunks_of(a->capacity) % a->splits != 0);
    if (live <= a->single) {
        FUZZ_CHECK(split == 0 && begin == live_begin && end == live_end);
    } else if (a->mode == KMLA_SPLIT_STATIC) {
        FUZZ_CHECK(begin / 64 >= split * share && chunks_of(end) <= (split + 1) * share);
    } else {
        const int64_t used = live < a->splits ? live : a->splits;
        const int64_t mine = chunks_of(end) - begin / 64;
        FUZZ_CHECK(split < used && mine == live / used + (split < live % used));
    }
}

// The parts of all splits follow each other from the row's begin to its end.
static void check_splits(const split_args* a) {
    const int64_t live_end = a->end < a->capacity ? a->end : a->capacity;
    const int64_t live_begin = a->begin < live_end ? a->begin : live_end;
    int64_t next = live_begin;
    for (int32_t split = 0; split < a->splits; split++) {
        kmla_error error = unwritten;
        int64_t begin = -77, end = -77;
        FUZZ_CHECK(kmla_split_range(a->mode, a->splits, split, a->capacity, a->single, a->begin,
                                    a->end, &begin, &end, &error) == KMLA_OK);
        FUZZ_CHECK(begin <= end);
        if (begin < end) {
            FUZZ_CHECK(begin == next && end <= live_end);
            FUZZ_CHECK(begin == live_begin || begin % 64 == 0);
            FUZZ_CHECK(end == live_end || end % 64 == 0);
            check_split(a, split, begin, end, live_begin, live_end);
            next = end;
        }
    }
    FUZZ_CHECK(next == live_end);
}

static void try_splits(fuzz_bytes* in) {
    split_args a;
    kmla_error error = unwritten;
    int64_t begin = -77, end = -77;
    a.mode = any_of(in, 2);
    a.splits = any_int(in);
    a.single = any_int(in);
    a.capacity = any_number(in);
    a.begin = any_number(in);
    a.end = any_number(in);
    const int32_t split = any_int(in);
    const kmla_status status = kmla_split_range(a.mode, a.splits, split, a.capacity, a.single,
                                                a.begin, a.end, &begin, &end, &error);
    check_error(status, &error);
    FUZZ_CHECK((status == KMLA_OK) == (begin != -77) && (begin != -77) == (end != -77));
    error = unwritten;
    if (kmla_split_range(a.mode, a.splits, 0, a.capacity, a.single, a.begin, a.end, &begin, &end,
                         &error) == KMLA_OK) {
        check_splits(&a);
    } else {
        FUZZ_CHECK(status != KMLA_OK);
    }
}

// S * R * H * (512 * size + 4), nothing for one split.
static wide workspace_of(int32_t rows, int32_t heads, int32_t splits, int32_t type) {
    const wide vectors = (wide)rows * heads * splits;
    return splits == 1 ? 0 : vectors * (512 * (type == KMLA_FP32 ? 4 : 2) + 4);
}

static void try_workspace(fuzz_bytes* in) {
    const int32_t rows = any_int(in), heads = any_int(in), splits = any_int(in);
    const int32_t type = any_of(in, 2);
    const int valid = rows > 0 && heads > 0 && splits > 0 && (type == 0 || type == 1);
    uint64_t bytes = 77;
    kmla_error error = unwritten;
    const kmla_status status = kmla_workspace_bytes(rows, heads, splits, type, &bytes, &error);
    check_error(status, &error);
    FUZZ_CHECK((status == KMLA_ERROR_ARGUMENT) == !valid);
    if (status == KMLA_OK) {
        FUZZ_CHECK(bytes == workspace_of(rows, heads, splits, type));
    } else {
        FUZZ_CHECK(bytes == 77);
        FUZZ_CHECK(!valid || workspace_of(rows, heads, splits, type) >= INT64_MAX);
    }
}

// =============================================================================
// A whole plan
// =============================================================================

// Arguments that fit a plan: dense, at addresses that are never read.
static kmla_decode plain_decode(const kmla_plan* plan) {
    const kmla_shape* shape = &plan->shape;
    kmla_decode args;
    memset(&args, 0, sizeof args);
    args.query = args.kv = args.out = args.lse = args.workspace = 4096;
    args.scale = args.query_scale = args.kv_scale = 1.0f;
    args.kv_pages = 1;
    args.lengths = 4;
    args.row_offsets = shape->ragged ? 4 : 0;
    args.workspace_bytes = plan->workspace_bytes;
    if (shape->slot_list) {
        args.slot_list = 4;
        args.slot_list_width = shape->capacity_tokens;
    } else {
        args.block_table = 4;
        args.block_table_width = shape->capacity_tokens / shape->page_tokens + 1;
    }
    return args;
}

static void check_workspace_limit(const kmla_plan* plan) {
    kmla_error error = unwritten;
    kmla_decode args = plain_decode(plan);
    const kmla_status status = kmla_check_decode(plan, &args, &error);
    check_error(status, &error);
    FUZZ_CHECK(status == KMLA_OK);
    if (plan->workspace_bytes > 0) {
        args.workspace_bytes--;
        FUZZ_CHECK(kmla_check_decode(plan, &args, &error) == KMLA_ERROR_WORKSPACE);
    }
}

static void check_card(const kmla_plan* plan) {
    const kmla_device* card = &plan->device;
    if (plan->reader == KMLA_READER_HOST) {
        FUZZ_CHECK(plan->launches == 0 && plan->shared_bytes == 0);
        return;
    }
    if (plan->reader == KMLA_READER_HOPPER) {
        FUZZ_CHECK(card->compute_major == 9 && card->compute_minor == 0);
        FUZZ_CHECK(plan->shape.kv_format != KMLA_KV_BF16);
        FUZZ_CHECK(plan->tile % 8 == 0 && plan->tile >= 8 && plan->tile <= 56);
        FUZZ_CHECK(plan->stages >= 5 && plan->stages <= 10); // runs of its ring
    } else {
        FUZZ_CHECK(plan->tile == 8 || plan->tile == 16 || plan->tile == 32);
        FUZZ_CHECK(plan->stages == 2);
    }
    FUZZ_CHECK(plan->launches == (plan->splits > 1 ? 2 : 1));
    FUZZ_CHECK(card->compute_major >= 8);
    FUZZ_CHECK(plan->shared_bytes > 0 && plan->shared_bytes <= card->shared_bytes);
    FUZZ_CHECK(plan->threads > 0 && plan->threads <= 1024 && plan->threads % 32 == 0);
    FUZZ_CHECK(plan->resident >= 1);
    FUZZ_CHECK(plan->resident == 1 || // and each takes 1 KiB more
               plan->resident * (plan->shared_bytes + (int64_t)1024) <= card->shared_bytes_sm);
}

static void check_plan(const kmla_plan* plan, const kmla_shape* given) {
    const kmla_shape* shape = &plan->shape;
    const int64_t rows = shape->slot_list ? 1 : shape->rows_per_request;
    const int64_t vectors = rows * shape->heads;
    FUZZ_CHECK(plan->version == KMLA_VERSION);
    FUZZ_CHECK(given->reader == 0 || plan->reader == KMLA_READER_HOST ||
               given->reader == plan->reader);
    FUZZ_CHECK(given->tile == 0 || given->tile == plan->tile);
    FUZZ_CHECK(given->splits == 0 || given->splits == plan->splits);
    FUZZ_CHECK(plan->splits_chosen_by ==
               (given->splits ? KMLA_CHOSEN_BY_CALLER : KMLA_CHOSEN_BY_PLANNER));
    FUZZ_CHECK(shape->tile == plan->tile && shape->splits == plan->splits);
    FUZZ_CHECK((int64_t)plan->tiles_per_request * plan->tile >= vectors);
    FUZZ_CHECK((int64_t)(plan->tiles_per_request - 1) * plan->tile < vectors);
    FUZZ_CHECK(plan->groups == (shape->slot_list ? shape->rows : shape->requests));
    FUZZ_CHECK(shape->ragged || shape->rows == (int64_t)shape->requests * shape->rows_per_request);
    FUZZ_CHECK(plan->groups + shape->ragged <= 65535); // a grid's z
    FUZZ_CHECK(plan->splits >= 1 && plan->splits <= KMLA_MAX_SPLITS);
    FUZZ_CHECK(plan->chunks == chunks_of(shape->capacity_tokens));
    FUZZ_CHECK((int64_t)plan->chunks_per_split * plan->splits >= plan->chunks);
    FUZZ_CHECK((int64_t)(plan->chunks_per_split - 1) * plan->splits < plan->chunks);
    FUZZ_CHECK(plan->workspace_bytes ==
               workspace_of(shape->rows, shape->heads, plan->splits, shape->partial_type));
    FUZZ_CHECK(plan->reason[0] != '\0' && memchr(plan->reason, 0, sizeof plan->reason));
    check_card(plan);
    check_workspace_limit(plan);
}

// A plan's own shape, defaults filled in, is planned to the same.
static void check_again(const kmla_plan* plan) {
    kmla_error error = unwritten;
    kmla_plan again;
    FUZZ_CHECK(kmla_plan_decode(&plan->shape, &plan->device, &again, &error) == KMLA_OK);
    again.splits_chosen_by = plan->splits_chosen_by;
    memcpy(again.reason, plan->reason, sizeof again.reason);
    FUZZ_CHECK(memcmp(&again, plan, sizeof again) == 0);
}

static void try_plan(fuzz_bytes* in) {
    const kmla_shape shape = any_shape(in);
    const kmla_device device = any_device(in);
    kmla_plan plan, nothing;
    kmla_error error = unwritten;
    memset(&nothing, 0x77, sizeof nothing);
    plan = nothing;
    const kmla_status status = kmla_plan_decode(&shape, &device, &plan, &error);
    check_error(status, &error);
    if (status == KMLA_OK) {
        check_plan(&plan, &shape);
        check_again(&plan);
    } else {
        FUZZ_CHECK(memcmp(&plan, &nothing, sizeof plan) == 0);
    }
}

// =============================================================================
// Checks of arguments that nobody made: they only have to be defined, and to stop what cannot be
// =============================================================================

// A valid plan with some bytes written over.
static void try_check_decode(fuzz_bytes* in) {
    kmla_shape shape;
    kmla_plan plan;
    kmla_error error = unwritten;
    memset(&shape, 0, sizeof shape);
    shape.requests = 1 + fuzz_below(in, 4);
    shape.heads = 1 + fuzz_below(in, 128);
    shape.kv_format = fuzz_below(in, 3);
    shape.query_format = fuzz_below(in, 3);
    shape.capacity_tokens = 1 + fuzz_below(in, 4096);
    shape.splits = 1 + fuzz_below(in, 4);
    shape.slot_list = fuzz_below(in, 2);
    FUZZ_CHECK(kmla_plan_decode(&shape, NULL, &plan, &error) == KMLA_OK);
    kmla_decode args = plain_decode(&plan);
    for (int changes = fuzz_below(in, 4); changes > 0; changes--) {
        const int in_plan = fuzz_chance(in, 4);
        uint8_t* target = in_plan ? (uint8_t*)&plan : (uint8_t*)&args;
        const size_t words = (in_plan ? sizeof plan : sizeof args) / 4;
        const size_t at = 4 * (size_t)fuzz_below(in, (int32_t)words);
        const int64_t value = any_number(in);
        memcpy(target + at, &value, at % 8 == 0 && fuzz_chance(in, 2) ? 8 : 4);
    }
    if (fuzz_chance(in, 4)) {
        args.scale = any_float(in);
    }
    const kmla_status status = kmla_check_decode(&plan, &args, &error);
    check_error(status, &error);
    if (status == KMLA_OK) {
        FUZZ_CHECK(args.query != 0 && args.query % 16 == 0 && args.kv != 0 && args.kv % 16 == 0);
        FUZZ_CHECK(args.out != 0 && args.out % 16 == 0 && args.lengths % 4 == 0);
        FUZZ_CHECK(args.page_pitch_bytes % 16 == 0 && args.kv_pages > 0);
        FUZZ_CHECK(args.scale > 0.0f && args.scale <= 3.4e38f);
        FUZZ_CHECK(plan.shape.splits == 1 || plan.splits == 1 || args.workspace % 16 == 0);
    }
}

static void try_check_combine(fuzz_bytes* in) {
    kmla_combine args;
    kmla_error error = unwritten;
    memset(&args, 0, sizeof args);
    args.parts = 1 + fuzz_below(in, 8);
    args.rows = args.heads = 1;
    args.part_out = args.part_lse = args.out = 64;
    for (int changes = fuzz_below(in, 4); changes > 0; changes--) {
        const size_t at = 4 * (size_t)fuzz_below(in, sizeof args / 4);
        const int64_t value = any_number(in);
        memcpy((uint8_t*)&args + at, &value, at % 8 == 0 && fuzz_chance(in, 2) ? 8 : 4);
    }
    const kmla_status status = kmla_check_combine(&args, &error);
    check_error(status, &error);
    if (status == KMLA_OK) {
        FUZZ_CHECK(args.parts >= 1 && args.parts <= 1024 && args.rows >= 1 && args.heads >= 1);
        FUZZ_CHECK(args.part_out % 16 == 0 && args.part_lse % 4 == 0 && args.out % 16 == 0);
    }
}

// Slices lie in the array, hold the rank's heads, and begin where the rank before ends.
static void try_gather(fuzz_bytes* in) {
    kmla_gather_desc desc;
    kmla_gather gather, before;
    kmla_error error = unwritten;
    memset(&desc, 0, sizeof desc);
    desc.heads = any_int(in);
    desc.ranks = any_int(in);
    desc.rank = any_int(in);
    if (desc.ranks > 0 && !fuzz_chance(in, 16)) {
        desc.rank = (int32_t)((uint32_t)desc.rank % (uint32_t)desc.ranks);
    }
    desc.rows = any_int(in);
    desc.query_format = any_of(in, 3);
    desc.out_type = any_of(in, 2);
    desc.equal_slices = any_of(in, 2);
    desc.stored_heads = fuzz_chance(in, 2) ? any_int(in) : 0;
    const kmla_status status = kmla_plan_gather(&desc, &gather, &error);
    check_error(status, &error);
    if (status != KMLA_OK) {
        return;
    }
    const kmla_slices* arrays[] = {&gather.query, &gather.out, &gather.lse};
    for (int i = 0; i < 3; i++) {
        FUZZ_CHECK(arrays[i]->offset_bytes + arrays[i]->slice_bytes <= arrays[i]->bytes);
        FUZZ_CHECK(arrays[i]->head_stride == desc.rows * arrays[i]->row_stride);
    }
    FUZZ_CHECK(gather.local_heads >= 0 && gather.local_heads <= gather.slice_heads);
    FUZZ_CHECK(gather.gathered_heads >= desc.heads);
    FUZZ_CHECK(gather.exchanges == (gather.desc.ranks > 1));
    if (desc.rank > 0) {
        desc.rank--;
        FUZZ_CHECK(kmla_plan_gather(&desc, &before, &error) == KMLA_OK);
        FUZZ_CHECK(before.first_head + before.slice_heads == gather.first_head);
        FUZZ_CHECK(before.local_heads - gather.local_heads <= 1);
        FUZZ_CHECK(before.local_heads >= gather.local_heads);
    } else {
        FUZZ_CHECK(gather.first_head == 0);
    }
}

static void try_check_writers(fuzz_bytes* in) {
    kmla_kv_write kv;
    kmla_query_write query;
    kmla_error error = unwritten;
    memset(&kv, 0, sizeof kv);
    memset(&query, 0, sizeof query);
    kv.tokens = query.rows = query.heads = 1;
    kv.kv_scale = query.query_scale = any_float(in);
    kv.latent = kv.rope = kv.slots = kv.kv = query.source = query.query = 64;
    kv.kv_pages = 1;
    for (int changes = fuzz_below(in, 4); changes > 0; changes--) {
        const int64_t value = any_number(in);
        const int bytes = fuzz_chance(in, 2) ? 8 : 4;
        memcpy((uint8_t*)&kv + 8 * (size_t)fuzz_below(in, sizeof kv / 8), &value, (size_t)bytes);
        memcpy((uint8_t*)&query + 8 * (size_t)fuzz_below(in, sizeof query / 8), &value,
               (size_t)bytes);
    }
    check_error(kmla_check_kv_write(&kv, &error), &error);
    error = unwritten;
    check_error(kmla_check_query_write(&query, &error), &error);
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
    fuzz_bytes in = {data, bytes};
    switch (fuzz_byte(&in) % 11) {
        case 0: try_heads(&in); break;
        case 1: try_dcp(&in); break;
        case 2: try_rows(&in); break;
        case 3: try_splits(&in); break;
        case 4: try_workspace(&in); break;
        case 5: try_check_decode(&in); break;
        case 6: try_check_combine(&in); break;
        case 7: try_check_writers(&in); break;
        case 8: try_gather(&in); break;
        default: try_plan(&in); break;
    }
    return 0;
}
