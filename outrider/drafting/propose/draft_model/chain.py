"""Draft chains with a draft model of the target's vocabulary (Leviathan et al. 2023; Chen et al. 2023)."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

import torch
from torch.nn import functional

from outrider.core import devices, tree
from outrider.core.cache import prompts_that_fit
from outrider.core.draft_chains import ChainBuilder
from outrider.core.draws import Draws
from outrider.core.noise import PositionNoise
from outrider.core.proposer import ProposerSetup, delays_first_token, must_reproduce
from outrider.core.target import ChainSampler, Target
from outrider.core.types import Batch, Draft, DraftChains, DraftKind, Draw, Needs, Packed, Request, Round, StopRule
from outrider.drafting.propose.draft_model.confidence import Confidence
from outrider.drafting.propose.draft_model.window import find_window
from outrider.models.triton.fastest import fastest_inverse_cdf, fastest_sampling
from outrider.verify.sampling import BatchSampling, SamplingTensors, apply_sampling, draw_params_of

_log = logging.getLogger("outrider")
PREFILL_CHUNK = 512  # most tokens that the draft model prefills in one round
SMALL_FEED = 64  # feeds of at most this many tokens do not count toward PREFILL_CHUNK


class DraftModelProposer:
    """Runs a draft model over its own KV cache.

    The draft model prefills a sequence when it first drafts for it, so it costs nothing while the
    planner does not speculate. It reads a long prompt only after the target's first token, which
    does not wait for it. Draft tokens are sampled under the sampling parameters of the
    request, so that q is close to p.
    """

    needs = Needs()

    def __init__(self, setup: ProposerSetup, model: Target) -> None:
        """Draft with `model`, whose token ids are the target's."""
        self._setup = setup
        self._model = model
        self._sampler = model if isinstance(model, ChainSampler) else None
        self._window = find_window(model)
        self._sampling = BatchSampling(setup.vocab, setup.device)
        self._kernels = fastest_sampling(setup.device)
        self._inverse_cdf = fastest_inverse_cdf(setup.device)
        self._batch: Batch | None = None  # what the draft model has staged in this round
        self._draft = tree.empty(1, setup.device)  # the draft for the sequences of `_batch`
        self._proposed = self._draft  # the same draft for all sequences of the target's batch
        self._confidence = Confidence()
        # Margins of the draft tokens of this round; None: not computed.
        self._margins: Sequence[Sequence[float]] | None = None
        # Draft tokens with a margin. They include the token at which a sequence stopped.
        self._measured_tokens: list[list[int]] = []
        self._has_warned = False

    def admit(self, slot: int, request: Request) -> None:
        self._model.cache.admit(slot, request.prompt_token_ids, request.params.scope)
        self._confidence.begin_text(slot)

    def propose(self, batch: Batch) -> Draft:
        if not any(batch.draft_budget):
            self._batch = None
            return tree.empty(len(batch.seqs), self._setup.device)
        draft_batch, indices = self._catch_up(batch)
        self._batch = draft_batch
        num_prefilling = prefilling_seqs(batch, draft_batch)
        if draft_batch is None:
            return replace(tree.empty(len(batch.seqs), self._setup.device), num_prefilling=num_prefilling)
        draft = self._propose(draft_batch, indices, len(batch.seqs))
        # A copy would lose the cached host tokens, so copy only if necessary.
        return replace(draft, num_prefilling=num_prefilling) if num_prefilling else draft

    def commit(self, round: Round) -> None:
        if self._batch is None:
            return
        num_accepted = self._num_accepted(round)
        paths = []
        for seq, width in zip(self._batch.seqs, self._draft.width, strict=True):
            # The draft model was not fed its last draft token, so its cache ends before it.
            num_cached = min(num_accepted[seq.slot], max(width - 1, 0))
            paths.append(tuple(range(num_cached)))
        self._model.cache.commit(replace(round, batch=self._batch, draft=self._draft, path=tuple(paths)))

    def _propose(self, batch: Batch, indices: Sequence[int], num_seqs: int) -> Draft:
        """Draft for the sequences of `batch` with these `indices` among `num_seqs` sequences."""
        self._draft = self._draft_chains(batch)
        self._proposed = self._draft if len(indices) == num_seqs else _spread(self._draft, indices, num_seqs)
        return self._proposed

    def _num_accepted(self, round: Round) -> dict[int, int]:
        """Return the number of accepted draft tokens by slot, and learn from them."""
        if self._margins is None and tree.is_cut(round.draft, self._proposed):  # no need to wait for the device
            return {seq.slot: len(path) for seq, path in zip(round.batch.seqs, round.path, strict=True)}
        assert self._batch is not None
        emitted = {seq.slot: tokens for seq, tokens in zip(round.batch.seqs, round.emitted, strict=True)}
        draft_tokens = self._measured_tokens if self._margins is not None else self._draft.host_tokens()
        num_accepted = {}
        for b, (seq, width) in enumerate(zip(self._batch.seqs, self._draft.width, strict=True)):
            pairs = zip(draft_tokens[b][:width], emitted[seq.slot], strict=False)
            num_accepted[seq.slot] = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            if self._margins is not None:
                # Sampled tokens that were cut from the draft were not verified, so nothing is
                # learned from them.
                verified = draft_tokens[b] if self._draft.q is None else draft_tokens[b][:width]
                self._confidence.learn(seq.slot, verified, self._margins[b], emitted[seq.slot])
        return num_accepted

    def release(self, slot: int) -> None:
        self._model.cache.release(slot)

    @property
    def model(self) -> Target:
        return self._model

    def bytes(self) -> int:
        """Bytes of the weights and the cache of the draft model."""
        return self._model.bytes() + self._model.cache.bytes()

    def _catch_up(self, batch: Batch) -> tuple[Batch | None, list[int]]:
        """Return the sequences that the draft model runs, with the tokens it has not been fed, and their indices."""
        if self._window:
            for seq, start, feed, budget in zip(batch.seqs, batch.start, batch.feed, batch.draft_budget, strict=True):
                if budget:
                    self._window.slide(seq, start + len(feed))
        fitting = self._fitting_slots(batch)
        indices = []
        starts = []
        feeds = []
        budgets = []
        chunk_left = PREFILL_CHUNK
        for b, seq in enumerate(batch.seqs):
            end = batch.start[b] + len(batch.feed[b])
            start = self._model.cache.length(seq.slot)
            room = self._room(seq.slot, end)
            if room < batch.draft_budget[b]:
                self._warn_of_room(room)
            budget = min(batch.draft_budget[b], max(room, 0))
            if not budget or end > self._model.context or seq.slot not in fitting:
                continue
            reproducible = must_reproduce(seq, self._setup.draw)
            # What the draft model has cached depends on other requests, so a reproducible draft does not depend on it.
            if delays_first_token(seq, end if reproducible else end - start):
                continue
            completely = end - start <= SMALL_FEED or reproducible
            stop = end if completely else min(end, start + chunk_left)
            if start < stop:
                chunk_left -= 0 if completely else stop - start
                indices.append(b)
                starts.append(start)
                feeds.append(tuple(seq.token_ids[start:stop]))
                budgets.append(budget if stop == end else 0)
        if not indices:
            return None, indices
        draft_batch = replace(
            batch,
            seqs=tuple(batch.seqs[b] for b in indices),
            start=tuple(starts),
            feed=tuple(feeds),
            budget=replace(batch.budget, tokens=tuple(budgets), with_forced=(), alternative=0),
            num_waiting=0,
        )
        return draft_batch, indices

    def _room(self, slot: int, end: int) -> int:
        """Return how many draft tokens fit behind the first `end` tokens of a slot."""
        return self._window.room(slot, end) if self._window else self._model.context - end

    def _warn_of_room(self, room: int) -> None:
        """Warn, the first time only, that a draft model has room for fewer draft tokens than the budget."""
        if self._has_warned:
            return
        self._has_warned = True
        if self._window:
            _log.warning(
                "the draft window of %d tokens has room for drafts of %d tokens at the moment; longer drafts are cut",
                self._window.size,
                room,
            )
        else:
            _log.warning("the draft model's context of %d tokens is full; going on without it", self._model.context)

    def _fitting_slots(self, batch: Batch) -> frozenset[int]:
        """Return the slots for which the draft model's cache has memory."""
        ends = {}
        for seq, start, feed, budget in zip(batch.seqs, batch.start, batch.feed, batch.draft_budget, strict=True):
            if budget:
                end = start + len(feed)
                ends[seq.slot] = end + min(self._num_fed(budget), self._room(seq.slot, end))
        return prompts_that_fit(self._model.cache, {}, ends)

    def _num_fed(self, budget: int) -> int:
        """Return the most draft tokens that the draft model is fed to draft `budget` tokens."""
        return budget

    def _draft_chains(self, batch: Batch) -> Draft:
        sampling = self._sampling.of(batch.seqs)
        # If an output must be reproduced, the end tokens of another sequence must not stop its
        # chain.
        ends = frozenset[int]()
        if not any(must_reproduce(seq, self._setup.draw) for seq in batch.seqs):
            ends = frozenset.intersection(*(seq.request.end_ids for seq in batch.seqs))
        slots = [seq.slot for seq in batch.seqs]
        limits = batch.budget.min_path_prob, batch.budget.min_draft_probs
        stop_rule = self._confidence.stop_rule(slots, *limits, tuple(ends))
        chains = self._draft_in_one_call(batch, sampling, stop_rule) if max(batch.draft_budget) else None
        if chains is None:
            return self._draft_by_token(batch, sampling, stop_rule)
        self._margins = chains.margin
        kind = None
        if chains.q is not None:
            if all(sampling.sampled) and len(set(chains.count)) == 1:
                kind = tree.kinds(DraftKind.SAMPLED, *chains.tokens.shape, self._setup.device)
            else:
                kind = torch.where(chains.q.at >= 0, int(DraftKind.SAMPLED), int(DraftKind.ONE_HOT))
        return self._chain(chains.tokens, chains.count, chains.accept_prob, kind=kind, q=chains.q)

    def _draft_in_one_call(self, batch: Batch, sampling: SamplingTensors, stop_rule: StopRule) -> DraftChains | None:
        """Draft with one call of the model. None if the sampling parameters do not allow it."""
        if not min(batch.draft_budget):  # sequences in prefill draft one token, which is dropped
            at_least_one = batch.limited(tuple(max(budget, 1) for budget in batch.draft_budget))
            chains = self._draft_in_one_call(at_least_one, sampling, stop_rule)
            return chains and _limit(chains, batch.draft_budget)
        model = self._model
        vocab = self._setup.vocab
        draw = self._setup.draw
        # Temperature and filters do not change which token is the likeliest one.
        if sampling.plain_greedy or (sampling.unmodified and draw is Draw.ARGMAX):
            return model.draft_greedy(batch, vocab, stop_rule)
        if self._sampler is None:
            return None
        draws = self._draws(batch)
        if not sampling.unmodified:
            draws = replace(draws, adjusted=batch.seqs)
        if draw is Draw.ARGMAX or sampling.all_greedy:
            draws = replace(draws, params=tuple(params._replace(temperature=0.0) for params in draws.params))
            return replace(self._sampler.draft_sampled(batch, vocab, draws, stop_rule), q=None)
        return self._sampler.draft_sampled(batch, vocab, draws, stop_rule)

    def _draws(self, batch: Batch) -> Draws:
        """Return the randomness of the draft tokens of a round."""
        depth = max(batch.draft_budget)
        noise = self._sampling.noise(batch.seqs)
        params = tuple(draw_params_of(seq, self._setup.vocab) for seq in batch.seqs)
        if self._setup.draw is Draw.RACE:
            return Draws(params=params, race_keys=noise.race_keys(torch.arange(depth).expand(len(batch.seqs), depth)))
        return Draws(params=params, uniform=noise.uniforms(depth, batch.noise_stream))

    def _draft_by_token(self, batch: Batch, sampling: SamplingTensors, stop_rule: StopRule) -> Draft:
        """Draft with one pass of the model for each token."""
        noise = self._sampling.noise(batch.seqs)
        draft = tree.empty(len(batch.seqs), self._setup.device)
        uniform = noise.uniforms(max(batch.draft_budget), batch.noise_stream)
        distributions: list[torch.Tensor] = []  # [B, V] by depth
        builder = ChainBuilder(batch.draft_budget, stop_rule if devices.is_cpu(self._setup.device) else None)
        scores = self._model.score(batch, draft)
        while builder.depth < max(builder.count):
            if builder.depth:
                scores = self._model.score(batch, draft, first=builder.depth - 1)
            logits = fit_vocabulary(scores.logits, self._setup.vocab)
            q = apply_sampling(logits, sampling, draft, last=True, kernels=self._kernels)[:, 0]
            # The distribution of a greedy sequence is one-hot. Taking the argmax is the fastest way
            # to its token.
            chosen = q.argmax(-1) if sampling.all_greedy else self._choose_token(q, noise, uniform, builder.depth)
            tokens = torch.cat([draft.tokens, chosen[:, None]], 1)
            distributions.append(q)
            builder.process(logits[:, -1], chosen, None if scores.confidence is None else scores.confidence[:, -1])
            draft = tree.chain(tokens, tuple(min(count, builder.depth) for count in builder.count))
        self._margins = builder.margins
        if self._setup.draw is Draw.ARGMAX or sampling.all_greedy or not distributions:
            return self._chain(draft.tokens, draft.width, builder.accept_probs)
        sampled = tree.upload(sampling.sampled, self._setup.device, torch.bool)[:, None]
        kind = torch.where(sampled, int(DraftKind.SAMPLED), int(DraftKind.ONE_HOT)).expand_as(draft.tokens)
        index = torch.arange(draft.tokens.numel(), device=self._setup.device).view(len(distributions), -1).T
        packed = Packed(values=torch.cat(distributions), at=torch.where(sampled, index, -1))
        return self._chain(draft.tokens, draft.width, builder.accept_probs, kind=kind, q=packed)

    def _chain(
        self,
        tokens: torch.Tensor,
        width: tuple[int, ...],
        accept_prob: Sequence[Sequence[float]] | None,
        *,
        kind: torch.Tensor | None = None,
        q: Packed | None = None,
    ) -> Draft:
        """Return a draft of the first `width[b]` tokens of each chain."""
        size = max(width)
        cut_accept_prob = None
        if accept_prob is not None:
            cut_accept_prob = tuple(tuple(probs[:count]) for probs, count in zip(accept_prob, width, strict=True))
        measured = tokens
        if size < tokens.shape[1]:
            tokens = tokens[:, :size]
            kind = None if kind is None else kind[:, :size]
            q = q and replace(q, at=q.at[:, :size])
        draft = tree.chain(tokens, width, kind=kind, q=q, accept_prob=cut_accept_prob)
        if accept_prob is not None:
            self._measured_tokens = draft.host_tokens() if measured is tokens else measured.tolist()
        return draft

    def _choose_token(self, q: torch.Tensor, noise: PositionNoise, uniform: torch.Tensor, depth: int) -> torch.Tensor:
        """Choose draft token number `depth` [B] from the distributions `q` [B, V]."""
        match self._setup.draw:
            case Draw.ARGMAX:
                return q.argmax(-1)
            case Draw.SAMPLE:
                return self._inverse_cdf(q, uniform[:, depth])
            case Draw.RACE:
                return noise.sample_race(q, torch.full((len(q),), depth, device=q.device))


