"""Compile constraints with llguidance, and compute which tokens may or must follow."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from threading import Lock
from time import thread_time
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from outrider.core.constraint import STYLE, Constraint, Kind
from outrider.core.guidance_tokenizer import GuidanceTokenizer
from outrider.errors import Fault, OutriderError, either

_MAX_SECONDS = 1.0  # for one token; usually it takes milliseconds. `_LIMITS` does not bound every case
_time_limit = True  # whether `_MAX_SECONDS` applies
_MAX_REPEATS = 10_000  # most repetitions of a part of a regular expression or grammar
_PROBED_TOKENS = 4  # forced tokens that `compile` consumes, to reject constraints that never end
_CACHE_SIZE = 64  # compiled constraints in the cache
# A string, a regular expression, a comment or the name of a token in a grammar. They cannot be parts of each other.
_GRAMMAR_PART = re.compile(r'"(?:[^"\\\n]|\\.)*"|(?://|#)[^\n]*|/(?:[^/\\]|\\.)+/|<[^<>\s]+>')
# Parts of llguidance's messages.
_DEAD_END = "NoExtension"
_REFUSED = "doesn't satisfy the grammar"
# Limits in llguidance's units. They allow some seconds for compiling and 60 ms for a mask.
_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}


def remove_time_limit() -> None:
    """Remove the time limit of a token. Ranks must decide alike, and times differ."""
    global _time_limit
    _time_limit = False


class Grammars:
    """Compiles constraints for one tokenizer and caches the most recent ones."""

    def __init__(self, tokenizer: Any, *, vocab: int, end_ids: Sequence[int]) -> None:
        """Prepare masks over `vocab` ids, of which `end_ids` end a text, for a tokenizer of transformers."""
        self._tokenizer = tokenizer
        self._vocab = vocab
        self._ends = tuple(sorted(end_ids))
        self._tokenizer_info: Any = None  # the tokenizer in the form of llguidance, created on first use
        self._named: Mapping[str, str] = {}  # see `GuidanceTokenizer`; set with the former
        self._cache: OrderedDict[Constraint, Grammar] = OrderedDict()
        self._lock = Lock()  # of the cache

    def compile(self, constraint: Constraint) -> Grammar:
        """Compile a constraint.

        Raises:
            OutriderError: the constraint is invalid, too large or unsatisfiable, or llguidance is not installed.
        """
        with self._lock:
            if constraint not in self._cache:
                self._cache[constraint] = self._checked(constraint)
                if len(self._cache) > _CACHE_SIZE:
                    self._cache.popitem(last=False)
            self._cache.move_to_end(constraint)
            return self._cache[constraint]

    def _checked(self, constraint: Constraint) -> Grammar:
        compiled = self._compile(constraint)
        grammar = Grammar(compiled, words=-(-self._tokenizer_info.vocab_size // 32), ends=self._ends)
        matcher = grammar.start(frozenset())
        if matcher.done or not matcher.allowed().any():
            raise _invalid(constraint, "only the empty text satisfies it")
        for _ in range(_PROBED_TOKENS):
            if matcher.forced is not None and not matcher.done:
                matcher.advance(matcher.forced)
        return grammar

    def _compile(self, constraint: Constraint) -> Any:
        try:
            import llguidance
        except ImportError as error:
            raise OutriderError('constraints need llguidance; run pip install "outrider[guided]"') from error
        if self._tokenizer_info is None:
            self._tokenizer_info = self._make_tokenizer_info()
        try:
            text = _translate(constraint, self._named)
            if constraint.prefix:
                text = _after_prefix(_with_ids(constraint.prefix, self._named), text)
        except (ValueError, RecursionError) as error:
            raise _invalid(constraint, str(error)) from error
        limits = llguidance.LLParserLimits(**_LIMITS)
        matcher = llguidance.LLMatcher(self._tokenizer_info, text, log_level=0, limits=limits)
        if matcher.is_error():
            raise _invalid(constraint, matcher.get_error())
        return matcher

    def _make_tokenizer_info(self) -> Any:
        from llguidance import LLTokenizer, TokenizerWrapper

        source = GuidanceTokenizer(self._tokenizer, vocab=self._vocab, ends=self._ends)
        self._named = source.named
        return LLTokenizer(TokenizerWrapper(source), eos_token=list(self._ends) or None)


class Grammar:
    """A compiled constraint. Each completion starts a `Matcher` of its own."""

    def __init__(self, matcher: Any, *, words: int, ends: Sequence[int]) -> None:
        """Wrap a fresh `matcher` whose masks have `words` words of 32 bits."""
        self.matcher = matcher
        self.words = words
        self.ends = ends

    def start(self, end_ids: frozenset[int]) -> Matcher:
        """Start a matcher for a text that `end_ids` end."""
        return Matcher(self, end_ids)


class Matcher:
    """The state of one text in its grammar.

    Forced tokens depend only on the text. So a run of forced tokens is computed once, where it begins.
    """

    def __init__(self, grammar: Grammar, end_ids: frozenset[int]) -> None:
        self._grammar = grammar
        self._forbidden_ends = [token for token in grammar.ends if token not in end_ids]
        self._ends = sorted(end_ids.difference(grammar.ends))  # end tokens that the grammar does not know
        self._committed: list[int] = []
        self._matcher = grammar.matcher.deep_copy()
        # For each pushed draft token, the matcher and `_forced` before it. A copy takes microseconds, and after a
        # rollback llguidance's masks may be those of the text that was taken back.
        self._before: list[tuple[Any, list[int]]] = []
        self._forced = self._forced_run()  # the tokens that must follow, in reverse order

    @property
    def done(self) -> bool:
        """Whether the text must end here."""
        return bool(self._matcher.is_stopped())

    @property
    def forced(self) -> int | None:
        """The token that must follow, or None."""
        return self._forced[-1] if self._forced else None

    def advance(self, token: int) -> None:
        """Consume a committed token that does not end the text.

        Raises:
            OutriderError: the grammar is too complex at this position.
        """
        self._committed.append(token)
        self._consume(token)

    def push(self, token: int) -> None:
        """Consume an allowed draft token. `pop` undoes it.

        Raises:
            OutriderError: the grammar is too complex at this position; call `reset`.
        """
        self._before.append((self._matcher, self._forced))
        self._matcher = self._matcher.deep_copy()
        self._consume(token)

    def pop(self) -> None:
        """Undo the last `push`."""
        self._matcher, self._forced = self._before.pop()

    def allowed(self) -> NDArray[np.uint8]:
        """Return the tokens that may follow, as one bit per id, lowest first. End ids are set where the text may end.

        Raises:
            OutriderError: the grammar is too complex at this position; call `reset`.
        """
        bits = np.zeros(4 * self._grammar.words, np.uint8)
        if self.forced is not None:
            bits[self.forced >> 3] = 1 << (self.forced & 7)
            return bits
        start = thread_time()
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        self._check(start)
        for token in self._forbidden_ends:
            bits[token >> 3] &= ~(1 << (token & 7)) & 255
        if self._ends and self._matcher.is_accepting():
            for token in self._ends:
                bits[token >> 3] |= 1 << (token & 7)
        return bits

    def reset(self) -> None:
        """Return to the committed text after an error."""
        if self._before:
            self._matcher, self._forced = self._before[0]
            self._before = []
            return
        self._matcher = self._grammar.matcher.deep_copy()
        self._matcher.consume_tokens(self._committed)

    def _consume(self, token: int) -> None:
        start = thread_time()
        self._matcher.consume_token(token)
        self._check(start)
        self._forced = self._forced[:-1] or self._forced_run()

    def _forced_run(self) -> list[int]:
        """Return the tokens that must follow, in reverse order."""
        start = thread_time()
        tokens: list[int] = self._matcher.compute_ff_tokens()
        self._check(start)
        return tokens[::-1]

    def _check(self, start: float) -> None:
        """Raise OutriderError if the matcher has failed, or has taken too long since `start`."""
        if self._matcher.is_error():
            raise grammar_error(str(self._matcher.get_error()).partition("\n")[0])
        if _time_limit and (seconds := thread_time() - start) > _MAX_SECONDS:
            raise OutriderError(f"the grammar took {seconds:.1f} seconds for one token; simplify it")


def grammar_error(reason: str) -> OutriderError:
    """Return the error of a matcher that has failed during a text, for llguidance's reason."""
    if _DEAD_END in reason:
        return OutriderError(
            f"the grammar allows no token at this position ({reason}); let the text go on or end"
            " here, and use characters for which the model has tokens"
        )
    if _REFUSED in reason:
        return Fault(
            f"the constraint refused a token that it had allowed ({reason}), which is a fault of Outrider; report it"
            " with the constraint and the tokenizer.json of the model, and leave the constraint out until then"
        )
    return OutriderError(f"the grammar is too complex at this position; simplify it ({reason})")


