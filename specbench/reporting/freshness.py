"""Detects reports that are older than what they show, by a digest of the paths and contents that a report was made from.

These are rows, studies, published numbers, and the numbers that say which rows count; not the code of the report itself.
"""

import hashlib
from pathlib import Path

from specbench.common.storage import PROJECT, sha256_of, write_file
from specbench.records import blocks, identity, studies

RECORD = "rows.sha256"  # beside the report
READ = (blocks.NAME, "*.failed.json")  # patterns of the files that `cells.find` reads
PUBLISHED = PROJECT / "results" / "published"


def digest(results: Path) -> str:
    """Digest of all files that the report on a results folder is made from."""
    whole = hashlib.sha256(f"{identity.DECODING} {identity.SPEEDS} {identity.OBJECTIVES}\n".encode())
    read = [(results, path) for pattern in READ for path in blocks.below(results, pattern)]
    read += [(root, path) for root in (studies.FOLDER, PUBLISHED) for path in sorted(root.glob("*"))]
    for root, path in read:
        if path.is_file():
            whole.update(f"{path.relative_to(root).as_posix()} {sha256_of(path)}\n".encode())
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
