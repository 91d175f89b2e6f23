// sys/mman.h - anonymous memory that takes room only where it is touched, on Windows.

#ifndef WINDOWS_SYS_MMAN_H
#define WINDOWS_SYS_MMAN_H

#include <windows.h>

#define PROT_READ 1
#define PROT_WRITE 2
#define MAP_PRIVATE 1
#define MAP_ANONYMOUS 2
#define MAP_NORESERVE 4
#define MAP_FAILED NULL

static void* mmap(void* at, size_t bytes, int protection, int flags, int file, long offset) {
    (void)protection, (void)flags, (void)file, (void)offset;
    return VirtualAlloc(at, bytes, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE);
}

static int munmap(void* memory, size_t bytes) {
    (void)bytes;
    return VirtualFree(memory, 0, MEM_RELEASE) ? 0 : -1;
}

#endif
