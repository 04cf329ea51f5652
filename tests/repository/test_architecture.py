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
LAYERS = source.LAYERS


def test_every_folder_has_a_layer():
    folders = {source.owner_of_file(path).partition("/")[0] for path in FILES} - source.LAYERLESS
    assert folders == {name for name in LAYERS if "/" not in name}


def test_every_folder_inside_a_layered_folder_has_a_layer():
    for folder in {name.partition("/")[0] for name in LAYERS if "/" in name}:
        inside = {path.parent.name for path in (source.PACKAGE / folder).glob("*/__init__.py")}
        assert inside == {name.partition("/")[2] for name in LAYERS if name.startswith(f"{folder}/")}


def test_few_folders_and_layers():
    assert len([folder for folder in source.PACKAGE.iterdir() if folder.is_dir() and folder.name[0] != "_"]) <= 15
    assert 1 + max(outer for outer, _ in LAYERS.values()) <= 12


def test_only_the_public_files_stand_at_the_top_level():
    assert {path.name for path in source.PACKAGE.glob("*.py")} == source.PUBLIC_FILES


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(source.PACKAGE).as_posix())
def test_imports_follow_the_layers(path):
    own = source.owner_of_file(path)
    if own in source.LAYERLESS:
        return
    for other in source.imported_owners(path):
        if other in source.LAYERLESS or other == own:
            continue
        assert LAYERS[other] < LAYERS[own], f"{own} imports {other}, which is not below it"


def test_few_arrows_between_folders():
    arrows = set()
    for path in FILES:
        own = source.owner_of_file(path).partition("/")[0]
        arrows |= {(own, other.partition("/")[0]) for other in source.imported_owners(path)}
    assert sum(own != other and not source.LAYERLESS & {own, other} for own, other in arrows) <= 110


def test_import_chains_are_short():
    chain = source.longest_chain(source.imports())
    assert len(chain) <= 19, " < ".join(chain)


@pytest.mark.parametrize(
    ("module", "most"), [("outrider.core.proposer", 16), ("outrider.drafting.propose.registry", 20)]
)
def test_contracts_import_little(module, most):
    code = f"import sys, {module}; print(sum(name.startswith('outrider') for name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert int(done.stdout) <= most


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


def test_comprehensions_are_not_nested():
    kinds = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
    for path in FILES:
        comprehensions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)]
        for node in comprehensions:
            inner = [other for other in ast.walk(node) if isinstance(other, kinds) and other is not node]
            assert not inner, f"{path}:{node.lineno} nests comprehensions; use a loop or a function"


def test_unknown_name():
    with pytest.raises(AttributeError, match="nothing"):
        outrider.nothing  # noqa: B018


def test_import_is_light():
    code = "import sys, outrider; assert 'torch' not in sys.modules, 'torch'"
    subprocess.run([sys.executable, "-c", code], check=True)
