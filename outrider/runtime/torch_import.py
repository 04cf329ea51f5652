"""Import torch without its meta kernels, which take a quarter of the time and which a start does not use.

A meta kernel computes the shape of a result for tensors without memory. The shapes of operations in C++ need none.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_META_KERNELS = "torch._meta_registrations"
_USERS = frozenset({"transformers", "accelerate", "torch._dynamo"})  # torch._dynamo: torch.compile and torch.export


def defer_meta_kernels() -> None:
    """Let torch import its meta kernels when a package that uses them is imported. It has no effect after torch."""
    if "torch" not in sys.modules:
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds an empty module in place of the meta kernels, until a package needs them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the specification of the empty module; None: another finder finds the module."""
        if fullname == _META_KERNELS:
            return ModuleSpec(fullname, _Empty())
        if fullname in _USERS:
            sys.meta_path.remove(self)
            if sys.modules.pop(_META_KERNELS, None) is not None:
                import_module(_META_KERNELS)
        return None


class _Empty(Loader):
    """Leaves a module empty."""

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing."""
