"""Make proposers from expressions such as `merge(ngram,draft:DIR)`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum, auto
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from outrider.core.config import DRAFT_OPTIONS, EngineConfig
from outrider.core.params import AUTO
from outrider.errors import OutriderError, either
from outrider.models.loader.embedded import embedded, model_folder

if TYPE_CHECKING:
    from outrider.core.proposer import Proposer, ProposerSetup

Maker = Callable[["ProposerSetup"], "Proposer"]


class Argument(Enum):
    """The text after the colon of a proposer's name."""

    NONE = auto()
    TEXT = auto()  # what the proposer itself reads; it may be missing
    MODEL = auto()  # the folder of a draft model
    DRAFT = auto()  # the folder of a draft model or of a draft head


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposerType:
    """A proposer that can be named in an expression.

    Its module is imported when it is first used. Functions are named as in `core.proposer:NoProposer`.
    """

    syntax: str  # for messages
    maker: str  # a function of the argument, if there is one, and a ProposerSetup
    argument: Argument = Argument.NONE
    checker: str = ""  # of TEXT: a function that raises an error if the argument is wrong; it does not need the target
    samples: bool = False  # may sample draft tokens from a distribution
    chain: bool = False  # drafts chains
    reads_text: bool = False  # has a draft to which `draft_window` and `draft_quantize` apply

    def check(self, argument: str) -> None:
        """Check the argument before any model is loaded. Raises OutriderError if it is wrong."""
        if self.argument is Argument.NONE:
            self._check_no_argument(argument)
        elif self.argument is Argument.TEXT:
            resolve_name(f"outrider.{self.checker}")(argument)
        else:
            check_draft = resolve_name("outrider.drafting.propose.draft_model.open:check_draft")
            check_draft(self._folder(argument), heads=self.argument is Argument.DRAFT)

    def make(self, argument: str, setup: ProposerSetup) -> Proposer:
        """Make the proposer. Raises OutriderError if the argument is wrong, or the proposer cannot be made."""
        maker: Callable[..., Proposer] = resolve_name(f"outrider.{self.maker}")
        if self.argument is Argument.NONE:
            self._check_no_argument(argument)
            return maker(setup)
        return maker(argument if self.argument is Argument.TEXT else self._folder(argument), setup)

    def _check_no_argument(self, argument: str) -> None:
        if argument:
            raise OutriderError(f"{self.syntax} takes no argument, but {argument!r} was given; write {self.syntax}")

    def _folder(self, argument: str) -> str:
        if not argument:
            name = self.syntax.partition(":")[0]
            raise OutriderError(f"{name} needs the folder of a draft model; write {self.syntax}")
        return str(model_folder(argument))


def find_proposer(spec: str, setup: ProposerSetup) -> Proposer:
    """Make the proposer of an expression.

    Raises:
        OutriderError: the expression is not valid, or a proposer in it cannot be made.
    """
    return make(parse(spec), setup)


def check_proposer(spec: str | Maker) -> None:
    """Check the names, numbers and folders of an expression before any model is loaded.

    Raises:
        OutriderError: the expression is not valid, a name is unknown (the message suggests the most
            similar name), or the argument of a proposer is wrong.
    """
    if isinstance(spec, str):
        _check(parse(spec))
    elif not callable(spec):
        raise OutriderError(
            f"proposer is {spec!r}; use {forms()}, or a class or function that makes a proposer from a ProposerSetup"
        )


def check_names(spec: str) -> None:
    """Check the names in an expression, without importing torch. Raises OutriderError if one is unknown."""
    for leaf in parse(spec).leaves():
        if leaf.name not in NAMED and not leaf.argument:
            _import_maker(leaf)


