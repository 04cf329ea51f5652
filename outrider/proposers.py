"""Proposers by their names: an expression such as merge(ngram,draft:DIR) becomes what guesses."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from outrider.check import check_target
from outrider.errors import OutriderError
from outrider.load import load_checkpoint
from outrider.propose.base import NoProposer, Proposer, Setup
from outrider.propose.combine import Combination, First, Merge, Switch
from outrider.propose.model import ModelProposer
from outrider.propose.ngram import NgramProposer
from outrider.target import Target, make_target

Maker = Callable[[Setup], Proposer]


@dataclass(frozen=True, slots=True)
class Named:
    """A proposer that the command line knows."""

    make: Callable[[str, Setup], Proposer]  # from what stands behind the colon, "" without one
    form: str  # how it is written
    says: str  # what it does


def find_proposer(spec: str, setup: Setup) -> Proposer:
    """A proposer by its expression.

    Raises:
        OutriderError: the expression cannot be read, or what it names cannot be had.
    """
    return _make(parse(spec), setup)


@dataclass(frozen=True, slots=True)
class Expression:
    """`name`, `name:argument`, or `name(part,part,...)`."""

    name: str
    argument: str = ""
    parts: tuple[Expression, ...] = ()

    def names(self) -> Iterator[str]:
        """Its own name and those of all parts."""
        yield self.name
        for part in self.parts:
            yield from part.names()


def parse(spec: str) -> Expression:
    """Read an expression; an argument that holds a comma or a bracket stands in double quotes.

    Raises:
        OutriderError: it cannot be read.
    """
    text = spec.strip()
    head, bracket, _ = text.partition("(")
    if bracket and head.strip() in COMBINATIONS:
        if not text.endswith(")"):
            raise OutriderError(f"proposer {spec!r} lacks its closing bracket; write for example merge(ngram,recycle)")
        parts = _split(text[len(head) + 1 : -1], spec)
        return Expression(head.strip(), parts=tuple(parse(part) for part in parts))
    name, _, argument = text.partition(":")
    if not name:
        raise OutriderError(f"proposer {spec!r} names nobody; use {forms()}")
    return Expression(name, argument.strip().strip('"'))


def forms() -> str:
    """All ways to name a proposer, for messages."""
    known = [named.form for named in NAMED.values()]
    return ", ".join([*known, "pkg.module:Class", *(f"{name}(A,B)" for name in COMBINATIONS)])


def draft_model(proposer: Proposer) -> Target | None:
    """The draft model of a proposer that has one, itself or in a part."""
    if isinstance(proposer, Combination):
        return next(filter(None, map(draft_model, proposer.parts)), None)
    return proposer.model if isinstance(proposer, ModelProposer) else None


def _split(text: str, spec: str) -> list[str]:
    """Parts between commas that stand in no brackets and no quotes."""
    parts, depth, quoted = [""], 0, False
    for letter in text:
        quoted ^= letter == '"'
        depth += 0 if quoted else (letter == "(") - (letter == ")")
        if letter == "," and not depth and not quoted:
            parts.append("")
        else:
            parts[-1] += letter
    if depth or quoted:
        raise OutriderError(f"proposer {spec!r} has an open bracket or quote; write for example merge(ngram,recycle)")
    return parts


def _make(expression: Expression, setup: Setup) -> Proposer:
    name, argument = expression.name, expression.argument
    if name in COMBINATIONS and expression.parts:
        return COMBINATIONS[name](setup, [_make(part, setup) for part in expression.parts])
    if name in NAMED:
        return NAMED[name].make(argument, setup)
    if not argument:
        raise OutriderError(f"proposer {name!r} is unknown; use {forms()}")
    return _import(name, argument, setup)


def _none(argument: str, setup: Setup) -> Proposer:
    _no_argument("none", argument)
    return NoProposer(setup)


def _ngram(argument: str, setup: Setup) -> Proposer:
    if not argument:
        return NgramProposer(setup)
    ends = argument.split("-")
    if len(ends) != 2 or not all(end.isdecimal() for end in ends) or not 1 <= int(ends[0]) <= int(ends[1]):
        raise OutriderError(f"ngram:{argument} is no range; write ngram:1-5 for endings of 1 to 5 tokens")
    return NgramProposer(setup, shortest=int(ends[0]), longest=int(ends[1]))


def _draft_model(folder: str, setup: Setup) -> Proposer:
    if not folder:
        raise OutriderError("draft needs the folder of a small model; write draft:DIR")
    dtype = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}[setup.dtype]
    checkpoint = load_checkpoint(folder, dtype=dtype, device=str(setup.device))
    if checkpoint.recurrent:
        raise OutriderError(f"{folder} is recurrent, and a recurrent draft is not handled yet; use an attention model")
    _compare_tokenizers(setup.tokenizer, checkpoint.tokenizer, folder)
    size = min(checkpoint.context, setup.context)
    model = make_target(checkpoint, slots=setup.slots, context=size, kernels=setup.kernels)
    check_target(model, checkpoint)
    return ModelProposer(setup, model)


def _compare_tokenizers(target: Any, draft: Any, folder: str) -> None:
    """The same text must be the same ids; how far the vocabularies are padded does not matter."""
    ours, theirs = target.get_vocab(), draft.get_vocab()
    for token in sorted(ours.keys() | theirs.keys(), key=lambda token: (ours.get(token, -1), token)):
        if ours.get(token) != theirs.get(token):
            raise OutriderError(
                f"the draft in {folder} has another vocabulary than the target: {token!r} is id {ours.get(token)} for"
                f" the target and {theirs.get(token)} for the draft ({len(ours)} and {len(theirs)} tokens in all);"
                " use a draft of the target's family, or --proposer ngram"
            )


def _import(module: str, name: str, setup: Setup) -> Proposer:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # a module beside the user, as `python -m` would find it
    try:
        maker = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise OutriderError(
            f"proposer {module}:{name} cannot be imported ({error}); check the dotted path, or use {forms()}"
        ) from error
    return maker(setup)  # type: ignore[no-any-return]


def _no_argument(name: str, argument: str) -> None:
    if argument:
        raise OutriderError(f"{name} takes no argument, and {argument!r} was given; write {name}")


NAMED: Mapping[str, Named] = MappingProxyType(
    {
        "none": Named(_none, "none", "plain decoding"),
        "ngram": Named(_ngram, "ngram[:MIN-MAX]", "what followed the last time that the text ended like this"),
        "draft": Named(_draft_model, "draft:DIR", "a small model of the same family"),
    }
)
COMBINATIONS: Mapping[str, Callable[[Setup, Sequence[Proposer]], Proposer]] = MappingProxyType(
    {"first": First, "merge": Merge, "switch": Switch}
)
