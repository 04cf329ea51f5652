"""A calibrated threshold, as a file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outrider.errors import OutriderError
from outrider.media.evaluation.bootstrap import Interval
from outrider.media.routers import QualityGate
from outrider.runtime.atomic_files import write_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A threshold that was chosen for a wanted quality, and what it gave on prompts that did not choose it."""

    wanted: float  # share of target-only's score
    threshold: float
    aggregate: str
    quality: Interval  # share of target-only's score, of the held-out prompts
    held_out: Interval  # the same of a scorer that does not decide
    speedup: float  # over target-only
    accepted_share: float
    drafts: int  # that the accepted share was measured on
    reached: bool  # whether the quality on the held-out prompts is at least the wanted one

    def router(self, *, budget: int | None = None) -> QualityGate:
        """Return the gate. Its results state the measured quality."""
        return QualityGate(
            self.threshold, aggregate=self.aggregate, budget=budget, quality=round(self.quality.value, 4)
        )

    def to_json(self) -> dict[str, Any]:
        """Return the calibration as JSON holds it."""
        return asdict(self)

    def write(self, file: str | Path) -> None:
        """Write a file for `load`."""
        write_whole(Path(file).expanduser(), json.dumps(self.to_json(), indent=2) + "\n")

    @classmethod
    def load(cls, file: str | Path) -> Calibration:
        """Return the calibration in a file.

        Raises:
            OutriderError: the file cannot be read, or it is of another kind.
        """
        try:
            fields = json.loads(Path(file).expanduser().read_text(encoding="utf-8"))
            quality, held_out = Interval(**fields.pop("quality")), Interval(**fields.pop("held_out"))
            return cls(**fields, quality=quality, held_out=held_out)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is of another kind"
            raise OutriderError(
                f"calibration {file} cannot be read ({reason}); name a file that outrider media tune --out wrote"
            ) from None
