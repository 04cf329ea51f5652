"""Settings of a benchmark, checked before any model is loaded."""

from collections.abc import Collection
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any

from outrider.core.config import ENGINE_OPTIONS, EngineConfig
from outrider.core.option import MEASURE, MODEL, OUTPUT, SAMPLING, Option, Shown, as_json
from outrider.core.params import SamplingParams, check_draft_length
from outrider.errors import OutriderError
from outrider.lab.common.number_lists import parse_real, parse_whole, sweep_values
from outrider.lab.common.settings import RepeatedSettings

_DEFAULT = EngineConfig()
# Fields of the engine that a file of `--config` may not give.
_SET_BY_BENCH = {
    "max_num_seqs": "runs --batch sequences at once",
    "max_model_len": "has --context",
    "prefix_caching": "processes each prompt anew",
}
# Options that have no effect with --calibrate and --scaling, which only measure passes.
_MEASURING = ("k", "plan", "sweep", "temperature", "report", *(each.name for each in fields(RepeatedSettings)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """The values of each swept axis. One axis varies at a time; () means that an axis is not swept."""

    k: tuple[int, ...] = ()  # draft tokens per round; 0 is plain decoding
    batch: tuple[int, ...] = ()  # sequences at once
    context: tuple[int, ...] = ()  # tokens of prompt and completion together; prompts are lengthened to fill it
    temperature: tuple[float, ...] = ()


def parse_sweep(option: str, text: str) -> tuple[int, ...]:
    """Return the values of k in "k=0..12". Raises OutriderError if `text` does not have this form."""
    axis, _, values = text.partition("=")
    if axis.strip() != "k":
        raise OutriderError(
            f"{option} {text!r} does not sweep k; use for example {option} k=0..8. To sweep batch, context or"
            " temperature, give a list to its own option: --batch 1,4"
        )
    return parse_whole(f"{option} k", values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(RepeatedSettings):
    """The options of `outrider bench`. The first value of each list is the default of sweeps."""

    engine: Annotated[
        EngineConfig,
        Shown(
            ENGINE_OPTIONS,
            notes={"k": "At least 1 here, because plain decoding is always measured."},
            config=True,
        ),
    ] = field(default_factory=EngineConfig)
    contexts: Annotated[tuple[int, ...], Option("TOKENS", MODEL, flags="--context", parse=parse_whole)] = ()
    """Tokens of prompt and completion together. A list, such as 512,2048, is a sweep: each prompt is extended with
    other prompts to this length. Default: the limit of the model, at most 8192."""
    batches: Annotated[tuple[int, ...], Option("LIST", MEASURE, flags="--batch", parse=parse_whole)] = (1,)
    """Sequences at once. A list, such as 1,2,4, is a sweep."""
    ks: Annotated[tuple[int, ...], Option("k=LIST", MEASURE, flags="--sweep", parse=parse_sweep)] = ()
    """Measure each k of a list, such as k=0..12 or k=0,2,4,8, interleaved with plain decoding. While one axis is swept,
    the others keep their first value."""
    temperatures: Annotated[tuple[float, ...], Option("T", SAMPLING, flags="--temperature", parse=parse_real)] = (0.0,)
    """0 is greedy. A list, such as 0,0.7,1, is a sweep."""
    report: Annotated[str | None, Option("FILE", OUTPUT)] = None
    """Write the tables and the JSON document as an HTML page, for example report.html."""
    calibrate: Annotated[bool, Option(panel=MEASURE)] = False
    """Only measure what forward passes cost on this machine, for --k auto."""
    scaling: Annotated[tuple[int, ...], Option("LIST", MEASURE, parse=parse_whole)] = ()
    """Only measure passes of the target with each number of CPU threads of a list, such as 1,2,4,8."""
    ceiling: Annotated[tuple[float, ...], Option("LIST", MEASURE, parse=parse_real)] = ()
    """Only measure a draft that costs nothing: record greedy plain decoding, then replay it with each acceptance of a
    list, such as 1,0.8,0.6, at each --batch and --sweep k (2,4,8,16 without it)."""

    def __post_init__(self) -> None:
        self._check_engine()
        counts = {"repeats": self.repeats, "limit": self.limit, "batch": min(self.batches)}
        for name, value in counts.items():
            if value is not None and value < 1:
                raise OutriderError(f"{name} is {value}; use at least 1")
        if self.scaling and (min(self.scaling) < 1 or self.engine.device not in ("auto", "cpu")):
            raise OutriderError(
                "--scaling measures threads of a CPU; give it numbers of at least 1, and no other --device"
            )
        for k in self.ks:
            check_draft_length(k)
        for acceptance in self.ceiling:
            if not 0 <= acceptance <= 1:
                raise OutriderError(f"--ceiling has the acceptance {acceptance:g}; use numbers from 0 to 1")
        if self.ceiling and 0 in self.ks:
            raise OutriderError("--ceiling replays drafts, and --sweep has k = 0; use k of at least 1")
        if self.max_tokens < 2:
            raise OutriderError(
                f"max_tokens is {self.max_tokens}; a speed needs a first and a last token, so use at least 2"
            )
        shortest = min(self.sweep.context, default=None)
        if shortest is not None and shortest <= self.max_tokens:
            raise OutriderError(
                f"context of the sweep is {shortest} and max_tokens is {self.max_tokens}, which leaves no tokens for a"
                " prompt; use a larger context or fewer max_tokens"
            )
        for temperature in self.temperatures:
            SamplingParams(temperature=temperature)  # raises if it is out of range

    def _check_engine(self) -> None:
        for name, reason in _SET_BY_BENCH.items():
            if getattr(self.engine, name) != getattr(_DEFAULT, name):
                raise OutriderError(f"{name} is no setting of outrider bench, which {reason}; leave it out")
        if self.engine.k == 0:
            raise OutriderError(
                "k is 0, so there is nothing to compare with plain decoding; give --k of at least 1, and --proposer if"
                " the file of --config recommends none"
            )

    @property
    def batch(self) -> int:
        """Sequences at once, where they are not swept."""
        return self.batches[0]

    @property
    def temperature(self) -> float:
        """The temperature, where it is not swept."""
        return self.temperatures[0]

    @property
    def sweep(self) -> Sweep:
        """The swept axes. A single value is no sweep."""
        return Sweep(
            k=self.ks,
            batch=sweep_values(self.batches),
            context=sweep_values(self.contexts),
            temperature=sweep_values(self.temperatures),
        )

    @property
    def max_num_seqs(self) -> int:
        """Sequences at once in the largest batch."""
        return max(self.batches)

    @property
    def max_model_len(self) -> int | None:
        """Tokens of the longest sequence; None: the maximum of the model."""
        return max(self.contexts, default=None)

    def arguments(self) -> dict[str, Any]:
        """Return the options for JSON: the first value of each list, and the sweep."""
        context = self.contexts[0] if len(self.contexts) == 1 else None
        first = {"batch": self.batch, "temperature": self.temperature, "context": context}
        return as_json(self) | first | {"sweep": asdict(self.sweep)}


def check_mode(given: Collection[str]) -> None:
    """Refuse options that have no effect with --calibrate, --scaling or --ceiling.

    Raises:
        OutriderError: `given` has one of these three and an option without effect.
    """
    useless = {
        "calibrate": _MEASURING,
        "scaling": (*_MEASURING, "calibrate", "ceiling", "threads", "proposer", "tp"),
        "ceiling": ("k", "plan", "proposer", "temperature", "context", "report", "calibrate"),
    }
    for mode, names in useless.items():
        for name in names:
            if {mode, name} <= set(given):
                option = name.replace("_", "-")
                raise OutriderError(f"--{mode} does not use --{option}; leave --{option} or --{mode} out")
