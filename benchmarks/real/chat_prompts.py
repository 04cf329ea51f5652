"""Write the prompts of a file for a base model as chat messages."""

import json
import re
from pathlib import Path
from typing import Annotated

import typer

_INSTRUCTIONS = {
    "code_completion": "Continue this Python code.",
    "prose": "Continue this text.",
}
_MARKED = re.compile(r"<\|user\|>(.*)<\|end\|><\|assistant\|>$", re.DOTALL)


def main(
    prompts: Annotated[Path, typer.Argument(help="JSON lines with id, category and prompt.")],
    out: Annotated[Path, typer.Argument(help="JSON lines to write, with id, category and messages.")],
) -> None:
    """Take the user's turn of each prompt, or ask for a continuation of a prompt that has no turns."""
    lines = []
    for line in prompts.read_text(encoding="utf-8").splitlines():
        prompt = json.loads(line)
        message = {"role": "user", "content": _content(prompt["category"], prompt["prompt"])}
        lines.append(json.dumps({"id": prompt["id"], "category": prompt["category"], "messages": [message]}))
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _content(category: str, text: str) -> str:
    text = text.removeprefix("<|endoftext|>")
    if marked := _MARKED.match(text):
        return marked[1]
    return f"{_INSTRUCTIONS[category]}\n\n{text.strip()}"


if __name__ == "__main__":
    typer.run(main)
