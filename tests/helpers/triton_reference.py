"""The functions of the Triton kernels in plain torch, which take less time than the interpreter."""

import torch
from torch.nn import functional

from outrider.models.triton import decoder, layers, prompt_products

BLOCK = 64
ACTIVATIONS = {"silu": functional.silu, "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh")}


def use(patch):
    """Let the decoder call these functions instead of the kernels."""
    patch.setattr("triton.knobs.runtime.interpret", True)
    patch.setattr(prompt_products, "linear", linear)
    patch.setattr(prompt_products, "many_rows", linear)
    patch.setattr(layers, "rotate_and_write", rotate_and_write)
    for function in (embed, linear, rms_norm, rotate_and_write, attend, attend_prompt):
        patch.setattr(decoder, function.__name__, function)


def embed(tokens, table, dtype):
    matrix = table if isinstance(table, torch.Tensor) else table.dequantize()
    return matrix.to(dtype)[tokens.clamp(0, len(matrix) - 1)]


def linear(x, weight, *, norm=None, residual=None, gate="", bias=None, out_dtype=None):
    matrix = (weight if isinstance(weight, torch.Tensor) else weight.dequantize()).double()
    rows = x.double()
    if norm is not None:
        rows = _normed(rows, norm.weight, norm.epsilon)
    out = (rows[:, None] * matrix).sum(-1) if len(x) * matrix.numel() < 1 << 22 else rows @ matrix.T
    if bias is not None:
        out = out + bias
    if gate:
        first, second = out.chunk(2, -1)
        out = ACTIVATIONS[gate](first) * second
    return (out if residual is None else out + residual).to(out_dtype or x.dtype)


def rms_norm(x, weight, epsilon):
    return _normed(x.double(), weight, epsilon).to(x.dtype)


def _normed(x, weight, epsilon):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight


def rotate_and_write(
    qkv, cos, sin, position, entry, block_table, entries, query_norm=None, key_norm=None, epsilon=1e-6
):
    key_heads, dim = entries.shape[1], entries.shape[-1]
    query, key, value = (
        qkv.unflatten(1, (-1, dim)).double().split([qkv.shape[1] // dim - 2 * key_heads, key_heads, key_heads], 1)
    )
    if query_norm is not None:
        query, key = _normed(query, query_norm, epsilon), _normed(key, key_norm, epsilon)
    angles = (cos[position.long()][:, None], sin[position.long()][:, None])
    row = torch.arange(len(qkv)) // (len(qkv) // len(block_table))
    real = entry >= 0
    block = block_table[row, entry.clamp(min=0) // BLOCK][real].long()
    kept = torch.stack([_rotated(key, *angles), value], 2).to(entries.dtype)
    entries[block, :, :, entry[real].long() % BLOCK] = kept[real]
    return _rotated(query, *angles).to(qkv.dtype)


def _rotated(x, cos, sin):
    pairs = cos.shape[-1]
    first, second, rest = x.split([pairs, pairs, x.shape[-1] - 2 * pairs], -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def attend(query, entries, block_table, prefix, bits, position, *, columns, **settings):
    tail = torch.arange(64)
    seen = (bits >> tail) & 1 == 1
    return _attend(query, entries, block_table, prefix.repeat_interleave(columns), seen, position, **settings)


def attend_prompt(query, entries, block_table, prefix, bits, position, *, columns, rows, **settings):
    seen = torch.ones(columns, columns, dtype=torch.bool).tril().repeat(rows, 1)
    prefix = prefix.repeat_interleave(columns)
    window = settings.get("window")
    if window:
        own = prefix[:, None] + torch.arange(columns)
        seen = seen & (own > position[:, None] - window)
    seen = seen & (bits != 0)  # the others are padding
    return _attend(query, entries, block_table, prefix * (bits[:, 0] != 0), seen, position, rows=rows, **settings)


def _attend(query, entries, block_table, prefix, seen, position, *, scale, rows, window=0, softcap=0.0):
    tokens, heads, _ = query.shape
    out = torch.zeros_like(query)
    sharing = heads // entries.shape[1]
    for t in range(tokens):
        table = block_table[t // (tokens // rows)].long()
        end = int(prefix[t])
        begin = max(0, int(position[t]) - window + 1) if window else 0
        own = torch.cat([torch.arange(min(begin, end), end), end + seen[t].nonzero()[:, 0]])
        own = own[own >= 0]  # the first entries may not exist
        if not len(own):
            continue
        kept = entries[table[own // BLOCK], :, :, own % BLOCK].double().repeat_interleave(sharing, 1)
        scores = (query[t].double() * kept[:, :, 0]).sum(-1) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        out[t] = (scores.softmax(0)[..., None] * kept[:, :, 1]).sum(0).to(query.dtype)
    return out
