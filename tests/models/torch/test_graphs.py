"""Recorded passes equal the eager pass, write to no other cache entry, and never synchronize with the host."""

import random
import sys
from dataclasses import replace

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from transformers import AutoModelForCausalLM

from outrider.core import devices, tree
from outrider.core.params import SamplingParams
from outrider.core.proposer import NoProposer
from outrider.core.target import draft_by_scores
from outrider.core.types import Batch, DraftBudget, Request
from outrider.drafting.propose.draft_model.chain import DraftModelProposer
from outrider.errors import UnsupportedModel
from outrider.models.loader.load import load_checkpoint
from outrider.models.torch import cuda_graphs, graph_buckets
from outrider.models.torch.attention import NAME
from outrider.models.torch.attention_target import AttentionTarget
from outrider.models.torch.graph_check import Comparison
from outrider.models.torch.recurrent_target import RecurrentTarget
from outrider.models.torch.static_pass import Bucket, SpareCache, StaticModel, StaticPass
from outrider.testing.drive import append, make_round, random_tree
from tests.helpers import engines, tiny
from tests.helpers.recorder import FakeRecorder

CPU = torch.device("cpu")
CONTEXT = 96
NAMES = ["llama", "qwen2", "gemma2", "gemma3n_text", "gpt2", "mixtral", "gpt_oss", "deepseek_v3"]
NAMES.append("llama4_text without temperature")
RECURRENT = ["lfm2", "mamba2", "qwen3_next", "minimax", "zaya", "nemotron_h"]
TEXT = list(b"the quick brown fox")


@pytest.fixture(autouse=True)
def short_buckets(monkeypatch):
    monkeypatch.setattr(graph_buckets, "MIN_LENGTH", 16)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    return tiny.Shelf(tmp_path_factory.mktemp("graphs"))


def load_target(folder, *, record=None, layers=(), device="cpu", dtype="float32", slots=4):
    checkpoint = load_checkpoint(folder, dtype=dtype, device=device)
    kind = RecurrentTarget if checkpoint.recurrent else AttentionTarget
    target = kind(checkpoint, slots=slots, context=CONTEXT, record=record)
    target.export_hidden_states(layers)
    return target


def load_pair(folder, **kwargs):
    """Return a target with recorded passes and an eager one."""
    return load_target(folder, record=FakeRecorder(), **kwargs), load_target(folder, **kwargs)


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-5)


def replay_count(target):
    return target.graphs.recorder.count


def admit_and_record(target, texts):
    """Admit sequences, and score them until the pass is recorded and has passed its comparison."""
    seqs = [tiny.admit(target, slot, text) for slot, text in enumerate(texts)]
    for _ in range(4):
        batch = tiny.everything(seqs)
        target.score(batch, tree.empty(len(seqs), CPU))
    return seqs


def result_of_replay(target, score):
    """Call `score` until it is replayed. Return the result of the replay."""
    for _ in range(3):
        before = replay_count(target)
        out = score()
    assert replay_count(target) == before + 1
    return out


def test_recorded_passes_export_the_current_layers(shelf):
    target = load_target(shelf.folder("llama"), record=FakeRecorder(), layers=(0,))
    (seq,) = admit_and_record(target, [TEXT])
    for layers in ((1, 2), ()):
        target.export_hidden_states(layers)
        scores = result_of_replay(target, lambda: target.score(tiny.everything([seq]), tree.empty(1, CPU)))
        assert set(scores.hidden_states) == set(scores.feed_hidden_states) == set(layers)


