"""A KV cache that does not fit on the device is an error before it is allocated. The message says what fits."""

import pytest
import torch

from outrider.core import tree
from outrider.core.params import SamplingParams
from outrider.core.proposer import NoProposer
from outrider.errors import NotEnoughMemory
from outrider.models.cache import memory
from outrider.models.loader.check import check_target
from outrider.models.loader.load import load_checkpoint
from outrider.models.loader.make import make_target
from outrider.models.torch.attention_target import AttentionTarget
from outrider.models.torch.encoder_decoder.sources import Sources
from outrider.testing.toy_target import ToyTarget
from tests.helpers import engines, tiny

CPU = torch.device("cpu")
GB = 10**9
NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1 GiB free.")


def check(free, monkeypatch, *, reserve=0):
    """Check the cache of a Llama 3 8B by default settings: 16 sequences of 8192 tokens of 128 KiB each."""
    monkeypatch.setattr(memory, "free_bytes", lambda device: free)
    memory.check_cache(token_bytes=1 << 17, slots=16, context=8192, reserve=reserve, device=torch.device("cuda:0"))


def test_message_says_what_fits(monkeypatch):
    check(18 * GB, monkeypatch)
    check(None, monkeypatch)  # not a GPU
    with pytest.raises(NotEnoughMemory) as error:
        check(8 * GB, monkeypatch, reserve=GB)
    assert str(error.value) == (
        "the KV cache of 16 sequences of up to 8192 tokens takes 17.2 GB, passes take about 1 GB, and 8 GB of cuda:0"
        " are free; set max_num_seqs to 6 or max_model_len to 3336, or use a smaller model"
    )
    # What it names fits.
    for slots, context in ((6, 8192), (16, 3336)):
        assert (1 << 17) * slots * (context + 1) + GB <= 8 * GB


def test_message_without_memory_for_one_sequence(monkeypatch):
    with pytest.raises(NotEnoughMemory, match=r"set max_model_len to 475, or"):
        check(GB, monkeypatch)
    with pytest.raises(NotEnoughMemory, match="lower max_num_seqs and max_model_len, or use a smaller model"):
        check(0, monkeypatch)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    return tiny.Shelf(tmp_path_factory.mktemp("memory"))


@pytest.fixture
def folder(shelf):
    return shelf.folder("llama")


def test_check_is_exact_and_before_the_allocation(folder, monkeypatch):
    checkpoint = load_checkpoint(folder, dtype="float32")
    target = AttentionTarget(checkpoint, slots=4, context=96)
    target.score(tiny.everything([tiny.admit(target, 0, [1, 2])]), tree.empty(1, CPU))
    needed = target.cache.bytes() + 10 * 512 * target.vocab
    for free, fits in ((needed, True), (needed - 1, False)):
        monkeypatch.setattr(memory, "free_bytes", lambda device, free=free: free)
        fresh = AttentionTarget(checkpoint, slots=4, context=96)
        if fits:
            check_target(fresh, checkpoint)
        else:
            with pytest.raises(NotEnoughMemory, match="the KV cache of 4 sequences of up to 96 tokens"):
                check_target(fresh, checkpoint)
            assert fresh.cache.bytes() == 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "mamba",
            "the recurrent states of 2 sequences take .* GB, and .* GB of cpu are free; set max_num_seqs to 1, or",
        ),
        ("falcon_h1", "the KV cache of 2 sequences of up to 64 tokens takes .*; set"),
        ("t5", "the KV cache of 2 sequences of up to 64 tokens takes .*; set"),
    ],
)
def test_caches_of_other_models_are_checked_as_well(name, message, shelf, monkeypatch):
    """The memory of the whole cache is enough, and a byte less is not."""
    target = shelf.target(name)
    source = (7, 8, 9) if name == "t5" else ()
    every = cache_bytes(shelf, name, source)
    reserve = 0 if name == "mamba" else 10 * 512 * target.vocab
    for free, fits in ((every + reserve, True), (every + reserve - 1, False)):
        target = make_target(shelf.checkpoint(name), slots=2, context=64)
        limit_memory(target, free, monkeypatch)
        batch = tiny.everything([tiny.admit(target, 0, [1, 2], source)])
        if fits:
            target.score(batch, tree.empty(1, CPU))
        else:
            with pytest.raises(NotEnoughMemory, match=message):
                target.score(batch, tree.empty(1, CPU))


def limit_memory(target, total, monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda device: total - target.cache.bytes())


def cache_bytes(shelf, name, source):
    """Return the bytes of a whole cache."""
    target = make_target(shelf.checkpoint(name), slots=2, context=64)
    target.score(tiny.everything([tiny.admit(target, 0, [1, 2], source)]), tree.empty(1, CPU))
    return target.cache.bytes()


def test_sources_that_do_not_fit_are_refused(monkeypatch):
    """Sources of 64 positions take 8 KiB for each of 4 slots in 2 layers, and grow with the longest one."""
    sources = Sources(4, CPU, layers=2)
    part = torch.zeros(2, 64, 16)
    for free in (2 * 4 * 16384 - 1, 2 * 4 * 16384):
        monkeypatch.setattr(memory, "free_bytes", lambda device, free=free: free)
        sources.begin(0, 64)
        if free % 2:
            with pytest.raises(
                NotEnoughMemory, match=r"of up to 64 positions of 4 sequences take .*; set max_num_seqs to 3"
            ):
                sources.write(0, 0, part, part)
    for layer in range(2):
        sources.write(layer, 0, part, part)
    with pytest.raises(NotEnoughMemory, match=r"of up to 256 positions of 4 sequences take .*; set max_num_seqs to 1"):
        sources.begin(1, 200)


def test_missing_memory_in_the_load_check_names_settings(folder, monkeypatch):
    checkpoint = load_checkpoint(folder, dtype="float32")
    target = AttentionTarget(checkpoint, slots=4, context=96)
    monkeypatch.setattr(target, "score", lambda *_: (_ for _ in ()).throw(NO_MEMORY))
    with pytest.raises(NotEnoughMemory, match="lower max_num_seqs, which is 4, or max_model_len, which is 96"):
        check_target(target, checkpoint)


class NoMemoryTarget(ToyTarget):
    def score(self, batch, draft, first=-1):
        raise NO_MEMORY


def test_missing_memory_in_a_round_names_settings():
    engine = engines.make_engine(NoMemoryTarget(slots=2, context=64), NoProposer, rows=2)
    with pytest.raises(NotEnoughMemory) as error:
        engines.run(engine, [[1, 2]], SamplingParams(), limit=4)
    expected = (
        "a pass needs more memory than the device has (CUDA out of memory); lower max_num_seqs, which is 2, or"
        " max_model_len, which is 64, or end other programs on the device"
    )
    assert str(error.value) == expected
    (seq,) = engine.recover(error.value)
    assert seq.error == f"the engine failed: {expected}"
