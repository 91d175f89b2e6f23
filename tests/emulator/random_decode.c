// Random shapes through the C API on an emulated card: decodes against the fp64 reference, writers
// and combine against the host's. Everything runs under two schedules, which must give the same
// bits: threads that meet too late or not at all show there.
//
//     random_decode --library PATH [--cases N] [--seed S]

#define KIMI_MLA_IMPLEMENTATION
#include "../reference.h"

#include <dlfcn.h>

typedef struct card {
    kmla_gpu* gpu;
    kmla_device device;
    void (*seed)(unsigned long long seed); // of schedules
} card;

static const char* current; // the case, for messages

static void fail(const char* what) {
    printf("FAILED %s: %s\n", current, what);
    exit(1);
}

static void succeed(kmla_status status, const kmla_error* error) {
    if (status != KMLA_OK) {
        fail(error->message);
    }
}

static void* find(void* library, const char* name) {
    void* found = dlsym(library, name);
    if (!found) {
        fail(name);
    }
    return found;
}

static void open_card(const char* path, card* card) {
    int (*init)(unsigned), (*retain)(void**, int), (*set_current)(void*);
    void *context, *library = dlopen(path, RTLD_NOW);
    kmla_gpu_desc desc;
    kmla_error error;
    if (!library) {
        fail(dlerror());
    }
    *(void**)&init = find(library, "cuInit");
    *(void**)&retain = find(library, "cuDevicePrimaryCtxRetain");
    *(void**)&set_current = find(library, "cuCtxSetCurrent");
    *(void**)&card->seed = find(library, "kmla_emulator_seed");
    if (init(0) || retain(&context, 0) || set_current(context)) {
        fail("no context");
    }
    memset(&desc, 0, sizeof desc);
    desc.cuda_path = desc.nvrtc_path = path;
    succeed(kmla_gpu_open(&desc, &card->gpu, &error), &error);
    succeed(kmla_gpu_device(card->gpu, &card->device, &error), &error);
}

// =============================================================================
// Decodes
// =============================================================================

static int32_t one_of(ref_random* random, const int32_t* values, int count) {
    return values[ref_below(random, count)];
}

// A tile of the reader that the shape will get.
static int32_t random_tile(ref_random* random, const kmla_device* device, const kmla_shape* shape) {
    static const int32_t tiles[] = {0, 8, 16, 32}, hopper_tiles[] = {0, 8, 16, 24, 32, 40, 48, 56};
    int hopper = device->compute_major == 9 && shape->kv_format != KMLA_KV_BF16 && !shape->reader;
    return hopper ? one_of(random, hopper_tiles, 6) : one_of(random, tiles, 4);
}

// Mostly few of everything: odd counts and edges are where mistakes live.
static void random_shape(ref_random* random, const kmla_device* device, kmla_shape* shape) {
    static const int32_t pages[] = {1, 4, 7, 16, 32, 64, 64, 96, 128};
    memset(shape, 0, sizeof *shape);
    shape->requests = 1 + ref_below(random, 3);
    shape->rows_per_request = 1 + ref_below(random, 4);
    shape->rows = shape->requests * shape->rows_per_request;
    shape->heads = 1 + ref_below(random, ref_below(random, 2) ? 8 : 40);
    shape->kv_format = ref_below(random, 3);
    shape->query_format = ref_below(random, 3);
    shape->mode = shape->query_format == KMLA_QUERY_BF16 ? ref_below(random, 2) : KMLA_MODE_EXACT;
    shape->page_tokens = one_of(random, pages, 9);
    shape->capacity_tokens =
        ref_below(random, 3) ? 1 + ref_below(random, 420) : 64 * (1 + ref_below(random, 6));
    shape->splits = ref_below(random, 2) ? 1 : 1 + ref_below(random, 9);
    shape->split_mode = ref_below(random, 2);
    shape->single_split_chunks = ref_below(random, 2) ? 0 : ref_below(random, 4);
    shape->partial_type = ref_below(random, 2);
    shape->reader = ref_below(random, 3) ? 0 : KMLA_READER_PORTABLE;
    shape->tile = random_tile(random, device, shape);
    shape->slot_list = ref_below(random, 4) == 0;
    shape->lengths.window_tokens = ref_below(random, 3) ? 0 : 1 + ref_below(random, 200);
    if (!shape->slot_list) {
        shape->ragged = ref_below(random, 3) == 0;
        shape->lengths.lengths_kind = ref_below(random, 2);
    }
    if (shape->ragged) {
        shape->rows += ref_below(random, 40); // dead ones behind the last request
    }
    if (shape->lengths.lengths_kind == KMLA_LENGTHS_PER_REQUEST) {
        shape->lengths.rows_kind = ref_below(random, 2);
        shape->lengths.dcp.ranks = 1 + ref_below(random, 4);
        shape->lengths.dcp.rank = ref_below(random, shape->lengths.dcp.ranks);
        shape->lengths.dcp.interleave = ref_below(random, 2) ? 1 : 1 + ref_below(random, 64);
    }
}

