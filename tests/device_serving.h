// device_serving.h - groups of device.c for what an engine does around the reader: ranks that share
// a context, speculative rows, captured graphs, and prefixes that come from elsewhere.

#ifndef KMLA_TESTS_DEVICE_SERVING_H
#define KMLA_TESTS_DEVICE_SERVING_H

// =============================================================================
// Shares of a combine: LC
// =============================================================================

// Adds the outputs that lie in k to sums.
static void add_shares(const combine_case* k, double* sums) {
    for (int32_t v = 0; v < k->args.rows * k->args.heads; v++) {
        const int32_t row = v / k->args.heads, head = v % k->args.heads;
        const int64_t at = row * k->out_row_stride + head * k->out_head_stride;
        for (int d = 0; d < REF_D; d++) {
            sums[v * REF_D + d] += ref_element(k->out.data, k->args.out_type, at + d);
        }
    }
}

// A share's lse is that of all parts, and a part without weight has the share 0.
static void judge_share(const combine_case* k, int32_t part, const double* lse) {
    for (int32_t v = 0; v < k->args.rows * k->args.heads; v++) {
        const int32_t row = v / k->args.heads, head = v % k->args.heads;
        const double got =
            ref_float_at(k->lse.data + 4 * (row * k->lse_row_stride + head * k->lse_head_stride));
        expect(got == lse[v] || fabs(got - lse[v]) <= 2e-6 * (1.0 + fabs(lse[v])),
               "part %d: lse %.9g, not %.9g", part, got, lse[v]);
        if (!isfinite(ref_float_at(part_lse_at(k, part, row, head)))) {
            const int32_t bytes = k->args.out_type == KMLA_FP32 ? 4 : 2;
            const int64_t at = row * k->out_row_stride + head * k->out_head_stride;
            expect(ref_all_bytes(k->out.data + at * bytes, (size_t)(REF_D * bytes), 0),
                   "part %d is empty, its share is not 0", part);
        }
    }
}

static void check_shares(combine_case* k, double bound) {
    const int32_t vectors = k->args.rows * k->args.heads;
    double* sums = (double*)calloc((size_t)vectors * REF_D, sizeof *sums);
    double* right = (double*)malloc((size_t)vectors * REF_D * sizeof *right);
    double* lse = (double*)malloc((size_t)vectors * sizeof *lse);
    double off = 0.0, norm = 0.0;
    for (int32_t v = 0; v < vectors; v++) {
        part_answer(k, v / k->args.heads, v % k->args.heads, right + v * REF_D, &lse[v]);
    }
    for (int32_t part = 0; part < k->args.parts; part++) {
        k->args.share = part + 1;
        combine_run(k);
        judge_share(k, part, lse);
        add_shares(k, sums);
    }
    for (int64_t i = 0; i < (int64_t)vectors * REF_D; i++) {
        off += (sums[i] - right[i]) * (sums[i] - right[i]);
        norm += right[i] * right[i];
    }
    expect(off == 0.0 || sqrt(off / norm) <= bound, "%d parts: the sum of shares is %.2e off",
           k->args.parts, sqrt(off / norm));
    free(sums);
    free(right);
    free(lse);
}

// The same share in place of the payload.
static void check_share_in_place(combine_case* k) {
    const int64_t bytes = k->args.part_type == KMLA_FP32 ? 4 : 2;
    const int32_t part = k->args.parts / 2;
    kmla_error error;
    k->args.share = part + 1;
    combine_run(k);
    device_buffer lse = device_copy(k->part_lse.data, k->part_lse.bytes);
    device_buffer out =
        device_copy(k->part_out.data + part * k->part_out_stride * bytes, k->out.bytes);
    kmla_combine args = k->args;
    args.part_out = out.address;
    args.part_lse = lse.address;
    args.out = out.address;
    args.lse = 0;
    expect(call_combine(&args, &error) == KMLA_OK, "%s", error.message);
    uint8_t* got = (uint8_t*)malloc(k->out.bytes);
    copy_to_host(got, out.address, out.bytes);
    expect(memcmp(got, k->out.data, k->out.bytes) == 0, "a share in place has other bits");
    expect(device_canaries_whole(&out), "share: canary hurt");
    free(got);
    device_free(&lse);
    device_free(&out);
}

static void test_shares(void) {
    static const int32_t parts[] = {1, 2, 9, 40};
    for (int n = 0; n < COUNT(parts) * 4; n++) {
        combine_case k = small_combine(parts[n % COUNT(parts)], n);
        ref_random random = {draw()};
        k.args.part_type = n / 4 % 2;
        k.args.out_type = n / 4 % 2;
        if (n >= 8) { // heads outermost, as ranks exchange them
            k.args.part_row_stride = k.args.out_row_stride = REF_D;
            k.args.part_head_stride = k.args.out_head_stride = k.args.rows * REF_D;
            k.args.part_out_stride = k.args.heads * k.args.rows * REF_D;
            k.args.part_lse_row_stride = 1;
            k.args.part_lse_head_stride = k.args.rows;
            k.args.part_lse_stride = k.args.heads * k.args.rows;
        }
        combine_make(&k);
        fill_parts(&k, &random);
        check_shares(&k, k.args.out_type == KMLA_FP32 ? 2e-6 : 2e-3);
        check_share_in_place(&k);
        combine_free(&k);
    }
}

// =============================================================================
// Which tokens a row sees: DL, SD
// =============================================================================

// Where a row's tokens begin and end, told by the decode itself. All queries are 0, so that
// exp(lse) counts the tokens; the value of local token t is t, so that the mean tells where they
// are.
enum { VIEW_CAPACITY = 256, VIEW_PAGES = VIEW_CAPACITY / 64 };

typedef struct view {
    int64_t begin, end;
} view;

static void make_view_pool(uint8_t* pool) {
    memset(pool, 0, VIEW_CAPACITY * 656);
    for (int token = 0; token < VIEW_CAPACITY; token++) {
        memset(pool + token * 656, 0x38, 128); // the code of 1.0
        put_float(scale_of(pool + token * 656, 0), (float)token);
    }
}

static view view_of(float lse, float mean) {
    view seen = {0, 0};
    if (lse > -INFINITY) {
        const int64_t count = (int64_t)floor(exp((double)lse) + 0.5);
        const int64_t ends = (int64_t)floor(2.0 * (double)mean + 1.5); // begin + end
        seen.begin = (ends - count) / 2;
        seen.end = seen.begin + count;
    }
    return seen;
}

// A batch of one head. `offsets` may be NULL: uniform rows.
typedef struct view_batch {
    kmla_length_rule rule;
    int32_t requests, rows_per_request, splits;
    const int32_t* lengths;
    const int32_t* offsets;
} view_batch;

enum { MOST_VIEWS = 256 };

