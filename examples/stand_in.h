// stand_in.h - what stands for a model in the examples and the benchmark: random numbers that depend
// on a seed only, digests of results, records as numbers.

#ifndef STAND_IN_H
#define STAND_IN_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Memory, or the end of the program.
static inline void* allocate(size_t bytes) {
    void* memory = malloc(bytes ? bytes : 1);
    if (!memory) {
        fprintf(stderr, "no memory for %lu bytes\n", (unsigned long)bytes);
        exit(1);
    }
    return memory;
}

static inline uint64_t next_random(uint64_t* state) { // splitmix64
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

// Nearly normal, sigma 1: the sum of four uniform 16-bit numbers.
static inline void fill_normal(uint64_t* state, uint16_t* bf16, size_t count) {
    for (size_t i = 0; i < count; i++) {
        uint64_t bits = next_random(state);
        double sum = (double)(bits & 0xffff) + (double)(bits >> 16 & 0xffff) +
                     (double)(bits >> 32 & 0xffff) + (double)(bits >> 48);
        bf16[i] = kmla_float_to_bf16((float)((sum / 65536.0 - 2.0) * 1.7320508));
    }
}

// The caller frees them.
static inline uint16_t* normal_bf16(uint64_t seed, size_t count) {
    uint16_t* values = (uint16_t*)allocate(count * sizeof *values);
    fill_normal(&seed, values, count);
    return values;
}

#define DIGEST_BEGIN 0xcbf29ce484222325u

static inline uint64_t digest(uint64_t hash, const void* data, size_t bytes) { // FNV-1a
    const uint8_t* byte = (const uint8_t*)data;
    for (size_t i = 0; i < bytes; i++) {
        hash = (hash ^ byte[i]) * 0x100000001b3u;
    }
    return hash;
}

// The 576 values of a packed record, exactly.
static inline void read_record(const uint8_t* record, double* values) {
    for (int i = 0; i < KMLA_LATENT_DIMS; i++) {
        float scale;
        memcpy(&scale, record + KMLA_PACKED_SCALE_OFFSET + i / KMLA_GROUP_DIMS * 4, 4);
        values[i] = (double)kmla_e4m3_to_float(record[i]) * (double)scale;
    }
    for (int i = 0; i < KMLA_ROPE_DIMS; i++) {
        uint16_t bits;
        memcpy(&bits, record + KMLA_PACKED_ROPE_OFFSET + i * 2, 2);
        values[KMLA_LATENT_DIMS + i] = (double)kmla_bf16_to_float(bits);
    }
}

// A NaN is worse than any number.
static inline double worse(double a, double b) { return a > b || a != a ? a : b; }

#endif
