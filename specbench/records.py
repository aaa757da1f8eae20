"""Rows on disk: one JSONL file a cell (drafters x dataset x settings), a header first, then one row a generation.

A row is written whole and flushed before the next prompt starts, so a killed run loses at most the prompt it was at.
Knows nothing of drafters or datasets.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from filelock import FileLock, Timeout
from pydantic import AllowInfNan, Discriminator

from specbench.assets import atomic_path
from specbench.engine.interface import Step
from specbench.errors import SpecBenchError
from specbench.files import parse_lines, read_bytes, read_json
from specbench.shapes import SCHEMA, Header, Measure, Natural, Seconds

VERDICTS = ("identical", "numerical tie", "bug", "simulated acceptance")  # of an audit


Bin = tuple[Natural, Natural, Annotated[float, AllowInfNan()]]  # nodes, those accepted, sum of the drafter's probabilities


@dataclass
class LinkUse:
    """What a generation sent and received: see `specbench.engine.connection.Traffic`."""

    sent: dict[str, Natural]
    received: dict[str, Natural]
    round_trips: Natural
    waited_s: Seconds
    server_s: Seconds
    resumed: Natural
    prompt_bytes: Natural = 0
    prompt_s: Seconds = 0.0
    cut: str | None = None  # why the generation ended without the server


@dataclass
class Row:
    """One generation: a drafter (or the baseline, `none`) on one turn of one question.

    `tokens` are the emitted ids; the first came from the prefill, the others from the cycles. The lists of counts have
    one entry a cycle, but for `passes`, which is empty in rows written before draft passes were counted; seconds are sums
    over the cycles, and 0 where the row is `replayed`: such a row holds no speeds.
    """

    drafter: str
    question: str
    category: str
    turn: Natural
    prompt_tokens: Natural
    tokens: list[Natural]
    prefill_s: Seconds
    decode_s: Seconds
    nodes: list[Natural] = field(default_factory=list)
    drafted: list[Natural] = field(default_factory=list)
    accepted: list[Natural] = field(default_factory=list)
    ranks: list[list[Natural]] = field(default_factory=list)
    passes: list[Natural] = field(default_factory=list)  # draft passes that ran, see `Step`
    draft_s: Seconds = 0.0
    target_s: Seconds = 0.0
    verify_s: Seconds = 0.0
    rest_s: Measure = 0.0  # what no phase claims
    audit: dict[str, Any] | None = None
    others: Seconds | None = None  # cores that other processes kept busy meanwhile
    replayed: bool = False
    confidence: list[Bin] = field(default_factory=list)  # of a replayed row, see `specbench.engine.known`
    link: LinkUse | None = None  # of a target on a server
    alone: list[Natural] = field(
        default_factory=list
    )  # what the drafter went on with, cut off, behind `tokens`; unverified
    alone_s: Seconds = 0.0
    solved: bool | None = None  # does the answer, `alone` included, pass its question's check? None: nobody asked
    kind: Literal["prompt"] = "prompt"

    def add(self, step: Step) -> None:
        """Count one cycle in."""
        self.tokens += step.tokens
        self.nodes.append(step.nodes)
        self.drafted.append(step.drafted)
        self.accepted.append(step.accepted)
        self.ranks.append(step.ranks)
        self.passes.append(step.passes)
        self.draft_s += step.draft_s
        self.target_s += step.target_s
        self.verify_s += step.verify_s
        self.rest_s += step.rest_s

    @property
    def draft_passes(self) -> int | None:
        """Of all cycles; None where nobody counted them, and the most that may have run is no substitute."""
        return sum(self.passes) if len(self.passes) == len(self.accepted) else None

    @property
    def key(self) -> tuple[str, str, int]:
        return self.drafter, self.question, self.turn


@dataclass
class Failure:
    """A generation that raised: says so in its own row and never borrows a neighbour's numbers."""

    drafter: str
    question: str
    turn: Natural
    error: str
    kind: Literal["error"] = "error"

    @property
    def key(self) -> tuple[str, str, int]:
        return self.drafter, self.question, self.turn


@dataclass
class Measurement:
    """What was measured of one drafter beside its generations: `memory` or another quantity, so many times over."""

    drafter: str
    what: str
    repetition: Natural
    values: dict[str, Measure]
    kind: Literal["measurement"] = "measurement"

    @property
    def key(self) -> tuple[str, str, int]:
        return self.drafter, self.what, self.repetition


@dataclass
class CellFailure:
    """A cell that could not even begin, or broke off: visible in tables, tried again by the next sweep."""

    model: str
    dataset: str
    drafter: str
    temperature: Annotated[float, AllowInfNan()] | str | None  # as asked for, which may be why it failed
    error: str
    when: str = ""
    kind: Literal["cell failure"] = "cell failure"

    @classmethod
    def path(cls, folder: Path, drafter: str, settings: dict[str, Any]) -> Path:
        """Where the failure of a cell with these settings stands, beside the cells of its dataset."""
        return folder / f"{drafter}-{identity(settings)}.failed.json"

    def write(self, path: Path) -> None:
        self.when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        with atomic_path(path) as temporary:
            temporary.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> "CellFailure":
        """Raises `SpecBenchError` for a damaged file or one of another kind."""
        failure: CellFailure = read_json(path, cls)
        return failure


