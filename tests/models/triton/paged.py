"""Random passes over a paged cache, and attention over them in plain torch."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Pass(NamedTuple):
    """The tensors of a pass, as `attend` takes them."""

    query: torch.Tensor
    entries: torch.Tensor
    block_table: torch.Tensor
    prefix: torch.Tensor
    bits: torch.Tensor
    position: torch.Tensor


def random_pass(prefixes, columns, *, heads=4, key_heads=2, dim=64, block=16, dtype=torch.float32, words=1, tree=True):
    """Return a pass over sequences of the given prefixes. Entries that no token sees are NaN.

    The tokens of a row are a random tree (a chain without `tree`), whose depth is the position above the prefix.
    """
    noise = torch.Generator().manual_seed(sum(prefixes) + columns)
    rows = len(prefixes)
    blocks_of_row = [-(-(prefix + columns) // block) for prefix in prefixes]
    order = torch.randperm(sum(blocks_of_row) + 1, generator=noise).int()
    most = max(blocks_of_row) + 1
    table = torch.full((rows, most), int(order[-1]), dtype=torch.int32)
    entries = torch.full((len(order), key_heads, 2, block, dim), float("nan"), dtype=dtype)
    bits = torch.zeros(rows * columns, words, dtype=torch.int64)
    position = torch.zeros(rows * columns, dtype=torch.int32)
    for row, prefix in enumerate(prefixes):
        own = order[: blocks_of_row[row]]
        order = order[blocks_of_row[row] :]
        table[row, : len(own)] = own
        for at in range(prefix + columns):
            held = torch.randn(key_heads, 2, dim, generator=noise).to(dtype)
            entries[table[row, at // block], :, :, at % block] = held
        for column in range(columns):
            parent = int(torch.randint(-1, column, (1,), generator=noise)) if tree and column else column - 1
            token = row * columns + column
            if parent >= 0:
                bits[token] = bits[row * columns + parent]
            bits[token, column // 64] |= torch.tensor(1) << (column % 64)
            depth = 0 if parent < 0 else int(position[row * columns + parent]) - prefix + 1
            position[token] = prefix + depth
    query = torch.randn(rows * columns, heads, dim, generator=noise).to(dtype)
    return Pass(query, entries, table, torch.tensor(prefixes, dtype=torch.int32), bits, position)


def expected(given, *, scale, window=0, softcap=0.0, sinks=None):
    """Return the attention of a pass [T, Hq, D], in float64."""
    tokens, heads, _ = given.query.shape
    rows = len(given.prefix)
    block = given.entries.shape[3]
    out = torch.zeros(given.query.shape, dtype=torch.float64)
    for token in range(tokens):
        row = token // (tokens // rows)
        seen = _seen(given, row, token, window)
        if not len(seen):
            continue
        held = given.entries[given.block_table[row, seen // block].long(), :, :, seen % block].double()
        held = held.repeat_interleave(heads // held.shape[1], dim=1)
        scores = torch.einsum("hd,nhd->hn", given.query[token].double(), held[:, :, 0]) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None]], dim=1)
        weights = scores.softmax(dim=1)[:, : len(seen)]
        out[token] = torch.einsum("hn,nhd->hd", weights, held[:, :, 1])
    return out


def _seen(given, row, token, window):
    prefix = int(given.prefix[row])
    start = max(0, int(given.position[token]) - window + 1) if window else 0
    committed = list(range(min(start, prefix), prefix))
    words = given.bits.shape[1]
    tail = [prefix + at for at in range(64 * words) if int(given.bits[token, at // 64]) >> (at % 64) & 1]
    return torch.tensor(committed + tail, dtype=torch.long)


def column(given, token):
    """Return the pass of one token of a chain alone, whose row has committed the entries before it."""
    return later(given, token // (len(given.query) // len(given.prefix)), token)._replace(
        query=given.query[token : token + 1],
        bits=torch.ones(1, 1, dtype=torch.int64),
        position=given.position[token : token + 1],
    )


def later(given, row, token):
    """Return the pass of the tokens of a row of a chain from a token on."""
    columns = len(given.query) // len(given.prefix)
    tokens = slice(token, (row + 1) * columns)
    rows = slice(row, row + 1)
    return given._replace(
        query=given.query[tokens],
        block_table=given.block_table[rows],
        prefix=given.prefix[rows] + token % columns,
        bits=given.bits[tokens],
        position=given.position[tokens],
    )


def join(first, second):
    """Return the rows of two passes of equally many columns as one pass."""
    width = max(first.block_table.shape[1], second.block_table.shape[1])
    tables = (first.block_table, second.block_table + len(first.entries))
    padded = [torch.nn.functional.pad(table, (0, width - table.shape[1])) for table in tables]
    others = zip(first, second, strict=True)
    joined = Pass(*(torch.cat(pair) if pair[0].shape[1:] == pair[1].shape[1:] else pair[0] for pair in others))
    return joined._replace(block_table=torch.cat(padded))
