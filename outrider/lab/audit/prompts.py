"""The prompts of the audit."""

from collections.abc import Mapping, Sequence
from typing import Any

from outrider.core.json_lines import read_lines
from outrider.core.prompts import chat_tokens, parse_prompt, text_tokens
from outrider.errors import OutriderError

Prompt = str | Sequence[Mapping[str, str]]
_FORM = '{"prompt": "..."} or {"messages": [...]}'

# Prompts of prose, code, numbers and questions. They are short, because the test of the distribution takes thousands of
# passes. Most end with words that occurred before, so that lookup proposers find a match.
DEFAULT: tuple[Prompt, ...] = (
    "In the beginning there was",
    "The sea was calm. The old man said that the sea was",
    "def area(a, b):\n    return a * b\n\n\ndef sum(a, b):\n    return",
    "one two three one two three one",
    "Question: What is the largest planet?\nAnswer: The largest",
    "The committee met in March, and the committee",
)


def read_prompts(path: str | None) -> tuple[Prompt, ...]:
    """Return the prompts of a file of JSON lines with `prompt` or `messages`. None: the default prompts.

    Raises:
        OutriderError: the file cannot be read, or a line has not exactly one of the two fields.
    """
    if path is None:
        return DEFAULT
    parsed = list(map(parse_prompt, read_lines(path, form=_FORM)))
    return tuple(prompt.prompt or prompt.messages or () for prompt in parsed)  # one of the two is set


def encode(tokenizer: Any, prompt: Prompt) -> tuple[int, ...]:
    """Return the tokens of a prompt. Messages use the chat template. Raises OutriderError if there are none."""
    if isinstance(prompt, str):
        tokens = text_tokens(tokenizer, prompt)
    elif getattr(tokenizer, "chat_template", None) is None:
        raise OutriderError("this model has no chat template; give plain text in the field prompt")
    else:
        tokens = chat_tokens(tokenizer, prompt)
    if not tokens:
        raise OutriderError("a prompt is empty; give at least one token")
    return tokens
