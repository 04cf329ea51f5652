"""Tests that a request is sent again if the server has closed its idle connection, and only then."""

import asyncio
import json

import pytest

from outrider.errors import OutriderError
from outrider.lab.client.server import connect
from tests.helpers.closing_server import closing_server
from tests.helpers.commands import succeed


def post(url, *, times):
    """Post requests one after another. Return the number of answers and of retries."""

    async def run():
        async with connect(url) as server:
            answers = [await server.post("completions", {"prompt": "a"}) for _ in range(times)]
            return len(answers), server.retries

    return asyncio.run(run())


def test_a_request_on_a_closed_connection_is_sent_again():
    with closing_server() as (url, answered):
        assert post(url, times=4) == (4, 3)
    assert len(answered) == 4  # no request was answered twice


def test_a_request_that_a_new_connection_loses_is_an_error():
    with closing_server(per_connection=0) as (url, _), pytest.raises(OutriderError, match="cannot be reached"):
        post(url, times=1)


def test_an_answer_that_breaks_off_is_an_error():
    with closing_server(cut=True) as (url, answered), pytest.raises(OutriderError, match="cannot be reached"):
        post(url, times=2)
    assert len(answered) == 1


def test_the_load_loses_no_request():
    with closing_server() as (url, _):
        command = ["load", "--base-url", url, "--num-requests", "12", "--max-concurrency", "3"]
        result = succeed(*command)
    document = json.loads(result.stdout.splitlines()[-1])
    assert (document["completed"], document["errors"]) == (12, [])
    assert document["retries"] >= 12 - 3 + 1  # each but the first of a new connection, and GET has used one
    assert f"Requests sent again, because the server had closed their idle connections: {document['retries']}." in (
        result.output
    )


def test_tune_loses_no_request_and_reports_what_was_sent_again():
    with closing_server() as (url, _):
        command = ["tune", "--server", url, "--baseline", url, "--batch", "2", "--num-requests", "6"]
        result = succeed(*command)
    document = json.loads(result.stdout.splitlines()[-1])
    assert document["loads"][0]["speedup"] > 0
    assert document["retries"] > 0
    assert "Requests sent again" in result.output
