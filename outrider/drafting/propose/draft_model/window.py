"""Let a draft model read only the last tokens of a sequence.

A draft model whose positions end before the target's could not draft beyond them. It reads a window
instead: the last tokens of the sequence, at positions from 0 on. When the window is full, it moves
on by half of its size, and the draft model reads the tokens that remain in it again. So each output
token costs one prefilled token of the draft model, and the draft model never sees positions that it
was not trained for (Xiao et al. 2024, "sliding window with re-computation").

A smaller window also makes drafts cheaper, because the draft model reads fewer keys and values for
each token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from outrider.core.cache import Cache, Layout, WrappedCache
from outrider.core.draws import Draws
from outrider.core.target import ChainSampler, Target
from outrider.core.types import Batch, Draft, DraftChains, Round, Scores, SequenceState, StopRule
from outrider.drafting.propose.vocabulary.wrapped_target import WrappedTarget

MIN_WINDOW = 16  # tokens
_MAX_RESERVE = 64  # tokens that a window reserves for a draft; a window below 256 tokens reserves a quarter


class WindowedTarget(WrappedTarget):
    """A draft model as a `Target` with the context of the engine, which reads a window of each sequence.

    Where a window begins depends on the length of the sequence only, so a draft does not depend on
    the rounds before. Windows begin at multiples of the stride. Sequences with a common prefix
    therefore share its keys and values, as long as their windows begin at the same token.
    """

    def __init__(self, inner: Target, *, context: int) -> None:
        """Wrap a draft model, whose context is the size of the window.

        Args:
            inner: the draft model.
            context: most tokens of a sequence.
        """
        super().__init__(inner)
        self.context = context
        self.size = inner.context
        self.stride = self.size // 2
        self._reserve = min(self.size // 4, _MAX_RESERVE)
        self._windows = _WindowCache(inner.cache, self)

    @property
    def cache(self) -> Cache:
        return self._windows

    @property
    def mean_length(self) -> int:
        """The mean number of tokens that the window of a long sequence holds."""
        return self.size - self._reserve - self.stride // 2

    def begin(self, end: int) -> int:
        """Return the first token of the window of a sequence with `end` tokens."""
        excess = end + self._reserve - self.size
        return -(-excess // self.stride) * self.stride if excess > 0 else 0

    def slide(self, seq: SequenceState, end: int) -> None:
        """Move the window of a sequence, so that a draft can follow its first `end` tokens."""
        self._windows.slide(seq, end)

    def room(self, slot: int, end: int) -> int:
        """Return how many draft tokens fit behind the first `end` tokens of a slot."""
        return min(self.size - (end - self._windows.offset(slot)), self.context - end)

    def score(self, batch: Batch, draft: Draft, first: int = -1) -> Scores:
        return self.inner.score(self._windows.shift(batch), draft, first)

    def draft_greedy(self, batch: Batch, vocab: int, stop_rule: StopRule | None = None) -> DraftChains:
        return self.inner.draft_greedy(self._windows.shift(batch), vocab, stop_rule)


class _SamplingWindowedTarget(WindowedTarget):
    """A window of a draft model that samples chains in one call."""

    def draft_sampled(self, batch: Batch, vocab: int, draws: Draws, stop_rule: StopRule | None = None) -> DraftChains:
        assert isinstance(self.inner, ChainSampler)
        return self.inner.draft_sampled(self._windows.shift(batch), vocab, draws, stop_rule)


def windowed(model: Target, *, context: int) -> WindowedTarget:
    """Return a draft model that reads a window of its own context. It samples chains as the draft model does."""
    window_class = _SamplingWindowedTarget if isinstance(model, ChainSampler) else WindowedTarget
    return window_class(model, context=context)


def find_window(model: Target | None) -> WindowedTarget | None:
    """Return the window of a draft model, also of a wrapped one; None: it has none."""
    while isinstance(model, WrappedTarget) and not isinstance(model, WindowedTarget):
        model = model.inner
    return model if isinstance(model, WindowedTarget) else None


@dataclass(slots=True, kw_only=True, eq=False)
class _Window:
    """The window of one slot."""

    offset: int = 0  # first token of the sequence that it holds
    scope: str | None = None
    seq: SequenceState | None = None  # the sequence
    view: SequenceState | None = None  # the sequence from `offset` on, as the inner cache knows it

    def of(self, seq: SequenceState) -> SequenceState:
        """Return the sequence from `offset` on."""
        tokens = seq.token_ids[self.offset :]
        if self.seq is not seq or self.view is None:
            self.seq = seq
            self.view = replace(seq, token_ids=tokens)
        self.view.token_ids = tokens
        return self.view


class _WindowCache(WrappedCache):
    """The KV cache of a draft model's windows. All lengths and positions are those of the whole sequence."""

    def __init__(self, inner: Cache, owner: WindowedTarget) -> None:
        super().__init__(inner)
        self._owner = owner
        self._windows: dict[int, _Window] = {}  # by slot

    def offset(self, slot: int) -> int:
        """Return the first token of the window in a slot."""
        return self._windows[slot].offset if slot in self._windows else 0

    def slide(self, seq: SequenceState, end: int) -> None:
        """Move the window of a sequence of `end` tokens. If it moves, its tokens are dropped."""
        window = self._windows[seq.slot]
        if self._owner.begin(end) > window.offset:
            self.admit(seq.slot, seq.token_ids[:end], window.scope)

    def shift(self, batch: Batch) -> Batch:
        """Return the batch as the draft model sees it: each sequence from the first token of its window on."""
        offsets = [self.offset(seq.slot) for seq in batch.seqs]
        if not any(offsets):
            return batch
        seqs = (
            self._windows[seq.slot].of(seq) if offset else seq for seq, offset in zip(batch.seqs, offsets, strict=True)
        )
        start = (start - offset for start, offset in zip(batch.start, offsets, strict=True))
        return replace(batch, seqs=tuple(seqs), start=tuple(start))

    def admit(self, slot: int, tokens: Sequence[int], scope: str | None = None) -> int:
        self.release(slot)
        offset = self._owner.begin(len(tokens))
        self._windows[slot] = _Window(offset=offset, scope=scope)
        return offset + self._inner.admit(slot, tokens[offset:], scope)

    def fits(self, ends: Mapping[int, int]) -> bool:
        return self._inner.fits({slot: end - self.offset(slot) for slot, end in ends.items()})

    def stage(self, batch: Batch, draft: Draft, first: int = -1) -> Layout:
        return self._inner.stage(self.shift(batch), draft, first)

    def commit(self, round: Round) -> None:
        self._inner.commit(replace(round, batch=self.shift(round.batch)))

    def release(self, slot: int) -> None:
        window = self._windows.pop(slot, None)
        if window and window.seq:
            window.of(window.seq)  # a stop string may have shortened the sequence
        self._inner.release(slot)

    def length(self, slot: int) -> int:
        return self.offset(slot) + self._inner.length(slot)
