"""What a checkpoint computes, written down once more from its own names, against the module that is read from it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional
from transformers import LlamaConfig, Qwen3NextConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention, Qwen3NextRotaryEmbedding

from outrider.core import tree
from outrider.heads.config import Settings
from outrider.heads.description import Body, Rope, Scaling
from outrider.heads.formats.base import Source, TargetInfo
from outrider.heads.formats.llama import read_rope, write_body
from outrider.heads.formats.registry import format_of
from outrider.heads.modules.layers import Attention, rotation
from outrider.heads.rotary import frequencies
from outrider.heads.store import filled
from outrider.heads.targets.autoregressive import AutoregressiveTarget, NativeAutoregressiveTarget
from outrider.loader.checkpoint import load_checkpoint
from outrider.loader.embedded import embedded
from outrider.loader.make import make_target
from tests.helpers import tiny
from tests.helpers.heads import HEAD, LLAMA3, MASK, TABLE, YARN, cases, far, feed, random_draft

SMALL, EPSILON, HEADS, DIM = cases(), 1e-5, 4, 16


def rms(x, weight):
    return functional.rms_norm(x, x.shape[-1:], weight, EPSILON)


def turned(x, positions, theta=10000.0):
    """Pairs (i, i + D/2) as complex numbers."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * theta ** -(torch.arange(half) / half)
    both = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([both.real, both.imag], -1)