def by_error(failures: Iterable[CellFailure]) -> dict[str, list[str]]:
    """The cells that each error cost, in order."""
    found: dict[str, list[str]] = {}
    for failure in failures:
        found.setdefault(failure.error, []).append(f"{failure.drafter} on {failure.dataset}")
    return found


def identity(settings: dict[str, Any]) -> str:
    """What makes two runs the same cell: everything that can change a row."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


class Cell:
    """One `rows.jsonl`. Opening it for a run continues a file of the same identity.

    Args:
        folder: of the cell. settings: config, code, versions, machine; hashed into the identity.
        fresh: set aside what is there and begin anew.

    Raises:
        SpecBenchError: the file is not readable as rows.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], fresh: bool = False):
        self.path = folder / "rows.jsonl"
        self.rows: dict[tuple[str, str, int], Row | Failure] = {}
        self.measured: dict[tuple[str, str, int], Measurement] = {}
        if fresh and self.path.exists():
            os.replace(self.path, self.path.with_suffix(f".{int(time.time())}.jsonl.old"))
        if self.path.exists():
            _drop_cut_line(self.path)
        if self.path.exists() and self.path.stat().st_size:
            _, records = read_cell(self.path)
            self.rows = {r.key: r for r in records if not isinstance(r, Measurement)}
            self.measured = {r.key: r for r in records if isinstance(r, Measurement)}
        else:
            folder.mkdir(parents=True, exist_ok=True)
            stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            self._append({"kind": "header", "schema": SCHEMA, "started": stamp, **settings})

    def done(self, key: tuple[str, str, int]) -> bool:
        """Is there a good row for this generation?"""
        return isinstance(self.rows.get(key), Row)

    def write(self, record: Row | Failure | Measurement) -> None:
        """Append one record and wait until it is on disk."""
        self._append(asdict(record))
        if isinstance(record, Measurement):
            self.measured[record.key] = record
        else:
            self.rows[record.key] = record

    def _append(self, record: dict[str, Any]) -> None:
        line = json.dumps(record) + "\n"
        before = self.path.stat().st_size if self.path.exists() else 0
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            os.truncate(self.path, before)  # a full disk leaves no half row behind
            raise SpecBenchError(f"cannot write {self.path}: {error.strerror}; free some space and run it again") from error


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold a cell while it is written; a second process that wants it waits, and then finds it complete.

    The lock goes with its process, so a killed one blocks nobody.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print(f"{folder}: another process is at it; waiting", file=sys.stderr, flush=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _drop_cut_line(path: Path) -> None:
    """Remove what a kill left behind the last whole line."""
    text = path.read_bytes()
    whole = text.rfind(b"\n") + 1
    if whole != len(text):
        os.truncate(path, whole)


def read_cell(path: Path) -> tuple[Header, list[Row | Failure | Measurement]]:
    """Header and records of one file; a last line that was cut off is ignored.

    Raises:
        SpecBenchError: no header, another schema, or a line that is damaged or no row; it names the line.
    """
    lines = parse_lines(read_bytes(path), Line, path, cut=True)
    _, header = next(lines, (0, None))
    if header is None:
        raise SpecBenchError(f"{path} is empty: its run ended before the first row; run it again or remove the file")
    if not isinstance(header, dict):
        raise SpecBenchError(f"{path} does not start with a header; move it away")
    rows = []
    for number, row in lines:
        if said := _contradiction(row, header["arms"]):
            raise SpecBenchError(f"{path} line {number}: {said}; remove that line to keep the rest")
        rows.append(row)
    return header, rows  # type: ignore[return-value]


Line = Annotated[Header | Row | Failure | Measurement, Discriminator("kind")]


def _contradiction(row: Any, arms: Iterable[str]) -> str | None:
    """What a row says against itself, if anything: each of its values may be right, and yet not all of them."""
    if isinstance(row, dict):
        return "a second header"
    if row.drafter not in arms:
        return f"{row.drafter} is none of the header's drafters, {', '.join(arms)}"
    if not isinstance(row, Row):
        return None
    if len({len(row.nodes), len(row.drafted), len(row.accepted), len(row.ranks)}) > 1:
        return "nodes, drafted, accepted and ranks have one entry a cycle, so as many each"
    if row.passes and len(row.passes) != len(row.accepted):
        return "passes has one entry a cycle, or none at all where draft passes were not counted"
    if len(row.tokens) - 1 != sum(row.accepted) + len(row.accepted):
        return f"{len(row.tokens)} tokens are not the prefill's one, the accepted ones and a bonus a cycle"
    if row.audit is not None and row.audit.get("verdict") not in VERDICTS:
        return f"an audit's verdict is one of {', '.join(VERDICTS)}"
    return None


def has_failed(paths: Iterable[Path], config: dict[str, Any]) -> bool:
    """Did generations fail, and were not made good since, in one of these files that has this very configuration?

    A file without a whole header is of no configuration. Raises `SpecBenchError` for a damaged one.
    """
    for path in paths:
        if b"\n" not in read_bytes(path):
            continue
        header, rows = read_cell(path)
        latest = {row.key: row for row in rows if not isinstance(row, Measurement)}
        said = [{**header["config"], **{k: v for k, v in arm.items() if k in config}} for arm in header["arms"].values()]
        if config in said and any(isinstance(row, Failure) for row in latest.values()):
            return True
    return False
