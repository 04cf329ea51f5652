"""Load a model. Models on the native kernels are read without transformers, which takes seconds to import."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from outrider.errors import OutriderError, UnsupportedModel
from outrider.models.loader.dtype import choose_dtype, gguf_dtype, stored_dtype
from outrider.models.loader.embedded import model_folder
from outrider.models.loader.facts import context_length, context_reason, end_ids
from outrider.models.loader.folder import check_folder, check_weights
from outrider.models.loader.gguf import heads as _heads  # noqa: F401  # lets GGUF files be read as draft heads
from outrider.models.loader.gguf.architectures import settings_of
from outrider.models.loader.gguf.checkpoint import gguf_checkpoint
from outrider.models.loader.gguf.file import FLOATS, GGUFFile, read_gguf
from outrider.models.loader.gguf.weights import GGUFWeights
from outrider.models.loader.memory import check_memory, weight_bytes
from outrider.models.loader.model_config import ModelConfig, make_model_config, read_native_config
from outrider.models.loader.native_checkpoint import name_weights, open_stored
from outrider.models.loader.paths import is_gguf
from outrider.models.loader.quantized.weights import QuantizedWeights, quantization_of
from outrider.models.loader.tokenizer import read_tokenizer
from outrider.models.loader.weight_shapes import weight_shapes
from outrider.models.native.blocks import can_pack
from outrider.models.native.support import FAMILIES, may_run
from outrider.models.torch.checkpoint import Checkpoint, LazyModel
from outrider.models.torch.weights import Weights
from outrider.models.triton.gguf import device_bytes
from outrider.runtime.processes import local_device

_NATIVE_DTYPES = (torch.bfloat16, torch.float32)


def load_checkpoint(
    folder: str | Path, *, dtype: str = "auto", device: str = "auto", kernels: str = "auto", tp: int = 1
) -> Checkpoint:
    """Load a decoder-only or encoder-decoder model from a local folder of safetensors, or from a GGUF file.

    Args:
        folder: a folder with config.json, the weights and the tokenizer; or a GGUF file.
        dtype: auto, float32, bfloat16 or float16. auto: see `choose_dtype`.
        device: auto, cpu, cuda, cuda:1, ... auto: the first GPU, or the CPU if there is none.
        kernels: auto, native, triton or torch: what will run the model. The best dtype depends on it.
        tp: ranks of tensor parallelism. This process, which torchrun has started, loads its part of the model.

    Raises:
        OutriderError: the folder is missing or damaged, or is not a causal language model; or
            torchrun has not started `tp` processes.
        UnsupportedModel: the architecture is not supported.
    """
    path = Path(folder).expanduser()
    if is_gguf(path) and tp > 1:
        raise OutriderError(f"{path} is a GGUF file, which cannot be split over ranks; give a folder of safetensors")
    place = choose_device(device if tp == 1 else local_device(device))
    if kernels not in ("graphs", "torch") and tp == 1:
        open_path = _open_gguf if is_gguf(path) else _open_folder
        own_kernels = "native" if place.type == "cpu" and kernels != "triton" else "triton"
        opened = open_path(path, dtype, place, own_kernels)
        if opened is not None:
            return opened
    from outrider.models.loader.transformers_checkpoint import load_folder, load_gguf

    if is_gguf(path):
        return load_gguf(path, dtype, place, kernels)
    return load_folder(path, dtype, place, kernels=kernels, tp=tp, device_name=device)


def _open_folder(path: Path, dtype: str, device: torch.device, kernels: str) -> Checkpoint | None:
    """Open a folder for the native or Triton kernels; None: they do not run it, or transformers must read it."""
    check_folder(path)
    config = read_native_config(path)
    if config is None or not _may_run(config, kernels):
        return None
    check_weights(path, config)
    quantized = quantization_of(config) is not None
    choice = choose_dtype(dtype, config, device, kernels=kernels, quantized=quantized)
    if choice.dtype not in _NATIVE_DTYPES and kernels != "triton":
        return None
    stored = open_stored(path, config, choice.dtype, kernels)
    weights = name_weights(stored, config, choice.dtype)
    if weights is None:
        return None
    check_memory(path, _memory_of(path, config, stored, choice.dtype), device)
    quantized_weights = stored if isinstance(stored, QuantizedWeights) else None
    if quantized_weights is not None:
        quantized_weights.report(choice.dtype)
    tokenizer = read_tokenizer(path)
    return Checkpoint(
        lazy_model=LazyModel(
            lambda: _transformers().read_model(path, choice.dtype).to(device),
            lambda: _transformers().fill_folder(path, weights),
        ),
        config=config,
        weights=weights,
        tokenizer=tokenizer,
        context=context_length(config),
        context_reason=context_reason(config),
        vocab=config.get_text_config().vocab_size,
        end_ids=end_ids(path, config, tokenizer),
        recurrent=False,
        blocks=None if quantized_weights is None else quantized_weights.weight_format(choice.dtype),
        block_types=weights.types,
        dtype=choice.dtype,
        folder=str(path),
        dtype_reason=choice.reason,
        device=device,
    )


def _may_run(config: ModelConfig, kernels: str) -> bool:
    """Return whether the kernels know the architecture. The native ones must also be compiled here."""
    if kernels == "triton":
        return config.get_text_config(decoder=True).model_type in FAMILIES
    return may_run(config)


def _memory_of(path: Path, config: ModelConfig, stored: Weights | None, dtype: torch.dtype) -> int:
    """Return the bytes of the weights of a folder. `stored` has them if quantized."""
    if isinstance(stored, QuantizedWeights):
        return stored.total_bytes()
    return weight_bytes(path, stored_dtype(config), dtype)


def _open_gguf(path: Path, dtype: str, device: torch.device, kernels: str) -> Checkpoint | None:
    """Open a GGUF file for the native or Triton kernels; None as in `_open_folder`."""
    file = read_gguf(path)
    config = gguf_config(file)
    if config is None or not _may_run(config, kernels):
        return None
    choice = choose_dtype(dtype, config, device, kernels=kernels, quantized=file.quantized)
    if choice.dtype not in _NATIVE_DTYPES and kernels != "triton":
        return None
    check_memory(path, _gguf_bytes(file, choice.dtype, device), device)
    dense = torch.float32 if file.quantized else choice.dtype
    try:
        shapes = weight_shapes(config)
    except UnsupportedModel:
        return None
    weights = GGUFWeights(file, config, dense)
    if not all(kind in FLOATS or can_pack(kind) for kind in weights.expert_types):
        return None
    weights.check(shapes)
    weights.check_used(shapes)

    def make() -> Any:
        from outrider.models.loader.gguf.model import load_model, make_config

        return load_model(file, make_config(file), weights, dense)

    def make_reference() -> Any:
        from outrider.models.loader.gguf.model import load_model, make_config

        return load_model(file, make_config(file), weights, torch.float32, widen=True)

    checkpoint = gguf_checkpoint(file, config, LazyModel(make, make_reference), weights, choice, device)
    return replace(checkpoint, weights=weights)


def _gguf_bytes(file: GGUFFile, dtype: torch.dtype, device: torch.device) -> int:
    """Return the bytes of the weights of a file on a device. Some types take more on a GPU."""
    if device.type != "cuda":
        return file.nbytes
    return sum(device_bytes(tensor.kind, tensor.shape, dtype) for tensor in file.tensors.values())


def gguf_config(file: GGUFFile) -> ModelConfig | None:
    """Return the configuration of a GGUF file; None: transformers must make it.

    Raises:
        OutriderError: a field is missing.
        UnsupportedModel: the architecture or its rotary embedding is not supported.
    """
    try:
        config = make_model_config(settings_of(file))
    except (TypeError, ValueError, KeyError):
        return None
    if config is not None:
        config.dtype = gguf_dtype(file)
        if (factors := file.rotary_factors()) is not None:
            config.rope_parameters["divisors"] = factors
    return config


def read_weights(folder: str | Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Read the weights of a model folder, by the names of the model's `state_dict`. It needs no tokenizer.

    Raises:
        OutriderError: the folder is missing or damaged, or is not a causal language model.
        UnsupportedModel: the architecture is not supported.
    """
    path = Path(folder).expanduser()
    config = read_native_config(path)
    if config is None or config.get_text_config() is not config or quantization_of(config) is not None:
        return dict(_transformers().read_weights(path, dtype))
    weights = name_weights(open_stored(path, config, dtype), config, dtype)
    if weights is None:
        return dict(_transformers().read_weights(path, dtype))
    dense = (
        (name, value if isinstance(value, torch.Tensor) else value.dequantize()) for name, value in weights.items()
    )
    return {name: value.to(dtype) for name, value in dense}


