"""A process that is forked after a model was loaded."""

import os
import subprocess
import sys

import pytest

_PROGRAM = """
import os, signal
from outrider import LLM, OutriderError, SamplingParams
from outrider.models.loader.embedded import embedded

options = dict(target=embedded("nano"), proposer="none", max_num_seqs=1, max_model_len=64)
want = SamplingParams(max_tokens=4)
llm = LLM(**options) if {before} else None
{hold}
if not (child := os.fork()):
    signal.alarm(40)  # ends a child that waits forever
    try:
        llm = {loads}
        print("text", len(llm.generate("def", want)[0].token_ids), flush=True)
    except OutriderError as error:
        print("error", error, flush=True)
    os._exit(0)
_, status = os.waitpid(child, 0)
print("status", status, flush=True)
os._exit(0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.parametrize(
    ("before", "loads", "hold"),
    [
        (True, "llm", ""),
        (True, "LLM(**options)", ""),
        # As if another thread ran a round.
        (True, "llm", "import threading; t = threading.Thread(target=llm.engine.turns.take); t.start(); t.join()"),
        (False, "LLM(**options)", ""),
    ],
)
def test_a_forked_process_computes_or_says_why_not(before, loads, hold):
    program = _PROGRAM.format(before=before, loads=loads, hold=hold)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=True)
    said = done.stdout.splitlines()
    assert said[-1] == "status 0", done.stdout
    if before:
        assert "load the model only after the fork" in said[0]
        assert '"spawn"' in said[0]
    else:
        assert said[0] == "text 4"
