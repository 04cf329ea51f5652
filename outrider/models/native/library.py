"""Compile the C++ sources of this folder into a library, once per machine, and load it."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from errno import EDQUOT, ENOSPC
from functools import cache
from pathlib import Path
from time import perf_counter

import torch

from outrider.errors import OutriderError, UnsupportedModel
from outrider.models.native.abi import check_layout
from outrider.models.native.processor import march
from outrider.runtime.compiler import install_command
from outrider.runtime.progress import stage

_log = logging.getLogger("outrider")
_SOURCE_FOLDER = Path(__file__).parent / "csrc"
# Translation units, the longest first, as they are compiled at the same time.
_UNITS = (
    "decoder.cpp",
    "pool.cpp",
    "tiles_codes.cpp",
    "tiles_integers.cpp",
    "rules.cpp",
    "blocks.cpp",
    "quantize.cpp",
    "suffix.cpp",
)
# Apple's clang has no OpenMP. The kernels have threads of their own then.
_THREADS = () if sys.platform == "darwin" else ("-fopenmp",)
_FLAGS = ("-O3", f"-march={march()}", "-std=c++17", "-fPIC", *_THREADS)
_TIMEOUT = 600  # seconds for one call of the compiler


class MissingKernels(UnsupportedModel):
    """The kernels cannot be compiled or loaded on this system. The message says why, and how to change it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """The compiled kernels."""

    code: ctypes.CDLL
    compile_seconds: float  # 0 if an earlier run has compiled them


@cache
def load_library() -> Library:
    """Load the kernels. Compile them first if no earlier run has.

    Raises:
        MissingKernels: there is no compiler, the compiler fails, or the cache folder cannot be
            written.
    """
    compiler = find_compiler()
    path = cache_folder() / f"kernels-{_fingerprint(compiler)}.so"
    seconds = 0.0 if path.is_file() else _compile_once(compiler, path)
    if isinstance(seconds, MissingKernels):
        raise MissingKernels(str(seconds))
    try:
        # The OpenMP symbols are not linked, so they resolve to torch's. Two thread teams would
        # compete for the cores.
        code = ctypes.CDLL(str(path))
    except OSError as error:
        raise MissingKernels(f"the compiled kernels in {path} do not load ({error}); delete that file") from error
    check_layout(code)
    _declare_functions(code)
    return Library(code=code, compile_seconds=seconds)


def _declare_functions(code: ctypes.CDLL) -> None:
    """Declare the argument and return types of all functions."""
    pointer = ctypes.c_void_p
    code.outrider_open.argtypes = (pointer,)
    code.outrider_open.restype = pointer
    code.outrider_close.argtypes = (pointer,)
    code.outrider_close.restype = None
    code.outrider_run.argtypes = (pointer, pointer)
    code.outrider_run.restype = None
    code.outrider_draft_chains.argtypes = (pointer, pointer, pointer)
    code.outrider_draft_chains.restype = None
    code.outrider_touched_experts.argtypes = (pointer,)
    code.outrider_touched_experts.restype = ctypes.c_int64
    code.outrider_copy_choices.argtypes = (pointer, pointer)
    code.outrider_copy_choices.restype = None
    code.outrider_verify.argtypes = (pointer,)
    code.outrider_verify.restype = None
    code.outrider_target_probs.argtypes = (pointer,)
    code.outrider_target_probs.restype = None
    code.outrider_pack_blocks.argtypes = (ctypes.c_char_p, pointer)
    code.outrider_pack_blocks.restype = None
    code.outrider_pack_integers.argtypes = (pointer, ctypes.c_int)
    code.outrider_pack_integers.restype = None
    code.outrider_transpose_integers.argtypes = (pointer, pointer, ctypes.c_int, ctypes.c_int)
    code.outrider_transpose_integers.restype = None
    code.outrider_dequantize.argtypes = (ctypes.c_char_p, pointer)
    code.outrider_dequantize.restype = None
    code.outrider_unpack.argtypes = (pointer, ctypes.c_int32, ctypes.c_int32, pointer)
    code.outrider_unpack.restype = None
    code.outrider_quantize.argtypes = (pointer, pointer, ctypes.c_int32)
    code.outrider_quantize.restype = None
    code.outrider_suffix_open.argtypes = ()
    code.outrider_suffix_open.restype = pointer
    code.outrider_suffix_close.argtypes = (pointer,)
    code.outrider_suffix_close.restype = None
    code.outrider_suffix_extend.argtypes = (pointer, pointer, ctypes.c_int32)
    code.outrider_suffix_extend.restype = None
    code.outrider_suffix_bytes.argtypes = (pointer,)
    code.outrider_suffix_bytes.restype = ctypes.c_int64
    code.outrider_suffix_draft.argtypes = (pointer, pointer)
    code.outrider_suffix_draft.restype = None


