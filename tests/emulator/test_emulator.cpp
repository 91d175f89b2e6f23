// Tests the emulator itself: instructions against expectations of their own, and that mistakes of
// device code show.

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <vector>

#include "emulator.h"

// The kernels; device code has no standard headers, so it lives in a namespace of its own.
namespace device {

#include "instructions.h"

// ---- warp instructions

struct mma_args {
    const uint16_t *a, *b; // [16][16], [8][16] (column by column)
    float* d;              // [16][8]
    int bf16;
};

KMLA_KERNEL(mma_kernel, mma_args, 32, 1) {
    int group = thread_index() / 4, column = thread_index() % 4 * 2;
    uint32_t a[4], b[2];
    float d[4];
    for (int i = 0; i < 4; ++i) {
        a[i] = *(const uint32_t*)&args.a[(group + i % 2 * 8) * 16 + column + i / 2 * 8];
        d[i] = args.d[(group + i / 2 * 8) * 8 + column + i % 2];
    }
    for (int i = 0; i < 2; ++i) {
        b[i] = *(const uint32_t*)&args.b[group * 16 + column + i * 8];
    }
    if (args.bf16) {
        mma_bf16(d, a, b[0], b[1]);
    } else {
        mma_f16(d, a, b[0], b[1]);
    }
    for (int i = 0; i < 4; ++i) {
        args.d[(group + i / 2 * 8) * 8 + column + i % 2] = d[i];
    }
}

struct buffer_args {
    uint32_t* out;
    const uint32_t* in;
    int how;
};

// Row r of matrix m holds m * 64 + r * 8 + element.
KMLA_KERNEL(load_matrix_kernel, buffer_args, 32, 1) {
    int lane = thread_index();
    uint16_t* row = (uint16_t*)shared_memory() + lane * 8;
    for (int i = 0; i < 8; ++i) {
        row[i] = (uint16_t)(lane * 8 + i);
    }
    sync_block();
    uint32_t r[4];
    if (args.how) {
        load_matrix_x4_transposed(r, row);
    } else {
        load_matrix_x4(r, row);
    }
    for (int i = 0; i < 4; ++i) {
        args.out[lane * 4 + i] = r[i];
    }
}

KMLA_KERNEL(vote_kernel, buffer_args, 256, 1) {
    int i = thread_index();
    uint32_t* out = args.out + i * 5;
    out[0] = ballot(i % 3 == 0);
    out[1] = shuffle_xor((uint32_t)i, 5);
    out[2] = (uint32_t)shuffle_xor((float)i, 8);
    out[3] = (uint32_t)(shuffle(0x100000000ull * i, 7) >> 32);
    out[4] = (uint32_t)(sync_block_or(i == args.how) ? 2 : 0) | (uint32_t)sync_block_or(false);
}

// Lanes whose number has the same remainder by 3 vote, shuffle and look for their largest apart.
KMLA_KERNEL(subset_kernel, buffer_args, 64, 1) {
    int lane = thread_index() % 32;
    uint32_t among = 0, *out = args.out + thread_index() * 3;
    for (int i = lane % 3; i < 32; i += 3) {
        among |= 1u << i;
    }
    out[0] = ballot_among(among, lane < 16);
    out[1] = shuffle_among(among, (uint32_t)thread_index(), lane % 3 + 6);
    out[2] = maximum_among(among, (uint32_t)(1000 - thread_index()));
}

// ---- meeting

// Each warp writes a word and reads its neighbour's.
KMLA_KERNEL(neighbour_kernel, buffer_args, 256, 1) {
    uint32_t* shared = (uint32_t*)shared_memory();
    int i = thread_index();
    shared[i] = (uint32_t)i;
    if (args.how) {
        sync_block();
    }
    args.out[i] = shared[(i + 32) % 256];
}

// The same between lanes of a warp; a warp-wide vote is a meeting point.
KMLA_KERNEL(lane_kernel, buffer_args, 32, 1) {
    uint32_t* shared = (uint32_t*)shared_memory();
    int i = thread_index();
    shared[i] = (uint32_t)i;
    if (args.how) {
        ballot(true);
    }
    args.out[i] = shared[(i + 1) % 32];
}

// Warps 0 and 1 write what warps 2 and 3 read, round after round. Bit 0 of how: readers wait for
// writers; bit 1: writers for readers.
KMLA_KERNEL(named_barrier_kernel, buffer_args, 128, 1) {
    uint32_t* shared = (uint32_t*)shared_memory();
    const uint32_t written = 1, read = 15;
    int i = thread_index() % 64;
    for (uint32_t round = 0; round < 4; ++round) {
        if (thread_index() < 64) {
            if (round > 0 && args.how & 2) {
                named_barrier_sync(read, 128);
            }
            shared[i] = 64 * round + (uint32_t)i;
            if (args.how & 1) {
                named_barrier_arrive(written, 128);
            }
        } else {
            if (args.how & 1) {
                named_barrier_sync(written, 128);
            }
            args.out[64 * round + (uint32_t)i] = shared[63 - i];
            if (round < 3 && args.how & 2) {
                named_barrier_arrive(read, 128);
            }
        }
    }
}

// Warps leave one by one; the others' barriers go on.
KMLA_KERNEL(leaving_kernel, buffer_args, 256, 1) {
    uint32_t* shared = (uint32_t*)shared_memory();
    int warp = thread_index() / 32;
    for (int round = 0; round < 8; ++round) {
        if (warp == round) {
            return;
        }
        shared[thread_index()] = (uint32_t)round;
        sync_block();
        args.out[thread_index()] = shared[224 + thread_index() % 32];
        sync_block();
    }
}

// Blocks and grid.
KMLA_KERNEL(where_kernel, buffer_args, 32, 1) {
    if (thread_index() == 0) {
        int at = (block_z() * 3 + block_y()) * 5 + block_x();
        args.out[at] += (uint32_t)(at + 100 * grid_x());
    }
}

// ---- races; how is 1 with what prevents them

// A word that two warps write, which no value that is read can show. Bit 1 of how: both the same.
KMLA_KERNEL(two_stores_kernel, buffer_args, 64, 1) {
    uint32_t* shared = (uint32_t*)shared_memory();
    if (thread_index() == 0) {
        shared[0] = 5;
    }
    if (args.how & 1) {
        sync_block();
    }
    if (thread_index() == 40) {
        shared[0] = args.how & 2 ? 5 : 6;
    }
}

// Each lane stores what all others do, and loads it (bit 0 of how), or its neighbour's warp does.
KMLA_KERNEL(echo_kernel, buffer_args, 64, 1) {
    uint32_t* shared = (uint32_t*)shared_memory();
    if (args.how || thread_index() < 32) {
        shared[0] = 5;
    }
    args.out[thread_index()] = shared[0];
}

// Warp 1 reads before warp 0 writes again, whatever the schedule is: the vote of a warp is no
// barrier of the block.
KMLA_KERNEL(read_then_write_kernel, buffer_args, 64, 1) {
    uint8_t* shared = shared_memory();
    if (thread_index() == 0) {
        shared[1] = 5;
    }
    sync_block();
    if (thread_index() == 63) {
        args.out[0] = shared[1];
    }
    ballot(true);
    if (args.how & 1) {
        sync_block();
    }
    if (thread_index() == 0) {
        shared[1] = 6;
    }
}

// Neighbouring bytes, of a thread each.
KMLA_KERNEL(bytes_kernel, buffer_args, 64, 1) {
    uint8_t* shared = shared_memory();
    shared[thread_index()] = 1;
    shared[thread_index()] += 1;
    sync_block();
    args.out[thread_index()] = shared[63 - thread_index()];
}

// Thread 0 writes, a chain of meetings leads to thread 95: within the warp to thread 1 (bit 0 of
// how), by a barrier of two warps to warp 1, by another to warp 2 (bit 1).
KMLA_KERNEL(chain_kernel, buffer_args, 96, 1) {
    uint32_t* shared = (uint32_t*)shared_memory();
    int warp = thread_index() / 32;
    if (thread_index() == 0) {
        shared[0] = 5;
    }
    if (warp == 0) {
        if (args.how & 1) {
            sync_warp();
        }
        if (thread_index() == 1) {
            shared[0] += 1;
        }
        named_barrier_arrive(1, 64);
    } else if (warp == 1) {
        named_barrier_sync(1, 64);
        named_barrier_arrive(2, 64);
    } else {
        if (args.how & 2) {
            named_barrier_sync(2, 64);
        } else {
            named_barrier_sync(3, 32);
        }
        args.out[thread_index() - 64] = shared[0];
    }
}

// ---- asynchronous copies

// Three groups of 16 bytes; how many of them are waited for is `how`.
KMLA_KERNEL(copy_kernel, buffer_args, 32, 1) {
    uint8_t* shared = shared_memory();
    if (thread_index() != 0) {
        return;
    }
    for (int i = 0; i < 64; ++i) {
        shared[i] = 7;
    }
    for (int i = 0; i < 3; ++i) {
        copy_async_16(shared + 16 * i, args.in + 4 * i, i != 1);
        copy_async_commit();
    }
    if (args.how == 0) {
        copy_async_wait<3>();
    } else if (args.how == 1) {
        copy_async_wait<2>();
    } else if (args.how == 2) {
        copy_async_wait<1>();
    } else {
        copy_async_wait<0>();
    }
    for (int i = 0; i < 16; ++i) {
        args.out[i] = ((uint32_t*)shared)[i];
    }
}

#if KMLA_HAS_BULK_COPY
// Lane 0 of warp 0 feeds warp 1 through one stage of 16 bytes. Bit 0 of how: waits until it is
// read; bit 1: announces the bytes apart from its arrival.
KMLA_KERNEL(pipeline_kernel, buffer_args, 64, 1) {
    uint8_t* shared = shared_memory();
    uint64_t *full = (uint64_t*)(shared + 16), *empty = (uint64_t*)(shared + 24);
    int lane = thread_index() % 32;
    if (thread_index() == 0) {
        barrier_init(full, 1);
        barrier_init(empty, 1);
        barrier_init_fence();
    }
    sync_block();
    for (uint32_t round = 0; round < 4; ++round) {
        if (thread_index() == 0) {
            if (args.how & 1) {
                barrier_wait(empty, round % 2 ^ 1);
            }
            if (args.how & 2) {
                barrier_expect(full, 16);
                copy_bulk(shared, args.in + 4 * round, 16, full);
                barrier_arrive(full);
            } else {
                barrier_arrive_expect(full, 16);
                copy_bulk(shared, args.in + 4 * round, 16, full);
            }
        } else if (thread_index() >= 32) {
            barrier_wait(full, round % 2);
            if (lane < 4) {
                args.out[4 * round + (uint32_t)lane] = ((uint32_t*)shared)[lane];
            }
            sync_warp();
            if (lane == 0) {
                barrier_arrive(empty);
            }
        }
    }
}

// Warp 0 copies 16 bytes a lane, and the barrier knows when they have landed.
KMLA_KERNEL(copy_arrive_kernel, buffer_args, 64, 1) {
    uint8_t* shared = shared_memory();
    uint64_t* barrier = (uint64_t*)(shared + 512);
    int lane = thread_index() % 32;
    if (thread_index() == 0) {
        barrier_init(barrier, 32);
    }
    sync_block();
    if (thread_index() < 32) {
        copy_async_16(shared + 16 * lane, args.in, lane % 2 == 0);
        copy_arrive(barrier);
    } else {
        if (args.how) {
            barrier_wait(barrier, 0);
        } else {
            sync_warp();
        }
        args.out[lane] = ((uint32_t*)shared)[4 * lane + lane / 8];
    }
    sync_block(); // not before the copies have begun
}

// One thread of warp 1 waits for the copy, the others need a meeting with it.
KMLA_KERNEL(late_reader_kernel, buffer_args, 64, 1) {
    uint8_t* shared = shared_memory();
    uint64_t* barrier = (uint64_t*)(shared + 16);
    if (thread_index() == 0) {
        barrier_init(barrier, 1);
        barrier_init_fence();
        barrier_arrive_expect(barrier, 16);
        copy_bulk(shared, args.in, 16, barrier);
    }
    sync_block();
    if (thread_index() == 32) {
        barrier_wait(barrier, 0);
    }
    if (args.how) {
        sync_warp();
    }
    if (thread_index() >= 32 && thread_index() < 36) {
        args.out[thread_index() - 32] = ((uint32_t*)shared)[thread_index() - 32];
    }
}

// Two phases of one barrier, 32 bytes each; bit 0 of how: waits before it reads, bit 1: for the
// right parity, bit 2: announces the right bytes.
KMLA_KERNEL(bulk_kernel, buffer_args, 64, 1) {
    uint8_t* shared = shared_memory();
    uint64_t* barrier = (uint64_t*)(shared + 32);
    int i = thread_index();
    if (i == 0) {
        barrier_init(barrier, 1);
        barrier_init_fence();
    }
    sync_block();
    for (uint32_t phase = 0; phase < 2; ++phase) {
        if (i == 0) {
            barrier_arrive_expect(barrier, args.how & 4 ? 32 : 48);
            copy_bulk(shared, args.in + 8 * phase, 32, barrier);
        }
        sync_block();
        if (args.how & 1) {
            barrier_wait(barrier, args.how & 2 ? phase : 1 - phase);
        }
        if (i < 8) {
            args.out[8 * phase + i] = ((uint32_t*)shared)[i];
        }
        sync_block();
        barrier_wait(barrier, phase);
        sync_block();
    }
}
#endif

#if KMLA_HAS_WGMMA
// ---- products of warpgroups

const int wgmma_k = 128; // two panels of B: 64 elements are a swizzled row

struct wgmma_args {
    const uint16_t *a, *b; // [2 warpgroups][64][k], [n][k]
    float* d;              // [2][64][n]; added to
    float *early, *late;   // the same, read before and after a wait, as `how` says
    int n, bf16, starts_from_0, how;
};
enum { WGMMA_GOOD, WGMMA_READ_EARLY, WGMMA_NO_COMMIT, WGMMA_TWO_IN_FLIGHT };

static uint16_t* swizzled(int n, int row, int k) {
    uint8_t* panel = shared_memory() + k / 64 * n * 128;
    int column = (k % 64 / 8) ^ (row % 8);
    return (uint16_t*)(panel + row * 128 + column * 16) + k % 8;
}

template <int count>
static void add_step(float (&d)[count], uint32_t (&a)[4], int step, const wgmma_args& args) {
    bool add = step > 0 || !args.starts_from_0;
    uint64_t b = matrix_descriptor(shared_memory() + step / 4 * count * 256) + step % 4 * 2;
    if (args.bf16) {
        wgmma_bf16(d, a, b, add);
    } else {
        wgmma_f16(d, a, b, add);
    }
}

// `each` gets a register and where it is in [2][64][n].
template <int count, typename function> static void for_each_register(function each) {
    int lane = thread_index() % 32, row = thread_index() / 32 * 16 + lane / 4;
    for (int i = 0; i < count; ++i) {
        each(i, (row + i % 4 / 2 * 8) * count * 2 + i / 4 * 8 + lane % 4 * 2 + i % 2);
    }
}

template <int count> static void wgmma_case(const wgmma_args& args) {
    const int steps = wgmma_k / 16;
    int lane = thread_index() % 32, row = thread_index() / 32 * 16 + lane / 4;
    float d[count], other[count];
    uint32_t a[steps][4];
    for_each_register<count>([&](int i, int at) { d[i] = other[i] = args.d[at]; });
    for (int i = 0; i < steps * 4; ++i) {
        int k = i / 4 * 16 + i % 4 / 2 * 8 + lane % 4 * 2;
        a[i / 4][i % 4] = *(const uint32_t*)&args.a[(row + i % 2 * 8) * wgmma_k + k];
    }
    for (int i = thread_index(); i < args.n * wgmma_k; i += 256) {
        *swizzled(args.n, i / wgmma_k, i % wgmma_k) = args.b[i];
    }
    fence_async_reads();
    sync_block();
    wgmma_fence();
    for (int i = 0; i < steps; ++i) {
        add_step(d, a[i], i, args);
    }
    if (args.how != WGMMA_NO_COMMIT) {
        wgmma_commit();
    }
    if (args.how == WGMMA_READ_EARLY) {
        for_each_register<count>([&](int i, int at) { args.early[at] = d[i]; });
    }
    if (args.how == WGMMA_TWO_IN_FLIGHT) {
        for (int i = 0; i < steps; ++i) {
            add_step(other, a[i], i, args);
        }
        wgmma_commit();
        wgmma_wait<1>();
        for_each_register<count>([&](int i, int at) {
            args.d[at] = d[i];
            args.early[at] = other[i];
        });
        wgmma_wait<0>();
        for_each_register<count>([&](int i, int at) { args.late[at] = other[i]; });
        return;
    }
    wgmma_wait<0>();
    for_each_register<count>([&](int i, int at) { args.d[at] = d[i]; });
}

KMLA_KERNEL(wgmma_kernel, wgmma_args, 256, 1) {
    switch (args.n) {
#define CASE(n)                                                                                    \
    case n:                                                                                        \
        return wgmma_case<n / 2>(args);
        CASE(8)
        CASE(16)
        CASE(24)
        CASE(32)
        CASE(40)
        CASE(48)
        CASE(56)
        CASE(64)
        CASE(72)
        CASE(80)
        CASE(88)
        CASE(96)
        CASE(104)
        CASE(112)
        CASE(120)
        CASE(128)
        CASE(256)
#undef CASE
    }
}

// Register i of lane l holds elements i * 64 + 2 l and the next; row r of matrix m is at word
// 16 * (4 r + m). `how` is the number of matrices.
KMLA_KERNEL(store_matrix_kernel, buffer_args, 32, 1) {
    uint32_t lane = (uint32_t)thread_index(), pair[4];
    uint8_t* row = shared_memory() + (lane % 8 * 4 + lane / 8) * 64;
    void* used = (int)lane < 8 * args.how ? row : nullptr;
    for (uint32_t i = 0; i < 4; ++i) {
        pair[i] = (64 * i + 2 * lane) | (64 * i + 2 * lane + 1) << 16;
    }
    switch (args.how) {
    case 1:
        store_matrix_x1_transposed(used, pair[0]);
        break;
    case 2:
        store_matrix_x2_transposed(used, pair[0], pair[1]);
        break;
    default:
        store_matrix_x4_transposed(used, pair[0], pair[1], pair[2], pair[3]);
    }
    sync_warp();
    for (int i = 0; used && i < 4; ++i) {
        args.out[lane * 4 + i] = ((uint32_t*)row)[i];
    }
}

// ---- registers move between warpgroups

// 168 a lane at the start. Bit 0 of how: the first releases enough; bit 1: all four warps do.
KMLA_KERNEL(registers_kernel, buffer_args, 384, 1) {
    if (thread_index() >= 128) {
        if (args.how & 2) {
            registers_take<232>();
        } else {
            registers_take<200>();
        }
        args.out[thread_index() - 128] = (uint32_t)shared_memory()[0];
    } else if (args.how & 2 || thread_index() < 96) {
        shared_memory()[0] = 7; // takers wait for it
        if (args.how & 1) {
            registers_release<40>();
        } else {
            registers_release<48>();
        }
    }
}

// 128 threads, 2,048 bytes; the number of a mistake
KMLA_KERNEL(wgmma_mistake_kernel, buffer_args, 128, 1) {
    uint8_t* shared = shared_memory();
    int thread = thread_index();
    float d[8] = {0};
    float other[4] = {0};
    uint32_t a[4] = {0, 0, 0, 0};
    uint64_t b = matrix_descriptor(shared);
    for (int i = 0; i < 16; ++i) {
        shared[thread * 16 + i] = 0;
    }
    if (args.how == 10) {
        sync_block();
        store_matrix_x2_transposed(shared + thread / 32 * 256 + thread % 16 * 16, 0, 0);
    } else if (args.how == 11) {
        copy_async_16(shared + thread * 16, args.in, false);
        copy_async_commit();
        copy_async_wait<0>();
    }
    if (args.how < 10 || args.how > 11) {
        fence_async_reads();
    }
    sync_block();
    if (args.how != 0) {
        wgmma_fence();
    }
    switch (args.how) {
    case 4:
        b &= ~(3ull << 62); // no swizzle
        break;
    case 5:
        b += 16 / 16;
        break;
    case 6:
        b += 1024 / 16; // the second 8 rows are past the end
        break;
    case 7:
        b |= 1ull << 49;
        break;
    case 8:
        if (thread >= 96) {
            return;
        }
        break;
    case 9:
        b += thread / 64 * 32 / 16;
        break;
    case 12:
        b |= 1ull << 61;
        break;
    case 13:
        b += thread % 2 * 32 / 16;
        break;
    case 16:
        sync_block();
        shared[thread] = 0; // not fenced
        sync_block();
        break;
    default:
        break;
    }
    wgmma_f16(d, a, b, true);
    wgmma_commit();
    if (args.how == 1) {
        a[2] = 1;
    } else if (args.how == 2) {
        d[7] = 1;
    } else if (args.how == 3) {
        sync_block(); // after the products of all began
        shared[thread * 16] = 1;
    } else if (args.how == 14) {
        wgmma_f16(reinterpret_cast<float(&)[4]>(d), a, b, true);
    } else if (args.how == 15) {
        wgmma_wait<0>();
        wgmma_f16(other, a, b, true); // again without a fence
    }
    if (args.how == 17) {
        wgmma_wait<0>();
        shared[thread * 16] = 0; // other warps' products may read it yet
    }
    sync_block();
    wgmma_wait<0>();
}
#endif

// ---- mistakes that abort

KMLA_KERNEL(mistake_kernel, buffer_args, 64, 1) {
    uint8_t* shared = shared_memory();
    uint32_t r[4];
    int i = thread_index();
    switch (args.how) {
    case 0: // half of a warp waits for the other half, which waits for the block
        if (i % 32 < 16) {
            ballot(true);
        }
        sync_block();
        break;
    case 1: // two instructions at once
        if (i % 2) {
            ballot(true);
        } else {
            shuffle_xor(1u, 1);
        }
        break;
    case 2: // two barriers at once
        if (i < 32) {
            sync_block();
        } else {
            sync_block_or(true);
        }
        break;
    case 3:
        load_matrix_x4(r, shared + 8);
        break;
    case 4:
        load_matrix_x4(r, shared + 56);
        break;
    case 5:
        copy_async_16(shared + 4, args.in, true);
        break;
    case 6:
        copy_async_16(shared, (const uint8_t*)args.in + 4, true);
        break;
    case 7:
        copy_async_16(shared + 64, args.in, true);
        break;
#if KMLA_HAS_BULK_COPY
    case 8:
    case 9:
    case 10:
        if (i == 0) {
            barrier_init((uint64_t*)shared, 1);
            if (args.how != 8) {
                barrier_init_fence();
            }
            barrier_arrive_expect((uint64_t*)shared, 16);
            copy_bulk(shared + 16, args.in, args.how == 9 ? 24 : 16, (uint64_t*)shared);
        }
        break; // and for 10 ends with the copy under way
    case 11:
        barrier_wait((uint64_t*)shared, 0);
        break; // poison
#endif
    case 12:
        named_barrier_sync(0, 64);
        break;
    case 13:
        named_barrier_sync(16, 64);
        break;
    case 14:
        named_barrier_sync(1, 48);
        break;
    case 15: // who comes to one barrier differs about how many do
        named_barrier_sync(1, i < 32 ? 64 : 32);
        break;
    case 16: // a warp twice, while the barrier still waits for the other
        if (i < 32) {
            named_barrier_arrive(1, 64);
            named_barrier_sync(1, 64);
        } else {
            sync_block();
        }
        break;
    case 17: // half a warp
        if (i % 32 < 16) {
            named_barrier_sync(1, 64);
        }
        break;
    case 18:
        ballot_among(0xffffu, true);
        break;
    case 19:
        shuffle_among(1u << i % 32, 1, 40);
        break;
    case 20:
        maximum_among(i % 32 < 16 ? 0xffffu : 0xfffffff0u, 1);
        break;
#if KMLA_HAS_BULK_COPY
    case 21:
        if (i == 0) {
            barrier_init((uint64_t*)shared, 2);
            barrier_init_fence();
            barrier_expect((uint64_t*)shared, 16);
            barrier_arrive((uint64_t*)shared);
            barrier_arrive((uint64_t*)shared);
            barrier_arrive((uint64_t*)shared); // one more than it was made for
        }
        break;
#endif
#if KMLA_HAS_WGMMA
    case 22:
        registers_release<20>();
        break;
    case 23:
        registers_release<36>();
        break;
    case 24:
        registers_release<24>();
        registers_release<32>(); // that would be more
        break;
    case 25:
        registers_take<24>(); // that would be fewer
        break;
#endif
    default:
        permute_bytes(1, 2, 0x8000);
    }
}

} // namespace device

