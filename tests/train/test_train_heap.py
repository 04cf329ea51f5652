"""The heap of a training keeps freed memory, and returns it to the system when it has grown."""

import subprocess
import sys

import pytest

PROGRAM = """
import torch
from outrider.runtime.heap import Heap

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20

heap = Heap()
small, large = [], []
for _ in range(50):  # the freed blocks lie between used ones
    large.append(torch.ones(1 << 20))
    small.append(torch.ones(1 << 10))
allocated = resident()
large.clear()
freed = resident()
heap.tidy()
tidied = resident()
heap.tidy(grown=100 << 20)
print(allocated, freed, tidied, resident())
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_freed_memory_is_kept_until_tidy():
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    allocated, freed, tidied, trimmed = map(float, result.stdout.split())
    assert min(freed, tidied) > allocated - 20  # MiB, of 200
    assert trimmed < allocated - 150
