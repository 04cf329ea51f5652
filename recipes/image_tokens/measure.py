"""Measures exact and relaxed verifiers on a pair of `recipes.image_tokens.train`: acceptance, and quality of images.

python -m recipes.image_tokens.measure images
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import load_file
from torch.nn import functional
from transformers import AutoTokenizer, LlamaForCausalLM

from outrider import LLM, SamplingParams
from recipes.family.train import say
from recipes.image_tokens import codebook as codes
from recipes.image_tokens.classifier import Classifier
from recipes.image_tokens.images import CAPTIONS, Caption, draw
from recipes.image_tokens.train import START

_EXACT = ("block", "rejection", "coupled")
_RELAXED = (
    "lantern:delta=0.05",
    "lantern:delta=0.1",
    "lantern:delta=0.2",
    "lantern:delta=0.4",
    "gsd:clusters=128",
    "gsd:clusters=64",
    "gsd:clusters=32",
    "gsd:clusters=16",
    "gsd:clusters=16,size=4",
    "pcg:k=2",
    "pcg:k=4",
    "pcg:k=8",
    "bins:distance=2",
    "bins:distance=8",
    "bins:distance=24",
)
_COLUMNS = ("verifier", "bound", "tau", "accepted", "caption", "size", "color", "shape", "nats", "distance", "seams")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of the table. Every figure is a mean over the images."""

    verifier: str
    bound: str
    tau: float  # tokens per pass of the target
    accepted: float  # accepted draft tokens per draft token that was verified
    caption: float  # share of the images in which the classifier sees size, color and shape of the caption
    size: float
    color: float
    shape: float
    nats: float  # per token, under the target's own softmax
    distance: float  # energy distance between the images and those of plain decoding, in units of a pixel's value
    seams: float  # mean difference of adjacent pixels at the borders of patches


def main(
    pair: Annotated[Path, typer.Argument(help="Folder of recipes.image_tokens.train.")],
    each: Annotated[int, typer.Option(min=2, help="Images of each of the 48 captions.")] = 5,
    k: Annotated[int, typer.Option(min=1, help="Draft tokens per round.")] = 4,
    temperature: Annotated[float, typer.Option(min=0.01)] = 1.0,
    batch: Annotated[int, typer.Option(min=1, help="Images at once.")] = 16,
    verifier: Annotated[list[str] | None, typer.Option(help="Verifiers to measure. Repeatable. Default: many.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Captions.")] = len(CAPTIONS),
    sheet: Annotated[Path | None, typer.Option(help="PNG file for some images of each verifier.")] = None,
    threads: Annotated[int, typer.Option(min=1)] = 1,
) -> None:
    """Generate images with every verifier and print a table. The last line of output is one JSON document."""
    torch.set_num_threads(threads)
    captions = torch.tensor(CAPTIONS[:limit]).repeat_interleave(each, 0)
    gauge = Gauge(pair, captions)
    run = Runner(pair, captions, k=k, temperature=temperature, batch=batch, threads=threads)
    _, plain = run.images(pair / "target", "none", "walk", seed=1)
    gauge.reference = codes.decode(plain, gauge.codebook)

    drawn = codes.encode(draw(captions, torch.Generator().manual_seed(99)), gauge.codebook)
    rows = [gauge.row("images of the recipe", None, drawn), gauge.row("plain decoding, these seeds", None, plain)]
    shown = [("plain", plain)]
    _, other = run.images(pair / "target", "none", "walk", seed=2)
    rows.append(gauge.row("plain decoding, other seeds", None, other))
    for name in verifier or (*_EXACT, *_RELAXED):
        llm, tokens = run.images(pair / "target", f"draft:{pair / 'draft'}", run.expression(name), seed=3)
        rows.append(gauge.row(name, llm, tokens))
        shown.append((name, tokens))
        say(_line(rows[-1]))
    _, small = run.images(pair / "draft", "none", "walk", seed=4)
    rows.append(gauge.row("draft model alone", None, small))
    shown.append(("draft", small))
    if sheet is not None:
        write_sheet([codes.decode(tokens, gauge.codebook) for _, tokens in shown], each, sheet)
    typer.echo(" | ".join(_COLUMNS))
    for row in rows:
        typer.echo(_line(row))
    typer.echo(
        json.dumps({"images": len(captions), "k": k, "temperature": temperature, "rows": list(map(asdict, rows))})
    )


class Runner:
    """Generates images of captions with engines on one thread."""

    def __init__(
        self, pair: Path, captions: torch.Tensor, *, k: int, temperature: float, batch: int, threads: int
    ) -> None:
        self._pair = pair
        self._prompts = [" ".join([START, *Caption(*caption).words]) for caption in captions.tolist()]
        self._k = k
        self._temperature = temperature
        self._engine: dict[str, Any] = {
            "dtype": "float32",
            "device": "cpu",
            "max_num_seqs": batch,
            "max_model_len": 128,
            "threads": threads,
        }
        self._bins = pair / "bins.json"
        if not self._bins.exists():
            _write_bins(pair, self._bins)

    def expression(self, name: str) -> str:
        """Return the expression of a verifier with its table: the codebook, or for bins an order of the codes."""
        if ":" not in name or "table=" in name:
            return name
        table = self._bins if name.startswith("bins") else self._pair / "codebook.safetensors"
        return f"{name},table={table}"

    def images(self, target: Path, proposer: str, verifier: str, *, seed: int) -> tuple[LLM, torch.Tensor]:
        """Return the engine and the tokens [N, 64] of one image of each caption."""
        k = 0 if proposer == "none" else self._k
        llm = LLM(target, proposer=proposer, verifier=verifier, k=k, **self._engine)
        params = [
            SamplingParams(
                temperature=self._temperature, max_tokens=codes.TOKENS, ignore_eos=True, seed=seed * 10**6 + i
            )
            for i in range(len(self._prompts))
        ]
        completions = llm.generate(self._prompts, params)
        return llm, torch.tensor([completion.token_ids for completion in completions])