def _with_ids(grammar: str, named: Mapping[str, str]) -> str:
    """Write the tokens that a grammar names as ids, where llguidance does not know the name.

    `named`: see `GuidanceTokenizer`.
    """
    return _GRAMMAR_PART.sub(lambda match: named.get(match[0], match[0]), grammar)


def _translate(constraint: Constraint, named: Mapping[str, str]) -> str:
    """Translate a constraint to the syntax of llguidance. Raises ValueError if it is invalid.

    `named`: see `GuidanceTokenizer`.
    """
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    counts = re.findall(r"\{\s*(?:\d*\s*,)?\s*(\d+)\s*\}", constraint.source)
    if any(len(count) > 9 or int(count) > _MAX_REPEATS for count in counts):
        raise ValueError(f"it repeats a part more than {_MAX_REPEATS} times; use fewer")
    if constraint.kind is Kind.JSON_SCHEMA:
        return str(LLMatcher.grammar_from_json_schema(constraint.source, defaults=cast(Any, dict(STYLE))))
    if constraint.kind is Kind.CHOICE:
        rules = " | ".join(json.dumps(text, ensure_ascii=False) for text in json.loads(constraint.source))
        return str(LLMatcher.grammar_from_lark(f"start: {rules}"))
    if constraint.kind is Kind.REGEX:
        return str(LLMatcher.grammar_from_regex(constraint.source))
    try:
        lark = any_to_lark(constraint.source)
    except Exception as error:  # the converter of GBNF raises bare Exceptions
        raise ValueError(f"it is neither Lark's syntax nor GBNF: {error}") from error
    return str(LLMatcher.grammar_from_lark(_with_ids(lark, named)))


