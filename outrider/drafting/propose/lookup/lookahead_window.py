"""The n-gram pool and the window of lookahead decoding, of one sequence (Fu et al. 2024)."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

MAX_POOL_TOKENS = 1 << 15  # first tokens for which the pool has n-grams

Ngram = tuple[int, ...]


class NgramPool:
    """The n-grams of one sequence by their first token, latest first."""

    def __init__(self, most: int) -> None:
        """Keep at most `most` n-grams for each first token."""
        self._most = most
        self.ngrams: dict[int, list[Ngram]] = {}  # the rest of each n-gram, by first token

    def add(self, ngram: Ngram) -> None:
        first = ngram[0]
        rest = ngram[1:]
        others = [other for other in self.ngrams.pop(first, ()) if other != rest]
        self.ngrams[first] = [rest, *others[: self._most - 1]]
        if len(self.ngrams) > MAX_POOL_TOKENS:
            for oldest in list(islice(self.ngrams, MAX_POOL_TOKENS // 4)):
                del self.ngrams[oldest]

    def after(self, token: int) -> list[Ngram]:
        """Return the n-grams that begin with a token, without it."""
        return self.ngrams.get(token, [])


@dataclass(slots=True)
class SequenceWindow:
    """The pool and the window of one sequence.

    A column has the predicted token of a position and the tokens that may follow it.
    """

    pool: NgramPool
    rng: random.Random
    columns: list[Ngram] = field(default_factory=list)

    def resize(self, width: int, size: int, tokens: Sequence[int]) -> None:
        """Set the number of columns. New columns have `size` random tokens of the sequence."""
        del self.columns[width:]
        while len(self.columns) < width:
            self.columns.append(tuple(self.rng.choices(tokens, k=size)))

    def paths(self) -> list[Ngram]:
        """Return for each column the tokens from the root to its last window token."""
        first_tokens = tuple(column[0] for column in self.columns)
        return [first_tokens[:position] + column for position, column in enumerate(self.columns)]

    def move(self, predicted: Sequence[int | None], tokens: Sequence[int], emitted: int) -> None:
        """Make a step of Jacobi iteration, then drop the columns of emitted positions.

        Args:
            predicted: the target's choice after each column; None if the column was not scored.
            tokens: the sequence, from which a missing choice is drawn at random.
            emitted: number of emitted tokens.
        """
        moved = []
        for column, token in zip(self.columns, predicted, strict=True):
            if token is None:
                token = self.rng.choice(tokens)
            else:
                self.pool.add((*column, token))
            moved.append((*column[1:], token))
        self.columns = moved[emitted - 1 :]
