"""Passes of fixed shapes say what the eager pass says, touch nothing else, and never ask the host."""

from __future__ import annotations

import random
import sys

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten as flatten
from torch.utils._pytree import tree_map_only, tree_unflatten
from transformers import AutoModelForCausalLM

from outrider.core import tree
from outrider.core.params import SamplingParams
from outrider.core.types import Batch, Request
from outrider.errors import UnsupportedModel
from outrider.loader.checkpoint import load_checkpoint
from outrider.models import cuda_graphs
from outrider.models.attention import NAME
from outrider.models.attention_target import AttentionTarget
from outrider.models.base import draft_by_scores
from outrider.models.cuda_graphs import CudaRecorder
from outrider.models.static_pass import Bucket, SpareCache, StaticModel, StaticPass
from outrider.propose.base import NoProposer
from outrider.propose.draft_model.chain import DraftModelProposer
from outrider.testing.drive import random_tree
from tests.helpers import engines, tiny

CPU = torch.device("cpu")
CONTEXT = 96
NAMES = ["llama", "qwen2", "gemma2", "gemma3n_text", "gpt2", "mixtral", "gpt_oss", "deepseek_v3", "llama4_text"]
TEXT = list(b"the quick brown fox")


class Replays:
    """A stand-in for CUDA graphs: runs again, and leaves what comes out where the first run left it."""

    def __init__(self):
        self.count, self.recorded = 0, 0

    def __call__(self, run):
        self.recorded += 1
        out, shape = flatten(tree_map_only(torch.Tensor, torch.clone, run()))

        def replay():
            self.count += 1
            for old, new in zip(out, flatten(run())[0], strict=True):
                old.copy_(new)
            return tree_unflatten(out, shape)

        return replay

    def bytes(self):
        return 1000


@pytest.fixture(autouse=True)
def short_buckets(monkeypatch):
    monkeypatch.setattr(cuda_graphs, "_LENGTH", 16)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    return tiny.Shelf(tmp_path_factory.mktemp("graphs"))


def read(folder, *, record=None, layers=(), device="cpu", dtype="float32", slots=4):
    checkpoint = load_checkpoint(folder, dtype=dtype, device=device)
    target = AttentionTarget(checkpoint, slots=slots, context=CONTEXT, record=record)
    target.export_hidden_states(layers)
    return target


def pair(folder, **kwargs):
    """A target that replays, and one that does not."""
    return read(folder, record=Replays(), **kwargs), read(folder, **kwargs)


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=3e-5, rtol=1e-5)


def replays(target):
    return target.graphs._record.count


def warmed(target, texts):
    """Rows whose texts are cached but for the last token, and a target that has recorded all that they may need."""
    rows = [tiny.admit(target, slot, text) for slot, text in enumerate(texts)]
    for _ in range(4):  # the last of them past the meeting that records, and past the trial
        batch = tiny.everything(rows)
        target.score(batch, tree.empty(len(rows), CPU))
    return rows


def seen_often(target, score):
    """What `score` returns once it is replayed."""
    for _ in range(3):
        before = replays(target)
        out = score()
    assert replays(target) == before + 1
    return out


def test_recordings_export_the_layers_of_now(shelf):
    target = read(shelf.folder("llama"), record=Replays(), layers=(0,))
    (row,) = warmed(target, [TEXT])
    for layers in ((1, 2), ()):
        target.export_hidden_states(layers)
        found = seen_often(target, lambda: target.score(tiny.everything([row]), tree.empty(1, CPU)))
        assert set(found.hidden_states) == set(found.feed_hidden_states) == set(layers)


