"""Tests of the command line, on a terminal and in a pipe."""

import dataclasses
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
from contextlib import redirect_stdout, suppress
from io import StringIO

import pytest
from typer.testing import CliRunner

import outrider
from outrider import Constraint, OutriderError, SamplingParams
from outrider.cli import terminal
from outrider.cli.app import app
from outrider.cli.options import PromptOptions
from outrider.cli.output import Output, Painter
from outrider.cli.run import converse
from outrider.cli.sampling_options import ConstraintOptions, SamplingOptions
from outrider.cli.source import SourceOptions
from outrider.core.config import EngineConfig
from outrider.lab.audit.settings import Settings as AuditSettings
from outrider.llm import LLM
from outrider.models.loader.embedded import embedded
from outrider.runtime.report.console import print_document

CODE = "<|endoftext|>import os\nimport sys\n"
QUESTION = "What is 17 + 25?"
NANO = str(embedded("nano"))
SMALL = ("--target", NANO, "--proposer", f"draft:{NANO}")  # loads faster than the default pair


def invoke(*words, text=None, env=None):
    return CliRunner().invoke(app, list(words), input=text, env=env)


def run(*words, text=None, env=None):
    fixed = ("--max-tokens", "8", "--dtype", "float32", "--threads", "1")
    result = invoke("run", *SMALL, *fixed, *words, text=text, env=env)
    assert result.exit_code == 0, result.output
    return result


def document(*words, text=None):
    # The planner depends on times, and the document says which tokens are draft tokens.
    return json.loads(run("--json", "--k", "4", *words, text=text).stdout)


@pytest.fixture(scope="module")
def greedy():
    return document(CODE)


def test_help_does_not_import_torch():
    code = """
import sys
from contextlib import suppress
from outrider.cli.app import main
for words in ("--help", "run --help", "bench --help", "--version", "run --top-p 3 x"):
    sys.argv[1:] = words.split()
    with suppress(SystemExit):
        main()
    assert not {"torch", "transformers"} & set(sys.modules), words
"""
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)


