"""Run verification rules on interpreted Triton kernels with any source of randomness, such as an enumeration."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from outrider.core.noise import PositionNoise
from outrider.core.types import Packed
from outrider.models.triton import masses, noise, residuals, rules, verdicts
from outrider.verify.rules import EXACT
from outrider.verify.verdict import tokens_before
from tests.helpers import triton as helper

MODULES = (masses, noise, residuals, verdicts)


@dataclass
class _Row:
    """What a kernel did for one sequence, given the outcomes so far."""

    asked: list[tuple[int, float]] = field(default_factory=list)  # index and probability of each decision, in order
    mass: list[np.ndarray] = field(default_factory=list)  # [V] of each sampled token
    verdict: dict[str, torch.Tensor] = field(default_factory=dict)


class ReplayedRule:
    """The rule `name` on interpreted kernels. Sequences with the same draft and outcomes run once.

    In the kernels, a decision and a sample ask for an outcome that is known, or record what the outcome is drawn from
    and go on with any. The rule runs again until all outcomes are known.
    """

    def __init__(self, name: str, patch: Any) -> None:
        """Prepare the rule. `patch` is a monkeypatch that holds as long as the rule is called."""
        self._name = name
        self._verifier = rules.on_device(EXACT[name])
        self._known: dict[Any, _Row] = {}
        self._running: list[tuple[dict[int, bool], list[int], _Row]] = []
        self._race: np.ndarray | None = None
        for module in (masses, residuals):
            patch.setattr(module, "accepts", self._accepts)
            patch.setattr(module, "find_token", self._find_token)
        patch.setattr(masses, "race_uniform", self._race_uniform)

    def __call__(self, draft, p, source):
        decisions: list[dict[int, bool]] = [{} for _ in p]
        samples: list[list[int]] = [[] for _ in p]
        race = source.sample_race(p, tokens_before(draft)).tolist() if self._name == "coupled" else [()] * len(p)
        while True:
            rows = self._run(draft, p, decisions, samples, race)
            open_decisions = [self._first_open(*row) for row in zip(rows, decisions, strict=True)]
            if any(prob for _, prob in open_decisions):
                filler = draft.size + sum(map(len, decisions))
                index = torch.tensor([index if prob else filler for index, prob in open_decisions])
                prob = torch.tensor([prob for _, prob in open_decisions], dtype=p.dtype)
                outcome = source.bernoulli(prob, index).tolist()
                for known, (index, prob), accepted in zip(decisions, open_decisions, outcome, strict=True):
                    known |= {index: accepted} if prob else {}
            elif any(len(row.mass) > len(known) for row, known in zip(rows, samples, strict=True)):
                one = np.eye(1, p.shape[-1])[0]
                mass = [(row.mass[len(known) :] or [one])[0] for row, known in zip(rows, samples, strict=True)]
                token = source.sample(torch.tensor(np.stack(mass)), draft.count).tolist()
                for row, known, each in zip(rows, samples, token, strict=True):
                    known += [each] if len(row.mass) > len(known) else []
            else:
                break
        names = rows[0].verdict
        verdict = {name: torch.stack([row.verdict[name] for row in rows]) for name in names}
        return replace(EXACT["walk"].rule(draft, p, _First()), **verdict)

    def _first_open(self, row: _Row, known: dict[int, bool]) -> tuple[int, float]:
        """Return the first decision of a sequence without an outcome, and its probability; 0: there is none."""
        return next(((index, prob) for index, prob in row.asked if 0 < prob < 1 and index not in known), (0, 0.0))

    def _run(self, draft, p, decisions, samples, race) -> list[_Row]:
        keys = [
            (tuple(tokens), int(count), tuple(sorted(known.items())), tuple(sampled), tuple(raced))
            for tokens, count, known, sampled, raced in zip(
                draft.tokens.tolist(), draft.count, decisions, samples, race, strict=True
            )
        ]
        new = {key: b for b, key in enumerate(keys) if key not in self._known}
        at = torch.tensor(list(new.values()), dtype=torch.int64)
        if len(at):
            self._running = [(decisions[b], samples[b], _Row()) for b in new.values()]
            self._race = np.array([race[b] for b in new.values()])
            part = {name: getattr(draft, name)[at] for name in ("tokens", "parent", "count", "kind")}
            q = None if draft.q is None else replace(draft.q, at=draft.q.at[at])
            seeds = torch.arange(len(at))
            verdict = self._verifier.verify(
                replace(draft, **part, q=q), Packed.of(p[at]), PositionNoise(seeds, torch.zeros_like(seeds))
            )
            for b, (key, (_, _, row)) in enumerate(zip(new, self._running, strict=True)):
                row.verdict = {name: getattr(verdict, name)[b] for name in ("path", "accepted", "bonus", "logprob")}
                self._known[key] = row
        return [self._known[key] for key in keys]

    def _accepts(self, seed, first, index, prob):
        known, _, row = self._running[_number(seed)]
        indices = np.broadcast_to(_numbers(index), _numbers(prob).shape)
        row.asked += zip(indices.tolist(), _numbers(prob).tolist(), strict=True)
        uniform = [0.0 if known.get(each, False) else 1.0 - 2**-48 for each in indices.tolist()]
        return _like(prob, np.array(uniform).reshape(prob.handle.data.shape)) < prob

    def _find_token(self, mass, ids, below, threshold, vocab):
        _, known, row = self._running[helper.interpreter.interpreter_builder.grid_idx[self._name in TREES]]
        row.mass.append(_numbers(mass)[: _number(vocab)].copy())
        place = len(row.mass) - 1
        # An id that no draft token has ends the path.
        return vocab * 0 + (known[place] if place < len(known) else -7)

    def _race_uniform(self, seed, first, ahead, ids):
        _, node, b = helper.interpreter.interpreter_builder.grid_idx
        winner = self._race[b, node]
        uniform = np.where(_numbers(ids) == winner, 0.0, 0.5)
        return _like(ids, uniform)


TREES = ("siblings", "traversal")  # their grids have the sequence second


class _First:
    """Noise that always samples the first token."""

    def sample(self, probs, ahead):
        return torch.zeros_like(ahead)


def _numbers(value) -> np.ndarray:
    return np.atleast_1d(value.handle.data if hasattr(value, "handle") else np.array(value)).reshape(-1)


def _number(value) -> int:
    return int(_numbers(value)[0])


def _like(value, numbers: np.ndarray):
    """Return a float64 tensor of the interpreter in the shape of another one."""
    tl = helper.language
    kind = tl.block_type(tl.float64, value.type.get_block_shapes()) if value.type.is_block() else tl.float64
    return tl.tensor(helper.interpreter.TensorHandle(numbers, tl.float64), kind)
