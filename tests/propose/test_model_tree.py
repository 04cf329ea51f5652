"""Trees of guesses by a draft model: what they are made of, what is learned, and what the draft's cache keeps."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from outrider.audit.statistics import g_test
from outrider.core import tree
from outrider.core.params import SamplingParams
from outrider.core.types import Batch, DraftKind, Draw, Scores
from outrider.engine.verifiers import find_verifier
from outrider.loader.checkpoint import load_checkpoint
from outrider.loader.embedded import embedded
from outrider.loader.make import make_target
from outrider.propose.base import NoProposer
from outrider.propose.draft_model.chain import DraftModelProposer
from outrider.propose.draft_model.tree import TreeProposer
from outrider.propose.registry import draft_model, find_proposer
from outrider.testing import ToyTarget, joint_distribution, toy_setup
from outrider.testing.drive import append, make_round, make_row
from outrider.verify.sampling import SamplingTensors, apply_sampling
from tests.helpers.engines import make_engine, outputs, run

SAMPLED = SamplingParams(temperature=0.9)
GREEDY = SamplingParams(temperature=0.0)
WITHOUT = int(DraftKind.WITHOUT_REPLACEMENT)


def batch_of(rows, budget, **more) -> Batch:
    return Batch(
        seqs=tuple(rows),
        start=tuple(row.num_cached_tokens for row in rows),
        feed=tuple(tuple(row.token_ids[row.num_cached_tokens :]) for row in rows),
        draft_budget=tuple(budget) if isinstance(budget, list) else (budget,) * len(rows),
        **more,
    )


def tree_of(params, *, draw=Draw.SAMPLE, seed=5, vocab=6, context=256):
    """A proposer over a toy draft, and rows admitted to it."""
    draft = ToyTarget(vocab=vocab, seed=seed, context=context)
    proposer = TreeProposer(toy_setup(ToyTarget(vocab=vocab), draw=draw), draft)
    wants = params if isinstance(params, list) else [params]
    rows = [make_row([1, 2, slot], slot, want) for slot, want in enumerate(wants)]
    for row in rows:
        proposer.admit(row.slot, row.request)
    return proposer, draft, rows


def path_of(draft, b, node) -> list[int]:
    path = []
    while node >= 0:
        path.insert(0, int(draft.tokens[b, node]))
        node = int(draft.parent[b, node])
    return path


def law_after(model, row, path) -> torch.Tensor:
    """What a row's next token is drawn from after some guesses, read afresh as a chain."""
    chain = tree.chain(torch.tensor([path], dtype=torch.int64).reshape(1, -1), (len(path),))
    ends = [row.token_ids[-2:], *([*row.token_ids, *path[:i]][-2:] for i in range(1, len(path) + 1))]
    logits = torch.stack([model.table[a, b] for a, b in ends])[None]
    return apply_sampling(logits, SamplingTensors.of((row,), model.vocab, model.device), chain)[0, -1]


RICH = SamplingParams(
    temperature=0.8, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.5, top_k=4, logit_bias={3: 1.0}
)


@pytest.mark.parametrize("params", [SAMPLED, RICH], ids=["plain", "rich"])
def test_drawn_guesses_carry_the_law_that_they_were_drawn_from(params):
    proposer, model, rows = tree_of([params, params, params])
    nodes = 0
    for step in range(12):
        draft = proposer.propose(batch_of(rows, [9, 3, 6]))
        assert draft.q is not None
        q = draft.q.padded()
        assert draft.width == (9, 3, 6)
        for b, row in enumerate(rows):
            seen = set()
            for node in range(draft.width[b]):
                above = int(draft.parent[b, node])
                wanted = law_after(model, row, path_of(draft, b, above))
                assert int(draft.kind[b, node]) == WITHOUT
                assert torch.allclose(q[b, node], wanted, atol=1e-6)
                assert wanted[draft.tokens[b, node]] > 0
                assert (above, int(draft.tokens[b, node])) not in seen
                seen.add((above, int(draft.tokens[b, node])))
                nodes += 1
        emitted = [(step % 6, 1), (2,), (int(draft.tokens[2, 0]), 4)]
        round = make_round(batch_of(rows, 9), draft, Scores(logits=torch.empty(0)), [()] * 3, emitted)
        proposer.commit(round)
        append(round)
        for row in rows:
            row.num_cached_tokens = len(row.token_ids) - 1
    assert nodes == 12 * 18


def test_a_row_draws_the_same_in_any_company():
    alone, _, rows = tree_of(SAMPLED)
    crowd, _, three = tree_of([SAMPLED, SAMPLED, SAMPLED])
    three[0].token_ids = list(rows[0].token_ids)
    one, many = alone.propose(batch_of(rows, 7)), crowd.propose(batch_of(three, [7, 16, 2]))
    assert one.tokens[0].tolist() == many.tokens[0, :7].tolist()
    assert one.parent[0].tolist() == many.parent[0, :7].tolist()


