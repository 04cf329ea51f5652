"""Trains a tokenizer, a small target and a smaller draft model of the same family on a folder of text files.

python -m recipes.family.train TEXTS --out FAMILY
"""

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from recipes.family.corpus import END_OF_TEXT, EOS_TOKENS, PAD, encode, is_for_validation, read_texts, train_tokenizer
from recipes.sizes import Size, parse_size

_WARMUP = 0.05  # share of the steps in which the learning rate rises
_FINAL_LR = 0.1  # learning rate at the end, as a share of its peak
_VALIDATION_BATCHES = 16
_HEAD_SIZES = (64, 32, 16)  # dimensions of an attention head, the first that divides the width
_VALIDATION_ROWS = 4  # most rows of a validation batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Hyperparameters of the training of a model."""

    tokens: float  # of the whole training
    batch: int  # rows per step
    sequence: int  # tokens per row
    lr: float  # peak learning rate
    seed: int
    device: torch.device


def main(
    texts: Annotated[Path, typer.Argument(help="Folder of text files. Every UTF-8 file below it is a document.")],
    out: Annotated[Path, typer.Option(help="Folder for target/ and draft/.")],
    suffix: Annotated[list[str] | None, typer.Option(help="Only use files with this suffix. Repeatable.")] = None,
    vocab: Annotated[int, typer.Option(min=300, help="Tokens of the vocabulary.")] = 12288,
    target: Annotated[str, typer.Option(metavar="LAYERSxWIDTH")] = "8x384",
    draft: Annotated[str, typer.Option(metavar="LAYERSxWIDTH")] = "2x128",
    tokens: Annotated[float, typer.Option(help="Tokens to train each model on.")] = 100e6,
    batch: Annotated[int, typer.Option(min=1, help="Rows per step.")] = 32,
    sequence: Annotated[int, typer.Option(min=8, help="Tokens per row.")] = 1024,
    context: Annotated[int, typer.Option(min=8, help="Context length of the models.")] = 2048,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 1.5e-3,
    seed: Annotated[int, typer.Option()] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
) -> None:
    """Train a tokenizer, a target and a draft model. The last line of output is one JSON document."""
    sizes = {
        "target": parse_size("--target", target, multiple=_HEAD_SIZES[-1]),
        "draft": parse_size("--draft", draft, multiple=_HEAD_SIZES[-1]),
    }
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    plan = Plan(tokens=tokens, batch=batch, sequence=sequence, lr=lr, seed=seed, device=torch.device(device))
    documents = list(read_texts(texts, suffix or ()))
    train_texts = [text for path, text in documents if not is_for_validation(path)]
    validation_texts = [text for path, text in documents if is_for_validation(path)] or train_texts[-1:]
    if not train_texts:
        raise typer.BadParameter(f"{texts} holds no text to train on; give more documents")
    tokenizer = train_tokenizer(train_texts, vocab)
    train_ids = encode(tokenizer, train_texts)
    validation_ids = encode(tokenizer, validation_texts)
    say(
        f"{len(train_texts)} training documents, {len(train_ids) / 1e6:.1f}M tokens,"
        f" vocabulary of {len(tokenizer)} tokens"
    )
    report: dict[str, Any] = {"texts": len(documents), "tokens": len(train_ids), "vocab": len(tokenizer)}
    family = {}
    for role, size in sizes.items():
        model = make_model(size, tokenizer, context, seed=seed).to(plan.device)
        start = perf_counter()
        train_model(model, train_ids, plan, role)
        report[role] = {
            "size": str(size),
            "parameters": sum(weight.numel() for weight in model.parameters()),
            "validation_nats": round(validate(model, validation_ids, plan), 4),
            "seconds": round(perf_counter() - start, 1),
        }
        save(model, tokenizer, out / role)
        family[role] = model
    report["agreement"] = round(agreement(family["target"], family["draft"], validation_ids, plan), 4)
    typer.echo(json.dumps(report))


def make_model(size: Size, tokenizer: PreTrainedTokenizerFast, context: int, *, seed: int) -> LlamaForCausalLM:
    """Return a new Llama model.

    Args:
        size: layers and width. Attention heads have 64 dimensions, and three query heads share a key head, if the width
            allows it.
        tokenizer: its tokenizer.
        context: its context length.
        seed: seed of the initial weights.
    """
    layers, width = size
    dim = next(dim for dim in _HEAD_SIZES if width % dim == 0)
    heads = width // dim
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=(width * 8 // 3 + 31) // 32 * 32,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=next(keys for keys in (heads // 3, heads // 2, heads) if keys and heads % keys == 0),
        max_position_embeddings=context,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.convert_tokens_to_ids(END_OF_TEXT),
        eos_token_id=tokenizer.convert_tokens_to_ids(list(EOS_TOKENS)),
        pad_token_id=tokenizer.convert_tokens_to_ids(PAD),
    )
    return LlamaForCausalLM(config)


