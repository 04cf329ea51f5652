"""From a folder of texts to prompts for `outrider train`: beginnings of texts, and words that begin a dialogue.

python -m recipes.family.prompts TEXTS --out prompts.jsonl
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from recipes.family.corpus import TEXT, USER, is_aside, read_texts


def main(
    texts: Annotated[Path, typer.Argument(help="A folder; every file below it that is UTF-8 text is cut.")],
    out: Annotated[Path, typer.Option(help="File of JSON lines to write.")],
    held_out: Annotated[Path | None, typer.Option(help="And one of prompts from texts that were kept aside.")] = None,
    suffix: Annotated[list[str] | None, typer.Option(help="Take files of this suffix alone. Repeatable.")] = None,
    each: Annotated[int, typer.Option(min=1, help="Prompts of a text at most.")] = 4,
    shortest: Annotated[int, typer.Option(min=1, help="Characters of a prompt at least.")] = 40,
    longest: Annotated[int, typer.Option(min=1, help="And at most.")] = 800,
    special: Annotated[list[str] | None, typer.Option(help="A prompt of special tokens alone. Repeatable.")] = None,
    times: Annotated[int, typer.Option(min=0, help="How often each of these is asked.")] = 200,
    begin: Annotated[str, typer.Option(help="What stands before a prompt that begins a text.")] = TEXT,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Cut texts into prompts. A prompt of special tokens alone has the target write a whole dialogue by itself."""
    if shortest > longest:
        raise typer.BadParameter(f"--shortest {shortest} is above --longest {longest}")
    chance = random.Random(seed)
    found = list(read_texts(texts, suffix or ()))
    if not found:
        raise typer.BadParameter(f"{texts} holds no text")
    lines: dict[bool, list[dict[str, str]]] = {True: [], False: []}
    for path, text in found:
        cut = pieces(text, chance, each=each, shortest=shortest, longest=longest)
        lines[is_aside(path)] += [
            {"category": path.suffix.lstrip(".") or "text", "prompt": piece if at else begin + piece}
            for at, piece in cut
        ]
    if held_out and not lines[True]:
        raise typer.BadParameter(
            f"none of {len(found)} texts is kept aside; give more of them, or leave --held-out out"
        )
    starts = [begin + tokens for tokens in (special or [USER])]
    lines[False] += [{"category": "dialogue", "prompt": start} for start in starts for _ in range(times)]
    for file, aside in ((out, False), (held_out, True)):
        if file:
            chance.shuffle(lines[aside])
            file.write_text("".join(json.dumps(line) + "\n" for line in lines[aside]), "utf-8")
            typer.echo(f"{len(lines[aside])} prompts are in {file}", err=True)


def pieces(text: str, chance: random.Random, *, each: int, shortest: int, longest: int) -> Iterator[tuple[int, str]]:
    """Up to `each` pieces of a text, with where they begin: the first at its beginning, others where a line begins."""
    lines = [at + 1 for at, letter in enumerate(text) if letter == "\n" and len(text) - at > 2 * shortest]
    begins = [0, *sorted(chance.sample(lines, min(each - 1, len(lines))))]
    for begin in begins:
        room = min(longest, len(text) - begin - 1)  # something is left to be said
        if room >= shortest:
            yield begin, text[begin : begin + chance.randint(shortest, room)]


if __name__ == "__main__":
    typer.run(main)
