"""Count rounds by the number of running sequences: speculation pays differently in a full batch and in its tail."""

from dataclasses import dataclass

from outrider.core.stats import Stats


@dataclass(slots=True, kw_only=True)
class Regime:
    """The rounds in which `least` to `most` sequences decoded."""

    least: int
    most: int
    rounds: int = 0
    seconds: float = 0.0  # of these rounds, with the prompts that they have prefilled
    tokens: int = 0  # of the output
    passes: int = 0  # decoding sequences, summed over rounds
    draft_tokens: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second of all sequences."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def tau(self) -> float | None:
        """Output tokens per pass; None: no pass."""
        return self.tokens / self.passes if self.passes else None

    @property
    def draft_length(self) -> float:
        """Mean draft tokens per sequence and round; 0 where the planner has switched speculation off."""
        return self.draft_tokens / self.passes if self.passes else 0.0


class RegimeCounter:
    """Adds up rounds by powers of two of the number of decoding sequences: 1, 2, 3 to 4, 5 to 8, ..."""

    def __init__(self) -> None:
        self._regimes: dict[int, Regime] = {}

    def add(self, before: Stats, after: Stats, seconds: float) -> None:
        """Add a round, given the engine's sums before and after it. Rounds that only prefill are left out."""
        seqs = after.passes - before.passes
        if not seqs:
            return
        power = (seqs - 1).bit_length()
        least = (1 << power) // 2 + 1 if power else 1
        regime = self._regimes.setdefault(power, Regime(least=least, most=1 << power))
        regime.rounds += 1
        regime.seconds += seconds
        regime.tokens += after.output_tokens - before.output_tokens
        regime.passes += seqs
        regime.draft_tokens += after.draft_tokens - before.draft_tokens

    def take(self) -> tuple[Regime, ...]:
        """Return the sums, for many sequences first, and start again."""
        regimes = tuple(self._regimes[power] for power in sorted(self._regimes, reverse=True))
        self._regimes = {}
        return regimes
