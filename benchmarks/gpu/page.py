"""Write a page of tables from the results of cells.py, beside published figures of other engines.

python benchmarks/gpu/page.py RESULTS.json > docs/explanation/results/gpu_cells.md
"""

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

Results = Mapping[str, Any]  # of the cells of one group, by cell


class Published(NamedTuple):
    """A figure of another engine for a model of about 8B parameters on one H100, in tokens/s by batch size."""

    engine: str
    setting: str
    rates: Mapping[int, str]
    source: str


_PUBLISHED = (
    Published("vLLM V1, Llama 3.1 8B", "plain, MT-Bench", {1: "133"}, "vllm pull request 16937, April 2025"),
    Published("vLLM V1, Llama 3.1 8B", "EAGLE-3, k = 4, MT-Bench", {1: "247"}, "vllm pull request 20780, July 2025"),
    Published("vLLM 0.31, Qwen3 8B", "plain", {1: "125", 8: "898", 32: "2726"}, "vllm pull request 62258, 2026"),
    Published("vLLM 0.31, Qwen3 8B", "EAGLE-3, k = 5", {1: "355", 8: "2148", 32: "7317"}, "the same"),
    Published("SGLang, Llama 3.1 8B", "plain, MT-Bench", {1: "158"}, "docs.sglang.io, speculative decoding"),
    Published("SGLang, Llama 3.1 8B", "EAGLE-3, tree, MT-Bench", {1: "373"}, "the same"),
)
_BATCHES = (1, 8, 32, 64)
_TIMES = ("draft_ms", "target_ms", "host_ms", "tau", "tokens_per_s")  # of a round
_LONGEST = 400  # characters of a text in a table


def main(results: Annotated[Path, typer.Argument(help="JSON file of cells.py, or its gzip.")]) -> None:
    """Print the page."""
    content = results.read_bytes()
    print(page(json.loads(gzip.decompress(content) if results.suffix == ".gz" else content)))


def page(document: Mapping[str, Any]) -> str:
    """Return the page in Markdown. Tables without results are left out."""
    cells: Mapping[str, Any] = document["cells"]
    groups: dict[str, dict[str, Any]] = {}
    for name, outcome in cells.items():
        group, _, cell = name.partition(":")
        groups.setdefault(group, {})
        if "result" in outcome:
            groups[group][cell] = outcome["result"]
    models = {group: results for group, results in groups.items() if group != "parts" and results}
    sections = (
        _speed(models),
        _offline(models),
        _passes(models),
        _split(models),
        _k_auto(models),
        _texts(models),
        _start(models),
        _parts(groups.get("parts", {})),
        _failures(cells),
    )
    return "\n\n".join([_title(document), *(section for section in sections if section)])


def _title(document: Mapping[str, Any]) -> str:
    hardware = document.get("hardware", {})
    options = document.get("options", {})
    versions = ", ".join(f"{name} {version}" for name, version in document.get("versions", {}).items() if version)
    models = {"8b": "mini and nano, inflated to the dimensions of Llama 3 8B and 1B"}
    card = hardware.get("gpu") or hardware.get("cpu")
    return (
        f"# One GPU, cell by cell\n\n{card}, {document.get('date')}; {versions}; commit {document.get('commit')}."
        f"\nModels: {models.get(options.get('like'), 'as they are')}, {options.get('dtype')}."
        " `benchmarks/gpu/short.sh` measured it.\n\nThe group `graphs` runs on torch with CUDA graphs, the others on"
        " the Triton kernels: in the type of the model, or with quantized weights."
    )


