"""Draft heads that fill in a block in one pass: descriptions, modules, engine against training, and training."""

import json
import random
from dataclasses import replace

import pytest
import torch

from outrider.core import tree
from outrider.core.params import SamplingParams
from outrider.core.types import Batch, DraftBudget, Draw
from outrider.drafting.propose.draft_model import chain as chain_module
from outrider.drafting.propose.draft_model.confidence import Confidence
from outrider.drafting.propose.draft_model.trained_head import HeadProposer, HeadTreeProposer
from outrider.errors import OutriderError
from outrider.models.heads.description import (
    AuxStates,
    BlockView,
    Convolution,
    DraftBlock,
    FuseNorm,
    HeadDescription,
    Recurrence,
    Refiner,
    Selector,
)
from outrider.models.heads.store import make_module, read_head, write_head
from outrider.models.heads.targets.block import BlockTarget
from outrider.models.heads.targets.registry import make_head_target
from outrider.testing import ToyTarget, toy_setup
from outrider.testing.drive import make_seq, random_tree
from outrider.train.loss import blocks
from outrider.train.loss.steps import TrainingBatch
from outrider.train.loss.unroll import unrolled
from outrider.train.model.presets import Sizes, describe
from tests.helpers.heads import check_text
from tests.helpers.train_setup import scatter
from tests.models.heads.drive_head import (
    CPU,
    TABLES,
    admit,
    commit_feed,
    grow,
    make_trainer,
    measure_tau,
    next_batch,
    note_states,
    random_head,
    score_texts,
)
from tests.models.heads.training_pass import LENGTHS, TrainingPass

SMALL = Sizes(hidden=64, layers=8, vocab=40, epsilon=1e-5, depth=2, draft_tokens=4)
MINI = Sizes(hidden=384, layers=8, vocab=12288, epsilon=1e-5, depth=2, draft_tokens=4)
NANO = Sizes(hidden=128, layers=2, vocab=12288, epsilon=1e-5, depth=1, draft_tokens=4)
KINDS = ["dflash", "jetspec", "dflash2", "dspark", "xpress", "domino"]
VIEWS = BlockView(window=5), BlockView(window=7, causal=True)


def make_head(description: HeadDescription, seed: int = 0):
    """Return a module with random weights, also in what corrects logits and in the convolutions."""
    return random_head(description, seed, perturbed=("norm", "markov", "judge", "mix", "token_out", "after", "kernel"))


def variants(kind: str) -> dict[str, HeadDescription]:
    """Descriptions of a kind, by name."""
    plain = describe(kind, SMALL)
    if kind == "dflash2":  # training scores all tokens
        every = replace(plain.block.selector, candidates=0)
        plain = replace(plain, block=replace(plain.block, selector=every))
    if kind in ("jetspec", "dflash2", "domino"):
        last = {"windows": replace(plain, block=replace(plain.block, views=VIEWS))}
    elif kind == "xpress":
        refiner = plain.block.refiner
        last = {"anchored": replace(plain, block=DraftBlock(size=3, sample_from_anchor=True, refiner=refiner))}
    else:
        spark = DraftBlock(size=3, sample_from_anchor=True, confidence=True)
        last = {"confidence without Markov": replace(plain, block=spark)}
    return {
        "plain": plain,
        "reduced draft vocabulary": replace(plain, draft_vocab=9),
        "own tables": replace(
            plain,
            own_embedding=True,
            own_lm_head=True,
            body=replace(plain.body, hidden=48, heads=4, attention_bias=True),
        ),
        "state without fusion": replace(plain, aux_states=AuxStates(layers=(7,)), final_norm=False),
        **last,
    }


ALL_VARIANTS = [(kind, name) for kind in KINDS for name in variants(kind)]


