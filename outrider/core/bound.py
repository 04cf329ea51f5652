"""Bounds of lossy verification rules: how far the emitted tokens may be from the target's distribution.

A bound holds at each position, given the tokens before it. p is the target's distribution there.
"""

from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True)
class TotalVariation:
    """The emitted token has a distribution with a total variation distance from p of at most `value`."""

    value: float
    kind: ClassVar[str] = "tvd"

    def __str__(self) -> str:
        return f"total variation distance of at most {self.value:g} per token"

    def as_dict(self) -> dict[str, Any]:
        """Return the bound as JSON values."""
        return {"kind": self.kind, "value": self.value}


@dataclass(frozen=True, slots=True)
class BinDistance:
    """The emitted token is at most `value` bins from a token that is sampled from p.

    Tokens outside the bins keep their probability under p.
    """

    value: int
    kind: ClassVar[str] = "bin distance"

    def __str__(self) -> str:
        return f"at most {self.value} bins from the target's own token"

    def as_dict(self) -> dict[str, Any]:
        """Return the bound as JSON values."""
        return {"kind": self.kind, "value": self.value}


@dataclass(frozen=True, slots=True)
class GroupExact:
    """Each group of tokens is emitted with its probability under p. `groups` names the groups.

    A token of several groups counts for each of them in equal parts. The bound does not cover the tokens in a group.
    """

    groups: str
    kind: ClassVar[str] = "group"

    def __str__(self) -> str:
        return f"exact for groups of tokens: {self.groups}"

    def as_dict(self) -> dict[str, Any]:
        """Return the bound as JSON values."""
        return {"kind": self.kind, "value": self.groups}


Bound = TotalVariation | BinDistance | GroupExact
