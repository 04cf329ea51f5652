"""Check that drafts have the same acceptance in vLLM as in Outrider, with the same prompts in both.

    python benchmarks/peers/interop/compare.py --target DIR --draft DIR suffix --k 3 --limit 3 --python VENV/bin/python

Outrider loads each draft as it is, and vLLM as `outrider export --for vllm` writes it, with the configuration of its
command. Prints a table and, as the last line of stdout, one JSON document. The exit code is 1 if the mean acceptance
lengths of a draft differ by more than --tolerance, and 2 if vLLM cannot run one. In that case stderr has its messages.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

import outrider_side
from results import Pair, figures, show
from rich.console import Console
from shared import Completed, Request

from outrider.core.prompts import Prompt, read_prompts
from outrider.errors import OutriderError
from outrider.runtime import machine
from outrider.runtime.report.console import standard_output
from outrider.tools.export.engines import SUFFIX, words
from outrider.tools.export.run import run_export
from outrider.tools.settings import ExportSettings

_VLLM_SCRIPT = Path(__file__).resolve().parent / "vllm_side.py"
_PROJECT = Path(__file__).resolve().parents[3]
_LOG_CHARS = 2000  # characters of a log that are shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A draft for vLLM."""

    kind: str
    format: str
    target: str  # what vLLM serves
    speculation: Mapping[str, Any]  # vLLM's speculative configuration


def main() -> None:
    """Compare both engines. The module docstring explains the exit code."""
    args = _parser().parse_args()
    try:
        with TemporaryDirectory() as folder:
            exports = [export(draft, args, Path(folder) / str(i)) for i, draft in enumerate(args.draft)]
            report = compare(args, exports, Path(folder))
    except OutriderError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    show(report, standard_output())
    print(json.dumps(report))
    failed = [each for each in report["drafts"] if "error" in each]
    for each in failed:
        print(f"vLLM has failed with {each['draft']}: {each['error']}", file=sys.stderr)
    sys.exit(2 if failed else 0 if all(each["agree"] for each in report["drafts"]) else 1)


def export(draft: str, args: argparse.Namespace, out: Path) -> Exported:
    """Write a draft for vLLM as `outrider export` does. With --method, vLLM reads the draft as it is."""
    if args.method:
        speculation = {"method": args.method, "model": draft, "num_speculative_tokens": args.k}
        return Exported(kind=args.method, format="as it is", target=args.target, speculation=speculation)
    settings = ExportSettings(folder=draft, engine="vllm", out=str(out), target=args.target, k=args.k)
    summary = run_export(settings, console=Console(stderr=True))
    command = words(summary["command"])
    speculation = json.loads(command[command.index("--speculative-config") + 1])
    target = command[command.index("serve") + 1]
    return Exported(kind=summary["kind"], format=summary["layout"], target=target, speculation=speculation)


def compare(args: argparse.Namespace, exports: Sequence[Exported], folder: Path) -> dict[str, Any]:
    """Run both engines, one after the other. Return the JSON document. Drafts are written to the folder."""
    prompts = read_prompts(args.prompts, limit=args.limit)
    results = []
    for i, draft in enumerate(args.draft):
        own = draft
        if args.short_blocks:
            own = outrider_side.with_short_blocks(draft, args.target, args.k, folder / f"short-{i}")
        llm = outrider_side.load(args, _proposer(own, args.k))
        targets = [exported.target for exported in exports]
        speculations = [exported.speculation for exported in exports]
        request = outrider_side.make_request(llm, args, prompts, targets=targets, speculations=speculations)
        results.append(outrider_side.run(llm, request))
    answer = _run_vllm(args.python, request)
    return {
        "benchmark": "interop",
        "arguments": vars(args),
        "drafts": [
            {"draft": draft, "kind": exported.kind, "format": exported.format}
            | _figures(prompts, completions, theirs, args.tolerance)
            for draft, exported, completions, theirs in zip(args.draft, exports, results, answer["drafts"], strict=True)
        ],
        "hardware": machine.hardware("cpu"),
        "versions": machine.versions() | {"in vLLM's environment": answer["versions"]},
        "commit": machine.commit(),
    }


def _figures(
    prompts: Sequence[Prompt], ours: Sequence[Completed], theirs: Mapping[str, Any], tolerance: float
) -> dict[str, Any]:
    if "error" in theirs:
        return {"error": theirs["error"]}
    pairs = [
        Pair(category=prompt.category, outrider=own, vllm=Completed.of_json(other))
        for prompt, own, other in zip(prompts, ours, theirs["completed"], strict=True)
    ]
    return figures(pairs, tolerance)


def _proposer(draft: str, k: int) -> Any:
    return partial(outrider_side.SuffixAsInVllm, k=k) if draft == SUFFIX else f"draft:{draft}"


def _run_vllm(python: str, request: Request) -> dict[str, Any]:
    """Run vLLM in a separate process and return its answer.

    Raises:
        OutriderError: the process has ended without an answer.
    """
    with TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        try:
            process = subprocess.run(
                [python, str(_VLLM_SCRIPT)],
                input=json.dumps(request.to_json()) + "\n",
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                check=False,
                env=os.environ | {"PYTHONPATH": str(_PROJECT)},  # where vLLM finds the class of `suffix`
            )
        except OSError as error:
            raise OutriderError(
                f"{python} cannot be run ({error.strerror}); give the Python of vLLM with --python"
            ) from error
        log.seek(0)
        log_end = log.read()[-_LOG_CHARS:]
    if not process.stdout:
        raise OutriderError(f"{log_end}\nvLLM's process ended with exit code {process.returncode}; see its log above")
    answer: dict[str, Any] = json.loads(process.stdout)
    return answer


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Compare the acceptance of drafts in vLLM and in Outrider.")
    parser.add_argument("--target", required=True, metavar="DIR", help="the model in Hugging Face format")
    parser.add_argument(
        "--draft", required=True, nargs="+", metavar="DRAFT", help="its drafts: heads, language models, or suffix"
    )
    parser.add_argument("--prompts", metavar="FILE", help="JSON lines, as for `outrider bench`")
    parser.add_argument("--k", type=int, default=3, help="draft tokens per round (default: 3)")
    parser.add_argument("--limit", type=int, help="prompts of each category (default: all)")
    parser.add_argument("--max-tokens", type=int, default=96, help="longest completion (default: 96)")
    parser.add_argument("--dtype", default="float32", help="of both engines (default: float32, see README.md)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    parser.add_argument("--short-blocks", action="store_true", help=outrider_side.SHORT_BLOCKS)
    parser.add_argument("--method", help="vLLM's name of the method: it reads the drafts as they are, not exported")
    parser.add_argument("--tolerance", type=float, default=0.05, help="relative difference allowed (default: 0.05)")
    parser.add_argument("--python", required=True, help="the Python of an environment with vLLM")
    return parser


if __name__ == "__main__":
    main()
