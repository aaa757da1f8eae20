"""One run: a drafter, or several, beside the baseline on one data set."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from specbench.common.budget import Budget
from specbench.common.errors import Reported, SpecBenchError
from specbench.config import run_spec
from specbench.config.cli import composed, sweeping, typed_overrides
from specbench.config.run_spec import FailureRecord, RunSpec
from specbench.engine.device import free_unused
from specbench.evaluation import arms, cell
from specbench.evaluation.cell import CellResult, Live
from specbench.records.metrics import BASELINE


def decode(specs: Sequence[RunSpec], reused: arms.Reused, live: Live | None = None) -> CellResult:
    """Decode what is missing of the cell of some drafters and the baseline.

    Args:
        specs: one a drafter; the first one says what they have in common.
        reused: what the cells of a sweep share. live: makes the table that a terminal shows while decoding.
    """
    spec, budget = specs[0], Budget.of_minutes(specs[0].minutes)
    torch.set_num_threads(spec.threads or torch.get_num_threads())
    made = [arms.make(drafter_spec) for drafter_spec in specs]
    questions = spec.dataset.load()
    groups = arms.groups(spec, [drafter for drafter, _ in made])
    if sum(map(len, groups)) < len(made):
        groups = [list(range(len(made)))]  # one of them does not fit at all: loading says so
    target, chat = arms.load(spec, [made[index][0] for index in max(groups, key=len)], reused)
    waiting, results = dict(enumerate(made)), []
    del made
    for group in groups:
        bound = [arms.build(specs[index], target, made=waiting.pop(index)) for index in group]
        if bound[0].label != BASELINE:
            bound.insert(0, arms.baseline(spec, target))
        results.append(cell.run(spec, target, chat, bound, questions, budget=budget, live=live))
        bound.clear()  # the next group has no room beside it
        free_unused()
    return cell.together(results)


def require_complete(result: CellResult) -> None:
    """Raises `SpecBenchError` for what failed, but not for what there was no time for."""
    if result.failed:
        where = f"rows in {result.ledger.folder} say why"
        raise SpecBenchError(f"{result.failed} generations failed; {where}; run again to retry them")
    if result.unmeasured:
        raise SpecBenchError(f"{result.unmeasured} measurements failed, named above; run again to retry them")
    for part in result.parts:
        arms.require_lossless(part.ledger.block.path)


def other_specs(config: Any) -> list[RunSpec]:
    """The runs of `drafter=[a,b]` after the first one's. config: composed from the command line."""
    names = list(config.get("drafters") or [])
    if len(set(names)) < len(names):
        raise SpecBenchError(f"drafter=[{','.join(names)}]: each drafter once; options of one may differ in a study")
    words = [word for key, word in typed_overrides() if key not in ("drafter", "drafters")]
    specs = [run_spec.from_config(composed("run", [f"drafter={name}", *words])) for name in names[1:] if name != BASELINE]
    if names and any(spec.drafter["name"] == config.drafter.name for spec in specs):
        raise SpecBenchError("drafter.name: several drafters cannot have one name; leave it out")
    return specs


@contextmanager
def failure_recorded(config: Any) -> Iterator[None]:
    """In a sweep, print a failure, and write it to the cell's folder. Raises it elsewhere, `Reported` in a sweep."""
    record = FailureRecord(config)
    try:
        yield
    except Exception as error:
        if not sweeping():
            raise
        record.write(error)
        raise Reported from error
    else:
        record.clear()
