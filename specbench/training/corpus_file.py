"""A corpus's conversations as token ids, one JSON line each, and a whole corpus of them as one compressed file.

Knows neither who wrote the text nor what it is for.

    corpus.safetensors.xz    tokens [bytes, n] uint8 | lengths, index [texts] int32 | spans [spans, 3] int32
    corpus.json              what it is made of, and its SHA-256
"""

import json
import lzma
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import ConfigDict, Field
from safetensors.torch import load, save
from typing_extensions import TypedDict

from specbench.common.errors import SpecBenchError, refusing
from specbench.common.io import parse, read_bytes, read_json
from specbench.common.storage import atomic_path, sha256_of

PACKED, PACKED_PROVENANCE = "corpus.safetensors.xz", "corpus.json"


@dataclass(frozen=True)
class Text:
    """One conversation as ids. spans: [begin, end) of what the assistant said."""

    index: Annotated[int, Field(ge=0)]  # in the shuffled order; those below `validation` are held out
    tokens: list[int]
    spans: list[tuple[int, int]]


class Packed(TypedDict):
    """What is read of `corpus.json`; beside it stands more for people."""

    __pydantic_config__ = ConfigDict(strict=True, extra="allow")  # type: ignore[misc]
    corpus: str
    sha256: str


def to_line(index: int, tokens: Sequence[int], spans: Sequence[tuple[int, int]]) -> bytes:
    """A conversation as a JSON line."""
    record = {"index": index, "tokens": tokens, "spans": spans}
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


def read_lines(paths: Iterable[Path]) -> dict[int, Text]:
    """The conversations of some files of lines, by index; a line that a kill cut off is as if it were not there."""
    found: dict[int, Text] = {}
    for path in paths:
        for number, line in enumerate(read_bytes(path).split(b"\n"), 1):
            if line.endswith(b"}"):  # a record's only bracket of this kind: it is whole
                text: Text = parse(line, Text, f"{path} line {number}")
                found[text.index] = text
    return found


def read_provenance(folder: Path) -> Packed | None:
    """Which corpus lies packed in a folder; None where none does."""
    path = folder / PACKED_PROVENANCE
    found: Packed | None = read_json(path, Packed) if path.is_file() else None
    return found


def pack(folder: Path, texts: Sequence[Text], vocab_size: int, provenance: dict[str, Any]) -> Path:
    """Write texts as one compressed file of ids, and beside it what they are."""
    spans = [(i, *s) for i, t in enumerate(texts) for s in t.spans]
    tokens = torch.tensor([i for t in texts for i in t.tokens], dtype=torch.int32)
    tensors = {
        # the low and the high byte of each id apart: they compress better so
        "tokens": tokens.view(torch.uint8).view(-1, 4)[:, : 2 if vocab_size <= 1 << 16 else 4].T.contiguous(),
        "lengths": torch.tensor([len(t.tokens) for t in texts], dtype=torch.int32),
        "index": torch.tensor([t.index for t in texts], dtype=torch.int32),
        "spans": torch.tensor(spans, dtype=torch.int32),
    }
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_path(folder / PACKED) as temporary:
        temporary.write_bytes(lzma.compress(save(tensors), preset=9 | lzma.PRESET_EXTREME))
        about = provenance | {"sha256": sha256_of(temporary)}
        (folder / PACKED_PROVENANCE).write_text(json.dumps(about, indent=1) + "\n")
    return folder / PACKED


def unpack_checked(folder: Path, corpus: str) -> list[Text]:
    """The texts packed in a folder; none if they are not of the corpus with this digest.

    Raises:
        SpecBenchError: the file is not the one that its provenance names, or is damaged.
    """
    path, about = folder / PACKED, read_provenance(folder)
    if about is None or about["corpus"] != corpus or not path.is_file():
        return []
    if sha256_of(path) != about["sha256"]:
        raise SpecBenchError(f"{path} has not the SHA-256 that {PACKED_PROVENANCE} names; fetch it again")
    return unpack(path)


def unpack(path: Path) -> list[Text]:
    """The dialogues of a packed corpus. Raises `SpecBenchError`."""
    with refusing(f"{path} is damaged or cut off; fetch it again"):
        return _texts(load(lzma.decompress(read_bytes(path))))


def _texts(tensors: dict[str, torch.Tensor]) -> list[Text]:
    planes = tensors["tokens"].long()  # [bytes, n]
    tokens = sum(plane << (8 * i) for i, plane in enumerate(planes))
    assert isinstance(tokens, torch.Tensor)
    spans: dict[int, list[tuple[int, int]]] = {}
    for text, begin, end in tensors["spans"].tolist():
        spans.setdefault(text, []).append((begin, end))
    pieces = tokens.split(tensors["lengths"].tolist())
    index = tensors["index"].tolist()
    return [Text(index[i], piece.tolist(), spans.get(i, [])) for i, piece in enumerate(pieces)]
