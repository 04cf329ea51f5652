"""Data types of requests, drafts and rounds.

Shapes use these letters: B sequences, N draft nodes, V vocabulary size, H hidden size. p is the
target distribution at a node, after bias, penalties, temperature and filters. q is the distribution
that a draft token was sampled from (Leviathan et al. 2023). `accepted` does not count the bonus
token: `emitted = accepted + 1`, or 0 while a sequence is still prefilling.

Tensors stay on the target's device. Tuples are on the host. The host knows all shapes of a round
before it begins, so nothing between propose and commit waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from functools import lru_cache
from operator import add, eq
from typing import TYPE_CHECKING, Any

import torch

from outrider.core.params import SamplingParams

if TYPE_CHECKING:  # so that an own proposer imports little
    from outrider.core.grammar import Grammar, Matcher
    from outrider.core.stats import Stats
    from outrider.core.text import TextStream

MAX_FORCED = 32  # most tokens that a grammar adds to the draft of a sequence


class DraftKind(IntEnum):
    """How a draft token was chosen. Verifiers rely on it to be exact."""

    ONE_HOT = 0  # chosen without randomness
    SAMPLED = 1  # sampled from q, independently of its siblings
    WITHOUT_REPLACEMENT = 2  # sampled from q after its earlier siblings are removed and q is renormalized


class Draw(StrEnum):
    """How a proposer with a distribution should choose draft tokens, so that the verifier accepts most of them."""

    ARGMAX = "argmax"
    SAMPLE = "sample"
    RACE = "race"  # uses the same exponential noise at a position as the target


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"  # end-of-text, a stop token, a stop string, or the end of what the constraint allows
    LENGTH = "length"  # max_tokens, or the context is full
    ABORT = "abort"  # the caller canceled the request
    ERROR = "error"  # the logits were NaN or infinite, or the grammar grew too complex


@dataclass(frozen=True, slots=True, eq=False)
class AudioFeatures:
    """The input of a speech model's encoder. An object equals only itself, so that caches compare it fast."""

    values: torch.Tensor  # [bins, frames] float32, on the host


