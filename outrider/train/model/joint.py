"""A module for multi-token prediction and its target, trained together (DeepSeek-AI 2024, 2.2).

The target goes on learning to write the data's own texts, by the cross entropy of each next token, and the module to
guess them from the states that the target is in meanwhile. Its slopes reach the target, whose tables it shares: what is
made small is the target's loss and, with a weight, the module's. Nothing is answered, so the law at each place is that
the text goes on as it does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from outrider.core.types import SharedWeights
from outrider.errors import OutriderError
from outrider.heads.description import Kind
from outrider.models.submodel import shared_weights
from outrider.propose.base import Proposer, ProposerSetup
from outrider.train.data.sample import Sample
from outrider.train.loss.losses import LENGTH, parse
from outrider.train.loss.steps import Step, Texts
from outrider.train.loss.unroll import unrolled
from outrider.train.model.draft_model import teachable, write_model
from outrider.train.model.trainee import HeadTrainee, target_weights
from outrider.train.settings import Settings

TARGET = "target"  # the folder beside the draft's files


class JointTrainee(HeadTrainee):
    """Both of them; `proposer` gives the engine's target the weights of now as well."""

    lr = 1e-4

    def __init__(self, kind: str, settings: Settings, setup: ProposerSetup, tables: SharedWeights) -> None:
        """A fresh module, beside the target in the folder that `settings.target` names.

        Raises:
            OutriderError: the options and the kind, or the target, do not fit.
        """
        if kind != Kind.MTP:
            raise OutriderError(
                f"{kind} is trained on a target that stays as it is; use mtp, or leave --train-target out"
            )
        super().__init__(kind, settings, setup, tables)
        assert settings.target is not None
        assert settings.train_target is not None
        if LENGTH in parse(settings.loss):
            raise OutriderError(f"loss {LENGTH} weighs chains of drawn guesses, and texts are given here; use ce")
        self._checkpoint = teachable(Path(settings.target), setup.device)
        self._share, self._version = settings.train_target, 0
        self.module = nn.ModuleDict({"target": self._checkpoint.model, "draft": self._module})

    def unroll(self, texts: Texts, steps: int) -> Iterator[Step]:
        model, size = self._checkpoint.model, texts.learn.shape[1]
        out = model(input_ids=texts.tokens[:, :size], use_cache=False, output_hidden_states=True)
        tables = shared_weights(model)
        self._module.share_weights(tables.embedding, tables.head)
        seen = replace(texts, aux_states=out.hidden_states[-1][:, :, None])  # the last one stands behind the final norm
        said, told = out.logits[texts.learn].float(), texts.tokens[:, 1:][texts.learn]
        own = functional.cross_entropy(said, told, reduction="sum")
        for guess, step in enumerate(unrolled(self._module, seen, steps, self._later)):
            yield replace(step, weight=step.weight * self._share, beside=None if guess else own)

    def proposer(self, setup: ProposerSetup) -> Proposer:
        self._version += 1
        now = {name: weight.detach().to(setup.dtype) for name, weight in self._checkpoint.model.state_dict().items()}
        setup.target.update_weights(now, self._version)
        self._tables = target_weights(setup)
        return super().proposer(setup)

    def save(self, folder: Path) -> None:
        super().save(folder)
        write_model(folder / TARGET, self._checkpoint)


class Given:
    """The data's own texts, where an author would write answers."""

    def __init__(self, texts: Mapping[int, tuple[int, ...]]) -> None:
        self._texts = texts

    def write(self, numbers: Sequence[int], *, turn: int) -> list[Sample]:
        """Some of the texts, in the order of their numbers; they are the same in each turn."""
        none = torch.empty(0)
        texts = {number: self._texts[number] for number in sorted(numbers)}
        return [Sample(id=number, tokens=text, states=none, prompt=1) for number, text in texts.items()]


class GivenReader:
    """Makes batches of them."""

    def __init__(self, ids: torch.Tensor, vocab: int) -> None:
        """`ids` is what the draft guesses, of so many tokens."""
        self._ids, self._vocab = ids, vocab

    def read(self, samples: Sequence[Sample], *, everything: bool) -> Texts:
        device = self._ids.device
        tokens = pad_sequence([torch.tensor(sample.tokens) for sample in samples], batch_first=True).to(device)
        lengths = torch.tensor([len(sample.tokens) - 1 for sample in samples], device=device)
        learn = torch.arange(tokens.shape[1] - 1, device=device) < lengths[:, None]
        place = torch.full((self._vocab,), -1, device=device)
        place[self._ids] = torch.arange(len(self._ids), device=device)
        after = place[tokens[:, 1:][learn]]
        laws = torch.zeros(len(after), len(self._ids), device=device)
        laws[after >= 0] = functional.one_hot(after[after >= 0], len(self._ids)).float()
        return Texts(
            tokens=tokens, aux_states=torch.empty(*learn.shape, 0, 0, device=device), learn=learn, target_probs=laws
        )
