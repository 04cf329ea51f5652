"""The benchmark: prompts, the clock, the figures, and one short run of everything."""

from __future__ import annotations

import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from outrider import LLM, OutriderError, SamplingParams, Stats
from outrider.bench.conditions import conditions
from outrider.bench.contestants import Job, OutriderRunner, SwitchPlanner, Trial
from outrider.bench.memory import bytes_per_pass, flops_per_token
from outrider.bench.report import Sample, expected_speedup, report
from outrider.bench.run import run_bench
from outrider.bench.settings import Settings
from outrider.cli.app import app
from outrider.loader.embedded import embedded
from outrider.measure.clock import DecodeSpeed, EmitEvent, decode_pace, opening, timed, token_gaps
from outrider.measure.prompts import by_category, read_prompts

LINES = [
    {"category": "code", "prompt": "<|endoftext|>def add(a, b):\n", "reference": "left alone"},
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


def test_a_category_may_be_left_out(tmp_path):
    file = tmp_path / "plain.jsonl"
    file.write_text('{"prompt": "x"}\n{"prompt": "y"}\n{"category": "c", "prompt": "z"}\n')
    assert [prompt.category for prompt in read_prompts(file)] == ["prompts", "prompts", "c"]


def test_no_category_is_called_as_all_of_them_are(tmp_path):
    file = tmp_path / "overall.jsonl"
    file.write_text('{"category": "overall", "prompt": "x"}\n')
    with pytest.raises(OutriderError, match="a category is called overall"):
        run_bench(Settings(prompts=str(file)), progress=Console(quiet=True))


def test_only_newlines_end_a_line(tmp_path):
    """The others that Unicode knows may stand within a text."""
    odd = {"category": "talk", "prompt": "one\u2028two\x85three"}
    file = tmp_path / "odd.jsonl"
    file.write_text(json.dumps(odd, ensure_ascii=False) + "\r\n", "utf-8")
    assert [prompt.prompt for prompt in read_prompts(file)] == [odd["prompt"]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "2: not JSON"),
        ("[]", "2: not a JSON object"),
        ('{"category": 3, "prompt": "x"}', "2: category must be a string"),
        ('{"category": "", "prompt": "x"}', "2: category must be a string"),
        ('{"category": "c"}', "2: give one of prompt and messages"),
        ('{"category": "c", "prompt": "x", "messages": []}', "2: give one of prompt and messages"),
        ('{"category": "c", "prompt": ""}', "2: prompt must be"),
        ('{"category": "c", "messages": [{"role": "user"}]}', "2: messages must be"),
        ('{"category": "c", "messages": []}', "2: messages must be"),
        ('{"category": "c", "prompt": "a\\ud800"}', "2: half a character"),
        ('{"category": "\\udcff", "prompt": "a"}', "2: half a character"),
        ('{"category": "c", "prompt": ' + "[" * 100_000, "2: JSON that cannot be read"),
        ('{"category": "c", "prompt": ' + "9" * 5000 + "}", "2: JSON that cannot be read"),
    ],
)
def test_bad_line(tmp_path, line, message):
    file = tmp_path / "bad.jsonl"
    file.write_text(f"{json.dumps(LINES[0])}\n{line}\n")
    with pytest.raises(OutriderError, match=message):
        read_prompts(file)


def test_a_mark_of_the_encoding_is_no_text(tmp_path):
    (tmp_path / "prompts.jsonl").write_text(json.dumps(LINES[0]), encoding="utf-8-sig")
    assert [prompt.prompt for prompt in read_prompts(tmp_path / "prompts.jsonl")] == [LINES[0]["prompt"]]


def test_a_limit_counts():
    for limit in (0, -1):
        with pytest.raises(OutriderError, match=f"limit is {limit}; use at least 1"):
            read_prompts(limit=limit)


def test_bad_file(tmp_path):
    with pytest.raises(OutriderError, match="cannot be read"):
        read_prompts(tmp_path / "nothing")
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(OutriderError, match="no prompts"):
        read_prompts(tmp_path / "empty")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(OutriderError, match="UTF-8"):
        read_prompts(tmp_path / "binary")


@pytest.fixture(autouse=True)
def quick_rates(monkeypatch):
    """Rates of a small buffer and of small matrices: what they are is not tested here."""
    monkeypatch.setattr("outrider.bench.rates._BUFFER", 1 << 20)
    monkeypatch.setattr("outrider.bench.rates._MATRIX", (64, 64))


@pytest.mark.parametrize(
    "wrong",
    [{"repeats": 0}, {"batch": 0}, {"limit": 0}, {"k": 0}, {"max_tokens": 1}, {"peer": "x"}, {"temperature": -1}],
)
def test_bad_settings(wrong):
    with pytest.raises(OutriderError, match=next(iter(wrong))):
        Settings(**wrong)


