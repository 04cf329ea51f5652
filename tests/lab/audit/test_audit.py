"""Tests that the audit passes for exact pairs and fails for all others."""

import io
import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from outrider.core import tree
from outrider.core.config import EngineConfig
from outrider.core.params import SamplingParams
from outrider.core.stats import Stats
from outrider.core.types import Needs
from outrider.drafting.propose.registry import find_proposer
from outrider.engine.verifiers import find_verifier
from outrider.errors import OutriderError
from outrider.lab.audit.distribution import check_distribution, grow, joint_distribution, outcome_of, plan_tests
from outrider.lab.audit.flips import explain_flips, find_flips
from outrider.lab.audit.pair import Outputs, Pair, first_difference
from outrider.lab.audit.prompts import DEFAULT, encode, read_prompts
from outrider.lab.audit.replay import cases, replay
from outrider.lab.audit.report import flip_rows, show
from outrider.lab.audit.result import AuditResult
from outrider.lab.audit.run import run_audit
from outrider.lab.audit.settings import Settings
from outrider.models.loader.embedded import embedded
from outrider.models.loader.load import load_checkpoint
from outrider.models.native.rules import fastest_verifier
from outrider.models.torch.checkpoint import Precision, WeightFormat
from outrider.verify.rules import EXACT
from tests.helpers import source, tiny
from tests.helpers.configured import with_engine

PROMPTS = ("In the beginning there was", "def area(width, height):\n    return width * height\n\n\ndef volume(")
QUICK = {"k": 2, "samples": 100, "device": "cpu", "threads": 1, "max_tokens": 6}


def asked(**options):
    return with_engine(Settings, **QUICK | options)


class WrongQ:
    """The embedded draft. It states a flatter q than the one that it samples from."""

    def __init__(self, setup):
        self._draft = find_proposer(f"draft:{embedded('nano')}", setup)
        self.needs = self._draft.needs
        self.admit = self._draft.admit
        self.commit = self._draft.commit
        self.release = self._draft.release

    def propose(self, batch):
        draft = self._draft.propose(batch)
        if draft.q is None:
            return draft
        flat = draft.q.values**0.25
        return replace(draft, q=replace(draft.q, values=flat / flat.sum(-1, keepdim=True).clamp(min=1e-30)))


class TwoChildren:
    """Drafts a tree: two tokens after the last committed one."""

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


class ScriptedPair(Pair):
    """A pair without models. The next token is a function of the tokens before, and speculation has given errors."""

    def __init__(self, wrong=(), gap=3.0, dtype=torch.bfloat16, steady=False):
        self.prompts = ((1, 2), (3, 4, 5))
        self.trees = False
        self.dtype = dtype
        self.precision = Precision(weights=WeightFormat(("bfloat16",), 16), dtype=dtype)
        self.kernels = "none"
        self.steady = steady
        self.wrong = set(wrong)  # (prompt, position) of wrong speculative tokens
        self.gap = gap  # between the logits of the right and the wrong token

    def _next(self, tokens):
        return (3 * sum(tokens) + len(tokens)) % 11

    def _complete(self, request, wrong):
        tokens = list(request.prompt_token_ids)
        prompt = 0 if tokens[0] == 1 else 1
        for _ in range(request.max_tokens):
            is_wrong = (prompt, len(tokens) - len(self.prompts[prompt])) in wrong
            tokens.append((self._next(tokens) + is_wrong) % 11)
        return tuple(tokens[len(request.prompt_token_ids) :])

    def plain(self, requests, *, alone):
        return Outputs(tokens=tuple(self._complete(request, ()) for request in requests), stats=Stats())

    def speculative(self, requests, verifier, *, k, alone=False, enough=None):
        return Outputs(tokens=tuple(self._complete(request, self.wrong) for request in requests), stats=Stats())

    def logits(self, text):
        token = self._next(text)
        logits = torch.full((11,), -4.0)
        logits[token] = 8.0
        logits[(token + 1) % 11] = 8.0 - self.gap
        return logits

    def target_distribution(self, logits, params):
        return logits.softmax(-1)

    def uniform(self, seed, position):
        return 0.3


def make_config(proposer, **settings):
    """Return the configuration of a pair with the embedded target, in float32 unless `settings` says otherwise."""
    return EngineConfig(target=embedded("mini"), proposer=proposer, device="cpu", **{"dtype": "float32"} | settings)


@pytest.fixture(scope="module")
def pair():
    return Pair(make_config("ngram"), PROMPTS, room=24)


@pytest.fixture
def prompts_file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in PROMPTS))
    return str(path)


def test_embedded_pair_passes(prompts_file):
    printed = io.StringIO()
    report = run_audit(asked(prompts=prompts_file), console=Console(file=printed, width=160))
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
    assert printed.getvalue().count("passed") == 1 + 3 + 1 + 1  # replay, distribution, flips and the verdict
    assert "FAILED" not in printed.getvalue()


