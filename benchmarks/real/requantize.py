"""Write the tensors of a GGUF file in another type, with the same metadata.

llama.cpp has a program for this, `llama-quantize`. This script needs only the package gguf. Norms and biases stay in
float32. With a type of fewer than 8 bits, the embedding and the output layer are written as Q8_0.
"""

from collections import Counter
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType, quants

_WIDE = ("token_embd.weight", "output.weight")
_REPLACED = ("general.architecture", "general.file_type")  # the writer adds the architecture itself


class Type(StrEnum):
    """Types that the package gguf can write and Outrider can read."""

    F16 = "F16"
    BF16 = "BF16"
    Q8_0 = "Q8_0"
    Q4_0 = "Q4_0"
    Q4_1 = "Q4_1"


_FILE_TYPES = {
    Type.F16: LlamaFileType.MOSTLY_F16,
    Type.BF16: LlamaFileType.MOSTLY_BF16,
    Type.Q8_0: LlamaFileType.MOSTLY_Q8_0,
    Type.Q4_0: LlamaFileType.MOSTLY_Q4_0,
    Type.Q4_1: LlamaFileType.MOSTLY_Q4_1,
}


def main(
    file: Annotated[Path, typer.Argument(help="The GGUF file to read.")],
    out: Annotated[Path, typer.Argument(help="The GGUF file to write.")],
    type: Annotated[Type, typer.Option(case_sensitive=False, help="Type of the matrices.")],
) -> None:
    """Convert all matrices. Print the number of tensors of each type."""
    reader = GGUFReader(file)
    out.parent.mkdir(parents=True, exist_ok=True)
    writer = GGUFWriter(out, arch=reader.fields["general.architecture"].contents())
    _copy_metadata(reader, writer)
    writer.add_file_type(_FILE_TYPES[type])
    counts: Counter[str] = Counter()
    for tensor in reader.tensors:
        to = _type(tensor.name, [int(size) for size in tensor.shape], type)
        values = quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, quants.quantize(values, to), raw_dtype=to)
        counts[to.name] += 1
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    print(f"{out}: {', '.join(f'{count} x {name}' for name, count in sorted(counts.items()))}")


def _copy_metadata(reader: GGUFReader, writer: GGUFWriter) -> None:
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in _REPLACED:
            continue
        value_type = field.types[0]
        sub_type = field.types[-1] if value_type == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), value_type, sub_type=sub_type)


def _type(name: str, shape: list[int], wanted: Type) -> GGMLQuantizationType:
    """Return the type of a tensor. The first dimension of `shape` is the length of a row, which holds whole blocks."""
    if len(shape) < 2:
        return GGMLQuantizationType.F32
    to = GGMLQuantizationType[wanted]
    block, num_bytes = GGML_QUANT_SIZES[to]
    if shape[0] % block:
        return GGMLQuantizationType.F16
    return GGMLQuantizationType.Q8_0 if num_bytes < block and name in _WIDE else to


if __name__ == "__main__":
    typer.run(main)
