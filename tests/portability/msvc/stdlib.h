// stdlib.h - what the header asks of Microsoft's, for a compile that links nothing.
#pragma once
#include <stddef.h>
#ifdef __cplusplus
extern "C" {
#endif
void* __cdecl malloc(size_t bytes);
void* __cdecl calloc(size_t count, size_t bytes);
void* __cdecl realloc(void* memory, size_t bytes);
void __cdecl free(void* memory);
char* __cdecl getenv(const char* name);
#ifdef __cplusplus
}
#endif