def _table(title: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table under a title; empty if it has no rows."""
    lines = [f"| {' | '.join(map(_text, row))} |" for row in rows]
    if not lines:
        return ""
    head = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    return "\n".join([f"## {title}", "", *head, *lines])


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return "" if value is None else str(value)


def _speed(models: Mapping[str, Results]) -> str:
    rows: list[Sequence[object]] = []
    for group, results in models.items():
        if race := results.get("race"):
            rows.append((f"Outrider, {group}", "plain", race["plain"]["tokens_per_s"], ""))
            setting = f"draft model, k = 4, tau {race['tau']:.2f}"
            rows.append((f"Outrider, {group}", setting, race["speculative"]["tokens_per_s"], ""))
    if rows:
        rows += [(each.engine, each.setting, each.rates[1], each.source) for each in _PUBLISHED]
    return _table("One sequence", ("Engine", "Setting", "Tokens/s", "Source"), rows)


def _offline(models: Mapping[str, Results]) -> str:
    rows: list[Sequence[object]] = []
    for group, results in models.items():
        for mode in ("plain", "k_auto"):
            offline = [results.get(f"offline_{batch}", {}).get(mode) for batch in _BATCHES]
            if any(offline):
                rates = [each and each["tokens_per_s"] for each in offline]
                first = [each and each["first_token_ms"]["mean"] for each in offline]
                rows.append((f"Outrider, {group}", mode.replace("_", " "), *rates, _joined(first)))
    if rows:
        for each in _PUBLISHED[2:4]:
            rows.append((each.engine, each.setting, *(each.rates.get(batch) for batch in _BATCHES), ""))
    header = ("Engine", "Setting", *(f"tokens/s, batch {batch}" for batch in _BATCHES), "ms to the first token (mean)")
    return _table("Random prompts of one length that arrive together", header, rows)


def _passes(models: Mapping[str, Results]) -> str:
    tokens: dict[str, None] = {}
    rows = []
    for group, results in models.items():
        for cell in ("step_uncompiled", "step"):
            for cached, times in results.get(cell, {}).get("ms_by_cached_and_tokens", {}).items():
                tokens |= dict.fromkeys(times)
                rows.append((f"{group}{' (uncompiled)' * (cell != 'step')}", cached, times))
    counts = sorted(tokens, key=int)
    cells = [(name, cached, *(_pass(times.get(count)) for count in counts)) for name, cached, times in rows]
    title = "Milliseconds of a pass, and its share of the bandwidth limit, by tokens of the pass"
    return _table(title, ("Group", "Cached", *counts), cells)


def _pass(time: Mapping[str, float] | None) -> str:
    return f"{time['ms']:.2f} ({time['limit_share']:.0%})" if time else ""


def _split(models: Mapping[str, Results]) -> str:
    rows = []
    for group, results in models.items():
        for k, times in results.get("split", {}).items():
            rows.append((group, k, *(times[key] for key in _TIMES)))
    header = ("Group", "k", "draft ms", "target ms", "rest ms", "tau", "tokens/s")
    return _table("The parts of a round", header, rows)


def _k_auto(models: Mapping[str, Results]) -> str:
    rows = []
    for group, results in models.items():
        for kept, planners in results.get("k_auto", {}).items():
            if kept != "costs":
                fixed = [planners[k]["tokens_per_s"] for k in ("0", "2", "4")]
                rows.append((group, kept, planners["auto"]["tokens_per_s"], planners["auto"]["k"], *fixed))
    header = ("Group", "Share of draft tokens kept", "k auto", "its k", "k = 0", "k = 2", "k = 4")
    return _table("Tokens/s of k auto and of fixed draft lengths", header, rows)


def _texts(models: Mapping[str, Results]) -> str:
    rows = []
    for group, results in models.items():
        for cell, where in (("texts", ""), ("texts_batched", ", in batches")):
            for name, found in results.get(cell, {}).items():
                if name != "texts":
                    differ = f"{found['different']} of {results[cell]['texts']}"
                    rows.append((group, f"{name}{where}", differ, found["first_positions"]))
    header = ("Group", "Setting", "Texts that differ", "First positions")
    return _table("Greedy texts against plain decoding of each prompt alone", header, rows)


def _start(models: Mapping[str, Results]) -> str:
    def row(group: str, results: Results) -> Sequence[object]:
        load = results["load"]
        memory = results.get("memory", {})
        first = results.get("first_token", {})
        return (
            group,
            load["seconds"]["weights"],
            load["seconds"]["engine"],
            (results.get("compile") or results.get("compile_kernels") or {}).get("seconds"),
            first.get("cold_ms"),
            first.get("warm_ms"),
            _gigabytes(sum(model["weight_bytes"] for model in load["models"].values())),
            _gigabytes(memory.get("peak_bytes")),
        )

    times = ("s: weights", "engine", "compilation", "ms to the first token, cold", "warm")
    header = ("Group", *times, "GB: weights", "peak")
    rows = [row(group, results) for group, results in models.items() if "load" in results]
    return _table("Start and memory", header, rows)


def _parts(parts: Results) -> str:
    rows = [(cell, key, value) for cell, result in parts.items() for key, value in _flat(result)]
    return _table("Single kernels and tests", ("Cell", "Quantity", "Value"), rows)


def _flat(result: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, object]]:
    """Yield the values of nested results with the path of their keys."""
    for key, value in result.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}, ")
        else:
            yield f"{prefix}{key}", _one_line(value) if isinstance(value, str) else value


def _failures(cells: Mapping[str, Any]) -> str:
    """Return the cells without a result, by reason."""
    names: dict[str, list[str]] = {}
    for name, outcome in cells.items():
        if reason := outcome.get("error") or outcome.get("skipped"):
            names.setdefault(_one_line(reason), []).append(name)
    return _table(
        "Cells without a result", ("Reason", "Cells"), [(key, ", ".join(each)) for key, each in names.items()]
    )


def _one_line(text: str) -> str:
    """Return a text for a table, without its beginning if it is long."""
    return " ".join(text.replace("|", "/").split())[-_LONGEST:]


def _joined(values: Sequence[float | None]) -> str:
    return " / ".join("" if value is None else f"{value:.0f}" for value in values)


def _gigabytes(size: float | None) -> float | None:
    return None if size is None else size / 1e9


if __name__ == "__main__":
    typer.run(main)
