"""Trains a BART model that corrects typing errors, and a smaller one that drafts for it, on a folder of text files.

python -m recipes.correction.train TEXTS --out PAIR
"""

import json
import math
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from torch.nn import functional
from transformers import BartConfig, BartForConditionalGeneration, GenerationConfig, PreTrainedTokenizerFast

from recipes.correction.pairs import Pair, read_sentences, with_typos
from recipes.family.corpus import END_OF_TEXT, END_OF_TURN, PAD, train_tokenizer
from recipes.family.train import lr_factor, say
from recipes.sizes import Size, parse_size

_TOKENIZER_SENTENCES = 20_000  # sentences that the tokenizer is trained on
_POSITIONS = 256  # most tokens of a source and of an output
_HEAD_SIZE = 48  # least dimensions of an attention head
_BUCKET = 16  # batches whose pairs are sorted by length together
_VALIDATION_PAIRS = 256
_HELD_OUT = 64  # pairs that are written for measurements
_HEAD_SOURCES = 8192  # most sources that are written for the training of draft heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Hyperparameters of the training of a model."""

    steps: int
    seconds: float  # after which the training ends earlier
    batch: int  # pairs per step
    lr: float  # peak learning rate
    rate: float  # share of the words with a typing error
    seed: int


def main(
    texts: Annotated[Path, typer.Argument(help="Folder of text files. Every UTF-8 file below it is a document.")],
    out: Annotated[Path, typer.Option(help="Folder for target/, draft/, held.jsonl and sources.jsonl.")],
    suffix: Annotated[list[str] | None, typer.Option(help="Only use files with this suffix. Repeatable.")] = None,
    vocab: Annotated[int, typer.Option(min=300, help="Tokens of the vocabulary.")] = 1024,
    target: Annotated[str, typer.Option(metavar="LAYERSxWIDTH", help="Layers of encoder and decoder each.")] = "3x192",
    draft: Annotated[str, typer.Option(metavar="LAYERSxWIDTH", help="Layers of encoder and decoder each.")] = "1x96",
    steps: Annotated[int, typer.Option(min=1, help="Steps of each model.")] = 6000,
    max_minutes: Annotated[float, typer.Option(min=0.01, help="Minutes for each model.")] = 60,
    batch: Annotated[int, typer.Option(min=1, help="Pairs per step.")] = 32,
    rate: Annotated[float, typer.Option(min=0, max=1, help="Share of the words with a typing error.")] = 0.1,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 1e-3,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Train a tokenizer, a target and a draft model. The last line of output is one JSON document.

    A model ends after `--steps` steps or `--max-minutes` minutes, and its learning rate falls toward that end. A model
    that OUT holds already is kept.
    """
    sizes = {"draft": parse_size("--draft", draft), "target": parse_size("--target", target)}
    sentences = read_sentences(texts, suffix or ())
    if not sentences.train or not sentences.validation:
        raise typer.BadParameter(f"{texts} has too few lines of prose to train on; give more documents")
    tokenizer = train_tokenizer(sentences.train[:_TOKENIZER_SENTENCES], vocab)
    say(f"{len(sentences.train)} training sentences, vocabulary of {len(tokenizer)} tokens")
    rng = random.Random(seed)
    validation = [with_typos(text, rate, rng) for text in rng.sample(sentences.validation, len(sentences.validation))]
    plan = Plan(steps=steps, seconds=60 * max_minutes, batch=batch, lr=lr, rate=rate, seed=seed)
    report: dict[str, Any] = {"sentences": len(sentences.train), "vocab": len(tokenizer)}
    out.mkdir(parents=True, exist_ok=True)
    held_out = [{"source": pair.source, "text": pair.text} for pair in validation[:_HELD_OUT]]
    _write_lines(out / "held.jsonl", held_out)
    head_texts = rng.sample(sentences.train, min(_HEAD_SOURCES, len(sentences.train)))
    _write_lines(out / "sources.jsonl", [{"source": with_typos(text, rate, rng).source} for text in head_texts])
    for role, size in sizes.items():
        start = perf_counter()
        if (out / role / "config.json").is_file():
            say(f"{out / role} is kept")
            model = BartForConditionalGeneration.from_pretrained(out / role)
        else:
            model = make_model(size, tokenizer, seed=seed)
            train_model(model, tokenizer, sentences.train, plan, role)
            save(model, tokenizer, out / role)
        model.eval()
        report[role] = {
            "size": str(size),
            "parameters": sum(weight.numel() for weight in model.parameters()),
            "validation_nats": round(validate(model, tokenizer, validation[:_VALIDATION_PAIRS]), 4),
            "seconds": round(perf_counter() - start, 1),
        }
    typer.echo(json.dumps(report))


def _write_lines(file: Path, lines: Sequence[dict[str, str]]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")


def make_model(size: Size, tokenizer: PreTrainedTokenizerFast, *, seed: int) -> BartForConditionalGeneration:
    """Return a new BART model with as many layers in the encoder as in the decoder."""
    layers, width = size
    torch.manual_seed(seed)
    heads = next(heads for heads in range(max(width // _HEAD_SIZE, 1), 0, -1) if width % heads == 0)
    start, end, pad = tokenizer.convert_tokens_to_ids([END_OF_TEXT, END_OF_TURN, PAD])
    config = BartConfig(
        vocab_size=len(tokenizer),
        d_model=width,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=width * 8 // 3,
        decoder_ffn_dim=width * 8 // 3,
        max_position_embeddings=_POSITIONS,
        dropout=0.0,
        scale_embedding=True,
        bos_token_id=start,
        eos_token_id=end,
        pad_token_id=pad,
        decoder_start_token_id=start,
        forced_eos_token_id=None,
    )
    return BartForConditionalGeneration(config)


def train_model(
    model: BartForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
    sentences: Sequence[str],
    plan: Plan,
    name: str,
) -> None:
    """Train a model with AdamW on random pairs. `name` is printed with the progress.

    Raises:
        typer.BadParameter: the loss is not finite.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.lr, betas=(0.9, 0.98), weight_decay=0.01)
    batches = _batches(tokenizer, sentences, plan)
    model.train()
    start = perf_counter()
    for step in range(plan.steps):
        progress = max(step / plan.steps, (perf_counter() - start) / plan.seconds)
        if progress >= 1:
            say(f"{name}: the time is over after {step} steps")
            return
        for group in optimizer.param_groups:
            group["lr"] = plan.lr * lr_factor(progress)
        loss = mean_loss(model, next(batches))
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % max(plan.steps // 40, 1) == 0 or step == plan.steps - 1:
            nats = float(loss.detach())
            say(f"{name}: step {step + 1} of {plan.steps}, loss {nats:.3f}")
            if not math.isfinite(nats):
                raise typer.BadParameter(f"the loss is {nats}; use a smaller --lr")


def mean_loss(model: BartForConditionalGeneration, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the mean cross entropy per token, in nats."""
    labels = batch["labels"]
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits = model(**inputs, use_cache=False).logits
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100)


@torch.no_grad()
def validate(model: BartForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, pairs: Sequence[Pair]) -> float:
    """Return the mean cross entropy per token of pairs, in nats."""
    total, tokens = 0.0, 0
    for begin in range(0, len(pairs), 32):
        batch = collate(tokenizer, [encode(tokenizer, pair) for pair in pairs[begin : begin + 32]])
        count = int((batch["labels"] >= 0).sum())
        total += float(mean_loss(model, batch)) * count
        tokens += count
    return total / tokens


def encode(tokenizer: PreTrainedTokenizerFast, pair: Pair) -> tuple[list[int], list[int]]:
    """Return the tokens of the source and of the text."""
    return (
        tokenizer.encode(pair.source, add_special_tokens=False)[:_POSITIONS],
        tokenizer.encode(pair.text, add_special_tokens=False)[: _POSITIONS - 1],
    )


def collate(
    tokenizer: PreTrainedTokenizerFast, pairs: Sequence[tuple[list[int], list[int]]]
) -> dict[str, torch.Tensor]:
    """Return padded tensors [B, S]: input_ids, attention_mask, decoder_input_ids and labels (-100: padding)."""
    start, end, pad = tokenizer.convert_tokens_to_ids([END_OF_TEXT, END_OF_TURN, PAD])
    sources = [source for source, _ in pairs]
    outputs = [[*text, end] for _, text in pairs]
    input_ids = _padded(sources, pad)
    return {
        "input_ids": input_ids,
        "attention_mask": (input_ids != pad).long(),
        "decoder_input_ids": _padded([[start, *output[:-1]] for output in outputs], pad),
        "labels": _padded(outputs, -100),
    }


def _padded(rows: Sequence[list[int]], filler: int) -> torch.Tensor:
    longest = max(map(len, rows))
    return torch.tensor([row + [filler] * (longest - len(row)) for row in rows])


def _batches(
    tokenizer: PreTrainedTokenizerFast, sentences: Sequence[str], plan: Plan
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield batches of random pairs without end. The pairs of a batch have similar lengths."""
    rng = random.Random(plan.seed)
    while True:
        drawn = rng.choices(sentences, k=plan.batch * _BUCKET)
        pairs = [encode(tokenizer, with_typos(text, plan.rate, rng)) for text in drawn]
        pairs.sort(key=lambda pair: len(pair[1]))
        groups = [pairs[begin : begin + plan.batch] for begin in range(0, len(pairs), plan.batch)]
        rng.shuffle(groups)
        for group in groups:
            yield collate(tokenizer, group)


def save(model: BartForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a model in float32 and its tokenizer as a Hugging Face folder."""
    config = model.config
    model.generation_config = GenerationConfig(
        decoder_start_token_id=config.decoder_start_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )
    model.save_pretrained(folder)
    for file in folder.glob("*.safetensors"):
        shutil.copymode(folder / "config.json", file)  # safetensors makes files that only their owner can read
    tokenizer.save_pretrained(folder)
    say(f"{folder} is written")


if __name__ == "__main__":
    typer.run(main)
