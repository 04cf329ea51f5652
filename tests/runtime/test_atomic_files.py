"""Tests of files that are written whole or not at all."""

import errno
import os

import pytest

from outrider.errors import OutriderError
from outrider.runtime.atomic_files import check_folder, write_whole


@pytest.mark.parametrize(
    ("number", "fix"),
    [(errno.ENOSPC, "free some space"), (errno.EDQUOT, "free some space"), (errno.EROFS, "name a file in a writable")],
)
def test_file_that_cannot_be_written_stays_as_it_was(number, fix, tmp_path, monkeypatch):
    file = tmp_path / "plan.json"
    write_whole(file, "before")

    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OutriderError, match=f"plan.json cannot be written .*; {fix}"):
        write_whole(file, "after")
    assert file.read_text() == "before"
    assert list(tmp_path.iterdir()) == [file]


def test_folder_without_a_name_is_not_the_current_one():
    with pytest.raises(OutriderError, match="--out is empty; name a folder"):
        check_folder("", "--out")
