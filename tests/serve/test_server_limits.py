"""What the server limits: keys, origins, sizes, the queue and the time of requests."""

import threading
from pathlib import Path

import httpx
import pytest
import typer

from outrider.cli.app import app
from outrider.errors import OutriderError
from outrider.serve.settings import Settings
from outrider.serve.stream.request_stream import PUBLISH_INTERVAL
from tests.helpers.serving import BODY, PROMPT, serving, wait_until_idle


def test_full_queue_is_status_429(monkeypatch):
    with serving(max_num_seqs=1, max_queued_requests=1) as (url, async_llm):
        body = {"prompt": PROMPT, "max_tokens": 50, "n": 2, "stream": True}
        gate = threading.Event()
        step = async_llm.engine.step
        monkeypatch.setattr(async_llm.engine, "step", lambda: gate.wait(20) and step())
        with httpx.stream("POST", url + "/v1/completions", json=body) as response:
            rejected = httpx.post(url + "/v1/completions", json={"prompt": "x"})
            assert rejected.status_code == 429
            assert rejected.headers["retry-after"]
            gate.set()
            assert response.read().endswith(b"[DONE]\n\n")
        wait_until_idle(async_llm)
        assert httpx.post(url + "/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200


def test_api_key_and_body_limit():
    with serving(api_key=["secret"], max_body_kb=2) as (url, _):
        body = {"prompt": "x", "max_tokens": 1}
        assert httpx.post(url + "/v1/completions", json=body).status_code == 401
        wrong_key = {"authorization": "Bearer secre"}
        assert httpx.post(url + "/v1/completions", json=body, headers=wrong_key).status_code == 401
        right_key = {"authorization": "Bearer secret"}
        assert httpx.post(url + "/v1/completions", json=body, headers=right_key).status_code == 200
        assert httpx.get(url + "/health").status_code == 200
        large_body = {"prompt": "x" * 4000}
        assert httpx.post(url + "/v1/completions", json=large_body, headers=right_key).status_code == 413
        chunks = (b"x" * 1000 for _ in range(9))  # a body without Content-Length
        assert httpx.post(url + "/v1/completions", content=chunks, headers=right_key).status_code == 413


def test_docs_state_publish_interval():
    page = (Path(__file__).parents[2] / "docs" / "reference" / "http.md").read_text()
    assert f"within {1000 * PUBLISH_INTERVAL:g} ms share one" in page


def test_options_are_grouped_in_help():
    command = typer.main.get_command(app).commands["serve"]
    panels = {parameter.name: getattr(parameter, "rich_help_panel", None) for parameter in command.params}
    assert (panels["smooth"], panels["max_num_seqs"], panels["k"]) == ("Streaming", "Limits", "Models")
    assert set(panels.values()) >= {"Models", "Server", "Limits", "Streaming", "Videos"}


def test_request_timeout():
    with serving(request_timeout=0.005) as (url, async_llm):
        body = {"prompt": PROMPT, "max_tokens": 200, "ignore_eos": True}
        assert httpx.post(url + "/v1/completions", json=body).status_code == 504
        streamed = httpx.post(url + "/v1/completions", json={**body, "stream": True}).text
        assert "longer than 0.005 seconds" in streamed
        wait_until_idle(async_llm)


def test_cors_allows_only_configured_origins(switching_server):
    preflight = {"origin": "https://a.example", "access-control-request-method": "POST"}
    not_configured = httpx.options(switching_server[0], headers=preflight)
    assert "access-control-allow-origin" not in not_configured.headers
    with serving(allow_origin=["https://a.example"], api_key=["k"]) as (url, _):
        allowed = httpx.options(url + "/v1/completions", headers=preflight)
        assert allowed.headers["access-control-allow-origin"] == "https://a.example"
        other = httpx.options(url + "/v1/completions", headers={**preflight, "origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers
        without_key = httpx.post(url + "/v1/completions", json=BODY, headers={"origin": "https://a.example"})
        assert without_key.status_code == 401
        assert without_key.headers["access-control-allow-origin"] == "https://a.example"


@pytest.mark.parametrize("options", [{"allow_origin": ["a.example"]}, {"log_format": "xml"}, {"api_key": [" "]}])
def test_invalid_settings_are_rejected(options):
    with pytest.raises(OutriderError, match=r"use|give|write"):
        Settings(**options)
