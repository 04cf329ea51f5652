"""The command `index`: build a datastore from files, for the proposer `retrieval`."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from outrider.core.json_lines import read_json
from outrider.core.prompts import chat_text, parse_messages
from outrider.drafting.propose.lookup.datastore import (
    HEADER,
    MOST_TOKENS,
    SUFFIXES,
    TOKENS,
    Header,
    Numbers,
    Source,
    describe,
    fingerprint,
    join,
    sort_suffixes,
    vocabulary,
)
from outrider.errors import OutriderError
from outrider.models.loader.embedded import model_folder
from outrider.models.loader.tokenizer import read_tokenizer
from outrider.runtime.atomic_files import check_folder
from outrider.runtime.progress import stage
from outrider.runtime.report.console import print_plain
from outrider.tools.settings import IndexSettings

FIELDS = ("text", "prompt", "messages")  # fields of a JSON line; the first one that exists is used
_LINES = (".jsonl", ".ndjson")  # suffixes of files with JSON lines
PIECE = 1 << 20  # characters per call of the tokenizer

Tokens = NDArray[np.uint32]  # the tokens of one document


def run_index(settings: IndexSettings, *, console: Console) -> dict[str, Any]:
    """Build a datastore from files.

    A file with the suffix .jsonl or .ndjson has one document per line. Any other file is one document.

    Args:
        settings: the files, the target with the tokenizer, and the folder to write.
        console: the console for progress and summary.

    Returns:
        The summary as JSON values.

    Raises:
        OutriderError: a file cannot be read or is not text, or the folder cannot be written.
    """
    began = perf_counter()
    folder = Path(settings.out).expanduser()
    paths = [Path(file).expanduser() for file in settings.files]
    field, force = settings.field, settings.force
    check_place(folder, force=force)
    _check_files(paths, field)
    tokenizer = _load_tokenizer(model_folder(settings.engine.target, weights=False))
    vocab = vocabulary(tokenizer)
    documents: list[Tokens] = []
    with stage("reading", sum(path.stat().st_size for path in paths), counts_bytes=True) as reading:
        sources = [_read(path, field, tokenizer, documents, reading.advance) for path in paths]
    tokens = _join(documents, vocab)
    with stage("sorting", 1.0) as sorting:
        suffixes = sort_suffixes(tokens, len(documents), lambda share: sorting.advance(share - sorting.done))
    name = fingerprint(tokenizer)
    header = describe(tokens, documents=len(documents), vocab=vocab, tokenizer=name, files=sources)
    summary = {
        "datastore": str(folder),
        "bytes": write(folder, header, tokens, suffixes, force=force),
        "files": len(sources),
        "empty": sum(not source.tokens for source in sources),
        "documents": len(documents),
        "tokens": len(tokens) - len(documents),
        "seconds": perf_counter() - began,
    }
    _show(summary, console)
    return summary


def write(folder: Path, header: Header, tokens: Numbers, suffixes: NDArray[np.uint32], *, force: bool) -> int:
    """Write a datastore atomically.

    Returns:
        The bytes written.

    Raises:
        OutriderError: see `check_place`, or the disk is full.
    """
    check_place(folder, force=force)
    try:
        with _temporary_folder(folder) as temporary:
            _save(temporary / TOKENS, tokens.tobytes())
            _save(temporary / SUFFIXES, suffixes.astype("<u4").tobytes())
            _save(temporary / HEADER, json.dumps(asdict(header), indent=1).encode())
            return sum(file.stat().st_size for file in temporary.iterdir())
    except OSError as error:
        raise OutriderError(f"{folder} cannot be written ({error.strerror}); choose another folder") from error


def check_place(folder: Path, *, force: bool) -> None:
    """Check that a datastore can be written to a folder.

    Raises:
        OutriderError: the folder has other files, or it is a datastore and `force` is not set.
    """
    check_folder(folder, "--out")
    if not folder.exists():
        return
    if any(folder.iterdir()) and not (folder / HEADER).is_file():
        raise OutriderError(f"{folder} exists and is not a datastore; choose another folder")
    if not force:
        raise OutriderError(f"{folder} exists; choose another folder, or replace it with --force")


@contextmanager
def _temporary_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder. It replaces `folder` on success, and it is removed on failure."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    parent = Path(mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    new = parent / "new"
    old = parent / "old"
    try:
        new.mkdir()
        yield new
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
    finally:
        if old.exists() and not folder.exists():
            old.rename(folder)
        rmtree(parent)


def _save(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _check_files(paths: Sequence[Path], field: str | None) -> None:
    """Check all files before the first one is read."""
    for path in paths:
        if path.is_dir():
            raise OutriderError(f"{path} is a folder; name its files, as in {path / '*.txt'}")
        if not path.is_file():
            raise OutriderError(f"{path} does not exist; name files with text or JSON lines")
    if field is not None and not any(map(_is_lines, paths)):
        raise OutriderError(
            f"--field {field} applies to files *.jsonl and *.ndjson only, and there are none; leave it out"
        )


def _is_lines(path: Path) -> bool:
    return path.suffix.lower() in _LINES


def _load_tokenizer(folder: Path) -> Any:
    if not folder.is_dir():
        raise OutriderError(f"{folder} is not a folder; give the folder of the target, which has its tokenizer")
    return read_tokenizer(folder)


def _read(
    path: Path, field: str | None, tokenizer: Any, documents: list[Tokens], advance: Callable[[int], None]
) -> Source:
    """Append the documents of a file to `documents`. `advance` receives the number of processed characters."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise OutriderError(f"{path} cannot be read ({error.strerror}); check its permissions") from error
    texts = _lines(path, content, field, tokenizer) if _is_lines(path) else [_decode(path, content)]
    before = len(documents)
    documents += filter(len, encode(tokenizer, texts, advance))
    return Source(
        name=str(path),
        sha256=hashlib.sha256(content).hexdigest(),
        documents=len(documents) - before,
        tokens=sum(map(len, documents[before:])),
    )


