"""How a training went: one JSON line a wave, and the same for TensorBoard where it is wanted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.errors import OutriderError
from outrider.train.trainer import Sums, mean

FILE = "log.jsonl"


class Log:
    """Appends to what was there up to wave `begin`."""

    def __init__(self, folder: Path, *, begin: int, events: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / FILE
        lines = read_log(folder)[:begin]
        self._file.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
        self._events = _writer(folder) if events else None

    def add(self, wave: int, sums: Sequence[Sums], figures: dict[str, Any], *, tokens: int) -> None:
        """Note a wave."""
        loss = round(mean(each.loss for each in sums), 5)
        seen = [each.acceptance for each in sums if each.met]
        alphas = [round(mean(some), 4) for some in zip(*seen, strict=False)]
        line = {"wave": wave, "loss": loss, "alpha": alphas, "tokens": tokens, "held_out": figures}
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if self._events:
            self._events.add_scalar("loss", loss, wave)
            for position, alpha in enumerate(alphas, 1):
                self._events.add_scalar(f"alpha/{position}", alpha, wave)
            for name, each in figures.items():
                self._events.add_scalar(f"tau/{name}", each["tau"], wave)

    def close(self) -> None:
        if self._events:
            self._events.close()


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Lines of a training's log, none where there is none; a last line that was cut off is left out."""
    out = []
    try:
        for line in (folder / FILE).read_text("utf-8").splitlines():
            out.append(json.loads(line))
    except (OSError, ValueError):
        pass
    return out


def _writer(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter  # takes a package of its own
    except ImportError as error:
        raise OutriderError("--tensorboard takes TensorBoard; run pip install tensorboard") from error
    return SummaryWriter(str(folder / "events"))
