"""Completions of a given form: valid, drawn from the constrained law, and the same with speculation as without."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import jsonschema
import pytest
import torch

from outrider import LLM
from outrider.audit.statistics import g_test
from outrider.core import tree
from outrider.core.constraint import Constraint, Kind
from outrider.core.grammar import Grammars, Matcher
from outrider.core.params import SamplingParams
from outrider.core.stats import Stats
from outrider.core.types import FinishReason
from outrider.engine.constraints import apply_constraints
from outrider.errors import OutriderError
from outrider.loader.checkpoint import load_checkpoint
from outrider.loader.embedded import embedded
from outrider.loader.make import make_target
from outrider.plan.planner import FixedPlanner
from outrider.propose.base import NoProposer
from outrider.propose.combine import Merge
from outrider.propose.draft_model.chain import DraftModelProposer
from outrider.propose.draft_model.tree import TreeProposer
from outrider.propose.lookup.ngram import NgramProposer
from outrider.testing import ToyTarget
from outrider.verify.rules import EXACT
from tests.helpers import grammar_cases, tiny
from tests.helpers.engines import make_engine, tightened

COUNT = 200  # schemas
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


def bushy(setup):
    return TreeProposer(setup, grammar_cases.WordTarget(slots=setup.slots, like=grammar_cases.WordTarget()))


PROPOSERS = {
    "none": NoProposer,
    "ngram": NgramProposer,
    "draft": draft,
    "tree": bushy,
    "merge": lambda setup: Merge(setup, [NgramProposer(setup), draft(setup)]),
}


def texts(grammars, constraints, proposer="none", *, verifier="walk", k=4, **sampling):
    """One completion for each constraint, and how the engine fared."""
    engine = make_engine(grammar_cases.WordTarget(), PROPOSERS[proposer], verifier=verifier, k=k)
    params = [SamplingParams(seed=7, constraint=each, **sampling) for each in constraints]
    rows = grammar_cases.complete(engine, grammars, [[5, 6]] * len(params), params)
    return rows, engine.stats


def words_of(rows):
    return [tuple(row.token_ids[2:]) for row in rows]


def check_valid(rows, constraints):
    cut = 0
    for row, constraint in zip(rows, constraints, strict=True):
        assert row.finish_reason in (FinishReason.STOP, FinishReason.LENGTH), row.error
        cut += row.finish_reason is FinishReason.LENGTH
        if row.finish_reason is FinishReason.STOP:
            text = grammar_cases.words().decode(row.token_ids[2:], skip_special_tokens=True)
            jsonschema.validate(json.loads(text), json.loads(constraint.source))
    assert cut < len(rows) / 6  # a greedy toy may write digits for ever


@pytest.fixture(scope="module")
def schemas():
    return grammar_cases.forms(COUNT)


GREEDY = [("draft", "block"), ("tree", "traversal")]
SAMPLED = [("draft", "coupled"), ("merge", "walk"), ("tree", "coupled")]


@pytest.fixture(scope="module")
def plain(grammars, schemas):
    """What plain constrained decoding says: of a one-hot law, and of each rule whose noise goes by position."""
    told = {(0.0, ""): words_of(texts(grammars, schemas, k=0)[0])}
    for verifier in ("walk", "coupled"):
        rows, stats = texts(grammars, schemas, k=0, verifier=verifier, temperature=1.0)
        assert stats.passes == stats.output_tokens
        check_valid(rows, schemas)
        told[1.0, verifier] = words_of(rows)
    return told


@pytest.mark.parametrize(("proposer", "verifier"), GREEDY)
def test_schemas_hold_and_greedy_text_is_that_of_plain_decoding(grammars, schemas, plain, proposer, verifier):
    rows, stats = texts(grammars, schemas, proposer, verifier=verifier)
    check_valid(rows, schemas)
    assert words_of(rows) == plain[0.0, ""]
    assert stats.tau > 1.3


@pytest.mark.slow
@pytest.mark.parametrize(("proposer", "verifier"), SAMPLED)
def test_schemas_hold_and_a_seed_draws_what_it_draws_plainly(grammars, schemas, plain, proposer, verifier):
    rows, stats = texts(grammars, schemas, proposer, verifier=verifier, temperature=1.0)
    check_valid(rows, schemas)
    assert words_of(rows) == plain[1.0, verifier]
    assert stats.tau > 1.3


@pytest.mark.heavy
@pytest.mark.parametrize(("proposer", "verifier"), [*GREEDY, *SAMPLED, ("ngram", "walk")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_many_more_schemas(grammars, proposer, verifier, temperature):
    schemas = grammar_cases.forms(1000, seed=1)
    rows, _ = texts(grammars, schemas, proposer, verifier=verifier, temperature=temperature)
    check_valid(rows, schemas)
    if temperature == 0 or verifier in ("walk", "coupled"):
        other, _ = texts(grammars, schemas, k=0, verifier=verifier, temperature=temperature)
        assert words_of(rows) == words_of(other)


ALPHABET, LANGUAGE = "abcde", ["a", "ab", "abd", "bcda", "bcdb", "bcdbe", "cc", "ca", "eeee"]


@pytest.mark.parametrize("proposer", ["none", "ngram", "draft"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_give_way_come_back_to_their_forms(grammars, schemas, proposer, temperature):
    wide, tight = (
        make_engine(target, PROPOSERS[proposer], rows=4)
        for target in (grammar_cases.WordTarget(slots=4), tightened(grammar_cases.WordTarget(slots=4), 210))
    )
    item = {"type": "integer", "minimum": 1, "maximum": 300}
    long = [
        Constraint.json_schema({"type": "array", "items": item, "minItems": 40, "maxItems": 40 + i}) for i in range(5)
    ]
    params = [SamplingParams(seed=7, temperature=temperature, constraint=each) for each in long]
    rows, others = (
        grammar_cases.complete(engine, grammars, [[5, 6]] * len(params), params) for engine in (tight, wide)
    )
    check_valid(rows, long)
    assert words_of(rows) == words_of(others)
    assert tight.cache_usage().preempted > 0
    assert wide.cache_usage().preempted == 0


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_recurrent_targets_keep_forms(grammars, schemas, temperature, tmp_path):
    config = tiny.ARCHITECTURES["mamba2"]()
    config.vocab_size = grammar_cases.VOCAB
    folder = tiny.save(tmp_path / "mamba2", config, size=grammar_cases.VOCAB)
    checkpoint = load_checkpoint(folder, dtype="float32", device="cpu")
    params = [SamplingParams(seed=7, temperature=temperature, constraint=each) for each in schemas[:12]]
    found = []
    for proposer, k in (("none", 0), ("none", 4), ("ngram", 4)):  # nothing guessed, what is forced, and more
        engine = make_engine(make_target(checkpoint, slots=4, context=256), PROPOSERS[proposer], rows=4, k=k)
        rows = grammar_cases.complete(engine, grammars, [[5, 6]] * len(params), params)
        check_valid(rows, schemas[:12])
        found.append((words_of(rows), engine.stats.tau))
    assert found[0][0] == found[1][0] == found[2][0]
    assert found[0][1] == 1.0 < found[1][1]


def constrained_law(target, prompt):
    """Of each text of the language, the product of the target's laws over what can still become one."""
    law = {}
    for text in LANGUAGE:
        chance, so_far = 1.0, ""
        while True:
            longer = {each[: len(so_far) + 1] for each in LANGUAGE if each.startswith(so_far) and each != so_far}
            if not longer:
                break
            allowed = [1 + ALPHABET.index(each[-1]) for each in longer] + [0] * (so_far in LANGUAGE)
            before = [*prompt, *(1 + ALPHABET.index(c) for c in so_far)]
            p = target.table[before[-2], before[-1]].double().softmax(-1)
            token = 1 + ALPHABET.index(text[len(so_far)]) if so_far != text else 0
            chance *= float(p[token] / p[allowed].sum())
            if so_far == text:
                break
            so_far = text[: len(so_far) + 1]
        law[text] = chance
    return law


