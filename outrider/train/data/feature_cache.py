"""Caches answers and hidden states on disk, so that later trainings read them."""

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
from outrider.models.loader.fingerprint import model_fingerprint
from outrider.runtime.processes import world_size
from outrider.train.data.sample import Sample

_FORMAT = 3  # version of the files; files of another version are not found
_log = logging.getLogger("outrider")


class FeatureCache:
    """A folder of samples by request.

    The name of a file is a hash of everything that determines the answer and its states, so
    trainings with other options share samples. Nothing is evicted: trainings use prompts
    cyclically, and for a cyclic order the best policy is to keep the first samples that fit.
    """

    def __init__(self, folder: str | Path, *, gigabytes: float, origin: str, layers: Sequence[int]) -> None:
        """Open the folder, or make it.

        Args:
            gigabytes: the most 1e9 bytes that it holds.
            origin: where the states come from; see `origin_of`.
            layers: the layers whose states samples have. A cached sample may have more.

        Raises:
            OutriderError: the folder cannot be made.
        """
        self._folder = Path(folder).expanduser()
        self._origin = origin
        self._layers = list(layers)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            used_bytes = sum(file.stat().st_size for file in self._folder.glob("*/*.safetensors"))
        except OSError as error:
            raise OutriderError(f"{folder} cannot be used ({error}); give --cache-dir another folder") from error
        self._free_bytes = max(gigabytes * 1e9 - used_bytes, 0) / world_size()  # share of this process

    def read(self, request: Request) -> Sample | None:
        """Return the sample of a request. None if there is none, or if the file is damaged."""
        file = self._file(request)
        try:
            tensors = load_file(file)
            tokens = tuple(tensors["tokens"].tolist())
            layers = tensors["layers"].tolist()
            states = tensors["states"][:, list(map(layers.index, self._layers))]
            shared_kv = tensors.get("shared_kv")
        except (OSError, SafetensorError, KeyError, ValueError, IndexError):
            return None
        prompt = request.prompt_token_ids
        if states.dim() != 3 or len(states) + 1 != len(tokens) or tokens[: len(prompt)] != prompt:
            return None
        return Sample(id=request.id, tokens=tokens, states=states, prompt=len(prompt), shared_kv=shared_kv)

    def write(self, request: Request, sample: Sample) -> None:
        """Write a sample if there is space. If the disk is full, nothing more is cached, and the training goes on."""
        size = (
            sample.states.nbytes + 8 * len(sample.tokens) + (0 if sample.shared_kv is None else sample.shared_kv.nbytes)
        )
        if size > self._free_bytes:
            return
        file = self._file(request)
        temporary = file.with_suffix(f".{os.getpid()}.new")
        try:
            file.parent.mkdir(exist_ok=True)
            tensors = {
                "tokens": torch.tensor(sample.tokens),
                "layers": torch.tensor(self._layers),
                "states": sample.states.cpu().contiguous(),
            }
            if sample.shared_kv is not None:
                tensors["shared_kv"] = sample.shared_kv.cpu().contiguous()
            temporary.write_bytes(save(tensors))
            temporary.replace(file)
            self._free_bytes -= size
        except (OSError, SafetensorError) as error:
            self._free_bytes = 0
            _log.warning("no more states are cached in %s: %s; free some space", self._folder, error)
            temporary.unlink(missing_ok=True)

    def _file(self, request: Request) -> Path:
        params = request.params
        key = [
            _FORMAT,
            self._origin,
            request.prompt_token_ids,
            params.temperature,
            request.max_tokens,
            request.seed,
            sorted(request.end_ids),
        ]
        if request.source_token_ids:
            key.append(request.source_token_ids)
        name = hashlib.sha256(json.dumps(key).encode()).hexdigest()
        return self._folder / name[:2] / f"{name}.safetensors"


def origin_of(parts: EngineParts, folder: str | Path, kv_layers: Sequence[int] = ()) -> str:
    """Return where states come from: the target's weights, its dtype and kernels, and the layers of recorded KV."""
    optional = [list(kv_layers)] if kv_layers else []
    return json.dumps([model_fingerprint(Path(folder)), str(parts.dtype), parts.target.kernels, *optional])
