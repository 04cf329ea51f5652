"""The audit certifies an honest pair, and nothing else."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from outrider.audit.distribution import check_distribution, grow, joint_distribution, outcome_of, plan_tests
from outrider.audit.flips import explain_flips, find_flips
from outrider.audit.pair import Outputs, Pair, first_difference
from outrider.audit.prompts import DEFAULT, encode, read_prompts
from outrider.audit.replay import cases, replay
from outrider.audit.run import run_audit
from outrider.core import tree
from outrider.core.params import SamplingParams
from outrider.core.stats import Stats
from outrider.core.types import Needs
from outrider.engine.verifiers import find_verifier
from outrider.errors import OutriderError
from outrider.loader.checkpoint import load_checkpoint
from outrider.loader.embedded import embedded
from outrider.native import rules
from outrider.propose.registry import find_proposer
from outrider.verify.rules import EXACT
from tests.helpers import source, tiny

PROMPTS = ("In the beginning there was", "def area(width, height):\n    return width * height\n\n\ndef volume(")
QUICK = {"k": 2, "samples": 100, "device": "cpu", "threads": 1, "tokens": 6}


class Dishonest:
    """The embedded draft, which samples from q and says that it sampled from a flatter law."""

    def __init__(self, setup):
        self._draft = find_proposer(f"draft:{embedded('nano')}", setup)
        self.needs = self._draft.needs
        self.admit, self.commit, self.release = self._draft.admit, self._draft.commit, self._draft.release

    def propose(self, batch):
        draft = self._draft.propose(batch)
        if draft.q is None:
            return draft
        flat = draft.q.values**0.25
        return replace(draft, q=replace(draft.q, values=flat / flat.sum(-1, keepdim=True).clamp(min=1e-30)))


class Forking:
    """Two guesses for the next token, and so no chain."""

    needs = Needs()

    def __init__(self, setup):
        self._device = setup.device

    def admit(self, slot, request):
        pass

    def propose(self, batch):
        width = tuple(min(2, budget) for budget in batch.draft_budget)
        tokens = torch.tensor([[5, 6]], device=self._device).expand(len(width), 2)
        chain = tree.chain(tokens, width)
        return replace(chain, parent=torch.full_like(tokens, -1), chain=False)

    def commit(self, round):
        pass

    def release(self, slot):
        pass


class Scripted(Pair):
    """A pair without models: the next token is a function of the text, and speculation errs where it is told to."""

    def __init__(self, wrong=(), gap=3.0, dtype=torch.bfloat16, steady=False):
        self.prompts, self.trees, self.dtype = ((1, 2), (3, 4, 5)), False, dtype
        self.kernels, self.steady = "none", steady
        self.wrong, self.gap = set(wrong), gap  # (prompt, position) pairs

    def _next(self, text):
        return (3 * sum(text) + len(text)) % 11

    def _answer(self, request, wrong):
        text = list(request.prompt_token_ids)
        which = 0 if text[0] == 1 else 1
        for _ in range(request.max_tokens):
            off = (which, len(text) - len(self.prompts[which])) in wrong
            text.append((self._next(text) + off) % 11)
        return tuple(text[len(request.prompt_token_ids) :])

    def plain(self, requests, *, alone):
        return Outputs(tokens=tuple(self._answer(request, ()) for request in requests), stats=Stats())

    def speculative(self, requests, verifier, *, k, alone=False, enough=None):
        return Outputs(tokens=tuple(self._answer(request, self.wrong) for request in requests), stats=Stats())

    def logits(self, text):
        likely = self._next(text)
        logits = torch.full((11,), -4.0)
        logits[likely], logits[(likely + 1) % 11] = 8.0, 8.0 - self.gap
        return logits

    def target_distribution(self, logits, params):
        return logits.softmax(-1)

    def uniform(self, seed, position):
        return 0.3


@pytest.fixture(scope="module")
def pair():
    return Pair(str(embedded("mini")), "ngram", PROMPTS, dtype="float32", device="cpu", room=24)


@pytest.fixture
def prompts_file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in PROMPTS))
    return str(path)


def test_the_embedded_pair_passes(prompts_file):
    screen = io.StringIO()
    report = run_audit(None, None, prompts=prompts_file, console=Console(file=screen, width=160), **QUICK)
    assert report["passed"] is True
    assert report["replay"]["unexplained"] == 0
    assert report["replay"]["tokens"] == 6 * report["replay"]["texts"] == 6 * 2 * len(report["replay"]["cases"])
    assert {(test["verifier"], test["top_k"]) for test in report["distribution"]["tests"]} == {
        ("block", 0),
        ("block", 4),
        ("walk", 0),
    }
    assert all(0 < test["acceptance"] < 1 for test in report["distribution"]["tests"])
    assert report["flips"]["tokens"] == 2 * 4 * 6
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert screen.getvalue().count("passed") == 4
    assert "FAILED" not in screen.getvalue()


@pytest.mark.parametrize(("kernels", "quantize"), [("native", "int8"), ("torch", "int4"), ("torch", None)])
def test_what_runs_is_what_is_certified(kernels, quantize, prompts_file):
    words = {"kernels": kernels, "quantize": quantize, "prompts": prompts_file, "console": None}
    report = run_audit(str(embedded("nano")), "ngram", **words, **QUICK)  # it is read thrice, and its size matters not
    name = f"{kernels} {quantize}" if quantize else kernels
    assert report["passed"] is True
    assert report["weight_bits"] == {"int8": 8, "int4": 4, None: 16}[quantize]
    served = "bfloat16" if quantize else str(load_checkpoint(embedded("nano")).dtype).removeprefix("torch.")
    assert (report["flips"]["kernels"], report["flips"]["dtype"]) == (name, served)
    tested = (report["replay"]["kernels"], report["replay"]["dtype"])
    if kernels == "native":  # whose rounding is the same in any company: nothing is forgiven, and nothing is lost
        assert tested == (name, "bfloat16")
        assert report["flips"]["flips"] == report["replay"]["mismatches"] == 0
    else:
        assert tested == ("torch", "float32")


def test_the_quantised_law_in_float32_is_the_quantised_models(pair):
    wide, served = (
        Pair(
            str(embedded("mini")), "none", PROMPTS, dtype=dtype, device="cpu", room=24, kernels="torch", quantize="int4"
        )
        for dtype in ("float32", "auto")
    )
    assert (wide.dtype, served.dtype) == (torch.float32, torch.bfloat16)
    exact, ours, plain = (each.logits(pair.prompts[0]) for each in (wide, served, pair))
    assert (ours - exact).norm() < 0.3 * (plain - exact).norm()


def test_a_dishonest_proposer_fails(prompts_file):
    screen = io.StringIO()
    report = run_audit(
        None, f"{__name__}:Dishonest", prompts=prompts_file, console=Console(file=screen, width=160), **QUICK
    )
    assert report["passed"] is False
    assert report["replay"]["passed"], "greedy texts and seeds do not show it"
    fates = {test["verifier"]: test["passed"] for test in report["distribution"]["tests"] if not test["top_k"]}
    assert fates == {"walk": True, "block": False}
    assert "FAILED" in screen.getvalue()


def test_a_lossy_verifier_fails_whatever_it_shows(monkeypatch, prompts_file):
    fine = {"passed": True}
    monkeypatch.setattr("outrider.audit.run.replay", lambda *_, **__: fine)
    monkeypatch.setattr("outrider.audit.run.check_distribution", lambda *_, **__: fine)
    monkeypatch.setattr("outrider.audit.run.find_flips", lambda *_, **__: None)
    monkeypatch.setattr("outrider.audit.run.explain_flips", lambda *_, **__: fine)
    fate = {
        name: run_audit(None, None, prompts=prompts_file, console=None, verifier=name, **QUICK)["passed"]
        for name in ("block", "lenient")
    }
    assert fate == {"block": True, "lenient": False}


def test_the_law_of_a_lossy_verifier_is_not_the_targets():
    spec = f"draft:{embedded('nano')}"
    pair = Pair(str(embedded("mini")), spec, PROMPTS[:1], dtype="float32", device="cpu", room=8)
    section = check_distribution(pair, find_verifier("typical", spec), k=2, samples=100, seed=1)
    assert not section["passed"]
    assert {t["verifier"]: t["passed"] for t in section["tests"] if not t["top_k"]}["walk"]


def test_the_joint_law_is_the_models_own(pair):
    branches = grow(pair, 0)
    law = joint_distribution(pair, branches, SamplingParams(temperature=1.0))
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-9)
    assert len(law) == 1 + 4 + 16 + 64
    model = load_checkpoint(embedded("mini"), dtype="float32", device="cpu").model
    model.set_attn_implementation("sdpa")
    cell = max((cell for cell in law if -1 not in cell), key=lambda cell: law[cell])
    ids = torch.tensor([[*pair.prompts[0], *cell]])
    with torch.inference_mode():
        chances = model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
    own = sum(chances[len(pair.prompts[0]) - 1 + i, token] for i, token in enumerate(cell)).exp()
    assert law[cell] == pytest.approx(float(own), rel=1e-4)


def test_top_k_leaves_nothing_to_other_tokens(pair):
    law = joint_distribution(pair, grow(pair, 0), SamplingParams(temperature=1.0, top_k=4))
    assert all(chance == 0 for cell, chance in law.items() if -1 in cell)
    assert sum(chance > 0 for chance in law.values()) == 64


def test_every_text_has_its_cell(pair):
    branches = grow(pair, 0)
    law = joint_distribution(pair, branches, SamplingParams(temperature=1.0))
    first = branches.likely[()][1]
    second = branches.likely[first,][0]
    assert outcome_of((first, second, 7_000, 1), branches) in {(first, second, -1), (first, second, 7_000)}
    assert outcome_of((11_999, 1, 2), branches) == (-1,)
    assert outcome_of((first, second, branches.likely[first, second][3], 9), branches) in law


def test_the_draw_lies_where_the_token_was_found(pair):
    """The number that picked a token lies in that token's interval, so the gap between a token and itself is none."""
    params = SamplingParams(temperature=0.8, max_tokens=6, seed=3)
    (request, _) = pair.requests(params)
    (text, _) = pair.plain(pair.requests(params), alone=False).tokens
    for at, token in enumerate(text):
        read = (*request.prompt_token_ids, *text[:at])
        end = pair.target_distribution(pair.logits(read), params).double().cumsum(-1)
        drawn = pair.uniform(request.seed, len(read)) * float(end[-1])
        assert (float(end[token - 1]) if token else 0.0) - 1e-5 <= drawn <= float(end[token]) + 1e-5


