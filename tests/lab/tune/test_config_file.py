"""Tests of the files of advice that `--config` reads."""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from outrider import OutriderError
from outrider.cli.app import app
from outrider.core.config import EngineConfig
from outrider.core.params import AUTO
from outrider.drafting.propose.draft_model.window import WindowedTarget
from outrider.lab.tune.config import settings_dict
from outrider.lab.tune.measure import VariantEngines
from outrider.lab.tune.settings import Settings
from outrider.models.loader.embedded import embedded
from tests.helpers import tiny
from tests.helpers.commands import invoke
from tests.helpers.configured import configured
from tests.helpers.heads import write_new_head
from tests.lab.tune.commands import document

pytestmark = pytest.mark.usefixtures("quick")


def advice_file(path, **settings):
    """Write a file of `outrider tune` with these settings."""
    advised = {"proposer": "ngram", "k": 3, "verifier": "walk"}
    advised |= {name: settings.pop(name) for name in advised if name in settings}
    recommended = settings_dict(EngineConfig(dtype="float32", **settings), **advised)
    path.write_text(json.dumps({"benchmark": "outrider tune", "version": 1, "settings": recommended}))
    return path


def test_config_replaces_defaults(tmp_path):
    file = str(advice_file(tmp_path / "advice.json", proposer="merge(ngram,suffix:9)", k=AUTO))
    assert configured(file, threads=3) == EngineConfig(
        proposer="merge(ngram,suffix:9)", k=AUTO, verifier="walk", dtype="float32", threads=3
    )
    options = configured(file, k=7, dtype="bfloat16")
    assert (options.k, options.dtype, options.proposer) == (7, "bfloat16", "merge(ngram,suffix:9)")
    # The k and the verifier of the file are for its own proposer.
    assert configured(file, proposer="ngram") == EngineConfig(proposer="ngram", dtype="float32")


def test_config_of_another_target_is_a_warning(tmp_path, caplog):
    file = str(advice_file(tmp_path / "advice.json", k=AUTO))
    assert configured(file, target="@mini").target == "@mini"
    assert not caplog.records  # the same target by another name
    configured(file, target="@nano", proposer="suffix")
    assert not caplog.records  # only the precision comes from the file
    assert configured(file, target="@nano").proposer == "ngram"
    (record,) = caplog.records
    assert "measured with the embedded target; run outrider tune for @nano" in record.message


def test_draft_window_applies_to_proposers_with_a_draft(prompts):
    draft = f"draft:{embedded('nano')}"
    settings = Settings(
        engine=EngineConfig(draft_window=32, max_model_len=96, dtype="float32", threads=1),
        proposers=("ngram", draft),
        prompts=prompts,
    )
    proposers = VariantEngines(settings).proposers
    model = proposers[draft].model
    assert isinstance(model, WindowedTarget)
    assert (model.inner.context, model.context) == (32, 96)
    window = {
        spec: settings_dict(settings.engine, proposer=spec, k=2, verifier="walk")["draft_window"] for spec in proposers
    }
    assert window == {"ngram": None, draft: 32}


@pytest.mark.skipif(not tiny.compiles(), reason="no C++ compiler")
def test_draft_quantize_applies_to_proposers_with_a_draft(prompts):
    draft = f"draft:{embedded('nano')}"
    settings = Settings(
        engine=EngineConfig(draft_quantize="int8", max_model_len=96, dtype="float32", threads=1),
        proposers=("ngram", draft),
        prompts=prompts,
    )
    proposers = VariantEngines(settings).proposers
    assert proposers[draft].model.kernels == "native int8"
    names = {
        spec: settings_dict(settings.engine, proposer=spec, k=2, verifier="walk")["draft_quantize"]
        for spec in proposers
    }
    assert names == {"ngram": None, draft: "int8"}