static void see(const view_batch* b, view* views) {
    static uint8_t pool_bytes[VIEW_CAPACITY * 656];
    static float out_values[MOST_VIEWS * REF_D], lse_values[MOST_VIEWS];
    static int32_t tables[MOST_VIEWS * VIEW_PAGES];
    kmla_shape shape;
    kmla_plan plan;
    kmla_decode args;
    kmla_error error;
    memset(&shape, 0, sizeof shape);
    shape.requests = b->requests;
    shape.rows_per_request = b->rows_per_request;
    shape.ragged = b->offsets != NULL;
    shape.rows = b->requests * b->rows_per_request;
    shape.heads = 1;
    shape.capacity_tokens = VIEW_CAPACITY;
    shape.splits = b->splits;
    shape.partial_type = KMLA_FP32;
    shape.lengths = b->rule;
    shape.reader = reader_for(KMLA_KV_PACKED);
    if (kmla_plan_decode(&shape, backend_card(), &plan, &error) != KMLA_OK) {
        backend_stop("%s", error.message);
    }
    make_view_pool(pool_bytes);
    for (int32_t i = 0; i < b->requests * VIEW_PAGES; i++) {
        tables[i] = i % VIEW_PAGES;
    }
    const size_t rows = (size_t)shape.rows;
    device_buffer pool = device_copy(pool_bytes, sizeof pool_bytes);
    device_buffer table = device_copy(tables, (size_t)b->requests * VIEW_PAGES * 4);
    device_buffer lengths = device_copy(b->lengths, (size_t)b->requests * 4);
    device_buffer offsets =
        device_copy(b->offsets, b->offsets == NULL ? 0 : ((size_t)b->requests + 1) * 4);
    device_buffer query = device_make(rows * 1152, 0);
    device_buffer out = device_make(rows * REF_D * 4, 0xff), lse = device_make(rows * 4, 0xff);
    device_buffer workspace = device_make((size_t)plan.workspace_bytes, 0xff);
    memset(&args, 0, sizeof args);
    args.query = query.address;
    args.scale = REF_K3_SCALE;
    args.kv = pool.address;
    args.kv_pages = VIEW_PAGES;
    args.block_table = table.address;
    args.block_table_width = VIEW_PAGES;
    args.row_offsets = offsets.address;
    args.lengths = lengths.address;
    args.out = out.address;
    args.out_type = KMLA_FP32;
    args.lse = lse.address;
    args.workspace = workspace.address;
    args.workspace_bytes = plan.workspace_bytes;
    prepare(&plan);
    if (call_decode(&plan, &args, &error) != KMLA_OK) {
        fail("%s", error.message);
    }
    copy_to_host(out_values, out.address, out.bytes);
    copy_to_host(lse_values, lse.address, lse.bytes);
    for (size_t row = 0; row < rows; row++) {
        views[row] = view_of(lse_values[row], out_values[row * REF_D]);
    }
    device_buffer* const owned[] = {&pool, &table, &lengths, &offsets, &query,
                                    &out,  &lse,   &workspace};
    for (int i = 0; i < COUNT(owned); i++) {
        device_free(owned[i]);
    }
}

static kmla_length_rule global_rule(int32_t rows_kind, int32_t ranks, int32_t rank,
                                    int32_t interleave) {
    kmla_length_rule rule;
    memset(&rule, 0, sizeof rule);
    rule.lengths_kind = KMLA_LENGTHS_PER_REQUEST;
    rule.rows_kind = rows_kind;
    rule.dcp.ranks = ranks;
    rule.dcp.rank = rank;
    rule.dcp.interleave = interleave;
    return rule;
}

// One request; the ends of its rows are to be these, and all begin at 0.
static void expect_ends(kmla_length_rule rule, int32_t length, int32_t rows, const int64_t* ends) {
    const view_batch batch = {rule, 1, rows, 1, &length, NULL};
    view views[MOST_VIEWS];
    see(&batch, views);
    for (int32_t row = 0; row < rows; row++) {
        expect(views[row].begin == 0 && views[row].end == ends[row],
               "length %d, rank %d of %d, interleave %d: row %d of %d sees %lld..%lld, not 0..%lld",
               length, rule.dcp.rank, rule.dcp.ranks, rule.dcp.interleave, row, rows,
               (long long)views[row].begin, (long long)views[row].end, (long long)ends[row]);
    }
}

static void test_dl_vectors(void) {
    static const struct {
        int32_t ranks, interleave, length;
        int64_t local[8];
    } dealt[] = {
        {8, 1, 3, {1, 1, 1, 0, 0, 0, 0, 0}}, {8, 1, 6, {1, 1, 1, 1, 1, 1, 0, 0}},
        {4, 64, 200, {64, 64, 64, 8}},       {2, 64, 130, {66, 64}},
        {2, 64, 64, {64, 0}},                {2, 64, 65, {64, 1}},
        {2, 64, 66, {64, 2}},
    };
    static const int64_t verify[] = {4, 4, 5}, fourteen_on[] = {2, 3, 4, 4};
    for (int i = 0; i < COUNT(dealt); i++) { // DL-01, DL-02
        for (int32_t rank = 0; rank < dealt[i].ranks; rank++) {
            expect_ends(global_rule(KMLA_ROWS_CAUSAL, dealt[i].ranks, rank, dealt[i].interleave),
                        dealt[i].length, 1, &dealt[i].local[rank]);
        }
    }
    static const int32_t bad[][3] = {{-1, 0, 1}, {4, 4, 1}, {4, -1, 1}, {4, 0, -1}};
    for (int i = 0; i < COUNT(bad); i++) {
        ref_case c = plain_case(1, 64);
        kmla_plan plan;
        kmla_error error;
        c.shape.lengths = global_rule(KMLA_ROWS_CAUSAL, bad[i][0], bad[i][1], bad[i][2]);
        expect(kmla_plan_decode(&c.shape, backend_card(), &plan, &error) == KMLA_ERROR_ARGUMENT,
               "rank %d of %d, interleave %d is planned", bad[i][1], bad[i][0], bad[i][2]);
    }
    expect_ends(global_rule(KMLA_ROWS_CAUSAL, 2, 1, 1), 10, 3, verify); // DL-03
    expect_ends(global_rule(KMLA_ROWS_CAUSAL, 4, 3, 2), 17, 4, fourteen_on);
}

static void test_sd_03(void) {
    static const int64_t causal[] = {8, 9, 10}, draft[] = {10, 10, 10}, again[] = {6, 7, 8};
    static const int64_t most[] = {0, 0, 0, 1}, ones[] = {1, 1, 1, 1}, none[] = {0, 0, 0, 0};
    expect_ends(global_rule(KMLA_ROWS_CAUSAL, 1, 0, 1), 10, 3, causal);
    expect_ends(global_rule(KMLA_ROWS_DRAFT, 1, 0, 1), 10, 3, draft);
    expect_ends(global_rule(KMLA_ROWS_CAUSAL, 1, 0, 1), 8, 3, again); // two were rejected
    expect_ends(global_rule(KMLA_ROWS_CAUSAL, 1, 0, 1), 1, 4, most);
    expect_ends(global_rule(KMLA_ROWS_DRAFT, 1, 0, 1), 1, 4, ones);
    expect_ends(global_rule(KMLA_ROWS_CAUSAL, 1, 0, 1), -3, 4, none);
    expect_ends(global_rule(KMLA_ROWS_CAUSAL, 1, 0, 1), INT32_MIN, 4, none);
}

// What a row sees, by dealing all tokens out.
static view deal(const kmla_length_rule* rule, int64_t length, int32_t row, int32_t rows) {
    int64_t last = length - (rule->rows_kind == KMLA_ROWS_CAUSAL ? rows - 1 - row : 0);
    int64_t first = rule->window_tokens ? last - rule->window_tokens : 0;
    view dealt = {0, 0};
    for (int64_t token = 0; token < last; token++) {
        const int mine = token / rule->dcp.interleave % rule->dcp.ranks == rule->dcp.rank;
        dealt.begin += mine && token < first;
        dealt.end += mine;
    }
    dealt.end = dealt.end < VIEW_CAPACITY ? dealt.end : VIEW_CAPACITY;
    if (dealt.begin >= dealt.end) {
        dealt.begin = dealt.end = 0; // an empty row does not tell where it is
    }
    return dealt;
}

