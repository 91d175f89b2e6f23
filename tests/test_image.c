// Images as files: what is cut off, damaged, or of another header, plan or card is refused by name
// before the driver sees it. The fake libraries (fake_libraries.c) stand for driver and NVRTC.

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#define KIMI_MLA_IMPLEMENTATION
#include "../kimi_mla.h"

#include "with_fake.h"

// The head's layout, written down a second time: a change of it breaks images that are on disk.
enum {
    AT_MAGIC = 0,
    AT_VERSION = 8,
    AT_VARIANT = 12,
    AT_MAJOR = 16,
    AT_MINOR = 20,
    AT_SUFFIX = 24,
    AT_SHARED_BYTES = 28,
    AT_RESIDENT = 32,
    AT_STAGES = 36,
    AT_SOURCE = 40,
    AT_CUBIN_BYTES = 48,
    AT_CHECKSUM = 56,
    HEAD_BYTES = 64,
    CUBIN_BYTES = 6 // of the fake NVRTC
};

static kmla_gpu* gpu;
static kmla_plan plan;    // on an H200, by the Hopper reader
static kmla_image reader; // of the plan
static kmla_image support;

static kmla_plan plan_of_tile(kmla_device device, int32_t tile) {
    kmla_shape shape = {0};
    kmla_plan made;
    shape.requests = 1;
    shape.heads = 99;
    shape.capacity_tokens = 1000;
    shape.tile = tile;
    assert_int_equal(kmla_plan_decode(&shape, &device, &made, NULL), KMLA_OK);
    return made;
}

static int set_up(void** state) {
    kmla_device device = card(9, 0);
    if (reset_fake(state) != 0) {
        return 1;
    }
    gpu = open_fake();
    plan = plan_of_tile(device, 32);
    return kmla_gpu_compile(gpu, &plan, &device, NULL, &reader, NULL) != KMLA_OK ||
           kmla_gpu_compile(gpu, NULL, &device, NULL, &support, NULL) != KMLA_OK;
}

static int tear_down(void** state) {
    (void)state;
    kmla_image_free(&reader);
    kmla_image_free(&support);
    kmla_gpu_close(gpu);
    return fake->modules_loaded != fake->modules_unloaded;
}

// A copy of exactly so many bytes, so that a read past them is found.
static unsigned char* copy_of(const kmla_image* image, size_t bytes) {
    unsigned char* copy = (unsigned char*)malloc(bytes ? bytes : 1);
    assert_non_null(copy);
    memcpy(copy, image->data, bytes);
    return copy;
}

static uint64_t hash(uint64_t from, const void* data, size_t bytes) { // FNV-1a, a second time
    const unsigned char* byte = (const unsigned char*)data;
    while (bytes-- > 0) {
        from ^= *byte++;
        from *= 1099511628211u;
    }
    return from;
}

static void put(unsigned char* image, int at, uint64_t value, int bytes) {
    int i;
    for (i = 0; i < bytes; ++i) {
        image[at + i] = (unsigned char)(value >> (8 * i));
    }
}

static uint64_t get(const void* image, int at, int bytes) {
    uint64_t value = 0;
    while (bytes-- > 0) {
        value = value << 8 | ((const unsigned char*)image)[at + bytes];
    }
    return value;
}

static uint64_t checksum(const unsigned char* image, size_t bytes) {
    return hash(hash(14695981039346656037u, image, AT_CHECKSUM), image + HEAD_BYTES,
                bytes - HEAD_BYTES);
}

// Neither a way in: open refuses it, and prepare too where a program filled in kmla_image itself.
static void expect_refused(const void* data, size_t bytes, const char* why) {
    kmla_image image, own;
    kmla_error error;
    memset(&image, 0x5A, sizeof image);
    assert_int_equal(kmla_image_open(data, bytes, &image, &error), KMLA_ERROR_ARGUMENT);
    assert_contains(error.message, why);
    assert_int_equal(image.variant, 0x5A5A5A5A); // untouched
    own = support;
    own.data = (void*)data;
    own.bytes = bytes;
    assert_int_equal(kmla_gpu_prepare(gpu, NULL, &own, &error), KMLA_ERROR_ARGUMENT);
    assert_contains(error.message, why);
    assert_int_equal(fake->modules_loaded, 0);
}

