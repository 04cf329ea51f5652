"""Systems on which the native kernels cannot be compiled: torch runs the model, and a warning says how to change it."""

import logging
import re
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from transformers import AutoModelForCausalLM

from outrider.core.params import SamplingParams
from outrider.errors import MissingKernels, OutriderError, UnsupportedModel
from outrider.llm import LLM
from outrider.models.loader import make
from outrider.models.loader.embedded import embedded
from outrider.models.loader.load import load_checkpoint
from outrider.models.loader.make import make_target
from outrider.models.native import compiling, library
from outrider.runtime import compiler
from tests.helpers import tiny
from tests.helpers.gguf_files import write_gguf


@pytest.fixture(autouse=True)
def forget():
    """Let each test load the kernels and warn as a new process does."""

    def clear():
        library.load_library.cache_clear()
        library._compile_once.cache_clear()
        make._warn_of_missing_kernels.cache_clear()

    clear()
    yield
    clear()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = tiny.make_config("LlamaConfig", head_dim=16, hidden_size=48, intermediate_size=80)
    return tiny.save(tmp_path_factory.mktemp("missing") / "llama", config)


def load(folder):
    return load_checkpoint(folder, dtype="float32", device="cpu")


def only_programs(monkeypatch, *names):
    """Let the system have these programs alone."""
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}" if name in names else None)
    monkeypatch.setattr("sys.platform", "linux")


def warnings(caplog):
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


def test_one_warning_names_the_command_that_installs_a_compiler(folder, monkeypatch, caplog):
    """A target and its draft model warn together once."""
    only_programs(monkeypatch, "apt-get")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    for _ in range(2):
        assert make_target(load(folder), slots=1, context=32).kernels == "torch"
    assert warnings(caplog) == [
        "running on torch, which is many times slower than the native CPU kernels: no C++ compiler was found (g++ or"
        " clang++); install one (apt-get install g++), or a wheel of Outrider that has the kernels"
    ]


@pytest.mark.parametrize(
    ("programs", "user", "command"),
    [
        (("apt-get", "sudo"), 1000, "sudo apt-get install g++"),
        (("apt-get",), 1000, "apt-get install g++"),
        (("dnf", "yum", "sudo"), 0, "dnf install gcc-c++"),
        (("pacman",), 0, "pacman -S gcc"),
        ((), 0, None),
    ],
)
def test_command_fits_the_system(programs, user, command, monkeypatch):
    only_programs(monkeypatch, *programs)
    monkeypatch.setattr("os.geteuid", lambda: user)
    assert compiler.install_command() == command
    advice = f"install one ({command})" if command else "; install one, or"
    with pytest.raises(MissingKernels, match=re.escape(advice)):
        library.find_compiler()


def test_a_full_disk_is_named_and_met_once(monkeypatch, tmp_path):
    calls = []

    def fail(command, **_):
        calls.append(command)
        return CompletedProcess(command, 1, "", "x.s: Fatal error: cannot write: No space left on device")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(library, "find_compiler", lambda: "g++")
    monkeypatch.setattr(compiling.subprocess, "run", fail)
    counts = []
    for _ in range(2):
        with pytest.raises(MissingKernels, match=r"No space left on device\); free some space$"):
            library.load_library()
        counts.append(len(calls))
    assert counts[0] == counts[1]
    assert not list((tmp_path / "outrider").iterdir())


def test_a_home_that_cannot_be_written(monkeypatch):
    monkeypatch.setattr(library, "find_compiler", lambda: "g++")
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nonexistent")
    with pytest.raises(MissingKernels, match=r"/proc/nonexistent/outrider, cannot be .*; set XDG_CACHE_HOME to"):
        library.load_library()


def test_a_user_without_a_home(monkeypatch):
    def unknown():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", unknown)
    with pytest.raises(OutriderError, match="this user has no home folder; set XDG_CACHE_HOME to a writable folder"):
        library.cache_folder()