@pytest.mark.parametrize("name", EXACT)
def test_texts_are_drawn_from_the_constrained_law(name):
    made = grammar_cases.letters(ALPHABET)
    grammars, target = Grammars(made, vocab=6, end_ids=[0]), ToyTarget(vocab=6, slots=250, context=16)
    proposer = bushy_toy if EXACT[name].trees else toy
    engine = make_engine(target, proposer, verifier=name, k=3, rows=250)
    params = SamplingParams(temperature=1.0, seed=11, constraint=Constraint.regex("|".join(LANGUAGE)))
    rows = grammar_cases.complete(engine, grammars, [[1, 2]] * 1200, [params] * 1200, limit=9)
    counts = Counter("".join(ALPHABET[t - 1] for t in row.token_ids[2:] if t) for row in rows)
    law = constrained_law(target, [1, 2])
    assert sum(law.values()) == pytest.approx(1.0)
    assert set(counts) <= set(LANGUAGE)
    assert g_test([counts[text] for text in LANGUAGE], [law[text] for text in LANGUAGE]).p_value > 1e-3
    assert engine.stats.tau > 1.3


def toy(setup):
    return DraftModelProposer(setup, ToyTarget(vocab=6, slots=setup.slots, context=16, seed=1))


def bushy_toy(setup):
    return TreeProposer(setup, ToyTarget(vocab=6, slots=setup.slots, context=16, seed=1))


