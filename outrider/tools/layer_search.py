"""Which layers a target can do without when it drafts for itself: a search on the user's own prompts.

A draft whose guesses were all right so far has read what the target wrote. So the target's own text, read once by some
of its layers, tells at each place whether they would have guessed it, and that is enough to play through every round
with every number of guesses. Layers are left out greedily, where Zhang et al. (2023) search by Bayesian optimisation;
what is reported comes from prompts that the search has not seen.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

from outrider.core import tree
from outrider.core.params import SamplingParams
from outrider.core.types import Batch, SequenceState
from outrider.errors import OutriderError
from outrider.llm import LLM
from outrider.measure.prompts import Prompt, by_category
from outrider.models.base import SelfDraftTarget, Target

_MOST = 8  # guesses a round
_BREADTH = 4  # layers that each step tries to leave out besides those that are out already
_PATIENCE = 2  # steps that may gain nothing before the search ends
_REPEATS = 30  # of a pass that is timed


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A prompt and how the target goes on greedily."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What rounds with some layers as the draft come to."""

    expression: str
    accepted: tuple[int, ...]
    k: int
    agreement: float  # share of tokens that the draft would have guessed, one at a time
    tau: float
    cost: float  # of a guess, in passes of the target, by the weights that are read

    @property
    def speedup(self) -> float:
        """Expected, where a pass takes the time that it takes to read its weights."""
        return self.tau / (1 + self.k * self.cost)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Milliseconds, measured here on a short text."""

    draft: float
    plain: float  # the target's pass without guesses
    verify: float  # and with k of them

    def speedup(self, figures: Figures) -> float:
        """tau plain / (k guess + verify): see `outrider.plan.speedup.speedup`, the host left out."""
        return figures.tau * self.plain / (figures.k * self.draft + self.verify)


def rounds(agree: Sequence[bool], k: int) -> int:
    """Rounds that a text takes of whose tokens the draft guesses those that `agree`, with k guesses a round."""
    at = count = 0
    while at < len(agree):
        stop = at + k
        while at < stop and at < len(agree) and agree[at]:
            at += 1
        at += 1  # the target's own
        count += 1
    return count


def write(llm: LLM, prompts: Iterable[Prompt], max_tokens: int) -> list[Text]:
    """The target's own texts."""
    encoded = [llm.encode_chat(p.messages) if p.messages else llm.encode(p.prompt or "") for p in prompts]
    done = llm.generate(encoded, SamplingParams(max_tokens=max_tokens))
    return [Text(prompt=each.prompt_token_ids, tokens=each.token_ids) for each in done if each.token_ids]


def halves(prompts: Sequence[Prompt], seed: int) -> tuple[list[Prompt], list[Prompt]]:
    """Prompts to search on and prompts to report on, of each category half.

    Raises:
        OutriderError: there are not enough of them.
    """
    chance = random.Random(seed)
    parts: tuple[list[Prompt], list[Prompt]] = [], []
    for group in by_category(prompts).values():
        for prompt in chance.sample(group, len(group)):
            parts[len(parts[0]) > len(parts[1])].append(prompt)
    if not parts[1]:
        raise OutriderError("the search needs two prompts at least, one to search on and one to report on; give more")
    return parts


