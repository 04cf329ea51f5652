"""Draft models of another vocabulary: what their tokens spell, and what they guess by tokens and by text."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from outrider import LLM, SamplingParams
from outrider.core.types import Batch, Scores
from outrider.errors import OutriderError
from outrider.loader.checkpoint import load_checkpoint
from outrider.loader.embedded import embedded
from outrider.loader.make import make_target
from outrider.measure.prompts import read_prompts
from outrider.models.base import draft_by_scores
from outrider.propose.vocabulary.intersection import SharedVocabulary, VocabularyMap
from outrider.propose.vocabulary.retokenize import Retokenizer
from outrider.propose.vocabulary.text_draft import TextProposer
from outrider.propose.vocabulary.token_text import counterparts, token_text
from outrider.propose.vocabulary.wrapped_target import Wrapped
from outrider.testing import ToyTarget, check_cache
from outrider.testing.drive import make_row
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
    """A byte-level tokenizer trained on the embedded prompts."""
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
    """One that writes spaces as sentencepiece does, puts one in front, and falls back to bytes."""
    rare = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<unk>", "<s>", "</s>", *rare], show_progress=False, limit_alphabet=70
    )
    tokenizer.train_from_iterator([text.replace("\n", " ") for text in corpus()], trainer)
    made = json.loads(tokenizer.to_str())
    made["added_tokens"] = [token for token in made["added_tokens"] if not token["content"].startswith("<0x")]
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(made)), bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


MAKERS = {
    "byte level": lambda: byte_level(600),
    "sentencepiece": lambda: sentencepiece(700),
    "sentencepiece, a space at the beginning alone": lambda: sentencepiece(700, "first"),
    "bytes": lambda: tiny.tokenizer(260),
}


@pytest.fixture(scope="module")
def spellings():
    return {name: token_text(make(), name) for name, make in MAKERS.items()}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_pieces_add_up_to_the_text(name, text, spellings):
    found = spellings[name]
    for part in (text, " " + text, "  " + text, "\n" + text):
        assert found.spell(found.encode([part])[0]).decode() == part


def test_pieces_are_the_same_however_spaces_are_written(spellings):
    one, two = spellings["byte level"], spellings["sentencepiece"]
    shared = counterparts(one, two)
    pairs = {
        one.pieces[id]: two.pieces[other] for id, other in enumerate(shared) if id not in one.special and other >= 0
    }
    assert all(piece == other for piece, other in pairs.items())
    assert b" the" in pairs
    assert b"\n" in pairs
    assert sum(len(piece) > 2 for piece in pairs) > 50
    assert len({other for other in shared if other >= 0}) == sum(other >= 0 for other in shared)
    assert two.pieces[shared[one.pieces.index(b"a")]] == b"a"
    assert two.cut(["a b"])[0][-1] == shared[one.pieces.index(b" b")]


def test_special_tokens_meet_by_name_or_by_what_they_do():
    one, two = (token_text(byte_level(300, names), "x") for names in (("<s>", "<|end|>"), ("<s>", "</s>")))
    shared = counterparts(one, two)
    assert shared[one.roles["bos"]] == two.roles["bos"]
    assert shared[one.roles["eos"]] == two.roles["eos"]
    swapped = token_text(byte_level(300, ("<|end|>", "<|begin|>")), "x")
    shared = counterparts(one, swapped)
    assert swapped.special[shared[one.roles["eos"]]] == "<|end|>"
    assert shared[one.roles["bos"]] == -1  # the only one left for it is taken


def test_a_tokenizer_that_changes_the_text_is_refused():
    tokenizer = byte_level(300)
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    with pytest.raises(OutriderError, match=r"tokenizer of DIR does not give a text back.*use a draft of the target's"):
        token_text(tokenizer, "DIR")


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_a_reading_depends_on_the_text_alone(name, text, spellings):
    target, draft = spellings["byte level"], spellings[name]
    tokens = target.encode([text])[0]
    whole = Retokenizer(target, draft)
    whole.push(tokens)
    assert whole.whole
    assert draft.spell(whole.ids()).decode() == text
    for seed in range(5):
        chance, pieces, at = random.Random(seed), Retokenizer(target, draft), 0
        while at < len(tokens):
            before = list(pieces.settled)
            step = chance.randint(1, 4)
            pieces.push(tokens[at : at + step])
            at += step
            assert pieces.settled[: len(before)] == before
        assert pieces.count == len(tokens)
        assert pieces.ids() == whole.ids()
        assert pieces.settled == whole.settled


def test_a_reading_cuts_where_the_tokenizer_would():
    tokenizer = load_checkpoint(embedded("nano"), dtype="float32", device="cpu").tokenizer
    own = token_text(tokenizer, "nano")
    for text in corpus():
        ids = own.encode([text])[0]
        reading = Retokenizer(own, own)
        reading.push(ids)
        same = sum(a == b for a, b in zip(reading.ids(), ids, strict=False))
        assert same == len(ids) or len(max(text.split(), key=len)) > 40
        assert len(reading.tail) <= 50


def test_special_tokens_are_read_as_such_or_as_they_are_written(spellings):
    target = token_text(byte_level(300, ("<s>", "<|end|>", "<|user|>")), "x")
    draft = spellings["byte level"]
    reading = Retokenizer(target, replace(draft, begin=(draft.roles["bos"],)))
    user = next(id for id, content in target.special.items() if content == "<|user|>")
    reading.push([target.roles["bos"], user, *target.encode(["Hello"])[0], target.roles["eos"]])
    ids = reading.ids()
    assert ids[0] == draft.roles["bos"]
    assert ids[1] != draft.roles["bos"]
    assert ids[-1] == draft.roles["eos"]
    assert draft.spell(ids) == b"<|user|>Hello"


def test_a_text_that_ends_within_a_character_says_so(spellings):
    target, draft = spellings["bytes"], spellings["byte level"]
    reading = Retokenizer(target, draft)
    first, second = target.encode(["é"])[0]
    reading.push([first])
    assert not reading.whole
    reading.push([second])
    assert reading.whole
    assert draft.spell(reading.ids()).decode() == "é"


class Shared(Wrapped):
    """The logits of what both have alone: those of the others are no model's."""

    def score(self, batch, draft, first=-1):
        logits = self.inner.score(batch, draft, first).logits
        assert bool((logits[..., -1] < -1e8).all())
        return Scores(logits=logits[..., :-1])


