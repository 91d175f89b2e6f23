// Contexts, devices, threads and processes, with a driver that is strict about them: a module is of
// use in its own context alone, a forked child has no driver, what is not resident cannot be
// launched. Built with the thread sanitizer, as objects are shared by threads here.

#define _GNU_SOURCE

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#define KIMI_MLA_IMPLEMENTATION
#include "../kimi_mla.h"

#include "with_fake.h"

static int (*set_current)(void*);
static int (*get_current)(void**);
static kmla_error error;

static int set_up(void** state) {
    void* library = dlopen(FAKE_PATH, RTLD_NOW);
    void* symbol = library ? dlsym(library, "cuCtxSetCurrent") : NULL;
    memcpy(&set_current, &symbol, sizeof symbol);
    symbol = library ? dlsym(library, "cuCtxGetCurrent") : NULL;
    memcpy(&get_current, &symbol, sizeof symbol);
    return !symbol || reset_fake(state) || set_current(&context_a);
}

static void must(kmla_status status) {
    if (status != KMLA_OK) {
        fail_msg("%s", error.message);
    }
}

static void expect_current(const fake_context* wanted) {
    void* current = NULL;
    get_current(&current);
    assert_ptr_equal(current, wanted);
}

// =============================================================================
// Contexts and devices
// =============================================================================

// Two objects, one in each context of one device, used in turn: RT-06.
static void test_two_contexts(void** state) {
    fake_context* contexts[2];
    kmla_gpu* gpus[2];
    kmla_plan plan = plan_for(99, 4);
    kmla_decode args = decode_args(&plan);
    int i;
    (void)state;
    contexts[0] = &context_a;
    contexts[1] = &context_b;
    for (i = 0; i < 2; ++i) {
        set_current(contexts[i]);
        gpus[i] = open_fake();
        must(kmla_gpu_prepare(gpus[i], &plan, NULL, &error));
        expect_current(contexts[i]);
    }
    for (i = 0; i < 6; ++i) {
        set_current(contexts[i % 2]);
        fake->launch_count = 0;
        must(kmla_gpu_decode(gpus[i % 2], &plan, &args, NULL, &error));
        assert_int_equal(fake->launch_count, 2);
        assert_ptr_equal(fake->launches[0].context, contexts[i % 2]);
        assert_int_equal(kmla_gpu_decode(gpus[1 - i % 2], &plan, &args, NULL, &error),
                         KMLA_ERROR_CONTEXT);
        assert_int_equal(kmla_gpu_prepare(gpus[1 - i % 2], &plan, NULL, &error),
                         KMLA_ERROR_CONTEXT);
        assert_int_equal(fake->launch_count, 2);
        expect_current(contexts[i % 2]);
    }
    kmla_gpu_close(gpus[0]); // the other's context is current, and stays so
    expect_current(&context_b);
    assert_int_equal(fake->modules_unloaded, 2);
    must(kmla_gpu_decode(gpus[1], &plan, &args, NULL, &error));
    set_current(NULL); // none at all
    kmla_gpu_close(gpus[1]);
    expect_current(NULL);
    assert_int_equal(fake->modules_unloaded, 4);
}

