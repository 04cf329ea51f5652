"""Constraints as automata over tokens, by llguidance: what may come next, and what must."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Sequence
from time import thread_time
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from outrider.core.constraint import STYLE, Constraint, Kind
from outrider.errors import OutriderError

_SLOW = 1.0  # seconds for one place, where some milliseconds are usual: counts do not bound everything
_REPEATS = 10_000  # of a part of a regular expression or grammar
_TRIED = 4  # forced tokens that are read when a constraint is compiled: an endless text fails at the first ones
_KEPT = 64  # compiled constraints that are remembered
# What one constraint may cost, in llguidance's own units: some seconds to build, and 60 ms a mask.
_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}


class Grammars:
    """Compiles constraints for one tokenizer, and remembers the last ones."""

    def __init__(self, tokenizer: Any, *, vocab: int, end_ids: Sequence[int]) -> None:
        """For masks over `vocab` ids, of which `end_ids` end a text; `tokenizer` is transformers' own."""
        self._tokenizer, self._vocab, self._ends = tokenizer, vocab, tuple(sorted(end_ids))
        self._words: Any = None  # llguidance's view of the tokenizer, once it is needed
        self._kept: OrderedDict[Constraint, Grammar] = OrderedDict()

    def compile(self, constraint: Constraint) -> Grammar:
        """The automaton of a constraint.

        Raises:
            OutriderError: it is wrong, too large, or nothing fits it; or llguidance is not installed.
        """
        if constraint in self._kept:
            self._kept.move_to_end(constraint)
            return self._kept[constraint]
        matcher = self._matcher(constraint)
        grammar = Grammar(matcher, words=-(-self._words.vocab_size // 32), ends=self._ends)
        first = grammar.start(frozenset())
        if first.done or not first.allowed().any():
            raise _refused(constraint, "nothing fits it but the empty text")
        for _ in range(_TRIED):
            if first.forced is not None and not first.done:
                first.push(first.forced)
        self._kept[constraint] = grammar
        if len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return grammar

    def _matcher(self, constraint: Constraint) -> Any:
        try:
            import llguidance
        except ImportError as error:
            raise OutriderError('constraints need llguidance; run pip install "outrider[guided]"') from error
        if self._words is None:
            self._words = self._view()
        try:
            text = _translated(constraint)
        except (ValueError, RecursionError) as error:
            raise _refused(constraint, str(error)) from error
        limits = llguidance.LLParserLimits(**_LIMITS)
        matcher = llguidance.LLMatcher(self._words, text, log_level=0, limits=limits)
        if matcher.is_error():
            raise _refused(constraint, matcher.get_error())
        return matcher

    def _view(self) -> Any:
        from llguidance.hf import from_tokenizer

        size = max(self._vocab, len(self._tokenizer))
        try:
            return from_tokenizer(self._tokenizer, n_vocab=size, eos_token=list(self._ends) or None)
        except ValueError as error:
            raise OutriderError(f"constraints need a fast tokenizer, and this one is not ({error})") from error


class Grammar:
    """A compiled constraint, from which each completion starts with an automaton of its own."""

    def __init__(self, matcher: Any, *, words: int, ends: Sequence[int]) -> None:
        """Of a `matcher` that has read nothing, with masks of so many `words` of 32 bits."""
        self.matcher, self.words, self.ends = matcher, words, ends

    def start(self, end_ids: frozenset[int]) -> Matcher:
        """An automaton for a text that these tokens end."""
        return Matcher(self, end_ids)


class Matcher:
    """Where one text stands in its grammar.

    What is forced is a function of the text alone: a run of forced tokens is found where it begins, and holds to its
    end.
    """

    def __init__(self, grammar: Grammar, end_ids: frozenset[int]) -> None:
        self._grammar = grammar
        self._barred = [token for token in grammar.ends if token not in end_ids]
        self._ends = sorted(end_ids.difference(grammar.ends))  # that are no end-of-text to the grammar
        self._read: list[int] = []
        self._matcher = grammar.matcher.deep_copy()
        self._above: list[list[int]] = []  # of the guesses entered: what was forced before each
        self._forced = self._run()

    @property
    def done(self) -> bool:
        """Whether nothing can follow but the end."""
        return bool(self._matcher.is_stopped())

    @property
    def forced(self) -> int | None:
        """The token that must follow, where the grammar is sure of one."""
        return self._forced[-1] if self._forced else None

    def push(self, token: int) -> None:
        """Read a token that is committed and does not end the text.

        Raises:
            OutriderError: the grammar is too complex at this place.
        """
        self._read.append(token)
        self._onward(token)

    def enter(self, token: int) -> None:
        """Read a guess that is allowed here; `leave` takes it back.

        Raises:
            OutriderError: the grammar is too complex at this place; `mend` is due.
        """
        self._above.append(self._forced)
        self._onward(token)

    def leave(self) -> None:
        """Take the last guess back."""
        self._matcher.rollback(1)
        self._forced = self._above.pop()

    def allowed(self) -> NDArray[np.uint8]:
        """Which tokens may follow: a bit for each id, the lowest first; end ids where the text may end.

        Raises:
            OutriderError: the grammar is too complex at this place; `mend` is due.
        """
        bits = np.zeros(4 * self._grammar.words, np.uint8)
        if self.forced is not None:
            bits[self.forced >> 3] = 1 << (self.forced & 7)
            return bits
        began = thread_time()
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        self._check(began)
        for token in self._barred:
            bits[token >> 3] &= ~(1 << (token & 7)) & 255
        if self._ends and self._matcher.is_accepting():
            for token in self._ends:
                bits[token >> 3] |= 1 << (token & 7)
        return bits

    def mend(self) -> None:
        """Go back to the text that is committed, after an error on the way."""
        if self._above:
            self._forced = self._above[0]
            self._above = []
        self._matcher = self._grammar.matcher.deep_copy()
        self._matcher.consume_tokens(self._read)

    def _onward(self, token: int) -> None:
        began = thread_time()
        self._matcher.consume_token(token)
        self._check(began)
        self._forced = self._forced[:-1] or self._run()

    def _run(self) -> list[int]:
        """The tokens that must follow, the next one last."""
        began = thread_time()
        found: list[int] = self._matcher.compute_ff_tokens()
        self._check(began)
        return found[::-1]

    def _check(self, began: float) -> None:
        if self._matcher.is_error():
            reason = str(self._matcher.get_error()).partition("\n")[0]
            raise OutriderError(f"the grammar is too complex at this place; simplify it ({reason})")
        if (took := thread_time() - began) > _SLOW:
            raise OutriderError(f"the grammar took {took:.1f} seconds for one token; simplify it")


def _translated(constraint: Constraint) -> str:
    """A constraint as llguidance reads it; raises ValueError where it is wrong."""
    from llguidance import LLMatcher, grammar_from

    counts = re.findall(r"\{\s*(?:\d*\s*,)?\s*(\d+)\s*\}", constraint.source)
    if any(len(count) > 9 or int(count) > _REPEATS for count in counts):
        raise ValueError(f"it repeats a part more than {_REPEATS} times; use fewer")
    if constraint.kind is Kind.JSON_SCHEMA:
        return str(LLMatcher.grammar_from_json_schema(constraint.source, defaults=cast(Any, dict(STYLE))))
    if constraint.kind is Kind.CHOICE:
        rules = " | ".join(json.dumps(text, ensure_ascii=False) for text in json.loads(constraint.source))
        return str(LLMatcher.grammar_from_lark(f"start: {rules}"))
    return str(grammar_from("regex" if constraint.kind is Kind.REGEX else "grammar", constraint.source))


def _refused(constraint: Constraint, reason: str) -> OutriderError:
    reason = " ".join(reason.replace("<non-verbose/>", "").split())[:300]
    return OutriderError(f"the {constraint.kind} constraint cannot be used; change it: {reason}")
