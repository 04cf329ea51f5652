"""The embedded video models: caches bit for bit, streaming decoding, captions, files."""

import json
import random

import pytest
import torch

from outrider.errors import OutriderError
from outrider.media import QualityGate, TargetOnly, load_models
from outrider.media.models.captions import LANGUAGE, parse_caption, random_scene
from outrider.media.models.generator import TransformerGenerator
from outrider.media.models.scorer import MatchScorer, stack_frames
from outrider.media.models.transformer import CLEAN
from outrider.media.models.vae import StreamingDecoder
from recipes.media.generators import teacher_forced
from tests.media.made_up import CAPTION, VIDEO, Watched, networks, write_models

NETWORKS = networks()


def clean_blocks(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(VIDEO.latent_shape, generator=generator) for _ in range(count)]


@torch.inference_mode()
def full_pass(network, latents, caption):
    """The keys and values of all layers, layer after layer over all blocks: the plain reference of a cache.

    A block's products have the shape of a block, as in `TransformerGenerator`, but no cache is used.
    """
    condition, text = network.read_text(torch.tensor(parse_caption(caption).tokens()))
    modulations = network.modulations(torch.tensor(CLEAN))
    rotations = [network.rotation(block * VIDEO.frames, VIDEO.frames) for block in range(len(latents))]
    states = [network.enter(network.to_tokens(latent), condition) for latent in latents]
    layers = []
    for i in range(network.depth):
        layer = network.layer(i)
        projected = [layer.project(x, modulations[i], rotation) for x, rotation in zip(states, rotations, strict=True)]
        layers.append([(keys, values) for _, keys, values in projected])
        for block, (queries, _, _) in enumerate(projected):
            seen = projected[max(0, block - network.config.window) : block + 1]
            keys = torch.cat([text[i][0], *(keys for _, keys, _ in seen)], dim=1)
            values = torch.cat([text[i][1], *(values for _, _, values in seen)], dim=1)
            attended = layer.attend(queries[None], keys[None], values[None])[0]
            states[block] = layer.finish(states[block], attended, modulations[i])
    return layers


def assert_cache(cache, network, latents, caption):
    expected = full_pass(network, latents, caption)
    held = cache.blocks()
    first = len(latents) - len(held)
    assert cache.committed == len(latents)
    for number, block in enumerate(held, start=first):
        for i, (keys, values) in enumerate(block):
            assert torch.equal(keys, expected[i][number][0])
            assert torch.equal(values, expected[i][number][1])


@pytest.mark.parametrize("network", [NETWORKS.target, NETWORKS.drafter], ids=["target", "drafter"])
def test_commits_give_the_cache_of_a_full_pass(network):
    generator = TransformerGenerator(network)
    latents = clean_blocks(4)
    cache = generator.open(CAPTION)
    for number, latent in enumerate(latents, start=1):
        generator.commit(latent, cache)
        assert_cache(cache, network, latents[:number], CAPTION)
    assert len(cache.blocks()) == network.config.window


@pytest.mark.parametrize("eager", [False, True])
def test_accepted_blocks_give_the_cache_of_a_full_pass(tmp_path, eager):
    models = load_models(write_models(tmp_path), eager_commits=eager)
    models.engine.target = Watched(models.engine.target)
    models.engine.drafter = Watched(models.engine.drafter)
    latents = [block.latent for block in models.engine.stream(CAPTION, QualityGate(0.0), seed=3)]
    for watched in (models.engine.target, models.engine.drafter):
        count = len(watched.committed)
        assert count == len(latents) if eager else count < len(latents)
        assert_cache(watched.cache, watched.generator.network, latents[:count], CAPTION)


def test_generating_leaves_the_cache_as_it_is():
    generator = TransformerGenerator(NETWORKS.target)
    cache = generator.open(CAPTION)
    for latent in clean_blocks(2):
        generator.commit(latent, cache)
    noise = clean_blocks(1, seed=9)[0]
    once, again = generator.generate(2, noise, cache), generator.generate(2, noise, cache)
    assert torch.equal(once, again)
    assert_cache(cache, NETWORKS.target, clean_blocks(2), CAPTION)
    other = generator.open(CAPTION.replace("red", "green"))
    for latent in clean_blocks(2):
        generator.commit(latent, other)
    assert not torch.equal(once, generator.generate(2, noise, other))


def test_blocks_are_in_order():
    generator = TransformerGenerator(NETWORKS.target)
    cache = generator.open(CAPTION)
    with pytest.raises(OutriderError, match="block 1 follows 0 committed blocks"):
        generator.generate(1, clean_blocks(1)[0], cache)
    for latent in clean_blocks(VIDEO.blocks):
        generator.commit(latent, cache)
    with pytest.raises(OutriderError, match="beyond the 5 blocks"):
        generator.commit(latent, cache)


