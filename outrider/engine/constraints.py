"""Apply grammars to a round: mask the logits of each node, and add the draft tokens that a grammar forces.

The grammar state at a node follows from the path to the node. Where a grammar allows a single token, p is one-hot, so a
draft token with this value is always accepted and all others are always rejected.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from outrider.core import tree
from outrider.core.types import Batch, Draft, DraftKind, Packed, Round, Scores, SequenceState
from outrider.drafting.propose.tree_builder import TreeBuilder, depths
from outrider.errors import OutriderError
from outrider.verify.sampling import has_finite_max


@dataclass(frozen=True, slots=True, kw_only=True)
class Masks:
    """The tokens that may follow the nodes of sequences with a grammar."""

    seq: torch.Tensor  # [M] int64, index of the sequence in the batch
    node: torch.Tensor  # [M] int64: 0 is the root, 1 + j is draft token j
    bias: torch.Tensor  # [M, V] float32, added to the logits: 0, or -inf for forbidden tokens

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Return a copy of logits [B, 1 + N, V] with forbidden tokens at -inf."""
        flat = logits.flatten(0, 1)
        at = self.seq * logits.shape[1] + self.node
        return flat.index_copy(0, at, flat.index_select(0, at) + self.bias).view_as(logits)

    def apply_packed(self, logits: Packed) -> Packed:
        """Do what `apply` does for packed logits."""
        values = logits.values
        at = logits.at[self.seq, self.node]
        return replace(logits, values=values.index_copy(0, at, values.index_select(0, at) + self.bias))

    def best(self, scores: Scores) -> torch.Tensor:
        """Return the likeliest allowed tokens [B, 1 + N]; -1 where the logits are not finite."""
        best = scores.best
        packed = scores.packed
        at = (self.seq, self.node)
        if best is None:
            best = torch.where(has_finite_max(scores.logits), scores.logits.argmax(-1), -1)
        values = scores.logits[at] if packed is None else packed.values.index_select(0, packed.at[at])
        allowed = (values + self.bias).argmax(-1)
        return best.index_put(at, torch.where(best[at] < 0, -1, allowed))


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstrainedDraft:
    """The draft of a round after grammars have changed it."""

    draft: Draft
    masks: Masks | None = None  # None: no sequence has a grammar
    original: Mapping[int, TreeBuilder] = field(default_factory=dict)  # the proposer's trees, by changed sequence
    errors: Mapping[int, str] = field(default_factory=dict)  # by sequence whose grammar failed at a node

    def drop_failed(self, round: Round) -> Round:
        """Return the round without the tokens of sequences whose grammar failed."""
        if not self.errors:
            return round

        def without_failed(rows: Sequence[tuple[Any, ...]]) -> tuple[tuple[Any, ...], ...]:
            return tuple(() if b in self.errors else values for b, values in enumerate(rows))

        return replace(
            round,
            path=without_failed(round.path),
            emitted=without_failed(round.emitted),
            sampled_logprob=without_failed(round.sampled_logprob),
            failed=tuple(failed or b in self.errors for b, failed in enumerate(round.failed)),
            reasons=self.errors,
        )

    def proposed_pass(self, round: Round, b: int) -> tuple[tuple[int, int, int], int]:
        """Return the counts of the proposer's draft for sequence b (see `SequenceState.rounds`), and its size."""
        last = round.batch.seqs[b].rounds[-1]
        original = self.original.get(b)
        if original is None:
            return last, round.draft.width[b]
        accepted = min(len(original.path(round.emitted[b])), last[1])
        depth = max(depths(original.parent), default=0)
        return (depth, accepted, min(accepted + 1, last[2])), len(original.tokens)

    def unforced(
        self, round: Round, passes: list[tuple[int, int, int]], nodes: int
    ) -> tuple[list[tuple[int, int, int]], int]:
        """Return the counts and the number of draft tokens of the proposer alone, without the tokens of grammars."""
        if not self.original:
            return passes, nodes
        proposed = [self.proposed_pass(round, b) for b, tokens in enumerate(round.emitted) if tokens]
        return [counts for counts, _ in proposed], sum(size for _, size in proposed)


