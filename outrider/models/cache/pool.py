"""The structure of the paged KV cache that the native kernels read."""

import ctypes

from outrider.runtime.c_structures import declared_fields


class CPool(ctypes.Structure):
    """Keys and values of all layers. `PagedCache.resize` sets the address of the entries."""

    __slots__ = ()  # so that an unknown name is an error
    _fields_ = declared_fields("pool.h", "Pool")
