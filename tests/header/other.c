// The second translation unit of main.c. With KIMI_MLA_STATIC both have an implementation of their
// own, without it only this one has.
#define KIMI_MLA_IMPLEMENTATION
#include "../../kimi_mla.h"

#ifdef __cplusplus
extern "C"
#endif
    const char*
    other_status_name(int32_t status);

const char* other_status_name(int32_t status) { return kmla_status_name(status); }
