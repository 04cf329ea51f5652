"""Compares the logits of two models over the same texts."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from outrider.core.prompts import Prompt, chat_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A prompt and its completion."""

    tokens: Tensor  # [L]
    prompt: int  # number of prompt tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How far two models agree over some texts, at every position from the last prompt token on."""

    positions: int
    same: int  # positions with the same likeliest token
    texts: int
    same_texts: int  # texts with the same likeliest token at all positions
    worst_logit: float  # largest difference, over tokens that both models have
    mean_logit: float  # mean absolute difference
    kl: float  # mean divergence of the second model from the first, in nats


def compare(first: Any, second: Any, texts: Sequence[Text]) -> Agreement:
    """Score texts with two models. The vocabulary of the second may extend that of the first."""
    same = []
    differences = []
    divergences = []
    with torch.inference_mode():
        for text in texts:
            first_logits, second_logits = (
                model(text.tokens[None]).logits[0, text.prompt - 1 :].double() for model in (first, second)
            )
            vocab = first_logits.shape[1]
            same.append(first_logits.argmax(-1) == second_logits.argmax(-1))
            differences.append((first_logits - second_logits[:, :vocab]).abs())
            first_log = first_logits.log_softmax(-1)
            second_log = second_logits.log_softmax(-1)[:, :vocab]
            divergences.append((first_log.exp() * (first_log - second_log)).sum(-1))
    all_same = torch.cat(same)
    all_differences = torch.cat(differences)
    return Agreement(
        positions=len(all_same),
        same=int(all_same.sum()),
        texts=len(texts),
        same_texts=sum(bool(each.all()) for each in same),
        worst_logit=float(all_differences.max()),
        mean_logit=float(all_differences.mean()),
        kl=float(torch.cat(divergences).mean()),
    )


def greedy(model: Any, folder: Path, prompts: Sequence[Prompt], count: int) -> list[Text]:
    """Complete prompts greedily by up to `count` tokens, with `generate` of transformers.

    Conversations are left out if the tokenizer has no chat template.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    texts = []
    for prompt in prompts:
        if prompt.messages and not tokenizer.chat_template:
            continue
        text = prompt.prompt or chat_text(tokenizer, prompt.messages or (), add_generation_prompt=True)
        ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
        texts.append(Text(tokens=output[0, :-1], prompt=ids.shape[1]))
    return texts


def load(folder: Path, dtype: torch.dtype) -> Any:
    """Load a model with transformers, without a progress bar."""
    progress_bar = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        return LlamaForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).eval()
    finally:
        if progress_bar:
            transformers_logging.enable_progress_bar()
