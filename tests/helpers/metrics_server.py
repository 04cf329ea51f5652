"""A server of OpenAI's API that answers "x" to everything, with the /metrics of other engines."""

import json
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

from tests.helpers.local_server import Handler, serve

_RECORDED = Path(__file__).parent / "metrics"
_VLLM = """# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{model_name="m"}} {drafts}
vllm:spec_decode_num_draft_tokens_total{{model_name="m"}} {draft_tokens}
vllm:spec_decode_num_accepted_tokens_total{{model_name="m"}} {accepted}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{model_name="m",position="0"}} {first}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{model_name="m",position="1"}} {second}
vllm:generation_tokens_total{{model_name="m"}} {output}
"""


def recorded(file):
    """Return the /metrics of a real server. Those of vLLM are cut to a few metrics."""
    return (_RECORDED / file).read_text()


@contextmanager
def serving(metrics, *, fields=(), models=("m",), slots=None):
    """Run a server whose metrics are a function of the number of requests. It refuses requests with one of `fields`."""
    bodies = []
    lock = Lock()

    class MetricsHandler(Handler):
        def do_GET(self):
            if self.path == "/v1/models":
                self.send(200, json.dumps({"data": [{"id": name} for name in models]}))
            elif self.path == "/metrics" and metrics is not None:
                self.send(200, metrics(len(bodies)))
            elif self.path == "/slots" and slots is not None:
                self.send(200, json.dumps(slots))
            else:
                self.send(404, "{}")

        def do_POST(self):
            body = self.body()
            if unknown := [name for name in fields if name in body]:
                self.send(400, json.dumps({"error": {"message": f"unknown {unknown[0]}"}}))
                return
            with lock:
                bodies.append(body)
            choice = {"text": "x", "finish_reason": "length"}
            self.send(200, json.dumps({"choices": [choice], "usage": {"completion_tokens": body["max_tokens"]}}))

    with serve(MetricsHandler) as url:
        yield url, bodies


def vllm_metrics(requests):
    """Return the metrics of vLLM after some requests: 10 drafts of 2 tokens in each, of which 13 are accepted."""
    return _VLLM.format(
        drafts=10 * requests,
        draft_tokens=20 * requests,
        accepted=13 * requests,
        first=8 * requests,
        second=5 * requests,
        output=23 * requests,
    )
