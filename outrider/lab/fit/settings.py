"""The options of `outrider fit`."""

import math
from dataclasses import dataclass, field
from typing import Annotated, Any

from outrider.core.config import DRAFT_OPTIONS, TARGET_OPTIONS, EngineConfig
from outrider.core.option import MEASURE, MODEL, Option, Shown, as_json
from outrider.core.params import AUTO, SamplingParams
from outrider.errors import OutriderError
from outrider.lab.common.number_lists import parse_real
from outrider.lab.tune.settings import parse_ks, parse_proposers

LEAST_SAMPLES = 100  # of a statistical test
AUTO_HEAD = "auto"  # the kind of head follows from the size of the target
_TRAIN = "Training"  # title of a group of options
# Options that may change when a fit is resumed, and paths, whose contents are hashed instead.
_NOT_IN_IDENTITY = frozenset(
    {"out", "target", "prompts", "max_minutes", "measure_minutes", "samples", "threads", "overwrite"}
)


def parse_places(option: str, text: str) -> tuple[str, ...]:
    """Return the folders of a list with commas. Raises OutriderError if the list is empty."""
    places = tuple(dict.fromkeys(place.strip() for place in text.split(",") if place.strip()))
    if not places:
        raise OutriderError(f"{option} names no folder; give at least one, or leave it out")
    return places


def parse_ascending(option: str, text: str) -> tuple[float, ...]:
    """Return the numbers of a list as `parse_real`, the smallest one first."""
    return tuple(sorted(parse_real(option, text)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The options of `outrider fit`, checked when made."""

    engine: Annotated[
        EngineConfig,
        Shown(
            (*TARGET_OPTIONS, *DRAFT_OPTIONS, "max_model_len"),
            notes={
                "quantize": "The head is trained on the quantized target.",
                "draft_quantize": "This includes the head. Default: for the drafts of --proposers the fastest of int8,"
                " int4 and the weights as stored, and for the head the weights as stored.",
            },
        ),
    ] = field(default_factory=EngineConfig)
    out: Annotated[str, Option("DIR")]
    """Folder for the configuration, the head and the state. The same command resumes in it."""
    prompts: Annotated[str | None, Option("FILE", MEASURE)] = None
    """JSON lines with prompt or messages, and optionally category. Default: an embedded set."""
    max_minutes: Annotated[float, Option(panel=_TRAIN, min=0.0)] = 30.0
    """Time for training a head; loading, evaluations and measurements come on top. 0: no head. A longer time continues
    an interrupted training, and trains the head of a finished fit anew."""
    measure_minutes: Annotated[float, Option(panel=MEASURE)] = 5.0
    """Time for each of the two measurements, with loading, and for the certificate; the temperatures share it. If it is
    short, outputs are shorter and fewer variants run, so that each runs on two batches of prompts."""
    proposers: Annotated[tuple[str, ...], Option("LIST", MODEL, parse=parse_proposers)] = ()
    """Proposers that need no training, separated by semicolons, besides the drafts of --family. Default: ngram,
    suffix, suffix:100000, recycle, merge(suffix,recycle), on a CPU quantized:int4 and
    best(suffix:100000,quantized:int4), and the default proposer of the target."""
    family: Annotated[tuple[str, ...], Option("LIST", MODEL, parse=parse_places)] = ()
    """Folders, separated by commas, in which to look for smaller models with the tokenizer of the target: folders of
    safetensors and GGUF files. hub: the cache of the Hugging Face Hub. Each is measured as a draft model, also in 8 and
    in 4 bits. Of several GGUF files of one model, those nearest to 16, 8 and 4 bits are measured."""
    head: Annotated[str, Option("KIND", _TRAIN)] = AUTO_HEAD
    """Kind of the head to train; see `outrider train`. auto: slim for targets up to 1024 wide, eagle31 for wider ones,
    mtp below four layers."""
    ks: Annotated[tuple[int | str, ...], Option("LIST", MEASURE, flags="--k", parse=parse_ks)] = (2, 4, 8, AUTO)
    """Draft tokens per round to compare, and auto."""
    batch: Annotated[int, Option(panel=MEASURE, min=1)] = 1
    """Sequences at once."""
    temperatures: Annotated[
        tuple[float, ...], Option("LIST", MEASURE, flags="--temperature", parse=parse_ascending)
    ] = (0.0, 1.0)
    """0 is greedy; the choice is the best one over all of them."""
    max_tokens: Annotated[int, Option(min=3)] = 128
    """Most output tokens, of measurements and of answers to train on."""
    samples: Annotated[int, Option(panel=MEASURE, min=0)] = 400
    """Most samples of each statistical test of the certificate, at least 100. 0: no certificate."""
    seed: Annotated[int, Option(min=0)] = 0
    """Seed of all sampling."""
    overwrite: bool = False
    """Start again in a folder that holds a fit already."""

    def __post_init__(self) -> None:
        if not 0 <= self.max_minutes < math.inf:
            raise OutriderError(f"--max-minutes is {self.max_minutes}; use a number of at least 0")
        if not 0 < self.measure_minutes < math.inf:
            raise OutriderError(f"--measure-minutes is {self.measure_minutes}; use a number above 0")
        if 0 < self.samples < LEAST_SAMPLES:
            raise OutriderError(f"--samples is {self.samples}; use at least {LEAST_SAMPLES}, or 0 for no certificate")
        for temperature in self.temperatures:
            SamplingParams(temperature=temperature)  # raises if it is out of range

    def identity(self) -> dict[str, Any]:
        """Return the options that a resumed fit must have in common with the interrupted one, besides its files."""
        return {name: value for name, value in as_json(self).items() if name not in _NOT_IN_IDENTITY}
