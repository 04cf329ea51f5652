"""Estimate what a draft model gains if its LM head has a part of the vocabulary only.

    python benchmarks/draft_vocabulary.py PROMPTS.jsonl

The target answers the prompts greedily, and the draft model predicts each token of the answers. A draft token counts as
accepted if it is the target's token and its id is below V; byte pair encodings number tokens roughly by frequency.
The time of a round is one pass of the target and a chain of the draft model, whose LM head is cut to V rows. Passes are
timed in turns; a figure is the median. For each V, the table shows the best draft length.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from outrider import LLM, SamplingParams
from outrider.core import tree
from outrider.core.config import EngineConfig
from outrider.core.prompts import read_prompts
from outrider.core.types import Batch, DraftBudget, SequenceState
from outrider.engine.build import load_target
from outrider.models.loader.embedded import model_folder
from outrider.models.native.target import NativeTarget

_CONTEXT = 512
_CACHED = 128  # tokens in the caches while passes are timed
_VOCABULARIES = (12288, 10240, 8192, 6144, 4096, 2048)
_LENGTHS = (2, 3, 4, 5, 6, 8, 10)


def main(
    prompts: Annotated[Path, typer.Argument(help="JSON lines with prompt or messages.")],
    target: Annotated[str, typer.Option()] = "@mini",
    draft: Annotated[str, typer.Option(help="A draft model that the native kernels run.")] = "@nano",
    max_tokens: Annotated[int, typer.Option()] = 96,
    rounds: Annotated[int, typer.Option(help="Timed passes of each kind.")] = 100,
) -> None:
    """Print tau, the time of a round, and tokens per second of each vocabulary, relative to the whole one."""
    answers = _answers(target, prompts, max_tokens)
    model = AutoModelForCausalLM.from_pretrained(model_folder(draft), dtype=torch.float32).eval()
    hits = [_hits(answer, start, model) for answer, start in answers]
    texts = [(answer[start:], matches) for (answer, start), matches in zip(answers, hits, strict=True)]
    counts = Counter(token for answer, start in answers for token in answer[start:])
    seconds = _time_passes(target, draft, rounds)
    table = Table(
        "vocabulary", "tokens covered", "draft length", "tau", "draft, ms", "round, ms", "tokens/s", "of whole"
    )
    whole = 0.0
    for vocab in _VOCABULARIES:
        speeds = {}
        for length in _LENGTHS:
            tau = _tau(texts, vocab, length)
            speeds[length] = tau / (seconds["target", length] + seconds[vocab, length])
        best = max(speeds, key=lambda length: speeds[length])
        whole = whole or speeds[best]
        covered = sum(count for token, count in counts.items() if token < vocab) / counts.total()
        table.add_row(
            str(vocab),
            f"{covered:.1%}",
            str(best),
            f"{_tau(texts, vocab, best):.2f}",
            f"{1e3 * seconds[vocab, best]:.2f}",
            f"{1e3 * (seconds['target', best] + seconds[vocab, best]):.2f}",
            f"{speeds[best]:.0f}",
            f"{speeds[best] / whole:.2f}",
        )
    Console(width=110).print(table)


def _answers(target: str, prompts: Path, max_tokens: int) -> list[tuple[list[int], int]]:
    """Return the tokens of each prompt with its greedy answer, and where the answer begins."""
    llm = LLM(target, max_num_seqs=8, max_model_len=_CONTEXT)
    texts = [llm.encode(prompt.prompt)[: _CONTEXT - max_tokens] for prompt in read_prompts(prompts) if prompt.prompt]
    completions = llm.generate(texts, SamplingParams(temperature=0.0, max_tokens=max_tokens))
    return [([*text, *each.token_ids], len(text)) for text, each in zip(texts, completions, strict=True)]


@torch.inference_mode()
def _hits(tokens: Sequence[int], start: int, model: torch.nn.Module) -> list[bool]:
    """Return for each token of the answer whether the draft model predicts it."""
    predicted = model(torch.tensor([tokens])).logits[0, start - 1 : -1].argmax(-1).tolist()
    return [guess == token for guess, token in zip(predicted, tokens[start:], strict=True)]


def _tau(texts: Sequence[tuple[Sequence[int], Sequence[bool]]], vocab: int, length: int) -> float:
    """Return the mean number of tokens per round, for drafts of `length` tokens with ids below `vocab`."""
    rounds = tokens = 0
    for answer, matches in texts:
        position = 0
        while position < len(answer):
            accepted = 0
            while accepted < length and position + accepted < len(answer):
                index = position + accepted
                if not (matches[index] and answer[index] < vocab):
                    break
                accepted += 1
            position += accepted + 1
            rounds += 1
        tokens += len(answer)
    return tokens / rounds


def _time_passes(target: str, draft: str, rounds: int) -> Mapping[tuple[int | str, int], float]:
    """Return the seconds of a pass of the target over a draft, and of a chain by vocabulary, by draft length."""
    models = {vocab: _load(draft) for vocab in _VOCABULARIES}
    for vocab, model in models.items():
        model.keep_tokens(torch.arange(vocab))
    verifier = _load(target)
    feed = tuple(range(5, 5 + _CACHED))
    passes: dict[tuple[int | str, int], Callable[[], object]] = {}
    for length in _LENGTHS:
        passes["target", length] = lambda length=length: _verify(verifier, feed, length)
        for vocab, model in models.items():
            passes[vocab, length] = lambda model=model, length=length: model.draft_greedy(
                _batch(feed, length), model.vocab
            )
    for model in (*models.values(), verifier):
        model.cache.admit(0, feed)
        model.score(_batch(feed, 0, cached=0), tree.empty(1, torch.device("cpu")))
    times: dict[tuple[int | str, int], list[float]] = {key: [] for key in passes}
    for _ in range(rounds):
        for key, run in passes.items():
            begin = time.perf_counter()
            run()
            times[key].append(time.perf_counter() - begin)
    return {key: median(values) for key, values in times.items()}


def _load(model: str) -> NativeTarget:
    config = EngineConfig(target=model, kernels="native", device="cpu", max_num_seqs=1, max_model_len=_CONTEXT)
    target = load_target(config).model
    assert isinstance(target, NativeTarget)
    return target


def _batch(feed: tuple[int, ...], length: int, cached: int = _CACHED - 1) -> Batch:
    """Return a batch of one sequence, whose tokens from `cached` on are fed."""
    return Batch(seqs=(SequenceState.of(feed),), start=(cached,), feed=(feed[cached:],), budget=DraftBudget((length,)))


def _verify(model: NativeTarget, feed: tuple[int, ...], length: int) -> object:
    chain = tree.chain(torch.full((1, length), 7), (length,))
    return model.score(_batch(feed, length), chain)


if __name__ == "__main__":
    typer.run(main)
