"""The context passes the sliding window while a sequence runs."""

import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.core.params import SamplingParams
from tests.field.models import KERNELS, make_pair, token_ids
from tests.helpers import tiny

WINDOW = 16
CONFIGS = {"gemma3": ("Gemma3TextConfig", {"query_pre_attn_scalar": 16}), "mistral": ("MistralConfig", {})}


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    """Pairs of folders by architecture: a target of which some or all layers have a window, and a random draft."""
    root = tmp_path_factory.mktemp("windows")
    folders = {}
    for name, (config, settings) in CONFIGS.items():
        sizes = {"head_dim": 16, "num_hidden_layers": 2, "sliding_window": WINDOW, **settings}
        folders[name] = (
            tiny.save(root / name, tiny.make_config(config, **sizes)),
            tiny.save(root / f"{name}-draft", tiny.make_config(config, **sizes), seed=1),
        )
    return folders


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", CONFIGS)
def test_text_is_right_on_both_sides_of_the_window(windowed, name, kernels):
    """A window of 16 tokens and prompts around it, with rejected drafts, also from the prefix cache.

    (mlx-lm#1914, mlx-swift-lm#505, Rapid-MLX#3605)
    """
    rng = random.Random(0)
    prompts = [tuple(rng.randrange(1, 250) for _ in range(length)) for length in (10, 15, 16, 17, 40)]
    pair = make_pair(*windowed[name], kernels=kernels, context=128)
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    plain = token_ids(pair.generate("none", prompts, params, k=0))
    first = tiny.ranked_first(pair_model(pair), prompts, plain)
    assert [list(tokens) for tokens in plain] == first
    cases = ((4, "random"), (12, "random"), (12, "itself"))
    for k, draft in cases if kernels == "native" else cases[1:]:
        llm = pair.llm(draft, k=k)
        size = llm.parts.target.cache.bytes()
        for _ in range(2):
            assert token_ids(llm.generate(prompts, params)) == plain
        assert llm.parts.target.cache.bytes() == size
    assert llm.engine.cache_usage().hit_tokens > 0


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_short_common_prefix_is_reused(windowed, kernels):
    """The next prompt has four tokens in common with a longer sequence that has passed the window (mlx-vlm#1715)."""
    pair = make_pair(*windowed["gemma3"], kernels=kernels, context=128, slots=1)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    first, second = tuple(range(1, 41)), (*range(1, 5), *range(80, 99))
    expected = pair.generate("none", [second], params, k=0, prefix_caching=False)[0].token_ids
    llm = pair.llm("random", k=4)
    llm.generate([first], params)
    hits = llm.engine.cache_usage().hit_tokens
    (completion,) = llm.generate([second], params)
    assert completion.token_ids == expected
    assert llm.engine.cache_usage().hit_tokens - hits == 4


def pair_model(pair):
    """The target in transformers."""
    return AutoModelForCausalLM.from_pretrained(pair.folder, dtype=torch.float32, attn_implementation="eager").eval()
