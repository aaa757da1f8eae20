"""What commands print once their cells are measured, and the files that they leave for other programs.

Called by the commands, after `specbench.evaluation` is through.
"""

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
from specbench.reporting import cells, claims, console, outcome, tables, trainings
from specbench.reporting.groups import Asked, measured

if TYPE_CHECKING:  # these import torch
    from specbench.config.run_spec import RunSpec
    from specbench.evaluation.cell import Ran
    from specbench.evaluation.study_runs import StudyCell
    from specbench.reporting.bundle import Report


def show_run(spec: RunSpec, ran: Ran) -> None:
    """One cell: its table (of a job of a sweep, at the sweep's end), `summary.json` and `answers.jsonl`."""
    asked = Asked.of(ran.ledger, ran.asked)
    entries = measured([asked])
    outcome.write(spec.cell_folder, entries, ran.text)
    if sweeping():
        sweep.note(spec.results, asdict(asked))
    elif spec.show:
        console.show(entries, spec.details, console.how_to_report(spec.results))


def show_sweep(noted: Sequence[Mapping[str, Any]], results: Path, details: bool) -> None:
    """One table of all that a sweep was asked for, see `specbench.config.sweep.note`."""
    console.show(measured(Asked(**asked) for asked in noted), details, console.how_to_report(results))


def show_study(name: str, study: Study, decoded: Sequence[tuple[StudyCell, Ran]]) -> None:
    """The cells of a study as tables, and what became of its claims."""
    base = decoded[0][0].base
    entries = []
    for cell, ran in decoded:
        entries += (own := measured([Asked.of(ran.ledger, ran.asked)]))
        outcome.write(cell.base.cell_folder, own, ran.text)
    if base.show:
        console.show(entries, base.details, console.how_to_report(base.results.parent))
    folders = dict.fromkeys(cell.base.cell_folder for cell, _ in decoded)
    entries = cells.collect([path for folder in folders for path in blocks.below(folder)])
    console.show_claims(claims.judge_study(name, study, entries), study["arms"])


def show_report(report: Report, table: bool) -> None:
    """What a report leaves out, what failed, the newest table if asked for, and how many claims hold."""
    for problem in report.problems:
        print(f"LEFT OUT {visible(problem)}")
    for error, names in by_error(report.failures).items():
        print(visible(f"FAILED {', '.join(names)}: {error}"))
    if table:
        console.show(report.view.timed(report.view.first) or report.main)
    if any(any(v.effects) for v in report.verdicts):  # nothing is said of studies that were not run
        print("claims: " + ", ".join(f"{count} {kind}" for kind, count in claims.tally(report.verdicts).items()))


def rows_markdown(results: Path) -> str:
    """All rows under a results folder as Markdown tables."""
    found = cells.find(results)
    return (
        tables.markdown(found.entries, found.problems)
        + "\n"
        + tables.markdown_table(trainings.COST, trainings.cost_lines(found.entries))
        + "\n"
    )


def weights_markdown(folder: Path) -> str:
    """How good the trained weights under a folder are on held-out answers, as a Markdown table.

    Raises:
        SpecBenchError: there are none.
    """
    problems: list[str] = []
    lines = trainings.held_out_lines(folder, problems)
    if not lines:
        raise SpecBenchError(problems[0] if problems else f"no trained weights under training={folder}")
    left_out = "".join(f"{tables.markdown_problem(problem)}\n\n" for problem in problems)
    return left_out + tables.markdown_table(trainings.HELD_OUT, lines) + "\n"
