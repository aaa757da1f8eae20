"""GGUF files, which other engines read: the one that a model's wheel ships, and copies of it in another precision.

Needs no torch. The copies are made of the values that a target loaded from the same wheel has: those of the shipped file,
rounded to bfloat16 (`specbench.engine.loading`).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, LlamaFileType, quants

from specbench.common.errors import refusing
from specbench.common.storage import cached

Precision = Literal["F32", "F16", "Q8_0"]
FILE_TYPE = "general.file_type"
EXACT = "specbench.exact"  # of a copy: no value was rounded


@dataclass(frozen=True)
class GgufFile:
    """precision: of its matrices. exact: it holds the very values of a target loaded from the same wheel."""

    path: Path
    precision: str
    exact: bool


def in_precision(shipped: Path, precision: Precision | None) -> GgufFile:
    """The shipped file, or its copy in another precision, which is made once. Raises `SpecBenchError` if it is no GGUF."""
    path = shipped
    if precision is not None:
        name = f"gguf/{shipped.parent.name}/{shipped.stem}-{precision}.gguf"
        path = cached(name, lambda temporary: _copy(shipped, temporary, GGMLQuantizationType[precision]))
    fields = _read(path).fields
    kind = LlamaFileType(fields[FILE_TYPE].contents()).name.partition("_")[2]  # such as MOSTLY_Q4_1
    return GgufFile(path, kind, EXACT in fields and bool(fields[EXACT].contents()))


def first_embedding(shipped: Path) -> np.ndarray:
    """[D] float32: the embedding of id 0, by which a file is known to be of a model."""
    table = next(tensor for tensor in _read(shipped).tensors if tensor.name == "token_embd.weight")
    return quants.dequantize(table.data[:1], table.tensor_type)[0]


def _read(path: Path) -> GGUFReader:
    with refusing(f"{path} cannot be read as GGUF; remove it, and it is fetched again"):
        return GGUFReader(path)


def _copy(shipped: Path, path: Path, precision: GGMLQuantizationType) -> None:
    reader = _read(shipped)
    writer = GGUFWriter(path, str(reader.fields[gguf.Keys.General.ARCHITECTURE].contents()))
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in (gguf.Keys.General.ARCHITECTURE, FILE_TYPE):
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1])
    writer.add_file_type(next(kind for kind in LlamaFileType if kind.name.endswith(f"_{precision.name}")))
    exact = True
    for tensor in reader.tensors:
        values = _rounded(quants.dequantize(tensor.data, tensor.tensor_type))
        kind = precision if values.ndim > 1 else GGMLQuantizationType.F32  # engines expect vectors in float32
        stored = quants.quantize(values, kind)
        exact = exact and np.array_equal(quants.dequantize(stored, kind), values)
        writer.add_tensor(tensor.name, stored, raw_dtype=kind)
    writer.add_bool(EXACT, exact)
    _write(writer)


def _rounded(values: np.ndarray) -> Any:
    """Values as a target has them, in float32."""
    kind = GGMLQuantizationType.BF16
    return quants.dequantize(quants.quantize(values, kind), kind)


def _write(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
