"""Load a GGUF file of llama.cpp: configuration, tokenizer, chat template and weights.

transformers reads the configuration and the tokenizer. The weights of linear layers and of the embedding stay in the
blocks of the file, which is mapped into memory, so a quantized model is not expanded.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.errors import OutriderError, UnsupportedModel
from outrider.loader.gguf_tokenizer import make_tokenizer
from outrider.models.attention import NAME
from outrider.models.checkpoint import WeightFormat
from outrider.models.gguf_linear import BlockEmbedding, BlockLinear, BlockWeight

SUFFIX = ".gguf"
_MAGIC = b"GGUF"
# model_type of transformers -> name of the architecture in the tensor names of the gguf package
_ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {
        "llama": "llama",
        "mistral": "llama",
        "qwen2": "qwen2",
        "qwen3": "qwen3",
        "phi3": "phi3",
        "gemma3_text": "gemma3",
    }
)
_PERMUTED = ("llama", "mistral")  # GGUF files have the rows of q and k with interleaved rotary halves
_NORM_OFFSET = ("gemma3_text",)  # GGUF files have the weights of the norms plus one
_FLOATS = ("F32", "F16", "BF16")
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_log = logging.getLogger("outrider")


def is_gguf(path: str | Path) -> bool:
    """Return whether a path names a GGUF file."""
    return Path(path).suffix.lower() == SUFFIX


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFFile:
    """An open GGUF file and the configuration of its model."""

    path: Path
    reader: Any  # gguf.GGUFReader
    config: Any

    @property
    def types(self) -> list[str]:
        """The names of the types of its matrices."""
        return sorted({tensor.tensor_type.name for tensor in self._matrices})

    @property
    def blocks(self) -> WeightFormat | None:
        """The types of its matrices and their mean bits per weight; None if no matrix has quantized blocks."""
        if not self.quantized:
            return None
        weights = sum(int(tensor.n_elements) for tensor in self._matrices)
        size = sum(int(tensor.n_bytes) for tensor in self._matrices)
        return WeightFormat(tuple(self.types), 8 * size / weights)

    @property
    def _matrices(self) -> list[Any]:
        return [tensor for tensor in self.reader.tensors if len(tensor.shape) > 1]

    @property
    def quantized(self) -> bool:
        """Whether a matrix has quantized blocks."""
        return not set(self.types) <= set(_FLOATS)

    @property
    def dtype(self) -> torch.dtype:
        """The type that the configuration names: bfloat16 if all matrices have it, float16 likewise, else float32."""
        kinds = set(self.types)
        if kinds <= {"BF16"}:
            return torch.bfloat16
        return torch.float16 if kinds <= {"F16"} else torch.float32

    def field(self, name: str) -> Any:
        """Return the value of a metadata field, or None."""
        field = self.reader.fields.get(name)
        return None if field is None else field.contents()


def open_gguf(path: Path) -> GGUFFile:
    """Open a file and read its configuration.

    Raises:
        OutriderError: the file is missing, damaged, or has no tokenizer; or the package gguf is missing.
        UnsupportedModel: the architecture, its rotary scaling, or a tensor type is not supported.
    """
    reader = _read(path)
    architecture = reader.fields.get("general.architecture")
    name = "" if architecture is None else architecture.contents()
    config = _config(path, name)
    kind = config.model_type
    if kind not in _ARCHITECTURES:
        raise UnsupportedModel(
            f"{path} is a GGUF file of {name}; supported are {', '.join(_ARCHITECTURES)}; use the folder of the"
            " Hugging Face model"
        )
    file = GGUFFile(path=path, reader=reader, config=config)
    _check_types(file)
    if (scaling := file.field(f"{name}.rope.scaling.type")) not in (None, "none"):
        raise UnsupportedModel(
            f"{path} has rotary scaling of type {scaling}, which is not supported in GGUF files; use the folder of the"
            " Hugging Face model"
        )
    if file.field("tokenizer.ggml.tokens") is None:
        raise OutriderError(f"{path} has no tokenizer; convert the model again, with its tokenizer")
    if (head_dim := file.field(f"{name}.attention.key_length")) is not None:
        config.head_dim = head_dim  # transformers reads it for some architectures only
    _check_rotary(file, name)
    config.pad_token_id = None  # a default of transformers, which may be beyond the vocabulary
    config.dtype = file.dtype
    return file


def load_tokenizer(file: GGUFFile) -> Any:
    """Make the tokenizer that the file describes, with its chat template."""
    model = file.field("tokenizer.ggml.model") or ""
    rule = file.field("tokenizer.ggml.pre") or "default"
    return make_tokenizer(file.path, model, rule)


def end_ids(file: GGUFFile) -> frozenset[int]:
    """Return the ids of tokens that end a generation."""
    ids = [file.field(f"tokenizer.ggml.{key}") for key in _END_KEYS]
    return frozenset(int(each) for each in ids if each is not None)


def load_model(file: GGUFFile, dtype: torch.dtype) -> Any:
    """Make the model. Quantized matrices stay in their blocks; all other weights are converted to `dtype`.

    Raises:
        OutriderError: a tensor is missing, or has the wrong shape.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(file.config, attn_implementation=NAME, dtype=dtype)
    tensors = {tensor.name: tensor for tensor in file.reader.tensors}
    names = _tensor_names(file.config)
    used = {"rope_freqs.weight"}
    for prefix, module in list(model.named_modules()):
        for key, weight in list(module._parameters.items()):
            if weight is None:
                continue
            name = names(prefix, key)
            if prefix == "lm_head" and name not in tensors:
                continue  # the output layer is the embedding
            if name not in tensors:
                raise OutriderError(f"{file.path} has no tensor {name}; download or convert it again")
            used.add(name)
            _fill(model, prefix, key, _matrix(file, tensors[name], prefix, weight.shape), dtype)
    if unused := sorted(tensors.keys() - used):
        raise UnsupportedModel(
            f"{file.path} has tensors that its architecture does not use, such as {unused[0]};"
            " use the folder of the Hugging Face model"
        )
    if "output.weight" not in tensors:
        _tie(model)
    _restore_buffers(model, tensors.get("rope_freqs.weight"))
    return model.eval()


