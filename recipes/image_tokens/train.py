"""Trains a codebook, a target, a draft model and a classifier on images that it draws itself.

python -m recipes.image_tokens.train --out images
"""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from recipes.distillation import set_lr, timed_steps, update
from recipes.family.train import say
from recipes.image_tokens import codebook as codes
from recipes.image_tokens.classifier import Classifier
from recipes.image_tokens.images import COLORS, SHAPES, SIZES, draw, random_captions
from recipes.sizes import Size, parse_size

START = "<start>"
END = "<end>"
_VALIDATION_IMAGES = 256
_CODEBOOK_IMAGES = 1500
_AT_ONCE = 2000  # images
_HEAD_SIZES = (32, 16)  # dimensions of an attention head, whichever divides the width


def main(
    out: Annotated[Path, typer.Option(help="Folder for target/, draft/, codebook.safetensors and the classifier.")],
    size: Annotated[int, typer.Option("--codes", min=8, help="Entries of the codebook.")] = 256,
    target: Annotated[str, typer.Option(metavar="LAYERSxWIDTH")] = "6x160",
    draft: Annotated[str, typer.Option(metavar="LAYERSxWIDTH")] = "2x80",
    images: Annotated[int, typer.Option(min=16, help="Images to train on.")] = 40_000,
    target_minutes: Annotated[float, typer.Option(help="Time for training the target.")] = 14.0,
    draft_minutes: Annotated[float, typer.Option(help="Time for training the draft model.")] = 3.0,
    classifier_minutes: Annotated[float, typer.Option(help="Time for training the classifier.")] = 1.5,
    resume: Annotated[bool, typer.Option(help="Train the models of OUT further, with its codebook.")] = False,
    batch: Annotated[int, typer.Option(min=1, help="Images per step.")] = 32,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 2e-3,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Train everything on one thread. The last line of output is one JSON document.

    A time of 0 leaves a model as it is.
    """
    sizes = {
        "draft": parse_size("--draft", draft, multiple=_HEAD_SIZES[-1]),
        "target": parse_size("--target", target, multiple=_HEAD_SIZES[-1]),
    }
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    captions, drawn = draw_images(images, seed)
    book = make_codebook(out, drawn, size, seed=seed, resume=resume)
    tokens = torch.cat([codes.encode(part, book) for part in drawn.split(_AT_ONCE)])
    restored = torch.cat([codes.decode(part, book) for part in tokens.split(_AT_ONCE)])
    mse = float(functional.mse_loss(restored, drawn))
    del drawn
    say(f"codebook of {size} codes, mean squared error {mse:.5f}")
    report: dict[str, Any] = {"codes": size, "images": images, "codebook_mse": round(mse, 6)}
    report["classifier"] = make_classifier(
        out, restored, captions, minutes=classifier_minutes, batch=batch, seed=seed, resume=resume
    )
    tokenizer = make_tokenizer(size)
    rows = as_rows(tokens, captions, tokenizer)
    for role, minutes in (("draft", draft_minutes), ("target", target_minutes)):
        model = make_model(sizes[role], tokenizer, seed=seed)
        if resume:
            model = LlamaForCausalLM.from_pretrained(out / role).float()
        start = perf_counter()
        steps = train_model(
            model, rows[:-_VALIDATION_IMAGES], minutes=minutes, batch=batch, lr=lr, seed=seed, name=role
        )
        report[role] = {
            "size": str(sizes[role]),
            "parameters": sum(weight.numel() for weight in model.parameters()),
            "steps": steps,
            "validation_nats": round(validate(model, rows[-_VALIDATION_IMAGES:]), 4),
            "seconds": round(perf_counter() - start, 1),
        }
        say(f"{role}: {report[role]}")
        save(model, tokenizer, out / role)
    typer.echo(json.dumps(report))


def draw_images(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return captions [N, 3] and their images [N, 3, 32, 32], `count` for training and then those for validation."""
    generator = torch.Generator().manual_seed(seed)
    captions = random_captions(count + _VALIDATION_IMAGES, generator)
    return captions, torch.cat([draw(part, generator) for part in captions.split(_AT_ONCE)])


def make_codebook(out: Path, images: torch.Tensor, size: int, *, seed: int, resume: bool) -> torch.Tensor:
    """Fit a codebook to images and save it, or load the saved one."""
    file = out / "codebook.safetensors"
    if resume:
        return codes.load(file)
    book = codes.fit(images[:_CODEBOOK_IMAGES], size, seed=seed)
    codes.save(book, file)
    return book


def make_classifier(
    out: Path, images: torch.Tensor, captions: torch.Tensor, *, minutes: float, batch: int, seed: int, resume: bool
) -> dict[str, Any]:
    """Train a classifier of images [N, 3, 32, 32], or the saved one further, and save it. Returns its figures."""
    file = out / "classifier.safetensors"
    torch.manual_seed(seed)
    classifier = Classifier()
    if resume:
        classifier.load_state_dict(load_file(file))
    train_classifier(classifier, images, captions, minutes=minutes, batch=batch, seed=seed)
    right = classifier.is_right(images[-_VALIDATION_IMAGES:], captions[-_VALIDATION_IMAGES:]).float()
    save_file(classifier.state_dict(), file)
    accuracy = [round(float(each), 4) for each in right.mean(0)]
    say(f"classifier: accuracy of size, color and shape {accuracy}")
    return {"accuracy": accuracy}


def make_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of words: the codes c0, c1, ... have the ids from 0, the words of captions come after them."""
    words = [*(f"c{i}" for i in range(size)), START, END, *SIZES, *COLORS, *SHAPES]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=END))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=START, eos_token=END)


def as_rows(tokens: torch.Tensor, captions: torch.Tensor, tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """Return the texts [N, 69] of images: start, the three words of the caption, 64 codes, end."""
    start, end = tokenizer.convert_tokens_to_ids([START, END])
    columns = [
        torch.tensor(tokenizer.convert_tokens_to_ids(list(words)))[captions[:, i]]
        for i, words in enumerate((SIZES, COLORS, SHAPES))
    ]
    first = torch.full((len(tokens), 1), start)
    return torch.cat([first, torch.stack(columns, 1), tokens, torch.full_like(first, end)], 1)


def make_model(size: Size, tokenizer: PreTrainedTokenizerFast, *, seed: int) -> LlamaForCausalLM:
    """Return a new Llama model."""
    layers, width = size
    heads = width // next(dim for dim in _HEAD_SIZES if width % dim == 0)
    torch.manual_seed(seed)
    start, end = tokenizer.convert_tokens_to_ids([START, END])
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=(width * 8 // 3 + 31) // 32 * 32,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=start,
        eos_token_id=end,
        pad_token_id=end,
    )
    return LlamaForCausalLM(config)


def train_model(
    model: LlamaForCausalLM, rows: torch.Tensor, *, minutes: float, batch: int, lr: float, seed: int, name: str
) -> int:
    """Train a model on texts [N, S] for some minutes and return the number of steps."""
    model.train()
    batches = _batches(len(rows), batch, seed)
    return _train(model, lambda: mean_loss(model, rows[next(batches)]), minutes=minutes, lr=lr, name=name)


def train_classifier(
    classifier: Classifier, images: torch.Tensor, captions: torch.Tensor, *, minutes: float, batch: int, seed: int
) -> None:
    """Train a classifier on all images [N, 3, 32, 32] but those for validation."""
    batches = _batches(len(images) - _VALIDATION_IMAGES, batch, seed)

    def loss() -> torch.Tensor:
        chosen = next(batches)
        return classifier.loss(images[chosen], captions[chosen])

    _train(classifier, loss, minutes=minutes, lr=2e-3, name="classifier")
    classifier.eval()


def _train(
    module: torch.nn.Module, loss_of_batch: Callable[[], torch.Tensor], *, minutes: float, lr: float, name: str
) -> int:
    """Take steps of AdamW for some minutes and return their number.

    Raises:
        typer.BadParameter: the loss is not finite.
    """
    if not minutes:
        return 0
    optimizer = torch.optim.AdamW(module.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.05)
    step = 0
    for step, progress in timed_steps(minutes):
        set_lr(optimizer, [lr], progress)
        loss = loss_of_batch()
        update(optimizer, loss)
        if step % 200 == 0:
            nats = float(loss.detach())
            say(f"{name}: step {step}, {progress:.0%} of the time, loss {nats:.3f}")
            if not math.isfinite(nats):
                raise typer.BadParameter(f"the loss is {nats}; use a smaller --lr")
    return step + 1


def _batches(count: int, size: int, seed: int) -> Iterator[torch.Tensor]:
    """Yield `size` random indices below `count`, without end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randint(count, (size,), generator=generator)


def mean_loss(model: LlamaForCausalLM, rows: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy in nats of the codes and the end of texts [N, S]. Captions are not predicted."""
    logits = model(input_ids=rows[:, :-1], use_cache=False).logits[:, 3:]
    return functional.cross_entropy(logits.flatten(0, 1), rows[:, 4:].flatten())


@torch.no_grad()
def validate(model: LlamaForCausalLM, rows: torch.Tensor) -> float:
    """Return the mean cross entropy of texts [N, S], in nats."""
    model.eval()
    return sum(float(mean_loss(model, part)) * len(part) for part in rows.split(32)) / len(rows)


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a model in float32 and its tokenizer as a Hugging Face folder."""
    config = model.config
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    say(f"{folder} is written")


if __name__ == "__main__":
    typer.run(main)