// =============================================================================
// Test frame
// =============================================================================

static int cases, failures;

static void expect(bool good, const char* what, double got, double wanted) {
    ++cases;
    if (!good) {
        ++failures;
        printf("FAILED %s: %.9g, expected %.9g\n", what, got, wanted);
    }
}

static void expect_equal(const char* what, double got, double wanted) {
    expect(got == wanted, what, got, wanted);
}

static const emulator::kernel* find_kernel(const char* name) {
    for (const emulator::kernel* each = device::kernels; each; each = each->next) {
        if (strcmp(each->name, name) == 0) {
            return each;
        }
    }
    printf("no kernel %s\n", name);
    exit(1);
}

static void run_grid(const char* name, const void* args, int x, int y, int z, unsigned shared) {
    const emulator::kernel* kernel = find_kernel(name);
    emulator::run({kernel, args, {x, y, z}, kernel->max_threads, shared, false});
}

static void run_block(const char* name, const void* args, unsigned shared) {
    run_grid(name, args, 1, 1, 1, shared);
}

static uint32_t random_state = 12345;
static uint32_t random_bits() {
    random_state = random_state * 1664525u + 1013904223u;
    return random_state >> 8;
}

// =============================================================================
// Numbers
// =============================================================================

// The value of a small float by its definition: sign, exponent bits, mantissa bits.
static double decode(unsigned bits, int exponent_bits, int mantissa_bits) {
    int bias = (1 << (exponent_bits - 1)) - 1;
    unsigned mantissa = bits & ((1u << mantissa_bits) - 1);
    int exponent = (int)(bits >> mantissa_bits & ((1u << exponent_bits) - 1));
    double magnitude =
        exponent == 0 ? ldexp(mantissa, 1 - bias - mantissa_bits)
                      : ldexp(mantissa + (1u << mantissa_bits), exponent - bias - mantissa_bits);
    return bits >> (exponent_bits + mantissa_bits) & 1 ? -magnitude : magnitude;
}

