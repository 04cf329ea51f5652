"""Draft models whose LM head is approximated by low-rank factors, with exact logits for the best panels."""

from dataclasses import replace

import pytest
import torch

from outrider.core import tree
from outrider.core.draws import DrawParams, Draws
from outrider.core.params import SamplingParams
from outrider.core.proposer import ProposerSetup
from outrider.core.types import Batch, DraftBudget, Draw, SequenceState
from outrider.drafting.propose.vocabulary.candidates import rank_copy_tokens, use_candidates
from outrider.errors import OutriderError
from outrider.llm import LLM
from outrider.models.loader.embedded import embedded
from outrider.models.loader.load import load_checkpoint
from outrider.models.loader.make import make_target
from outrider.models.loader.tokenizer import read_tokenizer
from outrider.models.native.target import NativeTarget
from tests.helpers import tiny

pytestmark = pytest.mark.skipif(not tiny.compiles(), reason="no C++ compiler here")
TEXTS = [
    "def add(a, b):\n    return a",
    "The house stood on a hill, and the",
    "import os\nimport sys\n\nclass Reader:\n    def",
]
FEEDS = [tuple(read_tokenizer(embedded("nano")).encode(text)) for text in TEXTS]
PANELS = 32  # with exact logits


def make(candidates=None, kernels="native"):
    checkpoint = load_checkpoint(embedded("nano"), dtype="float32", device="cpu")
    model = make_target(checkpoint, slots=3, context=96, kernels=kernels)
    if candidates:
        use_candidates(model, checkpoint, candidates)
    return model


@pytest.fixture(scope="module")
def ranked():
    return make(PANELS)


def batch(model, feeds, budget=0):
    for slot, feed in enumerate(feeds):
        model.cache.release(slot)
        model.cache.admit(slot, feed[:1])
    seqs = tuple(SequenceState.of(feed, slot) for slot, feed in enumerate(feeds))
    return Batch(seqs=seqs, start=(0,) * len(feeds), feed=tuple(feeds), budget=DraftBudget((budget,) * len(feeds)))


def logits(model, feeds):
    return model.score(batch(model, feeds), tree.empty(len(feeds), model.device)).logits[:, 0]


def test_the_likeliest_tokens_have_the_logits_of_the_whole_head(ranked):
    approximate, exact = logits(ranked, FEEDS), logits(make(), FEEDS)
    for b in range(len(FEEDS)):
        equal = (approximate[b] == exact[b]).view(-1, 32).all(-1)
        assert PANELS <= equal.sum() <= PANELS + 2
        assert equal[exact[b].argmax() // 32]
    overlap = torch.minimum(approximate.softmax(-1), exact.softmax(-1)).sum(-1)
    assert overlap.min() > 0.7


def test_factors_are_computed_once_and_kept(ranked, tmp_path, monkeypatch):
    monkeypatch.setattr("outrider.models.loader.computed.cache_folder", lambda: tmp_path)
    expected = logits(make(PANELS), FEEDS)
    (file,) = tmp_path.glob("factors-*.safetensors")
    with monkeypatch.context() as patch:
        patch.setattr(NativeTarget, "factorize_head", None)
        assert torch.equal(logits(make(PANELS), FEEDS), expected)
    file.write_bytes(file.read_bytes()[:1000])  # a damaged file is replaced
    assert torch.equal(logits(make(PANELS), FEEDS), expected)
    assert file.stat().st_size > 1000


def test_logits_do_not_depend_on_the_batch(ranked):
    together = logits(ranked, FEEDS)
    for feed, row in zip(FEEDS, together, strict=True):
        assert torch.equal(logits(ranked, [feed])[0], row)


def test_all_panels_give_the_whole_head(ranked):
    assert torch.equal(logits(make(candidates=10**6), FEEDS), logits(make(), FEEDS))


def test_draft_tokens_have_the_distribution_that_verification_gets(ranked):
    """Enumerate the outcomes: the draw in the middle of the interval of each token gives this token."""
    feed = FEEDS[0]
    params = (DrawParams(temperature=1.0, top_k=ranked.vocab, top_p=1.0, min_p=0.0),)

    def draft(uniform):
        draws = Draws(params=params, uniform=torch.tensor([[uniform]], dtype=torch.float64))
        chains = ranked.draft_sampled(batch(ranked, [feed], 1), ranked.vocab, draws)
        assert chains.q is not None
        return int(chains.tokens[0, 0]), chains.q.values[int(chains.q.at[0, 0])]

    _, q = draft(0.5)
    assert float(q.sum()) == pytest.approx(1, abs=1e-5)
    torch.testing.assert_close(q, logits(ranked, [feed])[0].softmax(-1), atol=1e-6, rtol=1e-4)
    ends = q.double().cumsum(0) / q.double().sum()
    likely = (q > 1e-3).nonzero()[:, 0].tolist()
    approximate = [token for token in likely if token // 32 not in {int(q.argmax()) // 32}]
    assert len(likely) > len(approximate) > 10
    for token in likely:
        drawn, same = draft(float(ends[token] - q[token].double() / 2))
        assert drawn == token
        assert torch.equal(same, q)


@pytest.mark.parametrize(
    "proposer", ["draft:@nano", "quantized:int4", pytest.param("tree:@nano", marks=pytest.mark.slow)]
)
def test_text_does_not_change(proposer):
    options = {"dtype": "float32", "max_num_seqs": 2, "max_model_len": 96, "verifier": "walk"}
    llm = LLM(None, proposer=proposer, k=3, draft_candidates=4, **options)
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, max_tokens=20, seed=1)
        plain, drafted = (llm.generate(["def add(a, b):", "The cat"], replace(params, k=k)) for k in (0, 3))
        assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]
        assert all(each.stats.draft_tokens for each in drafted)


