"""What is measured of a cell's arms beside their rows: which quantities there are, whose they are, and where taken.

Each is taken so many times over, all arms once before any arm again, so that what the machine does meanwhile meets all
alike, and each is on disk before the next begins. What is there is not measured again.
"""

import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from specbench.common.budget import Budget, Pace
from specbench.common.errors import SpecBenchError, format_exception, visible
from specbench.common.progress import progress
from specbench.engine.drafter import Drafter
from specbench.engine.target import Target
from specbench.evaluation import arms, costs, isolated
from specbench.evaluation.arms import Arm
from specbench.records.blocks import Ledger
from specbench.records.metrics import BASELINE
from specbench.records.rows import Measurement
from specbench.remote.target import RemoteTarget
from specbench.remote.throughput import throughput
from specbench.tuning import target_cost

CLIENTS = (1, 2, 4, 8)  # of one server
PROMPTS, TOKENS = 4, 64  # questions decoded for a measurement, and tokens of each answer at most


@dataclass(frozen=True)
class Setting:
    """What a measurement decodes: prompts as ids, and so many tokens of an answer."""

    target: Target
    prompts: list[list[int]]
    tokens: int


@dataclass(frozen=True)
class Quantity:
    """One of them. take: one repetition of one arm. whose: is it measured of this arm?"""

    take: Callable[[Setting, Arm], dict[str, float]]
    whose: Callable[[Arm], bool]


def _everyone(arm: Arm) -> bool:
    return True


def _baseline(arm: Arm) -> bool:
    return arm.label == BASELINE


def _drafters(arm: Arm) -> bool:
    return not _baseline(arm)


def _trained(arm: Arm) -> bool:
    return arm.spec.trained


def _known_to_transformers(arm: Arm) -> bool:
    return _baseline(arm) or bool(costs.assistance(arm.bound))


def _memory(setting: Setting, arm: Arm) -> dict[str, float]:
    found: dict[str, float] = isolated.call(
        isolated.memory, arm.spec, setting.prompts[0], setting.tokens, setting.target.packing.timed
    )
    return found


def _training(setting: Setting, arm: Arm) -> dict[str, float]:
    found: dict[str, float] = isolated.call(isolated.training, arm.spec)
    return found


def _clients(setting: Setting, arm: Arm) -> dict[str, float]:
    if not isinstance(setting.target, RemoteTarget):
        raise SpecBenchError("a target in this process has no clients; choose another link=")
    spec = replace(arm.spec, link=replace(arm.spec.link, to=setting.target.server))

    def connect() -> tuple[RemoteTarget, Drafter]:
        target, _ = arms.load(spec)
        assert isinstance(target, RemoteTarget)
        return target, arms.build(spec, target, arm.label).bound.drafter

    found: dict[str, float] = {}
    for count in CLIENTS:
        took = throughput(count, connect, setting.prompts, setting.tokens)
        found |= {f"{name}_{count}": value for name, value in took.items()}
        found[f"gain_{count}"] = took["together"] / found["together_1"]
    return found


def _target_pass(setting: Setting, arm: Arm) -> dict[str, float]:
    return target_cost.target_pass(setting.target, setting.prompts[0])


def _decoding(cost: Callable[..., dict[str, float]]) -> Callable[[Setting, Arm], dict[str, float]]:
    """A cost of decoding the prompts in this very process."""

    def take(setting: Setting, arm: Arm) -> dict[str, float]:
        if arm.spec.backend == "compile":
            raise SpecBenchError("a compiled pass cannot be taken apart; measure with backend=eager")
        return cost(setting.target, arm.bound, setting.prompts, setting.tokens)

    return take


QUANTITIES: Mapping[str, Quantity] = {  # as `measure` of a study names them
    "memory": Quantity(_memory, _everyone),
    "training": Quantity(_training, _trained),
    "drafting": Quantity(_decoding(costs.drafting), _drafters),
    "overhead": Quantity(_decoding(costs.overhead), _everyone),
    "target_pass": Quantity(_target_pass, _baseline),
    "clients": Quantity(_clients, _everyone),
    "generate": Quantity(_decoding(costs.against_transformers), _known_to_transformers),
}


def take(repetitions: Mapping[str, int], ledger: Ledger, setting: Setting, sides: Iterable[Arm], budget: Budget) -> int:
    """Measure what a cell lacks on this kind of machine; returns of how many arms something could not be measured.

    repetitions: how many times over, by quantity.
    """
    sides = _once_an_arm(sides)
    lost = 0
    for what, times in repetitions.items():
        quantity = QUANTITIES[what]
        mine = [side for side in sides if quantity.whose(side)]
        wanted = [(side, Measurement(side.label, what, r, {})) for r in range(times) for side in mine]
        missing = [(side, measurement) for side, measurement in wanted if measurement.key not in ledger.measured]
        if missing:
            lost += _take(what, missing, len(wanted), ledger, setting, budget)
    return lost


def _take(
    what: str, missing: list[tuple[Arm, Measurement]], wanted: int, ledger: Ledger, setting: Setting, budget: Budget
) -> int:
    """Of one quantity; the number of arms that it cannot be measured of, which are tried once."""
    broken: set[str] = set()
    pace = Pace()
    with progress(f"measuring {what}", wanted, "measurements") as reached:
        reached(wanted - len(missing))
        for left, (side, measurement) in enumerate(missing, 1 - len(missing)):
            if side.label in broken:
                continue
            if not budget.allows(pace.of(1)):
                break
            begin = time.monotonic()
            try:
                measurement.values.update(QUANTITIES[what].take(setting, side))
            except Exception as error:
                print(
                    visible(f"specbench: {what} of {side.label} not measured: {format_exception(error)}"), file=sys.stderr
                )
                broken.add(side.label)
            else:
                ledger.write(measurement)
            pace.add(1, time.monotonic() - begin)
            reached(wanted + left)
    return len(broken)


def _once_an_arm(sides: Iterable[Arm]) -> list[Arm]:
    """Of an arm that was trained several times the first seed: cost is no matter of the seed."""
    found: dict[str, Arm] = {}
    for side in sides:
        found.setdefault(side.said.get("of", side.label), side)
    return list(found.values())