def test_peer_takes_one_row():
    with pytest.raises(OutriderError, match="batch 1"):
        Settings(peer="transformers", batch=2)


def marks(*rows):
    return [EmitEvent(at=float(at), emitted=emitted) for at, emitted in enumerate(rows)]


def test_clock_of_one_row():
    run = marks((0,), (0,), (2,), (5,), (6,))  # two rounds read the prompt; the second of them emits
    assert opening(run) == 2
    assert decode_pace(run) == DecodeSpeed(tokens=4, seconds=2.0)
    assert decode_pace(run).rate == 2.0
    assert token_gaps(run) == [1.0, 0.0, 0.0, 1.0]


def test_clock_begins_when_all_rows_decode():
    run = marks((0, 0), (1, 0), (2, 0), (4, 3), (4, 4))
    assert opening(run) == 3
    assert decode_pace(run) == DecodeSpeed(tokens=1, seconds=1.0)
    assert token_gaps(run) == [1.0, 1.0, 0.0, 1.0]


def test_clock_of_a_single_round():
    assert decode_pace(marks((0,), (3,))).rate is None
    assert token_gaps(marks((0,), (3,))) == []


def test_timed():
    before, after = Stats(rounds=2, target_seconds=1.0), Stats(rounds=5, target_seconds=4.0, host_seconds=1.5)
    stats = timed(Stats(passes=7, output_tokens=9), before, after)
    assert (stats.passes, stats.rounds, stats.target_seconds, stats.host_seconds) == (7, 3, 3.0, 1.5)


def trial(tokens, seconds, stats):
    return Trial(pace=DecodeSpeed(tokens=tokens, seconds=seconds), inter_token_latencies=(seconds,), stats=stats)


def test_report():
    plain = Stats(rounds=10, passes=10, output_tokens=10, target_seconds=1.0)
    guessing = Stats(rounds=5, passes=5, output_tokens=10, reached=(5,), accepted=(5,), target_seconds=0.5)
    seconds = {"plain": (2.0, 1.0, 4.0), "speculative": (1.0, 1.0, 1.0)}
    samples = [
        Sample(category="c", name=name, repeat=i, trial=trial(10, took, plain if name == "plain" else guessing))
        for name, all in seconds.items()
        for i, took in enumerate(all)
    ]
    figures = report(samples)
    assert list(figures) == ["c", "overall"]
    assert figures["c"] == figures["overall"]
    assert figures["c"]["plain"]["tokens_per_s"] == {"median": 5.0, "min": 2.5, "max": 10.0}
    assert figures["c"]["speculative"]["speedup"] == {"median": 2.0, "min": 1.0, "max": 4.0}
    assert figures["c"]["speculative"]["expected_speedup"] == pytest.approx(2.0)
    assert figures["c"]["plain"]["latency_ms"] == {"p50": 2000.0, "p95": 4000.0, "p99": 4000.0}
    assert figures["c"]["speculative"]["tau"] == 2.0


def test_report_of_completions_that_end_at_once():
    stats = Stats(passes=1, output_tokens=1)
    ways = ("plain", "speculative")
    empty = Trial(pace=DecodeSpeed(tokens=0, seconds=0.0), inter_token_latencies=(), stats=stats)
    figures = report([Sample(category="c", name=name, repeat=0, trial=empty) for name in ways])["overall"]
    for name in ways:
        assert figures[name]["tokens_per_s"] is None
        assert figures[name]["speedup"] is None
        assert figures[name]["latency_ms"] is None
    assert figures["speculative"]["expected_speedup"] is None


def test_expected_speedup_counts_a_pass_without_a_guess_as_a_rejection():
    plain = Stats(rounds=4, passes=4, output_tokens=4, target_seconds=4.0)
    half = Stats(
        rounds=4, passes=4, output_tokens=6, reached=(2,), accepted=(2,), target_seconds=4.0, draft_seconds=1.0
    )
    assert expected_speedup(plain, half) == pytest.approx(1.5 / 1.25)


def test_switch_planner_makes_both_with_one_llm():
    planner = SwitchPlanner()
    llm = LLM(dtype="float32", max_num_seqs=2, max_model_len=64, planner=planner)
    jobs = [Job(prompt=llm.encode("import os\n"), params=SamplingParams(max_tokens=12, seed=0))] * 2
    plain = OutriderRunner("plain", llm, planner, k=0).run(jobs)
    guessing = OutriderRunner("speculative", llm, planner, k=4).run(jobs)
    assert plain.stats is not None
    assert guessing.stats is not None
    assert (plain.stats.draft_tokens, plain.stats.tau) == (0, 1.0)
    assert guessing.stats.tau > 1
    assert guessing.stats.output_tokens == plain.stats.output_tokens == 24
    assert plain.stats.rounds == 11  # all but the one that read the prompts
    assert plain.pace.tokens == 22
    assert not llm.engine.busy()


