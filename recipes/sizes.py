"""Sizes of models on the command line, such as 8x384: layers and width."""

import re
from typing import NamedTuple

import typer


class Size(NamedTuple):
    """The size of a model."""

    layers: int
    width: int

    def __str__(self) -> str:
        return f"{self.layers}x{self.width}"


def parse_size(option: str, text: str, *, multiple: int = 1) -> Size:
    """Return the size that an option gives as LAYERSxWIDTH.

    Raises:
        typer.BadParameter: the text has another form, or the width is not a multiple of `multiple`.
    """
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if match is None:
        raise typer.BadParameter(f"{option} is {text!r}; use LAYERSxWIDTH, such as 8x384")
    size = Size(layers=int(match[1]), width=int(match[2]))
    if size.width % multiple:
        raise typer.BadParameter(f"{option} has width {size.width}; use a multiple of {multiple}")
    return size
