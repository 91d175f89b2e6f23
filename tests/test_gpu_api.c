// The GPU side's errors and launches, without a GPU: with libraries that are missing, with fakes
// that fail on demand and note what they are asked (fake_libraries.c), and with a real NVRTC if
// there is one.

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#define KIMI_MLA_IMPLEMENTATION
#include "../kimi_mla.h"

#include "with_fake.h"

static kmla_gpu* open_compile_only(void) {
    kmla_gpu_desc desc = fake_desc();
    kmla_gpu* gpu = NULL;
    desc.without_cuda = 1;
    assert_int_equal(kmla_gpu_open(&desc, &gpu, NULL), KMLA_OK);
    return gpu;
}

// =============================================================================
// Libraries
// =============================================================================

static void test_null_arguments(void** state) {
    kmla_gpu* gpu = open_fake();
    kmla_device device = card(9, 0);
    kmla_image image;
    kmla_plan plan = plan_for(99, 1);
    kmla_decode args = decode_args(&plan);
    kmla_error error;
    (void)state;
    assert_int_equal(kmla_gpu_open(NULL, NULL, &error), KMLA_ERROR_ARGUMENT);
    assert_contains(error.message, "gpu");
    assert_int_equal(kmla_gpu_device(NULL, &device, &error), KMLA_ERROR_ARGUMENT);
    assert_contains(error.message, "gpu");
    assert_int_equal(kmla_gpu_device(gpu, NULL, &error), KMLA_ERROR_ARGUMENT);
    assert_contains(error.message, "device");
    assert_int_equal(kmla_gpu_compile(NULL, NULL, &device, NULL, &image, &error),
                     KMLA_ERROR_ARGUMENT);
    assert_contains(error.message, "gpu");
    assert_int_equal(kmla_gpu_compile(gpu, NULL, NULL, NULL, &image, &error), KMLA_ERROR_ARGUMENT);
    assert_contains(error.message, "device");
    assert_int_equal(kmla_gpu_compile(gpu, NULL, &device, NULL, NULL, &error), KMLA_ERROR_ARGUMENT);
    assert_contains(error.message, "image");
    assert_int_equal(kmla_gpu_prepare(NULL, NULL, NULL, &error), KMLA_ERROR_ARGUMENT);
    assert_contains(error.message, "gpu");
    assert_int_equal(kmla_gpu_decode(gpu, NULL, &args, NULL, &error), KMLA_ERROR_ARGUMENT);
    assert_contains(error.message, "plan");
    assert_int_equal(kmla_gpu_decode(gpu, &plan, NULL, NULL, &error), KMLA_ERROR_ARGUMENT);
    assert_contains(error.message, "args");
    assert_int_equal(kmla_gpu_decode(NULL, &plan, &args, NULL, &error), KMLA_ERROR_ARGUMENT);
    assert_contains(error.message, "gpu");
    assert_int_equal(kmla_gpu_combine(gpu, NULL, NULL, &error), KMLA_ERROR_ARGUMENT);
    assert_int_equal(kmla_gpu_write_kv(gpu, NULL, NULL, &error), KMLA_ERROR_ARGUMENT);
    assert_int_equal(kmla_gpu_write_query(gpu, NULL, NULL, &error), KMLA_ERROR_ARGUMENT);
    assert_int_equal(kmla_gpu_prepare(NULL, NULL, NULL, NULL), KMLA_ERROR_ARGUMENT);
    kmla_image_free(NULL);
    kmla_gpu_close(NULL);
    kmla_gpu_close(gpu);
}

static void test_objects_without_a_library(void** state) {
    kmla_gpu_desc desc = {0};
    kmla_gpu* gpu = open_compile_only();
    kmla_device device = card(9, 0);
    kmla_plan plan = plan_for(99, 1);
    kmla_decode args = decode_args(&plan);
    kmla_image image;
    kmla_error error;
    (void)state;
    assert_int_equal(kmla_gpu_compile(gpu, &plan, &device, NULL, &image, &error), KMLA_OK);
    kmla_image_free(&image);
    assert_null(image.data);
    assert_int_equal(kmla_gpu_device(gpu, &device, &error), KMLA_ERROR_LIBRARY);
    assert_contains(error.message, "without_cuda");
    assert_int_equal(kmla_gpu_prepare(gpu, &plan, NULL, &error), KMLA_ERROR_LIBRARY);
    assert_int_equal(kmla_gpu_decode(gpu, &plan, &args, NULL, &error), KMLA_ERROR_LIBRARY);
    kmla_gpu_close(gpu);

    desc.cuda_path = FAKE_PATH;
    desc.nvrtc_path = FAKE_PATH;
    desc.without_nvrtc = 1;
    assert_int_equal(kmla_gpu_open(&desc, &gpu, &error), KMLA_OK);
    assert_int_equal(kmla_gpu_prepare(gpu, &plan, NULL, &error), KMLA_ERROR_LIBRARY);
    assert_contains(error.message, "without_nvrtc");
    assert_int_equal(fake->compiles, 1); // the one above
    kmla_gpu_close(gpu);
}

// =============================================================================
// Compile
// =============================================================================

