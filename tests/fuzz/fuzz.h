// fuzz.h - what the fuzz targets share: numbers out of bytes, and what they give up with.

#ifndef KMLA_TESTS_FUZZ_H
#define KMLA_TESTS_FUZZ_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes);
int LLVMFuzzerInitialize(int* count, char*** words);

// Like assert, but in every build.
#define FUZZ_CHECK(condition)                                                                    \
    do {                                                                                         \
        if (!(condition)) {                                                                      \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);              \
            abort();                                                                             \
        }                                                                                        \
    } while (0)

// =============================================================================
// Numbers out of an input's bytes; all are 0 when it is used up
// =============================================================================

typedef struct fuzz_bytes {
    const uint8_t* data;
    size_t left;
} fuzz_bytes;

static uint8_t fuzz_byte(fuzz_bytes* in) {
    if (in->left == 0) {
        return 0;
    }
    in->left--;
    return *in->data++;
}

static uint64_t fuzz_word(fuzz_bytes* in, int bytes) {
    uint64_t word = 0;
    for (int i = 0; i < bytes; i++) {
        word |= (uint64_t)fuzz_byte(in) << 8 * i;
    }
    return word;
}

// In [0, count), count up to 2^16.
static int32_t fuzz_below(fuzz_bytes* in, int32_t count) {
    return (int32_t)(fuzz_word(in, count > 256 ? 2 : 1) % (uint64_t)count);
}

// One in so many times; 0 when the input is used up.
static int fuzz_chance(fuzz_bytes* in, int32_t times) {
    return fuzz_below(in, times) == times - 1;
}

#endif // KMLA_TESTS_FUZZ_H
