"""Rewrite proposer expressions for people, for the command line and for files."""

from collections.abc import Callable, Iterator
from pathlib import Path

from outrider.drafting.propose.registry import COMBINATIONS, NAMED, Argument, Expression, Maker, parse
from outrider.models.loader.embedded import absolute_name, embedded, model_folder
from outrider.models.loader.hub.names import hub_name
from outrider.models.loader.paths import is_gguf


def short(proposer: str) -> str:
    """Return the expression with only the last part of each folder, for display."""
    return _render(parse(proposer), _short_argument)


def command_line_form(proposer: str) -> str:
    """Return the expression as a user would write it, with @NAME for a model that comes with Outrider."""
    return _render(parse(proposer), _use_embedded_name)


def absolute(proposer: str) -> str:
    """Return the expression with absolute folders, which does not depend on the current folder. Names stay."""
    return _render(parse(proposer), _make_absolute)


def model_of(argument: str) -> tuple[str, str] | None:
    """Return the folder or the name on the Hub in an argument, and the rest of it. None if there is neither.

    The argument of `retrieval` may end in a colon and a number after the folder.
    """
    head, colon, tail = argument.rpartition(":")
    for text, rest in ((argument, ""), (head, colon + tail)):
        if text and ((path := Path(text).expanduser()).is_dir() or (is_gguf(path) and path.is_file())):
            return text, rest
    return (argument, "") if hub_name(argument) else None


def model_names(proposer: str) -> Iterator[str]:
    """Yield the folders and the names on the Hub in an expression: draft models and datastores."""
    for leaf in parse(proposer).leaves():
        model = model_of(leaf.argument)
        # The folder of a datastore is never on the Hub, even if its path looks like a name there.
        takes_text = leaf.name in NAMED and NAMED[leaf.name].argument is Argument.TEXT
        if model and not (takes_text and hub_name(model[0])):
            yield model[0]


def fetch_models(target: str | Path | None, *proposers: str | Maker | None) -> None:
    """Fetch what is on the Hub and not in its cache. Commands do so before they load a part of it.

    Raises:
        OutriderError: a model cannot be downloaded, or an expression is not valid.
    """
    model_folder(target)
    for proposer in proposers:
        for name in model_names(proposer) if isinstance(proposer, str) else ():
            model_folder(name)


def _short_argument(argument: str) -> str:
    argument = _use_embedded_name(argument)
    return Path(argument).name if "/" in argument else argument


def _use_embedded_name(argument: str) -> str:
    path = Path(argument)
    return f"@{path.name}" if path.parent == embedded("mini").parent else argument


def _make_absolute(argument: str) -> str:
    model = model_of(argument)
    return f"{absolute_name(model[0])}{model[1]}" if model else argument


def _render(expression: Expression, change: Callable[[str], str]) -> str:
    """Return the text of an expression after applying `change` to each argument."""
    if expression.name in COMBINATIONS and expression.parts:
        return f"{expression.name}({','.join(_render(part, change) for part in expression.parts)})"
    if not expression.argument:
        return expression.name
    argument = change(expression.argument)
    quote = '"' if any(letter in argument for letter in ",()") else ""
    return f"{expression.name}:{quote}{argument}{quote}"