def test_picked_guesses_are_the_likeliest_paths():
    """With room for everything, against all paths there are; the chances are those of the draft."""
    proposer, model, rows = tree_of(SamplingParams(temperature=1.0), draw=Draw.ARGMAX)
    for budget in (1, 4, 12):
        draft = proposer.propose(batch_of(rows, budget))
        assert draft.q is None
        assert draft.accept_prob is not None
        paths = [path_of(draft, 0, node) for node in range(draft.width[0])]
        first = law_after(model, rows[0], [])
        assert paths[0] == [int(first.argmax())]
        for node, path in enumerate(paths):
            # Nothing was learned yet, so a guess is trusted as far as the draft itself does.
            likely = 1.0
            for i, token in enumerate(path):
                likely *= float(law_after(model, rows[0], path[:i])[token])
            assert draft.accept_prob[0][node] == pytest.approx(likely, abs=1e-5)
        everything = [[a] for a in range(6)] + [[a, b] for a in range(6) for b in range(6)]
        missed = [path for path in everything if path not in paths]
        best = max(
            float(first[path[0]]) * (float(law_after(model, rows[0], path[:1])[path[1]]) if path[1:] else 1.0)
            for path in missed
        )
        assert draft.width == (budget,)
        assert best <= draft.accept_prob[0][-1] * 1.5  # what is not worth reading on is not read


@pytest.mark.parametrize("draw", list(Draw))
def test_greedy_rows_get_picked_guesses_beside_drawn_ones(draw):
    proposer, _, rows = tree_of([GREEDY, SAMPLED], draw=draw)
    draft = proposer.propose(batch_of(rows, 6))
    assert draft.width == (6, 6)
    assert set(draft.kind[0].tolist()) == {int(DraftKind.ONE_HOT)}
    assert set(draft.kind[1].tolist()) == {WITHOUT if draw is Draw.SAMPLE else int(DraftKind.ONE_HOT)}
    if draft.q is not None:
        assert not draft.q.padded()[0].any()


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["picked", "drawn"])
def test_a_tree_stops_where_it_is_told_to(params):
    proposer, _, rows = tree_of(params)
    assert proposer.propose(batch_of(rows, 8, min_path_prob=1.1)).width == (0,)
    flat = proposer.propose(batch_of(rows, 5, min_draft_probs=(1.1,)))
    assert flat.width[0] > 0
    assert int(tree.depths(flat).max()) == 1
    some = proposer.propose(batch_of(rows, 8, min_path_prob=0.3))
    assert 0 < some.width[0] < 8
    assert some.accept_prob is not None
    assert min(some.accept_prob[0]) >= 0.3
    assert proposer.propose(batch_of(rows, 8)).width == (8,)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["picked", "drawn"])
def test_nothing_is_guessed_after_an_end(params):
    proposer, _, rows = tree_of(params)
    rows[0].request = replace(rows[0].request, end_ids=frozenset(range(3)))
    draft = proposer.propose(batch_of(rows, 16))
    parents = {int(draft.tokens[0, node]) for node in draft.parent[0, : draft.width[0]].tolist() if node >= 0}
    assert parents <= {3, 4, 5}
    assert draft.width[0] > 2


@pytest.mark.slow
@pytest.mark.parametrize("verifier", ["siblings", "traversal"])
@pytest.mark.parametrize("params", [SamplingParams(temperature=0.8, top_k=2, seed=3), RICH], ids=["top-k", "rich"])
def test_exact_under_filters_and_penalties(params, verifier):
    """Where a law has fewer tokens than a node could have children, and where the law depends on the path."""
    params = replace(params, seed=8)
    target, draft = ToyTarget(vocab=4, slots=400, context=32), ToyTarget(vocab=4, slots=400, context=32, seed=1)
    params = replace(params, logit_bias={})
    engine = make_engine(target, lambda setup: TreeProposer(setup, draft), verifier=verifier, k=6, rows=400)
    rows = run(engine, [[1, 2]] * 8000, params, limit=4, ends=frozenset())
    counts = Counter(tuple(text) for text in outputs(rows))
    law = joint_distribution(target, [1, 2], params, 4)
    observed = torch.zeros_like(law)
    for text, count in counts.items():
        observed[text] = count
    assert engine.stats.tau > 1.3
    assert g_test(observed.flatten().int().tolist(), law.flatten().tolist()).p_value > 1e-3


@pytest.mark.parametrize("verifier", ["siblings", "traversal"])
def test_a_draft_that_is_the_target_is_followed_to_the_end(verifier):
    target, draft = ToyTarget(seed=4), ToyTarget(seed=4)
    engine = make_engine(target, lambda setup: TreeProposer(setup, draft), verifier=verifier, k=6)
    rows = run(engine, [[1, 2, 3]] * 4, SamplingParams(temperature=1.0, seed=2), limit=60, ends=frozenset())
    for row in rows:
        assert all(accepted >= 1 for deepest, accepted, _ in row.rounds if deepest)
    assert engine.stats.tau > 3.5


