"""A draft model of the target's vocabulary that drafts chains (Leviathan et al. 2023; Chen et al. 2023)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

import torch
from torch.nn import functional

from outrider.cache.base import prompts_that_fit
from outrider.core import tree
from outrider.core.noise import PositionNoise, inverse_cdf
from outrider.core.types import (
    Batch,
    Draft,
    DraftChains,
    DraftKind,
    Draw,
    Needs,
    Packed,
    Request,
    Round,
    SequenceState,
    StopRule,
    UniformDraws,
)
from outrider.models.base import ChainSampler, Target
from outrider.models.draft_chains import ChainBuilder
from outrider.propose.base import ProposerSetup
from outrider.propose.draft_model.confidence import Confidence
from outrider.verify.sampling import SamplingTensors, apply_sampling, draw_params_of

_log = logging.getLogger("outrider")
_PIECE = 512  # most tokens that the draft model prefills in one round
_NEAR = 64  # sequences at most this far behind are fed completely


class DraftModelProposer:
    """Runs a draft model over its own KV cache.

    The draft model prefills a text when it first drafts for it, so it costs nothing while the planner does not
    speculate. Draft tokens are sampled under the sampling parameters of the request, so that q is close to p.
    """

    needs = Needs()

    def __init__(self, setup: ProposerSetup, model: Target) -> None:
        self._setup, self._model = setup, model
        self._knobs: SamplingTensors | None = None
        self._noise: PositionNoise | None = None  # of the same rows
        self._batch: Batch | None = None  # what the draft model has staged in this round
        self._draft = self._proposed = tree.empty(1, setup.device)  # its draft for these sequences, and for the batch
        self._confidence = Confidence()
        self._margins: Sequence[Sequence[float]] | None = None  # of the draft of this round; None: not computed
        self._looked: list[list[int]] = []  # their number, including the token at which a sequence stopped
        self._told = False

    def admit(self, slot: int, request: Request) -> None:
        self._model.cache.admit(slot, request.prompt_token_ids, request.params.scope)

    def propose(self, batch: Batch) -> Draft:
        ours, where = self._catch_up(batch)
        self._batch = ours
        unread = prefilling_seqs(batch, ours)
        if ours is None:
            return replace(tree.empty(len(batch.seqs), self._setup.device), num_prefilling=unread)
        draft = self._guess(ours, where, len(batch.seqs))
        return replace(draft, num_prefilling=unread) if unread else draft  # a copy loses the cached host tokens

    def commit(self, round: Round) -> None:
        if self._batch is None:
            return
        kept = self._kept(round)
        # The draft model was not fed its last token, so its cache ends before it.
        fed = zip(self._batch.seqs, self._draft.width, strict=True)
        path = tuple(tuple(range(min(kept[row.slot], max(width - 1, 0)))) for row, width in fed)
        self._model.cache.commit(replace(round, batch=self._batch, draft=self._draft, path=path))

    def _guess(self, batch: Batch, where: Sequence[int], rows: int) -> Draft:
        """Draft for the sequences of `batch`, which have the indices `where` among `rows` sequences."""
        self._draft = self._grow(batch)
        self._proposed = self._draft if len(where) == rows else _spread(self._draft, where, rows)
        return self._proposed

    def _kept(self, round: Round) -> dict[int, int]:
        """Return the number of accepted draft tokens by slot, and learn from them."""
        if self._margins is None and tree.is_cut(round.draft, self._proposed):  # known without reading from the device
            return {row.slot: len(path) for row, path in zip(round.batch.seqs, round.path, strict=True)}
        assert self._batch is not None
        emitted = {row.slot: tokens for row, tokens in zip(round.batch.seqs, round.emitted, strict=True)}
        guesses = self._looked if self._margins is not None else self._draft.host_tokens()
        kept = {}
        for b, (row, width) in enumerate(zip(self._batch.seqs, self._draft.width, strict=True)):
            pairs = zip(guesses[b][:width], emitted[row.slot], strict=False)
            kept[row.slot] = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            if self._margins is not None:
                # Sampled tokens that were cut from the draft were not verified, so they show nothing.
                looked = guesses[b] if self._draft.q is None else guesses[b][:width]
                self._confidence.learn(looked, self._margins[b], emitted[row.slot])
        return kept

    def release(self, slot: int) -> None:
        self._model.cache.release(slot)

    @property
    def model(self) -> Target:
        """The draft model."""
        return self._model

    def bytes(self) -> int:
        """Bytes of the weights and the cache of the draft model."""
        return self._model.bytes() + self._model.cache.bytes()

    def _catch_up(self, batch: Batch) -> tuple[Batch | None, list[int]]:
        """Return the sequences that the draft model runs, with the text it has not been fed, and their indices."""
        able = self._able(batch)
        where, starts, feeds, budgets = [], [], [], []
        left = _PIECE
        for b, row in enumerate(batch.seqs):
            end = batch.start[b] + len(batch.feed[b])
            start = self._model.cache.length(row.slot)
            room = self._model.context - end
            budget = min(batch.draft_budget[b], max(room, 0))
            if room < batch.draft_budget[b] and not self._told:
                self._told = True
                _log.warning("the draft model's context of %d tokens is full; going on without it", self._model.context)
            whole = end - start <= _NEAR or self._comes_again(row)
            stop = end if whole else min(end, start + left)
            if start < stop and end <= self._model.context and budget and row.slot in able:
                left -= 0 if whole else stop - start
                where.append(b)
                starts.append(start)
                feeds.append(tuple(row.token_ids[start:stop]))
                budgets.append(budget if stop == end else 0)
        if not where:
            return None, where
        rows = tuple(batch.seqs[b] for b in where)
        ours = replace(
            batch,
            seqs=rows,
            start=tuple(starts),
            feed=tuple(feeds),
            draft_budget=tuple(budgets),
            forced_budget=(),
            num_waiting=0,
            alternative=0,
        )
        return ours, where

    def _comes_again(self, row: SequenceState) -> bool:
        """Return whether the request has its own seed and a text that depends on the draft."""
        asked = row.request.params
        return asked.seed is not None and asked.temperature > 0 and self._setup.draw is Draw.SAMPLE

    def _able(self, batch: Batch) -> frozenset[int]:
        """Return the slots for which the draft model's cache has memory."""
        ends = zip(batch.seqs, batch.start, batch.feed, batch.draft_budget, strict=True)
        wanted = {
            row.slot: min(start + len(feed) + self._reads(budget), self._model.context)
            for row, start, feed, budget in ends
            if budget
        }
        return prompts_that_fit(self._model.cache, {}, wanted)

    def _reads(self, budget: int) -> int:
        """Return the number of draft tokens that the draft model is fed to make `budget` of them."""
        return budget

    def _grow(self, batch: Batch) -> Draft:
        knobs = self._knobs_of(batch)
        own = any(
            self._comes_again(row) for row in batch.seqs
        )  # the end tokens of another sequence must not stop its chain
        ends = frozenset[int]() if own else frozenset.intersection(*(row.request.end_ids for row in batch.seqs))
        stop_rule = self._confidence.trust(batch.min_path_prob, batch.min_draft_probs, tuple(ends))
        grown = self._grown(batch, knobs, stop_rule) if max(batch.draft_budget) else None
        if grown is None:
            return self._draw_chain(batch, knobs, stop_rule)
        self._margins, law = grown.margin, None
        if grown.q is not None:
            law = torch.where(grown.q.at >= 0, int(DraftKind.SAMPLED), int(DraftKind.ONE_HOT))
        return self._chain(grown.tokens, grown.count, grown.accept_prob, law=law, q=grown.q)

    def _grown(self, batch: Batch, knobs: SamplingTensors, stop_rule: StopRule) -> DraftChains | None:
        """Draft with one call of the model. None if the sampling parameters do not allow it."""
        if not min(batch.draft_budget):  # sequences in prefill draft one token, which is dropped
            one = replace(batch, draft_budget=tuple(max(most, 1) for most in batch.draft_budget))
            return _without(self._grown(one, knobs, stop_rule), batch.draft_budget)
        model, vocab, draw = self._model, self._setup.vocab, self._setup.draw
        if knobs.plain_greedy or (knobs.unmodified and draw is Draw.ARGMAX):  # sampling keeps the likeliest token
            return model.draft_greedy(batch, vocab, stop_rule)
        if knobs.unmodified and draw is Draw.SAMPLE and isinstance(model, ChainSampler):
            wants = tuple(draw_params_of(row, vocab) for row in batch.seqs)
            uniform = self._noise_of(batch).uniforms(max(batch.draft_budget), batch.noise_stream)
            return model.draft_sampled(batch, vocab, UniformDraws(params=wants, uniform=uniform), stop_rule)
        return None

    def _draw_chain(self, batch: Batch, knobs: SamplingTensors, stop_rule: StopRule) -> Draft:
        noise = self._noise_of(batch)
        draft = tree.empty(len(batch.seqs), self._setup.device)
        draws = noise.uniforms(max(batch.draft_budget), batch.noise_stream)
        laws: list[torch.Tensor] = []
        watch = ChainBuilder(batch.draft_budget, stop_rule if tree.is_cpu(self._setup.device) else None)
        scores = self._model.score(batch, draft)
        while watch.depth < max(watch.count):
            if watch.depth:
                scores = self._model.score(batch, draft, first=watch.depth - 1)
            own = _fit(scores.logits, self._setup.vocab)
            law = apply_sampling(own, knobs, draft, last=True)[:, 0]
            # The distribution of a greedy sequence is one-hot. The exponential race is the fastest way to its argmax.
            drawn = law.argmax(-1) if knobs.all_greedy else self._draw(law, noise, draws, watch.depth)
            tokens = torch.cat([draft.tokens, drawn[:, None]], 1)
            laws.append(law)
            watch.look(own[:, -1], drawn, None if scores.confidence is None else scores.confidence[:, -1])
            draft = tree.chain(tokens, tuple(min(most, watch.depth) for most in watch.count))
        self._margins = watch.margins
        if self._setup.draw is Draw.ARGMAX or knobs.all_greedy or not laws:
            return self._chain(draft.tokens, draft.width, watch.accept_probs)
        sampled = tree.upload(knobs.sampled, self._setup.device, torch.bool)[:, None]
        law_of = torch.where(sampled, int(DraftKind.SAMPLED), int(DraftKind.ONE_HOT)).expand_as(draft.tokens)
        places = torch.arange(draft.tokens.numel(), device=self._setup.device).view(len(laws), -1).T
        q = Packed(values=torch.cat(laws), at=torch.where(sampled, places, -1))
        return self._chain(draft.tokens, draft.width, watch.accept_probs, law=law_of, q=q)

    def _chain(
        self,
        tokens: torch.Tensor,
        width: tuple[int, ...],
        chances: Sequence[Sequence[float]] | None,
        *,
        law: torch.Tensor | None = None,
        q: Packed | None = None,
    ) -> Draft:
        """Keep the first `width[b]` tokens of each chain."""
        size, said = max(width), None
        if chances is not None:
            said = tuple(tuple(row[:count]) for row, count in zip(chances, width, strict=True))
        looked = tokens
        if size < tokens.shape[1]:
            tokens, law = tokens[:, :size], law if law is None else law[:, :size]
            q = q and replace(q, at=q.at[:, :size])
        draft = tree.chain(tokens, width, kind=law, q=q, accept_prob=said)
        if chances is not None:
            self._looked = draft.host_tokens() if looked is tokens else looked.tolist()
        return draft

    def _draw(self, law: torch.Tensor, noise: PositionNoise, draws: torch.Tensor, depth: int) -> torch.Tensor:
        """Choose draft token number `depth` [B] from `law` [B, V]."""
        match self._setup.draw:
            case Draw.ARGMAX:
                return law.argmax(-1)
            case Draw.SAMPLE:
                return inverse_cdf(law, draws[:, depth])
            case Draw.RACE:
                return noise.sample_race(law, torch.full((len(law),), depth, device=law.device))

    def _knobs_of(self, batch: Batch) -> SamplingTensors:
        if self._knobs is None or self._knobs.seqs != batch.seqs:
            self._knobs = SamplingTensors.of(batch.seqs, self._setup.vocab, self._setup.device)
            self._noise = PositionNoise(self._knobs.seed, self._knobs.seed)
        return self._knobs

    def _noise_of(self, batch: Batch) -> PositionNoise:
        assert self._noise is not None
        return self._noise.at(tree.upload([len(row.token_ids) for row in batch.seqs], self._setup.device))


