"""Proposers by their names: an expression such as merge(ngram,draft:DIR) becomes what guesses."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from types import MappingProxyType

from outrider.core.types import Needs
from outrider.errors import OutriderError
from outrider.loader.embedded import embedded, model_folder
from outrider.models.base import Target
from outrider.propose.base import NoProposer, Proposer, ProposerSetup, whole
from outrider.propose.combine import Combination, First, Merge, Switch, check_parts
from outrider.propose.draft_model.chain import DraftModelProposer
from outrider.propose.draft_model.open import (
    cascade_proposer,
    check_draft,
    draft_proposer,
    draft_text_proposer,
    draft_tokens_proposer,
    tree_proposer,
)
from outrider.propose.draft_model.self_speculation import (
    exit_layers,
    exit_proposer,
    quantised_bits,
    quantised_proposer,
    skip_layers,
    skip_proposer,
)
from outrider.propose.lookup.lookahead import lookahead_proposer, read_shape
from outrider.propose.lookup.ngram import NgramProposer
from outrider.propose.lookup.recycle import RecycleProposer
from outrider.propose.lookup.retrieval import open_store, retrieval_proposer
from outrider.propose.lookup.suffix import suffix_history, suffix_proposer
from outrider.propose.vocabulary.text_draft import TextProposer

Maker = Callable[[ProposerSetup], Proposer]
_LONGEST = 32  # tokens of an ending that ngram looks up; each length costs time and memory at every token


@dataclass(frozen=True, slots=True)
class ProposerType:
    """A proposer that the command line knows."""

    make: Callable[[str, ProposerSetup], Proposer]  # from what stands behind the colon, "" without one
    check: Callable[[str], object]  # of the same, as far as it can be told without the target; raises what is wrong
    form: str  # how it is written
    says: str  # what it does


def find_proposer(spec: str, setup: ProposerSetup) -> Proposer:
    """A proposer by its expression.

    Raises:
        OutriderError: the expression cannot be read, or what it names cannot be had.
    """
    return _make(parse(spec), setup)


def check_proposer(spec: str | Maker) -> None:
    """See that an expression can be had as far as its names, numbers and folders tell, before anything is loaded.

    Raises:
        OutriderError: it cannot be read, or names nobody, and the message has the name that is nearest; or what stands
            behind a name is none of what it takes.
    """
    if isinstance(spec, str):
        _check(parse(spec))
    elif not callable(spec):
        raise OutriderError(f"proposer is {spec!r}; use {forms()}, or what makes one from a ProposerSetup")


def own_proposer(maker: Maker, setup: ProposerSetup) -> Proposer:
    """What a user's own maker, a class or a function, makes of a setup.

    Raises:
        OutriderError: it takes none, or what it makes is no proposer.
    """
    name = getattr(maker, "__qualname__", repr(maker))
    try:
        made = maker(setup)
    except TypeError as error:
        raise OutriderError(
            f"{name} makes no proposer from a ProposerSetup ({error}); it must take one, and nothing else that it needs"
        ) from error
    lacks = [part for part in ("admit", "propose", "commit", "release") if not callable(getattr(made, part, None))]
    if not isinstance(getattr(made, "needs", None), Needs):
        lacks.insert(0, "needs = Needs()")
    if lacks:
        raise OutriderError(
            f"{name} makes no proposer: what it makes lacks {', '.join(lacks)}; outrider.propose.base.Proposer says"
            " what they do, and outrider.testing.check_proposer tests them"
        )
    return made


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

    def leaves(self) -> Iterator[Expression]:
        """Those that guess: the parts of its parts, or itself."""
        for part in self.parts:
            yield from part.leaves()
        if not self.parts:
            yield self


def alternatives(spec: str) -> tuple[str, ...]:
    """Short names of those that a planner, or a request, chooses from: one, or the parts of a switch.

    A folder is no part of a name unless two would be called alike, and then the last of its path is.
    """
    whole = parse(spec)
    parts = whole.parts if whole.name == "switch" else (whole,)
    heads = [part.name if part.name in (*NAMED, *COMBINATIONS) else f"{part.name}:{part.argument}" for part in parts]
    names = [
        f"{head}:{Path(part.argument).name}" if heads.count(head) > 1 and part.argument else head
        for head, part in zip(heads, parts, strict=True)
    ]
    return tuple(name if names.count(name) == 1 else f"{name}#{i}" for i, name in enumerate(names, 1))


def parse(spec: str) -> Expression:
    """Read an expression; an argument that holds a comma or a bracket stands in double quotes.

    @NAME is the folder of a model that comes with Outrider.

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
    if bracket and ":" not in head:
        raise OutriderError(f"proposer {head!r} is unknown;{_nearest(head)} use {forms()}")
    name, _, argument = text.partition(":")
    if not name:
        raise OutriderError(f"proposer {spec!r} names nobody; use none for plain decoding, or one of {forms()}")
    argument = argument.strip().strip('"')
    return Expression(name, str(embedded(argument[1:])) if argument.startswith("@") else argument)


