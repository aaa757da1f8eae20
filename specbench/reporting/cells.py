"""Cells on disk -> entries: one drafter of one cell, summarised, ready for tables, figures and comparisons."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from specbench.common.errors import SpecBenchError
from specbench.common.io import readable
from specbench.records import blocks, identity
from specbench.records.metrics import BASELINE, Summary, summarise
from specbench.records.rows import CellFailure, Failure, Row
from specbench.records.schema import Arm, Header
from specbench.records.statistics import Totals
from specbench.reporting.sources import Key, Source, Turn, read_sources, turn_of


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
    busy: str | None = None  # of its blocks, where the machine had other work to do meanwhile
    baseline: Sequence[Row] = ()  # of the same questions, from the same blocks
    key: tuple[str, str] = ("", "")  # what determines its rows, see `identity.arm_key`
    cell: tuple[str, ...] = ()  # what its blocks have in common with others that they are pooled with
    label: str = ""  # what tables call it beside others, see `specbench.reporting.names`

    @property
    def name(self) -> str:
        return self.summary.drafter

    @property
    def title(self) -> str:
        """What a table calls it."""
        return self.label or self.name

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
        vectors = f" ({hardware['instructions']})" if hardware.get("instructions") else ""
        return f"{hardware['device']}{vectors}, {hardware['cores']} cores, torch {self.header['versions']['torch']}"

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
    def served(self) -> bool:
        """Answers of another engine?"""
        return any(row.served is not None for row in self.rows)

    @property
    def weights(self) -> Mapping[str, Any]:
        """Provenance; empty where the drafter brings no weights of ours."""
        return self.arm["weights"]

    @property
    def growth(self) -> Mapping[str, Any]:
        """How its trees grow, as the configuration says; empty where it says nothing."""
        found: Any = self.arm["drafter"].get("growth") or {}
        return found if isinstance(found, Mapping) else {}

    @cached_property
    def questions(self) -> frozenset[str]:
        """That it was asked, by their texts."""
        return frozenset(row.text or row.question for row in self.rows)

    def with_rows(self, rows: Sequence[Row], baseline: Sequence[Row]) -> "Entry":
        """The same of other rows."""
        summary = summarise(self.header, self.arm, self.name, rows, baseline, self.measured)
        return replace(self, summary=summary, rows=rows, baseline=baseline)

    @cached_property
    def conditions(self) -> dict[str, Any]:
        """What two entries must have in common to be compared: aspect -> value."""
        config, target = self.header["config"], self.header["target"]
        return {
            "study": self.study,
            "target": (target.get("fingerprint"), self.model),
            "machine": "" if self.replayed else identity.machine_key(self.header),
            "dtype": self.dtype,
            "length": config.get("decode"),
            "dataset": self.dataset,
            "prompts": {row.question: row.text for row in self.rows},
            "temperature": config["sampler"],
            "replay": self.replayed,
            "tree": self.arm["drafter"].get("growth"),
        }

    @property
    def totals(self) -> Totals:
        return self.summary.totals

    @property
    def caption(self) -> str:
        """What a table of comparable entries says on top."""
        mode = "greedy" if self.temperature == 0 else f"T={self.temperature}"
        where = f"{self.collection}: " if self.collection else ""
        replayed = ", replayed" if self.replayed else ""
        cap = (self.header["config"].get("decode") or {}).get("max_new_tokens")
        tokens = f", {cap:,} tokens at most" if isinstance(cap, int) else ""
        machine = "" if self.replayed else f", {self.machine}"  # a replay is the same on any
        return f"{where}{self.model}, {self.dataset}, {mode}{tokens}, {self.dtype}{replayed}{machine}"


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
    entries = collect(blocks.below(root), root, problems)
    failures = [failure for _, failure in readable(blocks.below(root, "*.failed.json"), CellFailure.read, problems)]
    if not entries and not failures:
        reason = f": {problems[0]}" if problems else "; run `make bench` first"
        raise SpecBenchError(f"no rows under results={root}{reason}")
    return Found(entries, failures, problems)


def collect(paths: Iterable[Path], root: Path | None = None, problems: list[str] | None = None) -> list[Entry]:
    """Entries of all drafters of all cells, each cell's blocks pooled; every generation counts once, the newest one.

    problems: see `specbench.common.io.readable`; a last row that was cut off is one too.
    """
    grouped: dict[tuple[str, ...], list[Source]] = {}
    for source in read_sources(paths, root, problems):
        grouped.setdefault(source.group, []).append(source)
    return [entry for sources in grouped.values() for entry in _entries(sources)]


@dataclass
class ArmRows:
    """What a cell's blocks hold of one arm, as one recipe and tree determined it.

    Attributes:
        newest: its newest block. rows: by turn, each with its block. lost: turns that failed once.
    """

    newest: Source
    rows: dict[Turn, tuple[Source, Row]] = field(default_factory=dict)
    lost: set[Turn] = field(default_factory=set)


def _arm_rows(sources: Sequence[Source]) -> dict[Key, ArmRows]:
    """All arms of one cell, from its blocks by age."""
    found: dict[Key, ArmRows] = {}
    for source in sources:
        for key in source.keys.values():
            found.setdefault(key, ArmRows(source)).newest = source
        for record in source.records:
            if isinstance(record, Row):
                found[source.keys[record.drafter]].rows[turn_of(record)] = source, record
            elif isinstance(record, Failure):
                found[source.keys[record.drafter]].lost.add(turn_of(record))
    return found


def _entries(sources: Sequence[Source]) -> list[Entry]:
    """Of one cell: an entry an arm, its seeds together; of a study's arm as it is now, of plain runs each as it was."""
    arms, study = _arm_rows(sources), sources[0].header.get("study")
    chosen = _current(arms, sources) if study else list(arms)
    named: dict[tuple[str, Any], list[Key]] = {}
    for key in chosen:
        arm = arms[key].newest.header["arms"][key[0]]
        of = arm.get("of", key[0])
        named.setdefault((of, None if "of" in arm or study else key[1]), []).append(key)
    base = next((arms[key].rows for key in chosen if key[0] == BASELINE), {})
    made = [_entry(name, {key: arms[key] for key in keys}, base, sources) for (name, _), keys in named.items()]
    return [entry for entry in made if entry is not None]


