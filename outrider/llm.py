"""The front door for Python: texts in, completions out."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from numbers import Integral, Number
from pathlib import Path
from typing import Any

from outrider.cache.base import Caching
from outrider.core.constraint import Constraint
from outrider.core.grammar import Grammars
from outrider.core.noise import mix_int
from outrider.core.params import AUTO, BadParam, SamplingParams
from outrider.core.stats import Stats
from outrider.core.text import TextStream
from outrider.core.types import Completion, Finish, Request, Row
from outrider.engine.build import House, build
from outrider.engine.engine import Engine
from outrider.engine.prefill_budget import Tempo
from outrider.errors import OutriderError
from outrider.measure.prompts import chat_tokens, text_tokens
from outrider.plan.planner import Planner
from outrider.plan.store import check_plan, restored
from outrider.propose.registry import Maker
from outrider.system.machine import use_threads

Prompt = str | Sequence[int]
_log = logging.getLogger("outrider")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """What one round added to a streamed completion."""

    text: str  # characters that no later token can change
    tokens: tuple[int, ...]
    guessed: tuple[bool, ...]  # per token: an accepted guess, or the target's own
    completion: Completion | None  # in the last chunk


class LLM:
    """A target, a proposer, and the engine between them."""

    def __init__(
        self,
        target: str | Path | None = None,
        *,
        proposer: str | Maker | None = None,
        k: int | str = AUTO,
        verifier: str | None = None,
        dtype: str = "auto",
        device: str = "auto",
        kernels: str = "auto",
        quantize: str | None = None,
        threads: int | None = None,
        rows: int = 16,
        context: int | None = None,
        chunk: int | Tempo = 512,
        caching: Caching | None = None,
        planner: Planner | None = None,
        plan: str | Path | None = None,
        guard: bool = False,
    ) -> None:
        """Load models and make ready.

        Args:
            target: folder of a decoder-only model; None is the embedded one.
            proposer: an expression, as ngram or draft:DIR, or what makes one from a `Setup`; None: the fitting one.
            k: guesses per round; auto decides round by round, by measured costs; 4 where they and a seed make the text.
            verifier: walk, coupled, rejection, block, siblings, traversal, typical or lenient; None is the fitting one.
            dtype: auto, float32, bfloat16 or float16.
            device: auto, cpu, cuda, ...
            kernels: native, torch, or auto: on a CPU Outrider's own where they know the model and its type, else torch.
            quantize: int8 or int4 weights for the target, which is then the quantised model, exactly; None keeps them.
            threads: of the CPU; None is OMP_NUM_THREADS, or else the physical cores of one NUMA node.
            rows: completions that run at once.
            context: tokens of prompt and completion together; None is the model's own, 8192 at most.
            chunk: tokens of prompts fed per round, or a `Tempo` that bounds its time.
            caching: memory for caches; where rows need more than there is, the last ones wait. None is `Caching()`.
            planner: decides the number of guesses in place of `k`.
            guard: what a proposer raises costs its guesses alone: it is logged and counted, and decoding goes on.
            plan: with k "auto", a file of what it has learned: read now if it is there, written by `save_plan`.

        Raises:
            OutriderError: with the fix in its message.
        """
        check_plan(plan, k=k, planned=planner is not None)
        if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int)):
            raise OutriderError(f"threads is {threads!r}; use a whole number, or None for one on each core")
        use_threads(threads)
        models = partial(build, target, proposer=proposer, k=k, verifier=verifier, planner=planner, guard=guard)
        self._house: House = models(
            dtype=dtype,
            kernels=kernels,
            quantize=quantize,
            device=device,
            rows=rows,
            context=context,
            chunk=chunk,
            caching=Caching() if caching is None else caching,
        )
        self._grammars, self._ids = _grammars(self._house), count()
        self._plan = restored(plan, self._house.planner, target=target, proposer=proposer, quantize=quantize)

    @classmethod
    def of(cls, house: House) -> LLM:
        """A front door to a house that stands already."""
        llm = cls.__new__(cls)
        llm._house, llm._grammars, llm._ids, llm._plan = house, _grammars(house), count(), None
        return llm

    @property
    def engine(self) -> Engine:
        """The engine, for those who add requests and step themselves."""
        return self._house.engine

    @property
    def house(self) -> House:
        """What runs in here: target, proposer, verifier, tokenizer, dtype, device."""
        return self._house

    @property
    def stats(self) -> Stats:
        """Sums over all rounds so far."""
        return self._house.engine.stats

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """A prompt's tokens, with those that the tokenizer puts around a text of its own accord.

        Raises:
            OutriderError: it is neither a text nor a list of token ids.
        """
        if isinstance(prompt, str):
            return text_tokens(self._house.tokenizer, prompt)
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray | memoryview):
            raise OutriderError(
                f"a prompt is a {type(prompt).__name__}; give a string, or a list of token ids (of an array its"
                " tolist())"
            )
        return _whole_ids("a prompt", prompt)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special tokens left out.

        Raises:
            OutriderError: they are no token ids, or not all in the vocabulary.
        """
        if isinstance(tokens, str | bytes | bytearray) or not isinstance(tokens, Iterable):
            raise OutriderError(f"{tokens!r} is no list of token ids; give whole numbers")
        ids = _whole_ids("what is to be decoded", tokens)
        _check_ids(ids, self._house.vocab)
        return self._text(ids)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> tuple[int, ...]:
        """The tokens of a conversation under the model's chat template, ready for the assistant's turn.

        `tools` are descriptions of functions, for templates that have words for them.

        Raises:
            OutriderError: the model has no template, or it does not take this conversation.
        """
        if getattr(self._house.tokenizer, "chat_template", None) is None:
            raise OutriderError("this model has no chat template; give the prompt as plain text")
        if not isinstance(messages, Sequence) or not all(isinstance(message, Mapping) for message in messages):
            raise OutriderError('a conversation is a list of messages, such as [{"role": "user", "content": "..."}]')
        return chat_tokens(self._house.tokenizer, messages, tools=tools)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Complete prompts together.

        Args:
            prompts: one or several, each a string or a list of token ids.
            params: for all, or one per prompt; None is greedy.

        Returns:
            `n` completions per prompt, in the order of the prompts.
        """
        many = _as_list(prompts)
        wanted = list(params) if isinstance(params, Sequence) else [params] * len(many)
        if len(wanted) != len(many):
            raise OutriderError(f"{len(many)} prompts came with {len(wanted)} parameters; give one, or one per prompt")
        requests = [r for prompt, want in zip(many, wanted, strict=True) for r in self.requests(prompt, want)]
        rows = [self.add(request) for request in requests]
        try:
            while not all(row.finish for row in rows):
                self.engine.step()
        finally:
            for row in rows:
                if not row.finish:
                    self.abort(row.request.id)
        self.keep_plan()
        return [self.completion(row) for row in rows]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Complete one prompt, chunk by chunk as rounds commit; leaving the loop early aborts."""
        params = _checked(params)
        if params.n != 1:
            raise OutriderError(f"n is {params.n}; a stream carries one completion, so use 1, or generate for several")
        (request,) = self.requests(prompt, params)
        return self._chunks(self.add(request))

    def prepare(self, constraint: Constraint) -> None:
        """Compile a constraint now, which is remembered; large ones take seconds.

        Raises:
            OutriderError: it is wrong or too large.
        """
        if not isinstance(constraint, Constraint):
            raise OutriderError(f"constraint is {constraint!r}; use one of Constraint's, such as Constraint.regex(...)")
        self._grammars.compile(constraint)

    def submit(self, prompt: Prompt, params: SamplingParams | None = None) -> list[int]:
        """Queue a prompt for those who step the engine themselves; returns the ids of its `n` requests."""
        requests = self.requests(prompt, params)
        for request in requests:
            self.add(request)
        return [request.id for request in requests]

    def add(self, request: Request) -> Row:
        """Queue a request that `requests` made, and return its row."""
        return self.engine.add(request, TextStream(self._text, request.params.stop))

    def abort(self, id: int) -> None:
        """Take back what was submitted under this id, wherever it is."""
        self.engine.abort(id)

    def save_plan(self) -> None:
        """Write what the planner has learned into the plan file, if there is one.

        `generate` and `stream` do, too, and warn where they cannot.

        Raises:
            OutriderError: it cannot be written.
        """
        if self._plan is not None:
            self._plan.save(self._house.planner)

    def _text(self, tokens: Sequence[int]) -> str:
        """`decode`, of what the engine itself has made."""
        return str(self._house.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def _chunks(self, row: Row) -> Iterator[Chunk]:
        shown, given, finished = 0, 0, False
        try:
            while not finished:
                if row.emitted == given and not row.finish:  # else another loop has stepped the engine
                    self.engine.step()
                    continue
                finished = row.finish is not None
                completion = self.completion(row) if finished else None
                assert row.stream is not None
                text = completion.text if completion else row.stream.text[: row.stream.safe_length()]
                tokens = tuple(row.text[len(row.request.prompt) + given :])
                yield Chunk(text=text[shown:], tokens=tokens, guessed=tuple(row.authors[given:]), completion=completion)
                shown, given = max(shown, len(text)), given + len(tokens)
        finally:
            if not finished:
                self.abort(row.request.id)
            self.keep_plan()

    def keep_plan(self) -> None:
        """`save_plan`, where more would be lost with it than what was learned: what cannot be written is logged."""
        try:
            self.save_plan()
        except OutriderError as error:
            _log.warning("what the planner has learned is not kept: %s", error)

    def requests(self, prompt: Prompt, params: SamplingParams | None) -> list[Request]:
        """What a prompt asks the engine for: `n` requests with ids of their own, which `add` takes.

        Raises:
            OutriderError: the prompt or a parameter does not fit the model.
        """
        tokens, params = self.encode(prompt), _checked(params)
        house = self._house
        if not tokens:
            raise OutriderError("the prompt is empty; give at least one token")
        if len(tokens) >= house.context:
            raise OutriderError(
                f"the prompt is {len(tokens)} tokens long and the context holds {house.context}; shorten the prompt"
                " or raise context"
            )
        _check_ids((*tokens, *params.stop_token_ids, *params.logit_bias), house.vocab)
        if params.min_tokens > (room := house.context - len(tokens)):
            said = f"min_tokens is {params.min_tokens}, and beside the prompt the context holds {room}; ask for fewer"
            raise BadParam("min_tokens", said)
        arm = _choice("proposer", params.proposer, house.proposers)
        _choice("verifier", params.verifier, house.verifiers)
        grammar = None if params.constraint is None else self._grammars.compile(params.constraint)
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else house.end_ids)
        return [
            Request(
                id=next(self._ids),
                prompt=tokens,
                params=params,
                seed=mix_int(seed, i),
                end_ids=ends,
                limit=min(params.max_tokens or room, room),
                arm=arm,
                grammar=grammar,
            )
            for i in range(params.n)
        ]

    def completion(self, row: Row) -> Completion:
        """What a row that is done amounts to."""
        assert row.finish is not None
        assert row.stream is not None
        split = len(row.request.prompt)
        return Completion(
            prompt_tokens=row.request.prompt,
            tokens=tuple(row.text[split:]),
            text=row.stream.finish(),
            finish=Finish(row.finish),
            seed=row.request.seed,
            guessed=tuple(row.authors),
            logprobs=tuple(row.logprobs[: row.emitted]),
            stats=Stats.of_passes(row.passes, drafted=row.drafted, prompt=split, exact=self.stats.exact),
            error=row.error,
        )


