// card.h - the emulated card of a fuzz target: --library=PATH on its command line. Without it there
// is none, and only the host's side runs.

#ifndef KMLA_TESTS_FUZZ_CARD_H
#define KMLA_TESTS_FUZZ_CARD_H

#include "fuzz.h"

#include <dlfcn.h>

static struct card {
    kmla_gpu* gpu; // NULL: no --library
    kmla_device device;
    void (*seed)(unsigned long long seed); // of the emulator's schedules
} card;

static void* find(void* library, const char* name) {
    void* found = library == NULL ? NULL : dlsym(library, name);
    if (found == NULL) {
        fprintf(stderr, "--library: %s\n", dlerror());
        exit(1);
    }
    return found;
}

static void open_card(const char* path) {
    int (*init)(unsigned), (*retain)(void**, int), (*set_current)(void*);
    void *context = NULL, *library = dlopen(path, RTLD_NOW);
    kmla_gpu_desc desc;
    kmla_error error;
    *(void**)&init = find(library, "cuInit");
    *(void**)&retain = find(library, "cuDevicePrimaryCtxRetain");
    *(void**)&set_current = find(library, "cuCtxSetCurrent");
    *(void**)&card.seed = find(library, "kmla_emulator_seed");
    memset(&desc, 0, sizeof desc);
    desc.cuda_path = desc.nvrtc_path = path;
    if (init(0) || retain(&context, 0) || set_current(context) ||
        kmla_gpu_open(&desc, &card.gpu, &error) != KMLA_OK ||
        kmla_gpu_device(card.gpu, &card.device, &error) != KMLA_OK) {
        fprintf(stderr, "--library: no card\n");
        exit(1);
    }
}

int LLVMFuzzerInitialize(int* count, char*** words) {
    for (int i = 1; i < *count; i++) {
        if (strncmp((*words)[i], "--library=", 10) == 0) {
            open_card((*words)[i] + 10);
        }
    }
    return 0;
}

#endif // KMLA_TESTS_FUZZ_CARD_H
