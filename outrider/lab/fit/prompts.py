"""Split the user's prompts into those to train on and those to measure on, and write both parts as files."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.core.prompts import Prompt, by_category, read_prompts
from outrider.errors import OutriderError
from outrider.lab.fit.state import make_folder
from outrider.runtime.atomic_files import write_whole
from outrider.runtime.report.console import count_text

_LEAST = 4  # prompts in each part
_USUAL, _MOST = 8, 32  # held-out prompts: of a small set, and of a large one
_FIRST = 16  # prompts of the first measurement
_EVALUATED = 8  # prompts of an evaluation during training


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSplit:
    """The prompts of a fit. No held-out prompt is among those to train on."""

    train: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]  # nothing is trained or chosen on them


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFiles:
    """The files of the parts, in the folder of the fit."""

    train: Path
    first: Path  # a part of `train`: the untrained proposers are measured on it
    held_out: Path
    evaluation: Path  # a part of `held_out`: tau is measured on it during the training


def read_split(file: str | None, *, batch: int, seed: int) -> PromptSplit:
    """Return the prompts of a file in two parts. A quarter of them is held out, or up to half of a small set.

    Args:
        file: JSON lines; None is the embedded set.
        batch: sequences at once. Each part has at least so many prompts.

    Raises:
        OutriderError: the file cannot be read, or has too few different prompts.
    """
    prompts = list({json.dumps([prompt.prompt, prompt.messages]): prompt for prompt in read_prompts(file)}.values())
    least = max(_LEAST, batch)
    if len(prompts) < 2 * least:
        found = "the embedded set" if file is None else file
        fix = "give --prompts FILE with more" if file is None else "add more prompts"
        raise OutriderError(
            f"{found} has {count_text(len(prompts), 'different prompt')}, and fit needs {2 * least} at batch {batch}:"
            f" {least} to measure on, and as many to train on; {fix}"
        )
    order = _across_categories(prompts, seed=seed)
    held_out = min(max(len(prompts) // 4, _USUAL), len(prompts) // 2, _MOST)
    held_out = max(held_out, least)
    return PromptSplit(train=tuple(order[held_out:]), held_out=tuple(order[:held_out]))


def write_files(split: PromptSplit, folder: Path, *, batch: int) -> PromptFiles:
    """Write the parts into files in a folder, and return these. Raises OutriderError if they cannot be written."""
    make_folder(folder)
    parts = {
        "train": split.train,
        "first": split.train[: max(_FIRST, 2 * batch)],
        "held-out": split.held_out,
        "evaluation": split.held_out[:_EVALUATED],
    }
    files = {name: folder / f"{name}.jsonl" for name in parts}
    for name, prompts in parts.items():
        write_whole(files[name], "".join(map(_line, prompts)))
    return PromptFiles(
        train=files["train"], first=files["first"], held_out=files["held-out"], evaluation=files["evaluation"]
    )


def _across_categories(prompts: Sequence[Prompt], *, seed: int) -> list[Prompt]:
    """Return the prompts in random order, one of each category after another, as long as they last."""
    shuffled = random.Random(seed).sample(list(prompts), len(prompts))
    groups = list(by_category(shuffled).values())
    longest = max(map(len, groups))
    return [group[i] for i in range(longest) for group in groups if i < len(group)]


def _line(prompt: Prompt) -> str:
    content = {"prompt": prompt.prompt} if prompt.messages is None else {"messages": prompt.messages}
    return json.dumps({"id": prompt.id, "category": prompt.category, **content}) + "\n"