def train_model(model: LlamaForCausalLM, ids: torch.Tensor, plan: Plan, name: str) -> None:
    """Train a model with AdamW on random rows of `ids` [N]. `name` is printed with the progress.

    Raises:
        typer.BadParameter: the loss is not finite.
    """
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    vectors = [weight for weight in model.parameters() if weight.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=plan.lr, betas=(0.9, 0.95))
    steps = max(round(plan.tokens / (plan.batch * plan.sequence)), 1)
    generator = torch.Generator().manual_seed(plan.seed)
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = plan.lr * lr_factor(step / steps)
        loss = mean_loss(model, random_rows(ids, plan, generator), plan)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % max(steps // 20, 1) == 0 or step == steps - 1:
            nats = float(loss.detach())
            say(f"{name}: step {step + 1} of {steps}, loss {nats:.3f}")
            if not math.isfinite(nats):
                raise typer.BadParameter(f"the loss is {nats}; use a smaller --lr")


def mean_loss(model: LlamaForCausalLM, ids: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Return the mean cross entropy per token of rows [B, S + 1], in nats. Matrix products are bfloat16."""
    with torch.autocast(plan.device.type, torch.bfloat16):
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


def random_rows(ids: torch.Tensor, plan: Plan, generator: torch.Generator) -> torch.Tensor:
    """Return rows [B, S + 1] from random positions of `ids` [N]."""
    size = min(plan.sequence + 1, len(ids))
    starts = torch.randint(len(ids) - size + 1, (plan.batch,), generator=generator)
    return torch.stack([ids[start : start + size] for start in starts.tolist()]).long().to(plan.device)


def lr_factor(progress: float) -> float:
    """Return the learning rate as a share of its peak: a linear warm-up, then a cosine decay."""
    if progress < _WARMUP:
        return (progress + 1e-3) / (_WARMUP + 1e-3)
    return _FINAL_LR + (1 - _FINAL_LR) * (1 + math.cos(math.pi * (progress - _WARMUP) / (1 - _WARMUP))) / 2


@torch.no_grad()
def validate(model: LlamaForCausalLM, ids: torch.Tensor, plan: Plan) -> float:
    """Return the mean cross entropy per token of the validation documents, in nats."""
    model.eval()
    losses = [float(mean_loss(model, rows, plan)) for rows in _validation_batches(ids, plan)]
    return sum(losses) / len(losses)


@torch.no_grad()
def agreement(target: LlamaForCausalLM, draft: LlamaForCausalLM, ids: torch.Tensor, plan: Plan) -> float:
    """Return the mean over positions of the sum of min(p, q) over tokens.

    This is the acceptance of the first sampled draft token, with teacher forcing.
    """
    overlaps = []
    for rows in _validation_batches(ids, plan):
        p = target(input_ids=rows, use_cache=False).logits.float().softmax(-1)
        q = draft(input_ids=rows, use_cache=False).logits.float().softmax(-1)
        overlaps.append(float(torch.minimum(p, q).sum(-1).mean()))
    return sum(overlaps) / len(overlaps)


def _validation_batches(ids: torch.Tensor, plan: Plan) -> Iterator[torch.Tensor]:
    """Yield the same batches [B, S + 1] on every call."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(_VALIDATION_BATCHES):
        yield random_rows(ids, plan, generator)[:_VALIDATION_ROWS]


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a model in bfloat16 and its tokenizer as a Hugging Face folder."""
    eos_ids = tokenizer.convert_tokens_to_ids(list(EOS_TOKENS))
    model.generation_config = GenerationConfig(
        bos_token_id=eos_ids[0], eos_token_id=eos_ids, pad_token_id=model.config.pad_token_id
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    for file in folder.glob("*.safetensors"):
        shutil.copymode(folder / "config.json", file)  # safetensors makes files that only their owner can read
    tokenizer.save_pretrained(folder)
    say(f"{folder} is written")


def say(text: str) -> None:
    """Print a line on standard error."""
    typer.echo(text, err=True)


if __name__ == "__main__":
    typer.run(main)
