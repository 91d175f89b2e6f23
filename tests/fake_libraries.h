// A CUDA driver and an NVRTC that do nothing but answer and keep notes: for the errors and the
// launches of the GPU side on a machine without either. Device addresses are host addresses.
//
// They are as strict as the real ones in what the header must get right: a module belongs to the
// context that it was loaded in, a forked child has no driver, a failing call writes nothing.

#ifndef FAKE_LIBRARIES_H
#define FAKE_LIBRARIES_H

#include <stddef.h>
#include <stdint.h>

// As cuda.h declares its functions: it matters on 32-bit Windows. NVRTC's have no such thing.
#if defined(_WIN32)
#define CUDA_CALL __stdcall
#else
#define CUDA_CALL
#endif

typedef struct fake_device {
    int compute_major, compute_minor, shared_bytes, multiprocessors;
} fake_device;

typedef struct fake_context {
    int device; // index
    unsigned long long id;
    int multiprocessors; // of a green context; 0: all; -1: the driver says that it has none
    int dead;
} fake_context;

typedef struct fake_launch {
    char kernel[32];
    uint32_t grid[3], threads, shared_bytes;
    int programmatic; // launched so that it may overlap the kernel ahead of it
    void* stream;
    fake_context* context;
    unsigned char args[512]; // a copy of the kernel's one parameter
} fake_launch;

typedef struct fake_module {
    fake_context* context;
    int loaded;
} fake_module;

typedef struct fake_function {
    fake_module* module;
    char name[32];
    int resident; // its code is on the card: not so before cuFuncLoad or a question about it
} fake_function;

#define FAKE_DEVICES 2
#define FAKE_MAX_LAUNCHES 8
#define FAKE_MAX_MODULES 1024
#define FAKE_MAX_CALLS 256

typedef struct fake_state {
    // What the libraries answer; a test sets it.
    const char* failing_call; // calls of this function, or for this kernel, return failing_result
    int failing_number;       // or: the call of this number, from 1
    int failing_result;
    fake_context* context; // current on threads that never called cuCtxSetCurrent; NULL is none
    fake_device devices[FAKE_DEVICES];
    int driver_version;
    int stub; // cuInit answers as the toolkit's stub does
    int capturing;
    int nvrtc_major;
    int architectures[16];
    int architecture_count;
    const char* log;
    int without_builtins;
    int cubin_bytes;     // 0: 6
    int refused_loads;   // so many cuModuleLoadData say that the image is invalid
    void (*launched)(const fake_launch* launch);
    // What was asked of them.
    const char* calls[FAKE_MAX_CALLS]; // the last ones' names
    int call_count;
    fake_launch launches[FAKE_MAX_LAUNCHES];
    int launch_count, modules_loaded, modules_unloaded, functions_loaded;
    int copies, synchronisations, compiles, programs_alive;
    int dynamic_shared_bytes; // as last set for a function
    char options[512];        // of the last compile, a blank between
    fake_module modules[FAKE_MAX_MODULES];
    fake_function functions[FAKE_MAX_MODULES];
    int function_count;
} fake_state;

#endif
