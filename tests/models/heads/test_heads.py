"""Draft heads of every kind: descriptions, saving and loading, the engine, and its agreement with training."""

import json
import random
from dataclasses import replace

import pytest
import torch

from outrider.core import tree
from outrider.core.draws import DrawParams, Draws
from outrider.core.noise import PositionNoise, inverse_cdf
from outrider.core.params import SamplingParams
from outrider.core.target import ChainSampler, draft_by_scores
from outrider.drafting.plan.calibrate import measure_pass
from outrider.drafting.propose.draft_model.trained_head import HeadProposer, HeadTreeProposer
from outrider.drafting.propose.leaves import draft_model
from outrider.errors import OutriderError
from outrider.llm import LLM
from outrider.models.heads.description import AuxStates, Feedback, FuseNorm, Kind, SharedKV
from outrider.models.heads.hidden_states import NoCache, apply_final_norm
from outrider.models.heads.store import KEY, make_module, read_head, write_head
from outrider.models.heads.targets.autoregressive import AutoregressiveTarget, NativeAutoregressiveTarget
from outrider.models.heads.targets.masked import MaskedTarget, NativeMaskedTarget
from outrider.models.heads.targets.registry import make_head_target
from outrider.models.loader.embedded import embedded
from outrider.models.loader.load import load_checkpoint
from outrider.models.loader.make import make_target
from outrider.testing import random_tree
from outrider.train.loss.steps import Chains
from outrider.train.loss.unroll import TrainingBatch, unrolled
from outrider.train.model.presets import KINDS, Sizes, describe
from tests.helpers import tiny
from tests.helpers.heads import PROMPTS, check_text, far, feed, guessed_by, make_kv_view, plain_text
from tests.helpers.train_setup import scatter
from tests.models.heads.drive_head import make_trainer, measure_tau

VIEW = SharedKV(layer=3, key_heads=2, dim=64)
MINI = Sizes(hidden=384, layers=8, vocab=12288, epsilon=1e-5, depth=1, view=VIEW)
CPU = torch.device("cpu")
SMALL = Sizes(hidden=64, layers=4, vocab=40, epsilon=1e-5, view=replace(VIEW, dim=16))
SEVERAL_MODULES = "several modules"
ALL_KINDS = [*sorted(KINDS), SEVERAL_MODULES]
MAKERS = (HeadProposer, HeadTreeProposer)


def describe_kind(kind, sizes):
    """Return the description of a kind, or of MTP with three modules."""
    return describe("mtp", replace(sizes, modules=3)) if kind == SEVERAL_MODULES else describe(kind, sizes)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_save_and_load(kind, tmp_path):
    torch.manual_seed(1)
    module = make_module(describe_kind(kind, SMALL))
    write_head(tmp_path / "head", module, dtype=torch.float32)
    loaded = read_head(tmp_path / "head", dtype=torch.float32, device=CPU)  # the description is in JSON
    assert loaded.description == module.description
    assert loaded.state_dict().keys() == module.state_dict().keys()
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in module.state_dict().items())


# Each kind as a chain and as a tree, and with both temperatures.
@pytest.mark.fast_cases(
    "dflash-0.0-HeadProposer",
    "dspark-0.0-HeadTreeProposer",
    "eagle31-1.0-HeadProposer",
    "hydra-1.0-HeadTreeProposer",
    "medusa-1.0-HeadProposer",
    "mtp-1.0-HeadTreeProposer",
    "slim-0.0-HeadProposer",
    "xpress-0.0-HeadTreeProposer",
)
@pytest.mark.parametrize(
    ("kind", "temperature", "make"),
    [(kind, float((i + j) % 2), make) for i, kind in enumerate(ALL_KINDS) for j, make in enumerate(MAKERS)],
)
def test_output_equals_plain_decoding(kind, temperature, make, tmp_path):
    torch.manual_seed(1)
    write_head(tmp_path / "head", make_module(describe_kind(kind, MINI)), dtype=torch.float32)
    check_text(tmp_path / "head", make, temperature=temperature, k=3)


