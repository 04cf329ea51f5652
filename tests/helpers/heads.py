"""Small random draft heads of every kind that a format can hold, and the checks that each draft must pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import torch

from outrider.core import tree
from outrider.core.config import EngineConfig
from outrider.core.params import SamplingParams
from outrider.core.types import Batch, KVView, Request, Round, Scores, SequenceState
from outrider.engine.build import LoadedTarget, build_engine, load_target
from outrider.heads.description import (
    AuxStates,
    Body,
    Centroids,
    DraftBlock,
    Feedback,
    FuseNorm,
    FusionPoint,
    HeadDescription,
    InputFusion,
    Kind,
    MaskTokens,
    ParallelHeads,
    Refiner,
    Rope,
    Scaling,
    SharedKV,
)
from outrider.heads.store import HeadModule, make_module
from outrider.llm import LLM
from outrider.propose.draft_model.trained_head import HeadProposer

LLAMA3 = Rope(scaling=Scaling.LLAMA3, factor=8.0, original=64, low=1.0, high=4.0)
YARN = Rope(scaling=Scaling.YARN, factor=4.0, original=64, low=1.0, high=32.0, amplitude=1.14)
CPU = torch.device("cpu")
TABLE, HEAD = (torch.randn(96, 64, generator=torch.Generator().manual_seed(i)) for i in (1, 2))  # a target's
FULL, SLIDING = "full_attention", "sliding_attention"
KINDS = (SLIDING, SLIDING, SLIDING, FULL) * 2  # of that target's layers
MASK = 7  # whose row of a table of embeddings is the mask of a draft that fills in blocks
_LAST = AuxStates(layers=(7,), final=True)


def cases(hidden: int = 64, vocab: int = 96) -> Mapping[str, tuple[str, HeadDescription]]:
    """Return formats and heads that they can hold, by a name, for a target with 8 layers."""
    body = Body(layers=1, hidden=hidden, heads=4, key_heads=2, dim=16, ffn=2 * hidden, epsilon=1e-5)
    common = {"target_hidden": hidden, "target_layers": 8, "vocab": vocab}

    def eagle3(**more):
        aux_states = AuxStates(layers=(1, 3, 4), fused=True, norm=more.pop("norm", FuseNorm.NONE))
        given = {
            "aux_states": aux_states,
            "input_fusion": InputFusion(at=FusionPoint.ATTENTION),
            "body": body,
            "own_lm_head": True,
            **more,
        }
        return HeadDescription(kind=Kind.EAGLE3, **common, **given)

    def peagle(draft_tokens=5, **more):
        return replace(eagle3(**more), kind=Kind.PEAGLE, masks=MaskTokens(draft_tokens=draft_tokens, token=vocab - 3))

    def mtp(**more):
        join = InputFusion(at=FusionPoint.PROJECTION, **more.pop("input_fusion", {}))
        given = {"body": body, "feedback": Feedback.NORMED, "aux_states": _LAST, **more}
        return HeadDescription(kind=Kind.MTP, **common, input_fusion=join, **given)

    def stack(kind=Kind.MEDUSA, aux_states=_LAST, **more):
        own = {"own_lm_head": not more["stack"].shared_head}
        return HeadDescription(kind=kind, **common, aux_states=aux_states, **own, **more)

    eagle = HeadDescription(
        kind=Kind.EAGLE,
        **common,
        aux_states=_LAST,
        input_fusion=InputFusion(at=FusionPoint.PROJECTION, norms=False, bias=True),
        body=replace(body, layers=2, first_norm=False, attention_bias=True),
        final_norm=False,
        own_embedding=True,
    )
    five = AuxStates(layers=(0, 1, 3, 5, 7), fused=True, norm=FuseNorm.WHOLE)
    wide = replace(body, layers=2, head_norms=True, attention_bias=True, output_bias=True, rope=YARN)
    deep = replace(body, layers=2)
    three = replace(body, layers=3, head_norms=True)

    def block(kind=Kind.DFLASH, **more):
        given = {
            "aux_states": AuxStates(layers=(1, 3, 5), fused=True),
            "body": three,
            "block": DraftBlock(size=5),
            **more,
        }
        return HeadDescription(kind=kind, **common, **given)

    spark = DraftBlock(size=4, sample_from_anchor=True, markov_rank=8, confidence=True)
    refiner = Refiner(rank=8, ffn=16, passes=6, candidates=512)
    biased = replace(three, attention_bias=True, output_bias=True, rope=YARN)
    slim = replace(three, layers=1, hidden=48)
    tables = {"own_lm_head": True, "own_embedding": True}
    near = SharedKV(layer=6, key_heads=2, dim=16, window=9)
    turned = Rope(scaling=Scaling.PROPORTIONAL, factor=1.0)
    far = SharedKV(layer=7, key_heads=1, dim=32, theta=1e6, rope=turned, rotary=0.25)
    gemma = HeadDescription(
        kind=Kind.KV_SHARING,
        **common,
        aux_states=_LAST,
        input_fusion=InputFusion(at=FusionPoint.PROJECTION, norms=False),
        body=replace(body, layers=3, hidden=48, key_heads=1, dim=32, head_norms=True, gemma=True),
        shared_kv=(near, near, far),
        own_lm_head=True,
    )
    nemotron = replace(body, rotary=0.0, gated=False)
    gated = replace(body, head_norms=True, attention_gate=True, rotary=0.5, theta=1e6)
    zeroed, raw = {"zero_first": True}, AuxStates(layers=(7,))
    return {
        "eagle3": ("eagle3", eagle3()),
        "eagle3 of some tokens": ("eagle3", eagle3(draft_vocab=40, norm=FuseNorm.EACH, own_embedding=True)),
        "eagle3 without a norm": ("eagle3", eagle3(final_norm=False, body=replace(body, rope=LLAMA3, theta=5e5))),
        "speculators": ("eagle3-speculators", eagle3()),
        "eagle3.1": ("eagle3-speculators", eagle3(draft_vocab=40, norm=FuseNorm.EACH, feedback=Feedback.NORMED)),
        "five taps": (
            "eagle3-speculators",
            eagle3(
                aux_states=five,
                input_fusion=InputFusion(at=FusionPoint.ATTENTION, residual_normed=True),
                body=wide,
                own_embedding=True,
            ),
        ),
        "peagle": ("peagle", peagle(draft_vocab=40, norm=FuseNorm.EACH, body=deep, own_embedding=True)),
        "plain peagle": ("peagle", peagle(norm=FuseNorm.WHOLE)),
        "peagle of speculators": ("peagle-speculators", peagle(aux_states=five, body=deep, draft_tokens=3)),
        "eagle": ("eagle", eagle),
        "medusa": ("medusa", stack(stack=ParallelHeads(heads=3, layers=2))),
        "legacy medusa": ("medusa", stack(stack=ParallelHeads(heads=3, shared_head=True))),
        "medusa safe": ("medusa-safetensors", stack(stack=ParallelHeads(heads=2))),
        "medusa of vllm": ("medusa-vllm", stack(stack=ParallelHeads(heads=2, layers=2))),
        "medusa of some tokens": (
            "medusa-vllm",
            stack(stack=ParallelHeads(heads=2, bias=False, one_head=True), draft_vocab=40),
        ),
        "medusa with the target's head": ("medusa-vllm", stack(stack=ParallelHeads(heads=2, shared_head=True))),
        "hydra": ("hydra", stack(kind=Kind.HYDRA, stack=ParallelHeads(heads=3, layers=2, head_bias=True))),
        "ungrounded hydra": ("hydra", stack(aux_states=AuxStates(layers=(5,)), stack=ParallelHeads(heads=2))),
        "deepseek": ("mtp-deepseek", mtp(input_fusion=zeroed, feedback=Feedback.RAW)),
        "deepseek with tables": (
            "mtp-deepseek",
            mtp(
                input_fusion=zeroed,
                feedback=Feedback.RAW,
                own_lm_head=True,
                own_embedding=True,
                body=replace(body, head_norms=True),
            ),
        ),
        "three modules": ("mtp-deepseek", mtp(input_fusion=zeroed, feedback=Feedback.RAW, modules=3)),
        "modules with tables": (
            "mtp-deepseek",
            mtp(input_fusion=zeroed, feedback=Feedback.RAW, modules=2, own_lm_head=True, own_embedding=True),
        ),
        "qwen": ("mtp-qwen", mtp(body=replace(body, head_norms=True))),
        "gated qwen": ("mtp-qwen", mtp(body=gated)),
        "mimo": (
            "mtp-mimo",
            mtp(
                aux_states=raw,
                input_fusion={**zeroed, "embedding_first": False},
                body=replace(body, attention_bias=True),
            ),
        ),
        "mtp of speculators": ("mtp-speculators", mtp()),
        "nemotron": ("mtp-nemotron", mtp(body=nemotron)),
        "assistant": ("gemma4-assistant", gemma),
        "assistant with centroids": (
            "gemma4-assistant",
            replace(gemma, centroids=Centroids(count=vocab // 8, top_k=3)),
        ),
        "dflash": ("dflash", block()),
        "biased dflash": ("dflash", block(body=biased, aux_states=AuxStates(layers=(0, 7), fused=True))),
        "dflash of speculators": ("dflash-speculators", block()),
        "narrow dflash": ("dflash-speculators", block(body=slim, draft_vocab=40, **tables)),
        "dspark": ("dspark", block(Kind.DSPARK, block=spark)),
        "dspark with tables": ("dspark", block(Kind.DSPARK, block=replace(spark, confidence=False), **tables)),
        "anchored dflash": ("dspark", block(block=DraftBlock(size=4, sample_from_anchor=True))),
        "dspark of speculators": (
            "dspark-speculators",
            block(Kind.DSPARK, block=replace(spark, sample_from_anchor=False), draft_vocab=40),
        ),
        "xpress": ("xpress", block(Kind.XPRESS, block=DraftBlock(size=5, refiner=refiner))),
        "xpress of speculators": (
            "xpress-speculators",
            block(
                Kind.XPRESS,
                block=DraftBlock(size=4, sample_from_anchor=True, refiner=replace(refiner, passes=3)),
                draft_vocab=40,
                **tables,
            ),
        ),
    }


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


def feed(head, description, text, states):
    """Give a head a text and the states [n, layers, H] of its target before each token but the first."""
    request = Request(
        id=0, prompt_token_ids=tuple(text), params=SamplingParams(), seed=0, end_ids=frozenset(), max_tokens=9
    )
    row = SequenceState(request=request, slot=0, token_ids=list(text))
    head.cache.admit(0, request.prompt_token_ids)
    batch = Batch(seqs=(row,), start=(0,), feed=(tuple(text[:-1]),), draft_budget=(0,))
    width = states.shape[-1]
    head.record_states(
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
    return Batch(seqs=(row,), start=(0,), feed=(tuple(text),), draft_budget=(4,))


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
