"""Run a target in one precision, with plain decoding or with speculation, any verifier and any k."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from outrider.core import tree
from outrider.core.config import FULL_BITS, EngineConfig
from outrider.core.noise import PositionNoise, derive_seed
from outrider.core.params import SamplingParams
from outrider.core.planner import FixedPlanner
from outrider.core.proposer import NoProposer, Proposer
from outrider.core.stats import Stats
from outrider.core.target import CompiledTarget
from outrider.core.types import Batch, Draft, DraftBudget, FinishReason, Request, Round, SequenceState
from outrider.drafting.propose.registry import Maker, check_draft_settings
from outrider.engine.build import assemble, full_dtype, make_proposer, make_setup, prepare_target, proposer_of
from outrider.engine.drive import drive
from outrider.engine.engine import Engine
from outrider.engine.verifiers import tree_makers
from outrider.errors import OutriderError
from outrider.lab.audit.prompts import Prompt, encode
from outrider.models.loader.embedded import model_folder
from outrider.models.loader.load import load_checkpoint, refuse_sources
from outrider.models.torch.checkpoint import Checkpoint
from outrider.models.torch.quantize import QuantizedLinear, quantize_model
from outrider.verify.rules import EXACT, Verifier
from outrider.verify.sampling import SamplingTensors, apply_sampling

_MAX_NUM_SEQS = 16  # sequences at once
_CHAIN = 15  # tokens whose logits one pass computes, beside those of the root
_GRID = 1 << 20  # resolution of a uniform number


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """The outputs of requests."""

    tokens: tuple[tuple[int, ...], ...]  # in the order of the requests
    stats: Stats


class Pair:
    """A target and a proposer that are loaded once and run in several ways."""

    def __init__(self, config: EngineConfig, prompts: Sequence[Prompt], *, room: int) -> None:
        """Load target and proposer.

        Args:
            config: target and proposer. The fields for the number of sequences, their length, their cache and the
                draft length are not read. If quantized weights run in float32, they are quantized as on torch and then
                widened.
            room: number of tokens after a prompt, including draft tokens.

        Raises:
            OutriderError: a model cannot be loaded.
        """
        self._spec = proposer_of(config)
        checkpoint, config = _load(config, self._spec)
        self.dtype = checkpoint.dtype
        self.device = checkpoint.device
        self.prompts = tuple(encode(checkpoint.tokenizer, prompt) for prompt in prompts)
        self.on_done: Callable[[], None] = lambda: None  # called after every completion

        context = _context(checkpoint, self.prompts, room)
        self._loaded = prepare_target(checkpoint, replace(config, max_num_seqs=_MAX_NUM_SEQS, max_model_len=context))
        self.precision = self._loaded.precision
        self._target = self._loaded.model
        self.kernels = self._target.kernels
        assert self._loaded.check is not None
        self.load_check = self._loaded.check
        self.steady = isinstance(self._target, CompiledTarget)  # logits do not depend on the batch, bit for bit

        self._setup = make_setup(self._loaded, EXACT["walk"].draw, config)
        self._proposer = make_proposer(self._spec, self._setup)
        self._target.export_hidden_states(self._proposer.needs.layers)
        self.draft_placements = tuple(self._setup.placements)
        self.trees = bool(tree_makers(self._spec))  # whether the proposer drafts trees, by its type or as observed

    def requests(self, params: SamplingParams, prompts: Sequence[Sequence[int]] | None = None) -> list[Request]:
        """Return one request per prompt, with different seeds. Only max_tokens ends them."""
        assert params.seed is not None
        assert params.max_tokens is not None
        return [
            Request(
                id=i,
                prompt_token_ids=tuple(prompt),
                params=params,
                seed=derive_seed(params.seed, i),
                end_ids=frozenset(),
                max_tokens=params.max_tokens,
            )
            for i, prompt in enumerate(self.prompts if prompts is None else prompts)
        ]

    def plain(self, requests: Sequence[Request], *, alone: bool) -> Outputs:
        """Return the outputs of the requests with plain decoding."""
        engine = self._engine(NoProposer(self._setup), EXACT["walk"], 0)
        return self._run(engine, requests, alone=alone)

    def speculative(
        self, requests: Sequence[Request], verifier: Verifier, *, k: int, alone: bool = False, enough: int | None = None
    ) -> Outputs:
        """Return the outputs of the requests with speculation.

        Args:
            verifier: the verifier, which decides how the proposer chooses draft tokens.
            k: draft length.
            alone: one request at a time instead of a batch.
            enough: tokens after which a request is aborted.
        """
        if self._setup.draw is not verifier.draw:
            self._setup = replace(self._setup, draw=verifier.draw)
            self._proposer = make_proposer(self._spec, self._setup)
        proposer = _TreeRecorder(self._proposer)
        outputs = self._run(self._engine(proposer, verifier, k), requests, alone=alone, enough=enough)
        self.trees |= proposer.trees
        return outputs

    @torch.inference_mode()
    def logits(self, text: Sequence[int]) -> torch.Tensor:
        """Return the logits [V] float32 after the tokens `text`, in a fresh prefill."""
        self._target.cache.admit(0, text)
        batch = Batch(seqs=(SequenceState.of(text),), start=(0,), feed=(tuple(text),), budget=DraftBudget((0,)))
        logits = self._target.score(batch, tree.empty(1, self.device)).logits[0, 0]
        self._target.cache.release(0)
        return logits

    @torch.inference_mode()
    def logits_along(self, text: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        """Return the logits [1 + N, V] float32 after the tokens `text`, and after each of N `tokens` that follow."""
        rows = []
        for begin in range(0, len(tokens) + 1, _CHAIN + 1):
            # The root of a pass is the position after the nodes of the pass before.
            prefix = (*text, *tokens[:begin])
            nodes = tuple(tokens[begin : begin + _CHAIN])
            self._target.cache.admit(0, prefix)
            batch = Batch(
                seqs=(SequenceState.of(prefix),), start=(0,), feed=(prefix,), budget=DraftBudget((len(nodes),))
            )
            draft = tree.empty(1, self.device)
            if nodes:
                draft = tree.chain(torch.tensor([nodes], device=self.device), (len(nodes),))
            rows.append(self._target.score(batch, draft).logits[0].clone())
            self._target.cache.release(0)
        return torch.cat(rows).float()

    @property
    def vocab(self) -> int:
        """Number of ids that have logits."""
        return self._setup.vocab

    @property
    def tokenizer(self) -> Any:
        return self._loaded.checkpoint.tokenizer

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end the text."""
        return self._loaded.checkpoint.end_ids

    def target_distribution(self, logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
        """Return the target distribution [V] of `logits` [V], for parameters that do not depend on the text."""
        sampling = SamplingTensors.of((SequenceState.of((0,), params=params),), self._setup.vocab, self.device)
        return apply_sampling(logits[None, None], sampling, tree.empty(1, self.device))[0, 0]

    def uniform(self, seed: int, position: int) -> float:
        """Return the uniform number that samples the token at `position`, within 1e-6."""
        noise = PositionNoise(torch.tensor([seed]), torch.tensor([position]))
        index = noise.sample(torch.ones(1, 1, _GRID), torch.zeros(1, 1, dtype=torch.int64))
        return (int(index) + 0.5) / _GRID

    def _engine(self, proposer: Proposer, verifier: Verifier, k: int) -> Engine:
        return assemble(self._loaded, proposer=proposer, verifier=verifier, planner=FixedPlanner(k))

    @torch.inference_mode()
    def _run(self, engine: Engine, requests: Sequence[Request], *, alone: bool, enough: int | None = None) -> Outputs:
        """Return the outputs of the requests, one at a time or in a batch. `enough` tokens end a request."""
        tokens: dict[int, tuple[int, ...]] = {}
        for group in [[request] for request in requests] if alone else [requests]:
            for seqs in drive(engine, list(map(engine.add, group))):
                for seq in seqs:
                    if not seq.finish_reason and enough and seq.num_output_tokens >= enough:
                        engine.abort(seq.request.id)
                    if seq.finish_reason is FinishReason.ERROR:
                        raise OutriderError(f"{seq.error}; the audit stops; try dtype float32, or fix the model")
                    if seq.finish_reason:
                        tokens[seq.request.id] = tuple(seq.token_ids[len(seq.request.prompt_token_ids) :])
                        self.on_done()
        return Outputs(tokens=tuple(tokens[request.id] for request in requests), stats=engine.stats)


class _TreeRecorder:
    """Wraps a proposer and records whether it drafts trees."""

    def __init__(self, proposer: Proposer) -> None:
        self.needs = proposer.needs
        self.trees = False
        self._proposer = proposer

    def admit(self, slot: int, request: Request) -> None:
        self._proposer.admit(slot, request)

    def propose(self, batch: Batch) -> Draft:
        draft = self._proposer.propose(batch)
        self.trees |= not draft.chain
        return draft

    def commit(self, round: Round) -> None:
        self._proposer.commit(round)

    def release(self, slot: int) -> None:
        self._proposer.release(slot)


def _load(config: EngineConfig, spec: str | Maker) -> tuple[Checkpoint, EngineConfig]:
    """Return the target, and the configuration with which it is prepared.

    Quantized weights in float32 are already quantized, so the target is prepared as one with weights as stored.
    """
    folder = model_folder(config.target)
    refuse_sources(folder, "audit")
    check_draft_settings(config, spec)
    wide = config.bits < FULL_BITS and config.dtype == "float32"
    dtype = "bfloat16" if wide else full_dtype(config.dtype, config.bits)
    checkpoint = load_checkpoint(folder, dtype=dtype, device=config.device, kernels=config.kernels, tp=config.tp)
    if wide:
        return widen(checkpoint, config.bits), replace(config, quantize=None)
    return checkpoint, config


def _context(checkpoint: Checkpoint, prompts: Sequence[Sequence[int]], room: int) -> int:
    """Return the tokens of the longest prompt and `room` more."""
    context = max(map(len, prompts)) + room
    if context > checkpoint.context:
        raise OutriderError(
            f"the longest prompt and {room} more tokens are {context} tokens, and the context of the model is"
            f" {checkpoint.context}; shorten the prompts"
        )
    return context


def widen(checkpoint: Checkpoint, bits: int) -> Checkpoint:
    """Return a model that is quantized as on torch, with the values of the quantized weights in float32."""
    quantize_model(checkpoint.model, bits)
    for module in list(checkpoint.model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, QuantizedLinear):
                plain = torch.nn.Linear(child.shape[1], child.shape[0], bias=child.bias is not None, device="meta")
                plain.weight = torch.nn.Parameter(child.values(), requires_grad=False)
                if child.bias is not None:
                    plain.bias = torch.nn.Parameter(child.bias, requires_grad=False)
                setattr(module, name, plain)
    return checkpoint.with_model(checkpoint.model.float(), torch.float32)


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Return the first position at which two token lists of equal length differ, or None."""
    return next((at for at, (a, b) in enumerate(zip(left, right, strict=True)) if a != b), None)
