"""The target for speech models: the encoder reads the features of a recording once, the decoder writes the text."""

from collections.abc import Iterable

import torch

from outrider.core.types import AudioFeatures, Batch, Draft, Scores, SequenceState, SpeechOutput
from outrider.errors import OutriderError
from outrider.models.torch.checkpoint import Checkpoint
from outrider.models.torch.encoder_decoder_target import EncoderDecoderTarget
from outrider.models.torch.speech.timestamps import OutputEnd, TimestampRules

_NO_AUDIO = "this target is a speech model and a request has no audio; give each request a source"


class SpeechTarget(EncoderDecoderTarget):
    """An encoder-decoder model of speech, such as Whisper.

    The source of a sequence is `Request.source_features`. The tokens that the checkpoint suppresses have the logit
    -inf, as in `transformers.generate`, and so do the tokens that the rules of `Request.speech_output` forbid.
    Sequences that no user has requested have the logits of the model.
    """

    def __init__(self, checkpoint: Checkpoint, *, slots: int, context: int) -> None:
        super().__init__(checkpoint, slots=slots, context=context)
        assert checkpoint.source is not None
        assert checkpoint.source.speech is not None
        rules = checkpoint.source.speech
        self._measured: AudioFeatures = rules.silence()
        self._dtype = checkpoint.dtype
        self._timestamps = rules.timestamps
        self._suppressed = self._ids(rules.suppressed)
        self._suppressed_first = self._ids(rules.suppressed_first)
        languages = set(rules.languages.values())
        self._no_languages = self._ids(token for token in range(self.vocab) if token not in languages)

    def score(self, batch: Batch, draft: Draft, first: int = -1) -> Scores:
        scores = super().score(batch, draft, first)
        for b, seq in enumerate(batch.seqs):
            if seq.request.id < 0:
                continue
            logits = scores.logits[b]  # a view
            if seq.request.speech_output is SpeechOutput.LANGUAGE:
                logits[:, self._no_languages] = -torch.inf
                continue
            logits[:, self._suppressed] = -torch.inf
            # Column 0 has the logits after the last committed token, unless the pass leaves it out.
            if first < 0 and seq.num_output_tokens == 0:
                logits[0, self._suppressed_first] = -torch.inf
            if seq.request.speech_output is SpeechOutput.TIMESTAMPS and self._timestamps is not None:
                ends = _node_ends(self._timestamps, seq, draft, b)[1 + first :]  # of the nodes without padding
                logits[: len(ends)] = self._timestamps.mask(logits[: len(ends)], ends)
        return scores

    def _ids(self, tokens: Iterable[int]) -> torch.Tensor:
        return torch.tensor(sorted({*tokens}), dtype=torch.int64, device=self.device)

    def _source_of(self, seq: SequenceState) -> AudioFeatures:
        features = seq.request.source_features
        if features is None:
            if seq.request.id >= 0:
                raise OutriderError(_NO_AUDIO)
            return self._measured
        return features

    def _run_encoder(self, source: object) -> torch.Tensor:
        assert isinstance(source, AudioFeatures)
        features = source.values[None].to(self.device, self._dtype)
        encoded: torch.Tensor = self._encoder(features).last_hidden_state
        return encoded


def _node_ends(rules: TimestampRules, seq: SequenceState, draft: Draft, b: int) -> list[OutputEnd]:
    """Return the end of the output at the last committed token, then at each draft token of sequence b."""
    ends = [rules.end_of(seq.token_ids[len(seq.request.prompt_token_ids) :])]
    width = draft.width[b]
    if width:
        parents = draft.parent[b, :width].tolist()
        for token, parent in zip(draft.host_tokens()[b][:width], parents, strict=True):
            ends.append(rules.extend(ends[1 + parent], token))
    return ends
