"""A small target and texts that it generated, for tests that train draft heads."""

import pytest
import torch

from outrider.core import tree
from outrider.core.params import SamplingParams
from outrider.core.proposer import NoProposer
from outrider.core.types import Batch, DraftBudget
from outrider.models.loader.embedded import embedded
from outrider.models.loader.load import load_checkpoint
from outrider.models.loader.make import make_target
from outrider.testing.drive import make_seq
from outrider.train.data.sample import Sample
from tests.helpers.engines import make_engine, outputs, run

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def nano():
    """A target, two prompts, and samples of its greedy outputs with its hidden states."""
    checkpoint = load_checkpoint(embedded("nano"), dtype="float32", device="cpu")
    target = make_target(checkpoint, slots=2, context=96)
    prompts = [checkpoint.tokenizer.encode(text) for text in ("def add(a, b):", "The old man")]
    greedy = SamplingParams(temperature=0.0)
    engine = make_engine(target, NoProposer, k=0, rows=2)
    answers = outputs(run(engine, prompts, greedy, limit=40, ends=frozenset()))
    target.export_hidden_states(range(2))
    samples = []
    for prompt, answer in zip(prompts, answers, strict=True):
        seq = make_seq([*prompt, *answer], 0)
        target.cache.admit(0, seq.token_ids)
        batch = Batch(seqs=(seq,), start=(0,), feed=(tuple(seq.token_ids[:-1]),), budget=DraftBudget((0,)))
        with torch.inference_mode():
            scores = target.score(batch, tree.empty(1, CPU))
            states = torch.stack([scores.feed_hidden_states[layer][0] for layer in range(2)], 1)
        samples.append(Sample(id=0, tokens=tuple(seq.token_ids), states=states.clone(), prompt=len(prompt)))
    return target, prompts, samples
