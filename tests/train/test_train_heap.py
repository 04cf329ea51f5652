"""A training gives back what it does not need."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import torch
from outrider.system.heap import Heap

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20

heap = Heap()
kept, large = [], []
for _ in range(50):  # what is freed lies between what is not
    large.append(torch.ones(1 << 20))
    kept.append(torch.ones(1 << 10))
full = resident()
large.clear()
held = resident()
heap.tidy()
still = resident()
heap.tidy(grown=100 << 20)
print(full, held, still, resident())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
def test_what_is_freed_is_held_until_it_is_given_back():
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    full, held, still, after = map(float, ran.stdout.split())
    assert min(held, still) > full - 20  # MiB, of 200
    assert after < full - 150
