#!/usr/bin/env bash
# Answer the open questions about a GPU in one run, and write results.json, page.md and log.txt.
# Usage: benchmarks/gpu/short.sh OUT_DIR [options of cells.py, such as --seconds 400 --cells triton,graphs:step]
# PYTHON names the interpreter. Default: python3. The repository needs no installation.
set -uo pipefail
out=${1:?usage: benchmarks/gpu/short.sh OUT_DIR [options of cells.py]}
shift
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$(dirname "$0")/../.." || exit 1
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
python=${PYTHON:-python3}
"$python" benchmarks/gpu/cells.py "$out/results.json" "$@" 2>"$out/log.txt"
code=$?
tail -n 30 "$out/log.txt" >&2
[ -f "$out/results.json" ] && "$python" benchmarks/gpu/page.py "$out/results.json" | tee "$out/page.md"
exit $code
