"""The options that `outrider tune` shares with other commands."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from outrider.cli.options import (
    BenchSeed,
    BenchTokens,
    Device,
    Dtype,
    Kernels,
    Limit,
    MaxModelLen,
    PromptOrSourceFile,
    Quantize,
    Threads,
    Verifier,
)
from outrider.drafting.propose.options import DraftQuantize, DraftWindow
from outrider.lab.common.number_lists import parse_real, parse_whole
from outrider.lab.tune.options import TuneOptions

if TYPE_CHECKING:
    from outrider.lab.tune.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureOptions:
    """On what to measure. The fields are fields of the settings of `tune`."""

    draft_window: DraftWindow = None
    draft_quantize: DraftQuantize = None
    verifier: Verifier = None
    prompts: PromptOrSourceFile = None
    limit: Limit = None
    max_tokens: BenchTokens = 128
    seed: BenchSeed = 0
    max_model_len: MaxModelLen = None
    dtype: Dtype = "auto"
    device: Device = "auto"
    kernels: Kernels = "auto"
    quantize: Quantize = None
    threads: Threads = None

    def settings(self, target: str | None, asked: TuneOptions) -> Settings:
        """Return the settings of the measurement of a target.

        Raises:
            OutriderError: a value is not valid.
        """
        from outrider.lab.tune.settings import Settings, default_proposers, read_ks, read_proposers

        if asked.proposers is None:
            proposers = default_proposers(target, device=self.device, kernels=self.kernels, quantize=self.quantize)
        else:
            proposers = read_proposers(asked.proposers)
        return Settings(
            target=target,
            proposers=proposers,
            ks=read_ks(asked.k),
            batches=parse_whole("--batch", asked.batch),
            temperatures=parse_real("--temperature", asked.temperature),
            repeats=asked.repeats,
            **asdict(self),
        )
