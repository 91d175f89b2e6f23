#!/usr/bin/env python3
"""Compiles the header with other compilers, for other machines and by other rules, runs the host
tests there, and prints a table of what was compiled and executed.

    tests/portability/run.py [--only SUBSTRING] [--no-install] [--list]

What a toolchain lacks is installed on Debian as root. What cannot be had is named as not run. Exit
code 1 if anything that ran failed, or if nothing ran.
"""

import argparse
import dataclasses
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
TESTS = HERE.parent
BUILD = TESTS / "build" / "portability"
HEADER = TESTS.parent / "kimi_mla.h"
WARNINGS = ["-Wall", "-Wextra", "-pedantic", "-Werror"]
TIMEOUT_S = 900

# Strict ones and GNU's; which of the newest a compiler knows is found out.
C_DIALECTS = "c99 gnu11 c17 c2x".split()
CXX_DIALECTS = "c++11 gnu++17 c++20 c++2b".split()

# Host tests that take minutes where arithmetic is emulated.
LONG_TESTS = """accuracy_of_every_format accuracy_of_a_long_row head_counts length_rules
    ht_02_padding_heads_change_no_bit ht_03_few_heads_and_many_requests
    sk_03_late_maximum_rescales_what_came_before sk_06_neighbours_change_no_bit""".split()

POSIX_HEADERS = r"<(dlfcn|unistd|sys/wait|sys/resource|link|dirent)\.h>"
NO_DRIVER = "CUDA has no driver there"

# Starts its own program, which an emulated machine cannot.
SELF_STARTING = ["test_key_is_the_same_across_runs"]

# Tests of the names that libraries have on Linux; test_windows.c has those of Windows.
LINUX_NAMES = "test_missing_libraries test_nvrtc_names_are_listed".split()


@dataclasses.dataclass
class Toolchain:
    name: str
    machine: str
    c: str
    cxx: str = ""  # none: a C compiler only
    packages: str = ""  # Debian's
    flags: str = ""
    runner: str = ""  # what executes its programs; none: this machine
    runner_packages: str = ""  # what the runner is in, where compiling can do without
    executes: bool = True
    strict: bool = True  # knows the warnings
    windows: bool = False
    no_fakes: str = ""  # why launches against fake libraries are not tried
    skipped: list = dataclasses.field(default_factory=list)  # tests


def versions(family):
    """The versions of gcc or clang that are installed or that Debian's packages offer."""
    names = subprocess.run(["apt-cache", "pkgnames", f"{family}-"], capture_output=True,
                           text=True).stdout.split() if shutil.which("apt-cache") else []
    for folder in os.environ["PATH"].split(":"):
        names += [path.name for path in pathlib.Path(folder).glob(f"{family}-*")]
    found = {int(m[1]) for m in (re.fullmatch(rf"{family}-(\d+)", name) for name in names) if m}
    return sorted(found)


def native(family, version):
    cxx = {"gcc": "g++", "clang": "clang++"}[family]
    packages = f"gcc-{version} g++-{version}" if family == "gcc" else f"clang-{version} g++"
    return Toolchain(f"{family} {version}", "x86-64", f"{family}-{version}", f"{cxx}-{version}",
                     packages)


