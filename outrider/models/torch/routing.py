"""Which experts the routers of a model in transformers choose: record the choices of a pass, or prescribe them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch


class _Choice(NamedTuple):
    """The output of a router for T tokens."""

    logits: torch.Tensor  # [T, E]
    weights: torch.Tensor  # [T, K]
    experts: torch.Tensor  # [T, K] int64


class ExpertRecorder:
    """Records the experts that each token of a pass chooses, on torch."""

    def __init__(self, model: Any) -> None:
        """Record the passes of a model from now on."""
        self.experts: list[torch.Tensor] = []  # [T, K] of each layer that has a router, since `clear`
        self._hooks = [router.register_forward_hook(self._record) for router in _routers(model)]

    def remove(self) -> None:
        """Record no more passes."""
        for hook in self._hooks:
            hook.remove()

    def clear(self) -> None:
        """Forget the last pass."""
        self.experts.clear()

    def chosen(self) -> list[torch.Tensor]:
        """Return the experts [T, K] since `clear`, for each layer that has a router."""
        return list(self.experts)

    def touched(self) -> float | None:
        """Return the distinct experts since `clear`, a mean over layers; None: no router has run."""
        counts = [len(torch.unique(experts)) for experts in self.experts]
        return sum(counts) / len(counts) if counts else None

    def _record(self, _module: object, _inputs: object, outputs: Any) -> None:
        if choice := _choice(outputs):
            self.experts.append(choice.experts)


@contextmanager
def observed_experts(model: Any) -> Iterator[list[torch.Tensor]]:
    """Yield a list to which each router of a model appends the experts [T, K] of its T tokens."""
    recorder = ExpertRecorder(model)
    try:
        yield recorder.experts
    finally:
        recorder.remove()


@contextmanager
def prescribed_experts(model: Any, choices: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Make the routers choose these experts, if they differ from the routers' own choice.

    An expert that takes the place of another gets its weight. This is right where rounding decides between the two,
    because their logits are then nearly equal. Routers that do not choose the largest logits keep their own choice.

    Args:
        model: a model of transformers.
        choices: the experts [T, K] of the T tokens of one pass, for each layer that has a router.
            -1 leaves the choice to the router.

    Yields:
        A list to which each layer appends the gaps [T]: the difference between the logits of the
        worst expert of the router's own choice and of the prescribed one, over the root mean square
        of the token's logits. 0: both choices are equal.
    """
    gaps: list[torch.Tensor] = []
    routers = list(_routers(model))
    hooks = []
    if len(routers) == len(choices):
        for router, experts in zip(routers, choices, strict=True):
            hooks.append(router.register_forward_hook(partial(_prescribe, experts, gaps)))
    try:
        yield gaps
    finally:
        for hook in hooks:
            hook.remove()


def _prescribe(
    experts: torch.Tensor, gaps: list[torch.Tensor], _module: object, _inputs: object, outputs: Any
) -> tuple[torch.Tensor, ...] | None:
    """Return the output of a router with the prescribed experts, or None to keep its output."""
    choice = _choice(outputs)
    if choice is None or choice.experts.shape != experts.shape:
        return None
    logits, weights, own = choice
    largest = logits.topk(own.shape[1]).indices
    if not torch.equal(largest.sort(-1).values, own.sort(-1).values):
        return None
    wanted = torch.where(experts < 0, own, experts.to(own.device))
    same = wanted[:, :, None] == own[:, None, :]  # [T, wanted, own]
    new_weights = (same * weights[:, None, :]).sum(-1).to(weights.dtype)
    new_weights[~same.any(-1)] = weights[~same.any(1)]  # as many in each row
    worst = [logits.gather(1, chosen).min(-1).values.float() for chosen in (own, wanted)]
    gaps.append((worst[0] - worst[1]) / logits.float().square().mean(-1).sqrt().clamp_min(1e-30))
    return logits, new_weights, wanted


def _routers(model: Any) -> Iterator[torch.nn.Module]:
    """Yield the routers in the order of the layers. In transformers their classes are called routers."""
    for module in model.modules():
        if type(module).__name__.endswith("Router"):
            yield module


def _choice(outputs: Any) -> _Choice | None:
    """Return the output of a router as logits, weights and experts; None: it has another form."""
    if not isinstance(outputs, tuple) or len(outputs) != 3:
        return None
    logits, weights, experts = outputs
    if any(not isinstance(part, torch.Tensor) or part.dim() != 2 for part in outputs):
        return None
    is_choice = not experts.dtype.is_floating_point and weights.shape == experts.shape and len(logits) == len(experts)
    return _Choice(*outputs) if is_choice else None
