"""Give a tokenizer to llguidance, which compiles constraints."""

from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import Tokenizer

from outrider.core.token_text import TokenText, decoder_types, id_text, token_text
from outrider.errors import OutriderError

# llguidance takes a token that begins with this byte as special. UTF-8 text never has this byte.
_SPECIAL = b"\xff"
ANY_SPECIAL = "<[special]>"  # how a grammar names any token that no text needs, except end tokens
_DECODERS = frozenset({"ByteLevel", "ByteFallback", "Metaspace"})  # a token has the same bytes in every text


class GuidanceTokenizer:
    """A tokenizer as llguidance needs it: the bytes of each token, and how a text is tokenized.

    Constraints are on bytes. So an added token that is not special, such as <think> of Qwen 3, is text like any other
    token. llguidance's own reader would take it as special, because of its angle brackets.
    """

    bos_token_id = None  # not used by llguidance

    def __init__(self, tokenizer: Any, *, vocab: int, ends: Sequence[int]) -> None:
        """Read a tokenizer of transformers.

        Args:
            tokenizer: the tokenizer. It is copied.
            vocab: the number of ids of the model.
            ends: the ids that end a text. They have no text.

        Raises:
            OutriderError: the tokenizer is not a fast one, or its tokens have no fixed bytes.
        """
        _check(tokenizer)
        copy = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        copy.no_padding()
        copy.no_truncation()
        copy.encode_special_tokens = True  # a constraint spells text, even if it looks like a special token
        self.text = token_text(
            tokenizer, cut=lambda texts: [copy.encode(text, add_special_tokens=False).ids for text in texts]
        )
        self.eos_token_id = ends[0] if ends else None
        self.tokens = _tokens(self.text, vocab, ends)  # by id; empty for unused ids
        self.named = _named_tokens(tokenizer, self.tokens, ends)  # see `_named_tokens`

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a text that continues another one. They spell the text."""
        (ids,) = self.text.encode([text])
        data = text.encode()
        return ids if self.text.spell(ids) == data else self.text.longest_match(data)


def _check(tokenizer: Any) -> None:
    """Raise OutriderError if the tokenizer cannot be given to llguidance."""
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise OutriderError("constraints need a fast tokenizer, and this one is not; use a model with a tokenizer.json")
    types = decoder_types(tokenizer)
    if not types & _DECODERS:
        raise OutriderError(
            f"constraints need a tokenizer with one of the decoders {', '.join(sorted(_DECODERS))}, and this one has"
            f" {', '.join(sorted(types)) or 'none'}; use another model, or leave the constraint out"
        )


def _tokens(text: TokenText, vocab: int, ends: Sequence[int]) -> list[bytes]:
    """Return the bytes of each token, with those of special tokens marked. The last one is beyond all ids."""
    size = max(vocab, len(text.pieces), *(1 + id for id in (*text.special, *ends)), 0)
    tokens = [*text.pieces, *[b""] * (size + 1 - len(text.pieces))]
    for id in (*text.special, *ends):
        tokens[id] = _SPECIAL + text.special.get(id, id_text(id)).encode()
    return tokens


def _named_tokens(tokenizer: Any, tokens: Sequence[bytes], ends: Sequence[int]) -> dict[str, str]:
    """Return sets of ids, in llguidance's syntax, by how a grammar names them.

    llguidance knows special tokens by name, but not added tokens that are text. `ANY_SPECIAL` is every token that no
    text needs and that does not end the text: special tokens, unused ids, and the byte that no text has.
    """
    added = tokenizer.added_tokens_decoder.items()
    named = {token.content: _id_set([id]) for id, token in added if not token.special and id not in ends}
    silent = [id for id, token in enumerate(tokens) if not token or token.startswith(_SPECIAL)]
    return named | {ANY_SPECIAL: _id_set(id for id in silent if id not in ends)}


def _id_set(ids: Iterable[int]) -> str:
    """Return ascending ids as a set in llguidance's syntax, such as <[3-5,9]>."""
    ranges: list[list[int]] = []
    for id in ids:
        if ranges and id == ranges[-1][1] + 1:
            ranges[-1][1] = id
        else:
            ranges.append([id, id])
    return "<[" + ",".join(f"{first}-{last}" for first, last in ranges) + "]>"
