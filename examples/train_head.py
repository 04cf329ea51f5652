"""Train a small draft head on the embedded target and generate with it."""

from pathlib import Path
from tempfile import TemporaryDirectory

from outrider import LLM, SamplingParams
from outrider.models.loader.embedded import embedded
from outrider.train.run import Training
from outrider.train.settings import Settings

PROMPTS = ['{"prompt": "def add(a, b):"}', '{"prompt": "The old man"}', '{"prompt": "1, 2, 3"}', '{"prompt": "import"}']

with TemporaryDirectory() as folder:
    data = Path(folder) / "prompts.jsonl"
    data.write_text("\n".join(PROMPTS) + "\n", encoding="utf-8")
    head = Path(folder) / "head"
    settings = Settings(
        target=str(embedded("nano")),
        data=[str(data)],
        out=str(head),
        batch_size=2,
        steps_per_generation=1,
        epochs=1,
        max_tokens=16,
        eval_every=0,
    )
    # The same as: outrider train mtp --target ... --data prompts.jsonl --out head
    Training("mtp", settings).run()
    llm = LLM(embedded("nano"), proposer=f"draft:{head}", k=2)
    completion = llm.generate("def add(a, b):", SamplingParams(max_tokens=24))[0]
    print(completion.text)
    print(f"-- {completion.stats.tau:.2f} tokens per forward pass after a few seconds of training")
