"""Train a small draft head on an embedded target with `outrider train`, and generate with it."""

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from outrider import LLM, SamplingParams

PROMPTS = ['{"prompt": "def add(a, b):"}', '{"prompt": "The old man"}', '{"prompt": "1, 2, 3"}', '{"prompt": "import"}']
SHORT = "--epochs 1 --max-tokens 16 --batch-size 2 --steps-per-generation 1 --eval-every 0"

with TemporaryDirectory() as folder:
    data = Path(folder) / "prompts.jsonl"
    data.write_text("\n".join(PROMPTS) + "\n", encoding="utf-8")
    head = Path(folder) / "head"
    command = [sys.executable, "-m", "outrider", "train", "mtp", "--target", "@nano", "--data", data, "--out", head]
    subprocess.run([*command, *SHORT.split()], check=True)
    llm = LLM("@nano", proposer=f"draft:{head}", k=2)
    completion = llm.generate("def add(a, b):", SamplingParams(max_tokens=24))[0]
    print(completion.text)
    print(f"-- {completion.stats.tau:.2f} tokens per forward pass after a few seconds of training")
