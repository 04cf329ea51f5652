"""Makes a hybrid of Mamba-2 and attention layers from a Llama model, with a co-trained MTP module.

python -m recipes.hybrid.train --data prompts.jsonl --out hybrid
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import torch
import typer
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoTokenizer, BambaForCausalLM, LlamaForCausalLM

from outrider.models.heads.formats.registry import format_of
from outrider.models.heads.modules.autoregressive import AutoregressiveHead
from outrider.models.heads.store import import_head
from outrider.models.loader.embedded import model_folder
from recipes.distillation import answer_prompts, cut_rows, divergence, random_batches, set_lr, timed_steps, update
from recipes.family.train import say
from recipes.hybrid.model import make_hybrid, make_mtp, mtp_logits

_MTP_WEIGHT = 0.3  # of the module's loss (Nemotron 3)
_NAMING = "mtp-qwen"  # names of the module's tensors in the checkpoint


def main(
    data: Annotated[Path, typer.Option(help="JSON lines with prompts, which the source answers.")],
    out: Annotated[Path, typer.Option(help="Folder for the hybrid, with its module in the same checkpoint.")],
    source: Annotated[str, typer.Option(help="Folder of the Llama model.")] = "@mini",
    start: Annotated[Path | None, typer.Option(help="Folder of a hybrid to go on with. Default: a new one.")] = None,
    module_from: Annotated[
        Path | None, typer.Option(help="Folder of an MTP module of the source to start from. Default: random weights.")
    ] = None,
    attention: Annotated[str, typer.Option(help="Layers that stay attention layers.")] = "1,4,7",
    state: Annotated[int, typer.Option(min=1, help="Numbers of the recurrent state per channel.")] = 64,
    answers: Annotated[int, typer.Option(min=1, help="Prompts that are answered.")] = 2000,
    sequence: Annotated[int, typer.Option(min=16, help="Tokens per row.")] = 256,
    batch: Annotated[int, typer.Option(min=1, help="Rows per step.")] = 8,
    layer_minutes: Annotated[
        float, typer.Option(min=0, help="Time for training each Mamba-2 layer on its own. 0: not at all.")
    ] = 10.0,
    minutes: Annotated[float, typer.Option(min=0.01, help="Time for training the whole model.")] = 20.0,
    lr: Annotated[float, typer.Option(help="Peak learning rate of new weights. Copied ones have a tenth.")] = 2e-3,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Train a hybrid on the source's answers. The last line of output is one JSON document."""
    folder = model_folder(source)
    teacher = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
    kept = _layers(attention, teacher.config.num_hidden_layers)
    rows = cut_rows(answer_prompts(folder, data, answers, sequence, seed), sequence)
    hybrid = make_hybrid(teacher, kept, state=state, seed=seed)
    module = make_mtp(teacher.config, seed)
    if start:
        hybrid.load_state_dict(BambaForCausalLM.from_pretrained(start, dtype=torch.float32).state_dict())
    if module_from:
        _copy_weights(import_head(module_from).weights, module)
    say(f"{len(rows)} rows of {sequence} tokens; {sum(w.numel() for w in hybrid.parameters()) / 1e6:.1f}M parameters")
    batches = random_batches(rows, batch, seed)
    layer_steps = train_layers(hybrid, teacher, batches, minutes=layer_minutes, lr=lr) if layer_minutes else 0
    steps, agreement = train_whole(hybrid, module, teacher, batches, minutes=minutes, lr=lr)
    save(hybrid, module, folder, out)
    typer.echo(
        json.dumps(
            {
                "rows": len(rows),
                "layer_steps": layer_steps,
                "steps": steps,
                "tokens": (layer_steps + steps) * batch * sequence,
                "agreement": round(agreement, 4),
            }
        )
    )


def _layers(text: str, count: int) -> list[int]:
    """Return the layers that --attention names, of a model with `count` layers."""
    numbers = text.split(",")
    if not all(number.strip().isdecimal() and int(number) < count for number in numbers):
        raise typer.BadParameter(f"--attention is {text!r}; use layers from 0 to {count - 1}, such as 1,4,7")
    return [int(number) for number in numbers]


