"""What a start imports: torch takes seconds, and transformers takes more."""

import subprocess
import sys
from functools import partial

import pytest

from tests.helpers import quantized_files as files
from tests.helpers import tiny
from tests.helpers.gguf_architectures import writable_model, write_architecture
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


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nofile.gguf", "nofile.gguf cannot be read (No such file or directory)"),
        ("nodir", "nodir is not a folder"),
        ("@nobody", "@nobody does not come with Outrider"),
    ],
)
def test_missing_target_is_an_error_before_packages_are_imported(name, message):
    imported, errors = _imports("run", "--target", name)
    assert not imported
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
