"""Heads that go on with another target than the one that they were trained for."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from outrider.errors import OutriderError
from outrider.heads.store import read_head
from outrider.train.data.batches import read_alone
from outrider.train.data.sample import Sample
from outrider.train.model.trainee import make_trainee
from outrider.train.run import Training
from tests.helpers import tiny, train_setup
from tests.helpers.train_setup import NANO, make_settings, make_setup

QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    """Two of one vocabulary, and one of another."""
    folder = tmp_path_factory.mktemp("targets")
    for name, size in (("former", 128), ("new", 96)):
        tiny.save(folder / name, tiny.make_config("LlamaConfig", hidden_size=size, num_hidden_layers=6), seed=size)
    wide = tiny.make_config("LlamaConfig", vocab_size=tiny.VOCAB + 8)
    tiny.save(folder / "wordy", wide, size=tiny.VOCAB + 8)
    return folder


@pytest.fixture(scope="module")
def head(targets, tmp_path_factory):
    """A slim head of `former`, all of whose weights say something."""
    house, folder = train_setup.house(targets / "former"), tmp_path_factory.mktemp("head")
    pupil = make_trainee("slim", make_settings(hidden_size=64, draft_vocab_size=50), make_setup(house), house.tables)
    torch.manual_seed(3)
    with torch.no_grad():
        for weight in pupil.module.parameters():
            weight.add_(0.2 * torch.randn(weight.shape))
    pupil.module.ids.copy_(torch.arange(7, 57))
    pupil.save(folder)
    return str(folder)


def _samples(house, count=40, length=30):
    """Texts, with the states of layers 1, 2, 4 and 5, the last."""
    house.target.export_hidden_states((1, 2, 4, 5))
    found = []
    for id in range(count):
        tokens = tuple(
            torch.randint(0, tiny.VOCAB, (length + 1,), generator=torch.Generator().manual_seed(id)).tolist()
        )
        with torch.inference_mode():
            states = read_alone(house.target, tokens[:-1]).states((1, 2, 4, 5), 0, ())
        found.append(Sample(id=id, tokens=tokens, states=states.to(torch.bfloat16), prompt=1))
    return found


def _options(head, former, **other):
    return make_settings(init_from=head, init_target=str(former), **other)


def test_a_head_handed_to_its_own_target_sees_what_it_saw(targets, head):
    house = train_setup.house(targets / "former")
    samples = _samples(house)
    old = read_head(head, dtype=torch.float32, device=torch.device("cpu"))
    pupil = make_trainee("slim", _options(head, targets / "former"), make_setup(house), house.tables)
    states = samples[0].states[:, :3].float()

    @torch.no_grad()
    def missed():
        seen, meant = pupil.module.fused(states), old.fused(states)
        return float((seen - meant).norm() / (meant - meant.mean(0)).norm())

    before = missed()
    pupil.begin(lambda: samples)
    assert before > 0.5
    assert missed() < 0.1
    kept = {name for name in old.state_dict() if not name.startswith("fuse")}
    assert all(torch.equal(old.state_dict()[name], pupil.module.state_dict()[name]) for name in kept)
    assert pupil.ids.tolist() == list(range(7, 57))


def test_what_is_found_is_the_nearest(targets, head):
    """No fusion comes nearer, on the texts that were read, but for the ridge."""
    former, new = (train_setup.house(targets / name) for name in ("former", "new"))
    meant, samples = _samples(former), _samples(new)
    pupil = make_trainee("slim", _options(head, targets / "former"), make_setup(new), new.tables)
    assert pupil.module.description.target_hidden == 96
    old = read_head(head, dtype=torch.float32, device=torch.device("cpu"))
    pupil.begin(lambda: samples)
    wanted = torch.cat([old.fused(each.states[:, :3].float()) for each in meant])

    @torch.no_grad()
    def missed():
        return float(
            (torch.cat([pupil.module.fused(each.states[:, :3].float()) for each in samples]) - wanted).square().sum()
        )

    best, nothing = missed(), float(wanted.square().sum())
    assert best < nothing
    found = pupil.module.fuse.weight.detach().clone()
    for seed in range(3):
        torch.manual_seed(seed)
        for size in (0.03, 0.3):
            with torch.no_grad():
                pupil.module.fuse.weight.copy_(
                    found + size * found.norm() * torch.nn.functional.normalize(torch.randn(found.shape), dim=(0, 1))
                )
            assert missed() > best


def test_a_training_goes_on_with_another_target(targets, head, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("one", "two and two", "three", "four")))
    settings = replace(
        _options(
            head,
            targets / "former",
            batch_size=2,
            steps_per_generation=1,
            max_tokens=9,
            k=2,
            eval_every=0,
            proposer="none",
        ),
        out=str(tmp_path / "out"),
        data=[str(data)],
        target=str(targets / "new"),
    )
    document, lines = Training("slim", settings).run(QUIET)
    assert document["waves"] == len(lines) == 2
    assert read_head(tmp_path / "out", dtype=torch.float32, device=torch.device("cpu")).description.target_hidden == 96
    with pytest.raises(OutriderError, match="holds a training with other options"):
        Training("slim", replace(settings, init_target=str(targets / "new")))


def test_what_cannot_be_handed_on(targets, head, tmp_path):
    former, new = (train_setup.house(targets / name) for name in ("former", "new"))
    with pytest.raises(OutriderError, match="add --init-from DIR, or leave it out"):
        make_settings(init_target="x")
    with pytest.raises(OutriderError, match="reads no target's states"):
        make_trainee("draft", _options(NANO, targets / "former"), make_setup(new), new.tables)
    with pytest.raises(OutriderError, match="is of kind eagle3, for a target with"):
        make_trainee("slim", make_settings(init_from=head), make_setup(new), new.tables)
    bound = make_trainee("mtp", make_settings(), make_setup(former), former.tables)
    bound.save(tmp_path / "mtp")
    with pytest.raises(OutriderError, match="uses its target's tables, or masks, is bound to that target"):
        make_trainee("mtp", _options(str(tmp_path / "mtp"), targets / "former"), make_setup(new), new.tables)
    wrong = make_trainee("slim", _options(head, targets / "new"), make_setup(new), new.tables)
    with pytest.raises(
        OutriderError, match="is not what --init-from was trained for, which is 128 wide and has 6 layers"
    ):
        wrong.begin(lambda: pytest.fail("that is known before"))
    wordy = make_trainee("slim", _options(head, targets / "wordy"), make_setup(new), new.tables)
    with pytest.raises(OutriderError, match="has another vocabulary than the target"):
        wordy.begin(list)