@pytest.mark.fast_cases("native-int8")
@pytest.mark.parametrize(("kernels", "quantize"), [("native", "int8"), ("torch", "int4"), ("torch", None)])
def test_audit_uses_the_kernels_and_quantization_of_the_user(kernels, quantize, prompts_file):
    nano = str(embedded("nano"))  # a small model, which is loaded three times
    settings = asked(target=nano, proposer="ngram", kernels=kernels, quantize=quantize, prompts=prompts_file)
    report = run_audit(settings, console=None)
    name = f"{kernels} {quantize}" if quantize else kernels
    assert report["passed"] is True
    own_dtype = load_checkpoint(embedded("nano"), kernels=kernels).dtype
    assert report["flips"]["weight_bits"] == {"int8": 8, "int4": 4, None: 8 * own_dtype.itemsize}[quantize]
    dtype = "bfloat16" if quantize else str(own_dtype).removeprefix("torch.")
    assert (report["flips"]["kernels"], report["flips"]["dtype"]) == (name, dtype)
    tested = (report["replay"]["kernels"], report["replay"]["dtype"])
    if kernels == "native":  # its rounding does not depend on the batch, so no difference is allowed
        assert tested == (name, "bfloat16")
        assert report["flips"]["flips"] == report["replay"]["mismatches"] == 0
    else:
        assert tested == ("torch", "float32")


@pytest.mark.slow
def test_quantized_pair_in_float32_has_the_logits_of_the_quantized_model(pair):
    widened, quantized = (
        Pair(make_config("none", dtype=dtype, kernels="torch", quantize="int4"), PROMPTS, room=24)
        for dtype in ("float32", "auto")
    )
    assert (widened.dtype, quantized.dtype) == (torch.float32, torch.bfloat16)
    prompt = pair.prompts[0]
    exact = widened.logits(prompt)
    quantized_error = (quantized.logits(prompt) - exact).norm()
    unquantized_error = (pair.logits(prompt) - exact).norm()
    assert quantized_error < 0.3 * unquantized_error


def test_proposer_with_wrong_q_fails():
    pair = Pair(make_config(f"{__name__}:WrongQ"), PROMPTS, room=8)
    distribution = check_distribution(pair, EXACT["block"], k=2, samples=100, seed=1)
    passed = {(test.verifier, test.top_k): test.passed for test in distribution.tests}
    assert passed[("walk", 0)]
    assert not passed[("block", 0)]
    printed = io.StringIO()
    show(scripted_result(pair, distribution=distribution), Console(file=printed, width=160))
    lines = printed.getvalue().splitlines()
    rows = [line for line in lines if " samples " in line]
    assert ["FAILED" in row for row in rows] == [not test.passed for test in distribution.tests]
    assert "FAILED" in lines[-1]


def scripted_result(pair, **fields):
    """The result of an audit that passes, if `fields` do not say otherwise. `pair` gives the load check."""
    scripted = ScriptedPair()
    sections = {
        "replay": replay(scripted, EXACT["block"], k=2, depths=(1,), tokens=8, seed=0),
        "distribution": SimpleNamespace(passed=True),
        "flips": explain_flips(scripted, find_flips(scripted, EXACT["block"], k=2, tokens=8)),
    }
    common = {"k": 2, "placements": (), "load_check": pair.load_check, "seed": 0, "hardware": {}}
    return AuditResult(**{"rule": EXACT["block"]} | common | sections | fields)


def test_a_verdict_stands_beside_the_row_that_it_judges():
    scripted = ScriptedPair({(0, 1)}, gap=2.0)
    flips = explain_flips(scripted, find_flips(scripted, EXACT["walk"], k=2, tokens=10))
    assert [row.passed for row in flip_rows(flips)] == [None, None, False]
    assert [row.passed for row in flip_rows(replace(flips, flips=()))] == [True, None]


def test_lossy_verifier_fails_even_if_all_tests_pass(pair):
    assert scripted_result(pair).passed
    assert not scripted_result(pair, rule=find_verifier("lenient", f"draft:{embedded('nano')}")).passed
    assert not scripted_result(pair, distribution=SimpleNamespace(passed=False)).passed


compiled = pytest.mark.skipif(not tiny.compiles(), reason="no C++ compiler")
DRAFT_SETTINGS = [
    {"draft_window": 16},
    pytest.param({"draft_quantize": "int4"}, marks=compiled),
    pytest.param({"draft_candidates": 1}, marks=compiled),
]


