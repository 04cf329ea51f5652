"""Greedy rounds of a toy target, and checks that several proposers must pass."""

import pytest
import torch

from outrider.core.params import SamplingParams
from outrider.core.types import Batch, DraftBudget, Scores
from outrider.llm import LLM
from outrider.testing.drive import make_round, make_seq
from outrider.verify.rules import verify_greedy


def admit(proposer, prompts):
    """Return sequences that are admitted to a proposer."""
    seqs = [make_seq(list(prompt), slot) for slot, prompt in enumerate(prompts)]
    for seq in seqs:
        proposer.admit(seq.slot, seq.request)
    return seqs


def batch_of(seqs, budget):
    """Return a batch in which the last token of each sequence is fed."""
    feeds = tuple((seq.token_ids[-1],) for seq in seqs)
    starts = tuple(len(seq.token_ids) - 1 for seq in seqs)
    return Batch(seqs=tuple(seqs), start=starts, feed=feeds, budget=DraftBudget((budget,) * len(seqs)))


def score(target, seq, draft, b):
    """Return the logits [1 + N, V] of a toy target at each node of sequence b."""
    suffixes = [tuple(seq.token_ids[-2:])]
    for token, parent in zip(draft.tokens[b].tolist(), draft.parent[b].tolist(), strict=True):
        suffixes.append((suffixes[parent + 1][1], token))
    return torch.stack([target.table[suffix] for suffix in suffixes])


def verify(target, batch, draft, *, with_best=False):
    """Return the round in which a toy target verifies a draft greedily. The sequences do not change.

    With `with_best` the scores have the likeliest ids.
    """
    logits = torch.stack([score(target, seq, draft, b) for b, seq in enumerate(batch.seqs)])
    best = logits.argmax(-1)
    verdicts = verify_greedy(draft, best)
    paths = [path for path, _ in verdicts]
    emitted = [tokens for _, tokens in verdicts]
    return make_round(batch, draft, Scores(logits=logits, best=best if with_best else None), paths, emitted)


def commit(proposer, round):
    """Commit a round to the proposer and to the sequences."""
    proposer.commit(round)
    for seq, tokens in zip(round.batch.seqs, round.emitted, strict=True):
        seq.token_ids += tokens


def check_one_copy(monkeypatch, target, proposer, seqs, budget):
    """Check that the host reads the device once in the commit of a round and the draft of the next one."""
    batch = batch_of(seqs, budget)
    round = verify(target, batch, proposer.propose(batch))
    copies = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: copies.append(tensor.shape) or tolist(tensor))
    for name in ("item", "__int__", "__float__", "__bool__", "__index__", "cpu", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_: pytest.fail("the host waits for a tensor"))
    proposer.commit(round)
    proposer.propose(batch_of(seqs, budget))
    assert len(copies) == 1


def check_fewer_passes(proposer, *, k, temperature, max_tokens, tau):
    """Check that the embedded target gives the same text with a proposer, with more than `tau` tokens in each pass."""
    params = SamplingParams(temperature=temperature, seed=4, max_tokens=max_tokens, ignore_eos=True)
    prompt = "<|endoftext|>def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n"
    plain, drafted = (
        LLM(proposer=name, k=k, dtype="float32", verifier="walk", max_num_seqs=2, max_model_len=128).generate(
            [prompt], params
        )[0]
        for name in ("none", proposer)
    )
    assert drafted.token_ids == plain.token_ids
    assert plain.stats.tau == 1 < tau < drafted.stats.tau
