"""Which instructions the kernels are compiled for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from outrider.models.native import processor


class Getauxval:
    """The function of Linux, with the bits of HWCAP and HWCAP2."""

    def __init__(self, hwcap, hwcap2):
        self._values = {16: hwcap, 26: hwcap2}

    def __call__(self, key):
        return self._values[key]


def sysctlbyname(names):
    """Return the function of macOS on a processor with some extensions. It knows no name of i8mm."""

    def call(name, value, size, _, __):
        value._obj.value = name.decode().removeprefix("hw.optional.arm.FEAT_") in names
        return -1 if name.endswith(b"I8MM") else 0

    return call


@pytest.mark.parametrize(
    ("machine", "platform", "system", "march"),
    [
        ("x86_64", "linux", {}, "native"),
        ("aarch64", "linux", {"getauxval": Getauxval(0, 0)}, "armv8-a"),
        ("aarch64", "linux", {"getauxval": Getauxval(1 << 20, 0)}, "armv8.2-a+dotprod"),
        ("aarch64", "linux", {"getauxval": Getauxval(1 << 20, 3 << 13)}, "armv8.2-a+dotprod+i8mm+bf16"),
        ("arm64", "darwin", {"sysctlbyname": sysctlbyname(())}, "armv8-a"),
        ("arm64", "darwin", {"sysctlbyname": sysctlbyname(("DotProd", "I8MM"))}, "armv8.2-a+dotprod"),
        ("arm64", "darwin", {"sysctlbyname": sysctlbyname(("DotProd", "BF16"))}, "armv8.2-a+dotprod+bf16"),
    ],
)
def test_march(machine, platform, system, march, monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr("sys.platform", platform)
    monkeypatch.setattr(processor.ctypes, "CDLL", lambda _: SimpleNamespace(**system))
    assert processor.march() == march
