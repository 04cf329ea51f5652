"""Rollouts by several engines, each in a Ray actor, with one policy and one queue of samples."""

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import add
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch

from outrider.core.params import SamplingParams
from outrider.core.stats import Stats
from outrider.engine.codec import Prompt
from outrider.errors import OutriderError
from outrider.scale.ray.package import import_ray, lost_actor_errors
from outrider.train.rl.records import Provenance, Rollout, RolloutBatch
from outrider.train.rl.rollout import RolloutEngine, Sample, checked_params, samples_of

_ROUNDS = 16  # of a call of a worker, after which samples can be moved
_MAX_LOSSES = 8  # lost workers of a call, after which it fails
_log = logging.getLogger("outrider.scale.ray")
_Weights = Mapping[str, torch.Tensor] | str | Path


class _Progress(NamedTuple):
    """The results of a worker in a call."""

    finished: tuple[Rollout, ...]
    lengths: dict[tuple[int, int], int]  # output tokens of its unfinished samples, by prompt and sample


class RolloutWorker:
    """One rollout engine. `RolloutPool` runs it in a Ray actor."""

    def __init__(self, target: str | None, options: dict[str, Any]) -> None:
        """Load the policy. The arguments are those of `RolloutEngine.load`."""
        self._engine = RolloutEngine.load(target, **options)
        self._ids: dict[tuple[int, int], int] = {}  # of unfinished samples

    def encode(self, prompts: Sequence[Prompt]) -> list[tuple[int, ...]]:
        """Return the tokens of prompts."""
        return list(map(self._engine.llm.encode, prompts))

    def provenance(self) -> Provenance:
        """Return how the rollouts are made."""
        return self._engine.provenance

    def update_weights(self, weights: _Weights, version: int) -> int:
        """Load new weights of the policy, and drop unfinished samples."""
        self.drop(list(self._ids))
        if version > self._engine.version:
            self._engine.update_weights(weights, version)
        return self._engine.version

    def run(self, samples: Sequence[Sample], params: SamplingParams) -> _Progress:
        """Queue samples, and run rounds until one is finished, but at most `_ROUNDS`."""
        ids = self._engine.queue(samples, params)
        self._ids |= {(sample.prompt, sample.sample): id for sample, id in zip(samples, ids, strict=True)}
        finished: list[Rollout] = []
        for _ in range(_ROUNDS):
            if finished or not self._ids:
                break
            finished += self._engine.step().values()
        for rollout in finished:
            del self._ids[rollout.prompt, rollout.sample]
        lengths = self._engine.lengths()
        return _Progress(tuple(finished), {key: lengths[id] for key, id in self._ids.items()})

    def drop(self, keys: Sequence[tuple[int, int]]) -> None:
        """Drop samples. Finished ones are not affected."""
        self._engine.cancel([self._ids.pop(key) for key in keys if key in self._ids])