// `code` must be the nearest of the format's finite codes, the even one of two.
static void expect_nearest(const char* what, float value, unsigned code, int exponent_bits,
                           int mantissa_bits, unsigned largest_code) {
    unsigned magnitude = code & ((1u << (exponent_bits + mantissa_bits)) - 1);
    double mine = fabs(fabs((double)value) - decode(magnitude, exponent_bits, mantissa_bits));
    bool good = signbit(value) == (code >> (exponent_bits + mantissa_bits) & 1);
    for (int step = -1; step <= 1; step += 2) {
        unsigned other = magnitude + (unsigned)step;
        if (other <= largest_code) {
            double its = fabs(fabs((double)value) - decode(other, exponent_bits, mantissa_bits));
            good &= mine < its || (mine == its && magnitude % 2 == 0);
        }
    }
    expect(good, what, code, value);
}

static void test_numbers() {
    using namespace emulator;
    for (unsigned bits = 0; bits < 0x10000; ++bits) {
        float value = f16_to_float(bits);
        if ((bits & 0x7fff) > 0x7c00) {
            expect(isnan(value) && float_to_f16(value) == 0x7fff, "f16 NaN", bits, NAN);
        } else if ((bits & 0x7fff) == 0x7c00) {
            expect(isinf(value) && float_to_f16(value) == bits, "f16 infinity", bits, INFINITY);
        } else {
            expect_equal("f16 value", value, decode(bits, 5, 10));
            expect_equal("f16 back", float_to_f16(value), bits);
        }
    }
    for (int i = 0; i < 200000; ++i) {
        float value = ldexpf((float)random_bits() / 0x1p24f + 0.5f, (int)(random_bits() % 45) - 28);
        value = i % 2 ? -value : value;
        if (fabsf(value) < 65520.0f) {
            expect_nearest("f16 nearest", value, float_to_f16(value), 5, 10, 0x7bff);
        }
        // bf16: the neighbours within its own format
        expect_nearest("bf16 nearest", value, float_to_bf16(value), 8, 7, 0x7f7f);
    }
    expect_equal("f16 tie up", float_to_f16(1.0f + 3 * 0x1p-11f), 0x3c02);
    expect_equal("f16 tie down", float_to_f16(1.0f + 0x1p-11f), 0x3c00);
    expect_equal("f16 smallest tie", float_to_f16(0x1p-25f), 0);
    expect_equal("f16 above the smallest tie", float_to_f16(0x1.8p-25f), 1);
    expect_equal("f16 largest", float_to_f16(65519.996f), 0x7bff);
    expect_equal("f16 overflow", float_to_f16(65520.0f), 0x7c00);
    expect_equal("f16 -0", float_to_f16(-0.0f), 0x8000);
    expect_equal("bf16 overflow", float_to_bf16(3.4e38f), 0x7f80);
    expect_equal("bf16 NaN", float_to_bf16(-NAN), 0x7fff);
    for (unsigned code = 0; code < 256; ++code) {
        unsigned f16 = e4m3_to_f16(code);
        if ((code & 0x7f) == 0x7f) {
            expect_equal("e4m3 NaN", f16, 0x7fff);
        } else {
            expect_equal("e4m3 value", f16_to_float(f16), decode(code, 4, 3));
        }
    }
    expect_equal("f16 product", multiply_f16(0x3e00, 0x3e00), 0x4080);      // 1.5 * 1.5
    expect_equal("f16 subnormal product", multiply_f16(0x0001, 0x3800), 0); // 2^-24 / 2: tie
    expect_equal("f16 minimum", minimum_f16(0xc000, 0x3c00), 0xc000);
    expect_equal("f16 minimum, a NaN", minimum_f16(0x7e00, 0x3c00), 0x3c00);
    expect_equal("f16 minimum, b NaN", minimum_f16(0x3c00, 0xfe00), 0x3c00);
    expect_equal("f16 minimum, both NaN", minimum_f16(0xfe00, 0x7e00), 0x7fff);
    expect_equal("f16 minimum of zeros", minimum_f16(0x0000, 0x8000), 0x8000);
    expect_equal("ex2", exp2_ftz(-3.0f), 0.125);
    expect_equal("ex2 -inf", exp2_ftz(-INFINITY), 0);
    expect_equal("ex2 flushes", exp2_ftz(-126.5f), 0);
    expect_equal("ex2 smallest normal", exp2_ftz(-126.0f), 0x1p-126);
    expect_equal("lg2 of a subnormal", log2_any(0x1p-140f), -140);
    expect_equal("lg2 of 0", log2_any(0), -INFINITY);
    float signalling = device::bits_float(0x7f800001u);
    expect_equal("maximum, a NaN", device::maximum(signalling, 2.0f), 2);
    expect_equal("maximum, b NaN", device::maximum(-2.0f, signalling), -2);
    expect_equal("maximum of zeros", 1 / device::maximum(-0.0f, 0.0f), INFINITY);
    expect_equal("maximum of zeros", 1 / device::maximum(0.0f, -0.0f), INFINITY);
    expect_equal("maximum", device::maximum(-3.0f, -2.0f), -2);
    expect_equal("permute", device::permute_bytes(0x33221100, 0x77665544, 0x7250), 0x77225500);
}

