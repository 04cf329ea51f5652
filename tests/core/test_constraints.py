"""Tests of constraints: outputs are valid, exactly distributed, and the same with and without speculation."""

import json
from collections import Counter
from dataclasses import replace
from functools import cache, partial

import jsonschema
import pytest
import torch

from outrider import LLM
from outrider.core import tree
from outrider.core.constraint import Constraint, Kind
from outrider.core.grammar import Grammars, Matcher
from outrider.core.params import SamplingParams
from outrider.core.planner import FixedPlanner
from outrider.core.proposer import NoProposer
from outrider.core.stats import Stats
from outrider.core.types import Batch, DraftBudget, FinishReason, SequenceState
from outrider.drafting.propose.combine import Merge
from outrider.drafting.propose.draft_model.chain import DraftModelProposer
from outrider.drafting.propose.draft_model.tree import TreeProposer
from outrider.drafting.propose.lookup.ngram import NgramProposer
from outrider.engine.constraints import apply_constraints
from outrider.errors import OutriderError
from outrider.lab.audit.statistics import g_test
from outrider.models.loader.embedded import embedded
from outrider.models.loader.load import load_checkpoint
from outrider.models.loader.make import make_target
from outrider.models.loader.tokenizer import read_tokenizer
from outrider.testing import ToyTarget
from outrider.verify.rules import EXACT
from tests.helpers import grammar_cases, tiny
from tests.helpers.engines import make_engine, tightened

