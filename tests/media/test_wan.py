"""Wan of diffusers at tiny random sizes: caches, streaming decoding, and the engine over both."""

import pytest
import torch

from outrider.errors import OutriderError

diffusers = pytest.importorskip("diffusers", reason='needs diffusers: pip install "outrider[wan]"')

from outrider.media import MediaEngine, QualityGate  # noqa: E402
from outrider.media.engine import block_noise  # noqa: E402
from outrider.media.wan import SELF_FORCING_STEPS, WanBlockGenerator, WanStreamDecoder  # noqa: E402
from outrider.media.wan.attention import rotate  # noqa: E402
from tests.media.made_up import Scores, Watched  # noqa: E402

FRAMES, CHANNELS, SIZE, BLOCKS, TEXT = 3, 16, 4, 4, 12


def transformer(layers=2, heads=2, seed=0):
    torch.manual_seed(seed)
    model = diffusers.WanTransformer3DModel(
        num_attention_heads=heads,
        attention_head_dim=12,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        text_dim=TEXT,
        freq_dim=16,
        ffn_dim=32,
        num_layers=layers,
        rope_max_seq_len=32,
    )
    return model.eval()


def encode(prompt):
    return torch.randn(5, TEXT, generator=torch.Generator().manual_seed(len(prompt)))


def generator(model=None, **options):
    sizes = {"blocks": BLOCKS, "frames": FRAMES, "height": SIZE, "width": SIZE, **options}
    return WanBlockGenerator(model or transformer(), encode, **sizes)


@pytest.fixture(scope="module")
def vae():
    torch.manual_seed(1)
    return diffusers.AutoencoderKLWan(base_dim=4, z_dim=CHANNELS, num_res_blocks=1).eval()


def latents(count=BLOCKS):
    return [block_noise((FRAMES, CHANNELS, SIZE, SIZE), 0, block) for block in range(count)]


@torch.inference_mode()
def full_pass(generator, blocks, prompt):
    """The keys and values of all layers, layer after layer over all blocks: the plain reference of a cache."""
    model = generator._model
    text = encode(prompt)[None]
    _, projected, states, _ = model.condition_embedder(torch.tensor([0.0]), text, None)
    projected = projected.unflatten(1, (6, -1))
    xs = [model.patch_embedding(block.transpose(0, 1)[None]).flatten(2).transpose(1, 2) for block in blocks]
    layers = []
    for layer in model.blocks:
        shift, scale, gate, c_shift, c_scale, c_gate = (layer.scale_shift_table + projected).chunk(6, dim=1)
        keys, values = [], []
        for number, x in enumerate(xs):
            attn = layer.attn1
            normed = layer.norm1(x) * (1 + scale) + shift
            rotation = generator._rotation(number)
            queries, key = (
                rotate(norm(project(normed))[0].unflatten(-1, (attn.heads, -1)), rotation)
                for norm, project in ((attn.norm_q, attn.to_q), (attn.norm_k, attn.to_k))
            )
            keys.append(key.transpose(0, 1))
            values.append(attn.to_v(normed)[0].unflatten(-1, (attn.heads, -1)).transpose(0, 1))
            first = max(0, number - generator._window)
            attended = torch.nn.functional.scaled_dot_product_attention(
                queries.transpose(0, 1)[None],
                torch.cat(keys[first:], dim=1)[None],
                torch.cat(values[first:], dim=1)[None],
            )
            x = x + attn.to_out[0](attended.transpose(1, 2).flatten(2)) * gate
            x = x + layer.attn2(layer.norm2(x), states, None, None)
            xs[number] = x + layer.ffn(layer.norm3(x) * (1 + c_scale) + c_shift) * c_gate
        layers.append(list(zip(keys, values, strict=True)))
    return layers


@pytest.mark.parametrize("window", [None, 2])
def test_commits_give_the_cache_of_a_full_pass(window):
    wan = generator(window=window)
    cache = wan.open("a cat")
    for latent in latents():
        wan.commit(latent, cache)
    expected = full_pass(wan, latents(), "a cat")
    held = cache.blocks.blocks()
    assert len(held) == (window or BLOCKS)
    for number, block in enumerate(held, start=BLOCKS - len(held)):
        for layer, (keys, values) in enumerate(block):
            assert torch.equal(keys, expected[layer][number][0])
            assert torch.equal(values, expected[layer][number][1])


