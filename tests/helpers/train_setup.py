"""What trainings are tested on: a small target, random texts, and a draft whose predictions are its weights."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from outrider.core.params import SamplingParams
from outrider.core.types import Draw, Request
from outrider.loader.checkpoint import load_checkpoint
from outrider.loader.embedded import embedded
from outrider.loader.make import make_target
from outrider.propose.base import ProposerSetup
from outrider.train.data.sample import Sample
from outrider.train.loss.steps import Step, Texts
from outrider.train.settings import Settings

NANO = str(embedded("nano"))
CPU = torch.device("cpu")


def load_target(folder=NANO):
    """A target whose last states can be read; the embedded draft has two layers."""
    checkpoint = load_checkpoint(folder, dtype="float32", device="cpu")
    target = make_target(checkpoint, slots=2, context=64)
    target.export_hidden_states((target.layers - 1,))
    return SimpleNamespace(checkpoint=checkpoint, target=target, tables=target.share_weights())


def make_setup(loaded):
    return ProposerSetup(
        target=loaded.target,
        vocab=loaded.target.vocab,
        slots=2,
        context=64,
        device=CPU,
        dtype=torch.float32,
        draw=Draw.ARGMAX,
        tokenizer=loaded.checkpoint.tokenizer,
    )


def make_settings(**other):
    return Settings(out="out", data=["data.jsonl"], **other)


def make_request(*, id=0, prompt=(1, 2), seed=0, temperature=1.0, limit=9):
    params = SamplingParams(temperature=temperature)
    return Request(id=id, prompt_token_ids=prompt, params=params, seed=seed, end_ids=frozenset(), max_tokens=limit)


def make_sample(tokens, *, prompt=1, id=0, states=None):
    states = torch.randn(len(tokens) - 1, 1, 128) if states is None else states
    return Sample(id=id, tokens=tuple(tokens), states=states.to(torch.bfloat16), prompt=prompt)


def make_texts(*, lengths=(9, 6, 4), seed=0, hidden=128, vocab=12288):
    chance = torch.Generator().manual_seed(seed)
    size, rows = max(lengths), len(lengths)
    laws = (torch.randn(rows, size, vocab, generator=chance) * 3).softmax(-1)
    learn = torch.arange(size) < torch.tensor(lengths)[:, None]
    return Texts(
        tokens=torch.randint(0, vocab, (rows, size + 1), generator=chance),
        aux_states=torch.randn(rows, size, 1, hidden, generator=chance),
        target_probs=laws[learn],
        learn=learn,
    )


def cut(texts, row, length):
    one = slice(row, row + 1)
    return Texts(
        tokens=texts.tokens[one, : length + 1],
        aux_states=texts.aux_states[one, :length],
        target_probs=spread(texts.target_probs, texts.learn)[row, :length],
        learn=texts.learn[one, :length],
    )


def spread(values, learn):
    """Values [n, ...] of what is learned from, at their places [B, L, ...]; nan elsewhere."""
    out = values.new_full((*learn.shape, *values.shape[1:]), torch.nan)
    out[learn] = values
    return out


def watched(trainer):
    """The slopes of all weights [*], a tensor for each step that the trainer makes from now on."""
    slopes, move = [], trainer._optimizer.step

    def step(lr):
        slopes.append(torch.cat([weight.grad.flatten() for weight in trainer.trainee.module.parameters()]))
        move(lr)

    trainer._optimizer.step = step
    return slopes


class Still:
    """A pupil whose guesses are its weights, whatever the texts are."""

    def __init__(self, steps, vocab, seed=0):
        self.module = torch.nn.Module()
        start = torch.randn(steps, vocab, generator=torch.Generator().manual_seed(seed))
        self.module.weight = torch.nn.Parameter(start)
        self.ids = torch.arange(vocab)

    def unroll(self, texts, steps):
        for step in range(steps):
            learn = texts.learn[:, step:]
            row, column = learn.nonzero(as_tuple=True)
            logits = self.module.weight[step].expand(len(row), -1)
            yield Step(logits=logits, target=texts.target_probs_at(row, column + step), learn=learn)
