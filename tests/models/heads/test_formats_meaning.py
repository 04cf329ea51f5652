"""Imported modules compute the same as reference implementations that use the tensor names of the checkpoints."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional
from transformers import LlamaConfig, Qwen3NextConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention, Qwen3NextRotaryEmbedding

from outrider.core import tree
from outrider.core.types import SharedWeights
from outrider.models.heads.config import ConfigReader
from outrider.models.heads.description import Body, Rope, Scaling
from outrider.models.heads.formats.base import Source, TargetInfo
from outrider.models.heads.formats.llama import read_rope, write_body
from outrider.models.heads.formats.registry import format_of
from outrider.models.heads.modules.layers import Attention, rotation
from outrider.models.heads.rotary import frequencies
from outrider.models.heads.store import load_module
from outrider.models.heads.targets.autoregressive import AutoregressiveTarget, NativeAutoregressiveTarget
from outrider.models.heads.targets.registry import make_head_target
from outrider.models.loader.embedded import embedded
from outrider.models.loader.load import load_checkpoint
from outrider.models.loader.make import make_target
from tests.helpers import tiny
from tests.helpers.heads import HEAD, LLAMA3, MASK, TABLE, YARN, cases, far, feed, random_draft

SMALL = cases()
EPSILON = 1e-5
DIM = 16  # of an attention head


# Reference implementations. `t` is the tensors of a checkpoint, and a `prefix` is that of a layer in it.


def rms_norm(x, weight):
    return functional.rms_norm(x, x.shape[-1:], weight, EPSILON)


def rotate_complex(x, positions, theta=10000.0):
    """Rotate the pairs (i, i + D/2) as complex numbers."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * theta ** -(torch.arange(half) / half)
    pairs = torch.complex(x[..., :half], x[..., half:])
    rotated = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([rotated.real, rotated.imag], -1)


