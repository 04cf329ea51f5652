"""The builds of the kernels that a wheel has, and which of them this processor runs."""

import hashlib
import os
import platform
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from outrider.errors import MissingKernels
from outrider.runtime.c_structures import SOURCES

VARIABLE = "OUTRIDER_KERNEL_BUILD"  # names the build to load; unset: the fastest
COMPILED = "compiled"  # the build that is compiled on the machine where it runs
_PREBUILT = Path(__file__).parent / "prebuilt"


class Build(NamedTuple):
    """A build of the kernels for one kind of processors."""

    name: str
    machine: str  # as in `platform.machine`
    flags: tuple[str, ...]  # of the compiler
    needs: tuple[str, ...]  # names in `torch.cpu.get_capabilities`


_V3 = ("avx2", "fma3", "f16c", "bmi", "bmi2", "lzcnt")  # of the level x86-64-v3
_VNNI = (*_V3, "avx512_f", "avx512_bw", "avx512_cd", "avx512_dq", "avx512_vl", "avx512_vnni")
_MATRIX_FLAGS = ("-mavx512bf16", "-mamx-tile", "-mamx-bf16")

# The fastest of each machine first. The last one runs on every processor of the machine that torch supports.
# The kernels ask the system for AMX before they use it, so that build needs no AMX.
BUILDS = (
    Build("avx512-bf16", "x86_64", ("-march=x86-64-v4", "-mavx512vnni", *_MATRIX_FLAGS), (*_VNNI, "avx512_bf16")),
    Build("avx512-vnni", "x86_64", ("-march=x86-64-v4", "-mavx512vnni"), _VNNI),
    Build("avx-vnni", "x86_64", ("-march=x86-64-v3", "-mavxvnni"), (*_V3, "avx_vnni")),
    Build("avx2", "x86_64", ("-march=x86-64-v3",), _V3),
    Build("ssse3", "x86_64", ("-march=x86-64", "-mssse3"), ()),
    Build("bf16", "aarch64", ("-march=armv8.2-a+dotprod+i8mm+bf16",), ("dot", "i8mm", "bf16")),
    Build("dotprod", "aarch64", ("-march=armv8.2-a+dotprod",), ("dot",)),
    Build("neon", "aarch64", ("-march=armv8-a",), ()),
)

_ARM_FLAGS = {"dot": "dotprod", "i8mm": "i8mm", "bf16": "bf16"}  # in -march, by the names in `needs`


def own_flags() -> tuple[str, ...]:
    """Return the flags of the compiler for this processor.

    On ARM they name the extensions, since compilers that do not know a processor would build for the
    oldest one.
    """
    if platform.machine() not in ("aarch64", "arm64"):
        return ("-march=native",)
    has = _capabilities()
    flags = [flag for name, flag in _ARM_FLAGS.items() if has.get(name)]
    return ("-march=" + "+".join(("armv8.2-a", *flags)) if flags else "-march=armv8-a",)


def find_prebuilt() -> Path | None:
    """Return the prebuilt library to load; None: the kernels are compiled here.

    Raises:
        MissingKernels: OUTRIDER_KERNEL_BUILD names a build that is unknown, not installed or not for
            this processor, or the prebuilt kernels were built from other sources.
    """
    wanted = os.environ.get(VARIABLE)
    installed = {path.stem.rpartition("-")[0] for path in _PREBUILT.glob("*.so")}
    builds = [build for build in BUILDS if build.machine == platform.machine() and build.name in installed]
    has = _capabilities() if builds else {}
    usable = [build.name for build in builds if all(map(has.get, build.needs))]
    if wanted == COMPILED or (not wanted and not usable):
        return None
    if wanted and wanted not in usable:
        raise MissingKernels(
            f"{VARIABLE}={wanted} is not a build of the kernels that is installed and runs on this processor; use"
            f" {', '.join((*usable, COMPILED))}, or unset it"
        )
    path = prebuilt_path(_PREBUILT, wanted or usable[0])
    if not path.is_file():
        raise MissingKernels(
            f"the prebuilt kernels in {_PREBUILT} belong to another version of Outrider; install Outrider again, or set"
            f" {VARIABLE}={COMPILED}, which needs a C++ compiler"
        )
    return path


def prebuilt_path(folder: Path, build: str) -> Path:
    """Return the path of a prebuilt library in a folder. Its name ends with a hash of the C++ sources."""
    return folder / f"{build}-{sources_hash()[:16]}.so"


@cache
def sources_hash() -> str:
    """Return a hash of the C++ sources."""
    digest = hashlib.sha256()
    for source in sorted(SOURCES.glob("*.[ch]*")):
        digest.update(source.read_bytes())
    return digest.hexdigest()


def _capabilities() -> Mapping[str, Any]:
    """Return the capabilities of the processor, as torch reports them."""
    import torch

    return torch.cpu.get_capabilities()