def apply_constraints(batch: Batch, draft: Draft, vocab: int) -> ConstrainedDraft:
    """Drop draft tokens that grammars forbid and add tokens that they force.

    Verification stays exact: a change depends only on the ancestors of a node, or p at the node is one-hot.

    Args:
        batch: the sequences. Their `budget` limits the draft tokens, including forced ones.
        draft: the draft after the planner has trimmed it. A chain stays a chain.
        vocab: the number of logits.
    """
    constrained = [b for b, seq in enumerate(batch.seqs) if seq.matcher]
    if not constrained:
        return ConstrainedDraft(draft=draft)
    emits = batch.emits
    trees = _host_nodes(draft)
    walks = {}
    for b in constrained:
        if not emits[b]:
            continue
        max_forced = batch.budget.forced(b, len(trees[b]))
        walks[b] = _GrammarWalk(batch.seqs[b], trees[b], vocab=vocab, max_forced=max_forced)
    complete = {b: walk for b, walk in walks.items() if not walk.error}
    original = {}  # of the trees that change
    for b, walk in complete.items():
        if [node.source for node in walk.nodes] != list(range(len(trees[b]))):
            original[b] = TreeBuilder([node.token for node in trees[b]], _parents(trees[b]), [])
            trees[b] = walk.nodes
    if original:
        draft = _rebuild(draft, trees, original)
    return ConstrainedDraft(
        draft=draft,
        masks=_masks(complete, vocab, draft.tokens.device),
        original=original,
        errors={b: walk.error for b, walk in walks.items() if walk.error},
    )


class _Node(NamedTuple):
    """A node of a constrained tree."""

    token: int
    parent: int
    kind: int  # a DraftKind
    q_index: int  # of the distribution it was sampled from; -1: not sampled
    source: int  # its index in the proposer's draft; -1: added because the grammar forces it


def _host_nodes(draft: Draft) -> list[list[_Node]]:
    """Copy a draft to the host, by sequence and without padding. One copy from the device."""
    q_index = torch.full_like(draft.tokens, -1) if draft.q is None else draft.q.at
    columns = torch.stack([draft.tokens, draft.parent, draft.kind, q_index], 2).tolist()
    counts = draft.count.tolist()
    trees = []
    for nodes, count in zip(columns, counts, strict=True):
        rows = enumerate(nodes[:count])
        trees.append([_Node(token, parent, kind, at, source) for source, (token, parent, kind, at) in rows])
    return trees


def _parents(nodes: Sequence[_Node]) -> list[int]:
    return [node.parent for node in nodes]


def _rebuild(draft: Draft, trees: Sequence[Sequence[_Node]], changed: Collection[int]) -> Draft:
    """Return the draft with these trees. The sequences of `changed` have other nodes than before."""
    width = tuple(map(len, trees))
    size = max(width)
    device = draft.tokens.device
    if not size:
        return tree.empty(len(width), device)

    def padded(field: str, filler: int) -> torch.Tensor:
        rows = [list(map(attrgetter(field), nodes)) for nodes in trees]
        return tree.upload_rows(rows, size, device, filler)

    if draft.chain:
        parent = tree.upload([list(range(-1, size - 1))] * len(width), device)
    else:
        parent = padded("parent", -1)
    return Draft(
        tokens=padded("token", 0),
        parent=parent,
        count=tree.upload(width, device),
        kind=padded("kind", DraftKind.ONE_HOT),
        q=None if draft.q is None else replace(draft.q, at=padded("q_index", -1)),
        width=width,
        depth=tuple(max(depths(_parents(nodes)), default=0) for nodes in trees),
        chain=draft.chain,
        source=tuple(_sources(draft, b, nodes, b in changed) for b, nodes in enumerate(trees)),
    )


