"""The list of known formats, and detection of the format of a folder from its config and tensor names."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from outrider.errors import OutriderError, either
from outrider.models.heads.files import TensorFiles, model_sizes, read_config, text_config
from outrider.models.heads.formats.base import Format, ImportedHead, Source, TargetInfo
from outrider.models.heads.formats.block_parts import BLOCK_KINDS
from outrider.models.heads.formats.blocks import BLOCKS
from outrider.models.heads.formats.eagle import Eagle
from outrider.models.heads.formats.eagle3 import Eagle3, SpeculatorsEagle3
from outrider.models.heads.formats.gemma import Gemma4Assistant
from outrider.models.heads.formats.hydra import Hydra
from outrider.models.heads.formats.medusa import MEDUSA, MEDUSA_SAFE, VllmMedusa
from outrider.models.heads.formats.mtp import NAMINGS, Mtp
from outrider.models.heads.formats.nemotron import NEMOTRON
from outrider.models.heads.formats.peagle import PEagle, SpeculatorsPEagle

FORMATS: tuple[Format, ...] = (
    *BLOCKS,
    SpeculatorsEagle3(),
    SpeculatorsPEagle(),
    PEagle(),  # before EAGLE-3, which also fits its tensor names
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

_MASK_FILE = "mask_embedding.pt"  # of draft heads that fill in blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A folder with a draft head, and its format."""

    format: Format
    config: dict[str, Any]
    stored: TensorFiles

    def whole(self) -> bool:
        """Return whether the folder holds a full model that includes the draft head."""
        prefix = self.format.module(self.stored)
        if prefix is None:
            return False
        return any("layers.0." in name and not name.startswith(prefix) for name in self.stored)

    def belongs(self, target: TargetInfo) -> bool:
        """Return whether the sizes of a full model are those of a target, so that it may be the target itself."""
        config = text_config(self.config)
        return model_sizes(config) == (target.vocab, target.hidden, target.layers)

    def read(self, target: TargetInfo | None) -> ImportedHead:
        """Return the draft head.

        Raises:
            TargetRequired: the target is needed.
            OutriderError: the draft head is damaged or not supported.
        """
        source = Source(self.config, self.stored, target)
        description, weights = self.format.read(source)
        named = partial(self.format.stored_name, self.stored.keys()) if isinstance(self.format, Mtp) else None
        return ImportedHead(
            description=description,
            weights=weights,
            ignored=source.close(),
            format=self.format.title,
            stored_name=named,
        )


def find(folder: Path) -> Found | None:
    """Return the draft head of a folder with its format, or None if the folder has no draft head in a known format.

    Raises:
        OutriderError: a file is damaged, or the draft head is of a known kind that is not supported.
    """
    config = read_config(folder)
    stored = TensorFiles(folder)
    if not stored:
        return None
    if reason := _unsupported_reason(config, stored.keys()):
        raise OutriderError(f"{folder}: {reason}")
    for format in FORMATS:
        if format.fits(config, stored.keys()):
            if (folder / _MASK_FILE).exists():
                raise OutriderError(
                    f"{folder}: the mask in {_MASK_FILE} is not the embedding of a token, which is"
                    " not supported; use a draft head with mask_token_id"
                )
            return Found(format=format, config=config, stored=stored)
    return None


def missing_projection(folder: Path) -> str | None:
    """Return the name of the projection that an MTP module of a folder lacks, so that `find` does not find the module.

    None: no module lacks it.

    Raises:
        OutriderError: a file is damaged.
    """
    return _missing_projection(TensorFiles(folder).keys())


def check_projection(folder: Path, *, alone: bool = False) -> None:
    """Check that the MTP modules of a folder have their projection.

    Args:
        alone: whether to accept a full model, which runs without its modules.

    Raises:
        OutriderError: the folder has other tensors of a module, but not its projection; or a file is damaged.
    """
    names = TensorFiles(folder).keys()
    missing = _missing_projection(names)
    if missing and not (alone and _is_model(names)):
        raise OutriderError(
            f"{folder}: its module for multi-token prediction has no tensor {missing!r}; copy the"
            " checkpoint again, or use another proposer, such as ngram"
        )


def _missing_projection(names: Collection[str]) -> str | None:
    missing = (naming.missing_projection(names) for naming in (*NAMINGS, NEMOTRON))
    return next(filter(None, missing), None)


def _is_model(names: Collection[str]) -> bool:
    """Return whether tensors include the first layer of a model, and not of a module such as `mtp.layers.0`."""
    return any("layers.0." in name and "mtp" not in name for name in names)


def _unsupported_reason(config: Mapping[str, Any], names: Collection[str]) -> str | None:
    """Return why a draft head of a known kind is not supported, or None."""
    kind = config.get("speculators_model_type")
    architectures = str(config.get("architectures"))
    if "ptd_token_id" in config and "mask_hidden" not in names:
        return (
            "its config names a mask token (P-EAGLE), but the tensor mask_hidden is missing; copy the draft head again"
        )
    if "DFlare" in architectures:
        return "DFlare is not supported; use DFlash or DFlash 2"
    if "Eagle4" in architectures or "efficient_lm_head.weight" in names:
        return "EAGLE-4 is not supported, because no open description of its config was found; use EAGLE-3 or DFlash 2"
    if any(re.match(r"mtp\.\d+\.|model\.mtp\.layers\.", name) for name in names):
        return "modules of DeepSeek-V4 and MiMo-V2 are not supported, because their layers are not those of Llama"
    known = *(each.kind for each in BLOCK_KINDS), "eagle3", "peagle", "mtp"
    if kind is not None and kind not in known:
        return f"speculators_model_type {kind!r} is not supported; use {either(known)}"
    return None


def format_of(name: str) -> Format:
    """Return a format by its name. Raises OutriderError if there is no such format."""
    for format in FORMATS:
        if format.name == name:
            return format
    raise OutriderError(f"format {name!r} is unknown; use {either(['outrider', *(each.name for each in FORMATS)])}")
