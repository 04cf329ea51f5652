"""Tests of `outrider bench`: prompts, clock, figures, and short runs."""

import json
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from outrider import LLM, OutriderError, SamplingParams, Stats
from outrider.core.planner import FixedPlanner
from outrider.core.prompts import by_category, read_prompts
from outrider.drafting.plan.pass_cost import CostModel, PassCost
from outrider.lab.bench.figures import compare, expected_speedup
from outrider.lab.bench.pass_work import bytes_per_pass, flops_per_token
from outrider.lab.bench.run import run_bench
from outrider.lab.bench.settings import Settings
from outrider.lab.common.clock import DecodeSpeed, EmitEvent, decode_speed, first_decode_index, token_gaps, with_times
from outrider.lab.common.conversations import each_turn
from outrider.lab.common.jobs import Condition, Job, PromptBatch
from outrider.lab.common.trial import Trial, Variant, run
from outrider.lab.common.turns import Turns, with_planner
from outrider.models.loader.embedded import embedded
from tests.helpers import tiny
from tests.helpers.commands import invoke, succeed
from tests.helpers.configured import with_engine

SHORT = ("--repeats", "1", "--max-tokens", "4", "--limit", "1")  # options of a short run
LINES = [
    {"category": "code", "prompt": "<|endoftext|>def add(a, b):\n", "reference": "ignored"},
    {"category": "talk", "messages": [{"role": "user", "content": "What is 17 + 25?"}]},
    {"category": "code", "prompt": "<|endoftext|>import os\n"},
]


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, LINES)) + "\n\n")
    return str(file)


def test_embedded_prompts():
    groups = by_category(read_prompts())
    assert len(groups) == 8
    assert all(len(group) == 2 for group in groups.values())
    assert len({prompt.id for group in groups.values() for prompt in group}) == 16


def test_prompt_file(prompts):
    first, second, third = read_prompts(prompts)
    assert (first.id, first.category, first.prompt) == ("line-1", "code", LINES[0]["prompt"])
    assert (second.id, second.category) == ("line-3", "code")
    assert third.messages == ({"role": "user", "content": "What is 17 + 25?"},)
    assert [prompt.id for prompt in read_prompts(prompts, limit=1)] == ["line-1", "line-2"]


@pytest.mark.parametrize(
    ("fields", "name", "category", "content"),
    [
        ({"question_id": 81, "category": "writing", "turns": ["Write.", "Rewrite."]}, "81", "writing", "Write."),
        ({"question": "What is 2 + 2?", "answer": "#### 4"}, "line-1", "prompts", "What is 2 + 2?"),
        ({"task_id": "HumanEval/0", "prompt": "def add(", "test": ""}, "HumanEval/0", "prompts", "def add("),
    ],
    ids=["turns", "question", "task"],
)
def test_prompts_of_public_benchmarks(tmp_path, fields, name, category, content):
    file = tmp_path / "question.jsonl"
    file.write_text(json.dumps(fields))
    (prompt,) = read_prompts(file)
    assert (prompt.id, prompt.category) == (name, category)
    assert (prompt.prompt or prompt.messages[0]["content"]) == content
    assert prompt.later == tuple(fields.get("turns", ())[1:])


def test_later_turns_follow_the_answers_of_the_target(tmp_path):
    file = tmp_path / "question.jsonl"
    lines = [{"category": "a", "turns": ["One?", "Two?", "Three?"]}, {"category": "b", "prompt": "x"}]
    file.write_text("\n".join(map(json.dumps, lines)))
    llm = LLM(None, proposer="none", max_model_len=256)
    first, other, second, third = each_turn(llm, read_prompts(file), max_tokens=8)
    answers = [llm.generate(llm.encode_chat(each.messages), SamplingParams(max_tokens=8)) for each in (first, second)]
    said = [{"role": "user", "content": "One?"}]
    for (answer,), question, turn in zip(answers, ("Two?", "Three?"), (second, third), strict=True):
        said += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": question}]
        assert list(turn.messages) == said
    assert [each.category for each in (first, other, second, third)] == ["a", "b", "a", "a"]


