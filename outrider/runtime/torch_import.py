"""Import torch without its meta kernels, which take a quarter of the import time.

A meta kernel computes the shape of a result for tensors without memory. Operations in C++ do not need them.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_META_KERNELS = "torch._meta_registrations"
_USERS = frozenset({"transformers", "accelerate", "torch._dynamo"})  # torch._dynamo: torch.compile and torch.export


def defer_meta_kernels() -> None:
    """Let torch import its meta kernels when something uses them. It has no effect after the import of torch."""
    if "torch" not in sys.modules:
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder, Loader):
    """Finds an empty module in place of the meta kernels until they are used."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the specification of the empty module; None: another finder finds the module."""
        if fullname == _META_KERNELS:
            return ModuleSpec(fullname, self)
        if fullname in _USERS:
            self._import()
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Let the module import the meta kernels when one of its names is used."""

        def find(name: str) -> Any:
            if name.startswith("__"):  # a scan of all modules
                raise AttributeError(name)
            return getattr(self._import(), name)

        vars(module)["__getattr__"] = find

    def _import(self) -> ModuleType | None:
        """Import the meta kernels. Before torch is imported, it will do so itself: then return None."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            sys.modules.pop(_META_KERNELS, None)
        return import_module(_META_KERNELS) if "torch" in sys.modules else None
