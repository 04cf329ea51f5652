"""Write docs/reference/cli/ from the options of `outrider`. With --check, exit 1 if a page is out of date."""

import inspect
import re
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

import typer

from outrider.cli.app import app

PAGES = Path(__file__).parent / "reference" / "cli"
HEAD = """\
# Command line

Each command of `outrider` has a page with its options. [Common options](common.md) explains those of several commands.
`outrider COMMAND --help` prints all of them.

`outrider --version` prints the version, and `outrider --install-completion` sets up
[completion](../../getting-started/installation.md#shell-completion) in your shell. `--help` names the
[environment variable](../../how-to/deploy.md#environment-variables) of an option, if it has one. The command line and
`--config` take precedence. Every command has `-h` and `--help`. A mistake in an option or a file ends the
command with exit code 2 and one line on standard error that says what to change.

| Command | Purpose |
|---|---|
"""
COMMON = "common.md"
COMMON_HEAD = """\
# Common options

These options mean the same in each command whose page names them.

"""
SHARED_BY = 2  # commands that have an option with the same words, so that it stands on the common page
TYPES = {int: "integer", float: "number", str: "text", Any: "integer or name"}
DEFAULT = re.compile(r"^(?P<help>.*?)\s*Default: (?P<default>.*?)\.?$", re.DOTALL)


class Verb(NamedTuple):
    """A command, or a command of a group."""

    name: str
    command: Any
    callback: Any


class Row(NamedTuple):
    """One parameter of a command, in the words of the page."""

    panel: str
    flag: str
    type: str
    default: str
    help: str


def main() -> None:
    """Write the pages, or compare them."""
    pages = render()
    if "--check" in sys.argv[1:]:
        written = {file.name: file.read_text("utf-8") for file in PAGES.glob("*.md")}
        if written != pages:
            names = [name for name in sorted(written | pages) if written.get(name) != pages.get(name)]
            sys.exit(f"{', '.join(names)} in {PAGES} are out of date; run python docs/generate_cli.py")
        return
    PAGES.mkdir(exist_ok=True)
    for file in PAGES.glob("*.md"):
        file.unlink()
    for name, text in pages.items():
        (PAGES / name).write_text(text, "utf-8")


def render() -> dict[str, str]:
    """The text of each page, by file name.

    There is one page for each command and each group of commands, one for their common options, and an index.
    """
    groups = {group.name: list(_verbs(group.typer_instance, f"{group.name} ")) for group in app.registered_groups}
    single = list(_verbs(app))
    counts = Counter(chain.from_iterable(map(_rows, chain(single, *groups.values()))))
    often = [row for row, count in counts.most_common() if count >= SHARED_BY]
    common = set({row.flag: row for row in reversed(often)}.values())  # the most frequent meaning of each option
    purposes = []
    pages = {COMMON: COMMON_HEAD + "\n".join(_tables([row for row in counts if row in common]))}
    for verb in single:
        file = f"outrider-{verb.name}.md"
        purposes.append(f"| [`{verb.name}`]({file}) | {_purpose(verb.command)} |\n")
        pages[file] = f"# outrider {verb.name}\n\n" + _section(verb, common)
    for name, verbs in groups.items():
        file = f"outrider-{name}.md"
        sections = []
        for verb in verbs:
            anchor = verb.name.replace(" ", "-")
            purposes.append(f"| [`{verb.name}`]({file}#{anchor}) | {_purpose(verb.command)} |\n")
            sections.append(f"## {verb.name}\n\n" + _section(verb, common))
        pages[file] = f"# outrider {name}\n\n" + "\n".join(sections)
    return {"index.md": HEAD + "".join(purposes), **pages}


def _verbs(program: typer.Typer, prefix: str = "") -> Iterator[Verb]:
    """The commands of a program, without its groups."""
    commands: Any = typer.main.get_group(program).commands
    callbacks = {each.callback.__name__: each.callback for each in program.registered_commands if each.callback}
    for name, callback in callbacks.items():
        yield Verb(name=prefix + name, command=commands[name], callback=callback)