@pytest.mark.parametrize(
    "fields", [{"turns": []}, {"turns": "one"}, {"turns": [""]}, {"turns": ["a", 2]}, {"question": 3}]
)
def test_a_benchmark_question_must_be_a_text(tmp_path, fields):
    file = tmp_path / "question.jsonl"
    file.write_text(json.dumps(fields))
    with pytest.raises(OutriderError, match="question must be a string"):
        read_prompts(file)


def test_prompt_without_category(tmp_path):
    file = tmp_path / "plain.jsonl"
    file.write_text('{"prompt": "x"}\n{"prompt": "y"}\n{"category": "c", "prompt": "z"}\n')
    assert [prompt.category for prompt in read_prompts(file)] == ["prompts", "prompts", "c"]


def test_category_named_overall_is_an_error(tmp_path):
    file = tmp_path / "overall.jsonl"
    file.write_text('{"category": "overall", "prompt": "x"}\n')
    with pytest.raises(OutriderError, match="a category is called overall"):
        run_bench(with_engine(Settings, prompts=str(file)), progress=Console(quiet=True))


def test_only_newlines_end_a_line(tmp_path):
    """A prompt may contain other line separators of Unicode."""
    entry = {"category": "talk", "prompt": "one\u2028two\x85three"}
    file = tmp_path / "separators.jsonl"
    file.write_text(json.dumps(entry, ensure_ascii=False) + "\r\n", "utf-8")
    assert [prompt.prompt for prompt in read_prompts(file)] == [entry["prompt"]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "2: not JSON"),
        ('{"prompt', "Unterminated string starting at column 2"),
        ("[]", r'2: not a JSON object; write one object per line, like \{"category"'),
        ("What is 2 + 2?", r'2: not JSON \(plain text and CSV are not read\); write .*, like \{"category"'),
        ('"id","prompt"', "2: not JSON .plain text and CSV are not read"),
        ('{"category": 3, "prompt": "x"}', "2: category must be a string"),
        ('{"category": "", "prompt": "x"}', "2: category must be a string"),
        ("{}", "2: no prompt and no messages; use"),
        ('{"instruction": "a", "input": ""}', "2: no prompt and no messages, but instruction, input; use"),
        ('{"conversations": []}', "2: no prompt and no messages, but conversations; use"),
        ('{"category": "c", "prompt": "x", "messages": []}', "2: the line has both prompt and messages; remove one"),
        ('{"category": "c", "prompt": ""}', "2: prompt must be"),
        ('{"messages": []}', "2: messages must be"),
        ('{"messages": [{"content": "a"}]}', "2: message 1 has no role"),
        ('{"messages": [{"role": "user"}]}', "2: message 1 has no content"),
        ('{"messages": [{"role": "user", "content": []}]}', "2: message 1 has no content"),
        (
            '{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
            "part with type image_url; write",
        ),
        ('{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', "1 has a content part with no text"),
        ('{"category": "c", "prompt": "a\\ud800"}', "2: the text has half of a surrogate pair"),
        ('{"category": "\\udcff", "prompt": "a"}', "2: the text has half of a surrogate pair"),
        ('{"category": "c", "prompt": ' + "[" * 100_000, "2: JSON that cannot be read"),
        ('{"category": "c", "prompt": ' + "9" * 5000 + "}", "2: JSON that cannot be read"),
    ],
)
def test_invalid_line(tmp_path, line, message):
    file = tmp_path / "bad.jsonl"
    file.write_text(f"{json.dumps(LINES[0])}\n{line}\n")
    with pytest.raises(OutriderError, match=message):
        read_prompts(file)


def test_text_parts_of_a_message_are_joined(tmp_path):
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    file = tmp_path / "parts.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": parts}]}))
    assert [prompt.messages for prompt in read_prompts(file)] == [({"role": "user", "content": "one two"},)]


