"""The header of a GGUF file: its metadata, and the place of each tensor. The file is mapped into memory.

The format is that of docs/gguf.md of ggml. A model may be split over several files, `NAME-00001-of-00003.gguf` and so
on. The first file has the metadata.
"""

import mmap
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from struct import Struct, error
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.errors import OutriderError, UnsupportedModel
from outrider.runtime.mapped_files import MappedTensor, map_file

FLOATS = ("F32", "F16", "BF16")
ROTARY_FACTORS = "rope_freqs.weight"
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9  # types of metadata values
_SCALARS: Mapping[int, Struct] = MappingProxyType(
    {
        0: Struct("<B"),
        1: Struct("<b"),
        2: Struct("<H"),
        3: Struct("<h"),
        4: Struct("<I"),
        5: Struct("<i"),
        6: Struct("<f"),
        7: Struct("<?"),
        10: Struct("<Q"),
        11: Struct("<q"),
        12: Struct("<d"),
    }
)
_COUNT = Struct("<Q")
_TYPE = Struct("<I")
_ARRAY_HEAD = Struct("<IQ")  # type and number of the elements
_FILE_HEAD = Struct("<4sIQQ")  # magic, version, number of tensors, number of metadata values
_ALIGNMENT = 32  # of the tensors, unless general.alignment says otherwise
_PART = re.compile(r"^(?P<name>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})$")
_FIX = "download it again"


class BlockType(NamedTuple):
    """A type of tensors: `elements` values of a row take `size` bytes."""

    name: str
    elements: int
    size: int


# By the number of the type in ggml.h.
_BLOCK_TYPES: Mapping[int, BlockType] = MappingProxyType(
    {
        0: BlockType("F32", 1, 4),
        1: BlockType("F16", 1, 2),
        2: BlockType("Q4_0", 32, 18),
        3: BlockType("Q4_1", 32, 20),
        6: BlockType("Q5_0", 32, 22),
        7: BlockType("Q5_1", 32, 24),
        8: BlockType("Q8_0", 32, 34),
        10: BlockType("Q2_K", 256, 84),
        11: BlockType("Q3_K", 256, 110),
        12: BlockType("Q4_K", 256, 144),
        13: BlockType("Q5_K", 256, 176),
        14: BlockType("Q6_K", 256, 210),
        16: BlockType("IQ2_XXS", 256, 66),
        17: BlockType("IQ2_XS", 256, 74),
        18: BlockType("IQ3_XXS", 256, 98),
        19: BlockType("IQ1_S", 256, 50),
        20: BlockType("IQ4_NL", 32, 18),
        21: BlockType("IQ3_S", 256, 110),
        22: BlockType("IQ2_S", 256, 82),
        23: BlockType("IQ4_XS", 256, 136),
        27: BlockType("I64", 1, 8),
        29: BlockType("IQ1_M", 256, 56),
        30: BlockType("BF16", 1, 2),
        34: BlockType("TQ1_0", 256, 54),
        35: BlockType("TQ2_0", 256, 66),
        39: BlockType("MXFP4", 32, 17),
        40: BlockType("NVFP4", 64, 36),
    }
)


