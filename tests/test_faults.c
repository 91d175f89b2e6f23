// Every call that the header makes of libcuda and NVRTC fails once with every result, and every
// allocation fails once. Each time: the right error, outputs untouched, nothing leaked, and the
// same call succeeds when the fault is gone.

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdlib.h>

static void* counted_malloc(size_t bytes);
static void counted_free(void* memory);

#define KMLA_MALLOC(bytes) counted_malloc(bytes)
#define KMLA_FREE(pointer) counted_free(pointer)
#define KIMI_MLA_IMPLEMENTATION
#include "../kimi_mla.h"

#include "with_fake.h"

static int allocations, failing_allocation, alive;

static void* counted_malloc(size_t bytes) {
    if (++allocations == failing_allocation) {
        return NULL;
    }
    ++alive;
    return malloc(bytes);
}

static void counted_free(void* memory) {
    alive -= memory != NULL;
    free(memory);
}

// =============================================================================
// The life of an object, step by step
// =============================================================================

#define UNTOUCHED 0x5A

static kmla_gpu* gpu;
static kmla_error error;
static int32_t table[2 * 16], lengths[6];
static unsigned char out[6 * 99 * 512 * 2]; // where the checking decode's outputs are

static int is_untouched(const void* data, size_t bytes) {
    size_t i;
    for (i = 0; i < bytes && ((const unsigned char*)data)[i] == UNTOUCHED; ++i) {
    }
    return i == bytes;
}

// Fails the test if a failing step wrote to what it would have filled.
static void expect_untouched(kmla_status status, const void* output, size_t bytes) {
    if (status != KMLA_OK && !is_untouched(output, bytes)) {
        fail_msg("%s: an output was written", error.message);
    }
}

static kmla_status step_open(void) {
    kmla_gpu_desc desc = fake_desc();
    kmla_gpu* opened;
    kmla_status status;
    memset(&opened, UNTOUCHED, sizeof opened);
    status = kmla_gpu_open(&desc, &opened, &error);
    expect_untouched(status, &opened, sizeof opened);
    gpu = status == KMLA_OK ? opened : NULL;
    return status;
}

static kmla_status step_device(void) {
    kmla_device device;
    kmla_status status;
    memset(&device, UNTOUCHED, sizeof device);
    status = kmla_gpu_device(gpu, &device, &error);
    expect_untouched(status, &device, sizeof device);
    return status;
}

static kmla_status compile(const kmla_plan* plan) {
    kmla_device device = card(9, 0);
    kmla_image image;
    kmla_status status;
    memset(&image, UNTOUCHED, sizeof image);
    status = kmla_gpu_compile(gpu, plan, &device, NULL, &image, &error);
    expect_untouched(status, &image, sizeof image);
    if (status == KMLA_OK) {
        kmla_image_free(&image);
    }
    return status;
}

static kmla_status step_compile_support(void) { return compile(NULL); }

static kmla_status step_compile_plan(void) {
    kmla_plan plan = plan_for(99, 4);
    return compile(&plan);
}

static kmla_status step_prepare_support(void) { return kmla_gpu_prepare(gpu, NULL, NULL, &error); }

static kmla_status step_prepare_plan(void) {
    kmla_plan plan = plan_for(99, 4);
    kmla_decode args = decode_args(&plan);
    kmla_error ignored;
    kmla_status status = kmla_gpu_prepare(gpu, &plan, NULL, &error);
    if (status != KMLA_OK) { // half a preparation is none
        fake->failing_number = 0;
        assert_int_equal(kmla_gpu_decode(gpu, &plan, &args, NULL, &ignored),
                         KMLA_ERROR_NOT_PREPARED);
    }
    return status;
}

static kmla_status step_decode(void) {
    kmla_plan plan = plan_for(99, 4);
    kmla_decode args = decode_args(&plan);
    return kmla_gpu_decode(gpu, &plan, &args, NULL, &error);
}

static kmla_status step_checked_decode(void) {
    kmla_plan plan = plan_for(99, 4);
    kmla_decode args = decode_args(&plan);
    int launches = fake->launch_count;
    kmla_status status;
    args.block_table = (uint64_t)(uintptr_t)table;
    args.lengths = (uint64_t)(uintptr_t)lengths;
    args.out = (uint64_t)(uintptr_t)out;
    args.check_pages = 1;
    status = kmla_gpu_decode(gpu, &plan, &args, NULL, &error);
    if (status != KMLA_OK && strstr(error.message, "cuLaunch") == NULL) {
        assert_int_equal(fake->launch_count, launches);
    }
    expect_untouched(status, out, sizeof out);
    return status;
}