def _read(path: Path) -> Any:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise OutriderError(f'{path} needs the package gguf; run pip install "outrider[gguf]"') from error
    try:
        with path.open("rb") as content:
            magic = content.read(4)
    except OSError as error:
        raise OutriderError(f"{path} cannot be read ({error.strerror}); give the path of a GGUF file") from error
    if magic != _MAGIC:
        found = f"its first bytes are {magic!r} and not {_MAGIC!r}" if magic else "it is empty"
        raise OutriderError(f"{path} is no GGUF file: {found}; download it again, or give another file")
    try:
        return GGUFReader(path)
    except ValueError as error:
        if "is not a valid GGMLQuantizationType" in str(error):
            raise UnsupportedModel(
                f"{path} has a tensor of a type that the package gguf does not know ({error}); update gguf"
            ) from error
        raise OutriderError(f"{path} is damaged or truncated; download it again") from error
    except (IndexError, KeyError, UnicodeDecodeError, OverflowError) as error:
        raise OutriderError(f"{path} is damaged or truncated; download it again") from error


def _config(path: Path, name: str) -> Any:
    try:
        config = AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name, local_files_only=True)
    except (ValueError, KeyError, OSError, TypeError) as error:
        raise UnsupportedModel(
            f"{path} is a GGUF file of the architecture {name!r}, which transformers cannot read ({error}); use the"
            " folder of the Hugging Face model"
        ) from error
    return config.get_text_config(decoder=True)


def _check_types(file: GGUFFile) -> None:
    from gguf.quants import _type_traits

    known = {*_FLOATS, *(kind.name for kind in _type_traits)}
    unknown = sorted({tensor.tensor_type.name for tensor in file.reader.tensors} - known)
    if unknown:
        raise UnsupportedModel(
            f"{file.path} has tensors of type {', '.join(unknown)}, which are not supported; convert the model to one"
            " of Q8_0, Q4_K, Q4_0, BF16, F16"
        )


