"""Tests on real Ray: replicas behind one server, and rollouts by workers. They are skipped without Ray."""

import json
import os
import signal
import ssl
import threading
import time

import httpx
import pytest
import torch

from outrider.core.params import SamplingParams
from outrider.errors import OutriderError
from outrider.llm import LLM
from outrider.models.loader.embedded import embedded
from outrider.models.loader.load import read_weights
from outrider.train.rl.rollout import RolloutEngine
from tests.helpers.certificates import make_certificate
from tests.helpers.local_server import Handler, serve
from tests.helpers.replicas import RAY_ENVIRONMENT, replicas, wait_for

pytest.importorskip("ray", reason='Ray is not installed: pip install "outrider[ray]"')
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of Ray

OPTIONS = {"proposer": "ngram", "k": 3, "dtype": "float32", "max_model_len": 1024, "threads": 1}
os.environ |= RAY_ENVIRONMENT


def test_server_with_replicas():
    llm = LLM(embedded("nano"), **OPTIONS)
    prompts = [f"{i} def add(a, b):" for i in range(8)]
    params = SamplingParams(temperature=0.0, max_tokens=24)
    expected = [each.text for each in llm.generate(prompts, params)]
    with replicas("--replicas", "2", "--max-num-seqs", "16", "--api-key", "secret") as server:
        url = server.url
        with httpx.Client(headers={"Authorization": "Bearer secret"}, timeout=120) as client:
            for prompt, text in zip(prompts, expected, strict=True):
                answer = client.post(
                    f"{url}/v1/completions", json={"prompt": prompt, "max_tokens": 24, "temperature": 0}
                )
                assert answer.json()["choices"][0]["text"] == text
            assert client.get(f"{url}/health").json()["replicas"] == 2
            assert client.post(f"{url}/v1/completions", json={"prompt": "x", "top_p": 7}).status_code == 400
            assert httpx.get(f"{url}/v1/models", timeout=60).status_code == 401
            assert client.get(f"{url}/v1/models").json()["data"][0]["id"] == "nano"
            # Requests with a common prefix go to one replica.
            long = "The quick brown fox jumps over the lazy dog. " * 30
            for i in range(6):
                client.post(f"{url}/v1/completions", json={"prompt": f"{long}{i}", "max_tokens": 2})
            metrics = client.get(f"{url}/metrics").text
        values = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
        assert float(values["outrider_output_tokens_total"]) >= 8 * 20
        assert float(values["outrider_max_num_seqs"]) == 32
        assert float(values["outrider_prefix_cache_hits_total"]) > 4 * 200  # tokens, of five of the six prompts
        kill_a_replica(server)


