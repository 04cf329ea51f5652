"""Self-speculation: submodels and quantized copies of the target, shared memory, and unchanged output."""

import random
from collections import Counter

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.core import tree
from outrider.core.params import SamplingParams
from outrider.core.proposer import NoProposer, ProposerSetup
from outrider.core.target import SelfDraftTarget
from outrider.core.types import Batch, DraftBudget, Draw
from outrider.drafting.propose.combine import Merge, Switch
from outrider.drafting.propose.draft_model.self_speculation import exit_proposer, quantized_proposer, skip_proposer
from outrider.drafting.propose.lookup.ngram import NgramProposer
from outrider.drafting.propose.registry import find_proposer
from outrider.errors import OutriderError, UnsupportedModel
from outrider.lab.audit.statistics import g_test
from outrider.llm import LLM
from outrider.models.loader.embedded import embedded
from outrider.models.loader.load import load_checkpoint
from outrider.models.loader.make import make_target
from outrider.models.torch.attention_target import AttentionTarget
from outrider.models.torch.submodel import requantized_model
from outrider.testing import ToyTarget, check_cache, toy_setup
from outrider.testing.drive import FuzzedRun
from tests.helpers import tiny
from tests.helpers.engines import make_engine, outputs, run
from tests.helpers.recorder import FakeRecorder
from tests.verify.test_distribution import FILTERED, TOKENS, filtered_distribution

CPU = torch.device("cpu")
CONTEXT = 96
SIZES = {"head_dim": 16, "hidden_size": 64, "intermediate_size": 96}
MODELS = {
    "llama": tiny.make_config("LlamaConfig", **SIZES),
    "tied": tiny.make_config("LlamaConfig", tie_word_embeddings=True, **SIZES),
    "mistral": tiny.make_config("MistralConfig", sliding_window=tiny.WINDOW, **SIZES),
}
# Layers of these families depend on other layers or on their index in the whole model, or run several times.
DEPENDENT_LAYERS = {"dory", "gemma3n_text", "gemma4_text", "gemma4"}
FAMILIES = sorted(set(tiny.ATTENTION) - {"mamba2"})

