"""Replace the weights of a running engine, and free its memory for some time.

Training frameworks call this a weight update, a refit or a weight sync. The target and the draft have a version each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from outrider.core.params import is_whole
from outrider.core.proposer import WeightFollower
from outrider.core.target import SleepingTarget, WeightSharer
from outrider.drafting.propose.leaves import draft_models, leaves
from outrider.drafting.propose.vocabulary.wrapped_target import unwrapped
from outrider.engine.verifiers import verifier_for
from outrider.errors import OutriderError
from outrider.models.cache.paged import PagedCache
from outrider.models.cache.shared import SharedCache
from outrider.models.cache.static import StaticCache
from outrider.models.heads.targets.base import HeadRunner
from outrider.models.loader.load import read_weights
from outrider.models.torch.checkpoint import Checkpoint
from outrider.models.torch.weights import finite_weights
from outrider.runtime.grouping import instances
from outrider.verify.relaxed.registry import reads_embedding

if TYPE_CHECKING:
    from outrider.engine.build import EngineParts

NewWeights = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | str | Path


_Method = TypeVar("_Method", bound=Callable[..., Any])


def _between_rounds(method: _Method) -> _Method:
    """Let no thread run a round during the method."""

    @wraps(method)
    def alone(self: EngineWeights, *args: Any, **options: Any) -> Any:
        with self._parts.engine.turns:
            return method(self, *args, **options)

    return cast(_Method, alone)


class EngineWeights:
    """The weights of an engine's target and draft. A call waits for the round that another thread runs."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._draft_version = 0
        self._asleep = False
        self._missing: frozenset[str] = frozenset()  # weights that were freed and must be loaded again

    @property
    def version(self) -> int:
        """The version of the target's weights; 0: as loaded."""
        return self._parts.engine.weight_version

    @property
    def draft_version(self) -> int:
        """The version of the draft's weights; 0: as loaded. Drafts made of the target's weights follow the target."""
        return self._draft_version

    @_between_rounds
    def update(self, weights: NewWeights, version: int | None = None) -> int:
        """Load new values for some or all weights of the target, between two rounds.

        Unfinished requests go on with the new weights, and their KV cache is computed again. Cached prefixes of the old
        weights are dropped. Drafts that share weights with the target use the new ones. If the tables of a relaxed
        verifier come from the target's embedding, they are made again. If a weight does not fit, nothing changes.

        Args:
            weights: tensors by the names of the model's `state_dict`, pairs of names and tensors, or the folder of a
                Hugging Face model. Float tensors of any dtype and device; they are converted to the target's.
            version: a number above the current version. None: the next one.

        Returns:
            The new version.

        Raises:
            OutriderError: a name is unknown, a value has another shape, no float dtype, NaN or infinite values, or the
                version is not above the current one. The old weights stay in use.
        """
        new_version = _next_version(version, self.version)
        new = self._read(weights)
        self._check_complete(new)
        self._parts.engine.update_weights(new, new_version)
        if self._missing:
            self._missing = frozenset()
            self._parts.engine.block("")
        self._refresh_verifier()
        heads = instances(draft_models(self._parts.proposer), HeadRunner)
        if heads and isinstance(self._parts.target, WeightSharer):
            tables = self._parts.target.share_weights()
            for head in heads:
                head.refresh_shared(tables)
        for proposer in leaves(self._parts.proposer):
            if isinstance(proposer, WeightFollower):
                proposer.target_updated(new_version)
        return new_version

    @_between_rounds
    def update_draft(self, weights: NewWeights, version: int | None = None) -> int:
        """Load new values for some or all weights of the draft model or draft head, between two rounds.

        The output of the target does not change; the acceptance may. The arguments and errors are those of `update`.
        """
        new_version = _next_version(version, self._draft_version)
        new = self._read(weights)
        drafts = [model for model in draft_models(self._parts.proposer) if not isinstance(model.cache, SharedCache)]
        if len(drafts) != 1:
            raise OutriderError(
                f"the proposer has {len(drafts)} draft models with weights of their own, and"
                " update_draft needs one; use proposer draft:DIR or tree:DIR"
            )
        drafts[0].update_weights(new, new_version)
        self._draft_version = new_version
        self._parts.engine.suspend()  # the draft's KV cache is stale; the target's cached prefixes are kept
        return new_version

    @_between_rounds
    def sleep(self, level: int = 1) -> None:
        """Free memory for another program, such as a trainer on the same device. `wake` allocates it again.

        Unfinished requests wait and go on after `wake`. The draft keeps its weights.

        Args:
            level: 1 frees the KV caches of target and draft. 2 also frees the weights of the
                target; the first call after `wake` must then be `update` with all weights.

        Raises:
            OutriderError: the target cannot free this memory, or the engine sleeps already.
        """
        if level not in (1, 2):
            raise OutriderError(f"level is {level!r}; use 1 to free the KV caches, or 2 to free the weights as well")
        if self._asleep:
            raise OutriderError("the engine sleeps already; call wake first")
        target = self._sleeping_target("sleep")
        self._parts.engine.suspend()
        target.sleep(weights=level == 2)
        self._missing = target.weight_names() if level == 2 else frozenset()
        for draft in self._own_drafts():
            draft.sleep(weights=False)
        self._asleep = True
        self._parts.engine.block("the engine sleeps and has no memory to run; call wake first")

    @_between_rounds
    def wake(self) -> None:
        """Allocate the memory that `sleep` has freed. Raises OutriderError if the engine does not sleep."""
        if not self._asleep:
            raise OutriderError("the engine does not sleep; call sleep before wake")
        for model in (self._sleeping_target("wake"), *self._own_drafts()):
            model.wake()
        self._asleep = False
        missing = "sleep(2) has freed the weights of the target; load all with update_weights"
        self._parts.engine.block(missing if self._missing else "")

    @_between_rounds
    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes of the target. Unfinished requests prefill again."""
        self._parts.engine.suspend()
        cache = self._parts.target.cache
        if isinstance(cache, PagedCache | StaticCache):
            cache.forget()

    @property
    def ready(self) -> bool:
        """Whether rounds can run: the engine does not sleep, and no weight is missing."""
        return not self._asleep and not self._missing

    @property
    def asleep(self) -> bool:
        """Whether the engine sleeps."""
        return self._asleep

    def checksum(self) -> str:
        """Return a SHA-256 of the target's weights as they are stored.

        Engines with the same backend and dtype have the same checksum exactly if their weights are equal.

        Raises:
            OutriderError: the target does not show its weights.
        """
        digest = sha256()
        for name, tensor in sorted(self._sleeping_target("checksum").stored_weights().items()):
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def _refresh_verifier(self) -> None:
        """Make the tables of a relaxed verifier again, if they come from the target's embedding."""
        parts = self._parts
        if reads_embedding(parts.verifier.name):
            device = parts.loaded.checkpoint.device
            parts.engine.replace_verifier(verifier_for(parts.verifier, parts.target, vocab=parts.vocab, device=device))

    def _read(self, weights: NewWeights) -> dict[str, torch.Tensor]:
        dtype = self._parts.dtype
        if isinstance(weights, str | Path):
            new = read_weights(weights, dtype)
        elif not isinstance(weights, Iterable):
            kind = type(weights).__name__
            raise OutriderError(f"the weights are of type {kind}; give a mapping, pairs or a folder")
        else:
            new = dict(weights.items() if isinstance(weights, Mapping) else weights)
        for name, value in new.items():
            if not isinstance(value, torch.Tensor):
                raise OutriderError(f"{name} is a {type(value).__name__}; give torch tensors")
        return finite_weights(new, dtype)

    def _check_complete(self, new: Mapping[str, torch.Tensor]) -> None:
        """Check that `new` has all weights that `sleep` has freed."""
        if self._asleep:
            raise OutriderError("the engine sleeps; call wake before the weights are loaded")
        absent = self._missing - new.keys() - _tied(self._parts.loaded.checkpoint, new)
        if absent:
            raise OutriderError(
                f"{len(absent)} weights, such as {min(absent)}, were freed by sleep(2) and are not given; give all"
            )

    def _sleeping_target(self, what: str) -> SleepingTarget:
        target = self._parts.target
        if not isinstance(target, SleepingTarget):
            raise OutriderError(f"{what} does not support this target; use a decoder-only model")
        return target

    def _own_drafts(self) -> list[SleepingTarget]:
        """Return the draft models that can free a KV cache of their own."""
        models = map(unwrapped, draft_models(self._parts.proposer))
        return [
            model for model in models if isinstance(model, SleepingTarget) and not isinstance(model.cache, SharedCache)
        ]


def _tied(checkpoint: Checkpoint, new: Mapping[str, torch.Tensor]) -> frozenset[str]:
    """Return the names of weights that are given under another name."""
    tied = checkpoint.tied_weights()
    pairs = [(name, other) for one, two in tied.items() for name, other in ((one, two), (two, one))]
    return frozenset(name for name, other in pairs if other in new)


def _next_version(version: int | None, current: int) -> int:
    if version is None:
        return current + 1
    if not is_whole(version) or version <= current:
        raise OutriderError(f"version is {version!r}, and the current one is {current}; use a whole number above it")
    return version
