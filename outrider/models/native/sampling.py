"""Target distributions and log-probabilities on the native kernels, which do not sort the vocabulary."""

import ctypes
from array import array
from collections.abc import Sequence
from functools import partial

import torch

from outrider.core.types import Draft
from outrider.errors import UnsupportedModel
from outrider.models.native.abi import CAdjustments, CDistributions, CLogprobs
from outrider.models.native.adjustments import Adjustments
from outrider.models.native.library import Library, load_library
from outrider.verify.logprobs import Logprobs
from outrider.verify.sampling import TORCH, SamplingKernels, SamplingTensors


def fastest_sampling(device: torch.device) -> SamplingKernels:
    """Return the native functions if the device is a CPU and the kernels are available, else those of torch."""
    if device.type != "cpu":
        return TORCH
    try:
        library = load_library()
    except UnsupportedModel:
        return TORCH  # no compiler; the torch functions compute the same
    return SamplingKernels(
        probs=partial(_target_probs, library),
        adjust=partial(_adjust, library),
        logprobs=partial(_logprobs, library),
    )


def _float32(logits: torch.Tensor) -> torch.Tensor:
    """Return logits for the kernels. Those of the kernels need no conversion."""
    return (logits if logits.dtype is torch.float32 else logits.float()).contiguous()


def _adjust(
    library: Library, logits: torch.Tensor, sampling: SamplingTensors, draft: Draft, at: torch.Tensor
) -> torch.Tensor:
    logits = _float32(logits)
    adjusted = torch.empty_like(logits)
    adjustments = Adjustments(sampling.seqs)
    nodes = _Nodes(draft, at.tolist())
    arguments = CAdjustments(
        sequence=adjustments.address,
        logits=logits.data_ptr(),
        adjusted=adjusted.data_ptr(),
        count=logits.shape[0],
        vocab=logits.shape[1],
        **nodes.fields(),
    )
    library.code.outrider_adjust(ctypes.byref(arguments))
    return adjusted


class _Nodes:
    """The rows of logits of a draft's nodes [nodes], and the paths of draft tokens before them."""

    def __init__(self, draft: Draft, at: Sequence[Sequence[int]]) -> None:
        """Take the nodes at indices `at` [B, M]. See `SamplingKernels.adjust`."""
        self._row, self._of, self._begin, self._depth, self._path = (array("i") for _ in range(5))
        tokens = draft.host_tokens()
        parents = draft.parent.tolist() if draft.size and not draft.chain else None
        for b, rows in enumerate(at):
            if len(rows) <= draft.size:
                self._add(rows[0], b, tokens[b])
                continue
            self._add(rows[0], b, ())
            paths: list[list[int]] = []
            for node in range(draft.width[b]):
                parent = node - 1 if parents is None else parents[b][node]
                paths.append([*(paths[parent] if parent >= 0 else ()), tokens[b][node]])
                self._add(rows[1 + node], b, paths[node])

    def _add(self, row: int, sequence: int, path: Sequence[int]) -> None:
        self._row.append(row)
        self._of.append(sequence)
        self._begin.append(len(self._path))
        self._depth.append(len(path))
        self._path.extend(path)

    def fields(self) -> dict[str, int]:
        """Return the fields of `CAdjustments`. This object must outlive them."""
        arrays = {"row": self._row, "of": self._of, "begin": self._begin, "depth": self._depth, "path": self._path}
        return {name: each.buffer_info()[0] for name, each in arrays.items()} | {"nodes": len(self._row)}


def _target_probs(
    library: Library, logits: torch.Tensor, sampling: SamplingTensors, of: torch.Tensor | slice
) -> torch.Tensor:
    logits = _float32(logits)
    # The kernel copies the logits. Threads of torch that have copied them would go on waiting for work on a core.
    probs = torch.empty(logits.shape)
    params = sampling.draw_params[of].contiguous()
    batch_size, nodes, vocab = probs.shape
    arguments = CDistributions(
        logits=logits.data_ptr(),
        probs=probs.data_ptr(),
        params=params.data_ptr(),
        count=batch_size * nodes,
        vocab=vocab,
        nodes=nodes,
    )
    library.code.outrider_target_probs(ctypes.byref(arguments))
    return probs


def _logprobs(library: Library, logits: torch.Tensor, rows: Sequence[int], tokens: Sequence[int], top: int) -> Logprobs:
    logits = _float32(logits)
    count, vocab = len(rows), logits.shape[-1]
    top = min(top, vocab)
    row, token = array("i", rows), array("i", tokens)
    logprob, top_logprob = torch.empty(count), torch.empty(count, top)
    top_id = torch.empty(count, top, dtype=torch.int32)
    arguments = CLogprobs(
        logits=logits.data_ptr(),
        row=row.buffer_info()[0],
        token=token.buffer_info()[0],
        logprob=logprob.data_ptr(),
        top_id=top_id.data_ptr(),
        top_logprob=top_logprob.data_ptr(),
        count=count,
        vocab=vocab,
        top=top,
    )
    library.code.outrider_logprobs(ctypes.byref(arguments))
    return Logprobs(tokens=logprob.tolist(), top_ids=top_id.tolist(), top=top_logprob.tolist())
