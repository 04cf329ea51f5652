"""A datastore on disk: the tokens of many documents, and a suffix array over them.

A suffix array lists where suffixes begin, in the order of what they say (Manber & Myers 1990): all occurrences of an
ending then stand side by side, and a binary search finds them. A folder holds three files. `tokens.bin` has all
documents, each closed by a separator that is no token, as big-endian numbers: compared as bytes they are in the order
of the numbers. `suffixes.bin` has the positions, little-endian. `header.json` says what they were made from.
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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.errors import OutriderError

VERSION = 1  # of what the files mean
LONGEST = 16  # tokens of an ending that are looked for
SORTED = 64  # suffixes are in the order of so many first tokens, and then of their positions
MOST_TOKENS = 2**32 - 1  # a position takes four bytes

HEADER, TOKENS, SUFFIXES = "header.json", "tokens.bin", "suffixes.bin"
_FORMAT = "outrider datastore"

Numbers = NDArray[np.unsignedinteger[Any]]
Places = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A file that a datastore was made from."""

    name: str
    sha256: str
    documents: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a datastore's numbers are."""

    format: str = _FORMAT
    version: int = VERSION
    tokens: int  # separators counted
    documents: int
    vocab: int  # of the tokenizer
    width: int  # bytes of a token
    tokenizer: str  # its fingerprint
    files: tuple[Source, ...]


@dataclass(frozen=True, slots=True)
class Match:
    """Where an ending occurs."""

    size: int  # tokens of the ending
    span: range  # of the suffix array


