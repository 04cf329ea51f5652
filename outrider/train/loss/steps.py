"""What a step of training reads, and what a draft says of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch


@dataclass(frozen=True, kw_only=True, eq=False)
class Texts:
    """Texts as the target has read them, side by side, padded behind."""

    tokens: torch.Tensor  # [B, L + 1] int64
    aux_states: torch.Tensor  # [B, L, taps, H] states of all tokens but the last
    learn: torch.Tensor  # [B, L] bool: whether the law after it is learned from
    target_probs: (
        torch.Tensor
    )  # [n, Vd] the target's probabilities of what can be guessed, after each of those that are
    # By layer of the target that is looked at, its keys and values [B, key heads, L, D] of the same tokens.
    shown: Mapping[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    @cached_property
    def _number(self) -> torch.Tensor:
        """[B, L] which of the laws is the one after a token."""
        return self.learn.flatten().cumsum(0).view(self.learn.shape) - 1

    def target_probs_at(self, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """The laws [m, Vd] after tokens at places [m] of rows [m], all of which are learned from."""
        return self.target_probs[self._number[rows, places]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """Guesses that lie as many guesses behind the target's own states, at the n columns that are learned from."""

    learn: torch.Tensor  # [B, C] which columns these are; column c is the same chain of guesses in all steps
    logits: torch.Tensor  # [n, Vd] the draft's
    target: torch.Tensor  # [n, Vd] the target's probabilities, at the same places
    confidence: torch.Tensor | None = None  # [n] log-odds of being kept, by the draft's own judgement, if it has any
    weight: float = 1.0  # of each, which may stand for others that are left out
    beside: torch.Tensor | None = None  # [] a loss that is no guess's, summed over the tokens of the same texts


def everywhere(
    texts: Texts,
    guess: int,
    out: torch.Tensor,  # [B, C, H] the draft's outputs, of all columns from which texts reach so far
    logits: Callable[[torch.Tensor], torch.Tensor],  # of outputs
) -> Step:
    """What is learned from guess number `guess` behind all columns."""
    learn = texts.learn[:, 1 + guess :]
    row, column = learn.nonzero(as_tuple=True)
    return Step(learn=learn, logits=logits(out[row, column]), target=texts.target_probs_at(row, column + 1 + guess))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chains:
    """Columns of texts from which guesses go on behind the first one.

    Column c holds the token x_(c+1), and guesses x_(c+2) first. Not all of them need go on: those that stand beside
    each other in a text teach much the same, and the ones that do weigh as much as all.
    """

    size: int  # columns
    columns: torch.Tensor  # [B, A] that go on
    live: torch.Tensor  # [B, A] whether they are such; texts with fewer than others have padding behind
    weight: float  # of each

    @classmethod
    def of(cls, learn: torch.Tensor, share: float, most: int) -> Chains:
        """A share of the columns whose first guess is learned from [B, C], up to `most` of a text, drawn at random."""
        size = learn.shape[1]
        if share == 1.0 and size <= most:
            every = torch.arange(size, device=learn.device).expand(learn.shape)
            return cls(size=size, columns=every, live=torch.ones_like(learn), weight=1.0)
        lucky = torch.rand(learn.shape).to(learn.device) < share
        columns, live = drawn(learn & lucky, most)
        return cls(size=size, columns=columns, live=live, weight=float(learn.sum()) / max(float(live.sum()), 1.0))

    @property
    def rows(self) -> torch.Tensor:
        """[B, A] the text that each is of."""
        return torch.arange(len(self.columns), device=self.columns.device)[:, None].expand_as(self.columns)

    def places(self, guess: int) -> torch.Tensor:
        """[B, A] where the token before guess number `guess` stands, or the last place where there is none."""
        return (self.columns + 1 + guess).clamp(max=self.size)

    def step(
        self,
        texts: Texts,
        guess: int,
        out: torch.Tensor,  # [B, A, H] the draft's outputs
        logits: Callable[[torch.Tensor], torch.Tensor],  # of outputs
    ) -> Step:
        """What is learned from guess number `guess`."""
        rows, places = self.rows, self.places(guess)
        here = self.live & (self.columns + 1 + guess <= self.size) & texts.learn[rows, places]
        learn = torch.zeros(len(rows), self.size, dtype=torch.bool, device=here.device)
        learn[rows[here], self.columns[here]] = True
        laws = texts.target_probs_at(rows[here], places[here])
        return Step(learn=learn, logits=logits(out[here]), target=laws, weight=self.weight)


def drawn(able: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Up to `most` of the columns of each text that are able [B, C] to, at random.

    Returns:
        Columns [B, A] in rising order, and whether they are [B, A] such: texts with fewer than others have padding.
    """
    # Drawn on the host, whose generator is what a training saves to go on from.
    luck = torch.rand(able.shape).to(able.device).masked_fill(~able, 2.0)
    found = luck.topk(min(max(int(able.sum(1).max()), 1), most), largest=False).indices
    beyond = able.shape[1]
    columns = torch.where(able.gather(1, found), found, beyond).sort(1).values
    return torch.where(columns < beyond, columns, min(1, beyond - 1)), columns < beyond
