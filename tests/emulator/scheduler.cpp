// Runs blocks of threads as fibers, in seeded random order.
//
// One warp runs until none of its lanes can go on (or, in some launches, until a warp-wide
// instruction picks another warp); then a random warp that can run is next. Between meeting points
// the lanes of a warp run one after another in random order. So code that lacks a barrier reads
// what is not there yet under some seeds; shared memory is NaN until something is written. That a
// barrier is missing, whatever the seed, is for races.cpp to say: it is told who met whom here.

#include "emulator.h"

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <deque>
#include <mutex>
#include <numeric>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#define EMULATOR_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define EMULATOR_ASAN 1
#endif
#endif

#ifdef EMULATOR_ASAN
#include <sanitizer/common_interface_defs.h>
#endif

// =============================================================================
// Fibers: switch_context(from, to) saves the running context and resumes another
// =============================================================================

#if defined(__x86_64__) && !defined(KMLA_EMULATOR_UCONTEXT)

typedef void* context; // its stack pointer; callee-saved registers are on the stack

extern "C" void kmla_emulator_switch(context* from, context to);
asm(".text\n"
    ".type kmla_emulator_switch, @function\n"
    "kmla_emulator_switch:\n"
    "    pushq %rbp\n"
    "    pushq %rbx\n"
    "    pushq %r12\n"
    "    pushq %r13\n"
    "    pushq %r14\n"
    "    pushq %r15\n"
    "    movq %rsp, (%rdi)\n"
    "    movq %rsi, %rsp\n"
    "    popq %r15\n"
    "    popq %r14\n"
    "    popq %r13\n"
    "    popq %r12\n"
    "    popq %rbx\n"
    "    popq %rbp\n"
    "    ret\n"
    ".size kmla_emulator_switch, .-kmla_emulator_switch\n");

static void switch_context(context* from, context* to) { kmla_emulator_switch(from, *to); }

static void make_context(context* made, char* stack, size_t bytes, void (*start)()) {
    void** top = (void**)(stack + bytes);
    *--top = nullptr;      // start never returns
    *--top = (void*)start; // where the first switch's ret goes
    for (int i = 0; i < 6; ++i) {
        *--top = nullptr;
    }
    *made = top;
}

#else

#include <ucontext.h>
typedef ucontext_t context;

static void switch_context(context* from, context* to) { swapcontext(from, to); }

static void make_context(context* made, char* stack, size_t bytes, void (*start)()) {
    getcontext(made);
    made->uc_stack.ss_sp = stack;
    made->uc_stack.ss_size = bytes;
    made->uc_link = nullptr;
    makecontext(made, start, 0);
}

#endif

