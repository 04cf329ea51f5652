"""Load a model with transformers. Unsupported models raise an error with the reason."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import CONFIG_MAPPING, MODEL_FOR_MASKED_LM_MAPPING, AutoConfig
from transformers.distributed import DistributedConfig

from outrider.core.source import SourceRules
from outrider.errors import OutriderError, UnsupportedModel
from outrider.models.heads.store import is_head
from outrider.models.loader.dtype import choose_dtype, stored_dtype
from outrider.models.loader.facts import context_length, context_reason, end_ids, generation_settings
from outrider.models.loader.fill import fill_model, register_attention
from outrider.models.loader.folder import check_config, check_folder, check_weights, lacking, one_line
from outrider.models.loader.gguf.checkpoint import gguf_checkpoint
from outrider.models.loader.gguf.file import FLOATS, read_gguf
from outrider.models.loader.gguf.model import load_model, make_config
from outrider.models.loader.gguf.model import read_config as read_gguf_config
from outrider.models.loader.gguf.weights import GGUFWeights
from outrider.models.loader.memory import check_memory, safetensors_bytes, weight_bytes
from outrider.models.loader.model_class import auto_class, causal_model_class, concrete_class
from outrider.models.loader.paths import is_gguf
from outrider.models.loader.quantized.weights import QuantizedWeights, take_quantization
from outrider.models.loader.quiet import quiet_transformers, reading_shown
from outrider.models.loader.speech import SPEECH, read_speech_rules
from outrider.models.loader.tensor_parallel import check_plan
from outrider.models.loader.tokenizer import read_tokenizer
from outrider.models.native.blocks import can_pack
from outrider.models.torch.attention import NAME
from outrider.models.torch.checkpoint import Checkpoint, LazyModel
from outrider.models.torch.gguf_linear import BlockLinear
from outrider.models.torch.weights import Weights
from outrider.runtime.progress import stage
from outrider.runtime.ranks import join

# Architectures with recurrent layers that the tests show to be exact.
_RECURRENT = frozenset(
    {
        "bailing_hybrid",
        "bamba",
        "falcon_h1",
        "falcon_mamba",
        "granitemoehybrid",
        "jamba",
        "kimi_linear",
        "lara_mini",
        "lfm2",
        "lfm2_moe",
        "lfm3",
        "mamba",
        "mamba2",
        "minimax",
        "nemotron_h",
        "olmo_hybrid",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
        "recurrent_gemma",
        "rwkv",
        "zamba",
        "zamba2",
        "zaya",
    }
)
# Encoder-decoder models that the tests show to be exact.
_ENCODER_DECODER = (
    "bart",
    "blenderbot",
    "blenderbot-small",
    "m2m_100",
    "marian",
    "mbart",
    "mt5",
    "pegasus",
    "plbart",
    "t5",
    "t5gemma",
    "umt5",
    *SPEECH,
)
_WITHOUT_ATTENTION = frozenset({"falcon_mamba", "mamba", "mamba2", "rwkv"})
# The attention modules of these models do not use the attention registry of transformers. Outrider replaces them.
_OWN_ATTENTION = frozenset({"bloom", "falcon", "gpt_neo", "mpt"})
_REPLACED = _OWN_ATTENTION | {"stablelm"}
_INCONSISTENT = frozenset({"moshi"})  # generate and forward of transformers differ
# Layer types with a KV cache.
_ATTENTION_LAYERS = frozenset(
    {
        "chunked_attention",
        "deepseek_sparse_attention",  # the name of indexed_attention in older versions of transformers
        "full_attention",
        "indexed_attention",
        "sliding_attention",
    }
)
_ONE_EXPERT = {"experts_implementation": "eager"}  # other functions read all experts at once
_DEFAULT_SOURCE = 8192  # tokens, for an encoder without a limit of its own
_LOAD_ERRORS = (
    OSError,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    AttributeError,
    ImportError,
    RuntimeError,
    StrictDataclassError,
)


def load_folder(path: Path, dtype: str, device: torch.device, *, kernels: str, tp: int, device_name: str) -> Checkpoint:
    """Load a model folder with transformers. Arguments and errors are those of `load_checkpoint`.

    Args:
        dtype: auto, float32, bfloat16 or float16.
        device: of this process.
        kernels: what will run the model.
        tp: ranks of tensor parallelism.
        device_name: the device as the user named it.
    """
    config = read_transformers_config(path)
    recurrent = _check_family(config)
    _hide_image_blocks(config)
    if tp > 1:
        check_plan(config, tp, recurrent=recurrent)
    quantization = take_quantization(config)
    if quantization is not None and tp > 1:
        raise OutriderError(f"{path} is quantized and cannot be split over ranks; use the unquantized checkpoint")
    choice = choose_dtype(
        dtype, config, device, kernels=kernels if tp == 1 else "torch", quantized=quantization is not None
    )
    weights = None
    size = weight_bytes(path, stored_dtype(config), choice.dtype) // tp
    if quantization is not None:
        weights = QuantizedWeights(path, quantization, choice.dtype)
        weights.report(choice.dtype)
        size = weights.total_bytes()
    check_memory(path, size, device)
    register_attention()
    ranks = join(tp, device_name)

    def make() -> Any:
        model = _read_model(path, config, choice.dtype, tp=tp, weights=weights)
        return (model if ranks is not None else _moved(model, device)).requires_grad_(False)

    lazy_model = LazyModel(make)
    model = lazy_model.get()
    if ranks is not None:
        ranks.barrier()  # ranks may take long to read their files, and later operations have a time limit
    tokenizer = read_tokenizer(path)
    return Checkpoint(
        lazy_model=lazy_model,
        config=model.config,
        tokenizer=tokenizer,
        context=context_length(config),
        context_reason=context_reason(config),
        vocab=_vocab(model),
        end_ids=end_ids(path, config, tokenizer),
        recurrent=recurrent,
        ranks=tp,
        source=_source_rules(path, config),
        blocks=None if weights is None else weights.weight_format(choice.dtype),
        dtype=choice.dtype,
        folder=str(path),
        dtype_reason=choice.reason,
        device=device,
    )


def load_gguf(path: Path, dtype: str, device: torch.device, kernels: str) -> Checkpoint:
    """Load a GGUF file into a model of transformers. Arguments and errors are those of `load_checkpoint`."""
    file = read_gguf(path)
    config = make_config(file)
    check_memory(path, file.nbytes, device)
    recurrent = _check_family(config)
    choice = choose_dtype(dtype, config, device, kernels=kernels)
    dense = torch.float32 if file.quantized else choice.dtype
    weights = GGUFWeights(file, config, dense)
    if all(kind in FLOATS or can_pack(kind) for kind in weights.expert_types):
        choice = choose_dtype(dtype, config, device, kernels=kernels, quantized=file.quantized)
    lazy_model = LazyModel(lambda: _moved(load_model(file, config, weights, dense, _attention(config)), device))
    lazy_model.get()
    return replace(gguf_checkpoint(file, config, lazy_model, weights, choice, device), recurrent=recurrent)


def read_model(path: Path, dtype: torch.dtype) -> Any:
    """Return the model of a folder on the CPU, without gradients. Errors are those of `read_weights`."""
    register_attention()
    config = _read_config(path)
    return _read_model(path, config, dtype, weights=_dequantized(path, config, dtype)).requires_grad_(False)


def fill_folder(path: Path, weights: Weights) -> Any:
    """Return the model of a folder that computes in float32 with these weights. They keep their types and blocks."""
    config = _read_config(path)
    take_quantization(config)
    return fill_model(config, weights, torch.float32, _attention(config) | _ONE_EXPERT, widen=True)


def read_weights(path: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Read the weights of a model folder, by the names of the model's `state_dict`. It needs no tokenizer.

    Raises:
        OutriderError: the folder is missing or damaged, or is not a causal language model.
        UnsupportedModel: the architecture is not supported.
    """
    config = _read_config(path)
    _check_family(config)
    return dict(_read_model(path, config, dtype, weights=_dequantized(path, config, dtype)).state_dict())