def _whole_ids(what: str, tokens: Iterable[Any]) -> tuple[int, ...]:
    found = tuple(tokens)
    for token in found:
        if not isinstance(token, Integral) or isinstance(token, bool):
            raise OutriderError(f"{what} holds {token!r} among its token ids; give whole numbers")
    return tuple(map(int, found))


def _check_ids(ids: Iterable[int], vocab: int) -> None:
    if bad := [token for token in ids if not 0 <= token < vocab]:
        way = "use smaller ids" if bad[0] > 0 else "ids begin at 0"
        raise OutriderError(f"token id {bad[0]} is not in the vocabulary of {vocab}; {way}")


def _choice(what: str, name: str | None, known: Sequence[str]) -> int | None:
    if name is not None and name not in known:
        raise OutriderError(f"{what} {name!r} cannot be had here; use {' or '.join(known)}, or leave {what} out")
    return None if name is None else known.index(name)


def _grammars(house: House) -> Grammars:
    return Grammars(house.tokenizer, vocab=house.vocab, end_ids=sorted(house.end_ids))


def _checked(params: SamplingParams | None) -> SamplingParams:
    if params is not None and not isinstance(params, SamplingParams):
        raise OutriderError(f"params is {params!r}; give SamplingParams(...)")
    return params or SamplingParams()


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Several prompts; one, which is a text or numbers alone, as a list of itself."""
    if not isinstance(prompts, Sequence) or isinstance(prompts, str | bytes | bytearray | memoryview):
        return [prompts]
    if prompts and all(isinstance(token, Number) for token in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
