"""Test from a script that speculation leaves the output of a target unchanged. See `outrider audit --help`."""

import json
import subprocess
import sys

# Your own pair: add --target DIR --proposer draft:DIR2 --prompts FILE. The default of --samples is 2000.
command = [sys.executable, "-m", "outrider", "audit", "--proposer", "ngram", "--samples", "200", "--json"]
done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
report = json.loads(done.stdout)
print("passed" if report["passed"] else "FAILED")
print(f"replay: {report['replay']['mismatches']} mismatches")
print(f"flips: {report['flips']['flips']} of {report['flips']['tokens']} tokens in {report['flips']['dtype']}")