def read_model_config(folder: str | Path) -> Any:
    """Return the configuration of a model folder or a GGUF file, with the names of transformers.

    Raises:
        OutriderError: there is none, or it is damaged.
        UnsupportedModel: transformers does not support the architecture.
    """
    path = Path(folder).expanduser()
    config = gguf_config(read_gguf(path)) if is_gguf(path) else read_native_config(path)
    return _transformers().read_transformers_config(path) if config is None else config


def check_model(folder: str | Path) -> None:
    """Check that a folder is a model that can be loaded, from its config. A GGUF file is checked when it is loaded.

    Raises:
        OutriderError: the folder is not a causal language model.
        UnsupportedModel: the architecture is not supported.
    """
    if not is_gguf(folder):
        is_recurrent(folder)


def is_recurrent(folder: str | Path) -> bool:
    """Return whether a model has recurrent layers, from its config.

    Raises:
        OutriderError: the folder is not a causal language model.
        UnsupportedModel: the architecture is not supported.
    """
    path = Path(folder).expanduser()
    config = gguf_config(read_gguf(path)) if is_gguf(path) else read_native_config(path)
    return config is None and bool(_transformers().has_recurrent_layers(path))


def reads_sources(target: str | Path | None) -> bool:
    """Return whether a target is an encoder-decoder model, from its config.

    Raises:
        OutriderError: the target is not a model.
        UnsupportedModel: the architecture is not supported.
    """
    path = model_folder(target)
    if is_gguf(path) or read_native_config(path) is not None:
        return False
    return bool(_transformers().has_encoder(path))


