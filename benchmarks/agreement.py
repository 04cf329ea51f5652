"""How far draft models agree with a target: the sum of min(p, q) over the vocabulary, teacher forced, by category.

    python benchmarks/agreement.py --target DIR --prompts FILE DRAFT DRAFT

It is the share of first guesses, drawn from the draft's law q, that are kept at temperature 1 (Leviathan et al. 2023,
theorem 3.5). Measured at every token of the prompts' own text, and of what the target answers at temperature 1; both
models in float32. Prints a table and, as the last line, a JSON document.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated

import torch
import typer
from transformers import AutoModelForCausalLM, PreTrainedModel

from outrider.embedded import model_folder
from outrider.llm import LLM
from outrider.machine import versions
from outrider.params import SamplingParams
from outrider.prompts import read_prompts

PARTS = ("prompts", "answers")


def main(
    drafts: Annotated[list[str], typer.Argument(help="Folders of draft models, or @NAME.")],
    *,
    target: Annotated[str | None, typer.Option(help="Folder of the target. Default: the embedded one.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="JSON lines with category and prompt.")] = None,
    limit: Annotated[int | None, typer.Option(help="Prompts of each category.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Of an answer.")] = 128,
) -> None:
    """Measure drafts against a target."""
    found = read_prompts(prompts, limit=limit)
    llm, judge, models = LLM(target, proposer="ngram", rows=8), _model(target), {name: _model(name) for name in drafts}
    texts = [llm.chat(prompt.messages) if prompt.messages else prompt.prompt or "" for prompt in found]
    answers = llm.generate(texts, SamplingParams(temperature=1.0, max_tokens=max_tokens, seed=1))
    kept: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for prompt, text, answer in zip(found, texts, answers, strict=True):
        asked = llm.encode(text)
        p = _laws(judge, (*asked, *answer.tokens))
        for name, model in models.items():
            q = _laws(model, (*asked, *answer.tokens))
            if q.shape != p.shape:
                raise typer.BadParameter(f"{name} has {q.shape[1]} tokens and the target {p.shape[1]}; use one family")
            alike = torch.minimum(p, q).sum(-1).tolist()
            kept[name, prompt.category, "prompts"] += alike[: len(asked) - 1]
            kept[name, prompt.category, "answers"] += alike[len(asked) - 1 : -1]
    scores = [
        {"draft": name, "category": category, **{part: round(fmean(kept[name, category, part]), 4) for part in PARTS}}
        for name in drafts
        for category in sorted({prompt.category for prompt in found})
    ]
    for score in scores:
        print("{category:18}{prompts:.3f} in prompts, {answers:.3f} in answers  {draft}".format_map(score))
    print(json.dumps({"benchmark": "agreement", "prompts": len(found), "versions": versions(), "scores": scores}))


def _model(name: str | None) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model_folder(name), dtype=torch.float32)
    return model.eval()


@torch.inference_mode()
def _laws(model: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    """p(next | tokens before) [L, V], in float32."""
    laws: torch.Tensor = model(torch.tensor([tokens])).logits[0].softmax(-1)
    return laws


if __name__ == "__main__":
    typer.run(main)
