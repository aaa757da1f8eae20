"""Blocks: what one process measured of one cell, as one JSONL file that is only ever added.

    results/<study>/<model>/<cell>/<date>T<time>-<machine>-<id>.jsonl

Names sort by the time at which their blocks began. The first line is a header (configuration, arms, commit, versions,
machine, load), then come records, each whole and on disk before the next begins. A block that was cut off anywhere is read
up to its last whole line. `Ledger` knows what lies in the blocks of a cell, its own and those of other processes, without
reading rows whole.
"""

import json
import os
import re
import secrets
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

from filelock import FileLock, Timeout
from pydantic import Discriminator

from specbench.common.errors import SpecBenchError
from specbench.common.io import parse, parse_lines, read_bytes
from specbench.records import identity
from specbench.records.rows import Failure, Measurement, QuestionEnd, Record, Row, contradiction
from specbench.records.schema import SCHEMA, Header

NAME = "[12][0-9][0-9][0-9]-[01][0-9]-[0-3][0-9]T*-*.jsonl"  # of a block's file, as a pattern
LOCKS = ".locks"  # folder of a cell's locks, which is no part of the results
Line = Annotated[Header | Record, Discriminator("kind")]


class Block:
    """The block that a process writes; its file is created with its first record.

    Args:
        folder: of the cell. header: what `arms.header` says.
    """

    def __init__(self, folder: Path, header: Mapping[str, Any]):
        now = datetime.now(timezone.utc)
        machine = re.sub(r"[^a-z0-9]+", "-", str(header["hardware"]["device"]).lower()).strip("-")[:40]
        name = f"{now:%Y-%m-%dT%H%M%S.%f}-{machine}-{secrets.token_hex(3)}.jsonl"
        self.path = folder / name
        started = f"{now:%Y-%m-%dT%H:%M:%S.%f}Z"  # by which the newest row is told
        numbers = {"decoding": identity.DECODING, "timing": identity.TIMING}
        self.header = {"kind": "header", "schema": SCHEMA, "started": started, **numbers, **header}

    def write(self, record: Record) -> None:
        """Append one record and wait until it is on disk.

        Raises:
            SpecBenchError: it cannot be written; no half record is left behind.
        """
        whole = asdict(record)
        self._append({"kind": whole.pop("kind"), **whole})

    def _append(self, record: Mapping[str, Any]) -> None:
        before = self.path.stat().st_size if self.path.exists() else 0
        lines = [record] if before else [self.header, record]
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(line) + "\n" for line in lines))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            if before:
                os.truncate(self.path, before)  # a full disk leaves no half row behind
            else:
                self.path.unlink(missing_ok=True)
            raise SpecBenchError(f"cannot write {self.path}: {error.strerror}; free some space and run it again") from error


def read_block(path: Path) -> tuple[Header, list[Record]]:
    """Header and records of one block; a last line that was cut off is ignored.

    Raises:
        SpecBenchError: no header, another format, or a line that is damaged or no record; it names the line.
    """
    lines = parse_lines(read_bytes(path), Line, path, cut=True)
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


def cell_name(dataset: str, drawn: tuple[float, float, int], tokens: int, link: str, replayed: bool) -> str:
    """A cell's folder, for people: prompts, sampling, length and mode. drawn: temperature, top-p, top-k."""
    temperature, top_p, top_k = drawn
    sampling = [f"t{temperature:g}"] if temperature else ["greedy"]
    sampling += [f"p{top_p:g}"] * (top_p < 1) + [f"k{top_k}"] * (top_k > 0)
    more = [f"link-{link}"] * (link != "local") + ["replayed"] * replayed
    return "-".join([dataset, *sampling, str(tokens), *more])


def below(root: Path) -> list[Path]:
    """Blocks under a folder, oldest first; those of `local` only if that folder itself is asked for."""
    found = [path for path in root.rglob(NAME) if "local" not in path.relative_to(root).parts]
    return sorted(found, key=lambda path: (path.parent, path.name))


# What is there --------------------------------------------------------------------------------------------------------

