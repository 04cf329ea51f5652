"""The rollout engine: samples of a policy whose weights change between and inside of rollouts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from hashlib import sha256
from math import inf
from operator import add
from pathlib import Path
from time import perf_counter
from typing import Any

from outrider.core.config import EngineConfig
from outrider.core.noise import derive_seed
from outrider.core.params import SamplingParams
from outrider.core.stats import Stats
from outrider.core.types import Draw, SequenceState
from outrider.drafting.propose.registry import SAMPLING_PROPOSERS, parse
from outrider.engine.build import proposer_of
from outrider.engine.codec import Prompt
from outrider.engine.weights import NewWeights
from outrider.errors import OutriderError
from outrider.llm import LLM
from outrider.train.rl.records import Provenance, Rollout, RolloutBatch
from outrider.train.rl.regimes import RegimeCounter

_MAX_SAMPLES = 1 << 20  # of a prompt; seeds of samples and prompts do not collide below it

_LENGTH_RATE = 0.2  # weight of a rollout in the mean length of its group


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One rollout to sample. The same sample gives the same tokens in every engine of the same policy."""

    prompt_token_ids: tuple[int, ...]
    prompt: int  # index of the prompt in its call
    sample: int  # index among the samples of the prompt
    group: str
    seed: int


@dataclass(frozen=True, slots=True)
class _Pending:
    """A rollout that is not finished."""

    seq: SequenceState
    prompt: int
    sample: int
    group: str


