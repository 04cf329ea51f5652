"""Make relaxed verifiers from expressions such as lantern:delta=0.1,table=codebook.safetensors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from outrider.core.bound import BinDistance, Bound, GroupExact, TotalVariation
from outrider.core.noise import Noise
from outrider.core.types import Draft, Draw, Verdict
from outrider.errors import OutriderError
from outrider.verify.relaxed.bins import bins
from outrider.verify.relaxed.blend import blend
from outrider.verify.relaxed.groups import OverlappingGroups, pcg
from outrider.verify.relaxed.gsd import gsd
from outrider.verify.relaxed.lantern import lantern
from outrider.verify.relaxed.options import RuleOptions
from outrider.verify.relaxed.tables import (
    Points,
    Table,
    bin_order,
    listed_neighbors,
    nearest_groups,
    neighbor_ids,
    partition_labels,
    token_range,
)
from outrider.verify.rules import TargetFacts, Verifier, VerifyFunction

_NEIGHBORS = 16  # of a token, for lantern
_GROUP_NEIGHBORS = 4  # of a token, for pcg

Bind = Callable[[TargetFacts], VerifyFunction]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """A kind of relaxed rule."""

    options: tuple[str, ...]
    example: str
    make: Callable[[RuleOptions], tuple[Bound, Bind]]
    draw: Draw = Draw.SAMPLE
    trees: bool = False
    relaxes_greedy: bool = False
    records_distribution: bool = False
    similar: bool = False  # compares tokens, by a table or else by the target's embedding


def relaxed_verifier(expression: str) -> Verifier:
    """Return the verifier of an expression. Call `Verifier.for_target` before it verifies a draft.

    Raises:
        OutriderError: the rule or an option is unknown or invalid, or its table cannot be read.
    """
    kind = RELAXED[expression.partition(":")[0]]
    options = RuleOptions(expression, known=kind.options, example=kind.example)
    bound, bind = kind.make(options)

    def unbound(draft: Draft, p: torch.Tensor, noise: Noise) -> Verdict:
        raise OutriderError(f"verifier {expression} has no target yet; call Verifier.for_target first")

    return Verifier(
        name=expression,
        rule=unbound,
        draw=kind.draw,
        trees=kind.trees,
        exact=False,
        bound=bound,
        bind=bind,
        relaxes_greedy=kind.relaxes_greedy,
        records_distribution=kind.records_distribution,
    )


def is_relaxed(name: str) -> bool:
    """Return whether an expression names a relaxed rule."""
    return name.partition(":")[0] in RELAXED


def reads_embedding(name: str) -> bool:
    """Return whether a verifier is a rule that compares tokens by the target's embedding."""
    rule, _, options = name.partition(":")
    return (
        is_relaxed(name)
        and RELAXED[rule].similar
        and not any(option.startswith("table=") for option in options.split(","))
    )


def with_absolute_table(expression: str) -> str:
    """Return the expression with the absolute path of its table, so that it does not depend on the current folder."""
    name, colon, text = expression.partition(":")
    if name not in RELAXED or not colon:
        return expression
    parts = [part.partition("=") for part in text.split(",")]
    resolved = [
        f"table={Path(value).expanduser().resolve()}" if option == "table" else f"{option}={value}"
        for option, _, value in parts
    ]
    return f"{name}:{','.join(resolved)}"


def _lantern(options: RuleOptions) -> tuple[Bound, Bind]:
    delta = options.fraction("delta")
    k = options.count("k", least=1, default=_NEIGHBORS)
    similar = _Similar(options, "neighbors")

    def bind(facts: TargetFacts) -> VerifyFunction:
        similar.check(facts)
        if similar.listed is not None:
            return lantern(listed_neighbors(similar.listed, k, facts), delta)
        return lantern(neighbor_ids(similar.points(facts), k, facts), delta)

    return TotalVariation(delta), bind


def _gsd(options: RuleOptions) -> tuple[Bound, Bind]:
    size = options.optional_count("size", least=1)
    similar = _Similar(options, "groups")
    if similar.listed is not None and options.has("clusters"):
        raise options.error("has clusters, and its table has groups; give one of them")
    count = 0 if similar.listed is not None else options.count("clusters", least=1)
    if similar.listed is not None:
        _check_disjoint(similar.listed, options)
    what = f"the clusters of {similar.listed.file}" if similar.listed else f"{count} clusters of {similar.name}"
    if size is not None:
        what += f", each divided by the target's probability into clusters of {size}"

    def bind(facts: TargetFacts) -> VerifyFunction:
        similar.check(facts)
        if similar.listed is not None:
            pairs = [(token, i) for i, group in enumerate(similar.listed.values) for token in group]
        else:
            points = similar.points(facts)
            pairs = list(zip(points.tokens.tolist(), points.clusters(count).tolist(), strict=True))
        return gsd(partition_labels(pairs, facts), size)

    return GroupExact(what), bind


