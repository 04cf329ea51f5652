"""The causal refiner of XPress: Jacobi passes, candidates, and the distribution from which tokens are sampled."""

from dataclasses import replace

import pytest
import torch

from outrider.core import tree
from outrider.core.params import SamplingParams
from outrider.core.target import draft_by_scores
from outrider.core.types import Batch, DraftBudget, Draw
from outrider.drafting.propose.draft_model.trained_head import HeadProposer
from outrider.errors import OutriderError
from outrider.models.heads.description import HeadDescription
from outrider.models.heads.targets.registry import make_head_target
from outrider.testing import ToyTarget, toy_setup
from outrider.testing.drive import make_seq
from outrider.train.loss import blocks
from outrider.train.loss.steps import TrainingBatch
from outrider.train.loss.unroll import unrolled
from outrider.train.model.presets import Sizes, describe
from tests.models.heads.drive_head import CPU, TABLES, admit, next_batch, note_states, random_head

SIZES = Sizes(hidden=64, layers=8, vocab=40, epsilon=1e-5, depth=1, draft_tokens=4)
LAYOUTS = ["fill-in", "anchored"]


def description_of(layout: str, **changes) -> HeadDescription:
    """Describe a small head with 4 draft tokens. `changes` are those of its refiner."""
    plain = describe("xpress", SIZES)
    block = replace(plain.block, refiner=replace(plain.block.refiner, **changes))
    if layout == "anchored":
        block = replace(block, size=4, sample_from_anchor=True)
    return replace(plain, block=block)


def make_head(description: HeadDescription, seed: int = 0):
    """Return a target that runs a head whose corrections are as large as its logits."""
    module = random_head(description, seed, perturbed=("norm", "mix", "token_in", "token_out", "kernel", "after"))
    if description.block.refiner:
        module.refiner.token_out.weight *= 30
    return make_head_target(module, TABLES, slots=2, context=32)


def start(head, lengths=(5, 3)):
    """Start sequences. Return them, and a batch that drafts 4 tokens after each."""
    seqs = admit(head, [list(range(1, 1 + length)) for length in lengths])
    aux_states = torch.randn(len(lengths), max(lengths), len(head.description.aux_states.layers), 64)
    note_states(head, seqs, aux_states, [length - 1 for length in lengths])
    return seqs, next_batch(head, seqs)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("candidates", [0, 12])
