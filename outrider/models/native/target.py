"""A model on the native kernels. Each forward pass is one call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path

import torch

from outrider.core import tree
from outrider.core.cache import MIN_CAPACITY, Cache
from outrider.core.draws import Draws
from outrider.core.types import (
    Batch,
    Draft,
    DraftBudget,
    DraftChains,
    KVView,
    Packed,
    Scores,
    SequenceState,
    SharedWeights,
    StopRule,
)
from outrider.errors import OutriderError
from outrider.models.cache.paged import PagedCache
from outrider.models.cache.shared import SharedCache
from outrider.models.native.batch_columns import columns_of
from outrider.models.native.columns import Columns
from outrider.models.native.decoder import Decoder
from outrider.models.native.dimensions import Dimensions
from outrider.models.native.library import load_library
from outrider.models.native.low_rank import LowRankHead
from outrider.models.native.scores import Exported, NativeScores
from outrider.models.torch.checkpoint import Checkpoint
from outrider.models.torch.model_weights import ModelWeights
from outrider.models.torch.submodel import refuse_wider


class NativeTarget:
    """A Llama-like model on the CPU, as a target or a draft model.

    The result for a token does not depend, in any bit, on the other tokens of the pass. The output
    is therefore the same with any proposer, any number of draft tokens and any batch, in float32
    and in bfloat16.
    """

    cache: Cache

    def __init__(
        self, checkpoint: Checkpoint, *, slots: int, context: int, bits: int = 16, kv_dtype: torch.dtype | None = None
    ) -> None:
        """Pack the weights and allocate a cache for `slots` sequences of up to `context` tokens.

        With `bits` below 16 the weights are quantized, and those of `checkpoint.model` are replaced
        by the quantized ones when it is made. `kv_dtype` is int8, or None for the dtype of the
        checkpoint.

        Raises:
            UnsupportedModel: the kernels cannot be compiled, or do not support this model.
        """
        text = checkpoint.config.get_text_config(decoder=True)
        Dimensions.of(text)  # a model that the kernels do not support needs no compiler
        self._library = load_library()
        weight_bits = bits if bits < 16 else 8 * checkpoint.dtype.itemsize
        weights = checkpoint.weights
        if weights is None:
            weights = ModelWeights(checkpoint.model, Path(checkpoint.folder))
        self._decoder = Decoder(weights, checkpoint.config, self._library, bits=weight_bits)
        if bits < 16:
            packed = self._decoder.weights
            checkpoint.lazy_model.change(lambda model: model.load_state_dict(packed.unpacked(), strict=False))
        self.vocab = checkpoint.vocab
        self.device = checkpoint.device
        self.version = 0
        self.slots = slots
        self.context = context
        self._layers: tuple[int, ...] = ()  # exported layers
        self._columns = 0  # of the last pass
        self._blocks = 0  # of the KV cache before `sleep`
        self._config = checkpoint.config.to_dict()
        self._kv_dtype = kv_dtype or self._decoder.weights.dtype
        types = self._decoder.weights.types or ((f"int{bits}",) if bits < 16 else ())
        self.kernels = self._kernels(*types)
        self.layers = self._decoder.shape.layers
        self._allocate_cache(self.layers)

    @property
    def compile_seconds(self) -> float:
        """Time to compile the kernels; 0 if they are prebuilt, or an earlier run has compiled them."""
        return self._library.compile_seconds

    @property
    def kernel_build(self) -> str:
        """The build of the kernels: that of a prebuilt library, or "compiled"."""
        return self._library.build

    def score(self, batch: Batch, draft: Draft, first: int = -1) -> Scores:
        self._memory.reserve(batch, draft.width)
        columns, spans, order = columns_of(batch, draft, first, self.vocab)
        self._columns = len(columns.token)
        logits, best, states = self._decoder.run(columns, self._layers)
        batch_size = len(batch.seqs)
        packed = None
        exported = None
        likeliest = best.tolist()
        if order is not None:
            likeliest = tree.pick(likeliest, order)
            packed = Packed(values=logits, at=torch.tensor(order).view(batch_size, -1))
        if self._layers:
            output_columns = torch.tensor(columns.output_columns, dtype=torch.int64)
            nodes = (output_columns if packed is None else output_columns[packed.at]).view(batch_size, -1)
            begin = tuple(span.begin for span in spans)
            feed = tuple(span.end - span.begin - span.nodes for span in spans)
            exported = Exported(layers=self._layers, values=states, nodes=nodes, begin=begin, feed=feed)
        num_nodes = len(likeliest) // batch_size
        host = [likeliest[at : at + num_nodes] for at in range(0, len(likeliest), num_nodes)]
        return NativeScores(host=host, logits=logits, packed=packed, exported=exported)

    def draft_greedy(self, batch: Batch, vocab: int, stop_rule: StopRule | None = None) -> DraftChains:
        return self._draft(batch, vocab, stop_rule, None)

    def draft_sampled(self, batch: Batch, vocab: int, draws: Draws, stop_rule: StopRule | None = None) -> DraftChains:
        return self._draft(batch, vocab, stop_rule, draws)

    def _draft(self, batch: Batch, vocab: int, stop_rule: StopRule | None, draws: Draws | None) -> DraftChains:
        self._memory.reserve(batch, batch.draft_budget)
        columns = columns_of(batch, tree.empty(len(batch.seqs), self.device), -1, self.vocab).columns
        return self._decoder.draft_chains(columns, batch.draft_budget, vocab, stop_rule, draws=draws)

    def export_hidden_states(self, layers: Sequence[int]) -> None:
        last = self._decoder.shape.layers - 1
        if invalid := [layer for layer in layers if not 0 <= layer <= last]:
            raise OutriderError(f"this target has no layer {invalid[0]}; use layers 0 to {last}")
        self._layers = tuple(layers)
        if layers:
            # A prefix that is already cached is not computed, so its hidden states would be
            # missing.
            self.cache.set_prefix_caching(False)

    def update_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        self._decoder.load(weights)
        self.version = version

    def keep_tokens(self, ids: torch.Tensor) -> None:
        """Compute logits for the tokens `ids` [Vd] only, which ascend. `score` then returns Vd logits per node."""
        self._decoder.keep_tokens(ids)

    def rank_tokens(self, factors: LowRankHead, candidates: int) -> None:
        """Compute exact logits for the likeliest tokens only, see `Decoder.rank_tokens`."""
        self._decoder.rank_tokens(factors, candidates)

    def restored_factors(self, tensors: Mapping[str, torch.Tensor]) -> LowRankHead:
        """Return the factors of the LM head whose `tensors` these are."""
        return LowRankHead.of(tensors, vocab=self._decoder.vocab, hidden=self._decoder.shape.hidden)

    def pass_operations(self, tokens: int) -> float:
        """Return about how many operations passes over so many tokens take, without the LM head."""
        layers, _ = self._decoder.read_bytes()
        return 2 * tokens * sum(layers) * 8 / self._decoder.weights.bits

    def factor_operations(self, tokens: int) -> float:
        """Return about how many operations `factorize_head` takes for texts of so many tokens in all."""
        return self.pass_operations(tokens) + self.vocab * self._decoder.shape.hidden**2

    def factorize_head(self, texts: Sequence[Sequence[int]]) -> LowRankHead:
        """Return low-rank factors of the LM head that are best for token ids of typical texts. Slot 0 is free."""
        last = (self.layers - 1,)
        states = [self._decoder.run(columns, last).hidden_states[0] for columns in self._passes(texts)]
        return self._decoder.factorize_head(torch.cat(states))

    def input_moments(self, texts: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
        """Return the sums of the squares of the inputs of each weight in texts of token ids. Slot 0 is free."""
        return self._decoder.input_moments(self._passes(texts))

    def _passes(self, texts: Sequence[Sequence[int]]) -> Iterator[Columns]:
        """Yield the columns of a pass over each text, in slot 0."""
        for text in texts:
            feed = tuple(text[: self.context])
            self.cache.admit(0, feed[:1])
            batch = Batch(seqs=(SequenceState.of(feed),), start=(0,), feed=(feed,), budget=DraftBudget((0,)))
            self._memory.reserve(batch, (0,))
            yield columns_of(batch, tree.empty(1, self.device), -1, self.vocab).columns
            self.cache.release(0)

    def bytes(self) -> int:
        return self._decoder.bytes()

    def touched_experts(self) -> float | None:
        return self._decoder.touched_experts()

    def chosen_experts(self) -> list[torch.Tensor]:
        return self._decoder.chosen_experts(self._columns)

    def expert_bytes(self) -> int:
        return self._decoder.weights.expert_bytes

    def weight_names(self) -> frozenset[str]:
        return frozenset(self._decoder.weights.shapes)

    def stored_weights(self) -> Mapping[str, torch.Tensor]:
        return self._decoder.weights.tensors()

    def sleep(self, *, weights: bool) -> None:
        self._blocks = self._memory.usage().blocks
        self._memory.resize(0)
        if weights:
            self._decoder.discard()

    def wake(self) -> None:
        self._memory.resize(self._blocks)

    def read_bytes(self) -> tuple[tuple[int, ...], int]:
        return self._decoder.read_bytes()

    def share_weights(self) -> SharedWeights:
        kv_view = KVView(entries=self._memory.entries, layer_config=self._config)
        return replace(self._decoder.weights.share(), kv_view=kv_view)

    def make_submodel(self, layers: Sequence[int]) -> NativeTarget:
        count = len(layers)
        other = copy(self)
        other._decoder = self._decoder.make_submodel(layers)
        other._layers = ()
        other.kernels = f"{self.kernels}, {count} layers"
        if tuple(layers) == tuple(range(count)):
            other._share_cache(self)  # the first layers compute the same keys and values as the whole model
        else:
            other._allocate_cache(count)
        return other

    def make_requantized(self, bits: int, moments: Mapping[str, torch.Tensor] | None = None) -> NativeTarget:
        """Make a copy with linear layers of 8 or 4 bits, see `SelfDraftTarget`.

        Args:
            bits: of the copy.
            moments: as `input_moments` returns them. With them, 4 bits lose less.
        """
        refuse_wider(bits, self._decoder.weights.bits)
        other = copy(self)
        other._decoder = self._decoder.make_requantized(bits, moments or {})
        other._layers = ()
        other.kernels = self._kernels(f"int{bits}")
        other._share_cache(self)
        return other

    def _kernels(self, *types: str) -> str:
        """Return the name of the kernels with these types of weights, such as native Q4_K+Q6_K kv-int8."""
        cache = ("kv-int8",) if self._kv_dtype == torch.int8 else ()
        return " ".join(("native", *(("+".join(types),) if types else ()), *cache))

    def _share_cache(self, owner: NativeTarget) -> None:
        """Use the KV cache of the target that this one was made from."""
        self.cache = SharedCache(owner.cache)
        self._decoder.attach(owner._memory)

    def _allocate_cache(self, layers: int) -> None:
        shape = self._decoder.shape
        self._memory = PagedCache(
            slots=self.slots,
            capacity=max(self.context, MIN_CAPACITY),
            layers=layers,
            heads=shape.key_heads,
            dim=shape.dim,
            dtype=self._kv_dtype,
            key_offset=self._decoder.key_offset() if self._kv_dtype == torch.int8 else None,
        )
        self.cache = self._memory
        self._decoder.attach(self._memory)