// An image that is whole, but of something else.
static void expect_not_of_plan(const void* data, kmla_status status, const char* why) {
    kmla_image image;
    kmla_error error;
    int loaded = fake->modules_loaded;
    assert_int_equal(kmla_image_open(data, reader.bytes, &image, &error), KMLA_OK);
    assert_int_equal(kmla_gpu_prepare(gpu, &plan, &image, &error), status);
    assert_contains(error.message, why);
    assert_int_equal(fake->modules_loaded, loaded);
}

static void prepare_support(void) {
    assert_int_equal(kmla_gpu_prepare(gpu, NULL, &support, NULL), KMLA_OK);
}

static void test_layout(void** state) {
    const void* data = reader.data;
    (void)state;
    assert_int_equal(reader.bytes, HEAD_BYTES + CUBIN_BYTES);
    assert_memory_equal(data, "KMLA IMG", 8);
    assert_int_equal(get(data, AT_VERSION, 4), KMLA_VERSION);
    assert_int_equal(get(data, AT_VARIANT, 4), 20032);
    assert_int_equal(get(data, AT_MAJOR, 4), 9);
    assert_int_equal(get(data, AT_MINOR, 4), 0);
    assert_int_equal(get(data, AT_SUFFIX, 4), 'a');
    assert_int_equal(get(data, AT_SHARED_BYTES, 4), plan.shared_bytes);
    assert_int_equal(get(data, AT_RESIDENT, 4), plan.resident);
    assert_int_equal(get(data, AT_STAGES, 4), plan.stages);
    assert_int_equal(get(data, AT_CUBIN_BYTES, 8), CUBIN_BYTES);
    assert_true(get(data, AT_CHECKSUM, 8) == checksum((const unsigned char*)data, reader.bytes));
    assert_string_equal((const char*)data + HEAD_BYTES, "cubin");

    data = support.data;
    assert_int_equal(get(data, AT_VARIANT, 4), 0);
    assert_int_equal(get(data, AT_MAJOR, 4), 9);
    assert_int_equal(get(data, AT_SUFFIX, 4), 0);
    assert_int_equal(get(data, AT_SHARED_BYTES, 4), 0);
}

// The hash is of every byte that the compiler reads, the #line directives apart.
static void test_source_hash(void** state) {
    const kmla_i_device_part* parts;
    size_t count = kmla_i_device_part_list(&parts), i;
    uint64_t expected = 14695981039346656037u;
    (void)state;
    for (i = 0; i < count; ++i) {
        expected = hash(expected, parts[i].text, strlen(parts[i].text));
    }
    expected = hash(expected, kmla_i_device_facts, strlen(kmla_i_device_facts));
    expected = hash(expected, kmla_i_device_structs, strlen(kmla_i_device_structs));
    assert_true(get(reader.data, AT_SOURCE, 8) == expected);
    assert_true(get(support.data, AT_SOURCE, 8) == expected);
}

static void test_opened_images_load(void** state) {
    unsigned char* bytes = copy_of(&reader, reader.bytes);
    unsigned char* support_bytes = copy_of(&support, support.bytes);
    kmla_image opened, opened_support;
    (void)state;
    fake->compiles = 0;
    assert_int_equal(kmla_image_open(bytes, reader.bytes, &opened, NULL), KMLA_OK);
    assert_ptr_equal(opened.data, bytes);
    assert_int_equal(opened.bytes, reader.bytes);
    assert_int_equal(opened.variant, 20032);
    assert_int_equal(opened.compute_major, 9);
    assert_int_equal(opened.compute_minor, 0);
    assert_int_equal(opened.borrowed, 1);
    assert_int_equal(reader.borrowed, 0);
    assert_int_equal(kmla_image_open(support_bytes, support.bytes, &opened_support, NULL), KMLA_OK);
    assert_int_equal(kmla_gpu_prepare(gpu, NULL, &opened_support, NULL), KMLA_OK);
    assert_int_equal(kmla_gpu_prepare(gpu, &plan, &opened, NULL), KMLA_OK);
    assert_int_equal(fake->modules_loaded, 2);
    assert_int_equal(fake->compiles, 0);
    assert_int_equal(fake->dynamic_shared_bytes, plan.shared_bytes);
    kmla_image_free(&opened);
    kmla_image_free(&opened_support);
    assert_null(opened.data);
    assert_memory_equal(bytes, reader.data, reader.bytes); // still the caller's
    free(bytes);
    free(support_bytes);
}