def own_proposer(maker: Maker, setup: ProposerSetup) -> Proposer:
    """Make a proposer with a user's class or function.

    Raises:
        OutriderError: `maker` does not accept a ProposerSetup, or its result is not a proposer.
    """
    from outrider.core.types import Needs  # here, because it imports torch, and expressions are checked before

    name = getattr(maker, "__qualname__", repr(maker))
    try:
        proposer = maker(setup)
    except TypeError as error:
        raise OutriderError(
            f"{name} cannot make a proposer from a ProposerSetup ({error}); it must take a"
            " ProposerSetup as its only required argument"
        ) from error
    methods = ("admit", "propose", "commit", "release")
    missing = [method for method in methods if not callable(getattr(proposer, method, None))]
    if not isinstance(getattr(proposer, "needs", None), Needs):
        missing.insert(0, "needs = Needs()")
    if missing:
        raise OutriderError(
            f"{name} does not make a proposer: the result lacks {', '.join(missing)}; see"
            " outrider.core.proposer.Proposer for what they do, and test with outrider.testing.check_proposer"
        )
    return proposer


@dataclass(frozen=True, slots=True)
class Expression:
    """A parsed expression: `name`, `name:argument`, or `name(part,part,...)`."""

    name: str
    argument: str = ""
    parts: tuple[Expression, ...] = ()

    def names(self) -> Iterator[str]:
        """Yield the name of the expression and the names of all parts."""
        yield self.name
        for part in self.parts:
            yield from part.names()

    def leaves(self) -> Iterator[Expression]:
        """Yield the expressions that have no parts, from left to right."""
        for part in self.parts:
            yield from part.leaves()
        if not self.parts:
            yield self


def alternatives(spec: str) -> tuple[str, ...]:
    """Return short names of the alternatives: the parts of a switch, or else the whole expression.

    A name contains the last part of a folder only if two alternatives would otherwise have the same name.
    """
    expression = parse(spec)
    parts = expression.parts if expression.name == "switch" else (expression,)
    known = (*NAMED, *COMBINATIONS)
    short_names = [
        f"{part.name}:{part.argument}" if part.argument and part.name not in known else part.name for part in parts
    ]
    names = []
    for name, part in zip(short_names, parts, strict=True):
        ambiguous = short_names.count(name) > 1 and part.argument
        names.append(f"{name}:{Path(part.argument).name}" if ambiguous else name)
    return tuple(name if names.count(name) == 1 else f"{name}#{i}" for i, name in enumerate(names, 1))


def parse(spec: str) -> Expression:
    """Parse an expression.

    An argument that contains a comma or a bracket must be in double quotes. `@NAME` is the folder
    of a model that comes with Outrider.

    Raises:
        OutriderError: the expression is not valid.
    """
    text = spec.strip()
    head, bracket, _ = text.partition("(")
    if bracket and head.strip() in COMBINATIONS:
        if not text.endswith(")"):
            raise OutriderError(f"proposer {spec!r} lacks its closing bracket; write for example merge(ngram,recycle)")
        parts = _split(text[len(head) + 1 : -1], spec)
        return Expression(head.strip(), parts=tuple(map(parse, parts)))
    if bracket and ":" not in head:
        raise OutriderError(f"proposer {head!r} is unknown;{_suggestion(head)} use {forms()}")
    name, _, argument = text.partition(":")
    if not name:
        raise OutriderError(f"proposer {spec!r} has no name; use none for plain decoding, or {forms()}")
    argument = argument.strip().strip('"')
    return Expression(name, str(embedded(argument[1:])) if argument.startswith("@") else argument)


def has_draft(spec: str) -> bool:
    """Return whether an expression has a draft model or a draft head."""
    return any(NAMED[name].reads_text for name in parse(spec).names() if name in NAMED)


