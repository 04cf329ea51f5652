"""Draft models with another vocabulary: the text of their tokens, and drafting by tokens and by text."""

import json
import random
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from outrider import LLM, SamplingParams
from outrider.core.prompts import read_prompts
from outrider.core.target import draft_by_scores
from outrider.core.types import Batch, DraftBudget, Scores
from outrider.drafting.propose.vocabulary.counterparts import counterparts, faithful_text
from outrider.drafting.propose.vocabulary.intersection import SharedVocabulary, VocabularyMap
from outrider.drafting.propose.vocabulary.retokenize import Retokenizer
from outrider.drafting.propose.vocabulary.text_draft import TextProposer
from outrider.drafting.propose.vocabulary.wrapped_target import WrappedTarget
from outrider.errors import OutriderError
from outrider.models.loader.embedded import embedded
from outrider.models.loader.load import load_checkpoint
from outrider.models.loader.make import make_target
from outrider.testing import ToyTarget, check_cache
from outrider.testing.drive import make_seq
from tests.helpers import tiny
from tests.helpers.conformance import PROPOSERS, letters
from tests.helpers.engines import make_engine, run
from tests.verify.test_distribution import p_value

TEXTS = [
    "def add(a, b):\n    return a + b\n\n\nprint(add(1, 23))  # doesn't it?\n",
    "Naïve café: 12 345 €, 日本語です。 “Quoted”, and\tthe\r\n\r\n  rest…\n",
    '{"name": "Ann", "job": "baker", "salary": 61000, "tags": ["x_1", "y-2"]}' * 3,
    "x" * 130 + " " * 60 + "!?" * 40 + "\n" * 5 + "the end",
]
GREEDY = SamplingParams(max_tokens=24)


def corpus():
    return [prompt.prompt or prompt.messages[-1]["content"] for prompt in read_prompts()]


def byte_level(size, special=("<s>", "</s>")):
    """Return a byte-level tokenizer trained on the embedded prompts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(special), initial_alphabet=letters, show_progress=False
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=special[0], eos_token=special[1])


def sentencepiece(size, scheme="always"):
    """Return a tokenizer that writes spaces as sentencepiece does, prepends one, and falls back to bytes."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<unk>", "<s>", "</s>", *byte_tokens], show_progress=False, limit_alphabet=70
    )
    tokenizer.train_from_iterator([text.replace("\n", " ") for text in corpus()], trainer)
    config = json.loads(tokenizer.to_str())
    config["added_tokens"] = [token for token in config["added_tokens"] if not token["content"].startswith("<0x")]
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(config)), bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


TOKENIZERS = {
    "byte level": lambda: byte_level(600),
    "sentencepiece": lambda: sentencepiece(700),
    "sentencepiece, a space only at the beginning": lambda: sentencepiece(700, "first"),
    "bytes": lambda: tiny.tokenizer(260),
}


@pytest.fixture(scope="module")
def token_texts():
    return {name: faithful_text(make(), name) for name, make in TOKENIZERS.items()}


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_tokens_spell_the_text(name, text, token_texts):
    spelling = token_texts[name]
    for part in (text, " " + text, "  " + text, "\n" + text):
        assert spelling.spell(spelling.encode([part])[0]).decode() == part


def test_counterparts_have_the_same_text(token_texts):
    target = token_texts["byte level"]
    draft = token_texts["sentencepiece"]
    shared = counterparts(target, draft)
    pairs = {
        target.pieces[id]: draft.pieces[other]
        for id, other in enumerate(shared)
        if id not in target.special and other >= 0
    }
    assert all(piece == other for piece, other in pairs.items())
    assert b" the" in pairs
    assert b"\n" in pairs
    assert sum(len(piece) > 2 for piece in pairs) > 50
    assert len({other for other in shared if other >= 0}) == sum(other >= 0 for other in shared)
    assert draft.pieces[shared[target.pieces.index(b"a")]] == b"a"
    assert draft.cut(["a b"])[0][-1] == shared[target.pieces.index(b" b")]


def test_special_tokens_are_matched_by_name_or_role():
    target = faithful_text(byte_level(300, ("<s>", "<|end|>")), "x")
    draft = faithful_text(byte_level(300, ("<s>", "</s>")), "x")
    shared = counterparts(target, draft)
    assert shared[target.roles["bos"]] == draft.roles["bos"]
    assert shared[target.roles["eos"]] == draft.roles["eos"]
    swapped = faithful_text(byte_level(300, ("<|end|>", "<|begin|>")), "x")
    shared = counterparts(target, swapped)
    assert swapped.special[shared[target.roles["eos"]]] == "<|end|>"
    assert shared[target.roles["bos"]] == -1  # its only candidate is taken


