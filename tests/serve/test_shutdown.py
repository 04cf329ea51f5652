"""What open requests get when the server stops."""

import logging
import re
import signal
import socket
import subprocess
import sys
import threading

import httpx
import pytest

from tests.helpers.serving import BODY, OPTIONS, PROMPT, serving, wait_until

STOPS = "the server stops; send the request again later, or to another server"
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 200, "temperature": 0}
REQUESTS = {  # body by route and whether it asks for a stream
    (path, stream): {**body, "max_tokens": 200, "stream": stream}
    for path, body in (("/v1/completions", BODY), ("/v1/messages", CHAT))
    for stream in (False, True)
}


def test_open_requests_end_with_an_error_of_their_api(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "outrider.serve.requests")
    responses = {}
    with serving(shutdown_timeout=0) as (url, async_llm):
        step, stop = async_llm.engine.step, async_llm.stop
        gate = threading.Event()

        def step_first_round():  # then the engine is stuck, so that no request ends by itself
            if async_llm.stats.output_tokens:
                gate.wait(60)
            return step()

        def open_gate_and_stop():
            gate.set()
            stop()

        def post(request):
            responses[request] = httpx.post(url + request[0], json=REQUESTS[request], timeout=60)

        monkeypatch.setattr(async_llm.engine, "step", step_first_round)
        monkeypatch.setattr(async_llm, "stop", open_gate_and_stop)
        clients = [threading.Thread(target=post, args=[request]) for request in REQUESTS]
        for client in clients:
            client.start()
        upload = socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])))
        upload.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")  # a part of the body
        wait_until(lambda: async_llm.running == len(REQUESTS))
    for client in clients:
        client.join(60)
    openai_error = {"error": {"message": STOPS, "type": "server_error", "param": None, "code": None}}
    anthropic_error = {"type": "error", "error": {"type": "overloaded_error", "message": STOPS}}
    for path, error in (("/v1/completions", openai_error), ("/v1/messages", anthropic_error)):
        whole = responses[path, False]
        assert (whole.status_code, whole.json(), whole.headers["retry-after"]) == (503, error, "1")
        last_event = responses[path, True].text.strip().rsplit("data: ", 1)[1]
        assert STOPS in last_event
        assert '"error"' in last_event
    with upload:
        answer = b"".join(iter(lambda: upload.recv(4096), b"")).decode()
    assert answer.startswith("HTTP/1.1 503")
    assert STOPS in answer
    fields = [record.fields for record in caplog.records if record.name == "outrider.serve.requests"]
    assert sorted(each.get("finish_reason", "") for each in fields) == ["", *["shutdown"] * len(REQUESTS)]
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_requests_after_the_shutdown_timeout(number):
    command = [sys.executable, "-m", "outrider", "serve", "--target", OPTIONS["target"], "--proposer", "ngram"]
    command += ["--port", "0", "--dtype", "float32", "--shutdown-timeout", "0"]
    server = subprocess.Popen([str(part) for part in command], stderr=subprocess.PIPE, text=True)
    try:
        address_line = next(line for line in server.stderr if " at http" in line)
        url = re.search(r"http://127.0.0.1:[1-9]\d*", address_line)[0]
        body = {"prompt": [PROMPT] * 8, "max_tokens": -1, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", url + "/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            server.send_signal(number)
            assert STOPS in [line for line in lines if line][-1]
        assert server.wait(timeout=60) == 0
        log = server.stderr.read()
    finally:
        server.kill()
        server.communicate()
    assert "Traceback" not in log
    assert "finish_reason=shutdown" in log
