"""Tests of native attention over several blocks of the cache, some of which the matrix units multiply whole."""

import random

import pytest
import torch

from outrider.models.cache.prefix_tree import BLOCK
from outrider.testing.drive import random_tree
from tests.helpers import tiny
from tests.helpers.threads import torch_threads
from tests.models.native.test_native import chain, feed, load_target, random_ids, relative_error, split

pytestmark = pytest.mark.skipif(not tiny.compiles(), reason="no C++ compiler")
LENGTH = 190  # of a sequence: nearly three blocks
_LONG = {"max_position_embeddings": 256, "num_hidden_layers": 2}
MODELS = {
    "dim 32": tiny.make_config("LlamaConfig", head_dim=32, **_LONG),
    "dim 48": tiny.make_config("LlamaConfig", head_dim=48, **_LONG),
    "dim 64, one key head": tiny.make_config("LlamaConfig", head_dim=64, num_key_value_heads=1, **_LONG),
    "window": tiny.make_config("MistralConfig", head_dim=32, sliding_window=BLOCK + 30, **_LONG),
}


COMMITTED = [BLOCK - 1, BLOCK, 2 * BLOCK - 3, 150]  # tokens
KV_DTYPES = pytest.mark.parametrize("kv_dtype", ["auto", "int8"])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("attention")
    return {name: tiny.save(root / name, config) for name, config in MODELS.items()}


@pytest.mark.fast_cases(
    "auto-32-dim 32",
    "auto-32-dim 64, one key head",
    "auto-16-dim 48",
    "auto-16-window",
    "int8-16-dim 48",
    "int8-16-window",
)
@torch.inference_mode()
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("bits", [32, 16])
@KV_DTYPES
def test_bits_do_not_depend_on_prefill_chunks(name, bits, kv_dtype, folders):
    target, _ = load_target(folders[name], bits=bits, context=256, kv_dtype=kv_dtype)
    tokens = random_ids(LENGTH)
    reference = feed(target, [tokens[:1]], draft=chain(tokens[1:]))[0].logits[0]
    for sizes in ([LENGTH - 1, 1], [63, 1, 64, 62], [64, 64, 62], [65, 60, 3, 62], [7] * 27 + [1], [1] * LENGTH):
        pieces, ends = split(tokens, sizes)
        logits = torch.cat([scores.logits[0, -1:] for scores in feed(target, pieces, slot=2)])
        assert torch.equal(logits, reference[ends]), sizes


@pytest.mark.fast_cases(
    *(f"auto-{committed}-{name}" for committed in COMMITTED for name in MODELS), "int8-63-dim 32", "int8-150-window"
)
@torch.inference_mode()
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("committed", COMMITTED)
@KV_DTYPES
def test_tree_nodes_that_fill_a_block_equal_each_branch_alone(name, committed, kv_dtype, folders):
    """The last block of a branch may be whole although its entries are not adjacent in the cache."""
    target, _ = load_target(folders[name], context=256, kv_dtype=kv_dtype)
    tokens = random_ids(committed)
    draft = random_tree([12], 250, random.Random(committed))
    scores = feed(target, [tokens], draft=draft)[0].logits
    for node in range(draft.width[0]):
        path = draft.tokens[0, tiny.branch(draft, 0, node)].tolist()
        alone = feed(target, [tokens + path], slot=3)[0].logits[0, -1]
        assert torch.equal(scores[0, node + 1], alone), node


@torch.inference_mode()
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_close_to_transformers(name, folders):
    target, model = load_target(folders[name], context=256)
    tokens = random_ids(LENGTH)
    logits = feed(target, [tokens[:1]], draft=chain(tokens[1:]))[0].logits[0]
    expected = model.float()(torch.tensor([tokens])).logits[0]
    assert relative_error(logits, expected) < 0.03


@torch.inference_mode()
@KV_DTYPES
@pytest.mark.parametrize("window", [None, 700])
def test_bits_of_a_long_text_do_not_depend_on_who_shares_it(kv_dtype, window, tmp_path):
    """A few tokens behind a long text are shared out by sections of it, many tokens are not."""
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}
    config = tiny.make_config("MistralConfig", max_position_embeddings=2048, sliding_window=window, **sizes)
    folder, tokens = tiny.save(tmp_path, config), random_ids(1101)
    expected = None
    for threads in (1, 2, 16):
        with torch_threads(threads):
            target, model = load_target(folder, context=1200, kv_dtype=kv_dtype)
            scores = feed(target, [tokens[:1098]], draft=chain(tokens[1098:]))[0].logits[0]
            alone = feed(target, [tokens[:1100], tokens[1100:]], slot=1)[1].logits[0, -1]
        expected = scores if expected is None else expected
        assert torch.equal(scores, expected)
        assert torch.equal(alone, expected[-1])
    assert relative_error(expected, model.float()(torch.tensor([tokens])).logits[0, 1097:]) < 0.03


@torch.inference_mode()
@KV_DTYPES
def test_unused_entries_of_a_block_may_be_nan(kv_dtype, folders):
    target, _ = load_target(folders["dim 32"], context=256, kv_dtype=kv_dtype)
    tokens = random_ids(100)
    expected = feed(target, [tokens])[0].logits
    target.cache.release(0)
    target._memory._entries.view(torch.uint8).fill_(0xFF)  # NaN in float32 and bfloat16
    assert torch.equal(feed(target, [tokens[:70], tokens[70:]], slot=1)[-1].logits, expected)
