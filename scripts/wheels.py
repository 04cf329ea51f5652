"""Put prebuilt CPU kernels into a wheel: write one wheel for x86-64 and one for 64-bit ARM.

    python scripts/wheels.py WHEEL OUT [MACHINE ...]

WHEEL is a wheel without them, OUT a folder, and a MACHINE is x86_64 or aarch64. gcc compiles, since its code is
the fastest (Debian: `g++` and `g++-aarch64-linux-gnu`). The linker of Zig links, with the GNU C library 2.28, so that
the kernels load on systems that are older than this one. auditwheel names the tag of the wheel. The packages
auditwheel, wheel and ziglang must be installed.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from outrider.models.native.builds import BUILDS, prebuilt_path
from outrider.models.native.compiling import compile_kernels

_LIBC = "2.28"  # that of torch's own wheels
_FOLDER = "outrider/models/native/prebuilt"
_EXPORTS = "{ global: outrider_*; local: *; };"
# gcc's libraries read this variable of newer GNU C libraries. 0 is right with any number of threads.
_VARIABLE = "char __libc_single_threaded = 0;"
_OF_TORCH = {"GOMP_parallel", "omp_get_max_threads", "omp_get_num_threads", "omp_get_thread_num"}
_LARGEST = 60_000_000  # bytes of a wheel


def main(wheel: str, out: str, *machines: str) -> None:
    """Write a wheel for each machine."""
    for machine in machines or dict.fromkeys(build.machine for build in BUILDS):
        with tempfile.TemporaryDirectory() as work:
            _write_wheel(Path(wheel).resolve(), Path(out).resolve(), machine, Path(work))


def _write_wheel(wheel: Path, out: Path, machine: str, work: Path) -> None:
    """Write the wheel for one machine into the folder `out`."""
    _run_module("wheel", "unpack", "--dest", str(work), str(wheel))
    (unpacked,) = work.glob("outrider-*")
    folder = unpacked / _FOLDER
    folder.mkdir()
    _compile_all(folder, machine, work)
    (facts,) = unpacked.glob("*.dist-info/WHEEL")
    text = re.sub(r"(?m)^Tag: .*$", f"Tag: py3-none-linux_{machine}", facts.read_text())
    facts.write_text(text.replace("Root-Is-Purelib: true", "Root-Is-Purelib: false"))
    _run_module("wheel", "pack", "--dest-dir", str(work), str(unpacked))
    (packed,) = work.glob("*.whl")
    tag = json.loads(_run_module("auditwheel", "show", "--json", str(packed)))["overall_tag"]
    if not tag.startswith("manylinux"):
        raise SystemExit(f"auditwheel: {packed.name} is no manylinux wheel but {tag}")
    _run_module("wheel", "tags", "--remove", "--platform-tag", tag, str(packed))
    (tagged,) = work.glob("*.whl")
    size = tagged.stat().st_size
    if size > _LARGEST:
        raise SystemExit(f"{tagged.name} has {size:,} bytes, and the limit is {_LARGEST:,}")
    (out / tagged.name).write_bytes(tagged.read_bytes())
    print(f"{tagged.name}: {size / 1e6:.1f} MB")


def _compile_all(folder: Path, machine: str, work: Path) -> None:
    """Compile the builds of a machine into a folder."""
    compiler = f"{machine}-linux-gnu-g++"
    if not shutil.which(compiler):
        raise SystemExit(
            f"{compiler} was not found; on Debian its package is g++-{machine.replace('_', '-')}-linux-gnu"
        )
    for build in BUILDS:
        if build.machine == machine:
            start = perf_counter()
            path = prebuilt_path(folder, build.name)
            compile_kernels(path, (compiler, *build.flags), partial(_link, compiler, machine, work), lambda: None)
            _check_symbols(path, machine)
            seconds = perf_counter() - start
            print(f"{machine} {build.name}: {path.stat().st_size:,} bytes, {seconds:.0f} s", flush=True)


def _link(compiler: str, machine: str, work: Path, objects: Sequence[str], library: str) -> Sequence[str]:
    """Return the command that links objects to a library. It contains gcc's libraries, and exports only functions.

    They come before Zig's own library, whose functions would replace faster ones of the GNU C library.
    """
    exports, variable = work / "exports", work / "variable.c"
    exports.write_text(_EXPORTS)
    variable.write_text(_VARIABLE)
    standard, gcc = (_run(compiler, f"-print-file-name={name}") for name in ("libstdc++.a", "libgcc.a"))
    zig = (sys.executable, "-m", "ziglang", "cc", "-target", f"{machine}-linux-gnu.{_LIBC}")
    flags = ("-shared", "-s", "-Wl,--gc-sections", f"-Wl,--version-script={exports}")
    return (*zig, *flags, *objects, str(variable), standard, "-lunwind", gcc, "-lm", "-o", library)


def _check_symbols(library: Path, machine: str) -> None:
    """Check that a library needs nothing but versioned symbols, which auditwheel checks, and functions of torch."""
    lines = _run(f"{machine}-linux-gnu-nm", "--dynamic", "--undefined-only", str(library)).splitlines()
    names = {line.split()[1] for line in lines if line.split()[0] == "U"}
    unknown = {name for name in names if "@" not in name} - _OF_TORCH
    if unknown:
        raise SystemExit(f"{library.name} needs {', '.join(sorted(unknown))}, which older systems lack")


def _run_module(*arguments: str) -> str:
    """Run a module of Python, and return its output."""
    return _run(sys.executable, "-m", *arguments)


def _run(*command: str) -> str:
    """Run a command, and return its output."""
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main(*sys.argv[1:])
