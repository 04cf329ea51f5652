"""The nouns of one round, and the letters they are measured in.

B rows, N draft nodes, V vocabulary, H hidden size, S cached length. p is the target's law at a node, after
temperature, filters, penalties and bias; q is the law that a sampled guess was drawn from (Leviathan et al. 2023).
`accepted` excludes the bonus token; `emitted = accepted + 1`, or 0 while a row is still feeding its prompt.

Tensors stay on the target's device. Tuples are on the host: what the host needs to know to shape a round is known
before the round begins, so nothing between propose and commit waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any, NamedTuple

import torch

from outrider.core.grammar import Grammar, Matcher
from outrider.core.params import SamplingParams
from outrider.core.stats import Stats
from outrider.core.text import TextStream


class Law(IntEnum):
    """How a guess was made. A verifier is exact only if this is true, so it is data."""

    ONE_HOT = 0  # chosen, without randomness of its own
    SAMPLED = 1  # drawn from q, independently of its siblings
    WITHOUT_REPLACEMENT = 2  # drawn from q without its earlier siblings, renormalised


class Draw(StrEnum):
    """How a proposer that has a distribution should make its guesses, so that the verifier accepts most of them."""

    ARGMAX = "argmax"
    SAMPLE = "sample"
    RACE = "race"  # shares the position's exponential race with the target


class Finish(StrEnum):
    """Why a completion ended."""

    STOP = "stop"  # end-of-text, a stop token, a stop string, or the end of what the constraint allows
    LENGTH = "length"  # max_tokens, or the context is full
    ABORT = "abort"  # the caller took it back
    ERROR = "error"  # the model's logits were not numbers, or the grammar grew too complex


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One completion to make."""

    id: int
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    end_ids: frozenset[int]  # tokens that end the completion: end-of-text and the user's
    limit: int  # tokens to emit at most
    arm: int | None = None  # which of the proposer's alternatives guesses for it; None: whichever the planner chooses
    grammar: Grammar | None = None  # of its constraint


