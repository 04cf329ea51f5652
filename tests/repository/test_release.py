"""A release has one version, and its wheel has every file of the package."""

from __future__ import annotations

import re
import tomllib

from outrider import __version__
from tests.helpers.source import PACKAGE, ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def test_the_version_is_written_once():
    assert "version" not in PROJECT["project"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "outrider._version.__version__"}


def test_pages_and_manifests_show_the_version():
    for file, shown in (
        ("CHANGELOG.md", r"^## \[(\d[\w.]*)\]"),
        ("docs/getting-started/installation.md", r"^outrider (\d[\w.]*)$"),
        ("deploy/kubernetes/kustomization.yaml", r'newTag: "(.*)"'),
    ):
        found = re.search(shown, (ROOT / file).read_text("utf-8"), re.MULTILINE)
        assert found is not None, file
        assert found[1] == __version__, file


def test_the_wheel_has_every_file():
    """`scripts/release.sh` compares the wheel itself."""
    files = {path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["outrider"]
    packed = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    assert files
    assert not files - packed


def test_every_folder_with_modules_is_a_package():
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert not [folder for folder in folders if not (folder / "__init__.py").is_file()]
