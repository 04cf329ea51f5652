"""The answer in words: short sentences, in the order in which they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from shlex import quote

from outrider.bench.memory import Footprint
from outrider.core.params import AUTO
from outrider.propose.expression import pasted, short
from outrider.tune.advice import WORTHWHILE, Advice
from outrider.tune.engines import elsewhere
from outrider.tune.figures import Case, Estimate

_LITTLE = 0.5  # rows: a draft that takes less is not worth a word on users


def sentences(advice: Advice, memory: Mapping[str, Footprint]) -> list[str]:
    """What to do, how sure that is, and what would change it."""
    held = memory[advice.best.way.proposer]
    return [
        _bottleneck(advice),
        _answer(advice),
        *_expected(advice),
        _batches(advice),
        *_price(advice, held),
        *_changes(advice),
        *_elsewhere(advice),
    ]


def said(estimate: Estimate) -> str:
    """1.52 (1.40 to 1.63)."""
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.2f}"
    return f"{estimate.value:.2f} ({estimate.low:.2f} to {estimate.high:.2f})"


def _bottleneck(advice: Advice) -> str:
    share = f"{advice.plain.prefill:.0%} of the time of plain decoding goes to reading prompts"
    most = f"no speculation can gain more than {advice.ceiling:.1f} times overall" if advice.ceiling else ""
    if advice.decoding:
        limit = f"; {most}" if advice.ceiling and advice.ceiling < 10 else ""
        return f"Decoding is the bottleneck: {share}{limit}."
    return f"Prefill is the bottleneck: {share}, and speculation does not help there; {most}."


def _answer(advice: Advice) -> str:
    way, overall = advice.best.way, advice.best.overall
    fastest = f"{short(way.proposer)} with k {way.k}"
    if advice.worth:
        fastest = f"{quote(pasted(way.proposer))} with k {way.k}"
        why = (
            " k auto was a little slower than a fixed one, and stops by itself where guesses stop paying."
            if advice.adaptive
            else ""
        )
        return f"Use {fastest}.{why}"
    if overall.value < WORTHWHILE:
        return f"Decode plainly: the fastest that was tried, {fastest}, makes it {said(overall)} times as fast overall."
    return (
        f"Decode plainly for now: {fastest} looks like {said(overall)} times as fast overall, and that may be chance."
        " Measure more prompts."
    )


def _expected(advice: Advice) -> Iterator[str]:
    best = advice.best
    if not advice.worth:
        return
    place = f"batch {best.way.batch} and temperature {best.way.temperature:g}"
    decoding = f", decoding alone {said(best.speedup)}" if best.speedup else ""
    unsure = "" if best.overall.low is not None else " One batch of prompts alone says nothing of how sure this is."
    inexact = "" if best.exact else " Its verifier is not exact: it changes the text."
    yield f"Expected speedup at {place}: {said(best.overall)} overall{decoding}.{unsure}{inexact}"


def _batches(advice: Advice) -> str:
    along, stops = advice.batches.speedups, advice.batches.stops
    if len(along) == 1:
        return f"Batch {along[0][0]} alone was measured; where it stops paying, --batch 1,8,32 would show."
    listed = ", ".join(f"{speedup:.2f} at batch {batch}" for batch, speedup in along)
    if not advice.worth:
        return f"Its speedups: {listed}."
    if stops is None:
        return f"It pays at all batches that were measured: {listed}."
    auto = ", where k auto mostly decodes plainly" if advice.best.way.k == AUTO else ""
    return f"From batch {stops} on it does not pay{auto}: {listed}."


def _price(advice: Advice, held: Footprint) -> Iterator[str]:
    if not held.draft_weights:
        yield f"{short(advice.best.way.proposer)} has no weights of its own, so no user is left out for it."
        return
    size = (held.draft_weights + held.draft_cache) / 1e6
    users = f"{held.draft_in_rows:.1f} users" if held.draft_in_rows >= _LITTLE else "less than one user"
    yield (
        f"Its draft takes {size:.0f} MB beside the target's {(held.target_weights + held.target_cache) / 1e6:.0f} MB:"
        f" the room of {users} of {held.context} tokens each."
    )


def _changes(advice: Advice) -> Iterator[str]:
    """What would change the answer."""
    best, way = advice.best, advice.best.way
    yield (
        f"A round takes {advice.needed_tau:.2f} times as long as a plain one, so it pays while a pass emits more than"
        f" {advice.needed_tau:.2f} tokens; here it emits {best.kept.tau:.2f}."
    )
    yield from _categories(best)
    yield from _phases(best)
    if advice.rival is not None and advice.close:
        rival = advice.rival
        yield (
            f"{short(rival.way.proposer)} with k {rival.way.k} is too close to tell apart, at"
            f" {said(rival.overall)} overall; more prompts would."
        )
    for plain, case in advice.others:
        other = case.way
        alike = (other.proposer, other.k) == (way.proposer, way.k)
        if alike and case.overall.value >= WORTHWHILE and advice.worth:
            continue
        where = f"At batch {plain.way.batch} and temperature {plain.way.temperature:g}"
        fastest = f"the fastest is {short(other.proposer)} with k {other.k}, {said(case.overall)} overall"
        yield f"{where} {fastest}." if case.overall.value >= WORTHWHILE else f"{where} nothing pays; {fastest}."


def _categories(best: Case) -> Iterator[str]:
    """Between which kinds of text it differs most."""
    known = {name: kept.speedup for name, kept in best.categories.items() if kept.speedup is not None}
    if len(known) > 1:
        low, high = min(known, key=known.__getitem__), max(known, key=known.__getitem__)
        yield (
            f"It depends on the text: decoding gains most on {high} ({known[high]:.2f}) and least on {low}"
            f" ({known[low]:.2f})."
        )
    elif len(best.categories) > 1:
        taus = {name: kept.tau for name, kept in best.categories.items()}
        low, high = min(taus, key=taus.__getitem__), max(taus, key=taus.__getitem__)
        yield f"It depends on the text: {taus[high]:.2f} tokens a pass on {high}, {taus[low]:.2f} on {low}."


def _phases(best: Case) -> Iterator[str]:
    taus = [kept.tau for kept in best.phases.values() if kept.tau]
    if len(taus) == len(best.phases) and max(taus) > 1.1 * min(taus):
        first, middle, last = taus
        yield (
            f"It depends on how long outputs are: {first:.2f} tokens a pass in their first third, {middle:.2f} in the"
            f" middle, {last:.2f} in the last."
        )


def _elsewhere(advice: Advice) -> Iterator[str]:
    if not advice.worth:
        return
    for each in elsewhere(advice.proposer, advice.fixed_k, stops=advice.batches.stops):
        if each.settings:
            yield f"{each.engine}: {each.settings} ({each.note})."
        else:
            yield f"{each.engine}: {each.note}."
