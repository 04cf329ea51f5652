"""The pair of models that the cells measure: a small trained one, inflated to the dimensions of a large one.

The models generate the text of the small pair at the cost of Llama 3 8B and 1B. Their weights are made on the device,
without files.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from catalog import Group
from inflate.files import inflate_to
from inflate.model import PRESETS, Dims

from outrider import LLM, SamplingParams
from outrider.core import tree
from outrider.core.config import NEVER, EngineConfig
from outrider.core.planner import FixedPlanner
from outrider.core.prompts import read_prompts
from outrider.core.proposer import ProposerSetup
from outrider.core.target import Target
from outrider.core.types import Batch, Draft, DraftBudget, Request, SequenceState
from outrider.drafting.propose.draft_model.chain import DraftModelProposer
from outrider.engine.build import build_engine, prepare_target
from outrider.engine.verifiers import fitting_verifiers
from outrider.lab.common.jobs import Job, encode_prompt
from outrider.lab.common.timeline import run_jobs
from outrider.lab.common.turns import with_planner
from outrider.models.loader.facts import end_ids
from outrider.models.loader.fill import OWN_ATTENTION, fill_model
from outrider.models.loader.make import make_target
from outrider.models.loader.tokenizer import read_tokenizer
from outrider.models.torch.checkpoint import Checkpoint, LazyModel
from outrider.models.torch.weights import Weights

_DRAFT = "draft:inflated"  # the name of the proposer
_CHUNK = 512  # prompt tokens of a pass, as in the engine
_REPEATS = {"cuda": 20, "cpu": 3}  # passes that are timed together, by device
_WARM = 512  # tokens up to which passes are recorded ahead


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The sizes of the models and of what is measured."""

    dims: tuple[Dims, Dims]  # of target and draft
    slots: int  # sequences of the engine at once
    context: int  # tokens of a sequence, if each has memory for all of them
    cached: tuple[int, ...]  # tokens before the timed passes
    prompt: int  # tokens of a random prompt
    output: int  # tokens that follow it


_LLAMA = tuple(replace(PRESETS[name], vocab=128256, untie=True) for name in ("8b", "1b"))
SCALES = {
    "8b": Scale(dims=(_LLAMA[0], _LLAMA[1]), slots=64, context=1344, cached=(256, 2048, 8192), prompt=1024, output=256),
    "tiny": Scale(dims=(Dims(), Dims()), slots=3, context=256, cached=(64, 128), prompt=32, output=8),
}


class _Made(Weights):
    """Weights in memory."""

    def __init__(self, path: Path, values: dict[str, torch.Tensor]) -> None:
        self.path = path
        self._values = values

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def shape(self, name: str) -> torch.Size:
        return self._values[name].shape

    def nbytes(self, name: str) -> int:
        return self._values[name].nbytes


