"""Run Triton kernels on CPU tensors, and build them for GPUs that this machine does not have."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy
import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton has no package for this platform")

from triton import language, runtime  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.language import standard  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

CAPABILITIES = (80, 90, 100)
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Build(NamedTuple):
    """What a kernel needs on a GPU: bytes of shared memory, registers of a thread, bytes of stack (its spills)."""

    shared: int
    registers: int
    stack: int


@contextmanager
def interpreted(*modules: ModuleType) -> Iterator[None]:
    """Run the kernels of `modules` in Triton's interpreter, on CPU tensors, while the context is open.

    The modules keep their compiled form afterwards: `build` works before, after and beside it, outside the context.
    """
    with pytest.MonkeyPatch.context() as patch:
        for module in (language, standard, *modules):
            for name, value in list(vars(module).items()):
                if isinstance(value, runtime.JITFunction):
                    patch.setattr(module, name, interpreter.InterpretedFunction(value.fn))
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", _dot)
        patch.setattr(interpreter.InterpreterBuilder, "cast_impl", _cast)
        patch.setattr(triton.knobs.runtime, "interpret", True)
        patch.setattr(interpreter, "_patch_lang", _patch_once(patch))
        yield


def _patch_once(patch):
    """Return a `_patch_lang` that changes the language once for each module, until `patch` is undone.

    The interpreter's own does so at each call, which takes most of the time, and does not undo all of it.
    """

    class Scope(interpreter._LangPatchScope):
        def set_attr(self, owner, name, value):
            # NumPy 2.4 makes no number of an array with one dimension, as which the interpreter holds numbers.
            index = name == "__index__"
            patch.setattr(owner, name, _as_number if index else value, raising=False)

    original = interpreter._patch_lang
    patch.setattr(interpreter, "_LangPatchScope", Scope)
    scopes = {}

    def patch_language(function):
        module = function.__globals__["__name__"]
        if module not in scopes:
            scopes[module] = original(function)
        return scopes[module]

    return patch_language


def _as_number(tensor):
    return tensor.handle.data.item()


def _dot(builder, left, right, start, input_precision, max_num_imprecise_acc):
    """Multiply bfloat16 as well, of which the interpreter multiplies the raw bits.

    Each element is summed in one order: in a product of BLAS, the order may depend on the place of the row.
    """
    numbers = (_numbers(side).astype(start.data.dtype) for side in (left, right))
    product = numpy.einsum("...ik,...kj->...ij", *numbers)
    return interpreter.TensorHandle(product + start.data, start.dtype.scalar)


def _cast(builder, source, target):
    """Convert numbers; to bfloat16 with rounding, where the interpreter cuts the last bits off."""
    if target.scalar == language.bfloat16:
        rounded = torch.from_numpy(numpy.ascontiguousarray(_numbers(source), dtype=numpy.float32)).bfloat16()
        return interpreter.TensorHandle(rounded.view(torch.uint16).numpy(), language.bfloat16)
    return interpreter.TensorHandle(_numbers(source).astype(interpreter._get_np_dtype(target)), target.scalar)


def _numbers(handle):
    """Return the numbers of a handle: the interpreter keeps the bits of bfloat16 as whole numbers."""
    if handle.dtype.scalar == language.bfloat16:
        return (handle.data.astype(numpy.uint32) << 16).view(numpy.float32)
    return handle.data


def build(
    kernel: runtime.JITFunction,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    *,
    capability: int,
    cache: Path,
    **options: int,
) -> Build:
    """Compile a kernel to machine code for a compute capability (80, 90, 100) and return what it needs.

    Args:
        kernel: a `triton.jit` function.
        types: the type of each argument that is no constant, such as `*bf16`, `i32`. Pointers and whole numbers are
            taken as divisible by 16, as addresses and most strides are: otherwise Triton neither vectorizes nor
            pipelines loads. Those in the kernel's `do_not_specialize` and `do_not_specialize_on_alignment` are not.
        constants: the values of the `tl.constexpr` arguments.
        cache: a folder for what the compiler writes.
        options: num_warps, num_stages.
    """
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    attributes = {}
    for parameter in kernel.params:
        is_loose = parameter.do_not_specialize or parameter.do_not_specialize_on_alignment
        if not types.get(parameter.name, "fp").startswith("fp") and not is_loose:
            attributes[(parameter.num,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, dict(constants), attributes)
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(cache)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    binary = cache / f"{compiled.hash}.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    command = [str(TOOLS / "cuobjdump"), "-res-usage", str(binary)]
    usage = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    fields = dict(re.findall(r"(\w+):(\d+)", usage))
    return Build(compiled.metadata.shared, int(fields["REG"]), int(fields["STACK"]))
