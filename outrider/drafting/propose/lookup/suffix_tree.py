"""Grow a tree of draft tokens from what followed before, likeliest node first."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from outrider.drafting.propose.acceptance import MIN_ACCEPT_PROB, AcceptanceEstimator
from outrider.drafting.propose.lookup.suffix_automaton import Automaton
from outrider.drafting.propose.lookup.suffix_history import Continuation
from outrider.drafting.propose.tree_builder import TreeBuilder

# Successors of a state that are considered. A token with a share below 1 / _MAX_SUCCESSORS is left out.
_MAX_SUCCESSORS = 16
_MAX_MATCH_BITS = 6  # longer matches share the acceptance statistics of matches with this many binary digits
_SHARE_LEVELS = 4  # levels of a token's share below 1
_NUM_KINDS = (_MAX_MATCH_BITS + 1) * (_SHARE_LEVELS + 1)  # for the sequence itself, and as many for past outputs


# A draft token that may be added below a node. It is a plain tuple, because a tree needs hundreds of them:
# - token
# - acceptance probability if its parent is accepted
# - kind
# - state of the automaton after the token; 0 if the sequence never continued with the token
# - number of last tokens that match this state; 0 likewise
# - bit mask of the past outputs' continuations that contain the token
_Step = tuple[int, float, int, int, int, int]


@dataclass(frozen=True, slots=True)
class SuffixDraft:
    """The draft tree of one sequence, with the kind and the origin of each node."""

    builder: TreeBuilder = field(default_factory=TreeBuilder)
    kinds: list[int] = field(default_factory=list)
    masks: list[int] = field(default_factory=list)  # bit mask of the continuations that contain a node
    continuations: Sequence[Continuation] = ()

    def outputs(self, emitted: Sequence[int]) -> list[int]:
        """Return the past outputs that contain the last accepted draft token."""
        path = self.builder.path(emitted) if self.continuations else []
        if not path:
            return []
        mask = self.masks[path[-1]]
        used = [continuation for i, continuation in enumerate(self.continuations) if mask >> i & 1]
        return [output for continuation in used for output in continuation.outputs]


class ShareCalibration:
    """The acceptance probability of a token, divided by its share among what followed, by kind."""

    def __init__(self) -> None:
        self._acceptance = AcceptanceEstimator()
        self.factors = array("d", map(_prior_factor, range(2 * _NUM_KINDS)))

    def learn(self, draft: SuffixDraft, emitted: Sequence[int]) -> None:
        """Learn from the draft of a sequence after the tokens `emitted` were committed."""
        self._acceptance.learn(draft.builder, draft.kinds, emitted)
        for kind in set(draft.kinds):
            share = min((kind % (_SHARE_LEVELS + 1) + 0.5) / _SHARE_LEVELS, 1.0)  # in the middle of the level
            self.factors[kind] = self._acceptance.accept_prob(kind, share * _prior_factor(kind)) / share


def grow(
    automaton: Automaton, continuations: Sequence[Continuation], matched: int, factors: Sequence[float], budget: int
) -> SuffixDraft:
    """Return the likeliest draft tokens.

    Args:
        continuations: how past outputs continued.
        matched: tokens that these outputs have in common with the end of the sequence.
        factors: see `ShareCalibration`.
        budget: most draft tokens.
    """
    draft = SuffixDraft(continuations=continuations)
    # Candidates: minus the acceptance probability, order, parent, depth, and the step.
    queue: list[tuple[float, int, int, int, _Step]] = []
    state, state_matched = automaton.longest()
    mask = (1 << len(continuations)) - 1
    node = -1
    depth = 0
    accept_prob = 1.0
    while len(draft.kinds) < budget:
        steps: dict[int, _Step] = {}
        if accept_prob >= MIN_ACCEPT_PROB:
            if state_matched:
                steps = _steps_in_sequence(automaton, state, state_matched, factors)
            if mask:
                _merge(steps, _steps_in_outputs(continuations, mask, depth, matched + depth, factors))
        order = len(draft.kinds) * 2 * _MAX_SUCCESSORS
        for step in steps.values():
            step_prob = accept_prob * step[1]
            if step_prob >= MIN_ACCEPT_PROB:
                heappush(queue, (-step_prob, order, node, depth + 1, step))
                order += 1
        if not queue:
            break
        negative_prob, _, parent, depth, best = heappop(queue)
        token, _, kind, state, state_matched, mask = best
        accept_prob = -negative_prob
        node = draft.builder.add(token, parent, accept_prob)
        draft.kinds.append(kind)
        draft.masks.append(mask)
    return draft


def _steps_in_sequence(automaton: Automaton, state: int, matched: int, factors: Sequence[float]) -> dict[int, _Step]:
    """Return what followed the longest suffix of a state that something followed.

    A state that ends with the sequence has no successors. Its shorter suffix has some, because the
    sequence repeats itself there.
    """
    while not (pairs := automaton.following(state, _MAX_SUCCESSORS)):
        state = automaton.link[state]
        matched = automaton.length[state]
        if not matched:
            return {}
    counts = [automaton.count[next_state] for _, next_state in pairs]
    total = sum(counts) if len(pairs) < _MAX_SUCCESSORS else max(sum(counts), automaton.count[state])
    steps: dict[int, _Step] = {}
    for (token, next_state), count in zip(pairs, counts, strict=True):
        if count * _MAX_SUCCESSORS >= total:
            kind = _full_share_kind(matched) - _SHARE_LEVELS + count * _SHARE_LEVELS // total
            accept_prob = min(factors[kind] * count / total, 1.0)
            steps[token] = (token, accept_prob, kind, next_state, matched + 1, 0)
    return steps


def _steps_in_outputs(
    continuations: Sequence[Continuation], mask: int, depth: int, matched: int, factors: Sequence[float]
) -> dict[int, _Step]:
    """Return the tokens at `depth` of the continuations in `mask`."""
    groups: dict[int, tuple[int, int]] = {}  # by token: mask, and number of outputs
    total = 0
    for i, continuation in enumerate(continuations):
        if mask >> i & 1 and depth < len(continuation.tokens):
            token = continuation.tokens[depth]
            token_mask, count = groups.get(token, (0, 0))
            groups[token] = token_mask | 1 << i, count + len(continuation.outputs)
            total += len(continuation.outputs)
    steps: dict[int, _Step] = {}
    for token, (token_mask, count) in groups.items():
        kind = _NUM_KINDS + _full_share_kind(matched) - _SHARE_LEVELS + count * _SHARE_LEVELS // total
        steps[token] = (token, min(factors[kind] * count / total, 1.0), kind, 0, 0, token_mask)
    return steps


def _merge(steps: dict[int, _Step], others: dict[int, _Step]) -> None:
    """Add the steps of past outputs. A token of both gets the higher acceptance probability and its kind."""
    for token, other in others.items():
        step = steps.get(token)
        if step is None:
            steps[token] = other
        else:
            _, accept_prob, kind, *_ = other if other[1] > step[1] else step
            _, _, _, state, matched, _ = step
            steps[token] = (token, accept_prob, kind, state, matched, other[5])


def _full_share_kind(matched: int) -> int:
    """Return the kind of the only token that followed a match of this length. Kinds of smaller shares precede it."""
    return min(matched.bit_length(), _MAX_MATCH_BITS) * (_SHARE_LEVELS + 1) + _SHARE_LEVELS


def _prior_factor(kind: int) -> float:
    """Return the factor before anything is learned. It rises with the length of the match."""
    match_bits = kind % _NUM_KINDS // (_SHARE_LEVELS + 1)
    mean_length = 0.75 * 2.0**match_bits  # of matches whose length has this number of binary digits
    return mean_length / (mean_length + 1)