def _purpose(command: Any) -> str:
    return _cell(inspect.cleandoc(command.help).split("\n\n")[0])


def _rows(verb: Verb) -> list[Row]:
    hints = get_type_hints(verb.callback, include_extras=True)
    return [_row(parameter, hints[parameter.name]) for parameter in verb.command.params if parameter.name != "help"]


def _section(verb: Verb, common: set[Row]) -> str:
    """Usage, text and options of a command. Options in `common` are only named."""
    rows = _rows(verb)
    arguments = "".join(f" {row.flag}" for row in rows if row.panel == "Arguments")
    lines = ["```text", f"outrider {verb.name} [OPTIONS]{arguments}", "```", ""]
    lines += [_prose(inspect.cleandoc(verb.command.help)), ""]
    lines += _tables([row for row in rows if row not in common])
    if names := [f"`{row.flag.split()[0]}`" for row in rows if row in common]:
        lines += [f"[Common options]({COMMON}): {', '.join(names)}.", ""]
    return "\n".join(lines)


def _tables(rows: list[Row]) -> list[str]:
    """The lines of a table for each panel."""
    lines = []
    for panel in sorted(
        dict.fromkeys(row.panel for row in rows), key=lambda each: each not in ("Arguments", "Options")
    ):
        title = "Argument" if panel == "Arguments" else "Option"
        lines += [f"**{panel}**", "", f"| {title} | Type | Default | Meaning |", "|---|---|---|---|"]
        lines += [f"| `{row.flag}` | {row.type} | {row.default} | {row.help} |" for row in rows if row.panel == panel]
        lines += [""]
    return lines


def _row(parameter: Any, hint: Any) -> Row:
    argument = parameter.param_type_name == "argument"
    kind, info = get_args(hint)[:2]
    text, default = _default(parameter)
    return Row(
        panel="Arguments" if argument else parameter.rich_help_panel or "Options",
        flag=_argument(parameter) if argument else _flag(parameter),
        type=_type(info, kind),
        default=default,
        help=text,
    )


def _argument(parameter: Any) -> str:
    name = (parameter.metavar or parameter.name.upper()) + ("..." if parameter.nargs == -1 else "")
    return name if parameter.required else f"[{name}]"


def _flag(parameter: Any) -> str:
    names = " / ".join([*parameter.opts, *parameter.secondary_opts])
    return f"{names} {parameter.metavar}".replace("|", " or ") if parameter.metavar else names


def _type(info: Any, kind: Any) -> str:
    inner = next((each for each in get_args(kind) if each is not NoneType), kind)
    many = list in (get_origin(kind), get_origin(inner))
    name = "flag" if inner is bool else TYPES[get_args(inner)[0] if get_origin(inner) is list else inner]
    if info.min is not None:
        name += f", {info.min:g} to {info.max:g}" if info.max is not None else f", at least {info.min:g}"
    return name + (", repeatable" if many else "")


def _default(parameter: Any) -> tuple[str, str]:
    """The help text and the default, which the help text may tell."""
    text, value = (parameter.help or "").replace(" Repeatable.", ""), parameter.default
    told = DEFAULT.match(text)
    default = ""
    if parameter.required:
        default = "required"
    elif isinstance(value, bool):
        default = "on" if value else "off"
    elif value not in (None, ""):
        default = f"`{value}`"
    elif told:
        text, default = told["help"], _cell(told["default"])
    return _cell(text), default


def _cell(text: str) -> str:
    return _prose(text).replace("|", "\\|").replace("\n", " ")


def _prose(text: str) -> str:
    """Text as Markdown: only what stands between backticks is markup."""
    parts = text.replace("\\[", "[").split("`")
    plain = [part.replace("*", "\\*").replace("<", "&lt;") for part in parts[::2]]
    code = [f"`{part}`" for part in parts[1::2]]
    return "".join(word for pair in zip(plain, [*code, ""], strict=True) for word in pair)


if __name__ == "__main__":
    main()
