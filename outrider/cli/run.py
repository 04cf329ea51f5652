"""The command `run`: read prompts and print their completions."""

import secrets
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import reduce
from itertools import islice
from operator import add
from time import perf_counter

from outrider.cli.mistakes import print_mistake
from outrider.cli.options import PromptOptions
from outrider.cli.output import Outcome, Output
from outrider.cli.source import GivenSource, SourceOptions
from outrider.cli.terminal import interrupts, typed
from outrider.cli.transcribe import needs_transcript, print_transcript, refuse_transcript_options
from outrider.core.config import EngineConfig
from outrider.core.params import SamplingParams
from outrider.core.text import is_utf8
from outrider.core.types import FinishReason, Request
from outrider.drafting.propose.expression import fetch_models
from outrider.engine.codec import EncodedPrompt, Source
from outrider.engine.drive import drive
from outrider.errors import OutriderError
from outrider.lab.common.clock import DecodeSpeed, EmitEvent, decode_speed, first_decode_index, with_times
from outrider.llm import LLM
from outrider.models.torch.speech.source import recording_of
from outrider.models.torch.speech.wav import read_wav
from outrider.runtime.ranks import current, of_first_rank

_COULD_CHAT = "this completed plain text, and the model has a chat template; add --chat to chat with it"
_LONG_CHAT = "the prompt has the conversation so far; leave with an empty line, and start a new one"


def load(config: EngineConfig) -> LLM:
    """Return the `LLM` of a configuration. Models that are not on the disk are downloaded first."""
    fetch_models(config.target, config.proposer)
    return LLM(config=config)


def converse(
    llm: LLM,
    params: SamplingParams,
    *,
    prompts: PromptOptions,
    options: SourceOptions,
    given: GivenSource | None = None,
    output: Output,
) -> bool:
    """Complete one prompt, or the prompts that a user types on a terminal.

    Args:
        params: the sampling parameters.
        prompts: the prompt, and whether to use the chat template, with all messages so far. No
            prompt: read standard input, or begin as the model does if there is a source.
        options: the options of speech targets.
        given: what the encoder of an encoder-decoder target reads.
        output: prints the completions.

    Returns:
        Whether all completions succeeded. Errors are printed.

    Raises:
        OutriderError: the options do not fit the target; or not on a terminal, a prompt cannot be completed.
    """
    source = _source_for(llm, given)
    if prompts.chat:
        _check_chat(llm, source, options, prompts)
    rules = llm.parts.source_rules
    if rules is None or rules.speech is None:
        refuse_transcript_options(options)
    elif source is not None:
        source = recording_of(source, rules.speech)
        if reason := needs_transcript(rules.speech, source, options):
            _check_transcript(prompts.prompt, reason)
            return print_transcript(llm, source, params, options, output)
    template = getattr(llm.parts.tokenizer, "chat_template", None)
    return _Conversation(
        llm=llm,
        params=params,
        options=options,
        source=source,
        output=output,
        chat=prompts.chat,
        messages=prompts.messages(),
        could_chat=rules is None and not prompts.chat and bool(template),
    ).run(prompts.prompt)


@dataclass(slots=True, kw_only=True)
class _Conversation:
    """The prompts of one call of `converse`, and their answers."""

    llm: LLM
    params: SamplingParams
    options: SourceOptions
    source: Source | None
    output: Output
    chat: bool  # whether prompts are messages for the chat template
    messages: list[dict[str, str]]  # so far
    could_chat: bool  # whether to tell the user of the chat template

    def run(self, prompt: str | None) -> bool:
        """Complete one prompt, or those that are typed. Returns whether all completions succeeded."""
        texts: Iterator[str | None] = iter([prompt]) if self.source is not None else typed(prompt)
        # Ranks end together, so Ctrl-C ends a single answer only without other ranks.
        on_terminal = prompt is None and self.source is None and of_first_rank(sys.stdin.isatty())
        succeeded = True
        for text in _of_first_rank(texts):
            if text is not None and not is_utf8(text):
                raise OutriderError("the prompt is not UTF-8 text; give UTF-8 text")
            self.messages.append({"role": "user", "content": text or ""})
            handler: AbstractContextManager[list[int]] = (
                interrupts() if on_terminal and current() is None else nullcontext([])
            )
            try:
                with handler as collected:
                    succeeded &= self._answer(text, collected)
            except OutriderError as error:  # such as a prompt that does not fit into the context
                if not on_terminal:
                    raise
                print_mistake(str(error))
                self.messages.pop()
                if self.chat and any(message["role"] == "assistant" for message in self.messages):
                    self.output.note(_LONG_CHAT)
                succeeded = False
        return succeeded

    def _answer(self, text: str | None, interrupts: list[int]) -> bool:
        """Complete a prompt and remember the answer. Returns whether it succeeded, or was interrupted."""
        if self.chat:
            encoded = EncodedPrompt(self.llm.encode_chat(self.messages))
        else:
            options = self.options
            encoded = self.llm.codec.encode_with_source(text, self.source, language=options.language, task=options.task)
        result = _complete(self.llm, encoded, self.params, self.output, interrupts)
        succeeded = True
        if isinstance(result, Outcome):
            succeeded = self.output.sum_up(result)
            if self.could_chat:
                self.output.note(_COULD_CHAT)
                self.could_chat = False  # once is enough
        answer = result if isinstance(result, str) else result.completions[0].text
        self.messages.append({"role": "assistant", "content": answer})
        return succeeded


