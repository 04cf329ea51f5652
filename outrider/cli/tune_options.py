"""The options that `outrider tune` shares with other commands."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

from outrider.core.option import MEASURE, MODEL, SAMPLING, Option
from outrider.lab.common.number_lists import parse_real, parse_whole
from outrider.lab.tune.options import TuneOptions

if TYPE_CHECKING:
    from outrider.lab.tune.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureOptions:
    """On what to measure. The fields are fields of the settings of `tune`."""

    draft_window: Annotated[int | None, Option("TOKENS", MODEL)] = None
    """The latest tokens that a draft model or draft head reads. Default: as many as it was made for."""
    draft_quantize: Annotated[str | None, Option("NAME", MODEL)] = None
    """int8 or int4 weights for a draft model or draft head, LM head included, on the native kernels of a CPU. The
    output does not change. Default: the weights as stored."""
    verifier: Annotated[str | None, Option("NAME", MODEL)] = None
    """walk, coupled, rejection, block, siblings or traversal; typical and lenient are not exact. Relaxed rules are not
    exact either, and declare a bound: lantern:delta=D, gsd:clusters=N, pcg:k=N, bins:distance=R and blend:share=S, with
    more options after commas, such as table=FILE. Default: block for chains of a draft model, traversal for its trees
    and for merges, walk for all other proposers."""
    prompts: Annotated[str | None, Option("FILE", MEASURE)] = None
    """JSON lines with prompt or messages, or for an encoder-decoder target source, and optionally category. Default: an
    embedded set."""
    limit: Annotated[int | None, Option(panel=MEASURE)] = None
    """Prompts of each category. Default: all."""
    max_tokens: Annotated[int, Option(panel=SAMPLING)] = 128
    """Most output tokens."""
    seed: Annotated[int, Option(panel=SAMPLING, min=0)] = 0
    """Seed of all sampling."""
    max_model_len: Annotated[int | None, Option(panel=MODEL)] = None
    """Tokens of prompt and completion together. Default: the limit of the model, at most 8192."""
    dtype: Annotated[str, Option("NAME", MODEL)] = "auto"
    """auto, float32, bfloat16 or float16."""
    device: Annotated[str, Option("NAME", MODEL)] = "auto"
    """auto, cpu, cuda, cuda:1, ..."""
    kernels: Annotated[str, Option("NAME", MODEL)] = "auto"
    """auto, native or torch. auto: the fastest that support the model. The native kernels run on CPUs in bfloat16 and
    float32; a C++ compiler builds them once per machine."""
    quantize: Annotated[str | None, Option("NAME", MODEL)] = None
    """int8 or int4 weights for the target, on a CPU. The quantized model is then the target, exactly. Default: the
    weights as stored."""
    threads: Annotated[int | None, Option(panel=MODEL)] = None
    """CPU threads. Default: OMP_NUM_THREADS, or else the physical cores of one NUMA node."""

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
