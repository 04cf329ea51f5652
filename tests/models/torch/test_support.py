"""What the table of architectures says about prefixes, quantization, CUDA graphs and native kernels is true.

`test_architectures.py` and `test_encoder_decoder.py` run chains, trees and batches of each architecture.
"""

import random

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING

from outrider.core import tree
from outrider.core.types import AudioFeatures
from outrider.errors import OutriderError
from outrider.lab.audit.pair import widen
from outrider.models.loader.check import check_target
from outrider.models.loader.load import load_checkpoint
from outrider.models.loader.make import make_target
from outrider.models.torch import graph_buckets
from outrider.models.torch.attention_target import AttentionTarget
from outrider.models.torch.quantize import QuantizedLinear
from outrider.models.torch.recurrent.rows import CHUNK
from outrider.models.torch.recurrent_target import RecurrentTarget
from outrider.models.torch.static_pass import Bucket, StaticPass
from tests.helpers import tiny
from tests.helpers.recorder import FakeRecorder
from tests.models.torch.test_graphs import ForbidHostSync, HostSync

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning"),  # GPTBigCode
]
TOLERANCE = 1e-4  # relative to the norm of the logits
NATIVE_SIZES = {"hidden_size": 64, "head_dim": 16, "moe_intermediate_size": 32}  # the kernels need multiples of 16
SOURCE = (7, 8, 9)
AUDIO = AudioFeatures(torch.ones(8, 100))


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    return tiny.Shelf(tmp_path_factory.mktemp("support"))


def load_target(shelf, name):
    checkpoint = load_checkpoint(shelf.folder(name), dtype="float32", device="cpu")
    return make_target(checkpoint, slots=4, context=128, kernels="torch")


def next_logits(target, seq):
    return target.score(tiny.everything([seq]), tree.empty(1, target.device)).logits[:, 0]


def source_of(name):
    return AUDIO if tiny.TABLE[name].kind == "speech" else SOURCE


def admit(target, slot, tokens, source):
    """Admit a sequence in a scope, so that it may share a prefix."""
    seq = tiny.admit(target, slot, tokens, source)
    target.cache.release(slot)
    seq.num_cached_tokens = target.cache.admit(slot, tokens, "scope")
    return seq


@pytest.mark.parametrize("name", tiny.TABLE)
@torch.inference_mode()
def test_shared_prefixes(name, shelf):
    rng = random.Random(1)
    target = load_target(shelf, name)
    target.cache.set_prefix_caching(True)
    shared = CHUNK if tiny.TABLE[name].kind == "recurrent" else 20
    common = tiny.text(rng, shared + 1)
    first = admit(target, 0, [*common, 1, 2, 3], source_of(name))
    batch = tiny.everything([first])
    draft = tree.empty(1, target.device)
    target.cache.commit(tree.prefill_round(batch, draft, target.score(batch, draft)))
    second = admit(target, 1, [*common, *tiny.text(rng, 5)], source_of(name))
    assert (second.num_cached_tokens >= shared) == tiny.TABLE[name].prefixes
    logits = next_logits(target, second)
    fresh = load_target(shelf, name)
    expected = next_logits(fresh, tiny.admit(fresh, 2, second.token_ids, source_of(name)))
    assert (logits - expected).norm() < TOLERANCE * expected.norm()


@pytest.mark.parametrize("name", tiny.TABLE)
@torch.inference_mode()
def test_quantization(name, shelf):
    folder = shelf.folder(name)
    expected = tiny.TABLE[name].quantized
    checkpoint = load_checkpoint(folder, dtype="bfloat16", device="cpu")
    if expected == "no":
        with pytest.raises(OutriderError, match="quantize does not support"):
            make_target(checkpoint, slots=1, context=64, kernels="torch", bits=8)
        return
    target = make_target(checkpoint, slots=1, context=64, kernels="torch", bits=8)
    assert target.kernels == "torch int8"
    assert next_logits(target, tiny.admit(target, 0, [1, 2, 3])).isfinite().all()
    assert quantized_part(checkpoint.model) == expected
    # In float32, rounding does not hide a difference.
    widened = dict(widen(load_checkpoint(folder, dtype="bfloat16", device="cpu"), 8).model.named_parameters())
    checkpoint = load_checkpoint(folder, dtype="float32", device="cpu")  # with buffers that were never rounded
    checkpoint.model.load_state_dict(widened, strict=False)
    check_target(make_target(checkpoint, slots=1, context=64, kernels="torch"), checkpoint)


def quantized_part(model):
    """Return what is quantized, in the words of the table."""
    layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    if not isinstance(model.get_output_embeddings(), QuantizedLinear):
        assert layers
        return "without LM head"
    if len(layers) == 1:
        return "LM head only"
    plain = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    # Their shapes do not fit the operators.
    known = ("vision_tower", "img_processor", "gate", "router", "cross_attn", "patch_embedding", "vision_embed_tokens")
    assert all(any(part in name for part in known) for name in plain), plain
    return "without experts" if any(".experts." in name for name, _ in model.named_parameters()) else "yes"


@pytest.mark.parametrize("name", [*tiny.ATTENTION, *tiny.RECURRENT])
@torch.inference_mode()
def test_cuda_graphs(name, shelf, monkeypatch):
    """A pass of fixed shape runs without a synchronization with the host, and gives the logits of the eager one.

    Other kinds of models get no recorder.
    """
    monkeypatch.setattr(graph_buckets, "MIN_LENGTH", 16)
    checkpoint = load_checkpoint(shelf.folder(name), dtype="float32", device="cpu")
    kind = RecurrentTarget if checkpoint.recurrent else AttentionTarget
    target = kind(checkpoint, slots=4, context=96, record=FakeRecorder())
    assert records(target, tiny.admit(target, 0, list(b"the quick br"))) == tiny.TABLE[name].graphs


def records(target, seq):
    """Return whether passes can be recorded, and check their logits."""
    if target.graphs is None:
        return False
    eager = next_logits(target, seq)
    if not target.graphs.model.ready():
        return False
    for kind in ("chain", "tree", "draft"):
        bucket = Bucket(rows=2, columns=4, length=16, trees=kind == "tree", steps=3 if kind == "draft" else 0)
        buffers = StaticPass(target.graphs.model, bucket)
        try:
            with ForbidHostSync():
                (buffers.draft_greedy if kind == "draft" else buffers.score)()
        except HostSync:
            return False
    for _ in range(4):
        logits = next_logits(target, seq)
    assert target.graphs.recorder.count > 0
    assert (logits - eager).norm() < TOLERANCE * eager.norm()
    return True


@pytest.mark.skipif(not tiny.compiles(), reason="no C++ compiler")
@pytest.mark.parametrize("name", tiny.TABLE)
def test_native_kernels(name, tmp_path):
    config = tiny.TABLE[name].config()
    if tiny.TABLE[name].native:
        text = config.get_text_config(decoder=True)
        for setting, value in NATIVE_SIZES.items():
            if hasattr(text, setting):
                setattr(text, setting, value)
    checkpoint = load_checkpoint(tiny.save(tmp_path, config), dtype="float32", device="cpu")
    if tiny.TABLE[name].native:
        target = make_target(checkpoint, slots=1, context=64, kernels="native")
        check_target(target, checkpoint)
        assert target.kernels == "native"
    else:
        with pytest.raises(OutriderError, match="native"):
            make_target(checkpoint, slots=1, context=64, kernels="native")


def test_models_that_transformers_does_not_have():
    assert not set(tiny.NOT_IN_TRANSFORMERS) & set(CONFIG_MAPPING.keys())
