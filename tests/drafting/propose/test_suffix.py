"""The suffix proposer, compared with brute force: automaton, history, draft trees, scopes and memory."""

import random
import tracemalloc
from array import array
from collections import Counter
from dataclasses import replace

import pytest
import torch

from outrider.core.params import SamplingParams
from outrider.core.types import Batch, DraftBudget, Scores
from outrider.drafting.propose.acceptance import TextAcceptance
from outrider.drafting.propose.lookup.suffix import SuffixProposer
from outrider.drafting.propose.lookup.suffix_automaton import Automaton
from outrider.drafting.propose.lookup.suffix_history import CONTEXT, History
from outrider.drafting.propose.lookup.suffix_text import NativeSuffixIndex, PythonSuffixIndex, suffix_index_factory
from outrider.drafting.propose.lookup.suffix_tree import ShareCalibration
from outrider.drafting.propose.registry import find_proposer
from outrider.drafting.propose.tree_builder import TreeBuilder
from outrider.errors import OutriderError
from outrider.models.native.library import load_library
from outrider.testing import ToyTarget, toy_setup
from outrider.testing.drive import append, make_round, make_seq
from tests.helpers.tiny import compiles

needs_compiler = pytest.mark.skipif(not compiles(), reason="no C++ compiler here")
INDEX_MAKERS = [
    pytest.param(PythonSuffixIndex, id="python"),
    pytest.param(lambda: NativeSuffixIndex(load_library()), id="native", marks=needs_compiler),
]


def repetitive_tokens(rng: random.Random, length: int) -> list[int]:
    """Return tokens made of a few phrases."""
    vocab = rng.choice([2, 3, 6, 50])
    phrases = [[rng.randrange(vocab) for _ in range(rng.randint(1, 9))] for _ in range(6)]
    tokens: list[int] = []
    while len(tokens) < length:
        tokens += rng.choice(phrases)
    return tokens[:length]


def end_positions(tokens: list[int], part: list[int]) -> list[int]:
    """Return the positions where the occurrences of a part end."""
    return [end for end in range(len(part), len(tokens) + 1) if tokens[end - len(part) : end] == part]


def longest_repeated_suffix(tokens: list[int]) -> int:
    """Return the length of the longest suffix that occurred before."""
    sizes = range(len(tokens))
    return max(size for size in sizes if not size or len(end_positions(tokens, tokens[-size:])) > 1)


@pytest.mark.parametrize("seed", range(20))
def test_automaton_finds_the_longest_repeated_suffix(seed):
    tokens = repetitive_tokens(random.Random(seed), 60)
    automaton = Automaton()
    for end, token in enumerate(tokens, 1):
        automaton.extend([token])
        assert len(automaton) == end
        assert automaton.longest()[1] == longest_repeated_suffix(tokens[:end])


@pytest.mark.parametrize("seed", range(20))
def test_automaton_counts_occurrences_and_successors(seed):
    rng = random.Random(seed)
    tokens = [rng.randrange(3) for _ in range(60)]
    automaton = Automaton(tokens)
    for begin in range(len(tokens)):
        for end in range(begin + 1, min(begin + 9, len(tokens)) + 1):
            part = tokens[begin:end]
            state = 0
            for token in part:
                state = automaton.follow(state, token)
            ends = end_positions(tokens, part)
            assert automaton.count[state] == len(ends)
            successors = [tokens[position] for position in ends if position < len(tokens)]
            following = automaton.following(state, 99)
            assert [token for token, _ in following] == list(dict.fromkeys(successors))
            assert {token: automaton.count[next_state] for token, next_state in following} == Counter(successors)
    assert automaton.follow(0, 7) == -1


def test_automaton_has_at_most_two_states_per_token():
    for tokens in ([1] * 5000, [1, 2, 3] * 1500, [random.Random(1).randrange(2) for _ in range(5000)]):
        automaton = Automaton(tokens)
        assert len(automaton.length) <= 2 * len(tokens)
        assert automaton.bytes() < 600 * len(tokens)


@needs_compiler
@pytest.mark.parametrize("seed", range(60))
def test_native_index_drafts_the_same_trees(seed):
    rng = random.Random(seed)
    history = History(300)
    tokens = repetitive_tokens(rng, 400)
    for begin in range(0, 250, 50):
        history.learn("", tokens[begin : begin + 10], tokens[begin + 10 : begin + 50])
    factors = array("d", [rng.random() for _ in ShareCalibration().factors])
    python_index = PythonSuffixIndex()
    native_index = NativeSuffixIndex(load_library())
    end = 250
    while end < 330:
        piece = tokens[end : end + rng.randint(1, 20)]
        end += len(piece)
        python_index.extend(piece)
        native_index.extend(piece)
        assert len(python_index) == len(native_index)
        for budget in (1, 5, 40, 3):
            use_history = rng.random() < 0.7
            continuations = history.continuations("", tokens[250:end], budget) if use_history else ([], 0)
            native_draft = native_index.grow(*continuations, factors, budget)
            assert native_draft == python_index.grow(*continuations, factors, budget)