def check_draft_settings(config: EngineConfig, *specs: str | Maker) -> None:
    """Check that the settings `draft_window`, `draft_quantize` and so on apply to one of these proposers.

    Raises:
        OutriderError: none of them has a draft model or a draft head, or for `draft_candidates` a copy of the target.
    """
    applicable = _applicable(specs)
    names = ", ".join(map(str, specs))
    subject = f"the proposer {names} has no draft" if len(specs) == 1 else f"none of {names} has a draft"
    asked = {name: getattr(config, name) for name in DRAFT_OPTIONS}
    asked["draft_placement"] = None if config.draft_placement == AUTO else config.draft_placement
    for option, value in asked.items():
        if value is not None and option not in applicable:
            raise OutriderError(
                f"{option} is {value} and {subject} that reads the text; use draft:DIR, or leave {option} out"
            )


def draft_settings(config: EngineConfig, *specs: str, draft_quantize: str | None = None) -> dict[str, Any]:
    """Return the `DRAFT_OPTIONS`; None where they apply to none of the proposers.

    A `draft_quantize` that is given takes precedence over that of `config`.
    """
    asked = {name: getattr(config, name) for name in DRAFT_OPTIONS}
    asked["draft_quantize"] = draft_quantize or config.draft_quantize
    applicable = _applicable(specs)
    return {name: value if name in applicable else None for name, value in asked.items()}


def _applicable(specs: Iterable[str | Maker]) -> frozenset[str]:
    """Return which of the `DRAFT_OPTIONS` and `draft_placement` apply to one of these proposers."""
    if any(not isinstance(spec, str) or has_draft(spec) for spec in specs):
        return frozenset({*DRAFT_OPTIONS, "draft_placement"})
    copies = any("quantized" in parse(spec).names() for spec in specs if isinstance(spec, str))
    return frozenset({"draft_candidates"} if copies else ())


def draft_sources(spec: str | Maker) -> tuple[str, ...]:
    """Return the names of the proposers in an expression, in the order of the bits in `Draft.source`.

    A folder's name is added if two have the same name.
    """
    if not isinstance(spec, str):
        return ("own",)
    leaves = list(parse(spec).leaves())
    names = [leaf.name if leaf.name in NAMED else leaf.argument or leaf.name for leaf in leaves]
    return tuple(
        f"{name}:{Path(leaf.argument).name}" if leaf.argument and names.count(name) > 1 else name
        for name, leaf in zip(names, leaves, strict=True)
    )


def forms() -> str:
    """Return the syntax of all proposers, for messages."""
    named = [proposer_type.syntax for proposer_type in NAMED.values()]
    return either([*named, "pkg.module:Class", *(f"{name}(A,B)" for name in COMBINATIONS)])


def _split(text: str, spec: str) -> list[str]:
    """Split at the commas that are outside of brackets and quotes."""
    parts = [""]
    depth = 0
    quoted = False
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


def comma_list(spec: str) -> list[str]:
    """Return the expressions of a list with commas; one if a text after a comma begins with no proposer's name.

    Raises:
        OutriderError: a bracket or a quote is open.
    """
    parts = [part.strip() for part in _split(spec, spec)]
    names = [part.partition("(")[0].partition(":")[0] for part in parts[1:]]
    return parts if any(name in NAMED or name in COMBINATIONS for name in names) else [spec]


def _check(expression: Expression) -> None:
    if expression.parts:
        check_parts = resolve_name("outrider.drafting.propose.combine:check_parts")
        check_parts(len(expression.parts), switches="switch" in (part.name for part in expression.parts))
    elif expression.name in NAMED:
        NAMED[expression.name].check(expression.argument)
    else:
        _import_maker(expression)
    for part in expression.parts:
        _check(part)


def make(expression: Expression, setup: ProposerSetup) -> Proposer:
    """Make the proposer of a parsed expression. Raises OutriderError if a proposer in the expression cannot be made."""
    if expression.name in COMBINATIONS and expression.parts:
        return combine(expression.name, setup, [make(part, setup) for part in expression.parts])
    if expression.name in NAMED:
        return NAMED[expression.name].make(expression.argument, setup)
    return own_proposer(_import_maker(expression), setup)


