"""What a cycle costs on a machine, as tables and a figure, and which tree that makes the fastest."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from rich.console import Console

from specbench.reporting.study_figures import cost_of_cycles
from specbench.reporting.tables import markdown_table

Passes = Mapping[int, Mapping[str, float]]  # tokens before the tree -> `ms_<nodes>` -> milliseconds


def show(model: str, drafter: str, passes: Passes, fitted: Mapping[str, Any]) -> None:
    """Print both tables and the trees. fitted: what a header says of a tree that was fitted to these costs."""
    print(f"Milliseconds of a pass of {model}, by nodes in the tree and tokens before it\n")
    print(_passes_table(passes))
    print(f"\nMilliseconds of drafting with {drafter}, by candidates of a node or nodes of a level\n")
    print(_drafting_table(fitted["costs"]))
    print()
    for name, title in (("choice", "fastest"), ("runner_up", "runner-up")):
        if name in fitted:
            print(f"{title}: {_tree(fitted[name])}")


def draw(path: Path, passes: Passes, fitted: Mapping[str, Any]) -> None:
    """Write the figure and print where it is."""
    figure = cost_of_cycles(passes, fitted["costs"])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    Console(stderr=True).print(f"figure: {path}", highlight=False, soft_wrap=True)


def _passes_table(passes: Passes) -> str:
    columns = list(next(iter(passes.values())))
    lines = [[str(context), *(f"{found[name]:.1f}" for name in columns)] for context, found in passes.items()]
    return markdown_table(["tokens before", *(name.removeprefix("ms_") for name in columns)], lines)


def _drafting_table(costs: Mapping[str, Mapping[str, float]]) -> str:
    titles = {"first": "first level, observing included", "level": "one level more"}
    lines = [[title, *(f"{1000 * seconds:.1f}" for seconds in costs[part].values())] for part, title in titles.items()]
    return markdown_table(["", *map(str, costs["first"])], lines)


def _tree(choice: Mapping[str, float]) -> str:
    shape = ", ".join(f"{name}={choice[name]}" for name in ("depth", "top_k", "nodes"))
    return f"{shape}: tau {choice['tau']:.2f} on held-out answers, {choice['speedup']:.2f}x plain decoding expected"
