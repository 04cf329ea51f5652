"""The suffix proposer against brute force: the automaton, the history, the tree of guesses, scopes and memory."""

from __future__ import annotations

import random
import tracemalloc
from array import array
from collections import Counter
from dataclasses import replace

import pytest
import torch

from outrider.core.params import SamplingParams
from outrider.core.types import Batch, Scores
from outrider.errors import OutriderError, UnsupportedModel
from outrider.native.library import load_library
from outrider.propose.lookup.suffix import SuffixProposer
from outrider.propose.lookup.suffix_automaton import Automaton
from outrider.propose.lookup.suffix_history import DEEP, History
from outrider.propose.lookup.suffix_text import NativeText, PlainText, text_maker
from outrider.propose.lookup.suffix_tree import Worth
from outrider.propose.registry import find_proposer
from outrider.testing import ToyTarget, toy_setup
from outrider.testing.drive import append, make_round, make_row


def compiles() -> bool:
    try:
        return bool(load_library())
    except UnsupportedModel:
        return False


native = pytest.mark.skipif(not compiles(), reason="no C++ compiler here")
MAKERS = [
    pytest.param(PlainText, id="plain"),
    pytest.param(lambda: NativeText(load_library()), id="native", marks=native),
]


def written(chance: random.Random, length: int) -> list[int]:
    """A text of few phrases, as texts repeat themselves."""
    vocab = chance.choice([2, 3, 6, 50])
    phrases = [[chance.randrange(vocab) for _ in range(chance.randint(1, 9))] for _ in range(6)]
    text: list[int] = []
    while len(text) < length:
        text += chance.choice(phrases)
    return text[:length]


def occurrences(text: list[int], part: list[int]) -> list[int]:
    """Where a part of a text ends."""
    return [end for end in range(len(part), len(text) + 1) if text[end - len(part) : end] == part]


def longest_ending(text: list[int]) -> int:
    """How long the longest ending is that the text had before."""
    return max(size for size in range(len(text)) if not size or len(occurrences(text, text[-size:])) > 1)


@pytest.mark.parametrize("seed", range(20))
def test_longest_ending(seed):
    text = written(random.Random(seed), 60)
    automaton = Automaton()
    for end, token in enumerate(text, 1):
        automaton.extend([token])
        assert len(automaton) == end
        assert automaton.longest()[1] == longest_ending(text[:end])


@pytest.mark.parametrize("seed", range(20))
def test_counts_and_what_followed(seed):
    chance = random.Random(seed)
    text = [chance.randrange(3) for _ in range(60)]
    automaton = Automaton(text)
    for begin in range(len(text)):
        for end in range(begin + 1, min(begin + 9, len(text)) + 1):
            part, state = text[begin:end], 0
            for token in part:
                state = automaton.follow(state, token)
            ends = occurrences(text, part)
            assert automaton.count[state] == len(ends)
            after = [text[at] for at in ends if at < len(text)]
            following = automaton.following(state, 99)
            assert [token for token, _ in following] == list(dict.fromkeys(after))
            assert {token: automaton.count[to] for token, to in following} == Counter(after)
    assert automaton.follow(0, 7) == -1


def test_an_automaton_has_no_more_than_two_states_a_token():
    for text in ([1] * 5000, [1, 2, 3] * 1500, [random.Random(1).randrange(2) for _ in range(5000)]):
        automaton = Automaton(text)
        assert len(automaton.length) <= 2 * len(text)
        assert automaton.bytes() < 600 * len(text)


@native
@pytest.mark.parametrize("seed", range(60))
def test_native_text_grows_the_same_guesses(seed):
    chance = random.Random(seed)
    history, worth = History(300), Worth()
    source = written(chance, 400)
    for begin in range(0, 250, 50):
        history.learn("", source[begin : begin + 10], source[begin + 10 : begin + 50])
    worth.of = array("d", [chance.random() for _ in worth.of])
    plain, fast = PlainText(), NativeText(load_library())
    at = 250
    while at < 330:
        piece = source[at : at + chance.randint(1, 20)]
        at += len(piece)
        plain.extend(piece)
        fast.extend(piece)
        assert len(plain) == len(fast)
        for budget in (1, 5, 40, 3):
            said = history.ways("", source[250:at], budget) if chance.random() < 0.7 else ([], 0)
            assert fast.grow(*said, worth.of, budget) == plain.grow(*said, worth.of, budget)


@native
def test_native_text_counts_its_memory():
    text = NativeText(load_library())
    before = text.bytes()
    text.extend([random.Random(2).randrange(50) for _ in range(10_000)])
    assert 10_000 * 28 < text.bytes() - before < 10_000 * 300