def combine(name: str, setup: ProposerSetup, parts: Sequence[Proposer]) -> Proposer:
    """Make a combination, such as merge, of other proposers."""
    combination: Proposer = resolve_name(f"outrider.{COMBINATIONS[name]}")(setup, parts)
    return combination


def _import_maker(expression: Expression) -> Maker:
    """Import the class or function of `module:name`."""
    module = expression.name
    name = expression.argument
    if module in COMBINATIONS:
        raise OutriderError(f"{module} combines others; write for example {module}(ngram,recycle)")
    from outrider.core.packages import load_added  # here, so that own proposers import little

    if own := load_added("proposers", module):
        return partial(own, name) if name else own
    if not name:
        raise OutriderError(f"proposer {module!r} is unknown;{_suggestion(module)} use {forms()}")
    if not all(part.isidentifier() for part in module.split(".")):
        stem = Path(module.lstrip(".")).name.removesuffix(".py")
        raise OutriderError(
            f"proposer {module}:{name} names no module; use a dotted path that can be imported from"
            f" the current folder. For a file of yours, go there and write {stem}:{name}"
        )
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # find modules in the current folder, as `python -m` does
    try:
        maker: Maker = getattr(importlib.import_module(module), name)
    except Exception as error:  # the module's own code can raise anything
        reason = str(error) if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: {error}"
        if isinstance(error, ModuleNotFoundError):
            fix = f"{_suggestion(module)} check the dotted path, or use {forms()}"
        else:
            fix = f" correct the module {module}, or name a class or function of it"
        raise OutriderError(f"proposer {module}:{name} cannot be imported ({reason});{fix}") from error
    if not callable(maker):
        raise OutriderError(f"{module}:{name} is not callable; name a class, or a function of a ProposerSetup")
    return maker


def _suggestion(name: str) -> str:
    """Return the question whether a similar name was meant; "" if there is none."""
    similar = get_close_matches(name.strip().lower(), [*NAMED, *COMBINATIONS], n=1)
    return f" did you mean {similar[0]}? Else" if similar else ""