// Two cards of different kinds, planned, compiled and prepared each for itself.
static void test_two_devices(void** state) {
    kmla_gpu* gpus[2];
    kmla_plan plans[2];
    kmla_decode args;
    kmla_device devices[2];
    int i;
    (void)state;
    fake->devices[1].compute_major = 8;
    fake->devices[1].compute_minor = 6;
    fake->devices[1].multiprocessors = 84;
    fake->devices[1].shared_bytes = 101376;
    context_b.device = 1;
    for (i = 0; i < 2; ++i) {
        set_current(i ? &context_b : &context_a);
        gpus[i] = open_fake();
        must(kmla_gpu_device(gpus[i], &devices[i], &error));
        plans[i] = plan_on(devices[i], 99, 1);
        must(kmla_gpu_prepare(gpus[i], &plans[i], NULL, &error));
        assert_contains(fake->options, i ? "sm_86 " : "sm_90a ");
    }
    assert_int_equal(devices[0].multiprocessors, 132);
    assert_int_equal(devices[1].multiprocessors, 84);
    assert_int_equal(plans[0].reader, KMLA_READER_HOPPER);
    assert_int_equal(plans[1].reader, KMLA_READER_PORTABLE);
    for (i = 0; i < 4; ++i) {
        set_current(i % 2 ? &context_b : &context_a);
        args = decode_args(&plans[i % 2]);
        must(kmla_gpu_decode(gpus[i % 2], &plans[i % 2], &args, NULL, &error));
        args = decode_args(&plans[1 - i % 2]);
        assert_int_not_equal(kmla_gpu_decode(gpus[i % 2], &plans[1 - i % 2], &args, NULL, &error),
                             KMLA_OK);
    }
    assert_int_equal(fake->launch_count, 4);
    for (i = 0; i < 2; ++i) {
        kmla_gpu_close(gpus[i]);
    }
    assert_int_equal(fake->modules_unloaded, fake->modules_loaded);
}

// An object serves any number of plans in one context, and one context any number of objects.
static void test_two_objects_in_a_context(void** state) {
    kmla_gpu *one = open_fake(), *two = open_fake();
    kmla_plan plan = plan_for(99, 1);
    kmla_decode args = decode_args(&plan);
    (void)state;
    must(kmla_gpu_prepare(one, &plan, NULL, &error));
    assert_int_equal(kmla_gpu_decode(two, &plan, &args, NULL, &error), KMLA_ERROR_NOT_PREPARED);
    must(kmla_gpu_prepare(two, &plan, NULL, &error));
    kmla_gpu_close(one);
    must(kmla_gpu_decode(two, &plan, &args, NULL, &error));
    kmla_gpu_close(two);
    assert_int_equal(fake->modules_unloaded, fake->modules_loaded);
}

// A green context has a share of the SMs: plans are made for the share.
static void test_green_context(void** state) {
    kmla_gpu* gpu = open_fake();
    kmla_device whole, share;
    (void)state;
    must(kmla_gpu_device(gpu, &whole, &error));
    context_b.multiprocessors = 16;
    set_current(&context_b);
    must(kmla_gpu_device(gpu, &share, &error));
    assert_int_equal(whole.multiprocessors, 132);
    assert_int_equal(share.multiprocessors, 16);
    share.multiprocessors = 132;
    assert_memory_equal(&share, &whole, sizeof whole);
    fake->failing_call = "cuCtxGetDevResource"; // a driver that does not say
    fake->failing_result = 801;
    must(kmla_gpu_device(gpu, &share, &error));
    assert_int_equal(share.multiprocessors, 132);
    fake->failing_call = NULL;
    context_b.multiprocessors = -1; // or that says nothing of use
    must(kmla_gpu_device(gpu, &share, &error));
    assert_int_equal(share.multiprocessors, 132);
    kmla_gpu_close(gpu);
}

static void test_context_destroyed(void** state) {
    kmla_gpu* gpu = open_fake();
    kmla_plan plan = plan_for(99, 1);
    kmla_decode args = decode_args(&plan);
    (void)state;
    must(kmla_gpu_prepare(gpu, &plan, NULL, &error));
    context_a.dead = 1;
    assert_int_equal(kmla_gpu_decode(gpu, &plan, &args, NULL, &error), KMLA_ERROR_CUDA);
    assert_int_equal(fake->launch_count, 0);
    context_a.dead = 0; // a new one at the dead one's address
    context_a.id = 9;
    assert_int_equal(kmla_gpu_prepare(gpu, &plan, NULL, &error), KMLA_ERROR_CONTEXT);
    assert_contains(error.message, "is gone");
    kmla_gpu_close(gpu);
    assert_int_equal(fake->modules_unloaded, 0); // they went with their context
    gpu = open_fake();
    must(kmla_gpu_prepare(gpu, &plan, NULL, &error));
    must(kmla_gpu_decode(gpu, &plan, &args, NULL, &error));
    kmla_gpu_close(gpu);
}

