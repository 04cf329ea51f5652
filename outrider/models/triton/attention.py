"""Attention over a paged cache: for few queries of a sequence, and for the chunks of a prompt.

The bits of a token's output depend on the token alone, and not on the pass that it is in. Keys are taken in pieces of
fixed size, counted from the first entry. A piece is summed in one order, and the pieces are added in order. Masked
entries add exact zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
PIECE = 256
# The most bytes of sums that wait for `_combine`. More rows take their turn.
WORKSPACE = 64 << 20


class Shape(NamedTuple):
    """How the kernel divides its work. Only `keys`, `piece` and `warps` may change bits.

    Attributes:
        rows: query rows of a tile: columns times the query heads of a key head.
        keys: keys of a tile, at most 64.
        piece: keys that are summed at once, a multiple of `keys` and of a block.
        programs: about how many programs share the work.
        warps: warps of a program.
        stages: tiles of keys in flight.
        overlaps: whether the kernel that adds the pieces starts before the other ends. It needs sm_90.
    """

    rows: int = 16
    keys: int = 64
    piece: int = PIECE
    programs: int = 1056
    warps: int = 4
    stages: int = 3
    overlaps: bool = False


def attend(
    query: torch.Tensor,
    entries_of_layer: torch.Tensor,
    block_table: torch.Tensor,
    prefix: torch.Tensor,
    bits: torch.Tensor,
    position: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    rows: int,
    columns: int,
    shape: Shape | None = None,
) -> torch.Tensor:
    """Attend with 1 to 64 tokens of each sequence.

    Entries below the last one that a token of the row sees must be finite, from the start of its window. Padding has
    bits 0. Bits of entries beyond the block table do no harm.

    Args:
        query: [T, Hq, D]; token t is column t % columns of row t // columns.
        entries_of_layer: [blocks, Hkv, 2, BLOCK, D], keys before values.
        block_table: [rows, M] int32: the block of entries BLOCK * i ... of a row.
        prefix: [rows] int32: every token of the row sees the entries below it, in its window.
        bits: [T, W] int64: bit j of word w: the token sees entry prefix + 64 * w + j.
        position: [T] int32; the window holds the entries above position - window.
        window: 0 for all entries.
        softcap: 0 for none.
        sinks: [Hq] float: logits that take weight and have no value.
        shape: how to divide the work; by default, what fits the head.

    Returns:
        [T, Hq, D]; zeros for a token that sees nothing.
    """
    shape = shape or _shape(query)
    _, heads, dim = query.shape
    groups = heads // entries_of_layer.shape[1]
    block = entries_of_layer.shape[3]
    pieces = triton.cdiv(block_table.shape[1] * block, shape.piece)
    tiles = triton.cdiv(columns * groups, shape.rows)
    padded = triton.next_power_of_2(dim)
    out = torch.empty_like(query)
    constants = {
        "HEADS": heads,
        "D": dim,
        "PADDED": padded,
        "PIECE": shape.piece,
        "WORDS": bits.shape[1],
        "WINDOW": window,
        "OVERLAPS": shape.overlaps,
    }
    at_once = max(1, WORKSPACE // (4 * columns * heads * pieces * padded))
    for first in range(0, rows, at_once):
        count = min(at_once, rows - first)
        splits = min(pieces, max(1, shape.programs // (count * tiles * (heads // groups))))
        tokens = slice(first * columns, (first + count) * columns)
        some = (query[tokens], prefix[first : first + count], bits[tokens], position[tokens])
        sums = torch.empty(count * columns, heads, pieces, padded, dtype=torch.float32, device=query.device)
        stats = torch.empty(2, count * columns, heads, pieces, dtype=torch.float32, device=query.device)
        _attend_pieces[(tiles * (heads // groups), count, splits)](
            *some,
            entries_of_layer,
            block_table[first : first + count],
            sums,
            *stats,
            scale * LOG2_E,
            columns,
            tiles,
            pieces,
            block_table.stride(0),
            **constants,
            GROUP=groups,
            BLOCK=block,
            BLOCK_STRIDE=entries_of_layer.stride(0),
            ROWS=shape.rows,
            KEYS=min(shape.keys, block),
            SOFTCAP=softcap,
            num_warps=shape.warps,
            num_stages=shape.stages,
        )
        _combine[(count * columns, heads)](
            *some[1:],
            sums,
            *stats,
            sinks,
            out[tokens],
            columns,
            pieces,
            **constants,
            CHUNK=32,
            num_warps=4,
            launch_pdl=shape.overlaps,
        )
    return out


def _shape(query: torch.Tensor) -> Shape:
    """Return the tiles for a head: 16 KiB of keys at a time, so that three stages fit every chip."""
    fitting = 16384 // (triton.next_power_of_2(query.shape[2]) * query.element_size())
    return Shape(keys=min(64, max(16, fitting)))


def attend_prompt(
    query: torch.Tensor,
    entries_of_layer: torch.Tensor,
    block_table: torch.Tensor,
    prefix: torch.Tensor,
    bits: torch.Tensor,
    position: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    rows: int,
    columns: int,
    shape: Shape | None = None,
) -> torch.Tensor:
    """Attend with any number of tokens of each sequence. Column c of a row sees the entries up to prefix + c.

    The window holds for all entries, also those of the row. The bits of a token's output do not depend on how a prompt
    is cut into chunks, but they are not those of `attend`.

    Args:
        query: [T, Hq, D]; as all other arguments, see `attend`.
        bits: [T, W] int64: 0 for padding, which sees nothing; other values mean the same.
        shape: `rows`, `keys`, `warps` and `stages` count.

    Returns:
        [T, Hq, D]; zeros for padding.
    """
    shape = shape or _prompt_shape(query, window)
    _, heads, dim = query.shape
    key_heads, _, block, _ = entries_of_layer.shape[1:]
    groups = heads // key_heads
    out = torch.empty_like(query)
    _attend_prompt[(triton.cdiv(columns * groups, shape.rows), key_heads, rows)](
        query,
        prefix,
        bits,
        position,
        entries_of_layer,
        block_table,
        sinks,
        out,
        scale * LOG2_E,
        columns,
        bits.stride(0),
        block_table.stride(0),
        HEADS=heads,
        GROUP=groups,
        D=dim,
        PADDED=triton.next_power_of_2(dim),
        BLOCK=block,
        BLOCK_STRIDE=entries_of_layer.stride(0),
        ROWS=shape.rows,
        KEYS=min(shape.keys, block),
        WINDOW=window,
        SOFTCAP=softcap,
        num_warps=shape.warps,
        num_stages=shape.stages,
    )
    return out


def _prompt_shape(query: torch.Tensor, window: int) -> Shape:
    """Return tiles whose sums fit the registers and whose keys fit the shared memory of every chip."""
    if query.element_size() > 2:
        return Shape(rows=32, keys=16, stages=2)
    wide = query.shape[2] > 128
    return Shape(rows=64 if wide else 128, keys=32 if wide or window else 64, warps=8, stages=2)


@triton.jit
def _end_of(word):
    """Return one more than the index of the highest bit that is set in each uint64; 0 or less if there is none."""
    # Without the bit below the highest one, the number does not round up to the next power of two.
    number = (word ^ (word & (word >> 1))).to(tl.float32)
    return (number.to(tl.int32, bitcast=True) >> 23) - 126


@triton.jit
def _words(bits, token, inside, WORDS: tl.constexpr):
    """Return the words of each token: entries of the tail that it sees."""
    words = ()
    for index in tl.static_range(WORDS):
        word = tl.load(bits + token * WORDS + index, mask=inside, other=0).to(tl.uint64, bitcast=True)
        words = words + (word,)  # type: ignore[assignment]  # noqa: RUF005  Triton does not unpack
    return words


@triton.jit
def _limit(words, WORDS: tl.constexpr):
    """Return one more than the last entry of the tail that each token sees, counted from its prefix."""
    limit = tl.zeros_like(words[0]).to(tl.int32)
    for index in tl.static_range(WORDS):
        limit = tl.maximum(limit, tl.where(words[index] != 0, 64 * index + _end_of(words[index]), 0))
    return limit


@triton.jit
def _word(words, at, WORDS: tl.constexpr):
    """Return word `at` of each token, counted from the prefix: before it all entries are seen, after the tail none."""
    none = tl.zeros_like(words[0])
    found = tl.where(at < 0, none - 1, none)
    for index in tl.static_range(WORDS):
        found = tl.where(at == index, words[index], found)
    return found


@triton.jit
def _first(position, prefix, WINDOW: tl.constexpr):
    """Return the first entry in the window of a position."""
    if WINDOW > 0:
        first = tl.minimum(tl.maximum(position - WINDOW + 1, 0), prefix)
    else:
        first = tl.zeros_like(position)
    return first


@triton.jit
def _capped(scores, scale, SOFTCAP: tl.constexpr):
    """Return logits in powers of two. `scale` contains log2(e)."""
    scores = scores * scale
    if SOFTCAP != 0.0:
        bound: tl.constexpr = SOFTCAP * 1.4426950408889634
        scores = bound * (2 * tl.sigmoid(scores * (2 / bound)) - 1)
    return scores


@triton.jit
def _weigh(scores, peak, weight, values, value):
    """Add a tile to a softmax: scores [rows, keys] with -inf where masked, its peak and weight [rows] and values."""
    higher = tl.maximum(peak, tl.max(scores, 1))
    level = tl.where(higher == float("-inf"), 0.0, higher)
    probabilities = tl.exp2(scores - level[:, None])
    fade = tl.exp2(peak - level)
    weight = weight * fade + tl.sum(probabilities, 1)
    values = tl.dot(probabilities.to(value.dtype), value, values * fade[:, None], input_precision="ieee")
    return higher, weight, values


@triton.jit(
    do_not_specialize=["columns", "tiles", "pieces", "table_stride"],
    do_not_specialize_on_alignment=["prefix", "bits", "position", "block_table", "peaks", "weights"],
)
def _attend_pieces(
    query,
    prefix,
    bits,
    position,
    entries,
    block_table,
    sums,
    peaks,
    weights,
    scale,
    columns,
    tiles,
    pieces,
    table_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PIECE: tl.constexpr,
    WORDS: tl.constexpr,
    WINDOW: tl.constexpr,
    OVERLAPS: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Sum some pieces of one row, for one key head and one tile of its queries.

    The grid does not depend on the lengths. Programs share the pieces of a row in turns. Those that have no piece, as
    the row is short, start last and end at once.
    """
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0) % tiles
    key_head = tl.program_id(0) // tiles
    row = tl.program_id(1)
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    place = tile * ROWS + tl.arange(0, ROWS)
    inside = place < columns * GROUP
    token = row * columns + place // GROUP
    head = (token * HEADS + key_head * GROUP + place % GROUP).to(tl.int64)
    before = tl.load(prefix + row)
    words = _words(bits, token, inside, WORDS)
    limit = before + tl.max(_limit(words, WORDS), 0)
    own_position = tl.load(position + token, mask=inside, other=0x7FFFFFFF)
    own_first = _first(own_position, before, WINDOW)
    first = tl.min(own_first, 0)
    entry = tl.arange(0, KEYS)
    channel = tl.arange(0, PADDED)
    turn = tl.arange(0, PIECE // BLOCK)
    exists = (channel < D) | (D == PADDED)

    for piece in range(first // PIECE + split, tl.minimum(tl.cdiv(limit, PIECE), pieces), splits):
        queries = tl.load(
            query + head[:, None] * D + channel[None, :], mask=inside[:, None] & exists[None, :], other=0.0
        )
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        weight = tl.zeros([ROWS], tl.float32)
        values = tl.zeros([ROWS, PADDED], tl.float32)
        begin = tl.maximum(piece * PIECE, first // KEYS * KEYS)
        # No load inside the loop has an address from another load: tiles of keys then arrive in several stages.
        index = piece * (PIECE // BLOCK) + turn
        given = (index * BLOCK < limit) & (index < table_stride)
        blocks = tl.load(block_table + row * table_stride + index, mask=given, other=0)
        for start in range(begin, tl.minimum(piece * PIECE + PIECE, limit), KEYS):
            block = tl.sum(tl.where(index == start // BLOCK, blocks, 0), 0).to(tl.int64)
            held = entries + block * BLOCK_STRIDE + (key_head * 2 * BLOCK + start % BLOCK) * D
            key = tl.load(held + entry[None, :] * D + channel[:, None], mask=exists[:, None], other=0.0)
            own = start + entry
            lives = (own >= first) & (own < limit)
            value = tl.load(
                held + BLOCK * D + entry[:, None] * D + channel[None, :],
                mask=lives[:, None] & exists[None, :],
                other=0.0,
            )
            # The bits of the tile's entries: these start inside one word and end inside the next.
            word = (start - before) >> 6
            shift = ((start - before) & 63).to(tl.uint64)
            seen = (_word(words, word, WORDS) >> shift) | ((_word(words, word + 1, WORDS) << 1) << (63 - shift))
            sees = ((seen[:, None] >> entry[None, :].to(tl.uint64)) & 1) != 0
            if WINDOW > 0:
                sees &= own[None, :] >= own_first[:, None]
            scores = _capped(tl.dot(queries, key, input_precision="ieee"), scale, SOFTCAP)
            scores = tl.where(sees, scores, float("-inf"))
            peak, weight, values = _weigh(scores, peak, weight, values, value)
        at = head * pieces + piece
        tl.store(peaks + at, peak, mask=inside)
        tl.store(weights + at, weight, mask=inside)
        tl.store(sums + at[:, None] * PADDED + channel[None, :], values, mask=inside[:, None])


@triton.jit(
    do_not_specialize=["columns", "pieces"],
    do_not_specialize_on_alignment=["prefix", "bits", "position", "peaks", "weights"],
)
def _combine(
    prefix,
    bits,
    position,
    sums,
    peaks,
    weights,
    sinks,
    out,
    columns,
    pieces,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    PADDED: tl.constexpr,
    PIECE: tl.constexpr,
    WORDS: tl.constexpr,
    WINDOW: tl.constexpr,
    OVERLAPS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Add the pieces of one token and head: `CHUNK` at once, from the first entry on, and the chunks in order."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    before = tl.load(prefix + token // columns)
    limit = before + _limit(_words(bits, token, True, WORDS), WORDS)
    begin = _first(tl.load(position + token), before, WINDOW) // PIECE
    end = tl.minimum(tl.cdiv(limit, PIECE), pieces)
    at = (token * HEADS + head).to(tl.int64) * pieces
    channel = tl.arange(0, PADDED)
    peak = float("-inf")
    weight = 0.0
    if sinks is not None:
        peak = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        weight = 1.0
    values = tl.zeros([PADDED], tl.float32)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    for chunk in range(begin // CHUNK * CHUNK, end, CHUNK):
        piece = chunk + tl.arange(0, CHUNK)
        exists = (piece >= begin) & (piece < end)
        peak_of = tl.load(peaks + at + piece, mask=exists, other=float("-inf"))
        weight_of = tl.load(weights + at + piece, mask=exists, other=0.0)
        part = tl.load(sums + (at + piece)[:, None] * PADDED + channel[None, :], mask=exists[:, None], other=0.0)
        higher = tl.maximum(peak, tl.max(peak_of, 0))
        level = tl.where(higher == float("-inf"), 0.0, higher)
        share = tl.exp2(peak_of - level)
        fade = tl.exp2(peak - level)
        weight = weight * fade + tl.sum(weight_of * share, 0)
        values = values * fade + tl.sum(part * share[:, None], 0)
        peak = higher
    values = values / tl.where(weight == 0.0, 1.0, weight)
    to = out + (token * HEADS + head).to(tl.int64) * D + channel
    tl.store(to, values.to(out.dtype.element_ty), mask=channel < D)


@triton.jit(
    do_not_specialize=["columns", "words", "table_stride"],
    do_not_specialize_on_alignment=["prefix", "bits", "position", "block_table"],
)
def _attend_prompt(
    query,
    prefix,
    bits,
    position,
    entries,
    block_table,
    sinks,
    out,
    scale,
    columns,
    words,
    table_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Attend with one tile of queries of a key head. The longest tiles start first."""
    row = tl.program_id(2)
    key_head = tl.program_id(1)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    place = tile * ROWS + tl.arange(0, ROWS)
    inside = place < columns * GROUP
    column = place // GROUP
    token = row * columns + column
    own_head = key_head * GROUP + place % GROUP
    before = tl.load(prefix + row)
    real = tl.load(bits + token * words, mask=inside, other=0) != 0
    own_limit = tl.where(real, before + column + 1, 0)
    limit = tl.max(own_limit, 0)
    own_first = _first(tl.load(position + token, mask=real, other=0x7FFFFFFF), own_limit, WINDOW)
    first = tl.min(tl.where(real, own_first, 0x7FFFFFFF), 0)
    entry = tl.arange(0, KEYS)
    channel = tl.arange(0, PADDED)
    exists = (channel < D) | (D == PADDED)
    at = (token.to(tl.int64) * HEADS + own_head)[:, None] * D + channel[None, :]
    queries = tl.load(query + at, mask=inside[:, None] & exists[None, :], other=0.0)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    if sinks is not None:
        peak = tl.load(sinks + own_head, mask=inside, other=0.0).to(tl.float32) * 1.4426950408889634
        weight += 1.0
    values = tl.zeros([ROWS, PADDED], tl.float32)
    begin = tl.minimum(first, limit) // KEYS * KEYS
    table = block_table + row * table_stride
    # The address of a tile is loaded one tile ahead: tiles of keys then arrive in several stages.
    block = tl.load(table + begin // BLOCK)
    for start in range(begin, limit, KEYS):
        held = entries + block.to(tl.int64) * BLOCK_STRIDE + (key_head * 2 * BLOCK + start % BLOCK) * D
        block = tl.load(table + tl.minimum(start + KEYS, limit - 1) // BLOCK)
        own = start + entry
        key = tl.load(held + entry[None, :] * D + channel[:, None], mask=exists[:, None], other=0.0)
        value = tl.load(
            held + BLOCK * D + entry[:, None] * D + channel[None, :],
            mask=((own >= first) & (own < limit))[:, None] & exists[None, :],
            other=0.0,
        )
        sees = own[None, :] < own_limit[:, None]
        if WINDOW > 0:
            sees &= own[None, :] >= own_first[:, None]
        scores = _capped(tl.dot(queries, key, input_precision="ieee"), scale, SOFTCAP)
        scores = tl.where(sees, scores, float("-inf"))
        peak, weight, values = _weigh(scores, peak, weight, values, value)
    values = values / tl.where(weight == 0.0, 1.0, weight)[:, None]
    tl.store(out + at, values.to(out.dtype.element_ty), mask=inside[:, None] & exists[None, :])