def _sources(draft: Draft, b: int, nodes: Sequence[_Node], changed: bool) -> tuple[int, ...]:
    """Return the proposers of each node as bit masks; 0 for nodes that the grammar has added."""
    original = (1,) * draft.width[b] if draft.source is None else draft.source[b]
    if not changed:
        return original[: len(nodes)]
    return tuple(original[node.source] if node.source >= 0 else 0 for node in nodes)


class _GrammarWalk:
    """Walks the draft tree of one sequence together with its grammar and builds the constrained tree."""

    def __init__(self, seq: SequenceState, draft: Sequence[_Node], *, vocab: int, max_forced: int) -> None:
        """Walk the nodes of `draft`. Add up to `max_forced` tokens that the grammar forces."""
        assert seq.matcher is not None
        self.nodes: list[_Node] = []
        self.masks: list[tuple[int, NDArray[np.uint8]]] = []  # (index in the pass, bits of the allowed tokens)
        self.error = ""
        self._matcher = seq.matcher
        self._end_ids = seq.request.end_ids
        self._vocab = vocab
        self._forced_left = max_forced
        self._children: dict[int, list[_Node]] = defaultdict(list)
        for node in draft:
            self._children[node.parent].append(node)
        try:
            self._visit(-1, -1)
        except OutriderError as error:
            self.error = str(error)
            seq.matcher.reset()
        except BaseException:
            seq.matcher.reset()
            raise

    def _visit(self, old: int, new: int) -> None:
        """Add the children of a node. Its index is `old` in the draft (-2: not in it), and `new` in the result."""
        if self._matcher.done:
            return
        bits = self._matcher.allowed()
        self.masks.append((1 + new, bits))
        if self._matcher.forced is not None:
            self._add_forced(self._matcher.forced, old, new)
            return
        for child in self._children[old]:
            token = child.token
            allowed = 0 <= token < self._vocab and bool(bits[token >> 3] >> (token & 7) & 1)
            # Keep sampled tokens that are not allowed. Dropping a token for its value would bias the output.
            if allowed or child.kind != DraftKind.ONE_HOT:
                node = self._add(child._replace(parent=new))
                if allowed:
                    self._descend(token, child.source, node)

    def _add_forced(self, token: int, old: int, new: int) -> None:
        """Add the only token that may follow. Its siblings cannot be accepted."""
        index = next((child.source for child in self._children[old] if child.token == token), -1)
        if index < 0:
            if not self._forced_left:
                return
            self._forced_left -= 1
        node = self._add(_Node(token=token, parent=new, kind=DraftKind.ONE_HOT, q_index=-1, source=index))
        self._descend(token, index if index >= 0 else -2, node)

    def _descend(self, token: int, old: int, new: int) -> None:
        """Visit the children of a node with this token, unless it ends the text."""
        if token not in self._end_ids:
            self._matcher.push(token)
            self._visit(old, new)
            self._matcher.pop()

    def _add(self, node: _Node) -> int:
        self.nodes.append(node)
        return len(self.nodes) - 1


def _masks(walks: Mapping[int, _GrammarWalk], vocab: int, device: torch.device) -> Masks | None:
    """Return the masks of all visited nodes, or None if there are none."""
    nodes = [(b, node) for b, walk in walks.items() for node, _ in walk.masks]
    if not nodes:
        return None
    bits = torch.from_numpy(np.stack([bits for walk in walks.values() for _, bits in walk.masks]))
    if device.type == "cuda":
        bits = bits.pin_memory().to(device, non_blocking=True)
    seq, node = zip(*nodes, strict=True)
    bias = functional.embedding(bits.int(), _byte_biases(device)).flatten(1)[:, :vocab]
    return Masks(seq=tree.upload(seq, device), node=tree.upload(node, device), bias=bias)


def _byte_biases(device: torch.device) -> torch.Tensor:
    """Return [256, 8], the bias of the 8 tokens of each byte. The lookup is faster than shifting bits."""
    byte = torch.arange(256, device=device)[:, None]
    bit = torch.arange(8, device=device)
    return torch.where((byte >> bit) & 1 > 0, 0.0, -torch.inf)