// =============================================================================
// Threads
// =============================================================================

enum { THREADS = 8, LAUNCHES = 200 };

static kmla_gpu* shared;
static kmla_plan shared_plan;
static int right_launches;

// Every launch says by its stream which outputs it should have.
static void check_launch(const fake_launch* launch) {
    struct kmla_i_reader_args args;
    memcpy(&args, launch->args, sizeof args);
    if (strcmp(launch->kernel, "kmla_reader") == 0 &&
        args.out == 0x50000000 + 4096 * (uint64_t)(uintptr_t)launch->stream) {
        __atomic_fetch_add(&right_launches, 1, __ATOMIC_SEQ_CST);
    }
}

static void* launch_on_thread(void* data) {
    uintptr_t number = (uintptr_t)data;
    kmla_decode args = decode_args(&shared_plan);
    kmla_error mine;
    int i;
    args.out += 4096 * number;
    if (kmla_gpu_decode(shared, &shared_plan, &args, (void*)number, &mine) != KMLA_ERROR_CONTEXT) {
        return (void*)"a thread without a context could launch"; // RT-07
    }
    set_current(&context_a);
    for (i = 0; i < LAUNCHES; ++i) {
        if (kmla_gpu_decode(shared, &shared_plan, &args, (void*)number, &mine) != KMLA_OK) {
            return (void*)"a launch failed";
        }
    }
    return NULL;
}

static void run_threads(void* (*run)(void*), void* const* data) {
    pthread_t threads[THREADS];
    int i;
    for (i = 0; i < THREADS; ++i) {
        assert_int_equal(pthread_create(&threads[i], NULL, run, data[i]), 0);
    }
    for (i = 0; i < THREADS; ++i) {
        void* result;
        pthread_join(threads[i], &result);
        if (result) {
            fail_msg("thread %d: %s", i, (const char*)result);
        }
    }
}

// One object, prepared here, launched from eight threads at once.
static void test_launches_from_threads(void** state) {
    void* numbers[THREADS];
    uintptr_t i;
    (void)state;
    fake->context = NULL; // a thread has no context until it sets one
    shared = open_fake();
    shared_plan = plan_for(99, 1);
    must(kmla_gpu_prepare(shared, &shared_plan, NULL, &error));
    right_launches = 0;
    fake->launched = check_launch;
    for (i = 0; i < THREADS; ++i) {
        numbers[i] = (void*)(i + 1);
    }
    run_threads(launch_on_thread, numbers);
    assert_int_equal(right_launches, THREADS * LAUNCHES);
    assert_int_equal(fake->launch_count, THREADS * LAUNCHES);
    kmla_gpu_close(shared);
}

typedef struct own {
    fake_context context;
    kmla_plan plan;
} own;

static void* live_on_thread(void* data) {
    own* mine = (own*)data;
    kmla_gpu_desc desc = fake_desc();
    kmla_decode args = decode_args(&mine->plan);
    kmla_gpu* gpu;
    kmla_error failed;
    int i;
    set_current(&mine->context);
    if (kmla_gpu_open(&desc, &gpu, &failed) != KMLA_OK ||
        kmla_gpu_prepare(gpu, &mine->plan, NULL, &failed) != KMLA_OK) {
        return (void*)"open or prepare failed";
    }
    for (i = 0; i < LAUNCHES; ++i) {
        if (kmla_gpu_decode(gpu, &mine->plan, &args, NULL, &failed) != KMLA_OK) {
            return (void*)"a launch failed";
        }
    }
    kmla_gpu_close(gpu);
    return NULL;
}

