"""Measure how long Outrider takes to start, beside llama.cpp's `llama-server`.

python benchmarks/start/start.py models/smollm2.gguf models/smollm2 --llama-server PATH --out start.json

| Start | What is measured |
|---|---|
| first | `outrider run --target X --chat hi --max-tokens 1` in a new cache folder: with the load check |
| first, compiling | the same without compiled kernels in this folder (`--compiling`, in a checkout) |
| later | the same in the cache folder of an earlier start |
| llama-server | from the start of the process to the answer of one token to the same prompt |

The bytecode is compiled before, which happens once per machine. A start of Outrider ends at the first byte of the
output. The memory is the largest sum of the peaks (VmHWM) of a process and its running children, with mapped files. The
starts of a round run in turns, after the files were read once. The table has medians. `import torch` bounds the rest.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import typer
from rich.console import Console

from outrider.models.native.library import cache_folder, load_library
from outrider.runtime.machine import commit, hardware, versions
from outrider.runtime.report.console import new_table

sys.path.append(str(Path(__file__).parents[1] / "peers"))
from llama_server import LlamaServer

_PROMPT = "hi"
_POLL_SECONDS = 0.01
_MODELS = Path(__file__).parent / "models"  # where random_models.py may have written models


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """One start."""

    seconds: float  # to the first byte of the output, or to the end if there is none
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table."""

    name: str
    start: Callable[[], Started]
    starts: list[Started] = field(default_factory=list)

    def result(self) -> dict[str, Any]:
        """Return the medians, and all values."""
        return {
            "seconds": median(each.seconds for each in self.starts),
            "peak_bytes": median(each.peak_bytes for each in self.starts),
            "all_seconds": [each.seconds for each in self.starts],
            "all_peak_bytes": [each.peak_bytes for each in self.starts],
        }


def main(
    checkpoints: Annotated[list[Path] | None, typer.Argument(help="GGUF files and folders. Default: models/*.")] = None,
    llama_server: Annotated[str | None, typer.Option(help="llama.cpp's llama-server.")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file for the results.")] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    first: Annotated[bool, typer.Option(help="Measure first starts.")] = True,
    compiling: Annotated[bool, typer.Option(help="Measure first starts that compile the kernels.")] = False,
    threads: Annotated[int, typer.Option(min=1)] = 2,
) -> None:
    """Print the table and one JSON document."""
    found = checkpoints or (sorted(_MODELS.iterdir()) if _MODELS.is_dir() else [])
    load_library()  # compiles the kernels if that has not happened
    with tempfile.TemporaryDirectory(prefix="start-") as scratch:
        rows = _rows(found, llama_server, Path(scratch), first=first, compiling=compiling, threads=threads)
        for checkpoint in found:
            _read(checkpoint)
        for row in rows:
            if "first" not in row.name:
                row.start()  # fills the caches
        for turn in range(rounds):
            for row in rows:
                row.starts.append(row.start())
                print(f"round {turn + 1}: {row.name} {row.starts[-1].seconds:.2f} s", file=sys.stderr, flush=True)
    results = {row.name: row.result() for row in rows}
    _show(results)
    conditions = {"threads": threads, "hardware": hardware("cpu"), "versions": versions(), "commit": commit()}
    document = json.dumps({"benchmark": "start", "rounds": rounds, "results": results, **conditions})
    if out:
        out.write_text(document + "\n", encoding="utf-8")
    print(document)


def _rows(
    checkpoints: Sequence[Path], llama_server: str | None, scratch: Path, *, first: bool, compiling: bool, threads: int
) -> list[Row]:
    """Return the lines of the table, in the order in which they run."""
    warm = _new_cache(scratch / "warm")

    def outrider(target: str, cache: Callable[[], Path]) -> Callable[[], Started]:
        options = ["--target", target, "--threads", str(threads), "--chat", _PROMPT, "--max-tokens", "1"]
        return lambda: _run([sys.executable, "-m", "outrider", "run", *options], cache())

    def empty_cache() -> Path:
        return Path(tempfile.mkdtemp(dir=scratch))

    def new_cache() -> Path:
        return _new_cache(empty_cache())

    rows = [
        Row(name="import torch", start=lambda: _run([sys.executable, "-c", "import torch; print(1)"], warm)),
        Row(name="error: no such file", start=outrider("nofile.gguf", lambda: warm)),
    ]
    for checkpoint in (Path("@mini"), *checkpoints):
        if compiling:
            rows.append(Row(name=f"{checkpoint.name}, first, compiling", start=outrider(str(checkpoint), empty_cache)))
        if first:
            rows.append(Row(name=f"{checkpoint.name}, first", start=outrider(str(checkpoint), new_cache)))
        rows.append(Row(name=f"{checkpoint.name}, later", start=outrider(str(checkpoint), lambda: warm)))
        if llama_server and checkpoint.suffix == ".gguf":
            serve = _llama_server(llama_server, checkpoint, threads)
            rows.append(Row(name=f"{checkpoint.name}, llama-server", start=serve))
    return rows


def _new_cache(folder: Path) -> Path:
    """Return a folder for XDG_CACHE_HOME that has the compiled kernels only."""
    kernels = folder / "outrider"
    kernels.mkdir(parents=True)
    for file in cache_folder().glob("kernels-*"):
        shutil.copy2(file, kernels)
    return folder


def _read(checkpoint: Path) -> None:
    """Read all files, so that they are in the page cache."""
    for file in [checkpoint] if checkpoint.is_file() else filter(Path.is_file, checkpoint.iterdir()):
        with file.open("rb") as opened:
            while opened.read(1 << 24):
                pass


def _run(command: list[str], cache: Path) -> Started:
    """Run a command to its end, with its own cache folder."""
    began = perf_counter()
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)
    assert process.stdout is not None
    first_byte = None
    peak = 0
    with DefaultSelector() as selector:
        selector.register(process.stdout, EVENT_READ)
        is_open = True
        while is_open:
            if selector.select(_POLL_SECONDS):
                is_open = bool(os.read(process.stdout.fileno(), 1 << 16))
                if is_open and first_byte is None:
                    first_byte = perf_counter()
            peak = max(peak, sum(_peaks(process.pid).values()))
    process.wait()
    process.stdout.close()
    return Started(seconds=(first_byte or perf_counter()) - began, peak_bytes=peak)


