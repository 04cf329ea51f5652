"""Draft trees of a draft model: their nodes and distributions, learning, and the draft model's KV cache."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from outrider.core import tree
from outrider.core.params import SamplingParams
from outrider.core.proposer import NoProposer
from outrider.core.types import Batch, DraftBudget, DraftKind, Draw, Scores
from outrider.drafting.propose.draft_model.chain import DraftModelProposer
from outrider.drafting.propose.draft_model.tree import TreeProposer
from outrider.drafting.propose.leaves import draft_model
from outrider.drafting.propose.registry import find_proposer
from outrider.engine.verifiers import find_verifier
from outrider.lab.audit.statistics import g_test
from outrider.models.loader.embedded import embedded
from outrider.models.loader.load import load_checkpoint
from outrider.models.loader.make import make_target
from outrider.testing import ToyTarget, joint_distribution, toy_setup
from outrider.testing.drive import append, make_round, make_seq
from outrider.verify.sampling import SamplingTensors, apply_sampling
from tests.helpers.engines import make_engine, outputs, run

SAMPLED = SamplingParams(temperature=0.9)
GREEDY = SamplingParams(temperature=0.0)
WITHOUT = int(DraftKind.WITHOUT_REPLACEMENT)


def batch_of(seqs, budget, **more) -> Batch:
    return Batch(
        seqs=tuple(seqs),
        start=tuple(seq.num_cached_tokens for seq in seqs),
        feed=tuple(tuple(seq.token_ids[seq.num_cached_tokens :]) for seq in seqs),
        budget=DraftBudget(tuple(budget) if isinstance(budget, list) else (budget,) * len(seqs), **more),
    )


def admitted(params, *, draw=Draw.SAMPLE, seed=5, vocab=6, context=256):
    """Return a proposer with a toy draft model, the draft model, and sequences that are admitted to the proposer."""
    model = ToyTarget(vocab=vocab, seed=seed, context=context)
    proposer = TreeProposer(toy_setup(ToyTarget(vocab=vocab), draw=draw), model)
    params_of_seqs = params if isinstance(params, list) else [params]
    seqs = [make_seq([1, 2, slot], slot, seq_params) for slot, seq_params in enumerate(params_of_seqs)]
    for seq in seqs:
        proposer.admit(seq.slot, seq.request)
    return proposer, model, seqs


def path_of(draft, b, node) -> list[int]:
    path = []
    while node >= 0:
        path.insert(0, int(draft.tokens[b, node]))
        node = int(draft.parent[b, node])
    return path


def distribution_after(model, seq, path) -> torch.Tensor:
    """Return the distribution of the next token of a sequence after a path, computed for the path as a chain."""
    chain = tree.chain(torch.tensor([path], dtype=torch.int64).reshape(1, -1), (len(path),))
    suffixes = [seq.token_ids[-2:], *([*seq.token_ids, *path[:i]][-2:] for i in range(1, len(path) + 1))]
    logits = torch.stack([model.table[a, b] for a, b in suffixes])[None]
    return apply_sampling(logits, SamplingTensors.of((seq,), model.vocab, model.device), chain)[0, -1]


ALL_PARAMS = SamplingParams(
    temperature=0.8, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.5, top_k=4, logit_bias={3: 1.0}
)


@pytest.mark.parametrize("params", [SAMPLED, ALL_PARAMS], ids=["temperature", "all parameters"])
def test_sampled_nodes_have_the_distribution_they_were_sampled_from(params):
    proposer, model, seqs = admitted([params, params, params])
    num_nodes = 0
    for step in range(12):
        draft = proposer.propose(batch_of(seqs, [9, 3, 6]))
        assert draft.q is not None
        q = draft.q.padded()
        assert draft.width == (9, 3, 6)
        for b, seq in enumerate(seqs):
            seen = set()
            for node in range(draft.width[b]):
                parent = int(draft.parent[b, node])
                expected = distribution_after(model, seq, path_of(draft, b, parent))
                assert int(draft.kind[b, node]) == WITHOUT
                assert torch.allclose(q[b, node], expected, atol=1e-6)
                assert expected[draft.tokens[b, node]] > 0
                assert (parent, int(draft.tokens[b, node])) not in seen
                seen.add((parent, int(draft.tokens[b, node])))
                num_nodes += 1
        emitted = [(step % 6, 1), (2,), (int(draft.tokens[2, 0]), 4)]
        round = make_round(batch_of(seqs, 9), draft, Scores(logits=torch.empty(0)), [()] * 3, emitted)
        proposer.commit(round)
        append(round)
        for seq in seqs:
            seq.num_cached_tokens = len(seq.token_ids) - 1
    assert num_nodes == 12 * 18


def test_samples_do_not_depend_on_other_sequences():
    alone, _, seqs = admitted(SAMPLED)
    in_batch, _, batch_seqs = admitted([SAMPLED, SAMPLED, SAMPLED])
    batch_seqs[0].token_ids = list(seqs[0].token_ids)
    expected = alone.propose(batch_of(seqs, 7))
    draft = in_batch.propose(batch_of(batch_seqs, [7, 16, 2]))
    assert expected.tokens[0].tolist() == draft.tokens[0, :7].tolist()
    assert expected.parent[0].tolist() == draft.parent[0, :7].tolist()


def test_greedy_trees_have_the_likeliest_paths():
    """Compare with all paths. Acceptance probabilities are the draft model's own probabilities at first."""
    proposer, model, seqs = admitted(SamplingParams(temperature=1.0), draw=Draw.ARGMAX)
    for budget in (1, 4, 12):
        draft = proposer.propose(batch_of(seqs, budget))
        assert draft.q is None
        assert draft.accept_prob is not None
        paths = [path_of(draft, 0, node) for node in range(draft.width[0])]
        first = distribution_after(model, seqs[0], [])
        assert paths[0] == [int(first.argmax())]
        for node, path in enumerate(paths):
            # Nothing was learned yet, so the draft model's own probability is the estimate.
            prob = 1.0
            for i, token in enumerate(path):
                prob *= float(distribution_after(model, seqs[0], path[:i])[token])
            assert draft.accept_prob[0][node] == pytest.approx(prob, abs=1e-5)
        all_paths = [[a] for a in range(6)] + [[a, b] for a in range(6) for b in range(6)]
        best_left_out = 0.0
        for path in all_paths:
            if path not in paths:
                second = distribution_after(model, seqs[0], path[:1])
                prob = float(first[path[0]]) * (float(second[path[1]]) if path[1:] else 1.0)
                best_left_out = max(best_left_out, prob)
        assert draft.width == (budget,)
        # A node that is not worth another pass is not fed, so its children are missing.
        assert best_left_out <= draft.accept_prob[0][-1] * 1.5


