"""Makes training batches from samples."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from outrider.core import tree
from outrider.core.target import Target
from outrider.core.types import Batch, DraftBudget, Scores, SequenceState, SharedWeights
from outrider.errors import OutriderError
from outrider.models.heads.description import AuxStates, SharedKV
from outrider.models.heads.hidden_states import apply_final_norm
from outrider.train.data.sample import Sample
from outrider.train.distributed import all_reduce_sum
from outrider.train.loss.steps import TrainingBatch
from outrider.train.precision import matmul_dtype

_MIN_OVERLAP = 0.9  # of two distributions that should be equal; bfloat16 changes less than a hundredth


class Collator:
    """Makes batches for drafts that read the hidden states `aux_states` of a target."""

    def __init__(
        self,
        aux_states: AuxStates,
        layers: Sequence[int],
        tables: SharedWeights,
        ids: torch.Tensor,
        *,
        views: Sequence[SharedKV] = (),
    ) -> None:
        """Prepare for samples of one target.

        Args:
            aux_states: the states that the draft reads.
            layers: the layers whose states samples have. The last one is the target's last layer.
            tables: the target's weights.
            ids: [Vd] token ids of the draft vocabulary.
            views: the keys and values that the draft attends to. Samples have those of each layer
                once, in ascending order.
        """
        self._aux_states = aux_states
        self._views = sorted({view.layer: view for view in views}.items())
        self._aux_indices = list(map(layers.index, aux_states.layers))
        self._tables = tables
        self._ids = ids
        self._last_layer = layers[-1]
        self._head = tables.head.to(matmul_dtype(tables.head.device))

    def collate(self, samples: Sequence[Sample], *, train_on_prompts: bool) -> TrainingBatch:
        """Return a padded batch. The loss mask covers the answers, and with `train_on_prompts` the prompts as well."""
        device = self._head.device
        states = pad_sequence([sample.states.to(device) for sample in samples], batch_first=True)
        tokens = pad_sequence([torch.tensor(sample.tokens) for sample in samples], batch_first=True).to(device)
        last_states = apply_final_norm(states[:, :, -1], self._tables)
        aux_states = states[:, :, self._aux_indices].float()
        if self._aux_states.final:
            aux_states[:, :, -1] = last_states
        positions = torch.arange(states.shape[1], device=device)
        lengths = torch.tensor([len(sample.states) for sample in samples], device=device)[:, None]
        prompts = torch.tensor([sample.prompt for sample in samples], device=device)[:, None]
        loss_mask = (positions < lengths) & ((positions >= prompts - 1) | train_on_prompts)
        target_probs = self._target_probs(last_states[loss_mask])
        if len(self._ids) != target_probs.shape[-1]:
            target_probs = target_probs[:, self._ids]
        return TrainingBatch(
            tokens=tokens,
            aux_states=aux_states,
            loss_mask=loss_mask,
            target_probs=target_probs,
            shared_kv=self._keys_and_values(samples),
        )

    def _keys_and_values(self, samples: Sequence[Sample]) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Return the keys and values [B, key heads, L, D] by layer of the target."""
        if not self._views:
            return {}
        tensors = [sample.shared_kv.to(self._head.device) for sample in samples if sample.shared_kv is not None]
        padded = pad_sequence(tensors, batch_first=True).float()
        sizes = [view.key_heads * view.dim for _, view in self._views for _ in range(2)]
        parts = iter(torch.split(padded, sizes, -1))
        by_layer = {}
        for layer, view in self._views:
            shape = (len(padded), -1, view.key_heads, view.dim)
            keys = next(parts).reshape(shape).transpose(1, 2)
            values = next(parts).reshape(shape).transpose(1, 2)
            by_layer[layer] = keys, values
        return by_layer

    @torch.inference_mode()
    def check(self, target: Target, text: tuple[int, ...], source: tuple[int, ...] = ()) -> None:
        """Check on the tokens `text` that the target's distribution can be computed from its last hidden state.

        `source` are the tokens that the encoder of an encoder-decoder target reads.

        Raises:
            OutriderError: it cannot, because the LM head does more than a matrix product.
        """
        scores = score_sequence(target, text, source)
        last_state = scores.feed_hidden_states[self._last_layer][0][-1]
        expected = scores.logits[0, 0].softmax(-1)
        computed = self._target_probs(apply_final_norm(last_state, self._tables))
        overlap = float(torch.minimum(expected, computed).sum())
        if not overlap > _MIN_OVERLAP:
            raise OutriderError(
                f"the target's last hidden states and its LM head give only {overlap:.0%} of its own distribution, so"
                " no draft can be trained on it: its logits are scaled; use it with --proposer suffix"
            )

    def _target_probs(self, last_states: torch.Tensor) -> torch.Tensor:
        """Return the target's probabilities [*, V] from its last states [*, H] after the final norm."""
        logits = functional.linear(last_states.to(self._head), self._head).float()
        softcap = self._tables.softcap
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        return logits.softmax(-1)


def score_sequence(target: Target, tokens: tuple[int, ...], source: tuple[int, ...] = ()) -> Scores:
    """Score a sequence in one pass. The target must have no running sequences."""
    batch = Batch(seqs=(SequenceState.of(tokens, source=source),), start=(0,), feed=(tokens,), budget=DraftBudget((0,)))
    target.cache.admit(0, tokens)
    scores = target.score(batch, tree.empty(1, target.device))
    target.cache.release(0)
    return scores


def micro_batches(samples: Sequence[Sample], max_tokens: int) -> list[list[Sample]]:
    """Group samples of similar length.

    A group has up to `max_tokens` tokens with its padding, or consists of one sample.
    """
    groups: list[list[Sample]] = []
    for sample in sorted(samples, key=lambda sample: len(sample.tokens)):
        if groups and len(sample.tokens) * (len(groups[-1]) + 1) <= max_tokens:
            groups[-1].append(sample)
        else:
            groups.append([sample])
    return groups


def most_frequent_tokens(samples: Sequence[Sample], vocab: int, size: int, device: torch.device) -> torch.Tensor:
    """Return the `size` most frequent tokens of the answers [size] in ascending order, for a draft vocabulary.

    Counts are summed over all processes, so that all of them get the same result.
    """
    counts = torch.zeros(vocab, dtype=torch.int64)
    for sample in samples:
        answer = torch.tensor(sample.tokens[sample.prompt :], dtype=torch.int64)
        counts += torch.bincount(answer, minlength=vocab)
    counts = all_reduce_sum(counts.to(device)).cpu()
    order = counts.sort(descending=True, stable=True).indices  # ties by ascending id, on every device
    return order[:size].sort().values


def split_evenly(size: int, count: int) -> list[range]:
    """Split the indices below `size` into `count` ranges of nearly equal length."""
    bounds = [size * i // count for i in range(count + 1)]
    return [range(begin, end) for begin, end in pairwise(bounds)]