def refuse_sources(target: str | Path | None, command: str) -> None:
    """Refuse an encoder-decoder target in a command whose prompts have no sources.

    Raises:
        OutriderError: the target is an encoder-decoder model, or not a model at all.
        UnsupportedModel: the architecture is not supported.
    """
    if reads_sources(target):
        raise OutriderError(
            f"{command} does not support encoder-decoder targets; use a decoder-only target here,"
            " and run, bench, tune, serve or LLM with this one"
        )


def check_fits(folder: str | Path, *, dtype: str = "auto", device: str = "auto", kernels: str = "auto") -> None:
    """Check that a model fits into the free memory, without loading it.

    Raises:
        OutriderError: it does not fit, or is not a causal language model.
        UnsupportedModel: the architecture is not supported.
    """
    path = Path(folder).expanduser()
    place = choose_device(device)
    if is_gguf(path):
        check_memory(path, path.stat().st_size if path.is_file() else 0, place)
        return
    config = read_native_config(path)
    quantized = config is not None and quantization_of(config) is not None
    if config is None or (quantized and (place.type != "cpu" or kernels == "torch")):
        _transformers().check_fits(path, dtype, place, kernels=kernels)
        return
    choice = choose_dtype(dtype, config, place, kernels=kernels, quantized=quantized)
    stored = open_stored(path, config, choice.dtype, kernels) if quantized else None
    check_memory(path, _memory_of(path, config, stored, choice.dtype), place)


def choose_device(name: str) -> torch.device:
    """Return the device of a name; auto is a GPU if there is one, else the CPU.

    Raises:
        OutriderError: there is no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        raise OutriderError(f"device {name!r} cannot be used here; try auto or cpu") from error
    return device


def _transformers() -> Any:
    """Return the module that reads models with transformers. Importing it takes seconds."""
    from outrider.models.loader import transformers_checkpoint

    return transformers_checkpoint
