"""The recipes install the same packages: a CPU build of torch first, then Outrider with its server and GGUF files."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXTRAS = '[serve,gguf]"'


@pytest.mark.parametrize("file", ["deploy/Dockerfile", "docs/how-to/deploy.md"])
def test_torch_comes_before_the_package(file):
    installs = re.findall(r"pip install [^\n]*", (ROOT / file).read_text("utf-8"))
    torch, package = (next(i for i, line in enumerate(installs) if word in line) for word in ("torch==", EXTRAS))
    assert torch < package
    assert not [line for line in installs if '[serve]"' in line]


def test_the_documented_build_of_torch_is_for_a_cpu():
    page = (ROOT / "docs/how-to/deploy.md").read_text("utf-8")
    assert "docker build -f deploy/Dockerfile --build-arg TORCH_INDEX=URL" in page
    assert "pip install --index-url URL torch==" in page


def test_systemd_unit_does_not_override_variables():
    start = re.search(r"^ExecStart=(.*)$", (ROOT / "deploy/outrider.service").read_text("utf-8"), re.MULTILINE)[1]
    assert "--host" not in start
    assert "--port" not in start
