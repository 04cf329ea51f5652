"""Which passes run as recordings: by their cost, after failures, and after differences from the eager pass."""

import logging
import threading
import warnings

import pytest
import torch
from torch.utils._pytree import tree_map_only

from outrider.core import tree
from outrider.core.types import Batch, DraftBudget
from outrider.models.loader.load import load_checkpoint
from outrider.models.torch import cuda_graphs, graph_buckets
from outrider.models.torch.attention_target import AttentionTarget
from outrider.models.torch.cuda_recorder import forbid_synchronization
from outrider.models.torch.static_pass import Bucket, StaticModel, StaticPass
from tests.helpers import tiny
from tests.helpers.recorder import FakeRecorder

CPU = torch.device("cpu")
TEXT = list(b"the quick brown fox")
MS = 1e-3


@pytest.fixture(autouse=True)
def short_buckets(monkeypatch):
    monkeypatch.setattr(graph_buckets, "MIN_LENGTH", 16)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    return tiny.Shelf(tmp_path_factory.mktemp("graphs"))


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.inference_mode():
        yield


def load(folder, record):
    """Return a target with recorded passes, whose cache is allocated, and a sequence in it."""
    target = AttentionTarget(load_checkpoint(folder, dtype="float32"), slots=4, context=96, record=record)
    seq = tiny.admit(target, 0, TEXT[:4])
    target.score(tiny.everything([seq]), tree.empty(1, CPU))
    return target, seq


def score(target, seq, tokens=0):
    return target.score(tiny.everything([seq]), tree.chain(torch.ones(1, tokens, dtype=torch.int64), (tokens,)))


def draft(target, seq, steps):
    batch = Batch(seqs=(seq,), start=(0,), feed=(tuple(seq.token_ids[:2]),), budget=DraftBudget((steps,)))
    target.draft_greedy(batch, tiny.VOCAB)


def drafts(target):
    return {bucket.steps for bucket in target.graphs.buckets() if bucket.steps}


class TimedRecorder(FakeRecorder):
    """A recorder on a virtual clock: a step takes 2 ms in a replay, `eager` in an eager pass, and 30 ms to record."""

    def __init__(self, *, eager):
        super().__init__()
        self.now = 0.0
        self._eager = eager

    def __call__(self, run):
        steps = run.__self__.bucket.steps
        self.now += 30 * MS * steps
        replay = super().__call__(run)
        replay.seconds = 2 * MS * steps
        return replay

    def seconds(self, run):
        return run.seconds if hasattr(run, "seconds") else self._eager * run.__self__.bucket.steps


def load_timed(shelf, monkeypatch, *, eager):
    record = TimedRecorder(eager=eager)
    monkeypatch.setattr(cuda_graphs, "perf_counter", lambda: record.now)
    target, seq = load(shelf.folder("llama"), record)
    target.graphs.warm(rows=1, length=16, steps=(8,), compiled=False)
    assert drafts(target) == {8}
    return target, seq


def test_longer_draft_runs_until_a_recording_would_have_been_cheaper(shelf, monkeypatch):
    """4 of 8 steps are in vain, which takes 8 ms. A recording of 4 steps takes 120 ms."""
    target, seq = load_timed(shelf, monkeypatch, eager=10 * MS)
    for _ in range(14):
        before = target.graphs.recorder.count
        draft(target, seq, 4)
        assert drafts(target) == {8}
        assert target.graphs.recorder.count == before + 1
    draft(target, seq, 4)
    assert drafts(target) == {8, 4}


def test_longer_draft_does_not_run_if_the_eager_pass_is_faster(shelf, monkeypatch):
    """8 recorded steps take 16 ms, and one eager step takes 10 ms, two 20 ms."""
    target, seq = load_timed(shelf, monkeypatch, eager=10 * MS)
    before = target.graphs.recorder.count
    draft(target, seq, 1)
    assert target.graphs.recorder.count == before
    draft(target, seq, 2)
    assert target.graphs.recorder.count == before + 1
    draft(target, seq, 1)  # its second use
    assert drafts(target) == {8, 1}


class PickyRecorder(FakeRecorder):
    """A recorder that raises `error` for passes of some numbers of tokens, at most `times`."""

    def __init__(self, error, *, columns, times=1000):
        super().__init__()
        self._error = error
        self._columns = columns
        self._times = times

    def __call__(self, run):
        if run.__self__.bucket.columns in self._columns and self._times:
            self._times -= 1
            raise self._error
        return super().__call__(run)


def columns(target):
    return {bucket.columns for bucket in target.graphs.buckets()}


