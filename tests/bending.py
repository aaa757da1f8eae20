"""Random bends of a JSON value: a key less, another type, another length or order, negative, zero, huge, no number."""

import copy
import random
from collections.abc import Iterator
from typing import Any

OTHERS = [
    None,
    True,
    "x",
    "",
    [],
    {},
    [1],
    {"a": 1},
    -1,
    0,
    1,
    0.5,
    -1e-9,
    1e-320,
    2**31,
    2**60,
    1e9,
    1e300,
    float("nan"),
    float("inf"),
]


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where the values inside a JSON value stand; of long lists the first and the last."""
    if isinstance(value, dict):
        inner: list[tuple[Any, Any]] = list(value.items())
    elif isinstance(value, list):
        inner = [(i, value[i]) for i in sorted({0, len(value) // 2, len(value) - 1}) if value]
    else:
        inner = []
    for key, part in inner:
        yield (*at, key)
        yield from places(part, (*at, key))


def bent(value: Any, draw: random.Random) -> tuple[Any, str]:
    """A copy with one bend, and what was done."""
    made = copy.deepcopy(value)
    *above, key = draw.choice(list(places(made)))
    parent = made
    for step in above:
        parent = parent[step]
    old = parent[key]
    bends = ["delete", "other"]
    bends += ["shorter", "longer", "reverse", "twist"] * isinstance(old, list) + ["more"] * isinstance(old, dict)
    bends += ["rename"] * isinstance(key, str) + ["negative", "large"] * (type(old) in (int, float)) * 2
    bend = draw.choice(bends)
    if bend == "delete":
        del parent[key]
    elif bend == "shorter":
        del old[draw.randrange(len(old) + 1) :]
    elif bend == "longer":
        old += old[-2:] or [0]
    elif bend == "reverse":
        old.reverse()
    elif bend == "twist":
        draw.shuffle(old)
    elif bend == "more":
        old[draw.choice(["x", "1", "-1", "0", "99999999999999999999"])] = draw.choice(OTHERS)
    elif bend == "rename":
        parent[draw.choice([f"{key}x", f"{key[:-1]}x", f"{key}9999999999", ""])] = parent.pop(key)
    else:
        parent[key] = -old if bend == "negative" else old * 1000 if bend == "large" else draw.choice(OTHERS)
    now = parent.get(key) if isinstance(parent, dict) else parent[key : key + 1]
    return made, f"{bend} {'.'.join(map(str, (*above, key)))}: {str(now)[:60]}"