def _after_prefix(prefix: str, answer: str) -> str:
    """Return the grammar of a text in llguidance's syntax after what the rule `prefix` of Lark matches."""
    document = json.loads(answer) if answer.startswith("{") else {"grammars": [{"lark_grammar": answer}]}
    document["grammars"][0]["name"] = "answer"
    start = {"lark_grammar": f"%llguidance {{}}\nstart: prefix @answer\n{prefix}"}
    return json.dumps(document | {"grammars": [start, *document["grammars"]]})


_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")  # of JSON Schema
_FIXES = (  # a pattern of llguidance's messages, and what to say in its place
    (r"Unimplemented keys: \[(.*)\]", r"it has \1, which is not supported here; leave this out"),
    (r"Invalid type: (.*)", rf'"type" is "\1"; use {either(_TYPES)}'),
    (r"Unknown format: (.*)", r'the format "\1" is unknown; leave it out, or give a "pattern"'),
    (r".*regex parse error:.*\berror: ([^\n]*).*", r"\1; correct the regular expression"),
)


def _invalid(constraint: Constraint, reason: str) -> OutriderError:
    reason = reason.replace("<non-verbose/>", "").strip()
    for pattern, message in _FIXES:
        if match := re.fullmatch(pattern, reason, re.DOTALL):
            return OutriderError(f"the {constraint.kind} constraint cannot be used: {match.expand(message)}")
    reason = " ".join(reason.split())[:300]
    return OutriderError(f"the {constraint.kind} constraint is invalid: {reason}")
