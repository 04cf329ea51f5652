"""A release has one version, and its wheel has every file of the package."""

import email
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from outrider import __version__
from outrider.models.native.builds import BUILDS, prebuilt_path
from outrider.models.native.library import load_library
from tests.helpers import tiny
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


def copy_without_weights(path, copy):
    """Copy a file. Weights become empty: only their names are checked, and copying them takes most of the time."""
    return Path(copy).touch() if path.endswith(".safetensors") else shutil.copy(path, copy)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the installed wheel, without its dependencies. `scripts/release.sh` installs them as well."""
    source, target = (tmp_path_factory.mktemp(name) for name in ("source", "installed"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, source / PACKAGE.name, ignore=ignored, copy_function=copy_without_weights)
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--no-compile", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", "--quiet", *offline, "--target", target, source]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return target


def test_the_wheel_has_every_file(installed):
    """Also each folder with modules, of which one without `__init__.py` is left out."""
    files = {path.relative_to(PACKAGE) for path in PACKAGE.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    packed = {path.relative_to(installed / "outrider") for path in (installed / "outrider").rglob("*")}
    assert not files - packed


def test_the_wheel_runs(installed, tmp_path):
    (info,) = installed.glob("outrider-*.dist-info")
    metadata = email.message_from_string((info / "METADATA").read_text("utf-8"))
    assert metadata["Version"] == __version__
    assert metadata["Requires-Python"] == PROJECT["project"]["requires-python"]
    assert (info / "licenses" / "LICENSE").is_file()
    code = "import outrider; print(outrider.__file__)"
    environment = os.environ | {"PYTHONPATH": str(installed)}
    for command, shown in (
        ([sys.executable, "-c", code], str(installed / "outrider")),
        ([sys.executable, installed / "bin" / "outrider", "--help"], "Usage: outrider"),
    ):
        done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path, env=environment)
        assert shown in done.stdout


@pytest.mark.skipif(not tiny.compiles(), reason="no C++ compiler")
def test_the_wheel_needs_no_compiler(installed, tmp_path):
    """The library of this machine stands for a prebuilt one. `scripts/wheels.py` takes minutes to compile them."""
    build = next((each for each in reversed(BUILDS) if each.machine == platform.machine()), None)
    if build is None:
        pytest.skip("no kernels are prebuilt for this machine")
    package = installed / "outrider"
    prebuilt = package / "models" / "native" / "prebuilt"
    prebuilt.mkdir()
    shutil.copy(load_library().code._name, prebuilt_path(prebuilt, build.name))
    for weights in package.rglob("*.safetensors"):
        weights.unlink()
        weights.symlink_to(PACKAGE / weights.relative_to(package))
    environment = {"PYTHONPATH": str(installed), "PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    options = ["--target", "@nano", "--proposer", "ngram", "--k", "2", "--max-tokens", "8", "--check", "never"]
    command = [sys.executable, installed / "bin" / "outrider", "run", "--show", *options, "def add(a, b):"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert "8 tokens in" in done.stderr
    assert f"native kernels ({build.name})" in done.stderr
    assert "compil" not in done.stderr
    assert not list((tmp_path / "cache").rglob("kernels-*"))
