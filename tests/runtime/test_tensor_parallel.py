"""Tests of tensor parallelism: two gloo ranks give the tokens of one process, and failures end all ranks."""

import json
import os
import re
import signal
import subprocess
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch
from transformers import CONFIG_MAPPING
from typer.testing import CliRunner

from outrider.cli.app import app
from outrider.core.config import EngineConfig
from outrider.core.params import SamplingParams
from outrider.errors import OutriderError, UnsupportedModel
from outrider.llm import LLM
from outrider.models.heads.store import write_head
from outrider.models.loader.tensor_parallel import check_plan, tensor_parallel_plan
from tests.helpers.heads import cases as head_cases
from tests.helpers.heads import random_draft
from tests.helpers.tiny import ARCHITECTURES, EVERY, RECURRENT, Shelf, make_config, save
from tests.runtime.launch import ENVIRONMENT, ROOT, TORCHRUN, compare, needs_accelerate, torchrun, two_processes
from tests.runtime.two_ranks import complete


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    return Shelf(tmp_path_factory.mktemp("models"))


@pytest.mark.fast_cases("plain, draft")
@needs_accelerate
@pytest.mark.parametrize("names", [["plain", "draft"], ["exit", "experts", "head"]], ids=", ".join)
def test_two_ranks_give_the_tokens_of_one_process(names, shelf, tmp_path):
    target = save(tmp_path / "llama8", make_config("LlamaConfig", num_hidden_layers=8))
    _, description = head_cases(hidden=32, vocab=256)["eagle"]
    write_head(tmp_path / "head", random_draft(description, table=torch.randn(256, 32)), dtype=torch.float32)
    folders = {name: str(shelf.folder(name)) for name in ("llama", "qwen3", "qwen3_moe")}
    cases = {
        "plain": {"target": folders["llama"], "proposer": "none", "k": 0},
        "draft": {"target": folders["llama"], "proposer": f"draft:{folders['qwen3']}", "k": 3},
        "exit": {"target": folders["qwen3"], "proposer": "exit:2", "k": 3},
        "experts": {"target": folders["qwen3_moe"], "proposer": "ngram", "k": 3},
        "head": {"target": str(target), "proposer": f"draft:{tmp_path / 'head'}", "k": 3},
    }
    results = compare({name: cases[name] for name in names}, tmp_path)
    assert all(results[name]["drafted"] for name in names if name != "plain")
    if "plain" in names:
        whole = complete({**cases["plain"], "kernels": "torch"})["cache_bytes"]
        assert results["plain"]["cache_bytes"] == whole // 2  # each rank has its own key/value heads only


@needs_accelerate
@pytest.mark.slow
def test_every_architecture_with_a_plan(shelf, tmp_path):
    cases = {}
    for name in ARCHITECTURES:
        try:
            check_plan(EVERY[name](), 2, recurrent=name in RECURRENT)
        except OutriderError:
            continue
        cases[name] = {"target": str(shelf.folder(name)), "proposer": "ngram", "k": 3}
    assert len(cases) > 20
    results = compare(cases, tmp_path, timeout=1200)
    # The load check refuses the first three, whose layers need all heads. transformers cannot read the last one.
    refused = {"cohere", "doge", "gemma4", "sarvam_moe"}
    assert {name for name, result in results.items() if "refused" in result} == refused
    assert results.keys() == cases.keys()


def test_errors_name_the_fix(shelf, tmp_path, monkeypatch):
    llama = shelf.folder("llama")
    monkeypatch.setattr("sys.argv", ["/usr/bin/outrider", "serve", "--target", "my model", "--tp", "2"])
    command = re.escape("run torchrun --nproc-per-node 2 -m outrider serve --target 'my model' --tp 2")
    with pytest.raises(OutriderError, match=command):
        LLM(llama, tp=2)
    with pytest.raises(OutriderError, match="native kernels run in one process, and tp is 2"):
        EngineConfig(tp=2, kernels="native")
    with pytest.raises(OutriderError, match="cannot be split over ranks, and tp is 2; leave quantize out"):
        EngineConfig(tp=2, quantize="int8")
    with pytest.raises(OutriderError, match="tp is 0; use a whole number of at least 1"):
        EngineConfig(tp=0)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(OutriderError, match="torchrun has started 3 processes, and tp is 2; use --nproc-per-node 2"):
        LLM(llama, tp=2)


