"""The mixture of experts: a Mixtral model whose attention, norms and tables are those of a Llama model.

Its experts start as parts of the dense MLPs (sparse upcycling, Komatsuzaki et al. 2023). The inputs of an MLP are
clustered, and an expert takes the channels that matter most for one cluster (MoEfication, Zhang et al. 2022).
"""

from typing import Any

import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

_COPIED = ("self_attn", "input_layernorm", "post_attention_layernorm")  # modules of a layer
_ITERATIONS = 20  # of the clustering
_SHARPNESS = 4.0  # mean difference of the router logits of the best and the mean cluster of a token


def moe_config(source: LlamaConfig, *, experts: int, top: int, width: int) -> MixtralConfig:
    """Return the configuration of a mixture of experts.

    Args:
        source: the configuration of the Llama model.
        experts: experts of a layer.
        top: experts of a token.
        width: channels of an expert.
    """
    return MixtralConfig(
        vocab_size=source.vocab_size,
        hidden_size=source.hidden_size,
        intermediate_size=width,
        num_hidden_layers=source.num_hidden_layers,
        num_attention_heads=source.num_attention_heads,
        num_key_value_heads=source.num_key_value_heads,
        head_dim=source.head_dim,
        max_position_embeddings=source.max_position_embeddings,
        rms_norm_eps=source.rms_norm_eps,
        rope_parameters=dict(source.rope_parameters),
        tie_word_embeddings=source.tie_word_embeddings,
        sliding_window=None,
        num_local_experts=experts,
        num_experts_per_tok=top,
        bos_token_id=source.bos_token_id,
        eos_token_id=source.eos_token_id,
        pad_token_id=source.pad_token_id,
    )


def make_moe(
    source: LlamaForCausalLM, ids: torch.Tensor, *, experts: int, top: int, width: int, seed: int
) -> MixtralForCausalLM:
    """Return a mixture of experts with the weights of `source`.

    Args:
        source: the dense model in float32.
        ids: token ids [B, S] of texts, from whose hidden states the experts are chosen.
        experts: experts of a layer.
        top: experts of a token.
        width: channels of an expert, at most those of the dense MLP.
        seed: seed of the clustering.
    """
    moe = MixtralForCausalLM(moe_config(source.config, experts=experts, top=top, width=width)).float()
    moe.model.embed_tokens.load_state_dict(source.model.embed_tokens.state_dict())
    moe.model.norm.load_state_dict(source.model.norm.state_dict())
    moe.lm_head.load_state_dict(source.lm_head.state_dict())
    generator = torch.Generator().manual_seed(seed)
    for old, new, inputs in zip(source.model.layers, moe.model.layers, mlp_inputs(source, ids), strict=True):
        for name in _COPIED:
            getattr(new, name).load_state_dict(getattr(old, name).state_dict())
        copy_experts(old.mlp, new.mlp, inputs, generator)
    return moe


@torch.no_grad()
def mlp_inputs(model: LlamaForCausalLM, ids: torch.Tensor) -> list[torch.Tensor]:
    """Return the inputs [B * S, H] of the MLP of each layer for token ids [B, S]."""
    inputs: list[torch.Tensor] = []
    hooks = [
        layer.mlp.register_forward_pre_hook(lambda _, args: inputs.append(args[0].flatten(0, 1)))
        for layer in model.model.layers
    ]
    model.model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return inputs


@torch.no_grad()
def copy_experts(mlp: Any, block: Any, inputs: torch.Tensor, generator: torch.Generator) -> None:
    """Fill a block of experts with channels of a dense MLP, and its router with the directions of the clusters.

    Args:
        mlp: the MLP of a Llama layer.
        block: the block of a Mixtral layer.
        inputs: [N, H] inputs of the MLP.
        generator: chooses the first centers of the clusters.
    """
    experts = len(block.experts.down_proj)
    width = block.experts.down_proj.shape[-1]
    labels, centers = cluster(inputs, experts, generator)
    activations = functional.silu(mlp.gate_proj(inputs)) * mlp.up_proj(inputs)
    importance = activations.abs() * mlp.down_proj.weight.norm(dim=0)
    for expert in range(experts):
        channels = importance[labels == expert].mean(0).topk(width).indices
        block.experts.gate_up_proj[expert] = torch.cat([mlp.gate_proj.weight[channels], mlp.up_proj.weight[channels]])
        block.experts.down_proj[expert] = mlp.down_proj.weight[:, channels]
    directions = centers - centers.mean(0)
    logits = inputs @ directions.T
    spread = (logits.max(-1).values - logits.mean(-1)).mean()
    block.gate.weight.copy_(directions * (_SHARPNESS / spread))


def cluster(points: torch.Tensor, count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Cluster points by their directions (spherical k-means, Dhillon and Modha 2001).

    Args:
        points: [N, H], at least `count` of them.
        count: number of clusters.
        generator: chooses the first centers. A cluster without points starts again from a random point.

    Returns:
        The clusters [N] of the points, none of which is empty, and the centers [count, H] of norm 1.
    """
    points = functional.normalize(points - points.mean(0), dim=-1)
    centers = points[torch.randperm(len(points), generator=generator)[:count]].clone()
    for _ in range(_ITERATIONS):
        labels = (points @ centers.T).argmax(-1)
        for number in range(count):
            mine = points[labels == number]
            chosen = mine.mean(0) if len(mine) else points[torch.randint(len(points), (), generator=generator)]
            centers[number] = functional.normalize(chosen, dim=0)
    labels = (points @ centers.T).argmax(-1)
    for number in range(count):
        sizes = labels.bincount(minlength=count)
        if not sizes[number]:  # take the nearest point of a cluster that keeps others
            nearness = (points @ centers[number]).masked_fill(sizes[labels] < 2, -torch.inf)
            labels[nearness.argmax()] = number
    return labels, centers
