"""A block transformer as a `BlockGenerator`: a few passes generate a block, and one pass commits a clean block."""

import torch
from torch import Tensor

from outrider.errors import OutriderError
from outrider.media.models.cache import BlockCache
from outrider.media.models.transformer import CLEAN, BlockTransformer, KeyValue, Text


class TransformerCache(BlockCache):
    """The cache of a `TransformerGenerator`: past blocks, and what the caption adds."""

    def __init__(self, text: Text, window: int) -> None:
        super().__init__(text.layers, window)
        self.condition = text.condition


class TransformerGenerator:
    """A target or a drafter whose network is a `BlockTransformer`, for video or audio.

    Each pass has the shape of one block, so a block's arithmetic does not depend on how many blocks
    are committed together.

    Args:
        network: the weights.
    """

    def __init__(self, network: BlockTransformer) -> None:
        self.network = network.eval()
        self.blocks = network.video.blocks
        self.latent_shape: tuple[int, ...] = network.video.latent_shape
        with torch.inference_mode():
            levels = torch.tensor([*network.video.steps, CLEAN])
            self._modulations = list(map(network.modulations, levels))
            self._rotations = [
                network.rotation(block * network.video.frames, network.video.frames) for block in range(self.blocks)
            ]

    @torch.inference_mode()
    def open(self, prompt: str) -> TransformerCache:
        """Return the empty cache of an output.

        Raises:
            OutriderError: the caption is in words that the model does not know.
        """
        text = self.network.read_text(torch.tensor(self.network.video.language.tokens(prompt)))
        return TransformerCache(text, self.network.config.window)

    @torch.inference_mode()
    def generate(self, block: int, noise: Tensor, cache: TransformerCache) -> Tensor:
        """Return the latent of a block, after the committed ones.

        Euler steps from the `noise` along the flow; each predicts the clean block. The cache does not change.
        """
        self._check(block, cache)
        network = self.network
        x = network.to_tokens(noise)
        levels = (*network.video.steps, CLEAN)
        for step, level in enumerate(levels[:-1]):
            clean = self._denoise(x, block, step, cache)
            x = clean + (levels[step + 1] / level) * (x - clean)
        return network.to_latents(x)

    @torch.inference_mode()
    def commit(self, latent: Tensor, cache: TransformerCache) -> None:
        """Write a clean block into the cache, in one pass. The last layer computes only its keys and values."""
        block = cache.committed
        self._check(block, cache)
        network = self.network
        modulations = self._modulations[-1]
        x = network.enter(network.to_tokens(latent), cache.condition)
        written: list[KeyValue] = []
        last = network.depth - 1
        for i in range(last):
            queries, keys, values = network.layer(i).project(x, modulations[i], self._rotations[block])
            written.append((keys, values))
            x = self._layer(i, x, queries, keys, values, modulations[i], cache)
        written.append(network.layer(last).keys_and_values(x, modulations[last], self._rotations[block]))
        cache.append(written)

    def _denoise(self, x: Tensor, block: int, step: int, cache: TransformerCache) -> Tensor:
        modulations = self._modulations[step]
        x = self.network.enter(x, cache.condition)
        for i in range(self.network.depth):
            layer = self.network.layer(i)
            queries, keys, values = layer.project(x, modulations[i], self._rotations[block])
            x = self._layer(i, x, queries, keys, values, modulations[i], cache)
        return self.network.leave(x)

    def _layer(
        self,
        index: int,
        x: Tensor,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        modulation: tuple[Tensor, ...],
        cache: TransformerCache,
    ) -> Tensor:
        layer = self.network.layer(index)
        past_keys, past_values = cache.read(index)
        all_keys, all_values = torch.cat([past_keys, keys], dim=1), torch.cat([past_values, values], dim=1)
        # torch's attention wants a batch.
        attended = layer.attend(queries[None], all_keys[None], all_values[None])[0]
        return layer.finish(x, attended, modulation)

    def _check(self, block: int, cache: TransformerCache) -> None:
        if block != cache.committed:
            raise OutriderError(f"block {block} follows {cache.committed} committed blocks; commit the blocks in order")
        if block >= self.blocks:
            raise OutriderError(f"block {block} is beyond the {self.blocks} blocks of an output; generate fewer blocks")
