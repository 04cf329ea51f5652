"""Write models with random weights in the sizes of real ones: 1.5B and 8B as GGUF, and a folder of 3 GB in bfloat16.

python benchmarks/start/random_models.py OUT

The GGUF files have the types of llama.cpp's Q4_K_M, so they have the size of the real files. The quantized blocks are
random bytes with fixed scales: the weights have a standard deviation of 0.02. The tokenizer has as many tokens and
merges as that of Llama 3, since a loader reads all of them.
"""

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import gguf
import numpy as np
import torch
import typer
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_SPECIAL = ("<|begin_of_text|>", "<|end_of_text|>")
_CHAT = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"
_STD = 0.02
_SCALE = 32  # of a block of Q4_K; its scales and its mins are all equal
_SCALE_BYTES = (160,) * 8 + (0,) * 4  # 16 numbers of 6 bits that are 32, as Q4_K packs them
_SMALL_SCALE = 8  # of a block of Q6_K


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The dimensions of a Llama."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    key_heads: int
    vocab: int = 128256

    @property
    def dim(self) -> int:
        """The dimensions of a head."""
        return self.hidden // self.heads


SIZES = {
    "1.5b": Size(layers=28, hidden=1536, ffn=8960, heads=12, key_heads=2),
    "8b": Size(layers=32, hidden=4096, ffn=14336, heads=32, key_heads=8),
    "3gb": Size(layers=16, hidden=2048, ffn=8192, heads=32, key_heads=8),
    "tiny": Size(layers=2, hidden=256, ffn=512, heads=4, key_heads=2, vocab=512),
}


def main(
    out: Annotated[Path, typer.Argument(help="Folder for the models.")],
    tiny: Annotated[bool, typer.Option(help="Write tiny models, to try the script.")] = False,
) -> None:
    """Write what is not there yet. Print the paths."""
    out.mkdir(parents=True, exist_ok=True)
    for name in ("1.5b", "8b"):
        file = out / f"random-{name}-q4_k_m.gguf"
        if not file.exists():
            write_gguf(file, SIZES["tiny" if tiny else name])
        print(file)
    folder = out / "random-3gb"
    if not (folder / "model.safetensors").exists():
        write_folder(folder, SIZES["tiny" if tiny else "3gb"])
    print(folder)


