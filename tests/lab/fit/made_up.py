"""Made-up measurements and certificates."""

from outrider.lab.common.memory import MemoryUse
from outrider.lab.tune.figures import AcceptanceSummary, Case, Estimate, Plain, RoundMs
from outrider.lab.tune.measurement import Measurement

ROUND = RoundMs(draft=0.5, target=1.0, host=0.0)


def case(proposer, k, value, *, low=None, high=None, tau=2.0, temperature=0.0, draft_quantize=None):
    return Case(
        proposer=proposer,
        k=k,
        batch=1,
        temperature=temperature,
        draft_quantize=draft_quantize,
        tokens_per_s=100.0 * value,
        speedup=None,
        overall=Estimate(value=value, low=low, high=high),
        total=AcceptanceSummary(tau=tau, acceptance=()),
        nodes=2.0,
        parts=ROUND,
        categories={},
        output_thirds={},
        exact=True,
    )


def measured(*cases, batches=4):
    temperatures = dict.fromkeys(each.temperature for each in cases)
    plain = {"batch": 1, "batches": batches, "tokens_per_s": 100.0, "prefill_share": 0.1, "parts": ROUND}
    memory = {"sequences": 1, "context": 64, "target_weight_bytes": 1, "target_cache_bytes": 1}
    return Measurement(
        plain=tuple(Plain(temperature=each, **plain) for each in temperatures),
        cases=cases,
        memory={each.label: MemoryUse(draft_weight_bytes=_draft_bytes(each), **memory) for each in cases},
    )


def _draft_bytes(case):
    if "draft" not in case.proposer:
        return 0
    return 1_000_000 if case.draft_quantize == "int8" else 2_000_000


def certificate(passed):
    return {"passed": passed, "replay": {"texts": 12}, "distribution": {"samples": 400, "tests": [{}, {}]}}


TRAINED = {
    "trained": True,
    "minutes": 2.0,
    "kind": "slim",
    "parameters": 1_000_000,
    "steps": 50,
    "evaluation": {"temperature 0": {"tau": 1.5, "acceptance": [0.5]}},
}