// =============================================================================
// Warp instructions
// =============================================================================

// Small integers, so that sums are exact in any order; then random values within rounding.
static void test_mma(int bf16, bool integers) {
    uint16_t a[256], b[128];
    float d[128];
    double wanted[128], size[128];
    for (int i = 0; i < 256; ++i) {
        float value = integers ? (float)(int)(random_bits() % 17) - 8.0f
                               : (float)random_bits() / 0x1p23f - 1.0f;
        a[i] = (uint16_t)(bf16 ? emulator::float_to_bf16(value) : emulator::float_to_f16(value));
        if (i < 128) {
            value = integers ? (float)(int)(random_bits() % 17) - 8.0f
                             : ldexpf((float)random_bits() / 0x1p23f - 1.0f, -10);
            b[i] =
                (uint16_t)(bf16 ? emulator::float_to_bf16(value) : emulator::float_to_f16(value));
            d[i] = (float)(i % 7) - 3;
        }
    }
    for (int row = 0; row < 16; ++row) {
        for (int column = 0; column < 8; ++column) {
            double sum = d[row * 8 + column], magnitude = fabs(sum);
            for (int k = 0; k < 16; ++k) {
                double product =
                    bf16 ? decode(a[row * 16 + k], 8, 7) * decode(b[column * 16 + k], 8, 7)
                         : decode(a[row * 16 + k], 5, 10) * decode(b[column * 16 + k], 5, 10);
                sum += product;
                magnitude += fabs(product);
            }
            wanted[row * 8 + column] = sum;
            size[row * 8 + column] = magnitude;
        }
    }
    device::mma_args args = {a, b, d, bf16};
    run_block("mma_kernel", &args, 0);
    for (int i = 0; i < 128; ++i) {
        double tolerance = integers ? 0 : size[i] * 17 * 0x1p-24;
        expect(fabs(d[i] - wanted[i]) <= tolerance, "mma", d[i], wanted[i]);
    }
}