def test_trees_go_to_the_verifiers_that_take_them():
    pair = Pair(str(embedded("mini")), f"{__name__}:Forking", PROMPTS[:1], dtype="float32", device="cpu", room=16)
    section = replay(pair, EXACT["walk"], k=2, depths=(1,), tokens=4, seed=0)
    assert section["passed"]
    assert {case["verifier"] for case in section["cases"]} == {"walk", "coupled", "siblings", "traversal"}
    assert {rule.name for rule, _ in plan_tests(pair, EXACT["walk"])} == {"walk", "traversal"}


def test_replay_counts_and_explains_what_differs():
    every = len(list(cases(Scripted(), EXACT["walk"], k=2, depths=(1,))))
    section = replay(Scripted({(1, 4)}), EXACT["walk"], k=2, depths=(1,), tokens=8, seed=0)
    assert not section["passed"]
    assert section["mismatches"] == section["unexplained"] == every
    detail = next(detail for detail in section["details"] if not detail["temperature"])
    assert (detail["prompt"], detail["position"]) == (1, 4)
    assert detail["speculative_token"] == (detail["plain_token"] + 1) % 11
    assert detail["gap"] == pytest.approx(3.0)


def test_replay_forgives_rounding_and_says_so():
    greedy = [case for case in cases(Scripted(), EXACT["walk"], k=2, depths=(1,)) if not case.sampled]
    section = replay(Scripted({(0, 2)}, gap=1e-5), EXACT["walk"], k=2, depths=(1,), tokens=8, seed=0)
    near = [detail for detail in section["details"] if not detail["temperature"]]
    assert len(near) == len(greedy)
    assert all(detail["rounding"] for detail in near)
    assert not any(detail["rounding"] for detail in section["details"] if detail["temperature"])


