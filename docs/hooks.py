"""A hook of mkdocs: links of CONTRIBUTING.md and CHANGELOG.md also work in the pages that include these files."""

import re
from typing import Any

from markdown import Extension, Markdown
from markdown.preprocessors import Preprocessor

_BEHIND_SNIPPETS = 31  # pymdownx.snippets has priority 32
_ROOT = re.compile(r"\]\((?:docs/([^)]+)|(CHANGELOG|CONTRIBUTING)\.md([^)]*))\)")


class _Links(Preprocessor):
    def run(self, lines: list[str]) -> list[str]:
        return [_ROOT.sub(_moved, line) for line in lines]


class _RootLinks(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.preprocessors.register(_Links(md), "root-links", _BEHIND_SNIPPETS)


def on_config(config: Any) -> Any:
    """Add the extension behind those of mkdocs.yml."""
    config.markdown_extensions.append(_RootLinks())
    return config


def _moved(link: re.Match[str]) -> str:
    inside, root, anchor = link.groups()
    return f"]({inside})" if inside else f"]({root.lower()}.md{anchor})"
