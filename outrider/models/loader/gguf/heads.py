"""Draft heads in GGUF files, as the folders of their published formats: block heads, and modules of a target."""

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch

from outrider.errors import UnsupportedModel
from outrider.models.heads.files import Unpacked, use_gguf_reader
from outrider.models.loader.gguf.architectures import architecture_of, num_layers, settings_of
from outrider.models.loader.gguf.file import ROTARY_FACTORS, GGUFFile, read_gguf
from outrider.models.loader.gguf.schema import FOLDER, LAYER, PERMUTED, Architecture, Layout, Settings, Source, module
from outrider.models.loader.gguf.weights import GGUFWeights

_QWEN_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "eh_proj": "fc",
        "enorm": "pre_fc_norm_embedding",
        "hnorm": "pre_fc_norm_hidden",
        "shared_head.norm": "norm",
        "shared_head.head": "head",
        "embed_tokens": "embed_tokens",
    }
)
_MODULE: Layout = {name: module(f"nextn.{name.replace('shared_head.', 'shared_head_')}") for name in _QWEN_NAMES}
# Tensors of layers that modules may not have: experts, and latent attention.
_STRANGE = ("ffn_gate_inp.weight", "attn_kv_a_mqa.weight")
_TABLES: Layout = {
    "fc": module("fc"),
    "norm": module("output_norm"),
    "lm_head": module("output"),
    "embed_tokens": module("token_embd"),
}
_LOW, _HIGH = 1.0, 4.0  # of the rotary scaling of Llama 3
_ABSENT = object()
_log = logging.getLogger("outrider")


def _offsets(_config: Any, ids: torch.Tensor) -> torch.Tensor:
    return ids - torch.arange(len(ids))


_HEADS: Mapping[str, Architecture] = MappingProxyType(
    {
        "eagle3": Architecture(
            model_type="llama",
            layers="layers",
            layer={**LAYER, **PERMUTED, "hidden_norm": module("attn_norm_2")},
            top={**_TABLES, "input_norm": module("enc.output_norm"), "d2t": Source(("d2t",), _offsets)},
        ),
        "dflash": Architecture(  # and DSpark, and DFlash 2
            model_type="qwen3",
            layers="layers",
            layer={
                **LAYER,
                "attention_conv.base_kernel": Source(("attn_conv_base",)),
                "attention_conv.kernel_projection": module("attn_conv_proj"),
                "mlp_conv.base_kernel": Source(("ffn_conv_base",)),
                "mlp_conv.kernel_projection": module("ffn_conv_proj"),
            },
            top={
                **_TABLES,
                "hidden_norm": module("enc.output_norm"),
                "markov_head.markov_w1": module("markov_w1"),
                "markov_head.markov_w2": module("markov_w2"),
                "confidence_head.proj": module("conf_proj"),
                "candidate_selector.predecessor_codebook": Source(("selector_predecessor.weight",)),
                "candidate_selector.successor_codebook": Source(("selector_successor.weight",)),
                "candidate_selector.hidden_projection": module("selector_hidden"),
                "d2t": Source(("d2t",), _offsets),
            },
        ),
    }
)


class _Dense(Mapping[str, torch.Tensor]):
    """The weights of a file, dequantized when they are accessed, under other names."""

    def __init__(self, weights: GGUFWeights, names: Mapping[str, str]) -> None:
        self._weights = weights
        self._names = names

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __getitem__(self, name: str) -> torch.Tensor:
        value = self._weights[self._names[name]]
        if isinstance(value, torch.Tensor):
            return value
        _log.info("%s: weights of type %s are expanded", name, value.kind)
        return value.dequantize()


@lru_cache(maxsize=2)
def _unpack(file: Path, _state: tuple[int, ...]) -> Unpacked:
    """Return the config.json and the tensors of the folder for which a file stands."""
    contents = read_gguf(file)
    head = _HEADS.get(contents.architecture)
    return _model(contents) if head is None else _head(contents, head)


def unpack(file: Path) -> Unpacked:
    """Return the config.json and the tensors of the folder for which a file stands.

    Raises:
        OutriderError: the file is missing or damaged.
        UnsupportedModel: it is no draft head or model that is supported.
    """
    status = file.stat() if file.is_file() else None
    return _unpack(file, (status.st_size, status.st_mtime_ns) if status else ())


def _model(file: GGUFFile) -> Unpacked:
    """Return a model, with the modules that predict further tokens if they have layers of a known kind."""
    settings = settings_of(file)
    layers = num_layers(file)
    later = range(layers, file.size("block_count"))
    known = not any(f"blk.{i}.{tensor}" in file.tensors for i in later for tensor in _STRANGE)
    own = architecture_of(file)
    architecture = replace(own, layer={**own.layer, **_MODULE})
    config = SimpleNamespace(**settings)
    listed = layers + (len(later) if known else 0)
    weights = GGUFWeights(file, config, torch.float32, architecture=architecture, layers=listed)
    names = {_module_name(name, own, layers): name for name in weights}
    if known and later:
        settings["num_nextn_predict_layers"] = len(later)
    return {key: value for key, value in settings.items() if value is not None}, _Dense(weights, names)


