"""The report of a results folder: README.md, tables/ (Markdown, CSV, LaTeX), figures/ (PNG, SVG) and report.html."""

import base64
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from specbench.common.errors import SpecBenchError
from specbench.common.io import read_json, readable
from specbench.common.storage import PROJECT, write_file
from specbench.records import blocks, studies
from specbench.records.metrics import BASELINE
from specbench.records.schema import Trace
from specbench.records.studies import Study
from specbench.reporting import (
    analysis_tables,
    cells,
    claims,
    declared,
    document,
    fastest,
    figures,
    freshness,
    learning,
    names,
    overview,
    published,
    sections,
    text,
    trainings,
)
from specbench.reporting.cells import Entry
from specbench.reporting.document import Section, Table
from specbench.reporting.evidence import Evidence
from specbench.reporting.groups import groups
from specbench.reporting.overview import Overview, where

BENCH = "bench"  # the study of the main result
MAX_TRACES = 2  # of a drafter on the page

CONVENTIONS = (
    "tau counts the bonus, not the prefill, and is pooled over cycles. Speed-ups are ratios of pooled decode speeds on the "
    "same prompts; intervals are 95%, from resampling questions in pairs."
)
Setup = tuple[str, str, str]  # target, precision, machine
Heads = Sequence[Sequence[str]]  # lines of headings


@dataclass(frozen=True)
class Sources:
    """Inputs of a report.

    Attributes:
        results: folder of rows, into which the report is written. published: the papers' numbers. studies: their folder.
        weights: trained drafters, for what more training would bring. chosen: names of studies; None for all.
    """

    results: Path
    published: Path = freshness.PUBLISHED
    studies: Path = studies.FOLDER
    weights: Path = PROJECT / "drafters" / "weights"
    chosen: Sequence[str] | None = None