def test_training_and_generating_compute_the_same():
    network = NETWORKS.target
    assert network.config.window < VIDEO.blocks - 1  # so the first block leaves the window
    latents = torch.stack(clean_blocks(VIDEO.blocks))
    tokens = torch.tensor([parse_caption(CAPTION).tokens()])
    noisy = torch.stack(clean_blocks(VIDEO.blocks, seed=1))
    levels = torch.full((1, VIDEO.blocks), 0.5)
    with torch.no_grad():
        blocks, rough = network.to_tokens(latents)[None], network.to_tokens(noisy)[None]
        # teacher_forced rounds attention to the type of the values, which is float32 without autocast.
        trained = teacher_forced(network, blocks[:, :-1], rough, levels, tokens)[0]
    generator = TransformerGenerator(network)
    cache = generator.open(CAPTION)
    for block in range(VIDEO.blocks):
        with torch.inference_mode():
            predicted = generator._denoise(rough[0, block], block, 1, cache)
        torch.testing.assert_close(predicted, trained[block], atol=2e-2, rtol=0)
        generator.commit(latents[block], cache)


def test_patches_and_back():
    latents = torch.randn(3, *VIDEO.latent_shape)
    tokens = NETWORKS.target.to_tokens(latents)
    assert tokens.shape == (3, VIDEO.frames * 4, VIDEO.channels * 4)
    assert torch.equal(NETWORKS.target.to_latents(tokens), latents)
    # The first token is the upper left patch of the first frame.
    assert torch.equal(tokens[0, 0].view(VIDEO.channels, 2, 2), latents[0, 0, :, :2, :2])


def test_streaming_gives_the_frames_of_decoding_at_once():
    decoder = StreamingDecoder(NETWORKS.decoder)
    blocks = clean_blocks(3)
    streamed = torch.cat([decoder.decode(block) for block in blocks])
    decoder.reset()
    torch.testing.assert_close(streamed, decoder.decode(torch.cat(blocks)))


def test_restoring_the_decoder_leaves_no_trace():
    decoder = StreamingDecoder(NETWORKS.decoder)
    first, draft, second = clean_blocks(3)
    decoder.decode(first)
    state = decoder.snapshot()
    expected = decoder.decode(second)
    decoder.restore(state)
    other = decoder.decode(draft)
    decoder.restore(state)
    again = decoder.decode(second)
    assert not torch.equal(other, expected)
    assert torch.equal(again, expected)


def test_scores_are_probabilities_of_frames():
    scorer = MatchScorer(NETWORKS.scorer)
    frames = torch.rand(4, 3, 16, 16)
    scores = scorer.score(CAPTION, frames)
    assert scores.shape == (4,)
    assert bool(((scores > 0) & (scores < 1)).all())
    assert torch.allclose(scorer.score(CAPTION, frames[1:2]), scores[1:2])
    assert not torch.allclose(scorer.score(CAPTION.replace("red", "cyan"), frames), scores)


def test_frames_are_stacked_newest_first():
    frames = torch.arange(4.0).view(4, 1, 1, 1)
    assert stack_frames(frames, 1) is frames
    assert stack_frames(frames, 2)[:, :, 0, 0].tolist() == [[0, 0], [1, 0], [2, 1], [3, 2]]


def test_captions():
    scene = random_scene(random.Random(1))
    assert parse_caption(scene.caption()) == scene
    assert parse_caption("Red circle, right, top left, black.") == parse_caption(CAPTION)
    captions = LANGUAGE.random_captions(50, 3)
    assert len(set(captions)) == 50
    assert captions == LANGUAGE.random_captions(50, 3)
    assert parse_caption(CAPTION).tokens() == [0, 6, 10, 14, 17, 20]
    with pytest.raises(OutriderError, match="but there are 2592"):
        LANGUAGE.random_captions(2593, 0)


@pytest.mark.parametrize(
    ("caption", "message"),
    [
        ("", "has another form than the models know; use: a COLOR SHAPE"),
        ("a red circle", "has another form"),
        (CAPTION.replace("right", "sideways"), "has 'sideways' in place of one of: right, left, up, down"),
        (CAPTION.replace("circle", "dog"), "has 'dog' in place of one of: circle, square, triangle, cross"),
        (CAPTION.replace("red", "circle"), "has 'circle' in place of one of: red"),
    ],
)
def test_wrong_captions(caption, message):
    with pytest.raises(OutriderError, match=message):
        parse_caption(caption)


def test_a_set_of_models_is_written_and_read(tmp_path):
    models = load_models(write_models(tmp_path))
    assert models.video == VIDEO
    assert models.compute_ratio > 8
    weights = NETWORKS.target.state_dict()
    for name, weight in models.engine.target.network.state_dict().items():
        assert torch.equal(weight, weights[name].bfloat16().float()), name
    result = models.engine.generate(CAPTION, TargetOnly(), blocks=2)
    assert result.content.shape == (4, 3, 16, 16)


def test_broken_sets_of_models(tmp_path):
    with pytest.raises(OutriderError, match=r"has no readable config\.json"):
        load_models(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(OutriderError, match=r"has no readable config\.json"):
        load_models(tmp_path)
    write_models(tmp_path)
    (tmp_path / "target.safetensors").write_bytes(b"no weights")
    with pytest.raises(OutriderError, match="cannot be loaded"):
        load_models(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "format": "other"}))
    with pytest.raises(OutriderError, match="is of format other"):
        load_models(tmp_path)
