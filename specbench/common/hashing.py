"""SHA-256 of values and files; digests of files are cached, so that an unchanged file is read once.

    $SPECBENCH_CACHE/contents/<slot>.json    {"state", "digest"}

A slot is a path (with size, times and inode as state), or the digests that another digest is computed from. Each is one
small file that is replaced atomically, so that no locks are needed; a damaged one is computed again.
"""

import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Annotated, Any

from pydantic import StringConstraints

from specbench.common.errors import SpecBenchError
from specbench.common.io import read_json
from specbench.common.storage import atomic_path, cache_root, sha256_of

SETTLED_NS = 50_000_000  # since the last change: a file may change twice within one tick of its clock
LARGE = 2 << 30  # bytes of a file whose reading is announced


@dataclass(frozen=True)
class Entry:
    """A cached digest, valid while `state` is the same."""

    state: str
    digest: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16,64}$")]


def of(value: Any) -> str:
    """SHA-256 of a plain value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def of_file(path: Path) -> str:
    """SHA-256 of a file, which is read only if it changed since the last time. Raises `SpecBenchError`."""
    try:
        path = path.resolve(strict=True)  # the hub's cache links into a folder of blobs
        stat = path.stat()
        if not S_ISREG(stat.st_mode):  # reading a pipe or a device may never end
            raise SpecBenchError(f"cannot read {path}: not a regular file; move it away")
        state = f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino}"
        settled = not 0 <= time.time_ns() - max(stat.st_mtime_ns, stat.st_ctime_ns) < SETTLED_NS

        def read() -> str:
            if stat.st_size >= LARGE:
                size = f"{stat.st_size / 1e9:.0f} GB"
                print(f"reading {path.name} ({size}) once for its SHA-256", file=sys.stderr, flush=True)
            return sha256_of(path)

        return remembered(str(path), state, read, keep=settled)
    except OSError as error:
        raise SpecBenchError(f"cannot read {path}: {(error.strerror or str(error)).lower()}") from error


def of_files(paths: Iterable[Path]) -> dict[str, str]:
    """SHA-256 by file name."""
    return {path.name: of_file(path) for path in paths}


def remembered(slot: str, state: str, make: Callable[[], str], keep: bool = True) -> str:
    """The hexadecimal digest of `make()`, from the cache if its `state` is the same. keep: write it to the cache?"""
    path = cache_root() / "contents" / f"{hashlib.sha256(slot.encode()).hexdigest()[:32]}.json"
    with suppress(SpecBenchError):  # missing or damaged
        entry: Entry = read_json(path, Entry)
        if entry.state == state:
            return entry.digest
    digest = make()
    if keep:
        with (
            suppress(OSError, SpecBenchError),
            atomic_path(path) as temporary,
        ):  # without a writable cache it is computed again
            temporary.write_text(json.dumps(asdict(Entry(state, digest))))
    return digest