// PTX manual, ldmatrix: thread t holds elements 2 (t % 4) and + 1 of row t / 4, with .trans of
// column t / 4.
static void test_load_matrix(int transposed) {
    uint32_t out[128];
    device::buffer_args args = {out, nullptr, transposed};
    run_block("load_matrix_kernel", &args, 512);
    for (int t = 0; t < 32; ++t) {
        for (int matrix = 0; matrix < 4; ++matrix) {
            int along = t % 4 * 2, across = t / 4;
            int low = matrix * 64 + (transposed ? along * 8 + across : across * 8 + along);
            int high = low + (transposed ? 8 : 1);
            expect_equal("ldmatrix", out[t * 4 + matrix], (uint32_t)low | (uint32_t)high << 16);
        }
    }
}

static void test_subsets() {
    uint32_t out[64 * 3];
    device::buffer_args args = {out, nullptr, 0};
    run_block("subset_kernel", &args, 0);
    for (int i = 0; i < 64; ++i) {
        int lane = i % 32, warp = i / 32 * 32;
        uint32_t votes = 0x9249u << lane % 3 & 0xffff; // every third of 16
        expect_equal("ballot of some lanes", out[i * 3], votes);
        expect_equal("shuffle of some lanes", out[i * 3 + 1], warp + lane % 3 + 6);
        expect_equal("maximum of some lanes", out[i * 3 + 2], 1000 - warp - lane % 3);
    }
}

