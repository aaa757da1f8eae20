"""What a cycle costs on this machine, and which trees that makes the fastest for a drafter.

python -m specbench.cost drafter=eagle2
python -m specbench.cost drafter=eagle2 drafter.vocabulary=8192 contexts=[128,1024]
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import matplotlib.pyplot as plt
import torch
from pydantic import Field
from rich.console import Console

from specbench.common.errors import SpecBenchError
from specbench.common.storage import require_writable
from specbench.common.types import Count, Text
from specbench.config import run_spec
from specbench.config.cli import command, run_cli
from specbench.config.run_spec import RunOptions
from specbench.evaluation import arms
from specbench.reporting.study_figures import cost_of_cycles
from specbench.reporting.tables import markdown_table
from specbench.tuning import target_cost


@dataclass(frozen=True)
class Options(RunOptions):
    """What `conf/cost.yaml` may say beside what a run may be told."""

    contexts: Annotated[Sequence[Count], Field(min_length=1)]
    out: Text | None


@command("cost")
def main(config: Any) -> None:
    """Time passes and cycles, fit the drafter's trees to them, print and draw both."""
    spec, asked = run_spec.from_config(config, Options), run_spec.checked(config, Options)
    out = Path(asked["out"] or spec.results / "costs")
    require_writable(out)
    torch.set_num_threads(spec.threads or torch.get_num_threads())
    made = arms.make(spec)
    if made[0].growth is None or not made[0].growth.fitted:
        raise SpecBenchError(
            f"tree=: costs are for trees that are fitted to them (fitted, fitted_static, rate), not "
            f"{spec.tree['_target_'].rpartition('.')[2]}"
        )
    target, _ = arms.load(spec, [made[0]])
    passes = {
        context: target_cost.target_pass(target, target_cost.text(target, context))
        for context in _fitting(asked["contexts"], target)
    }
    said: Any = arms.build(spec, target, made=made).said["fitted"]
    print(f"Milliseconds of a pass of {spec.model.name}, by nodes in the tree and tokens before it\n")
    nodes = list(next(iter(passes.values())))
    print(
        markdown_table(
            ["tokens before", *(n.removeprefix("ms_") for n in nodes)],
            [[str(c), *(f"{found[n]:.1f}" for n in nodes)] for c, found in passes.items()],
        )
    )
    print(f"\nMilliseconds of drafting with {spec.drafter['name']}, by candidates of a node or nodes of a level\n")
    parts = said["costs"]
    print(
        markdown_table(
            ["", *map(str, parts["first"])],
            [
                ["first level, observing included", *(f"{1000 * s:.1f}" for s in parts["first"].values())],
                ["one level more", *(f"{1000 * s:.1f}" for s in parts["level"].values())],
            ],
        )
    )
    print()
    for name, title in (("choice", "fastest"), ("runner_up", "runner-up")):
        if name in said:
            print(f"{title}: {_words(said[name])}")
    figure = cost_of_cycles(passes, parts)
    path = out / f"{spec.model.name}-{spec.drafter['name']}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    Console(stderr=True).print(f"figure: {path}", highlight=False, soft_wrap=True)


def _fitting(contexts: Sequence[int], target: Any) -> list[int]:
    """Contexts that leave room for the largest tree."""
    room = target.max_context - max(target_cost.NODES)
    found = [context for context in contexts if context <= room]
    if not found:
        raise SpecBenchError(
            f"contexts: none of them leaves room for {max(target_cost.NODES)} nodes in {target.max_context} positions"
        )
    return found


def _words(said: Mapping[str, float]) -> str:
    shape = ", ".join(f"{name}={said[name]}" for name in ("depth", "top_k", "nodes"))
    return f"{shape}: tau {said['tau']:.2f} on held-out answers, {said['speedup']:.2f}x plain decoding expected"


if __name__ == "__main__":
    run_cli(main, "cost")
