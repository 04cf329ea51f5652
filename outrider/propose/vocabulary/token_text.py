"""What tokens spell, whatever their tokenizer writes a space or a byte as, and which tokens two vocabularies share."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.errors import OutriderError

_SAMPLE = "Call at 7:30, naïve friend!\n\tif x > 0:\n        return [1, 'two']  # ok\n"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # how sentencepiece writes a byte that is no piece of its own
_SPACE = "▁"  # how sentencepiece writes a space
_BYTEWISE_SPACE = "Ġ"  # how byte-level tokenizers write one


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenText:
    """One tokenizer's pieces as bytes."""

    pieces: tuple[bytes, ...]  # by id; empty for special tokens, and for ids that no token has
    ids: Mapping[bytes, int]  # of each piece
    special: Mapping[int, str]  # ids of special tokens, and how they are written
    begin: tuple[int, ...]  # special tokens that every text begins with
    roles: Mapping[str, int]  # the special tokens that begin and that end a text, under "bos" and "eos"
    cut: Callable[[Sequence[str]], list[list[int]]]  # texts as ids, special tokens apart; may put a space in front

    def spell(self, ids: Sequence[int]) -> bytes:
        """What these tokens write, one after the other; special tokens write nothing."""
        return b"".join(self.pieces[id] if id < len(self.pieces) else b"" for id in ids)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Each text as the ids that spell it where it stands: in the middle of another, with no space put in front."""
        plain = self.cut(texts) if texts else []
        return [
            ids if self.spell(ids) == text.encode() else self._without_space(text, ids)
            for text, ids in zip(texts, plain, strict=True)
        ]

    def _without_space(self, text: str, ids: list[int]) -> list[int]:
        """`ids` of a text that its tokenizer puts a space in front of, or changes."""
        if text.startswith(" "):
            (shorter,) = self.cut([text[1:]])
            if self.spell(shorter) == text.encode():
                return shorter
        if ids and self.spell(ids) == b" " + text.encode():
            return [*self._longest(self.pieces[ids[0]][1:]), *ids[1:]]
        return ids

    def _longest(self, text: bytes) -> list[int]:
        """Ids of the longest pieces, from left to right; what no piece begins with is left out."""
        ids = []
        while text:
            size = next((size for size in range(len(text), 0, -1) if text[:size] in self.ids), 0)
            if size:
                ids.append(self.ids[text[:size]])
            text = text[size or 1 :]
        return ids


def token_text(tokenizer: Any, whose: str) -> TokenText:
    """How a tokenizer of transformers spells.

    Raises:
        OutriderError: its pieces do not add up to the text that it was given; `whose` tells the user which one.
    """
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    added = tokenizer.added_tokens_decoder
    special = {id: token.content for id, token in added.items() if token.special}
    bytewise = _bytewise(vocabulary)
    alphabet = _alphabet() if bytewise else {}
    pieces = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, id in vocabulary.items():
        if id not in special:
            pieces[id] = token.encode() if id in added else _piece(token, alphabet)
    opened: list[int] = tokenizer("a")["input_ids"]
    own = next((i for i, id in enumerate(opened) if id not in special), 0)

    def cut(texts: Sequence[str]) -> list[list[int]]:
        return tokenizer(list(texts), add_special_tokens=False)["input_ids"]  # type: ignore[no-any-return]

    roles = {"eos": tokenizer.eos_token_id, "bos": tokenizer.bos_token_id}
    found = TokenText(
        pieces=tuple(pieces),
        # Where bytes are pieces as well, they come first: the last id is the one that the tokenizer itself would use.
        ids={piece: id for id, piece in enumerate(pieces) if piece},
        special=special,
        begin=tuple(opened[:own]),
        roles={role: id for role, id in roles.items() if id is not None},
        cut=cut,
    )
    if found.spell(found.encode([_SAMPLE])[0]) != _SAMPLE.encode():
        raise OutriderError(
            f"the tokenizer of {whose} does not give a text back as it was, so it cannot be matched with another one;"
            " use a draft of the target's family, or --proposer ngram"
        )
    return found


def counterparts(target: TokenText, draft: TokenText) -> list[int]:
    """For each id of the target the draft's id that spells the same, or -1; no two ids have the same counterpart.

    Special tokens are matched by how they are written, and else by whether they end or begin a text.
    """
    marks, others = ({content: id for id, content in each.special.items()} for each in (target, draft))
    found = [-1] * max(len(target.pieces), *(id + 1 for id in target.special), 0)
    for content in marks.keys() & others.keys():
        found[marks[content]] = others[content]
    for role in target.roles.keys() & draft.roles.keys():
        id, other = target.roles[role], draft.roles[role]
        if found[id] < 0 and other not in found:
            found[id] = other
    for piece in target.ids.keys() & draft.ids.keys():
        found[target.ids[piece]] = draft.ids[piece]
    return found


def _bytewise(vocabulary: Mapping[str, int]) -> bool:
    """Whether pieces are written in the byte-level alphabet; a vocabulary shows it by how it writes spaces."""
    counts = [sum(token.startswith(mark) for token in vocabulary) for mark in (_BYTEWISE_SPACE, _SPACE)]
    return counts[0] > counts[1]


def _piece(token: str, alphabet: Mapping[str, int]) -> bytes:
    if alphabet:
        return bytes(alphabet[letter] for letter in token) if set(token) <= alphabet.keys() else token.encode()
    if match := _BYTE.fullmatch(token):
        return bytes([int(match[1], 16)])
    return token.replace(_SPACE, " ").encode()


def _alphabet() -> dict[str, int]:
    """The byte-level alphabet: bytes that print stand for themselves, the others are counted from 256 on."""
    printing = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in printing)
    return {chr(byte): byte for byte in printing} | {chr(256 + i): byte for i, byte in enumerate(others)}