// Eight threads, each with a context and an object of its own on one of two devices: they open,
// compile, prepare, launch and close at once.
static void test_lives_on_threads(void** state) {
    static own owns[THREADS];
    void* data[THREADS];
    int i;
    (void)state;
    memset(owns, 0, sizeof owns);
    for (i = 0; i < THREADS; ++i) {
        owns[i].context.device = i % FAKE_DEVICES;
        owns[i].context.id = (unsigned long long)(20 + i);
        owns[i].plan = plan_for(i < 4 ? 99 : 4, 1);
        data[i] = &owns[i];
    }
    run_threads(live_on_thread, data);
    assert_int_equal(fake->launch_count, THREADS * LAUNCHES);
    assert_int_equal(fake->modules_loaded, 2 * THREADS);
    assert_int_equal(fake->modules_unloaded, 2 * THREADS);
    assert_int_equal(fake->programs_alive, 0);
}

// One object compiles for several threads.
static void* compile_on_thread(void* data) {
    kmla_plan* plan = (kmla_plan*)data;
    kmla_device device = card(9, 0);
    kmla_image image;
    int32_t variant = plan ? kmla_plan_variant(plan) : 0;
    int i;
    for (i = 0; i < 20; ++i) {
        if (kmla_gpu_compile(shared, plan, &device, NULL, &image, NULL) != KMLA_OK ||
            image.variant != variant) {
            return (void*)"a compile failed";
        }
        kmla_image_free(&image);
    }
    return NULL;
}

static void test_compiles_on_threads(void** state) {
    kmla_plan large = plan_for(99, 1), small = plan_for(4, 1);
    void* data[THREADS];
    int i;
    (void)state;
    for (i = 0; i < THREADS; ++i) {
        data[i] = i % 3 == 0 ? NULL : i % 3 == 1 ? &large : &small;
    }
    shared = open_fake();
    run_threads(compile_on_thread, data);
    assert_int_equal(fake->compiles, THREADS * 20);
    kmla_gpu_close(shared);
}

// =============================================================================
// Forks
// =============================================================================

static int child_passes(int (*run)(void)) {
    int status = 0;
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        alarm(20); // a child that hangs is a failure
        _exit(run());
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

// The parent's object, its context and its driver are of no use here: errors, no hang, no crash.
static int use_in_child(void) {
    kmla_decode args = decode_args(&shared_plan);
    kmla_device device = card(9, 0);
    kmla_gpu_desc desc = fake_desc();
    kmla_gpu* own_gpu = NULL;
    kmla_image image;
    int faults = 0;
    faults += kmla_gpu_decode(shared, &shared_plan, &args, NULL, &error) != KMLA_ERROR_CUDA;
    faults += error.cuda_result != 3; // not initialised
    faults += kmla_gpu_device(shared, &device, &error) != KMLA_ERROR_CUDA;
    faults += kmla_gpu_prepare(shared, &shared_plan, NULL, &error) != KMLA_ERROR_CUDA;
    faults += kmla_gpu_open(&desc, &own_gpu, &error) != KMLA_ERROR_CUDA || own_gpu;
    faults += kmla_gpu_compile(shared, NULL, &device, NULL, &image, &error) != KMLA_OK;
    kmla_image_free(&image);
    faults += fake->launch_count != 0;
    kmla_gpu_close(shared);
    faults += fake->modules_unloaded != 0;
    return faults;
}

static void test_fork(void** state) { // RT-07
    kmla_decode args;
    (void)state;
    shared = open_fake();
    shared_plan = plan_for(99, 1);
    must(kmla_gpu_prepare(shared, &shared_plan, NULL, &error));
    assert_true(child_passes(use_in_child));
    args = decode_args(&shared_plan); // the parent goes on
    must(kmla_gpu_decode(shared, &shared_plan, &args, NULL, &error));
    kmla_gpu_close(shared);
    assert_int_equal(fake->modules_unloaded, fake->modules_loaded);
}

#define TEST(name) cmocka_unit_test_setup(name, set_up)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(test_two_contexts),
        TEST(test_two_devices),
        TEST(test_two_objects_in_a_context),
        TEST(test_green_context),
        TEST(test_context_destroyed),
        TEST(test_launches_from_threads),
        TEST(test_lives_on_threads),
        TEST(test_compiles_on_threads),
        TEST(test_fork),
    };
    return cmocka_run_group_tests_name("contexts, threads, processes", tests, NULL, NULL);
}
