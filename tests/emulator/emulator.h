// A CUDA block on the CPU: what instructions.h, the fake driver and the self tests share.
//
// Every thread of a block is a fiber. One fiber runs at a time, until it waits for something: the
// rest of its warp (warp_together), of its block (sync_block), other warps (named_barrier_arrive),
// an mbarrier (barrier_wait). scheduler.cpp then resumes another, chosen by a seeded random number.
// No standard header is included, because the device source defines uint64_t and friends itself.

#ifndef KMLA_EMULATOR_H
#define KMLA_EMULATOR_H

namespace emulator {

// ---- the running thread

struct place {
    int thread;            // index in its block
    int block[3];          // index of the block in the grid
    int grid[3];           // blocks of the grid
    unsigned char* shared; // dynamic shared memory of the block
    unsigned shared_bytes;
};
extern place here; // of the fiber that runs now

// Prints where and what, then aborts. For all that hardware would leave undefined.
[[noreturn]] void die(const char* format, ...);
// Aborts unless [pointer, pointer + bytes) is the block's shared memory and aligned.
void check_shared(const char* instruction, const void* pointer, unsigned bytes, unsigned alignment);

// ---- meeting points

// All 32 lanes of a warp come here with their own operand; the last to arrive calls
// work(operands), which does the instruction for all lanes. Different instructions in one warp
// at a time abort.
typedef void (*warp_work)(void* const operands[32]);
void warp_together(const char* instruction, warp_work work, void* operand);
// The same for some lanes, a bit each; the operands of others are null.
void lanes_together(const char* instruction, unsigned lanes, warp_work work, void* operand);

// Barrier of the threads of the block that have not ended; true if any predicate was.
bool sync_block(const char* instruction, bool predicate);
// Barrier 1 to 15, of warps that have `threads` threads between them; some need not wait for it.
void named_barrier_arrive(const char* instruction, unsigned id, unsigned threads, bool waits);

// To `count` registers a lane, by a whole warpgroup; taking some waits until others released them.
void change_registers(const char* instruction, unsigned count, bool takes);

// ---- asynchronous copies: the destination is poison until the copy is waited for

void copy_async(void* shared, const void* global, int bytes, bool read); // 8 or 16 bytes
void copy_async_commit();
void copy_async_wait(int pending);

void barrier_init(unsigned long long* barrier, unsigned arrivals);
void barrier_init_fence();
void barrier_arrive(unsigned long long* barrier);
void barrier_expect(unsigned long long* barrier, unsigned bytes); // without an arrival
void barrier_arrive_expect(unsigned long long* barrier, unsigned bytes);
void copy_arrive(unsigned long long* barrier); // once this thread's copies so far have landed
void barrier_wait(unsigned long long* barrier, unsigned parity);
void copy_bulk(void* shared, const void* global, unsigned bytes, unsigned long long* barrier);

void wait_dependency();

// ---- matrix products of a warpgroup (wgmma.cpp): accumulators are poison until the wait

struct wgmma_operand {
    float* d;             // d[64 x n] += a[64 x 16] * b[16 x n]
    int count;            // n / 2
    const unsigned* a;    // 4 pairs
    unsigned long long b; // descriptor
    bool add;             // else d = a * b
    bool bf16;
};
void wgmma_fence();
void wgmma(const wgmma_operand& mine);
void wgmma_commit();
void wgmma_wait(int pending);

// Aborts if another warp of the warpgroup did something else in place of this.
void same_in_warpgroup(const char* instruction, int number);

void wgmma_start_block();
void wgmma_end_block();

// ---- who touched which byte of shared memory, and what comes before what (races.cpp)

void watch_races(bool on); // abort when there is one; on at the start
void note_read(const void* shared, unsigned bytes, int thread);
void note_write(const void* shared, unsigned bytes, int thread);
// An asynchronous copy, started by a thread; then its end.
void note_copy_start(const void* shared, unsigned bytes, int thread);
void note_copy_by_thread(const void* shared, unsigned bytes, int thread);
void note_copy_by_engine(const void* shared, unsigned bytes, const void* barrier);
void settle_stores(); // where a thread ends: its last store is done
void fence_async_reads();
void check_fenced(const char* instruction, const void* shared, unsigned bytes);

void order_start(int threads); // of a new block
void order_lanes(int warp, unsigned lanes);
void order_block();
// What threads did before they came to a phase of a barrier comes before what those do who wait for
// its end.
void order_release(const void* barrier, int thread);
void order_complete(const void* barrier); // the phase
void order_acquire(const void* barrier, int thread);

// ---- arithmetic of the instructions, by the PTX manual; bit patterns in and out

float f16_to_float(unsigned bits);
float bf16_to_float(unsigned bits);
unsigned float_to_f16(float value);  // nearest even; NaN is 0x7FFF
unsigned float_to_bf16(float value); // nearest even; NaN is 0x7FFF
unsigned e4m3_to_f16(unsigned code); // exact; NaN is 0x7FFF
unsigned multiply_f16(unsigned a, unsigned b);
unsigned minimum_f16(unsigned a, unsigned b); // the number if the other is NaN; -0 < +0
float exp2_ftz(float value);
float log2_any(float value);

// d[16x8] += a[16x16] * b[16x8] of a warp
struct mma_operand {
    float* d;          // d[64 x n] += a[64 x 16] * b[16 x n]
    const unsigned* a; // 4 pairs
    unsigned b[2];     // pairs
};
void mma_f16(void* const operands[32]);
void mma_bf16(void* const operands[32]);

// Four 8x8 matrices of 16-bit elements
struct load_matrix_operand {
    unsigned* result; // 4 pairs
    const void* row;  // row lane % 8 of matrix lane / 8
};
void load_matrix_x4(void* const operands[32]);
void load_matrix_x4_transposed(void* const operands[32]);

// One, two or four 8x8 matrices of 16-bit elements, transposed
struct store_matrix_operand {
    void* row; // lanes 0 to 8 * matrices - 1: row lane % 8 of matrix lane / 8
    int matrices;
    unsigned pairs[4];
};
void store_matrix_transposed(void* const operands[32]);

// A warp's rows of a wgmma: d[32][count] += a * b[n][16]
void wgmma_multiply(const struct wgmma_operand lanes[32], const unsigned (*a)[4],
                    const unsigned char* b, float* d);

// ---- kernels and launches

// One per KMLA_KERNEL, in a list of its translation unit.
struct kernel {
    const char* name;
    void (*run)(const void* args);
    unsigned args_bytes;
    int max_threads;
    int min_blocks; // of an SM
    const kernel* next;

    kernel(const char* name, void (*run)(const void* args), unsigned args_bytes, int max_threads,
           int min_blocks, const kernel*& list)
        : name(name), run(run), args_bytes(args_bytes), max_threads(max_threads),
          min_blocks(min_blocks), next(list) {
        list = this;
    }
};

struct launch {
    const kernel* what;
    const void* args;
    int grid[3];
    int threads;
    unsigned shared_bytes;
    bool programmatic; // may overlap the kernel before: it has to wait_dependency()
};
// Runs every block, in random order, before it returns. One launch runs at a time.
void run(const launch& work);

} // namespace emulator

// Schedules depend on this and on the number of launches before only. The environment's
// KMLA_EMULATOR_SEED is the first value.
extern "C" void kmla_emulator_seed(unsigned long long seed);

#endif
