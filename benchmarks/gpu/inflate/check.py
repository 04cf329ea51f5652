"""What precision leaves of the agreement of a model with its inflated self."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from outrider.measure.prompts import Prompt, chat_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A prompt and what follows it."""

    tokens: Tensor  # [L]
    prompt: int  # tokens of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Two models over the same texts, at every position from the prompt's last on."""

    positions: int
    same: int  # positions with the same likeliest token
    texts: int
    same_texts: int  # with the same likeliest token throughout
    worst_logit: float  # largest difference, over tokens that both models have
    mean_logit: float  # mean absolute difference
    kl: float  # mean, nats, of the second from the first


def compare(first: Any, second: Any, texts: Sequence[Text]) -> Agreement:
    """Score texts with two models; the second may have more tokens than the first."""
    same, gaps, kls = [], [], []
    with torch.inference_mode():
        for text in texts:
            one, two = (model(text.tokens[None]).logits[0, text.prompt - 1 :].double() for model in (first, second))
            vocab = one.shape[1]
            same.append(one.argmax(-1) == two.argmax(-1))
            gaps.append((one - two[:, :vocab]).abs())
            ours, theirs = one.log_softmax(-1), two.log_softmax(-1)[:, :vocab]
            kls.append((ours.exp() * (ours - theirs)).sum(-1))
    gap, equal = torch.cat(gaps), torch.cat(same)
    return Agreement(
        positions=len(equal),
        same=int(equal.sum()),
        texts=len(texts),
        same_texts=sum(bool(each.all()) for each in same),
        worst_logit=float(gap.max()),
        mean_logit=float(gap.mean()),
        kl=float(torch.cat(kls).mean()),
    )


def greedy(model: Any, folder: Path, prompts: Sequence[Prompt], count: int) -> list[Text]:
    """What a model writes, `count` tokens at most, by transformers' own `generate`.

    Conversations are left out where the tokenizer has no chat template.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    texts = []
    for prompt in prompts:
        if prompt.messages and not tokenizer.chat_template:
            continue
        plain = prompt.prompt or chat_text(tokenizer, prompt.messages or (), asks=True)
        ids = torch.tensor([tokenizer(plain, add_special_tokens=False)["input_ids"]])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
        texts.append(Text(tokens=out[0, :-1], prompt=ids.shape[1]))
    return texts


def load(folder: Path, dtype: torch.dtype) -> Any:
    """transformers' own model."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        return LlamaForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).eval()
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
