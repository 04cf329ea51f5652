"""Tests of draft windows: a draft model that reads only the last tokens of a sequence.

The model attends to a few tokens in two layers. A draft with the same weights and fewer positions then computes the
same logits in its window, and each of its draft tokens must be accepted.
"""

import json
import random
import shutil

import pytest

from outrider.core.params import SamplingParams
from outrider.drafting.plan.calibrate import measure_pass
from outrider.drafting.propose.draft_model.chain import DraftModelProposer
from outrider.drafting.propose.draft_model.tree import TreeProposer
from outrider.drafting.propose.draft_model.window import find_window, windowed
from outrider.errors import OutriderError
from outrider.llm import LLM
from outrider.models.loader.load import load_checkpoint
from outrider.models.loader.make import make_target
from tests.helpers import tiny
from tests.helpers.engines import make_engine, outputs, run

CONTEXT = 256
WINDOW = 64
KERNELS = [pytest.param("native", marks=pytest.mark.skipif(not tiny.compiles(), reason="no C++ compiler")), "torch"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target, and a draft of the same weights with fewer positions."""
    root = tmp_path_factory.mktemp("window")
    config = tiny.make_config(
        "MistralConfig", head_dim=16, num_hidden_layers=2, sliding_window=tiny.WINDOW, max_position_embeddings=CONTEXT
    )
    target = tiny.save(root / "target", config)
    draft = root / "draft"
    shutil.copytree(target, draft)
    settings = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": WINDOW}))
    return target, draft


def random_ids(count, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(1, 250) for _ in range(count)]


def generate(target, proposer, prompts, params, **options):
    return LLM(target, proposer=proposer, dtype="float32", max_num_seqs=2, max_model_len=CONTEXT, **options).generate(
        prompts, params
    )


@pytest.mark.fast_cases("draft-native", "tree-torch", "cascade-native")
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", ["draft", "tree", "cascade"])
def test_draft_continues_beyond_its_positions(name, kernels, folders):
    """It accepts all, and the output is that of plain decoding."""
    target, draft = folders
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    prompts = [random_ids(20), random_ids(130, seed=1)]
    plain = generate(target, "none", prompts, params, k=0, kernels=kernels)
    drafted = generate(target, f"{name}:{draft}", prompts, params, k=4, kernels=kernels)
    assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]
    for completion in drafted:
        beyond = len(completion.prompt_token_ids) + completion.stats.output_tokens - WINDOW
        assert beyond > WINDOW
        assert sum(completion.stats.accepted) > 0.97 * sum(completion.stats.reached)
        assert completion.stats.output_tokens / completion.stats.passes > (3.5 if name == "tree" else 4.5)


@pytest.mark.parametrize("kernels", KERNELS)
def test_sampled_output_of_a_seed_does_not_depend_on_the_batch(kernels, folders):
    target, draft = folders
    params = SamplingParams(temperature=1, seed=5, max_tokens=100, ignore_eos=True)
    prompts = [random_ids(40), random_ids(90, seed=1)]
    options = {"k": 4, "kernels": kernels}
    together = generate(target, f"draft:{draft}", prompts, params, **options)
    alone = [generate(target, f"draft:{draft}", [prompt], params, **options)[0] for prompt in prompts]
    assert together[0].token_ids == alone[0].token_ids
    assert together[0].stats.output_tokens / together[0].stats.passes > 3


def test_draft_by_text_continues_beyond_its_positions(folders):
    target, draft = folders
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    prompt = random_ids(60)
    plain = generate(target, "none", [prompt], params, k=0)[0]
    drafted = generate(target, f"draft-text:{draft}", [prompt], params, k=4)[0]
    assert drafted.token_ids == plain.token_ids


def test_window_is_a_choice_for_speed(folders):
    """A draft with enough positions reads a window if it is asked to."""
    target, _ = folders
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    prompt = random_ids(60)
    plain = generate(target, "none", [prompt], params, k=0)[0]
    drafted = generate(target, f"draft:{target}", [prompt], params, k=4, draft_window=32)[0]
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.output_tokens / drafted.stats.passes > 3
    llm = LLM(target, proposer=f"draft:{target}", k=4, dtype="float32", max_model_len=CONTEXT)
    assert find_window(llm.parts.proposer.model) is None


def test_window_begins_at_a_multiple_of_its_stride(folders):
    window = windowed(load(folders[1]), context=CONTEXT)
    begins = [window.begin(end) for end in range(1, CONTEXT)]
    assert begins == sorted(begins)
    assert all(begin % window.stride == 0 for begin in begins)
    lengths = [end - begin for end, begin in zip(range(1, CONTEXT), begins, strict=True)]
    assert max(lengths) == WINDOW - WINDOW // 4
    assert min(lengths[WINDOW:]) > WINDOW // 4


def test_calibration_measures_passes_of_the_window(folders):
    cost = measure_pass(windowed(load(folders[1]), context=CONTEXT))
    assert cost.window is not None
    assert cost.window <= WINDOW
    assert cost(1, seqs=1, cached=cost.window) == cost(1, seqs=1, cached=CONTEXT)


@pytest.mark.skipif(not tiny.compiles(), reason="no C++ compiler")
@pytest.mark.parametrize("gigabytes", [None, 0.002])
def test_cache_of_a_window_gets_no_more_memory_than_it_needs(gigabytes, folders):
    target, draft = folders
    options = {"k": 4, "dtype": "float32", "kernels": "native", "max_num_seqs": 2, "max_model_len": CONTEXT}
    llm = LLM(target, proposer=f"draft:{draft}", cache_gb=gigabytes, **options)
    caches = [llm.parts.target.cache, llm.parts.proposer.model.cache]
    assert caches[1].usage().blocks == 2 * 2  # a block for each window, and one to go on from
    assert caches[0].usage().blocks >= 2 * 5
    if gigabytes:
        size = sum(cache.bytes() for cache in caches)
        assert 0.95 * 1e9 * gigabytes < size <= 1e9 * gigabytes


@pytest.mark.parametrize(
    ("proposer", "size", "message"),
    [
        ("ngram", 32, "has no draft that reads the text"),
        ("draft", 65, "takes from 16 to 64 tokens"),
        ("draft", 8, "takes from 16 to 64 tokens"),
        ("draft", 0, "at least 1"),
    ],
)
def test_errors(proposer, size, message, folders):
    target, draft = folders
    name = f"draft:{draft}" if proposer == "draft" else proposer
    with pytest.raises(OutriderError, match=message):
        LLM(target, proposer=name, dtype="float32", max_model_len=CONTEXT, draft_window=size)


def load(folder, *, slots=4, context=WINDOW, blocks=None, kernels="auto"):
    checkpoint = load_checkpoint(folder, dtype="float32", device="cpu")
    target = make_target(checkpoint, slots=slots, context=context, kernels=kernels)
    if blocks:
        target.cache.resize(blocks)
    target.cache.set_prefix_caching(True)
    return target


def engine_of(folders, make, *, blocks=None, draft_blocks=None, kernels="native", chunk=512):
    def proposer(setup):
        model = load(folders[1], slots=setup.slots, blocks=draft_blocks, kernels=kernels)
        return make(setup, windowed(model, context=setup.context))

    target = load(folders[0], context=CONTEXT, blocks=blocks, kernels=kernels)
    return make_engine(target, proposer, rows=4, chunk=chunk)


@pytest.mark.skipif(not tiny.compiles(), reason="no C++ compiler")
@pytest.mark.parametrize("make", [DraftModelProposer, TreeProposer])
def test_preemption_with_windows(make, folders):
    """Sequences are preempted by the target, or find no memory in the draft's cache. The output stays the same."""
    prompts = [random_ids(count, seed) for seed, count in enumerate((40, 70, 61, 60, 50))]
    params = SamplingParams()
    large = run(engine_of(folders, make), prompts, params, limit=140, ends=frozenset())
    engine = engine_of(folders, make, blocks=8, draft_blocks=2)
    small = run(engine, prompts, params, limit=140, ends=frozenset())
    assert outputs(small) == outputs(large)
    assert engine.cache_usage().preempted > 0
    assert sum(len(row.rounds) for row in large) < 5 * 140 / 3


@pytest.mark.parametrize("kernels", KERNELS)
def test_prefix_is_reused_within_windows(kernels, folders):
    """A second request with the same prompt finds the tokens of its window in the draft's cache."""
    target, draft = folders
    llm = LLM(
        target, proposer=f"draft:{draft}", k=4, dtype="float32", kernels=kernels, max_num_seqs=2, max_model_len=CONTEXT
    )
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, scope="user")
    prompt = random_ids(2 * WINDOW + 3)  # its window does not move while the output is generated
    first = llm.generate([prompt], params)[0]
    cache = llm.parts.proposer.model.cache
    before = cache.usage()
    second = llm.generate([prompt], params)[0]
    assert second.token_ids == first.token_ids
    assert second.stats.output_tokens / second.stats.passes > 3
    assert cache.usage().hit_tokens > before.hit_tokens
