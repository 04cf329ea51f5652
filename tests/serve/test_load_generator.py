"""The load generator against a server."""

import asyncio
import json

import pytest

from outrider.core.prompts import read_prompts
from outrider.errors import OutriderError
from outrider.lab.loadgen.client import run_load
from outrider.lab.loadgen.figures import percentiles
from outrider.lab.loadgen.settings import Settings as LoadSettings
from tests.helpers.serving import PROMPT


@pytest.mark.parametrize("loop", [{"max_concurrency": 3}, {"request_rate": 50.0}])
def test_load_generator_measures_latencies(server, loop, tmp_path):
    file = tmp_path / "prompts.jsonl"
    lines = [{"category": "a", "prompt": PROMPT}, {"category": "b", "messages": [{"role": "user", "content": "Hi"}]}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = LoadSettings(base_url=server[0] + "/v1", num_requests=6, max_tokens=9, ignore_eos=True, k=0, **loop)
    results, seconds = asyncio.run(run_load(settings, read_prompts(file)))
    assert [result.tokens for result in results] == [9] * 6
    assert not any(result.error for result in results)
    for result in results:
        assert result.start <= result.times[0] <= result.times[-1] <= seconds
        assert result.ttft + sum(result.chunk_gaps) == pytest.approx(result.e2e)


def test_load_generator_reports_errors(server):
    url = server[0] + "/v1"
    results, _ = asyncio.run(run_load(LoadSettings(base_url=url, num_requests=2, model="other"), read_prompts()))
    assert all("404" in result.error for result in results)
    with pytest.raises(OutriderError, match="cannot be reached"):
        asyncio.run(run_load(LoadSettings(base_url="http://127.0.0.1:9/v1"), read_prompts()))
    with pytest.raises(OutriderError, match="give one of them"):
        LoadSettings(request_rate=1.0, max_concurrency=2)


def test_percentiles_are_measured_values():
    assert percentiles([0.003, 0.001, 0.002]) == {"p50": 2.0, "p95": 3.0, "p99": 3.0}
    assert percentiles([i / 1000 for i in range(1, 101)]) == {"p50": 50.0, "p95": 95.0, "p99": 99.0}
    assert percentiles([]) == {}
