"""Pages in a browser, if one is installed."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

_FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run")
needs_browser = pytest.mark.skipif(not find_spec("playwright"), reason="`make test-page` installs what this needs")


class Opened(NamedTuple):
    """A page of Playwright, and its function for assertions that wait."""

    page: Any
    expect: Any


@contextmanager
def started_browser() -> Iterator[Any]:
    """Start the browser of the machine, or that of Playwright. The thread cannot run an event loop meanwhile."""
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as started:
        path = shutil.which("chromium") or shutil.which("google-chrome") or started.chromium.executable_path
        if not Path(path).exists():
            pytest.skip("no browser is installed")
        browser = started.chromium.launch(executable_path=path, args=list(_FLAGS))
        yield browser
        browser.close()


@contextmanager
def opened(browser: Any, url: str, *, width: int = 390, **options: Any) -> Iterator[Opened]:
    """Open a page with an empty storage. Fail if a script of it raises, or its policy forbids a part.

    `options` are those of `Browser.new_context`.
    """
    playwright = pytest.importorskip("playwright.sync_api")
    errors: list[str] = []
    context = browser.new_context(viewport={"width": width, "height": 844}, **options)
    page = context.new_page()
    page.set_default_timeout(20_000)
    playwright.expect.set_options(timeout=20_000)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if "Policy" in message.text else None)
    page.goto(url)
    yield Opened(page, playwright.expect)
    context.close()
    assert not errors


@contextmanager
def browse(url: str) -> Iterator[Opened]:
    """Open a page in a browser of its own."""
    with started_browser() as browser, opened(browser, url) as page:
        yield page