@pytest.mark.parametrize("name", NAMES)
def test_replayed_rounds_are_eager_rounds(name, shelf):
    """Ragged rows, chains and trees, over growing texts: the same logits, and the same cache after it."""
    ours, theirs = pair(shelf.folder(name))
    ours_chance, theirs_chance = random.Random(1), random.Random(1)
    texts = [TEXT[: 4 + 3 * slot] for slot in range(3)]
    with torch.inference_mode():
        ours_rows, theirs_rows = ([tiny.admit(each, s, t) for s, t in enumerate(texts)] for each in (ours, theirs))
        for turn in range(10):
            batches = tiny.everything(ours_rows), tiny.everything(theirs_rows)
            width = [turn % 4, 3, 5 - turn % 3]
            draft = random_tree(width, tiny.VOCAB, random.Random(turn))
            if turn % 2:
                draft = tree.chain(draft.tokens, draft.width)
            got, wanted = ours.score(batches[0], draft), theirs.score(batches[1], draft)
            close(got.logits, wanted.logits)
            if got.best is not None:
                assert torch.equal(got.best, got.logits.argmax(-1))
            tiny.grow(ours, ours_rows, ours_chance)
            tiny.grow(theirs, theirs_rows, theirs_chance)
    assert ours.kernels == "graphs"
    assert replays(ours) > 3


@pytest.mark.parametrize("first", [-1, 0, 2])
def test_nodes_from_the_first_on(first, shelf):
    ours, theirs = pair(shelf.folder("llama"))
    draft = tree.chain(torch.randint(tiny.VOCAB, (2, 4)), (4, 3))
    with torch.inference_mode():
        out = []
        for target in (ours, theirs):
            rows = [tiny.admit(target, slot, TEXT[: 5 + slot]) for slot in (0, 1)]
            batch = tiny.everything(rows)
            before = tree.chain(draft.tokens[:, : max(first, 0)], tuple(min(w, max(first, 0)) for w in draft.width))
            target.score(batch, before)
            score = lambda target=target, batch=batch: target.score(batch, draft, first)  # noqa: E731
            out.append(seen_often(target, score) if target.graphs else score())
    for b, width in enumerate(draft.width):
        live = 1 + width - max(first + 1, 0)
        close(out[0].logits[b, :live], out[1].logits[b, :live])
    assert out[0].logits.shape == out[1].logits.shape


def test_exported_layers(shelf):
    ours, theirs = pair(shelf.folder("qwen3"), layers=(1, 3))
    draft = random_tree([4, 2], tiny.VOCAB, random.Random(0))
    with torch.inference_mode():
        batches = [tiny.everything([tiny.admit(t, s, TEXT[:6]) for s in (0, 1)]) for t in (ours, theirs)]
        theirs.score(batches[1], draft)
        ours.score(batches[0], draft)
        got, wanted = seen_often(ours, lambda: ours.score(batches[0], draft)), theirs.score(batches[1], draft)
    assert got.hidden_states.keys() == {1, 3}
    for layer, states in got.hidden_states.items():
        close(states, wanted.hidden_states[layer])
        for mine, other in zip(got.feed_hidden_states[layer], wanted.feed_hidden_states[layer], strict=True):
            close(mine, other)


def test_replays_write_where_the_pass_belongs_and_nowhere_else(shelf):
    """A slot that sits out, columns that are padding, and rows of other lengths keep what they have."""
    target = read(shelf.folder("llama"), record=Replays())
    with torch.inference_mode():
        rows = [tiny.admit(target, slot, TEXT[: 9 + slot]) for slot in range(4)]
        batch = tiny.everything(rows)
        target.cache.commit(tree.prefill_round(batch, tree.empty(4, CPU), target.score(batch, tree.empty(4, CPU))))
        some = [rows[3], rows[1]]  # not in the order of their slots
        for row in some:
            row.num_cached_tokens = len(row.token_ids)
            row.token_ids += [1, 2]
        batch, draft = tiny.everything(some), tree.chain(torch.tensor([[5, 6, 7], [8, 9, 9]]), (3, 2))
        wanted = read(shelf.folder("llama"))
        again = [tiny.admit(wanted, row.slot, row.token_ids) for row in some]
        logits = wanted.score(tiny.everything(again), draft).logits
        before = {key: stripes.clone() for key, stripes in target.cache._keys.items()}
        got = seen_often(target, lambda: target.score(batch, draft))
    for b, width in enumerate(draft.width):
        close(got.logits[b, : 1 + width], logits[b, : 1 + width])
    for layer, stripes in target.cache._keys.items():
        changed = (stripes != before[layer]).any(-1).any(1)[:, : target.cache.spare]  # [slots, entries]
        for slot in range(4):
            start = 9 + slot if slot in (1, 3) else 0
            count = {3: 2 + 3, 1: 2 + 2}.get(slot, 0)
            assert changed[slot].nonzero().flatten().tolist() == list(range(start, start + count))