static int32_t random_length(ref_random* random, int32_t most) {
    switch (ref_below(random, 8)) {
    case 0:
        return 0;
    case 1:
        return -1 - ref_below(random, 3);
    case 2:
        return most;
    case 3:
        return most + 1 + ref_below(random, 100);
    default:
        return ref_below(random, most + 1);
    }
}

static void decode_on_card(const card* card, ref_case* c, unsigned long long schedule) {
    kmla_error error;
    ref_clear(c);
    card->seed(schedule);
    succeed(kmla_gpu_decode(card->gpu, &c->plan, &c->args, NULL, &error), &error);
}

// FP32 all the way shows the reader's own error, twice of which is allowed. Rounding to BF16 alone
// costs up to 2^-8 where few tokens are seen, because their codes times one scale are few numbers.
static void judge(const ref_case* c) {
    const int rounded =
        c->out_type == KMLA_BF16 || (c->plan.splits > 1 && c->plan.shape.partial_type == KMLA_BF16);
    const double bound = rounded ? 4e-3 : 1e-3;
    ref_errors errors = ref_check(c);
    if (errors.wrong || errors.out > bound || errors.lse > 3e-4) {
        printf("out %.3e (bound %.1e), worst vector %.3e, lse %.3e, wrong vectors %d\n", errors.out,
               bound, errors.worst_vector, errors.lse, errors.wrong);
        fail("differs from the reference");
    }
    if (!ref_untouched(c)) {
        fail("wrote where it should not");
    }
}

// Returns the reader.
static int32_t test_decode(const card* card, ref_random* random) {
    int32_t lengths[128], offsets[4] = {0};
    char text[512];
    ref_case c;
    kmla_error error;
    uint8_t *out, *lse;
    memset(&c, 0, sizeof c);
    random_shape(random, &card->device, &c.shape);
    for (int32_t i = 0; i < c.shape.requests; ++i) {
        offsets[i + 1] =
            offsets[i] + (c.shape.ragged ? ref_below(random, c.shape.rows_per_request + 1)
                                         : c.shape.rows_per_request);
    }
    for (int32_t i = 0; i < c.shape.rows; ++i) {
        int32_t ranks = c.shape.lengths.dcp.ranks > 1 ? c.shape.lengths.dcp.ranks : 1;
        lengths[i] = random_length(random, (int32_t)c.shape.capacity_tokens * ranks);
    }
    c.lengths = lengths;
    c.row_offsets = offsets;
    c.seed = ref_next(random);
    c.logit_sigma = 0.2 + 3.8 * ref_uniform(random);
    c.pitch_extra_bytes = 16 * ref_below(random, 3);
    c.stored_heads = c.shape.heads + ref_below(random, 3);
    c.out_type = ref_below(random, 2);
    c.hole_share = ref_below(random, 4) ? 0 : 0.1;
    snprintf(text, sizeof text,
             "reader %d, kv %d, query %d, mode %d, tile %d, %d requests of %d rows (%d), %d heads, "
             "pages of "
             "%d, capacity %d, %d splits (mode %d, single %d, partials %d), slot list %d, ragged "
             "%d, lengths %d/%d, window %d, rank %d of %d by %d, first length %d",
             c.shape.reader, c.shape.kv_format, c.shape.query_format, c.shape.mode, c.shape.tile,
             c.shape.requests, c.shape.rows_per_request, c.shape.rows, c.shape.heads,
             c.shape.page_tokens, (int)c.shape.capacity_tokens, c.shape.splits, c.shape.split_mode,
             c.shape.single_split_chunks, c.shape.partial_type, c.shape.slot_list, c.shape.ragged,
             c.shape.lengths.lengths_kind, c.shape.lengths.rows_kind, c.shape.lengths.window_tokens,
             c.shape.lengths.dcp.rank, c.shape.lengths.dcp.ranks, c.shape.lengths.dcp.interleave,
             lengths[0]);
    current = text;
    if (ref_build(&c, &card->device) != KMLA_OK) {
        fail("cannot be built");
    }
    succeed(kmla_gpu_prepare(card->gpu, &c.plan, NULL, &error), &error);

    decode_on_card(card, &c, 1);
    judge(&c);
    out = (uint8_t*)malloc(c.out.bytes);
    lse = (uint8_t*)malloc(c.lse.bytes);
    memcpy(out, c.out.data, c.out.bytes);
    memcpy(lse, c.lse.data, c.lse.bytes);
    decode_on_card(card, &c, 2 + ref_next(random) % 1000);
    if (memcmp(out, c.out.data, c.out.bytes) || memcmp(lse, c.lse.data, c.lse.bytes)) {
        fail("another schedule gives other bits");
    }
    free(out);
    free(lse);
    int32_t reader = c.plan.reader;
    ref_free(&c);
    return reader;
}