class RolloutEngine:
    """Samples rollouts of a policy, and takes new weights of it at any time.

    The tokens follow the distribution of the target, whatever the draft does. With the rules `walk`
    and `coupled` on the native kernels, a seed gives the same tokens and log-probabilities with and
    without speculation, bit by bit. Other exact rules keep the distribution only.
    """

    def __init__(self, llm: LLM, *, allow_lossy: str | None = None) -> None:
        """Use a loaded engine.

        Args:
            llm: the policy and its proposer.
            allow_lossy: the name of the engine's lossy verification rule, to use it although its tokens are not samples
                of the policy. Importance weights correct that for `blend` only, whose `sampled_logprobs` are those of
                the distribution that the tokens were sampled from.

        Raises:
            OutriderError: the engine has a lossy rule that is not allowed by name.
        """
        verifier = llm.parts.verifier
        if not verifier.exact and allow_lossy != verifier.name:
            correction = " and correct it by importance weights" if verifier.records_distribution else ""
            raise OutriderError(
                f"verifier {verifier.name} is lossy: its tokens are not samples of the policy, which biases the"
                f" gradient; use an exact one, or allow_lossy={verifier.name!r} to use it all the same{correction}"
            )
        if verifier.exact and allow_lossy is not None:
            raise OutriderError(f"allow_lossy is {allow_lossy!r}, and verifier {verifier.name} is exact; leave it out")
        self.llm = llm
        self.regimes = RegimeCounter()  # of the rounds since the last `generate` or `take`
        self._pending: dict[int, _Pending] = {}  # by request id
        self._mean_length: dict[str, float] = {}  # recent mean of the output tokens, by group
        self._unread: dict[int, Rollout] = {}  # finished, by request id, and not yet returned by `completed`

    @classmethod
    def load(cls, target: str | Path | None = None, *, allow_lossy: str | None = None, **options: Any) -> RolloutEngine:
        """Load a policy. The options are those of `LLM`.

        The default verifier is `coupled` for proposers that sample, and `walk` for others, so that
        a seed gives the same tokens with and without speculation.
        """
        config = EngineConfig.from_options(target, **options)
        if config.verifier is None:
            spec = proposer_of(config)
            samples = isinstance(spec, str) and not SAMPLING_PROPOSERS.isdisjoint(parse(spec).names())
            config = replace(config, proposer=spec, verifier="coupled" if samples else "walk")
        return cls(LLM(config=config), allow_lossy=allow_lossy)

    @property
    def version(self) -> int:
        """The version of the policy's weights; 0: as loaded."""
        return self.llm.weights.version

    @property
    def draft_version(self) -> int:
        """The version of the draft's own weights; 0: as loaded."""
        return self.llm.weights.draft_version

    @property
    def provenance(self) -> Provenance:
        """How the rollouts are made."""
        parts = self.llm.parts
        verifier = parts.verifier
        kernels = parts.target.kernels
        return Provenance(
            verifier=verifier.name,
            exact=verifier.exact,
            bound=verifier.bound,
            same_tokens=verifier.exact and verifier.draw is not Draw.SAMPLE and kernels.startswith("native"),
            kernels=kernels,
            dtype=str(parts.dtype).removeprefix("torch."),
            proposer="+".join(parts.draft_sources),
        )

    def update_weights(self, weights: NewWeights, version: int | None = None) -> int:
        """Swap the policy in place, between or inside of rollouts. See `EngineWeights.update`."""
        return self.llm.weights.update(weights, version)

    def update_draft(self, weights: NewWeights, version: int | None = None) -> int:
        """Swap the weights of the draft. It changes the speed only. See `EngineWeights.update_draft`."""
        return self.llm.weights.update_draft(weights, version)

    def sleep(self, level: int = 1) -> None:
        """Free memory for the trainer. See `EngineWeights.sleep`."""
        self.llm.weights.sleep(level)

    def wake(self) -> None:
        """Allocate the memory that `sleep` has freed."""
        self.llm.weights.wake()

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        n: int = 1,
        seed: int = 0,
        groups: Sequence[str] | None = None,
    ) -> RolloutBatch:
        """Sample `n` rollouts of each prompt and wait for all of them.

        Args:
            prompts: strings, or lists of token ids. Repeated prompts are allowed.
            params: how to sample; None: temperature 1 and at most 128 tokens. Its `n` must be 1. A
                `seed` in it is not allowed, as it would be the seed of all samples.
            n: samples of each prompt.
            seed: the seed of the call. A seed, the index of a prompt and the index of a sample determine a rollout.
            groups: the name of the group of each prompt; None: prompts with equal tokens are a group.

        Raises:
            OutriderError: a prompt or a parameter does not fit the model.
        """
        began = perf_counter()
        self.regimes.take()
        ids = self.submit(prompts, params, n=n, seed=seed, groups=groups)
        waiting = set(ids)
        done: dict[int, Rollout] = {}
        try:
            while waiting:
                finished = self.step()
                done |= {id: finished.pop(id) for id in waiting & finished.keys()}
                waiting -= done.keys()
                self._unread |= finished  # of an earlier `submit`
        finally:
            for id in waiting:
                self._pending.pop(id, None)
                self.llm.abort(id)
        rollouts = tuple(done[id] for id in ids)
        return RolloutBatch(
            rollouts=rollouts,
            seconds=perf_counter() - began,
            stats=reduce(add, [rollout.stats for rollout in rollouts], Stats()),
            provenance=self.provenance,
            regimes=self.regimes.take(),
        )

    def submit(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        n: int = 1,
        seed: int = 0,
        groups: Sequence[str] | None = None,
    ) -> list[int]:
        """Queue the rollouts of `generate` and return their ids, ordered by prompt and sample."""
        params = checked_params(prompts, params, n, groups)
        return self.queue(samples_of(list(map(self.llm.encode, prompts)), n, seed, groups), params)

    def queue(self, samples: Sequence[Sample], params: SamplingParams) -> list[int]:
        """Queue samples that were made with `samples_of`, and return their ids.

        Raises:
            OutriderError: a prompt or a parameter does not fit the model. Nothing is queued then.
        """
        requests = []
        for sample in samples:
            own = replace(params, seed=sample.seed, logprobs=params.logprobs or 0)
            (request,) = self.llm.request_maker.of_tokens(sample.prompt_token_ids, own)
            requests.append(replace(request, group=sample.group))
        pairs = zip(requests, samples, strict=True)
        # Groups whose rollouts were long start first, so that they do not run alone at the end. New groups may be long.
        for request, sample in sorted(pairs, key=lambda pair: -self._mean_length.get(pair[0].group, inf)):
            seq = self.llm.add(request)
            self._pending[request.id] = _Pending(seq, sample.prompt, sample.sample, request.group)
        return [request.id for request in requests]

    def completed(self) -> Iterator[Rollout]:
        """Yield rollouts of `submit` as they finish, until none is left.

        The loop may call `submit`, `update_weights`, `update_draft` and `cancel`. This is asynchronous training: a
        rollout then has tokens of several versions, and `Rollout.weight_versions` says which.
        """
        while self._pending or self._unread:
            finished = self._unread or self.step()
            self._unread = {}
            yield from finished.values()

    def cancel(self, ids: Sequence[int]) -> None:
        """Drop rollouts of `submit`. Finished ones are not affected."""
        for id in ids:
            self._unread.pop(id, None)
            if self._pending.pop(id, None):
                self.llm.abort(id)

    def lengths(self) -> dict[int, int]:
        """Return the output tokens so far of the unfinished rollouts, by id."""
        return {id: entry.seq.num_output_tokens for id, entry in self._pending.items()}

    def step(self) -> dict[int, Rollout]:
        """Run one round and return the rollouts that it has finished, by id.

        Callers may submit, cancel and update weights between two rounds, so the loop is theirs.

        Raises:
            OutriderError: no request runs or waits.
        """
        if not self.llm.engine.busy():
            raise OutriderError("no rollout runs or waits; submit some")
        done = {}
        before = self.llm.stats
        began = perf_counter()
        seqs = self.llm.engine.step()
        self.regimes.add(before, self.llm.stats, perf_counter() - began)
        for seq in seqs:
            entry = self._pending.get(seq.request.id)
            if seq.finish_reason and entry:
                del self._pending[seq.request.id]
                mean = self._mean_length.setdefault(entry.group, float(seq.num_output_tokens))
                self._mean_length[entry.group] = mean + (seq.num_output_tokens - mean) * _LENGTH_RATE
                done[seq.request.id] = Rollout.of(
                    self.llm.completion(seq),
                    prompt=entry.prompt,
                    sample=entry.sample,
                    group=entry.group,
                    draft_version=self.draft_version,
                    rounds=seq.rounds,
                )
        return done


