"""Word problems with several steps, in the words that the embedded models were trained on, and their reward."""

import random
import re
from collections.abc import Callable

from outrider.train.rl import Problem, Rollout, RolloutEngine

_NAMES = ("Anna", "Ben", "Cara", "Dev", "Ella", "Finn", "Gita", "Ivan", "Julia", "Omar", "Tara", "Yuri")
_THINGS = ("apples", "books", "cards", "coins", "marbles", "pens", "photos", "shells", "stamps", "stickers")
_ENDS = ("How many {things} are there now?", "What is the final number of {things}?")

# A step takes the count so far and a source of randomness. It returns the sentence and the new count.
_Step = Callable[[int, str, str, random.Random], tuple[str, int]]


def _find(count: int, name: str, things: str, source: random.Random) -> tuple[str, int]:
    more = source.randint(3, 60)
    return f"{name} finds {more} {things} on the way home.", count + more


def _lose(count: int, name: str, things: str, source: random.Random) -> tuple[str, int]:
    fewer = source.randint(1, max(count - 1, 1))
    return f"{name} loses {fewer} of them.", count - fewer


def _grow(count: int, name: str, things: str, source: random.Random) -> tuple[str, int]:
    times = source.randint(2, 6)
    return f"Then the number of {things} grows {times} times.", count * times


def _boxes(count: int, name: str, things: str, source: random.Random) -> tuple[str, int]:
    boxes, each = source.randint(2, 9), source.randint(2, 12)
    return f"{name} adds {boxes} boxes with {each} {things} in each.", count + boxes * each


_STEPS: tuple[_Step, ...] = (_find, _lose, _grow, _boxes)


def make_problem(source: random.Random, steps: int) -> tuple[str, int]:
    """Return the text of a problem with some steps, and its answer."""
    name, things = source.choice(_NAMES), source.choice(_THINGS)
    count = source.randint(8, 99)
    sentences = [f"{name} has {count} {things}."]
    for _ in range(steps):
        sentence, count = source.choice(_STEPS)(count, name, things, source)
        sentences.append(sentence)
    sentences.append(source.choice(_ENDS).format(things=things))
    return " ".join(sentences), count


def word_problems(engine: RolloutEngine, number: int, *, steps: int = 3, seed: int = 0) -> list[Problem]:
    """Return `number` problems, as conversations in the chat template of the model."""
    source = random.Random(seed)
    made = [make_problem(source, steps) for _ in range(number)]
    chats = [engine.llm.encode_chat([{"role": "user", "content": text}]) for text, _ in made]
    return [Problem(prompt=chat, answer=answer) for chat, (_, answer) in zip(chats, made, strict=True)]


def reward(rollout: Rollout, problem: Problem) -> float:
    """Return 1 if the line that starts with #### has the answer, and else 0."""
    found = re.search(r"#### (-?\d+)\s*$", rollout.text)
    return float(found is not None and int(found[1]) == problem.answer)
