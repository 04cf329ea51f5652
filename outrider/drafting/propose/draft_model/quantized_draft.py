"""The bits of a draft whose weights are quantized, and the error of one that cannot be."""

from outrider.core.config import draft_weight_bits
from outrider.core.proposer import ProposerSetup
from outrider.errors import OutriderError, UnsupportedModel


def draft_bits(setup: ProposerSetup) -> int:
    """Return the bits per weight of the draft.

    Raises:
        OutriderError: the setup asks for fewer bits, and its device or kernels do not support them.
    """
    return draft_weight_bits(setup.draft_quantize, kernels=setup.kernels, device=setup.device.type)


def quantize_error(folder: str, setup: ProposerSetup, reason: UnsupportedModel) -> OutriderError:
    """Return the error of a draft that cannot be quantized, because it cannot run on the native kernels."""
    return OutriderError(
        f"draft_quantize is {setup.draft_quantize}, and the draft in {folder} cannot have it:"
        f" {reason}; leave draft_quantize out"
    )
