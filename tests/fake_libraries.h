// A CUDA driver and an NVRTC that do nothing but answer and keep notes: for the errors and the
// launches of the GPU side on a machine without either. Device addresses are host addresses.

#ifndef FAKE_LIBRARIES_H
#define FAKE_LIBRARIES_H

#include <stddef.h>
#include <stdint.h>

typedef struct fake_launch {
    char kernel[32];
    uint32_t grid[3], threads, shared_bytes;
    int programmatic; // launched so that it may overlap the kernel ahead of it
    void* stream;
    unsigned char args[512]; // a copy of the kernel's one parameter
} fake_launch;

#define FAKE_MAX_LAUNCHES 8

typedef struct fake_state {
    // What the libraries answer; a test sets it.
    const char* failing_call; // this function returns failing_result
    int failing_result;
    void* context; // current context, NULL is none
    unsigned long long context_id;
    int compute_major, compute_minor, shared_bytes, driver_version;
    int capturing;
    int nvrtc_major;
    int architectures[16];
    int architecture_count;
    const char* log;
    // What was asked of them.
    fake_launch launches[FAKE_MAX_LAUNCHES];
    int launch_count, modules_loaded, modules_unloaded, functions_loaded;
    int copies, synchronisations, compiles, programs_alive;
    int dynamic_shared_bytes; // as last set for a function
    char options[512];        // of the last compile, a blank between
} fake_state;

#endif
