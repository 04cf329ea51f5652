"""A block generator with its cache and the clean blocks that it has not committed yet."""

from torch import Tensor

from outrider.errors import OutriderError
from outrider.media.contract import BlockGenerator


class BlockStream:
    """One output of a generator.

    A clean block is committed when the generator has to make a later block, so the last blocks of an output may never
    be committed. Blocks are committed one by one, in order: the cache is the same as with commits at once.

    Args:
        generator: the target or the drafter.
        prompt: what it generates.
        role: its name in messages.
        eager: commit each block at once.
    """

    def __init__(self, generator: BlockGenerator, prompt: str, *, role: str, eager: bool) -> None:
        self.commits = 0
        self._generator = generator
        self._role = role
        self._eager = eager
        self._cache = generator.open(prompt)
        self._pending: list[Tensor] = []

    def append(self, latent: Tensor) -> None:
        """Add a clean block."""
        self._pending.append(latent)
        if self._eager:
            self.catch_up()

    def catch_up(self) -> None:
        """Commit all clean blocks."""
        for latent in self._pending:
            self._generator.commit(latent, self._cache)
        self.commits += len(self._pending)
        self._pending = []

    def generate(self, block: int, noise: Tensor) -> Tensor:
        """Return the latent of a block. Raises OutriderError if it has another shape than the generator says."""
        self.catch_up()
        latent = self._generator.generate(block, noise, self._cache)
        if tuple(latent.shape) != tuple(self._generator.latent_shape):
            shape, expected = tuple(latent.shape), tuple(self._generator.latent_shape)
            raise OutriderError(
                f"the {self._role} made a latent of shape {shape} for block {block}; return the"
                f" shape of its latent_shape, {expected}"
            )
        return latent