@pytest.mark.fast_cases(
    "dflash-HeadProposer", "eagle31-HeadTreeProposer", "medusa-HeadTreeProposer", "slim-HeadProposer"
)
@pytest.mark.parametrize(("kind", "make"), [(kind, MAKERS[i % 2]) for i, kind in enumerate(ALL_KINDS)])
def test_number_of_pending_states_is_bounded(kind, make, tmp_path, monkeypatch):
    """While nothing is drafted, pending states are fed to the head. Later drafts do not depend on that."""
    torch.manual_seed(1)
    write_head(tmp_path / "head", make_module(describe_kind(kind, MINI)), dtype=torch.float32)
    proposer = f"{'draft' if make is HeadProposer else 'tree'}:{tmp_path / 'head'}"
    results = []
    for max_pending in (10**6, 16):
        monkeypatch.setattr("outrider.drafting.propose.draft_model.trained_head.MAX_PENDING", max_pending)
        monkeypatch.setattr("outrider.drafting.propose.draft_model.trained_head.PREFILL_CHUNK", 24)
        llm = guessed_by(proposer, k=0, chunk=32)
        drafts = []
        for prompt in (list(range(100, 190)), list(range(300, 305))):
            llm.submit(prompt, SamplingParams(max_tokens=28, ignore_eos=True))
        for _ in range(20):
            llm.engine.step()
        num_pending = max(map(llm.parts.proposer.model.hidden_states.num_pending, range(2)))
        llm.parts.planner.k = 3
        llm.engine.on_round = lambda round, drafts=drafts: drafts.append(round.draft.host_tokens())
        while llm.engine.busy():
            llm.engine.step()
        results.append((drafts, num_pending))
        if isinstance(llm.parts.proposer.model.cache, NoCache):
            assert llm.parts.proposer.model.cache.bytes() < 90 * MINI.hidden * 4  # the states of 90 tokens
    (unbounded_drafts, unbounded_pending), (bounded_drafts, bounded_pending) = results
    assert bounded_drafts == unbounded_drafts
    assert max(map(len, unbounded_drafts[0])) > 0
    if isinstance(llm.parts.proposer.model.cache, NoCache):
        assert unbounded_pending == 0
    else:
        assert unbounded_pending > 90
    assert bounded_pending <= 16


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_engine_logits_equal_training_logits(kind):
    """Every step of the unrolled training pass equals drafting token by token after the same text."""
    torch.manual_seed(3)
    checkpoint = load_checkpoint(embedded("nano"), dtype="float32", device="cpu")
    target = make_target(checkpoint, slots=1, context=64)
    tables = target.share_weights()
    depth = {"medusa": 3, "hydra": 3, "kv-sharing": 2}.get(kind, 1)
    sizes = Sizes(hidden=128, layers=8, vocab=12288, epsilon=1e-5, depth=depth, view=replace(VIEW, dim=32))
    description = describe_kind(kind, sizes)
    for part in ("refiner", "selector"):  # training scores all tokens
        if description.block and (scorer := getattr(description.block, part)):
            block = replace(description.block, **{part: replace(scorer, candidates=0)})
            description = replace(description, block=block)
    module = make_module(description).eval().requires_grad_(False)
    if kind == "xpress":  # a new refiner corrects nothing
        for weight in (module.refiner.mix, module.refiner.token_out.weight):
            weight.normal_()
    size = 9
    tokens = torch.randint(0, 12288, (1, size + 1))
    aux_states = torch.randn(1, size, len(description.aux_states.layers), 128)
    target_kv = torch.randn(2, 1, 2, 64, 32)
    tables = replace(tables, kv_view=make_kv_view(3, target_kv))
    head = make_head_target(module, tables, slots=1, context=64)
    texts = TrainingBatch(
        tokens=tokens,
        aux_states=aux_states,
        target_probs=torch.zeros(size, 12288),
        loss_mask=torch.ones(1, size, dtype=bool),
        shared_kv={3: (target_kv[0, :, :, :size], target_kv[1, :, :, :size])},
    )
    # Training batches hold the last state after the final norm. The engine applies the norm itself.
    if description.aux_states.final:
        normed_last = apply_final_norm(aux_states[:, :, -1:], tables)
        texts = replace(texts, aux_states=torch.cat([aux_states[:, :, :-1], normed_last], 2))
    training_logits = [scatter(step.logits, step.loss_mask)[0] for step in unrolled(module, texts, 3)]
    assert len(training_logits) == 3
    text = tokens[0].tolist()
    for end in range(2, size):  # the first `end` tokens are committed, and the next three are drafted
        batch = feed(head, description, text[:end], aux_states[0, : end - 1])
        engine_logits = [head.score(batch, tree.empty(1, CPU)).logits[0, 0]]
        for num_drafted in range(1, min(3, size - end + 1)):
            chain = tree.chain(torch.tensor([text[end : end + num_drafted]]), (num_drafted,))
            engine_logits.append(head.score(batch, chain, first=num_drafted - 1).logits[0, -1])
        column = end - 2  # of the last committed token
        for step, logits in enumerate(engine_logits):
            # The prediction of a module is arbitrary if the text has fewer tokens than modules.
            is_defined = kind != SEVERAL_MODULES or step < end
            if column < len(training_logits[step]) and is_defined:
                assert (logits - training_logits[step][column]).abs().max() < 1e-3