@pytest.mark.parametrize(("kind", "name"), ALL_VARIANTS)
def test_save_and_load(kind, name, tmp_path):
    description = variants(kind)[name]
    assert HeadDescription.from_json(json.loads(json.dumps(description.to_json()))) == description
    module = make_head(description)
    if description.draft_vocab:
        module.ids.copy_(torch.randperm(40)[:9].sort().values)
    write_head(tmp_path / "head", module, dtype=torch.float32)
    loaded = read_head(tmp_path / "head", dtype=torch.float32, device=CPU)
    assert loaded.description == description
    assert loaded.state_dict().keys() == module.state_dict().keys()
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in module.state_dict().items())
    heads = [make_head_target(each, TABLES, slots=1, context=32) for each in (module, loaded)]
    texts = [[3, 1, 4, 1, 5]]
    aux_states = torch.randn(1, 4, len(description.aux_states.layers), 64)
    logits, loaded_logits = (score_texts(head, texts, aux_states) for head in heads)
    assert torch.allclose(logits, loaded_logits, atol=1e-4)
    assert isinstance(heads[0], BlockTarget)


def test_description_without_a_block_field_is_readable():
    data = describe("mtp", SMALL).to_json()
    del data["block"]
    assert HeadDescription.from_json(data) == describe("mtp", SMALL)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"body": None}, "must have either decoder layers or parallel heads"),
        ({"body": None, "stack": describe("medusa", SMALL).stack}, "fills in a block but has no decoder layers"),
        ({"input_fusion": describe("eagle3", SMALL).input_fusion}, "cannot combine hidden states with embeddings"),
        (
            {"aux_states": AuxStates(layers=(1, 2), fused=True, norm=FuseNorm.EACH)},
            "must normalize hidden states after they are fused, not before",
        ),
        ({"block": DraftBlock(size=1)}, "a block of size 1 has no draft token"),
        ({"block": DraftBlock(size=4, markov_rank=-1)}, "its Markov correction has rank -1"),
        ({"block": DraftBlock(size=4, refiner=Refiner(rank=8, ffn=8, passes=2))}, "it has no causal refiner, or the"),
        ({"block": DraftBlock(size=4, views=VIEWS[:1])}, "has 1 views, which is not one for each decoder layer"),
        ({"block": DraftBlock(size=4, views=(BlockView(window=-1),) * 2)}, "attention has a negative window"),
        ({"block": DraftBlock(size=4, selector=Selector(rank=8, candidates=2))}, "no candidate selector, or the rev"),
        ({"block": DraftBlock(size=4, convolution=Convolution(taps=2, group=16))}, "selector but no convolutions, or"),
        ({"target_hidden": 32}, "hidden size is 64, but the target's embedding and LM head have size 32"),
    ],
)
def test_invalid_descriptions_are_rejected(change, message):
    with pytest.raises(OutriderError, match=message):
        replace(describe("dflash", SMALL), **change)


def test_presets_for_large_targets_follow_the_papers():
    sizes = Sizes(hidden=4096, layers=36, vocab=151936, epsilon=1e-6, draft_tokens=15)
    published = {
        "dflash": DraftBlock(size=16),
        "jetspec": DraftBlock(size=16, views=(BlockView(causal=True),)),
        "dflash2": DraftBlock(
            size=16, convolution=Convolution(taps=2, group=16), selector=Selector(rank=256, candidates=16)
        ),
        "dspark": DraftBlock(size=15, sample_from_anchor=True, markov_rank=256, confidence=True),
        "xpress": DraftBlock(size=16, refiner=Refiner(rank=256, ffn=512, passes=6, candidates=512)),
        "domino": DraftBlock(size=15, sample_from_anchor=True, recurrence=Recurrence(state=1024, rank=256, first=1)),
    }
    assert published.keys() == set(KINDS)
    for kind, block in published.items():
        assert describe(kind, sizes).block == block
        assert describe(kind, sizes).aux_states.layers == (1, 9, 17, 25, 33)
    assert describe("dflash", replace(sizes, layers=1)).aux_states.layers == (0,)


