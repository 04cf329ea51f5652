"""Tests of the drafts in vLLM: a fake that calls as vLLM 0.32 and 0.33 do, and vLLM itself where it is installed."""

import sys
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest

from outrider.drafting.plugins.vllm import Drafts
from outrider.drafting.propose.lookup.suffix import SuffixProposer
from outrider.errors import OutriderError
from outrider.models.loader.embedded import embedded

CONTEXT = 256
REPEATED = [1, 2, 3, 4, 5, 6, 7, 8]
FIXED = {"outrider_k": 4, "outrider_proposer": "suffix"}


def make(k=4, slots=4, **additional):
    return Drafts(
        SimpleNamespace(
            speculative_config=SimpleNamespace(num_speculative_tokens=k),
            model_config=SimpleNamespace(max_model_len=CONTEXT, get_vocab_size=lambda: 1000, tokenizer=""),
            scheduler_config=SimpleNamespace(max_num_seqs=slots),
            device_config=SimpleNamespace(device_type="cpu"),
            additional_config=additional,
        )
    )


class Watched(SuffixProposer):
    """Notes which slots are in use, and how many were ever admitted."""

    running: ClassVar[set[int]] = set()
    num_admitted = 0

    def __init__(self, setup):
        super().__init__(setup)
        Watched.running = set()
        Watched.num_admitted = 0

    def admit(self, slot, request):
        assert slot not in self.running
        self.running.add(slot)
        Watched.num_admitted += 1
        super().admit(slot, request)

    def release(self, slot):
        self.running.remove(slot)
        super().release(slot)


WATCHED = f"{__name__}:Watched"


def step(drafts, *rows):
    """Call `propose` as vLLM does. A row is (tokens before this step, tokens that it has sampled)."""
    token_ids = np.full((len(rows) + 1, CONTEXT), -1, np.int32)
    lengths = np.zeros(len(rows) + 1, np.int32)
    for i, (before, sampled) in enumerate(rows):
        text = [*before, *sampled]
        token_ids[i, : len(text)] = text
        lengths[i] = len(text)
    return drafts.propose([list(sampled) for _, sampled in rows], lengths, token_ids, slot_mappings=None)


class FakeVllm:
    """Runs requests whose next token is a function of their text, as vLLM's runner and scheduler do.

    A clock that the steps advance takes the place of time: `seconds` of the tokens of a step.
    """

    def __init__(self, drafts, seconds, slots=4):
        self.drafts = drafts
        self.seconds = seconds
        self.slots = slots
        self.now = 0.0
        self.steps = 0
        self.drafted = []  # by step: draft tokens of each row
        drafts.drafter.clock = lambda: self.now

    def generate(self, prompts, next_token, most):
        """Return the outputs. Requests wait until a slot is free. A freed row is filled by the last one."""
        waiting = list(enumerate(prompts))
        outputs = {}
        rows = []  # of [id, text, prompt length, draft]
        while waiting or rows:
            while waiting and len(rows) < self.slots:
                id, prompt = waiting.pop(0)
                rows.append([id, list(prompt), len(prompt), []])
            self.now += self.seconds(sum(1 + len(row[3]) for row in rows))
            self.steps += 1
            sampled = [self._verify(row, next_token) for row in rows]
            drafts = step(self.drafts, *((row[1], new) for row, new in zip(rows, sampled, strict=True)))
            self.drafted.append(list(map(len, drafts)))
            for row, new, draft in zip(rows, sampled, drafts, strict=True):
                row[1] += new
                row[3] = draft
            for i in reversed(range(len(rows))):
                id, text, prompt, _ = rows[i]
                if len(text) - prompt >= most:
                    outputs[id] = text[prompt : prompt + most]
                    rows[i] = rows[-1]
                    rows.pop()
        return [outputs[i] for i in range(len(prompts))]

    @staticmethod
    def _verify(row, next_token):
        _, text, _, draft = row
        new = []
        for token in draft:
            new.append(next_token([*text, *new]))
            if new[-1] != token:
                return new
        return [*new, next_token([*text, *new])]


def periodic(text):
    return text[-8]


def aperiodic(text):
    return (31 * len(text) * len(text) + text[-1]) % 997