def test_the_first_block_is_that_of_the_plain_model():
    plain = transformer()
    wan = generator(transformer())
    (x,) = latents(1)
    with torch.no_grad():
        (expected,) = plain(x.transpose(0, 1)[None], torch.tensor([625.0]), encode("a cat")[None], return_dict=False)
    with torch.inference_mode():
        velocity, _ = wan._pass(x, 0.625, wan.open("a cat"))
    torch.testing.assert_close(velocity, expected[0].transpose(0, 1), atol=1e-5, rtol=1e-5)


def test_generating_takes_the_steps_and_leaves_the_cache():
    wan = generator()
    levels = []
    wan._model.register_forward_pre_hook(lambda _, inputs: levels.append(round(float(inputs[1]), 1)))
    cache = wan.open("a cat")
    wan.commit(latents(1)[0], cache)
    before = cache.blocks.read(0)[0].clone()
    once, again = (wan.generate(1, latents(2)[1], cache) for _ in range(2))
    assert torch.equal(once, again)
    assert torch.equal(cache.blocks.read(0)[0], before)
    assert levels == [0.0, *[round(1000 * each, 1) for each in SELF_FORCING_STEPS] * 2]
    assert not torch.equal(once, wan.generate(0, latents(2)[1], wan.open("a cat")))
    with pytest.raises(OutriderError, match="block 2 follows 1 committed blocks"):
        wan.generate(2, latents(1)[0], cache)


def test_streaming_decodes_like_the_whole_video(vae):
    decoder = WanStreamDecoder(vae)
    streamed = torch.cat([decoder.decode(latent) for latent in latents(3)])
    assert streamed.shape == (1 + 4 * 8, 3, 8 * SIZE, 8 * SIZE)
    whole = torch.cat(latents(3)).transpose(0, 1)[None] * decoder._deviation + decoder._mean
    with torch.no_grad():
        expected = vae.decode(whole, return_dict=False)[0][0].transpose(0, 1) / 2 + 0.5
    torch.testing.assert_close(streamed, expected, atol=1e-5, rtol=1e-5)


def test_restoring_the_decoder_leaves_no_trace(vae):
    decoder = WanStreamDecoder(vae)
    first, draft, second = latents(3)
    decoder.decode(first)
    state = decoder.snapshot()
    kept = [each.clone() if torch.is_tensor(each) else each for each in state]
    expected = decoder.decode(second)
    decoder.restore(state)
    assert not torch.equal(decoder.decode(draft), expected)
    decoder.restore(state)
    assert torch.equal(decoder.decode(second), expected)
    for now, then in zip(state, kept, strict=True):
        assert torch.equal(now, then) if torch.is_tensor(now) else now == then
    decoder.reset()
    start = decoder.decode(first)
    decoder.restore(None)
    assert torch.equal(decoder.decode(first), start)


def test_the_engine_routes_wan_blocks(vae):
    target, drafter = Watched(generator()), generator(transformer(layers=1, seed=3))
    engine = MediaEngine(target, drafter, WanStreamDecoder(vae), Scores([0.9], [0.1]))
    blocks = list(engine.stream("a cat", QualityGate(0.5), blocks=3))
    assert [block.maker.value for block in blocks] == ["target", "drafter", "target"]
    assert [len(block.content) for block in blocks] == [9, 12, 12]
    committed = target.committed
    assert len(committed) == 2
    assert all(map(torch.equal, committed, [block.latent for block in blocks]))
    expected = full_pass(target.generator, committed, "a cat")
    for number, block in enumerate(target.cache.blocks.blocks()):
        for layer, (keys, values) in enumerate(block):
            assert torch.equal(keys, expected[layer][number][0])
            assert torch.equal(values, expected[layer][number][1])


@pytest.mark.parametrize(
    ("options", "message"),
    [({"height": 3}, r"do not fit patches of \(1, 2, 2\)"), ({"blocks": 11}, "beyond the model's 32")],
)
def test_mistakes_are_one_line(options, message):
    with pytest.raises(OutriderError, match=message):
        generator(**options)