def write_gguf(file: Path, size: Size) -> None:
    """Write a GGUF file in the types of Q4_K_M."""
    part = file.with_suffix(".part")
    writer = gguf.GGUFWriter(part, "llama")
    writer.add_block_count(size.layers)
    writer.add_context_length(8192)
    writer.add_embedding_length(size.hidden)
    writer.add_feed_forward_length(size.ffn)
    writer.add_head_count(size.heads)
    writer.add_head_count_kv(size.key_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500000.0)
    writer.add_rope_dimension_count(size.dim)
    writer.add_vocab_size(size.vocab)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M)
    names, merges = _tokens(size.vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(names)
    writer.add_token_types([1] * (size.vocab - 2) + [3] * 2)
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_bos_token_id(size.vocab - 2)
    writer.add_eos_token_id(size.vocab - 1)
    writer.add_chat_template(_CHAT)
    tensors = list(_tensors(size))
    for name, shape, kind in tensors:
        block, width = gguf.GGML_QUANT_SIZES[kind]
        stored = (*shape[:-1], shape[-1] // block * width) if kind is not Type.F32 else shape
        dtype = np.dtype(np.float32 if kind is Type.F32 else np.uint8)
        writer.add_tensor_info(name, stored, dtype, int(np.prod(stored)) * dtype.itemsize, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rng = np.random.default_rng(0)
    for _, shape, kind in tensors:
        writer.write_tensor_data(_values(rng, shape, kind))
    writer.close()
    part.rename(file)


def _tensors(size: Size) -> Iterator[tuple[str, tuple[int, ...], Type]]:
    """Yield name, shape and type of each tensor, as in a file of Q4_K_M."""
    yield "token_embd.weight", (size.vocab, size.hidden), Type.Q4_K
    for layer in range(size.layers):
        eighth = size.layers // 8
        wide = layer < eighth or layer >= 7 * eighth or (layer - eighth) % 3 == 2
        large = Type.Q6_K if wide else Type.Q4_K
        keys = size.key_heads * size.dim
        name = f"blk.{layer}."
        yield f"{name}attn_norm.weight", (size.hidden,), Type.F32
        yield f"{name}attn_q.weight", (size.hidden, size.hidden), Type.Q4_K
        yield f"{name}attn_k.weight", (keys, size.hidden), Type.Q4_K
        yield f"{name}attn_v.weight", (keys, size.hidden), large
        yield f"{name}attn_output.weight", (size.hidden, size.hidden), Type.Q4_K
        yield f"{name}ffn_norm.weight", (size.hidden,), Type.F32
        yield f"{name}ffn_gate.weight", (size.ffn, size.hidden), Type.Q4_K
        yield f"{name}ffn_up.weight", (size.ffn, size.hidden), Type.Q4_K
        yield f"{name}ffn_down.weight", (size.hidden, size.ffn), large
    yield "output_norm.weight", (size.hidden,), Type.F32
    yield "output.weight", (size.vocab, size.hidden), Type.Q6_K


def _values(rng: np.random.Generator, shape: tuple[int, ...], kind: Type) -> NDArray[np.generic]:
    """Return ones for a norm, and random blocks of bytes for a matrix."""
    if kind is Type.F32:
        return np.ones(shape, np.float32)
    block, width = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (int(np.prod(shape)) // block, width), dtype=np.uint8)
    if kind is Type.Q4_K:  # w = d * scale * q - dmin * min, with q from 0 to 15
        step = _STD / _SCALE / 4.61
        blocks[:, 0:2] = np.array([step], np.float16).view(np.uint8)
        blocks[:, 2:4] = np.array([7.5 * step], np.float16).view(np.uint8)
        blocks[:, 4:16] = _SCALE_BYTES
    else:  # Q6_K: w = d * scale * (q - 32), with q from 0 to 63
        blocks[:, -18:-2] = _SMALL_SCALE
        blocks[:, -2:] = np.array([_STD / _SMALL_SCALE / 18.5], np.float16).view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def write_folder(folder: Path, size: Size) -> None:
    """Write a folder in the format of Hugging Face, in bfloat16, with an LM head of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": size.hidden,
        "intermediate_size": size.ffn,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.key_heads,
        "vocab_size": size.vocab,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "bos_token_id": size.vocab - 2,
        "eos_token_id": size.vocab - 1,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    names, merges = _tokens(size.vocab)
    plain = {name: token for token, name in enumerate(names[:-2])}
    backend = Tokenizer(models.BPE(vocab=plain, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=_SPECIAL[0], eos_token=_SPECIAL[1])
    tokenizer.chat_template = _CHAT
    tokenizer.save_pretrained(folder)
    keys = size.key_heads * size.dim
    shapes = {"model.embed_tokens": (size.vocab, size.hidden), "lm_head": (size.vocab, size.hidden)}
    norms = ["model.norm"]
    for layer in range(size.layers):
        name = f"model.layers.{layer}."
        shapes |= {f"{name}self_attn.{each}_proj": (size.hidden, size.hidden) for each in "qo"}
        shapes |= {f"{name}self_attn.{each}_proj": (keys, size.hidden) for each in "kv"}
        shapes |= {f"{name}mlp.{each}_proj": (size.ffn, size.hidden) for each in ("gate", "up")}
        shapes[f"{name}mlp.down_proj"] = (size.hidden, size.ffn)
        norms += [f"{name}input_layernorm", f"{name}post_attention_layernorm"]
    torch.manual_seed(0)
    noise = torch.empty(1 << 22, dtype=torch.bfloat16).normal_(std=_STD)  # repeated, since random numbers take minutes
    weights = {f"{norm}.weight": torch.ones(size.hidden, dtype=torch.bfloat16) for norm in norms}
    for name, shape in shapes.items():
        count = math.prod(shape)
        weights[f"{name}.weight"] = noise.repeat(-(-count // len(noise)))[:count].view(shape).clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _tokens(vocab: int) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the tokens of a byte-level BPE, two of them special, and its merges."""
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    known = set(names)
    merges = []
    rng = random.Random(0)
    while len(names) < vocab - 2:
        pair = (names[rng.randrange(len(names) // 2)], names[rng.randrange(256)])
        if "".join(pair) not in known:
            known.add("".join(pair))
            names.append("".join(pair))
            merges.append(pair)
    return [*names, *_SPECIAL], merges


if __name__ == "__main__":
    typer.run(main)
