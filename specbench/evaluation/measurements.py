"""Quantities that are measured of a cell's arms beside their rows, a given number of times each.

All arms are measured once before any is measured again, so that slow changes of the machine's speed meet all alike. Each
result is written at once, and what the cell's blocks hold is not measured again.
"""

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from specbench.common.budget import Budget, Pace
from specbench.common.errors import SpecBenchError, format_exception, warn
from specbench.common.progress import progress
from specbench.engine.drafter import Drafter, ServedEngine
from specbench.engine.peer import Peer
from specbench.engine.target import Target
from specbench.evaluation import arms, costs, isolated
from specbench.evaluation.arms import Arm
from specbench.evaluation.runner import BoundDrafter
from specbench.records.blocks import Ledger
from specbench.records.metrics import BASELINE
from specbench.records.rows import Measurement
from specbench.remote.target import RemoteTarget
from specbench.remote.throughput import throughput
from specbench.tuning import target_cost

CLIENTS = (1, 2, 4, 8)  # of one server
PROMPTS, TOKENS = 4, 64  # questions decoded for a repetition, and the most tokens of each answer


@dataclass(frozen=True)
class Workload:
    """What a measurement decodes: some prompts as ids, and how many tokens of each answer.

    plain: the baseline. all_prompts: of all questions of the cell.
    """

    target: Target
    prompts: list[list[int]]
    tokens: int
    plain: BoundDrafter
    all_prompts: Sequence[list[int]] = ()

    def of(self, repetition: int) -> "Workload":
        """The same with other prompts for each repetition, as far as the cell has any."""
        first = PROMPTS * repetition % max(1, len(self.all_prompts))
        return replace(self, prompts=list(self.all_prompts[first : first + PROMPTS]) or self.prompts)


@dataclass(frozen=True)
class Quantity:
    """A quantity of an arm.

    measure: one repetition of one arm. applies: is it measured of this arm? By default of all that decode here.
    varied: each repetition decodes other prompts, so that its interval is one over questions.
    """

    measure: Callable[[Workload, Arm], dict[str, float]]
    applies: Callable[[Arm], bool] = lambda arm: not _is_engine(arm)
    varied: bool = False


def _is_baseline(arm: Arm) -> bool:
    return arm.label == BASELINE


def _is_engine(arm: Arm) -> bool:
    return isinstance(arm.bound.drafter, ServedEngine)


def _is_compared(arm: Arm) -> bool:
    """Is there a `generate` of another library or engine that decodes alike?"""
    return _is_baseline(arm) or isinstance(arm.bound.drafter, Peer) or bool(costs.assistance(arm.bound))


def _generate(load: Workload, arm: Arm) -> dict[str, float]:
    if isinstance(arm.bound.drafter, Peer):
        return costs.against_peer(load.target, load.plain, arm.bound.drafter, load.prompts, load.tokens)
    return costs.against_transformers(load.target, arm.bound, load.prompts, load.tokens)


def _busy(load: Workload, arm: Arm) -> dict[str, float]:
    return costs.beside_work(load.target, arm.bound, load.prompts, load.tokens)


def _memory(load: Workload, arm: Arm) -> dict[str, float]:
    if load.target.device.type == "cuda":
        return isolated.memory_on_gpu(load.target, arm.bound, load.prompts[0], load.tokens)
    return isolated.call(isolated.memory, arm.spec, arm.label, load.prompts[0], load.tokens, load.target.packing.timed)


def _training(load: Workload, arm: Arm) -> dict[str, float]:
    if load.target.device.type == "cuda":
        return isolated.training(arm.spec, load.target)
    return isolated.call(isolated.training, arm.spec)


def _quality(load: Workload, arm: Arm) -> dict[str, float]:
    """Beside the original, which is loaded for it."""
    print("its quality: loading the original", file=sys.stderr, flush=True)
    original, _ = arms.load(replace(arm.spec, model=arm.spec.model.original))
    return costs.quality(load.target, original, load.plain, load.all_prompts, load.tokens)


def _clients(load: Workload, arm: Arm) -> dict[str, float]:
    if not isinstance(load.target, RemoteTarget):
        raise SpecBenchError("a target in this process has no clients; choose another link=")
    spec = replace(arm.spec, link=replace(arm.spec.link, to=load.target.server))

    def connect() -> tuple[RemoteTarget, Drafter]:
        target, _ = arms.load(spec)
        assert isinstance(target, RemoteTarget)
        return target, arms.build(spec, target, arm.label).bound.drafter

    values: dict[str, float] = {}
    for count in CLIENTS:
        speeds = throughput(count, connect, load.prompts, load.tokens)
        values |= {f"{name}_{count}": value for name, value in speeds.items()}
        values[f"gain_{count}"] = speeds["together"] / values["together_1"]
    return values


