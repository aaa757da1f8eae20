"""The whole report into a results folder: README.md, tables/ (Markdown, CSV, LaTeX), figures/ (PNG, SVG), report.html."""

import base64
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from markupsafe import Markup

from specbench.common.errors import SpecBenchError
from specbench.common.io import read_json, readable
from specbench.common.storage import PROJECT
from specbench.records import blocks, studies
from specbench.records.metrics import BASELINE
from specbench.records.schema import Trace
from specbench.records.studies import Study
from specbench.reporting import (
    analysis_tables,
    cells,
    claims,
    document,
    figures,
    freshness,
    names,
    overview,
    published,
    sections,
    tables,
    text,
    trainings,
    verdict,
)
from specbench.reporting.cells import Entry
from specbench.reporting.claims import Evidence
from specbench.reporting.document import Section, Table
from specbench.reporting.groups import groups
from specbench.reporting.overview import Overview, where

BENCH = "bench"  # the study that the answer is about
MOST = 2  # traces of a drafter on the page

CONVENTIONS = (
    "tau counts the bonus, not the prefill, and is pooled over cycles; in brackets its mean over generations. Speed-ups "
    "are ratios of pooled decode speeds on the same prompts; intervals are 95%, from resampling questions in pairs."
)


@dataclass(frozen=True)
class Sources:
    """Where a report's ingredients lie.

    Attributes:
        results: folder of rows; the report is written into it. published: the papers' numbers. studies: their folder.
        weights: trained drafters, for learning curves. chosen: names of studies; None for all.
    """

    results: Path
    published: Path = PROJECT / "results" / "published"
    studies: Path = studies.FOLDER
    weights: Path = PROJECT / "drafters" / "weights"
    chosen: Sequence[str] | None = None


