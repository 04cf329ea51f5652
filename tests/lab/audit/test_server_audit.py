"""Tests that the audit of a server passes for an exact one and names the defect of a broken one."""

import asyncio
import json
import re
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from outrider.core.config import EngineConfig
from outrider.core.params import SamplingParams
from outrider.errors import OutriderError
from outrider.lab.audit.pair import Pair
from outrider.lab.audit.server import run as server_run
from outrider.lab.audit.server.client import Answer, open_completions, request_body
from outrider.lab.audit.server.distribution import CASES, compare, distance
from outrider.lab.audit.server.hypotheses import EXACT, hypotheses
from outrider.lab.audit.server.model import Model, Texts
from outrider.lab.audit.server.outcomes import OTHER, grow
from outrider.lab.audit.server.replay import replay
from outrider.lab.audit.server.run import run_server_audit
from outrider.lab.audit.server.settings import ServerOptions, check_given
from outrider.lab.audit.settings import Settings
from outrider.lab.audit.statistics import chi_square_tail, noncentral_tail, power
from tests.helpers.commands import invoke, succeed
from tests.helpers.fake_server import NAME, FakeEngine, FakeServer, save_pair, serving, warp

PROMPT = "aab"
REPEATING = "zebra zoo"  # what follows repeats, so that penalties matter
CONTINUED, COOLER, TOP_K, TOP_P, PENALTIES = CASES[1:]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def engine(folders):
    return FakeEngine(*folders)


@pytest.fixture
def fake(engine):
    engine.defect = ""
    yield FakeServer(engine)
    engine.defect = ""


def make_pair(folder):
    """Return a model without a draft."""
    return Pair(EngineConfig(target=folder, proposer="none", dtype="float32", device="cpu"), (PROMPT,), room=32)


@pytest.fixture(scope="module")
def pair(folders):
    return make_pair(folders[0])


@pytest.fixture
def audit(folders, fake, monkeypatch, tmp_path):
    """A function that audits the fake server without HTTP, with one prompt and some of the tests."""
    prompts = tmp_path / "prompts.jsonl"

    @asynccontextmanager
    async def connect(url, **_):
        yield fake

    monkeypatch.setattr(server_run, "connect", connect)

    def run(defect="", *, cases=(CONTINUED,), samples=600, draft=True):
        prompts.write_text(json.dumps({"prompt": REPEATING if PENALTIES in cases else PROMPT}) + "\n")
        fake.engine.defect = defect
        options = ServerOptions(
            server="http://fake",
            draft=str(folders[1]) if draft else None,
            max_tokens=6,
            tests=",".join(case.key for case in cases),
        )
        settings = Settings(
            engine=EngineConfig(target=str(folders[0]), k=3, device="cpu", threads=1),
            prompts=str(prompts),
            samples=samples,
        )
        return run_server_audit(settings, options, console=None)

    return run


def causes(report):
    return [each["cause"] for each in report["diagnosis"]["causes"]]


@pytest.mark.fast_cases("llama.cpp", "")
@pytest.mark.parametrize("token_ids", ["vLLM", "llama.cpp", ""])
def test_an_exact_server_passes(audit, fake, token_ids):
    fake.returns_ids_as = token_ids
    report = audit(cases=(TOP_K, PENALTIES), samples=200)
    assert report["passed"]
    assert report["replay"]["differences"] == 0
    # The last token is a part of a character, which its text does not tell.
    assert (report["replay"]["tokens"], report["replay"]["unread_characters"]) == ((6, 0) if token_ids else (5, 1))
    assert report["asked"]["returned"] == ("token ids" if token_ids else "text")
    assert len(report["distribution"]["tests"]) == 2
    assert report["distribution"]["significance"] == pytest.approx(1e-4 / 2)
    assert report["diagnosis"] is None
    assert any("text only" in note for note in report["notes"]) is not bool(token_ids)