def toolchains():
    gccs, clangs = versions("gcc") or [0], versions("clang") or [0]
    new_gcc, new_clang = gccs[-1], clangs[-1]
    multilib = f"gcc-{new_gcc}-multilib g++-{new_gcc}-multilib"
    no_multiarch = "-idirafter /usr/include/x86_64-linux-gnu"  # asm/, which both share
    all_of = [native("gcc", v) for v in dict.fromkeys([gccs[0], new_gcc])]
    all_of += [native("clang", v) for v in dict.fromkeys([clangs[0], new_clang])]
    all_of += [
        Toolchain(f"gcc {new_gcc} -m32", "i386, SSE", f"gcc-{new_gcc}", f"g++-{new_gcc}", multilib,
                  f"-m32 -msse2 -mfpmath=sse {no_multiarch}", no_fakes=NO_DRIVER),
        Toolchain(f"gcc {new_gcc} -m32", "i386, x87", f"gcc-{new_gcc}", f"g++-{new_gcc}", multilib,
                  f"-m32 -mfpmath=387 {no_multiarch}", no_fakes=NO_DRIVER, skipped=LONG_TESTS),
        Toolchain(f"clang {new_clang} -m32", "i386, SSE", f"clang-{new_clang}",
                  f"clang++-{new_clang}", f"clang-{new_clang} {multilib}",
                  f"-m32 -msse2 {no_multiarch}", no_fakes=NO_DRIVER),
        Toolchain("tcc", "x86-64", "tcc", packages="tcc libc6-dev", strict=False,
                  no_fakes="tcc has no __atomic functions", skipped=LONG_TESTS),
        Toolchain("musl-gcc", "x86-64, musl", "musl-gcc", packages="musl-tools gcc"),
    ]
    for machine, target, package, qemu, cuda in [
            ("aarch64", "aarch64-linux-gnu", "aarch64-linux-gnu arm64", "aarch64", True),
            ("s390x, big-endian", "s390x-linux-gnu", "s390x-linux-gnu s390x", "s390x",
             False),
            ("powerpc, 32-bit big-endian", "powerpc-linux-gnu", "powerpc-linux-gnu powerpc", "ppc",
             False)]:
        compiler, libc = package.split()
        all_of.append(Toolchain(
            f"{target}-gcc", machine, f"{target}-gcc", f"{target}-g++",
            f"gcc-{compiler} g++-{compiler} libc6-dev-{libc}-cross qemu-user-static", "",
            f"qemu-{qemu}-static -L /usr/{target}", no_fakes="" if cuda else NO_DRIVER,
            skipped=LONG_TESTS + SELF_STARTING))
    # On i386, libraries export __stdcall functions under their plain names, as nvcuda.dll does.
    for machine, prefix, package, flags, runner, wine in [
            ("Windows, x86-64", "x86_64-w64-mingw32", "x86-64", "", "wine64", "wine64"),
            ("Windows, i386, SSE", "i686-w64-mingw32", "i686",
             "-msse2 -mfpmath=sse -Wl,--kill-at", "wine", "wine32:i386"),
            ("Windows, i386, x87", "i686-w64-mingw32", "i686", "", "", "")]:
        all_of.append(Toolchain(
            f"mingw-w64 {package}", machine, f"{prefix}-gcc", f"{prefix}-g++",
            f"gcc-mingw-w64-{package}-win32 g++-mingw-w64-{package}-win32",
            f"-static -Wl,--disable-stdcall-fixup {flags}", runner, runner_packages=wine,
            executes=bool(runner), windows=True, no_fakes="" if runner else NO_DRIVER,
            skipped=LINUX_NAMES))
    return all_of


# ---- running

