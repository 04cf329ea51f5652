"""Read and build datastores: the tokens of many documents on disk, and a suffix array over them.

A suffix array lists the positions where suffixes begin, sorted by their tokens (Manber & Myers
1990). So all occurrences of a token sequence are adjacent, and a binary search finds them.

A datastore is a folder with three files. `tokens.bin` has the tokens of all documents as big-endian numbers, which
compare as bytes. Each document is followed by a separator that is not a token. `suffixes.bin` has the positions as
little-endian numbers. `header.json` has the sizes and the sources.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.errors import OutriderError

VERSION = 1  # of the file format
LONGEST = 16  # most tokens of a sequence that is looked up
SORTED = 64  # suffixes are sorted by this many first tokens, and then by their positions
MOST_TOKENS = 2**32 - 1  # a position takes four bytes

HEADER, TOKENS, SUFFIXES = "header.json", "tokens.bin", "suffixes.bin"
_FORMAT = "outrider datastore"

Numbers = NDArray[np.unsignedinteger[Any]]
Positions = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A file that a datastore was made from."""

    name: str
    sha256: str
    documents: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The header of a datastore."""

    format: str = _FORMAT
    version: int = VERSION
    tokens: int  # with separators
    documents: int
    vocab: int  # number of ids of the tokenizer
    width: int  # bytes of a token
    tokenizer: str  # its fingerprint
    files: tuple[Source, ...]


@dataclass(frozen=True, slots=True)
class Match:
    """The occurrences of a token sequence."""

    size: int  # tokens of the sequence
    span: range  # indices in the suffix array


class Datastore:
    """Finds occurrences of the last tokens of a sequence, and what followed them.

    A datastore is read-only, so any number of sequences may share it.
    """

    def __init__(self, header: Header, tokens: mmap.mmap | bytes, suffixes: mmap.mmap | bytes) -> None:
        """Interpret the bytes of the files `tokens.bin` and `suffixes.bin` by their header."""
        self.header = header
        self.separator = _separator(header.width)
        self._bytes = tokens
        self._width = header.width
        self.tokens = np.frombuffer(tokens, f">u{header.width}")
        self._positions = np.frombuffer(suffixes, "<u4")
        self._suffixes = self._positions.astype(np.uint32, copy=False).data

    @classmethod
    def open(cls, folder: str | Path) -> Datastore:
        """Map a datastore into memory. Lookups read from disk what they need.

        Raises:
            OutriderError: the folder is not a datastore, it is damaged, or it has another version.
        """
        path = Path(folder).expanduser()
        header = read_header(path)
        num_suffixes = header.tokens - header.documents
        tokens = _map(path / TOKENS, header.tokens * header.width)
        suffixes = _map(path / SUFFIXES, num_suffixes * 4)
        return cls(header, tokens, suffixes)

    @classmethod
    def of(cls, documents: Sequence[Sequence[int]], vocab: int, *, tokenizer: str = "") -> Datastore:
        """Build a datastore in memory."""
        tokens = join([np.array(document, np.int64) for document in documents], vocab)
        header = describe(tokens, documents=len(documents), vocab=vocab, tokenizer=tokenizer)
        return cls(header, tokens.tobytes(), sort_suffixes(tokens, len(documents)).tobytes())

    def find(self, text: Sequence[int], *, shortest: int = 1, longest: int = LONGEST) -> Match | None:
        """Find the longest suffix of `text` that occurs within a document, of `longest` down to `shortest` tokens.

        All shorter suffixes occur as well, so the length is found by bisection.
        """
        known = takewhile(lambda token: token < self.separator, reversed(text[-longest:]))
        suffix = tuple(known)[::-1]
        encoded = struct.pack(f">{len(suffix)}{'H' if self._width == 2 else 'I'}", *suffix)
        match = None
        low = shortest
        high = len(suffix)
        while low <= high:
            size = (low + high) // 2
            span = self._occurrences(encoded[len(encoded) - size * self._width :])
            if span:
                match = Match(size, span)
                low = size + 1
            else:
                high = size - 1
        return match

    def following(self, match: Match, *, samples: int, depth: int) -> list[list[int]]:
        """Return [depth][S] the tokens that followed up to `samples` occurrences.

        The samples are spread evenly and sorted by the tokens. Tokens after a separator belong to another document.
        """
        num_samples = min(samples, len(match.span))
        picks = match.span.start + np.arange(num_samples) * len(match.span) // num_samples
        positions = self._positions[picks].astype(np.int64) + match.size + np.arange(depth)[:, None]
        # Positions of a damaged datastore may be too large. Limit them, so that it only causes a bad draft.
        following: list[list[int]] = self.tokens[np.minimum(positions, len(self.tokens) - 1)].tolist()
        return following

    def _occurrences(self, encoded: bytes) -> range:
        """Return the indices of an encoded token sequence in the suffix array."""
        raw = self._bytes
        width = self._width
        size = len(encoded)

        def read(position: int) -> bytes:
            return raw[position * width : position * width + size]

        first = bisect_left(self._suffixes, encoded, key=read)
        if first == len(self._suffixes) or read(self._suffixes[first]) != encoded:
            return range(0)
        # Most sequences are rare, so the last occurrence is near the first one. Double the step until it is passed.
        step = 1
        while first + step < len(self._suffixes) and read(self._suffixes[first + step]) == encoded:
            step *= 2
        end = min(first + step, len(self._suffixes))
        return range(first, bisect_right(self._suffixes, encoded, first + step // 2, end, key=read))


def sort_suffixes(
    tokens: Numbers, documents: int, tell: Callable[[float], None] = lambda share: None
) -> NDArray[np.uint32]:
    """Return the positions of all tokens, sorted by the first `SORTED` tokens of the suffixes that begin there.

    The method is prefix doubling: if suffixes are sorted by h tokens, the rank of a suffix and the rank of the suffix h
    tokens later sort it by 2h tokens (Manber & Myers 1990). Suffixes that are already unique are not sorted again
    (Larsson & Sadakane 2007). Equal suffixes are sorted by their positions, so every machine makes the same array.

    Args:
        tokens: of all documents, each followed by a separator.
        tell: gets the share of suffixes that have their final place.
    """
    size = len(tokens)
    num_sorted = 8 // tokens.dtype.itemsize  # tokens by which the suffixes are sorted
    order, group_starts, unique = _sorted_groups(_first_keys(tokens))
    rank = np.empty(size, np.uint64)  # where a suffix's group begins
    rank[order] = group_starts
    pending = np.flatnonzero(~unique)  # places in `order` that are not final
    group_starts = group_starts[pending]
    while len(pending):
        tell(1 - len(pending) / size)
        positions = order[pending]
        if num_sorted < SORTED:
            # The last token is a separator, and the order of what follows a separator does not matter.
            later = rank[np.minimum(positions + num_sorted, size - 1)]
        else:
            later = positions.astype(np.uint64)
        group_order, starts, unique = _sorted_groups(group_starts.astype(np.uint64) * np.uint64(size) + later)
        positions = positions[group_order]
        order[pending] = positions
        group_starts = pending[starts]
        rank[positions] = group_starts
        pending = pending[~unique]
        group_starts = group_starts[~unique]
        num_sorted *= 2
    tell(1.0)
    return order[: size - documents].astype(np.uint32)  # separators are the largest numbers, and so the last


def join(documents: Sequence[NDArray[np.integer[Any]]], vocab: int) -> Numbers:
    """Join documents, each followed by a separator, in the narrowest type that can hold them."""
    width = 2 if vocab <= _separator(2) else 4
    separator = np.array([_separator(width)], np.int64)
    parts = [part for document in documents for part in (document, separator)]
    return np.concatenate([part.astype(f"u{width}") for part in parts]).astype(f">u{width}")


def describe(tokens: Numbers, *, documents: int, vocab: int, tokenizer: str, files: Sequence[Source] = ()) -> Header:
    """Return the header for a result of `join`."""
    return Header(
        tokens=len(tokens),
        documents=documents,
        vocab=vocab,
        width=tokens.dtype.itemsize,
        tokenizer=tokenizer,
        files=tuple(files),
    )


def vocabulary(tokenizer: Any) -> int:
    """Return the number of ids of a tokenizer, with unused ids between them."""
    return 1 + int(max(tokenizer.get_vocab().values()))


def fingerprint(tokenizer: Any) -> str:
    """Return a hash of a tokenizer's vocabulary. Equal hashes: equal ids have the same text."""
    entries = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()