def _dequantized(path: Path, config: Any, dtype: torch.dtype) -> QuantizedWeights | None:
    """Return the dequantized weights of a checkpoint; None: it is not quantized."""
    quantization = take_quantization(config)
    return None if quantization is None else QuantizedWeights(path, quantization, dtype)


def read_transformers_config(path: Path) -> Any:
    """Return the transformers configuration of a model folder or a GGUF file.

    Raises:
        OutriderError: there is none, or it is damaged.
        UnsupportedModel: transformers does not support the architecture.
    """
    return read_gguf_config(path) if is_gguf(path) else _read_config(path)


def check_fits(path: Path, dtype: str, device: torch.device, *, kernels: str) -> None:
    """Check that the model of a folder fits into the free memory. Errors are those of `load.check_fits`."""
    config = _read_config(path)
    _check_family(config)
    quantization = take_quantization(config)
    choice = choose_dtype(dtype, config, device, kernels=kernels, quantized=quantization is not None)
    size = weight_bytes(path, stored_dtype(config), choice.dtype)
    if quantization is not None:
        size = QuantizedWeights(path, quantization, choice.dtype).total_bytes()
    check_memory(path, size, device)


def has_recurrent_layers(path: Path) -> bool:
    """Return whether the model of a folder has recurrent layers. Errors are those of `is_recurrent`."""
    return _check_family(read_transformers_config(path))


