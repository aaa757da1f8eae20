"""What tables call a drafter: its own name, and the options in which it differs from the others that stand beside it.

    plain                   the autoregressive baseline
    vanilla SD              speculative decoding with a small model as drafter
    eagle2 · paper          the tree of its paper, beside another tree of the same drafter
    eagle2 · rate           another tree than that of its paper
    eagle2 · top_p=0.9      what else differs, as far as it is needed to tell rows apart

An arm of a study that is not called after its drafter keeps the name that its study gave it.
"""

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from specbench.common.io import read_yaml
from specbench.records.identity import plain_options
from specbench.records.metrics import BASELINE
from specbench.records.studies import FOLDER
from specbench.reporting.cells import Entry

WORDS = {BASELINE: "plain", "vanilla": "vanilla SD"}
TREES = {  # classes that grow trees
    "Chain": "chain", "Static": "static", "Dynamic": "dynamic", "AccuracyTree": "calibrated", "Calibrated": "calibrated",
    "Fitted": "fitted", "FittedStatic": "fitted static", "CostAwareTree": "rate", "Rate": "rate",
}  # fmt: skip
PAPER = "paper"
CELLS = ("link", "top_p", "top_k")  # options of whole cells, named wherever they differ
SEPARATOR = " · "


def labelled(entries: Iterable[Entry]) -> list[Entry]:
    """These entries, each with what it is called beside the others."""
    entries = list(entries)
    found: dict[int, str] = {}
    by_name: dict[str, list[Entry]] = {}
    for e in entries:
        by_name.setdefault(_base(e), []).append(e)
    for base, group in by_name.items():
        for e, parts in zip(group, _parts(group), strict=True):
            found[id(e)] = SEPARATOR.join([base, *parts])
    return [replace(e, label=found[id(e)]) for e in entries]


def _base(e: Entry) -> str:
    """The drafter's name, or that which a study gave to an arm that is not called after its drafter."""
    drafter = str(e.arm["drafter"].get("name", e.name))
    if e.name != drafter and not re.match(rf"{re.escape(drafter)}[_·\s-]", e.name):
        return e.name
    return WORDS.get(drafter, drafter)


def _parts(group: Sequence[Entry]) -> list[list[str]]:
    """In what entries of one name differ: tree and cell always, of other options as few as tell them apart."""
    trees = [tree_name(e) for e in group]
    several = len(set(trees)) > 1
    own = [_base(e) == e.name and e.name != e.arm["drafter"].get("name") for e in group]  # names that a study gave
    parts = [[t] if t and (several or (t != PAPER and not mine)) else [] for t, mine in zip(trees, own, strict=True)]
    options = [dict(_options(e)) for e in group]
    for key in CELLS:
        if len({own_options.get(key, "") for own_options in options}) > 1:
            for part, own_options in zip(parts, options, strict=True):
                part += filter(None, [own_options.get(key)])
    for key in dict.fromkeys(key for own_options in options for key in own_options if key not in CELLS):
        values: dict[tuple[str, ...], set[str]] = {}
        for part, own_options in zip(parts, options, strict=True):
            values.setdefault(tuple(part), set()).add(own_options.get(key, ""))
        for part, own_options in zip(parts, options, strict=True):
            if len(values.get(tuple(part), ())) > 1 and own_options.get(key):
                part.append(own_options[key])
    return parts


def tree_name(e: Entry) -> str:
    """How its trees grow, in one word; nothing of a drafter that has no tree to choose."""
    growth = _growth(e.arm["drafter"])
    if not growth:
        return ""
    kind = str(growth.get("_target_", "")).rpartition(".")[2]
    if plain_options(growth) == _of_paper(str(e.arm["drafter"].get("name"))):
        return PAPER
    return TREES.get(kind, kind.lower())


def _growth(drafter: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of a drafter, or of the one that it asks."""
    found = drafter.get("growth") or (drafter.get("base") or {}).get("growth")
    return found if isinstance(found, Mapping) else {}


@functools.cache
def _of_paper(drafter: str) -> Any:
    """Options of the tree that a drafter's file chooses; None for a drafter without such a file."""
    conf = FOLDER.parent
    known = {path.stem: path for path in Path(conf, "drafter").glob("*.yaml")}
    if drafter not in known:
        return None
    lines: Iterable[Any] = (read_yaml(known[drafter], Any) or {}).get("defaults", ())
    chosen = next((line["override /tree"] for line in lines if isinstance(line, dict) and "override /tree" in line), None)
    return None if chosen is None else plain_options(read_yaml(Path(conf, "tree", f"{chosen}.yaml"), Any))


def _options(e: Entry) -> Iterator[tuple[str, str]]:
    """Options that can tell rows of one drafter apart, those that say most first: name, and how it is written."""
    config = e.header["config"]
    sampler: Any = config["sampler"]
    link = (config.get("link") or {}).get("name", "local")
    yield "link", f"link={link}" if link != "local" else ""
    for name, neutral in (("top_p", 1), ("top_k", 0)):
        if sampler.get(name, neutral) != neutral:
            yield name, f"{name}={sampler[name]:g}"
    if e.lossy:
        verify: Any = e.arm.get("verify") or {}
        yield "rule", str(verify.get("_target_", "lossy")).rpartition(".")[2].lower()
    yield from _flat(_growth(e.arm["drafter"]), "tree.")
    yield from _flat({k: v for k, v in e.arm["drafter"].items() if k not in ("growth", "name", "weights", "searched")})
    checkpoint: Any = e.arm.get("checkpoint")
    if checkpoint:
        yield "checkpoint", f"checkpoint={Path(str(checkpoint)).name}"
    yield "label", e.name


def _flat(options: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, str]]:
    """Plain options, those of parts below them among them."""
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{place}{name}.")
        elif name != "_target_" and value is not None and not isinstance(value, (list, tuple)):
            yield f"{place}{name}", f"{name}={value}"
