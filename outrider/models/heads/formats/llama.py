"""Import and export of Llama decoder layers, with the names of transformers."""

import math
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

from outrider.errors import OutriderError
from outrider.models.heads.config import ConfigReader
from outrider.models.heads.description import Body, Rope, Scaling
from outrider.models.heads.formats.base import Config, Source, TargetInfo, Tensors

LLAMAS = frozenset({"llama", "mistral", "qwen2", "qwen3", "mimo"})  # model types with these layers

# As max_position_embeddings if it is unknown. Engines allocate tables of that size.
_DEFAULT_CONTEXT = 1 << 17
# mrope gives a text token three equal positions.
_UNSCALED_ROPE_TYPES = frozenset({"default", "mrope"})
# Patterns of tensor names that only unsupported layers have.
_UNSUPPORTED_TENSORS: Mapping[str, str] = MappingProxyType(
    {
        r"kv_a_proj|kv_b_proj|q_a_proj|q_b_proj|wq_a|wkv": "multi-head latent attention (MLA)",
        r"experts|mlp\.gate\.|shared_expert|router|e_score_correction": "a mixture of experts (MoE)",
        r"A_log|conv1d|linear_attn|in_proj|dt_bias": "a recurrent layer",
        r"weight_scale|qweight|qzeros|scale_inv": "quantized weights",
    }
)


def read_body(config: ConfigReader, layers: int, has: Callable[[str], bool], *, windows: bool = False) -> Body:
    """Return decoder layers by their config.

    Args:
        has: returns whether the first layer has a tensor of this name.
        windows: whether sliding windows are read elsewhere.

    Raises:
        OutriderError: they are not Llama layers.
    """
    activation = config.string("hidden_act", "silu")
    uses_window = (
        config.boolean("use_sliding_window", False)
        or "sliding_attention" in config.strings("layer_types")
        or (config.string("model_type", "") == "mistral" and "sliding_window" in config)
    )
    problems = {
        f"hidden_act {activation}; draft heads support only silu": activation != "silu",
        "a sliding window, which draft heads of this kind do not support": uses_window and not windows,
        "scaled logits (logit_scale), which draft heads do not support": config.number("logit_scale", 1.0) != 1.0,
        "interleaved rotary positions (rope_interleave), which draft heads do not support": config.boolean(
            "rope_interleave", False
        ),
    }
    for problem, exists in problems.items():
        if exists:
            raise OutriderError(f"config.json asks for {problem}")
    hidden = config.size("hidden_size")
    heads = config.size("num_attention_heads")
    theta, rope, rotary = read_rope(config)
    if not 1 < theta < math.inf or not 0 <= rotary <= 1 or not (rope is None or _is_valid(rope)):
        raise OutriderError(
            "the rotary positions in config.json have values that are out of range; correct rope_theta and rope_scaling"
        )
    return Body(
        layers=layers,
        hidden=hidden,
        heads=heads,
        key_heads=config.size("num_key_value_heads", heads),
        dim=config.size("head_dim", hidden // heads),
        ffn=config.size("intermediate_size"),
        epsilon=config.number("rms_norm_eps", 1e-6),
        theta=theta,
        rope=rope,
        rotary=rotary,
        head_norms=has("self_attn.q_norm.weight"),
        attention_bias=has("self_attn.q_proj.bias"),
        output_bias=has("self_attn.o_proj.bias"),
    )


def read_rope(config: ConfigReader) -> tuple[float, Rope | None, float]:
    """Return theta, the scaling, and the share of a head that is rotated.

    The keys may be those of transformers before or since version 5.
    """
    return rope_of(config.object("rope_parameters" if "rope_parameters" in config else "rope_scaling"), config)


def rope_of(parameters: ConfigReader, config: ConfigReader) -> tuple[float, Rope | None, float]:
    """Return the same from `parameters`, and from the config around them for missing values."""
    theta = parameters.number("rope_theta", config.number("rope_theta", 10000.0))
    rotary = parameters.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    kind = parameters.string("rope_type", parameters.string("type", "default"))
    if kind in _UNSCALED_ROPE_TYPES:
        return theta, None, rotary
    if kind not in list(Scaling):
        raise OutriderError(f"config.json has the rope_type {kind!r}; supported are {', '.join(Scaling)}")
    if kind == Scaling.PROPORTIONAL:
        return theta, Rope(scaling=Scaling.PROPORTIONAL, factor=parameters.number("factor", 1.0)), rotary
    factor = parameters.number("factor")
    context = config.integer("max_position_embeddings", _DEFAULT_CONTEXT)
    original = parameters.integer("original_max_position_embeddings", context)
    if kind == Scaling.LINEAR:
        return theta, Rope(scaling=Scaling.LINEAR, factor=factor), rotary
    if kind == Scaling.LLAMA3:
        llama3 = Rope(
            scaling=Scaling.LLAMA3,
            factor=factor,
            original=original,
            low=parameters.number("low_freq_factor"),
            high=parameters.number("high_freq_factor"),
        )
        return theta, llama3, rotary
    yarn = Rope(
        scaling=Scaling.YARN,
        factor=factor,
        original=original,
        low=parameters.number("beta_slow", 1.0),
        high=parameters.number("beta_fast", 32.0),
        amplitude=parameters.number("attention_factor", _yarn_amplitude(parameters, factor)),
        rounded=parameters.boolean("truncate", True),
    )
    return theta, yarn, rotary


def _is_valid(rope: Rope) -> bool:
    """Return whether the values of a scaling are in range."""
    has_context = 0 < rope.original < 1 << 40 or rope.scaling in (Scaling.LINEAR, Scaling.PROPORTIONAL)
    return (
        has_context
        and 0 < rope.factor < math.inf
        and 0 < rope.low < rope.high < math.inf
        and abs(rope.amplitude) < math.inf
    )


def _yarn_amplitude(parameters: ConfigReader, factor: float) -> float:
    """Return YaRN's multiplier 0.1 m ln s + 1 (Peng et al. 2023, 3.4), or DeepSeek's ratio of two such values."""
    mscale = parameters.number("mscale", 0.0)
    mscale_all_dim = parameters.number("mscale_all_dim", 0.0)
    if mscale and mscale_all_dim:
        return _mscale(mscale, factor) / _mscale(mscale_all_dim, factor)
    return _mscale(1.0, factor)


def _mscale(m: float, factor: float) -> float:
    return 0.1 * m * math.log(factor) + 1 if factor > 1 else 1.0


def write_body(body: Body, vocab: int, target: TargetInfo | None) -> Config:
    """Return the config of these layers, with the keys of transformers before version 5, which all engines read."""
    same_bias = body.attention_bias == body.output_bias
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
        "rope_scaling": _written_rope(body.rope),
        "attention_bias": body.attention_bias if same_bias else body.output_bias,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "max_position_embeddings": (target.context if target else None) or _max_context(body.rope),
        **({} if same_bias else {"qkv_bias": body.attention_bias}),
        **({} if body.rotary == 1 else {"partial_rotary_factor": body.rotary}),
    }


