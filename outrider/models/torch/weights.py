"""The weights of a model by name, and checks of new values before any of them is loaded."""

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from outrider.errors import OutriderError
from outrider.models.torch.gguf_linear import Blocks
from outrider.runtime.progress import stage

Weight = torch.Tensor | Blocks

_PEFT_PARTS = (".lora_", ".base_layer.", ".modules_to_save.", ".original_module.")  # of names in a state_dict


class Weights(Mapping[str, Weight]):
    """The weights of a checkpoint, by their names in the `state_dict` of transformers.

    A value is made when it is accessed.
    """

    path: Path  # of the file or folder
    body: str = "model"  # the module with the decoder layers

    @abstractmethod
    def shape(self, name: str) -> torch.Size:
        """Return the shape of a weight, without making it."""

    @abstractmethod
    def nbytes(self, name: str) -> int:
        """Return the bytes of a weight where it is stored."""

    @contextmanager
    def reading(self, names: Collection[str]) -> Iterator[Callable[[str], None]]:
        """Show the progress of reading these weights. The body calls the yielded function with the name of each."""
        sizes = {name: self.nbytes(name) for name in names}
        with stage(reading_title(self.path), sum(sizes.values()), counts_bytes=True) as read:
            yield lambda name: read.advance(sizes[name])

    def check(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Check that there are these weights, in these shapes.

        Raises:
            OutriderError: a weight is missing, or has another shape.
        """
        for name, shape in shapes.items():
            if tuple(found := self.shape(name)) != tuple(shape):
                raise OutriderError(
                    f"{name} in {self.path} is {tuple(found)} and should be {tuple(shape)};"
                    " download or convert it again"
                )

    @property
    def types(self) -> tuple[str, ...]:
        """The types of weights in blocks, sorted."""
        return ()

    def release(self, name: str) -> None:
        """Free memory that the value of a weight takes. It is made again when it is accessed."""


def reading_title(path: Path) -> str:
    """Return what to show while the weights of a model are read."""
    return f"reading the weights of {path.name or path}"


def converted(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a value in a type. A float16 matrix stays as it is in a float32 model: the native kernels multiply it."""
    keeps = value.dim() == 2 and value.dtype == torch.float16 and dtype == torch.float32
    return value if keeps else value.to(dtype)


def check_weights(weights: Mapping[str, torch.Tensor], shapes: Mapping[str, torch.Size]) -> None:
    """Check that new values fit the weights of a model.

    Args:
        weights: the new values, by name. They may have any float dtype; a target converts them to its own.
        shapes: the shapes of the weights of the model, by name.

    Raises:
        OutriderError: a name is unknown, or a value has another shape or no float dtype.
    """
    for name, value in weights.items():
        if name not in shapes and _is_adapter(name):
            raise OutriderError(
                f"{name!r} is a weight of a PEFT adapter that is not merged; give"
                " outrider.train.rl.merged_weights(model)"
            )
        if name not in shapes:
            raise OutriderError(f"the model has no weight {name!r}; use the names of its state_dict")
        if value.shape != shapes[name]:
            raise OutriderError(f"{name} has shape {tuple(value.shape)}; give {tuple(shapes[name])}")
        if not value.is_floating_point():
            dtype = str(value.dtype).removeprefix("torch.")
            raise OutriderError(f"{name} has dtype {dtype}; give float32, bfloat16 or float16")


def _is_adapter(name: str) -> bool:
    """Return whether a name is one of PEFT."""
    return name.startswith("base_model.model.") or any(part in name for part in _PEFT_PARTS)


def finite_weights(weights: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return float weights in `dtype`, and others unchanged.

    Raises:
        OutriderError: a value is NaN or infinite, perhaps only in `dtype`.
    """
    converted = {}
    for name, value in weights.items():
        converted[name] = value.detach().to(dtype) if value.is_floating_point() else value
        # `aminmax` is NaN if there is one. It needs one pass and no memory, unlike `isfinite` of
        # all values.
        if value.numel() and not all(map(torch.isfinite, torch.aminmax(converted[name]))):
            raise OutriderError(
                f"{name} has values that are NaN or infinite in {str(dtype).removeprefix('torch.')}; the old weights"
                " stay in use. Check the last step of the training"
            )
    return converted


def tied_weight(weights: Mapping[str, torch.Tensor], *names: str) -> torch.Tensor | None:
    """Return the new value of a weight that has several names, or None if there is none.

    Raises:
        OutriderError: two names have different values.
    """
    given = {name: weights[name] for name in names if name in weights}
    if not given:
        return None
    (first, value), *others = given.items()
    for name, other in others:
        if value.data_ptr() != other.data_ptr() and not torch.equal(value, other):
            raise OutriderError(
                f"{first} and {name} are one weight of this model, and their new values differ; give one of them"
            )
    return value
