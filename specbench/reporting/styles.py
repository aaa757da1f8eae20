"""Colour and marker of each drafter, the same in every figure; its trees differ in their dashes.

Those of the shipped drafters are listed here; those of other names are derived from a hash of the name.
"""

import hashlib
import itertools
from collections.abc import Iterable
from typing import Any

from specbench.reporting.names import PAPER, SEPARATOR, WORDS

BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK, GREY = COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999",
)  # fmt: skip
MARKERS = "osD^vPX<>*hpd8"
DASHES = ("-", "--", ":", "-.")

# Methods differ in colour, variants of a method in their marker. Okabe and Ito's yellow is left out: thin lines of it are
# invisible on white.
KNOWN = {
    "none": (GREY, "8"),
    "vanilla": (BLACK, "X"),
    "medusa": (GREY, "v"),
    "medusa2": (GREY, "^"),
    "hydra": (SKY, "v"),
    "clover2": (GREEN, "v"),
    "eagle1": (SKY, "s"),
    "eagle2": (BLUE, "o"),
    "eagle3": (VERMILION, "P"),
    "coral": (VERMILION, "^"),
    "coral_router": (VERMILION, "<"),
    "hass": (GREEN, "D"),
    "mtp": (ORANGE, "s"),
    "beagle": (ORANGE, "P"),
    "moa": (PURPLE, "*"),
    "dflash": (SKY, "X"),
    "prompt_lookup": (BLACK, "o"),
    "suffix": (BLACK, "D"),
    "rest": (BLUE, "p"),
    "token_recycling": (GREEN, "h"),
    "lookahead": (PURPLE, "s"),
    "hybrid": (ORANGE, "d"),
    "self_speculation": (VERMILION, "o"),
    "early_exit": (VERMILION, "p"),
    "ouroboros": (BLACK, "s"),
}
NAMES = {word: name for name, word in WORDS.items()}


def style(title: str) -> dict[str, Any]:
    """`color` and `marker` of a drafter or study's arm."""
    base = title.partition(SEPARATOR)[0]
    return dict(zip(("color", "marker"), KNOWN.get(NAMES.get(base, base)) or _of_letters(base), strict=True))


def line(title: str) -> dict[str, Any]:
    """Style for `Axes.plot` and `Axes.errorbar`; dashed for a tree other than the paper's."""
    tree = title.partition(SEPARATOR)[2]
    return style(title) | {"linestyle": "-" if tree in ("", PAPER) else "--"}


def _of_letters(name: str) -> tuple[str, str]:
    """Colour and marker by hash; a name such as `eagle2_fitted` has the colour of the shipped drafter."""
    number, index = divmod(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big"), len(COLOURS))
    parent = max((known for known in KNOWN if name.startswith(f"{known}_")), key=len, default=None)
    colour, marker = KNOWN[parent] if parent else (COLOURS[index], "")
    others = MARKERS.replace(marker, "")
    return colour, others[number % len(others)]


def distinct(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Styles for `Axes.plot` of the series of one figure: other colours as long as there are any, then markers and dashes.

    A shipped drafter keeps its colour and marker if no series before it has that colour.
    """
    styles: dict[str, dict[str, Any]] = {}
    names = list(names)
    for name in names:
        own = line(name)
        if NAMES.get(name, name) in KNOWN and all(own["color"] != s["color"] for s in styles.values()):
            styles[name] = own
    used = {s["color"] for s in styles.values()}
    pairs = [(c, MARKERS[i % len(MARKERS)]) for i, c in enumerate([c for c in COLOURS if c not in used])]
    pairs += [(c, MARKERS[(i + turn) % len(MARKERS)]) for turn in range(1, len(MARKERS)) for i, c in enumerate(COLOURS)]
    taken = {(s["color"], s["marker"]) for s in styles.values()}
    free = (pair for pair in itertools.cycle(pairs) if pair not in taken)
    for name in names:
        if name not in styles:
            colour, marker = next(free)
            repeats = sum(s["color"] == colour for s in styles.values())
            styles[name] = {"color": colour, "marker": marker, "linestyle": DASHES[repeats % len(DASHES)]}
    return styles