static void test_unknown_architecture(void** state) {
    kmla_gpu* gpu = open_compile_only();
    kmla_device device = card(12, 0); // the fake NVRTC 12.1 knows sm_80 to sm_90
    kmla_image image;
    kmla_error error;
    (void)state;
    memset(&image, 0x5A, sizeof image);
    assert_int_equal(kmla_gpu_compile(gpu, NULL, &device, NULL, &image, &error),
                     KMLA_ERROR_ARCHITECTURE);
    assert_contains(error.message, "NVRTC 12.1");
    assert_contains(error.message, "12.0 (sm_120)");
    assert_contains(error.message, "sm_80, sm_86, sm_89, sm_90");
    assert_int_equal(error.nvrtc_version, 12010);
    assert_string_equal(error.library, FAKE_PATH);
    assert_int_equal(image.variant, 0x5A5A5A5A); // untouched
    assert_int_equal(fake->compiles, 0);
    kmla_gpu_close(gpu);
}

static void append_log(void* user, const char* text) { strcat((char*)user, text); }

static void test_refused_source(void** state) {
    kmla_gpu* gpu = open_compile_only();
    kmla_device device = card(9, 0);
    char collected[256] = "";
    kmla_log log = {append_log, collected};
    kmla_image image;
    kmla_error error;
    (void)state;
    fake->failing_call = "nvrtcCompileProgram";
    fake->failing_result = 6;
    fake->log = "a.cuh(1): warning: w\nmerge.cuh(12): error: no such thing\n  x = y;\n";
    assert_int_equal(kmla_gpu_compile(gpu, NULL, &device, &log, &image, &error),
                     KMLA_ERROR_COMPILE);
    assert_int_equal(error.nvrtc_result, 6);
    assert_contains(error.message, "merge.cuh(12): error: no such thing");
    assert_null(strchr(error.message, '\n'));
    assert_string_equal(collected, fake->log);

    fake->failing_result = 7; // NVRTC lacks its own second library
    fake->log = "nvrtc: error: failed to open libnvrtc-builtins.so.12.1.\n";
    assert_int_equal(kmla_gpu_compile(gpu, NULL, &device, NULL, &image, &error),
                     KMLA_ERROR_LIBRARY);
    assert_contains(error.message, "libnvrtc-builtins.so.12.1");

    fake->log = "";
    assert_int_equal(kmla_gpu_compile(gpu, NULL, &device, NULL, &image, &error),
                     KMLA_ERROR_LIBRARY);
    fake->failing_call = "nvrtcCreateProgram";
    assert_int_equal(kmla_gpu_compile(gpu, NULL, &device, NULL, &image, &error),
                     KMLA_ERROR_COMPILE);
    fake->failing_call = "nvrtcGetCUBIN";
    assert_int_equal(kmla_gpu_compile(gpu, NULL, &device, NULL, &image, &error),
                     KMLA_ERROR_COMPILE);
    assert_contains(error.message, "nvrtcGetCUBIN");
    kmla_gpu_close(gpu);
}

static void expect_define(const char* name, int32_t value) {
    char wanted[64];
    snprintf(wanted, sizeof wanted, "-D%s=%d ", name, (int)value);
    assert_contains(fake->options, wanted);
}

static void expect_reader_options(const kmla_plan* plan) {
    assert_contains(fake->options, "--std=c++17 ");
    assert_contains(fake->options, "--fmad=false ");
    expect_define("KMLA_KV_FORMAT", plan->shape.kv_format);
    expect_define("KMLA_TILE", plan->tile);
    expect_define("KMLA_RESIDENT", plan->resident);
    expect_define("KMLA_STAGES", plan->stages);
    expect_define("KMLA_SHARED_BYTES", plan->shared_bytes);
}

static void test_options_and_image(void** state) {
    kmla_gpu* gpu = open_compile_only();
    kmla_device device = card(8, 6);
    kmla_plan plan = plan_on(device, 99, 1);
    kmla_image image;
    (void)state;
    assert_int_equal(plan.reader, KMLA_READER_PORTABLE);
    assert_int_equal(kmla_gpu_compile(gpu, &plan, &device, NULL, &image, NULL), KMLA_OK);
    assert_contains(fake->options, "--gpu-architecture=sm_86 ");
    assert_null(strstr(fake->options, "KMLA_HOPPER"));
    expect_reader_options(&plan);
    assert_int_equal(image.variant, kmla_plan_variant(&plan));
    assert_int_equal(image.compute_major, 8);
    assert_int_equal(image.compute_minor, 6);
    assert_int_equal(image.bytes, KMLA_I_IMAGE_HEAD_BYTES + 6);
    assert_string_equal((const char*)image.data + KMLA_I_IMAGE_HEAD_BYTES, "cubin");
    kmla_image_free(&image);

    assert_int_equal(kmla_gpu_compile(gpu, NULL, &device, NULL, &image, NULL), KMLA_OK);
    assert_null(strstr(fake->options, "-D"));
    assert_int_equal(image.variant, 0);
    kmla_image_free(&image);
    assert_int_equal(fake->programs_alive, 0);
    kmla_gpu_close(gpu);
}

