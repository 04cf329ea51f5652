"""Tests of thread counts, with folders that imitate /sys and /proc."""

import os
import sys

import pytest
import torch

from outrider import LLM, OutriderError
from outrider.runtime import machine
from outrider.runtime.machine import default_threads, hardware, use_threads

PAIRS = [f"{i % 8},{i % 8 + 8}" for i in range(16)]  # 8 cores of two threads


@pytest.fixture
def system(tmp_path, monkeypatch):
    """A function that writes the files of a machine: the sibling threads of each CPU, the CPUs of each node, others."""

    def make(siblings=(), nodes=(), files=None, cpus=None):
        lists = {f"sys/devices/system/cpu/cpu{i}/topology/thread_siblings_list": s for i, s in enumerate(siblings)}
        lists |= {f"sys/devices/system/node/node{i}/cpulist": node for i, node in enumerate(nodes)}
        for name, text in {**lists, **(files or {})}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")
        usable = set(range(len(siblings)) if cpus is None else cpus)
        monkeypatch.setattr(sys, "platform", "linux")
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: usable, raising=False)
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("cpus", "nodes", "threads"),
    [
        (None, ["0-15"], 8),
        (None, [], 8),
        ([0, 8], ["0-15"], 1),
        ([0, 1, 2, 9], ["0-15"], 3),
        (None, ["0-3,8-11", "4-7,12-15"], 4),
        (None, ["0-5,8-13", "6-7,14-15", ""], 6),
        ([1, 6, 7], ["0-5,8-13", "6-7,14-15"], 2),
        ([3], ["0-1"], 1),  # no node has this CPU
    ],
)
def test_default_threads_are_the_cores_of_one_node(system, cpus, nodes, threads):
    assert default_threads(system(PAIRS, nodes, cpus=cpus)) == threads


@pytest.mark.parametrize(
    ("files", "threads"),
    [
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "350000 100000"}, 3),
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/cpu.max": "50000 100000"}, 1),
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/b/cpu.max": "max 100000"}, 8),
        ({"proc/self/cgroup": "0::/a", "sys/fs/cgroup/cpu.max": "9900000 100000"}, 8),
        (
            {
                "proc/self/cgroup": "3:memory:/x\n2:cpu,cpuacct:/host/path",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "200000",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
            },
            2,
        ),
        (
            {
                "proc/self/cgroup": "1:cpu:/",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            8,
        ),
        ({"proc/self/cgroup": "what is this?", "sys/fs/cgroup/cpu.max": "0 0"}, 8),
    ],
)
def test_cpu_quota_limits_threads(system, files, threads):
    assert default_threads(system(PAIRS, ["0-15"], files)) == threads


def test_default_threads_without_system_files(system):
    assert 1 <= default_threads() <= (os.cpu_count() or 1)
    assert default_threads(system(cpus=range(6))) == 6
    assert hardware("cpu")["cores"] == 6


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has CPU affinity")
def test_usable_cpus_follow_the_affinity():
    assert hardware("cpu")["cores"] == len(os.sched_getaffinity(0))


def test_precedence_of_thread_settings(monkeypatch):
    set_to = []
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    monkeypatch.setattr(machine, "default_threads", lambda: 4)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    use_threads(None)
    assert set_to == []
    use_threads(3)
    monkeypatch.delenv("OMP_NUM_THREADS")
    use_threads(None)
    use_threads(8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)  # set by the user or by MKL_NUM_THREADS
    use_threads(None)
    assert set_to == [3, 4, 8, 2]
    with pytest.raises(OutriderError, match="threads is 0; use at least 1"):
        LLM(threads=0)
