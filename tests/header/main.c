// Uses one function of every section of the header, here and in other.c.
#ifdef KIMI_MLA_STATIC
#define KIMI_MLA_IMPLEMENTATION
#endif
#include "../../kimi_mla.h"

#include <stdio.h>
#include <string.h>

#ifdef __cplusplus
extern "C"
#endif
    const char*
    other_status_name(int32_t status);

static int check(int holds, const char* what) {
    if (!holds) {
        printf("header: %s\n", what);
    }
    return !holds;
}

int main(void) {
    int failures = 0;
    uint64_t bytes = 0;
    failures += check(strcmp(kmla_status_name(KMLA_ERROR_PAGE), "KMLA_ERROR_PAGE") == 0, "here");
    failures += check(strcmp(other_status_name(KMLA_ERROR_PAGE), "KMLA_ERROR_PAGE") == 0, "other");
    failures += check(kmla_e4m3_to_float(0x7E) == 448.0f, "records");
    failures += check(kmla_workspace_bytes(1, 1, 2, KMLA_FP32, &bytes, NULL) == KMLA_OK &&
                          bytes == 2 * (512 * 4 + 4),
                      "planning");
    failures += check(kmla_host_combine(NULL, NULL) == KMLA_ERROR_ARGUMENT, "host");
#ifndef KIMI_MLA_NO_GPU
    failures += check(kmla_gpu_open(NULL, NULL, NULL) == KMLA_ERROR_ARGUMENT, "gpu");
#endif
    return failures != 0;
}
