"""Tests of the benchmark of starts, with tiny models and a server that stands for llama.cpp's."""

import json
import runpy
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from outrider import LLM, SamplingParams
from tests.helpers.scripts import run_script

FOLDER = Path(__file__).parents[2] / "benchmarks" / "start"
FAKE_SERVER = """#!{python}
import http.server, json, socketserver, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = json.dumps({{"path": self.path}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    do_GET = do_POST = answer
    def address_string(self):
        return ""
    def log_message(self, *_):
        pass

if "{broken}":
    sys.exit("{broken}")
socketserver.UnixStreamServer(sys.argv[sys.argv.index("--host") + 1], Handler).serve_forever()
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    done = run_script(FOLDER / "random_models.py", folder, "--tiny")
    assert done.returncode == 0, done.stderr
    return [Path(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def script():
    with patch.object(sys, "path", list(sys.path)):
        return runpy.run_path(str(FOLDER / "start.py"))


def fake_server(tmp_path, broken=""):
    file = tmp_path / "server"
    file.write_text(FAKE_SERVER.format(python=sys.executable, broken=broken))
    file.chmod(0o755)
    return str(file)


def test_random_models_run(models):
    """Both have finite logits, and their tokenizers give the same tokens."""
    texts = []
    for model in models:
        llm = LLM(model, proposer="none", max_num_seqs=1, max_model_len=64, check="always")
        (done,) = llm.generate([llm.encode_chat([{"role": "user", "content": "hi"}])], SamplingParams(max_tokens=3))
        assert done.token_ids
        texts.append(done.prompt_token_ids)
    assert texts[0] == texts[1]


def test_the_memory_of_a_start_includes_that_of_its_children(script, tmp_path):
    code = "import subprocess, sys, time; x = bytearray(50_000_000); {}time.sleep(0.3)"
    child = "subprocess.run([sys.executable, '-c', \"x = bytearray(50_000_000); import time; time.sleep(0.2)\"]); "
    alone = script["_run"]([sys.executable, "-c", code.format("")], tmp_path)
    both = script["_run"]([sys.executable, "-c", code.format(child)], tmp_path)
    assert alone.peak_bytes > 50e6
    assert both.peak_bytes > alone.peak_bytes + 50e6


def test_start_of_a_server(script, tmp_path):
    started = script["_llama_server"](fake_server(tmp_path), tmp_path / "model.gguf", 1)()
    assert started.seconds > 0
    assert started.peak_bytes > 1e6
    with pytest.raises(RuntimeError, match="did not become ready: no such model"):
        script["_llama_server"](fake_server(tmp_path, "no such model"), tmp_path / "model.gguf", 1)()


@pytest.mark.heavy
def test_whole_table(models, tmp_path):
    out = tmp_path / "out.json"
    options = ("--llama-server", fake_server(tmp_path), "--rounds", 1, "--threads", 1, "--out", out)
    done = run_script(FOLDER / "start.py", *models, *options)
    assert done.returncode == 0, done.stderr
    document = json.loads(out.read_text())
    assert json.loads(done.stdout.splitlines()[-1]) == document
    file, folder = (model.name for model in models)
    names = ["import torch", "error: no such file", "@mini, later"]
    names += [f"{file}, first", f"{file}, later", f"{file}, llama-server", f"{folder}, first", f"{folder}, later"]
    assert list(document["results"]) == names
    assert all(result["seconds"] > 0 for result in document["results"].values())
