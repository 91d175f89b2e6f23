// kmla - makes images of the kernels, on any machine with NVRTC; no GPU is needed.
//
//     kmla compile --arch sm_120 --kv packed --tile 16 [--reader portable|hopper] -o FILE
//     kmla compile --arch sm_120 --support -o FILE        the writers, the merge and the combine
//     kmla list                                           what can be compiled
//     kmla show FILE                                      what an image is of
//
// compile also takes --c-array NAME (FILE is then a C source with the image as an array) and
// --nvrtc PATH. --arch names the card: "sm_90", "sm_90a" and "90" are the same, and the reader
// decides about the suffix. Without --reader it is the one that a plan for such a card takes. A
// program loads an image by kmla_image_open and kmla_gpu_prepare, which refuse what does not belong
// to its header, plan or card.

#define KIMI_MLA_IMPLEMENTATION
#include "../kimi_mla.h"

#include "cards.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char* const kv_names[] = {"packed", "e4m3", "bf16"};          // by KMLA_KV_*
static const char* const reader_names[] = {"host", "portable", "hopper"};  // by KMLA_READER_*

static void fail(const char* format, ...) {
    va_list values;
    va_start(values, format);
    fputs("kmla: ", stderr);
    vfprintf(stderr, format, values);
    fputc('\n', stderr);
    va_end(values);
    exit(1);
}

// ---- what is asked for

typedef struct request {
    kmla_device device;
    int32_t kv_format, tile, reader; // reader 0: the planner's
    int support;
    const char *out, *array, *nvrtc;
} request;

static int index_of(const char* name, const char* const* names, int first, int count,
                    const char* option) {
    int i;
    for (i = first; i < count; ++i) {
        if (strcmp(name, names[i]) == 0) {
            return i;
        }
    }
    fail("%s does not know \"%s\"; see kmla list", option, name);
    return -1;
}

static kmla_device device_of(const char* name) {
    const char* digits = strncmp(name, "sm_", 3) == 0 ? name + 3 : name;
    char* end;
    long architecture = strtol(digits, &end, 10);
    const card_facts* card = card_of_architecture((int)architecture);
    if (end == digits || !card || (*end && strcmp(end, "a") != 0)) {
        fail("--arch does not know \"%s\"; see kmla list", name);
    }
    return card_device(card);
}

static request read_arguments(int argc, char** argv) {
    request asked;
    int i, kv_given = 0;
    memset(&asked, 0, sizeof asked);
    for (i = 2; i < argc; ++i) {
        const char* option = argv[i];
        const char* value;
        if (strcmp(option, "--support") == 0) {
            asked.support = 1;
            continue;
        }
        value = ++i < argc ? argv[i] : NULL;
        if (!value) {
            fail("%s: unknown, or its value is missing", option);
        } else if (strcmp(option, "--arch") == 0) {
            asked.device = device_of(value);
        } else if (strcmp(option, "--kv") == 0) {
            asked.kv_format = index_of(value, kv_names, 0, 3, option);
            kv_given = 1;
        } else if (strcmp(option, "--tile") == 0) {
            asked.tile = (int32_t)strtol(value, NULL, 10);
        } else if (strcmp(option, "--reader") == 0) {
            asked.reader = index_of(value, reader_names, 1, 3, option);
        } else if (strcmp(option, "--nvrtc") == 0) {
            asked.nvrtc = value;
        } else if (strcmp(option, "-o") == 0) {
            asked.out = value;
        } else if (strcmp(option, "--c-array") == 0) {
            asked.array = value;
        } else {
            fail("unknown option %s", option);
        }
    }
    if (asked.device.compute_major == 0 || !asked.out) {
        fail("compile needs --arch and -o");
    }
    if (asked.support ? kv_given || asked.tile || asked.reader : !kv_given || asked.tile <= 0) {
        fail("compile needs either --kv and --tile, or --support");
    }
    return asked;
}

// The tile decides; the rest of the shape changes nothing in an image.
static kmla_status plan_of(const request* asked, kmla_plan* plan, kmla_error* error) {
    kmla_shape shape;
    memset(&shape, 0, sizeof shape);
    shape.requests = 1;
    shape.heads = 64;
    shape.capacity_tokens = 16384;
    shape.kv_format = asked->kv_format;
    shape.tile = asked->tile;
    shape.reader = asked->reader;
    return kmla_plan_decode(&shape, &asked->device, plan, error);
}

// ---- files

static void write_array(FILE* file, const char* name, const kmla_image* image) {
    const unsigned char* data = (const unsigned char*)image->data;
    size_t i;
    fprintf(file,
            "// Made by kmla compile: variant %d for compute capability %d.%d.\n"
            "#include <stddef.h>\n"
            "extern const unsigned char %s[];\n"
            "extern const size_t %s_bytes;\n"
            "const size_t %s_bytes = %lu;\n"
            "#if defined(_MSC_VER)\n"
            "__declspec(align(16))\n"
            "#else\n"
            "__attribute__((aligned(16)))\n"
            "#endif\n"
            "const unsigned char %s[] = {",
            (int)image->variant, (int)image->compute_major, (int)image->compute_minor, name, name,
            name, (unsigned long)image->bytes, name);
    for (i = 0; i < image->bytes; ++i) {
        fprintf(file, "%s%u,", i % 24 ? "" : "\n", data[i]);
    }
    fprintf(file, "\n};\n");
}