def test_the_cache_keeps_its_law_where_tokens_are_missing():
    words = VocabularyMap([3, 1, 0, 5, 4, -1], [0, 0, 0, 0, 0, 2])
    check_cache(lambda: Shared(SharedVocabulary(ToyTarget(), words)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "verifier"),
    [("foreign model", rule) for rule in ("rejection", "block", "traversal")] + [("text draft", "block")],
)
def test_the_law_stays_the_targets(name, verifier):
    assert p_value(verifier, PROPOSERS[name]) > 1e-3


def test_growing_skips_what_the_target_lacks():
    draft = ToyTarget(vocab=8, seed=2, spread=3.0)
    model = SharedVocabulary(draft, VocabularyMap([7, 6, 5, -1], [0, 0, 0, 1]))
    met = 0
    for seed in range(20):
        chance = random.Random(seed)
        row = make_row([chance.randrange(4) for _ in range(4)], 0)
        model.cache.admit(0, row.token_ids)
        batch = Batch(seqs=(row,), start=(0,), feed=(tuple(row.token_ids),), draft_budget=(3,))
        grown = model.draft_greedy(batch, 4).tokens
        assert torch.equal(grown, draft_by_scores(model, batch, 4).tokens)
        assert int(grown.max()) < 3
        met += bool((draft.draft_greedy(model.read(batch), 8).tokens < 5).any())
    assert met > 0


