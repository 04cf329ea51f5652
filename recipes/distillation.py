"""Distillation on the answers of a teacher: its texts, batches of them, and steps of an optimizer within a time."""

from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

import torch
from transformers import AutoTokenizer

from outrider.core.params import SamplingParams
from outrider.core.prompts import read_prompts
from outrider.llm import LLM
from outrider.train.data.prompts import encode_prompt
from outrider.train.loss.chunked import chunked_loss
from recipes.family.train import lr_factor


def answer_prompts(folder: Path, data: Path, count: int, sequence: int, seed: int) -> list[list[int]]:
    """Return prompts with the model's sampled answers, as token ids."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    llm = LLM(folder, max_num_seqs=32, max_model_len=4 * sequence)
    encoded = [encode_prompt(tokenizer, prompt) for prompt in read_prompts(data)]
    prompts = [list(encoded[i % len(encoded)][: 2 * sequence]) for i in range(count)]
    completions = llm.generate(prompts, SamplingParams(temperature=1.0, max_tokens=sequence, seed=seed))
    return [[*prompt, *completion.token_ids] for prompt, completion in zip(prompts, completions, strict=True)]


def cut_rows(texts: list[list[int]], sequence: int) -> torch.Tensor:
    """Concatenate the texts and cut them into rows [N, sequence]."""
    joined = torch.tensor([token for text in texts for token in text])
    return joined[: len(joined) // sequence * sequence].view(-1, sequence)


def random_batches(rows: torch.Tensor, size: int, seed: int) -> Iterator[torch.Tensor]:
    """Yield `size` random rows at a time, without end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield rows[torch.randint(len(rows), (size,), generator=generator)]


def timed_steps(minutes: float) -> Iterator[tuple[int, float]]:
    """Yield the number of each step and the share of the time that is used, until it is used up."""
    begin = perf_counter()
    step = 0
    while (progress := (perf_counter() - begin) / (60 * minutes)) < 1 or not step:
        yield step, progress
        step += 1


def divergence(logits: torch.Tensor, expected: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Return the mean of KL(p, q) and of the sum of min(p, q), for logits of q and probabilities p [B, S, V]."""
    loss, agreement = chunked_loss(logits.flatten(0, 1), expected.flatten(0, 1), {"kl": 1.0})
    return loss.mean(), float(agreement.mean())


def set_lr(optimizer: torch.optim.Optimizer, peaks: list[float], progress: float) -> None:
    """Set the learning rate of each group of weights, from its peak."""
    for group, peak in zip(optimizer.param_groups, peaks, strict=True):
        group["lr"] = peak * lr_factor(progress)


def update(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    """Take a step of the optimizer down the gradient of a loss, with norms clipped to 1."""
    loss.backward()  # type: ignore[no-untyped-call]
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    torch.nn.utils.clip_grad_norm_(weights, 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
