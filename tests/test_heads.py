"""Trained drafts: descriptions, modules, the house they live in, and what training must agree with."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from outrider import tree
from outrider.build import embedded
from outrider.errors import OutriderError
from outrider.heads.description import Description
from outrider.heads.store import make_module, read_head, write_head
from outrider.heads.target import make_head_target
from outrider.llm import LLM
from outrider.load import load_checkpoint
from outrider.params import SamplingParams
from outrider.propose.heads import HeadProposer, HeadTreeProposer
from outrider.target import make_target
from outrider.train.kinds import KINDS, Shape, describe
from outrider.train.unroll import Texts, unrolled
from outrider.types import Batch, Request, Round, Row, Scores

MINI = Shape(hidden=384, layers=8, vocab=12288, epsilon=1e-5, depth=1)
SMALL = Shape(hidden=64, layers=4, vocab=40, epsilon=1e-5)
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
    again = read_head(tmp_path / "head", dtype=torch.float32, device=torch.device("cpu"))
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
    shape = Shape(hidden=128, layers=8, vocab=12288, epsilon=1e-5, depth=3 if kind in ("medusa", "hydra") else 1)
    description = describe(kind, shape)
    module = make_module(description).eval().requires_grad_(False)
    size, count = 9, len(description.taps.layers)
    tokens, taps = torch.randint(0, 12288, (1, size + 1)), torch.randn(1, size, count, 128)
    head = make_head_target(module, tables, slots=1, context=64)
    texts = Texts(tokens=tokens, taps=taps, laws=torch.zeros(1, size, 12288), learn=torch.ones(1, size, dtype=bool))
    if description.taps.final:  # what the engine norms itself, a batch of training holds normed
        from outrider.heads.target import normed

        texts = replace(texts, taps=torch.cat([taps[:, :, :-1], normed(taps[:, :, -1:], tables)], 2))
    steps = [step.logits[0] for step in unrolled(module, texts, 3)]
    assert len(steps) == 3
    text = tokens[0].tolist()
    for end in range(2, size):  # the text's first `end` tokens are there, and the next three are guessed
        request = Request(id=0, prompt=tuple(text[:end]), params=SamplingParams(), seed=0, end_ids=frozenset(), limit=9)
        row = Row(request=request, slot=0, text=text[:end])
        head.cache.admit(0, request.prompt)
        seen = {at: (taps[0, : end - 1, i],) for i, at in enumerate(description.taps.layers)}
        nodes = {at: torch.zeros(1, 1, 128) for at in description.taps.layers}
        feeding = Batch(rows=(row,), start=(0,), feed=(tuple(text[: end - 1]),), budget=(0,))
        head.note(
            Round(
                batch=feeding,
                draft=tree.empty(1, torch.device("cpu")),
                scores=Scores(logits=torch.zeros(1, 1, 1), features=nodes, fed=seen),
                path=((),),
                emitted=((),),
                sampled_logprob=((),),
                failed=(False,),
            )
        )
        batch = Batch(rows=(row,), start=(0,), feed=(tuple(text[:end]),), budget=(3,))
        found = [head.score(batch, tree.empty(1, torch.device("cpu"))).logits[0, 0]]
        for guesses in range(1, min(3, size - end + 1)):
            chain = tree.chain(torch.tensor([text[end : end + guesses]]), (guesses,))
            found.append(head.score(batch, chain, first=guesses - 1).logits[0, -1])
        for step, logits in enumerate(found):
            column = end - 2  # holds the text's last token
            if column < len(steps[step]):
                assert (logits - steps[step][column]).abs().max() < 1e-3


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
        read_head(tmp_path / "head", dtype=torch.float32, device=torch.device("cpu"))


def test_a_draft_of_another_target_is_refused(tmp_path):
    write_head(tmp_path / "head", make_module(describe("mtp", SMALL)), dtype=torch.float32)
    with pytest.raises(OutriderError, match="was trained on a target with vocabulary 40, width 64 and 4 layers"):
        LLM(proposer=f"draft:{tmp_path / 'head'}", dtype="float32")
