"""Run scripts as a shell does, but in this process: the imports of a new process take seconds."""

import runpy
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from unittest.mock import patch


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The result of a script, as `subprocess.run` returns it."""

    returncode: int
    stdout: str
    stderr: str


def run_script(script: Path, *arguments: object) -> Done:
    """Run a script. An exception other than SystemExit is raised.

    It imports the modules beside it, also if others of the same names are loaded. They are unloaded afterward.
    """
    out, err, code = StringIO(), StringIO(), 0
    beside = {file.stem for file in script.parent.glob("*.py")}
    hidden = {name: sys.modules.pop(name) for name in beside.intersection(sys.modules)}
    before = set(sys.modules)
    with (
        patch.object(sys, "argv", [str(script), *map(str, arguments)]),
        patch.object(sys, "path", [str(script.parent), *sys.path]),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            if isinstance(end.code, str):
                print(end.code, file=err)
        finally:
            for name in set(sys.modules) - before:
                file = getattr(sys.modules[name], "__file__", None)
                if file and Path(file).parent == script.parent:
                    del sys.modules[name]
            sys.modules.update(hidden)
    return Done(returncode=code, stdout=out.getvalue(), stderr=err.getvalue())
