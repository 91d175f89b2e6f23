// string.h - what the header asks of Microsoft's, for a compile that links nothing.
#pragma once
#include <stddef.h>
#ifdef __cplusplus
extern "C" {
#endif
void* __cdecl memcpy(void* to, const void* from, size_t bytes);
void* __cdecl memmove(void* to, const void* from, size_t bytes);
void* __cdecl memset(void* to, int byte, size_t bytes);
int __cdecl memcmp(const void* a, const void* b, size_t bytes);
size_t __cdecl strlen(const char* text);
int __cdecl strcmp(const char* a, const char* b);
int __cdecl strncmp(const char* a, const char* b, size_t bytes);
size_t __cdecl strspn(const char* text, const char* of);
size_t __cdecl strcspn(const char* text, const char* of);
#ifdef __cplusplus
}
extern "C++" { // as there, const in and const out
const char* __cdecl strchr(const char* text, int byte);
const char* __cdecl strrchr(const char* text, int byte);
const char* __cdecl strstr(const char* text, const char* part);
}
#else
char* __cdecl strchr(const char* text, int byte);
char* __cdecl strrchr(const char* text, int byte);
char* __cdecl strstr(const char* text, const char* part);
#endif