@pytest.mark.skipif(not tiny.compiles(), reason="no C++ compiler")
def test_weights_of_drafts_are_compared(tmp_path, prompts):
    """A draft that cannot be quantized, as a Medusa head, is measured with its weights as stored."""
    draft = f"draft:{embedded('nano')}"
    head = f"draft:{write_new_head(tmp_path / 'head', 'medusa')}"
    settings = Settings(
        proposers=("ngram", draft, head),
        draft_quantizes={draft: (None, "int8"), head: (None, "int8")},
        prompts=prompts,
        engine=EngineConfig(max_model_len=96, dtype="float32", threads=1),
    )
    engines = VariantEngines(settings)
    assert engines.drafts == [("ngram", None), (draft, None), (draft, "int8"), (head, None)]
    assert list(engines.left_out) == ["draft:head in int8"]
    assert engines.proposers[draft].model.kernels == "native"
    assert engines.proposers[f"{draft} in int8"].model.kernels == "native int8"
    chosen = {"proposer": draft, "k": 2, "verifier": "block"}
    assert settings_dict(settings.engine, **chosen)["draft_quantize"] is None
    assert settings_dict(settings.engine, **chosen, draft_quantize="int8")["draft_quantize"] == "int8"
    with pytest.raises(OutriderError, match="quantize"):
        VariantEngines(replace(settings, draft_quantizes={head: ("int8",)}))


@pytest.mark.parametrize(
    ("name", "value", "other"),
    [("draft_window", 32, 48), ("draft_quantize", "int4", "int8"), ("draft_candidates", 64, 8)],
)
def test_draft_settings_of_a_file(tmp_path, name, value, other):
    file = str(advice_file(tmp_path / "advice.json", proposer=f"draft:{embedded('nano')}", **{name: value}))
    assert getattr(configured(file), name) == value
    assert getattr(configured(file, **{name: other}), name) == other
    # Those of the file are for its own proposer.
    assert getattr(configured(file, proposer="ngram"), name) is None


def test_config_on_the_command_line(tmp_path, prompts):
    file = advice_file(tmp_path / "advice.json", proposer="ngram", k=3)
    runner = CliRunner()
    default = EngineConfig().k
    loaded = []

    def load(models):
        loaded.append(models)
        return SimpleNamespace(parts=SimpleNamespace(source_rules=None))

    with pytest.MonkeyPatch().context() as patch:
        patch.setattr("outrider.cli.run.load", load)
        patch.setattr("outrider.cli.run.converse", lambda llm, params, **_: True)
        patch.setattr("outrider.cli.output.Output", lambda llm, **_: None)
        # An option on the command line takes precedence, even if it has the default value.
        for options in ([], ["--k", str(default)], ["--proposer", "suffix"]):
            assert runner.invoke(app, ["run", "x", "--config", str(file), *options]).exit_code == 0
    expected = [("ngram", 3), ("ngram", default), ("suffix", default)]
    assert [(models.proposer, models.k) for models in loaded] == expected
    options = ["--prompts", prompts, "--limit", "1", "--repeats", "1", "--max-tokens", "4", "--threads", "1"]
    result = runner.invoke(app, ["bench", "--config", str(file), *options])
    assert result.exit_code == 0, result.output
    arguments = document(result)["arguments"]
    assert (arguments["proposer"], arguments["k"], arguments["verifier"]) == ("ngram", 3, "walk")
    assert arguments["dtype"] == "float32"


def advice_bytes(**settings):
    """Return the content of a file with these settings, which may be invalid."""
    defaults = {"target": None, "proposer": "ngram", "k": 3, "verifier": "walk", "dtype": "auto", "kernels": "auto"}
    defaults |= {"quantize": None, "draft_window": None, "draft_quantize": None}
    defaults |= {"draft_candidates": None, "models": {}}
    return json.dumps({"benchmark": "outrider tune", "version": 1, "settings": defaults | settings}).encode()


