"""Cells that run whole rounds of the engine."""

import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
from pair import Setup, cached_batch, draft_of, seconds_of
from transformers_peer import Peer

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
_FIXED = (0, 2, 4)  # draft lengths beside k auto; 0: plain decoding
_EVERY = 3  # of the prompts, one in so many runs with each planner
_RULES = ("block", "walk", "rejection")  # verifiers of sampled decoding
_HEAD_LENGTHS = (1, 5)  # draft lengths of the EAGLE-3 head
_HEAD_VOCAB = 32000  # tokens that an EAGLE-3 head of Llama 3 drafts
_ROUNDS = 2  # times that everything runs in turns
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
        results[rule] = _split(setup.engine(setup.inputs.k), [_verified(job, rule) for job in jobs])
    verified = [_verified(job, "block") for job in nucleus]
    return results | {"block, top_p 0.95": _split(setup.engine(setup.inputs.k), verified)}


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
        engine = EngineConfig(proposer=f"draft:{folder}", max_num_seqs=setup.pair.scale.slots, prefix_caching=False)
        llm = LLM.from_parts(build_engine(parts.loaded, engine, planner=FixedPlanner(0)))
    try:
        return {str(k): _split(with_planner(llm, FixedPlanner(k)), setup.jobs[:1]) for k in _HEAD_LENGTHS}
    finally:
        parts.target.export_hidden_states(parts.proposer.needs.layers)


def k_auto(setup: Setup) -> dict[str, Any]:
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
    for job in setup.jobs[::_EVERY]:
        tokens += sum(len(done.token_ids) for done in llm.generate([list(job.prompt)], job.params))
    seconds = perf_counter() - began
    fields = engine.stats.as_dict()
    times = {name: fields[name] for name in _TIMES}
    return {"tokens_per_s": tokens / seconds, "k": fields["draft_tokens"] / max(fields["rounds"], 1), **times}


def race(setup: Setup) -> dict[str, Any]:
    """Measure the tokens/s of plain decoding and speculation in turns, one sequence at a time."""
    engines = {"plain": setup.engine(0), "speculative": setup.engine(setup.inputs.k)}
    rates = {name: list[float]() for name in engines}
    taus = list[float]()
    for round in range(_ROUNDS):
        for name in list(engines)[:: 1 if round % 2 == 0 else -1]:
            timelines = [run_jobs(engines[name], [job]) for job in setup.jobs]
            rates[name].append(_rate([timeline.speed() for timeline in timelines]))
            taus += [timeline.stats.tau for timeline in timelines if name == "speculative"]
    results: dict[str, Any] = {name: {"tokens_per_s": median(all), "all": all} for name, all in rates.items()}
    ratio = results["speculative"]["tokens_per_s"] / results["plain"]["tokens_per_s"]
    return results | {"against_plain": ratio, "tau": sum(taus) / len(taus)}


def peers(setup: Setup) -> dict[str, Any]:
    """Measure the tokens/s of `generate` of transformers on some prompts, plain and assisted by the draft model."""
    model, assistant = (weights.model(attn_implementation="sdpa") for weights in (setup.pair.target, setup.pair.draft))
    jobs = setup.jobs[::_EVERY]
    results = {}
    for name, peer in (("plain", Peer(model)), ("assisted", Peer(model, assistant=assistant))):
        peer.run(jobs[0])  # to warm up
        results[name] = {"tokens_per_s": _rate(list(map(peer.run, jobs)))}
    return results


def _rate(speeds: Sequence[DecodeSpeed]) -> float:
    """Return the tokens/s of several runs."""
    return sum(each.tokens for each in speeds) / sum(each.seconds for each in speeds)


def round_times(setup: Setup) -> dict[str, Any]:
    """Time a round of speculation, and separately the target's pass and the draft's steps in it."""
    target, draft = setup.models
    parts = setup.llm.parts
    k = setup.inputs.k
    llm = setup.engine(k)
    cached = setup.pair.scale.cached[0]
    seconds: dict[str, list[float]] = {"round": [], "target": [], "draft": []}
    for _ in range(_ROUNDS):
        timelines = [run_jobs(llm, [job]) for job in setup.jobs]
        rounds = sum(timeline.stats.rounds for timeline in timelines)
        seconds["round"].append(sum(timeline.speed().seconds for timeline in timelines) / max(rounds, 1))
        with cached_batch(target, cached) as batch:
            seconds["target"].append(seconds_of(partial(target.score, batch, draft_of(k, parts.device)), parts.device))
        with cached_batch(draft, cached, k) as batch:
            seconds["draft"].append(seconds_of(partial(draft.draft_greedy, batch, parts.vocab), parts.device))
    medians = {name: median(times) for name, times in seconds.items()}
    beyond = medians["round"] - medians["target"] - medians["draft"]
    return {
        **{f"{name}_ms": 1e3 * value for name, value in medians.items()},
        "beyond_ms": 1e3 * beyond,
        "beyond_percent": 100 * beyond / medians["round"],
        "all_seconds": seconds,
    }


def texts(setup: Setup) -> dict[str, Any]:
    """Return how many greedy texts differ from plain decoding of each prompt alone, and the first positions that do."""
    parts = setup.llm.parts
    auto = with_planner(setup.llm, auto_planner(parts.target, parts.proposer))
    return _compared(setup, {f"k = {setup.inputs.k}": setup.engine(setup.inputs.k), "k auto": auto}, 1)


def texts_batched(setup: Setup) -> dict[str, Any]:
    """Return the same for prompts that run together."""
    engines = {"plain": setup.engine(0), f"k = {setup.inputs.k}": setup.engine(setup.inputs.k)}
    return _compared(setup, engines, setup.pair.scale.slots)


def _compared(setup: Setup, engines: Mapping[str, LLM], batch: int) -> dict[str, Any]:
    expected = _together(setup.engine(0), setup.jobs, 1)
    differences = {name: _differences(expected, _together(llm, setup.jobs, batch)) for name, llm in engines.items()}
    return {"texts": len(expected), **differences}


def _together(llm: LLM, jobs: Sequence[Job], batch: int) -> list[Sequence[int]]:
    """Return the tokens of prompts of which so many run together."""
    outputs: list[Sequence[int]] = []
    for start in range(0, len(jobs), batch):
        group = jobs[start : start + batch]
        completions = llm.generate([list(job.prompt) for job in group], [job.params for job in group])
        outputs += [completion.token_ids for completion in completions]
    return outputs


def _differences(expected: Sequence[Sequence[int]], found: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return the number of texts that differ, and the first position of each that does; -1: it does not."""
    first = [
        next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), -1)
        for one, other in zip(expected, found, strict=True)
    ]
    return {"different": sum(at >= 0 for at in first), "first_positions": first}
