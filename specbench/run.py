"""Decode a dataset with a drafter beside the baseline, and print what came of it.

python -m specbench.run drafter=eagle2 dataset=mtbench
python -m specbench.run drafter=[suffix,eagle2] dataset=mtbench       # in one process, beside one baseline
python -m specbench.run -m drafter=none,vanilla,eagle2 dataset=mtbench,humaneval
python -m specbench.run drafter=suffix prompts=FILE.jsonl
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch

from specbench import sweep
from specbench.common.budget import Budget
from specbench.common.errors import SpecBenchError, format_exception, visible
from specbench.common.storage import require_writable
from specbench.config import run_spec
from specbench.config.cli import command, run_cli, sweeping, typed_overrides
from specbench.config.run_spec import RunOptions as Options
from specbench.config.run_spec import RunSpec
from specbench.evaluation import arms, cell
from specbench.records import blocks
from specbench.records.metrics import BASELINE
from specbench.reporting import cells, console, outcome
from specbench.reporting.groups import Asked, measured


@command("run")
def job(config: Any) -> None:
    """One cell. In a sweep a failure is written down where the cell would be, and the next cell begins."""
    place = run_spec.failure_path(config)
    try:
        spec = run_spec.from_config(config, Options)
        require_writable(spec.folder)
        if spec.rerun == "failed" and not place.exists() and not _has_failed_rows(spec):
            return
        _run(spec, _others(config))
    except Exception as error:
        if not sweeping():
            raise
        failure = run_spec.failure(config, format_exception(error))
        known = arms.lost(failure.error)  # said once; at the sweep's end all its cells are named
        failure.write(place)
        if not known:
            print(visible(f"specbench: {failure.drafter} on {failure.dataset}: {failure.error}"), file=sys.stderr)
    else:
        place.unlink(missing_ok=True)


def _run(spec: RunSpec, others: Sequence[RunSpec] = ()) -> None:
    budget = Budget.of_minutes(spec.minutes)
    torch.set_num_threads(spec.threads or torch.get_num_threads())
    made = [(one, arms.make(one)) for one in (spec, *others)]
    questions = spec.dataset.load()
    target, chat = arms.load(spec, [drafter for _, (drafter, _) in made])
    own = [arms.build(one, target, made=parts) for one, parts in made]
    sides = own if own[0].label == BASELINE else [arms.baseline(spec, target), *own]
    ran = cell.run(spec, target, chat, sides, questions, budget=budget, live=console.live)
    _show(spec, ran)
    if budget.seconds is not None and ran.left:
        print(f"{', '.join(side.label for side in own)}: {ran.progress}")
    if ran.failed:
        raise SpecBenchError(
            f"{ran.failed} generations failed; rows in {spec.cell_folder} say why; run again to retry them"
        )
    if ran.unmeasured:
        raise SpecBenchError(f"{ran.unmeasured} measurements failed, named above; run again to retry them")
    arms.require_lossless(ran.ledger.block.path)


def _show(spec: RunSpec, ran: cell.Ran) -> None:
    """The table, now or at the sweep's end, and what is left for other programs."""
    asked = Asked.of(ran.ledger, ran.asked)
    found = measured([asked])
    outcome.write(spec.cell_folder, found, ran.text)
    if sweeping():
        sweep.note(spec.results, asked)
    elif spec.show:
        console.show(found, spec.details, console.how_to_report(spec.results))


def _others(config: Any) -> list[RunSpec]:
    """The runs of `drafter=[a,b]` behind the first one's."""
    names = list(config.get("drafters") or [])
    if len(set(names)) < len(names):
        raise SpecBenchError(f"drafter=[{','.join(names)}]: each drafter once; options of one may differ in a study")
    words = [word for key, word in typed_overrides() if key not in ("drafter", "drafters")]
    return [run_spec.from_config(run_spec.compose_run([f"drafter={name}", *words]), Options) for name in names[1:]]


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

    run_cli(run.main, "run")
