// test_windows.c - the names under which Windows' libraries are looked for, where there are none.

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#define KIMI_MLA_IMPLEMENTATION
#include "../../kimi_mla.h"

static void test_driver_name(void** state) {
    kmla_gpu* gpu = NULL;
    kmla_error error;
    (void)state;
    assert_int_equal(kmla_gpu_open(NULL, &gpu, &error), KMLA_ERROR_LIBRARY);
    assert_null(gpu);
    assert_string_equal(error.library, "nvcuda.dll");
    assert_non_null(strstr(error.message, "nvcuda.dll"));
}

static void test_nvrtc_names(void** state) {
    kmla_gpu_desc desc;
    kmla_device device;
    kmla_gpu* gpu = NULL;
    kmla_image image;
    kmla_error error;
    kmla_status status;
    (void)state;
    memset(&desc, 0, sizeof desc);
    memset(&device, 0, sizeof device);
    desc.without_cuda = 1;
    device.compute_major = 9;
    _putenv("CUDA_PATH=C:\\nowhere");
    status = kmla_gpu_open(&desc, &gpu, &error); // NVRTC is looked for here or by the compile
    if (status == KMLA_OK) {
        status = kmla_gpu_compile(gpu, NULL, &device, NULL, &image, &error);
    }
    assert_int_equal(status, KMLA_ERROR_LIBRARY);
    assert_non_null(strstr(error.message, "nvrtc64_130_0.dll"));
    assert_non_null(strstr(error.message, "nvrtc64_120_0.dll"));
    assert_non_null(strstr(error.message, "nvrtc64_112_0.dll"));
    assert_non_null(strstr(error.message, "C:\\nowhere\\bin\\"));
    kmla_gpu_close(gpu);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_driver_name),
        cmocka_unit_test(test_nvrtc_names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
