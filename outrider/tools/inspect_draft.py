"""The command `inspect`: describe a draft head, and check it against its target."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from outrider.core.params import SamplingParams
from outrider.errors import OutriderError
from outrider.llm import LLM
from outrider.models.heads.description import (
    Body,
    DraftBlock,
    Feedback,
    FuseNorm,
    FusionPoint,
    HeadDescription,
    Kind,
    ParallelHeads,
)
from outrider.models.heads.formats.base import ImportedHead, TargetRequired
from outrider.models.heads.formats.registry import find
from outrider.models.loader.embedded import model_folder
from outrider.models.loader.load import refuse_sources
from outrider.runtime.report.console import print_plain
from outrider.tools.convert import checked, find_target_info

ENOUGH = 0.4  # a draft with a lower agreement is loaded incorrectly or hardly trained
_TOKENS = 32  # output tokens per prompt
_PROMPTS = (
    "def area(width, height):\n",
    "The river rises in the mountains and",
    "Once upon a time there was a",
    "To bake bread you need flour, water,",
    "import os\nimport sys\n\n",
    "The first thing to know about the weather is",
)
KIND_TEXTS = {
    Kind.EAGLE: "EAGLE-1 or 2: decoder layers on the last hidden state of the target",
    Kind.EAGLE3: "EAGLE-3: decoder layers on the fused hidden states of several layers",
    Kind.PEAGLE: "P-EAGLE: decoder layers on fused hidden states, with mask tokens; all draft tokens in one pass",
    Kind.MTP: "MTP: a module for multi-token prediction",
    Kind.MEDUSA: "Medusa: heads that predict tokens independently of each other",
    Kind.HYDRA: "Hydra: heads that also use the draft tokens before them",
    Kind.DFLASH: "DFlash: a block of tokens in one pass",
    Kind.DFLASH2: "DFlash 2: a block of tokens in one pass, whose likeliest tokens are ranked by the token before",
    Kind.DSPARK: "DSpark: a block of tokens in one pass, corrected token by token",
    Kind.XPRESS: "XPress: a block of tokens in one pass, corrected by all draft tokens before each one",
    Kind.DOMINO: "Domino: a block of tokens in one pass, corrected by a recurrent state of the draft tokens before",
    Kind.KV_SHARING: "kv-sharing: layers that attend to the keys and values of the target, as Gemma 4 assistants do",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """How often the first draft token equals the target's next token, in outputs of the target."""

    agreement: float
    draft_tokens: int
    checklist: tuple[str, ...]  # what to check if the agreement is low


def probe(folder: str | Path, target: str, *, dtype: str = "auto") -> Probe:
    """Let the target generate greedily with one draft token per round, and count the accepted ones.

    Raises:
        OutriderError: a model cannot be loaded, or the draft does not belong to the target.
    """
    refuse_sources(target, "inspect")
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
        raise OutriderError(f"{folder} drafted no token; give a target that continues the prompts")
    agreement = stats.accepted[0] / stats.reached[0]
    checks: tuple[str, ...] = ()
    if agreement < ENOUGH:
        checks = checklist(checked(folder, find_target_info(target)).description)
    return Probe(agreement=agreement, draft_tokens=stats.reached[0], checklist=checks)


def checklist(description: HeadDescription) -> tuple[str, ...]:
    """Return what may be wrong with a draft head of the right shape, most likely first."""
    layers = ", ".join(map(str, description.aux_states.layers))
    checks = [
        f"layer index: the head uses the outputs of layers {layers}, counted from 0; formats differ"
        " by 1 (docs/reference/formats.md)"
    ]
    norm = "after" if description.aux_states.final else "before"
    final = "its own" if description.final_norm else "no"
    checks.append(
        f"norm: the last of these states is taken {norm} the target's final norm, and the draft has {final} final norm"
    )
    if body := description.body:
        scaled = f"scaled by {body.rope.scaling}" if body.rope else "not scaled"
        checks.append(
            f"rotary: theta is {body.theta:g}, positions are {scaled}, and {body.rotary:.0%} of a"
            " head is rotated, in halves rather than in adjacent pairs"
        )
    if description.input_fusion:
        first = "the embedding first" if description.input_fusion.embedding_first else "the state first"
        if description.masks:
            state = "mask tokens have their own state"
        else:
            state = f"the state after a draft token is the {description.feedback} state"
        checks.append(f"concat order: {first}; {state}")
    if description.block:
        predicts = "predicts the next token" if description.block.sample_from_anchor else "predicts no token"
        checks.append(f"sample_from_anchor: the column of the last committed token {predicts}")
    checks.append("target: the draft may be trained on another model of this size, or on another fine-tuning of it")
    return tuple(checks)


