"""Image tokens: the index of the nearest entry of a codebook for each patch of an image (vector quantization)."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from outrider.verify.relaxed.tables import kmeans, nearest
from recipes.image_tokens.images import SIDE

PATCH = 4  # pixels
GRID = SIDE // PATCH  # patches of a row
TOKENS = GRID * GRID  # tokens of an image


def fit(images: torch.Tensor, codes: int, *, seed: int) -> torch.Tensor:
    """Return a codebook [codes, 48] of the patches of images [N, 3, 32, 32]."""
    return kmeans(_patches(images).flatten(0, 1), codes, seed=seed)[1]


def encode(images: torch.Tensor, codebook: torch.Tensor) -> torch.Tensor:
    """Return the tokens [N, 64] of images [N, 3, 32, 32], row by row."""
    return nearest(_patches(images).flatten(0, 1), codebook).view(len(images), TOKENS)


def decode(tokens: torch.Tensor, codebook: torch.Tensor) -> torch.Tensor:
    """Return the images [N, 3, 32, 32] of tokens [N, 64]. An id that is no code becomes the mean of the codebook."""
    entries = torch.cat([codebook, codebook.mean(0, keepdim=True)])
    patches = entries[torch.where((tokens >= 0) & (tokens < len(codebook)), tokens, len(codebook))]
    return functional.fold(patches.transpose(1, 2), (SIDE, SIDE), PATCH, stride=PATCH)


def save(codebook: torch.Tensor, file: Path) -> None:
    """Write a codebook as the table of a relaxed verifier: entry i is the embedding of token i."""
    save_file({"embedding": codebook.contiguous(), "tokens": torch.arange(len(codebook))}, file)


def load(file: Path) -> torch.Tensor:
    """Read a codebook [codes, 48]."""
    return load_file(file)["embedding"]


def _patches(images: torch.Tensor) -> torch.Tensor:
    """Return the patches [N, 64, 48] of images [N, 3, 32, 32]."""
    return functional.unfold(images, PATCH, stride=PATCH).transpose(1, 2)