static void test_votes() {
    uint32_t out[256 * 5];
    for (int who = -1; who < 256; who += 37) {
        device::buffer_args args = {out, nullptr, who};
        run_block("vote_kernel", &args, 0);
        for (int i = 0; i < 256; ++i) {
            uint32_t votes = 0;
            for (int lane = 0; lane < 32; ++lane) {
                votes |= (uint32_t)((i / 32 * 32 + lane) % 3 == 0) << lane;
            }
            expect_equal("ballot", out[i * 5], votes);
            expect_equal("shuffle_xor", out[i * 5 + 1], i ^ 5);
            expect_equal("shuffle_xor of floats", out[i * 5 + 2], i ^ 8);
            expect_equal("shuffle", out[i * 5 + 3], i / 32 * 32 + 7);
            expect_equal("sync_block_or", out[i * 5 + 4], who >= 0 ? 2 : 0);
        }
    }
}

// =============================================================================
// Meeting points
// =============================================================================

// How many of 20 seeds show a wrong word, with nobody watching for races.
static int wrong_seeds(const char* kernel, int count, int ahead, int with_barrier) {
    uint32_t out[256];
    int wrong = 0;
    emulator::watch_races(with_barrier != 0);
    for (unsigned seed = 0; seed < 20; ++seed) {
        bool bad = false;
        device::buffer_args args = {out, nullptr, with_barrier};
        kmla_emulator_seed(seed);
        run_block(kernel, &args, 1024);
        for (int i = 0; i < count; ++i) {
            bad |= out[i] != (uint32_t)((i + ahead) % count);
        }
        wrong += bad;
    }
    emulator::watch_races(true);
    return wrong;
}

static int wrong_named(int how) {
    uint32_t out[256];
    int wrong = 0;
    emulator::watch_races(how != 0);
    for (unsigned seed = 0; seed < 20; ++seed) {
        bool bad = false;
        device::buffer_args args = {out, nullptr, how};
        kmla_emulator_seed(seed);
        run_block("named_barrier_kernel", &args, 256);
        for (uint32_t i = 0; i < 256; ++i) {
            bad |= out[i] != i / 64 * 64 + 63 - i % 64;
        }
        wrong += bad;
    }
    emulator::watch_races(true);
    return wrong;
}

static void test_meetings() {
    uint32_t out[256], places[2 * 3 * 5] = {0};
    expect_equal("with a barrier", wrong_seeds("neighbour_kernel", 256, 32, 1), 0);
    int missing = wrong_seeds("neighbour_kernel", 256, 32, 0);
    expect(missing >= 15, "seeds that find a missing block barrier", missing, 15);
    expect_equal("with a vote", wrong_seeds("lane_kernel", 32, 1, 1), 0);
    missing = wrong_seeds("lane_kernel", 32, 1, 0);
    expect(missing >= 15, "seeds that find a missing warp barrier", missing, 15);

    expect_equal("with named barriers", wrong_named(3), 0);
    missing = wrong_named(0);
    expect(missing >= 15, "seeds that find missing named barriers", missing, 15);

    device::buffer_args leaving = {out, nullptr, 0};
    memset(out, 0xee, sizeof out);
    run_block("leaving_kernel", &leaving, 1024);
    for (int i = 0; i < 256; ++i) { // warp w took part in rounds 0..w-1
        expect_equal("rounds", out[i], i < 32 ? 0xeeeeeeee : (uint32_t)(i / 32 - 1));
    }

    device::buffer_args where = {places, nullptr, 0};
    run_grid("where_kernel", &where, 5, 3, 2, 0);
    for (int i = 0; i < 30; ++i) {
        expect_equal("each block once", places[i], i + 500);
    }
}

alignas(16) static uint32_t source[32]; // of copies

// =============================================================================
// Asynchronous copies
// =============================================================================

