"""Encoder-decoder targets: greedy outputs, batches, trees, caches, drafts, sampled outputs and mistakes."""

import random

import pytest
import torch

from outrider.core import tree
from outrider.core.params import SamplingParams
from outrider.core.types import SequenceState
from outrider.errors import OutriderError
from outrider.llm import LLM
from outrider.models.loader.load import load_checkpoint
from outrider.models.loader.make import make_target
from outrider.testing import random_tree
from tests.helpers import tiny
from tests.models.torch.expected_outputs import check_three_tokens, expected_logits, three_token_probs

NAMES = tuple(tiny.ENCODER_DECODER)
TOLERANCE = 1e-4  # relative to the norm of the logits
OPTIONS = {"dtype": "float32", "device": "cpu", "max_model_len": 64}
MAIN = ("t5", "flan-t5", "bart", "t5gemma")  # the others have the attention or the positions of one of these
MERGE = "merge(ngram,recycle)"
PROPOSERS = {
    "t5": ("none", "ngram", "suffix:1000", MERGE, "draft", "tree", "cascade"),
    "bart": ("suffix:1000", MERGE, "draft", "tree"),
    "t5gemma": ("none", "ngram", MERGE, "draft", "cascade"),
}


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    return tiny.Shelf(tmp_path_factory.mktemp("encoder_decoder"))


@pytest.fixture(scope="module")
def sibling(tmp_path_factory):
    """Return the folder of a smaller model with the target's vocabulary."""
    folders = {}

    def find(name):
        if name not in folders:
            config = tiny.ENCODER_DECODER[name]()
            if name == "t5gemma":
                config.decoder.num_hidden_layers = 1
                config.decoder.layer_types = config.decoder.layer_types[:1]
            elif name == "bart":
                config.decoder_layers = 1
            else:
                config.num_decoder_layers = 1
            folders[name] = tiny.save(tmp_path_factory.mktemp("sibling"), config, seed=1)
        return folders[name]

    return find


def sources_of(rng, lengths=(1, 3, 9, 20, 40, 40, 7)):
    return [tiny.text(rng, length) for length in lengths]