def _check_chat(llm: LLM, source: Source | None, options: SourceOptions, prompts: PromptOptions) -> None:
    """Refuse what does not go with a chat template, before the first prompt."""
    if source is not None:
        raise OutriderError("--chat does not support encoder-decoder targets; leave it out")
    if options.language or options.task:
        raise OutriderError("--language and --task are for speech targets, which take no --chat; leave them out")
    llm.encode_chat([*prompts.messages(), {"role": "user", "content": "Hello"}])


def _check_transcript(prompt: str | None, reason: str) -> None:
    """Refuse a prompt where a transcript is needed for this reason."""
    if prompt is not None:
        raise OutriderError(
            f"a prompt begins one completion, and {reason} needs a transcript; leave the prompt"
            " out, or use --previous-text"
        )


def _source_for(llm: LLM, given: GivenSource | None) -> Source | None:
    """Return the source as the target reads it; None: there is none. Raises OutriderError if it does not fit it."""
    rules = llm.parts.source_rules
    speech = rules is not None and rules.speech is not None
    if given is None and speech:
        raise OutriderError("the target is a speech model; give it --source FILE.wav or --source-file FILE.wav")
    if given is None and rules is not None:
        raise OutriderError("the target is an encoder-decoder model; give it --source TEXT or --source-file FILE")
    if given is None:
        return None
    if speech and given.audio is None and given.file is not None:
        raise OutriderError(f"{given.file} is no WAV file, which this speech target reads; convert it to WAV")
    if given.audio is None:
        return given.text
    assert given.file is not None
    if not speech:
        raise OutriderError(
            f"{given.file} is a WAV file, and this target is no speech model; give text, or leave it out"
        )
    return read_wav(given.audio, given.file)


def _of_first_rank(texts: Iterator[str | None]) -> Iterator[str | None]:
    """Yield the texts that rank 0 reads."""
    ranks = current()
    if ranks is None:
        yield from texts
        return
    while True:
        item = ranks.share_object([*islice(texts, 1)] if ranks.first else [])
        if not item:
            return
        yield item[0]


def _complete(
    llm: LLM, encoded: EncodedPrompt, params: SamplingParams, output: Output, interrupts: list[int]
) -> Outcome | str:
    """Complete a prompt, print the completions and return their outcome. After an interrupt, return the text so far."""
    # The reported seed must reproduce the text, so the planner must treat it as a seed of the user.
    seeded = params if params.seed is not None else replace(params, seed=of_first_rank(secrets.randbits(63)))
    requests = llm.request_maker.make(encoded, seeded)
    if len(requests) == 1:
        return _complete_one(llm, requests[0], output, interrupts)
    return _complete_several(llm, requests, output, interrupts)


def _complete_one(llm: LLM, request: Request, output: Output, interrupts: list[int]) -> Outcome | str:
    """Do what `_complete` does for one completion. Its text is printed while it is generated."""
    events = [EmitEvent(at=perf_counter(), emitted=(0,))]
    stats = [llm.stats]  # after each event
    text = ""
    output.painter.begin(request.prompt_token_ids)
    for chunk in llm.chunks(request):
        text += chunk.text
        output.painter.write(chunk.text, chunk.token_ids, chunk.from_draft)
        events.append(EmitEvent(at=perf_counter(), emitted=(events[-1].emitted[0] + len(chunk.token_ids),)))
        stats.append(llm.stats)
        if chunk.completion is None and interrupts:
            output.painter.end()
            return text
    output.painter.end()
    assert chunk.completion is not None
    first = first_decode_index(events)
    return Outcome(
        completions=(chunk.completion,),
        sampled=request.params.temperature > 0,
        seconds=events[-1].at - events[0].at,
        first=events[first].at - events[0].at,
        speed=decode_speed(events),
        stats=with_times(chunk.completion.stats, stats[first], stats[-1]),
    )


def _complete_several(llm: LLM, requests: Sequence[Request], output: Output, interrupts: list[int]) -> Outcome | str:
    """Do what `_complete` does for several completions. They are generated in a batch, and then printed."""
    before = llm.stats
    began = perf_counter()
    seqs = list(map(llm.add, requests))
    try:
        for _ in drive(llm.engine, seqs):
            if interrupts:
                break
    finally:
        llm.try_save_plan()
    seconds = perf_counter() - began
    completions = tuple(map(llm.completion, seqs))
    for i, completion in enumerate(completions, 1):
        output.head(f"{i} of {len(completions)}")
        output.painter.begin(completion.prompt_token_ids)
        output.painter.write(completion.text, completion.token_ids, completion.from_draft)
        output.painter.end()
    if any(completion.finish_reason is FinishReason.ABORT for completion in completions):
        return completions[0].text
    return Outcome(
        completions=completions,
        sampled=requests[0].params.temperature > 0,
        seconds=seconds,
        first=None,
        speed=DecodeSpeed(tokens=sum(len(completion.token_ids) for completion in completions), seconds=seconds),
        stats=with_times(reduce(add, (completion.stats for completion in completions)), before, llm.stats),
    )
