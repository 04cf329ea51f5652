"""The command `inspect`: describe a draft head, and check it against its target."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from outrider.core.params import SamplingParams
from outrider.errors import OutriderError
from outrider.heads.description import Body, DraftBlock, Feedback, FuseNorm, FusionPoint, HeadDescription, Kind
from outrider.heads.files import read_target_info
from outrider.heads.formats.base import Trained, UnusedTensors
from outrider.heads.formats.registry import find
from outrider.llm import LLM
from outrider.loader.embedded import model_folder
from outrider.tools.convert import checked

ENOUGH = 0.4  # below this agreement, a draft is read incorrectly or hardly trained
_TOKENS = 32  # output tokens per prompt
_PROMPTS = (
    "def area(width, height):\n",
    "The river rises in the mountains and",
    "Once upon a time there was a",
    "To bake bread you need flour, water,",
    "import os\nimport sys\n\n",
    "The first thing to know about the weather is",
)
_NAMES = {
    Kind.EAGLE: "EAGLE-1 or 2: the target's last state, carried on by decoder layers",
    Kind.EAGLE3: "EAGLE-3: states of several layers, fused and carried on by decoder layers",
    Kind.PEAGLE: "P-EAGLE: states of several layers, fused, and masks behind the text, all in one pass",
    Kind.MTP: "a module for multi-token prediction",
    Kind.MEDUSA: "Medusa: heads that guess independently of each other",
    Kind.HYDRA: "Hydra: heads that read the guesses before them",
    Kind.DFLASH: "DFlash: a block filled in by one pass",
    Kind.DSPARK: "DSpark: a block filled in by one pass and corrected token by token",
    Kind.KV_SHARING: "kv-sharing: layers that attend to the keys and values of the target, as Gemma 4 assistants do",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """How often the first draft token equals the target's next token, in texts of the target."""

    agreement: float
    draft_tokens: int
    checklist: tuple[str, ...]  # what to check if the agreement is low


def probe(folder: str | Path, target: str, *, dtype: str = "auto") -> Probe:
    """Let the target generate greedily with one draft token per round, and count the accepted ones.

    Raises:
        OutriderError: a model cannot be loaded, or the draft does not belong to the target.
    """
    llm = LLM(
        target,
        proposer=f"draft:{folder}",
        k=1,
        verifier="walk",
        dtype=dtype,
        max_num_seqs=len(_PROMPTS),
        prefix_caching=False,
    )
    llm.generate(list(_PROMPTS), SamplingParams(temperature=0, max_tokens=_TOKENS, ignore_eos=True))
    stats = llm.stats
    if not stats.reached or not stats.reached[0]:
        raise OutriderError(f"{folder} made no guess; give a target that goes on with a text")
    agreement = stats.accepted[0] / stats.reached[0]
    low = agreement < ENOUGH
    look = checklist(checked(folder, read_target_info(model_folder(target))).description) if low else ()
    return Probe(agreement=agreement, draft_tokens=stats.reached[0], checklist=look)


def checklist(it: HeadDescription) -> tuple[str, ...]:
    """Return what may be wrong with a draft head of the right shape, likeliest first."""
    layers = ", ".join(map(str, it.aux_states.layers))
    out = [
        f"layer index: the head reads the outputs of layers {layers}, counted from 0; formats differ by 1"
        " (docs/reference/formats.md)"
    ]
    norm = "after" if it.aux_states.final else "before"
    out.append(f"norm: the last of these states is taken {norm} the target's final norm, {_final(it)}")
    if it.body:
        scaled = f"scaled by {it.body.rope.scaling}" if it.body.rope else "not scaled"
        out.append(
            f"rotary: theta is {it.body.theta:g}, positions are {scaled}, and {it.body.rotary:.0%} of a head is turned,"
            " in halves rather than in pairs of neighbours"
        )
    if it.input_fusion:
        first = "the embedding first" if it.input_fusion.embedding_first else "the state first"
        on = (
            "masks have a state of their own" if it.masks else f"what goes on behind a guess is the {it.feedback} state"
        )
        out.append(f"concat order: {first}; {on}")
    if it.block:
        first = "guesses the token behind it" if it.block.sample_from_anchor else "guesses nothing"
        out.append(f"sample_from_anchor: the column of the text's last token {first}")
    out.append("target: a draft of the same shapes that was trained on another model, or on another tuning of this one")
    return tuple(out)


def run_inspect(folder: str, *, target: str | None = None, as_json: bool = False) -> dict[str, Any]:
    """Describe a draft head. With a target, measure how often its first draft token is right.

    Args:
        folder: the draft.
        target: the folder of its target.
        as_json: print the JSON document to standard output, and everything else to standard error.

    Returns:
        The document.

    Raises:
        OutriderError: the folder is not a draft head, is damaged, or belongs to another target.
    """
    say, place = ProgressPrinter(Console(stderr=as_json)), model_folder(folder)
    try:
        document = _told(checked(place, read_target_info(model_folder(target)) if target else None), say)
    except UnusedTensors as reason:
        document = _unowned(place, reason, say)
    if target:
        seen = probe(place, target)
        say(
            "first guess",
            f"right in {seen.agreement:.0%} of {seen.draft_tokens} places, in texts that the target wrote",
        )
        for line in seen.checklist:
            say("check", line)
        document["probe"] = {
            "agreement": seen.agreement,
            "guesses": seen.draft_tokens,
            "checklist": list(seen.checklist),
        }
    if as_json:
        print(json.dumps(document))
    return document


