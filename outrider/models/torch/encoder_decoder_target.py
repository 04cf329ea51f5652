"""The target for encoder-decoder models: the encoder reads a source once, and the decoder writes the output."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutput

from outrider.core.cache import Layout
from outrider.core.types import Batch, Draft, Scores, SequenceState, SharedWeights
from outrider.errors import OutriderError
from outrider.models.cache.static import StaticCache
from outrider.models.torch.attention import CacheReader
from outrider.models.torch.attention_target import AttentionTarget
from outrider.models.torch.checkpoint import Checkpoint
from outrider.models.torch.encoder_decoder.layers import DecoderPass, replace_attention, replace_positions
from outrider.models.torch.encoder_decoder.shared_weights import shared_weights
from outrider.models.torch.encoder_decoder.sources import Sources
from outrider.models.torch.submodel import layer_stack


class EncoderDecoderCache(StaticCache):
    """A `StaticCache` for the self-attention of the decoder, and the keys and values of the sources.

    Requests share no prefixes: the keys and values of a decoder depend on the source as well as on
    the tokens, and the prompt of a decoder is short.
    """

    def __init__(self, *, slots: int, capacity: int, device: torch.device, layers: int, reserve: int) -> None:
        self.sources = Sources(slots, device, layers)
        super().__init__(slots=slots, capacity=capacity, device=device, layers=layers, reserve=reserve)

    def forget(self) -> None:
        super().forget()
        self.sources.forget()

    def set_prefix_caching(self, on: bool) -> None:
        pass

    def bytes(self) -> int:
        return super().bytes() + self.sources.bytes()


_NO_SELF_DRAFT = "an encoder-decoder target cannot draft with its own layers; use ngram, suffix or draft:DIR"
_NO_SOURCE = "this target is an encoder-decoder model and a request has no source; give each request a source"
_MEASURED_SOURCE = (0,) * 32  # the source of a sequence that no user has requested, for measurements


class EncoderDecoderTarget(AttentionTarget):
    """An encoder-decoder model, such as T5 or BART.

    The first pass of a sequence runs the encoder over its source, `Request.source_token_ids`, and
    keeps the keys and values of the cross-attention. The tokens of all sequences run through the
    decoder as one packed batch. Drafts may be trees.
    """

    _memory: EncoderDecoderCache
    _prepacks = False  # T5 reads `weight.dtype` in every pass, and a packed layer unpacks its weight for that

    def __init__(self, checkpoint: Checkpoint, *, slots: int, context: int) -> None:
        super().__init__(checkpoint, slots=slots, context=context)
        self._encoder = self._model.get_encoder()
        decoder = self._model.get_decoder()
        self._embeddings = decoder.get_input_embeddings().num_embeddings
        self._pass = DecoderPass(self._memory.sources)
        self._crosses = replace_attention(layer_stack(self._model)[1], self._pass, self._model.config.model_type)
        replace_positions(decoder, self._pass)
        self._takes_positions = "decoder_position_ids" in inspect.signature(self._model.forward).parameters
        self._dummy: torch.Tensor | None = None  # [1, 1, H], in place of the encoder's output

    def score(self, batch: Batch, draft: Draft, first: int = -1) -> Scores:
        for seq in batch.seqs:
            self._encode(seq)
        return super().score(batch, draft, first)

    def share_weights(self) -> SharedWeights:
        return shared_weights(self._model, layer_stack(self._model)[1])

    def make_submodel(self, layers: Sequence[int]) -> AttentionTarget:
        raise OutriderError(_NO_SELF_DRAFT)

    def make_requantized(self, bits: int) -> AttentionTarget:
        raise OutriderError(_NO_SELF_DRAFT)

    def _exporting_module(self, layer: int) -> torch.nn.Module:
        """Return the decoder itself for its last layer: the exported states of that layer are after the final norm."""
        if layer < self.layers - 1:
            return super()._exporting_module(layer)
        decoder: torch.nn.Module = self._model.get_decoder()
        return decoder

    def _make_cache(self, **settings: Any) -> EncoderDecoderCache:
        return EncoderDecoderCache(**settings)

    def _encode(self, seq: SequenceState) -> None:
        """Run the encoder over the source of a sequence, if its slot does not hold that source yet.

        Each source runs alone, so that its keys and values do not depend on other requests.
        """
        source = self._source_of(seq)
        sources = self._memory.sources
        if sources.holds(seq.slot, source):
            return
        encoded = self._run_encoder(source)
        sources.begin(seq.slot, encoded.shape[1])
        for cross in self._crosses:
            cross.encode(seq.slot, encoded)
        self._dummy = encoded.new_zeros(1, 1, encoded.shape[-1])
        sources.end(seq.slot, source)

    def _source_of(self, seq: SequenceState) -> object:
        """Return the source of a sequence. Equal sources are encoded once."""
        source = seq.request.source_token_ids
        if source:
            return source
        if seq.request.id >= 0:
            raise OutriderError(_NO_SOURCE)
        return _MEASURED_SOURCE

    def _run_encoder(self, source: object) -> torch.Tensor:
        """Return the output of the encoder [1, S, H]."""
        embeddings = self._encoder.get_input_embeddings().num_embeddings
        tokens = torch.tensor([source], device=self.device).clamp(0, embeddings - 1)
        encoded: torch.Tensor = self._encoder(
            input_ids=tokens, attention_mask=torch.ones_like(tokens)
        ).last_hidden_state
        return encoded

    def _forward(self, layout: Layout, reader: CacheReader) -> torch.Tensor:
        tokens = layout.tokens.clamp(0, self._embeddings - 1)[None]
        positions: Mapping[str, Any] = {"decoder_position_ids": layout.positions[None]} if self._takes_positions else {}
        with self._pass.running(reader):
            out = self._model(
                decoder_input_ids=tokens,
                decoder_attention_mask=torch.ones_like(tokens),
                encoder_outputs=BaseModelOutput(last_hidden_state=self._dummy),
                attention_mask=torch.ones_like(tokens[:, :1]),
                use_cache=False,
                **positions,
            )
        return out.logits[0, layout.keep].float()  # type: ignore[no-any-return]
