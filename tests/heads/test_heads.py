"""Trained drafts: descriptions, modules, the house they live in, and what training must agree with."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
import torch

from outrider.core import tree
from outrider.core.noise import inverse_cdf
from outrider.core.params import SamplingParams
from outrider.core.types import DrawParams, UniformDraws
from outrider.errors import OutriderError
from outrider.heads.description import AuxStates, Feedback, FuseNorm, HeadDescription, Kind, SharedKV
from outrider.heads.hidden_states import NoCache, normed
from outrider.heads.store import KEY, make_module, read_head, write_head
from outrider.heads.targets.autoregressive import AutoregressiveTarget, NativeAutoregressiveTarget
from outrider.heads.targets.masked import MaskedTarget, NativeMaskedTarget
from outrider.heads.targets.registry import make_head_target
from outrider.llm import LLM
from outrider.loader.checkpoint import load_checkpoint
from outrider.loader.embedded import embedded
from outrider.loader.make import make_target
from outrider.models.base import ChainSampler, draft_by_scores
from outrider.plan.calibrate import measure_pass
from outrider.plan.planner import FixedPlanner
from outrider.propose.draft_model.trained_head import HeadProposer, HeadTreeProposer
from outrider.propose.registry import draft_model
from outrider.testing import random_tree
from outrider.train.loss.steps import Chains
from outrider.train.loss.unroll import Texts, unrolled
from outrider.train.model.presets import KINDS, Sizes, describe
from tests.helpers import tiny
from tests.helpers.heads import PROMPTS, check_text, far, feed, guessed_by, plain_text, shown
from tests.helpers.train_setup import spread

VIEW = SharedKV(layer=3, key_heads=2, dim=64)
MINI = Sizes(hidden=384, layers=8, vocab=12288, epsilon=1e-5, depth=1, view=VIEW)
CPU = torch.device("cpu")
SMALL = Sizes(hidden=64, layers=4, vocab=40, epsilon=1e-5, view=replace(VIEW, dim=16))
SEVERAL = "several modules"
EVERY = [*sorted(KINDS), SEVERAL]


def described(kind, sizes):
    return describe("mtp", replace(sizes, modules=3)) if kind == SEVERAL else describe(kind, sizes)


@pytest.mark.parametrize("kind", EVERY)
def test_a_description_survives_json(kind):
    it = described(kind, replace(SMALL, draft_vocab=0))
    assert HeadDescription.from_json(json.loads(json.dumps(it.to_json()))) == it


@pytest.mark.parametrize("kind", EVERY)
def test_a_draft_survives_the_disk(kind, tmp_path):
    torch.manual_seed(1)
    module = make_module(described(kind, SMALL))
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
    write_head(tmp_path / "head", make_module(described(kind, MINI)), dtype=torch.float32)
    check_text(tmp_path / "head", make, temperature=temperature, k=3)


@pytest.mark.parametrize("make", [HeadProposer, HeadTreeProposer])
@pytest.mark.parametrize("kind", EVERY)
def test_states_do_not_pile_up_while_nobody_drafts(kind, make, tmp_path, monkeypatch):
    """And what is guessed when somebody does is the same."""
    torch.manual_seed(1)
    write_head(tmp_path / "head", make_module(described(kind, MINI)), dtype=torch.float32)
    spec, lives = f"{'draft' if make is HeadProposer else 'tree'}:{tmp_path / 'head'}", []
    for pile in (10**6, 16):
        monkeypatch.setattr("outrider.propose.draft_model.trained_head._PILE", pile)
        monkeypatch.setattr("outrider.propose.draft_model.trained_head._PIECE", 24)
        llm, guesses = guessed_by(spec, k=0, chunk=32), []
        for prompt in (list(range(100, 190)), list(range(300, 305))):
            llm.submit(prompt, SamplingParams(max_tokens=28, ignore_eos=True))
        for _ in range(20):
            llm.engine.step()
        held = max(sum(len(states) for _, states in each) for each in llm.parts.proposer.model._taps._kept.values())
        llm.engine._planner = FixedPlanner(3)
        llm.engine.on_round = lambda round, guesses=guesses: guesses.append(round.draft.host_tokens())
        while llm.engine.busy():
            llm.engine.step()
        lives.append((guesses, held))
    (free, most), (bounded, least) = lives
    assert bounded == free
    assert max(map(len, free[0])) > 0
    assert most == 1 if isinstance(llm.parts.proposer.model.cache, NoCache) else most > 90
    assert least <= 16


@pytest.mark.parametrize("kind", EVERY)
def test_training_sees_what_the_engine_will(kind):
    """Every step of the unrolled pass, against a draft that goes on one guess after another from the same text."""
    torch.manual_seed(3)
    checkpoint = load_checkpoint(embedded("nano"), dtype="float32", device="cpu")
    target = make_target(checkpoint, slots=1, context=64)
    tables = target.share_weights()
    depth = 3 if kind in ("medusa", "hydra") else 2 if kind == "kv-sharing" else 1
    sizes = Sizes(hidden=128, layers=8, vocab=12288, epsilon=1e-5, depth=depth, view=replace(VIEW, dim=32))
    description = described(kind, sizes)
    module = make_module(description).eval().requires_grad_(False)
    size, count = 9, len(description.aux_states.layers)
    tokens, taps = torch.randint(0, 12288, (1, size + 1)), torch.randn(1, size, count, 128)
    pair = torch.randn(2, 1, 2, 64, 32)
    tables = replace(tables, kv_view=shown(3, pair))
    head = make_head_target(module, tables, slots=1, context=64)
    texts = Texts(
        tokens=tokens, aux_states=taps, target_probs=torch.zeros(size, 12288), learn=torch.ones(1, size, dtype=bool)
    )
    texts = replace(texts, shown={3: (pair[0, :, :, :size], pair[1, :, :, :size])})
    if description.aux_states.final:  # what the engine norms itself, a batch of training holds normed
        texts = replace(texts, aux_states=torch.cat([taps[:, :, :-1], normed(taps[:, :, -1:], tables)], 2))
    steps = [spread(step.logits, step.learn)[0] for step in unrolled(module, texts, 3)]
    assert len(steps) == 3
    text = tokens[0].tolist()
    for end in range(2, size):  # the text's first `end` tokens are there, and the next three are guessed
        batch = feed(head, description, text[:end], taps[0, : end - 1])
        found = [head.score(batch, tree.empty(1, CPU)).logits[0, 0]]
        for guesses in range(1, min(3, size - end + 1)):
            chain = tree.chain(torch.tensor([text[end : end + guesses]]), (guesses,))
            found.append(head.score(batch, chain, first=guesses - 1).logits[0, -1])
        for step, logits in enumerate(found):
            column = end - 2  # holds the text's last token
            known = kind != SEVERAL or step < end  # a module with no token of the text knows nothing
            if column < len(steps[step]) and known:
                assert (logits - steps[step][column]).abs().max() < 1e-3


def _eagle1():
    """As EAGLE-1 is: no norms, a biased projection, the target's output layer on the raw output."""
    plain = describe("mtp", MINI)
    return replace(
        plain,
        kind=Kind.EAGLE,
        input_fusion=replace(plain.input_fusion, norms=False, bias=True, zero_first=True),
        body=replace(plain.body, first_norm=False, head_norms=True, attention_bias=True),
        feedback=Feedback.RAW,
        final_norm=False,
    )