def test_as_many_passes_as_draft_tokens_equal_left_to_right(layout, candidates):
    head = make_head(description_of(layout, passes=9, candidates=candidates))
    _, batch = start(head)
    chains = head.draft_greedy(batch, 40)
    expected = draft_by_scores(head, batch, 40)
    assert torch.equal(chains.tokens, expected.tokens)
    assert chains.count == expected.count == (4, 4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_pass_settles_one_more_token(layout):
    changed = 0
    for seed in range(6):
        settled = make_head(description_of(layout, passes=4), seed)
        torch.manual_seed(seed)
        expected = settled.draft_greedy(start(settled)[1], 40).tokens
        for passes in (1, 2, 3):
            head = make_head(description_of(layout, passes=passes), seed)
            torch.manual_seed(seed)
            tokens = head.draft_greedy(start(head)[1], 40).tokens
            assert torch.equal(tokens[:, :passes], expected[:, :passes])
            changed += int((tokens != expected).sum())
    assert changed > 0  # else every pass would give the same tokens


def test_budget_beyond_the_block_repeats_its_last_token():
    head = make_head(description_of("fill-in"))
    _, batch = start(head)
    chains = head.draft_greedy(batch.limited((6, 2)), 40)
    assert chains.count == (6, 2)
    assert torch.equal(chains.tokens[:, 3:], chains.tokens[:, 3:4].expand(-1, 3))


def test_only_candidates_can_be_drafted():
    head = make_head(description_of("fill-in", candidates=3))
    _, batch = start(head)
    all_tokens = make_head(description_of("fill-in"))
    _, same_batch = start(all_tokens)
    torch.manual_seed(1)
    logits = head.score(batch, tree.empty(2, CPU)).logits
    assert (logits > -torch.inf).sum(-1).tolist() == [[3], [3]]
    assert bool((all_tokens.score(same_batch, tree.empty(2, CPU)).logits > -torch.inf).all())


STATED = {f"{layout} {count}": description_of(layout, candidates=count) for layout in LAYOUTS for count in (0, 12)}
STATED |= {kind: describe(kind, SIZES) for kind in ("dflash2", "domino")}


@pytest.mark.parametrize("name", STATED)
def test_tokens_are_sampled_from_the_stated_distribution(name):
    """Each q of a sampled chain equals the head's distribution after the tokens before it, in a chain of its own."""
    head = make_head(STATED[name])
    proposer = HeadProposer(replace(toy_setup(ToyTarget(vocab=40)), draw=Draw.SAMPLE), head)
    seq = make_seq([1, 2, 3, 4, 5], 0, SamplingParams(temperature=1.0))
    proposer.admit(0, seq.request)
    head.num_noted = {0: 0}
    note_states(head, [seq], torch.randn(1, 4, len(head.description.aux_states.layers), 64), [4])
    batch = Batch(seqs=(seq,), start=(4,), feed=((5,),), budget=DraftBudget((4,)))
    draft = proposer.propose(batch)
    assert draft.width == (4,)
    assert draft.q is not None
    for depth in range(4):
        before = tree.chain(draft.tokens[:, :depth], (depth,))
        expected = head.score(batch, before).logits[0, -1].softmax(-1)
        q = draft.q.values[draft.q.at[0, depth]]
        assert torch.allclose(q, expected, atol=1e-5)
        assert q[draft.tokens[0, depth]] > 0
        assert int((q > 0).sum()) <= (16 if name == "dflash2" else 40)


def texts_of(tokens: torch.Tensor) -> TrainingBatch:
    size = tokens.shape[1] - 1
    return TrainingBatch(
        tokens=tokens,
        aux_states=torch.randn(len(tokens), size, 5, 64, generator=torch.Generator().manual_seed(5)),
        target_probs=torch.rand(len(tokens) * size, 40),
        loss_mask=torch.ones(len(tokens), size, dtype=torch.bool),
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("passes", [0, 1, 2])
def test_consistency_trains_the_tokens_of_the_engine(layout, passes, monkeypatch):
    """The logits after own tokens equal those of one more Jacobi pass of the engine."""
    monkeypatch.setattr(blocks, "CONSISTENCY_PASSES", 1)
    own_tokens = blocks._own_tokens
    monkeypatch.setattr(blocks, "_own_tokens", lambda *given: own_tokens(*given[:-1], passes))
    head = make_head(description_of(layout, passes=passes + 1, candidates=0))
    texts = texts_of(torch.randint(0, 40, (1, 12)))
    steps = list(unrolled(head.module, texts, 4))
    begin = 5  # position of the last committed token
    seqs = admit(head, [texts.tokens[0, : begin + 1].tolist()])
    note_states(head, seqs, texts.aux_states, [begin])
    chains = head.draft_greedy(next_batch(head, seqs), 40)
    for depth, step in enumerate(steps):
        row = int(step.loss_mask[0, : begin - 1].sum())  # blocks begin at position 1
        (weight, own_logits), (base_weight, _) = step.auxiliary
        assert (weight, base_weight) == (0.3, 0.6)
        assert int(own_logits[row].argmax()) == int(chains.tokens[0, depth])


def test_own_tokens_have_no_gradient_but_corrections_do():
    head = make_head(description_of("fill-in"))
    module = head.module.requires_grad_(True)
    steps = list(unrolled(module, texts_of(torch.randint(0, 40, (2, 9))), 4))
    assert len(steps) == 4
    sum(step.auxiliary[0][1].sum() for step in steps).backward()
    for name, weight in module.refiner.named_parameters():
        assert weight.grad is not None, name
        assert bool(weight.grad.any()), name
    assert not bool(module.refiner.mix.grad.triu(1).any())  # a column only depends on those before it


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 0}, "sizes of 0, 32"),
        ({"passes": 0}, "makes 0 passes over 512 candidates"),
        ({"candidates": -1}, "over -1 candidates"),
    ],
)
def test_invalid_refiners_are_rejected(change, message):
    with pytest.raises(OutriderError, match=message):
        description_of("fill-in", **change)