@pytest.mark.parametrize(
    ("kind", "part", "change", "message"),
    [
        ("dflash2", "convolution", {"taps": 6}, "its convolutions read 6 columns of a block of size 5"),
        ("dflash2", "convolution", {"group": 24}, "hidden size is 64, which groups of 24 channels do not divide"),
        ("dflash2", "selector", {"rank": 0}, "has rank 0 and 16 candidates"),
        ("domino", "recurrence", {"state": 0}, "sizes of 0, 16"),
        ("domino", "recurrence", {"first": -1}, "begins after -1 draft tokens"),
    ],
)
def test_invalid_parts_are_rejected(kind, part, change, message):
    description = describe(kind, SMALL)
    block = description.block
    with pytest.raises(OutriderError, match=message):
        replace(description, block=replace(block, **{part: replace(getattr(block, part), **change)}))


@pytest.mark.fast_cases(
    "dflash-plain",
    "dflash-confidence without Markov",
    "dspark-reduced draft vocabulary",
    "dspark-state without fusion",
    "xpress-own tables",
    "xpress-anchored",
    "jetspec-plain",
    "dflash2-windows",
    "domino-windows",
)
@pytest.mark.parametrize(("kind", "name"), ALL_VARIANTS)
def test_engine_logits_equal_training_logits(kind, name):
    """All blocks of one masked training pass equal the blocks of sequences in a batch, which grow round by round."""
    rng = random.Random(4)
    module = make_head(variants(kind)[name], seed=3)
    head = make_head_target(module, TABLES, slots=3, context=32)
    num_draft_tokens = module.block.draft_tokens
    training = TrainingPass(module, 9)
    assert len(training.steps) == num_draft_tokens
    confidence = None
    if module.block.confidence:
        confidence = [scatter(step.confidence, step.loss_mask) for step in training.steps]
    seqs = training.start(head, chunks=(3,), draft_budget=4)
    num_compared = 0
    while seqs:
        note_states(head, seqs, training.aux_states, [len(seq.token_ids) - 1 for seq in seqs])
        batch = next_batch(head, seqs)
        chain = tree.empty(len(seqs), CPU)
        scores = [head.score(batch, chain)]
        rests = [training.tokens[seq.slot, len(seq.token_ids) :].tolist() + [0] * num_draft_tokens for seq in seqs]
        for depth in range(1, num_draft_tokens):
            draft_tokens = torch.tensor([rest[:depth] for rest in rests])
            chain = tree.chain(draft_tokens, (depth,) * len(seqs))
            scores.append(head.score(batch, chain, first=depth - 1))
        for b, seq in enumerate(seqs):
            for depth, score in enumerate(scores):
                if not training.check(depth, seq, score.logits[b, -1]):
                    continue
                num_compared += 1
                if confidence is not None:
                    expected = confidence[depth][seq.slot, len(seq.token_ids) - 2]
                    assert abs(score.confidence[b, -1] - expected) < 1e-4
        commit_feed(head, batch, chain)
        seqs = grow(seqs, training.tokens, LENGTHS, rng)
    assert num_compared > 20


def test_cached_states_give_the_same_logits_again():
    """This holds for a sequence that did not grow, in a batch, and for the next sequence in a slot."""
    head = make_head_target(make_head(describe("dspark", SMALL)), TABLES, slots=2, context=32)
    empty = tree.empty(2, CPU)
    aux_states = torch.randn(2, 20, 5, 64)
    texts = [torch.randint(0, 40, (length,)).tolist() for length in (20, 6)]
    seqs = admit(head, texts)
    note_states(head, seqs, aux_states, [19, 5])
    batch = next_batch(head, seqs)
    logits = head.score(batch, empty).logits
    commit_feed(head, batch, empty)
    assert [head.cache.length(slot) for slot in range(2)] == [19, 5]
    assert torch.allclose(head.score(next_batch(head, seqs), empty).logits, logits, atol=1e-4)
    for seq in seqs:
        head.cache.release(seq.slot)
    shorter_texts = [texts[0][:7], texts[1]]
    reused_logits = score_texts(head, shorter_texts, aux_states)
    fresh_head = make_head_target(make_head(describe("dspark", SMALL)), TABLES, slots=2, context=32)
    assert torch.allclose(reused_logits, score_texts(fresh_head, shorter_texts, aux_states), atol=1e-4)
    assert torch.allclose(reused_logits[1], logits[1, 0], atol=1e-4)