class ProgressPrinter:
    """Prints lines with a name and a text."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def __call__(self, name: str, text: str) -> None:
        self._console.print(f"{name:12}{text}", highlight=False, markup=False, soft_wrap=True)


def _told(found: Trained, say: ProgressPrinter) -> dict[str, Any]:
    say("format", found.format)
    for name, text in describe(found.description):
        say(name, text)
    sizes = _sizes(value for name, value in found.weights.items() if name != "ids")
    say("weights", _weighed(sizes))
    for why, names in found.ignored.items():
        say("left aside", f"{len(names)} tensors ({why}): {names[0]}")
    left = {why: list(names) for why, names in found.ignored.items()}
    return {"format": found.format, **sizes, "left_aside": left, "description": found.description.to_json()}


def _unowned(folder: Path, reason: UnusedTensors, say: ProgressPrinter) -> dict[str, Any]:
    """Describe a draft head that can only be read with its target."""
    found = find(folder)
    assert found is not None
    at = found.format.module(found.stored) or ""
    sizes = _sizes(value for name, value in found.stored.items() if name.startswith(at))
    say("format", found.format.title)
    say("weights", _weighed(sizes))
    say("reads", f"unknown: {reason}")
    return {"format": found.format.title, **sizes, "unknown": str(reason)}


def _sizes(weights: Iterable[torch.Tensor]) -> dict[str, int]:
    counts = [(weight.numel(), weight.nbytes) for weight in weights]
    return {"parameters": sum(count for count, _ in counts), "bytes": sum(size for _, size in counts)}


def _weighed(sizes: dict[str, int]) -> str:
    return f"{sizes['parameters'] / 1e6:.2f}M parameters, {sizes['bytes'] / 1e6:.1f} MB"


def describe(it: HeadDescription) -> list[tuple[str, str]]:
    """Return a description as pairs of name and text."""
    many = "s" if len(it.aux_states.layers) > 1 else ""
    layers = ", ".join(map(str, it.aux_states.layers))
    target = f"a target with {it.target_layers} layers, {it.target_hidden} wide, {it.vocab} tokens"
    out = [
        ("draft", _NAMES.get(it.kind, str(it.kind))),
        ("reads", f"output{many} of layer{many} {layers}, counted from 0, of {target}"),
    ]
    if it.aux_states.final:
        out.append(("", "the last of them after the target's final norm"))
    if it.aux_states.norm is not FuseNorm.NONE:
        out.append(
            ("", "each normed before they are fused" if it.aux_states.norm is FuseNorm.EACH else "normed all at once")
        )
    for view in sorted(set(it.shared_kv), key=lambda view: view.layer):
        far = f"the last {view.window} entries" if view.window else "all entries"
        out.append(("looks at", f"{far} of layer {view.layer}: {view.key_heads} key heads of {view.dim}"))
    if it.input_fusion:
        out.append(("joins", _joined(it)))
    if it.body:
        out.append(("layers", _layers(it.body)))
    if it.modules > 1:
        out.append(("modules", f"{it.modules}, each with such layers and for one guess"))
    if it.stack:
        own = "the target's output layer" if it.stack.shared_head else "output layers of their own"
        own = "one output layer of their own" if it.stack.one_head else own
        out.append(("heads", f"{it.stack.heads} with {it.stack.layers} residual blocks each, and {own}"))
    if it.masks:
        out.append(
            ("one pass", f"makes {it.masks.draft_tokens} guesses; masks have token {it.masks.token}'s embedding")
        )
    if it.block:
        out.append(("block", _filled_in(it.block)))
    elif it.body and not it.parallel_draft_tokens:
        out.append(("carries on", "its normed output" if it.feedback is Feedback.NORMED else "its output as it is"))
    tables = [name for name, has in (("embeddings", it.own_embedding), ("an output layer", it.own_lm_head)) if has]
    out.append(
        ("guesses", f"{it.output_vocab} tokens" + (f", with {' and '.join(tables)} of its own" if tables else ""))
    )
    return out


def _filled_in(block: DraftBlock) -> str:
    traits = {
        "the text's last token guesses, too": block.sample_from_anchor,
        f"corrected by the token before, with rank {block.markov_rank}": block.markov_rank > 0,
        "judged": block.confidence,
    }
    return f"{block.draft_tokens} guesses of {block.size} columns" + "".join(
        f", {t}" for t, has in traits.items() if has
    )


def _joined(it: HeadDescription) -> str:
    assert it.input_fusion is not None
    place = "in a projection" if it.input_fusion.at is FusionPoint.PROJECTION else "at the attention's input"
    order = "embedding, then state" if it.input_fusion.embedding_first else "state, then embedding"
    zero = ", the text's first embedding as zeros" if it.input_fusion.zero_first else ""
    return f"{order}, {place}, {'both normed' if it.input_fusion.norms else 'without norms'}{zero}"


def _layers(body: Body) -> str:
    traits = {
        "norms of queries and keys": body.head_norms,
        "biases": body.attention_bias,
        "a gate behind the attention": body.attention_gate,
        "a perceptron without a gate": not body.gated,
        "scaled rotary positions": body.rope is not None,
    }
    rest = "".join(f", {trait}" for trait, has in traits.items() if has)
    return (
        f"{body.layers}, {body.hidden} wide, {body.heads} heads of {body.dim} over {body.key_heads}, perceptron"
        f" {body.ffn}{rest}"
    )


def _final(it: HeadDescription) -> str:
    return (
        "and the draft's own stands before its output layer" if it.final_norm else "and the draft has none of its own"
    )