static void test_copies() {
    uint32_t out[16];
    for (int i = 0; i < 16; ++i) {
        source[i] = (uint32_t)(1000 + i);
    }
    emulator::watch_races(false); // most of these read what is under way
    for (int waited = 0; waited <= 3; ++waited) {
        device::buffer_args args = {out, source, waited};
        run_block("copy_kernel", &args, 64);
        for (int i = 0; i < 16; ++i) {
            uint32_t landed = i / 4 == 1 ? 0 : 1000 + (uint32_t)i; // group 1 read nothing
            uint32_t wanted = i / 4 == 3 ? 0x07070707 : i / 4 < waited ? landed : 0xffffffff;
            expect_equal("cp.async", out[i], wanted);
        }
    }
#if KMLA_HAS_BULK_COPY
    emulator::watch_races(true);
    device::buffer_args good = {out, source, 7};
    run_block("bulk_kernel", &good, 40);
    for (int i = 0; i < 16; ++i) {
        expect_equal("bulk copy", out[i], 1000 + i);
    }
    for (unsigned seed = 0; seed < 20; ++seed) {
        device::buffer_args args = {out, source, seed % 2 ? 1 : 3};
        kmla_emulator_seed(seed);
        run_block("pipeline_kernel", &args, 32);
        for (int i = 0; i < 16; ++i) {
            expect_equal("pipeline", out[i], 1000 + i);
        }
    }
    for (int waits = 0; waits < 2; ++waits) {
        uint32_t lanes[32];
        device::buffer_args args = {lanes, source, waits};
        emulator::watch_races(waits != 0);
        run_block("copy_arrive_kernel", &args, 520);
        for (uint32_t i = 0; i < 32; ++i) {
            uint32_t landed = i % 2 == 0 ? 1000 + i / 8 : 0;
            expect_equal("copy_arrive", lanes[i], waits ? landed : 0xffffffff);
        }
    }
    emulator::watch_races(false);
    for (int how = 4; how <= 5; ++how) { // no wait; a wait for the wrong parity
        device::buffer_args bad = {out, source, how};
        run_block("bulk_kernel", &bad, 40);
        expect_equal("bulk copy, not waited for", out[0], 0xffffffff);
    }
#endif
    emulator::watch_races(true);
}

// =============================================================================
// Products of warpgroups
// =============================================================================

#if KMLA_HAS_WGMMA
static void test_wgmma(int n, int bf16, int starts_from_0, int how) {
    const int k = device::wgmma_k, count = 128 * n;
    std::vector<uint16_t> a((size_t)(128 * k)), b((size_t)(n * k));
    std::vector<float> d((size_t)count), early((size_t)count), late((size_t)count);
    std::vector<double> wanted((size_t)count), size((size_t)count);
    for (std::vector<uint16_t>* matrix : {&a, &b}) {
        for (uint16_t& element : *matrix) {
            float value = (float)random_bits() / 0x1p23f - 1.0f;
            element =
                (uint16_t)(bf16 ? emulator::float_to_bf16(value) : emulator::float_to_f16(value));
        }
    }
    for (int i = 0; i < count; ++i) {
        size_t at = (size_t)i;
        d[at] = (float)(i % 7) - 3;
        wanted[at] = starts_from_0 ? 0 : d[at];
        size[at] = fabs(wanted[at]);
        for (int j = 0; j < k; ++j) {
            unsigned x = a[(size_t)(i / n * k + j)], y = b[(size_t)(i % n * k + j)];
            double product =
                bf16 ? decode(x, 8, 7) * decode(y, 8, 7) : decode(x, 5, 10) * decode(y, 5, 10);
            wanted[at] += product;
            size[at] += fabs(product);
        }
    }
    device::wgmma_args args = {a.data(), b.data(), d.data(),      early.data(), late.data(),
                               n,        bf16,     starts_from_0, how};
    run_block("wgmma_kernel", &args, (unsigned)(n * k * 2));
    for (size_t i = 0; i < (size_t)count; ++i) {
        if (how == device::WGMMA_NO_COMMIT) {
            expect(isnan(d[i]), "wgmma without a commit", d[i], NAN);
        } else {
            expect(fabs(d[i] - wanted[i]) <= size[i] * (k + 1) * 0x1p-24, "wgmma", d[i], wanted[i]);
        }
        if (how == device::WGMMA_TWO_IN_FLIGHT) {
            expect(late[i] == d[i], "the wgmma after it", late[i], d[i]);
        }
        if (how == device::WGMMA_READ_EARLY || how == device::WGMMA_TWO_IN_FLIGHT) {
            expect(isnan(early[i]), "wgmma before its wait", early[i], NAN);
        }
    }
}

// PTX manual, stmatrix with .trans: thread t holds rows 2 (t % 4) and + 1 of column t / 4.
static void test_store_matrix(int how) {
    uint32_t out[128];
    device::buffer_args args = {out, nullptr, how};
    run_block("store_matrix_kernel", &args, 2048);
    for (int i = 0; i < 64 * how; ++i) {
        int matrix = i / 64, row = i / 8 % 8, column = i % 8;
        int held_by = column * 4 + row / 2;
        expect_equal("stmatrix", out[i / 2] >> i % 2 * 16 & 0xffff,
                     matrix * 64 + held_by * 2 + row % 2);
    }
}

static void test_registers() {
    uint32_t out[256];
    device::buffer_args args = {out, nullptr, 3};
    emulator::watch_races(false); // registers order no accesses
    run_block("registers_kernel", &args, 16);
    emulator::watch_races(true);
    for (int i = 0; i < 256; ++i) {
        expect_equal("taken after they were released", out[i], 7);
    }
}
#endif

// =============================================================================
// Mistakes that abort, each in a child
// =============================================================================

static void expect_death(const char* kernel, int how, unsigned shared, const char* message) {
    uint32_t out[256];
    char text[4096];
    size_t length = 0;
    ssize_t count;
    int status = 0, ends[2];
    fflush(stdout);
    if (pipe(ends)) {
        exit(1);
    }
    pid_t child = fork();
    if (child == 0) {
        device::buffer_args args = {out, source, how};
        dup2(ends[1], 2);
        run_block(kernel, &args, shared);
        _exit(0);
    }
    close(ends[1]);
    while ((count = read(ends[0], text + length, sizeof text - 1 - length)) > 0) {
        length += (size_t)count;
    }
    text[length] = 0;
    close(ends[0]);
    waitpid(child, &status, 0);
    bool good = !(WIFEXITED(status) && WEXITSTATUS(status) == 0) && strstr(text, message);
    expect(good, message, how, status);
    if (!good) {
        printf("    it said: %s\n", text);
    }
}