@pytest.mark.fast_cases("llama", "qwen2", "gpt_oss", "deepseek_v3", "lfm2", "qwen3_next")
@pytest.mark.parametrize("name", [*NAMES, *RECURRENT])
def test_replayed_rounds_equal_eager_rounds(name, shelf):
    """Logits and the cache after them are equal, for sequences of different lengths, chains and trees."""
    recorded, eager = load_pair(shelf.folder(name))
    recorded_rng = random.Random(1)
    eager_rng = random.Random(1)
    texts = [TEXT[: 4 + 3 * slot] for slot in range(3)]
    with torch.inference_mode():
        recorded_seqs = [tiny.admit(recorded, slot, text) for slot, text in enumerate(texts)]
        eager_seqs = [tiny.admit(eager, slot, text) for slot, text in enumerate(texts)]
        for i in range(10):
            width = [i % 4, 3, 5 - i % 3]
            draft = random_tree(width, tiny.VOCAB, random.Random(i))
            if i % 2:
                draft = tree.chain(draft.tokens, draft.width)
            scores = recorded.score(tiny.everything(recorded_seqs), draft)
            expected = eager.score(tiny.everything(eager_seqs), draft)
            assert_close(scores.logits, expected.logits)
            if scores.best is not None:
                assert torch.equal(scores.best, scores.logits.argmax(-1))
            tiny.grow(recorded, recorded_seqs, recorded_rng)
            tiny.grow(eager, eager_seqs, eager_rng)
    assert recorded.kernels == "graphs"
    assert replay_count(recorded) > 3


@pytest.mark.parametrize("first", [-1, 0, 2])
def test_score_from_node_first_on(first, shelf):
    recorded, eager = load_pair(shelf.folder("llama"))
    draft = tree.chain(torch.randint(tiny.VOCAB, (2, 4)), (4, 3))
    with torch.inference_mode():
        out = []
        for target in (recorded, eager):
            seqs = [tiny.admit(target, slot, TEXT[: 5 + slot]) for slot in (0, 1)]
            batch = tiny.everything(seqs)
            before = tree.chain(draft.tokens[:, : max(first, 0)], tuple(min(w, max(first, 0)) for w in draft.width))
            target.score(batch, before)
            score = lambda target=target, batch=batch: target.score(batch, draft, first)  # noqa: E731
            out.append(result_of_replay(target, score) if target.graphs else score())
    for b, width in enumerate(draft.width):
        count = 1 + width - max(first + 1, 0)
        assert_close(out[0].logits[b, :count], out[1].logits[b, :count])
    assert out[0].logits.shape == out[1].logits.shape


def test_exported_layers_equal_eager_pass(shelf):
    recorded, eager = load_pair(shelf.folder("qwen3"), layers=(1, 3))
    draft = random_tree([4, 2], tiny.VOCAB, random.Random(0))
    with torch.inference_mode():
        recorded_batch = tiny.everything([tiny.admit(recorded, slot, TEXT[:6]) for slot in (0, 1)])
        eager_batch = tiny.everything([tiny.admit(eager, slot, TEXT[:6]) for slot in (0, 1)])
        eager.score(eager_batch, draft)
        recorded.score(recorded_batch, draft)
        scores = result_of_replay(recorded, lambda: recorded.score(recorded_batch, draft))
        expected = eager.score(eager_batch, draft)
    assert scores.hidden_states.keys() == {1, 3}
    for layer, states in scores.hidden_states.items():
        assert_close(states, expected.hidden_states[layer])
        feeds = zip(scores.feed_hidden_states[layer], expected.feed_hidden_states[layer], strict=True)
        for feed_states, expected_states in feeds:
            assert_close(feed_states, expected_states)


