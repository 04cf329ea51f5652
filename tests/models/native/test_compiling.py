"""The folder in which the native kernels are compiled."""

import fcntl
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from errno import ENOLCK
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


def test_a_second_compile_waits_for_the_first_and_uses_its_library(slow, tmp_path, caplog):
    process, _ = slow
    refused = ("sh", "-c", "exit 1")
    with ThreadPoolExecutor() as pool:
        second = pool.submit(compile_kernels, tmp_path / "slow.so", refused, link, lambda: None)
        while "waiting for another process" not in caplog.text:
            assert not second.done()
            sleep(0.1)
        (tmp_path / "slow.so").touch()  # as if the first one had succeeded
        process.kill()
        second.result()


def test_without_locks_the_folder_of_another_compile_stays(slow, tmp_path, monkeypatch):
    _, folder = slow

    def fail(lock, operation):
        raise OSError(ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    compile_kernels(tmp_path / "kernels.so", WRITER, link, lambda: None)
    assert sorted(path.name for path in tmp_path.iterdir()) == [folder.name, "kernels.so"]
