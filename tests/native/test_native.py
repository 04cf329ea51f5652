"""The CPU's own kernels: close to the model, and the same to the last bit whatever shares the pass."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from itertools import accumulate

import pytest
import torch

from outrider.core import tree
from outrider.core.params import SamplingParams
from outrider.core.types import Batch, StopRule
from outrider.errors import OutriderError, UnsupportedModel
from outrider.llm import LLM
from outrider.loader.checkpoint import load_checkpoint
from outrider.loader.embedded import embedded
from outrider.loader.make import make_target
from outrider.models.base import draft_by_scores
from outrider.native import library
from outrider.native.pack import Arena, interleave, pack, separate, unpack
from outrider.native.target import NativeTarget
from outrider.testing.drive import random_tree
from tests.helpers import tiny

pytestmark = pytest.mark.skipif(not tiny.compiles(), reason="no C++ compiler here")
CPU = torch.device("cpu")
WHOLE = pytest.mark.parametrize("bits", [32, 16])  # of weights that are not quantised
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
    "mistral": tiny.make_config("MistralConfig", head_dim=64, sliding_window=tiny.WINDOW),
    "qwen2": tiny.make_config(
        "Qwen2Config", hidden_size=64, use_sliding_window=True, sliding_window=tiny.WINDOW, max_window_layers=2
    ),
    "qwen3": tiny.make_config("Qwen3Config", head_dim=16, num_key_value_heads=1),
    "wide": tiny.make_config("LlamaConfig", head_dim=80, hidden_size=96, num_attention_heads=6),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("native")
    return {name: tiny.save(root / name, config) for name, config in MODELS.items()}


def read(folder, layers=(), *, bits=16):
    """A target, and the transformers model that it was made from."""
    checkpoint = load_checkpoint(folder, dtype="float32" if bits == 32 else "bfloat16", device="cpu")
    target = make_target(checkpoint, slots=4, context=128, kernels="native", bits=min(bits, 16))
    target.export_hidden_states(layers)
    checkpoint.model.set_attn_implementation("eager")
    return target, checkpoint.model


def ids(count, seed=0, vocab=250):
    chance = random.Random(seed)
    return [chance.randrange(vocab) for _ in range(count)]


def feed(target, pieces, *, slot=0, draft=None):
    """Logits of each piece's end, fed one after another; the last one with `draft` behind it."""
    row = tiny.admit(target, slot, [token for piece in pieces for token in piece])
    out, start = [], 0
    for i, piece in enumerate(pieces):
        last = i == len(pieces) - 1
        guesses = draft if last and draft is not None else tree.empty(1, CPU)
        batch = Batch(seqs=(row,), start=(start,), feed=(tuple(piece),), draft_budget=(guesses.size,))
        scores = target.score(batch, guesses)
        out.append(scores)
        if not last:
            target.cache.commit(tree.prefill_round(batch, guesses, scores))
        start += len(piece)
    return out


def chain(tokens):
    return tree.chain(torch.tensor([tokens]), (len(tokens),))


def distance(ours, theirs):
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("name", MODELS)
def test_closer_to_float32_than_the_model_itself(name, folders):
    target, model = read(folders[name])
    text = ids(40)
    with torch.inference_mode():
        logits = feed(target, [text[:1]], draft=chain(text[1:]))[0].logits[0]
        rounded = model(torch.tensor([text])).logits[0].float()
        wanted = model.float()(torch.tensor([text])).logits[0]
    assert distance(logits, wanted) < 0.8 * distance(rounded, wanted)


@pytest.mark.parametrize("name", MODELS)
def test_in_float32_it_is_the_model_itself(name, folders):
    target, model = read(folders[name], bits=32)
    text = ids(100)
    with torch.inference_mode():
        logits = feed(target, [text[:60], text[60:61]], draft=chain(text[61:]))[1].logits[0]
        assert distance(logits, model(torch.tensor([text])).logits[0, 60:]) < 1e-4


def cut(text, sizes):
    ends = list(accumulate(sizes))
    return [text[end - size : end] for end, size in zip(ends, sizes, strict=True)], torch.tensor(ends) - 1


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("bits", [32, 16, 8, 4])
def test_the_same_bits_however_the_text_is_cut(name, bits, folders):
    target, _ = read(folders[name], bits=bits)
    text = ids(45)
    with torch.inference_mode():
        whole = feed(target, [text[:1]], draft=chain(text[1:]))[0].logits[0]
        for sizes in ([1] * 45, [17, 16, 12], [44, 1], [3] * 15, [13, 31, 1]):
            pieces, ends = cut(text, sizes)
            logits = torch.cat([scores.logits[0, -1:] for scores in feed(target, pieces, slot=2)])
            assert torch.equal(logits, whole[ends])