def test_python_m_outrider():
    done = subprocess.run([sys.executable, "-m", "outrider", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"outrider {outrider.__version__}\n"


def test_every_sampling_parameter_is_an_option():
    flags = {field.name.removesuffix("s") for field in dataclasses.fields(SamplingOptions)}
    flags.add("constraint")  # given by one of several options
    flags |= {"proposer", "verifier", "k"}  # options of the engine
    flags |= {"scope", "priority"}  # one process serves one user
    assert flags == {field.name.removesuffix("s") for field in dataclasses.fields(SamplingParams)}
    assert SamplingOptions().params() == SamplingParams()


def test_constraint_options(tmp_path):
    schema = tmp_path / "schema.json"
    grammar = tmp_path / "grammar.lark"
    schema.write_text('{"type": "object"}')
    grammar.write_text('start: "a"')
    assert ConstraintOptions().constraint() is None
    assert ConstraintOptions(json_schema=str(schema)).constraint() == Constraint.json_object()
    assert ConstraintOptions(grammar=str(grammar)).constraint() == Constraint.grammar('start: "a"')
    assert ConstraintOptions(regex="a+").constraint() == Constraint.regex("a+")
    with pytest.raises(OutriderError, match="give one of them"):
        ConstraintOptions(regex="a", grammar=str(grammar)).constraint()
    with pytest.raises(OutriderError, match="cannot be read"):
        ConstraintOptions(json_schema=str(tmp_path / "none")).constraint()
    result = invoke("run", "x", "--target", str(embedded("nano")), "--proposer", "ngram", "--regex", "[0-9]{4}")
    assert result.exit_code == 0, result.output
    assert len(result.stdout.strip()) == 4


def test_every_option_reaches_the_engine():
    words = "--temperature .5 --top-k 9 --top-p .8 --min-p .1 --repetition-penalty 1.2 --presence-penalty .3"
    words += " --frequency-penalty .4 --logit-bias 5=-inf --logit-bias 6=1.5 --max-tokens 0 --min-tokens 2 --stop A"
    words += " --stop B --stop-token-id 7 --ignore-eos --seed 11 --n 2 --logprobs 3"
    received = []
    with pytest.MonkeyPatch().context() as patch:
        patch.setattr("outrider.cli.run.load", received.append)
        patch.setattr("outrider.cli.run.converse", lambda llm, params, **_: received.append(params) or True)
        patch.setattr("outrider.cli.output.Output", lambda llm, **_: None)
        models = "--k 6 --verifier walk --max-model-len 99 --kernels torch --quantize int8"
        result = invoke("run", "x", *models.split(), *words.split())
    assert result.exit_code == 0, result.output
    assert received == [
        EngineConfig(k=6, verifier="walk", max_model_len=99, kernels="torch", quantize="int8", max_num_seqs=2),
        SamplingParams(
            temperature=0.5,
            top_k=9,
            top_p=0.8,
            min_p=0.1,
            repetition_penalty=1.2,
            presence_penalty=0.3,
            frequency_penalty=0.4,
            logit_bias={5: -float("inf"), 6: 1.5},
            max_tokens=None,
            min_tokens=2,
            stop=("A", "B"),
            stop_token_ids=(7,),
            ignore_eos=True,
            seed=11,
            n=2,
            logprobs=3,
        ),
    ]


def test_run_prints_text_to_stdout_and_the_summary_to_stderr(greedy):
    result = run(CODE)
    assert result.stdout.removesuffix("\n") == greedy["completions"][0]["text"].removesuffix("\n")
    for word in ("8 tokens", "tau", "a round: draft", "finish length; exact"):
        assert word in result.stderr
    assert "seed" not in result.stderr
    assert "\x1b" not in result.output


def test_default_models():
    result = invoke("run", "--max-tokens", "8", "--dtype", "float32", "--threads", "1", "--json", "--k", "4", CODE)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["stats"]["tau"] > 1


def test_json_document(greedy):
    (completion,) = greedy["completions"]
    assert len(completion["token_ids"]) == len(completion["from_draft"]) == 8
    assert completion["finish_reason"] == "length"
    assert greedy["seed"] is None
    assert greedy["exact"] is True
    assert greedy["stats"]["tau"] > 1
    assert greedy["versions"]["outrider"] == outrider.__version__
    assert greedy["dtype"] == "float32"
    assert greedy["kernels"] in ("native", "torch", "graphs")


def test_plain_decoding_gives_the_same_text(greedy):
    plain = document(CODE, "--proposer", "none")
    assert plain["completions"][0]["token_ids"] == greedy["completions"][0]["token_ids"]
    assert plain["stats"]["tau"] == 1.0
    assert not any(plain["completions"][0]["from_draft"])


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_quantized_model(bits):
    words = ["--max-tokens", "8", "--device", "cpu", "--quantize", bits, "--kernels", "torch"]
    result = invoke("run", "--json", "--show", *words, CODE)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert (document["dtype"], document["kernels"]) == ("bfloat16", f"torch {bits}")
    assert f"{bits} weights of {bits[3:]} bits, bfloat16 otherwise" in without_colors(result.stderr)
    assert len(document["completions"][0]["token_ids"]) == 8


def test_prompt_from_standard_input(greedy):
    assert document(text=CODE + "\n")["completions"] == [
        greedy["completions"][0] | {"seed": pytest.approx(0, abs=2**63)}
    ]


def test_chat_template():
    assert document("--chat", QUESTION)["prompt_token_ids"][:2] == [0, 1]


def test_seed_reproduces_the_completion():
    sampled = document("--temperature", "1", CODE)
    assert document("--temperature", "1", "--seed", str(sampled["seed"]), CODE)["completions"] == sampled["completions"]
    assert f"seed {sampled['seed']}" in run("--temperature", "1", "--seed", str(sampled["seed"]), CODE).stderr


def test_several_completions_with_logprobs():
    result = run("--temperature", "1", "--n", "3", "--logprobs", "2", "--seed", "3", CODE)
    for word in ("1 of 3", "3 of 3", "likeliest", "finish length length length; seed 3; exact"):
        assert word in result.stderr
    both = document("--temperature", "1", "--n", "2", "--logprobs", "2", "--seed", "3", CODE)["completions"]
    assert all(len(completion["logprobs"]) == 8 for completion in both)
    assert both[0]["token_ids"] != both[1]["token_ids"]


def without_colors(text):
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_show_colors_the_text_on_a_terminal_only(greedy):
    plain = run("--show", CODE)
    assert "\x1b" not in plain.output
    colored = run("--show", CODE, env={"FORCE_COLOR": "1"})
    assert "\x1b[36m" in colored.stdout
    assert "\x1b[1;33m" in colored.stdout
    assert without_colors(colored.stdout) == plain.stdout
    assert "accepted draft token" in colored.stderr
    assert re.search("exact; float32 [a-z ]+, (native|torch|graphs) kernels", without_colors(colored.stderr))


def test_show_with_a_stop_string():
    for stop in ("sys", "nothing like it"):
        plain = run("--stop", stop, CODE)
        colored = run("--stop", stop, "--show", CODE, env={"FORCE_COLOR": "1"})
        assert "\x1b[36m" in colored.stdout
        assert without_colors(colored.stdout) == plain.stdout


def test_lossy_verifier_is_reported():
    result = run("--verifier", "typical", CODE)
    assert "not exact" in result.stderr
    assert document("--verifier", "typical", CODE)["exact"] is False


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--top-p", "0", "x"], "top_p is 0"),
        (["a\udcff"], "the prompt is not UTF-8 text"),
        (["--stop", "\udcff", "x"], "--stop '\\udcff' is not UTF-8 text"),
        (["--regex", "\udcff", "x"], "--regex '\\udcff' is not UTF-8 text"),
        (["--logit-bias", "5=1", "--logit-bias", "5=2", "x"], "--logit-bias is given twice for token 5"),
        (["--logit-bias", "5:1", "x"], "--logit-bias '5:1' is not ID=VALUE"),
        (["--target", "nowhere", "x"], "nowhere is not a folder"),
        (["--proposer", "draft:nowhere", "x"], "nowhere is not a folder"),
        (["--verifier", "nobody", "x"], "verifier 'nobody' is unknown"),
        (["--dtype", "int8", "x"], "dtype 'int8' is unknown"),
        (["--kernels", "quick", "x"], "kernels 'quick' is unknown; use auto, native"),
        (["--kernels", "native", "--dtype", "float16", "x"], "the native kernels need a CPU, and bfloat16 or float32"),
        (["--quantize", "int3", "x"], "quantize 'int3' is unknown; use int8 or int4"),
        (["--quantize", "int4", "--dtype", "float32", "x"], "quantize needs a CPU and bfloat16, or a GPU"),
        (["--threads", "0", "x"], "threads is 0"),
        ([""], "the prompt is empty"),
        ([], "the prompt is empty"),
        (["--max-model-len", "8", "--chat", QUESTION], "shorten the prompt"),
    ],
)
def test_error_messages_are_one_line(words, message):
    result = invoke("run", *words)
    assert result.exit_code == 2
    assert not result.stdout
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line


