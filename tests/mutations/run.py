#!/usr/bin/env python3
"""Puts small faults into the device source and the planner, one at a time, and says which of them
the tests catch.

    tests/mutations/run.py [--only SUBSTRING] [--jobs 2] [--list]

The faults are in faults.py. Each is applied to its own copy of the tree, in a temporary folder; the
tree itself is only read. Of the tests that should see it the quickest come first, and the first
that fails ends it. Exit code 1 if a fault survives, if its old text is not found exactly once, if
it does not compile, or if a test fails without any fault.
"""

import argparse
import concurrent.futures
import dataclasses
import pathlib
import shutil
import subprocess
import sys
import tempfile
import threading
import time

sys.dont_write_bytecode = True  # the tree stays as it is
from faults import FAULTS  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
MARKERS = ("// >>device source begin", "// >>device source end")  # of the header
TIMEOUT_S = 600  # a fault may make a kernel wait for ever
CARDS = sorted({fault.card for fault in FAULTS})


def say(line):
    print(line, flush=True)


# ---- the tree

def copy_tree(source, to):
    """What the tests are made of, without what was built from it."""
    shutil.copy(source / "kimi_mla.h", to)
    for part in ("tools", "tests"):
        shutil.copytree(source / part, to / part, ignore=shutil.ignore_patterns("build", "__*"))


def mutable_part(text, file):
    """The header's device source comes from tools/device: no fault is looked for there."""
    if file != "kimi_mla.h":
        return text
    begin, end = (text.index(marker) for marker in MARKERS)
    return text[:begin] + text[end:]


def path_of(fault, tree):
    return tree / (fault.file if fault.file == "kimi_mla.h" else f"tools/device/{fault.file}")


def occurrences(fault, tree):
    text = path_of(fault, tree).read_text()
    return mutable_part(text, fault.file).count(fault.old)


def apply(fault, tree):
    path = path_of(fault, tree)
    text = path.read_text()
    head = text.index(MARKERS[1]) if fault.file == "kimi_mla.h" else 0
    # Once in the part before or behind the device source, so a replacement by position.
    at = text.find(fault.old)
    if fault.file == "kimi_mla.h" and text.index(MARKERS[0]) < at < head:
        at = text.find(fault.old, head)
    path.write_text(text[:at] + fault.new + text[at + len(fault.old):])


# ---- tests: each builds itself in a tree, then runs

@dataclasses.dataclass
class Test:
    name: str
    build: str  # shell commands, in the tree's tests/
    run: str


PLAIN = "gcc -std=gnu99 -I.. -w"
FUZZ = "clang -std=gnu99 -O1 -w -I../.. -fsanitize=fuzzer,address,undefined " \
       "-fno-sanitize-recover=all"


def tests_of(fault, base):
    library = f"{base}/tests/emulator/build/libcuda_emulated_{fault.card}.so"
    planning = Test("test_planning", f"{PLAIN} -O0 test_planning.c -o t1 -lcmocka -lm -ldl", "./t1")
    host = Test("test_host", f"{PLAIN} -O2 test_host.c -o t2 -lcmocka -lm -ldl", "./t2")
    fuzz = Test("fuzz planning", f"cd fuzz && {FUZZ} planning.c -o t3 -lm",
                "cd fuzz && ./t3 -seed=1 -runs=300000 -max_len=128 corpus/planning")
    random = Test("random_decode", f"{PLAIN} -O1 emulator/random_decode.c -o t4 -lm -ldl",
                  f"./t4 --library {library} --cases 60")
    device = Test("device_test", f"{PLAIN} -O1 device.c -o t5 -lm -ldl -lpthread",
                  f"./t5 --library {library} --quick --only '{fault.group}'")
    records = Test("fuzz records", f"cd fuzz && {FUZZ} records.c -o t6 -lm -ldl",
                   f"cd fuzz && ./t6 --library={library} -seed=1 -runs=3000 -max_len=128 "
                   "corpus/records")
    on_host = Test("device_test --host", f"{PLAIN} -O2 device.c -o t5 -lm -ldl -lpthread",
                   "./t5 --host --quick")
    gpu_side = Test(fault.group, f"make build/libfake.so build/{fault.group} WARNINGS=",
                    f"./build/{fault.group}")
    return {"planner": [planning, fuzz, host], "host": [host, on_host], "gpu side": [gpu_side],
            "records": [records, random, device],
            "device": [device] if fault.group else [random, device]}[fault.suite]