def _decoding(cost: Callable[..., dict[str, float]]) -> Callable[[Workload, Arm], dict[str, float]]:
    """A cost that is measured by decoding the prompts in this process."""

    def measure(load: Workload, arm: Arm) -> dict[str, float]:
        with load.target.eagerly():  # the parts of a captured pass cannot be timed
            return cost(load.target, arm.bound, load.prompts, load.tokens)

    return measure


def _local(measure: Callable[[Workload, Arm], dict[str, float]]) -> Callable[[Workload, Arm], dict[str, float]]:
    """A cost for which the target's layers must be in this process."""

    def measure_local(load: Workload, arm: Arm) -> dict[str, float]:
        if isinstance(load.target, RemoteTarget):
            raise SpecBenchError("the target's layers are on the server; measure with link=local")
        return measure(load, arm)

    return measure_local


QUANTITIES: Mapping[str, Quantity] = {  # as `measure` of a study names them
    "memory": Quantity(_memory),
    "training": Quantity(
        _training,
        lambda arm: not _is_engine(arm) and arm.spec.has_weights and not arm.bound.drafter.counted,
    ),
    "drafting": Quantity(_decoding(costs.drafting), lambda arm: not (_is_baseline(arm) or _is_engine(arm))),
    "overhead": Quantity(_local(_decoding(costs.overhead))),
    "target_pass": Quantity(_local(lambda load, _: target_cost.target_pass(load.target, load.prompts[0])), _is_baseline),
    "clients": Quantity(_clients),
    "generate": Quantity(_local(_generate), _is_compared, varied=True),
    "busy": Quantity(_local(_busy), _is_baseline),
    "bandwidth": Quantity(_local(lambda load, _: costs.bandwidth(load.target, load.prompts, load.tokens)), _is_baseline),
    "quality": Quantity(_quality, _is_baseline),
}


def measure(
    repetitions: Mapping[str, int], ledger: Ledger, load: Workload, cell_arms: Iterable[Arm], budget: Budget
) -> tuple[int, int]:
    """Measure what a cell lacks on this kind of machine. repetitions: by quantity.

    Returns how many pairs of arm and quantity failed, and how many measurements there was no time for.
    """
    first_seeds: dict[str, Arm] = {}  # costs do not depend on the seed that an arm was trained with
    for arm in cell_arms:
        first_seeds.setdefault(arm.description.get("of", arm.label), arm)
    failed = left = 0
    for name, count in repetitions.items():
        measured = [arm for arm in first_seeds.values() if QUANTITIES[name].applies(arm)]
        planned = [(arm, Measurement(arm.label, name, r, {})) for r in range(count) for arm in measured]
        missing = [(arm, measurement) for arm, measurement in planned if measurement.key not in ledger.measured]
        if missing:
            broken = _measure(name, missing, len(planned), ledger, load, budget)
            failed += len(broken)
            left += sum(m.key not in ledger.measured for arm, m in missing if arm.label not in broken)
    return failed, left


def _measure(
    name: str, missing: list[tuple[Arm, Measurement]], planned: int, ledger: Ledger, load: Workload, budget: Budget
) -> set[str]:
    """Measure one quantity, as long as there is time; returns the labels of arms that raised, which are not tried again."""
    failed: set[str] = set()
    pace = Pace()
    with progress(f"measuring {name}", planned, "measurements") as reached:
        reached(planned - len(missing))
        for count, (arm, measurement) in enumerate(missing, planned - len(missing) + 1):
            if arm.label in failed:
                continue
            if not budget.allows(pace.of(1)):
                break
            begin = time.monotonic()
            try:
                chosen = load.of(measurement.repetition) if QUANTITIES[name].varied else load
                measurement.values.update(QUANTITIES[name].measure(chosen, arm))
            except Exception as error:
                warn(f"{name} of {arm.label} not measured: {format_exception(error)}")
                failed.add(arm.label)
            else:
                ledger.write(measurement)
            pace.add(1, time.monotonic() - begin)
            reached(count)
    return failed
