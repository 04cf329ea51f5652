"""A model that is the draft model of itself."""

from pathlib import Path

from outrider.core.params import SamplingParams
from outrider.llm import LLM


def check_draft_of_itself(folder: Path, proposer: str) -> None:
    """Check that a model with itself as `draft` or `tree` decodes the same text, and accepts its own draft tokens."""
    prompts = [list(b"to be or not to be"), [5, 6, 7]]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    options = {"dtype": "float32", "device": "cpu", "max_model_len": 64, "max_num_seqs": 2}
    plain = LLM(folder, proposer="none", **options).generate(prompts, params)
    llm = LLM(folder, proposer=f"{proposer}:{folder}", k=3, **options)
    assert [c.token_ids for c in llm.generate(prompts, params)] == [c.token_ids for c in plain]
    if proposer == "draft":
        assert llm.stats.accepted == llm.stats.offered
    assert sum(llm.stats.accepted) > 0
