"""The pages that walk through the code name files, classes and functions that exist."""

from __future__ import annotations

import re

import pytest

from tests.helpers.source import ROOT

PAGES = ("architecture.md", "request-walk.md")
# `engine/engine.py: Engine.step`, or `engine/engine.py` alone.
REFERENCE = re.compile(r"`(?P<file>(?!tests/)\w+(?:/\w+)*\.py)(?:: (?P<name>[\w.]+))?`")


def references():
    for page in PAGES:
        text = (ROOT / "docs" / "explanation" / page).read_text("utf-8").replace("\n   ", " ")
        for match in REFERENCE.finditer(text):
            yield match["file"], match["name"]


@pytest.mark.parametrize(("file", "name"), sorted(set(references()), key=str))
def test_each_reference_exists(file, name):
    source = (ROOT / "outrider" / file).read_text("utf-8")
    for part in (name or "").split("."):
        assert not part or re.search(rf"^\s*(?:async )?(?:def|class) {part}\b", source, re.MULTILINE), part


def test_there_are_references():
    assert len(list(references())) > 20
