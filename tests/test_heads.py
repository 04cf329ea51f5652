"""Trained drafts: descriptions, modules, the house they live in, and what training must agree with."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
import torch

from outrider import tree
from outrider.build import embedded
from outrider.calibrate import measure_pass
from outrider.errors import OutriderError
from outrider.heads.description import Description, Kind, Recycle, View
from outrider.heads.follow_target import FollowTarget, NativeFollowTarget
from outrider.heads.runners import make_head_target
from outrider.heads.store import make_module, read_head, write_head
from outrider.heads.taps import normed
from outrider.llm import LLM
from outrider.load import load_checkpoint
from outrider.params import SamplingParams
from outrider.propose.heads import HeadProposer, HeadTreeProposer
from outrider.proposers import draft_model
from outrider.target import grow_by_scores, make_target
from outrider.testing import random_tree
from outrider.train.kinds import KINDS, Shape, describe
from outrider.train.unroll import Texts, unrolled
from outrider.types import Batch, Memory, Request, Round, Row, Scores
from tests import tiny
from tests.lessons import spread

VIEW = View(layer=3, key_heads=2, dim=64)
MINI = Shape(hidden=384, layers=8, vocab=12288, epsilon=1e-5, depth=1, view=VIEW)
CPU = torch.device("cpu")
SMALL = Shape(hidden=64, layers=4, vocab=40, epsilon=1e-5, view=replace(VIEW, dim=16))
EVERY = sorted(KINDS)


@pytest.mark.parametrize("kind", EVERY)
def test_a_description_survives_json(kind):
    it = describe(kind, replace(SMALL, draft_vocab=0))
    assert Description.from_json(json.loads(json.dumps(it.to_json()))) == it


@pytest.mark.parametrize("kind", EVERY)
def test_a_draft_survives_the_disk(kind, tmp_path):
    torch.manual_seed(1)
    module = make_module(describe(kind, SMALL))
    write_head(tmp_path / "head", module, dtype=torch.float32)
    again = read_head(tmp_path / "head", dtype=torch.float32, device=CPU)
    assert again.description == module.description
    assert again.state_dict().keys() == module.state_dict().keys()
    assert all(torch.equal(again.state_dict()[name], value) for name, value in module.state_dict().items())


@pytest.mark.parametrize("make", [HeadProposer, HeadTreeProposer])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", EVERY)
def test_the_text_is_the_targets_own(kind, temperature, make, tmp_path):
    torch.manual_seed(1)
    write_head(tmp_path / "head", make_module(describe(kind, MINI)), dtype=torch.float32)
    form = "draft" if make is HeadProposer else "tree"
    params = SamplingParams(temperature=temperature, max_tokens=24, seed=5)
    prompts = ["def add(a, b):", "x", "The cat sat on the mat and the"]
    options = {"dtype": "float32", "rows": 3, "context": 128, "verifier": "walk", "k": 3}
    ours = LLM(proposer=f"{form}:{tmp_path / 'head'}", **options)
    assert isinstance(ours.house.proposer, make)
    theirs = LLM(proposer="none", **options)
    got, wanted = (llm.generate(prompts, params) for llm in (ours, theirs))
    assert [each.tokens for each in got] == [each.tokens for each in wanted]
    assert sum(each.stats.drafted for each in got)


@pytest.mark.parametrize("kind", EVERY)
def test_training_sees_what_the_engine_will(kind):
    """Every step of the unrolled pass, against a draft that goes on one guess after another from the same text."""
    torch.manual_seed(3)
    checkpoint = load_checkpoint(embedded("nano"), dtype="float32", device="cpu")
    target = make_target(checkpoint, slots=1, context=64)
    tables = target.lend()
    depth = 3 if kind in ("medusa", "hydra") else 2 if kind == "onlooker" else 1
    shape = Shape(hidden=128, layers=8, vocab=12288, epsilon=1e-5, depth=depth, view=replace(VIEW, dim=32))
    description = describe(kind, shape)
    module = make_module(description).eval().requires_grad_(False)
    size, count = 9, len(description.taps.layers)
    tokens, taps = torch.randint(0, 12288, (1, size + 1)), torch.randn(1, size, count, 128)
    pair = torch.randn(2, 1, 2, 64, 32)
    tables = replace(tables, memory=Memory(stripes={3: (pair[0], pair[1])}.get, config={}))
    head = make_head_target(module, tables, slots=1, context=64)
    texts = Texts(tokens=tokens, taps=taps, laws=torch.zeros(size, 12288), learn=torch.ones(1, size, dtype=bool))
    texts = replace(texts, shown={3: (pair[0, :, :, :size], pair[1, :, :, :size])})
    if description.taps.final:  # what the engine norms itself, a batch of training holds normed
        texts = replace(texts, taps=torch.cat([taps[:, :, :-1], normed(taps[:, :, -1:], tables)], 2))
    steps = [spread(step.logits, step.learn)[0] for step in unrolled(module, texts, 3)]
    assert len(steps) == 3
    text = tokens[0].tolist()
    for end in range(2, size):  # the text's first `end` tokens are there, and the next three are guessed
        batch = _feed(head, description, text[:end], taps[0, : end - 1])
        found = [head.score(batch, tree.empty(1, CPU)).logits[0, 0]]
        for guesses in range(1, min(3, size - end + 1)):
            chain = tree.chain(torch.tensor([text[end : end + guesses]]), (guesses,))
            found.append(head.score(batch, chain, first=guesses - 1).logits[0, -1])
        for step, logits in enumerate(found):
            column = end - 2  # holds the text's last token
            if column < len(steps[step]):
                assert (logits - steps[step][column]).abs().max() < 1e-3


def _feed(head, description, text, taps):
    """Let a head know of a text: the states [n, taps, H] before each of its tokens but the first."""
    request = Request(id=0, prompt=tuple(text), params=SamplingParams(), seed=0, end_ids=frozenset(), limit=9)
    row = Row(request=request, slot=0, text=list(text))
    head.cache.admit(0, request.prompt)
    batch = Batch(rows=(row,), start=(0,), feed=(tuple(text[:-1]),), budget=(0,))
    width = taps.shape[-1]
    head.note(
        Round(
            batch=batch,
            draft=tree.empty(1, CPU),
            scores=Scores(
                logits=torch.zeros(1, 1, 1),
                features={at: torch.zeros(1, 1, width) for at in description.taps.layers},
                fed={at: (taps[:, i],) for i, at in enumerate(description.taps.layers)},
            ),
            path=((),),
            emitted=((),),
            sampled_logprob=((),),
            failed=(False,),
        )
    )
    return Batch(rows=(row,), start=(0,), feed=(tuple(text),), budget=(4,))


def _eagle1():
    """As EAGLE-1 is: no norms, a biased projection, the target's output layer on the raw output."""
    plain = describe("mtp", MINI)
    return replace(
        plain,
        kind=Kind.EAGLE,
        join=replace(plain.join, norms=False, bias=True, zero_first=True),
        body=replace(plain.body, first_norm=False, head_norms=True, attention_bias=True),
        recycle=Recycle.RAW,
        final_norm=False,
    )


