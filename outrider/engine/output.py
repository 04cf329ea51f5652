"""The output of a sequence: chunks while it runs, and its completion."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.core.stats import Stats
from outrider.core.types import Completion, FinishReason, SequenceState

if TYPE_CHECKING:
    from outrider.engine.engine import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One item of `LLM.stream`: what a round has added."""

    text: str  # characters that no later token can change
    token_ids: tuple[int, ...]
    from_draft: tuple[bool, ...]  # by token: whether it is an accepted draft token
    completion: Completion | None  # in the last chunk


def completion_of(seq: SequenceState, stats: Stats) -> Completion:
    """Return the completion of a finished sequence. `stats` are those of its engine."""
    assert seq.finish_reason is not None
    assert seq.stream is not None
    split = len(seq.request.prompt_token_ids)
    passes = Stats.of_passes(
        seq.rounds, drafted=seq.num_draft_tokens, prompt=split, exact=stats.exact, bound=stats.bound
    )
    return Completion(
        prompt_token_ids=seq.request.prompt_token_ids,
        token_ids=tuple(seq.token_ids[split:]),
        text=seq.stream.finish(),
        finish_reason=FinishReason(seq.finish_reason),
        seed=seq.request.seed,
        from_draft=tuple(seq.from_draft),
        logprobs=tuple(seq.logprobs[: seq.num_output_tokens]),
        stats=passes,
        error=seq.error,
        source_token_ids=seq.request.source_token_ids,
        weight_versions=tuple([each for each in seq.weight_versions if each[0] < seq.num_output_tokens]),
        num_cached_prompt_tokens=max(seq.num_cached_prompt_tokens, 0),
        stop_string=seq.stream.stop_string,
    )


def chunks_of(engine: Engine, seq: SequenceState) -> Iterator[Chunk]:
    """Run rounds until a sequence is done, and yield a chunk per round. Leaving the loop aborts the sequence."""
    num_chars = 0  # characters of the chunks so far
    num_tokens = 0  # output tokens of the chunks so far
    finished = False

    def pending() -> bool:
        return seq.num_output_tokens == num_tokens and not seq.finish_reason

    try:
        while not finished:
            engine.turns.take(pending)
            try:
                while pending():  # another loop may have run rounds, so a chunk may be due before the next one
                    engine.step()
                finished = seq.finish_reason is not None
                completion = completion_of(seq, engine.stats) if finished else None
                assert seq.stream is not None
                text = completion.text if completion else seq.stream.text[: seq.stream.safe_length()]
                tokens = tuple(seq.token_ids[len(seq.request.prompt_token_ids) + num_tokens :])
                from_draft = tuple(seq.from_draft[num_tokens:])
            finally:
                engine.turns.give()
            chunk = Chunk(text=text[num_chars:], token_ids=tokens, from_draft=from_draft, completion=completion)
            num_chars = max(num_chars, len(text))
            num_tokens += len(tokens)
            yield chunk
    finally:
        if not finished:
            engine.abort(seq.request.id)