@WHOLE
def test_the_same_bits_in_any_width(bits, folders):
    """Each number of rows has code of its own."""
    target, _ = read(folders["wide"], bits=bits)
    text = ids(52)
    with torch.inference_mode():
        whole = feed(target, [text[:1]], draft=chain(text[1:]))[0].logits[0]
        for width in range(1, 14):
            pieces, ends = cut(text, [width] * (52 // width))
            logits = torch.cat([scores.logits[0, -1:] for scores in feed(target, pieces, slot=2)])
            assert torch.equal(logits, whole[ends])


@WHOLE
def test_the_same_bits_in_any_team(bits, folders):
    before, text, found = torch.get_num_threads(), ids(40), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            target, _ = read(folders["wide"], bits=bits)
            with torch.inference_mode():
                found.append(feed(target, [text[:20], text[20:21]], draft=chain(text[21:]))[1].logits)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_a_pass_ends_with_fewer_threads_than_it_asks_for(folders, tmp_path):
    """OpenMP says how many there are; a pass that waits for more waits for ever."""
    script = f"""if True:
        import torch
        from tests.native import test_native
        torch.set_num_threads(2)
        target, _ = test_native.read({str(folders["wide"])!r})
        text = test_native.ids(40)
        with torch.inference_mode():
            scores = test_native.feed(target, [text[:20], text[20:21]], draft=test_native.chain(text[21:]))
        torch.save(scores[1].logits, {str(tmp_path / "logits")!r})
    """
    limited = os.environ | {"OMP_THREAD_LIMIT": "1"}
    subprocess.run([sys.executable, "-c", script], env=limited, timeout=120, check=True)
    target, text = read(folders["wide"])[0], ids(40)
    with torch.inference_mode():
        wanted = feed(target, [text[:20], text[20:21]], draft=chain(text[21:]))[1].logits
    assert torch.equal(torch.load(tmp_path / "logits"), wanted)


@WHOLE
@pytest.mark.parametrize("name", ["llama", "mistral", "wide"])
def test_the_same_bits_in_a_tree_and_in_company(name, bits, folders):
    target, _ = read(folders[name], bits=bits)
    texts = [ids(count, seed) for seed, count in enumerate((31, 16, 5))]
    rows = [tiny.admit(target, slot, text) for slot, text in enumerate(texts)]
    draft = random_tree([9, 4, 0], 250, random.Random(1))
    with torch.inference_mode():
        together = target.score(tiny.everything(rows), draft).logits
        for b, text in enumerate(texts):
            target.cache.release(b)
            for node in range(-1, draft.width[b]):
                path = draft.tokens[b, tiny.branch(draft, b, node)].tolist()
                alone = feed(target, [text + path], slot=3)[0].logits[0, -1]
                assert torch.equal(together[b, node + 1], alone)


@WHOLE
def test_an_accepted_branch_is_the_text_itself(bits, folders):
    target, _ = read(folders["llama"], bits=bits)
    chance, row = random.Random(0), tiny.admit(target, 0, ids(21))
    with torch.inference_mode():
        for _ in range(6):
            tiny.grow(target, [row], chance)
        on = target.score(tiny.everything([row]), tree.empty(1, CPU)).logits
        assert torch.equal(on, feed(target, [row.token_ids], slot=1)[0].logits)


@WHOLE
def test_ids_that_the_embedding_does_not_have_are_its_last_one_wherever_they_stand(bits, folders):
    target, _ = read(folders["llama"], bits=bits)
    text, last = ids(11), target.vocab - 1
    with torch.inference_mode():
        wanted = feed(target, [[*text, last]])[0].logits
        for token in (last + 1, last + 129, 10**8, 2**40):
            assert torch.equal(feed(target, [[*text, token]], slot=1)[0].logits, wanted)
            assert torch.equal(feed(target, [text], draft=chain([token]))[0].logits[:, -1], wanted[:, 0])
        rows = [tiny.admit(target, slot, [*text, token]) for slot, token in enumerate((last, 10**8))]
        batch = Batch(
            seqs=tuple(rows), start=(0, 0), feed=tuple(tuple(row.token_ids) for row in rows), draft_budget=(3, 3)
        )
        grown = target.draft_greedy(batch, 200).tokens
    assert torch.equal(grown[0], grown[1])


@WHOLE
def test_grow_is_scoring_step_by_step(bits, folders):
    target, _ = read(folders["biased"], bits=bits)
    texts = [ids(count, seed) for seed, count in enumerate((11, 30, 4))]
    rows = [tiny.admit(target, slot, text) for slot, text in enumerate(texts)]
    batch = Batch(seqs=tuple(rows), start=(0, 0, 0), feed=tuple(tuple(text) for text in texts), draft_budget=(3, 7, 1))
    with torch.inference_mode():
        grown, wanted = target.draft_greedy(batch, 200).tokens, draft_by_scores(target, batch, 200).tokens
    assert grown.shape == wanted.shape == (3, 7)
    for b, budget in enumerate(batch.draft_budget):
        assert grown[b, :budget].tolist() == wanted[b, :budget].tolist()
    assert int(grown.max()) < 200


@WHOLE
def test_a_chain_stops_where_the_text_ends(bits, folders):
    target, _ = read(folders["biased"], bits=bits)
    row = tiny.admit(target, 0, ids(11))
    batch = Batch(seqs=(row,), start=(0,), feed=(tuple(row.token_ids),), draft_budget=(7,))
    with torch.inference_mode():
        free = target.draft_greedy(batch, 200).tokens[0].tolist()
        trust = StopRule(weight=(1.0,), bias=(0.0,), ends=(free[3], 777))
        ours, theirs = target.draft_greedy(batch, 200, trust), draft_by_scores(target, batch, 200, trust)
    assert ours.count == theirs.count == (free.index(free[3]) + 1,)


@WHOLE
@pytest.mark.parametrize("more", [0.0, 0.1])
@pytest.mark.parametrize("keep", [0.0, 0.01, 0.2, 2.0])
def test_a_chain_stops_where_its_chance_falls(folders, keep, more, bits):
    target, _ = read(folders["biased"], bits=bits)
    texts = [ids(count, seed) for seed, count in enumerate((11, 30, 4))]
    rows = [tiny.admit(target, slot, text) for slot, text in enumerate(texts)]
    batch = Batch(seqs=tuple(rows), start=(0, 0, 0), feed=tuple(tuple(text) for text in texts), draft_budget=(3, 7, 1))
    trust = StopRule(
        weight=(1.5, 0.8, 3.0), bias=(0.1, -0.4, 0.3), min_path_prob=keep, min_draft_probs=(keep + more, keep)
    )
    with torch.inference_mode():
        grown, wanted = target.draft_greedy(batch, 200, trust), draft_by_scores(target, batch, 200, trust)
    assert grown.count == wanted.count
    assert keep + more > 0 or grown.count == batch.draft_budget
    assert keep < 2 or grown.count == (0, 0, 0)
    for b, (ours, theirs) in enumerate(zip(grown.accept_prob, wanted.accept_prob, strict=True)):
        assert ours == pytest.approx(theirs, rel=1e-5)
        assert grown.margin[b] == pytest.approx(wanted.margin[b], rel=1e-5)
        assert grown.count[b] <= len(ours) <= min(grown.count[b] + 1, batch.draft_budget[b])
        assert grown.tokens[b, : len(ours)].tolist() == wanted.tokens[b, : len(ours)].tolist()
        assert all(chance >= keep for chance in ours[: grown.count[b]])
        assert all(chance < keep for chance in ours[grown.count[b] :])


@WHOLE
def test_features_are_the_layers_outputs(bits, folders):
    target, model = read(folders["qwen3"], layers=(1, 3), bits=bits)
    text = ids(12)
    with torch.inference_mode():
        scores = feed(target, [text[:1]], draft=chain(text[1:]))[0]
        states = model.float()(torch.tensor([text]), output_hidden_states=True).hidden_states
    assert distance(scores.hidden_states[1][0], states[2][0]) < {32: 1e-5, 16: 0.02}[bits]
    assert torch.equal(scores.feed_hidden_states[3][0], scores.hidden_states[3][0, :1])


@pytest.mark.parametrize("bits", [8, 4])
def test_a_quantised_model_is_a_model_of_its_own(bits, folders):
    _, plain = read(folders["tied"])
    target, model = read(folders["tied"], bits=bits)
    text = ids(30)
    with torch.inference_mode():
        logits = feed(target, [text[:1]], draft=chain(text[1:]))[0].logits[0]
        own, other = (m.float()(torch.tensor([text])).logits[0] for m in (model, plain))
    assert distance(logits, own) < 0.08  # what is left is the rounding of activations
    assert distance(own, other) > {8: 0.005, 4: 0.1}[bits]
    assert target.bytes() < read(folders["tied"])[0].bytes()


@WHOLE
def test_swap_is_loading_the_other_weights(bits, tmp_path):
    config = MODELS["biased"]
    old, new = (tiny.save(tmp_path / str(seed), config, seed=seed) for seed in (0, 1))
    target, _ = read(old, bits=bits)
    wanted, other = read(new, bits=bits)
    text = ids(20)
    with torch.inference_mode():
        goal = feed(wanted, [text])[0].logits
        assert not torch.equal(feed(target, [text])[0].logits, goal)
        some = {name: value for name, value in other.state_dict().items() if "k_proj" not in name}
        rest = {name: value for name, value in other.state_dict().items() if "k_proj" in name}
        target.update_weights(some, 1)
        assert not torch.equal(feed(target, [text])[0].logits, goal)
        target.update_weights(rest, 2)
        assert torch.equal(feed(target, [text])[0].logits, goal)
        for value in other.state_dict().values():
            value.zero_()  # what was given is the giver's again
        assert torch.equal(feed(target, [text])[0].logits, goal)
    assert target.version == 2
    with pytest.raises(OutriderError, match="no weight 'x'"):
        target.update_weights({"x": torch.zeros(1)}, 3)
    with pytest.raises(OutriderError, match="has shape"):
        target.update_weights({"model.norm.weight": torch.zeros(1)}, 3)


@pytest.mark.parametrize(("outputs", "inputs"), [(32, 64), (33, 65), (1, 1), (100, 130)])
def test_packing_loses_nothing_but_what_it_says(outputs, inputs):
    wide = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0))
    weight = wide.to(torch.bfloat16)
    assert torch.equal(unpack(pack(wide, bits=32)), wide)
    assert torch.equal(unpack(pack(weight)), weight)
    for bits in (8, 4):
        packed = pack(weight, bits=bits)
        back = unpack(packed)
        assert (back - weight.float()).abs().max() <= weight.float().abs().max() / ((1 << (bits - 1)) - 1) * 0.51
        assert torch.equal(unpack(pack(back, bits=bits)), back)
    assert not unpack(pack(torch.zeros(outputs, inputs), bits=8)).any()


