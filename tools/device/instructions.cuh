// The only file that touches the machine: built-in variables, PTX, conversions. Everything after it
// is plain C++, so a host compiler can run it over another version of this file.

#pragma nv_diag_suppress 177 // an image does not use every function of these files

typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef int int32_t;
typedef unsigned long long uint64_t;
typedef long long int64_t;

#define KMLA_ARCH (__CUDA_ARCH__ / 10) // 80, 89, 90, 120, ...

// e4m3 conversions are in PTX from sm_89 on, and in NVRTC for sm_89 from 12.1 on.
#if KMLA_ARCH >= 90 || (KMLA_ARCH == 89 && __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1201)
#define KMLA_HAS_E4M3_CONVERT 1
#else
#define KMLA_HAS_E4M3_CONVERT 0
#endif
#define KMLA_HAS_BULK_COPY (KMLA_ARCH >= 90 && __CUDACC_VER_MAJOR__ >= 12)
// wgmma is of sm_90a alone.
#if KMLA_ARCH == 90 && defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define KMLA_HAS_WGMMA 1
#else
#define KMLA_HAS_WGMMA 0
#endif

#define KMLA_DEVICE static __device__ __forceinline__
// A kernel that takes one struct. At least `blocks` blocks should fit an SM.
#define KMLA_KERNEL(name, args_type, threads, blocks) \
    extern "C" __global__ void __launch_bounds__(threads, blocks) \
        name(const __grid_constant__ args_type args)

struct alignas(8) word2 {
    uint32_t x, y;
};
struct alignas(16) word4 {
    uint32_t x, y, z, w;
};

// ---- where am I

KMLA_DEVICE int thread_index() { return (int)threadIdx.x; }
KMLA_DEVICE int block_x() { return (int)blockIdx.x; }
KMLA_DEVICE int block_y() { return (int)blockIdx.y; }
KMLA_DEVICE int block_z() { return (int)blockIdx.z; }
KMLA_DEVICE int grid_x() { return (int)gridDim.x; }

// The value, of which nothing is known: what is computed from it in a loop stays there and takes no
// registers elsewhere.
KMLA_DEVICE int opaque(int value) {
    asm volatile("" : "+r"(value));
    return value;
}

// Dynamic shared memory of the block, aligned to 1,024 bytes.
KMLA_DEVICE uint8_t* shared_memory() {
    extern __shared__ __align__(1024) uint8_t kmla_shared[];
    return kmla_shared;
}

KMLA_DEVICE uint32_t shared_address(const void* pointer) {
    return (uint32_t)__cvta_generic_to_shared(pointer);
}

// ---- barriers, votes, shuffles

KMLA_DEVICE void sync_block() { __syncthreads(); }
// Barriers 1 to 15 of the block, of `threads` threads in whole warps; one may arrive and not wait.
KMLA_DEVICE void named_barrier_sync(uint32_t id, uint32_t threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
KMLA_DEVICE void named_barrier_arrive(uint32_t id, uint32_t threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Barrier that also tells every thread whether any had a true predicate.
KMLA_DEVICE bool sync_block_or(bool predicate) { return __syncthreads_or(predicate) != 0; }
KMLA_DEVICE uint32_t ballot(bool predicate) { return __ballot_sync(0xffffffffu, predicate); }
KMLA_DEVICE float shuffle_xor(float value, int mask) {
    return __shfl_xor_sync(0xffffffffu, value, mask);
}
KMLA_DEVICE uint32_t shuffle_xor(uint32_t value, int mask) {
    return __shfl_xor_sync(0xffffffffu, value, mask);
}
KMLA_DEVICE float shuffle(float value, int lane) {
    return __shfl_sync(0xffffffffu, value, lane);
}
KMLA_DEVICE uint64_t shuffle(uint64_t value, int lane) {
    return __shfl_sync(0xffffffffu, value, lane);
}

// ---- numbers

KMLA_DEVICE uint32_t float_bits(float value) { return __float_as_uint(value); }
KMLA_DEVICE float bits_float(uint32_t bits) { return __uint_as_float(bits); }
KMLA_DEVICE float infinity() { return __uint_as_float(0x7f800000u); }
KMLA_DEVICE float maximum(float a, float b) { return fmaxf(a, b); } // NaN loses
KMLA_DEVICE uint32_t maximum(uint32_t a, uint32_t b) { return a > b ? a : b; }
KMLA_DEVICE int minimum(int a, int b) { return a < b ? a : b; }
KMLA_DEVICE int maximum(int a, int b) { return a > b ? a : b; }
// Correctly rounded: the writers' bytes are the host's.
KMLA_DEVICE float divide(float a, float b) { return __fdiv_rn(a, b); }
KMLA_DEVICE float multiply(float a, float b) { return __fmul_rn(a, b); }

// To one or two units in the last place; the value and its inverse are normal.
KMLA_DEVICE float reciprocal(float value) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
    return result;
}

KMLA_DEVICE float exp2_fast(float value) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
    return result;
}