@pytest.mark.skipif(not tiny.compiles(), reason="no C++ compiler here")
@pytest.mark.parametrize("kind", ["eagle3", "eagle31", "mtp", "small vocabulary", "eagle1"])
def test_native_kernels_say_the_same(kind):
    torch.manual_seed(4)
    checkpoint = load_checkpoint(embedded("mini"), dtype="bfloat16", device="cpu")
    tables = make_target(checkpoint, slots=1, context=32, kernels="native").lend()
    if kind == "eagle1":
        description = _eagle1()
    else:
        shape = replace(MINI, draft_vocab=512) if kind == "small vocabulary" else MINI
        description = describe("eagle3" if kind == "small vocabulary" else kind, shape)
    module = make_module(description).to(torch.bfloat16).eval().requires_grad_(False)
    if description.draft_vocab:
        module.ids.copy_(torch.randperm(12288)[:512].sort().values)
    heads = [kind(module, tables, slots=1, context=64) for kind in (FollowTarget, NativeFollowTarget)]
    text, taps = torch.randint(0, 12288, (9,)).tolist(), torch.randn(8, len(description.taps.layers), 384)
    batches = [_feed(head, description, text, taps) for head in heads]
    none, branched = tree.empty(1, CPU), random_tree([5], 12288, random.Random(2))
    ours, theirs = (head.score(batch, none).logits for head, batch in zip(heads, batches, strict=True))
    assert _far(ours, theirs) < 0.03
    first = replace(branched, parent=branched.parent.clamp(max=-1))  # all of them right behind the text
    ours, theirs = (head.score(batch, first, 0).logits for head, batch in zip(heads, batches, strict=True))
    assert _far(ours, theirs) < 0.03
    grown = heads[1].grow(batches[1], 12288)
    assert torch.equal(grown.tokens, grow_by_scores(heads[1], batches[1], 12288).tokens)


def _far(ours, theirs):
    known = ours.isfinite()
    assert torch.equal(known, theirs.isfinite())
    return (ours[known] - theirs[known]).norm() / theirs[known].norm()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "model.safetensors").write_bytes(b"xx"), "cannot be read"),
        (lambda folder: (folder / "config.json").write_text("{}"), "holds no trained draft"),
    ],
)
def test_damaged_files_are_refused(spoil, message, tmp_path):
    write_head(tmp_path / "head", make_module(describe("mtp", SMALL)), dtype=torch.float32)
    spoil(tmp_path / "head")
    with pytest.raises(OutriderError, match=message):
        read_head(tmp_path / "head", dtype=torch.float32, device=CPU)


def test_a_draft_of_another_target_is_refused(tmp_path):
    write_head(tmp_path / "head", make_module(describe("mtp", SMALL)), dtype=torch.float32)
    with pytest.raises(OutriderError, match="was trained on a target with vocabulary 40, width 64 and 4 layers"):
        LLM(proposer=f"draft:{tmp_path / 'head'}", dtype="float32")


@pytest.mark.parametrize("kind", EVERY)
def test_what_its_passes_cost_can_be_measured(kind, tmp_path):
    torch.manual_seed(1)
    write_head(tmp_path / "head", make_module(describe(kind, MINI)), dtype=torch.float32)
    llm = LLM(proposer=f"draft:{tmp_path / 'head'}", k=2, dtype="float32", rows=2, context=64)
    cost = measure_pass(draft_model(llm.house.proposer))
    assert cost(1, rows=1, cached=0) > 0
    params = SamplingParams(temperature=0.0, max_tokens=4)
    assert (
        llm.generate(["x y z"], params)[0].tokens
        == LLM(proposer="none", dtype="float32").generate(["x y z"], params)[0].tokens
    )
