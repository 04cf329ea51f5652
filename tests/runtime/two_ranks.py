"""Complete the prompts of some cases in each rank, and write the tokens from every rank.

torchrun or another launcher may start the ranks. Without one, this program forks them after its imports, which take
longer than the cases.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing import start_processes

from outrider.core.params import SamplingParams
from outrider.core.target import Target
from outrider.drafting.propose import placement
from outrider.drafting.propose.leaves import draft_models
from outrider.errors import UnsupportedModel
from outrider.llm import LLM
from outrider.models.loader import make_torch
from outrider.models.torch.checkpoint import Checkpoint
from outrider.models.torch.cuda_graphs import Graphs
from outrider.runtime.ranks import current
from tests.helpers.recorder import FakeRecorder

REAL_RECORDER = make_torch.recorder_of
PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 9, 5, 6], [100, 101], [1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2]]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True),
    SamplingParams(temperature=0.9, top_p=0.9, max_tokens=8, seed=3, ignore_eos=True),
    SamplingParams(temperature=1.0, max_tokens=6, seed=4, logprobs=0),
]


class _FailingRecorder(FakeRecorder):
    """A recorder that works in rank 0 only. In rank 1 it fails at some moment.

    The moments are: after the operations of the pass ("fails"), before them, while rank 0 waits in them ("breaks"),
    and in a replay ("breaks later").
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind

    def __call__(self, run: Callable[[], Any]) -> Callable[[], Any]:
        ranks = current()
        fails = ranks is not None and not ranks.first
        if fails and self._kind == "breaks":
            _fail()
        replay = super().__call__(run)
        if fails and self._kind == "fails":
            _fail()
        return _fail if fails and self._kind == "breaks later" else replay


def _fail() -> None:
    raise RuntimeError("no memory in this rank")


def _record(kind: str | None) -> list[FakeRecorder]:
    """Let targets with kernels auto record their passes on a CPU. Return the list of their recorders, which grows."""
    recorders: list[FakeRecorder] = []
    make_torch.recorder_of = REAL_RECORDER
    if kind is None:
        return recorders

    def recorder(checkpoint: Checkpoint) -> FakeRecorder | None:
        recorders.append(FakeRecorder() if kind == "works" else _FailingRecorder(kind))
        return recorders[-1]

    make_torch.recorder_of = recorder
    return recorders


def _graphs(model: Target) -> Graphs | None:
    return getattr(model, "graphs", None)


def complete(options: dict[str, Any]) -> dict[str, Any]:
    """Return the tokens of all completions, and facts of the engine.

    `options` are those of `LLM`, and "record": whether recordings work, or the kind of `_FailingRecorder`; "estimate":
    seconds of a pass of a replicated and a sharded draft.
    """
    options = dict(options)
    recorders = _record(options.pop("record", None))
    if estimate := options.pop("estimate", None):
        seconds = placement.PassEstimate(replicated=estimate[0], sharded=estimate[1])
        placement.estimate_pass = lambda *_, **__: seconds
    llm = LLM(**options, dtype="float32", max_num_seqs=2, max_model_len=64)
    models = [llm.parts.target, *draft_models(llm.parts.proposer)]
    completions = llm.generate(PROMPTS, PARAMS)
    unseeded = llm.generate(PROMPTS[:2], SamplingParams(temperature=1.0, max_tokens=6))
    return {
        "tokens": [each.token_ids for each in completions],
        "unseeded": [each.token_ids for each in unseeded],
        "drafted": sum(each.stats.draft_tokens for each in completions),
        "kernels": llm.parts.target.kernels,
        "draft_kernels": [model.kernels for model in models[1:]],
        "placements": ["sharded" if each.sharded else "replicated" for each in llm.parts.draft_placements],
        "reasons": [each.reason for each in llm.parts.draft_placements],
        "buckets": [len(graphs.buckets()) for graphs in map(_graphs, models) if graphs],
        "replays": [recorder.count for recorder in recorders],
        "cache_bytes": llm.parts.target.cache.bytes(),
    }


def main(cases: dict[str, Any], out: Path) -> None:
    """Complete the cases in this rank."""
    torch.set_num_threads(1)
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


def _forked(rank: int, *arguments: Any) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    main(*arguments)


if __name__ == "__main__":
    arguments = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    if "RANK" in os.environ:
        main(*arguments)
    else:
        start_processes(_forked, arguments, nprocs=2, start_method="fork")