namespace emulator {

// =============================================================================
// State of the block that runs
// =============================================================================

#ifdef EMULATOR_ASAN
static const size_t stack_bytes = 512 * 1024;
#else
static const size_t stack_bytes = 64 * 1024;
#endif
static const size_t guard_bytes = 64 * 1024;
static const int max_warps = 32;
static const unsigned all_lanes = 0xffffffffu;

// An mbarrier, in the 8 bytes of shared memory that it has on the GPU too.
struct mbarrier {
    uint64_t expected : 16; // arrivals of a phase
    uint64_t pending : 16;  // arrivals that this phase still waits for
    int64_t bytes : 24;     // announced bytes that have not landed
    uint64_t parity : 1;    // of the phase under way
    uint64_t valid : 7;     // tells it from poison and zeros
};
static_assert(sizeof(mbarrier) == 8, "");
static const unsigned mbarrier_valid = 0x2a;

struct small_copy { // cp.async, or the arrival of those before it
    void* shared;
    const void* global;
    int bytes;
    bool read;
    int group;
    mbarrier* barrier; // where it arrives, or null
};

struct bulk_copy { // cp.async.bulk
    void* shared;
    const void* global;
    unsigned bytes;
    mbarrier* barrier;
};

struct thread {
    context where;
    char* stack;
    void* fake_stack; // ASan's
    int index;
    const char* waits_for; // name of the instruction, for messages
    mbarrier* barrier;     // that it waits for, or null
    unsigned parity;
    unsigned named_barrier;         // that it waits for, or 0
    std::deque<small_copy> copies;  // in flight, oldest first
    int groups;                     // committed so far
};

// An instruction that some lanes of a warp do together.
struct gathering {
    unsigned lanes, arrived;
    const char* instruction;
    warp_work work;
    void* operands[32]; // null for other lanes
};

struct warp {
    unsigned runnable;    // lanes that can go on
    unsigned on_mbarrier; // lanes that wait for one
    unsigned registers;   // a lane has
    unsigned wanted;      // registers a lane is to have
    gathering gatherings[32]; // each at its lowest lane
};

struct named_barrier {
    unsigned expected, arrived; // threads
    unsigned warps;             // that arrived
    unsigned phase;
};

place here;

static std::mutex one_launch;
static const launch* running;
static thread threads[max_warps * 32];
static warp warps[max_warps];
static thread* current;
static context scheduler_context;

static struct {
    int alive; // threads that have not ended
    int at_barrier;
    bool predicate, result; // of the barrier: so far, and of the last
    const char* instruction;
    bool unfenced_init;     // an mbarrier that the copy engine may not see yet
    bool waited_dependency; // any thread has
    bool met;               // a warp-wide instruction was just done
    std::vector<bulk_copy> copies;
    int copy_arrivals; // of cp.async, still to come
    named_barrier named[16];
    unsigned free_registers; // that warps have released
} block;

// ---- random numbers (xorshift64*)

static uint64_t seed_value;
static uint64_t launches;
static uint64_t random_state;

static unsigned random_below(unsigned count) {
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return (unsigned)((random_state * 0x2545f4914f6cdd1dull >> 32) * count >> 32);
}

// One of the bits of a non-zero mask.
static int random_bit(unsigned mask) {
    unsigned turn = random_below(32);
    unsigned turned = mask >> turn | mask << (-turn & 31);
    return (int)((unsigned)__builtin_ctz(turned) + turn) & 31;
}

static void start_random() {
    static bool read_environment;
    if (!read_environment) {
        const char* text = getenv("KMLA_EMULATOR_SEED");
        read_environment = true;
        if (text) {
            seed_value = strtoull(text, nullptr, 0);
        }
    }
    random_state = (seed_value * 0x9e3779b97f4a7c15ull) ^ (++launches * 0xd1342543de82ef95ull);
    random_state |= 1; // not zero
    for (int i = 0; i < 4; ++i) {
        random_below(1);
    }
}

// ---- faults

void die(const char* format, ...) {
    va_list values;
    va_start(values, format);
    fprintf(stderr, "emulator: ");
    vfprintf(stderr, format, values);
    va_end(values);
    if (current) {
        fprintf(stderr, " (%s, block %d,%d,%d, thread %d)", running->what->name, here.block[0],
                here.block[1], here.block[2], current->index);
    }
    fprintf(stderr, " [seed %llu, launch %llu]\n", (unsigned long long)seed_value,
            (unsigned long long)launches);
    abort();
}

void check_shared(const char* instruction, const void* pointer, unsigned bytes,
                  unsigned alignment) {
    uintptr_t offset = (uintptr_t)pointer - (uintptr_t)here.shared;
    if (offset > here.shared_bytes || bytes > here.shared_bytes - offset) {
        die("%s: %u bytes at %p are not in the block's %u bytes of shared memory", instruction,
            bytes, pointer, here.shared_bytes);
    }
    if ((uintptr_t)pointer % alignment) {
        die("%s: shared offset %lu is not a multiple of %u", instruction, (unsigned long)offset,
            alignment);
    }
}

static void check_global(const char* instruction, const void* pointer, unsigned bytes,
                         unsigned alignment) {
    if ((uintptr_t)pointer % alignment) {
        die("%s: global address %p is not a multiple of %u", instruction, pointer, alignment);
    }
    // Faults here, with the thread's own stack, rather than where the copy lands.
    volatile const char* reach = (volatile const char*)pointer;
    (void)reach[0];
    (void)reach[bytes - 1];
}

[[noreturn]] static void die_of_deadlock() {
    fprintf(stderr, "emulator: deadlock in %s, block %d,%d,%d: %d threads alive\n",
            running->what->name, here.block[0], here.block[1], here.block[2], block.alive);
    for (int i = 0; i < running->threads; ++i) { // runs of threads that wait for the same
        int first = i;
        while (i + 1 < running->threads && threads[i + 1].waits_for == threads[first].waits_for) {
            ++i;
        }
        fprintf(stderr, "    threads %d to %d: %s\n", first, i, threads[first].waits_for);
    }
    current = nullptr;
    die("nobody can go on");
}

// =============================================================================
// Switching between the scheduler and threads
// =============================================================================

#ifdef EMULATOR_ASAN
static void* scheduler_fake_stack;
static const void* scheduler_stack;
static size_t scheduler_stack_bytes;
#endif

static void resume(thread& next) {
    current = &next;
    here.thread = next.index;
    next.waits_for = "runs";
#ifdef EMULATOR_ASAN
    __sanitizer_start_switch_fiber(&scheduler_fake_stack, next.stack, stack_bytes);
#endif
    switch_context(&scheduler_context, &next.where);
#ifdef EMULATOR_ASAN
    __sanitizer_finish_switch_fiber(scheduler_fake_stack, nullptr, nullptr);
#endif
    current = nullptr;
}

static void to_scheduler(thread& me) {
#ifdef EMULATOR_ASAN
    __sanitizer_start_switch_fiber(&me.fake_stack, scheduler_stack, scheduler_stack_bytes);
#endif
    switch_context(&me.where, &scheduler_context);
#ifdef EMULATOR_ASAN
    __sanitizer_finish_switch_fiber(me.fake_stack, &scheduler_stack, &scheduler_stack_bytes);
#endif
}

static warp& warp_of(const thread& me) { return warps[me.index / 32]; }
static unsigned lane_bit(const thread& me) { return 1u << me.index % 32; }

// The running thread leaves the CPU until somebody sets its runnable bit.
static void wait_here(const char* instruction) {
    current->waits_for = instruction;
    warp_of(*current).runnable &= ~lane_bit(*current);
    to_scheduler(*current);
}

static void release_block_barrier();

// What a fiber runs: thread after thread, one for each block.
static void fiber() {
#ifdef EMULATOR_ASAN
    __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_bytes);
#endif
    for (;;) {
        running->what->run(running->args);
        settle_stores();
        --block.alive;
        if (block.alive > 0 && block.at_barrier == block.alive) {
            release_block_barrier();
        }
        wait_here("has ended");
    }
}

