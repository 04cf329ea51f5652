"""A round that raises costs nobody anything but the row that it was raised for."""

from __future__ import annotations

import itertools

import pytest

from outrider.core.params import SamplingParams
from outrider.core.types import FinishReason, Request
from outrider.propose.lookup.ngram import NgramProposer
from outrider.testing import ToyTarget
from outrider.testing.toy_target import ToyCache
from outrider.verify.rules import EXACT
from tests.cache.test_replay import toy_prompts
from tests.helpers.conformance import EVERY
from tests.helpers.engines import make_engine, outputs, run

COUNT, LIMIT, CURSED = 6, 24, 2
SOME = ("none", "ngram", "model", "text draft", "suffix", "recycle", "lookahead", "switch", "merge", "tree")


class Cursed(ToyTarget):
    """Raises for one request, from its fifth token on; and for any guess once in a while, if it is `touchy`."""

    def __init__(self, *, touchy: bool = False) -> None:
        super().__init__(spread=3.0)
        self.calls, self.touchy = itertools.count(1), touchy

    def score(self, batch, draft, first=-1):
        if any(row.request.id == CURSED and row.num_output_tokens >= 5 for row in batch.seqs) and not self.touchy:
            raise RuntimeError("cursed")
        if self.touchy and draft.size and next(self.calls) % 3 == 0:
            raise RuntimeError("touched")
        return super().score(batch, draft, first)


def lives(engine, params, *, rows=COUNT):
    """Run to the end, whatever is raised; the rows by request, and the rounds that raised."""
    for i, prompt in enumerate(toy_prompts(rows)):
        engine.add(
            Request(id=i, prompt_token_ids=tuple(prompt), params=params, seed=i, end_ids=frozenset(), max_tokens=LIMIT)
        )
    done, raised = {}, 0
    while engine.busy():
        try:
            rows = engine.step()
        except Exception as error:
            raised += 1
            rows = engine.recover(error)
        done |= {row.request.id: row for row in rows if row.finish_reason}
    return done, raised


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", SOME)
def test_the_guilty_row_alone_ends(name, temperature):
    params = SamplingParams(temperature=temperature, max_tokens=LIMIT)
    plain, _ = lives(make_engine(ToyTarget(spread=3.0), EVERY["none"], rows=4), params)
    engine = make_engine(Cursed(), EVERY[name], rows=4)
    done, raised = lives(engine, params)
    assert sorted(done) == list(range(COUNT))
    assert raised == 1
    for i, row in done.items():
        wanted, (got,) = outputs([plain[i]])[0], outputs([row])
        if i == CURSED:
            assert (row.finish_reason, row.error) == (FinishReason.ERROR, "the engine failed: cursed")
            assert got == wanted[: len(got)]
            assert len(got) < LIMIT
        else:
            assert row.finish_reason is FinishReason.LENGTH
            assert got == wanted
    assert sum(row.num_output_tokens for row in done.values()) == engine.stats.output_tokens


@pytest.mark.parametrize("name", SOME)
def test_a_round_that_raises_with_guesses_is_taken_without(name):
    params = SamplingParams(temperature=0.8, max_tokens=LIMIT)
    plain, _ = lives(make_engine(ToyTarget(spread=3.0), EVERY["none"], rows=4), params)
    done, raised = lives(make_engine(Cursed(touchy=True), EVERY[name], rows=4), params)
    assert (raised > 0) == (name != "none")
    assert {i: outputs([row]) for i, row in done.items()} == {i: outputs([row]) for i, row in plain.items()}


def test_a_commit_that_raises_ends_the_rows_of_its_round(monkeypatch):
    engine = make_engine(ToyTarget(spread=3.0), NgramProposer, rows=4)
    commit, calls = ToyCache.commit, itertools.count(1)

    def broken(self, round):
        if next(calls) == 5:
            raise RuntimeError("half of it")
        commit(self, round)

    monkeypatch.setattr(ToyCache, "commit", broken)
    done, raised = lives(engine, SamplingParams(max_tokens=LIMIT))
    ends = [done[i].finish_reason for i in range(COUNT)]
    assert raised == 1
    assert ends == [FinishReason.ERROR] * 4 + [FinishReason.LENGTH] * 2


def test_where_no_round_had_begun_there_is_nothing_to_recover():
    with pytest.raises(RuntimeError, match="early"):
        make_engine(ToyTarget(), NgramProposer).recover(RuntimeError("early"))


@pytest.mark.parametrize("name", ["ngram", "model", "merge"])
def test_rows_of_one_batch_have_rules_of_their_own(name):
    rules = [rule for rule in EXACT if name != "merge" or EXACT[rule].trees]
    params = [SamplingParams(temperature=0.9, seed=3, verifier=rule, max_tokens=LIMIT) for rule in rules]
    prompts = toy_prompts(len(rules))
    together = outputs(run(make_engine(ToyTarget(), EVERY[name]), prompts, params, limit=LIMIT))
    for i, rule in enumerate(rules):
        engine = make_engine(ToyTarget(), EVERY[name])
        plain = [SamplingParams(temperature=0.9, seed=3, verifier=rule, max_tokens=LIMIT)] * len(rules)
        alone = outputs(run(engine, prompts, plain, limit=LIMIT))
        if rule in ("walk", "coupled"):  # elsewhere guesses learned from the others' rounds
            assert together[i] == alone[i], rule
    assert len({tuple(each) for each in together}) > 1
