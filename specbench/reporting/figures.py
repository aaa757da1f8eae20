"""Figures from rows and provenance. Colours are Okabe and Ito's, which colour-blind readers can tell apart."""

import itertools
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX"


def learning_curves(weights: Path, path: Path) -> list[str]:
    """Held-out chain tau and 0-alpha against tokens seen, for every drafter whose provenance lies under `weights`.

    Returns:
        The drafters drawn.
    """
    found = {p.parent.name: json.loads(p.read_text()) for p in sorted(weights.rglob("provenance.json"))}
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    for (name, provenance), colour, marker in zip(
        found.items(), itertools.cycle(COLOURS), itertools.cycle(MARKERS + "<>"), strict=False
    ):
        points = [h for h in provenance["history"] if "chain_tau" in h]
        tokens = [h["tokens"] / 1e6 for h in points]
        style = {"color": colour, "marker": marker, "label": name, "markersize": 4}
        left.plot(tokens, [h["chain_tau"] for h in points], **style)
        right.plot(tokens, [h["n_alpha"][0] for h in points], **style)
    left.set(xlabel="training tokens seen (millions)", ylabel="held-out tau, chain of 5")
    right.set(xlabel="training tokens seen (millions)", ylabel="held-out 0-alpha")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return list(found)