def test_tokenizer_that_changes_the_text_is_rejected():
    tokenizer = byte_level(300)
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    with pytest.raises(OutriderError, match=r"tokenizer of DIR changes the text.*use a draft of the target's"):
        faithful_text(tokenizer, "DIR")


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_retokenizer_depends_only_on_the_text(name, text, token_texts):
    target = token_texts["byte level"]
    draft = token_texts[name]
    tokens = target.encode([text])[0]
    at_once = Retokenizer(target, draft)
    at_once.push(tokens)
    assert at_once.ends_at_character
    assert draft.spell(at_once.ids()).decode() == text
    for seed in range(5):
        rng = random.Random(seed)
        in_chunks = Retokenizer(target, draft)
        position = 0
        while position < len(tokens):
            before = list(in_chunks.stable_ids)
            size = rng.randint(1, 4)
            in_chunks.push(tokens[position : position + size])
            position += size
            assert in_chunks.stable_ids[: len(before)] == before
        assert in_chunks.count == len(tokens)
        assert in_chunks.ids() == at_once.ids()
        assert in_chunks.stable_ids == at_once.stable_ids


def test_retokenizer_cuts_where_the_tokenizer_cuts():
    tokenizer = load_checkpoint(embedded("nano"), dtype="float32", device="cpu").tokenizer
    nano = faithful_text(tokenizer, "nano")
    for text in corpus():
        ids = nano.encode([text])[0]
        retokenizer = Retokenizer(nano, nano)
        retokenizer.push(ids)
        num_equal = sum(a == b for a, b in zip(retokenizer.ids(), ids, strict=False))
        assert num_equal == len(ids) or len(max(text.split(), key=len)) > 40
        assert len(retokenizer.tail) <= 50


def test_special_tokens_become_counterparts_or_their_text(token_texts):
    target = faithful_text(byte_level(300, ("<s>", "<|end|>", "<|user|>")), "x")
    draft = token_texts["byte level"]
    retokenizer = Retokenizer(target, replace(draft, begin=(draft.roles["bos"],)))
    user = next(id for id, content in target.special.items() if content == "<|user|>")
    retokenizer.push([target.roles["bos"], user, *target.encode(["Hello"])[0], target.roles["eos"]])
    ids = retokenizer.ids()
    assert ids[0] == draft.roles["bos"]
    assert ids[1] != draft.roles["bos"]
    assert ids[-1] == draft.roles["eos"]
    assert draft.spell(ids) == b"<|user|>Hello"


def test_retokenizer_knows_incomplete_characters(token_texts):
    target = token_texts["bytes"]
    draft = token_texts["byte level"]
    retokenizer = Retokenizer(target, draft)
    first, second = target.encode(["é"])[0]
    retokenizer.push([first])
    assert not retokenizer.ends_at_character
    retokenizer.push([second])
    assert retokenizer.ends_at_character
    assert draft.spell(retokenizer.ids()).decode() == "é"


class WithoutMissingTokens(WrappedTarget):
    """Removes the logits of the last token, which the draft model lacks."""

    def score(self, batch, draft, first=-1):
        logits = self.inner.score(batch, draft, first).logits
        assert bool((logits[..., -1] < -1e8).all())
        return Scores(logits=logits[..., :-1])


def test_cache_is_correct_with_missing_tokens():
    vocabulary_map = VocabularyMap([3, 1, 0, 5, 4, -1], [0, 0, 0, 0, 0, 2])
    check_cache(lambda: WithoutMissingTokens(SharedVocabulary(ToyTarget(), vocabulary_map)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "verifier"),
    [("foreign model", rule) for rule in ("rejection", "block", "traversal")] + [("text draft", "block")],
)
def test_output_distribution_is_the_targets(name, verifier):
    assert p_value(verifier, PROPOSERS[name]) > 1e-3


def test_greedy_chains_have_no_missing_tokens():
    draft = ToyTarget(vocab=8, seed=2, spread=3.0)
    model = SharedVocabulary(draft, VocabularyMap([7, 6, 5, -1], [0, 0, 0, 1]))
    num_with_missing = 0
    for seed in range(20):
        rng = random.Random(seed)
        seq = make_seq([rng.randrange(4) for _ in range(4)], 0)
        model.cache.admit(0, seq.token_ids)
        batch = Batch(seqs=(seq,), start=(0,), feed=(tuple(seq.token_ids),), budget=DraftBudget((3,)))
        tokens = model.draft_greedy(batch, 4).tokens
        assert torch.equal(tokens, draft_by_scores(model, batch, 4).tokens)
        assert int(tokens.max()) < 3
        num_with_missing += bool((draft.draft_greedy(model.translate_batch(batch), 8).tokens < 5).any())
    assert num_with_missing > 0