def test_replay_writes_only_the_entries_of_its_tokens(shelf):
    """Slots that are not in the batch, and entries before and after the tokens of the pass, do not change."""
    target = load_target(shelf.folder("llama"), record=FakeRecorder())
    with torch.inference_mode():
        seqs = [tiny.admit(target, slot, TEXT[: 9 + slot]) for slot in range(4)]
        batch = tiny.everything(seqs)
        target.cache.commit(tree.prefill_round(batch, tree.empty(4, CPU), target.score(batch, tree.empty(4, CPU))))
        running = [seqs[3], seqs[1]]  # not in the order of their slots
        for seq in running:
            seq.num_cached_tokens = len(seq.token_ids)
            seq.token_ids += [1, 2]
        batch = tiny.everything(running)
        draft = tree.chain(torch.tensor([[5, 6, 7], [8, 9, 9]]), (3, 2))
        eager = load_target(shelf.folder("llama"))
        eager_seqs = [tiny.admit(eager, seq.slot, seq.token_ids) for seq in running]
        expected = eager.score(tiny.everything(eager_seqs), draft).logits
        before = [target.cache.of(layer)[0].clone() for layer in range(tiny.LAYERS)]
        scores = result_of_replay(target, lambda: target.score(batch, draft))
    for b, width in enumerate(draft.width):
        assert_close(scores.logits[b, : 1 + width], expected[b, : 1 + width])
    for layer, old_keys in enumerate(before):
        changed = (target.cache.of(layer)[0] != old_keys).any(-1).any(1)[:, : target.cache.spare]  # [slots, entries]
        for slot in range(4):
            start = 9 + slot if slot in (1, 3) else 0
            count = {3: 2 + 3, 1: 2 + 2}.get(slot, 0)
            assert changed[slot].nonzero().flatten().tolist() == list(range(start, start + count))


@pytest.mark.fast_cases("lfm2", "mamba2")
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_drafts_commit_after_recorded_passes(name, shelf):
    """Drafts in one call, and trees whose last nodes an eager pass adds to a recorded pass."""
    recorded, eager = load_pair(shelf.folder(name))
    outs = []
    with torch.inference_mode():
        for target in (recorded, eager):
            outs.append([])
            seqs = [tiny.admit(target, slot, text) for slot, text in enumerate([TEXT[:7], TEXT[:9], TEXT[:3]])]
            for i in range(10):
                batch = replace(tiny.everything(seqs), budget=DraftBudget((2, 4, 3)))
                if i % 2:
                    outs[-1].append(target.draft_greedy(batch, 200).tokens)
                    draft = tree.chain(outs[0][i][:, :3], (1, 3, 2))
                else:
                    draft = random_tree([3, 5, 4], tiny.VOCAB, random.Random(i))
                    target.score(batch, tree.cut(draft, (2, 2, 2)))
                    outs[-1].append(target.score(batch, draft, 2).logits)
                paths = [tuple(tiny.branch(draft, b, width - 1)) for b, width in enumerate(draft.width)]
                emitted = [(*draft.tokens[b, list(path)].tolist(), 5 + i) for b, path in enumerate(paths)]
                done = make_round(batch, draft, None, paths, emitted)
                target.cache.commit(done)
                append(done)
    for i, (one, other) in enumerate(zip(*outs, strict=True)):
        for b, count in enumerate((2, 4, 3) if i % 2 else (1, 3, 2)):
            assert_close(one[b, :count], other[b, :count])
    assert replay_count(recorded) > 8


@pytest.mark.parametrize("budget", [(4, 4, 4), (1, 4, 3)])
def test_recorded_draft_equals_step_by_step_scoring(budget, shelf):
    recorded, eager = load_pair(shelf.folder("mistral"))
    texts = [TEXT[:7], TEXT[:8], TEXT[:3]]
    with torch.inference_mode():
        drafted = []
        for target in (recorded, eager):
            seqs = [tiny.admit(target, slot, text) for slot, text in enumerate(texts)]
            batch = tiny.everything(seqs)
            target.cache.commit(tree.prefill_round(batch, tree.empty(3, CPU), target.score(batch, tree.empty(3, CPU))))
            for seq, new_tokens in zip(seqs, ([1], [2, 3], [4]), strict=True):
                seq.num_cached_tokens = len(seq.token_ids)
                seq.token_ids = seq.token_ids + new_tokens
            starts = tuple(seq.num_cached_tokens for seq in seqs)
            feeds = tuple(tuple(seq.token_ids[seq.num_cached_tokens :]) for seq in seqs)
            batch = Batch(seqs=tuple(seqs), start=starts, feed=feeds, budget=DraftBudget(budget))
            if target.graphs:
                draft = lambda target=target, batch=batch: target.draft_greedy(batch, 200).tokens  # noqa: E731
                drafted.append(result_of_replay(target, draft))
            else:
                drafted.append(draft_by_scores(target, batch, 200).tokens)
    for b, count in enumerate(budget):
        assert drafted[0][b, :count].tolist() == drafted[1][b, :count].tolist()
    assert int(drafted[0].max()) < 200
    assert Bucket(rows=4, columns=2, length=16, steps=4, vocab=200) in recorded.graphs.buckets()