static void test_null_arguments(void** state) {
    kmla_image image;
    kmla_error error;
    (void)state;
    assert_int_equal(kmla_image_open(support.data, support.bytes, NULL, &error),
                     KMLA_ERROR_ARGUMENT);
    assert_contains(error.message, "image");
    assert_int_equal(kmla_image_open(NULL, 70, &image, NULL), KMLA_ERROR_ARGUMENT);
    expect_refused(NULL, 70, "empty");
    expect_refused(support.data, 0, "empty");
}

static void test_every_length(void** state) {
    unsigned char* longer = (unsigned char*)malloc(support.bytes + 1);
    size_t bytes;
    (void)state;
    for (bytes = 1; bytes < support.bytes; ++bytes) {
        unsigned char* cut = copy_of(&support, bytes);
        expect_refused(cut, bytes, bytes < HEAD_BYTES ? "cut off" : "its head says 6");
        free(cut);
    }
    assert_non_null(longer);
    memcpy(longer, support.data, support.bytes);
    longer[support.bytes] = 0;
    expect_refused(longer, support.bytes + 1, "CUBIN of 7 bytes");
    free(longer);
    prepare_support(); // the same object takes the whole one
}

static void test_unaligned(void** state) {
    unsigned char* room = (unsigned char*)malloc(support.bytes + 1);
    (void)state;
    assert_non_null(room);
    memcpy(room + 1, support.data, support.bytes);
    expect_refused(room + 1, support.bytes, "aligned");
    free(room);
}

static const char* refusal_of_flip(size_t at) {
    return at < AT_VERSION                            ? "magic"
           : at < AT_VARIANT                          ? "version"
           : at >= AT_SOURCE && at < AT_CUBIN_BYTES   ? "another device source"
           : at >= AT_CUBIN_BYTES && at < AT_CHECKSUM ? "its head says"
                                                      : "checksum";
}

static void test_every_flipped_bit(void** state) {
    unsigned char* bytes = copy_of(&support, support.bytes);
    size_t bit;
    (void)state;
    for (bit = 0; bit < 8 * support.bytes; ++bit) {
        bytes[bit / 8] ^= (unsigned char)(1 << bit % 8);
        expect_refused(bytes, support.bytes, refusal_of_flip(bit / 8));
        bytes[bit / 8] ^= (unsigned char)(1 << bit % 8);
    }
    free(bytes);
    prepare_support();
}

// Whole images of another header: their checksums are right.
static void test_other_headers(void** state) {
    unsigned char* bytes = copy_of(&support, support.bytes);
    char number[32];
    (void)state;
    put(bytes, AT_VERSION, KMLA_VERSION + 1, 4);
    put(bytes, AT_CHECKSUM, checksum(bytes, support.bytes), 8);
    snprintf(number, sizeof number, "version %d of", KMLA_VERSION + 1);
    expect_refused(bytes, support.bytes, number);

    put(bytes, AT_VERSION, KMLA_VERSION, 4);
    put(bytes, AT_SOURCE, 0x0123456789ABCDEFu, 8);
    put(bytes, AT_CHECKSUM, checksum(bytes, support.bytes), 8);
    expect_refused(bytes, support.bytes, "0123456789abcdef");
    free(bytes);
    prepare_support();
}