// The Hopper reader's instructions are sm_90a's alone.
static void test_hopper_options(void** state) {
    kmla_gpu* gpu = open_compile_only();
    kmla_device hopper = card(9, 0), ada = card(8, 9);
    kmla_plan plan = plan_on(hopper, 99, 1);
    kmla_image image;
    kmla_error error;
    (void)state;
    assert_int_equal(plan.reader, KMLA_READER_HOPPER);
    assert_int_equal(kmla_gpu_compile(gpu, &plan, &hopper, NULL, &image, NULL), KMLA_OK);
    assert_contains(fake->options, "--gpu-architecture=sm_90a ");
    assert_contains(fake->options, "-DKMLA_HOPPER ");
    expect_reader_options(&plan);
    assert_int_equal(image.variant, 20032);
    kmla_image_free(&image);

    fake->compiles = 0;
    assert_int_equal(kmla_gpu_compile(gpu, &plan, &ada, NULL, &image, &error),
                     KMLA_ERROR_ARCHITECTURE);
    assert_contains(error.message, "plan.reader");
    assert_contains(error.message, "8.9");
    assert_int_equal(fake->compiles, 0);

    assert_int_equal(kmla_gpu_compile(gpu, NULL, &hopper, NULL, &image, NULL), KMLA_OK);
    assert_contains(fake->options, "--gpu-architecture=sm_90 "); // writers and combine need none
    kmla_image_free(&image);
    kmla_gpu_close(gpu);
}

static void test_host_plans_are_refused(void** state) {
    kmla_gpu* gpu = open_fake();
    kmla_shape shape = {0};
    kmla_device device = card(9, 0);
    kmla_plan plan;
    kmla_decode args;
    kmla_image image;
    kmla_error error;
    (void)state;
    shape.requests = 1;
    shape.heads = 8;
    shape.capacity_tokens = 1000;
    assert_int_equal(kmla_plan_decode(&shape, NULL, &plan, &error), KMLA_OK);
    args = decode_args(&plan);
    assert_int_equal(kmla_gpu_compile(gpu, &plan, &device, NULL, &image, &error),
                     KMLA_ERROR_ARGUMENT);
    assert_contains(error.message, "host reader");
    assert_int_equal(kmla_gpu_prepare(gpu, &plan, NULL, &error), KMLA_ERROR_ARGUMENT);
    assert_int_equal(kmla_gpu_decode(gpu, &plan, &args, NULL, &error), KMLA_ERROR_ARGUMENT);
    plan = plan_for(99, 1);
    plan.version -= 1;
    assert_int_equal(kmla_gpu_prepare(gpu, &plan, NULL, &error), KMLA_ERROR_ARGUMENT);
    assert_contains(error.message, "version");
    kmla_gpu_close(gpu);
}

// =============================================================================
// Prepare
// =============================================================================

static void test_device(void** state) {
    kmla_gpu* gpu = open_fake();
    kmla_device device;
    kmla_error error;
    (void)state;
    assert_int_equal(kmla_gpu_device(gpu, &device, &error), KMLA_OK);
    assert_int_equal(device.compute_major, 9);
    assert_int_equal(device.compute_minor, 0);
    assert_int_equal(device.multiprocessors, 132);
    assert_int_equal(device.shared_bytes, 232448);
    assert_int_equal(device.shared_bytes_sm, 233472);
    fake->context = NULL;
    memset(&device, 0x5A, sizeof device);
    assert_int_equal(kmla_gpu_device(gpu, &device, &error), KMLA_ERROR_CONTEXT);
    assert_int_equal(device.compute_major, 0x5A5A5A5A);
    kmla_gpu_close(gpu);
}

static void test_prepare_once(void** state) {
    kmla_gpu* gpu = open_fake();
    kmla_plan plan = plan_for(99, 4), other = plan_for(4, 1);
    (void)state;
    assert_int_not_equal(kmla_plan_variant(&plan), kmla_plan_variant(&other));
    assert_int_equal(kmla_gpu_prepare(gpu, NULL, NULL, NULL), KMLA_OK);
    assert_int_equal(fake->modules_loaded, 1);
    assert_int_equal(fake->functions_loaded, 4); // resolved now: a capture must find them loaded
    assert_int_equal(kmla_gpu_prepare(gpu, &plan, NULL, NULL), KMLA_OK);
    assert_int_equal(fake->modules_loaded, 2);
    assert_int_equal(fake->functions_loaded, 5);
    assert_int_equal(fake->dynamic_shared_bytes, plan.shared_bytes);
    assert_int_equal(kmla_gpu_prepare(gpu, &plan, NULL, NULL), KMLA_OK);
    assert_int_equal(kmla_gpu_prepare(gpu, NULL, NULL, NULL), KMLA_OK);
    assert_int_equal(fake->modules_loaded, 2);
    assert_int_equal(fake->compiles, 2);
    assert_int_equal(kmla_gpu_prepare(gpu, &other, NULL, NULL), KMLA_OK);
    assert_int_equal(fake->modules_loaded, 3);
    kmla_gpu_close(gpu);
    assert_int_equal(fake->modules_unloaded, 3);
}

