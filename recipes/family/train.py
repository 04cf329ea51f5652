"""From a folder of texts to a family: a tokenizer, a small target, and a smaller draft of the same kind.

python -m recipes.family.train TEXTS --out FAMILY
"""

from __future__ import annotations

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

from recipes.family.corpus import ENDS, PAD, TEXT, encode, is_aside, read_texts, train_tokenizer

_WARM, _LAST = 0.05, 0.1  # share of the steps in which the rate rises; what is left of it at the end
_CHECKED = 16  # batches of validation


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a model is trained."""

    tokens: float  # in all
    batch: int  # rows
    sequence: int  # tokens of a row
    lr: float
    seed: int
    device: torch.device


def main(
    texts: Annotated[Path, typer.Argument(help="A folder; every file below it that is UTF-8 text is a document.")],
    out: Annotated[Path, typer.Option(help="Folder for target/ and draft/.")],
    suffix: Annotated[list[str] | None, typer.Option(help="Take files of this suffix alone. Repeatable.")] = None,
    vocab: Annotated[int, typer.Option(min=300, help="Tokens.")] = 12288,
    target: Annotated[str, typer.Option(metavar="LAYERSxWIDTH")] = "8x384",
    draft: Annotated[str, typer.Option(metavar="LAYERSxWIDTH")] = "2x128",
    tokens: Annotated[float, typer.Option(help="That the target sees; the draft sees as many.")] = 100e6,
    batch: Annotated[int, typer.Option(min=1, help="Rows of a step.")] = 32,
    sequence: Annotated[int, typer.Option(min=8, help="Tokens of a row.")] = 1024,
    context: Annotated[int, typer.Option(min=8, help="Tokens that the models take.")] = 2048,
    lr: Annotated[float, typer.Option(help="Learning rate at its height.")] = 1.5e-3,
    seed: Annotated[int, typer.Option()] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
) -> None:
    """Train a tokenizer, a target and a draft. The last line of output is one JSON document."""
    where = torch.device(device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu")
    plan = Plan(tokens=tokens, batch=batch, sequence=sequence, lr=lr, seed=seed, device=where)
    found = list(read_texts(texts, suffix or ()))
    learned = [text for path, text in found if not is_aside(path)]
    aside = [text for path, text in found if is_aside(path)] or learned[-1:]
    if not learned:
        raise typer.BadParameter(f"{texts} holds no text to learn from")
    tokenizer = train_tokenizer(learned, vocab)
    data, held = (encode(tokenizer, some) for some in (learned, aside))
    say(f"{len(learned)} texts, {len(data) / 1e6:.1f}M tokens of a vocabulary of {len(tokenizer)}")
    report: dict[str, Any] = {"texts": len(found), "tokens": len(data), "vocab": len(tokenizer)}
    family = {}
    for role, size in (("target", target), ("draft", draft)):
        model = make_model(size, tokenizer, context, seed=seed).to(where)
        began = perf_counter()
        train_model(model, data, plan, role)
        report[role] = {
            "size": size,
            "parameters": sum(weight.numel() for weight in model.parameters()),
            "validation_nats": round(validate(model, held, plan), 4),
            "seconds": round(perf_counter() - began, 1),
        }
        save(model, tokenizer, out / role)
        family[role] = model
    report["agreement"] = round(agreement(family["target"], family["draft"], held, plan), 4)
    typer.echo(json.dumps(report))


def make_model(size: str, tokenizer: PreTrainedTokenizerFast, context: int, *, seed: int) -> LlamaForCausalLM:
    """A fresh Llama of so many layers and such a width: heads of 64, three of them to a key head where that goes."""
    layers, width = (int(number) for number in size.split("x"))
    dim = next(dim for dim in (64, 32, 16) if width % dim == 0)
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
        bos_token_id=tokenizer.convert_tokens_to_ids(TEXT),
        eos_token_id=tokenizer.convert_tokens_to_ids(list(ENDS)),
        pad_token_id=tokenizer.convert_tokens_to_ids(PAD),
    )
    return LlamaForCausalLM(config)


def train_model(model: LlamaForCausalLM, data: torch.Tensor, plan: Plan, name: str) -> None:
    """AdamW over random rows of the data, in bfloat16 where a product allows it."""
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    rest = [weight for weight in model.parameters() if weight.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=plan.lr, betas=(0.9, 0.95))
    steps = max(round(plan.tokens / (plan.batch * plan.sequence)), 1)
    chance = torch.Generator().manual_seed(plan.seed)
    model.train()
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = plan.lr * rate(step / steps)
        loss = loss_of(model, rows(data, plan, chance), plan)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        if step % max(steps // 20, 1) == 0 or step == steps - 1:
            nats = float(loss.detach())
            say(f"{name}: step {step + 1} of {steps}, loss {nats:.3f}")
            if not math.isfinite(nats):
                raise typer.BadParameter("the loss is not a number; use a smaller --lr")


def loss_of(model: LlamaForCausalLM, ids: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Mean nats of a token in rows [B, S + 1]."""
    with torch.autocast(plan.device.type, torch.bfloat16):
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


def rows(data: torch.Tensor, plan: Plan, chance: torch.Generator) -> torch.Tensor:
    """Pieces [B, S + 1] of the data, from anywhere."""
    size = min(plan.sequence + 1, len(data))
    begins = torch.randint(len(data) - size + 1, (plan.batch,), generator=chance)
    return torch.stack([data[begin : begin + size] for begin in begins.tolist()]).long().to(plan.device)


def rate(progress: float) -> float:
    """The learning rate's share of its height: it rises, and falls as a cosine does."""
    if progress < _WARM:
        return (progress + 1e-3) / (_WARM + 1e-3)
    return _LAST + (1 - _LAST) * (1 + math.cos(math.pi * (progress - _WARM) / (1 - _WARM))) / 2


@torch.no_grad()
def validate(model: LlamaForCausalLM, held: torch.Tensor, plan: Plan) -> float:
    """Mean nats of a token in texts that were kept aside."""
    model.eval()
    losses = [float(loss_of(model, ids, plan)) for ids in _checks(held, plan)]
    return sum(losses) / len(losses)


@torch.no_grad()
def agreement(target: LlamaForCausalLM, draft: LlamaForCausalLM, held: torch.Tensor, plan: Plan) -> float:
    """The sum over tokens of min(p, q): the acceptance of a first guess that is drawn, teacher forced."""
    shares = []
    for ids in _checks(held, plan):
        p, q = (model(input_ids=ids, use_cache=False).logits.float().softmax(-1) for model in (target, draft))
        shares.append(float(torch.minimum(p, q).sum(-1).mean()))
    return sum(shares) / len(shares)


def _checks(held: torch.Tensor, plan: Plan) -> Iterator[torch.Tensor]:
    chance = torch.Generator().manual_seed(1)
    for _ in range(_CHECKED):
        yield rows(held, plan, chance)[:4]


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a model in bfloat16, ready to be a target or a draft."""
    ids = tokenizer.convert_tokens_to_ids(list(ENDS))
    model.generation_config = GenerationConfig(
        bos_token_id=ids[0], eos_token_id=ids, pad_token_id=model.config.pad_token_id
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    for file in folder.glob("*.safetensors"):
        shutil.copymode(folder / "config.json", file)  # safetensors lets nobody but the owner read what it writes
    tokenizer.save_pretrained(folder)
    say(f"{folder} is written")


def say(text: str) -> None:
    typer.echo(text, err=True)


if __name__ == "__main__":
    typer.run(main)
