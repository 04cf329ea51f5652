"""Small random draft heads of every kind that a format can hold, and the checks that each draft must pass."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from outrider.core import tree
from outrider.core.config import EngineConfig
from outrider.core.params import SamplingParams
from outrider.core.types import Batch, DraftBudget, KVView, Request, Round, Scores, SequenceState
from outrider.drafting.propose.draft_model.trained_head import HeadProposer
from outrider.engine.build import LoadedTarget, build_engine, load_target
from outrider.llm import LLM
from outrider.models.heads.description import (
    AuxStates,
    BlockView,
    Body,
    Centroids,
    Convolution,
    DraftBlock,
    Feedback,
    FuseNorm,
    FusionPoint,
    HeadDescription,
    InputFusion,
    Kind,
    MaskTokens,
    ParallelHeads,
    Recurrence,
    Refiner,
    Rope,
    Scaling,
    Selector,
    SharedKV,
)
from outrider.models.heads.store import HeadModule, make_module, write_head
from outrider.train.model.presets import Sizes, describe

LLAMA3 = Rope(scaling=Scaling.LLAMA3, factor=8.0, original=64, low=1.0, high=4.0)
YARN = Rope(scaling=Scaling.YARN, factor=4.0, original=64, low=1.0, high=32.0, amplitude=1.14)
CPU = torch.device("cpu")
TABLE, HEAD = (torch.randn(96, 64, generator=torch.Generator().manual_seed(i)) for i in (1, 2))  # a target's
FULL, SLIDING = "full_attention", "sliding_attention"
KINDS = (SLIDING, SLIDING, SLIDING, FULL) * 2  # of that target's layers
MASK = 7  # whose row of a table of embeddings is the mask of a draft that fills in blocks
_LAST = AuxStates(layers=(7,), final=True)


@dataclass(frozen=True)
class _Target:
    """The sizes of a target with 8 layers."""

    hidden: int
    vocab: int

    def head(self, kind: Kind, *, body: Mapping[str, Any] | None = None, **fields: Any) -> HeadDescription:
        """Return a head for this target. `body` has what differs from one small decoder layer; None: no such layers."""
        if body is not None:
            layer = Body(layers=1, hidden=self.hidden, heads=4, key_heads=2, dim=16, ffn=2 * self.hidden, epsilon=1e-5)
            fields["body"] = replace(layer, **body)
        return HeadDescription(kind=kind, target_hidden=self.hidden, target_layers=8, vocab=self.vocab, **fields)


def _eagle(target: _Target) -> HeadDescription:
    return target.head(
        Kind.EAGLE,
        aux_states=_LAST,
        input_fusion=InputFusion(at=FusionPoint.PROJECTION, norms=False, bias=True),
        body={"layers": 2, "first_norm": False, "attention_bias": True},
        final_norm=False,
        own_embedding=True,
    )


def _eagle3(
    target: _Target, *, kind: Kind = Kind.EAGLE3, norm: FuseNorm = FuseNorm.NONE, **more: Any
) -> HeadDescription:
    given = {
        "aux_states": AuxStates(layers=(1, 3, 4), fused=True, norm=norm),
        "input_fusion": InputFusion(at=FusionPoint.ATTENTION),
        "body": {},
        "own_lm_head": True,
        **more,
    }
    return target.head(kind, **given)


def _peagle(target: _Target, *, draft_tokens: int = 5, **more: Any) -> HeadDescription:
    masks = MaskTokens(draft_tokens=draft_tokens, token=target.vocab - 3)
    return _eagle3(target, kind=Kind.PEAGLE, masks=masks, **more)


def _mtp(target: _Target, *, fusion: Mapping[str, bool] | None = None, **more: Any) -> HeadDescription:
    input_fusion = InputFusion(at=FusionPoint.PROJECTION, **(fusion or {}))
    given = {"body": {}, "feedback": Feedback.NORMED, "aux_states": _LAST, **more}
    return target.head(Kind.MTP, input_fusion=input_fusion, **given)


def _deepseek(target: _Target, **more: Any) -> HeadDescription:
    return _mtp(target, fusion={"zero_first": True}, feedback=Feedback.RAW, **more)


def _stack(
    target: _Target, *, kind: Kind = Kind.MEDUSA, aux_states: AuxStates = _LAST, draft_vocab: int = 0, **stack: Any
) -> HeadDescription:
    heads = ParallelHeads(**stack)
    own_lm_head = not heads.shared_head
    return target.head(kind, aux_states=aux_states, own_lm_head=own_lm_head, draft_vocab=draft_vocab, stack=heads)


def _block(
    target: _Target, block: DraftBlock, *, kind: Kind = Kind.DFLASH, body: Mapping[str, Any] | None = None, **more: Any
) -> HeadDescription:
    given = {"aux_states": AuxStates(layers=(1, 3, 5), fused=True), **more}
    return target.head(kind, block=block, body={"layers": 3, "head_norms": True} | (body or {}), **given)


def _assistant(target: _Target, *, clusters: bool = False) -> HeadDescription:
    near = SharedKV(layer=6, key_heads=2, dim=16, window=9)
    turned = Rope(scaling=Scaling.PROPORTIONAL, factor=1.0)
    far = SharedKV(layer=7, key_heads=1, dim=32, theta=1e6, rope=turned, rotary=0.25)
    more = {"centroids": Centroids(count=target.vocab // 8, top_k=3)} if clusters else {}
    return target.head(
        Kind.KV_SHARING,
        aux_states=_LAST,
        input_fusion=InputFusion(at=FusionPoint.PROJECTION, norms=False),
        body={"layers": 3, "hidden": 48, "key_heads": 1, "dim": 32, "head_norms": True, "gemma": True},
        shared_kv=(near, near, far),
        own_lm_head=True,
        **more,
    )


_TABLES = {"own_lm_head": True, "own_embedding": True}
_FIVE = AuxStates(layers=(0, 1, 3, 5, 7), fused=True, norm=FuseNorm.WHOLE)
_WIDE = {"layers": 2, "head_norms": True, "attention_bias": True, "output_bias": True, "rope": YARN}
_GATED = {"head_norms": True, "attention_gate": True, "rotary": 0.5, "theta": 1e6}
_FLASH = DraftBlock(size=5)
_ANCHORED = DraftBlock(size=4, sample_from_anchor=True)
_SPARK = replace(_ANCHORED, markov_rank=8, confidence=True)
_REFINER = Refiner(rank=8, ffn=16, passes=6, candidates=512)
_CAUSAL = replace(_FLASH, views=(BlockView(causal=True),) * 3)
_NEAR = BlockView(window=4)
_MIXED = replace(_FLASH, views=(replace(_NEAR, causal=True),) * 2 + (BlockView(),))
_SELECTING = replace(
    _FLASH, convolution=Convolution(taps=2, group=16), selector=Selector(rank=8, candidates=5), views=(_NEAR,) * 3
)
_RECURRENT = replace(_ANCHORED, recurrence=Recurrence(state=24, rank=8, first=1))

# By name: the format, and how the head is made for a target.
_CASES: dict[str, tuple[str, Callable[[_Target], HeadDescription]]] = {
    "eagle3": ("eagle3", _eagle3),
    "eagle3 of some tokens": ("eagle3", partial(_eagle3, draft_vocab=40, norm=FuseNorm.EACH, own_embedding=True)),
    "eagle3 without a norm": ("eagle3", partial(_eagle3, final_norm=False, body={"rope": LLAMA3, "theta": 5e5})),
    "speculators": ("eagle3-speculators", _eagle3),
    "eagle3.1": ("eagle3-speculators", partial(_eagle3, draft_vocab=40, norm=FuseNorm.EACH, feedback=Feedback.NORMED)),
    "five taps": (
        "eagle3-speculators",
        partial(
            _eagle3,
            aux_states=_FIVE,
            input_fusion=InputFusion(at=FusionPoint.ATTENTION, residual_normed=True),
            body=_WIDE,
            own_embedding=True,
        ),
    ),
    "peagle": ("peagle", partial(_peagle, draft_vocab=40, norm=FuseNorm.EACH, body={"layers": 2}, own_embedding=True)),
    "plain peagle": ("peagle", partial(_peagle, norm=FuseNorm.WHOLE)),
    "peagle of speculators": (
        "peagle-speculators",
        partial(_peagle, aux_states=_FIVE, body={"layers": 2}, draft_tokens=3),
    ),
    "eagle": ("eagle", _eagle),
    "medusa": ("medusa", partial(_stack, heads=3, layers=2)),
    "legacy medusa": ("medusa", partial(_stack, heads=3, shared_head=True)),
    "medusa safe": ("medusa-safetensors", partial(_stack, heads=2)),
    "medusa of vllm": ("medusa-vllm", partial(_stack, heads=2, layers=2)),
    "medusa of some tokens": ("medusa-vllm", partial(_stack, heads=2, bias=False, one_head=True, draft_vocab=40)),
    "medusa with the target's head": ("medusa-vllm", partial(_stack, heads=2, shared_head=True)),
    "hydra": ("hydra", partial(_stack, kind=Kind.HYDRA, heads=3, layers=2, head_bias=True)),
    "ungrounded hydra": ("hydra", partial(_stack, aux_states=AuxStates(layers=(5,)), heads=2)),
    "deepseek": ("mtp-deepseek", _deepseek),
    "deepseek with tables": ("mtp-deepseek", partial(_deepseek, body={"head_norms": True}, **_TABLES)),
    "three modules": ("mtp-deepseek", partial(_deepseek, modules=3)),
    "modules with tables": ("mtp-deepseek", partial(_deepseek, modules=2, **_TABLES)),
    "qwen": ("mtp-qwen", partial(_mtp, body={"head_norms": True})),
    "gated qwen": ("mtp-qwen", partial(_mtp, body=_GATED)),
    "mimo": (
        "mtp-mimo",
        partial(
            _mtp,
            aux_states=AuxStates(layers=(7,)),
            fusion={"zero_first": True, "embedding_first": False},
            body={"attention_bias": True},
        ),
    ),
    "mtp of speculators": ("mtp-speculators", _mtp),
    "nemotron": ("mtp-nemotron", partial(_mtp, body={"rotary": 0.0, "gated": False})),
    "assistant": ("gemma4-assistant", _assistant),
    "assistant with centroids": ("gemma4-assistant", partial(_assistant, clusters=True)),
    "dflash": ("dflash", partial(_block, block=_FLASH)),
    "biased dflash": (
        "dflash",
        partial(
            _block,
            block=_FLASH,
            body={"attention_bias": True, "output_bias": True, "rope": YARN},
            aux_states=AuxStates(layers=(0, 7), fused=True),
        ),
    ),
    "dflash of speculators": ("dflash-speculators", partial(_block, block=_FLASH)),
    "narrow dflash": (
        "dflash-speculators",
        partial(_block, block=_FLASH, body={"layers": 1, "hidden": 48}, draft_vocab=40, **_TABLES),
    ),
    "causal dflash": ("dflash", partial(_block, block=_CAUSAL)),
    "dflash with windows": ("dflash", partial(_block, block=_MIXED)),
    "windows of speculators": ("dflash-speculators", partial(_block, block=_MIXED)),
    "dflash2": ("dflash2", partial(_block, kind=Kind.DFLASH2, block=_SELECTING)),
    "dflash2 of speculators": (
        "dflash2-speculators",
        partial(_block, kind=Kind.DFLASH2, block=replace(_SELECTING, views=()), **_TABLES),
    ),
    "domino": ("domino", partial(_block, kind=Kind.DOMINO, block=_RECURRENT)),
    "domino of speculators": (
        "domino-speculators",
        partial(_block, kind=Kind.DOMINO, block=replace(_RECURRENT, sample_from_anchor=False)),
    ),
    "dspark": ("dspark", partial(_block, kind=Kind.DSPARK, block=_SPARK)),
    "dspark with tables": (
        "dspark",
        partial(_block, kind=Kind.DSPARK, block=replace(_SPARK, confidence=False), **_TABLES),
    ),
    "anchored dflash": ("dspark", partial(_block, block=_ANCHORED)),
    "dspark of speculators": (
        "dspark-speculators",
        partial(_block, kind=Kind.DSPARK, block=replace(_SPARK, sample_from_anchor=False), draft_vocab=40),
    ),
    "xpress": ("xpress", partial(_block, kind=Kind.XPRESS, block=replace(_FLASH, refiner=_REFINER))),
    "xpress of speculators": (
        "xpress-speculators",
        partial(
            _block,
            kind=Kind.XPRESS,
            block=replace(_ANCHORED, refiner=replace(_REFINER, passes=3)),
            draft_vocab=40,
            **_TABLES,
        ),
    ),
}


def cases(hidden: int = 64, vocab: int = 96) -> dict[str, tuple[str, HeadDescription]]:
    """Return formats and heads that they can hold, by a name, for a target with 8 layers."""
    target = _Target(hidden=hidden, vocab=vocab)
    return {name: (format, make(target)) for name, (format, make) in _CASES.items()}


def random_draft(description: HeadDescription, *, seed: int = 0, table: torch.Tensor = TABLE) -> HeadModule:
    """A module in which each weight has an effect. `table` is the embedding table of its target."""
    torch.manual_seed(seed)
    module = make_module(description).eval().requires_grad_(False)
    for name, weight in module.named_parameters():
        if name.endswith("norm.weight") or name.startswith("fuse_norm."):
            weight.uniform_(0.5, 1.5)
        else:
            weight.normal_(std=0.2)
    if description.block:
        module.mask.copy_((module.embedding.weight if description.own_embedding else table)[MASK])
    if description.centroids:
        order = module.centroid_head.token_order
        order.copy_(torch.randperm(order.numel()).view(order.shape))
    if description.draft_vocab:
        module.ids.copy_(torch.randperm(description.vocab)[: description.draft_vocab].sort().values)
    return module


def write_random_head(folder: Path, case: str) -> Path:
    """Write the random head of a case in Outrider's own format. Return its folder."""
    _, description = cases()[case]
    write_head(folder, random_draft(description), dtype=torch.float32)
    return folder


