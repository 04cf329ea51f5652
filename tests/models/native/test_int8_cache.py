"""The KV cache in int8: it is rounded once, and everything that reads or moves it sees the same numbers."""

import sys
from dataclasses import replace

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.core import tree
from outrider.core.config import EngineConfig
from outrider.drafting.propose.leaves import draft_model
from outrider.errors import OutriderError
from outrider.models.cache.paged import spread
from outrider.models.loader.embedded import embedded
from outrider.models.loader.load import load_checkpoint
from outrider.models.loader.make import make_target
from tests.helpers import tiny
from tests.helpers.threads import torch_threads
from tests.models.native.test_native import chain, feed, load_target, random_ids, relative_error

pytestmark = pytest.mark.skipif(not tiny.compiles(), reason="no C++ compiler")
_LONG = {"max_position_embeddings": 256, "num_hidden_layers": 2}
MODELS = {
    "three queries per key": tiny.make_config(
        "LlamaConfig", hidden_size=96, head_dim=16, num_attention_heads=6, num_key_value_heads=2, **_LONG
    ),
    "window": tiny.make_config("MistralConfig", head_dim=32, sliding_window=70, **_LONG),
    "score cap": tiny.make_config("Gemma2Config", head_dim=64, sliding_window=40, **_LONG),
}
PROMPTS = ["def add(a, b):\n    return", "Once upon a time", "SELECT name FROM", "def add(a, b):\n    return a"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("int8")
    return {name: tiny.save(root / name, config) for name, config in MODELS.items()}


def rounded(x):
    """Round keys or values [..., dim] to 255 integers of each token and head."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_logits_equal_those_of_attention_to_rounded_keys_and_values(name, folders, monkeypatch):
    target, model = load_target(folders[name], bits=32, context=256, kv_dtype="int8")
    tokens = random_ids(150)
    logits = feed(target, [tokens[:90], tokens[90:100]], draft=chain(tokens[100:]))[1].logits[0]
    unrounded = model(torch.tensor([tokens])).logits[0, 99:]
    module = sys.modules[type(model).__module__]
    attend = module.eager_attention_forward
    monkeypatch.setattr(
        module,
        "eager_attention_forward",
        lambda self, query, key, value, *args, **options: attend(
            self, query, spread(rounded(spread(key))), rounded(value), *args, **options
        ),
    )
    expected = model(torch.tensor([tokens])).logits[0, 99:]
    assert relative_error(logits, expected) < 3e-3
    assert relative_error(logits, unrounded) > 4 * relative_error(logits, expected)


@torch.inference_mode()
def test_error_of_a_cached_number_is_bounded(folders):
    tokens = random_ids(100)
    cached = {}
    for kv_dtype in ("auto", "int8"):
        target, _ = load_target(folders["window"], bits=32, context=256, kv_dtype=kv_dtype)
        feed(target, [tokens])
        cached[kv_dtype] = target._memory.entries(0, [0], 0, 100)
    keys, values = zip(cached["auto"], cached["int8"], strict=True)
    for exact, stored in (map(spread, keys), values):
        step = exact.abs().amax(-1, keepdim=True) / 127
        assert stored.dtype == torch.float32
        assert ((stored - exact).abs() <= 0.501 * step).all()
        assert relative_error(stored, exact) > 0


@torch.inference_mode()
def test_large_biases_of_keys_cost_no_precision(tmp_path):
    """Those of dimensions that hardly turn are not rounded. Entries that the cache returns have them."""
    config = tiny.make_config("Qwen2Config", head_dim=16, rope_parameters={"rope_theta": 1e6, "rope_type": "default"})
    model = tiny.auto_class(config).from_config(config)
    for layer in model.model.layers:
        layer.self_attn.k_proj.bias.view(-1, 16)[:, [7, 15]] = 100.0
    folder = tiny.save_model(tmp_path, model)
    keys = []
    for kv_dtype in ("auto", "int8"):
        target, _ = load_target(folder, bits=32, kv_dtype=kv_dtype)
        feed(target, [random_ids(60)])
        keys.append(target._memory.entries(1, [0], 0, 60)[0])
    assert keys[0].abs().max() > 99
    assert (keys[1] - keys[0]).abs().max() < 0.2


@torch.inference_mode()
def test_bits_do_not_depend_on_threads(folders):
    tokens = random_ids(60)
    logits = []
    for threads in (1, 2, 3):
        with torch_threads(threads):
            target, _ = load_target(folders["three queries per key"], kv_dtype="int8")
            logits.append(feed(target, [tokens[:20], tokens[20:21]], draft=chain(tokens[21:]))[1].logits)
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


@torch.inference_mode()
def test_committed_branch_equals_fresh_prefill(folders):
    """The accepted path of a tree is moved with its scales."""
    target, _ = load_target(folders["window"], kv_dtype="int8")
    rng = tiny.random.Random(0)
    seq = tiny.admit(target, 0, random_ids(21))
    for _ in range(6):
        tiny.grow(target, [seq], rng)
    committed = target.score(tiny.everything([seq]), tree.empty(1, target.device)).logits
    assert torch.equal(committed, feed(target, [seq.token_ids], slot=1)[0].logits)


@pytest.mark.parametrize("bits", [32, 16])
def test_numbers_take_a_byte_and_heads_a_scale(bits, folders):
    target, _ = load_target(folders["window"], bits=bits, kv_dtype="int8")
    shape = target._decoder.shape
    assert target.cache.usage().token_bytes == shape.layers * shape.key_heads * 2 * (shape.dim + 4)
    assert target.kernels == "native kv-int8"


@torch.inference_mode()
def test_number_that_is_not_finite_is_not_hidden(folders):
    target, _ = load_target(folders["window"], kv_dtype="int8")
    name = "model.layers.0.self_attn.v_proj.weight"
    target.update_weights({name: torch.full(target._decoder.weights.shapes[name], torch.inf)}, 1)
    assert not feed(target, [random_ids(5)])[0].logits.isfinite().any()


@pytest.mark.fast_cases("tree", "quantized")
@pytest.mark.parametrize(
    "proposer",
    {
        "chain": "draft:nano",
        "tree": "tree:nano",
        "quantized": "best(suffix,quantized:int4)",
        "exit": "exit:2",
        "skip": "skip:1",
    }.items(),
    ids=lambda case: case[0],
)
def test_output_does_not_depend_on_speculation(proposer):
    """It is that of plain decoding with the same cache, in a batch, alone, with shared prefixes and few blocks."""
    options = {
        "kv_dtype": "int8",
        "verifier": "walk",
        "dtype": "bfloat16",
        "kernels": "native",
        "max_num_seqs": 4,
        "max_model_len": 160,
    }
    plain = LLM(None, proposer="none", k=0, **options, prefix_caching=False)
    spec = proposer[1].replace("nano", str(embedded("nano")))
    blocks = plain.engine.cache_usage()
    drafted = LLM(None, proposer=spec, k=5, **options, cache_gb=5 * blocks.token_bytes * blocks.block_tokens / 1e9)
    prompts = [prompt + " x" * 30 for prompt in PROMPTS]
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_tokens=100, temperature=temperature, seed=5, ignore_eos=True)
        expected = [plain.generate(prompt, params)[0].token_ids for prompt in prompts]
        assert [c.token_ids for c in drafted.generate(prompts, params)] == expected
        assert [drafted.generate(prompt, replace(params, k=3))[0].token_ids for prompt in prompts] == expected
    usage = drafted.engine.cache_usage()
    assert usage.hit_tokens
    assert usage.preempted
    draft = draft_model(drafted.parts.proposer)
    if proposer[0] in ("chain", "tree", "skip"):
        assert draft.kernels.split(",")[0] == "native kv-int8"


def test_errors_name_the_fix(folders):
    with pytest.raises(OutriderError, match="kv_dtype is 'int4'; use auto or int8"):
        EngineConfig(kv_dtype="int4")
    for options in ({"kernels": "torch"}, {"kernels": "triton"}, {"dtype": "float16"}):
        with pytest.raises(OutriderError, match=r"kv_dtype int8 needs the native kernels, .* or leave kv_dtype out"):
            LLM(folders["window"], kv_dtype="int8", proposer="none", **options)


def test_model_that_the_kernels_do_not_support_is_refused(tmp_path):
    """It does not run on torch with another cache."""
    folder = tiny.save(tmp_path / "size", tiny.make_config("LlamaConfig", head_dim=8))
    with pytest.raises(OutriderError, match=r"multiples of 16, .*; leave kv_dtype out"):
        make_target(load_checkpoint(folder, device="cpu"), slots=1, context=32, kv_dtype="int8")