DEFECTS = {  # the case that shows each, and its cause in the report
    "greedy": (CONTINUED, "every token is the likeliest one"),
    "greedy verifier": (CONTINUED, "verified greedily"),
    "hot draft": (COOLER, "the temperature is ignored for the draft"),
    "greedy draft": (CONTINUED, "takes it for a sample"),
    "wrong residual": (CONTINUED, "not of the residual"),
    "late filters": (TOP_P, "applied after the ratio"),
    "stale penalties": (PENALTIES, "do not count the draft tokens of the same round"),
    "unverified": (CONTINUED, "are not verified"),
}


@pytest.mark.fast_cases("greedy verifier", "stale penalties")
@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_named(audit, defect):
    case, cause = DEFECTS[defect]
    report = audit(defect, cases=(case,), samples=1000)
    assert not report["passed"]
    found = causes(report)
    assert any(cause in each for each in found)
    # A draft that takes its likeliest token looks like a greedy verifier where the draft is too sure.
    # Penalties can only be seen in a test with penalties.
    assert len(found) == 1 or defect in ("greedy draft", "greedy")


def test_defects_without_the_draft(audit, fake):
    report = audit("greedy verifier", samples=600, draft=False)
    assert causes(report) == ["draft tokens are verified greedily at a temperature above 0"]
    fake.returns_ids_as = ""
    report = audit("unverified", samples=600, draft=False)
    assert not report["passed"]
    assert causes(report) == []
    assert "No known defect explains" in report["notes"][-1]


def test_another_model_fails_the_replay(audit, fake, folders):
    fake.engine = FakeEngine(folders[1], folders[1])
    report = audit(samples=200)
    assert not report["replay"]["passed"]
    detail = report["replay"]["details"][0]
    assert detail["margin"] > detail["tolerance"]
    assert "other weights" in report["notes"][0]


def test_distributions_are_those_of_the_reference(pair, engine):
    """The distribution of the exact server, by the chain rule over the fake server's own sampler."""
    prompt = list(pair.prompts[0])
    engine.defect = ""
    for case in (CONTINUED, TOP_K, TOP_P, PENALTIES):
        tree = grow(Model(pair), pair.prompts[0], depth=2, width=3)
        distribution = tree.distribution(EXACT, case.params)
        assert sum(distribution.values()) == pytest.approx(1)
        body = {name: getattr(case.params, name) for name in ("temperature", "top_k", "top_p")}
        body |= {name: getattr(case.params, name) for name in ("presence_penalty", "frequency_penalty")}
        for outcome, prob in distribution.items():
            if OTHER in outcome:
                continue
            expected = 1.0
            for position, token in enumerate(outcome):
                before = list(outcome[:position])
                logits = engine.logits(0, prompt + before)
                expected *= warp(logits, body, before, case.params.temperature, True)[token]
            assert prob == pytest.approx(expected, abs=1e-5)


def test_every_distribution_sums_to_one_and_is_exact_where_it_does_not_apply(pair, folders):
    draft = Model(make_pair(folders[1]))
    tree = grow(Model(pair), pair.prompts[0], depth=2, width=3, draft=draft)
    exact = tree.distribution(EXACT, PENALTIES.params)
    plain = tree.distribution(EXACT, CONTINUED.params)
    for defect in hypotheses(draft=True, k=3):
        assert sum(tree.distribution(defect, PENALTIES.params).values()) == pytest.approx(1, abs=1e-6)
        distribution = tree.distribution(defect, CONTINUED.params)
        assert sum(distribution.values()) == pytest.approx(1, abs=1e-6)
        elsewhere = "penalties" in defect.cause or "top_k" in defect.cause
        if elsewhere and not re.search("^temperature and|default", defect.cause):
            assert distance(distribution, plain) < 1e-9
    assert distance(exact, plain) > 0


