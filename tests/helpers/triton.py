"""Run Triton kernels on CPU tensors, and build them for GPUs that this machine does not have."""

from __future__ import annotations

import re
import subprocess
import sys
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


class Launch(NamedTuple):
    """A launch of a kernel: the values of its arguments by name, and num_warps and num_stages."""

    kernel: runtime.JITFunction
    arguments: dict[str, Any]
    options: dict[str, int]

    def build(self, capability: int, cache: Path) -> Build:
        """Compile the kernel as for this launch; see `build`."""
        types = {name: TYPES[_kind(value)] for name, value in self.arguments.items() if _kind(value) in TYPES}
        constant = {p.name for p in self.kernel.params if p.is_constexpr or self.arguments.get(p.name) is None}
        constants = {name: self.arguments[name] for name in constant if name in self.arguments}
        types = {name: kind for name, kind in types.items() if name not in constant}
        return build(self.kernel, types, constants, capability=capability, cache=cache, **self.options)


TYPES = {
    int: "i32",
    float: "fp32",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
    torch.int8: "*i8",
}


def _kind(value):
    return getattr(value, "dtype", type(value))


@contextmanager
def recorded(*modules: ModuleType) -> Iterator[list[Launch]]:
    """Note the launches of the kernels of `modules` instead of running them. Tensors may be on the meta device."""
    launches: list[Launch] = []

    class Recorder:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            def note(*values, **named):
                names = self.kernel.arg_names
                arguments = dict(zip(names, values, strict=False)) | {k: v for k, v in named.items() if k in names}
                options = {name: value for name, value in named.items() if name not in names}
                launches.append(Launch(self.kernel, arguments, options))

            return note

    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            for name, value in list(vars(module).items()):
                if isinstance(value, runtime.JITFunction):
                    patch.setattr(module, name, Recorder(value))
        yield launches


@contextmanager
def interpreted(*modules: ModuleType) -> Iterator[None]:
    """Run the kernels of `modules` in Triton's interpreter, on CPU tensors, while the context is open.

    Those of the modules that they import from run there as well. The modules keep their compiled form afterwards:
    `build` works before, after and beside it, outside the context.
    """
    with pytest.MonkeyPatch.context() as patch:
        for module in _with_imported(language, standard, *modules):
            for name, value in list(vars(module).items()):
                if isinstance(value, runtime.JITFunction):
                    patch.setattr(module, name, interpreter.InterpretedFunction(value.fn))
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", _dot)
        patch.setattr(interpreter.InterpreterBuilder, "cast_impl", _cast)
        patch.setattr(triton.knobs.runtime, "interpret", True)
        patch.setattr(interpreter, "_patch_lang", _patch_once(patch))
        yield


def _with_imported(*modules: ModuleType) -> list[ModuleType]:
    """Return modules, and those whose kernels or functions they import, without the packages of others."""
    found = dict.fromkeys(modules)
    waiting = list(modules)
    while waiting:
        for value in vars(waiting.pop()).values():
            owner = sys.modules.get(getattr(getattr(value, "fn", value), "__module__", None) or "")
            if owner not in found and owner and owner.__name__.startswith("outrider.models.triton."):
                found[owner] = None
                waiting.append(owner)
    return list(found)


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
