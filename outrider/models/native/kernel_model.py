"""A model in the kernels: its forward passes, and chains of draft tokens after them."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from outrider.core.draws import Draws
from outrider.core.types import DraftChains, StopRule
from outrider.models.native.chain_arrays import ChainBuffers, ChainInputs
from outrider.models.native.columns import Columns, PassOutput
from outrider.models.native.structures import CChain

_NEVER_STOP = StopRule(weight=(0.0,), bias=(0.0,))


class PassResult(NamedTuple):
    """The results of a forward pass. K columns have logits."""

    logits: torch.Tensor  # [K, V] float32
    best: array[int]  # [K] likeliest ids; -1 where the logits are not finite
    hidden_states: torch.Tensor  # [layers, T, H] outputs of the requested layers at all columns


class KernelModel:
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
        inputs = ChainInputs(columns, budget, stop_rule or _NEVER_STOP, draws)
        buffers = ChainBuffers(budget, vocab if draws else 0)
        chain = CChain(vocab=vocab, **inputs.fields(), **buffers.fields())
        c_pass = columns.c_pass(PassOutput(), state)
        self._code.outrider_draft_chains(self._handle, ctypes.byref(c_pass), ctypes.byref(chain))
        return buffers.chains(with_margins=stop_rule is not None)
