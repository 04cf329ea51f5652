"""Tests of inflated models: their logits equal those of the small model, up to rounding."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
import typer
from inflate.check import Text, compare, greedy, load
from inflate.files import inflate_folder
from inflate.model import Dims, inflate, inflate_config, inflate_tensors
from inflate.wiring import make_stream, shares
from safetensors import safe_open
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from typer.testing import CliRunner

from outrider import LLM, OutriderError, SamplingParams
from outrider.core.prompts import read_prompts
from tests.helpers.tiny import VOCAB, make_config, save

MODELS = Path(__file__).parents[2] / "outrider" / "assets"
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu" / "inflate_model.py"
PROMPTS = [prompt for prompt in read_prompts() if prompt.prompt]

# The tiny model has hidden 32, 4 layers, 4 heads, 2 key-value heads, head_dim 8, ffn 48, and 256 tokens.
SIZES = {
    "same": Dims(),
    "hidden": Dims(hidden=64),
    "hidden, with spare channels": Dims(hidden=76),
    "hidden, less than two copies": Dims(hidden=36),
    "layers": Dims(layers=9),
    "ffn": Dims(ffn=101),
    "ffn and layers, odd": Dims(ffn=49, layers=5),
    "heads": Dims(hidden=96, heads=12),
    "kv heads": Dims(hidden=96, heads=12, kv_heads=6),
    "kv heads, unequal copies": Dims(hidden=100, heads=10, kv_heads=5),
    "one kv head per head": Dims(kv_heads=4),
    "larger heads": Dims(head_dim=16),
    "four times larger heads": Dims(head_dim=32, hidden=40),
    "untied": Dims(untie=True, hidden=64),
    "tokens, with spare channels": Dims(hidden=72, vocab=600, untie=True),
    "tokens, with a merged channel": Dims(hidden=128, vocab=257, untie=True),
    "tokens, with one copy less": Dims(hidden=64, vocab=300, untie=True),
    "everything": Dims(hidden=200, layers=7, heads=20, kv_heads=10, head_dim=16, ffn=333, vocab=777, untie=True),
}


def tiny(**settings):
    """Return a tiny model whose norm weights all differ."""
    torch.manual_seed(1)
    model = LlamaForCausalLM(make_config("LlamaConfig", **settings)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight += 0.2 * torch.randn(weight.shape)
    return model


def inflated(model, dims, **settings):
    """Return the inflated model."""
    config, weights = inflate(model, dims, **settings)
    large = AutoModelForCausalLM.from_config(config, dtype=config.dtype).eval()
    large.load_state_dict(weights, strict=not config.tie_word_embeddings)
    return large


def texts(vocab=VOCAB):
    """Return two random texts."""
    generator = torch.Generator().manual_seed(2)
    return [Text(tokens=torch.randint(vocab, (length,), generator=generator), prompt=1) for length in (40, 7)]


@pytest.fixture
def exact_norm(monkeypatch):
    """Compute norms in the precision of the model. transformers computes them in float32."""

    def norm(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    monkeypatch.setattr(LlamaRMSNorm, "forward", norm)


@pytest.mark.fast_cases(
    "separate head-same",
    "separate head-hidden, less than two copies",
    "separate head-ffn and layers, odd",
    "separate head-kv heads, unequal copies",
    "separate head-four times larger heads",
    "separate head-tokens, with a merged channel",
    "tied-hidden, with spare channels",
    "tied-ffn",
    "tied-kv heads",
    "tied-larger heads",
    "tied-tokens, with spare channels",
    "tied-everything",
)
@pytest.mark.usefixtures("exact_norm")
@pytest.mark.parametrize("dims", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("tied", [False, True], ids=["separate head", "tied"])
def test_logits_are_exact_in_float64(dims, tied):
    small = tiny(tie_word_embeddings=tied, rms_norm_eps=1e-3).double()
    agreement = compare(small, inflated(small, dims, dtype=torch.float64), texts())
    assert agreement.worst_logit < 1e-10
    assert agreement.same == agreement.positions
    assert abs(agreement.kl) < 1e-9


@pytest.mark.fast_cases("(12, 12)-1-1", "(12, 12)-6-2", "(12, 6)-4-4", "(24, 6)-6-3")
@pytest.mark.usefixtures("exact_norm")
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 1), (4, 4), (6, 2), (6, 3)])
@pytest.mark.parametrize("large", [(12, 12), (12, 6), (24, 6)], ids=str)
def test_grouped_query_attention(heads, kv_heads, large):
    small = tiny(num_attention_heads=heads, num_key_value_heads=kv_heads, hidden_size=48, head_dim=8).double()
    dims = Dims(heads=large[0], kv_heads=large[1], hidden=120, head_dim=16)
    if heads // kv_heads > large[1] // kv_heads * (large[0] // large[1]):
        with pytest.raises(OutriderError, match="kv_heads"):
            inflate(small, dims)
        return
    assert compare(small, inflated(small, dims, dtype=torch.float64), texts()).worst_logit < 1e-10


@pytest.mark.usefixtures("exact_norm")
@pytest.mark.parametrize("rope_type", ["linear", "llama3"])
def test_scaled_rotary_embeddings(rope_type):
    rope = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 4.0}
    if rope_type == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    small = tiny(rope_parameters=rope).double()
    assert compare(small, inflated(small, Dims(head_dim=16), dtype=torch.float64), texts()).worst_logit < 1e-10


@pytest.mark.parametrize(
    ("settings", "dims", "message"),
    [
        ({}, Dims(hidden=31), "hidden 31 .* give 32 or more"),
        ({}, Dims(layers=3), "layers 3 .* give 4 or more"),
        ({}, Dims(ffn=0), "ffn 0 .* give 48 or more"),
        ({}, Dims(head_dim=12), "rotary frequencies .* give a multiple of 8"),
        ({}, Dims(hidden=34), "must divide"),
        ({}, Dims(kv_heads=3), "must divide"),
        ({"num_attention_heads": 8}, Dims(heads=8, kv_heads=8), None),
        ({"num_attention_heads": 8, "num_key_value_heads": 2}, Dims(heads=12, kv_heads=3, hidden=96), None),
        ({"num_attention_heads": 8, "num_key_value_heads": 2}, Dims(heads=9, kv_heads=3, hidden=90), "give 2 kv_heads"),
        ({"tie_word_embeddings": True}, Dims(hidden=64, vocab=300), "--untie"),
        ({}, Dims(vocab=300), "hidden 32 is too small"),
        ({"attention_bias": True}, Dims(), "without biases"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, Dims(head_dim=16), "yarn"),
    ],
)
def test_dimensions_that_do_not_fit(settings, dims, message):
    config = make_config("LlamaConfig", **settings)
    if message is None:
        inflate_config(config, dims)
        return
    with pytest.raises(OutriderError, match=message):
        inflate_config(config, dims)


def test_other_architecture_is_an_error():
    with pytest.raises(OutriderError, match="model_type llama"):
        inflate_config(make_config("Qwen3Config"), Dims())


@pytest.mark.parametrize("copies", [*range(1, 20), 37, 64])
def test_shares_are_powers_of_two_that_add_up_to_1(copies):
    values = shares([0] * copies)
    assert sum(values) == 1
    assert values == sorted(values, reverse=True)
    assert values[0] <= 2 * values[-1]
    assert all(share == 2.0 ** round(torch.tensor(share).log2().item()) for share in values)


@pytest.mark.parametrize("small", [1, 2, 5, 32, 768])
@pytest.mark.parametrize("large", [3, 32, 33, 63, 64, 128, 161, 4096])
@pytest.mark.parametrize("constant", [False, True])
def test_read_of_what_a_stream_has_written_is_exact(small, large, constant):
    if large < small + constant:
        with pytest.raises(OutriderError, match="too small"):
            make_stream(small, large, constant=constant)
        return
    stream = make_stream(small, large, constant=constant)
    squares = torch.zeros(small, dtype=torch.float64).index_add_(0, stream.source, stream.scale.square())
    assert squares.eq(stream.energy).all()
    assert int(stream.scale.eq(0).sum()) <= 3
    assert stream.constant is None or stream.scale[stream.constant] == 0
    assert len(stream.source) == len(stream.scale) == len(stream.share) == large
    weight = torch.randn(7, small, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    write = stream.write(torch.eye(small), torch.bfloat16)
    read = stream.read(weight, torch.bfloat16)
    assert torch.equal(read.float() @ write.float(), weight)  # exact, because shares are powers of two


@pytest.fixture(scope="module")
def rounded():
    """The model in bfloat16, its greedy outputs, and how far its logits are from those in float32."""
    model = load(MODELS / "nano", torch.bfloat16)
    outputs = greedy(model, MODELS / "nano", PROMPTS[:4], 24)
    return model, outputs, compare(load(MODELS / "nano", torch.float32), model, outputs)


@pytest.mark.fast_cases("layers")
@pytest.mark.parametrize(
    ("dims", "share"),  # share: of the difference between the small model in bfloat16 and in float32
    [
        (Dims(layers=6, ffn=1000), 0.2),  # added layers, and shares that are powers of two
        (Dims(hidden=512, heads=8, kv_heads=4, head_dim=256), 0.5),  # factors that are powers of two
        (Dims(hidden=640, layers=4, heads=8, kv_heads=2, head_dim=128, ffn=1000), 1.5),
        (Dims(hidden=700, layers=4, heads=10, kv_heads=5, head_dim=128, vocab=12345, untie=True), 1.5),
    ],
    ids=["layers", "powers of two", "other factors", "everything"],
)
def test_difference_in_bfloat16_is_small(dims, share, rounded):
    model, outputs, rounding = rounded
    large = inflated(model, dims)
    assert large.dtype == torch.bfloat16
    inflation = compare(model, large, outputs)
    assert inflation.mean_logit < share * rounding.mean_logit
    assert inflation.same >= 0.95 * inflation.positions


def test_inflate_folder(tmp_path):
    small = save(tmp_path / "small", make_config("LlamaConfig"))
    out = tmp_path / "deep" / "large"
    dims = Dims(hidden=96, layers=6, heads=12, kv_heads=6, head_dim=16, ffn=200, vocab=400, untie=True)
    written = inflate_folder(small, out, dims, shard=300_000)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert written.files == len(files) > 2
    assert set(index["weight_map"].values()) == set(files)
    assert not list(out.glob("*.part"))
    model = load(small, torch.float32)
    weights = dict(inflate_tensors(model.config, written.config, model.state_dict().__getitem__))
    for file in files:
        with safe_open(out / file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                assert torch.equal(opened.get_tensor(name), weights.pop(name))
    assert not weights
    params = SamplingParams(temperature=0, max_tokens=24)
    (small_completion,), (large_completion,) = (
        LLM(folder, proposer="ngram", dtype="float32").generate(["abcabc"], params) for folder in (small, out)
    )
    assert large_completion.text == small_completion.text
    with pytest.raises(OutriderError, match="not empty"):
        inflate_folder(small, out, dims)


def test_unsuitable_folders(tmp_path):
    with pytest.raises(OutriderError, match=r"no config\.json"):
        inflate_folder(tmp_path, tmp_path / "out", Dims())
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(OutriderError, match=r"no config\.json"):
        inflate_folder(tmp_path, tmp_path / "out", Dims())
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(OutriderError, match="type gpt2"):
        inflate_folder(tmp_path, tmp_path / "out", Dims())
    make_config("LlamaConfig").save_pretrained(tmp_path)
    with pytest.raises(OutriderError, match=r"no \.safetensors"):
        inflate_folder(tmp_path, tmp_path / "out", Dims())
    assert not (tmp_path / "out").exists()
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(OutriderError, match="copy the checkpoint again"):
        inflate_folder(tmp_path, tmp_path / "out", Dims())


def test_script_with_check(tmp_path):
    spec = importlib.util.spec_from_file_location("inflate_script", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    app = typer.Typer()
    app.command()(script.main)
    command = ["--model", str(MODELS / "nano"), "--out", str(tmp_path / "out"), "--check", "4"]
    sizes = ["--hidden", "256", "--layers", "3", "--vocab", "12300", "--untie", "--threads", "1"]
    result = CliRunner().invoke(app, [*command, *sizes])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout.splitlines()[-1])
    assert document["dims"]["hidden_size"] == 256
    assert document["dims"]["vocab_size"] == 12300
    assert document["zero_share"] < 0.01
    assert document["agreement"]["inflated, from small"]["texts"] == 16
    for invalid in (["--like", "9b"], ["--dtype", "int8"], ["--hidden", "100"]):
        result = CliRunner().invoke(app, [*command, *invalid])
        assert result.exit_code == 1
        assert "error:" in result.output
