// Who touched which byte of shared memory, and whether that came before for whoever touches it now.
//
// The device text is compiled with -fsanitize=thread: a call before every load and store, of this
// file instead of libtsan. An access comes before another if a chain of barriers, mbarriers and
// warp-wide instructions leads from one to the other, whatever the schedule was. Two accesses of
// which neither comes before the other, one of them a store, abort: a barrier is missing, even
// where this run's values came out right. So do an access to where a copy is under way, and a wgmma
// that reads what some thread stored and did not fence_async_reads() since.
//
// A store of what is there already is no race, and its warp may load that without a barrier: warps
// that compute the same store it each for itself.
//
// Configurations under ASan have no such calls: there only what the emulator itself does is seen.

#include "emulator.h"

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <algorithm>
#include <map>
#include <vector>

namespace emulator {

static const int max_threads = 1024;
static const int max_warps = max_threads / 32;
static const uint32_t under_way = 0xffffffff; // the time of a copy that has not landed

// Agents are the block's threads and, behind the last, the bulk copies of an mbarrier each (two
// share one where there are more of them). Time goes on where agents meet.
struct access {
    uint32_t time;
    int agent;
};
static const int copy_agents = 16;
static int threads, agents; // of the block
static uint32_t now;
static bool watching = true;

// By offset: the last store, and some loads, of warps that did not meet in between.
static const int kept_reads = 4;
static std::vector<access> writes, reads[kept_reads];
static std::vector<uint32_t> echoes; // the warps that stored, since, what was there already

// Of each agent: what it did up to this time comes before.
struct history {
    uint32_t until[max_threads + copy_agents];
};
// Lanes of a warp share one, but for those that met somebody else alone since all met.
static history of_warp[max_warps], of_lane[max_threads];
static bool alone[max_threads];
// At an mbarrier or a named barrier: of those who came so far, and when its last phase ended.
struct meeting {
    history arriving, complete;
};
static std::map<const void*, meeting> meetings;
static uint32_t fenced[max_threads]; // when the thread last did fence_async_reads()

// =============================================================================
// What comes before
// =============================================================================

static void join(history& to, const history& other) {
    for (int i = 0; i < agents; ++i) {
        to.until[i] = std::max(to.until[i], other.until[i]);
    }
}

static const history& history_of(int thread) {
    return alone[thread] ? of_lane[thread] : of_warp[thread / 32];
}

static int agent_of_copies(const void* barrier) {
    return threads + (int)((uintptr_t)barrier / 8 % copy_agents);
}

void order_start(int thread_count) {
    threads = thread_count;
    agents = threads + copy_agents;
    writes.resize(std::max<size_t>(writes.size(), here.shared_bytes));
    for (std::vector<access>& each : reads) {
        each.resize(writes.size());
    }
    echoes.resize(writes.size());
    if (now > under_way / 2) {
        now = 0;
        std::fill(writes.begin(), writes.end(), access{0, 0});
        for (std::vector<access>& each : reads) {
            std::fill(each.begin(), each.end(), access{0, 0});
        }
    }
    for (history& each : of_warp) { // all that other blocks did comes before
        std::fill(each.until, each.until + max_threads + copy_agents, now);
    }
    std::fill(fenced, fenced + threads, now);
    std::fill(alone, alone + threads, false);
    meetings.clear();
    ++now;
}

void order_lanes(int warp, unsigned lanes) {
    settle_stores();
    history all = of_warp[warp];
    for (int i = warp * 32; i < warp * 32 + 32; ++i) {
        if (lanes >> i % 32 & 1) {
            if (alone[i]) {
                join(all, of_lane[i]);
            }
            all.until[i] = now;
        }
    }
    if (lanes == 0xffffffffu) {
        of_warp[warp] = all;
    }
    for (int i = warp * 32; i < warp * 32 + 32; ++i) {
        if (lanes >> i % 32 & 1) {
            alone[i] = lanes != 0xffffffffu;
            if (alone[i]) {
                of_lane[i] = all;
            }
        }
    }
    ++now;
}

void order_block() {
    settle_stores();
    history all = of_warp[0];
    for (int i = 0; i < threads; ++i) {
        if (alone[i] || i % 32 == 0) {
            join(all, history_of(i));
        }
    }
    std::fill(all.until, all.until + threads, now);
    std::fill(of_warp, of_warp + threads / 32, all);
    std::fill(alone, alone + threads, false);
    ++now;
}

void order_release(const void* barrier, int thread) {
    settle_stores();
    history& its = meetings[barrier].arriving;
    join(its, history_of(thread));
    its.until[thread] = now++;
}

void order_complete(const void* barrier) {
    meeting& its = meetings[barrier];
    its.complete = its.arriving;
}

void order_acquire(const void* barrier, int thread) {
    if (!alone[thread]) {
        of_lane[thread] = of_warp[thread / 32];
        alone[thread] = true;
    }
    join(of_lane[thread], meetings[barrier].complete);
}

void watch_races(bool on) { watching = on; }

void fence_async_reads() { fenced[here.thread] = now++; }

// =============================================================================
// Accesses
// =============================================================================

static size_t offset_of(const void* shared) {
    return (size_t)((const unsigned char*)shared - here.shared);
}

static void die_of_race(const char* does, size_t offset, int thread, const char* did,
                        const access& other, const void* from) {
    if (!watching) {
        return;
    }
    Dl_info image = {};
    char where[1024] = "";
    if (from && dladdr(from, &image)) {
        snprintf(where, sizeof where, "; see addr2line -ife %s 0x%lx", image.dli_fname,
                 (unsigned long)((const char*)from - (const char*)image.dli_fbase - 1));
    }
    if (other.time == under_way) {
        die("race: thread %d %s shared offset %lu, which a copy under way writes%s", thread, does,
            (unsigned long)offset, where);
    }
    if (other.agent >= threads) {
        die("race: thread %d %s shared offset %lu, which a copy wrote, with no wait between%s",
            thread, does, (unsigned long)offset, where);
    }
    die("race: thread %d %s shared offset %lu, which thread %d %s, with no barrier between%s",
        thread, does, (unsigned long)offset, other.agent, did, where);
}

static bool same(const access& a, const access& b) {
    return a.time == b.time && a.agent == b.agent;
}

static bool comes_before(const access& other, int thread) {
    return other.time <= history_of(thread).until[other.agent] ||
           (other.agent == thread && other.time != under_way);
}

// The first of some bytes whose access does not come before the thread's; `end` if there is none.
static size_t find_race(const std::vector<access>& accesses, size_t first, size_t end, int thread) {
    access good = {0, 0};
    for (size_t i = first; i < end; ++i) {
        if (!same(accesses[i], good)) {
            if (!comes_before(accesses[i], thread)) {
                return i;
            }
            good = accesses[i];
        }
    }
    return end;
}

// A store that is a race unless it leaves its bytes as they are: to be seen when it is done.
static struct {
    size_t first, race;
    unsigned bytes; // 0: there is none
    int thread;
    unsigned char before[16];
    const char* did;
    access other;
    const void* from;
} doubtful;

void settle_stores() {
    if (doubtful.bytes == 0) {
        return;
    }
    unsigned bytes = doubtful.bytes;
    doubtful.bytes = 0;
    if (memcmp(here.shared + doubtful.first, doubtful.before, bytes)) {
        die_of_race("writes", doubtful.race, doubtful.thread, doubtful.did, doubtful.other,
                    doubtful.from);
    }
    for (size_t i = doubtful.first; i < doubtful.first + bytes; ++i) {
        echoes[i] |= 1u << doubtful.thread / 32;
    }
}

static void doubt(size_t first, unsigned bytes, size_t race, int thread, const char* did,
                  const access& other, const void* from) {
    if (!from || bytes > sizeof doubtful.before || other.time == under_way || !watching) {
        die_of_race("writes", race, thread, did, other, from);
        return;
    }
    doubtful = {first, race, bytes, thread, {}, did, other, from};
    memcpy(doubtful.before, here.shared + first, bytes);
}

// A read takes the place of one by the same warp or of one that came before, if there is such.
static int place_of_read(size_t offset, int thread) {
    static unsigned turn;
    for (int i = 0; i < kept_reads; ++i) {
        const access& kept = reads[i][offset];
        if (kept.agent / 32 == thread / 32 || comes_before(kept, thread)) {
            return i;
        }
    }
    return (int)(++turn % kept_reads);
}

static void note_read_from(const void* shared, unsigned bytes, int thread, const void* from) {
    size_t first = offset_of(shared), end = first + bytes;
    settle_stores();
    for (size_t race = first; (race = find_race(writes, race, end, thread)) < end; ++race) {
        if (!(echoes[race] >> thread / 32 & 1)) {
            die_of_race("reads", race, thread, "wrote", writes[race], from);
        }
    }
    for (size_t i = first; i < first + bytes; ++i) {
        reads[place_of_read(i, thread)][i] = {now, thread};
    }
}

static void note_write_from(const void* shared, unsigned bytes, int thread, const void* from) {
    size_t first = offset_of(shared), end = first + bytes;
    settle_stores();
    for (int i = -1; i < kept_reads; ++i) {
        const std::vector<access>& each = i < 0 ? writes : reads[i];
        size_t race = find_race(each, first, end, thread);
        if (race < end) {
            doubt(first, bytes, race, thread, i < 0 ? "wrote" : "read", each[race], from);
            if (doubtful.bytes) {
                return;
            }
        }
    }
    std::fill_n(writes.begin() + (long)first, bytes, access{now, thread});
    std::fill_n(echoes.begin() + (long)first, bytes, 0);
}

void note_read(const void* shared, unsigned bytes, int thread) {
    note_read_from(shared, bytes, thread, nullptr);
}

void note_write(const void* shared, unsigned bytes, int thread) {
    note_write_from(shared, bytes, thread, nullptr);
}

void note_copy_start(const void* shared, unsigned bytes, int thread) {
    note_write(shared, bytes, thread);
    std::fill_n(writes.begin() + (long)offset_of(shared), bytes, access{under_way, threads});
}

static void note_copy_end(const void* shared, unsigned bytes, int agent) {
    std::fill_n(writes.begin() + (long)offset_of(shared), bytes, access{now, agent});
}

void note_copy_by_thread(const void* shared, unsigned bytes, int thread) {
    note_copy_end(shared, bytes, thread);
}

void note_copy_by_engine(const void* shared, unsigned bytes, const void* barrier) {
    note_copy_end(shared, bytes, agent_of_copies(barrier));
    meetings[barrier].arriving.until[agent_of_copies(barrier)] = now++;
}

void check_fenced(const char* instruction, const void* shared, unsigned bytes) {
    size_t first = offset_of(shared);
    for (size_t i = first; i < first + bytes; ++i) {
        int agent = writes[i].agent;
        if (agent < threads && writes[i].time > fenced[agent]) {
            die("%s: no fence_async_reads by thread %d since it wrote shared offset %lu",
                instruction, agent, (unsigned long)i);
        }
    }
}

// =============================================================================
// What the compiler calls
// =============================================================================

static bool is_shared(const void* address) { return offset_of(address) < here.shared_bytes; }

static void read_by_text(const void* address, unsigned bytes, const void* from) {
    if (is_shared(address)) {
        note_read_from(address, bytes, here.thread, from);
    }
}

static void write_by_text(const void* address, unsigned bytes, const void* from) {
    if (is_shared(address)) {
        note_write_from(address, bytes, here.thread, from);
    }
}

} // namespace emulator

#define ACCESS(name, bytes)                                                                        \
    extern "C" void __tsan_read##name(void* address) {                                             \
        emulator::read_by_text(address, bytes, __builtin_return_address(0));                       \
    }                                                                                              \
    extern "C" void __tsan_write##name(void* address) {                                            \
        emulator::write_by_text(address, bytes, __builtin_return_address(0));                      \
    }
ACCESS(1, 1)
ACCESS(2, 2)
ACCESS(4, 4)
ACCESS(8, 8)
ACCESS(16, 16)
#undef ACCESS
extern "C" void __tsan_read_range(void* address, unsigned long bytes) {
    emulator::read_by_text(address, (unsigned)bytes, __builtin_return_address(0));
}
extern "C" void __tsan_write_range(void* address, unsigned long bytes) {
    emulator::write_by_text(address, (unsigned)bytes, __builtin_return_address(0));
}
extern "C" void __tsan_init() {}
