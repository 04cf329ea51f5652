"""Nemotron-H's module for multi-token prediction: two sublayers, of which each has a number of its own."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from outrider.errors import OutriderError
from outrider.heads.config import Settings
from outrider.heads.description import Body
from outrider.heads.formats.base import Config, Source, TargetInfo, Tensors
from outrider.heads.formats.llama import write_body
from outrider.heads.formats.mtp import Mtp, number

_MIXERS: Mapping[str, str] = MappingProxyType(
    {
        "layers.0.input_layernorm.weight": "mtp.layers.0.norm.weight",
        **{f"layers.0.self_attn.{p}_proj.weight": f"mtp.layers.0.mixer.{p}_proj.weight" for p in "qkvo"},
        "layers.0.post_attention_layernorm.weight": "mtp.layers.1.norm.weight",
        **{f"layers.0.mlp.{p}_proj.weight": f"mtp.layers.1.mixer.{p}_proj.weight" for p in ("up", "down")},
        "norm.weight": "mtp.layers.1.final_layernorm.weight",
    }
)


class NemotronMtp(Mtp):
    """Two sublayers, `*-` in Nemotron-H's words: attention without positions, and a perceptron without a gate."""

    def _own(self, at: str) -> str:
        return at[: -len(number(at)) - 1]

    def _target_layers(self, config: Settings) -> int:
        """Older configs name each layer, and do not count them."""
        named = config.texts("layers_block_type") or config.text("hybrid_override_pattern", "")
        return config.size("num_hidden_layers", len(named))

    def _body(self, config: Settings, source: Source, at: str) -> Body:
        pattern = config.text("mtp_hybrid_override_pattern", "*-")
        act, biased = config.text("mlp_hidden_act", "relu2"), config.flag("attention_bias", False)
        if pattern != "*-" or act != "relu2" or biased or config.flag("mlp_bias", False):
            raise OutriderError(
                f"its module is {pattern!r} with {act}; known is '*-' with relu2 and no bias, which is attention and a"
                " perceptron"
            )
        return Body(
            layers=1,
            hidden=config.size("hidden_size"),
            heads=config.size("num_attention_heads"),
            key_heads=config.size("num_key_value_heads", config.size("num_attention_heads")),
            dim=config.size("head_dim", 128),
            ffn=config.size("intermediate_size"),
            epsilon=config.real("layer_norm_epsilon", 1e-5),
            rotary=0.0,
            gated=False,
        )

    def _layers(self, source: Source, at: str) -> Tensors:
        return {ours: source.take(theirs) for ours, theirs in _MIXERS.items()}

    def _leave(self, source: Source, at: str, taken: int) -> None:
        """There is one module of two sublayers."""

    def _layer_names(self, weights: Tensors, at: str) -> Tensors:
        return {theirs: weights[ours] for ours, theirs in _MIXERS.items()}

    def _written(self, body: Body, vocab: int, partner: TargetInfo | None) -> Config:
        config = write_body(body, vocab, partner)
        gone = ("rms_norm_eps", "rope_theta", "rope_scaling", "hidden_act", "partial_rotary_factor")
        kept = {name: value for name, value in config.items() if name not in gone}
        mine = {"layer_norm_epsilon": body.epsilon, "mlp_hidden_act": "relu2", "mtp_hybrid_override_pattern": "*-"}
        return {**kept, "model_type": "nemotron_h", **mine}

    def _strange(self, body: Body) -> dict[str, bool]:
        other = body.gated or body.rotary or body.attention_gate or body.head_norms or body.attention_bias
        return {"has rotary positions or a gated perceptron, which Nemotron-H's layers have not": bool(other)}


NEMOTRON = NemotronMtp(
    name="mtp-nemotron",
    title="MTP (Nemotron-H's names)",
    place="mtp.layers.{}.",
    outer=("enorm.weight", "hnorm.weight", "eh_proj.weight"),
)