def renamed(folder, keep=None):
    """The embedded draft with its ids shuffled, and with no tokens from id `keep` on."""
    checkpoint = load_checkpoint(embedded("nano"), dtype="float32", device="cpu")
    made = json.loads(checkpoint.tokenizer.backend_tokenizer.to_str())
    kept = list(range(keep or checkpoint.vocab))
    random.Random(1).shuffle(kept)
    new = {old: id for id, old in enumerate(kept)}
    rules = made["model"]
    rules["vocab"] = {token: new[id] for token, id in rules["vocab"].items() if id in new}
    rules["merges"] = [pair for pair in rules["merges"] if {*pair, "".join(pair)} <= rules["vocab"].keys()]
    for token in made["added_tokens"]:
        token["id"] = new[token["id"]]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(made)), bos_token="<|endoftext|>", eos_token="<|end|>"
    )
    weights = checkpoint.model.get_input_embeddings().weight[kept].clone()
    checkpoint.model.resize_token_embeddings(len(kept), mean_resizing=False)
    checkpoint.model.get_input_embeddings().weight.data.copy_(weights)
    tiny.transformers.utils.logging.disable_progress_bar()
    checkpoint.model.set_attn_implementation("eager")
    checkpoint.model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def shuffled(tmp_path_factory):
    return renamed(tmp_path_factory.mktemp("shuffled"))


@pytest.fixture(scope="module")
def smaller(tmp_path_factory):
    return renamed(tmp_path_factory.mktemp("smaller"), keep=6000)


def spoken(proposer, params=GREEDY, **settings):
    """What the embedded target says to the embedded prompts with a proposer, and the numbers."""
    llm = LLM(None, proposer=proposer, device="cpu", k=4, max_num_seqs=4, max_model_len=768, **settings)
    return [completion.token_ids for completion in llm.generate(corpus()[::3], params)], llm.stats


@pytest.mark.parametrize(("temperature", "verifier"), [(0.0, "walk"), (0.8, "block"), (0.8, "walk")])
def test_by_tokens_a_shuffled_draft_guesses_what_it_always_did(temperature, verifier, shuffled):
    params = replace(GREEDY, temperature=temperature, seed=4)
    texts, stats = spoken(f"draft:{embedded('nano')}", params, verifier=verifier)
    same, others = spoken(f"draft:{shuffled}", params, verifier=verifier)
    assert same == texts
    assert others.accepted == stats.accepted
    assert others.draft_tokens == stats.draft_tokens
    assert stats.tau > 1.5


