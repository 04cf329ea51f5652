"""The team of threads: its barrier, and its size while other processes take processors away."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from outrider.native import library

INCLUDES = """
#include <cstdio>
#include "threads.h"
using namespace outrider;
#define CHECK(condition) if (!(condition)) return std::printf("line %d: %s\\n", __LINE__, #condition), 1
"""

BARRIER = """
#include <omp.h>
int main() {
  Barrier barrier(4);
  int count[4] = {}, wrong = 0;
#pragma omp parallel num_threads(4)
  {
    const Team team{barrier, omp_get_thread_num(), omp_get_num_threads()};
    barrier.enter(team.thread);
    for (int round = 1; round <= 20000; round++) {
      count[team.thread]++;
      barrier.wait(team.thread, team.threads);
      for (int t = 0; t < team.threads; t++)
        if (count[t] != round) {
#pragma omp atomic
          wrong++;
        }
      barrier.wait(team.thread, team.threads);
    }
  }
  CHECK(!wrong);
  return 0;
}
"""

# `pass(columns, ms, sleeps)` records passes that take 1 ms with all four threads on a quiet machine.
SIZE = """
int main() {
  TeamSize size(4);
  // A quiet machine: passes of different lengths, and no thread sleeps.
  for (int i = 0; i < 2000; i++) {
    size.record(1 + i % 40, 1e-3 * (1 + i % 40), 0);
    CHECK(size.threads() == 4);
  }
  // Two processors are taken away: teams of three and four are slow, and a team of two is fast.
  for (int i = 0; i < 5000; i++) size.record(1, size.threads() > 2 ? 8e-3 : 2e-3, size.threads() > 2);
  int small = 0;
  for (int i = 0; i < 1000; i++) {
    small += size.threads() == 2;
    size.record(1, size.threads() > 2 ? 8e-3 : 2e-3, size.threads() > 2);
  }
  CHECK(small > 800);
  // They come back.
  for (int i = 0; i < 20000; i++) size.record(1, 4e-3 / size.threads(), 0);
  int full = 0;
  for (int i = 0; i < 1000; i++) {
    full += size.threads() == 4;
    size.record(1, 4e-3 / size.threads(), 0);
  }
  CHECK(full == 1000);
  // Threads that sleep without a gain of a smaller team cost few trials.
  int trials = 0;
  for (int i = 0; i < 50000; i++) {
    trials += size.threads() != 4;
    size.record(1, 4e-3 / size.threads(), 1);
  }
  CHECK(trials < 1500);
  return 0;
}
"""


@pytest.mark.parametrize("program", [BARRIER, SIZE], ids=["barrier", "size"])
def test_program(program, tmp_path):
    source = tmp_path / "test.cpp"
    source.write_text(INCLUDES + program)
    folder = Path(library.__file__).parent / "csrc"
    flags = ["-O2", "-std=c++17", "-fopenmp", f"-I{folder}"]
    subprocess.run([library.find_compiler(), *flags, str(source), "-o", str(tmp_path / "test")], check=True)
    result = subprocess.run([tmp_path / "test"], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stdout
