// The cache of compiled images: its keys, what it is asked and told, and the cache of files under
// everything that happens to files. Whatever happens, a compile gives the right image.

#define _GNU_SOURCE

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

// The header's file calls come here first.
static int file_open(const char* path, int flags, ...);
static long file_read(int file, void* data, size_t bytes);
static long file_write(int file, const void* data, size_t bytes);
static int file_close(int file);
static int file_rename(const char* from, const char* to);
static int file_facts(int file, struct stat* facts);

#define open file_open
#define read file_read
#define write file_write
#define close file_close
#define rename file_rename
#define fstat file_facts
#define KIMI_MLA_IMPLEMENTATION
#include "../kimi_mla.h"
#undef open
#undef read
#undef write
#undef close
#undef rename
#undef fstat

#include "with_fake.h"

static int file_calls;      // so far
static int fault_at;        // the call of this number has a fault, 0: none
static int is_kill;         // the fault: 1: the process is killed there, 0: the call fails
static size_t most_written; // by one call, 0: all

static int has_fault(void) {
    if (++file_calls != fault_at) {
        return 0;
    }
    if (is_kill) {
        kill(getpid(), SIGKILL);
    }
    errno = EIO;
    return 1;
}

static int file_open(const char* path, int flags, ...) {
    va_list values;
    int mode;
    va_start(values, flags);
    mode = flags & O_CREAT ? va_arg(values, int) : 0;
    va_end(values);
    return has_fault() ? -1 : open(path, flags, mode);
}
static long file_read(int file, void* data, size_t bytes) {
    return has_fault() ? -1 : (long)read(file, data, bytes);
}
static long file_write(int file, const void* data, size_t bytes) {
    if (file_calls + 1 == fault_at) { // half is written before it strikes
        bytes = (size_t)write(file, data, bytes / 2);
    }
    if (has_fault()) {
        return -1;
    }
    return (long)write(file, data, most_written && bytes > most_written ? most_written : bytes);
}
static int file_close(int file) {
    int result = close(file);
    return has_fault() ? -1 : result;
}
static int file_rename(const char* from, const char* to) {
    return has_fault() ? -1 : rename(from, to);
}
static int file_facts(int file, struct stat* facts) {
    return has_fault() ? -1 : fstat(file, facts);
}

// =============================================================================
// A folder for each test
// =============================================================================

static char folder[64];    // its own, empty, not yet the cache's
static char directory[96]; // of the cache, in it
static kmla_plan plan;
static kmla_device device;
static kmla_error error;

static void remove_all(const char* path) {
    char command[256];
    snprintf(command, sizeof command, "chmod -R u+rwx %s 2>/dev/null; rm -rf %s", path, path);
    assert_true(system(command) >= 0);
}

static int set_up(void** state) {
    snprintf(folder, sizeof folder, "build/cache.%d", (int)getpid());
    snprintf(directory, sizeof directory, "%s/images", folder);
    remove_all(folder);
    file_calls = fault_at = is_kill = 0;
    most_written = 0;
    device = card(9, 0);
    plan = plan_for(99, 1);
    return mkdir(folder, 0755) != 0 || reset_fake(state);
}

static int tear_down(void** state) {
    (void)state;
    umount2(directory, MNT_DETACH); // if the test of a full disk stopped half way
    remove_all(folder);
    return 0;
}

// An object that compiles for any card, through a cache.
static kmla_gpu* open_with(const kmla_cache* cache) {
    kmla_gpu_desc desc = fake_desc();
    kmla_gpu* gpu;
    desc.without_cuda = 1;
    desc.cache = *cache;
    if (kmla_gpu_open(&desc, &gpu, &error) != KMLA_OK) {
        fail_msg("%s", error.message);
    }
    return gpu;
}

static kmla_gpu* open_with_files(void) {
    kmla_cache cache;
    if (kmla_cache_files(directory, &cache, &error) != KMLA_OK) {
        fail_msg("%s", error.message);
    }
    return open_with(&cache);
}

static int is_right(const kmla_image* image) {
    const unsigned char* cubin = (const unsigned char*)image->data + KMLA_I_IMAGE_HEAD_BYTES;
    size_t bytes = fake->cubin_bytes ? (size_t)fake->cubin_bytes : 6, i;
    if (image->bytes != bytes + KMLA_I_IMAGE_HEAD_BYTES || image->borrowed ||
        image->variant != kmla_plan_variant(&plan)) {
        return 0;
    }
    for (i = 0; i < bytes; ++i) {
        if (cubin[i] != (i < 6 ? (unsigned char)"cubin"[i] : (unsigned char)(i * 37))) {
            return 0;
        }
    }
    return 1;
}

// Compiles the plan; returns how often NVRTC was asked.
static int compile_right(kmla_gpu* gpu) {
    kmla_image image;
    int compiles = fake->compiles;
    if (kmla_gpu_compile(gpu, &plan, &device, NULL, &image, &error) != KMLA_OK) {
        fail_msg("%s", error.message);
    }
    assert_true(is_right(&image));
    kmla_image_free(&image);
    return fake->compiles - compiles;
}

