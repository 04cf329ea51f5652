"""Requests of a simulated fleet: at random times, in bursts, or from a recorded trace."""

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from outrider.core.text import read_text
from outrider.errors import OutriderError

_MAX_TOKENS = 10**7
_MAX_RATE = 1e6
_BURST_SHARE = 0.2  # share of the time that is a burst
_RANDOM: Mapping[str, int] = MappingProxyType({"poisson": 1, "bursts": 3})  # numbers of each kind of random arrivals


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request."""

    time: float  # seconds since the start
    prompt: int  # tokens, with the prefix
    output: int  # tokens
    prefix: str = ""  # name of a prefix that other requests share; "": none
    prefix_tokens: int = 0

    def __post_init__(self) -> None:
        if not self.time >= 0:
            raise OutriderError(f"a request arrives at {self.time}; use seconds of at least 0")
        for name, count in (("prompt", self.prompt), ("output", self.output)):
            if not 1 <= count <= _MAX_TOKENS:
                raise OutriderError(f"a request has {count} {name} tokens; use 1 to {_MAX_TOKENS}")
        if not 0 <= self.prefix_tokens < self.prompt:
            raise OutriderError(
                f"a request has {self.prefix_tokens} tokens of prefix and a prompt of"
                f" {self.prompt}; the prefix is shorter than the prompt"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """The lengths of random requests. Prompts and outputs have exponential lengths around their means."""

    prompt: int = 256  # mean tokens after the prefix
    output: int = 128  # mean tokens
    prefixes: int = 0  # number of shared prefixes; each request has one of them
    prefix_tokens: int = 0

    def draw(self, rng: random.Random, time: float) -> Arrival:
        prefix = f"prefix {rng.randrange(self.prefixes)}" if self.prefixes else ""
        shared = self.prefix_tokens if prefix else 0
        return Arrival(
            time=time,
            prompt=shared + 1 + int(rng.expovariate(1 / self.prompt)),
            output=1 + int(rng.expovariate(1 / self.output)),
            prefix=prefix,
            prefix_tokens=shared,
        )


def poisson(rate: float, seconds: float, lengths: Lengths, *, seed: int) -> Iterator[Arrival]:
    """Yield requests at independent random times, `rate` per second on average."""
    rng = random.Random(seed)
    time = rng.expovariate(rate)
    while time < seconds:
        yield lengths.draw(rng, time)
        time += rng.expovariate(rate)


def bursts(
    rate: float, peak: float, seconds: float, lengths: Lengths, *, period: float, seed: int
) -> Iterator[Arrival]:
    """Yield requests whose rate alternates: `peak` times the mean in a fifth of each period, and less in the rest.

    Args:
        rate: mean requests per second.
        peak: rate in a burst over the mean, from 1 to 5. With 5, all requests are in bursts.
        seconds: length of the trace.
        period: seconds from burst to burst.
        seed: of the random numbers.
    """
    rng = random.Random(seed)
    low = (1 - peak * _BURST_SHARE) / (1 - _BURST_SHARE)
    time = 0.0
    while True:
        # Thinning (Lewis and Shedler 1979): draw at the highest rate, and keep a share of the draws.
        time += rng.expovariate(rate * peak)
        if time >= seconds:
            return
        in_burst = time % period < _BURST_SHARE * period
        if in_burst or rng.random() < low / peak:
            yield lengths.draw(rng, time)


def read_trace(file: str) -> list[Arrival]:
    """Return the requests of a file of JSON lines, in the order of their times.

    A line has `time` in seconds, `prompt_tokens`, `output_tokens`, and may have `prefix` (a name) and `prefix_tokens`.

    Raises:
        OutriderError: the file cannot be read, or a line is invalid.
    """
    fix = "give a file of JSON lines, or poisson:RATE or bursts:RATE:PEAK:PERIOD"
    lines = read_text(file, f"the trace {file}", fix=fix).splitlines()
    arrivals = [_parse(file, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not arrivals:
        raise OutriderError(f"the trace {file} has no requests; write one JSON object per line")
    return sorted(arrivals, key=lambda arrival: arrival.time)


def _parse(file: str, number: int, line: str) -> Arrival:
    try:
        fields = json.loads(line)
        return Arrival(
            time=float(fields["time"]),
            prompt=int(fields["prompt_tokens"]),
            output=int(fields["output_tokens"]),
            prefix=str(fields.get("prefix", "")),
            prefix_tokens=int(fields.get("prefix_tokens", 0)),
        )
    except OutriderError as error:
        raise OutriderError(f"line {number} of {file}: {error}") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        reason = f"there is no {error.args[0]}" if isinstance(error, KeyError) else str(error)
        raise OutriderError(
            f"line {number} of {file} is not a request ({reason}); write time, prompt_tokens and output_tokens"
        ) from None


def is_trace(text: str) -> bool:
    """Return whether `--arrivals` names a file."""
    return text.partition(":")[0] not in _RANDOM


def parse_arrivals(text: str, *, seconds: float, lengths: Lengths, seed: int, replicas: int = 1) -> list[Arrival]:
    """Return the requests of "poisson:RATE", "bursts:RATE:PEAK:PERIOD" or the name of a trace.

    Args:
        text: the value of `--arrivals`. RATE is that of one replica.
        seconds: in which random requests arrive.
        lengths: of random requests.
        seed: of random requests.
        replicas: multiplies the rate; a trace is not multiplied.

    Raises:
        OutriderError: the text is none of them, or a number is out of range.
    """
    if is_trace(text):
        return read_trace(text)
    name, *numbers = text.split(":")
    try:
        values = list(map(float, numbers))
    except ValueError:
        values = []
    if len(values) != _RANDOM[name] or not all(0 < value < _MAX_RATE for value in values):
        raise OutriderError(f"--arrivals is {text!r}; write poisson:RATE, bursts:RATE:PEAK:PERIOD, or a trace's file")
    rate = values[0] * replicas
    if name == "poisson":
        return list(poisson(rate, seconds, lengths, seed=seed))
    _, peak, period = values
    if not 1 <= peak <= 1 / _BURST_SHARE:
        raise OutriderError(f"the peak of the bursts is {peak:g} times the mean; use 1 to {1 / _BURST_SHARE:g}")
    return list(bursts(rate, peak, seconds, lengths, period=period, seed=seed))
