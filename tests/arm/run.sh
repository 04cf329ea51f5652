#!/usr/bin/env bash
# Build the kernels for 64-bit ARM processors with a cross compiler, and run their tests in an emulator.
#
# Usage: tests/arm/run.sh MODELS, a file of write_models.py
set -euo pipefail

readonly folder=$(dirname "$0")
readonly sources=$folder/../../outrider/models/native/csrc
readonly compiler=${CXX_ARM:-aarch64-linux-gnu-g++} emulator=qemu-aarch64-static
readonly models=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Build the tests and run them. Usage: run_for NAME PROCESSOR FLAGS...
run_for() {
  local name=$1 processor=$2 unit
  shift 2
  echo "$name"
  mkdir "$work/$name"
  for unit in "$folder/kernels.cpp" "$sources"/tiles_{codes,integers}.cpp "$sources"/{rules,suffix}.cpp; do
    echo "$unit"
  done | xargs -P "$(nproc)" -I UNIT sh -c \
    '"$@" -I "$0" -c UNIT -o "$1/$(basename UNIT).o"' "$sources" "$work/$name" true
}