def test_byte_order_mark_is_ignored(tmp_path):
    (tmp_path / "prompts.jsonl").write_text(json.dumps(LINES[0]), encoding="utf-8-sig")
    assert [prompt.prompt for prompt in read_prompts(tmp_path / "prompts.jsonl")] == [LINES[0]["prompt"]]


def test_limit_below_one_is_an_error():
    for limit in (0, -1):
        with pytest.raises(OutriderError, match=f"limit is {limit}; use at least 1"):
            read_prompts(limit=limit)


def test_unreadable_prompt_file(tmp_path):
    with pytest.raises(OutriderError, match="cannot be read"):
        read_prompts(tmp_path / "nothing")
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(OutriderError, match="no prompts"):
        read_prompts(tmp_path / "empty")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(OutriderError, match="UTF-8"):
        read_prompts(tmp_path / "binary")


@pytest.mark.parametrize(
    "settings",
    [
        {"repeats": 0},
        {"batches": (0,)},
        {"limit": 0},
        {"k": 0},
        {"max_tokens": 1},
        {"temperatures": (-1.0,)},
    ],
)
def test_invalid_settings(settings):
    names = {"batches": "batch is 0", "temperatures": "temperature is -1"}
    with pytest.raises(OutriderError, match=names.get(*settings, *settings)):
        with_engine(Settings, **settings)


def emit_events(*counts):
    """Return one event per second. Each count has the tokens so far, by sequence."""
    return [EmitEvent(at=float(at), emitted=emitted) for at, emitted in enumerate(counts)]


def test_speed_of_one_sequence():
    events = emit_events((0,), (0,), (2,), (5,), (6,))  # two rounds of prefill, and the second one emits
    assert first_decode_index(events) == 2
    assert decode_speed(events) == DecodeSpeed(tokens=4, seconds=2.0)
    assert decode_speed(events).rate == 2.0
    assert token_gaps(events) == [1.0, 0.0, 0.0, 1.0]


def test_speed_counts_from_when_all_sequences_decode():
    events = emit_events((0, 0), (1, 0), (2, 0), (4, 3), (4, 4))
    assert first_decode_index(events) == 3
    assert decode_speed(events) == DecodeSpeed(tokens=1, seconds=1.0)
    assert token_gaps(events) == [1.0, 1.0, 0.0, 1.0]


def test_single_round_has_no_speed():
    assert decode_speed(emit_events((0,), (3,))).rate is None
    assert token_gaps(emit_events((0,), (3,))) == []


def test_timed_takes_rounds_and_seconds_between_snapshots():
    before, after = Stats(rounds=2, target_seconds=1.0), Stats(rounds=5, target_seconds=4.0, host_seconds=1.5)
    stats = with_times(Stats(passes=7, output_tokens=9), before, after)
    assert (stats.passes, stats.rounds, stats.target_seconds, stats.host_seconds) == (7, 3, 3.0, 1.5)


def trial(k, seconds, stats, *, repeat=0, tokens=10):
    return Trial(
        variant=Variant(proposer="ngram" if k else "", k=k, batch=1, temperature=0.0),
        repeat=repeat,
        batch_number=0,
        tokens=tokens,
        seconds=seconds,
        prefill_seconds=0.0,
        speed=DecodeSpeed(tokens=tokens, seconds=seconds),
        gaps=(seconds,) if seconds else (),
        stats=stats,
        categories={"c": stats},
        output_thirds=(),
    )


def test_report_of_made_up_trials():
    plain = Stats(rounds=10, passes=10, output_tokens=10, target_seconds=1.0)
    speculative = Stats(rounds=5, passes=5, output_tokens=10, reached=(5,), accepted=(5,), target_seconds=0.5)
    seconds = {0: (2.0, 1.0, 4.0), 4: (1.0, 1.0, 1.0)}
    trials = [
        trial(k, each, speculative if k else plain, repeat=i)
        for k, times in seconds.items()
        for i, each in enumerate(times)
    ]
    figures = compare(trials, 4)
    assert list(figures) == ["c", "overall"]
    assert figures["c"] == figures["overall"]
    document = figures["c"].as_dict()
    assert document["plain"]["tokens_per_s"] == {"median": 5.0, "min": 2.5, "max": 10.0}
    assert document["plain"]["latency_ms"] == {"p50": 2000.0, "p95": 4000.0, "p99": 4000.0}
    assert document["speculative"]["speedup"] == {"median": 2.0, "min": 1.0, "max": 4.0}
    assert document["speculative"]["expected_speedup"] == pytest.approx(2.0)
    assert document["speculative"]["tau"] == 2.0
    assert compare(trials, 0)["c"].speculative == figures["c"].plain