def test_gate_and_up_lie_side_by_side():
    gate, up = torch.randn(48, 8), torch.randn(48, 8)
    both = interleave(gate, up)
    assert torch.equal(both[:16], gate[:16])
    assert torch.equal(both[16:32], up[:16])
    assert all(map(torch.equal, separate(both), (gate, up)))


def test_an_arena_keeps_tensors_apart():
    arena = Arena()
    tensors = [torch.randn(count) for count in (3, 1000, 1 << 20)]
    kept = [arena.keep(tensor) for tensor in tensors]
    assert all(map(torch.equal, kept, tensors))
    assert all(tensor.data_ptr() % 64 == 0 for tensor in kept)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_text_does_not_depend_on_speculation(temperature, dtype):
    """Any proposer, any k, alone or in company."""
    prompts = ["def add(a, b):\n    return", "Once upon a time", "SELECT name FROM", "The sum of 3 and 4 is"]
    params = SamplingParams(max_tokens=24, temperature=temperature, seed=5)
    draft = f"draft:{embedded('nano')}"

    def texts(proposer, k, together):
        llm = LLM(
            None,
            proposer=proposer,
            k=k,
            verifier="walk",
            dtype=dtype,
            kernels="native",
            max_num_seqs=4,
            max_model_len=128,
        )
        if together:
            return [c.token_ids for c in llm.generate(prompts, params)]
        return [llm.generate(prompt, params)[0].token_ids for prompt in prompts]

    plain = texts("none", 0, False)
    assert plain == texts(draft, 1, True) == texts(draft, 5, False) == texts("ngram", 8, True) == texts("none", 0, True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sampled_texts_of_a_batch_are_those_alone(dtype):
    """Many of them: one draw in some thousands lies so close to where the token changes that a last bit decides."""
    options = {"proposer": "none", "k": 0, "dtype": dtype, "kernels": "native", "max_model_len": 96}
    many, alone = LLM(embedded("nano"), max_num_seqs=64, **options), LLM(embedded("nano"), max_num_seqs=1, **options)
    texts = ("def add(a, b):", "Once upon a time", "SELECT name", "The")
    prompts = [f"{texts[i % 4]} {'x' * (i // 4)}" for i in range(64)]
    params = SamplingParams(max_tokens=32, temperature=1.0, seed=11, ignore_eos=True)
    assert [c.token_ids for c in many.generate(prompts, params)] == [
        c.token_ids for c in alone.generate(prompts, params)
    ]


def test_auto_takes_them_in_both_types(folders):
    for dtype, kernels in (("float32", "native"), ("bfloat16", "native"), ("float16", "torch")):
        checkpoint = load_checkpoint(folders["llama"], dtype=dtype, device="cpu")
        assert make_target(checkpoint, slots=1, context=32).kernels == kernels


def test_what_cannot_be_had_is_said(folders, monkeypatch):
    with pytest.raises(OutriderError, match="kernels 'quick' is unknown; use auto, native, torch"):
        LLM(folders["llama"], kernels="quick")
    with pytest.raises(OutriderError, match="need a CPU, and bfloat16 or float32; use kernels auto"):
        LLM(folders["llama"], kernels="native", dtype="float16")
    with pytest.raises(OutriderError, match="quantize 'int3' is unknown; use int8, int4"):
        LLM(folders["llama"], quantize="int3")
    with pytest.raises(OutriderError, match="layer 9 was asked for"):
        read(folders["llama"], layers=(9,))


def test_without_a_compiler_torch_takes_over(folders, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    library.load_library.cache_clear()
    try:
        checkpoint = load_checkpoint(folders["llama"], dtype="bfloat16", device="cpu")
        with pytest.raises(UnsupportedModel, match="no C\\+\\+ compiler was found"):
            make_target(checkpoint, slots=1, context=32, kernels="native")
        assert make_target(checkpoint, slots=1, context=32).kernels == "torch"
        again = load_checkpoint(folders["llama"], dtype="bfloat16", device="cpu")
        assert make_target(again, slots=1, context=32, bits=8).kernels == "torch int8"
        monkeypatch.setenv("CXX", "false")
        with pytest.raises(UnsupportedModel, match="cannot compile"):
            make_target(checkpoint, slots=1, context=32, kernels="native")
    finally:
        library.load_library.cache_clear()


def test_without_a_folder_for_them_torch_takes_over(folders, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    library.load_library.cache_clear()
    try:
        checkpoint = load_checkpoint(folders["llama"], dtype="bfloat16", device="cpu")
        with pytest.raises(UnsupportedModel, match=r"file/outrider, cannot be written .*; set XDG_CACHE_HOME"):
            make_target(checkpoint, slots=1, context=32, kernels="native")
        assert make_target(checkpoint, slots=1, context=32).kernels == "torch"
        llm = LLM(
            embedded("nano"), proposer="ngram", max_model_len=64
        )  # whose rules and laws have kernels of their own
        assert len(llm.generate("def", SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids) == 4
    finally:
        library.load_library.cache_clear()


def test_other_families_and_sizes_run_on_torch(tmp_path):
    odd = tiny.save(tmp_path / "odd", tiny.make_config("LlamaConfig", head_dim=8))
    other = tiny.save(tmp_path / "other", tiny.make_config("Olmo2Config"))
    for folder, reason in ((odd, "multiples of 16"), (other, "the native kernels support llama")):
        checkpoint = load_checkpoint(folder, dtype="bfloat16", device="cpu")
        assert make_target(checkpoint, slots=1, context=32).kernels == "torch"
        with pytest.raises(UnsupportedModel, match=reason):
            make_target(checkpoint, slots=1, context=32, kernels="native")


def test_query_heads_that_share_a_key_head_are_as_many_as_there_is_room_for(tmp_path):
    for heads in (48, 64):
        sizes = {"hidden_size": 192, "num_attention_heads": heads, "num_key_value_heads": 1}
        config = tiny.make_config("LlamaConfig", head_dim=16, **sizes)
        tiny.save(tmp_path / str(heads), config)
    target, model = read(tmp_path / "48", bits=32)
    text = ids(20)
    with torch.inference_mode():
        logits = feed(target, [text[:12], text[12:13]], draft=chain(text[13:]))[1].logits[0]
        assert distance(logits, model(torch.tensor([text])).logits[0, 12:]) < 1e-4
    checkpoint = load_checkpoint(tmp_path / "64", dtype="float32", device="cpu")
    with pytest.raises(UnsupportedModel, match="at most 48 query heads per key head; this model has 64 for 1"):
        make_target(checkpoint, slots=1, context=32, kernels="native")
    assert make_target(checkpoint, slots=1, context=32).kernels == "torch"


def test_the_embedded_pair_runs_here():
    checkpoint = load_checkpoint(embedded("nano"), dtype="bfloat16", device="cpu")
    assert isinstance(make_target(checkpoint, slots=1, context=32), NativeTarget)
