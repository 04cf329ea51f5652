"""Pass the changes of logits by bias, penalties and min_tokens to the native kernels."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

from outrider.core.types import SequenceState
from outrider.models.native.structures import CAdjustment


class Adjustments:
    """The changes to the logits of sequences [B]. It owns the arrays whose addresses the kernels get."""

    def __init__(self, seqs: Sequence[SequenceState]) -> None:
        self._kept: list[array[int] | array[float]] = []
        self._sequences = (CAdjustment * len(seqs))(*map(self._of, seqs))
        self.address = ctypes.addressof(self._sequences)

    def _of(self, seq: SequenceState) -> CAdjustment:
        params = seq.request.params
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        tokens = seq.token_ids if penalties != (1, 0, 0) else ()
        ends = seq.request.end_ids if params.min_tokens else ()
        return CAdjustment(
            token=self._keep(array("i", tokens)),
            bias_id=self._keep(array("i", params.logit_bias)),
            bias=self._keep(array("f", params.logit_bias.values())),
            end_id=self._keep(array("i", ends)),
            num_tokens=len(tokens),
            num_prompt=len(seq.request.prompt_token_ids),
            num_biases=len(params.logit_bias),
            num_ends=len(ends),
            minimum=max(params.min_tokens - seq.num_output_tokens, 0),
            repetition=params.repetition_penalty,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
        )

    def _keep(self, kept: array[int] | array[float]) -> int:
        """Keep an array, and return its address."""
        self._kept.append(kept)
        return kept.buffer_info()[0]
