"""Chains whose guesses the kernels draw: the guesses and laws of the plain way, one pass and one draw after another."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from outrider.core.noise import inverse_cdf
from outrider.core.params import SamplingParams
from outrider.core.types import Batch, DraftKind, Draw, DrawParams, Scores, StopRule, UniformDraws
from outrider.loader.checkpoint import load_checkpoint
from outrider.loader.make import make_target
from outrider.models.base import ChainSampler
from outrider.propose.base import ProposerSetup
from outrider.propose.draft_model import chain as model
from outrider.propose.draft_model.chain import DraftModelProposer
from outrider.testing.drive import make_round, make_row
from tests.core.test_packed import PlainTarget
from tests.helpers import tiny

pytestmark = pytest.mark.skipif(not tiny.compiles(), reason="no C++ compiler here")
CPU = torch.device("cpu")
TEMPERATURES = (1.0, 0.0, 0.6, 1.7)
FILTERS = ({"top_p": 0.9}, {}, {"top_k": 40, "min_p": 0.01}, {"top_k": 100, "top_p": 0.95})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("drawn") / "model", tiny.make_config("LlamaConfig", head_dim=16))


def model_of(folder, dtype="bfloat16"):
    return make_target(load_checkpoint(folder, dtype=dtype, device="cpu"), slots=4, context=128, kernels="native")


def proposer_of(model, vocab, draw=Draw.SAMPLE):
    setup = ProposerSetup(
        target=model, vocab=vocab, slots=4, context=128, device=CPU, dtype=None, draw=draw, tokenizer=None
    )
    return DraftModelProposer(setup, model)


def rows_of(chance, temperatures=TEMPERATURES, filters=({},) * 4):
    wants = zip(temperatures, filters, strict=True)
    params = [SamplingParams(temperature=each, **filter) for each, filter in wants]
    return [make_row(tiny_text(chance, 3 + 5 * b), b, want) for b, want in enumerate(params)]


def want(temperature):
    return DrawParams(temperature=temperature, top_k=256, top_p=1.0, min_p=0.0)


def tiny_text(chance, size):
    return [chance.randrange(200) for _ in range(size)]


@pytest.mark.parametrize("filters", [({},) * 4, FILTERS], ids=["whole", "filtered"])
@pytest.mark.parametrize("keep", [0.0, 0.02])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("vocab", "piece"), [(200, 512), (tiny.VOCAB, 512), (300, 512), (tiny.VOCAB, 5)])
def test_the_same_guesses_from_the_same_laws(vocab, piece, dtype, keep, filters, folder, monkeypatch):
    """Whether the draft has as many ids as the target, more or fewer; and while it reads others' texts in pieces."""
    monkeypatch.setattr(model, "_PIECE", piece)
    monkeypatch.setattr(model, "_NEAR", 5)
    ways = []
    for plain in (False, True):
        draft = PlainTarget(model_of(folder, dtype)) if plain else model_of(folder, dtype)
        assert isinstance(draft, ChainSampler) is not plain
        ways.append((proposer_of(draft, vocab), rows_of(random.Random(1), filters=filters)))
    for proposer, rows in ways:
        for row in rows:
            proposer.admit(row.slot, row.request)
    chance = random.Random(2)
    drawn = waited = 0
    for _ in range(12):
        budget = tuple(chance.randint(1, 6) for _ in TEMPERATURES)
        ours, plain = (one_round(*way, budget, keep) for way in ways)
        assert ours.width == plain.width
        waited += ours.width.count(0)
        for name in ("tokens", "kind"):
            for b, width in enumerate(ours.width):
                assert getattr(ours, name)[b, :width].tolist() == getattr(plain, name)[b, :width].tolist()
        for b, width in enumerate(ours.width):
            assert torch.allclose(ours.q.padded()[b, :width], plain.q.padded()[b, :width], rtol=1e-5, atol=1e-9)
            assert (
                ours.kind[b, :width].tolist() == [DraftKind.SAMPLED if TEMPERATURES[b] else DraftKind.ONE_HOT] * width
            )
            assert ours.accept_prob[b] == pytest.approx(plain.accept_prob[b], rel=1e-4)
        drawn += sum(ours.width)
    assert 60 < drawn < 250
    assert waited >= (9 if piece == 5 else 0)


@pytest.mark.parametrize("draw", [Draw.ARGMAX, Draw.RACE])
def test_other_ways_to_guess_stay_what_they_are(draw, folder):
    """Where guesses are picked, temperature does not matter; a race is run law by law."""
    ways = []
    for plain in (False, True):
        model, rows = model_of(folder), rows_of(random.Random(1))
        for row in rows if plain else ():  # a penalty that changes nothing, but asks for laws
            want = replace(row.request.params, repetition_penalty=1 + 1e-12)
            row.request = replace(row.request, params=want)
        proposer = proposer_of(model, tiny.VOCAB, draw)
        for row in rows:
            proposer.admit(row.slot, row.request)
        ways.append((proposer, rows))
    for _ in range(6):
        ours, plain = (one_round(*way, (4, 2, 5, 3), 0.0) for way in ways)
        assert ours.width == plain.width == (4, 2, 5, 3)
        assert (ours.q is None) is (plain.q is None) is (draw is Draw.ARGMAX)
        for b, width in enumerate(ours.width):
            assert ours.tokens[b, :width].tolist() == plain.tokens[b, :width].tolist()