class LayerSearch:
    """Reads texts with parts of a target, and finds the part that is the best draft."""

    def __init__(self, target: Target, texts: Sequence[Text], *, max_trials: int, told: Callable[[str], None]) -> None:
        """Search on `texts`, trying up to `max_trials` sets of layers; `told` hears how far it is.

        Raises:
            OutriderError: the target's layers cannot be had one by one, or there are no two of them.
        """
        if not isinstance(target, SelfDraftTarget) or target.layers < 2:
            raise OutriderError("this target has no layers to choose from; use draft:DIR or ngram")
        if max_trials < 1:
            raise OutriderError(f"--max-trials is {max_trials}; use at least 1")
        self._target, self._texts, self._max_trials, self._told = target, texts, max_trials, told
        self._known: dict[tuple[int, ...], Figures] = {}
        layers, head = target.read_bytes()
        self._costs, self._head = [each / (sum(layers) + head) for each in layers], head / (sum(layers) + head)
        self.layers = target.layers

    def best_exit(self) -> Figures:
        """The first layers that promise most, of every number of them."""
        kept = [tuple(range(count)) for count in range(1, self.layers)]
        return max((found for each in kept if (found := self._try(each))), key=_promise)

    def best_skip(self) -> Figures | None:
        """Leave out one layer after another, each time the one without which most is gained.

        None where the max_trials is used up before a layer has been left out.
        """
        everything = tuple(range(self.layers))
        single = {layer: self._try(_without(everything, layer)) for layer in everything}
        order = sorted(everything, key=lambda layer: -_promise(single[layer]))
        if not (known := [figures for figures in single.values() if figures]):
            return None
        best = kept = max(known, key=_promise).accepted
        since = 0
        while since < _PATIENCE and len(kept) > 1:
            tried = [_without(kept, layer) for layer in order if layer in kept][:_BREADTH]
            found = [figures for each in tried if (figures := self._try(each))]
            if not found:
                break
            kept = max(found, key=_promise).accepted
            better = _promise(self._known[kept]) > _promise(self._known[best])
            best, since = (kept, 0) if better else (best, since + 1)
        return self._known[best]

    @property
    def tried(self) -> int:
        """Sets of layers that have been read with."""
        return len(self._known)

    def report(self, found: Figures, texts: Sequence[Text]) -> Figures:
        """The same part with the same number of guesses, on other texts."""
        return self._figures(found.accepted, texts, ks=(found.k,))

    def _try(self, kept: tuple[int, ...]) -> Figures | None:
        """On the texts to search on; None where the max_trials is used up."""
        if kept not in self._known:
            if len(self._known) == self._max_trials:
                return None
            self._told(f"set {len(self._known) + 1} of {self._max_trials} at most: {expression(kept, self.layers)}")
            self._known[kept] = self._figures(kept, self._texts, ks=range(1, _MOST + 1))
        return self._known[kept]

    def _figures(self, kept: tuple[int, ...], texts: Sequence[Text], *, ks: Iterable[int]) -> Figures:
        assert isinstance(self._target, SelfDraftTarget)
        part = self._target.make_submodel(kept)
        agree = [agreement(part, text) for text in texts]
        emitted = sum(map(len, agree))
        options = (
            Figures(
                expression=expression(kept, self.layers),
                accepted=kept,
                k=k,
                agreement=sum(map(sum, agree)) / emitted,
                tau=emitted / sum(rounds(each, k) for each in agree),
                cost=self._head + sum(self._costs[layer] for layer in kept),
            )
            for k in ks
        )
        return max(options, key=_promise)


def expression(kept: Sequence[int], layers: int) -> str:
    """How the proposer is named that keeps these of the target's layers."""
    if tuple(kept) == tuple(range(len(kept))):
        return f"exit:{len(kept)}"
    return "skip:" + "+".join(str(layer) for layer in range(layers) if layer not in kept)


@torch.inference_mode()
def agreement(part: Target, text: Text) -> list[bool]:
    """Of each token that the target wrote, whether `part` would have guessed it from what stands before it."""
    tokens = torch.tensor([text.tokens], device=part.device)
    count = len(text.tokens) - 1
    draft = tree.chain(tokens[:, :-1], (count,)) if count else tree.empty(1, part.device)
    batch = Batch(seqs=(SequenceState.of(text.prompt),), start=(0,), feed=(text.prompt,), draft_budget=(count,))
    scores = part.score(batch, draft)
    best = scores.logits.argmax(-1) if scores.best is None else scores.best
    return (best == tokens)[0].tolist()


@torch.inference_mode()
def measure(target: Target, figures: Figures, text: Text) -> Timing:
    """Time guesses and passes behind `text`, in turns."""
    assert isinstance(target, SelfDraftTarget)
    part = target.make_submodel(figures.accepted)
    row, base = SequenceState.of(text.prompt), len(text.prompt)
    whole = Batch(seqs=(row,), start=(0,), feed=(text.prompt,), draft_budget=(0,))
    for model in (part, target):
        model.score(whole, tree.empty(1, target.device))
    one = Batch(seqs=(row,), start=(base,), feed=(text.tokens[:1],), draft_budget=(figures.k,))
    guesses = tree.chain(torch.full((1, figures.k), text.tokens[0], device=target.device), (figures.k,))
    took: list[tuple[float, ...]] = []
    for _ in range(_REPEATS):
        guess = _milliseconds(target, lambda: part.draft_greedy(one, target.vocab)) / figures.k
        plain = _milliseconds(target, lambda: target.score(one, tree.empty(1, target.device)))
        took.append((guess, plain, _milliseconds(target, lambda: target.score(one, guesses))))
    # The best of each: whatever else runs on the machine can only add to it.
    guess, plain, verify = (min(each) for each in zip(*took, strict=True))
    return Timing(draft=guess, plain=plain, verify=verify)


def _milliseconds(target: Target, run: Callable[[], object]) -> float:
    began = perf_counter()
    run()
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    return 1e3 * (perf_counter() - began)


def _promise(figures: Figures | None) -> float:
    """What is searched for; what was not tried promises nothing."""
    return 0.0 if figures is None else figures.speedup


def _without(kept: Sequence[int], layer: int) -> tuple[int, ...]:
    return tuple(other for other in kept if other != layer)
