"""The C++ sources of this folder as a library: compiled at the first use on a machine, and kept."""

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
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from time import perf_counter

import torch

from outrider.errors import UnsupportedModel

_log = logging.getLogger("outrider")
_SOURCE_FOLDER = Path(__file__).parent / "csrc"
_UNITS = ("decoder.cpp", "rules.cpp", "suffix.cpp")
_SOURCES = (*_UNITS, "simd.h", "sampling.h", "threads.h", "linear.h", "attention.h")
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-fopenmp")
_PATIENCE = 600  # seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """The compiled kernels, and what they took to make."""

    code: ctypes.CDLL
    compile_seconds: float  # 0 where an earlier run left them


@cache
def load_library() -> Library:
    """Compile the kernels, or find them compiled.

    Raises:
        UnsupportedModel: there is no compiler here, it fails, or what it makes cannot be kept; the message says what
            to do.
    """
    compiler = _compiler()
    path = cache_folder() / f"kernels-{_fingerprint(compiler)}.so"
    try:
        seconds = 0.0 if path.is_file() else _compile(compiler, path)
    except OSError as error:
        raise UnsupportedModel(
            f"the folder for kernels, {path.parent}, cannot be written ({error}); set XDG_CACHE_HOME to one that can"
        ) from error
    try:
        # OpenMP's symbols are left open and found in torch: two teams of threads would fight over the cores.
        code = ctypes.CDLL(str(path))
    except OSError as error:
        raise UnsupportedModel(f"the compiled kernels in {path} do not load ({error}); delete that file") from error
    code.outrider_open.restype = ctypes.c_void_p
    code.outrider_open.argtypes = code.outrider_close.argtypes = (ctypes.c_void_p,)
    code.outrider_run.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    code.outrider_grow.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    code.outrider_judge.argtypes, code.outrider_judge.restype = (ctypes.c_void_p,), None
    code.outrider_shape.argtypes, code.outrider_shape.restype = (ctypes.c_void_p,), None
    _declare_texts(code)
    code.outrider_close.restype = code.outrider_run.restype = code.outrider_grow.restype = None
    return Library(code=code, compile_seconds=seconds)


def _declare_texts(code: ctypes.CDLL) -> None:
    """Functions of suffix.cpp."""
    code.outrider_text_open.argtypes, code.outrider_text_open.restype = (), ctypes.c_void_p
    code.outrider_text_close.argtypes, code.outrider_text_close.restype = (ctypes.c_void_p,), None
    code.outrider_text_extend.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32)
    code.outrider_text_bytes.argtypes, code.outrider_text_bytes.restype = (ctypes.c_void_p,), ctypes.c_int64
    code.outrider_text_grow.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    code.outrider_text_extend.restype = code.outrider_text_grow.restype = None


def _compiler() -> str:
    wanted = os.environ.get("CXX")
    found = shutil.which(wanted) if wanted else shutil.which("g++") or shutil.which("clang++")
    if not found or sys.platform == "win32":
        raise UnsupportedModel(f"no C++ compiler was found ({wanted or 'g++ or clang++'}); install one, such as g++")
    return found


def _compile(compiler: str, path: Path) -> float:
    """Seconds that it took."""
    path.parent.mkdir(parents=True, exist_ok=True)
    began = perf_counter()
    link = ("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ()
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        _log.warning("compiling the CPU kernels: once on a machine, some ten seconds")
        objects = [str(Path(folder) / f"{unit}.o") for unit in _UNITS]
        for unit, made in zip(_UNITS, objects, strict=True):
            _call(compiler, *_FLAGS, "-c", str(_SOURCE_FOLDER / unit), "-o", made)
        whole = Path(folder) / "kernels.so"
        _call(compiler, "-shared", *link, *objects, "-o", str(whole))
        os.replace(whole, path)  # whole or not at all, whoever else compiles at the same time
    return perf_counter() - began


def _call(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnsupportedModel(f"the C++ compiler does not run ({error}); name another in CXX") from error
    if done.returncode:
        said = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[-200:])
        raise UnsupportedModel(f"{command[0]} cannot compile the kernels ({said.strip()}); name another in CXX")


def _fingerprint(compiler: str) -> str:
    """Of everything that the result depends on, this processor included."""
    digest = hashlib.sha256("\n".join((compiler, *_FLAGS, platform.machine(), torch.__version__)).encode())
    digest.update(torch.backends.cpu.get_cpu_capability().encode())
    if (info := Path("/proc/cpuinfo")).is_file():
        digest.update(next((line for line in info.read_text().splitlines() if "flags" in line.lower()), "").encode())
    for name in _SOURCES:
        digest.update((_SOURCE_FOLDER / name).read_bytes())
    return digest.hexdigest()[:16]


def cache_folder() -> Path:
    """Where what is made once on a machine is kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider"
