"""Search for the layers that a target can skip when it drafts for itself.

While all draft tokens are accepted, the draft has the same input as the target. So one pass of a subset of layers over
an output of the target shows at each position whether the subset drafts the next token. This is enough to simulate all
rounds with all draft lengths. Layers are removed greedily (Zhang et al. 2023 use Bayesian optimization). The reported
figures are from prompts that the search does not use.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import torch

from outrider.core import tree
from outrider.core.params import SamplingParams
from outrider.core.prompts import Prompt, by_category
from outrider.core.target import SelfDraftTarget, Target
from outrider.core.types import Batch, DraftBudget, SequenceState
from outrider.errors import OutriderError
from outrider.lab.common.jobs import encode_prompt
from outrider.llm import LLM

_MAX_K = 8  # largest draft length
_BREADTH = 4  # number of layers that each step tries to remove
_PATIENCE = 2  # steps without improvement until the search ends
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
    layers: tuple[int, ...]  # the layers that are kept
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
        """tau * plain / (k * draft + verify); see `outrider.drafting.plan.speedup.speedup`."""
        return figures.tau * self.plain / (figures.k * self.draft + self.verify)


def rounds(agree: Sequence[bool], k: int) -> int:
    """Return the number of rounds of a text with draft length k. `agree` says which tokens the draft predicts."""
    at = 0
    count = 0
    while at < len(agree):
        stop = at + k
        while at < stop and at < len(agree) and agree[at]:
            at += 1
        at += 1  # the bonus token
        count += 1
    return count


def generate_texts(llm: LLM, prompts: Iterable[Prompt], max_tokens: int) -> list[Text]:
    """Generate greedy outputs of the target. Prompts without output are left out."""
    encoded = [encode_prompt(llm, prompt) for prompt in prompts]
    completions = llm.generate(encoded, SamplingParams(max_tokens=max_tokens))
    return [Text(prompt=done.prompt_token_ids, tokens=done.token_ids) for done in completions if done.token_ids]


def split_prompts(prompts: Sequence[Prompt], seed: int) -> tuple[list[Prompt], list[Prompt]]:
    """Split the prompts of each category into halves: one for the search, and one for the reported figures.

    Raises:
        OutriderError: there are not enough prompts.
    """
    rng = random.Random(seed)
    search: list[Prompt] = []
    held_out: list[Prompt] = []
    for group in by_category(prompts).values():
        for prompt in rng.sample(group, len(group)):
            half = held_out if len(search) > len(held_out) else search
            half.append(prompt)
    if not held_out:
        raise OutriderError("the search needs at least two prompts, one to search with and one to report; give more")
    return search, held_out


class LayerSearch:
    """Searches for the layers of a target that make the best draft."""

    def __init__(
        self, target: Target, texts: Sequence[Text], *, max_trials: int, on_progress: Callable[[str], None]
    ) -> None:
        """Search on `texts` with up to `max_trials` sets of layers. `on_progress` receives messages.

        Raises:
            OutriderError: the target cannot run a subset of its layers, or has only one.
        """
        if not isinstance(target, SelfDraftTarget) or target.layers < 2:
            raise OutriderError("this target cannot skip layers; use --proposer draft:DIR or ngram")
        if max_trials < 1:
            raise OutriderError(f"--max-trials is {max_trials}; use at least 1")
        self.layers = target.layers
        self._target = target
        self._texts = texts
        self._max_trials = max_trials
        self._on_progress = on_progress
        self._results: dict[tuple[int, ...], Figures] = {}  # by kept layers
        layer_bytes, head_bytes = target.read_bytes()
        total = sum(layer_bytes) + head_bytes
        self._layer_costs = [size / total for size in layer_bytes]  # in passes of the target
        self._head_cost = head_bytes / total

    def best_exit(self) -> Figures:
        """Return the best number of first layers (`exit:N`)."""
        prefixes = [tuple(range(count)) for count in range(1, self.layers)]
        results = list(filter(None, map(self._try, prefixes)))
        return max(results, key=_objective)

    def best_skip(self) -> Figures | None:
        """Remove one layer after another, each time the one whose removal gains most (`skip:A+B+C`).

        Returns None if `max_trials` is reached before a layer is removed.
        """
        everything = tuple(range(self.layers))
        single = {layer: self._try(_without(everything, layer)) for layer in everything}
        order = sorted(everything, key=lambda layer: -_objective(single[layer]))
        results = list(filter(None, single.values()))
        if not results:
            return None
        current = max(results, key=_objective)
        best = current
        steps_without_gain = 0
        while steps_without_gain < _PATIENCE and len(current.layers) > 1:
            removable = [layer for layer in order if layer in current.layers][:_BREADTH]
            candidates = list(map(partial(_without, current.layers), removable))
            results = list(filter(None, map(self._try, candidates)))
            if not results:
                break
            current = max(results, key=_objective)
            if _objective(current) > _objective(best):
                best = current
                steps_without_gain = 0
            else:
                steps_without_gain += 1
        return best

    @property
    def tried(self) -> int:
        """The number of sets of layers that have been tried."""
        return len(self._results)

    def report(self, found: Figures, texts: Sequence[Text]) -> Figures:
        """Evaluate the same layers and draft length on other texts."""
        return self._figures(found.layers, texts, ks=(found.k,))

    def _try(self, kept: tuple[int, ...]) -> Figures | None:
        """Evaluate layers on the search texts. Return None if `max_trials` is reached."""
        if kept not in self._results:
            trial = len(self._results) + 1
            if trial > self._max_trials:
                return None
            self._on_progress(f"set {trial} of at most {self._max_trials}: {expression(kept, self.layers)}")
            self._results[kept] = self._figures(kept, self._texts, ks=range(1, _MAX_K + 1))
        return self._results[kept]

    def _figures(self, kept: tuple[int, ...], texts: Sequence[Text], *, ks: Iterable[int]) -> Figures:
        """Return the figures of the best draft length."""
        assert isinstance(self._target, SelfDraftTarget)
        submodel = self._target.make_submodel(kept)
        agree = [agreement(submodel, text) for text in texts]
        num_tokens = sum(map(len, agree))
        cost = self._head_cost + sum(self._layer_costs[layer] for layer in kept)
        candidates = []
        for k in ks:
            candidates.append(
                Figures(
                    expression=expression(kept, self.layers),
                    layers=kept,
                    k=k,
                    agreement=sum(map(sum, agree)) / num_tokens,
                    tau=num_tokens / sum(rounds(text_agree, k) for text_agree in agree),
                    cost=cost,
                )
            )
        return max(candidates, key=_objective)


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
    batch = Batch(seqs=(SequenceState.of(text.prompt),), start=(0,), feed=(text.prompt,), budget=DraftBudget((count,)))
    scores = part.score(batch, draft)
    best = scores.logits.argmax(-1) if scores.best is None else scores.best
    return (best == tokens)[0].tolist()


@torch.inference_mode()
def measure(target: Target, figures: Figures, text: Text) -> Timing:
    """Time draft tokens and passes after `text`, interleaved."""
    assert isinstance(target, SelfDraftTarget)
    submodel = target.make_submodel(figures.layers)
    seq = SequenceState.of(text.prompt)
    prefill = Batch(seqs=(seq,), start=(0,), feed=(text.prompt,), budget=DraftBudget((0,)))
    for model in (submodel, target):
        model.score(prefill, tree.empty(1, target.device))
    decode = Batch(seqs=(seq,), start=(len(text.prompt),), feed=(text.tokens[:1],), budget=DraftBudget((figures.k,)))
    no_draft = tree.empty(1, target.device)
    draft = tree.chain(torch.full((1, figures.k), text.tokens[0], device=target.device), (figures.k,))
    draft_ms = []
    plain_ms = []
    verify_ms = []
    for _ in range(_REPEATS):
        draft_ms.append(_milliseconds(target, lambda: submodel.draft_greedy(decode, target.vocab)) / figures.k)
        plain_ms.append(_milliseconds(target, lambda: target.score(decode, no_draft)))
        verify_ms.append(_milliseconds(target, lambda: target.score(decode, draft)))
    # Use the minimum: disturbances only add time.
    return Timing(draft=min(draft_ms), plain=min(plain_ms), verify=min(verify_ms))


def _milliseconds(target: Target, run: Callable[[], object]) -> float:
    """Return the milliseconds that `run` takes on the target's device."""
    began = perf_counter()
    run()
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    return 1e3 * (perf_counter() - began)


def _objective(figures: Figures | None) -> float:
    """Return what the search maximizes; 0 for sets that were not tried."""
    return 0.0 if figures is None else figures.speedup


def _without(kept: Sequence[int], layer: int) -> tuple[int, ...]:
    return tuple(other for other in kept if other != layer)
