"""From texts and states to what a step trains on."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from outrider.core import tree
from outrider.core.types import Batch, Scores, SequenceState, SharedWeights
from outrider.errors import OutriderError
from outrider.heads.description import AuxStates, SharedKV
from outrider.heads.hidden_states import normed
from outrider.models.base import Target
from outrider.train.data.sample import Sample
from outrider.train.distributed import total
from outrider.train.loss.steps import Texts
from outrider.train.precision import products

_AGREES = 0.9  # share of a law that must be the same; bfloat16 moves less than a hundredth of it


class Reader:
    """Makes batches for drafts that read `taps` of a target."""

    def __init__(
        self,
        taps: AuxStates,
        layers: Sequence[int],
        tables: SharedWeights,
        ids: torch.Tensor,
        *,
        views: Sequence[SharedKV] = (),
    ) -> None:
        """`layers` are what samples hold, the target's last one at the end; `ids` is what the draft guesses.

        `views` say what it sees of the target, of which samples hold each layer once, in rising order.
        """
        self._views = sorted({view.layer: view for view in views}.items())
        self._taps, self._where = taps, [layers.index(at) for at in taps.layers]
        self._tables, self._ids, self._last = tables, ids, layers[-1]
        self._head = tables.head.to(products(tables.head.device))

    def read(self, samples: Sequence[Sample], *, everything: bool) -> Texts:
        """Side by side; only answers are learned from unless `everything` is."""
        device = self._head.device
        states = pad_sequence([sample.states.to(device) for sample in samples], batch_first=True)
        tokens = pad_sequence([torch.tensor(sample.tokens) for sample in samples], batch_first=True).to(device)
        last = normed(states[:, :, -1], self._tables)
        taps = states[:, :, self._where].float()
        if self._taps.final:
            taps[:, :, -1] = last
        places = torch.arange(states.shape[1], device=device)
        lengths, prompts = (torch.tensor(each, device=device)[:, None] for each in _sizes(samples))
        learn = (places < lengths) & ((places >= prompts - 1) | everything)
        laws = self._laws(last[learn])
        if len(self._ids) != laws.shape[-1]:
            laws = laws[:, self._ids]
        return Texts(tokens=tokens, aux_states=taps, learn=learn, target_probs=laws, shown=self._shown(samples))

    def _shown(self, samples: Sequence[Sample]) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of the layers that are looked at."""
        if not self._views:
            return {}
        held = [sample.shown for sample in samples if sample.shown is not None]
        padded = pad_sequence([each.to(self._head.device) for each in held], batch_first=True).float()
        sizes = [view.key_heads * view.dim for _, view in self._views for _ in range(2)]
        parts = iter(torch.split(padded, sizes, -1))
        out = {}
        for layer, view in self._views:
            heads = -1, view.key_heads, view.dim
            keys, values = (next(parts).reshape(len(padded), *heads).transpose(1, 2) for _ in range(2))
            out[layer] = keys, values
        return out

    @torch.inference_mode()
    def check(self, target: Target, text: tuple[int, ...]) -> None:
        """See to it that states lead to the law that the target itself gives.

        Raises:
            OutriderError: they do not, so its head does more than multiply by a table.
        """
        scores = read_alone(target, text)
        own, ours = (
            scores.logits[0, 0].softmax(-1),
            self._laws(normed(scores.feed_hidden_states[self._last][0][-1], self._tables)),
        )
        shared = float(torch.minimum(own, ours).sum())
        if not shared > _AGREES:
            raise OutriderError(
                f"the target's last states and its head give {shared:.0%} of its own law, so no draft can be trained on"
                " it: its logits are scaled or capped; use it with --proposer suffix"
            )

    def _laws(self, last: torch.Tensor) -> torch.Tensor:
        """The target's probabilities [*, V] from its last states [*, H] after the final norm."""
        return functional.linear(last.to(self._head), self._head).float().softmax(-1)


def read_alone(target: Target, text: tuple[int, ...]) -> Scores:
    """What a target that does nothing else says of a text, in one pass."""
    batch = Batch(seqs=(SequenceState.of(text),), start=(0,), feed=(text,), draft_budget=(0,))
    target.cache.admit(0, text)
    scores = target.score(batch, tree.empty(1, target.device))
    target.cache.release(0)
    return scores


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


def frequent(samples: Sequence[Sample], vocab: int, size: int, device: torch.device) -> torch.Tensor:
    """The `size` tokens [size] that are written most, in rising order: what a draft of a small vocabulary guesses.

    All processes count together, and find the same.
    """
    counts = torch.zeros(vocab, dtype=torch.int64)
    for sample in samples:
        counts += torch.bincount(torch.tensor(sample.tokens[sample.prompt :], dtype=torch.int64), minlength=vocab)
    counts = total(counts.to(device)).cpu()
    order = counts.sort(descending=True, stable=True).indices  # of equals the smaller ids, wherever this runs
    return order[:size].sort().values


def shares(things: int, count: int) -> list[range]:
    """So many things in `count` runs of nearly equal length."""
    bounds = [things * i // count for i in range(count + 1)]
    return [range(a, b) for a, b in pairwise(bounds)]
