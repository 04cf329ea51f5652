"""A stand-in for CUDA graphs on a CPU."""

import torch
from torch.utils._pytree import tree_flatten as flatten
from torch.utils._pytree import tree_map_only, tree_unflatten


class FakeRecorder:
    """A recorder without CUDA graphs. A replay runs the function again and writes the results to the same memory."""

    def __init__(self):
        self.count = 0  # replays
        self.recorded = 0  # recordings

    def __call__(self, run):
        self.recorded += 1
        out, shape = flatten(tree_map_only(torch.Tensor, torch.clone, run()))

        def replay():
            self.count += 1
            for old, new in zip(out, flatten(run())[0], strict=True):
                if old is not None:
                    old.copy_(new)
            return tree_unflatten(out, shape)

        return replay

    def bytes(self):
        return 1000

    def seconds(self, run):
        run()
        return 0.0