def test_bytes_of_a_pass():
    """Twice the parameters in bfloat16, however the machine lays them out; the tied table is read once."""
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        llm = LLM(dtype=dtype, proposer="none", max_num_seqs=1, max_model_len=64)
        assert bytes_per_pass(llm, embedded("mini")) == pytest.approx(17.3e6 * size, rel=0.01)
    assert flops_per_token(embedded("mini")) == pytest.approx(2 * 17.3e6, rel=0.01)


def test_run(prompts):
    settings = Settings(prompts=prompts, repeats=2, max_tokens=6, dtype="float32", peer="transformers")
    document = run_bench(settings, progress=Console(quiet=True))
    json.dumps(document, allow_nan=False)
    assert list(document["results"]) == ["code", "talk", "overall"]
    for figures in document["results"].values():
        assert list(figures) == ["plain", "speculative", "transformers", "transformers_assisted"]
        assert figures["plain"]["tau"] == 1.0
        assert figures["speculative"]["tau"] >= 1.0
        assert all(contestant["tokens_per_s"]["median"] > 0 for contestant in figures.values())
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


def test_command(prompts):
    words = ["bench", "--prompts", prompts, "--repeats", "1", "--max-tokens", "6", "--limit", "1", "--batch", "2"]
    result = CliRunner().invoke(app, [*words, "--proposer", "ngram", "--temperature", "1"])
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    document = json.loads(lines[-1])
    assert document["proposer"] == "ngram"
    assert list(document["results"]) == ["code", "talk", "overall"]
    assert document["results"]["code"]["plain"]["prompt_tokens"] == 2 * 7  # one prompt, twice to fill the batch
    assert any(line.split()[:1] == ["overall"] for line in lines)
    assert "\x1b" not in result.stdout


def test_a_benchmark_is_not_lost_with_its_files(prompts, tmp_path, monkeypatch):
    monkeypatch.setattr("outrider.plan.store.check_writable", lambda path: None)
    monkeypatch.setattr("outrider.bench.command.check_report", lambda file: None)
    monkeypatch.setattr("outrider.bench.command.page", lambda document: "")
    words = [
        "bench",
        "--prompts",
        prompts,
        "--repeats",
        "1",
        "--max-tokens",
        "4",
        "--limit",
        "1",
        "--proposer",
        "ngram",
    ]
    files = ["--k", "auto", "--plan", str(tmp_path / "none/plan.json"), "--report", str(tmp_path)]
    result = CliRunner().invoke(app, [*words, *files])
    assert result.exit_code == 2
    assert "what the planner has learned is not kept" in result.stderr
    assert "give --report another file. What was found is not lost" in result.stderr
    assert json.loads(result.stdout.splitlines()[-1])["benchmark"] == "outrider bench"


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_command_quantised(prompts, kernels):
    words = ["bench", "--device", "cpu", "--prompts", prompts, "--repeats", "1", "--max-tokens", "4", "--limit", "1"]
    result = CliRunner().invoke(app, [*words, "--kernels", kernels, "--quantize", "int8"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout.splitlines()[-1])
    assert document["kernels"] == f"{kernels} int8"
    assert document["weight_bits"] == 8
    assert document["compile_seconds"] >= 0
    assert (document["arguments"]["kernels"], document["arguments"]["quantize"]) == (kernels, "int8")
    assert document["limits"]["weight_bytes_per_pass"] == pytest.approx(17.3e6, rel=0.05)
    told = dict(conditions(document))
    assert told["bits of a weight"] == "8"
    assert ("compiling the kernels" in told) is (kernels == "native")
    done, fresh = (dict(conditions({**document, "kernels": "native", "compile_seconds": s})) for s in (0.0, 12.3))
    assert done["compiling the kernels"] == "done by an earlier run"
    assert fresh["compiling the kernels"] == "12.3 s"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--quantize", "int8", "--dtype", "float16"], "quantize needs a CPU and bfloat16"),
        (["--kernels", "fast"], "kernels 'fast' is unknown"),
        (["--prompts", "nothing.jsonl"], "nothing.jsonl cannot be read"),
        (["--repeats", "0"], "repeats is 0"),
        (["--max-tokens", "2040", "--limit", "1", "--repeats", "1"], "is too small"),
        (["--calibrate", "--sweep", "k=0..2"], "leave --sweep or --calibrate out"),
        (["--calibrate", "--max-tokens", "9"], "leave --max-tokens or --calibrate out"),
        (["--proposer", "nobody"], "proposer 'nobody' is unknown"),
    ],
)
def test_command_mistakes(words, message):
    result = CliRunner().invoke(app, ["bench", *words])
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()[-1:]
    assert line.startswith("error: ")
    assert message in line
