"""Keep transformers quiet while Outrider uses it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging as transformers_logging


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