def test_a_text_has_the_probability_of_all_its_tokenizations(pair):
    class Merged(Texts):
        """A tokenizer in which one more token has the text of another one."""

        def after(self, prompt, output):
            return "".join("xx" if token == twin else chr(97 + token % 26) for token in output)

        def beginnings(self, text):
            return [token for token in range(pair.vocab) if text.decode().startswith(self.after((), (token,)))]

    target = Model(pair)
    twin = int(target.logits(pair.prompts[0]).topk(4).indices[3])
    texts = Merged(pair.tokenizer, pair.vocab)
    tree = grow(target, pair.prompts[0], depth=1, width=2, texts=texts)
    distribution = tree.distribution(EXACT, SamplingParams(temperature=1.0))
    p = target.logits(pair.prompts[0]).softmax(-1)
    for text in set(tree.texts.values()):
        expected = sum(float(p[token]) for token in range(pair.vocab) if texts.after((), (token,)) == text)
        assert distribution[(text,)] == pytest.approx(expected, abs=1e-3)
    assert tree.ambiguity > 0
    assert tree.outcome(Answer(text="?", tokens=None, ended=False)) == (OTHER,)


def test_replay_measures_margins(pair):
    texts = Texts(pair.tokenizer, pair.vocab)
    prompt = texts.encode(REPEATING)
    tokens = []
    for _ in range(5):
        tokens.append(int(pair.logits((*prompt, *tokens)).argmax()))
    text = texts.after(prompt, tokens)
    for answer in (Answer(text=text, tokens=tuple(tokens), ended=False), Answer(text=text, tokens=None, ended=False)):
        section = replay(pair, texts, [(REPEATING, prompt)], [answer], dtype=torch.float32, rounding=0.0)
        assert (section.passed, section.tokens) == (True, 5)
    order = pair.logits((*prompt, *tokens[:2])).argsort(descending=True).tolist()
    wrong = (*tokens[:2], order[3], *tokens[3:])
    answer = Answer(text="", tokens=wrong, ended=False)
    section = replay(pair, texts, [(REPEATING, prompt)], [answer], dtype=torch.float32, rounding=0.0)
    first = section.details[0]
    assert (first.position, first.server_token, first.model_token) == (2, order[3], order[0])
    assert not section.passed
    tolerant = replay(pair, texts, [(REPEATING, prompt)], [answer], dtype=torch.float32, rounding=1e3)
    assert tolerant.passed
    assert tolerant.near_ties == tolerant.differences > 0


@pytest.mark.parametrize(
    ("returns_ids_as", "refused", "fields"),
    [
        ("vLLM", (), {"return_token_ids"}),
        ("vLLM", ("return_tokens",), {"return_token_ids"}),
        ("llama.cpp", (), {"return_tokens", "verbose"}),
        ("llama.cpp", ("return_token_ids", "min_p"), {"return_tokens", "verbose"}),
        ("", (), set()),
    ],
)
def test_a_server_is_asked_for_token_ids_in_its_own_way(fake, returns_ids_as, refused, fields):
    fake.returns_ids_as = returns_ids_as
    fake.refused = refused
    tokens = tuple(fake.engine.tokenizer.encode(PROMPT))
    completions = asyncio.run(open_completions(fake, NAME, PROMPT, tokens, chat=False, concurrency=1))
    assert set(completions.abilities.id_fields) == fields
    assert completions.abilities.neutral is ("min_p" not in refused)
    answer = asyncio.run(completions.ask(PROMPT, tokens, SamplingParams(temperature=0.0), max_tokens=4))
    assert (answer.tokens is not None) == bool(fields)
    assert fields <= set(fake.bodies[-1])


