"""Folders of checkout and cache, and atomic writing."""

import errno
import functools
import hashlib
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from pathlib import Path

from specbench.common.errors import SpecBenchError, visible

PROJECT = Path(__file__).resolve().parents[2]  # the checkout
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
SCRATCH = ".specbench-"  # begins the names of scratch folders: .specbench-<machine>-<process>-<random>
ABANDONED_S = 86400.0  # age at which a scratch folder of another machine is removed


def cache_root() -> Path:
    """`$SPECBENCH_CACHE`, or `~/.cache/specbench`. Raises `SpecBenchError` for a user without a home folder."""
    return user_path(os.environ.get("SPECBENCH_CACHE") or "~/.cache/specbench", "set SPECBENCH_CACHE to another folder")


def user_path(path: str, hint: str = "write the folder in full") -> Path:
    """A path in which a leading `~` or `~user` stands for a home folder. Raises `SpecBenchError` if there is none."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise SpecBenchError(f"{visible(path)}: there is no such home folder; {hint}") from error


def project_path(path: str) -> Path:
    """A folder of weights or a corpus, as a configuration names it: relative ones start at the checkout.

    Results start at the current folder instead.
    """
    return PROJECT / user_path(path)


def sha256_of(path: Path) -> str:
    """Hexadecimal digest of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def atomic_path(final: Path, root: Path | None = None):
    """A temporary path for a file or folder, which is renamed to `final` if the block raises nothing.

    A symbolic link at `final` is replaced, not followed. Of two processes, the last one wins for a file, the first one for
    a folder. Scratch folders of killed processes are removed when a later process writes into the same folder.

    Args:
        root: folder in which `final` must lie, with all symbolic links below `root` resolved.

    Raises:
        SpecBenchError: `final` lies outside of `root`, or cannot be written; what was there before is unchanged.
    """
    if root is not None:
        _require_inside(final.parent, root)
    scratch = None
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(final.parent)
        scratch = Path(tempfile.mkdtemp(prefix=f"{SCRATCH}{_machine()}-{os.getpid()}-", dir=final.parent))
        yield scratch / final.name
        _replace(scratch / final.name, final)
    except Exception as error:
        if reason := _write_problem(error, scratch):
            advice = "free some space" if "space" in reason.lower() else "repair that or choose another folder"
            message = f"cannot write {final}: {reason}; {advice} and run it again (what was there before is unchanged)"
            raise SpecBenchError(message) from error
        raise
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)


def write_file(path: Path, content: str | bytes, root: Path | None = None) -> None:
    """Write a whole file atomically, text as UTF-8; see `atomic_path`."""
    with atomic_path(path, root) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def _replace(temporary: Path, final: Path) -> None:
    """Rename, unless both are folders: then another process was faster."""
    try:
        os.replace(temporary, final)
    except OSError:
        if not (temporary.is_dir() and final.is_dir()):
            raise


def _require_inside(folder: Path, root: Path) -> None:
    """Raises `SpecBenchError` for a folder below `root` that leads elsewhere; `root` itself may be a link."""
    real = Path(os.path.realpath(folder))
    if not real.is_relative_to(os.path.realpath(root)):
        raise SpecBenchError(f"{folder} is a symbolic link that leads out of {root}, to {real}; remove the link")


def _write_problem(error: Exception, scratch: Path | None) -> str | None:
    """Why nothing could be written; None if the error has another cause. scratch: None if it could not be made.

    Libraries often lose the system's reason, so a small file is tried in the scratch folder.
    """
    if isinstance(error, SpecBenchError):
        return None
    if isinstance(error, OSError) and (
        error.errno in FULL or scratch is None or str(error.filename or "").startswith(str(scratch))
    ):
        return error.strerror
    try:
        if scratch is not None:
            (scratch / ".probe").write_bytes(bytes(1 << 16))
    except OSError as probed:
        return probed.strerror
    return None


@functools.cache
def _machine() -> str:
    """Digest of what process ids are unique in: a machine, or a container on it."""
    with suppress(OSError):
        return hashlib.sha256(f"{platform.node()} {os.readlink('/proc/self/ns/pid')}".encode()).hexdigest()[:12]
    return hashlib.sha256(platform.node().encode()).hexdigest()[:12]


@functools.cache  # once for each folder and process: a report writes thousands of files into one folder
def _remove_abandoned(folder: Path) -> None:
    """Remove scratch folders of dead processes of this machine, and of others those older than `ABANDONED_S`."""
    for path in folder.glob(f"{SCRATCH}*-*-*"):
        machine, process, *_ = path.name.removeprefix(SCRATCH).split("-")
        with suppress(OSError, ValueError, OverflowError):  # removed meanwhile, or not named by `atomic_path`
            alive = _is_alive(int(process)) if machine == _machine() else time.time() - path.stat().st_mtime < ABANDONED_S
            if not alive and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True


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
