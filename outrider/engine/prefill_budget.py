"""Limit the prompt tokens of a round, so that a long prompt does not delay decoding sequences."""

from outrider.errors import OutriderError

_MIN_TOKENS = 16  # prompt tokens of a round, even if it then takes longer than the limit
_INITIAL_TOKENS = 64  # prompt tokens of a round, until the time of a prompt token is known
_LEARNING_RATE = 0.2  # weight of the last round in the means
_MIN_PROMPT_SHARE = 0.05  # share of the time of a round that is always attributed to its prompt tokens


class PrefillBudget:
    """A limit on the prompt tokens of a round, and optionally on its time.

    The model of the time is `base + per_token * prompt tokens`. Rounds without prompts determine
    the base, and rounds with prompts determine the time per token.
    """

    def __init__(self, max_tokens: int, *, seconds: float | None = None) -> None:
        """Allow up to `max_tokens` tokens per round, and about `seconds` for a round in which a sequence decodes."""
        if max_tokens < 1:
            raise OutriderError(f"max_num_batched_tokens is {max_tokens}; use at least 1")
        if seconds is not None and not seconds > 0:
            raise OutriderError(f"the time limit of a round is {seconds} seconds; use a number above 0, or None")
        self._max_tokens = max_tokens
        self._max_seconds = seconds
        self._base_seconds = 0.0
        self._token_seconds = 0.0

    def chunk(self, decoding: int) -> int:
        """Return the number of prompt tokens for the next round, in which `decoding` sequences decode."""
        if self._max_seconds is None or not decoding:
            return max(self._max_tokens - decoding, 1)
        if self._token_seconds:
            tokens = int((self._max_seconds - self._base_seconds) / self._token_seconds)
        else:
            tokens = _INITIAL_TOKENS
        return max(min(max(tokens, _MIN_TOKENS), self._max_tokens - decoding), 1)

    def learn(self, fed: int, seconds: float) -> None:
        """Learn from a round that took `seconds` and processed `fed` prompt tokens."""
        if fed:
            token_seconds = max(seconds - self._base_seconds, _MIN_PROMPT_SHARE * seconds) / fed
            rate = _LEARNING_RATE if self._token_seconds else 1.0
            self._token_seconds += (token_seconds - self._token_seconds) * rate
        else:
            rate = _LEARNING_RATE if self._base_seconds else 1.0
            self._base_seconds += (seconds - self._base_seconds) * rate
