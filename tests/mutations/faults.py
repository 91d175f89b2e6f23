"""The faults that run.py applies. `old` is found exactly once in its file, which is one of
tools/device/ or kimi_mla.h (there outside the device source); choose it short and telling. `suite`
names the tests that should see it, `card` the emulated architecture that they run on, `group` the
one group of device_test that alone should, where the whole suite would take long, or the one test
of the GPU side with the fake libraries."""

import dataclasses


@dataclasses.dataclass
class Fault:
    what: str
    file: str
    old: str
    new: str
    suite: str = "device"
    card: str = "sm120"
    group: str = ""


def reader(what, old, new, **where):
    return Fault(what, "reader.cuh", old, new, **where)


def hopper(what, old, new, **where):
    return Fault(what, "hopper.cuh", old, new, card="sm90", **where)


def tile(what, old, new, **where):
    return Fault(what, "tile.cuh", old, new, **where)


def records(what, old, new, **where):
    return Fault(what, "records.cuh", old, new, **where)


def merge(what, old, new, **where):
    return Fault(what, "merge.cuh", old, new, **where)


def writers(what, old, new):
    return Fault(what, "writers.cuh", old, new, suite="records")


def launch(what, old, new, **where):
    return Fault(what, "kimi_mla.h", old, new, **where)


def planner(what, old, new):
    return Fault(what, "kimi_mla.h", old, new, suite="planner")


def host(what, old, new):
    return Fault(what, "kimi_mla.h", old, new, suite="host")


def gpu_side(test, what, old, new):
    return Fault(what, "kimi_mla.h", old, new, suite="gpu side", group=f"test_{test}")


