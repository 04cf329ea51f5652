"""The exceptions of Outrider. Each message says what is wrong and how to fix it."""

from collections.abc import Iterable

# Exceptions that the code of a model may raise if Outrider runs it in a way that its architecture does not allow.
MODEL_ERRORS = (TypeError, ValueError, AttributeError, LookupError, RuntimeError, NotImplementedError)


class OutriderError(ValueError):
    """A mistake that the caller can correct. The message says how."""


class UnsupportedModel(OutriderError):
    """The checkpoint is valid, but Outrider cannot run its architecture exactly. The message says why."""


class MissingKernels(UnsupportedModel):
    """The native kernels cannot be found, compiled or loaded on this system. The message says how to change it."""


class Fault(OutriderError):
    """A fault of Outrider, which the caller cannot correct. The message says what to report."""


class NotEnoughMemory(OutriderError):
    """The device has too little memory for the settings. The message says which one to change."""


def either(names: Iterable[str]) -> str:
    """Return a choice of names in words: `a`, `a or b`, `a, b or c`."""
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last
