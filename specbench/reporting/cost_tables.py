"""The costs of a cycle on a machine, as tables and a figure, and the trees that they make the fastest."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from specbench.reporting.study_figures import LEVELS, cost_of_cycles, save
from specbench.reporting.tables import markdown_table

Passes = Mapping[int, Mapping[str, float]]  # tokens before the tree -> `ms_<nodes>` -> milliseconds


def show(model: str, drafter: str, passes: Passes, fitted: Mapping[str, Any]) -> None:
    """Print both tables and the trees. fitted: as in a header, with the costs and the trees fitted to them."""
    names, costs = list(next(iter(passes.values()))), fitted["costs"]
    lines = [[str(context), *(f"{ms[name]:.1f}" for name in names)] for context, ms in passes.items()]
    print(f"Milliseconds of a pass of {model}, by nodes in the tree and tokens before it\n")
    print(markdown_table(["tokens before", *(name.removeprefix("ms_") for name in names)], lines))
    lines = [[title, *(f"{1000 * seconds:.1f}" for seconds in costs[part].values())] for part, title in LEVELS.items()]
    print(f"\nMilliseconds of drafting with {drafter}, by candidates of a node or nodes of a level\n")
    print(markdown_table(["", *map(str, costs["first"])], lines) + "\n")
    for name, title in (("choice", "fastest"), ("runner_up", "runner-up")):
        if name in fitted:
            print(f"{title}: {_tree(fitted[name])}")


def draw(path: Path, passes: Passes, fitted: Mapping[str, Any]) -> None:
    """Write the figure and print its path."""
    figure = cost_of_cycles(passes, fitted["costs"])
    save(figure, path, dpi=150)
    Console(stderr=True).print(f"figure: {path}", highlight=False, soft_wrap=True)


def _tree(tree: Mapping[str, float]) -> str:
    shape = ", ".join(f"{name}={tree[name]}" for name in ("depth", "top_k", "nodes"))
    return f"{shape}: tau {tree['tau']:.2f} on held-out answers, {tree['speedup']:.2f}x plain decoding expected"
