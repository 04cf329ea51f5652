"""Read prompts from JSON Lines files, and tokenize them."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.core.conversation import ChatTemplate
from outrider.core.json_lines import Line, read_lines
from outrider.errors import OutriderError

EMBEDDED = Path(__file__).parent / "prompts.jsonl"
_FORM = '{"category": "...", "prompt": "..."} or "messages" in place of "prompt"'
SOURCE_FORM = '{"source": "..."}'
_MESSAGES_FORM = '[{"role": "user", "content": "..."}]'
_DEFAULT_CATEGORY = "prompts"
_MAX_SHOWN_FIELDS = 8  # in an error message


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt: plain text, or a conversation for the model's chat template."""

    id: str
    category: str
    prompt: str | None
    messages: tuple[dict[str, str], ...] | None
    source: str | None = None  # what the encoder of an encoder-decoder target reads
    later: tuple[str, ...] = ()  # further messages of the user, each after the answer to the one before it


def read_prompts(
    file: str | Path | None = None, *, limit: int | None = None, with_sources: bool = False
) -> list[Prompt]:
    """Return the prompts of a JSON Lines file, by default of the embedded one: the first `limit` of each category.

    A line has either `prompt` or `messages`. `category` and `id` are optional, and other fields are
    ignored. Lines of public benchmarks are read as they are: `turns` of MT-Bench, Spec-Bench and
    SPEED-Bench, which are messages of the user, and `question` of GSM8K. With `with_sources`, for
    an encoder-decoder target, a line has `source` and maybe `prompt`.

    Raises:
        OutriderError: the file cannot be read, or a line is invalid; the message has the line
            number. Or `with_sources` is set without a file.
    """
    if limit is not None and limit < 1:
        raise OutriderError(f"limit is {limit}; use at least 1")
    if with_sources and file is None:
        raise OutriderError(
            "the embedded prompts have no sources, which this encoder-decoder target reads; give"
            f" --prompts FILE with lines like {SOURCE_FORM}"
        )
    parse, form = (parse_sourced_prompt, SOURCE_FORM) if with_sources else (parse_prompt, _FORM)
    prompts = list(map(parse, read_lines(file or EMBEDDED, form=form)))
    return [prompt for group in by_category(prompts).values() for prompt in group[:limit]]


def parse_prompt(line: Line) -> Prompt:
    """Return the prompt of a line.

    Raises:
        OutriderError: the line has both of `prompt` and `messages` or none, or a field is invalid.
    """
    where = line.where
    category = _category(line)
    prompt = line.fields.get("prompt")
    messages = line.fields.get("messages")
    later: tuple[str, ...] = ()
    if prompt is None and messages is None and (turns := _benchmark_turns(line)):
        messages = [{"role": "user", "content": turns[0]}]
        later = turns[1:]
    if prompt is not None and messages is not None:
        raise OutriderError(f"{where}: the line has both prompt and messages; remove one of the two")
    if prompt is None and messages is None:
        raise OutriderError(f"{where}: no prompt and no messages{_other_fields(line)}; use {_FORM}")
    if prompt is not None and (not isinstance(prompt, str) or not prompt):
        raise OutriderError(
            f"{where}: prompt must be a string of at least one character; change it, or remove the line"
        )
    return Prompt(
        id=_id(line),
        category=category,
        prompt=prompt,
        messages=None if messages is None else parse_messages(messages, where),
        later=later,
    )


def _other_fields(line: Line) -> str:
    """Return the fields that a line without a prompt has, for an error message."""
    names = list(line.fields)
    if not names:
        return ""
    more = ", ..." if len(names) > _MAX_SHOWN_FIELDS else ""
    return f", but {', '.join(names[:_MAX_SHOWN_FIELDS])}{more}"


def _category(line: Line) -> str:
    category = line.fields.get("category", _DEFAULT_CATEGORY)
    if not isinstance(category, str) or not category:
        raise OutriderError(
            f"{line.where}: category must be a string of at least one character; change it, or leave it out"
        )
    return category


def _id(line: Line) -> str:
    """Return the name of a line. Benchmarks call it `question_id` or `task_id`."""
    names = ("id", "question_id", "task_id")
    return str(next((line.fields[name] for name in names if name in line.fields), f"line-{line.number}"))


def _benchmark_turns(line: Line) -> tuple[str, ...]:
    """Return the messages of the user in a benchmark's line. (): it has no question."""
    turns = line.fields.get("turns", [line.fields.get("question")])
    if turns == [None]:
        return ()
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise OutriderError(
            f'{line.where}: the question must be a string; write "question": "..." or "turns": ["...", "..."]'
        )
    return tuple(turns)


