"""Trains an MTP module together with its target (DeepSeek-AI 2024, 2.2).

The target keeps training on the texts of the dataset, with the cross entropy of each next token. The module learns to
predict the same texts from the target's current hidden states. It shares the target's embedding and LM head, and its
gradients reach the target. The loss is the target's loss plus the weighted loss of the module. The target generates no
answers: the target distribution at each position is all on the next token of the text.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from outrider.core.proposer import Proposer, ProposerSetup
from outrider.core.types import SharedWeights
from outrider.errors import OutriderError
from outrider.models.heads.description import Kind
from outrider.models.loader.gguf.file import read_gguf
from outrider.models.loader.load import read_model_config
from outrider.models.loader.paths import is_gguf
from outrider.models.loader.quantized.weights import quantization_of
from outrider.models.torch.submodel import shared_weights
from outrider.train.data.sample import Sample
from outrider.train.loss.losses import LENGTH, parse
from outrider.train.loss.steps import Step, TrainingBatch
from outrider.train.loss.unroll import unrolled
from outrider.train.model.draft_model import load_trainable, write_model
from outrider.train.model.trainee import HeadTrainee, target_weights
from outrider.train.settings import Settings

TARGET = "target"  # folder of the trained target, next to the files of the draft


class JointTrainee(HeadTrainee):
    """An MTP module and its target in training.

    `proposer` also copies the current weights of the target into the engine.
    """

    lr = 1e-4

    def __init__(self, kind: str, settings: Settings, setup: ProposerSetup, tables: SharedWeights) -> None:
        """Make a new module, and load a trainable copy of the target in the folder `settings.engine.target`.

        Raises:
            OutriderError: the options do not fit the kind or the target.
        """
        if kind != Kind.MTP:
            raise OutriderError(
                f"{kind} cannot be trained together with its target; use mtp, or leave --train-target out"
            )
        super().__init__(kind, settings, setup, tables)
        assert settings.engine.target is not None
        assert settings.train_target is not None
        if LENGTH in parse(settings.loss):
            raise OutriderError(
                f"loss {LENGTH} is about sampled draft tokens, and --train-target trains on given texts; use ce"
            )
        if _is_quantized(Path(settings.engine.target)):
            raise OutriderError(
                f"--train-target changes the weights of the target, and {settings.engine.target} keeps its quantized"
                " ones; use the folder of the unquantized model, or leave --train-target out"
            )
        self._checkpoint = load_trainable(Path(settings.engine.target), setup.device)
        self._draft_weight = settings.train_target
        self._version = 0
        self.module = nn.ModuleDict({"target": self._checkpoint.model, "draft": self._module})

    def unroll(self, batch: TrainingBatch, steps: int) -> Iterator[Step]:
        model = self._checkpoint.model
        size = batch.loss_mask.shape[1]
        out = model(input_ids=batch.tokens[:, :size], use_cache=False, output_hidden_states=True)
        tables = shared_weights(model)
        self._module.share_weights(tables.embedding, tables.head)
        # transformers applies the final norm to the last of the hidden states.
        draft_batch = replace(batch, aux_states=out.hidden_states[-1][:, :, None])
        logits = out.logits[batch.loss_mask].float()
        next_tokens = batch.tokens[:, 1:][batch.loss_mask]
        target_loss = functional.cross_entropy(logits, next_tokens, reduction="sum")
        for index, step in enumerate(unrolled(self._module, draft_batch, steps, self._later_share)):
            extra_loss = target_loss if index == 0 else None
            yield replace(step, weight=step.weight * self._draft_weight, extra_loss=extra_loss)

    def proposer(self, setup: ProposerSetup) -> Proposer:
        self._version += 1
        state = self._checkpoint.model.state_dict()
        weights = {name: weight.detach().to(setup.dtype) for name, weight in state.items()}
        setup.target.update_weights(weights, self._version)
        self._tables = target_weights(setup)
        return super().proposer(setup)

    def save(self, folder: Path) -> None:
        super().save(folder)
        write_model(folder / TARGET, self._checkpoint)


class DatasetTexts:
    """Returns texts of the dataset where an `AnswerGenerator` would return answers."""

    def __init__(self, texts: Mapping[int, tuple[int, ...]]) -> None:
        """`texts` are the tokens of each text, by the number of its line."""
        self._texts = texts

    def samples(self, numbers: Sequence[int], *, answer: int) -> list[Sample]:
        """Return the texts with these numbers, in ascending order. `answer` has no effect."""
        no_states = torch.empty(0)
        return [Sample(id=number, tokens=self._texts[number], states=no_states, prompt=1) for number in sorted(numbers)]


class DatasetCollator:
    """Makes batches of samples without hidden states."""

    def __init__(self, ids: torch.Tensor, vocab: int) -> None:
        """`ids` [Vd] are the draft vocabulary, out of a vocabulary of `vocab` tokens."""
        self._ids = ids
        self._vocab = vocab

    def collate(self, samples: Sequence[Sample], *, train_on_prompts: bool) -> TrainingBatch:
        """Return a padded batch that trains on every token. `train_on_prompts` has no effect."""
        device = self._ids.device
        tokens = pad_sequence([torch.tensor(sample.tokens) for sample in samples], batch_first=True).to(device)
        lengths = torch.tensor([len(sample.tokens) - 1 for sample in samples], device=device)
        loss_mask = torch.arange(tokens.shape[1] - 1, device=device) < lengths[:, None]
        draft_ids = torch.full((self._vocab,), -1, device=device)  # by token; -1: not in the draft vocabulary
        draft_ids[self._ids] = torch.arange(len(self._ids), device=device)
        next_ids = draft_ids[tokens[:, 1:][loss_mask]]
        target_probs = torch.zeros(len(next_ids), len(self._ids), device=device)
        target_probs[next_ids >= 0] = functional.one_hot(next_ids[next_ids >= 0], len(self._ids)).float()
        no_states = torch.empty(*loss_mask.shape, 0, 0, device=device)
        return TrainingBatch(tokens=tokens, aux_states=no_states, loss_mask=loss_mask, target_probs=target_probs)


def _is_quantized(target: Path) -> bool:
    if is_gguf(target):
        return read_gguf(target).quantized
    return quantization_of(read_model_config(target)) is not None
