"""Tests of sweeps: lists on the command line, conditions, and one short run along every axis."""

import json

import pytest
from rich.console import Console

from outrider import LLM, OutriderError
from outrider.core.prompts import read_prompts
from outrider.lab.bench.figures import OVERALL
from outrider.lab.bench.run import run_bench
from outrider.lab.bench.settings import Settings, parse_sweep
from outrider.lab.bench.sweep import conditions, default_condition, draft_lengths
from outrider.lab.bench.table import show
from outrider.lab.common.jobs import Condition, make_batches
from outrider.lab.common.number_lists import parse_figures, parse_real, parse_whole, sweep_values
from tests.helpers.commands import invoke, succeed
from tests.helpers.configured import with_engine

PROMPTS = [
    {"category": "code", "prompt": "<|endoftext|>def add(a, b):\n"},
    {"category": "talk", "messages": [{"role": "user", "content": "What is 17 + 25?"}]},
]


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, PROMPTS)))
    return str(file)


@pytest.mark.parametrize(
    ("text", "values"),
    [("4", (4,)), ("1,2,4", (1, 2, 4)), ("0..3", (0, 1, 2, 3)), ("0..2, 8,2", (0, 1, 2, 8)), ("5..5", (5,))],
)
def test_parse_whole_numbers(text, values):
    assert parse_whole("--batch", text) == values
    assert parse_sweep("--sweep", f"k={text}") == values


def test_parse_real_numbers():
    assert parse_real("--temperature", "0,0.7,1,0.7") == (0.0, 0.7, 1.0)
    assert parse_figures("--alpha", "0.8,0.8,0.7") == (0.8, 0.8, 0.7)
    assert sweep_values((1,)) == ()
    assert sweep_values((1, 2)) == (1, 2)


@pytest.mark.parametrize("text", ["", "x", "1,", "1.5", "3..1", "1..", "0..1000000", "1..2..3"])
def test_invalid_whole_numbers(text):
    with pytest.raises(OutriderError, match=r"--batch is .*whole numbers such as"):
        parse_whole("--batch", text)


@pytest.mark.parametrize("text", ["", "hot", "0;1"])
def test_invalid_real_numbers(text):
    with pytest.raises(OutriderError, match=r"--temperature is .*numbers such as"):
        parse_real("--temperature", text)


@pytest.mark.parametrize("text", ["0..4", "batch=1,2", "=1"])
def test_invalid_sweep_option(text):
    with pytest.raises(OutriderError, match=r"use for example --sweep k=0\.\.8"):
        parse_sweep("--sweep", text)


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        ({"ks": (-1, 2)}, "k is -1; use a number of draft tokens from 0"),
        ({"batches": (2, 0)}, "batch is 0"),
        ({"contexts": (128, 512)}, "leaves no tokens for a prompt"),
        ({"temperatures": (0.0, -0.5)}, "temperature is -0.5"),
    ],
)
def test_invalid_sweep_values(sweep, message):
    with pytest.raises(OutriderError, match=message):
        Settings(**sweep)


def test_one_axis_varies_at_a_time():
    lists = {"ks": (0, 2, 4), "batches": (1, 4), "contexts": (256, 512), "temperatures": (0.0, 1.0)}
    settings = with_engine(Settings, k=4, **lists)
    assert default_condition(settings) == Condition(batch=1, temperature=0.0)
    assert conditions(settings) == [
        Condition(batch=1, temperature=0.0),
        Condition(batch=4, temperature=0.0),
        Condition(batch=1, temperature=0.0, context=256),
        Condition(batch=1, temperature=0.0, context=512),
        Condition(batch=1, temperature=1.0),
    ]
    assert draft_lengths(settings, default_condition(settings)) == (0, 4, 2)
    assert draft_lengths(settings, Condition(batch=4, temperature=0.0)) == (0, 4)
    assert (settings.max_num_seqs, settings.max_model_len) == (4, 512)
    assert (Settings().max_num_seqs, Settings().max_model_len, Settings(contexts=(99,)).max_model_len) == (1, None, 99)


