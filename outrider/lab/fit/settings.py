"""The options of `outrider fit`."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from outrider.core.option import MEASURE, MODEL, Option
from outrider.core.params import AUTO, SamplingParams
from outrider.errors import OutriderError
from outrider.lab.common.number_lists import parse_real

LEAST_SAMPLES = 100  # of a statistical test
AUTO_HEAD = "auto"  # the kind of head follows from the size of the target
_MODEL, _MEASURE, _TRAIN = "Models", "Measuring", "Training"
# Options that may change when a fit is resumed, and paths, whose contents are hashed instead.
_NOT_IN_IDENTITY = frozenset(
    {"out", "target", "prompts", "minutes", "measure_minutes", "samples", "threads", "overwrite"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The options of `outrider fit`, checked when made."""

    out: Annotated[str, Option("DIR")]
    """Folder for the configuration, the head and the state. The same command resumes in it."""
    target: Annotated[str | None, Option("DIR", MODEL)] = None
    """Folder of a language model, a GGUF file, or a model of the Hugging Face Hub: org/name, org/name@revision or
    org/name:Q4_K_M. Default: @mini, an embedded model."""
    prompts: Annotated[str | None, Option("FILE", MEASURE)] = None
    """JSON lines with prompt or messages, and optionally category. Default: an embedded set."""
    minutes: Annotated[float, Option(panel=_TRAIN, min=0.0)] = 30.0
    """Time for training a head; loading and measuring come on top. 0: no head. A longer time continues an interrupted
    training, and trains the head of a finished fit anew."""
    measure_minutes: Annotated[float, Option(panel=MEASURE)] = 5.0
    """Time for each of the two measurements, and for the certificate; the temperatures share it. If it is short,
    outputs are shorter and fewer variants run, so that each runs on two batches of prompts."""
    proposers: Annotated[str | None, Option("LIST", MODEL)] = None
    """Proposers that need no training, separated by semicolons. Default: ngram, suffix, suffix:100000, recycle,
    merge(suffix,recycle), on a CPU quantized:int4 and best(suffix:100000,quantized:int4), and the default proposer of
    the target."""
    head: Annotated[str, Option("KIND", _TRAIN)] = AUTO_HEAD
    """Kind of the head to train; see `outrider train`. auto: slim for targets up to 1024 wide, eagle31 for wider ones,
    mtp below four layers."""
    k: Annotated[str, Option("LIST", MEASURE)] = f"2,4,8,{AUTO}"
    """Draft tokens per round to compare, and auto."""
    batch: Annotated[int, Option(panel=MEASURE, min=1)] = 1
    """Sequences at once."""
    temperature: Annotated[str, Option("LIST", MEASURE)] = "0,1"
    """0 is greedy; the choice is the best one over all of them."""
    max_tokens: Annotated[int, Option(min=3)] = 128
    """Most output tokens, of measurements and of answers to train on."""
    samples: Annotated[int, Option(panel=MEASURE, min=0)] = 400
    """Most samples of each statistical test of the certificate, at least 100. 0: no certificate."""
    seed: Annotated[int, Option(min=0)] = 0
    """Seed of all sampling."""
    dtype: Annotated[str, Option("NAME", MODEL)] = "auto"
    """auto, float32, bfloat16 or float16."""
    device: Annotated[str, Option("NAME", MODEL)] = "auto"
    """auto, cpu, cuda, ..."""
    kernels: Annotated[str, Option("NAME", MODEL)] = "auto"
    """auto, native or torch."""
    quantize: Annotated[str | None, Option("NAME", MODEL)] = None
    """int8 or int4 weights for the target, on a CPU. The head is trained on the quantized target. Default: the weights
    as stored."""
    draft_window: Annotated[int | None, Option("TOKENS", MODEL)] = None
    """The latest tokens that a draft model or draft head reads. Default: as many as it was made for."""
    draft_quantize: Annotated[str | None, Option("NAME", MODEL)] = None
    """int8 or int4 weights for drafts, LM head included, on the native kernels of a CPU. The output does not change.
    Default: for the drafts of --proposers the fastest of int8, int4 and the weights as stored, and for the head the
    weights as stored."""
    threads: Annotated[int | None, Option(panel=MODEL)] = None
    """CPU threads. Default: OMP_NUM_THREADS, or else the physical cores of one NUMA node."""
    max_model_len: Annotated[int | None, Option(panel=MODEL)] = None
    """Tokens of prompt and completion together. Default: the limit of the model, at most 8192."""
    overwrite: bool = False
    """Start again in a folder that holds a fit already."""

    def __post_init__(self) -> None:
        if not 0 <= self.minutes < math.inf:
            raise OutriderError(f"--minutes is {self.minutes}; use a number of at least 0")
        if not 0 < self.measure_minutes < math.inf:
            raise OutriderError(f"--measure-minutes is {self.measure_minutes}; use a number above 0")
        if 0 < self.samples < LEAST_SAMPLES:
            raise OutriderError(f"--samples is {self.samples}; use at least {LEAST_SAMPLES}, or 0 for no certificate")

        for temperature in self.temperatures:
            SamplingParams(temperature=temperature)  # raises if it is out of range

    @property
    def temperatures(self) -> tuple[float, ...]:
        """The temperatures, ascending."""
        return tuple(sorted(parse_real("--temperature", self.temperature)))

    def identity(self) -> dict[str, Any]:
        """Return the options that a resumed fit must have in common with the interrupted one, besides its files."""
        options = {name: value for name, value in asdict(self).items() if name not in _NOT_IN_IDENTITY}
        return options | {"temperature": list(self.temperatures)}
