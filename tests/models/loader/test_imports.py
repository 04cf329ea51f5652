"""What a start imports: torch takes seconds, and transformers takes more."""

import shutil
import subprocess
import sys
from functools import partial

import pytest
from transformers import AutoModelForCausalLM

from tests.helpers import quantized_files as files
from tests.helpers import tiny
from tests.helpers.gguf_architectures import writable_model, write_architecture
from tests.helpers.gguf_files import SIZES, write_gguf
from tests.models.loader.test_native_checkpoint import wide_config
from tests.models.loader.test_quantized import AWQ

_RUN = (
    "import sys; from outrider.cli.app import main; sys.argv = ['outrider', *{arguments!r}]\n"
    "try: main()\nexcept SystemExit: pass\n"
)
# torch._refs belongs to the meta kernels of torch.
_SHOW = "print(*sorted({'numpy', 'torch', 'torch._refs', 'transformers'} & sys.modules.keys()))"
_BATCH_NORM = "torch.nn.BatchNorm1d(2, device='meta')(torch.empty(3, 2, device='meta'))"


def _run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)


def _imports(*arguments):
    """Return which of the slow packages a command has imported."""
    done = _run(_RUN.format(arguments=list(arguments)) + _SHOW)
    return done.stdout.splitlines()[-1].split(), done.stderr


@pytest.fixture(scope="module")
def files_of_users(tmp_path_factory):
    """A folder with what a user may give in place of a model."""
    folder = tmp_path_factory.mktemp("mistakes")
    config = tiny.make_config("LlamaConfig", **SIZES)
    whole = write_gguf(folder / "whole.gguf", AutoModelForCausalLM.from_config(config), "Q8_0")
    (folder / "short.gguf").write_bytes(whole.read_bytes()[:-1])
    (folder / "text.gguf").write_text("no model")
    (folder / "empty").mkdir()
    shutil.copytree(tiny.save(folder / "full", config), folder / "lost")
    (folder / "lost" / "model.safetensors").unlink()
    return folder


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("run --target nofile.gguf hi", "nofile.gguf cannot be read (No such file or directory)"),
        ("run --target nodir hi", "nodir is not a folder"),
        ("run --target @nobody hi", "@nobody does not come with Outrider"),
        ("run --target short.gguf hi", "short.gguf is damaged or truncated: it has"),
        ("serve --target text.gguf", "text.gguf is no GGUF file"),
        ("bench --target empty", "empty holds no config.json"),
        ("tune --target lost", "lost holds no .safetensors"),
        ("fit --target short.gguf --out out", "short.gguf is damaged or truncated: it has"),
        ("audit --proposer draft:short.gguf", "short.gguf is damaged or truncated: it has"),
        ("run --proposer best(ngram,draft:nodir) hi", "nodir is not a folder"),
        ("bench --proposer draft:empty", "empty holds no config.json"),
        ("tune --proposers ngram;ngrm", "proposer 'ngrm' is unknown; did you mean ngram?"),
        ("fit --out out --prompts lost.jsonl", "lost.jsonl cannot be read"),
    ],
)
def test_mistakes_are_found_before_torch_is_imported(arguments, message, files_of_users, monkeypatch):
    monkeypatch.chdir(files_of_users)
    imported, errors = _imports(*arguments.split())
    assert set(imported) <= {"numpy"}
    assert message in errors
    assert len(errors.splitlines()) == 1


@pytest.mark.skipif(not tiny.compiles(), reason="needs a C++ compiler")
def test_model_on_the_native_kernels_starts_without_transformers():
    imported, _ = _imports("run", "--target", "@nano", "--check", "never", "--max-tokens", "2", "--chat", "hi")
    assert imported == ["numpy", "torch"]


@pytest.mark.parametrize("use", ["import colorsys", "from torch._meta_registrations import device_hint"])
def test_meta_kernels_of_torch_come_with_the_first_use(use):
    code = f"""
from outrider.runtime import torch_import
torch_import._USERS = {{"colorsys"}}  # in place of transformers, which takes seconds
torch_import.defer_meta_kernels()
import torch
try:
    {_BATCH_NORM}
    print("not deferred")
except NotImplementedError:
    {use}
print(tuple({_BATCH_NORM}.shape))
"""
    assert _run(code).stdout == "(3, 2)\n"


_LOAD = """
import sys
from outrider.models.loader.load import load_checkpoint
from outrider.models.loader.make import make_target
for folder in sys.argv[1:]:
    target = make_target(load_checkpoint(folder), slots=1, context=32)
    print(target.kernels, *sorted(name for name in sys.modules if name.partition(".")[0] == "transformers"))
"""


@pytest.mark.skipif(not tiny.compiles(), reason="needs a C++ compiler")
def test_no_model_of_the_native_kernels_needs_transformers(tmp_path):
    kinds = ("mixtral", "olmoe", "gemma3", "qwen2_vl")
    models = [tiny.save(tmp_path / kind, wide_config(kind)) for kind in kinds]
    quantized = files.write_quantized(tmp_path / "awq", _mixture(), partial(files.awq, group=32), AWQ).folder
    blocks = write_architecture(tmp_path / "model.gguf", _mixture(), "Q8_0")
    command = [sys.executable, "-c", _LOAD, *map(str, (*models, quantized, blocks))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines() == ["native"] * len(models) + ["native int4", "native Q8_0"]


def _mixture():
    return writable_model("qwen3_moe", hidden_size=64, intermediate_size=64, moe_intermediate_size=32, head_dim=16)
