"""A suffix automaton that grows with a sequence and counts (Blumer et al. 1985; as a proposer, Hu et al. 2024)."""

from array import array
from collections.abc import Iterable
from itertools import islice

# Number of suffixes, longest first, whose counts a new token raises. A repetitive sequence has as
# many suffixes as tokens, so counting all of them would take quadratic time. A short suffix is
# needed only if nothing followed a longer one.
_MAX_COUNTED_SUFFIXES = 16


class Automaton:
    """All substrings of a token sequence, and how often each one occurs.

    A state is a set of substrings that end at the same positions: the suffixes of its longest
    string, down to those that are longer than the longest string of its link. State 0 holds the
    empty string, and `last` the whole sequence. Appending a token takes constant time on average.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        # Most states have only one transition, so the first one is kept without a dictionary.
        self.first = array("q", [-1])  # token of the first transition, or -1
        self.next = array("q", [-1])  # state that the first transition leads to
        self.more: dict[int, dict[int, int]] = {}  # further transitions, by state
        self.link = array("q", [-1])
        self.length = array("q", [0])  # of the longest string
        # Positions where the strings end. Short strings may miss some: see `_MAX_COUNTED_SUFFIXES`.
        self.count = array("q", [0])
        self.last = 0
        self.extend(tokens)

    def __len__(self) -> int:
        return self.length[self.last]

    def extend(self, tokens: Iterable[int]) -> None:
        count = self.count
        link = self.link
        for token in tokens:
            state = self.last = self._append(self.last, token)
            for _ in range(_MAX_COUNTED_SUFFIXES):
                if state <= 0:
                    break
                count[state] += 1
                state = link[state]

    def longest(self) -> tuple[int, int]:
        """Return the state and the length of the longest suffix that occurred before; (0, 0) if there is none."""
        state = max(self.link[self.last], 0)
        return state, self.length[state]

    def follow(self, state: int, token: int) -> int:
        """Return the state after a token; -1 if it never followed the strings of this state."""
        if self.first[state] == token:
            return self.next[state]
        others = self.more.get(state)
        return -1 if others is None else others.get(token, -1)

    def following(self, state: int, most: int) -> list[tuple[int, int]]:
        """Return up to `most` pairs of a token that followed the state and its next state, in order of appearance."""
        if self.first[state] < 0:
            return []
        first = (self.first[state], self.next[state])
        others = self.more.get(state)
        return [first] if others is None else [first, *islice(others.items(), most - 1)]

    def bytes(self) -> int:
        arrays = (self.first, self.next, self.link, self.length, self.count)
        array_bytes = sum(each.itemsize * len(each) for each in arrays)
        return array_bytes + self.more.__sizeof__() + sum(others.__sizeof__() for others in self.more.values())

    def _append(self, state: int, token: int) -> int:
        """Append a token to the whole sequence, which is in `state`. Return the new state."""
        first = self.first
        following = self.next
        link = self.link
        more = self.more
        new = self._add_state(self.length[state] + 1, -1, -1, 0)
        link.append(0)
        while state >= 0:
            if first[state] < 0:
                first[state] = token
                following[state] = new
            elif first[state] == token:
                link[new] = self._split(state, token)
                break
            elif (others := more.get(state)) is None:
                more[state] = {token: new}
            elif token in others:
                link[new] = self._split(state, token)
                break
            else:
                others[token] = new
            state = link[state]
        return new

    def _add_state(self, length: int, token: int, following: int, count: int) -> int:
        self.length.append(length)
        self.first.append(token)
        self.next.append(following)
        self.count.append(count)
        return len(self.length) - 1

    def _split(self, state: int, token: int) -> int:
        """Return the state of this state's longest string plus the token.

        If that state also has longer strings, which do not end at the same positions any more, it is split.
        """
        old = self.follow(state, token)
        length = self.length[state] + 1
        if self.length[old] == length:
            return old
        short = self._add_state(length, self.first[old], self.next[old], self.count[old])
        self.link.append(self.link[old])
        if old in self.more:
            self.more[short] = dict(self.more[old])
        self.link[old] = short
        while state >= 0 and self.follow(state, token) == old:
            if self.first[state] == token:
                self.next[state] = short
            else:
                self.more[state][token] = short
            state = self.link[state]
        return short
