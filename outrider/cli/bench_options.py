"""The options of `outrider bench` that say what to measure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

from outrider.cli.options import EngineOptions
from outrider.core.option import MEASURE, MODEL, OUTPUT, SAMPLING, Option
from outrider.errors import OutriderError
from outrider.lab.common.number_lists import parse_real, parse_whole, sweep_values

if TYPE_CHECKING:
    from outrider.lab.bench.settings import Settings

# Options that have no effect with --calibrate.
_NOT_FOR_CALIBRATION = (
    "k",
    "plan",
    "prompts",
    "limit",
    "repeats",
    "sweep",
    "peer",
    "temperature",
    "max_tokens",
    "seed",
    "report",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What to measure, as text of the command line."""

    context: Annotated[str | None, Option("TOKENS", MODEL)] = None
    """Tokens of prompt and completion together. A list, such as 512,2048, is a sweep: each prompt is extended with
    other prompts to this length. Default: the limit of the model, at most 8192."""
    prompts: Annotated[str | None, Option("FILE", MEASURE)] = None
    """JSON lines with prompt or messages, or for an encoder-decoder target source, and optionally category. Default: an
    embedded set."""
    limit: Annotated[int | None, Option(panel=MEASURE)] = None
    """Prompts of each category. Default: all."""
    repeats: Annotated[int, Option(panel=MEASURE)] = 3
    """How often each prompt is measured."""
    batch: Annotated[str, Option("LIST", MEASURE)] = "1"
    """Sequences at once. A list, such as 1,2,4, is a sweep."""
    sweep: Annotated[str | None, Option("k=LIST", MEASURE)] = None
    """Measure each k of a list, such as k=0..12 or k=0,2,4,8, interleaved with plain decoding. While one axis is swept,
    the others keep their first value."""
    peer: Annotated[str | None, Option("NAME", MEASURE)] = None
    """Measure another engine as well: transformers."""
    temperature: Annotated[str, Option("T", SAMPLING)] = "0"
    """0 is greedy. A list, such as 0,0.7,1, is a sweep."""
    max_tokens: Annotated[int, Option(panel=SAMPLING)] = 128
    """Most output tokens."""
    seed: Annotated[int, Option(panel=SAMPLING, min=0)] = 0
    """Seed of all sampling."""
    report: Annotated[str | None, Option("FILE", OUTPUT)] = None
    """Write an HTML page with plots, for example report.html. Needs pip install "outrider[report]"."""
    calibrate: Annotated[bool, Option(panel=MEASURE)] = False
    """Only measure what forward passes cost on this machine, for --k auto."""

    def settings(self, models: EngineOptions) -> Settings:
        """Return the settings of the benchmark of these models. The first value of each list is the default of sweeps.

        Raises:
            OutriderError: a value is not valid.
        """
        from outrider.lab.bench import settings

        batches = parse_whole("--batch", self.batch)
        temperatures = parse_real("--temperature", self.temperature)
        contexts = parse_whole("--context", self.context) if self.context else ()
        return settings.Settings(
            **asdict(models),
            prompts=self.prompts,
            limit=self.limit,
            repeats=self.repeats,
            batch=batches[0],
            peer=self.peer,
            temperature=temperatures[0],
            max_tokens=self.max_tokens,
            seed=self.seed,
            context=contexts[0] if len(contexts) == 1 else None,
            sweep=settings.Sweep(
                k=settings.parse_sweep("--sweep", self.sweep) if self.sweep else (),
                batch=sweep_values(batches),
                context=sweep_values(contexts),
                temperature=sweep_values(temperatures),
            ),
        )


def check_calibration(given: set[str]) -> None:
    """Refuse options that have no effect with --calibrate.

    Raises:
        OutriderError: `given` has one of them.
    """
    if useless := [name for name in _NOT_FOR_CALIBRATION if name in given]:
        raise OutriderError(
            f"--calibrate only measures passes; leave --{useless[0].replace('_', '-')} or --calibrate out"
        )
