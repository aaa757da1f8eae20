"""One run: a drafter, or several, beside the baseline on one data set."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from specbench.common.budget import Budget
from specbench.common.errors import SpecBenchError, format_exception, visible
from specbench.config import run_spec
from specbench.config.cli import sweeping, typed_overrides
from specbench.config.run_spec import RunSpec
from specbench.evaluation import arms, cell
from specbench.evaluation.cell import Ran
from specbench.evaluation.targets import Targets, TargetUnavailable
from specbench.records import blocks
from specbench.records.blocks import Ledger
from specbench.records.metrics import BASELINE


def decode(specs: Sequence[RunSpec], targets: Targets, live: Callable[[Ledger, Sequence[str]], str] | None = None) -> Ran:
    """Decode what is missing of the cell of some drafters, the baseline beside them unless it is the first one.

    Args:
        specs: one a drafter; the first one says what they have in common.
        live: the table so far, see `cell.run`.
    """
    spec, budget = specs[0], Budget.of_minutes(specs[0].minutes)
    torch.set_num_threads(spec.threads or torch.get_num_threads())
    made = [(one, arms.make(one)) for one in specs]
    questions = spec.dataset.load()
    target, chat = targets.load(spec, [drafter for _, (drafter, _) in made])
    sides = [arms.build(one, target, made=parts) for one, parts in made]
    if sides[0].label != BASELINE:
        sides.insert(0, arms.baseline(spec, target))
    return cell.run(spec, target, chat, sides, questions, budget=budget, live=live)


def require_complete(ran: Ran) -> None:
    """Raises `SpecBenchError` for what failed, but not for what there was no time for."""
    if ran.failed:
        raise SpecBenchError(
            f"{ran.failed} generations failed; rows in {ran.ledger.folder} say why; run again to retry them"
        )
    if ran.unmeasured:
        raise SpecBenchError(f"{ran.unmeasured} measurements failed, named above; run again to retry them")
    arms.require_lossless(ran.ledger.block.path)


def others(config: Any) -> list[RunSpec]:
    """The runs of `drafter=[a,b]` behind the first one's. config: composed from what was typed."""
    names = list(config.get("drafters") or [])
    if len(set(names)) < len(names):
        raise SpecBenchError(f"drafter=[{','.join(names)}]: each drafter once; options of one may differ in a study")
    words = [word for key, word in typed_overrides() if key not in ("drafter", "drafters")]
    return [run_spec.from_config(run_spec.compose_run([f"drafter={name}", *words])) for name in names[1:]]


def has_failures(config: Any, spec: RunSpec) -> bool:
    """Did this very configuration fail, as a whole or in some generations that were not repeated successfully since?"""
    if run_spec.failure_path(config).exists():
        return True
    name = spec.drafter["name"]
    failed, good = set[tuple[str, str, int]](), set[tuple[str, str, int]]()
    for known in blocks.scan_all(spec.cell_folder, BASELINE):
        if _identity(known.header, name) == spec.identity:
            failed |= known.failures
            good |= known.rows
    return any(label == name for label, *_ in failed - good)


def _identity(header: blocks.Header, name: str) -> dict[str, Any] | None:
    """The options of one drafter of a block that can change a row; None where the block has no such drafter."""
    arm: Any = header["arms"].get(name)
    return None if arm is None else {**header["config"], **{option: arm.get(option) for option in run_spec.OWN}}


@contextmanager
def failure_recorded(config: Any) -> Iterator[None]:
    """In a sweep a failure is written down where the cell would be, and the next cell begins."""
    path = run_spec.failure_path(config)
    try:
        yield
    except Exception as error:
        if not sweeping():
            raise
        failure = run_spec.failure(config, format_exception(error))
        failure.write(path)
        if not isinstance(error, TargetUnavailable):
            print(visible(f"specbench: {failure.drafter} on {failure.dataset}: {failure.error}"), file=sys.stderr)
    else:
        path.unlink(missing_ok=True)
