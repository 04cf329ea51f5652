"""Tests that a text is judged by the tokenization that fits best, of all that spell it."""

import pytest
import torch

from outrider.lab.audit.server.tokenizations import Tolerance, follow

PIECES = (b"a", b"b", b"ab", b"c", "é".encode()[:1], "é".encode()[1:], b"")
A, B, AB, C, E_FIRST, E_LAST, END = range(len(PIECES))
TOLERANCE = Tolerance(relative=0.0, least=0.5)


class Spelling:
    """A tokenizer that prefers long tokens."""

    def encode(self, text):
        tokens = []
        while text:
            token = next(self.beginnings(text.encode()), None)
            if token is None or not PIECES[token].isascii():
                break
            tokens.append(token)
            text = text[len(PIECES[token]) :]
        return tuple(tokens)

    def beginnings(self, text):
        fitting = [token for token, piece in enumerate(PIECES) if piece and text.startswith(piece)]
        return iter(sorted(fitting, key=lambda token: -len(PIECES[token])))

    def size(self, token):
        return len(PIECES[token])


class Model:
    """A model whose logits after an output are given; tokens that are not given have -10."""

    end_ids = frozenset({END})

    def __init__(self, logits):
        self.logits = logits
        self.passes = 0

    def logits_along(self, text, tokens):
        self.passes += 1
        rows = [self.logits.get((*text, *tokens[:length]), {}) for length in range(len(tokens) + 1)]
        return torch.tensor([[row.get(token, -10.0) for token in range(len(PIECES))] for row in rows])


def judge(logits, text, *, ended=False):
    """Return the tokens, and the margin of each choice that is not the likeliest token."""
    path = follow(Model(logits), Spelling(), (), text, TOLERANCE, ended=ended)
    return path.tokens, {choice.position: (choice.token, pytest.approx(choice.margin)) for choice in path.choices}


# "ab" and "a" are nearly tied. After "ab" the model expects the end, and after "a", "b" it expects "c".
TIED = {(): {AB: 3.0, A: 2.9}, (AB,): {END: 5.0, C: -9.0}, (A,): {B: 4.0}, (A, B): {C: 4.0}, (A, B, C): {END: 3.0}}


def test_the_servers_own_path_is_found_beside_the_models():
    assert judge(TIED, "abc") == ((A, B, C), {0: (A, 0.1)})
    assert judge(TIED, "abc", ended=True) == ((A, B, C), {0: (A, 0.1)})


def test_the_models_own_path_has_no_choice():
    assert judge(TIED, "ab") == ((AB,), {})


def test_a_real_difference_is_that_of_the_path_that_comes_furthest():
    wrong = {**TIED, (A, B): {END: 4.0, C: -2.0}}
    tokens, choices = judge(wrong, "abc")
    assert tokens == (A, B, C)
    assert choices == {0: (A, 0.1), 2: (C, 6.0)}


def test_the_search_goes_on_after_a_difference():
    wrong = {(): {END: 8.0, C: 0.0}, (C,): {A: 1.0}, (C, A): {B: 3.0}}
    assert judge(wrong, "cab") == ((C, A, B), {0: (C, 8.0)})


def test_an_end_that_the_model_does_not_choose_is_a_difference():
    unended = {**TIED, (A, B, C): {A: 3.0, END: 1.0}}
    assert judge(unended, "abc") == ((A, B, C), {0: (A, 0.1)})
    tokens, choices = judge(unended, "abc", ended=True)
    assert tokens == (A, B, C)
    assert choices[3] == (END, 2.0)


def test_characters_of_several_tokens():
    logits = {(): {E_FIRST: 1.0}, (E_FIRST,): {E_LAST: 1.0}}
    assert judge(logits, "é") == ((E_FIRST, E_LAST), {})


@pytest.mark.parametrize("text", ["c\ufffdab", "c漢ab"])
def test_what_no_token_spells_ends_the_comparison(text):
    assert judge({(): {C: 1.0}}, text)[0] == (C,)


def test_ties_everywhere_do_not_make_the_search_endless():
    class Flat(Model):
        def logits_along(self, text, tokens):
            self.passes += 1
            return torch.zeros(len(tokens) + 1, len(PIECES))

    model = Flat({})
    path = follow(model, Spelling(), (), "ab" * 40, TOLERANCE, ended=False)
    assert path.done == 80
    assert model.passes < 100
