"""Exact speculative decoding in one file: a target, a draft, rejection sampling, commit, and a proof.

Plain decoding runs the target once for each token. Here a cheap draft guesses K tokens, and the target reads all of
them in one pass. Rejection sampling keeps a part of the guess and adds one token, so that the text has exactly the
target's distribution. The proof runs the same code once for each way in which the random choices can fall, and adds
up the probabilities as fractions, without rounding. Run it: python examples/speculative_in_one_file.py
"""

import random
from collections import Counter
from fractions import Fraction
from functools import cache

VOCAB = range(3)  # the tokens are 0, 1 and 2
PROMPT = [0, 1]
K = 2  # draft tokens in each round


# The models: from a text to the probabilities of the next token.
def normalized(weights):
    """Scale weights to a sum of 1."""
    return [weight / sum(weights) for weight in weights]


@cache
def target_model(before, last):
    """Return p after the last two tokens of a text. Imagine a large network here: this is the expensive call."""
    return normalized([Fraction(1 + (before + 4 * last + 2 * token) % 5) for token in VOCAB])


@cache
def draft_model(last):
    """Return q. It sees one token only, and averages over what may stand before it."""
    guesses = [target_model(before, last) for before in VOCAB]
    return normalized([sum(column) for column in zip(*guesses, strict=True)])


class Target:
    """The target with its cache: the tokens that it has read. A real cache holds their keys and values."""

    def __init__(self):
        self.cache = []
        self.passes = 0

    def score(self, text, draft):
        """Return K + 1 distributions from one pass: after the text, and after each draft token."""
        assert self.cache == text[: len(self.cache)], "the cache holds a token that is not part of the text"
        self.passes += 1
        return [target_model(*(text + draft[:i])[-2:]) for i in range(len(draft) + 1)]

    def commit(self, text, accepted):
        """Keep what was accepted. A rejected draft token never enters the cache, so nothing is rolled back."""
        self.cache = text + accepted


# A round. `choose` is the only source of randomness: it takes probabilities and returns an index.
def speculate(target, text, leftover, choose):
    """Return the 1 to K + 1 new tokens of one round."""
    draft = []
    q = []
    for _ in range(K):  # draft: K cheap steps
        q.append(draft_model((text + draft)[-1]))
        draft.append(choose(q[-1]))
    p = target.score(text, draft)  # score: one expensive pass
    accepted, bonus = rejection_sampling(draft, p, q, choose, leftover)  # verify
    target.commit(text, draft[:accepted])  # commit; the target reads the bonus token in the next round
    return [*draft[:accepted], bonus]


def rejection_sampling(draft, p, q, choose, leftover):
    """Return how many draft tokens are accepted, and the bonus token.

    A token x is drafted with probability q(x) and then accepted with probability min(1, p(x) / q(x)). Together this
    is min(p(x), q(x)), never more than p(x). After a rejection, the bonus token makes up for the rest.
    """
    for i, token in enumerate(draft):
        accept = min(Fraction(1), p[i][token] / q[i][token])
        if choose([accept, 1 - accept]) == 1:
            return i, choose(leftover(p[i], q[i]))
    return len(draft), choose(p[-1])  # all accepted: the pass has one more distribution to sample from


def missing_part(p, q):
    """Right: after a rejection, sample from what min(p, q) lacks of p."""
    return normalized([max(p[x] - q[x], Fraction(0)) for x in VOCAB])


def all_of_p(p, q):
    """Wrong, and a common mistake: sample from p. The draft's favorites then come too often."""
    return p


def generate(length, leftover, choose, target):
    """Return `length` tokens after the prompt, by speculative decoding."""
    text = list(PROMPT)
    while len(text) < len(PROMPT) + length:
        text += speculate(target, text, leftover, choose)
    return tuple(text[len(PROMPT) :][:length])


def decode_plainly(length, choose):
    """Return `length` tokens after the prompt, one for each pass."""
    text = list(PROMPT)
    for _ in range(length):
        text.append(choose(target_model(*text[-2:])))
    return tuple(text[len(PROMPT) :])


# The proof. It replaces chance by all chances.
def distribution(program):
    """Return the exact probability of each result of `program(choose)`.

    A run follows its plan. At each choice beyond the plan, it takes one option and leaves the others to later runs.
    """
    total = Counter()
    plans = [[]]
    while plans:
        plan = plans.pop()
        probability = Fraction(1)
        decisions = iter(list(plan))

        def choose(probabilities, plan=plan, decisions=decisions):
            nonlocal probability
            option = next(decisions, None)
            if option is None:
                option, *others = [x for x, chance in enumerate(probabilities) if chance > 0]
                plans.extend([*plan, other] for other in others)
                plan.append(option)
            probability *= probabilities[option]
            return option

        total[program(choose)] += probability
    return total


def distance(one, other):
    """Return the total variation distance of two distributions: 0 if they are equal, 1 if they share nothing."""
    return sum(abs(one[text] - other[text]) for text in one | other) / 2


if __name__ == "__main__":
    dice = random.Random(0)
    target = Target()
    generate(10_000, missing_part, lambda probs: dice.choices(VOCAB[: len(probs)], probs)[0], target)
    print(f"10000 tokens in {target.passes} passes of the target: {10_000 / target.passes:.2f} tokens per pass")
    length = K + 1  # one to three rounds, so the proof covers what a round leaves to the next one
    plain = distribution(lambda choose: decode_plainly(length, choose))
    for leftover in (missing_part, all_of_p):
        found = distribution(lambda choose, leftover=leftover: generate(length, leftover, choose, Target()))
        print(f"{leftover.__name__}: {float(distance(found, plain)):.3g} away from plain decoding, over all texts")
