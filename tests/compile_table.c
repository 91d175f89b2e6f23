// Compiles every kernel for real architectures and prints what ptxas says of each, one a row. Needs
// NVRTC and no GPU. Fails if a kernel does not compile, spills, has its wgmmas serialised, or asks
// for more registers or shared memory than as many blocks as planned may.
//
//     compile_table [--nvrtc PATH]                    says which NVRTC, and the table's heading
//     compile_table [--nvrtc PATH] ARCHITECTURE...    its rows, e.g. compile_table 80 90 120
//
// Architectures that this NVRTC does not know are said to be skipped.

#define KIMI_MLA_IMPLEMENTATION
#include "../kimi_mla.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define REGISTERS_SM 65536
#define BLOCK_RESERVED_BYTES 1024 // of shared memory, by CUDA

static int failures;

static void fail(const char* what, const char* detail) {
    fprintf(stderr, "compile_table: %s: %s\n", what, detail);
    ++failures;
}

// What one variant is called in the table.
typedef struct variant {
    int architecture; // major * 10 + minor
    const char* kv;   // "-" for support kernels
    const char* suffix; // of the architecture: "a" for the Hopper reader
    int tile;
    int dynamic_shared;
    int threads, resident;
    int rows_expected, rows_printed;
} variant;

static kmla_device card(int architecture) {
    const int small = architecture % 10 != 0 || architecture >= 120; // 8.6, 8.9 and the 12s
    kmla_device device;
    memset(&device, 0, sizeof device);
    device.compute_major = architecture / 10;
    device.compute_minor = architecture % 10;
    device.multiprocessors = 132;
    device.shared_bytes_sm = small ? 102400 : architecture == 80 ? 167936 : 233472;
    device.shared_bytes = device.shared_bytes_sm - BLOCK_RESERVED_BYTES;
    return device;
}

// What ptxas says when it serialises wgmmas or ignores a setmaxnreg: C7508, C7510 and their like.
static void check_advice(const char* log) {
    const char* found = strstr(log, "Potential Performance Loss");
    if (found) {
        char line[256];
        snprintf(line, sizeof line, "%.*s", (int)strcspn(found, "\n"), found);
        fail("slow code", line);
    }
}

static void check_kernel(const variant* v, const char* name, int registers, int spills,
                         int shared) {
    kmla_device device = card(v->architecture);
    if (spills != 0) {
        fail(name, "spills registers");
    }
    if (shared > device.shared_bytes ||
        v->resident * (shared + BLOCK_RESERVED_BYTES) > device.shared_bytes_sm) {
        fail(name, "needs more shared memory than the card has for so many blocks");
    }
    if (v->resident * v->threads * registers > REGISTERS_SM) {
        fail(name, "needs more registers than the card has for so many blocks");
    }
}

// ptxas writes three lines for a kernel, in this order.
static void print_kernels(void* user, const char* log) {
    variant* v = (variant*)user;
    const char* entry = log;
    check_advice(log);
    while ((entry = strstr(entry, "Compiling entry function '")) != NULL) {
        char name[64];
        int stack, stores, loads, registers, shared;
        const char* frame = strstr(entry, "bytes stack frame");
        const char* used = strstr(entry, ": Used ");
        const char* line_end;
        if (!frame || !used || sscanf(entry, "Compiling entry function '%63[^']", name) != 1) {
            fail("cannot read ptxas's log", entry);
            return;
        }
        while (frame > entry && frame[-1] != '\n') {
            --frame;
        }
        frame += strcspn(frame, "0123456789");
        if (sscanf(frame, "%d bytes stack frame, %d bytes spill stores, %d bytes spill loads",
                   &stack, &stores, &loads) != 3 ||
            sscanf(used, ": Used %d registers", &registers) != 1) {
            fail("cannot read ptxas's log", entry);
            return;
        }
        // Static shared memory is named only if there is some: "..., 1024 bytes smem".
        line_end = strchr(used, '\n');
        shared = 0;
        if (strstr(used, " bytes smem") && strstr(used, " bytes smem") < line_end) {
            const char* at = strstr(used, " bytes smem");
            while (at > used && at[-1] != ' ') {
                --at;
            }
            shared = atoi(at);
        }
        shared += v->dynamic_shared;
        printf("sm_%d%-*s %-17s %-7s %5d %6d %10d %7d %7d %7d\n", v->architecture,
               v->architecture < 100 ? 2 : 1, v->suffix, name, v->kv, v->tile, v->resident,
               registers, stores + loads, shared, stack);
        check_kernel(v, name, registers, stores + loads, shared);
        ++v->rows_printed;
        entry = line_end ? line_end : used;
    }
}