class Report:
    """Everything that can be said about a results folder.

    Attributes:
        main: what the answer is about, its target first: the study `bench`, or plain runs where there is no such study.
        rest: everything else. view: of main, one target in one precision on one machine; others: the others.
        own: is there nothing of any study but the one that the answer is about?
        verdicts, papers: of all studies, on the target of the view alone.
        problems: one line on each file that cannot be read, and is left out. read: digest of the files, see `freshness`.

    Raises:
        SpecBenchError: no rows, none that can be read, or a study that is not there.
    """

    def __init__(self, sources: Sources):
        self.sources = sources
        self.read = freshness.digest(sources.results)
        found = cells.find(sources.results)
        self.entries, self.failures, self.problems = found.entries, found.failures, found.problems
        main = _main(self.entries)
        places = _places(main)
        self.main = list({id(e): e for group in places.values() for e in group}.values())
        mine = set(map(id, main))
        self.rest = names.labelled(e for e in self.entries if id(e) not in mine)
        self.main = names.labelled(self.main)
        self.view, *self.others = [Overview(group) for group in places.values()] or [Overview([])]
        self.answer = verdict.sentence(self.view.timed(self.view.first))
        self.insights = analysis_tables.all_of(self.view.known(self.view.first), self.view.timed(self.view.first))
        self.training = tables.training_lines(self.main)
        self.weights = _weights(sources.weights, self.main, self.problems)
        self.traces = self._traces()
        self.listed = chosen(sources.studies, sources.chosen, self.problems)
        self.own = not any(e.study for e in self.rest)
        target = next(iter(places))[0] if places else None
        judged = [e for e in self.entries if e.model == target]
        self.judged = _judged(target, self.entries)
        self.cuda = any(str(e.header["target"].get("device")).startswith("cuda") for e in self.entries)
        self.known = {name: Evidence(study, [e for e in judged if e.study == name]) for name, study in self.listed.items()}
        self.verdicts = [
            verdict for name, study in self.listed.items() for verdict in claims.judge_study(name, study, judged, self.cuda)
        ]
        numbers = published.load(sources.published, self.problems)
        self.papers = published.tables(numbers, self.known, self.problems)

    def state(self, study: str) -> str:
        """What became of a study: how much of it was measured, what it needs, or how to run it."""
        known = self.known[study]
        ours = [e for e in known.entries if e.name != BASELINE]
        if ours:
            arms, generations = len({e.name for e in ours}), sum(e.summary.prompts for e in ours)
            return f"{arms} of {len(known.study['arms'])} arms, {generations:,} generations"
        missing = studies.unmet(known.study.get("needs", {}), None, self.cuda)
        return (
            f"not testable here: needs {', '.join(missing)}"
            if missing
            else f"not run: python -m specbench.study study={study}"
        )

    def write(self) -> Path:
        """All files; returns the HTML's path."""
        root = self.sources.results
        drawn = figures.draw_all(self.view, self.entries, self.weights, root / "figures")
        (root / "tables").mkdir(parents=True, exist_ok=True)
        for name, table in self._tables().items():
            (root / "tables" / f"{name}.md").write_text(document.table(table) + "\n", encoding="utf-8")
            _write(root / "tables" / name, _frame(table), index=False)
        parts = sections.sections(self)
        written = document.files([block for part in parts for block in part.blocks], drawn)
        for paper in self.papers if any(paper.measured for paper in self.papers) else ():
            _write(root / "tables" / paper.slug, paper.frame(), index=True)
            written[f"tables/{paper.slug}.md"] = document.whole(paper.title, sections.paper_file(paper), drawn)
        for name, body in written.items():
            (root / name).write_text(body, encoding="utf-8")
        (root / "README.md").write_text(self.markdown(parts, drawn), encoding="utf-8")
        path = root / "report.html"
        path.write_text(self.html(parts, drawn), encoding="utf-8")
        freshness.record(root, self.read)
        return path

    def _tables(self) -> dict[str, Table]:
        """The measured tables by the name of their files."""
        found: dict[str, Table] = {}
        for i, (_, group) in enumerate(groups(self.main), 1):
            found |= {f"{name}-{i}" if i > 1 else name: table for name, table in _group_tables(group).items()}
        found |= {"acceptance": overview.acceptance(self.view), "speed-ups": overview.speeds(self.view)}
        found |= {name: Table(*table) for name, (_, table) in self.insights.items()}
        found["training"] = Table(tables.TRAINING, self.training)
        found["claims"] = Table(claims.COLUMNS, list(map(claims.cells, self.verdicts)))
        return {name: table for name, table in found.items() if table.lines}

    def markdown(self, parts: Sequence[Section], drawn: Mapping[str, str]) -> str:
        """`README.md`: what a code host shows for the folder."""
        head = f"# Results\n\nGenerated by `python -m specbench.report`; not to be edited. {CONVENTIONS}\n\n"
        return head + document.markdown(parts, drawn)

    def html(self, parts: Sequence[Section], drawn: Mapping[str, str]) -> str:
        """The self-contained page."""
        loader = jinja2.FileSystemLoader(Path(__file__).parent)
        environment = jinja2.Environment(loader=loader, autoescape=True, finalize=text.html)
        environment.filters |= {"fine": _fine}
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
            traces=_embedded(self.traces),
            after=sections.AFTER,
        )

    def _traces(self) -> list[dict[str, Any]]:
        """Of few drafters, those that the page shows the acceptance of before others; the main cells' before any other's.

        One that has no cycle has nothing to show.
        """
        wanted = {(e.model, e.name) for e in self.main}
        others = [e for e in self.rest if (e.model, e.name) in wanted]
        of = {_trace(e): e for e in [*reversed(others), *reversed(self.main)] if _trace(e).exists()}  # the main cells' last
        here, first = set(map(_trace, self.main)), [(e.model, e.name) for e in overview.chosen(self.view)]

        def place(path: Path) -> tuple[int, bool, Path]:
            key = of[path].model, of[path].name
            return first.index(key) if key in first else len(first), path not in here, path

        found: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for path, traces in readable(sorted(of, key=place), lambda p: read_json(p, list[Trace]), self.problems):
            entry = of[path]
            shown = [
                {**t, "title": text.visible(f"{entry.title}: question {t['question']} ({entry.dataset}, {entry.model})")}
                for t in traces if t["cycles"]
            ]  # fmt: skip
            if shown and (path in here or (entry.model, entry.name) not in found):
                found.setdefault((entry.model, entry.name), []).extend(shown)
        return [trace for traces in list(found.values())[: overview.TOP] for trace in traces[:MOST]]


def _trace(entry: Entry) -> Path:
    """Where an arm's traces lie; of several seeds the first one's."""
    label = next(label for label, arm in entry.header["arms"].items() if arm is entry.arm)
    return blocks.trace_path(entry.path.parent, label)


def _main(entries: Sequence[Entry]) -> list[Entry]:
    """What the answer is about: by target the study `bench`, or plain runs; without any of them the largest study."""
    bench = [e for e in entries if e.study == BENCH]
    plain = [e for e in entries if e.study is None and "/" not in e.collection]
    main = bench + [e for e in plain if e.model not in {b.model for b in bench}]
    if main or not entries:
        return main
    generations: dict[tuple[str | None, str], int] = {}
    for e in entries:
        generations[e.study, e.collection] = generations.get((e.study, e.collection), 0) + e.summary.prompts
    most = max(generations, key=lambda key: generations[key])
    return [e for e in entries if (e.study, e.collection) == most]