@pytest.mark.parametrize("draw", list(Draw))
def test_greedy_and_sampled_sequences_in_one_batch(draw):
    proposer, _, seqs = admitted([GREEDY, SAMPLED], draw=draw)
    draft = proposer.propose(batch_of(seqs, 6))
    assert draft.width == (6, 6)
    assert set(draft.kind[0].tolist()) == {int(DraftKind.ONE_HOT)}
    assert set(draft.kind[1].tolist()) == {WITHOUT if draw is Draw.SAMPLE else int(DraftKind.ONE_HOT)}
    if draft.q is not None:
        assert not draft.q.padded()[0].any()


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_tree_stops_at_the_limits_of_the_batch(params):
    proposer, _, seqs = admitted(params)
    assert proposer.propose(batch_of(seqs, 8, min_path_prob=1.1)).width == (0,)
    flat = proposer.propose(batch_of(seqs, 5, min_draft_probs=(1.1,)))
    assert flat.width[0] > 0
    assert int(tree.depths(flat).max()) == 1
    pruned = proposer.propose(batch_of(seqs, 8, min_path_prob=0.3))
    assert 0 < pruned.width[0] < 8
    assert pruned.accept_prob is not None
    assert min(pruned.accept_prob[0]) >= 0.3
    assert proposer.propose(batch_of(seqs, 8)).width == (8,)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_end_tokens_get_no_children(params):
    proposer, _, seqs = admitted(params)
    seqs[0].request = replace(seqs[0].request, end_ids=frozenset(range(3)))
    draft = proposer.propose(batch_of(seqs, 16))
    parents = {int(draft.tokens[0, node]) for node in draft.parent[0, : draft.width[0]].tolist() if node >= 0}
    assert parents <= {3, 4, 5}
    assert draft.width[0] > 2


