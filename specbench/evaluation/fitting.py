"""Trees that are fitted to the machine: from which costs, and whether these have to be timed first."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from specbench.common import environment
from specbench.common.errors import SpecBenchError
from specbench.common.storage import PROJECT
from specbench.config.run_spec import RunSpec
from specbench.engine.drafter import Drafter
from specbench.engine.policies import TreePolicy
from specbench.engine.target import Target
from specbench.records import blocks, identity
from specbench.records.metrics import BASELINE
from specbench.tuning import acceptance, cost_model
from specbench.tuning.cost_aware import Costs


def fit(drafter: Drafter, spec: RunSpec, target: Target, label: str) -> dict[str, Any]:
    """Fit a bound drafter's tree to the machine, if its policy is one that is fitted.

    Of a drafter that asks a trained one it is that one's tree: what both of them do is not predicted.

    Args:
        label: of the arm in its cell.
    Returns:
        What the header says: what was chosen, and from which costs; empty if there is nothing to fit.
    Raises:
        SpecBenchError: acceptance was not measured with these weights, or cannot be.
    """
    found = _fitted(drafter, spec)
    if found is None:
        return {}
    drafter, policy, options = found
    if spec.model.weights == "random" or drafter.weights is None:
        raise SpecBenchError(f"drafter={drafter.name}: a tree can be fitted to trained weights only; choose another tree=")
    if not spec.link.local:
        raise SpecBenchError("tree=: costs are timed of a target in this process; choose another tree=, or link=local")
    followed = acceptance.read(PROJECT / drafter.weights)
    costs = _earlier_costs(spec, target, label)
    if costs is None:
        costs = cost_model.of(target, drafter, spec.model.name, _conditions(options, spec))
    policy.fit(followed, costs)
    drafter.set_tree_policy(policy)
    return {"fitted": {**policy.chosen, "costs": asdict(costs)}}


def takes_time(drafter: Drafter, spec: RunSpec, target: Target, label: str) -> bool:
    """Would `fit` have to time cycles on this machine, which takes a minute or so?"""
    found = _fitted(drafter, spec)
    if found is None or _earlier_costs(spec, target, label) is not None:
        return False
    drafter, _, options = found
    return not cost_model.known(target, drafter, spec.model.name, _conditions(options, spec))


def _fitted(drafter: Drafter, spec: RunSpec) -> tuple[Drafter, TreePolicy, Mapping[str, Any]] | None:
    """Whose tree is to be fitted, by which policy, and that drafter's options; None if no tree is."""
    grower = drafter.grower
    if grower is None or grower.growth is None or not grower.growth.fitted:
        return None
    return grower, grower.growth, spec.drafter if grower is drafter else spec.drafter["base"]


def _conditions(options: Mapping[str, Any], spec: RunSpec) -> dict[str, Any]:
    """What costs depend on beside machine and target; not on the tree that is fitted to them."""
    return {"drafter": {k: v for k, v in options.items() if k != "growth"}, "backend": spec.backend}


def _earlier_costs(spec: RunSpec, target: Target, label: str) -> Costs | None:
    """From which this arm's tree was fitted in the blocks of this cell: of the tree that has most rows; None without any.

    Seconds are those of one kind of machine; a replay goes on with the tree that it began with, wherever that was fitted.
    """
    here = {"hardware": environment.hardware(target.device), "config": spec.shared, "timing": identity.TIMING}
    machine, options = identity.machine_key(here), identity.plain_options(spec.drafter)
    rows: dict[str, int] = {}  # by tree
    tables: dict[str, Any] = {}
    for known in blocks.scan_all(spec.cell_folder, BASELINE):
        arm: Any = known.header["arms"].get(label, {})
        alike = "fitted" in arm and identity.plain_options(arm["drafter"]) == options
        if alike and (spec.replay or known.machine == machine):
            tree = known.arms[label][1]
            rows[tree] = rows.get(tree, 0) + sum(row[0] == label for row in known.rows)
            tables[tree] = arm["fitted"]["costs"]
    if not rows:
        return None
    chosen = tables[max(rows, key=lambda tree: rows[tree])]
    return Costs(**{name: {int(n): seconds for n, seconds in table.items()} for name, table in chosen.items()})
