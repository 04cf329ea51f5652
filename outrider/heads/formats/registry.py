"""The formats that are known, and which of them a folder is in: by its config and the names of its tensors alone."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.errors import OutriderError
from outrider.heads.files import SIZES, TensorFiles, read_config, text_config
from outrider.heads.formats.base import Format, Source, TargetInfo, Trained
from outrider.heads.formats.blocks import BLOCKS
from outrider.heads.formats.eagle import Eagle
from outrider.heads.formats.eagle3 import Eagle3, SpeculatorsEagle3
from outrider.heads.formats.gemma import Gemma4Assistant
from outrider.heads.formats.hydra import Hydra
from outrider.heads.formats.medusa import MEDUSA, MEDUSA_SAFE, VllmMedusa
from outrider.heads.formats.mtp import NAMINGS
from outrider.heads.formats.nemotron import NEMOTRON
from outrider.heads.formats.peagle import PEagle, SpeculatorsPEagle

FORMATS: tuple[Format, ...] = (
    *BLOCKS,
    SpeculatorsEagle3(),
    SpeculatorsPEagle(),
    PEagle(),  # before EAGLE-3, which it is with masks
    Eagle3(),
    *NAMINGS,
    NEMOTRON,
    Gemma4Assistant(),
    Hydra(),
    VllmMedusa(),
    MEDUSA,
    MEDUSA_SAFE,
    Eagle(),
)

_MASK = "mask_embedding.pt"  # beside a draft that fills in blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A folder that holds a trained draft."""

    format: Format
    config: dict[str, Any]
    stored: TensorFiles

    def whole(self) -> bool:
        """Whether a whole model is there, and the draft came with it."""
        at = self.format.module(self.stored)
        return at is not None and any("layers.0." in name and not name.startswith(at) for name in self.stored)

    def belongs(self, partner: TargetInfo) -> bool:
        """Whether a whole model is of a target's sizes, and may be the target itself."""
        config = text_config(self.config)
        return [config.get(name) for name in SIZES] == [partner.vocab, partner.hidden, partner.layers]

    def read(self, partner: TargetInfo | None) -> Trained:
        """The draft.

        Raises:
            Unowned: the target must be known.
            OutriderError: it is damaged, or cannot be run here.
        """
        source = Source(self.config, self.stored, partner)
        description, weights = self.format.read(source)
        return Trained(description=description, weights=weights, ignored=source.close(), format=self.format.title)


def find(folder: Path) -> Found | None:
    """What a folder holds, or None where that is no trained draft in a known format.

    Raises:
        OutriderError: a file is damaged, or the draft is of a kind that is known and not handled.
    """
    config, stored = read_config(folder), TensorFiles(folder)
    if not stored:
        return None
    if reason := _refused(config, stored.keys()):
        raise OutriderError(f"{folder}: {reason}")
    for format in FORMATS:
        if format.fits(config, stored.keys()):
            if (folder / _MASK).exists():
                raise OutriderError(
                    f"{folder}: {_MASK} holds a mask that is no token's embedding, which is not handled"
                )
            return Found(format=format, config=config, stored=stored)
    return None


def _refused(config: Mapping[str, Any], names: Collection[str]) -> str | None:
    """Why a draft of another kind is not handled, if it is one."""
    kind = config.get("speculators_model_type")
    written = str(config.get("architectures"))
    if "ptd_token_id" in config and "mask_hidden" not in names:
        return "it names a token for masks (P-EAGLE), and mask_hidden, their state, is missing; copy the draft again"
    if re.search("Domino|DFlash2|DFlare", written) or any(name.startswith("prefix_gru.") for name in names):
        return "of drafts that fill in blocks, those are known that are like DFlash or DSpark; this one has other parts"
    if any(re.match(r"mtp\.\d+\.|model\.mtp\.layers\.", name) for name in names):
        return "modules of DeepSeek-V4 and MiMo-V2 have layers that are not Llama's, and are not handled"
    if kind not in (None, "dflash", "dspark", "eagle3", "peagle", "mtp"):
        return f"speculators_model_type is {kind!r}; known are dflash, dspark, eagle3, peagle and mtp"
    return None


def format_of(name: str) -> Format:
    """A format by its name.

    Raises:
        OutriderError: there is none.
    """
    for format in FORMATS:
        if format.name == name:
            return format
    raise OutriderError(f"format {name!r} is unknown; use outrider, {', '.join(each.name for each in FORMATS)}")
