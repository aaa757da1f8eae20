"""Was the report in a results folder made from the files that lie there now? It leaves a digest of what it read.

The digest is of paths and contents, so neither modification times nor a version history decide.
"""

import hashlib
from pathlib import Path

from specbench.common.storage import sha256_of
from specbench.records import blocks

RECORD = "rows.sha256"  # beside the report
READ = (blocks.NAME, "*.failed.json")  # as `cells.find` reads them


def digest(results: Path) -> str:
    """Of every file under a results folder that a report is made from, by its path there."""
    whole = hashlib.sha256()
    for path in (path for pattern in READ for path in blocks.below(results, pattern)):
        whole.update(f"{path.relative_to(results).as_posix()} {sha256_of(path)}\n".encode())
    return whole.hexdigest()


def record(results: Path, read: str) -> None:
    """Say beside the report what it was made from. read: the digest when it was read."""
    (results / RECORD).write_text(read + "\n")


def warning(results: Path) -> str | None:
    """One line where the report was made from other rows than lie there, or does not say from which; else None."""
    path = results / RECORD
    if path.is_file() and path.read_text().strip() == digest(results):
        return None
    return f"{results.name}/: the report is older than its rows (make report RESULTS={results.name})"
