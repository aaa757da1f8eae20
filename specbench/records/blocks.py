"""Blocks: what one process measured of one cell, as one append-only JSONL file.

    results/<study>/<model>/<cell>/<date>T<time>-<machine>-<id>.jsonl

File names sort by start time. The first line is a header (configuration, arms, commit, versions, machine, load); each
record behind it is flushed to disk before the next one begins. A truncated block is read up to its last whole line.
`Ledger` indexes all blocks of a cell without parsing whole rows.
"""

import json
import os
import re
import secrets
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from filelock import FileLock, Timeout
from pydantic import Discriminator
from pydantic_core import from_json

from specbench.common.errors import SpecBenchError
from specbench.common.io import MAX_LINE, parse, parse_lines, read_bytes
from specbench.records import identity
from specbench.records.rows import Failure, Measurement, QuestionEnd, Record, Row, contradiction
from specbench.records.schema import SCHEMA, Header

NAME = "[12][0-9][0-9][0-9]-[01][0-9]-[0-3][0-9]T*-*.jsonl"  # glob pattern of block files
LOCKS = ".locks"  # folder of a cell's locks; not part of the results
MAX_BLOCK = 1 << 30  # bytes of a file
Line = Annotated[Header | Record, Discriminator("kind")]


class Block:
    """The block that this process writes; the file is created with its first record.

    Args:
        folder: of the cell. header: as `arms.header` makes it.
    """

    def __init__(self, folder: Path, header: Mapping[str, Any]):
        now = datetime.now(UTC)
        machine = re.sub(r"[^a-z0-9]+", "-", str(header["hardware"]["device"]).lower()).strip("-")[:40]
        self.path = folder / f"{now:%Y-%m-%dT%H%M%S.%f}-{machine}-{secrets.token_hex(3)}.jsonl"
        started = f"{now:%Y-%m-%dT%H:%M:%S.%f}Z"
        versions = {"decoding": identity.DECODING, **identity.SPEEDS}
        self.header = {"kind": "header", "schema": SCHEMA, "started": started, **versions, **header}

    def write(self, record: Record) -> None:
        """Append one record and wait until it is on disk.

        Raises:
            SpecBenchError: it cannot be written; the file is cut back to its last whole record.
        """
        data = asdict(record)
        size = self.path.stat().st_size if self.path.exists() else 0
        lines = [{"kind": data.pop("kind"), **data}]
        if not size:
            lines.insert(0, self.header)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(line) + "\n" for line in lines))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            if size:
                os.truncate(self.path, size)
            else:
                self.path.unlink(missing_ok=True)
            raise SpecBenchError(f"cannot write {self.path}: {error.strerror}; free some space and run it again") from error


def read_block(path: Path) -> tuple[Header, list[Record]]:
    """Header and records of one block; a truncated last line is ignored.

    Raises:
        SpecBenchError: no header, another format, or an invalid line, which is named.
    """
    lines = parse_lines(read_bytes(path, MAX_BLOCK), Line, path, cut=True)
    _, header = next(lines, (0, None))
    if header is None:
        raise SpecBenchError(f"{path} is empty: its run ended before the first row; run it again or remove the file")
    if not isinstance(header, dict):
        raise SpecBenchError(f"{path} does not start with a header; move it away")
    records = []
    for number, record in lines:
        if problem := contradiction(record, header["arms"]):
            raise SpecBenchError(f"{path} line {number}: {problem}; remove that line to keep the rest")
        records.append(record)
    return header, records  # type: ignore[return-value]


def cell_name(
    dataset: str,
    drawn: tuple[float, float, int],
    tokens: int,
    link: str,
    replayed: bool,
    batch: int = 1,
    variant: str | None = None,
) -> str:
    """Folder name of a cell: prompts, sampling, length, mode, variant of the target. drawn: temperature, top-p, top-k."""
    temperature, top_p, top_k = drawn
    parts = [dataset, f"t{temperature:g}" if temperature else "greedy"]
    parts += [f"p{top_p:g}"] * (top_p < 1) + [f"k{top_k}"] * (top_k > 0)
    parts += [str(tokens)] + [f"link-{link}"] * (link != "local") + ["replayed"] * replayed
    parts += [f"batch{batch}"] * (batch > 1)
    return "-".join(parts if variant is None else [*parts, variant])