// Groups of 1 to 8 rows around every boundary of runs and rounds, uniform or ragged.
static void check_straddling(kmla_length_rule rule, int32_t rows, int ragged, int32_t splits) {
    enum { REQUESTS = 16 };
    const int32_t run = rule.dcp.interleave, round = run * rule.dcp.ranks;
    const int32_t bases[] = {run, round, round + run, 2 * round};
    int32_t lengths[REQUESTS], offsets[REQUESTS + 1] = {0};
    view views[MOST_VIEWS];
    for (int32_t i = 0; i < REQUESTS; i++) { // a group ends before, at, and past the boundary
        lengths[i] = bases[i / 4] + (i % 4 == 0 ? -1 : i % 4 == 1 ? 0 : i % 4 == 2 ? 1 : rows / 2);
        offsets[i + 1] = offsets[i] + (ragged ? (i * 5 + 1) % (rows + 1) : rows);
    }
    const view_batch batch = {rule, REQUESTS, rows, splits, lengths, ragged ? offsets : NULL};
    see(&batch, views);
    for (int32_t i = 0; i < REQUESTS; i++) {
        const int32_t count = offsets[i + 1] - offsets[i];
        for (int32_t row = 0; row < count; row++) {
            const view seen = views[offsets[i] + row];
            const view right = deal(&rule, lengths[i], row, count);
            expect(seen.begin == right.begin && seen.end == right.end,
                   "length %d, rank %d of %d, interleave %d, window %d, %s: row %d of %d sees "
                   "%lld..%lld, not %lld..%lld",
                   lengths[i], rule.dcp.rank, rule.dcp.ranks, rule.dcp.interleave,
                   rule.window_tokens, rule.rows_kind ? "draft" : "causal", row, count,
                   (long long)seen.begin, (long long)seen.end, (long long)right.begin,
                   (long long)right.end);
        }
    }
    for (int32_t row = offsets[REQUESTS]; row < REQUESTS * rows; row++) {
        expect(views[row].end == 0, "row %d is past the last request and sees tokens", row);
    }
}

static void test_straddling(void) {
    static const int32_t ranks[] = {1, 2, 4, 9, 16}, interleaves[] = {1, 2, 16, 64};
    static const int32_t rows[] = {1, 4, 6, 8}, windows[] = {0, 1, 7, 64, 100};
    int n = 0;
    for (int r = 0; r < COUNT(ranks); r++) {
        for (int i = 0; i < COUNT(interleaves); i++) {
            for (int32_t rank = 0; rank < ranks[r]; rank++) {
                for (int draft = 0; draft < 2; draft++, n++) {
                    kmla_length_rule rule =
                        global_rule(draft, ranks[r], rank, interleaves[i]);
                    if (options.quick && (n / 2 + r + i) % 3 != 0) {
                        continue;
                    }
                    rule.window_tokens = windows[(n / 2 + n / 5) % COUNT(windows)];
                    check_straddling(rule, rows[(n / 2 + i) % COUNT(rows)], n / 3 % 2, 1 + n % 3);
                }
            }
        }
    }
}

// =============================================================================
// Ranks that share a context: gather, read, combine by both transports
// =============================================================================

enum { WORLD_RANKS = 16, WORLD_REQUESTS = 3, WORLD_ROWS = 2 };

typedef struct world {
    ref_case whole;   // the same decode by one card, global lengths, unsharded
    int32_t ranks, interleave;
    int32_t query_format, equal_slices, stored_heads; // as of kmla_gather_desc
    int32_t part_type;
    // Each rank's.
    kmla_gather gathers[WORLD_RANKS];
    device_buffer out[WORLD_RANKS], lse[WORLD_RANKS];
    device_buffer query; // every rank writes its own slice in place: so it is gathered
} world;

static int32_t world_rows(void) { return WORLD_REQUESTS * WORLD_ROWS; }

static void world_plan(world* w) {
    for (int32_t rank = 0; rank < w->ranks; rank++) {
        kmla_gather_desc desc;
        kmla_error error;
        memset(&desc, 0, sizeof desc);
        desc.heads = w->whole.shape.heads;
        desc.ranks = w->ranks;
        desc.rank = rank;
        desc.rows = world_rows();
        desc.query_format = w->query_format;
        desc.out_type = w->part_type;
        desc.equal_slices = w->equal_slices;
        desc.stored_heads = w->stored_heads;
        if (kmla_plan_gather(&desc, &w->gathers[rank], &error) != KMLA_OK) {
            backend_stop("%s", error.message);
        }
    }
}

// The index of a head among the gathered ones: of its rank's slice, as heads are dealt in turn.
static int32_t gathered_head(const world* w, int32_t head) {
    int32_t rank = 0;
    while (head >= w->gathers[rank].local_heads) {
        head -= w->gathers[rank++].local_heads;
    }
    return w->gathers[rank].first_head + head;
}

// Every rank packs its own heads straight into its slice. The bytes are those of the host's writer.
static void world_gather(world* w) {
    const kmla_slices* layout = &w->gathers[0].query;
    const int64_t record = ref_record_bytes(ref_query_layout(w->query_format));
    const ref_case* c = &w->whole;
    int32_t first = 0;
    kmla_error error;
    w->query = device_make((size_t)layout->bytes, 0xff);
    device_buffer source = device_copy(c->query.data, c->query.bytes);
    prepare(NULL);
    for (int32_t rank = 0; rank < w->ranks; rank++) {
        const kmla_gather* g = &w->gathers[rank];
        kmla_query_write write;
        memset(&write, 0, sizeof write);
        write.source_type = KMLA_BF16;
        write.query_scale = 0.0073f;
        write.source = source.address + (uint64_t)first * 1152;
        write.source_row_stride = (int64_t)c->shape.heads * REF_Q;
        if (g->local_heads == 0) {
            continue;
        }
        if (kmla_gather_write(g, w->query.address, &write, &error) != KMLA_OK ||
            call_write_query(&write, &error) != KMLA_OK) {
            fail("%s", error.message);
        }
        first += g->local_heads;
    }
    uint8_t* got = (uint8_t*)malloc(w->query.bytes);
    copy_to_host(got, w->query.address, w->query.bytes);
    for (int32_t v = 0; v < world_rows() * c->shape.heads; v++) {
        const int32_t row = v / c->shape.heads, head = v % c->shape.heads;
        ref_buffer right = ref_buffer_make((size_t)record, 0);
        kmla_query_write write;
        memset(&write, 0, sizeof write);
        write.rows = 1;
        write.heads = 1;
        write.query_format = w->query_format;
        write.query_scale = 0.0073f;
        write.source = (uint64_t)(uintptr_t)query_of(c, row, head);
        write.query = ref_address(&right);
        kmla_host_write_query(&write, NULL);
        const int64_t at = gathered_head(w, head) * layout->head_stride + row * layout->row_stride;
        expect(memcmp(got + at, right.data, (size_t)record) == 0,
               "rank gather: row %d head %d has other bytes", row, head);
        ref_buffer_free(&right);
    }
    expect(device_canaries_whole(&w->query), "rank gather: canary hurt");
    free(got);
    device_free(&source);
}