def has_encoder(path: Path) -> bool:
    """Return whether the model of a folder has an encoder. Errors are those of `reads_sources`."""
    config = _read_config(path)
    _check_family(config)
    return _has_encoder(config)


def _read_config(path: Path) -> Any:
    check_folder(path)
    if is_head(path):
        raise OutriderError(f"{path} is a draft head, which does not run alone; use it as draft:DIR or tree:DIR")
    try:
        model_type = json.loads((path / "config.json").read_text("utf-8")).get("model_type")
        if model_type in CONFIG_MAPPING:
            config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
            check_config(path, config)
            return config
    except OutriderError:
        raise
    except _LOAD_ERRORS as error:
        raise OutriderError(
            f"{path / 'config.json'} cannot be read ({one_line(error)}); copy the checkpoint again"
        ) from error
    if model_type is None:
        raise OutriderError(f"{path / 'config.json'} has no model_type; give the folder of a Hugging Face model")
    raise UnsupportedModel(
        f"{path / 'config.json'} has model_type {model_type!r}, which transformers {transformers.__version__} does not"
        " support; update transformers (code in checkpoints is never executed)"
    )


def _check_family(config: Any) -> bool:
    """Raise for unsupported architectures. Return whether the model has recurrent layers."""
    model_type = config.model_type
    if _has_encoder(config):
        if model_type not in _ENCODER_DECODER:
            raise _unsupported(
                model_type, f"of encoder-decoder models only {', '.join(_ENCODER_DECODER)} are supported"
            )
        return False
    encoder = type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False)
    model_class = causal_model_class(config)
    if encoder or model_class is None:
        raise OutriderError(f"{model_type} is not a causal language model; give a text model that generates")
    text = config.get_text_config(decoder=True)
    types = set(getattr(text, "layer_types", None) or ())
    if {model_type, text.model_type} & _RECURRENT and (not types or types - _ATTENTION_LAYERS):
        return True
    if unsupported := sorted(types - _ATTENTION_LAYERS):
        raise _unsupported(model_type, f"layers of type {', '.join(unsupported)} are not supported yet")
    if not getattr(model_class, "_supports_attention_backend", False) and model_type not in _REPLACED:
        raise _unsupported(model_type, "transformers cannot replace its attention, which trees need")
    if model_type in _INCONSISTENT:
        raise _unsupported(model_type, "its cache and its mask in transformers use different windows")
    return False


def _hide_image_blocks(config: Any) -> None:
    """Let a model whose image tokens see each other use the causal mask, because texts have no image tokens.

    Otherwise Gemma 4 Unified makes a mask from the tokens of one pass, and not of the whole sequence.
    """
    text = config.get_text_config(decoder=True)
    if getattr(text, "use_bidirectional_attention", None) == "vision":
        text.use_bidirectional_attention = None


def _has_encoder(config: Any) -> bool:
    return bool(getattr(config, "is_encoder_decoder", False))