static kmla_status step_combine(void) {
    kmla_combine args;
    memset(&args, 0, sizeof args);
    args.parts = 9;
    args.rows = 4;
    args.heads = 11;
    args.part_out = 0x10000000;
    args.part_lse = 0x20000000;
    args.out = 0x30000000;
    return kmla_gpu_combine(gpu, &args, NULL, &error);
}

static kmla_status step_write_kv(void) {
    kmla_kv_write args;
    memset(&args, 0, sizeof args);
    args.tokens = 5;
    args.latent = 0x10000000;
    args.rope = 0x20000000;
    args.slots = 0x30000000;
    args.kv = 0x40000000;
    args.kv_pages = 3;
    return kmla_gpu_write_kv(gpu, &args, NULL, &error);
}

static kmla_status step_write_query(void) {
    kmla_query_write args;
    memset(&args, 0, sizeof args);
    args.rows = 3;
    args.heads = 3;
    args.query_format = KMLA_QUERY_PACKED;
    args.source = 0x10000000;
    args.query = 0x20000000;
    return kmla_gpu_write_query(gpu, &args, NULL, &error);
}

typedef struct step {
    const char* name;
    kmla_status (*run)(void);
} step;

static const step steps[] = {
    {"open", step_open},
    {"device", step_device},
    {"compile support", step_compile_support},
    {"compile plan", step_compile_plan},
    {"prepare support", step_prepare_support},
    {"prepare plan", step_prepare_plan},
    {"decode", step_decode},
    {"checked decode", step_checked_decode},
    {"combine", step_combine},
    {"write kv", step_write_kv},
    {"write query", step_write_query},
};
enum { STEPS = sizeof steps / sizeof steps[0] };

static void begin(void) {
    int i;
    reset_fake(NULL);
    fake->log = "a warning\n"; // so that the log is fetched
    for (i = 0; i < 6; ++i) {
        lengths[i] = 1000;
    }
    for (i = 0; i < 32; ++i) {
        table[i] = i;
    }
    memset(out, UNTOUCHED, sizeof out);
    allocations = failing_allocation = 0;
    gpu = NULL;
}

static void succeed(const step* s) {
    if (s->run() != KMLA_OK) {
        fail_msg("%s without a fault: %s", s->name, error.message);
    }
}

static void run_clean(int from, int to) {
    for (; from < to; ++from) {
        succeed(&steps[from]);
    }
}

static void expect_nothing_left(void) {
    assert_int_equal(fake->modules_loaded, fake->modules_unloaded);
    assert_int_equal(fake->programs_alive, 0);
    assert_int_equal(alive, 0);
}

static void end(void) {
    kmla_gpu_close(gpu);
    expect_nothing_left();
}

// =============================================================================
// Calls that fail
// =============================================================================

static const int cuda_results[] = {1, 2, 3, 4, 34, 101, 200, 201, 209, 400, 500, 700, 719, 801,
                                   900, 901, 906, 999};
static const int nvrtc_results[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};

static int is_of_nvrtc(const char* call) { return strncmp(call, "nvrtc", 5) == 0; }

// What a failing call makes of its step; KMLA_OK: the object does without what the call says.
static kmla_status right_status(const step* s, const char* call, int result) {
    int is_open = s->run == step_open;
    if (strcmp(call, "cuDriverGetVersion") == 0 || strcmp(call, "cuCtxGetDevResource") == 0 ||
        strcmp(call, "nvrtcDestroyProgram") == 0) {
        return KMLA_OK;
    }
    if (strcmp(call, "nvrtcCompileProgram") == 0) {
        return result == 7 ? KMLA_ERROR_LIBRARY : is_open ? KMLA_OK : KMLA_ERROR_COMPILE;
    }
    if (is_of_nvrtc(call)) {
        return is_open ? KMLA_ERROR_LIBRARY : KMLA_ERROR_COMPILE;
    }
    if (strcmp(call, "cuStreamIsCapturing") == 0 && result == 906) {
        return KMLA_ERROR_CAPTURE;
    }
    return strcmp(call, "cuInit") == 0 && result == 34 ? KMLA_ERROR_LIBRARY : KMLA_ERROR_CUDA;
}

