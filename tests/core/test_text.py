"""Tests of incremental detokenization, with a byte-level tokenizer that splits characters into several tokens."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

import outrider
from outrider.core.text import TextStream

TOKENIZER = Tokenizer.from_file(str(Path(outrider.__file__).parent / "assets" / "mini" / "tokenizer.json"))
HARD = "héllo 世界 👩‍🚀! naïve – “quoted” \n\n\tтест ok"


def encode(text):
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def stream(*stop):
    return TextStream(lambda tokens: TOKENIZER.decode(list(tokens)), stop)


def push_all(text, tokens, **options):
    """Add tokens until a stop string. Return the text after each token."""
    texts = []
    for token in tokens:
        stopped = text.add_token(token, **options)
        texts.append(text.text)
        if stopped:
            break
    return texts


def test_text_grows_by_complete_characters():
    text = stream()
    tokens = encode(HARD)
    assert len(tokens) > len(HARD)  # some characters have several tokens
    texts = push_all(text, tokens)
    for before, after in pairwise(texts):
        assert after.startswith(before)
    assert not any("�" in partial for partial in texts)
    assert text.finish() == TOKENIZER.decode(tokens)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.text(alphabet=st.characters(exclude_categories=("Cs",)), max_size=20))
def test_incremental_text_equals_decoded_tokens(raw):
    text = stream()
    tokens = encode(raw)
    texts = push_all(text, tokens)
    whole = text.finish()
    assert whole == TOKENIZER.decode(tokens)
    assert all(whole.startswith(partial) for partial in texts)


def test_incomplete_character_is_held_back_until_the_end():
    text, tokens = stream(), encode("a世")
    push_all(text, tokens[:-1])
    assert text.text == "a"
    assert text.finish() == "a" + "�"


def test_finish_is_idempotent():
    text = stream()
    push_all(text, encode("a世")[:-1])
    assert text.finish() == text.finish()


@pytest.mark.parametrize("stop", ["lo wor", "hello", "d", "o", " world"])
def test_text_ends_before_the_stop_string(stop):
    text = stream(stop)
    push_all(text, encode("hello world and more"))
    assert text.stopped
    assert text.text == "hello world and more".split(stop)[0]
    assert text.finish() == text.text


def test_stop_string_across_three_tokens():
    tokens = [TOKENIZER.token_to_id(char) for char in "xENDy"]
    text = stream("END")
    assert [text.add_token(token) for token in tokens[:4]] == [False, False, False, True]
    assert text.text == "x"


def test_stop_string_of_split_characters():
    text = stream("世界")
    push_all(text, encode("a 世界 b"))
    assert text.text == "a "
    assert text.stopped


def test_text_ends_at_the_earliest_of_several_stop_strings():
    text = stream("world", "lo w", "zzz")
    push_all(text, encode("hello world"))
    assert text.text == "hel"


def test_stop_string_before_min_tokens_does_not_stop():
    tokens = [TOKENIZER.token_to_id(char) for char in "abcabc"]
    text = stream("bc")
    for token in tokens[:3]:
        assert not text.add_token(token, stoppable=False)
    assert not text.add_token(tokens[3])
    assert [text.add_token(token) for token in tokens[4:]] == [False, True]
    assert text.text == "abca"


def test_stop_string_before_min_tokens_is_not_found_later():
    """A long stop string makes the search go further back, which must not find the early one."""
    tokens = [TOKENIZER.token_to_id(char) for char in "abc"]
    text = stream("b", "long enough")
    text.add_token(tokens[0], stoppable=False)
    text.add_token(tokens[1], stoppable=False)
    assert not text.add_token(tokens[2])
    assert text.text == "abc"


def test_stop_string_that_begins_before_min_tokens_and_ends_after():
    tokens = [TOKENIZER.token_to_id(char) for char in "abc"]
    text = stream("abc")
    assert [text.add_token(token, stoppable=i == 2) for i, token in enumerate(tokens)] == [False, False, True]
    assert text.text == ""


def test_safe_length_excludes_beginnings_of_stop_strings():
    text = stream("END", "EXIT")
    shown = []
    for char in "xENxEXEND":
        text.add_token(TOKENIZER.token_to_id(char))
        shown.append(text.text[: text.safe_length()])
    assert shown == ["x", "x", "x", "xENx", "xENx", "xENx", "xENxEX", "xENxEX", "xENxEX"]
    assert text.stopped


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.text(alphabet="ab", max_size=12), st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3))
def test_safe_text_is_never_removed(raw, stops):
    text = stream(*stops)
    shown = ""
    for char in raw:
        stopped = text.add_token(TOKENIZER.token_to_id(char))
        safe = text.text[: text.safe_length()]
        assert safe.startswith(shown)
        shown = safe
        if stopped:
            break
    assert text.stopped == any(stop in raw for stop in stops)
    assert text.finish().startswith(shown)


def test_all_text_is_safe_without_stop_strings():
    text = stream()
    push_all(text, encode("hello"))
    assert text.safe_length() == len("hello")


def test_finish_finds_a_stop_string_in_pending_text():
    """One token may have the end of the stop string and half of the next character."""
    pieces = (b"a", b"END\xe4")
    text = TextStream(lambda tokens: b"".join(pieces[t] for t in tokens).decode(errors="replace"), ("END",))
    assert [text.add_token(token) for token in (0, 1)] == [False, False]
    assert text.finish() == "a"


SPECIAL = 256  # a token without text, as special tokens are; all other tokens are bytes
BYTES = st.one_of(
    st.sampled_from([0xFF, 0x80, 0xE4, 0xF0, 0x90, SPECIAL]).map(lambda byte: [byte]),
    st.sampled_from([*HARD, "�"]).map(lambda char: list(char.encode())),
    st.sampled_from([[0xFF] * 12, [SPECIAL] * 12, [0xF0] * 11, [0xE4, *[SPECIAL] * 12, 0xB8, 0x96], [0xF0, 0x90] * 6]),
)


def decode_bytes(tokens):
    return bytes(token for token in tokens if token != SPECIAL).decode(errors="replace")


@settings(deadline=None, derandomize=True, max_examples=300)
@given(st.lists(BYTES, max_size=12), st.booleans(), st.integers(1, 30))
def test_invalid_bytes_equal_decoded_tokens(parts, stops, step):
    text = TextStream(decode_bytes, ("never",) if stops else ())
    tokens = [token for part in parts for token in part]
    texts = []
    for i, token in enumerate(tokens):
        text.add_token(token)
        if i % step == 0:
            texts.append(text.text)
    whole = text.finish()
    assert whole == decode_bytes(tokens)
    assert all(whole.startswith(partial) for partial in texts)


@pytest.mark.parametrize("tokens", [[0xFF], [SPECIAL], [0xF0, 0x90], [0xE4, SPECIAL, SPECIAL]])
@pytest.mark.parametrize(("stop", "period"), [((), 1), (("never",), 1), ((), 250)])
def test_decoding_of_invalid_bytes_takes_linear_time(tokens, stop, period):
    sizes = []  # number of tokens of each call of the tokenizer

    def decode(given_tokens):
        sizes.append(len(given_tokens))
        return decode_bytes(given_tokens)

    text = TextStream(decode, stop)
    tokens = (tokens * 500)[:500]
    for i, token in enumerate(tokens, 1):
        text.add_token(token)
        if i % period == 0:
            assert len(text.text) >= len(decode_bytes(tokens[:i])) - 9
    assert len(sizes) < 30 * len(tokens)
    assert sum(sizes) < 300 * len(tokens)
    assert text.finish() == decode_bytes(tokens)


FALLBACK = Tokenizer(
    models.BPE(vocab={f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁a": 256, "b": 257}, merges=[])
)
FALLBACK.decoder = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)
FALLBACK_IDS = {"a": [256], "b": [257]}
SPECIAL_FALLBACK = 258  # a token without text
FALLBACK_PARTS = st.one_of(
    st.sampled_from([*HARD]).map(lambda char: list(char.encode())),
    st.sampled_from([[256], [257], [0xFF], [0xE4, 0xB8], [0xF0, 0x9F]]),
)


def decode_fallback(tokens):
    return FALLBACK.decode(list(tokens))


def decode_with_special(tokens):
    return decode_fallback([token for token in tokens if token != SPECIAL_FALLBACK])


@settings(deadline=None, derandomize=True, max_examples=300)
@given(st.lists(FALLBACK_PARTS, max_size=12), st.booleans(), st.integers(1, 30))
def test_text_with_byte_fallback_does_not_depend_on_when_it_is_read(parts, stops, step):
    tokens = [token for part in parts for token in part]
    text = TextStream(decode_fallback, ("never",) if stops else ())
    each = TextStream(decode_fallback)
    texts = []
    for i, token in enumerate(tokens):
        text.add_token(token)
        each.add_token(token)
        texts.append(each.text)
        if i % step == 0:
            assert text.text == each.text
    whole = text.finish()
    assert whole == each.finish()
    assert all(whole.startswith(partial) for partial in texts)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(st.text(alphabet="世界éab 👩", max_size=20))
def test_characters_of_byte_fallback_are_complete(raw):
    """Also where many of them follow one another: the decoder sees them as one run of bytes."""
    tokens = [token for char in raw for token in ([257] if char == "b" else char.encode())]
    text = TextStream(decode_fallback)
    texts = push_all(text, tokens)
    assert not any("�" in partial for partial in texts)
    assert text.finish() == decode_fallback(tokens)


def test_incomplete_bytes_at_the_end_leave_the_characters_before_them():
    """The decoder of tokenizers makes the whole run invalid."""
    tokens = [*"世".encode(), *"界".encode()[:2]]
    assert decode_fallback(tokens) == "�" * 5
    text = TextStream(decode_fallback)
    for token in tokens:
        text.add_token(token)
    assert text.finish() == "世��"


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ([257], " ab"),
        ([256], " ab"),
        ([0xB8, 0x96, 256], " ab"),  # behind a part of a character
        ([0xE4, 0xB8], "ab"),  # a part of a character, which has no text
        ([257, SPECIAL_FALLBACK], "ab"),  # a new text begins, as behind the template of a chat
        ([], "ab"),
    ],
)
def test_space_before_the_first_word_stays_as_far_as_it_follows_text(prompt, text):
    """The decoder removes a space from the front."""
    assert decode_fallback([256, 257]) == "ab"
    for stop in ((), ("never",)):
        stream = TextStream(decode_with_special, stop, prompt=prompt)
        stream.add_token(256)
        assert stream.text == text[:-1]
        stream.add_token(257)
        assert stream.finish() == text


@settings(deadline=None, derandomize=True, max_examples=100)
@given(st.text(alphabet="世éab", max_size=20), st.text(alphabet="世éab", max_size=12))
def test_prompt_and_completion_are_the_text_of_all_tokens(before, after):
    prompt, tokens = (
        [each for char in raw for each in FALLBACK_IDS.get(char, char.encode())] for raw in (before, after)
    )
    stream = TextStream(decode_fallback, prompt=prompt)
    push_all(stream, tokens)
    assert decode_fallback(prompt) + stream.finish() == decode_fallback([*prompt, *tokens])
