#!/usr/bin/env bash
# Build the source archive and the wheel in dist/, and try the wheel outside of this checkout.
#
#   scripts/release.sh [--python PYTHON] [--env DIR]
#
# The wheel is built from the source archive and installed into a fresh environment. The environment must answer the
# demo of the README and run its Python example. --env DIR takes the dependencies from an existing environment of the
# same Python, such as .venv, which saves the download of torch.
set -euo pipefail
unset PYTHONPATH

root=$(cd "$(dirname "$0")/.." && pwd)
python=python3
env=""
while (($#)); do
    case $1 in
        --python) python=$2; shift 2 ;;
        --env) env=$(cd "$2" && pwd); shift 2 ;;
        *) sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 2 ;;
    esac
done

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

git -C "$root" archive --format=tar HEAD | tar -x -C "$work" --one-top-level=source
"$python" -m venv "$work/build"
"$work/build/bin/pip" install --quiet --disable-pip-version-check build
rm -rf "$root/dist"
"$work/build/bin/python" -m build --outdir "$root/dist" "$work/source" >"$work/log" || { cat "$work/log" >&2; exit 1; }
wheel=$(ls "$root"/dist/*.whl)

missing=$(git -C "$root" ls-tree -r --name-only HEAD outrider | sort | comm -23 - \
    <("$python" -m zipfile --list "$wheel" | awk '{ print $1 }' | sort))
if [[ $missing ]]; then
    echo "the wheel lacks these files; add them to [tool.setuptools.package-data]:" >&2
    echo "$missing" >&2
    exit 1
fi

"$python" -m venv "$work/env"
if [[ $env ]]; then
    "$env/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
        >"$("$work/env/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")/dependencies.pth"
    "$work/env/bin/pip" install --quiet --disable-pip-version-check --no-deps "$wheel"
else
    torch=$(grep -o 'torch==[0-9.]*' "$root/Makefile") # the CPU build; a looser request may pull CUDA packages
    "$work/env/bin/pip" install --quiet --disable-pip-version-check "$torch" "$wheel"
fi

cd "$work"
PATH="$work/env/bin:$PATH"
"$work/env/bin/python" -c "import outrider; assert outrider.__file__.startswith('$work/env'), outrider.__file__"
demo=$(sed -n 's/^\$ \(outrider run .*--show.*\)/\1/p' "$root/README.md" | head -1)
echo "\$ $demo"
eval "$demo"
sed -n '/^```python$/,/^```$/{/^```/!p}' "$root/README.md" >example.py
"$work/env/bin/python" example.py >/dev/null
echo "$(outrider --version) works on $("$work/env/bin/python" --version). The files are in dist/. Tag the commit:"
echo "git tag -a v$(outrider --version | awk '{ print $2 }')"
