"""Import a class or function where it is used."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def named(path: str) -> Any:
    """Return a class or function of `outrider`, such as `core.proposer:NoProposer`."""
    module, _, attribute = path.partition(":")
    return getattr(import_module(f"outrider.{module}"), attribute)
