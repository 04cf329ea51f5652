"""The number of draft tokens of an exported draft."""

from dataclasses import dataclass

from outrider.core.params import check_draft_length
from outrider.errors import OutriderError
from outrider.models.heads.description import HeadDescription
from outrider.tools.export.engines import SUFFIX, Recipe
from outrider.tools.export.tuned import tuned_k
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
