#!/bin/sh
# Prints the signatures of an instructions file, in order, one a line: from KMLA_DEVICE to the
# opening brace. Overloads for each size of a wgmma's d, or a template for all, are one line.
#     signatures.sh FILE
sed -e 's@//.*@@' -e '/\\$/d' -e '/^#/d' "$1" | tr '\n' ' ' | sed 's/  */ /g' |
    grep -o '\(template <[^>]*> \)\?KMLA_DEVICE [^{]*' |
    sed -e 's/ *$//' -e '/ wgmma_.*float (&d)/s/(&d)\[[a-z0-9]*\]/(\&d)[n \/ 2]/' \
        -e '/ wgmma_.*float (&d)/s/^template <int count> //' | uniq