// A rank's shard of the records of all requests, in pages of its own, and where they are.
static void fill_shard(const world* w, int32_t rank, uint8_t* pool, int32_t* table,
                       int64_t pages_per_request) {
    const ref_case* c = &w->whole;
    const kmla_dcp dcp = {w->ranks, rank, w->interleave};
    for (int32_t request = 0; request < WORLD_REQUESTS; request++) {
        for (int64_t page = 0; page < pages_per_request; page++) { // backwards
            table[request * pages_per_request + page] =
                (int32_t)((WORLD_REQUESTS - request) * pages_per_request - 1 - page);
        }
        for (int64_t token = 0; token < c->lengths[request]; token++) {
            int32_t owner;
            int64_t local;
            kmla_token_owner(&dcp, token, &owner, &local, NULL);
            if (owner == rank) {
                const int64_t page = table[request * pages_per_request + local / 64];
                memcpy(pool + (page * 64 + local % 64) * 656,
                       record_of(c, (request + 1) * WORLD_ROWS - 1, token), 656);
            }
        }
    }
}

// Decodes all gathered heads over a rank's shard.
static void world_decode(world* w, int32_t rank) {
    const kmla_gather* g = &w->gathers[rank];
    const kmla_dcp dcp = {w->ranks, rank, w->interleave};
    kmla_shape shape = w->whole.shape;
    kmla_plan plan;
    kmla_decode args;
    kmla_error error;
    shape.heads = g->gathered_heads;
    shape.query_format = w->query_format;
    shape.lengths.dcp = dcp;
    kmla_shard_capacity(&dcp, w->whole.shape.capacity_tokens, &shape.capacity_tokens, &error);
    if (kmla_plan_decode(&shape, backend_card(), &plan, &error) != KMLA_OK) {
        backend_stop("%s", error.message);
    }
    const int64_t pages = (shape.capacity_tokens + 63) / 64;
    ref_buffer pool = ref_buffer_make((size_t)(WORLD_REQUESTS * pages * 64 * 656), 0xff);
    ref_buffer table = ref_buffer_make((size_t)(WORLD_REQUESTS * pages * 4), 0xff);
    fill_shard(w, rank, pool.data, (int32_t*)(void*)table.data, pages);
    device_buffer kv = device_copy(pool.data, pool.bytes);
    device_buffer tables = device_copy(table.data, table.bytes);
    device_buffer lengths = device_copy(w->whole.lengths, WORLD_REQUESTS * 4);
    device_buffer workspace = device_make((size_t)plan.workspace_bytes, 0xff);
    w->out[rank] = device_make((size_t)g->out.bytes, 0xff);
    w->lse[rank] = device_make((size_t)g->lse.bytes, 0xff);
    memset(&args, 0, sizeof args);
    args.scale = w->whole.scale;
    args.kv = kv.address;
    args.kv_pages = (uint64_t)(WORLD_REQUESTS * pages);
    args.block_table = tables.address;
    args.block_table_width = pages;
    args.lengths = lengths.address;
    args.workspace = workspace.address;
    args.workspace_bytes = plan.workspace_bytes;
    prepare(&plan);
    if (kmla_gather_decode(g, w->query.address, w->out[rank].address, w->lse[rank].address, &args,
                           &error) != KMLA_OK ||
        call_decode(&plan, &args, &error) != KMLA_OK) {
        fail("%s", error.message);
    }
    expect(device_canaries_whole(&w->out[rank]) && device_canaries_whole(&w->lse[rank]),
           "rank decode: canary hurt");
    device_free(&kv);
    device_free(&tables);
    device_free(&lengths);
    device_free(&workspace);
    ref_buffer_free(&pool);
    ref_buffer_free(&table);
}

// All ranks' slices of what this rank is to get, one after the other.
static device_buffer exchange(const device_buffer* from, int32_t ranks, const kmla_slices* slices) {
    device_buffer to = device_make((size_t)slices->slice_bytes * (size_t)ranks, 0xff);
    uint8_t* bytes = (uint8_t*)malloc((size_t)slices->slice_bytes + 1);
    for (int32_t rank = 0; rank < ranks; rank++) {
        copy_to_host(bytes, from[rank].address + slices->offset_bytes, (size_t)slices->slice_bytes);
        copy_to_device(to.address + (uint64_t)rank * slices->slice_bytes, bytes,
                       (size_t)slices->slice_bytes);
    }
    free(bytes);
    return to;
}

// A rank's own heads, by all-to-all, into the places of the whole's outputs.
static void combine_all_to_all(world* w, int32_t rank, int32_t first_head) {
    const kmla_gather* g = &w->gathers[rank];
    ref_case* c = &w->whole;
    const size_t vectors = (size_t)world_rows() * (size_t)c->shape.heads;
    device_buffer parts = exchange(w->out, w->ranks, &g->out);
    device_buffer part_lse = exchange(w->lse, w->ranks, &g->lse);
    device_buffer out = device_copy(c->out.data, c->out.bytes);
    device_buffer lse = device_copy(c->lse.data, vectors * 4);
    kmla_combine args;
    kmla_error error;
    memset(&args, 0, sizeof args);
    args.out = out.address + (uint64_t)first_head * REF_D * 4;
    args.out_row_stride = (int64_t)c->shape.heads * REF_D;
    args.out_type = KMLA_FP32;
    args.lse = lse.address + (uint64_t)first_head * 4;
    args.lse_row_stride = c->shape.heads;
    if (kmla_gather_combine(g, KMLA_TRANSPORT_ALL_TO_ALL, parts.address, part_lse.address, &args,
                            &error) != KMLA_OK ||
        call_combine(&args, &error) != KMLA_OK) {
        fail("%s", error.message);
    }
    copy_to_host(c->out.data, out.address, out.bytes);
    copy_to_host(c->lse.data, lse.address, lse.bytes);
    device_free(&parts);
    device_free(&part_lse);
    device_free(&out);
    device_free(&lse);
}

// Every rank's share, in place, and their sum; the lse that the last rank has of all heads.
static void combine_reduce_scatter(world* w) {
    const kmla_gather* g = &w->gathers[0];
    ref_case* c = &w->whole;
    const kmla_slices everything = {0, 0, 0, g->lse.bytes, g->lse.bytes};
    const size_t elements = (size_t)g->out.bytes / (w->part_type == KMLA_FP32 ? 4 : 2);
    double* sums = (double*)calloc(elements, sizeof *sums);
    uint8_t* share = (uint8_t*)malloc((size_t)g->out.bytes);
    float* lse_values = (float*)malloc((size_t)g->lse.bytes);
    device_buffer part_lse = exchange(w->lse, w->ranks, &everything);
    device_buffer lse = device_make((size_t)g->lse.bytes, 0xff);
    kmla_error error;
    for (int32_t rank = 0; rank < w->ranks; rank++) {
        kmla_combine args;
        memset(&args, 0, sizeof args);
        args.out = w->out[rank].address;
        args.lse = lse.address;
        if (kmla_gather_combine(&w->gathers[rank], KMLA_TRANSPORT_REDUCE_SCATTER,
                                w->out[rank].address, part_lse.address, &args,
                                &error) != KMLA_OK ||
            call_combine(&args, &error) != KMLA_OK) {
            fail("%s", error.message);
        }
        copy_to_host(share, w->out[rank].address, w->out[rank].bytes);
        for (size_t i = 0; i < (size_t)g->gathered_heads * (size_t)g->out.head_stride; i++) {
            sums[i] += ref_element(share, w->part_type, (int64_t)i);
        }
    }
    copy_to_host(lse_values, lse.address, lse.bytes);
    for (int32_t v = 0; v < world_rows() * c->shape.heads; v++) {
        const int32_t row = v / c->shape.heads, head = v % c->shape.heads;
        const int32_t from = gathered_head(w, head);
        for (int d = 0; d < REF_D; d++) {
            put_float(c->out.data + ((int64_t)v * REF_D + d) * 4,
                      (float)sums[from * g->out.head_stride + row * g->out.row_stride + d]);
        }
        put_float(c->lse.data + (int64_t)v * 4,
                  lse_values[from * g->lse.head_stride + row * g->lse.row_stride]);
    }
    free(sums);
    free(share);
    free(lse_values);
    device_free(&part_lse);
    device_free(&lse);
}