def run_inspect(folder: str, *, target: str | None = None, as_json: bool = False) -> dict[str, Any]:
    """Describe a draft head. With a target, measure how often its first draft token is right.

    Args:
        folder: the folder of the draft head.
        as_json: print the JSON document to standard output, and everything else to standard error.

    Returns:
        The document.

    Raises:
        OutriderError: the folder is not a draft head, is damaged, or belongs to another target.
    """
    console = Console(stderr=as_json)

    def show(name: str, text: str) -> None:
        print_plain(console, f"{name:12}{text}")

    path = model_folder(folder)
    target_info = find_target_info(target) if target else None
    try:
        document = _show_head(checked(path, target_info), show)
    except TargetRequired as reason:
        document = _show_without_target(path, reason, show)
    if target:
        result = probe(path, target)
        show(
            "first token",
            f"{result.agreement:.0%} of {result.draft_tokens} first draft tokens equal the token of the target",
        )
        for line in result.checklist:
            show("check", line)
        document["probe"] = {
            "agreement": result.agreement,
            "draft_tokens": result.draft_tokens,
            "checklist": list(result.checklist),
        }
    if as_json:
        print(json.dumps(document))
    return document


def _show_head(head: ImportedHead, show: Callable[[str, str], None]) -> dict[str, Any]:
    """Print the description of a draft head, and return its document."""
    show("format", head.format)
    for name, text in describe(head.description):
        show(name, text)
    sizes = _sizes(value for name, value in head.weights.items() if name != "ids")
    show("weights", _size_text(sizes))
    for reason, names in head.ignored.items():
        show("ignored", f"{len(names)} tensors ({reason}), such as {names[0]}")
    ignored = {reason: list(names) for reason, names in head.ignored.items()}
    return {"format": head.format, **sizes, "ignored": ignored, "description": head.description.to_json()}


def _show_without_target(folder: Path, reason: TargetRequired, show: Callable[[str, str], None]) -> dict[str, Any]:
    """Print and return the sizes of a draft head whose description needs its target."""
    match = find(folder)
    assert match is not None
    prefix = match.format.module(match.stored) or ""
    sizes = _sizes(value for name, value in match.stored.items() if name.startswith(prefix))
    show("format", match.format.title)
    show("weights", _size_text(sizes))
    show("inputs", f"unknown: {reason}")
    return {"format": match.format.title, **sizes, "unknown": str(reason)}


def _sizes(weights: Iterable[torch.Tensor]) -> dict[str, int]:
    counts = [(weight.numel(), weight.nbytes) for weight in weights]
    return {"parameters": sum(count for count, _ in counts), "bytes": sum(size for _, size in counts)}


def _size_text(sizes: dict[str, int]) -> str:
    return f"{sizes['parameters'] / 1e6:.2f}M parameters, {sizes['bytes'] / 1e6:.1f} MB"