class Report:
    def __init__(self):
        self.passed = self.failed = 0
        self.not_run = []

    def leave_out(self, what, why):
        self.not_run.append(f"{what}: {why}")

    def run(self, what, command, environment=None, folder=TESTS):
        """Runs a command that has to succeed; None if it does not."""
        try:
            done = subprocess.run([str(word) for word in command], cwd=folder, text=True,
                                  errors="replace", timeout=TIMEOUT_S, stdin=subprocess.DEVNULL,
                                  env={**os.environ, **(environment or {})},
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            output, code = done.stdout, done.returncode
        except subprocess.TimeoutExpired:
            output, code = f"no end after {TIMEOUT_S} s", 1
        if code == 0:
            self.passed += 1
            return output
        self.failed += 1
        print(f"FAILED: {what}\n    {' '.join(map(str, command))}\n{output[-3000:]}", flush=True)
        return None


def installed(packages):
    """Installs what is missing of packages, as far as this machine lets it."""
    subprocess.run([TESTS / "install.sh", "packages", *packages.split()],
                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)


def program(name):
    """The path of a program. Debian's wine64 and 32-bit wine lie in no PATH."""
    return shutil.which(name) or shutil.which(name, path="/usr/lib/wine:/usr/lib/wine-stable")


def modes():
    """The header's modes and their macros, as the Makefile has them."""
    lines = dict(re.findall(r"^DEFINES_(\w+) :=(.*)$", (TESTS / "Makefile").read_text(), re.M))
    return {mode: re.sub(r"\$\(DEFINES_(\w+)\)", lambda of: lines[of[1]], defines).split()
            for mode, defines in lines.items()}


def flags_of(toolchain):
    return toolchain.flags.split() + (WARNINGS if toolchain.strict else ["-Wall", "-Werror"])


def environment_of(toolchain):
    environment = {"SKIP_TESTS": " ".join(toolchain.skipped)}
    if toolchain.windows:  # one of its own for each wine
        environment |= {"WINEPREFIX": str(BUILD / toolchain.runner), "WINEDEBUG": "-all",
                        "WINEARCH": "win64" if toolchain.runner == "wine64" else "win32"}
    return environment


# ---- a toolchain: every dialect and mode, two files linked, the host tests

def knows(compiler, flags, dialect):
    """Whether an empty file compiles, by which newer dialects are found out."""
    return subprocess.run([compiler, *flags, f"-std={dialect}", "-fsyntax-only", "-x",
                           "c++" if "++" in dialect else "c", "-"], input="",
                          capture_output=True, text=True).returncode == 0


def compile_all(report, toolchain):
    """How many dialects times modes of the header compile."""
    count = 0
    flags = toolchain.flags.split()
    check = ["-fsyntax-only"] if toolchain.strict else ["-c", "-o", BUILD / "scratch.o"]
    for compiler, language, dialects in [(toolchain.c, "c", C_DIALECTS),
                                         (toolchain.cxx, "c++", CXX_DIALECTS)]:
        if not compiler:
            continue
        for dialect in dialects:
            if toolchain.strict and not knows(compiler, flags, dialect):
                continue
            for mode, defines in modes().items():
                what = f"{toolchain.name} ({toolchain.machine}) {dialect} {mode}"
                select = ["-x", language] if toolchain.strict else []
                count += report.run(what, [
                    compiler, *check, *select, f"-std={dialect}", *flags_of(toolchain), *defines,
                    "header/include.c"]) is not None
    return count


def execute(report, toolchain, what, file, folder):
    """Runs a program of the toolchain; its output, or None."""
    runner = toolchain.runner.split()
    if runner:
        runner[0] = program(runner[0])
    return report.run(what, [*runner, f"./{file.name}"], environment_of(toolchain), folder)


def libraries(toolchain):
    return ["-lm", "-lpthread"] + ([] if toolchain.windows else ["-ldl"])


def link_all(report, toolchain, folder):
    """Two files linked, in C and in C++, and run."""
    count = 0
    for compiler, dialect in [(toolchain.c, "c99"), (toolchain.cxx, "c++11")]:
        if not compiler:
            continue
        what = f"{toolchain.name} ({toolchain.machine}) two files, {dialect}"
        file = folder / f"two_{dialect}.exe"
        select = ["-x", "c++"] if "++" in dialect else []
        if report.run(what, [compiler, f"-std={dialect}", "-O1", *flags_of(toolchain), *select,
                             "header/main.c", "header/other.c", "-o", file,
                             *libraries(toolchain)]) is None:
            continue
        count += 1
        if toolchain.executes:
            execute(report, toolchain, what, file, folder)
    return count


def unit_files(toolchain):
    """The host tests that this machine can be asked for, and why it cannot be for the others."""
    for file in sorted(TESTS.glob("test_*.c")) + [HERE / "test_windows.c"]:
        text = file.read_text()
        texts = [text] + [(TESTS / name).read_text()
                          for name in re.findall(r'#include "(\w+\.h)"', text)
                          if (TESTS / name).exists()]
        if file.name == "test_windows.c" and not toolchain.windows:
            continue
        if toolchain.windows and any(re.search(POSIX_HEADERS, part) for part in texts):
            yield file, "made for POSIX"
        elif toolchain.no_fakes and any("fake_libraries.h" in part for part in texts):
            yield file, toolchain.no_fakes
        else:
            yield file, None


def test_all(report, toolchain, folder):
    """The host tests by a cmocka of one header; passed and skipped tests of all files."""
    passed = skipped = 0
    compiler = [toolchain.c, "-std=c99", "-O2", *flags_of(toolchain), "-I..",
                "-I", HERE / "standin"]
    if toolchain.windows:
        compiler += ["-I", HERE / "windows", "-include", HERE / "windows" / "dlfcn.h"]
    if not toolchain.no_fakes:
        (folder / "build").mkdir(exist_ok=True)
        report.run(f"{toolchain.name} fake libraries",
                   [toolchain.c, "-std=c99", *toolchain.flags.split(), "-fPIC", "-shared",
                    "fake_libraries.c", "-o", folder / "build" / "libfake.so",
                    *libraries(toolchain)])
    for file, why_not in unit_files(toolchain):
        what = f"{toolchain.name} ({toolchain.machine}) {file.name}"
        if why_not:
            report.leave_out(what, why_not)
            continue
        out = folder / (file.stem + ".exe")
        if report.run(what, [*compiler, file, "-o", out, *libraries(toolchain)]) is None:
            continue
        if not toolchain.executes:
            report.leave_out(what, "compiled, not executed")
            continue
        output = execute(report, toolchain, what, out, folder) or ""
        for counts in re.findall(r"^(\d+) passed, 0 failed, (\d+) skipped$", output, re.M):
            passed += int(counts[0])
            skipped += int(counts[1])
    return passed, skipped


def run_toolchain(report, toolchain, install):
    """One row of the table, None if the toolchain cannot be had."""
    if install and toolchain.packages:
        installed(toolchain.packages)
    if install and toolchain.runner_packages:
        installed(toolchain.runner_packages)
    for name in [toolchain.c, toolchain.cxx]:
        if name and not shutil.which(name):
            report.leave_out(f"{toolchain.name} ({toolchain.machine})",
                             f"no {name}; Debian has it in {toolchain.packages or 'no package'}")
            return None
    if toolchain.runner and not program(toolchain.runner.split()[0]):
        report.leave_out(f"{toolchain.name} ({toolchain.machine}), execution",
                         f"no {toolchain.runner.split()[0]}; Debian has it in "
                         f"{toolchain.runner_packages or toolchain.packages}")
        toolchain.executes = False
    name = re.sub(r"[^a-z0-9]+", "_", f"{toolchain.name} {toolchain.machine}".lower())
    folder = BUILD / name
    folder.mkdir(parents=True, exist_ok=True)
    failed = report.failed
    compiled = compile_all(report, toolchain)
    linked = link_all(report, toolchain, folder)
    passed, skipped = test_all(report, toolchain, folder)
    where = toolchain.runner.split()[0] if toolchain.runner else "here"
    return [toolchain.name, toolchain.machine, str(compiled), str(linked),
            where if toolchain.executes else "not executed", str(passed), str(skipped),
            "FAILED" if report.failed > failed else "fine"]


# ---- Microsoft's compiler: clang in its place, a C library of stubs, and its rules

# What one of them would break, each in a file that must be refused.
RULES = [
    ("no array of variable length", "c11", "int f(int n) { int a[n]; a[0] = n; return a[0]; }"),
    ("no designated initialiser", "c++17", "struct s { int a; } x = {.a = 1};"),
    ("no compound literal", "c++17", "struct s { int a; }; int f() { return (s){1}.a; }"),
    ("no string past 4,095 bytes", "c99", f'const char* f(void) {{ return "{"x" * 4096}"; }}'),
    ("no statement as expression", "c11", "int f(int a) { return ({ int b = a; b; }); }"),
    ("no structure without members", "c11", "struct s {}; struct s x;"),
    ("no array of length 0", "c11", "struct s { int n; int a[0]; };"),
    ("no arithmetic on void*", "c11", "void* f(void* p) { return p + 1; }"),
    ("no range of cases", "c11", "int f(int a) { switch (a) { case 1 ... 3: a = 0; } return a; }"),
    ("memory is cast", "c++14", "#include <stdlib.h>\nint* f() { return malloc(4); }"),
    ("no name of GNU's", "c11", "__attribute__((noinline)) int f(void) { return 1; }"),
    ("no built-in function", "c11", "int f(int a) { return __builtin_popcount(a); }"),
    ("nothing of POSIX", "c11", "#include <string.h>\nssize_t f(char* s) { return strlen(s); }"),
    ("no unguarded include", "c11", "#include <dlfcn.h>\n"),
]
MICROSOFT_DIALECTS = ["c11", "c17", "c++14", "c++17", "c++20"]
GNU_WORDS = r"__attribute__|__extension__|__typeof|__asm|__builtin_(?!va_)"


def microsoft(report, install):
    """One row of the table."""
    version = (versions("clang") or [0])[-1]
    clang = f"clang-{version}"
    if install:
        installed(clang)
    if not shutil.which(clang):
        report.leave_out("Microsoft's rules", f"no {clang}")
        return None
    failed, compiled = report.failed, 0

    def command(target, dialect, *more):
        return [clang, f"--target={target}-pc-windows-msvc", "-fms-compatibility",
                "-fms-compatibility-version=19.20", "-nostdlibinc", "-isystem", HERE / "msvc",
                "-x", "c++" if "++" in dialect else "c", f"-std={dialect}", *WARNINGS, "-Wvla",
                "-Woverlength-strings", *more]

    def gnu_words(target, dialect, *more):
        """Lines that Microsoft's compiler would see GNU's words in."""
        text = subprocess.run([*map(str, command(target, dialect, "-E", "-U__clang__", *more))],
                              cwd=TESTS, capture_output=True, text=True).stdout
        return [line for line in text.splitlines()
                if re.search(GNU_WORDS, re.sub(r'"([^"\\]|\\.)*"', "", line)) and
                "__gnuc_va_list" not in line and "__builtin_va_list" not in line]

    for target in ["x86_64", "aarch64", "i686"]:
        for dialect in MICROSOFT_DIALECTS:
            for mode, defines in modes().items():
                what = f"Microsoft's rules, {target} {dialect} {mode}"
                compiled += report.run(what, command(target, dialect, "-fsyntax-only", *defines,
                                                     "header/include.c")) is not None
                if gnu_words(target, dialect, *defines, "header/include.c"):
                    report.failed += 1
                    print(f"FAILED: {what}: a word of GNU's")
    refused = 0
    BUILD.mkdir(parents=True, exist_ok=True)
    for rule, dialect, text in RULES:
        file = BUILD / "rule.c"
        file.write_text(text)
        broken = subprocess.run([*map(str, command("x86_64", dialect, "-fsyntax-only", file))],
                                capture_output=True).returncode != 0
        if broken or gnu_words("x86_64", dialect, file):
            refused += 1
            report.passed += 1
        else:
            report.failed += 1
            print(f"FAILED: the rule '{rule}' is not watched")
    print(f"Microsoft's rules: {refused} of {len(RULES)} broken ones are refused")
    return [f"clang {version} as Microsoft's", "Windows, 3 targets", str(compiled), "0",
            "not executed", "0", "0", "FAILED" if report.failed > failed else "fine"]


# ---- how long a compiler reads

def median_seconds(command, text):
    times = []
    for _ in range(7):
        begin = time.perf_counter()
        subprocess.run([*command, "-"], input=text, text=True, capture_output=True, check=True)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def parse_times():
    """Seconds to read the declarations, all, and what all includes; reported, no test."""
    include = f'#include "{HEADER}"\n'
    whole = "#define KIMI_MLA_IMPLEMENTATION\n" + include
    system = "".join(f"#include <{name}.h>\n" for name in "float math stdio stdlib string".split())
    for compiler, language in [("gcc", "c"), ("g++", "c++"), ("clang", "c"), ("clang++", "c++")]:
        if shutil.which(compiler):
            seconds = [median_seconds([compiler, "-fsyntax-only", "-x", language], text)
                       for text in [include, whole, system]]
            print(f"reading time, {compiler}: {seconds[0]:.3f} s declarations, {seconds[1]:.3f} s "
                  f"with the implementation; {seconds[2]:.3f} s are the C library's headers")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", default="", help="toolchains whose name or machine has this")
    parser.add_argument("--no-install", action="store_true")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    chosen = [t for t in toolchains() if options.only in f"{t.name} {t.machine}"]
    if options.list:
        print("\n".join(f"{t.name} ({t.machine}): {t.packages}" for t in chosen))
        return 0
    report = Report()
    rows = [["toolchain", "machine", "compiles", "links", "executed", "tests", "skipped", ""]]
    for toolchain in chosen:
        print(f"-- {toolchain.name} ({toolchain.machine})", flush=True)
        rows.append(run_toolchain(report, toolchain, not options.no_install))
    if options.only in "Microsoft":
        rows.append(microsoft(report, not options.no_install))
    parse_times()
    rows = [row for row in rows if row]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    print()
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    print()
    for line in report.not_run:
        print(f"not run: {line}")
    print(f"{report.passed} passed, {report.failed} failed, {len(report.not_run)} skipped")
    return 1 if report.failed or not report.passed else 0


if __name__ == "__main__":
    sys.exit(main())
