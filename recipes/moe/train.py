"""Makes a mixture of experts from a dense Llama model, with the dense model as its teacher.

python -m recipes.moe.train --data prompts.jsonl --out moe
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch.nn import functional
from transformers import AutoTokenizer, LlamaForCausalLM, MixtralForCausalLM

from outrider.models.loader.embedded import model_folder
from recipes.distillation import answer_prompts, cut_rows, divergence, random_batches, set_lr, timed_steps, update
from recipes.family.train import save, say
from recipes.moe.model import make_moe, mlp_inputs
from recipes.moe.routing import balance_loss, router_logits, usage

_CLUSTERED_ROWS = 32  # rows whose hidden states are clustered
_HELD_OUT_ROWS = 16  # rows that are not trained on; they measure agreement and the use of the experts


def main(
    data: Annotated[Path, typer.Option(help="JSON lines with prompts, which the source answers.")],
    out: Annotated[Path, typer.Option(help="Folder for the mixture of experts.")],
    source: Annotated[str, typer.Option(help="Folder of the Llama model.")] = "@mini",
    experts: Annotated[int, typer.Option(min=2, help="Experts of a layer.")] = 8,
    top: Annotated[int, typer.Option(min=1, help="Experts of a token.")] = 2,
    width: Annotated[
        int, typer.Option(min=0, help="Channels of an expert, a multiple of 16. 0: a quarter of the dense MLP's.")
    ] = 0,
    answers: Annotated[int, typer.Option(min=1, help="Prompts that are answered.")] = 2000,
    sequence: Annotated[int, typer.Option(min=16, help="Tokens per row.")] = 256,
    batch: Annotated[int, typer.Option(min=1, help="Rows per step.")] = 8,
    layer_minutes: Annotated[
        float, typer.Option(min=0.01, help="Time for training each block of experts on its own.")
    ] = 5.0,
    minutes: Annotated[float, typer.Option(min=0.01, help="Time for training the whole model.")] = 15.0,
    lr: Annotated[float, typer.Option(help="Peak learning rate of the experts. Other weights have a tenth.")] = 1e-3,
    balance: Annotated[float, typer.Option(min=0, help="Weight of the loss that balances the experts.")] = 0.02,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Train a mixture of experts on the source's answers. The last line of output is one JSON document."""
    if top > experts:
        raise typer.BadParameter(f"--top {top} is above --experts {experts}; use a smaller --top")
    folder = model_folder(source)
    teacher = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
    channels = teacher.config.intermediate_size
    width = width or channels // 64 * 16
    if width % 16 or not 16 <= width <= channels:
        raise typer.BadParameter(f"--width is {width}; use a multiple of 16 from 16 to {channels}")
    rows = cut_rows(answer_prompts(folder, data, answers, sequence, seed), sequence)
    if len(rows) <= _HELD_OUT_ROWS:
        raise typer.BadParameter(f"the answers make {len(rows)} rows; give more --answers, or a shorter --sequence")
    held_out, rows = rows[:_HELD_OUT_ROWS], rows[_HELD_OUT_ROWS:]
    moe = make_moe(teacher, rows[:_CLUSTERED_ROWS], experts=experts, top=top, width=width, seed=seed)
    moe.set_experts_implementation("eager")  # on a CPU it trains faster than grouped matrix products
    say(f"{len(rows)} rows of {sequence} tokens; {sum(w.numel() for w in moe.parameters()) / 1e6:.1f}M parameters")
    batches = random_batches(rows, batch, seed)
    layer_steps = train_layers(moe, teacher, batches, minutes=layer_minutes, lr=lr, balance=balance)
    steps = train_whole(moe, teacher, batches, minutes=minutes, lr=lr, balance=balance)
    report: dict[str, Any] = {
        "parameters": sum(weight.numel() for weight in moe.parameters()),
        "rows": len(rows),
        "layer_steps": layer_steps,
        "steps": steps,
        "tokens": (layer_steps + steps) * batch * sequence,
        "agreement": round(agreement(moe, teacher, held_out), 4),
        "usage": usage(moe, held_out),
    }
    save(moe, AutoTokenizer.from_pretrained(folder), out)
    typer.echo(json.dumps(report))


def train_layers(
    moe: MixtralForCausalLM,
    teacher: LlamaForCausalLM,
    batches: Iterator[torch.Tensor],
    *,
    minutes: float,
    lr: float,
    balance: float,
) -> int:
    """Train each block of experts to give what the dense MLP in its place gives. Returns the number of steps."""
    blocks = [layer.mlp for layer in moe.model.layers]
    dense = [layer.mlp for layer in teacher.model.layers]
    optimizer = torch.optim.AdamW([w for block in blocks for w in block.parameters()], lr=lr)
    for step, progress in timed_steps(minutes):
        set_lr(optimizer, [lr], progress)
        inputs = mlp_inputs(teacher, next(batches))
        with router_logits(moe) as seen:
            errors = []
            for block, mlp, x in zip(blocks, dense, inputs, strict=True):
                expected = mlp(x)
                with torch.autocast("cpu", torch.bfloat16):
                    given = block(x[None])[0].float()
                errors.append(functional.mse_loss(given, expected) / expected.square().mean())
        update(optimizer, sum(errors) + balance * balance_loss(seen, moe.config.num_experts_per_tok))
        if step % 20 == 0:
            say(f"layers: step {step}, relative error {', '.join(f'{float(error.detach()):.3f}' for error in errors)}")
    return step + 1


def train_whole(
    moe: MixtralForCausalLM,
    teacher: LlamaForCausalLM,
    batches: Iterator[torch.Tensor],
    *,
    minutes: float,
    lr: float,
    balance: float,
) -> int:
    """Train all weights on the teacher's distributions. Returns the number of steps."""
    routed = [weight for name, weight in moe.named_parameters() if ".mlp." in name]
    copied = [weight for name, weight in moe.named_parameters() if ".mlp." not in name]
    optimizer = torch.optim.AdamW([{"params": routed}, {"params": copied}], lr=lr, betas=(0.9, 0.95), weight_decay=0.01)
    for step, progress in timed_steps(minutes):
        set_lr(optimizer, [lr, lr / 10], progress)
        ids = next(batches)
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                expected = teacher(ids, use_cache=False).logits.float().softmax(-1)
            with router_logits(moe) as seen:
                loss, _ = divergence(moe(ids, use_cache=False).logits, expected)
        update(optimizer, loss + balance * balance_loss(seen, moe.config.num_experts_per_tok))
        if step % 20 == 0:
            say(f"step {step}: divergence {float(loss.detach()):.3f}")
    return step + 1


@torch.no_grad()
def agreement(moe: MixtralForCausalLM, teacher: LlamaForCausalLM, rows: torch.Tensor) -> float:
    """Return the mean over tokens of the sum over the vocabulary of min(p, q)."""
    overlaps = []
    for row in rows:
        p, q = (model(row[None], use_cache=False).logits.softmax(-1) for model in (moe, teacher))
        overlaps.append(float(torch.minimum(p, q).sum(-1).mean()))
    return sum(overlaps) / len(overlaps)


if __name__ == "__main__":
    typer.run(main)
