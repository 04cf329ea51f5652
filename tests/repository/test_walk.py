"""The pages that walk through the code name files, classes and functions that exist."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.helpers.source import PACKAGE, ROOT, files

PAGES = ("architecture.md", "request-walk.md", "round.md")
# `engine/engine.py: Engine.step`, or `engine/engine.py` alone.
IN_FILE = re.compile(r"`(?P<file>(?!tests/)\w+(?:/\w+)*\.py)(?:: (?P<name>[\w.]+))?`")
# `Engine.step`, and `SequenceState.token_ids`: a member of a class somewhere in the package.
MEMBER = re.compile(r"`([A-Z]\w+\.\w+)`")


def text_of(page: str) -> str:
    return re.sub(r"\n +", " ", (ROOT / "docs" / "explanation" / page).read_text("utf-8"))


def names_in(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    """The functions and classes of a module, and the members of its classes, as `Class.member`."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield prefix + node.name
            yield from names_in(node.body, f"{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name
            if not prefix:  # routes are functions inside of a function
                yield from names_in(node.body)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield prefix + node.target.id


@cache
def names_of(file: Path) -> frozenset[str]:
    return frozenset(names_in(ast.parse(file.read_text("utf-8")).body))


def references():
    for page in PAGES:
        for match in IN_FILE.finditer(text_of(page)):
            yield match["file"], match["name"]


@pytest.mark.parametrize(("file", "name"), sorted(set(references()), key=str))
def test_each_function_is_in_its_file(file, name):
    names = names_of(PACKAGE / file)
    assert name is None or name in names


def test_each_member_exists():
    members = {member for page in PAGES for member in MEMBER.findall(text_of(page))}
    assert len(members) > 20
    assert not members - set().union(*map(names_of, files()))


def test_there_are_references():
    assert len(list(references())) > 20
