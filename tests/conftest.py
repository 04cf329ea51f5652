"""One torch thread a process: the models are small, and the suite runs as many processes as there are cores."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