@pytest.mark.parametrize("command", ["bench", "tune", "layers"])
def test_error_of_a_negative_seed(command):
    result = invoke(command, "--seed", "-1")
    assert result.exit_code == 2
    assert result.stderr == "error: --seed is -1; use a number of at least 0\n"


def test_error_of_binary_input():
    result = CliRunner().invoke(app, ["run"], input=b"\xff\xfe")
    assert result.exit_code == 2
    assert "UTF-8" in result.stderr


def test_interrupt_prints_nothing(monkeypatch):
    """The interrupt is in the middle of a completion."""

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Painter, "write", interrupt)
    result = invoke("run", CODE)
    assert result.exit_code == 130
    assert not result.output


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_error_of_a_full_disk_is_one_line():
    projection = ["project", "--target", "8B", "--machine", "H100", "--alpha", "0.8"]
    for words in (["--version"], ["--help"], projection):
        command = [sys.executable, "-m", "outrider", *words]
        with open("/dev/full", "w") as full:
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
        assert done.returncode == 1
        (line,) = done.stderr.splitlines()
        assert line.startswith("error: the output cannot be written (No space left on device)")


def test_closed_pipe_prints_nothing():
    command = [sys.executable, "-m", "outrider", "project", "--help"]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_unwritable_plan_is_reported_before_the_models_are_loaded(monkeypatch):
    monkeypatch.setattr("outrider.engine.build.load_target", lambda *_, **__: pytest.fail("the models were loaded"))
    for command in ("run", "bench"):
        result = invoke(command, "--k", "auto", "--plan", "/nowhere/plan.json")
        assert result.exit_code == 2
        assert "/nowhere/plan.json cannot be written" in result.stderr