def test_by_text_a_shuffled_draft_guesses_about_as_well(shuffled):
    texts, stats = spoken(f"draft:{embedded('nano')}")
    same, others = spoken(f"draft-text:{shuffled}")
    assert same == texts
    assert others.tau == pytest.approx(stats.tau, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", ["draft", "draft-tokens", "draft-text", "cascade"])
def test_a_draft_that_lacks_half_the_tokens(name, temperature, smaller, caplog):
    params = replace(GREEDY, temperature=temperature, seed=4)
    texts, _ = spoken("none", params, verifier="walk")
    same, stats = spoken(f"{name}:{smaller}", params, verifier="walk")
    assert same == texts
    assert stats.tau > 1.5
    told = "of the target's 12288 tokens it has 49%, and it guesses by text"
    assert [told in record.getMessage() for record in caplog.records] == [True] * (name == "draft")


class Fed(Wrapped):
    """Counts the rounds of a draft, and what it is fed in them."""

    rounds = tokens = 0

    def draft_greedy(self, batch, vocab, stop_rule=None):
        self.rounds += 1
        self.tokens += sum(map(len, batch.feed))
        return super().draft_greedy(batch, vocab, stop_rule)


def test_by_text_the_draft_reads_the_last_word_again_and_no_more(shuffled):
    big, small = (load_checkpoint(folder, dtype="float32", device="cpu") for folder in (embedded("mini"), shuffled))
    target, draft = make_target(big, slots=1, context=768), Fed(make_target(small, slots=1, context=768))
    ours, theirs = token_text(big.tokenizer, "mini"), token_text(small.tokenizer, "nano")
    engine = make_engine(target, lambda setup: TextProposer(setup, draft, target=ours, draft=theirs), rows=1)
    (row,) = run(engine, [ours.encode([corpus()[0]])[0]], SamplingParams(), limit=64, ends=frozenset())
    assert draft.rounds > 15
    assert draft.tokens < len(row.token_ids) + 3 * draft.rounds


class Checked(TextProposer):
    """Looks into the cache after each round."""

    seen = 0

    def commit(self, round):
        before = {row.slot: self.model.cache.length(row.slot) for row in round.batch.seqs}
        grown = {turn.row.slot: turn for turn in self._turns}
        super().commit(round)
        for slot, turn in grown.items():
            cached, settled = self.model.cache.text[slot], self._readings[slot].settled
            assert cached == settled[: len(cached)]
            assert len(cached) >= before[slot]
            self.seen += len(cached) > turn.start + len(turn.feed)


def test_by_text_what_is_cached_is_settled():
    found = []

    def make(setup):
        model = ToyTarget(vocab=setup.vocab + 3, slots=setup.slots, seed=97)
        draft = letters(setup.vocab, "bc", " c", "ccb")
        found.append(Checked(setup, model, target=letters(setup.vocab), draft=draft))
        return found[-1]

    engine = make_engine(ToyTarget(spread=3.0), make, rows=3)
    prompts = [[random.Random(i).randrange(6) for _ in range(9)] for i in range(7)]
    run(engine, prompts, SamplingParams(temperature=0.7, seed=2), limit=60, ends=frozenset())
    assert found[0].seen > 20


def test_by_text_a_short_context_is_where_it_stops(caplog):
    def make(setup):
        model = ToyTarget(vocab=setup.vocab, slots=setup.slots, seed=97, context=24)
        return TextProposer(setup, model, target=letters(setup.vocab), draft=letters(setup.vocab))

    target = ToyTarget(spread=3.0)
    (row,) = run(make_engine(target, make), [[1, 2, 3]], GREEDY, limit=60, ends=frozenset())
    (plain,) = run(make_engine(target, PROPOSERS["none"]), [[1, 2, 3]], GREEDY, limit=60, ends=frozenset())
    assert row.token_ids == plain.token_ids
    assert row.num_draft_tokens > 0
    told = "the draft model's context of 24 tokens is full; going on without it"
    assert [record.getMessage() for record in caplog.records] == [told]


def random_pair(folder):
    """A target of single bytes and a draft whose tokenizer was trained a moment ago, both with random weights."""
    target = tiny.save(folder / "target", tiny.make_config("LlamaConfig"))
    tokenizer = byte_level(600)
    draft = tiny.save(folder / "draft", tiny.make_config("LlamaConfig", vocab_size=len(tokenizer)), seed=1)
    tokenizer.save_pretrained(draft)
    return target, draft


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokenizers_that_have_little_in_common(temperature, tmp_path):
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
def test_too_few_tokens_in_common(name, tmp_path):
    draft = tiny.save(tmp_path, tiny.make_config("LlamaConfig"))
    message = "has 2.1% of the target's 12288 tokens, too few to guess by tokens; use draft-text:"
    with pytest.raises(OutriderError, match=message):
        LLM(None, proposer=f"{name}:{draft}", device="cpu")


@pytest.mark.parametrize("name", ["draft", "draft-tokens", "draft-text"])
def test_a_draft_needs_a_folder(name):
    with pytest.raises(OutriderError, match=f"{name} needs the folder of a small model; write {name}:DIR"):
        LLM(None, proposer=name, device="cpu")
