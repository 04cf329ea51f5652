"""Makes an output block by block: draft, decode, score, then accept the draft or let the target make the block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from outrider.errors import OutriderError
from outrider.media.contract import BlockGenerator, Choice, Position, Router, Scorer, StreamDecoder
from outrider.media.engine.stream import BlockStream
from outrider.media.results import BlockResult, Maker, MediaResult, Seconds


class MediaEngine:
    """Speculation over blocks of video or audio. The outputs are not exact; each result says so.

    Args:
        target: the large generator.
        drafter: the small generator, in the same latent space.
        decoder: turns latents into content.
        scorer: judges the content of drafts.
        eager_commits: write each clean block into both caches at once. By default a cache is
            brought up to date when its generator has to make a block. The output is the same.
        clock: returns seconds. `time.process_time` counts the processor's time, for measurements on a busy machine.

    Raises:
        OutriderError: target and drafter have latents of different shapes.
    """

    def __init__(
        self,
        target: BlockGenerator,
        drafter: BlockGenerator,
        decoder: StreamDecoder,
        scorer: Scorer,
        *,
        eager_commits: bool = False,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        shapes = tuple(target.latent_shape), tuple(drafter.latent_shape)
        if shapes[0] != shapes[1]:
            raise OutriderError(
                f"the target has latents of shape {shapes[0]} and the drafter of shape {shapes[1]};"
                " use a drafter of the same latent space"
            )
        self.target = target
        self.drafter = drafter
        self.decoder = decoder
        self.scorer = scorer
        self.clock = clock
        self._eager = eager_commits

    @property
    def max_blocks(self) -> int:
        """The most blocks of an output."""
        return min(self.target.blocks, self.drafter.blocks)

    def generate(self, prompt: str, router: Router, *, seed: int = 0, blocks: int | None = None) -> MediaResult:
        """Return a finished output.

        Args:
            prompt: what to make.
            router: decides who makes each block.
            seed: of the noise. Target and drafter start a block from the same noise, whoever made the blocks before.
            blocks: how many. None: as many as the models can make.

        Raises:
            OutriderError: the models cannot make so many blocks, or the router's threshold is no possible score.
        """
        run = self.stream(prompt, router, seed=seed, blocks=blocks)
        finished = tuple(run)
        return MediaResult(
            prompt=prompt,
            seed=seed,
            router=router.name,
            threshold=router.threshold,
            quality=router.quality,
            content=torch.cat([block.content for block in finished]),
            blocks=finished,
            target_commits=run.target_commits,
        )

    def stream(self, prompt: str, router: Router, *, seed: int = 0, blocks: int | None = None) -> MediaRun:
        """Return an iterator over the blocks, which makes each when it is asked for. The arguments are `generate`'s.

        The decoder holds the state of one output, so finish an output before the next one begins.
        """
        count = self.max_blocks if blocks is None else blocks
        if not 1 <= count <= self.max_blocks:
            raise OutriderError(f"blocks is {blocks}; these models make 1 to {self.max_blocks}")
        self.check(router)
        return MediaRun(self, prompt, router, seed=seed, blocks=count, eager=self._eager)

    def check(self, router: Router) -> None:
        """Check that the router's threshold is a possible score.

        Raises:
            OutriderError: no content can have this score.
        """
        limits = self.scorer.score_range
        if router.threshold is None or limits is None:
            return
        low, high = limits
        if not low <= router.threshold <= high:
            raise OutriderError(
                f"threshold is {router.threshold:g}, but this scorer's scores lie from {low:g} to"
                f" {high:g}; use one of them"
            )


class MediaRun(Iterator[BlockResult]):
    """One output in the making. `MediaEngine.stream` makes it."""

    def __init__(
        self, engine: MediaEngine, prompt: str, router: Router, *, seed: int, blocks: int, eager: bool
    ) -> None:
        self._engine = engine
        self._prompt = prompt
        self._router = router
        self._seed = seed
        self._blocks = blocks
        self._next = 0
        self._by_target = 0
        self._target = BlockStream(engine.target, prompt, role="target", eager=eager)
        self._drafter = BlockStream(engine.drafter, prompt, role="drafter", eager=eager)
        engine.decoder.reset()

    @property
    def target_commits(self) -> int:
        """How many clean blocks were written into the target's cache."""
        return self._target.commits

    def __next__(self) -> BlockResult:
        if self._next == self._blocks:
            raise StopIteration
        index = self._next
        position = Position(block=index, blocks=self._blocks, by_target=self._by_target, seed=self._seed)
        choice = self._router.choose(position)
        noise = block_noise(self._engine.target.latent_shape, self._seed, index)
        block = self._by_the_target(noise) if choice is Choice.TARGET else self._draft(noise, choice)
        self._next += 1
        self._by_target += block.maker is Maker.TARGET
        return block

    def _draft(self, noise: Tensor, choice: Choice) -> BlockResult:
        engine = self._engine
        clock = _Clock(engine.clock)
        latent = self._drafter.generate(self._next, noise)
        clock.stop("draft")
        before = engine.decoder.snapshot()
        content = engine.decoder.decode(latent)
        clock.stop("decode")
        score, failure, accepted = None, None, True
        if choice is Choice.SCORE:
            scores = score_draft(engine.scorer, self._prompt, content)
            failure = scores.failure
            accepted = False
            if scores.values is not None:
                judgment = self._router.judge(scores.values)
                score, accepted = judgment.score, judgment.accepted
            clock.stop("score")
        if accepted:
            return self._finish(Maker.DRAFTER, latent, content, clock, drafted=True, score=score, failure=failure)
        engine.decoder.restore(before)
        return self._by_the_target(noise, clock, drafted=True, score=score, failure=failure)

    def _by_the_target(self, noise: Tensor, clock: _Clock | None = None, **draft: Any) -> BlockResult:
        clock = clock or _Clock(self._engine.clock)
        self._target.catch_up()
        clock.stop("commit")
        latent = self._target.generate(self._next, noise)
        clock.stop("generate")
        content = self._engine.decoder.decode(latent)
        clock.stop("decode")
        return self._finish(Maker.TARGET, latent, content, clock, **draft)

    def _finish(
        self,
        maker: Maker,
        latent: Tensor,
        content: Tensor,
        clock: _Clock,
        *,
        drafted: bool = False,
        score: float | None = None,
        failure: str | None = None,
    ) -> BlockResult:
        self._target.append(latent)
        clock.stop("commit")
        self._drafter.append(latent)
        clock.stop("draft")
        return BlockResult(
            index=self._next,
            maker=maker,
            drafted=drafted,
            score=score,
            failure=failure,
            seconds=clock.seconds,
            latent=latent,
            content=content,
        )


def block_noise(shape: tuple[int, ...], seed: int, block: int) -> Tensor:
    """Return the noise of a block. It depends on the seed and the block only."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + block) % 2**63)
    return torch.randn(shape, generator=generator)


class _Clock:
    """Adds the time since the last stop to a part of the block's time."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.seconds = Seconds()
        self._now = now
        self._last = now()

    def stop(self, part: str) -> None:
        now = self._now()
        self.seconds += Seconds(**{part: now - self._last})
        self._last = now


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """The scores of a draft, or why there are none."""

    values: Tensor | None
    failure: str | None = None


def score_draft(scorer: Scorer, prompt: str, content: Tensor) -> Scores:
    """Return the scores of all units of a draft."""
    try:
        values = torch.as_tensor(scorer.score(prompt, content), dtype=torch.float32)
    except Exception as error:  # a scorer is foreign code
        return Scores(values=None, failure=f"the scorer raised {type(error).__name__}: {error}")
    if values.dim() != 1 or not len(values):
        return Scores(values=None, failure=f"the scorer returned shape {tuple(values.shape)}; a vector is needed")
    if not bool(values.isfinite().all()):
        return Scores(values=None, failure="the scorer returned a score that is not a finite number")
    return Scores(values=values)
