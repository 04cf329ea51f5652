"""Keep transformers quiet while Outrider uses it, and show what it reads."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers.utils import logging as transformers_logging

from outrider.models.torch.weights import reading_title
from outrider.runtime.progress import stage

_READS = "Loading weights"  # the title of transformers for its loop over the weights


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hide warnings and progress bars of transformers.

    They are about its own passes, such as missing packages that would make them faster. Outrider reports errors itself.
    """
    verbosity = transformers_logging.get_verbosity()
    shows_progress = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if shows_progress:
            transformers_logging.enable_progress_bar()


@contextmanager
def reading_shown(path: Path, size: int) -> Iterator[None]:
    """Show how much of `size` bytes transformers has read. It counts weights, which all count as equally large here."""
    with stage(reading_title(path), size, counts_bytes=True) as read:

        def count(make: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
            if options.get("desc") == _READS:
                return _counted(arguments[0], read.advance, size)
            return make(*arguments, **options)

        previous = transformers_logging.set_tqdm_hook(count)
        try:
            yield
        finally:
            transformers_logging.set_tqdm_hook(previous)


def _counted(weights: Any, advance: Callable[[float], None], size: int) -> Iterable[Any]:
    for weight in weights:
        yield weight
        advance(size / len(weights))