class Gauge:
    """Measures the quality of images of captions."""

    def __init__(self, pair: Path, captions: torch.Tensor) -> None:
        self.codebook = codes.load(pair / "codebook.safetensors")
        self.reference = torch.empty(0)  # images [N, 3, 32, 32] of plain decoding
        self._captions = captions
        self._classifier = Classifier()
        self._classifier.load_state_dict(load_file(pair / "classifier.safetensors"))
        self._model = LlamaForCausalLM.from_pretrained(pair / "target").float().eval()
        tokenizer = AutoTokenizer.from_pretrained(pair / "target")
        words = [[START, *Caption(*caption).words] for caption in captions.tolist()]
        self._prompts = torch.tensor([tokenizer.convert_tokens_to_ids(each) for each in words])

    def row(self, name: str, llm: LLM | None, tokens: torch.Tensor) -> Row:
        """Return the row of the table for the images `tokens` [N, 64]. `llm` has generated them with a draft."""
        images = codes.decode(tokens, self.codebook)
        right = self._classifier.is_right(images, self._captions).float()
        size, color, shape = right.mean(0).tolist()
        stats = llm.stats if llm else None
        return Row(
            verifier=name,
            bound=_bound(llm) if llm else "",
            tau=round(stats.tau, 3) if stats else 1.0,
            accepted=round(sum(stats.accepted) / sum(stats.reached), 3) if stats else 0.0,
            caption=round(float(right.prod(1).mean()), 3),
            size=round(size, 3),
            color=round(color, 3),
            shape=round(shape, 3),
            nats=round(self._nats(tokens), 3),
            distance=round(energy_distance(images, self.reference), 4),
            seams=round(seams(images), 4),
        )

    @torch.no_grad()
    def _nats(self, tokens: torch.Tensor) -> float:
        """Return the mean cross entropy of tokens [N, 64] under the target."""
        rows = torch.cat([self._prompts, tokens], 1)
        total = 0.0
        for begin in range(0, len(rows), 32):
            part = rows[begin : begin + 32]
            logits = self._model(input_ids=part[:, :-1], use_cache=False).logits[:, -tokens.shape[1] :]
            targets = part[:, -tokens.shape[1] :]
            total += float(functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"))
        return total / tokens.numel()


def energy_distance(one: torch.Tensor, two: torch.Tensor) -> float:
    """Return the energy distance of two sets of images [N, 3, 32, 32] (Szekely and Rizzo 2013), without bias.

    It is 2 E|X - Y| - E|X - X'| - E|Y - Y'| with root mean square differences of pixels, and 0 in expectation if both
    sets come from one distribution.
    """
    scale = one[0].numel() ** 0.5
    x, y = one.flatten(1) / scale, two.flatten(1) / scale
    count = len(x)
    within = sum(float(torch.cdist(each, each).sum()) / (count * (count - 1)) for each in (x, y))
    between = torch.cdist(x, y)
    if torch.equal(one, two):
        return 0.0
    return 2 * float(between.mean()) - within


def seams(images: torch.Tensor) -> float:
    """Return the mean difference of adjacent pixels on two sides of a border between patches."""
    size = codes.PATCH
    across = (images[..., size::size] - images[..., size - 1 : -1 : size]).abs().mean()
    down = (images[..., size::size, :] - images[..., size - 1 : -1 : size, :]).abs().mean()
    return float(across + down) / 2


def write_sheet(sets: Sequence[torch.Tensor], each: int, file: Path) -> None:
    """Write the first image of some captions, one line for each set of images."""
    from PIL import Image

    lines = [torch.cat(list(images[::each][::3]), 2) for images in sets]
    pixels = (torch.cat(lines, 1).clamp(0, 1) * 255).byte().permute(1, 2, 0)
    Image.fromarray(pixels.numpy()).resize((3 * pixels.shape[1], 3 * pixels.shape[0]), 0).save(file)


def _bound(llm: LLM) -> str:
    """Return the bound of an engine's verifier, in short."""
    if llm.stats.exact or llm.stats.bound is None:
        return "exact" if llm.stats.exact else "none"
    bound = llm.stats.bound.as_dict()
    return bound["kind"] if bound["kind"] == "group" else f"{bound['kind']} {bound['value']}"


def _write_bins(pair: Path, file: Path) -> None:
    """Write an order of the codes by brightness, as a table of bins."""
    model = json.loads((pair / "target" / "config.json").read_text("utf-8"))
    order = codes.load(pair / "codebook.safetensors").mean(1).argsort().tolist()
    file.write_text(json.dumps({"vocab": model["vocab_size"], "bins": order}), "utf-8")


def _line(row: Row) -> str:
    return " | ".join(str(getattr(row, column)) for column in _COLUMNS)


if __name__ == "__main__":
    typer.run(main)