def test_fewer_bytes_are_read(ranked):
    assert ranked.read_bytes()[1] < make().read_bytes()[1] / 5


def test_weights_cannot_be_replaced(ranked):
    with pytest.raises(OutriderError, match="reduced LM head takes no new weights"):
        ranked.update_weights({}, 1)


def test_other_kernels_are_refused():
    with pytest.raises(OutriderError, match="leave draft_candidates out"):
        make(candidates=4, kernels="torch")


def test_a_proposer_without_a_draft_is_refused():
    with pytest.raises(OutriderError, match="draft_candidates is 4 and the proposer ngram has no draft"):
        LLM(None, proposer="ngram", draft_candidates=4)


@pytest.fixture(scope="module")
def large_vocabulary(tmp_path_factory):
    """A tiny model of 40,000 tokens."""
    sizes = {"vocab_size": 40_000, "hidden_size": 128, "head_dim": 32, "intermediate_size": 96}
    return tiny.save(tmp_path_factory.mktemp("large"), tiny.make_config("LlamaConfig", **sizes))


def target_and_copies(folder, candidates=None):
    """A target, its quantized copy as a proposer gets it, and one with the whole LM head."""
    checkpoint = load_checkpoint(folder, dtype="bfloat16", device="cpu")
    target = make_target(checkpoint, slots=3, context=96, kernels="native")
    setup = ProposerSetup(
        target=target,
        vocab=target.vocab,
        slots=3,
        context=96,
        device=target.device,
        dtype=torch.bfloat16,
        draw=Draw.ARGMAX,
        tokenizer=checkpoint.tokenizer,
        target_folder=checkpoint.folder,
        draft_candidates=candidates,
    )
    copy = target.make_requantized(4)
    rank_copy_tokens(copy, setup)
    return target, copy, target.make_requantized(4)


def test_a_quantized_copy_of_a_large_vocabulary_ranks_its_tokens(large_vocabulary):
    _, copy, whole = target_and_copies(large_vocabulary)
    assert copy.read_bytes()[1] < whole.read_bytes()[1] / 1.5
    assert copy.bytes() > whole.bytes()
    approximate, exact = logits(copy, FEEDS), logits(whole, FEEDS)
    equal = (approximate == exact).view(len(FEEDS), -1, 32).all(-1).sum(-1)
    assert equal.min() >= 256
    assert equal.max() <= 258
    assert torch.equal(approximate.argmax(-1), exact.argmax(-1))


def test_new_weights_give_a_quantized_copy_its_whole_head_again(large_vocabulary):
    target, copy, whole = target_and_copies(large_vocabulary)
    target.update_weights({"model.norm.weight": torch.full((128,), 0.5)}, 1)
    assert copy.read_bytes() == whole.read_bytes()
    assert torch.equal(logits(copy, FEEDS), logits(whole, FEEDS))


def test_a_quantized_copy_of_a_small_vocabulary_keeps_its_whole_head():
    _, copy, whole = target_and_copies(embedded("mini"))
    assert copy.read_bytes() == whole.read_bytes()


def test_panels_of_a_quantized_copy_can_be_chosen():
    _, copy, whole = target_and_copies(embedded("mini"), candidates=8)
    equal = (logits(copy, FEEDS) == logits(whole, FEEDS)).view(len(FEEDS), -1, 32).all(-1).sum(-1)
    assert equal.min() >= 8
    assert equal.max() <= 10


def test_options_that_a_quantized_copy_lacks_are_refused():
    options = {"dtype": "bfloat16", "max_num_seqs": 1, "max_model_len": 96}
    with pytest.raises(OutriderError, match="draft_window is 32 and the proposer quantized:int4 has no draft"):
        LLM(None, proposer="quantized:int4", draft_window=32, **options)
    with pytest.raises(OutriderError, match="use device cpu, kernels native"):
        LLM(None, proposer="quantized:int8", draft_candidates=8, kernels="torch", **options)