NAMED: Mapping[str, ProposerType] = MappingProxyType(
    {
        # Plain decoding.
        "none": ProposerType(syntax="none", maker="core.proposer:NoProposer", chain=True),
        # The tokens that followed the last n-gram of the text earlier.
        "ngram": ProposerType(
            syntax="ngram[:MIN-MAX]",
            maker="drafting.propose.lookup.ngram:ngram_proposer",
            argument=Argument.TEXT,
            checker="drafting.propose.lookup.ngram:parse_ngram_range",
        ),
        # A tree of what followed the longest suffix of the text earlier, also in TOKENS tokens of past outputs.
        "suffix": ProposerType(
            syntax="suffix[:TOKENS]",
            maker="drafting.propose.lookup.suffix:suffix_proposer",
            argument=Argument.TEXT,
            checker="drafting.propose.lookup.suffix:parse_history_size",
        ),
        # The same in other outputs for the same prompt, running and finished ones, of the last VERSIONS weights.
        "group": ProposerType(
            syntax="group[:TOKENS[:VERSIONS]]",
            maker="drafting.propose.lookup.group:group_proposer",
            argument=Argument.TEXT,
            checker="drafting.propose.lookup.group:parse_group_size",
        ),
        # The likeliest tokens of the target's earlier logits after the same suffix.
        "recycle": ProposerType(syntax="recycle", maker="drafting.propose.lookup.recycle:RecycleProposer"),
        # N-grams that the target generates in its own passes by Jacobi iteration.
        "lookahead": ProposerType(
            syntax="lookahead[:WxNxG]",
            maker="drafting.propose.lookup.lookahead:lookahead_proposer",
            argument=Argument.TEXT,
            checker="drafting.propose.lookup.lookahead:parse_lookahead_size",
        ),
        # A draft model or a draft head.
        "draft": ProposerType(
            syntax="draft:DIR",
            maker="drafting.propose.draft_model.open:draft_proposer",
            argument=Argument.DRAFT,
            samples=True,
            chain=True,
            reads_text=True,
        ),
        # The module for multi-token prediction in the target's checkpoint.
        "mtp": ProposerType(
            syntax="mtp",
            maker="drafting.propose.draft_model.open:mtp_proposer",
            samples=True,
            chain=True,
            reads_text=True,
        ),
        # A draft model with another vocabulary, which drafts token by token.
        "draft-tokens": ProposerType(
            syntax="draft-tokens:DIR",
            maker="drafting.propose.draft_model.open:draft_tokens_proposer",
            argument=Argument.MODEL,
            samples=True,
            chain=True,
            reads_text=True,
        ),
        # A draft model with another vocabulary, whose text is tokenized again.
        "draft-text": ProposerType(
            syntax="draft-text:DIR",
            maker="drafting.propose.draft_model.open:draft_text_proposer",
            argument=Argument.MODEL,
            chain=True,
            reads_text=True,
        ),
        # A draft model or a draft head that drafts a tree.
        "tree": ProposerType(
            syntax="tree:DIR",
            maker="drafting.propose.draft_model.open:tree_proposer",
            argument=Argument.DRAFT,
            samples=True,
            reads_text=True,
        ),
        # A draft model that looks up n-grams to need fewer passes.
        "cascade": ProposerType(
            syntax="cascade:DIR",
            maker="drafting.propose.draft_model.open:cascade_proposer",
            argument=Argument.MODEL,
            samples=True,
            chain=True,
            reads_text=True,
        ),
        # The tokens that followed the longest suffix of the text in a datastore; see `outrider index`.
        "retrieval": ProposerType(
            syntax="retrieval:DIR[:MIN]",
            maker="drafting.propose.lookup.retrieval:retrieval_proposer",
            argument=Argument.TEXT,
            checker="drafting.propose.lookup.retrieval:open_datastore",
        ),
        # Recorded outputs, with a chosen acceptance, to measure the engine.
        "replay": ProposerType(
            syntax="replay:FILE[:ACCEPTANCE[:SEED]]",
            maker="drafting.propose.lookup.replay:replay_proposer",
            argument=Argument.TEXT,
            checker="drafting.propose.lookup.replay:parse_replay",
            chain=True,
        ),
        # The first layers of the target, which has the target's context.
        "exit": ProposerType(
            syntax="exit:LAYERS",
            maker="drafting.propose.draft_model.self_speculation:exit_proposer",
            argument=Argument.TEXT,
            checker="drafting.propose.draft_model.self_speculation:exit_layers",
            samples=True,
            chain=True,
        ),
        # The target without some of its layers; see `outrider layers`.
        "skip": ProposerType(
            syntax="skip:A+B+C",
            maker="drafting.propose.draft_model.self_speculation:skip_proposer",
            argument=Argument.TEXT,
            checker="drafting.propose.draft_model.self_speculation:skip_layers",
            samples=True,
            chain=True,
        ),
        # The target with 4 or 8 bits per weight.
        "quantized": ProposerType(
            syntax="quantized:int4",
            maker="drafting.propose.draft_model.self_speculation:quantized_proposer",
            argument=Argument.TEXT,
            checker="drafting.propose.draft_model.self_speculation:quantized_bits",
            samples=True,
            chain=True,
        ),
    }
)
COMBINATIONS: Mapping[str, str] = MappingProxyType(
    {
        "best": "drafting.propose.best:Best",
        "first": "drafting.propose.combine:First",
        "merge": "drafting.propose.combine:Merge",
        "switch": "drafting.propose.combine:Switch",
    }
)
# Proposers that may sample draft tokens from a distribution.
SAMPLING_PROPOSERS = frozenset(name for name, proposer_type in NAMED.items() if proposer_type.samples)
# Proposers that draft chains, and combinations that make no tree of chains.
CHAINS = frozenset(name for name, proposer_type in NAMED.items() if proposer_type.chain) | {"best", "first", "switch"}
