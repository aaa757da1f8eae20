"""The plan of all studies as a table: what is measured, what is missing, and how long that takes after the trainings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from specbench.reporting.tables import markdown_table

if TYPE_CHECKING:  # imports torch
    from specbench.evaluation.plan import Task


def _minutes_left(task: Task) -> str:
    if task.missing:
        return f"not testable here: {', '.join(task.missing)}"
    if not task.open:
        return "0"
    return "?" if task.seconds is None else f"{task.seconds / 60:.0f}"


COLUMNS: dict[str, Callable[[Task], str]] = {
    "study": lambda task: task.study,
    "cell": lambda task: f"{task.cell}: {task.options.folder}",
    "kind": lambda task: task.kind,
    "questions": lambda task: str(task.done),
    "planned": lambda task: f"{task.planned}{'' if task.measured else ' and measurements'}",
    "trainings left": lambda task: str(task.trainings if task.open else 0),
    "minutes left": _minutes_left,
    "claims waiting": lambda task: str(task.claims),
}


def markdown(tasks: Iterable[Task]) -> str:
    return markdown_table(list(COLUMNS), [[column(task) for column in COLUMNS.values()] for task in tasks])
