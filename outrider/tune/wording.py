"""The answer in words: short sentences, in the order in which they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from shlex import quote

from outrider.bench.memory import MemoryUse
from outrider.core.params import AUTO
from outrider.propose.expression import pasted, short
from outrider.tune.advice import WORTHWHILE, Advice
from outrider.tune.engines import other_engines
from outrider.tune.figures import Case, Estimate

_LITTLE = 0.5  # rows: a draft that takes less is not worth a word on users


def summary(advice: Advice, memory: Mapping[str, MemoryUse]) -> list[str]:
    """What to do, how sure that is, and what would change it."""
    held = memory[advice.best.variant.proposer]
    return [
        _bottleneck(advice),
        _answer(advice),
        *_expected(advice),
        _batches(advice),
        *_price(advice, held),
        *_changes(advice),
        *_other_engines(advice),
    ]


def join_sentences(estimate: Estimate) -> str:
    """1.52 (1.40 to 1.63)."""
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.2f}"
    return f"{estimate.value:.2f} ({estimate.low:.2f} to {estimate.high:.2f})"


def _bottleneck(advice: Advice) -> str:
    share = f"{advice.plain.prefill_share:.0%} of the time of plain decoding is prefill"
    most = f"speculation can gain at most a factor of {advice.max_speedup:.1f} overall" if advice.max_speedup else ""
    if advice.decoding:
        limit = f"; {most}" if advice.max_speedup and advice.max_speedup < 10 else ""
        return f"Decoding is the bottleneck: {share}{limit}."
    return f"Prefill is the bottleneck: {share}, which speculation does not shorten; {most}."


def _answer(advice: Advice) -> str:
    way, overall = advice.best.variant, advice.best.overall
    fastest = f"{short(way.proposer)} with k {way.k}"
    if advice.worth:
        fastest = f"{quote(pasted(way.proposer))} with k {way.k}"
        why = (
            " It was a little slower than a fixed k, but it stops where drafting does not pay."
            if advice.adaptive
            else ""
        )
        return f"Use {fastest}.{why}"
    if overall.value < WORTHWHILE:
        return (
            f"Use plain decoding: the fastest proposer, {fastest}, is {join_sentences(overall)} times as fast overall."
        )
    return (
        f"Use plain decoding for now: {fastest} looks {join_sentences(overall)} times as fast overall, which may be"
        " chance."
        " Measure more prompts."
    )


def _expected(advice: Advice) -> Iterator[str]:
    best = advice.best
    if not advice.worth:
        return
    place = f"batch {best.variant.batch} and temperature {best.variant.temperature:g}"
    decoding = f", decoding alone {join_sentences(best.speedup)}" if best.speedup else ""
    unsure = "" if best.overall.low is not None else " With one batch of prompts there is no interval."
    inexact = "" if best.exact else " Its verifier is lossy: it changes the output distribution."
    yield f"Expected speedup at {place}: {join_sentences(best.overall)} overall{decoding}.{unsure}{inexact}"


def _batches(advice: Advice) -> str:
    along, stops = advice.batches.speedups, advice.batches.stops_paying_at_batch
    if len(along) == 1:
        return f"Only batch {along[0][0]} was measured. Use --batch 1,8,32 to see where speculation stops paying."
    listed = ", ".join(f"{speedup:.2f} at batch {batch}" for batch, speedup in along)
    if not advice.worth:
        return f"Its speedups: {listed}."
    if stops is None:
        return f"It pays at all measured batch sizes: {listed}."
    auto = ", and k auto mostly decodes plainly there" if advice.best.variant.k == AUTO else ""
    return f"It does not pay from batch {stops} on{auto}: {listed}."


def _price(advice: Advice, held: MemoryUse) -> Iterator[str]:
    if not held.draft_weights:
        yield f"{short(advice.best.variant.proposer)} has no weights, so it takes no memory from the KV cache."
        return
    size = (held.draft_weights + held.draft_cache) / 1e6
    room = "less than one sequence"
    if held.draft_in_sequences >= _LITTLE:
        room = f"{held.draft_in_sequences:.1f} sequences"
    yield (
        f"The draft takes {size:.0f} MB beside the target's {(held.target_weights + held.target_cache) / 1e6:.0f} MB:"
        f" the memory of {room} of {held.context} tokens."
    )


def _changes(advice: Advice) -> Iterator[str]:
    """Yield what would change the answer."""
    best, way = advice.best, advice.best.variant
    yield (
        f"A round takes {advice.break_even_tau:.2f} times as long as a plain one, so it pays if a pass emits more"
        f" than {advice.break_even_tau:.2f} tokens; here it emits {best.total.tau:.2f}."
    )
    yield from _categories(best)
    yield from _output_thirds(best)
    if advice.runner_up is not None and advice.close:
        rival = advice.runner_up
        yield (
            f"{short(rival.variant.proposer)} with k {rival.variant.k} is too close to decide, at"
            f" {join_sentences(rival.overall)} overall; more prompts would tell."
        )
    for plain, case in advice.others:
        other = case.variant
        alike = (other.proposer, other.k) == (way.proposer, way.k)
        if alike and case.overall.value >= WORTHWHILE and advice.worth:
            continue
        where = f"At batch {plain.variant.batch} and temperature {plain.variant.temperature:g}"
        fastest = f"the fastest is {short(other.proposer)} with k {other.k}, {join_sentences(case.overall)} overall"
        yield f"{where} {fastest}." if case.overall.value >= WORTHWHILE else f"{where} no proposer pays; {fastest}."


def _categories(best: Case) -> Iterator[str]:
    """Yield the kinds of text with the highest and the lowest gain."""
    known = {name: each.speedup for name, each in best.categories.items() if each.speedup is not None}
    if len(known) > 1:
        low, high = min(known, key=known.__getitem__), max(known, key=known.__getitem__)
        yield (
            f"It depends on the text: decoding gains most on {high} ({known[high]:.2f}) and least on {low}"
            f" ({known[low]:.2f})."
        )
    elif len(best.categories) > 1:
        taus = {name: each.tau for name, each in best.categories.items()}
        low, high = min(taus, key=taus.__getitem__), max(taus, key=taus.__getitem__)
        yield f"It depends on the text: {taus[high]:.2f} tokens per pass on {high}, {taus[low]:.2f} on {low}."


def _output_thirds(best: Case) -> Iterator[str]:
    taus = [each.tau for each in best.output_thirds.values() if each.tau]
    if len(taus) == len(best.output_thirds) and max(taus) > 1.1 * min(taus):
        first, middle, last = taus
        yield (
            f"It depends on the output length: {first:.2f} tokens per pass in their first third, {middle:.2f} in the"
            f" middle, {last:.2f} in the last."
        )


def _other_engines(advice: Advice) -> Iterator[str]:
    if not advice.worth:
        return
    for each in other_engines(advice.proposer, advice.fixed_k, stops=advice.batches.stops_paying_at_batch):
        if each.settings:
            yield f"{each.engine}: {each.settings} ({each.note})."
        else:
            yield f"{each.engine}: {each.note}."
