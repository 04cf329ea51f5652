"""Tests of the tables of `outrider bench`, and of the page with them."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from outrider import OutriderError, Stats
from outrider.core.bound import TotalVariation
from outrider.lab.bench.figures import Spread
from outrider.lab.bench.run import run_bench
from outrider.lab.bench.settings import Settings
from outrider.lab.bench.table import show
from outrider.models.loader.embedded import embedded
from outrider.runtime.report.page import check_report, write_report
from tests.helpers.commands import succeed
from tests.helpers.configured import with_engine


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    file = tmp_path_factory.mktemp("bench") / "prompts.jsonl"
    lines = [{"category": "a<b>&c", "prompt": "<|endoftext|>import os\n"}, {"category": "talk", "prompt": "One two"}]
    file.write_text("\n".join(map(json.dumps, lines)))
    nano = str(embedded("nano"))
    models = {"target": nano, "proposer": f"draft:{nano}", "dtype": "float32", "k": 4}
    settings = with_engine(Settings, prompts=str(file), repeats=1, max_tokens=6, **models)
    return run_bench(settings, progress=Console(quiet=True))


def shown(result, width=160):
    console = Console(width=width, file=io.StringIO())
    show(result, console)
    return console.file.getvalue()


def with_figures(result, **changes):
    """Return a result whose figures of all categories are changed."""
    overall = result.measured.overall
    decoding = [replace(each, **changes) for each in (overall.plain, overall.speculative)]
    figures = replace(overall, plain=decoding[0], speculative=decoding[1])
    return replace(
        result, measured=replace(result.measured, by_category={"function_writing": figures, "overall": figures})
    )


def test_tables_of_completions_that_end_in_one_round(result):
    """There is no speed, no latency and no draft token. The tables say so."""
    stats = Stats(passes=1, output_tokens=1)
    changed = with_figures(result, tokens_per_s=None, speedup=None, latency_ms=None, stats=stats)
    limits = result.measured.limits
    unmeasured = [replace(each, share_of_limit=None) for each in (limits.plain, limits.speculative)]
    limits = replace(limits, plain=unmeasured[0], speculative=unmeasured[1])
    text = shown(replace(changed, measured=replace(changed.measured, limits=limits)))
    assert "plain –, speculative –" in text
    assert "reaches" not in text
    assert "reaches" in shown(result)
    assert "0.00" not in text.partition("Milliseconds between tokens")[2].partition("Overall tokens/s")[0]


def test_inexact_verifier_is_reported(result):
    assert "not exact" not in shown(result)
    assert "(not exact)" in shown(replace(result, exact=False))
    bounded = replace(result, exact=False, bound=TotalVariation(0.1))
    assert "(not exact, total variation distance of at most 0.1 per token)" in shown(bounded)


def test_summary_names_a_model_of_the_hub(result):
    engine = replace(result.settings.engine, target="org/model@v1")
    named = replace(result, settings=replace(result.settings, engine=engine), proposer="ngram")
    assert named.summary().startswith("org/model@v1 with ngram")


def test_long_drafts_leave_room_for_the_speeds(result):
    """A terminal of 80 columns shows whole numbers, although the draft has 32 positions."""
    stats = Stats(rounds=1, passes=100, output_tokens=200, reached=(100,) * 32, accepted=(91,) * 32)
    rate = Spread(median=2370.0, min=2000.0, max=2400.0)
    speedup = Spread(median=1.67, min=1.5, max=1.9)
    text = shown(with_figures(result, tokens_per_s=rate, speedup=speedup, stats=stats), width=80)
    table = text.partition("Milliseconds")[0]
    assert "…" not in table
    assert table.count("2370") == 4  # plain and speculative, in two rows
    assert table.count(" 91") == 16  # the first 8 positions, in two rows


@pytest.mark.parametrize("file", [".", "nowhere/report.html"])
def test_report_needs_a_file_in_an_existing_folder(monkeypatch, tmp_path, file):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OutriderError, match="is not a file in an existing folder"):
        check_report(file)


def test_report_is_refused_with_the_suffix_of_another_format(tmp_path):
    with pytest.raises(OutriderError, match=r"page.pdf has another suffix than .html"):
        check_report(tmp_path / "page.pdf")


def test_report_that_cannot_be_written(tmp_path):
    with pytest.raises(OutriderError, match="cannot be written"):
        write_report({}, lambda document, console: None, tmp_path / "nowhere" / "report.html")


def test_command_writes_report(monkeypatch, result, tmp_path):
    """The page has the tables and the document. It loads nothing and has no scripts."""
    monkeypatch.setattr("outrider.lab.bench.command.run_bench", lambda settings, **_: result)
    file = tmp_path / "report.html"
    done = succeed("bench", "--report", file)
    assert json.loads(done.stdout.splitlines()[-1])["results"].keys() == {"a<b>&c", "talk", "overall"}
    assert f"the report is in {file}" in done.stderr
    text = file.read_text("utf-8")
    for part in ("Decoding, tokens/s", "GFLOP/s", "a&lt;b&gt;&amp;c", result.hardware["cpu"], "gemm_flops_per_s"):
        assert part in text
    assert "a<b>" not in text
    assert not any(part in text for part in ("<script", "<link", "src=", "@import"))