def link_name(link: str, cut_after: int | None) -> str:
    """What a cell's folder calls a link that breaks after so many tokens."""
    return link if cut_after is None else f"{link}-cut{cut_after}"


def below(root: Path, pattern: str = NAME) -> list[Path]:
    """Blocks (or other files) under a folder, oldest first within one; `local` counts only if it is the root itself."""
    return [path for path in sorted(root.rglob(pattern)) if "local" not in path.relative_to(root).parts]


def trace_path(folder: Path, label: str) -> Path:
    """File of an arm's traces in its cell's folder; characters that are not safe in file names are replaced."""
    return folder / ("trace-" + re.sub(r"[^A-Za-z0-9_.+=@-]", "_", label)[:100] + ".json")


# Index of a block -----------------------------------------------------------------------------------------------------

Label = str
Answer = tuple[str, int]  # digest of a question, and turn
Generation = tuple[Label, str, int]  # the same of one arm


@dataclass
class BlockIndex:
    """What one block holds, without its numbers.

    Attributes:
        arms: keys by label. measured: (label, quantity, repetition). generations, seconds: of finished questions.
        baseline_lines: of the file, each with a row of the baseline.
    """

    path: Path
    header: Header
    cell: str
    machine: str
    arms: dict[Label, tuple[str, str]]
    rows: set[Generation] = field(default_factory=set)
    failures: set[Generation] = field(default_factory=set)
    measured: set[tuple[Label, str, int]] = field(default_factory=set)
    generations: int = 0
    seconds: float = 0.0
    baseline_lines: dict[Answer, bytes] = field(default_factory=dict)


def scan(path: Path, baseline: str) -> BlockIndex | None:
    """Index a block; None if it was truncated in its header. Records are read whole and checked by `read_block` alone.

    Raises:
        SpecBenchError: it is no block of this format, or damaged; it names the line.
    """
    lines = read_bytes(path, MAX_BLOCK).split(b"\n")[:-1]  # a line without an end was truncated
    if not lines:
        return None
    header: Header = parse(lines[0], Header, f"{path} line 1", MAX_LINE)
    arms = {label: identity.arm_key(arm) for label, arm in header["arms"].items()}
    index = BlockIndex(path, header, identity.cell_key(header), identity.machine_key(header), arms)
    for number, line in enumerate(lines[1:], start=2):
        try:
            if line:
                _add_record(index, from_json(line), line, baseline)
        except (ValueError, KeyError, TypeError) as error:
            raise SpecBenchError(f"{path} line {number}: no record of a block; correct or remove that line") from error
    return index


def _add_record(index: BlockIndex, record: dict[str, Any], line: bytes, baseline: str) -> None:
    """Add a record, and its line if it is a row of the baseline. Raises if it is none."""
    kind = record["kind"]
    if kind == "measurement":
        index.measured.add((record["drafter"], record["what"], record["repetition"]))
    elif kind == "question":
        index.generations += record["generations"]
        index.seconds += record["seconds"]
    elif kind in ("prompt", "error"):
        key = record["drafter"], record.get("text", ""), record["turn"]
        (index.rows if kind == "prompt" else index.failures).add(key)
        if kind == "prompt" and key[0] == baseline:
            index.baseline_lines[key[1:]] = line
    else:
        raise ValueError(kind)


def scan_all(folder: Path, baseline: str) -> Iterator[BlockIndex]:
    """The index of every block of a cell, oldest first, without those that were truncated in their header."""
    for path in sorted(folder.glob(NAME)):
        if (index := scan(path, baseline)) is not None:
            yield index


def pace(counts: Iterable[BlockIndex | QuestionEnd]) -> float | None:
    """Seconds a generation, everything around it included; None where nothing was timed."""
    counts = list(counts)
    generations = sum(count.generations for count in counts)
    return sum(count.seconds for count in counts) / generations if generations else None


