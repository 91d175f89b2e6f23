// How libcuda and NVRTC are found, on machines that the test makes up: which files there are, what
// the process has loaded, what the environment says, which functions a library lacks.

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

static void* machine_dlopen(const char* name, int flags);
static void* machine_dlsym(void* library, const char* symbol);
static char* machine_getenv(const char* name);

#define dlopen machine_dlopen
#define dlsym machine_dlsym
#define getenv machine_getenv
#define KIMI_MLA_IMPLEMENTATION
#include "../kimi_mla.h"
#undef dlopen
#undef dlsym
#undef getenv

#include "with_fake.h"

static struct machine {
    const char* installed[4]; // names and paths that open, all of them the fake library
    const char* loaded;       // a name that the process has
    const char *cuda_path, *cuda_home;
    const char* lacking; // a function
    char tried[4096];    // what was looked for, "?" behind it if only among what is loaded
} machine;

static void* fake_library;

static void* machine_dlopen(const char* name, int flags) {
    int only_loaded = (flags & RTLD_NOLOAD) != 0, found = 0, i;
    size_t used = strlen(machine.tried);
    snprintf(machine.tried + used, sizeof machine.tried - used, "%s%s ", name,
             only_loaded ? "?" : "");
    if (only_loaded) {
        found = machine.loaded && strcmp(name, machine.loaded) == 0;
    }
    for (i = 0; i < 4 && !only_loaded; ++i) {
        found = found || (machine.installed[i] && strcmp(name, machine.installed[i]) == 0);
    }
    return found ? fake_library : only_loaded ? NULL : dlopen("/nowhere/at all.so", RTLD_NOW);
}

static void* machine_dlsym(void* library, const char* symbol) {
    return machine.lacking && strcmp(symbol, machine.lacking) == 0 ? NULL : dlsym(library, symbol);
}

static char* machine_getenv(const char* name) {
    return (char*)(strcmp(name, "CUDA_PATH") == 0   ? machine.cuda_path
                   : strcmp(name, "CUDA_HOME") == 0 ? machine.cuda_home
                                                    : NULL);
}

static int set_up(void** state) {
    memset(&machine, 0, sizeof machine);
    fake_library = dlopen(FAKE_PATH, RTLD_NOW);
    machine.installed[0] = "libcuda.so.1";
    return fake_library == NULL || reset_fake(state);
}

static kmla_gpu* gpu;
static kmla_error error;

static kmla_status open_with(const kmla_gpu_desc* desc) {
    memset(&error, 0, sizeof error);
    gpu = NULL;
    machine.tried[0] = 0;
    return kmla_gpu_open(desc, &gpu, &error);
}

static void expect_nvrtc(const char* wanted) {
    if (open_with(NULL) != KMLA_OK) {
        fail_msg("%s", error.message);
    }
    assert_string_equal(gpu->nvrtc.library, wanted);
    kmla_gpu_close(gpu);
}

static void expect_failure(const kmla_gpu_desc* desc, kmla_status status, const char* library,
                           const char* why) {
    assert_int_equal(open_with(desc), status);
    assert_int_equal(error.status, status);
    assert_string_equal(error.library, library);
    assert_contains(error.message, why);
    assert_null(gpu);
}

// =============================================================================
// The search
// =============================================================================

