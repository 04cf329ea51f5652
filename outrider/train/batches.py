"""From texts and states to what a step trains on."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from outrider.heads.description import Taps
from outrider.heads.target import normed
from outrider.train.answers import Sample
from outrider.train.unroll import Texts
from outrider.types import Tables


class Reader:
    """Makes batches for drafts that read `taps` of a target."""

    def __init__(self, taps: Taps, layers: Sequence[int], tables: Tables, ids: torch.Tensor) -> None:
        """`layers` are what samples hold, the target's last one at the end; `ids` is what the draft guesses."""
        self._taps, self._where = taps, [layers.index(at) for at in taps.layers]
        self._tables, self._ids = tables, ids
        self._head = tables.head.to(torch.bfloat16)

    def read(self, samples: Sequence[Sample], *, everything: bool) -> Texts:
        """Side by side; only answers are learned from unless `everything` is."""
        device = self._head.device
        states = pad_sequence([sample.states for sample in samples], batch_first=True).to(device)
        tokens = pad_sequence([torch.tensor(sample.tokens) for sample in samples], batch_first=True).to(device)
        last = normed(states[:, :, -1], self._tables)
        taps = states[:, :, self._where].float()
        if self._taps.final:
            taps[:, :, -1] = last
        logits = functional.linear(last.to(torch.bfloat16), self._head).float()
        laws = logits.softmax(-1)
        if len(self._ids) != laws.shape[-1]:
            laws = laws[..., self._ids]
        places = torch.arange(states.shape[1], device=device)
        lengths, prompts = (torch.tensor(each, device=device)[:, None] for each in _sizes(samples))
        learn = (places < lengths) & ((places >= prompts - 1) | everything)
        return Texts(tokens=tokens, taps=taps, laws=laws, learn=learn)


def _sizes(samples: Sequence[Sample]) -> tuple[list[int], list[int]]:
    return [len(sample.states) for sample in samples], [sample.prompt for sample in samples]


def parts(samples: Sequence[Sample], most: int) -> list[list[Sample]]:
    """Samples of like lengths together, each part of up to `most` tokens with its padding, or of one sample."""
    out: list[list[Sample]] = []
    for sample in sorted(samples, key=lambda sample: len(sample.tokens)):
        if out and len(sample.tokens) * (len(out[-1]) + 1) <= most:
            out[-1].append(sample)
        else:
            out.append([sample])
    return out


def frequent(samples: Sequence[Sample], vocab: int, size: int) -> torch.Tensor:
    """The `size` tokens [size] that are written most, in rising order: what a draft of a small vocabulary guesses."""
    counts = torch.zeros(vocab, dtype=torch.int64)
    for sample in samples:
        counts += torch.bincount(torch.tensor(sample.tokens[sample.prompt :]), minlength=vocab)
    return counts.topk(size).indices.sort().values


def shares(total: int, count: int) -> list[range]:
    """`total` things in `count` runs of nearly equal length."""
    bounds = [total * i // count for i in range(count + 1)]
    return [range(a, b) for a, b in pairwise(bounds)]