// BF16 parts and BF16 shares cost a rounding each.
static void judge_world(const world* w, const answer* right, int roundings, const char* what) {
    const ref_errors e = errors_of(&w->whole, right);
    const double one = w->whole.shape.mode == KMLA_MODE_E4M3_QUERY ? 3e-3 : 2e-3;
    const double bound = w->part_type == KMLA_FP32 ? 6e-4 : one * sqrt((double)roundings);
    expect(e.wrong == 0 && e.out <= bound && e.lse <= LSE_BOUND,
           "%s, %d ranks, interleave %d, %s parts, query %d, %s slices, %d stored: out %.2e "
           "(bound %.1e), lse %.1e, %d wrong; %s",
           what, w->ranks, w->interleave, w->part_type ? "fp32" : "bf16", w->query_format,
           w->equal_slices ? "equal" : "own", w->stored_heads, e.out, bound, e.lse, e.wrong,
           describe(&w->whole));
    score.worst_lse = e.lse > score.worst_lse ? e.lse : score.worst_lse;
}

static void clear_outputs(ref_case* c) {
    memset(c->out.data, 0xff, c->out.bytes);
    memset(c->lse.data, 0xff, c->lse.bytes);
}

// A step by both transports. Returns the bits of the first.
static bits world_step(world* w, const answer* right) {
    int32_t first_head = 0;
    world_plan(w);
    world_gather(w);
    for (int32_t rank = 0; rank < w->ranks; rank++) {
        world_decode(w, rank);
    }
    clear_outputs(&w->whole);
    for (int32_t rank = 0; rank < w->ranks; rank++) {
        if (w->gathers[rank].local_heads > 0) {
            combine_all_to_all(w, rank, first_head);
        }
        first_head += w->gathers[rank].local_heads;
    }
    judge_world(w, right, 2, "all-to-all");
    const bits kept = bits_of(&w->whole);
    clear_outputs(&w->whole);
    combine_reduce_scatter(w);
    judge_world(w, right, 3, "reduce-scatter");
    for (int32_t rank = 0; rank < w->ranks; rank++) {
        device_free(&w->out[rank]);
        device_free(&w->lse[rank]);
    }
    device_free(&w->query);
    return kept;
}

// Of n ranks: own slices, equal slices, and those in wider buffers. The heads' bits are the same.
static void check_world(int32_t heads, int32_t ranks, int32_t interleave, int32_t query_format,
                        int32_t part_type) {
    // Many rounds; one run and a token of the next, so that most shards are empty; nothing.
    const int32_t longest = options.quick ? 150 : 1500, wanted = ranks * interleave * 3 / 2 + 7;
    const int32_t lengths[WORLD_REQUESTS] = {wanted < longest ? wanted : longest,
                                             interleave + 1, 0};
    world w;
    memset(&w, 0, sizeof w);
    w.whole = plain_case(heads, lengths[0] > lengths[1] ? lengths[0] : lengths[1]);
    w.whole.shape.requests = WORLD_REQUESTS;
    w.whole.shape.rows_per_request = WORLD_ROWS;
    w.whole.shape.lengths.lengths_kind = KMLA_LENGTHS_PER_REQUEST;
    w.whole.shape.mode =
        query_format == KMLA_QUERY_PACKED ? KMLA_MODE_E4M3_QUERY : KMLA_MODE_EXACT;
    w.whole.out_type = KMLA_FP32;
    w.whole.lengths = lengths;
    build(&w.whole);
    answer right = answer_of(&w.whole);
    w.ranks = ranks;
    w.interleave = interleave;
    w.query_format = query_format;
    w.part_type = part_type;
    const bits first = world_step(&w, &right);
    for (int wide = 0; wide < pick(1, 2); wide++) {
        w.equal_slices = 1;
        w.stored_heads = wide ? (heads + ranks + 15) / 16 * 16 : 0;
        const bits other = world_step(&w, &right);
        expect(memcmp(first.data, other.data, first.out_bytes + first.lse_bytes) == 0,
               "%d ranks: equal slices have other bits; %s", ranks, describe(&w.whole));
        free(other.data);
    }
    w.query_format = KMLA_QUERY_E4M3; // its layout and bytes; the reading is as of any other
    world_plan(&w);
    world_gather(&w);
    device_free(&w.query);
    free(first.data);
    answer_free(&right);
    ref_free(&w.whole);
}

static void test_ranks(void) {
    static const int32_t interleaves[] = {1, 2, 16, 64};
    int n = 0;
    for (int32_t ranks = 1; ranks <= WORLD_RANKS; ranks++) {
        for (int i = 0; i < COUNT(interleaves); i++, n++) {
            // Fewer heads than ranks, too: the last ranks have none.
            const int32_t few = ranks % 5 == 0 ? ranks - 2 : ranks + 3;
            if (options.quick && i != ranks % 4) {
                continue;
            }
            check_world(options.quick ? few : i == 3 ? few : 99, ranks, interleaves[i],
                        n % 2 ? KMLA_QUERY_PACKED : KMLA_QUERY_BF16, n / 2 % 2);
        }
    }
    check_world(99, 9, 1, KMLA_QUERY_PACKED, KMLA_BF16);
}

// One rank exchanges nothing: what it decodes is the result, and a combine of it has its bits.
static void test_one_rank(void) {
    const int32_t lengths[] = {100, 101};
    ref_case c = plain_case(6, 128);
    kmla_gather_desc desc;
    kmla_gather gather;
    kmla_error error;
    memset(&desc, 0, sizeof desc);
    desc.heads = 6;
    desc.rows = 2;
    expect(kmla_plan_gather(&desc, &gather, &error) == KMLA_OK && gather.exchanges == 0 &&
               gather.local_heads == 6,
           "one rank exchanges");
    c.shape.rows_per_request = 2;
    c.lengths = lengths;
    build(&c);
    check_built(&c, "one rank");
    combine_case k;
    memset(&k, 0, sizeof k);
    k.args.parts = 1;
    k.args.rows = 2;
    k.args.heads = 6;
    combine_make(&k);
    memcpy(k.part_out.data, c.out.data, c.out.bytes);
    memcpy(k.part_lse.data, c.lse.data, c.lse.bytes);
    for (int share = 0; share < 2; share++) {
        k.args.share = share;
        combine_run(&k);
        expect(memcmp(k.out.data, c.out.data, c.out.bytes) == 0, "a combine of one has other bits");
    }
    combine_free(&k);
    ref_free(&c);
}

// =============================================================================
// Captured graphs: CG
// =============================================================================

static int has_graphs(void) {
    return !on_host() && backend.driver.capture_begin != NULL;
}

static void* capture(int mode, void (*launch_all)(void* data), void* data) {
    void *graph = NULL, *executable = NULL;
    driver_check(backend.driver.capture_begin(backend.stream, mode), "cuStreamBeginCapture");
    launch_all(data);
    driver_check(backend.driver.capture_end(backend.stream, &graph), "cuStreamEndCapture");
    driver_check(backend.driver.graph_instantiate(&executable, graph, 0), "cuGraphInstantiate");
    driver_check(backend.driver.graph_destroy(graph), "cuGraphDestroy");
    return executable;
}

