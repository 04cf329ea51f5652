"""The folder in which the native kernels are compiled."""

import subprocess
import sys
from time import sleep

import pytest

from outrider.models.native.compiling import compile_kernels

WRITER = (sys.executable, "-c", "import sys; open(sys.argv[-1], 'w').close()")
INTERRUPTED = """
import sys
from pathlib import Path
from outrider.models.native.compiling import compile_kernels
compile_kernels(Path(sys.argv[1]), ("sh", "-c", "exec sleep 600"), lambda objects, library: (), lambda: None)
"""


def link(objects, library):
    return (*WRITER, library)


@pytest.fixture
def slow(tmp_path):
    """A process that compiles, and the folder of its objects."""
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path / "slow.so")]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        while not list(tmp_path.iterdir()):
            assert process.poll() is None
            sleep(0.1)
        (folder,) = tmp_path.iterdir()
        yield process, folder
    finally:
        subprocess.run(["kill", "-KILL", "--", f"-{process.pid}"], check=False)
        process.wait()


def test_a_compile_removes_what_an_interrupted_one_has_left(slow, tmp_path):
    process, folder = slow
    process.kill()
    process.wait()
    assert folder.is_dir()
    compile_kernels(tmp_path / "kernels.so", WRITER, link, lambda: None)
    assert [path.name for path in tmp_path.iterdir()] == ["kernels.so"]


def test_a_compile_keeps_the_folder_of_a_running_one(slow, tmp_path):
    _, folder = slow
    compile_kernels(tmp_path / "kernels.so", WRITER, link, lambda: None)
    assert sorted(path.name for path in tmp_path.iterdir()) == [folder.name, "kernels.so"]
