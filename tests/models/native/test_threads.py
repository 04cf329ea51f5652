"""The team of threads: its phases, and its size while other processes take processors away."""

import subprocess
from pathlib import Path

import pytest

from outrider.models.native import library

INCLUDES = """
#include <cstdio>
#include "team_size.h"
#include "threads.h"
using namespace outrider;
#define CHECK(condition) if (!(condition)) return std::printf("line %d: %s\\n", __LINE__, #condition), 1
"""

# Every item runs once, and no item of a phase runs before those of the phase before it have.
PHASES = """
#include <omp.h>
// How often item i has run before a round.
int expected_runs(int i, int round) { return round / 101 * (100 - i) + std::max(0, round % 101 - i - 1); }
int main() {
  Phases phases(4);
  std::vector<std::atomic<int>> runs(100);
  std::atomic<int> wrong{0};
  for (int pass = 0; pass < 50; pass++) {
    for (auto& each : runs) each = 0;
    const uint32_t first = phases.current();
#pragma omp parallel num_threads(4)
    {
      Team team{phases, omp_get_thread_num(), omp_get_num_threads(), first};
      for (int round = 0; round < 300; round++) {
        const int count = round % 101;  // also none, and fewer than threads
        const auto work = [&](int i) { wrong += runs[i]++ != expected_runs(i, round); };
        if (round % 3 == 0) team.share(count, work);
        if (round % 3 == 1) team.share(count, work, 1);
        if (round % 3 == 2) team.share_interleaved(count, work);
      }
      team.join();
    }
    for (int i = 0; i < 100; i++) CHECK(runs[i] == expected_runs(i, 300));
  }
  CHECK(!wrong);
  return 0;
}
"""

# The others finish all phases of a thread that does not come, then it finds its phases finished.
LATE = """
#include <omp.h>
int main() {
  constexpr int rounds = 1000;
  Phases phases(4);
  std::atomic<int> items{0}, late_items{0};
  const uint32_t first = phases.current();
#pragma omp parallel num_threads(4)
  {
    Team team{phases, omp_get_thread_num(), omp_get_num_threads(), first};
    while (team.thread == 3 && phases.current() != first + rounds) std::this_thread::yield();
    for (int round = 0; round < rounds; round++)
      team.share(10, [&](int) { items++; if (team.thread == 3) late_items++; });
    team.join();
  }
  CHECK(items == 10 * rounds);
  CHECK(late_items == 0);
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


@pytest.mark.parametrize("program", [PHASES, LATE, SIZE], ids=["phases", "late", "size"])
def test_program(program, tmp_path):
    source = tmp_path / "test.cpp"
    source.write_text(INCLUDES + program)
    folder = Path(library.__file__).parent / "csrc"
    flags = ["-O2", "-std=c++17", "-fopenmp", f"-I{folder}"]
    subprocess.run([library.find_compiler(), *flags, str(source), "-o", str(tmp_path / "test")], check=True)
    result = subprocess.run([tmp_path / "test"], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stdout
