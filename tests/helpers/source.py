"""Read the layer list of the architecture page and the imports of the package."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "outrider"
ARCHITECTURE = ROOT / "docs" / "explanation" / "architecture.md"
PUBLIC_FILES = frozenset({"__init__.py", "__main__.py", "_version.py", "errors.py", "llm.py", "plugin.py"})
LAYERLESS = frozenset({"__init__", "__main__", "_version", "errors"})


def files() -> list[Path]:
    """Every module of the package."""
    return sorted(PACKAGE.rglob("*.py"))


def layers() -> dict[str, tuple[int, int]]:
    """Return the layer of each folder, from the list in the architecture page, and its layer within its own folder.

    `models(cache < torch)` stands for `models`, `models/cache` and, above it, `models/torch`. (0, 0) is the lowest.
    """
    block = re.search(r"```layers\n(.*?)```", ARCHITECTURE.read_text("utf-8"), re.DOTALL)
    assert block is not None, f"{ARCHITECTURE} has no layers block"
    found = {}
    for number, line in enumerate(block[1].splitlines()):
        for folder, inside in re.findall(r"(\w+)(?:\((.*?)\))?", line):
            found[folder] = (number, 0)
            for inner, names in enumerate(inside.split("<")):
                found |= {f"{folder}/{name}": (number, inner) for name in names.split()}
    return found


LAYERS = layers()


def owner(module: tuple[str, ...]) -> str:
    """Return the folder or file of the layer list that holds a module, such as ("models", "torch", "target")."""
    inner = "/".join(module[:2])
    return inner if inner in LAYERS else module[0]


def owner_of_file(path: Path) -> str:
    """Return the folder or file of the layer list that holds a file of the package."""
    return owner(path.relative_to(PACKAGE).with_suffix("").parts)


_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Module(NamedTuple):
    """Facts of a module of the package."""

    owners: frozenset[str]  # the folders and files of the layer list that it imports anywhere
    loaded: tuple[ast.ImportFrom, ...]  # its imports that run when it is loaded
    undocumented: tuple[str, ...]  # its public classes and functions without a docstring
    nested: tuple[int, ...]  # the lines of comprehensions that have another one inside


@cache
def facts(path: Path) -> Module:
    """Return the facts of a module. Each file is parsed once."""
    tree = ast.parse(path.read_text("utf-8"))
    nodes = list(ast.walk(tree))
    comprehensions = [node for node in nodes if isinstance(node, _COMPREHENSIONS)]
    public = [node for node in tree.body if isinstance(node, _DEFINITIONS) and not node.name.startswith("_")]
    return Module(
        owners=frozenset(_imported_owners(nodes)),
        loaded=tuple(node for node in _executed(tree.body) if isinstance(node, ast.ImportFrom)),
        undocumented=tuple(node.name for node in public if not ast.get_docstring(node)),
        nested=tuple(node.lineno for node in comprehensions if _nests(node)),
    )


def _nests(comprehension: ast.AST) -> bool:
    return sum(isinstance(node, _COMPREHENSIONS) for node in ast.walk(comprehension)) > 1


def _imported_owners(nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module == "outrider":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("outrider."):
            module = tuple(node.module.split(".")[1:])
            yield from {owner((*module, alias.name)) for alias in node.names}
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("outrider.")]
            yield from (owner(tuple(name.split(".")[1:])) for name in names)


def imports() -> dict[str, set[str]]:
    """Return the modules that each module of the package imports when it is loaded, without those for types only."""
    modules = {_module_name(path): path for path in files()}
    found = {}
    for module, path in modules.items():
        nodes = facts(path).loaded
        names = [(node.module or "", f"{node.module}.{alias.name}") for node in nodes for alias in node.names]
        found[module] = {name if name in modules else origin for origin, name in names} & modules.keys()
    return found


def _module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _executed(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that run when a module is loaded, except definitions."""
    for node in body:
        yield node
        if isinstance(node, ast.Try | ast.With):
            yield from _executed(node.body)
        elif isinstance(node, ast.If):
            for_types = "TYPE_CHECKING" in ast.unparse(node.test)
            yield from _executed(node.orelse if for_types else node.body + node.orelse)


def longest_chain(imports: dict[str, set[str]]) -> list[str]:
    """Return the longest chain of modules of which each imports the one before. A CycleError names a cycle."""
    chains: dict[str, list[str]] = {}
    for module in TopologicalSorter(imports).static_order():
        chains[module] = [*max((chains[other] for other in imports[module]), key=len, default=[]), module]
    return max(chains.values(), key=len)
