"""The target on Triton kernels, which run in Triton's interpreter on the CPU."""

import random
from collections import Counter
from contextlib import contextmanager, nullcontext
from cProfile import Profile
from dataclasses import replace

import pytest
import torch

from outrider import LLM, OutriderError, SamplingParams
from outrider.core import tree
from outrider.core.target import draft_by_scores
from outrider.core.types import DraftBudget
from outrider.errors import UnsupportedModel
from outrider.models.loader.check import check_target
from outrider.models.loader.load import load_checkpoint
from outrider.models.loader.make import make_target
from outrider.testing.drive import random_tree
from tests.helpers import tiny, triton_reference
from tests.helpers.configs import make_config
from tests.helpers.no_synchronization import NoSynchronization
from tests.helpers.recorder import FakeRecorder

kernels = pytest.importorskip("tests.helpers.triton")
from outrider.models.triton import attention, decoder, layers, linear, prompt_products, recordings  # noqa: E402
from outrider.models.triton.target import TritonTarget  # noqa: E402

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
CONFIGS = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", {"head_dim": ..., "hidden_size": 64}),  # biases
    "qwen3": ("Qwen3Config", {}),  # norms of heads
    "gemma2": (  # windows, soft caps, norms of outputs
        "Gemma2Config",
        {"sliding_window": 64, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0},
    ),
    "phi3": ("Phi3Config", {"head_dim": ..., "hidden_size": 64, "sliding_window": None}),  # one layer for all
    "granite": (
        "GraniteConfig",
        {"head_dim": ..., "hidden_size": 64, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    ),
    "smollm3": (
        "SmolLM3Config",
        {"head_dim": ..., "hidden_size": 64, "no_rope_layers": [1, 0]},
    ),  # a layer without rotation
}
PROMPTS = [[1, 2, 3], [5, 6, 7, 5, 6, 7, 5], list(range(90)), [9] * 20]


@pytest.fixture(scope="module", autouse=True)
def reference():
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        triton_reference.use(patch)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")

    def find(name):
        kind, settings = CONFIGS[name]
        path = root / name
        if not path.exists():
            tiny.save(path, make_config(kind, **SIZES | {"max_position_embeddings": 256} | settings))
        return path

    return find


def load(path, *, slots=4, dtype="float32", bits=16, record=None):
    checkpoint = load_checkpoint(path, device="cpu", dtype=dtype, kernels="triton")
    return TritonTarget(checkpoint, slots=slots, context=192, bits=bits, record=record), checkpoint


def generate(path, *, kernels="triton", temperature=0.0, **settings):
    llm = LLM(path, device="cpu", dtype="float32", kernels=kernels, max_model_len=192, check="never", **settings)
    params = SamplingParams(max_tokens=10, temperature=temperature, seed=3, ignore_eos=True)
    return [list(completion.token_ids) for completion in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_those_of_transformers(name, folder):
    target, checkpoint = load(folder(name))
    assert checkpoint.weights is not None
    check_target(target, checkpoint)  # raises where the logits of a tree differ


def test_kernels_in_the_interpreter(folder, monkeypatch):
    results = []
    for uses_kernels in (False, True):
        if uses_kernels:
            for function in (linear.linear, layers.rms_norm, layers.rotate_and_write, attention.attend):
                monkeypatch.setattr(decoder, function.__name__, function)
        target, _ = load(folder("gemma2"))
        row = tiny.admit(target, 0, PROMPTS[0])
        draft = tree.one_hot_tree(torch.tensor([[4, 5, 6]]), torch.tensor([[-1, 0, -1]]), (3,))
        with kernels.interpreted(attention, layers, linear) if uses_kernels else nullcontext():
            results.append(target.score(tiny.everything([row]), draft).logits)
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["gemma2", "qwen3"])
def test_texts_are_those_of_torch(name, folder):
    path = folder(name)
    assert generate(path, proposer="none") == generate(path, proposer="none", kernels="torch")


@pytest.mark.parametrize(
    ("proposer", "temperature"),
    [
        ("ngram", 0.0),
        ("merge(ngram,suffix)", 0.0),
        ("exit:1", 0.0),
        ("exit:1", 1.0),
        ("quantized:int8", 0.0),
        ("quantized:int8", 1.0),
        ("draft:qwen3", 0.0),
        ("tree:qwen3", 0.0),
    ],
)
def test_speculation_does_not_change_texts(proposer, temperature, folder):
    path = folder("llama")
    rule = {"verifier": "coupled"} if temperature else {}
    plain = generate(path, proposer="none", temperature=temperature, **rule)
    spec = proposer.replace("qwen3", str(folder("qwen3")))
    assert generate(path, proposer=spec, k=3, temperature=temperature, **rule) == plain


def score_all(target, rows):
    return target.score(tiny.everything(rows), tree.empty(len(rows), target.device)).logits


