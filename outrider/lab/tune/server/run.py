"""Measures a running server at several loads, with and without speculation, and reads its metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from types import MappingProxyType
from typing import Any, NamedTuple

from rich.console import Console

from outrider.core.params import SamplingParams
from outrider.core.prompts import Prompt, read_prompts
from outrider.errors import OutriderError
from outrider.lab.client.metrics import Speculation, read_speculation
from outrider.lab.client.server import Refused, Server, connect, find_model, retries_text
from outrider.lab.tune.server.advice import Load, advise, best_k
from outrider.lab.tune.server.settings import ServerOptions
from outrider.lab.tune.settings import Settings
from outrider.runtime.machine import commit, versions
from outrider.runtime.progress import stage
from outrider.runtime.report.console import NONE, new_table, print_plain

# Fields of a request that switch speculation off, for the servers that have one. llama.cpp of October 2026 ignores its
# field speculative.n_max.
_OFF: Mapping[str, Mapping[str, Any]] = MappingProxyType({"Outrider": {"k": 0}})
_PER_WORKER = 4  # requests for each that runs at a time
_WARM_UP = 8  # tokens of the first request, which is not measured


def run_server_tune(settings: Settings, options: ServerOptions) -> dict[str, Any]:
    """Measure a server.

    Args:
        settings: the prompts, and the loads: its batches are requests at a time.
        options: the server, and a second one without speculation.

    Returns:
        The JSON document.

    Raises:
        OutriderError: a number is out of range, or the server cannot be reached, lists no model, or has no metrics and
            no baseline.
    """
    temperature, *others = settings.temperatures
    if others:
        several = ",".join(f"{each:g}" for each in settings.temperatures)
        raise OutriderError(f"--temperature is {several}, and --server measures one temperature; give one")
    max_tokens = settings.max_tokens
    SamplingParams(temperature=temperature, max_tokens=max_tokens)  # raises if one is out of range
    prompts = read_prompts(settings.prompts, limit=settings.limit)
    measure = _Measure(options, prompts, temperature, max_tokens, settings.seed)
    with stage("measuring the server"):
        measured = asyncio.run(measure.run(settings.batches))
    engine = measured.engine
    return {
        "benchmark": "outrider tune --server",
        "server": options.server,
        "baseline": options.baseline,
        "model": measured.model,
        "engine": engine or None,
        "temperature": temperature,
        "max_tokens": max_tokens,
        "loads": list(map(_load_dict, measured.loads)),
        "retries": measured.retries,
        "advice": advise(measured.loads, engine, configured=measured.configured),
        "versions": versions(),
        "commit": commit(),
    }


def show(document: dict[str, Any], console: Console) -> None:
    """Print the loads and the advice."""
    name = f" ({document['engine']})" if document["engine"] else ""
    table = new_table(f"{document['model']} at {document['server']}{name}, temperature {document['temperature']:g}")
    for heading in ("requests at a time", "tokens/s", "without speculation", "speedup", "tau", "by position, %", "k"):
        table.add_column(heading, justify="right")
    for load in document["loads"]:
        reach = " ".join(f"{100 * share:.0f}" for share in load["accepted_by_position"])
        table.add_row(
            str(load["concurrency"]),
            f"{load['tokens_per_s']:.1f}",
            _number(load["plain_tokens_per_s"], 1),
            _number(load["speedup"], 2),
            _number(load["tau"], 2),
            reach or NONE,
            NONE if load["best_k"] is None else str(load["best_k"]),
        )
    console.print(table)
    if document["retries"]:
        print_plain(console, retries_text(document["retries"]))
    for line in document["advice"]:
        print_plain(console, f"- {line}")


class _Measured(NamedTuple):
    """The measurements on a server."""

    engine: str  # "" without metrics of a known one
    model: str
    loads: list[Load]
    retries: int  # of requests whose idle connection was closed, to both servers
    configured: bool | None  # whether the server was started with speculation; None: it does not say


class _Measure:
    """One measurement."""

    def __init__(
        self, options: ServerOptions, prompts: Sequence[Prompt], temperature: float, max_tokens: int, seed: int
    ) -> None:
        self._options = options
        self._prompts = prompts
        self._params = {"temperature": temperature, "max_tokens": max_tokens, "seed": seed}

    async def run(self, batches: Sequence[int]) -> _Measured:
        options = self._options
        assert options.server is not None
        async with connect(options.server, api_key=options.api_key, timeout=options.timeout) as server:
            model = await find_model(server, options.model)
            before = await _scrape(server)
            engine = before.engine if before else ""
            if before is None and options.baseline is None:
                raise OutriderError(
                    f"{server.url.removesuffix('/v1')} has no /metrics of a known engine; start the server with them"
                    " (llama.cpp: --metrics, SGLang: --enable-metrics, vLLM: without --disable-log-stats), or give"
                    " --baseline URL to measure the gain alone"
                )
            peer = _Peer(server, model, {})
            retries = 0
            if options.baseline is not None:
                async with connect(options.baseline, api_key=options.api_key, timeout=options.timeout) as other:
                    baseline = _Peer(other, await find_model(other, None), {})
                    loads = await self._loads(peer, baseline, batches)
                    retries = other.retries
            else:
                off = _OFF.get(engine)
                loads = await self._loads(peer, None if off is None else _Peer(server, model, off), batches)
            configured = await _configured(server, engine, before)
            return _Measured(engine, model, loads, retries + server.retries, configured)

    async def _loads(self, peer: _Peer, plain: _Peer | None, batches: Sequence[int]) -> list[Load]:
        for each in (peer, plain):
            if each is not None:
                await self._work(each, 1, range(1), max_tokens=_WARM_UP)
        return [await self._load(peer, plain, concurrency) for concurrency in batches]

    async def _load(self, peer: _Peer, plain: _Peer | None, concurrency: int) -> Load:
        """Return the figures of one load.

        One half of the requests runs with speculation, then all without it, then the other half with it. A drift of
        the machine, and prompts that a server has cached, affect both alike.
        """
        count = self._options.num_requests or _PER_WORKER * concurrency
        half = -(-count // 2)
        first = range(half)
        second = range(half, count)
        before = await _scrape(peer.server)
        speculative = await self._work(peer, concurrency, first)
        paused = await _scrape(peer.server)
        without = _NO_WORK
        if plain is not None:
            without = await self._work(plain, concurrency, first) + await self._work(plain, concurrency, second)
        continued = await _scrape(peer.server)
        speculative += await self._work(peer, concurrency, second)
        after = await _scrape(peer.server)
        return Load(
            concurrency=concurrency,
            tokens_per_s=speculative.rate,
            plain_tokens_per_s=without.rate if plain is not None else None,
            speculation=_counted(before, paused, continued, after),
        )

    async def _work(self, peer: _Peer, concurrency: int, requests: range, *, max_tokens: int | None = None) -> _Work:
        """Complete the requests with these numbers, `concurrency` at a time, and return their tokens and seconds."""
        numbers = iter(requests)
        tokens = 0

        async def work() -> None:
            nonlocal tokens
            for number in numbers:  # all workers share this iterator
                body = self._params | ({"max_tokens": max_tokens} if max_tokens else {})
                tokens += await peer.complete(self._prompts[number % len(self._prompts)], body)

        began = perf_counter()
        await asyncio.gather(*(work() for _ in range(min(concurrency, len(requests)))))
        if requests and not tokens:
            raise OutriderError(f"{peer.server.url} returned no tokens; check --model and --prompts")
        return _Work(tokens=tokens, seconds=perf_counter() - began)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """Output tokens, and the seconds that they took."""

    tokens: int
    seconds: float

    @property
    def rate(self) -> float:
        """Output tokens per second."""
        return self.tokens / self.seconds

    def __add__(self, other: _Work) -> _Work:
        return _Work(tokens=self.tokens + other.tokens, seconds=self.seconds + other.seconds)


_NO_WORK = _Work(tokens=0, seconds=0.0)


class _Peer:
    """A server, a model, and the fields that all of its requests have."""

    def __init__(self, server: Server, model: str, fields: Mapping[str, Any]) -> None:
        self.server = server
        self._body = {"model": model, **fields}
        self._ignore_eos = True  # so that all requests do the same work

    async def complete(self, prompt: Prompt, params: Mapping[str, Any]) -> int:
        """Return the number of output tokens of a request."""
        body = {**self._body, **params}
        if prompt.messages:
            path = "chat/completions"
            body["messages"] = list(prompt.messages)
        else:
            path = "completions"
            body["prompt"] = prompt.prompt
        if self._ignore_eos:
            try:
                return _count(await self.server.post(path, {**body, "ignore_eos": True}))
            except Refused as error:
                if error.status not in (400, 422):
                    raise
                self._ignore_eos = False  # the server does not know it
        return _count(await self.server.post(path, body))


def _count(document: Mapping[str, Any]) -> int:
    try:
        return int(document["usage"]["completion_tokens"])
    except (KeyError, TypeError, ValueError):
        raise OutriderError(
            "the server reports no usage.completion_tokens, so tokens cannot be counted; switch its usage on"
        ) from None


async def _scrape(server: Server) -> Speculation | None:
    """Return the counters, or None if the server has none of a known engine."""
    text = await server.metrics()
    speculation = None if text is None else read_speculation(text)
    return speculation if speculation and speculation.engine else None


def _counted(*scrapes: Speculation | None) -> Speculation | None:
    """Return what was counted between the first two scrapes, and between the last two. None: a scrape is missing."""
    before, paused, continued, after = scrapes
    if before is None or paused is None or continued is None or after is None:
        return None
    return after.since(before).since(continued.since(paused))


async def _configured(server: Server, engine: str, before: Speculation | None) -> bool | None:
    """Return whether a server was started with speculation. None: it does not say."""
    if engine == "vLLM":  # has the counters only then; other engines have them always
        return before is not None and before.known
    return await server.speculates() if engine == "llama.cpp" else None


def _load_dict(load: Load) -> dict[str, Any]:
    speculation = load.speculation
    return {
        "concurrency": load.concurrency,
        "tokens_per_s": load.tokens_per_s,
        "plain_tokens_per_s": load.plain_tokens_per_s,
        "speedup": load.speedup,
        "tau": speculation.tau if speculation else None,
        "acceptance": speculation.acceptance if speculation else None,
        "accepted_by_position": list(speculation.reach) if speculation else [],
        "best_k": best_k(load),
        "counters": asdict(speculation) if speculation else None,
    }


def _number(value: float | None, digits: int) -> str:
    return NONE if value is None else f"{value:.{digits}f}"
