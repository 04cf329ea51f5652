"""Check that a draft has the same acceptance in a running server as in Outrider, with the same prompts in both.

    python benchmarks/peers/interop/served.py --server http://127.0.0.1:8080 --target DIR --draft DIR --k 3

For servers with OpenAI's API whose /metrics count drafts and accepted tokens: llama.cpp with --metrics, and vLLM. Start
the server with the command of `outrider export` and the same k, and send it nothing else. `--draft mtp` compares the
MTP module in the checkpoint of the target. Prints one line, and one JSON document as the last line of stdout. The exit
code is 1 if the mean acceptance lengths differ by more than --tolerance, and 2 if they cannot be compared.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import outrider_side
from shared import Counts, total

from outrider.core.prompts import read_prompts
from outrider.errors import OutriderError
from outrider.lab.client.metrics import Speculation, read_speculation
from outrider.lab.client.server import Server, connect, find_model
from outrider.runtime import machine

_MTP = "mtp"  # the proposer that drafts with the module in the target's checkpoint


def main() -> None:
    """Compare both engines. The module docstring explains the exit code."""
    args = _parser().parse_args()
    try:
        report = compare(args)
    except OutriderError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    outrider = report["outrider"]
    served = report["served"]
    print(
        f"{args.draft}, k {args.k}: {report['engine']} {served['length']:.3f}, Outrider {outrider['length']:.3f}"
        f" ({report['difference']:+.1%}); rounds {served['rounds']} and {outrider['rounds']};"
        f" {report['same_text']} of {report['prompts']} texts equal"
    )
    print(json.dumps(report))
    sys.exit(0 if report["agree"] else 1)


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Run both engines, one after the other. Return the JSON document."""
    prompts = read_prompts(args.prompts, limit=args.limit)
    with TemporaryDirectory() as folder:
        draft = args.draft
        if args.short_blocks:
            draft = outrider_side.with_short_blocks(draft, args.target, args.k, Path(folder) / "short")
        llm = outrider_side.load(args, _MTP if draft == _MTP else f"draft:{draft}")
        request = outrider_side.make_request(llm, args, prompts)
        completions = outrider_side.run(llm, request)
    texts = [llm.parts.tokenizer.decode(each.tokens, skip_special_tokens=True) for each in completions]
    served_texts, speculation = asyncio.run(_ask(args.server, request.prompts, args.max_tokens))
    if not speculation.drafts or not speculation.accepted_by_position:
        raise OutriderError(
            f"{args.server} has counted no drafts; start it with the draft, and with its metrics (llama.cpp: --metrics)"
        )
    accepted = tuple(int(count) for count in speculation.accepted_by_position)
    served = Counts(rounds=int(speculation.drafts), accepted=accepted)
    outrider = total([each.counts for each in completions])
    difference = served.length / outrider.length - 1
    return {
        "benchmark": "interop with a server",
        "arguments": vars(args),
        "engine": speculation.engine,
        "prompts": len(prompts),
        "same_text": sum(a.strip() == b.strip() for a, b in zip(texts, served_texts, strict=True)),
        "outrider": outrider.to_json(),
        "served": served.to_json(),
        "difference": difference,
        "agree": abs(difference) <= args.tolerance,
        "hardware": machine.hardware("cpu"),
        "versions": machine.versions(),
        "commit": machine.commit(),
    }


async def _ask(url: str, prompts: Sequence[Sequence[int]], max_tokens: int) -> tuple[list[str], Speculation]:
    """Complete the prompts greedily, one at a time. Return the texts, and what the server has counted meanwhile."""
    async with connect(url) as server:
        model = await find_model(server, None)
        before = await _scrape(server)
        texts = []
        for prompt in prompts:
            body = {"model": model, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0.0}
            texts.append(str((await server.post("completions", body))["choices"][0]["text"]))
        return texts, (await _scrape(server)).since(before)


async def _scrape(server: Server) -> Speculation:
    text = await server.metrics()
    if text is None:
        raise OutriderError(f"{server.url} has no /metrics; start the server with them (llama.cpp: --metrics)")
    return read_speculation(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Compare the acceptance of a draft in a server and in Outrider.")
    parser.add_argument("--server", required=True, metavar="URL", help="a server with OpenAI's API")
    parser.add_argument("--target", required=True, metavar="DIR", help="the model in Hugging Face format")
    parser.add_argument("--draft", required=True, metavar="DIR", help="its draft, as Outrider loads it, or mtp")
    parser.add_argument("--prompts", metavar="FILE", help="JSON lines, as for `outrider bench`")
    parser.add_argument("--k", type=int, default=3, help="draft tokens per round of both (default: 3)")
    parser.add_argument("--limit", type=int, help="prompts of each category (default: all)")
    parser.add_argument("--max-tokens", type=int, default=96, help="longest completion (default: 96)")
    parser.add_argument("--dtype", default="float32", help="of Outrider (default: float32)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of Outrider (default: 2)")
    parser.add_argument("--short-blocks", action="store_true", help=outrider_side.SHORT_BLOCKS)
    parser.add_argument("--tolerance", type=float, default=0.05, help="relative difference allowed (default: 0.05)")
    return parser


if __name__ == "__main__":
    main()
