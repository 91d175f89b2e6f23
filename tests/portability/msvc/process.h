// process.h - what the header asks of Microsoft's, for a compile that links nothing.
#pragma once
#ifdef __cplusplus
extern "C" {
#endif
int __cdecl _getpid(void);
#ifdef __cplusplus
}
#endif
