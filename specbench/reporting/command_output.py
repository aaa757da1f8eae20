"""What commands print after measuring, and the files that they leave for other programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.common.errors import SpecBenchError, visible
from specbench.config import sweep
from specbench.config.cli import sweeping
from specbench.records import blocks
from specbench.records.rows import by_error
from specbench.records.studies import Study
from specbench.reporting import cells, claims, console, document, names, outcome, overview, tables, text, trainings
from specbench.reporting.cells import Entry
from specbench.reporting.groups import Asked, groups, measured

if TYPE_CHECKING:  # imports torch
    from specbench.config.run_spec import RunSpec
    from specbench.evaluation.cell import CellResult
    from specbench.evaluation.study_runs import StudyCell
    from specbench.reporting.bundle import Report


def show_run(spec: RunSpec, ran: CellResult) -> None:
    """Print a cell's table (in a sweep only at its end); write `summary.json` and `answers.jsonl`."""
    asked = Asked.of(ran.ledger, ran.digests)
    entries = measured([asked])
    outcome.write(spec.cell_folder, entries, ran.text)
    if sweeping():
        sweep.note(asdict(asked))
    elif spec.show:
        console.show(entries, spec.details, spec.results)


def show_sweep(noted: Sequence[Mapping[str, Any]], results: Path, details: bool) -> None:
    """Print the tables of a whole sweep. noted: see `specbench.config.sweep.note`."""
    console.show(measured(Asked(**asked) for asked in noted), details, results)


def show_study(name: str, study: Study, decoded: Sequence[tuple[StudyCell, CellResult]]) -> None:
    """Print the tables of a study's cells and the verdicts on its claims; write each cell's files."""
    base = decoded[0][0].base
    entries = []
    for cell, ran in decoded:
        own = measured([Asked.of(ran.ledger, ran.digests)])
        outcome.write(cell.base.cell_folder, own, ran.text)
        entries += own
    if base.show:
        console.show(entries, base.details, base.results.parent)
    folders = dict.fromkeys(cell.base.cell_folder for cell, _ in decoded)
    entries = cells.collect([path for folder in folders for path in blocks.below(folder)])
    console.show_claims(claims.judge_study(name, study, entries), study["arms"])


def show_report(report: Report, table: bool) -> None:
    """Print what a report leaves out, what failed and the count of verdicts. table: also the main result."""
    for problem in report.problems:
        print(f"LEFT OUT {visible(problem)}")
    for error, arms in by_error(report.failures).items():
        print(visible(f"FAILED {', '.join(arms)}: {error}"))
    if table:
        console.show(report.view.timed(report.view.first) or report.main)
    if any(any(v.effects) for v in report.verdicts):  # a study was run
        print("claims: " + ", ".join(f"{count} {kind}" for kind, count in claims.tally(report.verdicts).items()))


def rows_markdown(results: Path) -> str:
    """All rows under a results folder as Markdown tables."""
    found = cells.find(results)
    training = tables.markdown_table(trainings.COST, trainings.cost_lines(found.entries))
    return f"{entries_markdown(found.entries, found.problems)}\n{training}\n"


def entries_markdown(entries: Sequence[Entry], problems: Sequence[str] = ()) -> str:
    """The console's tables as Markdown, below the problems with files."""
    parts = list(map(tables.markdown_problem, problems))
    for group in groups(names.labelled(entries)):
        lines = [console.caption(group, machine=True), *tables.notes(group)]
        parts += [text.markdown(lines[0]), document.table(overview.numbers(group)), *map(text.markdown, lines[1:])]
    return "\n\n".join(parts) + "\n"


def weights_markdown(folder: Path) -> str:
    """Held-out acceptance of the trained weights under a folder, as a Markdown table.

    Raises:
        SpecBenchError: there are none.
    """
    problems: list[str] = []
    lines = trainings.held_out_lines(folder, problems)
    if not lines:
        raise SpecBenchError(problems[0] if problems else f"no trained weights under training={folder}")
    left_out = "".join(f"{tables.markdown_problem(problem)}\n\n" for problem in problems)
    return left_out + tables.markdown_table(trainings.HELD_OUT, lines) + "\n"
