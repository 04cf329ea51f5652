"""The dtype of matrix products in training: bfloat16 if the hardware has instructions for it."""

import pytest
import torch

from outrider.train.loss.losses import parse
from outrider.train.precision import matmul_dtype
from outrider.train.trainer import Trainer
from tests.helpers.train_setup import ConstantTrainee, make_batch

CPU = torch.device("cpu")


def _set_cpu(monkeypatch, *, capability="AVX512", bf16=False, amx=False, mkldnn=True):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: mkldnn)


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        ({"bf16": True}, torch.bfloat16),
        ({"amx": True}, torch.bfloat16),
        ({}, torch.float32),  # oneDNN supports it, but slowly
        ({"capability": "AVX2", "mkldnn": False}, torch.float32),
        ({"capability": "DEFAULT"}, torch.bfloat16),  # not x86: oneDNN decides
        ({"capability": "DEFAULT", "mkldnn": False}, torch.float32),
    ],
)
def test_dtype_by_cpu_features(features, expected, monkeypatch):
    _set_cpu(monkeypatch, **features)
    assert matmul_dtype(CPU) is expected


def test_gpu_always_uses_bfloat16(monkeypatch):
    _set_cpu(monkeypatch)
    assert matmul_dtype(torch.device("cuda")) is torch.bfloat16


@pytest.mark.parametrize("has_bf16", [True, False])
def test_training_step_uses_this_dtype(has_bf16, monkeypatch):
    _set_cpu(monkeypatch, bf16=has_bf16)
    trainee = ConstantTrainee(2, 11)
    trainer = Trainer(trainee, losses=parse("ce"), steps=2, decay=0.8, lr=1e-3)
    dtypes = []
    unroll = trainee.unroll

    def record_dtype(texts, steps):
        dtypes.append((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
        return unroll(texts, steps)

    trainee.unroll = record_dtype
    trainer.train([make_batch(vocab=11)], progress=0.5)
    assert dtypes == [matmul_dtype(CPU)]
