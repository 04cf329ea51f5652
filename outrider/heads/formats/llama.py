"""Decoder layers as a transformers config describes them, and as their tensors are named."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

from outrider.errors import OutriderError
from outrider.heads.config import Settings
from outrider.heads.description import Body, Rope, Scaling
from outrider.heads.formats.base import Config, Source, TargetInfo, Tensors

LLAMAS = frozenset({"llama", "mistral", "qwen2", "qwen3", "mimo"})  # whose layers are as written

_POSITIONS = 1 << 17  # as max_position_embeddings where nobody knows better; engines make tables of that size
_ALIKE = frozenset({"default", "mrope"})  # mrope: the three positions of a token of text are the same
# What a tensor's name says that no layer here has.
_STRANGE: Mapping[str, str] = MappingProxyType(
    {
        r"kv_a_proj|kv_b_proj|q_a_proj|q_b_proj|wq_a|wkv": "multi-head latent attention (MLA)",
        r"experts|mlp\.gate\.|shared_expert|router|e_score_correction": "a mixture of experts (MoE)",
        r"A_log|conv1d|linear_attn|in_proj|dt_bias": "a recurrent layer",
        r"weight_scale|qweight|qzeros|scale_inv": "quantised weights",
    }
)


def read_body(config: Settings, layers: int, has: Callable[[str], bool]) -> Body:
    """Decoder layers by their config; `has` says whether the first of them has a tensor of such a name.

    Raises:
        OutriderError: they are not Llama's.
    """
    act = config.text("hidden_act", "silu")
    kinds = config.texts("layer_types")
    mistral = config.text("model_type", "") == "mistral" and "sliding_window" in config
    problems = {
        f"hidden_act {act}, and only silu is known": act != "silu",
        "a sliding window, which drafts here have not": config.flag("use_sliding_window", False)
        or "sliding_attention" in kinds
        or mistral,
        "a scale of its logits, which drafts here have not": config.real("logit_scale", 1.0) != 1.0,
        "interleaved rotary positions, which drafts here have not": config.flag("rope_interleave", False),
    }
    if found := [text for text, wrong in problems.items() if wrong]:
        raise OutriderError(f"config.json asks for {found[0]}")
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    theta, rope, rotary = read_rope(config)
    if not 1 < theta < math.inf or not 0 <= rotary <= 1 or not (rope is None or _could_be(rope)):
        raise OutriderError("config.json describes no rotary positions that could be; mend rope_theta and rope_scaling")
    return Body(
        layers=layers,
        hidden=hidden,
        heads=heads,
        key_heads=config.size("num_key_value_heads", heads),
        dim=config.size("head_dim", hidden // heads),
        ffn=config.size("intermediate_size"),
        epsilon=config.real("rms_norm_eps", 1e-6),
        theta=theta,
        rope=rope,
        rotary=rotary,
        head_norms=has("self_attn.q_norm.weight"),
        attention_bias=has("self_attn.q_proj.bias"),
        output_bias=has("self_attn.o_proj.bias"),
    )


def read_rope(config: Settings) -> tuple[float, Rope | None, float]:
    """Theta, scaling, and the share of a head that is turned; as transformers wrote them before version 5 and since."""
    return rope_of(config.table("rope_parameters" if "rope_parameters" in config else "rope_scaling"), config)


def rope_of(given: Settings, config: Settings) -> tuple[float, Rope | None, float]:
    """The same from what is `given` of it, and from the config around that."""
    theta = given.real("rope_theta", config.real("rope_theta", 10000.0))
    rotary = given.real("partial_rotary_factor", config.real("partial_rotary_factor", 1.0))
    kind = given.text("rope_type", given.text("type", "default"))
    if kind in _ALIKE:
        return theta, None, rotary
    if kind not in list(Scaling):
        raise OutriderError(f"config.json scales rotary positions by {kind!r}; known are {', '.join(Scaling)}")
    if kind == Scaling.PROPORTIONAL:
        return theta, Rope(scaling=Scaling.PROPORTIONAL, factor=given.real("factor", 1.0)), rotary
    factor = given.real("factor")
    original = given.whole("original_max_position_embeddings", config.whole("max_position_embeddings", _POSITIONS))
    if kind == Scaling.LINEAR:
        return theta, Rope(scaling=Scaling.LINEAR, factor=factor), rotary
    if kind == Scaling.LLAMA3:
        low, high = given.real("low_freq_factor"), given.real("high_freq_factor")
        return theta, Rope(scaling=Scaling.LLAMA3, factor=factor, original=original, low=low, high=high), rotary
    yarn = Rope(
        scaling=Scaling.YARN,
        factor=factor,
        original=original,
        low=given.real("beta_slow", 1.0),
        high=given.real("beta_fast", 32.0),
        amplitude=given.real("attention_factor", _amplitude(given, factor)),
        rounded=given.flag("truncate", True),
    )
    return theta, yarn, rotary


def _could_be(rope: Rope) -> bool:
    """Whether these numbers slow anything down."""
    begun = 0 < rope.original < 1 << 40 or rope.scaling in (Scaling.LINEAR, Scaling.PROPORTIONAL)
    return (
        begun and 0 < rope.factor < math.inf and 0 < rope.low < rope.high < math.inf and abs(rope.amplitude) < math.inf
    )


def _amplitude(given: Settings, factor: float) -> float:
    """0.1 m ln s + 1 (YaRN, Peng et al. 2023, 3.4), or DeepSeek's ratio of two of them."""
    share, every = given.real("mscale", 0.0), given.real("mscale_all_dim", 0.0)
    one, two = (0.1 * m * math.log(factor) + 1 if factor > 1 else 1.0 for m in (share or 1.0, every or 1.0))
    return one / two if share and every else 0.1 * math.log(factor) + 1 if factor > 1 else 1.0