INVALID_SETTINGS = (
    *(
        (name, value)
        for name in ("target", "proposer", "verifier", "dtype", "quantize", "kv_dtype")
        for value in (5, ["x"])
    ),
    *(("k", value) for value in (-1, "some", True, None, 1.5)),
    *(("draft_window", value) for value in (0, "some", True, 1.5)),
    *(("draft_candidates", value) for value in (0, "some")),
    *(("draft_quantize", value) for value in ("int3", 4, True)),
    *(("models", value) for value in ([], None, {"x": 5})),
    ("proposer", None),
)


def test_config_that_recommends_plain_decoding(tmp_path):
    file = str(advice_file(tmp_path / "advice.json", proposer="none", k=0))
    assert configured(file).k == 0
    result = invoke("bench", "--config", file)
    assert "k is 0, so there is nothing to compare with plain decoding; give --k of at least 1" in result.stderr
    with pytest.raises(OutriderError, match="recommends plain decoding, and k was given"):
        configured(file, k=8)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        (b"\xff\xfe", "it is not UTF-8 text"),
        (b"{", r"is not valid JSON \(Expecting property name.*\); correct it, or write one with: outrider tune --out"),
        (b"[]", "not a file of outrider tune or outrider fit; write it with: outrider tune --out"),
        (b'{"benchmark": "outrider bench"}', "not a file of outrider tune"),
        (b'{"benchmark": "outrider tune", "version": 9}', "has version 9, and this program reads version 1"),
        (b'{"benchmark": "outrider tune", "version": 1}', "lacks settings"),
        *((advice_bytes(**{name: value}), f"has {name} ") for name, value in INVALID_SETTINGS),
        (advice_bytes(proposer=f"draft:{embedded('nano')}"), "has no hash of .*nano"),
    ],
)
def test_invalid_config_file(tmp_path, content, message):
    file = tmp_path / "advice.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(OutriderError, match=message):
        configured(file)


def test_config_with_missing_or_changed_models(tmp_path):
    target, draft = tmp_path / "target", tmp_path / "draft"
    for folder in (target, draft):
        shutil.copytree(embedded("nano"), folder)
    file = str(advice_file(tmp_path / "advice.json", target=str(target), proposer=f"draft:{draft}"))
    assert configured(file).proposer == f"draft:{draft}"
    shutil.rmtree(draft)
    with pytest.raises(OutriderError, match=r"draft, a model of .*advice.json, is missing; give the model"):
        configured(file)
    assert configured(file, proposer="ngram").target == str(target)
    (target / "config.json").write_text((target / "config.json").read_text() + "\n")
    with pytest.raises(OutriderError, match="target has changed since"):
        configured(file, proposer="ngram")
    assert configured(file, target="x", proposer="ngram").target == "x"


def test_config_with_gguf_files(tmp_path):
    target, draft = tmp_path / "target.gguf", tmp_path / "draft.gguf"
    for file in (target, draft):
        file.write_bytes(b"GGUF of " + file.name.encode())  # its content is hashed, and not read
    advice = str(advice_file(tmp_path / "advice.json", target=str(target), proposer=f"draft:{draft}"))
    options = configured(advice)
    assert (options.target, options.proposer) == (str(target), f"draft:{draft}")
    draft.write_bytes(b"GGUF of another model")
    with pytest.raises(OutriderError, match=r"draft.gguf has changed since"):
        configured(advice)
    target.unlink()
    with pytest.raises(OutriderError, match=r"target.gguf, a model of .*, is missing; give the model with --target"):
        configured(advice)


def test_config_has_absolute_folders(tmp_path, monkeypatch):
    shutil.copytree(embedded("nano"), tmp_path / "small, draft")
    monkeypatch.chdir(tmp_path)
    expression = 'merge(ngram:1-3,draft:"small, draft")'
    settings = settings_dict(EngineConfig(), proposer=expression, k=2, verifier="walk")
    assert settings["proposer"] == f'merge(ngram:1-3,draft:"{tmp_path}/small, draft")'
    assert list(settings["models"]) == [f"{tmp_path}/small, draft"]