def save_shuffled(folder, num_tokens=None):
    """Save the embedded draft model with shuffled ids, and only with its first `num_tokens` tokens."""
    checkpoint = load_checkpoint(embedded("nano"), dtype="float32", device="cpu")
    config = json.loads(checkpoint.tokenizer.backend_tokenizer.to_str())
    old_ids = list(range(num_tokens or checkpoint.vocab))
    random.Random(1).shuffle(old_ids)
    new_ids = {old: new for new, old in enumerate(old_ids)}
    bpe = config["model"]
    bpe["vocab"] = {token: new_ids[id] for token, id in bpe["vocab"].items() if id in new_ids}
    bpe["merges"] = [pair for pair in bpe["merges"] if {*pair, "".join(pair)} <= bpe["vocab"].keys()]
    for token in config["added_tokens"]:
        token["id"] = new_ids[token["id"]]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(config)), bos_token="<|endoftext|>", eos_token="<|end|>"
    )
    weights = checkpoint.model.get_input_embeddings().weight[old_ids].clone()
    checkpoint.model.resize_token_embeddings(len(old_ids), mean_resizing=False)
    checkpoint.model.get_input_embeddings().weight.data.copy_(weights)
    tiny.transformers.utils.logging.disable_progress_bar()
    checkpoint.model.set_attn_implementation("eager")
    checkpoint.model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def shuffled(tmp_path_factory):
    return save_shuffled(tmp_path_factory.mktemp("shuffled"))


@pytest.fixture(scope="module")
def smaller(tmp_path_factory):
    return save_shuffled(tmp_path_factory.mktemp("smaller"), num_tokens=6000)


def generate(proposer, params=GREEDY, **settings):
    """Return the embedded target's outputs for the embedded prompts, and the statistics."""
    llm = LLM(None, proposer=proposer, device="cpu", k=4, max_num_seqs=4, max_model_len=768, **settings)
    return [completion.token_ids for completion in llm.generate(corpus()[::3], params)], llm.stats


@pytest.mark.fast_cases("0.8-walk")
@pytest.mark.parametrize(("temperature", "verifier"), [(0.0, "walk"), (0.8, "block"), (0.8, "walk")])
def test_shuffled_ids_do_not_change_the_draft_by_tokens(temperature, verifier, shuffled):
    params = replace(GREEDY, temperature=temperature, seed=4)
    texts, stats = generate(f"draft:{embedded('nano')}", params, verifier=verifier)
    shuffled_texts, shuffled_stats = generate(f"draft:{shuffled}", params, verifier=verifier)
    assert shuffled_texts == texts
    assert shuffled_stats.accepted == stats.accepted
    assert shuffled_stats.draft_tokens == stats.draft_tokens
    assert stats.tau > 1.5


