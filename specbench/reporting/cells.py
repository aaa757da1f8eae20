"""Cells on disk -> entries: one drafter of one cell, summarised, ready for tables, figures and comparisons."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specbench.common.errors import SpecBenchError
from specbench.common.io import read_bytes, readable
from specbench.records import blocks, identity
from specbench.records.metrics import BASELINE, Summary, busy, summarise
from specbench.records.rows import CellFailure, Failure, Measurement, Row
from specbench.records.schema import Arm, Header
from specbench.records.statistics import Totals


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
    failures = [failure for _, failure in readable(below(root, "*.failed.json"), CellFailure.read, problems)]
    if not entries and not failures:
        said = f": {problems[0]}" if problems else "; run `make bench` first"
        raise SpecBenchError(f"no rows under results={root}{said}")
    return Found(entries, failures, problems)


@dataclass
class Source:
    """A block as it was read, its rows of later arms among them. number: in order of time."""

    number: int
    path: Path
    collection: str
    header: Header
    rows: list[Row]
    failures: list[Failure]
    measured: list[Measurement]

    @property
    def group(self) -> tuple[str, ...]:
        """What blocks whose rows are pooled have in common. Seconds are those of one kind of machine."""
        machine = "" if self.header.get("replay") else identity.machine_key(self.header)
        study, model = self.header.get("study") or "", self.header["config"]["model"]["name"]
        return self.collection, study, model, identity.cell_key(self.header), machine


def collect(paths: Iterable[Path], root: Path | None = None, problems: list[str] | None = None) -> list[Entry]:
    """Entries of all drafters of all cells, each cell's blocks pooled; every generation counts once, the newest one.

    problems: see `specbench.common.io.readable`; a last row that was cut off is one too.
    """
    grouped: dict[tuple[str, ...], list[Source]] = {}
    for source in _sources(paths, root, problems):
        grouped.setdefault(source.group, []).append(source)
    return [entry for sources in grouped.values() for entry in _entries(sources)]


def _sources(paths: Iterable[Path], root: Path | None, problems: list[str] | None) -> list[Source]:
    """Blocks by age, without those that count no more."""
    found = []
    for path, (header, records) in readable(paths, blocks.read_block, problems):
        if header["decoding"] != identity.DECODING:
            if problems is not None:
                problems.append(
                    f"{path}: its rows were decoded by older rules (version {header['decoding']}); measure again"
                )
            continue
        if problems is not None and not read_bytes(path).endswith(b"\n"):
            problems.append(f"{path}: the last row was cut off by a crash and is left out")
        # <collection>/<model>/<cell>/<block>.jsonl
        above = path.relative_to(root).parts[:-3] if root is not None and path.is_relative_to(root) else ()
        rows = [r for r in records if isinstance(r, Row)]
        failures = [r for r in records if isinstance(r, Failure)]
        measured = [r for r in records if isinstance(r, Measurement)]
        found.append(Source(0, path, "/".join(above), header, rows, failures, measured))
    found.sort(key=lambda source: (source.header["started"], source.path.name))
    for number, source in enumerate(found):
        source.number = number
    return found


Key = tuple[str, tuple[str, str]]  # an arm's label and what determines its rows
Turn = tuple[str, int]  # of which question


def _entries(sources: Sequence[Source]) -> list[Entry]:
    """Of one cell: an entry an arm, its seeds together; of a study's arm as it is now, of plain runs each as it was."""
    rows: dict[Key, dict[Turn, tuple[Source, Row]]] = {}
    for source in sources:
        keys = {label: (label, identity.arm_key(arm)) for label, arm in source.header["arms"].items()}
        for key in keys.values():
            rows.setdefault(key, {})
        for row in source.rows:
            rows[keys[row.drafter]][row.text or row.question, row.turn] = source, row
    chosen = _current(rows, sources) if sources[0].header.get("study") else list(rows)
    named: dict[tuple[str, Any], list[Key]] = {}
    for key in chosen:
        source = _newest(key, sources)
        one = source.header["arms"][key[0]]
        of = one.get("of", key[0])
        named.setdefault((of, None if "of" in one or source.header.get("study") else key[1]), []).append(key)
    base = next((key for key in chosen if key[0] == BASELINE), None)
    made = [_entry(name, keys, rows, base, sources) for (name, _), keys in named.items()]
    return [entry for entry in made if entry is not None]


def _newest(key: Key, sources: Sequence[Source]) -> Source:
    """The newest block of an arm."""
    label, own = key
    return next(
        s for s in reversed(sources) if label in s.header["arms"] and identity.arm_key(s.header["arms"][label]) == own
    )


