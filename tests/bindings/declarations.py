#!/usr/bin/env python3
"""What the public part of kimi_mla.h declares, for the bindings to be held against.

    declarations.py layout HEADER   a C program that prints every struct's and field's size and
                                    offset, and every constant's value
    declarations.py types HEADER    every field's type and function's signature, in Rust's words

Nothing is listed here: a new struct, field, constant or function is found in the header.
"""

import re
import sys

END = "// End of header"
FUNCTION = "function pointer"
RUST_NAMES = {FUNCTION: FUNCTION, "void": "c_void", "char": "c_char", "float": "f32",
              "size_t": "usize", "kmla_status": "i32"}
RUST_NAMES.update({f"{sign}int{bits}_t": f"{sign or 'i'}{bits}"
                   for sign in ("", "u") for bits in (8, 16, 32, 64)})


def public_part(path):
    text = open(path).read()
    text = text[text.index("#ifndef KIMI_MLA_H"):text.index(END)]
    return re.sub(r"//[^\n]*", "", text)


def structs(text):
    """{struct: [(field, type as C writes it)]}, without the opaque ones."""
    found = {}
    for name, body in re.findall(r"typedef struct (\w+) \{(.*?)\n\} \1;", text, re.S):
        fields = []
        for line in filter(None, (line.strip() for line in body.split(";"))):
            pointer = re.search(r"\(\*(\w+)\)\(", line)
            plain = re.fullmatch(r"([\w\s*]+?)\s*\b(\w+)(\[\w+\])?", line)
            if not pointer and not plain:
                raise ValueError(f"{name}: not understood: {line}")
            fields.append((pointer[1], FUNCTION) if pointer else
                          (plain[2], plain[1] + (plain[3] or "")))
        found[name] = fields
    return found


def constants(text):
    """Names of whole numbers: macros and members of enums."""
    names = re.findall(r"^#define (KMLA_\w+) (?=[\d(])", text, re.M)
    for body in re.findall(r"^enum \{([^#}]*)\}", text, re.M):
        names += re.findall(r"(KMLA_\w+)\s*=", body)
    names += re.findall(r"^ *X\((KMLA_\w+), \d+", text, re.M)
    return names


def functions(text):
    """{function: (result, [parameter's type])}, types as C writes them."""
    found = {}
    for result, name, parameters in re.findall(
            r"^KMLA_API ([\w\s*]*?)\s*\b(kmla_\w+)\(([^;{]*)\);", text, re.M):
        types = [re.sub(r"\s*\w+$", "", " ".join(p.split())) for p in parameters.split(",")]
        found[name] = (result, types)
    return found


def rust_type(c_type):
    array = re.fullmatch(r"(.*)\[(\w+)\]", c_type)
    if array:
        return f"[{rust_type(array[1])}; {array[2]}]"
    base, *pointers = re.split(r"\*", " ".join(c_type.split()))
    rust = base.removeprefix("const ").strip()
    rust = RUST_NAMES.get(rust, rust)
    for before in [base, *pointers][:-1]:  # each * points to what was read, const or not
        rust = f"*{'const' if 'const' in before.split() else 'mut'} {rust}"
    return rust


def layout_program(path):
    text = public_part(path)
    lines = ["#define KIMI_MLA_IMPLEMENTATION", "#define KIMI_MLA_NO_NVRTC",
             f'#include "{path}"', "#include <stdio.h>", "int main(void) {"]
    for struct, fields in structs(text).items():
        lines.append(f"    struct align_{struct} {{ char before; {struct} it; }};")
        lines.append(f'    printf("struct {struct} %d %d\\n", (int)sizeof({struct}), '
                     f"(int)offsetof(struct align_{struct}, it));")
        for field, _ in fields:
            lines.append(f'    printf("field {struct}.{field} %d %d\\n", (int)offsetof({struct}, '
                         f"{field}), (int)sizeof((({struct}*)0)->{field}));")
    for name in constants(text):
        lines.append(f'    printf("constant {name} %lld\\n", (long long){name});')
    return "\n".join(lines + ["    return 0;", "}"])


def type_lines(path):
    text = public_part(path)
    for struct, fields in structs(text).items():
        for field, c_type in fields:
            yield f"field {struct}.{field} {rust_type(c_type)}"
    for name, (result, types) in functions(text).items():
        returned = "" if result == "void" else f" -> {rust_type(result)}"
        yield f"function {name}({', '.join(map(rust_type, types))}){returned}"


if __name__ == "__main__":
    what, header = sys.argv[1:]
    print(layout_program(header) if what == "layout" else "\n".join(type_lines(header)))
