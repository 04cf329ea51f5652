"""The structures of Python have the layout that a C++ compiler gives those of the kernels."""

import ctypes
import subprocess

import pytest

from outrider.core.draws import DrawParams
from outrider.models.cache.pool import CPool
from outrider.models.native import library, structures
from outrider.models.native.builds import own_flags
from outrider.runtime import c_structures
from outrider.runtime.c_structures import SOURCES, declared_fields
from tests.helpers import tiny


class CSamplingParams(ctypes.Structure):
    """A row of a tensor of `DrawParams` in float32."""

    _fields_ = tuple((name, ctypes.c_float) for name in DrawParams._fields)


STRUCTURES = [
    value for value in vars(structures).values() if isinstance(value, type) and issubclass(value, ctypes.Structure)
]
UNITS = {
    ("decoder.cpp", "rules.cpp", "suffix.cpp"): [
        *(structure for structure in STRUCTURES if structure is not structures.CBlockMatrix),
        CPool,
        CSamplingParams,
    ],
    ("blocks.cpp",): [structures.CBlockMatrix],
}


def check(sources, compared):
    """Return the errors of the compiler about names, offsets and sizes of structures that differ from these."""
    lines = ["#include <cstddef>", *(f'#include "{SOURCES / source}"' for source in sources)]
    for structure in compared:
        name = structure.__name__.removeprefix("C")
        lines.append(f'static_assert(sizeof({name}) == {ctypes.sizeof(structure)}, "size of {name}");')
        for field, *_ in structure._fields_:
            part = getattr(structure, field)
            place = f"offsetof({name}, {field}) == {part.offset} && sizeof({name}::{field}) == {part.size}"
            lines.append(f'static_assert({place}, "{field} of {name}");')
    compiler = (library.find_compiler(), "-x", "c++", "-std=c++17", *own_flags(), "-w", "-fsyntax-only", "-")
    return subprocess.run(compiler, input="\n".join(lines), capture_output=True, text=True, check=False).stderr


@pytest.mark.skipif(not tiny.compiles(), reason="no C++ compiler here")
@pytest.mark.parametrize("sources", UNITS)
def test_layout_is_that_of_the_compiler(sources):
    assert check(sources, UNITS[sources]) == ""


@pytest.mark.skipif(not tiny.compiles(), reason="no C++ compiler here")
def test_the_compiler_finds_a_difference():
    first, second, *rest = structures.CBlockMatrix._fields_
    swapped = type("CBlockMatrix", (ctypes.Structure,), {"_fields_": [second, first, *rest]})
    assert "row of BlockMatrix" in check(("blocks.cpp",), [swapped])


@pytest.mark.parametrize("structure", STRUCTURES)
def test_unknown_fields_are_errors(structure):
    with pytest.raises(AttributeError):
        structure(unknown=1)


@pytest.mark.parametrize(
    ("declaration", "message"),
    [
        ("double price;", "the field price of Item has type double; say what type of ctypes that is"),
        ("int32_t prices[4];", r"Item has the field prices\[4\]; declare pointers, numbers or structures"),
        ("int32_t price = 1;", "Item has the field price = 1;"),
        ("int32_t price() const { return 1; }", "Item has the field"),
        ("", "item.h declares no structure Other"),
    ],
)
def test_declarations_that_python_cannot_read_are_errors(declaration, message, monkeypatch, tmp_path):
    monkeypatch.setattr(c_structures, "SOURCES", tmp_path)
    c_structures._code.cache_clear()
    (tmp_path / "item.h").write_text(
        f"struct Item {{\n  const float *a, *b;  // the first; the second\n  {declaration}\n}};"
    )
    with pytest.raises(RuntimeError, match=message):
        declared_fields("item.h", "Item" if declaration else "Other")
    c_structures._code.cache_clear()


def test_fields_are_read_in_their_order(monkeypatch, tmp_path):
    monkeypatch.setattr(c_structures, "SOURCES", tmp_path)
    c_structures._code.cache_clear()
    (tmp_path / "item.h").write_text(
        "// struct Item { int32_t old; };\n"
        "struct Item {\n"
        "  const void* const* row;  // [n]; or null\n"
        "  const float *a, *constant;\n"
        "  int32_t size, count;\n"
        "  Part part;\n"
        "};\n"
    )
    pointer, number = ctypes.c_void_p, ctypes.c_int32
    assert declared_fields("item.h", "Item", Part=CPool) == [
        ("row", pointer),
        ("a", pointer),
        ("constant", pointer),
        ("size", number),
        ("count", number),
        ("part", CPool),
    ]
    c_structures._code.cache_clear()