static void test_order(void** state) {
    (void)state;
    machine.cuda_path = "/opt/cuda";
    machine.cuda_home = "/venv/nvidia/cu13";
    fake->driver_version = 13000;
    expect_failure(NULL, KMLA_ERROR_LIBRARY, "libnvrtc", "NVRTC was not found");
    assert_string_equal(
        machine.tried,
        "libcuda.so.1 "
        "libnvrtc.so.13? libnvrtc.so.12? libnvrtc.so.11.2? libnvrtc.so? "
        "libnvrtc.so.13 libnvrtc.so.12 libnvrtc.so.11.2 libnvrtc.so "
        "/opt/cuda/lib64/libnvrtc.so.13 /opt/cuda/lib64/libnvrtc.so.12 "
        "/opt/cuda/lib64/libnvrtc.so.11.2 /opt/cuda/lib64/libnvrtc.so "
        "/opt/cuda/lib/libnvrtc.so.13 /opt/cuda/lib/libnvrtc.so.12 "
        "/opt/cuda/lib/libnvrtc.so.11.2 /opt/cuda/lib/libnvrtc.so "
        "/venv/nvidia/cu13/lib64/libnvrtc.so.13 /venv/nvidia/cu13/lib64/libnvrtc.so.12 "
        "/venv/nvidia/cu13/lib64/libnvrtc.so.11.2 /venv/nvidia/cu13/lib64/libnvrtc.so "
        "/venv/nvidia/cu13/lib/libnvrtc.so.13 /venv/nvidia/cu13/lib/libnvrtc.so.12 "
        "/venv/nvidia/cu13/lib/libnvrtc.so.11.2 /venv/nvidia/cu13/lib/libnvrtc.so "
        "/usr/local/cuda/lib64/libnvrtc.so.13 /usr/local/cuda/lib64/libnvrtc.so.12 "
        "/usr/local/cuda/lib64/libnvrtc.so.11.2 /usr/local/cuda/lib64/libnvrtc.so ");
}

static void test_every_name_is_in_the_error(void** state) {
    (void)state;
    expect_failure(NULL, KMLA_ERROR_LIBRARY, "libnvrtc",
                   "tried libnvrtc.so.13, libnvrtc.so.12, libnvrtc.so.11.2, libnvrtc.so in the "
                   "loader's search path, /usr/local/cuda/lib64/");
    machine.cuda_path = "/opt/cuda";
    machine.cuda_home = "/venv/nvidia/cu13";
    expect_failure(NULL, KMLA_ERROR_LIBRARY, "libnvrtc",
                   "search path, /opt/cuda/lib64/, /opt/cuda/lib/, /venv/nvidia/cu13/lib64/, "
                   "/venv/nvidia/cu13/lib/, /usr/local/cuda/lib64/");
    machine.installed[0] = NULL;
    expect_failure(NULL, KMLA_ERROR_LIBRARY, "libcuda.so.1", "tried libcuda.so.1");
}

static void test_each_layout(void** state) {
    static const char* const layouts[] = {
        "libnvrtc.so.13",   "libnvrtc.so.12",
        "libnvrtc.so.11.2", "libnvrtc.so",
        "/opt/cuda/lib64/libnvrtc.so.13", // a toolkit
        "/opt/cuda/lib/libnvrtc.so.12",   // a pip wheel or a conda environment
        "/venv/nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
        "/venv/nvidia/cuda_nvrtc/lib64/libnvrtc.so",
        "/usr/local/cuda/lib64/libnvrtc.so.11.2",
    };
    size_t i;
    (void)state;
    machine.cuda_path = "/opt/cuda";
    machine.cuda_home = "/venv/nvidia/cuda_nvrtc";
    for (i = 0; i < sizeof layouts / sizeof layouts[0]; ++i) {
        machine.installed[1] = layouts[i];
        expect_nvrtc(layouts[i]);
    }
}

// What the process has is taken even if a newer one could be opened: it is whole in memory, and its
// builtins are beside it.
static void test_loaded_already(void** state) {
    (void)state;
    fake->driver_version = 13000;
    machine.installed[1] = "libnvrtc.so.13";
    machine.loaded = "libnvrtc.so.12";
    expect_nvrtc("libnvrtc.so.12");
    assert_null(strstr(machine.tried, "libnvrtc.so.13 "));
}

// The driver of CUDA 12 may refuse what NVRTC 13 makes.
static void test_newer_than_the_driver_comes_last(void** state) {
    (void)state;
    machine.installed[1] = "libnvrtc.so.13";
    machine.installed[2] = "/usr/local/cuda/lib64/libnvrtc.so.12";
    fake->driver_version = 12040;
    expect_nvrtc("/usr/local/cuda/lib64/libnvrtc.so.12");
    fake->driver_version = 13000;
    expect_nvrtc("libnvrtc.so.13");
    fake->driver_version = 11080;
    expect_nvrtc("libnvrtc.so.13"); // neither is old enough: the newest
    fake->driver_version = 12040;
    machine.installed[2] = NULL;
    expect_nvrtc("libnvrtc.so.13"); // better than none
}

