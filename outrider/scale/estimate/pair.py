"""A target with a proposer on a machine: the speedup of a round, and the batch from which it stops paying."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from outrider.drafting.plan.speedup import expected_tau
from outrider.errors import OutriderError
from outrider.scale.estimate.equations import Bound, Efficiency, Machine, Model, Pass, ahead_bound, one_pass
from outrider.scale.estimate.layout import Layout, Work, layout_pass, stage_pass
from outrider.scale.estimate.overlap import Overlap, Round, continued_round, guessed_round, serial_round
from outrider.scale.estimate.pipeline import filled_steps, heaviest_stage

_MAX_NODES = 1024  # draft tokens per position; published trees are narrower
_MAX_BATCH = 65536  # largest batch in the search of `Pair.stops_paying`


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """The cost of a proposer."""

    model: Model | None = None  # the draft model; None: a lookup, which reads no weights
    parallel: bool = False  # one pass drafts all tokens of a round; False: one pass per draft token
    host_seconds: float = 0.0  # host time per sequence and round
    pass_seconds: float | None = None  # measured time of a pass of the draft, or a call of the lookup; None: estimated


def head(target: Model, share: float) -> Model:
    """Return a draft head with a share of the target's active weights and the KV cache of one layer.

    Raises:
        OutriderError: the share is not above 0 and up to 1.
    """
    if not 0 < share <= 1:
        raise OutriderError(f"a head's share of the target is {share}; use a share above 0 and up to 1, such as 0.04")
    attention = tuple(
        replace(layers, numbers=layers.numbers / target.layers, products=layers.products / target.layers)
        for layers in target.attention
    )
    return replace(
        target, name="head", layers=1, weights=share * target.active(), table=0.0, experts=None, attention=attention
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """The acceptance rates of a proposer."""

    rates: tuple[float, ...]  # by position, among draft tokens whose ancestors are accepted
    repeat_last: bool = False  # the last rate holds for all further positions
    nodes: float = 1.0  # draft tokens per position: below 1 if some passes have no draft, above 1 for trees

    def __post_init__(self) -> None:
        expected_tau(self.rates)  # raises OutriderError for rates outside of [0, 1]
        if not self.rates:
            raise OutriderError("no acceptance rate is given; give at least one, such as 0.8")
        if not 0 < self.nodes <= _MAX_NODES:
            raise OutriderError(f"nodes is {self.nodes}; use a number above 0 and up to {_MAX_NODES}, and 1 for chains")

    @property
    def depth(self) -> int | None:
        """The number of positions with a known rate; None: all."""
        return None if self.repeat_last else len(self.rates)

    def tau(self, k: int) -> float:
        """Return the expected tokens of a pass with draft tokens at k positions."""
        return expected_tau(self.first(k))

    def first(self, k: int) -> tuple[float, ...]:
        """Return the rates of the first k positions."""
        return (*self.rates, *[self.rates[-1]] * (k - len(self.rates)))[:k]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The estimate for one batch size, context and draft length."""

    seqs: int
    context: int
    k: int
    tau: float  # tokens per pass; with a filled pipeline, per time of a pass
    speedup: float
    tokens_per_s: float  # of all sequences
    plain_tokens_per_s: float  # of all sequences
    draft_seconds: float  # per round
    verify_seconds: float  # per round
    bound: Bound  # of the target's pass
    ahead: float  # largest further gain from drafting in parallel with verification; 1 if it does so already


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftDevice:
    """A device for the draft alone."""

    machine: Machine
    efficiency: Efficiency
    overlap: Overlap = Overlap.NONE
    hit: float = 0.0  # share of outcomes that are drafted ahead, with `Overlap.GUESS`


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A target with a proposer, on a machine."""

    target: Model
    drafting: Drafting
    acceptance: Acceptance
    machine: Machine
    efficiency: Efficiency
    layout: Layout = field(default_factory=Layout)
    draft_device: DraftDevice | None = None  # None: the draft runs on the target's devices, each with a copy

    def point(self, seqs: int, context: int, k: int) -> Point:
        """Return the estimate of a round with draft tokens at k positions for each sequence; 0 is plain decoding."""
        host = self.efficiency.round_seconds
        plain = self._verify(seqs, context, 0.0).seconds + host
        draft = self._draft(seqs, context, k)
        if self.layout.filled and k:
            verify, round = self._filled(seqs, context, k, draft)
        else:
            verify = self._verify(seqs, context, k * self.acceptance.nodes)
            round = self._round(k, draft, verify.seconds + host)
        gain = round.tokens / round.seconds * plain
        overlaps = self.layout.filled or (self.draft_device and self.draft_device.overlap is not Overlap.NONE)
        return Point(
            seqs=seqs,
            context=context,
            k=k,
            tau=round.tokens * (self.layout.pipeline if self.layout.filled and k else 1),
            speedup=gain,
            tokens_per_s=gain * seqs / plain,
            plain_tokens_per_s=seqs / plain,
            draft_seconds=draft,
            verify_seconds=verify.seconds,
            bound=verify.bound,
            ahead=1.0 if overlaps else ahead_bound(draft=draft, verify=verify.seconds + host),
        )

    def _round(self, k: int, draft: float, verify: float) -> Round:
        """Return the tokens and seconds of a round."""
        rates = self.acceptance.first(k)
        device = self.draft_device
        if not k or device is None or device.overlap is Overlap.NONE:
            return serial_round(rates, draft=draft, verify=verify)
        if device.overlap is Overlap.CONTINUE:
            return continued_round(rates, draft=draft, verify=verify)
        return guessed_round(rates, draft=draft, verify=verify, hit=device.hit)

    def _filled(self, seqs: int, context: int, k: int, draft: float) -> tuple[Pass, Round]:
        """Return the pass of one step of the stages, and the tokens and seconds of a step.

        Sequences take turns in the stages, so k draft tokens of each need k + 1 free stages for each.
        """
        stages = self.layout.pipeline
        groups = min(stages, seqs)
        ahead = min(k, stages // groups - 1)
        work = Work(tokens=seqs / groups, seqs=seqs / groups, context=context)
        stage = stage_pass(self.target, self.machine, self.efficiency, self.layout, work)
        imbalance = 1.0 if self.layout.streamed else stages * heaviest_stage(self.target, stages)
        # A draft token is made while the stages compute. If it takes longer, the stages wait for it.
        seconds = max(imbalance * stage.seconds, draft / k if ahead else 0.0)
        steps = filled_steps(self.acceptance.first(k)[ahead - 1] if ahead else 0.0, stages=stages, ahead=ahead)
        host = self.efficiency.round_seconds / stages  # one round of the host in each round of the pipeline
        return replace(stage, seconds=seconds), Round(1 / steps, seconds + host)

    def best(self, seqs: int, context: int, ks: Sequence[int]) -> Point:
        """Return the fastest of these k and plain decoding. Among equals, return the smallest k."""
        return max((self.point(seqs, context, k) for k in sorted({0, *ks})), key=lambda point: point.speedup)

    def stops_paying(self, context: int, ks: Sequence[int]) -> int | None:
        """Return the batch size from which no k gains; None: speculation still pays at 65536 sequences.

        With experts, a medium batch may pay although a small one does not. The result follows the last batch size that
        pays. The search tries powers of two, then the sizes between two of them.
        """

        def pays(seqs: int) -> bool:
            return self.best(seqs, context, ks).k > 0

        powers = (1 << i for i in range(_MAX_BATCH.bit_length()))
        paying = list(filter(pays, powers))
        if not paying:
            return 1
        if paying[-1] == _MAX_BATCH:
            return None
        candidates = range(paying[-1], 2 * paying[-1])
        return candidates[0] + bisect_left(candidates, True, key=lambda seqs: not pays(seqs))

    def _verify(self, seqs: int, context: int, draft_tokens: float) -> Pass:
        """Return the target's pass, with this many draft tokens per sequence."""
        tokens = seqs * (1 + draft_tokens)
        work = Work(tokens=tokens, seqs=seqs, context=context)
        return layout_pass(self.target, self.machine, self.efficiency, self.layout, work)

    def _draft(self, seqs: int, context: int, k: int) -> float:
        """Return the seconds of drafting in a round."""
        if not k:
            return 0.0
        model = self.drafting.model
        host = seqs * self.drafting.host_seconds
        device = self.draft_device
        machine, efficiency = (device.machine, device.efficiency) if device else (self.machine, self.efficiency)
        passes = 1 if self.drafting.parallel or model is None else k
        seconds = self.drafting.pass_seconds
        if seconds is None:
            seconds = efficiency.draft_pass_seconds
            if model is not None:
                tokens = seqs * k // passes
                seconds += one_pass(model, machine, efficiency, tokens=tokens, seqs=seqs, context=context).seconds
        # Tokens go to the target and back. They are few bytes, so only the latency of the messages counts.
        messages = 2 * self.layout.link.latency if device and self.layout.link else 0.0
        return host + seconds * passes + messages
