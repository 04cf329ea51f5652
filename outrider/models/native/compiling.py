"""Compile the C++ sources of this folder into a library."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from outrider.errors import MissingKernels
from outrider.runtime.c_structures import SOURCES

# Translation units, the longest first, as they are compiled at the same time.
UNITS = (
    "tiles_integers.cpp",
    "tiles_codes.cpp",
    "decoder.cpp",
    "pool.cpp",
    "rules.cpp",
    "blocks.cpp",
    "quantize.cpp",
    "suffix.cpp",
)
FLAGS = ("-O3", "-std=c++17", "-fPIC")
WHEEL = "a wheel of Outrider that has the kernels"  # in messages that name a way to get them
_PREFIX = "compiling-"  # of the folders of objects
_TIMEOUT = 3600  # seconds for one call of the compiler, which takes minutes on a busy or slow machine


def compile_kernels(
    path: Path, compiler: Sequence[str], linker: Callable[[Sequence[str], str], Sequence[str]], done: Callable[[], None]
) -> None:
    """Write the library to `path`, in a folder that exists.

    Args:
        path: of the library.
        compiler: the command of the compiler, with the flags for the processor.
        linker: returns the command that links objects to a file.
        done: called after each translation unit.

    Raises:
        MissingKernels: the compiler or the linker fails.
        OSError: the folder cannot be written.
    """
    with _work_folder(path.parent) as folder:
        objects = [str(Path(folder) / f"{unit}.o") for unit in UNITS]
        commands = [
            (*compiler, *FLAGS, "-c", str(SOURCES / unit), "-o", output)
            for unit, output in zip(UNITS, objects, strict=True)
        ]
        library = Path(folder) / "kernels.so"
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for _ in pool.map(_run, commands):
                done()
        _run(linker(objects, str(library)))
        # An atomic move, since other processes may compile at the same time.
        os.replace(library, path)


@contextmanager
def _work_folder(parent: Path) -> Iterator[str]:
    """Make a folder for objects, and remove it at the end. Remove first those that ended processes have left.

    A process that compiles holds a shared lock on `parent`. While one has the exclusive lock, no other one compiles.
    """
    import fcntl  # not on Windows, where this module is imported as well

    lock = os.open(parent, os.O_RDONLY)
    try:
        with suppress(OSError):  # another process compiles, or the file system has no locks
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for left in parent.glob(f"{_PREFIX}*"):
                shutil.rmtree(left, ignore_errors=True)
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_SH)
        with tempfile.TemporaryDirectory(dir=parent, prefix=_PREFIX) as folder:
            yield folder
    finally:
        os.close(lock)


def _run(command: Sequence[str]) -> None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    except subprocess.TimeoutExpired as error:
        raise MissingKernels(
            f"{command[0]} took longer than {_TIMEOUT} seconds; start again on a less busy machine"
        ) from error
    except OSError as error:
        raise MissingKernels(f"the C++ compiler does not run ({error}); name another in CXX") from error
    if result.returncode:
        message = next((line for line in result.stderr.splitlines() if "error" in line), result.stderr[-200:]).strip()
        message = message or f"exit status {result.returncode}"
        fix = "free some space" if "No space left" in result.stderr else f"name another in CXX, or install {WHEEL}"
        raise MissingKernels(f"{command[0]} cannot compile the kernels ({message}); {fix}")
