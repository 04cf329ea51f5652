"""Makes chat prompts from the Python files and documents of a folder."""

import ast
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from recipes.arithmetic.word_problems import make_problem

_SUFFIXES = (".py", ".md", ".rst", ".txt")
_NEW_NAMES = ("value", "item", "source", "data", "result", "entry")
_LONGEST_TEXT = 1200  # characters of the file that a prompt quotes
_SHORTEST_DOCUMENT = 200  # characters of a docstring that serves as a document
_LARGEST_FILE = 1 << 17  # bytes
_WORD_PROBLEMS = 0.1  # share of the prompts


def make_prompts(folder: Path, number: int, seed: int) -> list[dict[str, Any]]:
    """Return up to `number` prompts in random order, as lines for `outrider train`: category and messages.

    A Python file gives up to four prompts: continue the code, write a function from its docstring, rename a variable,
    and describe a function. A document, or the docstring of a file, gives two: continue the text, and summarize it.
    """
    source = random.Random(seed)
    files = sorted(path for path in folder.rglob("*") if path.suffix in _SUFFIXES and path.is_file())
    if not files:
        raise typer.BadParameter(
            f"{folder} holds no text; name a folder with files that end with {', '.join(_SUFFIXES)}"
        )
    source.shuffle(files)
    problems = round(number * _WORD_PROBLEMS)
    prompts = [("word_problem", make_problem(source, source.randint(1, 4))[0]) for _ in range(problems)]
    for file in files:
        if len(prompts) >= number:
            break
        prompts += _of_file(file, source)
    source.shuffle(prompts)
    return [
        {"category": category, "messages": [{"role": "user", "content": content}]}
        for category, content in prompts[:number]
    ]


def _of_file(file: Path, source: random.Random) -> list[tuple[str, str]]:
    """Return category and text of the prompts of a file: none if it is too large, not UTF-8 or not valid Python."""
    if file.stat().st_size > _LARGEST_FILE:
        return []
    try:
        text = file.read_text("utf-8").strip()
        tree = ast.parse(text) if file.suffix == ".py" else None
    except (SyntaxError, ValueError):
        return []
    if not text:
        return []
    return list(_of_document(text, source) if tree is None else _of_code(text, tree, source))


def _of_code(text: str, tree: ast.Module, source: random.Random) -> Iterator[tuple[str, str]]:
    """Yield prompts about a Python file and about one of its functions."""
    yield "code_completion", f"Continue this Python code.\n\n{_piece(text, source)}"
    heading = ast.get_docstring(tree)
    if heading and len(heading) > _SHORTEST_DOCUMENT:
        yield from _of_document(heading, source)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    if not functions:
        return
    function = source.choice(functions)
    quoted = f"```python\n{(ast.get_source_segment(text, function) or '')[:_LONGEST_TEXT]}\n```"
    yield "description", f"What does this function do?\n{quoted}"
    if names := [argument.arg for argument in function.args.args if argument.arg != "self"]:
        yield (
            "code_edit",
            f"Rename `{source.choice(names)}` to `{source.choice(_NEW_NAMES)}` in this function.\n{quoted}",
        )
    if documentation := ast.get_docstring(function):
        yield "function_writing", f"Write the Python function `{function.name}`.\n{documentation[:_LONGEST_TEXT]}"


def _of_document(text: str, source: random.Random) -> Iterator[tuple[str, str]]:
    """Yield prompts about a document."""
    yield "prose", f"Continue this text.\n\n{_piece(text, source)}"
    yield "summary", f"Summarize this text.\n\n{_piece(text, source)}"


def _piece(text: str, source: random.Random) -> str:
    """Return a part of a text that starts at a random line."""
    start = text.rfind("\n", 0, source.randint(1, len(text))) + 1
    return text[start : start + source.randint(100, _LONGEST_TEXT)].strip() or text[:_LONGEST_TEXT]
