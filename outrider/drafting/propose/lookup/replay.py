"""Draft recorded outputs, with perfect or chosen acceptance, to measure what an engine does with such a draft.

It shows the ceiling of a proposer: the speed at an acceptance that a trained draft would have, without a draft's cost.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from outrider.core.json_lines import Line, read_lines
from outrider.core.params import is_whole
from outrider.core.proposer import ProposerSetup
from outrider.core.types import Batch, Draft, Needs, Request, Round
from outrider.drafting.propose.tree_builder import TreeBuilder, build_draft
from outrider.errors import OutriderError

_FORM = '{"prompt_token_ids": [1, 2], "token_ids": [3, 4]}'


class Recording(NamedTuple):
    """The tokens of a prompt and of an output for it."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]


@dataclass(slots=True)
class _Replay:
    """The recorded outputs for the prompt of a slot. They are dropped when the text differs from them."""

    outputs: list[tuple[int, ...]]
    right: list[bool]  # by position of the output: whether its draft token is the recorded one
    begin: int  # of the output in the sequence
    checked: int = 0  # output tokens that were compared with the text

    def continuation(self, tokens: Sequence[int], count: int) -> tuple[int, ...]:
        """Return up to `count` recorded tokens that follow the tokens of a sequence."""
        done = len(tokens) - self.begin
        new = tuple(tokens[self.begin + self.checked :])
        self.outputs = [output for output in self.outputs if output[self.checked : done] == new]
        self.checked = done
        return self.outputs[0][done : done + count] if self.outputs else ()


class ReplayProposer:
    """Drafts the recorded output of a prompt as a chain. Other prompts, and texts that differ, get no draft."""

    needs = Needs()

    def __init__(
        self, setup: ProposerSetup, recordings: Iterable[Recording], *, acceptance: float = 1.0, seed: int = 0
    ) -> None:
        """Replay outputs.

        Args:
            recordings: outputs of the target. A prompt may have several.
            acceptance: probability that a draft token is the recorded one. Another token takes the place of the others.
            seed: of the choice of these tokens.
        """
        self._device = setup.device
        self._vocab = setup.vocab
        self._acceptance = acceptance
        self._seed = seed
        self._outputs: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for recording in recordings:
            self._outputs.setdefault(recording.prompt, []).append(recording.output)
        self._replays: dict[int, _Replay] = {}  # by slot

    def admit(self, slot: int, request: Request) -> None:
        outputs = self._outputs.get(request.prompt_token_ids, [])
        length = max(map(len, outputs), default=0)
        generator = np.random.default_rng([self._seed, *request.prompt_token_ids])
        right = (generator.random(length) < self._acceptance).tolist()
        self._replays[slot] = _Replay(list(outputs), right, len(request.prompt_token_ids))

    def propose(self, batch: Batch) -> Draft:
        rows = zip(batch.seqs, batch.start, batch.feed, batch.draft_budget, strict=True)
        trees = [
            self._draft_chain(self._replays[seq.slot], seq.token_ids[: start + len(feed)], budget)
            for seq, start, feed, budget in rows
        ]
        return build_draft(trees, self._device)

    def commit(self, round: Round) -> None:
        pass

    def release(self, slot: int) -> None:
        self._replays.pop(slot, None)

    def _draft_chain(self, replay: _Replay, tokens: Sequence[int], budget: int) -> TreeBuilder:
        builder = TreeBuilder()
        if len(tokens) < replay.begin or not budget:  # a part of the prompt is fed
            return builder
        accept_prob = 1.0
        position = len(tokens) - replay.begin
        for node, token in enumerate(replay.continuation(tokens, budget), start=-1):
            accept_prob *= self._acceptance
            wrong = (token + 1) % self._vocab
            builder.add(token if replay.right[position + node + 1] else wrong, node, accept_prob)
        return builder


def replay_proposer(argument: str, setup: ProposerSetup) -> ReplayProposer:
    """Make the proposer of `replay:FILE[:ACCEPTANCE[:SEED]]`.

    Raises:
        OutriderError: the argument is wrong, or the file cannot be read.
    """
    asked = parse_replay(argument)
    return ReplayProposer(setup, read_recordings(asked.file), acceptance=asked.acceptance, seed=asked.seed)


class _Arguments(NamedTuple):
    file: Path
    acceptance: float
    seed: int


def parse_replay(argument: str) -> _Arguments:
    """Read FILE[:ACCEPTANCE[:SEED]]. Raises OutriderError if there is no such file, or a number is wrong."""
    parts = argument.split(":")
    numbers = [*takewhile(_is_number, reversed(parts[1:]))][:2][::-1]
    file = Path(":".join(parts[: len(parts) - len(numbers)])).expanduser()
    if not file.is_file():
        raise OutriderError(f"replay:{argument} names no file; write replay:FILE, with lines like {_FORM}")
    acceptance = float(numbers[0]) if numbers else 1.0
    seed = numbers[1] if len(numbers) > 1 else "0"
    if not 0 <= acceptance <= 1:
        raise OutriderError(f"the acceptance of replay:{argument} is {acceptance}; use a number from 0 to 1")
    if not seed.isdecimal():
        raise OutriderError(f"the seed of replay:{argument} is {seed}; use a whole number of at least 0")
    return _Arguments(file, acceptance, int(seed))


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdecimal()


def read_recordings(file: Path) -> list[Recording]:
    """Read recordings from a JSON Lines file.

    Raises:
        OutriderError: the file cannot be read, or a line is wrong; the message has the line number.
    """
    lines = read_lines(file, form=_FORM)
    return [Recording(_token_ids(line, "prompt_token_ids"), _token_ids(line, "token_ids")) for line in lines]


def _token_ids(line: Line, name: str) -> tuple[int, ...]:
    values = line.fields.get(name)
    if not isinstance(values, list):
        raise OutriderError(f"{line.where}: there is no list {name}; write {_FORM}")
    for value in values:
        if not is_whole(value) or value < 0:
            raise OutriderError(f"{line.where}: {name} has {value!r}, which is not a token id; write {_FORM}")
    return tuple(values)
