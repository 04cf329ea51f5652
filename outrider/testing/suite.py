"""The conformance suite: hold a proposer, a cache or a verifier to the law of its protocol.

Each check drives an implementation through a fuzzed life of admit, propose, commit and release, and raises
`ConformanceError` with the law that was broken. What passes can be plugged in.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from outrider.core import tree
from outrider.core.params import SamplingParams
from outrider.core.types import Batch, DraftKind, Draw, Scores, SequenceState
from outrider.models.base import Target
from outrider.propose.base import Proposer, ProposerSetup
from outrider.testing.drive import (
    FuzzedRun,
    append,
    expect,
    make_round,
    make_row,
    random_text,
    random_tree,
)
from outrider.testing.enumeration import Instance, prove
from outrider.testing.toy_target import ToyTarget
from outrider.verify.rules import Verifier


def toy_setup(target: ToyTarget, *, slots: int = 16, draw: Draw = Draw.SAMPLE) -> ProposerSetup:
    """The setup of a proposer that guesses for `target`."""
    return ProposerSetup(
        target=target,
        vocab=target.vocab,
        slots=slots,
        context=target.context,
        device=target.device,
        dtype=torch.float32,
        draw=draw,
        tokenizer=None,
    )


def check_proposer(
    make: Callable[[ProposerSetup], Proposer], *, learns: bool = False, trials: int = 20, seed: int = 0
) -> None:
    """Hold the proposers that `make` makes to the law of `Proposer`.

    Its drafts must be well formed and within budget, every law they claim possible, and what it proposes for a text
    must not depend on how the text came about, on the other rows of the batch, or on who had the slot before. Of one
    that `learns` from rounds how good its guesses are, or what the target says of them, the same life must lead to the
    same guesses.

    Args:
        make: from a setup of a toy target (vocabulary 6, context 256) to a fresh proposer.
        learns: whether what it proposes may depend on the rounds that led to a text, and on other rows.
        trials: fuzzed lives.
        seed: of the fuzz.

    Raises:
        ConformanceError: the first law that is broken.
    """
    chance = random.Random(seed)
    for trial in range(trials):
        target = ToyTarget(seed=trial, spread=3.0)
        setup = toy_setup(target, draw=chance.choice(list(Draw)))
        same = chance.randrange(2**32)  # of one that learns, the second life is to be the first one's twin
        sources = [random.Random(same), random.Random(same)] if learns else [chance, chance]
        lives = [FuzzedRun.fresh(target, make(setup), source) for source in (*sources, chance)]
        params = SamplingParams(temperature=chance.choice([0.0, 0.8]))
        text = random_text(target, chance.randint(30, 60), chance)
        length = chance.randint(20, len(text) - 8)
        budget = chance.randint(1, 7)
        alone = lives[0].propose_after(text, length, params, slots=[3], budget=budget)
        again = lives[1].propose_after(text, length, params, slots=[3], budget=budget)
        law = "it proposes otherwise in the same life" if learns else "its proposal depends on how the text came about"
        _expect_equal(alone[0], again[0], law)
        lives[2].live(random_text(target, 40, chance), 30, params, slots=[3, 1])
        crowd = lives[2].propose_after(text, length, params, slots=[0, 3, 1], budget=budget)
        if not learns:
            _expect_equal(alone[0], crowd[1], "its proposal depends on other rows, or on who had the slot before")


def check_cache(
    make: Callable[[], Target], *, trials: int = 6, seed: int = 0, tolerance: float = 1e-4, trees: bool = True
) -> None:
    """Hold the caches of the targets that `make` makes to the law of `Cache`.

    After any commits of random trees and paths, in several slots, scoring equals that of a fresh target which reads
    the committed text at once: whatever texts begin with in common, wherever they part, and whoever gives up a slot,
    for good or to come back. It takes up to 120 tokens in each of four slots.

    Raises:
        ConformanceError: logits differ by more than `tolerance` (relative to their norm), or scopes are mixed up.
    """
    chance = random.Random(seed)
    for _ in range(trials):
        target = make()
        target.cache.set_prefix_caching(True)
        common = [chance.randrange(target.vocab) for _ in range(60)]
        rows = {slot: _admitted(target, common, slot, chance) for slot in (0, 1, 3)}
        for _ in range(chance.randint(4, 7)):
            slot = chance.choice(sorted(rows))
            if chance.random() < 0.4:  # it gives way and comes back, or somebody else comes
                text = rows[slot].token_ids if chance.random() < 0.5 else common
                target.cache.release(slot)
                rows[slot] = _admitted(target, text, slot, chance, whole=text is not common)
            running = sorted(chance.sample(sorted(rows), chance.randint(1, 3)))
            _advance(target, [rows[slot] for slot in running], chance, trees)
        for row in rows.values():
            _expect_scores(target, make(), row, tolerance)
            target.cache.release(row.slot)
            expect(
                not target.cache.admit(row.slot, row.token_ids, "another"), "what was read is shared beyond its scope"
            )


def check_verifier(verifier: Verifier, *, trials: int = 3, seed: int = 0, tolerance: float = 1e-12) -> None:
    """Hold a verifier to the law of `Verifier`, by enumeration in float64 (see `outrider.testing.enumeration`).

    Chains of up to three guesses and, where it takes them, trees; chosen, sampled and mixed; with zeros in p and q,
    with p equal to q and with nothing in common, with drafts that end early and ids that the target lacks.

    Raises:
        ConformanceError: the joint law of what it emits differs from the target's by more than `tolerance`.
    """
    source = torch.Generator().manual_seed(seed)
    one, drawn = DraftKind.ONE_HOT, DraftKind.SAMPLED
    shapes: list[tuple[tuple[int, ...], tuple[DraftKind, ...]]] = [
        ((), ()),
        ((-1,), (drawn,)),
        ((-1, 0), (one, drawn)),
        ((-1, 0, 1), (drawn,) * 3),
    ]
    if verifier.trees:
        shapes += [
            ((-1, -1), (one, drawn)),
            ((-1, -1, 0), (DraftKind.WITHOUT_REPLACEMENT,) * 3),
            ((-1, -1, 0, 0), (one,) * 4),
        ]
    for parent, laws in shapes:
        for flaw in ({}, {"zeros": 0.4}, {"same": True}, {"disjoint": True}, {"ending": 0.5}, {"foreign": 0.3}):
            for _ in range(trials):
                instance = Instance.random(3, parent, laws, generator=source, **flaw)
                error = prove(verifier.rule, instance).error
                expect(error < tolerance, f"{verifier.name} is off by {error:.2g} on {parent} {laws} {flaw}")


def _expect_equal(
    one: tuple[list[tuple[int, int, int]], torch.Tensor | None],
    two: tuple[list[tuple[int, int, int]], torch.Tensor | None],
    law: str,
) -> None:
    expect(one[0] == two[0], f"{law}: {one[0]} and {two[0]}")
    if one[1] is not None and two[1] is not None:
        expect(torch.allclose(one[1], two[1], atol=1e-5), law)


def _admitted(
    target: Target, text: Sequence[int], slot: int, chance: random.Random, *, whole: bool = False
) -> SequenceState:
    """A row that begins as `text` does, and if it is not to be the `whole` of it goes on in its own way."""
    own = [chance.randrange(target.vocab) for _ in range(chance.randint(2, 9))]
    row = make_row(list(text) if whole else [*text[: chance.randint(0, len(text))], *own], slot)
    row.num_cached_tokens = target.cache.admit(slot, row.token_ids, "one")
    expect(0 <= row.num_cached_tokens < len(row.token_ids), "a text's last token is cached before it was fed")
    return row


def _advance(target: Target, rows: Sequence[SequenceState], chance: random.Random, trees: bool) -> None:
    """One round of random guesses, of which a random path is kept."""
    feeds = [row.token_ids[row.num_cached_tokens :] for row in rows]
    feeds = [feed if chance.random() < 0.5 else feed[: chance.randint(1, len(feed))] for feed in feeds]
    batch = Batch(
        seqs=tuple(rows),
        start=tuple(row.num_cached_tokens for row in rows),
        feed=tuple(tuple(feed) for feed in feeds),
        draft_budget=(5,) * len(rows),
    )
    widths = [chance.randint(0, 5) if emits else 0 for emits in batch.emits]
    draft = random_tree(widths, target.vocab, chance, chain=not trees or chance.random() < 0.3)
    draft = replace(draft, tokens=draft.tokens.to(target.device), parent=draft.parent.to(target.device))
    scores = target.score(batch, draft)
    paths, emitted = [], []
    for b, emits in enumerate(batch.emits):
        leaf = chance.randint(-1, widths[b] - 1)
        path = tree.path(draft.parent[b].tolist(), leaf)
        bonus = chance.randrange(target.vocab)
        paths.append(tuple(path))
        emitted.append((*(int(draft.tokens[b, node]) for node in path), bonus) if emits else ())
    round = make_round(batch, draft, scores, paths, emitted)
    target.cache.commit(round)
    append(round)


def _expect_scores(target: Target, fresh: Target, row: SequenceState, tolerance: float) -> None:
    draft = tree.empty(1, target.device)
    missing = Batch(
        seqs=(row,),
        start=(row.num_cached_tokens,),
        feed=(tuple(row.token_ids[row.num_cached_tokens :]),),
        draft_budget=(0,),
    )
    ours = target.score(missing, draft).logits[0, 0]
    target.cache.commit(make_round(missing, draft, Scores(logits=ours), [()], [()]))
    fresh.cache.admit(row.slot, row.token_ids)
    whole = Batch(seqs=(row,), start=(0,), feed=(tuple(row.token_ids),), draft_budget=(0,))
    theirs = fresh.score(whole, draft).logits[0, 0]
    error = float((ours - theirs).norm() / theirs.norm())
    expect(error < tolerance, f"after commit, scoring differs from a fresh prefill by {error:.2g} of the logits' norm")
