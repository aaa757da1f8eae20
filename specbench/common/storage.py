"""Folders of checkout and cache, and atomic writing."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

from specbench.common.errors import SpecBenchError, visible

PROJECT = Path(__file__).resolve().parents[2]  # the checkout: folders in a configuration start here


def cache_root() -> Path:
    """`$SPECBENCH_CACHE`, or `~/.cache/specbench`. Raises `SpecBenchError` for a user without a home folder."""
    return user_path(os.environ.get("SPECBENCH_CACHE") or "~/.cache/specbench", "set SPECBENCH_CACHE to another folder")


def user_path(path: str, hint: str = "write the folder in full") -> Path:
    """A path in which a leading `~` or `~user` stands for a home folder. Raises `SpecBenchError` if there is none."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise SpecBenchError(f"{visible(path)}: there is no such home folder; {hint}") from error


def sha256_of(path: Path) -> str:
    """Hexadecimal digest of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def atomic_path(final: Path):
    """A temporary path for a file or folder, which is renamed to `final` if the block raises nothing.

    Of two processes, the last one wins for a file, the first one for a folder.
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
    """Raises `SpecBenchError` for a folder in which nothing can be written, before the work whose result goes there."""
    parent = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not parent.is_dir():
        raise SpecBenchError(f"{folder} cannot be a folder, since {parent} is a file; choose another one")
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".specbench.", dir=parent))  # permissions alone do not decide it
    except OSError as error:
        raise SpecBenchError(f"nothing can be written to {folder} ({error.strerror}); choose another folder") from error


def cached(name: str, make: Callable[[Path], None]) -> Path:
    """The path of the cache entry `name`, written by `make(temporary path)` if it is missing."""
    final = cache_root() / name
    if not final.exists():
        with atomic_path(final) as temporary:
            make(temporary)
    return final
