"""Cells that run whole rounds of the engine."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
from pair import Setup, batch_of, pass_over, seconds_of

from outrider import LLM
from outrider.core.config import EngineConfig
from outrider.core.planner import FixedPlanner, Planner
from outrider.core.proposer import Proposer
from outrider.core.types import Batch, Draft, Needs, Request, Round
from outrider.engine.build import assemble, auto_planner, build_engine
from outrider.lab.common.clock import DecodeSpeed
from outrider.lab.common.jobs import Job
from outrider.lab.common.timeline import run_jobs
from outrider.lab.common.turns import with_planner
from outrider.models.heads.store import make_module, write_head
from outrider.train.model.presets import Sizes, describe

_LENGTHS = (1, 2, 4, 8)  # draft lengths of the split
_KEPT = (0.55, 0.8, 1.0)  # share of the draft tokens that is left as drafted
_FIXED = (0, 2, 4, 8)  # draft lengths beside k auto; 0: plain decoding
_RULES = ("block", "walk", "rejection")  # verifiers of sampled decoding
_HEAD_LENGTHS = (1, 5)  # draft lengths of the EAGLE-3 head
_HEAD_VOCAB = 32000  # tokens that an EAGLE-3 head of Llama 3 drafts
_TIMES = ("draft_ms", "target_ms", "host_ms", "tau")  # of a round, in the statistics of the engine


class CorruptedDraft:
    """A proposer that replaces some draft tokens of another one by wrong ones, which lowers the acceptance.

    Drafting takes the time of the other proposer, and an upload. The wrong tokens depend on nothing but a seed.
    """

    def __init__(self, inner: Proposer, *, kept: float, vocab: int) -> None:
        self.needs: Needs = inner.needs
        self._inner = inner
        self._kept = kept
        self._vocab = vocab
        self._rng = random.Random(0)

    def admit(self, slot: int, request: Request) -> None:
        self._inner.admit(slot, request)

    def propose(self, batch: Batch) -> Draft:
        draft = self._inner.propose(batch)
        offsets = [[int(self._rng.random() >= self._kept) for _ in range(draft.size)] for _ in draft.width]
        moved = torch.tensor(offsets, dtype=torch.int64).view(draft.tokens.shape).to(draft.tokens.device)
        return replace(draft, tokens=(draft.tokens + moved) % self._vocab, accept_prob=None)

    def commit(self, round: Round) -> None:
        self._inner.commit(round)

    def release(self, slot: int) -> None:
        self._inner.release(slot)


def split(setup: Setup) -> dict[str, Any]:
    """Return the parts of a round by draft length."""
    return {str(k): _split(setup.engine(k), setup.jobs[:1]) for k in _LENGTHS}


def _split(llm: LLM, jobs: Sequence[Job]) -> dict[str, Any]:
    """Return the parts of a round, as the statistics of the engine have them."""
    run_jobs(llm, jobs)  # records the passes of this draft length
    timeline = run_jobs(llm, jobs)
    fields = timeline.stats.as_dict()
    return {name: fields[name] for name in (*_TIMES, "rounds")} | {"tokens_per_s": timeline.speed().rate}


def sampled(setup: Setup) -> dict[str, Any]:
    """Return the parts of a round at temperature 1, without a draft and by verifier, and with top-p."""
    jobs = [_sampled(job, top_p=1.0) for job in setup.jobs[:1]]
    nucleus = [_sampled(job, top_p=0.95) for job in setup.jobs[:1]]
    results = {"plain": _split(setup.engine(0), jobs)}
    for rule in _RULES:
        results[rule] = _split(setup.engine(setup.k), [_verified(job, rule) for job in jobs])
    verified = [_verified(job, "block") for job in nucleus]
    return results | {"block, top_p 0.95": _split(setup.engine(setup.k), verified)}


def _sampled(job: Job, *, top_p: float) -> Job:
    return replace(job, params=replace(job.params, temperature=1.0, top_p=top_p, seed=0))


def _verified(job: Job, rule: str) -> Job:
    return replace(job, params=replace(job.params, verifier=rule))


def head(setup: Setup) -> dict[str, Any]:
    """Return the parts of a round with a random EAGLE-3 head of the target's dimensions, by draft length.

    Its tokens are rejected, so only the times of drafting and verification mean something.
    """
    parts = setup.llm.parts
    config = parts.loaded.checkpoint.model.config
    sizes = Sizes(
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        vocab=config.vocab_size,
        epsilon=config.rms_norm_eps,
        ffn=config.intermediate_size,
        draft_vocab=min(_HEAD_VOCAB, config.vocab_size),
    )
    torch.manual_seed(0)
    module = make_module(describe("eagle3", sizes)).requires_grad_(False)
    with tempfile.TemporaryDirectory() as folder:
        write_head(folder, module, dtype=parts.dtype)
        engine = EngineConfig(proposer=f"draft:{folder}", max_num_seqs=1, prefix_caching=False)
        llm = LLM.from_parts(build_engine(parts.loaded, engine, planner=FixedPlanner(0)))
    try:
        return {str(k): _split(with_planner(llm, FixedPlanner(k)), setup.jobs[:1]) for k in _HEAD_LENGTHS}
    finally:
        parts.target.export_hidden_states(parts.proposer.needs.layers)


def auto(setup: Setup) -> dict[str, Any]:
    """Return tokens/s of k auto, fixed draft lengths and plain decoding, by the share of tokens that is kept."""
    parts = setup.llm.parts
    costs = auto_planner(parts.target, parts.proposer).proposers[0].costs
    measured = {"target_ms": 1e3 * costs.target.base(1), "verify_ms": 1e3 * costs.target.base(5)}
    measured["draft_ms"] = 1e3 * costs.draft.base(1) if costs.draft else 0.0
    results: dict[str, Any] = {"costs": measured}
    for kept in _KEPT:
        planners: dict[str, Planner] = {"auto": auto_planner(parts.target, parts.proposer)}
        planners |= {str(k): FixedPlanner(k) for k in _FIXED}
        results[str(kept)] = {name: _run_corrupted(setup, planner, kept) for name, planner in planners.items()}
    return results


def _run_corrupted(setup: Setup, planner: Planner, kept: float) -> dict[str, float]:
    """Run the prompts one by one. Return tokens/s, draft tokens per round and the times of a round."""
    parts = setup.llm.parts
    proposer = CorruptedDraft(parts.proposer, kept=kept, vocab=parts.vocab)
    engine = assemble(parts.loaded, proposer=proposer, verifier=parts.verifier, planner=planner)
    llm = LLM.from_parts(replace(parts, engine=engine, proposer=proposer))
    began = perf_counter()
    tokens = 0
    for job in setup.jobs:
        tokens += sum(len(done.token_ids) for done in llm.generate([list(job.prompt)], job.params))
    seconds = perf_counter() - began
    fields = engine.stats.as_dict()
    times = {name: fields[name] for name in _TIMES}
    return {"tokens_per_s": tokens / seconds, "k": fields["draft_tokens"] / max(fields["rounds"], 1), **times}


def race(setup: Setup) -> dict[str, Any]:
    """Measure the tokens/s of plain decoding, speculation and the peers in turns."""
    engines = {"plain": setup.engine(0), "speculative": setup.engine(setup.k)}
    peers = {peer.name: peer for peer in setup.peers}
    for peer in setup.peers:
        peer.run(setup.jobs[0])  # to warm up
    names = (*engines, *peers)
    rates = {name: list[float]() for name in names}
    taus = list[float]()

    def run(name: str, job: Job) -> DecodeSpeed:
        if name in peers:
            return peers[name].run(job)
        timeline = run_jobs(engines[name], [job])
        if name == "speculative":
            taus.append(timeline.stats.tau)
        return timeline.speed()

    for round in range(setup.rounds):
        for name in names[:: 1 if round % 2 == 0 else -1]:
            speeds = [run(name, job) for job in setup.jobs]
            rates[name].append(sum(each.tokens for each in speeds) / sum(each.seconds for each in speeds))
    results: dict[str, Any] = {name: {"tokens_per_s": median(all), "all": all} for name, all in rates.items()}
    speculative = results["speculative"]["tokens_per_s"]
    ratios = {
        f"against_{name}": speculative / result["tokens_per_s"]
        for name, result in results.items()
        if name != "speculative"
    }
    return results | ratios | {"tau": sum(taus) / len(taus)}


def round_times(setup: Setup) -> dict[str, Any]:
    """Time a round of speculation, and separately the target's pass and the draft's steps in it."""
    target, draft = setup.models
    parts = setup.llm.parts
    llm = setup.engine(setup.k)
    seconds: dict[str, list[float]] = {"round": [], "target": [], "draft": []}
    for _ in range(setup.rounds):
        timelines = [run_jobs(llm, [job]) for job in setup.jobs]
        rounds = sum(timeline.stats.rounds for timeline in timelines)
        seconds["round"].append(sum(timeline.speed().seconds for timeline in timelines) / max(rounds, 1))
        draft_steps = partial(draft.draft_greedy, batch_of(draft, setup.cached, setup.k), parts.vocab)
        seconds["target"].append(seconds_of(pass_over(target, setup.cached, 1 + setup.k), parts.device))
        seconds["draft"].append(seconds_of(draft_steps, parts.device))
    medians = {name: median(times) for name, times in seconds.items()}
    beyond = medians["round"] - medians["target"] - medians["draft"]
    return {
        **{f"{name}_ms": 1e3 * value for name, value in medians.items()},
        "beyond_ms": 1e3 * beyond,
        "beyond_percent": 100 * beyond / medians["round"],
        "all_seconds": seconds,
    }


def texts(setup: Setup) -> dict[str, Any]:
    """Return how many greedy texts differ from plain decoding, and the first positions that do."""
    results = []
    for k in (0, setup.k):
        prompts = [list(job.prompt) for job in setup.jobs]
        params = [job.params for job in setup.jobs]
        results.append([completion.token_ids for completion in setup.engine(k).generate(prompts, params)])
    first = [
        next((i for i, (a, b) in enumerate(zip(plain, other, strict=False)) if a != b), -1)
        for plain, other in zip(*results, strict=True)
    ]
    return {"texts": len(first), "different": sum(at >= 0 for at in first), "first_positions": first}