def write_new_head(folder: Path, kind: str) -> Path:
    """Write a head of a kind for the embedded target, as its training starts. Return its folder."""
    torch.manual_seed(0)
    description = describe(kind, Sizes(hidden=384, layers=8, vocab=12288, epsilon=1e-5))
    write_head(folder, make_module(description), dtype=torch.float32)
    return folder


def feed(head, description, text, states):
    """Give a head a text and the states [n, layers, H] of its target before each token but the first."""
    request = Request(
        id=0, prompt_token_ids=tuple(text), params=SamplingParams(), seed=0, end_ids=frozenset(), max_tokens=9
    )
    row = SequenceState(request=request, slot=0, token_ids=list(text))
    head.cache.admit(0, request.prompt_token_ids)
    batch = Batch(seqs=(row,), start=(0,), feed=(tuple(text[:-1]),), budget=DraftBudget((0,)))
    width = states.shape[-1]
    head.hidden_states.record(
        Round(
            batch=batch,
            draft=tree.empty(1, CPU),
            scores=Scores(
                logits=torch.zeros(1, 1, 1),
                hidden_states={at: torch.zeros(1, 1, width) for at in description.aux_states.layers},
                feed_hidden_states={at: (states[:, i],) for i, at in enumerate(description.aux_states.layers)},
            ),
            path=((),),
            emitted=((),),
            sampled_logprob=((),),
            failed=(False,),
        )
    )
    return Batch(seqs=(row,), start=(0,), feed=(tuple(text),), budget=DraftBudget((4,)))


