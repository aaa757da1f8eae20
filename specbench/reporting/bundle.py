"""The whole report into a results folder: README.md, tables/ (Markdown, CSV, LaTeX), figures/ (PNG, SVG), report.html."""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from markupsafe import Markup

from specbench import studies
from specbench.errors import SpecBenchError
from specbench.files import read_json, readable
from specbench.measure import ROOT
from specbench.reporting import cells, claims, figures, published, tables, text, trainings
from specbench.reporting.cells import Entry
from specbench.shapes import Benchmarks, Drafters, Trace
from specbench.studies import Study

BENCHMARKS: dict[str, Any] = {"benchmarks.json": Benchmarks, "drafters.json": Drafters}

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
    published: Path = ROOT / "results" / "published"
    studies: Path = studies.FOLDER
    weights: Path = ROOT / "drafters" / "weights"
    chosen: Sequence[str] | None = None


class Report:
    """Everything that can be said about a results folder.

    Attributes:
        problems: one line on each file that cannot be read, and is left out.

    Raises:
        SpecBenchError: no rows, none that can be read, or a list of claims that is not there.
    """

    def __init__(self, sources: Sources):
        self.sources = sources
        found = cells.find(sources.results)
        self.entries, self.failures, self.problems = found.entries, found.failures, found.problems
        main = [e for e in self.entries if "/" not in e.collection]
        most, self.judged = _judged(main or self.entries)
        self.main = sorted(main, key=lambda e: _where(e) != most)  # these first
        self.studies = [e for e in self.entries if "/" in e.collection]
        named = [*self.main, *(e for e in self.studies if "-" in e.name)]  # a study's plain names are not the drafters
        self.parts = [_part(caption, group) for caption, group in cells.groups(self.main).items()]
        self.study_parts = [_part(caption, group) for caption, group in cells.groups(self.studies).items()]
        self.training = tables.training_lines(self.main)
        self.weights = _weights(sources.weights, self.main, self.problems)
        self.files = {name: self._measured(name, shape) for name, shape in BENCHMARKS.items()}
        self.traces = self._traces()
        listed = chosen(sources.studies, sources.chosen, self.problems)
        judged = [e for e in self.entries if e.model == most[0]]
        cuda = any(str(e.header["target"].get("device")).startswith("cuda") for e in self.entries)
        self.verdicts = [v for name, study in listed.items() for v in claims.judge_study(name, study, judged, cuda)]
        measured = published.Measured.of(named)
        self.papers = published.tables(published.load(sources.published, self.problems), measured)

    def write(self) -> Path:
        """All files; returns the HTML's path."""
        root = self.sources.results
        benchmarks, drafters = self.files["benchmarks.json"], self.files["drafters.json"]
        drawn = figures.draw_all(self.main, self.entries, self.weights, benchmarks, drafters, root / "figures")
        (root / "tables").mkdir(parents=True, exist_ok=True)
        for name, frame in self._frames().items():
            _write_table(root / "tables" / name, frame)
        for paper in self.papers:
            _write_table(root / "tables" / paper.slug, paper.frame(), paper)
        (root / "README.md").write_text(self.markdown(drawn), encoding="utf-8")
        path = root / "report.html"
        path.write_text(self.html(drawn), encoding="utf-8")
        return path

    def _frames(self) -> dict[str, pd.DataFrame]:
        """The measured tables, as frames by file name."""
        frames = {}
        for i, part in enumerate(self.parts):
            for name in ("decoding", "versus", "alphas", "memory"):
                columns, lines = part[name]
                frames[f"{name}-{i + 1}" if i else name] = pd.DataFrame(lines, columns=list(columns))
        frames["training"] = pd.DataFrame(self.training, columns=list(tables.TRAINING))
        frames["claims"] = pd.DataFrame(map(claims.cells, self.verdicts), columns=list(claims.COLUMNS))
        return {name: frame for name, frame in frames.items() if len(frame)}

    def markdown(self, drawn: Mapping[str, str]) -> str:
        """`README.md`: what a code host shows for the folder."""
        parts = ["# Results", "", f"Generated by `python -m specbench.report`; not to be edited. {CONVENTIONS}", ""]
        lost = (f"{f.drafter} on {f.dataset} ({f.model}): {f.error}" for f in self.failures)
        parts += [f"**FAILED** {text.markdown(line)}\n" for line in lost]
        parts += [f"{tables.markdown_problem(problem)}\n" for problem in self.problems]
        for part in self.parts:
            caption, verdict = text.markdown(part["caption"]), text.markdown(part["verdict"])
            parts += [f"## {caption}", "", verdict, "", tables.markdown_table(*part["decoding"]), ""]
            if part["versus"][1]:
                parts += ["### Is that difference real?", ""]
                parts += [tables.markdown_table(*part["versus"]), "", tables.markdown_table(*part["alphas"]), ""]
            if part["memory"][1]:
                parts += ["### Peak memory while decoding, MiB", "", tables.markdown_table(*part["memory"]), ""]
        if self.training:
            parts += ["## Training", "", tables.markdown_table(tables.TRAINING, self.training), ""]
        parts += [
            "## Claims",
            "",
            *([f"{text.markdown(self.judged)}\n"] if self.judged else []),
            claims.markdown(self.verdicts),
        ]
        parts += ["## Figures", "", *(f"![{title}](figures/{name}.png)\n" for name, title in drawn.items())]
        for part in self.study_parts:
            parts += [f"## {text.markdown(part['caption'])}", "", tables.markdown_table(*part["decoding"]), ""]
        parts += ["## The papers' tables", "", "Measured / published; also as CSV and LaTeX in `tables/`.", ""]
        for paper in self.papers:
            count = f"{paper.measured} cells measured" if paper.measured else "nothing measured yet"
            parts.append(f"- [{text.markdown(paper.title)}](tables/{paper.slug}.md): {count}")
        return "\n".join(parts) + "\n"

    def html(self, drawn: Mapping[str, str]) -> str:
        """The self-contained page."""
        loader = jinja2.FileSystemLoader(Path(__file__).parent)
        environment = jinja2.Environment(loader=loader, autoescape=True, finalize=text.html)
        folder = self.sources.results / "figures"
        images = [
            {"title": title, "data": base64.b64encode((folder / f"{name}.svg").read_bytes()).decode()}
            for name, title in drawn.items()
        ]
        return environment.get_template("report.html.j2").render(
            source=self.sources.results.name,
            conventions=CONVENTIONS,
            failures=self.failures,
            problems=self.problems,
            main=self.parts,
            studies=self.study_parts,
            training=(tables.TRAINING, self.training) if self.training else None,
            figures=images,
            judged=self.judged,
            claims=(claims.COLUMNS, [claims.cells(v) for v in self.verdicts]),
            papers=[
                {
                    "title": p.title,
                    "measured": p.measured,
                    "columns": list(p.columns),
                    "lines": p.lines(),
                    "notes": [*p.notes, *(f"tau: {c}" for c in p.conventions)],
                }
                for p in sorted(self.papers, key=lambda p: -p.measured)
            ],
            traces=_embedded(self.traces),
        )

    def _measured(self, name: str, shape: Any) -> Mapping[str, Any]:
        """The first benchmark file of a name; nothing where there is none."""
        paths = cells.below(self.sources.results, name)[:1]
        return next((found for _, found in readable(paths, lambda p: read_json(p, shape), self.problems)), {})

    def _traces(self) -> list[dict[str, Any]]:
        """Of the benchmark itself; one that has no cycle has nothing to show."""
        paths = sorted(p for p in {e.path.parent / "trace.json" for e in self.main} if p.exists())
        found = []
        for path, traces in readable(paths, lambda p: read_json(p, list[Trace]), self.problems):
            dataset, model = path.parent.parent.name, path.parent.parent.parent.name
            for part in filter(lambda t: t["cycles"], traces):
                title = f"{part['drafter']}: question {part['question']} ({dataset}, {model})"
                found.append({**part, "title": text.visible(title)})
        return found