def test_blocks_start_at_random_trained_positions(monkeypatch):
    monkeypatch.setattr(blocks, "MAX_BLOCKS", 4)
    loss_mask = torch.zeros(3, 12, dtype=torch.bool)
    loss_mask[0, 2:] = True
    loss_mask[1, 7:9] = True
    seen = set()
    for _ in range(40):
        positions, valid = blocks.anchors(loss_mask, 1.0)
        assert positions.shape == valid.shape == (3, 4)
        assert valid.sum(1).tolist() == [4, 2, 0]
        assert positions[1, :2].tolist() == [7, 8]
        chosen = positions[0].tolist()
        assert chosen == sorted(set(chosen))
        seen |= set(chosen)
    assert seen == set(range(2, 12))


def test_share_of_positions_at_which_blocks_start():
    torch.manual_seed(3)
    counts = [int(blocks.anchors(torch.ones(2, 101, dtype=torch.bool), 0.25)[1].sum()) for _ in range(50)]
    assert 45 < sum(counts) / len(counts) < 55  # of 2 * 100 positions
    assert max(counts) > min(counts)


def test_blocks_in_one_training_pass_are_independent(monkeypatch):
    module = make_head(describe("dspark", SMALL))
    module.share_weights(TABLES.embedding, TABLES.head)
    texts = TrainingBatch(
        tokens=torch.randint(0, 40, (2, 16)),
        aux_states=torch.randn(2, 15, 5, 64),
        target_probs=torch.rand(30, 40),
        loss_mask=torch.ones(2, 15, dtype=torch.bool),
    )
    all_steps = list(unrolled(module, texts, 9))
    monkeypatch.setattr(blocks, "MAX_BLOCKS", 5)
    torch.manual_seed(8)
    positions, _ = blocks.anchors(texts.loss_mask, 1.0)
    torch.manual_seed(8)
    for step, full_step in zip(unrolled(module, texts, 9), all_steps, strict=True):
        index = positions - 1  # the full pass has a block at each position but the first
        full_logits = scatter(full_step.logits, full_step.loss_mask)
        expected = full_logits.gather(1, index[..., None].expand(-1, -1, 40))
        assert torch.allclose(scatter(step.logits, step.loss_mask), expected, atol=1e-5, equal_nan=True)
        assert torch.equal(step.loss_mask, full_step.loss_mask.gather(1, index))


@pytest.mark.parametrize(("kind", "learned"), [("dflash2", ("kernel", "after")), ("domino", ("token_out",))])
def test_new_corrections_change_nothing_and_learn(kind, learned):
    torch.manual_seed(4)
    module = make_module(describe(kind, SMALL))
    module.share_weights(TABLES.embedding, TABLES.head)
    texts = TrainingBatch(
        tokens=torch.randint(0, 40, (1, 9)),
        aux_states=torch.randn(1, 8, 5, 64),
        target_probs=torch.rand(8, 40),
        loss_mask=torch.ones(1, 8, dtype=torch.bool),
    )
    loss = torch.zeros(())
    for step in unrolled(module, texts, 4):
        ((_, base),) = step.auxiliary
        assert torch.equal(step.logits, base)
        loss = loss + step.logits.logsumexp(-1).sum()
    loss.backward()
    names = [name for name, _ in module.named_parameters() if any(part in name for part in learned)]
    assert len(names) == (9 if kind == "dflash2" else 1)  # two layers have four kernels each
    assert all(bool(module.get_parameter(name).grad.any()) for name in names)