def _places(entries: Sequence[Entry]) -> dict[tuple[str, str, str], list[Entry]]:
    """Entries by target, precision and machine; where the largest group is first, of equal ones a quiet machine's.

    Replays hold no seconds, so they belong to every machine of their target.
    """
    found: dict[tuple[str, str, str], list[Entry]] = {}
    for e in (e for e in entries if not e.replayed):
        found.setdefault(where(e), []).append(e)
    for e in (e for e in entries if e.replayed):
        model, dtype, _ = where(e)
        machines = [place for place in found if place[:2] == (model, dtype)] or [(model, dtype, "")]
        for place in machines:
            found.setdefault(place, []).append(e)
    return dict(sorted(found.items(), key=lambda item: _standing(item[1]), reverse=True))


def _standing(entries: Sequence[Entry]) -> tuple[int, bool, int]:
    """Generations of the largest group that was timed, whether its machine was quiet, and generations of all."""
    timed = [group for _, group in groups(e for e in entries if not e.replayed)]
    largest: list[Entry] = max(timed, key=lambda group: sum(e.summary.prompts for e in group), default=[])
    total = sum(e.summary.prompts for e in entries)
    return sum(e.summary.prompts for e in largest), not any(e.busy for e in largest), total


def _judged(target: str | None, entries: Sequence[Entry]) -> str:
    """A sentence on where claims are judged, if there are other targets."""
    others = [model for model in dict.fromkeys(e.model for e in entries) if model != target]
    return f"Judged on {target}, where most was decoded; not on {', '.join(others)}." if others else ""


def _weights(folder: Path, entries: Sequence[Entry], problems: list[str]) -> dict[str, Mapping[str, Any]]:
    """Provenances of the targets' trained drafters by name; of several targets each with its target's."""
    there = {path.name: path for path in folder.glob("*")}  # names from rows do not become paths
    models = [model for model in dict.fromkeys(e.model for e in entries) if model in there]
    found = {model: trainings.below(there[model], problems) for model in models}
    several = sum(map(bool, found.values())) > 1
    return {f"{n} ({model})" if several else n: p for model, named in found.items() for n, p in named.items()}


def _group_tables(group: Sequence[Entry]) -> dict[str, Table]:
    """What files hold of comparable entries."""
    return {
        "decoding": Table(tables.COLUMNS, [tables.cells(e) for e in group]),
        "versus": Table(overview.VERSUS, overview.versus(overview.ranking(group))),
        "alphas": Table(tables.ALPHAS, [tables.alphas(e) for e in group]),
        "memory": Table(tables.MEMORY, tables.memory_lines(group)),
    }


INTERVAL = re.compile(r" (\[[-+\d., ]+\])(?=$|[\s,])")


def _fine(value: str) -> Markup:
    """A text whose intervals are set smaller, and may stand on a line of their own."""
    return Markup(INTERVAL.sub(r" <small>\1</small>", str(text.html(value))))


def _embedded(traces: list[dict[str, Any]]) -> Any:
    """JSON for a script element: nothing in it can end the element or be read as markup."""
    text = json.dumps(traces, ensure_ascii=True)
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(text) if traces else ""


def chosen(folder: Path, names: Sequence[str] | None = None, problems: list[str] | None = None) -> dict[str, Study]:
    """All studies of a folder, or the named ones. Raises `SpecBenchError` for one that is not there.

    problems: see `specbench.common.io.readable`.
    """
    names = [names] if isinstance(names, str) else names
    there = [path.stem for path in sorted(folder.glob("*.yaml"))]
    unknown = sorted(set(names or ()) - set(there))
    if unknown or not there:
        raise SpecBenchError(
            f"no study {', '.join(unknown) or 'at all'} in {folder}; there are {', '.join(there) or 'none'}"
        )
    return {name: study for name, study in studies.load(folder, problems).items() if not names or name in names}


def _frame(table: Table) -> pd.DataFrame:
    """A table's texts, for CSV and LaTeX."""
    lines = [[cell if isinstance(cell, str) else cell.text for cell in line] for line in table.lines]
    return pd.DataFrame(lines, columns=list(table.columns))


def _write(path: Path, frame: pd.DataFrame, index: bool) -> None:
    """One table as CSV and as LaTeX."""
    # not `with_suffix`: a name may hold a dot
    Path(f"{path}.csv").write_text(text.csv_table(frame, index), encoding="utf-8")
    Path(f"{path}.tex").write_text(text.latex_table(frame, index), encoding="utf-8")
