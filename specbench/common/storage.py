"""The checkout's and the cache's folder, and files that are written whole or not at all."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

from specbench.common.errors import SpecBenchError

PROJECT = Path(__file__).resolve().parents[2]  # the checkout: folders in a configuration start here


def cache_root() -> Path:
    """`$SPECBENCH_CACHE`, or `~/.cache/specbench`."""
    return Path(os.environ.get("SPECBENCH_CACHE") or Path.home() / ".cache" / "specbench").expanduser()


def sha256_of(path: Path) -> str:
    """Hex digest of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def atomic_path(final: Path):
    """A temporary sibling to write to, a file or a folder; renamed to `final` only if the block ends well.

    Of two processes that race, the last rename wins for a file and the first for a folder; both are whole.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent))
    try:
        temporary = scratch / final.name
        yield temporary
        try:
            os.replace(temporary, final)
        except OSError:
            if not final.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def require_writable(folder: Path) -> None:
    """Refuse a place where nothing can be written, before the work whose result belongs there."""
    above = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not above.is_dir():
        raise SpecBenchError(f"{folder} cannot be a folder, since {above} is a file; choose another one")
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".specbench.", dir=above))  # permissions alone do not say it
    except OSError as error:
        raise SpecBenchError(f"nothing can be written to {folder} ({error.strerror}); choose another folder") from error


def cached(name: str, make: Callable[[Path], None]) -> Path:
    """The cache entry `name`, made by `make(temporary path)` if it is not there yet."""
    final = cache_root() / name
    if not final.exists():
        with atomic_path(final) as temporary:
            make(temporary)
    return final
