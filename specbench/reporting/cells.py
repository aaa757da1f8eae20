"""Cells on disk -> entries: one drafter of one cell, summarised, ready for tables, figures and comparisons."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbench.errors import SpecBenchError
from specbench.files import read_bytes, readable
from specbench.metrics import BASELINE, Summary, Totals, summarise
from specbench.records import CellFailure, Failure, Row, read_cell
from specbench.shapes import Header


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
    held: Mapping[str, Any]  # bytes of parameters by owner, empty in rows older than this measure
    weights: Mapping[str, Any]  # provenance, empty where the drafter brings no weights of ours
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


@dataclass(frozen=True)
class Found:
    """What lies under a results folder. problems: one line on each file that is left out, or a part of it."""

    entries: list[Entry]
    failures: list[CellFailure]
    problems: list[str]


def find(root: Path) -> Found:
    """Everything readable under a results folder.

    Raises:
        SpecBenchError: there is nothing, or nothing that can be read; it names the first file that cannot.
    """
    problems: list[str] = []
    paths = below(root, "rows.jsonl")
    entries = collect(paths, root, problems)
    failures = [failure for _, failure in readable(below(root, "*.failed.json"), CellFailure.read, problems)]
    if not entries and not failures:
        said = f": {problems[0]}" if problems else "; run `make bench` first"
        raise SpecBenchError(f"no rows under results={root}{said}")
    return Found(entries, failures, problems)


def collect(paths: Iterable[Path], root: Path | None = None, problems: list[str] | None = None) -> list[Entry]:
    """Entries of all drafters of all cells; the baseline of several cells on a dataset comes once each.

    problems: see `specbench.files.readable`; a last row that was cut off is one too.
    """
    entries = []
    for path, (header, records) in readable(paths, read_cell, problems):
        if problems is not None and not read_bytes(path).endswith(b"\n"):
            problems.append(f"{path}: the last row was cut off by a crash and is left out")
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
    header: Header,
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


def below(root: Path, pattern: str) -> list[Path]:
    """Files under a results folder; those of `local` only if that folder itself is asked for."""
    return [p for p in sorted(root.rglob(pattern)) if "local" not in p.relative_to(root).parts]
