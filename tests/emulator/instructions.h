// Stands in for tools/device/instructions.cuh: its names, in its order, and some more, for a block
// that runs as fibers. `make check` fails if one is missing or its signature differs.

typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef int int32_t;
typedef unsigned long long uint64_t;
typedef long long int64_t;

// From the command line: KMLA_ARCH, and KMLA_ARCH_SPECIFIC for sm_90a and its like.
#define KMLA_HAS_E4M3_CONVERT (KMLA_ARCH >= 89)
#define KMLA_HAS_BULK_COPY (KMLA_ARCH >= 90)
#if KMLA_ARCH == 90 && defined(KMLA_ARCH_SPECIFIC)
#define KMLA_HAS_WGMMA 1
#else
#define KMLA_HAS_WGMMA 0
#endif

#define KMLA_DEVICE static inline __attribute__((unused))
static const emulator::kernel* kernels; // of this file, last first
#define KMLA_KERNEL(name, args_type, threads, blocks)                                              \
    static void name(const args_type& args);                                                       \
    static emulator::kernel name##_entry(                                                          \
        #name, [](const void* args) { name(*(const args_type*)args); }, sizeof(args_type),         \
        threads, blocks, kernels);                                                                 \
    static void name(const args_type& args)

struct alignas(8) word2 {
    uint32_t x, y;
};
struct alignas(16) word4 {
    uint32_t x, y, z, w;
};

// ---- where am I

KMLA_DEVICE int thread_index() { return emulator::here.thread; }
KMLA_DEVICE int block_x() { return emulator::here.block[0]; }
KMLA_DEVICE int block_y() { return emulator::here.block[1]; }
KMLA_DEVICE int block_z() { return emulator::here.block[2]; }
KMLA_DEVICE int grid_x() { return emulator::here.grid[0]; }

KMLA_DEVICE int opaque(int value) { return value; }

KMLA_DEVICE uint8_t* shared_memory() { return emulator::here.shared; }

KMLA_DEVICE uint32_t shared_address(const void* pointer) {
    return (uint32_t)((const uint8_t*)pointer - emulator::here.shared);
}

// ---- barriers, votes, shuffles

KMLA_DEVICE void sync_block() { emulator::sync_block("sync_block", false); }
KMLA_DEVICE bool sync_block_or(bool predicate) {
    return emulator::sync_block("sync_block_or", predicate);
}
KMLA_DEVICE void named_barrier_sync(uint32_t id, uint32_t threads) {
    emulator::named_barrier_arrive("named_barrier_sync", id, threads, true);
}
KMLA_DEVICE void named_barrier_arrive(uint32_t id, uint32_t threads) {
    emulator::named_barrier_arrive("named_barrier_arrive", id, threads, false);
}
KMLA_DEVICE void sync_warp() {
    emulator::warp_together("sync_warp", [](void* const*) {}, nullptr);
}
KMLA_DEVICE uint32_t ballot_among(uint32_t lanes, bool predicate) {
    struct operand {
        bool predicate;
        uint32_t result;
    } mine = {predicate, 0};
    emulator::lanes_together(
        "ballot", lanes,
        [](void* const* operands) {
            uint32_t votes = 0;
            for (int i = 0; i < 32; ++i) {
                votes |= (uint32_t)(operands[i] && ((operand*)operands[i])->predicate) << i;
            }
            for (int i = 0; i < 32; ++i) {
                if (operands[i]) {
                    ((operand*)operands[i])->result = votes;
                }
            }
        },
        &mine);
    return mine.result;
}
KMLA_DEVICE uint32_t ballot(bool predicate) { return ballot_among(0xffffffffu, predicate); }
KMLA_DEVICE uint32_t maximum_among(uint32_t lanes, uint32_t value) {
    struct operand {
        uint32_t value, result;
    } mine = {value, 0};
    emulator::lanes_together(
        "maximum_among", lanes,
        [](void* const* operands) {
            for (int i = 0; i < 32 * 32; ++i) {
                operand *to = (operand*)operands[i / 32], *from = (operand*)operands[i % 32];
                if (to && from && from->value > to->result) {
                    to->result = from->value;
                }
            }
        },
        &mine);
    return mine.result;
}
// All shuffles: lane i gets the value of the lane it names.
template <typename type>
static inline type emulator_shuffle(type value, int source, uint32_t lanes = 0xffffffffu) {
    struct operand {
        type value, result;
        int source;
    } mine = {value, value, source & 31};
    emulator::lanes_together(
        "shuffle", lanes,
        [](void* const* operands) {
            for (int i = 0; i < 32; ++i) {
                operand* lane = (operand*)operands[i];
                if (lane && !operands[lane->source]) {
                    emulator::die("shuffle: lane %d from lane %d, which takes no part", i,
                                  lane->source);
                }
                if (lane) {
                    lane->result = ((operand*)operands[lane->source])->value;
                }
            }
        },
        &mine);
    return mine.result;
}
KMLA_DEVICE uint32_t shuffle_among(uint32_t lanes, uint32_t value, int lane) {
    return emulator_shuffle(value, lane, lanes);
}
KMLA_DEVICE float shuffle_xor(float value, int mask) {
    return emulator_shuffle(value, thread_index() ^ mask);
}
KMLA_DEVICE uint32_t shuffle_xor(uint32_t value, int mask) {
    return emulator_shuffle(value, thread_index() ^ mask);
}
KMLA_DEVICE float shuffle(float value, int lane) { return emulator_shuffle(value, lane); }
KMLA_DEVICE uint64_t shuffle(uint64_t value, int lane) { return emulator_shuffle(value, lane); }