def test_recorded_draft_stops_at_the_end_of_a_slot(shelf):
    """A sequence with a full slot takes part in the steps of other sequences, but writes nothing."""
    target = load_target(shelf.folder("llama"), record=FakeRecorder())
    with torch.inference_mode():
        seqs = [tiny.admit(target, 0, [3] * (CONTEXT - 2)), tiny.admit(target, 1, [4] * 5)]
        batch = tiny.everything(seqs)
        target.cache.commit(tree.prefill_round(batch, tree.empty(2, CPU), target.score(batch, tree.empty(2, CPU))))
        batch = Batch(seqs=tuple(seqs), start=(CONTEXT - 2, 5), feed=((1,), (2,)), budget=DraftBudget((1, 6)))
        drafted = result_of_replay(target, lambda: target.draft_greedy(batch, tiny.VOCAB).tokens)
        expected = draft_by_scores(load_eager_with_prefill(shelf, batch), batch, tiny.VOCAB).tokens
    assert drafted[0, 0] == expected[0, 0]
    assert drafted[1].tolist() == expected[1].tolist()


def load_eager_with_prefill(shelf, batch):
    """Return an eager target that has prefilled the cached tokens of a batch."""
    target = load_target(shelf.folder("llama"))
    seqs = [tiny.admit(target, seq.slot, seq.token_ids[: batch.start[b]]) for b, seq in enumerate(batch.seqs)]
    target.score(tiny.everything(seqs), tree.empty(len(seqs), CPU))
    return target


