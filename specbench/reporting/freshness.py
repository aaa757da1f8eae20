"""Detects reports that are older than their rows, by a digest of the paths and contents that a report was made from."""

import hashlib
from pathlib import Path

from specbench.common.storage import sha256_of, write_file
from specbench.records import blocks

RECORD = "rows.sha256"  # beside the report
READ = (blocks.NAME, "*.failed.json")  # patterns of the files that `cells.find` reads


def digest(results: Path) -> str:
    """Digest of all files under a results folder that a report is made from."""
    whole = hashlib.sha256()
    for path in (path for pattern in READ for path in blocks.below(results, pattern) if path.is_file()):
        whole.update(f"{path.relative_to(results).as_posix()} {sha256_of(path)}\n".encode())
    return whole.hexdigest()


def record(results: Path, read: str) -> None:
    """Write the digest beside the report. read: the digest at the time of reading."""
    write_file(results / RECORD, read + "\n", results)


def warning(results: Path) -> str | None:
    """A line if the report was made from other files, or has no digest; else None."""
    path = results / RECORD
    if path.is_file() and path.read_bytes().strip() == digest(results).encode():
        return None
    return f"{results.name}/: the report is older than its rows (make report RESULTS={results.name})"