@pytest.mark.parametrize("kind", KINDS)
def test_text_of_one_token_is_not_trained(kind):
    module = make_module(describe(kind, SMALL))
    module.share_weights(TABLES.embedding, TABLES.head)
    texts = TrainingBatch(
        tokens=torch.tensor([[3, 1]]),
        aux_states=torch.randn(1, 1, 5, 64),
        target_probs=torch.rand(1, 40),
        loss_mask=torch.ones(1, 1, dtype=torch.bool),
    )
    assert not any(bool(step.loss_mask.any()) for step in unrolled(module, texts, 9))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_a_node_depend_only_on_its_path(kind):
    """Other nodes of the tree do not matter, nor how many nodes are scored together."""
    head = make_head_target(make_head(describe(kind, SMALL)), TABLES, slots=2, context=32)
    seqs = admit(head, [[1, 2, 3, 4, 5], [6, 7, 8]])
    note_states(head, seqs, torch.randn(2, 5, 5, 64), [4, 2])
    batch = next_batch(head, seqs)
    draft = random_tree([9, 6], 40, random.Random(5))
    root_logits = head.score(batch, tree.empty(2, CPU)).logits
    node_logits = torch.cat([head.score(batch, draft, 0).logits[:, :4], head.score(batch, draft, 4).logits], 1)
    assert torch.allclose(head.score(batch, draft).logits, torch.cat([root_logits, node_logits], 1), atol=1e-4)
    for b, width in enumerate(draft.width):
        for node in range(width):
            path = [node]
            while (parent := int(draft.parent[b, path[0]])) >= 0:
                path.insert(0, parent)
            chain = tree.chain(draft.tokens[:, path], (len(path),) * 2)
            chain_logits = head.score(batch, chain, 0).logits
            assert torch.allclose(chain_logits[b, -1], node_logits[b, node], atol=1e-4)


def test_confidence_depends_on_the_parent_but_not_on_the_token_itself():
    head = make_head_target(make_head(describe("dspark", SMALL)), TABLES, slots=1, context=32)
    seqs = admit(head, [[1, 2, 3, 4, 5]])
    note_states(head, seqs, torch.randn(1, 4, 5, 64), [4])
    batch = next_batch(head, seqs)
    head.score(batch, tree.empty(1, CPU))
    parent = torch.tensor([[-1, -1, 0, 0, 2]])
    tokens = torch.tensor([[7, 8, 9, 10, 11]])

    def confidence_after(tokens):
        """Return the log-odds [5] for a draft token after each node."""
        return head.score(batch, tree.one_hot_tree(tokens, parent, (5,)), first=0).confidence[0]

    confidence = confidence_after(tokens)
    for changed in range(5):
        other_tokens = tokens.clone()
        other_tokens[0, changed] = 30
        assert (confidence_after(other_tokens) != confidence).tolist() == [node == changed for node in range(5)]
    plain_head = make_head_target(make_head(describe("dflash", SMALL)), TABLES, slots=1, context=32)
    seqs = admit(plain_head, [[1, 2, 3, 4, 5]])
    note_states(plain_head, seqs, torch.randn(1, 4, 5, 64), [4])
    assert plain_head.score(next_batch(plain_head, seqs), tree.empty(1, CPU)).confidence is None


def test_confidence_head_limits_the_draft_length():
    """With low confidence a chain has no draft token. With high confidence it uses the whole budget."""
    module = make_head(describe("dspark", SMALL))
    head = make_head_target(module, TABLES, slots=1, context=32)
    seqs = admit(head, [[1, 2, 3, 4, 5]])
    note_states(head, seqs, torch.randn(1, 4, 5, 64), [4])
    batch = next_batch(head, seqs).limited((4,))
    confidence = Confidence()
    confidence.begin_text(0)
    stop_rule = confidence.stop_rule([0], 0.2, (0.0,), ())
    lengths = []
    torch.nn.init.zeros_(module.judge.weight)
    for log_odds in (-9.0, 9.0):
        torch.nn.init.constant_(module.judge.bias, log_odds)
        lengths.append(head.draft_greedy(batch, 40, stop_rule).count[0])
    assert lengths == [0, 4]


