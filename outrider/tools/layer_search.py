"""Search for the layers that a target can skip when it drafts for itself.

While all draft tokens are accepted, the draft reads the text of the target. So one pass of some layers over that text
shows for each position whether they would have drafted the next token, which is enough to simulate all rounds with all
draft lengths. Layers are removed greedily (Zhang et al. 2023 use Bayesian optimization). The reported figures are from
prompts that the search has not seen.
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

_MOST = 8  # largest draft length
_BREADTH = 4  # layers that each step tries to remove
_PATIENCE = 2  # steps without gain until the search ends
_REPEATS = 30  # repeats of a timed pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A prompt with the greedy output of the target."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The simulated result of drafting with some layers."""

    expression: str
    accepted: tuple[int, ...]
    k: int
    agreement: float  # share of tokens that the draft predicts
    tau: float
    cost: float  # cost of a draft token, in passes of the target, by the weights that are read

    @property
    def speedup(self) -> float:
        """The expected speedup, if a pass takes the time to read its weights."""
        return self.tau / (1 + self.k * self.cost)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Milliseconds, measured on a short text."""

    draft: float
    plain: float  # a pass of the target without draft tokens
    verify: float  # a pass with k draft tokens

    def speedup(self, figures: Figures) -> float:
        """tau * plain / (k * draft + verify); see `outrider.plan.speedup.speedup`."""
        return figures.tau * self.plain / (figures.k * self.draft + self.verify)


def rounds(agree: Sequence[bool], k: int) -> int:
    """Return the rounds that a text takes with draft length k, if the draft predicts the tokens in `agree`."""
    at = count = 0
    while at < len(agree):
        stop = at + k
        while at < stop and at < len(agree) and agree[at]:
            at += 1
        at += 1  # the bonus token
        count += 1
    return count


def write(llm: LLM, prompts: Iterable[Prompt], max_tokens: int) -> list[Text]:
    """Generate texts with the target."""
    encoded = [llm.encode_chat(p.messages) if p.messages else llm.encode(p.prompt or "") for p in prompts]
    done = llm.generate(encoded, SamplingParams(max_tokens=max_tokens))
    return [Text(prompt=each.prompt_token_ids, tokens=each.token_ids) for each in done if each.token_ids]


def halves(prompts: Sequence[Prompt], seed: int) -> tuple[list[Prompt], list[Prompt]]:
    """Split the prompts of each category into halves: to search on, and to report on.

    Raises:
        OutriderError: there are not enough prompts.
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
    """Searches for the layers of a target that make the best draft."""

    def __init__(self, target: Target, texts: Sequence[Text], *, max_trials: int, told: Callable[[str], None]) -> None:
        """Search on `texts` with up to `max_trials` sets of layers. `told` receives the progress.

        Raises:
            OutriderError: the target cannot run a subset of its layers, or has only one.
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
        """Return the best number of first layers (`exit:N`)."""
        kept = [tuple(range(count)) for count in range(1, self.layers)]
        return max((found for each in kept if (found := self._try(each))), key=_promise)

    def best_skip(self) -> Figures | None:
        """Remove one layer after another, each time the one that gains most (`skip:A+B+C`).

        Returns None if `max_trials` is reached before a layer is removed.
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
        """Number of sets of layers tried."""
        return len(self._known)

    def report(self, found: Figures, texts: Sequence[Text]) -> Figures:
        """Evaluate the same layers and draft length on other texts."""
        return self._figures(found.accepted, texts, ks=(found.k,))

    def _try(self, kept: tuple[int, ...]) -> Figures | None:
        """Evaluate layers on the search texts. None after `max_trials`."""
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
    """Return the proposer expression that keeps these layers."""
    if tuple(kept) == tuple(range(len(kept))):
        return f"exit:{len(kept)}"
    return "skip:" + "+".join(str(layer) for layer in range(layers) if layer not in kept)


@torch.inference_mode()
def agreement(part: Target, text: Text) -> list[bool]:
    """Return for each output token of the target whether `part` predicts it."""
    tokens = torch.tensor([text.tokens], device=part.device)
    count = len(text.tokens) - 1
    draft = tree.chain(tokens[:, :-1], (count,)) if count else tree.empty(1, part.device)
    batch = Batch(seqs=(SequenceState.of(text.prompt),), start=(0,), feed=(text.prompt,), draft_budget=(count,))
    scores = part.score(batch, draft)
    best = scores.logits.argmax(-1) if scores.best is None else scores.best
    return (best == tokens)[0].tolist()


@torch.inference_mode()
def measure(target: Target, figures: Figures, text: Text) -> Timing:
    """Time draft tokens and passes after `text`, interleaved."""
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
    # Use the minimum: disturbances only add time.
    guess, plain, verify = (min(each) for each in zip(*took, strict=True))
    return Timing(draft=guess, plain=plain, verify=verify)


def _milliseconds(target: Target, run: Callable[[], object]) -> float:
    began = perf_counter()
    run()
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    return 1e3 * (perf_counter() - began)


def _promise(figures: Figures | None) -> float:
    """Return the objective of the search; 0 for sets that were not tried."""
    return 0.0 if figures is None else figures.speedup


def _without(kept: Sequence[int], layer: int) -> tuple[int, ...]:
    return tuple(other for other in kept if other != layer)
