"""Made-up trials of `outrider tune`."""

from outrider.core.stats import Stats
from outrider.lab.common.clock import DecodeSpeed
from outrider.lab.common.trial import Trial, Variant


def trial(variant, batch_number=0, *, seconds=1.0, prefill=0.1, tokens=10, category="code", accepted=(2, 1)):
    stats = Stats(
        rounds=5,
        passes=5,
        output_tokens=tokens,
        draft_tokens=10,
        offered=(5, 5),
        reached=(5, accepted[0]),
        accepted=accepted,
        target_seconds=seconds - prefill,
    )
    return Trial(
        variant=variant,
        repeat=0,
        batch_number=batch_number,
        tokens=tokens,
        seconds=seconds,
        prefill_seconds=prefill,
        speed=DecodeSpeed(tokens=tokens - 1, seconds=seconds - prefill),
        gaps=(),
        stats=stats,
        categories={category: stats},
        output_thirds=(stats, stats, stats),
    )


def make_variant(proposer="", k=0, batch=1, temperature=0.0):
    return Variant(proposer=proposer, k=k, batch=batch, temperature=temperature)


def make_trials(speeds, *, prefill=0.1, spread=0.0, batches=4):
    """Return trials of variants with these decoding speeds, relative to plain decoding.

    `spread` is the difference in speed between consecutive batches of prompts.
    """
    trials = []
    for batch, temperature in dict.fromkeys((each.batch, each.temperature) for each in speeds):
        condition_speeds = {make_variant(batch=batch, temperature=temperature): 1.0}
        for variant, speed in speeds.items():
            if (variant.batch, variant.temperature) == (batch, temperature):
                condition_speeds[variant] = speed
        for number in range(batches):
            for variant, speed in condition_speeds.items():
                speed += 0 if variant.plain else spread * (number - (batches - 1) / 2)
                trials.append(trial(variant, number, prefill=prefill, seconds=prefill + 1 / speed))
    return trials