def prefilling_seqs(batch: Batch, draft_batch: Batch | None) -> int:
    """Return the number of sequences with a draft budget that the draft model still prefills."""
    num_drafting = sum(map(bool, draft_batch.draft_budget)) if draft_batch else 0
    return sum(map(bool, batch.draft_budget)) - num_drafting


def _limit(chains: DraftChains, budget: tuple[int, ...]) -> DraftChains:
    """Limit the chains to the budgets. Sequences without a budget have no margins either."""
    return replace(
        chains,
        count=tuple(map(min, chains.count, budget)),
        margin=_with_budget(chains.margin, budget),
        accept_prob=_with_budget(chains.accept_prob, budget),
    )


def _with_budget(values: Sequence[Sequence[float]] | None, budget: tuple[int, ...]) -> Sequence[Sequence[float]] | None:
    """Return the values of sequences that have a budget, and () for the others."""
    return values and tuple(each if count else () for each, count in zip(values, budget, strict=True))


def fit_vocabulary(logits: torch.Tensor, vocab: int) -> torch.Tensor:
    """Cut or pad logits to the target's vocabulary. Models of a family may pad their vocabularies differently."""
    missing = vocab - logits.shape[-1]
    return functional.pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits[..., :vocab]


def _spread(draft: Draft, indices: Sequence[int], num_seqs: int) -> Draft:
    """Return the draft of a batch of `num_seqs` sequences. Those that are not in `indices` have no draft."""
    index = tree.upload(indices, draft.tokens.device)
    shape = (num_seqs, draft.size)
    tokens = draft.tokens.new_zeros(shape).index_copy_(0, index, draft.tokens)
    kind = draft.kind.new_zeros(shape).index_copy_(0, index, draft.kind)
    q = draft.q and replace(draft.q, at=draft.tokens.new_full(shape, -1).index_copy_(0, index, draft.q.at))
    widths = dict(zip(indices, draft.width, strict=True))
    accept_prob = None
    if draft.accept_prob is not None:
        estimates = dict(zip(indices, draft.accept_prob, strict=True))
        accept_prob = tuple(estimates.get(b, ()) for b in range(num_seqs))
    return tree.chain(tokens, tuple(widths.get(b, 0) for b in range(num_seqs)), kind=kind, q=q, accept_prob=accept_prob)
