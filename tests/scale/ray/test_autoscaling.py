"""Tests of autoscaling: the policy alone, and real Ray, where replicas come with the load and leave after it."""

import json
import threading
from importlib.util import find_spec
from types import SimpleNamespace

import httpx
import pytest

from outrider.core.config import EngineConfig
from outrider.errors import OutriderError
from outrider.scale.ray.autoscaling import METRIC, LoadPolicy, TokenRate
from outrider.scale.ray.settings import ScaleSettings
from outrider.serve.settings import Settings
from tests.helpers.replicas import replicas, wait_for

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason='Ray is not installed: pip install "outrider[ray]"')


def context(requests, metrics=None):
    config = SimpleNamespace(target_ongoing_requests=4)
    return SimpleNamespace(total_num_requests=requests, aggregated_metrics=metrics, config=config)


def test_the_larger_number_of_replicas_counts():
    rates = {METRIC: {"a": 900.0, "b": 600.0}}
    assert LoadPolicy()(context(10, rates)) == (2.5, {})
    assert LoadPolicy(500)(context(10, rates)) == (3.0, {})
    assert LoadPolicy(500)(context(20, rates)) == (5.0, {})
    assert LoadPolicy(500)(context(0)) == (0.0, {})


def test_rate_of_tokens():
    times = iter([10.0, 12.0, 12.0, 16.0])
    rate = TokenRate(100, clock=lambda: next(times))
    assert [rate.read(500), rate.read(500), rate.read(700)] == [200.0, 0.0, 50.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_requests": 4.0}, "--target-requests needs a number of replicas that may change"),
        ({"target_tokens_per_second": 9.0, "max_replicas": 1}, "set --max-replicas above --replicas, which is 1"),
        ({"downscale_delay": 9.0}, "leave --downscale-delay out"),
        ({"max_replicas": 2, "target_tokens_per_second": 0.0}, "--target-tokens-per-second is 0; use a number above 0"),
        ({"max_replicas": 2, "load_window": -1.0}, "--load-window is -1"),
        ({"max_replicas": 2, "upscale_delay": -1.0}, "--upscale-delay is -1; use at least 0"),
    ],
)
def test_options_that_do_not_fit(options, message):
    with pytest.raises(OutriderError, match=message):
        ScaleSettings(**options)


@needs_ray
@pytest.mark.filterwarnings("ignore")  # of Ray
def test_ray_gets_the_options():
    from outrider.scale.ray.application import build_application

    scale = ScaleSettings(replicas=2, max_replicas=8, target_tokens_per_second=700.0, downscale_delay=600.0)
    front = build_application(Settings(engine=EngineConfig(max_num_seqs=32)), scale, name="x")
    (engine,) = (each for each in front._bound_deployment.init_args if hasattr(each, "_bound_deployment"))
    config = engine._bound_deployment._deployment_config.autoscaling_config
    assert (config.min_replicas, config.max_replicas, config.target_ongoing_requests) == (2, 8, 16)
    assert (config.upscale_delay_s, config.downscale_delay_s, config.look_back_period_s) == (5, 600, 30)
    policy = config.policy.get_policy()(**config.policy.policy_kwargs)
    rates = {METRIC: {"a": 2100.0}}
    requests = SimpleNamespace(total_num_requests=0, aggregated_metrics=rates, config=config)
    assert policy(requests) == (3.0, {})


QUICK = ("--max-replicas", "2", "--load-window", "1", "--upscale-delay", "0", "--downscale-delay", "1")


class Load:
    """Clients that send one request after the other."""

    def __init__(self, url, clients):
        self._url = url
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._send, args=(f"{i} x",)) for i in range(clients)]

    def _send(self, prompt):
        while not self._stopped.is_set():
            request = {"prompt": prompt, "max_tokens": 64, "ignore_eos": True, "temperature": 0}
            httpx.post(f"{self._url}/v1/completions", json=request, timeout=600).raise_for_status()

    def __enter__(self):
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_):
        self._stopped.set()
        for thread in self._threads:
            thread.join()


class Stream:
    """A stream of 4 completions of 1900 tokens each without drafts, which is read in a thread."""

    def __init__(self, url, prompt):
        """Open the stream, and wait until it has begun."""
        self.lines = []
        self._url = url
        self._prompt = prompt
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        wait_for(lambda: self.lines)

    def _read(self):
        request = {"prompt": self._prompt, "max_tokens": 1900, "n": 4, "k": 0, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{self._url}/v1/completions", json=request, timeout=600) as response:
            for line in response.iter_lines():
                self.lines.append(line)

    def join(self):
        self._thread.join()

    @property
    def ended(self):
        return "data: [DONE]" in self.lines


@needs_ray
@pytest.mark.slow
def test_replicas_follow_the_requests_and_finish_their_streams():
    words = ("--target-requests", "4", "--shutdown-timeout", "600")
    with replicas(*QUICK, *words) as server:
        assert server.running() == 1
        with Load(server.url, 16):
            wait_for(lambda: server.running() == 2)
            streams = [Stream(server.url, f"{i} stream") for i in range(4)]  # on both replicas
        wait_for(lambda: server.running() == 1)
        assert not any(stream.ended for stream in streams)
        assert len(server.processes()) == 2  # one of them gets no requests, and finishes its stream
        for stream in streams:
            stream.join()
            assert stream.ended
            events = [json.loads(line[6:]) for line in stream.lines if line.startswith("data: {")]
            reasons = [event["choices"][0]["finish_reason"] for event in events]
            assert reasons.count("length") == 4
        wait_for(lambda: len(server.processes()) == 1)
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 4}, timeout=600)
        assert answer.status_code == 200


@needs_ray
@pytest.mark.slow
def test_replicas_follow_the_tokens_per_second():
    words = ("--target-requests", "100", "--target-tokens-per-second", "10")
    with replicas(*QUICK, *words) as server:
        with Load(server.url, 1):
            wait_for(lambda: server.running() == 2)
        wait_for(lambda: server.running() == 1)