@pytest.mark.fast_cases("draft_candidates")
@pytest.mark.parametrize("settings", DRAFT_SETTINGS, ids=", ".join)
def test_audit_of_draft_settings(prompts_file, settings):
    draft = f"draft:{embedded('nano')}"
    whole, worse = (Pair(make_config(draft, **each), PROMPTS, room=24) for each in ({}, settings))
    params = SamplingParams(temperature=0.0, max_tokens=16, seed=1)
    plain = worse.plain(worse.requests(params), alone=False)
    drafted = [pair.speculative(pair.requests(params), EXACT["walk"], k=4) for pair in (whole, worse)]
    assert drafted[0].tokens == drafted[1].tokens == plain.tokens
    assert drafted[0].stats.accepted != drafted[1].stats.accepted  # the draft has read less, or has other weights
    with pytest.raises(OutriderError, match="the proposer ngram has no draft that reads the text"):
        run_audit(asked(proposer="ngram", prompts=prompts_file, **settings), console=None)


@pytest.mark.slow
def test_distribution_test_fails_for_a_lossy_verifier():
    spec = f"draft:{embedded('nano')}"
    pair = Pair(make_config(spec), PROMPTS[:1], room=8)
    section = check_distribution(pair, find_verifier("typical", spec), k=2, samples=100, seed=1)
    assert not section.passed
    results = {test.verifier: test.passed for test in section.tests if not test.top_k}
    assert results["walk"]


def test_joint_distribution_equals_that_of_transformers(pair):
    branches = grow(pair, 0)
    distribution = joint_distribution(pair, branches, SamplingParams(temperature=1.0))
    assert sum(distribution.values()) == pytest.approx(1.0, abs=1e-9)
    assert len(distribution) == 1 + 4 + 16 + 64
    model = load_checkpoint(embedded("mini"), dtype="float32", device="cpu").model
    model.set_attn_implementation("sdpa")
    likely = [outcome for outcome in distribution if -1 not in outcome]
    outcome = max(likely, key=lambda tokens: distribution[tokens])
    ids = torch.tensor([[*pair.prompts[0], *outcome]])
    with torch.inference_mode():
        logprobs = model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
    expected = sum(logprobs[len(pair.prompts[0]) - 1 + i, token] for i, token in enumerate(outcome)).exp()
    assert distribution[outcome] == pytest.approx(float(expected), rel=1e-4)


def test_top_k_gives_other_tokens_probability_zero(pair):
    distribution = joint_distribution(pair, grow(pair, 0), SamplingParams(temperature=1.0, top_k=4))
    assert all(prob == 0 for outcome, prob in distribution.items() if -1 in outcome)
    assert sum(prob > 0 for prob in distribution.values()) == 64


def test_outcome_of_output_tokens(pair):
    branches = grow(pair, 0)
    distribution = joint_distribution(pair, branches, SamplingParams(temperature=1.0))
    first = branches.likely[()][1]
    second = branches.likely[first,][0]
    assert outcome_of((first, second, 7_000, 1), branches) in {(first, second, -1), (first, second, 7_000)}
    assert outcome_of((11_999, 1, 2), branches) == (-1,)
    assert outcome_of((first, second, branches.likely[first, second][3], 9), branches) in distribution


def test_uniform_number_is_in_the_interval_of_the_sampled_token(pair):
    """So the gap of a token to itself is 0."""
    params = SamplingParams(temperature=0.8, max_tokens=6, seed=3)
    request, _ = pair.requests(params)
    tokens, _ = pair.plain(pair.requests(params), alone=False).tokens
    for i, token in enumerate(tokens):
        prefix = (*request.prompt_token_ids, *tokens[:i])
        cdf = pair.target_distribution(pair.logits(prefix), params).double().cumsum(-1)
        uniform = pair.uniform(request.seed, len(prefix)) * float(cdf[-1])
        begin = float(cdf[token - 1]) if token else 0.0
        assert begin - 1e-5 <= uniform <= float(cdf[token]) + 1e-5


def test_trees_are_tested_with_verifiers_of_trees():
    pair = Pair(make_config(f"{__name__}:TwoChildren"), PROMPTS[:1], room=16)
    section = replay(pair, EXACT["walk"], k=2, depths=(1,), tokens=4, seed=0)
    assert section.passed
    assert {case.verifier for case in section.cases} == {"walk", "coupled", "siblings", "traversal"}
    assert {rule.name for rule, _ in plan_tests(pair, EXACT["walk"])} == {"walk", "traversal"}


def test_replay_reports_differences():
    num_cases = len(list(cases(ScriptedPair(), EXACT["walk"], k=2, depths=(1,))))
    section = replay(ScriptedPair({(1, 4)}), EXACT["walk"], k=2, depths=(1,), tokens=8, seed=0)
    assert not section.passed
    assert section.mismatches == section.unexplained == num_cases
    detail = next(detail for detail in section.details if not detail.temperature)
    assert (detail.prompt, detail.position) == (1, 4)
    assert detail.speculative_token == (detail.plain_token + 1) % 11
    assert detail.gap == pytest.approx(3.0)


