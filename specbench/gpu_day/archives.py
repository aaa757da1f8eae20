"""Results as few small files, and packages as pieces: what a machine takes and gives back is limited in size.

A stage's results are one archive, cut into files `<stage>-results.tar.gz.0`, `.1`, …; joined in order they are the archive.
"""

import hashlib
import io
import itertools
import os
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from specbench.common.errors import SpecBenchError
from specbench.common.storage import write_file

FILES, FILE_BYTES = 4, 16 << 20  # that come back at most, 64 MiB
PACKAGE_BYTES = 48 << 20  # of a package's piece: a machine takes 64 MiB, a checkout without rows and weights included
SUMS = "SHA256SUMS"


def write(work: Path, out: Path, stage: str) -> list[str]:
    """Pack the files of `work` into at most `FILES` files; returns the names of those left out for want of room.

    Small files go first: rows and logs before traces and weights.
    """
    files = sorted((p for p in work.rglob("*") if p.is_file() and not p.is_symlink()), key=lambda p: p.stat().st_size)
    sizes = itertools.accumulate(len(_archive(work, [path])) for path in files)  # an archive of all is smaller
    count = sum(size <= FILES * FILE_BYTES for size in sizes)
    data = _archive(work, files[:count])
    left_out = [str(p.relative_to(work)) for p in files[count:]]
    if left_out:
        print(f"{stage}: no room to bring back {', '.join(left_out)}", flush=True)
    names = [f"{_prefix(stage)}{number}" for number in range(-(-len(data) // FILE_BYTES))]
    for number, name in enumerate(names):
        write_file(out / name, data[number * FILE_BYTES : (number + 1) * FILE_BYTES])
    for path in out.glob(f"{_prefix(stage)}*"):
        if path.name not in names:
            path.unlink()
    return left_out


def read(folder: Path, stage: str, work: Path) -> bool:
    """Unpack results that an earlier run of the stage brought back, to go on with; False if there are none."""
    pieces = sorted(folder.glob(f"{_prefix(stage)}*"), key=lambda p: int(p.name.rpartition(".")[2]))
    if not pieces:
        return False
    unpack(pieces, work)
    return True


def pack(files: Iterable[tuple[Path, str]], folder: Path) -> list[Path]:
    """Files under the names that they get, as pieces in folders `1`, `2`, …, one package each; returns the folders.

    Every package holds the digests of all pieces, so that it is known which one arrives last.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=6) as archive:
        for path, name in files:
            archive.add(path, name, recursive=False)
    data = buffer.getbuffer()
    pieces = [data[i : i + PACKAGE_BYTES] for i in range(0, len(data), PACKAGE_BYTES)]
    names = [f"piece.{number:03}" for number in range(len(pieces))]
    sums = "".join(f"{hashlib.sha256(p).hexdigest()}  {n}\n" for p, n in zip(pieces, names, strict=True))
    folders = []
    for number, (piece, name) in enumerate(zip(pieces, names, strict=True), 1):
        folders.append(folder / str(number))
        write_file(folders[-1] / name, bytes(piece))
        write_file(folders[-1] / SUMS, sums)
    return folders


def unpack(pieces: Iterable[Path], folder: Path) -> None:
    """Join pieces and unpack the archive. Raises `SpecBenchError` if it is damaged or reaches out of the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    data = io.BytesIO(b"".join(piece.read_bytes() for piece in pieces))
    try:
        with tarfile.open(fileobj=data, mode="r:gz") as archive:
            archive.extractall(folder, filter="data")
    except (tarfile.TarError, OSError, EOFError) as error:
        raise SpecBenchError(f"{folder}: the pieces are no whole archive ({error}); fetch them again") from error


def _archive(work: Path, files: Iterable[Path]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=6) as archive:
        for path in files:
            archive.add(path, str(path.relative_to(work)))
    return buffer.getvalue()


def _prefix(stage: str) -> str:
    return f"{stage}-results.tar.gz."


def tree(folder: Path, below: str) -> Iterator[tuple[Path, str]]:
    """The files of a folder, links followed, and their names below another one, as `pack` takes them."""
    for place, _, names in os.walk(folder, followlinks=True):
        for name in sorted(names):
            path = Path(place) / name
            yield path.resolve(), f"{below}/{path.relative_to(folder)}"
