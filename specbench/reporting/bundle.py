"""The whole report into a results folder: README.md, tables/ (Markdown, CSV, LaTeX), figures/ (PNG, SVG), report.html."""

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
import yaml
from markupsafe import Markup

from specbench.errors import SpecBenchError
from specbench.measure import ROOT
from specbench.records import CellFailure
from specbench.reporting import cells, claims, figures, published, tables
from specbench.reporting.cells import Entry

CONVENTIONS = (
    "tau counts the bonus, not the prefill, and is pooled over cycles; in brackets its mean over generations. Speed-ups "
    "are ratios of pooled decode speeds on the same prompts; intervals are 95%, from resampling questions in pairs."
)


@dataclass(frozen=True)
class Sources:
    """Where a report's ingredients lie.

    Attributes:
        results: folder of rows; the report is written into it. published: the papers' numbers. claims: lists of claims.
        weights: trained drafters, for learning curves. chosen: names of lists of claims; None for all.
    """

    results: Path
    published: Path = ROOT / "results" / "published"
    claims: Path = ROOT / "conf" / "claims"
    weights: Path = ROOT / "drafters" / "weights"
    chosen: Sequence[str] | None = None


class Report:
    """Everything that can be said about a results folder.

    Raises:
        SpecBenchError: no rows, or rows, claims or published numbers that cannot be read; the file is named.
    """

    def __init__(self, sources: Sources):
        self.sources = sources
        paths = cells.below(sources.results, "rows.jsonl")
        self.failures: list[CellFailure] = cells.failures(sources.results)
        if not paths and not self.failures:
            raise SpecBenchError(f"no rows under results={sources.results}; run `make bench` first")
        self.problems = [f"{p}: the last row was cut off by a crash and is left out" for p in paths if cells.cut_off(p)]
        self.entries = cells.collect(paths, sources.results)
        main = [e for e in self.entries if "/" not in e.collection]
        most, self.judged = _judged(main or self.entries)
        self.main = sorted(main, key=lambda e: _where(e) != most)  # these first
        self.studies = [e for e in self.entries if "/" in e.collection]
        named = [*self.main, *(e for e in self.studies if "-" in e.name)]  # a study's plain names are not the drafters
        self.parts = [_part(caption, group) for caption, group in cells.groups(self.main).items()]
        self.study_parts = [_part(caption, group) for caption, group in cells.groups(self.studies).items()]
        self.training = tables.training_lines(self.main)
        _, self.benchmarks = _measured(sources.results, "benchmarks.json")
        folder, self.drafters = _measured(sources.results, "drafters.json")
        listed = claims_listed(sources.claims, sources.chosen)
        judged = [e for e in self.main if _where(e) == most] + [e for e in self.studies if e.model == most[0]]
        known = lru_cache(lambda dataset: claims.evidence(judged, dataset))
        self.verdicts = claims.ledger(listed, known, folder)
        measured = published.Measured.of(named)
        self.papers = published.tables(published.load(sources.published), measured)

    def write(self) -> Path:
        """All files; returns the HTML's path."""
        root = self.sources.results
        found = {model: figures.provenances(self.sources.weights / model) for model in {e.model: 0 for e in self.main}}
        several = sum(map(bool, found.values())) > 1
        weights = {f"{n} ({model})" if several else n: p for model, named in found.items() for n, p in named.items()}
        drawn = figures.draw_all(self.main, self.entries, weights, self.benchmarks, self.drafters, root / "figures")
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
        parts += [f"**FAILED** {f.drafter} on {f.dataset} ({f.model}): {f.error}\n" for f in self.failures]
        parts += [f"{problem}\n" for problem in self.problems]
        for part in self.parts:
            parts += [f"## {part['caption']}", "", part["verdict"], "", tables.markdown_table(*part["decoding"]), ""]
            if part["versus"][1]:
                parts += ["### Is that difference real?", ""]
                parts += [tables.markdown_table(*part["versus"]), "", tables.markdown_table(*part["alphas"]), ""]
            if part["memory"][1]:
                parts += ["### Peak memory while decoding, MiB", "", tables.markdown_table(*part["memory"]), ""]
        if self.training:
            parts += ["## Training", "", tables.markdown_table(tables.TRAINING, self.training), ""]
        parts += ["## Claims", "", *([f"{self.judged}\n"] if self.judged else []), claims.markdown(self.verdicts)]
        parts += ["## Figures", "", *(f"![{title}](figures/{name}.png)\n" for name, title in drawn.items())]
        for part in self.study_parts:
            parts += [f"## {part['caption']}", "", tables.markdown_table(*part["decoding"]), ""]
        parts += ["## The papers' tables", "", "Measured / published; also as CSV and LaTeX in `tables/`.", ""]
        for paper in self.papers:
            count = f"{paper.measured} cells measured" if paper.measured else "nothing measured yet"
            parts.append(f"- [{paper.title}](tables/{paper.slug}.md): {count}")
        return "\n".join(parts) + "\n"

    def html(self, drawn: Mapping[str, str]) -> str:
        """The self-contained page."""
        environment = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True)
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
            traces=_embedded(self._traces()),
        )

    def _traces(self) -> list[dict[str, Any]]:
        found = []
        for path in sorted({e.path.parent / "trace.json" for e in self.main}):
            if path.exists():
                for part in json.loads(path.read_text(encoding="utf-8")):
                    dataset, model = path.parent.parent.name, path.parent.parent.parent.name
                    found.append({**part, "title": f"{part['drafter']}: question {part['question']} ({dataset}, {model})"})
        return found


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


def claims_listed(folder: Path, chosen: Sequence[str] | None = None) -> list[Any]:
    """All claims of a folder, or those of the chosen lists. Raises `SpecBenchError` for a list that is not there."""
    files = sorted(folder.glob("*.yaml"))
    unknown = sorted(set(chosen or ()) - {f.stem for f in files})
    if unknown or not files:
        there = ", ".join(f.stem for f in files) or "none"
        raise SpecBenchError(f"no claims {', '.join(unknown) or 'at all'} in {folder}; there are {there}")
    files = [f for f in files if not chosen or f.stem in chosen]
    return [claim for file in files for claim in yaml.safe_load(file.read_text(encoding="utf-8"))]


def _measured(results: Path, name: str) -> tuple[Path, dict[str, Any]]:
    """The first benchmark file of a name, and its folder; nothing where there is none."""
    path = next(iter(cells.below(results, name)), None)
    return (path.parent, json.loads(path.read_text())) if path else (results, {})


def _write_table(path: Path, frame: pd.DataFrame, paper: published.PaperTable | None = None) -> None:
    """One table three times. A paper's Markdown pairs measured and published in a cell; CSV and LaTeX have two columns."""
    if paper is None:
        lines: Iterable[list[str]] = frame.astype(str).values.tolist()
        text = tables.markdown_table(list(frame.columns), lines)
    else:
        body = tables.markdown_table(["measured / published", *paper.columns], paper.lines())
        notes = [f"- {note}" for note in paper.notes] + [f"- tau: {c}" for c in paper.conventions]
        text = f"# {paper.title}\n\n{body}\n\n" + "\n".join(notes)
    path.with_suffix(".md").write_text(text.rstrip() + "\n", encoding="utf-8")
    index = paper is not None
    frame.to_csv(path.with_suffix(".csv"), index=index, lineterminator="\n")
    path.with_suffix(".tex").write_text(frame.to_latex(index=index, escape=True), encoding="utf-8")
