"""Recurrent states and hybrids when no draft token is accepted, and slots that another sequence takes."""

import pytest

from outrider.core.params import SamplingParams
from tests.field.models import make_pair, token_ids
from tests.helpers import tiny


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    return tiny.Shelf(tmp_path_factory.mktemp("recurrent"))


@pytest.mark.fast_cases("qwen3_next", "mamba2")
@pytest.mark.parametrize("name", ["qwen3_next", "mamba2", "bamba", "falcon_h1", "lfm2"])
def test_no_draft_token_is_accepted(shelf, name):
    """A random draft, 1 to 6 draft tokens, and sequences that end within a round and give up their slots.

    (vllm#50021 in club-3090#758)
    """
    draft = tiny.save(shelf.folder(name).parent / f"draft-{name}", tiny.make_config("LlamaConfig", num_hidden_layers=1))
    pair = make_pair(shelf.folder(name), draft, slots=4, context=96)
    prompts = [tuple(range(7 * i, 7 * i + 3 + 4 * i)) for i in range(6)]
    limits = (5, 9, 12, 16, 11, 14)
    plain = token_ids(pair.generate("none", prompts, [params(limit, 0) for limit in limits], k=0))
    llm = pair.llm("random")
    assert token_ids(llm.generate(prompts, [params(limit, 6) for limit in limits])) == plain
    mixed = [params(limit, 1 + i) for i, limit in enumerate(limits)]
    completions = llm.generate(prompts, mixed)
    assert token_ids(completions) == plain
    assert any(not completion.stats.accepted[0] for completion in completions)


def params(limit, k):
    return SamplingParams(max_tokens=limit, ignore_eos=True, k=k)


def test_target_whose_state_cannot_be_trimmed_drafts_from_its_own_text(shelf):
    """N-gram lookup on a recurrent model, with accepted and rejected drafts (mlx-lm PR #1109, mlx-lm#846)."""
    folder = shelf.folder("mamba2")
    pair = make_pair(folder, folder, slots=2, context=96)
    prompts = [(5, 6, 7) * 8, (9, 9, 9, 9)]
    plain = token_ids(pair.generate("none", prompts, params(30, 0), k=0))
    for name in ("ngram", "suffix", "itself"):
        llm = pair.llm(name)
        assert token_ids(llm.generate(prompts, params(30, 6))) == plain
        assert llm.stats.draft_tokens > 0
