"""The documentation: pages that the navigation names, links that lead somewhere, and generated pages."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(
    [*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "SECURITY.md"]
)
LINK = re.compile(r"\]\((?!https?:|mailto:|<)([^)#\s]*)(?:#([^)\s]*))?\)")


def anchors(page):
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).strip() for heading in headings]
    return {re.sub(r"[-\s]+", "-", slug) for slug in slugs}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    for path, anchor in LINK.findall(text):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{path} does not exist"
        if anchor and target.suffix == ".md" and "::: " not in target.read_text("utf-8"):
            assert anchor in anchors(target), f"{path} has no heading #{anchor}"


def test_the_navigation_names_every_page():
    named = set(re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), flags=re.MULTILINE))
    assert named == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}


def test_the_reference_lists_the_options_that_there_are():
    done = subprocess.run(
        [sys.executable, DOCS / "generate_cli.py", "--check"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_page_of_architectures_is_up_to_date():
    done = subprocess.run(
        [sys.executable, DOCS / "generate_models.py", "--check"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