static kmla_status compile(kmla_gpu* gpu, const kmla_plan* plan, variant* v) {
    kmla_device device = card(v->architecture);
    kmla_log log;
    kmla_image image;
    kmla_error error;
    kmla_status status;
    log.write = print_kernels;
    log.user = v;
    status = kmla_gpu_compile(gpu, plan, &device, &log, &image, &error);
    if (status == KMLA_ERROR_ARCHITECTURE) {
        return status;
    }
    if (status != KMLA_OK) {
        fail(kmla_status_name(status), error.message);
        return status;
    }
    if (image.bytes < KMLA_I_IMAGE_HEAD_BYTES + 4 ||
        memcmp((const char*)image.data + KMLA_I_IMAGE_HEAD_BYTES, "\177ELF", 4) != 0) {
        fail("an image is not a cubin", v->kv);
    }
    if (v->rows_printed != v->rows_expected) {
        fail("the log does not name every kernel", v->kv);
    }
    kmla_image_free(&image);
    fflush(stdout);
    return KMLA_OK;
}

static kmla_status compile_support(kmla_gpu* gpu, int architecture) {
    variant v;
    v.architecture = architecture;
    v.kv = "-";
    v.suffix = "";
    v.tile = 0;
    v.dynamic_shared = 0;
    v.threads = KMLA_I_SUPPORT_THREADS;
    v.resident = 1;
    v.rows_expected = 4; // merge, combine, write_kv, write_query
    v.rows_printed = 0;
    return compile(gpu, NULL, &v);
}

static void compile_reader(kmla_gpu* gpu, int architecture, int32_t reader, int32_t kv_format,
                           int32_t tile) {
    static const char* const kv_names[] = {"packed", "e4m3", "bf16"};
    kmla_device device = card(architecture);
    kmla_shape shape;
    kmla_plan plan;
    kmla_error error;
    variant v;
    memset(&shape, 0, sizeof shape);
    shape.requests = 1;
    shape.rows_per_request = 4;
    shape.heads = 99;
    shape.capacity_tokens = 16384;
    shape.reader = reader;
    shape.kv_format = kv_format;
    shape.tile = tile;
    if (kmla_plan_decode(&shape, &device, &plan, &error) != KMLA_OK) {
        fail(kv_names[kv_format], error.message);
        return;
    }
    v.architecture = architecture;
    v.kv = kv_names[kv_format];
    v.suffix = reader == KMLA_READER_HOPPER ? "a" : "";
    v.tile = tile;
    v.dynamic_shared = plan.shared_bytes;
    v.threads = plan.threads;
    v.resident = plan.resident;
    v.rows_expected = 1;
    v.rows_printed = 0;
    compile(gpu, &plan, &v);
}

// An architecture that does not exist is refused with the version and path of the NVRTC found.
static void print_heading(kmla_gpu* gpu) {
    kmla_device nothing = card(0);
    kmla_image image;
    kmla_error error;
    if (kmla_gpu_compile(gpu, NULL, &nothing, NULL, &image, &error) != KMLA_ERROR_ARCHITECTURE) {
        fail(kmla_status_name(error.status), error.message);
        return;
    }
    printf("NVRTC %d.%d (%s)\n", (int)error.nvrtc_version / 1000,
           (int)error.nvrtc_version % 1000 / 10, error.library);
    printf("%-6s %-17s %-7s %5s %6s %10s %7s %7s %7s\n", "card", "kernel", "kv", "tile", "blocks",
           "registers", "spills", "shared", "stack");
}

static void compile_readers(kmla_gpu* gpu, int architecture) {
    static const int32_t portable_tiles[] = {8, 16, 32};
    static const int32_t hopper_tiles[] = {8, 16, 24, 32, 40, 48, 56};
    int32_t kv_format;
    int i;
    for (kv_format = KMLA_KV_PACKED; kv_format <= KMLA_KV_BF16; ++kv_format) {
        for (i = 0; i < 3; ++i) {
            compile_reader(gpu, architecture, KMLA_READER_PORTABLE, kv_format, portable_tiles[i]);
        }
    }
    for (kv_format = KMLA_KV_PACKED; architecture == 90 && kv_format <= KMLA_KV_E4M3; ++kv_format) {
        for (i = 0; i < 7; ++i) {
            compile_reader(gpu, architecture, KMLA_READER_HOPPER, kv_format, hopper_tiles[i]);
        }
    }
}

int main(int argc, char** argv) {
    kmla_gpu_desc desc;
    kmla_gpu* gpu;
    kmla_error error;
    int argument = 1;
    memset(&desc, 0, sizeof desc);
    desc.without_cuda = 1;
    if (argc > 2 && strcmp(argv[1], "--nvrtc") == 0) {
        desc.nvrtc_path = argv[2];
        argument = 3;
    }
    if (kmla_gpu_open(&desc, &gpu, &error) != KMLA_OK) {
        fail(kmla_status_name(error.status), error.message);
        return 1;
    }
    if (argument == argc) {
        print_heading(gpu);
    }
    for (; argument < argc; ++argument) {
        int architecture = atoi(argv[argument]);
        if (compile_support(gpu, architecture) == KMLA_ERROR_ARCHITECTURE) {
            printf("sm_%-4d skipped: this NVRTC does not know it\n", architecture);
            continue;
        }
        compile_readers(gpu, architecture);
    }
    kmla_gpu_close(gpu);
    return failures != 0;
}
