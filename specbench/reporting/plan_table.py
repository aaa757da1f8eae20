"""The plan of all studies as a table: what is measured, what is missing, about how long that takes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from specbench.reporting.tables import markdown_table

if TYPE_CHECKING:  # which imports torch
    from specbench.evaluation.plan import Task

COLUMNS = ("study", "cell", "kind", "questions", "planned", "minutes left", "claims waiting")


def markdown(tasks: Iterable[Task]) -> str:
    return markdown_table(COLUMNS, [_line(task) for task in tasks])


def _line(task: Task) -> list[str]:
    """A task in the order of `COLUMNS`."""
    return [
        task.study,
        f"{task.cell}: {task.folder}",
        task.kind,
        str(task.done),
        f"{task.planned}{'' if task.measured else ' and measurements'}",
        f"not testable here: {', '.join(task.missing)}" if task.missing else _minutes_left(task),
        str(task.claims if task.open else 0),
    ]


def _minutes_left(task: Task) -> str:
    if not task.open:
        return "0"
    return "?" if task.seconds is None else f"{task.seconds / 60:.0f}"
