"""The batch that a training step reads, and what a draft predicts from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch

# From outputs [n, H] of the draft and the target's probabilities [n, Vd] to a loss [], summed over the n columns.
ExtraLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingBatch:
    """A batch of B padded sequences with the target's hidden states and distributions."""

    tokens: torch.Tensor  # [B, L + 1] int64
    aux_states: torch.Tensor  # [B, L, layers, H] hidden states of the target, of all tokens but the last
    loss_mask: torch.Tensor  # [B, L] bool: whether to train on the distribution after a token
    # [n, Vd] the target's distributions over the draft vocabulary, where `loss_mask` is true
    target_probs: torch.Tensor
    # By layer of the target, its keys and values [B, key heads, L, D] of the same tokens.
    shared_kv: Mapping[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    @cached_property
    def _row_index(self) -> torch.Tensor:
        """[B, L] the row of `target_probs` that belongs to a token."""
        return self.loss_mask.flatten().cumsum(0).view(self.loss_mask.shape) - 1

    def target_probs_at(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the target's distributions [m, Vd] after the tokens at `positions` [m] of sequences `rows` [m].

        `loss_mask` must be true for all of them.
        """
        return self.target_probs[self._row_index[rows, positions]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """The draft tokens of one step, in the n columns that are trained.

    In step s, each of these draft tokens is the one at index s of its chain.
    """

    loss_mask: torch.Tensor  # [B, C] bool, true for trained columns; a column is the same chain in all steps
    logits: torch.Tensor  # [n, Vd] of the draft
    target: torch.Tensor  # [n, Vd] the target's probabilities for the same tokens
    confidence: torch.Tensor | None = None  # [n] log-odds of acceptance that the draft itself predicts
    weight: float = 1.0  # of each column; above 1 if it stands for columns that are left out
    extra_loss: torch.Tensor | None = None  # [] a loss without draft tokens, summed over the batch
    # Weights and logits [n, Vd] of other predictions of the same draft tokens, which are trained as well.
    auxiliary: tuple[tuple[float, torch.Tensor], ...] = ()


def all_columns_step(
    batch: TrainingBatch,
    index: int,
    out: torch.Tensor,  # [B, C, H] the draft's outputs, of all columns that have this draft token
    logits: Callable[[torch.Tensor], torch.Tensor],  # LM head: from outputs to logits
    extra_loss: ExtraLoss | None = None,
) -> Step:
    """Return the step that trains draft token number `index` of all columns."""
    loss_mask = batch.loss_mask[:, 1 + index :]
    row, column = loss_mask.nonzero(as_tuple=True)
    out = out[row, column]
    target = batch.target_probs_at(row, column + 1 + index)
    return Step(
        loss_mask=loss_mask,
        logits=logits(out),
        target=target,
        extra_loss=extra_loss(out, target) if extra_loss else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chains:
    """The columns that train more than their first draft token.

    Column c holds token x_(c+1), and its first draft token predicts x_(c+2). Adjacent columns of a sequence are similar
    training data, so a random share of the columns is enough. Their weight makes up for the others.
    """

    size: int  # columns of the batch
    columns: torch.Tensor  # [B, A] the chosen columns
    valid: torch.Tensor  # [B, A] bool: false for padding, in sequences with fewer chosen columns
    weight: float  # of each chosen column

    @classmethod
    def of(cls, loss_mask: torch.Tensor, share: float, most: int) -> Chains:
        """Choose a random share of the columns whose first draft token is trained, up to `most` per sequence.

        Args:
            loss_mask: [B, C] bool, the columns whose first draft token is trained.
            share: the share to choose, in (0, 1].
            most: the most columns of a sequence.
        """
        size = loss_mask.shape[1]
        if share == 1.0 and size <= most:
            columns = torch.arange(size, device=loss_mask.device).expand(loss_mask.shape)
            return cls(size=size, columns=columns, valid=torch.ones_like(loss_mask), weight=1.0)
        in_share = torch.rand(loss_mask.shape).to(loss_mask.device) < share
        columns, valid = sample_columns(loss_mask & in_share, most)
        weight = float(loss_mask.sum()) / max(float(valid.sum()), 1.0)
        return cls(size=size, columns=columns, valid=valid, weight=weight)

    @property
    def rows(self) -> torch.Tensor:
        """[B, A] the sequence of each column."""
        return torch.arange(len(self.columns), device=self.columns.device)[:, None].expand_as(self.columns)

    def positions(self, index: int) -> torch.Tensor:
        """Return the positions [B, A] of the token before draft token number `index`.

        Positions beyond the sequence are cut to its last one.
        """
        return (self.columns + 1 + index).clamp(max=self.size)

    def step(
        self,
        batch: TrainingBatch,
        index: int,
        out: torch.Tensor,  # [B, A, H] the draft's outputs
        logits: Callable[[torch.Tensor], torch.Tensor],  # LM head: from outputs to logits
        extra_loss: ExtraLoss | None = None,
    ) -> Step:
        """Return the step that trains draft token number `index` of the chosen columns."""
        rows = self.rows
        positions = self.positions(index)
        trained = self.valid & (self.columns + 1 + index <= self.size) & batch.loss_mask[rows, positions]
        loss_mask = torch.zeros(len(rows), self.size, dtype=torch.bool, device=trained.device)
        loss_mask[rows[trained], self.columns[trained]] = True
        target = batch.target_probs_at(rows[trained], positions[trained])
        out = out[trained]
        return Step(
            loss_mask=loss_mask,
            logits=logits(out),
            target=target,
            weight=self.weight,
            extra_loss=extra_loss(out, target) if extra_loss else None,
        )


def sample_columns(allowed: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose up to `most` of the allowed columns [B, C] of each sequence at random.

    Returns:
        The columns [B, A] in ascending order, and whether [B, A] they are allowed. Sequences with
        fewer allowed columns have padding at the end.
    """
    # The random numbers come from the CPU generator, whose state a training saves.
    keys = torch.rand(allowed.shape).to(allowed.device).masked_fill(~allowed, 2.0)
    chosen = keys.topk(min(max(int(allowed.sum(1).max()), 1), most), largest=False).indices
    size = allowed.shape[1]
    columns = torch.where(allowed.gather(1, chosen), chosen, size).sort(1).values
    return torch.where(columns < size, columns, min(1, size - 1)), columns < size
