"""Fits trees to the machine: from the costs of earlier blocks of the cell, or from costs that are timed now."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
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
from specbench.records.metrics import BASELINE
from specbench.tuning import acceptance, cost_model
from specbench.tuning.cost_aware import Costs

HARDWARE = ("device", "instructions", "cores")  # of headers: what makes a kind of machine


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
    """The costs behind this arm's tree in blocks of this cell; of several trees, the one with most rows; None without any.

    A replay takes the tree of the study's timed cells, whatever precision its drafter multiplies in there, so that it says
    what that tree accepts; without one, the tree that it began with, on whatever machine. drafter: whose tree is fitted.
    """
    cell = spec.cell_folder
    beside = [folder for folder in sorted(cell.parent.glob("*")) if folder != cell] if spec.replay else []
    return _costs_in(beside, drafter, spec, target, label) or _costs_in([cell], drafter, spec, target, label)


def _costs_in(cells: Sequence[Path], drafter: Drafter, spec: RunSpec, target: Target, label: str) -> Costs | None:
    here = {"hardware": environment.hardware(target.device), "target": target.computed_by}
    header = {**here, "config": spec.shared, **identity.SPEEDS}
    machine, options = identity.machine_key(header), identity.plain_options(spec.drafter)
    dtype, hardware = draft_dtype(drafter), {k: v for k, v in here["hardware"].items() if k in HARDWARE}
    rows: Counter[str] = Counter()  # by tree
    costs: dict[str, tuple[Any, Path]] = {}
    for folder, block in ((cell, block) for cell in cells for block in blocks.scan_all(cell, BASELINE)):
        arm: Any = block.header["arms"].get(label, {})
        if folder == spec.cell_folder:
            alike = arm.get("draft_dtype") == dtype and (spec.replay or block.machine == machine)
        else:  # a timed one on this kind of machine, with however many threads
            alike = hardware.items() <= block.header["hardware"].items() and not block.header.get("replay")
        if "fitted" in arm and identity.plain_options(arm["drafter"]) == options and alike:
            tree = block.arms[label][1]
            rows[tree] += sum(row[0] == label for row in block.rows)
            costs[tree] = arm["fitted"]["costs"], block.path
    if not rows:
        return None
    chosen, path = costs[rows.most_common(1)[0][0]]
    found: Costs = validate(chosen, Costs, f"{path} line 1: arms.{label}.fitted.costs")
    return found
