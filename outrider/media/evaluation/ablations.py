"""The controls of a quality gate: other aggregates, chance, the first block alone, and fixed places."""

from dataclasses import dataclass

from outrider.media.contract import Router
from outrider.media.evaluation.summary import Summary
from outrider.media.routers import FixedBlocks, QualityGate, RandomGate, Stride
from outrider.runtime.report.console import count_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Controls:
    """Routers to compare a gate with. All but the strides let the target make about as many blocks as the gate does."""

    other_aggregate: Router
    not_forced: Router
    random: Router
    random_not_forced: Router
    first_only: Router
    first_blocks: Router
    last_blocks: Router
    strides: tuple[Router, ...]

    def all(self) -> list[Router]:
        """Return all routers, without doubles."""
        listed = [
            self.other_aggregate,
            self.not_forced,
            self.random,
            self.random_not_forced,
            self.first_only,
            self.first_blocks,
            self.last_blocks,
            *self.strides,
        ]
        return list({router.name: router for router in listed}.values())


def controls(gate: QualityGate, measured: Summary, *, other_threshold: float, blocks: int) -> Controls:
    """Return the controls of a gate.

    Args:
        gate: with a forced first block.
        other_threshold: of the other aggregate, at which it rejects as many drafts.
    """
    assert gate.threshold is not None
    by_target = min(blocks, max(2, round(measured.target_share * blocks)))  # 1 would be the first block only
    rate = (1 - measured.target_share) * blocks / max(1, blocks - 1)  # of the blocks after the first
    return Controls(
        other_aggregate=QualityGate(other_threshold, aggregate="mean" if gate.aggregate == "min" else "min"),
        not_forced=QualityGate(gate.threshold, aggregate=gate.aggregate, force_first=False),
        random=RandomGate(min(1.0, rate)),
        random_not_forced=RandomGate(1 - measured.target_share, force_first=False),
        first_only=FixedBlocks([0], name="first block only"),
        first_blocks=FixedBlocks(range(by_target), name=f"first {count_text(by_target, 'block')}"),
        last_blocks=FixedBlocks(range(blocks - by_target, blocks), name=f"last {count_text(by_target, 'block')}"),
        strides=tuple(Stride(k) for k in (2, 3, 4) if k < blocks),
    )


def first_block_share(drafter: Summary, first_only: Summary, gate: Summary) -> float | None:
    """Return how much of a gate's gain over drafter-only the first block of the target brings on its own.

    None: the gate gains nothing.
    """
    gain = gate.score - drafter.score
    return (first_only.score - drafter.score) / gain if gain > 0 else None
