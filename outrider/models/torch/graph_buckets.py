"""The shapes for which passes are recorded, and which recorded pass can run a smaller one with padding."""

from outrider.models.torch.static_pass import Bucket

MAX_COLUMNS = 64  # tokens per sequence
MAX_TOKENS = 512  # tokens of a pass
MIN_LENGTH = 128  # cache entries of the shortest bucket, and the smallest step between buckets
_CHEAP_TOKENS = 64  # tokens that a pass can have in about the time of one, since it reads the same weights
_CHEAP_LENGTH = 512  # cache entries of a slot whose reading takes little time beside that of the weights
_CHEAP_ENTRIES = 4096  # the same of all slots


def covers(other: Bucket, bucket: Bucket) -> bool:
    """Return whether the pass of `other` can run `bucket` with padding, in little more time for each step."""
    same_kind = all(getattr(other, key) == getattr(bucket, key) for key in ("trees", "vocab"))
    same_kind &= bool(other.steps) == bool(bucket.steps)
    fits = all(getattr(other, key) >= getattr(bucket, key) for key in ("rows", "columns", "length", "steps"))
    cheap_tokens = max(_CHEAP_TOKENS, 2 * bucket.rows * bucket.columns)
    cheap_entries = max(_CHEAP_ENTRIES, 2 * bucket.rows * bucket.length)
    cheap = other.rows * other.columns <= cheap_tokens and other.rows * other.length <= cheap_entries
    return same_kind and fits and cheap and other.length <= max(_CHEAP_LENGTH, 2 * bucket.length)


def work(bucket: Bucket) -> tuple[int, int, int]:
    """Return what makes a pass slow, the most important first."""
    return bucket.steps, bucket.rows * bucket.columns, bucket.rows * bucket.length


def share_of_steps(bucket: Bucket, other: Bucket) -> float:
    """Return the steps of `bucket` over those of `other`; 1 for scoring passes, which have no steps."""
    return bucket.steps / other.steps if other.steps else 1.0


def describe(bucket: Bucket) -> str:
    """Return a bucket as text."""
    kind = f"draft of {bucket.steps} tokens" if bucket.steps else "pass"
    return f"the {kind} over {bucket.rows} x {bucket.columns} tokens and {bucket.length} cache entries"


def power(count: int, limit: int) -> int:
    """Return the smallest power of two that is at least `count`, capped at `limit`."""
    return min(1 << (count - 1).bit_length(), limit)


def round_up(length: int, limit: int) -> int:
    """Return the bucket length of `length`, capped at `limit`. From 512 on it is at most a quarter longer."""
    step = max(MIN_LENGTH, 1 << max((length - 1).bit_length() - 3, 0))
    return min(-(-length // step) * step, limit)


def lengths(length: int, limit: int) -> list[int]:
    """Return all bucket lengths up to that of `length`."""
    steps = [round_up(1, limit)]
    while steps[-1] < min(length, limit):
        steps.append(round_up(steps[-1] + 1, limit))
    return steps
