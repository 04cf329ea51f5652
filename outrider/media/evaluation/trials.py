"""Runs routers over prompts in turns, so that drift of the machine affects all of them equally."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from outrider.media.contract import Router, Scorer
from outrider.media.engine import MediaEngine
from outrider.media.results import Maker, MediaResult, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """How good an output is."""

    score: float  # mean over units of the scorer that decides
    held_out: float  # mean over units of a scorer that never decides
    distance: float  # root of the mean squared difference to target-only's content


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One output of one router."""

    router: str
    prompt: int  # its number
    round: int
    seconds: Seconds
    blocks: int
    by_target: int
    drafted: int
    scored: int
    accepted: int
    failures: int
    quality: Quality


def run_trials(
    engine: MediaEngine,
    held_out: Scorer,
    routers: Sequence[Router],
    prompts: Sequence[str],
    *,
    rounds: int,
    advance: Callable[[], None] = lambda: None,
) -> list[Trial]:
    """Return the trials of all routers. The seed of an output is the number of its prompt.

    Each round takes its own share of the prompts, and runs all routers on each of them. The order
    of the routers alternates.

    Args:
        engine: makes the outputs.
        held_out: a scorer that does not decide.
        routers: the first one is target-only, which the others are compared with.
        prompts: what to make.
        rounds: how many, at most as many as there are prompts.
        advance: called after each output.
    """
    for router in routers:
        engine.generate(prompts[0], router)  # to warm up
    trials = []
    for i, prompt in enumerate(prompts):
        results = {}
        for router in routers[:: 1 if i % 2 == 0 else -1]:
            results[router.name] = engine.generate(prompt, router, seed=i)
            advance()
        reference = results[routers[0].name].content
        for router in routers:
            result = results[router.name]
            quality = _quality(engine.scorer, held_out, result, reference)
            trials.append(_trial(result, prompt=i, round=i * rounds // len(prompts), quality=quality))
    return trials


def _quality(scorer: Scorer, held_out: Scorer, result: MediaResult, reference: Tensor) -> Quality:
    return Quality(
        score=float(scorer.score(result.prompt, result.content).mean()),
        held_out=float(held_out.score(result.prompt, result.content).mean()),
        distance=float((result.content - reference).square().mean().sqrt()),
    )


def _trial(result: MediaResult, *, prompt: int, round: int, quality: Quality) -> Trial:
    drafted = [block for block in result.blocks if block.drafted]
    return Trial(
        router=result.router,
        prompt=prompt,
        round=round,
        seconds=result.seconds,
        blocks=len(result.blocks),
        by_target=sum(block.maker is Maker.TARGET for block in result.blocks),
        drafted=len(drafted),
        scored=sum(block.score is not None or block.failure is not None for block in drafted),
        accepted=sum(block.maker is Maker.DRAFTER for block in drafted),
        failures=result.failures,
        quality=quality,
    )