static void test_contexts(void** state) {
    kmla_gpu* gpu = open_fake();
    kmla_plan plan = plan_for(99, 1);
    kmla_decode args = decode_args(&plan);
    kmla_error error;
    (void)state;
    fake->context = NULL;
    assert_int_equal(kmla_gpu_prepare(gpu, &plan, NULL, &error), KMLA_ERROR_CONTEXT);
    assert_int_equal(kmla_gpu_decode(gpu, &plan, &args, NULL, &error), KMLA_ERROR_CONTEXT);
    fake->context = &context_a;
    assert_int_equal(kmla_gpu_prepare(gpu, &plan, NULL, &error), KMLA_OK);
    fake->context = &context_b;
    assert_int_equal(kmla_gpu_prepare(gpu, &plan, NULL, &error), KMLA_ERROR_CONTEXT);
    assert_int_equal(kmla_gpu_decode(gpu, &plan, &args, NULL, &error), KMLA_ERROR_CONTEXT);
    assert_int_equal(fake->launch_count, 0);
    fake->context = NULL;
    assert_int_equal(kmla_gpu_decode(gpu, &plan, &args, NULL, &error), KMLA_ERROR_CONTEXT);
    fake->failing_call = "cuCtxGetCurrent"; // a forked child's answer
    fake->failing_result = 3;
    assert_int_equal(kmla_gpu_decode(gpu, &plan, &args, NULL, &error), KMLA_ERROR_CUDA);
    assert_int_equal(error.cuda_result, 3);
    fake->failing_call = NULL;
    fake->context = &context_a;
    assert_int_equal(kmla_gpu_decode(gpu, &plan, &args, NULL, &error), KMLA_OK);
    kmla_gpu_close(gpu);
}

// The modules die with their context: closing later must not touch them.
static void test_close_after_the_context(void** state) {
    kmla_gpu* gpu = open_fake();
    (void)state;
    assert_int_equal(kmla_gpu_prepare(gpu, NULL, NULL, NULL), KMLA_OK);
    fake->failing_call = "cuCtxPushCurrent_v2";
    fake->failing_result = 201;
    kmla_gpu_close(gpu);
    assert_int_equal(fake->modules_unloaded, 0);

    reset_fake(NULL);
    gpu = open_fake();
    assert_int_equal(kmla_gpu_prepare(gpu, NULL, NULL, NULL), KMLA_OK);
    context_a.id = 9; // another context at the same address
    kmla_gpu_close(gpu);
    assert_int_equal(fake->modules_unloaded, 0);
}

static void test_images(void** state) {
    kmla_gpu* gpu = open_fake();
    kmla_device ampere = card(8, 0), hopper = card(9, 0);
    kmla_plan plan = plan_for(99, 1), other = plan_for(4, 1), portable = plan_on(ampere, 99, 1);
    kmla_image support, reader, foreign, empty = {0};
    kmla_error error;
    (void)state;
    assert_int_equal(kmla_gpu_compile(gpu, NULL, &hopper, NULL, &support, NULL), KMLA_OK);
    assert_int_equal(kmla_gpu_compile(gpu, &plan, &hopper, NULL, &reader, NULL), KMLA_OK);
    assert_int_equal(kmla_gpu_compile(gpu, &portable, &ampere, NULL, &foreign, NULL), KMLA_OK);
    fake->compiles = 0;

    assert_int_equal(kmla_gpu_prepare(gpu, NULL, &empty, &error), KMLA_ERROR_ARGUMENT);
    assert_int_equal(kmla_gpu_prepare(gpu, NULL, &reader, &error), KMLA_ERROR_ARGUMENT);
    assert_int_equal(kmla_gpu_prepare(gpu, NULL, &support, &error), KMLA_OK);
    assert_int_equal(kmla_gpu_prepare(gpu, &portable, &foreign, &error),
                     KMLA_ERROR_ARCHITECTURE);
    assert_contains(error.message, "8.0");
    assert_contains(error.message, "9.0");
    assert_int_equal(kmla_gpu_prepare(gpu, &other, &reader, &error), KMLA_ERROR_ARGUMENT);
    assert_contains(error.message, "variant");
    assert_int_equal(kmla_gpu_prepare(gpu, &plan, &reader, &error), KMLA_OK);
    assert_int_equal(fake->compiles, 0);
    kmla_image_free(&support);
    kmla_image_free(&reader);
    kmla_image_free(&foreign);
    kmla_gpu_close(gpu);
}

static void test_too_little_shared_memory(void** state) { // WS-04
    kmla_gpu* gpu = open_fake();
    kmla_plan plan = plan_for(99, 1);
    kmla_error error;
    char number[16];
    (void)state;
    fake->devices[0].shared_bytes = plan.shared_bytes - 1;
    assert_int_equal(kmla_gpu_prepare(gpu, &plan, NULL, &error), KMLA_ERROR_UNSUPPORTED);
    snprintf(number, sizeof number, "%d", (int)plan.shared_bytes);
    assert_contains(error.message, number);
    snprintf(number, sizeof number, "%d", (int)plan.shared_bytes - 1);
    assert_contains(error.message, number);
    fake->devices[0].shared_bytes = plan.shared_bytes;
    assert_int_equal(kmla_gpu_prepare(gpu, &plan, NULL, &error), KMLA_OK);
    kmla_gpu_close(gpu);
}

