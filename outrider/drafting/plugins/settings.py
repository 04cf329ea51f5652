"""The settings of a plug-in: which proposer drafts, and how much."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from outrider.core.params import AUTO, is_whole
from outrider.drafting.propose.registry import COMBINATIONS, NAMED, check_proposer, parse
from outrider.errors import OutriderError

DEFAULT_PROPOSER = "suffix:100000"  # that of an engine whose target has no draft, see `default_proposer`
# Proposers that read nothing but tokens.
LOOKUPS = ("none", "ngram", "suffix", "group", "retrieval")
_KEYS = ("proposer", "k")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """The facts of the engine that a plug-in runs in."""

    vocab: int  # number of ids that the target has logits for
    slots: int  # most sequences of a step
    context: int  # most tokens of a sequence
    most: int  # most draft tokens of a sequence in a step
    on_cpu: bool  # whether the target runs on a CPU
    tokenizer: Callable[[], Any]  # reads the target's tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginSettings:
    """The settings of a user."""

    proposer: str = DEFAULT_PROPOSER
    k: int | str = AUTO  # draft tokens of a sequence in a step; auto: the planner chooses

    @classmethod
    def read(cls, fields: Mapping[str, Any], *, prefix: str, most: int) -> PluginSettings:
        """Return the settings in `fields`, whose names begin with `prefix`. Other names are ignored.

        Args:
            fields: values by name.
            prefix: what the names of the settings begin with.
            most: most draft tokens of a sequence that the engine verifies in a step.

        Raises:
            OutriderError: a setting is unknown, or its value is wrong.
        """
        known = [prefix + key for key in _KEYS]
        for name in fields:
            if name.lower().startswith(prefix) and name not in known:
                raise OutriderError(f"{name} is not a setting of the drafts; use {' or '.join(known)}")
        given = {key: fields[prefix + key] for key in _KEYS if prefix + key in fields}
        settings = cls(**given)
        _check_proposer(settings.proposer, prefix)
        _check_k(settings.k, prefix, most)
        return settings


def _check_proposer(proposer: Any, prefix: str) -> None:
    name = f"{prefix}proposer"
    usable = f"use {', '.join(LOOKUPS)}, a combination of them such as merge(suffix,ngram), or pkg.module:Class"
    if not isinstance(proposer, str):
        raise OutriderError(f"{name} is {proposer!r}, {_kind(proposer)}, and must be a string; {usable}")
    known = {*NAMED, *COMBINATIONS} - {*LOOKUPS, *COMBINATIONS}
    for used in parse(proposer).names():
        if used in known:
            raise OutriderError(
                f"{name} is {proposer}, but {used} needs a model or the logits of the target, which this engine"
                f" does not hand to a plug-in; {usable}"
            )
    check_proposer(proposer)


def _check_k(k: Any, prefix: str, most: int) -> None:
    if k == AUTO:
        return
    if not is_whole(k) or not 0 <= k <= most:
        kind = "" if is_whole(k) else f", {_kind(k)}"
        raise OutriderError(
            f'{prefix}k is {k!r}{kind}; use "auto", or a whole number of draft tokens from 0 to the {most} that the'
            " engine verifies, without quotes"
        )


def _kind(value: Any) -> str:
    """Return the type of a wrong value in words."""
    return "a string" if isinstance(value, str) else f"a value of the type {type(value).__name__}"