def relative_error(actual, expected):
    return float(((actual - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


@pytest.mark.fast_cases("t5-suffix:1000", "t5-draft", "bart-merge(ngram,recycle)", "bart-tree", "t5gemma-cascade")
@pytest.mark.parametrize(
    ("name", "proposer"), [(name, proposer) for name in NAMES for proposer in PROPOSERS.get(name, (MERGE,))]
)
def test_greedy_equals_transformers(name, proposer, shelf, sibling):
    sources = sources_of(random.Random(0))
    if proposer in ("draft", "tree", "cascade"):
        proposer = f"{proposer}:{sibling(name)}"
    llm = LLM(shelf.folder(name), proposer=proposer, k=4, max_num_seqs=4, **OPTIONS)
    completions = llm.generate(sources=sources, params=SamplingParams(max_tokens=16, ignore_eos=True))
    outputs = [list(completion.token_ids) for completion in completions]
    assert list(map(len, outputs)) == [16] * len(sources)
    assert outputs == tiny.ranked_first_of_sources(shelf.model(name), sources, outputs)
    assert (llm.stats.draft_tokens > 0) == (proposer != "none")


@pytest.mark.fast_cases(*tiny.fast(NAMES))
@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_tree_scores_equal_each_branch_alone(name, shelf):
    rng = random.Random(1)
    model = shelf.model(name)
    target = shelf.target(name)
    sources = sources_of(rng, (5, 30, 12))
    seqs = [
        tiny.admit(target, slot, tiny.text(rng, length), source)
        for slot, length, source in zip((0, 1, 3), (1, 1, 9), sources, strict=True)
    ]
    batch = tiny.everything(seqs)
    draft = random_tree([6, 4, 5], tiny.VOCAB, rng)
    scores = target.score(batch, draft)
    for b, (seq, source) in enumerate(zip(seqs, sources, strict=True)):
        for node in range(-1, draft.width[b]):
            path = [int(draft.tokens[b, each]) for each in tiny.branch(draft, b, node)]
            expected = expected_logits(model, source, seq.token_ids + path)
            assert relative_error(scores.logits[b, 1 + node], expected) < TOLERANCE


@pytest.mark.fast_cases(*tiny.fast(NAMES))
@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_committed_cache_equals_fresh_prefill(name, shelf):
    rng = random.Random(2)
    model = shelf.model(name)
    target = shelf.target(name)
    target.cache.set_prefix_caching(True)  # which these targets do not support
    sources = sources_of(rng, (33, 2, 33))
    seqs = [tiny.admit(target, slot, tiny.text(rng, 2), source) for slot, source in enumerate(sources)]
    for _ in range(5):
        tiny.grow(target, seqs, rng)
    logits = target.score(tiny.everything(seqs), tree.empty(3, target.device)).logits[:, 0]
    for seq, source, actual in zip(seqs, sources, logits, strict=True):
        assert relative_error(actual, expected_logits(model, source, seq.token_ids)) < TOLERANCE
    # Another source in a slot that was used, with the tokens of the sequence before.
    target.cache.release(0)
    assert target.cache.admit(0, seqs[0].token_ids, "scope") == 0
    target.cache.release(0)
    other = tiny.admit(target, 0, seqs[0].token_ids, sources[1])
    assert other.num_cached_tokens == 0
    actual = target.score(tiny.everything([other]), tree.empty(1, target.device)).logits[0, 0]
    assert relative_error(actual, expected_logits(model, sources[1], other.token_ids)) < TOLERANCE


@pytest.mark.fast_cases(*tiny.fast(NAMES))
@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_chain_that_is_drafted_token_by_token(name, shelf):
    rng = random.Random(3)
    model = shelf.model(name)
    target = shelf.target(name)
    sources = sources_of(rng, (4, 17))
    seqs = [tiny.admit(target, slot, [0], source) for slot, source in zip((0, 2), sources, strict=True)]
    chains = target.draft_greedy(tiny.everything(seqs), tiny.VOCAB)
    for source, drafted in zip(sources, chains.tokens.tolist(), strict=True):
        assert drafted == tiny.greedy_of_source(model, source, 6)


def test_encoder_runs_once_per_source(shelf, monkeypatch):
    llm = LLM(shelf.folder("t5"), proposer="ngram", k=4, max_num_seqs=4, **OPTIONS)
    lengths = []
    encoder = llm.parts.loaded.checkpoint.model.get_encoder()
    forward = encoder.forward
    monkeypatch.setattr(
        encoder, "forward", lambda **inputs: lengths.append(inputs["input_ids"].shape[1]) or forward(**inputs)
    )
    params = SamplingParams(max_tokens=12, n=3, temperature=1.0, ignore_eos=True)
    llm.generate(sources=[[1, 2, 3], [4, 5]], params=params)
    assert sorted(lengths) == [2, 3]


@pytest.mark.fast_cases("t5-draft")
@pytest.mark.parametrize(("name", "proposer"), [("t5", "draft"), ("bart", "ngram")])
def test_sampled_output_has_the_distribution_of_the_model(name, proposer, shelf, sibling):
    source = tiny.text(random.Random(4), 12)
    if proposer == "draft":
        proposer = f"draft:{sibling(name)}"
    llm = LLM(shelf.folder(name), proposer=proposer, k=3, max_num_seqs=64, **OPTIONS)
    check_three_tokens(llm, source, three_token_probs(shelf.model(name), source))


@pytest.mark.parametrize("proposer", ["ngram", "suffix"])
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_lookups_find_the_source(proposer, kernels, shelf):
    """The first round drafts the beginning of the source."""
    llm = LLM(shelf.folder("t5"), proposer=proposer, k=4, kernels=kernels, **OPTIONS)
    drafts = []
    llm.engine.on_round = lambda round: drafts.append(round.draft.tokens[0].tolist())
    llm.generate(sources=[[11, 12, 13, 14, 15]], params=SamplingParams(max_tokens=6, ignore_eos=True))
    assert drafts[0][0] == 11
    assert drafts[0] == [11, 12, 13, 14][: len(drafts[0])]


def test_prompts_of_the_decoder(shelf):
    llm = LLM(shelf.folder("bart"), proposer="ngram", k=4, **OPTIONS)
    source = tiny.text(random.Random(5), 10)
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    (whole,) = llm.generate(sources=source, params=params)
    assert whole.prompt_token_ids == llm.start_tokens() == (0,)
    assert whole.source_token_ids == tuple(source)
    (rest,) = llm.generate([[0, *whole.token_ids[:4]]], params, sources=[source])
    assert rest.token_ids[:6] == whole.token_ids[4:]
    assert llm.encode("ab") == (0, *llm.parts.tokenizer.encode("ab", add_special_tokens=False))
    streamed = [token for chunk in llm.stream(params=params, source=source) for token in chunk.token_ids]
    assert tuple(streamed) == whole.token_ids


def test_forced_first_token(tmp_path):
    folder = tiny.save(tmp_path, tiny.ENCODER_DECODER["bart"]())
    config = load_checkpoint(folder, dtype="float32", device="cpu").model.generation_config
    config.forced_bos_token_id = 7
    config.save_pretrained(folder)
    assert LLM(folder, proposer="none", **OPTIONS).start_tokens() == (0, 7)


@pytest.mark.fast_cases(*tiny.fast(NAMES))
@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_hidden_states_equal_those_of_transformers(name, shelf):
    model = shelf.model(name)
    target = shelf.target(name, layers=(0, 2))
    source, tokens = [5, 6, 7, 8], [0, 3, 9]
    scores = target.score(tiny.everything([tiny.admit(target, 0, tokens, source)]), tree.empty(1, target.device))
    sources, outputs = torch.tensor([source]), torch.tensor([tokens])
    masks = {"attention_mask": torch.ones_like(sources), "decoder_attention_mask": torch.ones_like(outputs)}
    states = model(
        input_ids=sources, decoder_input_ids=outputs, output_hidden_states=True, use_cache=False, **masks
    ).decoder_hidden_states
    for layer in (0, 2):
        assert relative_error(scores.feed_hidden_states[layer][0], states[layer + 1][0]) < TOLERANCE


@pytest.mark.fast_cases(*tiny.fast(NAMES))
@pytest.mark.parametrize("name", MAIN)
@torch.inference_mode()
def test_weight_update_reads_sources_again(name, shelf):
    target = shelf.target(name)
    model = shelf.model(name)
    source = [1, 2, 3, 4]
    seq = tiny.admit(target, 0, [0, 9], source)
    empty = tree.empty(1, target.device)
    target.score(tiny.everything([seq]), empty)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    changed = {key: value * 1.1 for key, value in weights.items() if key.startswith(("encoder.", "model.encoder."))}
    target.update_weights(changed, version=1)
    seq = tiny.admit(target, 0, [0, 9], source)
    actual = target.score(tiny.everything([seq]), empty).logits[0, 0]
    fresh = make_target(shelf.checkpoint(name), slots=1, context=64)
    fresh.update_weights(changed, version=1)
    expected = fresh.score(tiny.everything([tiny.admit(fresh, 0, [0, 9], source)]), empty).logits[0, 0]
    assert relative_error(actual, expected) < TOLERANCE
    assert relative_error(actual, expected_logits(model, source, [0, 9])) > TOLERANCE


def test_sequence_that_no_user_requested_needs_no_source(shelf):
    target = shelf.target("t5")
    seq = SequenceState.of((0,))
    target.cache.admit(0, (0,))
    with torch.inference_mode():
        assert target.score(tiny.everything([seq]), tree.empty(1, target.device)).logits.isfinite().all()
        requested = tiny.admit(target, 1, [0])
        with pytest.raises(OutriderError, match="give each request a source"):
            target.score(tiny.everything([requested]), tree.empty(1, target.device))


MISTAKES = {
    "no source": ({"prompts": "a"}, "source is missing, which this encoder-decoder target reads"),
    "empty source": ({"sources": [[]]}, "source is empty"),
    "source too long": ({"sources": [[1] * 129]}, "source is 129 tokens long, and the encoder takes 128"),
    "unknown token": ({"sources": [[1, 999]]}, "token id 999 is not in the vocabulary"),
    "no text": ({"sources": [{1}]}, "a source has the type set"),
    "nothing": ({}, "there is no prompt"),
    "too few sources": ({"prompts": ["a", "b"], "sources": ["a"]}, "2 prompts came with 1 sources"),
}


@pytest.mark.parametrize(("given", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes(given, message, shelf):
    llm = LLM(shelf.folder("bart"), proposer="none", **OPTIONS)
    with pytest.raises(OutriderError, match=message):
        llm.generate(**given)


def test_conversation_is_refused(shelf):
    llm = LLM(shelf.folder("bart"), proposer="none", **OPTIONS)
    with pytest.raises(OutriderError, match="takes a source and no conversation"):
        llm.encode_chat([{"role": "user", "content": "a"}])


def test_decoder_only_target_refuses_a_source(shelf):
    llm = LLM(shelf.folder("llama"), proposer="none", **OPTIONS)
    with pytest.raises(OutriderError, match="source is for encoder-decoder models"):
        llm.generate(["a"], sources=["b"])
    with pytest.raises(OutriderError, match="source is for encoder-decoder models"):
        llm.generate(sources=["b"])
    with pytest.raises(OutriderError, match="has no default prompt"):
        next(llm.stream())


REFUSED = {
    "exit:1": "cannot draft with its own layers",
    "quantized:int8": "cannot draft with its own layers",
    "mtp": "has no module for multi-token prediction",
}


@pytest.mark.parametrize(("proposer", "message"), REFUSED.items(), ids=REFUSED)
def test_refused_proposers(proposer, message, shelf):
    with pytest.raises(OutriderError, match=message):
        LLM(shelf.folder("t5"), proposer=proposer, k=4, **OPTIONS)


def test_refused_drafts(shelf, tmp_path):
    with pytest.raises(OutriderError, match="is a decoder-only model and the target an encoder-decoder model"):
        LLM(shelf.folder("t5"), proposer=f"draft:{shelf.folder('llama')}", **OPTIONS)
    with pytest.raises(OutriderError, match="is an encoder-decoder model and the target a decoder-only model"):
        LLM(shelf.folder("llama"), proposer=f"draft:{shelf.folder('t5')}", **OPTIONS)
    with pytest.raises(OutriderError, match="takes 128 tokens and the target's 8192"):
        LLM(shelf.folder("t5"), proposer=f"draft:{shelf.folder('bart')}", **OPTIONS)
    other = tiny.save(tmp_path, tiny.ENCODER_DECODER["t5"](), size=tiny.VOCAB - 8)
    tiny.tokenizer(tiny.VOCAB + 1).save_pretrained(other)
    with pytest.raises(OutriderError, match="has another vocabulary, with which it cannot read"):
        LLM(shelf.folder("t5"), proposer=f"draft:{other}", **OPTIONS)


def test_bfloat16_passes_the_check(shelf):
    llm = LLM(shelf.folder("t5"), proposer="ngram", k=4, **{**OPTIONS, "dtype": "bfloat16"})
    (completion,) = llm.generate(sources=[[1, 2, 3]], params=SamplingParams(max_tokens=8, ignore_eos=True))
    assert len(completion.token_ids) == 8


@pytest.mark.parametrize("setting", [{"quantize": "int8", "dtype": "auto"}, {"kernels": "native"}])
def test_refused_settings(setting, shelf):
    with pytest.raises(OutriderError, match="does not support encoder-decoder models"):
        LLM(shelf.folder("t5"), proposer="none", **{**OPTIONS, **setting})
