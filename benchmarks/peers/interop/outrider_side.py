"""Runs the prompts in Outrider and counts rounds and accepted tokens as vLLM does."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from shared import Completed, Counts, Request, cut

from outrider import LLM, SamplingParams
from outrider.core import tree
from outrider.core.planner import FixedPlanner
from outrider.core.prompts import Prompt
from outrider.core.proposer import Proposer, ProposerSetup
from outrider.core.stats import Stats, StatsAccumulator
from outrider.core.types import Batch, Draft, Needs, Round
from outrider.core.types import Request as EngineRequest
from outrider.drafting.plugins.vllm import Drafts
from outrider.lab.common.jobs import encode_prompt
from outrider.models.heads.files import read_config, read_target_info
from outrider.models.heads.formats.registry import find
from outrider.models.heads.store import KEY, import_head, load_module, write_head

SHORT_BLOCKS = "Outrider, too, computes blocks of k draft tokens (DFlash, DSpark), not the blocks of the training"


class AfterFirstToken(FixedPlanner):
    """Drafts k tokens per round, but none during prefill: vLLM drafts only after the first token."""

    def plan(self, batch: Batch, stats: Stats | StatsAccumulator) -> Batch:
        budgets = tuple(
            budget if seq.num_output_tokens else 0 for seq, budget in zip(batch.seqs, batch.draft_budget, strict=True)
        )
        return super().plan(batch.limited(budgets), stats)


class SuffixAsInVllm:
    """The class that vLLM runs as the proposer `suffix`, for one sequence at a time in Outrider."""

    needs = Needs()

    def __init__(self, setup: ProposerSetup, *, k: int) -> None:
        model = SimpleNamespace(max_model_len=setup.context, get_vocab_size=lambda: setup.vocab, tokenizer="")
        self._drafts = Drafts(
            SimpleNamespace(
                speculative_config=SimpleNamespace(num_speculative_tokens=k),
                model_config=model,
                scheduler_config=SimpleNamespace(max_num_seqs=1),
                device_config=SimpleNamespace(device_type="cpu"),
                additional_config={"outrider_k": k},
            )
        )
        self._device = setup.device
        self._chain: list[int] = []

    def admit(self, slot: int, request: EngineRequest) -> None:
        self._chain = []

    def propose(self, batch: Batch) -> Draft:
        chain = self._chain[: batch.draft_budget[0]]
        return tree.chain(tree.upload([chain], self._device), (len(chain),)) if chain else tree.empty(1, self._device)

    def commit(self, round: Round) -> None:
        """Draft for the next round. vLLM, too, drafts right after a step."""
        (seq,) = round.batch.seqs
        (emitted,) = round.emitted
        row = np.array([[*seq.token_ids, *emitted]], np.int32)
        (self._chain,) = self._drafts.propose([emitted], [row.shape[1]], row)

    def release(self, slot: int) -> None:
        pass


def load(args: argparse.Namespace, proposer: str | Callable[[ProposerSetup], Proposer]) -> LLM:
    """Load the target with a proposer that drafts as vLLM does, for one sequence at a time."""
    return LLM(
        args.target,
        dtype=args.dtype,
        threads=args.threads,
        max_num_seqs=1,
        proposer=proposer,
        planner=AfterFirstToken(args.k),
    )


def with_short_blocks(draft: str, target: str, k: int, folder: Path) -> str:
    """Write a copy of a head that fills in blocks (DFlash, DSpark), with blocks of k draft tokens.

    vLLM and llama.cpp compute no more columns than they need for k draft tokens, whatever the head was trained with.
    Outrider computes the whole block. Columns attend to later ones, so the draft tokens differ.

    Returns:
        The folder of the copy, or `draft` itself if it is no such head.
    """
    path = Path(draft)
    if not path.is_dir() or (KEY not in read_config(path) and find(path) is None):
        return draft
    head = import_head(draft, read_target_info(target))
    block = head.description.block
    if block is None:
        return draft
    size = k + block.size - block.draft_tokens
    description = replace(head.description, block=replace(block, size=size))
    write_head(folder, load_module(description, head.weights, where=draft), dtype=torch.float32)
    return str(folder)


def make_request(
    llm: LLM,
    args: argparse.Namespace,
    prompts: Sequence[Prompt],
    *,
    targets: Sequence[str] = (),
    speculations: Sequence[Mapping[str, Any]] = (),
) -> Request:
    """Return the request for both engines, with prompts as token ids. The last two are those of vLLM."""
    encoded = [encode_prompt(llm, prompt) for prompt in prompts]
    return Request(
        targets=targets,
        speculations=speculations,
        k=args.k,
        dtype=args.dtype,
        threads=args.threads,
        max_tokens=args.max_tokens,
        context=max(map(len, encoded)) + args.max_tokens + args.k + 1,
        ends=sorted(llm.parts.end_ids),
        prompts=encoded,
    )


def run(llm: LLM, request: Request) -> list[Completed]:
    """Complete the prompts.

    vLLM drafts k tokens in every round, and counts all that the last round accepts, even if the completion ends among
    them. So the limit is k tokens higher here, end tokens are ignored, and the loop ends after the round that has
    completed the output.
    """
    params = SamplingParams(temperature=0.0, max_tokens=request.max_tokens + request.k, ignore_eos=True)
    completions = []
    for prompt in request.prompts:
        before = llm.stats
        tokens = list[int]()
        for chunk in llm.stream(prompt, params):
            tokens += chunk.token_ids
            if len(tokens) >= request.max_tokens or not set(request.ends).isdisjoint(tokens):
                break
        completions.append(Completed(tokens=cut(tokens, request), counts=_counts(before, llm.stats)))
    return completions


def _counts(before: Stats, after: Stats) -> Counts:
    """Return the counts between two snapshots."""
    offered = _difference(before.offered, after.offered)
    return Counts(rounds=offered[0] if offered else 0, accepted=_difference(before.accepted, after.accepted))


def _difference(before: Sequence[int], after: Sequence[int]) -> tuple[int, ...]:
    return tuple(b - a for a, b in zip_longest(before, after, fillvalue=0))
