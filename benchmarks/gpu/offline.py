"""Cells of offline throughput: random prompts of one length that arrive together."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from pair import Setup

from outrider import LLM, SamplingParams
from outrider.engine.build import auto_planner
from outrider.lab.common.jobs import Job
from outrider.lab.common.timeline import Timeline, run_jobs
from outrider.lab.common.turns import with_planner

_REPEATED = 8  # batches of up to this size run twice, and the second time is measured
_WARM = (64, 24)  # tokens of the prompts and outputs with which all batches run first


def offline(batch: int, setup: Setup) -> dict[str, Any]:
    """Return tokens/s and the times to the first token, plain and with k auto.

    The seconds in which passes are recorded are left out: a server records them when it starts.
    """
    batch = min(batch, setup.pair.scale.slots)
    scale = setup.pair.scale
    jobs = _jobs(setup, batch, scale.prompt, scale.output)
    short = _jobs(setup, batch, min(_WARM[0], scale.prompt), min(_WARM[1], scale.output))
    parts = setup.llm.parts
    engines = {
        "plain": setup.engine(0),
        "k_auto": with_planner(setup.llm, auto_planner(parts.target, parts.proposer)),
    }
    results: dict[str, Any] = {"batch": batch, "prompt": scale.prompt, "output": scale.output}
    for name, llm in engines.items():
        run_jobs(llm, jobs if batch <= _REPEATED else short)  # compiles and records
        results[name] = _measure(setup, llm, jobs)
    ratio = results["k_auto"]["tokens_per_s"] / results["plain"]["tokens_per_s"]
    return results | {"k_auto_against_plain": ratio, "compiled": setup.compiled}


def _jobs(setup: Setup, batch: int, prompt: int, output: int) -> tuple[Job, ...]:
    """Return jobs with random prompts of the vocabulary, which do not end before their last token."""
    generator = torch.Generator().manual_seed(batch)
    prompts = torch.randint(setup.llm.parts.vocab, (batch, prompt), generator=generator).tolist()
    params = SamplingParams(max_tokens=output, ignore_eos=True)
    return tuple(Job(prompt=tuple(prompt), params=params) for prompt in prompts)


def _measure(setup: Setup, llm: LLM, jobs: Sequence[Job]) -> dict[str, Any]:
    recorded_before = _recording_seconds(setup)
    timeline = run_jobs(llm, jobs)
    recording = _recording_seconds(setup) - recorded_before
    seconds = timeline.seconds - recording
    first = _first_seconds(timeline)
    fields = timeline.stats.as_dict()
    rounds = max(fields["rounds"], 1)
    return {
        "tokens_per_s": timeline.tokens / seconds,
        "decode_tokens_per_s": timeline.speed().rate,
        "seconds": seconds,
        "recording_seconds": recording,
        "first_token_ms": {"mean": 1e3 * sum(first) / len(first), "last": 1e3 * max(first)},
        "tau": fields["tau"],
        "draft_tokens_per_round": fields["draft_tokens"] / rounds,
        "round_ms": {name: fields[name] for name in ("draft_ms", "target_ms", "host_ms")},
    }


def _first_seconds(timeline: Timeline) -> list[float]:
    """Return the seconds from the start to the first token of each sequence, recordings included."""
    start, *events = timeline.events
    return [next(event.at for event in events if event.emitted[i]) - start.at for i in range(len(timeline.seqs))]


def _recording_seconds(setup: Setup) -> float:
    """Return the seconds in which passes were recorded so far."""
    graphs = (getattr(model, "graphs", None) for model in setup.models)
    return sum(getattr(each, "seconds", 0.0) for each in graphs)


one, eight, many, most = (partial(offline, batch) for batch in (1, 8, 32, 64))
