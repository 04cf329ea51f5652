"""Watches whether drafts are still accepted as often as when the threshold was chosen."""

import math
from collections import deque

from outrider.errors import OutriderError
from outrider.media.calibration.document import Calibration
from outrider.media.results import BlockResult, Maker, MediaResult

_LIMIT = 4.0  # standard deviations; with a check after every output, a smaller limit warns too often by chance


class DriftWatch:
    """Compares the accepted share of the last drafts with the calibrated one.

    A change says that prompts, models or scorer are not those of the calibration: tune again.

    Args:
        calibration: what is expected.
        window: how many drafts are compared.

    Raises:
        OutriderError: the window is below 10.
    """

    def __init__(self, calibration: Calibration, *, window: int = 200) -> None:
        if window < 10:
            raise OutriderError(f"window is {window}; use at least 10 drafts")
        self._expected = calibration.accepted_share
        self._drafts = calibration.drafts
        self._accepted: deque[bool] = deque(maxlen=window)

    @property
    def accepted_share(self) -> float | None:
        """The share of the last drafts that were accepted; None before the first draft."""
        return sum(self._accepted) / len(self._accepted) if self._accepted else None

    @property
    def drifted(self) -> bool:
        """Whether a full window differs from the calibration by more than chance explains."""
        return len(self._accepted) == self._accepted.maxlen and abs(self.deviation) > _LIMIT

    @property
    def deviation(self) -> float:
        """The difference to the calibrated share in standard deviations of a difference of two shares."""
        share = self.accepted_share
        if share is None:
            return 0.0
        count = len(self._accepted)
        pooled = (share * count + self._expected * self._drafts) / (count + self._drafts)
        # A share of exactly 0 or 1 has no deviation; half a draft stands for it.
        variance = max(pooled * (1 - pooled), 0.5 / (count + self._drafts)) * (1 / count + 1 / max(1, self._drafts))
        return (share - self._expected) / math.sqrt(variance)

    def update(self, result: MediaResult) -> None:
        """Add the drafts of an output."""
        for block in result.blocks:
            self.add(block)

    def add(self, block: BlockResult) -> None:
        """Add the draft of a block, if there was one."""
        if block.drafted:
            self._accepted.append(block.maker is Maker.DRAFTER)

    def message(self) -> str | None:
        """Return a warning, or None if nothing has changed."""
        if not self.drifted:
            return None
        return (
            f"{100 * (self.accepted_share or 0):.0f} % of the last {len(self._accepted)} drafts were accepted, but"
            f" {100 * self._expected:.0f} % at calibration; run outrider media tune again"
        )