def test_the_draft_has_read_what_was_emitted():
    target, draft = ToyTarget(spread=3.0), ToyTarget(spread=3.0, seed=9)
    engine = make_engine(target, lambda setup: TreeProposer(setup, draft), verifier="traversal", k=7, rows=4)
    texts = {}

    def look(batch):
        for row in batch.seqs:
            read = draft.cache.text[row.slot]
            assert read == row.token_ids[: len(read)]
            texts.setdefault(row.request.id, []).append(len(row.token_ids) - len(read))
        return inner(batch)

    inner = engine._proposer.propose
    engine._proposer.propose = look
    run(
        engine,
        [[1, 2, 3, slot] for slot in range(6)],
        SamplingParams(temperature=1.0, seed=2),
        limit=40,
        ends=frozenset(),
    )
    later = [missing for each in texts.values() for missing in each[3:]]
    assert len(later) > 10
    assert max(later) <= 2  # the bonus, and the guess before it where the draft did not read on from it


def test_greedy_text_is_the_same_and_takes_fewer_passes():
    target = ToyTarget(spread=2.0)
    params = SamplingParams(temperature=0.0)
    prompts = [[1, 2, 3, slot] for slot in range(6)]
    plain = make_engine(target, NoProposer, k=0)
    chain = make_engine(target, lambda setup: DraftModelProposer(setup, near(target)), k=6)
    grown = make_engine(target, lambda setup: TreeProposer(setup, near(target)), k=6)
    texts = [outputs(run(engine, prompts, params, limit=80, ends=frozenset())) for engine in (plain, chain, grown)]
    assert texts[0] == texts[1] == texts[2]
    assert grown.stats.tau > 1.5


def near(target) -> ToyTarget:
    """A draft that often agrees with the target."""
    draft = ToyTarget(seed=3)
    draft.table = target.table + ToyTarget(seed=3, spread=2.0).table
    return draft


def test_a_tree_keeps_more_than_a_chain():
    target = ToyTarget(spread=2.0)
    params = SamplingParams(temperature=1.0, seed=5)
    prompts = [[1, 2, 3, slot % 6] for slot in range(40)]
    makers = {"block": DraftModelProposer, "traversal": TreeProposer}
    taus = {}
    for rule, maker in makers.items():
        engine = make_engine(target, lambda setup, maker=maker: maker(setup, near(target)), verifier=rule, k=16)
        run(engine, prompts, params, limit=100, ends=frozenset())
        taus[rule] = engine.stats.tau
    assert taus["traversal"] - 1 > 1.1 * (taus["block"] - 1)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["picked", "drawn"])
def test_a_full_draft_makes_room_for_no_more(params):
    proposer, _, rows = tree_of(params, context=12)
    widths = []
    for _ in range(12):
        draft = proposer.propose(batch_of(rows, 8))
        widths.append(draft.width[0])
        round = make_round(batch_of(rows, 8), draft, Scores(logits=torch.empty(0)), [()], [(1,)])
        proposer.commit(round)
        append(round)
        rows[0].num_cached_tokens = len(rows[0].token_ids) - 1
    assert widths[0] == 8
    assert widths[8:] == [1, 0, 0, 0]


def test_by_name():
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
def test_the_embedded_pair(temperature):
    """A real draft's cache, read level by level, says what a fresh reading of each path says."""
    small = load_checkpoint(embedded("nano"), dtype="float32", device="cpu")
    model, fresh = (make_target(small, slots=2, context=64) for _ in range(2))
    setup = replace(toy_setup(model), context=64)
    proposer = TreeProposer(setup, model)
    params = SamplingParams(temperature=temperature)
    rows = [make_row(small.tokenizer.encode(text), i, params) for i, text in enumerate(("def add(a", "The old man"))]
    for row in rows:
        proposer.admit(row.slot, row.request)
        fresh.cache.admit(row.slot, row.token_ids)
    with torch.inference_mode():
        for _ in range(4):
            draft = proposer.propose(batch_of(rows, [9, 5]))
            batch = replace(batch_of(rows, 9), start=(0, 0), feed=tuple(tuple(row.token_ids) for row in rows))
            whole = fresh.score(batch, draft)
            for b in range(2):
                for node in range(draft.width[b]):
                    law = whole.logits[b, int(draft.parent[b, node]) + 1].softmax(-1)
                    if temperature:
                        assert torch.allclose(draft.q.padded()[b, node], law, atol=1e-5)
                    else:
                        assert int(draft.tokens[b, node]) in law.topk(8).indices
            # As if the target had said what the deepest guess of each row stands for.
            deepest = tree.depths(draft).argmax(1).tolist()
            emitted = [(*path_of(draft, b, node), 17) for b, node in enumerate(deepest)]
            round = make_round(batch, draft, whole, [()] * 2, emitted)
            proposer.commit(round)
            append(round)
            for row in rows:
                row.num_cached_tokens = model.cache.length(row.slot)
                assert row.num_cached_tokens >= len(row.token_ids) - 2