def prefilling_seqs(batch: Batch, ours: Batch | None) -> int:
    """Return the number of sequences with a budget that are still in prefill."""
    return sum(map(bool, batch.draft_budget)) - (sum(map(bool, ours.draft_budget)) if ours else 0)


def _without(grown: DraftChains | None, budget: tuple[int, ...]) -> DraftChains | None:
    """Drop the chains of sequences without a budget."""
    if grown is None:
        return None
    margin, chance = (
        part and tuple(each if most else () for each, most in zip(part, budget, strict=True))
        for part in (grown.margin, grown.accept_prob)
    )
    return replace(grown, count=tuple(map(min, grown.count, budget)), margin=margin, accept_prob=chance)


def _fit(logits: torch.Tensor, vocab: int) -> torch.Tensor:
    """Cut or pad logits to the target's ids. Models of a family may pad their vocabularies differently."""
    missing = vocab - logits.shape[-1]
    return functional.pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits[..., :vocab]


def _spread(draft: Draft, where: Sequence[int], rows: int) -> Draft:
    """Spread a draft to `rows` sequences. Those that are not in `where` have no draft."""
    index = tree.upload(where, draft.tokens.device)
    tokens = draft.tokens.new_zeros(rows, draft.size).index_copy_(0, index, draft.tokens)
    law = draft.kind.new_zeros(rows, draft.size).index_copy_(0, index, draft.kind)
    q = draft.q and replace(draft.q, at=draft.tokens.new_full((rows, draft.size), -1).index_copy_(0, index, draft.q.at))
    widths = dict(zip(where, draft.width, strict=True))
    chance = None
    if draft.accept_prob is not None:
        said = dict(zip(where, draft.accept_prob, strict=True))
        chance = tuple(said.get(b, ()) for b in range(rows))
    return tree.chain(tokens, tuple(widths.get(b, 0) for b in range(rows)), kind=law, q=q, accept_prob=chance)
