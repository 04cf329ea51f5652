"""From what followed before to a tree of guesses: each scored by counts, and the likeliest taken first."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from outrider.propose.acceptance import LEAST, AcceptanceEstimator
from outrider.propose.lookup.suffix_automaton import Automaton
from outrider.propose.lookup.suffix_history import Way
from outrider.propose.tree_builder import TreeBuilder

_BRANCHES = 16  # tokens looked at that may follow a guess; one that is rarer than one in so many is left out
_LONG = 6  # matches of so many binary digits fare as well as longer ones
_GRADES = 4  # of a token's share in what followed, besides all of it
_KINDS = (_LONG + 1) * (_GRADES + 1)  # of guesses that the text makes; and as many of those that outputs make

# A guess that may be made: its token, its chance if its parent is kept, and its kind; then the state of the automaton
# that it leads to and how many of the last tokens that state agrees with (0, 0 where the text never went on so), and
# the ways that go on so, a bit each.
_Step = tuple[int, float, int, int, int, int]


@dataclass(frozen=True, slots=True)
class Guessed:
    """One row's guesses, with their kinds and the ways that say so, a bit each."""

    sketch: TreeBuilder = field(default_factory=TreeBuilder)
    kinds: list[int] = field(default_factory=list)
    ways: list[int] = field(default_factory=list)
    said: Sequence[Way] = ()

    def outputs(self, emitted: Sequence[int]) -> list[int]:
        """Those that said the last of the guesses that were kept."""
        path = self.sketch.path(emitted) if self.said else []
        if not path:
            return []
        bits = self.ways[path[-1]]
        return [output for i, way in enumerate(self.said) if bits >> i & 1 for output in way.outputs]


class Worth:
    """What a token's share in what followed is worth as the chance to be kept, by kind."""

    def __init__(self) -> None:
        self._chances = AcceptanceEstimator()
        self.of = array("d", [_worth_first(kind) for kind in range(2 * _KINDS)])

    def learn(self, grown: Guessed, emitted: Sequence[int]) -> None:
        """From what became of a row's guesses."""
        self._chances.learn(grown.sketch, grown.kinds, emitted)
        for kind in set(grown.kinds):
            share = _share(kind)
            self.of[kind] = self._chances.of(kind, share * _worth_first(kind)) / share


def grow(text: Automaton, said: Sequence[Way], agreed: int, worth: Sequence[float], budget: int) -> Guessed:
    """The likeliest guesses.

    Args:
        text: what they go on.
        said: how outputs went on.
        agreed: how many tokens these had in common with the end of the text.
        worth: by kind, see `Worth`.
        budget: guesses at most.
    """
    grown = Guessed(said=said)
    buds: list[tuple[float, int, int, int, _Step]] = []  # minus a chance, age, parent, depth, and the guess
    (state, matched), ways = text.longest(), (1 << len(said)) - 1
    node, depth, chance = -1, 0, 1.0
    while len(grown.kinds) < budget:
        steps = _in_text(text, state, matched, worth) if matched and chance >= LEAST else {}
        if ways and chance >= LEAST:
            _join(steps, _in_outputs(said, ways, depth, agreed + depth, worth))
        age = len(grown.kinds) * 2 * _BRANCHES
        for step in steps.values():
            likely = chance * step[1]
            if likely >= LEAST:
                heappush(buds, (-likely, age, node, depth + 1, step))
                age += 1
        if not buds:
            break
        lost, _, parent, depth, (token, _, kind, state, matched, ways) = heappop(buds)
        chance = -lost
        node = grown.sketch.add(token, parent, chance)
        grown.kinds.append(kind)
        grown.ways.append(ways)
    return grown


def _in_text(text: Automaton, state: int, matched: int, worth: Sequence[float]) -> dict[int, _Step]:
    """What followed the longest ending that anything followed: behind its end the text repeats itself."""
    while not (pairs := text.following(state, _BRANCHES)):
        state = text.link[state]
        matched = text.length[state]
        if not matched:
            return {}
    counts = [text.count[to] for _, to in pairs]
    total = sum(counts) if len(pairs) < _BRANCHES else max(sum(counts), text.count[state])
    steps: dict[int, _Step] = {}
    for (token, to), count in zip(pairs, counts, strict=True):
        if count * _BRANCHES >= total:
            kind = _whole(matched) - _GRADES + count * _GRADES // total
            steps[token] = token, min(worth[kind] * count / total, 1.0), kind, to, matched + 1, 0
    return steps


def _in_outputs(said: Sequence[Way], ways: int, depth: int, agreed: int, worth: Sequence[float]) -> dict[int, _Step]:
    """What these ways say next, `depth` tokens on."""
    groups: dict[int, tuple[int, int]] = {}  # ways, and how many outputs they are
    total = 0
    for i, way in enumerate(said):
        if ways >> i & 1 and depth < len(way.tokens):
            bits, count = groups.get(way.tokens[depth], (0, 0))
            groups[way.tokens[depth]] = bits | 1 << i, count + len(way.outputs)
            total += len(way.outputs)
    steps: dict[int, _Step] = {}
    for token, (bits, count) in groups.items():
        kind = _KINDS + _whole(agreed) - _GRADES + count * _GRADES // total
        steps[token] = token, min(worth[kind] * count / total, 1.0), kind, 0, 0, bits
    return steps


def _join(steps: dict[int, _Step], others: dict[int, _Step]) -> None:
    """Where text and outputs say the same, the guess is as likely as says who thinks more of it."""
    for token, other in others.items():
        if step := steps.get(token):
            _, chance, kind, *_ = other if other[1] > step[1] else step
            other = token, chance, kind, step[3], step[4], other[5]
        steps[token] = other


def _whole(matched: int) -> int:
    """The kind of what always followed after a match so long; those of smaller shares stand before it."""
    return min(matched.bit_length(), _LONG) * (_GRADES + 1) + _GRADES


def _share(kind: int) -> float:
    """Of a token in what followed, amid those of its kind."""
    return min((kind % (_GRADES + 1) + 0.5) / _GRADES, 1.0)


def _worth_first(kind: int) -> float:
    """Before anything is learned: the longer the match, the more its shares are worth."""
    length = 0.75 * 2.0 ** (kind % _KINDS // (_GRADES + 1))  # amid those with so many digits
    return length / (length + 1)