def test_drafts_what_followed_the_same_tokens():
    drafts = make(**FIXED)
    assert step(drafts, ([*REPEATED, 1, 2], [3])) == [[4, 5, 6, 7]]
    assert step(drafts, ([*REPEATED, 1, 2, 3], [4, 5, 6])) == [[7, 8, 1, 2]]
    assert step(drafts, ([*REPEATED, 1, 2, 3, 4, 5, 6], [40])) == [[]]


def test_a_row_that_prefills_gets_no_draft():
    assert step(make(**FIXED), ([*REPEATED, 1, 2], []), ([*REPEATED, 1, 2], [3])) == [[], [4, 5, 6, 7]]


def test_a_draft_ends_before_the_context():
    text = (REPEATED * 32)[: CONTEXT - 3]
    assert [len(draft) for draft in step(make(**FIXED), (text, [text[5]]))] == [1]
    assert step(make(**FIXED), ((REPEATED * 32)[: CONTEXT - 1], [8])) == [[]]


def test_rows_may_move_when_a_request_ends():
    drafts = make(outrider_k=4, outrider_proposer=WATCHED)
    other = [token + 20 for token in REPEATED]
    assert step(drafts, ([*REPEATED, 1], [2]), ([*other, 21], [22])) == [[3, 4, 5, 6], [23, 24, 25, 26]]
    assert step(drafts, ([*other, 21, 22], [23])) == [[24, 25, 26, 27]]
    assert Watched.num_admitted == 2  # the state was kept, not made again
    assert len(Watched.running) == drafts.drafter.num_running == 1


def test_a_longer_text_is_not_taken_for_the_next_step_of_a_shorter_one():
    drafts = make(outrider_k=4, outrider_proposer=WATCHED)
    step(drafts, (REPEATED, [1]), ([*REPEATED, 1], [2]))
    # The rows have changed places, and the first text begins the second one.
    step(drafts, ([*REPEATED, 1, 2], [3]), ([*REPEATED, 1], [9]))
    assert Watched.num_admitted == 2


def test_outputs_that_ended_are_drafted_if_there_is_a_history():
    for proposer, expected in (("suffix", [[]]), ("suffix:1000", [[12, 13, 14, 15]])):
        drafts = make(outrider_k=4, outrider_proposer=proposer)
        step(drafts, ([30, 31], [10, 11, 12, 13, 14, 15]))
        step(drafts, ([40, 41], [42]))  # the first request has ended
        assert step(drafts, ([40, 41, 42], [10, 11])) == expected


def test_requests_for_one_prompt_draft_from_each_other():
    drafts = make(outrider_k=4, outrider_proposer="group")
    output = [10, 11, 12, 13, 14, 15]
    step(drafts, (REPEATED, output))
    step(drafts, ([50], [51]))
    assert step(drafts, ([50, 51], [52]), (REPEATED, [10, 11]))[1] == [12, 13, 14, 15]


@pytest.mark.parametrize(
    "proposer", ["none", "ngram", "suffix:1000", "group", "merge(suffix,ngram)", "best(suffix,ngram)"]
)
def test_drafts_never_change_the_text(proposer):
    prompts = [[i, *REPEATED, i, *REPEATED] for i in range(9)]
    for next_token in (periodic, aperiodic):
        plain = FakeVllm(make(outrider_k=0), seconds=float).generate(prompts, next_token, most=40)
        for k in ("auto", 4):
            engine = FakeVllm(make(outrider_proposer=proposer, outrider_k=k), seconds=float)
            assert engine.generate(prompts, next_token, most=40) == plain


def test_a_switch_may_name_alternatives():
    engine = FakeVllm(make(outrider_proposer="switch(suffix,ngram)"), seconds=lambda tokens: 1 + tokens / 100)
    engine.generate([REPEATED * 2] * 4, periodic, most=120)
    assert engine.steps < 100


@pytest.mark.parametrize("requests", [1, 8, 32])
def test_the_planner_drafts_only_where_it_pays(requests):
    """The times are those of vLLM for CPU: each token costs, so drafts must be right to pay."""

    def run(next_token, **settings):
        engine = FakeVllm(make(8, requests, **settings), seconds=lambda tokens: 1 + 0.22 * tokens, slots=requests)
        texts = engine.generate([[i, *REPEATED, i, *REPEATED] for i in range(requests)], next_token, most=160)
        return texts, engine

    for next_token in (periodic, aperiodic):
        texts, plain = run(next_token, outrider_k=0)
        drafted_texts, engine = run(next_token)
        assert drafted_texts == texts
        assert engine.now <= plain.now / 0.98
        if next_token is periodic and requests == 1:
            assert engine.now < plain.now / 2


