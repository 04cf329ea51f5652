"""What a start imports: torch takes seconds, and transformers takes more."""

import subprocess
import sys

import pytest

from tests.helpers import tiny

_RUN = "import sys; from outrider.cli.app import app\ntry: app({arguments!r})\nexcept SystemExit: pass\n"
_SHOW = "print(*sorted({'numpy', 'torch', 'transformers'} & sys.modules.keys()))"


def _imports(*arguments):
    """Return which of the slow packages a command has imported."""
    code = _RUN.format(arguments=list(arguments)) + _SHOW
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.splitlines()[-1].split(), done.stderr


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nofile.gguf", "nofile.gguf cannot be read (No such file or directory)"),
        ("nodir", "nodir is not a folder"),
        ("@nobody", "@nobody does not come with Outrider"),
    ],
)
def test_missing_target_is_an_error_before_packages_are_imported(name, message):
    imported, errors = _imports("run", "--target", name)
    assert not imported
    assert message in errors
    assert len(errors.splitlines()) == 1


@pytest.mark.skipif(not tiny.compiles(), reason="needs a C++ compiler")
def test_model_on_the_native_kernels_starts_without_transformers():
    imported, _ = _imports("run", "--target", "@nano", "--check", "never", "--max-tokens", "2", "--chat", "hi")
    assert imported == ["numpy", "torch"]