static void test_other_plans_and_cards(void** state) {
    static const struct {
        int at;
        uint32_t value;
        kmla_status status;
        const char* why;
    } cases[] = {
        {AT_VARIANT, 20024, KMLA_ERROR_ARGUMENT, "variant 20024, the plan needs 20032"},
        {AT_MAJOR, 8, KMLA_ERROR_ARCHITECTURE, "capability 8.0a, the plan needs 9.0a"},
        {AT_MINOR, 1, KMLA_ERROR_ARCHITECTURE, "capability 9.1a, the plan needs 9.0a"},
        {AT_SUFFIX, 0, KMLA_ERROR_ARCHITECTURE, "capability 9.0, the plan needs 9.0a"},
        {AT_SHARED_BYTES, 4096, KMLA_ERROR_ARGUMENT, "shared_bytes 4096, resident"},
        {AT_RESIDENT, 7, KMLA_ERROR_ARGUMENT, "resident 7, "},
        {AT_STAGES, 9, KMLA_ERROR_ARGUMENT, "stages 9; "},
    };
    size_t i;
    (void)state;
    prepare_support();
    for (i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
        unsigned char* bytes = copy_of(&reader, reader.bytes);
        put(bytes, cases[i].at, cases[i].value, 4);
        put(bytes, AT_CHECKSUM, checksum(bytes, reader.bytes), 8);
        expect_not_of_plan(bytes, cases[i].status, cases[i].why);
        free(bytes);
    }
    expect_not_of_plan(support.data, KMLA_ERROR_ARGUMENT, "variant 0");
    assert_int_equal(kmla_gpu_prepare(gpu, &plan, &reader, NULL), KMLA_OK);
}

static void test_wrong_card(void** state) {
    kmla_error error;
    (void)state;
    fake->devices[0].compute_major = 12;
    assert_int_equal(kmla_gpu_prepare(gpu, NULL, &support, &error), KMLA_ERROR_ARCHITECTURE);
    assert_contains(error.message, "capability 9.0, the plan needs 12.0");
    assert_int_equal(fake->modules_loaded, 0);
    fake->devices[0].compute_major = 9;
    prepare_support();
}

// What the caller writes into the struct is no proof: the head is.
static void test_the_struct_is_not_believed(void** state) {
    kmla_image lie = support;
    kmla_error error;
    (void)state;
    prepare_support();
    lie.variant = kmla_plan_variant(&plan);
    assert_int_equal(kmla_gpu_prepare(gpu, &plan, &lie, &error), KMLA_ERROR_ARGUMENT);
    assert_contains(error.message, "variant 0");
    assert_int_equal(fake->modules_loaded, 1);
}

// sm_90a came with NVRTC 12.0; 11.8 knows sm_90 alone.
static void test_hopper_needs_nvrtc_12(void** state) {
    kmla_device device = card(9, 0);
    kmla_image image;
    kmla_error error;
    (void)state;
    kmla_gpu_close(gpu);
    fake->nvrtc_major = 11;
    fake->compiles = 0;
    gpu = open_fake();
    assert_int_equal(kmla_gpu_compile(gpu, &plan, &device, NULL, &image, &error),
                     KMLA_ERROR_ARCHITECTURE);
    assert_contains(error.message, "NVRTC 11.1");
    assert_contains(error.message, "sm_90a");
    assert_contains(error.message, "KMLA_READER_PORTABLE");
    assert_int_equal(fake->compiles, 0);
    assert_int_equal(kmla_gpu_compile(gpu, NULL, &device, NULL, &image, &error), KMLA_OK);
    kmla_image_free(&image);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(test_layout),
        TEST(test_source_hash),
        TEST(test_opened_images_load),
        TEST(test_null_arguments),
        TEST(test_every_length),
        TEST(test_unaligned),
        TEST(test_every_flipped_bit),
        TEST(test_other_headers),
        TEST(test_other_plans_and_cards),
        TEST(test_wrong_card),
        TEST(test_the_struct_is_not_believed),
        TEST(test_hopper_needs_nvrtc_12),
    };
    return cmocka_run_group_tests_name("images as files", tests, NULL, NULL);
}
