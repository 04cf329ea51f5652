"""Print completions as text for a person, and as a JSON document for a program."""

import json
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.style import Style
from rich.table import Table
from rich.text import Text

from outrider.core.stats import Stats
from outrider.core.text import TextStream
from outrider.core.token_text import SingleTokens
from outrider.core.types import Completion, FinishReason, TokenLogprobs
from outrider.drafting.plan.store import proposer_name
from outrider.engine.build import EngineParts
from outrider.lab.common.clock import DecodeSpeed
from outrider.llm import LLM
from outrider.runtime import machine
from outrider.runtime.report.console import count_text
from outrider.serve.speech.formats import to_verbose_document
from outrider.serve.speech.transcript import Transcript

_POSITIONS = 8  # whose acceptance is printed; the JSON document has all
_DRAFT, _TARGET = Style(color="cyan"), Style(color="yellow", bold=True)
_LEGEND = Text.assemble(("accepted draft token", _DRAFT), "  ", ("token of the target", _TARGET), "\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The completions of one prompt, with their times."""

    completions: tuple[Completion, ...]
    sampled: bool
    seconds: float  # from the start to the last token
    first: float | None  # seconds to the first token; None: not measured
    speed: DecodeSpeed
    stats: Stats
    transcript: Transcript | None = None  # its windows are the completions


class Painter:
    """Writes text as it is generated. Accepted draft tokens and tokens of the target have different colors."""

    def __init__(self, llm: LLM, console: Console, *, use_color: bool) -> None:
        self._llm = llm
        self._console = console
        self._use_color = use_color
        # By token: the number of its characters, and whether it is a draft token.
        self._pieces: deque[tuple[int, bool]] = deque()
        self._stream = TextStream(llm.decode)
        self._last_char = ""

    def begin(self, prompt: Sequence[int]) -> None:
        """Begin a completion after the tokens of a prompt."""
        self._stream = TextStream(self._llm.decode, prompt=prompt)

    def write(self, text: str, tokens: Sequence[int], from_draft: Sequence[bool]) -> None:
        """Write the next characters of the completion. `tokens` were committed with them."""
        # Write to the file: a console would wrap lines, expand tabs and drop control characters.
        self._last_char = text[-1:] or self._last_char
        self._console.file.write(self._colored(text, tokens, from_draft) if self._use_color else text)
        self._console.file.flush()

    def end(self) -> None:
        """Finish the line and prepare for another completion."""
        if self._last_char != "\n":
            self._console.file.write("\n")
        self._pieces.clear()
        self._last_char = ""

    def _colored(self, text: str, tokens: Sequence[int], from_draft: Sequence[bool]) -> str:
        for token, is_draft in zip(tokens, from_draft, strict=True):
            before = len(self._stream.text)
            self._stream.add_token(token)
            self._pieces.append((len(self._stream.text) - before, is_draft))
        parts = []
        begin = 0
        is_draft = False
        while begin < len(text):
            length, is_draft = self._pieces.popleft() if self._pieces else (len(text) - begin, is_draft)
            piece = text[begin : begin + length]
            parts.append((_DRAFT if is_draft else _TARGET).render(piece))
            begin += len(piece)
            if length > len(piece):  # the rest is held back, because a stop string may remove it
                self._pieces.appendleft((length - len(piece), is_draft))
        return "".join(parts)


class Output:
    """Prints text to standard output and everything else to standard error. With --json, text goes there as well.

    Attributes:
        painter: writes the text of completions.
    """

    def __init__(self, llm: LLM, *, show: bool, as_json: bool) -> None:
        self._llm = llm
        self._show = show
        self._as_json = as_json
        self._stderr = Console(stderr=True, highlight=False)
        console = self._stderr if as_json else Console()
        use_color = show and console.is_terminal and not console.no_color
        self.painter = Painter(llm, console, use_color=use_color)
        if use_color:
            self._stderr.print(_LEGEND)

    def note(self, text: str) -> None:
        """Print a line for the user, beside the completions."""
        self._stderr.print(text, style="dim", soft_wrap=True)

    def head(self, text: str) -> None:
        """Print a heading above one of several completions."""
        self._stderr.rule(text, align="left", style="dim")

    def sum_up(self, outcome: Outcome) -> bool:
        """Print the summary. Returns whether all completions succeeded."""
        for completion in outcome.completions:
            if completion.logprobs:
                self._stderr.print(_logprobs(completion, self._llm))
        self._stderr.print()
        lines = _summary(outcome)
        if self._show:
            parts = self._llm.parts
            build = _kernel_build(parts)
            lines[-1] += f"; {_precision(parts)}, {parts.target.kernels} kernels{f' ({build})' if build else ''}"
            lines[-1] += "" if parts.loaded.check else "; logits not checked"
            lines.append(f"proposer {proposer_name(parts.proposer_spec)}, verifier {parts.verifier.name}")
        for line in (*lines, *map(str, self._llm.parts.draft_placements)):
            self._stderr.print(line, style="dim", soft_wrap=True)
        failed = [each for each in outcome.completions if each.finish_reason is FinishReason.ERROR]
        for completion in failed:
            message = escape(completion.error)
            self._stderr.print(f"[red]error:[/red] {message}", soft_wrap=True)
        if self._as_json:
            print(json.dumps(_document(outcome, self._llm)), flush=True)
        return not failed


def _kernel_build(parts: EngineParts) -> str | None:
    """Return the build of the native kernels; None: the target runs on others."""
    from outrider.models.native.target import NativeTarget

    return parts.target.kernel_build if isinstance(parts.target, NativeTarget) else None


def _precision(parts: EngineParts) -> str:
    """Return the precision of the target, and for weights in one dtype the reason for it."""
    dtype = str(parts.dtype).removeprefix("torch.")
    text = str(parts.precision)
    return f"{dtype} {parts.loaded.checkpoint.dtype_reason}" if text == dtype else text


def _summary(outcome: Outcome) -> list[str]:
    """Return the lines of the summary, four at most."""
    stats = outcome.stats
    tokens = sum(len(completion.token_ids) for completion in outcome.completions)
    speed = f"{outcome.speed.rate:.0f} tokens/s" if outcome.speed.rate else "too short to time"
    first = "" if outcome.first is None else f"the first after {1e3 * outcome.first:.0f} ms, then "
    rates = " ".join(f"{rate:.0%}" for rate in stats.acceptance[:_POSITIONS])
    lines = [
        f"{count_text(tokens, 'token')} in {outcome.seconds:.2f} s: {first}{speed}",
        f"tau {stats.tau:.2f} tokens per pass" + (f"; accepted by position {rates}" if rates else ""),
    ]
    if stats.seconds:
        document = stats.as_dict()
        times = (f"{name} {document[f'{name}_ms']:.2f} ms" for name in ("draft", "target", "host"))
        lines.append(f"a round: {', '.join(times)}")
    reasons = [str(completion.finish_reason) for completion in outcome.completions]
    if outcome.transcript:
        last = [_languages(outcome.transcript), f"{count_text(len(reasons), 'window')}, finish {' '.join({*reasons})}"]
    else:
        last = [f"finish {' '.join(reasons)}"]
    if outcome.sampled:
        last.append(f"seed {outcome.completions[0].seed}")
    last.append(_exactness(stats))
    return [*lines, "; ".join(last)]


def _languages(transcript: Transcript) -> str:
    """Return the language of the audio, and whether the model has detected it."""
    return f"language {transcript.language or 'unknown'}" + (" (detected)" if transcript.language_detected else "")


def _exactness(stats: Stats) -> str:
    if stats.exact:
        return "exact"
    return f"not exact: {stats.bound or 'this verifier changes the text'}"


def _logprobs(completion: Completion, llm: LLM) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("token", "log p", "as sampled", "likeliest"):
        table.add_column(name, justify="left" if name in ("token", "likeliest") else "right")
    tokens = SingleTokens(llm.parts.tokenizer)
    for entry in completion.logprobs:
        top = "  ".join(f"{_quoted(tokens, token)} {value:.2f}" for token, value in entry.top)
        numbers = (f"{entry.logprob:.3f}", f"{entry.sampled_logprob:.3f}")
        table.add_row(Text(_quoted(tokens, entry.token)), *numbers, Text(top))
    return table


def _quoted(tokens: SingleTokens, token: int) -> str:
    """Return the text of a token in quotes, or its bytes if they are no whole characters."""
    try:
        return repr(tokens.piece(token).decode() or tokens.text(token))
    except UnicodeDecodeError:
        return repr(tokens.piece(token))


def _document(outcome: Outcome, llm: LLM) -> dict[str, Any]:
    first = outcome.completions[0]
    transcript = outcome.transcript
    return {
        **_completion(first),
        **({"text": transcript.text, "transcript": _transcript(transcript)} if transcript else {}),
        "completions": list(map(_completion, outcome.completions)),
        "prompt_token_ids": list(first.prompt_token_ids),
        "seed": first.seed if outcome.sampled else None,  # of the request; each completion has its own
        "exact": outcome.stats.exact,
        "bound": outcome.stats.bound and outcome.stats.bound.as_dict(),
        "stats": outcome.stats.as_dict(),
        "seconds": outcome.seconds,
        "time_to_first_token_seconds": outcome.first,
        "tokens_per_s": outcome.speed.rate,
        **llm.parts.precision.as_dict(),
        "kernels": llm.parts.target.kernels,
        "kernel_build": _kernel_build(llm.parts),
        "load_check": llm.parts.loaded.check and asdict(llm.parts.loaded.check),
        "draft_placements": [placement.as_dict() for placement in llm.parts.draft_placements],
        "versions": machine.versions(),
    }


def _transcript(transcript: Transcript) -> dict[str, Any]:
    document = to_verbose_document(transcript)
    return {**document, "language_detected": transcript.language_detected}


def logprob_entry(entry: TokenLogprobs) -> dict[str, Any]:
    """Return JSON values. null: the target's distribution excludes the token, which only a lossy verifier emits."""
    sampled = entry.sampled_logprob if math.isfinite(entry.sampled_logprob) else None
    return {**asdict(entry), "sampled_logprob": sampled}


def _completion(completion: Completion) -> dict[str, Any]:
    document = {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "from_draft": list(completion.from_draft),
        "finish_reason": str(completion.finish_reason),
        "seed": completion.seed,
    }
    if completion.logprobs:
        document["logprobs"] = list(map(logprob_entry, completion.logprobs))
    if completion.error:
        document["error"] = completion.error
    return document
