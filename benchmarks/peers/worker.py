"""What the processes of all peers share: arguments, prompts as tokens, and the protocol on their pipes.

A worker loads its engine once and says so in one line. From then on it answers each line it reads with one line, and in
between it is blocked on reading:

    <- {"ready": true, "load_seconds": s, "versions": {...}, "settings": {...}}
    -> {"prompt": text, "max_tokens": n}
    <- {"tokens": n, "opening": m, "seconds_decode": s, "ttft": s, "text": text, "prompt_ids": [...]}

or with {"error": reason in one line}. It runs under the Python of its engine, so it imports nothing of Outrider's that
needs a package.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import python_version
from time import perf_counter
from typing import Any, Protocol, TextIO

NGRAM_SIZE = 3  # tokens that prompt lookup matches at most

_CONTEXT = 4096  # tokens of prompt and completion that an engine makes room for, where the model allows as many
_REPOSITORY = Path(__file__).resolve().parents[2]


class PeerError(ValueError):
    """This engine cannot be measured as asked; the message is the reason, in one line."""


class Mode(StrEnum):
    """Where guesses come from."""

    PLAIN = "plain"
    DRAFT = "draft"
    NGRAM = "ngram"


class Precision(StrEnum):
    """Of weights; activations and caches stay in bf16 or f16 unless an engine has no other way."""

    BF16 = "bf16"
    INT8 = "int8"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What a worker is asked to load."""

    target: Path
    draft: Path | None
    mode: Mode
    k: int
    dtype: Precision
    converted: Path | None
    prompts: Path | None
    limit: int | None
    max_tokens: int
    threads: int

    def draft_folder(self) -> Path:
        if self.draft is None:
            raise PeerError("mode draft needs --draft DIR")
        return self.draft

    def converted_model(self, folder: Path, suffix: str = "") -> Path:
        """Where the converted form of a model lies: its folder's name and the precision, as in base-bf16."""
        if self.converted is None:
            raise PeerError("this engine reads models of its own format; give --converted DIR (see README.md)")
        path = self.converted / f"{folder.name}-{self.dtype}{suffix}"
        if not path.exists():
            raise PeerError(f"{path} is missing; convert the model first (see README.md)")
        return path

    def refuse_converted(self) -> None:
        if self.converted is not None:
            raise PeerError("this engine reads the target as it is; leave --converted out")

    def context(self) -> int:
        config = json.loads((self.target / "config.json").read_text("utf-8"))
        return min(_CONTEXT, int(config.get("max_position_embeddings", _CONTEXT)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One completion and its clock."""

    prompt: Sequence[int]  # as the engine read it
    tokens: Sequence[int]  # completed
    opening: int  # tokens that came with the first of them; 1, unless the first pass already verified guesses
    seconds: float  # from the first token to the last
    ttft: float  # seconds from asking to the first token

    @classmethod
    def of_marks(cls, prompt: Sequence[int], marks: Sequence[tuple[float, Sequence[int]]], asked: float) -> Run:
        """From when tokens came, and which."""
        if not marks:
            raise PeerError("the engine completed nothing")
        (first, opening), (last, _) = marks[0], marks[-1]
        tokens = [token for _, some in marks for token in some]
        return cls(prompt=prompt, tokens=tokens, opening=len(opening), seconds=last - first, ttft=first - asked)


class Engine(Protocol):
    """A loaded engine: greedy, one prompt at a time."""

    packages: Sequence[str]  # whose versions matter
    settings: Mapping[str, Any]  # chosen for this engine, for the report

    def complete(self, prompt: Sequence[int], max_tokens: int) -> Run:
        """Complete token ids, up to the end of text or `max_tokens`."""


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments that one worker and the comparison of all have in common."""
    parser.add_argument(
        "--target", type=Path, required=True, metavar="DIR", help="the model, as Hugging Face stores it"
    )
    parser.add_argument("--draft", type=Path, metavar="DIR", help="its draft model")
    parser.add_argument("--k", type=int, default=4, help="guesses a round (default: 4)")
    parser.add_argument("--dtype", type=Precision, default=Precision.BF16, help="weights: bf16 or int8 (default: bf16)")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="JSON lines, as `outrider bench` reads them")
    parser.add_argument("--limit", type=int, help="prompts of each category (default: all)")
    parser.add_argument("--max-tokens", type=int, default=128, help="completed at most (default: 128)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")


def main(load: Callable[[Arguments], Engine]) -> None:
    """Load an engine and serve it: for the lines on stdin, or, with --prompts, for those of a file."""
    parser = argparse.ArgumentParser()
    add_common_arguments(parser)
    parser.add_argument("--mode", type=Mode, default=Mode.PLAIN, help="plain, draft or ngram (default: plain)")
    parser.add_argument("--converted", type=Path, metavar="DIR", help="models in the engine's own format")
    given = parser.parse_args()
    args = Arguments(**{field.name: getattr(given, field.name) for field in fields(Arguments)})
    os.environ["OMP_NUM_THREADS"] = str(args.threads)  # read when an engine is imported
    sys.exit(_serve(load, args, claim_stdout()))


def claim_stdout() -> TextIO:
    """The pipe of the protocol, ours alone: what engines print goes to stderr from now on."""
    pipe = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    return pipe


def _serve(load: Callable[[Arguments], Engine], args: Arguments, pipe: TextIO) -> int:
    began = perf_counter()
    try:
        tokenizer = read_tokenizer(args.target)
        engine = load(args)
    except Exception as error:  # whatever an engine throws is a row of the table, not the end of it
        print(json.dumps({"error": reason(error)}), file=pipe)
        return 1
    ready = {
        "ready": True,
        "load_seconds": perf_counter() - began,
        "versions": {"python": python_version()} | installed(engine.packages),
        "settings": dict(engine.settings),
    }
    print(json.dumps(ready), file=pipe)
    for request in _requests(args):
        try:
            prompt = encode(tokenizer, request["prompt"])
            answer = _answer(engine.complete(prompt, request["max_tokens"]), tokenizer)
        except Exception as error:  # as above
            answer = {"error": reason(error)}
        print(json.dumps(answer), file=pipe)
    return 0


def _requests(args: Arguments) -> Iterator[dict[str, Any]]:
    if args.prompts is None:
        yield from map(json.loads, sys.stdin)
    else:
        for _, text in read_texts(args.prompts, args.target, limit=args.limit):
            yield {"prompt": text, "max_tokens": args.max_tokens}


def _answer(run: Run, tokenizer: Any) -> dict[str, Any]:
    return {
        "tokens": len(run.tokens),
        "opening": run.opening,
        "seconds_decode": run.seconds,
        "ttft": run.ttft,
        "text": tokenizer.decode(list(run.tokens), skip_special_tokens=True),
        "prompt_ids": list(run.prompt),
    }


def read_texts(file: Path | None, target: Path, *, limit: int | None) -> list[tuple[str, str]]:
    """Category and text of each prompt; a conversation is written out by the target's chat template."""
    sys.path.append(str(_REPOSITORY))  # its reader of prompts needs the standard library alone
    from outrider.measure.prompts import read_prompts

    prompts = read_prompts(file, limit=limit)
    if all(prompt.prompt for prompt in prompts):
        return [(prompt.category, prompt.prompt or "") for prompt in prompts]
    from transformers import AutoTokenizer

    template = AutoTokenizer.from_pretrained(target, local_files_only=True)

    def text(messages: Sequence[Mapping[str, str]]) -> str:
        turns = [dict(message) for message in messages]
        return str(template.apply_chat_template(turns, add_generation_prompt=True, tokenize=False))

    return [(prompt.category, prompt.prompt or text(prompt.messages or ())) for prompt in prompts]


def read_tokenizer(folder: Path) -> Any:
    """The target's own tokenizer, which all engines share: each is handed token ids."""
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    if not file.is_file():
        raise PeerError(f"{file} is missing; give --target the folder of a Hugging Face model")
    return Tokenizer.from_file(str(file))


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids; the text itself says where special tokens stand."""
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def end_ids(folder: Path) -> list[int]:
    """Tokens that end a completion."""
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        ends = json.loads(file.read_text("utf-8")).get("eos_token_id") if file.is_file() else None
        if ends is not None:
            return list(ends) if isinstance(ends, list) else [ends]
    raise PeerError(f"{folder} names no eos_token_id")


def reason(error: BaseException) -> str:
    """An error in one line."""
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed for the Python of this engine (see README.md)"
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return line if isinstance(error, PeerError) else f"{type(error).__name__}: {line}"


def installed(packages: Sequence[str]) -> dict[str, str]:
    """Of those that are installed: some engines go by several names."""
    found = {}
    for name in packages:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
