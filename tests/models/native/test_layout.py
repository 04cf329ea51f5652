"""The structures of `abi.py` and of the C++ sources have the same layout. Loading the kernels finds a difference."""

import ctypes
import re

import pytest

from outrider.models.native import abi, library
from outrider.models.native.abi import CChain, CLayer, CModel, CPass, check_layout
from outrider.models.native.builds import SOURCES
from tests.helpers import tiny

pytestmark = pytest.mark.skipif(not tiny.compiles(), reason="no C++ compiler here")


def changed(structure, fields):
    """Return a structure of the same name with these fields."""
    return type(structure.__name__, (ctypes.Structure,), {"_fields_": fields, "__module__": structure.__module__})


def without(structure, name):
    return changed(structure, [field for field in structure._fields_ if field[0] != name])


def swapped(structure, first, second):
    types = dict(structure._fields_)
    names = list(types)
    i, j = names.index(first), names.index(second)
    names[i], names[j] = names[j], names[i]
    return changed(structure, [(name, types[name]) for name in names])


WRONG = {
    "missing field": (
        without(CPass, "state"),
        "has needs_fusion (4 bytes from byte 104), and the compiled kernels have state (8 bytes from byte 104)",
    ),
    "swapped numbers": (swapped(CLayer, "window", "rotary"), "has rotary (4 bytes from byte 624)"),
    "swapped pointers": (swapped(CChain, "q", "q_index"), "has q_index (8 bytes from byte 136)"),
    "missing last field": (without(CModel, "logit_cap"), "has no further field"),
    "further field": (changed(CLayer, [*CLayer._fields_, ("extra", ctypes.c_int64)]), "have no further field"),
    "other type": (
        changed(CPass, [*CPass._fields_[:-1], ("num_exports", ctypes.c_int64)]),
        "has num_exports (8 bytes from byte 128), and the compiled kernels have num_exports (4 bytes from byte 124)",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_field_is_a_clear_error(case, monkeypatch):
    structure, message = WRONG[case]
    code = library.load_library().code
    name = structure.__name__.removeprefix("C")
    monkeypatch.setattr(abi, "_STRUCTURES", (structure,))
    expected = rf"the structure {name} differs between Python and C\+\+: .* {re.escape(message)}"
    with pytest.raises(RuntimeError, match=expected):
        check_layout(code)


def test_loading_compares_the_layouts(monkeypatch):
    """It does not fall back to torch, which would hide the mistake."""
    monkeypatch.setattr(abi, "_STRUCTURES", (without(CPass, "state"),))
    library.load_library.cache_clear()
    try:
        with pytest.raises(RuntimeError, match="the structure Pass differs"):
            library.load_library()
    finally:
        library.load_library.cache_clear()


def test_every_structure_is_compared():
    """A new structure cannot be forgotten."""
    structures = {
        value for value in vars(abi).values() if isinstance(value, type) and issubclass(value, ctypes.Structure)
    }
    assert structures == set(abi._STRUCTURES)
    sources = "".join(path.read_text() for path in SOURCES.iterdir())
    assert set(re.findall(r"OUTRIDER_LAYOUT\((\w+), \w+,", sources)) == {
        structure.__name__.removeprefix("C") for structure in structures
    }