static void test_long_environment(void** state) {
    char root[3000], path[1000] = "";
    (void)state;
    memset(root, 'x', sizeof root);
    root[0] = '/';
    root[sizeof root - 1] = 0;
    machine.cuda_path = root; // not a path that anybody could open
    machine.installed[1] = "/usr/local/cuda/lib64/libnvrtc.so.12";
    expect_nvrtc("/usr/local/cuda/lib64/libnvrtc.so.12");
    assert_null(strstr(machine.tried, "xx"));

    root[900] = 0; // longer than an error's text, and opened all the same
    strcat(strcat(path, root), "/lib/libnvrtc.so.12");
    machine.installed[1] = path;
    assert_int_equal(open_with(NULL), KMLA_OK);
    kmla_gpu_close(gpu);
    machine.installed[1] = NULL;
    expect_failure(NULL, KMLA_ERROR_LIBRARY, "libnvrtc", "NVRTC was not found");

    machine.cuda_path = ""; // set, and empty: not the root folder
    expect_failure(NULL, KMLA_ERROR_LIBRARY, "libnvrtc", "NVRTC was not found");
    assert_null(strstr(machine.tried, " /lib"));
}

// =============================================================================
// What the caller says
// =============================================================================

static void test_paths(void** state) {
    kmla_gpu_desc desc = {0};
    (void)state;
    machine.installed[1] = "libnvrtc.so.12";
    desc.cuda_path = "/my/libcuda.so.1";
    expect_failure(&desc, KMLA_ERROR_LIBRARY, "/my/libcuda.so.1", "cuda_path cannot be opened: ");
    assert_contains(error.message, "No such file"); // the loader's own words
    assert_string_equal(machine.tried, "/my/libcuda.so.1 ");
    machine.installed[2] = "/my/libcuda.so.1";
    assert_int_equal(open_with(&desc), KMLA_OK);
    kmla_gpu_close(gpu);

    desc.nvrtc_path = "/my/libnvrtc.so";
    expect_failure(&desc, KMLA_ERROR_LIBRARY, "/my/libnvrtc.so", "nvrtc_path cannot be opened: ");
    assert_string_equal(machine.tried, "/my/libcuda.so.1 /my/libnvrtc.so ");
    machine.installed[3] = "/my/libnvrtc.so";
    assert_int_equal(open_with(&desc), KMLA_OK);
    assert_string_equal(gpu->nvrtc.library, "/my/libnvrtc.so");
    kmla_gpu_close(gpu);
}

static void test_handles_win(void** state) {
    kmla_gpu_desc desc = {0};
    kmla_device device;
    kmla_image image;
    (void)state;
    desc.cuda_handle = fake_library;
    desc.cuda_path = "/nowhere/libcuda.so.1";
    desc.nvrtc_handle = fake_library;
    desc.nvrtc_path = "/nowhere/libnvrtc.so";
    assert_int_equal(open_with(&desc), KMLA_OK);
    assert_string_equal(machine.tried, "");
    assert_int_equal(kmla_gpu_device(gpu, &device, &error), KMLA_OK);
    assert_int_equal(kmla_gpu_compile(gpu, NULL, &device, NULL, &image, &error), KMLA_OK);
    kmla_image_free(&image);
    kmla_gpu_close(gpu);
}

static void test_without(void** state) {
    kmla_gpu_desc desc = {0};
    (void)state;
    desc.without_nvrtc = 1;
    assert_int_equal(open_with(&desc), KMLA_OK);
    assert_string_equal(machine.tried, "libcuda.so.1 ");
    kmla_gpu_close(gpu);
    desc.without_nvrtc = 0;
    desc.without_cuda = 1;
    machine.installed[0] = "libnvrtc.so.13"; // no driver whose age could matter
    machine.installed[1] = "libnvrtc.so.12";
    assert_int_equal(open_with(&desc), KMLA_OK);
    assert_string_equal(gpu->nvrtc.library, "libnvrtc.so.13");
    assert_null(strstr(machine.tried, "libcuda"));
    kmla_gpu_close(gpu);
}

// =============================================================================
// Libraries that cannot be used
// =============================================================================

static void test_stub(void** state) {
    (void)state;
    fake->stub = 1;
    expect_failure(NULL, KMLA_ERROR_LIBRARY, "libcuda.so.1", "stub");
    assert_int_equal(error.cuda_result, 34);
    fake->stub = 0;
    machine.installed[1] = "libnvrtc.so.12";
    expect_nvrtc("libnvrtc.so.12");
}