class Strings(Sequence[str]):
    """An array of strings in the mapped file. They are decoded when they are used."""

    def __init__(self, data: mmap.mmap, ends: NDArray[np.int64], first: int) -> None:
        """Refer to strings in `data`. Each is preceded by its length of 8 bytes.

        Args:
            ends: the end of each string.
            first: where the array begins.
        """
        self._data = data
        self._ends = ends
        self._first = first

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        i = range(len(self))[at]
        begin = (int(self._ends[i - 1]) if i else self._first) + _COUNT.size
        return str(self._data[begin : int(self._ends[i])], "utf-8", "replace")

    def __iter__(self) -> Iterator[str]:
        first = self._first
        data = self._data[first : int(self._ends[-1])] if len(self) else b""
        begin = _COUNT.size
        for end in (self._ends - first).tolist():
            yield data[begin:end].decode("utf-8", "replace")
            begin = end + _COUNT.size


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFFile:
    """The contents of a GGUF file. Nothing but the header is in memory."""

    path: Path
    fields: Mapping[str, Any]  # metadata; arrays are lists, or `Strings`
    tensors: Mapping[str, MappedTensor]

    @property
    def architecture(self) -> str:
        """The name of the architecture in llama.cpp, which is also the first part of the names of its fields."""
        return str(self.fields.get("general.architecture", ""))

    def field(self, name: str, default: Any = None) -> Any:
        return self.fields.get(name, default)

    def size(self, name: str, default: Any = None) -> Any:
        """Return a field of the architecture, such as `block_count`.

        Raises:
            OutriderError: there is none, and no default.
        """
        key = f"{self.architecture}.{name}"
        if (value := self.fields.get(key, default)) is None:
            raise OutriderError(f"{self.path} has no field {key}; convert the model again")
        return value

    def end_ids(self) -> frozenset[int]:
        """Return the ids of tokens that end a generation."""
        ids = [self.field(f"tokenizer.ggml.{key}") for key in _END_KEYS]
        return frozenset(int(each) for each in ids if each is not None)

    def rotary_factors(self) -> list[float] | None:
        """Return the divisors of the rotary frequencies [R / 2]; None: there are none."""
        return self.floats(ROTARY_FACTORS) if ROTARY_FACTORS in self.tensors else None

    def floats(self, name: str) -> list[float]:
        """Return the values of a tensor of type F32. Raises OutriderError if there is none."""
        if name not in self.tensors:
            raise OutriderError(f"{self.path} has no tensor {name}; {_FIX}, or convert the model again")
        return list(map(float, self.tensors[name].data.view(np.float32)))

    @property
    def types(self) -> list[str]:
        """The names of the types of its matrices."""
        return sorted({tensor.kind for tensor in self._matrices})

    @property
    def bits(self) -> float:
        """Mean bits per weight of its matrices."""
        size = sum(tensor.data.nbytes for tensor in self._matrices)
        return 8 * size / sum(prod(tensor.shape) for tensor in self._matrices)

    @property
    def least_bits(self) -> float:
        """Bits per weight of the smallest type of its matrices."""
        return min(8 * tensor.data.nbytes / prod(tensor.shape) for tensor in self._matrices)

    @property
    def _matrices(self) -> list[MappedTensor]:
        return [tensor for tensor in self.tensors.values() if len(tensor.shape) > 1]

    @property
    def quantized(self) -> bool:
        """Whether a matrix has quantized blocks."""
        return not set(self.types) <= set(FLOATS)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.data.nbytes for tensor in self.tensors.values())


def parts_of(path: Path) -> list[Path]:
    """Return the files of a model, which may be split. Parts that are missing are among them."""
    match = _PART.match(path.stem)
    if match is None:
        return [path]
    count = int(match["parts"])
    return [path.with_name(f"{match['name']}-{i:05d}-of-{count:05d}{path.suffix}") for i in range(1, count + 1)]


def read_gguf(path: Path) -> GGUFFile:
    """Read the header of a file, and of the other parts if the model is split. An unchanged file is read once.

    Raises:
        OutriderError: the file or a part of it is missing, damaged or truncated.
        UnsupportedModel: a tensor has an unknown type.
    """
    parts = parts_of(path)
    if parts[0] != path:
        raise OutriderError(f"{path} is a part of a model; give the first part, {parts[0].name}")
    states = tuple(map(_state, parts))
    if states[0] and (missing := next((part for part, state in zip(parts, states, strict=True) if not state), None)):
        raise OutriderError(f"{path} is one of {len(parts)} parts, and {missing.name} is missing; download it, too")
    return _read_model(path, states)


def _state(path: Path) -> tuple[int, ...]:
    """Return the size and the time of a file, which identify its contents; () if there is none."""
    try:
        status = path.stat()
    except OSError:
        return ()  # reading it gives the reason
    return status.st_size, status.st_mtime_ns


@lru_cache(maxsize=4)
def _read_model(path: Path, states: tuple[tuple[int, ...], ...]) -> GGUFFile:
    """Read all parts of a model, which have these states."""
    file = _read_part(path)
    tensors = dict(file.tensors)
    for i, part in enumerate(parts_of(path)):
        read = _read_part(part) if i else file
        if (number := read.field("split.no", i)) != i:
            raise OutriderError(
                f"{part} is part {number + 1} of a model by its contents and part {i + 1} by its name; give the parts"
                " the names that they had, or download them again"
            )
        tensors |= read.tensors
    expected = file.field("split.tensors.count")
    if expected is not None and expected != len(tensors):
        raise OutriderError(f"the parts of {path} have {len(tensors)} tensors and should have {expected}; {_FIX}")
    return GGUFFile(path=path, fields=file.fields, tensors=MappingProxyType(tensors))


def _read_part(path: Path) -> GGUFFile:
    try:
        with path.open("rb") as content:
            magic = content.read(len(_MAGIC))
            if magic != _MAGIC:
                found = f"its first bytes are {magic!r} and not {_MAGIC!r}" if magic else "it is empty"
                raise OutriderError(f"{path} is no GGUF file: {found}; download it again, or give another file")
        data = map_file(path)
    except OSError as reason:
        raise _unreadable(path, reason) from reason
    try:
        return _Reader(data).read(path)
    except OutriderError:
        raise
    except (error, IndexError, OverflowError, MemoryError, ValueError) as reason:
        raise OutriderError(f"{path} is damaged or truncated; {_FIX}") from reason