// Runs a graph over outputs full of NaN, and brings them to c->out and c->lse.
static void replay(void* executable, ref_case* c, const loaded* l) {
    fill_device(l->out.address, 0xff, l->out.bytes);
    fill_device(l->lse.address, 0xff, l->lse.bytes);
    fill_device(l->workspace.address, 0xff, l->workspace.bytes);
    driver_check(backend.driver.graph_launch(executable, backend.stream), "cuGraphLaunch");
    synchronize();
    copy_to_host(c->out.data, l->out.address, c->out.bytes);
    copy_to_host(c->lse.data, l->lse.address, c->lse.bytes);
}

static void judge_replay(void* executable, ref_case* c, const loaded* l, const char* what) {
    answer right = answer_of(c);
    replay(executable, c, l);
    judge(c, &right, what);
    answer_free(&right);
}

// The same outputs by a direct launch have the bits that a replay left in c.
static void expect_direct_bits(ref_case* c, loaded* l, const char* what) {
    const bits replayed = bits_of(c);
    kmla_error error;
    fill_device(l->out.address, 0xff, c->out.bytes);
    fill_device(l->workspace.address, 0xff, l->workspace.bytes);
    expect(launch_only(c, l, &error) == KMLA_OK, "%s", error.message);
    synchronize();
    copy_to_host(c->out.data, l->out.address, c->out.bytes);
    copy_to_host(c->lse.data, l->lse.address, c->lse.bytes);
    expect(same_bits(&replayed, c), "%s: a direct launch has other bits; %s", what, describe(c));
    free(replayed.data);
}

static void launch_decode(void* data) {
    const ref_case* c = ((const ref_case* const*)data)[0];
    const loaded* l = ((const loaded* const*)data)[1];
    kmla_error error;
    expect(launch_only(c, l, &error) == KMLA_OK, "%s", error.message);
}

static void* capture_case(int mode, ref_case* c, loaded* l) {
    const void* both[] = {c, l};
    return capture(mode, launch_decode, (void*)both);
}

// A whole step: a new token's record, the queries, the decode, and a combine of its one part.
typedef struct whole_step {
    ref_case* c;
    loaded* l;
    kmla_kv_write write_kv;
    kmla_query_write write_query;
    kmla_combine combine;
} whole_step;

static void launch_whole_step(void* data) {
    const whole_step* s = (const whole_step*)data;
    kmla_gpu* gpu = backend.gpu;
    kmla_error error;
    expect(kmla_gpu_write_kv(gpu, &s->write_kv, backend.stream, &error) == KMLA_OK, "%s",
           error.message);
    expect(kmla_gpu_write_query(gpu, &s->write_query, backend.stream, &error) == KMLA_OK, "%s",
           error.message);
    expect(launch_only(s->c, s->l, &error) == KMLA_OK, "%s", error.message);
    expect(kmla_gpu_combine(gpu, &s->combine, backend.stream, &error) == KMLA_OK, "%s",
           error.message);
}

// In BF16 throughout, so that the writers copy bits: the last token's record and all queries are
// taken away, and the step has to put them back.
static void test_capture_modes(void) {
    static const int modes[] = {CUDA_CAPTURE_GLOBAL, CUDA_CAPTURE_THREAD_LOCAL,
                                CUDA_CAPTURE_RELAXED};
    const int32_t lengths[] = {150, 150};
    ref_case c;
    loaded l;
    whole_step s;
    if (!has_graphs()) {
        skip("no graphs here");
        return;
    }
    graph_case(&c, lengths, KMLA_KV_BF16, 2);
    answer right = answer_of(&c);
    load(&c, &l);
    prepare(&c.plan);
    const uint8_t* record = record_of(&c, 0, 149);
    const int64_t slot = (record - c.pool.data) / 1152;
    device_buffer token = device_copy(record, 1152), slots = device_copy(&slot, 8);
    device_buffer source = device_copy(c.query.data, c.query.bytes);
    device_buffer out = device_make(c.out.bytes, 0xff), lse = device_make(c.lse.bytes, 0xff);
    memset(&s, 0, sizeof s);
    s.c = &c;
    s.l = &l;
    s.write_kv.tokens = 1;
    s.write_kv.kv_format = KMLA_KV_BF16;
    s.write_kv.source_type = KMLA_BF16;
    s.write_kv.page_tokens = 64;
    s.write_kv.latent = token.address;
    s.write_kv.rope = token.address + 1024;
    s.write_kv.slots = slots.address;
    s.write_kv.kv = l.pool.address;
    s.write_kv.kv_pages = c.args.kv_pages;
    s.write_query.rows = 2;
    s.write_query.heads = 6;
    s.write_query.source = source.address;
    s.write_query.query = l.query.address;
    s.combine.parts = 1;
    s.combine.rows = 2;
    s.combine.heads = 6;
    s.combine.part_out = l.out.address;
    s.combine.part_lse = l.lse.address;
    s.combine.out = out.address;
    s.combine.lse = lse.address;
    for (int i = 0; i < COUNT(modes); i++) {
        void* executable = capture(modes[i], launch_whole_step, &s);
        expect(device_all_bytes(out.address, out.bytes, 0xff), "a capture has run something");
        fill_device(l.pool.address + (uint64_t)slot * 1152, 0xff, 1152);
        fill_device(l.query.address, 0xff, l.query.bytes);
        replay(executable, &c, &l);
        judge(&c, &right, "captured step");
        copy_to_host(c.out.data, out.address, out.bytes);
        copy_to_host(c.lse.data, lse.address, lse.bytes);
        judge(&c, &right, "captured step, combined");
        expect(input_whole(&l.pool, &c.pool) && input_whole(&l.query, &c.query),
               "the step has not put back what was taken away");
        driver_check(backend.driver.graph_exec_destroy(executable), "cuGraphExecDestroy");
        fill_device(out.address, 0xff, out.bytes);
    }
    device_free(&token);
    device_free(&slots);
    device_free(&source);
    device_free(&out);
    device_free(&lse);
    answer_free(&right);
    unload(&l);
    ref_free(&c);
}

enum { REPLAYED = 4 };

// A case of the graph's shape with its own lengths, offsets, pages and queries.
static void replayed_case(ref_case* c, int32_t kv_format, int32_t ranks, const int32_t* lengths,
                          const int32_t* offsets, int32_t spare_pages) {
    *c = plain_case(5, 200);
    c->shape.ragged = 1;
    c->shape.requests = 3;
    c->shape.rows_per_request = 5;
    c->shape.rows = 12;
    c->shape.kv_format = kv_format;
    c->shape.splits = 3;
    c->shape.lengths.lengths_kind = KMLA_LENGTHS_PER_REQUEST;
    c->shape.lengths.dcp.ranks = ranks;
    c->shape.lengths.dcp.rank = ranks - 1;
    c->shape.lengths.dcp.interleave = 16;
    c->lengths = lengths;
    c->row_offsets = offsets;
    c->spare_pages = spare_pages;
    build(c);
}