_STRING = rb'"(?:[^"\\]|\\.)*"'
_HEAD = re.compile(  # of a line, as `Block.write` begins it
    rb'\{"kind": "(?:(prompt|error)", "drafter": (%s), "question": (%s), (?:"category": %s, )?"turn": (\d+)|'
    rb'(measurement)", "drafter": (%s), "what": (%s), "repetition": (\d+)|'
    rb'(question)", "question": (%s), "generations": (\d+), "seconds": ([0-9.e+-]+))' % ((_STRING,) * 6)
)
_TEXT = re.compile(rb'"text": "([0-9a-f]*)"')

Label = str
Answer = tuple[str, int]  # digest of a question, and turn


@dataclass
class Known:
    """What one block holds, without its numbers.

    Attributes:
        rows, failures: (label, digest of the question, turn). measured: (label, quantity, repetition).
        places: of the baseline's rows, where their lines begin and end in the file.
    """

    path: Path
    header: Header
    cell: str
    machine: str
    arms: dict[Label, tuple[str, str]]
    rows: set[tuple[Label, str, int]] = field(default_factory=set)
    failures: set[tuple[Label, str, int]] = field(default_factory=set)
    measured: set[tuple[Label, str, int]] = field(default_factory=set)
    generations: int = 0
    seconds: float = 0.0
    places: dict[Answer, tuple[int, int]] = field(default_factory=dict)


def scan(path: Path, baseline: str) -> Known | None:
    """What a block holds, read off the beginnings of its lines; None for one that was cut off in its header.

    Raises:
        SpecBenchError: it is no block of this format, or damaged; it names the line.
    """
    data = read_bytes(path)
    end = data.find(b"\n")
    if end < 0:
        return None
    header: Header = parse(data[:end], Header, f"{path} line 1")
    arms = {label: identity.arm_key(arm) for label, arm in header["arms"].items()}
    known = Known(path, header, identity.cell_key(header), identity.machine_key(header), arms)
    number, begin = 1, end + 1
    while (end := data.find(b"\n", begin)) >= 0:
        number += 1
        if end > begin:
            try:
                _note(known, data, begin, end, baseline)
            except ValueError as error:  # no record, or text and numbers that JSON has not
                raise SpecBenchError(f"{path} line {number}: no record of a block; mend or remove that line") from error
        begin = end + 1
    return known


def _note(known: Known, data: bytes, begin: int, end: int, baseline: str) -> None:
    """Take one line's beginning into account. Raises `ValueError` if it is no record's."""
    found = _HEAD.match(data, begin, end)
    if found is None:
        raise ValueError("no record")
    kind, label, _, turn, measurement, whose, what, repetition, question, _, generations, seconds = found.groups()
    if measurement:
        known.measured.add((json.loads(whose), json.loads(what), int(repetition)))
    elif question:
        known.generations, known.seconds = known.generations + int(generations), known.seconds + float(seconds)
    else:
        text = _TEXT.search(data, max(begin, end - 60), end) or _TEXT.search(data, begin, end)
        key = (json.loads(label), text[1].decode() if text else "", int(turn))
        (known.rows if kind == b"prompt" else known.failures).add(key)
        if kind == b"prompt" and key[0] == baseline:
            known.places[key[1:]] = (begin, end)