// =============================================================================
// Meeting points
// =============================================================================

void lanes_together(const char* instruction, unsigned lanes, warp_work work, void* operand) {
    if (!(lanes & lane_bit(*current))) {
        die("%s of lanes 0x%x, without this one", instruction, lanes);
    }
    warp& mine = warp_of(*current);
    gathering& all = mine.gatherings[__builtin_ctz(lanes)];
    if (!all.arrived) {
        all = gathering{lanes, 0, instruction, work, {}};
    } else if (all.work != work || all.lanes != lanes) {
        die("%s, while other lanes of the warp are at %s", instruction, all.instruction);
    }
    all.operands[current->index % 32] = operand;
    all.arrived |= lane_bit(*current);
    if (all.arrived != lanes) {
        wait_here(instruction);
        return;
    }
    work(all.operands);
    order_lanes(current->index / 32, lanes);
    all.arrived = 0;
    mine.runnable |= lanes;
    block.met = true;
}

void warp_together(const char* instruction, warp_work work, void* operand) {
    lanes_together(instruction, all_lanes, work, operand);
}

static void release_block_barrier() {
    block.result = block.predicate;
    block.predicate = false;
    block.at_barrier = 0;
    order_block();
    for (int i = 0; i < running->threads; ++i) {
        if (threads[i].waits_for == block.instruction) {
            warp_of(threads[i]).runnable |= lane_bit(threads[i]);
        }
    }
}