def _whole():
    """All that may become of what is tapped: the target's last norm, one norm over all, a bias."""
    plain = describe("eagle3", MINI)
    taps = AuxStates(layers=(1, 7), final=True, norm=FuseNorm.WHOLE, fused=True, bias=True)
    return replace(plain, aux_states=taps)


@pytest.mark.skipif(not tiny.compiles(), reason="no C++ compiler here")
@pytest.mark.parametrize(("dtype", "near"), [(torch.bfloat16, 0.03), (torch.float32, 1e-5)])
@pytest.mark.parametrize("vocab", [0, 512])
@pytest.mark.parametrize("kind", ["eagle3", "eagle31", "peagle", "mtp", "eagle1", "whole"])
def test_native_kernels_say_the_same(kind, vocab, dtype, near):
    torch.manual_seed(4)
    checkpoint = load_checkpoint(embedded("mini"), dtype=str(dtype).removeprefix("torch."), device="cpu")
    tables = make_target(checkpoint, slots=1, context=32, kernels="native").share_weights()
    made = {"eagle1": _eagle1, "whole": _whole}
    description = replace(made[kind]() if kind in made else describe(kind, MINI), draft_vocab=vocab)
    module = make_module(description).to(dtype).eval().requires_grad_(False)
    for weight in module.parameters():
        if weight.dim() == 1:  # norms, which are made as ones
            weight.uniform_(0.5, 1.5)
    if description.draft_vocab:
        module.ids.copy_(torch.randperm(12288)[:512].sort().values)
    runners = (
        (MaskedTarget, NativeMaskedTarget) if description.masks else (AutoregressiveTarget, NativeAutoregressiveTarget)
    )
    heads = [runner(module, tables, slots=1, context=64) for runner in runners]
    text, taps = torch.randint(0, 12288, (9,)).tolist(), torch.randn(8, len(description.aux_states.layers), 384)
    batches = [feed(head, description, text, taps) for head in heads]
    none, branched = tree.empty(1, CPU), random_tree([5], 12288, random.Random(2))
    ours, theirs = (head.score(batch, none).logits for head, batch in zip(heads, batches, strict=True))
    assert far(ours, theirs) < near
    first = replace(branched, parent=branched.parent.clamp(max=-1))  # all of them right behind the text
    ours, theirs = (head.score(batch, first, 0).logits for head, batch in zip(heads, batches, strict=True))
    assert far(ours, theirs) < near
    grown = heads[1].draft_greedy(batches[1], 12288)
    assert torch.equal(grown.tokens, draft_by_scores(heads[1], batches[1], 12288).tokens)
    assert isinstance(heads[1], ChainSampler) == (
        description.masks is None
    )  # behind masks nothing follows what was drawn
    if description.masks:
        return
    uniform = torch.rand(1, max(batches[1].draft_budget), dtype=torch.float64)
    drawn = heads[1].draft_sampled(
        batches[1], 12288, UniformDraws(params=(DrawParams(0.7, 12288, 1.0, 0.0),), uniform=uniform)
    )
    law = (heads[1].score(batches[1], none).logits[:, 0] / 0.7).softmax(-1)
    assert torch.allclose(drawn.q.padded()[:, 0], law, rtol=1e-4, atol=1e-9)
    assert drawn.tokens[:, 0].tolist() == inverse_cdf(law, uniform[:, 0]).tolist()


