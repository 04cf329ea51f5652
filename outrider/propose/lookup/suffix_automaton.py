"""A suffix automaton that grows with a text, and counts (Blumer et al. 1985; as a proposer, Hu et al. 2024)."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from itertools import islice

# Endings of a text, the longest first, that a new token counts for. A text that repeats itself has as many endings as
# tokens; a shorter one is asked only where no longer one has shown what follows.
_REACH = 16


class Automaton:
    """Everything that ever stood in a text, and how often.

    A state is a set of strings that ended at the same places: the endings of its longest string, down to those that its
    link has. State 0 holds the empty string, and `last` the whole text. A token takes constant time on average.
    """

    def __init__(self, text: Iterable[int] = ()) -> None:
        # Most states go on with one token only, so the first one is kept without a dictionary.
        self.first = array("q", [-1])  # the token, or -1
        self.next = array("q", [-1])  # and the state that it leads to
        self.more: dict[int, dict[int, int]] = {}  # the other ones
        self.link = array("q", [-1])
        self.length = array("q", [0])  # of the longest string
        self.count = array("q", [0])  # places where the strings ended, of which short ones may miss some: see `_REACH`
        self.last = 0
        self.extend(text)

    def __len__(self) -> int:
        return self.length[self.last]

    def extend(self, text: Iterable[int]) -> None:
        """The text goes on with these tokens."""
        count, link = self.count, self.link
        for token in text:
            state = self.last = self._append(self.last, token)
            for _ in range(_REACH):
                if state <= 0:
                    break
                count[state] += 1
                state = link[state]

    def longest(self) -> tuple[int, int]:
        """The longest ending of the text that it had before: its state and how long it is, (0, 0) for none."""
        state = max(self.link[self.last], 0)
        return state, self.length[state]

    def follow(self, state: int, token: int) -> int:
        """The state of a state's strings with this token behind them; -1 if the text has none such."""
        if self.first[state] == token:
            return self.next[state]
        others = self.more.get(state)
        return -1 if others is None else others.get(token, -1)

    def following(self, state: int, most: int) -> list[tuple[int, int]]:
        """Tokens that came after a state's strings, those first that came first, and the states they lead to."""
        if self.first[state] < 0:
            return []
        only = (self.first[state], self.next[state])
        others = self.more.get(state)
        return [only] if others is None else [only, *islice(others.items(), most - 1)]

    def bytes(self) -> int:
        """Memory, in bytes."""
        arrays = (self.first, self.next, self.link, self.length, self.count)
        flat = sum(each.itemsize * len(each) for each in arrays)
        return flat + self.more.__sizeof__() + sum(others.__sizeof__() for others in self.more.values())

    def _append(self, state: int, token: int) -> int:
        """The state of the whole text with this token behind it, where the one without is given."""
        first, following, link, more = self.first, self.next, self.link, self.more
        new = self._add(self.length[state] + 1, -1, -1, 0)
        link.append(0)
        while state >= 0:
            if first[state] < 0:
                first[state], following[state] = token, new
            elif first[state] == token:
                link[new] = self._ending(state, token)
                break
            elif (others := more.get(state)) is None:
                more[state] = {token: new}
            elif token in others:
                link[new] = self._ending(state, token)
                break
            else:
                others[token] = new
            state = link[state]
        return new

    def _add(self, length: int, token: int, following: int, count: int) -> int:
        self.length.append(length)
        self.first.append(token)
        self.next.append(following)
        self.count.append(count)
        return len(self.length) - 1

    def _ending(self, state: int, token: int) -> int:
        """The state of this state's longest string and then the token, parted from longer ones that ended elsewhere."""
        old = self.follow(state, token)
        length = self.length[state] + 1
        if self.length[old] == length:
            return old
        short = self._add(length, self.first[old], self.next[old], self.count[old])
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
