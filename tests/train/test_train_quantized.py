"""Trainings for quantized targets: GGUF files, and weights that are quantized when they are loaded."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from outrider.core.config import EngineConfig
from outrider.core.params import SamplingParams
from outrider.engine.build import load_target
from outrider.errors import OutriderError
from outrider.llm import LLM
from outrider.models.loader.load import load_checkpoint
from outrider.train.data.batches import score_sequence
from outrider.train.model.draft_model import load_trainable
from outrider.train.run import Training
from outrider.train.settings import Settings
from tests.helpers import tiny
from tests.helpers.configured import with_engine
from tests.helpers.gguf_files import SIZES, write_gguf

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(not tiny.compiles(), reason="needs a C++ compiler")


def _config(**settings):
    sizes = SIZES | {"head_dim": 32, "num_hidden_layers": 4, "initializer_range": 0.1}
    return tiny.make_config("LlamaConfig", **sizes | settings)


def _write(path, kind="Q4_0", **settings):
    torch.manual_seed(3)
    return write_gguf(path, AutoModelForCausalLM.from_config(_config(**settings)).eval(), kind)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return _write(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return _write(tmp_path_factory.mktemp("gguf") / "tied.gguf", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("folder") / "target", _config())


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": "ab" * count}) + "\n" for count in range(1, 9)))
    return str(path)


def _settings(data, out, target, **options):
    defaults = {"batch_size": 2, "steps_per_generation": 2, "max_tokens": 8, "k": 2, "eval_every": 0, "threads": 1}
    return with_engine(Settings, out=str(out), data=[data], target=str(target), **defaults | options)


def _states_of(config, tokens, layers):
    """Return the hidden states [L, layers, H] of a target that is loaded for this purpose."""
    target = load_target(config).model
    target.export_hidden_states(layers)
    with torch.inference_mode():
        return score_sequence(target, tokens).states(layers, 0, ())


@pytest.mark.fast_cases("eagle31-native")
@pytest.mark.parametrize(
    ("kind", "kernels"),
    [
        ("mtp", "torch"),
        pytest.param("mtp", "native", marks=[needs_compiler, pytest.mark.slow]),
        ("eagle31", "torch"),
        pytest.param("eagle31", "native", marks=needs_compiler),
    ],
)
def test_head_for_a_gguf_file(kind, kernels, file, data, tmp_path):
    training = Training(kind, _settings(data, tmp_path, file, kernels=kernels))
    target = training.setup.parts.target
    assert target.kernels == ("native Q4_0" if kernels == "native" else "torch")
    sample = training.schedule.samples(0)[0]
    layers = training.setup.recorder.layers
    states = _states_of(EngineConfig(target=file, kernels=kernels, max_num_seqs=1), sample.tokens[:-1], layers)
    assert torch.allclose(sample.states.float(), states.float(), rtol=0.02, atol=0.02)
    document, _ = training.run()
    assert document["steps"]
    options = {"kernels": kernels, "max_num_seqs": 1, "max_model_len": 64}
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    (completion,) = LLM(file, proposer=f"draft:{tmp_path}", k=2, **options).generate([[5, 6, 7]], params)
    (expected,) = LLM(file, proposer="none", **options).generate([[5, 6, 7]], params)
    assert completion.stats.draft_tokens
    assert completion.token_ids == expected.token_ids


@needs_compiler
def test_tables_of_a_gguf_file_are_expanded_to_bfloat16(file, tied, folder):
    for path in (file, tied):
        model = load_checkpoint(path, dtype="float32").model
        tables = load_target(EngineConfig(target=path, max_num_seqs=1)).model.share_weights()
        assert torch.equal(tables.embedding, model.get_input_embeddings().weight.bfloat16())
        assert torch.equal(tables.head, model.get_output_embeddings().weight.bfloat16())
        assert (tables.embedding is tables.head) == (path is tied)  # a tied table is expanded once
    loaded = load_target(EngineConfig(target=folder, quantize="int8", max_num_seqs=1))
    tables = loaded.model.share_weights()
    assert torch.equal(tables.head, loaded.checkpoint.model.lm_head.weight.bfloat16())


@pytest.mark.fast_cases("tied")
@pytest.mark.parametrize("name", ["file", "tied"])
def test_draft_model_starts_from_a_gguf_file(name, data, tmp_path, request):
    path = request.getfixturevalue(name)
    Training("draft", _settings(data, tmp_path, path, init_from=str(path), lr=1e-12)).run()
    written = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    expected = load_checkpoint(path, dtype="float32").model
    for module in ("model.embed_tokens", "lm_head", "model.layers.1.self_attn.q_proj", "model.layers.2.mlp.down_proj"):
        weight = expected.get_submodule(module).weight
        assert torch.allclose(written.get_submodule(module).weight, weight, rtol=0.005, atol=1e-6)
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) == (name == "file")


def test_tied_blocks_are_one_trainable_weight(tied):
    model = load_trainable(tied, CPU).model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(weight.requires_grad for weight in model.parameters())


def test_target_in_blocks_cannot_be_trained(file, data, tmp_path):
    settings = with_engine(Settings, out=str(tmp_path), data=[data], target=str(file), train_target=0.3)
    with pytest.raises(OutriderError, match="keeps its quantized ones; use the folder of the unquantized model"):
        Training("mtp", settings)


@pytest.mark.fast_cases("native")
@pytest.mark.parametrize("kernels", [pytest.param("native", marks=needs_compiler), "torch"])
def test_head_for_a_target_that_is_quantized_when_it_is_loaded(kernels, folder, data, tmp_path):
    training = Training("mtp", _settings(data, tmp_path, folder, quantize="int4", kernels=kernels, proposer="none"))
    assert training.setup.parts.target.kernels == f"{kernels} int4"
    sample = training.schedule.samples(0)[0]
    layers = training.setup.recorder.layers
    errors = {}
    for quantize in ("int4", None):
        config = EngineConfig(target=folder, dtype="bfloat16", kernels=kernels, quantize=quantize, max_num_seqs=1)
        states = _states_of(config, sample.tokens[:-1], layers).float()
        errors[quantize] = float((sample.states.float() - states).norm() / states.norm())
    assert errors["int4"] < 0.02 < errors[None]
    assert training.run()[0]["steps"]


def test_quantize_is_checked(file, folder, data, tmp_path):
    for target, options, message in (
        (file, {"quantize": "int8"}, r"the target is quantized already \(Q4_0\); leave quantize out"),
        (folder, {"quantize": "int3"}, "quantize 'int3' is unknown; use int8 or int4"),
        (folder, {"quantize": "int8", "dtype": "float32"}, "quantize needs a CPU and bfloat16"),
        (folder, {"kernels": "cuda"}, "kernels 'cuda' is unknown; use auto, native"),
    ):
        with pytest.raises(OutriderError, match=message):
            Training("mtp", _settings(data, tmp_path, target, **options))
    with pytest.raises(OutriderError, match="leave --quantize out"):
        with_engine(Settings, out=str(tmp_path), data=[data], train_target=0.3, quantize="int8")