static void check_error(const step* s, const char* call, int result, kmla_status status) {
    kmla_status wanted = right_status(s, call, result);
    char name[64];
    if (status != wanted) {
        fail_msg("%s, %s gives %d: %s, not %s", s->name, call, result, kmla_status_name(status),
                 kmla_status_name(wanted));
    }
    if (wanted == KMLA_OK) {
        return;
    }
    assert_int_equal(error.status, wanted);
    if (wanted == KMLA_ERROR_CUDA) {
        snprintf(name, sizeof name, "%s", call);
        if (strstr(name, "_v2")) { // the ABI's suffix is nobody's name for it
            *strstr(name, "_v2") = 0;
        }
        name[strcspn(name, "E")] = 0; // cuLaunchKernelEx
        assert_contains(error.message, name);
        assert_contains(error.message, "CUDA_ERROR_FAKE");
        assert_int_equal(error.cuda_result, result);
        assert_string_equal(error.library, FAKE_PATH);
    }
    if (is_of_nvrtc(call)) {
        assert_contains(error.message, call);
        assert_int_equal(error.nvrtc_result, result);
        assert_string_equal(error.library, FAKE_PATH);
    }
}

// The calls that a step makes if nothing fails.
typedef struct call_list {
    const char* names[FAKE_MAX_CALLS];
    int count;
} call_list;

static call_list calls_of(int number) {
    call_list list;
    int before, i;
    begin();
    run_clean(0, number);
    before = fake->call_count;
    succeed(&steps[number]);
    list.count = fake->call_count - before;
    assert_in_range(list.count, 1, FAKE_MAX_CALLS);
    for (i = 0; i < list.count; ++i) {
        list.names[i] = fake->calls[(before + i) % FAKE_MAX_CALLS];
    }
    run_clean(number + 1, STEPS);
    end();
    return list;
}

// One call of a step fails; then the step is repeated, and life goes on.
static void fail_call(int number, int call, const char* name, int result) {
    kmla_status status;
    begin();
    run_clean(0, number);
    fake->failing_number = fake->call_count + 1 + call;
    fake->failing_result = result;
    status = steps[number].run();
    fake->failing_number = 0;
    check_error(&steps[number], name, result, status);
    if (status != KMLA_OK) {
        succeed(&steps[number]);
    }
    run_clean(number + 1, STEPS);
    end();
}

static int quick; // one result a call

static void test_every_call(void** state) {
    int number, call, tries = 0, different = 0;
    size_t i;
    (void)state;
    for (number = 0; number < STEPS; ++number) {
        const call_list list = calls_of(number);
        different += list.count;
        for (call = 0; call < list.count; ++call) {
            int nvrtc = is_of_nvrtc(list.names[call]);
            const int* results = nvrtc ? nvrtc_results : cuda_results;
            size_t count = nvrtc ? sizeof nvrtc_results : sizeof cuda_results;
            for (i = 0; i < (quick ? 1 : count / sizeof(int)); ++i, ++tries) {
                fail_call(number, call, list.names[call], results[i]);
            }
        }
    }
    print_message("%d calls in %d steps, %d failures\n", different, (int)STEPS, tries);
}

// Each function of the two tables is called in that life, so that none is left out above.
static void test_every_function_is_called(void** state) {
    static const char* const elsewhere[] = {
        "cuGetErrorName", "cuGetErrorString", "nvrtcGetErrorString", // only of what failed
        "cuFuncGetAttribute",                                        // instead of cuFuncLoad
        "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuModuleUnload", // close
    };
    call_list lists[STEPS];
    int number, call, i;
    (void)state;
    for (number = 0; number < STEPS; ++number) {
        lists[number] = calls_of(number);
    }
#define EXPECT_CALLED(result, field, symbol, needed, parameters)                                   \
    {                                                                                              \
        int found = 0;                                                                             \
        for (number = 0; number < STEPS; ++number) {                                               \
            for (call = 0; call < lists[number].count; ++call) {                                   \
                found += strcmp(lists[number].names[call], symbol) == 0;                           \
            }                                                                                      \
        }                                                                                          \
        for (i = 0; i < KMLA_I_COUNT(elsewhere); ++i) {                                            \
            found += strcmp(elsewhere[i], symbol) == 0;                                            \
        }                                                                                          \
        if (!found) {                                                                              \
            fail_msg("no step calls %s", symbol);                                                  \
        }                                                                                          \
    }
    KMLA_I_CUDA_FUNCTIONS(EXPECT_CALLED)
    KMLA_I_NVRTC_FUNCTIONS(EXPECT_CALLED)
}

