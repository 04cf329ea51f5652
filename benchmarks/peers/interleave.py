"""Measure engines against each other with the same prompts, in turns. One process is active at a time.

    python benchmarks/peers/interleave.py outrider:draft outrider:plain openvino:draft:k=8 llamacpp:plain:dtype=q8_0 \\
        --target DIR --draft DIR --python openvino=VENV/bin/python --converted openvino=DIR --converted llamacpp=DIR

Prints a table and, as the last line of stdout, one JSON document.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

from cores import Usage, cpu_flags, disturbed, wait_until_quiet
from figures import Sample, document, show
from remote import Plan, Worker, start
from rich.console import Console
from worker import (
    Mode,
    PeerError,
    Precision,
    add_common_arguments,
    draft_tokens,
    encode,
    read_texts,
    read_tokenizer,
    reason,
)

from outrider.errors import OutriderError
from outrider.runtime import machine

ENGINES = ("outrider", "transformers", "openvino", "vllm", "llamacpp", "llamacpp_python")
_OPTIONS = {"k": draft_tokens, "dtype": Precision}  # options that can be set for a single contestant, and their types
_PAUSE = 0.05  # seconds between turns: threads of some engines wait actively for a while before they sleep
_WIDTH = 110  # columns of the table if the output is not a terminal
_RETRIES = 2  # repetitions of a disturbed turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt, with the token ids that every engine must use."""

    category: str
    text: str
    ids: list[int]


def main() -> None:
    """Compare the engines. The exit code is 2 for invalid arguments, and 1 if no contestant could be measured."""
    parser = _parser()
    args = parser.parse_args()
    progress = Console(stderr=True)
    try:
        plans = _plans(args)
        tokenizer = read_tokenizer(args.target)
        texts = read_texts(args.prompts, args.target, limit=args.limit)
    except (OutriderError, PeerError) as error:
        parser.error(reason(error))
    prompts = [Prompt(category=category, text=text, ids=encode(tokenizer, text)) for category, text in texts]
    with progress.status("loading engines"):
        workers, failed = start(plans)
    ready = {name: worker.ready for name, worker in workers.items()}
    try:
        samples = list(_interleave(workers, prompts, args, failed))
    finally:
        for worker in workers.values():
            worker.close()
    report = _conditions(args) | {"contestants": document(plans, ready, failed, samples)}
    show(report, Console(width=None if sys.stdout.isatty() else _WIDTH))
    print(json.dumps(report))
    sys.exit(0 if len(failed) < len(plans) else 1)


def _interleave(
    workers: Mapping[str, Worker], prompts: Sequence[Prompt], args: argparse.Namespace, failed: dict[str, str]
) -> Iterator[Sample]:
    """Run all contestants over every prompt, round by round. The order rotates from prompt to prompt.

    Round 0 warms up with a prompt of each category and is not reported, because some engines compile for new shapes. A
    contestant that fails once is removed, and the reason is added to `failed`.
    """
    warmup_prompts = list({prompt.category: prompt for prompt in reversed(prompts)}.values())
    console = Console(stderr=True)
    for round in range(args.rounds + 1):
        for i, prompt in enumerate(prompts if round else warmup_prompts):
            names = [name for name in _rotated(list(workers), round + i) if name not in failed]
            for name in names:
                try:
                    sample = _turn(name, workers, prompt, round, args)
                except PeerError as error:
                    failed[name] = reason(error)
                    console.print(f"{name} has failed: {failed[name]}", highlight=False, markup=False)
                else:
                    if round:
                        yield sample
        console.print(f"round {round} of {args.rounds}", highlight=False)


def _rotated(names: list[str], by: int) -> list[str]:
    start = by % len(names) if names else 0
    return names[start:] + names[:start]


def _turn(name: str, workers: Mapping[str, Worker], prompt: Prompt, round: int, args: argparse.Namespace) -> Sample:
    """Run one turn. Repeat it if other processes used the cores: engines that wait actively become very slow then."""
    sample = _attempt(name, workers, prompt, round, args.max_tokens)
    for _ in range(_RETRIES if round and args.patience > 0 else 0):
        if not disturbed(sample.foreign, sample.seconds):
            break
        wait_until_quiet(args.patience)
        sample = _attempt(name, workers, prompt, round, args.max_tokens)
    return sample


