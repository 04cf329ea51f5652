"""`--config` with a file of settings."""

import json

import pytest

from outrider.core.config import EngineConfig
from outrider.errors import OutriderError
from tests.helpers.commands import invoke
from tests.helpers.configured import configured


def _write(path, **settings):
    path.write_text(json.dumps(settings))
    return str(path)


def test_settings_fill_in_options_that_are_not_set(tmp_path):
    file = _write(tmp_path / "engine.json", proposer="ngram", k=3, threads=2, cache_gb=0.5)
    assert configured(file, k=5) == EngineConfig(proposer="ngram", k=5, threads=2, cache_gb=0.5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_seqs": 4}, "max_seqs is not an option of an engine; did you mean max_num_seqs"),
        ({"k": -1}, "k is -1"),
        ({"quantize": "int3"}, "quantize 'int3' is unknown"),
        ({"prefix_caching": 1}, "prefix_caching is 1; use True or False"),
    ],
)
def test_a_wrong_setting_is_an_error_that_names_the_file(tmp_path, settings, message):
    file = _write(tmp_path / "engine.json", **settings)
    with pytest.raises(OutriderError, match=message) as error:
        configured(file)
    assert str(error.value).startswith(f"config {file}: ")


def test_options_may_need_settings_of_the_file(tmp_path):
    """A record that has only one of them would be refused."""
    file = _write(tmp_path / "engine.json", tp=2)
    assert configured(file, draft_placement="sharded").tp == 2


@pytest.mark.parametrize(
    ("command", "unset"),
    [(["run", "x"], {"max_num_seqs": 1}), (["serve"], {"isolate_faults": True, "max_round_ms": 60.0})],
)
def test_the_engine_gets_the_settings(tmp_path, monkeypatch, command, unset):
    loaded = []

    def load(*, config):
        loaded.append(config)
        raise OutriderError("stop here")

    monkeypatch.setattr("outrider.cli.run.LLM", load)
    settings = {"proposer": "ngram", "k": 2, "max_model_len": 128, "cache_gb": 0.2, "prefix_caching": False}
    file = _write(tmp_path / "engine.json", **settings)
    port = ["--port", "0"] if command == ["serve"] else []
    result = invoke(*command, "--config", file, "--k", "3", *port)
    assert "stop here" in result.stderr
    assert loaded == [EngineConfig(**settings | {"k": 3} | unset)]


def test_bench_refuses_settings_that_it_has_no_use_for(tmp_path):
    file = _write(tmp_path / "engine.json", max_num_seqs=2)
    result = invoke("bench", "--config", file)
    assert result.exit_code == 2
    assert "max_num_seqs is no setting of outrider bench, which runs --batch sequences at once" in result.stderr