// =============================================================================
// Writers and combine
// =============================================================================

// Numbers of all magnitudes, with zeros, infinities and NaN among them.
static float wild_number(ref_random* random) {
    switch (ref_below(random, 40)) {
    case 0:
        return 0.0f;
    case 1:
        return -INFINITY;
    case 2:
        return NAN;
    case 3:
        return (float)(ref_normal(random) * 1e30);
    case 4:
        return (float)(ref_normal(random) * 1e-30);
    default:
        return (float)(ref_normal(random) * 10);
    }
}

static ref_buffer wild_numbers(ref_random* random, int64_t count, int32_t type) {
    ref_buffer buffer = ref_buffer_make((size_t)(count * (type == KMLA_FP32 ? 4 : 2)), 0);
    for (int64_t i = 0; i < count; ++i) {
        float value = wild_number(random);
        if (type == KMLA_FP32) {
            memcpy(buffer.data + 4 * i, &value, 4);
        } else {
            uint16_t bits = ref_to_bf16(value);
            memcpy(buffer.data + 2 * i, &bits, 2);
        }
    }
    return buffer;
}

static void expect_same(const ref_buffer* device, const ref_buffer* host) {
    if (memcmp(device->data, host->data, host->bytes)) {
        size_t at = 0;
        while (device->data[at] == host->data[at]) {
            ++at;
        }
        printf("byte %zu of %zu: %02x, host %02x\n", at, host->bytes, device->data[at],
               host->data[at]);
        fail("differs from the host");
    }
}

static void test_write_kv(const card* card, ref_random* random) {
    kmla_kv_write write;
    kmla_error error;
    memset(&write, 0, sizeof write);
    write.tokens = 1 + ref_below(random, 20);
    write.kv_format = ref_below(random, 3);
    write.source_type = ref_below(random, 2);
    write.scale_rule = ref_below(random, 2);
    write.kv_scale = 0.0137f;
    write.page_tokens = 1 + ref_below(random, 9);
    write.kv_pages = 5;
    ref_buffer latent = wild_numbers(random, write.tokens * 512, write.source_type);
    ref_buffer rope = wild_numbers(random, write.tokens * 64, write.source_type);
    ref_buffer slots = ref_buffer_make((size_t)write.tokens * 8, 0);
    size_t bytes = 5u * (size_t)write.page_tokens * kmla_kv_record_bytes(write.kv_format);
    ref_buffer device = ref_buffer_make(bytes, 0xee), host = ref_buffer_make(bytes, 0xee);
    int64_t count = 5 * write.page_tokens, *names = ref_shuffled(random, count + write.tokens);
    for (int32_t i = 0; i < write.tokens; ++i) { // distinct; some past the pool, some below 0
        int64_t slot = ref_below(random, 8) ? names[i] : -1 - names[i] * 1000000007;
        memcpy(slots.data + 8 * i, &slot, 8);
    }
    write.latent = ref_address(&latent);
    write.rope = ref_address(&rope);
    write.slots = ref_address(&slots);
    write.kv = ref_address(&device);
    current = "kmla_gpu_write_kv";
    succeed(kmla_gpu_write_kv(card->gpu, &write, NULL, &error), &error);
    write.kv = ref_address(&host);
    succeed(kmla_host_write_kv(&write, &error), &error);
    expect_same(&device, &host);
    free(names);
    ref_buffer_free(&latent);
    ref_buffer_free(&rope);
    ref_buffer_free(&slots);
    ref_buffer_free(&device);
    ref_buffer_free(&host);
}

static void test_write_query(const card* card, ref_random* random) {
    kmla_query_write write;
    kmla_error error;
    memset(&write, 0, sizeof write);
    write.rows = 1 + ref_below(random, 4);
    write.heads = 1 + ref_below(random, 9);
    write.query_format = ref_below(random, 3);
    write.source_type = ref_below(random, 2);
    write.query_scale = 0.021f;
    size_t vectors = (size_t)(write.rows * write.heads);
    size_t bytes = vectors * kmla_query_record_bytes(write.query_format);
    ref_buffer source = wild_numbers(random, (int64_t)vectors * 576, write.source_type);
    ref_buffer device = ref_buffer_make(bytes, 0xee), host = ref_buffer_make(bytes, 0xee);
    write.source = ref_address(&source);
    write.query = ref_address(&device);
    current = "kmla_gpu_write_query";
    succeed(kmla_gpu_write_query(card->gpu, &write, NULL, &error), &error);
    write.query = ref_address(&host);
    succeed(kmla_host_write_query(&write, &error), &error);
    expect_same(&device, &host);
    ref_buffer_free(&source);
    ref_buffer_free(&device);
    ref_buffer_free(&host);
}