NUM_SCHEMAS = 100
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["alpha", "alphabet", "beta"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "kind", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def grammars():
    return Grammars(grammar_cases.words(), vocab=grammar_cases.VOCAB, end_ids=[0])


def draft(setup):
    return DraftModelProposer(setup, grammar_cases.WordTarget(slots=setup.slots, like=grammar_cases.WordTarget()))


def draft_tree(setup):
    return TreeProposer(setup, grammar_cases.WordTarget(slots=setup.slots, like=grammar_cases.WordTarget()))


PROPOSERS = {
    "none": NoProposer,
    "ngram": NgramProposer,
    "draft": draft,
    "tree": draft_tree,
    "merge": lambda setup: Merge(setup, [NgramProposer(setup), draft(setup)]),
}


def texts(grammars, constraints, proposer="none", *, verifier="walk", k=4, **sampling):
    """Return the sequence of each constraint, and the statistics of the engine."""
    engine = make_engine(grammar_cases.WordTarget(), PROPOSERS[proposer], verifier=verifier, k=k)
    params = [SamplingParams(seed=7, constraint=constraint, **sampling) for constraint in constraints]
    seqs = grammar_cases.complete(engine, grammars, [[5, 6]] * len(params), params)
    return seqs, engine.stats


def outputs_of(seqs):
    """Return the output tokens of each sequence, after the prompt of two tokens."""
    return [tuple(seq.token_ids[2:]) for seq in seqs]


def check_valid(seqs, constraints):
    """Check that every output matches its schema. A few may be cut off by max_tokens."""
    num_cut = 0
    for seq, constraint in zip(seqs, constraints, strict=True):
        assert seq.finish_reason in (FinishReason.STOP, FinishReason.LENGTH), seq.error
        num_cut += seq.finish_reason is FinishReason.LENGTH
        if seq.finish_reason is FinishReason.STOP:
            text = grammar_cases.words().decode(seq.token_ids[2:], skip_special_tokens=True)
            # `jsonschema.validate` checks the schema too, which takes longer than all else.
            jsonschema.Draft202012Validator(json.loads(constraint.source)).validate(json.loads(text))
    assert num_cut < len(seqs) / 6  # a greedy toy model may generate digits forever


@pytest.fixture(scope="module")
def schemas():
    return grammar_cases.forms(NUM_SCHEMAS)


GREEDY = [("draft", "block"), ("tree", "traversal")]
SAMPLED = [("draft", "coupled"), ("merge", "walk"), ("tree", "coupled")]


@pytest.fixture(scope="module")
def plain(grammars, schemas):
    """A function that returns outputs of plain decoding. Sampled ones depend on the noise that the verifier uses."""

    @cache
    def outputs(temperature, verifier="walk"):
        seqs, stats = texts(grammars, schemas, k=0, verifier=verifier, temperature=temperature)
        assert stats.passes == stats.output_tokens
        check_valid(seqs, schemas)
        return outputs_of(seqs)

    return outputs


@pytest.mark.parametrize(("proposer", "verifier"), GREEDY)
def test_greedy_outputs_match_schemas_and_equal_plain_decoding(grammars, schemas, plain, proposer, verifier):
    seqs, stats = texts(grammars, schemas, proposer, verifier=verifier)
    check_valid(seqs, schemas)
    assert outputs_of(seqs) == plain(0.0)
    assert stats.tau > 1.3


@pytest.mark.slow
@pytest.mark.parametrize(("proposer", "verifier"), SAMPLED)
def test_sampled_outputs_match_schemas_and_equal_plain_decoding(grammars, schemas, plain, proposer, verifier):
    seqs, stats = texts(grammars, schemas, proposer, verifier=verifier, temperature=1.0)
    check_valid(seqs, schemas)
    assert outputs_of(seqs) == plain(1.0, verifier)
    assert stats.tau > 1.3


@pytest.mark.heavy
@pytest.mark.parametrize(("proposer", "verifier"), [*GREEDY, *SAMPLED, ("ngram", "walk")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_many_schemas(grammars, proposer, verifier, temperature):
    schemas = grammar_cases.forms(1000, seed=1)
    seqs, _ = texts(grammars, schemas, proposer, verifier=verifier, temperature=temperature)
    check_valid(seqs, schemas)
    if temperature == 0 or verifier in ("walk", "coupled"):
        other, _ = texts(grammars, schemas, k=0, verifier=verifier, temperature=temperature)
        assert outputs_of(seqs) == outputs_of(other)


ALPHABET, LANGUAGE = "abcde", ["a", "ab", "abd", "bcda", "bcdb", "bcdbe", "cc", "ca", "eeee"]


@pytest.mark.fast_cases("none-0.0", "draft-0.0")
@pytest.mark.parametrize(("proposer", "temperature"), [("none", 0.0), ("ngram", 1.0), ("draft", 0.0), ("draft", 1.0)])
def test_preempted_sequences_keep_their_grammars(grammars, schemas, proposer, temperature):
    large, small = (
        make_engine(target, PROPOSERS[proposer], rows=4)
        for target in (grammar_cases.WordTarget(slots=4), tightened(grammar_cases.WordTarget(slots=4), 210))
    )
    item = {"type": "integer", "minimum": 1, "maximum": 300}
    arrays = [
        Constraint.json_schema({"type": "array", "items": item, "minItems": 40, "maxItems": 40 + i}) for i in range(5)
    ]
    params = [SamplingParams(seed=7, temperature=temperature, constraint=constraint) for constraint in arrays]
    preempted, not_preempted = (
        grammar_cases.complete(engine, grammars, [[5, 6]] * len(params), params) for engine in (small, large)
    )
    check_valid(preempted, arrays)
    assert outputs_of(preempted) == outputs_of(not_preempted)
    assert small.cache_usage().preempted > 0
    assert large.cache_usage().preempted == 0


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_recurrent_target_with_constraints(grammars, schemas, temperature, tmp_path):
    config = tiny.ARCHITECTURES["mamba2"]()
    config.vocab_size = grammar_cases.VOCAB
    folder = tiny.save(tmp_path / "mamba2", config, size=grammar_cases.VOCAB)
    checkpoint = load_checkpoint(folder, dtype="float32", device="cpu")
    params = [SamplingParams(seed=7, temperature=temperature, constraint=schema) for schema in schemas[:12]]
    results = []
    for proposer, k in (("none", 0), ("none", 4), ("ngram", 4)):  # no drafts, forced tokens, drafts and forced tokens
        engine = make_engine(make_target(checkpoint, slots=4, context=256), PROPOSERS[proposer], rows=4, k=k)
        seqs = grammar_cases.complete(engine, grammars, [[5, 6]] * len(params), params)
        check_valid(seqs, schemas[:12])
        results.append((outputs_of(seqs), engine.stats.tau))
    assert results[0][0] == results[1][0] == results[2][0]
    assert results[0][1] == 1.0 < results[1][1]


def constrained_distribution(target, prompt):
    """Return the probability of each text of the language, as in constrained decoding token by token."""
    distribution = {}
    for text in LANGUAGE:
        prob = 1.0
        prefix = ""
        while True:
            longer = {word[: len(prefix) + 1] for word in LANGUAGE if word.startswith(prefix) and word != prefix}
            if not longer:
                break
            allowed = [1 + ALPHABET.index(word[-1]) for word in longer] + [0] * (prefix in LANGUAGE)
            before = [*prompt, *(1 + ALPHABET.index(c) for c in prefix)]
            p = target.table[before[-2], before[-1]].double().softmax(-1)
            token = 1 + ALPHABET.index(text[len(prefix)]) if prefix != text else 0
            prob *= float(p[token] / p[allowed].sum())
            if prefix == text:
                break
            prefix = text[: len(prefix) + 1]
        distribution[text] = prob
    return distribution


@pytest.mark.fast_cases("walk", "block")
@pytest.mark.parametrize("name", EXACT)
def test_outputs_have_the_constrained_distribution(name):
    tokenizer = grammar_cases.letters(ALPHABET)
    grammars = Grammars(tokenizer, vocab=6, end_ids=[0])
    target = ToyTarget(vocab=6, slots=250, context=16)
    proposer = toy_tree if EXACT[name].trees else toy_chain
    engine = make_engine(target, proposer, verifier=name, k=3, rows=250)
    params = SamplingParams(temperature=1.0, seed=11, constraint=Constraint.regex("|".join(LANGUAGE)))
    seqs = grammar_cases.complete(engine, grammars, [[1, 2]] * 1200, [params] * 1200, limit=9)
    counts = Counter("".join(ALPHABET[token - 1] for token in seq.token_ids[2:] if token) for seq in seqs)
    expected = constrained_distribution(target, [1, 2])
    assert sum(expected.values()) == pytest.approx(1.0)
    assert set(counts) <= set(LANGUAGE)
    assert g_test([counts[text] for text in LANGUAGE], [expected[text] for text in LANGUAGE]).p_value > 1e-3
    assert engine.stats.tau > 1.3


def toy_chain(setup):
    return DraftModelProposer(setup, ToyTarget(vocab=6, slots=setup.slots, context=16, seed=1))


def toy_tree(setup):
    return TreeProposer(setup, ToyTarget(vocab=6, slots=setup.slots, context=16, seed=1))


def test_matcher_gives_the_same_tokens_after_push_and_advance(grammars, schemas):
    """After `push`, `allowed` is the same as after `advance`, and `pop` restores it."""
    generator = torch.Generator().manual_seed(0)
    for constraint in schemas[:40]:
        grammar = grammars.compile(constraint)
        ends = frozenset({0})
        pushed = grammar.start(ends)
        advanced = grammar.start(ends)
        tokens = []
        while not pushed.done and len(tokens) < 60:
            bits = torch.from_numpy(pushed.allowed())
            allowed = ((bits[:, None] >> torch.arange(8)) & 1).flatten().nonzero()[:, 0].tolist()
            if pushed.forced is not None:
                assert allowed == [pushed.forced]
            token = allowed[int(torch.randint(len(allowed), (), generator=generator))]
            if token == 0:
                break
            for other in allowed[:3]:
                if other:
                    pushed.push(other)
                    pushed.pop()
            assert pushed.allowed().tobytes() == advanced.allowed().tobytes()
            pushed.push(token)
            advanced.advance(token)
            tokens.append(token)
        for _ in tokens:
            pushed.pop()
        assert pushed.allowed().tobytes() == grammar.start(ends).allowed().tobytes()


def test_drafts_that_are_taken_back_leave_nothing_behind():
    """llguidance's own rollback kept the mask of the array here, so a key could end like an element."""
    tokenizer = read_tokenizer(embedded("nano"))
    ids = partial(tokenizer.encode, add_special_tokens=False)
    grammar = Grammars(tokenizer, vocab=12288, end_ids=[0]).compile(Constraint.json_schema({"type": "object"}))
    pushed, fresh = (grammar.start(frozenset({0})) for _ in range(2))
    begin, rest = ids('{"a": "b", "name'), [*ids('":'), *ids(' {"')]
    for token in begin:
        pushed.advance(token)
    for token in (*ids('":'), *ids(' ["')):
        pushed.push(token)
    pushed.allowed()
    for _ in range(2):
        pushed.pop()
    for token in rest:
        pushed.advance(token)
    for token in begin + rest:
        fresh.advance(token)
    assert pushed.allowed().tobytes() == fresh.allowed().tobytes()


def test_forced_tokens_are_drafted_unless_k_is_0(grammars):
    forced = [Constraint.json_schema({"const": {"a long name": "and a long text behind it", "number": 12345}})]
    seqs, stats = texts(grammars, forced)
    plain, plain_stats = texts(grammars, forced, k=0)
    assert outputs_of(seqs) == outputs_of(plain)
    assert stats.passes <= 1 + stats.output_tokens // 30
    assert plain_stats.passes == plain_stats.output_tokens
    two_tokens = replace(SamplingParams(constraint=forced[0]), k=2)
    engine = make_engine(grammar_cases.WordTarget(), NoProposer, k=4)
    (seq,) = grammar_cases.complete(engine, grammars, [[5, 6]], [two_tokens])
    assert outputs_of([seq]) == outputs_of(seqs)
    assert max(drafted for drafted, _, _ in seq.rounds) == 2
    assert all(seq.from_draft[:2])


def test_statistics_of_the_planner_exclude_forced_tokens(grammars):
    seen = []

    class Planner(FixedPlanner):
        def plan(self, batch, stats):
            seen.append(stats.total)
            return super().plan(batch, stats)

    engine = make_engine(grammar_cases.WordTarget(), draft, planner=Planner(3))
    constraint = Constraint.json_schema(PERSON)
    grammar_cases.complete(engine, grammars, [[5, 6]] * 4, [SamplingParams(constraint=constraint)] * 4)
    assert seen[-1].accepted[3:] == () != engine.stats.accepted[3:]
    assert seen[-1].tau < engine.stats.tau
    assert engine.alternative_stats[0].accepted[3:] == ()
    assert seen[-1].rounds == engine.stats.rounds - 1


def test_sequences_without_a_grammar_do_not_change(grammars):
    free = SamplingParams(temperature=1.0, seed=3, max_tokens=30)
    constrained = replace(free, constraint=Constraint.json_schema(PERSON))
    engine = make_engine(grammar_cases.WordTarget(), draft, verifier="walk")
    mixed = grammar_cases.complete(engine, grammars, [[5, 6], [7, 8], [9, 1]], [free, constrained, free], limit=30)
    engine = make_engine(grammar_cases.WordTarget(), draft, verifier="walk")
    alone = grammar_cases.complete(engine, grammars, [[5, 6], [7, 8], [9, 1]], [free] * 3, limit=30)
    assert [seq.token_ids for seq in mixed[::2]] == [seq.token_ids for seq in alone[::2]]
    batch = Batch(seqs=(SequenceState.of((5, 6)),), start=(0,), feed=((5, 6),), budget=DraftBudget((0,)))
    empty = tree.empty(1, torch.device("cpu"))
    assert apply_constraints(batch, empty, grammar_cases.VOCAB).draft is empty
    assert apply_constraints(batch, empty, grammar_cases.VOCAB).masks is None


def test_end_tokens_are_allowed_only_where_the_grammar_may_end(grammars):
    open_ended = Constraint.regex("(ab)+")
    (seq,), _ = texts(grammars, [open_ended], "draft")
    text = grammar_cases.words().decode(seq.token_ids[2:], skip_special_tokens=True)
    assert text == "ab" * (len(text) // 2) != ""
    (seq,), _ = texts(grammars, [open_ended], "draft", ignore_eos=True)
    assert seq.finish_reason is FinishReason.LENGTH
    assert 0 not in seq.token_ids
    stop = grammar_cases.words().encode("!")[0]
    (seq,), _ = texts(grammars, [open_ended], "draft", ignore_eos=True, stop_token_ids=(stop,), logit_bias={stop: 99.0})
    assert seq.finish_reason is FinishReason.STOP
    assert seq.token_ids[-1] == stop
    assert grammar_cases.words().decode(seq.token_ids[2:-1]) in ("ab", "abab")
    (seq,), _ = texts(grammars, [open_ended], "draft", min_tokens=9, logit_bias={0: 99.0})
    assert len(seq.token_ids) - 2 == 11
    assert seq.token_ids[-1] == 0


def test_grammar_that_fails_in_a_round_ends_only_its_sequence(grammars, monkeypatch):
    valid = Constraint.json_schema(PERSON)
    failing = Constraint.regex("[a-z]{40}")
    grammar = grammars.compile(failing)
    (alone,), _ = texts(grammars, [valid], "draft")
    start = grammar.start

    def start_failing(ends):
        matcher = start(ends)
        allowed = matcher.allowed
        monkeypatch.setattr(
            matcher,
            "allowed",
            lambda: allowed() if len(matcher._committed) < 10 else (_ for _ in ()).throw(OutriderError("too complex")),
            raising=False,
        )
        return matcher

    monkeypatch.setattr(grammar, "start", start_failing)
    (first, second), _ = texts(grammars, [valid, failing], "draft")
    assert first.token_ids == alone.token_ids
    assert second.finish_reason is FinishReason.ERROR
    assert second.error == "too complex"
    assert second.num_output_tokens >= 10


@pytest.mark.parametrize("raises", [False, True])
def test_grammar_that_cannot_be_started_ends_only_its_sequence(grammars, monkeypatch, raises):
    valid = Constraint.json_schema(PERSON)
    failing = Constraint.regex("[b-z]{40}")
    (alone,), _ = texts(grammars, [valid], "draft")
    grammar = grammars.compile(failing)
    monkeypatch.setattr(grammar, "start", lambda ends: (_ for _ in ()).throw(OutriderError("too complex")))
    failed = []

    def make(setup):
        proposer = PROPOSERS["draft"](setup)
        if raises:  # in the round in which the sequence ends
            propose = proposer.propose
            proposer.propose = lambda batch: propose(batch) if failed else failed.append(1) or 1 / 0
        return proposer

    engine = make_engine(grammar_cases.WordTarget(), make, rows=2)
    if raises:
        monkeypatch.setattr(engine, "step", lambda step=engine.step: recovering(engine, step))
    params = [SamplingParams(seed=7, constraint=constraint) for constraint in (failing, valid, failing, failing)]
    seqs = grammar_cases.complete(engine, grammars, [[5, 6]] * 4, params)
    assert [seq.finish_reason for seq in seqs if seq.error] == [FinishReason.ERROR] * 3
    assert {seq.error for seq in seqs} == {"too complex", ""}
    assert seqs[1].token_ids == alone.token_ids
    assert not engine.busy()
    assert engine.step() == ()
    (again,) = grammar_cases.complete(engine, grammars, [[5, 6]], params[1:2])
    assert again.token_ids == alone.token_ids


def recovering(engine, step):
    try:
        return step()
    except ZeroDivisionError as error:
        return engine.recover(error)


def test_matcher_is_restored_after_a_round_that_raises(grammars, monkeypatch):
    params = [SamplingParams(seed=3, constraint=Constraint.json_schema(PERSON))] * 2
    undisturbed = make_engine(grammar_cases.WordTarget(), draft)
    expected = grammar_cases.complete(undisturbed, grammars, [[5, 6]] * 2, params)
    engine = make_engine(grammar_cases.WordTarget(), draft)
    calls = 0
    step = engine.step
    push = Matcher.push

    def failing_push(self, token):
        nonlocal calls
        calls += 1
        push(self, token)
        if calls % 5 == 0:
            raise RuntimeError("injected failure")

    def recovering():
        try:
            return step()
        except RuntimeError as error:
            return engine.recover(error)

    monkeypatch.setattr(Matcher, "push", failing_push)
    monkeypatch.setattr(engine, "step", recovering)
    seqs = grammar_cases.complete(engine, grammars, [[5, 6]] * 2, params)
    assert calls > 10
    assert [seq.token_ids for seq in seqs] == [seq.token_ids for seq in expected]


INVALID = {
    "no JSON": lambda: Constraint.json_schema("{oops"),
    "no schema": lambda: Constraint.json_schema([1]),
    "a value that is no JSON": lambda: Constraint.json_schema({"const": {1, 2}}),
    "too deep": lambda: Constraint.json_schema('{"items":' * 5000 + "{}" + "}" * 5000),
    "too deep for Python": lambda: Constraint.json_schema('{"items":' * 60000 + "{}" + "}" * 60000),
    "too long": lambda: Constraint.regex("a|" * 200_000),
    "empty": lambda: Constraint.regex(""),
    "an unknown kind": lambda: Constraint(kind="json", source="{}"),
    "no choice": lambda: Constraint.choice([]),
    "one text for choices": lambda: Constraint.choice("abc"),
    "a number for choices": lambda: Constraint.choice(5),
    "a generator of choices": lambda: Constraint.choice(text for text in ("a", "b")),
    "an empty choice": lambda: Constraint.choice(["a", ""]),
    "an unknown type": lambda: Constraint.json_schema({"type": "thing"}),
    "an unknown keyword": lambda: Constraint.json_schema({"not": {"type": "string"}}),
    "false": lambda: Constraint.json_schema(False),
    "nothing fits": lambda: Constraint.json_schema({"allOf": [{"type": "string"}, {"type": "integer"}]}),
    "a reference to itself": lambda: Constraint.json_schema({"$ref": "#"}),
    "a reference to nowhere": lambda: Constraint.json_schema({"$ref": "http://example.com/x.json"}),
    "an open bracket": lambda: Constraint.regex("(a"),
    "too many repeats": lambda: Constraint.regex("a{1000000}"),
    "repeats of repeats": lambda: Constraint.regex("((a{90}){900}){9000000000000}"),
    "a rule that is not there": lambda: Constraint.grammar("start: other"),
    "no grammar": lambda: Constraint.grammar("this is none"),
    "an empty language": lambda: Constraint.grammar('start: ""'),
    "an endless text": lambda: Constraint.grammar('start: "a" start'),
    "a large schema": lambda: Constraint.json_schema(grammar_cases.nested(12)),
}


@pytest.mark.parametrize("case", INVALID)
def test_errors_of_invalid_or_too_large_constraints(grammars, case):
    with pytest.raises(OutriderError) as caught:
        grammars.compile(INVALID[case]())
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("constraint", "fix"),
    [
        (Constraint.json_schema({"if": {}, "then": {}}), 'it has "if", "then", which is not supported here; leave'),
        (Constraint.json_schema({"type": "objekt"}), '"type" is "objekt"; use object, array, string'),
        (Constraint.json_schema({"type": "string", "format": "x"}), 'the format "x" is unknown; leave it out'),
        (Constraint.json_schema({"type": "string", "pattern": "[a"}), "unclosed character class; correct the regular"),
        (Constraint.regex("[0-9]{3"), "unclosed counted repetition; correct the regular expression"),
    ],
)
def test_errors_of_constraints_name_the_fix(grammars, constraint, fix):
    with pytest.raises(OutriderError, match="constraint cannot be used: ") as caught:
        grammars.compile(constraint)
    assert fix in str(caught.value)
    assert "start:" not in str(caught.value)  # the grammar that is made of the constraint


def test_errors_of_parameters_that_conflict_with_a_constraint():
    constraint = Constraint.choice(["a"])
    for fields in ({"logit_bias": {5: float("-inf")}}, {"min_tokens": 1, "stop_token_ids": (4,)}, {"constraint": "a"}):
        with pytest.raises(OutriderError, match="constraint"):
            SamplingParams(**{"constraint": constraint} | fields)
    assert constraint == Constraint(kind=Kind.CHOICE, source='["a"]')


def test_kind_of_a_constraint_may_be_its_name():
    named = Constraint(kind="regex", source="[0-9]+")
    assert named == Constraint.regex("[0-9]+")
    assert named.kind is Kind.REGEX
    assert Constraint.json_schema('{"type":"object"}') == Constraint.json_object()


KINDS = {
    "json": (Constraint.json_object(), lambda text: isinstance(json.loads(text), dict)),
    "regex": (Constraint.regex(r"\d{3}-\d{2}"), lambda text: len(text) == 6),
    "choice": (Constraint.choice(["yes", 'no "\n', "né"]), lambda text: text in ("yes", 'no "\n', "né")),
    "lark": (Constraint.grammar('start: "<" WORD ">"\nWORD: /[a-z]{2,5}/'), lambda text: text[0] + text[-1] == "<>"),
    "gbnf": (Constraint.grammar('root ::= "(" [0-9]+ ")" | "none"'), lambda text: text[0] in "(n"),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_embedded_pair(dtype):
    """The native kernels are tested as well. They return packed logits, and the likeliest ids with them."""
    results = []
    for k in (0, 4):
        llm = LLM(
            embedded("nano"), proposer="suffix", verifier="walk", dtype=dtype, k=k, max_num_seqs=8, max_model_len=256
        )
        for temperature in (0.0, 1.0):
            params = [
                SamplingParams(temperature=temperature, seed=2, max_tokens=60, logprobs=1, constraint=constraint)
                for constraint, _ in KINDS.values()
            ]
            done = llm.generate(["x = 1\n"] * (len(params) + 1), [*params, SamplingParams(max_tokens=40, logprobs=1)])
            results.append([(completion.token_ids, completion.finish_reason) for completion in done])
            for completion, (_, is_valid) in zip(done, KINDS.values(), strict=False):
                assert completion.finish_reason is FinishReason.LENGTH or is_valid(completion.text)
                assert len(completion.logprobs) == len(completion.token_ids)
                assert all(entry.logprob <= entry.top[0][1] for entry in completion.logprobs)
    assert results[:2] == results[2:]


def test_auto_draft_length_uses_forced_tokens():
    llm = LLM(embedded("nano"), proposer="none", dtype="float32", max_num_seqs=2, max_model_len=256)
    (done,) = llm.generate("x", SamplingParams(constraint=Constraint.json_schema(PERSON), max_tokens=80))
    assert done.stats.tau > 1.5
    assert llm.stats == llm.engine.stats
    assert isinstance(llm.stats, Stats)
