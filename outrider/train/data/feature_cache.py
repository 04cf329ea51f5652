"""Answers and states on disk, so that what was written once need not be written again."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from outrider.core.types import Request
from outrider.engine.build import EngineParts
from outrider.errors import OutriderError
from outrider.plan.store import model_print
from outrider.train.data.sample import Sample
from outrider.train.distributed import world

_FORM = 2  # of what is kept; a file of another form is never found
_log = logging.getLogger("outrider")


class FeatureCache:
    """A folder of samples by what they answer.

    A name is a hash of everything that an answer and its states follow from, so trainings with other options share what
    they have in common. Nothing is ever thrown out: prompts come round in turns, and of what comes round in turns one
    keeps most by keeping the first.
    """

    def __init__(self, folder: str | Path, *, gigabytes: float, origin: str, layers: Sequence[int]) -> None:
        """Keep up to `gigabytes` (1e9 bytes) in a folder.

        `origin` says whose states they are (see `origin_of`), and `layers` which of them samples hold. What was kept
        with more layers will do.

        Raises:
            OutriderError: the folder cannot be made.
        """
        self._folder, self._origin, self._layers = Path(folder).expanduser(), origin, list(layers)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            held = sum(file.stat().st_size for file in self._folder.glob("*/*.safetensors"))
        except OSError as error:
            raise OutriderError(f"{folder} cannot be used ({error}); give --cache-dir another folder") from error
        self._left = max(gigabytes * 1e9 - held, 0) / world()

    def read(self, request: Request) -> Sample | None:
        """What was kept of this very request; what is damaged counts as not there."""
        file = self._file(request)
        try:
            held = load_file(file)
            tokens, layers = tuple(held["tokens"].tolist()), held["layers"].tolist()
            states = held["states"][:, [layers.index(layer) for layer in self._layers]]
            shown = held.get("shown")
        except (OSError, SafetensorError, KeyError, ValueError, IndexError):
            return None
        if (
            states.dim() != 3
            or len(states) + 1 != len(tokens)
            or tokens[: len(request.prompt_token_ids)] != request.prompt_token_ids
        ):
            return None
        return Sample(id=request.id, tokens=tokens, states=states, prompt=len(request.prompt_token_ids), shown=shown)

    def write(self, request: Request, sample: Sample) -> None:
        """Keep a sample where there is room for it; a disk that is full ends the keeping, and not the training."""
        size = sample.states.nbytes + 8 * len(sample.tokens) + (0 if sample.shown is None else sample.shown.nbytes)
        if size > self._left:
            return
        file = self._file(request)
        fresh = file.with_suffix(f".{os.getpid()}.new")
        try:
            file.parent.mkdir(exist_ok=True)
            held = {
                "tokens": torch.tensor(sample.tokens),
                "layers": torch.tensor(self._layers),
                "states": sample.states.cpu().contiguous(),
            }
            held |= {} if sample.shown is None else {"shown": sample.shown.cpu().contiguous()}
            fresh.write_bytes(save(held))
            fresh.replace(file)
            self._left -= size
        except (OSError, SafetensorError) as error:
            self._left = 0
            _log.warning("no more states are kept in %s: %s", self._folder, error)
            fresh.unlink(missing_ok=True)

    def _file(self, request: Request) -> Path:
        params = request.params
        facts = [
            _FORM,
            self._origin,
            request.prompt_token_ids,
            params.temperature,
            request.max_tokens,
            request.seed,
            sorted(request.end_ids),
        ]
        name = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
        return self._folder / name[:2] / f"{name}.safetensors"


def origin_of(parts: EngineParts, folder: str | Path, looked: Sequence[int] = ()) -> str:
    """Whose states these are: the target's weights, what they run on, and the layers that are looked at, if any are."""
    seen = [list(looked)] if looked else []
    return json.dumps([model_print(Path(folder)), str(parts.dtype), parts.target.kernels, *seen])
