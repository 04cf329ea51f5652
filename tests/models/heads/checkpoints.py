"""Random draft heads, exported to folders as each format stores them."""

import torch
from typer.testing import CliRunner

from outrider.cli.app import app
from outrider.models.heads.files import write_folder
from outrider.models.heads.formats.base import TargetInfo
from outrider.models.heads.formats.registry import format_of
from tests.helpers.heads import HEAD, KINDS, TABLE, cases, random_draft

SMALL = cases()
MINI = cases(hidden=384, vocab=12288)
TARGET = TargetInfo(vocab=96, hidden=64, layers=8, head=lambda: HEAD, embedding=lambda: TABLE, layer_types=KINDS)
CPU = torch.device("cpu")


def export_case(folder, case, target=None, *, of=SMALL):
    """Export a random draft head to a folder. Return its module."""
    name, description = of[case]
    target = target or TARGET
    module = random_draft(description, table=target.embedding())
    format = format_of(name)
    config, tensors = format.write(description, module.state_dict(), target)
    write_folder(folder, config, tensors, format.file)
    return module


def export_changed(folder, case, change):
    """Export a random draft head after `change` has modified its config and tensors. Return the folder."""
    name, description = SMALL[case]
    format = format_of(name)
    config, tensors = format.write(description, random_draft(description).state_dict(), TARGET)
    change(config, tensors)
    write_folder(folder, config, tensors, format.file)
    return folder


def random_case(case):
    """Return the description of a case, and random weights."""
    description = SMALL[case][1]
    return description, random_draft(description).state_dict()


def all_equal(tensors, expected):
    """Return whether two dictionaries of tensors are equal."""
    return tensors.keys() == expected.keys() and all(
        torch.equal(tensors[name], value) for name, value in expected.items()
    )


def invoke(*arguments):
    """Run the command line."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])
