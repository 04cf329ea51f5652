"""The k that `outrider tune` found for a batch size."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.errors import OutriderError
from outrider.models.loader.embedded import absolute_name
from outrider.tools.export.engines import SUFFIX


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