def _current(arms: Mapping[Key, ArmRows], sources: Sequence[Source]) -> list[Key]:
    """Of each label the recipe of its newest block, and of that the tree with most rows."""
    newest = {label: key[1][0] for source in sources for label, key in source.keys.items()}
    found: dict[str, Key] = {}
    for key, arm in arms.items():
        label, (recipe, _) = key
        rival = arms.get(found.get(label, key), arm)
        if recipe == newest[label] and (
            label not in found or (len(arm.rows), arm.newest.number) > (len(rival.rows), rival.newest.number)
        ):
            found[label] = key
    return [found[label] for label in dict.fromkeys(label for label, _ in arms)]


def _entry(
    name: str, arms: Mapping[Key, ArmRows], newest_base: Mapping[Turn, tuple[Source, Row]], sources: Sequence[Source]
) -> Entry | None:
    """Rows of an arm with the baseline's that they are compared with; None for one that nothing was decoded of."""
    pairs = [pair for arm in arms.values() for pair in arm.rows.values()]
    failed = sum(len(arm.lost - arm.rows.keys()) for arm in arms.values())
    if not pairs and not failed:
        return None
    pairs.sort(key=lambda pair: pair[0].number)
    rows, baseline = [row for _, row in pairs], _baseline(pairs, newest_base)
    (label, key), newest = next((key, arm.newest) for key, arm in arms.items())
    header, arm = newest.header, newest.header["arms"][label]
    measured = _measured(arms, sources)
    used = {source.number: source for source, _ in pairs}
    return Entry(
        collection=newest.collection,
        summary=summarise(header, arm, name, rows, baseline, measured),
        failed=failed,
        rows=rows,
        header=header,
        arm=arm,
        seeds=len({label for label, _ in arms}),
        measured=measured,
        path=newest.path,
        busy=next(filter(None, (source.busy for source in used.values())), None),
        baseline=baseline,
        key=key,
        cell=newest.group,
    )


def _baseline(pairs: Sequence[tuple[Source, Row]], newest: Mapping[Turn, tuple[Source, Row]]) -> list[Row]:
    """For every row the baseline's of its own block; where that has none, as in replays, the newest one."""
    found: dict[Turn, Row] = {}
    for source, row in pairs:
        turn = turn_of(row)
        beside = source.baseline.get(turn) or (newest[turn][1] if turn in newest else None)
        if beside is not None:
            found[turn] = beside
    return list(found.values())


def _measured(keys: Collection[Key], sources: Sequence[Source]) -> dict[str, list[Mapping[str, float]]]:
    """What was measured beside, by quantity: each repetition once."""
    found: dict[str, dict[tuple[str, int], Mapping[str, float]]] = {}
    for source in sources:
        for m in source.measurements:
            if source.keys[m.drafter] in keys:
                found.setdefault(m.what, {})[m.drafter, m.repetition] = m.values
    return {what: list(values.values()) for what, values in found.items()}


def pooled(entries: Sequence[Entry]) -> Entry:
    """Entries of one arm and cell from several kinds of machine, as one without speeds: every generation counts once."""
    first = max(entries, key=lambda e: e.summary.prompts)
    same = [e for e in entries if e.key == first.key]
    if len(same) < 2:
        return first
    rows = {turn_of(row): row for e in [*same, first] for row in e.rows}
    base = {turn_of(row): row for e in [*same, first] for row in e.baseline}
    return first.with_rows(list(rows.values()), list(base.values()))