@pytest.mark.skipif(not tiny.compiles(), reason="no C++ compiler here")
def test_a_draft_with_more_heads_than_the_kernels_take_runs_on_torch():
    checkpoint = load_checkpoint(embedded("mini"), dtype="float32", device="cpu")
    tables = make_target(checkpoint, slots=1, context=32, kernels="native").share_weights()
    plain = describe("mtp", MINI)
    for heads, kernels in ((48, "native"), (64, "torch")):
        description = replace(plain, body=replace(plain.body, heads=heads, key_heads=1, dim=16))
        module = make_module(description).eval().requires_grad_(False)
        head = make_head_target(module, tables, slots=1, context=64)
        assert head.kernels == kernels
        text, taps = torch.randint(0, 12288, (9,)).tolist(), torch.randn(8, len(description.aux_states.layers), 384)
        assert head.score(feed(head, description, text, taps), tree.empty(1, CPU)).logits.isfinite().all()


@pytest.mark.parametrize("kind", EVERY)
def test_a_borrowed_layer_of_few_tokens_is_its_rows(kind):
    torch.manual_seed(5)
    whole, some = (
        make_module(described(kind, replace(SMALL, own_lm_head=False, draft_vocab=vocab, depth=2))) for vocab in (0, 9)
    )
    some.ids.copy_(torch.randperm(40)[:9].sort().values)
    shared = {name: value for name, value in whole.state_dict().items() if name not in ("ids", "markov_out.weight")}
    some.load_state_dict(shared, strict=False)
    tables, states = (torch.randn(40, 64), torch.randn(40, 64)), torch.randn(5, 64)
    for module in (whole, some):
        module.share_weights(*tables)
    assert torch.allclose(some.logits(states), whole.logits(states)[:, some.ids], atol=1e-5)


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_some_places_train_what_all_of_them_would(kind):
    """Guesses after the first, from columns drawn at random, are those of a pass in which all columns go on."""
    torch.manual_seed(6)
    description = describe(kind, SMALL)
    module, layers = make_module(description).requires_grad_(False), len(description.aux_states.layers)
    module.share_weights(torch.randn(40, 64), torch.randn(40, 64))
    learn = torch.arange(15) < torch.tensor([15, 9])[:, None]
    learn[:, :3] = False
    texts = Texts(
        tokens=torch.randint(0, 40, (2, 16)),
        aux_states=torch.randn(2, 15, layers, 64),
        target_probs=torch.rand(int(learn.sum()), 40),
        learn=learn,
    )
    whole = list(unrolled(module, texts, 4))
    torch.manual_seed(7)
    some = list(unrolled(module, texts, 4, later=0.5))
    torch.manual_seed(7)
    chains = Chains.of(learn[:, 1:], 0.5, 14)
    live = torch.zeros(2, 14, dtype=torch.bool)
    live[chains.rows[chains.live], chains.columns[chains.live]] = True
    assert 0 < int(live.sum()) < int(learn[:, 1:].sum())
    assert torch.equal(some[0].logits, whole[0].logits)
    for step, every in zip(some[1:], whole[1:], strict=True):
        assert step.weight == pytest.approx(float(learn[:, 1:].sum() / live.sum()))
        assert torch.equal(step.learn, live & every.learn)
        for name in ("logits", "target"):
            ours, theirs = spread(getattr(step, name), step.learn), spread(getattr(every, name), every.learn)
            assert torch.allclose(ours[step.learn], theirs[step.learn], atol=1e-5)


