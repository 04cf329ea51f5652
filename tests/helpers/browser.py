"""Pages in a browser, if one is installed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or ""
_FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run")
needs_browser = pytest.mark.skipif(not CHROMIUM, reason="no browser is installed")


class Opened(NamedTuple):
    """A page of Playwright, and its function for assertions that wait."""

    page: Any
    expect: Any


@contextmanager
def browse(url: str) -> Iterator[Opened]:
    """Open a page on a small screen. Fail if a script of it raises an error."""
    playwright = pytest.importorskip("playwright.sync_api")
    page_errors: list[str] = []
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=list(_FLAGS))
        page = browser.new_page(viewport={"width": 390, "height": 844})
        page.on("pageerror", lambda error: page_errors.append(str(error)))
        page.goto(url)
        yield Opened(page, playwright.expect)
        browser.close()
    assert not page_errors
