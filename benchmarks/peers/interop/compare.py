"""Show that a draft does in vLLM what it does here: the same prompts through both, and what each keeps of the guesses.

    python benchmarks/peers/interop/compare.py --target DIR --draft DIR --k 3 --limit 3 --python VENV/bin/python

A draft that `outrider train` made runs here as it is, and in vLLM as `outrider convert` writes it. Prints a table for
people and, as the last line of stdout, one JSON document. The exit code is 1 where the mean acceptance lengths differ
by more than --tolerance, and 2 where they cannot be compared; what vLLM says to that is on stderr.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from types import MappingProxyType
from typing import Any

import outrider_side
from results import Pair, figures, show
from rich.console import Console
from shared import Asked, Completed

from outrider import LLM
from outrider.errors import OutriderError
from outrider.heads.description import Kind
from outrider.heads.files import read_config, read_target_info
from outrider.heads.store import KEY, is_head, read_trained
from outrider.measure.prompts import Prompt, read_prompts
from outrider.report.console import standard_output
from outrider.system import machine
from outrider.tools.convert import run_convert

_SIDE = Path(__file__).resolve().parent / "vllm_side.py"
_FORMATS: Mapping[Kind, str] = MappingProxyType(  # that vLLM reads
    {Kind.EAGLE: "eagle", Kind.EAGLE3: "eagle3-speculators", Kind.MEDUSA: "medusa-vllm", Kind.MTP: "mtp-mimo"}
)
_MODEL = "draft_model"  # vLLM's method for a draft that is a model of its own
_LAST = 2000  # characters of a log that are shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A draft as vLLM is to read it."""

    folder: str
    format: str  # that it was converted to; "" if it was not
    method: str


def main() -> None:
    """Compare; see above for the exit code."""
    args = _parser().parse_args()
    try:
        with TemporaryDirectory() as folder:
            report = compare(args, export(args, Path(folder) / "draft"))
    except OutriderError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    show(report, standard_output())
    print(json.dumps(report))
    sys.exit(0 if report["agree"] else 1)


def export(args: argparse.Namespace, out: Path) -> Exported:
    """Write the draft as vLLM reads it; what is not in Outrider's own format stays as it is, unless --to says more."""
    partner = read_target_info(args.target)
    if not is_head(args.draft, lambda: partner):
        return Exported(folder=args.draft, format="", method=args.method or _MODEL)
    kind = read_trained(args.draft, partner).description.kind
    method = args.method or str(kind)
    if not args.to and KEY not in read_config(Path(args.draft)):
        return Exported(folder=args.draft, format="", method=method)
    if not (to := args.to or _FORMATS.get(kind)):
        raise OutriderError(f"no format is known in which vLLM reads a draft of kind {kind}; name one with --to")
    run_convert(args.draft, to=to, out=str(out), target=args.target, console=Console(stderr=True))
    return Exported(folder=str(out), format=to, method=method)


def compare(args: argparse.Namespace, exported: Exported) -> dict[str, Any]:
    """Run both, one after the other; what came of it, fit for JSON."""
    prompts = read_prompts(args.prompts, limit=args.limit)
    ours = {"proposer": f"draft:{args.draft}", "planner": outrider_side.AfterFirst(args.k)}
    llm = LLM(args.target, dtype=args.dtype, threads=args.threads, max_num_seqs=1, **ours)
    encoded = [_encode(llm, prompt) for prompt in prompts]
    asked = Asked(
        target=args.target,
        draft=exported.folder,
        method=exported.method,
        k=args.k,
        dtype=args.dtype,
        threads=args.threads,
        max_tokens=args.max_tokens,
        context=max(map(len, encoded)) + args.max_tokens + args.k + 1,
        ends=sorted(llm.parts.end_ids),
        prompts=encoded,
    )
    completed = outrider_side.run(llm, asked)
    answer = _ask(args.python, asked)
    theirs = [Completed.of_json(each) for each in answer["completed"]]
    pairs = [
        Pair(category=prompt.category, ours=one, theirs=two)
        for prompt, one, two in zip(prompts, completed, theirs, strict=True)
    ]
    return {
        "benchmark": "interop",
        "arguments": vars(args),
        "format": exported.format,
        "method": exported.method,
        "hardware": machine.hardware("cpu"),
        "versions": machine.versions() | {"in vLLM's environment": answer["versions"]},
        "commit": machine.commit(),
        **figures(pairs, args.tolerance),
    }


def _ask(python: str, asked: Asked) -> dict[str, Any]:
    """vLLM's answer, from a process of its own.

    Raises:
        OutriderError: it had none; the message is its own.
    """
    with TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        request, command = json.dumps(asked.to_json()) + "\n", [python, str(_SIDE)]
        try:
            done = subprocess.run(command, input=request, stdout=subprocess.PIPE, stderr=log, text=True, check=False)
        except OSError as error:
            raise OutriderError(f"{python} cannot be run ({error.strerror}); give --python vLLM's own") from error
        log.seek(0)
        words = log.read()[-_LAST:]
    if not done.stdout:
        raise OutriderError(f"{words}\nvLLM's process ended with {done.returncode}; its last words are above")
    answer: dict[str, Any] = json.loads(done.stdout)
    if "error" in answer:
        raise OutriderError(f"{words}\nvLLM cannot: {answer['error']}")
    return answer


def _encode(llm: LLM, prompt: Prompt) -> Sequence[int]:
    return llm.encode_chat(prompt.messages) if prompt.messages else llm.encode(prompt.prompt or "")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Compare what a draft does in vLLM with what it does here.")
    parser.add_argument("--target", required=True, metavar="DIR", help="the model, as Hugging Face stores it")
    parser.add_argument("--draft", required=True, metavar="DIR", help="its draft, trained or a model of its own")
    parser.add_argument("--prompts", metavar="FILE", help="JSON lines, as `outrider bench` reads them")
    parser.add_argument("--k", type=int, default=3, help="guesses a round (default: 3)")
    parser.add_argument("--limit", type=int, help="prompts of each category (default: all)")
    parser.add_argument("--max-tokens", type=int, default=96, help="completed at most (default: 96)")
    parser.add_argument("--dtype", default="float32", help="of both engines (default: float32, see README.md)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    parser.add_argument("--to", metavar="FORMAT", help="what to convert to (default: by the draft's kind)")
    parser.add_argument("--method", help="what vLLM calls the draft's kind (default: by the draft's kind)")
    parser.add_argument("--tolerance", type=float, default=0.05, help="relative difference allowed (default: 0.05)")
    parser.add_argument("--python", required=True, help="the Python of an environment with vLLM")
    return parser


if __name__ == "__main__":
    main()
