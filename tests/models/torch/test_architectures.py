"""Every supported architecture gives the results of transformers. Unsupported ones raise an error."""

import json
import random

import pytest
import torch

from outrider.core import tree
from outrider.core.params import SamplingParams
from outrider.errors import OutriderError, UnsupportedModel
from outrider.llm import LLM
from outrider.models.loader.load import load_checkpoint
from outrider.models.loader.make import make_target
from outrider.testing import check_cache, random_tree
from tests.helpers import tiny

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # GPTBigCode
LENGTHS = (31, 5, 18, 11, 1)  # of prompts; windows have 8 tokens and prefill chunks 9
MAX_TOKENS = 8
TOLERANCE = 1e-4  # relative to the norm of the logits
SLOTS = (0, 1, 3)
FAST = pytest.mark.fast_cases(*tiny.fast(tiny.ARCHITECTURES))
# Hidden states cannot be exported, or transformers numbers them otherwise: layers run twice, are skipped, or have
# several streams.
NO_EXPORT = ("gemma3n_text", "dory", "hy_v4", "mllama")
LAYERS_ONLY = ("falcon_mamba", "mamba", "mamba2", "rwkv")  # transformers leaves the embeddings out of hidden_states


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    return tiny.Shelf(tmp_path_factory.mktemp("architectures"))