def test_replay_accepts_differences_that_rounding_explains():
    greedy = [case for case in cases(ScriptedPair(), EXACT["walk"], k=2, depths=(1,)) if not case.temperature]
    section = replay(ScriptedPair({(0, 2)}, gap=1e-5), EXACT["walk"], k=2, depths=(1,), tokens=8, seed=0)
    greedy_details = [detail for detail in section.details if not detail.temperature]
    assert len(greedy_details) == len(greedy)
    assert all(detail.rounding for detail in greedy_details)
    assert not any(detail.rounding for detail in section.details if detail.temperature)


def test_replay_accepts_no_difference_on_kernels_without_batch_effects():
    section = replay(ScriptedPair({(0, 2)}, gap=1e-5, steady=True), EXACT["walk"], k=2, depths=(1,), tokens=8, seed=0)
    assert section.mismatches == section.unexplained > 0
    assert not section.passed


@pytest.mark.parametrize(
    ("gap", "dtype", "passed"), [(0.2, "bfloat16", True), (0.3, "bfloat16", False), (0.2, "float16", False)]
)
def test_flips_are_found_along_the_plain_output(gap, dtype, passed):
    scripted = ScriptedPair({(0, 1), (0, 5), (1, 9)}, gap=gap, dtype=getattr(torch, dtype))
    section = explain_flips(scripted, find_flips(scripted, EXACT["walk"], k=2, tokens=10))
    assert section.passed is passed
    assert [(flip.prompt, flip.position) for flip in section.flips] == [(0, 1), (1, 9), (0, 5)]
    assert section.flips_per_1000 == 3 / 20 * 1000
    assert section.largest_margin == pytest.approx(gap)
    assert section.plain_batched_flips_per_1000 == 0


def test_first_difference():
    assert first_difference((1, 2, 3), (1, 2, 3)) is None
    assert first_difference((1, 2, 3), (1, 0, 0)) == 1


def test_read_prompts_of_text_and_messages(tmp_path, pair):
    path = tmp_path / "prompts.jsonl"
    turns = [{"role": "user", "content": "hi"}]
    path.write_text(json.dumps({"prompt": "one"}) + "\n\n" + json.dumps({"messages": turns}) + "\n")
    assert read_prompts(str(path)) == ("one", (turns[0],))
    assert read_prompts(None) == DEFAULT
    tokenizer = load_checkpoint(embedded("mini")).tokenizer
    assert len(encode(tokenizer, turns)) > len(encode(tokenizer, "hi"))
    for invalid in ("\ud800", [{"role": "user", "content": "\ud800"}]):
        with pytest.raises(OutriderError, match="half of a surrogate pair"):
            encode(tokenizer, invalid)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no prompts"),
        ('{"prompt": "a"}\n{broken', ":2: not JSON"),
    ],
)
def test_errors_of_invalid_prompt_files(tmp_path, content, message):
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
        ({"proposer": "ngram", "verifier": "block"}, "ngram drafts trees; use walk, coupled"),
        ({"samples": 10}, "samples is 10"),
        ({"max_tokens": 1}, "max_tokens is 1"),
        ({"threads": 0}, "threads is 0"),
        ({"max_tokens": 4000}, "shorten the prompts"),
        ({"prompts": "nowhere.jsonl"}, "cannot be read"),
        ({"verifier": "psychic"}, "unknown"),
        ({"quantize": "int3"}, "quantize 'int3' is unknown"),
        ({"kernels": "quick"}, "kernels 'quick' is unknown"),
    ],
)
def test_errors_of_invalid_options(change, message):
    with pytest.raises(OutriderError, match=message):
        run_audit(asked(**change), console=None)


@pytest.mark.skipif(not tiny.compiles(), reason="no C++ compiler")
def test_wrong_native_rule_fails(monkeypatch):
    """The audit runs the native rules, as `run` and `serve` do."""

    def wrong_verifier(verifier, device):
        native = fastest_verifier(verifier, device)

        def packed(draft, p, noise):
            verdict = native.packed(draft, p, noise)
            return replace(verdict, bonus=verdict.bonus ^ 1) if draft.size else verdict

        return replace(native, packed=packed)

    monkeypatch.setattr("outrider.engine.build.fastest_verifier", wrong_verifier)
    report = run_audit(asked(target=str(embedded("nano")), proposer="ngram"), console=None)
    assert not report["passed"]


def test_only_the_builder_makes_engines():
    """So `audit` and `tune` use the same engine as `run` and `serve`."""
    pattern = re.compile(r"(?<![\w.])Engine\(")
    makers = {path.name for path in source.files() if pattern.search(path.read_text())}
    assert makers == {"build.py"}
