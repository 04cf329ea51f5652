"""The speculative configuration of vLLM and SGLang, and what other packages add."""

import json
from importlib.metadata import EntryPoint

import pytest
from typer.testing import CliRunner

from outrider.cli.app import app
from outrider.cli.config_file import merge_config
from outrider.core import packages
from outrider.core.config import EngineConfig
from outrider.core.speculative_config import read_speculative_config
from outrider.drafting.propose.registry import check_proposer
from outrider.engine.verifiers import find_verifier
from outrider.errors import OutriderError
from outrider.verify.rules import EXACT

READ = [
    (
        {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 5, "prompt_lookup_min": 2},
        ("ngram:2-5", 4),
    ),
    ({"model": "[ngram]", "prompt_lookup_max": 3}, ("ngram:3-3", None)),
    ({"method": "suffix"}, ("suffix", None)),
    ({"method": "eagle3", "model": "org/head", "num_speculative_tokens": 3}, ("draft:org/head", 3)),
    ({"model": "org/draft"}, ("draft:org/draft", None)),
    ({"method": "deepseek_mtp", "num_speculative_tokens": 1}, ("mtp", 1)),
    (
        {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": "d", "speculative_num_steps": 5},
        ("draft:d", 5),
    ),
    ({"speculative_algorithm": "NEXTN"}, ("mtp", None)),
]


@pytest.mark.parametrize(("fields", "expected"), READ)
def test_a_configuration_is_a_proposer_and_k(fields, expected):
    assert read_speculative_config(json.dumps(fields)) == expected
    for given in (fields, json.dumps(fields)):
        config = EngineConfig(speculative_config=given)
        assert (config.proposer, config.k) == (expected[0], expected[1] or "auto")


def test_a_file_of_settings_may_hold_the_object(tmp_path):
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({"target": "@nano", "speculative_config": READ[0][0]}))
    settings = merge_config({}, str(file), given=())
    assert EngineConfig(**settings).proposer == READ[0][1][0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a JSON object"),
        ([], "is not a JSON object"),
        ({"method": "guess"}, "'guess'; use ngram, suffix"),
        ('{"disable_by_batch_size": 4}', "'disable_by_batch_size'; use method, model"),
        ('{"method": "guess"}', "'guess'; use ngram, suffix"),
        ('{"method": "eagle"}', "no model"),
        ('{"method": "suffix", "prompt_lookup_max": 2}', "use the method ngram"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "at least 1"),
    ],
)
def test_a_mistake_names_what_is_known(text, words):
    with pytest.raises(OutriderError) as raised:
        read_speculative_config(text)
    assert words in str(raised.value)


def test_a_configuration_and_a_proposer_are_one_too_many():
    with pytest.raises(OutriderError, match="leave one of them out"):
        EngineConfig(speculative_config='{"method": "ngram"}', proposer="suffix")


def greet(name: str) -> None:
    """A command of another package."""
    print(f"Hello {name}")


@pytest.fixture
def entry_points(monkeypatch):
    points = {
        "proposers": EntryPoint("mine", "outrider.core.proposer:NoProposer", "outrider.proposers"),
        "verifiers": EntryPoint("mine", "outrider.verify.rules:EXACT.walk", "outrider.verifiers"),
        "commands": EntryPoint("greet", f"{__name__}:greet", "outrider.commands"),
    }
    monkeypatch.setattr(packages, "entry_points", lambda group: [points[group.partition(".")[2]]])
    packages.added.cache_clear()
    yield
    packages.added.cache_clear()


def test_other_packages_add_proposers_verifiers_and_commands(entry_points, monkeypatch):
    check_proposer("merge(ngram,mine)")
    monkeypatch.setattr(EntryPoint, "load", lambda self: EXACT["walk"] if self.group.endswith("rs") else greet)
    assert find_verifier("mine", "ngram") is EXACT["walk"]
    result = CliRunner().invoke(app, ["greet", "Ann"])
    assert result.output == "Hello Ann\n"
