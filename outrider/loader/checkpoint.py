"""Load a model folder. Unsupported models raise an error with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    GenerationConfig,
)
from transformers.distributed import DistributedConfig

from outrider.errors import OutriderError, UnsupportedModel
from outrider.heads.store import is_head
from outrider.loader.dtype import DtypeChoice, choose_dtype, stored_dtype
from outrider.loader.embedded import model_folder
from outrider.loader.gguf import heads as _heads  # noqa: F401  # lets GGUF files be read as draft heads
from outrider.loader.gguf.file import FLOATS, is_gguf, read_gguf
from outrider.loader.gguf.model import end_ids, load_model, make_config
from outrider.loader.gguf.model import read_config as read_gguf_config
from outrider.loader.gguf.tokenizer import load_tokenizer
from outrider.loader.gguf.weights import GGUFWeights
from outrider.loader.memory import check_memory, weight_bytes
from outrider.loader.model_class import causal_model_class
from outrider.loader.quiet import quiet_transformers
from outrider.loader.speech import SPEECH, read_speech_rules
from outrider.loader.tensor_parallel import check_plan
from outrider.loader.tokenizer import read_tokenizer
from outrider.models.attention import NAME, attend, receive_mask_rule
from outrider.models.checkpoint import Checkpoint, SourceRules, WeightFormat
from outrider.native.blocks import can_pack
from outrider.native.support import may_run
from outrider.parallel.processes import local_device
from outrider.parallel.ranks import join

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
_OWN_ATTENTION = frozenset({"bloom", "falcon", "mpt"})
_REPLACED = _OWN_ATTENTION | {"stablelm"}
_INCONSISTENT = frozenset({"moshi"})  # generate and forward of transformers differ
# Layer types with a KV cache.
_ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
_DEFAULT_SOURCE = 8192  # tokens, for an encoder without a limit of its own
_DEFAULT_CONTEXT = 1 << 20  # tokens, for a model whose config has no context length
_LOAD_ERRORS = (
    OSError,
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    ImportError,
    RuntimeError,
    StrictDataclassError,
)


def load_checkpoint(
    folder: str | Path, *, dtype: str = "auto", device: str = "auto", kernels: str = "auto", tp: int = 1
) -> Checkpoint:
    """Load a decoder-only or encoder-decoder model from a local folder of safetensors, or from a GGUF file.

    Args:
        folder: a folder with config.json, the weights and the tokenizer; or a GGUF file.
        dtype: auto, float32, bfloat16 or float16. auto: see `choose_dtype`.
        device: auto, cpu, cuda, cuda:1, ... auto: the first GPU, or the CPU if there is none.
        kernels: auto, native or torch: what will run the model. The best dtype depends on it.
        tp: ranks of tensor parallelism. This process, which torchrun has started, loads its part of the model.

    Raises:
        OutriderError: the folder is missing or damaged, or is not a causal language model; or torchrun has not started
            `tp` processes.
        UnsupportedModel: the architecture is not supported.
    """
    path = Path(folder).expanduser()
    torch_device = choose_device(device if tp == 1 else local_device(device))
    if is_gguf(path):
        if tp > 1:
            raise OutriderError(
                f"{path} is a GGUF file, which cannot be split over ranks; give a folder of safetensors"
            )
        return _load_gguf(path, dtype, torch_device, kernels)
    config = _read_config(path)
    recurrent = _check_family(config)
    _hide_image_blocks(config)
    if tp > 1:
        check_plan(config, tp, recurrent=recurrent)
    choice = choose_dtype(dtype, config, torch_device, kernels=kernels if tp == 1 else "torch")
    check_memory(path, weight_bytes(path, stored_dtype(config), choice.dtype) // tp, torch_device)
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, receive_mask_rule)
    ranks = join(tp, device)
    model = _read_model(path, config, choice.dtype, tp=tp)
    if ranks is None:
        model = model.to(torch_device)
    else:
        ranks.barrier()  # ranks may take long to read their files, and later operations have a time limit
    for weight in model.parameters():
        weight.requires_grad_(False)
    tokenizer = read_tokenizer(path)
    return Checkpoint(
        model=model,
        tokenizer=tokenizer,
        context=_context(config),
        context_reason=_context_reason(config),
        vocab=model.get_output_embeddings().weight.shape[0],
        end_ids=_end_ids(path, config, tokenizer),
        recurrent=recurrent,
        ranks=tp,
        source=_source_rules(path, config),
        dtype=choice.dtype,
        folder=str(path),
        dtype_reason=choice.reason,
        device=torch_device,
    )


def _load_gguf(path: Path, dtype: str, device: torch.device, kernels: str) -> Checkpoint:
    file = read_gguf(path)
    config = make_config(file)
    check_memory(path, file.nbytes, device)
    recurrent = _check_family(config)
    choice = choose_dtype(dtype, config, device, kernels=kernels)
    dense = torch.float32 if file.quantized else choice.dtype
    weights = GGUFWeights(file, config, dense)
    native = (
        device.type == "cpu"
        and kernels != "torch"
        and may_run(config)
        and all(kind in FLOATS or can_pack(kind) for kind in weights.expert_types)
    )
    if file.quantized and dtype == "auto" and native:
        choice = DtypeChoice(torch.bfloat16, "with quantized weights")  # of keys, values and dense weights
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, receive_mask_rule)
    model = load_model(file, config, weights, dense, _attention(config))
    return Checkpoint(
        model=model.to(device),
        tokenizer=load_tokenizer(file),
        context=_context(config),
        context_reason=_context_reason(config),
        vocab=config.vocab_size,
        end_ids=end_ids(file),
        recurrent=recurrent,
        blocks=WeightFormat(tuple(file.types), file.bits) if file.quantized else None,
        dtype=choice.dtype,
        folder=str(path),
        dtype_reason=choice.reason,
        device=device,
    )


def read_weights(folder: str | Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Read the weights of a model folder, by the names of the model's `state_dict`. It needs no tokenizer.

    Raises:
        OutriderError: the folder is missing or damaged, or is not a causal language model.
        UnsupportedModel: the architecture is not supported.
    """
    path = Path(folder).expanduser()
    config = _read_config(path)
    _check_family(config)
    return dict(_read_model(path, config, dtype).state_dict())


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
    return _check_family(read_model_config(folder))