def fail(*_):
    raise OutriderError("the disk is gone")


def test_document_is_printed_even_if_the_report_fails():
    """Files are written first. If a file cannot be written or the tables fail, the document is still printed."""
    steps = []
    print_document({"a": 1}, lambda document, console: steps.append("shown"), as_json=True, write=steps.append)
    assert steps == [{"a": 1}, "shown"]
    for callbacks in ({"show": fail}, {"show": lambda *_: None, "write": fail}):
        out = StringIO()
        with redirect_stdout(out), pytest.raises(OutriderError, match=r"the disk is gone\. The results are not lost"):
            print_document({"a": 1}, callbacks.pop("show"), as_json=False, **callbacks)
        assert json.loads(out.getvalue().splitlines()[-1]) == {"a": 1}


def test_a_failed_completion_prints_its_error_alone(monkeypatch):
    error = "the grammar is too complex at this position; simplify it"

    def fail_at_a_node(*_):
        raise OutriderError(error)

    monkeypatch.setattr("outrider.engine.constraints._GrammarWalk._visit", fail_at_a_node)
    result = invoke("run", "--target", "@nano", "--regex", "[a-z]*", "--max-tokens", "9", CODE)
    assert result.exit_code == 1
    assert f"error: {error}\n" in result.stderr


@pytest.mark.parametrize(("passed", "code"), [(True, 0), (False, 1)])
def test_audit_command(monkeypatch, passed, code):
    received = []

    def stub(settings, *, console):
        console.print("results")
        received.append(settings)
        return {"passed": passed}

    monkeypatch.setattr("outrider.lab.audit.run.run_audit", stub)
    words = ["--k", "3", "--samples", "200", "--proposer", "ngram", "--kernels", "torch", "--quantize", "int4"]
    result = invoke("audit", "--json", *words)
    assert result.exit_code == code
    assert json.loads(result.stdout) == {"passed": passed}
    assert "results" in result.stderr
    engine = EngineConfig(k=3, proposer="ngram", kernels="torch", quantize="int4")
    assert received == [AuditSettings(engine=engine, samples=200)]


@pytest.mark.parametrize(
    ("k", "message"),
    [("auto", "k is 'auto', a string; use a number of draft tokens"), ("0", "k is 0; use a number of draft tokens")],
)
def test_audit_needs_a_number_of_draft_tokens(k, message):
    result = invoke("audit", "--k", k)
    assert result.exit_code == 2
    assert message in result.stderr


def start_chat(*words):
    """Start a chat on a new terminal, so that Ctrl-C works. Return the process and our end of the terminal."""
    child, terminal = pty.fork()
    if not child:
        os.execv(sys.executable, [sys.executable, "-m", "outrider", "run", "--chat", "--threads", "1", *words])
    return child, terminal


