"""A corpus's conversations as token ids, one JSON line each, and a whole corpus of them as one compressed file.

corpus.safetensors.xz    tokens [bytes, n] uint8 | lengths, index [texts] int32 | spans [spans, 3] int32
corpus.json              its provenance and SHA-256
"""

import json
import lzma
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NotRequired

import torch
from pydantic import Field, with_config
from safetensors.torch import load, save
from typing_extensions import TypedDict

from specbench.common.errors import SpecBenchError, refusing
from specbench.common.io import OPEN, parse, read_bytes, read_json
from specbench.common.storage import atomic_path, sha256_of, write_file

PACKED, PACKED_PROVENANCE = "corpus.safetensors.xz", "corpus.json"


@dataclass(frozen=True)
class Dialogue:
    """One conversation as ids. spans: [begin, end) of each turn of the assistant."""

    index: Annotated[int, Field(ge=0)]  # in the shuffled order; those below `validation` are held out
    tokens: list[int]
    spans: list[tuple[int, int]]


@with_config(OPEN)
class PackedSettings(TypedDict, total=False):
    """What is read of a packed corpus's settings."""

    validation: Annotated[int, Field(ge=0)]


@with_config(OPEN)
class PackedHeader(TypedDict):
    """What is read of `corpus.json`."""

    corpus: str
    sha256: str
    target_fingerprint: NotRequired[str]
    settings: NotRequired[PackedSettings]


def to_line(text: Dialogue) -> bytes:
    """A conversation as a JSON line."""
    return json.dumps(vars(text), separators=(",", ":")).encode() + b"\n"


def read_lines(paths: Iterable[Path]) -> dict[int, Dialogue]:
    """The conversations of some files of lines, by index; without lines that a kill cut off."""
    texts: dict[int, Dialogue] = {}
    for path in paths:
        for number, line in enumerate(read_bytes(path).split(b"\n"), 1):
            if line.endswith(b"}"):  # a record holds no other such bracket, so the line is complete
                text: Dialogue = parse(line, Dialogue, f"{path} line {number}")
                texts[text.index] = text
    return texts


def read_header(folder: Path) -> PackedHeader | None:
    """Of the corpus packed in a folder; None without one."""
    path = folder / PACKED_PROVENANCE
    header: PackedHeader | None = read_json(path, PackedHeader) if path.is_file() else None
    return header


def pack(folder: Path, texts: Sequence[Dialogue], vocab_size: int, provenance: dict[str, Any]) -> Path:
    """Write texts as one compressed file of ids, and their provenance beside it."""
    spans = [(i, *s) for i, t in enumerate(texts) for s in t.spans]
    tokens = torch.tensor([i for t in texts for i in t.tokens], dtype=torch.int32)
    tensors = {
        # the low and the high byte of each id apart: they compress better so
        "tokens": tokens.view(torch.uint8).view(-1, 4)[:, : 2 if vocab_size <= 1 << 16 else 4].T.contiguous(),
        "lengths": torch.tensor([len(t.tokens) for t in texts], dtype=torch.int32),
        "index": torch.tensor([t.index for t in texts], dtype=torch.int32),
        "spans": torch.tensor(spans, dtype=torch.int32),
    }
    with atomic_path(folder / PACKED) as temporary:
        temporary.write_bytes(lzma.compress(save(tensors), preset=9 | lzma.PRESET_EXTREME))
        header = provenance | {"sha256": sha256_of(temporary)}
        write_file(folder / PACKED_PROVENANCE, json.dumps(header, indent=1) + "\n")
    return folder / PACKED


def unpack_checked(folder: Path, corpus: str) -> list[Dialogue]:
    """The texts packed in a folder; none if they are not of the corpus with this digest.

    Raises:
        SpecBenchError: the file has another hash than its provenance says, or is damaged.
    """
    path, header = folder / PACKED, read_header(folder)
    if header is None or header["corpus"] != corpus or not path.is_file():
        return []
    return unpack(path, header["sha256"])


def unpack(path: Path, sha256: str | None = None) -> list[Dialogue]:
    """The texts of a packed corpus. Raises `SpecBenchError` for a file that is damaged, or has another hash than given."""
    if sha256 is not None and sha256_of(path) != sha256:
        raise SpecBenchError(f"{path} has not the SHA-256 that {PACKED_PROVENANCE} names; fetch it again")
    with refusing(f"{path} is damaged or cut off; fetch it again"):
        tensors = load(lzma.decompress(read_bytes(path)))
        planes = tensors["tokens"].long()  # [bytes, n]
        tokens = torch.stack([plane << (8 * i) for i, plane in enumerate(planes)]).sum(0)
        spans: dict[int, list[tuple[int, int]]] = {}
        for text, begin, end in tensors["spans"].tolist():
            spans.setdefault(text, []).append((begin, end))
        pieces = zip(tensors["index"].tolist(), tokens.split(tensors["lengths"].tolist()), strict=True)
        return [Dialogue(index, piece.tolist(), spans.get(i, [])) for i, (index, piece) in enumerate(pieces)]
