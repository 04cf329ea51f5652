"""Print every mistake of a user as one line."""

from importlib import import_module
from typing import Any, NoReturn

import typer
from rich.console import Console
from typer.core import TyperGroup

from outrider.core.packages import added, load_added
from outrider.core.validation import expected
from outrider.errors import OutriderError
from outrider.runtime.bar import shown_on_stderr

# The exceptions of click, or of the copy of click in newer releases of typer.
_exceptions: Any = import_module(typer.BadParameter.__module__)


class Commands(TyperGroup):
    """Commands that print a mistake as one line, without a traceback or a usage text, and exit with code 2."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands, with those of other packages."""
        return [*super().list_commands(ctx), *added("commands")]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, also a function of another package."""
        command = super().get_command(ctx, cmd_name)
        if command is None and (own := load_added("commands", cmd_name)):
            wrapper = typer.Typer(add_completion=False)
            wrapper.command(cmd_name)(own)
            command = typer.main.get_command(wrapper)
        return command

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Read the options of the group itself."""
        try:
            return super().make_context(info_name, args, parent, **extra)
        except _exceptions.UsageError as error:
            _report(error)

    def invoke(self, ctx: Any) -> Any:
        """Read the options of a command and run it."""
        try:
            with shown_on_stderr():
                return super().invoke(ctx)
        except OutriderError as error:
            print_mistake(str(error))
            raise typer.Exit(2) from None
        except _exceptions.UsageError as error:
            _report(error, command=f"{ctx.command_path} {ctx.invoked_subcommand}")


def print_mistake(mistake: str) -> None:
    """Print one line on standard error, with paths and names as they are: without wrapping and markup."""
    Console(stderr=True).print("[red]error:[/red]", end=" ")
    typer.echo(mistake, err=True)


def _report(error: Any, command: str | None = None) -> NoReturn:
    """Print a mistake that click has found, and end the program.

    Args:
        error: the exception.
        command: the command with the mistake, for an error that does not know it.
    """
    if type(error).__name__ == "NoArgsIsHelpError":  # typer prints the help; old releases of click lack this class
        raise error
    print_mistake(_value_mistake(error) or _with_help(error, error.ctx.command_path if error.ctx else command))
    raise typer.Exit(error.exit_code) from None


def _value_mistake(error: Any) -> str | None:
    """Return what is wrong with the value of an option, if pydantic's error tells it."""
    if error.__cause__ is None or not hasattr(error.__cause__, "errors"):
        return None
    details = error.__cause__.errors()[0]
    fix = expected(details)
    if fix is None:
        return None
    value = repr(details["input"]) if details["type"].endswith("parsing") else str(details["input"]).strip()
    return f"{_name(error)} is {value}; use {fix}"


def _name(error: Any) -> str:
    """Return the option with a wrong value, or the environment variable that has set it."""
    source = error.ctx and error.ctx.get_parameter_source(error.param.name)
    if source and source.name == "ENVIRONMENT":
        return str(error.param.envvar)
    return str(max(error.param.opts, key=len))


def _with_help(error: Any, command: str | None) -> str:
    """Return click's message in one line, and the command that explains the options."""
    message = " ".join(error.format_message().split()).removesuffix(".")
    if command is None:
        return message
    if "unexpected extra argument" in message and error.ctx:
        params = error.ctx.command.params
        takes_text = any(param.param_type_name == "argument" for param in params)
        takes_model = any("--target" in param.opts for param in params)
        fixes = ["put a text with spaces in quotes"] * takes_text + ["name a model with --target"] * takes_model
        message += "".join(f"; {fix}" for fix in fixes)
    return f"{message}{' See' if message.endswith('?') else '; see'} {command} --help"