def _check_rotary(file: GGUFFile, name: str) -> None:
    """Refuse files that rotate a part of each head, which transformers does not read from them."""
    config = file.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotated = file.field(f"{name}.rope.dimension_count")
    if rotated not in (None, size):
        raise UnsupportedModel(
            f"{file.path} rotates {rotated} of {size} dimensions of each head, which is not supported in GGUF"
            " files; use the folder of the Hugging Face model"
        )


def _tensor_names(config: Any) -> Any:
    """Return a function from the name of a module and of its parameter to the name of a tensor."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    wanted = _ARCHITECTURES[config.model_type]
    architecture = next(key for key, name in MODEL_ARCH_NAMES.items() if name == wanted)
    table = get_tensor_name_map(architecture, config.num_hidden_layers)

    def name(module: str, parameter: str) -> str:
        return f"{table.get_name(module) or module}.{parameter}"

    return name


def _matrix(file: GGUFFile, tensor: Any, module: str, shape: torch.Size) -> torch.Tensor | BlockWeight:
    """Return a tensor as transformers orders it: quantized matrices as blocks, others in float32 or their own type."""
    found = torch.Size(int(size) for size in reversed(tensor.shape))
    if found != shape:
        raise OutriderError(
            f"{tensor.name} in {file.path} is {tuple(found)} and should be {tuple(shape)}; download or convert it again"
        )
    config = file.config
    kind = tensor.tensor_type.name
    value: torch.Tensor | BlockWeight
    if kind == "F32" or kind == "F16":
        value = torch.from_numpy(np.array(tensor.data)).view(shape)
    elif kind == "BF16":
        value = torch.from_numpy(np.array(tensor.data)).view(torch.bfloat16).view(shape)
    else:
        value = BlockWeight(tensor.data.reshape(shape[0], -1), tensor.tensor_type, shape[1])
    if config.model_type in _NORM_OFFSET and module.endswith("norm") and isinstance(value, torch.Tensor):
        value = value - 1
    if config.model_type in _PERMUTED and module.endswith(("q_proj", "k_proj")):
        heads = config.num_attention_heads if module.endswith("q_proj") else config.num_key_value_heads
        order = _rotary_order(shape[0], heads)
        value = value.reordered(order) if isinstance(value, BlockWeight) else value[order]
    return value


def _rotary_order(rows: int, heads: int) -> torch.Tensor:
    """Return the row in a GGUF file of each row of q or k in transformers, which has halves instead of pairs."""
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()


def _fill(model: nn.Module, prefix: str, key: str, value: torch.Tensor | BlockWeight, dtype: torch.dtype) -> None:
    module = model.get_submodule(prefix)
    if isinstance(value, torch.Tensor):
        setattr(module, key, nn.Parameter(value.to(dtype), requires_grad=False))
        return
    if isinstance(module, nn.Linear):
        replacement: nn.Module = BlockLinear(value, None, dtype)
        replacement._parameters["bias"] = module.bias
    elif type(module) is nn.Embedding:
        replacement = BlockEmbedding(value, dtype)
    else:
        setattr(module, key, nn.Parameter(value.dequantize().to(dtype), requires_grad=False))
        return
    model.set_submodule(prefix, replacement)


def _tie(model: Any) -> None:
    """Use the embedding as the output layer."""
    table = model.get_input_embeddings()
    if isinstance(table, BlockEmbedding):
        model.set_submodule("lm_head", BlockLinear(table.blocks, None, table.dtype))
    else:
        model.lm_head.weight = table.weight


def _restore_buffers(model: Any, factors: Any) -> None:
    """Compute the buffers, which are on the meta device: the rotary frequencies, divided by factors of the file."""
    for name, module in list(model.named_modules()):
        if not any(buffer.is_meta for buffer in module._buffers.values() if buffer is not None):
            continue
        if hasattr(module, "scalar_embed_scale"):  # the scaled embedding of Gemma
            module.embed_scale = torch.tensor(module.scalar_embed_scale)
            continue
        rotary = type(module)(config=model.config)
        if factors is not None:
            rotary.inv_freq /= torch.from_numpy(np.array(factors.data)).view(rotary.inv_freq.shape)
        model.set_submodule(name, rotary)
