"""Tests of draft heads that attend to the latest tokens only."""

import json

import pytest
import torch

from outrider.core import tree
from outrider.core.params import SamplingParams
from outrider.errors import OutriderError
from outrider.llm import LLM
from outrider.models.heads.store import make_module
from outrider.models.heads.targets.autoregressive import AutoregressiveTarget, NativeAutoregressiveTarget
from outrider.models.loader.embedded import embedded
from outrider.models.loader.load import load_checkpoint
from outrider.models.loader.make import make_target
from outrider.train.model.presets import describe
from tests.helpers import tiny
from tests.helpers.heads import far, feed, write_new_head
from tests.models.heads.test_heads import MINI

CPU = torch.device("cpu")

TEXT = 40  # tokens
compiled = pytest.mark.skipif(not tiny.compiles(), reason="no C++ compiler")


def logits_of(head_class, module, tables, states, window):
    head = head_class(module, tables, slots=1, context=64, window=window)
    text = [(7 * i) % 12288 for i in range(1, TEXT + 1)]
    batch = feed(head, module.description, text, states)
    return head.score(batch, tree.empty(1, CPU)).logits


@compiled
@torch.inference_mode()
@pytest.mark.parametrize("head_class", [AutoregressiveTarget, NativeAutoregressiveTarget])
def test_only_the_latest_tokens_are_visible(head_class):
    torch.manual_seed(0)
    checkpoint = load_checkpoint(embedded("mini"), dtype="float32", device="cpu")
    tables = make_target(checkpoint, slots=1, context=64, kernels="native").share_weights()
    module = make_module(describe("eagle3", MINI)).eval().requires_grad_(False)
    states = torch.randn(TEXT - 1, len(module.description.aux_states.layers), 384)
    changed = states.clone()
    changed[:10] += 1.0
    windowed = logits_of(head_class, module, tables, states, 20)
    assert torch.equal(windowed, logits_of(head_class, module, tables, changed, 20))
    whole = logits_of(head_class, module, tables, states, None)
    assert not torch.equal(whole, logits_of(head_class, module, tables, changed, None))
    assert torch.equal(whole, logits_of(head_class, module, tables, states, 60))
    assert far(windowed, logits_of(AutoregressiveTarget, module, tables, states, 20)) < 1e-5


@pytest.mark.fast_cases("native")
@compiled
@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_window_of_a_head_does_not_change_the_output(kernels, tmp_path):
    write_new_head(tmp_path, "eagle3")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 24}))
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    options = {"dtype": "float32", "kernels": kernels, "max_num_seqs": 1, "max_model_len": 96}
    plain = LLM(None, proposer="none", k=0, **options).generate(["Once upon"], params)[0]
    for window in (None, 16):
        llm = LLM(None, proposer=f"draft:{tmp_path}", k=3, draft_window=window, **options)
        drafted = llm.generate(["Once upon"], params)[0]
        assert drafted.token_ids == plain.token_ids
        assert drafted.stats.draft_tokens > 40


def test_heads_without_attention_to_tokens_refuse_a_window(tmp_path):
    write_new_head(tmp_path, "medusa")
    with pytest.raises(OutriderError, match="supports none"):
        LLM(None, proposer=f"draft:{tmp_path}", dtype="float32", max_model_len=96, draft_window=32)