class Ledger:
    """All blocks of one cell, this process's own included: which generations exist and which are missing.

    Args:
        folder: of the cell. header: of this process's block; defines the cell, the arms and the kind of machine.
        timed: seconds count, so rows of other kinds of machine do not. baseline: its label. fresh: ignore existing blocks.
    """

    def __init__(self, folder: Path, header: Mapping[str, Any], baseline: str, timed: bool, fresh: bool = False):
        self.folder, self.baseline, self.timed = folder, baseline, timed
        self.block = Block(folder, header)
        self.cell, self.machine = identity.cell_key(self.block.header), identity.machine_key(self.block.header)
        self.arms = {label: identity.arm_key(arm) for label, arm in header["arms"].items()}
        self.measured: set[tuple[Label, str, int]] = set()
        self._sizes: dict[Path, int] = {}  # of the blocks when they were last read
        self._indices: dict[Path, BlockIndex] = {}
        self._ignored = set(self.folder.glob(NAME)) if fresh else set()
        self._forgotten: set[Label] = set()
        self._finished = QuestionEnd("", 0, 0.0)  # sum over all questions of this process
        self._answers: dict[Answer, Row] = {}  # the baseline's, of this process
        self._rows: set[Generation] = set()
        self._failed: set[Generation] = set()
        self.refresh()

    def refresh(self) -> None:
        """Read what other processes wrote since the last call."""
        for path in sorted(set(self.folder.glob(NAME)) - self._ignored):
            size = path.stat().st_size
            if self._sizes.get(path) != size:
                self._sizes[path] = size
                index = scan(path, self.baseline)
                if index and index.cell == self.cell and index.header.get("decoding") == identity.DECODING:
                    self._indices[path] = index
                    self._add(index)

    def _add(self, index: BlockIndex) -> None:
        """Count a block's records, each under the label that this process gives to its arm."""
        names = {key: label for label, key in self.arms.items()}
        labels = {label: label if self.arms.get(label) == key else names.get(key) for label, key in index.arms.items()}

        def relabelled(keys: Iterable[tuple[Label, str, int]]) -> set[tuple[Label, str, int]]:
            found = ((labels.get(label), text, number) for label, text, number in keys)
            return {(own, text, number) for own, text, number in found if own is not None and own not in self._forgotten}

        same_machine = index.machine == self.machine
        if same_machine or not self.timed:
            self._rows |= relabelled(index.rows)
            self._failed |= relabelled(index.failures)
        if same_machine:
            self.measured |= relabelled(index.measured)

    def done(self, label: Label, text: str, turn: int) -> bool:
        """Is there a row without an error?"""
        return (label, text, turn) in self._rows

    def forget(self, label: Label) -> None:
        """Of an arm, count only what this process writes from now on."""
        self._forgotten.add(label)
        self._rows = {key for key in self._rows if key[0] != label}
        self._failed = {key for key in self._failed if key[0] != label}

    def failed(self) -> set[Generation]:
        """Generations that failed and did not succeed in another attempt."""
        return self._failed - self._rows

    def answer(self, text: str, turn: int) -> Row | None:
        """The baseline's row of a turn, from any block of the cell."""
        if (text, turn) in self._answers:
            return self._answers[text, turn]
        for path, index in self._indices.items():
            if (text, turn) in index.baseline_lines:
                row: Row = parse(index.baseline_lines[text, turn], Line, str(path))
                return row
        return None

    def pace(self) -> float | None:
        """See `pace`, on this kind of machine."""
        return pace([*(index for index in self._indices.values() if index.machine == self.machine), self._finished])

    def write(self, record: Record) -> None:
        """Append a record to this process's block and count it."""
        self.block.write(record)
        self._sizes[self.block.path] = self.block.path.stat().st_size
        if isinstance(record, Row):
            self._rows.add((record.drafter, record.text, record.turn))
            if record.drafter == self.baseline:
                self._answers[record.text, record.turn] = record
        elif isinstance(record, Failure):
            self._failed.add((record.drafter, record.text, record.turn))
        elif isinstance(record, Measurement):
            self.measured.add(record.key)
        elif isinstance(record, QuestionEnd):
            self._finished.generations += record.generations
            self._finished.seconds += record.seconds


@contextmanager
def locked(folder: Path, name: str, wait: bool, seconds: float | None = None) -> Iterator[bool]:
    """Lock a part of a folder, as of a cell while it is measured; yields whether this process holds the lock.

    A lock ends with its process, so a killed one blocks no other.

    Args:
        name: of the part. wait: until another process releases it, so many seconds at most (None: however long).
    """
    path = folder / LOCKS / f"{name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if wait:
            print(f"{folder}: another process works on {name}; waiting", file=sys.stderr, flush=True)
            with suppress(Timeout):
                lock.acquire(timeout=-1 if seconds is None else max(seconds, 0))
        if not lock.is_locked:
            yield False
            return
    try:
        yield True
    finally:
        lock.release()