def reads_sources(target: str | Path | None) -> bool:
    """Return whether a target is an encoder-decoder model, from its config.

    Raises:
        OutriderError: the target is not a model.
        UnsupportedModel: the architecture is not supported.
    """
    path = model_folder(target)
    if is_gguf(path):
        return False
    config = _read_config(path)
    _check_family(config)
    return _has_encoder(config)


def refuse_sources(target: str | Path | None, command: str) -> None:
    """Refuse an encoder-decoder target in a command whose prompts have no sources.

    Raises:
        OutriderError: the target is an encoder-decoder model, or not a model at all.
        UnsupportedModel: the architecture is not supported.
    """
    if reads_sources(target):
        raise OutriderError(
            f"{command} does not support encoder-decoder targets; use a decoder-only target here, and run, bench, tune,"
            " serve or LLM with this one"
        )


def read_model_config(folder: str | Path) -> Any:
    """Return the transformers configuration of a model folder or a GGUF file.

    Raises:
        OutriderError: there is none, or it is damaged.
        UnsupportedModel: transformers does not support the architecture.
    """
    path = Path(folder).expanduser()
    return read_gguf_config(path) if is_gguf(path) else _read_config(path)


def check_fits(folder: str | Path, *, dtype: str = "auto", device: str = "auto", kernels: str = "auto") -> None:
    """Check that a model fits into the free memory, without loading it.

    Raises:
        OutriderError: it does not fit, or is not a causal language model.
        UnsupportedModel: the architecture is not supported.
    """
    path = Path(folder).expanduser()
    torch_device = choose_device(device)
    if is_gguf(path):
        check_memory(path, path.stat().st_size if path.is_file() else 0, torch_device)
        return
    config = _read_config(path)
    _check_family(config)
    choice = choose_dtype(dtype, config, torch_device, kernels=kernels)
    check_memory(path, weight_bytes(path, stored_dtype(config), choice.dtype), torch_device)


def _read_config(path: Path) -> Any:
    """Return the transformers configuration of a model folder."""
    if not path.is_dir():
        raise OutriderError(
            f"{path} is not a folder; give the folder that holds the model's config.json, or a GGUF file"
        )
    if not (path / "config.json").is_file() and (path / "adapter_config.json").is_file():
        raise OutriderError(
            f"{path} holds a PEFT adapter and no model; merge it with merge_and_unload(), and give the folder in which"
            " save_pretrained writes the result"
        )
    if not (path / "config.json").is_file():
        raise OutriderError(f"{path} holds no config.json; give the folder of a Hugging Face model")
    if is_head(path):
        raise OutriderError(f"{path} is a draft head, which does not run alone; use it as draft:DIR or tree:DIR")
    try:
        model_type = json.loads((path / "config.json").read_text("utf-8")).get("model_type")
        if model_type in CONFIG_MAPPING:
            return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except _LOAD_ERRORS as error:
        raise OutriderError(f"{path / 'config.json'} cannot be read ({error}); copy the checkpoint again") from error
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
    if model_type in _RECURRENT and (not types or types - _ATTENTION_LAYERS):
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
    """Return whether a model is an encoder-decoder model."""
    return bool(getattr(config, "is_encoder_decoder", False))


