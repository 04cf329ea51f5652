"""The examples are short, and run."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from tests.helpers.variants import variants

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))
SHORT = [path for path in EXAMPLES if path.name != "certify_pair.py"]


@pytest.mark.parametrize("path", variants(EXAMPLES, fast=SHORT), ids=lambda path: path.name)
def test_example(path, capsys):
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out