def _attempt(name: str, workers: Mapping[str, Worker], prompt: Prompt, round: int, max_tokens: int) -> Sample:
    sleep(_PAUSE)
    before = Usage.now()
    began = perf_counter()
    answer = workers[name].ask(prompt.text, max_tokens)
    seconds = perf_counter() - began
    usage = Usage.now().since(before)
    if answer.pop("prompt_ids") != prompt.ids:
        raise PeerError("the engine used other token ids than the target's tokenizer, so it is not comparable")
    idle = {}
    for other, worker in workers.items():
        if other != name:
            idle[other] = usage.sessions.get(worker.session, 0.0)
    return Sample(
        name=name,
        round=round,
        category=prompt.category,
        prompt=prompt.text,
        answer=answer,
        seconds=seconds,
        idle=idle,
        foreign=usage.others([worker.session for worker in workers.values()]),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Measure engines against each other, in turns.")
    parser.add_argument(
        "contestants",
        nargs="+",
        metavar="ENGINE:MODE[:k=N][:dtype=NAME]",
        help=f"engines: {', '.join(ENGINES)}; modes: {', '.join(Mode)}. Ratios are to the first.",
    )
    add_common_arguments(parser)
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each prompt (default: 5)")
    parser.add_argument(
        "--patience",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="maximum wait for a quiet machine before a disturbed turn is repeated; 0 never repeats (default: 30)",
    )
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        metavar="ENGINE=PATH",
        help="Python of an engine (default: this one)",
    )
    parser.add_argument(
        "--converted",
        action="append",
        default=[],
        metavar="ENGINE=PATH",
        help="models in the format of an engine",
    )
    return parser


def _plans(args: argparse.Namespace) -> list[Plan]:
    if args.rounds < 1 or args.max_tokens < 2:
        raise PeerError(
            "--rounds must be at least 1 and --max-tokens at least 2, because speed needs a first and a last token"
        )
    pythons = _by_engine(args.python)
    converted = _by_engine(args.converted)
    plans = []
    for name in dict.fromkeys(args.contestants):
        engine, _, rest = name.partition(":")
        mode, *option_texts = rest.split(":")
        own_options = dict(text.partition("=")[::2] for text in option_texts)
        if engine not in ENGINES or mode not in list(Mode) or not _valid(own_options):
            raise PeerError(f"contestant {name!r} is unknown; use ENGINE:MODE, such as outrider:draft:k=8:dtype=int8")
        options = {"mode": mode, "target": args.target, "k": args.k, "dtype": args.dtype, "threads": args.threads}
        folders = {"draft": args.draft, "converted": converted.get(engine)}
        options |= {option: folder for option, folder in folders.items() if folder}
        options |= own_options
        texts = {option: str(value) for option, value in options.items()}
        if args.ignore_eos:
            texts["ignore-eos"] = ""
        plans.append(Plan(name=name, engine=engine, options=texts, python=pythons.get(engine, sys.executable)))
    return plans


def _valid(options: Mapping[str, str]) -> bool:
    """Return whether the options of a contestant are known and have valid values."""
    try:
        for name, value in options.items():
            _OPTIONS[name](value)
    except (KeyError, ValueError):
        return False
    return True


def _by_engine(values: Sequence[str]) -> dict[str, str]:
    pairs = dict(value.partition("=")[::2] for value in values)
    if invalid := [engine for engine, path in pairs.items() if engine not in ENGINES or not path]:
        raise PeerError(f"{invalid[0]!r} is not of the form ENGINE=PATH; engines are {', '.join(ENGINES)}")
    return {engine: str(Path(path).expanduser()) for engine, path in pairs.items()}


def _conditions(args: argparse.Namespace) -> dict[str, Any]:
    import torch  # slow to import, so not before the arguments are checked

    torch.set_num_threads(args.threads)  # only for the report: this process computes nothing
    arguments = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    return {
        "benchmark": "peers",
        "arguments": arguments,
        "hardware": machine.hardware("cuda" if torch.cuda.is_available() else "cpu"),
        "cpu_flags": cpu_flags(),
        "versions": machine.versions(),
        "commit": machine.commit(),
    }


if __name__ == "__main__":
    main()