def train_layers(
    hybrid: BambaForCausalLM, teacher: LlamaForCausalLM, batches: Iterator[torch.Tensor], *, minutes: float, lr: float
) -> int:
    """Train each Mamba-2 layer to give what the attention layer in its place gives. Returns the number of steps."""
    mixers = {i: layer.mamba for i, layer in enumerate(hybrid.model.layers) if hasattr(layer, "mamba")}
    seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for i in mixers:
        attention = teacher.model.layers[i].self_attn
        attention.register_forward_hook(
            lambda _, args, kwargs, output, i=i: seen.update({i: (kwargs["hidden_states"], output[0])}),
            with_kwargs=True,
        )
    optimizer = torch.optim.AdamW([w for mixer in mixers.values() for w in mixer.parameters()], lr=lr)
    hybrid.train()
    for step, progress in timed_steps(minutes):
        set_lr(optimizer, [lr], progress)
        with torch.no_grad():
            teacher.model(next(batches))
        losses = [functional.mse_loss(mixers[i](x), y) / y.square().mean() for i, (x, y) in seen.items()]
        update(optimizer, sum(losses))
        if step % 20 == 0:
            say(f"layers: step {step}, relative error {', '.join(f'{loss.item():.3f}' for loss in losses)}")
    for layer in teacher.model.layers:
        layer.self_attn._forward_hooks.clear()
    return step + 1


def train_whole(
    hybrid: BambaForCausalLM,
    module: AutoregressiveHead,
    teacher: LlamaForCausalLM,
    batches: Iterator[torch.Tensor],
    *,
    minutes: float,
    lr: float,
) -> tuple[int, float]:
    """Train all weights on the teacher's distributions, with the module.

    Returns:
        The number of steps, and the mean of the sum over tokens of min(p, q) in the last steps.
    """
    new = [weight for name, weight in hybrid.named_parameters() if ".mamba." in name]
    copied = [weight for name, weight in hybrid.named_parameters() if ".mamba." not in name]
    groups = [{"params": [*new, *module.parameters()]}, {"params": copied}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), weight_decay=0.01)
    agreements: list[float] = []
    for step, progress in timed_steps(minutes):
        set_lr(optimizer, [lr, lr / 10], progress)
        ids = next(batches)
        with torch.no_grad():
            expected = teacher(ids).logits.softmax(-1)
        with torch.autocast("cpu", torch.bfloat16):
            states = hybrid.model(ids, use_cache=False).last_hidden_state.float()
            own, agreement = divergence(hybrid.lm_head(states), expected)
            drafted = mtp_logits(module, hybrid, ids, states)
            ahead, _ = divergence(drafted[:, :-1], expected[:, 1:-1])
        update(optimizer, own + _MTP_WEIGHT * ahead)
        agreements.append(agreement)
        if step % 20 == 0:
            say(
                f"step {step}: divergence {own.item():.3f}, of the module {ahead.item():.3f}, agreement"
                f" {agreements[-1]:.3f}"
            )
    tail = agreements[-20:]
    return step + 1, sum(tail) / len(tail)


def save(hybrid: BambaForCausalLM, module: AutoregressiveHead, source: Path, out: Path) -> None:
    """Write the model in bfloat16 with the tensors of its module, and the source's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    hybrid.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    add_module(out, module)
    say(f"{out} is written")


def add_module(folder: Path, module: AutoregressiveHead) -> None:
    """Put the tensors of a module into the checkpoint of a folder, in place of those that are there."""
    weights = {name: weight.detach().contiguous() for name, weight in module.state_dict().items()}
    _, tensors = format_of(_NAMING).write(module.description, weights, None)
    file = folder / "model.safetensors"
    kept = {name: weight for name, weight in load_file(file).items() if not name.startswith("mtp.")}
    save_file(kept | {name: weight.to(torch.bfloat16) for name, weight in tensors.items()}, file, {"format": "pt"})


def _copy_weights(weights: Mapping[str, torch.Tensor], module: AutoregressiveHead) -> None:
    """Load the weights that the module has. A module with a reduced vocabulary has the same ones, and its tokens."""
    names = module.state_dict().keys()
    module.load_state_dict({name: weight.float() for name, weight in weights.items() if name in names})


if __name__ == "__main__":
    typer.run(main)
