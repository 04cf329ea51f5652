"""Run an audit: the replay, distribution and flip tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, asdict, dataclass, replace
from time import perf_counter
from typing import Any

from rich.console import Console

from outrider.core.config import ALWAYS, EngineConfig
from outrider.core.params import AUTO, check_draft_length
from outrider.engine.build import proposer_of
from outrider.engine.verifiers import find_verifier
from outrider.errors import OutriderError
from outrider.lab.audit.distribution import check_distribution, plan_tests
from outrider.lab.audit.flips import ObservedOutputs, explain_flips, find_flips
from outrider.lab.audit.pair import Pair
from outrider.lab.audit.prompts import Prompt, read_prompts
from outrider.lab.audit.replay import cases, replay
from outrider.lab.audit.report import show
from outrider.runtime.machine import commit, hardware, use_threads, versions
from outrider.runtime.progress import stage
from outrider.verify.rules import Verifier

_DEPTHS = (1, 4, 8)  # draft lengths in addition to the user's k
_TOKENS = 32  # default output tokens per prompt
_FLIP_FACTOR = 4  # factor of the output tokens in the flip test, because flips are rare
_MIN_SAMPLES = 100  # smallest number of samples of a distribution test
_SEED = 20230613


def run_audit(
    target: str | None,
    proposer: str | None,
    *,
    k: int,
    prompts: str | None,
    samples: int,
    device: str,
    threads: int | None,
    kernels: str = "auto",
    quantize: str | None = None,
    tp: int = 1,
    draft_placement: str = AUTO,
    console: Console | None,
    verifier: str | None = None,
    tokens: int = _TOKENS,
    draft_window: int | None = None,
    draft_quantize: str | None = None,
) -> dict[str, Any]:
    """Test whether speculation leaves the output of a target and a proposer unchanged.

    Args:
        target: folder of the model; None: the embedded model.
        proposer: an expression, as in `EngineConfig`; None: the default proposer of the target.
        k: draft tokens per round that users will run.
        prompts: a JSONL file with `prompt` or `messages` in each line; None: a small built-in set.
        samples: samples per distribution test.
        device, threads, kernels, tp, draft_placement, draft_window, draft_quantize: as in `EngineConfig`.
        quantize: as in `EngineConfig`. The audit tests the quantized model.
        console: where to print results; None: print nothing.
        verifier: name of the verifier; None: the default of the proposer.
        tokens: output tokens per prompt of the replay test. The flip test uses four times as many.

    Returns:
        A JSON document: `passed`, and the sections `replay`, `distribution` and `flips`.

    Raises:
        OutriderError: the audit cannot run. The message says how to fix it.
    """
    _check(k=k, samples=samples, tokens=tokens)
    use_threads(threads)
    began = perf_counter()
    config = EngineConfig(
        target=target,
        proposer=proposer,
        device=device,
        kernels=kernels,
        quantize=quantize,
        tp=tp,
        draft_placement=draft_placement,
        draft_window=draft_window,
        draft_quantize=draft_quantize,
        check=ALWAYS,
    )
    spec = proposer_of(config)  # chosen once, because the default depends on the free memory
    rule = find_verifier(verifier, spec)
    audit = _Audit(replace(config, proposer=spec), rule, read_prompts(prompts), k=k, samples=samples, tokens=tokens)
    report = audit.run()
    report |= {"target": target or "the embedded model", "seconds": perf_counter() - began}
    report["proposer"] = proposer or ("the embedded draft" if target is None else spec)
    if console is not None:
        show(report, console)
    return report


@dataclass(frozen=True, slots=True)
class _Audit:
    """The settings of an audit."""

    config: EngineConfig  # with a proposer
    rule: Verifier
    prompts: Sequence[Prompt]
    _: KW_ONLY
    k: int
    samples: int
    tokens: int

    def run(self) -> dict[str, Any]:
        """Run all tests. Returns the report without the names of the models and the time."""
        observed, pair = self._observe()
        if pair is None:  # its memory is free now, so that only one target is loaded at a time
            pair = self._load("float32")
        num_cases = sum(1 for _ in cases(pair, self.rule, k=self.k, depths=_DEPTHS))
        with stage("replay", (num_cases + 2) * len(self.prompts)) as completions:
            pair.on_done = completions.advance
            replayed = replay(pair, self.rule, k=self.k, depths=_DEPTHS, tokens=self.tokens, seed=_SEED)
        with stage("distribution", len(plan_tests(pair, self.rule)) * self.samples) as completions:
            pair.on_done = completions.advance
            distribution = check_distribution(pair, self.rule, k=self.k, samples=self.samples, seed=_SEED)
        sections = {"replay": replayed, "distribution": distribution, "flips": explain_flips(pair, observed)}
        return {
            "passed": self.rule.exact and all(section["passed"] for section in sections.values()),
            "verifier": self.rule.name,
            "exact": self.rule.exact,
            "bound": self.rule.bound and self.rule.bound.as_dict(),
            "k": self.k,
            "draft_placements": [placement.as_dict() for placement in pair.draft_placements],
            "load_check": asdict(pair.load_check),
            "seed": _SEED,
            **sections,
            "versions": versions(),
            "hardware": hardware(str(pair.device)),
            "commit": commit(),
        }

    def _observe(self) -> tuple[ObservedOutputs, Pair | None]:
        """Find flips in the users' precision. Also returns the pair, if the other tests can use it."""
        pair = self._load("auto")
        with stage("flips"):
            observed = find_flips(pair, self.rule, k=self.k, tokens=self.tokens * _FLIP_FACTOR)
        return observed, pair if pair.steady else None

    def _load(self, dtype: str) -> Pair:
        room = max(self.tokens * _FLIP_FACTOR, self.k + 4) + max(self.k, *_DEPTHS)
        with stage("loading models"):
            return Pair(replace(self.config, dtype=dtype), self.prompts, room=room)


def _check(*, k: int, samples: int, tokens: int) -> None:
    check_draft_length(k, least=1)
    for name, value, minimum in (("samples", samples, _MIN_SAMPLES), ("tokens", tokens, 2)):
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise OutriderError(f"{name} is {value!r}; use a whole number of at least {minimum}")
