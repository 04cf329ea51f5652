"""Small engines around a given target, and requests run through it."""

from collections.abc import Callable, Mapping, Sequence

from outrider.core.noise import derive_seed
from outrider.core.params import SamplingParams
from outrider.core.planner import FixedPlanner, Planner
from outrider.core.proposer import Proposer, ProposerSetup
from outrider.core.target import Target
from outrider.core.types import Request, SequenceState
from outrider.engine.drive import drive
from outrider.engine.engine import Engine
from outrider.engine.scheduler import Scheduler
from outrider.testing.toy_target import ToyTarget
from outrider.verify.rules import EXACT, Verifier


def make_engine(
    target: Target,
    make: Callable[[ProposerSetup], Proposer],
    *,
    verifier: str | Verifier = "walk",
    k: int = 4,
    rows: int = 16,
    chunk: int = 512,
    planner: Planner | None = None,
) -> Engine:
    rule = EXACT[verifier] if isinstance(verifier, str) else verifier
    setup = ProposerSetup(
        target=target,
        vocab=target.vocab,
        slots=rows,
        context=target.context,
        device=target.device,
        dtype=None,
        draw=rule.draw,
        tokenizer=None,
    )
    return Engine(
        target=target,
        proposer=make(setup),
        verifier=rule,
        planner=planner or FixedPlanner(k),
        scheduler=Scheduler(slots=rows, chunk=chunk, context=target.context),
    )


def tightened(target: ToyTarget, room: int) -> ToyTarget:
    """Return the toy target with cache memory for `room` tokens in all."""
    text = target.cache.text

    def fits(ends: Mapping[int, int]) -> bool:
        return sum(max(len(held), ends.get(slot, 0)) for slot, held in enumerate(text)) <= room

    target.cache.fits = fits  # type: ignore[method-assign]
    return target


def run(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    *,
    limit: int,
    ends: frozenset[int] = frozenset({0}),
) -> list[SequenceState]:
    """Run all prompts together, each with its own seed. Return the finished rows in the order of the prompts."""
    wanted = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    rows = []
    for i, (prompt, want) in enumerate(zip(prompts, wanted, strict=True)):
        seed = derive_seed(want.seed or 0, i)
        request = Request(id=i, prompt_token_ids=tuple(prompt), params=want, seed=seed, end_ids=ends, max_tokens=limit)
        rows.append(engine.add(request))
    for _ in drive(engine, rows):
        pass
    return rows


def outputs(rows: Sequence[SequenceState]) -> list[list[int]]:
    return [row.token_ids[len(row.request.prompt_token_ids) :] for row in rows]