class _Worker:
    """An actor, and the samples that it works on."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.samples: dict[tuple[int, int], Sample] = {}
        self.lengths: dict[tuple[int, int], int] = {}
        self.call: Any = None  # the running call


class RolloutPool:
    """Samples rollouts with several engines.

    A seed, the index of a prompt and the index of a sample determine a rollout, as in `RolloutEngine`. So it does not
    matter which worker samples it, or whether it is sampled again because a worker was lost. This holds bit by bit
    where `Provenance.same_tokens` is true, and up to rounding elsewhere.

    Workers take samples from one queue when they have free slots. When the queue is empty, a worker
    without work takes over the samples of the busiest worker that have the fewest tokens so far.
    """

    def __init__(
        self,
        target: str | Path | None = None,
        *,
        workers: int,
        slots: int = 16,
        cpus: float = 1.0,
        gpus: float = 0.0,
        **options: Any,
    ) -> None:
        """Start the workers. Ray is started on this machine if the program has not called `ray.init`.

        Args:
            target: folder of the policy, on every machine.
            workers: number of engines.
            slots: samples that an engine runs at once; its `max_num_seqs`.
            cpus: CPUs that a worker reserves in Ray.
            gpus: GPUs that a worker reserves.
            options: other options of `RolloutEngine.load`.

        Raises:
            OutriderError: Ray is not installed, or a number is invalid.
        """
        self._ray = import_ray()
        self._lost_errors = lost_actor_errors()
        for name, value in (("workers", workers), ("slots", slots)):
            if not isinstance(value, int) or value < 1:
                raise OutriderError(f"{name} is {value!r}; use a whole number of at least 1")
        if not self._ray.is_initialized():
            self._ray.init(include_dashboard=False, log_to_driver=False)
        self._slots = slots
        self._target = None if target is None else str(target)
        self._options = {"threads": max(int(cpus), 1), **options, "max_num_seqs": slots}
        self._class = self._ray.remote(num_cpus=cpus, num_gpus=gpus)(RolloutWorker)
        self._version = 0
        self._weights: Any = None  # a reference to the current weights in Ray's object store
        self._workers = [_Worker(self._start()) for _ in range(workers)]
        self.lost = 0  # workers that were lost and replaced
        self.stolen = 0  # samples that another worker took over

    @property
    def version(self) -> int:
        """The version of the policy's weights; 0: as loaded."""
        return self._version

    @property
    def actors(self) -> tuple[Any, ...]:
        """The handles of the Ray actors."""
        return tuple(worker.actor for worker in self._workers)

    def update_weights(self, weights: _Weights, version: int | None = None) -> int:
        """Broadcast new weights of the policy, and return their version.

        They are stored once in Ray's object store. Each machine reads them once.

        Args:
            weights: tensors by the names of the model's `state_dict`, or the folder of a model, on every machine.
            version: a number above the current version. None: the next one.

        Raises:
            OutriderError: the version is not above the current one, or a weight does not fit. The
                workers may then have different versions, so update again.
        """
        version = self._version + 1 if version is None else version
        if version <= self._version:
            raise OutriderError(f"version is {version}, and the current one is {self._version}; use a higher number")
        if isinstance(weights, Mapping):
            weights = {name: value.detach().cpu() for name, value in weights.items()}
        self._weights = self._ray.put(weights)
        self._version = version
        calls = [worker.actor.update_weights.remote(self._weights, version) for worker in self._workers]
        for worker, call in zip(self._workers, calls, strict=True):
            try:
                self._ray.get(call)
            except self._lost_errors as error:
                self._replace(worker, error)
            except self._ray.exceptions.RayTaskError as error:
                raise _cause(error) from error
        return version

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        n: int = 1,
        seed: int = 0,
        groups: Sequence[str] | None = None,
    ) -> RolloutBatch:
        """Sample `n` rollouts of each prompt. The arguments are those of `RolloutEngine.generate`.

        Raises:
            OutriderError: a prompt or a parameter does not fit the model, or too many workers were lost.
        """
        params = checked_params(prompts, params, n, groups)
        began = perf_counter()
        tokens = self._ask("encode", list(prompts))
        samples = samples_of(tokens, n, seed, groups)
        done = self._run(deque(samples), params)
        rollouts = tuple(done[sample.prompt, sample.sample] for sample in samples)
        return RolloutBatch(
            rollouts=rollouts,
            seconds=perf_counter() - began,
            stats=reduce(add, [rollout.stats for rollout in rollouts], Stats()),
            provenance=self._ask("provenance"),
        )

    def shutdown(self) -> None:
        """End the workers. Ray keeps running."""
        for worker in self._workers:
            self._ray.kill(worker.actor)
        self._workers = []

    def _start(self) -> Any:
        """Start an actor with the current weights."""
        actor = self._class.remote(self._target, self._options)
        if self._weights is not None:
            self._ray.get(actor.update_weights.remote(self._weights, self._version))
        return actor

    def _ask(self, method: str, *arguments: Any) -> Any:
        """Return the result of a method of some worker."""
        for _ in range(_MAX_LOSSES):
            worker = self._workers[0]
            try:
                return self._ray.get(getattr(worker.actor, method).remote(*arguments))
            except self._lost_errors as error:
                self._replace(worker, error)
            except self._ray.exceptions.RayTaskError as error:
                raise _cause(error) from error
        raise OutriderError(f"{_MAX_LOSSES} workers were lost in a row; look into the logs of Ray")

    def _run(self, queue: deque[Sample], params: SamplingParams) -> dict[tuple[int, int], Rollout]:
        """Sample the queue and return the rollouts by prompt and sample."""
        done: dict[tuple[int, int], Rollout] = {}
        total = len(queue)
        losses = self.lost
        try:
            while len(done) < total:
                for worker in self._workers:
                    if worker.call is None:
                        self._feed(worker, queue, params)
                calls = {worker.call: worker for worker in self._workers if worker.call is not None}
                (ready, *_), _ = self._ray.wait(list(calls))
                worker = calls[ready]
                worker.call = None
                try:
                    progress = self._ray.get(ready)
                except self._lost_errors as error:
                    if self.lost - losses >= _MAX_LOSSES:
                        raise OutriderError(f"{_MAX_LOSSES} workers were lost; look into the logs of Ray") from error
                    queue.extendleft(worker.samples.values())
                    self._replace(worker, error)
                    continue
                except self._ray.exceptions.RayTaskError as error:
                    raise _cause(error) from error
                worker.lengths = progress.lengths
                for rollout in progress.finished:
                    key = (rollout.prompt, rollout.sample)
                    if worker.samples.pop(key, None) is not None:
                        done[key] = rollout
        finally:
            self._clear()
        return done

    def _feed(self, worker: _Worker, queue: deque[Sample], params: SamplingParams) -> None:
        """Give a worker samples for its free slots, and let it run. Without any it does nothing."""
        if not queue and not worker.samples:
            queue.extend(self._steal(worker))
        new = [queue.popleft() for _ in range(min(self._slots - len(worker.samples), len(queue)))]
        worker.samples |= {(sample.prompt, sample.sample): sample for sample in new}
        if worker.samples:
            worker.call = worker.actor.run.remote(new, params)

    def _steal(self, thief: _Worker) -> list[Sample]:
        """Take half of the samples of the busiest worker, those with the fewest tokens, for one without work."""
        victim = max(self._workers, key=lambda each: len(each.samples))
        if victim is thief or len(victim.samples) < 2:
            return []
        keys = sorted(victim.samples, key=lambda key: victim.lengths.get(key, 0))[: len(victim.samples) // 2]
        victim.actor.drop.remote(keys)  # after its running call, whose results for these samples are ignored
        self.stolen += len(keys)
        return list(map(victim.samples.pop, keys))

    def _replace(self, worker: _Worker, error: Exception) -> None:
        """Start a new actor in place of a lost one."""
        self.lost += 1
        _log.warning("a rollout worker was lost and is replaced: %s", str(error).strip().partition("\n")[0])
        worker.actor = self._start()
        worker.samples, worker.lengths, worker.call = {}, {}, None

    def _clear(self) -> None:
        """Drop what the workers still have, after an error."""
        for worker in self._workers:
            if worker.samples:
                worker.actor.drop.remote(list(worker.samples))
            worker.samples, worker.lengths, worker.call = {}, {}, None


def _cause(error: Any) -> Exception:
    """Return the exception of the worker in place of Ray's."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, OutriderError) else error
