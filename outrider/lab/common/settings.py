"""Options of the commands that measure the answers to prompts."""

from dataclasses import dataclass
from typing import Annotated

from outrider.core.option import MEASURE, SAMPLING, Option


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSettings:
    """Which prompts are answered, and how."""

    prompts: Annotated[str | None, Option("FILE", MEASURE)] = None
    """JSON lines with prompt or messages, or for an encoder-decoder target source, and optionally category. Files of
    MT-Bench, Spec-Bench, SPEED-Bench, HumanEval and GSM8K are read as they are, with all their turns.
    Default: an embedded set."""
    limit: Annotated[int | None, Option(panel=MEASURE)] = None
    """Prompts of each category. Default: all."""
    max_tokens: Annotated[int, Option(panel=SAMPLING)] = 128
    """Most output tokens."""
    seed: Annotated[int, Option(panel=SAMPLING, min=0)] = 0
    """Seed of all sampling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedSettings(PromptSettings):
    """The same for prompts that are measured several times."""

    repeats: Annotated[int, Option(panel=MEASURE)] = 3
    """How often each prompt is measured."""
