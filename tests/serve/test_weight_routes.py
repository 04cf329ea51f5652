"""Weight updates of a running server: the names of vLLM, and what they refuse."""

import shutil
import threading
import time

import httpx
import pytest

from outrider.errors import OutriderError
from outrider.models.loader.embedded import embedded
from outrider.serve.command import serve
from outrider.serve.settings import Settings
from outrider.serve.weight_routes import weight_root
from tests.helpers.serving import serving


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    root = tmp_path_factory.mktemp("weights")
    shutil.copytree(embedded("nano"), root / "step-1")
    outside = tmp_path_factory.mktemp("elsewhere")
    (root / "link").symlink_to(outside)
    options = {"max_model_len": 2048, "proposer": "none"}  # completions that run until the next request arrives
    with (
        serving(options, weight_updates=str(root)) as (url, async_llm),
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        yield client, async_llm


def complete(client, **fields):
    body = {"prompt": "def add(a, b):", "max_tokens": 8, "temperature": 0, "return_token_ids": True, **fields}
    return client.post("/v1/completions", json=body)


def test_token_ids(server):
    client, async_llm = server
    choice = complete(client).json()["choices"][0]
    assert async_llm.codec.decode(choice["token_ids"]) == choice["text"]
    assert choice["prompt_token_ids"] == list(async_llm.codec.encode("def add(a, b):"))
    assert choice["weight_versions"][0][0] == 0
    assert "token_ids" not in complete(client, return_token_ids=False).json()["choices"][0]


def test_updates_and_versions(server):
    client, _ = server
    before = client.post("/weight_checker").json()
    text = complete(client).json()["choices"][0]["text"]
    updated = client.post("/update_weights", json={"path": "step-1"})
    assert updated.json() == {"weight_version": before["weight_version"] + 1, "draft_version": 0}
    assert client.post("/weight_checker").json()["checksum"] == before["checksum"]  # the same weights
    choice = complete(client).json()["choices"][0]
    assert choice["text"] == text
    assert choice["weight_versions"] == [[0, before["weight_version"] + 1]]
    assert client.post("/update_weight_version", json={"version": 90}).json()["weight_version"] == 90
    assert client.get("/weight_version").json()["weight_version"] == 90
    assert client.post("/reset_prefix_cache").json() == {"status": "ok"}
    assert complete(client).json()["choices"][0]["text"] == text
    for body, message in (
        ({"path": "../elsewhere"}, "leads out of the folder"),
        ({"path": "/etc"}, "leads out of the folder"),
        ({"path": "link"}, "leads out of the folder"),
        ({"path": "step-2"}, "is not a folder"),
        ({"path": "step-1", "version": 90}, "use a whole number above it"),
        ({"path": "step-1", "selector": "draft"}, "draft models with weights of their own"),
        ({"path": "step-1", "zork": 1}, "zork"),
    ):
        refused = client.post("/update_weights", json=body)
        assert refused.status_code in (400, 422), refused.text
        assert message in refused.text
    assert client.get("/weight_version").json()["weight_version"] == 90


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_pause_and_resume(server, mode):
    client, async_llm = server
    responses = {}

    def run(name, tokens):
        responses[name] = complete(client, max_tokens=tokens, ignore_eos=True)

    first = threading.Thread(target=run, args=("first", 1500))
    first.start()
    while not async_llm.running:
        time.sleep(0.005)
    assert client.post("/pause", params={"mode": mode}).json() == {"status": "paused", "mode": mode}
    assert client.get("/is_paused").json() == {"is_paused": True}
    second = threading.Thread(target=run, args=("second", 4))
    second.start()
    passes = async_llm.stats.passes
    time.sleep(0.2)
    assert async_llm.stats.passes == passes
    assert second.is_alive()
    client.post("/resume")
    first.join()
    second.join()
    assert responses["first"].status_code == (500 if mode == "abort" else 200)
    assert responses["second"].status_code == 200
    assert client.get("/is_paused").json() == {"is_paused": False}


def test_sleep_and_wake(server):
    client, _ = server
    text = complete(client).json()["choices"][0]["text"]
    assert client.post("/sleep", params={"level": 2}).json() == {"status": "sleeping", "level": 2}
    assert client.get("/is_sleeping").json() == {"is_sleeping": True}
    assert client.post("/sleep").status_code == 400
    responses = []
    waiting = threading.Thread(target=lambda: responses.append(complete(client)))
    waiting.start()
    assert client.post("/wake_up").json() == {"status": "awake"}
    time.sleep(0.1)
    assert waiting.is_alive()  # the weights are missing
    assert client.post("/update_weights", json={"path": "step-1"}).status_code == 200
    waiting.join()
    assert responses[0].json()["choices"][0]["text"] == text
    assert client.post("/wake_up").status_code == 400


@pytest.mark.parametrize(
    ("option", "message"), [("weight_updates", "is no folder"), ("media", "has no readable config.json")]
)
def test_a_wrong_folder_is_reported_before_the_models_are_loaded(tmp_path, option, message):
    def load():
        raise AssertionError("the models are loaded")

    settings = Settings(port=0, **{option: str(tmp_path / "nowhere")})
    with pytest.raises(OutriderError, match=message):
        serve(load, settings)


def test_the_routes_are_off_by_default(tmp_path):
    assert Settings(port=0).weight_updates is None
    with pytest.raises(OutriderError, match="is no folder"):
        weight_root(str(tmp_path / "zork"))
    with serving() as (url, _):
        assert httpx.post(f"{url}/pause").status_code == 404
