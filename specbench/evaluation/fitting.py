"""Fits trees to the machine: from the costs of earlier blocks of the cell, or from costs that are timed now."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from specbench.common import environment
from specbench.common.errors import SpecBenchError
from specbench.common.io import validate
from specbench.common.storage import project_path
from specbench.config.run_spec import RunSpec
from specbench.engine.drafter import Drafter
from specbench.engine.policies import TreePolicy
from specbench.engine.target import Target
from specbench.engine.tensors import dtype_name
from specbench.records import blocks, identity
from specbench.records.blocks import BlockIndex
from specbench.records.metrics import BASELINE
from specbench.tuning import acceptance, cost_model
from specbench.tuning.cost_aware import Costs


def fit(drafter: Drafter, spec: RunSpec, target: Target, label: str) -> dict[str, Any]:
    """Fit a bound drafter's tree to the machine, if its policy is a fitted one; of a wrapper, the wrapped drafter's tree.

    Returns the header's entry, with the chosen tree and the costs; empty if there is nothing to fit. label: of the arm.
    Raises `SpecBenchError` if acceptance was not measured with these weights, or cannot be.
    """
    fitted = _fitted(drafter, spec)
    if fitted is None:
        return {}
    drafter, policy, options = fitted
    if spec.model.weights == "random" or drafter.weights is None:
        raise SpecBenchError(f"drafter={drafter.name}: a tree can be fitted to trained weights only; choose another tree=")
    if not spec.link.local:
        raise SpecBenchError("tree=: costs are timed of a target in this process; choose another tree=, or link=local")
    measured = acceptance.read(project_path(drafter.weights))
    costs = _earlier_costs(drafter, spec, target, label)
    if costs is None:
        costs = cost_model.of(target, drafter, spec.model.name, _conditions(drafter, options, spec))
    policy.fit(measured, costs)
    drafter.set_tree_policy(policy)
    return {"fitted": {**policy.chosen, "costs": asdict(costs)}}


def takes_time(drafter: Drafter, spec: RunSpec, target: Target, label: str) -> bool:
    """Would `fit` have to time cycles on this machine, which takes a minute or so?"""
    fitted = _fitted(drafter, spec)
    if fitted is None or _earlier_costs(fitted[0], spec, target, label) is not None:
        return False
    drafter, _, options = fitted
    return not cost_model.known(target, drafter, spec.model.name, _conditions(drafter, options, spec))


def _fitted(drafter: Drafter, spec: RunSpec) -> tuple[Drafter, TreePolicy, Mapping[str, Any]] | None:
    """The drafter whose tree is fitted (itself or the one it wraps), the policy, its options; None if no tree is fitted."""
    grower = drafter.grower
    if grower is None or grower.growth is None or not grower.growth.fitted:
        return None
    return grower, grower.growth, spec.drafter if grower is drafter else spec.drafter["base"]


def _conditions(drafter: Drafter, options: Mapping[str, Any], spec: RunSpec) -> dict[str, Any]:
    """What costs depend on besides machine and target: not on the tree that is fitted to them."""
    own = {k: v for k, v in options.items() if k != "growth"}
    return {
        "drafter": own,
        "backend": spec.backend,
        "forward": spec.model.forward,
        "draft_dtype": draft_dtype(drafter),
        "captured": cost_model.grows_as_graphs(drafter),
    }


def draft_dtype(drafter: Drafter) -> str | None:
    """In which a drafter's weights are multiplied, as headers name it; None: as the target's."""
    return None if drafter.draft_dtype is None else dtype_name(drafter.draft_dtype)


def _earlier_costs(drafter: Drafter, spec: RunSpec, target: Target, label: str) -> Costs | None:
    """The costs behind this arm's tree in blocks of this cell; None without any. drafter: whose tree is fitted.

    A replay takes the tree of the same cell's timed rows, in whatever precision the drafter multiplies there, so that it
    says what that tree accepts; without one, the tree that it began with, on whatever machine.
    """
    hardware = environment.hardware(target.device)
    header = {"hardware": hardware, "target": target.computed_by, "config": spec.shared, **identity.SPEEDS}
    machine, dtype = identity.machine_key(header), draft_dtype(drafter)

    def own(block: BlockIndex) -> bool:
        here = spec.replay or block.machine == machine
        return here and block.header["arms"][label].get("draft_dtype") == dtype

    def timed(block: BlockIndex) -> bool:
        return identity.kind_of(block.header["hardware"]) == identity.kind_of(hardware)

    places = [(replace(spec, replay=False).cell_folder, timed)] if spec.replay else []
    found = (_most_used(folder, spec, label, alike) for folder, alike in [*places, (spec.cell_folder, own)])
    return next((costs for costs in found if costs is not None), None)


def _most_used(folder: Path, spec: RunSpec, label: str, alike: Callable[[BlockIndex], bool]) -> Costs | None:
    """The costs behind an arm's tree in the blocks of a cell that are alike; of several trees, the one with most rows."""
    rows: Counter[str] = Counter()  # by tree
    costs: dict[str, tuple[Any, Path]] = {}
    for block in blocks.scan_all(folder, BASELINE):
        arm: Any = block.header["arms"].get(label, {})
        same = "fitted" in arm and identity.plain_options(arm["drafter"]) == identity.plain_options(spec.drafter)
        if same and alike(block):
            tree = block.arms[label][1]
            rows[tree] += sum(row[0] == label for row in block.rows)
            costs[tree] = arm["fitted"]["costs"], block.path
    if not rows:
        return None
    chosen, path = costs[rows.most_common(1)[0][0]]
    found: Costs = validate(chosen, Costs, f"{path} line 1: arms.{label}.fitted.costs")
    return found