def test_command_on_macos(monkeypatch):
    monkeypatch.setattr("sys.platform", "darwin")
    assert compiler.install_command() == "xcode-select --install"


@pytest.mark.parametrize(
    ("name", "settings"), [("LlamaConfig", {"head_dim": 8}), ("CohereConfig", {"hidden_size": 64})]
)
def test_models_that_the_kernels_do_not_support_need_no_compiler(name, settings, monkeypatch, caplog, tmp_path):
    only_programs(monkeypatch)
    checkpoint = load(tiny.save(tmp_path / "other", tiny.make_config(name, **settings)))
    assert make_target(checkpoint, slots=1, context=32).kernels == "torch"
    assert warnings(caplog) == []


def test_kernels_that_are_not_wanted_cause_no_warning(folder, monkeypatch, caplog):
    only_programs(monkeypatch)
    assert make_target(load(folder), slots=1, context=32, kernels="torch").kernels == "torch"
    assert warnings(caplog) == []


def test_torch_runs_without_a_compiler(folder, monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler")
    checkpoint = load_checkpoint(folder, dtype="bfloat16", device="cpu")
    with pytest.raises(UnsupportedModel, match="the C\\+\\+ compiler no-such-compiler, which CXX names, was not found"):
        make_target(checkpoint, slots=1, context=32, kernels="native")
    assert make_target(checkpoint, slots=1, context=32).kernels == "torch"
    new_checkpoint = load_checkpoint(folder, dtype="bfloat16", device="cpu")
    assert make_target(new_checkpoint, slots=1, context=32, bits=8).kernels == "torch int8"
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(UnsupportedModel, match="cannot compile"):
        make_target(checkpoint, slots=1, context=32, kernels="native")
    assert make_target(checkpoint, slots=1, context=32).kernels == "torch"
    not_found, not_compiled = (each for each in warnings(caplog) if each.startswith("running on torch"))
    assert "was not found; name another, or unset CXX" in not_found
    assert "false cannot compile the kernels" in not_compiled


@pytest.mark.parametrize(
    ("compiler", "dtype", "reason"),
    [
        ("false", "auto", r"false cannot compile the kernels \(exit status 1\); name another in CXX, or install"),
        (None, "bfloat16", r"no C\+\+ compiler was found \(g\+\+ or clang\+\+\); install one, or a wheel of Outrider"),
    ],
)
def test_quantized_blocks_without_kernels(compiler, dtype, reason, monkeypatch, caplog, tmp_path):
    """Torch computes with them in float32 only, so the error says why the kernels are missing."""
    config = tiny.make_config("LlamaConfig", head_dim=64, hidden_size=256, intermediate_size=256)
    path = write_gguf(tmp_path / "model.gguf", AutoModelForCausalLM.from_config(config), "Q4_K")
    if compiler:
        monkeypatch.setenv("CXX", compiler)
    else:
        only_programs(monkeypatch)
    checkpoint = load_checkpoint(path, dtype=dtype, device="cpu")
    error = f"{reason}.*; else use dtype float32: torch then dequantizes the Q4_K weights of this model in each pass"
    with pytest.raises(UnsupportedModel, match=error):
        make_target(checkpoint, slots=1, context=32)
    assert not any(message.startswith("running on torch") for message in warnings(caplog))


def test_torch_runs_without_a_cache_folder(folder, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    checkpoint = load_checkpoint(folder, dtype="bfloat16", device="cpu")
    with pytest.raises(UnsupportedModel, match=r"file/outrider, cannot be written .*; set XDG_CACHE_HOME"):
        make_target(checkpoint, slots=1, context=32, kernels="native")
    assert make_target(checkpoint, slots=1, context=32).kernels == "torch"
    assert "set XDG_CACHE_HOME to a writable folder" in warnings(caplog)[-1]
    # Verification and sampling also have native kernels.
    llm = LLM(embedded("nano"), proposer="ngram", max_model_len=64)
    assert len(llm.generate("def", SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids) == 4