def test_report_of_completions_that_end_in_one_round():
    stats = Stats(passes=1, output_tokens=1)
    figures = compare([trial(k, 0.0, stats, tokens=0) for k in (0, 4)], 4)["overall"]
    for decoding in (figures.plain, figures.speculative):
        assert decoding.tokens_per_s is None
        assert decoding.speedup is None
        assert decoding.latency_ms is None
    assert figures.expected_speedup is None


def test_expected_speedup_counts_a_pass_without_draft_as_a_rejection():
    plain = Stats(rounds=4, passes=4, output_tokens=4, target_seconds=4.0)
    speculative = Stats(
        rounds=4, passes=4, output_tokens=6, reached=(2,), accepted=(2,), target_seconds=4.0, draft_seconds=1.0
    )
    assert expected_speedup(plain, speculative) == pytest.approx(1.5 / 1.25)


def test_plain_and_speculative_decoding_share_one_llm():
    llm = LLM(dtype="float32", max_num_seqs=2, max_model_len=64, planner=FixedPlanner(0))
    job = Job(prompt=llm.encode("import os\n"), params=SamplingParams(max_tokens=12, seed=0))
    batch = PromptBatch(number=0, jobs=(job, job), categories=("code", "code"))
    plain, speculative = (
        run(with_planner(llm, FixedPlanner(k), plain=not k), Variant(proposer="", k=k, batch=2, temperature=1.0), batch)
        for k in (0, 4)
    )
    assert (plain.stats.draft_tokens, plain.stats.tau) == (0, 1.0)
    assert speculative.stats.tau > 1
    assert speculative.stats.output_tokens == plain.stats.output_tokens == 24
    assert plain.stats.rounds == 11  # all rounds but the prefill
    assert plain.speed.tokens == 22
    assert not llm.engine.busy()


def test_no_variant_drafts_from_outputs_of_plain_decoding_or_of_earlier_repeats():
    """All variants and repeats complete the same prompts. A memory of outputs would draft copies of them."""
    llm = LLM(proposer="suffix:1000", dtype="float32", max_num_seqs=1, max_model_len=64, planner=FixedPlanner(0))
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    batch = PromptBatch(number=0, jobs=(Job(prompt=llm.encode("import os\n"), params=params),), categories=("code",))
    plain = Variant(proposer="", k=0, batch=1, temperature=0.0)
    speculative = replace(plain, proposer="suffix:1000", k=4)
    turns = Turns(
        batches={Condition(batch=1, temperature=0.0): [batch]},
        variants=lambda condition: [plain, speculative],
        engine_for=lambda variant: with_planner(llm, FixedPlanner(variant.k), plain=variant.plain),
        repeats=2,
    )
    trials = [trial for _, group in turns.run() for trial in group if trial.variant == speculative]
    first, second = (trial.stats for trial in trials)
    assert (second.passes, second.accepted) == (first.passes, first.accepted)
    same = with_planner(llm, FixedPlanner(4))
    alone, again = (run(same, speculative, batch).stats for _ in range(2))  # this one remembers its first run
    assert again.passes < alone.passes


