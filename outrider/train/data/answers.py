"""Generates the target's answers with the engine, and records the hidden states of the same forward passes."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from outrider.core.noise import derive_seed
from outrider.core.params import SamplingParams
from outrider.core.proposer import Proposer
from outrider.core.types import Batch, Draft, FinishReason, KVView, Request, Round
from outrider.engine.build import EngineParts
from outrider.engine.codec import EncodedPrompt
from outrider.engine.drive import drive
from outrider.engine.engine import Engine
from outrider.train.data.feature_cache import FeatureCache
from outrider.train.data.sample import Sample
from outrider.train.settings import Settings


@dataclass(slots=True)
class _Recording:
    """The recorded states of a running request, with one tensor per round."""

    request_id: int
    states: list[torch.Tensor] = field(default_factory=list)  # [tokens, layers, H]
    keys_and_values: list[torch.Tensor] = field(default_factory=list)  # [tokens, n]


class _Recorded(NamedTuple):
    """The recorded states of a finished request."""

    states: torch.Tensor  # [L, layers, H]
    keys_and_values: torch.Tensor | None  # [L, n]


class Recorder:
    """A proposer that drafts with another proposer and records hidden states."""

    def __init__(
        self, inner: Proposer, layers: Sequence[int], *, kv_view: KVView | None = None, kv_layers: Sequence[int] = ()
    ) -> None:
        """Wrap a proposer.

        Args:
            inner: the proposer that drafts.
            layers: the layers of the target whose outputs are recorded.
            kv_view: the target's keys and values.
            kv_layers: the layers whose keys and values are recorded.
        """
        self.inner = inner
        self.layers = tuple(layers)
        self.kv_layers = tuple(kv_layers)
        self.needs = replace(inner.needs, layers=tuple(sorted({*inner.needs.layers, *layers})))
        self._kv_view = kv_view
        self._running: dict[int, _Recording] = {}  # by slot
        self._finished: dict[int, _Recorded] = {}  # by request id

    def admit(self, slot: int, request: Request) -> None:
        self.inner.admit(slot, request)
        self._running[slot] = _Recording(request.id)

    def propose(self, batch: Batch) -> Draft:
        return self.inner.propose(batch)

    def commit(self, round: Round) -> None:
        for b, (seq, path) in enumerate(zip(round.batch.seqs, round.path, strict=True)):
            recording = self._running[seq.slot]
            begin = round.batch.start[b]
            assert recording.states or not begin, "the first states of a sequence cannot come from the prefix cache"
            states = round.scores.states(self.layers, b, path)
            # A copy: the states may be a view that keeps those of all sequences in memory.
            recording.states.append(states.to(torch.bfloat16, copy=True))
            if self.kv_layers:
                recording.keys_and_values.append(self._read_kv(seq.slot, begin, begin + len(states)))
        self.inner.commit(round)

    def release(self, slot: int) -> None:
        self.inner.release(slot)
        recording = self._running.pop(slot)
        if recording.states:
            keys_and_values = torch.cat(recording.keys_and_values) if recording.keys_and_values else None
            self._finished[recording.request_id] = _Recorded(torch.cat(recording.states), keys_and_values)

    def take(self, id: int) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Remove and return the states of a finished request, with its keys and values or None. None: not recorded."""
        return self._finished.pop(id, None)

    def _read_kv(self, slot: int, begin: int, end: int) -> torch.Tensor:
        """Return the concatenated keys and values [end - begin, n] of tokens that were just committed."""
        assert self._kv_view is not None
        tensors = []
        for layer in self.kv_layers:
            entries = self._kv_view.entries(layer, [slot], begin, end)
            assert entries is not None
            tensors += [tensor[0].transpose(0, 1).flatten(1).to(torch.bfloat16) for tensor in entries]
        return torch.cat(tensors, 1)


def generate_samples(engine: Engine, recorder: Recorder, requests: Iterable[Request]) -> Iterator[Sample]:
    """Run requests to their end, and yield a sample for each as soon as it ends. Failed requests are left out."""
    for seqs in drive(engine, list(map(engine.add, requests))):
        for seq in seqs:
            if seq.finish_reason is None:
                continue
            recorded = recorder.take(seq.request.id)
            if recorded is None or seq.finish_reason is FinishReason.ERROR:
                continue
            states, shared_kv = recorded
            length = min(len(states), len(seq.token_ids) - 1)
            yield Sample(
                id=seq.request.id,
                tokens=tuple(seq.token_ids[: length + 1]),
                states=states[:length],
                shared_kv=None if shared_kv is None else shared_kv[:length],
                prompt=len(seq.request.prompt_token_ids),
            )


class AnswerGenerator:
    """Lets the target answer prompts.

    An answer depends only on the prompt, its number, the number of the answer and the seed. On
    torch kernels logits depend slightly on the batch, so there this holds up to rounding.
    """

    def __init__(
        self,
        parts: EngineParts,
        recorder: Recorder,
        prompts: Mapping[int, EncodedPrompt],
        settings: Settings,
        *,
        cache: FeatureCache | None,
    ) -> None:
        """Answer `prompts`, given by their numbers, with the engine. Answers in the `cache` are not generated again."""
        self._parts = parts
        self._recorder = recorder
        self._prompts = prompts
        self._settings = settings
        self._cache = cache

    def samples(self, numbers: Sequence[int], *, answer: int) -> list[Sample]:
        """Return a sample for each of these prompts, in ascending order. Each number of `answer` is another answer."""
        requests = {number: self._request(number, answer) for number in sorted(numbers)}
        samples: dict[int, Sample] = {}
        if self._cache:
            for number, request in requests.items():
                if cached := self._cache.read(request):
                    samples[number] = cached
        missing = [request for number, request in requests.items() if number not in samples]
        with torch.inference_mode():
            for sample in generate_samples(self._parts.engine, self._recorder, missing):
                samples[sample.id] = sample
                if self._cache:
                    self._cache.write(requests[sample.id], sample)
        return [samples[number] for number in sorted(samples)]

    def _request(self, number: int, answer: int) -> Request:
        settings = self._settings
        prompt = self._prompts[number]
        return Request(
            id=number,
            prompt_token_ids=prompt.tokens,
            source_token_ids=prompt.source_token_ids,
            params=SamplingParams(
                temperature=settings.temperature, max_tokens=settings.max_tokens, ignore_eos=settings.ignore_eos
            ),
            seed=derive_seed(derive_seed(settings.seed, answer), number),
            end_ids=frozenset() if settings.ignore_eos else self._parts.end_ids,
            max_tokens=min(settings.max_tokens, self._parts.context - len(prompt.tokens)),
        )
