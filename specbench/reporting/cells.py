"""Cells on disk -> entries: one drafter of one cell, summarised, ready for tables, figures and comparisons."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbench.metrics import BASELINE, Summary, Totals, summarise
from specbench.records import CellFailure, Failure, Row, read_cell


@dataclass(frozen=True)
class Entry:
    """One drafter of one cell."""

    collection: str  # the folder under the results folder; "" for rows right under it
    model: str
    dataset: str
    temperature: float
    machine: str
    dtype: str
    summary: Summary
    failed: int  # generations
    parameters: int  # that one draft pass multiplies, the shared LM head included
    target_parameters: int  # that a target pass multiplies, likewise
    passes: int  # draft passes a cycle
    lossy: bool  # verified by a rule that does not keep the target's distribution
    peaks: list[dict[str, Any]]  # of memory, one a generation, by source
    held: dict[str, int]  # bytes of parameters by owner, empty in rows older than this measure
    weights: dict[str, Any]  # provenance, empty where the drafter brings no weights of ours
    path: Path

    @property
    def name(self) -> str:
        return self.summary.drafter

    @property
    def totals(self) -> Totals:
        return self.summary.totals

    @property
    def caption(self) -> str:
        """What a table of comparable entries says on top."""
        mode = "greedy" if self.temperature == 0 else f"T={self.temperature}"
        where = f"{self.collection}: " if self.collection else ""
        return f"{where}{self.model}, {self.dataset}, {mode}, {self.dtype}, {self.machine}"


def collect(paths: Iterable[Path], root: Path | None = None) -> list[Entry]:
    """Entries of all drafters of all cells; the baseline of several cells on a dataset comes once each."""
    entries = []
    for path in paths:
        header, records = read_cell(path)
        latest: dict[tuple[str, str, int], Row | Failure] = {r.key: r for r in records}
        rows = [r for r in latest.values() if isinstance(r, Row)]
        own = header["config"]["drafter"]["name"]
        baseline = [r for r in rows if r.drafter == BASELINE]
        for drafter in dict.fromkeys([BASELINE, own]):
            mine = [r for r in rows if r.drafter == drafter]
            failed = sum(isinstance(r, Failure) and r.drafter == drafter for r in latest.values())
            if mine or failed:
                entries.append(_entry(header, drafter, mine, baseline, failed, path, root))
    return entries


def _entry(
    header: dict[str, Any],
    drafter: str,
    rows: Sequence[Row],
    baseline: Sequence[Row],
    failed: int,
    path: Path,
    root: Path | None,
) -> Entry:
    config, hardware = header["config"], header["hardware"]
    above = path.relative_to(root).parts[:-4] if root is not None and path.is_relative_to(root) else ()
    return Entry(
        collection="/".join(above),  # <collection>/<model>/<dataset>/<cell>/rows.jsonl
        model=config["model"]["name"] + (", random weights, SIMULATED acceptance" if header.get("simulated") else ""),
        dataset=config["dataset"]["name"],
        temperature=config["sampler"]["temperature"],
        machine=f"{hardware['device']}, {hardware['cores']} cores, torch {header['versions']['torch']}",
        dtype=header["target"]["dtype"] + (" compiled" if config.get("backend") == "compile" else ""),
        summary=summarise(header, drafter, rows, baseline),
        failed=failed,
        parameters=header["parameters"]["drafter"],
        target_parameters=header["parameters"]["target"],
        passes=header["draft_passes"],
        lossy=header["lossy"],
        peaks=[r.peak for r in rows],
        held=header.get("bytes", {}),
        weights=header["weights"] if drafter != BASELINE else {},
        path=path,
    )


def groups(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    """Comparable entries under one caption: same collection, model, dataset, temperature, machine; one baseline each."""
    found: dict[str, list[Entry]] = {}
    for e in entries:
        group = found.setdefault(e.caption, [])
        if e.name != BASELINE or not any(x.name == BASELINE for x in group):
            group.append(e)
    return found


def cut_off(path: Path) -> bool:
    """Does the file end inside a row, as after a crash?"""
    with path.open("rb") as file:
        file.seek(0, 2)
        if not file.tell():
            return True
        file.seek(-1, 2)
        return file.read(1) != b"\n"


def below(root: Path, pattern: str) -> list[Path]:
    """Files under a results folder; those of `local` only if that folder itself is asked for."""
    return [p for p in sorted(root.rglob(pattern)) if "local" not in p.relative_to(root).parts]


def failures(root: Path) -> list[CellFailure]:
    """Cells under a results folder that could not even begin."""
    return [CellFailure.read(path) for path in below(root, "*.failed.json")]