def draft_sources(spec: str | Maker) -> tuple[str, ...]:
    """Names of the proposers in an expression, in the order of `Draft.source`.

    A folder's name is added if two have the same name.
    """
    if not isinstance(spec, str):
        return ("own",)
    leaves = list(parse(spec).leaves())
    names = [leaf.name if leaf.name in NAMED else leaf.argument for leaf in leaves]
    return tuple(
        f"{name}:{Path(leaf.argument).name}" if leaf.argument and names.count(name) > 1 else name
        for name, leaf in zip(names, leaves, strict=True)
    )


def forms() -> str:
    """All ways to name a proposer, for messages."""
    known = [named.form for named in NAMED.values()]
    return ", ".join([*known, "pkg.module:Class", *(f"{name}(A,B)" for name in COMBINATIONS)])


def draft_model(proposer: Proposer) -> Target | None:
    """The draft model of a proposer that has one, itself or in a part."""
    if isinstance(proposer, Combination):
        return next(filter(None, map(draft_model, proposer.parts)), None)
    return proposer.model if isinstance(proposer, DraftModelProposer | TextProposer) else None


def draft_models(proposer: Proposer) -> list[Target]:
    """All draft models of a proposer, its parts' included."""
    parts = proposer.parts if isinstance(proposer, Combination) else (proposer,)
    if parts != (proposer,):
        return [model for part in parts for model in draft_models(part)]
    model = draft_model(proposer)
    return [] if model is None else [model]


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


def _check(expression: Expression) -> None:
    if expression.parts:
        check_parts(len(expression.parts), switches="switch" in (part.name for part in expression.parts))
    elif expression.name in NAMED:
        NAMED[expression.name].check(expression.argument)
    else:
        _own(expression)
    for part in expression.parts:
        _check(part)


def _make(expression: Expression, setup: ProposerSetup) -> Proposer:
    name, argument = expression.name, expression.argument
    if name in COMBINATIONS and expression.parts:
        return COMBINATIONS[name](setup, [_make(part, setup) for part in expression.parts])
    if name in NAMED:
        return NAMED[name].make(argument, setup)
    return own_proposer(_own(expression), setup)


def _none(argument: str, setup: ProposerSetup) -> Proposer:
    _alone("none", argument)
    return NoProposer(setup)


def _ngram(argument: str, setup: ProposerSetup) -> Proposer:
    if not argument:
        return NgramProposer(setup)
    shortest, longest = _ngram_range(argument)
    return NgramProposer(setup, shortest=shortest, longest=longest)


def _check_ngram(argument: str) -> None:
    if argument:
        _ngram_range(argument)


def _ngram_range(argument: str) -> tuple[int, int]:
    ends = [whole(end) for end in argument.split("-")]
    match ends:
        case [int(shortest), int(longest)] if 1 <= shortest <= longest <= _LONGEST:
            return shortest, longest
    raise OutriderError(
        f"ngram:{argument} is no range; write ngram:1-5 for endings of 1 to 5 tokens, of {_LONGEST} at most"
    )


def _recycle(argument: str, setup: ProposerSetup) -> Proposer:
    _alone("recycle", argument)
    return RecycleProposer(setup)