@pytest.mark.slow
@pytest.mark.parametrize("verifier", ["siblings", "traversal"])
@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=0.8, top_k=2, seed=3), ALL_PARAMS], ids=["top-k", "all parameters"]
)
def test_output_distribution_is_exact_with_filters_and_penalties(params, verifier):
    """With fewer possible tokens than children of a node, and with distributions that depend on the path."""
    params = replace(params, seed=8, logit_bias={})
    target = ToyTarget(vocab=4, slots=400, context=32)
    draft = ToyTarget(vocab=4, slots=400, context=32, seed=1)
    engine = make_engine(target, lambda setup: TreeProposer(setup, draft), verifier=verifier, k=6, rows=400)
    seqs = run(engine, [[1, 2]] * 8000, params, limit=4, ends=frozenset())
    counts = Counter(tuple(text) for text in outputs(seqs))
    expected = joint_distribution(target, [1, 2], params, 4)
    observed = torch.zeros_like(expected)
    for text, count in counts.items():
        observed[text] = count
    assert engine.stats.tau > 1.3
    assert g_test(observed.flatten().int().tolist(), expected.flatten().tolist()).p_value > 1e-3


@pytest.mark.parametrize("verifier", ["siblings", "traversal"])
def test_draft_model_equal_to_the_target_is_always_accepted(verifier):
    target = ToyTarget(seed=4)
    draft = ToyTarget(seed=4)
    engine = make_engine(target, lambda setup: TreeProposer(setup, draft), verifier=verifier, k=6)
    seqs = run(engine, [[1, 2, 3]] * 4, SamplingParams(temperature=1.0, seed=2), limit=60, ends=frozenset())
    for seq in seqs:
        assert all(accepted >= 1 for depth, accepted, _ in seq.rounds if depth)
    assert engine.stats.tau > 3.5


def test_draft_cache_holds_the_committed_tokens():
    target = ToyTarget(spread=3.0)
    draft = ToyTarget(spread=3.0, seed=9)
    num_missing = {}  # committed tokens that the draft model's cache lacks, by request and round

    class Checked(TreeProposer):
        def propose(self, batch):
            for seq in batch.seqs:
                cached = draft.cache.text[seq.slot]
                assert cached == seq.token_ids[: len(cached)]
                num_missing.setdefault(seq.request.id, []).append(len(seq.token_ids) - len(cached))
            return super().propose(batch)

    engine = make_engine(target, lambda setup: Checked(setup, draft), verifier="traversal", k=7, rows=4)
    prompts = [[1, 2, 3, slot] for slot in range(6)]
    run(engine, prompts, SamplingParams(temperature=1.0, seed=2), limit=40, ends=frozenset())
    later = [missing for rounds in num_missing.values() for missing in rounds[3:]]
    assert len(later) > 10
    assert max(later) <= 2  # the bonus token, and a last accepted draft token that was not fed


def test_greedy_output_is_the_same_with_fewer_passes():
    target = ToyTarget(spread=2.0)
    params = SamplingParams(temperature=0.0)
    prompts = [[1, 2, 3, slot] for slot in range(6)]
    plain = make_engine(target, NoProposer, k=0)
    chain = make_engine(target, lambda setup: DraftModelProposer(setup, similar_draft(target)), k=6)
    trees = make_engine(target, lambda setup: TreeProposer(setup, similar_draft(target)), k=6)
    texts = [outputs(run(engine, prompts, params, limit=80, ends=frozenset())) for engine in (plain, chain, trees)]
    assert texts[0] == texts[1] == texts[2]
    assert trees.stats.tau > 1.5


def similar_draft(target) -> ToyTarget:
    """Return a draft model that often agrees with the target."""
    draft = ToyTarget(seed=3)
    draft.table = target.table + ToyTarget(seed=3, spread=2.0).table
    return draft