def test_shape_that_fails_is_eager_and_others_stay_recorded(shelf, caplog):
    target, seq = load(shelf.folder("llama"), PickyRecorder(RuntimeError("illegal"), columns={16, 32}))
    for tokens in (0, 0, 0, 12, 12, 12, 28, 28, 28, 0):
        logits = score(target, seq, tokens).logits
    assert columns(target) == {4}
    assert target.graphs.recorder.recorded == 1
    assert logits.isfinite().all()
    (message,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "the pass over 1 x 16 tokens and 16 cache entries cannot be recorded as a CUDA graph (illegal)" in message
    assert "runs without a graph" in message


def test_missing_memory_frees_the_recordings_and_tries_again(shelf, caplog, monkeypatch):
    monkeypatch.setattr(cuda_graphs, "COVERED_USES_UNTIL_RECORDED", 2)
    record = PickyRecorder(torch.OutOfMemoryError("no memory"), columns={16}, times=1)
    target, seq = load(shelf.folder("llama"), record)
    for tokens in (0, 0, 12, 12, 12):
        score(target, seq, tokens)
    assert columns(target) == {16}
    for _ in range(2):
        score(target, seq)
    assert columns(target) == {4, 16}  # what was freed is recorded again
    assert not caplog.records


def test_shape_without_memory_is_eager(shelf, caplog):
    """After two evictions the others stay recorded, so that they are not recorded again and again."""
    record = PickyRecorder(torch.OutOfMemoryError("no memory"), columns={16, 32, 64})
    target, seq = load(shelf.folder("llama"), record)
    for tokens in (12, 12, 28, 28, 0, 0, 60, 60, 0):
        score(target, seq, tokens)
    assert columns(target) == {4}
    (message,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert message.endswith("to leave memory for graphs, lower max_num_seqs or max_model_len")


def test_compiled_pass_that_differs_is_recorded_without_compilation(shelf, monkeypatch, caplog):
    class WrongIfCompiled(FakeRecorder):
        def __call__(self, run):
            replay = super().__call__(run)
            if not run.__self__._model.compiled:
                return replay
            return lambda: tree_map_only(torch.Tensor, lambda out: out + 1, replay())

    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    target, seq = load(shelf.folder("llama"), WrongIfCompiled())
    target.graphs.warm(rows=1, length=16, columns=(4,))
    assert target.graphs.compiled
    for _ in range(8):
        score(target, seq)
    assert target.graphs.compiled is False
    assert columns(target) == {4}
    assert score(target, seq).best is not None  # of a recording
    assert "layers are not compiled: a recorded pass differs from the eager pass" in caplog.text


@pytest.fixture
def flipped_routes(monkeypatch):
    """Let recorded passes choose the other one of two experts that are nearly tied. They have other weights."""
    forward = StaticModel.forward

    def flipped(self, *arguments):
        routers = [module for module in self.model.modules() if type(module).__name__.endswith("Router")]
        assert routers
        for router in routers:
            router.weight.data[:2] = router.weight.data[:2].flip(0)
        try:
            return forward(self, *arguments)
        finally:
            for router in routers:
                router.weight.data[:2] = router.weight.data[:2].flip(0)

    monkeypatch.setattr(StaticModel, "forward", flipped)


def load_tied(shelf, gap, record=None):
    """Return a mixture of experts in which the router logits of experts 0 and 1 differ by about `gap` of their size."""
    target, seq = load(shelf.folder("mixtral"), record or FakeRecorder())
    for module in target._model.modules():
        if type(module).__name__.endswith("Router"):
            module.weight.data[1] = module.weight.data[0] * (1 + gap)
    return target, seq


@pytest.mark.usefixtures("flipped_routes")
def test_other_expert_at_a_near_tie_is_no_difference(shelf):
    target, seq = load_tied(shelf, 1e-4)
    for _ in range(8):
        last = score(target, seq, 3)
    assert target.graphs.enabled
    assert columns(target) == {8}
    assert last.best is not None
    drafted = tree.chain(torch.ones(1, 3, dtype=torch.int64), (3,))
    eager = target._score(tiny.everything([seq]), drafted, -1)
    assert (last.logits - eager.logits).norm() > 0.01 * eager.logits.norm()  # the choice did differ, and had an effect


@pytest.mark.usefixtures("flipped_routes")
def test_other_expert_without_a_tie_is_a_difference(shelf):
    target, seq = load_tied(shelf, 0.5)
    for _ in range(8):
        score(target, seq, 3)
    assert not target.graphs.enabled


def test_wrong_logits_of_a_mixture_of_experts_are_a_difference(shelf):
    class WrongRecorder(FakeRecorder):
        def __call__(self, run):
            replay = super().__call__(run)
            return lambda: tree_map_only(torch.Tensor, lambda out: out + 1, replay())

    target, seq = load_tied(shelf, 1e-4, WrongRecorder())
    for _ in range(8):
        scores = score(target, seq, 3)
    assert not target.graphs.enabled
    assert scores.best is None


def test_passes_share_the_memory_of_their_logits(shelf):
    target, _ = load(shelf.folder("llama"), FakeRecorder())
    model = target.graphs.model
    shapes = [Bucket(rows=2, columns=size, length=16) for size in (8, 1, 4)]
    logits = [StaticPass(model, bucket).score()[0] for bucket in shapes]
    assert {each.data_ptr() for each in logits} == {logits[0].data_ptr()}
    assert model.bytes() == 2 * 8 * tiny.VOCAB * 4
    assert target.graphs.bytes() == 1000 + model.bytes()


@pytest.fixture
def debug_mode(monkeypatch):
    modes = [0]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    return modes


def wait_for_device():
    """Do what torch does in its debug mode when a thread waits for the device."""
    warnings.warn("called a synchronizing CUDA operation (Triggered internally at x.cpp:1)", stacklevel=2)


def test_wait_in_a_recording_is_an_error(debug_mode):
    with (
        pytest.raises(RuntimeError, match=r"waits for the device at .*test_graph_choices.py:"),
        forbid_synchronization(),
    ):
        wait_for_device()
    assert debug_mode == [0, "warn", 0]


def test_other_threads_may_wait_during_a_recording(debug_mode):
    errors = []

    def other():
        try:
            wait_for_device()
        except Exception as error:
            errors.append(error)

    with forbid_synchronization():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert not errors


def test_other_warnings_during_a_recording_are_shown(debug_mode):
    with pytest.warns(UserWarning, match="something else"), forbid_synchronization():
        warnings.warn("something else", stacklevel=1)
