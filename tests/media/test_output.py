"""Video files, comparisons and ImageReward."""

import sys
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from outrider.errors import OutriderError
from outrider.media import DrafterOnly, ImageRewardScorer, QualityGate, Scorer, TargetOnly, load_models
from outrider.media.engine.engine import score_draft
from outrider.media.output.compare import COLORS, draw_comparison
from outrider.media.output.writer import check_video_file, write_video
from outrider.media.results import Maker
from tests.media.made_up import CAPTION, write_models

PICTURES = [Image.new("RGB", (32, 16), (8 * i, 0, 0)) for i in range(4)]


def frames_of(file):
    with Image.open(file) as picture:
        return picture.n_frames


def test_a_gif_holds_all_frames(tmp_path):
    written = write_video(PICTURES, tmp_path / "a.gif", fps=10)
    assert written.note is None
    assert frames_of(written.file) == 4


def test_without_an_encoder_the_video_is_a_gif(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    written = write_video(PICTURES, tmp_path / "a.mp4", fps=10)
    assert written.file == tmp_path / "a.gif"
    assert "mp4 cannot be encoded (no encoder" in written.note
    assert "\n" not in written.note
    assert frames_of(written.file) == 4


@pytest.mark.parametrize("error", [RuntimeError("No ffmpeg exe could be found.\nInstall it."), OSError("broken pipe")])
def test_a_broken_encoder_gives_a_gif(tmp_path, monkeypatch, error):
    def write_frames(*_, **__):
        raise error

    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", SimpleNamespace(write_frames=write_frames))
    written = write_video(PICTURES, tmp_path / "a.mp4", fps=10)
    assert written.file.suffix == ".gif"
    assert str(error).splitlines()[0] in written.note
    assert "\n" not in written.note
    assert not (tmp_path / "a.mp4").exists()


def test_an_encoder_gets_all_frames(tmp_path, monkeypatch):
    got = []

    def write_frames(file, size, **options):
        got.append((size, options["fps"]))
        while True:
            frame = yield
            if frame is not None:
                got.append(len(frame))

    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", SimpleNamespace(write_frames=write_frames))
    written = write_video(PICTURES, tmp_path / "a.mp4", fps=10)
    assert (written.file.suffix, written.note) == (".mp4", None)
    assert got == [((32, 16), 10), *[32 * 16 * 3] * 4]


def test_mp4_with_the_real_encoder(tmp_path):
    pytest.importorskip("imageio_ffmpeg", reason='needs imageio-ffmpeg: pip install "outrider[media]"')
    written = write_video(PICTURES, tmp_path / "a.mp4", fps=10)
    assert written.note is None
    assert written.file.read_bytes()[4:8] == b"ftyp"


def test_wrong_names_of_videos(tmp_path, monkeypatch):
    with pytest.raises(OutriderError, match=r"end it with \.mp4 or \.gif"):
        check_video_file(tmp_path / "a.avi")
    with pytest.raises(OutriderError, match="cannot be written"):
        check_video_file(tmp_path / "none" / "a.gif")
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(OutriderError, match="videos need pillow"):
        check_video_file(tmp_path / "a.gif")


def test_borders_have_the_color_of_the_maker(tmp_path):
    engine = load_models(write_models(tmp_path)).engine
    target, drafter = (engine.generate(CAPTION, router) for router in (TargetOnly(), DrafterOnly()))
    first = engine.generate(CAPTION, QualityGate(0.0))
    pictures = draw_comparison([("target", "", target), ("drafter", "", drafter), ("both", "", first)])
    assert len(pictures) == 10
    assert len({picture.size for picture in pictures}) == 1
    assert all(length % 2 == 0 for length in pictures[0].size)
    side = 16 * 5 + 2 * 6
    row = 24 + 34 + 2
    edges = [10 + i * (side + 10) + 2 for i in range(3)]
    borders = [[picture.getpixel((x, row)) for x in edges] for picture in (pictures[0], pictures[-1])]
    of_target, of_drafter = COLORS[Maker.TARGET], COLORS[Maker.DRAFTER]
    assert borders == [[of_target, of_drafter, of_target], [of_target, of_drafter, of_drafter]]


class StandIn:
    """The interface of ImageReward's model: a float for one image, a list for several."""

    def score(self, prompt, images):
        assert prompt == CAPTION
        assert all(isinstance(image, Image.Image) for image in images)
        scores = [image.getpixel((0, 0))[0] / 100 - 1 for image in images]
        return scores[0] if len(scores) == 1 else scores


def test_image_reward():
    scorer = ImageRewardScorer(StandIn())
    assert isinstance(scorer, Scorer)
    assert scorer.score_range is None
    content = torch.zeros(2, 3, 8, 8)
    content[1] = 1.0
    assert scorer.score(CAPTION, content).tolist() == pytest.approx([-1, 1.55])
    assert score_draft(scorer, CAPTION, content[:1]).values.tolist() == [-1]
    with pytest.raises(OutriderError, match="has no method score"):
        ImageRewardScorer(object())