def _weights(folder: Path, entries: Sequence[Entry], problems: list[str]) -> dict[str, Mapping[str, Any]]:
    """Provenances of the targets' trained drafters by name; of several targets each with its target's."""
    there = {path.name: path for path in folder.glob("*")}  # names from rows do not become paths
    models = [model for model in dict.fromkeys(e.model for e in entries) if model in there]
    found = {model: trainings.below(there[model], problems) for model in models}
    several = sum(map(bool, found.values())) > 1
    return {f"{n} ({model})" if several else n: p for model, named in found.items() for n, p in named.items()}


def _where(e: Entry) -> tuple[str, str, str]:
    """What two drafters must have in common for one to be called better: target, precision, machine."""
    return e.model, e.dtype, e.machine


def _judged(entries: Sequence[Entry]) -> tuple[tuple[str, str, str], str]:
    """Where claims are judged: where there are most generations; and a sentence on it if there are others."""
    generations: dict[tuple[str, str, str], int] = {}
    for e in entries:
        generations[_where(e)] = generations.get(_where(e), 0) + e.summary.prompts
    most = max(generations, key=lambda where: generations[where], default=("", "", ""))
    others = "; ".join(", ".join(where) for where in generations if where != most)
    return most, f"Judged on {', '.join(most)}, where most was decoded; not on {others}." if others else ""


