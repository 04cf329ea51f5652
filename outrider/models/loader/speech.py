"""Read what a checkpoint says about its speech: the feature extractor, languages, tasks and suppressed tokens."""

from pathlib import Path
from typing import Any

from transformers import AutoFeatureExtractor

from outrider.errors import OutriderError
from outrider.models.torch.speech.rules import SpeechRules, language_code
from outrider.models.torch.speech.timestamps import TimestampRules

SPEECH = ("whisper",)  # encoder-decoder models that read speech, which the tests show to be exact


def read_speech_rules(path: Path, config: Any, generation: Any) -> SpeechRules:
    """Read the rules of a speech model.

    Args:
        path: the folder of the model.
        config: its configuration.
        generation: its generation config; None: it has none.

    Raises:
        OutriderError: it has no feature extractor that works, or one for another model.
    """
    extractor = _read_extractor(path)
    frames = 2 * config.max_source_positions  # the encoder has a convolution of stride 2
    if (extractor.feature_size, extractor.nb_max_frames) != (config.num_mel_bins, frames):
        raise OutriderError(
            f"{path / 'preprocessor_config.json'} makes {extractor.nb_max_frames} frames of {extractor.feature_size}"
            f" bins, and the model takes {frames} of {config.num_mel_bins}; copy both from one checkpoint"
        )
    start = _setting(generation, config, "decoder_start_token_id")
    return SpeechRules(
        extractor=extractor,
        bins=config.num_mel_bins,
        frames=frames,
        positions=config.max_target_positions,
        start=start,
        forced=_forced(_setting(generation, config, "forced_decoder_ids") or ()),
        languages={
            language_code(name): int(token) for name, token in (getattr(generation, "lang_to_id", None) or {}).items()
        },
        tasks={name: int(token) for name, token in (getattr(generation, "task_to_id", None) or {}).items()},
        no_timestamps=getattr(generation, "no_timestamps_token_id", None),
        timestamps=_timestamps(generation, config),
        previous=getattr(generation, "prev_sot_token_id", None),
        language=getattr(generation, "language", None),
        task=getattr(generation, "task", None),
        suppressed=tuple(_setting(generation, config, "suppress_tokens") or ()),
        suppressed_first=tuple(_setting(generation, config, "begin_suppress_tokens") or ()),
    )


def _read_extractor(path: Path) -> Any:
    try:
        return AutoFeatureExtractor.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise OutriderError(
            f"{path} has no working feature extractor ({error}); copy its preprocessor_config.json there"
        ) from error


def _setting(generation: Any, config: Any, name: str) -> Any:
    """Return a setting of the generation config, or that of the model config if it has none."""
    value = getattr(generation, name, None)
    return getattr(config, name, None) if value is None else value


def _timestamps(generation: Any, config: Any) -> TimestampRules | None:
    """Return the rules of timestamps, whose tokens follow the one that switches them off."""
    no_timestamps = getattr(generation, "no_timestamps_token_id", None)
    end_of_text = _setting(generation, config, "eos_token_id")
    if isinstance(end_of_text, list):
        end_of_text = min(end_of_text)
    if end_of_text is None:
        end_of_text = _setting(generation, config, "bos_token_id")
    if no_timestamps is None or end_of_text is None:
        return None
    return TimestampRules(
        begin=no_timestamps + 1,
        end_of_text=end_of_text,
        no_timestamps=no_timestamps,
        max_initial=getattr(generation, "max_initial_timestamp_index", None),
    )


def _forced(pairs: Any) -> tuple[int | None, ...]:
    """Return the tokens of pairs of a position and a token, from position 1 on without a gap."""
    tokens: list[int | None] = []
    for position, token in pairs:
        if position != len(tokens) + 1:
            break
        tokens.append(token)
    return tuple(tokens)