// Files of the directory with that ending; the last one's path.
static int count_files(const char* ending, char* path, size_t room) {
    DIR* listing = opendir(directory);
    struct dirent* entry;
    int count = 0;
    while (listing && (entry = readdir(listing)) != NULL) {
        const char* dot = strrchr(entry->d_name, '.');
        if (dot && strcmp(dot, ending) == 0) {
            ++count;
            if (path) {
                const int length = snprintf(path, room, "%s/%s", directory, entry->d_name);
                assert_true(length > 0 && (size_t)length < room);
            }
        }
    }
    if (listing) {
        closedir(listing);
    }
    return count;
}

static void entry_path(char* path, size_t room) {
    assert_int_equal(count_files(".kmla", path, room), 1);
}

static size_t read_whole(const char* path, unsigned char* data, size_t room) {
    FILE* file = fopen(path, "rb");
    size_t bytes = file ? fread(data, 1, room, file) : 0;
    if (file) {
        fclose(file);
    }
    return bytes;
}

static void write_whole(const char* path, const void* data, size_t bytes) {
    FILE* file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(data, 1, bytes, file), bytes);
    assert_int_equal(fclose(file), 0);
}

// Runs a function in a child; 1 if it returns 1 there, 0 if it returns 0 or is killed.
static int in_child(int (*run)(void)) {
    int status = 0;
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        alarm(20); // a child that hangs is a failure
        _exit(run() ? 0 : 1);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

// =============================================================================
// The caller's own cache
// =============================================================================

typedef struct shelf {
    char key[KMLA_CACHE_KEY_BYTES];
    unsigned char data[4096];
    size_t bytes;  // 0: empty
    size_t claims; // what load says that it has, 0: the truth
    size_t copied; // what it says that it has copied, 0: the truth
    int loads, stores;
} shelf;

static size_t shelf_load(void* user, const char* key, void* data, size_t room) {
    shelf* s = (shelf*)user;
    ++s->loads;
    if (s->bytes == 0 || strcmp(key, s->key) != 0) {
        return 0;
    }
    if (data && s->bytes <= room) {
        memcpy(data, s->data, s->bytes);
        return s->copied ? s->copied : s->bytes;
    }
    return s->claims ? s->claims : s->bytes;
}

static void shelf_store(void* user, const char* key, const void* data, size_t bytes) {
    shelf* s = (shelf*)user;
    ++s->stores;
    assert_true(strlen(key) < KMLA_CACHE_KEY_BYTES && bytes <= sizeof s->data);
    strcpy(s->key, key);
    memcpy(s->data, data, bytes);
    s->bytes = bytes;
}

static kmla_cache cache_on(shelf* s) {
    kmla_cache cache;
    memset(s, 0, sizeof *s);
    cache.load = shelf_load;
    cache.store = shelf_store;
    cache.user = s;
    return cache;
}

static void append_log(void* user, const char* text) { strcat((char*)user, text); }

static void test_asked_and_told(void** state) {
    shelf s;
    kmla_cache cache = cache_on(&s);
    kmla_gpu* gpu = open_with(&cache);
    char logged[64] = "";
    kmla_log log = {append_log, logged};
    kmla_image image;
    (void)state;
    assert_int_equal(s.loads, 0);
    assert_int_equal(compile_right(gpu), 1);
    assert_int_equal(s.stores, 1);
    assert_int_equal(strspn(s.key, "abcdefghijklmnopqrstuvwxyz0123456789_-"), strlen(s.key));
    assert_int_equal(strncmp(s.key, "sm_90a-20032-", 13), 0);
    assert_int_equal(compile_right(gpu), 0);
    assert_int_equal(s.stores, 1);
    kmla_gpu_close(gpu);

    gpu = open_with(&cache); // another process
    assert_int_equal(compile_right(gpu), 0);
    fake->log = "so many registers\n"; // who wants the log has it made
    s.loads = 0;
    assert_int_equal(kmla_gpu_compile(gpu, &plan, &device, &log, &image, &error), KMLA_OK);
    assert_string_equal(logged, fake->log);
    assert_int_equal(s.loads, 0);
    assert_int_equal(s.stores, 2);
    kmla_image_free(&image);
    assert_int_equal(compile_right(gpu), 0); // -v is not part of the key
    kmla_gpu_close(gpu);
}

static void test_both_functions_or_none(void** state) {
    kmla_gpu_desc desc = fake_desc();
    kmla_gpu* gpu = NULL;
    shelf s;
    (void)state;
    desc.cache = cache_on(&s);
    desc.cache.store = NULL;
    assert_int_equal(kmla_gpu_open(&desc, &gpu, &error), KMLA_ERROR_ARGUMENT);
    assert_contains(error.message, "cache.load");
    assert_null(gpu);
    desc.cache = cache_on(&s);
    desc.cache.load = NULL;
    assert_int_equal(kmla_gpu_open(&desc, &gpu, &error), KMLA_ERROR_ARGUMENT);
}

static void test_prepare_uses_it(void** state) {
    kmla_gpu_desc desc = fake_desc();
    kmla_gpu* gpu;
    int run;
    (void)state;
    assert_int_equal(kmla_cache_files(directory, &desc.cache, &error), KMLA_OK);
    for (run = 0; run < 2; ++run) {
        fake->compiles = 0;
        assert_int_equal(kmla_gpu_open(&desc, &gpu, &error), KMLA_OK);
        assert_int_equal(kmla_gpu_prepare(gpu, &plan, NULL, &error), KMLA_OK);
        assert_int_equal(fake->compiles, run == 0 ? 2 : 0); // the reader, and what all plans need
        kmla_gpu_close(gpu);
    }
    assert_int_equal(count_files(".kmla", NULL, 0), 2);
    assert_int_equal(fake->modules_loaded, fake->modules_unloaded);
}

// The image is whole and this header's own, and yet the driver will not have it.
static void test_the_driver_refuses(void** state) {
    kmla_gpu_desc desc = fake_desc();
    kmla_gpu* gpu;
    shelf s;
    (void)state;
    desc.cache = cache_on(&s);
    assert_int_equal(kmla_gpu_open(&desc, &gpu, &error), KMLA_OK);
    assert_int_equal(kmla_gpu_prepare(gpu, NULL, NULL, &error), KMLA_OK);
    kmla_gpu_close(gpu);
    assert_int_equal(kmla_gpu_open(&desc, &gpu, &error), KMLA_OK);
    fake->compiles = 0;
    fake->refused_loads = 1;
    assert_int_equal(kmla_gpu_prepare(gpu, NULL, NULL, &error), KMLA_OK);
    assert_int_equal(fake->compiles, 1);
    assert_int_equal(s.stores, 2);
    kmla_gpu_close(gpu);
    assert_int_equal(kmla_gpu_open(&desc, &gpu, &error), KMLA_OK);
    fake->driver_version = 11080;
    fake->refused_loads = 2; // also what was just compiled
    assert_int_equal(kmla_gpu_prepare(gpu, NULL, NULL, &error), KMLA_ERROR_CUDA);
    assert_int_equal(error.cuda_result, 200);
    assert_int_equal(error.nvrtc_version, 12010);
    assert_int_equal(kmla_gpu_prepare(gpu, NULL, NULL, &error), KMLA_OK);
    kmla_gpu_close(gpu);
    assert_int_equal(fake->modules_loaded, fake->modules_unloaded);
}

// What a load gives is not to be trusted, its size neither.
static void test_lies(void** state) {
    static const size_t claims[] = {1, 63, 64, 69, 71, 4096, (size_t)-1, (size_t)1 << 40};
    shelf s;
    kmla_cache cache = cache_on(&s);
    kmla_gpu* gpu = open_with(&cache);
    kmla_plan other = plan_for(4, 1);
    kmla_image image;
    int32_t i;
    (void)state;
    assert_int_equal(compile_right(gpu), 1);
    for (i = 0; i < KMLA_I_COUNT(claims); ++i) {
        s.claims = claims[i];
        assert_int_equal(compile_right(gpu), 1);
    }
    s.claims = 0;
    assert_int_equal(compile_right(gpu), 0);
    s.copied = 10; // it was cut off while it was read
    assert_int_equal(compile_right(gpu), 1);
    s.copied = 0;

    // A whole image, but of another plan.
    {
        shelf kept = s;
        assert_int_equal(kmla_gpu_compile(gpu, &other, &device, NULL, &image, &error), KMLA_OK);
        kmla_image_free(&image);
        strcpy(s.key, kept.key);
        assert_int_equal(compile_right(gpu), 1);
        assert_memory_equal(s.data, kept.data, kept.bytes);
    }
    kmla_gpu_close(gpu);
}

// =============================================================================
// Keys: RT-04
// =============================================================================

static void key_of(const kmla_i_image_head* head, int32_t release, const kmla_i_options* options,
                   char* key) {
    memset(key, '!', KMLA_CACHE_KEY_BYTES);
    kmla_i_cache_key(head, release, options, key);
    assert_non_null(memchr(key, 0, KMLA_CACHE_KEY_BYTES));
}

enum { MOST_KEYS = 64 };
static char keys[MOST_KEYS][KMLA_CACHE_KEY_BYTES];
static int key_count;

static void expect_new_key(const kmla_i_image_head* head, int32_t release,
                           const kmla_i_options* options) {
    int i;
    key_of(head, release, options, keys[key_count]);
    for (i = 0; i < key_count; ++i) {
        assert_string_not_equal(keys[i], keys[key_count]);
    }
    ++key_count;
}

static void test_key(void** state) {
    kmla_i_image_head head = kmla_i_image_head_of(&plan, &device), changed;
    kmla_i_options options, other;
    char again[KMLA_CACHE_KEY_BYTES];
    int i;
    (void)state;
    key_count = 0;
    kmla_i_compile_options(&plan, &device, &options);
    expect_new_key(&head, 12010, &options);
    key_of(&head, 12010, &options, again);
    assert_string_equal(keys[0], again);

    expect_new_key(&head, 12020, &options); // NVRTC's version
    expect_new_key(&head, 13000, &options);
    changed = head;
    changed.version += 1; // the header's
    expect_new_key(&changed, 12010, &options);
    changed = head;
    changed.source_hash ^= 1;
    expect_new_key(&changed, 12010, &options);
    for (i = 0; i < options.count; ++i) { // each option, the architecture's suffix among them
        kmla_i_compile_options(&plan, &device, &other);
        other.text[i][strlen(other.text[i]) - 1] ^= 1;
        expect_new_key(&head, 12010, &other);
        kmla_i_compile_options(&plan, &device, &other);
        other.text[i][0] = 0;
        expect_new_key(&head, 12010, &other);
    }
    options.count -= 1;
    expect_new_key(&head, 12010, &options);
}

// Of every card and plan that there is, through the public calls.
static void test_keys_of_plans(void** state) {
    static const int32_t capabilities[][2] = {{8, 0}, {8, 6}, {8, 9}, {9, 0}};
    static const int32_t formats[] = {KMLA_KV_PACKED, KMLA_KV_E4M3, KMLA_KV_BF16};
    static const int32_t tiles[] = {8, 16, 32};
    shelf s;
    kmla_cache cache = cache_on(&s);
    kmla_gpu* gpu = open_with(&cache);
    kmla_image image;
    int32_t c, f, t, i;
    (void)state;
    key_count = 0;
    for (c = 0; c < 4; ++c) {
        for (f = 0; f < 3; ++f) {
            for (t = 0; t < 3; ++t) {
                kmla_device other = card(capabilities[c][0], capabilities[c][1]);
                kmla_shape shape = {0};
                kmla_plan made;
                shape.requests = 1;
                shape.heads = 99;
                shape.capacity_tokens = 1000;
                shape.tile = tiles[t];
                shape.kv_format = formats[f];
                assert_int_equal(kmla_plan_decode(&shape, &other, &made, &error), KMLA_OK);
                assert_int_equal(kmla_gpu_compile(gpu, &made, &other, NULL, &image, &error),
                                 KMLA_OK);
                kmla_image_free(&image);
                for (i = 0; i < key_count; ++i) {
                    assert_string_not_equal(keys[i], s.key);
                }
                strcpy(keys[key_count++], s.key);
            }
        }
    }
    kmla_gpu_close(gpu);
}

static const char* program;

// The same in two runs of the program, in other environments.
static void test_key_is_the_same_across_runs(void** state) {
    char lines[2][128] = {"", ""};
    int i;
    (void)state;
    for (i = 0; i < 2; ++i) {
        char command[256];
        FILE* run;
        snprintf(command, sizeof command, "env -i %s ./%s --key", i ? "HOME=/nowhere TZ=Asia/Tokyo"
                                                                   : "", program);
        run = popen(command, "r");
        assert_non_null(run);
        assert_non_null(fgets(lines[i], sizeof lines[i], run));
        assert_int_equal(pclose(run), 0);
    }
    assert_string_equal(lines[0], lines[1]);
    assert_true(strlen(lines[0]) > 20);
}

static int print_key(void) {
    kmla_i_image_head head;
    kmla_i_options options;
    char key[KMLA_CACHE_KEY_BYTES];
    device = card(9, 0);
    plan = plan_for(99, 1);
    head = kmla_i_image_head_of(&plan, &device);
    kmla_i_compile_options(&plan, &device, &options);
    kmla_i_cache_key(&head, 13000, &options, key);
    puts(key);
    return 0;
}

// =============================================================================
// Files
// =============================================================================

static void test_files(void** state) {
    struct stat facts;
    char path[256];
    unsigned char data[256];
    kmla_image opened;
    kmla_gpu* gpu = open_with_files();
    (void)state;
    assert_int_equal(stat(directory, &facts), 0);
    assert_int_equal(facts.st_mode & 0777, 0700);
    assert_int_equal(compile_right(gpu), 1);
    entry_path(path, sizeof path);
    assert_int_equal(stat(path, &facts), 0);
    assert_int_equal(facts.st_mode & 0777, 0600);
    assert_int_equal(count_files(".tmp", NULL, 0), 0);
    assert_int_equal(compile_right(gpu), 0);
    kmla_gpu_close(gpu);

    // What lies there is an image as kmla_gpu_compile gave it, alignment apart.
    assert_int_equal(read_whole(path, data, sizeof data), KMLA_I_IMAGE_HEAD_BYTES + 6);
    {
        void* aligned = malloc(KMLA_I_IMAGE_HEAD_BYTES + 6);
        memcpy(aligned, data, KMLA_I_IMAGE_HEAD_BYTES + 6);
        assert_int_equal(kmla_image_open(aligned, KMLA_I_IMAGE_HEAD_BYTES + 6, &opened, &error),
                         KMLA_OK);
        free(aligned);
    }
    gpu = open_with_files();
    assert_int_equal(compile_right(gpu), 0);
    kmla_gpu_close(gpu);
}

// No directory, no files: not a single call, whatever HOME says or does not say.
static void test_no_directory(void** state) {
    static const char* const homes[] = {NULL, "", "/nowhere", folder};
    char* kept = getenv("HOME") ? strdup(getenv("HOME")) : NULL;
    kmla_cache none = {NULL, NULL, NULL};
    int i;
    (void)state;
    for (i = 0; i < 4; ++i) {
        kmla_gpu* gpu;
        if (homes[i]) {
            setenv("HOME", homes[i], 1);
        } else {
            unsetenv("HOME");
        }
        gpu = open_with(&none);
        assert_int_equal(compile_right(gpu), 1);
        assert_int_equal(compile_right(gpu), 1);
        kmla_gpu_close(gpu);
        assert_int_equal(file_calls, 0);
        assert_int_equal(rmdir(folder), 0); // it is empty
        assert_int_equal(mkdir(folder, 0755), 0);
    }
    unsetenv("HOME"); // and with a directory it is not asked for
    {
        kmla_gpu* gpu = open_with_files();
        assert_int_equal(compile_right(gpu), 1);
        assert_int_equal(compile_right(gpu), 0);
        kmla_gpu_close(gpu);
    }
    if (kept) {
        setenv("HOME", kept, 1);
        free(kept);
    }
}

static void expect_bad_directory(const char* path, const char* why) {
    kmla_cache cache, before;
    memset(&cache, 0x5A, sizeof cache);
    before = cache;
    assert_int_equal(kmla_cache_files(path, &cache, &error), KMLA_ERROR_ARGUMENT);
    assert_contains(error.message, why);
    assert_memory_equal(&cache, &before, sizeof cache);
}

static void test_bad_directories(void** state) {
    static const mode_t modes[] = {0777, 0770, 0702, 0720, 01777};
    char path[2000];
    kmla_cache cache;
    size_t i;
    (void)state;
    expect_bad_directory(NULL, "directory is NULL");
    assert_int_equal(kmla_cache_files(directory, NULL, &error), KMLA_ERROR_ARGUMENT);
    expect_bad_directory("", "directory has 0 bytes");
    memset(path, 'x', sizeof path);
    path[sizeof path - 1] = 0;
    expect_bad_directory(path, "directory has 1999 bytes");
    snprintf(path, sizeof path, "%s/missing/images", folder);
    expect_bad_directory(path, "cannot be made");
    snprintf(path, sizeof path, "%s/file", folder);
    write_whole(path, "x", 1);
    expect_bad_directory(path, "is none");
    assert_int_equal(mkdir(directory, 0700), 0);
    for (i = 0; i < sizeof modes / sizeof modes[0]; ++i) {
        assert_int_equal(chmod(directory, modes[i]), 0);
        expect_bad_directory(directory, "others");
    }
    assert_int_equal(chmod(directory, 0755), 0); // others may read
    assert_int_equal(kmla_cache_files(directory, &cache, &error), KMLA_OK);
    if (geteuid() == 0) {
        assert_int_equal(chown(directory, 12345, 12345), 0);
        expect_bad_directory(directory, "another user's");
    }
    // The longest that is taken works.
    memset(path, 'y', sizeof path);
    snprintf(path, sizeof path, "%s/", folder);
    i = KMLA_I_PATH_BYTES - KMLA_CACHE_KEY_BYTES - KMLA_I_FILE_ENDING_BYTES;
    while (strlen(path) + 200 < i) {
        strcat(path, "yyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy/");
        assert_int_equal(mkdir(path, 0700), 0);
    }
    while (strlen(path) < i) {
        strcat(path, "z");
    }
    {
        kmla_gpu* gpu;
        assert_int_equal(kmla_cache_files(path, &cache, &error), KMLA_OK);
        gpu = open_with(&cache);
        assert_int_equal(compile_right(gpu), 1);
        assert_int_equal(compile_right(gpu), 0);
        kmla_gpu_close(gpu);
    }
    strcat(path, "z");
    expect_bad_directory(path, "directory has");
}

// An entry that was damaged: rebuilt once, and whole from then on.
static void expect_rebuilt(kmla_gpu* gpu) {
    assert_int_equal(compile_right(gpu), 1);
    assert_int_equal(compile_right(gpu), 0);
    assert_int_equal(count_files(".tmp", NULL, 0), 0);
}

static void test_every_length(void** state) {
    kmla_gpu* gpu = open_with_files();
    unsigned char whole[256];
    char path[256];
    size_t bytes, length;
    (void)state;
    compile_right(gpu);
    entry_path(path, sizeof path);
    bytes = read_whole(path, whole, sizeof whole - 1);
    whole[bytes] = 0;
    for (length = 0; length <= bytes + 1; ++length) {
        write_whole(path, whole, length);
        if (length == bytes) {
            assert_int_equal(compile_right(gpu), 0);
        } else {
            expect_rebuilt(gpu);
        }
    }
    kmla_gpu_close(gpu);
}

static void test_every_flipped_byte(void** state) {
    kmla_gpu* gpu = open_with_files();
    unsigned char data[256];
    char path[256];
    size_t bytes, at;
    (void)state;
    compile_right(gpu);
    entry_path(path, sizeof path);
    bytes = read_whole(path, data, sizeof data);
    for (at = 0; at < bytes; ++at) {
        data[at] ^= (unsigned char)(1 << at % 8);
        write_whole(path, data, bytes);
        expect_rebuilt(gpu);
        data[at] ^= (unsigned char)(1 << at % 8);
    }
    kmla_gpu_close(gpu);
}

// A killed process left a file with the very name that this one would take: it is nobody's.
static void test_left_over(void** state) {
    kmla_gpu* gpu = open_with_files();
    char path[256], left[320], data[1000];
    struct stat facts;
    (void)state;
    compile_right(gpu);
    entry_path(path, sizeof path);
    assert_int_equal(remove(path), 0);
    path[strlen(path) - strlen(".kmla")] = 0;
    snprintf(left, sizeof left, "%s.%d.0.tmp", path, (int)getpid());
    memset(data, 'x', sizeof data);
    write_whole(left, data, sizeof data);
    assert_int_equal(compile_right(gpu), 1);
    assert_int_equal(compile_right(gpu), 0);
    assert_int_equal(stat(left, &facts), 0);
    assert_int_equal(facts.st_size, sizeof data);
    kmla_gpu_close(gpu);
}

// In the place of the entry lies something that is no file.
static void test_no_file(void** state) {
    kmla_gpu* gpu = open_with_files();
    char path[256];
    (void)state;
    compile_right(gpu);
    entry_path(path, sizeof path);
    assert_int_equal(remove(path), 0);
    assert_int_equal(mkfifo(path, 0600), 0); // to read it would be to wait
    alarm(20);
    expect_rebuilt(gpu);
    alarm(0);
    assert_int_equal(remove(path), 0);
    assert_int_equal(symlink("/nowhere/at/all", path), 0);
    expect_rebuilt(gpu);
    assert_int_equal(remove(path), 0);
    assert_int_equal(mkdir(path, 0700), 0); // no file can take its place
    assert_int_equal(compile_right(gpu), 1);
    assert_int_equal(compile_right(gpu), 1);
    assert_int_equal(count_files(".tmp", NULL, 0), 0);
    assert_int_equal(rmdir(path), 0);
    expect_rebuilt(gpu);
    remove_all(directory); // gone while the object lives
    assert_int_equal(compile_right(gpu), 1);
    assert_int_equal(compile_right(gpu), 1);
    kmla_gpu_close(gpu);
}

// =============================================================================
// File calls that fail, and processes that are killed at them
// =============================================================================

static void test_every_file_call(void** state) {
    int cold, warm, at;
    kmla_gpu* gpu = open_with_files();
    (void)state;
    file_calls = 0;
    assert_int_equal(compile_right(gpu), 1);
    cold = file_calls; // open; open, write, close, rename
    assert_int_equal(cold, 5);
    file_calls = 0;
    assert_int_equal(compile_right(gpu), 0);
    warm = file_calls; // twice open, fstat, close, and once read
    assert_int_equal(warm, 7);
    for (at = 1; at <= warm; ++at) { // what is there cannot be read
        file_calls = 0;
        fault_at = at;
        compile_right(gpu);
        fault_at = 0;
        assert_int_equal(compile_right(gpu), 0);
        assert_int_equal(count_files(".tmp", NULL, 0), 0);
    }
    for (at = 1; at <= cold; ++at) { // what is not there cannot be written
        char path[256];
        entry_path(path, sizeof path);
        assert_int_equal(remove(path), 0);
        file_calls = 0;
        fault_at = at;
        assert_int_equal(compile_right(gpu), 1);
        fault_at = 0;
        assert_int_equal(count_files(".tmp", NULL, 0), 0);
        compile_right(gpu);
        assert_int_equal(compile_right(gpu), 0);
    }
    kmla_gpu_close(gpu);
}

static void test_short_writes(void** state) {
    kmla_gpu* gpu = open_with_files();
    (void)state;
    fake->cubin_bytes = 10000;
    most_written = 777;
    assert_int_equal(compile_right(gpu), 1);
    assert_int_equal(compile_right(gpu), 0);
    kmla_gpu_close(gpu);
}

static int compile_in_child(void) {
    kmla_gpu* gpu = open_with_files();
    compile_right(gpu);
    kmla_gpu_close(gpu);
    return 1;
}

static void test_killed_at_every_call(void** state) {
    int at, left = 0, killed = 0;
    (void)state;
    fake->cubin_bytes = 200000;
    for (at = 1;; ++at) {
        kmla_gpu* gpu;
        int done;
        file_calls = 0;
        fault_at = at;
        is_kill = 1;
        done = in_child(compile_in_child);
        is_kill = fault_at = 0;
        if (done) { // there is no such call
            break;
        }
        ++killed;
        left += count_files(".tmp", NULL, 0);
        gpu = open_with_files();
        compile_right(gpu);
        assert_int_equal(compile_right(gpu), 0);
        kmla_gpu_close(gpu);
        remove_all(directory);
    }
    assert_int_equal(killed, 5);
    assert_int_equal(left, 3); // killed at write, close and rename
}

// At any moment of a process that does nothing but store.
static void test_killed_at_any_moment(void** state) {
    kmla_gpu* gpu = open_with_files();
    char path[256], key[KMLA_CACHE_KEY_BYTES] = "";
    kmla_image image;
    int round, left;
    (void)state;
    fake->cubin_bytes = 4 << 20;
    assert_int_equal(kmla_gpu_compile(gpu, &plan, &device, NULL, &image, &error), KMLA_OK);
    entry_path(path, sizeof path);
    memcpy(key, strrchr(path, '/') + 1, strcspn(strrchr(path, '/') + 1, "."));
    for (round = 0; round < 16; ++round) {
        struct timespec pause = {0, 0};
        pid_t child = fork();
        int status;
        assert_true(child >= 0);
        while (child == 0) {
            kmla_i_files_store(directory, key, image.data, image.bytes);
        }
        pause.tv_nsec = 2000000 + round * 1700000;
        nanosleep(&pause, NULL);
        kill(child, SIGKILL);
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_int_equal(compile_right(gpu), 0); // the old entry or a new one, always whole
    }
    left = count_files(".tmp", NULL, 0);
    print_message("16 kills, %d of them while a file was written\n", left);
    assert_true(left > 0);
    kmla_image_free(&image);
    kmla_gpu_close(gpu);
}

// =============================================================================
// No room, no rights
// =============================================================================

static int compile_with_file_limit(void) {
    struct rlimit limit = {50000, 50000};
    kmla_gpu* gpu = open_with_files();
    signal(SIGXFSZ, SIG_IGN); // a write past the limit then fails
    if (setrlimit(RLIMIT_FSIZE, &limit) != 0 || compile_right(gpu) != 1 ||
        compile_right(gpu) != 1) {
        return 0;
    }
    kmla_gpu_close(gpu);
    return count_files(".tmp", NULL, 0) == 0 && count_files(".kmla", NULL, 0) == 0;
}

static void test_file_limit(void** state) {
    kmla_gpu* gpu;
    (void)state;
    fake->cubin_bytes = 200000;
    assert_true(in_child(compile_with_file_limit));
    gpu = open_with_files();
    expect_rebuilt(gpu);
    kmla_gpu_close(gpu);
}

static void test_full_disk(void** state) {
    kmla_gpu* gpu;
    (void)state;
    assert_int_equal(mkdir(directory, 0700), 0);
    if (mount("none", directory, "tmpfs", 0, "size=64k,mode=0700") != 0) {
        print_message("no disk can be mounted here; the limit of files stands for it\n");
        skip();
    }
    fake->cubin_bytes = 200000;
    gpu = open_with_files();
    assert_int_equal(compile_right(gpu), 1);
    assert_int_equal(compile_right(gpu), 1);
    assert_int_equal(count_files(".tmp", NULL, 0), 0);
    assert_int_equal(count_files(".kmla", NULL, 0), 0);
    fake->cubin_bytes = 20000; // this fits
    assert_int_equal(compile_right(gpu), 1);
    assert_int_equal(compile_right(gpu), 0);
    fake->cubin_bytes = 60000; // this does not fit beside it: the old entry stays, and is wrong now
    fake->nvrtc_major = 13;
    kmla_gpu_close(gpu);
    gpu = open_with_files();
    assert_int_equal(compile_right(gpu), 1);
    assert_int_equal(compile_right(gpu), 1);
    assert_int_equal(count_files(".kmla", NULL, 0), 1);
    kmla_gpu_close(gpu);
    assert_int_equal(mount("none", directory, "tmpfs", MS_REMOUNT | MS_RDONLY, NULL), 0);
    fake->cubin_bytes = 20000;
    fake->nvrtc_major = 12;
    gpu = open_with_files(); // a disk that may only be read, also by root
    assert_int_equal(compile_right(gpu), 0);
    kmla_gpu_close(gpu);
    fake->nvrtc_major = 13;
    gpu = open_with_files();
    assert_int_equal(compile_right(gpu), 1);
    assert_int_equal(compile_right(gpu), 1);
    kmla_gpu_close(gpu);
    assert_int_equal(umount(directory), 0);
}

static int wants_entry; // in the read-only directory

// As a user who may not write there.
static int compile_read_only(void) {
    kmla_gpu* gpu;
    int compiles;
    if (geteuid() == 0 && setuid(12345) != 0) {
        return 0;
    }
    gpu = open_with_files();
    compiles = compile_right(gpu);
    compile_right(gpu);
    kmla_gpu_close(gpu);
    return compiles == !wants_entry && count_files(".tmp", NULL, 0) == 0;
}

static void test_read_only_directory(void** state) {
    kmla_gpu* gpu = open_with_files();
    char path[256];
    (void)state;
    assert_int_equal(compile_right(gpu), 1);
    kmla_gpu_close(gpu);
    entry_path(path, sizeof path);
    if (geteuid() == 0) {
        assert_int_equal(chown(path, 12345, 12345), 0);
        assert_int_equal(chown(directory, 12345, 12345), 0);
    }
    assert_int_equal(chmod(directory, 0500), 0);
    wants_entry = 1;
    assert_true(in_child(compile_read_only));
    assert_int_equal(chmod(path, 0), 0); // an entry that may not be read
    wants_entry = 0;
    assert_true(in_child(compile_read_only));
    if (geteuid() == 0) { // root's, for all to read: the image of a system
        assert_int_equal(chown(directory, 0, 0), 0);
        assert_int_equal(chmod(directory, 0755), 0);
        assert_int_equal(chmod(path, 0444), 0);
        wants_entry = 1;
        assert_true(in_child(compile_read_only));
    }
}

// =============================================================================
// Many at once
// =============================================================================

enum { MANY = 16 };

// Starts MANY children that wait for each other, then compile. Returns how often NVRTC was asked.
static int compile_at_once(void) {
    int start[2], report[2], i, compiles = 0;
    pid_t children[MANY];
    char byte;
    assert_int_equal(pipe(start), 0);
    assert_int_equal(pipe(report), 0);
    for (i = 0; i < MANY; ++i) {
        children[i] = fork();
        assert_true(children[i] >= 0);
        if (children[i] == 0) {
            kmla_gpu* gpu;
            alarm(20);
            close(start[1]);
            gpu = open_with_files();
            (void)!read(start[0], &byte, 1); // until the parent closes its end
            byte = (char)compile_right(gpu);
            kmla_gpu_close(gpu);
            _exit(write(report[1], &byte, 1) != 1);
        }
    }
    close(start[0]);
    close(start[1]);
    for (i = 0; i < MANY; ++i) {
        int status;
        assert_int_equal(waitpid(children[i], &status, 0), children[i]);
        assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
        assert_int_equal(read(report[0], &byte, 1), 1);
        compiles += byte;
    }
    close(report[0]);
    close(report[1]);
    return compiles;
}

static void test_16_cold_processes(void** state) {
    int round, most = 0;
    (void)state;
    fake->cubin_bytes = 1 << 20;
    for (round = 0; round < 3; ++round) {
        int compiles = compile_at_once();
        most = compiles > most ? compiles : most;
        assert_int_equal(count_files(".kmla", NULL, 0), 1);
        assert_int_equal(count_files(".tmp", NULL, 0), 0);
        assert_int_equal(compile_at_once(), 0); // warm
        remove_all(directory);
    }
    print_message("of 16 processes at most %d compiled\n", most);
    assert_in_range(most, 2, MANY); // they did meet
}

static void* compile_on_thread(void* data) {
    kmla_gpu* gpu = (kmla_gpu*)data;
    kmla_image image;
    if (kmla_gpu_compile(gpu, &plan, &device, NULL, &image, NULL) != KMLA_OK) {
        return NULL;
    }
    if (!is_right(&image)) {
        gpu = NULL;
    }
    kmla_image_free(&image);
    return gpu;
}

// Threads of one process, half of them on one object: their temporary names differ too.
static void test_threads(void** state) {
    pthread_t threads[MANY];
    kmla_gpu* gpus[2];
    int round, i;
    (void)state;
    fake->cubin_bytes = 1 << 20;
    for (round = 0; round < 3; ++round) {
        gpus[0] = open_with_files();
        gpus[1] = open_with_files();
        for (i = 0; i < MANY; ++i) {
            assert_int_equal(pthread_create(&threads[i], NULL, compile_on_thread, gpus[i % 2]), 0);
        }
        for (i = 0; i < MANY; ++i) {
            void* result;
            pthread_join(threads[i], &result);
            assert_ptr_equal(result, gpus[i % 2]);
        }
        assert_int_equal(compile_right(gpus[0]), 0);
        assert_int_equal(count_files(".tmp", NULL, 0), 0);
        kmla_gpu_close(gpus[0]);
        kmla_gpu_close(gpus[1]);
        remove_all(directory);
    }
}

// With the machine's NVRTC, if it has one.
static void test_real_nvrtc(void** state) {
    kmla_gpu_desc desc = {0};
    kmla_image images[2];
    int run;
    (void)state;
    desc.without_cuda = 1;
    assert_int_equal(kmla_cache_files(directory, &desc.cache, &error), KMLA_OK);
    for (run = 0; run < 2; ++run) {
        kmla_gpu* gpu;
        if (kmla_gpu_open(&desc, &gpu, &error) != KMLA_OK) {
            print_message("no NVRTC here: %s\n", error.message);
            skip();
        }
        assert_int_equal(kmla_gpu_compile(gpu, NULL, &device, NULL, &images[run], &error), KMLA_OK);
        kmla_gpu_close(gpu);
        assert_int_equal(count_files(".kmla", NULL, 0), 1);
    }
    assert_int_equal(images[0].bytes, images[1].bytes);
    assert_memory_equal(images[0].data, images[1].data, images[0].bytes);
    kmla_image_free(&images[0]);
    kmla_image_free(&images[1]);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(int count, char** words) {
    const struct CMUnitTest tests[] = {
        TEST(test_asked_and_told),
        TEST(test_both_functions_or_none),
        TEST(test_prepare_uses_it),
        TEST(test_the_driver_refuses),
        TEST(test_lies),
        TEST(test_key),
        TEST(test_keys_of_plans),
        TEST(test_key_is_the_same_across_runs),
        TEST(test_files),
        TEST(test_no_directory),
        TEST(test_bad_directories),
        TEST(test_every_length),
        TEST(test_every_flipped_byte),
        TEST(test_left_over),
        TEST(test_no_file),
        TEST(test_every_file_call),
        TEST(test_short_writes),
        TEST(test_killed_at_every_call),
        TEST(test_killed_at_any_moment),
        TEST(test_file_limit),
        TEST(test_full_disk),
        TEST(test_read_only_directory),
        TEST(test_16_cold_processes),
        TEST(test_threads),
        TEST(test_real_nvrtc),
    };
    program = words[0];
    if (count > 1 && strcmp(words[1], "--key") == 0) {
        return print_key();
    }
    return cmocka_run_group_tests_name("the cache of images", tests, NULL, NULL);
}
