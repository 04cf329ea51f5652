"""The examples are short, run, and import public names only, as the pages do."""

import re
import runpy

import pytest

from tests.helpers.source import PACKAGE, ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
IN_ONE_FILE = ROOT / "examples" / "speculative_in_one_file.py"
READ = [*EXAMPLES, ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
IMPORT = re.compile(r"^ *(?:from (outrider[\w.]*) import ([\w, ]+)|import (outrider[\w.]*))", re.MULTILINE)


@pytest.mark.fast_cases(
    "own_proposer.py", "quickstart.py", "rl_rollouts.py", "speculative_in_one_file.py", "streaming.py"
)
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example(path, capfd):
    runpy.run_path(str(path), run_name="__main__")
    assert capfd.readouterr().out


def public_names():
    """The public names of each module that the first sentence of the reference lists, from its `__all__`."""
    reference = (ROOT / "docs" / "reference" / "python.md").read_text("utf-8")
    for module in re.findall(r"`(outrider[\w.]*)`", reference.partition("Everything else")[0]):
        path = PACKAGE.joinpath(*module.split(".")[1:])
        source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text("utf-8")
        yield module, set(re.findall(r'"(\w+)"', source.partition("__all__ = [")[2].partition("]")[0]))


@pytest.mark.parametrize("path", READ, ids=lambda path: str(path.relative_to(ROOT)))
def test_only_public_names_are_imported(path):
    public = dict(public_names())
    for module, names, whole in IMPORT.findall(path.read_text("utf-8")):
        assert (whole or module) in public
        assert {name.strip() for name in names.split(",") if not whole} <= public.get(module, set())


def test_speculative_decoding_in_one_file(capsys):
    """It needs no Outrider. Its proof finds rejection sampling exact, and the common mistake not."""
    source = IN_ONE_FILE.read_text("utf-8")
    assert len(source.splitlines()) <= 150
    assert "outrider" not in source
    example = runpy.run_path(str(IN_ONE_FILE))
    generate, target = example["generate"], example["Target"]
    plain = example["distribution"](lambda choose: example["decode_plainly"](2, choose))
    assert len(plain) == 9
    assert sum(plain.values()) == 1
    for leftover, exact in (("missing_part", True), ("all_of_p", False)):
        found = example["distribution"](lambda choose, rule=example[leftover]: generate(2, rule, choose, target()))
        assert (found == plain) == exact
        assert (example["distance"](found, plain) == 0) == exact