def samples_of(
    prompts: Sequence[tuple[int, ...]], n: int, seed: int, groups: Sequence[str] | None = None
) -> list[Sample]:
    """Return the samples of a call of `RolloutEngine.generate`, ordered by prompt and sample."""
    samples = []
    for i, tokens in enumerate(prompts):
        group = _digest(tokens) if groups is None else groups[i]
        for j in range(n):
            own = derive_seed(seed, 1 + i * _MAX_SAMPLES + j)
            samples.append(Sample(prompt_token_ids=tokens, prompt=i, sample=j, group=group, seed=own))
    return samples


def checked_params(
    prompts: Sequence[Prompt], params: SamplingParams | None, n: int, groups: Sequence[str] | None
) -> SamplingParams:
    """Return the parameters of a call of `RolloutEngine.generate`. Raises OutriderError if an argument is invalid."""
    params = SamplingParams(temperature=1.0) if params is None else params
    if isinstance(prompts, str) or not prompts:
        raise OutriderError("prompts is no list of prompts; give a list of strings or of lists of token ids")
    if not 1 <= n <= _MAX_SAMPLES:
        raise OutriderError(f"n is {n}; use a number of samples from 1 to {_MAX_SAMPLES}")
    if groups is not None and len(groups) != len(prompts):
        raise OutriderError(f"{len(prompts)} prompts came with {len(groups)} groups; give one per prompt")
    if params.n != 1 or params.seed is not None:
        raise OutriderError("params has n or seed, which are arguments of the call here; leave them out of params")
    return params


def _digest(tokens: Sequence[int]) -> str:
    """Return a short name of a prompt."""
    return sha256(repr(tuple(tokens)).encode()).hexdigest()[:16]