def find_compiler() -> str:
    """Return the path of the C++ compiler: `CXX` if it is set, else g++ or clang++."""
    name = os.environ.get("CXX")
    path = shutil.which(name) if name else shutil.which("g++") or shutil.which("clang++")
    if path and sys.platform != "win32":
        return path
    if name:
        raise MissingKernels(f"the C++ compiler {name}, which CXX names, was not found; name another, or unset CXX")
    command = install_command()
    advice = f"install one: {command}" if command else "install one"
    raise MissingKernels(f"no C++ compiler was found (g++ or clang++); {advice}")


@cache  # a failure as well, since a start asks for the kernels several times
def _compile_once(compiler: str, path: Path) -> float | MissingKernels:
    """Compile the kernels to `path`. Return the time in seconds, or why they cannot be compiled."""
    try:
        return _compile(compiler, path)
    except MissingKernels as error:
        return error
    except OSError as error:
        fix = "free some space" if error.errno in (ENOSPC, EDQUOT) else "set XDG_CACHE_HOME to a writable folder"
        return MissingKernels(
            f"the folder of the compiled kernels, {path.parent}, cannot be written ({error.strerror}); {fix}"
        )


def _compile(compiler: str, path: Path) -> float:
    """Compile the kernels to `path`. Return the time in seconds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    start = perf_counter()
    link_flags = ("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ()
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        _log.warning("compiling the CPU kernels, once per machine; this takes about half a minute")
        objects = [str(Path(folder) / f"{unit}.o") for unit in _UNITS]
        commands = [
            (compiler, *_FLAGS, "-c", str(_SOURCE_FOLDER / unit), "-o", output)
            for unit, output in zip(_UNITS, objects, strict=True)
        ]
        library = Path(folder) / "kernels.so"
        with (
            stage("compiling the CPU kernels, once per machine", len(_UNITS)) as compiling,
            ThreadPoolExecutor(os.cpu_count()) as pool,
        ):
            for _ in pool.map(_run_compiler, commands):
                compiling.advance()
        _run_compiler((compiler, "-shared", *link_flags, *objects, "-o", str(library)))
        # An atomic move, since other processes may compile at the same time.
        os.replace(library, path)
    return perf_counter() - start


def _run_compiler(command: Sequence[str]) -> None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MissingKernels(f"the C++ compiler does not run ({error}); name another in CXX") from error
    if result.returncode:
        message = next((line for line in result.stderr.splitlines() if "error" in line), result.stderr[-200:])
        fix = "free some space" if "No space left" in result.stderr else "name another in CXX"
        raise MissingKernels(f"{command[0]} cannot compile the kernels ({message.strip()}); {fix}")


def _fingerprint(compiler: str) -> str:
    """Return a hash of everything that the compiled library depends on, including the processor."""
    digest = hashlib.sha256("\n".join((compiler, *_FLAGS, platform.machine(), torch.__version__)).encode())
    digest.update(torch.backends.cpu.get_cpu_capability().encode())
    if (info := Path("/proc/cpuinfo")).is_file():
        digest.update(next((line for line in info.read_text().splitlines() if "flags" in line.lower()), "").encode())
    for source in sorted(_SOURCE_FOLDER.glob("*.[ch]*")):
        digest.update(source.read_bytes())
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