def parse_sourced_prompt(line: Line) -> Prompt:
    """Return the prompt of a line for an encoder-decoder target: a source, and maybe the beginning of the output.

    Raises:
        OutriderError: the line has no source, or messages, or a field is invalid.
    """
    where = line.where
    category = _category(line)
    source = line.fields.get("source")
    prompt = line.fields.get("prompt")
    if not isinstance(source, str) or not source:
        raise OutriderError(
            f"{where}: no source, which this encoder-decoder target reads; give lines like {SOURCE_FORM}"
        )
    if "messages" in line.fields:
        raise OutriderError(f"{where}: messages are for decoder-only targets; give lines like {SOURCE_FORM}")
    if prompt is not None and (not isinstance(prompt, str) or not prompt):
        raise OutriderError(f"{where}: prompt must be a string of at least one character; change it, or leave it out")
    return Prompt(id=_id(line), category=category, prompt=prompt, messages=None, source=source)


def parse_messages(messages: Any, where: str) -> tuple[dict[str, str], ...]:
    """Return a conversation for a chat template. A content is a string, or a list of text parts, which are joined.

    Raises:
        OutriderError: `messages` is not a list of messages with a role and a content.
    """
    if not isinstance(messages, list) or not messages:
        raise OutriderError(f"{where}: messages must be a list of messages; use for example {_MESSAGES_FORM}")
    return tuple(_parse_message(message, f"{where}: message {i}") for i, message in enumerate(messages, 1))


def _parse_message(message: Any, where: str) -> dict[str, str]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise OutriderError(f"{where} has no role; use for example {_MESSAGES_FORM}")
    content = message.get("content")
    parts = [content] if isinstance(content, str) else content
    if not isinstance(parts, list) or not parts:
        raise OutriderError(f"{where} has no content; write a string, or remove the message")
    return {"role": message["role"], "content": "".join(_part_text(part, where) for part in parts)}


def _part_text(part: Any, where: str) -> str:
    """Return the text of a part of a content: a string, or an object of OpenAI's type `text`."""
    if isinstance(part, str):
        return part
    fields = part if isinstance(part, dict) else {}
    kind = fields.get("type")
    text = fields.get("text")
    if kind == "text" and isinstance(text, str):
        return text
    what = f"type {kind}" if isinstance(kind, str) and kind != "text" else "no text"
    raise OutriderError(
        f'{where} has a content part with {what}; write text parts, such as {{"type": "text", "text": "..."}}'
    )


def chat_text(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None = None,
    continue_final_message: bool = False,
    options: Mapping[str, Any] | None = None,
) -> str:
    """Return a conversation as text, by the model's chat template.

    Args:
        tokenizer: the tokenizer with the chat template.
        messages: the conversation.
        add_generation_prompt: whether to add the generation prompt, after which the assistant answers.
        tools: descriptions of tools for the template.
        continue_final_message: whether the text ends within the last message, without a generation prompt.
        options: further variables of the template.

    Raises:
        OutriderError: the template refuses or drops a message. Some templates reject a system message, for example.
    """
    template = ChatTemplate(
        tokenizer=tokenizer,
        options={**(options or {}), **({"tools": list(tools)} if tools else {})},
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
    )
    return template.text(messages)


def chat_tokens(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **others: Any
) -> tuple[int, ...]:
    """Return the tokens of `chat_text` with these arguments. The template has added all special tokens already."""
    text = chat_text(tokenizer, messages, add_generation_prompt=add_generation_prompt, **others)
    return text_tokens(tokenizer, text, special=False)


def text_tokens(tokenizer: Any, text: str, *, special: bool = True) -> tuple[int, ...]:
    """Return the tokens of a text.

    Args:
        special: whether the tokenizer adds its special tokens, such as a begin-of-text token. A text that begins with
            this token, as the output of a chat template may, gets no second one.

    Raises:
        OutriderError: the text has half of a surrogate pair, which is not valid Unicode.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise OutriderError(
            f"the text holds half of a surrogate pair, {text[error.start]!a} at character {error.start}; leave it out"
        ) from None
    # verbose=False: the tokenizer would warn about a long text and predict errors that do not occur here.
    tokens = tuple(tokenizer.encode(text, add_special_tokens=special, verbose=False))
    begin = tokenizer.bos_token_id
    if not special or begin is None or tokens[:2] != (begin, begin):
        return tokens
    written = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    return tokens[1:] if len(written) < len(tokens) else tokens


def by_category(prompts: Sequence[Prompt]) -> dict[str, list[Prompt]]:
    """Return the prompts of each category. Both are in the order of appearance."""
    groups: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        groups[prompt.category].append(prompt)
    return dict(groups)
