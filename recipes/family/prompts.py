"""Cuts a folder of text files into prompts for `outrider train`.

python -m recipes.family.prompts TEXTS --out prompts.jsonl
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from recipes.family.corpus import END_OF_TEXT, USER, is_for_validation, read_texts


def main(
    texts: Annotated[Path, typer.Argument(help="Folder of text files. Every UTF-8 file below it is used.")],
    out: Annotated[Path, typer.Option(help="JSON lines file to write.")],
    held_out: Annotated[
        Path | None, typer.Option(help="JSON lines file for prompts from validation documents.")
    ] = None,
    suffix: Annotated[list[str] | None, typer.Option(help="Only use files with this suffix. Repeatable.")] = None,
    each: Annotated[int, typer.Option(min=1, help="Most prompts of a document.")] = 4,
    shortest: Annotated[int, typer.Option(min=1, help="Least characters of a prompt.")] = 40,
    longest: Annotated[int, typer.Option(min=1, help="Most characters of a prompt.")] = 800,
    special: Annotated[list[str] | None, typer.Option(help="A prompt of special tokens only. Repeatable.")] = None,
    times: Annotated[int, typer.Option(min=0, help="Copies of each prompt of special tokens.")] = 200,
    begin: Annotated[str, typer.Option(help="Special token at the start of a document.")] = END_OF_TEXT,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Cut documents into prompts, and add prompts of special tokens, from which the target writes whole dialogues."""
    if shortest > longest:
        raise typer.BadParameter(f"--shortest {shortest} is above --longest {longest}; use a smaller --shortest")
    rng = random.Random(seed)
    documents = list(read_texts(texts, suffix or ()))
    if not documents:
        raise typer.BadParameter(f"{texts} holds no text; name a folder with UTF-8 files")
    train_lines: list[dict[str, str]] = []
    held_out_lines: list[dict[str, str]] = []
    for path, text in documents:
        lines = held_out_lines if is_for_validation(path) else train_lines
        category = path.suffix.lstrip(".") or "text"
        for position, piece in pieces(text, rng, each=each, shortest=shortest, longest=longest):
            lines.append({"category": category, "prompt": piece if position else begin + piece})
    if held_out and not held_out_lines:
        raise typer.BadParameter(
            f"none of the {len(documents)} documents is for validation; give more documents, or leave --held-out out"
        )
    for tokens in special or [USER]:
        train_lines += [{"category": "dialogue", "prompt": begin + tokens} for _ in range(times)]
    _write_lines(out, train_lines, rng)
    if held_out:
        _write_lines(held_out, held_out_lines, rng)


def pieces(text: str, rng: random.Random, *, each: int, shortest: int, longest: int) -> Iterator[tuple[int, str]]:
    """Yield up to `each` pieces of a text with their positions: first its beginning, then from starts of lines.

    Args:
        text: the text.
        rng: chooses the lines and the lengths.
        each: the most pieces.
        shortest: the least characters of a piece.
        longest: the most characters of a piece.
    """
    line_starts = [i + 1 for i, letter in enumerate(text) if letter == "\n" and len(text) - i > 2 * shortest]
    starts = [0, *sorted(rng.sample(line_starts, min(each - 1, len(line_starts))))]
    for start in starts:
        limit = min(longest, len(text) - start - 1)  # so that a continuation exists
        if limit >= shortest:
            yield start, text[start : start + rng.randint(shortest, limit)]


def _write_lines(file: Path, lines: list[dict[str, str]], rng: random.Random) -> None:
    """Shuffle the lines and write them."""
    rng.shuffle(lines)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    typer.echo(f"{len(lines)} prompts are in {file}", err=True)


if __name__ == "__main__":
    typer.run(main)
