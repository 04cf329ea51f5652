"""Options of `outrider run`, and of several commands."""

from dataclasses import dataclass
from typing import Annotated

from outrider.core.option import OUTPUT, Option
from outrider.core.text import is_utf8
from outrider.errors import OutriderError
from outrider.models.loader.paths import is_local_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Printing:
    """How results are printed."""

    json: Annotated[bool, Option(panel=OUTPUT)] = False
    """Print one JSON document as the last line of output, on a terminal as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPrinting(Printing):
    """How text is printed."""

    show: Annotated[bool, Option(panel=OUTPUT)] = False
    """Color accepted draft tokens and tokens of the target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """The prompts: texts, or messages of a conversation, and what stands before them."""

    prompt: Annotated[str | None, Option("PROMPT", argument=True)] = None
    """What to complete. Without it: standard input, or a prompt on a terminal."""
    chat: bool = False
    """Apply the model's chat template. On a terminal, keep the conversation."""
    system: Annotated[str | None, Option("TEXT")] = None
    """With --chat: a system message before the conversation."""

    def __post_init__(self) -> None:
        if self.system is not None and not self.chat:
            raise OutriderError("--system is a message of a conversation; add --chat, or leave it out")
        if self.system is not None and not is_utf8(self.system):
            raise OutriderError("--system is not UTF-8 text; give UTF-8 text")

    def check_text(self) -> None:
        """Raise OutriderError if the prompt is the path of a model: a user may expect it there."""
        if self.prompt and is_local_model(self.prompt):
            raise OutriderError(f"the prompt is the path of a model; name the model with --target {self.prompt}")

    def messages(self) -> list[dict[str, str]]:
        """Return the messages before the first prompt."""
        return [] if self.system is None else [{"role": "system", "content": self.system}]
