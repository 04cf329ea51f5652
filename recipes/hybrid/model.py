"""The hybrid: a Bamba model whose attention layers, MLPs, norms and tables are those of a Llama model."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.nn import functional
from transformers import BambaConfig, BambaForCausalLM, LlamaConfig, LlamaForCausalLM

from outrider.models.heads.config import ConfigReader
from outrider.models.heads.formats.llama import read_body
from outrider.models.heads.modules.autoregressive import AutoregressiveHead
from outrider.models.heads.modules.layers import Attention
from outrider.train.model.presets import Sizes, describe

_COPIED = {"self_attn": "self_attn", "mlp": "feed_forward"}  # modules of a layer, Llama's name first
_NORMS = {"input_layernorm": "input_layernorm", "post_attention_layernorm": "pre_ff_layernorm"}


def hybrid_config(source: LlamaConfig, attention: Sequence[int], state: int) -> BambaConfig:
    """Return the configuration of a hybrid.

    Args:
        source: the configuration of the Llama model.
        attention: the layers that stay attention layers.
        state: numbers of the recurrent state for each channel.
    """
    dim = source.head_dim or source.hidden_size // source.num_attention_heads
    return BambaConfig(
        vocab_size=source.vocab_size,
        hidden_size=source.hidden_size,
        intermediate_size=source.intermediate_size,
        num_hidden_layers=source.num_hidden_layers,
        num_attention_heads=source.num_attention_heads,
        num_key_value_heads=source.num_key_value_heads,
        max_position_embeddings=source.max_position_embeddings,
        rms_norm_eps=source.rms_norm_eps,
        rope_parameters={**source.rope_parameters, "partial_rotary_factor": 1.0},
        tie_word_embeddings=source.tie_word_embeddings,
        attn_layer_indices=list(attention),
        mamba_n_heads=source.hidden_size // dim,
        mamba_d_head=dim,
        mamba_n_groups=source.num_key_value_heads,
        mamba_d_state=state,
        mamba_expand=1,
        mamba_chunk_size=64,
        bos_token_id=source.bos_token_id,
        eos_token_id=source.eos_token_id,
        pad_token_id=source.pad_token_id,
    )


def make_hybrid(source: LlamaForCausalLM, attention: Sequence[int], *, state: int, seed: int) -> BambaForCausalLM:
    """Return a hybrid with the weights of `source`. Its Mamba-2 layers have random weights."""
    torch.manual_seed(seed)
    hybrid = BambaForCausalLM(hybrid_config(source.config, attention, state)).float()
    hybrid.model.embed_tokens.load_state_dict(source.model.embed_tokens.state_dict())
    hybrid.model.final_layernorm.load_state_dict(source.model.norm.state_dict())
    hybrid.lm_head.load_state_dict(source.lm_head.state_dict())
    for old, new in zip(source.model.layers, hybrid.model.layers, strict=True):
        for theirs, ours in (_COPIED | _NORMS).items():
            if hasattr(new, ours):
                getattr(new, ours).load_state_dict(getattr(old, theirs).state_dict())
    return hybrid


def make_mtp(source: LlamaConfig, seed: int) -> AutoregressiveHead:
    """Return a new MTP module with a layer like those of the Llama model, as the hybrid's config describes it."""
    torch.manual_seed(seed)
    sizes = Sizes(
        hidden=source.hidden_size,
        layers=source.num_hidden_layers,
        vocab=source.vocab_size,
        epsilon=source.rms_norm_eps,
    )
    body = read_body(ConfigReader(source.to_dict()), 1, lambda _: False)
    return AutoregressiveHead(replace(describe("mtp", sizes), body=body))


def mtp_logits(
    module: AutoregressiveHead, hybrid: BambaForCausalLM, ids: torch.Tensor, states: torch.Tensor
) -> torch.Tensor:
    """Return the module's logits [B, S - 1, V]: column j predicts token j + 2 from state j and token j + 1.

    Args:
        module: the module.
        hybrid: the model, whose tables it shares.
        ids: [B, S] token ids.
        states: [B, S, H] states of the model after its final norm.
    """
    module.share_weights(hybrid.model.embed_tokens.weight, hybrid.lm_head.weight)
    positions = torch.arange(ids.shape[1] - 1, device=ids.device).expand(len(ids), -1)
    out = module(ids[:, 1:], states[:, :-1], positions, _causal_attention)
    return module.logits(out)


def _causal_attention(_: Attention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
