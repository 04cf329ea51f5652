"""A text that comes in one tokenizer's ids, read in another's."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence

from outrider.propose.vocabulary.token_text import TokenText, counterparts

# Where a word ends, and before the space that begins one, every tokenizer cuts. It is seen two characters behind the
# cut at the latest. An apostrophe may belong to the word.
_CUT = re.compile(r"(?<=[^\W\d_])(?=[\s!-&(-@\[-`{-~])|(?<=\S)(?= [^\W\d_])")
_LONGEST, _SEEN = 48, 2  # characters that stay together at most; how far behind a cut one must look to know it


class Retokenizer:
    """One row's text as a draft with another tokenizer reads it.

    What stands before the last cut is settled: no more text changes its ids. Both are functions of the text alone,
    however it came. Special tokens that the draft lacks are read as they are written.
    """

    def __init__(self, target: TokenText, draft: TokenText, shared: Sequence[int] | None = None) -> None:
        """Read ids of `target` as ids of `draft`; `shared` are their `counterparts`, where they are known already."""
        self._target, self._draft = target, draft
        self._shared = counterparts(target, draft) if shared is None else shared
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.count = 0  # tokens read
        self.settled = list(draft.begin)
        self.tail = ""  # what stands behind the last cut

    @property
    def whole(self) -> bool:
        """Whether the text ends with a whole character."""
        return not self._decoder.getstate()[0]

    def ids(self) -> list[int]:
        """The text so far in the draft's ids."""
        return [*self.settled, *self._draft.encode([self.tail])[0]] if self.tail else list(self.settled)

    def push(self, tokens: Sequence[int]) -> None:
        """Read on."""
        run: list[int] = []
        for token in tokens:
            if token in self._target.special:
                self._read(run)
                run = []
                self._mark(token)
            else:
                run.append(token)
        self._read(run)
        self.count += len(tokens)

    def _read(self, tokens: Sequence[int]) -> None:
        self.tail += self._decoder.decode(self._target.spell(tokens))
        stretches, at = [], 0
        while cut := self._next_cut(at):
            stretches.append(self.tail[at:cut])
            at = cut
        self.tail = self.tail[at:]
        self._settle(stretches)

    def _next_cut(self, at: int) -> int | None:
        """Where the stretch that begins at `at` ends, if that is known."""
        match = _CUT.search(self.tail, at + 1, at + 1 + _LONGEST + _SEEN)
        if match and match.start() <= at + _LONGEST:
            return match.start()
        return at + _LONGEST if len(self.tail) > at + _LONGEST + _SEEN else None

    def _mark(self, token: int) -> None:
        """Read a special token, before which a text is always cut."""
        self.tail += self._decoder.decode(b"", final=True)
        self._settle([self.tail] if self.tail else [])
        self.tail = ""
        other = self._shared[token]
        if other >= 0:
            if self.settled != [other] or self._draft.begin != (other,):  # the draft has begun with it already
                self.settled.append(other)
        elif token != self._target.roles.get("bos"):
            self._settle([self._target.special[token]])

    def _settle(self, stretches: Sequence[str]) -> None:
        for ids in self._draft.encode(stretches):
            self.settled += ids
