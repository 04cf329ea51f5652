#!/usr/bin/env bash
# Build the source archive and the wheels in dist/, and try the wheel of this machine outside of this checkout.
#
#   scripts/release.sh [--python PYTHON] [--env DIR]
#
# A wheel is built from the source archive. scripts/wheels.py adds the prebuilt kernels. The wheel of this machine is
# installed into a fresh environment. Without a compiler, the environment must answer the demo of the README, with the
# fastest and the oldest kernels, and run its Python example. --env DIR takes the dependencies from an existing
# environment of the same Python, such as .venv, which saves the download of torch.
set -euo pipefail
unset PYTHONPATH

root=$(cd "$(dirname "$0")/.." && pwd)
python=python3
env=""
while (($#)); do
    case $1 in
        --python) python=$2; shift 2 ;;
        --env) env=$(cd "$2" && pwd); shift 2 ;;
        *) sed -n '2,10s/^# \{0,1\}//p' "$0"; exit 2 ;;
    esac
done

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

git -C "$root" archive --format=tar HEAD | tar -x -C "$work" --one-top-level=source
"$python" -m venv "$work/build"
"$work/build/bin/pip" install --quiet --disable-pip-version-check build auditwheel wheel ziglang
rm -rf "$root/dist"
"$work/build/bin/python" -m build --outdir "$root/dist" "$work/source" >"$work/log" || { cat "$work/log" >&2; exit 1; }
wheel=$(ls "$root"/dist/*.whl) # without prebuilt kernels, for other systems than Linux

missing=$(git -C "$root" ls-tree -r --name-only HEAD outrider | sort | comm -23 - \
    <("$python" -m zipfile --list "$wheel" | awk '{ print $1 }' | sort))
if [[ $missing ]]; then
    echo "the wheel lacks these files; add them to [tool.setuptools.package-data]:" >&2
    echo "$missing" >&2
    exit 1
fi

"$work/build/bin/python" "$work/source/scripts/wheels.py" "$wheel" "$root/dist"
wheel=$(ls "$root"/dist/*manylinux*"$(uname -m)".whl)

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
unset CC CXX OUTRIDER_KERNEL_BUILD
export XDG_CACHE_HOME="$work/cache"
demo=$(sed -n 's/^\$ \(outrider run .*--show.*\)/\1/p' "$root/README.md" | head -1)
sed -n '/^```python$/,/^```$/{/^```/!p}' "$root/README.md" >example.py
baseline=$("$work/env/bin/python" -c "
import outrider, platform
from outrider.models.native.builds import BUILDS
assert outrider.__file__.startswith('$work/env'), outrider.__file__
print([build.name for build in BUILDS if build.machine == platform.machine()][-1])")

(
    PATH="$work/env/bin" # no compiler
    echo "\$ $demo"
    eval "$demo"
    echo "\$ OUTRIDER_KERNEL_BUILD=$baseline $demo"
    eval "OUTRIDER_KERNEL_BUILD=$baseline $demo"
    python example.py >/dev/null
)
version=$("$work/env/bin/outrider" --version)
echo "$version works on $("$work/env/bin/python" --version). The files are in dist/. Tag the commit:"
echo "git tag -a v${version#outrider }"
