"""The structured-output options of the command line."""

from dataclasses import dataclass
from typing import Annotated

from outrider.core.constraint import Constraint
from outrider.core.option import Option
from outrider.core.text import is_utf8, read_text
from outrider.errors import OutriderError

_PANEL = "Constraint"
_FIX = "give the path of a text file"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstraintOptions:
    """The options of a constraint. At most one may be given."""

    json_schema: Annotated[str | None, Option("FILE", _PANEL)] = None
    """Generate JSON that matches the schema in this file."""
    regex: Annotated[str | None, Option("PATTERN", _PANEL)] = None
    """Generate text that matches the whole pattern."""
    grammar: Annotated[str | None, Option("FILE", _PANEL)] = None
    """Generate text of the grammar in this file: Lark or GBNF."""

    def constraint(self) -> Constraint | None:
        """Return the constraint, or None if no option is given.

        Raises:
            OutriderError: a file cannot be read, a constraint is invalid, or several options are given.
        """
        given = [value for value in (self.json_schema, self.regex, self.grammar) if value is not None]
        if len(given) > 1:
            raise OutriderError("--json-schema, --regex and --grammar cannot be combined; give one of them")
        if self.regex is not None and not is_utf8(self.regex):
            raise OutriderError(f"--regex {self.regex!r} is not UTF-8 text; give UTF-8 text")
        if self.json_schema is not None:
            return Constraint.json_schema(read_text(self.json_schema, f"--json-schema {self.json_schema}", fix=_FIX))
        if self.grammar is not None:
            return Constraint.grammar(read_text(self.grammar, f"--grammar {self.grammar}", fix=_FIX))
        return None if self.regex is None else Constraint.regex(self.regex)
