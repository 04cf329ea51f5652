"""A server in a thread, and requests to it."""

import asyncio
import threading
import time
from contextlib import contextmanager

import httpx
import uvicorn

from outrider.core.params import SamplingParams
from outrider.llm import LLM
from outrider.models.loader.embedded import embedded
from outrider.serve.app import make_app
from outrider.serve.async_llm import AsyncLLM
from outrider.serve.server import Server
from outrider.serve.settings import Settings
from tests.helpers.configured import with_engine

PROMPT = "def add(a, b):"
OPTIONS = {"target": embedded("nano"), "proposer": "ngram", "dtype": "float32", "max_model_len": 256, "k": 4}
SERVER_OPTIONS = {"max_num_seqs": 4, "max_queued_requests": 8, "shutdown_timeout": 2}


@contextmanager
def serving(options=None, *, llm=None, videos=None, **settings):
    """Run a server in a thread. Yield its URL and its `AsyncLLM`.

    `llm` replaces the one that is made of `options`. `videos` is a `VideoService` for it.
    """
    server_settings = with_engine(Settings, port=0, **SERVER_OPTIONS | settings)
    max_num_seqs = server_settings.engine.max_num_seqs
    llm = llm or LLM(**{**OPTIONS, **(options or {})}, max_num_seqs=max_num_seqs)
    async_llm = AsyncLLM(llm, max_queued_requests=server_settings.max_queued_requests, max_num_seqs=max_num_seqs)
    app = make_app(async_llm, server_settings, name="nano", videos=videos)
    config = uvicorn.Config(app, port=0, log_level="warning")
    server = Server(config, app.state.end_requests, timeout=server_settings.shutdown_timeout)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}", async_llm
    finally:
        server.should_exit = True
        thread.join()


def wait_until_idle(async_llm):
    """Wait until no request runs or waits."""
    deadline = time.monotonic() + 20
    while async_llm.running or async_llm.waiting:
        assert time.monotonic() < deadline
        time.sleep(0.01)


SWITCH_OPTIONS = {"proposer": "switch(ngram,recycle)", "isolate_faults": True}
BODY = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
OTHER_PROMPTS = ["import os", "a = 1\nb = 1\n", "class A:"]


def post_concurrently(url, bodies):
    """Send the requests at the same time and return their responses."""

    async def post_all():
        async with httpx.AsyncClient(timeout=60) as client:
            return await asyncio.gather(*(client.post(url, json=body) for body in bodies))

    return asyncio.run(post_all())


def text_of(response):
    return response.json()["choices"][0]["text"]


def expected_texts(reference_llm, prompts, **params):
    """Return what the server must generate for each prompt with the parameters of `BODY`."""
    sampling = SamplingParams(max_tokens=40, ignore_eos=True, **params)
    return [reference_llm.generate([prompt], sampling)[0].text for prompt in prompts]


def wait_until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def metric_values(url, name):
    """Return the values of the metrics whose names begin with `name`."""
    lines = httpx.get(url + "/metrics").text.splitlines()
    return [float(line.split()[-1]) for line in lines if line.startswith(name)]