def test_bytes_per_pass():
    """A pass reads each parameter once, in any memory layout. The tied embedding is read once, too."""
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        llm = LLM(dtype=dtype, proposer="none", max_num_seqs=1, max_model_len=64)
        assert bytes_per_pass(llm, embedded("mini")).dense == pytest.approx(17.3e6 * size, rel=0.01)
    assert flops_per_token(embedded("mini")) == pytest.approx(2 * 17.3e6, rel=0.01)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_bytes_and_flops_of_routed_experts(kernels, tmp_path):
    """A pass reads the experts that its tokens use, and a token is multiplied with its own."""
    config = tiny.make_config("MixtralConfig", head_dim=16, num_local_experts=8, num_experts_per_tok=2)
    folder = tiny.save(tmp_path, config)
    llm = LLM(folder, dtype="float32", kernels=kernels, proposer="none", max_num_seqs=1, max_model_len=64)
    experts = 8 * tiny.LAYERS * 3 * 32 * 48
    rest = sum(weight.numel() for weight in llm.parts.loaded.checkpoint.model.parameters()) - experts
    embedding = 32 * tiny.VOCAB
    weights = bytes_per_pass(llm, folder)
    if llm.parts.target.kernels == "torch":
        assert weights.expert == 4 * experts / 8
        assert weights.dense == pytest.approx(4 * (rest - embedding), rel=0.02)
    else:  # inputs are padded to 64
        assert 4 * experts / 8 <= weights.expert <= 2 * 4 * experts / 8
    assert flops_per_token(folder) == pytest.approx(2 * (rest - embedding + experts / 4), rel=0.01)
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=8, ignore_eos=True))
    stats = llm.engine.stats
    assert 2 <= stats.experts / stats.rounds < 3  # one token after another, but for the prompt


def test_document_of_a_run(prompts):
    settings = with_engine(Settings, prompts=prompts, repeats=2, max_tokens=6, dtype="float32")
    document = run_bench(settings, progress=Console(quiet=True)).as_dict()
    json.dumps(document, allow_nan=False)
    assert list(document["results"]) == ["code", "talk", "overall"]
    for figures in document["results"].values():
        assert list(figures) == ["plain", "speculative"]
        assert figures["plain"]["tau"] == 1.0
        assert figures["speculative"]["tau"] >= 1.0
        assert all(variant["tokens_per_s"]["median"] > 0 for variant in figures.values())
    assert document["exact"]
    assert document["dtype"] == "float32"
    assert document["weight_bits"] == 32
    assert document["compile_seconds"] >= 0
    assert document["kernels"] in ("native", "torch", "graphs")
    assert document["arguments"]["repeats"] == 2
    assert set(document["versions"]) >= {"python", "torch", "transformers", "outrider"}
    assert set(document["hardware"]) >= {"cpu", "cores", "threads", "gpu"}
    assert document["limits"]["weight_bytes_per_pass"] == pytest.approx(69.2e6, rel=0.01)
    assert document["memory"]["sequences"] == 1
    assert not document["sweeps"]


def test_command_prints_tables_and_document(prompts):
    arguments = ["bench", "--prompts", prompts, "--repeats", "1", "--max-tokens", "6", "--limit", "1", "--batch", "2"]
    result = succeed(*arguments, "--proposer", "ngram", "--temperature", "1")
    lines = result.stdout.splitlines()
    document = json.loads(lines[-1])
    assert document["proposer"] == "ngram"
    assert list(document["results"]) == ["code", "talk", "overall"]
    assert document["results"]["code"]["plain"]["prompt_tokens"] == 2 * 7  # one prompt, repeated to fill the batch
    assert any(line.split()[:1] == ["overall"] for line in lines)
    assert "\x1b" not in result.stdout


def test_results_are_printed_if_files_cannot_be_written(prompts, tmp_path, monkeypatch):
    monkeypatch.setattr("outrider.drafting.plan.store.check_writable", lambda path: None)
    monkeypatch.setattr("outrider.lab.bench.command.check_report", lambda file: None)
    arguments = ["bench", "--prompts", prompts, *SHORT, "--proposer", "ngram"]
    files = ["--k", "auto", "--plan", str(tmp_path / "none/plan.json"), "--report", str(tmp_path)]
    result = invoke(*arguments, *files)
    assert result.exit_code == 2
    assert "the plan was not saved" in result.stderr
    assert "name a file in a writable folder. The results are not lost" in result.stderr
    assert json.loads(result.stdout.splitlines()[-1])["benchmark"] == "outrider bench"


