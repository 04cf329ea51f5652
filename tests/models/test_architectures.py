"""One list of architectures, and each runs here as it runs in transformers; what cannot is refused."""

from __future__ import annotations

import json
import random

import pytest
import torch

from outrider.core import tree
from outrider.core.params import SamplingParams
from outrider.errors import OutriderError, UnsupportedModel
from outrider.llm import LLM
from outrider.loader.checkpoint import load_checkpoint
from outrider.testing import random_tree
from tests.helpers import tiny

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # GPTBigCode
LENGTHS = (31, 5, 18, 11, 1)  # of prompts; windows are 8 wide and chunks 7
EXACT = 1e-4  # of the logits' norm
SLOTS = (0, 1, 3)
NO_LAYERS = ("mamba2", "gemma3n_text")  # that one could export


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    return tiny.Shelf(tmp_path_factory.mktemp("architectures"))


def distance(ours, theirs):
    return float(((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).max())


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_greedy_is_transformers_greedy(name, shelf):
    chance = random.Random(3)
    prompts = [tiny.text(chance, length) for length in LENGTHS]
    theirs = [tiny.greedy(shelf.model(name), prompt, 24) for prompt in prompts]
    for proposer in ("none", "ngram"):
        options = {
            "dtype": "float32",
            "device": "cpu",
            "max_num_seqs": 3,
            "max_model_len": 64,
            "max_num_batched_tokens": 7,
        }
        llm = LLM(shelf.folder(name), proposer=proposer, k=4, **options)
        ours = llm.generate(prompts, SamplingParams(max_tokens=24))
        assert [list(completion.token_ids) for completion in ours] == theirs, proposer
    assert llm.stats.draft_tokens > 0


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
@torch.inference_mode()
def test_a_tree_scores_like_its_branches(name, shelf):
    chance = random.Random(4)
    layers = () if name in NO_LAYERS else (0, tiny.LAYERS - 2)
    target, model = shelf.target(name, layers), shelf.model(name)
    rows = [tiny.admit(target, slot, tiny.text(chance, 3 + 9 * i)) for i, slot in enumerate(SLOTS)]
    for running in (rows, rows[1:], rows, rows[:1], rows):
        tiny.grow(target, running, chance)
    batch, draft = tiny.everything(rows), random_tree([6, 0, 5], tiny.VOCAB, chance)
    scores = target.score(batch, draft)
    for b, row in enumerate(rows):
        for node in {-1, *range(draft.width[b])} - set(draft.parent[b].tolist()) or {-1}:
            path = tiny.branch(draft, b, node)
            guesses = draft.tokens[b, path]
            out = model(torch.tensor([row.token_ids + guesses.tolist()]), use_cache=False, output_hidden_states=True)
            where, at = [0, *(i + 1 for i in path)], slice(len(row.token_ids) - 1, None)
            assert distance(scores.logits[b, where], out.logits[0, at]) < EXACT
            for layer in layers:
                assert distance(scores.hidden_states[layer][b, where], out.hidden_states[layer + 1][0, at]) < EXACT
                fed, first = scores.feed_hidden_states[layer][b], batch.start[b]
                assert distance(fed, out.hidden_states[layer + 1][0, first : first + len(batch.feed[b])]) < EXACT
            alone = target.score(tiny.everything([row]), tree.chain(guesses[None], (len(path),)))
            assert distance(scores.logits[b, where], alone.logits[0]) < EXACT


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
@torch.inference_mode()
def test_commit_is_a_fresh_read_of_the_text(name, shelf):
    chance = random.Random(5)
    target, fresh = shelf.target(name), shelf.target(name)
    for slots in (SLOTS, (0, 2), (3,)):  # slots are used again
        rows = [tiny.admit(target, slot, tiny.text(chance, chance.randint(1, 20))) for slot in slots]
        for _ in range(5):
            tiny.grow(target, sorted(chance.sample(rows, chance.randint(1, len(rows))), key=lambda r: r.slot), chance)
        ours = target.score(tiny.everything(rows), tree.empty(len(rows), target.device)).logits
        for row, logits in zip(rows, ours, strict=True):
            again = tiny.admit(fresh, row.slot, row.token_ids)
            theirs = fresh.score(tiny.everything([again]), tree.empty(1, target.device)).logits
            assert distance(logits, theirs[0]) < EXACT
            target.cache.release(row.slot)
            fresh.cache.release(row.slot)


@pytest.mark.parametrize("name", tiny.REFUSED)
def test_refused_by_its_configuration(name, tmp_path):
    settings, reason = tiny.REFUSED[name]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name, **settings}))
    with pytest.raises(OutriderError, match=f"{name}.*{reason}"):
        load_checkpoint(tmp_path, device="cpu")


@pytest.mark.parametrize("name", tiny.REFUSED_BY_CHECK)
def test_refused_by_the_check(name, tmp_path):
    config, reason = tiny.REFUSED_BY_CHECK[name]
    folder = tiny.save(tmp_path / name, config())
    with pytest.raises(UnsupportedModel, match=f"{name}.*{reason}"):
        LLM(folder, dtype="float32", device="cpu")