def test_context_is_filled_with_other_prompts(prompts):
    llm = LLM(dtype="float32", proposer="none", max_num_seqs=1, max_model_len=256)
    prompt_set = read_prompts(prompts)
    settings = Settings(max_tokens=8)

    def token_lists(condition):
        return [batch.jobs[0].prompt for batch in make_batches(llm, prompt_set, condition, max_tokens=8, seed=0)]

    short = token_lists(default_condition(settings))
    long = token_lists(Condition(batch=1, temperature=0.0, context=200))
    assert [len(tokens) for tokens in long] == [192, 192]
    assert [tokens[-len(original) :] for tokens, original in zip(long, short, strict=True)] == short
    assert long[0][-len(short[0]) - len(short[1]) : -len(short[0])] == short[1]
    cut = token_lists(Condition(batch=1, temperature=0.0, context=11))
    assert cut == [tokens[-3:] for tokens in short]


def test_run_along_every_axis(prompts):
    lists = {"ks": (0, 1, 4), "batches": (1, 2), "contexts": (32, 64), "temperatures": (0.0, 1.0)}
    settings = with_engine(Settings, prompts=prompts, repeats=1, max_tokens=6, dtype="float32", k=4, **lists)
    result = run_bench(settings, progress=Console(quiet=True))
    document = result.as_dict()
    json.dumps(document, allow_nan=False)
    assert list(document["results"][OVERALL]) == ["plain", "speculative"]
    swept = document["sweeps"]
    assert {axis: [entry["value"] for entry in entries] for axis, entries in swept.items()} == {
        "k": [0, 1, 4],
        "batch": [1, 2],
        "context": [32, 64],
        "temperature": [0.0, 1.0],
    }
    for entries in swept.values():
        for entry in entries:
            assert entry["plain"]["tau"] == 1.0
            assert set(entry["speedup_by_category"]) == {"code", "talk", OVERALL}
            assert entry["limits"]["speculative"]["share_of_limit"] > 0
    assert swept["k"][0]["speculative"]["speedup"]["median"] == 1.0
    assert [len(entry["speculative"]["acceptance_by_position"]) for entry in swept["k"]] == [0, 1, 4]
    assert swept["k"][2]["speculative"] == document["results"][OVERALL]["speculative"]
    assert swept["batch"][0]["plain"] == document["results"][OVERALL]["plain"]
    assert [entry["plain"]["prompt_tokens"] for entry in swept["context"]] == [2 * 26, 2 * 58]
    assert 58 < swept["context"][1]["limits"]["cached_tokens"] <= 64
    assert (document["memory"]["sequences"], document["memory"]["context"]) == (2, 64)
    show(result, Console(width=120, record=True, quiet=True))


def test_command_with_sweeps(prompts):
    arguments = ["bench", "--prompts", prompts, "--repeats", "1", "--max-tokens", "4", "--dtype", "float32"]
    result = succeed(*arguments, "--proposer", "ngram", "--sweep", "k=1,2", "--temperature", "0,1")
    document = json.loads(result.stdout.splitlines()[-1])
    assert document["arguments"]["temperature"] == 0.0
    assert document["arguments"]["sweep"] == {"k": [1, 2], "batch": [], "context": [], "temperature": [0.0, 1.0]}
    assert document["memory"]["draft_in_sequences"] == 0
    for text in (
        "Against k",
        "Against temperature",
        "Decoding at temperature 1, tokens/s",
        "This machine, before and after",
        "Memory: target weights",
    ):
        assert text in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "1;2"], "--batch is '1;2'"),
        (["--sweep", "k=a"], "--sweep k is 'a'"),
        (["--sweep", "batch=1,2"], "--sweep 'batch=1,2' does not sweep k"),
        (["--context", "64,128"], "context of the sweep is 64"),
    ],
)
def test_command_errors(arguments, message):
    result = invoke("bench", *arguments)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert message in line
