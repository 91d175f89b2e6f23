// Puts the device source into the header as string literals, between the two markers.
//
//     embed HEADER DEVICE_DIR            rewrites the header if the device source has changed
//     embed HEADER DEVICE_DIR --check    exit code 1 if the header is not in step; writes nothing
//
// A part is a run of whole lines of one file, short enough for every compiler's string limit. It
// keeps the file's name and its first line, so that NVRTC's messages name them. The hash of all
// parts' text (FNV-1a) stays where KIMI_MLA_NO_NVRTC leaves them out: images carry it.

#include <inttypes.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// In the order in which the device compiler reads them.
static const char* const device_files[] = {
    "instructions.cuh", "records.cuh", "tile.cuh",    "reader.cuh",
    "hopper.cuh",       "merge.cuh",   "combine.cuh", "writers.cuh",
};

#define PART_BYTES 3999 // C99 promises 4,095 and MSVC 16,380: "under 4,000" is safe everywhere
#define BEGIN_MARKER "// >>device source begin\n"
#define END_MARKER "// >>device source end\n"

static void fail(const char* format, ...) {
    va_list values;
    va_start(values, format);
    fputs("embed: ", stderr);
    vfprintf(stderr, format, values);
    fputc('\n', stderr);
    va_end(values);
    exit(1);
}

// ---- text that grows

typedef struct text {
    char* data; // always ends in 0
    size_t length, capacity;
} text;

static void append(text* to, const char* data, size_t length) {
    if (to->length + length + 1 > to->capacity) {
        to->capacity = 2 * (to->length + length + 1);
        to->data = (char*)realloc(to->data, to->capacity);
        if (!to->data) {
            fail("out of memory");
        }
    }
    memcpy(to->data + to->length, data, length);
    to->length += length;
    to->data[to->length] = 0;
}

static void append_string(text* to, const char* string) { append(to, string, strlen(string)); }

static int read_file(const char* path, text* content) {
    char block[4096];
    size_t count;
    FILE* file = fopen(path, "rb");
    if (!file) {
        return 0;
    }
    append(content, "", 0);
    while ((count = fread(block, 1, sizeof block, file)) > 0) {
        append(content, block, count);
    }
    if (ferror(file)) {
        fail("cannot read %s", path);
    }
    fclose(file);
    return 1;
}

// ---- device source to C

// One source line, its newline included, as one string literal on a line of its own.
static void append_literal(text* to, const char* line, size_t length) {
    size_t i;
    append_string(to, "     \"");
    for (i = 0; i < length; ++i) {
        char c = line[i];
        if (c == '\n') {
            append_string(to, "\\n");
        } else if (c == '\t') {
            append_string(to, "\\t");
        } else if (c == '"' || c == '\\' || c == '?') { // \? because ??/ would be a trigraph
            append_string(to, "\\");
            append(to, &c, 1);
        } else {
            append(to, &c, 1);
        }
    }
    append_string(to, "\"\n");
}

static void check_source(const char* path, const text* source) {
    size_t i;
    for (i = 0; i < source->length; ++i) {
        unsigned char c = (unsigned char)source->data[i];
        if (c != '\n' && c != '\t' && (c < 32 || c > 126)) {
            fail("%s: byte %lu is 0x%02X; only printable ASCII, tab and newline may occur", path,
                 (unsigned long)i, c);
        }
    }
    if (source->length == 0 || source->data[source->length - 1] != '\n') {
        fail("%s: the last line must end in a newline", path);
    }
}

// Appends a file as entries {name, first line, text} of the table.
static void append_parts(text* to, const char* name, const char* path, const text* source) {
    const char* line = source->data;
    size_t part_bytes = 0;
    long line_number = 1;
    check_source(path, source);
    for (; *line; ++line_number) {
        size_t length = (size_t)(strchr(line, '\n') - line) + 1;
        if (length > PART_BYTES) {
            fail("%s:%ld: a line of %lu bytes does not fit a part", path, line_number,
                 (unsigned long)length);
        }
        if (line_number == 1 || part_bytes + length > PART_BYTES) {
            char head[256];
            snprintf(head, sizeof head, "%s    {\"%s\", %ld,\n", line_number == 1 ? "" : "    },\n",
                     name, line_number);
            append_string(to, head);
            part_bytes = 0;
        }
        append_literal(to, line, length);
        part_bytes += length;
        line += length;
    }
    append_string(to, "    },\n");
}

static uint64_t hash_text(uint64_t hash, const text* source) {
    size_t i;
    for (i = 0; i < source->length; ++i) {
        hash = (hash ^ (unsigned char)source->data[i]) * 0x100000001B3ull;
    }
    return hash;
}

static void append_table(text* to, const char* device_dir) {
    size_t i;
    uint64_t hash = 0xCBF29CE484222325ull;
    char define[80];
    append_string(to, "// clang-format off\n"
                      "#ifndef KIMI_MLA_NO_NVRTC\n"
                      "static const kmla_i_device_part kmla_i_device_parts[] = {\n");
    for (i = 0; i < sizeof device_files / sizeof device_files[0]; ++i) {
        char path[4096];
        text source = {0};
        snprintf(path, sizeof path, "%s/%s", device_dir, device_files[i]);
        if (!read_file(path, &source)) {
            fail("cannot open %s", path);
        }
        append_parts(to, device_files[i], path, &source);
        hash = hash_text(hash, &source);
        free(source.data);
    }
    append_string(to, "};\n"
                      "#endif\n");
    snprintf(define, sizeof define, "#define KMLA_I_DEVICE_PARTS_HASH 0x%016" PRIX64 "ull\n", hash);
    append_string(to, define);
    append_string(to, "// clang-format on\n");
}

// ---- the header

static char* find_once(const char* path, char* in, const char* marker) {
    char* found = strstr(in, marker);
    if (!found || strstr(found + 1, marker)) {
        fail("%s: the line \"%.*s\" must occur once", path, (int)strlen(marker) - 1, marker);
    }
    return found;
}

static int line_of(const char* in, size_t offset) {
    int line = 1;
    size_t i;
    for (i = 0; i < offset; ++i) {
        line += in[i] == '\n';
    }
    return line;
}

int main(int argc, char** argv) {
    text header = {0}, updated = {0};
    const char *begin, *end;
    FILE* file;
    int check = argc == 4 && strcmp(argv[3], "--check") == 0;
    if (argc != 3 && !check) {
        fail("usage: embed HEADER DEVICE_DIR [--check]");
    }
    if (!read_file(argv[1], &header)) {
        fail("cannot open %s", argv[1]);
    }
    begin = find_once(argv[1], header.data, BEGIN_MARKER) + strlen(BEGIN_MARKER);
    end = find_once(argv[1], header.data, END_MARKER);
    if (end < begin) {
        fail("%s: the end marker comes before the begin marker", argv[1]);
    }
    append(&updated, header.data, (size_t)(begin - header.data));
    append_table(&updated, argv[2]);
    append_string(&updated, end);

    if (updated.length == header.length && !memcmp(updated.data, header.data, header.length)) {
        return 0;
    }
    if (check) {
        size_t same = 0;
        while (updated.data[same] == header.data[same]) {
            ++same;
        }
        fail("%s:%d differs from %s; run tools/embed", argv[1], line_of(header.data, same),
             argv[2]);
    }
    file = fopen(argv[1], "wb");
    if (!file || fwrite(updated.data, 1, updated.length, file) != updated.length || fclose(file)) {
        fail("cannot write %s", argv[1]);
    }
    return 0;
}