// ---- numbers

KMLA_DEVICE uint32_t float_bits(float value) {
    uint32_t bits;
    __builtin_memcpy(&bits, &value, 4);
    return bits;
}
KMLA_DEVICE float bits_float(uint32_t bits) {
    float value;
    __builtin_memcpy(&value, &bits, 4);
    return value;
}
KMLA_DEVICE float infinity() { return __builtin_inff(); }
KMLA_DEVICE float maximum(float a, float b) { // not fmaxf, where a signalling NaN wins
    bool a_wins = b != b || a > b || (a == b && !__builtin_signbit(a));
    return a == a && a_wins ? a : b;
}
KMLA_DEVICE uint32_t maximum(uint32_t a, uint32_t b) { return a > b ? a : b; }
KMLA_DEVICE int minimum(int a, int b) { return a < b ? a : b; }
KMLA_DEVICE int maximum(int a, int b) { return a > b ? a : b; }
KMLA_DEVICE float divide(float a, float b) { return a / b; }
KMLA_DEVICE float multiply(float a, float b) { return a * b; }

KMLA_DEVICE float reciprocal(float value) { return 1 / value; }

KMLA_DEVICE float exp2_fast(float value) { return emulator::exp2_ftz(value); }

KMLA_DEVICE float exp2_wide(float value) { return __builtin_exp2f(value); }

KMLA_DEVICE float log2_fast(float value) { return emulator::log2_any(value); }

KMLA_DEVICE uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {
    if (selector & 0x8888u) { // sign replication in PTX, ignored by __byte_perm's manual
        emulator::die("permute_bytes: selector 0x%x has a nibble above 7", selector);
    }
    uint64_t both = (uint64_t)b << 32 | a;
    uint32_t result = 0;
    for (int i = 0; i < 4; ++i) {
        result |= (uint32_t)(both >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    }
    return result;
}

// ---- 16-bit pairs; low half first

KMLA_DEVICE uint32_t pack_f16(float low, float high) {
    return emulator::float_to_f16(low) | emulator::float_to_f16(high) << 16;
}

KMLA_DEVICE uint32_t pack_bf16(float low, float high) {
    return emulator::float_to_bf16(low) | emulator::float_to_bf16(high) << 16;
}

KMLA_DEVICE uint32_t multiply_f16x2(uint32_t a, uint32_t b) {
    return emulator::multiply_f16(a & 0xffff, b & 0xffff) | emulator::multiply_f16(a >> 16, b >> 16)
                                                                << 16;
}

KMLA_DEVICE uint32_t minimum_f16x2(uint32_t a, uint32_t b) {
    return emulator::minimum_f16(a & 0xffff, b & 0xffff) | emulator::minimum_f16(a >> 16, b >> 16)
                                                               << 16;
}

KMLA_DEVICE uint32_t maximum_f16x2(uint32_t a, uint32_t b) {
    return minimum_f16x2(a ^ 0x80008000u, b ^ 0x80008000u) ^ 0x80008000u;
}

#if KMLA_HAS_E4M3_CONVERT
KMLA_DEVICE void e4m3x4_to_f16x2(uint32_t codes, uint32_t& low, uint32_t& high) {
    low = emulator::e4m3_to_f16(codes & 0xff) | emulator::e4m3_to_f16(codes >> 8 & 0xff) << 16;
    high = emulator::e4m3_to_f16(codes >> 16 & 0xff) | emulator::e4m3_to_f16(codes >> 24) << 16;
}
#endif

// ---- matrix products of a warp: d[16x8] += a[16x16] * b[16x8]

KMLA_DEVICE void mma_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    emulator::mma_operand mine = {d, a, {b0, b1}};
    emulator::warp_together("mma_f16", emulator::mma_f16, &mine);
}

KMLA_DEVICE void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    emulator::mma_operand mine = {d, a, {b0, b1}};
    emulator::warp_together("mma_bf16", emulator::mma_bf16, &mine);
}

KMLA_DEVICE void load_matrix_x4(uint32_t (&r)[4], const void* row) {
    emulator::check_shared("load_matrix_x4", row, 16, 16);
    emulator::load_matrix_operand mine = {r, row};
    emulator::warp_together("load_matrix_x4", emulator::load_matrix_x4, &mine);
}