@pytest.mark.fast_cases("native")
@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_command_with_quantized_target(prompts, kernels):
    arguments = ["bench", "--device", "cpu", "--prompts", prompts, *SHORT]
    result = succeed(*arguments, "--kernels", kernels, "--quantize", "int8")
    document = json.loads(result.stdout.splitlines()[-1])
    assert document["kernels"] == f"{kernels} int8"
    assert document["weight_bits"] == 8
    assert document["compile_seconds"] >= 0
    assert (document["arguments"]["kernels"], document["arguments"]["quantize"]) == (kernels, "int8")
    assert document["limits"]["weight_bytes_per_pass"] == pytest.approx(17.3e6, rel=0.05)


def test_scaling_measures_each_number_of_threads(monkeypatch):
    def costs(target, drafts, *, whole):
        seconds = 1 / torch.get_num_threads()
        cost = PassCost(tokens=(1, 8, 64), seconds=(seconds, 2 * seconds, 4 * seconds), entry=0.0, pair=0.0)
        return [CostModel(target=cost, draft=cost)]

    monkeypatch.setattr("outrider.lab.bench.scaling.known_costs", costs)
    before = torch.get_num_threads()
    result = invoke("bench", "--target", "@nano", "--scaling", "1,2", "--json")
    torch.set_num_threads(before)
    assert result.exit_code == 0, result.output
    teams = json.loads(result.stdout.splitlines()[-1])["teams"]
    assert [team["threads"] for team in teams] == [1, 2]
    assert [team["pass_seconds"] for team in teams] == [{"1": 1, "8": 2, "64": 4}, {"1": 0.5, "8": 1, "64": 2}]
    assert all(team["share_of_bandwidth"] > 0 for team in teams)


def test_ceiling_replays_plain_decoding(prompts):
    arguments = ["bench", "--target", "@nano", "--prompts", prompts, *SHORT[:2], "--max-tokens", "17", "--limit", "1"]
    result = succeed(*arguments, "--ceiling", "1,0", "--batch", "1,2", "--sweep", "k=3,15", "--json")
    document = json.loads(result.stdout.splitlines()[-1])
    taus = {(each["acceptance"], each["batch"], each["k"]): each["tau"] for each in document["ceilings"]}
    assert len(taus) == 8
    for batch in (1, 2):
        assert 3 < taus[1.0, batch, 3] <= 4 < taus[1.0, batch, 15]
        assert taus[0.0, batch, 3] == taus[0.0, batch, 15] == 1
    assert all(each["speedup"]["median"] > 0 for each in document["ceilings"])
    assert document["plain_tokens_per_s"].keys() == {"1", "2"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--quantize", "int8", "--dtype", "float16"], "quantize needs a CPU and bfloat16"),
        (["--kernels", "fast"], "kernels 'fast' is unknown"),
        (["--prompts", "nothing.jsonl"], "nothing.jsonl cannot be read"),
        (["--repeats", "0"], "repeats is 0"),
        (["--max-tokens", "2040", "--limit", "1", "--repeats", "1"], "is too small"),
        (["--calibrate", "--sweep", "k=0..2"], "leave --sweep or --calibrate out"),
        (["--calibrate", "--max-tokens", "9"], "leave --max-tokens or --calibrate out"),
        (["--scaling", "1,2", "--threads", "2"], "leave --threads or --scaling out"),
        (["--scaling", "0,2"], "give it numbers of at least 1"),
        (["--ceiling", "1,1.5"], "--ceiling has the acceptance 1.5"),
        (["--ceiling", "1", "--sweep", "k=0..2"], "use k of at least 1"),
        (["--ceiling", "1", "--proposer", "ngram"], "leave --proposer or --ceiling out"),
        (["--proposer", "nobody"], "proposer 'nobody' is unknown"),
    ],
)
def test_command_errors(arguments, message):
    result = invoke("bench", *arguments)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()[-1:]
    assert line.startswith("error: ")
    assert message in line