bool sync_block(const char* instruction, bool predicate) {
    if (block.at_barrier > 0 && block.instruction != instruction) {
        die("%s, while other threads are at %s", instruction, block.instruction);
    }
    block.instruction = instruction;
    block.predicate |= predicate;
    if (++block.at_barrier < block.alive) {
        wait_here(instruction);
    } else {
        current->waits_for = "runs";
        release_block_barrier();
    }
    return block.result; // the next barrier cannot end before this thread comes to it
}

// ---- barriers of some warps

struct named_operand {
    const char* instruction;
    unsigned id, threads, phase;
};

static void arrive_at_named_barrier(void* const operands[32]) {
    const named_operand first = *(const named_operand*)operands[0];
    named_barrier& barrier = block.named[first.id];
    unsigned this_warp = 1u << here.thread / 32;
    for (int lane = 0; lane < 32; ++lane) {
        named_operand& mine = *(named_operand*)operands[lane];
        if (mine.id != first.id || mine.threads != first.threads) {
            die("%s: lanes of a warp have other operands", first.instruction);
        }
        mine.phase = barrier.phase;
        order_release(&barrier, here.thread / 32 * 32 + lane);
    }
    if (barrier.arrived > 0 && barrier.expected != first.threads) {
        die("%s %u: %u threads, where others have %u", first.instruction, first.id, first.threads,
            barrier.expected);
    }
    if (barrier.warps & this_warp) {
        die("%s %u: this warp is there already", first.instruction, first.id);
    }
    barrier.expected = first.threads;
    barrier.arrived += 32;
    barrier.warps |= this_warp;
    if (barrier.arrived < barrier.expected) {
        return;
    }
    barrier = named_barrier{0, 0, 0, barrier.phase + 1};
    order_complete(&barrier);
    for (int i = 0; i < running->threads; ++i) {
        if (threads[i].named_barrier == first.id) {
            threads[i].named_barrier = 0;
            warp_of(threads[i]).runnable |= lane_bit(threads[i]);
        }
    }
}

void named_barrier_arrive(const char* instruction, unsigned id, unsigned count, bool waits) {
    named_operand mine = {instruction, id, count, 0};
    if (id < 1 || id > 15) {
        die("%s: barrier %u is not one of 1 to 15", instruction, id);
    }
    if (count == 0 || count % 32 || count > (unsigned)running->threads) {
        die("%s: %u threads are not some warps of the block", instruction, count);
    }
    warp_together(instruction, arrive_at_named_barrier, &mine);
    if (waits && block.named[id].phase == mine.phase) {
        current->named_barrier = id;
        wait_here(instruction);
    }
    if (waits) {
        order_acquire(&block.named[id], current->index);
    }
}

// =============================================================================
// Registers: a warpgroup releases some, another takes them
// =============================================================================

static const unsigned sm_registers = 65536;
static const char* const free_registers_name = "registers_take, until others release some";

// Of a lane, at the start: what the launch bounds leave.
static unsigned first_registers() {
    unsigned of_lane = sm_registers / (unsigned)(running->what->max_threads *
                                                 running->what->min_blocks) / 8 * 8;
    return of_lane < 256 ? of_lane : 256;
}

// To warps that want more than they have, as far as there are some.
static void give_registers() {
    for (int i = 0; i < running->threads; ++i) {
        warp& its = warp_of(threads[i]);
        unsigned missing = (its.wanted - its.registers) * 32;
        if (missing <= block.free_registers) {
            block.free_registers -= missing;
            its.registers = its.wanted;
        }
        if (threads[i].waits_for == free_registers_name && its.registers == its.wanted) {
            its.runnable |= lane_bit(threads[i]);
        }
    }
}

static void change_registers_of_warp(void* const operands[32]) {
    unsigned count = *(const unsigned*)operands[0];
    warp& mine = warp_of(*current);
    same_in_warpgroup("change_registers", (int)count);
    mine.wanted = count;
    if (count < mine.registers) {
        block.free_registers += (mine.registers - count) * 32;
        mine.registers = count;
    }
    give_registers();
}

