"""Tests of the placement of drafts on several ranks, and of recorded passes in two ranks."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.core.config import EngineConfig
from outrider.core.placement import PassEstimate
from outrider.drafting.propose.placement import (
    choose_placement,
    estimate_pass,
    pass_work,
    place_draft_model,
    place_head,
)
from outrider.drafting.propose.registry import check_draft_settings
from outrider.errors import OutriderError
from outrider.models.heads.store import write_head
from tests.helpers.heads import cases as head_cases
from tests.helpers.heads import random_draft
from tests.helpers.tiny import Shelf, make_config, save
from tests.runtime.launch import compare, needs_accelerate


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    return Shelf(tmp_path_factory.mktemp("models"))


def test_estimate_of_a_pass():
    estimate = estimate_pass(8e9, layers=3, ranks=4, bandwidth=2e12, all_reduce=1e-5)
    assert estimate.replicated == pytest.approx(4e-3)
    assert estimate.sharded == pytest.approx(1e-3 + 8e-5)


@pytest.mark.parametrize(
    ("asked", "times", "sharded"),
    [
        ("auto", (4e-3, 1e-3), True),
        ("auto", (1e-3, 4e-3), False),
        ("auto", (1e-3, 1e-3), False),
        ("replicated", (4e-3, 1e-3), False),
        ("sharded", (1e-3, 4e-3), True),
    ],
)
def test_choice(asked, times, sharded):
    estimate = PassEstimate(replicated=times[0], sharded=times[1])
    placement = choose_placement(asked, "dir", 2, estimate)
    assert placement.sharded == sharded
    assert placement.as_dict()["placement"] == ("sharded" if sharded else "replicated")


def test_text_of_a_placement():
    placement = choose_placement("auto", "dir", 2, PassEstimate(replicated=4e-3, sharded=1.25e-3))
    text = "the draft dir is sharded over 2 ranks: this is estimated to be faster (estimated per draft token: 4 ms"
    assert str(placement) == f"{text} replicated, 1.25 ms sharded)"
    head = place_head("head", 2, asked="auto")
    assert str(head) == "the draft head is replicated on 2 ranks: each rank runs the whole draft head"
    assert head.as_dict()["sharded_ms"] is None


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_bytes_that_a_token_reads(name, shelf):
    size, layers, hidden = pass_work(str(shelf.folder(name)), torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(shelf.folder(name))
    config = model.config
    assert (layers, hidden) == (config.num_hidden_layers, config.hidden_size)
    weights = sum(weight.numel() for weight in model.parameters())
    looked_up = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    unread = 0  # experts of other tokens
    if name == "qwen3_moe":
        others = config.num_experts - config.num_experts_per_tok
        unread = config.num_hidden_layers * others * 3 * config.hidden_size * config.moe_intermediate_size
        assert unread
    final_norm = config.hidden_size
    assert size == 2 * (weights - looked_up - unread - final_norm)


class OneRank:
    """Ranks whose messages go nowhere: only what needs no measurement may use them."""

    size = 3

    def barrier(self):
        raise AssertionError("a draft that cannot be split needs no measurement")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("llama", "tp 3 does not divide the 4 attention heads of this llama"),
        ("gpt2", "gpt2 has no plan for tensor parallelism in this version of transformers"),
        ("lfm2", "lfm2 has recurrent layers, which Outrider does not split over ranks"),
    ],
)
def test_drafts_that_cannot_be_split_are_replicated(name, reason, shelf):
    place = {"device": torch.device("cpu"), "dtype": torch.float32}
    placement = place_draft_model(str(shelf.folder(name)), OneRank(), asked="auto", **place)
    assert (placement.sharded, placement.estimate, placement.reason) == (False, None, reason)
    with pytest.raises(OutriderError, match=f"cannot be split: {reason}; use auto"):
        place_draft_model(str(shelf.folder(name)), OneRank(), asked="sharded", **place)


def test_errors_name_the_fix():
    with pytest.raises(OutriderError, match="draft_placement is 'both'; use auto, replicated or sharded"):
        EngineConfig(tp=2, draft_placement="both")
    with pytest.raises(OutriderError, match="needs several ranks, and tp is 1; leave it out, or set tp"):
        EngineConfig(draft_placement="sharded")
    with pytest.raises(OutriderError, match="the proposer ngram has no draft that reads the text; use draft:DIR"):
        check_draft_settings(EngineConfig(tp=2, draft_placement="replicated"), "ngram")
    with pytest.raises(OutriderError, match="dir is a draft head, which is not split; use auto"):
        place_head("dir", 2, asked="sharded")
    check_draft_settings(EngineConfig(tp=2), "ngram")
    check_draft_settings(EngineConfig(tp=2, draft_placement="sharded"), "best(ngram,draft:dir)")


@pytest.mark.slow
@needs_accelerate
def test_placements_and_recorded_passes_give_the_tokens_of_one_process(shelf, tmp_path):
    target = save(tmp_path / "llama8", make_config("LlamaConfig", num_hidden_layers=8))
    _, description = head_cases(hidden=32, vocab=256)["eagle"]
    write_head(tmp_path / "head", random_draft(description, table=torch.randn(256, 32)), dtype=torch.float32)
    draft = {"target": str(shelf.folder("llama")), "proposer": f"draft:{shelf.folder('qwen3')}", "k": 3}
    cases = {
        "tree": {**draft, "proposer": f"tree:{shelf.folder('qwen3')}", "draft_placement": "sharded"},
        "replicated": {**draft, "draft_placement": "replicated"},
        "auto sharded": {**draft, "estimate": [2.0, 1.0]},
        "fails its check": {**draft, "proposer": f"draft:{shelf.folder('cohere')}", "estimate": [2.0, 1.0]},
        "head": {"target": str(target), "proposer": f"draft:{tmp_path / 'head'}", "k": 3},
        "recorded": {**draft, "draft_placement": "sharded", "record": "works"},
        "recording fails in one rank": {**draft, "draft_placement": "sharded", "record": "fails"},
    }
    results = compare(cases, tmp_path)
    for name in ("auto sharded", "tree", "recorded"):
        assert results[name]["placements"] == ["sharded"], name
    for name in ("replicated", "fails its check", "head"):
        assert results[name]["placements"] == ["replicated"], name
    assert results["auto sharded"]["draft_kernels"] == ["torch, 2 ranks"]
    assert results["replicated"]["draft_kernels"] == ["native"]
    assert results["fails its check"]["reasons"][0].startswith("it cannot be split (cohere: ")
    assert results["recorded"]["draft_kernels"] == ["graphs, 2 ranks"]
    assert min(results["recorded"]["replays"]) > 0
    assert len(results["recorded"]["replays"]) == 2  # of the target and of the draft
    assert all(results["recorded"]["buckets"])
    failing = results["recording fails in one rank"]
    assert not any((*failing["replays"], *failing["buckets"]))
    assert all(results[name]["drafted"] for name in cases)


@needs_accelerate
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_record_passes_and_give_the_tokens_of_one_process(shelf, tmp_path):
    draft = {"target": str(shelf.folder("llama")), "proposer": f"draft:{shelf.folder('qwen3')}", "k": 3}
    cases = {name: {**draft, "device": "cuda", "draft_placement": name} for name in ("replicated", "sharded")}
    results = compare(cases, tmp_path)
    for name, result in results.items():
        assert result["placements"] == [name]
        assert all(result["buckets"])  # none was disabled
    assert results["sharded"]["draft_kernels"] == ["graphs, 2 ranks"]
