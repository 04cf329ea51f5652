"""The structure of the paged KV cache that the native kernels read."""

import ctypes


class CPool(ctypes.Structure):
    """`Pool` of models/native/csrc/pool.h. `PagedCache.resize` sets the address of the entries."""

    __slots__ = ()  # so that an unknown name is an error
    _fields_ = (
        ("entries", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("key_offset", ctypes.c_void_p),
        ("layers", ctypes.c_int32),
        ("reach", ctypes.c_int32),
        ("bits", ctypes.c_int32),
    )
