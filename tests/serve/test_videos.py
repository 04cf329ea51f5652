"""Videos over HTTP, with tiny random models."""

import io
import sys
import threading
import time
from functools import partial

import openai
import pytest
from fastapi import FastAPI
from PIL import Image
from starlette.testclient import TestClient

from outrider.errors import OutriderError
from outrider.media import load_models
from outrider.media.calibration.document import Calibration
from outrider.media.calibration.drift import DriftWatch
from outrider.media.evaluation.bootstrap import Interval
from outrider.serve.command import load_videos
from outrider.serve.openai.errors import add_handlers
from outrider.serve.settings import Settings
from outrider.serve.videos.routes import add_missing_video_routes, add_video_routes
from tests.helpers.browser import browse, needs_browser
from tests.helpers.commands import invoke
from tests.helpers.serving import PROMPT, serving
from tests.media.made_up import CAPTION, write_models


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("models") / "shapes")


@pytest.fixture(autouse=True)
def no_encoder(monkeypatch):
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)


class Gate:
    """Lets a test hold the worker before each block of the target."""

    def __init__(self, service):
        self.open = threading.Event()
        self.open.set()
        target = service.served.models.engine.target
        self.failure = None
        make = target.generate

        def generate(block, noise, cache):
            assert self.open.wait(20)
            if self.failure:
                raise self.failure
            return make(block, noise, cache)

        target.generate = generate


@pytest.fixture(scope="module")
def application(folder):
    """A client of an application with only the routes of videos, and the gate of its worker."""
    service = load_videos(Settings(media=str(folder), max_queued_videos=1, max_kept_videos=3))
    gate = Gate(service)
    app = FastAPI()
    add_video_routes(app, service)
    add_handlers(app)
    service.start()
    yield TestClient(app), gate
    service.stop()


@pytest.fixture
def server(application):
    """The application without videos."""
    client, gate = application
    yield client, gate
    gate.open.set()
    gate.failure = None
    for video in client.get("/v1/videos").json()["data"]:
        client.delete(f"/v1/videos/{video['id']}")


def create(client, **fields):
    return client.post("/v1/videos", json={"prompt": CAPTION, "threshold": 0, "seed": 1, "blocks": 2, **fields})


def wait(client, video, until=("completed", "failed")):
    deadline = time.monotonic() + 20
    while video["status"] not in until:
        assert time.monotonic() < deadline, video
        time.sleep(0.01)
        video = client.get(f"/v1/videos/{video['id']}").json()
    return video


def test_create_poll_download(server, folder):
    client, _ = server
    queued = create(client, blocks=None, seed=3, output_format="gif", size="32x32").json()
    assert (queued["object"], queued["status"], queued["progress"]) == ("video", "queued", 0)
    assert queued["speculation"]["exact"] is False
    assert queued["speculation"]["blocks"] == []
    video = wait(client, queued)
    assert (video["status"], video["progress"], video["error"]) == ("completed", 100, None)
    assert (video["model"], video["size"], video["seconds"], video["seed"]) == ("shapes", "32x32", "0.8333", 3)
    speculation = video["speculation"]
    assert [block["maker"] for block in speculation["blocks"]] == ["target"] + ["drafter"] * 4
    assert speculation["blocks"][0]["score"] is None
    assert all(0 <= block["score"] <= 1 for block in speculation["blocks"][1:])
    assert speculation["accepted_share"] == 1
    assert speculation["threshold"] == 0
    assert speculation["seconds"]["generate"] > 0
    content = client.get(f"/v1/videos/{video['id']}/content")
    assert content.headers["content-type"] == "image/gif"
    expected = load_models(folder).engine.generate(CAPTION, _gate_of_zero(), seed=3).content
    with Image.open(io.BytesIO(content.content)) as picture:
        assert picture.size == (32, 32)
        assert picture.n_frames == len(expected) == 10
        shown = picture.convert("RGB").getpixel((0, 0))
    pixel = (expected[0, :, 0, 0].clamp(0, 1) * 255).round().int().tolist()
    assert max(abs(a - b) for a, b in zip(shown, pixel, strict=True)) <= 16  # a gif has 256 colors


def _gate_of_zero():
    from outrider.media import QualityGate

    return QualityGate(0.0)