def describe(description: HeadDescription) -> list[tuple[str, str]]:
    """Return a description as pairs of name and text."""
    plural = "s" if len(description.aux_states.layers) > 1 else ""
    layers = ", ".join(map(str, description.aux_states.layers))
    target = (
        f"a target with {description.target_layers} layers, hidden size {description.target_hidden}"
        f" and {description.vocab} tokens"
    )
    lines = [
        ("draft", KIND_TEXTS[description.kind]),
        ("inputs", f"output{plural} of layer{plural} {layers}, counted from 0, of {target}"),
    ]
    if description.aux_states.final:
        lines.append(("", "the last one after the target's final norm"))
    if description.aux_states.norm is FuseNorm.EACH:
        lines.append(("", "each normalized before they are fused"))
    elif description.aux_states.norm is not FuseNorm.NONE:
        lines.append(("", "normalized together"))
    for view in sorted(set(description.shared_kv), key=lambda view: view.layer):
        entries = f"the last {view.window} entries" if view.window else "all entries"
        lines.append(("attends to", f"{entries} of layer {view.layer}: {view.key_heads} key heads of {view.dim}"))
    if description.input_fusion:
        lines.append(("fusion", _fusion_text(description)))
    if description.body:
        lines.append(("layers", _layers_text(description.body)))
    if description.modules > 1:
        lines.append(("modules", f"{description.modules}, each with such layers and for one draft token"))
    if description.stack:
        lines.append(("heads", _stack_text(description.stack)))
    if masks := description.masks:
        text = f"{masks.draft_tokens} draft tokens; mask tokens have the embedding of token {masks.token}"
        lines.append(("one pass", text))
    if description.block:
        lines.append(("block", _block_text(description.block)))
    elif description.body and not description.parallel_draft_tokens:
        lines.append(("feedback", "its normalized output" if description.feedback is Feedback.NORMED else "its output"))
    lines.append(("vocabulary", _vocabulary_text(description)))
    if centroids := description.centroids:
        lines.append(("centroids", f"logits of the tokens in {centroids.top_k} of {centroids.count} clusters"))
    return lines


def _stack_text(stack: ParallelHeads) -> str:
    if stack.one_head:
        output = "one output layer for all of them"
    elif stack.shared_head:
        output = "the target's output layer"
    else:
        output = "an output layer each"
    return f"{stack.heads} with {stack.layers} residual blocks each, and {output}"


def _vocabulary_text(description: HeadDescription) -> str:
    own = {"embeddings": description.own_embedding, "output layer": description.own_lm_head}
    tables = [name for name, has in own.items() if has]
    own_tables = f", with its own {' and '.join(tables)}" if tables else ""
    return f"{description.output_vocab} tokens{own_tables}"


def _block_text(block: DraftBlock) -> str:
    traits = {
        "the last committed token predicts one as well": block.sample_from_anchor,
        f"corrected by the previous token, with rank {block.markov_rank}": block.markov_rank > 0,
        "with a confidence head": block.confidence,
        "refined by all earlier draft tokens": block.refiner is not None,
        "corrected by a recurrent state": block.recurrence is not None,
        **_view_traits(block),
    }
    if block.selector:
        traits[f"chosen from the {block.selector.candidates or 'all'} likeliest tokens of a column"] = True
    text = f"{block.draft_tokens} draft tokens in {block.size} columns"
    return text + _listed(traits)


def _view_traits(block: DraftBlock) -> dict[str, bool]:
    windows = sorted({view.window for view in block.views if view.window})
    causal = sum(view.causal for view in block.views)
    return {
        f"windows of {', '.join(map(str, windows))} positions": bool(windows),
        f"no later column is seen in {causal} of {len(block.views)} layers": causal > 0,
    }


def _fusion_text(description: HeadDescription) -> str:
    assert description.input_fusion is not None
    point = (
        "in a projection" if description.input_fusion.at is FusionPoint.PROJECTION else "at the input of the attention"
    )
    order = "embedding, then state" if description.input_fusion.embedding_first else "state, then embedding"
    zero = ", the first embedding as zeros" if description.input_fusion.zero_first else ""
    return f"{order}, {point}, {'both normalized' if description.input_fusion.norms else 'without norms'}{zero}"


def _layers_text(body: Body) -> str:
    traits = {
        "norms of queries and keys": body.head_norms,
        "biases": body.attention_bias,
        "a gate after the attention": body.attention_gate,
        "a feed-forward layer without a gate": not body.gated,
        "scaled rotary positions": body.rope is not None,
    }
    rest = _listed(traits)
    return (
        f"{body.layers}, {body.hidden} wide, {body.heads} heads of {body.dim} and {body.key_heads}"
        f" key heads, feed-forward size {body.ffn}{rest}"
    )


def _listed(traits: Mapping[str, bool]) -> str:
    return "".join(f", {trait}" for trait, has in traits.items() if has)