def _module_name(name: str, architecture: Architecture, layers: int) -> str:
    """Return the published name of a weight. Qwen has names of its own for the first module."""
    prefix = f"{architecture.layers}.{layers}."
    if not name.startswith(prefix) or not architecture.model_type.startswith("qwen"):
        return name
    part = name.removeprefix(prefix)
    owner, _, suffix = part.rpartition(".")
    return f"mtp.{_QWEN_NAMES[owner]}.{suffix}" if owner in _QWEN_NAMES else f"mtp.layers.0.{part}"


def _head(file: GGUFFile, architecture: Architecture) -> Unpacked:
    """Return a draft head with the names of its published format."""
    hidden = file.size("embedding_length")
    heads = file.size("attention.head_count")
    layers = file.size("target_layers")
    tokens = file.field("tokenizer.ggml.tokens") or ()
    config: Settings = {
        "model_type": architecture.model_type,
        "hidden_size": hidden,
        "intermediate_size": file.size("feed_forward_length"),
        "num_hidden_layers": file.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.size("attention.head_count_kv", heads),
        "head_dim": file.size("attention.key_length", hidden // heads),
        "rms_norm_eps": file.size("attention.layer_norm_rms_epsilon"),
        "rope_theta": file.size("rope.freq_base", 10000.0),
        "max_position_embeddings": file.size("context_length"),
        "vocab_size": file.size("vocab_size", len(tokens)),
    }
    if (factors := file.tensors.get(ROTARY_FACTORS)) is not None:
        config["rope_scaling"] = _scaling(file, config, file.floats(factors.name))
    config |= _eagle3(file, hidden, layers) if file.architecture == "eagle3" else _block(file, layers)
    weights = GGUFWeights(
        file, SimpleNamespace(**config), torch.float32, architecture=architecture, layers=config["num_hidden_layers"]
    )
    names = {name: name for name in weights if name != "lm_head.weight" or "output.weight" in file.tensors}
    return {key: value for key, value in config.items() if value is not None}, _Dense(weights, names)


def _eagle3(file: GGUFFile, hidden: int, layers: list[int]) -> Settings:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "eagle_aux_hidden_state_layer_ids": layers,
        "target_hidden_size": file.size("target_hidden_size", hidden),
        "norm_before_residual": bool(file.size("norm_before_residual", False)),
        "norm_before_fc": bool(file.size("norm_before_fc", False)),
        "norm_output": "output_norm.weight" in file.tensors,
        "draft_vocab_size": file.tensors["output.weight"].shape[0] if "output.weight" in file.tensors else None,
    }


def _block(file: GGUFFile, layers: list[int]) -> Settings:
    """Return the settings of DFlash, DFlash 2 and DSpark. The format refuses those that heads do not support."""
    from_anchor = file.size("sample_from_anchor", _ABSENT)  # only DSpark has it
    selects = file.size("selector_top_k", 0) > 0  # only DFlash 2 does
    if any(file.size(scale, 1.0) != 1.0 for scale in ("embedding_scale", "attention.value_scale")):
        raise UnsupportedModel(f"{file.path} is a draft head with scaled embeddings or values; {FOLDER}")
    window = file.size("attention.sliding_window", 0)
    others = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k") if selects else ()
    unanchored = "DFlash2DraftModel" if selects else "DFlashDraftModel"
    return {
        **{name: file.size(name) for name in others},
        "architectures": [unanchored if from_anchor is _ABSENT else "Qwen3DSparkModel"],
        "block_size": file.size("block_size"),
        "mask_token_id": file.field("tokenizer.ggml.mask_token_id"),
        "target_layer_ids": [layer - 1 for layer in layers],
        "sample_from_anchor": from_anchor is not _ABSENT and from_anchor,
        "causal": bool(file.size("attention.causal", False)),
        "sliding_window": window or None,
        "layer_types": _layer_types(file) if window else None,
        "logit_scale": file.size("logit_scale", 1.0),
        "final_logit_softcapping": file.size("final_logit_softcapping", 0.0) or None,
    }


def _layer_types(file: GGUFFile) -> list[str]:
    """Return the attention of each layer of a head with a window: all layers have it, unless a pattern says which."""
    layers = file.size("block_count")
    pattern = file.size("attention.sliding_window_pattern", [True] * layers)
    return ["sliding_attention" if has_window else "full_attention" for has_window in pattern]


def _scaling(file: GGUFFile, config: Settings, factors: list[float]) -> Settings:
    """Return the settings of the rotary scaling of Llama 3 that has these factors."""
    given = torch.tensor(factors)
    size = 2 * len(factors)
    lengths = 2 * math.pi * config["rope_theta"] ** (torch.arange(0, size, 2).double() / size)
    largest = float(given.max())
    for exponent in range(5, 21):
        share = (2**exponent / lengths - _LOW) / (_HIGH - _LOW)
        smooth = share.clamp(0, 1)
        if torch.allclose(1 / ((1 - smooth) / largest + smooth), given.double(), rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": largest,
                "original_max_position_embeddings": 2**exponent,
                "low_freq_factor": _LOW,
                "high_freq_factor": _HIGH,
            }
    raise UnsupportedModel(f"{file.path} has rotary factors that no known scaling gives; {FOLDER}")


use_gguf_reader(unpack)