// One graph over other lengths, live rows, tables, records and queries each time. It knows only
// addresses; what a rank's rows see is worked out when it runs.
static void check_replays(int32_t kv_format, int32_t ranks) {
    static const int32_t lengths[REPLAYED][3] = {
        {1, 1, 1}, {200, 64, 129}, {33, 0, -5}, {190, 500, 3}};
    static const int32_t offsets[REPLAYED][4] = {
        {0, 1, 2, 3}, {0, 4, 8, 12}, {0, 5, 9, 9}, {0, 0, 3, 8}};
    ref_case cases[REPLAYED];
    loaded l;
    uint64_t most_pages = 0;
    for (int i = 0; i < REPLAYED; i++) { // one pool has room for all
        replayed_case(&cases[i], kv_format, ranks, lengths[i], offsets[i], 0);
        most_pages = cases[i].args.kv_pages > most_pages ? cases[i].args.kv_pages : most_pages;
    }
    for (int i = 0; i < REPLAYED; i++) {
        const int32_t spare = 1 + (int32_t)(most_pages - cases[i].args.kv_pages);
        ref_free(&cases[i]);
        replayed_case(&cases[i], kv_format, ranks, lengths[i], offsets[i], spare);
    }
    load(&cases[0], &l);
    prepare(&cases[0].plan);
    void* executable = capture_case(CUDA_CAPTURE_GLOBAL, &cases[0], &l);
    for (int run = 0; run < 2 * REPLAYED; run++) {
        ref_case* c = &cases[run % REPLAYED];
        copy_to_device(l.pool.address, c->pool.data, c->pool.bytes);
        copy_to_device(l.table.address, c->table.data, c->table.bytes);
        copy_to_device(l.query.address, c->query.data, c->query.bytes);
        copy_to_device(l.lengths.address, c->length_buffer.data, c->length_buffer.bytes);
        copy_to_device(l.offsets.address, c->offset_buffer.data, c->offset_buffer.bytes);
        expect(c->pool.bytes == l.pool.bytes, "pools differ");
        judge_replay(executable, c, &l, "replay");
        expect_direct_bits(c, &l, "replay");
    }
    driver_check(backend.driver.graph_exec_destroy(executable), "cuGraphExecDestroy");
    unload(&l);
    for (int i = 0; i < REPLAYED; i++) {
        ref_free(&cases[i]);
    }
}

static void test_replays(void) {
    if (!has_graphs()) {
        skip("no graphs here");
        return;
    }
    for (int32_t kv_format = 0; kv_format < 3; kv_format++) {
        check_replays(kv_format, 1);
        check_replays(kv_format, 3);
    }
}

// A page that no table names; unused pages are full of NaN.
static int32_t unused_page(const ref_case* c) {
    const int32_t* entries = (const int32_t*)(const void*)c->table.data;
    for (int32_t page = 0; page < (int32_t)c->args.kv_pages; page++) {
        int used = 0;
        for (size_t i = 0; i < c->table.bytes / 4; i++) {
            used = used || entries[i] == page;
        }
        if (!used) {
            return page;
        }
    }
    backend_stop("every page is used");
    return -1;
}

// 112 rows are captured, 100 live. Dead rows have lengths of every kind that means "none", and
// tables that name a page full of NaN; a live one is far longer than the capacity.
static void check_padded_batch(int32_t kv_format, int32_t splits) {
    enum { ROWS_CAPTURED = 112, ROWS_LIVE = 100, CAPACITY = 130 };
    static const int32_t none[] = {0, -1, INT32_MIN, -70000};
    int32_t lengths[ROWS_CAPTURED];
    ref_case c = plain_case(2, CAPACITY);
    loaded l;
    ref_random random = {draw()};
    c.shape.requests = ROWS_CAPTURED;
    c.shape.kv_format = kv_format;
    c.shape.splits = splits;
    c.lengths = lengths;
    for (int32_t row = 0; row < ROWS_CAPTURED; row++) {
        lengths[row] = 1 + ref_below(&random, CAPACITY);
    }
    lengths[7] = INT32_MAX;
    lengths[8] = CAPACITY + 1;
    build(&c);
    load(&c, &l);
    prepare(&c.plan);
    void* executable = capture_case(CUDA_CAPTURE_GLOBAL, &c, &l);
    judge_replay(executable, &c, &l, "112 live rows");
    const bits all = bits_of(&c);
    const int32_t nan_page = unused_page(&c);
    int32_t* entries = (int32_t*)(void*)c.table.data;
    for (int32_t row = ROWS_LIVE; row < ROWS_CAPTURED; row++) {
        lengths[row] = none[row % 4];
        for (int64_t i = 0; i < c.args.block_table_width; i++) {
            entries[row * c.args.block_table_width + i] = nan_page;
        }
    }
    memcpy(c.length_buffer.data, lengths, sizeof lengths);
    copy_to_device(l.lengths.address, lengths, sizeof lengths);
    copy_to_device(l.table.address, c.table.data, c.table.bytes);
    for (int32_t row = ROWS_LIVE; row < ROWS_CAPTURED; row++) { // padding queries are NaN, too
        memset(query_of(&c, row, 0), 0xff, (size_t)c.args.query_row_stride_bytes);
    }
    copy_to_device(l.query.address, c.query.data, c.query.bytes);
    judge_replay(executable, &c, &l, "100 live rows");
    expect(memcmp(all.data, c.out.data, all.out_bytes / ROWS_CAPTURED * ROWS_LIVE) == 0 &&
               memcmp(all.data + all.out_bytes, c.lse.data,
                      all.lse_bytes / ROWS_CAPTURED * ROWS_LIVE) == 0,
           "live rows have other bits beside dead ones; %s", describe(&c));
    expect_direct_bits(&c, &l, "100 live rows");
    driver_check(backend.driver.graph_exec_destroy(executable), "cuGraphExecDestroy");
    free(all.data);
    unload(&l);
    ref_free(&c);
}

static void test_padded_batches(void) {
    if (!has_graphs()) {
        skip("no graphs here");
        return;
    }
    for (int32_t kv_format = 0; kv_format < 3; kv_format++) {
        check_padded_batch(kv_format, 1);
        check_padded_batch(kv_format, 3);
    }
}

// Captured while the request has one token, replayed when it has as many as the plan allows.
static void test_growing_length(void) {
    const int32_t long_length[] = {
        options.quick || backend.kind != BACKEND_GPU ? 4096 : 131072};
    const int32_t one[] = {1};
    if (!has_graphs()) {
        skip("no graphs here");
        return;
    }
    for (int n = 0; n < 3 * 2; n++) {
        ref_case c = plain_case(3, long_length[0]);
        loaded l;
        c.shape.kv_format = n % 3;
        c.shape.splits = n / 3 ? 32 : 0; // 0: the planner's
        c.shape.split_mode = n / 3;
        c.lengths = long_length;
        build(&c);
        load(&c, &l);
        prepare(&c.plan);
        c.lengths = one;
        copy_to_device(l.lengths.address, one, sizeof one);
        void* executable = capture_case(CUDA_CAPTURE_GLOBAL, &c, &l);
        judge_replay(executable, &c, &l, "one token");
        c.lengths = long_length;
        copy_to_device(l.lengths.address, long_length, sizeof long_length);
        judge_replay(executable, &c, &l, "all tokens");
        expect_direct_bits(&c, &l, "all tokens");
        driver_check(backend.driver.graph_exec_destroy(executable), "cuGraphExecDestroy");
        unload(&l);
        ref_free(&c);
    }
}

// =============================================================================
// Prefixes that come from elsewhere, and adjacent turns
// =============================================================================

// A cache of one request and the values that its tokens are made of. Page 0 is the null block: no
// table names it but for tokens that there are not, and it stays full of NaN.
typedef struct cache {
    int32_t format, page_tokens;
    int64_t pages;        // page 0 included
    const int32_t* table; // of the request, on the host
    device_buffer pool;
} cache;

static size_t cache_record(const cache* k) {
    return (size_t)ref_record_bytes(ref_kv_layout(k->format));
}

static cache cache_make(int32_t format, int32_t page_tokens, int64_t pages, const int32_t* table) {
    cache k = {format, page_tokens, pages, table, {0, 0}};
    k.pool = device_make((size_t)(pages * page_tokens) * cache_record(&k), 0xff);
    return k;
}

