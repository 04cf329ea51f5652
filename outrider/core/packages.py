"""Other packages: optional ones, and what they add by entry points."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from outrider.errors import OutriderError


@contextmanager
def needed_by(user: str, extra: str) -> Iterator[None]:
    """Turn an `ImportError` of the block into an `OutriderError` that names the extra with the missing package.

    Args:
        user: what needs the package.
        extra: the extra of outrider to install.
    """
    try:
        yield
    except ImportError as error:
        missing = error.name or f"other packages ({error})"
        raise OutriderError(f'{user} needs {missing}; run pip install "outrider[{extra}]"') from error


@cache
def added(kind: str) -> dict[str, EntryPoint]:
    """Return the entry points outrider.proposers, outrider.verifiers or outrider.commands, by name."""
    return {point.name: point for point in entry_points(group=f"outrider.{kind}")}


def load_added(kind: str, name: str) -> Any:
    """Return the object that a package has added; None: there is none with this name.

    Raises:
        OutriderError: it cannot be imported.
    """
    point = added(kind).get(name)
    if point is None:
        return None
    try:
        return point.load()
    except Exception as error:  # the code of the package can raise anything
        package = point.dist.name if point.dist else point.value
        raise OutriderError(
            f"{name} of the package {package} cannot be imported ({error}); update it, or remove it"
        ) from error