class Datastore:
    """Finds the endings of texts, and what followed them. It is only read, so any number of texts may share it."""

    def __init__(self, header: Header, tokens: mmap.mmap | bytes, suffixes: mmap.mmap | bytes) -> None:
        """Read `tokens` and `suffixes` as the header says they are."""
        self.header = header
        self.separator = _separator(header.width)
        self._bytes, self._width = tokens, header.width
        self._tokens = np.frombuffer(tokens, f">u{header.width}")
        self._places = np.frombuffer(suffixes, "<u4")
        self._suffixes = self._places.astype(np.uint32, copy=False).data

    @classmethod
    def open(cls, folder: str | Path) -> Datastore:
        """Map a folder into memory; what is looked up is read when it is needed.

        Raises:
            OutriderError: there is no datastore, it is damaged, or of another version.
        """
        path = Path(folder).expanduser()
        header = read_header(path)
        entries = header.tokens - header.documents
        sizes = {TOKENS: header.tokens * header.width, SUFFIXES: entries * 4}
        maps = [_map(path / name, size) for name, size in sizes.items()]
        return cls(header, *maps)

    @classmethod
    def of(cls, documents: Sequence[Sequence[int]], vocab: int, *, tokenizer: str = "") -> Datastore:
        """A datastore in memory."""
        tokens = join([np.array(document, np.int64) for document in documents], vocab)
        header = describe(tokens, documents=len(documents), vocab=vocab, tokenizer=tokenizer)
        return cls(header, tokens.tobytes(), sort_suffixes(tokens, len(documents)).tobytes())

    def find(self, text: Sequence[int], *, shortest: int = 1, longest: int = LONGEST) -> Match | None:
        """The longest ending of `text` that occurs within a document, of `longest` down to `shortest` tokens.

        Where an ending occurs all shorter ones do, so its length is found by bisection, too.
        """
        known = takewhile(lambda token: token < self.separator, reversed(text[-longest:]))
        ending = tuple(known)[::-1]
        encoded = struct.pack(f">{len(ending)}{'H' if self._width == 2 else 'I'}", *ending)
        found, low, high = None, shortest, len(ending)
        while low <= high:
            size = (low + high) // 2
            span = self._occurrences(encoded[len(encoded) - size * self._width :])
            if span:
                found, low = Match(size, span), size + 1
            else:
                high = size - 1
        return found

    def following(self, match: Match, *, samples: int, depth: int) -> list[list[int]]:
        """[depth][S] what followed each of up to `samples` occurrences, evenly spread, in the order of the suffixes.

        What stands behind a separator belongs to another document.
        """
        count = min(samples, len(match.span))
        picks = match.span.start + np.arange(count) * len(match.span) // count
        at = self._places[picks].astype(np.int64) + match.size + np.arange(depth)[:, None]
        # A damaged datastore may lead to wrong guesses, but to nothing worse.
        following: list[list[int]] = self._tokens[np.minimum(at, len(self._tokens) - 1)].tolist()
        return following

    def _occurrences(self, ending: bytes) -> range:
        """Of an encoded ending, in the suffix array."""
        raw, width, length = self._bytes, self._width, len(ending)

        def read(place: int) -> bytes:
            return raw[place * width : place * width + length]

        first = bisect_left(self._suffixes, ending, key=read)
        if first == len(self._suffixes) or read(self._suffixes[first]) != ending:
            return range(0)
        # Most endings are rare, so the last one is near: look twice as far until it is behind.
        step = 1
        while first + step < len(self._suffixes) and read(self._suffixes[first + step]) == ending:
            step *= 2
        end = min(first + step, len(self._suffixes))
        return range(first, bisect_right(self._suffixes, ending, first + step // 2, end, key=read))


def sort_suffixes(
    tokens: Numbers, documents: int, tell: Callable[[float], None] = lambda share: None
) -> NDArray[np.uint32]:
    """Where the suffixes begin that begin with a token, in the order of their first `SORTED` tokens.

    By prefix doubling: once suffixes are in the order of h tokens, the rank of a suffix and that of the one h later
    order it by 2h (Manber & Myers 1990). Those that stand alone already are left where they are (Larsson & Sadakane
    2007). Equals end up in the order of their positions, so every machine makes the same array.

    Args:
        tokens: of all documents, each closed by a separator.
        documents: how many.
        tell: is told the share of suffixes that stand where they belong.
    """
    size, reach = len(tokens), 8 // tokens.dtype.itemsize
    order, heads, alone = _sorted_groups(_first_keys(tokens))
    rank = np.empty(size, np.uint64)  # where a suffix's group begins
    rank[order] = heads
    open_ = np.flatnonzero(~alone)
    heads = heads[open_]
    while len(open_):
        tell(1 - len(open_) / size)
        places = order[open_]
        # Behind a separator it does not matter, and the last token is one.
        later = rank[np.minimum(places + reach, size - 1)] if reach < SORTED else places.astype(np.uint64)
        by, starts, alone = _sorted_groups(heads.astype(np.uint64) * np.uint64(size) + later)
        order[open_] = places = places[by]
        heads = open_[starts]
        rank[places] = heads
        open_, heads = open_[~alone], heads[~alone]
        reach *= 2
    tell(1.0)
    return order[: size - documents].astype(np.uint32)  # separators are the largest numbers, and so the last


def join(documents: Sequence[NDArray[np.integer[Any]]], vocab: int) -> Numbers:
    """Documents one after another, each closed by a separator, in the narrowest numbers that hold them."""
    width = 2 if vocab <= _separator(2) else 4
    close = np.array([_separator(width)], np.int64)
    parts = [part for document in documents for part in (document, close)]
    return np.concatenate([part.astype(f"u{width}") for part in parts]).astype(f">u{width}")


def describe(tokens: Numbers, *, documents: int, vocab: int, tokenizer: str, files: Sequence[Source] = ()) -> Header:
    """The header of what `join` made."""
    return Header(
        tokens=len(tokens),
        documents=documents,
        vocab=vocab,
        width=tokens.dtype.itemsize,
        tokenizer=tokenizer,
        files=tuple(files),
    )


def vocabulary(tokenizer: Any) -> int:
    """The number of a tokenizer's ids, unused ones between them counted."""
    return 1 + int(max(tokenizer.get_vocab().values()))


def fingerprint(tokenizer: Any) -> str:
    """A hash of a tokenizer's vocabulary: where it is the same, the same ids are the same text."""
    entries = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()


def read_header(folder: Path) -> Header:
    """What a folder's datastore is made of.

    Raises:
        OutriderError: there is none, it is damaged, or of another version.
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
            f"{folder} is a datastore of version {entries.get('version')}, and this program reads version {VERSION};"
            " build it again with outrider index --force"
        )
    try:
        header = Header(**entries | {"files": tuple(Source(**file) for file in entries["files"])})
        sound = header.width in (2, 4) and 0 < header.documents < header.tokens
    except (TypeError, KeyError) as error:
        raise _damaged(folder / HEADER, str(error)) from error
    if not sound:
        raise _damaged(folder / HEADER, "its numbers do not fit together")
    return header


def _separator(width: int) -> int:
    """Larger than any token of so many bytes."""
    return int(256**width - 1)


def _first_keys(tokens: Numbers) -> NDArray[np.uint64]:
    """The first eight bytes of each suffix as one number."""
    bits = 8 * tokens.dtype.itemsize
    key = np.zeros(len(tokens), np.uint64)
    for ahead in range(min(64 // bits, len(tokens))):
        key <<= np.uint64(bits)
        key[: len(tokens) - ahead] |= tokens[ahead:].astype(np.uint64)
    return key


def _sorted_groups(key: NDArray[np.uint64]) -> tuple[Places, Places, NDArray[np.bool_]]:
    """The order of keys, and for each place in it where its group of equals begins and whether it stands alone."""
    order = np.argsort(key)
    key = key[order]
    first = np.concatenate([[True], key[1:] != key[:-1]])
    starts = np.maximum.accumulate(np.where(first, np.arange(len(key)), 0))
    return order, starts, first & np.concatenate([first[1:], [True]])


def _map(path: Path, size: int) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno()).st_size
            if found != size or not size:
                raise _damaged(path, f"it has {found} bytes, and its header says {size}")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise _damaged(path, error.strerror or str(error)) from error


def _damaged(path: Path, why: str) -> OutriderError:
    return OutriderError(f"{path} is damaged ({why}); build the datastore again with outrider index --force")
