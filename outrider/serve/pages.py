"""The pages of the server in a browser: the chat at / and the API at /docs. They need no internet and no API key."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from fastapi import FastAPI
from starlette.responses import FileResponse

_FOLDER = Path(__file__).parent / "page"
PARTS = "/page/"  # the path of the scripts, styles and images
_DOCUMENTS = {"/": _FOLDER / "index.html", "/docs": _FOLDER / "docs.html"}
_FILES: Mapping[str, Path] = MappingProxyType(_DOCUMENTS | {PARTS + file.name: file for file in _FOLDER.iterdir()})
PAGE_PATHS = frozenset(_FILES)
_MEDIA_TYPES = {".css": "text/css", ".html": "text/html", ".js": "text/javascript", ".svg": "image/svg+xml"}
# Scripts and styles come from files alone, and no script makes HTML of a text.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' blob:;"
    " media-src blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
    " require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_file(path: str, headers: Mapping[str, str] = MappingProxyType({})) -> FileResponse:
    """Return the file of a path in `PAGE_PATHS`, with `headers` besides those of all pages."""
    file = _FILES[path]
    return FileResponse(file, media_type=_MEDIA_TYPES[file.suffix], headers={**_HEADERS, **headers})


def add_pages(app: FastAPI) -> None:
    """Add the routes of the pages."""
    for path in PAGE_PATHS:
        _add(app, path)


def _add(app: FastAPI, path: str) -> None:
    async def page() -> FileResponse:
        return page_file(path)

    app.add_api_route(path, page, methods=["GET", "HEAD"], include_in_schema=False, response_model=None)
