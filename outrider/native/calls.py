"""Run forward passes and draft chains of tokens on the native kernels."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from outrider.core.types import DraftChains, Draws, Packed, StopRule
from outrider.native.abi import CChain, Columns, PassOutput


class PassResult(NamedTuple):
    """What a forward pass returns. K columns have logits."""

    logits: torch.Tensor  # [K, V] float32
    best: array[int]  # [K] likeliest ids; -1 where the logits are not finite
    hidden_states: torch.Tensor  # [layers, T, H] outputs of the requested layers at all columns


class Passes:
    """Base of models that are loaded into the kernels."""

    _handle: int

    def __init__(self, code: Any, *, hidden: int) -> None:
        self._code = code
        self._hidden = hidden
        self._no_states = torch.empty(0)

    @property
    def vocab(self) -> int:
        """Number of logits."""
        raise NotImplementedError

    def run(self, columns: Columns, layers: Sequence[int] = (), state: torch.Tensor | None = None) -> PassResult:
        """Run one forward pass.

        Args:
            columns: the tokens of the pass, and which of them need logits.
            layers: the layers whose outputs are returned.
            state: the input of a draft head at each column, [T, H] float32, or [T, layers, target H] before fusion.
        """
        num_outputs = len(columns.output_columns)
        logits = torch.empty(num_outputs, self.vocab)
        best = array("i", bytes(4 * num_outputs))
        states = torch.empty(len(layers), len(columns.token), self._hidden) if layers else self._no_states
        output = PassOutput(
            logits=logits.data_ptr(),
            best=best.buffer_info()[0],
            layers=array("i", layers),
            hidden_states=states.data_ptr(),
        )
        c_pass = columns.c_pass(output, state)
        self._code.outrider_run(self._handle, ctypes.byref(c_pass))
        return PassResult(logits, best, states)

    def draft_chains(
        self,
        columns: Columns,
        budget: Sequence[int],
        vocab: int,
        stop_rule: StopRule | None = None,
        *,
        draws: Draws | None = None,
        state: torch.Tensor | None = None,
    ) -> DraftChains:
        """Run one forward pass and extend a chain of draft tokens after it, for each sequence.

        Args:
            columns: the columns of the pass. The last column of each sequence needs logits; the chain follows it.
            budget: [B] draft tokens per sequence, at least one.
            vocab: only ids below it are drafted.
            stop_rule: when a sequence stops before its budget is used; None: never.
            draws: how draft tokens are sampled; None: greedy.
            state: as in `run`. At each draft token the input is the output of the column before it.
        """
        ends = list(columns.output_columns)
        batch_size = len(budget)
        # The arrays must live until the call returns: the kernels get only their addresses.
        slot = array("i", [columns.slot[end] for end in ends])
        position = array("i", [columns.position[end] + 1 for end in ends])
        entry = array("i", [columns.entry[end] + 1 for end in ends])
        budgets = array("i", budget)
        weight = array("f", stop_rule.weight if stop_rule else [0])
        bias = array("f", stop_rule.bias if stop_rule else [0])
        end_ids = array("i", stop_rule.ends if stop_rule else ())
        thresholds = array("f", [stop_rule.threshold(n) if stop_rule else 0.0 for n in range(1, batch_size + 1)])
        params = array("f", [value for fields in draws.params for value in fields] if draws else ())
        uniform = draws.uniform.contiguous() if draws and draws.uniform is not None else None
        race_keys = draws.race_keys.contiguous() if draws and draws.race_keys is not None else None
        buffers = _ChainBuffers(budget, vocab if draws else 0)
        chain = CChain(
            slot=_address(slot),
            position=_address(position),
            entry=_address(entry),
            budget=_address(budgets),
            weight=_address(weight),
            bias=_address(bias),
            end_ids=_address(end_ids),
            token=_address(buffers.tokens),
            count=_address(buffers.counts),
            scored=_address(buffers.scored),
            margin=_address(buffers.margins),
            accept_prob=_address(buffers.accept_probs),
            min_draft_prob=_address(thresholds),
            params=_address(params) if draws else 0,
            uniform=0 if uniform is None else uniform.data_ptr(),
            race_keys=0 if race_keys is None else race_keys.data_ptr(),
            q=0 if buffers.q is None else buffers.q.data_ptr(),
            q_index=_address(buffers.q_index),
            min_path_prob=stop_rule.min_path_prob if stop_rule else 0.0,
            batch_size=batch_size,
            depth=max(budget),
            vocab=vocab,
            num_weights=len(weight),
            num_end_ids=len(end_ids),
        )
        c_pass = columns.c_pass(PassOutput(), state)
        self._code.outrider_draft_chains(self._handle, ctypes.byref(c_pass), ctypes.byref(chain))
        return buffers.chains(with_margins=stop_rule is not None)


class _ChainBuffers:
    """Arrays that the kernels fill with chains. Their shape is [B, K] unless stated otherwise."""

    def __init__(self, budget: Sequence[int], vocab: int) -> None:
        """Allocate arrays for `budget` [B] draft tokens. `vocab` is the number of ids to sample from; 0: greedy."""
        self._budget = tuple(budget)
        batch_size = len(budget)
        depth = max(budget)
        self._shape = (batch_size, depth)
        self.tokens = array("i", bytes(4 * batch_size * depth))
        self.counts = array("i", bytes(4 * batch_size))  # [B]
        self.scored = array("i", bytes(4 * batch_size))  # [B] draft tokens that have a margin
        self.margins = array("f", bytes(4 * batch_size * depth))
        self.accept_probs = array("f", bytes(4 * batch_size * depth))
        self.q = torch.empty(sum(budget), vocab) if vocab else None  # [T, V]
        self.q_index = array("i", [-1]) * (batch_size * depth)

    def chains(self, *, with_margins: bool) -> DraftChains:
        """Return the chains, with margins and acceptance probabilities if a stop rule has computed them."""
        tokens = torch.tensor(self.tokens.tolist()).view(self._shape)
        q = None
        if self.q is not None:
            at = torch.tensor(self.q_index.tolist()).view(self._shape)
            q = Packed(values=self.q[: max(self.q_index) + 1], at=at)
        if not with_margins:
            return DraftChains(tokens=tokens, count=self._budget, q=q)
        return DraftChains(
            tokens=tokens,
            count=tuple(self.counts),
            margin=self._by_sequence(self.margins),
            accept_prob=self._by_sequence(self.accept_probs),
            q=q,
        )

    def _by_sequence(self, values: array[float]) -> tuple[tuple[float, ...], ...]:
        """Return the values at the scored draft tokens of each sequence."""
        depth = self._shape[1]
        return tuple(tuple(values[b * depth : b * depth + count]) for b, count in enumerate(self.scored))


def _address(values: array[Any]) -> int:
    return values.buffer_info()[0]