FAULTS = [
    # ---- the reader's arithmetic
    reader("accumulators are not rescaled", "        rescale_out(s);\n", ""),
    reader("the sum is not rescaled", "            unit.sum[i] *= factor;\n", ""),
    reader("the weights' reference moves when the sum's is raised",
           "unit.weight_reference[i] - (same ? 0 : raised - old);", "unit.weight_reference[i];"),
    reader("maxima above another tile's", "of_tokens(tile)[n] - raised +", "of_tokens(0)[n] - raised +"),
    reader("weights of old references are kept",
           "        raise_references(s, x, exponent);\n"
           "        store_weights(s, x, exponent, sum);\n",
           "        raise_references(s, x, exponent);\n"),
    reader("scores of a group twice", "(sum[slot][2][i] + sum[slot][3][i]);",
           "(sum[slot][2][i] + sum[slot][2][i]);"),
    reader("a unit of another owner", "int owner = s.owner ^ unit % kOwners,",
           "int owner = s.owner ^ (unit + 1) % kOwners,"),
    reader("columns of another owner's query", "staged_query(s.dims, k, column_of(s, j))",
           "staged_query(s.dims, k, j)"),
    reader("halves of 16 dims in the order of codes", "        if (!codes) {\n", "        if (false) {\n"),
    reader("rescaling forgets the upper of two vectors",
           "s.out[m][j][2] *= low, s.out[m][j][3] *= high;", "s.out[m][j][2] *= low;"),
    reader("a scale of another group", "KMLA_PACKED_SCALE_OFFSET + 4 * s.dims,",
           "KMLA_PACKED_SCALE_OFFSET + 4 * (s.dims ^ 1),"),
    reader("ratios of another group", "(ratios_of(s.warp / 2) + token)",
           "(ratios_of(s.warp / 2 ^ 1) + token)"),
    reader("scale ratios are dropped", "                scale_weights(s, 16 * k, weight);\n",
           "                ;\n"),
    reader("a token's exponent is that of its first scale, not its largest",
           "    largest = maximum(largest, shuffle_xor(largest, 2));\n", ""),
    reader("kv_scale is dropped from the output", ": args.kv_scale);", ": 1.0f);"),
    reader("BF16 weights without their low term",
           "mma_bf16(s.out[m][j], a[m], weight[j][2], weight[j][3]);", ";"),
    reader("the query is not normalised back", "of_tokens(0)[n] = args.score_scale * norm;",
           "of_tokens(0)[n] = args.score_scale;"),
    reader("packed rope in f16", "to_f16 = codes; //", "to_f16 = true; //"),
    reader("a BF16 query is not rounded in e4m3 mode", "            x = round_to_packed(x);\n", ""),
    reader("the query's last 64 dims are of a packed record's codes",
           "if (codes && !(packed && i == kGroups)) {", "if (codes) {"),
    reader("no wait for the query", "    copy_async_wait<1>();", "    copy_async_wait<2>();"),
    reader("no barrier before query fragments are loaded",
           "    sync_block();\n#pragma unroll\n    for (int k = 0; k < kQuerySteps; k++) {",
           "#pragma unroll\n    for (int k = 0; k < kQuerySteps; k++) {"),
    reader("no barrier behind query fragments", "    sync_block(); // before the second step's", "    //"),
    reader("a maximum without half of its lanes",
           "    top = maximum(top, shuffle_xor(top, 4));\n", ""),
    reader("a sum without half of its lanes", "            sum += shuffle_xor(sum, 4);\n", ""),
    reader("a sum of the first 16 tokens of steps",
           "        for (int tile = 0; tile < kStepTiles; tile++) {\n            sum +=",
           "        for (int tile = 0; tile < 1; tile++) {\n            sum +="),

    # ---- which tokens
    reader("no mask at the end of a row", "token < range.end && exists;", "exists;"),
    reader("no mask at the begin of a row", "token >= range.begin && token", "token"),
    reader("a hole of the table counts as a token", "ballot(entry >= 0) & ((1u", "((1u"),
    reader("a whole step is masked too little", "tokens.full_end - first) / kStep;",
           "tokens.full_end - first + kStep - 1) / kStep;"),
    reader("a step too early counts as whole", "(tokens.full_begin - first + kStep - 1) / kStep",
           "(tokens.full_begin - first) / kStep"),
    tile("holes are forgotten in whole steps", "return (m.x & m.y & m.z & m.w) == all;",
         "return true;"),
    reader("NaN codes of unseen tokens reach the output",
           ": only_numbers_e4m3(*at);", ": *at;"),
    reader("NaN BF16 of unseen tokens reaches the output", "only_numbers_bf16(*at) :", "*at :",
           group="NaN tokens"),
    reader("values are cleaned of one warp's dims", "+ words * s.warp + i % words;", "+ i % words;"),
    reader("no barrier between cleaning and loading",
           "        sync_block(); // between a warp's lanes\n", ""),
    records("static split one chunk late", "chunk = split * args.chunks_per_split;",
            "chunk = split * args.chunks_per_split + 1;"),
    records("balanced splits overlap by a chunk", "(split < longer ? 1 : 0)",
            "(split <= longer ? 1 : 0)"),
    records("single-split rule off by one", "live <= args.single_split_chunks",
            "live < args.single_split_chunks", group="single split bits"),
    records("causal bound off by one", "bound - rows + 1 + i;", "bound - rows + i;"),
    records("window of a request off by one", "bound - args.window : 0;",
            "bound - args.window + 1 : 0;"),
    records("window of a row off by one", "maximum(range.end - args.window, 0)",
            "maximum(range.end - args.window - 1, 0)"),
    records("row offsets subtracted from a local length", "minimum(local_length(args, (int)bound),",
            "minimum(maximum(local_length(args, length) - (int)(length - bound), 0),"),
    records("a rank's share without its upper limit",
            "rest > args.dcp_interleave ? args.dcp_interleave : rest;",
            "rest;"),
    records("capacity is not clamped", "minimum(maximum(length, 0), args.capacity);",
            "maximum(length, 0);"),

    # ---- where things are
    records("32-bit offset into the pool", "(uint64_t)page * args.page_pitch",
            "(uint32_t)((uint32_t)page * (uint32_t)args.page_pitch)", group="PG-0"),
    records("page pitch is ignored", "(uint64_t)page * args.page_pitch",
            "(uint64_t)page * args.page_tokens * record_bytes"),
    records("pages of an odd size by a wrong remainder", "offset = slot - page * args.page_tokens;",
            "offset = slot & (args.page_tokens - 1);"),
    tile("row stride of the output is ignored", "final ? target_of(args.out, row * args.out_row_stride +",
         "final ? target_of(args.out, row * args.heads * args.out_head_stride +"),
    tile("row stride of the lse is ignored", "[row * args.lse_row_stride +",
         "[row * args.heads +"),
    reader("head stride of the query is ignored", "vector % args.heads * args.query_head_stride",
           "vector % args.heads * (args.query_row_stride / args.heads)"),
    tile("partials of splits one row too near", "split * (int64_t)args.rows + row)",
         "split * (int64_t)(args.rows - 1) + row)"),
    tile("dead rows keep their old output", "args.splits == 1 && dim < KMLA_LATENT_DIMS", "false"),
    tile("dead rows keep their old lse", "        if (dim == 0) {\n", "        if (false) {\n"),

    # ---- results
    tile("lse in base 2", "(reference + log2_fast(sum)) * ln_2;", "reference + log2_fast(sum);"),
    tile("an empty row weighs something", "float lse = empty ? -infinity() :", "float lse = empty ? 0 :"),
    tile("an empty row is divided by 0", "factors()[n] = empty ? 0 :", "factors()[n] = false ? 0 :"),
    tile("a split that saw all writes a partial", "(!empty && range_of(n).whole)", "false",
         group="single split bits"),

    # ---- waiting and meeting
    reader("no wait for a step's copies", "    copy_async_wait<0>();\n", ""),
    reader("no barrier behind a step's copies", "    copy_async_wait<0>();\n    sync_block();\n",
           "    copy_async_wait<0>();\n", card="sm80"),
    reader("no wait for a step's bulk copy",
           "        barrier_wait(arrival_of(step), (uint32_t)(step / kStages) & 1);\n", ""),
    reader("no barrier between scores and softmax",
           "        sync_block();\n#pragma unroll\n        for (int slot = 0;",
           "#pragma unroll\n        for (int slot = 0;"),
    reader("no barrier between rounds of scores", "if (first > 1) {", "if (false) {"),
    reader("no barrier between weights and PV",
           "sync_block_or(store_weights(s, x, exponent, sum))",
           "ballot(store_weights(s, x, exponent, sum))"),
    reader("no barrier between maxima and references",
           "    store_tops(s, x, exponent);\n    sync_block();",
           "    store_tops(s, x, exponent);"),
    reader("no barrier behind new weights",
           "        store_weights(s, x, exponent, sum);\n        sync_block();\n",
           "        store_weights(s, x, exponent, sum);\n"),
    reader("ratios are stored while the step before needs them",
           "    exchange_scores(s, score, x); // behind its barrier all are done with the step before\n"
           "    store_ratio(s, ratio);\n",
           "    store_ratio(s, ratio);\n    exchange_scores(s, score, x);\n"),
    reader("no barrier between sums and results", "        }\n    }\n    sync_block();\n}\n\n// O and lse",
           "        }\n    }\n}\n\n// O and lse"),
    reader("no barrier before results are stored", "    sync_block();\n    store_results(",
           "    store_results("),
    tile("no barrier between the bounds of warps and of the tile",
         "    sync_block();\n    if (thread_index() == 0) {\n        for (int w",
         "    if (thread_index() == 0) {\n        for (int w", card="sm90"),
    reader("a step is copied over one in use",
           "                barrier_wait(free_of(step), (uint32_t)(step / kStages - 1) & 1);\n", ""),
    reader("copies of the 17th step are those of the first",
           "if (ahead % kLookUpSteps == 0 && ahead < steps) {", "if (false) {"),

    # ---- the Hopper reader: what it computes
    hopper("accumulators are not rescaled", "out[m][4 * j + i] *= factor[i % 2];", ";"),
    hopper("a step that rescales does not say so", "rescaled(s.group) = grown;",
           "rescaled(s.group) = 0;"),
    hopper("V's scale moves, its products stay", "factor * now * bits_float(",
           "factor; (void)bits_float(", group="extreme scales"),
    hopper("sums are not rescaled by the group's own steps", "        scale_sums(s, s.group);\n",
           ""),
    hopper("sums are not rescaled by the other group's steps",
           "        scale_sums(s, 1 - s.group);\n", ""),
    hopper("weights of old references are kept",
           "        store_weights(s, score, power, of_step);\n        fence_async_reads();\n",
           "        fence_async_reads();\n"),
    hopper("scores of a group without its scale", "            scale_scores(score, scales",
           "            (void)(scales"),
    hopper("scale ratios are dropped", "kPacked ? multiply_f16x2(pair[i], ratio) : pair[i];",
           "pair[i];"),
    hopper("kv_scale is dropped from the output", ": args.kv_scale;", ": 1.0f;"),
    hopper("sums of one group only", "for (int row = 0; row < 2 * kScoreWarps; row++) {",
           "for (int row = 0; row < kScoreWarps; row++) {"),

    # ---- the Hopper reader: which tokens
    hopper("no mask at the end of a row", "token + 8 >= range.begin && token + 8 < range.end &&",
           "token + 8 >= range.begin &&"),
    hopper("a hole of the table counts as a token", "(tokens >> 8 & 1);", "true;"),
    hopper("NaN codes of unseen tokens reach the output",
           "masked ? minimum_f16x2(value, largest) : value;", "value;"),
    hopper("a whole step is masked too little", "token <= bounds().full_end - kStep &&",
           "token <= bounds().full_end &&"),
    hopper("16 values too few at the end", "kStep) + 15) / 16;", "kStep)) / 16;", group="lengths"),

    # ---- the Hopper reader: waiting and meeting
    hopper("no wait for a step's first run",
           "    barrier_wait(arrival_of(low.slot), low.parity);\n", ""),
    hopper("no wait for a step's second run",
           "    barrier_wait(arrival_of(high.slot), high.parity);\n", ""),
    hopper("a run ends before its copies by record", "    copy_arrive(arrival_of(slot));\n",
           "    barrier_arrive(arrival_of(slot));\n"),
    hopper("a run is copied over one in use",
           "            barrier_wait(weights_free(1 - buffer), (uint32_t)((step - 1) / 2) & 1);\n",
           ""),
    hopper("no proxy fence behind the staged query",
           "        stage_vector(args, q);\n    }\n    fence_async_reads();\n",
           "        stage_vector(args, q);\n    }\n"),
    hopper("no fence between weights and their matrix reads",
           "grown = store_weights(s, score, power, of_step);\n        fence_async_reads();\n",
           "grown = store_weights(s, score, power, of_step);\n"),
    hopper("no barrier between the query and its products",
           "    stage_query(args, q);\n    sync_block();\n", "    stage_query(args, q);\n"),
    hopper("no barrier after the ranges", "    sync_block();\n    token_walk walk = find_walk();",
           "    token_walk walk = find_walk();"),
    hopper("codes are converted over those in flight",
           "            wgmma_wait<1>(); // the batch before", "            //"),
    hopper("no wait for a group's scores",
           "            wgmma_wait<0>();\n            scale_scores", "            scale_scores"),
    hopper("no wait for the last scores", "    wgmma_wait<0>();\n}\n\n// ---- scales of values",
           "}\n\n// ---- scales of values"),
    hopper("values are converted over those in flight", "        wgmma_wait<buffers - 1>();\n",
           ""),
    hopper("no wait for the last values", "        wgmma_wait<buffers - 1>();\n    }\n"
           "    wgmma_wait<0>();\n", "        wgmma_wait<buffers - 1>();\n    }\n"),
    hopper("weights are stored over those in use",
           "        barrier_wait(weights_free(buffer), (uint32_t)(step / 2 - 1) & 1);\n",
           "        ;\n"),
    hopper("values do not wait for weights",
           "        barrier_wait(weights_ready(buffer), (uint32_t)(step / 2) & 1);\n", ""),
    hopper("the turn is passed while references are still read",
           "        scale_sums(s, s.group);\n        store_weights(s, score, power, of_step);\n"
           "        fence_async_reads();\n        meet_group(s);\n    }\n    pass_turn(s);",
           "        pass_turn(s);\n        scale_sums(s, s.group);\n"
           "        store_weights(s, score, power, of_step);\n        fence_async_reads();\n"
           "        meet_group(s);\n    } else {\n        pass_turn(s);\n    }\n"),
    hopper("a group takes its turn unasked", "named_barrier_sync(kTurnBarrier + (uint32_t)s.group",
           "named_barrier_arrive(kTurnBarrier + (uint32_t)s.group"),
    hopper("no barrier between weights and the vote about them",
           "    meet_group(s);\n    word4 votes", "    word4 votes"),
    hopper("no barrier before the maxima's scratch",
           "    meet_group(s); // the scratch is free", "    //"),
    hopper("no barrier between maxima and references",
           "    store_tops<kind>(s, score, power);\n    meet_group(s);\n",
           "    store_tops<kind>(s, score, power);\n"),
    hopper("no barrier behind new references",
           "bits_float((254u << 23) - float_bits(before));\n    }\n    meet_group(s);\n",
           "bits_float((254u << 23) - float_bits(before));\n    }\n"),
    hopper("no barrier behind new weights", "fence_async_reads();\n        meet_group(s);\n",
           "fence_async_reads();\n"),
    hopper("no barrier between the sums of warps",
           "    named_barrier_sync(kSumBarrier, 2 * kScoreThreads);\n", ""),
    hopper("results are stored before the sums are known",
           "    named_barrier_sync(kEndBarrier, kScoreThreads + kValueThreads);\n",
           "    named_barrier_arrive(kEndBarrier, kScoreThreads + kValueThreads);\n"),

    # ---- formats
    records("E4M3 does not saturate", "if (magnitude > float_bits(448.0f)) {", "if (false) {"),
    records("E4M3 subnormals are cut off, not rounded", "bits_float(magnitude) * 512.0f +",
            "(float)(int)(bits_float(magnitude) * 512.0f) +", suite="records"),
    records("scale of a query is not rounded up", "((bits & 0x007FFFFFu) ? 0x00800000u : 0)", "0"),
    records("NaN codes become numbers where sm_80 converts", " | nan * 0x7FFFu;", ";",
            card="sm80", group="NaN tokens"),
    records("the sign is lost where sm_80 converts", " | (high_bytes & 0x80008000u);", ";",
            card="sm80"),

    # ---- merge and combine
    merge("a payload of weight 0 is read", "weight[k] > 0 ? first + i + k : top_part;",
          "first + i + k < args.parts ? first + i + k : top_part;"),
    merge("NaN of a split is lost in the merge", "is_merge && ballot(nan)", "false",
          group="NaN tokens"),
    merge("a finished row is merged again", "is_merge && ballot(done)", "false"),
    merge("weights in base e", "exp2_fast((lse - top) * log2_e)", "exp2_fast(lse - top)"),
    merge("an infinite lse counts", "lse > -infinity() && lse < infinity();", "lse > -infinity();"),
    merge("only the first 32 parts are merged",
          "for (int first = 0; first < args.parts && top > -infinity(); first += 32)",
          "for (int first = 0; first < 1 && top > -infinity(); first += 32)", suite="records"),

    merge("a share reads a payload of weight 0", "weight > 0 && first + i == args.share - 1",
          "first + i == args.share - 1", group="LC-06 shares"),
    merge("a share is of the part beside", "first + i == args.share - 1",
          "first + i == args.share % args.parts", group="LC-06 shares"),

    # ---- writers
    writers("a slot past the pool is written", "(uint64_t)slot >= args.kv_slots", "false"),
    writers("scales are never powers of two", "if (args.power_of_two) {", "if (false) {"),
    writers("no smallest scale", "maximum(divide(group_amax(x), 448.0f), smallest_normal)",
            "divide(group_amax(x), 448.0f)"),
    writers("an infinity blinds its group", "amax > largest ? largest : amax;", "amax;"),

    # ---- launching
    launch("kv_scale is dropped from scores", "1.44269504f * out->kv_scale;", "1.44269504f;"),
    launch("query_scale is dropped", "        out->score_scale *= args->query_scale;\n", ""),
    launch("lse of partials where BF16 payloads end",
           "kmla_i_type_bytes(plan->shape.partial_type);", "2;"),
    launch("a reference is kept until f16 overflows", "#define KMLA_I_REFERENCE_GROWTH 15",
           "#define KMLA_I_REFERENCE_GROWTH 25"),
    launch("one block of warps too few", "kmla_i_blocks_of_warps(int64_t count) {",
           "kmla_i_blocks_of_warps(int64_t count) {\n    count = count > 4 ? count - 4 : count;"),

    # ---- planning
    planner("a 16-head tile for 16 heads", "effective > 16 ? 16 : 8;",
           "effective >= 16 ? 16 : 8;"),
    planner("heads are padded down", "kmla_i_ceil_div(effective, unit) * unit;",
           "effective / unit * unit;"),
    planner("the rest of a tile needs no launch", "padded % tile ? 2 : 1;", "1;"),
    planner("effective heads overflow", "effective > 1 << 20)", "effective > 1 << 30)"),
    planner("a rank's share without its upper limit",
           "kmla_i_min(kmla_i_max(rest, 0), interleave);", "kmla_i_max(rest, 0);"),
    planner("owners by token, not by run", "(int32_t)(run % full.ranks);",
           "(int32_t)(global_token % full.ranks);"),
    planner("equal slices begin where dealt heads do", "? desc->rank * widest",
           "? desc->rank * share"),
    planner("the longer slices are forgotten in an offset",
           "desc->rank * share + (int32_t)kmla_i_min(desc->rank, longer);", "desc->rank * share;"),
    planner("a slice of one row", "(uint64_t)(g->slice_heads * head_bytes)",
           "(uint64_t)(g->slice_heads * unit_bytes)"),
    planner("a plan with too few rows is picked", "plans[i]->shape.rows >= rows &&", ""),
    planner("shares are given the lse of slices",
           "shares ? gather->desc.stored_heads : gather->slice_heads;", "gather->slice_heads;"),
    planner("causal bound off by one", "(int64_t)rows - 1 - row)", "(int64_t)rows - row)"),
    planner("window off by one", "kmla_i_max(last - rule->window_tokens, 0)",
           "kmla_i_max(last - rule->window_tokens + 1, 0)"),
    planner("static share rounded down", "share = kmla_i_ceil_div(chunks, splits);",
           "share = chunks / splits;"),
    planner("single-split rule off by one", "live <= single_split_chunks)",
           "live < single_split_chunks)"),
    planner("balanced splits forget the longer ones", " + kmla_i_min(split, longer);",
           " + (split < longer);"),
    planner("workspace without lse",
           "KMLA_LATENT_DIMS * kmla_i_element_bytes(partial_type) + 4;",
           "KMLA_LATENT_DIMS * kmla_i_element_bytes(partial_type);"),
    planner("a workspace one byte short is fine", "args->workspace_bytes < need)",
           "args->workspace_bytes + 1 < need)"),
    planner("the card's limit of shared memory is not looked at",
           "if (tried.shared_bytes > plan->device.shared_bytes) {", "if (0) {"),
    planner("a scale of 0 is fine", "if (value > 0.0f && value <= FLT_MAX) {",
           "if (value >= 0.0f && value <= FLT_MAX) {"),
    planner("pitch of any alignment",
            "page_pitch_bytes < least || page_pitch_bytes % KMLA_I_RECORD_ALIGNMENT != 0)",
           "page_pitch_bytes < least)"),
    planner("the page behind the last is fine", "page < 0 || (uint64_t)page >= d->kv_pages)",
           "page < 0 || (uint64_t)page > d->kv_pages)"),

    # ---- the host reader
    host("totals are not rescaled", "    sums->total *= rescale;\n", ""),
    host("the token behind a row's last", "token >= vectors[i].end)",
           "token > vectors[i].end)"),
    host("slot -1 is read", "page = slot < 0 ? -1 : slot / shape->page_tokens;",
           "page = slot / shape->page_tokens;"),
    host("32-bit offset into the pool", "page * (int64_t)args->page_pitch_bytes +",
           "(int32_t)((uint32_t)page * (uint32_t)args->page_pitch_bytes) +"),
    host("a payload of weight 0 is read",
           "if (weight == 0.0f || (parts->share && part", "if ((parts->share && part"),
    host("BF16 by cutting off", "bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);", "bits) >> 16);"),
    host("E4M3 ties away from even", "magnitude + 0x7FFFFu + (magnitude >> 20 & 1u);",
           "magnitude + 0x80000u;"),
    host("scale of a query is not rounded up", "(bits >> 23) + ((bits & 0x7fffffu) != 0 ? 1 : 0);",
           "bits >> 23;"),
    host("lse in base 2", "maximum + logf(total));", "(maximum + logf(total)) * 1.442695f);"),
    host("chunk sums in the order of splits only", "    if (chunk->maximum > all->maximum) {",
           "    if (0) {"),

    # ---- libraries, faults, cache, contexts
    gpu_side("discovery", "a loaded NVRTC is not asked for",
             "void* library = kmla_i_nvrtc_loaded(name, room);",
             "void* library = NULL; (void)kmla_i_nvrtc_loaded;"),
    gpu_side("discovery", "an NVRTC newer than the driver comes first",
             "for (newer = 0; newer < 2 && !library; ++newer) {",
             "for (newer = 1; newer >= 0 && !library; --newer) {"),
    gpu_side("discovery", "NVRTC is not tried in open",
             "return kmla_i_check_builtins(functions, error);",
             "(void)kmla_i_check_builtins; return KMLA_OK;"),
    gpu_side("discovery", "the stub of libcuda is not known",
             "if (result == KMLA_I_STUB_LIBRARY) {",
             "if (result == KMLA_I_STUB_LIBRARY + 1) {"),
    gpu_side("discovery", "the program that tries NVRTC is kept",
             "    }\n"
             "    nvrtc->destroy(&program);\n"
             "    return status;\n"
             "}\n"
             "\n"
             "static kmla_status kmla_i_nvrtc_open",
             "    }\n"
             "    return status;\n"
             "}\n"
             "\n"
             "static kmla_status kmla_i_nvrtc_open"),
    gpu_side("faults", "an object that does not open is kept",
             "    if (status != KMLA_OK) {\n"
             "        KMLA_FREE(opened);\n"
             "        return status;\n"
             "    }\n"
             "    *gpu = opened;",
             "    if (status != KMLA_OK) {\n"
             "        return status;\n"
             "    }\n"
             "    *gpu = opened;"),
    gpu_side("faults", "the module of support kernels is kept after an error",
             "    if (status != KMLA_OK) {\n"
             "        gpu->cuda.module_unload(support.module);\n"
             "        return status;",
             "    if (status != KMLA_OK) {\n"
             "        return status;"),
    gpu_side("faults", "a reader's module is kept after an error",
             "        gpu->cuda.module_unload(reader.module);\n"
             "        return status;",
             "        return status;"),
    gpu_side("faults", "the context's id may be unknown",
             "status = result ? kmla_i_fail_cuda(gpu, error, \"cuCtxGetId\", result) : KMLA_OK;",
             "(void)result;"),
    gpu_side("faults", "an image without its CUBIN is kept",
             "    if (result != 0) {\n"
             "        KMLA_FREE(data);\n",
             "    if (result != 0) {\n"),
    gpu_side("faults", "NVRTC's log is kept",
             "    KMLA_FREE(text);\n"
             "    if (compile_result == 0)",
             "    if (compile_result == 0)"),
    gpu_side("faults", "the program of a compile is kept",
             "        status = kmla_i_take_cubin(nvrtc, program, plan, device, image, error);\n"
             "    }\n"
             "    nvrtc->destroy(&program);",
             "        status = kmla_i_take_cubin(nvrtc, program, plan, device, image, error);\n"
             "    }"),
    gpu_side("faults", "the source text is kept",
             "    KMLA_FREE(source);\n"
             "    return status;",
             "    return status;"),
    gpu_side("faults", "a failed compile writes the image",
             "    if (status == KMLA_OK) {\n"
             "        *image = made;\n"
             "    }",
             "    *image = made;"),
    gpu_side("faults", "a function that cannot be loaded is used",
             "result = gpu->cuda.function_load(*function);",
             "result = 0;"),
    gpu_side("faults", "an unknown state of capture is taken for none",
             "    if (result != 0) {\n"
             "        return kmla_i_fail_cuda(gpu, error, \"cuStreamIsCapturing\", result);\n"
             "    }\n",
             ""),
    gpu_side("faults", "copies of the tables are kept",
             "    KMLA_FREE(copies[0]);\n",
             ""),
    gpu_side("faults", "a reader is listed before it is loaded",
             "    status = kmla_i_load_function(gpu, reader.module, \"kmla_reader\", "
             "plan->shared_bytes,\n"
             "                                  &reader.function, error);\n",
             "    reader.variant = kmla_plan_variant(plan);\n"
             "    gpu->readers[gpu->reader_count++] = reader;\n"
             "    gpu->reader_count -= 0;\n"
             "    status = kmla_i_load_function(gpu, reader.module, \"kmla_reader\", "
             "plan->shared_bytes,\n"
             "                                  &reader.function, error);\n"),
    gpu_side("cache", "an entry keeps its temporary name",
             "static int kmla_i_replace(const char* from, const char* to) { return "
             "rename(from, to) == 0; }",
             "static int kmla_i_replace(const char* from, const char* to) { return "
             "rename(from, to) != 5; }"),
    gpu_side("cache", "an entry is written in place",
             "kmla_i_file_path((const char*)user, key, ending, temporary);",
             "kmla_i_file_path((const char*)user, key, \".kmla\", temporary); (void)ending;"),
    gpu_side("cache", "temporary names are all the same",
             "(long)kmla_i_process(), number);",
             "(long)7, 0 * number);"),
    gpu_side("cache", "what the cache gives is not checked",
             "        kmla_i_check_image(&loaded, plan, device, NULL) != KMLA_OK) {",
             "        0) {"),
    gpu_side("cache", "the checksum of an image is not looked at",
             "    if (head->checksum != kmla_i_image_checksum((const unsigned "
             "char*)data, bytes)) {",
             "    if (0) {"),
    gpu_side("cache", "a group may write to the cache",
             "(folder->st_mode & 022) != 0",
             "(folder->st_mode & 002) != 0"),
    gpu_side("cache", "another user's cache is used",
             "(folder->st_uid != geteuid() && folder->st_uid != 0)",
             "0"),
    gpu_side("cache", "a pipe in the cache is waited for",
             "(O_RDONLY | O_NONBLOCK | KMLA_I_FILE_FLAGS)",
             "(O_RDONLY | KMLA_I_FILE_FLAGS)"),
    gpu_side("cache", "half an entry stays",
             "        remove(temporary);\n",
             "        ;\n"),
    gpu_side("cache", "NVRTC's version is not in the key",
             "(unsigned long long)head->source_hash, (int)nvrtc_release);",
             "(unsigned long long)head->source_hash, (int)(nvrtc_release * 0));"),
    gpu_side("cache", "the header's version is not in the key",
             "\"%d %016llx %d\", (int)head->version,",
             "\"%d %016llx %d\", (int)(head->version * 0),"),
    gpu_side("cache", "the source is not in the key",
             "(unsigned long long)head->source_hash, (int)nvrtc_release);",
             "0ull, (int)nvrtc_release);"),
    gpu_side("cache", "the architecture is not in the key",
             "    for (i = 0; i < options->count; ++i) { // each with",
             "    for (i = 1; i < options->count; ++i) { // each with"),
    gpu_side("cache", "a log is not worth a compile",
             "status = kmla_i_make_image(gpu, plan, device, log, !log, &made, &loaded, error);",
             "status = kmla_i_make_image(gpu, plan, device, log, 1, &made, &loaded, error);"),
    gpu_side("cache", "what the driver refuses is not rebuilt",
             "if (status != KMLA_OK && loaded) {",
             "if (0) {"),
    gpu_side("cache", "an entry's size is believed",
             "if (bytes == 0 || bytes > KMLA_I_MOST_IMAGE_BYTES) {",
             "if (bytes == 0) {"),
    gpu_side("cache", "half a read is enough",
             "cache->load(cache->user, key, loaded.data, bytes) != bytes",
             "cache->load(cache->user, key, loaded.data, bytes) == 0"),
    gpu_side("cache", "a bad entry is kept in memory",
             "        kmla_image_free(&loaded);\n"
             "        return 0;",
             "        return 0;"),
    gpu_side("cache", "files of the cache stay open",
             "    kmla_i_close(file);\n"
             "    return bytes;",
             "    return bytes;"),
    gpu_side("cache", "the cache is for all to read",
             "mkdir(path, 0700)",
             "mkdir(path, 0755)"),
    gpu_side("cache", "entries are for all to read",
             "#define KMLA_I_FILE_MODE 0600",
             "#define KMLA_I_FILE_MODE 0644"),
    gpu_side("cache", "another's temporary file is written to",
             "O_WRONLY | O_CREAT | O_EXCL | O_SYNC",
             "O_WRONLY | O_CREAT | O_SYNC"),
    gpu_side("cache", "a cached image is nobody's to free",
             "    image->borrowed = 0;\n"
             "    return 1;",
             "    return 1;"),
    gpu_side("contexts", "any context will do",
             "if (gpu->context && *context != gpu->context) {",
             "if (0) {"),
    gpu_side("contexts", "a dead context's address will do",
             "if (status == KMLA_OK && gpu->context && context_id != gpu->context_id) {",
             "if (0) {"),
    gpu_side("contexts", "close leaves its context current",
             "gpu->cuda.context_pop(NULL);",
             ";"),
    gpu_side("contexts", "launches share their arguments",
             "    const kmla_i_reader* reader = NULL;\n"
             "    struct kmla_i_reader_args reader_args;",
             "    const kmla_i_reader* reader = NULL;\n"
             "    static struct kmla_i_reader_args reader_args;"),
    gpu_side("contexts", "a function is left to load at its first launch",
             "result = gpu->cuda.function_load(*function);",
             "result = 0;"),
    gpu_side("contexts", "a green context has all of the card's SMs",
             "        *count = (int32_t)resource.multiprocessors;",
             "        ;"),
    gpu_side("contexts", "a green context of no SMs",
             "        resource.multiprocessors > 0) {",
             "        1) { *count = -1;"),
]
