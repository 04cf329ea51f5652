"""Ctrl-C while a command imports its packages."""

import subprocess
import sys

import pytest

_INTERRUPTED = """
import os, signal, sys, types
sys.argv = ["outrider", "--version"]
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
            print("not interrupted")
sys.meta_path.insert(0, Finder())
from outrider.__main__ import main
main()
"""


@pytest.mark.parametrize("module", ["outrider.cli.app", "typer", "outrider.core.option"])
def test_ctrl_c_in_an_import_prints_nothing(module):
    code = _INTERRUPTED.format(module=module)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=150)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_ctrl_c_outside_of_imports_is_an_exception():
    """So that a command can end its work in order."""
    code = """
import os, signal
from outrider.cli import app
def interrupted():
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        print("in order")
        raise
app.main = interrupted
from outrider.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=150)
    assert (done.returncode, done.stdout, done.stderr) == (130, "in order\n", "")