def _rewrite(folder, name, value):
    config = json.loads((folder / "config.json").read_text())
    config[KEY][name] = value
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "model.safetensors").write_bytes(b"xx"), "cannot be read"),
        (lambda folder: (folder / "config.json").write_text("{}"), "holds no trained draft"),
        (lambda folder: (folder / "config.json").write_text("[" * 100_000), "cannot be read"),
        (lambda folder: _rewrite(folder, "aux_states", {"layers": ["3"], "final": True}), "layers is '3'"),
        (lambda folder: _rewrite(folder, "aux_states", {"layers": [-1, 3]}), "names no layer of the target to read"),
        (lambda folder: _rewrite(folder, "modules", 10**9), "has 1000000000 guesses"),
        (lambda folder: _rewrite(folder, "vocab", 10**15), "has a vocabulary of 1000000000000000 tokens"),
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
def test_what_its_passes_cost_can_be_measured(kind, tmp_path, monkeypatch):
    """And its text is right afterwards."""
    monkeypatch.setattr(
        "outrider.plan.calibrate._SWEEPS", 1
    )  # every shape is read, if not as often as for good figures
    monkeypatch.setattr("outrider.plan.calibrate._REPEATS", 2)
    torch.manual_seed(1)
    write_head(tmp_path / "head", make_module(described(kind, MINI)), dtype=torch.float32)
    wanted = plain_text(0.0)
    llm = guessed_by(f"draft:{tmp_path / 'head'}", k=2)
    cost = measure_pass(draft_model(llm.parts.proposer))
    assert cost(1, rows=1, cached=0) > 0
    found = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=24))
    assert [each.token_ids for each in found] == wanted
