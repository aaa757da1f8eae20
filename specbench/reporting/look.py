"""How a drafter looks: one colour, marker and hatch a name, the same in every figure of every run.

A reader who has learnt in the first figure which colour EAGLE-2 has need not look it up in the second one. The shipped
drafters' looks are fixed here; any other name gets one from its own letters, whatever else stands in the figure.
"""

import hashlib
from typing import Any

BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK, GREY = COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999",
)  # fmt: skip
MARKERS = "osD^vPX<>*hpd8"
HATCHES = ("", "//", "..", "xx", "\\\\", "++", "oo", "--")

# Methods differ in colour, variants of one method in marker and hatch. Okabe and Ito's yellow is left out: a thin line
# of it cannot be seen on white.
KNOWN = {
    "none": (GREY, "8", ".."),
    "vanilla": (BLACK, "X", ""),
    "medusa": (GREY, "v", ""),
    "eagle1": (SKY, "s", ""),
    "eagle2": (BLUE, "o", ""),
    "eagle2_small": (BLUE, "d", "//"),
    "eagle2_router": (BLUE, ">", ".."),
    "eagle2-chain": (BLUE, "*", "xx"),
    "eagle2_feature": (SKY, "p", "//"),
    "eagle2_token": (SKY, "h", "xx"),
    "eagle2_unshifted": (SKY, "<", ".."),
    "hass": (GREEN, "D", ""),
    "coral": (VERMILION, "^", ""),
    "coral_router": (VERMILION, "<", ".."),
    "beagle": (ORANGE, "P", ""),
    "moa": (PURPLE, "*", ""),
}


def style(name: str) -> dict[str, Any]:
    """`color`, `marker` and `hatch` of a drafter or a study's arm."""
    return dict(zip(("color", "marker", "hatch"), KNOWN.get(name) or _of_letters(name), strict=True))


def line(name: str) -> dict[str, Any]:
    """The look of a line through points, for `Axes.plot` and `Axes.errorbar`."""
    found = style(name)
    dashes = {"": "-", "//": "--", "..": ":", "xx": "-."}  # so that lines of one colour differ between their points too
    return {"color": found["color"], "marker": found["marker"], "linestyle": dashes.get(found["hatch"], "--")}


def bar(name: str) -> dict[str, Any]:
    """The look of a filled area, for `Axes.bar` and `Axes.barh`."""
    found = style(name)
    pale = found["color"] != BLACK
    return {"color": found["color"], "hatch": found["hatch"], "edgecolor": "black" if pale else "white", "linewidth": 0.4}


def _of_letters(name: str) -> tuple[str, str, str]:
    """Colour, marker and hatch from a hash of the name, the same in every process."""
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    number, colour = divmod(number, len(COLOURS))
    number, marker = divmod(number, len(MARKERS))
    return COLOURS[colour], MARKERS[marker], HATCHES[number % len(HATCHES)]