void change_registers(const char* instruction, unsigned count, bool takes) {
    unsigned before = warp_of(*current).registers;
    if (count < 24 || count > 256 || count % 8) {
        die("%s: %u is not a multiple of 8 from 24 to 256", instruction, count);
    }
    if (takes ? count < before : count > before) {
        die("%s: %u registers, where the warp has %u", instruction, count, before);
    }
    warp_together(instruction, change_registers_of_warp, &count);
    if (warp_of(*current).registers != count) {
        wait_here(free_registers_name);
    }
}

void wait_dependency() { block.waited_dependency = true; }

// =============================================================================
// cp.async: lands at the wait that covers its group
// =============================================================================

void copy_async(void* shared, const void* global, int bytes, bool read) {
    check_shared("copy_async", shared, bytes, bytes);
    if (read) {
        check_global("copy_async", global, (unsigned)bytes, (unsigned)bytes);
    }
    note_copy_start(shared, (unsigned)bytes, current->index);
    memset(shared, 0xff, (size_t)bytes);
    current->copies.push_back({shared, global, bytes, read, current->groups, nullptr});
}

void copy_async_commit() { ++current->groups; }

static void arrive(const char* instruction, mbarrier* barrier);

static void land_oldest_copy(thread& owner) {
    const small_copy copy = owner.copies.front();
    owner.copies.pop_front();
    if (copy.barrier) {
        --block.copy_arrivals;
        order_release(copy.barrier, owner.index);
        arrive("copy_arrive", copy.barrier);
        return;
    }
    note_copy_by_thread(copy.shared, (unsigned)copy.bytes, owner.index);
    if (copy.read) {
        memcpy(copy.shared, copy.global, (size_t)copy.bytes);
    } else {
        memset(copy.shared, 0, (size_t)copy.bytes);
    }
}

void copy_async_wait(int pending) {
    while (!current->copies.empty() && current->copies[0].group < current->groups - pending) {
        land_oldest_copy(*current);
    }
}

// =============================================================================
// mbarriers and cp.async.bulk: lands when somebody waits for its barrier
// =============================================================================

static mbarrier* checked_barrier(const char* instruction, unsigned long long* word) {
    mbarrier* barrier = (mbarrier*)word;
    check_shared(instruction, word, 8, 8);
    note_read(word, 8, current->index);
    if (barrier->valid != mbarrier_valid) {
        die("%s: no initialised barrier at shared offset %lu", instruction,
            (unsigned long)((unsigned char*)word - here.shared));
    }
    return barrier;
}

static void end_phase_if_complete(mbarrier* barrier) {
    if (barrier->pending == 0 && barrier->bytes == 0) {
        barrier->pending = barrier->expected;
        barrier->parity ^= 1;
        order_complete(barrier);
    }
}

void barrier_init(unsigned long long* word, unsigned arrivals) {
    mbarrier* barrier = (mbarrier*)word;
    check_shared("barrier_init", word, 8, 8);
    if (arrivals < 1 || arrivals > 1024) {
        die("barrier_init: %u arrivals", arrivals);
    }
    memset(word, 0, 8);
    barrier->expected = (uint16_t)arrivals;
    barrier->pending = (uint16_t)arrivals;
    barrier->valid = mbarrier_valid;
    note_write(word, 8, current->index);
    block.unfenced_init = true;
}

void barrier_init_fence() { block.unfenced_init = false; }

static void arrive(const char* instruction, mbarrier* barrier) {
    if (barrier->pending == 0) {
        die("%s: more arrivals than the barrier was made for", instruction);
    }
    barrier->pending -= 1;
    end_phase_if_complete(barrier);
}

static void expect(const char* instruction, mbarrier* barrier, unsigned bytes) {
    if (barrier->bytes + (int64_t)bytes >= 1 << 20) {
        die("%s: %u bytes more are too many for a phase", instruction, bytes);
    }
    barrier->bytes += (int)bytes;
}

void barrier_arrive(unsigned long long* word) {
    mbarrier* barrier = checked_barrier("barrier_arrive", word);
    order_release(barrier, current->index);
    arrive("barrier_arrive", barrier);
}

void barrier_expect(unsigned long long* word, unsigned bytes) {
    expect("barrier_expect", checked_barrier("barrier_expect", word), bytes);
}

