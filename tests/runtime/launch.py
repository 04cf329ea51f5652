"""Start two gloo ranks, and compare them with one process."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from socket import socket

import pytest

from tests.runtime.two_ranks import complete

ROOT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "PATH": os.environ["PATH"],
    "OMP_NUM_THREADS": "1",
    "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache")),
}
needs_accelerate = pytest.mark.skipif(
    find_spec("accelerate") is None, reason='tensor parallelism needs accelerate: pip install "outrider[tp]"'
)


def torchrun(*words, timeout=300):
    return subprocess.run(
        [*TORCHRUN, *map(str, words)], capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT, timeout=timeout
    )


def _shared_environment():
    """Return the environment of two ranks that torchrun does not start."""
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return ENVIRONMENT | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}


def two_processes(*words, timeout=120):
    """Run a program in two ranks without torchrun, which would end one of them if the other one fails."""
    shared = _shared_environment()
    command = [sys.executable, *map(str, words)]
    processes = [
        subprocess.Popen(command, env=shared | {"RANK": str(rank)}, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=timeout)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], errors


def compare(cases, folder, *, timeout=300):
    """Run cases in two ranks and in this process."""
    (folder / "cases.json").write_text(json.dumps(cases))
    done = subprocess.run(
        [sys.executable, "tests/runtime/two_ranks.py", folder / "cases.json", folder],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=_shared_environment(),
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0] == ranks[1]
    for name, options in cases.items():
        single = {key: value for key, value in options.items() if key not in ("record", "draft_placement", "estimate")}
        expected = json.loads(json.dumps(complete({**single, "kernels": "torch"})))
        got = ranks[0][name]
        if "refused" in got:
            continue
        assert got["tokens"] == expected["tokens"], name
        kernels = "graphs, 2 ranks" if {"record", "device"} & options.keys() else "torch, 2 ranks"
        assert (got["drafted"], got["kernels"]) == (expected["drafted"], kernels), name
        if kernels.startswith("torch"):  # recorded passes need one more entry in each slot
            assert got["cache_bytes"] <= expected["cache_bytes"], name
    return ranks[0]
