"""Load the kernels: a prebuilt library of the wheel, or one that is compiled once per machine."""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from errno import EDQUOT, ENOSPC
from functools import cache, partial
from pathlib import Path
from time import perf_counter
from types import MappingProxyType

import torch

from outrider.errors import MissingKernels, OutriderError
from outrider.models.native.builds import COMPILED, VARIABLE, find_prebuilt, own_flags, sources_hash
from outrider.models.native.compiling import FLAGS, UNITS, WHEEL, compile_kernels
from outrider.runtime.compiler import install_command
from outrider.runtime.progress import stage

_log = logging.getLogger("outrider")


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """The loaded kernels."""

    code: ctypes.CDLL
    build: str  # the name of a prebuilt one, or "compiled"
    compile_seconds: float  # 0 if they are prebuilt, or an earlier run has compiled them


@cache
def load_library() -> Library:
    """Load the kernels. Without prebuilt ones, compile them first if no earlier run has.

    Raises:
        MissingKernels: OUTRIDER_KERNEL_BUILD names a build that does not run here. Or the kernels are not prebuilt, and
            there is no compiler, the compiler fails, or the cache folder cannot be written.
    """
    prebuilt = find_prebuilt()
    if prebuilt:
        path, build, seconds = prebuilt, prebuilt.stem.rpartition("-")[0], 0.0
    else:
        compiler = find_compiler()
        path, build = cache_folder() / f"kernels-{_fingerprint(compiler)}.so", COMPILED
        compiled = 0.0 if path.is_file() else _compile_once(compiler, path)
        if isinstance(compiled, MissingKernels):
            raise MissingKernels(str(compiled))
        seconds = compiled
    try:
        # The OpenMP symbols are not linked, so they resolve to torch's. Two thread teams would
        # compete for the cores.
        share_openmp(Path(torch.__file__).parent / "lib")
        code = ctypes.CDLL(str(path))
    except OSError as error:
        fix = f"set {VARIABLE}={COMPILED}" if prebuilt else "delete that file"
        raise MissingKernels(f"the kernels in {path} do not load ({error}); {fix}") from error
    _declare_functions(code)
    return Library(code=code, build=build, compile_seconds=seconds)


def share_openmp(folder: Path) -> None:
    """Give all libraries the symbols of the OpenMP library in a folder. torch for ARM loads it for itself alone."""
    for path in folder.glob("libgomp*.so*"):
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def is_available() -> bool:
    """Return whether there are prebuilt kernels for this processor, or a compiler."""
    try:
        return bool(find_prebuilt() or find_compiler())
    except MissingKernels:
        return False


_POINTER = ctypes.c_void_p
# The types of the arguments and of the result of each function, by its name without "outrider_".
_FUNCTIONS: Mapping[str, tuple[tuple[type, ...], type | None]] = MappingProxyType(
    {
        "open": ((_POINTER,), _POINTER),
        "close": ((_POINTER,), None),
        "run": ((_POINTER, _POINTER), None),
        "draft_chains": ((_POINTER, _POINTER, _POINTER), None),
        "touched_experts": ((_POINTER,), ctypes.c_int64),
        "copy_choices": ((_POINTER, _POINTER), None),
        "verify": ((_POINTER,), None),
        "adjust": ((_POINTER,), None),
        "target_probs": ((_POINTER,), None),
        "logprobs": ((_POINTER,), None),
        "pack_blocks": ((ctypes.c_char_p, _POINTER), None),
        "pack_integers": ((_POINTER, ctypes.c_int), None),
        "transpose_integers": ((_POINTER, _POINTER, ctypes.c_int, ctypes.c_int), None),
        "dequantize": ((ctypes.c_char_p, _POINTER), None),
        "unpack": ((_POINTER, ctypes.c_int32, ctypes.c_int32, _POINTER), None),
        "quantize": ((_POINTER, _POINTER, ctypes.c_int32, _POINTER), None),
        "suffix_open": ((), _POINTER),
        "suffix_close": ((_POINTER,), None),
        "suffix_extend": ((_POINTER, _POINTER, ctypes.c_int32), None),
        "suffix_bytes": ((_POINTER,), ctypes.c_int64),
        "suffix_draft": ((_POINTER, _POINTER), None),
    }
)


def _declare_functions(code: ctypes.CDLL) -> None:
    for name, (arguments, result) in _FUNCTIONS.items():
        function = getattr(code, f"outrider_{name}")
        function.argtypes = arguments
        function.restype = result


def find_compiler() -> str:
    """Return the path of the C++ compiler: `CXX` if it is set, else g++ or clang++."""
    name = os.environ.get("CXX")
    path = shutil.which(name) if name else shutil.which("g++") or shutil.which("clang++")
    if path and sys.platform != "win32":
        return path
    if name:
        raise MissingKernels(f"the C++ compiler {name}, which CXX names, was not found; name another, or unset CXX")
    command = install_command()
    advice = f"install one ({command})" if command else "install one"
    raise MissingKernels(f"no C++ compiler was found (g++ or clang++); {advice}, or {WHEEL}")


@cache  # a failure as well, since a start asks for the kernels several times
def _compile_once(compiler: str, path: Path) -> float | MissingKernels:
    """Compile the kernels to `path`. Return the time in seconds, or why they cannot be compiled."""
    start = perf_counter()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _log.warning("compiling the CPU kernels, once per machine; this takes 30 to 60 seconds")
        with stage("compiling the CPU kernels, once per machine", len(UNITS)) as compiling:
            compile_kernels(path, (compiler, *own_flags()), partial(_link, compiler), compiling.advance)
    except MissingKernels as error:
        return error
    except OSError as error:
        fix = "free some space" if error.errno in (ENOSPC, EDQUOT) else "set XDG_CACHE_HOME to a writable folder"
        return MissingKernels(
            f"the folder of the compiled kernels, {path.parent}, cannot be written ({error.strerror}); {fix}"
        )
    return perf_counter() - start


def _link(compiler: str, objects: Sequence[str], library: str) -> Sequence[str]:
    flags = ("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ()
    return (compiler, "-shared", *flags, *objects, "-o", library)


def _fingerprint(compiler: str) -> str:
    """Return a hash of everything that the compiled library depends on, including the processor."""
    digest = hashlib.sha256("\n".join((compiler, *own_flags(), *FLAGS, platform.machine(), torch.__version__)).encode())
    digest.update(torch.backends.cpu.get_cpu_capability().encode())
    if (info := Path("/proc/cpuinfo")).is_file():
        digest.update(next((line for line in info.read_text().splitlines() if "flags" in line.lower()), "").encode())
    digest.update(sources_hash().encode())
    return digest.hexdigest()[:16]


def cache_folder() -> Path:
    """Return the folder of files that are made once per machine.

    Raises:
        OutriderError: neither XDG_CACHE_HOME nor a home folder says where it is.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider"
    except RuntimeError as error:  # a container may run as a user that its system does not know
        raise OutriderError("this user has no home folder; set XDG_CACHE_HOME to a writable folder") from error
