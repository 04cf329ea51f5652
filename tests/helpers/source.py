"""The table of files, layers and lines; `make size` prints it, and a test holds the house to it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "outrider"

# Imports go down only. A name ending in / is a folder.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("constraint.py", "grammar.py", "errors.py", "params.py", "stats.py", "text.py", "types.py"),
    (
        "tree.py",
        "shapes.py",
        "noise.py",
        "sampling.py",
        "verdict.py",
        "verify.py",
        "lossy.py",
        "cost.py",
        "passcost.py",
        "datastore.py",
        "projection.py",
    ),
    ("cache/", "attention.py"),
    (
        "quantize.py",
        "prepack.py",
        "excerpt.py",
        "load.py",
        "native/",
        "rounding.py",
        "static_pass.py",
        "graphs.py",
        "target.py",
        "check.py",
        "watch.py",
        "heads/",
    ),
    ("propose/",),
    ("arms.py", "span.py", "credit.py", "plan.py", "tempo.py", "schedule.py", "guide.py", "engine.py"),
    (
        "proof.py",
        "statistics.py",
        "machine.py",
        "calibrate.py",
        "embedded.py",
        "names.py",
        "proposers.py",
        "verifiers.py",
        "build.py",
        "llm.py",
        "indexing.py",
        "layer_search.py",
        "layers.py",
        "convert.py",
        "inspect_draft.py",
        "toy.py",
        "drive.py",
        "testing.py",
        "audit/",
        "bench/",
        "project/",
        "plan_file.py",
        "whole.py",
        "prompts.py",
        "console.py",
        "canvas.py",
        "page.py",
        "ranges.py",
        "tune/",
        "train/",
        "serve/",
        "stress/",
    ),
    (
        "cli.py",
        "cli_drafts.py",
        "__main__.py",
        "options.py",
        "sampling_options.py",
        "form_options.py",
        "run.py",
        "show.py",
    ),
)
CORE = 6  # layers 0 to 5, proposers, trained drafts and caches aside, each of which is a leaf
LEAVES = {"propose": 4000, "heads": 2500, "formats": 2200, "cache": 1000}  # lines
CORE_LINES = 8200
FILE_LINES = 300
FILE_LINES_MOST = 400
FUNCTION_LINES_MOST = 60
ARGUMENTS_MOST = 5  # positional


def files() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")


def layer(path: Path) -> int:
    name = path.relative_to(PACKAGE).as_posix()
    found = [
        i for i, names in enumerate(LAYERS) if any(name == n or (n[-1] == "/" and name.startswith(n)) for n in names)
    ]
    if not found:
        raise LookupError(f"{name} has no layer; give it one in tests/sizes.py")
    return found[0]


def imports(path: Path) -> Iterator[Path]:
    """Files of this package that a file imports anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "outrider":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] == "outrider"]
        else:
            continue
        for name in names:
            yield from (file for file in _candidates(name) if file.is_file())


def _candidates(name: str) -> list[Path]:
    parts = name.split(".")[1:]
    module = PACKAGE.joinpath(*parts).with_suffix(".py") if parts else PACKAGE / "__init__.py"
    owner = PACKAGE.joinpath(*parts[:-1]).with_suffix(".py") if len(parts) > 1 else module
    return [module] if module.is_file() else [owner]


def functions(path: Path) -> Iterator[tuple[str, int, int]]:
    """Name, lines and positional arguments (self aside) of each function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args) if arg.arg not in ("self", "cls")]
            assert node.end_lineno is not None
            yield node.name, node.end_lineno - node.lineno + 1, len(names)


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def main() -> None:
    core, leaves = 0, dict.fromkeys(LEAVES, 0)
    for path in sorted(files(), key=lambda path: (layer(path), path)):
        longest = max(functions(path), key=lambda f: f[1], default=("", 0, 0))
        name = path.relative_to(PACKAGE).as_posix()
        print(f"L{layer(path)}  {name:28} {lines(path):4}   longest function {longest[1]:3} {longest[0]}")
        if path.parent.name in LEAVES:
            leaves[path.parent.name] += lines(path)
        elif layer(path) < CORE:
            core += lines(path)
    print(f"core (L0 to L5 without {', '.join(LEAVES)}): {core} lines of {CORE_LINES}")
    for name, count in leaves.items():
        print(f"{name}/: {count} lines of {LEAVES[name]}")


if __name__ == "__main__":
    main()