def kill_a_replica(server):
    """Kill a replica in the middle of streams: those that have begun get an error, all other requests an answer."""
    key = {"Authorization": "Bearer secret"}
    url = server.url
    texts = {}
    answers = {}

    def read(prompt):
        asked = {"prompt": prompt, "max_tokens": 1900, "ignore_eos": True, "temperature": 0, "stream": True}
        texts[prompt] = ""
        with httpx.stream("POST", f"{url}/v1/completions", json=asked, headers=key, timeout=120) as response:
            for line in response.iter_lines():
                texts[prompt] += line

    def ask(i):
        asked = {"prompt": f"{i} class A", "max_tokens": 50, "temperature": 0}
        answers[i] = httpx.post(f"{url}/v1/completions", json=asked, headers=key, timeout=120)

    threads = [threading.Thread(target=read, args=(f"{i} x",)) for i in range(8)]
    threads += [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    while sum(map(bool, texts.values())) < 8:
        time.sleep(0.02)
    os.kill(min(server.processes()), signal.SIGKILL)
    for thread in threads:
        thread.join()
    assert [answer.status_code for answer in answers.values()] == [200] * 8
    ends = {("[DONE]" in text, "the replica that generated this stream was lost" in text) for text in texts.values()}
    assert ends == {(True, False), (False, True)}


class Collector(Handler):
    """Receives traces."""

    bodies: list[bytes] = []  # noqa: RUF012

    def do_POST(self):
        self.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send(200, "")


def test_keys_certificate_and_traces(tmp_path):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason='pip install "outrider[otel]"')
    keys = [{"name": "small", "key": "KEY1", "tokens_per_minute": 1}, {"name": "large", "key": "KEY2"}]
    (tmp_path / "keys.json").write_text(json.dumps(keys))
    cert, key = make_certificate(tmp_path)
    telemetry = {
        "OTEL_EXPORTER_OTLP_COMPRESSION": "none",
        "OTEL_BSP_SCHEDULE_DELAY": "200",
    }
    words = ("--api-keys", str(tmp_path / "keys.json"), "--tls-cert", cert, "--tls-key", key, "--otel")
    request = {"prompt": "x", "max_tokens": 8, "stream": True}
    trace = "ab" * 16
    with serve(Collector) as collector, replicas(*words, OTEL_EXPORTER_OTLP_ENDPOINT=collector, **telemetry) as server:
        url = server.url
        assert url.startswith("https://")
        with httpx.Client(verify=ssl.create_default_context(cafile=cert), timeout=600) as client:

            def ask(key, **headers):
                all_headers = {"Authorization": f"Bearer {key}", **headers}
                return client.post(f"{url}/v1/completions", json=request, headers=all_headers)

            assert ask("KEY1").text.endswith("data: [DONE]\n\n")
            busy = ask("KEY1")
            assert (busy.status_code, ask("KEY3").status_code) == (429, 401)
            assert "the key 'small' has used its 1 tokens per minute" in busy.json()["error"]["message"]
            assert int(busy.headers["retry-after"]) > 60  # it has been charged for 8 tokens and the prompt
            assert ask("KEY2", traceparent=f"00-{trace}-{'cd' * 8}-01").status_code == 200
        wait_for(lambda: any(bytes.fromhex(trace) in body and b"decode" in body for body in Collector.bodies))


def test_rollouts_by_workers():
    import ray

    from outrider.scale.ray.rollouts import RolloutPool

    prompts = ["def add(a, b):", "The cat sat", "x = ["]
    params = SamplingParams(temperature=1.0, max_tokens=60)
    engine = RolloutEngine.load(embedded("nano"), max_num_seqs=4, **OPTIONS)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        pool = RolloutPool(embedded("nano"), workers=2, slots=4, **OPTIONS)
        expected = engine.generate(prompts, params, n=4, seed=5)
        batch = pool.generate(prompts, params, n=4, seed=5)
        assert batch.provenance.same_tokens
        assert [each.token_ids for each in batch.rollouts] == [each.token_ids for each in expected.rollouts]
        assert [each.logprobs for each in batch.rollouts] == [each.logprobs for each in expected.rollouts]
        weights = {name: value * 1.01 for name, value in read_weights(embedded("nano"), torch.float32).items()}
        assert pool.update_weights(weights) == engine.update_weights(weights) == 1
        expected = engine.generate(prompts, params, n=4, seed=5)
        pid = ray.get(pool.actors[0].__ray_call__.remote(lambda self: os.getpid()))
        timer = threading.Timer(0.3, os.kill, (pid, signal.SIGKILL))
        timer.start()
        batch = pool.generate(prompts, params, n=12, seed=5)
        timer.join()
        if not pool.lost:  # the call was faster than the timer
            pool.generate(prompts, params, n=4, seed=5)
        assert pool.lost == 1
        again = [each for each in batch.rollouts if each.sample < 4]
        assert [each.token_ids for each in again] == [each.token_ids for each in expected.rollouts]
        assert {each.version for each in batch.rollouts} == {1}
        long = pool.generate(["a"], SamplingParams(temperature=1.0, max_tokens=400, ignore_eos=True), n=4, seed=1)
        assert pool.stolen
        assert all(len(each.token_ids) == 400 for each in long.rollouts)
        with pytest.raises(OutriderError, match="version is 1, and the current one is 1"):
            pool.update_weights(weights, version=1)
        with pytest.raises(OutriderError, match="the model has no weight"):
            pool.update_weights({"wrong": next(iter(weights.values()))})
        pool.shutdown()
    finally:
        ray.shutdown()
