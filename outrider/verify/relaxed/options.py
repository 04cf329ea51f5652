"""The spelling of a relaxed rule: NAME:OPTION=VALUE,OPTION=VALUE."""

from collections.abc import Collection
from pathlib import Path

from outrider.errors import OutriderError, either


class RuleOptions:
    """The options of a rule. A reader asks for each by name."""

    def __init__(self, expression: str, *, known: Collection[str], example: str) -> None:
        """Parse an expression.

        Args:
            expression: what the user wrote.
            known: the names of the rule's options.
            example: an expression that is valid.

        Raises:
            OutriderError: the text is not a list of known options, each given once.
        """
        self._expression = expression
        self._example = example
        self._values: dict[str, str] = {}
        _, colon, text = expression.partition(":")
        for part in text.split(",") if colon else ():
            name, equals, value = part.partition("=")
            if not equals or not value or name in self._values:
                raise self.error(f"has the option {part!r}; write OPTION=VALUE, and each option once")
            if name not in known:
                raise self.error(f"has the unknown option {name}; use {either(known)}")
            self._values[name] = value

    def error(self, message: str) -> OutriderError:
        """Return the error of a wrong option, with an example."""
        return OutriderError(f"verifier {self._expression} {message}, as in {self._example}")

    def has(self, name: str) -> bool:
        """Return whether an option is given."""
        return name in self._values

    def fraction(self, name: str) -> float:
        """Return a number between 0 and 1, neither included."""
        try:
            value = float(self._values[name])
        except (KeyError, ValueError):
            value = 0.0
        if not 0 < value < 1:
            raise self.error(f"needs a number {name} above 0 and below 1")
        return value

    def count(self, name: str, *, least: int, default: int | None = None) -> int:
        """Return a whole number of at least `least`. If `default` is None, the option must be given."""
        text = self._values.get(name, str(default))
        if not text.isdecimal() or int(text) < least:
            raise self.error(f"needs a whole number {name} of at least {least}")
        return int(text)

    def optional_count(self, name: str, *, least: int) -> int | None:
        """Return a whole number, or None if the option is not given."""
        return self.count(name, least=least) if self.has(name) else None

    def path(self, name: str) -> Path | None:
        """Return the path of a file, or None if the option is not given."""
        return Path(self._values[name]).expanduser() if self.has(name) else None