// The names of errors are themselves asked of the driver.
static void test_error_names_fail_too(void** state) {
    static const char* const calls[] = {"cuGetErrorName", "cuGetErrorString"};
    int i;
    (void)state;
    for (i = 0; i < 2; ++i) {
        begin();
        run_clean(0, 1);
        fake->context->dead = 1; // cuCtxGetDevice says INVALID_CONTEXT
        fake->failing_call = calls[i];
        fake->failing_result = 1;
        assert_int_equal(step_device(), KMLA_ERROR_CUDA);
        assert_contains(error.message, i == 0 ? "unknown error (201)" : "no description");
        fake->failing_call = NULL;
        fake->context->dead = 0;
        succeed(&steps[1]);
        end();
    }
}

// Drivers before 12.4 have no cuFuncLoad: a question about a function loads it.
static void test_older_driver(void** state) {
    (void)state;
    begin();
    run_clean(0, 1);
    gpu->cuda.function_load = NULL;
    fake->failing_call = "cuFuncGetAttribute";
    fake->failing_result = 2;
    assert_int_equal(step_prepare_support(), KMLA_ERROR_CUDA);
    check_error(&steps[4], "cuFuncGetAttribute", 2, KMLA_ERROR_CUDA);
    fake->failing_call = NULL;
    run_clean(1, STEPS); // the fake launches nothing that is not loaded
    assert_int_equal(fake->functions_loaded, 0);
    end();
}

// Close goes on whatever fails; modules that it may not touch go with their context.
static void test_close(void** state) {
    static const struct {
        const char* call;
        int unloads; // of the two modules
    } cases[] = {{"cuCtxPushCurrent_v2", 0},
                 {"cuCtxGetId", 0},
                 {"cuModuleUnload", 0},
                 {"cuCtxPopCurrent_v2", 2}};
    int(CUDA_CALL * set_current)(void*);
    void* symbol = dlsym(dlopen(FAKE_PATH, RTLD_NOW), "cuCtxSetCurrent");
    int i;
    (void)state;
    memcpy(&set_current, &symbol, sizeof symbol);
    for (i = 0; i < KMLA_I_COUNT(cases); ++i) {
        begin();
        set_current(&context_a);
        run_clean(0, STEPS);
        assert_int_equal(fake->modules_loaded, 2);
        fake->failing_call = cases[i].call;
        fake->failing_result = 201;
        kmla_gpu_close(gpu);
        assert_int_equal(fake->modules_unloaded, cases[i].unloads);
        assert_int_equal(alive, 0);
        set_current(&context_a); // what a failing cuCtxPopCurrent leaves behind
    }
}

// =============================================================================
// Allocations that fail
// =============================================================================

static int allocations_of(int number) {
    int count;
    begin();
    run_clean(0, number);
    count = allocations;
    succeed(&steps[number]);
    count = allocations - count;
    end();
    return count;
}

static void test_every_allocation(void** state) {
    int number, tries = 0;
    (void)state;
    for (number = 0; number < STEPS; ++number) {
        int count = allocations_of(number), i;
        for (i = 1; i <= count; ++i, ++tries) {
            begin();
            run_clean(0, number);
            failing_allocation = allocations + i;
            assert_int_equal(steps[number].run(), KMLA_ERROR_MEMORY);
            assert_contains(error.message, "no memory for");
            failing_allocation = 0;
            succeed(&steps[number]);
            run_clean(number + 1, STEPS);
            end();
        }
    }
    print_message("%d allocations failed\n", tries);
    assert_true(tries >= STEPS);
}

int main(int count, char** words) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_call),
        cmocka_unit_test(test_every_function_is_called),
        cmocka_unit_test(test_error_names_fail_too),
        cmocka_unit_test(test_older_driver),
        cmocka_unit_test(test_close),
        cmocka_unit_test(test_every_allocation),
    };
    quick = count > 1 && strcmp(words[1], "--quick") == 0;
    return cmocka_run_group_tests_name("faults of the driver and NVRTC", tests, NULL, NULL);
}
