"""Measure engines against each other: the same prompts, in turns, one process active at a time.

    python benchmarks/peers/interleave.py outrider:draft outrider:plain openvino:draft:k=8 llamacpp:plain:dtype=int8 \\
        --target DIR --draft DIR --python openvino=VENV/bin/python --converted openvino=DIR --converted llamacpp=DIR

Prints a table for people and, as the last line of stdout, one JSON document.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

from cores import Usage, disturbed, wait_until_quiet
from figures import Sample, document, show
from remote import Plan, Worker, start
from rich.console import Console
from worker import Mode, PeerError, add_common_arguments, encode, read_texts, read_tokenizer, reason

from outrider.errors import OutriderError
from outrider.system import machine

ENGINES = ("outrider", "transformers", "openvino", "vllm", "llamacpp")
_OPTIONS = ("k", "dtype")  # that one contestant can have for itself
_REST = 0.05  # seconds between turns: threads of some engines wait actively for a while before they sleep
_WIDTH = 110  # columns of a table that no terminal limits
_AGAIN = 2  # times that a disturbed turn is repeated


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt, and the token ids that every engine must read."""

    category: str
    text: str
    ids: list[int]


def main() -> None:
    """Compare; exit code 2 when that cannot be done as asked, 1 when no contestant could be measured."""
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
        samples = list(_race(workers, prompts, args, failed))
    finally:
        for worker in workers.values():
            worker.close()
    report = _about(args) | {"contestants": document(plans, ready, failed, samples)}
    show(report, Console(width=None if sys.stdout.isatty() else _WIDTH))
    print(json.dumps(report))
    sys.exit(0 if len(failed) < len(plans) else 1)


def _race(
    workers: Mapping[str, Worker], prompts: Sequence[Prompt], args: argparse.Namespace, failed: dict[str, str]
) -> Iterator[Sample]:
    """Everyone over every prompt, round by round; who begins changes from prompt to prompt.

    Round 0 warms up, with a prompt of each category, and is not reported: some engines compile for shapes that they
    have not met before. Who fails once is out, with the reason in `failed`.
    """
    warm = list({prompt.category: prompt for prompt in reversed(prompts)}.values())
    console = Console(stderr=True)
    for round in range(args.rounds + 1):
        for p, prompt in enumerate(prompts if round else warm):
            names = [name for name in _rotated(list(workers), round + p) if name not in failed]
            for name in names:
                try:
                    sample = _turn(name, workers, prompt, round, args)
                except PeerError as error:
                    failed[name] = reason(error)
                    console.print(f"{name} is out: {failed[name]}", highlight=False, markup=False)
                else:
                    if round:
                        yield sample
        if console.is_terminal:
            console.print(f"round {round} of {args.rounds}")


def _rotated(names: list[str], by: int) -> list[str]:
    turn = by % len(names) if names else 0
    return names[turn:] + names[:turn]


def _turn(name: str, workers: Mapping[str, Worker], prompt: Prompt, round: int, args: argparse.Namespace) -> Sample:
    """One turn, taken again when strangers kept the cores busy: engines that wait actively crawl then."""
    sample = _attempt(name, workers, prompt, round, args.max_tokens)
    for _ in range(_AGAIN if round and args.patience > 0 else 0):
        if not disturbed(sample.foreign, sample.seconds):
            break
        wait_until_quiet(args.patience)
        sample = _attempt(name, workers, prompt, round, args.max_tokens)
    return sample


def _attempt(name: str, workers: Mapping[str, Worker], prompt: Prompt, round: int, max_tokens: int) -> Sample:
    sleep(_REST)
    before, began = Usage.now(), perf_counter()
    answer = workers[name].ask(prompt.text, max_tokens)
    seconds, spent = perf_counter() - began, Usage.now().since(before)
    if answer.pop("prompt_ids") != prompt.ids:
        raise PeerError("it read other token ids than the target's tokenizer gives, so it is not comparable")
    others = {other: worker.session for other, worker in workers.items() if other != name}
    return Sample(
        name=name,
        round=round,
        category=prompt.category,
        prompt=prompt.text,
        answer=answer,
        seconds=seconds,
        idle={other: spent.sessions.get(session, 0.0) for other, session in others.items()},
        foreign=spent.strangers([worker.session for worker in workers.values()]),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Measure engines against each other, in turns.")
    parser.add_argument(
        "contestants",
        nargs="+",
        metavar="ENGINE:MODE[:k=N][:dtype=int8]",
        help=f"engines: {', '.join(ENGINES)}; modes: {', '.join(Mode)}. Ratios are to the first.",
    )
    add_common_arguments(parser)
    parser.add_argument("--rounds", type=int, default=5, help="how often each prompt is measured (default: 5)")
    parser.add_argument(
        "--patience",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="wait so long for a quiet machine before a disturbed turn is repeated; 0 never repeats (default: 30)",
    )
    for option, what in {"python": "its Python (default: this one)", "converted": "its models, converted"}.items():
        parser.add_argument(f"--{option}", action="append", default=[], metavar="ENGINE=PATH", help=what)
    return parser


def _plans(args: argparse.Namespace) -> list[Plan]:
    if args.rounds < 1 or args.max_tokens < 2:
        raise PeerError("--rounds must be at least 1, and --max-tokens 2: speed needs a first and a last token")
    pythons, converted = (_by_engine(values) for values in (args.python, args.converted))
    plans = []
    for name in dict.fromkeys(args.contestants):
        engine, _, rest = name.partition(":")
        mode, *options = rest.split(":")
        own = dict(option.partition("=")[::2] for option in options)
        if engine not in ENGINES or mode not in list(Mode) or not set(own) <= set(_OPTIONS):
            raise PeerError(f"contestant {name!r} is unknown; use ENGINE:MODE, as outrider:draft:k=8:dtype=int8")
        asked = {"mode": mode, "target": args.target, "k": args.k, "dtype": args.dtype, "threads": args.threads}
        places = {"draft": args.draft, "converted": converted.get(engine)}
        asked |= {place: path for place, path in places.items() if path} | own
        arguments = {option: str(value) for option, value in asked.items()}
        plans.append(Plan(name=name, engine=engine, options=arguments, python=pythons.get(engine, sys.executable)))
    return plans


def _by_engine(values: Sequence[str]) -> dict[str, str]:
    pairs = dict(value.partition("=")[::2] for value in values)
    if bad := [engine for engine, path in pairs.items() if engine not in ENGINES or not path]:
        raise PeerError(f"{bad[0]!r} is no ENGINE=PATH; engines are {', '.join(ENGINES)}")
    return {engine: str(Path(path).expanduser()) for engine, path in pairs.items()}


def _about(args: argparse.Namespace) -> dict[str, Any]:
    import torch  # late: those who mistyped need not wait for it

    torch.set_num_threads(args.threads)  # for the report: nothing is computed here
    shown = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    return {
        "benchmark": "peers",
        "arguments": shown,
        "hardware": machine.hardware("cuda" if torch.cuda.is_available() else "cpu"),
        "versions": machine.versions(),
        "commit": machine.commit(),
    }


if __name__ == "__main__":
    main()