def repeat_key_heads(x, num_heads):
    """Repeat key heads [key heads, T, D] for the query heads that share them."""
    return x.repeat_interleave(num_heads // len(x), 0)


def attention(t, prefix, x, *, rotary=True):
    """Return the causal self-attention of one sequence [T, inputs]."""

    def project(name):
        y = functional.linear(x, t[f"{prefix}{name}_proj.weight"], t.get(f"{prefix}{name}_proj.bias"))
        y = y.unflatten(-1, (-1, DIM)).transpose(0, 1)
        if f"{prefix}{name}_norm.weight" in t:
            y = rms_norm(y, t[f"{prefix}{name}_norm.weight"])
        return rotate_complex(y, torch.arange(len(x)).float()) if rotary and name in "qk" else y

    query = project("q")
    key = repeat_key_heads(project("k"), len(query))
    value = repeat_key_heads(project("v"), len(query))
    is_later = torch.ones(len(x), len(x)).triu(1).bool()
    scores = (query @ key.transpose(-1, -2) / DIM**0.5).masked_fill(is_later, -torch.inf)
    out = (scores.softmax(-1) @ value).transpose(0, 1).flatten(-2)
    return functional.linear(out, t[f"{prefix}o_proj.weight"], t.get(f"{prefix}o_proj.bias"))


def mlp(t, prefix, x):
    gated = functional.silu(x @ t[f"{prefix}gate_proj.weight"].T) * (x @ t[f"{prefix}up_proj.weight"].T)
    return gated @ t[f"{prefix}down_proj.weight"].T


def decoder_layer(t, prefix, residual, attention_input):
    x = residual + attention(t, f"{prefix}self_attn.", attention_input)
    return x + mlp(t, f"{prefix}mlp.", rms_norm(x, t[f"{prefix}post_attention_layernorm.weight"]))


def norm_each_layer(t, aux_states):
    """Normalize hidden states [T, layers, H] by layer."""
    return torch.stack([rms_norm(aux_states[:, i], t[f"fc_norm.{i}.weight"]) for i in range(aux_states.shape[1])], 1)


def eagle3(t, first, *, each=False, whole=False, normed_residual=False, normed_feedback=False):
    """Return a function from tokens, and states [T, layers, H] or [T, H], to logits and the state that is fed back.

    `first` is the prefix of the first layer.
    """

    def run(tokens, state):
        if state.dim() == 3:
            if each:
                state = norm_each_layer(t, state)
            state = state.flatten(1)
            state = (rms_norm(state, t["input_norm.weight"]) if whole else state) @ t["fc.weight"].T
        embedded_tokens = t.get("embed_tokens.weight", TABLE)[tokens]
        normed_state = rms_norm(state, t[f"{first}hidden_norm.weight"])
        normed_tokens = rms_norm(embedded_tokens, t[f"{first}input_layernorm.weight"])
        attention_input = torch.cat([normed_tokens, normed_state], -1)
        out = decoder_layer(t, first, normed_state if normed_residual else state, attention_input)
        normed_out = rms_norm(out, t["norm.weight"])
        return normed_out @ t["lm_head.weight"].T, normed_out if normed_feedback else out

    return run


def peagle(t, first):
    """Return a function from tokens, states [T, layers, H] and a number of masks to the logits of all columns."""

    def run(tokens, aux_states, num_masks):
        tokens = torch.cat([tokens, torch.full((num_masks,), 93)])
        state = torch.cat([aux_states, t["mask_hidden"].view(1, -1, 64).expand(num_masks, -1, -1)])
        if "fc_norm.0.weight" in t:
            state = norm_each_layer(t, state)
        state = state.flatten(1)
        state = (rms_norm(state, t["input_norm.weight"]) if "input_norm.weight" in t else state) @ t["fc.weight"].T
        embedded_tokens = t.get("embed_tokens.weight", TABLE)[tokens]
        normed_tokens = rms_norm(embedded_tokens, t[f"{first}input_layernorm.weight"])
        normed_state = rms_norm(state, t[f"{first}hidden_norm.weight"])
        x = decoder_layer(t, first, state, torch.cat([normed_tokens, normed_state], -1))
        if "layers.1.input_layernorm.weight" in t:
            x = decoder_layer(t, "layers.1.", x, rms_norm(x, t["layers.1.input_layernorm.weight"]))
        return rms_norm(x, t["norm.weight"]) @ t["lm_head.weight"].T

    return run


def eagle1(t):
    """Return a function as in `eagle3`, for states [T, H]."""

    def run(tokens, state):
        x = torch.cat([t["embed_tokens.weight"][tokens], state.flatten(1)], -1)
        x = functional.linear(x, t["fc.weight"], t["fc.bias"])
        x = decoder_layer(t, "layers.0.", x, x)
        x = decoder_layer(t, "layers.1.", x, rms_norm(x, t["layers.1.input_layernorm.weight"]))
        return x @ HEAD.T, x

    return run


def mtp(t, names, prefix, *, state_first=False, zero_first=False, normed_feedback=False, table=TABLE, head=HEAD):
    """Return a function as in `eagle3`, for states [T, H].

    `names` are the full names of the embedding norm, the state norm, the projection, and the final norm.
    """
    embedding_norm, state_norm, project, final_norm = (t[name] for name in names)

    def run(tokens, state):
        embedded_tokens = table[tokens]
        if zero_first:
            embedded_tokens[0] = 0
        pair = [rms_norm(embedded_tokens, embedding_norm), rms_norm(state.flatten(1), state_norm)]
        x = torch.cat(pair[::-1] if state_first else pair, -1) @ project.T
        x = decoder_layer(t, prefix, x, rms_norm(x, t[f"{prefix}input_layernorm.weight"]))
        normed_out = rms_norm(x, final_norm)
        return normed_out @ head.T, normed_out if normed_feedback else x

    return run


def nemotron(t):
    """Return a function as in `eagle3`, for states [T, H]."""

    def run(tokens, state):
        prefix = "mtp.layers.0."
        normed_tokens = rms_norm(TABLE[tokens], t[f"{prefix}enorm.weight"])
        normed_state = rms_norm(state.flatten(1), t[f"{prefix}hnorm.weight"])
        x = torch.cat([normed_tokens, normed_state], -1) @ t[f"{prefix}eh_proj.weight"].T
        x = x + attention(t, f"{prefix}mixer.", rms_norm(x, t[f"{prefix}norm.weight"]), rotary=False)
        prefix = "mtp.layers.1."
        inner = (rms_norm(x, t[f"{prefix}norm.weight"]) @ t[f"{prefix}mixer.up_proj.weight"].T).relu() ** 2
        x = x + inner @ t[f"{prefix}mixer.down_proj.weight"].T
        normed_out = rms_norm(x, t[f"{prefix}final_layernorm.weight"])
        return normed_out @ HEAD.T, normed_out

    return run


def _weights(prefix, *names):
    return [f"{prefix}{name}.weight" for name in names]


_DEEPSEEK_NAMES = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
_DEEPSEEK = _weights("model.layers.8.", *_DEEPSEEK_NAMES)
_QWEN = _weights("mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
_MIMO = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
REFERENCES = {
    "eagle3": lambda t: eagle3(t, "midlayer."),
    "eagle3 of some tokens": lambda t: eagle3(t, "midlayer.", each=True),
    "speculators": lambda t: eagle3(t, "layers.0."),
    "eagle3.1": lambda t: eagle3(t, "layers.0.", each=True, normed_feedback=True),
    "eagle": eagle1,
    "deepseek": lambda t: mtp(t, _DEEPSEEK, "model.layers.8.", zero_first=True),
    "deepseek with tables": lambda t: mtp(
        t,
        _DEEPSEEK,
        "model.layers.8.",
        zero_first=True,
        table=t["model.layers.8.embed_tokens.weight"],
        head=t["model.layers.8.shared_head.head.weight"],
    ),
    "qwen": lambda t: mtp(t, _QWEN, "mtp.layers.0.", normed_feedback=True),
    "mimo": lambda t: mtp(
        t,
        _weights("model.mtp_layers.0.", *_MIMO),
        "model.mtp_layers.0.",
        state_first=True,
        zero_first=True,
        normed_feedback=True,
    ),
    "mtp of speculators": lambda t: mtp(t, _weights("mtp_layers.0.", *_MIMO), "mtp_layers.0.", normed_feedback=True),
    "nemotron": nemotron,
}


def import_case(case):
    """Return the tensors of a random checkpoint, and the module that is imported from it."""
    name, description = SMALL[case]
    target = TargetInfo(vocab=96, hidden=64, layers=8, head=lambda: HEAD, embedding=lambda: TABLE)
    weights = random_draft(description, seed=3).state_dict()
    config, tensors = format_of(name).write(description, weights, target)
    imported_description, imported_weights = format_of(name).read(Source(config, tensors, target))
    module = load_module(imported_description, imported_weights, where=case).eval()
    module.share_weights(TABLE, HEAD)
    return tensors, module


def full_attention(query, key, value, *, is_causal=False):
    """Return attention without a mask, or causal attention."""
    sharing = query.shape[-3] // key.shape[-3]
    key = key.repeat_interleave(sharing, -3)
    value = value.repeat_interleave(sharing, -3)
    return functional.scaled_dot_product_attention(query, key, value, is_causal=is_causal)


def causal(module, query, key, value):
    """Compute causal attention, as an `AttentionFunction`."""
    return full_attention(query, key, value, is_causal=True)


def assert_close(actual, expected):
    """Compare with a tolerance that grows with the values: logits of EAGLE-1, which has no final norm, reach 900."""
    tolerance = max(2e-4, 2e-5 * float(expected.abs().max()))
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=2e-4)


@pytest.mark.parametrize("case", REFERENCES)
@torch.no_grad()
def test_autoregressive_heads_agree_with_references(case):
    """The first draft token starts from the target's states, and the second one from the head's own."""
    tensors, module = import_case(case)
    reference = REFERENCES[case](tensors)
    tokens = torch.randint(0, 96, (2, 7))
    positions = torch.arange(7)
    aux_states = torch.randn(7, len(module.description.aux_states.layers), 64)
    first_states = aux_states if module.description.aux_states.fused else aux_states[:, 0]
    expected, state = reference(tokens[0], first_states)
    out = module(tokens[0], module.fuse_states(aux_states), positions, causal)
    assert_close(module.logits(out), expected)
    expected, _ = reference(tokens[1], state)
    out = module(tokens[1], module.feed_back(out), positions, causal)
    assert_close(module.logits(out), expected)
    if module.description.draft_vocab:
        assert torch.equal(tensors["d2t"] + torch.arange(40), module.ids)


@torch.no_grad()
def test_modules_take_the_output_of_the_module_before():
    """Each module starts one token later than the module before."""
    tensors, module = import_case("three modules")
    tokens = torch.randint(0, 96, (8,))
    state = torch.randn(7, 64)
    reference_state = state
    for index in range(3):
        prefix = f"model.layers.{8 + index}."
        reference = mtp(tensors, _weights(prefix, *_DEEPSEEK_NAMES), prefix, zero_first=not index)
        expected, reference_out = reference(tokens[1 + index :], reference_state)
        out = module(tokens[1 + index :], state, torch.arange(index, 7), causal, index)
        torch.testing.assert_close(module.logits(out, index), expected, atol=2e-4, rtol=2e-4)
        reference_state = reference_out[:-1]
        state = module.feed_back(out, index)[:-1]


@pytest.mark.parametrize(
    ("case", "first"), [("peagle", "midlayer."), ("plain peagle", "midlayer."), ("peagle of speculators", "layers.0.")]
)
@torch.no_grad()
def test_mask_token_heads_agree_with_references(case, first):
    tensors, module = import_case(case)
    tokens = torch.randint(0, 96, (7,))
    aux_states = torch.randn(7, len(module.description.aux_states.layers), 64)
    expected = peagle(tensors, first)(tokens, aux_states, 3)
    tokens = torch.cat([tokens, torch.full((3,), module.description.masks.token)])
    states = torch.cat([module.fuse_states(aux_states), module.mask_state().expand(3, -1)])
    logits = module.logits(module(tokens, states, torch.arange(10), causal))
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=2e-4)