class SpeechOutput(StrEnum):
    """The kind of output of a speech model. Only targets of speech read it."""

    TEXT = "text"  # no rules besides the tokens that the checkpoint suppresses
    TIMESTAMPS = "timestamps"  # text between timestamps
    LANGUAGE = "language"  # the token of a language


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One completion to generate."""

    id: int
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    end_ids: frozenset[int]  # tokens that end the completion: end-of-text and the user's
    max_tokens: int
    alternative: int | None = None  # which alternative of the proposer drafts; None: the planner chooses
    grammar: Grammar | None = None  # compiled from its constraint
    source_token_ids: tuple[int, ...] = ()  # what the encoder reads; (): the target reads no text
    source_features: AudioFeatures | None = None  # what the encoder of a speech model reads
    speech_output: SpeechOutput = SpeechOutput.TEXT  # what a speech model writes
    group: str = ""  # requests of a group have the same prompt, so that proposers expect similar outputs


@dataclass(slots=True, kw_only=True, eq=False)
class SequenceState:
    """The state of a request. Only the engine and its scheduler change it."""

    request: Request
    slot: int  # -1 while it waits for a slot
    token_ids: list[int]  # committed tokens: the prompt and the output
    stream: TextStream | None = None
    matcher: Matcher | None = None  # the state of its grammar
    max_length: int = 0  # tokens with which it ends; the scheduler sets it
    num_cached_tokens: int = 0  # committed tokens in the target's KV cache
    num_cached_prompt_tokens: int = -1  # of the prompt that the prefix cache held at the start; -1: not started
    rounds: list[tuple[int, int, int]] = field(default_factory=list)  # by round: (draft depth, accepted, emitted)
    num_draft_tokens: int = 0  # of all rounds
    from_draft: list[bool] = field(default_factory=list)  # by output token: whether it is an accepted draft token
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    # Where the version of the target's weights changed: (index of the first output token, version).
    weight_versions: list[tuple[int, int]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str = ""
    rank: tuple[int, int] = (0, 0)  # the lowest rank is scheduled first

    @classmethod
    def of(
        cls,
        text: Sequence[int],
        slot: int = 0,
        params: SamplingParams | None = None,
        source: Sequence[int] | AudioFeatures = (),
    ) -> SequenceState:
        """Return a sequence for checks and measurements."""
        request = Request(
            id=-1,
            prompt_token_ids=tuple(text),
            params=params or SamplingParams(),
            seed=0,
            end_ids=frozenset(),
            max_tokens=1,
            source_token_ids=() if isinstance(source, AudioFeatures) else tuple(source),
            source_features=source if isinstance(source, AudioFeatures) else None,
        )
        return cls(request=request, slot=slot, token_ids=list(text))

    @property
    def num_output_tokens(self) -> int:
        """Output tokens so far."""
        return len(self.token_ids) - len(self.request.prompt_token_ids)


@dataclass(frozen=True, slots=True)
class DraftBudget:
    """How many tokens each sequence of a round may draft, and which draft tokens are worth their time.

    The scheduler makes it: the most that each completion can use. The planner lowers it and sets the rest. The engine
    sets it to 0 where memory is short. The proposer and the grammars stay within it.
    """

    tokens: tuple[int, ...]  # [B] draft tokens the proposer may return; 0: do not speculate
    with_forced: tuple[int, ...] = ()  # [B] most draft tokens with those that a grammar forces; (): no forced ones
    # The lowest acceptance probability at which a draft token is worth its time in the target's pass.
    min_path_prob: float = 0.0
    # The lowest probability at which drafting one more token pays, if 1, 2, ... sequences draft.
    min_draft_probs: tuple[float, ...] = ()
    alternative: int = 0  # which alternative of the proposer drafts (see `Needs`)

    def forced(self, b: int, drafted: int) -> int:
        """Return how many tokens a grammar may add to `drafted` tokens of sequence b."""
        free = self.with_forced[b] - drafted if self.with_forced else 0
        return min(max(free, 0), MAX_FORCED)

    def most(self, b: int) -> int:
        """Return the most draft tokens of sequence b, which has a grammar. They need memory."""
        return min(self.with_forced[b], self.tokens[b] + MAX_FORCED) if self.with_forced else 0

    def only(self, chosen: Sequence[bool]) -> DraftBudget:
        """Return the budget without draft tokens of the sequences that are not `chosen` [B]."""
        tokens = tuple(count if keep else 0 for keep, count in zip(chosen, self.tokens, strict=True))
        forced = self.with_forced and tuple(
            count if keep else 0 for keep, count in zip(chosen, self.with_forced, strict=True)
        )
        return replace(self, tokens=tokens, with_forced=forced)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The sequences of one round, and the feed of each: committed tokens that the KV cache does not hold yet."""

    seqs: tuple[SequenceState, ...]  # [B]
    start: tuple[int, ...]  # [B] cached length before this round
    feed: tuple[tuple[int, ...], ...]  # [B] token ids, at least one for each sequence
    budget: DraftBudget
    num_waiting: int = 0  # sequences that hold a slot and take no part in this round
    noise_stream: int = 0  # proposers whose samples meet in one tree use different ones

    @property
    def emits(self) -> tuple[bool, ...]:
        """[B] whether the feed reaches the end of the committed tokens, so that the sequence emits in this round."""
        return tuple(map(eq, self.ends, [len(seq.token_ids) for seq in self.seqs]))

    @property
    def ends(self) -> tuple[int, ...]:
        """[B] cached length with the feed."""
        return tuple(map(add, self.start, map(len, self.feed)))

    @property
    def alternatives(self) -> tuple[int, ...]:
        """[B] which alternative of the proposer drafts for each sequence."""
        requested = (seq.request.alternative for seq in self.seqs)
        return tuple(self.budget.alternative if choice is None else choice for choice in requested)

    @property
    def draft_budget(self) -> tuple[int, ...]:
        """[B] draft tokens the proposer may return; 0: do not speculate."""
        return self.budget.tokens

    def limited(self, tokens: tuple[int, ...]) -> Batch:
        """Return the batch with `tokens` [B] as draft budget."""
        budget = self.budget
        if tokens == budget.tokens:
            return self
        return self.with_budget(
            DraftBudget(
                tokens, budget.with_forced, budget.min_path_prob, budget.min_draft_probs, alternative=budget.alternative
            )
        )

    def with_budget(self, budget: DraftBudget) -> Batch:
        """Return the batch with another draft budget. Every round does this, and `replace` takes thrice the time."""
        return Batch(
            seqs=self.seqs,
            start=self.start,
            feed=self.feed,
            budget=budget,
            num_waiting=self.num_waiting,
            noise_stream=self.noise_stream,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packed:
    """Logits or probabilities over the vocabulary, stored only for the nodes that have them.

    In a large batch one sequence may have thirty draft tokens and the others none. A padded [B, M,
    V] tensor would be mostly padding.
    """

    values: torch.Tensor  # [T, V]
    at: torch.Tensor  # [B, M] int64: the index of each node in `values`; negative: the node has no values

    @classmethod
    def of(cls, padded: torch.Tensor) -> Packed:
        """Wrap a padded tensor [B, M, V] without a copy."""
        seqs, nodes, _ = padded.shape
        return cls(values=padded.flatten(0, 1), at=_all_nodes(seqs, nodes, padded.device))

    def padded(self) -> torch.Tensor:
        """Return a padded copy [B, M, V]. Nodes without values are 0."""
        return self.values[self.at.clamp(min=0)].masked_fill_(self.at[..., None] < 0, 0.0)


@lru_cache(256)  # plain decoding asks for the same indices in every round
@torch.inference_mode(False)  # callers outside of inference mode use the cached tensors as well
def _all_nodes(seqs: int, nodes: int, device: torch.device) -> torch.Tensor:
    return torch.arange(seqs * nodes, device=device).view(seqs, nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A tree of draft tokens for each sequence. A chain is a tree whose parents are -1, 0, 1, ...

    Parents come before children. Siblings are in the order in which they were sampled. Nodes from `count` on are
    padding. `q` holds the distribution that a sampled node was drawn from, before earlier siblings are removed.

    A proposer may estimate the acceptance probability of its nodes in `accept_prob`. The values never rise from one
    node to the next, so a planner shortens a draft by keeping its first nodes (`tree.cut`). An estimate may use the
    committed text, past acceptance, and the distributions that a node and its ancestors were drawn from. It must not
    use a token sampled at or below the node, or cutting would bias the output.
    """

    tokens: torch.Tensor  # [B, N] int64, ids of the target
    parent: torch.Tensor  # [B, N] int64; -1: the last committed token
    count: torch.Tensor  # [B] int64; 0 is always legal
    kind: torch.Tensor  # [B, N] int64, values of DraftKind
    q: Packed | None  # only of sampled nodes; None if nothing was sampled
    width: tuple[int, ...]  # [B] upper bound of count, known on the host; the target scores this many nodes
    depth: tuple[int, ...]  # [B] length of the longest path
    chain: bool  # whether every sequence has a chain
    accept_prob: tuple[tuple[float, ...], ...] | None = None  # [B][width]; None: not estimated
    source: tuple[tuple[int, ...], ...] | None = None  # [B][width] bit mask of the proposers in a combination
    num_prefilling: int = 0  # sequences without a draft because a draft model is still prefilling
    _host_tokens: list[list[int]] | None = field(default=None, init=False, repr=False, compare=False)

    def host_tokens(self) -> list[list[int]]:
        """Return `tokens` on the host, with padding. The first call waits for the device."""
        if self._host_tokens is None:
            object.__setattr__(self, "_host_tokens", self.tokens.tolist() if self.size else [[]] * len(self.width))
        assert self._host_tokens is not None
        return self._host_tokens

    @property
    def size(self) -> int:
        """N, the number of nodes of each sequence with padding."""
        return self.tokens.shape[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRule:
    """When a draft model stops drafting.

    The acceptance probability of a draft token, given that its parent is accepted, is sigmoid(weight * margin + bias).
    The margin is the difference of the two largest logits. A draft token whose path has a probability below
    `min_path_prob` is dropped. A sequence stops after a token below `min_draft_probs`, or after an end token.
    """

    weight: tuple[float, ...]  # by position; the last value holds for all later positions
    bias: tuple[float, ...]
    min_path_prob: float = 0.0
    min_draft_probs: tuple[float, ...] = ()  # if 1, 2, ... sequences still draft; (): never stop
    ends: tuple[int, ...] = ()  # tokens that end the text

    def threshold(self, seqs: int) -> float:
        """Return the acceptance probability of a path below which its sequence stops, while `seqs` sequences draft.

        0 if there is no threshold.
        """
        return self.min_draft_probs[min(seqs, len(self.min_draft_probs)) - 1] if self.min_draft_probs else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftChains:
    """Chains that a draft model has drafted."""

    tokens: torch.Tensor  # [B, K] int64; the first count[b] are the draft; one more token and padding may follow
    count: tuple[int, ...]  # [B]
    margin: Sequence[Sequence[float]] | None = None  # [B][count or count + 1]; None: not computed
    accept_prob: Sequence[Sequence[float]] | None = None  # acceptance probability of the path, in the shape of `margin`
    q: Packed | None = None  # [B, K] if tokens were sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """The output of one forward pass: at the last committed token (node 0) and at each draft token (node 1 + j)."""

    logits: torch.Tensor  # [B, 1 + N, V] float32
    # Outputs of exported layers, by layer: at the nodes [B, 1 + N, H], and at the whole feed [B][F, H].
    hidden_states: Mapping[int, torch.Tensor] = field(default_factory=dict)
    feed_hidden_states: Mapping[int, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    best: torch.Tensor | None = None  # [B, 1 + N] likeliest ids, -1 if logits are not finite; None: not computed
    confidence: torch.Tensor | None = None  # [B, 1 + N] log-odds of acceptance, from a confidence head

    @property
    def packed(self) -> Packed | None:
        """The logits without padding, if the pass produced them without padding."""
        return None

    @property
    def host(self) -> Sequence[Sequence[int]] | None:
        """`best` [B, 1 + N] on the host, if the pass wrote it there."""
        return None

    def states(self, layers: Sequence[int], b: int, path: Sequence[int]) -> torch.Tensor:
        """Return hidden states [n, layers, H] of sequence b: its feed, then the nodes of `path`. May be a view."""

        def of(layer: int) -> torch.Tensor:
            at_nodes = self.hidden_states[layer][b]
            # Slices, because the copy of an index to a GPU would wait for it.
            return torch.cat([self.feed_hidden_states[layer][b], *(at_nodes[node + 1 : node + 2] for node in path)])

        return torch.stack([of(layer) for layer in layers], dim=1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KVView:
    """Read access to a target's keys and values by token position, whatever their memory layout."""

    # entries(layer, slots, begin, end) returns keys and values [slots, key heads, end - begin, D], possibly as views.
    # Entries beyond what a slot holds are arbitrary finite numbers. None before the first pass.
    entries: Callable[[int, Sequence[int], int, int], tuple[torch.Tensor, torch.Tensor] | None]
    layer_config: Mapping[str, Any]  # the model's configuration of its layers


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedWeights:
    """The weights that trained draft heads share with a target. Tensors may be copies."""

    embedding: torch.Tensor  # [V, H], input of the first layer
    head: torch.Tensor  # [V, H]
    norm: torch.Tensor  # [H], factors of the norm before the head
    epsilon: float
    normed_states: bool = False  # whether the exported states of the last layer are those after the final norm
    softcap: float | None = None  # of the logits: softcap * tanh(logits / softcap)
    packed: Any = None  # the output layer in the layout of the native kernels, for drafts that run on them
    kv_view: KVView | None = None  # for heads that attend to the target's keys and values


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The accepted path, the bonus token, and their log-probabilities under p."""

    path: torch.Tensor  # [B, N] int64: accepted nodes in order, padded with -1
    accepted: torch.Tensor  # [B] int64: length of the path
    bonus: torch.Tensor  # [B] int64: the token after the path
    logprob: torch.Tensor  # [B, N + 1] float: of the accepted tokens, then of the bonus token; 0 beyond


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Natural log-probabilities at one output token."""

    token: int
    logprob: float  # under the model's own softmax, before temperature, penalties and filters
    sampled_logprob: float  # under p, the distribution that the token was sampled from
    top: tuple[tuple[int, float], ...]  # the likeliest tokens under the model's own softmax, best first


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One finished round, as passed to `commit`: what ran and what was accepted."""

    batch: Batch
    draft: Draft
    scores: Scores
    path: tuple[tuple[int, ...], ...]  # [B] accepted draft nodes, in order
    emitted: tuple[tuple[int, ...], ...]  # [B] tokens of the accepted nodes, then the bonus token; () during prefill
    sampled_logprob: tuple[tuple[float, ...], ...]  # [B] under p, for each emitted token
    failed: tuple[bool, ...]  # [B] whether the sequence fails
    # Reasons of failures, by index in the batch. A failed sequence without a reason has logits that are not finite.
    reasons: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """The outputs of the target's pass that a proposer needs. Nothing else is exported."""

    layers: tuple[int, ...] = ()  # decoder layers, from 0, whose hidden states are needed
    alternatives: int = 1  # proposers that the planner chooses from in each round


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One finished completion."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    seed: int
    from_draft: tuple[bool, ...]  # by token: whether it is an accepted draft token
    logprobs: tuple[TokenLogprobs, ...]
    stats: Stats
    error: str = ""
    source_token_ids: tuple[int, ...] = ()  # what the encoder has read; (): the target reads no text
    # The versions of the target's weights that sampled the output: (index of the first token, version), in order.
    weight_versions: tuple[tuple[int, int], ...] = ()
    num_cached_prompt_tokens: int = 0  # tokens of the prompt that the prefix cache held
    stop_string: str = ""  # the stop string before which the text ends; "": another reason ended it

    @property
    def num_input_tokens(self) -> int:
        """Tokens of the prompt and the source."""
        return len(self.prompt_token_ids) + len(self.source_token_ids)