def far(ours, theirs):
    """Return the relative difference of logits. Both must have the same tokens at minus infinity."""
    known = ours.isfinite()
    assert torch.equal(known, theirs.isfinite())
    return (ours[known] - theirs[known]).norm() / theirs[known].norm()


PROMPTS = ["def add(a, b):", "x", "The cat sat on the mat and the"]


@cache
def _standing() -> LoadedTarget:
    """The embedded target, loaded once for all drafts of a test module."""
    return load_target(EngineConfig(dtype="float32", device="cpu", max_num_seqs=3, max_model_len=128))


def guessed_by(proposer: str, *, k: int, chunk: int = 512) -> LLM:
    """Return the embedded target with another proposer. The `LLM` of the call before cannot be used any more."""
    config = EngineConfig(proposer=proposer, k=k, verifier="walk", max_num_batched_tokens=chunk)
    return LLM.from_parts(build_engine(_standing(), config))


@cache
def plain_text(temperature: float) -> list[tuple[int, ...]]:
    """Return the outputs of the embedded target for `PROMPTS` without a draft."""
    params = SamplingParams(temperature=temperature, max_tokens=24, seed=5)
    return [each.token_ids for each in guessed_by("none", k=0).generate(PROMPTS, params)]


def check_text(folder, make, *, temperature, k):
    """Check that a draft, used as a chain or a tree, does not change the outputs of the embedded target."""
    wanted = plain_text(temperature)
    llm = guessed_by(f"{'draft' if make is HeadProposer else 'tree'}:{folder}", k=k)
    assert isinstance(llm.parts.proposer, make)
    got = llm.generate(PROMPTS, SamplingParams(temperature=temperature, max_tokens=24, seed=5))
    assert [each.token_ids for each in got] == wanted
    assert sum(each.stats.draft_tokens for each in got)


def make_kv_view(layer, pair):
    """A view of keys and values [2, slots, key heads, entries, D] of one layer."""

    def entries(wanted, slots, begin, end):
        assert wanted == layer
        return tuple(pair[:, slots, :, begin:end])

    return KVView(entries=entries, layer_config={})
