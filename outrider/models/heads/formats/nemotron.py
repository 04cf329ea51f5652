"""MTP modules of Nemotron-H: attention without rotary positions, and an MLP without a gate."""

from collections.abc import Mapping
from types import MappingProxyType

from outrider.errors import OutriderError
from outrider.models.heads.config import ConfigReader
from outrider.models.heads.description import Body
from outrider.models.heads.formats.base import Config, Source, TargetInfo, Tensors, stored
from outrider.models.heads.formats.llama import write_body
from outrider.models.heads.formats.mtp import Mtp, module_number

# By name in the module. Nemotron-H counts attention and MLP as layers 0 and 1.
_STORED_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "layers.0.input_layernorm.weight": "mtp.layers.0.norm.weight",
        **{f"layers.0.self_attn.{p}_proj.weight": f"mtp.layers.0.mixer.{p}_proj.weight" for p in "qkvo"},
        "layers.0.post_attention_layernorm.weight": "mtp.layers.1.norm.weight",
        **{f"layers.0.mlp.{p}_proj.weight": f"mtp.layers.1.mixer.{p}_proj.weight" for p in ("up", "down")},
        "norm.weight": "mtp.layers.1.final_layernorm.weight",
    }
)
# Keys of a Llama config that Nemotron-H does not have.
_LLAMA_ONLY_KEYS = frozenset({"rms_norm_eps", "rope_theta", "rope_scaling", "hidden_act", "partial_rotary_factor"})


class NemotronMtp(Mtp):
    """A module of two sublayers, whose pattern is `*-` in Nemotron-H's notation."""

    def _tensor_prefix(self, prefix: str) -> str:
        return prefix[: -len(module_number(prefix)) - 1]

    def _target_layers(self, config: ConfigReader) -> int:
        # Older configs list the layers instead of a number.
        layer_types = config.strings("layers_block_type") or config.string("hybrid_override_pattern", "")
        return config.size("num_hidden_layers", len(layer_types))

    def _body(self, config: ConfigReader, source: Source, prefix: str) -> Body:
        pattern = config.string("mtp_hybrid_override_pattern", "*-")
        activation = config.string("mlp_hidden_act", "relu2")
        has_bias = config.boolean("attention_bias", False)
        if pattern != "*-" or activation != "relu2" or has_bias or config.boolean("mlp_bias", False):
            raise OutriderError(
                f"modules with the pattern {pattern!r} and activation {activation} are not"
                " supported; use a draft head with '*-' (attention and MLP), relu2 and no bias"
            )
        return Body(
            layers=1,
            hidden=config.size("hidden_size"),
            heads=config.size("num_attention_heads"),
            key_heads=config.size("num_key_value_heads", config.size("num_attention_heads")),
            dim=config.size("head_dim", 128),
            ffn=config.size("intermediate_size"),
            epsilon=config.number("layer_norm_epsilon", 1e-5),
            rotary=0.0,
            gated=False,
        )

    def _stored_in_module(self, prefix: str, name: str) -> str:
        return _STORED_NAMES.get(name) or super()._stored_in_module(prefix, name)

    def _take_layers(self, source: Source, prefix: str) -> Tensors:
        return source.take_all(_STORED_NAMES)

    def _ignore_other_modules(self, source: Source, prefix: str, count: int) -> None:
        """Do nothing: there is only one module."""

    def _layer_tensors(self, weights: Tensors, prefix: str) -> Tensors:
        return stored(weights, _STORED_NAMES)

    def _layer_config(self, body: Body, vocab: int, target: TargetInfo | None) -> Config:
        llama = write_body(body, vocab, target)
        config = {name: value for name, value in llama.items() if name not in _LLAMA_ONLY_KEYS}
        config["model_type"] = "nemotron_h"
        config["layer_norm_epsilon"] = body.epsilon
        config["mlp_hidden_act"] = "relu2"
        config["mtp_hybrid_override_pattern"] = "*-"
        return config

    def _layer_reasons(self, body: Body) -> dict[str, bool]:
        other_layers = body.gated or body.rotary or body.attention_gate or body.head_norms or body.attention_bias
        return {"has other decoder layers than Nemotron-H": bool(other_layers)}


NEMOTRON = NemotronMtp(
    name="mtp-nemotron",
    title="MTP (Nemotron-H's names)",
    place="mtp.layers.{}.",
    outer=("enorm.weight", "hnorm.weight", "eh_proj.weight"),
    parts=("mixer",),
)
