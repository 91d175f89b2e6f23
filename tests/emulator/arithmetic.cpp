// Conversions and matrix instructions, by the PTX manual. Real tensor cores add the 16 products of
// an mma in another order and with truncation: results agree within rounding only. Products are
// exact here as there.

#include "emulator.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

namespace emulator {

static uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

// =============================================================================
// Numbers
// =============================================================================

float f16_to_float(unsigned bits) {
    uint32_t sign = (bits & 0x8000u) << 16;
    uint32_t magnitude = (bits & 0x7fffu) << 13;
    if ((bits & 0x7c00u) == 0x7c00u) { // infinity or NaN
        return float_of(sign | 0x7f800000u | magnitude);
    }
    // The exponent's bias is 112 less; the product also normalises subnormals.
    return float_of(sign | bits_of(float_of(magnitude) * 0x1p112f));
}

float bf16_to_float(unsigned bits) { return float_of(bits << 16); }

unsigned float_to_f16(float value) {
    unsigned sign = bits_of(value) >> 16 & 0x8000u;
    float magnitude = fabsf(value);
    if (isnan(value)) {
        return 0x7fff;
    }
    if (magnitude >= 65520.0f) { // halfway to the number after 65504
        return sign | 0x7c00u;
    }
    if (magnitude < 0x1p-14f) { // steps of 2^-24; adding 0.5 leaves 24 bits, so it rounds there
        return sign | (bits_of(magnitude + 0.5f) - bits_of(0.5f));
    }
    uint32_t bits = bits_of(magnitude);
    bits += 0xfffu + (bits >> 13 & 1); // nearest even at bit 13
    return sign | ((bits >> 13) - (112u << 10));
}

unsigned float_to_bf16(float value) {
    if (isnan(value)) {
        return 0x7fff;
    }
    uint32_t bits = bits_of(value);
    return (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
}

unsigned e4m3_to_f16(unsigned code) {
    if ((code & 0x7f) == 0x7f) {
        return 0x7fff;
    }
    int exponent = code >> 3 & 15;
    int mantissa = code & 7;
    float value =
        exponent ? ldexpf((float)(8 + mantissa), exponent - 10) : ldexpf((float)mantissa, -9);
    return float_to_f16(code & 0x80 ? -value : value);
}

unsigned multiply_f16(unsigned a, unsigned b) {
    return float_to_f16(f16_to_float(a) * f16_to_float(b)); // the fp32 product is exact
}

unsigned minimum_f16(unsigned a, unsigned b) {
    float x = f16_to_float(a), y = f16_to_float(b);
    if (isnan(x)) {
        return isnan(y) ? 0x7fff : b;
    }
    if (isnan(y) || x < y || (x == y && (a & 0x8000u))) {
        return a;
    }
    return b;
}

static float flush_subnormal(float value) {
    return fabsf(value) < 0x1p-126f ? copysignf(0.0f, value) : value;
}

float exp2_ftz(float value) { return flush_subnormal(exp2f(flush_subnormal(value))); }

float log2_any(float value) { return log2f(value); }

// =============================================================================
// Matrices
// =============================================================================

typedef float float8 __attribute__((vector_size(32)));

// Fragments: lane = 4 * group + pair. a[i]: row group + 8 (i % 2), columns 2 pair + 8 (i / 2) and
// the next; b[i]: rows 2 pair + 8 i and the next, column group; d[i]: row group + 8 (i / 2),
// column 2 pair + i % 2.
template <float (*convert)(unsigned)> static void mma(void* const operands[32]) {
    float a[16][16];
    float8 b[16], d[16];
    for (int lane = 0; lane < 32; ++lane) {
        const mma_operand* mine = (const mma_operand*)operands[lane];
        int group = lane / 4, column = lane % 4 * 2;
        for (int i = 0; i < 4; ++i) {
            a[group + i % 2 * 8][column + i / 2 * 8] = convert(mine->a[i] & 0xffff);
            a[group + i % 2 * 8][column + i / 2 * 8 + 1] = convert(mine->a[i] >> 16);
            d[group + i / 2 * 8][column + i % 2] = mine->d[i];
        }
        for (int i = 0; i < 2; ++i) {
            b[column + i * 8][group] = convert(mine->b[i] & 0xffff);
            b[column + i * 8 + 1][group] = convert(mine->b[i] >> 16);
        }
    }
    for (int row = 0; row < 16; ++row) {
        for (int k = 0; k < 16; ++k) {
            d[row] += a[row][k] * b[k];
        }
    }
    for (int lane = 0; lane < 32; ++lane) {
        const mma_operand* mine = (const mma_operand*)operands[lane];
        for (int i = 0; i < 4; ++i) {
            mine->d[i] = d[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
        }
    }
}

void mma_f16(void* const operands[32]) { mma<f16_to_float>(operands); }

void mma_bf16(void* const operands[32]) { mma<bf16_to_float>(operands); }

// Element of a matrix's row, whose address a lane gave.
static uint16_t* element(void* const operands[32], void* row_of(void* operand), int matrix, int row,
                         int column) {
    return (uint16_t*)row_of(operands[matrix * 8 + row]) + column;
}

// Lane gets elements 2 (lane % 4) and the next of row lane / 4, or transposed of that column, of
// each matrix.
static void load_matrix(void* const operands[32], bool transposed) {
    unsigned result[32][4];
    for (int i = 0; i < 32 * 4 * 2; ++i) {
        int lane = i / 8, matrix = i / 2 % 4, half = i % 2;
        int row = transposed ? lane % 4 * 2 + half : lane / 4;
        int column = transposed ? lane / 4 : lane % 4 * 2 + half;
        uint16_t* from = element(
            operands, [](void* its) { return (void*)((load_matrix_operand*)its)->row; }, matrix,
            row, column);
        memcpy((uint16_t*)&result[lane][matrix] + half, from, 2);
        note_read(from, 2, here.thread / 32 * 32 + lane);
    }
    for (int lane = 0; lane < 32; ++lane) {
        memcpy(((load_matrix_operand*)operands[lane])->result, result[lane], 16);
    }
}

void load_matrix_x4(void* const operands[32]) { load_matrix(operands, false); }

void load_matrix_x4_transposed(void* const operands[32]) { load_matrix(operands, true); }

// Lane's pair i is elements 2 (lane % 4) and the next of *column* lane / 4 of matrix i.
void store_matrix_transposed(void* const operands[32]) {
    int matrices = ((const store_matrix_operand*)operands[0])->matrices;
    for (int i = 0; i < 32 * matrices * 2; ++i) {
        int lane = i / (2 * matrices), matrix = i / 2 % matrices, half = i % 2;
        uint16_t* to = element(
            operands, [](void* its) { return ((store_matrix_operand*)its)->row; }, matrix,
            lane % 4 * 2 + half, lane / 4);
        *to = (uint16_t)(((store_matrix_operand*)operands[lane])->pairs[matrix] >> half * 16);
        note_write(to, 2, here.thread / 32 * 32 + lane);
    }
}

// A's and D's fragments are those of mma, for each 8 columns.
template <float (*convert)(unsigned)>
static void multiply_rows(int count, const unsigned (*a_pairs)[4], const unsigned char* b_rows,
                          float* d_lanes) {
    float a[16][16];
    for (int lane = 0; lane < 32; ++lane) {
        int group = lane / 4, column = lane % 4 * 2;
        for (int i = 0; i < 4; ++i) {
            a[group + i % 2 * 8][column + i / 2 * 8] = convert(a_pairs[lane][i] & 0xffff);
            a[group + i % 2 * 8][column + i / 2 * 8 + 1] = convert(a_pairs[lane][i] >> 16);
        }
    }
    for (int j = 0; j < count / 4; ++j) { // columns 8 j and on
        float8 b[16], d[16];
        for (int n = 0; n < 8; ++n) {
            for (int k = 0; k < 16; ++k) {
                uint16_t bits;
                memcpy(&bits, b_rows + ((j * 8 + n) * 16 + k) * 2, 2);
                b[k][n] = convert(bits);
            }
        }
        for (int i = 0; i < 128; ++i) { // register 4 j + i % 4 of lane i / 4
            d[i / 16 + i / 2 % 2 * 8][i / 4 % 4 * 2 + i % 2] =
                d_lanes[i / 4 * count + 4 * j + i % 4];
        }
        for (int row = 0; row < 16; ++row) {
            for (int k = 0; k < 16; ++k) {
                d[row] += a[row][k] * b[k];
            }
        }
        for (int i = 0; i < 128; ++i) {
            d_lanes[i / 4 * count + 4 * j + i % 4] =
                d[i / 16 + i / 2 % 2 * 8][i / 4 % 4 * 2 + i % 2];
        }
    }
}

void wgmma_multiply(const wgmma_operand lanes[32], const unsigned (*a)[4], const unsigned char* b,
                    float* d) {
    if (lanes[0].bf16) {
        multiply_rows<bf16_to_float>(lanes[0].count, a, b, d);
    } else {
        multiply_rows<f16_to_float>(lanes[0].count, a, b, d);
    }
}

} // namespace emulator
