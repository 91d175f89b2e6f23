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
        combine_case k;
        ref_random random = {draw()};
        memset(&k, 0, sizeof k);
        k.args.parts = parts[n % COUNT(parts)];
        k.args.rows = 1 + n % 3;
        k.args.heads = 1 + n * 7 % 12;
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

// Where a row's tokens begin and end, told by the decode itself. All queries are 0, so that exp(lse)
// counts the tokens; the value of local token t is t, so that the mean tells where they are.
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

#endif // KMLA_TESTS_DEVICE_SERVING_H