// =============================================================================
// Launches
// =============================================================================

static void test_not_prepared(void** state) { // CG-05
    kmla_gpu* gpu = open_fake();
    kmla_plan plan = plan_for(99, 1), other = plan_for(4, 1);
    kmla_decode args = decode_args(&other);
    kmla_error error;
    (void)state;
    fake->capturing = 1;
    assert_int_equal(kmla_gpu_decode(gpu, &other, &args, NULL, &error), KMLA_ERROR_NOT_PREPARED);
    fake->capturing = 0;
    assert_int_equal(kmla_gpu_prepare(gpu, &plan, NULL, NULL), KMLA_OK);
    fake->capturing = 1;
    assert_int_equal(kmla_gpu_decode(gpu, &other, &args, NULL, &error), KMLA_ERROR_NOT_PREPARED);
    assert_contains(error.message, "kmla_gpu_prepare");
    assert_int_equal(fake->launch_count, 0);
    assert_int_equal(fake->synchronisations, 0);
    kmla_gpu_close(gpu);
}

static void test_one_split(void** state) {
    kmla_gpu* gpu = open_fake();
    kmla_plan plan = plan_for(99, 1);
    kmla_decode args = decode_args(&plan);
    const fake_launch* reader = &fake->launches[0];
    struct kmla_i_reader_args sent;
    (void)state;
    assert_int_equal(kmla_gpu_prepare(gpu, &plan, NULL, NULL), KMLA_OK);
    assert_int_equal(kmla_gpu_decode(gpu, &plan, &args, &context_b, NULL), KMLA_OK);
    assert_int_equal(fake->launch_count, 1);
    assert_string_equal(reader->kernel, "kmla_reader");
    assert_int_equal(reader->grid[0], plan.tiles_per_request);
    assert_int_equal(reader->grid[1], 1);
    assert_int_equal(reader->grid[2], 2);
    assert_int_equal(reader->threads, plan.threads);
    assert_int_equal(reader->shared_bytes, plan.shared_bytes);
    assert_ptr_equal(reader->stream, &context_b);
    memcpy(&sent, reader->args, sizeof sent);
    assert_int_equal(sent.query, args.query);
    assert_int_equal(sent.kv, args.kv);
    assert_int_equal(sent.table, args.block_table);
    assert_int_equal(sent.lengths, args.lengths);
    assert_int_equal(sent.out, args.out);
    assert_int_equal(sent.lse, args.lse);
    assert_int_equal(sent.part_out, 0);
    assert_int_equal(sent.query_head_stride, KMLA_BF16_BYTES);
    assert_int_equal(sent.query_row_stride, 99 * KMLA_BF16_BYTES);
    assert_int_equal(sent.page_pitch, 64 * KMLA_PACKED_BYTES);
    assert_int_equal(sent.table_stride, 16);
    assert_int_equal(sent.out_row_stride, 99 * 512);
    assert_int_equal(sent.rows, 6);
    assert_int_equal(sent.rows_per_group, 3);
    assert_int_equal(sent.groups, 2);
    assert_int_equal(sent.heads, 99);
    assert_int_equal(sent.capacity, 1000);
    assert_true(sent.kv_scale == 1.0f); // packed records carry their own
    assert_true(sent.score_scale == 0.0721688f * 1.44269504f);
    assert_int_equal(fake->copies + fake->synchronisations, 0);
    kmla_gpu_close(gpu);
}

static void test_splits_and_merge(void** state) {
    kmla_plan plan = plan_for(99, 4);
    kmla_decode args = decode_args(&plan);
    const fake_launch *reader = &fake->launches[0], *merge = &fake->launches[1];
    struct kmla_i_reader_args read;
    struct kmla_i_combine_args merged;
    const uint64_t part_lse = args.workspace + (uint64_t)4 * 6 * 99 * 512 * 2;
    kmla_gpu* gpu = open_fake();
    (void)state;
    assert_int_equal(kmla_gpu_prepare(gpu, &plan, NULL, NULL), KMLA_OK);
    assert_int_equal(kmla_gpu_decode(gpu, &plan, &args, NULL, NULL), KMLA_OK);
    assert_int_equal(fake->launch_count, 2);
    assert_int_equal(plan.launches, 2);
    memcpy(&read, reader->args, sizeof read);
    memcpy(&merged, merge->args, sizeof merged);
    assert_int_equal(reader->grid[1], 4);
    assert_int_equal(reader->programmatic, 0);
    assert_int_equal(read.part_out, args.workspace);
    assert_int_equal(read.part_lse, part_lse);
    assert_int_equal(part_lse + 4 * 6 * 99 * 4, args.workspace + plan.workspace_bytes);
    assert_string_equal(merge->kernel, "kmla_merge");
    assert_int_equal(merge->grid[0], 99);
    assert_int_equal(merge->grid[1], 6);
    assert_int_equal(merge->grid[2], 1);
    assert_int_equal(merge->threads, KMLA_I_SUPPORT_THREADS);
    assert_int_equal(merge->programmatic, 1);
    assert_int_equal(merged.parts, 4);
    assert_int_equal(merged.part_out, args.workspace);
    assert_int_equal(merged.part_lse, part_lse);
    assert_int_equal(merged.part_out_stride, 6 * 99 * 512);
    assert_int_equal(merged.part_lse_stride, 6 * 99);
    assert_int_equal(merged.part_type, KMLA_BF16);
    assert_int_equal(merged.out, args.out);
    assert_int_equal(merged.lse, args.lse);
    kmla_gpu_close(gpu);

    // Older cards and drivers: a plain launch.
    reset_fake(NULL);
    fake->driver_version = 12020;
    gpu = open_fake();
    assert_int_equal(kmla_gpu_prepare(gpu, &plan, NULL, NULL), KMLA_OK);
    assert_int_equal(kmla_gpu_decode(gpu, &plan, &args, NULL, NULL), KMLA_OK);
    assert_int_equal(merge->programmatic, 0);
    assert_int_equal(merge->grid[0], 99);
    kmla_gpu_close(gpu);

    reset_fake(NULL);
    fake->devices[0].compute_major = 8;
    gpu = open_fake();
    assert_int_equal(kmla_gpu_prepare(gpu, &plan, NULL, NULL), KMLA_ERROR_ARCHITECTURE);
    plan = plan_on(card(8, 0), 99, 4);
    assert_int_equal(kmla_gpu_prepare(gpu, &plan, NULL, NULL), KMLA_OK);
    assert_int_equal(kmla_gpu_decode(gpu, &plan, &args, NULL, NULL), KMLA_OK);
    assert_int_equal(merge->programmatic, 0);
    kmla_gpu_close(gpu);
}

