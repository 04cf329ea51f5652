"""Run forward passes and draft chains of tokens on the native kernels."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from outrider.core.draws import Draws
from outrider.core.types import DraftChains, Packed, StopRule
from outrider.models.native.abi import CChain, Columns, PassOutput, address
from outrider.models.native.adjustments import Adjustments

_NEVER_STOP = StopRule(weight=(0.0,), bias=(0.0,))


class PassResult(NamedTuple):
    """The results of a forward pass. K columns have logits."""

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

    def run(
        self,
        columns: Columns,
        layers: Sequence[int] = (),
        state: torch.Tensor | None = None,
        moments: torch.Tensor | None = None,
    ) -> PassResult:
        """Run one forward pass.

        Args:
            columns: the tokens of the pass, and which of them need logits.
            layers: the layers whose outputs are returned.
            state: the input of a draft head at each column, [T, H] float32, or [T, layers, target
                H] before fusion.
            moments: [layers, numbers] float32, to which the squares of the inputs of all linear layers are added.
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
            moments=0 if moments is None else moments.data_ptr(),
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
            columns: the columns of the pass. The last column of each sequence needs logits; the
                chain follows it.
            budget: [B] draft tokens per sequence, at least one.
            vocab: only ids below it are drafted.
            stop_rule: when a sequence stops before its budget is used; None: never.
            draws: how draft tokens are sampled; None: greedy.
            state: as in `run`. At each draft token the input is the output of the column before it.
        """
        # Both must live until the call returns, because the kernels get only the addresses of their arrays.
        inputs = _ChainInputs(columns, budget, stop_rule or _NEVER_STOP, draws)
        buffers = _ChainBuffers(budget, vocab if draws else 0)
        chain = CChain(vocab=vocab, **inputs.fields(), **buffers.fields())
        c_pass = columns.c_pass(PassOutput(), state)
        self._code.outrider_draft_chains(self._handle, ctypes.byref(c_pass), ctypes.byref(chain))
        return buffers.chains(with_margins=stop_rule is not None)


class _ChainInputs:
    """Arrays from which the kernels make chains. Their shape is [B] unless stated otherwise."""

    def __init__(self, columns: Columns, budget: Sequence[int], stop_rule: StopRule, draws: Draws | None) -> None:
        ends = list(columns.output_columns)
        self._depth = max(budget)
        self._slot = array("i", [columns.slot[end] for end in ends])
        self._position = array("i", [columns.position[end] + 1 for end in ends])
        self._entry = array("i", [columns.entry[end] + 1 for end in ends])
        self._budget = array("i", budget)
        self._min_path_prob = stop_rule.min_path_prob
        self._weight = array("f", stop_rule.weight)  # [positions]
        self._bias = array("f", stop_rule.bias)  # [positions]
        self._end_ids = array("i", stop_rule.ends)  # [end tokens]
        self._min_draft_prob = array("f", map(stop_rule.threshold, range(1, len(budget) + 1)))
        self._params = array("f", [value for fields in draws.params for value in fields]) if draws else None
        self._uniform = draws.uniform.contiguous() if draws and draws.uniform is not None else None
        self._race_keys = draws.race_keys.contiguous() if draws and draws.race_keys is not None else None
        self._adjustments = Adjustments(draws.adjusted) if draws and draws.adjusted else None

    def fields(self) -> dict[str, Any]:
        """Return the fields of `CChain` that the kernels read."""
        return {
            "slot": _array_address(self._slot),
            "position": _array_address(self._position),
            "entry": _array_address(self._entry),
            "budget": _array_address(self._budget),
            "weight": _array_address(self._weight),
            "bias": _array_address(self._bias),
            "end_ids": _array_address(self._end_ids),
            "min_draft_prob": _array_address(self._min_draft_prob),
            "params": 0 if self._params is None else _array_address(self._params),
            "adjustment": self._adjustments.address if self._adjustments else 0,
            "uniform": address(self._uniform),
            "race_keys": address(self._race_keys),
            "min_path_prob": self._min_path_prob,
            "batch_size": len(self._budget),
            "depth": self._depth,
            "num_weights": len(self._weight),
            "num_end_ids": len(self._end_ids),
        }


class _ChainBuffers:
    """Arrays that the kernels fill with chains. Their shape is [B, K] unless stated otherwise."""

    def __init__(self, budget: Sequence[int], vocab: int) -> None:
        """Allocate arrays for `budget` [B] draft tokens. `vocab` is the number of ids to sample from; 0: greedy."""
        self._budget = tuple(budget)
        batch_size = len(budget)
        depth = max(budget)
        self._shape = (batch_size, depth)
        self._tokens = array("i", bytes(4 * batch_size * depth))
        self._counts = array("i", bytes(4 * batch_size))  # [B]
        self._scored = array("i", bytes(4 * batch_size))  # [B] draft tokens that have a margin
        self._margins = array("f", bytes(4 * batch_size * depth))
        self._accept_probs = array("f", bytes(4 * batch_size * depth))
        self._q = torch.empty(sum(budget), vocab) if vocab else None  # [T, V]
        self._q_index = array("i", [-1]) * (batch_size * depth)

    def fields(self) -> dict[str, Any]:
        """Return the fields of `CChain` that the kernels write to."""
        return {
            "token": _array_address(self._tokens),
            "count": _array_address(self._counts),
            "scored": _array_address(self._scored),
            "margin": _array_address(self._margins),
            "accept_prob": _array_address(self._accept_probs),
            "q": address(self._q),
            "q_index": _array_address(self._q_index),
        }

    def chains(self, *, with_margins: bool) -> DraftChains:
        """Return the chains, with margins and acceptance probabilities if a stop rule has computed them."""
        tokens = self._as_tensor(self._tokens)
        q = None
        if self._q is not None:
            q = Packed(values=self._q[: max(self._q_index) + 1], at=self._as_tensor(self._q_index))
        if not with_margins:
            return DraftChains(tokens=tokens, count=self._budget, q=q)
        return DraftChains(
            tokens=tokens,
            count=tuple(self._counts),
            margin=self._by_sequence(self._margins),
            accept_prob=self._by_sequence(self._accept_probs),
            q=q,
        )

    def _as_tensor(self, values: array[int]) -> torch.Tensor:
        """Return values [B, K] as int64. `torch.tensor` takes twice the time."""
        return torch.frombuffer(array("q", values), dtype=torch.int64).view(self._shape)

    def _by_sequence(self, values: array[float]) -> tuple[tuple[float, ...], ...]:
        """Return the values at the scored draft tokens of each sequence."""
        depth = self._shape[1]
        return tuple(tuple(values[b * depth : b * depth + count]) for b, count in enumerate(self._scored))


def _array_address(values: array[Any]) -> int:
    return values.buffer_info()[0]
