"""Draft heads that move to another target than the one that they were trained for."""

import json
from dataclasses import replace

import pytest
import torch

from outrider.errors import OutriderError
from outrider.models.heads.store import read_head
from outrider.train.data.batches import score_sequence
from outrider.train.data.sample import Sample
from outrider.train.model.trainee import make_trainee
from outrider.train.run import Training
from tests.helpers import tiny, train_setup
from tests.helpers.train_setup import NANO, make_settings, make_setup


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    """Two targets with one vocabulary, and one with another."""
    folder = tmp_path_factory.mktemp("targets")
    for name, size in (("previous", 128), ("new", 96)):
        tiny.save(folder / name, tiny.make_config("LlamaConfig", hidden_size=size, num_hidden_layers=6), seed=size)
    config = tiny.make_config("LlamaConfig", vocab_size=tiny.VOCAB + 8)
    tiny.save(folder / "other_vocab", config, size=tiny.VOCAB + 8)
    return folder


@pytest.fixture(scope="module")
def head(targets, tmp_path_factory):
    """A slim head for the target `previous`, with noise in all of its weights."""
    loaded = train_setup.load_target(targets / "previous")
    folder = tmp_path_factory.mktemp("head")
    settings = make_settings(hidden_size=64, draft_vocab_size=50)
    trainee = make_trainee("slim", settings, make_setup(loaded), loaded.tables)
    torch.manual_seed(3)
    with torch.no_grad():
        for weight in trainee.module.parameters():
            weight.add_(0.2 * torch.randn(weight.shape))
    trainee.module.ids.copy_(torch.arange(7, 57))
    trainee.save(folder)
    return str(folder)


def _samples(loaded, count=40, length=30):
    """Random sequences with the states of the layers 1, 2, 4 and 5. Layer 5 is the last one."""
    loaded.target.export_hidden_states((1, 2, 4, 5))
    samples = []
    for id in range(count):
        generator = torch.Generator().manual_seed(id)
        tokens = tuple(torch.randint(0, tiny.VOCAB, (length + 1,), generator=generator).tolist())
        with torch.inference_mode():
            states = score_sequence(loaded.target, tokens[:-1]).states((1, 2, 4, 5), 0, ())
        samples.append(Sample(id=id, tokens=tokens, states=states.to(torch.bfloat16), prompt=1))
    return samples


def _options(head, previous, **options):
    return make_settings(init_from=head, init_target=str(previous), **options)


def test_head_moved_to_its_own_target_is_unchanged(targets, head):
    loaded = train_setup.load_target(targets / "previous")
    samples = _samples(loaded)
    original = read_head(head, dtype=torch.float32, device=torch.device("cpu"))
    trainee = make_trainee("slim", _options(head, targets / "previous"), make_setup(loaded), loaded.tables)
    states = samples[0].states[:, :3].float()

    @torch.no_grad()
    def relative_error():
        fused = trainee.module.fuse_states(states)
        expected = original.fuse_states(states)
        return float((fused - expected).norm() / (expected - expected.mean(0)).norm())

    before = relative_error()
    trainee.begin(lambda: samples)
    assert before > 0.5
    assert relative_error() < 0.1
    original_state = original.state_dict()
    kept_names = {name for name in original_state if not name.startswith("fuse")}
    assert all(torch.equal(original_state[name], trainee.module.state_dict()[name]) for name in kept_names)
    assert trainee.ids.tolist() == list(range(7, 57))


def test_fitted_fusion_layer_is_optimal(targets, head):
    """On the fitted sequences, no other fusion layer has a smaller error, apart from the regularization."""
    previous, new = (train_setup.load_target(targets / name) for name in ("previous", "new"))
    previous_samples = _samples(previous)
    samples = _samples(new)
    trainee = make_trainee("slim", _options(head, targets / "previous"), make_setup(new), new.tables)
    assert trainee.module.description.target_hidden == 96
    original = read_head(head, dtype=torch.float32, device=torch.device("cpu"))
    trainee.begin(lambda: samples)
    expected = torch.cat([original.fuse_states(sample.states[:, :3].float()) for sample in previous_samples])

    @torch.no_grad()
    def squared_error():
        fused = torch.cat([trainee.module.fuse_states(sample.states[:, :3].float()) for sample in samples])
        return float((fused - expected).square().sum())

    best = squared_error()
    error_of_zero = float(expected.square().sum())
    assert best < error_of_zero
    fitted = trainee.module.fuse.weight.detach().clone()
    for seed in range(3):
        torch.manual_seed(seed)
        for size in (0.03, 0.3):
            direction = torch.nn.functional.normalize(torch.randn(fitted.shape), dim=(0, 1))
            with torch.no_grad():
                trainee.module.fuse.weight.copy_(fitted + size * fitted.norm() * direction)
            assert squared_error() > best


def test_training_moves_a_head_to_another_target(targets, head, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("one", "two and two", "three", "four")))
    options = _options(
        head,
        targets / "previous",
        batch_size=2,
        steps_per_generation=1,
        max_tokens=9,
        k=2,
        eval_every=0,
        proposer="none",
        target=str(targets / "new"),
    )
    settings = replace(options, out=str(tmp_path / "out"), data=[str(data)])
    document, lines = Training("slim", settings).run()
    assert document["cycles"] == len(lines) == 2
    assert read_head(tmp_path / "out", dtype=torch.float32, device=torch.device("cpu")).description.target_hidden == 96
    with pytest.raises(OutriderError, match="has a training with other options"):
        Training("slim", replace(settings, init_target=str(targets / "new")))


def test_invalid_moves_are_rejected(targets, head, tmp_path):
    previous, new = (train_setup.load_target(targets / name) for name in ("previous", "new"))
    with pytest.raises(OutriderError, match="add --init-from DIR, or leave it out"):
        make_settings(init_target="x")
    with pytest.raises(OutriderError, match="does not read the hidden states of a target"):
        make_trainee("draft", _options(NANO, targets / "previous"), make_setup(new), new.tables)
    with pytest.raises(OutriderError, match="is of kind eagle3, for a target with"):
        make_trainee("slim", make_settings(init_from=head), make_setup(new), new.tables)
    mtp = make_trainee("mtp", make_settings(), make_setup(previous), previous.tables)
    mtp.save(tmp_path / "mtp")
    with pytest.raises(OutriderError, match="uses its target's tables, or masks, is bound to that target"):
        make_trainee("mtp", _options(str(tmp_path / "mtp"), targets / "previous"), make_setup(new), new.tables)
    wrong_target = make_trainee("slim", _options(head, targets / "new"), make_setup(new), new.tables)
    with pytest.raises(OutriderError, match="is not the target of --init-from, which has width 128 and 6 layers"):
        wrong_target.begin(lambda: pytest.fail("the target is checked before samples are generated"))
    other_vocab = make_trainee("slim", _options(head, targets / "other_vocab"), make_setup(new), new.tables)
    with pytest.raises(OutriderError, match="has another vocabulary than the target"):
        other_vocab.begin(list)
