#!/bin/sh
# Prints the signatures of an instructions file, in order, one a line: from KMLA_DEVICE to the
# opening brace.
#     signatures.sh FILE
sed -e 's@//.*@@' -e '/\\$/d' -e '/^#/d' "$1" | tr '\n' ' ' | sed 's/  */ /g' |
    grep -o '\(template <[^>]*> \)\?KMLA_DEVICE [^{]*' | sed 's/ *$//'
