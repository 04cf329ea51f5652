"""Names on the Hugging Face Hub: `org/name`, `org/name@revision`, and `org/name:Q4_K_M` for a GGUF file."""

import re
from dataclasses import dataclass
from pathlib import Path

from outrider.models.loader.paths import is_gguf

_NAME = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>[^\s:@]+))?(?::(?P<gguf>[^\s:@]+))?", flags=re.ASCII)

_CACHED = re.compile(r".*/models--(?P<org>[^/]+?)--(?P<name>[^/]+)/snapshots/[^/]+(?P<file>/.*)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class HubName:
    """The name of a model on the Hub."""

    repo: str  # org/name
    revision: str | None = None  # a branch, a tag or a commit; None: main
    gguf: str | None = None  # a type such as Q4_K_M in the name of a GGUF file, or that name without the suffix

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"{self.repo}{revision}{f':{self.gguf}' if self.gguf else ''}"


def hub_name(name: str | Path | None) -> HubName | None:
    """Return what a text names on the Hub; None if it is a path.

    A path is what exists here, what begins with `/`, `.` or `~`, what ends in `.gguf`, and what is not `org/name`.
    """
    text = str(name)
    match = None if is_gguf(text) else _NAME.fullmatch(text)
    if match is None or Path(text).exists():
        return None
    return HubName(**match.groupdict())


def shown(path: str) -> str:
    """Return the name of a model whose files are in the cache of the Hub, or the path of another one, for reports."""
    return _CACHED.sub(r"\g<org>/\g<name>\g<file>", path)