def test_replay_forgives_nothing_where_rounding_is_no_excuse():
    section = replay(Scripted({(0, 2)}, gap=1e-5, steady=True), EXACT["walk"], k=2, depths=(1,), tokens=8, seed=0)
    assert section["mismatches"] == section["unexplained"] > 0
    assert not section["passed"]


@pytest.mark.parametrize(
    ("gap", "dtype", "passed"), [(0.2, "bfloat16", True), (0.3, "bfloat16", False), (0.2, "float16", False)]
)
def test_flips_are_followed_along_the_plain_text(gap, dtype, passed):
    scripted = Scripted({(0, 1), (0, 5), (1, 9)}, gap=gap, dtype=getattr(torch, dtype))
    section = explain_flips(scripted, find_flips(scripted, EXACT["walk"], k=2, tokens=10))
    assert section["passed"] is passed
    assert [(flip["prompt"], flip["position"]) for flip in section["details"]] == [(0, 1), (1, 9), (0, 5)]
    assert section["flips_per_1000"] == 3 / 20 * 1000
    assert section["largest_margin"] == pytest.approx(gap)
    assert section["plain_batched_flips_per_1000"] == 0


def test_first_difference():
    assert first_difference((1, 2, 3), (1, 2, 3)) is None
    assert first_difference((1, 2, 3), (1, 0, 0)) == 1


