// cards.h - what a plan needs to know of a card that is not here: its shared memory.
//
// Shared memory of an SM is from the CUDA C++ programming guide's table of compute capabilities;
// CUDA keeps 1 KiB of every block for itself. The SMs are those of a common card: they decide how
// a plan splits, never what is compiled for a given tile.

#ifndef KMLA_TOOLS_CARDS_H
#define KMLA_TOOLS_CARDS_H

#include <string.h>

typedef struct card_facts {
    int compute_major, compute_minor;
    int shared_kib_sm;
    int multiprocessors;
} card_facts;

static const card_facts cards[] = {
    {8, 0, 164, 108},  {8, 6, 100, 84},   {8, 7, 164, 16},   {8, 9, 100, 128},
    {9, 0, 228, 132},  {10, 0, 228, 148}, {10, 1, 228, 20},  {10, 3, 228, 160},
    {11, 0, 228, 20},  {12, 0, 100, 170}, {12, 1, 100, 48},
};
#define CARD_COUNT ((int)(sizeof cards / sizeof cards[0]))

static kmla_device card_device(const card_facts* card) {
    kmla_device device;
    memset(&device, 0, sizeof device);
    device.compute_major = card->compute_major;
    device.compute_minor = card->compute_minor;
    device.multiprocessors = card->multiprocessors;
    device.shared_bytes_sm = card->shared_kib_sm * 1024;
    device.shared_bytes = (card->shared_kib_sm - 1) * 1024;
    return device;
}

// The card of an architecture as NVRTC counts it, e.g. 120 for 12.0; NULL if the table lacks it.
static const card_facts* card_of_architecture(int architecture) {
    int i;
    for (i = 0; i < CARD_COUNT; ++i) {
        if (cards[i].compute_major * 10 + cards[i].compute_minor == architecture) {
            return &cards[i];
        }
    }
    return NULL;
}

#endif