// Results below 2^-126 too.
KMLA_DEVICE float exp2_wide(float value) {
    float result;
    asm("ex2.approx.f32 %0, %1;" : "=f"(result) : "f"(value));
    return result;
}

KMLA_DEVICE float log2_fast(float value) {
    float result;
    asm("lg2.approx.f32 %0, %1;" : "=f"(result) : "f"(value));
    return result;
}

// Bytes of {b,a} picked by the four nibbles of selector: 0..3 are a's, 4..7 b's.
KMLA_DEVICE uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {
    return __byte_perm(a, b, selector);
}

// ---- 16-bit pairs; low half first

KMLA_DEVICE uint32_t pack_f16(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

KMLA_DEVICE uint32_t pack_bf16(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

KMLA_DEVICE uint32_t multiply_f16x2(uint32_t a, uint32_t b) {
    uint32_t product;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}

// Lane by lane, the number if the other is NaN.
KMLA_DEVICE uint32_t minimum_f16x2(uint32_t a, uint32_t b) {
    uint32_t result;
    asm("min.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}

KMLA_DEVICE uint32_t maximum_f16x2(uint32_t a, uint32_t b) {
    uint32_t result;
    asm("max.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}

#if KMLA_HAS_E4M3_CONVERT
// Four E4M3 codes, exactly, as two pairs of f16: bytes 0 and 1, bytes 2 and 3.
KMLA_DEVICE void e4m3x4_to_f16x2(uint32_t codes, uint32_t& low, uint32_t& high) {
    asm("{ .reg .b16 l, h;\n"
        "mov.b32 {l, h}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, l;\n"
        "cvt.rn.f16x2.e4m3x2 %1, h; }"
        : "=r"(low), "=r"(high)
        : "r"(codes));
}
#endif

// ---- matrix products of a warp: d[16x8] += a[16x16] * b[16x8]

KMLA_DEVICE void mma_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

KMLA_DEVICE void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l%8 of matrix l/8.
KMLA_DEVICE void load_matrix_x4(uint32_t (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// ---- copies from global to shared memory

// 16 bytes; with `read` false writes zeros and reads nothing.
KMLA_DEVICE void copy_async_16(void* shared, const void* global, bool read) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
                 "l"(global), "r"(read ? 16 : 0)
                 : "memory");
}
KMLA_DEVICE void copy_async_8(void* shared, const void* global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared_address(shared)),
                 "l"(global)
                 : "memory");
}
KMLA_DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `pending` of this thread's committed groups are under way.
template <int pending> KMLA_DEVICE void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

#if KMLA_HAS_BULK_COPY
KMLA_DEVICE void barrier_init(uint64_t* barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(arrivals)
                 : "memory");
}
// Makes initialised barriers visible to the copy engine; a block barrier must follow.
KMLA_DEVICE void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// One arrival that also announces `bytes` of bulk copies.
KMLA_DEVICE void barrier_arrive_expect(uint64_t* barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                     shared_address(barrier)),
                 "r"(bytes)
                 : "memory");
}
KMLA_DEVICE void barrier_arrive(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
                 : "memory");
}
// One arrival when all of this thread's copy_async so far have landed.
KMLA_DEVICE void copy_arrive(uint64_t* barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(
                     shared_address(barrier))
                 : "memory");
}
KMLA_DEVICE void barrier_wait(uint64_t* barrier, uint32_t parity) {
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n"
                 "}" ::"r"(shared_address(barrier)),
                 "r"(parity)
                 : "memory");
}
// `bytes` (a multiple of 16) from global to shared memory; completes on the barrier.
KMLA_DEVICE void copy_bulk(void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];" ::"r"(shared_address(shared)),
                 "l"(global), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}
#endif

// ---- what the asynchronous proxy, of bulk copies and wgmma, sees

// What this thread wrote to shared memory may be read or written over by the proxy after a barrier.
KMLA_DEVICE void fence_async_reads() {
#if KMLA_ARCH >= 90
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

#if KMLA_HAS_WGMMA
// All warps of a warpgroup: gives registers back to the block, down to `count` a thread, or takes
// some, up to `count`, which waits until others have given them back.
template <uint32_t count> KMLA_DEVICE void registers_release() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}
template <uint32_t count> KMLA_DEVICE void registers_take() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}

// ---- matrix products of a warpgroup: d[64 x n] += a[64 x 16] * b[16 x n], asynchronously. A warp has
// 16 rows, in mma.sync's fragments; b is in shared memory: rows of n, 128 bytes of k, swizzled.

