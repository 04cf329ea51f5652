"""Engines that are made again and again in one process."""

import gc
import weakref

import pytest
import torch

from outrider.llm import LLM
from outrider.models.heads.store import make_module, write_head
from outrider.train.model.presets import Sizes, describe
from tests.field.models import GREEDY, PROMPTS, llama, token_ids
from tests.helpers import tiny
from tests.helpers.threads import torch_threads


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target, and a random EAGLE-3 head for it."""
    root = tmp_path_factory.mktemp("engines")
    target = tiny.save(root / "target", llama(num_hidden_layers=tiny.LAYERS))
    torch.manual_seed(1)
    sizes = Sizes(hidden=64, layers=tiny.LAYERS, vocab=tiny.VOCAB, epsilon=1e-6)
    write_head(root / "head", make_module(describe("eagle3", sizes)), dtype=torch.float32)
    return target, root / "head"


@pytest.mark.fast_cases("4-1")
@pytest.mark.parametrize(("count", "threads"), [(4, 1), (50, 1), (50, 2), (50, 4)])
def test_every_fresh_engine_accepts_as_much(folders, count, threads):
    """Engines with an EAGLE-3 head are made and dropped; none accepts less than the first (openvino.genai#4425)."""
    target, head = folders
    options = {"k": 4, "dtype": "float32", "device": "cpu", "max_num_seqs": 3, "max_model_len": 96}
    results = set()
    dropped = []
    with torch_threads(threads):
        for _ in range(count):
            llm = LLM(target, proposer=f"draft:{head}", **options)
            completions = llm.generate(PROMPTS, GREEDY)
            results.add((*token_ids(completions), llm.stats.offered, llm.stats.accepted))
            dropped.append(weakref.ref(llm.engine))
            del llm
    gc.collect()
    assert len(results) == 1
    assert not any(engine() for engine in dropped)