def test_trees_have_more_accepted_tokens_than_chains():
    target = ToyTarget(spread=2.0)
    params = SamplingParams(temperature=1.0, seed=5)
    prompts = [[1, 2, 3, slot % 6] for slot in range(16)]
    taus = {}
    for verifier, cls in (("block", DraftModelProposer), ("traversal", TreeProposer)):
        engine = make_engine(target, lambda setup, cls=cls: cls(setup, similar_draft(target)), verifier=verifier, k=16)
        run(engine, prompts, params, limit=100, ends=frozenset())
        taus[verifier] = engine.stats.tau
    assert taus["traversal"] - 1 > 1.1 * (taus["block"] - 1)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_draft_ends_at_the_context_of_the_draft_model(params):
    proposer, _, seqs = admitted(params, context=12)
    widths = []
    for _ in range(12):
        draft = proposer.propose(batch_of(seqs, 8))
        widths.append(draft.width[0])
        round = make_round(batch_of(seqs, 8), draft, Scores(logits=torch.empty(0)), [()], [(1,)])
        proposer.commit(round)
        append(round)
        seqs[0].num_cached_tokens = len(seqs[0].token_ids) - 1
    assert widths[0] == 8
    assert widths[8:] == [1, 0, 0, 0]


def test_default_verifier_and_proposer_by_name():
    assert find_verifier(None, "tree:@nano").name == "traversal"
    assert find_verifier(None, "draft:@nano").name == "block"
    assert find_verifier(None, "switch(exit:2,draft:@nano)").name == "block"
    assert find_verifier(None, "switch(suffix,draft:@nano)").name == "traversal"
    assert find_verifier(None, "first(recycle,draft:@nano)").name == "traversal"
    checkpoint = load_checkpoint(embedded("mini"), dtype="float32", device="cpu")
    target = make_target(checkpoint, slots=2, context=64)
    setup = replace(toy_setup(target), tokenizer=checkpoint.tokenizer, context=64)
    proposer = find_proposer(f"tree:{embedded('nano')}", setup)
    assert isinstance(proposer, TreeProposer)
    assert draft_model(proposer) is proposer.model


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_level_by_level_passes_equal_one_pass_of_a_real_model(temperature):
    """The distributions from a growing cache equal those of one pass over the whole text and tree."""
    nano = load_checkpoint(embedded("nano"), dtype="float32", device="cpu")
    model = make_target(nano, slots=2, context=64)
    reference = make_target(nano, slots=2, context=64)
    proposer = TreeProposer(replace(toy_setup(model), context=64), model)
    params = SamplingParams(temperature=temperature)
    seqs = [make_seq(nano.tokenizer.encode(text), i, params) for i, text in enumerate(("def add(a", "The old man"))]
    for seq in seqs:
        proposer.admit(seq.slot, seq.request)
        reference.cache.admit(seq.slot, seq.token_ids)
    with torch.inference_mode():
        for _ in range(4):
            draft = proposer.propose(batch_of(seqs, [9, 5]))
            batch = replace(batch_of(seqs, 9), start=(0, 0), feed=tuple(tuple(seq.token_ids) for seq in seqs))
            scores = reference.score(batch, draft)
            for b in range(2):
                for node in range(draft.width[b]):
                    expected = scores.logits[b, int(draft.parent[b, node]) + 1].softmax(-1)
                    if temperature:
                        assert torch.allclose(draft.q.padded()[b, node], expected, atol=1e-5)
                    else:
                        assert int(draft.tokens[b, node]) in expected.topk(8).indices
            # Accept the path to the deepest node of each sequence.
            deepest = tree.depths(draft).argmax(1).tolist()
            emitted = [(*path_of(draft, b, node), 17) for b, node in enumerate(deepest)]
            round = make_round(batch, draft, scores, [()] * 2, emitted)
            proposer.commit(round)
            append(round)
            for seq in seqs:
                seq.num_cached_tokens = model.cache.length(seq.slot)
                assert seq.num_cached_tokens >= len(seq.token_ids) - 2