class Ledger:
    """All blocks of one cell's folder, this process's own among them: what is there, and what is not.

    Args:
        folder: of the cell. header: of the block that this process is about to write; it says which cell, arms and kind of
            machine are meant. timed: seconds count, so rows of other kinds of machine do not.
        baseline: its label. fresh: blocks that are there do not count.
    """

    def __init__(self, folder: Path, header: Mapping[str, Any], baseline: str, timed: bool, fresh: bool = False):
        self.folder, self.baseline, self.timed = folder, baseline, timed
        self.block = Block(folder, header)
        self.cell, self.machine = identity.cell_key(self.block.header), identity.machine_key(self.block.header)
        self.arms = {label: identity.arm_key(arm) for label, arm in header["arms"].items()}
        self._sizes: dict[Path, int] = {}
        self._known: dict[Path, Known] = {}
        self._fresh = set(self.folder.glob(NAME)) if fresh else set()
        self._forgotten: set[Label] = set()
        self._ended = QuestionEnd("", 0, 0.0)  # all questions that this process is through with
        self._answers: dict[Answer, Row] = {}  # the baseline's, of this process
        self._rows: set[tuple[Label, str, int]] = set()
        self._failed: set[tuple[Label, str, int]] = set()
        self.measured: set[tuple[Label, str, int]] = set()
        self.refresh()

    def refresh(self) -> None:
        """Take in what other processes wrote since the last look."""
        for path in sorted(set(self.folder.glob(NAME)) - self._fresh):
            size = path.stat().st_size
            if self._sizes.get(path) != size:
                self._sizes[path] = size
                if (known := scan(path, self.baseline)) is not None and self._counts(known):
                    self._known[path] = known
                    self._take(known)

    def _counts(self, known: Known) -> bool:
        return known.cell == self.cell and known.header.get("decoding") == identity.DECODING

    def _take(self, known: Known) -> None:
        """Rows of the arms that are meant, under this process's labels."""
        names = {key: label for label, key in self.arms.items()}
        own = {
            label: label if self.arms.get(label) == key else names[key] for label, key in known.arms.items() if key in names
        }
        own = {label: name for label, name in own.items() if name not in self._forgotten}
        here = known.machine == self.machine
        if here or not self.timed:
            self._rows |= {(own[label], *rest) for label, *rest in known.rows if label in own}  # type: ignore[misc]
            self._failed |= {(own[label], *rest) for label, *rest in known.failures if label in own}  # type: ignore[misc]
        if here:
            self.measured |= {(own[label], *rest) for label, *rest in known.measured if label in own}  # type: ignore[misc]

    def done(self, label: Label, text: str, turn: int) -> bool:
        """Is there a good row?"""
        return (label, text, turn) in self._rows

    def forget(self, label: Label) -> None:
        """Count no row of an arm but those that this process writes from now on."""
        self._forgotten.add(label)
        self._rows = {key for key in self._rows if key[0] != label}
        self._failed = {key for key in self._failed if key[0] != label}

    def failed(self) -> set[tuple[Label, str, int]]:
        """Generations that failed and were not made good since."""
        return self._failed - self._rows

    def answer(self, text: str, turn: int) -> Row | None:
        """The baseline's row of a turn, from any block of the cell."""
        if (text, turn) in self._answers:
            return self._answers[text, turn]
        for path, known in self._known.items():
            if (text, turn) in known.places:
                begin, end = known.places[text, turn]
                with path.open("rb") as file:
                    file.seek(begin)
                    row: Row = parse(file.read(end - begin), Line, str(path))
                return row
        return None

    def pace(self) -> float | None:
        """Seconds a generation took on this kind of machine, with all that is done around it; None: none was timed."""
        return pace([*(known for known in self._known.values() if known.machine == self.machine), self._ended])

    def write(self, record: Record) -> None:
        """Into this process's own block."""
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
            self._ended.generations += record.generations
            self._ended.seconds += record.seconds


@contextmanager
def locked(folder: Path, name: str, wait: bool) -> Iterator[bool]:
    """Hold a part of a cell while it is measured: yields whether this process has it.

    The lock goes with its process, so a killed one blocks nobody.

    Args:
        name: of the part. wait: until another process that has it is through; else it is not had.
    """
    path = folder / LOCKS / f"{name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if not wait:
            yield False
            return
        print(f"{folder}: another process measures it; waiting", file=sys.stderr, flush=True)
        lock.acquire()
    try:
        yield True
    finally:
        lock.release()


def pace(ended: Iterable[Known | QuestionEnd]) -> float | None:
    """Seconds a generation, with all that is done around it; None where nothing was timed."""
    ended = list(ended)
    generations = sum(one.generations for one in ended)
    return sum(one.seconds for one in ended) / generations if generations else None


def scan_all(folder: Path, baseline: str) -> Iterator[Known]:
    """What each block of a cell holds, oldest first, but those that were cut off in their header."""
    for path in sorted(folder.glob(NAME)):
        if (known := scan(path, baseline)) is not None:
            yield known


def trace_path(folder: Path, label: str) -> Path:
    """Where an arm's traces lie: in its cell's folder, whatever it is called."""
    return folder / ("trace-" + re.sub(r"[^A-Za-z0-9_.+=@-]", "_", label)[:100] + ".json")
