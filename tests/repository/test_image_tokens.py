"""The recipe of image tokens from end to end, in the smallest size."""

import json

import pytest
import torch

from outrider import LLM
from recipes.image_tokens import codebook as codes
from recipes.image_tokens import measure, train
from recipes.image_tokens.images import CAPTIONS, COLORS, SHAPES, Caption, draw, random_captions
from tests.helpers.recipes import run_recipe


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    out = tmp_path_factory.mktemp("images")
    sizes = "--codes 32 --target 1x32 --draft 1x16 --images 300 --batch 16"
    times = "--target-minutes 0.03 --draft-minutes 0.03 --classifier-minutes 0.02"
    result = run_recipe(train.main, "--out", out, *sizes.split(), *times.split())
    assert result.exit_code == 0, result.output
    return out, json.loads(result.stdout.splitlines()[-1])


def test_a_pair_trains_and_runs(pair):
    out, report = pair
    assert report["codebook_mse"] < 0.02
    assert report["target"]["parameters"] > report["draft"]["parameters"]
    assert report["target"]["validation_nats"] < 3.7  # log(46) = 3.8 is what knowing nothing costs
    llm = LLM(out / "target", proposer="none", dtype="float32", device="cpu")
    prompt = llm.encode("<start> large red circle")
    assert prompt == (32, 35, 36, 42)
    assert llm.parts.vocab == 32 + 2 + 2 + len(COLORS) + len(SHAPES)


def test_training_resumes(pair):
    out, report = pair
    sizes = "--codes 32 --images 300 --batch 16"
    times = "--target-minutes 0.01 --draft-minutes 0 --classifier-minutes 0 --resume"
    result = run_recipe(train.main, "--out", out, *sizes.split(), *times.split())
    assert result.exit_code == 0, result.output
    again = json.loads(result.stdout.splitlines()[-1])
    assert again["draft"]["validation_nats"] == pytest.approx(report["draft"]["validation_nats"], abs=1e-3)
    assert again["target"]["steps"] >= 1
    assert again["classifier"] == report["classifier"]


def test_the_table(pair, tmp_path):
    words = ["--each", 2, "--limit", 3, "--sheet", tmp_path / "sheet.png"]
    names = ["block", "lantern:delta=0.3", "gsd:clusters=4", "pcg:k=2", "bins:distance=4"]
    result = run_recipe(measure.main, pair[0], *words, *(word for name in names for word in ("--verifier", name)))
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout.splitlines()[-1])
    rows = {row["verifier"]: row for row in document["rows"]}
    assert document["images"] == 6
    assert rows["block"]["bound"] == "exact"
    assert rows["lantern:delta=0.3"]["bound"] == "tvd 0.3"
    assert rows["gsd:clusters=4"]["bound"] == rows["pcg:k=2"]["bound"] == "group"
    assert rows["bins:distance=4"]["bound"] == "bin distance 4"
    assert all(rows[name]["tau"] > 1 for name in names)
    assert rows["plain decoding, these seeds"]["distance"] == 0
    assert all(0 <= row["caption"] <= min(row["size"], row["color"], row["shape"]) <= 1 for row in rows.values())
    assert (tmp_path / "sheet.png").exists()


def test_images_are_drawn_as_their_captions_say():
    captions = torch.tensor(CAPTIONS)
    one, two = (draw(captions, torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(one, two)
    assert one.shape == (48, 3, 32, 32)
    assert Caption(1, 0, 0).words == ("large", "red", "circle")
    for number, color in enumerate(COLORS.values()):
        images = one[captions[:, 1] == number]
        near = (images - torch.tensor(color)[:, None, None]).abs().amax(1) < 0.18
        area = near.flatten(1).sum(1)
        assert (area > 10).all()
        large = captions[captions[:, 1] == number][:, 0] == 1
        assert area[large].float().mean() > 1.5 * area[~large].float().mean()
    assert random_captions(9, torch.Generator().manual_seed(0)).shape == (9, 3)


def test_codes_stand_for_patches():
    images = draw(torch.tensor(CAPTIONS), torch.Generator().manual_seed(5))
    book = codes.fit(images, 64, seed=0)
    tokens = codes.encode(images, book)
    restored = codes.decode(tokens, book)
    assert tokens.shape == (48, 64)
    assert restored.shape == images.shape
    assert float((restored - images).square().mean()) < 0.3 * float(images.var())
    assert torch.equal(codes.encode(restored, book), tokens)
    blank = codes.decode(torch.tensor([[64, *[0] * 63]]), book)  # an id that is no code
    assert torch.allclose(blank[0, :, :4, :4].flatten(), book.mean(0))


def test_distances_of_images():
    generator = torch.Generator().manual_seed(0)
    one, two = (torch.rand(60, 3, 32, 32, generator=generator) for _ in range(2))
    assert abs(measure.energy_distance(one, two)) < 0.01
    assert measure.energy_distance(one, two + 0.5) > 0.3
    flat = torch.full((2, 3, 32, 32), 0.5)
    assert measure.seams(flat) == 0
    flat[..., 16:] = 0.75  # one border of seven, in one of two directions
    assert measure.seams(flat) == pytest.approx(0.25 / 7 / 2)