def _max_context(rope: Rope | None) -> int:
    """Return the longest context of a scaling in tokens, or a default."""
    return int(rope.factor * rope.original) if rope and rope.original else _DEFAULT_CONTEXT


def _written_rope(rope: Rope | None) -> Config | None:
    """Return the value of `rope_scaling`."""
    if rope is None:
        return None
    config: Config = {"rope_type": str(rope.scaling), "type": str(rope.scaling), "factor": rope.factor}
    if rope.scaling in (Scaling.LINEAR, Scaling.PROPORTIONAL):
        return config
    config["original_max_position_embeddings"] = rope.original
    if rope.scaling is Scaling.LLAMA3:
        return {**config, "low_freq_factor": rope.low, "high_freq_factor": rope.high}
    yarn = {"attention_factor": rope.amplitude, "truncate": rope.rounded}
    return {**config, "beta_slow": rope.low, "beta_fast": rope.high, **yarn}


def unlike(body: Body) -> dict[str, bool]:
    """Return why a format for Llama layers may not represent these layers, for `refuse`."""
    return {
        "has a gate after its attention": body.attention_gate,
        "has no gate in its MLP": not body.gated,
        "rotates only a part of each attention head": body.rotary != 1,
    }


def take_layer(source: Source, prefix: str, into: str, *, moved: Mapping[str, str] = MappingProxyType({})) -> Tensors:
    """Return the tensors of a decoder layer under the names that they have in the module.

    Args:
        prefix: the prefix of the layer's tensors in the checkpoint.
        into: their prefix in the module.
        moved: the names in the module of tensors that have another prefix there.

    Raises:
        OutriderError: it is not a Llama layer.
    """
    source.ignore(
        (name for name in source.names if name.endswith("rotary_emb.inv_freq")), "computed from config.json instead"
    )
    names = [name for name in source.names if name.startswith(prefix) and not name.endswith("rotary_emb.inv_freq")]
    if not names:
        raise OutriderError(f"there is no tensor that begins with {prefix!r}; copy the draft head again")
    refuse_strange(names)
    tensors = {}
    for name in names:
        suffix = name[len(prefix) :]
        tensors[moved.get(suffix, into + suffix)] = source.take(name)
    return tensors


def refuse_strange(names: list[str]) -> None:
    """Raise OutriderError if the names of tensors show that their layer is not supported."""
    for pattern, description in _UNSUPPORTED_TENSORS.items():
        if matches := sorted(name for name in names if re.search(pattern, name)):
            raise OutriderError(
                f"{matches[0]} (and {len(matches) - 1} more) belongs to {description}; use a draft"
                " head with Llama layers, which have q, k, v and o_proj and a gated MLP"
            )


def layer_tensors(weights: Tensors, i: int, prefix: str) -> Tensors:
    """Return the weights of `layers.{i}.` under another prefix."""
    layer = f"layers.{i}."
    return {prefix + name[len(layer) :]: value for name, value in weights.items() if name.startswith(layer)}