static int64_t cache_slot(const cache* k, int64_t token) {
    return (int64_t)k->table[token / k->page_tokens] * k->page_tokens + token % k->page_tokens;
}

// Tokens [first, last) by the writer; values are [token][576] fp32, on the device.
static void cache_write(const cache* k, uint64_t values, int64_t first, int64_t last) {
    int64_t* slots = (int64_t*)malloc((size_t)(last - first) * sizeof *slots);
    kmla_kv_write write;
    kmla_error error;
    for (int64_t token = first; token < last; token++) {
        slots[token - first] = cache_slot(k, token);
    }
    device_buffer there = device_copy(slots, (size_t)(last - first) * sizeof *slots);
    memset(&write, 0, sizeof write);
    write.tokens = (int32_t)(last - first);
    write.kv_format = k->format;
    write.source_type = KMLA_FP32;
    write.kv_scale = 0.0137f;
    write.page_tokens = k->page_tokens;
    write.latent = values + (uint64_t)first * REF_Q * 4;
    write.latent_stride = REF_Q;
    write.rope = write.latent + REF_D * 4;
    write.rope_stride = REF_Q;
    write.slots = there.address;
    write.kv = k->pool.address;
    write.kv_pages = (uint64_t)k->pages;
    prepare(NULL);
    if (call_write_kv(&write, &error) != KMLA_OK) {
        fail("%s", error.message);
    }
    device_free(&there);
    free(slots);
}

// Tokens [0, last) as the records that another cache holds: bytes, wherever they lie there.
static void cache_import(const cache* to, const cache* from, int64_t last) {
    const size_t record = cache_record(to);
    uint8_t* bytes = (uint8_t*)malloc(from->pool.bytes);
    copy_to_host(bytes, from->pool.address, from->pool.bytes);
    for (int64_t token = 0; token < last; token++) {
        copy_to_device(to->pool.address + (uint64_t)cache_slot(to, token) * record,
                       bytes + (size_t)cache_slot(from, token) * record, record);
    }
    free(bytes);
}

// Reads the first `tokens` of a cache by the plan of c, and nothing for a second request, whose
// table names the null block.
static void cache_read(const cache* k, ref_case* c, const loaded* query, int64_t tokens) {
    const int32_t lengths[] = {(int32_t)tokens, 0};
    const int64_t width = (c->shape.capacity_tokens + k->page_tokens - 1) / k->page_tokens;
    int32_t* tables = (int32_t*)calloc((size_t)(2 * width), sizeof *tables);
    memcpy(tables, k->table, (size_t)((tokens + k->page_tokens - 1) / k->page_tokens) * 4);
    device_buffer table = device_copy(tables, (size_t)(2 * width) * 4);
    device_buffer length = device_copy(lengths, sizeof lengths);
    kmla_decode args = query->args;
    kmla_plan plan;
    kmla_error error;
    c->shape.page_tokens = k->page_tokens;
    if (kmla_plan_decode(&c->shape, backend_card(), &plan, &error) != KMLA_OK) {
        backend_stop("%s", error.message);
    }
    args.kv = k->pool.address;
    args.kv_pages = (uint64_t)k->pages;
    args.page_pitch_bytes = 0;
    args.block_table = table.address;
    args.block_table_width = width;
    args.lengths = length.address;
    fill_device(args.out, 0xff, c->out.bytes);
    fill_device(args.lse, 0xff, c->lse.bytes);
    fill_device(args.workspace, 0xff, (size_t)args.workspace_bytes);
    prepare(&plan);
    if (call_decode(&plan, &args, &error) != KMLA_OK) {
        fail("%s", error.message);
    }
    copy_to_host(c->out.data, args.out, c->out.bytes);
    copy_to_host(c->lse.data, args.lse, c->lse.bytes);
    expect(device_all_bytes(k->pool.address, (size_t)k->page_tokens * cache_record(k), 0xff),
           "the null block was written");
    device_free(&table);
    device_free(&length);
    free(tables);
}

// A table of pages from 1 on, in an order of its own.
static int32_t* shuffled_pages(int64_t pages) {
    ref_random random = {draw()};
    int64_t* order = ref_shuffled(&random, pages);
    int32_t* table = (int32_t*)malloc((size_t)pages * sizeof *table);
    for (int64_t i = 0; i < pages; i++) {
        table[i] = (int32_t)order[i] + 1;
    }
    free(order);
    return table;
}

enum { OTHER_PAGE = 100 }; // tokens of a page of the cache that a prefix comes from

static void check_reuse(int32_t format) {
    // The prefix ends within a page of either cache.
    const int64_t prefix = options.quick ? 170 : 9216 - 5, tokens = prefix + 300;
    const int64_t turns[] = {prefix + 40, prefix + 41, prefix + 45, tokens};
    const int64_t pages = (tokens + 63) / 64, other_pages = (prefix + OTHER_PAGE - 1) / OTHER_PAGE;
    const int32_t lengths[] = {(int32_t)tokens, 0};
    int32_t *cold_table = shuffled_pages(pages), *warm_table = shuffled_pages(pages);
    int32_t* other_table = shuffled_pages(other_pages);
    float* values = (float*)malloc((size_t)tokens * REF_Q * sizeof *values);
    ref_random random = {draw()};
    ref_case c = plain_case(3, tokens);
    loaded l;
    c.shape.requests = 2;
    c.shape.rows_per_request = 4;
    c.shape.kv_format = format;
    c.shape.splits = 4;
    c.shape.lengths.lengths_kind = KMLA_LENGTHS_PER_REQUEST;
    c.lengths = lengths;
    build(&c);
    load(&c, &l);
    for (int64_t i = 0; i < tokens * REF_Q; i++) {
        values[i] = (float)ref_normal(&random);
    }
    device_buffer there = device_copy(values, (size_t)tokens * REF_Q * sizeof *values);
    cache cold = cache_make(format, 64, pages + 1, cold_table);
    cache warm = cache_make(format, 64, pages + 1, warm_table);
    cache other = cache_make(format, OTHER_PAGE, other_pages + 1, other_table);
    cache_write(&cold, there.address, 0, tokens);
    cache_write(&other, there.address, 0, prefix);
    cache_import(&warm, &other, prefix);
    for (int turn = 0; turn < COUNT(turns); turn++) { // append, decode, append, ...
        cache_write(&warm, there.address, turn ? turns[turn - 1] : prefix, turns[turn]);
        cache_read(&warm, &c, &l, turns[turn]);
        const bits got = bits_of(&c);
        cache_read(&cold, &c, &l, turns[turn]);
        expect(same_bits(&got, &c), "format %d, %lld tokens: other bits than a cold cache's",
               format, (long long)turns[turn]);
        free(got.data);
    }
    // And those are right: the cold cache against fp64, as the case's own pool.
    expect(cold.pool.bytes == c.pool.bytes, "the case has %zu bytes of pages, not %zu",
           c.pool.bytes, cold.pool.bytes);
    copy_to_host(c.pool.data, cold.pool.address, c.pool.bytes);
    memcpy(c.table.data, cold_table, (size_t)pages * 4);
    answer right = answer_of(&c);
    judge(&c, &right, "cold cache");
    answer_free(&right);
    device_free(&there);
    device_free(&cold.pool);
    device_free(&warm.pool);
    device_free(&other.pool);
    unload(&l);
    ref_free(&c);
    free(values);
    free(cold_table);
    free(warm_table);
    free(other_table);
}

static void test_reuse(void) {
    for (int32_t format = 0; format < 3; format++) {
        check_reuse(format);
    }
}

#endif // KMLA_TESTS_DEVICE_SERVING_H