def read_until(terminal, expected, nudge=b""):
    """Return the output of a terminal until it has `expected` or ends. Write `nudge` whenever it is silent."""
    text = b""
    with suppress(OSError):  # raised at the end of the terminal
        while expected is None or expected.encode() not in text:
            for _ in range(12):
                if select.select([terminal], [], [], 5)[0]:
                    break
                os.write(terminal, nudge)
            else:
                pytest.fail(f"no output after {text!r}")
            if not (piece := os.read(terminal, 1 << 16)):
                break
            text += piece
    return text.decode()


@pytest.mark.slow
def test_interrupt_ends_the_answer_and_two_at_the_prompt_end_the_chat():
    child, terminal = start_chat("--max-tokens", "1900", "--ignore-eos", "--k", "0")
    read_until(terminal, "> ")
    os.write(terminal, f"{QUESTION}\n".encode())
    read_until(terminal, f"{QUESTION}\r\n")
    os.read(terminal, 1)  # the answer has begun
    os.write(terminal, b"\x03")
    assert "tokens in" not in read_until(terminal, "\r\n> ")
    os.write(terminal, b"\x03")
    read_until(terminal, "Ctrl-C again leaves", nudge=b"\x03")
    os.write(terminal, b"\x03")
    # If a signal comes between the prompt of input() and its read, Python handles it with the next key.
    assert "Traceback" not in read_until(terminal, None, nudge=b"\x03")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(terminal)


@pytest.mark.parametrize("n", [1, 2])
def test_interrupt_ends_the_answer_but_not_the_program(n, monkeypatch, capsys):
    llm = LLM(embedded("nano"), proposer="none", k=0, max_num_seqs=2, max_model_len=256, threads=1)
    inputs = iter([CODE, CODE])
    step = llm.engine.step
    num_rounds = 0

    def interrupted_step():
        nonlocal num_rounds
        step()
        num_rounds += 1
        if num_rounds == 5:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(llm.engine, "step", interrupted_step, raising=False)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("outrider.cli.terminal.ask", lambda: next(inputs, ""))
    params = SamplingParams(n=n, max_tokens=8, ignore_eos=True, temperature=1.0, seed=1)
    output = Output(llm, show=False, as_json=False)
    assert converse(llm, params, prompts=PromptOptions(), options=SourceOptions(), output=output)
    printed = capsys.readouterr()
    assert printed.err.count("tokens in") == 1  # only the second answer is complete
    assert printed.err.count(f"1 of {n}") == 2 * (n > 1)
    assert num_rounds == 5 + 8
    assert not llm.engine.busy()


class Keys:
    """Stands in for `input`: yields lines, and raises what is no line."""

    def __init__(self, *events):
        self._events = iter(events)

    def __call__(self, prompt=""):
        event = next(self._events)
        if isinstance(event, str):
            return event
        raise event


@pytest.mark.parametrize(
    ("events", "lines"),
    [
        ((KeyboardInterrupt, "a", KeyboardInterrupt, KeyboardInterrupt), ["a"]),
        ((KeyboardInterrupt, KeyboardInterrupt), []),
        (("a", KeyboardInterrupt, "b", EOFError), ["a", "b"]),
        (("a", ""), ["a"]),
    ],
)
def test_two_interrupts_in_a_row_end_the_input(events, lines, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", Keys(*events))
    assert list(terminal.typed(None)) == lines
    asked = sum(first is KeyboardInterrupt for first in events) - (events[-2:] == (KeyboardInterrupt,) * 2)
    assert capsys.readouterr().err.count("Ctrl-C again leaves") == asked


def test_second_interrupt_of_an_answer_warns_and_the_third_ends_the_program(capfd):
    before = signal.getsignal(signal.SIGINT)
    with terminal.interrupts() as collected:
        os.kill(os.getpid(), signal.SIGINT)
        assert len(collected) == 1
        assert not capfd.readouterr().err
        os.kill(os.getpid(), signal.SIGINT)
        assert len(collected) == 2
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert "Ctrl-C once more ends the program" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGINT) is before


