"""The native kernels: close to the model, and equal in every bit whatever else is in the pass."""

import os
import random
import subprocess
import sys
from dataclasses import replace
from itertools import accumulate

import pytest
import torch

from outrider.core import tree
from outrider.core.params import SamplingParams
from outrider.core.target import draft_by_scores
from outrider.core.types import Batch, DraftBudget, StopRule
from outrider.errors import OutriderError, UnsupportedModel
from outrider.llm import LLM
from outrider.models.loader.embedded import embedded
from outrider.models.loader.load import load_checkpoint
from outrider.models.loader.make import make_target
from outrider.models.native.arena import Arena
from outrider.models.native.pack import interleave, pack, separate
from outrider.models.native.target import NativeTarget
from outrider.testing.drive import random_tree
from tests.helpers import tiny
from tests.helpers.architectures import gemma3
from tests.helpers.configs import MIXED
from tests.helpers.threads import torch_threads

pytestmark = pytest.mark.skipif(not tiny.compiles(), reason="no C++ compiler")
CPU = torch.device("cpu")
FLOAT_BITS = pytest.mark.parametrize("bits", [32, 16])  # weights that are not quantized
MODELS = {
    "llama": tiny.make_config("LlamaConfig", head_dim=16, hidden_size=48, intermediate_size=80),
    "tied": tiny.make_config("LlamaConfig", head_dim=32, tie_word_embeddings=True, vocab_size=250),
    "biased": tiny.make_config("LlamaConfig", head_dim=16, attention_bias=True, num_key_value_heads=4),
    "scaled": tiny.make_config(
        "LlamaConfig",
        head_dim=16,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "ministral": tiny.make_config("MinistralConfig", head_dim=16, sliding_window=tiny.WINDOW, layer_types=MIXED),
    "mistral": tiny.make_config("MistralConfig", head_dim=64, sliding_window=tiny.WINDOW),
    "qwen2": tiny.make_config(
        "Qwen2Config", hidden_size=64, use_sliding_window=True, sliding_window=tiny.WINDOW, max_window_layers=2
    ),
    "qwen3": tiny.make_config("Qwen3Config", head_dim=16, num_key_value_heads=1),
    "gemma": tiny.make_config("GemmaConfig", head_dim=16, tie_word_embeddings=True),
    "gemma2": tiny.make_config(
        "Gemma2Config",
        head_dim=16,
        sliding_window=tiny.WINDOW,
        attn_logit_softcapping=0.5,
        final_logit_softcapping=0.3,
    ),
    "gemma3": tiny.make_config(
        "Gemma3TextConfig", head_dim=32, sliding_window=tiny.WINDOW, layer_types=MIXED, query_pre_attn_scalar=24
    ),
    "gemma3 with images": gemma3(dim=16),
    "granite": tiny.make_config(
        "GraniteConfig",
        hidden_size=64,
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        attention_multiplier=0.2,
        logits_scaling=8.0,
    ),
    "olmo2": tiny.make_config("Olmo2Config", hidden_size=64),
    "olmo3": tiny.make_config("Olmo3Config", hidden_size=64, sliding_window=tiny.WINDOW, layer_types=MIXED),
    "phi3": tiny.make_config("Phi3Config", hidden_size=64, sliding_window=None, partial_rotary_factor=0.5),
    "seed_oss": tiny.make_config("SeedOssConfig", head_dim=16, attention_bias=True, attention_out_bias=True),
    "smollm3": tiny.make_config("SmolLM3Config", hidden_size=64, no_rope_layer_interval=2),
    "wide": tiny.make_config("LlamaConfig", head_dim=80, hidden_size=96, num_attention_heads=6),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("native")
    return {name: tiny.save(root / name, config) for name, config in MODELS.items()}


def load_target(folder, layers=(), *, bits=16, context=128, kv_dtype="auto"):
    """Return a target and the transformers model that it was made from."""
    checkpoint = load_checkpoint(folder, dtype="float32" if bits == 32 else "bfloat16", device="cpu")
    target = make_target(checkpoint, slots=4, context=context, kernels="native", bits=min(bits, 16), kv_dtype=kv_dtype)
    target.export_hidden_states(layers)
    checkpoint.model.set_attn_implementation("eager")
    return target, checkpoint.model


def random_ids(count, seed=0, vocab=250):
    rng = random.Random(seed)
    return [rng.randrange(vocab) for _ in range(count)]


@torch.inference_mode()
def check_tree_nodes_in_batches(target):
    """Check that the logits of tree nodes in a batch equal those of each branch alone, bit for bit."""
    sequences = [random_ids(count, seed) for seed, count in enumerate((31, 16, 5))]
    seqs = [tiny.admit(target, slot, tokens) for slot, tokens in enumerate(sequences)]
    draft = random_tree([9, 4, 0], 250, random.Random(1))
    batched = target.score(tiny.everything(seqs), draft).logits
    for b, tokens in enumerate(sequences):
        target.cache.release(b)
        for node in range(-1, draft.width[b]):
            path = draft.tokens[b, tiny.branch(draft, b, node)].tolist()
            alone = feed(target, [tokens + path], slot=3)[0].logits[0, -1]
            assert torch.equal(batched[b, node + 1], alone)


def feed(target, pieces, *, slot=0, draft=None):
    """Feed pieces of a sequence, one pass each, and return the scores. The last pass also scores `draft`."""
    seq = tiny.admit(target, slot, [token for piece in pieces for token in piece])
    all_scores = []
    start = 0
    for i, piece in enumerate(pieces):
        last = i == len(pieces) - 1
        piece_draft = draft if last and draft is not None else tree.empty(1, CPU)
        batch = Batch(seqs=(seq,), start=(start,), feed=(tuple(piece),), budget=DraftBudget((piece_draft.size,)))
        scores = target.score(batch, piece_draft)
        all_scores.append(scores)
        if not last:
            target.cache.commit(tree.prefill_round(batch, piece_draft, scores))
        start += len(piece)
    return all_scores


def chain(tokens):
    return tree.chain(torch.tensor([tokens]), (len(tokens),))


def relative_error(actual, expected):
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.fast_cases("llama", "scaled", "qwen2", "gemma2", "granite", "phi3", "wide")
@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_is_closer_to_float32_than_transformers(name, folders):
    target, model = load_target(folders[name])
    tokens = random_ids(40)
    with torch.inference_mode():
        logits = feed(target, [tokens[:1]], draft=chain(tokens[1:]))[0].logits[0]
        rounded = model(torch.tensor([tokens])).logits[0].float()
        exact = model.float()(torch.tensor([tokens])).logits[0]
    assert relative_error(logits, exact) < 0.8 * relative_error(rounded, exact)


@pytest.mark.parametrize("name", MODELS)
def test_float32_equals_transformers(name, folders):
    target, model = load_target(folders[name], bits=32)
    tokens = random_ids(100)
    with torch.inference_mode():
        logits = feed(target, [tokens[:60], tokens[60:61]], draft=chain(tokens[61:]))[1].logits[0]
        assert relative_error(logits, model(torch.tensor([tokens])).logits[0, 60:]) < 1e-4


def split(tokens, sizes):
    """Split tokens into pieces. Return the pieces and the index of the last token of each."""
    ends = list(accumulate(sizes))
    pieces = [tokens[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    return pieces, torch.tensor(ends) - 1


@pytest.mark.fast_cases(
    "32-llama",
    "32-ministral",
    "32-gemma",
    "32-granite",
    "32-seed_oss",
    "16-scaled",
    "16-qwen3",
    "16-gemma3 with images",
    "16-phi3",
    "8-biased",
    "8-qwen2",
    "8-gemma3",
    "8-olmo3",
    "8-wide",
    "4-tied",
    "4-mistral",
    "4-gemma2",
    "4-olmo2",
    "4-smollm3",
)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("bits", [32, 16, 8, 4])
def test_bits_do_not_depend_on_prefill_chunks(name, bits, folders):
    target, _ = load_target(folders[name], bits=bits)
    tokens = random_ids(45)
    with torch.inference_mode():
        reference = feed(target, [tokens[:1]], draft=chain(tokens[1:]))[0].logits[0]
        for sizes in ([1] * 45, [17, 16, 12], [44, 1], [3] * 15, [13, 31, 1]):
            pieces, ends = split(tokens, sizes)
            logits = torch.cat([scores.logits[0, -1:] for scores in feed(target, pieces, slot=2)])
            assert torch.equal(logits, reference[ends])


@FLOAT_BITS
def test_bits_do_not_depend_on_pass_width(bits, folders):
    """Each number of rows runs a different specialization of the kernels."""
    target, _ = load_target(folders["wide"], bits=bits)
    tokens = random_ids(52)
    with torch.inference_mode():
        reference = feed(target, [tokens[:1]], draft=chain(tokens[1:]))[0].logits[0]
        for width in range(1, 14):
            pieces, ends = split(tokens, [width] * (52 // width))
            logits = torch.cat([scores.logits[0, -1:] for scores in feed(target, pieces, slot=2)])
            assert torch.equal(logits, reference[ends])


@FLOAT_BITS
def test_bits_do_not_depend_on_thread_count(bits, folders):
    tokens = random_ids(40)
    logits = []
    for threads in (1, 2, 3, 8, 16):
        with torch_threads(threads):
            target, _ = load_target(folders["wide"], bits=bits)
            with torch.inference_mode():
                logits.append(feed(target, [tokens[:20], tokens[20:21]], draft=chain(tokens[21:]))[1].logits)
    assert all(torch.equal(logits[0], other) for other in logits[1:])


@pytest.mark.slow
def test_pass_with_fewer_threads_than_requested(folders, tmp_path):
    """OpenMP may grant fewer threads than requested. A barrier that waits for more threads never ends."""
    script = f"""if True:
        import torch
        from tests.models.native import test_native
        torch.set_num_threads(2)
        target, _ = test_native.load_target({str(folders["wide"])!r})
        tokens = test_native.random_ids(40)
        with torch.inference_mode():
            scores = test_native.feed(target, [tokens[:20], tokens[20:21]], draft=test_native.chain(tokens[21:]))
        torch.save(scores[1].logits, {str(tmp_path / "logits")!r})
    """
    limited = os.environ | {"OMP_THREAD_LIMIT": "1"}
    subprocess.run([sys.executable, "-c", script], env=limited, timeout=120, check=True)
    target, _ = load_target(folders["wide"])
    tokens = random_ids(40)
    with torch.inference_mode():
        expected = feed(target, [tokens[:20], tokens[20:21]], draft=chain(tokens[21:]))[1].logits
    assert torch.equal(torch.load(tmp_path / "logits"), expected)


@pytest.mark.fast_cases(
    "llama-32", "mistral-16", "wide-32", "gemma2-16", "gemma3-32", "granite-16", "olmo3-32", "phi3-16"
)
@FLOAT_BITS
@pytest.mark.parametrize("name", ["llama", "mistral", "wide", "gemma2", "gemma3", "granite", "olmo3", "phi3"])
def test_bits_of_tree_nodes_do_not_depend_on_the_batch(name, bits, folders):
    check_tree_nodes_in_batches(load_target(folders[name], bits=bits)[0])


@FLOAT_BITS
def test_committed_branch_equals_fresh_prefill(bits, folders):
    target, _ = load_target(folders["llama"], bits=bits)
    rng = random.Random(0)
    seq = tiny.admit(target, 0, random_ids(21))
    with torch.inference_mode():
        for _ in range(6):
            tiny.grow(target, [seq], rng)
        committed = target.score(tiny.everything([seq]), tree.empty(1, CPU)).logits
        assert torch.equal(committed, feed(target, [seq.token_ids], slot=1)[0].logits)


@FLOAT_BITS
def test_ids_beyond_the_embedding_are_clamped(bits, folders):
    target, _ = load_target(folders["llama"], bits=bits)
    tokens = random_ids(11)
    last = target.vocab - 1
    with torch.inference_mode():
        expected = feed(target, [[*tokens, last]])[0].logits
        for token in (last + 1, last + 129, 10**8, 2**40):
            assert torch.equal(feed(target, [[*tokens, token]], slot=1)[0].logits, expected)
            assert torch.equal(feed(target, [tokens], draft=chain([token]))[0].logits[:, -1], expected[:, 0])
        seqs = [tiny.admit(target, slot, [*tokens, token]) for slot, token in enumerate((last, 10**8))]
        feeds = tuple(tuple(seq.token_ids) for seq in seqs)
        batch = Batch(seqs=tuple(seqs), start=(0, 0), feed=feeds, budget=DraftBudget((3, 3)))
        drafted = target.draft_greedy(batch, 200).tokens
    assert torch.equal(drafted[0], drafted[1])


@FLOAT_BITS
def test_draft_greedy_equals_step_by_step_scoring(bits, folders):
    target, _ = load_target(folders["biased"], bits=bits)
    sequences = [random_ids(count, seed) for seed, count in enumerate((11, 30, 4))]
    seqs = [tiny.admit(target, slot, tokens) for slot, tokens in enumerate(sequences)]
    batch = Batch(
        seqs=tuple(seqs),
        start=(0, 0, 0),
        feed=tuple(tuple(tokens) for tokens in sequences),
        budget=DraftBudget((3, 7, 1)),
    )
    with torch.inference_mode():
        drafted = target.draft_greedy(batch, 200).tokens
        expected = draft_by_scores(target, batch, 200).tokens
    assert drafted.shape == expected.shape == (3, 7)
    for b, budget in enumerate(batch.draft_budget):
        assert drafted[b, :budget].tolist() == expected[b, :budget].tolist()
    assert int(drafted.max()) < 200


@FLOAT_BITS
def test_chain_stops_at_end_of_text_token(bits, folders):
    target, _ = load_target(folders["biased"], bits=bits)
    seq = tiny.admit(target, 0, random_ids(11))
    batch = Batch(seqs=(seq,), start=(0,), feed=(tuple(seq.token_ids),), budget=DraftBudget((7,)))
    with torch.inference_mode():
        unstopped = target.draft_greedy(batch, 200).tokens[0].tolist()
        stop_rule = StopRule(weight=(1.0,), bias=(0.0,), ends=(unstopped[3], 777))
        drafted = target.draft_greedy(batch, 200, stop_rule)
        expected = draft_by_scores(target, batch, 200, stop_rule)
    assert drafted.count == expected.count == (unstopped.index(unstopped[3]) + 1,)


@pytest.mark.fast_cases("0.0-0.0-32", "0.2-0.1-16", "2.0-0.0-16")
@FLOAT_BITS
@pytest.mark.parametrize("extra", [0.0, 0.1])
@pytest.mark.parametrize("threshold", [0.0, 0.01, 0.2, 2.0])
def test_chain_stops_below_acceptance_thresholds(folders, threshold, extra, bits):
    target, _ = load_target(folders["biased"], bits=bits)
    sequences = [random_ids(count, seed) for seed, count in enumerate((11, 30, 4))]
    seqs = [tiny.admit(target, slot, tokens) for slot, tokens in enumerate(sequences)]
    batch = Batch(
        seqs=tuple(seqs),
        start=(0, 0, 0),
        feed=tuple(tuple(tokens) for tokens in sequences),
        budget=DraftBudget((3, 7, 1)),
    )
    stop_rule = StopRule(
        weight=(1.5, 0.8, 3.0),
        bias=(0.1, -0.4, 0.3),
        min_path_prob=threshold,
        min_draft_probs=(threshold + extra, threshold),
    )
    with torch.inference_mode():
        drafted = target.draft_greedy(batch, 200, stop_rule)
        expected = draft_by_scores(target, batch, 200, stop_rule)
    assert drafted.count == expected.count
    assert threshold + extra > 0 or drafted.count == batch.draft_budget
    assert threshold < 2 or drafted.count == (0, 0, 0)
    for b, (probs, expected_probs) in enumerate(zip(drafted.accept_prob, expected.accept_prob, strict=True)):
        count = drafted.count[b]
        assert probs == pytest.approx(expected_probs, rel=1e-5)
        assert drafted.margin[b] == pytest.approx(expected.margin[b], rel=1e-5)
        assert count <= len(probs) <= min(count + 1, batch.draft_budget[b])
        assert drafted.tokens[b, : len(probs)].tolist() == expected.tokens[b, : len(probs)].tolist()
        assert all(prob >= threshold for prob in probs[:count])
        assert all(prob < threshold for prob in probs[count:])


@FLOAT_BITS
def test_exported_hidden_states_equal_layer_outputs(bits, folders):
    target, model = load_target(folders["qwen3"], layers=(1, 3), bits=bits)
    tokens = random_ids(12)
    with torch.inference_mode():
        scores = feed(target, [tokens[:1]], draft=chain(tokens[1:]))[0]
        states = model.float()(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    assert relative_error(scores.hidden_states[1][0], states[2][0]) < {32: 1e-5, 16: 0.02}[bits]
    assert torch.equal(scores.feed_hidden_states[3][0], scores.hidden_states[3][0, :1])


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", ["tied", "gemma3", "phi3"])
def test_quantized_target_equals_its_quantized_weights(name, bits, folders):
    _, unquantized = load_target(folders[name])
    target, model = load_target(folders[name], bits=bits)
    tokens = random_ids(30)
    with torch.inference_mode():
        logits = feed(target, [tokens[:1]], draft=chain(tokens[1:]))[0].logits[0]
        expected = model.float()(torch.tensor([tokens])).logits[0]
        unquantized_logits = unquantized.float()(torch.tensor([tokens])).logits[0]
    assert relative_error(logits, expected) < 0.13  # the rounding of activations remains
    assert relative_error(expected, unquantized_logits) > {8: 0.005, 4: 0.1}[bits]
    assert target.bytes() < load_target(folders[name])[0].bytes()


@pytest.mark.parametrize("bits", [32, 16, 8])
@pytest.mark.parametrize("name", ["tied", "gemma"])  # gemma multiplies its embeddings by a factor
def test_tied_table_is_in_memory_once(name, bits, folders):
    """Its rows, which are read from the LM head, equal those of a table of its own."""
    target, _ = load_target(folders[name], bits=bits)
    assert "embedding" not in target.stored_weights()
    packed = target.share_weights().packed
    assert target.bytes() == sum(tensor.nbytes for tensor in target.stored_weights().values()) + _frequencies(target)
    tokens = random_ids(20)
    with torch.inference_mode():
        logits = feed(target, [tokens])[0].logits
        decoder = target._decoder
        weights = decoder.weights
        weights.table = None
        weights.embedding = weights._scaled(packed.unpack().to(weights.dtype)).contiguous()
        decoder._open()
        assert torch.equal(feed(target, [tokens])[0].logits, logits)


def _frequencies(target):
    return target._decoder.shape.rotary.frequency.nbytes


@FLOAT_BITS
@pytest.mark.parametrize("name", ["biased", "gemma3", "olmo2"])
def test_weight_update_equals_loading_the_other_checkpoint(name, bits, tmp_path):
    config = MODELS[name]
    old, new = (tiny.save(tmp_path / str(seed), config, seed=seed) for seed in (0, 1))
    target, _ = load_target(old, bits=bits)
    new_target, new_model = load_target(new, bits=bits)
    tokens = random_ids(20)
    with torch.inference_mode():
        expected = feed(new_target, [tokens])[0].logits
        assert not torch.equal(feed(target, [tokens])[0].logits, expected)
        first_weights = {name: value for name, value in new_model.state_dict().items() if "k_proj" not in name}
        other_weights = {name: value for name, value in new_model.state_dict().items() if "k_proj" in name}
        target.update_weights(first_weights, 1)
        assert not torch.equal(feed(target, [tokens])[0].logits, expected)
        target.update_weights(other_weights, 2)
        assert torch.equal(feed(target, [tokens])[0].logits, expected)
        for value in new_model.state_dict().values():
            value.zero_()  # the target must have copied the weights
        assert torch.equal(feed(target, [tokens])[0].logits, expected)
    assert target.version == 2
    with pytest.raises(OutriderError, match="no weight 'x'"):
        target.update_weights({"x": torch.zeros(1)}, 3)
    with pytest.raises(OutriderError, match="has shape"):
        target.update_weights({"model.norm.weight": torch.zeros(1)}, 3)


@pytest.mark.parametrize(("outputs", "inputs"), [(32, 64), (33, 65), (1, 1), (100, 130)])
def test_pack_and_unpack_round_trip(outputs, inputs):
    float32_weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0))
    weight = float32_weight.to(torch.bfloat16)
    assert torch.equal(pack(float32_weight, bits=32).unpack(), float32_weight)
    assert torch.equal(pack(weight).unpack(), weight)
    for bits in (8, 4):
        quantized = pack(weight, bits=bits).unpack()
        step = weight.float().abs().max() / ((1 << (bits - 1)) - 1)
        assert (quantized - weight.float()).abs().max() <= step * 0.51
        assert torch.equal(pack(quantized, bits=bits).unpack(), quantized)
    assert not pack(torch.zeros(outputs, inputs), bits=8).unpack().any()


def test_gate_and_up_are_interleaved():
    gate, up = torch.randn(48, 8), torch.randn(48, 8)
    interleaved = interleave(gate, up)
    assert torch.equal(interleaved[:16], gate[:16])
    assert torch.equal(interleaved[16:32], up[:16])
    assert all(map(torch.equal, separate(interleaved), (gate, up)))


def test_arena_tensors_do_not_overlap():
    arena = Arena()
    tensors = [torch.randn(count) for count in (3, 1000, 1 << 20)]
    copies = [arena.keep(tensor) for tensor in tensors]
    assert all(map(torch.equal, copies, tensors))
    assert all(tensor.data_ptr() % 64 == 0 for tensor in copies)


@pytest.mark.fast_cases("bfloat16")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_output_does_not_depend_on_speculation(dtype):
    """The output is the same with any proposer and k, in a batch and alone."""
    prompts = ["def add(a, b):\n    return", "Once upon a time", "SELECT name FROM", "The sum of 3 and 4 is"]
    options = {"verifier": "walk", "dtype": dtype, "kernels": "native", "max_num_seqs": 4, "max_model_len": 128}
    plain = LLM(None, proposer="none", k=0, **options)
    drafted = LLM(None, proposer=f"draft:{embedded('nano')}", k=5, **options)
    found = LLM(None, proposer="ngram", k=8, **options)
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_tokens=12, temperature=temperature, seed=5)
        expected = [plain.generate(prompt, params)[0].token_ids for prompt in prompts]
        assert [c.token_ids for c in plain.generate(prompts, params)] == expected
        assert [c.token_ids for c in drafted.generate(prompts, replace(params, k=1))] == expected
        assert [drafted.generate(prompt, params)[0].token_ids for prompt in prompts] == expected
        assert [c.token_ids for c in found.generate(prompts, params)] == expected


@pytest.mark.fast_cases("bfloat16")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sampled_output_in_a_batch_equals_output_alone(dtype):
    """Many sequences are sampled, because the last bit of a probability changes only one sample in some thousands."""
    options = {"proposer": "none", "k": 0, "dtype": dtype, "kernels": "native", "max_model_len": 96}
    batched = LLM(embedded("nano"), max_num_seqs=32, **options)
    alone = LLM(embedded("nano"), max_num_seqs=1, **options)
    beginnings = ("def add(a, b):", "Once upon a time", "SELECT name", "The")
    prompts = [f"{beginnings[i % 4]} {'x' * (i // 4)}" for i in range(32)]
    params = SamplingParams(max_tokens=32, temperature=1.0, seed=11, ignore_eos=True)
    batched_tokens = [c.token_ids for c in batched.generate(prompts, params)]
    alone_tokens = [c.token_ids for c in alone.generate(prompts, params)]
    assert batched_tokens == alone_tokens


def test_auto_uses_native_kernels_for_float32_and_bfloat16(folders):
    for dtype, kernels in (("float32", "native"), ("bfloat16", "native"), ("float16", "torch")):
        checkpoint = load_checkpoint(folders["llama"], dtype=dtype, device="cpu")
        assert make_target(checkpoint, slots=1, context=32).kernels == kernels


def test_error_messages_for_unsupported_options(folders, monkeypatch):
    with pytest.raises(OutriderError, match="kernels 'quick' is unknown; use auto, native, triton, graphs or torch"):
        LLM(folders["llama"], kernels="quick")
    with pytest.raises(OutriderError, match="need a CPU, and bfloat16 or float32; use kernels auto"):
        LLM(folders["llama"], kernels="native", dtype="float16")
    with pytest.raises(OutriderError, match="quantize 'int3' is unknown; use int8 or int4"):
        LLM(folders["llama"], quantize="int3")
    with pytest.raises(OutriderError, match="this target has no layer 9"):
        load_target(folders["llama"], layers=(9,))


def test_unsupported_architectures_and_sizes_run_on_torch(tmp_path):
    wrong_size = tiny.save(tmp_path / "size", tiny.make_config("LlamaConfig", head_dim=8))
    wrong_architecture = tiny.save(tmp_path / "architecture", tiny.make_config("CohereConfig", hidden_size=64))
    cases = ((wrong_size, "multiples of 16"), (wrong_architecture, "the native kernels support gemma, gemma2"))
    for folder, reason in cases:
        checkpoint = load_checkpoint(folder, dtype="bfloat16", device="cpu")
        assert make_target(checkpoint, slots=1, context=32).kernels == "torch"
        with pytest.raises(UnsupportedModel, match=reason):
            make_target(checkpoint, slots=1, context=32, kernels="native")


def test_limit_of_query_heads_per_key_head(tmp_path):
    for heads in (48, 64):
        sizes = {"hidden_size": 192, "num_attention_heads": heads, "num_key_value_heads": 1}
        config = tiny.make_config("LlamaConfig", head_dim=16, **sizes)
        tiny.save(tmp_path / str(heads), config)
    target, model = load_target(tmp_path / "48", bits=32)
    tokens = random_ids(20)
    with torch.inference_mode():
        logits = feed(target, [tokens[:12], tokens[12:13]], draft=chain(tokens[13:]))[1].logits[0]
        assert relative_error(logits, model(torch.tensor([tokens])).logits[0, 12:]) < 1e-4
    checkpoint = load_checkpoint(tmp_path / "64", dtype="float32", device="cpu")
    with pytest.raises(UnsupportedModel, match="at most 48 query heads per key head; this model has 64 for 1"):
        make_target(checkpoint, slots=1, context=32, kernels="native")
    assert make_target(checkpoint, slots=1, context=32).kernels == "torch"


def test_embedded_draft_model_runs_on_native_kernels():
    checkpoint = load_checkpoint(embedded("nano"), dtype="bfloat16", device="cpu")
    assert isinstance(make_target(checkpoint, slots=1, context=32), NativeTarget)