def test_bits_do_not_depend_on_the_batch(folder):
    target, _ = load(folder("qwen3"))
    together = score_all(target, [tiny.admit(target, slot, prompt) for slot, prompt in enumerate(PROMPTS)])
    for slot, prompt in enumerate(PROMPTS):
        alone, _ = load(folder("qwen3"))
        assert torch.equal(score_all(alone, [tiny.admit(alone, 0, prompt)])[0], together[slot])


@pytest.mark.parametrize("record", [None, FakeRecorder()])
def test_committed_branches_equal_a_fresh_prefill(record, folder):
    target, _ = load(folder("gemma2"), record=record)
    rows = [tiny.admit(target, slot, PROMPTS[slot]) for slot in range(3)]
    rng = random.Random(0)
    for _ in range(5):
        tiny.grow(target, rows, rng)
    committed = score_all(target, rows)
    for slot, row in enumerate(rows):
        fresh = score_all(target, [tiny.admit(target, 3, row.token_ids)])[0]
        torch.testing.assert_close(committed[slot], fresh, rtol=1e-5, atol=1e-5)
    assert record is None or record.count > 0


@pytest.mark.parametrize("widths", [(3, 2, 0, 4), (0, 0, 0, 0)])
def test_prompts_in_passes_of_their_own_equal_one_ragged_pass(widths, folder, monkeypatch):
    scores = []
    for record in (FakeRecorder(), None):
        target, _ = load(folder("qwen3"), record=record)
        target.export_hidden_states([0, 1])
        rows = [tiny.admit(target, slot, prompt) for slot, prompt in enumerate(PROMPTS)]
        draft = random_tree(widths, 256, random.Random(3))
        scores.append(target.score(tiny.everything(rows), draft))
        monkeypatch.setattr("outrider.models.triton.target.whole_prompts", lambda *_: [])
    own, ragged = scores
    for b, width in enumerate(widths):
        assert torch.equal(own.logits[b, : 1 + width], ragged.logits[b, : 1 + width])
        for layer in (0, 1):
            states = [each.hidden_states[layer][b, : 1 + width] for each in scores]
            assert torch.equal(*states)
            assert torch.equal(*(each.feed_hidden_states[layer][b] for each in scores))
    assert own.best is not None


def test_drafted_chains_equal_step_by_step_scoring(folder):
    target, _ = load(folder("llama"), record=FakeRecorder())
    rows = [tiny.admit(target, slot, PROMPTS[slot]) for slot in (0, 1, 3)]
    batch = replace(tiny.everything(rows), budget=DraftBudget((3, 1, 4)))
    expected = draft_by_scores(target, batch, 200).tokens
    for _ in range(3):
        tokens = target.draft_greedy(batch, 200).tokens
        for b, count in enumerate(batch.draft_budget):
            assert torch.equal(tokens[b, :count], expected[b, :count])


def count_launches(monkeypatch):
    """Replace the kernels by functions that count their calls and do not wait, as the references do."""
    calls = Counter()

    def counted(name, run):
        def call(*args, **settings):
            calls[name] += 1
            return run(*args, **settings)

        monkeypatch.setattr(decoder, name, call)
        if name == "linear":
            monkeypatch.setattr(prompt_products, name, call)

    counted("linear", triton_reference.linear)
    counted("rotate_and_write", lambda qkv, *rest, **norms: qkv.view(len(qkv), -1, 16)[:, :4])
    counted("attend", lambda query, *rest, **settings: query + 1)
    return calls


@pytest.mark.parametrize(("widths", "budget"), [((4, 4), 0), ((0, 0), 0), ((0, 0), 4)])
def test_launches_of_a_recorded_pass_and_none_waits(widths, budget, folder, monkeypatch):
    calls = count_launches(monkeypatch)
    recorded = []

    def record(run):
        run()
        calls.clear()
        with NoSynchronization() as mode:
            results = run()
        recorded.append(mode)
        return lambda: results

    target, _ = load(folder("llama"), record=record)
    rows = [tiny.admit(target, slot, PROMPTS[slot]) for slot in (0, 1)]
    batch = replace(tiny.everything(rows), budget=DraftBudget((budget, budget)))
    if budget:
        target.draft_greedy(batch, 256)
    else:
        chain = tree.chain(torch.ones(2, max(widths), dtype=torch.int64), widths)
        target.score(batch, chain)
    passes = budget or 1
    layers = len(target.read_bytes()[0])
    assert calls == {
        "linear": passes * (4 * layers + 1),
        "rotate_and_write": passes * layers,
        "attend": passes * layers,
    }
    assert len(recorded) == 1