// Of the 1,024-byte aligned block of 8 rows x 128 bytes that `rows` lies in; + 32 bytes a k16 step.
KMLA_DEVICE uint64_t matrix_descriptor(const void* rows) {
    const uint64_t bytes_of_8_rows = 1024, swizzle_128 = 1;
    return (uint64_t)((shared_address(rows) & 0x3FFFF) >> 4) | (uint64_t)1 << 16 |
           (bytes_of_8_rows >> 4) << 32 | swizzle_128 << 62;
}
// Before the first product, and after registers of products were touched.
KMLA_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
KMLA_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most `pending` committed groups are under way.
template <int pending> KMLA_DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// One for each n; d has n / 2 registers. Without `add` what d held does not count. The macros write out
// d's registers: KMLA_D<n / 2> as operands, KMLA_R<n / 2> as their numbers.
#define KMLA_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define KMLA_D8(i) KMLA_D4(i), KMLA_D4(i + 4)
#define KMLA_D16(i) KMLA_D8(i), KMLA_D8(i + 8)
#define KMLA_D32(i) KMLA_D16(i), KMLA_D16(i + 16)
#define KMLA_R4 "%0,%1,%2,%3"
#define KMLA_R8 KMLA_R4 ",%4,%5,%6,%7"
#define KMLA_R12 KMLA_R8 ",%8,%9,%10,%11"
#define KMLA_R16 KMLA_R12 ",%12,%13,%14,%15"
#define KMLA_R20 KMLA_R16 ",%16,%17,%18,%19"
#define KMLA_R24 KMLA_R20 ",%20,%21,%22,%23"
#define KMLA_R28 KMLA_R24 ",%24,%25,%26,%27"
#define KMLA_R32 KMLA_R28 ",%28,%29,%30,%31"
#define KMLA_R36 KMLA_R32 ",%32,%33,%34,%35"
#define KMLA_R40 KMLA_R36 ",%36,%37,%38,%39"
#define KMLA_WGMMA(name, types, count, n, numbers, a0, a1, a2, a3, b, flag, ...)                   \
    KMLA_DEVICE void name(float (&d)[count], const uint32_t (&a)[4], uint64_t b_at, bool add) {    \
        asm volatile("{ .reg .pred p;\n"                                                           \
                     "setp.ne.b32 p, %" #flag ", 0;\n"                                             \
                     "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." types " {" numbers "}, "    \
                     "{%" #a0 ",%" #a1 ",%" #a2 ",%" #a3 "}, %" #b ", p, 1, 1, 0; }"              \
                     : __VA_ARGS__                                                                 \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_at), "r"((int)add));      \
    }
#define KMLA_WGMMAS(name, types) \
    KMLA_WGMMA(name, types, 4, 8, KMLA_R4, 4, 5, 6, 7, 8, 9, \
               KMLA_D4(0)) \
    KMLA_WGMMA(name, types, 8, 16, KMLA_R8, 8, 9, 10, 11, 12, 13, \
               KMLA_D8(0)) \
    KMLA_WGMMA(name, types, 12, 24, KMLA_R12, 12, 13, 14, 15, 16, 17, \
               KMLA_D8(0), KMLA_D4(8)) \
    KMLA_WGMMA(name, types, 16, 32, KMLA_R16, 16, 17, 18, 19, 20, 21, \
               KMLA_D16(0)) \
    KMLA_WGMMA(name, types, 20, 40, KMLA_R20, 20, 21, 22, 23, 24, 25, \
               KMLA_D16(0), KMLA_D4(16)) \
    KMLA_WGMMA(name, types, 24, 48, KMLA_R24, 24, 25, 26, 27, 28, 29, \
               KMLA_D16(0), KMLA_D8(16)) \
    KMLA_WGMMA(name, types, 28, 56, KMLA_R28, 28, 29, 30, 31, 32, 33, \
               KMLA_D16(0), KMLA_D8(16), KMLA_D4(24)) \
    KMLA_WGMMA(name, types, 32, 64, KMLA_R32, 32, 33, 34, 35, 36, 37, \
               KMLA_D32(0)) \
    KMLA_WGMMA(name, types, 36, 72, KMLA_R36, 36, 37, 38, 39, 40, 41, \
               KMLA_D32(0), KMLA_D4(32)) \
    KMLA_WGMMA(name, types, 40, 80, KMLA_R40, 40, 41, 42, 43, 44, 45, \
               KMLA_D32(0), KMLA_D8(32))
KMLA_WGMMAS(wgmma_f16, "f16.f16")
KMLA_WGMMAS(wgmma_bf16, "bf16.bf16")

// Two 8x8 matrices, transposed: lane l of 0..15 gives the address of row l%8 of matrix l/8.
KMLA_DEVICE void store_matrix_x2_transposed(void* row, uint32_t low, uint32_t high) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1,%2};" ::"r"(
                     shared_address(row)),
                 "r"(low), "r"(high)
                 : "memory");
}
#endif

// ---- dependent launch: a kernel may start before the one it follows has ended

// What follows this kernel in its stream may be scheduled.
KMLA_DEVICE void launch_dependents() {
#if KMLA_ARCH >= 90
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Until the kernel before has ended and its writes are visible.
KMLA_DEVICE void wait_dependency() {
#if KMLA_ARCH >= 90
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
