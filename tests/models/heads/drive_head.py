"""Helpers that run a draft head without its target: hidden states are given, and sequences grow by known tokens."""

import random
from copy import deepcopy
from functools import partial
from types import SimpleNamespace

import torch

from outrider.core import tree
from outrider.core.params import SamplingParams
from outrider.core.types import Batch, DraftBudget, Scores, SequenceState, SharedWeights
from outrider.drafting.propose.draft_model.trained_head import HeadProposer
from outrider.models.heads.description import HeadDescription
from outrider.models.heads.store import HeadModule, make_module
from outrider.models.heads.targets.registry import make_head_target
from outrider.testing.drive import make_round, make_seq
from outrider.train.data.batches import Collator
from outrider.train.loss.losses import parse
from outrider.train.loss.steps import TrainingBatch
from outrider.train.loss.unroll import unrolled
from outrider.train.trainer import Trainer
from tests.helpers.engines import make_engine, run

CPU = torch.device("cpu")
TABLES = SharedWeights(
    embedding=torch.randn(40, 64, generator=torch.Generator().manual_seed(1)),
    head=torch.randn(40, 64, generator=torch.Generator().manual_seed(2)),
    norm=torch.ones(64),
    epsilon=1e-5,
)


def random_head(description: HeadDescription, seed: int = 0, perturbed: tuple[str, ...] = ("norm",)) -> HeadModule:
    """Return a module whose weights are all random. Weights whose names contain `perturbed` are constant at first."""
    torch.manual_seed(seed)
    module = make_module(description).eval().requires_grad_(False)
    for name, weight in module.named_parameters():
        if any(part in name for part in perturbed):
            weight += 0.5 * torch.randn(weight.shape)
    return module


def admit(head, texts) -> list[SequenceState]:
    """Start a sequence for each text. Return the sequences."""
    seqs = [make_seq(list(text), slot) for slot, text in enumerate(texts)]
    # By slot, the number of states that `note_states` has passed to the head.
    head.num_noted = {seq.slot: 0 for seq in seqs}
    for seq in seqs:
        head.cache.admit(seq.slot, seq.token_ids)
    return seqs


def note_states(head, seqs, aux_states, ends) -> None:
    """Pass those states [B, L, layers, H] of each sequence before `ends[b]` to the head that it does not have yet."""
    layers = head.description.aux_states.layers
    begins = [head.num_noted[seq.slot] for seq in seqs]
    spans = list(zip(seqs, begins, ends, strict=True))
    feeds = tuple(tuple(seq.token_ids[begin:end]) for seq, begin, end in spans)
    feed_states = {
        layer: tuple(aux_states[seq.slot, begin:end, i] for seq, begin, end in spans) for i, layer in enumerate(layers)
    }
    node_states = {layer: torch.zeros(len(seqs), 1, aux_states.shape[-1]) for layer in layers}
    batch = Batch(seqs=tuple(seqs), start=tuple(begins), feed=feeds, budget=DraftBudget((0,) * len(seqs)))
    scores = Scores(logits=torch.zeros(len(seqs), 1, 1), hidden_states=node_states, feed_hidden_states=feed_states)
    empty = [()] * len(seqs)
    head.hidden_states.record(make_round(batch, tree.empty(len(seqs), CPU), scores, empty, empty))
    head.num_noted |= {seq.slot: end for seq, end in zip(seqs, ends, strict=True)}


def next_batch(head, seqs, max_tokens=None) -> Batch:
    """Return a batch of the tokens that the head has not cached, at most `max_tokens` of each sequence."""
    start = tuple(head.cache.length(seq.slot) for seq in seqs)
    feed = tuple(tuple(seq.token_ids[begin:][:max_tokens]) for seq, begin in zip(seqs, start, strict=True))
    return Batch(seqs=tuple(seqs), start=start, feed=feed, budget=DraftBudget((4,) * len(seqs)))


def commit_feed(head, batch, draft) -> None:
    """Commit the feeds of a batch and no draft token."""
    empty = [()] * len(batch.seqs)
    head.cache.commit(make_round(batch, draft, Scores(logits=torch.empty(0)), empty, empty))


def score_texts(head, texts, aux_states) -> torch.Tensor:
    """Return the logits [B, V] after texts, which start as new sequences."""
    seqs = admit(head, texts)
    note_states(head, seqs, aux_states, [len(text) - 1 for text in texts])
    return head.score(next_batch(head, seqs), tree.empty(len(seqs), CPU)).logits[:, 0]


def grow(seqs, tokens, lengths, rng: random.Random) -> list[SequenceState]:
    """Append one to three of `tokens` [B, L + 1] to each sequence.

    Return the sequences that are not longer than `lengths[b]`, sometimes without the first one.
    """
    for seq in seqs:
        seq.token_ids += tokens[seq.slot, len(seq.token_ids) :][: rng.randint(1, 3)].tolist()
    seqs = [seq for seq in seqs if len(seq.token_ids) <= lengths[seq.slot]]
    return seqs if len(seqs) < 2 or rng.random() < 0.5 else seqs[1:]


def measure_tau(module, target, prompts) -> float:
    """Return tau of greedy chains of 4 draft tokens."""
    copy = deepcopy(module).eval().requires_grad_(False)
    head = make_head_target(copy, target.share_weights(), slots=2, context=96)
    engine = make_engine(target, lambda setup: HeadProposer(setup, head), k=4, rows=2)
    run(engine, prompts, SamplingParams(temperature=0.0), limit=40, ends=frozenset())
    return engine.stats.tau


def make_trainer(nano, description: HeadDescription, *, steps: int) -> tuple[Trainer, TrainingBatch]:
    """Return a trainer of a new module for `description`, and the samples of the fixture `nano` as its texts."""
    target, _, samples = nano
    torch.manual_seed(0)
    tables = target.share_weights()
    module = make_module(description)
    module.share_weights(tables.embedding.float(), tables.head.float())
    texts = Collator(description.aux_states, range(2), tables, module.ids).collate(samples, train_on_prompts=False)
    trainee = SimpleNamespace(module=module, ids=module.ids, unroll=partial(unrolled, module))
    return Trainer(trainee, losses=parse("ce:0.1,tv:1.8"), steps=steps, decay=0.8, lr=3e-3), texts
