"""Drafts from other outputs for the same prompt: who feeds whom, for how long, and that outputs do not change."""

import pytest

from outrider import OutriderError
from outrider.core.params import SamplingParams
from outrider.core.proposer import NoProposer
from outrider.core.types import Request
from outrider.drafting.propose.lookup.group import GroupProposer, parse_group_size
from outrider.drafting.propose.lookup.suffix import SuffixProposer
from outrider.drafting.propose.lookup.suffix_history import History
from outrider.testing.toy_target import ToyTarget
from tests.helpers.engines import make_engine, outputs

VOCAB = 40
PROMPT = (1, 2, 3)


def engine(make, **options):
    return make_engine(ToyTarget(vocab=VOCAB, slots=4, seed=5, spread=3.0), make, rows=4, **options)


def sample(engine, ids, *, prompt=PROMPT, group="", limit=48, temperature=0.3, scope=""):
    """Run samples of a prompt together, each with its own seed."""
    params = SamplingParams(temperature=temperature, scope=scope)
    rows = [
        engine.add(
            Request(
                id=id,
                prompt_token_ids=prompt,
                params=params,
                seed=100 + id,
                end_ids=frozenset(),
                max_tokens=limit,
                group=group,
            )
        )
        for id in ids
    ]
    while engine.busy():
        engine.step()
    return rows


def accepted(rows):
    return sum(accepted for row in rows for _, accepted, _ in row.rounds)


def grouped(**options):
    made = []

    def make(setup):
        made.append(GroupProposer(setup, **options))
        return made[-1]

    return make, made


def test_siblings_feed_each_other_while_they_run():
    make, _ = grouped()
    together = sample(engine(make), range(4))
    alone = sample(engine(SuffixProposer), range(4))
    plain = sample(engine(NoProposer), range(4))
    assert outputs(together) == outputs(alone) == outputs(plain)
    assert accepted(together) > 1.1 * accepted(alone)


def test_the_last_epoch_feeds_the_next_one():
    make, made = grouped()
    run = engine(make)
    first = sample(run, range(2))
    (proposer,) = made
    assert proposer.groups.tokens() == sum(len(each) + 3 for each in outputs(first))  # whole outputs, no chunks
    proposer.target_updated(1)
    again = sample(run, range(2))  # the same seeds: the policy has hardly changed
    assert outputs(first) == outputs(again)
    assert accepted(again) > 0.7 * sum(map(len, outputs(again)))


@pytest.mark.parametrize(
    ("arguments", "meets"),
    [
        ({"group": "a"}, True),
        ({"group": "a", "prompt": (9, *PROMPT[1:])}, True),  # a group can have several prompts
        ({"group": "b"}, False),
        ({"group": "a", "scope": "other"}, False),
        ({}, False),  # the group of the prompt
    ],
)
def test_groups_and_scopes_do_not_meet(arguments, meets):
    """A sample that repeats another one is drafted from it only if both are in one group and scope."""
    make, _ = grouped()
    run = engine(make)
    first = sample(run, [0], group="a")
    again = sample(run, [0], **arguments)
    assert outputs(again) == outputs(first)
    num_tokens = sum(map(len, outputs(again)))
    assert accepted(again) > 0.7 * num_tokens if meets else accepted(again) < 0.5 * num_tokens


def test_old_versions_leave_the_window():
    make, made = grouped(versions=2)
    run = engine(make)
    sample(run, [0])
    (proposer,) = made
    kept = proposer.groups.tokens()
    proposer.target_updated(1)
    assert proposer.groups.tokens() == kept
    sample(run, [1], group="other")
    proposer.target_updated(2)
    assert 0 < proposer.groups.tokens() <= kept
    proposer.target_updated(3)
    assert proposer.groups.tokens() == 0


def test_the_history_has_a_bound():
    make, made = grouped(history=100)
    sample(engine(make), range(6), limit=60)
    assert made[0].groups.tokens() <= 100


def test_removed_outputs_are_not_found():
    history = History(1000)
    one = history.learn("s", (1, 2), (3, 4, 5), version=1)
    two = history.learn("s", (1, 2), (3, 9, 9), version=2)
    assert len(history.continuations("s", (1, 2), 4)[0]) == 2
    history.remove([one, 77])
    (left,), _ = history.continuations("s", (1, 2), 4)
    assert left.outputs == [two]
    history.remove_before(3)
    assert history.continuations("s", (1, 2), 4) == ([], 0)
    assert history.learn("s", (1,), ()) is None


def test_expressions():
    assert parse_group_size("") == 10**6
    assert parse_group_size("5000") == parse_group_size("5000:4") == 5000
    for wrong in ("x", "0", "10:", "10:x", "10:0", "-1"):
        with pytest.raises(OutriderError, match=f"group:{wrong}|suffix:{wrong}"):
            parse_group_size(wrong)