@needs_compiler
def test_native_index_counts_its_memory():
    index = NativeSuffixIndex(load_library())
    before = index.bytes()
    index.extend([random.Random(2).randrange(50) for _ in range(10_000)])
    assert 10_000 * 28 < index.bytes() - before < 10_000 * 300


def test_torch_kernels_use_the_python_index():
    assert suffix_index_factory("torch") is PythonSuffixIndex


@pytest.mark.parametrize("make", INDEX_MAKERS)
@pytest.mark.parametrize("period", [[7], [1, 2, 3], [1, 2, 1, 3, 4]])
def test_periodic_text_is_continued(make, period):
    index = make()
    index.extend(period * (3000 // len(period)))
    draft = index.grow((), 0, ShareCalibration().factors, 20)
    assert draft.builder.tokens == (period * 20)[:20]
    assert draft.builder.parent == list(range(-1, 19))


@pytest.mark.parametrize("make", INDEX_MAKERS)
def test_acceptance_is_proportional_to_the_share_of_successors(make):
    factors = ShareCalibration().factors
    index = make()
    index.extend([8, 1, 9, 1, 8, 2, 9, 1, 6, 1])  # 9, 8 and 6 followed 1 once each
    draft = index.grow((), 0, factors, 3)
    probs = dict(zip(draft.builder.tokens, draft.builder.accept_prob, strict=True))
    assert draft.builder.parent == [-1, -1, -1]
    assert set(probs) == {6, 8, 9}
    assert len(set(probs.values())) == 1
    index.extend([8, 5, 1])  # now 8 followed in two of four cases
    draft = index.grow((), 0, factors, 2)
    assert draft.builder.tokens[0] == 8
    assert draft.builder.accept_prob[0] == pytest.approx(factors[draft.kinds[0]] / 2)


def test_calibration_learns_from_rounds():
    index = PythonSuffixIndex([1, 2, 3, 4, 1, 2, 3])
    calibration = ShareCalibration()

    def draft():
        return index.grow((), 0, calibration.factors, 1)

    before = draft().builder.accept_prob[0]
    for _ in range(20):
        calibration.learn(draft(), [5])
    assert draft().builder.accept_prob[0] < before / 4
    for _ in range(60):
        calibration.learn(draft(), [4, 5])
    assert draft().builder.accept_prob[0] > before


def num_common(one: list[int], two: list[int]) -> int:
    """Return the number of equal last tokens, up to the limit of the history."""
    size = 0
    while size < min(len(one), len(two), CONTEXT) and one[-size - 1] == two[-size - 1]:
        size += 1
    return size


def check_continuations(history: History, stored: dict[int, tuple[list[int], list[int]]], tokens: list[int]) -> None:
    """Compare a lookup with a search of all stored outputs, each with the tokens before it."""
    positions = {}
    for output_id, (before, output) in stored.items():
        text = [*before[-CONTEXT:], *output]
        for position in range(len(text) - len(output), len(text)):
            matched = num_common(text[:position], tokens)
            positions[output_id, position] = matched, tuple(text[position : position + 5])
    longest = max((matched for matched, _ in positions.values()), default=0)
    continuations, matched = history.continuations("", tokens, 5)
    assert matched == longest
    expected = Counter()
    for (output_id, _), (position_matched, following) in positions.items():
        if longest and position_matched == longest:
            expected[output_id, following] += 1
    actual = Counter((output, tuple(each.tokens)) for each in continuations for output in each.outputs)
    assert len({tuple(each.tokens) for each in continuations}) == len(continuations)
    assert actual <= expected
    assert actual.total() == min(expected.total(), 8)


@pytest.mark.parametrize("seed", range(20))
def test_history_equals_brute_force(seed):
    """Longest match, counts and eviction of the least recently useful outputs."""
    rng = random.Random(seed)
    source = repetitive_tokens(rng, 3000)
    history = History(200)
    stored: dict[int, tuple[list[int], list[int]]] = {}  # by id, the least recently useful output first
    start = 0
    for output_id in range(30):
        before = source[start : start + 20]
        output = source[start + 20 : start + 20 + rng.randint(1, 60)]
        start += 20 + len(output)
        while stored and sum(CONTEXT + len(output) for _, output in stored.values()) + CONTEXT + len(output) > 200:
            del stored[next(iter(stored))]
        stored[output_id] = before, output
        history.learn("", before, output)
        if rng.random() < 0.5:
            useful = rng.choice(list(stored))
            stored[useful] = stored.pop(useful)
            history.mark_useful([useful, 99])
        assert history.tokens() == sum(CONTEXT + len(output) for _, output in stored.values()) <= 200
        for _ in range(10):
            begin = rng.randrange(len(source) - 30)
            check_continuations(history, stored, source[begin : begin + rng.randint(1, 30)])


@pytest.mark.slow
def test_history_with_many_blocks():
    rng = random.Random(3)
    history = History(6000)
    stored = {}
    for output_id in range(8):
        stored[output_id] = [], [rng.randrange(3) for _ in range(600)]
        history.learn("", *stored[output_id])
    for _ in range(200):
        check_continuations(history, stored, [rng.randrange(3) for _ in range(rng.randint(1, 12))])


def test_history_cuts_a_long_output():
    history = History(20)
    history.learn("", [1, 2], list(range(100, 200)))
    assert history.tokens() == 20
    assert history.continuations("", [196, 197], 5)[0][0].tokens == array("I", [198, 199])
    assert history.continuations("", [150], 5) == ([], 0)


def test_history_of_zero_tokens_is_rejected():
    with pytest.raises(OutriderError, match="above 0"):
        History(0)


@pytest.mark.parametrize("length", [1, 40, 900])
def test_history_memory_is_bounded(length):
    rng = random.Random(length)
    max_tokens = 2000
    tracemalloc.start()
    history = History(max_tokens)
    for i in range(3 * max_tokens // length):
        before = [rng.randrange(1000) for _ in range(30)]
        history.learn(f"scope {i % 5}", before, [rng.randrange(1000) for _ in range(length)])
        assert history.tokens() <= max_tokens
    allocated = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert history.bytes() <= allocated < 300 * max_tokens
    assert history.bytes() < 150 * max_tokens


def test_empty_output_is_not_stored():
    history = History(100)
    history.learn("", [1, 2, 3], [])
    assert history.tokens() == 0


STORY = [4, 1, 5, 2, 4, 3, 5, 5, 1, 4, 2, 2, 5, 3, 3, 1]


def setup(kernels="auto"):
    return replace(toy_setup(ToyTarget()), kernels=kernels)


def propose(proposer, seq, budget=4):
    batch = Batch(
        seqs=(seq,),
        start=(seq.num_cached_tokens,),
        feed=(tuple(seq.token_ids[seq.num_cached_tokens :]),),
        budget=DraftBudget((budget,)),
    )
    return batch, proposer.propose(batch)


def run_request(proposer, output, scope, *, prompt=(4,)):
    """Run a request with this output to its end."""
    seq = make_seq(list(prompt), 2, SamplingParams(scope=scope))
    proposer.admit(2, seq.request)
    for token in output:
        batch, draft = propose(proposer, seq)
        round = make_round(batch, draft, Scores(logits=torch.empty(0)), [()], [(token,)])
        proposer.commit(round)
        append(round)
    proposer.release(2)


def draft_tokens(proposer, tokens, scope):
    """Return the draft tokens of a new request."""
    seq = make_seq(list(tokens), 1, SamplingParams(scope=scope))
    proposer.admit(1, seq.request)
    _, draft = propose(proposer, seq)
    proposer.release(1)
    return draft.tokens[0, : draft.width[0]].tolist() if draft.size else []


def test_finished_outputs_are_drafted_later():
    proposer = SuffixProposer(setup(), history=100)
    run_request(proposer, STORY, "a")
    assert draft_tokens(proposer, [0, *STORY[:5]], "a") == STORY[5:9]


def test_scopes_do_not_share_outputs():
    proposer = SuffixProposer(setup(), history=100)
    run_request(proposer, STORY, "a")
    for scope in ("", "b"):
        assert draft_tokens(proposer, STORY[:3], scope) == []
    assert draft_tokens(proposer, STORY[:3], "a") == STORY[3:7]


def test_nothing_is_stored_without_a_history():
    proposer = SuffixProposer(setup())
    run_request(proposer, STORY, "")
    assert draft_tokens(proposer, STORY[:3], "") == []
    assert proposer.bytes() == 0


def test_prompts_are_not_stored():
    proposer = SuffixProposer(setup(), history=100)
    run_request(proposer, [0, 0], "", prompt=STORY)
    assert draft_tokens(proposer, STORY[:3], "") == []


def test_tokens_after_a_stop_are_not_stored():
    """A stop within the emitted tokens of a round ends the output before them."""
    proposer = SuffixProposer(setup(), history=100)
    seq = make_seq([4], 2)
    proposer.admit(2, seq.request)
    batch, draft = propose(proposer, seq)
    proposer.commit(make_round(batch, draft, Scores(logits=torch.empty(0)), [()], [tuple(STORY)]))
    seq.token_ids += STORY[:3]
    proposer.release(2)
    assert draft_tokens(proposer, [0, *STORY[:2]], "") == STORY[2:3]


def test_useful_outputs_are_kept_longer():
    other = [3, 0, 3, 3, 0, 0, 5, 0, 0, 1]
    proposer = SuffixProposer(setup(), history=len(STORY) + len(other) + 8)
    run_request(proposer, STORY, "a")
    run_request(proposer, other, "b")
    seq = make_seq([0, *STORY[:5]], 1, SamplingParams(scope="a"))
    proposer.admit(1, seq.request)
    batch, draft = propose(proposer, seq)
    emitted = (*draft.tokens[0].tolist(), 0)
    proposer.commit(make_round(batch, draft, Scores(logits=torch.empty(0)), [(0, 1, 2, 3)], [emitted]))
    run_request(proposer, [2, 2, 2, 2, 2, 2, 2, 2, 2, 2], "c")
    assert draft_tokens(proposer, [0, *STORY[:5]], "a") == STORY[5:9]
    assert draft_tokens(proposer, other[:4], "b") == draft_tokens(SuffixProposer(setup()), other[:4], "b")


def test_a_text_that_rejects_drafts_lowers_its_own_estimates():
    proposer = SuffixProposer(setup())
    skipping = list(range(0, 20, 2))  # each token is followed by another one than in the prompt
    seq = make_seq(list(range(21)), 0)
    proposer.admit(0, seq.request)
    for token in skipping:
        batch, draft = propose(proposer, seq)
        round = make_round(batch, draft, Scores(logits=torch.empty(0)), [()], [(token,)])
        proposer.commit(round)
        append(round)
    other = make_seq(seq.token_ids, 1)
    proposer.admit(1, other.request)
    own = propose(proposer, seq)[1]
    fresh = propose(proposer, other)[1]
    assert own.accept_prob[0][0] < 0.7 * fresh.accept_prob[0][0]


def test_accepted_drafts_restore_the_estimates_of_a_text_and_never_exceed_them():
    text = TextAcceptance()
    drafted = TreeBuilder([1, 2], [-1, 0], [0.8, 0.4])
    text.learn(drafted, [3])
    assert text.factor == pytest.approx(4 / (4 + 0.8))
    text.learn(drafted, [1, 3])
    estimated = 0.95 * 0.8 + 0.8 * 1.2 + 0.5 * 1.2  # the second draft was estimated with a factor of 1 / 1.2
    assert text.factor == pytest.approx((4 + 1) / (4 + estimated))
    for _ in range(60):
        text.learn(drafted, [1, 2, 3])
    assert text.factor == 1


def test_rounds_without_drafts_index_nothing_until_the_next_draft():
    proposer = SuffixProposer(setup(), history=10)
    seq = make_seq([*STORY, *STORY[:3]], 0)
    proposer.admit(0, seq.request)
    assert propose(proposer, seq, budget=0)[1].size == 0  # the prefill
    for token in STORY[3:6]:
        seq.num_cached_tokens = len(seq.token_ids)
        seq.token_ids.append(token)
        assert propose(proposer, seq, budget=0)[1].size == 0
        assert len(proposer.indexes[0]) == len(STORY) + 3
    assert propose(proposer, seq)[1].tokens[0].tolist() == STORY[6:10]


def test_prompt_is_indexed_as_it_is_prefilled():
    proposer = SuffixProposer(setup(), history=10)
    seq = make_seq(STORY * 2, 0)
    proposer.admit(0, seq.request)
    batch = Batch(seqs=(seq,), start=(0,), feed=(tuple(seq.token_ids[:20]),), budget=DraftBudget((0,)))
    assert proposer.propose(batch).size == 0
    assert len(proposer.indexes[0]) == 20
    seq.num_cached_tokens = 20
    _, draft = propose(proposer, seq)
    assert draft.tokens[0].tolist() == STORY[:4]
    assert proposer.bytes() > 0


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_history_size_is_parsed_from_the_argument(kernels):
    proposer = find_proposer("suffix:50", setup(kernels))
    run_request(proposer, STORY, "")
    assert draft_tokens(proposer, STORY[:3], "") == STORY[3:7]
    assert draft_tokens(find_proposer("suffix", setup(kernels)), STORY[:3], "") == []


@pytest.mark.parametrize("argument", ["many", "0", "-5", "1e5", "100000001", "9" * 5000])
def test_invalid_history_size_is_rejected(argument):
    with pytest.raises(OutriderError, match="suffix:100000"):
        find_proposer(f"suffix:{argument}", setup())
