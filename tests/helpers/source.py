"""Read the layer list of the architecture page and the imports of the package."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "outrider"
ARCHITECTURE = ROOT / "docs" / "explanation" / "architecture.md"
PUBLIC_FILES = frozenset({"__init__.py", "__main__.py", "_version.py", "errors.py", "llm.py", "plugin.py"})
LAYERLESS = frozenset({"__init__", "__main__", "_version", "errors"})


def files() -> list[Path]:
    """Every module of the package."""
    return sorted(PACKAGE.rglob("*.py"))


def layers() -> dict[str, int]:
    """The layer number of each folder, from the list in the architecture page; 0 is the lowest."""
    block = re.search(r"```layers\n(.*?)```", ARCHITECTURE.read_text("utf-8"), re.DOTALL)
    assert block is not None, f"{ARCHITECTURE} has no layers block"
    return {name: number for number, line in enumerate(block[1].splitlines()) for name in line.split()}


def owner(path: Path) -> str:
    """The top-level folder or file of the package that holds a module, without its suffix."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_owners(path: Path) -> Iterator[str]:
    """Top-level folders and files of this package that a module imports anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "outrider":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("outrider."):
            yield node.module.split(".")[1]
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[1] for alias in node.names if alias.name.startswith("outrider."))
