"""Draft for the sequences of another engine, step by step.

The engine calls after each of its steps and tells the tokens of each sequence. One call ends a round, in which the
drafts of the last call were verified, and drafts for the next one. What is learned in it is the same as in Outrider's
own engine: acceptance, outputs that have ended, and the time of a step, which is the time between two calls.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple, cast

import torch

from outrider.core import tree
from outrider.core.params import SamplingParams
from outrider.core.planner import FixedPlanner, Planner
from outrider.core.proposer import Proposer, ProposerSetup
from outrider.core.stats import StatsAccumulator
from outrider.core.types import (
    Batch,
    Draft,
    DraftBudget,
    Draw,
    FinishReason,
    Request,
    Round,
    Scores,
    SequenceState,
)
from outrider.drafting.plan.cost_planner import CostPlanner
from outrider.drafting.plan.pass_cost import CostModel, PassCost
from outrider.drafting.plugins.settings import HostFacts, PluginSettings
from outrider.drafting.propose.isolate import isolate
from outrider.drafting.propose.registry import alternatives, find_proposer, parse
from outrider.errors import OutriderError

_CPU = torch.device("cpu")
_NODES_PER_TOKEN = 4  # nodes of a tree for each token of the chain that is taken from it
_PLAIN_STEPS = 8  # plain steps that are measured before the planner may draft
# Share of a step over one token that one more token takes, before steps have been measured.
_TOKEN_SHARE_CPU = 1 / 8
_TOKEN_SHARE_GPU = 1 / 128
_MOST_TOKENS = 10**6  # of a pass; costs are linear up to there


class Row(NamedTuple):
    """A sequence of the step that has ended. It decodes, so the step has added tokens to it."""

    key: Hashable  # the same in all steps of a request
    sampled: Sequence[int]  # tokens that this step has added
    before: Callable[[], Sequence[int]]  # returns the tokens before them; asked in the first step of a request


@dataclass(slots=True)
class _Pending:
    """The drafts that the engine verifies in its current step."""

    batch: Batch
    draft: Draft
    keys: tuple[Hashable, ...]  # [B]
    draft_seconds: float
    began: float  # when the step began


@dataclass(slots=True)
class Drafter:
    """Owns the proposer, the planner and the states of the running requests."""

    settings: PluginSettings
    host: HostFacts
    clock: Callable[[], float] = perf_counter
    stats: StatsAccumulator = field(default_factory=StatsAccumulator)
    _seqs: dict[Hashable, SequenceState] = field(default_factory=dict)  # running requests
    _free: list[int] = field(default_factory=list)  # slots
    _num_admitted: int = 0
    _pending: _Pending | None = None
    _proposer: Proposer = field(init=False)
    _planner: _StepPlanner = field(init=False)

    def __post_init__(self) -> None:
        """Make the proposer. Raises OutriderError if it cannot be made, or needs hidden states."""
        setup = ProposerSetup(
            target=cast(Any, None),  # lookups do not read it
            vocab=self.host.vocab,
            slots=self.host.slots,
            context=self.host.context,
            device=_CPU,
            dtype=torch.float32,
            draw=Draw.ARGMAX,
            tokenizer=self.host.tokenizer() if "retrieval" in parse(self.settings.proposer).names() else None,
        )
        proposer = find_proposer(self.settings.proposer, setup)
        if proposer.needs.layers:
            raise OutriderError(
                f"the proposer {self.settings.proposer} needs hidden states, which this engine does not hand to a"
                " plug-in; use a proposer with needs = Needs()"
            )
        self._proposer, _ = isolate(proposer, setup, names=alternatives(self.settings.proposer))
        self._planner = _StepPlanner(self.settings.k, self.host, proposer.needs.alternatives)
        self._free = list(range(self.host.slots))[::-1]

    @property
    def num_running(self) -> int:
        """Requests that hold state."""
        return len(self._seqs)

    def step(self, rows: Sequence[Row], *, prefilling: bool = False) -> list[list[int]]:
        """End a round, and return a chain of draft tokens for each row.

        Args:
            rows: the sequences that decode. A request that has no row has ended.
            prefilling: whether the step had others as well, which still prefill.
        """
        now = self.clock()
        keys = {row.key for row in rows}
        has_drafted = self._pending is not None and set(self._pending.keys) == keys
        self._end_round(rows, now, same=not prefilling and has_drafted)
        for key in [key for key in self._seqs if key not in keys]:
            self._release(key)
        for row in rows:
            if row.key not in self._seqs:
                self._admit(row)
        if not rows:
            return []
        draft = self._draft(tuple(self._seqs[row.key] for row in rows), tuple(row.key for row in rows), now)
        return [tokens[:width] for tokens, width in zip(draft.host_tokens(), draft.width, strict=True)]

    def _end_round(self, rows: Sequence[Row], now: float, *, same: bool) -> None:
        """Learn from the step that has ended. `same`: it had no other sequences than those that drafted."""
        pending = self._pending
        self._pending = None
        if pending is None:
            return
        sampled = {row.key: tuple(row.sampled) for row in rows}
        emitted = tuple(sampled.get(key, ()) for key in pending.keys)
        self._proposer.commit(_round(pending, emitted))
        passes = []
        drafted = 0
        for b, (key, tokens) in enumerate(zip(pending.keys, emitted, strict=True)):
            if tokens:
                self._seqs[key].token_ids += tokens
                depth = pending.draft.depth[b]
                passes.append((depth, min(len(tokens) - 1, depth), len(tokens)))
                drafted += pending.draft.width[b]
        self.stats.add(passes, drafted=drafted)
        took = self._planner.seconds(pending.batch, pending.draft, now - pending.began, same=same)
        self.stats.add_round(draft=pending.draft_seconds, target=took, host=0.0)

    def _admit(self, row: Row) -> None:
        before = tuple(map(int, row.before()))
        request = Request(
            id=self._num_admitted,
            prompt_token_ids=before,
            params=SamplingParams(),
            seed=0,
            end_ids=frozenset(),
            max_tokens=self.host.context,
        )
        self._num_admitted += 1
        seq = SequenceState(request=request, slot=self._free.pop(), token_ids=[*before, *map(int, row.sampled)])
        self._seqs[row.key] = seq
        self._proposer.admit(seq.slot, request)

    def _release(self, key: Hashable) -> None:
        seq = self._seqs.pop(key)
        seq.finish_reason = FinishReason.STOP
        self._proposer.release(seq.slot)
        self._free.append(seq.slot)

    def _draft(self, seqs: tuple[SequenceState, ...], keys: tuple[Hashable, ...], now: float) -> Draft:
        budget = tuple(max(min(self.host.most, self.host.context - len(seq.token_ids) - 1), 0) for seq in seqs)
        batch = Batch(
            seqs=seqs,
            start=tuple(len(seq.token_ids) - 1 for seq in seqs),
            feed=tuple((seq.token_ids[-1],) for seq in seqs),
            budget=DraftBudget(budget),
        )
        batch = self._planner.plan(batch, self.stats)
        most = batch.draft_budget
        tree_of_each = self._proposer.propose(batch.limited(tuple(_NODES_PER_TOKEN * count for count in most)))
        draft = self._planner.trim(batch, to_chains(tree_of_each, most))
        began = self.clock()
        self._pending = _Pending(batch, draft, keys, draft_seconds=began - now, began=began)
        return draft


class _StepPlanner:
    """The planner in an engine whose passes cannot be measured on their own.

    The first steps are plain. Their shortest time sets the scale of the costs, and the planner corrects them with the
    times of the steps that follow.
    """

    def __init__(self, k: int | str, host: HostFacts, alternatives: int) -> None:
        """Draft k tokens, or as many as pay (auto)."""
        self._fixed: Planner | None = FixedPlanner(k) if isinstance(k, int) else None
        self._host = host
        self._alternatives = alternatives
        self._planner: CostPlanner | None = None
        self._times: list[float] = []  # of plain steps, per unit of `_units`

    def plan(self, batch: Batch, stats: StatsAccumulator) -> Batch:
        planner = self._fixed or self._planner
        return planner.plan(batch, stats) if planner else batch.limited((0,) * len(batch.seqs))

    def trim(self, batch: Batch, draft: Draft) -> Draft:
        planner = self._fixed or self._planner
        return planner.trim(batch, draft) if planner else draft

    def seconds(self, batch: Batch, draft: Draft, took: float, *, same: bool) -> float:
        """Return the seconds to count for a step that `took` so long.

        A step over other sequences, which may have prefilled some, or a pause before it says
        nothing about these. It counts as expected.
        """
        if self._planner is not None:
            seqs = len(batch.seqs)
            expected = self._planner.expected_seconds(seqs, sum(draft.width) / seqs, cached=sum(batch.start) / seqs)
            return took if same else min(took, expected)
        if same and self._fixed is None:
            self._times.append(took / self._units(len(batch.seqs)))
            if len(self._times) == _PLAIN_STEPS:
                self._planner = self._make_planner(min(self._times))
        return took

    def _units(self, tokens: int) -> float:
        """Return the time of a step over these tokens, where one token takes 1."""
        share = _TOKEN_SHARE_CPU if self._host.on_cpu else _TOKEN_SHARE_GPU
        return 1 + share * (tokens - 1)

    def _make_planner(self, one_token: float) -> CostPlanner:
        tokens = (1, _MOST_TOKENS)
        seconds = tuple(one_token * self._units(count) for count in tokens)
        cost = CostModel(target=PassCost(tokens=tokens, seconds=seconds, entry=0.0, pair=0.0), draft=None, host=0.0)
        return CostPlanner(*[cost] * self._alternatives, max_draft_tokens=self._host.most, model_sources=0)


def to_chains(draft: Draft, most: Sequence[int]) -> Draft:
    """Return the path that takes the first child of each node, which is the likeliest one, up to `most` [B] nodes."""
    if not draft.size:
        return draft
    parents = draft.parent.tolist()
    tokens = draft.host_tokens()
    paths = [_first_path(parents[b][:width], most[b]) for b, width in enumerate(draft.width)]
    width = tuple(map(len, paths))
    if not any(width):
        return tree.empty(len(width), _CPU)
    rows = [tree.pick(tokens[b], path) for b, path in enumerate(paths)]
    probs = draft.accept_prob and tuple(tuple(tree.pick(draft.accept_prob[b], path)) for b, path in enumerate(paths))
    return tree.chain(tree.upload_rows(rows, max(width), _CPU), width, accept_prob=probs)


def _first_path(parents: Iterable[int], most: int) -> list[int]:
    """Return the nodes of the path that takes the first child of each node."""
    path: list[int] = []
    last = -1
    for node, parent in enumerate(parents):
        if parent == last and len(path) < most:
            path.append(node)
            last = node
    return path


def _round(pending: _Pending, emitted: tuple[tuple[int, ...], ...]) -> Round:
    """Return the round in which these tokens [B] were emitted. Logits are not known."""
    pairs = zip(emitted, pending.draft.depth, strict=True)
    return Round(
        batch=pending.batch,
        draft=pending.draft,
        scores=cast(Scores, None),
        path=tuple(tuple(range(min(max(len(tokens) - 1, 0), depth))) for tokens, depth in pairs),
        emitted=emitted,
        sampled_logprob=((),) * len(emitted),
        failed=tuple(not tokens for tokens in emitted),
    )
