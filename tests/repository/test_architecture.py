"""Rules of the repository that a machine can check: layers, public names, light imports."""

import ast
import importlib
import inspect
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


def test_imports_follow_the_layers():
    for path in FILES:
        own = source.owner_of_file(path)
        if own in source.LAYERLESS:
            continue
        others = source.facts(path).owners - source.LAYERLESS - {own}
        wrong = [other for other in others if not LAYERS[other] < LAYERS[own]]
        assert not wrong, f"{path} imports {', '.join(wrong)}, which is not below {own}"


def test_few_arrows_between_folders():
    arrows = set()
    for path in FILES:
        own = source.owner_of_file(path).partition("/")[0]
        arrows |= {(own, other.partition("/")[0]) for other in source.facts(path).owners}
    assert sum(own != other and not source.LAYERLESS & {own, other} for own, other in arrows) <= 110


def test_import_chains_are_short():
    chain = source.longest_chain(source.imports())
    assert len(chain) <= 19, " < ".join(chain)


def test_imports_are_light():
    """The package imports no torch, and the modules of the contracts import few others."""
    count = "print(sum(name.startswith('outrider') for name in sys.modules))"
    code = (
        f"import sys, outrider; assert 'torch' not in sys.modules; import outrider.core.proposer; {count};"
        f" import outrider.drafting.propose.registry; {count}"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    proposer, both = map(int, done.stdout.split())
    assert proposer <= 16
    assert both <= 20


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


@pytest.mark.parametrize("name", ["outrider", "outrider.media"])
def test_type_checkers_see_the_names_that_are_imported_late(name):
    module = importlib.import_module(name)
    nodes = ast.walk(ast.parse(inspect.getsource(module)))
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    assert not set(module.__all__) - {alias.name for node in imports for alias in node.names}


def test_public_definitions_have_docstrings():
    assert not {path: names for path in FILES if (names := source.facts(path).undocumented)}


def test_comprehensions_are_not_nested():
    nested = {path: lines for path in FILES if (lines := source.facts(path).nested)}
    assert not nested, f"use a loop or a function: {nested}"


def test_unknown_name():
    with pytest.raises(AttributeError, match="nothing"):
        outrider.nothing  # noqa: B018
