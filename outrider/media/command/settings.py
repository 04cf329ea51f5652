"""The options of `outrider media demo`, `bench` and `tune`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import typer

from outrider.errors import OutriderError
from outrider.lab.common.number_lists import parse_real

_MODEL, _MEASURE, _OUTPUT = "Models", "Measuring", "Output"
_MIN_PROMPTS = 2

Models = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        help="Folder that recipes.video or recipes.audio wrote. Default: the embedded video models.",
        rich_help_panel=_MODEL,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        help="CPU threads. Default: OMP_NUM_THREADS, or else the physical cores of one NUMA node.",
        rich_help_panel=_MODEL,
    ),
]
Aggregate = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="How the scores of a block's frames, or windows of audio, become one: min, mean, or window:N, the worst"
        " mean of N in a row.",
        rich_help_panel=_MODEL,
    ),
]
EagerCommits = Annotated[
    bool,
    typer.Option(
        "--eager-commits",
        help="Write each block into the caches at once, not when a cache is needed. The output is the same.",
        rich_help_panel=_MODEL,
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the captions and of the noise.", rich_help_panel=_MEASURE)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """The options of `outrider media demo`."""

    out: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="The video: .mp4 or .gif; without an encoder for mp4 it is a gif. Of audio models: .wav; each of the"
            " outputs is a file with its name. Default: media.mp4 or media.wav.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None
    prompt: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="Caption, such as 'a red circle moving right from the top left on a black background', or 'a bright"
            " arpeggio on a low do at a fast tempo'. Default: the first of these, or a random one for other"
            " models.",
        ),
    ] = None
    models: Models = None
    threshold: Annotated[
        float | None,
        typer.Option(
            metavar="SCORE",
            help="Least score of an accepted draft. Default: that of --calibration.",
            rich_help_panel=_MODEL,
        ),
    ] = None
    calibration: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="A file of `outrider media tune --out`. Default: the calibration in the folder of the models.",
            rich_help_panel=_MODEL,
        ),
    ] = None
    aggregate: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="With --threshold: min, mean, or window:N, the worst mean of N in a row. Default: min.",
            rich_help_panel=_MODEL,
        ),
    ] = None
    budget: Annotated[
        int | None,
        typer.Option(help="Most blocks that the target makes. Default: no limit.", rich_help_panel=_MODEL),
    ] = None
    eager_commits: EagerCommits = False
    fps: Annotated[
        float | None, typer.Option(help="Frames per second of a video. Default: 12.", rich_help_panel=_OUTPUT)
    ] = None
    seed: Seed = 0
    threads: Threads = None

    def __post_init__(self) -> None:
        if self.fps is not None and not 1 <= self.fps <= 50:
            raise OutriderError(f"--fps is {self.fps:g}; use 1 to 50")
        if self.threshold is not None and self.calibration is not None:
            raise OutriderError("--threshold and --calibration both set the threshold; leave one of them out")
        if self.threshold is None and self.aggregate is not None:
            raise OutriderError("--aggregate belongs to --threshold; a calibration has its own aggregate")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """The options of `outrider media bench`."""

    prompts: Annotated[int, typer.Option(metavar="N", help="How many random captions.", rich_help_panel=_MEASURE)] = 200
    rounds: Annotated[
        int,
        typer.Option(
            min=1,
            help="Parts of the prompts that are timed on their own. Speedups are medians over them.",
            rich_help_panel=_MEASURE,
        ),
    ] = 5
    models: Models = None
    thresholds: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Thresholds to compare. Default: those that reject 2, 5, 10, 20, 35 and 60 % of the drafts.",
            rich_help_panel=_MODEL,
        ),
    ] = None
    quality: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            help="The controls are compared with the fastest gate that has this share of target-only's score.",
            rich_help_panel=_MEASURE,
        ),
    ] = 0.98
    aggregate: Aggregate = "min"
    eager_commits: EagerCommits = False
    processor_time: Annotated[
        bool,
        typer.Option(
            "--processor-time",
            help="Count the time of the processor instead of that of the wall, for a busy machine. Use it with"
            " --threads 1: the time of all threads is added.",
            rich_help_panel=_MEASURE,
        ),
    ] = False
    plot: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help='Plot speed against quality: .svg, .png or .pdf. Needs pip install "outrider\\[report]".',
            rich_help_panel=_OUTPUT,
        ),
    ] = None
    seed: Seed = 1
    threads: Threads = None

    def __post_init__(self) -> None:
        _check(self.prompts, self.quality, max(_MIN_PROMPTS, self.rounds))

    def threshold_list(self) -> tuple[float, ...]:
        """Return the given thresholds, or none."""
        return parse_real("--thresholds", self.thresholds) if self.thresholds else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneSettings:
    """The options of `outrider media tune`."""

    quality: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            help="The wanted score as a share of target-only's, such as 0.98.",
            rich_help_panel=_MEASURE,
        ),
    ] = 0.98
    prompts: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="How many random captions. Half of them choose the threshold, the others measure it.",
            rich_help_panel=_MEASURE,
        ),
    ] = 200
    models: Models = None
    aggregate: Aggregate = "min"
    eager_commits: EagerCommits = False
    out: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Write the calibration, for --calibration of `demo`.", rich_help_panel=_OUTPUT
        ),
    ] = None
    seed: Seed = 2
    threads: Threads = None

    def __post_init__(self) -> None:
        _check(self.prompts, self.quality, 2 * _MIN_PROMPTS)


def _check(prompts: int, quality: float, least: int) -> None:
    if prompts < least:
        raise OutriderError(f"--prompts is {prompts}; use at least {least}")
    if not (0 < quality <= 1 and math.isfinite(quality)):
        raise OutriderError(
            f"--quality is {quality}; use a share of target-only's score above 0 and up to 1, such as 0.98"
        )
