"""The load check of an unchanged checkpoint runs once."""

import json
import shutil
from types import SimpleNamespace

import pytest

from outrider import LLM, OutriderError
from outrider.models.loader import check, check_store
from outrider.models.loader.load import load_checkpoint
from tests.helpers import tiny


@pytest.fixture
def checks(tmp_path, monkeypatch):
    """Keep results in a folder of the test. Returns the list of checks that ran."""
    monkeypatch.setattr(check_store, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(check, "once", check_store.once)
    ran = []
    run = check.check_target

    def counted(target, checkpoint, kv_dtype):
        ran.append(target.kernels)
        return run(target, checkpoint, kv_dtype)

    monkeypatch.setattr(check, "check_target", counted)
    return ran


@pytest.fixture
def folder(tmp_path):
    return tiny.save(tmp_path / "model", tiny.EVERY["llama"]())


def _load(folder, **options):
    settings = {"proposer": "none", "max_num_seqs": 1, "max_model_len": 64, "dtype": "float32"}
    return LLM(folder, **settings | options).parts.loaded.check


def test_an_unchanged_checkpoint_is_checked_once(folder, checks, monkeypatch):
    read = []  # the folders whose weights a start reads for their fingerprint
    fingerprint = check_store.model_fingerprint
    monkeypatch.setattr(check_store, "model_fingerprint", lambda each: read.append(each) or fingerprint(each))
    first = _load(folder)
    assert read == [folder]
    assert first.error < first.tolerance
    assert first.against.startswith("transformers ")
    assert _load(folder) == first
    assert len(checks) == 1
    _load(folder, check="always")
    assert len(checks) == 2


@pytest.mark.parametrize("change", ["weights", "config", "settings", "code", "transformers"])
def test_a_change_checks_again(folder, checks, change, monkeypatch):
    _load(folder)
    options = {}
    if change == "weights":
        tiny.save(folder, tiny.EVERY["llama"](), seed=1)
    elif change == "config":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    elif change == "settings":
        options = {"dtype": "bfloat16"}
    elif change == "code":
        monkeypatch.setattr(check_store, "code_fingerprint", lambda: "changed")
    else:
        monkeypatch.setattr(check_store, "versions", lambda: {"transformers": "6"})
    _load(folder, **options)
    assert len(checks) == 2


def test_triton_kernels_need_no_native_ones(folder, checks, monkeypatch):
    def fail():
        raise AssertionError("the native kernels are compiled")

    monkeypatch.setattr(check_store, "load_library", fail)
    target = SimpleNamespace(kernels="triton int8", compile_seconds=0.0)
    result = check_store.CheckResult(error=0.0, tolerance=0.1, against="transformers 5", date="2026-01-01")
    checkpoint = load_checkpoint(folder, dtype="float32", device="cpu")
    assert check_store.once(checkpoint, target, 8, lambda: result) == result


def test_a_check_that_fails_is_not_kept(folder, checks, monkeypatch):
    monkeypatch.setattr(check, "TOLERANCE", dict.fromkeys(check.TOLERANCE, 0.0))
    for _ in range(2):
        with pytest.raises(OutriderError, match="the logits of a draft tree differ"):
            _load(folder, kernels="torch")
    assert len(checks) == 2


def test_never_skips_the_check(folder, checks):
    assert _load(folder, check="never") is None
    assert not checks
    with pytest.raises(OutriderError, match="check is 'sometimes'; use once, always or never"):
        _load(folder, check="sometimes")


def test_draft_models_are_checked_once_as_well(folder, checks):
    for _ in range(2):
        _load(folder, proposer=f"draft:{folder}", k=2)
    assert len(checks) == 1  # the draft is the same checkpoint


def test_a_damaged_result_checks_again(folder, checks, tmp_path):
    _load(folder)
    for file in (tmp_path / "cache" / "checks").iterdir():
        file.write_text("{")
    _load(folder)
    assert len(checks) == 2


def test_a_folder_that_cannot_be_written_does_no_harm(folder, checks, tmp_path):
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    (tmp_path / "cache").write_text("a file")
    _load(folder)
    _load(folder)
    assert len(checks) == 2
