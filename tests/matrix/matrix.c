// Compiles every kernel with one NVRTC for a list of architectures: prints one row of the table.
//
//     matrix --heading ARCHITECTURE...            the table's first line
//     matrix NAME NVRTC_PATH ARCHITECTURE...      the row NAME, e.g. of 80 90 90a 120
//
// A cell is "KERNELS/SPILLED BYTES", or "refused" where kmla_gpu_compile says that this NVRTC does
// not know the card, in an error that names both. "90a" is the Hopper reader alone, every other
// architecture the portable reader and the support kernels. Spills and all else are failures: a
// message goes to stderr, and the exit code is 1.

#define KIMI_MLA_IMPLEMENTATION
#include "../../kimi_mla.h"

#include "../../tools/cards.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct cell {
    const char* architecture;
    int kernels, spills, refused, failures;
} cell;

static void fail(cell* at, const char* what, const char* message) {
    fprintf(stderr, "sm_%s, %s: %s\n", at->architecture, what, message);
    ++at->failures;
}

// ptxas -v, of every kernel: "Compiling entry function", then "N bytes spill stores, N bytes ...".
static void count_kernels(void* user, const char* log) {
    cell* at = (cell*)user;
    const char* line;
    for (line = log; (line = strstr(line, "Compiling entry function")) != NULL; ++line) {
        ++at->kernels;
    }
    for (line = log; (line = strstr(line, " bytes stack frame, ")) != NULL; ++line) {
        int stores, loads;
        if (sscanf(line, " bytes stack frame, %d bytes spill stores, %d bytes spill loads", &stores,
                   &loads) == 2) {
            at->spills += stores + loads;
        } else {
            fail(at, "cannot read ptxas's log", line);
        }
    }
}

// A refusal says which NVRTC, which card, and what this NVRTC knows or what is wanted of it.
static void check_refusal(cell* at, const char* what, const kmla_error* error) {
    char nvrtc[32], card[32];
    snprintf(nvrtc, sizeof nvrtc, "NVRTC %d.%d", (int)error->nvrtc_version / 1000,
             (int)error->nvrtc_version % 1000 / 10);
    snprintf(card, sizeof card, "sm_%s", at->architecture);
    if (error->nvrtc_version == 0 || !strstr(error->message, nvrtc) ||
        !strstr(error->message, card)) {
        fail(at, what, error->message);
    }
    at->refused = 1;
}

static void compile(kmla_gpu* gpu, cell* at, const kmla_plan* plan, const kmla_device* device,
                    const char* what, int expected) {
    kmla_log log;
    kmla_image image;
    kmla_error error;
    int before = at->kernels;
    kmla_status status;
    log.write = count_kernels;
    log.user = at;
    status = kmla_gpu_compile(gpu, plan, device, &log, &image, &error);
    if (status == KMLA_ERROR_ARCHITECTURE) {
        check_refusal(at, what, &error);
    } else if (status != KMLA_OK) {
        fail(at, what, error.message);
    } else {
        kmla_image_free(&image);
        if (at->kernels - before != expected) {
            fail(at, what, "the log does not name every kernel");
        }
    }
}

static void compile_reader(kmla_gpu* gpu, cell* at, const kmla_device* device, int32_t reader,
                           int32_t kv_format, int32_t tile) {
    static const char* const formats[] = {"packed", "e4m3", "bf16"};
    kmla_shape shape;
    kmla_plan plan;
    kmla_error error;
    char what[64];
    memset(&shape, 0, sizeof shape);
    shape.requests = 1;
    shape.rows_per_request = 4;
    shape.heads = 99;
    shape.capacity_tokens = 16384;
    shape.reader = reader;
    shape.kv_format = kv_format;
    shape.tile = tile;
    snprintf(what, sizeof what, "%s, tile %d", formats[kv_format], (int)tile);
    if (kmla_plan_decode(&shape, device, &plan, &error) != KMLA_OK) {
        fail(at, what, error.message);
        return;
    }
    compile(gpu, at, &plan, device, what, 1);
}