class Report:
    """Everything that a report shows of a results folder.

    Attributes:
        main: entries of the main result, its target first: the study `bench`, or plain runs without such a study.
        rest: all other entries. view: those of main with one target, precision and machine; others: the remaining views.
        no_studies: do all entries belong to the main result or to plain runs?
        evidence, verdicts, papers, figures: of all studies, on the view's target only.
        problems: one line on each file that was left out. digest: see `freshness`.

    Raises:
        SpecBenchError: no rows, none that can be read, or a study that does not exist.
    """

    def __init__(self, sources: Sources):
        self.sources = sources
        self.digest = freshness.digest(sources.results)
        results = cells.find(sources.results)
        self.entries, self.failures, self.problems = results.entries, results.failures, results.problems
        main = _main(self.entries)
        by_setup = _by_setup(main)
        self.main = names.labelled({id(e): e for group in by_setup.values() for e in group}.values())
        main_ids = set(map(id, main))
        rest: dict[str, list[Entry]] = {}  # by study: labels set apart what stands in one table
        for e in self.entries:
            if id(e) not in main_ids:
                rest.setdefault(e.study or e.collection, []).append(e)
        self.rest = [e for own in rest.values() for e in names.labelled(own)]
        self.view, *self.others = [Overview(group) for group in by_setup.values()] or [Overview([])]
        timed = self.view.timed(self.view.first)
        self.answer = fastest.sentence(timed)
        self.insights = analysis_tables.all_of(self.view.known(self.view.first), timed)
        self.training = trainings.cost_lines([e for e in self.main if not e.superseded])
        self.weights = _weights(sources.weights, self.main, self.problems)
        self.traces = self._traces()
        self.studies = _load_studies(sources.studies, sources.chosen, self.problems)
        self.no_studies = not any(e.study for e in self.rest)
        self._judge(next(iter(by_setup))[0] if by_setup else None)
        numbers = published.load(sources.published, self.problems)
        self.learning = learning.lines(self.weights, numbers)
        self.papers = published.tables(numbers, self.evidence, self.problems)
        self.figures = declared.all_of(self.evidence, numbers, self.cuda)

    def _judge(self, target: str | None) -> None:
        """Judge the claims of all studies on one target."""
        entries = [e for e in self.entries if e.model == target]
        others = [model for model in dict.fromkeys(e.model for e in self.entries) if model != target]
        self.target_note = f"Judged on {target}, where most was decoded; not on {', '.join(others)}." if others else ""
        self.cuda = any(str(e.header["target"].get("device")).startswith("cuda") for e in self.entries)
        self.evidence = {
            name: Evidence(study, [e for e in entries if e.study == name]) for name, study in self.studies.items()
        }
        self.verdicts = [
            v for name, study in self.studies.items() for v in claims.judge_study(name, study, entries, self.cuda)
        ]

    def state(self, study: str) -> str:
        """How much of a study was measured; otherwise what it needs, or the command that runs it."""
        evidence = self.evidence[study]
        measured = [e for e in evidence.entries if e.name != BASELINE]
        if measured:
            arms, generations = len({e.name for e in measured}), sum(e.summary.prompts for e in measured)
            return f"{arms} of {len(evidence.study['arms'])} arms, {generations:,} generations"
        if missing := studies.unmet(evidence.study.get("needs", {}), None, self.cuda):
            return f"not testable here: needs {', '.join(missing)}"
        return f"not run: specbench study study={study} results={self.sources.results.name}"

    def write(self) -> Path:
        """Write all files; returns the HTML's path."""
        root = self.sources.results
        drawn = figures.draw_all(self.view, self.entries, self.weights, root / "figures")
        drawn |= figures.draw_declared(self.figures, root / "figures")
        parts = sections.sections(self)
        blocks = [block for part in parts for block in part.blocks]
        files = document.files(blocks, drawn)
        for name, table in (document.tables(blocks) | self._data()).items():
            files |= _texts(name, [list(table.columns)], [list(map(document.plain, line)) for line in table.lines])
        for paper in self.papers if any(paper.measured for paper in self.papers) else ():
            files |= _texts(f"tables/{paper.slug}", paper.heads, paper.lines(), paper.csv_heads)
            files[f"tables/{paper.slug}.md"] = document.whole(paper.title, sections.paper_file(paper), drawn)
        files["README.md"] = self.markdown(parts, drawn)
        files["report.html"] = self.html(parts, drawn)
        for name, content in files.items():
            write_file(root / name, content, root)
        freshness.record(root, self.digest)
        return root / "report.html"

    def _data(self) -> dict[str, Table]:
        """By path without suffix: speeds of the main result, all pairs of its drafters, all verdicts on claims."""
        timed = self.view.timed(self.view.first)
        made = {"tables/claims": Table(claims.COLUMNS, list(map(claims.cells, self.verdicts)))}
        made["tables/versus"] = Table(overview.VERSUS, overview.versus(timed))
        if timed:
            speeds = overview.numbers(timed)
            made["tables/decoding"] = replace(speeds, columns=[heading.strip("=/ ") for heading in speeds.columns])
        return {name: table for name, table in made.items() if table.lines}

    def markdown(self, parts: Sequence[Section], drawn: Mapping[str, str]) -> str:
        """`README.md`. drawn: titles of the figures by name."""
        made = f"Generated by `specbench report results={self.sources.results.name}`; not to be edited."
        return f"# Results\n\n{made} {CONVENTIONS}\n\n" + document.markdown(parts, drawn)

    def html(self, parts: Sequence[Section], drawn: Mapping[str, str]) -> str:
        """The self-contained page."""
        loader = jinja2.FileSystemLoader(Path(__file__).parent)
        environment = jinja2.Environment(loader=loader, autoescape=True, finalize=text.html)
        environment.filters |= {"fine": _small_intervals}
        environment.policies["json.dumps_kwargs"] = {}  # keys in their order
        folder = self.sources.results / "figures"
        images = {
            name: {"title": title, "data": base64.b64encode((folder / f"{name}.svg").read_bytes()).decode()}
            for name, title in drawn.items()
        }
        return environment.get_template("report.html.j2").render(
            source=self.sources.results.name,
            conventions=CONVENTIONS,
            sections=parts,
            images=images,
            traces=self.traces,
            after=sections.AFTER,
        )

    def _traces(self) -> list[dict[str, Any]]:
        """Traces of the drafters whose acceptance is shown, then of others; the main cells' before those of other cells."""
        main_arms = {(e.model, e.name) for e in self.main}
        entries: dict[Path, Entry] = {}
        for e in (*self.main, *(e for e in self.rest if (e.model, e.name) in main_arms)):
            entries.setdefault(_trace_path(e), e)
        main_paths, first = set(map(_trace_path, self.main)), [(e.model, e.name) for e in overview.chosen(self.view)]

        def rank(path: Path) -> tuple[int, bool, Path]:
            arm = entries[path].model, entries[path].name
            return first.index(arm) if arm in first else len(first), path not in main_paths, path

        paths = sorted((path for path in entries if path.exists()), key=rank)
        by_arm: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for path, traces in readable(paths, lambda path: read_json(path, list[Trace]), self.problems):
            e = entries[path]
            titled = [
                {**t, "title": text.visible(f"{e.title}: question {t['question']} ({e.dataset}, {e.model})")}
                for t in traces if t["cycles"]
            ]  # fmt: skip
            if titled and (path in main_paths or (e.model, e.name) not in by_arm):
                by_arm.setdefault((e.model, e.name), []).extend(titled)
        return [trace for traces in list(by_arm.values())[: overview.TOP] for trace in traces[:MAX_TRACES]]


