"""Tests of chains that the native kernels sample, against sampling in Python with one pass per draft token."""

import random
from dataclasses import replace

import pytest
import torch

from outrider.core.draws import DrawParams, Draws
from outrider.core.noise import inverse_cdf
from outrider.core.params import SamplingParams
from outrider.core.proposer import ProposerSetup
from outrider.core.target import ChainSampler
from outrider.core.types import Batch, DraftBudget, DraftKind, Draw, Scores, StopRule
from outrider.drafting.propose.draft_model import chain as model
from outrider.drafting.propose.draft_model.chain import DraftModelProposer
from outrider.models.loader.load import load_checkpoint
from outrider.models.loader.make import make_target
from outrider.testing.drive import make_round, make_seq
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


def make_seqs(rng, temperatures=TEMPERATURES, filters=({},) * 4):
    """Return four sequences with prompts of different lengths."""
    settings = zip(temperatures, filters, strict=True)
    params = [SamplingParams(temperature=temperature, **filter) for temperature, filter in settings]
    return [make_seq(random_tokens(rng, 3 + 5 * b), b, seq_params) for b, seq_params in enumerate(params)]


def draw_params(temperature):
    return DrawParams(temperature=temperature, top_k=256, top_p=1.0, min_p=0.0)


def random_tokens(rng, size):
    return [rng.randrange(200) for _ in range(size)]


@pytest.mark.fast_cases(
    "200-512-float32-0.0-whole",
    "256-512-bfloat16-0.02-filtered",
    "300-512-float32-0.02-filtered",
    "256-5-float32-0.0-filtered",
)
@pytest.mark.parametrize("filters", [({},) * 4, FILTERS], ids=["whole", "filtered"])
@pytest.mark.parametrize("keep", [0.0, 0.02])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("vocab", "piece"), [(200, 512), (tiny.VOCAB, 512), (300, 512), (tiny.VOCAB, 5)])
def test_native_chains_equal_python_chains(vocab, piece, dtype, keep, filters, folder, monkeypatch):
    """The draft has as many ids as the target, more or fewer. A small `piece` makes it prefill in chunks."""
    monkeypatch.setattr(model, "PREFILL_CHUNK", piece)
    monkeypatch.setattr(model, "SMALL_FEED", 5)
    runs = []
    for is_python in (False, True):
        draft = PlainTarget(model_of(folder, dtype)) if is_python else model_of(folder, dtype)
        assert isinstance(draft, ChainSampler) is not is_python
        runs.append((proposer_of(draft, vocab), make_seqs(random.Random(1), filters=filters)))
    for proposer, seqs in runs:
        for seq in seqs:
            proposer.admit(seq.slot, seq.request)
    rng = random.Random(2)
    num_draft_tokens = 0
    num_empty = 0
    for _ in range(12):
        budget = tuple(rng.randint(1, 6) for _ in TEMPERATURES)
        native, python = (run_round(proposer, seqs, budget, keep) for proposer, seqs in runs)
        assert native.width == python.width
        num_empty += native.width.count(0)
        for name in ("tokens", "kind"):
            for b, width in enumerate(native.width):
                assert getattr(native, name)[b, :width].tolist() == getattr(python, name)[b, :width].tolist()
        for b, width in enumerate(native.width):
            assert torch.allclose(native.q.padded()[b, :width], python.q.padded()[b, :width], rtol=1e-5, atol=1e-9)
            kind = DraftKind.SAMPLED if TEMPERATURES[b] else DraftKind.ONE_HOT
            assert native.kind[b, :width].tolist() == [kind] * width
            assert native.accept_prob[b] == pytest.approx(python.accept_prob[b], rel=1e-4)
        num_draft_tokens += sum(native.width)
    assert 60 < num_draft_tokens < 250
    assert num_empty >= (9 if piece == 5 else 0)


