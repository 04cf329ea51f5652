"""The options of `outrider audit`, besides those for a server."""

from dataclasses import dataclass
from typing import Annotated

from outrider.core.config import DRAFT_OPTIONS, EngineConfig
from outrider.core.option import MEASURE, PYTHON_ONLY, Option, Shown
from outrider.core.params import check_draft_length
from outrider.errors import OutriderError

# The default configuration of an audited engine.
AUDITED_ENGINE = EngineConfig(k=4)
_OPTIONS = (
    "target",
    "device",
    "kernels",
    "quantize",
    "kv_dtype",
    "threads",
    *DRAFT_OPTIONS,
    "proposer",
    "k",
    "verifier",
)
_MIN_SAMPLES = 100  # of a statistical test


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to audit, and how. The values are checked when the record is made."""

    engine: Annotated[
        EngineConfig,
        Shown(
            (*_OPTIONS, "tp", "draft_placement"),
            notes={"k": "Here a number from 1, because every round must have the same; 1, 4 and 8 are tested as well."},
        ),
    ] = AUDITED_ENGINE
    prompts: Annotated[str | None, Option("FILE", MEASURE)] = None
    """JSON lines with prompt or messages, and optionally category. Default: an embedded set."""
    samples: Annotated[int, Option(panel=MEASURE)] = 2000
    """Samples of each statistical test."""
    max_tokens: Annotated[int, PYTHON_ONLY] = 32
    """Output tokens of each prompt in the replay test. The flip test uses four times as many."""

    def __post_init__(self) -> None:
        check_draft_length(self.engine.k, least=1)
        for name, value, least in (("samples", self.samples, _MIN_SAMPLES), ("max_tokens", self.max_tokens, 2)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise OutriderError(f"{name} is {value!r}; use a whole number of at least {least}")