@pytest.mark.parametrize("budget", [(4, 4, 4), (1, 4, 3)])
def test_growing_is_scoring_step_by_step(budget, shelf):
    ours, theirs = pair(shelf.folder("mistral"))
    texts = [TEXT[:7], TEXT[:8], TEXT[:3]]
    with torch.inference_mode():
        grown = []
        for target in (ours, theirs):
            rows = [tiny.admit(target, slot, text) for slot, text in enumerate(texts)]
            batch = tiny.everything(rows)
            target.cache.commit(tree.prefill_round(batch, tree.empty(3, CPU), target.score(batch, tree.empty(3, CPU))))
            for row, new in zip(rows, ([1], [2, 3], [4]), strict=True):
                row.num_cached_tokens, row.token_ids = len(row.token_ids), row.token_ids + new
            feeds = tuple(tuple(row.token_ids[row.num_cached_tokens :]) for row in rows)
            batch = Batch(
                seqs=tuple(rows), start=tuple(row.num_cached_tokens for row in rows), feed=feeds, draft_budget=budget
            )
            one = lambda target=target, batch=batch: target.draft_greedy(batch, 200).tokens  # noqa: E731
            grown.append(seen_often(target, one) if target.graphs else draft_by_scores(target, batch, 200).tokens)
    for b, count in enumerate(budget):
        assert grown[0][b, :count].tolist() == grown[1][b, :count].tolist()
    assert int(grown[0].max()) < 200
    assert Bucket(rows=4, columns=2, length=16, steps=4, vocab=200) in ours.graphs.buckets()


def test_growing_stops_where_the_slot_ends(shelf):
    """A row without room takes part in steps that others still need, and writes nothing there."""
    target = read(shelf.folder("llama"), record=Replays())
    with torch.inference_mode():
        rows = [tiny.admit(target, 0, [3] * (CONTEXT - 2)), tiny.admit(target, 1, [4] * 5)]
        batch = tiny.everything(rows)
        target.cache.commit(tree.prefill_round(batch, tree.empty(2, CPU), target.score(batch, tree.empty(2, CPU))))
        batch = Batch(seqs=tuple(rows), start=(CONTEXT - 2, 5), feed=((1,), (2,)), draft_budget=(1, 6))
        grown = seen_often(target, lambda: target.draft_greedy(batch, tiny.VOCAB).tokens)
        wanted = draft_by_scores(read_like(target, shelf, batch), batch, tiny.VOCAB).tokens
    assert grown[0, 0] == wanted[0, 0]
    assert grown[1].tolist() == wanted[1].tolist()


def read_like(target, shelf, batch):
    """An eager target that has read the same texts."""
    other = read(shelf.folder("llama"))
    rows = [tiny.admit(other, row.slot, row.token_ids[: batch.start[b]]) for b, row in enumerate(batch.seqs)]
    other.score(tiny.everything(rows), tree.empty(len(rows), CPU))
    return other


