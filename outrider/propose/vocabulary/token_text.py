"""Find the bytes that each token spells, and match the tokens of two vocabularies by them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.errors import OutriderError

_SAMPLE = "Call at 7:30, naïve friend!\n\tif x > 0:\n        return [1, 'two']  # ok\n"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # how sentencepiece writes a byte that has no token of its own
_SPACE = "▁"  # how sentencepiece writes a space
_BYTE_LEVEL_SPACE = "Ġ"  # how byte-level tokenizers write a space


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenText:
    """The text of each token of a tokenizer, as bytes."""

    pieces: tuple[bytes, ...]  # by id; empty for special tokens and for unused ids
    ids: Mapping[bytes, int]  # id of each piece
    special: Mapping[int, str]  # ids of special tokens, and how they are written
    begin: tuple[int, ...]  # special tokens that every text begins with
    roles: Mapping[str, int]  # ids of the special tokens that begin ("bos") and end ("eos") a text
    # Tokenizes texts without special tokens. It may prepend a space.
    cut: Callable[[Sequence[str]], list[list[int]]]

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
            return [*self._longest_match(self.pieces[ids[0]][1:]), *ids[1:]]
        return ids

    def _longest_match(self, text: bytes) -> list[int]:
        """Tokenize greedily by the longest piece, from left to right. Bytes that begin no piece are left out."""
        ids = []
        while text:
            size = next((size for size in range(len(text), 0, -1) if text[:size] in self.ids), 0)
            if size:
                ids.append(self.ids[text[:size]])
            text = text[size or 1 :]
        return ids


def token_text(tokenizer: Any, whose: str) -> TokenText:
    """Return the text of each token of a transformers tokenizer.

    Args:
        tokenizer: a tokenizer of transformers.
        whose: the model of the tokenizer, for messages.

    Raises:
        OutriderError: the tokens of a text do not spell the text.
    """
    special = {id: token.content for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    pieces = token_pieces(tokenizer)
    sample_ids: list[int] = tokenizer("a")["input_ids"]
    num_begin = next((i for i, id in enumerate(sample_ids) if id not in special), 0)

    def cut(texts: Sequence[str]) -> list[list[int]]:
        return tokenizer(list(texts), add_special_tokens=False)["input_ids"]  # type: ignore[no-any-return]

    roles = {"eos": tokenizer.eos_token_id, "bos": tokenizer.bos_token_id}
    text = TokenText(
        pieces=pieces,
        # A byte token and an ordinary token can have the same piece. The tokenizer itself uses the later one.
        ids={piece: id for id, piece in enumerate(pieces) if piece},
        special=special,
        begin=tuple(sample_ids[:num_begin]),
        roles={role: id for role, id in roles.items() if id is not None},
        cut=cut,
    )
    if text.spell(text.encode([_SAMPLE])[0]) != _SAMPLE.encode():
        raise OutriderError(
            f"the tokenizer of {whose} changes the text that it encodes, so its tokens cannot be matched with those of"
            " another tokenizer; use a draft of the target's family, or --proposer ngram"
        )
    return text


def token_pieces(tokenizer: Any) -> tuple[bytes, ...]:
    """Return the bytes of each token of a transformers tokenizer, by id. Special tokens and unused ids have none."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    added = tokenizer.added_tokens_decoder
    alphabet = _byte_level_alphabet() if _is_byte_level(vocabulary) else {}
    pieces = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, id in vocabulary.items():
        if id not in added:
            pieces[id] = _piece(token, alphabet)
        elif not added[id].special:
            pieces[id] = token.encode()
    return tuple(pieces)


def counterparts(target: TokenText, draft: TokenText) -> list[int]:
    """Return for each id of the target the draft's id with the same text; -1 if there is none.

    No two ids have the same counterpart. Special tokens are matched by how they are written, or else by their role.
    """
    target_special = {content: id for id, content in target.special.items()}
    draft_special = {content: id for id, content in draft.special.items()}
    matches = [-1] * max(len(target.pieces), *(id + 1 for id in target.special), 0)
    for content in target_special.keys() & draft_special.keys():
        matches[target_special[content]] = draft_special[content]
    for role in target.roles.keys() & draft.roles.keys():
        target_id = target.roles[role]
        draft_id = draft.roles[role]
        if matches[target_id] < 0 and draft_id not in matches:
            matches[target_id] = draft_id
    for piece in target.ids.keys() & draft.ids.keys():
        matches[target.ids[piece]] = draft.ids[piece]
    return matches


def _is_byte_level(vocabulary: Mapping[str, int]) -> bool:
    """Return whether tokens are written in the byte-level alphabet, judged by how most of them write a space."""
    byte_level = sum(token.startswith(_BYTE_LEVEL_SPACE) for token in vocabulary)
    sentencepiece = sum(token.startswith(_SPACE) for token in vocabulary)
    return byte_level > sentencepiece


def _piece(token: str, alphabet: Mapping[str, int]) -> bytes:
    """Return the bytes of a token. `alphabet` is empty if the tokenizer is not byte-level."""
    if alphabet:
        return bytes(alphabet[letter] for letter in token) if set(token) <= alphabet.keys() else token.encode()
    if match := _BYTE.fullmatch(token):
        return bytes([int(match[1], 16)])
    return token.replace(_SPACE, " ").encode()


def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte of each letter: printable bytes are themselves, the others are numbered from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