def _eagle1():
    """Return an EAGLE-1 head: no norms, a projection with a bias, and the target's LM head on the raw output."""
    plain = describe("mtp", MINI)
    return replace(
        plain,
        kind=Kind.EAGLE,
        input_fusion=replace(plain.input_fusion, norms=False, bias=True, zero_first=True),
        body=replace(plain.body, first_norm=False, head_norms=True, attention_bias=True),
        feedback=Feedback.RAW,
        final_norm=False,
    )


def _all_fusion_options():
    """Return a head with all options of the fusion: the target's final norm, one norm over all states, and a bias."""
    aux_states = AuxStates(layers=(1, 7), final=True, norm=FuseNorm.WHOLE, fused=True, bias=True)
    return replace(describe("eagle3", MINI), aux_states=aux_states)


@pytest.mark.fast_cases(
    "eagle3-0-bfloat16-0.03",
    "eagle31-512-float32-1e-05",
    "peagle-0-float32-1e-05",
    "mtp-0-bfloat16-0.03",
    "eagle1-512-float32-1e-05",
    "all fusion options-0-float32-1e-05",
)
@pytest.mark.skipif(not tiny.compiles(), reason="no C++ compiler here")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.03), (torch.float32, 1e-5)])
@pytest.mark.parametrize("vocab", [0, 512])
@pytest.mark.parametrize("kind", ["eagle3", "eagle31", "peagle", "mtp", "eagle1", "all fusion options"])
def test_native_kernels_agree_with_torch(kind, vocab, dtype, tolerance):
    torch.manual_seed(4)
    checkpoint = load_checkpoint(embedded("mini"), dtype=str(dtype).removeprefix("torch."), device="cpu")
    tables = make_target(checkpoint, slots=1, context=32, kernels="native").share_weights()
    special = {"eagle1": _eagle1, "all fusion options": _all_fusion_options}
    description = special[kind]() if kind in special else describe(kind, MINI)
    description = replace(description, draft_vocab=vocab)
    module = make_module(description).to(dtype).eval().requires_grad_(False)
    for weight in module.parameters():
        if weight.dim() == 1:  # norms, which are initialized with ones
            weight.uniform_(0.5, 1.5)
    if description.draft_vocab:
        module.ids.copy_(torch.randperm(12288)[:512].sort().values)
    if description.masks:
        classes = (MaskedTarget, NativeMaskedTarget)
    else:
        classes = (AutoregressiveTarget, NativeAutoregressiveTarget)
    heads = [head_class(module, tables, slots=1, context=64) for head_class in classes]
    text = torch.randint(0, 12288, (9,)).tolist()
    aux_states = torch.randn(8, len(description.aux_states.layers), 384)
    batches = [feed(head, description, text, aux_states) for head in heads]
    empty = tree.empty(1, CPU)
    torch_logits, native_logits = (head.score(batch, empty).logits for head, batch in zip(heads, batches, strict=True))
    assert far(torch_logits, native_logits) < tolerance
    draft = random_tree([5], 12288, random.Random(2))
    siblings = replace(draft, parent=draft.parent.clamp(max=-1))  # all nodes follow the last committed token
    torch_logits, native_logits = (
        head.score(batch, siblings, 0).logits for head, batch in zip(heads, batches, strict=True)
    )
    assert far(torch_logits, native_logits) < tolerance
    native_head = heads[1]
    native_batch = batches[1]
    greedy = native_head.draft_greedy(native_batch, 12288)
    assert torch.equal(greedy.tokens, draft_by_scores(native_head, native_batch, 12288).tokens)
    # With mask tokens, draft tokens do not depend on the sampled ones before them, so the kernels do not sample chains.
    assert isinstance(native_head, ChainSampler) == (description.masks is None)
    if description.masks:
        return
    uniform = torch.rand(1, max(native_batch.draft_budget), dtype=torch.float64)
    draws = Draws(params=(DrawParams(0.7, 12288, 1.0, 0.0),), uniform=uniform)
    sampled = native_head.draft_sampled(native_batch, 12288, draws)
    probs = (native_head.score(native_batch, empty).logits[:, 0] / 0.7).softmax(-1)
    assert torch.allclose(sampled.q.padded()[:, 0], probs, rtol=1e-4, atol=1e-9)
    assert sampled.tokens[:, 0].tolist() == inverse_cdf(probs, uniform[:, 0]).tolist()
    noise = PositionNoise(torch.tensor([5]), torch.tensor([9]))
    keys = noise.race_keys(torch.arange(max(native_batch.draft_budget))[None])
    raced = native_head.draft_sampled(native_batch, 12288, replace(draws, uniform=None, race_keys=keys))
    assert raced.tokens[:, 0].tolist() == noise.sample_race(probs, torch.zeros(1, dtype=torch.int64)).tolist()