static void test_combine(const card* card, ref_random* random) {
    static const float odd_lse[] = {-INFINITY, INFINITY, NAN};
    kmla_combine combine;
    kmla_error error;
    memset(&combine, 0, sizeof combine);
    combine.parts = 1 + ref_below(random, 9);
    combine.rows = 1 + ref_below(random, 3);
    combine.heads = 1 + ref_below(random, 5);
    combine.part_type = ref_below(random, 2);
    combine.out_type = KMLA_FP32;
    int64_t vectors = combine.rows * combine.heads, parts = vectors * combine.parts;
    int32_t bytes = combine.part_type == KMLA_FP32 ? 4 : 2;
    ref_buffer part_out = wild_numbers(random, parts * 512, combine.part_type);
    ref_buffer part_lse = ref_buffer_make((size_t)parts * 4, 0);
    ref_buffer outs[2], lses[2];
    for (int64_t i = 0; i < parts; ++i) {
        float lse =
            ref_below(random, 3) ? (float)(4 * ref_normal(random)) : odd_lse[ref_below(random, 3)];
        memcpy(part_lse.data + 4 * i, &lse, 4);
        for (int64_t d = 0; d < 512 * bytes; ++d) { // finite numbers only in parts that count
            uint8_t* byte = &part_out.data[i * 512 * bytes + d];
            *byte = isfinite(lse) ? (d % bytes == bytes - 1 ? *byte & 0xbf : *byte) : 0xff;
        }
    }
    combine.part_out = ref_address(&part_out);
    combine.part_lse = ref_address(&part_lse);
    current = "kmla_gpu_combine";
    for (int host = 0; host < 2; ++host) {
        outs[host] = ref_buffer_make((size_t)vectors * 512 * 4, 0xee);
        lses[host] = ref_buffer_make((size_t)vectors * 4, 0xee);
        combine.out = ref_address(&outs[host]);
        combine.lse = ref_address(&lses[host]);
        succeed(host ? kmla_host_combine(&combine, &error)
                     : kmla_gpu_combine(card->gpu, &combine, NULL, &error),
                &error);
    }
    for (int64_t i = 0; i < vectors * 512; ++i) {
        double mine = ref_float_at(outs[0].data + 4 * i),
               right = ref_float_at(outs[1].data + 4 * i);
        if (!(fabs(mine - right) <= 1e-5 * fabs(right) + 1e-6)) {
            printf("element %d: %g, host %g\n", (int)i, mine, right);
            fail("differs from the host");
        }
    }
    for (int64_t i = 0; i < vectors; ++i) {
        double mine = ref_float_at(lses[0].data + 4 * i),
               right = ref_float_at(lses[1].data + 4 * i);
        if (!(mine == right || fabs(mine - right) <= 1e-5)) {
            fail("lse differs from the host");
        }
    }
    ref_buffer_free(&part_out);
    ref_buffer_free(&part_lse);
    for (int host = 0; host < 2; ++host) {
        ref_buffer_free(&outs[host]);
        ref_buffer_free(&lses[host]);
    }
}

int main(int argc, char** argv) {
    const char* path = NULL;
    int cases = 100, decodes[3] = {0}; // by reader
    ref_random random = {1};
    card card;
    current = "start";
    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--library") == 0) {
            path = argv[i + 1];
        } else if (strcmp(argv[i], "--cases") == 0) {
            cases = atoi(argv[i + 1]);
        } else if (strcmp(argv[i], "--seed") == 0) {
            random.state = strtoull(argv[i + 1], NULL, 0);
        }
    }
    if (!path) {
        fail("usage: random_decode --library PATH [--cases N] [--seed S]");
    }
    kmla_error error;
    open_card(path, &card);
    succeed(kmla_gpu_prepare(card.gpu, NULL, NULL, &error), &error);
    for (int i = 0; i < cases; ++i) {
        test_write_kv(&card, &random);
        test_write_query(&card, &random);
        test_combine(&card, &random);
        ++decodes[test_decode(&card, &random)];
    }
    kmla_gpu_close(card.gpu);
#ifdef __SANITIZE_ADDRESS__
    const char* how = ", under ASan and UBSan";
#else
    const char* how = "";
#endif
    printf("emulated sm_%d%d: %d cases (random decodes, %d by the portable reader and %d by the "
           "Hopper reader, writers and combines%s)\n",
           card.device.compute_major, card.device.compute_minor, 4 * cases,
           decodes[KMLA_READER_PORTABLE], decodes[KMLA_READER_HOPPER], how);
    return 0;
}
