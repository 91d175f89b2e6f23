// cost.c - what kimi_mla.h costs the host: opening, compiling, loading, one launch, memory.
//
//     make -C tools cost
//
// Needs a GPU, its driver and NVRTC. Every figure is of one process: open and compile are timed
// once, as they happen once; launches are timed in bursts of 100, which no queue holds up, with a
// wait for the GPU between bursts that is not timed.

#define KIMI_MLA_IMPLEMENTATION
#include "../kimi_mla.h"

#include "../examples/driver.h"

#include <time.h>

enum { BURSTS = 201, HEADS = 99, TOKENS = 256 };

static int bursts = BURSTS, burst_calls = 100; // an emulator's are fewer

static driver cuda;
static kmla_error error;

static void must(kmla_status status) {
    if (status != KMLA_OK) {
        fprintf(stderr, "%s: %s\n", kmla_status_name(status), error.message);
        exit(1);
    }
}

static double now_us(void) {
    struct timespec time;
    timespec_get(&time, TIME_UTC);
    return 1e6 * (double)time.tv_sec + 1e-3 * (double)time.tv_nsec;
}

static double median(double* values, int count) {
    for (int i = 1; i < count; i++) { // insertion sort
        double value = values[i];
        int at = i;
        for (; at > 0 && values[at - 1] > value; at--) {
            values[at] = values[at - 1];
        }
        values[at] = value;
    }
    return values[count / 2];
}

// ---- memory

static long resident_kib(void) { // of this process, 0 if the system does not say
    FILE* file = fopen("/proc/self/status", "r");
    char line[256];
    long kib = 0;
    while (file && fgets(line, sizeof line, file)) {
        if (strncmp(line, "VmRSS:", 6) == 0) {
            kib = strtol(line + 6, NULL, 10);
        }
    }
    if (file) {
        fclose(file);
    }
    return kib;
}

static double free_device_mib(void) { // 0 if the driver does not say
    int (*info)(size_t*, size_t*) = NULL;
    size_t left = 0, total = 0;
    if (driver_find(cuda.library, "cuMemGetInfo_v2", &info)) {
        driver_must(&cuda, info(&left, &total), "cuMemGetInfo");
    }
    return (double)left / (1 << 20);
}

// ---- a decode that takes the GPU next to no time

typedef struct work {
    kmla_plan plan;
    kmla_decode args;
    struct kmla_i_reader_args reader_args; // what kmla_gpu_decode makes of them
    struct kmla_i_combine_args merge_args;
    void* stream;
} work;

static uint64_t zeros(size_t bytes) {
    uint64_t address = driver_alloc(&cuda, bytes);
    driver_must(&cuda, cuda.memory_set(address, 0, bytes), "cuMemsetD8");
    return address;
}

static work make_work(const kmla_device* card, int32_t splits, void* stream) {
    work w;
    kmla_shape shape;
    kmla_decode dense;
    int32_t table[TOKENS / 64], lengths[1] = {TOKENS};
    memset(&w, 0, sizeof w);
    memset(&shape, 0, sizeof shape);
    shape.requests = 1;
    shape.heads = HEADS;
    shape.capacity_tokens = TOKENS;
    shape.splits = splits;
    must(kmla_plan_decode(&shape, card, &w.plan, &error));
    for (int i = 0; i < TOKENS / 64; i++) {
        table[i] = i;
    }
    w.stream = stream;
    w.args.query = zeros(HEADS * KMLA_BF16_BYTES);
    w.args.scale = 0.07216878f;
    w.args.kv = zeros(TOKENS * KMLA_PACKED_BYTES);
    w.args.kv_pages = TOKENS / 64;
    w.args.block_table = zeros(sizeof table);
    w.args.block_table_width = TOKENS / 64;
    w.args.lengths = zeros(sizeof lengths);
    w.args.out = zeros(HEADS * KMLA_LATENT_DIMS * 2);
    w.args.lse = zeros(HEADS * 4);
    w.args.workspace = zeros((size_t)w.plan.workspace_bytes + 16);
    w.args.workspace_bytes = w.plan.workspace_bytes;
    dense = kmla_i_dense_decode(&w.plan, &w.args);
    kmla_i_reader_launch_args(&w.plan, &dense, &w.reader_args);
    kmla_i_merge_launch_args(&w.plan, &dense, &w.merge_args);
    driver_upload(&cuda, w.args.block_table, table, sizeof table);
    driver_upload(&cuda, w.args.lengths, lengths, sizeof lengths);
    driver_must(&cuda, cuda.context_synchronize(), "cuCtxSynchronize");
    return w;
}

// ---- time of one launch

typedef void (*call)(kmla_gpu* gpu, const work* w);

static void call_decode(kmla_gpu* gpu, const work* w) {
    must(kmla_gpu_decode(gpu, &w->plan, &w->args, w->stream, &error));
}

static void call_checks(kmla_gpu* gpu, const work* w) {
    (void)gpu;
    must(kmla_check_decode(&w->plan, &w->args, &error));
}

// What kmla_gpu_decode's launches would be if nothing were checked and no argument were computed.
static void call_driver(kmla_gpu* gpu, const work* w) {
    const kmla_plan* plan = &w->plan;
    const kmla_i_reader* reader = kmla_i_find_reader(gpu, kmla_plan_variant(plan));
    const kmla_i_launch_shape read = kmla_i_reader_launch_shape(plan);
    const kmla_i_launch_shape merge = kmla_i_merge_launch_shape(plan);
    must(kmla_i_launch(gpu, reader->function, &read, (void*)&w->reader_args, w->stream, &error));
    if (plan->splits > 1) {
        must(kmla_i_launch(gpu, gpu->support.merge, &merge, (void*)&w->merge_args, w->stream,
                           &error));
    }
}

