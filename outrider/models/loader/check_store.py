"""Keeps the results of load checks, so that a checkpoint is checked once on a machine."""

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from outrider.core.target import Target
from outrider.errors import OutriderError
from outrider.models.loader.fingerprint import code_fingerprint, model_fingerprint
from outrider.models.native.library import cache_folder, load_library
from outrider.models.torch.checkpoint import Checkpoint
from outrider.runtime.atomic_files import write_whole
from outrider.runtime.machine import hardware, versions
from outrider.runtime.ranks import is_first_rank, of_first_rank

_METHOD = 1  # version of the check; results of other versions do not count
_FILES = 256  # results that are kept


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """A load check that the target has passed."""

    date: str  # of the check, UTC, such as 2026-11-27
    against: str  # the reference, such as transformers 5.24.0
    error: float  # largest error of the logits of a node, relative to their norm
    tolerance: float  # largest error that passes

    def __str__(self) -> str:
        return f"logits checked on {self.date} against {self.against}, error {self.error:.2%} of {self.tolerance:.0%}"


def once(checkpoint: Checkpoint, target: Target, bits: int, check: Callable[[], CheckResult]) -> CheckResult:
    """Return the kept result for a target, or check it and keep the result.

    A result holds for a target that was made from an unchanged checkpoint by unchanged code.

    Args:
        checkpoint: the checkpoint. The result of a model that was not loaded from files is not kept.
        target: the target that was made from it.
        bits: those of quantized weights, as in `make_target`.
        check: checks the target.
    """
    if not checkpoint.folder:
        return check()
    file = _file(checkpoint, target, bits)
    known = _read(file)
    if checkpoint.ranks > 1:
        known = of_first_rank(known)
    if known is None:
        known = check()
        if is_first_rank():
            _write(file, known)
    return known


def kernels_of(target: Target) -> str:
    """Return the kernels of a target, without the type of its weights: native, triton or torch."""
    return target.kernels.split()[0]


def _read(file: Path) -> CheckResult | None:
    """Return a kept result; None: there is none."""
    try:
        return CheckResult(**json.loads(file.read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _write(file: Path, result: CheckResult) -> None:
    """Keep a result. If the cache folder cannot be written, the next start checks again."""
    with suppress(OSError, OutriderError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(asdict(result)))
        for old in sorted(file.parent.glob("*.json"), key=lambda each: each.stat().st_mtime)[:-_FILES]:
            old.unlink(missing_ok=True)


def _file(checkpoint: Checkpoint, target: Target, bits: int) -> Path:
    """Return the file of a result. Its name is a hash of everything that the result depends on."""
    facts = [
        _METHOD,
        model_fingerprint(Path(checkpoint.folder)),
        code_fingerprint(),
        Path(load_library().code._name).stem if kernels_of(target) == "native" else None,
        versions(),
        hardware(str(checkpoint.device)),
        str(checkpoint.dtype),
        target.kernels,
        bits,
        checkpoint.ranks,
    ]
    key = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
    return cache_folder() / "checks" / f"{key[:32]}.json"
