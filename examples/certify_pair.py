"""Test that speculation leaves the output of a target unchanged, for one proposer. See `outrider audit`."""

from pathlib import Path
from tempfile import TemporaryDirectory

from outrider import EngineConfig
from outrider.lab.audit.run import run_audit
from outrider.lab.audit.settings import Settings

with TemporaryDirectory() as folder:
    prompts = Path(folder) / "prompts.jsonl"
    prompts.write_text('{"prompt": "def add(a, b):"}\n{"prompt": "The old man"}\n', encoding="utf-8")
    settings = Settings(
        engine=EngineConfig(target=None, proposer="ngram", k=4, device="cpu"),  # your own target: a folder
        prompts=str(prompts),
        samples=200,  # per test; the default of `outrider audit` is 2000
        tokens=8,
    )
    report = run_audit(settings, console=None)
print("passed" if report["passed"] else "FAILED")
print(f"replay: {report['replay']['mismatches']} mismatches")
print(f"flips: {report['flips']['flips']} of {report['flips']['tokens']} tokens in {report['flips']['dtype']}")
