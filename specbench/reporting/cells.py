"""From the blocks of a results folder to entries: one drafter of one cell, with its metrics."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from specbench.common.errors import SpecBenchError
from specbench.common.io import readable
from specbench.records import blocks, identity, studies, trainings
from specbench.records.metrics import BASELINE, Summary, summarise
from specbench.records.rows import CellFailure, Failure, Measurement, Row
from specbench.records.schema import ArmHeader, Header
from specbench.records.totals import Totals
from specbench.reporting.sources import Key, Source, Turn, read_sources, turn_of


@dataclass(frozen=True)
class Entry:
    """One drafter of one cell; all training seeds of an arm together."""

    collection: str  # the folder under the results folder; "" for rows right under it
    summary: Summary
    failed: int  # generations
    rows: Sequence[Row]
    header: Header
    arm: ArmHeader  # its part of the header; the first seed's
    seeds: int
    measured: Mapping[str, Sequence[Mapping[str, float]]]  # quantity -> values by repetition
    path: Path
    busy: str | None = None  # note if the machine was busy
    baseline: Sequence[Row] = ()  # rows of the same questions, from the same blocks
    key: tuple[str, str] = ("", "")  # see `identity.arm_key`
    cell: tuple[str, ...] = ()  # see `Source.group`
    label: str = ""  # name in tables, see `specbench.reporting.names`
    superseded: bool = False  # do newer rows here have other weights from the same folder?

    @property
    def name(self) -> str:
        return self.summary.drafter

    @property
    def title(self) -> str:
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
    def place(self) -> dict[str, Any]:
        """What names its cell within a study, see `records.studies.At`."""
        return {n: getattr(self, n) for n in studies.PLACE}

    @property
    def batch(self) -> int:
        """Sequences decoded together."""
        return self.header["config"].get("batch", 1)

    @property
    def replayed(self) -> bool:
        """Acceptance only, without speeds?"""
        return self.header.get("replay", False)

    @property
    def machine(self) -> str:
        hardware = self.header["hardware"]
        vectors = f" ({hardware['instructions']})" if hardware.get("instructions") else ""
        return f"{hardware['device']}{vectors}, {hardware['cores']} cores, torch {self.header['versions']['torch']}"

    @property
    def precision(self) -> str:
        """In which the target computes, and how its passes are run."""
        graphs = " with graphs" if self.header["config"].get("backend") == "graphs" else ""
        quantised = f" with {self.quantised} weights" if self.quantised else ""
        return self.header["target"]["dtype"] + quantised + graphs

    @property
    def quantised(self) -> str | None:
        """How the weights of the target's layers were rounded."""
        return self.header["target"].get("quantised")

    @property
    def cut_after(self) -> int | None:
        """Tokens after which the link to the server broke."""
        link: Mapping[str, Any] = self.header["config"].get("link") or {}
        return link.get("cut_after")

    @property
    def adapted(self) -> str | None:
        """Name of the target's adapter."""
        return self.header["target"].get("adapted")

    @property
    def parameters(self) -> int:
        """Multiplied in one draft pass, the shared LM head included."""
        return self.arm["parameters"]

    @property
    def lossy(self) -> bool:
        """Verified by a rule that changes the target's distribution?"""
        return self.arm["lossy"]

    @property
    def outdated(self) -> bool:
        """Are its speeds those of an engine that has become faster or slower since?"""
        return not self.replayed and not identity.speeds_count(self.header)

    @property
    def served(self) -> bool:
        """Answers of another engine?"""
        return any(row.served is not None for row in self.rows)

    @property
    def weights(self) -> Mapping[str, Any]:
        """Provenance; empty for a drafter without weights."""
        return self.arm["weights"]

    @property
    def growth(self) -> Mapping[str, Any]:
        """Configuration of its tree policy; empty without one."""
        growth: Any = self.arm["drafter"].get("growth")
        return growth if isinstance(growth, Mapping) else {}

    @cached_property
    def questions(self) -> frozenset[str]:
        """Its questions, see `PromptRecord.asked`."""
        return frozenset(row.asked for row in self.rows)

    def shares_questions(self, other: "Entry") -> bool:
        """Are there questions of one text in both, as of a data set under two system prompts?"""
        mine, theirs = ({row.text for row in e.rows if row.text} for e in (self, other))
        return not mine.isdisjoint(theirs)

    def with_rows(self, rows: Sequence[Row], baseline: Sequence[Row]) -> "Entry":
        """A copy with other rows."""
        summary = summarise(self.header, self.arm, self.name, rows, baseline, self.measured)
        return replace(self, summary=summary, rows=rows, baseline=baseline)

    @cached_property
    def conditions(self) -> dict[str, Any]:
        """Aspects in which compared entries must agree."""
        config, target = self.header["config"], self.header["target"]
        return {
            "study": self.study,
            "target": (target.get("fingerprint"), self.model),
            "machine": "" if self.replayed else identity.machine_key(self.header),
            "dtype": self.precision,
            "length": identity.plain_options(config.get("decode")),
            "dataset": self.dataset,
            "prompts": {row.question: row.text for row in self.rows},
            "temperature": identity.plain_options(config["sampler"]),
            "replay": self.replayed,
            "batch": self.batch,
            "cut_after": self.cut_after,
            "tree": self.arm["drafter"].get("growth"),
        }

    @property
    def totals(self) -> Totals:
        return self.summary.totals

    def among(self, category: str, others: bool = False) -> Totals:
        """Sums over the questions of one category, or of all others."""
        chosen = {row.asked for row in self.rows if (row.category == category) != others}
        return self.totals.among([question for question in self.totals.questions if question in chosen])


