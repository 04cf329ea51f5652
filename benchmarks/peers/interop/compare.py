"""Check that a draft has the same acceptance in vLLM as in Outrider, with the same prompts in both.

    python benchmarks/peers/interop/compare.py --target DIR --draft DIR --k 3 --limit 3 --python VENV/bin/python

Outrider loads a draft of `outrider train` as it is, and vLLM loads it as `outrider convert` writes it. Prints a table
and, as the last line of stdout, one JSON document. The exit code is 1 if the mean acceptance lengths differ by more
than --tolerance, and 2 if they cannot be compared. In that case stderr has the messages of vLLM.
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
from shared import Completed, Request

from outrider import LLM
from outrider.errors import OutriderError
from outrider.heads.description import Kind
from outrider.heads.files import read_config, read_target_info
from outrider.heads.store import KEY, import_head, is_head
from outrider.measure.prompts import Prompt, read_prompts
from outrider.report.console import standard_output
from outrider.system import machine
from outrider.tools.convert import run_convert

_VLLM_SCRIPT = Path(__file__).resolve().parent / "vllm_side.py"
_VLLM_FORMATS: Mapping[Kind, str] = MappingProxyType(
    {Kind.EAGLE: "eagle", Kind.EAGLE3: "eagle3-speculators", Kind.MEDUSA: "medusa-vllm", Kind.MTP: "mtp-mimo"}
)
_DRAFT_MODEL = "draft_model"  # vLLM's method for a draft that is a separate language model
_LOG_CHARS = 2000  # characters of a log that are shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A draft for vLLM."""

    folder: str
    format: str  # the format it was converted to; "": it was not converted
    method: str


def main() -> None:
    """Compare both engines. The module docstring explains the exit code."""
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
    """Convert the draft for vLLM. A draft that is not in Outrider's own format is only converted if --to is given."""
    target_info = read_target_info(args.target)
    if not is_head(args.draft, lambda: target_info):
        return Exported(folder=args.draft, format="", method=args.method or _DRAFT_MODEL)
    kind = import_head(args.draft, target_info).description.kind
    method = args.method or str(kind)
    if not args.to and KEY not in read_config(Path(args.draft)):
        return Exported(folder=args.draft, format="", method=method)
    draft_format = args.to or _VLLM_FORMATS.get(kind)
    if not draft_format:
        raise OutriderError(f"vLLM has no known format for a draft of kind {kind}; give one with --to")
    run_convert(args.draft, to=draft_format, out=str(out), target=args.target, console=Console(stderr=True))
    return Exported(folder=str(out), format=draft_format, method=method)


def compare(args: argparse.Namespace, exported: Exported) -> dict[str, Any]:
    """Run both engines, one after the other. Return the JSON document."""
    prompts = read_prompts(args.prompts, limit=args.limit)
    llm = LLM(
        args.target,
        dtype=args.dtype,
        threads=args.threads,
        max_num_seqs=1,
        proposer=f"draft:{args.draft}",
        planner=outrider_side.AfterFirstToken(args.k),
    )
    encoded = [_encode(llm, prompt) for prompt in prompts]
    request = Request(
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
    outrider_completions = outrider_side.run(llm, request)
    answer = _run_vllm(args.python, request)
    vllm_completions = [Completed.of_json(each) for each in answer["completed"]]
    pairs = [
        Pair(category=prompt.category, outrider=outrider_completion, vllm=vllm_completion)
        for prompt, outrider_completion, vllm_completion in zip(
            prompts, outrider_completions, vllm_completions, strict=True
        )
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


def _run_vllm(python: str, request: Request) -> dict[str, Any]:
    """Run vLLM in a separate process and return its answer.

    Raises:
        OutriderError: vLLM has failed; the message has its error.
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
    if "error" in answer:
        raise OutriderError(f"{log_end}\nvLLM has failed: {answer['error']}")
    return answer


def _encode(llm: LLM, prompt: Prompt) -> Sequence[int]:
    return llm.encode_chat(prompt.messages) if prompt.messages else llm.encode(prompt.prompt or "")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Compare the acceptance of a draft in vLLM and in Outrider.")
    parser.add_argument("--target", required=True, metavar="DIR", help="the model in Hugging Face format")
    parser.add_argument("--draft", required=True, metavar="DIR", help="its draft: a draft head or a language model")
    parser.add_argument("--prompts", metavar="FILE", help="JSON lines, as for `outrider bench`")
    parser.add_argument("--k", type=int, default=3, help="draft tokens per round (default: 3)")
    parser.add_argument("--limit", type=int, help="prompts of each category (default: all)")
    parser.add_argument("--max-tokens", type=int, default=96, help="longest completion (default: 96)")
    parser.add_argument("--dtype", default="float32", help="of both engines (default: float32, see README.md)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    parser.add_argument("--to", metavar="FORMAT", help="format to convert to (default: by the kind of the draft)")
    parser.add_argument("--method", help="vLLM's name of the method (default: by the kind of the draft)")
    parser.add_argument("--tolerance", type=float, default=0.05, help="relative difference allowed (default: 0.05)")
    parser.add_argument("--python", required=True, help="the Python of an environment with vLLM")
    return parser


if __name__ == "__main__":
    main()
