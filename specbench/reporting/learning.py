"""What tau to expect of as much training as the papers had, from the learning curves of the trainings here.

Two curves are fitted to tau on held-out answers against tokens seen, n, by least squares:

    bounded     tau = C - a n^(-b)      C: tokens of a cycle whose whole draft is accepted, which tau cannot exceed
    straight    tau = a + b log n       as if there were no bound

What both say at `PAPERS` tokens is a range, not an interval: it holds no error of the points. All points but the last were
measured before the learning rate had fallen, so they lie below what a training of their length would have reached; and more
passes over the same text bring less than new text. Both make the range too high.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from specbench.reporting.tables import ABSENT, number

PAPERS = 60e6 * 20  # tokens of ShareGPT, times passes over them
FEWEST = 5  # points that a fit needs: two parameters and something to spare
NOTE = (
    "Held-out answers, of the weights that are here now; they may be newer than those that were decoded. "
    f"Expected: after {PAPERS / 1e9:.1f} billion tokens, the papers' 20 passes over 60 million, by two curves "
    "through all points of a training: one bounded by the draft's length, and a straight line over log tokens. "
    "This is rather too high, since all points but the last were measured before the learning rate had fallen. "
    "Trainings that went on from another drafter's weights are left out. "
    "Published: T = 0, all tables of the sources, targets of 7 billion parameters and more."
)
COLUMNS = (
    "drafter", "tokens seen", "points", "chain tau", "expected chain tau", "tau, its own tree", "expected, its own tree",
    "published, MT-bench",
)  # fmt: skip

Points = Sequence[tuple[float, float]]  # (tokens seen, tau)


def expected(points: Points, bound: float, tokens: float = PAPERS) -> tuple[float, float] | None:
    """tau of the bounded and of the straight curve after so many tokens, lower one first; None for too few points.

    bound: C; points that do not lie below it are left out.
    """
    usable = [(n, tau) for n, tau in points if n > 0 and tau < bound]
    if len({n for n, _ in usable}) < FEWEST:
        return None
    n, tau = np.array(usable).T
    log_n, ahead = np.log(n), math.log(tokens)
    slope, offset = np.polyfit(log_n, np.log(bound - tau), 1)
    rise, start = np.polyfit(log_n, tau, 1)
    low, high = sorted((float(bound - math.exp(offset + slope * ahead)), min(bound, float(start + rise * ahead))))
    return low, high


def deepest(growth: Mapping[str, Any]) -> int | None:
    """Levels below the root of a tree policy's trees, from its options; None if they do not say."""
    for key in ("depth", "gamma"):
        if isinstance(growth.get(key), int):
            return int(growth[key])
    paths = [path for value in growth.values() if isinstance(value, list) for path in value if isinstance(path, list)]
    return max(map(len, paths), default=None)


def lines(weights: Mapping[str, Mapping[str, Any]], published: pd.DataFrame) -> list[list[str]]:
    """One line a drafter whose curve has enough points, see `COLUMNS`. weights: name -> provenance.

    A training that went on from another's weights begins where that one ended: its own points are no such curve.
    """
    made = []
    for name, provenance in weights.items():
        if provenance.get("tokens_before"):
            continue
        history = [h for h in provenance["history"] if {"tokens", "chain_tau", "n_alpha"} <= h.keys()]
        chain = [(float(h["tokens"]), float(h["chain_tau"])) for h in history]
        tree = [(float(h["tokens"]), float(h["tree_tau"])) for h in history if "tree_tau" in h]
        levels = deepest(provenance["drafter"].get("growth") or {})
        of_chain = expected(chain, len(history[-1]["n_alpha"]) + 1) if history else None
        of_tree = None if levels is None else expected(tree, levels + 1)
        if of_chain is None and of_tree is None:
            continue
        made.append(
            [
                name, f"{provenance['tokens_seen']:,}", str(len(history)),
                number("{:.2f}", chain[-1][1]), _range(of_chain),
                number("{:.2f}", tree[-1][1] if tree else math.nan), _range(of_tree),
                _published(published, provenance["drafter"]["name"]),
            ]
        )  # fmt: skip
    return made


def _range(values: tuple[float, float] | None) -> str:
    return ABSENT if values is None else f"{values[0]:.1f} to {values[1]:.1f}"


def _published(numbers: pd.DataFrame, drafter: str) -> str:
    """tau on MT-bench at temperature 0 in all papers' tables: the least and the largest."""
    found = numbers[
        (numbers.drafter == drafter) & (numbers.dataset == "mtbench") & (numbers.metric == "tau")
        & numbers.temperature.isin(["0", ""])
    ].number  # fmt: skip
    return ABSENT if found.empty else f"{found.min():.1f} to {found.max():.1f}"