def test_a_round_takes_few_calls_of_python_for_each_sequence(folder):
    """The device waits for the host between two rounds. It took 116 calls for each sequence."""

    def frozen(run):
        result = run()
        return lambda: result

    calls = []
    for count in (2, 10):
        settings = {"kernels": "triton", "max_model_len": 192, "check": "never", "max_num_seqs": count}
        llm = LLM(folder("llama"), device="cpu", dtype="float32", proposer="none", **settings)
        llm.parts.target._record = frozen
        llm.parts.target._reset()
        for _ in range(count):
            llm.submit([1, 2, 3], SamplingParams(max_tokens=100, ignore_eos=True))
        for _ in range(4):
            llm.engine.step()
        profile = Profile()
        profile.runcall(llm.engine.step)
        calls.append(sum(entry.callcount for entry in profile.getstats()))
    assert (calls[1] - calls[0]) / 8 < 75


def test_warm_compiles_all_kernels_before_it_records(folder, monkeypatch):
    events = []

    @contextmanager
    def only_compiled():
        events.append("compile")
        yield
        events.append("compiled")

    def record(run):
        events.append("record")
        return run

    target, _ = load(folder("llama"), record=record)
    monkeypatch.setattr(recordings, "only_compiled", only_compiled)
    monkeypatch.setattr(target.graphs, "_make", lambda buffers: lambda: events.append(buffers.bucket.columns))
    target.graphs.warm(rows=1, length=0, columns=(1, 5))
    assert events == ["compile", 1, 5, 512, "compiled", *["record"] * 3]


def test_ids_beyond_the_embedding_are_clamped(folder):
    target, _ = load(folder("llama"))
    last, *others = (score_all(target, [tiny.admit(target, 0, [3, 4, token])]) for token in (255, 256, 2**40))
    assert all(torch.equal(last, other) for other in others)


def test_weight_update_equals_loading_the_other_checkpoint(folder, tmp_path):
    kind, settings = CONFIGS["llama"]
    other, checkpoint = load(tiny.save(tmp_path / "b", make_config(kind, **SIZES | settings), seed=1))
    target, _ = load(folder("llama"), record=FakeRecorder())
    copy = target.make_requantized(8)
    for _ in range(3):
        score_all(target, [tiny.admit(target, 0, PROMPTS[1])])
    target.update_weights(checkpoint.model.state_dict(), 1)
    for model, expected in ((target, other), (copy, other.make_requantized(8))):
        ours, theirs = (score_all(each, [tiny.admit(each, 0, PROMPTS[1])]) for each in (model, expected))
        torch.testing.assert_close(ours, theirs)
    with pytest.raises(OutriderError, match="its self-drafts follow"):
        copy.update_weights({}, 2)


def test_sleeping_frees_the_memory_and_new_weights_wake_it(folder):
    target, checkpoint = load(folder("qwen3"))
    expected = score_all(target, [tiny.admit(target, 0, PROMPTS[1])])
    names, stored = target.weight_names(), {name: each.clone() for name, each in target.stored_weights().items()}
    state = {name: value.clone() for name, value in checkpoint.model.state_dict().items() if name in names}
    target.cache.release(0)
    target.sleep(weights=True)
    assert all(not tensor.untyped_storage().size() for tensor in target.stored_weights().values())
    assert target.cache.usage().blocks == 0
    target.wake()
    target.update_weights(state, 1)
    assert all(torch.equal(stored[name], tensor) for name, tensor in target.stored_weights().items())
    assert torch.equal(score_all(target, [tiny.admit(target, 0, PROMPTS[1])]), expected)


def test_sleep_drops_the_recorded_passes_of_a_draft_with_the_same_cache(folder):
    target, checkpoint = load(folder("qwen3"))
    draft = target.make_submodel([0])
    draft.graphs.record = FakeRecorder()
    for recorded in (1, 2):
        score_all(draft, [tiny.admit(draft, 0, PROMPTS[1])])
        assert draft.graphs.record.recorded == recorded
        target.cache.release(0)
        state = {name: value.clone() for name, value in checkpoint.model.state_dict().items()}
        target.sleep(weights=True)
        target.wake()
        target.update_weights({name: state[name] for name in target.weight_names()}, recorded)


def test_cache_of_fewer_blocks_than_the_sequences_need(folder):
    path = folder("llama")
    plain = generate(path, proposer="none")
    assert generate(path, proposer="ngram", cache_gb=0.0002) == plain  # sequences wait for one another
    with pytest.raises(OutriderError, match="needs"):
        generate(path, proposer="none", cache_gb=0.00001)


def test_unsupported_models_name_another_way(tmp_path):
    small = tiny.save(tmp_path / "window", make_config("MistralConfig", **SIZES, sliding_window=8))
    with pytest.raises(UnsupportedModel, match="windows of at least 64 tokens; use kernels auto"):
        make_target(load_checkpoint(small, device="cpu", kernels="triton"), slots=1, context=64, kernels="triton")


def test_kernels_need_a_gpu(folder, monkeypatch):
    monkeypatch.setattr("triton.knobs.runtime.interpret", False)
    with pytest.raises(UnsupportedModel, match="need an NVIDIA GPU, and the device is cpu; use kernels auto"):
        LLM(folder("llama"), device="cpu", kernels="triton")