def test_numbers_that_are_none_stay_in_their_row(shelf, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(shelf.folder("mixtral"))
    model.get_input_embeddings().weight.data[77] = torch.nan
    ours, theirs = pair(tiny.save_model(tmp_path / "poisoned", model))
    texts = [[77, *TEXT[:9]], TEXT[:9], TEXT[4:9]]
    with torch.inference_mode():
        ours_rows, theirs_rows = ([tiny.admit(each, s, t) for s, t in enumerate(texts)] for each in (ours, theirs))
        draft = tree.chain(torch.tensor([[1, 2], [77, 3], [5, 6]]), (2, 2, 2))
        wanted = theirs.score(tiny.everything(theirs_rows), draft).logits
        ours.score(tiny.everything(ours_rows), draft)
        got = seen_often(ours, lambda: ours.score(tiny.everything(ours_rows), draft))
        torch.testing.assert_close(got.logits, wanted, atol=3e-5, rtol=1e-5, equal_nan=True)
        assert got.best[:2].tolist() == [[-1] * 3] * 2  # a row of which any guess is poisoned is run again without
        assert got.best[2].min() >= 0
        # The slot's next text is shorter, and what the poisoned one left behind it counts for nothing.
        short = tiny.admit(ours, 0, TEXT[:4])
        good = seen_often(ours, lambda: ours.score(tiny.everything([short]), tree.empty(1, CPU)))
    assert good.logits.isfinite().all()


def text_of(target, draft, params, prompts):
    make = (lambda setup: DraftModelProposer(setup, draft)) if draft else NoProposer
    engine = engines.make_engine(target, make, verifier="walk", rows=4, chunk=30)
    return engines.outputs(engines.run(engine, prompts, params, limit=24))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_same_text_with_and_without(temperature, shelf):
    """A whole engine, prompts of many lengths coming and going, target and draft both recorded."""
    prompts = [[1 + i, *TEXT[: 3 + 7 * i], *TEXT[:i]] for i in range(7)]
    params = SamplingParams(temperature=temperature, top_p=0.95, seed=3)
    plain = text_of(read(shelf.folder("llama")), None, params, prompts)
    target, draft = (read(shelf.folder(name), record=Replays()) for name in ("llama", "qwen3"))
    assert text_of(target, draft, params, prompts) == plain
    assert replays(target) > 10
    assert replays(draft) > 10
    assert target.graph_bytes() > 1000
    assert any(bucket.steps for bucket in draft.graphs.buckets())


def test_what_is_recorded_wrongly_is_not_believed(shelf):
    class Broken(Replays):
        def __call__(self, run):
            replay = super().__call__(run)
            return lambda: tree_map_only(torch.Tensor, lambda out: out + 1, replay())

    params, prompts = SamplingParams(), [TEXT, TEXT[:4]]
    plain = text_of(read(shelf.folder("llama")), None, params, prompts)
    target = read(shelf.folder("llama"), record=Broken())
    assert text_of(target, None, params, prompts) == plain
    assert not target.graphs._works
    assert target.graphs.buckets() == ()


@pytest.mark.parametrize("error", [RuntimeError("not while capturing"), UnsupportedModel("odd layers")])
def test_what_cannot_be_recorded_runs_eagerly(error, shelf):
    class Refusing(Replays):
        def __call__(self, run):
            self.recorded += 1
            raise error

    record = Refusing()
    params, prompts = SamplingParams(), [TEXT, TEXT[:4]]
    plain = text_of(read(shelf.folder("llama")), None, params, prompts)
    assert text_of(read(shelf.folder("llama"), record=record), None, params, prompts) == plain
    assert record.recorded == 1


def test_warming_up_records_every_length_and_leaves_texts_alone(shelf):
    ours, theirs = pair(shelf.folder("llama"))
    assert ours.graphs.warm(rows=3, length=40, columns=(1,), compiled=False) == 0  # nothing has been cached yet
    with torch.inference_mode():
        rows = [[tiny.admit(each, 0, TEXT[:12])] for each in (ours, theirs)]
        for target, some in zip((ours, theirs), rows, strict=True):
            target.score(tiny.everything(some), tree.empty(1, CPU))
        before = ours.cache.of(0)[0][..., :CONTEXT, :].clone()
        spent = ours.graphs.warm(rows=3, length=40, columns=(1, 5), steps=(3,), vocab=9, compiled=False)
        assert torch.equal(ours.cache.of(0)[0][..., :CONTEXT, :], before)
    assert 0 < spent == ours.graphs.seconds
    found = {(b.rows, b.columns, b.length, b.steps, b.vocab) for b in ours.graphs.buckets()}
    assert found == {(4, *rest) for n in (16, 32, 48) for rest in ((1, n, 0, 0), (8, n, 0, 0), (2, n, 3, 9))}


def test_lengths_are_rounded_up_by_a_quarter_at_most(monkeypatch):
    monkeypatch.setattr(cuda_graphs, "_LENGTH", 128)
    for length in range(1, 9000, 7):
        rounded = cuda_graphs._round_up(length, 8192)
        assert rounded >= min(length, 8192)
        assert rounded <= max(128 * -(-length // 128), 1.25 * length)
        assert rounded in cuda_graphs._lengths(length, 8192)


def test_what_no_bucket_holds_runs_eagerly(shelf):
    target = read(shelf.folder("llama"), record=Replays())
    with torch.inference_mode():
        row = tiny.admit(target, 0, TEXT * 4)  # more columns than a bucket has
        for _ in range(4):
            target.score(tiny.everything([row]), tree.empty(1, CPU))
    assert replays(target) == 0


class _NoHost(TorchDispatchMode):
    """Fails where a device would have to answer the host, or be handed a number from it: no graph can hold that."""

    BANNED = ("_local_scalar_dense", "nonzero", "masked_select", "lift_fresh", "is_nonzero", "equal.default", "unique")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(name in str(func) for name in self.BANNED):
            raise AssertionError(f"{func} inside a pass")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "gemma3_text", "gpt_oss", "gpt2", "qwen3"])
@pytest.mark.parametrize("kind", ["chain", "tree", "grow"])
def test_a_pass_never_asks_the_host(name, kind, shelf):
    """What CUDA graphs demand, as far as a CPU can tell; `mixtral` loops over its experts, and is not here."""
    target = read(shelf.folder(name), record=Replays())
    with torch.inference_mode():
        row = tiny.admit(target, 0, TEXT[:12])
        target.score(tiny.everything([row]), tree.empty(1, CPU))
        bucket = Bucket(rows=2, columns=4, length=16, trees=kind == "tree", steps=3 if kind == "grow" else 0)
        buffers = StaticPass(target.graphs._model, bucket)
        with _NoHost():
            (buffers.grow if kind == "grow" else buffers.score)()


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "mixtral"])
@pytest.mark.parametrize("kind", ["chain", "tree", "grow"])
def test_a_pass_needs_shapes_alone(name, kind):
    """On a device without numbers: nothing is asked of them, and nothing comes from another device."""
    config = tiny.ARCHITECTURES[name]()
    with torch.inference_mode(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=NAME).eval().bfloat16()
        cache = SpareCache(slots=4, capacity=64, device=torch.device("meta"))
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        for layer in range(tiny.LAYERS):
            stripes = torch.zeros(4, config.num_key_value_heads, 65, dim, dtype=torch.bfloat16)
            cache._keys[layer] = cache._values[layer] = stripes
    bucket = Bucket(rows=2, columns=4, length=16, trees=kind == "tree", steps=3 if kind == "grow" else 0)
    with torch.inference_mode():
        buffers = StaticPass(StaticModel(model, list(model.model.layers), cache, {}), bucket)
        out = buffers.grow() if bucket.steps else buffers.score()[0]
    assert out.device.type == "meta"
    assert out.shape == ((2, 3) if bucket.steps else (2, 4, tiny.VOCAB))