@pytest.mark.slow
def test_training_of_medusa_lowers_the_loss_and_raises_acceptance(nano):
    target, prompts, _ = nano
    description = describe("medusa", Sizes(hidden=128, layers=2, vocab=12288, epsilon=1e-5, depth=3))
    trainer, texts = make_trainer(nano, description, steps=3)
    module = trainer.trainee.module
    tau_before = measure_tau(module, target, prompts)
    stats = [trainer.train([texts], progress=step / 20) for step in range(20)]
    assert stats[-1].loss < 0.9 * stats[0].loss
    assert measure_tau(module, target, prompts) > tau_before + 0.2


@pytest.mark.skipif(not tiny.compiles(), reason="no C++ compiler here")
def test_head_that_the_kernels_do_not_support_runs_on_torch():
    checkpoint = load_checkpoint(embedded("mini"), dtype="float32", device="cpu")
    tables = make_target(checkpoint, slots=1, context=32, kernels="native").share_weights()
    plain = describe("mtp", MINI)
    for num_heads, kernels in ((48, "native"), (64, "torch")):
        description = replace(plain, body=replace(plain.body, heads=num_heads, key_heads=1, dim=16))
        module = make_module(description).eval().requires_grad_(False)
        head = make_head_target(module, tables, slots=1, context=64)
        assert head.kernels == kernels
        text = torch.randint(0, 12288, (9,)).tolist()
        aux_states = torch.randn(8, len(description.aux_states.layers), 384)
        batch = feed(head, description, text, aux_states)
        assert head.score(batch, tree.empty(1, CPU)).logits.isfinite().all()


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_reduced_vocabulary_uses_rows_of_the_targets_lm_head(kind):
    torch.manual_seed(5)
    full, reduced = (
        make_module(describe_kind(kind, replace(SMALL, own_lm_head=False, draft_vocab=draft_vocab, depth=2)))
        for draft_vocab in (0, 9)
    )
    reduced.ids.copy_(torch.randperm(40)[:9].sort().values)
    other_shapes = ("ids", "markov_out.weight", "refiner.token_out.weight", "selector.after")
    other_shapes += ("recurrence.token_out.weight",)
    weights = {name: value for name, value in full.state_dict().items() if name not in other_shapes}
    reduced.load_state_dict(weights, strict=False)
    embedding = torch.randn(40, 64)
    lm_head = torch.randn(40, 64)
    states = torch.randn(5, 64)
    for module in (full, reduced):
        module.share_weights(embedding, lm_head)
    assert torch.allclose(reduced.logits(states), full.logits(states)[:, reduced.ids], atol=1e-5)


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_sampled_columns_give_the_logits_of_a_full_pass(kind):
    """Later steps may continue from random columns only. Their logits equal those of a pass over all columns."""
    torch.manual_seed(6)
    description = describe(kind, SMALL)
    module = make_module(description).requires_grad_(False)
    module.share_weights(torch.randn(40, 64), torch.randn(40, 64))
    loss_mask = torch.arange(15) < torch.tensor([15, 9])[:, None]
    loss_mask[:, :3] = False
    texts = TrainingBatch(
        tokens=torch.randint(0, 40, (2, 16)),
        aux_states=torch.randn(2, 15, len(description.aux_states.layers), 64),
        target_probs=torch.rand(int(loss_mask.sum()), 40),
        loss_mask=loss_mask,
    )
    all_steps = list(unrolled(module, texts, 4))
    torch.manual_seed(7)
    sampled_steps = list(unrolled(module, texts, 4, later=0.5))
    torch.manual_seed(7)
    chains = Chains.of(loss_mask[:, 1:], 0.5, 14)
    is_sampled = torch.zeros(2, 14, dtype=torch.bool)
    is_sampled[chains.rows[chains.valid], chains.columns[chains.valid]] = True
    assert 0 < int(is_sampled.sum()) < int(loss_mask[:, 1:].sum())
    assert torch.equal(sampled_steps[0].logits, all_steps[0].logits)
    for step, full_step in zip(sampled_steps[1:], all_steps[1:], strict=True):
        assert step.weight == pytest.approx(float(loss_mask[:, 1:].sum() / is_sampled.sum()))
        assert torch.equal(step.loss_mask, is_sampled & full_step.loss_mask)
        for name in ("logits", "target"):
            values = scatter(getattr(step, name), step.loss_mask)
            full_values = scatter(getattr(full_step, name), full_step.loss_mask)
            assert torch.allclose(values[step.loss_mask], full_values[step.loss_mask], atol=1e-5)