def _unsupported(model_type: str, reason: str) -> UnsupportedModel:
    return UnsupportedModel(f"{model_type}: {reason}; use another model, or transformers.generate for this one")


def _read_model(
    path: Path, config: Any, dtype: torch.dtype, *, tp: int = 1, weights: QuantizedWeights | None = None
) -> Any:
    """Read the model of a folder. `weights` are those of a quantized checkpoint."""
    check_weights(path, config)
    model_class = auto_class(config)
    if weights is not None:  # classes of transformers take weights only without a folder, which automatic ones need
        model_class = concrete_class(model_class._model_mapping, config)
    try:
        with quiet_transformers(), reading_shown(path, safetensors_bytes(path)):
            model, report = model_class.from_pretrained(
                path if weights is None else None,
                state_dict=None if weights is None else dict(weights),
                config=config,
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **_attention(config),
                **({"distributed_config": DistributedConfig(tp_size=tp)} if tp > 1 else {}),
            )
    except (*_LOAD_ERRORS, SafetensorError) as error:
        if tp > 1:
            raise UnsupportedModel(
                f"transformers cannot read the model in {path} into {tp} ranks ({one_line(error)});"
                " use --tp 1, or copy the checkpoint again if that fails, too"
            ) from error
        if isinstance(error, ImportError):
            raise OutriderError(
                f"the model in {path} ({config.model_type}) needs a package that is missing"
                f" ({_first_line(error)}); install it with pip"
            ) from error
        raise OutriderError(
            f"the model in {path} cannot be read ({one_line(error)}); copy the checkpoint again"
        ) from error
    if missing := sorted(report["missing_keys"]):
        raise lacking(path, config, missing)
    if mismatched := sorted(report["mismatched_keys"]):
        name, shape, expected_shape = mismatched[0]
        raise OutriderError(
            f"the weights in {path} do not fit its config.json: {name} is {tuple(shape)} and should"
            f" be {tuple(expected_shape)}; copy both from one checkpoint"
        )
    return model.eval()


def _moved(model: Any, device: torch.device) -> Any:
    """Return the model on a device. The weights of a mapped file are read only now."""
    if device.type == "cpu":
        return model.to(device)
    with stage(f"moving the model to {device}"):
        return model.to(device)


def _vocab(model: Any) -> int:
    """Return the number of ids that have logits. Raise UnsupportedModel if the LM head is not known."""
    head = model.get_output_embeddings()
    if head is None:
        raise _unsupported(model.config.model_type, "transformers does not name its LM head")
    return int((head.blocks if isinstance(head, BlockLinear) else head.weight).shape[0])


def _first_line(error: Exception) -> str:
    """Return the message of an error, without the lines that transformers adds to those of missing packages."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _attention(config: Any) -> dict[str, str]:
    """Return the arguments that choose the attention of a model."""
    if config.model_type in _WITHOUT_ATTENTION | _OWN_ATTENTION:
        return {}
    if not _has_encoder(config):
        return {"attn_implementation": NAME}
    # The encoder runs in transformers, whose fast attention leaves out the soft cap.
    capped = getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None)
    return {"attn_implementation": "eager"} if capped else {}


def _source_rules(path: Path, config: Any) -> SourceRules | None:
    """Return what the encoder of a model takes; None for a decoder-only model."""
    if not _has_encoder(config):
        return None
    if config.model_type in SPEECH:
        speech = read_speech_rules(path, config, generation_settings(path))
        return SourceRules(context=int(config.max_source_positions), start=(), speech=speech)
    encoder = getattr(config, "encoder", config)
    context = getattr(encoder, "max_position_embeddings", None) or _DEFAULT_SOURCE
    settings: Any = generation_settings(path)
    start = next(
        (
            token
            for holder in (settings, config)
            for name in ("decoder_start_token_id", "bos_token_id")
            if (token := getattr(holder, name, None)) is not None
        ),
        None,
    )
    forced = getattr(settings, "forced_bos_token_id", None)
    tokens = (token for token in (start, forced) if token is not None)
    return SourceRules(context=int(context), start=tuple(tokens))
