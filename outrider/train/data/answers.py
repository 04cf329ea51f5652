"""What a target says, and the states that it was in: texts written by the engine, and read off the same passes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from outrider.core.noise import derive_seed
from outrider.core.params import SamplingParams
from outrider.core.types import Batch, Draft, FinishReason, KVView, Request, Round
from outrider.engine.build import EngineParts
from outrider.engine.engine import Engine
from outrider.propose.base import Proposer
from outrider.train.data.feature_cache import FeatureCache
from outrider.train.data.sample import Sample


class Recorder:
    """Another proposer's guesses, while states are written down."""

    def __init__(
        self, inner: Proposer, layers: Sequence[int], *, memory: KVView | None = None, looked: Sequence[int] = ()
    ) -> None:
        """Write down the outputs of `layers`, and of the layers looked at keys and values as they lie in a `memory`."""
        self.inner, self.layers, self.looked, self._memory = inner, tuple(layers), tuple(looked), memory
        self.needs = replace(inner.needs, layers=tuple(sorted({*inner.needs.layers, *layers})))
        # By slot: the request, and what was seen of it, states and keys and values.
        self._open: dict[int, tuple[int, list[torch.Tensor], list[torch.Tensor]]] = {}
        self._done: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def admit(self, slot: int, request: Request) -> None:
        self.inner.admit(slot, request)
        self._open[slot] = request.id, [], []

    def propose(self, batch: Batch) -> Draft:
        return self.inner.propose(batch)

    def commit(self, round: Round) -> None:
        for b, (row, path) in enumerate(zip(round.batch.seqs, round.path, strict=True)):
            _, seen, shown = self._open[row.slot]
            begin = round.batch.start[b]
            assert seen or not begin, "a text's first states come from no cache"
            states = round.scores.states(self.layers, b, path)  # perhaps a view, which would hold on to all rows'
            seen.append(states.to(torch.bfloat16, copy=True))
            if self.looked:
                shown.append(self._shown(row.slot, begin, begin + len(seen[-1])))
        self.inner.commit(round)

    def release(self, slot: int) -> None:
        self.inner.release(slot)
        id, seen, shown = self._open.pop(slot)
        if seen:
            self._done[id] = torch.cat(seen), torch.cat(shown) if shown else None

    def take(self, id: int) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """States of a finished request, and keys and values if layers are looked at, once."""
        return self._done.pop(id, None)

    def _shown(self, slot: int, begin: int, end: int) -> torch.Tensor:
        """[end - begin, n] of entries that have just been committed."""
        assert self._memory is not None
        found = []
        for layer in self.looked:
            entries = self._memory.entries(layer, [slot], begin, end)
            assert entries is not None
            found += [each[0].transpose(0, 1).flatten(1).to(torch.bfloat16) for each in entries]
        return torch.cat(found, 1)


def written(engine: Engine, recorder: Recorder, requests: Iterable[Request]) -> Iterator[Sample]:
    """Run requests to their ends, and hand each text over when it is done; one that failed is left out."""
    for request in requests:
        engine.add(request)
    while engine.busy():
        for row in engine.step():
            if row.finish_reason is None:
                continue
            seen = recorder.take(row.request.id)
            if seen is None or row.finish_reason is FinishReason.ERROR:
                continue
            states, shown = seen
            length = min(len(states), len(row.token_ids) - 1)
            yield Sample(
                id=row.request.id,
                tokens=tuple(row.token_ids[: length + 1]),
                states=states[:length],
                shown=None if shown is None else shown[:length],
                prompt=len(row.request.prompt_token_ids),
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerParams:
    """How prompts are answered."""

    temperature: float
    max_tokens: int  # of an answer at most
    ignore_eos: bool  # past the end of text
    seed: int


class AnswerGenerator:
    """Has prompts answered. An answer depends on the prompt, its number and the turn, and on nothing that came before.

    Where a token's logits depend on what else is in its pass, as torch's kernels have it, that holds up to rounding.
    """

    def __init__(
        self,
        parts: EngineParts,
        recorder: Recorder,
        prompts: Mapping[int, tuple[int, ...]],
        manner: AnswerParams,
        *,
        archive: FeatureCache | None,
    ) -> None:
        self._parts, self._recorder, self._prompts = parts, recorder, prompts
        self._manner, self._archive = manner, archive

    def write(self, numbers: Sequence[int], *, turn: int) -> list[Sample]:
        """Answers to some of the prompts, in the order of their numbers; each turn answers them anew."""
        requests = {number: self._request(number, turn) for number in sorted(numbers)}
        done: dict[int, Sample] = {}
        if self._archive:
            found = {number: self._archive.read(request) for number, request in requests.items()}
            done = {number: sample for number, sample in found.items() if sample}
        missing = [request for number, request in requests.items() if number not in done]
        with torch.inference_mode():
            for sample in written(self._parts.engine, self._recorder, missing):
                done[sample.id] = sample
                if self._archive:
                    self._archive.write(requests[sample.id], sample)
        return [done[number] for number in sorted(done)]

    def _request(self, number: int, turn: int) -> Request:
        manner, parts = self._manner, self._parts
        prompt = self._prompts[number]
        return Request(
            id=number,
            prompt_token_ids=prompt,
            params=SamplingParams(
                temperature=manner.temperature, max_tokens=manner.max_tokens, ignore_eos=manner.ignore_eos
            ),
            seed=derive_seed(derive_seed(manner.seed, turn), number),
            end_ids=frozenset() if manner.ignore_eos else parts.end_ids,
            max_tokens=min(manner.max_tokens, parts.context - len(prompt)),
        )