static void compile_all(kmla_gpu* gpu, cell* at) {
    // The portable reader has the first three.
    static const int32_t tiles[] = {8, 16, 32, 24, 40, 48, 56};
    int hopper = strcmp(at->architecture, "90a") == 0;
    int32_t reader = hopper ? KMLA_READER_HOPPER : KMLA_READER_PORTABLE;
    const card_facts* facts = card_of_architecture(atoi(at->architecture));
    kmla_device device;
    int32_t kv_format;
    int i;
    if (!facts) {
        fail(at, "cards.h", "does not list this card");
        return;
    }
    device = card_device(facts);
    if (!hopper) { // the support kernels are one image for both readers
        compile(gpu, at, NULL, &device, "merge, combine, writers", 4);
    }
    for (kv_format = KMLA_KV_PACKED; kv_format <= (hopper ? KMLA_KV_E4M3 : KMLA_KV_BF16);
         ++kv_format) {
        for (i = 0; i < (hopper ? 7 : 3) && !at->refused; ++i) {
            compile_reader(gpu, at, &device, reader, kv_format, tiles[i]);
        }
    }
}

static void print_cell(const cell* at) {
    char text[32];
    snprintf(text, sizeof text, "%d/%d", at->kernels, at->spills);
    printf(" %8s", at->failures ? "FAILED" : at->refused ? "refused" : text);
    fflush(stdout);
}

// An NVRTC whose second library is not beside it does not open, and says so, unless the loader has
// that library elsewhere.
static int check_alone(const char* path) {
    kmla_gpu_desc desc;
    kmla_gpu* gpu;
    kmla_error error;
    memset(&desc, 0, sizeof desc);
    desc.without_cuda = 1;
    desc.nvrtc_path = path;
    if (kmla_gpu_open(&desc, &gpu, &error) == KMLA_OK) {
        fprintf(stderr, "%s finds its builtins in the loader's search path\n", path);
        kmla_gpu_close(gpu);
        return 0;
    }
    if (error.status == KMLA_ERROR_LIBRARY && strstr(error.message, "libnvrtc-builtins")) {
        fprintf(stderr, "%s does not open, as it should: %s\n", path, error.message);
        return 0;
    }
    fprintf(stderr, "FAILED: %s without its builtins: %s\n", path, error.message);
    return 1;
}

int main(int argc, char** argv) {
    kmla_gpu_desc desc;
    kmla_gpu* gpu;
    kmla_error error;
    int failures = 0, i;
    if (argc > 2 && strcmp(argv[1], "--heading") == 0) {
        printf("%-8s", "NVRTC");
        for (i = 2; i < argc; ++i) {
            char name[32];
            snprintf(name, sizeof name, "sm_%s", argv[i]);
            printf(" %8s", name);
        }
        printf("\n");
        return 0;
    }
    if (argc == 3 && strcmp(argv[1], "--alone") == 0) {
        return check_alone(argv[2]);
    }
    if (argc < 4) {
        fprintf(stderr, "usage: matrix NAME NVRTC_PATH ARCHITECTURE...\n");
        return 2;
    }
    memset(&desc, 0, sizeof desc);
    desc.without_cuda = 1;
    desc.nvrtc_path = argv[2];
    if (kmla_gpu_open(&desc, &gpu, &error) != KMLA_OK) {
        fprintf(stderr, "matrix: %s\n", error.message);
        return 1;
    }
    printf("%-8s", argv[1]);
    for (i = 3; i < argc; ++i) {
        cell at;
        memset(&at, 0, sizeof at);
        at.architecture = argv[i];
        compile_all(gpu, &at);
        if (at.spills != 0) {
            fprintf(stderr, "sm_%s: a kernel spills registers\n", at.architecture);
        }
        print_cell(&at);
        failures += at.failures != 0 || at.spills != 0;
    }
    printf("\n");
    kmla_gpu_close(gpu);
    return failures != 0;
}
