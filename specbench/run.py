"""Door one: decode a dataset with a drafter beside the baseline, and print what came of it.

python -m specbench.run drafter=eagle2 dataset=mtbench
python -m specbench.run -m drafter=none,vanilla,eagle2 dataset=mtbench,humaneval
"""

import sys
from typing import Any

import torch

from specbench import arms, cell, sweep
from specbench.assets import require_writable
from specbench.config import run_spec
from specbench.config.run_spec import RunOptions as Options
from specbench.config.run_spec import RunSpec
from specbench.door import command, run_door, sweeping
from specbench.errors import SpecBenchError, visible
from specbench.evaluation.budget import Budget
from specbench.faults import told
from specbench.metrics import BASELINE
from specbench.records import blocks, identity
from specbench.reporting import cells, tables


@command("run")
def job(config: Any) -> None:
    """One cell. In a sweep a failure is written down where the cell would be, and the next cell begins."""
    place = run_spec.failure_path(config)
    try:
        spec = run_spec.from_config(config, Options)
        require_writable(spec.folder)
        if spec.rerun == "failed" and not place.exists() and not _has_failed_rows(spec):
            return
        _run(spec)
    except Exception as error:
        if not sweeping():
            raise
        failure = run_spec.failure(config, told(error))
        known = arms.lost(failure.error)  # said once; at the sweep's end all its cells are named
        failure.write(place)
        if not known:
            print(visible(f"specbench: {failure.drafter} on {failure.dataset}: {failure.error}"), file=sys.stderr)
    else:
        place.unlink(missing_ok=True)


def _run(spec: RunSpec) -> None:
    budget = Budget.of_minutes(spec.minutes)
    torch.set_num_threads(spec.threads or torch.get_num_threads())
    made = arms.make(spec)
    questions = spec.dataset.load()
    target, chat = arms.load(spec, [made[0]])
    own = arms.build(spec, target, made=made)
    sides = [own] if own.label == BASELINE else [arms.baseline(spec, target), own]
    ran = cell.run(spec, target, chat, sides, questions, budget=budget)
    if spec.show:
        tables.show(_entries(spec, sides))
    if budget.seconds is not None and ran.left:
        print(f"{own.label}: {ran.progress}")
    if ran.failed:
        raise SpecBenchError(
            f"{ran.failed} generations failed; rows in {spec.cell_folder} say why; run again to retry them"
        )
    if ran.unmeasured:
        raise SpecBenchError(f"{ran.unmeasured} measurements failed, named above; run again to retry them")
    arms.require_lossless(ran.ledger.block.path)


def _entries(spec: RunSpec, sides: list[arms.Arm]) -> list[cells.Entry]:
    """What the cell holds of this run's own arms."""
    own = {identity.arm_key(side.said) for side in sides}
    found = cells.collect(blocks.below(spec.cell_folder))
    return [entry for entry in found if entry.key in own]


def _has_failed_rows(spec: RunSpec) -> bool:
    """Did generations of this very configuration fail, and were not made good since?"""
    return any(
        entry.failed
        for entry in cells.collect(blocks.below(spec.cell_folder))
        if entry.name == spec.drafter["name"] and {**entry.header["config"], **_own(entry)} == spec.identity
    )


def _own(entry: cells.Entry) -> dict[str, Any]:
    return {name: entry.arm.get(name) for name in run_spec.OWN}


def main() -> None:
    """Run the job or the sweep; exit code 2 if any cell failed."""
    job()
    if sweep.failed:
        lost = sum(map(len, sweep.failed.values()))
        raise SpecBenchError(f"{lost} cells failed, named above; the same command tries them again")


if __name__ == "__main__":
    from specbench import run  # under its own name, by which launchers find it in other processes

    run_door(run.main, "run")
