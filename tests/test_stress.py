"""The load tool: what it asks, what it reads out of streams, and what it makes of them."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from typer.testing import CliRunner

from outrider.cli import app
from outrider.prompts import read_prompts
from outrider.stress import client as stress
from outrider.stress.answer import Asked, Tape
from outrider.stress.asking import wanted
from outrider.stress.settings import Settings

MIXED = Settings(requests=40, mixed=True, max_tokens=64, cancel=0.3)


def event(**fields):
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def words(*texts, finish=None):
    return b"".join(event(choices=[{"text": text, "finish_reason": finish}]) for text in texts)


def played(*chunks):
    tape, asked = Tape(), Asked(number=0, began=0.0)
    for at, chunk in enumerate(chunks, 1):
        tape.add(float(at), chunk)
    tape.play(asked)
    return asked


def test_requests_are_drawn_from_the_seed():
    prompts = read_prompts()
    one, two = (wanted(MIXED, prompts, "m") for _ in range(2))
    assert one == two
    assert one != wanted(Settings(requests=40, mixed=True, max_tokens=64, cancel=0.3, seed=1), prompts, "m")
    lengths = {each.body["max_tokens"] for each in one}
    assert min(lengths) >= 8
    assert max(lengths) <= 64
    assert len(lengths) > 10
    assert len({each.body["temperature"] for each in one}) == 3
    assert 0 < sum(each.pieces is not None for each in one) < 40
    assert all("seed" not in each.body for each in wanted(Settings(requests=3), prompts, "m"))


def test_pieces_have_the_time_at_which_their_last_byte_came():
    whole = words("a", "b") + words("c", finish="length") + event(choices=[], usage={"completion_tokens": 5})
    whole += b"data: [DONE]\n\n"
    cut = len(words("a")) + 9
    asked = played(whole[:cut], whole[cut:])
    assert (asked.text, asked.tokens, asked.finish) == ("abc", 5, "length")
    assert asked.times == [1.0, 2.0, 2.0]
    assert asked.gaps == [1.0, 0.0]
    assert asked.token_gaps == [1.0, 0.0, 0.0, 0.0]


def test_other_servers_write_streams_in_other_ways():
    chat = b': ping\r\n\r\ndata:{"choices":[{"delta":{"role":"assistant","content":null}}]}\r\n\r\n'
    chat += b'data: {"choices": [{"delta": {"content": "hi"}, "finish_reason": "stop"}], "usage": null}\r\n\r\n'
    asked = played(chat, b"data: [DONE]\r\n\r\n")
    assert (asked.text, asked.tokens, asked.finish) == ("hi", 1, "stop")


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (httpx.Response(503, text="not now"), "503: not now"),
        (httpx.Response(200, content=event(error={"message": "broken"})), "broken"),
        (httpx.Response(200, content=b"data: {oops\n\n"), "JSONDecodeError"),
        (httpx.Response(200, content=b"data: [DONE]\n\n"), "the answer was empty"),
        (httpx.Response(200, content=words("", finish="stop")), ""),
    ],
)
def test_what_goes_wrong_is_noted(answer, says):
    async def ask():
        transport = httpx.MockTransport(lambda _: answer)
        async with httpx.AsyncClient(base_url="http://here/v1/", transport=transport) as http:
            (want,) = wanted(Settings(requests=1), read_prompts(), "m")
            return await stress.Client(http).ask(want, 0)

    asked = asyncio.run(ask())
    assert asked.done == (not says)
    assert says in asked.error


def test_who_hangs_up_counts_apart(monkeypatch):
    def answer(request):
        if request.url.path.endswith("models"):
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        return httpx.Response(200, content=words(*"abcdefgh", finish="length"))

    plain = httpx.AsyncClient
    transport = httpx.MockTransport(answer)
    monkeypatch.setattr(
        stress.httpx, "AsyncClient", lambda **options: plain(base_url=options["base_url"], transport=transport)
    )
    command = "load --requests 20 --mixed --cancel 0.4 --concurrency 4 --max-tokens 12"
    done = CliRunner().invoke(app, command.split())
    assert done.exit_code == 0, done.output
    document = json.loads(done.output.splitlines()[-1])
    assert document["answers"] + document["cancelled"] == 20
    assert document["cancelled"] > 2
    assert not document["errors"]
    assert document["ms"]["between tokens"]["p50"] == 0.0
    assert "hung up" in done.output
