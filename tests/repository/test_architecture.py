"""Rules of the repository that a machine can check: layers, public names, light imports."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Mapping

import pytest

import outrider
from tests.helpers import source

FILES = source.files()
LAYERS = source.layers()


def test_every_folder_has_a_layer():
    folders = {source.owner(path) for path in FILES} - source.LAYERLESS
    assert folders == set(LAYERS)


def test_only_the_public_files_stand_at_the_top_level():
    assert {path.name for path in source.PACKAGE.glob("*.py")} == source.PUBLIC_FILES


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(source.PACKAGE).as_posix())
def test_imports_follow_the_layers(path):
    own = source.owner(path)
    if own in source.LAYERLESS:
        return
    for other in source.imported_owners(path):
        if other in source.LAYERLESS or other == own:
            continue
        assert LAYERS[other] < LAYERS[own], f"{own} imports {other}, which is not below it"


@pytest.mark.parametrize(
    "name", ["outrider", "outrider.media", "outrider.plugin", "outrider.train.rl", "outrider.testing"]
)
def test_public_names(name):
    module = importlib.import_module(name)
    assert list(module.__all__) == sorted(module.__all__)
    for public in module.__all__:
        value = getattr(module, public)
        assert value is not None
        assert public.startswith("__") or isinstance(value, Mapping) or value.__doc__


def test_public_definitions_have_docstrings():
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