def test_prompts_are_texts_or_messages(tmp_path, pair):
    path = tmp_path / "prompts.jsonl"
    turns = [{"role": "user", "content": "hi"}]
    path.write_text(json.dumps({"prompt": "one"}) + "\n\n" + json.dumps({"messages": turns}) + "\n")
    assert read_prompts(str(path)) == ("one", (turns[0],))
    assert read_prompts(None) == DEFAULT
    tokenizer = load_checkpoint(embedded("mini")).tokenizer
    assert len(encode(tokenizer, turns)) > len(encode(tokenizer, "hi"))
    for torn in ("\ud800", [{"role": "user", "content": "\ud800"}]):
        with pytest.raises(OutriderError, match="half of a surrogate pair"):
            encode(tokenizer, torn)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no prompts"),
        ('{"prompt": "a"}\n{broken', ":2: not JSON"),
        ('{"text": "a"}', ":1: neither .*; give one of them"),
        ('{"prompt": ""}', ":1: neither"),
        ('{"messages": [{"role": "user"}]}', ":1: neither"),
    ],
)
def test_what_is_no_prompt_is_refused(tmp_path, content, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    with pytest.raises(OutriderError, match=message):
        read_prompts(str(path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": 0}, "k is 0"),
        ({"k": 2.5}, "k is 2.5"),
        ({"proposer": ""}, "use none for plain decoding"),
        ({"proposer": "sufix"}, "did you mean suffix?"),
        ({"proposer": "ngram", "verifier": "block"}, "trees from ngram; use one of walk"),
        ({"samples": 10}, "samples is 10"),
        ({"tokens": 1}, "tokens is 1"),
        ({"threads": 0}, "threads is 0"),
        ({"tokens": 4000}, "shorten the prompts"),
        ({"prompts": "nowhere.jsonl"}, "cannot be read"),
        ({"verifier": "psychic"}, "unknown"),
        ({"quantize": "int3"}, "quantize 'int3' is unknown"),
        ({"kernels": "quick"}, "kernels 'quick' is unknown"),
    ],
)
def test_mistakes_are_named(change, message):
    with pytest.raises(OutriderError, match=message):
        run_audit(None, **{"proposer": None, "prompts": None, "console": None, **QUICK, **change})


@pytest.mark.skipif(not tiny.compiles(), reason="no C++ compiler here")
def test_a_broken_native_rule_fails(monkeypatch):
    """The audit runs the native rules, as `run` and `serve` do, and finds a fault in them."""
    judge = rules._judge

    def broken(library, rule, draft, p, noise):
        verdict = judge(library, rule, draft, p, noise)
        return replace(verdict, bonus=verdict.bonus ^ 1) if draft.size else verdict

    monkeypatch.setattr(rules, "_judge", broken)
    report = run_audit(None, "ngram", k=3, prompts=None, samples=100, device="cpu", threads=1, tokens=8, console=None)
    assert not report["passed"]


def test_only_the_builder_makes_engines():
    """So that what is audited and tuned is what runs."""
    pattern = re.compile(r"(?<![\w.])Engine\(")
    makers = {path.name for path in source.files() if pattern.search(path.read_text())}
    assert makers == {"build.py"}
