// wgmma, by the PTX manual: matrix products of a warpgroup that run until a wait.
//
// Each warp issues, commits and waits on its own, so a warpgroup is no barrier here: that its four
// warps do the same is compared with a log. A product is computed at the wait that covers it. Until
// then its accumulators are poison, and neither they nor what it reads (A registers, B in shared
// memory) may change. The device text is compiled without reuse of stack slots, so an A array that
// went out of scope still is as its code left it.

#include "emulator.h"

#include <stdint.h>
#include <string.h>

#include <deque>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

namespace emulator {

static const int max_warps = 32;
static const int row_bytes = 32; // 16 k of 2 bytes
static const int swizzled_row_bytes = 128;
static const int pattern_bytes = 1024; // 8 rows

// One wgmma of a warp, from its issue to its wait.
struct product {
    wgmma_operand lanes[32];
    unsigned a[32][4];            // as issued
    std::vector<unsigned char> b; // [n][32 bytes], as issued
    std::vector<float> d;         // [32][count] to add to; empty while a product before makes it
    int group;
};

static struct {
    std::deque<product> in_flight; // oldest first
    int groups;                    // committed so far
    bool fenced;                   // since the start or the last wait
    size_t steps;                  // taken so far
} states[max_warps];

// What a warpgroup executes, in the words of the warp that is furthest.
struct step {
    const char* instruction;
    int number;           // registers of d, or groups left pending
    unsigned long long b; // descriptor
};
static std::vector<step> logs[max_warps / 4];

static int warp_index() { return here.thread / 32; }

// The running warp's next step; dies if another warp of its warpgroup took another.
static void take_step(const step& mine) {
    std::vector<step>& log = logs[warp_index() / 4];
    size_t at = states[warp_index()].steps++;
    if (at == log.size()) {
        log.push_back(mine);
    }
    const step& other = log[at];
    if (strcmp(other.instruction, mine.instruction) || other.number != mine.number ||
        other.b != mine.b) {
        die("%s %d (descriptor 0x%llx), where another warp of the warpgroup has %s %d "
            "(descriptor 0x%llx)",
            mine.instruction, mine.number, mine.b, other.instruction, other.number, other.b);
    }
}

void same_in_warpgroup(const char* instruction, int number) { take_step({instruction, number, 0}); }

// =============================================================================
// The matrix B
// =============================================================================

static unsigned bits(unsigned long long descriptor, int first, int last) {
    return (unsigned)(descriptor >> first & ((1ull << (last - first + 1)) - 1));
}

// Fields: start address / 16, leading byte offset (not used when swizzled), stride of 8 rows / 16,
// base offset, swizzle.
static void check_descriptor(const char* instruction, unsigned long long b, int n) {
    unsigned start = bits(b, 0, 13) * 16, stride = bits(b, 32, 45) * 16;
    if (bits(b, 14, 15) || bits(b, 30, 31) || bits(b, 46, 48) || bits(b, 52, 61)) {
        die("%s: descriptor 0x%llx has unknown bits", instruction, b);
    }
    if (bits(b, 62, 63) != 1) {
        die("%s: descriptor 0x%llx: swizzle %u is not emulated", instruction, b, bits(b, 62, 63));
    }
    if (bits(b, 49, 51)) {
        die("%s: descriptor 0x%llx: base offset %u is not emulated", instruction, b,
            bits(b, 49, 51));
    }
    if (start % pattern_bytes >= swizzled_row_bytes || start % row_bytes) {
        die("%s: descriptor 0x%llx: shared offset %u is not a k16 step of the first row of an "
            "aligned %d bytes",
            instruction, b, start, pattern_bytes);
    }
    if (n > 8 && (stride == 0 || stride % pattern_bytes)) {
        die("%s: descriptor 0x%llx: stride %u is not a positive multiple of %d", instruction, b,
            stride, pattern_bytes);
    }
    unsigned last_rows = start / pattern_bytes * pattern_bytes + (unsigned)(n / 8 - 1) * stride;
    check_shared(instruction, here.shared + last_rows, pattern_bytes, pattern_bytes);
}

// The 16 bytes that hold elements k = 8 * half and on of row n, before conversion.
static unsigned char* b_bytes(unsigned long long b, int n, int half) {
    unsigned address = bits(b, 0, 13) * 16 + (unsigned)(n / 8) * bits(b, 32, 45) * 16 +
                       (unsigned)(n % 8) * swizzled_row_bytes + (unsigned)half * 16;
    return here.shared + (address ^ (address >> 7 & 7) << 4); // bits 4-6 by bits 7-9
}

static std::vector<unsigned char> read_b(unsigned long long b, int n) {
    std::vector<unsigned char> rows((size_t)(n * row_bytes));
    for (int i = 0; i < n * 2; ++i) {
        memcpy(&rows[(size_t)i * 16], b_bytes(b, i / 2, i % 2), 16);
    }
    return rows;
}

// =============================================================================
// Issue, commit, wait
// =============================================================================

static bool is_poison(const float* d, int count) {
    for (int i = 0; i < count; ++i) {
        unsigned word;
        memcpy(&word, d + i, 4);
        if (word != 0xffffffffu) {
            return false;
        }
    }
    return true;
}

static bool overlap(const wgmma_operand& a, const wgmma_operand& b) {
    return a.d < b.d + b.count && b.d < a.d + a.count;
}

static bool same_accumulators(const wgmma_operand& a, const wgmma_operand& b) {
    return a.d == b.d && a.count == b.count && a.bf16 == b.bf16;
}

static const char* name_of(const wgmma_operand& operand) {
    return operand.bf16 ? "wgmma_bf16" : "wgmma_f16";
}

static void issue(void* const operands[32]) {
    auto& state = states[warp_index()];
    product mine = {};
    bool continues = false; // a product in flight
    for (int lane = 0; lane < 32; ++lane) {
        mine.lanes[lane] = *(const wgmma_operand*)operands[lane];
        memcpy(mine.a[lane], mine.lanes[lane].a, sizeof mine.a[lane]);
    }
    const wgmma_operand& first = mine.lanes[0];
    const char* instruction = name_of(first);
    for (const wgmma_operand& lane : mine.lanes) {
        if (lane.b != first.b || lane.count != first.count || lane.add != first.add ||
            lane.bf16 != first.bf16) {
            die("%s: lanes of a warp have other operands", instruction);
        }
    }
    if (!state.fenced) {
        die("%s: no wgmma_fence since the start or the last wgmma_wait", instruction);
    }
    take_step({instruction, first.count, first.b});
    check_descriptor(instruction, first.b, first.count * 2);
    for (int i = 0; i < first.count * 4; ++i) {
        note_read(b_bytes(first.b, i / 2, i % 2), 16, here.thread);
        check_fenced(instruction, b_bytes(first.b, i / 2, i % 2), 16);
    }
    mine.b = read_b(first.b, first.count * 2);
    mine.group = state.groups;
    for (const product& before : state.in_flight) {
        if (same_accumulators(before.lanes[0], first)) {
            continues = true;
        } else if (overlap(before.lanes[0], first)) {
            die("%s: accumulators of a product of another shape that is under way", instruction);
        }
    }
    if (!continues) {
        for (const wgmma_operand& lane : mine.lanes) {
            mine.d.insert(mine.d.end(), lane.d, lane.d + lane.count);
            memset(lane.d, 0xff, sizeof(float) * (size_t)lane.count);
        }
    }
    state.in_flight.push_back(mine);
}

// Dies if something that the product uses changed since its issue.
static void check_unchanged(const product& done) {
    const char* instruction = name_of(done.lanes[0]);
    for (int lane = 0; lane < 32; ++lane) {
        const wgmma_operand& mine = done.lanes[lane];
        if (!is_poison(mine.d, mine.count)) {
            die("%s: lane %d wrote to accumulators before the wgmma_wait", instruction, lane);
        }
#ifdef __SANITIZE_ADDRESS__
        if (__asan_region_is_poisoned((void*)mine.a, sizeof done.a[lane])) {
            continue; // out of scope
        }
#endif
        if (memcmp(mine.a, done.a[lane], sizeof done.a[lane])) {
            die("%s: lane %d wrote to A registers before the wgmma_wait", instruction, lane);
        }
    }
    if (read_b(done.lanes[0].b, done.lanes[0].count * 2) != done.b) {
        die("%s: B in shared memory changed between the issue and the wgmma_wait", instruction);
    }
}

// The oldest product in flight is done.
static void land_oldest(std::deque<product>& in_flight) {
    product done = in_flight.front();
    in_flight.pop_front();
    for (int i = 0; i < done.lanes[0].count * 4; ++i) {
        note_read(b_bytes(done.lanes[0].b, i / 2, i % 2), 16, here.thread);
    }
    check_unchanged(done);
    if (!done.lanes[0].add) {
        done.d.assign(done.d.size(), 0);
    }
    wgmma_multiply(done.lanes, done.a, done.b.data(), done.d.data());
    for (product& next : in_flight) {
        if (same_accumulators(next.lanes[0], done.lanes[0])) {
            next.d = done.d;
            return;
        }
    }
    for (int lane = 0; lane < 32; ++lane) {
        const wgmma_operand& mine = done.lanes[lane];
        memcpy(mine.d, &done.d[(size_t)(lane * mine.count)], sizeof(float) * (size_t)mine.count);
    }
}

static void wait(void* const operands[32]) {
    auto& state = states[warp_index()];
    int pending = *(const int*)operands[0];
    take_step({"wgmma_wait", pending, 0});
    state.fenced = false;
    while (!state.in_flight.empty() && state.in_flight[0].group < state.groups - pending) {
        land_oldest(state.in_flight);
    }
}

void wgmma_start_block() {
    for (auto& state : states) {
        state = {};
    }
    for (auto& log : logs) {
        log.clear();
    }
}

void wgmma_end_block() {
    for (int i = 0; i < max_warps; ++i) {
        if (states[i].steps != logs[i / 4].size()) {
            die("warp %d ended after %zu instructions of its warpgroup, where another warp had "
                "%zu; the next: %s",
                i, states[i].steps, logs[i / 4].size(), logs[i / 4][states[i].steps].instruction);
        }
    }
}

void wgmma(const wgmma_operand& mine) { warp_together(name_of(mine), issue, (void*)&mine); }

void wgmma_fence() {
    warp_together(
        "wgmma_fence",
        [](void* const*) {
            take_step({"wgmma_fence", 0, 0});
            states[warp_index()].fenced = true;
        },
        nullptr);
}

void wgmma_commit() {
    warp_together(
        "wgmma_commit",
        [](void* const*) {
            take_step({"wgmma_commit", 0, 0});
            ++states[warp_index()].groups;
        },
        nullptr);
}

void wgmma_wait(int pending) { warp_together("wgmma_wait", wait, &pending); }

} // namespace emulator
