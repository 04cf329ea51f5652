"""Tests of commands in ranks of tensor parallelism."""

import pytest
import typer

from outrider.cli import ranks


class RecordedRanks:
    """Records how a command leaves the ranks."""

    rank = 0

    def __init__(self):
        self.calls = []

    def leave(self):
        self.calls.append("leave")

    def abandon(self, reason):
        self.calls.append(f"abandon: {reason}")


def test_an_exit_code_of_a_command_is_no_failure_of_its_rank(monkeypatch):
    recorded = RecordedRanks()
    monkeypatch.setattr(ranks, "join", lambda tp, device: recorded)
    with pytest.raises(typer.Exit), ranks.joined(2, "cpu"):
        raise typer.Exit(1)
    assert recorded.calls == ["leave"]