@torch.no_grad()
def test_export_in_another_order_swaps_columns_of_the_projection():
    mimo = SMALL["mimo"][1]
    module = random_draft(replace(mimo, input_fusion=replace(mimo.input_fusion, embedding_first=True)))
    config, tensors = format_of("mtp-mimo").write(module.description, module.state_dict(), None)
    description, weights = format_of("mtp-mimo").read(Source(config, tensors, None))
    assert description == mimo
    imported = load_module(description, weights, where="mimo")
    tokens = torch.randint(0, 96, (7,))
    aux_states = torch.randn(7, 1, 64)
    outs = []
    for each in (module, imported):
        each.share_weights(TABLE, HEAD)
        outs.append(each(tokens, each.fuse_states(aux_states), torch.arange(7), causal))
    torch.testing.assert_close(*outs)


@pytest.mark.parametrize("case", ["medusa", "legacy medusa", "medusa of vllm", "hydra", "ungrounded hydra"])
@torch.no_grad()
def test_parallel_heads_agree_with_references(case):
    t, module = import_case(case)
    state = torch.randn(5, 64)
    tokens = torch.randint(0, 96, (5, 3))
    for i in range(module.stack.heads):
        x = state
        if case == "hydra":
            x = torch.cat([state, *(TABLE[tokens[:, j]] for j in range(i + 1))], -1)
        for j in range(module.stack.layers):
            if case == "medusa of vllm":
                name = f"blocks.{i}.layers.{j}"
            elif "medusa" in case:
                name = f"{i}.{j}.linear"
            else:
                name = f"hydra_mlp.{i}.{j}.linear"
            residual_name = f"hydra_mlp.{i}.{j}.res_connection"
            residual = x
            if f"{residual_name}.weight" in t:
                residual = functional.linear(x, t[f"{residual_name}.weight"], t[f"{residual_name}.bias"])
            x = residual + functional.silu(functional.linear(x, t[f"{name}.weight"], t[f"{name}.bias"]))
        expected = x @ HEAD.T
        for name in (f"{i}.{module.stack.layers}", f"lm_heads.{i}", f"hydra_lm_head.{i}"):
            if f"{name}.weight" in t:
                expected = functional.linear(x, t[f"{name}.weight"], t.get(f"{name}.bias"))
        logits = module(state, tokens[:, : i + 1], i)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def convolved(t, name, which, x, kernel_input):
    """Convolve the columns x [size, H] before (`which` 0) or after (1) a sublayer, if it has convolutions."""
    if f"{name}.base_kernel" not in t:
        return x
    base = t[f"{name}.base_kernel"][which]
    dynamic = (kernel_input @ t[f"{name}.kernel_projection.weight"].T).view(len(x), 2, len(base), -1)[:, which]
    out = []
    for row in range(len(x)):
        taps = [base[tap] + dynamic[row, tap].repeat_interleave(16) for tap in range(len(base))]
        out.append(sum(kernel * x[row - tap] for tap, kernel in enumerate(taps) if tap <= row))
    return torch.stack(out)


