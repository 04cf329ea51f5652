"""The number of draft tokens of an exported draft."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.core.params import check_draft_length
from outrider.errors import OutriderError
from outrider.models.heads.description import HeadDescription
from outrider.models.loader.embedded import absolute_name
from outrider.tools.export.engines import SUFFIX, Recipe
from outrider.tools.settings import ExportSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """Draft tokens per round."""

    k: int
    note: str = ""  # what is special about it


def find_length(settings: ExportSettings, description: HeadDescription | None, recipe: Recipe, *, title: str) -> Length:
    """Return the number of draft tokens.

    A head that fills in blocks (DFlash, DSpark) was trained with blocks of one size, whose columns attend to each
    other. Outrider always computes the whole block, and k is how much of it is verified. Other engines compute a block
    of k tokens, so a smaller k of Outrider's advice would change the draft there.

    Args:
        settings: the draft, and its k or where to read it.
        description: of a draft head; None for other drafts.
        recipe: how the engine runs it.
        title: the name of the engine, for messages.

    Raises:
        OutriderError: the number is missing, or the draft or the engine cannot use it.
    """
    k, advice = settings.k, settings.advice
    if (k is None) == (advice is None):
        raise OutriderError("the number of draft tokens is needed; give one of --k N and --advice FILE")
    if settings.batch is not None and advice is None:
        raise OutriderError("--batch chooses a k of --advice; give --advice in place of --k, or leave --batch out")
    draft = None if settings.folder == SUFFIX else settings.folder
    length = k if k is not None else tuned_k(advice or "", draft, settings.batch or 1)
    check_draft_length(length, least=1)
    most = description.max_draft_tokens if description else 0  # 0: no limit
    if most and length > most:
        raise OutriderError(f"k is {length}, and this draft predicts at most {most} tokens at once; use at most {most}")
    block = description.block.draft_tokens if description and description.block else 0
    if not block or length == block:
        return Length(k=length)
    if k is None:
        return Length(
            k=block,
            note=f"k is {block}, the whole block of this head, in place of {length} of the advice: {title} would"
            " compute a shorter block than the head was trained with, and accept less than outrider tune measured",
        )
    if recipe.needs_whole_block:
        raise OutriderError(f"{title} runs this head with its whole block only; use --k {block}")
    return Length(
        k=length,
        note=f"k is {length}: {title} computes a shorter block than the head was trained with, and accepts less than"
        f" with --k {block}",
    )


def tuned_k(file: str, draft: str | Path | None, batch: int) -> int:
    """Return the fastest fixed k of a draft at a batch size.

    Args:
        file: a document of `outrider tune --out`.
        draft: the draft, as the user names it; None: the proposer `suffix`.
        batch: sequences at once. The largest measured batch up to it counts, or else the smallest one.

    Raises:
        OutriderError: the file cannot be read, or has no fixed k of this draft.
    """
    document = _read(file)
    cases = [
        case
        for case in document.get("cases", ())
        if isinstance(case.get("k"), int) and _is_draft(str(case.get("proposer", "")), draft)
    ]
    if not cases:
        spec = f"draft:{draft}" if draft else SUFFIX
        raise OutriderError(
            f"{file} has no fixed draft length of {draft or SUFFIX}; measure it with: outrider tune"
            f" --proposers {spec} --k 2,4,8, or give --k"
        )
    batches = sorted({case["batch"] for case in cases})
    nearest = max((each for each in batches if each <= batch), default=batches[0])
    best = max((case for case in cases if case["batch"] == nearest), key=lambda case: float(case["overall"]["value"]))
    return int(best["k"])


def _is_draft(proposer: str, draft: str | Path | None) -> bool:
    name, _, argument = proposer.partition(":")
    if draft is None:
        return name == SUFFIX
    if name not in ("draft", "tree", "cascade") or not argument:
        return False
    return absolute_name(argument.strip('"')) == absolute_name(draft)


def _read(file: str) -> Mapping[str, Any]:
    try:
        document = json.loads(Path(file).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not JSON"
        raise OutriderError(f"--advice {file} cannot be read ({reason}); write it with: outrider tune --out") from None
    if not isinstance(document, dict) or document.get("benchmark") != "outrider tune":
        raise OutriderError(f"--advice {file} is not a file of outrider tune; write it with: outrider tune --out")
    return document
