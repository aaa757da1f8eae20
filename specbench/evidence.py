"""Measure what the plan of all studies lacks, in order, as long as the time lasts.

python -m specbench.evidence plan=true                        # the whole plan: what is there, what is missing, how long
python -m specbench.evidence minutes=120                      # work through it
python -m specbench.evidence minutes=60 kind=replayed 'studies=[bench,hass]'
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from specbench.common.budget import Budget
from specbench.common.errors import SpecBenchError
from specbench.common.storage import require_writable
from specbench.common.types import Duration, Name, Text
from specbench.config import validation
from specbench.config.cli import command, run_cli
from specbench.evaluation import plan, workers
from specbench.records.studies import Override
from specbench.reporting import plan_table, undecided


@dataclass(frozen=True)
class Options:
    """The options in `conf/evidence.yaml`, which explains each."""

    plan: bool
    minutes: Duration
    slice: Duration
    kind: Literal["replayed", "trained", "timed"] | None
    studies: list[Name] | None
    model: Name
    results: Text
    data: Text | None
    overrides: list[Override]


@command("evidence")
def main(config: Any) -> None:
    """Print the plan, or measure what it lacks."""
    options = validation.check(config, Options)
    results = Path(options["results"])
    scope = plan.Scope(results, options["model"], tuple(options["overrides"]))
    tasks = plan.all_tasks(scope, options["studies"] or None)
    chosen = undecided.first([task for task in tasks if options["kind"] in (None, task.kind)], scope)
    if options["plan"]:
        print(plan_table.markdown(chosen))
        return
    require_writable(results)
    todo = [task for task in chosen if task.open]
    print(f"{len(chosen) - len(todo)} of {len(chosen)} cells are done or not testable here; now, in this order:")
    print(plan_table.markdown(todo), flush=True)
    settings = workers.Settings(scope, options["data"], 60 * options["slice"])
    if broken := workers.work(todo, settings, Budget.of_minutes(options["minutes"])):
        names = ", ".join(f"{task.study} (cell {task.cell})" for task in broken)
        raise SpecBenchError(f"failed, named above: {names}; the others were measured")


if __name__ == "__main__":
    run_cli(main, "evidence")