def test_mp4_without_an_encoder_is_a_gif_and_says_so(server):
    client, _ = server
    video = wait(client, create(client).json())
    assert video["output_format"] == "gif"
    assert video["note"].startswith("mp4 cannot be encoded (no encoder")
    assert "/" not in video["note"]
    assert client.get(f"/v1/videos/{video['id']}/content").content.startswith(b"GIF8")


@pytest.mark.parametrize(
    ("fields", "makers", "threshold"),
    [
        ({"threshold": 1, "aggregate": "mean"}, "TTTTT", 1),
        ({"threshold": 1, "budget": 2}, "TTddd", 1),
        ({"threshold": 0, "force_first": False}, "ddddd", 0),
        ({"router": "target-only", "threshold": None}, "TTTTT", None),
        ({"router": "drafter-only", "threshold": None}, "ddddd", None),
        ({"router": "stride:2", "threshold": None}, "TdTdT", None),
        ({"router": "first:3", "threshold": None}, "TTTdd", None),
        ({"seconds": "0.3"}, "Td", 0),
        ({"seconds": 0.8333}, "Tdddd", 0),
    ],
)
def test_routers_and_durations(server, fields, makers, threshold):
    client, _ = server
    video = wait(client, create(client, **{"blocks": None, "output_format": "gif", "size": "16x16", **fields}).json())
    assert "".join("T" if b["maker"] == "target" else "d" for b in video["speculation"]["blocks"]) == makers
    assert video["speculation"]["threshold"] == threshold


def test_progress_queue_limit_and_cancellation(server):
    client, gate = server
    gate.open.clear()
    running = wait(client, create(client).json(), until=("in_progress",))
    waiting = create(client).json()
    assert waiting["status"] == "queued"
    full = create(client)
    assert full.status_code == 429
    assert full.json()["error"]["message"] == "1 videos wait already; try again later"
    assert full.headers["retry-after"]
    early = client.get(f"/v1/videos/{running['id']}/content")
    assert early.status_code == 400
    assert "is in_progress; wait until its status is completed" in early.json()["error"]["message"]
    for video in (running, waiting):
        deleted = client.delete(f"/v1/videos/{video['id']}")
        assert deleted.json() == {"id": video["id"], "object": "video.deleted", "deleted": True}
        assert client.get(f"/v1/videos/{video['id']}").status_code == 404
    third = create(client).json()
    gate.open.set()
    assert wait(client, third)["status"] == "completed"
    assert [video["id"] for video in client.get("/v1/videos").json()["data"]] == [third["id"]]


def test_progress_counts_blocks(server):
    client, gate = server
    gate.open.clear()
    video = create(client, blocks=4, threshold=None, router="stride:3").json()
    assert wait(client, video, until=("in_progress",))["progress"] == 0
    gate.open.set()
    video = wait(client, video)
    assert [block["index"] for block in video["speculation"]["blocks"]] == [0, 1, 2, 3]
    assert video["speculation"]["num_blocks"] == 4


def test_a_failure_is_reported_and_the_next_video_is_made(server):
    client, gate = server
    gate.failure = RuntimeError("no memory")
    video = wait(client, create(client).json())
    assert video["status"] == "failed"
    assert video["error"] == {"code": "server_error", "message": "RuntimeError: no memory"}
    content = client.get(f"/v1/videos/{video['id']}/content")
    assert content.status_code == 400
    assert "has failed: RuntimeError: no memory" in content.json()["error"]["message"]
    gate.failure = None
    assert wait(client, create(client).json())["status"] == "completed"


def test_list_and_limit_of_kept_videos(server):
    client, _ = server
    ids = [wait(client, create(client, blocks=1).json())["id"] for _ in range(5)]  # three are kept
    everything = client.get("/v1/videos").json()
    assert [video["id"] for video in everything["data"]] == ids[:1:-1]
    assert not everything["has_more"]
    assert client.get(f"/v1/videos/{ids[0]}").status_code == 404
    first = client.get("/v1/videos", params={"limit": 2, "order": "asc"}).json()
    assert first["has_more"]
    assert (first["first_id"], first["last_id"]) == (ids[2], ids[3])
    rest = client.get("/v1/videos", params={"limit": 2, "order": "asc", "after": ids[3]}).json()
    assert [video["id"] for video in rest["data"]] == ids[4:]
    assert client.get("/v1/videos", params={"after": "video_x"}).status_code == 404


