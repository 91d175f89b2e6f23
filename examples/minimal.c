// minimal.c - the smallest integration: 4 verify rows of 99 heads read 1,000 cached tokens, on the
// first GPU, or by the host reader where there is none.
#define KIMI_MLA_IMPLEMENTATION
#include "../kimi_mla.h"

#include "driver.h" // what an engine has anyway: a CUDA context and device memory

enum { ROWS = 4, HEADS = 99, VECTORS = ROWS * HEADS, PAGES = 16, TOKENS = 1000 };

static driver cuda;
static kmla_gpu* gpu; // NULL: the host reader
static kmla_error error;

static void must(kmla_status status) {
    if (status != KMLA_OK) {
        fprintf(stderr, "%s\n", error.message);
        exit(1);
    }
}

static uint64_t place(const void* data, size_t bytes) { // where the reader finds these bytes
    uint64_t address = gpu ? driver_alloc(&cuda, bytes) : (uint64_t)(uintptr_t)data;
    if (gpu) {
        driver_upload(&cuda, address, data, bytes);
    }
    return address;
}

int main(void) {
    size_t pool_bytes = PAGES * 64 * KMLA_PACKED_BYTES, query_bytes = VECTORS * KMLA_BF16_BYTES;
    size_t out_bytes = VECTORS * KMLA_LATENT_DIMS * sizeof(float);
    uint8_t* pool = (uint8_t*)calloc(1, pool_bytes);
    uint8_t* query = (uint8_t*)calloc(1, query_bytes); // zeros: every token weighs the same
    float *out = (float*)malloc(out_bytes), lse[VECTORS];
    int32_t table[PAGES], lengths[1] = {TOKENS};
    const float scales[4] = {0.75f, 0.75f, 0.75f, 0.75f};
    for (uint8_t* record = pool; record < pool + pool_bytes; record += KMLA_PACKED_BYTES) {
        memset(record, 0x38, KMLA_LATENT_DIMS); // the code of 1.0
        memcpy(record + KMLA_PACKED_SCALE_OFFSET, scales, sizeof scales);
    }
    for (int page = 0; page < PAGES; page++) {
        table[page] = PAGES - 1 - page; // pages lie anywhere
    }

    const char* why_not;
    kmla_device card = {0}; // all zero: no GPU
    if (driver_open(&cuda, NULL, &why_not)) {
        must(kmla_gpu_open(NULL, &gpu, &error));
        must(kmla_gpu_device(gpu, &card, &error));
    }

    kmla_shape shape = {0};
    kmla_plan plan;
    shape.requests = 1;
    shape.rows_per_request = ROWS;
    shape.heads = HEADS;
    shape.capacity_tokens = PAGES * 64;
    shape.lengths.lengths_kind = KMLA_LENGTHS_PER_REQUEST; // rows see 997, 998, 999, 1000 tokens
    must(kmla_plan_decode(&shape, &card, &plan, &error));
    if (gpu) {
        must(kmla_gpu_prepare(gpu, &plan, NULL, &error)); // compiles: slow, once
    }

    kmla_decode args = {0};
    args.query = place(query, query_bytes);
    args.scale = 0.07216878f; // Kimi-K3
    args.kv = place(pool, pool_bytes);
    args.kv_pages = PAGES;
    args.block_table = place(table, sizeof table);
    args.block_table_width = PAGES;
    args.lengths = place(lengths, sizeof lengths);
    args.out = place(out, out_bytes);
    args.out_type = KMLA_FP32;
    args.lse = place(lse, sizeof lse);
    args.workspace = gpu ? driver_alloc(&cuda, plan.workspace_bytes) : 0;
    args.workspace_bytes = plan.workspace_bytes;
    if (gpu) {
        must(kmla_gpu_decode(gpu, &plan, &args, NULL, &error));
        driver_download(&cuda, out, args.out, out_bytes);
        driver_download(&cuda, lse, args.lse, sizeof lse);
    } else {
        must(kmla_host_decode(&plan, &args, NULL, &error));
    }
    printf("%s: out %g, lse %.5f; 0.75 and ln 1000 = 6.90776 are right\n",
           gpu ? cuda.card : "host reader", (double)out[0], (double)lse[VECTORS - 1]);
    return out[0] == 0.75f && fabsf(lse[VECTORS - 1] - 6.90776f) < 1e-4f ? 0 : 1;
}
