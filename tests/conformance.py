"""Every implementation of a protocol, once. A new one is tested by adding its name here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from outrider.build import embedded
from outrider.load import load_checkpoint
from outrider.propose.base import NoProposer, Proposer, Setup
from outrider.propose.combine import First, Merge, Switch
from outrider.propose.model import ModelProposer
from outrider.propose.ngram import NgramProposer
from outrider.target import Target, make_target
from outrider.toy import ToyTarget

PROPOSERS: Mapping[str, Callable[[Setup], Proposer]] = {
    "none": NoProposer,
    "ngram": NgramProposer,
    "model": lambda setup: ModelProposer(setup, ToyTarget(vocab=setup.vocab, slots=setup.slots, seed=99)),
    "padded model": lambda setup: ModelProposer(setup, ToyTarget(vocab=setup.vocab + 2, slots=setup.slots, seed=98)),
    "short model": lambda setup: ModelProposer(
        setup, ToyTarget(vocab=setup.vocab, slots=setup.slots, seed=99, context=24)
    ),
}

# Those who learn from rounds how good their guesses are.
LEARNING: Mapping[str, Callable[[Setup], Proposer]] = {
    "first": lambda setup: First(setup, [NgramProposer(setup, shortest=3), _toy_model(setup)]),
    "switch": lambda setup: Switch(setup, [NgramProposer(setup), _toy_model(setup)]),
    "merge": lambda setup: Merge(setup, [NgramProposer(setup), _toy_model(setup)]),
}
EVERY = {**PROPOSERS, **LEARNING}


def _toy_model(setup: Setup) -> Proposer:
    return ModelProposer(setup, ToyTarget(vocab=setup.vocab, slots=setup.slots, seed=99))


def nano() -> Target:
    checkpoint = load_checkpoint(embedded("nano"), dtype="float32", device="cpu")
    return make_target(checkpoint, slots=4, context=128)


CACHES: Mapping[str, Callable[[], Target]] = {"toy": ToyTarget, "static": nano}
