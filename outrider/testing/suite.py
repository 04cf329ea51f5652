"""The conformance suite: check that a proposer, a cache or a verifier satisfies its protocol.

Each check runs an implementation with random requests and rounds. It raises `ConformanceError` with
the violated requirement. An implementation that passes can be used in an engine.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from outrider.core import tree
from outrider.core.params import SamplingParams
from outrider.core.proposer import Proposer, ProposerSetup
from outrider.core.target import Target
from outrider.core.types import Batch, DraftBudget, DraftKind, Draw, Scores, SequenceState
from outrider.testing.drive import FuzzedRun, append, expect, make_round, make_seq, random_text, random_tree
from outrider.testing.enumeration import CASES, Instance, prove
from outrider.testing.toy_target import ToyTarget
from outrider.verify.rules import Verifier


def toy_setup(target: ToyTarget, *, slots: int = 16, draw: Draw = Draw.SAMPLE) -> ProposerSetup:
    """Return the setup of a proposer that drafts for `target`."""
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
    """Check that a proposer satisfies the protocol `Proposer`.

    Its drafts must be well formed and within their budgets, and q must give every sampled token some probability. The
    draft for a sequence must not depend on how its tokens were committed, on the other sequences of the batch, or on an
    earlier sequence of the slot. A proposer that `learns` from rounds must draft the same tokens after the same rounds.

    Args:
        make: makes a new proposer from the setup of a toy target with vocabulary 6 and context 256.
        learns: whether drafts may depend on earlier rounds and on other sequences.
        trials: number of random runs.

    Raises:
        ConformanceError: the first requirement that is violated.
    """
    rng = random.Random(seed)
    for trial in range(trials):
        target = ToyTarget(seed=trial, spread=3.0)
        setup = toy_setup(target, draw=rng.choice(list(Draw)))
        run_seed = rng.randrange(2**32)  # the two runs of a proposer that learns must have the same rounds
        rngs = [random.Random(run_seed), random.Random(run_seed)] if learns else [rng, rng]
        first_run, second_run, batch_run = (FuzzedRun(target, make(setup), run_rng) for run_rng in (*rngs, rng))
        params = SamplingParams(temperature=rng.choice([0.0, 0.8]))
        text = random_text(target, rng.randint(30, 60), rng)
        length = rng.randint(20, len(text) - 8)
        budget = rng.randint(1, 7)
        first = first_run.propose_after(text, length, params, slots=[3], budget=budget)
        second = second_run.propose_after(text, length, params, slots=[3], budget=budget)
        if learns:
            message = "its draft differs after the same rounds"
        else:
            message = "its draft depends on how the tokens were committed"
        _expect_equal(first[0], second[0], message)
        batch_run.commit_text(random_text(target, 40, rng), 30, params, slots=[3, 1])
        in_batch = batch_run.propose_after(text, length, params, slots=[0, 3, 1], budget=budget)
        if not learns:
            message = "its draft depends on other sequences, or on an earlier sequence of the slot"
            _expect_equal(first[0], in_batch[1], message)


def check_cache(
    make: Callable[[], Target], *, trials: int = 6, seed: int = 0, tolerance: float = 1e-4, trees: bool = True
) -> None:
    """Check that the cache of a target satisfies the protocol `Cache`.

    It commits random paths of random trees in several slots. Then the logits must equal those of a fresh target that
    prefills the committed tokens. Sequences share prefixes of random length. Some are preempted and admitted again, and
    some are replaced by others. The test needs up to 120 tokens in each of four slots.

    Args:
        make: makes a new target.
        trials: number of random runs.
        tolerance: largest difference of the logits, relative to their norm.
        trees: whether the target supports trees.

    Raises:
        ConformanceError: logits differ by more than `tolerance`, or a prefix is shared with another scope.
    """
    rng = random.Random(seed)
    for _ in range(trials):
        target = make()
        target.cache.set_prefix_caching(True)
        prefix = [rng.randrange(target.vocab) for _ in range(60)]
        seqs = {slot: _admit(target, prefix, slot, rng) for slot in (0, 1, 3)}
        for _ in range(rng.randint(4, 7)):
            slot = rng.choice(sorted(seqs))
            if rng.random() < 0.4:  # admit the same sequence again, or another one
                tokens = seqs[slot].token_ids if rng.random() < 0.5 else prefix
                target.cache.release(slot)
                seqs[slot] = _admit(target, tokens, slot, rng, whole=tokens is not prefix)
            running = sorted(rng.sample(sorted(seqs), rng.randint(1, 3)))
            _run_round(target, [seqs[slot] for slot in running], rng, trees)
        for seq in seqs.values():
            _expect_scores(target, make(), seq, tolerance)
            target.cache.release(seq.slot)
            num_cached = target.cache.admit(seq.slot, seq.token_ids, "another")
            expect(not num_cached, "cached tokens are shared with another scope")


def check_verifier(verifier: Verifier, *, trials: int = 3, seed: int = 0, tolerance: float = 1e-12) -> None:
    """Check that a verifier is exact, by enumeration in float64 (see `outrider.testing.enumeration`).

    The drafts are chains of up to three draft tokens and, if the verifier supports them, trees. Draft tokens are chosen
    without sampling, sampled, or both. The cases include zeros in p and q, equal p and q, disjoint p and q, drafts that
    end early, and token ids that the target does not have.

    Args:
        trials: number of random instances of each case.
        tolerance: largest difference of a probability.

    Raises:
        ConformanceError: the joint distribution of the emitted tokens differs from the target's by
            more than `tolerance`.
    """
    generator = torch.Generator().manual_seed(seed)
    one_hot = DraftKind.ONE_HOT
    sampled = DraftKind.SAMPLED
    shapes: list[tuple[tuple[int, ...], tuple[DraftKind, ...]]] = [
        ((), ()),
        ((-1,), (sampled,)),
        ((-1, 0), (one_hot, sampled)),
        ((-1, 0, 1), (sampled,) * 3),
    ]
    if verifier.trees:
        shapes += [
            ((-1, -1), (one_hot, sampled)),
            ((-1, -1, 0), (DraftKind.WITHOUT_REPLACEMENT,) * 3),
            ((-1, -1, 0, 0), (one_hot,) * 4),
        ]
    for parent, kinds in shapes:
        for case in CASES:
            for _ in range(trials):
                instance = Instance.random(3, parent, kinds, generator=generator, case=case)
                error = prove(verifier.rule, instance).error
                message = f"{verifier.name} is off by {error:.2g} with parents {parent}, kinds {kinds} and case {case}"
                expect(error < tolerance, message)


def _expect_equal(
    one: tuple[list[tuple[int, int, int]], torch.Tensor | None],
    two: tuple[list[tuple[int, int, int]], torch.Tensor | None],
    message: str,
) -> None:
    expect(one[0] == two[0], f"{message}: {one[0]} and {two[0]}")
    if one[1] is not None and two[1] is not None:
        expect(torch.allclose(one[1], two[1], atol=1e-5), message)


def _admit(
    target: Target, tokens: Sequence[int], slot: int, rng: random.Random, *, whole: bool = False
) -> SequenceState:
    """Admit a random prefix of `tokens` with a random continuation, or with `whole` the tokens themselves."""
    continuation = [rng.randrange(target.vocab) for _ in range(rng.randint(2, 9))]
    prompt = list(tokens) if whole else [*tokens[: rng.randint(0, len(tokens))], *continuation]
    seq = make_seq(prompt, slot)
    seq.num_cached_tokens = target.cache.admit(slot, seq.token_ids, "one")
    expect(0 <= seq.num_cached_tokens < len(seq.token_ids), "admit must return less than the number of tokens")
    return seq


def _run_round(target: Target, seqs: Sequence[SequenceState], rng: random.Random, trees: bool) -> None:
    """Score a random draft and commit a random path of it."""
    feeds = [seq.token_ids[seq.num_cached_tokens :] for seq in seqs]
    feeds = [feed if rng.random() < 0.5 else feed[: rng.randint(1, len(feed))] for feed in feeds]
    batch = Batch(
        seqs=tuple(seqs),
        start=tuple(seq.num_cached_tokens for seq in seqs),
        feed=tuple(map(tuple, feeds)),
        budget=DraftBudget((5,) * len(seqs)),
    )
    widths = [rng.randint(0, 5) if emits else 0 for emits in batch.emits]
    draft = random_tree(widths, target.vocab, rng, chain=not trees or rng.random() < 0.3)
    draft = replace(draft, tokens=draft.tokens.to(target.device), parent=draft.parent.to(target.device))
    scores = target.score(batch, draft)
    paths = []
    emitted = []
    for b, emits in enumerate(batch.emits):
        leaf = rng.randint(-1, widths[b] - 1)
        path = tree.path(draft.parent[b].tolist(), leaf)
        bonus = rng.randrange(target.vocab)
        paths.append(tuple(path))
        emitted.append((*(int(draft.tokens[b, node]) for node in path), bonus) if emits else ())
    round = make_round(batch, draft, scores, paths, emitted)
    target.cache.commit(round)
    append(round)


def _expect_scores(target: Target, fresh: Target, seq: SequenceState, tolerance: float) -> None:
    """Expect that the next logits of a sequence equal those of a `fresh` target after a prefill."""
    draft = tree.empty(1, target.device)
    rest = Batch(
        seqs=(seq,),
        start=(seq.num_cached_tokens,),
        feed=(tuple(seq.token_ids[seq.num_cached_tokens :]),),
        budget=DraftBudget((0,)),
    )
    logits = target.score(rest, draft).logits[0, 0]
    target.cache.commit(make_round(rest, draft, Scores(logits=logits), [()], [()]))
    fresh.cache.admit(seq.slot, seq.token_ids)
    prefill = Batch(seqs=(seq,), start=(0,), feed=(tuple(seq.token_ids),), budget=DraftBudget((0,)))
    fresh_logits = fresh.score(prefill, draft).logits[0, 0]
    error = float((logits - fresh_logits).norm() / fresh_logits.norm())
    expect(error < tolerance, f"after commit, scoring differs from a fresh prefill by {error:.2g} of the logits' norm")
