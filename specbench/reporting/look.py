"""How a drafter looks: one colour, marker and hatch a name, the same in every figure of every run.

A reader who has learnt in the first figure which colour EAGLE-2 has need not look it up in the second one. The shipped
drafters' looks are fixed here; any other name gets one from its own letters, whatever else stands in the figure.
"""

import hashlib
from collections.abc import Sequence
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
    "prompt_lookup": (BLACK, "o", "//"),
    "suffix": (BLACK, "D", ".."),
    "token_recycling": (GREEN, "h", "xx"),
    "lookahead": (PURPLE, "s", "//"),
    "hybrid": (ORANGE, "d", "//"),
    "self_speculation": (VERMILION, "o", "//"),
    "early_exit": (VERMILION, "p", "xx"),
    "ouroboros": (BLACK, "s", "xx"),
}


def style(name: str) -> dict[str, Any]:
    """`color`, `marker` and `hatch` of a drafter or a study's arm."""
    return dict(zip(("color", "marker", "hatch"), KNOWN.get(name) or _kin(name) or _of_letters(name), strict=True))


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


def _kin(name: str) -> tuple[str, str, str] | None:
    """The look of what is named after a shipped drafter, as `eagle2_fitted`: its colour, and a shift that the ending gives.

    Arms of a study that varies one drafter, as `hass-n3`, stand side by side and look as their own letters have it.
    """
    parent = max((known for known in KNOWN if name.startswith(f"{known}_")), key=len, default=None)
    if parent is None:
        return None
    number = _number(name.removeprefix(parent))
    colour, marker, hatch = KNOWN[parent]
    return colour, _shifted(MARKERS, marker, number), _shifted(HATCHES, hatch, number)


def _shifted(signs: Sequence[str], sign: str, number: int) -> str:
    """Another sign than this one, as far away as the number says."""
    return signs[(signs.index(sign) + 1 + number % (len(signs) - 1)) % len(signs)]


def _of_letters(name: str) -> tuple[str, str, str]:
    """Colour, marker and hatch from a hash of the name, the same in every process."""
    number, colour = divmod(_number(name), len(COLOURS))
    number, marker = divmod(number, len(MARKERS))
    return COLOURS[colour], MARKERS[marker], HATCHES[number % len(HATCHES)]


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
