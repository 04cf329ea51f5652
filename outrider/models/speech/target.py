"""The target for speech models: the encoder reads the features of a recording once, the decoder writes the text."""

from __future__ import annotations

import torch

from outrider.core.types import AudioFeatures, Batch, Draft, Scores, SequenceState
from outrider.errors import OutriderError
from outrider.models.checkpoint import Checkpoint
from outrider.models.encoder_decoder_target import EncoderDecoderTarget

_NO_AUDIO = "this target is a speech model and a request has no audio; give each request a source"


class SpeechTarget(EncoderDecoderTarget):
    """An encoder-decoder model of speech, such as Whisper.

    The source of a sequence is `Request.source_features`. The tokens that the checkpoint suppresses have the logit
    -inf, as in `transformers.generate`. Sequences that no user has requested have the logits of the model.
    """

    def __init__(self, checkpoint: Checkpoint, *, slots: int, context: int) -> None:
        super().__init__(checkpoint, slots=slots, context=context)
        assert checkpoint.source is not None
        assert checkpoint.source.speech is not None
        rules = checkpoint.source.speech
        self._measured = rules.silence()
        self._dtype = checkpoint.dtype
        self._suppressed = torch.tensor(sorted(set(rules.suppressed)), dtype=torch.int64, device=self.device)
        first = sorted({*rules.suppressed_first})
        self._suppressed_first = torch.tensor(first, dtype=torch.int64, device=self.device)

    def score(self, batch: Batch, draft: Draft, first: int = -1) -> Scores:
        scores = super().score(batch, draft, first)
        requested = [b for b, seq in enumerate(batch.seqs) if seq.request.id >= 0]
        # Column 0 has the logits after the last committed token, unless the pass leaves it out.
        beginning = [b for b in requested if batch.seqs[b].num_output_tokens == 0] if first < 0 else []
        for b in requested:
            scores.logits[b, :, self._suppressed] = -torch.inf
        for b in beginning:
            scores.logits[b, 0, self._suppressed_first] = -torch.inf
        return scores

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