class Inflated:
    """The weights of one model on a device. Several models can use them."""

    def __init__(self, source: Path, dims: Dims, *, context: int, dtype: torch.dtype, device: torch.device) -> None:
        self.config, weights = inflate_to(device, source, dims, dtype=dtype)
        self.config.max_position_embeddings = context
        self._source = source
        self._weights = _Made(source, weights)
        self._device = device
        self._dtype = dtype

    def model(self, **attention: str) -> Any:
        """Return a new model of transformers with these weights. `attention` is Outrider's if it is not given."""
        made = fill_model(self.config, self._weights, self._dtype, attention or OWN_ATTENTION)
        return made.to(self._device).requires_grad_(False)

    def checkpoint(self) -> Checkpoint:
        """Return a checkpoint with a new model, as the loader returns it."""
        tokenizer = read_tokenizer(self._source)
        return Checkpoint(
            lazy_model=LazyModel.of(self.model()),
            config=self.config,
            tokenizer=tokenizer,
            context=self.config.max_position_embeddings,
            vocab=self.config.vocab_size,
            end_ids=end_ids(self._source, self.config, tokenizer),
            recurrent=False,
            dtype=self._dtype,
            folder=str(self._source),
            device=self._device,
        )

    def embedding_bytes(self) -> int:
        """Return the bytes of an embedding that is only looked up, and not multiplied."""
        return 0 if self.config.tie_word_embeddings else self._weights.nbytes("model.embed_tokens.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What a run was started with."""

    small: tuple[Path, Path]  # trained target and draft
    like: str
    device: torch.device
    dtype: torch.dtype
    prompts: Path | None
    max_tokens: int
    k: int = 4


class Pair:
    """The weights of target and draft."""

    def __init__(self, inputs: Inputs) -> None:
        """Make them.

        Raises:
            OutriderError: the small models cannot be inflated.
        """
        began = perf_counter()
        self.scale = SCALES[inputs.like]
        self.longest = max(self.scale.context, max(self.scale.cached) + 2 * _CHUNK)  # tokens of a sequence
        self.target, self.draft = (
            Inflated(source, dims, context=self.longest, dtype=inputs.dtype, device=inputs.device)
            for source, dims in zip(inputs.small, self.scale.dims, strict=True)
        )
        synchronize(inputs.device)
        self.seconds = perf_counter() - began


@dataclass(slots=True, kw_only=True)
class Setup:
    """An engine of the pair on some kernels, and what the cells need besides."""

    inputs: Inputs
    pair: Pair
    group: Group
    llm: LLM
    jobs: tuple[Job, ...]
    compiled: bool = False  # whether the layers are compiled
    seconds: dict[str, float] = field(default_factory=dict)  # of the start

    def engine(self, k: int) -> LLM:
        """Return an engine with k draft tokens per round. k = 0 is plain decoding."""
        return with_planner(self.llm, FixedPlanner(k), plain=not k)

    @property
    def models(self) -> tuple[Target, Target]:
        """The target and the draft model."""
        proposer = self.llm.parts.proposer
        assert isinstance(proposer, DraftModelProposer)
        return self.llm.parts.target, proposer.model

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a pass of the target reads."""
        return self.llm.parts.target.bytes() - self.pair.target.embedding_bytes()

    def long_target(self) -> Target:
        """Return a target with the same weights for few long sequences."""
        if self.group.paged:
            return self.llm.parts.target
        config = _config(self.inputs, self.group, slots=2, context=self.pair.longest)
        target = prepare_target(self.pair.target.checkpoint(), config).model
        target.cache.set_prefix_caching(False)
        return target


def set_up(inputs: Inputs, pair: Pair, group: Group) -> Setup:
    """Make the engine of a group.

    Raises:
        OutriderError: the kernels refuse the models or the settings.
    """
    began = perf_counter()
    context = pair.longest if group.paged else pair.scale.context
    config = _config(inputs, group, slots=pair.scale.slots, context=context)

    def draft(setup: ProposerSetup) -> DraftModelProposer:
        checkpoint = pair.draft.checkpoint()
        model = make_target(checkpoint, slots=setup.slots, context=setup.context, kernels=setup.kernels)
        return DraftModelProposer(setup, model)

    config = replace(config, proposer=draft, verifier="block")
    parts = build_engine(prepare_target(pair.target.checkpoint(), config), config, planner=FixedPlanner(0))
    verifiers = fitting_verifiers(_DRAFT, parts.verifier.draw)
    llm = LLM.from_parts(replace(parts, proposer_spec=_DRAFT, proposers=(_DRAFT,), verifiers=verifiers))
    setup = Setup(inputs=inputs, pair=pair, group=group, llm=llm, jobs=_jobs(llm, inputs.prompts, inputs.max_tokens))
    setup.seconds = {"weights": pair.seconds, "engine": perf_counter() - began}
    return setup


def _config(inputs: Inputs, group: Group, *, slots: int, context: int) -> EngineConfig:
    # On a CPU use torch rather than the native kernels, because a GPU uses torch.
    on_torch = inputs.device.type == "cpu" and group.kernels == "graphs"
    return EngineConfig(
        kernels="torch" if on_torch else group.kernels,
        quantize=group.quantize,
        dtype=str(inputs.dtype).removeprefix("torch."),
        device=str(inputs.device),
        max_num_seqs=slots,
        max_model_len=context,
        prefix_caching=False,
        check=NEVER,
    )


def _jobs(llm: LLM, file: Path | None, max_tokens: int) -> tuple[Job, ...]:
    prompts = read_prompts(file, limit=None if file else 1)
    token_lists = [encode_prompt(llm, prompt) for prompt in prompts]
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return tuple(Job(prompt=tokens[max_tokens - llm.parts.context :], params=params) for tokens in token_lists)


def loaded(setup: Setup) -> dict[str, Any]:
    """Return the seconds that it took to make the models, and their bytes."""
    return {
        "seconds": setup.seconds,
        "models": {
            name: {"kernels": model.kernels, "weight_bytes": model.bytes(), "cache_bytes": model.cache.bytes()}
            for name, model in zip(("target", "draft"), setup.models, strict=True)
        },
        "pass_bytes": setup.weight_bytes,
        "prompts": len(setup.jobs),
    }


def first_token(setup: Setup) -> dict[str, float]:
    """Return the times to the first token of the first prompts, and of the same prompts later."""
    return {"cold_ms": _first_token_ms(setup), "warm_ms": _first_token_ms(setup)}


def compile_layers(setup: Setup) -> dict[str, Any]:
    """Compile the layers, and record the passes of short texts. Return the seconds."""
    parts = setup.llm.parts
    began = perf_counter()
    models = {}
    for name, model in zip(("target", "draft"), setup.models, strict=True):
        graphs = getattr(model, "graphs", None)
        if not hasattr(graphs, "warm"):
            continue
        is_target = name == "target"
        graphs.warm(
            rows=1,
            length=min(_WARM, model.context),
            columns=(1, 1 + setup.inputs.k) if is_target else (1, 2),
            steps=() if is_target else (setup.inputs.k,),
            vocab=parts.vocab if parts.vocab < model.vocab else 0,
            compiled=True,
            exact=False,
        )
        models[name] = {"seconds": graphs.seconds, "recorded": len(graphs.buckets()), "compiled": graphs.compiled}
        setup.compiled = bool(graphs.compiled)
    return {"seconds": perf_counter() - began, "models": models}


def _first_token_ms(setup: Setup) -> float:
    """Return the median time from the request to the first token, over the prompts."""
    llm = setup.engine(setup.inputs.k)
    seconds = []
    for job in setup.jobs:
        began = perf_counter()
        run_jobs(llm, [job.shortened(1)])
        seconds.append(perf_counter() - began)
    return 1e3 * median(seconds)


@contextmanager
def cached_batch(model: Target, cached: int, budget: int = 0) -> Iterator[Batch]:
    """Yield a batch of one sequence in slot 0, with `cached` tokens in the cache and one token to feed."""
    tokens = [3 + i % 100 for i in range(cached + 1)]
    request = Request(
        id=0, prompt_token_ids=tuple(tokens[:-1]), params=SamplingParams(), seed=0, end_ids=frozenset(), max_tokens=1
    )
    seq = SequenceState(request=request, slot=0, token_ids=tokens)
    model.cache.admit(0, tokens)
    no_draft = tree.empty(1, model.device)
    with torch.inference_mode():
        for start in range(0, cached, _CHUNK):
            feed = tuple(tokens[start : min(start + _CHUNK, cached)])
            prefill = Batch(seqs=(seq,), start=(start,), feed=(feed,), budget=DraftBudget((0,)))
            model.cache.commit(tree.prefill_round(prefill, no_draft, model.score(prefill, no_draft)))
    try:
        yield Batch(seqs=(seq,), start=(cached,), feed=(tuple(tokens[-1:]),), budget=DraftBudget((budget,)))
    finally:
        model.cache.release(0)


def draft_of(count: int, device: torch.device) -> Draft:
    """Return a chain of `count` draft tokens for one sequence."""
    return tree.chain(torch.ones(1, count, dtype=torch.int64, device=device), (count,))


@torch.inference_mode()
def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one call of `run`, the mean of several calls without a wait between them."""
    repeats = _REPEATS[device.type]
    for _ in range(3):
        run()  # to warm up
    synchronize(device)
    began = perf_counter()
    for _ in range(repeats):
        run()
    synchronize(device)
    return (perf_counter() - began) / repeats


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
