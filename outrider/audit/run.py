"""One audit: replay and law in float32, flips in the precision that users run."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from time import perf_counter
from typing import Any

import torch
from rich.console import Console

from outrider.audit.flips import Observed, find_flips, judge_flips
from outrider.audit.law import check_law, plan_tests
from outrider.audit.pair import Pair
from outrider.audit.prompts import read_prompts
from outrider.audit.replay import cases, replay
from outrider.audit.report import Meter, show
from outrider.build import embedded, find_verifier
from outrider.errors import OutriderError
from outrider.verify import Verifier

_DEPTHS = (1, 4, 8)  # guesses per round that are tried beside the user's k
_TOKENS = 32  # of each text, unless told
_LONGER = 4  # times as many for the flips, which are rare
_FEWEST = 100  # samples below which a test of the law says nothing
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
    console: Console | None,
    verifier: str | None = None,
    tokens: int = _TOKENS,
) -> dict[str, Any]:
    """Certify a pair: does speculation with it give what the target alone would give?

    Args:
        target: folder of the model; None is the embedded one.
        proposer: none, ngram, draft:DIR or pkg.module:Class; None is the embedded draft for the embedded target and
            ngram for any other.
        k: guesses per round that users will run.
        prompts: a JSONL file with `prompt` or `messages` on each line; None takes a small set of our own.
        samples: per test of the law.
        device: auto, cpu, cuda, ...
        threads: CPU threads; None leaves torch's choice.
        console: where progress and findings go; None keeps silent.
        verifier: by name; None is the proposer's default.
        tokens: length of the texts that are replayed; those that are searched for flips are four times as long.

    Returns:
        What a JSON document can hold: `passed`, and the sections `replay`, `law` and `flips` with their figures.

    Raises:
        OutriderError: the audit cannot be made; the message names the fix.
    """
    _check(k=k, samples=samples, tokens=tokens, threads=threads)
    if threads is not None:
        torch.set_num_threads(threads)
    began, asked = perf_counter(), read_prompts(prompts)
    folder = target or str(embedded("mini"))
    spec = proposer or (f"draft:{embedded('nano')}" if target is None else "ngram")
    rule = find_verifier(verifier, spec)

    def load(dtype: str) -> Pair:
        room = max(tokens * _LONGER, k + 4) + max(k, *_DEPTHS)
        pair = Pair(folder, spec, asked, dtype=dtype, device=device, room=room)
        pair.on_done = meter.step
        return pair

    with Meter(console) as meter:
        # The float32 pair is loaded when the first one is gone, so that one target at a time is in memory.
        observed = _observe(load("auto"), rule, meter, k=k, tokens=tokens)
        pair = load("float32")
        ways = sum(1 for _ in cases(pair, rule, k=k, depths=_DEPTHS))
        meter.start("replay", (ways + 2) * len(asked))
        replayed = replay(pair, rule, k=k, depths=_DEPTHS, tokens=tokens, seed=_SEED)
        meter.start("law", len(plan_tests(pair, rule)) * samples)
        sections = {
            "replay": replayed,
            "law": check_law(pair, rule, k=k, samples=samples, seed=_SEED),
            "flips": judge_flips(pair, observed),
        }
    report = {
        "passed": rule.exact and all(section["passed"] for section in sections.values()),
        "target": target or "the embedded model",
        "proposer": proposer or ("the embedded draft" if target is None else spec),
        "verifier": rule.name,
        "exact": rule.exact,
        "k": k,
        "seed": _SEED,
        **sections,
        "seconds": perf_counter() - began,
        "versions": _versions(pair.device),
    }
    if console is not None:
        show(report, console)
    return report


def _observe(pair: Pair, rule: Verifier, meter: Meter, *, k: int, tokens: int) -> Observed:
    meter.start("flips")
    return find_flips(pair, rule, k=k, tokens=tokens * _LONGER)


def _versions(device: torch.device) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("outrider", "torch", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # run from its source
            found[package] = "unknown"
    found["device"] = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return found


def _check(*, k: int, samples: int, tokens: int, threads: int | None) -> None:
    for name, value, least in (("k", k, 1), ("samples", samples, _FEWEST), ("tokens", tokens, 2)):
        if value < least:
            raise OutriderError(f"{name} is {value}; an audit needs at least {least}")
    if threads is not None and threads < 1:
        raise OutriderError(f"threads is {threads}; use at least 1")