// The real one of a toolkit, where there is one.
static void test_real_stub(void** state) {
    kmla_gpu_desc desc = {0};
    (void)state;
    desc.cuda_handle = dlopen("/usr/local/cuda/lib64/stubs/libcuda.so", RTLD_NOW);
    if (!desc.cuda_handle) {
        skip();
    }
    desc.without_nvrtc = 1;
    expect_failure(&desc, KMLA_ERROR_LIBRARY, "the caller's CUDA handle", "stub");
}

static void test_builtins_are_missed_in_open(void** state) {
    (void)state;
    machine.installed[1] = "libnvrtc.so.12";
    fake->without_builtins = 1;
    expect_failure(NULL, KMLA_ERROR_LIBRARY, "libnvrtc.so.12", "libnvrtc-builtins.so.12.1");
    assert_int_equal(error.nvrtc_result, 7);
    assert_int_equal(error.nvrtc_version, 12010);
    assert_int_equal(fake->programs_alive, 0);
    fake->without_builtins = 0;
    expect_nvrtc("libnvrtc.so.12");
    assert_int_equal(fake->compiles, 0); // nothing of the device source
}

static void test_another_library(void** state) {
    kmla_gpu_desc desc = {0};
    (void)state;
    desc.cuda_handle = dlopen("libm.so.6", RTLD_NOW);
    assert_non_null(desc.cuda_handle);
    expect_failure(&desc, KMLA_ERROR_SYMBOL, "the caller's CUDA handle", "cuInit");
    desc.nvrtc_handle = desc.cuda_handle;
    desc.cuda_handle = NULL;
    expect_failure(&desc, KMLA_ERROR_SYMBOL, "the caller's NVRTC handle", "nvrtcVersion");
}

// Without a function that it needs an object does not open; without one that it can do without,
// all goes on, by older means.
static void without_function(const char* symbol, int needed, const char* library) {
    kmla_plan plan = plan_for(99, 4);
    kmla_decode args = decode_args(&plan);
    reset_fake(NULL);
    machine.lacking = symbol;
    if (needed) {
        expect_failure(NULL, KMLA_ERROR_SYMBOL, library, symbol);
    } else {
        if (open_with(NULL) != KMLA_OK || kmla_gpu_prepare(gpu, &plan, NULL, &error) != KMLA_OK ||
            kmla_gpu_decode(gpu, &plan, &args, NULL, &error) != KMLA_OK) {
            fail_msg("without %s: %s", symbol, error.message);
        }
        assert_int_equal(fake->launch_count, 2);
        kmla_gpu_close(gpu);
        assert_int_equal(fake->modules_unloaded, fake->modules_loaded);
    }
    machine.lacking = NULL;
    assert_int_equal(open_with(NULL), KMLA_OK);
    kmla_gpu_close(gpu);
}

static void test_each_function_missing(void** state) {
    (void)state;
    machine.installed[1] = "libnvrtc.so.12";
#define WITHOUT_CUDA(result, field, symbol, needed, parameters)                                    \
    without_function(symbol, needed, "libcuda.so.1");
#define WITHOUT_NVRTC(result, field, symbol, needed, parameters)                                   \
    without_function(symbol, needed, "libnvrtc.so.12");
    KMLA_I_CUDA_FUNCTIONS(WITHOUT_CUDA)
    KMLA_I_NVRTC_FUNCTIONS(WITHOUT_NVRTC)
}

#define TEST(name) cmocka_unit_test_setup(name, set_up)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(test_order),
        TEST(test_every_name_is_in_the_error),
        TEST(test_each_layout),
        TEST(test_loaded_already),
        TEST(test_newer_than_the_driver_comes_last),
        TEST(test_long_environment),
        TEST(test_paths),
        TEST(test_handles_win),
        TEST(test_without),
        TEST(test_stub),
        TEST(test_real_stub),
        TEST(test_builtins_are_missed_in_open),
        TEST(test_another_library),
        TEST(test_each_function_missing),
    };
    return cmocka_run_group_tests_name("finding libcuda and NVRTC", tests, NULL, NULL);
}
