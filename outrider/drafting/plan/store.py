"""Plan files store what the planner has learned, for later processes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from outrider.core.params import AUTO
from outrider.core.planner import Planner
from outrider.core.text import read_text
from outrider.drafting.plan.cost_planner import CostPlanner
from outrider.drafting.propose.expression import model_names, model_of
from outrider.drafting.propose.registry import Expression, Maker, parse
from outrider.errors import OutriderError
from outrider.models.loader.embedded import absolute_name, model_folder
from outrider.models.loader.fingerprint import model_fingerprint
from outrider.models.loader.hub.names import hub_name
from outrider.runtime.atomic_files import check_writable, write_whole
from outrider.runtime.ranks import is_first_rank

_FORMAT = "outrider plan"
_VERSION = 3


class PlanFile:
    """One plan file, for one target and one proposer.

    Acceptance rates belong to a pair of models. Times belong to a machine, but the planner corrects
    them with the times of real rounds. So a file may move to another machine, but not to another
    model.
    """

    def __init__(
        self, path: str | Path, *, target: str | Path | None, proposer: str | Maker, quantize: str | None = None
    ) -> None:
        """Use the file at `path` for a target and a proposer. `quantize` is the quantization of the target."""
        self._path = Path(path).expanduser()
        self._proposer = proposer_name(proposer)
        names = [target, *(model_names(proposer) if isinstance(proposer, str) else ())]
        folders = map(model_folder, names)
        self._models = hashlib.sha256(json.dumps([*map(model_fingerprint, folders), quantize]).encode()).hexdigest()

    def restore(self, planner: Planner) -> None:
        """Restore a planner from the file. If there is no file, the planner starts from its defaults.

        Raises:
            OutriderError: the file cannot be read, or belongs to another proposer or other models.
        """
        assert isinstance(planner, CostPlanner)
        if not self._path.exists():
            return
        text = read_text(self._path, f"plan {self._path}", fix="name another file")
        document = self._checked(text)
        try:
            planner.restore(document["planner"])
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            raise OutriderError(f"plan {self._path} is damaged; delete it, and the planner learns again") from None

    def save(self, planner: Planner) -> None:
        """Write the state of a planner. The file is replaced atomically.

        Raises:
            OutriderError: the file cannot be written.
        """
        assert isinstance(planner, CostPlanner)
        if not is_first_rank():
            return
        document = {
            "format": _FORMAT,
            "version": _VERSION,
            "proposer": self._proposer,
            "models": self._models,
            "planner": planner.state(),
        }
        write_whole(self._path, json.dumps(document) + "\n")

    def _checked(self, text: str) -> dict[str, Any]:
        """Return the document of a plan file. Raise OutriderError if it is not one, or does not belong here."""
        try:
            document = json.loads(text)
        except (ValueError, RecursionError):
            document = None
        if not isinstance(document, dict) or document.get("format") != _FORMAT:
            raise OutriderError(f"{self._path} is not a plan file; name another file")
        if document.get("version") != _VERSION:
            raise OutriderError(
                f"plan {self._path} has version {document.get('version')}, and this program reads"
                f" version {_VERSION}; delete it, and the planner learns again"
            )
        if document.get("proposer") != self._proposer:
            raise OutriderError(
                f"plan {self._path} belongs to proposer {document.get('proposer')}, not"
                f" {self._proposer}; use another plan file for each proposer"
            )
        if document.get("models") != self._models:
            raise OutriderError(
                f"plan {self._path} was learned with other models; use another plan file for each pair of models"
            )
        return document


def check_plan(plan: str | Path | None, *, k: int | str, planned: bool = False) -> None:
    """Check that a plan file fits the other settings. `planned`: the caller passes its own planner.

    Raises:
        OutriderError: k is not auto, another planner decides, or the file cannot be written.
    """
    if plan is None:
        return
    if k != AUTO:
        raise OutriderError(f"plan {plan} needs k auto, and k is {k}; use k auto, or no plan")
    if planned:
        raise OutriderError(
            f"plan {plan} needs the planner of k auto, and another planner was given; give one of the two"
        )
    check_writable(plan)


def restored(
    path: str | Path | None,
    planner: Planner,
    *,
    target: str | Path | None,
    proposer: str | Maker,
    quantize: str | None,
) -> PlanFile | None:
    """Open the plan file and restore the planner from it. Returns None without a path."""
    if path is None:
        return None
    file = PlanFile(path, target=target, proposer=proposer, quantize=quantize)
    file.restore(planner)
    return file


def proposer_name(proposer: str | Maker) -> str:
    """Return the name of a proposer in a plan file: its expression with the last names of folders.

    Folders may move. `PlanFile` compares their contents.
    """
    if isinstance(proposer, str):
        return _name(parse(proposer))
    kind = proposer if hasattr(proposer, "__qualname__") else type(proposer)
    return f"{kind.__module__}:{kind.__qualname__}"


def _name(expression: Expression) -> str:
    if expression.parts:
        return f"{expression.name}({','.join(map(_name, expression.parts))})"
    argument = expression.argument
    if (model := model_of(argument)) and hub_name(model[0]) is None:
        argument = Path(absolute_name(model[0])).name + model[1]
    return f"{expression.name}:{argument}" if argument else expression.name
