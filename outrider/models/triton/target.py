"""A Llama-like model on an NVIDIA GPU, with a paged KV cache and kernels in Triton."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from outrider.core.cache import MIN_CAPACITY, Cache
from outrider.core.target import draft_by_scores
from outrider.core.tree import empty
from outrider.core.types import Batch, Draft, DraftBudget, DraftChains, KVView, Scores, SharedWeights, StopRule
from outrider.errors import OutriderError
from outrider.models.cache.device_pages import DevicePagedCache
from outrider.models.cache.shared import SharedCache
from outrider.models.torch.checkpoint import Checkpoint
from outrider.models.torch.cuda_recorder import Recorder
from outrider.models.torch.model_weights import ModelWeights
from outrider.models.triton.decoder import Decoder, Outputs
from outrider.models.triton.passes import BLOCK_ROWS, PROMPT_BUCKET, Buffers
from outrider.models.triton.ragged import RaggedPass, feeds_long_prompt, ragged_pass, rows_of, whole_prompts
from outrider.models.triton.recordings import Recordings


class _Scored(NamedTuple):
    """The tensors that a pass of fixed shape returns."""

    logits: torch.Tensor  # [R * C, V] float32, by node; of a prompt [1, V]
    best: torch.Tensor  # [R * C] int64; of a prompt [1]
    states: dict[int, torch.Tensor]  # [T, H] by exported layer


class TritonTarget:
    """A Llama-like model on a GPU, as a target or a draft model."""

    cache: Cache

    def __init__(
        self, checkpoint: Checkpoint, *, slots: int, context: int, bits: int = 16, record: Recorder | None = None
    ) -> None:
        """Copy the weights to the device and prepare a cache for `slots` sequences of up to `context` tokens.

        With `record`, passes of fixed shapes are recorded as graphs.

        Raises:
            UnsupportedModel: the kernels do not support this model.
        """
        weights = checkpoint.weights
        if weights is None:
            weights = ModelWeights(checkpoint.model, Path(checkpoint.folder))
        self._decoder = Decoder(
            weights,
            checkpoint.config,
            dtype=checkpoint.dtype,
            device=checkpoint.device,
            context=context,
            bits=bits,
        )
        self.vocab = checkpoint.vocab
        self.device = checkpoint.device
        self.version = 0
        self.slots = slots
        self.context = context
        self.layers = self._decoder.shape.layers
        self.kernels = "triton" if bits == 16 else f"triton int{bits}"
        if self._decoder.types:
            self.kernels = f"triton {'+'.join(self._decoder.types)}"
        self._config = checkpoint.config.to_dict()
        self._record = record
        self._exported: tuple[int, ...] = ()
        self._blocks = 0  # of the KV cache before `sleep`
        self._allocate_cache(self.layers)
        self._reset()

    @property
    def compile_seconds(self) -> float:
        """Time to compile the kernels ahead of time. Triton compiles each when it first runs."""
        return 0.0

    def score(self, batch: Batch, draft: Draft, first: int = -1) -> Scores:
        self._memory.reserve(batch, draft.width)
        if feeds_long_prompt(batch, first):
            if prompts := whole_prompts(batch, draft):
                return self._score_prompts(batch, draft, prompts)
            bucket = None
        else:
            bucket = self.graphs.bucket(batch, draft, first)
        if bucket is None:
            return self._score_ragged(ragged_pass(batch, draft, first, self._memory))
        buffers, run = self.graphs.find(bucket)
        buffers.fill(batch, draft, first, self._memory)
        logits, best, states = run()
        shape = (bucket.rows, bucket.columns)
        num_nodes = draft.size - max(first, 0) + (first < 0)
        size = len(batch.seqs)
        nodes = buffers.nodes.view(shape)[:size, :num_nodes].long()
        feed_states = {}
        if first < 0:
            for layer, values in states.items():
                rows = values.view(*shape, -1)
                feed_states[layer] = tuple(rows[b, : len(feed)].clone() for b, feed in enumerate(batch.feed))
        return Scores(
            # The results are copied, because the next pass writes to the same memory.
            logits=logits.view(*shape, -1)[:size, :num_nodes].clone(),
            hidden_states={layer: values[nodes] for layer, values in states.items()},
            best=best.view(shape)[:size, :num_nodes].clone(),
            feed_hidden_states=feed_states,
        )

    def _score_prompts(self, batch: Batch, draft: Draft, prompts: Sequence[int]) -> Scores:
        """Score each of the sequences `prompts` in passes of its own, and the others in one."""
        parts = {b: self._score_prompt(batch, b, 1 + draft.size) for b in prompts}
        if others := [b for b in range(len(batch.seqs)) if b not in prompts]:
            scores = self.score(*rows_of(batch, draft, others, self.device))
            parts |= {b: _row(scores, i) for i, b in enumerate(others)}
        return _joined([parts[b] for b in range(len(batch.seqs))])

    def _score_prompt(self, batch: Batch, b: int, num_nodes: int) -> Scores:
        """Run a part of the prompt of one sequence in blocks. Padding repeats node 0, its last token."""
        states: dict[int, list[torch.Tensor]] = {layer: [] for layer in self._exported}
        for begin in range(0, len(batch.feed[b]), BLOCK_ROWS):
            feed = batch.feed[b][begin : begin + BLOCK_ROWS]
            block = replace(
                batch,
                seqs=(batch.seqs[b],),
                start=(batch.start[b] + begin,),
                feed=(feed,),
                budget=DraftBudget((0,)),
            )
            buffers, run = self.graphs.find(PROMPT_BUCKET)
            buffers.fill(block, empty(1, self.device), -1, self._memory)
            scored: _Scored = run()
            for layer, values in scored.states.items():
                states[layer].append(values[: len(feed)].clone())
        fed = {layer: torch.cat(values) for layer, values in states.items()}
        return Scores(
            logits=scored.logits[None].repeat(1, num_nodes, 1),
            hidden_states={layer: values[None, -1:].repeat(1, num_nodes, 1) for layer, values in fed.items()},
            best=scored.best[None].repeat(1, num_nodes),
            feed_hidden_states={layer: (values,) for layer, values in fed.items()},
        )

    def _score_ragged(self, ragged: RaggedPass) -> Scores:
        outputs = Outputs(layers=self._exported)
        hidden = self._decoder.forward(
            ragged.tokens, ragged.groups, self._memory.pages, outputs, prompt_tokens=ragged.prompt_tokens
        )
        logits = self._decoder.logits(hidden[ragged.place[ragged.keep]])
        states = {layer: values[ragged.place] for layer, values in outputs.states.items()}

        def per_feed(values: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(values[span.begin : span.end - span.nodes] for span in ragged.spans)

        return Scores(
            logits=ragged.per_node(logits),
            hidden_states={layer: ragged.per_node(values[ragged.keep]) for layer, values in states.items()},
            feed_hidden_states={layer: per_feed(values) for layer, values in states.items()},
        )

    def draft_greedy(self, batch: Batch, vocab: int, stop_rule: StopRule | None = None) -> DraftChains:
        steps = max(batch.draft_budget)
        no_draft = empty(len(batch.seqs), self.device)
        bucket = self.graphs.bucket(batch, no_draft, -1, steps=steps, vocab=vocab if vocab < self.vocab else 0)
        if bucket is None or feeds_long_prompt(batch, -1):
            return draft_by_scores(self, batch, vocab, stop_rule)
        self._memory.reserve(batch, [budget - 1 for budget in batch.draft_budget])
        buffers, run = self.graphs.find(bucket)
        buffers.fill(batch, no_draft, -1, self._memory)
        tokens: torch.Tensor = run()
        return DraftChains(tokens=tokens[: len(batch.seqs), :steps].clone(), count=batch.draft_budget)

    def _function(self, buffers: Buffers) -> Callable[[], object]:
        """Return the function of a pass of fixed shape."""
        return partial(self._draft_chains if buffers.bucket.steps else self._score_fixed, buffers)

    def _score_fixed(self, buffers: Buffers) -> _Scored:
        outputs = Outputs(layers=self._exported)
        prompt_tokens = buffers.bucket.columns if buffers.bucket.is_prompt else 0
        hidden = self._decoder.forward(
            buffers.tokens(), [buffers.layout()], self._memory.pages, outputs, prompt_tokens=prompt_tokens
        )
        nodes = buffers.last() if prompt_tokens else buffers.nodes.long()
        logits = self._decoder.logits(hidden[nodes])
        best = logits.argmax(-1).masked_fill(~logits.amax(-1).isfinite(), -1)
        return _Scored(logits, best, outputs.states)

    def _draft_chains(self, buffers: Buffers) -> torch.Tensor:
        """Draft greedily and return the tokens [R, steps]."""
        bucket = buffers.bucket
        outputs = Outputs(layers=())
        pages = self._memory.pages
        hidden = self._decoder.forward(buffers.tokens(), [buffers.layout()], pages, outputs)
        vocab = bucket.vocab or None
        tokens = [self._decoder.logits(hidden[buffers.last()])[:, :vocab].argmax(-1)]
        for step in range(1, bucket.steps):
            hidden = self._decoder.forward(tokens[-1], [buffers.step(step)], pages, outputs)
            tokens.append(self._decoder.logits(hidden)[:, :vocab].argmax(-1))
        return torch.stack(tokens, 1)

    def export_hidden_states(self, layers: Sequence[int]) -> None:
        if invalid := [layer for layer in layers if not 0 <= layer < self.layers]:
            raise OutriderError(f"this target has no layer {invalid[0]}; use layers 0 to {self.layers - 1}")
        if tuple(layers) != self._exported:
            self._exported = tuple(layers)
            self._reset()  # the recorded passes export other layers
        if layers:
            # A prefix that is already cached is not computed, so its hidden states would be missing.
            self.cache.set_prefix_caching(False)

    def update_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        self._decoder.load(weights)
        self._memory.forget()
        self.version = version

    def sleep(self, *, weights: bool) -> None:
        if weights:
            self._decoder.discard()
        self._blocks = len(self._memory.pages)
        self._memory.resize(0)
        self._reset()

    def wake(self) -> None:
        self._decoder.restore()
        self._memory.resize(self._blocks)

    def weight_names(self) -> frozenset[str]:
        return frozenset(self._decoder.shapes)

    def stored_weights(self) -> Mapping[str, torch.Tensor]:
        return self._decoder.tensors()

    def bytes(self) -> int:
        return self._decoder.bytes()

    def graph_bytes(self) -> int:
        """Bytes of recorded passes, besides weights and cache."""
        return self.graphs.bytes()

    def read_bytes(self) -> tuple[tuple[int, ...], int]:
        return self._decoder.read_bytes()

    def share_weights(self) -> SharedWeights:
        kv_view = KVView(entries=self._memory.entries, layer_config=self._config)
        return replace(self._decoder.share_weights(), kv_view=kv_view)

    def make_submodel(self, layers: Sequence[int]) -> TritonTarget:
        other = copy(self)
        other._decoder = self._decoder.make_submodel(layers)
        other._exported = ()
        other.kernels = f"{self.kernels}, {len(layers)} layers"
        if tuple(layers) == tuple(range(len(layers))):
            other.cache = SharedCache(self.cache)
        else:
            other._allocate_cache(len(layers))
        other._reset()
        return other

    def make_requantized(self, bits: int) -> TritonTarget:
        if bits >= self._decoder.bits or self._decoder.types:
            raise OutriderError(f"the target has weights of {self._decoder.bits} bits; a copy of {bits} is not smaller")
        other = copy(self)
        other._decoder = self._decoder.make_requantized(bits)
        other._exported = ()
        other.kernels = f"triton int{bits}"
        other.cache = SharedCache(self.cache)
        other._reset()
        return other

    def _allocate_cache(self, layers: int) -> None:
        shape = self._decoder.shape
        self._memory = DevicePagedCache(
            slots=self.slots,
            capacity=max(self.context, MIN_CAPACITY),
            layers=layers,
            heads=shape.key_heads,
            dim=shape.dim,
            dtype=self._decoder.dtype,
            device=self.device,
        )
        self.cache = self._memory

    def _reset(self) -> None:
        """Drop the recorded passes."""
        self.graphs = Recordings(self._memory, make=self._function, record=self._record)


def _row(scores: Scores, b: int) -> Scores:
    """Return the scores of one sequence."""
    return Scores(
        logits=scores.logits[b : b + 1],
        hidden_states={layer: values[b : b + 1] for layer, values in scores.hidden_states.items()},
        best=None if scores.best is None else scores.best[b : b + 1],
        feed_hidden_states={layer: values[b : b + 1] for layer, values in scores.feed_hidden_states.items()},
    )


def _joined(rows: Sequence[Scores]) -> Scores:
    """Return the scores of several sequences."""
    best = [row.best for row in rows if row.best is not None]
    states: dict[int, torch.Tensor] = {}
    feed_states: dict[int, tuple[torch.Tensor, ...]] = {}
    for layer in rows[0].hidden_states:
        states[layer] = torch.cat([row.hidden_states[layer] for row in rows])
        feed_states[layer] = tuple(row.feed_hidden_states[layer][0] for row in rows)
    return Scores(
        logits=torch.cat([row.logits for row in rows]),
        hidden_states=states,
        best=torch.cat(best) if len(best) == len(rows) else None,
        feed_hidden_states=feed_states,
    )
