"""Constraints in a round: what the grammar forces is guessed for free, and each node's logits lose what it forbids.

A grammar stands at each node where the node's own path has led it. Where it leaves one token, p is one-hot, so that a
guess of it is always kept; what stood there instead could not be, and gives way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from outrider.core import tree
from outrider.core.types import Batch, Draft, DraftKind, Packed, Round, Scores, SequenceState
from outrider.errors import OutriderError
from outrider.propose.tree_builder import TreeBuilder, depths
from outrider.verify.sampling import sound

FORCED = 32  # tokens that a grammar adds to a row's guesses at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Masks:
    """What may follow nodes of rows that have a grammar. Others are as they were."""

    row: torch.Tensor  # [M] int64, of the batch
    node: torch.Tensor  # [M] int64: 0 is the root, 1 + j guess j
    bars: torch.Tensor  # [M, V] float32, to be added to logits: 0, or -inf where an id is forbidden

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [B, 1 + N, V], without what is forbidden; a copy."""
        flat, at = logits.flatten(0, 1), self.row * logits.shape[1] + self.node
        return flat.index_copy(0, at, flat.index_select(0, at) + self.bars).view_as(logits)

    def apply_packed(self, logits: Packed) -> Packed:
        """The same of packed logits; a copy."""
        values, at = logits.values, logits.at[self.row, self.node]
        return replace(logits, values=values.index_copy(0, at, values.index_select(0, at) + self.bars))

    def best(self, scores: Scores) -> torch.Tensor:
        """The likeliest ids [B, 1 + N] that are allowed; -1 where the logits are no numbers."""
        best, packed, at = scores.best, scores.packed, (self.row, self.node)
        if best is None:
            best = torch.where(sound(scores.logits), scores.logits.argmax(-1), -1)
        values = scores.logits[at] if packed is None else packed.values.index_select(0, packed.at[at])
        found = (values + self.bars).argmax(-1)
        return best.index_put(at, torch.where(best[at] < 0, -1, found))


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstrainedDraft:
    """A round's guesses, as grammars have changed them."""

    draft: Draft
    masks: Masks | None = None  # None: no row has a grammar
    own: Mapping[int, TreeBuilder] = field(default_factory=dict)  # by row: what the proposer had guessed
    broken: Mapping[int, str] = field(default_factory=dict)  # rows whose grammar failed at one of their nodes, and why

    def told(self, round: Round) -> Round:
        """The round without what rows emitted whose grammar failed."""
        if not self.broken:
            return round

        def emptied(parts: Sequence[tuple[Any, ...]]) -> tuple[tuple[Any, ...], ...]:
            return tuple(() if b in self.broken else part for b, part in enumerate(parts))

        return replace(
            round,
            path=emptied(round.path),
            emitted=emptied(round.emitted),
            sampled_logprob=emptied(round.sampled_logprob),
            failed=tuple(failed or b in self.broken for b, failed in enumerate(round.failed)),
            reasons=self.broken,
        )

    def own_pass(self, round: Round, b: int) -> tuple[tuple[int, int, int], int]:
        """What the proposer's own guesses for row b come to, and how many they were; see `SequenceState.rounds`."""
        last, own = round.batch.seqs[b].rounds[-1], self.own.get(b)
        if own is None:
            return last, round.draft.width[b]
        kept = min(len(own.path(round.emitted[b])), last[1])
        return (max(depths(own.parent), default=0), kept, min(kept + 1, last[2])), len(own.tokens)

    def unforced(
        self, round: Round, passes: list[tuple[int, int, int]], nodes: int
    ) -> tuple[list[tuple[int, int, int]], int]:
        """What the proposer's own guesses would have come to alone, of a round of these passes and guesses."""
        if not self.own:
            return passes, nodes
        own = [self.own_pass(round, b) for b, tokens in enumerate(round.emitted) if tokens]
        return [triple for triple, _ in own], sum(width for _, width in own)