static double time_call(call run, kmla_gpu* gpu, const work* w) {
    double times[BURSTS];
    for (int burst = -3; burst < bursts; burst++) { // three to warm up
        double begin = now_us();
        for (int i = 0; i < burst_calls; i++) {
            run(gpu, w);
        }
        if (burst >= 0) {
            times[burst] = (now_us() - begin) / burst_calls;
        }
        driver_must(&cuda, cuda.stream_synchronize(w->stream), "cuStreamSynchronize");
    }
    return median(times, bursts);
}

// ---- what happens once

static kmla_gpu* open_object(const char* library, const kmla_cache* cache) {
    kmla_gpu_desc desc;
    kmla_gpu* gpu;
    memset(&desc, 0, sizeof desc);
    desc.cuda_handle = cuda.library;
    desc.nvrtc_path = library;
    if (cache) {
        desc.cache = *cache;
    }
    must(kmla_gpu_open(&desc, &gpu, &error));
    return gpu;
}

static double begun_us;
static long begun_kib;

static void begin(void) {
    begun_kib = resident_kib();
    begun_us = now_us();
}

static void end(const char* what, long bytes) {
    double ms = (now_us() - begun_us) / 1e3;
    printf("  %-46s %10.2f ms %8.1f MiB", what, ms, (double)(resident_kib() - begun_kib) / 1024);
    if (bytes) {
        printf("   image of %ld bytes", bytes);
    }
    printf("\n");
    fflush(stdout);
}

static void compile(kmla_gpu* gpu, const kmla_plan* plan, const kmla_device* card, const char* what,
                    kmla_image* image) {
    begin();
    must(kmla_gpu_compile(gpu, plan, card, NULL, image, &error));
    end(what, (long)image->bytes);
}

// Opening, compiling and loading: the object that launches are timed with.
static kmla_gpu* measure_start(const char* library, const char* directory, kmla_device* card,
                               void* stream) {
    kmla_image reader, support;
    kmla_cache cache;
    kmla_gpu* gpu;
    double left;
    work w;
    printf("once                                                        time   host memory\n");
    begin();
    gpu = open_object(library, NULL);
    end("open: finds the libraries, tries NVRTC", 0);
    must(kmla_gpu_device(gpu, card, &error));
    w = make_work(card, 1, stream);
    compile(gpu, &w.plan, card, "compile, a reader", &reader);
    compile(gpu, NULL, card, "compile, writers, merge and combine", &support);
    left = free_device_mib();
    begin();
    must(kmla_gpu_prepare(gpu, NULL, &support, &error));
    must(kmla_gpu_prepare(gpu, &w.plan, &reader, &error));
    end("prepare with both images", 0);
    printf("  prepare took %.1f MiB on the card; an object has %lu bytes\n",
           left - free_device_mib(), (unsigned long)sizeof *gpu);
    kmla_image_free(&reader);
    kmla_image_free(&support);
    kmla_gpu_close(gpu);

    must(kmla_cache_files(directory, &cache, &error));
    for (int warm = 0; warm < 2; warm++) {
        gpu = open_object(library, &cache);
        begin();
        must(kmla_gpu_prepare(gpu, &w.plan, NULL, &error));
        end(warm ? "prepare, warm cache: both images from files"
                 : "prepare, cold cache: compiles both, writes files", 0);
        if (!warm) {
            kmla_gpu_close(gpu);
        }
    }
    return gpu;
}

static void print_call(const char* what, call run, kmla_gpu* gpu, const work* w) {
    printf("  %-46s %10.2f us\n", what, time_call(run, gpu, w));
}

static void measure_launches(kmla_gpu* gpu, const kmla_device* card, void* stream) {
    work one = make_work(card, 1, stream), four = make_work(card, 4, stream);
    must(kmla_gpu_prepare(gpu, &four.plan, NULL, &error));
    printf("\neach time                                               host time\n");
    print_call("decode, one split: the reader alone", call_decode, gpu, &one);
    print_call("  the driver's launch alone", call_driver, gpu, &one);
    print_call("decode, four splits: reader and merge", call_decode, gpu, &four);
    print_call("  the driver's two launches alone", call_driver, gpu, &four);
    print_call("kmla_check_decode alone", call_checks, gpu, &four);
}

int main(int count, char** words) {
    const char* directory = count > 1 ? words[1] : NULL;
    const char* library = count > 2 ? words[2] : NULL; // libcuda and NVRTC in one, of an emulator
    const char* why = "";
    kmla_device card;
    kmla_gpu* gpu;
    void* stream;
    if (!directory) {
        fprintf(stderr, "usage: cost EMPTY_DIRECTORY [LIBRARY]\n");
        return 1;
    }
    if (!driver_open(&cuda, library, &why)) {
        fprintf(stderr, "cost needs a GPU: %s\n", why);
        return 1;
    }
    driver_must(&cuda, cuda.stream_create(&stream, DRIVER_STREAM_NON_BLOCKING), "cuStreamCreate");
    printf("%s, CUDA %d.%d of the driver, kimi_mla.h %d.%d.%d\n\n", cuda.card, cuda.version / 1000,
           cuda.version % 1000 / 10, KMLA_VERSION_MAJOR, KMLA_VERSION_MINOR, KMLA_VERSION_PATCH);
    gpu = measure_start(library, directory, &card, stream);
    printf("  NVRTC %d.%d, %s\n", (int)gpu->nvrtc.release / 1000,
           (int)gpu->nvrtc.release % 1000 / 10, gpu->nvrtc.library);
    if (library) {
        bursts = burst_calls = 1;
    }
    measure_launches(gpu, &card, stream);
    kmla_gpu_close(gpu);
    return 0;
}