def test_what_is_forced_is_what_plain_decoding_must_say(grammars, schemas):
    """Wherever a walk through guesses has led, the grammar says what it says to the text itself."""
    chance = torch.Generator().manual_seed(0)
    for constraint in schemas[:40]:
        grammar, ends = grammars.compile(constraint), frozenset({0})
        walked, read, text = grammar.start(ends), grammar.start(ends), []
        while not walked.done and len(text) < 60:
            bits = torch.from_numpy(walked.allowed())
            legal = ((bits[:, None] >> torch.arange(8)) & 1).flatten().nonzero()[:, 0].tolist()
            if walked.forced is not None:
                assert legal == [walked.forced]
            token = legal[int(torch.randint(len(legal), (), generator=chance))]
            if token == 0:
                break
            for other in legal[:3]:
                if other:
                    walked.push(other)
                    walked.pop()
            assert walked.allowed().tobytes() == read.allowed().tobytes()
            walked.push(token)
            read.advance(token)
            text.append(token)
        for _ in text:
            walked.pop()
        assert walked.allowed().tobytes() == grammar.start(ends).allowed().tobytes()


def test_a_forced_text_takes_few_passes_and_none_where_k_is_0(grammars):
    long = [Constraint.json_schema({"const": {"a long name": "and a long text behind it", "number": 12345}})]
    rows, stats = texts(grammars, long)
    plainly, slow = texts(grammars, long, k=0)
    assert words_of(rows) == words_of(plainly)
    assert stats.passes <= 1 + stats.output_tokens // 30
    assert slow.passes == slow.output_tokens
    few = replace(SamplingParams(constraint=long[0]), k=2)
    engine = make_engine(grammar_cases.WordTarget(), NoProposer, k=4)
    (row,) = grammar_cases.complete(engine, grammars, [[5, 6]], [few])
    assert words_of([row]) == words_of(rows)
    assert max(drafted for drafted, _, _ in row.rounds) == 2
    assert all(row.from_draft[:2])


def test_the_planner_is_not_told_of_what_was_forced(grammars):
    heard = []

    class Planner(FixedPlanner):
        def plan(self, batch, stats):
            heard.append(stats.total)
            return super().plan(batch, stats)

    engine = make_engine(grammar_cases.WordTarget(), draft, k=3)
    engine._planner = Planner(3)
    constraint = Constraint.json_schema(PERSON)
    grammar_cases.complete(engine, grammars, [[5, 6]] * 4, [SamplingParams(constraint=constraint)] * 4)
    assert heard[-1].accepted[3:] == () != engine.stats.accepted[3:]
    assert heard[-1].tau < engine.stats.tau
    assert engine.alternative_stats[0].accepted[3:] == ()
    assert heard[-1].rounds == engine.stats.rounds - 1