def test_requests_switch_filters_off(fake):
    fake.refused = ("return_token_ids", "min_p")
    tokens = tuple(fake.engine.tokenizer.encode(PROMPT))
    completions = asyncio.run(open_completions(fake, NAME, PROMPT, tokens, chat=False, concurrency=1))
    assert not completions.abilities.token_ids
    assert not completions.abilities.neutral
    abilities = replace(completions.abilities, neutral=True)
    body = request_body(NAME, PROMPT, tokens, replace(TOP_K.params, max_tokens=3, seed=5), abilities)
    assert (body["top_k"], body["min_p"], body["top_p"], body["seed"]) == (3, 0.0, 1.0, 5)
    body = request_body(NAME, PROMPT, tokens, replace(PENALTIES.params, max_tokens=3), abilities)
    assert (body["presence_penalty"], body["frequency_penalty"]) == (1.0, 1.0)
    assert "seed" not in body


def test_a_server_with_another_tokenizer_is_refused(fake):
    fake.reads_ids = False
    with pytest.raises(OutriderError, match=r"reads 3 tokens for a prompt that has 2"):
        asyncio.run(open_completions(fake, NAME, PROMPT, (1, 2), chat=False, concurrency=1))


def test_noncentral_chi_square():
    rng = np.random.default_rng(0)
    draws = rng.noncentral_chisquare(7, 11.0, 200_000)
    assert noncentral_tail(20.0, 7, 11.0) == pytest.approx((draws >= 20).mean(), abs=5e-3)
    assert noncentral_tail(20.0, 7, 0.0) == chi_square_tail(20.0, 7)
    assert noncentral_tail(1e7, 7, 1e7) == pytest.approx(0.5, abs=0.01)
    assert power(7, 0.0, 0.01) == pytest.approx(0.01, rel=1e-3)
    assert power(7, 1e9, 0.01) == pytest.approx(1.0)
    assert power(7, 30.0, 0.01, allowed=30.0) == pytest.approx(0.01, rel=1e-3)


def test_rounding_is_not_a_defect():
    distribution = {(0,): 0.5, (1,): 0.5}
    counts = {(0,): 5300, (1,): 4700}
    assert compare(counts, distribution, 10_000, 0.0).p_value < 1e-6
    assert compare(counts, distribution, 10_000, 0.01).p_value > 0.1
    assert compare({(0,): 9, (2,): 1}, distribution, 10, 0.01).p_value == 0  # an impossible outcome is never rounding


def test_command_over_http(fake, folders):
    with serving(fake) as url:
        arguments = ["audit", "--server", url, "--target", str(folders[0]), "--samples", "100", "--max-tokens", "3"]
        arguments += ["--tests", "first"]
        arguments += ["--threads", "1", "--json"]
        result = succeed(*arguments)
        document = json.loads(result.stdout.splitlines()[-1])
        assert document["passed"]
        assert document["distribution"]["power"]
        fake.engine.defect = "greedy"
        result = invoke(*arguments)
        assert result.exit_code == 1
        assert "every token is the likeliest one" in result.output


def test_mistakes_have_one_line(fake, folders):
    target = str(folders[0])
    with serving(fake) as url:
        for server, others, message in (
            ("localhost:1", [], "is not the URL of a server"),
            ("http://127.0.0.1:9/v1", [], "cannot be reached"),
            (url, ["--tests", "all"], "--tests has 'all'; use first, sampled"),
            (url, ["--model", "nothing"], "has no model 'nothing'; use --model tiny"),
            (url.replace("/v1", "/wrong"), [], "answered 404; check the URL"),
        ):
            result = invoke("audit", "--server", server, "--target", target, *others)
            assert result.exit_code == 2
            assert message in result.output
    with pytest.raises(OutriderError, match="--proposer does not go with --server"):
        check_given("http://a", {"proposer"})
    with pytest.raises(OutriderError, match="--k is the draft length of --draft with --server"):
        check_given("http://a", {"k"})
    check_given("http://a", {"k", "draft"})
    check_given(None, {"k"})
    result = invoke("audit", "--server", "http://127.0.0.1:9", "--draft", "@nano", "--k", "0")
    assert "k is 0; use a number of draft tokens from 1 to 256" in result.output
    with pytest.raises(OutriderError, match="--draft needs --server"):
        check_given(None, {"draft"})
