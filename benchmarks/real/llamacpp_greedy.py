"""Compare greedy texts of a GGUF file with those of llama.cpp, and state the margin at each difference.

llama.cpp and Outrider round differently, so their texts may differ where two tokens have nearly equal logits. For each
prompt, Outrider scores the text of llama.cpp in one pass. The margin is the difference between the largest logit and
that of the token that llama.cpp chose.

python benchmarks/real/llamacpp_greedy.py MODEL.gguf --server LLAMA_SERVER
python benchmarks/real/llamacpp_greedy.py MODEL.gguf --server LLAMA_SERVER --quantize LLAMA_QUANTIZE

With --quantize, llama.cpp's own program writes the file, whose weights have 16 or 32 bits, in each type that the native
kernels multiply, and each of these files is compared. Where rows are no multiple of 256, most have another type; the
output names the types of each file.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from outrider import LLM, SamplingParams
from outrider.core import tree
from outrider.core.prompts import Prompt, read_prompts
from outrider.core.types import Batch, DraftBudget, SequenceState
from outrider.models.loader.gguf.file import read_gguf

sys.path.append(str(Path(__file__).parents[1] / "peers"))
from llama_server import LlamaServer, greedy_request

TYPES = (
    "F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q2_K Q3_K_S Q3_K_M Q3_K_L Q4_K_S Q4_K_M Q5_K_S Q5_K_M Q6_K IQ4_NL IQ4_XS MXFP4"
)
_BY_TENSOR = ("MXFP4", "NVFP4")  # types without a name of their own: of all layers in a file of Q8_0
_NEAR_TIE = 0.2  # standard deviations of the logits; a smaller margin is explained by rounding


def main(
    file: Annotated[Path, typer.Argument(help="The GGUF file.")],
    server: Annotated[str, typer.Option(help="llama.cpp's llama-server.")],
    quantize: Annotated[str | None, typer.Option(help="llama.cpp's llama-quantize.")] = None,
    types: Annotated[str, typer.Option(help="The types that it writes.")] = TYPES,
    prompts: Annotated[str | None, typer.Option(metavar="FILE", help="JSON lines. Default: an embedded set.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Number of prompts.")] = 50,
    max_tokens: Annotated[int, typer.Option(min=1)] = 64,
    threads: Annotated[int, typer.Option(min=1)] = 2,
) -> None:
    """Print each difference and a line for each file, and one JSON document."""
    every = read_prompts(prompts)
    chosen = every[:: max(len(every) // count, 1)][:count]  # of all categories
    results = []
    for each in _files(file, quantize, types.split()):
        result = _compare(each, server, chosen, max_tokens, threads)
        results.append(result)
        for found in result["differences"]:
            print("  prompt {prompt}, token {position}: margin {margin:.3f}, {sigmas:.2f} deviations".format(**found))
        print(
            "{file}: {equal} of {prompts} texts equal, {ties} near-ties, {beyond} beyond, largest margin {largest:.2f}"
            " deviations, {types}".format(**result),
            flush=True,
        )
    print(json.dumps({"benchmark": "greedy texts of llama.cpp", "results": results}))


def _files(file: Path, quantize: str | None, types: Sequence[str]) -> Iterator[Path]:
    """Yield the file, or the files that llama-quantize writes of it. Each is there until the next one is asked for."""
    if quantize is None:
        yield file
        return
    for type in types:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / f"{file.stem}-{type}.gguf"
            options = [file, out, type]
            if type in _BY_TENSOR:
                attention, mlp = (f"{part}={type.lower()}" for part in ("attn_", "ffn_"))
                options = ["--tensor-type", attention, "--tensor-type", mlp, file, out, "Q8_0"]
            subprocess.run([quantize, *options], check=True, capture_output=True)
            yield out


def _compare(file: Path, server: str, chosen: Sequence[Prompt], max_tokens: int, threads: int) -> dict[str, Any]:
    """Return the differences between the texts of Outrider and llama.cpp."""
    llm = LLM(file, proposer="none", k=0, max_num_seqs=8, max_model_len=2048, threads=threads)
    texts = [_text(llm, prompt) for prompt in chosen]
    ids = [llm.encode(text) for text in texts]
    options = ["--model", str(file), "--ctx-size", "2048", "--threads", str(threads), "--cache-ram", "0"]
    running = LlamaServer(server, options)
    try:
        running.wait_until_ready()
        other_ids = sum(list(own) != _tokenized(running, text) for own, text in zip(ids, texts, strict=True))
        other_texts = [_generated(running, prompt, max_tokens) for prompt in ids]
    finally:
        running.close()
    own_texts = [each.token_ids for each in llm.generate(ids, SamplingParams(max_tokens=max_tokens))]
    differences = [
        found
        for at, (prompt, own, other) in enumerate(zip(ids, own_texts, other_texts, strict=True))
        if (found := _difference(llm, at, prompt, own, other))
    ]
    ties = sum(found["sigmas"] < _NEAR_TIE for found in differences)
    return {
        "file": file.name,
        "prompts": len(ids),
        "tokens": sum(map(len, other_texts)),
        "equal": len(ids) - len(differences),
        "ties": ties,
        "beyond": len(differences) - ties,
        "largest": max((found["sigmas"] for found in differences), default=0.0),
        "types": ", ".join(read_gguf(file).types),
        "tokenized_differently": other_ids,
        "differences": differences,
        "kernels": llm.parts.target.kernels,
    }


def _tokenized(running: LlamaServer, text: str) -> list[int]:
    body = {"content": text, "add_special": False, "parse_special": True}
    _, answer = running.request("POST", "/tokenize", body)
    return list(answer["tokens"])


def _generated(running: LlamaServer, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Return the greedy continuation, with the token that ends it."""
    status, answer = running.request("POST", "/completion", greedy_request(prompt, max_tokens))
    if status != HTTPStatus.OK:
        raise RuntimeError(f"llama-server answered {status}: {answer}")
    return list(answer["tokens"])


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
    batch = Batch(seqs=(SequenceState.of(text),), start=(0,), feed=(text,), budget=DraftBudget((0,)))
    logits = target.score(batch, tree.empty(1, target.device)).logits[0, 0].float().clone()
    target.cache.release(0)
    return logits


if __name__ == "__main__":
    typer.run(main)
