"""The options of `outrider media demo`, `bench` and `tune`."""

from dataclasses import dataclass
from typing import Annotated

from outrider.core.option import MEASURE, MODEL, OUTPUT, Option
from outrider.errors import OutriderError
from outrider.lab.common.number_lists import parse_real

_MIN_PROMPTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaSettings:
    """The options of all commands of `outrider media`."""

    models: Annotated[str | None, Option("DIR", MODEL)] = None
    """Folder that recipes.video or recipes.audio wrote. Default: the embedded video models."""
    eager_commits: Annotated[bool, Option(panel=MODEL)] = False
    """Write each block into the caches at once, not when a cache is needed. The output is the same."""
    threads: Annotated[int | None, Option(panel=MODEL)] = None
    """CPU threads. Default: OMP_NUM_THREADS, or else the physical cores of one NUMA node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings(MediaSettings):
    """The options of `outrider media demo`."""

    out: Annotated[str | None, Option("FILE", OUTPUT)] = None
    """The video: .mp4 or .gif; without an encoder for mp4 it is a gif. Of audio models: .wav; each of the outputs is a
    file with its name. Default: media.mp4 or media.wav."""
    prompt: Annotated[str | None, Option("TEXT")] = None
    """Caption, such as 'a red circle moving right from the top left on a black background', or 'a bright arpeggio on a
    low do at a fast tempo'. Default: the first of these, or a random one for other models."""
    threshold: Annotated[float | None, Option("SCORE", MODEL)] = None
    """Least score of an accepted draft. Default: that of --calibration."""
    calibration: Annotated[str | None, Option("FILE", MODEL)] = None
    """What `outrider media tune --out` wrote. Default: the calibration in the folder of the models."""
    aggregate: Annotated[str | None, Option("NAME", MODEL)] = None
    """With --threshold: min, mean, or window:N, the worst mean of N in a row. Default: min."""
    budget: Annotated[int | None, Option(panel=MODEL)] = None
    """Most blocks that the target makes. Default: no limit."""
    fps: Annotated[float | None, Option(panel=OUTPUT)] = None
    """Frames per second of a video. Default: 12."""
    seed: Annotated[int, Option(panel=MEASURE, min=0)] = 0
    """Seed of the captions and of the noise."""

    def __post_init__(self) -> None:
        if self.fps is not None and not 1 <= self.fps <= 50:
            raise OutriderError(f"--fps is {self.fps:g}; use 1 to 50")
        if self.threshold is not None and self.calibration is not None:
            raise OutriderError("--threshold and --calibration both set the threshold; leave one of them out")
        if self.threshold is None and self.aggregate is not None:
            raise OutriderError("--aggregate belongs to --threshold; a calibration has its own aggregate")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings(MediaSettings):
    """The options of `outrider media bench`."""

    num_prompts: Annotated[int, Option("N", MEASURE)] = 200
    """Number of random captions."""
    rounds: Annotated[int, Option(panel=MEASURE, min=1)] = 5
    """Parts of the prompts that are timed on their own. Speedups are medians over them."""
    thresholds: Annotated[str | None, Option("LIST", MODEL)] = None
    """Thresholds to compare. Default: those that reject 2, 5, 10, 20, 35 and 60% of the drafts."""
    quality: Annotated[float, Option("SHARE", MEASURE)] = 0.98
    """The controls are compared with the fastest gate that has this share of target-only's score."""
    aggregate: Annotated[str, Option("NAME", MODEL)] = "min"
    """How the scores of a block's frames, or windows of audio, become one: min, mean, or window:N, the worst mean of N
    in a row."""
    processor_time: Annotated[bool, Option(panel=MEASURE)] = False
    """Count processor time instead of wall time, for a busy machine. Use it with --threads 1: the
    time of all threads is added."""
    plot: Annotated[str | None, Option("FILE", OUTPUT)] = None
    """Plot speed against quality: .svg, .png or .pdf. Needs pip install "outrider[plot]"."""
    seed: Annotated[int, Option(panel=MEASURE, min=0)] = 1
    """Seed of the captions and of the noise."""

    def __post_init__(self) -> None:
        _check(self.num_prompts, self.quality, max(_MIN_PROMPTS, self.rounds))

    def threshold_list(self) -> tuple[float, ...]:
        """Return the given thresholds, or none."""
        return parse_real("--thresholds", self.thresholds) if self.thresholds else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneSettings(MediaSettings):
    """The options of `outrider media tune`."""

    quality: Annotated[float, Option("SHARE", MEASURE)] = 0.98
    """The wanted score as a share of target-only's, such as 0.98."""
    num_prompts: Annotated[int, Option("N", MEASURE)] = 200
    """Number of random captions. Half of them choose the threshold, the others measure it."""
    aggregate: Annotated[str, Option("NAME", MODEL)] = "min"
    """How the scores of a block's frames, or windows of audio, become one: min, mean, or window:N, the worst mean of N
    in a row."""
    out: Annotated[str | None, Option("FILE", OUTPUT)] = None
    """Write the calibration, for --calibration of `demo`."""
    seed: Annotated[int, Option(panel=MEASURE, min=0)] = 2
    """Seed of the captions and of the noise."""

    def __post_init__(self) -> None:
        _check(self.num_prompts, self.quality, 2 * _MIN_PROMPTS)


def _check(prompts: int, quality: float, least: int) -> None:
    if prompts < least:
        raise OutriderError(f"--num-prompts is {prompts}; use at least {least}")
    if not 0 < quality <= 1:
        raise OutriderError(
            f"--quality is {quality}; use a share of target-only's score above 0 and up to 1, such as 0.98"
        )
