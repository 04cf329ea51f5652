"""API keys with names and quotas."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from time import monotonic
from typing import Any

from outrider.errors import OutriderError
from outrider.serve.settings import Settings

_FIELDS = frozenset({"name", "key", "tokens_per_minute"})


@dataclass(slots=True)
class Quota:
    """A token bucket. It holds the tokens of one minute, and fills evenly.

    Prompt and output tokens are charged when a request ends, because they are not known before. The
    bucket may then be below 0. New requests are rejected until it is above 0 again.
    """

    tokens_per_minute: float
    clock: Callable[[], float] = monotonic
    _tokens: float = field(init=False)
    _time: float = field(init=False)

    def __post_init__(self) -> None:
        self._tokens = self.tokens_per_minute
        self._time = self.clock()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy in another process has a full bucket, because the clocks of processes differ."""
        return type(self), (self.tokens_per_minute, self.clock)

    def wait_seconds(self) -> float:
        """Return the seconds until the next request is accepted; 0: now."""
        self._fill()
        return 0.0 if self._tokens > 0 else (1 - self._tokens) * 60 / self.tokens_per_minute

    def charge(self, tokens: int) -> None:
        """Take the tokens of a request."""
        self._fill()
        self._tokens -= tokens

    def _fill(self) -> None:
        now = self.clock()
        self._tokens = min(
            self._tokens + (now - self._time) * self.tokens_per_minute / 60, float(self.tokens_per_minute)
        )
        self._time = now


@dataclass(slots=True, kw_only=True)
class ApiKey:
    """A key of a client. Only its digest is kept."""

    name: str
    digest: bytes
    quota: Quota | None = None  # None: no limit

    @classmethod
    def of(cls, key: str, *, name: str = "", tokens_per_minute: float | None = None) -> ApiKey:
        quota = None if tokens_per_minute is None else Quota(tokens_per_minute)
        return cls(name=name, digest=digest_of(key.encode()), quota=quota)

    def busy_message(self) -> str:
        """Return why a request is rejected now; "": it is not."""
        if self.quota is None or not (seconds := self.quota.wait_seconds()):
            return ""
        return (
            f"the key {self.name!r} has used its {self.quota.tokens_per_minute:g} tokens per"
            f" minute; try again in {ceil(seconds)} seconds"
        )


def find_key(keys: Sequence[ApiKey], authorization: bytes) -> ApiKey | None:
    """Return the key of an Authorization header; None: it is missing or wrong."""
    scheme, _, key = authorization.partition(b" ")
    digest = digest_of(key.strip())
    # Compare with every key in constant time, so that the time of a response reveals nothing about
    # the keys.
    matches = [each for each in keys if hmac.compare_digest(digest, each.digest)]
    return matches[0] if matches and scheme.lower() == b"bearer" else None


def digest_of(key: bytes) -> bytes:
    """Return the digest of a key."""
    return hashlib.sha256(key).digest()


def all_keys(settings: Settings) -> list[ApiKey]:
    """Return the keys of `--api-key` and `--api-keys`.

    Raises:
        OutriderError: the file of `--api-keys` is not usable.
    """
    keys = list(map(ApiKey.of, settings.api_key or ()))
    return keys + (read_keys(settings.api_keys) if settings.api_keys else [])


def read_keys(file: str) -> list[ApiKey]:
    """Return the keys of a JSON file: a list of objects with name, key, and optionally tokens_per_minute.

    Raises:
        OutriderError: the file cannot be read, or an entry is invalid. The message contains no key.
    """
    try:
        entries = json.loads(Path(file).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not JSON"
        raise OutriderError(
            f'--api-keys {file} cannot be read ({reason}); write [{{"name": "ci", "key": "...", "tokens_per_minute":'
            " 60000}]"
        ) from None
    if not isinstance(entries, list) or not entries:
        raise OutriderError(f"--api-keys {file} has no list of keys; write a JSON list of objects with name and key")
    keys = [_parse(file, number, entry) for number, entry in enumerate(entries, 1)]
    for what, values in (("name", [key.name for key in keys]), ("key", [key.digest for key in keys])):
        if len(set(values)) < len(values):
            raise OutriderError(f"two entries of --api-keys {file} have the same {what}; make them different")
    return keys


def _parse(file: str, number: int, entry: Any) -> ApiKey:
    where = f"entry {number} of --api-keys {file}"
    if not isinstance(entry, dict) or not {"name", "key"} <= set(entry) <= _FIELDS:
        raise OutriderError(f"{where} is not an object with name and key; tokens_per_minute is the only other field")
    name, key, limit = entry["name"], entry["key"], entry.get("tokens_per_minute")
    if not all(isinstance(text, str) and text.strip() for text in (name, key)):
        raise OutriderError(f"{where} has an empty name or key; write both as text")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 < limit < 1e12):
        raise OutriderError(f"{where} has the limit {limit!r}; use tokens_per_minute above 0, or leave it out")
    return ApiKey.of(key.strip(), name=name, tokens_per_minute=limit)