def relative_error(actual, expected):
    return float(((actual - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


@pytest.fixture(scope="module", params=tiny.ARCHITECTURES)
def name(request):
    """The name of an architecture. All tests of one run together, and share its files and models."""
    return request.param


@FAST
def test_greedy_output_equals_transformers(name, shelf):
    """With drafts, and in the same batch without. One output is compared with `generate` itself."""
    rng = random.Random(3)
    prompts = [tiny.text(rng, length) for length in LENGTHS]
    prompts += prompts[:2]
    params = [SamplingParams(max_tokens=MAX_TOKENS, k=k) for k in (4,) * len(LENGTHS) + (0, 0)]
    options = {"dtype": "float32", "device": "cpu", "max_num_seqs": 4, "max_model_len": 64, "max_num_batched_tokens": 9}
    llm = LLM(shelf.folder(name), proposer="ngram", k=4, **options)
    completions = llm.generate(prompts, params)
    outputs = [list(completion.token_ids) for completion in completions]
    assert list(map(len, outputs)) == [MAX_TOKENS] * len(prompts)
    assert outputs == tiny.ranked_first(shelf.model(name), prompts, outputs)
    assert outputs[1] == tiny.greedy(shelf.model(name), prompts[1], MAX_TOKENS)
    assert all(completion.stats.draft_tokens == 0 for completion in completions[-2:])
    assert llm.stats.draft_tokens > 0


@FAST
@torch.inference_mode()
def test_tree_scores_equal_transformers_on_each_branch(name, shelf):
    rng = random.Random(4)
    layers = () if name in NO_EXPORT else (0, tiny.LAYERS - 2)
    first = 0 if name in LAYERS_ONLY else 1  # index of the output of layer 0
    target = shelf.target(name, layers)
    model = shelf.model(name)
    seqs = [tiny.admit(target, slot, tiny.text(rng, 3 + 9 * i)) for i, slot in enumerate(SLOTS)]
    for running in (seqs, seqs[1:], seqs, seqs[:1], seqs):
        tiny.grow(target, running, rng)
    batch = tiny.everything(seqs)
    draft = random_tree([6, 0, 5], tiny.VOCAB, rng)
    scores = target.score(batch, draft)
    for b, seq in enumerate(seqs):
        feed_span = slice(batch.start[b], batch.start[b] + len(batch.feed[b]))
        leaves = {-1, *range(draft.width[b])} - set(draft.parent[b].tolist()) or {-1}
        for node in leaves:
            path = tiny.branch(draft, b, node)
            branch = draft.tokens[b, path]
            out = model(torch.tensor([seq.token_ids + branch.tolist()]), use_cache=False, output_hidden_states=True)
            nodes = [0, *(i + 1 for i in path)]
            positions = slice(len(seq.token_ids) - 1, None)
            assert relative_error(scores.logits[b, nodes], out.logits[0, positions]) < TOLERANCE
            for layer in layers:
                expected = out.hidden_states[layer + first][0]
                assert relative_error(scores.hidden_states[layer][b, nodes], expected[positions]) < TOLERANCE
                assert relative_error(scores.feed_hidden_states[layer][b], expected[feed_span]) < TOLERANCE
            alone = target.score(tiny.everything([seq]), tree.chain(branch[None], (len(path),)))
            assert relative_error(scores.logits[b, nodes], alone.logits[0]) < TOLERANCE


# Commits of all fast architectures are tested above, and of all caches in test_commit_fuzz.py.
@pytest.mark.fast_cases("llama", "qwen2", "deepseek_v3", "bamba", "rwkv")
@torch.inference_mode()
def test_committed_cache_equals_fresh_prefill(name, shelf):
    rng = random.Random(5)
    checkpoint = shelf.checkpoint(name)
    target, fresh = (make_target(checkpoint, slots=4, context=128) for _ in range(2))
    for slots in (SLOTS, (0, 2), (3,)):  # slots are reused
        seqs = [tiny.admit(target, slot, tiny.text(rng, rng.randint(1, 20))) for slot in slots]
        for _ in range(5):
            running = rng.sample(seqs, rng.randint(1, len(seqs)))
            tiny.grow(target, sorted(running, key=lambda seq: seq.slot), rng)
        all_logits = target.score(tiny.everything(seqs), tree.empty(len(seqs), target.device)).logits
        for seq, logits in zip(seqs, all_logits, strict=True):
            fresh_seq = tiny.admit(fresh, seq.slot, seq.token_ids)
            expected = fresh.score(tiny.everything([fresh_seq]), tree.empty(1, target.device)).logits
            assert relative_error(logits, expected[0]) < TOLERANCE
            target.cache.release(seq.slot)
            fresh.cache.release(seq.slot)


@pytest.mark.slow
def test_hidden_states_of_a_skipped_layer_are_refused(shelf):
    target = shelf.target("mllama", (1,))
    seq = tiny.admit(target, 0, [1, 2, 3])
    with pytest.raises(UnsupportedModel, match="the model skips layer 1 in a pass over text"):
        target.score(tiny.everything([seq]), tree.empty(1, target.device))


@pytest.mark.slow
@pytest.mark.parametrize("name", tiny.ATTENTION)
def test_batch_of_16_equals_transformers(name, shelf):
    rng = random.Random(6)
    prompts = [tiny.text(rng, length) for length in (2, 3, 5, 8, 13, 21, 34, 40, 1, 31, 16, 17, 7, 9, 38, 2)]
    expected = [tiny.greedy(shelf.model(name), prompt, 6) for prompt in prompts]
    options = {"dtype": "float32", "device": "cpu", "max_num_seqs": 16, "max_model_len": 64}
    llm = LLM(shelf.folder(name), proposer="merge(ngram,recycle)", k=4, **options)
    completions = llm.generate(prompts, SamplingParams(max_tokens=6))
    assert [list(completion.token_ids) for completion in completions] == expected
    assert llm.stats.draft_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
@torch.inference_mode()
def test_conformance_of_the_cache(name, shelf):
    checkpoint = load_checkpoint(shelf.folder(name), dtype="float32", device="cpu")
    # Deep layers of random weights enlarge rounding.
    check_cache(lambda: make_target(checkpoint, slots=4, context=128), trials=1, tolerance=2e-4)


@pytest.mark.parametrize("name", tiny.REFUSED)
def test_unsupported_configuration_raises(name, tmp_path):
    settings, reason = tiny.REFUSED[name]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name, **settings}))
    with pytest.raises(OutriderError, match=f"{name}.*{reason}"):
        load_checkpoint(tmp_path, device="cpu")


@pytest.mark.parametrize("name", tiny.REFUSED_BY_CHECK)
def test_unsupported_model_fails_the_check(name, tmp_path):
    config, reason = tiny.REFUSED_BY_CHECK[name]
    folder = tiny.save(tmp_path / name, config())
    with pytest.raises(UnsupportedModel, match=f"{name}.*{reason}"):
        LLM(folder, dtype="float32", device="cpu")