def block(t, *, size, mask, first, views=()):
    """Return a function from states [T, layers, H] and the token after them to the outputs of the columns that predict.

    These are the columns from `first` on. `mask` is the row of the embedding that is the mask. `views` has the window
    of each layer, 0 for none, and whether its columns see no later column.
    """

    def run(aux_states, token):
        context = rms_norm(aux_states.flatten(1) @ t["fc.weight"].T, t["hidden_norm.weight"])
        x = t.get("embed_tokens.weight", TABLE)[torch.tensor([token, *[mask] * (size - 1)])]
        positions = torch.arange(len(context) + size).float()
        for i in range(sum(name.endswith("q_proj.weight") for name in t)):
            prefix = f"layers.{i}."
            normed = rms_norm(x, t[f"{prefix}input_layernorm.weight"])
            normed_block = convolved(t, f"{prefix}attention_conv", 0, normed, normed)
            window, causal = views[i] if views else (0, False)
            distance = positions[-size:, None] - positions
            hidden = (distance >= window) if window else torch.zeros_like(distance, dtype=torch.bool)
            if causal:
                hidden = hidden | (distance < 0)

            def project(name, y, prefix=prefix):
                y = (y @ t[f"{prefix}self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, DIM)).transpose(0, 1)
                if name == "v":
                    return y
                y = rms_norm(y, t[f"{prefix}self_attn.{name}_norm.weight"])
                return rotate_complex(y, positions[-y.shape[1] :])

            visible = torch.cat([context, normed_block])
            query = project("q", normed_block)
            key = repeat_key_heads(project("k", visible), len(query))
            value = repeat_key_heads(project("v", visible), len(query))
            out = (query @ key.transpose(-1, -2) / DIM**0.5).masked_fill(hidden, -torch.inf).softmax(-1) @ value
            out = out.transpose(0, 1).flatten(-2) @ t[f"{prefix}self_attn.o_proj.weight"].T
            x = x + convolved(t, f"{prefix}attention_conv", 1, out, normed)
            normed = rms_norm(x, t[f"{prefix}post_attention_layernorm.weight"])
            out = mlp(t, f"{prefix}mlp.", convolved(t, f"{prefix}mlp_conv", 0, normed, normed))
            x = x + convolved(t, f"{prefix}mlp_conv", 1, out, normed)
        return rms_norm(x, t["norm.weight"])[first:]

    return run


def check_refiner(t, module, columns, expected):
    """Compare the corrections of logits with those of the stored weights, column by column."""
    torch.testing.assert_close(columns, expected, atol=1e-4, rtol=1e-4)
    prefixes = ("xpress_head.", "refiner_head.")
    t = {name.partition(".")[2]: value for name, value in t.items() if name.startswith(prefixes)}
    names = ("token_embed", "readout", "mlp_gate", "mlp_up", "mlp_down")
    stored = ("w1", "w2", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    token_in, token_out, gate, up, down = (
        t[f"{name}.weight"] if f"{name}.weight" in t else t[f"{other}.weight"]
        for name, other in zip(names, stored, strict=True)
    )
    mix = t["mix_l"] if "mix_l" in t else t["mix.L"]
    before = torch.randint(0, 96, (len(columns),))
    mean = expected.mean(0) @ t["down_g.weight"].T
    inputs = [
        torch.cat([out @ t["down_h.weight"].T, mean, token_in[token]]) @ t["in_proj.weight"].T
        for out, token in zip(expected, before.tolist(), strict=True)
    ]
    corrections = []
    for k in range(len(inputs)):
        x = inputs[k] + sum(mix[:, k, j] * inputs[j] for j in range(k + 1))
        x = x + (functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
        corrections.append(x @ token_out.T)
    refiner = module.refiner
    latents = refiner.mix_columns(refiner.inputs(refiner.features(columns), before))
    torch.testing.assert_close(refiner.corrections(latents), torch.stack(corrections), atol=1e-3, rtol=1e-3)


def select(t, logits, out, before):
    """Return the scores of the five likeliest tokens of each column after the token before it; -inf for others."""
    before_table, after_table = (t[f"candidate_selector.{name}_codebook"] for name in ("predecessor", "successor"))
    scores = torch.full_like(logits, -torch.inf)
    for row, token in enumerate(before.tolist()):
        gate = before_table[token] * (out[row] @ t["candidate_selector.hidden_projection.weight"].T)
        for candidate in logits[row].argsort(descending=True)[:5].tolist():
            scores[row, candidate] = logits[row, candidate] + gate @ after_table[candidate]
    return scores


def recurrent_corrections(t, out, tokens):
    """Return the corrections [n, V] of columns, each after one more of `tokens` [n]; the first one has none."""
    weights = {name.removeprefix("logits_correction."): value for name, value in t.items()}
    gru = torch.nn.GRU(64, 24, bias=False)
    gru.load_state_dict({name: weights[f"prefix_gru.{name}"] for name in gru.state_dict()})
    states, _ = gru(t.get("embed_tokens.weight", TABLE)[tokens])
    hidden = functional.silu(torch.cat([out, states], -1) @ weights["embed_proj.0.weight"].T)
    corrections = hidden @ weights["embed_proj.2.weight"].T
    corrections[0] = 0
    return corrections


MIXED = [(4, True), (4, True), (0, False)]
NEAR = [(4, False)] * 3


@pytest.mark.parametrize(
    ("case", "size", "first"),
    [
        ("dflash", 5, 1),
        ("causal dflash", 5, 1),
        ("dflash with windows", 5, 1),
        ("windows of speculators", 5, 1),
        ("dflash2", 5, 1),
        ("dflash2 of speculators", 5, 1),
        ("domino", 4, 0),
        ("domino of speculators", 4, 1),
        ("narrow dflash", 5, 1),
        ("dspark", 4, 0),
        ("dspark with tables", 4, 0),
        ("dspark of speculators", 4, 1),
        ("xpress", 5, 0),
        ("xpress of speculators", 4, 0),
    ],
)
@torch.no_grad()
def test_block_heads_agree_with_references(case, size, first):
    t, module = import_case(case)
    aux_states = torch.randn(6, 3, 64)
    views = {"causal dflash": [(0, True)] * 3, "dflash2": NEAR}.get(case, MIXED if "windows" in case else ())
    expected = block(t, size=size, mask=MASK, first=first, views=views)(aux_states, 11)
    tables = SharedWeights(embedding=TABLE, head=HEAD, norm=torch.ones(64), epsilon=EPSILON)
    head = make_head_target(module, tables, slots=1, context=32)
    columns = head._run_blocks(feed(head, module.description, [*range(6), 11], aux_states))[0]
    if module.block.refiner:
        check_refiner(t, module, columns, expected)
        return
    out = module.predicting(columns)
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
    expected_logits = expected @ t.get("lm_head.weight", HEAD).T
    before = torch.randint(0, 96, (len(expected),))
    if module.block.markov_rank:
        markov = t["markov_head.markov_w1.weight"][before]
        expected_logits = expected_logits + markov @ t["markov_head.markov_w2.weight"].T
    if module.block.selector:
        expected_logits = select(t, expected_logits, expected, before)
    logits = module.correct_logits(module.logits(out), out, before)
    if module.block.recurrence:
        expected_logits = expected_logits + recurrent_corrections(t, expected, before)
        states = None
        for depth, token in enumerate(before):
            states = module.recurrence.advance(module.embed(token[None]), states)
            logits[depth] += module.recurrence.corrections(out[depth], states[0], torch.tensor(depth))
    torch.testing.assert_close(logits, expected_logits, atol=1e-3, rtol=1e-3)
    if module.block.confidence:
        weight = t["confidence_head.proj.weight"][0]
        expected_confidence = torch.cat([expected, markov], -1) @ weight + t["confidence_head.proj.bias"]
        torch.testing.assert_close(module.confidence(out, before), expected_confidence, atol=1e-4, rtol=1e-4)
    if module.description.draft_vocab:
        assert torch.equal(t["d2t"] + torch.arange(40), module.ids)


@torch.no_grad()
def test_gated_attention_agrees_with_transformers():
    """Qwen3-Next has gated attention. It stores the weights of norms minus 1."""
    torch.manual_seed(5)
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    rope = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}
    config = Qwen3NextConfig(**sizes, rope_parameters=rope, rms_norm_eps=1e-5, attn_implementation="eager")
    reference = Qwen3NextAttention(config, 0).eval()
    for norm in (reference.q_norm, reference.k_norm):
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
    module = Attention(body, 64, 0).eval()
    module.load_state_dict(
        {name: value + 1 if "norm" in name else value for name, value in reference.state_dict().items()}
    )
    x = torch.randn(1, 6, 64)
    positions = torch.arange(6)[None]
    mask = torch.zeros(1, 1, 6, 6).masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)
    expected, _ = reference(x, Qwen3NextRotaryEmbedding(config)(x, positions), mask)
    out = module(x[0], rotation(positions[0], body, torch.float32), causal)
    torch.testing.assert_close(out, expected[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("rotary", [1.0, 0.5])
@pytest.mark.parametrize("rope", [None, Rope(scaling=Scaling.LINEAR, factor=4.0), LLAMA3, YARN], ids=str)
def test_rotary_frequencies_agree_with_transformers(rope, rotary):
    """The config of a scaling is read back in the format of transformers before version 5, and in the current one."""
    body = Body(layers=1, hidden=256, heads=4, key_heads=2, dim=64, ffn=64, theta=5e5, rope=rope, rotary=rotary)
    config = write_body(body, 96, None)
    assert read_rope(ConfigReader(config)) == (5e5, rope, rotary)
    rope_parameters = {
        "rope_theta": 5e5,
        **(config["rope_scaling"] or {"rope_type": "default"}),
        "partial_rotary_factor": rotary,
    }
    assert read_rope(ConfigReader({"rope_parameters": rope_parameters})) == (5e5, rope, rotary)
    if rope is None:
        size = int(64 * rotary)
        expected = 5e5 ** -(torch.arange(0, size, 2) / size)
        expected_amplitude = 1.0
    else:
        llama = LlamaConfig(hidden_size=256, num_attention_heads=4, head_dim=64, rope_parameters=rope_parameters)
        expected, expected_amplitude = ROPE_INIT_FUNCTIONS[str(rope.scaling)](llama, torch.device("cpu"))
    actual, amplitude = frequencies(body)
    torch.testing.assert_close(actual, expected.float())
    assert amplitude == pytest.approx(expected_amplitude)


@pytest.mark.fast_cases("five taps-bfloat16-0.03", "eagle-float32-1e-05", "eagle3 without a norm-bfloat16-0.03")
@pytest.mark.skipif(not tiny.compiles(), reason="no C++ compiler here")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.03), (torch.float32, 1e-5)])
@pytest.mark.parametrize("case", ["five taps", "eagle", "eagle3 without a norm"])
def test_native_kernels_agree_with_torch(case, dtype, tolerance):
    """The cases have scaled rotary positions, all kinds of biases, a second layer, and no norms."""
    checkpoint = load_checkpoint(embedded("mini"), dtype=str(dtype).removeprefix("torch."), device="cpu")
    tables = make_target(checkpoint, slots=1, context=32, kernels="native").share_weights()
    description = cases(hidden=384, vocab=12288)[case][1]
    module = random_draft(description).to(dtype)
    text = torch.randint(0, 12288, (9,)).tolist()
    aux_states = torch.randn(8, len(description.aux_states.layers), 384)
    logits = []
    for head_class in (AutoregressiveTarget, NativeAutoregressiveTarget):
        head = head_class(module, tables, slots=1, context=64)
        batch = feed(head, description, text, aux_states)
        logits.append(head.score(batch, tree.empty(1, torch.device("cpu"))).logits)
    torch_logits, native_logits = logits
    assert far(torch_logits, native_logits) < tolerance
