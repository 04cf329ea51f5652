"""The structures that the kernels take. The C++ sources declare them, and say what each field means."""

from __future__ import annotations

import ctypes

import torch

from outrider.runtime.c_structures import declared_fields

# No class has slots or a __dict__, so an unknown name is an error.


class CLinear(ctypes.Structure):
    """A linear layer in panels."""

    __slots__ = ()
    _fields_ = declared_fields("weights.h", "Linear", Values=ctypes.c_int32, Number=ctypes.c_int32)


class CBlockMatrix(ctypes.Structure):
    """A matrix in GGUF blocks, and where it is written."""

    __slots__ = ()
    _fields_ = declared_fields("blocks.cpp", "BlockMatrix")


class CLayer(ctypes.Structure):
    """The weights of one decoder layer."""

    __slots__ = ()
    _fields_ = declared_fields("decoder.cpp", "Layer", Linear=CLinear)


class CEntry(ctypes.Structure):
    """How a draft head combines embeddings and hidden states."""

    __slots__ = ()
    _fields_ = declared_fields("decoder.cpp", "Entry", Linear=CLinear)


class CModel(ctypes.Structure):
    """Sizes, tables and layers of a model. They must live as long as the model is open."""

    __slots__ = ()
    _fields_ = declared_fields("decoder.cpp", "Model", Linear=CLinear)


class CPass(ctypes.Structure):
    """Addresses of the inputs and outputs of one forward pass."""

    __slots__ = ()
    _fields_ = declared_fields("decoder.cpp", "Pass")


class CChain(ctypes.Structure):
    """Chains of draft tokens that the kernels extend."""

    __slots__ = ()
    _fields_ = declared_fields("decoder.cpp", "Chain")


class CAdjustment(ctypes.Structure):
    """How the logits of a sequence are changed."""

    __slots__ = ()
    _fields_ = declared_fields("adjust.h", "Adjustment")


class CAdjustments(ctypes.Structure):
    """Logits to change, and the paths of draft tokens before them."""

    __slots__ = ()
    _fields_ = declared_fields("rules.cpp", "Adjustments")


class CDistributions(ctypes.Structure):
    """Logits, and the target probabilities that the kernels compute from them."""

    __slots__ = ()
    _fields_ = declared_fields("rules.cpp", "Distributions")


class CLogprobs(ctypes.Structure):
    """Tokens whose log-probabilities the kernels compute from logits."""

    __slots__ = ()
    _fields_ = declared_fields("rules.cpp", "Logprobs")


class CVerification(ctypes.Structure):
    """Drafts with their probabilities, and what a verification rule accepts of them."""

    __slots__ = ()
    _fields_ = declared_fields("rules.cpp", "Verification")


class CSuffixDraft(ctypes.Structure):
    """Continuations of a suffix, and the draft tree that the kernels make from them."""

    __slots__ = ()
    _fields_ = declared_fields("suffix.cpp", "SuffixDraft")


def address(tensor: torch.Tensor | None) -> int:
    """Return the address of a tensor; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()
