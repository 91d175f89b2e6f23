// cmocka.h - the part of cmocka that the tests use, in one header: for compilers and machines that
// Debian has no cmocka for. A test that fails jumps back to the runner. The environment variable
// SKIP_TESTS, names with a blank between, leaves out what would take too long.

#ifndef STANDIN_CMOCKA_H
#define STANDIN_CMOCKA_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct CMUnitTest {
    const char* name;
    void (*test)(void** state);
    int (*setup)(void** state);
    int (*teardown)(void** state);
} CMUnitTest;

enum { STANDIN_FAILED = 1, STANDIN_SKIPPED = 2 };
static jmp_buf standin_runner;

static void print_message(const char* format, ...) {
    va_list values;
    va_start(values, format);
    vprintf(format, values);
    va_end(values);
}

#define print_error print_message

static void standin_check(int holds, const char* what, const char* file, int line) {
    if (!holds) {
        print_message("%s:%d: %s\n", file, line, what);
        longjmp(standin_runner, STANDIN_FAILED);
    }
}

// As in cmocka, integers are compared as the widest unsigned ones.
static void standin_check_equal(uint64_t a, uint64_t b, int wanted, const char* what,
                                const char* file, int line) {
    if ((a == b) != wanted) {
        print_message("%lld and %lld: ", (long long)a, (long long)b);
        standin_check(0, what, file, line);
    }
}

#define STANDIN_CHECK(condition, what) standin_check(condition, what, __FILE__, __LINE__)

#define assert_true(c) STANDIN_CHECK((c) ? 1 : 0, #c)
#define assert_false(c) STANDIN_CHECK((c) ? 0 : 1, "not (" #c ")")
#define assert_null(p) STANDIN_CHECK((p) == NULL, #p " is NULL")
#define assert_non_null(p) STANDIN_CHECK((p) != NULL, #p " is not NULL")
#define assert_ptr_equal(a, b) STANDIN_CHECK((a) == (b), #a " == " #b)
#define assert_int_equal(a, b)                                                                     \
    standin_check_equal((uint64_t)(a), (uint64_t)(b), 1, #a " == " #b, __FILE__, __LINE__)
#define assert_int_not_equal(a, b)                                                                 \
    standin_check_equal((uint64_t)(a), (uint64_t)(b), 0, #a " != " #b, __FILE__, __LINE__)
#define assert_string_equal(a, b) STANDIN_CHECK(strcmp(a, b) == 0, #a " == " #b)
#define assert_string_not_equal(a, b) STANDIN_CHECK(strcmp(a, b) != 0, #a " != " #b)
#define assert_memory_equal(a, b, n) STANDIN_CHECK(memcmp(a, b, n) == 0, "the bytes of " #a)
#define assert_memory_not_equal(a, b, n) STANDIN_CHECK(memcmp(a, b, n) != 0, "the bytes of " #a)
#define fail() STANDIN_CHECK(0, "fail")
#define fail_msg(...) (print_message(__VA_ARGS__), STANDIN_CHECK(0, ""))
#define skip() longjmp(standin_runner, STANDIN_SKIPPED)

#define cmocka_unit_test(f) {#f, f, NULL, NULL}
#define cmocka_unit_test_setup(f, setup) {#f, f, setup, NULL}
#define cmocka_unit_test_setup_teardown(f, setup, teardown) {#f, f, setup, teardown}

static int standin_left_out(const char* name) {
    const char* at = getenv("SKIP_TESTS");
    const size_t length = strlen(name);
    for (; at && (at = strstr(at, name)) != NULL; at += length) {
        if (at[length] == ' ' || at[length] == 0) {
            return 1;
        }
    }
    return 0;
}

// Not in a function that setjmp returns to a second time: what that changes may be lost.
static int standin_run_one(const CMUnitTest* test) {
    void* state = NULL;
    const int ended = setjmp(standin_runner);
    if (ended == 0) {
        if (test->setup && test->setup(&state) != 0) {
            return STANDIN_FAILED;
        }
        test->test(&state);
        if (test->teardown && test->teardown(&state) != 0) {
            return STANDIN_FAILED;
        }
    }
    return ended;
}

static int standin_run(const CMUnitTest* tests, size_t count) {
    int counts[3] = {0, 0, 0};
    setvbuf(stdout, NULL, _IONBF, 0); // nothing is lost if a test crashes
    for (size_t i = 0; i < count; ++i) {
        const int ended =
            standin_left_out(tests[i].name) ? STANDIN_SKIPPED : standin_run_one(&tests[i]);
        ++counts[ended];
        if (ended == STANDIN_FAILED) {
            print_message("FAILED: %s\n", tests[i].name);
        }
    }
    print_message("%d passed, %d failed, %d skipped\n", counts[0], counts[1], counts[2]);
    return counts[STANDIN_FAILED] != 0 || counts[0] == 0;
}

#define cmocka_run_group_tests_name(name, tests, setup, teardown)                                  \
    standin_run(tests, sizeof(tests) / sizeof((tests)[0]))
#define cmocka_run_group_tests(tests, setup, teardown)                                             \
    cmocka_run_group_tests_name("", tests, setup, teardown)

#endif
