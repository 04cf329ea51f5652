"""The verb `run`: where prompts come from, and how they are completed."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from functools import reduce
from operator import add
from signal import SIGINT, default_int_handler, signal
from time import perf_counter
from types import FrameType
from typing import Any

from rich.console import Console

from outrider.cli.options import ModelOptions
from outrider.cli.output import Outcome, Output
from outrider.core.config import EngineConfig
from outrider.core.params import SamplingParams
from outrider.core.text import is_utf8
from outrider.errors import OutriderError
from outrider.llm import LLM, Prompt
from outrider.measure.clock import DecodeSpeed, EmitEvent, decode_pace, opening, timed

ROWS = 16  # completions at once


def load(models: ModelOptions, **others: Any) -> LLM:
    """Load the models of the options; `others` are more fields of `EngineConfig`."""
    with Console(stderr=True).status("loading models"):
        return LLM(config=EngineConfig(**asdict(models), **others))


def converse(llm: LLM, params: SamplingParams, *, prompt: str | None, chat: bool, teller: Output) -> bool:
    """Complete one prompt, or on a terminal one after another; a chat goes on from what was said before.

    Returns:
        Whether all went well; if not, the teller has said why.
    """
    said: list[dict[str, str]] = []
    well, talk = True, prompt is None and sys.stdin.isatty()
    for text in _prompts(prompt):
        if not is_utf8(text):
            raise OutriderError("the prompt is not UTF-8 text; give one that is")
        said.append({"role": "user", "content": text})
        asked = llm.encode_chat(said) if chat else text
        # A seed that is reported must bring the text back, and so be one that the planner sees was asked for.
        want = params if params.seed is not None else replace(params, seed=secrets.randbits(63))
        complete = _one if params.n == 1 else _several
        watch: AbstractContextManager[list[int]] = _interrupts() if talk else nullcontext([])
        with watch as seen:
            told = complete(llm, asked, want, teller, seen)
        if isinstance(told, Outcome):
            well &= teller.sum_up(told)
        said.append({"role": "assistant", "content": told if isinstance(told, str) else told.completions[0].text})
    return well


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Collects the first Ctrl-C, so that it ends an answer between two rounds; a second one ends the program."""
    seen: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        signal(SIGINT, default_int_handler)

    before = signal(SIGINT, note)
    try:
        yield seen
    finally:
        signal(SIGINT, before)


def _one(llm: LLM, prompt: Prompt, params: SamplingParams, teller: Output, seen: list[int]) -> Outcome | str:
    """Complete and show as rounds commit; once an interrupt was seen, the text so far is all."""
    marks, looks = [EmitEvent(at=perf_counter(), emitted=(0,))], [llm.stats]
    text = ""
    for chunk in llm.stream(prompt, params):
        text += chunk.text
        teller.write(chunk.text, chunk.token_ids, chunk.from_draft)
        marks.append(EmitEvent(at=perf_counter(), emitted=(marks[-1].emitted[0] + len(chunk.token_ids),)))
        looks.append(llm.stats)
        if chunk.completion is None and seen:
            teller.end()
            return text
    teller.end()
    assert chunk.completion is not None
    return Outcome(
        completions=(chunk.completion,),
        sampled=params.temperature > 0,
        seconds=marks[-1].at - marks[0].at,
        first=marks[opening(marks)].at - marks[0].at,
        pace=decode_pace(marks),
        stats=timed(chunk.completion.stats, looks[opening(marks)], looks[-1]),
    )


def _several(llm: LLM, prompt: Prompt, params: SamplingParams, teller: Output, seen: list[int]) -> Outcome | str:
    """Complete together, show one after another; once an interrupt was seen, the texts so far are all."""
    before, began = llm.stats, perf_counter()
    rows = [llm.add(request) for request in llm.requests(prompt, params)]
    try:
        while not seen and not all(row.finish_reason for row in rows):
            llm.engine.step()
    finally:
        stopped = [row for row in rows if not row.finish_reason]
        for row in stopped:
            llm.abort(row.request.id)
        llm.try_save_plan()
    seconds = perf_counter() - began
    completions = tuple(llm.completion(row) for row in rows)
    for i, completion in enumerate(completions, 1):
        teller.head(f"{i} of {len(completions)}")
        teller.write(completion.text, completion.token_ids, completion.from_draft)
        teller.end()
    if stopped:
        return completions[0].text
    return Outcome(
        completions=completions,
        sampled=params.temperature > 0,
        seconds=seconds,
        first=None,
        pace=DecodeSpeed(tokens=sum(len(completion.token_ids) for completion in completions), seconds=seconds),
        stats=timed(reduce(add, (completion.stats for completion in completions)), before, llm.stats),
    )


def _prompts(prompt: str | None) -> Iterator[str]:
    """The argument, else what is piped in, else what a person types until an empty line or the end of input."""
    if prompt is not None:
        yield prompt
    elif not sys.stdin.isatty():
        try:
            yield sys.stdin.read().removesuffix("\n")
        except UnicodeDecodeError as error:
            raise OutriderError("standard input is not UTF-8 text; give the prompt as text") from error
    else:
        with suppress(ImportError):  # makes `input` remember and edit lines, where there is one
            import readline  # noqa: F401
        while text := _ask():
            yield text


def _ask() -> str:
    try:
        return input("> " if sys.stdout.isatty() else "")
    except (EOFError, KeyboardInterrupt):
        Console(stderr=True).print()
        return ""
