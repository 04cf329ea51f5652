"""What torchrun runs in each rank: complete the prompts of some cases and write the tokens, from every rank."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from outrider.core.params import SamplingParams
from outrider.errors import UnsupportedModel
from outrider.llm import LLM
from outrider.parallel.ranks import current

PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 9, 5, 6], [100, 101], [1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2]]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.9, top_p=0.9, max_tokens=12, seed=3, ignore_eos=True),
    SamplingParams(temperature=1.0, max_tokens=9, seed=4, logprobs=0),
]


def complete(options: dict[str, object]) -> dict[str, object]:
    """Return the tokens of all completions, and facts of the engine."""
    llm = LLM(**options, dtype="float32", max_num_seqs=2, max_model_len=64)
    completions = llm.generate(PROMPTS, PARAMS)
    unseeded = llm.generate(PROMPTS[:2], SamplingParams(temperature=1.0, max_tokens=6))
    return {
        "tokens": [each.token_ids for each in completions],
        "unseeded": [each.token_ids for each in unseeded],
        "drafted": sum(each.stats.draft_tokens for each in completions),
        "kernels": llm.parts.target.kernels,
        "cache_bytes": llm.parts.target.cache.bytes(),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    cases, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    results = {}
    for name, options in cases.items():
        try:
            results[name] = complete({**options, "tp": 2})
        except UnsupportedModel as error:  # in all ranks
            results[name] = {"refused": str(error)}
    ranks = current()
    assert ranks is not None
    (out / f"{ranks.rank}.json").write_text(json.dumps(results))
    ranks.leave()