def _unsupported(model_type: str, reason: str) -> UnsupportedModel:
    return UnsupportedModel(f"{model_type}: {reason}; use another model, or transformers.generate for this one")


def _read_model(path: Path, config: Any, dtype: torch.dtype, *, tp: int = 1) -> Any:
    if not any(path.glob("*.safetensors")):
        raise OutriderError(f"{path} holds no .safetensors; write the weights there with save_pretrained")
    model_class = AutoModelForSeq2SeqLM if _has_encoder(config) else AutoModelForCausalLM
    if config.model_type in SPEECH:
        model_class = AutoModelForSpeechSeq2Seq
    try:
        with quiet_transformers():
            model, report = model_class.from_pretrained(
                path,
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
                f"transformers cannot read the model in {path} into {tp} ranks ({error}); use --tp 1, or copy the"
                " checkpoint again if that fails, too"
            ) from error
        if isinstance(error, ImportError):
            raise OutriderError(
                f"the model in {path} ({config.model_type}) needs a package that is missing ({_first_line(error)});"
                " install it with pip"
            ) from error
        raise OutriderError(f"the model in {path} cannot be read ({error}); copy the checkpoint again") from error
    if missing := sorted(report["missing_keys"]):
        raise OutriderError(f"the weights in {path} lack {', '.join(missing[:3])}; copy the checkpoint again")
    if mismatched := sorted(report["mismatched_keys"]):
        name, shape, expected_shape = mismatched[0]
        raise OutriderError(
            f"the weights in {path} do not fit its config.json: {name} is {tuple(shape)} and should be"
            f" {tuple(expected_shape)}; copy both from one checkpoint"
        )
    return model.eval()


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


def _end_ids(path: Path, config: Any, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end the text. The generation config overrides the model config.

    If neither has any, the end-of-text token of the tokenizer is used.
    """
    ends = getattr(config.get_text_config(decoder=True), "eos_token_id", None)
    if (generation := _generation_config(path)) is not None and generation.eos_token_id is not None:
        ends = generation.eos_token_id
    if ends is None:
        ends = tokenizer.eos_token_id
    return frozenset([ends] if isinstance(ends, int) else ends or ())


def _generation_config(path: Path) -> GenerationConfig | None:
    """Return the generation config of a model folder, or None if it has none."""
    if not (path / "generation_config.json").is_file():
        return None
    try:
        return GenerationConfig.from_pretrained(path, local_files_only=True)
    except _LOAD_ERRORS as error:
        raise OutriderError(
            f"{path / 'generation_config.json'} cannot be read ({error}); copy the checkpoint again"
        ) from error


def _source_rules(path: Path, config: Any) -> SourceRules | None:
    """Return what the encoder of a model takes; None for a decoder-only model."""
    if not _has_encoder(config):
        return None
    if config.model_type in SPEECH:
        speech = read_speech_rules(path, config, _generation_config(path))
        return SourceRules(context=int(config.max_source_positions), start=(), speech=speech)
    encoder = getattr(config, "encoder", config)
    context = getattr(encoder, "max_position_embeddings", None) or _DEFAULT_SOURCE
    settings: Any = _generation_config(path)
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


def _context(config: Any) -> int:
    """Return the context length of a model in tokens."""
    text = config.get_text_config(decoder=True)
    names = ("max_position_embeddings", "max_seq_len", "max_target_positions")
    context = next((limit for name in names if (limit := getattr(text, name, None))), _DEFAULT_CONTEXT)
    for rope in _ropes(config):
        if rope.get("rope_type") == "longrope":
            # The rotation of all keys changes beyond the original length, and cached keys would be wrong.
            context = min(context, int(rope.get("original_max_position_embeddings") or context))
    # In longer texts than `keep_window_size`, Doge hides keys by their values.
    return int(min(context, getattr(text, "keep_window_size", None) or context))


def _context_reason(config: Any) -> str:
    """Return why longer texts than `_context` cannot run; empty if there is no reason but the model's own limit."""
    for rope in _ropes(config):
        # Up to the context, both types have no scaling or constant factors.
        if (kind := rope.get("rope_type")) in ("dynamic", "longrope"):
            return f"in longer texts, its {kind} rotary scaling changes keys that are already cached"
    return ""


def _ropes(config: Any) -> list[dict[str, Any]]:
    """Return the sets of rotary parameters: one for all layers, or one per layer type."""
    rope = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    return [rope, *(value for value in rope.values() if isinstance(value, dict))]


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
