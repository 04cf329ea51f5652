"""Made-up documents of measurements and certificates."""

from __future__ import annotations

from outrider.lab.tune.trial import label


def case(proposer, k, value, *, low=None, high=None, tau=2.0, temperature=0.0):
    return {
        "proposer": proposer,
        "k": k,
        "batch": 1,
        "temperature": temperature,
        "draft_quantize": None,
        "overall": {"value": value, "low": low, "high": high},
        "total": {"tau": tau},
    }


def measured(*cases, speculate=True, batches=4):
    """The document of a measurement, whose first case is the recommended one if it speculates."""
    best = cases[0]
    return {
        "plain": [
            {"batch": 1, "temperature": each, "batches": batches, "tokens_per_s": 100.0, "prefill_share": 0.1}
            for each in dict.fromkeys(each["temperature"] for each in cases)
        ],
        "cases": list(cases),
        "memory": {
            label(each["proposer"], each["draft_quantize"]): {
                "draft_weight_bytes": _draft_bytes(each),
                "draft_cache_bytes": 0,
            }
            for each in cases
        },
        "advice": {
            "speculate": speculate,
            "proposer": best["proposer"] if speculate else "none",
            "k": best["k"] if speculate else 0,
            "fixed_k": best["k"],
            "draft_quantize": best["draft_quantize"] if speculate else None,
        },
        "settings": {"proposer": best["proposer"], "k": best["k"]},
    }


def _draft_bytes(case):
    if "draft" not in case["proposer"]:
        return 0
    return 1_000_000 if case["draft_quantize"] == "int8" else 2_000_000


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
