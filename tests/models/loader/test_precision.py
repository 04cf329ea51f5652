"""What reports say of the precision of a target."""

import json

import pytest
from rich.console import Console
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from outrider import LLM
from outrider.cli.app import app
from outrider.lab.bench.run import run_bench
from outrider.lab.bench.settings import Settings
from outrider.models.loader.embedded import embedded
from tests.helpers import tiny
from tests.helpers.configured import with_engine
from tests.helpers.gguf_files import SIZES, write_gguf

KINDS = {"attn_v": "Q8_0", "token_embd": "Q8_0"}
CONFIG = tiny.make_config("LlamaConfig", **SIZES, head_dim=32, num_hidden_layers=2)


def write(folder, kind, kinds=None):
    return str(write_gguf(folder / "model.gguf", AutoModelForCausalLM.from_config(CONFIG), kind, kinds=kinds))


def precision(target, **options):
    llm = LLM(target, proposer="none", k=0, device="cpu", max_model_len=64, **options)
    return llm.parts.precision


@pytest.mark.parametrize(("kind", "bits"), [("Q4_0", 4.5), ("Q4_1", 5.0), ("Q8_0", 8.5)])
def test_bits_of_a_file_are_those_of_its_blocks(tmp_path, kind, bits):
    found = precision(write(tmp_path, kind), kernels="torch", dtype="float32")
    assert found.as_dict() == {"dtype": "float32", "weight_types": [kind], "weight_bits": bits}
    assert str(found) == f"{kind} weights of {bits:g} bits, float32 otherwise"


def test_bits_of_several_types_are_their_mean(tmp_path):
    target = write(tmp_path, "Q4_1", KINDS)
    found = precision(target, kernels="torch", dtype="float32").weights
    weights = dict(AutoModelForCausalLM.from_config(CONFIG).named_parameters())
    sizes = {name: weight.numel() for name, weight in weights.items() if weight.dim() > 1}
    wide = sum(size for name, size in sizes.items() if "v_proj" in name or "embed" in name)
    total = sum(sizes.values())
    assert found.types == ("Q4_1", "Q8_0")
    assert found.bits == pytest.approx((8.5 * wide + 5.0 * (total - wide)) / total)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"dtype": "float32"}, ("float32", ["float32"], 32)),
        ({"dtype": "bfloat16"}, ("bfloat16", ["bfloat16"], 16)),
        ({"quantize": "int4"}, ("bfloat16", ["int4"], 4)),
    ],
)
def test_bits_of_a_folder(options, expected):
    found = precision(embedded("nano"), kernels="torch", **options)
    assert tuple(found.as_dict().values()) == expected


def test_report_of_a_benchmark_names_the_types_of_the_file(tmp_path):
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "a b a b a b"}) + "\n")
    settings = with_engine(
        Settings,
        target=write(tmp_path, "Q4_1"),
        proposer="ngram",
        prompts=str(tmp_path / "prompts.jsonl"),
        repeats=1,
        max_tokens=4,
        dtype="float32",
        kernels="torch",
    )
    result = run_bench(settings, progress=Console(quiet=True))
    assert result.as_dict()["weight_bits"] == 5
    assert "greedy, Q4_1 weights of 5 bits, float32 otherwise, torch kernels" in result.summary()


def test_run_names_the_types_of_the_file(tmp_path):
    words = ["run", "--target", write(tmp_path, "Q4_1"), "--proposer", "none", "--kernels", "torch", "--show", "--json"]
    result = CliRunner().invoke(app, [*words, "--dtype", "float32", "--max-tokens", "4", "a b"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert (document["dtype"], document["weight_types"], document["weight_bits"]) == ("float32", ["Q4_1"], 5.0)
    assert "Q4_1 weights of 5 bits, float32 otherwise, torch kernels" in result.stderr