static void write_image(const request* asked, const kmla_image* image) {
    FILE* file = fopen(asked->out, "wb");
    int failed;
    if (!file) {
        fail("cannot write %s", asked->out);
    }
    if (asked->array) {
        write_array(file, asked->array, image);
    } else {
        fwrite(image->data, 1, image->bytes, file);
    }
    failed = ferror(file);
    if (fclose(file) != 0 || failed) {
        remove(asked->out); // half an image is none
        fail("cannot write %s", asked->out);
    }
}

static unsigned char* read_file(const char* path, size_t* bytes) {
    size_t room = 1 << 16, count;
    unsigned char* data = NULL;
    FILE* file = fopen(path, "rb");
    if (!file) {
        fail("cannot open %s", path);
    }
    *bytes = 0;
    do {
        room *= 2;
        data = (unsigned char*)realloc(data, room);
        if (!data) {
            fail("out of memory");
        }
        count = fread(data + *bytes, 1, room - *bytes, file);
        *bytes += count;
    } while (*bytes == room);
    if (ferror(file)) {
        fail("cannot read %s", path);
    }
    fclose(file);
    return data;
}

// ---- commands

static void print_image(const kmla_image* image) {
    kmla_i_image_head head;
    kmla_error error;
    if (kmla_i_read_image(image->data, image->bytes, &head, &error) != KMLA_OK) {
        fail("%s", error.message);
    }
    printf("sm_%d%d%s, ", (int)head.compute_major, (int)head.compute_minor, head.suffix ? "a" : "");
    if (head.variant == 0) {
        printf("writers, merge, combine");
    } else {
        printf("%s reader, %s KV, tile %d, %d bytes of shared memory",
               reader_names[head.variant / 10000], kv_names[head.variant / 1000 % 10],
               (int)head.variant % 1000, (int)head.shared_bytes);
    }
    printf("; variant %d, %lu bytes of CUBIN, header version %d, source %016llx\n",
           (int)head.variant, (unsigned long)head.cubin_bytes, (int)head.version,
           (unsigned long long)head.source_hash);
}

static int compile(int argc, char** argv) {
    request asked = read_arguments(argc, argv);
    kmla_plan plan;
    kmla_gpu_desc desc;
    kmla_gpu* gpu;
    kmla_image image;
    kmla_error error;
    if (!asked.support && plan_of(&asked, &plan, &error) != KMLA_OK) {
        fail("%s", error.message);
    }
    memset(&desc, 0, sizeof desc);
    desc.without_cuda = 1;
    desc.nvrtc_path = asked.nvrtc;
    if (kmla_gpu_open(&desc, &gpu, &error) != KMLA_OK ||
        kmla_gpu_compile(gpu, asked.support ? NULL : &plan, &asked.device, NULL, &image, &error) !=
            KMLA_OK) {
        fail("%s", error.message);
    }
    write_image(&asked, &image);
    print_image(&image);
    kmla_image_free(&image);
    kmla_gpu_close(gpu);
    return 0;
}

static int show(const char* path) {
    size_t bytes;
    unsigned char* data = read_file(path, &bytes);
    kmla_image image;
    kmla_error error;
    if (kmla_image_open(data, bytes, &image, &error) != KMLA_OK) {
        fail("%s: %s", path, error.message);
    }
    print_image(&image);
    kmla_image_free(&image);
    free(data);
    return 0;
}

// The tiles that the planner takes.
static void list_tiles(request* asked) {
    const kmla_device* device = &asked->device;
    kmla_plan plan;
    int found = 0;
    for (asked->tile = 1; asked->tile <= 64; ++asked->tile) {
        if (plan_of(asked, &plan, NULL) != KMLA_OK) {
            continue;
        }
        if (!found++) {
            printf("sm_%d%d%-*s %-9s %-7s", (int)device->compute_major, (int)device->compute_minor,
                   device->compute_major < 10 ? 2 : 1,
                   asked->reader == KMLA_READER_HOPPER ? "a" : "", reader_names[asked->reader],
                   kv_names[asked->kv_format]);
        }
        printf(" %d", (int)asked->tile);
    }
    if (found) {
        printf("\n");
    }
}

static int list(void) {
    request asked;
    int i;
    memset(&asked, 0, sizeof asked);
    printf("%-7s %-9s %-7s tiles; and --support for each\n", "arch", "reader", "kv");
    for (i = 0; i < CARD_COUNT; ++i) {
        asked.device = card_device(&cards[i]);
        for (asked.reader = KMLA_READER_PORTABLE; asked.reader <= KMLA_READER_HOPPER;
             ++asked.reader) {
            for (asked.kv_format = KMLA_KV_PACKED; asked.kv_format <= KMLA_KV_BF16;
                 ++asked.kv_format) {
                list_tiles(&asked);
            }
        }
    }
    return 0;
}

int main(int argc, char** argv) {
    const char* command = argc > 1 ? argv[1] : "";
    if (strcmp(command, "compile") == 0) {
        return compile(argc, argv);
    }
    if (strcmp(command, "show") == 0 && argc == 3) {
        return show(argv[2]);
    }
    if (strcmp(command, "list") == 0 && argc == 2) {
        return list();
    }
    fail("usage: kmla compile --arch sm_NN (--kv packed|e4m3|bf16 --tile N"
         " [--reader portable|hopper] | --support) -o FILE [--c-array NAME] [--nvrtc PATH]"
         " | kmla list | kmla show FILE");
    return 1;
}