void barrier_arrive_expect(unsigned long long* word, unsigned bytes) {
    mbarrier* barrier = checked_barrier("barrier_arrive_expect", word);
    order_release(barrier, current->index);
    expect("barrier_arrive_expect", barrier, bytes);
    arrive("barrier_arrive_expect", barrier);
}

void copy_arrive(unsigned long long* word) {
    mbarrier* barrier = checked_barrier("copy_arrive", word);
    current->copies.push_back({here.shared, nullptr, 0, false, current->groups, barrier});
    ++block.copy_arrivals;
}

void copy_bulk(void* shared, const void* global, unsigned bytes, unsigned long long* word) {
    mbarrier* barrier = checked_barrier("copy_bulk", word);
    if (block.unfenced_init) {
        die("copy_bulk: barrier_init without barrier_init_fence");
    }
    if (bytes == 0 || bytes % 16) {
        die("copy_bulk: %u bytes are not a positive multiple of 16", bytes);
    }
    check_shared("copy_bulk", shared, bytes, 16);
    check_global("copy_bulk", global, bytes, 16);
    note_copy_start(shared, bytes, current->index);
    memset(shared, 0xff, bytes);
    block.copies.push_back({shared, global, bytes, barrier});
}

// Whose arrival at the barrier waits for copies of its own.
static thread* copy_arriver(const mbarrier* barrier) {
    for (int i = 0; block.copy_arrivals > 0 && i < running->threads; ++i) {
        for (const small_copy& copy : threads[i].copies) {
            if (copy.barrier == barrier) {
                return &threads[i];
            }
        }
    }
    return nullptr;
}

static bool phase_ended(mbarrier* barrier, unsigned parity) {
    if (barrier->parity != parity) {
        return true;
    }
    while (thread* arriver = copy_arriver(barrier)) {
        land_oldest_copy(*arriver);
    }
    for (size_t i = 0; i < block.copies.size();) { // land what it waits for
        bulk_copy copy = block.copies[i];
        if (copy.barrier != barrier) {
            ++i;
            continue;
        }
        block.copies.erase(block.copies.begin() + (long)i);
        memcpy(copy.shared, copy.global, copy.bytes);
        note_copy_by_engine(copy.shared, copy.bytes, barrier);
        barrier->bytes -= (int)copy.bytes;
        end_phase_if_complete(barrier);
    }
    return barrier->parity != parity;
}

void barrier_wait(unsigned long long* word, unsigned parity) {
    mbarrier* barrier = checked_barrier("barrier_wait", word);
    if (parity > 1) {
        die("barrier_wait: parity %u", parity);
    }
    if (!phase_ended(barrier, parity)) {
        current->barrier = barrier;
        current->parity = parity;
        warp_of(*current).on_mbarrier |= lane_bit(*current);
        wait_here("barrier_wait");
    }
    order_acquire(barrier, current->index);
}

// Threads whose mbarrier's phase has ended can go on.
static void poll_mbarriers(int warp_count) {
    for (int i = 0; i < warp_count; ++i) {
        for (unsigned lanes = warps[i].on_mbarrier; lanes; lanes &= lanes - 1) {
            thread& waiter = threads[i * 32 + __builtin_ctz(lanes)];
            if (phase_ended(waiter.barrier, waiter.parity)) {
                warps[i].on_mbarrier &= ~lane_bit(waiter);
                warps[i].runnable |= lane_bit(waiter);
            }
        }
    }
}

// =============================================================================
// Blocks and launches
// =============================================================================

static void make_fibers(int count) {
    static int made;
    for (; made < count; ++made) {
        char* memory = (char*)mmap(nullptr, guard_bytes + stack_bytes, PROT_READ | PROT_WRITE,
                                   MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED || mprotect(memory, guard_bytes, PROT_NONE)) {
            die("no memory for the stacks of %d threads", count);
        }
        threads[made].stack = memory + guard_bytes;
        threads[made].index = made;
        make_context(&threads[made].where, threads[made].stack, stack_bytes, fiber);
    }
}

