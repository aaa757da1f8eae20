"""What a cycle costs on this machine, and which trees are the fastest for a drafter.

python -m specbench.cost drafter=eagle2
python -m specbench.cost drafter=eagle2 drafter.vocabulary=8192 'contexts=[128,1024]'
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field

from specbench.common.errors import SpecBenchError
from specbench.common.storage import require_writable
from specbench.common.types import Text, Tokens
from specbench.config import run_spec, validation
from specbench.config.cli import command, run_cli
from specbench.config.run_spec import RunOptions
from specbench.evaluation import arms
from specbench.reporting import cost_tables
from specbench.tuning import target_cost


@dataclass(frozen=True)
class Options(RunOptions):
    """The options in `conf/cost.yaml` beside those of a run."""

    contexts: Annotated[Sequence[Tokens], Field(min_length=1)]
    out: Text | None


@command("cost")
def main(config: Any) -> None:
    """Time passes and cycles, fit the drafter's trees to them, print and draw both."""
    spec, options = run_spec.from_config(config, Options), validation.check(config, Options)
    if options["drafters"] is not None:
        raise SpecBenchError("drafter=[…]: costs are of one drafter at a time; name one")
    out = Path(options["out"] or spec.results / "costs")
    require_writable(out)
    torch.set_num_threads(spec.threads or torch.get_num_threads())
    made = arms.make(spec)
    if not spec.link.local:
        raise SpecBenchError(f"link={spec.link.name}: costs are timed of a target in this process; set link=local")
    grower = made[0].grower
    if grower is None:
        raise SpecBenchError(f"drafter={spec.drafter['name']}: it grows no tree; costs are for drafters that do, as eagle2")
    if grower.growth is None or not grower.growth.fitted:
        raise SpecBenchError(
            f"tree=: costs are for trees that are fitted to them (fitted, fitted_static, rate), not "
            f"{spec.tree['_target_'].rpartition('.')[2]}"
        )
    target, _ = arms.load(spec, [made[0]])
    passes = target_cost.passes(target, options["contexts"])
    fitted = arms.build(spec, target, made=made).description["fitted"]
    drafter = spec.drafter["name"]
    cost_tables.show(spec.model.name, drafter, passes, fitted)
    cost_tables.draw(out / f"{spec.model.name}-{drafter}.png", passes, fitted)


if __name__ == "__main__":
    run_cli(main, "cost")
