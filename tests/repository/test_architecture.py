"""The house rules that a machine can check: layers, sizes, public names."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys

import pytest

import outrider
from tests.helpers import source

FILES = source.files()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(source.PACKAGE).as_posix())
def test_file(path):
    assert source.lines(path) <= source.FILE_LINES_MOST
    for name, length, arguments in source.functions(path):
        assert length <= source.FUNCTION_LINES_MOST, name
        # A transformers attention function has the signature that transformers calls it with.
        assert arguments <= source.ARGUMENTS_MOST or name in ("attend", "_attention"), name


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(source.PACKAGE).as_posix())
def test_imports_go_down(path):
    for other in source.imports(path):
        if other.name == "__init__.py":
            continue
        assert source.layer(other) <= source.layer(path), f"{path.name} imports {other.name}, which is above it"


def test_programs_do_not_import_each_other():
    """With one exception, which the map names; and it is used, or it would have to go."""
    programs = {"audit", "bench", "project", "serve", "stress", "train", "tune"}
    owners = ((path.parent.name, other.parent.name) for path in FILES for other in source.imports(path))
    assert {pair for pair in owners if programs.issuperset(pair) and pair[0] != pair[1]} == {("tune", "bench")}


def test_the_map_names_every_file():
    named = set(charted())
    folders = tuple(name for name in named if name.endswith("/"))
    files = (path.relative_to(source.PACKAGE).as_posix() for path in FILES)
    assert not [file for file in files if file not in named and not file.startswith(folders)]


def charted():
    """Files and folders in the map's table; a name without a folder has that of the one before it in its line."""
    for line in (source.ROOT / "docs/map.md").read_text("utf-8").splitlines():
        if line.startswith("| "):
            folder = ""
            for name in re.findall(r"`([^`]+)`", line.split("|")[2]):
                folder = name[: name.rindex("/") + 1] if "/" in name else folder
                yield name if "/" in name else folder + name


def test_core_is_small():
    leaves = {path: path.parent.name for path in FILES if path.parent.name in source.LEAVES}
    for name, most in source.LEAVES.items():
        assert sum(source.lines(path) for path, owner in leaves.items() if owner == name) < most
    assert sum(source.lines(p) for p in FILES if p not in leaves and source.layer(p) < source.CORE) < source.CORE_LINES


@pytest.mark.parametrize("name", ["outrider", "outrider.testing"])
def test_public_names(name):
    module = importlib.import_module(name)
    assert list(module.__all__) == sorted(module.__all__)
    for public in module.__all__:
        assert getattr(module, public) is not None
        assert public.startswith("__") or getattr(module, public).__doc__


def test_what_is_public_says_what_it_is():
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in FILES:
        public = [n for n in ast.parse(path.read_text()).body if isinstance(n, kinds) and not n.name.startswith("_")]
        assert not [node.name for node in public if not ast.get_docstring(node)], path


def test_unknown_name():
    with pytest.raises(AttributeError, match="nothing"):
        outrider.nothing  # noqa: B018


def test_import_is_light():
    code = "import sys, outrider; assert 'torch' not in sys.modules, 'torch'"
    subprocess.run([sys.executable, "-c", code], check=True)