@pytest.mark.fast_cases(
    "dflash2-HeadProposer-1.0",
    "dspark-HeadTreeProposer-0.0",
    "jetspec-HeadTreeProposer-0.0",
    "xpress-HeadProposer-1.0",
    "domino-HeadTreeProposer-0.0",
)
@pytest.mark.parametrize(("make", "temperature"), [(HeadProposer, 1.0), (HeadTreeProposer, 0.0)])
@pytest.mark.parametrize("kind", KINDS)
def test_output_equals_plain_decoding(kind, temperature, make, tmp_path, monkeypatch):
    """The draft budget is larger than a block, and prompts are prefilled in chunks."""
    monkeypatch.setattr(chain_module, "PREFILL_CHUNK", 4)
    monkeypatch.setattr(chain_module, "SMALL_FEED", 4)
    write_head(tmp_path / "head", make_head(describe(kind, MINI)), dtype=torch.float32)
    check_text(tmp_path / "head", make, temperature=temperature, k=6)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("make", [HeadProposer, HeadTreeProposer])
@pytest.mark.parametrize(("kind", "min_depth"), [("dflash", 4), ("dspark", 4), ("peagle", 3), ("mtp", 1)])
def test_single_pass_heads_ignore_the_price_of_another_pass(kind, min_depth, make, temperature):
    """A head that drafts all tokens in one pass uses its whole budget. Others stop if another pass does not pay."""
    sizes = replace(SMALL, own_lm_head=False)
    head = make_head_target(make_head(describe(kind, sizes)), TABLES, slots=1, context=32)
    proposer = make(replace(toy_setup(ToyTarget(vocab=40)), draw=Draw.ARGMAX), head)
    seq = make_seq([1, 2, 3, 4, 5], 0, SamplingParams(temperature=temperature))
    proposer.admit(0, seq.request)
    head.num_noted = {0: 0}
    note_states(head, [seq], torch.randn(1, 4, len(head.description.aux_states.layers), 64), [4])
    batch = Batch(seqs=(seq,), start=(4,), feed=((5,),), budget=DraftBudget((4,), min_draft_probs=(2.0,)))
    depth = max(proposer.propose(batch).depth)
    assert depth == 1 if min_depth == 1 else depth >= min_depth


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_training_lowers_the_loss_and_raises_acceptance(kind, nano):
    target, prompts, _ = nano
    description = describe(kind, NANO)
    trainer, texts = make_trainer(nano, description, steps=4)
    module = trainer.trainee.module
    tau_before = measure_tau(module, target, prompts)
    error_before = confidence_error(module, texts)
    stats = [trainer.train([texts], progress=step / 60) for step in range(60)]
    assert stats[-1].loss < 0.6 * stats[0].loss
    acceptance = [step for step in stats if step.alpha_counts][-1].acceptance
    assert min(acceptance) > 0.4
    assert len(acceptance) == 4
    assert measure_tau(module, target, prompts) > tau_before + 1
    if module.block.confidence:
        assert confidence_error(module, texts) < 0.7 * error_before


@torch.no_grad()
def confidence_error(module, texts) -> float:
    """Return the mean absolute difference between the confidence and the acceptance probability."""
    if not module.block.confidence:
        return 0.0
    errors = []
    for step in unrolled(module, texts, 4):
        alpha = torch.minimum(step.target, step.logits.softmax(-1)).sum(-1)
        errors.append((step.confidence.sigmoid() - alpha).abs())
    return float(torch.cat(errors).mean())