// A tensor's scale goes into the one scale of the scores; that of the KV is the values' too.
static void test_tensor_scales(void** state) {
    kmla_gpu* gpu = open_fake();
    kmla_shape shape = {0};
    kmla_device device = card(9, 0);
    kmla_plan plan;
    kmla_decode args;
    struct kmla_i_reader_args sent;
    (void)state;
    shape.requests = 1;
    shape.heads = 8;
    shape.capacity_tokens = 1000;
    shape.splits = 1;
    shape.kv_format = KMLA_KV_E4M3;
    shape.query_format = KMLA_QUERY_E4M3;
    assert_int_equal(kmla_plan_decode(&shape, &device, &plan, NULL), KMLA_OK);
    args = decode_args(&plan);
    args.scale = 1.0f;
    args.kv_scale = 0.5f;
    args.query_scale = 8.0f;
    assert_int_equal(kmla_gpu_prepare(gpu, &plan, NULL, NULL), KMLA_OK);
    assert_int_equal(kmla_gpu_decode(gpu, &plan, &args, NULL, NULL), KMLA_OK);
    memcpy(&sent, fake->launches[0].args, sizeof sent);
    assert_true(sent.kv_scale == 0.5f);
    assert_true(sent.score_scale == 1.44269504f * 4);
    kmla_gpu_close(gpu);
}

static void test_bad_arguments_launch_nothing(void** state) {
    kmla_gpu* gpu = open_fake();
    kmla_plan plan = plan_for(99, 4);
    kmla_decode args = decode_args(&plan);
    kmla_error error;
    (void)state;
    assert_int_equal(kmla_gpu_prepare(gpu, &plan, NULL, NULL), KMLA_OK);
    args.workspace_bytes -= 1;
    assert_int_equal(kmla_gpu_decode(gpu, &plan, &args, NULL, &error), KMLA_ERROR_WORKSPACE);
    args = decode_args(&plan);
    args.kv += 8;
    assert_int_equal(kmla_gpu_decode(gpu, &plan, &args, NULL, &error), KMLA_ERROR_ARGUMENT);
    assert_contains(error.message, "kv");
    assert_int_equal(fake->launch_count, 0);
    args.kv -= 8;
    fake->failing_call = "cuLaunchKernel";
    fake->failing_result = 719;
    assert_int_equal(kmla_gpu_decode(gpu, &plan, &args, NULL, &error), KMLA_ERROR_CUDA);
    assert_int_equal(error.cuda_result, 719);
    kmla_gpu_close(gpu);
}

