// stdio.h - what the header asks of Microsoft's, for a compile that links nothing.
#pragma once
#include <stdarg.h>
#include <stddef.h>
#ifdef __cplusplus
extern "C" {
#endif
typedef struct _iobuf {
    void* _Placeholder;
} FILE;
int __cdecl snprintf(char* to, size_t room, const char* format, ...);
int __cdecl vsnprintf(char* to, size_t room, const char* format, va_list values);
FILE* __cdecl fopen(const char* name, const char* mode);
int __cdecl fclose(FILE* file);
int __cdecl fflush(FILE* file);
int __cdecl fseek(FILE* file, long offset, int origin);
long __cdecl ftell(FILE* file);
size_t __cdecl fread(void* to, size_t bytes, size_t count, FILE* file);
size_t __cdecl fwrite(const void* from, size_t bytes, size_t count, FILE* file);
int __cdecl remove(const char* name);
int __cdecl rename(const char* from, const char* to);
#ifdef __cplusplus
}
#endif
#define SEEK_SET 0
#define SEEK_CUR 1
#define SEEK_END 2
