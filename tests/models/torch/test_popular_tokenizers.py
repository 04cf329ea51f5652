"""Small models with the tokenizer settings of popular checkpoints: prompts, ends of text, streams and speculation."""

import re

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from outrider import LLM, Constraint, OutriderError, SamplingParams
from outrider.cli.app import app
from tests.helpers.popular import CHECKPOINTS, small_config
from tests.helpers.published_tokenizers import PUBLISHED, QUESTION, save_tokenizer, small_tokenizer

CHAT = [{"role": "user", "content": QUESTION}]
PADDED = [name for name, published in PUBLISHED.items() if published.padding > 0]
_CHARACTERS = "(世|界|é|👩){8}"
SURELY = 100  # a bias of a logit that makes its token certain


def save_model(folder, name):
    """Write a small random model with the tokenizer of a checkpoint."""
    torch.manual_seed(1)
    config = small_config(name, vocab=small_tokenizer(name).model_vocab)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        model.get_output_embeddings().weight *= 4  # so that a draft token is rejected now and then
    model.save_pretrained(folder)
    save_tokenizer(name, folder)
    return folder


def load(folder, proposer="ngram"):
    return LLM(folder, proposer=proposer, dtype="float32", max_num_seqs=2, max_model_len=256, threads=1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Returns the folder of a checkpoint, which is written once."""
    written = {}

    def folder(name):
        if name not in written:
            written[name] = save_model(tmp_path_factory.mktemp("model"), name)
        return written[name]

    return folder


@pytest.fixture(scope="module")
def llms(folders):
    """Returns an engine for a checkpoint, which is loaded once."""
    loaded = {}

    def llm(name):
        if name not in loaded:
            loaded[name] = load(folders(name))
        return loaded[name]

    return llm


def test_each_popular_checkpoint_has_a_tokenizer():
    assert PUBLISHED.keys() == CHECKPOINTS.keys()


@pytest.mark.parametrize("name", PUBLISHED)
class TestPrompts:
    def test_text_begins_with_the_begin_of_text_token_if_the_tokenizer_adds_one(self, name, llms):
        small = small_tokenizer(name)
        tokens = llms(name).encode(QUESTION)
        assert list(tokens) == small.reference.encode(QUESTION).ids
        begins = small.published.adds_bos
        assert (tokens[0] == small.id(small.published.bos)) if begins else (tokens[0] not in small.end_ids)
        assert llms(name).decode(tokens) == QUESTION

    def test_chat_prompt_is_that_of_the_template(self, name, llms):
        small = small_tokenizer(name)
        expected = small.reference.encode(small.published.prompt, add_special_tokens=False).ids
        tokens = llms(name).encode_chat(CHAT)
        assert list(tokens) == expected
        markers = [token for token in small.published.special if token in small.published.prompt]
        for marker in markers:  # each is one token
            assert tokens.count(small.id(marker)) == small.published.prompt.count(marker)
        if small.published.adds_bos:
            assert tokens.count(small.id(small.published.bos)) == 1

    def test_text_of_the_template_gets_no_second_begin_of_text_token(self, name, llms):
        assert llms(name).encode(small_tokenizer(name).published.prompt) == llms(name).encode_chat(CHAT)

    def test_digits_are_split_by_the_rule_of_the_checkpoint(self, name, llms):
        """The merges were learned within pieces of one or three digits, so no token crosses them."""
        llm = llms(name)
        pieces = [llm.decode([token]) for token in llm.encode("12345")]
        numbers = [piece for piece in pieces if piece.strip()]
        longest = 3 if PUBLISHED[name].digits == "3" else 5 if PUBLISHED[name].sentencepiece else 1
        assert "".join(pieces).strip() == "12345"
        assert max(map(len, numbers)) <= longest

    def test_command_line_gives_the_text_of_the_library(self, name, folders, llms):
        options = "--proposer ngram --max-tokens 8 --dtype float32 --threads 1 --temperature 0 --max-model-len 256"
        words = ["run", "--target", str(folders(name)), "--chat", QUESTION, *options.split()]
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
        llm = llms(name)
        (expected,) = llm.generate([llm.encode_chat(CHAT)], SamplingParams(max_tokens=8))
        assert expected.text.strip() in result.stdout


@pytest.mark.parametrize("name", PUBLISHED)
class TestEnds:
    def test_end_tokens_are_those_of_the_generation_config(self, name, llms):
        assert llms(name).parts.end_ids == frozenset(small_tokenizer(name).end_ids)

    def test_each_end_token_ends_the_text(self, name, llms):
        llm, prompt = llms(name), llms(name).encode_chat(CHAT)
        for end in small_tokenizer(name).end_ids:
            (stopped,) = llm.generate([prompt], SamplingParams(k=4, max_tokens=6, logit_bias={end: SURELY}))
            assert stopped.finish_reason == "stop"
            assert stopped.token_ids == (end,)
            assert stopped.text == ""

    def test_other_special_tokens_do_not_end_the_text_and_have_no_text(self, name, llms):
        small = small_tokenizer(name)
        others = [small.id(token) for token in small.published.special if small.id(token) not in small.end_ids]
        for other in others:
            (kept,) = llms(name).generate([QUESTION], SamplingParams(k=4, max_tokens=6, logit_bias={other: SURELY}))
            assert kept.finish_reason == "length"
            assert kept.token_ids == (other,) * 6
            assert kept.text == ""


@pytest.mark.parametrize("name", PUBLISHED)
class TestText:
    def test_stream_emits_whole_characters_only(self, name, llms):
        pytest.importorskip("llguidance")
        params = SamplingParams(k=4, temperature=1.0, seed=2, max_tokens=64, constraint=Constraint.regex(_CHARACTERS))
        chunks = list(llms(name).stream(QUESTION, params))
        completion = chunks[-1].completion
        assert completion.finish_reason == "stop"
        assert re.fullmatch(_CHARACTERS, completion.text)
        assert len(completion.token_ids) > len(completion.text)  # characters of several tokens
        assert "".join(chunk.text for chunk in chunks) == completion.text

    def test_completion_continues_the_prompt(self, name, llms):
        """The space before its first word is a part of it, in all ways to read it."""
        llm = llms(name)
        prompt = llm.encode(QUESTION)
        word = small_tokenizer(name).reference.encode("is is", add_special_tokens=False).ids[-1]
        params = SamplingParams(k=4, max_tokens=3, logit_bias={word: SURELY})
        chunks = list(llm.stream(prompt, params))
        completion = chunks[-1].completion
        assert completion.text == " is is is"
        assert llm.decode((*prompt, *completion.token_ids)) == QUESTION + completion.text
        assert "".join(chunk.text for chunk in chunks) == completion.text

    def test_speculation_does_not_change_the_text(self, name, llms):
        llm = llms(name)
        prompts = [llm.encode_chat(CHAT), llm.encode(QUESTION * 3)]
        for temperature in (0.0, 1.0):
            params = {"temperature": temperature, "seed": 3, "max_tokens": 24, "ignore_eos": True}
            plain, fast = (llm.generate(prompts, SamplingParams(k=k, **params)) for k in (0, 4))
            assert [each.token_ids for each in plain] == [each.token_ids for each in fast]
            assert [each.text for each in plain] == [each.text for each in fast]


@pytest.mark.parametrize("name", PADDED)
class TestPaddedVocabulary:
    """Ids of the model that its tokenizer does not know. They belong to the target's distribution."""

    def test_real_difference_is_kept(self, name):
        small = small_tokenizer(name)
        assert len(small.undecodable) == small.published.padding

    def test_such_an_id_has_no_text_and_does_not_disturb_the_stream(self, name, llms):
        small = small_tokenizer(name)
        word = small.reference.encode(" is", add_special_tokens=False).ids[0]
        padded = small.undecodable[-1]
        bias = {padded: SURELY, word: SURELY}
        params = SamplingParams(k=4, temperature=100.0, top_k=2, seed=1, max_tokens=24, logit_bias=bias)
        chunks = list(llms(name).stream(QUESTION, params))
        completion = chunks[-1].completion
        assert set(completion.token_ids) == {padded, word}
        words = [token for token in completion.token_ids if token == word]
        assert completion.text == small.reference.decode(words)
        assert "".join(chunk.text for chunk in chunks) == completion.text

    def test_constraint_never_allows_such_an_id(self, name, llms):
        pytest.importorskip("llguidance")
        bias = dict.fromkeys(small_tokenizer(name).undecodable, SURELY)
        params = SamplingParams(k=4, max_tokens=24, constraint=Constraint.regex("[a-z ]{8}"), logit_bias=bias)
        (completion,) = llms(name).generate([QUESTION], params)
        assert re.fullmatch("[a-z ]{8}", completion.text)


def test_id_of_the_tokenizer_beyond_the_model_is_an_error(llms):
    """Gemma 3's image token is in the tokenizer of its text models, and not in their embedding."""
    small = small_tokenizer("Gemma-3-270m")
    with pytest.raises(OutriderError, match=rf"token id {small.model_vocab} is not in the vocabulary of"):
        llms("Gemma-3-270m").generate([QUESTION + " <extra_0>"])


@pytest.mark.parametrize(("target", "draft"), [("Gemma-3-270m", "Qwen2.5-0.5B"), ("Phi-4-mini", "Mistral-7B")])
def test_draft_with_the_tokenizer_of_another_checkpoint_is_exact(target, draft, folders, llms):
    llm = load(folders(target), f"draft:{folders(draft)}")
    prompt = llm.encode_chat(CHAT)
    params = SamplingParams(k=4, max_tokens=24, ignore_eos=True)
    (fast,) = llm.generate([prompt], params)
    (plain,) = llms(target).generate([prompt], SamplingParams(k=0, max_tokens=24, ignore_eos=True))
    assert fast.token_ids == plain.token_ids
    assert fast.stats.draft_tokens > 0