KMLA_DEVICE void load_matrix_x4_transposed(uint32_t (&r)[4], const void* row) {
    emulator::check_shared("load_matrix_x4_transposed", row, 16, 16);
    emulator::load_matrix_operand mine = {r, row};
    emulator::warp_together("load_matrix_x4_transposed", emulator::load_matrix_x4_transposed,
                            &mine);
}

// ---- copies from global to shared memory

KMLA_DEVICE void copy_async_16(void* shared, const void* global, bool read) {
    emulator::copy_async(shared, global, 16, read);
}
KMLA_DEVICE void copy_async_8(void* shared, const void* global) {
    emulator::copy_async(shared, global, 8, true);
}
KMLA_DEVICE void copy_async_commit() { emulator::copy_async_commit(); }
template <int pending> KMLA_DEVICE void copy_async_wait() { emulator::copy_async_wait(pending); }

#if KMLA_HAS_BULK_COPY
KMLA_DEVICE void barrier_init(uint64_t* barrier, uint32_t arrivals) {
    emulator::barrier_init(barrier, arrivals);
}
KMLA_DEVICE void barrier_init_fence() { emulator::barrier_init_fence(); }
KMLA_DEVICE void barrier_arrive(uint64_t* barrier) { emulator::barrier_arrive(barrier); }
KMLA_DEVICE void barrier_expect(uint64_t* barrier, uint32_t bytes) {
    emulator::barrier_expect(barrier, bytes);
}
KMLA_DEVICE void copy_arrive(uint64_t* barrier) { emulator::copy_arrive(barrier); }
KMLA_DEVICE void barrier_arrive_expect(uint64_t* barrier, uint32_t bytes) {
    emulator::barrier_arrive_expect(barrier, bytes);
}
KMLA_DEVICE void barrier_wait(uint64_t* barrier, uint32_t parity) {
    emulator::barrier_wait(barrier, parity);
}
KMLA_DEVICE void copy_bulk(void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {
    emulator::copy_bulk(shared, global, bytes, barrier);
}
#endif

KMLA_DEVICE void fence_async_reads() { emulator::fence_async_reads(); }

#if KMLA_HAS_WGMMA
// ---- matrix products of a warpgroup: d[64 x n] += a[64 x 16] * b[16 x n], asynchronously

KMLA_DEVICE uint64_t matrix_descriptor(const void* rows) {
    const uint64_t start = shared_address(rows) / 16, leading = 1, stride = 1024 / 16, swizzle = 1;
    emulator::check_shared("matrix_descriptor", rows, 32, 32);
    return start | leading << 16 | stride << 32 | swizzle << 62;
}
KMLA_DEVICE void wgmma_fence() { emulator::wgmma_fence(); }
KMLA_DEVICE void wgmma_commit() { emulator::wgmma_commit(); }
template <int pending> KMLA_DEVICE void wgmma_wait() { emulator::wgmma_wait(pending); }

template <int count>
KMLA_DEVICE void wgmma_f16(float (&d)[count], const uint32_t (&a)[4], uint64_t b, bool add) {
    static_assert(count % 4 == 0 && count <= 128, "n is a multiple of 8 up to 256");
    emulator::wgmma({d, count, a, b, add, false});
}
template <int count>
KMLA_DEVICE void wgmma_bf16(float (&d)[count], const uint32_t (&a)[4], uint64_t b, bool add) {
    static_assert(count % 4 == 0 && count <= 128, "n is a multiple of 8 up to 256");
    emulator::wgmma({d, count, a, b, add, true});
}

static inline void emulator_store_matrix(const char* name, emulator::store_matrix_operand mine) {
    if (thread_index() % 32 < mine.matrices * 8) {
        emulator::check_shared(name, mine.row, 16, 16);
    }
    emulator::warp_together(name, emulator::store_matrix_transposed, &mine);
}
KMLA_DEVICE void store_matrix_x1_transposed(void* row, uint32_t pair) {
    emulator_store_matrix("store_matrix_x1_transposed", {row, 1, {pair}});
}
KMLA_DEVICE void store_matrix_x2_transposed(void* row, uint32_t low, uint32_t high) {
    emulator_store_matrix("store_matrix_x2_transposed", {row, 2, {low, high}});
}
KMLA_DEVICE void store_matrix_x4_transposed(void* row, uint32_t r0, uint32_t r1, uint32_t r2,
                                            uint32_t r3) {
    emulator_store_matrix("store_matrix_x4_transposed", {row, 4, {r0, r1, r2, r3}});
}
template <uint32_t count> KMLA_DEVICE void registers_release() {
    emulator::change_registers("registers_release", count, false);
}
template <uint32_t count> KMLA_DEVICE void registers_take() {
    emulator::change_registers("registers_take", count, true);
}
#endif

// ---- dependent launch: a kernel may start before the one it follows has ended

KMLA_DEVICE void launch_dependents() {}
KMLA_DEVICE void wait_dependency() {
#if KMLA_ARCH >= 90
    emulator::wait_dependency();
#endif
}
