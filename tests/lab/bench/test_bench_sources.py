"""`outrider bench` with an encoder-decoder target, whose prompts are sources."""

import json

import pytest
from rich.console import Console

from outrider.errors import OutriderError
from outrider.lab.bench.pass_work import bytes_per_pass
from outrider.lab.bench.run import run_bench
from outrider.lab.bench.settings import Settings
from outrider.llm import LLM
from tests.helpers import tiny
from tests.helpers.configured import with_engine

QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("bart"), tiny.ENCODER_DECODER["bart"]())


@pytest.fixture
def prompts(tmp_path):
    return write(tmp_path, {"source": "abcabc", "category": "x"}, {"source": "hello", "prompt": "h"})


def write(tmp_path, *lines):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(file)


def settings(folder, prompts, **options):
    defaults = {"proposer": "ngram", "k": 4, "repeats": 1, "max_tokens": 6, "dtype": "float32", "device": "cpu"}
    return with_engine(Settings, target=str(folder), prompts=prompts, **defaults | options)


def test_plain_and_speculative_decoding_are_measured(folder, prompts):
    document = run_bench(settings(folder, prompts), progress=QUIET).as_dict()
    assert set(document["results"]) == {"x", "prompts", "overall"}
    overall = document["results"]["overall"]
    assert overall["plain"]["output_tokens"] == overall["speculative"]["output_tokens"] > 0
    assert overall["plain"]["tau"] == 1
    assert overall["speculative"]["draft_tokens"] > 0


def test_encoder_is_no_part_of_a_pass(folder):
    llm = LLM(folder, proposer="none", dtype="float32", device="cpu")
    model = llm.parts.loaded.checkpoint.model
    layers = sum(weight.nbytes for weight in model.get_decoder().layers.parameters())
    assert bytes_per_pass(llm, folder).dense == layers + model.get_output_embeddings().weight.nbytes


REFUSED = {
    "no prompts": ({"prompts": None}, "the embedded prompts have no sources"),
    "context": ({"contexts": (64,), "max_tokens": 6}, "--context lengthens prompts"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_options(options, message, folder, prompts):
    with pytest.raises(OutriderError, match=message):
        run_bench(settings(folder, options.pop("prompts", prompts), **options), progress=QUIET)


def test_invalid_lines(folder, tmp_path):
    with pytest.raises(OutriderError, match="1: no source, which this encoder-decoder target reads"):
        run_bench(settings(folder, write(tmp_path, {"prompt": "a"})), progress=QUIET)
    with pytest.raises(OutriderError, match="prompt line-1: source is 129 tokens long, and the encoder takes 128"):
        run_bench(settings(folder, write(tmp_path, {"source": "a" * 129})), progress=QUIET)
