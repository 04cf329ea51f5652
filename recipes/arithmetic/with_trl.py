"""Train a model to add with `GRPOTrainer` of TRL, whose rollouts come from Outrider.

pip install "outrider[rl]"
python -m recipes.arithmetic.with_trl --steps 30 --out adder-trl
"""

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from outrider.models.loader.embedded import embedded
from outrider.train.model.draft_model import load_trainable
from outrider.train.rl import RolloutEngine, TRLRollouts
from recipes.arithmetic.problems import accuracy, as_problems, is_right, pairs_below, question, split


def right_sum(completions: list[Any], answer: list[int], **_: Any) -> list[float]:
    """Return 1 for each completion with the right sum, and else 0."""
    texts = [completion[0]["content"] for completion in completions]
    return [float(is_right(text, total)) for text, total in zip(texts, answer, strict=True)]


def main(
    out: Annotated[Path, typer.Option(help="Folder of the trained model.")],
    model: Annotated[Path | None, typer.Option(help="Folder of the policy. Default: the embedded target.")] = None,
    proposer: Annotated[str, typer.Option(help="none: without speculation.")] = "group",
    k: Annotated[int, typer.Option(help="Draft tokens per round.")] = 4,
    steps: int = 30,
    samples: Annotated[int, typer.Option(help="Answers to each problem.")] = 16,
    max_tokens: Annotated[int, typer.Option(help="Tokens of an answer.")] = 12,
    limit: Annotated[int, typer.Option(min=3, help="The numbers are below it.")] = 10,
    lr: float = 1e-5,
) -> None:
    """Train a model to add."""
    folder = model or embedded("mini")
    engine = RolloutEngine.load(folder, proposer=proposer, k=k, dtype="float32", max_num_seqs=64, max_model_len=128)
    trained, held_out = split(pairs_below(limit))
    rows = {
        "prompt": [[{"role": "user", "content": question(a, b)}] for a, b in trained],
        "answer": [a + b for a, b in trained],
    }
    settings = GRPOConfig(
        output_dir=str(out),
        max_steps=steps,
        per_device_train_batch_size=4 * samples,
        num_generations=samples,
        max_completion_length=max_tokens,
        learning_rate=lr,
        lr_scheduler_type="constant",
        use_cpu=True,
        bf16=False,
        report_to=[],
        logging_steps=1,
        save_strategy="no",
    )
    rollouts = TRLRollouts(engine)
    trainer = GRPOTrainer(
        model=load_trainable(folder, torch.device("cpu")).model,
        reward_funcs=right_sum,
        args=settings,
        train_dataset=Dataset.from_dict(rows),
        processing_class=AutoTokenizer.from_pretrained(folder),
        rollout_func=rollouts,
    )
    before = accuracy(engine, as_problems(held_out, engine), max_tokens)
    trainer.train()
    trainer.save_model()
    engine.update_weights(trainer.model.state_dict())
    after = accuracy(engine, as_problems(held_out, engine), max_tokens)
    print(f"greedy accuracy on held-out sums: {before:.2f} before, {after:.2f} after")


if __name__ == "__main__":
    typer.run(main)
