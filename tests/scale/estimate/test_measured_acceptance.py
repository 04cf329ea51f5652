"""The acceptance that `outrider project` reads from a benchmark."""

import json

import pytest

from outrider import OutriderError
from outrider.scale.estimate.measured import read_bench
from outrider.scale.estimate.pair import Acceptance
from tests.helpers.commands import succeed
from tests.scale.estimate.projected import OPTIONS, projected


@pytest.fixture(scope="module")
def benchmark(tmp_path_factory):
    """A file with the output of a small benchmark."""
    folder = tmp_path_factory.mktemp("bench")
    prompts = folder / "prompts.jsonl"
    prompts.write_text(json.dumps({"category": "code", "prompt": "<|endoftext|>import os\nimport sys\n"}) + "\n")
    words = ["--prompts", str(prompts), "--repeats", "1", "--max-tokens", "16", "--k", "3", "--threads", "1"]
    result = succeed("bench", *words, "--dtype", "float32")
    file = folder / "bench.txt"
    file.write_text(result.stdout)
    return file


def test_acceptance_from_a_benchmark(benchmark):
    figures = json.loads(benchmark.read_text().splitlines()[-1])["results"]["overall"]["speculative"]
    measured = read_bench(str(benchmark))
    assert measured.acceptance.tau(measured.acceptance.depth) == pytest.approx(figures["tau"])
    assert measured.acceptance.rates[1:] == tuple(figures["acceptance_by_position"][1:])
    assert measured.exact
    document, text = projected(*OPTIONS[:4], "--from", str(benchmark), "--category", "code")
    assert document["acceptance"]["measured_tau"] == figures["tau"]
    assert "code of bench.txt: the embedded target with draft:@nano, k 3" in " ".join(text.split())
    assert "Another proposer: the acceptance was measured with draft:@nano" in text
    assert "Another proposer" not in projected(*OPTIONS[:4], "--from", str(benchmark), "--proposer", "draft:1B")[1]


def bench_document(**figures):
    """Return the document of a benchmark, with other figures."""
    defaults = {"tau": 2.0, "acceptance_by_position": [0.8, 0.5], "passes": 10, "draft_tokens": 10}
    arguments = {"target": None, "k": 2, "temperature": 0.0}
    results = {"overall": {"speculative": defaults | figures}}
    return {
        "benchmark": "outrider bench",
        "results": results,
        "arguments": arguments,
        "proposer": "ngram",
        "exact": False,
    }


@pytest.mark.parametrize(
    ("measured", "proposer", "warns"),
    [
        ("ngram", "ngram", False),
        ("merge(ngram:1-3, suffix)", "ngram", False),
        ("merge(ngram,suffix)", "draft:1B", True),
        ("draft:@nano", "ngram", True),
        ('first(ngram,draft:"a, b")', "ngram", True),
        ("tree:small", "head:0.04", False),
    ],
)
def test_warns_if_acceptance_is_of_another_kind_of_proposer(tmp_path, measured, proposer, warns):
    file = tmp_path / "bench.json"
    file.write_text(json.dumps(bench_document() | {"proposer": measured}))
    _, text = projected(*OPTIONS[:4], "--from", str(file), "--proposer", proposer)
    assert ("Another proposer" in text) is warns


def test_acceptance_includes_passes_without_a_draft(tmp_path):
    """Rates of 0.8 and 0.5 alone would give a tau of 2.2. Half of the positions had a draft token."""
    file = tmp_path / "bench.json"
    file.write_text(json.dumps(bench_document()))
    measured = read_bench(str(file))
    assert measured.acceptance == Acceptance(rates=(0.8 * 1.0 / (0.8 + 0.8 * 0.5), 0.5), nodes=0.5)
    assert measured.acceptance.tau(2) == pytest.approx(2.0)
    assert "was lossy" in projected(*OPTIONS[:4], "--from", str(file))[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a JSON document"),
        ("a table\nno document", "is not a JSON document"),
        ('{"benchmark": "outrider bench --calibrate"}', "is not the output of outrider bench"),
        ("[1]", "is not the output of outrider bench"),
        (json.dumps(bench_document(tau="x")), "the figures in .* are damaged"),
        (json.dumps(bench_document(passes=0)), "the figures in .* are damaged"),
        (json.dumps(bench_document(acceptance_by_position=[])), "no draft token was accepted"),
        (json.dumps(bench_document(acceptance_by_position=[0.0])), "no draft token was accepted"),
        (json.dumps(bench_document(acceptance_by_position=[1.5])), "acceptance rate is"),
    ],
)
def test_errors_of_invalid_benchmark_files(tmp_path, text, message):
    file = tmp_path / "out.txt"
    file.write_text(text)
    with pytest.raises(OutriderError, match=message):
        read_bench(str(file))


def test_errors_of_unreadable_benchmark_files(tmp_path):
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for name, message in (("nowhere", "No such file"), ("bytes", "is not UTF-8 text"), ("", "directory")):
        with pytest.raises(OutriderError, match=message):
            read_bench(str(tmp_path / name))
    file = tmp_path / "bench.json"
    file.write_text(json.dumps(bench_document()))
    with pytest.raises(OutriderError, match="has no category 'poems'; use overall"):
        read_bench(str(file), category="poems")
