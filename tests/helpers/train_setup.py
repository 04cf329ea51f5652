"""For tests of trainings: a small target, random batches, and a trainee whose logits are its weights."""

from types import SimpleNamespace

import torch

from outrider.core.params import SamplingParams
from outrider.core.proposer import ProposerSetup
from outrider.core.types import Draw, Request
from outrider.models.loader.embedded import embedded
from outrider.models.loader.load import load_checkpoint
from outrider.models.loader.make import make_target
from outrider.train.data.sample import Sample
from outrider.train.loss.steps import Step, TrainingBatch
from outrider.train.settings import Settings
from tests.helpers.configured import with_engine

NANO = str(embedded("nano"))
CPU = torch.device("cpu")


def load_target(folder=NANO):
    """Load a target that exports the hidden states of its last layer."""
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
    return with_engine(Settings, out="out", data=["data.jsonl"], **other)


def make_request(*, id=0, prompt=(1, 2), seed=0, temperature=1.0, limit=9):
    params = SamplingParams(temperature=temperature)
    return Request(id=id, prompt_token_ids=prompt, params=params, seed=seed, end_ids=frozenset(), max_tokens=limit)


def make_sample(tokens, *, prompt=1, id=0, states=None):
    states = torch.randn(len(tokens) - 1, 1, 128) if states is None else states
    return Sample(id=id, tokens=tuple(tokens), states=states.to(torch.bfloat16), prompt=prompt)


def make_batch(*, lengths=(9, 6, 4), seed=0, hidden=128, vocab=12288):
    generator = torch.Generator().manual_seed(seed)
    size, rows = max(lengths), len(lengths)
    probs = (torch.randn(rows, size, vocab, generator=generator) * 3).softmax(-1)
    loss_mask = torch.arange(size) < torch.tensor(lengths)[:, None]
    return TrainingBatch(
        tokens=torch.randint(0, vocab, (rows, size + 1), generator=generator),
        aux_states=torch.randn(rows, size, 1, hidden, generator=generator),
        target_probs=probs[loss_mask],
        loss_mask=loss_mask,
    )


def single_sequence(batch, row, length):
    one = slice(row, row + 1)
    return TrainingBatch(
        tokens=batch.tokens[one, : length + 1],
        aux_states=batch.aux_states[one, :length],
        target_probs=scatter(batch.target_probs, batch.loss_mask)[row, :length],
        loss_mask=batch.loss_mask[one, :length],
    )


def scatter(values, loss_mask):
    """Values [n, ...] where the loss mask is true, at their positions [B, L, ...]; nan elsewhere."""
    out = values.new_full((*loss_mask.shape, *values.shape[1:]), torch.nan)
    out[loss_mask] = values
    return out


def record_gradients(trainer):
    """The gradients of all weights [*], a tensor for each step that the trainer makes from now on."""
    gradients, move = [], trainer.optimizer.step

    def step(lr):
        gradients.append(torch.cat([weight.grad.flatten() for weight in trainer.trainee.module.parameters()]))
        move(lr)

    trainer.optimizer.step = step
    return gradients


class ConstantTrainee:
    """A trainee whose logits are its weights, whatever the batch is."""

    def __init__(self, steps, vocab, seed=0):
        self.module = torch.nn.Module()
        start = torch.randn(steps, vocab, generator=torch.Generator().manual_seed(seed))
        self.module.weight = torch.nn.Parameter(start)
        self.ids = torch.arange(vocab)

    def unroll(self, batch, steps):
        for step in range(steps):
            loss_mask = batch.loss_mask[:, step:]
            row, column = loss_mask.nonzero(as_tuple=True)
            logits = self.module.weight[step].expand(len(row), -1)
            yield Step(logits=logits, target=batch.target_probs_at(row, column + step), loss_mask=loss_mask)
