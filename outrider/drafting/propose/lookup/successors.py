"""What may follow the last tokens of a sequence, as the target's earlier logits and the prompt have shown it."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from math import exp
from typing import NamedTuple

NUM_SUCCESSORS = 8  # kept for a suffix
MAX_SUFFIX = 4  # tokens
_SUFFIX_SIZES = range(MAX_SUFFIX, 0, -1)
# Sources of successors: 1 to MAX_SUFFIX are the sizes of matching suffixes.
_FREQUENT = 0  # the most frequent tokens of the output
SIMILAR = MAX_SUFFIX + 1  # what followed a similar token
_SOURCE_PRIORS = (0.2, 0.4, 0.6, 0.8, 0.85, 0.6)  # prior acceptance of the likeliest successor, by source
_LOGIT_STEP = 1.5  # difference of logits between two levels
_EVEN_LEVEL = 4  # level of a token that is as likely as its strongest rival; there are as many above and below
_PROMPT_LEVEL = 2 * _EVEN_LEVEL + 1  # level of a token from the prompt, which has no logits
_KINDS_PER_SOURCE = NUM_SUCCESSORS * (_PROMPT_LEVEL + 1)
MAX_SUFFIXES = 1 << 16  # stored for a sequence


class Successors(NamedTuple):  # dozens are made in a round, and a frozen dataclass takes four times as long to make
    """Tokens that may follow a suffix, likeliest first."""

    tokens: Sequence[int]
    logits: Sequence[float] | None  # None: tokens from the prompt, latest first

    def kind(self, source: int, rank: int) -> int:
        """Return the kind of a draft token: its source, its rank, and its logit in comparison with its rival."""
        if self.logits is None:
            level = _PROMPT_LEVEL
        else:
            steps = (self.logits[rank] - self.logits[not rank]) / _LOGIT_STEP
            level = _EVEN_LEVEL + round(max(min(steps, _EVEN_LEVEL), -_EVEN_LEVEL))
        return source * _KINDS_PER_SOURCE + level * NUM_SUCCESSORS + rank


class SuccessorTable:
    """The suffixes of one sequence, and the tokens that may follow each."""

    def __init__(self, num_prompt_tokens: int) -> None:
        """Add the first `num_prompt_tokens` tokens as they are. The successors of later tokens come from logits."""
        self.by_suffix: dict[tuple[int, ...], Successors] = {}
        self._num_prompt_tokens = num_prompt_tokens
        self._next_position = 1
        self._output_counts: Counter[int] = Counter()
        self._frequent: Successors | None = None  # cache of `_most_frequent`, until more is emitted

    def add_prompt(self, tokens: Sequence[int], end: int) -> None:
        """Add the tokens of the prompt before position `end`."""
        stop = min(end, self._num_prompt_tokens)
        for position in range(self._next_position, stop):
            token = tokens[position]
            for start in reversed(range(max(position - MAX_SUFFIX, 0), position)):
                suffix = tuple(tokens[start:position])
                known = self.by_suffix.get(suffix)
                others = [other for other in known.tokens if other != token] if known else []
                self.by_suffix[suffix] = Successors([token, *others[: NUM_SUCCESSORS - 1]], None)
        self._next_position = max(self._next_position, stop)

    def add_output(self, tokens: Sequence[int]) -> None:
        """Count tokens that the sequence has emitted."""
        self._output_counts.update(tokens)
        self._frequent = None

    def put(self, suffix: tuple[int, ...], successors: Successors) -> None:
        """Store the successors under the last token of the suffix, under its last two tokens, and so on."""
        for size in range(1, len(suffix) + 1):
            self.by_suffix[suffix[-size:]] = successors
        if len(self.by_suffix) > MAX_SUFFIXES:
            for oldest in list(islice(self.by_suffix, MAX_SUFFIXES // 4)):
                del self.by_suffix[oldest]

    def candidates(self, suffix: tuple[int, ...]) -> Iterator[tuple[int, int]]:
        """Yield tokens that may follow a suffix and their kinds, likely ones first."""
        size, successors = self._longest_match(suffix)
        sources = [(size, successors)]
        if size < 2:
            sources.append((SIMILAR, self._similar(suffix)))
        if not size:
            sources.append((_FREQUENT, self._most_frequent()))
        yielded: set[int] = set()
        for source, known in sources:
            if known is None:
                continue
            for rank, token in enumerate(known.tokens):
                if token not in yielded:
                    yielded.add(token)
                    yield token, known.kind(source, rank)

    def _longest_match(self, suffix: tuple[int, ...]) -> tuple[int, Successors | None]:
        """Return the size of the longest known suffix, and its successors."""
        for size in _SUFFIX_SIZES:
            successors = self.by_suffix.get(suffix[-size:])
            if successors is not None:
                return min(size, len(suffix)), successors
        return 0, None

    def _similar(self, suffix: tuple[int, ...]) -> Successors | None:
        """Return what may follow another token in place of the last one: the likeliest that was scored at this place.

        That token was a draft token in the last pass. It was scored although it was not accepted.
        """
        _, rivals = self._longest_match(suffix[:-1])
        before = suffix[-MAX_SUFFIX:-1]
        for token in rivals.tokens if rivals else ():
            successors = self.by_suffix.get((*before, token))
            if successors is not None and token != suffix[-1]:
                return successors
        return None

    def _most_frequent(self) -> Successors:
        if self._frequent is None:
            tokens = [token for token, _ in self._output_counts.most_common(NUM_SUCCESSORS)]
            self._frequent = Successors(tokens, None)
        return self._frequent


def prior(kind: int) -> float:
    """Return the probability that a draft token of this kind is accepted, before any has been verified."""
    source, level_and_rank = divmod(kind, _KINDS_PER_SOURCE)
    level, rank = divmod(level_and_rank, NUM_SUCCESSORS)
    if level == _PROMPT_LEVEL:
        return _SOURCE_PRIORS[source] / (1 + rank)
    return _SOURCE_PRIORS[source] / (1 + exp((_EVEN_LEVEL - level) * _LOGIT_STEP))