@dataclass(frozen=True)
class Results:
    """What a results folder holds. problems: one line on each file that was left out."""

    entries: list[Entry]
    failures: list[CellFailure]
    problems: list[str]


def find(root: Path) -> Results:
    """Everything readable under a results folder.

    Raises:
        SpecBenchError: there is nothing that can be read; it names the first unreadable file.
    """
    problems: list[str] = []
    entries = collect(blocks.below(root), root, problems)
    failures = [failure for _, failure in readable(blocks.below(root, "*.failed.json"), CellFailure.read, problems)]
    if not entries and not failures:
        reason = f": {problems[0]}" if problems else "; run `make bench` first"
        raise SpecBenchError(f"no rows under results={root}{reason}")
    return Results(entries, failures, problems)


def collect(paths: Iterable[Path], root: Path | None = None, problems: list[str] | None = None) -> list[Entry]:
    """Entries of all drafters of all cells, each cell's blocks pooled; of a generation's rows the newest counts.

    problems: see `specbench.common.io.readable`.
    """
    cells: dict[tuple[str, ...], list[Source]] = {}
    for source in read_sources(paths, root, problems):
        cells.setdefault(source.group, []).append(source)
    return _with_superseded([entry for sources in cells.values() for entry in _entries(sources)])


def _with_superseded(entries: Sequence[Entry]) -> list[Entry]:
    """The same, each with whether its weights are those of the newest rows."""
    newest: dict[tuple[str, str], str] = {}
    for e in sorted(entries, key=lambda e: e.header["started"]):
        newest |= _weights_read(e)
    return [replace(e, superseded=not _weights_read(e).items() <= newest.items()) for e in entries]


def _weights_read(e: Entry) -> dict[tuple[str, str], str]:
    """SHA-256 of the weights by target and folder."""
    return {(e.model, folder): digest for folder, digest in trainings.weights_read(e.arm).items()}


@dataclass
class ArmRows:
    """What a cell's blocks hold of one arm with one recipe and tree.

    Attributes:
        newest: its newest block. rows: by turn, each with its block. failed: turns with a failure.
        measured: block, number in the block, measurement.
    """

    newest: Source
    rows: dict[Turn, tuple[Source, Row]] = field(default_factory=dict)
    failed: set[Turn] = field(default_factory=set)
    measured: list[tuple[int, int, Measurement]] = field(default_factory=list)


