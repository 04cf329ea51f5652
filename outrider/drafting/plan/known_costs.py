"""The costs of passes on this machine, kept in one file per model.

The first start measures for a second at most. Each later start checks the file and measures for a tenth of a second
more, until all shapes are measured. The planner corrects the costs with the times of its rounds. `outrider bench
--calibrate` measures everything at once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from math import inf
from pathlib import Path

from outrider.core.target import Target
from outrider.drafting.plan.calibrate import Measured, PassTimes, context_of
from outrider.drafting.plan.pass_cost import CostModel, PassCost, Sample
from outrider.errors import OutriderError
from outrider.models.native.builds import sources_hash
from outrider.models.native.library import cache_folder
from outrider.runtime.atomic_files import write_whole
from outrider.runtime.machine import hardware, versions
from outrider.runtime.progress import stage
from outrider.runtime.ranks import is_first_rank, of_first_rank

_METHOD = 8  # version of the method; files of other versions are measured again
_FIRST_SECONDS = 1.0  # for all models of an engine together, if none was measured before
_LATER_SECONDS = 0.1  # to check the file, and to continue; a model whose passes are slower only reads it
_CHECKED = (1, 8)  # token counts of the passes that check a file
_MAX_DRIFT = 1.4  # largest ratio between the deviations of these passes from the file
FILES = 32  # maximum number of files


def known_costs(target: Target, drafts: Sequence[Target | None], *, whole: bool = False) -> list[CostModel]:
    """Return the costs of a target with each of some draft models (None: a proposer without one).

    Args:
        target: an idle target. The contents of its cache are lost.
        drafts: its draft models.
        whole: measure all shapes again, which takes seconds or minutes, in place of what a start
            may take.
    """
    models = [target, *(draft for draft in drafts if draft is not None)]
    with stage("measuring passes"):
        costs = {id(model): _known_cost(model, share=1 / len(models), whole=whole) for model in models}
    return [CostModel(target=costs[id(target)], draft=None if each is None else costs[id(each)]) for each in drafts]


def _known_cost(model: Target, *, share: float, whole: bool) -> PassCost:
    """Return the cost of passes of one model, which may take this share of the time."""
    path = cost_file(model)
    known = of_first_rank([] if whole else _read(path))
    times = PassTimes(model, known)
    left = share * (_LATER_SECONDS if known else _FIRST_SECONDS)
    if known and (expected := _check_seconds(times)) < left:
        left -= expected
        if not _is_accurate(times):
            times = PassTimes(model)
            left = share * _FIRST_SECONDS
    times.measure(inf if whole else left)
    if is_first_rank():
        with suppress(OSError, OutriderError):  # the cache folder is read-only; measure again next time
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(list(map(asdict, times.known.values()))))
            _remove_old_files(path.parent)
    return times.cost()


def _check_seconds(times: PassTimes) -> float:
    """Return how long `_is_accurate` takes."""
    return sum(times.check_seconds(tokens) for tokens in _CHECKED if times.has(tokens))


def _is_accurate(times: PassTimes) -> bool:
    """Return whether known times are still accurate: passes deviate from them by about the same factor.

    The machine may have been busy when they were measured.
    """
    scales = [times.check(tokens) for tokens in _CHECKED if times.has(tokens)]
    return max(scales, default=inf) <= min(scales, default=0.0) * _MAX_DRIFT


def cost_file(model: Target) -> Path:
    """Return the file for the costs of a model with these kernels on this machine."""
    facts = (model.kernels, sources_hash(), model.bytes(), model.vocab, model.slots, context_of(model))
    key = json.dumps([_METHOD, facts, hardware(str(model.device)), versions()], sort_keys=True, default=str)
    return cache_folder() / f"costs-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def _read(path: Path) -> list[Measured]:
    """Return the measurements of a file; [] if there is no file yet, or it is damaged."""
    try:
        document = json.loads(path.read_text("utf-8"))
        return [Measured(sample=Sample(**each["sample"]), passes=each["passes"]) for each in document]
    except (OSError, ValueError, TypeError, KeyError):
        return []


def _remove_old_files(folder: Path) -> None:
    """Remove the least recently used files."""
    for old in sorted(folder.glob("costs-*.json"), key=lambda file: file.stat().st_mtime)[:-FILES]:
        old.unlink(missing_ok=True)
