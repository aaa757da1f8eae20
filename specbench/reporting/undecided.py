"""The claims whose verdicts wait for a cell of the plan: those cells are measured first.

A claim has its verdict once rows of all planned questions are there, on whichever kind of machine they were timed: a cell
that this machine has not timed waits for nothing if another machine's rows decide all its claims.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from specbench.records import blocks, studies
from specbench.records.cell_options import CellOptions, option
from specbench.records.studies import PLACE, Study, cell_options, measured_in
from specbench.reporting import cells, claims
from specbench.reporting.evidence import TIMED, Evidence

if TYPE_CHECKING:  # imports torch
    from specbench.evaluation.plan import Scope, Task

UNDECIDED = (claims.NOT_RUN, claims.PRELIMINARY)


def first(tasks: Sequence[Task], scope: Scope) -> list[Task]:
    """The tasks with their number of claims that wait, those first that any claim waits for, otherwise in their order."""
    listed, target = studies.load(scope.folder), option(scope.overrides, "model.name", scope.model)
    by_study: dict[str, list[Task]] = {}
    for task in tasks:
        by_study.setdefault(task.study, []).append(task)
    waiting: dict[tuple[str, int], int] = {}
    for name, own in by_study.items():
        if any(task.open for task in own):
            entries = cells.collect(blocks.below(scope.results / name), problems=[])
            found = by_cell(name, listed[name], [e for e in entries if e.model == target], {t.cell: t.stale for t in own})
            waiting |= {(name, number): len(open_claims) for number, open_claims in enumerate(found)}
    counted = [replace(task, claims=waiting[task.study, task.cell] if task.open else 0) for task in tasks]
    return sorted(counted, key=lambda task: task.claims == 0)


def by_cell(
    name: str, study: Study, entries: Sequence[cells.Entry], stale: Mapping[int, Collection[str]]
) -> list[list[Mapping[str, Any]]]:
    """The claims of a study without a verdict, for each of its cells that their tests read.

    Args:
        entries: of one target.
        stale: by cell, arms that have other weights now than in their rows; claims about those wait, decided or not.
    """
    known, cells_here = Evidence(study, entries), range(len(study["cells"]))
    waiting: list[list[Mapping[str, Any]]] = [[] for _ in cells_here]
    for verdict in claims.judge_study(name, study, entries):
        claim = verdict.claim
        for number in cells_here if verdict.verdict != claims.NOT_TESTABLE else ():
            tests = [test for test in claim["tests"] if _reads(test, study, known, number)]
            if verdict.verdict not in UNDECIDED:
                tests = [t for t in tests if "metric" in t and {t["of"], t.get("over")} & {*stale.get(number, ())}]
            if tests:
                waiting[number].append(claim)
    return waiting


def _reads(test: Mapping[str, Any], study: Study, known: Evidence, number: int) -> bool:
    """Is a test about rows or measurements of this cell?"""
    if "measured" in test:
        return test["measured"].partition(".")[0] in measured_in(study, number)
    options, at = cell_options(study), test.get("at", {})
    cell = options[number]
    sides = [(test["of"], at)]
    if "than" not in test:
        sides.append((test.get("over", test["of"]), test.get("over_at", at)))
    if not any(_is_at(cell, known.place_of(arm, where)) for arm, where in sides):
        return False
    if {test["metric"], test.get("over_metric", "")} & {*TIMED}:
        return not cell.replayed
    here = {name: getattr(cell, name) for name in PLACE}
    return cell.replayed or not any(one.replayed and _is_at(one, here) for one in options)  # counts are read from replays


def _is_at(cell: CellOptions, place: Mapping[str, Any]) -> bool:
    """Is a cell one of those that a place names? Several data sets are the mean over them."""
    datasets = place["dataset"] if isinstance(place["dataset"], list) else [place["dataset"]]
    return cell.dataset in datasets and all(getattr(cell, name) == place[name] for name in PLACE if name != "dataset")