def _arm_rows(sources: Sequence[Source]) -> dict[Key, ArmRows]:
    """All arms of one cell. sources: its blocks by age."""
    arms: dict[Key, ArmRows] = {}
    for source in sources:
        for key in source.keys.values():
            arms.setdefault(key, ArmRows(source)).newest = source
        for number, record in enumerate(source.records):
            if isinstance(record, Row):
                arms[source.keys[record.drafter]].rows[turn_of(record)] = source, record
            elif isinstance(record, Failure):
                arms[source.keys[record.drafter]].failed.add(turn_of(record))
            elif isinstance(record, Measurement):
                arms[source.keys[record.drafter]].measured.append((source.number, number, record))
    return arms


def _entries(sources: Sequence[Source]) -> list[Entry]:
    """Entries of one cell: of a study's arm only its current recipe and tree, of plain runs each one."""
    arms, study = _arm_rows(sources), sources[0].header.get("study")
    keys = _current(arms, sources) if study else list(arms)
    by_name: dict[tuple[str, Any], list[Key]] = {}  # seeds of an arm share a name
    for key in keys:
        arm = arms[key].newest.header["arms"][key[0]]
        by_name.setdefault((arm.get("of", key[0]), None if "of" in arm or study else key[1]), []).append(key)
    base = next((arms[key].rows for key in keys if key[0] == BASELINE), {})
    entries = [_entry(name, {key: arms[key] for key in own}, base) for (name, _), own in by_name.items()]
    return [entry for entry in entries if entry is not None]


def _current(arms: Mapping[Key, ArmRows], sources: Sequence[Source]) -> list[Key]:
    """For each label the recipe of its newest block, and of its trees the one with most rows."""
    recipes = {label: key[1][0] for source in sources for label, key in source.keys.items()}
    current: dict[str, list[Key]] = {label: [] for label, _ in arms}
    for label, key in arms:
        if key[0] == recipes[label]:
            current[label].append((label, key))
    return [max(keys, key=lambda k: (len(arms[k].rows), arms[k].newest.number)) for keys in current.values()]


def _entry(name: str, arms: Mapping[Key, ArmRows], newest_base: Mapping[Turn, tuple[Source, Row]]) -> Entry | None:
    """The entry of an arm's seeds; None without rows and failures. newest_base: the baseline's newest rows."""
    pairs = sorted((pair for arm in arms.values() for pair in arm.rows.values()), key=lambda pair: pair[0].number)
    failed = sum(len(arm.failed - arm.rows.keys()) for arm in arms.values())
    if not pairs and not failed:
        return None
    rows, baseline = [row for _, row in pairs], _baseline(pairs, newest_base)
    (label, key), newest = next((key, arm.newest) for key, arm in arms.items())
    header, arm = newest.header, newest.header["arms"][label]
    measured = _measured(arms.values())
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
    """For each row the baseline's of the same block; without one, as in replays, the newest one."""
    baseline: dict[Turn, Row] = {}
    for source, row in pairs:
        turn = turn_of(row)
        if turn in source.baseline:
            baseline[turn] = source.baseline[turn]
        elif turn in newest:
            baseline[turn] = newest[turn][1]
    return list(baseline.values())


def _measured(arms: Iterable[ArmRows]) -> dict[str, list[Mapping[str, float]]]:
    """Measurements by quantity in order of time; each repetition counts once."""
    measured: dict[str, dict[tuple[str, int], Mapping[str, float]]] = {}
    for *_, m in sorted((m for arm in arms for m in arm.measured), key=lambda m: m[:2]):
        measured.setdefault(m.what, {})[m.drafter, m.repetition] = m.values
    return {quantity: list(values.values()) for quantity, values in measured.items()}


def pooled(entries: Sequence[Entry]) -> Entry:
    """One entry of an arm and cell from several kinds of machine, for metrics without seconds."""
    first = max(entries, key=lambda e: e.summary.prompts)
    same = [e for e in entries if e.key == first.key]
    if len(same) < 2:
        return first
    rows = {turn_of(row): row for e in [*same, first] for row in e.rows}
    base = {turn_of(row): row for e in [*same, first] for row in e.baseline}
    return first.with_rows(list(rows.values()), list(base.values()))