@pytest.mark.parametrize(
    ("name", "size", "error", "message"),
    [
        ("llama", 3, OutriderError, "tp 3 does not divide the 4 attention heads of this llama"),
        ("llama", 4, OutriderError, "tp 4 does not divide the 2 key/value heads of this llama"),
        ("gpt2", 2, UnsupportedModel, "gpt2 has no plan for tensor parallelism"),
        ("t5", 2, UnsupportedModel, "t5 has an encoder, which Outrider does not split"),
    ],
)
def test_models_that_cannot_be_split(name, size, error, message):
    with pytest.raises(error, match=message):
        check_plan(EVERY[name](), size, recurrent=False)


def test_recurrent_models_cannot_be_split():
    with pytest.raises(UnsupportedModel, match="lfm2 has recurrent layers, which Outrider does not split"):
        check_plan(EVERY["lfm2"](), 2, recurrent=True)


def test_plan_of_a_model():
    plan = tensor_parallel_plan(CONFIG_MAPPING["llama"]())
    assert plan["layers.*.self_attn.k_proj"] == "colwise"
    assert "lm_head" in plan


@pytest.mark.parametrize("words", [("serve",), ("run", "hello"), ("bench",), ("audit",)])
def test_command_line_errors(words, monkeypatch):
    result = CliRunner().invoke(app, [*words, "--tp", "2"])
    assert result.exit_code == 2
    assert "tp 2 needs 2 processes; run torchrun --nproc-per-node 2" in result.output
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 2
    assert "torchrun has started 2 processes, and each would run the whole model; add --tp 2" in result.output


def test_options_that_do_not_go_with_ranks(tmp_path):
    for words, message in (
        (("serve", "--weight-updates", str(tmp_path)), "--weight-updates loads weights into one process"),
        (("serve", "--quantize", "int8"), "leave quantize out, or use tp 1"),
    ):
        result = CliRunner().invoke(app, [*words, "--tp", "2"])
        assert result.exit_code == 2
        assert message in result.output