@dataclass(slots=True, kw_only=True, eq=False)
class Row:
    """A request that holds a slot. The engine and its scheduler change it; everybody else reads."""

    request: Request
    slot: int  # -1 while it waits for one
    text: list[int]  # committed: the prompt and what was emitted
    stream: TextStream | None = None
    matcher: Matcher | None = None  # where the text stands in its grammar
    cached: int = 0  # committed tokens that the target's cache holds
    passes: list[tuple[int, int, int]] = field(default_factory=list)  # (deepest guess, accepted, emitted) a pass
    drafted: int = 0  # nodes of all passes
    authors: list[bool] = field(default_factory=list)  # per emitted token: was it an accepted guess?
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: Finish | None = None
    error: str = ""
    rank: tuple[int, int] = (0, 0)  # who has the lower one comes first

    @classmethod
    def of(cls, text: Sequence[int], slot: int = 0, params: SamplingParams | None = None) -> Row:
        """A row that no user asked for: a text to be read, in checks and measurements."""
        prompt, params = tuple(text), params or SamplingParams()
        request = Request(id=-1, prompt=prompt, params=params, seed=0, end_ids=frozenset(), limit=1)
        return cls(request=request, slot=slot, text=list(text))

    @property
    def emitted(self) -> int:
        """Tokens of the completion so far."""
        return len(self.text) - len(self.request.prompt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The rows that run now, and what each has to feed: committed tokens that the cache does not hold yet."""

    rows: tuple[Row, ...]  # [B]
    start: tuple[int, ...]  # [B] cached length before this round
    feed: tuple[tuple[int, ...], ...]  # [B] tokens, at least one a row
    budget: tuple[int, ...]  # [B] guesses the row may spend; 0 = do not speculate
    room: tuple[int, ...] = ()  # [B] the same with those that its grammar forces; none: it may add none
    waiting: int = 0  # rows that hold a slot and take no part in this round
    keep: float = 0.0  # the chance from which a guess pays for its place in the target's pass
    worth: tuple[float, ...] = ()  # the chance from which it pays to draft another after it, where 1, 2, ... rows do
    arm: int = 0  # which of the proposer's alternatives is to guess, where it has some (see `Needs`)
    voice: int = 0  # of proposers whose draws meet in one tree each has another, and so noise of its own

    @property
    def emits(self) -> tuple[bool, ...]:
        """[B] whether the feed reaches the end of the committed text, so that the row emits this round."""
        ends = zip(self.rows, self.start, self.feed, strict=True)
        return tuple(start + len(feed) == len(row.text) for row, start, feed in ends)

    @property
    def arms(self) -> tuple[int, ...]:
        """[B] which of the proposer's alternatives each row has its guesses from."""
        asked = (row.request.arm for row in self.rows)
        return tuple(self.arm if arm is None else arm for arm in asked)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packed:
    """Numbers over the vocabulary for nodes that have them, and for no others.

    In a large batch one row may have thirty guesses and the others none: padded to one width, as [B, M, V], most of
    what is written and read would be padding.
    """

    values: torch.Tensor  # [T, V]
    at: torch.Tensor  # [B, M] int64: where in them a node's lie; below 0 where it has none

    @classmethod
    def of(cls, padded: torch.Tensor) -> Packed:
        """Of [B, M, V], as they lie there."""
        rows, nodes, _ = padded.shape
        return cls(values=padded.flatten(0, 1), at=torch.arange(rows * nodes, device=padded.device).view(rows, nodes))

    def padded(self) -> torch.Tensor:
        """[B, M, V], zero where a node has none; a copy."""
        return self.values[self.at.clamp(min=0)].masked_fill_(self.at[..., None] < 0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A tree of guesses for each row; a chain is a tree whose parents are -1, 0, 1, ...

    Parents precede children, and siblings stand in the order in which they were drawn. Nodes from `count` on are
    padding. A sampled node carries in `q` the law it was drawn from, before earlier siblings were taken out of it.

    A proposer that knows how good its guesses are says so in `chance`, which never rises from one node to the next: so
    whoever wants fewer guesses takes the first ones (`tree.cut`). It may come from the committed text, from how guesses
    like it have fared, and for a node that was drawn from the laws it and its ancestors were drawn from; never from a
    token drawn at or below the node, or cutting would bias the output.
    """

    tokens: torch.Tensor  # [B, N] int64, target ids
    parent: torch.Tensor  # [B, N] int64; -1 = the last committed token
    count: torch.Tensor  # [B] int64; 0 is always legal
    law: torch.Tensor  # [B, N] int64, of Law
    q: Packed | None  # of SAMPLED and WITHOUT_REPLACEMENT nodes alone; None when nothing was sampled
    width: tuple[int, ...]  # [B] what the host knows of count: an upper bound, and how many nodes are fed
    depth: tuple[int, ...]  # [B] guesses on the longest path; the width of a chain
    chain: bool  # every row is a chain
    chance: tuple[tuple[float, ...], ...] | None = None  # [B][width] that the node is kept; None: not said
    by: tuple[tuple[int, ...], ...] | None = None  # [B][width] who made it, bits for the parts of a combination
    unread: int = 0  # rows that have no guesses because a draft model still reads their texts
    _listed: list[list[int]] | None = field(default=None, init=False, repr=False, compare=False)

    def listed(self) -> list[list[int]]:
        """`tokens` on the host, padding included; who asks first waits for the device."""
        if self._listed is None:
            object.__setattr__(self, "_listed", self.tokens.tolist() if self.size else [[]] * len(self.width))
        assert self._listed is not None
        return self._listed

    @property
    def size(self) -> int:
        """N, padding included."""
        return self.tokens.shape[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trust:
    """When a draft model should stop: a guess's chance, if its parent is kept, is sigmoid(weight x margin + bias).

    The margin is the distance of the two largest logits. A guess whose path's chance is below `keep` is left out, and
    after one below `worth`, or one that ends a text, its row stops.
    """

    weight: tuple[float, ...]  # by position; the last one goes on
    bias: tuple[float, ...]
    keep: float = 0.0
    worth: tuple[float, ...] = ()  # where 1, 2, ... rows are still guessing; none: never
    ends: tuple[int, ...] = ()  # tokens after which nothing comes

    def until(self, rows: int) -> float:
        """The chance below which a row stops where so many rows are guessing."""
        return self.worth[min(rows, len(self.worth)) - 1] if self.worth else 0.0


class Want(NamedTuple):
    """How a request wants its tokens drawn, once bias and penalties have changed the logits."""

    temperature: float  # 0 takes the likeliest id
    top_k: int  # the size of the vocabulary is off
    top_p: float
    min_p: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dice:
    """How the guesses of a chain are drawn: each is the first id whose cumulative chance exceeds a given number."""

    wants: tuple[Want, ...]  # [B]
    uniform: torch.Tensor  # [B, K] float64 in [0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grown:
    """Chains of a draft model."""

    tokens: torch.Tensor  # [B, K] int64; row b begins with count[b] guesses, perhaps one more, and padding
    count: tuple[int, ...]  # [B]
    margin: Sequence[Sequence[float]] | None = None  # [B][count, or one more]; None: nobody looked
    chance: Sequence[Sequence[float]] | None = None  # of the path up to there, shaped alike
    q: Packed | None = None  # [B, K] of guesses that were drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """What one pass of the target says of the last committed token (node 0) and of each guess (node 1 + j)."""

    logits: torch.Tensor  # [B, 1 + N, V] float32
    features: Mapping[int, torch.Tensor] = field(default_factory=dict)  # output of layer k: [B, 1 + N, H]
    fed: Mapping[int, tuple[torch.Tensor, ...]] = field(default_factory=dict)  # and at each row's whole feed: [B][F, H]
    # [B, 1 + N] the likeliest ids, -1 where logits are no numbers; None: not looked for
    best: torch.Tensor | None = None
    sure: torch.Tensor | None = None  # [B, 1 + N] a draft's own word, in log-odds, that a guess drawn there is kept

    @property
    def packed(self) -> Packed | None:
        """The logits without their padding, at least one for each row, where a pass has left them so."""
        return None

    @property
    def host(self) -> Sequence[Sequence[int]] | None:
        """`best` [B, 1 + N], where a pass has left it on the host."""
        return None

    def states(self, layers: Sequence[int], b: int, path: Sequence[int]) -> torch.Tensor:
        """[n, layers, H] of row b's feed and of the guesses on `path`; it may be a view into the whole pass."""
        nodes = [node + 1 for node in path]
        return torch.stack([torch.cat([self.fed[at][b], self.features[at][b, nodes]]) for at in layers], 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Memory:
    """A target's keys and values for those who look at them, entry by place in the text, however they lie."""

    # Of a layer and some slots, from one entry up to another: keys and values [rows, key heads, entries, D], which may
    # be views. Behind what a slot holds stands anything that is a number. None before the first pass.
    entries: Callable[[int, Sequence[int], int, int], tuple[torch.Tensor, torch.Tensor] | None]
    config: Mapping[str, Any]  # the model's own words for its layers


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tables:
    """What drafts trained on a target's states share with it; tensors may be copies."""

    embedding: torch.Tensor  # [V, H], as tokens enter the first layer
    head: torch.Tensor  # [V, H]
    norm: torch.Tensor  # [H], before the head
    epsilon: float
    packed: Any = None  # the head as native kernels read it, for drafts that run on them too
    memory: Memory | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The accepted path, one more token, and their log-probabilities under p."""

    path: torch.Tensor  # [B, N] int64: draft nodes in order, padded with -1
    accepted: torch.Tensor  # [B] int64
    bonus: torch.Tensor  # [B] int64
    logprob: torch.Tensor  # [B, N + 1] float, of the accepted tokens and then the bonus; 0 beyond


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Natural log-probabilities at one emitted token."""

    token: int
    logprob: float  # under the model's own softmax, before temperature, penalties and filters
    sampled_logprob: float  # under p, the law that the token was drawn from
    top: tuple[tuple[int, float], ...]  # the likeliest tokens of the model's own softmax, best first


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One finished round as every part is told of it: what ran, and what was kept."""

    batch: Batch
    draft: Draft
    scores: Scores
    path: tuple[tuple[int, ...], ...]  # [B] accepted draft nodes, in order
    emitted: tuple[tuple[int, ...], ...]  # [B] their tokens and the bonus; empty for a row that only fed
    sampled_logprob: tuple[tuple[float, ...], ...]  # [B] under p, per emitted token
    failed: tuple[bool, ...]  # [B] the target's logits were not numbers, or as `reasons` says
    reasons: Mapping[int, str] = field(default_factory=dict)  # by row


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a proposer wants from the target's pass, so that nothing else is exported."""

    layers: tuple[int, ...] = ()  # decoder layers, counted from 0, whose outputs are wanted
    arms: int = 1  # alternatives that a planner chooses from, round by round


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What a caller gets: one finished completion."""

    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str
    finish: Finish
    seed: int
    guessed: tuple[bool, ...]  # per token: an accepted guess, or the target's own
    logprobs: tuple[TokenLogprobs, ...]
    stats: Stats
    error: str = ""