KERNELS = [
    "torch",
    pytest.param("native", marks=pytest.mark.skipif(not tiny.compiles(), reason="no C++ compiler here")),
]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    return tiny.Shelf(tmp_path_factory.mktemp("families"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("self")
    return {name: tiny.save(root / name, config) for name, config in MODELS.items()}


def load(folder, kernels, **kwargs):
    """Load a target in the precision that its kernels are made for."""
    checkpoint = load_checkpoint(folder, dtype="bfloat16" if kernels == "native" else "float32", device="cpu")
    return make_target(checkpoint, slots=4, context=CONTEXT, kernels=kernels, **kwargs)


def random_ids(count, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(tiny.VOCAB) for _ in range(count)]


def logits(model, text, slot=0):
    """Return the logits [T, V] after each token of a text, which is fed as one token and a chain of draft tokens."""
    seq = tiny.admit(model, slot, text[:1])
    batch = Batch(seqs=(seq,), start=(0,), feed=(tuple(text[:1]),), budget=DraftBudget((len(text) - 1,)))
    with torch.inference_mode():
        return model.score(batch, tree.chain(torch.tensor([text[1:]]), (len(text) - 1,))).logits[0]


def setup_of(target, **kwargs):
    return ProposerSetup(
        target=target,
        vocab=target.vocab,
        slots=target.slots,
        context=target.context,
        device=CPU,
        dtype=None,
        draw=kwargs.get("draw", Draw.ARGMAX),
        tokenizer=None,
    )


def maker_of(spec):
    return lambda setup: find_proposer(spec, setup)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", MODELS)
def test_submodel_of_all_layers_equals_the_target(name, kernels, folders):
    target = load(folders[name], kernels)
    submodel = target.make_submodel(range(target.layers))
    text = random_ids(40)
    assert torch.equal(logits(submodel, text, slot=1), logits(target, text))


@pytest.mark.fast_cases(
    "bloom",
    "deepseek_v3",
    "falcon",
    "gemma2",
    "gemma3_text",
    "gemma3n_text",
    "gemma4",
    "gemma4_text",
    "gpt2",
    "gpt_oss",
    "llama",
    "mixtral",
    "phi3",
    "qwen3",
)
@pytest.mark.parametrize("name", FAMILIES)
def test_first_layers_equal_the_transformers_model_without_the_others(name, shelf):
    """In every family. A submodel of all layers equals the target in every family, too."""
    target = shelf.target(name)
    model = shelf.model(name)
    text = tiny.text(random.Random(1), 24)
    torch.testing.assert_close(logits(target.make_submodel(range(tiny.LAYERS)), text), logits(target, text))
    if name in DEPENDENT_LAYERS:
        return
    layers = next(module for module in model.get_decoder().modules() if isinstance(module, torch.nn.ModuleList))
    with torch.inference_mode():
        # Later layers return their input.
        skip = lambda _, inputs, out: (inputs[0], *out[1:]) if isinstance(out, tuple) else inputs[0]  # noqa: E731
        hooks = [layer.register_forward_hook(skip) for layer in list(layers)[2:]]
        expected = model(torch.tensor([text]), use_cache=False).logits[0]
        for hook in hooks:
            hook.remove()
    torch.testing.assert_close(logits(target.make_submodel(range(2)), text), expected, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("layers", [(0, 2, 3), (1, 3), (3,)])
def test_skipped_layers_equal_the_model_without_them(layers, kernels, folders):
    target = load(folders["mistral"], kernels)
    checkpoint = load_checkpoint(folders["mistral"], dtype="float32", device="cpu")
    model = checkpoint.model
    model.set_attn_implementation("eager")
    model.model.layers = torch.nn.ModuleList(model.model.layers[i] for i in layers)
    model.config.num_hidden_layers = len(layers)
    text = random_ids(30)
    with torch.inference_mode():
        expected = model(torch.tensor([text]), use_cache=False).logits[0]
    actual = logits(target.make_submodel(layers), text)
    assert (actual - expected).norm() / expected.norm() < (0.06 if kernels == "native" else 1e-4)


class DraftingTarget:
    """A target that lets a submodel draft before each pass. The submodel writes to cache entries after the text."""

    def __init__(self, target, submodel):
        self._target = target
        self._submodel = submodel
        self.vocab = target.vocab
        self.device = target.device
        self.cache = target.cache

    def score(self, batch, draft, first=-1):
        budget = tuple(5 + b for b in range(len(batch.seqs)))
        draft_batch = Batch(seqs=batch.seqs, start=batch.start, feed=batch.feed, budget=DraftBudget(budget))
        self._submodel.draft_greedy(draft_batch, self.vocab)
        return self._target.score(batch, draft, first)


@pytest.mark.fast_cases("1-torch", "4-native")
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("layers", [1, 4])
def test_submodel_does_not_damage_the_shared_cache(layers, kernels, folders):
    def make():
        target = load(folders["mistral"], kernels)
        return DraftingTarget(target, target.make_submodel(range(layers)))

    check_cache(make, trials=2, tolerance=1e-4 if kernels == "torch" else 1e-9)


@pytest.mark.parametrize("kernels", KERNELS)
def test_submodels_share_weights_and_cache(kernels, folders):
    target = load(folders["tied"], kernels)
    logits(target, random_ids(8))
    first_layers = target.make_submodel((0, 1))
    other_layers = target.make_submodel((0, 2))
    for submodel in (first_layers, other_layers):
        logits(submodel, random_ids(8))
        assert submodel.bytes() == 0
    assert first_layers.cache.bytes() == 0
    assert other_layers.cache.bytes() == target.cache.bytes() // 2
    layer_bytes, head_bytes = target.read_bytes()
    assert len(layer_bytes) == target.layers == tiny.LAYERS
    assert 0 < sum(layer_bytes) + head_bytes <= target.bytes()


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_copy_equals_the_quantized_model(bits, kernels, folders):
    if kernels == "native" and not tiny.compiles():
        pytest.skip("no C++ compiler here")
    checkpoints = [load_checkpoint(folders["llama"], dtype="bfloat16", device="cpu") for _ in range(2)]
    target = make_target(checkpoints[0], slots=4, context=CONTEXT, kernels=kernels)
    expected = make_target(checkpoints[1], slots=4, context=CONTEXT, kernels=kernels, bits=bits)
    text = random_ids(30)
    before = logits(target, text)
    copy = target.make_requantized(bits)
    if (kernels, bits) == ("native", 4):
        last = f"{tiny.LAYERS - 1}.down."  # the copy has 8 bits there
        copied, quantized = copy.stored_weights(), expected.stored_weights()
        names = [name for name in quantized if not name.startswith(last)]
        assert all(torch.equal(copied[name], quantized[name]) for name in names)
        assert f"{last}minimum" in quantized.keys() - copied.keys()
    else:
        assert torch.equal(logits(copy, text), logits(expected, text))
    assert torch.equal(logits(target, text), before)
    assert 0 < copy.bytes() < 0.7 * target.bytes()
    assert copy.kernels == expected.kernels
    with pytest.raises(OutriderError, match="not smaller than this target"):
        expected.make_requantized(8)


@pytest.mark.parametrize(("kernels", "dtype"), [("native", "bfloat16"), ("native", "float32"), ("torch", "bfloat16")])
def test_weight_update_of_the_target_updates_its_submodels(kernels, dtype, tmp_path):
    if kernels == "native" and not tiny.compiles():
        pytest.skip("no C++ compiler here")
    old, new = (tiny.save(tmp_path / str(seed), MODELS["tied"], seed=seed) for seed in (0, 1))
    checkpoints = [load_checkpoint(folder, dtype=dtype, device="cpu") for folder in (old, new)]
    weights = {name: value.clone() for name, value in checkpoints[1].model.state_dict().items()}
    old_target, new_target = (make_target(each, slots=4, context=CONTEXT, kernels=kernels) for each in checkpoints)
    text = random_ids(20)

    def make_submodels(target):
        return [target.make_submodel((0, 1)), target.make_submodel((0, 3)), target.make_requantized(8)]

    updated_submodels = make_submodels(old_target)
    expected_submodels = make_submodels(new_target)
    old_target.update_weights(weights, 1)
    for submodel, expected in zip(updated_submodels, expected_submodels, strict=True):
        assert torch.equal(logits(submodel, text), logits(expected, text))
        with pytest.raises(OutriderError, match="update those of the target"):
            submodel.update_weights(weights, 1)


def test_submodel_passes_do_not_export_hidden_states(folders):
    """A hook on a shared layer records only the passes of the target."""
    target = load(folders["llama"], "torch")
    made_before = target.make_submodel((0, 1))
    target.export_hidden_states((1,))
    made_after = target.make_submodel((0, 1))
    seq = tiny.admit(target, 0, random_ids(12))
    with torch.inference_mode():
        expected = target.score(tiny.everything([seq]), tree.empty(1, CPU)).hidden_states[1]
        for submodel in (made_before, made_after):
            feed = tuple(random_ids(12, 5))
            submodel.draft_greedy(Batch(seqs=(seq,), start=(0,), feed=(feed,), budget=DraftBudget((4,))), 99)
            assert not submodel.score(tiny.everything([seq]), tree.empty(1, CPU)).hidden_states
        assert torch.equal(target.score(tiny.everything([seq]), tree.empty(1, CPU)).hidden_states[1], expected)


@pytest.mark.parametrize("layers", [(0, 1), (1, 2, 3)])
def test_recorded_passes_of_a_submodel(layers, shelf, monkeypatch):
    """A stand-in for CUDA graphs records the passes of the target and of the submodel separately."""
    monkeypatch.setattr("outrider.models.torch.graph_buckets.MIN_LENGTH", 16)
    checkpoint = shelf.checkpoint("llama")
    record = FakeRecorder()
    target = AttentionTarget(checkpoint, slots=4, context=CONTEXT, record=record)
    plain = load(shelf.folder("llama"), "torch")
    submodels = (target.make_submodel(layers), plain.make_submodel(layers))
    seq = tiny.admit(target, 0, random_ids(9))
    batch = tiny.everything([seq])
    draft = tree.chain(torch.tensor([[3, 5]]), (2,))
    with torch.inference_mode():
        for _ in range(6):
            chains = [submodel.draft_greedy(batch, tiny.VOCAB).tokens for submodel in submodels]
            assert torch.equal(*chains)
            scores = [each.score(batch, draft).logits for each in (target, plain)]
            torch.testing.assert_close(*scores, atol=3e-5, rtol=1e-5)
    assert submodels[0].kernels == f"graphs, {len(layers)} layers"
    assert [bucket.steps for bucket in target.graphs.buckets()] == [0]
    assert 6 in [bucket.steps for bucket in submodels[0].graphs.buckets()]
    assert record.count > 6


PROPOSERS = {
    "exit": (exit_proposer, "2"),
    "exit after all layers": (exit_proposer, "4"),
    "skip": (skip_proposer, "0+2"),
    "quantized": (quantized_proposer, "int4"),
}


def make(name):
    make_proposer, argument = PROPOSERS[name]
    return lambda setup: make_proposer(argument, setup)


def random_prompts(count):
    rng = random.Random(5)
    return [[rng.randrange(1, tiny.VOCAB) for _ in range(rng.randint(1, 30))] for _ in range(count)]


def generate(target, make_proposer, *, k, rows, temperature, verifier="walk", chunk=512):
    """Return the outputs of some prompts and the statistics."""
    engine = make_engine(target, make_proposer, verifier=verifier, k=k, rows=rows, chunk=chunk)
    params = SamplingParams(temperature=temperature, seed=11)
    return outputs(run(engine, random_prompts(6), params, limit=12, ends=frozenset())), engine.stats


@pytest.mark.slow
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", PROPOSERS)
@pytest.mark.parametrize(("temperature", "verifier"), [(0.0, "walk"), (0.0, "block"), (0.8, "walk"), (0.8, "coupled")])
def test_output_is_the_targets(name, kernels, temperature, verifier, folders):
    target = load(folders["llama"], kernels)
    plain, _ = generate(target, NoProposer, k=0, rows=1, temperature=temperature, verifier=verifier)
    for rows, k, chunk in ((1, 4, 512), (4, 1, 512), (4, 7, 5), (3, 4, 2)):
        settings = {"k": k, "rows": rows, "chunk": chunk, "temperature": temperature, "verifier": verifier}
        texts, stats = generate(target, make(name), **settings)
        assert texts == plain, settings
        assert stats.draft_tokens > 0
        if name == "exit after all layers" and verifier != "block" and temperature == 0:
            assert stats.accepted == stats.reached


@pytest.mark.fast_cases("Switch")
@pytest.mark.parametrize("combine", [Merge, Switch])
def test_combination_with_proposers_that_share_the_cache(combine, folders):
    target = load(folders["llama"], "torch")
    makers = [make("exit after all layers"), make("exit"), NgramProposer]
    for temperature in (0.0, 0.8):
        plain, _ = generate(target, NoProposer, k=0, rows=1, temperature=temperature)
        texts, stats = generate(
            target,
            lambda setup: combine(setup, [make_part(setup) for make_part in makers]),
            k=6,
            rows=4,
            temperature=temperature,
        )
        assert texts == plain
        assert stats.tau > (2.5 if temperature == 0 else 1)


@pytest.mark.fast_cases("exit-argmax", "skip-race")
@pytest.mark.parametrize("draw", [Draw.ARGMAX, Draw.SAMPLE, Draw.RACE])
@pytest.mark.parametrize("name", ["exit", "skip"])
def test_draft_depends_only_on_the_text(name, draw, folders):
    """It does not depend on earlier rounds, on other sequences, or on the previous sequence of the slot."""
    rng = random.Random(3)
    params = SamplingParams(temperature=0.8)

    checkpoint = load_checkpoint(folders["llama"], dtype="float32", device="cpu")

    def fresh_run():
        target = make_target(checkpoint, slots=4, context=CONTEXT, kernels="torch")
        return FuzzedRun(target, make(name)(setup_of(target, draw=draw)), rng)

    text = tiny.text(rng, 40)
    with torch.inference_mode():
        runs = [fresh_run() for _ in range(3)]
        runs[2].commit_text(tiny.text(rng, 40), 25, params, slots=[3, 1])
        expected, expected_q = runs[0].propose_after(text, 30, params, slots=[3], budget=5)[0]
        drafts = [*runs[1].propose_after(text, 30, params, slots=[3], budget=5)]
        drafts += runs[2].propose_after(text, 30, params, slots=[0, 3, 1], budget=5)[1:2]
    assert len(expected) == 5
    for nodes, q in drafts:
        assert nodes == expected
        if expected_q is not None:
            torch.testing.assert_close(q, expected_q, atol=1e-5, rtol=1e-4)


def test_long_feeds_get_no_draft(folders):
    target = load(folders["llama"], "torch")
    proposer = exit_proposer("2", setup_of(target))
    seq = tiny.admit(target, 0, random_ids(40))
    proposer.admit(0, seq.request)
    batch = tiny.everything([seq])
    with torch.inference_mode():
        assert proposer.propose(batch).size == 0
        draft = tree.empty(1, CPU)
        target.cache.commit(tree.prefill_round(batch, draft, target.score(batch, draft)))
        seq.num_cached_tokens = len(seq.token_ids)
        seq.token_ids.append(7)
        assert proposer.propose(tiny.everything([seq])).width == (6,)


@pytest.fixture(scope="module")
def settled(tmp_path_factory):
    """A model whose last two layers change little, a prompt, and the exact distribution of its outputs."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny.make_config("LlamaConfig", initializer_range=0.2, **SIZES))
    with torch.no_grad():
        for layer in model.model.layers[2:]:
            layer.self_attn.o_proj.weight *= 0.3
            layer.mlp.down_proj.weight *= 0.3
    folder = tiny.save_model(tmp_path_factory.mktemp("settled") / "model", model)
    checkpoint = load_checkpoint(folder, dtype="float32", device="cpu")
    target = make_target(checkpoint, slots=64, context=48)
    prompt = random_ids(6)
    return target, prompt, filtered_distribution(target, prompt)


@pytest.mark.fast_cases("exit:2-block")
@pytest.mark.parametrize(("spec", "verifier"), [("exit:2", "block"), ("exit:3", "traversal"), ("skip:2", "rejection")])
def test_output_distribution_is_exact_with_sampled_drafts(spec, verifier, settled):
    target, prompt, distribution = settled
    engine = make_engine(target, maker_of(spec), verifier=verifier, k=3, rows=64)
    seqs = run(engine, [prompt] * 1500, FILTERED, limit=TOKENS, ends=frozenset())
    counts = Counter(tuple(text) for text in outputs(seqs))
    assert set(counts) <= set(distribution)
    assert engine.stats.tau > 1.5
    assert g_test([counts[text] for text in distribution], list(distribution.values())).p_value > 1e-3


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("exit", "is not a number of layers; write for example exit:2"),
        ("exit:0", "exit:0 is not a number of layers"),
        ("exit:5", "exit:5 asks for more layers than the 4 of this target; write for example exit:1"),
        ("exit:-1", "is not a number of layers"),
        ("skip", "is not a list of layers; write for example skip:2, and join several by"),
        ("exit:" + "9" * 5000, "is not a number of layers"),
        ("skip:" + "9" * 5000, "is not a list of layers"),
        ("skip:a", "skip:a is not a list of layers"),
        ("skip:1+1", "names a layer twice"),
        ("skip:1+4", "names layer 4; this target's layers are 0 to 3"),
        ("skip:0+1+2+3", "leaves no layer to draft with"),
        ("quantized", "write quantized:int8 or quantized:int4"),
        ("quantized:int3", "quantized:int3 is unknown"),
    ],
)
def test_wrong_arguments_are_rejected(spec, reason, folders):
    target = load(folders["llama"], "torch")
    with pytest.raises(OutriderError, match=reason):
        find_proposer(spec, setup_of(target))


@pytest.mark.parametrize("spec", ["exit:1", "skip:1", "quantized:int8"])
def test_target_without_separate_layers_is_rejected(spec, shelf):
    recurrent = shelf.target("mamba2")
    assert not isinstance(recurrent, SelfDraftTarget)
    for setup in (setup_of(recurrent), toy_setup(ToyTarget())):
        with pytest.raises(OutriderError, match="cannot draft for itself"):
            find_proposer(spec, setup)


def test_quantized_copy_of_a_float32_target_equals_that_of_bfloat16(folders):
    float32 = load(folders["llama"], "torch")
    checkpoint = load_checkpoint(folders["llama"], dtype="bfloat16", device="cpu")
    bfloat16 = make_target(checkpoint, slots=4, context=CONTEXT, kernels="torch")
    text = random_ids(30)
    assert torch.equal(logits(float32.make_requantized(8), text), logits(bfloat16.make_requantized(8), text))
    assert float32.make_requantized(8).bytes() < 0.6 * float32.bytes()


@pytest.mark.skipif(not tiny.compiles(), reason="no C++ compiler here")
def test_quantized_copy_on_native_kernels_shares_the_targets_cache(folders):
    checkpoint = load_checkpoint(folders["llama"], dtype="float32", device="cpu")
    target = make_target(checkpoint, slots=4, context=CONTEXT, kernels="native")
    text = random_ids(30)
    copy = target.make_requantized(8)
    expected = logits(target, text)
    assert (target.kernels, copy.kernels) == ("native", "native int8")
    assert copy.cache.bytes() == 0
    assert 0 < copy.bytes() < 0.4 * target.bytes()
    assert 0 < (logits(copy, text) - expected).norm() < 0.2 * expected.norm()


def test_quantizing_on_a_gpu_is_rejected(folders):
    """A model on the meta device takes the place of one on a GPU."""
    model = load_checkpoint(folders["llama"], dtype="bfloat16", device="cpu").model.to("meta")
    with pytest.raises(OutriderError, match="needs a CPU; use device cpu"):
        requantized_model(model, 8)


def test_model_with_unknown_layer_list_is_rejected(folders):
    checkpoint = load_checkpoint(folders["llama"], dtype="float32", device="cpu")
    checkpoint.model.config.num_hidden_layers = 9
    with pytest.raises(UnsupportedModel, match="llama: it has no list of 9 decoder layers"):
        make_target(checkpoint, slots=1, context=64, kernels="torch")


def test_layers_that_depend_on_each_other_are_rejected(folders, monkeypatch):
    target = load(folders["llama"], "torch")

    def fails(*_):
        raise KeyError("layer 3 needs layer 2")

    monkeypatch.setattr(AttentionTarget, "draft_greedy", fails)
    with pytest.raises(OutriderError, match="cannot run without each other"):
        find_proposer("skip:2", setup_of(target))


def test_exit_in_the_python_api(folders):
    """With the default precision and kernels of this machine. Drafts are sampled by default."""
    llm = LLM(embedded("mini"), proposer="exit:2", max_num_seqs=2, max_model_len=64)
    assert llm.parts.verifier.name == "block"
    plain = LLM(embedded("mini"), proposer="none", max_num_seqs=2, max_model_len=64)
    params = SamplingParams(max_tokens=12)
    assert llm.generate("def f(", params)[0].token_ids == plain.generate("def f(", params)[0].token_ids
    assert llm.stats.draft_tokens > 0
