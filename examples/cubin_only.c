// cubin_only.c - decodes with kernels that were compiled elsewhere: this program has no compiler
// and no device source in it, and the machine needs only the driver.
//
//     cubin_only SUPPORT READER    images that tools/kmla made: --support, and one with --kv packed
//     cubin_only --arch            says for which architecture to make them: the first card's
//
// Without a GPU it checks only that the images are whole and of this header.
#define KIMI_MLA_NO_NVRTC
#define KIMI_MLA_IMPLEMENTATION
#include "../kimi_mla.h"

#include "driver.h" // what an engine has anyway: a CUDA context and device memory

#include <math.h>

enum { HEADS = 99, PAGES = 16, TOKENS = 1000 };

static driver cuda;
static kmla_error error;

static void must(kmla_status status) {
    if (status != KMLA_OK) {
        fprintf(stderr, "%s\n", error.message);
        exit(1);
    }
}

// The bytes of an image lie where the program has them: in a file, an array, mapped memory.
static kmla_image open_image(const char* path) {
    kmla_image image;
    FILE* file = fopen(path, "rb");
    long bytes = file && fseek(file, 0, SEEK_END) == 0 ? ftell(file) : -1;
    void* data = bytes > 0 ? malloc((size_t)bytes) : NULL;
    if (!data || fseek(file, 0, SEEK_SET) != 0 ||
        fread(data, 1, (size_t)bytes, file) != (size_t)bytes) {
        fprintf(stderr, "cannot read %s\n", path);
        exit(1);
    }
    fclose(file);
    must(kmla_image_open(data, (size_t)bytes, &image, &error));
    return image;
}

// A damaged image is refused before a driver would see it.
static void check_refusal(const kmla_image* image) {
    unsigned char* bytes = (unsigned char*)image->data;
    kmla_image damaged;
    bytes[image->bytes / 2] ^= 1;
    if (kmla_image_open(bytes, image->bytes, &damaged, &error) != KMLA_ERROR_ARGUMENT) {
        fprintf(stderr, "a damaged image was taken\n");
        exit(1);
    }
    bytes[image->bytes / 2] ^= 1;
}

// The image says which reader and tile it is of; the plan must be for the same.
static kmla_plan plan_for(const kmla_image* reader, const kmla_device* card) {
    kmla_shape shape = {0};
    kmla_plan plan;
    shape.requests = 1;
    shape.heads = HEADS;
    shape.capacity_tokens = PAGES * 64;
    shape.reader = reader->variant / 10000;
    shape.kv_format = reader->variant / 1000 % 10;
    shape.tile = reader->variant % 1000;
    if (shape.reader == KMLA_READER_HOST || shape.kv_format != KMLA_KV_PACKED) {
        fprintf(stderr, "the second image is not a reader of packed KV\n");
        exit(1);
    }
    must(kmla_plan_decode(&shape, card, &plan, &error));
    return plan;
}

static uint64_t upload(const void* data, size_t bytes) {
    uint64_t address = driver_alloc(&cuda, bytes);
    driver_upload(&cuda, address, data, bytes);
    return address;
}

// Every latent is 0.75 and every query 0: so is the output, and the log-sum-exp ln 1000.
static int decode(kmla_gpu* gpu, const kmla_plan* plan) {
    static uint8_t pool[PAGES * 64 * KMLA_PACKED_BYTES], query[HEADS * KMLA_BF16_BYTES];
    static float out[HEADS * KMLA_LATENT_DIMS], lse[HEADS];
    const float scales[4] = {0.75f, 0.75f, 0.75f, 0.75f};
    int32_t table[PAGES], length = TOKENS;
    kmla_decode args = {0};
    for (size_t at = 0; at < sizeof pool; at += KMLA_PACKED_BYTES) {
        memset(pool + at, 0x38, KMLA_LATENT_DIMS); // the code of 1.0
        memcpy(pool + at + KMLA_PACKED_SCALE_OFFSET, scales, sizeof scales);
    }
    for (int page = 0; page < PAGES; page++) {
        table[page] = PAGES - 1 - page;
    }
    args.query = upload(query, sizeof query);
    args.scale = 0.07216878f;
    args.kv = upload(pool, sizeof pool);
    args.kv_pages = PAGES;
    args.block_table = upload(table, sizeof table);
    args.block_table_width = PAGES;
    args.lengths = upload(&length, sizeof length);
    args.out = driver_alloc(&cuda, sizeof out);
    args.out_type = KMLA_FP32;
    args.lse = driver_alloc(&cuda, sizeof lse);
    args.workspace = driver_alloc(&cuda, plan->workspace_bytes);
    args.workspace_bytes = plan->workspace_bytes;
    must(kmla_gpu_decode(gpu, plan, &args, NULL, &error));
    driver_download(&cuda, out, args.out, sizeof out);
    driver_download(&cuda, lse, args.lse, sizeof lse);
    float last = out[HEADS * KMLA_LATENT_DIMS - 1];
    printf("%s: out %.7f, lse %.5f; 0.75 and ln 1000 = 6.90776 are right\n", cuda.card,
           (double)last, (double)lse[HEADS - 1]);
    return fabsf(last - 0.75f) < 1e-5f && fabsf(lse[HEADS - 1] - 6.90776f) < 1e-4f;
}

int main(int argc, char** argv) {
    kmla_device card = {0};
    kmla_gpu* gpu = NULL;
    const char* why_not = "";
    if (driver_open(&cuda, NULL, &why_not)) {
        must(kmla_gpu_open(NULL, &gpu, &error));
        must(kmla_gpu_device(gpu, &card, &error));
    }
    if (argc == 2 && strcmp(argv[1], "--arch") == 0) {
        printf("sm_%d%d\n", gpu ? (int)card.compute_major : 12, gpu ? (int)card.compute_minor : 0);
        return 0;
    }
    if (argc != 3) {
        fprintf(stderr, "usage: cubin_only SUPPORT READER | --arch\n");
        return 2;
    }
    kmla_image support = open_image(argv[1]), reader = open_image(argv[2]);
    check_refusal(&support);
    check_refusal(&reader);
    int right = 1;
    if (!gpu) {
        printf("no GPU (%s): both images are whole and of this header, damaged ones are refused\n",
               why_not);
    } else {
        kmla_plan plan = plan_for(&reader, &card);
        must(kmla_gpu_prepare(gpu, NULL, &support, &error)); // nothing is compiled
        must(kmla_gpu_prepare(gpu, &plan, &reader, &error));
        right = decode(gpu, &plan);
        kmla_gpu_close(gpu);
    }
    free(support.data); // kmla_image_open left it ours
    free(reader.data);
    return right ? 0 : 1;
}
