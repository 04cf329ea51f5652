"""Runs an audit: replay, distribution and flips."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from rich.console import Console

from outrider.audit.distribution import check_distribution, plan_tests
from outrider.audit.flips import ObservedOutputs, explain_flips, find_flips
from outrider.audit.pair import Pair
from outrider.audit.prompts import Prompt, read_prompts
from outrider.audit.replay import cases, replay
from outrider.audit.report import ProgressBar, show
from outrider.core.config import weight_bits
from outrider.engine.verifiers import find_verifier
from outrider.errors import OutriderError
from outrider.loader.embedded import model_folder
from outrider.propose.registry import default_proposer
from outrider.system.machine import commit, hardware, use_threads, versions
from outrider.verify.rules import Verifier

_DEPTHS = (1, 4, 8)  # draft lengths besides the user's k
_TOKENS = 32  # default output tokens per text
_LONGER = 4  # factor for the flip test, because flips are rare
_FEWEST = 100  # smallest number of samples of a distribution test
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
    console: Console | None,
    verifier: str | None = None,
    tokens: int = _TOKENS,
) -> dict[str, Any]:
    """Test whether speculation leaves the output of a target and a proposer unchanged.

    Args:
        target: folder of the model; None is the embedded one.
        proposer: none, ngram, draft:DIR or pkg.module:Class; None is the embedded draft for the embedded target and
            ngram for any other.
        k: guesses per round that users will run.
        prompts: a JSONL file with `prompt` or `messages` on each line; None takes a small set of our own.
        samples: per test of the law.
        device: auto, cpu, cuda, ...
        threads: CPU threads, as `LLM` takes them.
        kernels: as `LLM` takes them.
        quantize: as `LLM` takes it; it is the quantised model that is certified.
        console: where progress and findings go; None keeps silent.
        verifier: by name; None is the proposer's default.
        tokens: length of the texts that are replayed; those that are searched for flips are four times as long.

    Returns:
        What a JSON document can hold: `passed`, and the sections `replay`, `law` and `flips` with their figures.

    Raises:
        OutriderError: the audit cannot be made; the message names the fix.
    """
    _check(k=k, samples=samples, tokens=tokens)
    use_threads(threads)
    began, spec = perf_counter(), default_proposer(target) if proposer is None else proposer
    task = _Task(
        target=str(model_folder(target)),
        proposer=spec,
        rule=find_verifier(verifier, spec),
        prompts=read_prompts(prompts),
        k=k,
        samples=samples,
        tokens=tokens,
        device=device,
        kernels=kernels,
        quantize=quantize,
    )
    with ProgressBar(console) as meter:
        report = task.run(meter)
    report |= {"target": target or "the embedded model", "seconds": perf_counter() - began}
    report["proposer"] = proposer or ("the embedded draft" if target is None else spec)
    if console is not None:
        show(report, console)
    return report


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """What is to be audited, and how thoroughly."""

    target: str
    proposer: str
    rule: Verifier
    prompts: Sequence[Prompt]
    k: int
    samples: int
    tokens: int
    device: str
    kernels: str
    quantize: str | None

    def run(self, meter: ProgressBar) -> dict[str, Any]:
        """The report, but for the names and the time."""
        observed, pair = self._observe(meter)
        if pair is None:  # and so gone: one target at a time is in memory
            pair = self._load("float32", meter)
        ways = sum(1 for _ in cases(pair, self.rule, k=self.k, depths=_DEPTHS))
        meter.start("replay", (ways + 2) * len(self.prompts))
        replayed = replay(pair, self.rule, k=self.k, depths=_DEPTHS, tokens=self.tokens, seed=_SEED)
        meter.start("distribution", len(plan_tests(pair, self.rule)) * self.samples)
        law = check_distribution(pair, self.rule, k=self.k, samples=self.samples, seed=_SEED)
        sections = {"replay": replayed, "distribution": law, "flips": explain_flips(pair, observed)}
        return {
            "passed": self.rule.exact and all(section["passed"] for section in sections.values()),
            "verifier": self.rule.name,
            "exact": self.rule.exact,
            "k": self.k,
            "weight_bits": weight_bits(self.quantize),
            "seed": _SEED,
            **sections,
            "versions": versions(),
            "hardware": hardware(str(pair.device)),
            "commit": commit(),
        }

    def _observe(self, meter: ProgressBar) -> tuple[ObservedOutputs, Pair | None]:
        """Flips as users would meet them, and the pair itself if its rounding is no obstacle to the other tests."""
        pair = self._load("auto", meter)
        meter.start("flips")
        observed = find_flips(pair, self.rule, k=self.k, tokens=self.tokens * _LONGER)
        return observed, pair if pair.steady else None

    def _load(self, dtype: str, meter: ProgressBar) -> Pair:
        room = max(self.tokens * _LONGER, self.k + 4) + max(self.k, *_DEPTHS)
        pair = Pair(
            self.target,
            self.proposer,
            self.prompts,
            dtype=dtype,
            device=self.device,
            kernels=self.kernels,
            quantize=self.quantize,
            room=room,
        )
        pair.on_done = meter.step
        return pair


def _check(*, k: int, samples: int, tokens: int) -> None:
    for name, value, least in (("k", k, 1), ("samples", samples, _FEWEST), ("tokens", tokens, 2)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise OutriderError(f"{name} is {value!r}; an audit needs a whole number, at least {least}")
