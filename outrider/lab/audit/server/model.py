"""The model that a server claims to run: its logits, its sampling distribution and the text of its tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from outrider.core import tree
from outrider.core.params import SamplingParams
from outrider.core.token_text import token_pieces
from outrider.core.types import SequenceState
from outrider.verify.sampling import SamplingTensors, apply_sampling

if TYPE_CHECKING:
    from outrider.lab.audit.pair import Pair

_INCOMPLETE = "\ufffd"  # what decoders give for the beginning of a character

Tokens = tuple[int, ...]


class Model:
    """A target in float32, or the draft of the server, with the logits that were computed already."""

    def __init__(self, pair: Pair, *, vocab: int | None = None) -> None:
        """Wrap a pair without proposer.

        Args:
            pair: the loaded model.
            vocab: number of logits to return; None: as many as the model has. Missing ones are -inf.
        """
        self.pair = pair
        self._vocab = vocab or pair.vocab
        self._known: dict[Tokens, torch.Tensor] = {}

    def logits(self, text: Sequence[int]) -> torch.Tensor:
        """Return the logits [V] float64 after `text`."""
        key = tuple(text)
        if key not in self._known:
            self._known[key] = self._fit(self.pair.logits(key))
        return self._known[key]

    def _fit(self, logits: torch.Tensor) -> torch.Tensor:
        logits = logits[: self._vocab].cpu().double()
        missing = self._vocab - len(logits)
        return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits


def distribution(logits: torch.Tensor, params: SamplingParams, *, prompt: Sequence[int], output: Sequence[int]) -> Any:
    """Return the distribution [V] float64 of the next token.

    Args:
        logits: [V] after prompt and output.
        params: the sampling parameters.
        prompt: the tokens that the repetition penalty counts beside the output.
        output: the tokens that all penalties count.
    """
    seq = SequenceState.of(prompt, params=params)
    seq.token_ids.extend(output)
    sampling = SamplingTensors.of((seq,), len(logits), logits.device)
    p = apply_sampling(logits[None, None], sampling, tree.empty(1, logits.device))[0, 0].double()
    return p / p.sum()


class Texts:
    """Turns tokens into the text that a server returns for them, and text into tokens."""

    def __init__(self, tokenizer: Any, vocab: int) -> None:
        self._tokenizer = tokenizer
        self._vocab = vocab

    def after(self, prompt: Sequence[int], output: Sequence[int]) -> str:
        """Return the text that `output` adds to the text of the prompt."""
        # The end of the prompt is context enough, and decoding all of it for every token would be slow.
        context = list(prompt[-8:])
        before = self._decode(context)
        return self._decode([*context, *output])[len(before) :]

    def encode(self, text: str) -> Tokens:
        """Return the tokenizer's own tokens of a text, without special tokens."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False, verbose=False))

    def beginnings(self, text: bytes) -> Iterator[int]:
        """Yield every token whose bytes are the beginning of a text, longest first. It may end inside a character."""
        for length in range(min(len(text), self._longest), 0, -1):
            yield from self._by_piece.get(text[:length], ())

    def size(self, token: int) -> int:
        """Return the number of bytes of a token that `beginnings` yields."""
        return len(self._pieces[token])

    @cached_property
    def _pieces(self) -> Mapping[int, bytes]:
        """The bytes of each token inside of a sentence. Special tokens have none."""
        anchor = self.encode("a")
        before = self._decode(anchor)
        special = set(self._tokenizer.all_special_ids)
        ids = [token for token in range(min(self._vocab, len(self._tokenizer))) if token not in special]
        texts = self._tokenizer.batch_decode([[*anchor, token] for token in ids], clean_up_tokenization_spaces=False)
        parts = token_pieces(self._tokenizer)
        pieces = {}
        for token, text in zip(ids, texts, strict=True):
            piece = text[len(before) :]
            # Decoders do not tell the bytes of a part of a character. The vocabulary does.
            pieces[token] = parts[token] if is_incomplete(piece) else piece.encode()
        return {token: piece for token, piece in pieces.items() if piece}

    @cached_property
    def _by_piece(self) -> Mapping[bytes, Sequence[int]]:
        """All tokens by their bytes."""
        tokens: dict[bytes, list[int]] = defaultdict(list)
        for token, piece in self._pieces.items():
            tokens[piece].append(token)
        return tokens

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._by_piece), default=0)

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def is_incomplete(text: str) -> bool:
    """Return whether a text has a part of a character, which servers hold back or replace."""
    return _INCOMPLETE in text