def test_shuffled_ids_hardly_change_acceptance_by_text(shuffled):
    texts, stats = generate(f"draft:{embedded('nano')}")
    shuffled_texts, shuffled_stats = generate(f"draft-text:{shuffled}")
    assert shuffled_texts == texts
    assert shuffled_stats.tau == pytest.approx(stats.tau, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", ["draft", "draft-tokens", "draft-text", "cascade"])
def test_draft_model_that_lacks_half_of_the_tokens(name, temperature, smaller, caplog):
    params = replace(GREEDY, temperature=temperature, seed=4)
    plain_texts, _ = generate("none", params, verifier="walk")
    texts, stats = generate(f"{name}:{smaller}", params, verifier="walk")
    assert texts == plain_texts
    assert stats.tau > 1.5
    warning = "of the target's 12288 tokens it has 49%, and it drafts by text"
    assert [warning in record.getMessage() for record in caplog.records] == [True] * (name == "draft")


class FeedCounter(WrappedTarget):
    """Counts the rounds of a draft model, and the tokens that it is fed in them."""

    rounds = 0
    tokens = 0

    def draft_greedy(self, batch, vocab, stop_rule=None):
        self.rounds += 1
        self.tokens += sum(map(len, batch.feed))
        return super().draft_greedy(batch, vocab, stop_rule)


def test_draft_by_text_feeds_only_the_last_word_again(shuffled):
    mini = load_checkpoint(embedded("mini"), dtype="float32", device="cpu")
    nano = load_checkpoint(shuffled, dtype="float32", device="cpu")
    target = make_target(mini, slots=1, context=768)
    draft = FeedCounter(make_target(nano, slots=1, context=768))
    target_text = faithful_text(mini.tokenizer, "mini")
    draft_text = faithful_text(nano.tokenizer, "nano")
    engine = make_engine(target, lambda setup: TextProposer(setup, draft, target=target_text, draft=draft_text), rows=1)
    (seq,) = run(engine, [target_text.encode([corpus()[0]])[0]], SamplingParams(), limit=64, ends=frozenset())
    assert draft.rounds > 15
    assert draft.tokens < len(seq.token_ids) + 3 * draft.rounds


class CacheChecker(TextProposer):
    """Checks the draft model's cache after each round."""

    num_accepted = 0  # sequences and rounds in which draft tokens were committed

    def commit(self, round):
        before = {seq.slot: self.model.cache.length(seq.slot) for seq in round.batch.seqs}
        passes = {draft_pass.seq.slot: draft_pass for draft_pass in self._passes}
        super().commit(round)
        for slot, draft_pass in passes.items():
            cached = self.model.cache.text[slot]
            stable_ids = self._retokenizers[slot].stable_ids
            assert cached == stable_ids[: len(cached)]
            assert len(cached) >= before[slot]
            self.num_accepted += len(cached) > draft_pass.start + len(draft_pass.feed)


def test_draft_by_text_caches_only_stable_tokens():
    proposers = []

    def make(setup):
        model = ToyTarget(vocab=setup.vocab + 3, slots=setup.slots, seed=97)
        draft = letters(setup.vocab, "bc", " c", "ccb")
        proposers.append(CacheChecker(setup, model, target=letters(setup.vocab), draft=draft))
        return proposers[-1]

    engine = make_engine(ToyTarget(spread=3.0), make, rows=3)
    prompts = [[random.Random(i).randrange(6) for _ in range(9)] for i in range(7)]
    run(engine, prompts, SamplingParams(temperature=0.7, seed=2), limit=60, ends=frozenset())
    assert proposers[0].num_accepted > 20


def test_draft_by_text_ends_at_the_context_of_the_draft_model(caplog):
    def make(setup):
        model = ToyTarget(vocab=setup.vocab, slots=setup.slots, seed=97, context=24)
        return TextProposer(setup, model, target=letters(setup.vocab), draft=letters(setup.vocab))

    target = ToyTarget(spread=3.0)
    (seq,) = run(make_engine(target, make), [[1, 2, 3]], GREEDY, limit=60, ends=frozenset())
    (plain,) = run(make_engine(target, PROPOSERS["none"]), [[1, 2, 3]], GREEDY, limit=60, ends=frozenset())
    assert seq.token_ids == plain.token_ids
    assert seq.num_draft_tokens > 0
    warning = "the draft model's context of 24 tokens is full; going on without it"
    assert [record.getMessage() for record in caplog.records] == [warning]


def random_pair(folder):
    """Save a target with byte tokens and a draft model with a new tokenizer, both with random weights."""
    target = tiny.save(folder / "target", tiny.make_config("LlamaConfig"))
    tokenizer = byte_level(600)
    draft = tiny.save(folder / "draft", tiny.make_config("LlamaConfig", vocab_size=len(tokenizer)), seed=1)
    tokenizer.save_pretrained(draft)
    return target, draft


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokenizers_with_few_common_tokens(temperature, tmp_path):
    target, draft = random_pair(tmp_path)
    params = SamplingParams(max_tokens=24, temperature=temperature, seed=3)
    prompts = ["def add(a, b):", "Naïve café", "12 + 30 = "]
    plain = LLM(target, proposer="none", verifier="walk", dtype="float32", device="cpu").generate(prompts, params)
    for name in ("draft", "draft-tokens", "draft-text", "cascade"):
        llm = LLM(
            target,
            proposer=f"{name}:{draft}",
            verifier="walk",
            k=4,
            dtype="float32",
            device="cpu",
            max_num_seqs=2,
            max_num_batched_tokens=5,
        )
        assert [c.token_ids for c in llm.generate(prompts, params)] == [c.token_ids for c in plain], name
        assert llm.stats.draft_tokens > 0, name


@pytest.mark.parametrize("name", ["draft-tokens", "cascade"])
def test_too_few_common_tokens_are_rejected(name, tmp_path):
    draft = tiny.save(tmp_path, tiny.make_config("LlamaConfig"))
    message = "has 2.1% of the target's 12288 tokens, too few to draft by tokens; use draft-text:"
    with pytest.raises(OutriderError, match=message):
        LLM(None, proposer=f"{name}:{draft}", device="cpu")


@pytest.mark.parametrize("name", ["draft", "draft-tokens", "draft-text"])
def test_missing_folder_is_rejected(name):
    with pytest.raises(OutriderError, match=f"{name} needs the folder of a draft model; write {name}:DIR"):
        LLM(None, proposer=name, device="cpu")