def write_body(body: Body, vocab: int, partner: TargetInfo | None) -> Config:
    """The config of these layers, as transformers wrote it before version 5: everybody reads that."""
    bias = {} if body.attention_bias == body.output_bias else {"qkv_bias": body.attention_bias}
    part = {} if body.rotary == 1 else {"partial_rotary_factor": body.rotary}
    return {
        "model_type": "qwen3" if body.head_norms else "llama",
        "vocab_size": vocab,
        "hidden_size": body.hidden,
        "intermediate_size": body.ffn,
        "num_hidden_layers": body.layers,
        "num_attention_heads": body.heads,
        "num_key_value_heads": body.key_heads,
        "head_dim": body.dim,
        "hidden_act": "silu",
        "rms_norm_eps": body.epsilon,
        "rope_theta": body.theta,
        "rope_scaling": _written(body.rope),
        "attention_bias": body.output_bias if bias else body.attention_bias,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "max_position_embeddings": (partner.context if partner else None) or _reach(body.rope),
        **bias,
        **part,
    }


def _reach(rope: Rope | None) -> int:
    """Up to which position engines may go."""
    return int(rope.factor * rope.original) if rope and rope.original else _POSITIONS


def _written(rope: Rope | None) -> Config | None:
    if rope is None:
        return None
    both = {"rope_type": str(rope.scaling), "type": str(rope.scaling), "factor": rope.factor}
    if rope.scaling in (Scaling.LINEAR, Scaling.PROPORTIONAL):
        return both
    both["original_max_position_embeddings"] = rope.original
    if rope.scaling is Scaling.LLAMA3:
        return {**both, "low_freq_factor": rope.low, "high_freq_factor": rope.high}
    turns = {"beta_slow": rope.low, "beta_fast": rope.high}
    return {**both, **turns, "attention_factor": rope.amplitude, "truncate": rope.rounded}


def unlike(body: Body) -> dict[str, bool]:
    """Why a format for Llama's layers may not hold these."""
    return {
        "has a gate behind its attention": body.attention_gate,
        "has no gate in its perceptron": not body.gated,
        "turns a part of each head by its position": body.rotary != 1,
    }


def take_layer(source: Source, prefix: str, into: str, *, moved: Mapping[str, str] = MappingProxyType({})) -> Tensors:
    """The tensors of a decoder layer, under the names that the module has for them; `moved` are kept elsewhere there.

    Raises:
        OutriderError: it is no layer as Llama has it.
    """
    source.ignore((n for n in source.names if n.endswith("rotary_emb.inv_freq")), "computed anew from config.json")
    inside = [name for name in source.names if name.startswith(prefix) and not name.endswith("rotary_emb.inv_freq")]
    if not inside:
        raise OutriderError(f"there is no tensor that begins with {prefix!r}; copy the draft again")
    refuse_strange(inside)
    rest = {name: name[len(prefix) :] for name in inside}
    return {moved.get(rest[name], into + rest[name]): source.take(name) for name in inside}


def refuse_strange(names: list[str]) -> None:
    """Refuse a layer of a kind that cannot be run here, by the tensors that give it away."""
    for pattern, what in _STRANGE.items():
        if found := sorted(name for name in names if re.search(pattern, name)):
            raise OutriderError(
                f"{found[0]} (and {len(found) - 1} more) belongs to {what}; only layers like Llama's can be run here,"
                " with q, k, v and o_proj and a gated perceptron"
            )


def layer_tensors(weights: Tensors, i: int, prefix: str) -> Tensors:
    """A layer's weights [of `layers.i.`] under another prefix."""
    own = f"layers.{i}."
    return {prefix + name[len(own) :]: value for name, value in weights.items() if name.startswith(own)}
