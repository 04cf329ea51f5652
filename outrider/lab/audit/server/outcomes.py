"""The outcomes that are counted: beginnings of a server's completions, with their probability under a hypothesis."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from outrider.core.params import SamplingParams
from outrider.lab.audit.server.client import Answer
from outrider.lab.audit.server.hypotheses import Hypothesis, Position, State, sampling_key
from outrider.lab.audit.server.model import Model, Texts, Tokens, is_incomplete

OTHER = "other"  # all outcomes that are not distinguished
_FLOOR = 1e-6  # probability below which another tokenization of a text is not looked at
_NOTICED = 1e-3  # probability of a token at the edge of top_p below which a test would not notice it
_DRAFT_WIDTH = 1  # likeliest tokens of the draft that are distinguished as well

# A list of tokens for servers that return token ids, and a text for the others. OTHER ends an outcome.
Outcome = tuple[int | str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """The beginnings of an output that a test distinguishes, each with the logits after it."""

    prompt: Tokens
    depth: int  # tokens
    logits: Mapping[Tokens, torch.Tensor]  # [V] by beginning, of 0 to depth - 1 tokens
    draft_logits: Mapping[Tokens, torch.Tensor]  # the same of the draft; empty if it is unknown
    children: Mapping[Tokens, tuple[int, ...]]  # tokens that are followed, by beginning
    texts: Mapping[Tokens, str] | None  # by leaf, for servers that return text; None: outcomes are tokens
    memo: Mapping[Tokens, dict[Any, Any]]  # what the hypotheses have computed, by beginning
    distributions: dict[Any, dict[Outcome, float]]  # that were computed already
    ambiguity: float  # probability of the texts' other tokenizations, at temperature 1; part of the distribution

    def outcome(self, answer: Answer) -> Outcome:
        if self.texts is not None:
            known = not answer.ended and answer.text in self.texts.values()
            return (answer.text,) if known else (OTHER,)
        at: Tokens = ()
        for position in range(self.depth):
            tokens = answer.tokens or ()
            token = tokens[position] if position < len(tokens) else None
            if token not in self.children[at]:
                return (*at, OTHER)
            at = (*at, token)
        return at

    def counts(self, answers: Sequence[Answer]) -> Counter[Outcome]:
        """Return how many completions have each outcome."""
        return Counter(map(self.outcome, answers))

    def distribution(self, hypothesis: Hypothesis, params: SamplingParams) -> dict[Outcome, float]:
        """Return the probability of every outcome under a hypothesis, by the chain rule in float64."""
        key = (id(hypothesis), sampling_key(params))
        if key not in self.distributions:
            self.distributions[key] = self._distribution(hypothesis, params)
        return self.distributions[key]

    def prepare(self, hypotheses: Iterable[Hypothesis], params: SamplingParams) -> None:
        """Compute the distributions of hypotheses, and free the memory of what they have in common."""
        for hypothesis in hypotheses:
            self.distribution(hypothesis, params)
        for memo in self.memo.values():
            memo.clear()

    def _distribution(self, hypothesis: Hypothesis, params: SamplingParams) -> dict[Outcome, float]:
        distribution: dict[Outcome, float] = defaultdict(float)
        reached: dict[Tokens, dict[State, float]] = {(): {hypothesis.start: 1.0}}
        for beginning in sorted(self.children, key=len):
            states = reached[beginning]
            position = Position(
                logits=self.logits[beginning],
                draft_logits=self.draft_logits.get(beginning),
                params=params,
                prompt=self.prompt,
                output=beginning,
                memo=self.memo[beginning],
            )
            following = torch.tensor(self.children[beginning], dtype=torch.int64)
            moves: dict[State, torch.Tensor] = {}
            for state, weight in states.items():
                for after, probs in hypothesis.step(position, state).items():
                    moves[after] = moves.get(after, torch.zeros_like(probs)) + weight * probs
            inside = dict.fromkeys(self.children[beginning], 0.0)
            for after, probs in moves.items():
                for token, prob in zip(self.children[beginning], probs[following].tolist(), strict=True):
                    inside[token] += prob
                    reached.setdefault((*beginning, token), {})[after] = prob
            mass = sum(states.values())
            distribution[self._other(beginning)] += max(mass - sum(inside.values()), 0.0)
            if len(beginning) == self.depth - 1:
                for token, prob in inside.items():
                    distribution[self._leaf((*beginning, token))] += prob
        return dict(distribution)

    def _other(self, beginning: Tokens) -> Outcome:
        return (OTHER,) if self.texts is not None else (*beginning, OTHER)

    def _leaf(self, tokens: Tokens) -> Outcome:
        if self.texts is None:
            return tokens
        return (self.texts[tokens],) if tokens in self.texts else (OTHER,)


def grow(
    target: Model, prompt: Tokens, *, depth: int, width: int, draft: Model | None = None, texts: Texts | None = None
) -> Tree:
    """Return the tree of the likely outcomes of a prompt.

    Args:
        depth: tokens of an outcome.
        width: likeliest tokens that are distinguished at each position.
        draft: the draft model of the server, if it is known.
        texts: turns tokens into text, for servers that return text only.
    """
    ends = target.pair.end_ids
    children: dict[Tokens, tuple[int, ...]] = {}
    level: list[Tokens] = [()]
    for _ in range(depth):
        for beginning in level:
            text = (*prompt, *beginning)
            best = target.logits(text).topk(width + len(ends)).indices.tolist()
            likely = [token for token in best if token not in ends][:width]
            if draft is not None:
                likely += draft.logits(text).topk(_DRAFT_WIDTH).indices.tolist()
            children[beginning] = tuple(dict.fromkeys(token for token in likely if token not in ends))
        level = [(*beginning, token) for beginning in level for token in children[beginning]]
    leaves = None
    ambiguity = 0.0
    if texts is not None:
        leaves = {tokens: texts.after(prompt, tokens) for tokens in level}
        leaves = {tokens: text for tokens, text in leaves.items() if text and not is_incomplete(text)}
        ambiguity = _add_tokenizations(target, texts, prompt, children, leaves, depth)
    return Tree(
        prompt=prompt,
        depth=depth,
        logits={beginning: target.logits((*prompt, *beginning)) for beginning in children},
        draft_logits={beginning: draft.logits((*prompt, *beginning)) for beginning in children} if draft else {},
        children=children,
        texts=leaves,
        memo={beginning: {} for beginning in children},
        distributions={},
        ambiguity=ambiguity,
    )


def edge(tree: Tree, params: SamplingParams) -> float:
    """Return how close, in logits, rounding is to changing which tokens top_k or top_p keep; inf without filters."""
    smallest = math.inf
    for logits in tree.logits.values():
        scaled = (logits / (params.temperature or 1.0)).sort(descending=True).values
        if 0 < params.top_k < len(scaled):
            smallest = min(smallest, float(scaled[params.top_k - 1] - scaled[params.top_k]))
        if params.top_p < 1:
            # A change of all logits by e changes the mass before a token by at most about e.
            p = scaled.softmax(-1)
            gaps = (p.cumsum(-1) - params.top_p).abs()[p > _NOTICED]
            smallest = min(smallest, float(gaps.min())) if len(gaps) else smallest
    return smallest


def _add_tokenizations(
    target: Model,
    texts: Texts,
    prompt: Tokens,
    children: dict[Tokens, tuple[int, ...]],
    leaves: dict[Tokens, str],
    depth: int,
) -> float:
    """Add the other tokenizations of the leaves' texts, so that a text has the probability of all of them.

    Returns:
        The probability of what was added, at temperature 1.
    """
    wanted = set(leaves.values())
    added = 0.0
    waiting: list[tuple[Tokens, float]] = [((), 1.0)]
    while waiting:
        beginning, prob = waiting.pop()
        done = texts.after(prompt, beginning) if beginning else ""
        p = target.logits((*prompt, *beginning)).softmax(-1)
        rest = {text[len(done) :] for text in wanted if text.startswith(done)}
        known = children.get(beginning, ())
        found = {token for text in rest for token in texts.beginnings(text.encode())} - set(known)
        new = sorted(token for token in found if prob * float(p[token]) > _FLOOR)
        for token in (*known, *new):
            longer = (*beginning, token)
            chance = prob * float(p[token])
            if len(longer) < depth:
                if longer not in children:
                    children[longer] = ()
                waiting.append((longer, chance))
            elif longer not in leaves and texts.after(prompt, longer) in wanted:
                leaves[longer] = texts.after(prompt, longer)
                added += chance
        children[beginning] = (*known, *new)
    return added