@contextmanager
def serving(folder, *words, program=("-m", "outrider")):
    """Start the server in two ranks. Yield torchrun's process, the URL, and a list of the lines of standard error."""
    command = [*program, "serve", "--tp", "2", "--target", str(folder), "--port", "0", "--dtype", "float32"]
    process = subprocess.Popen(
        [*TORCHRUN, *command, "--max-model-len", "2048", *words],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=ENVIRONMENT,
    )
    lines = []
    try:
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"http://\S+", line):
                break
        else:
            raise AssertionError("".join(lines))
        reader = threading.Thread(target=lambda: lines.extend(process.stderr))
        reader.start()
        yield process, found.group().removesuffix(","), lines
        process.wait(30)
        reader.join()
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def ranks_of(process):
    """Return the processes of the ranks."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ranks = {}
    for child in map(int, children):
        environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        ranks |= {int(entry[5:]): child for entry in environment if entry.startswith(b"RANK=")}
    return ranks


@pytest.fixture(scope="module")
def long_llama(tmp_path_factory):
    return save(tmp_path_factory.mktemp("long"), make_config("LlamaConfig", max_position_embeddings=4096))


LONG = {"prompt": [1, 2, 3], "max_tokens": 2000, "temperature": 0, "ignore_eos": True}


@needs_accelerate
@pytest.mark.slow
@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSTOP])
def test_failure_of_a_rank_ends_requests_and_the_server(kind, long_llama):
    with serving(long_llama, "--k", "0", "--proposer", "none") as (process, url, _):
        ranks = ranks_of(process)
        with httpx.stream("POST", f"{url}/completions", json={**LONG, "stream": True}, timeout=60) as response:
            events = response.iter_lines()
            assert next(events).startswith("data: ")
            os.kill(ranks[1], kind)
            began = time.monotonic()
            text = "".join(events)
        assert '"error"' in text
        assert "[DONE]" not in text
        assert time.monotonic() - began < 10
        while Path(f"/proc/{ranks[0]}").exists() and "Z" not in Path(f"/proc/{ranks[0]}/stat").read_text():
            assert time.monotonic() - began < 10
            time.sleep(0.1)
        if kind == signal.SIGSTOP:  # torchrun waits for a stopped process before it kills it
            os.kill(ranks[1], signal.SIGKILL)
    assert process.returncode


def failing(moment, how):
    """Return the program whose rank 1 fails at a moment."""
    return ("tests/runtime/failing_rank.py", moment, how)


@needs_accelerate
@pytest.mark.slow
@pytest.mark.parametrize(("moment", "how"), [("prefill", "killed"), ("prefill", "error"), ("decoding", "error")])
def test_failure_in_the_middle_of_a_pass(moment, how, long_llama):
    program = failing(moment, how)
    with serving(long_llama, "--k", "0", "--proposer", "none", program=program) as (process, url, lines):
        began = time.monotonic()
        with httpx.stream("POST", f"{url}/completions", json={**LONG, "stream": True}, timeout=60) as response:
            text = "".join(response.iter_lines())
        assert '"error"' in text
        assert "[DONE]" not in text
        assert process.wait(30)
        assert time.monotonic() - began < 10
    if how == "error":
        assert "no memory in this rank" in "".join(lines)


@needs_accelerate
@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "error"])
@pytest.mark.parametrize("moment", ["joining", "load"])
def test_failure_while_the_model_is_loaded(moment, how, long_llama):
    statuses, errors = two_processes(*failing(moment, how), "run", "--tp", 2, "--target", long_llama, "hello")
    assert statuses == [1, -signal.SIGKILL if how == "killed" else 1]
    if how == "error":
        assert "no memory in this rank" in "".join(errors)
    # Rank 0 learns of it by a lost connection, or by the heartbeats.
    assert re.search("error: (another rank has failed|rank 1 has (failed|not answered)|rank 0 cannot join)", errors[0])


@needs_accelerate
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("breaks", "rank 1 has failed alone: a pass cannot be recorded (no memory in this rank)"),
        ("breaks later", "no memory in this rank"),
    ],
)
def test_failure_of_a_recording_in_one_rank_only(kind, message, long_llama, tmp_path):
    (tmp_path / "cases.json").write_text(
        json.dumps({"recorded": {"target": str(long_llama), "proposer": "none", "k": 0, "record": kind}})
    )
    statuses, errors = two_processes("tests/runtime/two_ranks.py", tmp_path / "cases.json", tmp_path)
    assert statuses == [1, 1]
    assert message in errors[1]
    assert "timed out" not in "".join(errors).lower()  # after a minute, as an operation does in which a rank waits
    assert not list(tmp_path.glob("?.json"))


@needs_accelerate
@pytest.mark.slow
def test_server_on_two_ranks(long_llama):
    llm = LLM(long_llama, proposer="ngram", kernels="torch", dtype="float32")
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    with serving(long_llama, "--proposer", "ngram", "--k", "3") as (process, url, lines):
        asked = {"prompt": [5, 6, 7, 5, 6], "max_tokens": 20, "temperature": 1, "seed": 3, "return_token_ids": True}
        (choice,) = httpx.post(f"{url}/completions", json=asked, timeout=60).json()["choices"]
        structured = {"prompt": [5, 6], "max_tokens": 40, "structured_outputs": {"json": schema}}
        (answer,) = httpx.post(f"{url}/completions", json=structured, timeout=60).json()["choices"]
        with httpx.stream("POST", f"{url}/completions", json={**LONG, "stream": True}, timeout=60) as response:
            next(response.iter_lines())  # then the client disconnects
        assert httpx.get(f"{url.removesuffix('/v1')}/health").json() == {"status": "ok"}
        process.send_signal(signal.SIGTERM)
    (expected,) = llm.generate([[5, 6, 7, 5, 6]], params_of(asked))
    assert choice["token_ids"] == list(expected.token_ids)
    assert json.loads(answer["text"])["a"] in (1, 2)
    assert not [line for line in lines if line.startswith("error:")]


def params_of(asked):
    return SamplingParams(temperature=asked["temperature"], max_tokens=asked["max_tokens"], seed=asked["seed"])


@needs_accelerate
@pytest.mark.slow
def test_commands_on_two_ranks(long_llama, tmp_path):
    audited = torchrun(
        "-m", "outrider", "audit", "--tp", 2, "--target", long_llama, "--proposer", "ngram", "--samples", 100
    )
    assert audited.returncode == 0, audited.stdout + audited.stderr[-2000:]
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "abc abc abc"}\n')
    prompts = ("--prompts", tmp_path / "prompts.jsonl", "--repeats", 1, "--max-tokens", 8)
    words = ("--target", long_llama, "--proposer", "ngram", *prompts, "--json")
    benched = torchrun("-m", "outrider", "bench", "--tp", 2, *words)
    assert benched.returncode == 0, benched.stderr[-2000:]
    assert json.loads(benched.stdout.splitlines()[-1])["kernels"] == "torch, 2 ranks"
    wrong = torchrun("-m", "outrider", "run", "--tp", 2, "--target", tmp_path / "missing", "hello")
    assert wrong.returncode
    assert wrong.stderr.count("error: ") <= 2
    assert "missing is not a folder" in wrong.stderr
