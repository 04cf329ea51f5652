"""Writes the recommendation as sentences."""

from collections.abc import Iterator, Mapping
from shlex import quote

from outrider.core.params import AUTO
from outrider.drafting.propose.expression import command_line_form, short
from outrider.lab.common.memory import MemoryUse
from outrider.lab.common.trial import label
from outrider.lab.tune.advice import Advice
from outrider.lab.tune.candidate import WORTHWHILE
from outrider.lab.tune.engines import other_engines
from outrider.lab.tune.figures import Case

_MIN_SEQS = 0.5  # below this number of sequences the memory of a draft is called "less than one sequence"
_MAX_SPEEDUP = 10  # above it the limit that prefill sets is not mentioned
_THIRDS_RATIO = 1.1  # the output thirds are mentioned if tau differs by more than this factor


def summary(advice: Advice, memory: Mapping[str, MemoryUse]) -> list[str]:
    """Return what to do, how certain that is, and what would change it."""
    use = memory[advice.best.label]
    return [
        _bottleneck(advice),
        _answer(advice),
        *_expected(advice),
        _batches(advice),
        *_memory(advice, use),
        *_changes(advice),
        *_other_engines(advice),
    ]


def _bottleneck(advice: Advice) -> str:
    share = f"{advice.plain.prefill_share:.0%} of the time of plain decoding is prefill"
    limit = f"speculation can gain at most a factor of {advice.max_speedup:.1f} overall" if advice.max_speedup else ""
    if advice.decoding:
        suffix = f"; {limit}" if advice.max_speedup and advice.max_speedup < _MAX_SPEEDUP else ""
        return f"Decoding is the bottleneck: {share}{suffix}."
    return f"Prefill is the bottleneck: {share}, which speculation does not shorten; {limit}."


def _answer(advice: Advice) -> str:
    choice = advice.choice
    overall = choice.overall
    if advice.worth:
        reason = ""
        if advice.adaptive:
            reason = " It was a little slower than a fixed k, but it stops where drafting does not pay."
        quantized = "" if choice.draft_quantize is None else f" and --draft-quantize {choice.draft_quantize}"
        return f"Use {quote(command_line_form(choice.proposer))} with k {choice.k}{quantized}.{reason}"
    fastest = f"{label(short(choice.proposer), choice.draft_quantize)} with k {choice.k}"
    if overall.value < WORTHWHILE:
        return f"Use plain decoding: the fastest proposer, {fastest}, is {overall.text} times as fast overall."
    if choice.loses_at:
        slow = choice.loses_at[0]
        return (
            f"Use plain decoding: the fastest proposer, {fastest}, is {overall.text} times as fast overall,"
            f" but {choice.speedups[slow].text} at temperature {slow:g}."
        )
    return (
        f"Use plain decoding for now: {fastest} looks {overall.text} times as fast overall, which may be"
        " chance. Measure more prompts."
    )


def _expected(advice: Advice) -> Iterator[str]:
    if not advice.worth:
        return
    for case in advice.cases:
        condition = f"batch {case.batch} and temperature {case.temperature:g}"
        decoding = f", decoding alone {case.speedup.text}" if case.speedup else ""
        no_interval = "" if case.overall.low is not None else " With one batch of prompts there is no interval."
        lossy = "" if case.exact else " Its verifier is lossy: it changes the output distribution."
        yield f"Expected speedup at {condition}: {case.overall.text} overall{decoding}.{no_interval}{lossy}"


def _batches(advice: Advice) -> str:
    speedups = advice.batches.speedups
    stops = advice.batches.stops_paying_at_batch
    if len(speedups) == 1:
        return f"Only batch {speedups[0][0]} was measured. Use --batch 1,8,32 to see where speculation stops paying."
    listed = ", ".join(f"{speedup:.2f} at batch {batch}" for batch, speedup in speedups)
    if not advice.worth:
        return f"Its speedups: {listed}."
    if stops is None:
        return f"It pays at all measured batch sizes: {listed}."
    auto = ", and k auto mostly decodes plainly there" if advice.best.k == AUTO else ""
    return f"It does not pay from batch {stops} on{auto}: {listed}."