def _decode(path: Path, content: bytes) -> str:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise OutriderError(f"{path} is not UTF-8 text (byte {error.start}); leave it out, or convert it") from error
    if "\0" in text:
        raise OutriderError(f"{path} is not text (it has a zero byte); leave it out")
    return text


def _lines(path: Path, content: bytes, field: str | None, tokenizer: Any) -> Iterator[str]:
    """Yield the text of each line. Only \\n separates lines: JSON strings may contain other separators."""
    for number, line in enumerate(_decode(path, content).split("\n"), 1):
        if line.strip():
            yield text_of(line, f"{path}:{number}", field, tokenizer)


def text_of(line: str, where: str, field: str | None, tokenizer: Any) -> str:
    """Return the text of a JSON line. Messages are formatted with the chat template."""
    entry = read_json(line, where, form='{"text": "..."}')
    names = FIELDS if field is None else (field,)
    fields = entry if isinstance(entry, dict) else {}
    value = next((fields[name] for name in names if name in fields), None)
    if isinstance(value, str):
        return value
    if not (isinstance(value, list) and value and all(isinstance(message, dict) for message in value)):
        raise OutriderError(
            f"{where}: no {' or '.join(names)} that is a string or a list of messages; name the field with --field"
        )
    messages = parse_messages(value, where)
    if getattr(tokenizer, "chat_template", None) is None:
        raise OutriderError(f"{where} has messages, and the target has no chat template; give plain text")
    try:
        return chat_text(tokenizer, messages, add_generation_prompt=False)
    except OutriderError as error:
        raise OutriderError(f"{where}: {error}") from error


def encode(tokenizer: Any, texts: Iterable[str], tell: Callable[[int], None]) -> Iterator[Tokens]:
    """Yield the tokens of each text, without special tokens. `tell` receives the number of processed characters."""
    parts: list[Tokens] = []
    for batch in _batches(texts):
        ids = tokenizer([piece for piece, _ in batch], add_special_tokens=False, verbose=False)["input_ids"]
        for tokens, (piece, last) in zip(ids, batch, strict=True):
            parts.append(np.array(tokens, np.uint32))
            tell(len(piece))
            if last:
                yield np.concatenate(parts)
                parts = []


def _batches(texts: Iterable[str]) -> Iterator[list[tuple[str, bool]]]:
    """Yield batches of (piece, whether it is the last piece of its text), of about `PIECE` characters each."""
    batch: list[tuple[str, bool]] = []
    size = 0
    for text in texts:
        for piece in _pieces(text):
            batch.append(piece)
            size += len(piece[0])
            if size >= PIECE:
                yield batch
                batch = []
                size = 0
    if batch:
        yield batch


def _pieces(text: str) -> Iterator[tuple[str, bool]]:
    """Split a text at line ends. Yields each piece and whether it is the last one."""
    at = 0
    while len(text) - at > PIECE:
        end = text.rfind("\n", at, at + PIECE) + 1 or at + PIECE
        yield text[at:end], False
        at = end
    yield text[at:], True


def _join(documents: Sequence[Tokens], vocab: int) -> Numbers:
    size = sum(map(len, documents)) + len(documents)
    if not documents:
        raise OutriderError("the files are empty; give files with text")
    if size > MOST_TOKENS:
        raise OutriderError(
            f"the files have {size} tokens, and a datastore has at most {MOST_TOKENS}; give fewer files"
        )
    return join(documents, vocab)


def _show(summary: Mapping[str, Any], console: Console) -> None:
    empty = f", {summary['empty']} of them empty" if summary["empty"] else ""
    text = (
        f"files: {summary['files']:,}{empty}, documents: {summary['documents']:,}, tokens: {summary['tokens']:,},"
        f" in {summary['seconds']:.1f} s; {summary['bytes'] / 1e6:.1f} MB in {summary['datastore']}"
    )
    print_plain(console, text)
    print_plain(console, f"use it with --proposer retrieval:{summary['datastore']}")
