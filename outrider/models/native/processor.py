"""The instructions of this processor that the kernels are compiled for."""

from __future__ import annotations

import ctypes
import platform
import sys
from typing import NamedTuple

_HWCAP = 16  # keys of getauxval of Linux
_HWCAP2 = 26


class _Extension(NamedTuple):
    """An extension of 64-bit ARM processors that the kernels use, and where the system names it."""

    flag: str  # in -march of compilers
    linux_key: int
    linux_bit: int
    macos: str  # the end of the name for sysctlbyname


_EXTENSIONS = (
    _Extension("dotprod", _HWCAP, 20, "DotProd"),
    _Extension("i8mm", _HWCAP2, 13, "I8MM"),
    _Extension("bf16", _HWCAP2, 14, "BF16"),
)


def march() -> str:
    """Return the value of `-march`.

    On ARM it names the extensions, since compilers that do not know a processor would build for the
    oldest one.
    """
    if platform.machine() not in ("aarch64", "arm64"):
        return "native"
    system = ctypes.CDLL(None)
    has = _has_on_macos if sys.platform == "darwin" else _has_on_linux
    flags = [extension.flag for extension in _EXTENSIONS if has(system, extension)]
    return "+".join(("armv8.2-a", *flags)) if flags else "armv8-a"


def _has_on_linux(system: ctypes.CDLL, extension: _Extension) -> bool:
    system.getauxval.argtypes = (ctypes.c_ulong,)
    system.getauxval.restype = ctypes.c_ulong
    return bool(system.getauxval(extension.linux_key) >> extension.linux_bit & 1)


def _has_on_macos(system: ctypes.CDLL, extension: _Extension) -> bool:
    value = ctypes.c_int()
    size = ctypes.c_size_t(ctypes.sizeof(value))
    name = f"hw.optional.arm.FEAT_{extension.macos}".encode()
    unknown = system.sysctlbyname(name, ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0))
    return not unknown and bool(value.value)