def _memory(advice: Advice, use: MemoryUse) -> Iterator[str]:
    if not use.draft_weight_bytes:
        yield f"{short(advice.best.proposer)} has no weights, so it takes no memory from the KV cache."
        return
    draft_mb = (use.draft_weight_bytes + use.draft_cache_bytes) / 1e6
    target_mb = (use.target_weight_bytes + use.target_cache_bytes) / 1e6
    seqs = "less than one sequence"
    if use.draft_in_sequences >= _MIN_SEQS:
        seqs = f"{use.draft_in_sequences:.1f} sequences"
    yield (
        f"The draft takes {draft_mb:.0f} MB in addition to the target's {target_mb:.0f} MB: the memory of {seqs}"
        f" of {use.context} tokens."
    )


def _changes(advice: Advice) -> Iterator[str]:
    """Yield what would change the recommendation."""
    best = advice.best
    yield (
        f"A round takes {advice.break_even_tau:.2f} times as long as a plain one, so it pays if a pass emits more"
        f" than {advice.break_even_tau:.2f} tokens; here it emits {best.total.tau:.2f}."
    )
    yield from _categories(best)
    yield from _output_thirds(best)
    if advice.runner_up is not None and advice.close:
        runner_up = advice.runner_up
        yield (
            f"{short(runner_up.proposer)} with k {runner_up.k} is too close to decide, at"
            f" {runner_up.overall.text} overall; measure more prompts to decide."
        )
    for plain, case in advice.others:
        same_variant = (case.proposer, case.k) == (best.proposer, best.k)
        if same_variant and case.overall.value >= WORTHWHILE and advice.worth:
            continue
        condition = f"At batch {plain.batch} and temperature {plain.temperature:g}"
        fastest = f"the fastest is {short(case.proposer)} with k {case.k}, {case.overall.text} overall"
        no_gain = "" if case.overall.value >= WORTHWHILE else " no proposer pays;"
        yield f"{condition}{no_gain} {fastest}."


def _categories(best: Case) -> Iterator[str]:
    """Yield the categories with the highest and the lowest gain."""
    speedups = {name: each.speedup for name, each in best.categories.items() if each.speedup is not None}
    if len(speedups) > 1:
        low = min(speedups, key=speedups.__getitem__)
        high = max(speedups, key=speedups.__getitem__)
        yield (
            f"It depends on the text: decoding gains most on {high} ({speedups[high]:.2f}) and least on {low}"
            f" ({speedups[low]:.2f})."
        )
    elif len(best.categories) > 1:
        taus = {name: each.tau for name, each in best.categories.items()}
        low = min(taus, key=taus.__getitem__)
        high = max(taus, key=taus.__getitem__)
        yield f"It depends on the text: {taus[high]:.2f} tokens per pass on {high}, {taus[low]:.2f} on {low}."


def _output_thirds(best: Case) -> Iterator[str]:
    taus = [each.tau for each in best.output_thirds.values() if each.tau]
    if len(taus) == len(best.output_thirds) and max(taus) > _THIRDS_RATIO * min(taus):
        first, middle, last = taus
        yield (
            f"It depends on the output length: {first:.2f} tokens per pass in the first third of an output,"
            f" {middle:.2f} in the middle, {last:.2f} in the last."
        )


def _other_engines(advice: Advice) -> Iterator[str]:
    if not advice.worth:
        return
    for each in other_engines(advice.proposer, advice.fixed_k, stops=advice.batches.stops_paying_at_batch):
        if each.settings:
            yield f"{each.engine}: {each.settings} ({each.note})."
        else:
            yield f"{each.engine}: {each.note}."