static void test_checking_mode(void** state) {
    kmla_gpu* gpu = open_fake();
    kmla_plan plan = plan_for(99, 1);
    kmla_decode args = decode_args(&plan);
    int32_t table[2 * 20]; // 16 entries a request, 20 from one to the next
    int32_t lengths[6] = {100, 100, 100, 1000, 1000, 1000};
    kmla_error error;
    int i;
    (void)state;
    for (i = 0; i < 40; ++i) {
        table[i] = i % 20 < 16 ? i % 40 : 1 << 30; // gaps are nobody's
    }
    args.block_table = (uint64_t)(uintptr_t)table;
    args.block_table_stride = 20;
    args.lengths = (uint64_t)(uintptr_t)lengths;
    args.check_pages = 1;
    assert_int_equal(kmla_gpu_prepare(gpu, &plan, NULL, NULL), KMLA_OK);
    assert_int_equal(kmla_gpu_decode(gpu, &plan, &args, NULL, &error), KMLA_OK);
    assert_int_equal(fake->launch_count, 1);
    assert_true(fake->synchronisations >= 1);

    table[2] = 40; // row 0's 100 tokens end before it
    assert_int_equal(kmla_gpu_decode(gpu, &plan, &args, NULL, &error), KMLA_OK);
    table[20 + 15] = 40; // tokens 960.. of the second request
    assert_int_equal(kmla_gpu_decode(gpu, &plan, &args, NULL, &error), KMLA_ERROR_PAGE);
    assert_contains(error.message, "40");
    assert_int_equal(fake->launch_count, 2);

    args.check_pages = 0; // not looked at
    assert_int_equal(kmla_gpu_decode(gpu, &plan, &args, NULL, &error), KMLA_OK);
    args.check_pages = 1;
    fake->capturing = 1;
    fake->copies = 0;
    assert_int_equal(kmla_gpu_decode(gpu, &plan, &args, NULL, &error), KMLA_ERROR_CAPTURE);
    fake->capturing = 0;
    fake->failing_call = "cuStreamIsCapturing"; // the legacy stream while another is captured
    fake->failing_result = 906;
    assert_int_equal(kmla_gpu_decode(gpu, &plan, &args, NULL, &error), KMLA_ERROR_CAPTURE);
    assert_int_equal(fake->copies, 0);
    fake->failing_call = "cuMemcpyDtoHAsync_v2";
    fake->failing_result = 1;
    assert_int_equal(kmla_gpu_decode(gpu, &plan, &args, NULL, &error), KMLA_ERROR_CUDA);
    assert_int_equal(fake->launch_count, 3);
    kmla_gpu_close(gpu);
}

static void test_support_launches(void** state) {
    kmla_gpu* gpu = open_fake();
    kmla_combine combine = {0};
    kmla_kv_write kv = {0};
    kmla_query_write query = {0};
    struct kmla_i_combine_args combine_sent;
    struct kmla_i_kv_write_args kv_sent;
    struct kmla_i_query_write_args query_sent;
    (void)state;
    combine.parts = 9;
    combine.rows = 4;
    combine.heads = 11;
    combine.part_out = 0x10000000;
    combine.part_lse = 0x20000000;
    combine.out = 0x30000000;
    kv.tokens = 5;
    kv.kv_format = KMLA_KV_E4M3;
    kv.kv_scale = 0.5f;
    kv.latent = 0x10000000;
    kv.rope = 0x20000000;
    kv.slots = 0x30000000;
    kv.kv = 0x40000000;
    kv.kv_pages = 3;
    query.rows = 3;
    query.heads = 3;
    query.query_format = KMLA_QUERY_PACKED;
    query.source_type = KMLA_FP32;
    query.source = 0x10000000;
    query.query = 0x20000000;

    assert_int_equal(kmla_gpu_combine(gpu, &combine, NULL, NULL), KMLA_ERROR_NOT_PREPARED);
    assert_int_equal(kmla_gpu_write_kv(gpu, &kv, NULL, NULL), KMLA_ERROR_NOT_PREPARED);
    assert_int_equal(kmla_gpu_write_query(gpu, &query, NULL, NULL), KMLA_ERROR_NOT_PREPARED);
    assert_int_equal(kmla_gpu_prepare(gpu, NULL, NULL, NULL), KMLA_OK);
    assert_int_equal(kmla_gpu_combine(gpu, &combine, NULL, NULL), KMLA_OK);
    assert_int_equal(kmla_gpu_write_kv(gpu, &kv, NULL, NULL), KMLA_OK);
    assert_int_equal(kmla_gpu_write_query(gpu, &query, NULL, NULL), KMLA_OK);

    assert_int_equal(fake->launch_count, 3);
    assert_string_equal(fake->launches[0].kernel, "kmla_combine");
    assert_int_equal(fake->launches[0].grid[0], 11);
    assert_int_equal(fake->launches[0].grid[1], 4);
    assert_int_equal(fake->launches[0].programmatic, 0);
    memcpy(&combine_sent, fake->launches[0].args, sizeof combine_sent);
    assert_int_equal(combine_sent.parts, 9);
    assert_int_equal(combine_sent.part_out_stride, 4 * 11 * 512);
    assert_int_equal(combine_sent.part_lse_stride, 4 * 11);
    assert_int_equal(combine_sent.lse, 0);

    assert_string_equal(fake->launches[1].kernel, "kmla_write_kv");
    assert_int_equal(fake->launches[1].grid[0], 2); // 5 tokens, 4 warps a block
    memcpy(&kv_sent, fake->launches[1].args, sizeof kv_sent);
    assert_int_equal(kv_sent.kv_slots, 3 * 64);
    assert_int_equal(kv_sent.page_pitch, 64 * KMLA_E4M3_BYTES);
    assert_int_equal(kv_sent.latent_stride, 512);
    assert_int_equal(kv_sent.rope_stride, 64);
    assert_true(kv_sent.kv_scale == 0.5f);

    assert_string_equal(fake->launches[2].kernel, "kmla_write_query");
    assert_int_equal(fake->launches[2].grid[0], 3); // 9 vectors
    memcpy(&query_sent, fake->launches[2].args, sizeof query_sent);
    assert_int_equal(query_sent.source_head_stride, 576);
    assert_int_equal(query_sent.query_row_stride, 3 * KMLA_PACKED_BYTES);
    assert_true(query_sent.query_scale == 1.0f);
    kmla_gpu_close(gpu);
}