@pytest.mark.parametrize(
    ("fields", "status", "param", "message"),
    [
        ({"prompt": "a cat"}, 400, "prompt", "has another form than the models know"),
        ({"prompt": CAPTION.replace("red", "pink")}, 400, "prompt", "has 'pink' in place of one of: red"),
        ({"prompt": "a" * 1001}, 400, "prompt", "at most 1000 characters"),
        ({"threshold": 2}, 400, "threshold", "threshold is 2, but this scorer's scores lie from 0 to 1"),
        ({"threshold": None}, 400, "threshold", "shapes has no calibration; give a threshold"),
        ({"threshold": "0.5"}, 400, "threshold", "use a number"),
        ({"aggregate": "best"}, 400, "aggregate", "aggregate is 'best'"),
        ({"budget": 0}, 400, "budget", "budget is 0; use at least 1"),
        ({"router": "zork"}, 400, "router", "router is 'zork'; use gate, target-only"),
        ({"router": "stride:0", "threshold": None}, 400, "router", "router is 'stride:0'"),
        ({"router": "target-only"}, 400, "threshold", "threshold belongs to router gate"),
        ({"blocks": 6}, 400, "blocks", "blocks is 6; these models make 1 to 5"),
        ({"seconds": 4, "blocks": None}, 400, "seconds", "seconds is 4.0; use a number above 0 and up to 0.8333"),
        ({"seconds": "nan", "blocks": None}, 400, "seconds", "seconds is nan"),
        ({"seconds": "long", "blocks": None}, 400, "seconds", "seconds is long"),
        ({"seconds": 0.5}, 400, "blocks", "blocks and seconds both set the duration"),
        ({"size": "720x1280"}, 400, "size", "size is '720x1280'; use a multiple of 16x16 up to 512x512"),
        ({"output_format": "webm"}, 400, "output_format", "'mp4' or 'gif'"),
        ({"seed": -1}, 400, "seed", "use a number of at least 0"),
        ({"model": "sora-2"}, 404, "model", "model 'sora-2' makes no videos here; use 'shapes'"),
        ({"zork": 1}, 400, "zork", "zork: this field is unknown; remove it, or check its spelling"),
    ],
)
def test_mistakes_are_one_line(server, fields, status, param, message):
    response = create(server[0], **fields)
    assert response.status_code == status
    error = response.json()["error"]
    assert message in error["message"]
    assert error["param"] == param
    assert "\n" not in error["message"]


def test_mistakes_of_the_body_and_of_names(server):
    client, _ = server
    for body, kind, message in (
        (b"{", "application/json", "the request is not valid JSON"),
        (b"[]", "application/json", "the request is no JSON object; send one"),
        (b"x", "multipart/form-data", "Missing boundary in multipart"),
    ):
        response = client.post("/v1/videos", content=body, headers={"content-type": kind})
        assert response.status_code == 400
        assert message in response.json()["error"]["message"]
    upload = client.post("/v1/videos", data={"prompt": CAPTION}, files={"input_reference": ("a.png", b"x")})
    assert "input_reference is a file, which these models cannot use" in upload.json()["error"]["message"]
    for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        response = client.request(method, f"/v1/videos/video_x{path}")
        assert response.status_code == 404
        assert "there is no video 'video_x'" in response.json()["error"]["message"]
    video = wait(client, create(client, blocks=1).json())
    response = client.get(f"/v1/videos/{video['id']}/content", params={"variant": "thumbnail"})
    assert response.json()["error"]["param"] == "variant"


def test_a_server_without_media_says_so():
    app = FastAPI()
    add_missing_video_routes(app)
    add_handlers(app)
    client = TestClient(app)
    for method, path in (("POST", ""), ("GET", ""), ("GET", "/video_x"), ("DELETE", "/video_x")):
        response = client.request(method, f"/v1/videos{path}")
        assert response.status_code == 404
        assert response.json()["error"]["message"] == "this server makes no videos; start it with --media DIR"


