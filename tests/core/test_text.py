"""Text as it grows, with a byte-level tokenizer that splits characters over tokens."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from tokenizers import Tokenizer

import outrider
from outrider.core.text import TextStream

TOKENIZER = Tokenizer.from_file(str(Path(outrider.__file__).parent / "assets" / "mini" / "tokenizer.json"))
HARD = "héllo 世界 👩‍🚀! naïve – “quoted” \n\n\tтест ok"


def encode(text):
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def stream(*stop):
    return TextStream(lambda tokens: TOKENIZER.decode(list(tokens)), stop)


def push_all(text, tokens, **options):
    """The text after each token, up to a stop."""
    seen = []
    for token in tokens:
        stopped = text.add_token(token, **options)
        seen.append(text.text)
        if stopped:
            break
    return seen


def test_the_text_grows_by_whole_characters():
    text, tokens = stream(), encode(HARD)
    assert len(tokens) > len(HARD)  # characters are split
    seen = push_all(text, tokens)
    for before, after in pairwise(seen):
        assert after.startswith(before)
    assert not any("�" in each for each in seen)
    assert text.finish() == TOKENIZER.decode(tokens)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(some.text(alphabet=some.characters(exclude_categories=("Cs",)), max_size=20))
def test_any_text_comes_out_as_it_is_decoded(raw):
    text, tokens = stream(), encode(raw)
    seen = push_all(text, tokens)
    whole = text.finish()
    assert whole == TOKENIZER.decode(tokens)
    assert all(whole.startswith(each) for each in seen)


def test_half_a_character_is_held_back_until_the_end():
    text, tokens = stream(), encode("a世")
    push_all(text, tokens[:-1])
    assert text.text == "a"
    assert text.finish() == "a" + "�"


def test_finishing_twice_changes_nothing():
    text = stream()
    push_all(text, encode("a世")[:-1])
    assert text.finish() == text.finish()


@pytest.mark.parametrize("stop", ["lo wor", "hello", "d", "o", " world"])
def test_a_stop_string_ends_the_text_before_it(stop):
    text = stream(stop)
    push_all(text, encode("hello world and more"))
    assert text.stopped
    assert text.text == "hello world and more".split(stop)[0]
    assert text.finish() == text.text


def test_a_stop_string_across_three_tokens():
    tokens = [TOKENIZER.token_to_id(char) for char in "xENDy"]
    text = stream("END")
    assert [text.add_token(token) for token in tokens[:4]] == [False, False, False, True]
    assert text.text == "x"


def test_a_stop_string_of_split_characters():
    text = stream("世界")
    push_all(text, encode("a 世界 b"))
    assert text.text == "a "
    assert text.stopped


def test_the_earliest_of_several_stops_wins():
    text = stream("world", "lo w", "zzz")
    push_all(text, encode("hello world"))
    assert text.text == "hel"


def test_too_early_to_stop():
    tokens = [TOKENIZER.token_to_id(char) for char in "abcabc"]
    text = stream("bc")
    for token in tokens[:3]:
        assert not text.add_token(token, stoppable=False)
    assert not text.add_token(tokens[3])
    assert [text.add_token(token) for token in tokens[4:]] == [False, True]
    assert text.text == "abca"


def test_a_stop_string_that_came_too_early_stays():
    """However long the other stop strings are, which decides how far back the search goes."""
    tokens = [TOKENIZER.token_to_id(char) for char in "abc"]
    text = stream("b", "long enough")
    text.add_token(tokens[0], stoppable=False)
    text.add_token(tokens[1], stoppable=False)
    assert not text.add_token(tokens[2])
    assert text.text == "abc"


def test_a_stop_string_begun_too_early_may_be_completed():
    tokens = [TOKENIZER.token_to_id(char) for char in "abc"]
    text = stream("abc")
    assert [text.add_token(token, stoppable=i == 2) for i, token in enumerate(tokens)] == [False, False, True]
    assert text.text == ""


def test_what_is_safe_to_show():
    text = stream("END", "EXIT")
    shown = []
    for char in "xENxEXEND":
        text.add_token(TOKENIZER.token_to_id(char))
        shown.append(text.text[: text.safe_length()])
    assert shown == ["x", "x", "x", "xENx", "xENx", "xENx", "xENxEX", "xENxEX", "xENxEX"]
    assert text.stopped


@settings(deadline=None, derandomize=True, max_examples=60)
@given(some.text(alphabet="ab", max_size=12), some.lists(some.text(alphabet="ab", min_size=1, max_size=4), max_size=3))
def test_what_was_shown_is_never_taken_back(raw, stops):
    text, shown = stream(*stops), ""
    for char in raw:
        stopped = text.add_token(TOKENIZER.token_to_id(char))
        now = text.text[: text.safe_length()]
        assert now.startswith(shown)
        shown = now
        if stopped:
            break
    assert text.stopped == any(stop in raw for stop in stops)
    assert text.finish().startswith(shown)


def test_without_stops_everything_is_safe():
    text = stream()
    push_all(text, encode("hello"))
    assert text.safe_length() == len("hello")


def test_a_stop_string_in_what_was_held_back_is_found_at_the_end():
    """One token may hold the end of the stop string and half of the next character."""
    spelled = (b"a", b"END\xe4")
    text = TextStream(lambda tokens: b"".join(spelled[t] for t in tokens).decode(errors="replace"), ("END",))
    assert [text.add_token(token) for token in (0, 1)] == [False, False]
    assert text.finish() == "a"


SILENT = 256  # as special tokens are; the others are bytes
BYTES = some.one_of(
    some.sampled_from([0xFF, 0x80, 0xE4, 0xF0, 0x90, SILENT]).map(lambda byte: [byte]),
    some.sampled_from([*HARD, "�"]).map(lambda char: list(char.encode())),
    some.sampled_from([[0xFF] * 12, [SILENT] * 12, [0xF0] * 11, [0xE4, *[SILENT] * 12, 0xB8, 0x96], [0xF0, 0x90] * 6]),
)


def spelled(tokens):
    return bytes(token for token in tokens if token != SILENT).decode(errors="replace")


@settings(deadline=None, derandomize=True, max_examples=300)
@given(some.lists(BYTES, max_size=12), some.booleans(), some.integers(1, 30))
def test_broken_characters_come_out_as_they_are_decoded(parts, stops, step):
    text = TextStream(spelled, ("never",) if stops else ())
    tokens, seen = [token for part in parts for token in part], []
    for i, token in enumerate(tokens):
        text.add_token(token)
        if i % step == 0:
            seen.append(text.text)
    whole = text.finish()
    assert whole == spelled(tokens)
    assert all(whole.startswith(each) for each in seen)


@pytest.mark.parametrize("tokens", [[0xFF], [SILENT], [0xF0, 0x90], [0xE4, SILENT, SILENT]])
@pytest.mark.parametrize(("stop", "asked"), [((), 1), (("never",), 1), ((), 250)])
def test_what_never_becomes_a_character_is_not_decoded_again_and_again(tokens, stop, asked):
    sizes = []  # tokens that are decoded at a time

    def decode(given_tokens):
        sizes.append(len(given_tokens))
        return spelled(given_tokens)

    text, tokens = TextStream(decode, stop), (tokens * 500)[:500]
    for i, token in enumerate(tokens, 1):
        text.add_token(token)
        if i % asked == 0:
            assert len(text.text) >= len(spelled(tokens[:i])) - 9
    assert len(sizes) < 30 * len(tokens)
    assert sum(sizes) < 300 * len(tokens)
    assert text.finish() == spelled(tokens)
