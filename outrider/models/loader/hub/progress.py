"""The progress of a download."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from time import perf_counter
from typing import Any

from huggingface_hub import constants
from huggingface_hub.utils.tqdm import tqdm
from rich.filesize import decimal

from outrider.runtime.bar import shown_on_stderr
from outrider.runtime.progress import is_shown, stage


class SilentBar(tqdm):
    """A bar that huggingface_hub can update, and that shows nothing."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{**options, "disable": True})  # type: ignore[no-untyped-call]

    def update_transfer(self, size: float | None = 1) -> None:
        """Count bytes of the network, which `update` counts as bytes of the file as well."""

    def set_transfer_postfix_str(self, text: str, refresh: bool = False) -> None:
        """Show a rate of the network."""


@contextmanager
def shown_download(name: str, *, files: int, size: int) -> Iterator[type[SilentBar]]:
    """Show the download of `size` bytes in a number of files. Yield the bar for huggingface_hub.

    `HF_HUB_DISABLE_PROGRESS_BARS` hides the download.
    """
    if constants.HF_HUB_DISABLE_PROGRESS_BARS:
        yield SilentBar
        return
    count = "1 file" if files == 1 else f"{files} files"
    title = f"downloading {name}"
    with nullcontext() if is_shown() else shown_on_stderr(), stage(title, size or None, counts_bytes=True) as download:
        download.say(f"{title}: {count}, {decimal(size)}")
        began = perf_counter()
        try:
            yield _bar(download.advance)
        except KeyboardInterrupt:
            download.say(f"the download of {name} was interrupted; the same command downloads what is missing")
            raise
        download.say(f"downloaded {name} in {perf_counter() - began:.0f} s")


def _bar(advance: Callable[[float], None]) -> type[SilentBar]:
    class FileBar(SilentBar):
        """Counts the bytes of one file. A download that starts again at an earlier byte subtracts them."""

        def update(self, n: float | None = 1) -> None:
            advance(n or 0)

    return FileBar
