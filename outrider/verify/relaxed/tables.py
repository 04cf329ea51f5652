"""Tables of relaxed rules: which tokens are similar, from a file or from an embedding of the tokens."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from outrider.core.params import is_whole
from outrider.errors import OutriderError
from outrider.verify.relaxed.groups import OverlappingGroups
from outrider.verify.rules import TargetFacts

_KINDS = ("neighbors", "groups", "bins")  # what a JSON file may hold


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table of a file.

    A `.safetensors` file has an `embedding` [n, D], and `tokens` [n] if its rows are not the token ids 0, 1, ... of the
    whole vocabulary. A `.json` file has the target's `vocab` and one of `neighbors` (an object with the neighbors of
    token ids, the nearest first), `groups` (lists of token ids) and `bins` (token ids in order).
    """

    file: str
    kind: str  # embedding, or one of _KINDS
    vocab: int | None = None
    tokens: torch.Tensor | None = None
    embedding: torch.Tensor | None = None
    values: Any = None  # of a JSON file

    @classmethod
    def read(cls, path: Path, kinds: Sequence[str]) -> Table:
        """Read a file.

        Args:
            path: a `.safetensors` or `.json` file.
            kinds: the kinds of tables that the rule takes.

        Raises:
            OutriderError: it cannot be read or holds something else.
        """
        table = _read_embedding(path) if path.suffix == ".safetensors" else _read_json(path)
        if table.kind not in kinds:
            raise OutriderError(
                f"table {path} holds {table.kind}, and the rule takes {' or '.join(kinds)}; give another table"
            )
        return table

    def check(self, vocab: int) -> None:
        """Check the table against a target of `vocab` token ids.

        Raises:
            OutriderError: it is for another vocabulary, or names unknown tokens.
        """
        if self.vocab is not None and self.vocab != vocab:
            raise OutriderError(
                f"table {self.file} is for a vocabulary of {self.vocab} tokens, and the target has"
                f" {vocab}; make it for this target"
            )
        if self.embedding is not None and self.tokens is None and len(self.embedding) != vocab:
            raise OutriderError(
                f"table {self.file} has {len(self.embedding)} rows, and the target has {vocab}"
                " tokens; add a tensor tokens with the token id of each row"
            )
        unknown = [token for token in self._ids() if not 0 <= token < vocab]
        if unknown:
            raise OutriderError(
                f"table {self.file} names token {unknown[0]}, and the target has the ids 0 to"
                f" {vocab - 1}; correct the table"
            )

    def _ids(self) -> Iterable[int]:
        """Return all token ids of the table."""
        if self.kind == "embedding":
            return [] if self.tokens is None else self.tokens.tolist()
        if self.kind == "bins":
            return list(self.values)
        if self.kind == "groups":
            return [token for group in self.values for token in group]
        return [token for own, near in self.values.items() for token in (own, *near)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """Tokens with an embedding."""

    tokens: torch.Tensor  # [n] int64
    embedding: torch.Tensor  # [n, D] float32

    @classmethod
    def of(cls, table: Table | None, first: int, last: int | None, facts: TargetFacts) -> Points:
        """Return the tokens of a table, or without one the tokens `first` to `last` with the target's embedding."""
        if table is not None:
            assert table.embedding is not None
            tokens = torch.arange(facts.vocab) if table.tokens is None else table.tokens
            return cls(tokens=tokens.to(facts.device), embedding=table.embedding.float().to(facts.device))
        tokens = token_range(first, last, facts)
        embedding = facts.embedding()
        if len(embedding) < facts.vocab:
            raise OutriderError(
                f"the target's embedding has {len(embedding)} rows for {facts.vocab} tokens; give table=FILE"
            )
        return cls(tokens=tokens, embedding=embedding[tokens.to(embedding.device)].float().to(facts.device))

    def neighbors(self, k: int) -> torch.Tensor:
        """Return [n, k] int64, the indices of the k points nearest to each point, the nearest first."""
        count = len(self.tokens)
        if k >= count:
            raise OutriderError(f"k is {k}, and {count} tokens have an embedding; use a smaller k")
        nearest = []
        rows = max(MAX_DISTANCES // count, 1)
        for begin in range(0, count, rows):
            distance = torch.cdist(self.embedding[begin : begin + rows], self.embedding)
            own = torch.arange(begin, begin + len(distance), device=distance.device)
            distance = distance.scatter_(1, own[:, None], torch.inf)
            nearest.append(distance.topk(k, largest=False).indices)
        return torch.cat(nearest)

    def clusters(self, count: int) -> torch.Tensor:
        """Return [n] int64, the cluster of each point by k-means."""
        if count > len(self.tokens):
            raise OutriderError(f"clusters is {count}, and {len(self.tokens)} tokens have an embedding; use fewer")
        return kmeans(self.embedding, count)[0]


def neighbor_ids(points: Points, k: int, facts: TargetFacts) -> torch.Tensor:
    """Return [V, k] int64, the tokens nearest to each token; -1 for tokens without an embedding."""
    result = torch.full((facts.vocab, k), -1, device=facts.device)
    result[points.tokens] = points.tokens[points.neighbors(k)]
    return result


def listed_neighbors(table: Table, k: int | None, facts: TargetFacts) -> torch.Tensor:
    """Return [V, K] int64, the first k neighbors of each token in a JSON table; -1: no more."""
    lists = {token: near[:k] for token, near in table.values.items()}
    result = torch.full((facts.vocab, max(map(len, lists.values()), default=0)), -1, dtype=torch.int64)
    for token, near in lists.items():
        result[token, : len(near)] = torch.tensor(near, dtype=torch.int64)
    return result.to(facts.device)


def nearest_groups(points: Points, k: int, facts: TargetFacts) -> OverlappingGroups:
    """Return the groups of each token and its k nearest."""
    near = torch.cat([points.tokens[:, None], points.tokens[points.neighbors(k)]], 1)
    groups = torch.unique(near.sort(1).values, dim=0)
    return OverlappingGroups.of(groups.tolist(), facts.vocab, facts.device)


def partition_labels(clusters: Sequence[tuple[int, int]], facts: TargetFacts) -> torch.Tensor:
    """Return [V] int64, the cluster of each token, from pairs of token and cluster. Other tokens are alone."""
    labels = torch.full((facts.vocab,), -1)
    for token, cluster in clusters:
        labels[token] = cluster
    alone = labels < 0
    labels[alone] = int(labels.max()) + 1 + torch.arange(int(alone.sum()))
    return labels.to(facts.device)


def bin_order(tokens: Sequence[int] | torch.Tensor, facts: TargetFacts) -> torch.Tensor:
    """Return [V] int64, the place of each token among `tokens`; -1: it is none of them."""
    order = torch.full((facts.vocab,), -1)
    order[torch.as_tensor(tokens).cpu()] = torch.arange(len(tokens))
    return order.to(facts.device)


def token_range(first: int, last: int | None, facts: TargetFacts) -> torch.Tensor:
    """Return the token ids `first` to `last`; None: to the end of the vocabulary."""
    end = facts.vocab - 1 if last is None else last
    if not first < end < facts.vocab:
        raise OutriderError(
            f"first and last are {first} and {end}, and the target has the ids 0 to"
            f" {facts.vocab - 1}; use two of them in order"
        )
    return torch.arange(first, end + 1, device=facts.device)


def _read_embedding(path: Path) -> Table:
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise OutriderError(f"table {path} cannot be read ({error}); give a .safetensors or .json file") from None
    embedding = tensors.get("embedding")
    tokens = tensors.get("tokens")
    if embedding is None or embedding.dim() != 2 or not bool(embedding.float().isfinite().all()):
        raise OutriderError(f"table {path} has no finite tensor embedding [tokens, dimensions]; add it")
    if tokens is not None:
        if tokens.shape != embedding.shape[:1] or tokens.is_floating_point():
            raise OutriderError(f"table {path} has tokens that are not one id per row of embedding; correct it")
        tokens = tokens.long()
        _check_distinct(path, tokens.tolist())
    return Table(file=path.name, kind="embedding", tokens=tokens, embedding=embedding)


def _read_json(path: Path) -> Table:
    try:
        document = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise OutriderError(f"table {path} cannot be read ({reason}); give a .safetensors or .json file") from None
    kinds = [kind for kind in _KINDS if isinstance(document, Mapping) and kind in document]
    if len(kinds) != 1 or not _is_id(document.get("vocab")):
        raise OutriderError(f"table {path} needs the number vocab and one of {', '.join(_KINDS)}; correct it")
    (kind,) = kinds
    values = document[kind]
    if kind == "neighbors":
        if not isinstance(values, Mapping) or not all(token.isdecimal() for token in values):
            raise OutriderError(f"table {path} has neighbors that are not by token id; correct it")
        values = {int(token): near for token, near in values.items()}
        lists = list(values.values())
    else:
        lists = values if kind == "groups" else [values]
    if not isinstance(lists, list) or not all(isinstance(each, list) and all(map(_is_id, each)) for each in lists):
        raise OutriderError(f"table {path} has {kind} that are not lists of token ids; correct it")
    for each in lists:
        _check_distinct(path, each)
    if not any(lists):
        raise OutriderError(f"table {path} has empty {kind}; add token ids")
    return Table(file=path.name, kind=kind, vocab=document["vocab"], values=values)


def _is_id(value: object) -> bool:
    return is_whole(value) and value >= 0


def _check_distinct(path: Path, tokens: Sequence[int]) -> None:
    repeated = [token for token, times in Counter(tokens).items() if times > 1]
    if repeated:
        raise OutriderError(f"table {path} lists token {repeated[0]} twice; list it once")


MAX_DISTANCES = 1 << 24  # most distances that are computed at once, which take 64 MB
_ITERATIONS = 25


def kmeans(
    points: torch.Tensor, count: int, *, seed: int = 0, iterations: int = _ITERATIONS
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cluster points by their Euclidean distance.

    Args:
        points: [N, D] float, at least `count` of them.
        count: number of clusters.
        seed: chooses the first centers. A cluster that loses all its points starts again at a random point.
        iterations: rounds of assignment and averaging.

    Returns:
        The clusters [N] of the points and the centers [count, D]. A cluster may be empty if points are equal.
    """
    generator = torch.Generator().manual_seed(seed)
    centers = points[torch.randperm(len(points), generator=generator)[:count].to(points.device)].clone()
    for _ in range(iterations):
        labels = nearest(points, centers)
        size = labels.bincount(minlength=count)
        total = torch.zeros_like(centers).index_add_(0, labels, points)
        again = torch.randint(len(points), (count,), generator=generator).to(points.device)
        centers = torch.where((size > 0)[:, None], total / size.clamp(min=1)[:, None], points[again])
    return nearest(points, centers), centers


def nearest(points: torch.Tensor, centers: torch.Tensor) -> torch.Tensor:
    """Return [N], the index of the center [C, D] that is nearest to each point [N, D]."""
    rows = max(MAX_DISTANCES // len(centers), 1)
    starts = range(0, len(points), rows)
    return torch.cat([torch.cdist(points[start : start + rows], centers).argmin(1) for start in starts])