@pytest.mark.parametrize("draw", list(Draw))
def test_native_chains_with_penalties_equal_python_chains(draw, folder):
    """Each draft token counts in the penalties of the next ones."""
    params = {"repetition_penalty": 1.5, "frequency_penalty": 0.8, "logit_bias": {7: 3.0, 9: -9.0}, "min_tokens": 4}
    runs = []
    for is_python in (False, True):
        draft = PlainTarget(model_of(folder)) if is_python else model_of(folder)
        seqs = make_seqs(random.Random(1), filters=(params, {"top_k": 9, **params}, params, {}))
        proposer = proposer_of(draft, tiny.VOCAB, draw)
        for seq in seqs:
            proposer.admit(seq.slot, seq.request)
        runs.append((proposer, seqs))
    for _ in range(6):
        native, python = (run_round(proposer, seqs, (4, 2, 5, 3), 0.0) for proposer, seqs in runs)
        assert native.width == python.width
        assert sum(native.width) >= 11
        for b, width in enumerate(native.width):
            assert native.tokens[b, :width].tolist() == python.tokens[b, :width].tolist()
            assert native.kind[b, :width].tolist() == python.kind[b, :width].tolist()
            if draw is not Draw.ARGMAX:
                expected = python.q.padded()[b, :width]
                assert torch.allclose(native.q.padded()[b, :width], expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("draw", [Draw.ARGMAX, Draw.RACE])
def test_argmax_and_race_drafts_do_not_depend_on_the_code_path(draw, folder):
    runs = []
    for use_probs in (False, True):
        model = PlainTarget(model_of(folder)) if use_probs else model_of(folder)
        seqs = make_seqs(random.Random(1))
        for seq in seqs if use_probs else ():  # this penalty changes nothing, but it needs probabilities
            params = replace(seq.request.params, repetition_penalty=1 + 1e-12)
            seq.request = replace(seq.request, params=params)
        proposer = proposer_of(model, tiny.VOCAB, draw)
        for seq in seqs:
            proposer.admit(seq.slot, seq.request)
        runs.append((proposer, seqs))
    for _ in range(6):
        fast, slow = (run_round(proposer, seqs, (4, 2, 5, 3), 0.0) for proposer, seqs in runs)
        assert fast.width == slow.width == (4, 2, 5, 3)
        assert (fast.q is None) is (slow.q is None) is (draw is Draw.ARGMAX)
        for b, width in enumerate(fast.width):
            assert fast.tokens[b, :width].tolist() == slow.tokens[b, :width].tolist()


def run_round(proposer, seqs, budget, min_path_prob):
    """Return the draft of a round. Up to two draft tokens of each sequence are accepted."""
    start = tuple(seq.num_cached_tokens for seq in seqs)
    feed = tuple(tuple(seq.token_ids[seq.num_cached_tokens :]) for seq in seqs)
    batch = Batch(seqs=tuple(seqs), start=start, feed=feed, budget=DraftBudget(budget, min_path_prob=min_path_prob))
    draft = proposer.propose(batch)
    paths = [tuple(range(min(b % 3, width))) for b, width in enumerate(draft.width)]
    emitted = [(*draft.tokens[b, : len(path)].tolist(), 11) for b, path in enumerate(paths)]
    proposer.commit(make_round(batch, draft, Scores(logits=torch.empty(0)), paths, emitted))
    for seq, tokens in zip(seqs, emitted, strict=True):
        seq.token_ids += tokens
        seq.num_cached_tokens = len(seq.token_ids) - 1
    return draft


def test_native_sampling_equals_inverse_cdf(folder):
    """Some uniform numbers equal a cumulative sum, so that the last bit of the sum decides."""
    model = model_of(folder)
    seqs = make_seqs(random.Random(3), (1.0,) * 4)
    batch = Batch(
        seqs=tuple(seqs), start=(0,) * 4, feed=tuple(tuple(seq.token_ids) for seq in seqs), budget=DraftBudget((1,) * 4)
    )
    for seq in seqs:
        model.cache.admit(seq.slot, seq.token_ids)

    def draft(uniform):
        return model.draft_sampled(batch, 256, Draws(params=(draw_params(1.0),) * 4, uniform=uniform))

    probs = draft(torch.zeros(4, 1, dtype=torch.float64)).q.padded()[:, 0]
    cdf = probs.cumsum(-1, dtype=torch.float64)
    at_sums = [cdf[:, [v]] / cdf[:, -1:] for v in range(0, 255, 5)]
    below_sums = [uniform - 2**-53 for uniform in at_sums]
    for uniform in (*at_sums, *below_sums, *torch.rand(50, 4, 1, dtype=torch.float64)):
        uniform = uniform.clamp(0, 1 - 2**-48)
        chains = draft(uniform)
        assert torch.equal(chains.q.padded()[:, 0], probs)
        expected = inverse_cdf(probs, uniform[:, 0])
        assert chains.tokens[:, 0].tolist() == expected.tolist()


def test_stop_rule_of_sampled_chains(folder):
    model = model_of(folder)
    seqs = make_seqs(random.Random(4))
    batch = Batch(
        seqs=tuple(seqs),
        start=(0,) * 4,
        feed=tuple(tuple(seq.token_ids) for seq in seqs),
        budget=DraftBudget((5, 3, 5, 1)),
    )
    for seq in seqs:
        model.cache.admit(seq.slot, seq.token_ids)
    draws = Draws(
        params=tuple(map(draw_params, TEMPERATURES)), uniform=torch.rand(4, 5, dtype=torch.float64, generator=seeded(1))
    )
    unstopped = model.draft_sampled(batch, 256, draws)
    assert unstopped.count == (5, 3, 5, 1)
    assert unstopped.q.at.tolist()[1] == [-1] * 5
    end = int(unstopped.tokens[0, 1])
    stopped = model.draft_sampled(batch, 256, draws, StopRule(weight=(1.0,), bias=(0.0,), ends=(end,)))
    assert stopped.count[0] == unstopped.tokens[0].tolist().index(end) + 1
    assert stopped.tokens[2, : stopped.count[2]].tolist() == unstopped.tokens[2, : stopped.count[2]].tolist()
    unreachable = StopRule(weight=(1.0,), bias=(0.0,), min_path_prob=2.0)
    assert model.draft_sampled(batch, 256, draws, unreachable).count == (0,) * 4


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def test_draft_model_with_nan_logits_drafts_token_0(folder):
    """Its q is one-hot at this token, so verification stays exact."""
    model = model_of(folder)
    model.update_weights({"model.norm.weight": torch.full((32,), torch.nan)}, 1)
    seq = make_seq([1, 2, 3], 0, SamplingParams())
    model.cache.admit(0, seq.token_ids)
    batch = Batch(seqs=(seq,), start=(0,), feed=((1, 2, 3),), budget=DraftBudget((2,)))
    draws = Draws(params=(draw_params(1.0),), uniform=torch.full((1, 2), 0.5, dtype=torch.float64))
    chains = model.draft_sampled(batch, 256, draws)
    assert chains.tokens.tolist() == [[0, 0]]
    assert torch.equal(chains.q.padded()[0], torch.eye(256)[[0, 0]])