// A warp runs until its lanes all wait. One launch in two also changes warps in between, after
// about one in 8 warp-wide instructions.
static void run_warp(warp& mine, bool change_often) {
    block.met = false;
    while (mine.runnable) {
        resume(threads[(&mine - warps) * 32 + random_bit(mine.runnable)]);
        if (block.met && change_often && random_below(8) == 0) {
            return;
        }
        block.met = false;
    }
}

static void run_block(bool change_often) {
    int warp_count = running->threads / 32;
    memset(here.shared, 0xff, here.shared_bytes);
    wgmma_start_block();
    order_start(running->threads);
    block.alive = running->threads;
    block.at_barrier = 0;
    block.predicate = block.unfenced_init = block.waited_dependency = false;
    block.copies.clear();
    block.copy_arrivals = 0;
    memset(block.named, 0, sizeof block.named);
    block.free_registers = 0;
    for (int i = 0; i < running->threads; ++i) {
        threads[i].groups = 0;
    }
    for (int i = 0; i < warp_count; ++i) {
        warps[i] = warp{all_lanes, 0, first_registers(), first_registers(), {}};
    }
    while (block.alive > 0) {
        unsigned can_run = 0;
        poll_mbarriers(warp_count);
        for (int i = 0; i < warp_count; ++i) {
            can_run |= (unsigned)(warps[i].runnable != 0) << i;
        }
        if (!can_run) {
            die_of_deadlock();
        }
        run_warp(warps[random_bit(can_run)], change_often);
    }
    wgmma_end_block();
    for (int i = 0; i < running->threads; ++i) {
        for (const small_copy& lost : threads[i].copies) { // that nobody waited for
            note_copy_by_thread(lost.shared, (unsigned)lost.bytes, i);
        }
        threads[i].copies.clear();
    }
    if (!block.copies.empty()) {
        die("%s: block %d,%d,%d ended with bulk copies under way", running->what->name,
            here.block[0], here.block[1], here.block[2]);
    }
    if (running->programmatic && !block.waited_dependency) {
        die("%s: block %d,%d,%d may overlap the kernel before and never waited for it",
            running->what->name, here.block[0], here.block[1], here.block[2]);
    }
}

void run(const launch& work) {
    std::lock_guard<std::mutex> lock(one_launch);
    void* shared = nullptr;
    uint64_t blocks = (uint64_t)work.grid[0] * (uint64_t)work.grid[1] * (uint64_t)work.grid[2];
    running = &work;
    start_random();
    if (work.threads % 32 || work.threads < 32 || work.threads > max_warps * 32) {
        die("%s: a block of %d threads", work.what->name, work.threads);
    }
    make_fibers(work.threads);
    // To the byte, so that ASan sees the first access past it.
    if (posix_memalign(&shared, 1024, work.shared_bytes ? work.shared_bytes : 1)) {
        die("no memory for a block's shared memory");
    }
    here.shared = (unsigned char*)shared;
    here.shared_bytes = work.shared_bytes;
    memcpy(here.grid, work.grid, sizeof here.grid);

    // A random start, then every step-th block, where step and count have no common factor.
    bool change_often = random_below(2);
    uint64_t at = random_below((unsigned)(blocks < 0xffffffffu ? blocks : 0xffffffffu));
    uint64_t step = 1 + random_below(1u << 20);
    while (std::gcd(step, blocks) != 1) {
        ++step;
    }
    for (uint64_t i = 0; i < blocks; ++i) {
        here.block[0] = (int)(at % (uint64_t)work.grid[0]);
        here.block[1] = (int)(at / (uint64_t)work.grid[0] % (uint64_t)work.grid[1]);
        here.block[2] = (int)(at / (uint64_t)work.grid[0] / (uint64_t)work.grid[1]);
        run_block(change_often);
        at = (at + step) % blocks;
    }
    free(shared);
    here.shared = nullptr;
    here.shared_bytes = 0;
    running = nullptr;
}

} // namespace emulator

extern "C" void kmla_emulator_seed(unsigned long long seed) {
    std::lock_guard<std::mutex> lock(emulator::one_launch);
    emulator::seed_value = seed;
    emulator::launches = 0;
}
