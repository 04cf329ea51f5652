"""Convert the tokens of a growing text from one tokenizer to another."""

import codecs
import re
from collections.abc import Sequence

from outrider.core.token_text import TokenText
from outrider.drafting.propose.vocabulary.counterparts import counterparts

# Every tokenizer cuts at the end of a word and before the space that begins a word. A cut is known
# two characters later at most. An apostrophe may belong to the word.
_CUT = re.compile(r"(?<=[^\W\d_])(?=[\s!-&(-@\[-`{-~])|(?<=\S)(?= [^\W\d_])")
_MAX_STRETCH = 48  # characters without a cut after which the text is cut anyway
_LOOKAHEAD = 2  # characters after a cut that must be known


class Retokenizer:
    """The text of one sequence, tokenized again with the draft model's tokenizer.

    The tokens before the last cut are stable: more text does not change them. Stable tokens and the
    text after them depend only on the text so far, not on how it was split into calls. A special
    token that the draft's tokenizer lacks is tokenized as the text that it is written as.
    """

    def __init__(self, target: TokenText, draft: TokenText, shared: Sequence[int] | None = None) -> None:
        """Convert ids of `target` to ids of `draft`. `shared` are their `counterparts` if they are known already."""
        self._target = target
        self._draft = draft
        self._shared = counterparts(target, draft) if shared is None else shared
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.count = 0  # tokens of the target so far
        self.stable_ids = list(draft.begin)
        self.tail = ""  # the text after the stable tokens

    @property
    def ends_at_character(self) -> bool:
        """Whether the text ends at the end of a character and not within one."""
        return not self._decoder.getstate()[0]

    def ids(self) -> list[int]:
        """Return the text so far in the draft's ids."""
        return [*self.stable_ids, *self._draft.encode([self.tail])[0]] if self.tail else list(self.stable_ids)

    def push(self, tokens: Sequence[int]) -> None:
        """Append tokens of the target."""
        pending: list[int] = []
        for token in tokens:
            if token in self._target.special:
                self._push_text(pending)
                pending = []
                self._push_special(token)
            else:
                pending.append(token)
        self._push_text(pending)
        self.count += len(tokens)

    def _push_text(self, tokens: Sequence[int]) -> None:
        self.tail += self._decoder.decode(self._target.spell(tokens))
        stretches = []
        start = 0
        while cut := self._next_cut(start):
            stretches.append(self.tail[start:cut])
            start = cut
        self.tail = self.tail[start:]
        self._add_stable(stretches)

    def _next_cut(self, start: int) -> int | None:
        """Return the first cut after `start`; None if it is not known yet."""
        match = _CUT.search(self.tail, start + 1, start + 1 + _MAX_STRETCH + _LOOKAHEAD)
        if match and match.start() <= start + _MAX_STRETCH:
            return match.start()
        return start + _MAX_STRETCH if len(self.tail) > start + _MAX_STRETCH + _LOOKAHEAD else None

    def _push_special(self, token: int) -> None:
        """Append a special token. There is always a cut before it."""
        self.tail += self._decoder.decode(b"", final=True)
        self._add_stable([self.tail] if self.tail else [])
        self.tail = ""
        draft_id = self._shared[token]
        if draft_id >= 0:
            # The draft's tokenizer may have put the same token at the beginning already.
            if self.stable_ids != [draft_id] or self._draft.begin != (draft_id,):
                self.stable_ids.append(draft_id)
        elif token != self._target.roles.get("bos"):
            self._add_stable([self._target.special[token]])

    def _add_stable(self, stretches: Sequence[str]) -> None:
        for ids in self._draft.encode(stretches):
            self.stable_ids += ids
