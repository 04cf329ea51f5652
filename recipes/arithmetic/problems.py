"""Sums of two numbers as problems, and their reward."""

import random
import re

from outrider import SamplingParams
from outrider.train.rl import Problem, Rollout, RolloutEngine


def question(a: int, b: int) -> str:
    """Return the question for a sum."""
    return f"What is {a} + {b}?"


def pairs_below(limit: int) -> list[tuple[int, int]]:
    """Return all pairs of numbers below `limit`, in an order that is always the same."""
    pairs = [(a, b) for a in range(limit) for b in range(limit)]
    random.Random(0).shuffle(pairs)
    return pairs


def split(pairs: list[tuple[int, int]]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return the pairs to train on, and those that are held out: a fifth."""
    count = len(pairs) // 5
    return pairs[count:], pairs[:count]


def as_problems(pairs: list[tuple[int, int]], engine: RolloutEngine) -> list[Problem]:
    """Return the problems of some pairs, as conversations in the chat template of the model."""
    chats = [engine.llm.encode_chat([{"role": "user", "content": question(a, b)}]) for a, b in pairs]
    return [Problem(prompt=chat, answer=a + b) for chat, (a, b) in zip(chats, pairs, strict=True)]


def is_right(text: str, answer: int) -> bool:
    """Return whether the last number of a text is the answer."""
    numbers = re.findall(r"\d+", text)
    return bool(numbers) and int(numbers[-1]) == answer


def reward(rollout: Rollout, problem: Problem) -> float:
    """Return 1 for the right sum, and else 0."""
    return float(is_right(rollout.text, problem.answer))


def accuracy(engine: RolloutEngine, problems: list[Problem], max_tokens: int) -> float:
    """Return the share of right greedy answers."""
    batch = engine.generate([problem.prompt for problem in problems], SamplingParams(max_tokens=max_tokens))
    return sum(map(reward, batch.rollouts, problems)) / len(problems)