def _current(rows: Mapping[Key, Mapping[Turn, Any]], sources: Sequence[Source]) -> list[Key]:
    """Of each label the recipe of its newest block, and of that the tree with most rows."""
    found = []
    for label in dict.fromkeys(label for label, _ in rows):
        newest = next(s for s in reversed(sources) if label in s.header["arms"])
        recipe, _ = identity.arm_key(newest.header["arms"][label])
        mine = [key for key in rows if key[0] == label and key[1][0] == recipe]
        found.append(max(mine, key=lambda key: (len(rows[key]), _newest(key, sources).number)))
    return found


def _entry(
    name: str,
    keys: Sequence[Key],
    rows: Mapping[Key, Mapping[Turn, tuple[Source, Row]]],
    base: Key | None,
    sources: Sequence[Source],
) -> Entry | None:
    """Rows of an arm with the baseline's that they are held against; None for one that nothing was decoded of."""
    taken = [pair for key in keys for pair in rows[key].values()]
    failed = _failed(keys, rows, sources)
    if not taken and not failed:
        return None
    taken.sort(key=lambda pair: pair[0].number)
    mine = [row for _, row in taken]
    baseline = _baseline(taken, rows.get(base, {}) if base else {})
    header = _newest(keys[0], sources).header
    arm = header["arms"][keys[0][0]]
    beside = _measured(keys, sources)
    summary = summarise(header, arm, name, mine, baseline, beside)
    used = {source.number: source for source, _ in taken}
    disturbed = (busy(source.rows, source.header["hardware"]["cores"]) for source in used.values())
    path, collection = _newest(keys[0], sources).path, sources[0].collection
    return Entry(
        collection, summary, failed, mine, header, arm, len({label for label, _ in keys}), beside, path,
        next(filter(None, disturbed), None), baseline, keys[0][1], sources[0].group,
    )  # fmt: skip


def _baseline(taken: Sequence[tuple[Source, Row]], newest: Mapping[Turn, tuple[Source, Row]]) -> list[Row]:
    """For every row the baseline's of its own block; where that has none, as in replays, the newest one."""
    found: dict[Turn, Row] = {}
    own = {
        (source.number, row.text or row.question, row.turn): row
        for source in {s.number: s for s, _ in taken}.values() for row in source.rows if row.drafter == BASELINE
    }  # fmt: skip
    for source, row in taken:
        turn = (row.text or row.question, row.turn)
        beside = own.get((source.number, *turn)) or (newest[turn][1] if turn in newest else None)
        if beside is not None:
            found[turn] = beside
    return list(found.values())


def _failed(keys: Sequence[Key], rows: Mapping[Key, Mapping[Turn, Any]], sources: Sequence[Source]) -> int:
    """Generations that failed and were not made good."""
    lost = set()
    for source in sources:
        for failure in source.failures:
            key = (failure.drafter, identity.arm_key(source.header["arms"][failure.drafter]))
            turn = (failure.text or failure.question, failure.turn)
            if key in keys and turn not in rows[key]:
                lost.add((key, turn))
    return len(lost)


def _measured(keys: Sequence[Key], sources: Sequence[Source]) -> dict[str, list[Mapping[str, float]]]:
    """What was measured beside, by quantity: each repetition once."""
    found: dict[str, dict[tuple[str, int], Mapping[str, float]]] = {}
    for source in sources:
        for m in source.measured:
            if (m.drafter, identity.arm_key(source.header["arms"][m.drafter])) in keys:
                found.setdefault(m.what, {})[m.drafter, m.repetition] = m.values
    return {what: list(values.values()) for what, values in found.items()}


def pooled(entries: Sequence[Entry]) -> Entry:
    """Entries of one arm and cell from several kinds of machine, as one without speeds: every generation counts once."""
    first = max(entries, key=lambda e: e.summary.prompts)
    same = [e for e in entries if e.key == first.key]
    if len(same) < 2:
        return first
    rows = {(r.text or r.question, r.turn): r for e in [*same, first] for r in e.rows}
    base = {(r.text or r.question, r.turn): r for e in [*same, first] for r in e.baseline}
    summary = summarise(first.header, first.arm, first.name, list(rows.values()), list(base.values()), first.measured)
    return replace(first, summary=summary, rows=list(rows.values()), baseline=list(base.values()))


def below(root: Path, pattern: str) -> list[Path]:
    """Files under a results folder; those of `local` only if that folder itself is asked for."""
    return [p for p in sorted(root.rglob(pattern)) if "local" not in p.relative_to(root).parts]