// Only where the compiler calls at loads and stores.
static void test_races() {
#ifdef __SANITIZE_THREAD__
    uint32_t out[64];
    for (unsigned seed = 0; seed < 20; ++seed) {
        device::buffer_args args = {out, nullptr, 3};
        kmla_emulator_seed(seed);
        run_block("two_stores_kernel", &args, 16);
        run_block("echo_kernel", &args, 16);
        run_block("read_then_write_kernel", &args, 16);
        run_block("bytes_kernel", &args, 64);
        run_block("chain_kernel", &args, 16);
        expect_equal("a chain", out[0], 6);
    }
    expect_death("neighbour_kernel", 0, 1024, "race: ");
    expect_death("lane_kernel", 0, 1024, "race: ");
    expect_death("two_stores_kernel", 0, 16, "with no barrier between");
    expect_death("echo_kernel", 0, 16, "race: ");
    device::buffer_args same = {out, nullptr, 2};
    run_block("two_stores_kernel", &same, 16);
    expect_death("read_then_write_kernel", 0, 16, "with no barrier between");
    expect_death("chain_kernel", 2, 16, "with no barrier between");
    expect_death("chain_kernel", 1, 16, "with no barrier between");
    expect_death("named_barrier_kernel", 0, 256, "race: ");
    expect_death("copy_kernel", 0, 64, "which a copy under way writes");
    expect_death("copy_kernel", 2, 64, "which a copy under way writes");
#if KMLA_HAS_BULK_COPY
    expect_death("bulk_kernel", 4, 40, "which a copy under way writes");
    expect_death("bulk_kernel", 5, 40, "which a copy under way writes");
    expect_death("copy_arrive_kernel", 0, 520, "race: ");
    device::buffer_args late = {out, source, 1};
    run_block("late_reader_kernel", &late, 32);
    expect_equal("waited for by one", out[3], 1003);
    expect_death("late_reader_kernel", 0, 32, "race: ");
#endif
#endif
}

static void test_mistakes() {
    expect_death("mistake_kernel", 0, 64, "nobody can go on");
    expect_death("mistake_kernel", 1, 64, "while other lanes of the warp are at");
    expect_death("mistake_kernel", 2, 64, "while other threads are at");
    expect_death("mistake_kernel", 3, 64, "is not a multiple of 16");
    expect_death("mistake_kernel", 4, 64, "are not in the block's 64 bytes");
    expect_death("mistake_kernel", 5, 64, "is not a multiple of 16");
    expect_death("mistake_kernel", 6, 64, "is not a multiple of 16");
    expect_death("mistake_kernel", 7, 64, "are not in the block's 64 bytes");
#if KMLA_HAS_BULK_COPY
    expect_death("mistake_kernel", 8, 64, "without barrier_init_fence");
    expect_death("mistake_kernel", 9, 64, "not a positive multiple of 16");
    expect_death("mistake_kernel", 10, 64, "ended with bulk copies under way");
    expect_death("mistake_kernel", 11, 64, "no initialised barrier");
    expect_death("bulk_kernel", 3, 40, "nobody can go on"); // 48 bytes announced, 32 sent
#endif
    expect_death("mistake_kernel", 12, 64, "barrier 0 is not one of 1 to 15");
    expect_death("mistake_kernel", 13, 64, "barrier 16 is not one of 1 to 15");
    expect_death("mistake_kernel", 14, 64, "48 threads are not some warps of the block");
    expect_death("mistake_kernel", 15, 64, "threads, where others have");
    expect_death("mistake_kernel", 16, 64, "this warp is there already");
    expect_death("mistake_kernel", 17, 64, "nobody can go on");
    emulator::watch_races(false); // else these show as races first
    expect_death("named_barrier_kernel", 1, 256, "this warp is there already");
    expect_death("named_barrier_kernel", 2, 256, "this warp is there already");
    expect_death("mistake_kernel", 18, 64, "without this one");
    expect_death("mistake_kernel", 19, 64, "which takes no part");
    expect_death("mistake_kernel", 20, 64, "nobody can go on");
#if KMLA_HAS_BULK_COPY
    expect_death("mistake_kernel", 21, 64, "more arrivals than the barrier was made for");
    expect_death("pipeline_kernel", 2, 32, "more arrivals than the barrier was made for");
#endif
    emulator::watch_races(true);
    expect_death("mistake_kernel", 99, 64, "has a nibble above 7");
#if KMLA_HAS_WGMMA
    static const char* const wgmma_mistakes[] = {
        "no wgmma_fence since",
        "wrote to A registers before the wgmma_wait",
        "wrote to accumulators before the wgmma_wait",
        "B in shared memory changed",
        "swizzle 0 is not emulated",
        "is not a k16 step",
        "are not in the block's 2048 bytes",
        "base offset 1 is not emulated",
        "where another warp had",
        "where another warp of the warpgroup has",
        "no fence_async_reads by thread",
        "no fence_async_reads by thread",
        "has unknown bits",
        "lanes of a warp have other operands",
        "accumulators of a product of another shape",
        "no wgmma_fence since",
    };
    for (int i = 0; i < 16; ++i) {
        expect_death("wgmma_mistake_kernel", i, 2048, wgmma_mistakes[i]);
    }
#ifdef __SANITIZE_THREAD__
    expect_death("wgmma_mistake_kernel", 17, 2048, "race: ");
    expect_death("wgmma_mistake_kernel", 16, 2048, "no fence_async_reads by thread");
#endif
    expect_death("mistake_kernel", 22, 64, "20 is not a multiple of 8 from 24 to 256");
    expect_death("mistake_kernel", 23, 64, "36 is not a multiple of 8 from 24 to 256");
    expect_death("mistake_kernel", 24, 64, "32 registers, where the warp has 24");
    expect_death("mistake_kernel", 25, 64, "24 registers, where the warp has 256");
    emulator::watch_races(false);
    expect_death("registers_kernel", 1, 16, "where another warp had");
    expect_death("registers_kernel", 2, 16, "nobody can go on");
#endif
}

int main() {
    test_numbers();
    for (int i = 0; i < 8; ++i) {
        test_mma(i % 2, i / 2 % 2);
    }
    test_load_matrix(0);
    test_load_matrix(1);
    test_votes();
    test_subsets();
    test_meetings();
    test_copies();
#if KMLA_HAS_WGMMA
    for (int n = 8; n <= 256; n += n < 128 ? 8 : 128) {
        for (int how = n / 8 % 3; how < 16; how += 3) {
            test_wgmma(n, how / 8, how / 4 % 2, how % 4);
        }
    }
    for (int how : {1, 2, 4}) {
        test_store_matrix(how);
    }
    test_registers();
#endif
    test_races();
    test_mistakes();
    printf("emulator's own instructions sm_%d: %d cases, %d failed\n", KMLA_ARCH, cases, failures);
    return failures != 0;
}
