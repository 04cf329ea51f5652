"""Run an audit: the replay, distribution and flip tests."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from rich.console import Console

from outrider.core.config import ALWAYS
from outrider.engine.build import proposer_of
from outrider.engine.verifiers import find_verifier
from outrider.lab.audit.distribution import check_distribution, plan_tests
from outrider.lab.audit.flips import ObservedOutputs, explain_flips, find_flips
from outrider.lab.audit.pair import Pair
from outrider.lab.audit.prompts import Prompt, read_prompts
from outrider.lab.audit.replay import cases, replay
from outrider.lab.audit.report import show
from outrider.lab.audit.result import AuditResult
from outrider.lab.audit.settings import Settings
from outrider.runtime.machine import hardware, use_threads
from outrider.runtime.progress import stage
from outrider.verify.rules import Verifier

_DEPTHS = (1, 4, 8)  # draft lengths in addition to the user's k
_FLIP_FACTOR = 4  # factor of the output tokens in the flip test, because flips are rare
_SEED = 20230613


def run_audit(settings: Settings, *, console: Console | None) -> dict[str, Any]:
    """Test whether speculation leaves the output of a target and a proposer unchanged.

    Args:
        settings: what to audit. If the target is quantized, the quantized model is audited.
        console: where to print results; None: print nothing.

    Returns:
        A JSON document: `passed`, and the sections `replay`, `distribution` and `flips`.

    Raises:
        OutriderError: the audit cannot run. The message says how to fix it.
    """
    engine = settings.engine
    use_threads(engine.threads)
    began = perf_counter()
    spec = proposer_of(engine)  # chosen once, because the default depends on the free memory
    rule = find_verifier(engine.verifier, spec)
    audit = _Audit(replace(settings, engine=replace(engine, proposer=spec)), rule, read_prompts(settings.prompts))
    result = replace(
        audit.run(),
        target=str(engine.target or "the embedded model"),
        proposer=str(engine.proposer or ("the embedded draft" if engine.target is None else spec)),
        seconds=perf_counter() - began,
    )
    if console is not None:
        show(result, console)
    return result.as_dict()


@dataclass(frozen=True, slots=True)
class _Audit:
    """An audit of one verifier."""

    settings: Settings  # with a proposer
    rule: Verifier
    prompts: Sequence[Prompt]

    @property
    def k(self) -> int:
        """Draft tokens per round."""
        return int(self.settings.engine.k)

    def run(self) -> AuditResult:
        """Return the results of all tests, without the names of the models and the time."""
        observed, pair = self._observe()
        if pair is None:  # its memory is free now, so that only one target is loaded at a time
            pair = self._load("float32")
        num_cases = sum(1 for _ in cases(pair, self.rule, k=self.k, depths=_DEPTHS))
        with stage("replay", (num_cases + 2) * len(self.prompts)) as completions:
            pair.on_done = completions.advance
            replayed = replay(pair, self.rule, k=self.k, depths=_DEPTHS, tokens=self.settings.max_tokens, seed=_SEED)
        with stage("distribution", len(plan_tests(pair, self.rule)) * self.settings.samples) as completions:
            pair.on_done = completions.advance
            distribution = check_distribution(pair, self.rule, k=self.k, samples=self.settings.samples, seed=_SEED)
        return AuditResult(
            rule=self.rule,
            k=self.k,
            placements=pair.draft_placements,
            load_check=pair.load_check,
            seed=_SEED,
            replay=replayed,
            distribution=distribution,
            flips=explain_flips(pair, observed),
            hardware=hardware(str(pair.device)),
        )

    def _observe(self) -> tuple[ObservedOutputs, Pair | None]:
        """Return the flips in the users' precision, and the pair if the other tests can use it."""
        pair = self._load("auto")
        with stage("flips"):
            observed = find_flips(pair, self.rule, k=self.k, tokens=self.settings.max_tokens * _FLIP_FACTOR)
        return observed, pair if pair.steady else None

    def _load(self, dtype: str) -> Pair:
        room = max(self.settings.max_tokens * _FLIP_FACTOR, self.k + 4) + max(self.k, *_DEPTHS)
        with stage("loading models"):
            return Pair(replace(self.settings.engine, dtype=dtype, check=ALWAYS), self.prompts, room=room)