class FakeChat:
    """Runs `converse` with lines of a user, and records the conversations that reach the chat template."""

    def __init__(self, monkeypatch, *lines, context=256):
        self.llm = LLM(embedded("nano"), proposer="none", k=0, max_model_len=context, threads=1)
        self.messages = []
        encode = self.llm.encode_chat
        recorded = lambda messages: self.messages.append(list(messages)) or encode(messages)  # noqa: E731
        monkeypatch.setattr(self.llm, "encode_chat", recorded)
        monkeypatch.setattr("sys.stdin.isatty", lambda: True)
        monkeypatch.setattr("builtins.input", Keys(*lines, ""))

    def run(self, params, **chat):
        output = Output(self.llm, show=False, as_json=False)
        prompts = PromptOptions(chat=True, **chat)
        return converse(self.llm, params, prompts=prompts, options=SourceOptions(), output=output)


def test_system_message_stands_before_the_conversation(monkeypatch):
    chat = FakeChat(monkeypatch, "one", "two")
    assert chat.run(SamplingParams(max_tokens=2), system="Be brief.")
    assert [message["role"] for message in chat.messages[-1]] == ["system", "user", "assistant", "user"]
    assert chat.messages[-1][0]["content"] == "Be brief."


def test_prompt_that_does_not_fit_keeps_the_conversation(monkeypatch, capsys):
    chat = FakeChat(monkeypatch, "one", "x " * 300, "two", context=64)
    assert not chat.run(SamplingParams(max_tokens=2))
    assert capsys.readouterr().err.count("shorten the prompt") == 1
    assert [message["content"] for message in chat.messages[-1]][::2] == ["one", "two"]


def test_chat_that_fills_the_context_says_to_start_a_new_one(monkeypatch, capsys):
    chat = FakeChat(monkeypatch, "x " * 300, "one", "two", context=32)
    assert not chat.run(SamplingParams(max_tokens=32, ignore_eos=True))
    assert capsys.readouterr().err.count("start a new one") == 1, "only where there is a conversation"


def test_system_needs_chat():
    result = invoke("run", *SMALL, "--system", "Be brief.", "x")
    assert (result.exit_code, "add --chat" in result.stderr) == (2, True)


@pytest.mark.parametrize(
    ("words", "reason"), [((), "length"), (("--chat",), "stop"), (("--chat", "--max-tokens", "2"), "length")]
)
def test_answer_of_a_chat_ends_where_the_model_ends_it(words, reason):
    """After 200 tokens, a bias makes the model end; without --chat the text has 128 tokens."""
    end = ("--min-tokens", "200", "--logit-bias", "3=100")
    given = (*words, *(end if reason == "stop" else ("--ignore-eos",)))
    result = invoke("run", *SMALL, "--threads", "1", "--json", "--k", "0", *given, "a")
    assert result.exit_code == 0, result.output
    completion = json.loads(result.stdout)["completions"][0]
    tokens = {"stop": 201, "length": 2 if words else 128}[reason]
    assert (completion["finish_reason"], len(completion["token_ids"])) == (reason, tokens)


@pytest.mark.parametrize(("words", "count"), [((), 1), (("--chat",), 0)])
def test_plain_text_of_a_model_with_a_chat_template_is_told(words, count):
    assert run(*words, QUESTION).stderr.count("add --chat to chat with it") == count


@pytest.mark.slow
def test_chat_of_two_turns():
    """The second prompt contains the first turn. An empty line ends the chat."""
    terminal, child_end = pty.openpty()
    words = ["run", "--chat", "--show", "--json", "--max-tokens", "4", "--threads", "1"]
    command = [sys.executable, "-m", "outrider", *words]
    with subprocess.Popen(command, stdin=child_end, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        os.write(terminal, f"{QUESTION}\nAnd 3 more?\n\n".encode())
        out, err = child.communicate(timeout=60)
    os.close(terminal)
    os.close(child_end)
    assert child.returncode == 0, err
    first, second = (json.loads(line) for line in out.splitlines())
    before = first["prompt_token_ids"]
    assert second["prompt_token_ids"][: len(before)] == before
    assert len(second["prompt_token_ids"]) > len(before) + 4