def _llama_server(program: str, file: Path, threads: int) -> Callable[[], Started]:
    """Return a function that starts a server, and waits for one token."""
    options = ["--model", str(file), "--ctx-size", "2048", "--threads", str(threads)]
    body = {"messages": [{"role": "user", "content": _PROMPT}], "max_tokens": 1, "temperature": 0}

    def start() -> Started:
        began = perf_counter()
        server = LlamaServer(program, options)
        try:
            server.wait_until_ready()
            status, answer = server.request("POST", "/v1/chat/completions", body)
            seconds = perf_counter() - began
            peak = sum(_peaks(server.process.pid).values())
        finally:
            server.close()
        if status != HTTPStatus.OK:
            raise RuntimeError(f"{program} answered {status}: {answer}")
        return Started(seconds=seconds, peak_bytes=peak)

    return start


def _peaks(pid: int) -> dict[int, int]:
    """Return the peak of the resident memory, in bytes, of a process and of its children."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        children = [task.read_text() for task in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:  # it has ended
        return {}
    peak = re.search(r"VmHWM:\s+(\d+)", status)
    peaks = {pid: 1024 * int(peak[1])} if peak else {}
    for child in " ".join(children).split():
        peaks |= _peaks(int(child))
    return peaks


def _show(results: dict[str, dict[str, Any]]) -> None:
    table = new_table("Starts, medians")
    for name in ("start", "s", "lowest to highest", "peak MB"):
        table.add_column(name, justify="left" if name == "start" else "right", no_wrap=True)
    for name, result in results.items():
        seconds = result["all_seconds"]
        spread = f"{min(seconds):.2f} to {max(seconds):.2f}"
        table.add_row(name, f"{result['seconds']:.2f}", spread, f"{result['peak_bytes'] / 1e6:.0f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    typer.run(main)