class DoesNotCompile(Exception):
    pass


def shell(command, cwd):
    done = subprocess.run(["timeout", "-k", "5", str(TIMEOUT_S), "sh", "-c", command], cwd=cwd,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace")
    return done.returncode, done.stdout


def embed(tree, base):
    code, output = shell(f"{base}/embed kimi_mla.h tools/device", tree)
    if code != 0:
        raise DoesNotCompile(output)


def passes(test, tree):
    code, output = shell(test.build, tree / "tests")
    if code != 0:
        raise DoesNotCompile(output)
    code, output = shell(test.run, tree / "tests")
    if "KMLA_ERROR_COMPILE" in output or "NVRTC_ERROR_COMPILATION" in output:
        raise DoesNotCompile(output)
    return code == 0


# ---- without a fault: shared by all

def build_base(base):
    copy_tree(ROOT, base)
    code, output = shell(f"gcc -O1 tools/embed.c -o {base}/embed", base)
    for card in CARDS:
        if code == 0:
            code, output = shell(f"make build/libcuda_emulated_{card}.so", base / "tests/emulator")
    if code != 0:
        sys.exit(f"mutations: cannot build the tests:\n{output}")
    embed(base, base)


class Base:
    """The tree as it is. What fails there, too, has not caught a fault; it is run when a test first
    says that it has."""

    def __init__(self, tree):
        self.tree = tree
        self.lock = threading.Lock()
        self.verdicts = {}  # by command

    def passes(self, test):
        with self.lock:
            if test.run not in self.verdicts:
                self.verdicts[test.run] = passes(test, self.tree)
                if not self.verdicts[test.run]:
                    say(f"FAILS WITHOUT ANY FAULT, so it is not used: {test.name}: {test.run}")
            return self.verdicts[test.run]

    def all_pass(self):
        return all(self.verdicts.values())


# ---- one fault

def try_fault(fault, base, folder):
    """Returns "caught" or what is wrong, and a line about it."""
    begin = time.monotonic()
    tree = pathlib.Path(tempfile.mkdtemp(dir=folder))
    where = f"{fault.what} [{fault.file}]"
    try:
        copy_tree(base.tree, tree)
        apply(fault, tree)
        embed(tree, base.tree)
        for test in tests_of(fault, base.tree):
            if not passes(test, tree) and base.passes(test):
                seconds = time.monotonic() - begin
                return "caught", f"caught by {test.name} in {seconds:.0f} s: {where}"
        return "survived", f"SURVIVED: {where}"
    except DoesNotCompile as error:
        return "broken", f"DOES NOT COMPILE: {where}\n{str(error)[-1500:]}"
    finally:
        shutil.rmtree(tree, ignore_errors=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    faults = [f for f in FAULTS if options.only in f"{f.what} {f.file} {f.suite}"]
    lost = [f"{occurrences(f, ROOT)} times, not once: {f.what} [{f.file}]: {f.old!r}"
            for f in faults if occurrences(f, ROOT) != 1]
    if lost or not faults:
        say("\n".join(lost or ["mutations: no fault of that name"]))
        return 1
    if options.list:
        say("\n".join(f"{f.file}: {f.what}" for f in faults))
        return 0
    begin = time.monotonic()
    counts = {"caught": 0, "survived": 0, "broken": 0}
    with tempfile.TemporaryDirectory(prefix="kmla_mutations_") as folder:
        tree = pathlib.Path(folder) / "base"
        tree.mkdir()
        build_base(tree)
        base = Base(tree)
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            runs = [pool.submit(try_fault, fault, base, folder) for fault in faults]
            for run in concurrent.futures.as_completed(runs):
                verdict, line = run.result()
                counts[verdict] += 1
                say(line)
    minutes = (time.monotonic() - begin) / 60
    say(f"mutations: {len(faults)} faults, {counts['caught']} caught, "
        f"{counts['survived']} survived, {counts['broken']} do not compile ({minutes:.1f} min)")
    return 0 if counts["caught"] == len(faults) and base.all_pass() else 1


if __name__ == "__main__":
    sys.exit(main())
