"""Compare greedy texts of a GGUF file with those of llama.cpp, and state the margin at each difference.

llama.cpp and Outrider round differently, so their texts may differ where two tokens have nearly equal logits. For each
prompt, Outrider scores the text of llama.cpp in one pass. The margin is the difference between the largest logit and
that of the token that llama.cpp chose.

The Python of llama.cpp needs the package llama-cpp-python.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from outrider import LLM, SamplingParams
from outrider.core import tree
from outrider.core.types import Batch, SequenceState
from outrider.measure.prompts import Prompt, read_prompts

# Reads {"prompts": [[token id, ...], ...], "max_tokens": n, "end": [...]} and prints the texts as token ids.
WITNESS = """
import json, sys
from llama_cpp import Llama
asked = json.load(sys.stdin)
model = Llama(sys.argv[1], n_ctx=2048, verbose=False, n_threads=int(sys.argv[2]))
texts = []
for prompt in asked["prompts"]:
    model.reset()
    text = []
    for token in model.generate(prompt, temp=0, top_k=1, repeat_penalty=1.0):
        text.append(token)
        if token in asked["end"] or len(text) >= asked["max_tokens"]:
            break
    texts.append(text)
tokenized = [model.tokenize(text.encode(), add_bos=False, special=True) for text in asked["texts"]]
print(json.dumps({"texts": texts, "tokenized": tokenized}))
"""


def main(
    file: Annotated[Path, typer.Argument(help="The GGUF file.")],
    python: Annotated[str, typer.Option(help="The Python that has llama-cpp-python.")],
    prompts: Annotated[str | None, typer.Option(metavar="FILE", help="JSON lines. Default: an embedded set.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Number of prompts.")] = 50,
    max_tokens: Annotated[int, typer.Option(min=1)] = 64,
    threads: Annotated[int, typer.Option(min=1)] = 2,
) -> None:
    """Print each difference, and one JSON document."""
    llm = LLM(file, proposer="none", k=0, max_num_seqs=8, max_model_len=2048, threads=threads)
    chosen = read_prompts(prompts)[:count]
    texts = [_text(llm, prompt) for prompt in chosen]
    ids = [llm.encode(text) for text in texts]
    asked = {"prompts": ids, "texts": texts, "max_tokens": max_tokens, "end": sorted(llm.parts.end_ids)}
    done = subprocess.run(
        [python, "-c", WITNESS, str(file), str(threads)],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=True,
    )
    answer = json.loads(done.stdout.splitlines()[-1])
    other_ids = sum(list(own) != other for own, other in zip(ids, answer["tokenized"], strict=True))
    own_texts = [each.token_ids for each in llm.generate(ids, SamplingParams(max_tokens=max_tokens))]
    differences = [
        found
        for at, (prompt, own, other) in enumerate(zip(ids, own_texts, answer["texts"], strict=True))
        if (found := _difference(llm, at, prompt, own, other))
    ]
    for found in differences:
        print("prompt {prompt}, token {position}: margin {margin:.3f} logits, {sigmas:.2f} deviations".format(**found))
    document = {
        "file": file.name,
        "prompts": len(ids),
        "tokens": sum(map(len, answer["texts"])),
        "equal": len(ids) - len(differences),
        "tokenized_differently": other_ids,
        "differences": differences,
        "kernels": llm.parts.target.kernels,
    }
    print(json.dumps(document))


def _text(llm: LLM, prompt: Prompt) -> str:
    messages = prompt.messages or [{"role": "user", "content": prompt.prompt}]
    text: str = llm.parts.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return text


def _difference(llm: LLM, at: int, prompt: tuple[int, ...], own: Any, other: list[int]) -> dict[str, Any] | None:
    """Return the first difference between two texts, with the margin of Outrider's logits there."""
    shared = next((i for i, (a, b) in enumerate(zip(own, other, strict=False)) if a != b), None)
    if shared is None:
        return None
    logits = _logits(llm, (*prompt, *own[:shared]))
    margin = float(logits[own[shared]] - logits[other[shared]])
    return {
        "prompt": at,
        "position": shared,
        "own": own[shared],
        "llama.cpp": other[shared],
        "margin": margin,
        "sigmas": margin / float(logits.std()),
    }


@torch.inference_mode()
def _logits(llm: LLM, text: tuple[int, ...]) -> torch.Tensor:
    """Return the logits [V] after a text."""
    target = llm.parts.target
    target.cache.admit(0, text)
    batch = Batch(seqs=(SequenceState.of(text),), start=(0,), feed=(text,), draft_budget=(0,))
    logits = target.score(batch, tree.empty(1, target.device)).logits[0, 0].float().clone()
    target.cache.release(0)
    return logits


if __name__ == "__main__":
    typer.run(main)