def test_kernels_of_torch_mean_no_native_text():
    assert text_maker("torch") is PlainText


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("period", [[7], [1, 2, 3], [1, 2, 1, 3, 4]])
def test_periodic_text_goes_on(make, period):
    text = make()
    text.extend(period * (3000 // len(period)))
    grown = text.grow((), 0, Worth().of, 20)
    assert grown.sketch.tokens == (period * 20)[:20]
    assert grown.sketch.parent == list(range(-1, 19))


@pytest.mark.parametrize("make", MAKERS)
def test_score_is_the_share_in_what_followed(make):
    text = make()
    text.extend([8, 1, 9, 1, 8, 2, 9, 1, 6, 1])  # what followed 1: 9, then 8, then 6
    grown = text.grow((), 0, Worth().of, 3)
    first = dict(zip(grown.sketch.tokens, grown.sketch.accept_prob, strict=True))
    assert grown.sketch.parent == [-1, -1, -1]
    assert set(first) == {6, 8, 9}
    assert len(set(first.values())) == 1
    text.extend([8, 5, 1])  # twice 8 of four
    grown = text.grow((), 0, Worth().of, 2)
    assert grown.sketch.tokens[0] == 8
    assert grown.sketch.accept_prob[0] == pytest.approx(Worth().of[grown.kinds[0]] / 2)


def test_worth_is_learned():
    text, worth = PlainText([1, 2, 3, 4, 1, 2, 3]), Worth()
    before = text.grow((), 0, worth.of, 1).sketch.accept_prob[0]
    for _ in range(20):
        worth.learn(text.grow((), 0, worth.of, 1), [5])
    after = text.grow((), 0, worth.of, 1).sketch.accept_prob[0]
    assert after < before / 4
    for _ in range(60):
        worth.learn(text.grow((), 0, worth.of, 1), [4, 5])
    assert text.grow((), 0, worth.of, 1).sketch.accept_prob[0] > before


def shared(one: list[int], two: list[int]) -> int:
    """Last tokens that agree, as far as the history tells."""
    size = 0
    while size < min(len(one), len(two), DEEP) and one[-size - 1] == two[-size - 1]:
        size += 1
    return size


def expect_ways(history: History, texts: dict[int, tuple[list[int], list[int]]], ending: list[int]) -> None:
    """What the history says is what these outputs, each with what stood before it, have."""
    places = {}
    for name, (before, output) in texts.items():
        whole = [*before[-DEEP:], *output]
        for at in range(len(whole) - len(output), len(whole)):
            places[name, at] = shared(whole[:at], ending), whole[at : at + 5]
    longest = max((size for size, _ in places.values()), default=0)
    ways, matched = history.ways("", ending, 5)
    assert matched == longest
    wanted = Counter(
        (name, tuple(tokens)) for (name, _), (size, tokens) in places.items() if size == longest and longest
    )
    got = Counter((name, tuple(way.tokens)) for way in ways for name in way.outputs)
    assert len({tuple(way.tokens) for way in ways}) == len(ways)
    assert got <= wanted
    assert got.total() == min(wanted.total(), 8)


@pytest.mark.parametrize("seed", range(20))
def test_history_by_brute_force(seed):
    """Longest agreement, counts and eviction: what is held is what was useful last."""
    chance = random.Random(seed)
    source = written(chance, 3000)
    history = History(200)
    texts: dict[int, tuple[list[int], list[int]]] = {}  # the least recently useful one first
    at = 0
    for name in range(30):
        before, output = source[at : at + 20], source[at + 20 : at + 20 + chance.randint(1, 60)]
        at += 20 + len(output)
        while texts and sum(DEEP + len(output) for _, output in texts.values()) + DEEP + len(output) > 200:
            del texts[next(iter(texts))]
        texts[name] = before, output
        history.learn("", before, output)
        if chance.random() < 0.5:
            useful = chance.choice(list(texts))
            texts[useful] = texts.pop(useful)
            history.used([useful, 99])
        assert history.tokens() == sum(DEEP + len(output) for _, output in texts.values()) <= 200
        for _ in range(10):
            begin = chance.randrange(len(source) - 30)
            expect_ways(history, texts, source[begin : begin + chance.randint(1, 30)])


@pytest.mark.slow
def test_history_of_many_blocks():
    chance = random.Random(3)
    history = History(6000)
    texts = {}
    for name in range(8):
        texts[name] = [], [chance.randrange(3) for _ in range(600)]
        history.learn("", *texts[name])
    for _ in range(200):
        expect_ways(history, texts, [chance.randrange(3) for _ in range(chance.randint(1, 12))])


def test_a_long_output_is_cut():
    history = History(20)
    history.learn("", [1, 2], list(range(100, 200)))
    assert history.tokens() == 20
    assert history.ways("", [196, 197], 5)[0][0].tokens == array("I", [198, 199])
    assert history.ways("", [150], 5) == ([], 0)


def test_history_needs_room():
    with pytest.raises(OutriderError, match="above 0"):
        History(0)


@pytest.mark.parametrize("length", [1, 40, 900])
def test_memory_stays_within_bounds(length):
    chance = random.Random(length)
    most = 4000
    tracemalloc.start()
    history = History(most)
    for i in range(3 * most // length):
        before = [chance.randrange(1000) for _ in range(30)]
        history.learn(f"scope {i % 5}", before, [chance.randrange(1000) for _ in range(length)])
        assert history.tokens() <= most
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert history.bytes() <= taken < 300 * most
    assert history.bytes() < 150 * most


def test_an_empty_output_is_nothing():
    history = History(100)
    history.learn("", [1, 2, 3], [])
    assert history.tokens() == 0


STORY = [4, 1, 5, 2, 4, 3, 5, 5, 1, 4, 2, 2, 5, 3, 3, 1]


def setup(kernels="auto"):
    return replace(toy_setup(ToyTarget()), kernels=kernels)


def propose(proposer, row, budget=4):
    batch = Batch(
        seqs=(row,),
        start=(row.num_cached_tokens,),
        feed=(tuple(row.token_ids[row.num_cached_tokens :]),),
        draft_budget=(budget,),
    )
    return batch, proposer.propose(batch)


def tell(proposer, output, scope, *, prompt=(4,)):
    """A request that ends with this output."""
    row = make_row(list(prompt), 2, SamplingParams(scope=scope))
    proposer.admit(2, row.request)
    for token in output:
        batch, draft = propose(proposer, row)
        round = make_round(batch, draft, Scores(logits=torch.empty(0)), [()], [(token,)])
        proposer.commit(round)
        append(round)
    proposer.release(2)


def guessed(proposer, text, scope):
    row = make_row(list(text), 1, SamplingParams(scope=scope))
    proposer.admit(1, row.request)
    _, draft = propose(proposer, row)
    proposer.release(1)
    return draft.tokens[0, : draft.width[0]].tolist() if draft.size else []


def test_finished_outputs_are_learned():
    proposer = SuffixProposer(setup(), history=100)
    tell(proposer, STORY, "a")
    assert guessed(proposer, [0, *STORY[:5]], "a") == STORY[5:9]


def test_scopes_do_not_leak():
    proposer = SuffixProposer(setup(), history=100)
    tell(proposer, STORY, "a")
    for scope in ("", "b"):
        assert guessed(proposer, STORY[:3], scope) == []
    assert guessed(proposer, STORY[:3], "a") == STORY[3:7]


def test_nothing_is_kept_without_a_history():
    proposer = SuffixProposer(setup())
    tell(proposer, STORY, "")
    assert guessed(proposer, STORY[:3], "") == []
    assert proposer.bytes() == 0


def test_prompts_are_not_learned():
    proposer = SuffixProposer(setup(), history=100)
    tell(proposer, [0, 0], "", prompt=STORY)
    assert guessed(proposer, STORY[:3], "") == []


def test_what_is_cut_off_an_output_is_not_learned():
    """A stop inside an accepted run ends the row's text; the round had emitted more."""
    proposer = SuffixProposer(setup(), history=100)
    row = make_row([4], 2)
    proposer.admit(2, row.request)
    batch, draft = propose(proposer, row)
    proposer.commit(make_round(batch, draft, Scores(logits=torch.empty(0)), [()], [tuple(STORY)]))
    row.token_ids += STORY[:3]
    proposer.release(2)
    assert guessed(proposer, [0, *STORY[:2]], "") == STORY[2:3]


def test_useful_outputs_are_kept_longer():
    other = [3, 0, 3, 3, 0, 0, 5, 0, 0, 1]
    proposer = SuffixProposer(setup(), history=len(STORY) + len(other) + 8)
    tell(proposer, STORY, "a")
    tell(proposer, other, "b")
    row = make_row([0, *STORY[:5]], 1, SamplingParams(scope="a"))
    proposer.admit(1, row.request)
    batch, draft = propose(proposer, row)
    emitted = (*draft.tokens[0].tolist(), 0)
    proposer.commit(make_round(batch, draft, Scores(logits=torch.empty(0)), [(0, 1, 2, 3)], [emitted]))
    tell(proposer, [2, 2, 2, 2, 2, 2, 2, 2, 2, 2], "c")
    assert guessed(proposer, [0, *STORY[:5]], "a") == STORY[5:9]
    assert guessed(proposer, other[:4], "b") == guessed(SuffixProposer(setup()), other[:4], "b")


def test_a_prompt_is_read_as_it_is_fed():
    proposer = SuffixProposer(setup(), history=10)
    row = make_row(STORY * 2, 0)
    proposer.admit(0, row.request)
    batch = Batch(seqs=(row,), start=(0,), feed=(tuple(row.token_ids[:20]),), draft_budget=(0,))
    assert proposer.propose(batch).size == 0
    assert len(proposer._texts[0]) == 20
    row.num_cached_tokens = 20
    _, draft = propose(proposer, row)
    assert draft.tokens[0].tolist() == STORY[:4]
    assert proposer.bytes() > 0


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_by_name(kernels):
    proposer = find_proposer("suffix:50", setup(kernels))
    tell(proposer, STORY, "")
    assert guessed(proposer, STORY[:3], "") == STORY[3:7]
    assert guessed(find_proposer("suffix", setup(kernels)), STORY[:3], "") == []


@pytest.mark.parametrize("argument", ["many", "0", "-5", "1e5", "100000001", "9" * 5000])
def test_a_wrong_number_is_refused(argument):
    with pytest.raises(OutriderError, match="suffix:100000"):
        find_proposer(f"suffix:{argument}", setup())
