"""Small models for the tests: generators of numbers whose outputs are easy to predict, and tiny random networks."""

import torch

from outrider.media.models.config import AutoencoderConfig, GeneratorConfig, ScorerConfig, VideoConfig
from outrider.media.models.scorer import MatchModel
from outrider.media.models.store import Networks, save_networks
from outrider.media.models.transformer import BlockTransformer
from outrider.media.models.vae import Decoder

SHAPE = (2, 3)
CAPTION = "a red circle moving right from the top left on a black background"
VIDEO = VideoConfig(blocks=5, frames=2, channels=3, latent_size=4, frame_size=16, steps=(1.0, 0.5))
AUTOENCODER = AutoencoderConfig(encoder_width=8, width=8, full_width=4)
TARGET = GeneratorConfig(width=32, layers=2, heads=2, text_width=16, window=2, repeats=2)
DRAFTER = GeneratorConfig(width=16, layers=1, heads=2, text_width=8, window=2)


class Numbers:
    """A generator whose block is the sum of its cache, plus a number of its own."""

    def __init__(self, own, *, blocks: int = 4, shape: tuple[int, ...] = SHAPE) -> None:
        self.own = float(own)
        self.blocks = blocks
        self.latent_shape = shape
        self.calls: list[str] = []

    def open(self, prompt):
        return []

    def generate(self, block, noise, cache):
        assert block == len(cache)
        self.calls.append(f"generate {block}")
        return torch.full(self.latent_shape, self.own + sum(float(each.mean()) for each in cache))

    def commit(self, latent, cache):
        self.calls.append(f"commit {len(cache)}")
        cache.append(latent)


class Watched:
    """A generator that shows its cache, and the latents in it."""

    def __init__(self, generator) -> None:
        self.generator = generator
        self.blocks = generator.blocks
        self.latent_shape = generator.latent_shape
        self.generate = generator.generate

    def open(self, prompt):
        self.cache = self.generator.open(prompt)
        self.committed = []
        return self.cache

    def commit(self, latent, cache):
        self.generator.commit(latent, cache)
        self.committed.append(latent)


class Adder:
    """A decoder whose content is the sum of all latents so far: a wrong state would show."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.total = torch.zeros(())

    def decode(self, latent):
        self.total = self.total + latent.mean()
        return self.total.repeat(2)

    def snapshot(self):
        return self.total

    def restore(self, state):
        self.total = state


class Scores:
    """A scorer that gives the scores of a list, draft after draft. A function is called instead."""

    def __init__(self, *scores, limits=None):
        self.score_range = limits
        self.left = list(scores)
        self.seen = []

    def score(self, prompt, content):
        self.seen.append(content)
        score = self.left.pop(0)
        return score() if callable(score) else torch.as_tensor(score)


def networks(seed: int = 0) -> Networks:
    """Return tiny random networks whose outputs are not zero."""
    torch.manual_seed(seed)
    target, drafter = BlockTransformer(TARGET, VIDEO), BlockTransformer(DRAFTER, VIDEO)
    for network in (target, drafter):
        torch.nn.init.normal_(network.head.weight, std=0.3)
        for layer in network.layers:
            torch.nn.init.normal_(layer.modulation, std=0.5)
    scorers = [MatchModel(ScorerConfig(width=4, embedding=8, frames=frames)) for frames in (1, 2)]
    return Networks(
        video=VIDEO,
        target=target,
        drafter=drafter,
        decoder=Decoder(AUTOENCODER, VIDEO),
        scorer=scorers[0],
        held_out_scorer=scorers[1],
    )


def write_models(folder):
    """Write tiny random models and return their folder."""
    save_networks(networks(), AUTOENCODER, folder)
    return folder
