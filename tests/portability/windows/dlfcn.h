// dlfcn.h - the loader's functions that the tests call, on Windows.

#ifndef WINDOWS_DLFCN_H
#define WINDOWS_DLFCN_H

#include <string.h>
#include <windows.h>

#define RTLD_NOW 0
#define WINDOWS_UNUSED __attribute__((unused)) // some tests call some of them

WINDOWS_UNUSED static void* dlopen(const char* name, int flags) {
    (void)flags;
    return (void*)LoadLibraryA(name);
}

WINDOWS_UNUSED static void* dlsym(void* library, const char* name) {
    void* symbol;
    FARPROC function = GetProcAddress((HMODULE)library, name);
    memcpy(&symbol, &function, sizeof symbol);
    return symbol;
}

WINDOWS_UNUSED static int dlclose(void* library) { return FreeLibrary((HMODULE)library) ? 0 : -1; }

WINDOWS_UNUSED static const char* dlerror(void) { return "LoadLibrary or GetProcAddress failed"; }

#endif
