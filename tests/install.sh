#!/bin/sh
# Installs what `make check` needs and this machine lacks; without the means it says what to install.
# `install.sh pip` adds what fetches an NVRTC from PyPI, `install.sh valgrind` valgrind,
# `install.sh packages NAMES` packages of Debian.
missing=
need() {
    command -v "$1" >/dev/null 2>&1 || missing="$missing $2"
}
need gcc gcc
need g++ g++
need clang clang
need nm binutils
need python3 python3
if [ "$1" = pip ]; then
    python3 -m pip --version >/dev/null 2>&1 || missing="$missing python3-pip"
fi
if [ "$1" = valgrind ]; then
    need valgrind valgrind
fi
if [ "$1" = packages ]; then
    shift
    for package; do
        dpkg -s "$package" >/dev/null 2>&1 || missing="$missing $package"
    done
fi
if ! printf '#include <stdarg.h>\n#include <stddef.h>\n#include <setjmp.h>\n#include <stdint.h>\n#include <cmocka.h>\n' |
    gcc -E -x c - >/dev/null 2>&1; then
    missing="$missing libcmocka-dev"
fi
[ -z "$missing" ] && exit 0

if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "the tests need these packages, by Debian's names:$missing" >&2
    exit 1
fi
echo "installing$missing"
case "$missing" in *:i386*) dpkg --add-architecture i386 ;; esac
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
# shellcheck disable=SC2086 # a list of packages
if ! { apt-get update && apt-get install -y --no-install-recommends $missing; } >"$log" 2>&1; then
    cat "$log" >&2
    rm -f "$log"
    exit 1
fi
rm -f "$log"
