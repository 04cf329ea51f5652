"""The figures of a measurement, as a document keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from outrider.lab.common.memory import MemoryUse
from outrider.lab.common.records import from_json
from outrider.lab.tune.advice import Advice, advise
from outrider.lab.tune.figures import Case, Plain


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The figures of plain decoding and of all proposers."""

    plain: tuple[Plain, ...]  # at every temperature
    cases: tuple[Case, ...]
    memory: Mapping[str, MemoryUse]  # by label of the variants

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Measurement:
        """Return the measurement in a document of `outrider tune`."""
        return from_json(cls, document)

    @cached_property
    def advice(self) -> Advice:
        """The recommendation for all temperatures together."""
        return advise(self.plain, self.cases, every_temperature=True)

    @property
    def tokens_per_s(self) -> float:
        """The speed of plain decoding."""
        return self.plain[0].tokens_per_s or 1.0
