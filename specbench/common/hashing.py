"""SHA-256 of values and files; of files remembered in the cache, so that none is read twice.

    $SPECBENCH_CACHE/contents/<slot>.json    {"state", "digest"}

A slot is a path (its state: size, times, inode) or the digests that another digest follows from. One small file a slot,
replaced whole: processes side by side need no lock, and what is damaged or cannot be written is only made anew.
"""

import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import StringConstraints

from specbench.common.errors import SpecBenchError
from specbench.common.io import read_json
from specbench.common.storage import atomic_path, cache_root, sha256_of

SETTLED = 50_000_000  # ns since the last change: a file may change twice within one tick of its clock
LARGE = 2 << 30  # bytes; reading so much takes seconds


@dataclass(frozen=True)
class Entry:
    """One remembered digest, valid while `state` is the same."""

    state: str
    digest: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16,64}$")]


def of(value: Any) -> str:
    """SHA-256 of a plain value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def of_file(path: Path) -> str:
    """SHA-256 of a file; read only if it is not the one that was read before. Raises `SpecBenchError`."""
    try:
        path = path.resolve(strict=True)  # the hub's cache links into a folder of blobs
        stat = path.stat()
        state = f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino}"
        settled = not 0 <= time.time_ns() - max(stat.st_mtime_ns, stat.st_ctime_ns) < SETTLED

        def read() -> str:
            if stat.st_size >= LARGE:
                print(
                    f"reading {path.name} ({stat.st_size / 1e9:.0f} GB) once for its SHA-256", file=sys.stderr, flush=True
                )
            return sha256_of(path)

        return remembered(str(path), state, read, keep=settled)
    except OSError as error:
        raise SpecBenchError(f"cannot read {path}: {(error.strerror or str(error)).lower()}") from error


def of_files(paths: Iterable[Path]) -> dict[str, str]:
    """SHA-256 by file name."""
    return {path.name: of_file(path) for path in paths}


def remembered(slot: str, state: str, make: Callable[[], str], keep: bool = True) -> str:
    """The hexadecimal digest that `make` gives, made anew only where `state` is not the one it was made in.

    Args:
        keep: False makes it without remembering it.
    """
    path = cache_root() / "contents" / f"{hashlib.sha256(slot.encode()).hexdigest()[:32]}.json"
    with suppress(SpecBenchError):  # not there, or damaged
        entry: Entry = read_json(path, Entry)
        if entry.state == state:
            return entry.digest
    digest = make()
    if keep:
        with suppress(OSError), atomic_path(path) as temporary:  # a cache that cannot be written costs time, no result
            temporary.write_text(json.dumps(asdict(Entry(state, digest))))
    return digest