def _unreadable(path: Path, reason: OSError) -> OutriderError:
    fix = "change its permissions" if isinstance(reason, PermissionError) else "give the path of a GGUF file"
    return OutriderError(f"{path} cannot be read ({reason.strerror}); {fix}")


class _Reader:
    """Reads one file from its beginning."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def read(self, path: Path) -> GGUFFile:
        """Return the contents. Raises struct.error or IndexError if the file ends early."""
        _, version, num_tensors, num_fields = self._unpack(_FILE_HEAD)
        if version not in _VERSIONS:
            raise UnsupportedModel(
                f"{path} has version {version} of the GGUF format, and versions 2 and 3 are supported; convert the"
                " model again"
            )
        fields = {}
        for _ in range(num_fields):
            name = self._string()
            (kind,) = self._unpack(_TYPE)
            fields[name] = self._value(kind)
        places = [self._place(path) for _ in range(num_tensors)]
        alignment = int(fields.get("general.alignment", _ALIGNMENT))
        start = -(-self._at // alignment) * alignment
        needed = max((start + offset + _nbytes(kind, shape) for _, kind, shape, offset in places), default=0)
        if needed > len(self._data):
            raise OutriderError(
                f"{path} is damaged or truncated: it has {len(self._data)} bytes of at least {needed}; {_FIX}"
            )
        tensors = {name: self._tensor(name, kind, shape, start + offset) for name, kind, shape, offset in places}
        return GGUFFile(path=path, fields=MappingProxyType(fields), tensors=MappingProxyType(tensors))

    def _unpack(self, structure: Struct) -> tuple[Any, ...]:
        values = structure.unpack_from(self._data, self._at)
        self._at += structure.size
        return values

    def _string(self) -> str:
        (size,) = self._unpack(_COUNT)
        text = self._data[self._at : self._at + size]
        if len(text) < size:
            raise IndexError("the file ends in a string")
        self._at += size
        return str(text, "utf-8", "replace")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise IndexError(f"unknown type {kind} of a value")
        return self._unpack(_SCALARS[kind])[0]

    def _array(self) -> Any:
        kind, count = self._unpack(_ARRAY_HEAD)
        if kind == _STRING:
            return self._strings(count)
        if kind == _ARRAY:
            return [self._array() for _ in range(count)]
        if kind not in _SCALARS:
            raise IndexError(f"unknown type {kind} of an element")
        dtype = np.dtype(_SCALARS[kind].format)
        values = np.frombuffer(self._data, dtype, count, self._at) if count else np.empty(0, dtype)
        self._at += values.nbytes
        return values.tolist()

    def _strings(self, count: int) -> Strings:
        """Find the strings of an array. Each begins where the one before ends, so this is a plain loop."""
        if count > len(self._data):
            raise IndexError("the file is shorter than an array in it")
        length_at: Callable[[Any, int], tuple[int]] = _COUNT.unpack_from
        data = self._data
        first = at = self._at
        ends: list[int] = []
        for _ in range(count):
            at += _COUNT.size + length_at(data, at)[0]
            ends.append(at)
        if at > len(data):
            raise IndexError("the file ends in an array")
        self._at = at
        return Strings(data, np.array(ends, np.int64), first)

    def _place(self, path: Path) -> tuple[str, BlockType, tuple[int, ...], int]:
        """Return name, type, shape and offset of the next tensor."""
        name = self._string()
        (dims,) = self._unpack(_TYPE)
        if dims > 8:
            raise IndexError("a tensor has more than 8 dimensions")
        sizes = self._unpack(Struct(f"<{dims}Q"))
        number, offset = self._unpack(_ARRAY_HEAD)
        if number not in _BLOCK_TYPES:
            raise UnsupportedModel(
                f"{path}: the tensor {name} has the unknown type {number}; convert the model to one of Q8_0, Q4_K,"
                " Q4_0, BF16, F16"
            )
        return name, _BLOCK_TYPES[number], tuple(reversed(sizes)), offset

    def _tensor(self, name: str, kind: BlockType, shape: tuple[int, ...], begin: int) -> MappedTensor:
        size = _nbytes(kind, shape)
        data = np.frombuffer(self._data, np.uint8, size, begin) if size else np.empty(0, np.uint8)
        return MappedTensor(name=name, kind=kind.name, shape=shape, data=data, file=self._data, begin=begin)


def _nbytes(kind: BlockType, shape: tuple[int, ...]) -> int:
    return prod(shape) // kind.elements * kind.size
