"""Find the bytes that each token spells, and tokenize texts by them."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # how sentencepiece writes a byte that has no token of its own
_SPACE = "▁"  # how sentencepiece writes a space
_BYTE_LEVEL_SPACE = "Ġ"  # how byte-level tokenizers write a space


class SingleTokens:
    """The text of single tokens of a tokenizer, read on demand.

    An added token that is not special has a text like any other token. A special token is never
    part of a decoded text, so it has no text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.special = {id: token.content for id, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._tokenizer = tokenizer
        self._alphabet = _byte_level_alphabet() if _is_byte_level(tokenizer) else {}
        self._texts: dict[int, str] = {}

    def piece(self, id: int) -> bytes:
        """Return the bytes of a decoded token; b"" for special tokens and for unused ids."""
        token = None if id in self.special else self._tokenizer.convert_ids_to_tokens(id)
        return b"" if token is None else self.spell(token)

    def spell(self, token: str) -> bytes:
        """Return the bytes of a token, given as it is written in the vocabulary."""
        alphabet = self._alphabet
        if alphabet:
            return bytes(alphabet[letter] for letter in token) if alphabet.keys() >= set(token) else token.encode()
        if match := _BYTE.fullmatch(token):
            return bytes([int(match[1], 16)])
        return token.replace(_SPACE, " ").encode()

    def text(self, id: int) -> str:
        """Return a text that shows the token.

        Bytes that are no whole character are written as \\xNN, special tokens by their names, and unused ids as
        token_id:ID.
        """
        if id not in self._texts:
            shown = self.piece(id).decode(errors="backslashreplace")
            self._texts[id] = shown or self.special.get(id) or id_text(id)
        return self._texts[id]


def id_text(id: int) -> str:
    """Return a text for an id whose token has none, or has that of another token."""
    return f"token_id:{id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenText:
    """The text of each token of a tokenizer, as bytes."""

    pieces: tuple[bytes, ...]  # by id; empty for special tokens and for unused ids
    ids: Mapping[bytes, int]  # id of each piece
    special: Mapping[int, str]  # ids of special tokens, and how they are written
    # Tokenizes texts without adding special tokens. It may prepend a space.
    cut: Callable[[Sequence[str]], list[list[int]]]
    begin: tuple[int, ...]  # special tokens that every text begins with
    roles: Mapping[str, int]  # ids of the special tokens that begin ("bos") and end ("eos") a text

    def spell(self, ids: Sequence[int]) -> bytes:
        """Return the text of tokens. Special tokens have no text."""
        return b"".join(self.pieces[id] if id < len(self.pieces) else b"" for id in ids)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenize each text as if it continued another text, without a space in front."""
        tokenized = self.cut(texts) if texts else []
        return [
            ids if self.spell(ids) == text.encode() else self._without_space(text, ids)
            for text, ids in zip(texts, tokenized, strict=True)
        ]

    def _without_space(self, text: str, ids: list[int]) -> list[int]:
        """Correct the `ids` of a text if its tokenizer prepends a space."""
        if text.startswith(" "):
            (rest_ids,) = self.cut([text[1:]])
            if self.spell(rest_ids) == text.encode():
                return rest_ids
        if ids and self.spell(ids) == b" " + text.encode():
            return [*self.longest_match(self.pieces[ids[0]][1:]), *ids[1:]]
        return ids

    def longest_match(self, text: bytes) -> list[int]:
        """Tokenize greedily by the longest piece, from left to right. Bytes that begin no piece are left out."""
        ids = []
        while text:
            size = next((size for size in range(len(text), 0, -1) if text[:size] in self.ids), 0)
            if size:
                ids.append(self.ids[text[:size]])
            text = text[size or 1 :]
        return ids


def token_text(tokenizer: Any, *, cut: Callable[[Sequence[str]], list[list[int]]] | None = None) -> TokenText:
    """Return the text of each token of a transformers tokenizer.

    Args:
        tokenizer: a tokenizer of transformers.
        cut: what tokenizes a list of texts. None: the tokenizer.
    """
    special = SingleTokens(tokenizer).special
    pieces = token_pieces(tokenizer)
    sample_ids: list[int] = tokenizer("a")["input_ids"]
    num_begin = next((i for i, id in enumerate(sample_ids) if id not in special), 0)

    def cut_by_tokenizer(texts: Sequence[str]) -> list[list[int]]:
        return tokenizer(list(texts), add_special_tokens=False)["input_ids"]  # type: ignore[no-any-return]

    roles = {"eos": tokenizer.eos_token_id, "bos": tokenizer.bos_token_id}
    return TokenText(
        pieces=pieces,
        # A byte token and an ordinary token can have the same piece. The tokenizer itself uses the later one.
        ids={piece: id for id, piece in enumerate(pieces) if piece},
        special=special,
        cut=cut or cut_by_tokenizer,
        begin=tuple(sample_ids[:num_begin]),
        roles={role: id for role, id in roles.items() if id is not None},
    )


def token_pieces(tokenizer: Any) -> tuple[bytes, ...]:
    """Return the bytes of each token of a transformers tokenizer, by id. Special tokens and unused ids have none."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    singles = SingleTokens(tokenizer)
    pieces = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, id in vocabulary.items():
        if id not in singles.special:
            pieces[id] = singles.spell(token)
    return tuple(pieces)


def decoder_types(tokenizer: Any) -> frozenset[str]:
    """Return the types of the decoders of a fast tokenizer, such as ByteLevel; none for other tokenizers."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    return frozenset() if decoder is None else frozenset(_types(json.loads(decoder.__getstate__())))


def _types(decoder: Mapping[str, Any]) -> Iterator[str]:
    """Yield the type of a decoder and of all decoders in it."""
    yield decoder["type"]
    for part in decoder.get("decoders", ()):
        yield from _types(part)


def _is_byte_level(tokenizer: Any) -> bool:
    """Return whether tokens are written in the byte-level alphabet.

    Without a decoder, judge by how most tokens write a space.
    """
    if types := decoder_types(tokenizer):
        return "ByteLevel" in types
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    byte_level = sum(token.startswith(_BYTE_LEVEL_SPACE) for token in vocabulary)
    sentencepiece = sum(token.startswith(_SPACE) for token in vocabulary)
    return byte_level > sentencepiece


def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte of each letter: printable bytes are themselves, the others are numbered from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
