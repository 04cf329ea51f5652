"""A check that operations would not wait for a GPU."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class NoSynchronization(TorchDispatchMode):
    """Raises where an operation on a GPU would wait for the device, and counts the others but views."""

    def __init__(self, *more):
        super().__init__()
        self.launches = 0
        self._forbidden = ("_local_scalar_dense", "nonzero", "masked_select", "unique", *more)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        assert name not in self._forbidden, name
        assert name != "index" or all(each is None or each.dtype != torch.bool for each in args[1])
        self.launches += not function.is_view
        return function(*args, **(kwargs or {}))