def read_header(folder: Path) -> Header:
    """Read the header of a datastore.

    Raises:
        OutriderError: the folder is not a datastore, it is damaged, or it has another version.
    """
    try:
        entries = json.loads((folder / HEADER).read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise OutriderError(
            f"{folder} holds no datastore; make one with outrider index FILES --target MODEL --out {folder}"
        ) from None
    except (OSError, ValueError) as error:
        raise _damaged(folder / HEADER, str(error)) from error
    if not isinstance(entries, dict) or entries.get("format") != _FORMAT:
        raise _damaged(folder / HEADER, f"its format is not {_FORMAT!r}")
    if entries.get("version") != VERSION:
        raise OutriderError(
            f"{folder} is a datastore of version {entries.get('version')}, but this program reads"
            f" version {VERSION}; build it again with outrider index --force"
        )
    try:
        header = Header(**entries | {"files": tuple(Source(**file) for file in entries["files"])})
        is_valid = header.width in (2, 4) and 0 < header.documents < header.tokens
    except (TypeError, KeyError) as error:
        raise _damaged(folder / HEADER, str(error)) from error
    if not is_valid:
        raise _damaged(folder / HEADER, "its width or its numbers of documents and tokens are not possible")
    return header


def _separator(width: int) -> int:
    """Return the separator for tokens of `width` bytes. It is larger than any token."""
    return int(256**width - 1)


def _first_keys(tokens: Numbers) -> NDArray[np.uint64]:
    """Return the first eight bytes of each suffix as one number."""
    bits = 8 * tokens.dtype.itemsize
    key = np.zeros(len(tokens), np.uint64)
    for ahead in range(min(64 // bits, len(tokens))):
        key <<= np.uint64(bits)
        key[: len(tokens) - ahead] |= tokens[ahead:].astype(np.uint64)
    return key


class _SortedGroups(NamedTuple):
    """Sorted keys, in groups of equal ones."""

    order: Positions  # [n] index of each key
    starts: Positions  # [n] where the group of each key begins
    unique: NDArray[np.bool_]  # [n] whether a key is the only one in its group


def _sorted_groups(keys: NDArray[np.uint64]) -> _SortedGroups:
    order = np.argsort(keys)
    keys = keys[order]
    is_first = np.concatenate([[True], keys[1:] != keys[:-1]])
    starts = np.maximum.accumulate(np.where(is_first, np.arange(len(keys)), 0))
    return _SortedGroups(order, starts, is_first & np.concatenate([is_first[1:], [True]]))


def _map(path: Path, size: int) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            actual_size = os.fstat(file.fileno()).st_size
            if actual_size != size or not size:
                raise _damaged(path, f"it has {actual_size} bytes, but its header says {size}")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise _damaged(path, error.strerror or str(error)) from error


def _damaged(path: Path, why: str) -> OutriderError:
    return OutriderError(f"{path} is damaged ({why}); build the datastore again with outrider index --force")