def test_non_finite_logits_affect_only_their_sequence(shelf, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(shelf.folder("mixtral"))
    model.get_input_embeddings().weight.data[77] = torch.nan
    recorded, eager = load_pair(tiny.save_model(tmp_path / "nan", model))
    texts = [[77, *TEXT[:9]], TEXT[:9], TEXT[4:9]]
    with torch.inference_mode():
        recorded_seqs = [tiny.admit(recorded, slot, text) for slot, text in enumerate(texts)]
        eager_seqs = [tiny.admit(eager, slot, text) for slot, text in enumerate(texts)]
        draft = tree.chain(torch.tensor([[1, 2], [77, 3], [5, 6]]), (2, 2, 2))
        expected = eager.score(tiny.everything(eager_seqs), draft).logits
        recorded.score(tiny.everything(recorded_seqs), draft)
        scores = result_of_replay(recorded, lambda: recorded.score(tiny.everything(recorded_seqs), draft))
        torch.testing.assert_close(scores.logits, expected, atol=3e-5, rtol=1e-5, equal_nan=True)
        # If a draft token is NaN, all nodes of its sequence are. The engine then repeats the pass without a draft.
        assert scores.best[:2].tolist() == [[-1] * 3] * 2
        assert scores.best[2].min() >= 0
        # The next sequence of the slot is shorter. The NaN entries behind it must have no effect.
        shorter = tiny.admit(recorded, 0, TEXT[:4])
        scores = result_of_replay(recorded, lambda: recorded.score(tiny.everything([shorter]), tree.empty(1, CPU)))
    assert scores.logits.isfinite().all()


def run_engine(target, draft, params, prompts):
    """Return the outputs of an engine with a draft model, or without a draft if `draft` is None."""
    make = (lambda setup: DraftModelProposer(setup, draft)) if draft else NoProposer
    engine = engines.make_engine(target, make, verifier="walk", rows=4, chunk=30)
    return engines.outputs(engines.run(engine, prompts, params, limit=24))


@pytest.mark.fast_cases("1.0")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_engine_output_equals_eager_engine(temperature, shelf):
    """Prompts have many lengths. The passes of target and draft model are both recorded."""
    prompts = [[1 + i, *TEXT[: 3 + 7 * i], *TEXT[:i]] for i in range(7)]
    params = SamplingParams(temperature=temperature, top_p=0.95, seed=3)
    plain = run_engine(load_target(shelf.folder("llama")), None, params, prompts)
    target, draft = (load_target(shelf.folder(name), record=FakeRecorder()) for name in ("llama", "qwen3"))
    assert run_engine(target, draft, params, prompts) == plain
    assert replay_count(target) > 10
    assert replay_count(draft) > 10
    assert target.graph_bytes() > 1000
    assert any(bucket.steps for bucket in draft.graphs.buckets())


def test_wrong_recording_is_disabled(shelf):
    class WrongRecorder(FakeRecorder):
        def __call__(self, run):
            replay = super().__call__(run)
            return lambda: tree_map_only(torch.Tensor, lambda out: out + 1, replay())

    params = SamplingParams()
    prompts = [TEXT, TEXT[:4]]
    plain = run_engine(load_target(shelf.folder("llama")), None, params, prompts)
    target = load_target(shelf.folder("llama"), record=WrongRecorder())
    assert run_engine(target, None, params, prompts) == plain
    assert not target.graphs.enabled
    assert target.graphs.buckets() == ()


@pytest.mark.parametrize(
    ("error", "attempts"), [(RuntimeError("not while capturing"), 2), (UnsupportedModel("odd layers"), 1)]
)
def test_recording_ends_if_no_shape_can_be_recorded(error, attempts, shelf, monkeypatch):
    monkeypatch.setattr(cuda_graphs, "MAX_FAILURES", 2)

    class FailingRecorder(FakeRecorder):
        def __call__(self, run):
            self.recorded += 1
            raise error

    record = FailingRecorder()
    params = SamplingParams()
    prompts = [TEXT, TEXT[:4]]
    plain = run_engine(load_target(shelf.folder("llama")), None, params, prompts)
    assert run_engine(load_target(shelf.folder("llama"), record=record), None, params, prompts) == plain
    assert record.recorded == attempts


def test_warm_records_all_lengths_and_does_not_change_the_cache(shelf):
    target = load_target(shelf.folder("llama"), record=FakeRecorder())
    assert target.graphs.warm(rows=3, length=40, columns=(1,), compiled=False) == 0  # the cache is not allocated
    with torch.inference_mode():
        seq = tiny.admit(target, 0, TEXT[:12])
        target.score(tiny.everything([seq]), tree.empty(1, CPU))
        before = target.cache.of(0)[0][..., :CONTEXT, :].clone()
        seconds = target.graphs.warm(rows=3, length=40, columns=(1, 5), steps=(3,), vocab=9, compiled=False)
        assert torch.equal(target.cache.of(0)[0][..., :CONTEXT, :], before)
    assert 0 < seconds == target.graphs.seconds
    shapes = {(b.rows, b.columns, b.length, b.steps, b.vocab) for b in target.graphs.buckets()}
    expected = set()
    for length in (16, 32, 48):
        expected |= {(4, 1, length, 0, 0), (4, 8, length, 0, 0), (4, 2, length, 3, 9)}
    assert shapes == expected


def test_bucket_length_exceeds_length_by_at_most_a_quarter(monkeypatch):
    monkeypatch.setattr(graph_buckets, "MIN_LENGTH", 128)
    for length in range(1, 9000, 7):
        rounded = graph_buckets.round_up(length, 8192)
        assert rounded >= min(length, 8192)
        assert rounded <= max(128 * -(-length // 128), 1.25 * length)
        assert rounded in graph_buckets.lengths(length, 8192)


def test_pass_without_a_bucket_runs_eagerly(shelf):
    target = load_target(shelf.folder("llama"), record=FakeRecorder())
    with torch.inference_mode():
        seq = tiny.admit(target, 0, TEXT * 4)  # more tokens than the largest bucket
        for _ in range(4):
            target.score(tiny.everything([seq]), tree.empty(1, CPU))
    assert replay_count(target) == 0


class HostSync(AssertionError):
    """An operator in a pass synchronizes with the host."""


class ForbidHostSync(TorchDispatchMode):
    """Fails at operators that synchronize with the host or copy from it. CUDA graphs cannot contain them."""

    BANNED = ("_local_scalar_dense", "nonzero", "masked_select", "lift_fresh", "is_nonzero", "equal.default", "unique")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(name in str(func) for name in self.BANNED):
            raise HostSync(f"{func} inside a pass")
        return func(*args, **(kwargs or {}))


@pytest.mark.fast_cases(
    *("chain-llama", "chain-gemma3_text", "chain-qwen3", "tree-gemma2", "tree-gpt2", "draft-qwen2", "draft-gpt_oss"),
    *("chain-qwen3_5_text", "tree-mamba2", "draft-lfm2"),
)
@pytest.mark.parametrize(
    "name", ["llama", "qwen2", "gemma2", "gemma3_text", "gpt_oss", "gpt2", "qwen3", "qwen3_5_text", *RECURRENT]
)
@pytest.mark.parametrize("kind", ["chain", "tree", "draft"])
def test_static_pass_never_synchronizes_with_the_host(name, kind, shelf):
    """CUDA graphs require this. `mixtral` is left out, because it loops over its experts."""
    target = load_target(shelf.folder(name), record=FakeRecorder())
    with torch.inference_mode():
        seq = tiny.admit(target, 0, TEXT[:12])
        target.score(tiny.everything([seq]), tree.empty(1, CPU))
        bucket = Bucket(rows=2, columns=4, length=16, trees=kind == "tree", steps=3 if kind == "draft" else 0)
        buffers = StaticPass(target.graphs.model, bucket)
        with ForbidHostSync():
            (buffers.draft_greedy if kind == "draft" else buffers.score)()


@pytest.mark.fast_cases("chain-llama", "chain-mixtral", "tree-gemma2", "draft-qwen3")
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "mixtral"])
@pytest.mark.parametrize("kind", ["chain", "tree", "draft"])
def test_static_pass_runs_on_the_meta_device(name, kind):
    """The pass reads no values of tensors and uses no tensors of another device."""
    config = tiny.ARCHITECTURES[name]()
    with torch.inference_mode(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=NAME).eval().bfloat16()
        cache = SpareCache(slots=4, capacity=64, device=torch.device("meta"))
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        for layer in range(tiny.LAYERS):
            entries = torch.zeros(4, config.num_key_value_heads, 65, dim, dtype=torch.bfloat16)
            cache._keys[layer] = entries
            cache._values[layer] = entries
    bucket = Bucket(rows=2, columns=4, length=16, trees=kind == "tree", steps=3 if kind == "draft" else 0)
    with torch.inference_mode():
        buffers = StaticPass(StaticModel(model, list(model.model.layers), cache, {}), bucket)
        out = (buffers.draft_greedy() if bucket.steps else buffers.score())[0]
    assert out.device.type == "meta"
    assert out.shape == ((2, 3) if bucket.steps else (2, 4, tiny.VOCAB))


class _HostSyncs(TorchFunctionMode):
    """Records reads of tensor values by the host, and copies to the device that do not use `upload`."""

    def __init__(self):
        super().__init__()
        self.reads: list[str] = []
        self.copies: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in ("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "nonzero"):
            self.reads.append(name)
        if func is torch.tensor:
            caller = sys._getframe(1).f_code.co_name
            if caller != "upload":
                self.copies.append(caller)
        return func(*args, **(kwargs or {}))


@pytest.mark.fast_cases("1.0")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_round_reads_from_the_device_once(temperature, shelf, monkeypatch):
    monkeypatch.setattr(devices, "is_cpu", lambda device: False)
    target, draft = (load_target(shelf.folder(name), record=FakeRecorder()) for name in ("llama", "qwen3"))
    engine = engines.make_engine(target, lambda setup: DraftModelProposer(setup, draft), verifier="block", rows=2)
    params = SamplingParams(temperature=temperature, max_tokens=30)
    for i in range(2):
        request = Request(
            id=i, prompt_token_ids=tuple(TEXT[: 8 + i]), params=params, seed=i, end_ids=frozenset(), max_tokens=30
        )
        engine.add(request)
    # The comparison with the eager pass reads from the device.
    monkeypatch.setattr(cuda_graphs, "compare", lambda model, buffers, scored, scores, eager: Comparison(scores, True))
    counts = []
    while engine.busy():
        with _HostSyncs() as syncs:
            engine.step()
        counts.append((len(syncs.reads), len(syncs.copies)))
    assert len(counts) > 8
    assert counts[4:-4] == [(1, 0)] * len(counts[4:-4])


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore")  # warnings of the compiler
def test_compiled_layers_equal_eager_layers(shelf):
    """All layers, lengths and shapes share few compilations: sizes of 1 are compiled apart."""
    from torch._dynamo.utils import counters

    counters.clear()
    recorded, eager = load_pair(shelf.folder("llama"))
    texts = [TEXT[:7], TEXT[:10]]
    with torch.inference_mode():
        recorded_seqs = [tiny.admit(recorded, slot, text) for slot, text in enumerate(texts)]
        eager_seqs = [tiny.admit(eager, slot, text) for slot, text in enumerate(texts)]
        for target, seqs in ((recorded, recorded_seqs), (eager, eager_seqs)):
            target.score(tiny.everything(seqs), tree.empty(2, CPU))

        def record_compiled(run):
            run()

            def replay():
                recorded.graphs.model.compiled = True
                try:
                    return run()
                finally:
                    recorded.graphs.model.compiled = False

            return replay

        recorded.graphs.recorder = record_compiled
        recorded.graphs.warm(rows=2, length=64, columns=(5,))
        assert recorded.graphs.compiled
        assert counters["stats"]["unique_graphs"] == 1
        recorded.graphs.warm(rows=2, length=64, columns=(1, 2, 16), steps=(3,))
        recorded.graphs.warm(rows=1, length=64, columns=(1, 2, 8), steps=(2,))
        assert counters["stats"]["unique_graphs"] <= 4
        recorded_rng = random.Random(0)
        eager_rng = random.Random(0)
        for i in range(6):
            draft = tree.chain(torch.randint(tiny.VOCAB, (2, 5)), (5, 4))
            scores = recorded.score(tiny.everything(recorded_seqs), draft)
            expected = eager.score(tiny.everything(eager_seqs), draft)
            assert_close(scores.logits[0], expected.logits[0])
            assert (scores.best is not None) == (i > 2)
            tiny.grow(recorded, recorded_seqs, recorded_rng)
            tiny.grow(eager, eager_seqs, eager_rng)


def test_larger_recording_covers_a_bucket_until_it_is_used_often(shelf):
    recorded, eager = load_pair(shelf.folder("llama"))
    with torch.inference_mode():
        texts = [TEXT[:4], TEXT[:6], TEXT[:5]]
        seqs = [[tiny.admit(target, slot, text) for slot, text in enumerate(texts)] for target in (recorded, eager)]
        for _ in range(3):  # records the passes of four rows
            scores, expected = (
                target.score(tiny.everything(rows), tree.empty(3, CPU))
                for target, rows in zip((recorded, eager), seqs, strict=True)
            )
        before = recorded.graphs.buckets()
        assert {bucket.rows for bucket in before} == {4}
        for _ in range(cuda_graphs.COVERED_USES_UNTIL_RECORDED - 1):
            scores, expected = (
                target.score(tiny.everything(rows[:1]), tree.empty(1, CPU))
                for target, rows in zip((recorded, eager), seqs, strict=True)
            )
            assert_close(scores.logits, expected.logits)
            assert recorded.graphs.buckets() == before
        recorded.score(tiny.everything(seqs[0][:1]), tree.empty(1, CPU))
    assert {bucket.rows for bucket in recorded.graphs.buckets()} == {1, 4}


@pytest.mark.fast_cases("llama-1", "mistral-2")
@pytest.mark.parametrize("num_seqs", [1, 2])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_kernel_for_shared_keys_gives_the_same_logits(name, num_seqs, shelf, monkeypatch):
    """One query for each sequence, or the tokens of one sequence."""
    calls = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def counted(*args, **kwargs):
        calls.append(kwargs.get("enable_gqa", False))
        return attention(*args, **kwargs)

    monkeypatch.setattr("outrider.models.torch.static_pass.has_grouped_kernel", lambda keys, sharing: True)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    recorded, eager = load_pair(shelf.folder(name))
    rng = random.Random(0)
    with torch.inference_mode():
        seqs = [[tiny.admit(target, b, TEXT[: 4 + b]) for b in range(num_seqs)] for target in (recorded, eager)]
        for round in range(12):
            widths = [rng.randint(1, 4)] * num_seqs if round % 3 else [0] * num_seqs
            draft = random_tree(widths, tiny.VOCAB, rng) if round % 3 else tree.empty(num_seqs, CPU)
            scores, expected = (
                target.score(tiny.everything(rows), draft) for target, rows in zip((recorded, eager), seqs, strict=True)
            )
            assert_close(scores.logits, expected.logits)
            drafts = [
                target.draft_greedy(tiny.everything(rows), tiny.VOCAB).tokens[:, :5].tolist()
                for target, rows in zip((recorded, eager), seqs, strict=True)
            ]
            assert drafts[0] == drafts[1]
            for target, rows in zip((recorded, eager), seqs, strict=True):
                tiny.grow(target, rows, random.Random(round))
    assert recorded.graphs.enabled
    assert any(calls)


def test_warm_can_leave_out_covered_buckets(shelf):
    target = load_target(shelf.folder("llama"), record=FakeRecorder())
    with torch.inference_mode():
        target.score(tiny.everything([tiny.admit(target, 0, TEXT[:12])]), tree.empty(1, CPU))
        target.graphs.warm(rows=3, length=40, columns=(1, 5), steps=(3, 2), compiled=False, exact=False)
    shapes = {(bucket.rows, bucket.columns, bucket.length, bucket.steps) for bucket in target.graphs.buckets()}
    assert shapes == {(4, 8, 48, 0), (4, 2, 48, 3), (4, 2, 48, 2)}


@pytest.mark.filterwarnings("ignore")  # warnings of the compiler
def test_warm_records_again_what_was_not_compiled(shelf, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    target = load_target(shelf.folder("llama"), record=FakeRecorder())
    with torch.inference_mode():
        seq = tiny.admit(target, 0, TEXT[:12])
        for _ in range(3):
            target.score(tiny.everything([seq]), tree.empty(1, CPU))
        before = set(target.graphs.buckets())
        target.graphs.warm(rows=1, length=12, columns=(2,), exact=False)
    assert before
    assert before.isdisjoint(target.graphs.buckets())
    assert target.graphs.compiled