def _pcg(options: RuleOptions) -> tuple[Bound, Bind]:
    similar = _Similar(options, "groups")
    if similar.listed is not None and options.has("k"):
        raise options.error("has k, and its table has groups; give one of them")
    k = options.count("k", least=1, default=_GROUP_NEIGHBORS)
    what = (
        f"the groups of {similar.listed.file}" if similar.listed else f"a token and its {k} nearest by {similar.name}"
    )

    def bind(facts: TargetFacts) -> VerifyFunction:
        similar.check(facts)
        if similar.listed is not None:
            return pcg(OverlappingGroups.of(similar.listed.values, facts.vocab, facts.device))
        return pcg(nearest_groups(similar.points(facts), k, facts))

    return GroupExact(what), bind


def _bins(options: RuleOptions) -> tuple[Bound, Bind]:
    distance = options.count("distance", least=0)
    path = options.path("table")
    ends_given = [options.has("first"), options.has("last")]
    if path is not None and any(ends_given):
        raise options.error("has first or last, and its table names the tokens; leave them out")
    if path is None and not all(ends_given):
        raise options.error("needs a table of bins, or first and last token of the bins")
    table = None if path is None else Table.read(path, ("bins",))
    first = options.count("first", least=0, default=0)
    last = options.optional_count("last", least=0)

    def bind(facts: TargetFacts) -> VerifyFunction:
        if table is None:
            return bins(bin_order(token_range(first, last, facts), facts), distance)
        table.check(facts.vocab)
        return bins(bin_order(table.values, facts), distance)

    return BinDistance(distance), bind


def _blend(options: RuleOptions) -> tuple[Bound, Bind]:
    share = options.fraction("share")
    return TotalVariation(share), lambda facts: blend(share)


class _Similar:
    """Which tokens are similar: from a table, or from the target's embedding."""

    def __init__(self, options: RuleOptions, kind: str) -> None:
        """Read the table. It has an embedding, or what `kind` names."""
        path = options.path("table")
        self._table = None if path is None else Table.read(path, ("embedding", kind))
        self._first = options.count("first", least=0, default=0)
        self._last = options.optional_count("last", least=0)
        if path is not None and (options.has("first") or options.has("last")):
            raise options.error("has first or last, and its table names the tokens; leave them out")

    @property
    def listed(self) -> Table | None:
        """The table, if it lists neighbors or groups."""
        return self._table if self._table is not None and self._table.kind != "embedding" else None

    @property
    def name(self) -> str:
        """The source of the similarity."""
        return "the target's embedding" if self._table is None else self._table.file

    def check(self, facts: TargetFacts) -> None:
        """Check the table against a target."""
        if self._table is not None:
            self._table.check(facts.vocab)

    def points(self, facts: TargetFacts) -> Points:
        """Return the tokens that have an embedding."""
        return Points.of(self._table, self._first, self._last, facts)


def _check_disjoint(table: Table, options: RuleOptions) -> None:
    tokens = [token for group in table.values for token in group]
    if len({*tokens}) != len(tokens):
        raise options.error("has a table whose groups overlap; use pcg for them, or groups without common tokens")


RELAXED: Mapping[str, _Kind] = MappingProxyType(
    {
        "lantern": _Kind(
            options=("delta", "k", "table", "first", "last"),
            example="lantern:delta=0.1,table=codebook.safetensors",
            make=_lantern,
            similar=True,
        ),
        "gsd": _Kind(
            options=("clusters", "size", "table", "first", "last"),
            example="gsd:clusters=64,table=codebook.safetensors",
            make=_gsd,
            similar=True,
        ),
        "pcg": _Kind(options=("k", "table", "first", "last"), example="pcg:table=groups.json", make=_pcg, similar=True),
        "bins": _Kind(
            options=("distance", "table", "first", "last"),
            example="bins:distance=5,first=31744,last=31999",
            make=_bins,
            draw=Draw.RACE,
            trees=True,
            relaxes_greedy=True,
        ),
        "blend": _Kind(options=("share",), example="blend:share=0.1", make=_blend, records_distribution=True),
    }
)