class _Reads(TorchFunctionMode):
    """Counts the host's waits for a tensor, and numbers that are handed over otherwise than by `upload`."""

    def __init__(self):
        super().__init__()
        self.reads: list[str] = []
        self.hands: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in ("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "nonzero"):
            self.reads.append(name)
        if func is torch.tensor:
            caller = sys._getframe(1).f_code.co_name
            if caller != "upload":
                self.hands.append(caller)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_round_waits_for_the_device_once(temperature, shelf, monkeypatch):
    monkeypatch.setattr(tree, "is_cpu", lambda device: False)
    target, draft = (read(shelf.folder(name), record=Replays()) for name in ("llama", "qwen3"))
    engine = engines.make_engine(target, lambda setup: DraftModelProposer(setup, draft), verifier="block", rows=2)
    params = SamplingParams(temperature=temperature, max_tokens=60)
    for i in range(2):
        request = Request(
            id=i, prompt_token_ids=tuple(TEXT[: 8 + i]), params=params, seed=i, end_ids=frozenset(), max_tokens=60
        )
        engine.add(request)
    for model in (target, draft):  # no trials, which read on purpose
        model.graphs._compare = lambda recorded, ours, eager: ours
    counted = []
    while engine.busy():
        with _Reads() as seen:
            engine.step()
        counted.append((len(seen.reads), len(seen.hands)))
    assert len(counted) > 8
    assert counted[4:-4] == [(1, 0)] * len(counted[4:-4])


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_compiled_layers_are_the_layers(shelf):
    """Regional compilation on the CPU: one compilation for all layers and lengths, and the same numbers."""
    from torch._dynamo.utils import counters

    counters.clear()
    ours, theirs = pair(shelf.folder("llama"))
    texts = [TEXT[:7], TEXT[:10]]
    with torch.inference_mode():
        ours_rows, theirs_rows = ([tiny.admit(each, s, t) for s, t in enumerate(texts)] for each in (ours, theirs))
        for target, rows in ((ours, ours_rows), (theirs, theirs_rows)):
            target.score(tiny.everything(rows), tree.empty(2, CPU))

        def recorded_compiled(run):
            run()

            def replay():
                ours.graphs._model.compiled = True
                try:
                    return run()
                finally:
                    ours.graphs._model.compiled = False

            return replay

        ours.graphs._record = recorded_compiled
        ours.graphs.warm(rows=2, length=64, columns=(5,))
        assert ours.graphs.compiled
        assert counters["stats"]["unique_graphs"] == 1
        ours_chance, theirs_chance = random.Random(0), random.Random(0)
        for turn in range(6):
            draft = tree.chain(torch.randint(tiny.VOCAB, (2, 5)), (5, 4))
            got = ours.score(tiny.everything(ours_rows), draft)
            close(got.logits[0], theirs.score(tiny.everything(theirs_rows), draft).logits[0])
            assert (got.best is not None) == (turn > 2)
            tiny.grow(ours, ours_rows, ours_chance)
            tiny.grow(theirs, theirs_rows, theirs_chance)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA here")
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_cuda_graphs(name, compiled, shelf):
    """Chains, trees and growing on the device, against the eager pass there."""
    device = torch.device("cuda")
    ours = read(shelf.folder(name), record=CudaRecorder(device), device="cuda")
    theirs = read(shelf.folder(name), device="cuda")
    with torch.inference_mode():
        rows = [[tiny.admit(each, s, TEXT[: 5 + 3 * s]) for s in range(2)] for each in (ours, theirs)]
        for target, some in zip((ours, theirs), rows, strict=True):
            target.score(tiny.everything(some), tree.empty(2, device))
        ours.graphs.warm(rows=2, length=32, columns=(1, 5), steps=(4,), compiled=compiled)
        assert ours.graphs.buckets()
        for turn in range(5):
            drawn = random_tree([4, 3], tiny.VOCAB, random.Random(turn))
            ids, parent = drawn.tokens.to(device), drawn.parent.to(device)
            draft = tree.one_hot_tree(ids, parent, drawn.width) if turn % 2 else tree.chain(ids, drawn.width)
            batches = [tiny.everything(some) for some in rows]
            close(ours.score(batches[0], draft).logits, theirs.score(batches[1], draft).logits)
            grown = [
                each.draft_greedy(batch, tiny.VOCAB).tokens for each, batch in zip((ours, theirs), batches, strict=True)
            ]
            assert grown[0][:, :4].tolist() == grown[1][:, :4].tolist()
    assert ours.graphs._works
    assert ours.graph_bytes() > 0