def apply_constraints(batch: Batch, draft: Draft, vocab: int) -> ConstrainedDraft:
    """What grammars make of a draft: picked guesses that they forbid are gone, and what they force is there.

    It changes with the tokens of a guess's ancestors alone, and where it depends on a drawn guess itself, p there is
    one-hot; so every rule stays exact.

    Args:
        batch: rows and, in `room`, how many guesses each may have in all.
        draft: what was proposed and planned. A chain stays one.
        vocab: ids that there are logits for.
    """
    if not any(row.matcher for row in batch.seqs):
        return ConstrainedDraft(draft=draft)
    ours = [b for b, (row, emits) in enumerate(zip(batch.seqs, batch.emits, strict=True)) if row.matcher and emits]
    given = _Guesses.of(draft)
    walks = {}
    for b in ours:
        spare = min(max(batch.forced_budget[b] - given.count[b], 0), FORCED) if batch.forced_budget else 0
        walks[b] = _Walk(batch.seqs[b], given, b, vocab=vocab, spare=spare)
    whole = {b: walk for b, walk in walks.items() if not walk.error}
    changed = {b: walk for b, walk in whole.items() if walk.source != list(range(given.count[b]))}
    return ConstrainedDraft(
        draft=given.rebuilt(draft, changed) if changed else draft,
        masks=_masks(whole, vocab, draft.tokens.device),
        own={b: TreeBuilder(given.tokens[b], given.parent[b], []) for b in changed},
        broken={b: walk.error for b, walk in walks.items() if walk.error},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Guesses:
    """A draft on the host, without its padding."""

    tokens: list[list[int]]
    parent: list[list[int]]
    law: list[list[int]]
    at: list[list[int]]  # of the laws that guesses were drawn from; -1 where they were picked
    count: list[int]

    @classmethod
    def of(cls, draft: Draft) -> _Guesses:
        laws = torch.full_like(draft.tokens, -1) if draft.q is None else draft.q.at
        copied = torch.cat([draft.count[:, None], draft.tokens, draft.parent, draft.kind, laws], 1).tolist()
        count, size = [row[0] for row in copied], draft.size
        begins = [1 + i * size for i in range(4)]
        tokens, parent, law, at = ([row[i : i + row[0]] for row in copied] for i in begins)
        return cls(tokens=tokens, parent=parent, law=law, at=at, count=count)

    def rebuilt(self, draft: Draft, changed: Mapping[int, _Walk]) -> Draft:
        """The draft with other guesses in some rows."""
        rows = range(len(self.count))
        walks = [changed.get(b) for b in rows]
        tokens = [walk.tokens if walk else self.tokens[b] for b, walk in enumerate(walks)]
        parent = [walk.parent if walk else self.parent[b] for b, walk in enumerate(walks)]
        law = [walk.law if walk else self.law[b] for b, walk in enumerate(walks)]
        at = [walk.at if walk else self.at[b] for b, walk in enumerate(walks)]
        width = tuple(map(len, tokens))
        size, device = max(width), draft.tokens.device
        if not size:
            return tree.empty(len(width), device)

        def padded(parts: Sequence[Sequence[int]], filler: int) -> torch.Tensor:
            return tree.upload([[*part, *[filler] * (size - len(part))] for part in parts], device)

        onward = tree.upload([list(range(-1, size - 1))] * len(width), device)
        q = None if draft.q is None else replace(draft.q, at=padded(at, -1))
        return Draft(
            tokens=padded(tokens, 0),
            parent=onward if draft.chain else padded(parent, -1),
            count=tree.upload(width, device),
            kind=padded(law, DraftKind.ONE_HOT),
            q=q,
            width=width,
            depth=tuple(max(depths(each), default=0) for each in parent),
            chain=draft.chain,
            source=tuple(_makers(draft, b, walk, width[b]) for b, walk in enumerate(walks)),
        )


def _makers(draft: Draft, b: int, walk: _Walk | None, width: int) -> tuple[int, ...]:
    """Who made each guess of a row: the proposer, or nobody where its grammar forces it."""
    own = (1,) * draft.width[b] if draft.source is None else draft.source[b]
    return own[:width] if walk is None else tuple(own[source] if source >= 0 else 0 for source in walk.source)


class _Walk:
    """One row's tree, walked with its grammar."""

    def __init__(self, row: SequenceState, given: _Guesses, b: int, *, vocab: int, spare: int) -> None:
        """Walk the guesses of row `b`, and add up to `spare` that must follow."""
        assert row.matcher is not None
        self.tokens: list[int] = []
        self.parent: list[int] = []
        self.law: list[int] = []
        self.at: list[int] = []
        self.source: list[int] = []  # which of the row's guesses each was; -1 where the grammar added it
        self.masks: list[tuple[int, NDArray[np.uint8]]] = []  # node, its bits
        self.error = ""
        self._matcher, self._ends, self._vocab, self._spare = row.matcher, row.request.end_ids, vocab, spare
        self._given = (given.tokens[b], given.law[b], given.at[b])
        self._children: dict[int, list[int]] = defaultdict(list)
        for node, above in enumerate(given.parent[b]):
            self._children[above].append(node)
        try:
            self._visit(-1, -1)
        except OutriderError as error:
            self.error = str(error)
            row.matcher.mend()
        except BaseException:
            row.matcher.mend()
            raise

    def _visit(self, old: int, new: int) -> None:
        """What follows guess `old` of the proposer's, -2 where it has none, which is guess `new` here."""
        if self._matcher.done:
            return
        bits = self._matcher.allowed()
        self.masks.append((1 + new, bits))
        if self._matcher.forced is not None:
            self._must(self._matcher.forced, old, new)
            return
        tokens, law, at = self._given
        for kid in self._children[old]:
            token = tokens[kid]
            legal = 0 <= token < self._vocab and bool(bits[token >> 3] >> (token & 7) & 1)
            if legal or law[kid] != DraftKind.ONE_HOT:  # to drop a drawn guess for what it is would bias the output
                node = self._add(token, new, law[kid], at[kid], kid)
                if legal:
                    self._enter(token, kid, node)

    def _must(self, token: int, old: int, new: int) -> None:
        kid = next((kid for kid in self._children[old] if self._given[0][kid] == token), -2)
        if kid < 0:
            if not self._spare:
                return
            self._spare -= 1
        self._enter(token, kid, self._add(token, new, DraftKind.ONE_HOT, -1, max(kid, -1)))

    def _enter(self, token: int, old: int, new: int) -> None:
        if token not in self._ends:
            self._matcher.enter(token)
            self._visit(old, new)
            self._matcher.leave()

    def _add(self, token: int, parent: int, law: int, at: int, source: int) -> int:
        self.tokens.append(token)
        self.parent.append(parent)
        self.law.append(law)
        self.at.append(at)
        self.source.append(source)
        return len(self.tokens) - 1


def _masks(walks: Mapping[int, _Walk], vocab: int, device: torch.device) -> Masks | None:
    places = [(b, node) for b, walk in walks.items() for node, _ in walk.masks]
    if not places:
        return None
    bits = torch.from_numpy(np.stack([bits for walk in walks.values() for _, bits in walk.masks]))
    if device.type == "cuda":
        bits = bits.pin_memory().to(device, non_blocking=True)
    row, node = zip(*places, strict=True)
    bars = functional.embedding(bits.int(), _spread(device)).flatten(1)[:, :vocab]
    return Masks(row=tree.upload(row, device), node=tree.upload(node, device), bars=bars)


def _spread(device: torch.device) -> torch.Tensor:
    """[256, 8]: what the bits of each byte add to logits. To look it up is faster than to shift and to fill."""
    byte, bit = torch.arange(256, device=device)[:, None], torch.arange(8, device=device)
    return torch.where((byte >> bit) & 1 > 0, 0.0, -torch.inf)
