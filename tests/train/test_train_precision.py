"""Products of matrices in training: in bfloat16 where the machine has instructions for it."""

from __future__ import annotations

import pytest
import torch

from outrider.train.loss.losses import parse
from outrider.train.precision import products
from outrider.train.trainer import Trainer
from tests.helpers.train_setup import Still, make_texts

CPU = torch.device("cpu")


def _machine(monkeypatch, *, capability="AVX512", bf16=False, amx=False, mkldnn=True):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: mkldnn)


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        ({"bf16": True}, torch.bfloat16),
        ({"amx": True}, torch.bfloat16),
        ({}, torch.float32),  # oneDNN says that it can, and is slow at it
        ({"capability": "AVX2", "mkldnn": False}, torch.float32),
        ({"capability": "DEFAULT"}, torch.bfloat16),  # another processor, for which oneDNN's word is taken
        ({"capability": "DEFAULT", "mkldnn": False}, torch.float32),
    ],
)
def test_products_are_of_the_type_that_is_fast(machine, expected, monkeypatch):
    _machine(monkeypatch, **machine)
    assert products(CPU) is expected


def test_a_gpu_multiplies_bfloat16_whatever_the_cpu_does(monkeypatch):
    _machine(monkeypatch)
    assert products(torch.device("cuda")) is torch.bfloat16


@pytest.mark.parametrize("fast", [True, False])
def test_a_step_multiplies_in_it(fast, monkeypatch):
    _machine(monkeypatch, bf16=fast)
    pupil = Still(2, 11)
    trainer, found, unroll = Trainer(pupil, losses=parse("ce"), steps=2, decay=0.8, lr=1e-3), [], pupil.unroll

    def multiplied(texts, steps):
        found.append((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
        return unroll(texts, steps)

    pupil.unroll = multiplied
    trainer.train([make_texts(vocab=11)], progress=0.5)
    assert found == [products(CPU)]
