"""Compile the C++ sources of this folder into a library."""

import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from outrider.models.native.builds import SOURCES, MissingKernels

_log = logging.getLogger("outrider")

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
_PREFIX = "compiling-"  # of the folders of objects
_TIMEOUT = 3600  # seconds for one call of the compiler, which takes minutes on a busy or slow machine


def compile_kernels(
    path: Path, compiler: Sequence[str], linker: Callable[[Sequence[str], str], Sequence[str]], done: Callable[[], None]
) -> None:
    """Write the library to `path`, in a folder that exists. Wait for another process that compiles, and use its result.

    Args:
        path: of the library.
        compiler: the command of the compiler, with the flags for the processor.
        linker: returns the command that links objects to a file.
        done: called after each translation unit.

    Raises:
        MissingKernels: the compiler or the linker fails.
        OSError: the folder cannot be written.
    """
    with _locked(path.parent) as has_lock:
        if path.is_file():  # another process has compiled it
            return
        if has_lock:
            for left in path.parent.glob(f"{_PREFIX}*"):  # by processes that were ended
                shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=_PREFIX) as folder:
            _compile(Path(folder), path, compiler, linker, done)


def _compile(
    folder: Path,
    path: Path,
    compiler: Sequence[str],
    linker: Callable[[Sequence[str], str], Sequence[str]],
    done: Callable[[], None],
) -> None:
    """Do the work of `compile_kernels` with objects in `folder`."""
    objects = [str(folder / f"{unit}.o") for unit in UNITS]
    commands = [
        (*compiler, *FLAGS, "-c", str(SOURCES / unit), "-o", output)
        for unit, output in zip(UNITS, objects, strict=True)
    ]
    library = folder / "kernels.so"
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(_run, commands):
            done()
    _run(linker(objects, str(library)))
    os.replace(library, path)  # an atomic move, so no process loads a part of the library


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Hold the lock of a folder. One process holds it at a time. Yields False if the file system has no locks."""
    import fcntl  # not on Windows, where this module is imported as well

    lock = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.warning("waiting for another process that compiles the CPU kernels")
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            yield False
            return
        yield True
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
        message = next((line for line in result.stderr.splitlines() if "error" in line), result.stderr[-200:])
        fix = "free some space" if "No space left" in result.stderr else "name another in CXX"
        raise MissingKernels(f"{command[0]} cannot compile the kernels ({message.strip()}); {fix}")
