"""Trains targets and drafters with teacher forcing: each noisy block attends to the clean blocks before it."""

import math
from pathlib import Path

import torch
from torch import Tensor

from outrider.media.models.config import BlockConfig, GeneratorConfig
from outrider.media.models.transformer import CLEAN, BlockTransformer, KeyValue, Layer
from recipes.media.clips import Clips
from recipes.media.loop import train

_CONTEXT_NOISE = 0.25  # the largest deviation of noise on clean blocks, so that small errors of the past are forgiven


def train_generator(
    config: GeneratorConfig,
    content: BlockConfig,
    clips: Clips,
    *,
    steps: int,
    batch: int,
    lr: float,
    file: Path,
    seed: int,
) -> BlockTransformer:
    """Return a trained network.

    Args:
        config: its sizes.
        content: sizes of the latents.
        clips: whole outputs.
        steps: how many.
        batch: clips of a step.
        lr: peak learning rate.
        file: where the training is saved.
        seed: of the weights and the batches.
    """
    torch.manual_seed(seed)
    network = BlockTransformer(config, content)

    def loss(generator: torch.Generator) -> Tensor:
        rows = torch.randint(len(clips.latents), (batch,), generator=generator)
        blocks = clips.latents[rows].float().view(batch, -1, *content.latent_shape)
        return flow_loss(network, blocks, clips.tokens[rows], generator)

    train(network, loss, steps=steps, lr=lr, file=file, seed=seed)
    return network


def flow_loss(network: BlockTransformer, blocks: Tensor, tokens: Tensor, generator: torch.Generator) -> Tensor:
    """Return the error of the predicted clean blocks, at random noise levels of the sampler.

    Args:
        network: the network.
        blocks: clean latents, (n, blocks, frames, channels, rows, columns), from the first block of an output.
        tokens: the captions, (n, words).
        generator: of the noise and its levels.
    """
    clean = network.to_tokens(blocks)
    steps = torch.tensor(network.video.steps)
    levels = steps[torch.randint(len(steps), clean.shape[:2], generator=generator)]
    shape = levels[..., None, None]
    noisy = (1 - shape) * clean + shape * torch.randn(clean.shape, generator=generator)
    spread = _CONTEXT_NOISE * torch.rand(clean.shape[:2], generator=generator)[..., None, None]
    context = clean + spread * torch.randn(clean.shape, generator=generator)
    with torch.autocast("cpu", torch.bfloat16):
        predicted = teacher_forced(network, context[:, :-1], noisy, levels, tokens)
    return ((predicted.float() - clean).square() / shape).mean()


def teacher_forced(network: BlockTransformer, context: Tensor, noisy: Tensor, levels: Tensor, tokens: Tensor) -> Tensor:
    """Return the clean values of all noisy blocks, in one pass.

    Args:
        network: the network.
        context: clean blocks, (n, blocks - 1, tokens, values).
        noisy: noisy blocks, (n, blocks, tokens, values).
        levels: their noise levels, (n, blocks).
        tokens: the captions, (n, words).
    """
    count = noisy.shape[1]
    text = network.read_text(tokens)
    x = network.enter(torch.cat([context, noisy], dim=1), text.condition[:, None])
    all_levels = torch.cat([torch.full_like(levels[:, 1:], CLEAN), levels], dim=1)
    modulations = network.modulations(all_levels[..., None])
    cos, sin = (
        torch.cat([each[: -network.block_tokens], each]).view(2 * count - 1, 1, network.block_tokens, -1).bfloat16()
        for each in network.rotation(0, count * network.video.frames)
    )
    for i in range(network.depth):
        layer = network.layer(i)
        queries, keys, values = layer.project(x, modulations[i], (cos, sin))
        attended = _attend(layer, queries, keys.to(values.dtype), values, text.layers[i], network.config.window)
        x = layer.finish(x, attended, modulations[i])
    return network.leave(x[:, count - 1 :])


def _attend(layer: Layer, queries: Tensor, keys: Tensor, values: Tensor, text: KeyValue, window: int) -> Tensor:
    """Return what each block attends to: the caption, the clean blocks of its window, and itself.

    Args:
        layer: the layer.
        queries: (n, clean blocks and noisy blocks, heads, tokens, channels of a head).
        keys: of the same shape.
        values: of the same shape.
        text: keys and values of the captions.
        window: how many clean blocks before it a block attends to.
    """
    num_clean = queries.shape[1] // 2
    queries, keys, values = (part.to(values.dtype) for part in (queries, keys, values))
    all_keys, all_values = keys.unbind(1), values.unbind(1)
    text_keys, text_values = (part.to(values.dtype) for part in text)
    scale = math.sqrt(queries.shape[-1])  # queries and keys are unit vectors
    attended = []
    for i, query in enumerate(queries.unbind(1)):
        place = i if i < num_clean else i - num_clean
        seen = [*range(max(0, place - window), place), i]
        own_keys = torch.cat([text_keys, *(all_keys[j] for j in seen)], dim=2)
        own_values = torch.cat([text_values, *(all_values[j] for j in seen)], dim=2)
        # Plain products: on a CPU the backward pass of torch's fused attention takes five times as long.
        weights = (scale * query @ own_keys.transpose(-1, -2)).softmax(-1, dtype=query.dtype)
        attended.append(weights @ own_values)
    return torch.stack(attended, dim=1)