// =============================================================================
// Device source
// =============================================================================

static void test_device_parts(void** state) {
    const kmla_i_device_part* parts;
    size_t count = kmla_i_device_part_list(&parts), i;
    int32_t next_line = 1;
    (void)state;
    assert_true(count >= 6);
    for (i = 0; i < count; ++i) {
        const char* c = parts[i].text;
        size_t length = strlen(c);
        assert_true(length > 0 && length < 4000);
        assert_int_equal(c[length - 1], '\n'); // whole lines
        if (i > 0 && strcmp(parts[i].file, parts[i - 1].file) != 0) {
            next_line = 1;
        }
        assert_int_equal(parts[i].first_line, next_line);
        for (; *c; ++c) {
            next_line += *c == '\n';
        }
    }
    assert_true(sizeof kmla_i_device_facts < 4000 && sizeof kmla_i_device_structs < 4000);
}

static void test_device_source_sizes(void** state) {
    size_t bytes = 0, need;
    char* text;
    kmla_error error;
    (void)state;
    assert_int_equal(kmla_device_source(NULL, NULL, &error), KMLA_ERROR_ARGUMENT);
    assert_int_equal(kmla_device_source(NULL, &bytes, &error), KMLA_OK);
    need = bytes;
    assert_true(need > 10000);
    text = (char*)malloc(need); // exactly: the sanitizer sees a byte too many
    assert_non_null(text);
    text[0] = '!';
    bytes = need - 1;
    assert_int_equal(kmla_device_source(text, &bytes, &error), KMLA_ERROR_ARGUMENT);
    assert_int_equal(bytes, need);
    assert_int_equal(text[0], '!');
    assert_int_equal(kmla_device_source(text, &bytes, &error), KMLA_OK);
    assert_int_equal(strlen(text) + 1, need);
    assert_int_equal(strncmp(text, "#define KMLA_LATENT_DIMS 512\n", 29), 0);
    assert_contains(text, "struct kmla_i_reader_args");
    assert_contains(text, "#line 1 \"instructions.cuh\"\n");
    assert_contains(text, "#line 1 \"tile.cuh\"\n");
    assert_contains(text, "#line 1 \"reader.cuh\"\n");
    assert_contains(text, "#line 1 \"hopper.cuh\"\n");
    assert_contains(text, "#line 1 \"writers.cuh\"\n");
    assert_null(strstr(text, "#include"));
    free(text);
}

// The reader's own sum of shared memory differs: a fault that is named by file and line.
static void expect_fault(kmla_gpu* gpu, kmla_device device, const char* place) {
    kmla_plan plan = plan_on(device, 99, 1);
    kmla_image image;
    kmla_error error;
    plan.shared_bytes += 16;
    assert_int_equal(kmla_gpu_compile(gpu, &plan, &device, NULL, &image, &error),
                     KMLA_ERROR_COMPILE);
    assert_contains(error.message, place);
}

// With the machine's NVRTC: the writers and combine compile, and faults of the readers do not.
static void test_real_nvrtc(void** state) {
    kmla_gpu_desc desc = {0};
    kmla_gpu* gpu;
    kmla_device device = card(9, 0);
    kmla_image image;
    kmla_error error;
    (void)state;
    desc.without_cuda = 1;
    if (kmla_gpu_open(&desc, &gpu, &error) != KMLA_OK) {
        print_message("no NVRTC here: %s\n", error.message);
        skip();
    }
    assert_int_equal(kmla_gpu_compile(gpu, NULL, &device, NULL, &image, &error), KMLA_OK);
    assert_memory_equal((const char*)image.data + KMLA_I_IMAGE_HEAD_BYTES, "\177ELF", 4);
    kmla_image_free(&image);
    expect_fault(gpu, card(8, 0), "reader.cuh(");
    expect_fault(gpu, card(9, 0), "hopper.cuh(");
    kmla_gpu_close(gpu);
}

#define TEST(name) cmocka_unit_test_setup(name, reset_fake)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(test_null_arguments),
        TEST(test_objects_without_a_library),
        TEST(test_unknown_architecture),
        TEST(test_refused_source),
        TEST(test_options_and_image),
        TEST(test_hopper_options),
        TEST(test_host_plans_are_refused),
        TEST(test_device),
        TEST(test_prepare_once),
        TEST(test_contexts),
        TEST(test_close_after_the_context),
        TEST(test_images),
        TEST(test_too_little_shared_memory),
        TEST(test_not_prepared),
        TEST(test_one_split),
        TEST(test_splits_and_merge),
        TEST(test_tensor_scales),
        TEST(test_bad_arguments_launch_nothing),
        TEST(test_checking_mode),
        TEST(test_support_launches),
        TEST(test_device_parts),
        TEST(test_device_source_sizes),
        TEST(test_real_nvrtc),
    };
    return cmocka_run_group_tests_name("GPU side without a GPU", tests, NULL, NULL);
}