def _trace_path(e: Entry) -> Path:
    """File of an arm's traces; of several seeds the first one's."""
    label = next(label for label, arm in e.header["arms"].items() if arm is e.arm)
    return blocks.trace_path(e.path.parent, label)


def _main(entries: Sequence[Entry]) -> list[Entry]:
    """Entries of the main result: by target the study `bench`, or plain runs; without either, the largest study."""
    bench = [e for e in entries if e.study == BENCH]
    targets = {e.model for e in bench}
    plain = [e for e in entries if e.study is None and "/" not in e.collection and e.model not in targets]
    if bench or plain or not entries:
        return bench + plain
    generations: Counter[tuple[str | None, str]] = Counter()
    for e in entries:
        generations[e.study, e.collection] += e.summary.prompts
    largest = max(generations, key=lambda key: generations[key])
    return [e for e in entries if (e.study, e.collection) == largest]


def _by_setup(entries: Sequence[Entry]) -> dict[Setup, list[Entry]]:
    """Entries by target, precision and machine, the setup with the largest group first.

    Replays have no seconds, so they belong to every machine of their target.
    """
    by_setup: dict[Setup, list[Entry]] = {}
    for e in sorted(entries, key=lambda e: e.replayed):
        model, dtype, machine = where(e)
        if e.replayed:
            setups = [setup for setup in by_setup if setup[:2] == (model, dtype)] or [(model, dtype, "")]
        else:
            setups = [(model, dtype, machine)]
        for setup in setups:
            by_setup.setdefault(setup, []).append(e)
    return dict(sorted(by_setup.items(), key=lambda item: _size(item[1]), reverse=True))


def _size(entries: Sequence[Entry]) -> tuple[int, bool, int]:
    """Generations of the largest timed group, whether its machine was quiet, and generations of all entries."""
    timed = groups(e for e in entries if not e.replayed)
    largest: list[Entry] = max(timed, key=lambda group: sum(e.summary.prompts for e in group), default=[])
    total = sum(e.summary.prompts for e in entries)
    return sum(e.summary.prompts for e in largest), not any(e.busy for e in largest), total


def _weights(folder: Path, entries: Sequence[Entry], problems: list[str]) -> dict[str, Mapping[str, Any]]:
    """Provenance of the trained drafters of all targets of entries, by name; with the target if there are several."""
    folders = {path.name: path for path in folder.glob("*")}  # names from rows must not become paths
    models = [model for model in dict.fromkeys(e.model for e in entries) if model in folders]
    by_model = {model: trainings.below(folders[model], problems) for model in models}
    several = sum(map(bool, by_model.values())) > 1
    return {f"{n} ({model})" if several else n: p for model, named in by_model.items() for n, p in named.items()}


def _load_studies(folder: Path, names: Sequence[str] | None, problems: list[str]) -> dict[str, Study]:
    """All studies of a folder, or the named ones. Raises `SpecBenchError` for one that does not exist."""
    names = [names] if isinstance(names, str) else names
    existing = [path.stem for path in sorted(folder.glob("*.yaml"))]
    unknown = sorted(set(names or ()) - set(existing))
    if unknown or not existing:
        missing, known = ", ".join(unknown) or "at all", ", ".join(existing) or "none"
        raise SpecBenchError(f"no study {missing} in {folder}; there are {known}")
    return {name: study for name, study in studies.load(folder, problems).items() if not names or name in names}


def _small_intervals(value: str) -> Markup:
    """A text whose intervals are set smaller and can move to the next line."""
    return Markup(re.sub(r" (\[[-+\d., ]+\])(?=$|[\s,])", r" <small>\1</small>", str(text.html(value))))


def _texts(name: str, heads: Heads, lines: Sequence[Sequence[str]], csv_heads: Heads = ()) -> dict[str, str]:
    """A table as CSV and as LaTeX. name: path without suffix."""
    csv = text.csv_table([*(csv_heads or heads), *lines])
    return {f"{name}.csv": csv, f"{name}.tex": text.latex_table(heads, lines)}
