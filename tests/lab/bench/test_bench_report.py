"""Tests of the HTML report: it is complete and self-contained, and says what is missing."""

from __future__ import annotations

import io
import json
import re
import sys
from html.parser import HTMLParser

import pytest
from rich.console import Console
from typer.testing import CliRunner

from outrider import OutriderError
from outrider.cli.app import app
from outrider.lab.bench.html import page
from outrider.lab.bench.run import run_bench
from outrider.lab.bench.settings import Settings
from outrider.lab.bench.table import show
from outrider.models.loader.embedded import embedded
from outrider.runtime.report.page import check_report, write_report
from tests.helpers.configured import with_engine

TITLES = [
    "Tokens/s and the limit",
    "Speedup by category",
    "Acceptance by position",
    "Acceptance by temperature",
    "Time between tokens",
    "Time of a round",
    "Tokens/s against k",
    "Tokens/s against batch",
    "Tokens/s against context",
]
SWEPT = {"Acceptance by temperature", "Tokens/s against k", "Tokens/s against batch", "Tokens/s against context"}


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    file = tmp_path_factory.mktemp("bench") / "prompts.jsonl"
    lines = [{"category": "a<b>&c", "prompt": "<|endoftext|>import os\n"}, {"category": "talk", "prompt": "One two"}]
    file.write_text("\n".join(map(json.dumps, lines)))
    sweep = {"ks": (0, 2), "batches": (1, 2), "contexts": (32, 64), "temperatures": (0.0, 1.0)}
    nano = str(embedded("nano"))
    models = {"target": nano, "proposer": f"draft:{nano}", "dtype": "float32", "k": 4}
    settings = with_engine(Settings, prompts=str(file), repeats=1, max_tokens=6, **sweep, **models)
    return json.loads(json.dumps(run_bench(settings, progress=Console(quiet=True))))


class PageParser(HTMLParser):
    """Checks that elements nest, and collects ids and texts."""

    VOID_TAGS = frozenset({"meta", "path", "use", "rect", "circle", "br"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in self.VOID_TAGS:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.ids += [value for name, value in attrs if name == "id"]

    def handle_endtag(self, tag):
        if tag not in self.VOID_TAGS:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)


def test_page_is_complete(document):
    text = page(document)
    parser = PageParser(text)
    assert not parser.open
    assert parser.texts["h3"] == TITLES
    assert len(parser.ids) == len(set(parser.ids))
    assert set(re.findall(r'(?:href="|url\()#([^")]+)', text)) <= set(parser.ids)
    headings = ["By category", "Against k", "Against batch", "Against context", "Against temperature"]
    assert parser.texts["h2"] == [*headings, "Memory", "Conditions"]
    cells = " ".join(parser.texts["td"])
    for part in (document["hardware"]["cpu"], document["versions"]["torch"], "GB/s", "GFLOP/s", "float32"):
        assert part in cells


def test_page_is_self_contained(document):
    """The page loads nothing and has no scripts, and every color is a CSS variable of the page."""
    text = page(document)
    assert not re.search(r"https?:|//|<script|<link|@import|src=", text)
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text
    body = text.split("</style>", 1)[1]
    assert set(re.findall(r"(?:fill|stroke): (#\w+)", body)) == set()
    assert set(re.findall(r"var\((--[\w-]+)\)", text)) <= set(re.findall(r"(--[\w-]+):", text))


def test_category_names_are_escaped(document):
    text = page(document)
    assert "a&lt;b&gt;&amp;c" in text
    assert "a<b>" not in text


def test_plots_without_data_are_left_out(document):
    text = page(document | {"sweeps": {}})
    assert PageParser(text).texts["h3"] == [title for title in TITLES if title not in SWEPT]


def test_page_of_completions_that_end_in_one_round(document):
    """There is no speed, no latency and no draft token. The page says so."""
    missing = {"tokens_per_s": None, "speedup": None, "latency_ms": None, "acceptance_by_position": [], "rounds": 0}
    figures = {name: each | missing for name, each in document["results"]["overall"].items()}
    limits = {name: document["limits"][name] | {"share_of_limit": None} for name in ("plain", "speculative")}
    changed = {"results": {"overall": figures}, "sweeps": {}, "limits": document["limits"] | limits}
    parser = PageParser(page(document | changed))
    assert "h3" not in parser.texts
    assert parser.texts["h1"] == ["Too few tokens to measure speed"]


def test_inexact_verifier_is_reported(document):
    assert "not exact" not in page(document)
    assert "not exact" in page(document | {"exact": False})


def test_long_drafts_leave_room_for_the_speeds(document):
    """A terminal of 80 columns shows whole numbers, although the draft has 32 positions."""
    figures = {name: dict(each) for name, each in document["results"]["overall"].items()}
    for each in figures.values():
        each["acceptance_by_position"] = [0.91] * 32
        each["tokens_per_s"] = {"median": 2370.0, "min": 2000.0, "max": 2400.0}
        each["speedup"] = {"median": 1.67, "min": 1.5, "max": 1.9}
    console = Console(width=80, file=io.StringIO())
    show(document | {"results": {"function_writing": figures, "overall": figures}}, console)
    table = console.file.getvalue().partition("Milliseconds")[0]
    assert "…" not in table
    assert table.count("2370") == 4  # plain and speculative, in two rows
    assert table.count(" 91") == 16  # the first 8 positions, in two rows


def test_missing_matplotlib_is_reported_before_measuring(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = CliRunner().invoke(app, ["bench", "--report", str(tmp_path / "r.html"), "--prompts", "nothing.jsonl"])
    assert result.exit_code == 2
    assert 'pip install "outrider[report]"' in result.stderr


@pytest.mark.parametrize("file", [".", "nowhere/report.html"])
def test_report_needs_a_file_in_an_existing_folder(monkeypatch, tmp_path, file):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OutriderError, match="is not a file in an existing folder"):
        check_report(file)


def test_report_is_refused_with_the_suffix_of_another_format(tmp_path):
    with pytest.raises(OutriderError, match=r"page.pdf has another suffix than .html"):
        check_report(tmp_path / "page.pdf")


def test_write_report(document, tmp_path):
    file = tmp_path / "report.html"
    check_report(file)
    write_report(page(document), file)
    assert file.read_text(encoding="utf-8") == page(document)
    with pytest.raises(OutriderError, match="cannot be written"):
        write_report(page(document), tmp_path / "nowhere" / "report.html")


def test_command_writes_report(monkeypatch, document, tmp_path):
    monkeypatch.setattr("outrider.lab.bench.command.run_bench", lambda settings, **_: document)
    file = tmp_path / "report.html"
    result = CliRunner().invoke(app, ["bench", "--report", str(file)])
    assert result.exit_code == 0, result.output
    assert file.is_file()
    assert json.loads(result.stdout.splitlines()[-1]) == document
    assert f"the report is in {file}" in result.stderr