def _part(caption: str, group: Sequence[Entry]) -> dict[str, Any]:
    """What is said of comparable entries; each table as (columns, lines)."""
    return {
        "caption": f"{caption}, {group[0].summary.prompts} generations",
        "verdict": tables.verdict(group),
        "decoding": (tables.COLUMNS, [tables.cells(e) for e in group]),
        "versus": (tables.VERSUS, tables.versus(group)),
        "alphas": (tables.ALPHAS, [tables.alphas(e) for e in group]),
        "memory": (tables.MEMORY, tables.memory_lines(group)),
    }


def _embedded(traces: list[dict[str, Any]]) -> Any:
    """JSON for a script element: nothing in it can end the element or be read as markup."""
    text = json.dumps(traces, ensure_ascii=True)
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(text) if traces else ""


def chosen(folder: Path, names: Sequence[str] | None = None, problems: list[str] | None = None) -> dict[str, Study]:
    """All studies of a folder, or the named ones. Raises `SpecBenchError` for one that is not there.

    problems: see `specbench.files.readable`.
    """
    names = [names] if isinstance(names, str) else names
    there = [path.stem for path in sorted(folder.glob("*.yaml"))]
    unknown = sorted(set(names or ()) - set(there))
    if unknown or not there:
        raise SpecBenchError(
            f"no study {', '.join(unknown) or 'at all'} in {folder}; there are {', '.join(there) or 'none'}"
        )
    return {name: study for name, study in studies.load(folder, problems).items() if not names or name in names}


def _write_table(path: Path, frame: pd.DataFrame, paper: published.PaperTable | None = None) -> None:
    """One table three times. A paper's Markdown pairs measured and published in a cell; CSV and LaTeX have two columns."""
    index = paper is not None
    if paper is None:
        body = tables.markdown_table(list(frame.columns), frame.astype(str).values.tolist())
    else:
        notes = [f"- {text.markdown(note)}" for note in (*paper.notes, *(f"tau: {c}" for c in paper.conventions))]
        table = tables.markdown_table(["measured / published", *paper.columns], paper.lines())
        body = f"# {text.markdown(paper.title)}\n\n{table}\n\n" + "\n".join(notes)
    path.with_suffix(".md").write_text(body.rstrip() + "\n", encoding="utf-8")
    path.with_suffix(".csv").write_text(text.csv_table(frame, index), encoding="utf-8")
    path.with_suffix(".tex").write_text(text.latex_table(frame, index), encoding="utf-8")