def _own(expression: Expression) -> Maker:
    """What a dotted path names; or the reason why nobody goes by that name."""
    module, name = expression.name, expression.argument
    if module in COMBINATIONS:
        raise OutriderError(f"{module} combines others; write for example {module}(ngram,recycle)")
    if not name:
        raise OutriderError(f"proposer {module!r} is unknown;{_nearest(module)} use {forms()}")
    if not all(part.isidentifier() for part in module.split(".")):
        stem = Path(module.lstrip(".")).name.removesuffix(".py")
        raise OutriderError(
            f"proposer {module}:{name} names no module: a dotted path does, found from the folder you are in, so for a"
            f" file of yours go there and write {stem}:{name}"
        )
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # a module beside the user, as `python -m` would find it
    try:
        found: Maker = getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever a module's own lines raise
        reason = str(error) if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: {error}"
        raise OutriderError(
            f"proposer {module}:{name} cannot be imported ({reason});{_nearest(module)} check the dotted path, or use"
            f" {forms()}"
        ) from error
    if not callable(found):
        raise OutriderError(f"{module}:{name} makes nothing; name a class, or a function of a ProposerSetup")
    return found


def _nearest(name: str) -> str:
    """The question whether another name was meant; "" where none is near."""
    near = get_close_matches(name.strip().lower(), [*NAMED, *COMBINATIONS], n=1)
    return f" did you mean {near[0]}? Else" if near else ""


def _alone(name: str, argument: str) -> None:
    if argument:
        raise OutriderError(f"{name} takes no argument, and {argument!r} was given; write {name}")


def _small(name: str, make: Callable[[str, ProposerSetup], Proposer], says: str, *, heads: bool) -> ProposerType:
    """One that takes the folder of a small model; `heads`: or of a trained draft."""
    return ProposerType(make, partial(check_draft, name=name, heads=heads), f"{name}:DIR", says)


NAMED: Mapping[str, ProposerType] = MappingProxyType(
    {
        "none": ProposerType(_none, partial(_alone, "none"), "none", "plain decoding"),
        "ngram": ProposerType(
            _ngram, _check_ngram, "ngram[:MIN-MAX]", "what followed the last time that the text ended like this"
        ),
        "suffix": ProposerType(
            suffix_proposer,
            suffix_history,
            "suffix[:TOKENS]",
            "wherever it ended like this, here and in so many tokens of outputs",
        ),
        "recycle": ProposerType(
            _recycle, partial(_alone, "recycle"), "recycle", "what the target's own scores showed of endings like this"
        ),
        "lookahead": ProposerType(
            lookahead_proposer, read_shape, "lookahead[:WxNxG]", "n-grams that the target writes beside the text"
        ),
        "draft": _small("draft", draft_proposer, "a small model", heads=True),
        "draft-tokens": _small(
            "draft-tokens", draft_tokens_proposer, "one of another vocabulary, token by token", heads=False
        ),
        "draft-text": _small(
            "draft-text", draft_text_proposer, "one of another vocabulary, by the text it writes", heads=False
        ),
        "tree": _small("tree", tree_proposer, "a small model that guesses several ways to go on", heads=True),
        "cascade": _small(
            "cascade", cascade_proposer, "a small model that looks up what it is about to say", heads=False
        ),
        "retrieval": ProposerType(
            retrieval_proposer,
            open_store,
            "retrieval:DIR[:MIN]",
            "what followed this ending in a datastore; see `outrider index`",
        ),
        "exit": ProposerType(exit_proposer, exit_layers, "exit:LAYERS", "the target's own first layers"),
        "skip": ProposerType(
            skip_proposer, skip_layers, "skip:A+B+C", "the target without some of its layers; see `outrider layers`"
        ),
        "quantized": ProposerType(
            quantised_proposer, quantised_bits, "quantized:int4", "the target with 4 or 8 bits a weight"
        ),
    }
)
DRAWN = frozenset(  # those that may draw their guesses from a law
    {"draft", "draft-tokens", "tree", "cascade", "exit", "skip", "quantized"}
)
CHAINS = (DRAWN - {"tree"}) | {"draft-text", "none", "first", "switch"}  # and those that make no tree of chains
COMBINATIONS: Mapping[str, Callable[[ProposerSetup, Sequence[Proposer]], Proposer]] = MappingProxyType(
    {"first": First, "merge": Merge, "switch": Switch}
)


def default_proposer(target: str | Path | None) -> str:
    """The embedded draft for the embedded target, and for any other what costs nothing."""
    return f"draft:{embedded('nano')}" if model_folder(target) == embedded("mini") else "ngram"
