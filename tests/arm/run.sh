#!/usr/bin/env bash
# Build the kernels for 64-bit ARM processors with a cross compiler, and test them in an emulator.
#
# Usage: tests/arm/run.sh PYTHON, an interpreter that can import outrider
set -euo pipefail

compiler=aarch64-linux-gnu-g++
emulator=qemu-aarch64-static
for program in "$compiler" "$emulator"; do
  if ! command -v "$program" > /dev/null; then
    echo "skipped: $program is missing; apt-get install g++-aarch64-linux-gnu qemu-user-static"
    exit 0
  fi
done

cd "$(dirname "$0")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
PYTHONPATH=$PWD "$1" tests/arm/write_models.py "$work/models"
sources=(tests/arm/*.cpp outrider/models/native/csrc/{pool,tiles_codes,tiles_integers,rules,suffix}.cpp)

# Build the tests and run them. Usage: check PROCESSOR FLAGS...
check() {
  local processor=$1
  shift
  local build=("$compiler" -O2 -std=c++17 -Wall -Wextra -Werror -Wno-psabi -Ioutrider/models/native/csrc "$@")
  echo "$*"
  rm -f "$work"/*.o
  printf '%s\n' "${sources[@]}" |
    xargs -P 2 -I{} sh -c 'source=$1 work=$2; shift 2; "$@" -c "$source" -o "$work/$(basename "$source").o"' _ {} "$work" "${build[@]}"
  "${build[@]}" -static "$work"/*.o -o "$work/test" 2> "$work/link" || { cat "$work/link"; return 1; }
  "$emulator" -cpu "$processor" "$work/test" "$work/models"
}

check cortex-a53 -march=armv8-a -fopenmp
check cortex-a76 -march=armv8.2-a+dotprod -fopenmp
check max -march=armv8.2-a+dotprod+i8mm+bf16 -DOUTRIDER_OWN_THREADS # without OpenMP, as on macOS
