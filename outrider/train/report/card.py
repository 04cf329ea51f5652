"""Writes the model card of a draft: README.md, as the Hugging Face Hub shows it."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from outrider.models.loader.embedded import model_folder
from outrider.models.loader.hub.names import hub_name

FILE = "README.md"
_FENCE = "---"


def model_card(facts: Mapping[str, Any]) -> str:
    """Return the card of a draft from the facts in its training.json."""
    return "\n".join([*_header(facts), "", *_use(facts), "", *_results(facts), "", *_training(facts), ""])


def front_matter(text: str) -> dict[str, str]:
    """Return the fields of one line in the front matter of a card; {} if it has none."""
    first, *lines = text.splitlines() or [""]
    if first != _FENCE or _FENCE not in lines:
        return {}
    fields = (line.split(":", 1) for line in lines[: lines.index(_FENCE)] if ":" in line)
    return {name: value.strip() for name, value in fields if value.strip()}


def _header(facts: Mapping[str, Any]) -> Iterator[str]:
    target = facts["arguments"]["target"]
    base = target if hub_name(target) else facts["target"]
    yield from (_FENCE, f"base_model: {base}", "library_name: outrider")
    license_name = _license(target)
    if license_name:
        yield f"license: {license_name}"
    yield from ("tags:", "- speculative-decoding", "- draft-model", f"- {facts['kind']}", _FENCE, "")
    yield f"# {facts['kind']} draft for {base}"
    yield ""
    yield (
        f"This draft has {facts['parameters'] / 1e6:.1f}M parameters. It proposes tokens that {base} verifies, so the"
        " text stays that of the model."
    )
    if not license_name:
        yield ""
        yield "No license is stated. Before you publish the draft, state one that suits the model and the data."


def _license(target: str | None) -> str | None:
    """Return the license in the card of the target, where it is on this machine."""
    folder = Path(model_folder(target, weights=False))
    try:
        return front_matter((folder / FILE).read_text("utf-8")).get("license")
    except (OSError, UnicodeDecodeError):
        return None


def _use(facts: Mapping[str, Any]) -> Iterator[str]:
    target = facts["trained_target"] or facts["arguments"]["target"]
    option = f" --target {target}" if target else ""
    yield from ("## Use", "", "With Outrider:", "", "```sh")
    yield from (f'outrider run{option} --proposer draft:{facts["out"]} "..."', "```", "")
    yield "For vllm, sglang, llama.cpp and other engines, this writes the draft and the command that runs it:"
    yield from ("", "```sh", f"outrider export {facts['out']}{option} --for vllm --k {facts['k']} --out DIR", "```")


def _results(facts: Mapping[str, Any]) -> Iterator[str]:
    yield from ("## Results", "")
    results = facts["evaluation"]
    if not results:
        yield "The draft is not evaluated yet."
        return
    yield from (f"Tokens per pass (tau) with {facts['k']} draft tokens, on held-out prompts:", "")
    yield f"| category | {' | '.join(results)} |"
    yield f"|---|{'---|' * len(results)}"
    yield _row("all", [each["tau"] for each in results.values()])
    for category in next(iter(results.values()))["tau_by_category"]:
        yield _row(category, [each["tau_by_category"][category] for each in results.values()])


def _row(name: str, taus: Iterable[float]) -> str:
    return f"| {name} | {' | '.join(f'{tau:.2f}' for tau in taus)} |"


def _training(facts: Mapping[str, Any]) -> Iterator[str]:
    yield from ("## Training", "", f"{facts['steps']} steps with the loss {facts['arguments']['loss']}.", "")
    yield "| data | SHA-256 |"
    yield "|---|---|"
    files = [*facts["arguments"]["data"], *filter(None, [facts["arguments"]["eval_data"]])]
    for file, digest in zip(files, facts["data"], strict=True):
        yield f"| {Path(file).name} | {digest} |"