def test_requests_get_drafts_of_different_lengths_and_none_where_they_fail():
    def mixed(text):
        return periodic(text) if text[0] == 0 else aperiodic(text)

    engine = FakeVllm(make(8), seconds=lambda tokens: 1 + 0.1 * tokens, slots=2)
    engine.generate([[0, *REPEATED, *REPEATED], [900, *REPEATED, *REPEATED]], mixed, most=200)
    first, second = zip(*(row for row in engine.drafted[20:] if len(row) == 2), strict=True)
    assert max(first) == 8
    assert sum(second) < sum(first) / 20


def test_nothing_is_kept_of_requests_that_have_ended():
    drafts = make(outrider_proposer=WATCHED)
    FakeVllm(drafts, seconds=float).generate([[i, *REPEATED] for i in range(40)], aperiodic, most=12)
    step(drafts, ([1, 2], [3]))  # the last ones end with the next call
    assert Watched.num_admitted == 41
    assert len(Watched.running) == drafts.drafter.num_running == 1


def test_a_proposer_that_fails_costs_drafts_only(monkeypatch, tmp_path):
    (tmp_path / "broken_drafts.py").write_text(
        "from outrider.plugin import Needs\n"
        "class Broken:\n"
        "    needs = Needs()\n"
        "    def __init__(self, setup): pass\n"
        "    def admit(self, slot, request): pass\n"
        "    def propose(self, batch): raise RuntimeError('broken')\n"
        "    def commit(self, round): pass\n"
        "    def release(self, slot): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    drafts = make(outrider_k=4, outrider_proposer="broken_drafts:Broken")
    assert step(drafts, ([*REPEATED, 1], [2])) == [[]]
    sys.modules.pop("broken_drafts")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"outrider_history": 5},
            "outrider_history is not a setting of the drafts; use outrider_proposer or",
        ),
        ({"outrider_k": 9}, 'outrider_k is 9; use "auto", or a whole number of draft tokens from 0 to the 4 that'),
        ({"outrider_k": "4"}, "outrider_k is '4', a string; use \"auto\", or a whole number"),
        ({"outrider_k": [4]}, "outrider_k is [4], a value of the type list"),
        ({"outrider_k": True}, "outrider_k is True"),
        ({"outrider_proposer": "recycle"}, "recycle needs a model or the logits of the target"),
        ({"outrider_proposer": "merge(suffix,draft:DIR)"}, "draft needs a model"),
        ({"outrider_proposer": "sufix"}, "did you mean suffix"),
        ({"outrider_proposer": 5}, "outrider_proposer is 5, a value of the type int, and must be a string"),
        ({"outrider_proposer": "suffix:many"}, "not a valid number of tokens"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(OutriderError) as caught:
        make(**settings)
    assert message in str(caught.value)


def test_settings_of_others_are_left_alone():
    make(ascend_scheduler={"enabled": True})
    with pytest.raises(OutriderError, match="write it as a JSON object"):
        Drafts(
            SimpleNamespace(
                speculative_config=SimpleNamespace(num_speculative_tokens=4), model_config=None, additional_config=[1]
            )
        )


def test_vllm_runs_it(monkeypatch):
    vllm = pytest.importorskip("vllm")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    prompts = [{"prompt_token_ids": [0, *REPEATED * size]} for size in (6, 3, 2)]
    params = vllm.SamplingParams(temperature=0.0, max_tokens=64)

    def generate(speculation):
        llm = vllm.LLM(
            str(embedded("mini")),
            dtype="float32",
            max_model_len=CONTEXT,
            max_num_seqs=2,
            enforce_eager=True,
            disable_log_stats=False,
            speculative_config=speculation,
        )
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs], llm

    path = f"{Drafts.__module__}.{Drafts.__qualname__}"
    texts, llm = generate({"model": path, "num_speculative_tokens": 4})
    counts = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    assert counts["vllm:spec_decode_num_draft_tokens"] >= counts["vllm:spec_decode_num_accepted_tokens"] > 0
    assert generate(None)[0] == texts