def test_the_calibration_of_the_folder_is_the_default(tmp_path):
    folder = write_models(tmp_path / "shapes")
    interval = Interval(value=0.98, low=0.97, high=0.99)
    calibration = Calibration(
        wanted=0.98,
        threshold=0.25,
        aggregate="mean",
        quality=interval,
        held_out=interval,
        speedup=1.5,
        accepted_share=0.5,
        drafts=40,
        reached=True,
    )
    calibration.write(folder / "calibration.json")
    served = load_videos(Settings(media=str(folder))).served
    from outrider.serve.videos.schema import VideoRequest

    router = VideoRequest(prompt=CAPTION, budget=2).task(served).router
    assert (router.threshold, router.aggregate, router.quality, router.budget) == (0.25, "mean", 0.98, 2)
    with pytest.raises(OutriderError, match="aggregate belongs to a threshold"):
        VideoRequest(prompt=CAPTION, aggregate="min").task(served)
    (folder / "calibration.json").write_text("{}")
    with pytest.raises(OutriderError, match=r"calibration .* cannot be read"):
        load_videos(Settings(media=str(folder)))


@pytest.mark.slow
def test_drift_of_the_accepted_share_is_logged_once(tmp_path, caplog, monkeypatch):
    folder = write_models(tmp_path / "shapes")
    interval = Interval(value=0.98, low=0.97, high=0.99)
    measured = {"quality": interval, "held_out": interval, "speedup": 1.5, "accepted_share": 0.5, "drafts": 400}
    calibration = Calibration(wanted=0.98, threshold=0.0, aggregate="min", reached=True, **measured)
    calibration.write(folder / "calibration.json")
    monkeypatch.setattr("outrider.serve.videos.service.DriftWatch", partial(DriftWatch, window=20))
    service = load_videos(Settings(media=str(folder)))
    app = FastAPI()
    add_video_routes(app, service)
    service.start()
    client = TestClient(app)

    def make(**fields):  # all drafts are accepted: no score is below 0
        video = client.post("/v1/videos", json={"prompt": CAPTION, "seed": 1, **fields}).json()
        assert wait(client, video)["speculation"]["accepted_share"] == 1

    def warnings():
        return [record.message for record in caplog.records if "at calibration" in record.message]

    for fields in ({"blocks": 2}, {"budget": 1}, {"threshold": 0}):  # not as at calibration
        for _ in range(20):
            make(**fields)
    assert not warnings()
    for _ in range(25):
        make()
    service.stop()
    (warning,) = warnings()
    assert warning.startswith("shapes: 100 % of the last 20 drafts were accepted, but 50 % at calibration")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--media none", "has no readable config.json"),
        ("--max-queued-videos 3", "--max-queued-videos belongs to --media"),
        ("--max-kept-videos 3", "--max-kept-videos belongs to --media"),
    ],
)
def test_mistakes_of_options(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke("serve", "--port", "0", "--target", "@nano", *words.split())
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.fixture(scope="module")
def both(folder):
    """The URL of a server of text and videos."""
    with serving(videos=load_videos(Settings(media=str(folder)))) as (url, _):
        yield url


@pytest.mark.filterwarnings("ignore:The Sora API")
def test_openai_client_beside_text(both):
    with openai.OpenAI(base_url=both + "/v1", api_key="any", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["nano", "shapes"]
        assert client.models.retrieve("shapes").video["max_blocks"] == 5
        video = client.videos.create(prompt=CAPTION, model="shapes", size="32x32", extra_body={"threshold": 0.5})
        text = client.completions.create(model="nano", prompt=PROMPT, max_tokens=4).choices[0].text
        assert text
        video = client.videos.poll(video.id, poll_interval_ms=20)
        assert video.status == "completed"
        assert video.speculation["threshold"] == 0.5
        assert client.videos.download_content(video.id).read().startswith(b"GIF8")
        assert [each.id for each in client.videos.list()] == [video.id]
        assert client.videos.delete(video.id).deleted
        with pytest.raises(openai.NotFoundError):
            client.videos.retrieve(video.id)


@needs_browser
def test_page_in_browser(both):
    with browse(both) as (page, expect):
        page.click("#menu")
        page.click("#open-videos")
        expect(page.locator("#video-model")).to_contain_text("shapes, not exact")
        page.fill("#threshold", "0")
        page.click("#video-go")
        expect(page.locator("#player img")).to_be_visible(timeout=20000)
        expect(page.locator("#video-status")).to_contain_text("mp4 cannot be encoded")
        assert page.locator("#strip .by2").count() == 1
        assert page.locator("#strip .by0").count() == 4
        assert page.evaluate("() => document.querySelector('#player img').naturalWidth") == 256
        assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
        page.fill("#caption", "a cat")
        page.click("#video-go")
        expect(page.locator("#video-error")).to_contain_text("has another form", timeout=20000)
