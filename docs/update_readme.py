"""Run the demo of the Makefile and put its output into README.md, between the demo marks."""

import re
import shlex
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"(<!-- demo:begin -->\n).*?(<!-- demo:end -->)", re.DOTALL)


def main() -> None:
    """Rewrite README.md."""
    command = re.search(r"^demo:.*\n\t(.*)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert command is not None, "the Makefile has no demo"
    words = shlex.split(command[1].replace("$(BIN)", str(ROOT / ".venv" / "bin")))
    subprocess.run(words, check=True, capture_output=True)  # compiles the kernels and measures their costs
    run = subprocess.run(words, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    shown = command[1].removeprefix("$(BIN)/")
    block = f"```text\n$ {shown}\n{run.stdout.strip()}\n```\n"
    readme = ROOT / "README.md"
    readme.write_text(BLOCK.sub(lambda match: match[1] + block + match[2], readme.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