def test_rows_without_a_grammar_are_as_they_were(grammars):
    free = SamplingParams(temperature=1.0, seed=3, max_tokens=30)
    bound = replace(free, constraint=Constraint.json_schema(PERSON))
    engine = make_engine(grammar_cases.WordTarget(), draft, verifier="walk")
    mixed = grammar_cases.complete(engine, grammars, [[5, 6], [7, 8], [9, 1]], [free, bound, free], limit=30)
    engine = make_engine(grammar_cases.WordTarget(), draft, verifier="walk")
    alone = grammar_cases.complete(engine, grammars, [[5, 6], [7, 8], [9, 1]], [free] * 3, limit=30)
    assert [row.token_ids for row in mixed[::2]] == [row.token_ids for row in alone[::2]]
    engine = make_engine(grammar_cases.WordTarget(), draft, verifier="walk")
    engine.add(alone[0].request)
    engine._scheduler.admit(engine._target.cache)
    batch = engine._scheduler.next()
    none = tree.empty(1, torch.device("cpu"))
    assert apply_constraints(batch, none, grammar_cases.VOCAB).draft is none
    assert apply_constraints(batch, none, grammar_cases.VOCAB).masks is None


def test_ends_are_where_the_form_may_end(grammars):
    open_ended = Constraint.regex("(ab)+")
    (row,), _ = texts(grammars, [open_ended], "draft")
    said = grammar_cases.words().decode(row.token_ids[2:], skip_special_tokens=True)
    assert said == "ab" * (len(said) // 2) != ""
    (row,), _ = texts(grammars, [open_ended], "draft", ignore_eos=True)
    assert row.finish_reason is FinishReason.LENGTH
    assert 0 not in row.token_ids
    stop = grammar_cases.words().encode("!")[0]
    (row,), _ = texts(grammars, [open_ended], "draft", ignore_eos=True, stop_token_ids=(stop,), logit_bias={stop: 99.0})
    assert row.finish_reason is FinishReason.STOP
    assert row.token_ids[-1] == stop
    assert grammar_cases.words().decode(row.token_ids[2:-1]) in ("ab", "abab")
    (row,), _ = texts(grammars, [open_ended], "draft", min_tokens=9, logit_bias={0: 99.0})
    assert len(row.token_ids) - 2 == 11
    assert row.token_ids[-1] == 0


def test_a_grammar_that_fails_on_the_way_ends_its_own_row_alone(grammars, monkeypatch):
    fine = Constraint.json_schema(PERSON)
    wrong = Constraint.regex("[a-z]{40}")
    grammar = grammars.compile(wrong)
    (alone,), _ = texts(grammars, [fine], "draft")
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
    rows, _ = texts(grammars, [fine, wrong], "draft")
    assert rows[0].token_ids == alone.token_ids
    assert rows[1].finish_reason is FinishReason.ERROR
    assert rows[1].error == "too complex"
    assert rows[1].num_output_tokens >= 10


@pytest.mark.parametrize("raises", [False, True])
def test_a_grammar_that_cannot_be_started_ends_its_own_row_alone(grammars, monkeypatch, raises):
    fine, wrong = Constraint.json_schema(PERSON), Constraint.regex("[b-z]{40}")
    (alone,), _ = texts(grammars, [fine], "draft")
    grammar = grammars.compile(wrong)
    monkeypatch.setattr(grammar, "start", lambda ends: (_ for _ in ()).throw(OutriderError("too complex")))
    engine = make_engine(grammar_cases.WordTarget(), PROPOSERS["draft"], rows=2)
    if raises:  # in the very round that the row ends in
        proposer, failed = engine._proposer, []
        propose = proposer.propose
        monkeypatch.setattr(proposer, "propose", lambda batch: propose(batch) if failed else failed.append(1) or 1 / 0)
        monkeypatch.setattr(engine, "step", lambda step=engine.step: recovering(engine, step))
    params = [SamplingParams(seed=7, constraint=each) for each in (wrong, fine, wrong, wrong)]
    rows = grammar_cases.complete(engine, grammars, [[5, 6]] * 4, params)
    assert [row.finish_reason for row in rows if row.error] == [FinishReason.ERROR] * 3
    assert {row.error for row in rows} == {"too complex", ""}
    assert rows[1].token_ids == alone.token_ids
    assert not engine.busy()
    assert engine.step() == ()
    (again,) = grammar_cases.complete(engine, grammars, [[5, 6]], params[1:2])
    assert again.token_ids == alone.token_ids


def recovering(engine, step):
    try:
        return step()
    except ZeroDivisionError as error:
        return engine.recover(error)


def test_a_round_that_raises_leaves_grammars_where_they_were(grammars, monkeypatch):
    bound = SamplingParams(seed=3, constraint=Constraint.json_schema(PERSON))
    wanted = grammar_cases.complete(make_engine(grammar_cases.WordTarget(), draft), grammars, [[5, 6]] * 2, [bound] * 2)
    engine, rounds = make_engine(grammar_cases.WordTarget(), draft), 0
    step, enter = engine.step, Matcher.push

    def broken(self, token):
        nonlocal rounds
        rounds += 1
        enter(self, token)
        if rounds % 5 == 0:
            raise RuntimeError("out of luck")

    def recovering():
        try:
            return step()
        except RuntimeError as error:
            return engine.recover(error)

    monkeypatch.setattr(Matcher, "push", broken)
    monkeypatch.setattr(engine, "step", recovering)
    rows = grammar_cases.complete(engine, grammars, [[5, 6]] * 2, [bound] * 2)
    assert rounds > 10
    assert [row.token_ids for row in rows] == [row.token_ids for row in wanted]


REFUSED = {
    "no JSON": lambda: Constraint.json_schema("{oops"),
    "no schema": lambda: Constraint.json_schema([1]),
    "a value that is no JSON": lambda: Constraint.json_schema({"const": {1, 2}}),
    "too deep": lambda: Constraint.json_schema('{"items":' * 5000 + "{}" + "}" * 5000),
    "too deep for Python": lambda: Constraint.json_schema('{"items":' * 60000 + "{}" + "}" * 60000),
    "too long": lambda: Constraint.regex("a|" * 200_000),
    "empty": lambda: Constraint.regex(""),
    "no choice": lambda: Constraint.choice([]),
    "one text for choices": lambda: Constraint.choice("abc"),
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


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_or_too_large_is_refused(grammars, case):
    with pytest.raises(OutriderError) as caught:
        grammars.compile(REFUSED[case]())
    assert len(str(caught.value)) < 500


def test_parameters_that_a_form_cannot_keep_are_refused():
    form = Constraint.choice(["a"])
    for wrong in ({"logit_bias": {5: float("-inf")}}, {"min_tokens": 1, "stop_token_ids": (4,)}, {"constraint": "a"}):
        with pytest.raises(OutriderError, match="constraint"):
            SamplingParams(**{"constraint": form} | wrong)
    assert form == Constraint(kind=Kind.CHOICE, source='["a"]')
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
    """On the native kernels as well, whose logits stay packed and whose likeliest ids come with them."""
    told = []
    for k in (0, 4):
        llm = LLM(
            embedded("nano"), proposer="suffix", verifier="walk", dtype=dtype, k=k, max_num_seqs=8, max_model_len=256
        )
        for temperature in (0.0, 1.0):
            params = [
                SamplingParams(temperature=temperature, seed=2, max_tokens=60, logprobs=1, constraint=form)
                for form, _ in KINDS.values()
            ]
            done = llm.generate(["x = 1\n"] * (len(params) + 1), [*params, SamplingParams(max_tokens=40, logprobs=1)])
            told.append([(each.token_ids, each.finish_reason) for each in done])
            for each, (_, good) in zip(done, KINDS.values(), strict=False):
                assert each.finish_reason is FinishReason.LENGTH or good(each.text)
                assert len(each.logprobs) == len(each.token_ids)
                assert all(entry.logprob <= entry.top[0][1] for entry in each.logprobs)
    assert told[:2] == told[2:]


def test_auto_takes_what_is_forced():
    llm = LLM(embedded("nano"), proposer="none", dtype="float32", max_num_seqs=2, max_model_len=256)
    (done,) = llm.generate("x", SamplingParams(constraint=Constraint.json_schema(PERSON), max_tokens=80))
    assert done.stats.tau > 1.5
    assert llm.stats == llm.engine.stats
    assert isinstance(llm.stats, Stats)