def _set_field(folder, name, value):
    config = json.loads((folder / "config.json").read_text())
    config[KEY][name] = value
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "model.safetensors").write_bytes(b"xx"), "cannot be read"),
        (lambda folder: (folder / "config.json").write_text("{}"), "holds no draft head in a known format"),
        (lambda folder: (folder / "config.json").write_text("[" * 100_000), "cannot be read"),
        (lambda folder: _set_field(folder, "aux_states", {"layers": ["3"], "final": True}), "layers is '3'"),
        (lambda folder: _set_field(folder, "aux_states", {"layers": [-1, 3]}), "states of no valid target layer"),
        (lambda folder: _set_field(folder, "modules", 10**9), "predicts 1000000000 draft tokens"),
        (lambda folder: _set_field(folder, "vocab", 10**15), "vocabulary has 1000000000000000 tokens"),
    ],
)
def test_damaged_files_are_rejected(damage, message, tmp_path):
    write_head(tmp_path / "head", make_module(describe("mtp", SMALL)), dtype=torch.float32)
    damage(tmp_path / "head")
    with pytest.raises(OutriderError, match=message):
        read_head(tmp_path / "head", dtype=torch.float32, device=CPU)


def test_head_of_another_target_is_rejected(tmp_path):
    write_head(tmp_path / "head", make_module(describe("mtp", SMALL)), dtype=torch.float32)
    with pytest.raises(OutriderError, match="was trained on a target with vocabulary 40, width 64 and 4 layers"):
        LLM(proposer=f"draft:{tmp_path / 'head'}", dtype="float32")


@pytest.mark.fast_cases("dflash", "kv-sharing")
@pytest.mark.parametrize("kind", ["dflash", "eagle3", "hydra", "kv-sharing", "peagle", SEVERAL_MODULES])
def test_pass_times_can_be_measured(kind, tmp_path, monkeypatch):
    """The output after the measurement is that of plain decoding."""
    # One sweep measures every shape, though not precisely.
    monkeypatch.setattr("outrider.drafting.plan.calibrate.PASSES", 1)
    torch.manual_seed(1)
    write_head(tmp_path / "head", make_module(describe_kind(kind, MINI)), dtype=torch.float32)
    expected = plain_text(0.0)
    llm = guessed_by(f"draft:{tmp_path / 'head'}", k=2)
    cost = measure_pass(draft_model(llm.parts.proposer))
    assert cost(1, seqs=1, cached=0) > 0
    completions = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=24))
    assert [completion.token_ids for completion in completions] == expected
