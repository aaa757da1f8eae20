"""Blocks read from a results folder, ordered by age, with the arms and rows that entries are made of."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from specbench.common.io import read_bytes, readable
from specbench.records import blocks, identity
from specbench.records.metrics import BASELINE, busy
from specbench.records.rows import Failure, Row
from specbench.records.schema import Header

Key = tuple[str, tuple[str, str]]  # an arm's label and its `identity.arm_key`
Turn = tuple[str, int]  # question, see `PromptRecord.asked`, and turn


@dataclass
class Source:
    """A block. number: in order of time."""

    number: int
    path: Path
    collection: str
    header: Header
    records: Sequence[object]

    @cached_property
    def rows(self) -> list[Row]:
        return [r for r in self.records if isinstance(r, Row)]

    @cached_property
    def group(self) -> tuple[str, ...]:
        """Key of the blocks whose rows are pooled; seconds only with those of the same kind of machine."""
        machine = "" if self.header.get("replay") else identity.machine_key(self.header)
        study, model = self.header.get("study") or "", self.header["config"]["model"]["name"]
        return self.collection, study, model, identity.cell_key(self.header), machine

    @cached_property
    def keys(self) -> dict[str, Key]:
        """Keys of its arms by label."""
        return {label: (label, identity.arm_key(arm)) for label, arm in self.header["arms"].items()}

    @cached_property
    def baseline(self) -> dict[Turn, Row]:
        return {turn_of(row): row for row in self.rows if row.drafter == BASELINE}

    @cached_property
    def busy(self) -> str | None:
        """See `metrics.busy`."""
        return busy(self.rows, self.header["hardware"]["cores"])


def turn_of(record: Row | Failure) -> Turn:
    """Key of a record's turn."""
    return record.asked, record.turn


def read_sources(paths: Iterable[Path], root: Path | None, problems: list[str] | None) -> list[Source]:
    """Blocks by age, without those of an older decoding version."""
    sources, left_out = [], [] if problems is None else problems
    for path, (header, records) in readable(paths, blocks.read_block, problems):
        if header["decoding"] != identity.DECODING:
            left_out.append(f"{path}: its rows were decoded by older rules (version {header['decoding']}); measure again")
            continue
        if problems is not None and not read_bytes(path).endswith(b"\n"):
            left_out.append(f"{path}: the last row was cut off by a crash and is left out")
        # <collection>/<model>/<cell>/<block>.jsonl
        above = path.relative_to(root).parts[:-3] if root is not None and path.is_relative_to(root) else ()
        sources.append(Source(0, path, "/".join(above), header, records))
    sources.sort(key=lambda source: (source.header["started"], source.path.name))
    for number, source in enumerate(sources):
        source.number = number
    return sources
