"""The cache of encoder-decoder models."""

import torch

from outrider.models.cache.static import StaticCache
from outrider.models.torch.encoder_decoder.sources import Sources


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