def one_round(proposer, rows, budget, keep):
    """What is guessed, of which each row keeps a part."""
    start = tuple(row.num_cached_tokens for row in rows)
    feed = tuple(tuple(row.token_ids[row.num_cached_tokens :]) for row in rows)
    batch = Batch(seqs=tuple(rows), start=start, feed=feed, draft_budget=budget, min_path_prob=keep)
    draft = proposer.propose(batch)
    kept = [tuple(range(min(b % 3, width))) for b, width in enumerate(draft.width)]
    emitted = [(*draft.tokens[b, : len(path)].tolist(), 11) for b, path in enumerate(kept)]
    proposer.commit(make_round(batch, draft, Scores(logits=torch.empty(0)), kept, emitted))
    for row, tokens in zip(rows, emitted, strict=True):
        row.token_ids += tokens
        row.num_cached_tokens = len(row.token_ids) - 1
    return draft


def test_what_is_drawn_is_what_the_plain_sums_say(folder):
    """Where the number to exceed is a sum itself, too, and so the last bit of a sum decides."""
    model, chance = model_of(folder), random.Random(3)
    rows = rows_of(chance, (1.0,) * 4)
    batch = Batch(
        seqs=tuple(rows), start=(0,) * 4, feed=tuple(tuple(row.token_ids) for row in rows), draft_budget=(1,) * 4
    )
    for row in rows:
        model.cache.admit(row.slot, row.token_ids)

    def draw(uniform):
        return model.draft_sampled(batch, 256, UniformDraws(params=(want(1.0),) * 4, uniform=uniform))

    law = draw(torch.zeros(4, 1, dtype=torch.float64)).q.padded()[:, 0]
    sums = law.cumsum(-1, dtype=torch.float64)
    exact = [sums[:, [v]] / sums[:, -1:] for v in range(0, 255, 5)]
    for uniform in (*exact, *(each - 2**-53 for each in exact), *torch.rand(50, 4, 1, dtype=torch.float64)):
        found = draw(uniform.clamp(0, 1 - 2**-48))
        assert torch.equal(found.q.padded()[:, 0], law)
        wanted = inverse_cdf(law, uniform.clamp(0, 1 - 2**-48)[:, 0])
        assert found.tokens[:, 0].tolist() == wanted.tolist()


def test_a_chain_that_draws_stops_as_any_other(folder):
    model, chance = model_of(folder), random.Random(4)
    rows = rows_of(chance)
    batch = Batch(
        seqs=tuple(rows), start=(0,) * 4, feed=tuple(tuple(row.token_ids) for row in rows), draft_budget=(5, 3, 5, 1)
    )
    for row in rows:
        model.cache.admit(row.slot, row.token_ids)
    draws = UniformDraws(
        params=tuple(map(want, TEMPERATURES)), uniform=torch.rand(4, 5, dtype=torch.float64, generator=seeded(1))
    )
    free = model.draft_sampled(batch, 256, draws)
    assert free.count == (5, 3, 5, 1)
    assert free.q.at.tolist()[1] == [-1] * 5
    ends = (int(free.tokens[0, 1]),)
    stopped = model.draft_sampled(batch, 256, draws, StopRule(weight=(1.0,), bias=(0.0,), ends=ends))
    assert stopped.count[0] == free.tokens[0].tolist().index(ends[0]) + 1
    assert stopped.tokens[2, : stopped.count[2]].tolist() == free.tokens[2, : stopped.count[2]].tolist()
    assert (
        model.draft_sampled(batch, 256, draws, StopRule(weight=(1.0,), bias=(0.0,), min_path_prob=2.0)).count
        == (0,) * 4
    )


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def test_a_draft_that_says_nothing_guesses_something(folder):
    """Its logits are not numbers; what it guesses is a guess, and the law tells the truth about it."""
    model = model_of(folder)
    model.update_weights({"model.norm.weight": torch.full((32,), torch.nan)}, 1)
    row = make_row([1, 2, 3], 0, SamplingParams())
    model.cache.admit(0, row.token_ids)
    batch = Batch(seqs=(row,), start=(0,), feed=((1, 2, 3),), draft_budget=(2,))
    found = model.draft_sampled(
        batch, 256, UniformDraws(params=(want(1.0),), uniform=torch.full((1, 2), 0.5, dtype=torch.float64))
    )
    assert found.tokens.tolist() == [[0, 0]]
    assert torch.equal(found.q.padded()[0], torch.eye(256)[[0, 0]])
