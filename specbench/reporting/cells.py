"""Cells on disk -> entries: one drafter of one cell, summarised, ready for tables, figures and comparisons."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbench.errors import SpecBenchError
from specbench.files import read_bytes, readable
from specbench.metrics import BASELINE, Summary, Totals, busy, summarise
from specbench.records import CellFailure, Failure, Measurement, Row, read_cell
from specbench.shapes import Arm, Header


@dataclass(frozen=True)
class Entry:
    """One drafter of one cell; of an arm that was trained several times, all of its seeds together."""

    collection: str  # the folder under the results folder; "" for rows right under it
    summary: Summary
    failed: int  # generations
    rows: Sequence[Row]
    header: Header
    arm: Arm  # its part of the header; of several seeds the first one's
    seeds: int
    measured: Mapping[str, Sequence[Mapping[str, float]]]  # what was measured beside, repetition by repetition
    path: Path
    busy: str | None = None  # of its cell, where the machine had other work to do meanwhile

    @property
    def name(self) -> str:
        return self.summary.drafter

    @property
    def model(self) -> str:
        simulated = ", random weights, SIMULATED acceptance" if self.header.get("simulated") else ""
        return self.header["config"]["model"]["name"] + simulated

    @property
    def study(self) -> str | None:
        return self.header.get("study")

    @property
    def dataset(self) -> str:
        return self.header["config"]["dataset"]["name"]

    @property
    def temperature(self) -> float:
        return self.header["config"]["sampler"]["temperature"]

    @property
    def replayed(self) -> bool:
        """Acceptance alone, without speeds?"""
        return self.header.get("replay", False)

    @property
    def machine(self) -> str:
        hardware = self.header["hardware"]
        return f"{hardware['device']}, {hardware['cores']} cores, torch {self.header['versions']['torch']}"

    @property
    def dtype(self) -> str:
        compiled = " compiled" if self.header["config"].get("backend") == "compile" else ""
        return self.header["target"]["dtype"] + compiled

    @property
    def parameters(self) -> int:
        """That one draft pass multiplies, the shared LM head included."""
        return self.arm["parameters"]

    @property
    def lossy(self) -> bool:
        """Verified by a rule that does not keep the target's distribution?"""
        return self.arm["lossy"]

    @property
    def weights(self) -> Mapping[str, Any]:
        """Provenance; empty where the drafter brings no weights of ours."""
        return self.arm["weights"]

    @property
    def growth(self) -> Mapping[str, Any]:
        """How its trees grow, as the configuration says; empty where it says nothing."""
        found: Any = self.arm["drafter"].get("growth") or {}
        return found if isinstance(found, Mapping) else {}

    @property
    def totals(self) -> Totals:
        return self.summary.totals

    @property
    def caption(self) -> str:
        """What a table of comparable entries says on top."""
        mode = "greedy" if self.temperature == 0 else f"T={self.temperature}"
        where = f"{self.collection}: " if self.collection else ""
        replayed = ", replayed" if self.replayed else ""
        return f"{where}{self.model}, {self.dataset}, {mode}, {self.dtype}{replayed}, {self.machine}"


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
        measured = [r for r in records if isinstance(r, Measurement)]
        latest = {r.key: r for r in records if not isinstance(r, Measurement)}
        rows = [r for r in latest.values() if isinstance(r, Row)]
        baseline = [r for r in rows if r.drafter == BASELINE]
        disturbed = busy(rows, header["hardware"]["cores"])
        pooled: dict[str, list[str]] = {}
        for label, arm in header["arms"].items():
            pooled.setdefault(arm.get("of", label), []).append(label)
        for name, labels in pooled.items():
            mine = [r for r in rows if r.drafter in labels]
            failed = sum(isinstance(r, Failure) and r.drafter in labels for r in latest.values())
            if mine or failed:
                beside: dict[str, list[Mapping[str, float]]] = {}
                for m in measured:
                    if m.drafter in labels:
                        beside.setdefault(m.what, []).append(m.values)
                arm = header["arms"][labels[0]]
                summary = summarise(header, arm, name, mine, baseline, beside)
                above = path.relative_to(root).parts[:-4] if root is not None and path.is_relative_to(root) else ()
                # <collection>/<model>/<dataset>/<cell>/rows.jsonl
                where = "/".join(above)
                entries.append(Entry(where, summary, failed, mine, header, arm, len(labels), beside, path, disturbed))
    return entries


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
