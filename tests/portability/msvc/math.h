// math.h - what the header asks of Microsoft's, for a compile that links nothing.
#pragma once
#define INFINITY ((float)(1e+300 * 1e+300)) // as it is there: no builtin, a warning in some uses
#define NAN (-(float)(INFINITY * 0.0F))
#ifdef __cplusplus
extern "C" {
#endif
float __cdecl expf(float x);
float __cdecl logf(float x);
float __cdecl fabsf(float x);
float __cdecl fmaxf(float a, float b);
float __cdecl fminf(float a, float b);
float __cdecl ldexpf(float x, int power);
#ifdef __cplusplus
}
#endif