def attention(t, at, x, *, rotary=True):
    """Causal attention of one text [T, inputs] by weights `at` + q_proj and so on."""

    def part(name):
        y = functional.linear(x, t[f"{at}{name}_proj.weight"], t.get(f"{at}{name}_proj.bias"))
        y = y.unflatten(-1, (-1, DIM)).transpose(0, 1)
        if f"{at}{name}_norm.weight" in t:
            y = rms(y, t[f"{at}{name}_norm.weight"])
        return turned(y, torch.arange(len(x)).float()) if rotary and name in "qk" else y

    q, k, v = map(part, "qkv")
    k, v = (y.repeat_interleave(len(q) // len(y), 0) for y in (k, v))
    scores = (q @ k.transpose(-1, -2) / DIM**0.5).masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
    out = (scores.softmax(-1) @ v).transpose(0, 1).flatten(-2)
    return functional.linear(out, t[f"{at}o_proj.weight"], t.get(f"{at}o_proj.bias"))


def perceptron(t, at, x):
    gated = functional.silu(x @ t[f"{at}gate_proj.weight"].T) * (x @ t[f"{at}up_proj.weight"].T)
    return gated @ t[f"{at}down_proj.weight"].T


def layer(t, at, residual, ready):
    x = residual + attention(t, f"{at}self_attn.", ready)
    return x + perceptron(t, f"{at}mlp.", rms(x, t[f"{at}post_attention_layernorm.weight"]))


def eagle3(t, first, *, each, whole, normed_residual, recycle):
    """Of taps [T, n, H] or a state [T, H], and tokens: logits over the draft's tokens, and what goes round."""

    def run(tokens, state):
        if state.dim() == 3:
            if each:
                state = torch.stack([rms(state[:, i], t[f"fc_norm.{i}.weight"]) for i in range(state.shape[1])], 1)
            state = state.flatten(1)
            state = (rms(state, t["input_norm.weight"]) if whole else state) @ t["fc.weight"].T
        token = t.get("embed_tokens.weight", TABLE)[tokens]
        hidden = rms(state, t[f"{first}hidden_norm.weight"])
        ready = torch.cat([rms(token, t[f"{first}input_layernorm.weight"]), hidden], -1)
        out = layer(t, first, hidden if normed_residual else state, ready)
        normed = rms(out, t["norm.weight"])
        return normed @ t["lm_head.weight"].T, normed if recycle else out

    return run


def peagle(t, first):
    """Of taps [T, n, H], tokens, and so many masks behind them: logits over the draft's tokens, of all columns."""

    def run(tokens, taps, masks):
        tokens = torch.cat([tokens, torch.full((masks,), 93)])
        state = torch.cat([taps, t["mask_hidden"].view(1, -1, 64).expand(masks, -1, -1)])
        if "fc_norm.0.weight" in t:
            state = torch.stack([rms(state[:, i], t[f"fc_norm.{i}.weight"]) for i in range(state.shape[1])], 1)
        state = state.flatten(1)
        state = (rms(state, t["input_norm.weight"]) if "input_norm.weight" in t else state) @ t["fc.weight"].T
        token = rms(t.get("embed_tokens.weight", TABLE)[tokens], t[f"{first}input_layernorm.weight"])
        x = layer(t, first, state, torch.cat([token, rms(state, t[f"{first}hidden_norm.weight"])], -1))
        if "layers.1.input_layernorm.weight" in t:
            x = layer(t, "layers.1.", x, rms(x, t["layers.1.input_layernorm.weight"]))
        return rms(x, t["norm.weight"]) @ t["lm_head.weight"].T

    return run


def eagle1(t):
    def run(tokens, state):
        x = torch.cat([t["embed_tokens.weight"][tokens], state.flatten(1)], -1)
        x = functional.linear(x, t["fc.weight"], t["fc.bias"])
        x = layer(t, "layers.0.", x, x)
        x = layer(t, "layers.1.", x, rms(x, t["layers.1.input_layernorm.weight"]))
        return x @ HEAD.T, x

    return run


def mtp(t, names, at, *, state_first, zero, recycle, table=TABLE, head=HEAD):
    """`names`: of the embedding's norm, the state's, the projection, the final norm, with their prefixes."""

    def run(tokens, state):
        token = table[tokens]
        if zero:
            token[0] = 0
        pair = [rms(token, t[names[0]]), rms(state.flatten(1), t[names[1]])]
        x = torch.cat(pair[::-1] if state_first else pair, -1) @ t[names[2]].T
        x = layer(t, at, x, rms(x, t[f"{at}input_layernorm.weight"]))
        normed = rms(x, t[names[3]])
        return normed @ head.T, normed if recycle else x

    return run


def nemotron(t):
    def run(tokens, state):
        at = "mtp.layers.0."
        pair = rms(TABLE[tokens], t[f"{at}enorm.weight"]), rms(state.flatten(1), t[f"{at}hnorm.weight"])
        x = torch.cat(pair, -1) @ t[f"{at}eh_proj.weight"].T
        x = x + attention(t, f"{at}mixer.", rms(x, t[f"{at}norm.weight"]), rotary=False)
        at = "mtp.layers.1."
        inner = (rms(x, t[f"{at}norm.weight"]) @ t[f"{at}mixer.up_proj.weight"].T).relu() ** 2
        normed = rms(x + inner @ t[f"{at}mixer.down_proj.weight"].T, t[f"{at}final_layernorm.weight"])
        return normed @ HEAD.T, normed

    return run


def _named(at, *names):
    return [f"{at}{name}.weight" for name in names]


_DEEP = _named("model.layers.8.", "enorm", "hnorm", "eh_proj", "shared_head.norm")
_QWEN = _named("mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
_MIMO = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
_NO = {"each": False, "whole": False, "normed_residual": False, "recycle": False}
READINGS = {
    "eagle3": lambda t: eagle3(t, "midlayer.", **_NO),
    "eagle3 of some tokens": lambda t: eagle3(t, "midlayer.", **{**_NO, "each": True}),
    "speculators": lambda t: eagle3(t, "layers.0.", **_NO),
    "eagle3.1": lambda t: eagle3(t, "layers.0.", **{**_NO, "each": True, "recycle": True}),
    "eagle": eagle1,
    "deepseek": lambda t: mtp(t, _DEEP, "model.layers.8.", state_first=False, zero=True, recycle=False),
    "deepseek with tables": lambda t: mtp(
        t,
        _DEEP,
        "model.layers.8.",
        state_first=False,
        zero=True,
        recycle=False,
        table=t["model.layers.8.embed_tokens.weight"],
        head=t["model.layers.8.shared_head.head.weight"],
    ),
    "qwen": lambda t: mtp(t, _QWEN, "mtp.layers.0.", state_first=False, zero=False, recycle=True),
    "mimo": lambda t: mtp(
        t,
        _named("model.mtp_layers.0.", *_MIMO),
        "model.mtp_layers.0.",
        state_first=True,
        zero=True,
        recycle=True,
    ),
    "mtp of speculators": lambda t: mtp(
        t, _named("mtp_layers.0.", *_MIMO), "mtp_layers.0.", state_first=False, zero=False, recycle=True
    ),
    "nemotron": nemotron,
}


def read(case):
    """A random checkpoint's tensors, and the module that is read from it."""
    name, description = SMALL[case]
    partner = TargetInfo(vocab=96, hidden=64, layers=8, head=lambda: HEAD, embedding=lambda: TABLE)
    config, tensors = format_of(name).write(description, random_draft(description, seed=3).state_dict(), partner)
    found, weights = format_of(name).read(Source(config, tensors, partner))
    module = filled(found, weights, where=case)
    module.share_weights(TABLE, HEAD)
    return tensors, module


def causal(of, query, key, value):
    key, value = (each.repeat_interleave(query.shape[-3] // each.shape[-3], -3) for each in (key, value))
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def agree(ours, theirs):
    """Up to rounding, which is as large as the largest numbers make it: logits of EAGLE-1's bare states reach 900."""
    torch.testing.assert_close(ours, theirs, atol=max(2e-4, 2e-5 * float(theirs.abs().max())), rtol=2e-4)


@pytest.mark.parametrize("case", READINGS)
@torch.no_grad()
def test_a_follower_computes_what_its_checkpoint_says(case):
    """The guesses from the target's states, and those from the draft's own."""
    tensors, module = read(case)
    reading = READINGS[case](tensors)
    tokens, positions = torch.randint(0, 96, (2, 7)), torch.arange(7)
    taps = torch.randn(7, len(module.description.aux_states.layers), 64)
    theirs, state = reading(tokens[0], taps if module.description.aux_states.fused else taps[:, 0])
    out = module(tokens[0], module.fused(taps), positions, causal)
    agree(module.logits(out), theirs)
    theirs, _ = reading(tokens[1], state)
    out = module(tokens[1], module.recycled(out), positions, causal)
    agree(module.logits(out), theirs)
    if module.description.draft_vocab:
        assert torch.equal(tensors["d2t"] + torch.arange(40), module.ids)


@torch.no_grad()
def test_modules_feed_each_other():
    """Each reads what the one before made of the token before, one token further behind."""
    tensors, module = read("three modules")
    tokens, state = torch.randint(0, 96, (8,)), torch.randn(7, 64)
    theirs, ours = state, state
    for number in range(3):
        at = f"model.layers.{8 + number}."
        names = _named(at, "enorm", "hnorm", "eh_proj", "shared_head.norm")
        said, theirs = mtp(tensors, names, at, state_first=False, zero=not number, recycle=False)(
            tokens[1 + number :], theirs
        )
        out = module(tokens[1 + number :], ours, torch.arange(number, 7), causal, number)
        torch.testing.assert_close(module.logits(out, number), said, atol=2e-4, rtol=2e-4)
        theirs, ours = theirs[:-1], module.recycled(out, number)[:-1]


@pytest.mark.parametrize(
    ("case", "first"), [("peagle", "midlayer."), ("plain peagle", "midlayer."), ("peagle of speculators", "layers.0.")]
)
@torch.no_grad()
def test_masks_compute_what_their_checkpoint_says(case, first):
    tensors, module = read(case)
    tokens, taps = torch.randint(0, 96, (7,)), torch.randn(7, len(module.description.aux_states.layers), 64)
    theirs = peagle(tensors, first)(tokens, taps, 3)
    tokens = torch.cat([tokens, torch.full((3,), module.description.masks.token)])
    states = torch.cat([module.fused(taps), module.masked().expand(3, -1)])
    ours = module.logits(module(tokens, states, torch.arange(10), causal))
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)


@torch.no_grad()
def test_another_order_is_written_by_swapping_columns():
    mimo = SMALL["mimo"][1]
    module = random_draft(replace(mimo, input_fusion=replace(mimo.input_fusion, embedding_first=True)))
    config, tensors = format_of("mtp-mimo").write(module.description, module.state_dict(), None)
    found, weights = format_of("mtp-mimo").read(Source(config, tensors, None))
    assert found == mimo
    again = filled(found, weights, where="mimo")
    tokens, taps, positions = torch.randint(0, 96, (7,)), torch.randn(7, 1, 64), torch.arange(7)
    outs = []
    for each in (module, again):
        each.share_weights(TABLE, HEAD)
        outs.append(each(tokens, each.fused(taps), positions, causal))
    torch.testing.assert_close(*outs)


@pytest.mark.parametrize("case", ["medusa", "legacy medusa", "medusa of vllm", "hydra", "ungrounded hydra"])
@torch.no_grad()
def test_heads_compute_what_their_checkpoint_says(case):
    t, module = read(case)
    state, tokens = torch.randn(5, 64), torch.randint(0, 96, (5, 3))
    for i in range(module.stack.heads):
        x = state
        if case == "hydra":
            x = torch.cat([state, *(TABLE[tokens[:, j]] for j in range(i + 1))], -1)
        for j in range(module.stack.layers):
            at = {"medusa of vllm": f"blocks.{i}.layers.{j}", "medusa": f"{i}.{j}.linear"}.get(case)
            at = at or (f"{i}.{j}.linear" if "medusa" in case else f"hydra_mlp.{i}.{j}.linear")
            way = at.replace("linear", "res_connection")
            straight = (
                functional.linear(x, t[f"{way}.weight"], t[f"{way}.bias"]) if way != at and f"{way}.weight" in t else x
            )
            x = straight + functional.silu(functional.linear(x, t[f"{at}.weight"], t[f"{at}.bias"]))
        names = (f"{i}.{module.stack.layers}", f"lm_heads.{i}", f"hydra_lm_head.{i}")
        own = next((name for name in names if f"{name}.weight" in t), None)
        theirs = functional.linear(x, t[f"{own}.weight"], t.get(f"{own}.bias")) if own else x @ HEAD.T
        ours = module(state, tokens[:, : i + 1], i)
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def block(t, *, size, mask, first):
    """Of taps [T, n, H] and the token behind them: the outputs of the columns that guess, from number `first` on."""

    def run(taps, token):
        context = rms(taps.flatten(1) @ t["fc.weight"].T, t["hidden_norm.weight"])
        x = t.get("embed_tokens.weight", TABLE)[torch.tensor([token, *[mask] * (size - 1)])]
        places = torch.arange(len(context) + size).float()
        for i in range(sum(name.endswith("q_proj.weight") for name in t)):
            at = f"layers.{i}."
            ready = rms(x, t[f"{at}input_layernorm.weight"])

            def part(name, y, at=at):
                y = (y @ t[f"{at}self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, DIM)).transpose(0, 1)
                if name == "v":
                    return y
                return turned(rms(y, t[f"{at}self_attn.{name}_norm.weight"]), places[-y.shape[1] :])

            seen = torch.cat([context, ready])
            q, k, v = part("q", ready), part("k", seen), part("v", seen)
            k, v = (y.repeat_interleave(len(q) // len(y), 0) for y in (k, v))
            found = (q @ k.transpose(-1, -2) / DIM**0.5).softmax(-1) @ v
            x = x + found.transpose(0, 1).flatten(-2) @ t[f"{at}self_attn.o_proj.weight"].T
            x = x + perceptron(t, f"{at}mlp.", rms(x, t[f"{at}post_attention_layernorm.weight"]))
        return rms(x, t["norm.weight"])[first:]

    return run


@pytest.mark.parametrize(
    ("case", "size", "first"),
    [
        ("dflash", 5, 1),
        ("narrow dflash", 5, 1),
        ("dspark", 4, 0),
        ("dspark with tables", 4, 0),
        ("dspark of speculators", 4, 1),
    ],
)
@torch.no_grad()
def test_a_block_computes_what_its_checkpoint_says(case, size, first):
    t, module = read(case)
    taps = torch.randn(6, 3, 64)
    theirs = block(t, size=size, mask=MASK, first=first)(taps, 11)
    shown = module.shown(module.fused(taps), torch.arange(6))

    def look(of, query, key, value):
        return bare(query, *(torch.cat(pair, -2) for pair in zip(shown[of.layer_idx], (key, value), strict=True)))

    ours = module(torch.tensor([11]), 6 + torch.arange(size), look)[0]
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    logits, before = theirs @ t.get("lm_head.weight", HEAD).T, torch.randint(0, 96, (len(theirs),))
    if module.block.markov_rank:
        latent = t["markov_head.markov_w1.weight"][before]
        logits = logits + latent @ t["markov_head.markov_w2.weight"].T
    torch.testing.assert_close(module.corrected(module.logits(ours), before), logits, atol=1e-3, rtol=1e-3)
    if module.block.confidence:
        judged = torch.cat([theirs, latent], -1) @ t["confidence_head.proj.weight"][0] + t["confidence_head.proj.bias"]
        torch.testing.assert_close(module.confidence(ours, before), judged, atol=1e-4, rtol=1e-4)
    if module.description.draft_vocab:
        assert torch.equal(t["d2t"] + torch.arange(40), module.ids)


def bare(query, key, value):
    key, value = (each.repeat_interleave(query.shape[-3] // each.shape[-3], -3) for each in (key, value))
    return functional.scaled_dot_product_attention(query, key, value)


@torch.no_grad()
def test_gated_attention_is_transformers_own():
    """Of Qwen3-Next, whose norms are stored less 1."""
    torch.manual_seed(5)
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    rope = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}
    config = Qwen3NextConfig(**sizes, rope_parameters=rope, rms_norm_eps=1e-5, attn_implementation="eager")
    theirs = Qwen3NextAttention(config, 0).eval()
    for norm in (theirs.q_norm, theirs.k_norm):
        norm.weight.normal_(std=0.2)
    body = Body(
        layers=1,
        hidden=64,
        heads=4,
        key_heads=2,
        dim=16,
        ffn=64,
        epsilon=1e-5,
        theta=1e6,
        rotary=0.5,
        head_norms=True,
        attention_gate=True,
    )
    ours = Attention(body, 64, 0).eval()
    ours.load_state_dict({n: v + 1 if "norm" in n else v for n, v in theirs.state_dict().items()})
    x, positions = torch.randn(1, 6, 64), torch.arange(6)[None]
    mask = torch.zeros(1, 1, 6, 6).masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)
    wanted, _ = theirs(x, Qwen3NextRotaryEmbedding(config)(x, positions), mask)
    found = ours(x[0], rotation(positions[0], body, torch.float32), causal)
    torch.testing.assert_close(found, wanted[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("rotary", [1.0, 0.5])
@pytest.mark.parametrize("rope", [None, Rope(scaling=Scaling.LINEAR, factor=4.0), LLAMA3, YARN], ids=str)
def test_rotary_positions_are_transformers_own(rope, rotary):
    body = Body(layers=1, hidden=256, heads=4, key_heads=2, dim=64, ffn=64, theta=5e5, rope=rope, rotary=rotary)
    written = write_body(body, 96, None)
    assert read_rope(Settings(written)) == (5e5, rope, rotary)
    given = {
        "rope_theta": 5e5,
        **(written["rope_scaling"] or {"rope_type": "default"}),
        "partial_rotary_factor": rotary,
    }
    assert read_rope(Settings({"rope_parameters": given})) == (5e5, rope, rotary)
    ours, amplitude = frequencies(body)
    if rope is None:
        size = int(64 * rotary)
        theirs, scale = 5e5 ** -(torch.arange(0, size, 2) / size), 1.0
    else:
        config = LlamaConfig(hidden_size=256, num_attention_heads=4, head_dim=64, rope_parameters=given)
        theirs, scale = ROPE_INIT_FUNCTIONS[str(rope.scaling)](config, torch.device("cpu"))
    torch.testing.assert_close(ours, theirs.float())
    assert amplitude == pytest.approx(scale)


@pytest.mark.skipif(not tiny.compiles(), reason="no C++ compiler here")
@pytest.mark.parametrize(("dtype", "near"), [(torch.bfloat16, 0.03), (torch.float32, 1e-5)])
@pytest.mark.parametrize("case", ["five taps", "eagle", "eagle3 without a norm"])
def test_native_kernels_read_it_alike(case, dtype, near):
    """Scaled positions, biases of all sorts, a second layer and no norms."""
    checkpoint = load_checkpoint(embedded("mini"), dtype=str(dtype).removeprefix("torch."), device="cpu")
    tables = make_target(checkpoint, slots=1, context=32, kernels="native").share_weights()
    module = random_draft(cases(hidden=384, vocab=12288)[case][1]).to(dtype)
    heads = [kind(module, tables, slots=1, context=64) for kind in (AutoregressiveTarget, NativeAutoregressiveTarget)]
    text, taps = torch.randint(0, 12288, (9,)).tolist(), torch.randn(8, len(module.description.aux_states.layers), 384)
    none = tree.empty(1, torch.device("cpu"))
    ours, theirs = (head.score(feed(head, module.description, text, taps), none).logits for head in heads)
    assert far(ours, theirs) < near
