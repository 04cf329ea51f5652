"""The shared part of all workers: arguments, tokenization of prompts, and the protocol on their pipes.

A worker loads its engine once and reports this in one line. Then it answers each line of input with one line. In
between it blocks on reading:

    <- {"ready": true, "load_seconds": s, "versions": {...}, "settings": {...}}
    -> {"prompt": text, "max_tokens": n}
    <- {"tokens": n, "first_chunk_tokens": m, "seconds_decode": s, "ttft": s, "text": text, "prompt_ids": [...]}

or with {"error": reason in one line}. It runs with the Python of its engine, so it only imports modules of Outrider
that need no other package.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import python_version
from time import perf_counter
from typing import Any, Literal, Protocol, TextIO

NGRAM_SIZE = 3  # longest n-gram that prompt lookup matches, in tokens

_CONTEXT = 4096  # context length of an engine in tokens, if the model allows it
_REPOSITORY = Path(__file__).resolve().parents[2]


class PeerError(ValueError):
    """The engine cannot be measured with these arguments. The message is one line."""


class Mode(StrEnum):
    """The source of draft tokens."""

    PLAIN = "plain"
    DRAFT = "draft"  # a draft model; Outrider also takes a draft head
    TREE = "tree"  # the same, with token trees
    NGRAM = "ngram"  # prompt lookup
    MERGE = "merge"  # Outrider's merge(suffix,recycle)
    QUANTIZED = "quantized"  # Outrider's quantized:int4, a copy of the target


class Precision(StrEnum):
    """Precision of the weights. Activations and caches are in bf16 or f16 if the engine supports it."""

    F32 = "f32"
    BF16 = "bf16"
    F16 = "f16"
    INT8 = "int8"  # quantized by the engine or its converter
    INT4 = "int4"
    Q8_0 = "q8_0"  # types of GGUF files
    Q4_0 = "q4_0"


PEER_MODES = (Mode.PLAIN, Mode.DRAFT, Mode.NGRAM)  # modes of engines other than Outrider
LLAMACPP_TYPES = (Precision.BF16, Precision.F16, Precision.Q8_0, Precision.Q4_0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Arguments of a worker."""

    target: Path
    draft: Path | None
    mode: Mode
    k: int | Literal["auto"]
    dtype: Precision
    converted: Path | None
    prompts: Path | None
    limit: int | None
    max_tokens: int
    threads: int
    ignore_eos: bool

    def require(self, modes: Collection[Mode], precisions: Collection[Precision]) -> None:
        """Check that the engine supports the mode and the precision.

        Raises:
            PeerError: it does not.
        """
        if self.mode not in modes:
            raise PeerError(f"this engine has no mode {self.mode}; it has {', '.join(modes)}")
        if self.dtype not in precisions:
            raise PeerError(f"this engine has no {self.dtype} weights here; it has {', '.join(precisions)}")

    def draft_length(self) -> int:
        if self.k == "auto":
            raise PeerError("only Outrider chooses k itself; give this engine a number, such as :k=4")
        return self.k

    def draft_folder(self) -> Path:
        if self.draft is None:
            raise PeerError(f"mode {self.mode} needs --draft DIR")
        return self.draft

    def converted_model(self, folder: Path, suffix: str = "") -> Path:
        """Return the path of a converted model. Its name is that of the model's folder and the precision: base-bf16."""
        if self.converted is None:
            raise PeerError("this engine needs models in its own format; give --converted DIR (see README.md)")
        path = self.converted / f"{folder.name}-{self.dtype}{suffix}"
        if not path.exists():
            raise PeerError(f"{path} is missing; convert the model first (see README.md)")
        return path

    def refuse_converted(self) -> None:
        if self.converted is not None:
            raise PeerError("this engine loads the target without conversion; leave --converted out")

    def context(self) -> int:
        config = json.loads((self.target / "config.json").read_text("utf-8"))
        return min(_CONTEXT, int(config.get("max_position_embeddings", _CONTEXT)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One completion and its times."""

    prompt: Sequence[int]  # the token ids that the engine has used
    tokens: Sequence[int]  # of the completion
    first_chunk_tokens: int  # tokens that arrived with the first one; 1 unless the first pass verified draft tokens
    seconds: float  # from the first token to the last
    ttft: float  # seconds from the request to the first token

    @classmethod
    def of_chunks(cls, prompt: Sequence[int], chunks: Sequence[tuple[float, Sequence[int]]], began: float) -> Run:
        """Return a run from its chunks (time and tokens) and the time of its request."""
        if not chunks:
            raise PeerError("the engine returned no tokens")
        first_at, first_chunk = chunks[0]
        last_at, _ = chunks[-1]
        return cls(
            prompt=prompt,
            tokens=[token for _, chunk in chunks for token in chunk],
            first_chunk_tokens=len(first_chunk),
            seconds=last_at - first_at,
            ttft=first_at - began,
        )


class Engine(Protocol):
    """A loaded engine that completes one prompt at a time, greedily."""

    packages: Sequence[str]  # packages whose versions are reported
    settings: Mapping[str, Any]  # settings of the engine, for the report

    def complete(self, prompt: Sequence[int], max_tokens: int) -> Run:
        """Complete a prompt up to `max_tokens`, or until an end-of-text token unless `ignore_eos` is set."""


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that workers and `interleave.py` share."""
    parser.add_argument("--target", type=Path, required=True, metavar="DIR", help="the model in Hugging Face format")
    parser.add_argument("--draft", type=Path, metavar="DIR", help="its draft model")
    parser.add_argument("--k", type=draft_tokens, default=4, help="draft tokens per round, or auto (default: 4)")
    parser.add_argument(
        "--dtype", type=Precision, default=Precision.BF16, help=f"weights: {', '.join(Precision)} (default: bf16)"
    )
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="JSON lines, as for `outrider bench`")
    parser.add_argument("--limit", type=int, help="prompts of each category (default: all)")
    parser.add_argument("--max-tokens", type=int, default=128, help="longest completion (default: 128)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    parser.add_argument("--ignore-eos", action="store_true", help="always complete --max-tokens tokens")


def draft_tokens(text: str) -> int | Literal["auto"]:
    """Parse the value of --k."""
    return "auto" if text == "auto" else int(text)


def main(load: Callable[[Arguments], Engine]) -> None:
    """Load an engine and answer the requests of standard input, or with --prompts those of a file."""
    parser = argparse.ArgumentParser()
    add_common_arguments(parser)
    parser.add_argument("--mode", type=Mode, default=Mode.PLAIN, help=f"{', '.join(Mode)} (default: plain)")
    parser.add_argument("--converted", type=Path, metavar="DIR", help="models in the engine's own format")
    parsed = parser.parse_args()
    args = Arguments(**{field.name: getattr(parsed, field.name) for field in fields(Arguments)})
    os.environ["OMP_NUM_THREADS"] = str(args.threads)  # engines read it when they are imported
    sys.exit(_serve(load, args, claim_stdout()))


def claim_stdout() -> TextIO:
    """Return the pipe of the protocol. Redirect everything else that is printed to standard error."""
    pipe = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    return pipe


def _serve(load: Callable[[Arguments], Engine], args: Arguments, pipe: TextIO) -> int:
    began = perf_counter()
    try:
        tokenizer = read_tokenizer(args.target)
        engine = load(args)
    except Exception as error:  # an engine may raise anything; the error becomes a row of the table
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
        except Exception as error:  # as above: it becomes a row of the table
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
        "first_chunk_tokens": run.first_chunk_tokens,
        "seconds_decode": run.seconds,
        "ttft": run.ttft,
        "text": tokenizer.decode(list(run.tokens), skip_special_tokens=True),
        "prompt_ids": list(run.prompt),
    }


def read_texts(file: Path | None, target: Path, *, limit: int | None) -> list[tuple[str, str]]:
    """Return category and text of each prompt. The target's chat template turns a conversation into text."""
    sys.path.append(str(_REPOSITORY))  # the Python of an engine does not have Outrider
    from outrider.core.prompts import read_prompts

    prompts = read_prompts(file, limit=limit)
    if all(prompt.prompt for prompt in prompts):
        return [(prompt.category, prompt.prompt or "") for prompt in prompts]
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target, local_files_only=True)

    def chat_text(messages: Sequence[Mapping[str, str]]) -> str:
        conversation = [dict(message) for message in messages]
        return str(tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False))

    return [(prompt.category, prompt.prompt or chat_text(prompt.messages or ())) for prompt in prompts]


def read_tokenizer(folder: Path) -> Any:
    """Return the target's tokenizer. All engines get token ids from it."""
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    if not file.is_file():
        raise PeerError(f"{file} is missing; give --target the folder of a Hugging Face model")
    return Tokenizer.from_file(str(file))


def encode(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of a text. No special tokens are added: the text contains its own."""
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def end_ids(folder: Path) -> list[int]:
    """Return the tokens that end a completion."""
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        ids = json.loads(file.read_text("utf-8")).get("eos_token_id") if file.is_file() else None
        if ids is not None:
            return list(ids) if isinstance(ids, list) else [ids]
    raise PeerError(f"{folder} has no eos_token_id; add it to generation_config.json")


def reason(error: BaseException) -> str:
    """Return an error as one line."""
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed for the Python of this engine; install it (see README.md)"
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return line if isinstance(error, PeerError) else f"{type(error).__name__}: {line}"


def installed(packages: Sequence[str]) -> dict[str, str]:
    """Return the versions of the packages that are installed. Some engines have several package names."""
    versions = {}
    for name in packages:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions
