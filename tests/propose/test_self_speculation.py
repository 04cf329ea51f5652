"""The target drafts for itself: excerpts say what the layers say, share what they may, and change no text."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.audit.statistics import g_test
from outrider.core import tree
from outrider.core.params import SamplingParams
from outrider.core.types import Batch, Draw
from outrider.errors import OutriderError, UnsupportedModel
from outrider.llm import LLM
from outrider.loader.checkpoint import load_checkpoint
from outrider.loader.embedded import embedded
from outrider.loader.make import make_target
from outrider.models.attention_target import AttentionTarget
from outrider.models.base import SelfDraftTarget
from outrider.models.submodel import requantized_model
from outrider.propose.base import NoProposer, ProposerSetup
from outrider.propose.combine import Merge, Switch
from outrider.propose.draft_model.self_speculation import exit_proposer, quantised_proposer, skip_proposer
from outrider.propose.lookup.ngram import NgramProposer
from outrider.propose.registry import find_proposer
from outrider.testing import ToyTarget, check_cache, toy_setup
from outrider.testing.drive import FuzzedRun
from tests.helpers import tiny
from tests.helpers.engines import make_engine, outputs, run
from tests.models.test_graphs import Replays
from tests.verify.test_distribution import FILTERED, TOKENS, filtered_law

CPU = torch.device("cpu")
CONTEXT = 96
SIZES = {"head_dim": 16, "hidden_size": 64, "intermediate_size": 96}
MODELS = {
    "llama": tiny.make_config("LlamaConfig", **SIZES),
    "tied": tiny.make_config("LlamaConfig", tie_word_embeddings=True, **SIZES),
    "mistral": tiny.make_config("MistralConfig", sliding_window=tiny.WINDOW, **SIZES),
}
# Layers of these families look something up by what other layers left, or by their number among all.
TOGETHER = {"gemma3n_text", "gemma4_text"}
FAMILIES = sorted(set(tiny.ARCHITECTURES) - {"mamba2"})


KINDS = [
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


def read(folder, kind, **kwargs):
    """The target, in the precision that its kernels are at home in."""
    checkpoint = load_checkpoint(folder, dtype="bfloat16" if kind == "native" else "float32", device="cpu")
    return make_target(checkpoint, slots=4, context=CONTEXT, kernels=kind, **kwargs)


def ids(count, seed=0):
    chance = random.Random(seed)
    return [chance.randrange(tiny.VOCAB) for _ in range(count)]


def logits(model, text, slot=0):
    """[T, V] after each token of a text that is read as one token and a chain of guesses."""
    row = tiny.admit(model, slot, text[:1])
    batch = Batch(seqs=(row,), start=(0,), feed=(tuple(text[:1]),), draft_budget=(len(text) - 1,))
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


def named(spec):
    return lambda setup: find_proposer(spec, setup)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_all_layers_are_the_target(name, kind, folders):
    target = read(folders[name], kind)
    whole = target.make_submodel(range(target.layers))
    text = ids(40)
    assert torch.equal(logits(whole, text, slot=1), logits(target, text))


@pytest.mark.parametrize("name", FAMILIES)
def test_an_exit_is_a_layers_output_through_norm_and_head(name, shelf):
    """Against transformers' own hidden states, in every family; and what runs all layers is the target in each."""
    target, model = shelf.target(name), shelf.model(name)
    text = tiny.text(random.Random(1), 24)
    torch.testing.assert_close(logits(target.make_submodel(range(tiny.LAYERS)), text), logits(target, text))
    if name in TOGETHER:
        return
    stack = next(module for module in model.get_decoder().modules() if isinstance(module, torch.nn.ModuleList))
    rest = list(stack)[2:]
    with torch.inference_mode():
        hooks = [layer.register_forward_hook(lambda _layer, inputs, _out: inputs[0]) for layer in rest]
        wanted = model(torch.tensor([text]), use_cache=False).logits[0]
        for hook in hooks:
            hook.remove()
    torch.testing.assert_close(logits(target.make_submodel(range(2)), text), wanted, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kept", [(0, 2, 3), (1, 3), (3,)])
def test_a_skip_is_the_model_without_those_layers(kept, kind, folders):
    target = read(folders["mistral"], kind)
    checkpoint = load_checkpoint(folders["mistral"], dtype="float32", device="cpu")
    model = checkpoint.model
    model.set_attn_implementation("eager")
    model.model.layers = torch.nn.ModuleList(model.model.layers[i] for i in kept)
    model.config.num_hidden_layers = len(kept)
    text = ids(30)
    with torch.inference_mode():
        wanted = model(torch.tensor([text]), use_cache=False).logits[0]
    got = logits(target.make_submodel(kept), text)
    assert (got - wanted).norm() / wanted.norm() < (0.06 if kind == "native" else 1e-4)


class Drafting:
    """A target before each of whose passes a part of it guesses, and writes where it likes behind the text."""

    def __init__(self, target, part):
        self._target, self._part = target, part
        self.vocab, self.device, self.cache = target.vocab, target.device, target.cache

    def score(self, batch, draft, first=-1):
        budget = tuple(5 + b for b in range(len(batch.seqs)))
        self._part.draft_greedy(
            Batch(seqs=batch.seqs, start=batch.start, feed=batch.feed, draft_budget=budget), self.vocab
        )
        return self._target.score(batch, draft, first)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layers", [1, 3, 4])
def test_a_borrower_leaves_the_cache_true(layers, kind, folders):
    def make():
        target = read(folders["mistral"], kind)
        return Drafting(target, target.make_submodel(range(layers)))

    check_cache(make, trials=3, tolerance=1e-4 if kind == "torch" else 1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_shared_takes_no_memory(kind, folders):
    target = read(folders["tied"], kind)
    logits(target, ids(8))
    early, some = target.make_submodel((0, 1)), target.make_submodel((0, 2))
    for part in (early, some):
        logits(part, ids(8))
        assert part.bytes() == 0
    assert early.cache.bytes() == 0
    assert some.cache.bytes() == target.cache.bytes() // 2
    layers, head = target.read_bytes()
    assert len(layers) == target.layers == tiny.LAYERS
    assert 0 < sum(layers) + head <= target.bytes()


@pytest.mark.parametrize("kind", ["native", "torch"])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_copy_is_the_quantised_model(bits, kind, folders):
    if kind == "native" and not tiny.compiles():
        pytest.skip("no C++ compiler here")
    checkpoints = [load_checkpoint(folders["llama"], dtype="bfloat16", device="cpu") for _ in range(2)]
    target = make_target(checkpoints[0], slots=4, context=CONTEXT, kernels=kind)
    wanted = make_target(checkpoints[1], slots=4, context=CONTEXT, kernels=kind, bits=bits)
    before, text = logits(target, ids(30)), ids(30)
    copied = target.make_requantized(bits)
    assert torch.equal(logits(copied, text), logits(wanted, text))
    assert torch.equal(logits(target, text), before)
    assert 0 < copied.bytes() < 0.7 * target.bytes()
    assert copied.kernels == wanted.kernels
    with pytest.raises(OutriderError, match="not smaller than this target"):
        wanted.make_requantized(8)


@pytest.mark.parametrize(("kind", "dtype"), [("native", "bfloat16"), ("native", "float32"), ("torch", "bfloat16")])
def test_parts_follow_when_weights_are_swapped(kind, dtype, tmp_path):
    if kind == "native" and not tiny.compiles():
        pytest.skip("no C++ compiler here")
    old, new = (tiny.save(tmp_path / str(seed), MODELS["tied"], seed=seed) for seed in (0, 1))
    checkpoints = [load_checkpoint(folder, dtype=dtype, device="cpu") for folder in (old, new)]
    weights = {name: value.clone() for name, value in checkpoints[1].model.state_dict().items()}
    target, other = (make_target(each, slots=4, context=CONTEXT, kernels=kind) for each in checkpoints)
    text = ids(20)

    def parts(of):
        return [of.make_submodel((0, 1)), of.make_submodel((0, 3)), of.make_requantized(8)]

    ours, theirs = parts(target), parts(other)
    target.update_weights(weights, 1)
    for part, wanted in zip(ours, theirs, strict=True):
        assert torch.equal(logits(part, text), logits(wanted, text))
        with pytest.raises(OutriderError, match="update those of the target"):
            part.update_weights(weights, 1)


def test_what_the_target_exports_is_its_own(folders):
    """A hook on a layer that the two have in common sees the target's passes alone."""
    target = read(folders["llama"], "torch")
    part = target.make_submodel((0, 1))
    target.export_hidden_states((1,))
    text, later = ids(12), target.make_submodel((0, 1))
    row = tiny.admit(target, 0, text)
    with torch.inference_mode():
        wanted = target.score(tiny.everything([row]), tree.empty(1, CPU)).hidden_states[1]
        for each in (part, later):
            each.draft_greedy(Batch(seqs=(row,), start=(0,), feed=(tuple(ids(12, 5)),), draft_budget=(4,)), 99)
            assert not each.score(tiny.everything([row]), tree.empty(1, CPU)).hidden_states
        assert torch.equal(target.score(tiny.everything([row]), tree.empty(1, CPU)).hidden_states[1], wanted)


@pytest.mark.parametrize("kept", [(0, 1), (1, 2, 3)])
def test_recorded_passes_of_a_part(kept, shelf, monkeypatch):
    """What stands for CUDA graphs records the target's passes and the part's over their own stripes."""
    monkeypatch.setattr("outrider.models.cuda_graphs._LENGTH", 16)
    checkpoint = load_checkpoint(shelf.folder("llama"), dtype="float32", device="cpu")
    record = Replays()
    target = AttentionTarget(checkpoint, slots=4, context=CONTEXT, record=record)
    plain = read(shelf.folder("llama"), "torch")
    parts = target.make_submodel(kept), plain.make_submodel(kept)
    row = tiny.admit(target, 0, ids(9))
    batch, draft = tiny.everything([row]), tree.chain(torch.tensor([[3, 5]]), (2,))
    with torch.inference_mode():
        for _ in range(6):
            grown = [part.draft_greedy(batch, tiny.VOCAB).tokens for part in parts]
            assert torch.equal(*grown)
            scores = [each.score(batch, draft).logits for each in (target, plain)]
            torch.testing.assert_close(*scores, atol=3e-5, rtol=1e-5)
    assert parts[0].kernels == f"graphs, {len(kept)} layers"
    assert [bucket.steps for bucket in target.graphs.buckets()] == [0]
    assert 6 in [bucket.steps for bucket in parts[0].graphs.buckets()]
    assert record.count > 6


PROPOSERS = {
    "exit": (exit_proposer, "2"),
    "whole exit": (exit_proposer, "4"),
    "skip": (skip_proposer, "0+2"),
    "quantized": (quantised_proposer, "int4"),
}


def make(name):
    maker, argument = PROPOSERS[name]
    return lambda setup: maker(argument, setup)


def prompts(count):
    chance = random.Random(5)
    return [[chance.randrange(1, tiny.VOCAB) for _ in range(chance.randint(1, 30))] for _ in range(count)]


def texts(target, maker, *, k, rows, temperature, verifier="walk", chunk=512):
    engine = make_engine(target, maker, verifier=verifier, k=k, rows=rows, chunk=chunk)
    params = SamplingParams(temperature=temperature, seed=11)
    return outputs(run(engine, prompts(6), params, limit=12, ends=frozenset())), engine.stats


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PROPOSERS)
@pytest.mark.parametrize(("temperature", "verifier"), [(0.0, "walk"), (0.0, "block"), (0.8, "walk"), (0.8, "coupled")])
def test_the_text_is_the_targets(name, kind, temperature, verifier, folders):
    target = read(folders["llama"], kind)
    plain, _ = texts(target, NoProposer, k=0, rows=1, temperature=temperature, verifier=verifier)
    for rows, k, chunk in ((1, 4, 512), (4, 1, 512), (4, 7, 5), (3, 4, 2)):
        how = {"k": k, "rows": rows, "chunk": chunk, "temperature": temperature, "verifier": verifier}
        got, stats = texts(target, make(name), **how)
        assert got == plain, how
        assert stats.draft_tokens > 0
        if name == "whole exit" and verifier != "block" and temperature == 0:
            assert stats.accepted == stats.reached


@pytest.mark.parametrize("combine", [Merge, Switch])
def test_beside_others_over_the_same_cache(combine, folders):
    target = read(folders["llama"], "torch")
    makers = [make("whole exit"), make("exit"), NgramProposer]
    for temperature in (0.0, 0.8):
        plain, _ = texts(target, NoProposer, k=0, rows=1, temperature=temperature)
        got, stats = texts(
            target,
            lambda setup: combine(setup, [each(setup) for each in makers]),
            k=6,
            rows=4,
            temperature=temperature,
        )
        assert got == plain
        assert stats.tau > (2.5 if temperature == 0 else 1)


@pytest.mark.parametrize("draw", [Draw.ARGMAX, Draw.SAMPLE, Draw.RACE])
@pytest.mark.parametrize("name", ["exit", "skip"])
def test_guesses_depend_on_the_text_alone(name, draw, folders):
    """Not on the rounds that led to it, on other rows, or on who had the slot before."""
    chance, params = random.Random(3), SamplingParams(temperature=0.8)

    def life():
        target = read(folders["llama"], "torch")
        return FuzzedRun.fresh(target, make(name)(setup_of(target, draw=draw)), chance)

    text = tiny.text(chance, 40)
    with torch.inference_mode():
        lives = [life() for _ in range(3)]
        lives[2].live(tiny.text(chance, 40), 25, params, slots=[3, 1])
        wanted, wanted_law = lives[0].propose_after(text, 30, params, slots=[3], budget=5)[0]
        others = [*lives[1].propose_after(text, 30, params, slots=[3], budget=5)]
        others += lives[2].propose_after(text, 30, params, slots=[0, 3, 1], budget=5)[1:2]
    assert len(wanted) == 5
    for got, law in others:
        assert got == wanted
        if wanted_law is not None:
            torch.testing.assert_close(law, wanted_law, atol=1e-5, rtol=1e-4)


def test_nothing_is_read_twice_behind_a_long_prompt(folders):
    target = read(folders["llama"], "torch")
    proposer = exit_proposer("2", setup_of(target))
    row = tiny.admit(target, 0, ids(40))
    proposer.admit(0, row.request)
    batch = tiny.everything([row])
    with torch.inference_mode():
        assert proposer.propose(batch).size == 0
        draft = tree.empty(1, CPU)
        target.cache.commit(tree.prefill_round(batch, draft, target.score(batch, draft)))
        row.num_cached_tokens = len(row.token_ids)
        row.token_ids.append(7)
        assert proposer.propose(tiny.everything([row])).width == (6,)


@pytest.fixture(scope="module")
def settled(tmp_path_factory):
    """A model whose last two layers change little, a prompt, and the exact law of what may follow it."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny.make_config("LlamaConfig", initializer_range=0.2, **SIZES))
    with torch.no_grad():
        for layer in model.model.layers[2:]:
            layer.self_attn.o_proj.weight *= 0.3
            layer.mlp.down_proj.weight *= 0.3
    folder = tiny.save_model(tmp_path_factory.mktemp("settled") / "model", model)
    checkpoint = load_checkpoint(folder, dtype="float32", device="cpu")
    target = make_target(checkpoint, slots=64, context=48)
    prompt = ids(6)
    return target, prompt, filtered_law(target, prompt)


@pytest.mark.parametrize(("spec", "verifier"), [("exit:2", "block"), ("exit:3", "traversal"), ("skip:2", "rejection")])
def test_sampled_guesses_leave_the_law_alone(spec, verifier, settled):
    target, prompt, law = settled
    engine = make_engine(target, named(spec), verifier=verifier, k=3, rows=64)
    rows = run(engine, [prompt] * 1500, FILTERED, limit=TOKENS, ends=frozenset())
    counts = Counter(tuple(text) for text in outputs(rows))
    assert set(counts) <= set(law)
    assert engine.stats.tau > 1.5
    assert g_test([counts[text] for text in law], list(law.values())).p_value > 1e-3


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("exit", "names no layers to stop after; write for example exit:2"),
        ("exit:0", "exit:0 names no layers to stop after"),
        ("exit:5", "exit:5 names no layers to stop after; this target has 4: write for example exit:1"),
        ("exit:-1", "names no layers to stop after"),
        ("skip", "names no layers to leave out; write for example skip:2, and join several by"),
        ("exit:" + "9" * 5000, "names no layers to stop after"),
        ("skip:" + "9" * 5000, "names no layers to leave out"),
        ("skip:a", "skip:a names no layers to leave out"),
        ("skip:1+1", "names a layer twice"),
        ("skip:1+4", "names layer 4; this target's layers are 0 to 3"),
        ("skip:0+1+2+3", "leaves no layer to guess with"),
        ("quantized", "write quantized:int8 or quantized:int4"),
        ("quantized:int3", "quantized:int3 is unknown"),
    ],
)
def test_mistakes_are_answered(spec, reason, folders):
    target = read(folders["llama"], "torch")
    with pytest.raises(OutriderError, match=reason):
        find_proposer(spec, setup_of(target))


@pytest.mark.parametrize("spec", ["exit:1", "skip:1", "quantized:int8"])
def test_who_has_no_layers_to_take_apart(spec, shelf):
    recurrent = shelf.target("mamba2")
    assert not isinstance(recurrent, SelfDraftTarget)
    for setup in (setup_of(recurrent), toy_setup(ToyTarget())):
        with pytest.raises(OutriderError, match="cannot draft for itself"):
            find_proposer(spec, setup)


def test_a_quantised_draft_beside_float32_is_one_in_bfloat16(folders):
    wide = read(folders["llama"], "torch")
    checkpoint = load_checkpoint(folders["llama"], dtype="bfloat16", device="cpu")
    narrow = make_target(checkpoint, slots=4, context=CONTEXT, kernels="torch")
    text = ids(30)
    assert torch.equal(logits(wide.make_requantized(8), text), logits(narrow.make_requantized(8), text))
    assert wide.make_requantized(8).bytes() < 0.6 * wide.bytes()


@pytest.mark.skipif(not tiny.compiles(), reason="no C++ compiler here")
def test_a_quantised_draft_of_the_native_kernels_has_the_targets_entries(folders):
    checkpoint = load_checkpoint(folders["llama"], dtype="float32", device="cpu")
    target, text = make_target(checkpoint, slots=4, context=CONTEXT, kernels="native"), ids(30)
    copied, wanted = target.make_requantized(8), logits(target, text)
    assert (target.kernels, copied.kernels) == ("native", "native int8")
    assert copied.cache.usage().token_bytes == target.cache.usage().token_bytes
    assert 0 < copied.bytes() < 0.4 * target.bytes()
    assert 0 < (logits(copied, text) - wanted).norm() < 0.2 * wanted.norm()


def test_there_is_no_quantising_on_a_gpu(folders):
    """A model without memory stands for one that is elsewhere."""
    model = load_checkpoint(folders["llama"], dtype="bfloat16", device="cpu").model.to("meta")
    with pytest.raises(OutriderError, match="needs a CPU; use device cpu"):
        requantized_model(model, 8)


def test_a_model_whose_layers_are_not_found_is_refused(folders):
    checkpoint = load_checkpoint(folders["llama"], dtype="float32", device="cpu")
    checkpoint.model.config.num_hidden_layers = 9
    with pytest.raises(UnsupportedModel, match="llama: it has no list of 9 decoder layers"):
        make_target(checkpoint, slots=1, context=64, kernels="torch")


def test_layers_that_cannot_be_parted_are_said(folders, monkeypatch):
    target = read(folders["llama"], "torch")

    def fails(*_):
        raise KeyError("layer 3 looks for layer 2")

    monkeypatch.setattr(AttentionTarget, "draft_greedy", fails)
    with pytest.raises(OutriderError, match="cannot run without each other"):
        find_proposer("skip:2", setup_of(target))


def test_the_front_door(folders):
    """By name, in whatever precision and with whatever kernels this machine takes; sampled guesses by default."""
    llm = LLM(embedded("mini"), proposer="exit:2", max_num_seqs=2, max_model_len=64)
    assert llm.parts.verifier.name == "block"
    plain = LLM(embedded("mini"), proposer="none", max_num_seqs=2, max_model_len=64)
    params = SamplingParams(max_tokens=12)
    assert llm.generate("def f(", params)[0].token_ids == plain.generate("def f(", params)[0].token_ids
    assert llm.stats.draft_tokens > 0
