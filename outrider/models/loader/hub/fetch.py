"""Fetch a model from the Hub into the cache of huggingface_hub, which other programs share."""

import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any

from huggingface_hub import HfApi, constants, get_cached_repo_tree, hf_hub_download, snapshot_download
from huggingface_hub.errors import CachedRepoTreeNotFoundError, LocalEntryNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils.tqdm import tqdm
from rich.filesize import decimal

from outrider.errors import OutriderError
from outrider.models.loader.hub.files import CONFIG, SMALL_FILES, SUBFOLDERS, gguf_files, weight_files
from outrider.models.loader.hub.mistakes import explain
from outrider.models.loader.hub.names import HubName
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


_LOGGERS = ("huggingface_hub", "httpx", "httpx2")  # the client of older and of newer releases


@cache  # one process works with one commit of a model
def hub_folder(name: HubName, *, weights: bool = True) -> Path:
    """Return the folder of a model in the cache, or its GGUF file. Missing files are downloaded.

    Ranks may call it at once: the cache has a lock for each file.

    Args:
        weights: whether the weights are needed. A GGUF file is always whole.

    Raises:
        OutriderError: there is no such model, it cannot be downloaded, or it holds nothing that can be loaded.
    """
    try:
        with _quiet_hub():
            return _fetch(name, weights)
    except OutriderError:
        raise
    except Exception as error:  # of huggingface_hub, its HTTP client, its storage client, or the file system
        raise explain(name, error) from error


def _fetch(name: HubName, weights: bool) -> Path:
    folder = Path(
        snapshot_download(
            name.repo,
            revision=name.revision,
            allow_patterns=[CONFIG] if name.gguf else list(SMALL_FILES),
            ignore_patterns=[SUBFOLDERS],
            tqdm_class=SilentBar,
        )
    )
    sizes = _listing(name, folder)
    try:
        files = gguf_files(name, sizes) if name.gguf else weight_files(name, folder, sizes)
    except OutriderError:
        if name.gguf or None not in sizes.values():
            raise
        raise LocalEntryNotFoundError("the cache is incomplete") from None
    missing = {file: sizes.get(file) for file in files if not (folder / file).is_file()}
    if missing and (weights or name.gguf):
        _download(name, folder.name, missing)
    return folder / files[0] if name.gguf else folder


def _listing(name: HubName, folder: Path) -> Mapping[str, int | None]:
    """Return the files of a commit with their sizes in bytes.

    Other programs may have filled the cache without the list, or it cannot be written there. If the
    Hub cannot be reached either, these are the files in the cache, with unknown sizes.
    """
    try:
        return {file.path: file.size for file in get_cached_repo_tree(name.repo, revision=folder.name)}
    except CachedRepoTreeNotFoundError:
        pass
    try:
        entries = HfApi().list_repo_tree(name.repo, recursive=True, revision=folder.name)
        return {entry.path: entry.size for entry in entries if isinstance(entry, RepoFile)}
    except Exception:  # of the HTTP client: the Hub cannot be reached
        return {str(file.relative_to(folder)): None for file in folder.rglob("*") if file.is_file()}


def _download(name: HubName, commit: str, files: Mapping[str, int | None]) -> None:
    """Download the files one by one, so that Ctrl-C ends the download at once. A file is whole or not there."""
    size = sum(each or 0 for each in files.values())
    cache = Path(constants.HF_HUB_CACHE)
    existing = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if size > free:
        raise OutriderError(
            f"{name} takes {decimal(size)}, and {decimal(free)} are free in {constants.HF_HUB_CACHE}; free some space,"
            " or set HF_HOME to a folder on another disk"
        )
    with shown_download(str(name), files=len(files), size=size) as bar:
        for file in files:
            hf_hub_download(name.repo, file, revision=commit, tqdm_class=bar)


@contextmanager
def _quiet_hub() -> Iterator[None]:
    """Hide what huggingface_hub and its HTTP client log. They try again, and raise what stays wrong."""
    levels = {logger: logger.level for logger in map(logging.getLogger, _LOGGERS)}
    for logger in levels:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
