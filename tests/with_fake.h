// For cmocka tests of the GPU side with the fake libraries: opens them, sets what they answer, and
// makes cards, plans and arguments. Include it after kimi_mla.h's implementation.

#ifndef WITH_FAKE_H
#define WITH_FAKE_H

#include "fake_libraries.h"

#define FAKE_PATH "build/libfake.so"
#define assert_contains(text, part)                                                                \
    do {                                                                                           \
        if (!strstr(text, part)) {                                                                 \
            print_error("\"%s\" does not contain \"%s\"\n", text, part);                           \
        }                                                                                          \
        assert_non_null(strstr(text, part));                                                       \
    } while (0)

static fake_state* fake;
static fake_context context_a, context_b;

// An H200 with driver 12.4 and NVRTC 12.1, context_a current. Every test begins so.
static int reset_fake(void** state) {
    static const int architectures[] = {80, 86, 89, 90};
    static const fake_device h200 = {9, 0, 232448, 132};
    static const fake_context a = {0, 7, 0, 0}, b = {0, 8, 0, 0};
    (void)state;
    if (!fake) {
        void* library = dlopen(FAKE_PATH, RTLD_NOW);
        fake = library ? (fake_state*)dlsym(library, "fake") : NULL;
        if (!fake) {
            print_error("%s: %s\n", FAKE_PATH, dlerror());
            return 1;
        }
    }
    memset(fake, 0, sizeof *fake);
    context_a = a;
    context_b = b;
    fake->context = &context_a;
    fake->devices[0] = h200;
    fake->devices[1] = h200;
    fake->driver_version = 12040;
    fake->nvrtc_major = 12;
    memcpy(fake->architectures, architectures, sizeof architectures);
    fake->architecture_count = 4;
    fake->log = "";
    return 0;
}

static inline kmla_gpu_desc fake_desc(void) {
    kmla_gpu_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.cuda_path = FAKE_PATH;
    desc.nvrtc_path = FAKE_PATH;
    return desc;
}

static inline kmla_gpu* open_fake(void) {
    kmla_gpu_desc desc = fake_desc();
    kmla_gpu* gpu = NULL;
    kmla_error error;
    if (kmla_gpu_open(&desc, &gpu, &error) != KMLA_OK) {
        fail_msg("%s", error.message);
    }
    return gpu;
}

static inline kmla_device card(int32_t major, int32_t minor) {
    kmla_device device = {0, 0, 132, 232448, 233472};
    device.compute_major = major;
    device.compute_minor = minor;
    return device;
}

// Of few heads by the small tile, of many by a large one: two variants of the reader.
static inline kmla_plan plan_on(kmla_device device, int32_t heads, int32_t splits) {
    kmla_shape shape;
    kmla_plan plan;
    kmla_error error;
    memset(&shape, 0, sizeof shape);
    shape.requests = 2;
    shape.rows_per_request = 3;
    shape.heads = heads;
    shape.capacity_tokens = 1000;
    shape.splits = splits;
    shape.tile = heads > 8 ? 32 : 8;
    if (kmla_plan_decode(&shape, &device, &plan, &error) != KMLA_OK) {
        fail_msg("%s", error.message);
    }
    return plan;
}

static inline kmla_plan plan_for(int32_t heads, int32_t splits) {
    return plan_on(card(9, 0), heads, splits);
}

// Arguments that pass the checks. Nothing is at their addresses unless a test puts it there.
static inline kmla_decode decode_args(const kmla_plan* plan) {
    kmla_decode args;
    memset(&args, 0, sizeof args);
    args.query = 0x10000000;
    args.scale = 0.0721688f;
    args.kv = 0x20000000;
    args.kv_pages = 40;
    args.block_table = 0x30000000;
    args.block_table_width = 16;
    args.lengths = 0x40000000;
    args.out = 0x50000000;
    args.lse = 0x60000000;
    args.workspace = 0x70000000;
    args.workspace_bytes = plan->workspace_bytes;
    return args;
}

#endif // WITH_FAKE_H
