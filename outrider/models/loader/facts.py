"""Facts in a configuration about the use of a model: its context length and the tokens that end a text."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from outrider.errors import OutriderError

_DEFAULT_CONTEXT = 1 << 20  # tokens, for a model whose config has no context length


def end_ids(path: Path, config: Any, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end the text. The generation config overrides the model config.

    If neither has any, the end-of-text token of the tokenizer is used.
    """
    ends = getattr(config.get_text_config(decoder=True), "eos_token_id", None)
    if (generation := generation_settings(path)) is not None and generation.eos_token_id is not None:
        ends = generation.eos_token_id
    if ends is None:
        ends = tokenizer.eos_token_id
    return frozenset([ends] if isinstance(ends, int) else ends or ())


def generation_settings(path: Path) -> Any:
    """Return the settings in the generation_config.json of a model folder; None: it has none."""
    file = path / "generation_config.json"
    if not file.is_file():
        return None
    try:
        return SimpleNamespace(**{"eos_token_id": None} | json.loads(file.read_text("utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise OutriderError(f"{file} cannot be read ({error}); copy the checkpoint again") from error


def context_length(config: Any) -> int:
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


def context_reason(config: Any) -> str:
    """Return why longer texts than the context length cannot run; empty: it is the model's own limit."""
    for rope in _ropes(config):
        # Up to the context, both types have no scaling or constant factors.
        if (kind := rope.get("rope_type")) in ("dynamic", "longrope"):
            return f"in longer texts, its {kind} rotary scaling changes keys that are already cached"
    return ""


def _ropes(config: Any) -> list[dict[str, Any]]:
    """Return the sets of rotary parameters: one for all layers, or one per layer type."""
    rope = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    return [rope, *(value for value in rope.values() if isinstance(value, dict))]
