"""Starts `outrider scale` for tests."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from outrider.models.loader.embedded import embedded

ROOT = Path(__file__).parents[2]
# Other programs of the machine may use its memory, and Ray would then end its own processes.
RAY_ENVIRONMENT = {
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONPATH": str(ROOT),
}


@dataclass
class Server:
    """A running `outrider scale`."""

    url: str
    pid: int

    def processes(self):
        """Return the processes of its replicas. Ray's processes descend from the one that has started Ray."""
        pids = [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]
        return {pid for pid in pids if _is_replica(pid) and _is_below(pid, self.pid)}

    def running(self):
        """Return the number of replicas that get requests."""
        return httpx.get(f"{self.url}/health", timeout=600).json()["replicas"]


@contextmanager
def replicas(*words, **environment):
    """Start `outrider scale` with the model nano. Yield a `Server`."""
    command = ["-m", "outrider", "scale", "--target", str(embedded("nano")), "--port", "0", "--replica-cpus", "1"]
    process = subprocess.Popen(
        [sys.executable, *command, "--proposer", "ngram", "--k", "3", "--dtype", "float32", *words],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **RAY_ENVIRONMENT, "OMP_NUM_THREADS": "1", **environment},
        cwd=ROOT,
    )
    lines = []
    try:
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"nano at (https?://\S+)/v1", line):
                break
        else:
            raise AssertionError("".join(lines))
        reader = threading.Thread(target=lambda: lines.extend(process.stderr))
        reader.start()
        yield Server(found.group(1), process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        reader.join()
    finally:
        process.terminate()  # Ray ends its processes
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stderr.close()


def _is_replica(pid):
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:  # it has ended
        return False
    return command.startswith("ray::") and "outrider" in command and "Replica" in command and "Front" not in command


def _is_below(pid, ancestor):
    """Return whether a process descends from another one."""
    while pid not in (0, ancestor):
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            return False
        pid = int(re.search(r"PPid:\s+(\d+)", status).group(1))
    return pid == ancestor


def wait_for(condition, seconds=600):
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it has not happened"
        time.sleep(0.1)
