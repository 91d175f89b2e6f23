// io.h - what the header asks of Microsoft's, for a compile that links nothing.
#pragma once
#ifdef __cplusplus
extern "C" {
#endif
int __cdecl _open(const char* path, int flags, ...);
int __cdecl _read(int file, void* to, unsigned int bytes);
int __cdecl _write(int file, const void* from, unsigned int bytes);
int __cdecl _close(int file);
int __cdecl _commit(int file);
int __cdecl _unlink(const char* path);
int __cdecl remove(const char* path);
#ifdef __cplusplus
}
#endif
