"""Names of entries in tables: the drafter, and the options in which it differs from other entries.

    plain                   the autoregressive baseline
    vanilla SD              speculative decoding with a small model as drafter
    eagle2 · paper          the tree of its paper, beside another tree of the same drafter
    eagle2 · rate           another tree than that of its paper
    eagle2 · top_p=0.9      other options, as many as are needed to distinguish rows

A study's arm that is not named after its drafter keeps the study's name.
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
TREES = {  # names of tree policies by class
    "Chain": "chain", "Static": "static", "Dynamic": "dynamic", "AccuracyTree": "calibrated", "Calibrated": "calibrated",
    "Fitted": "fitted", "FittedStatic": "fitted static", "CostAwareTree": "rate", "Rate": "rate", "MarginalTree": "ddtree",
}  # fmt: skip
PAPER = "paper"
CELLS = ("link", "top_p", "top_k")  # options of whole cells, named wherever they differ
LABEL = "label"  # the arm's own name, where no option distinguishes it
SEPARATOR = " · "


def labelled(entries: Iterable[Entry]) -> list[Entry]:
    """Copies of entries with their labels."""
    entries = list(entries)
    by_name: dict[str, list[Entry]] = {}
    for e in entries:
        by_name.setdefault(_base(e), []).append(e)
    labels: dict[int, str] = {}
    for base, group in by_name.items():
        for e, parts in zip(group, _parts(group), strict=True):
            labels[id(e)] = SEPARATOR.join([base, *parts])
    return [replace(e, label=labels[id(e)]) for e in entries]


def _base(e: Entry) -> str:
    """The drafter's name, or the study's name of an arm that is not named after its drafter."""
    drafter = str(e.arm["drafter"].get("name", e.name))
    if e.name != drafter and not re.match(rf"{re.escape(drafter)}[_·\s-]", e.name):
        return e.name
    return WORDS.get(drafter, drafter)


def _parts(group: Sequence[Entry]) -> list[list[str]]:
    """The label's parts of entries with one base: tree and cell if they differ, then as few options as needed."""
    trees = [tree_name(e) for e in group]
    several = len(set(trees)) > 1
    named = [_base(e) == e.name and e.name != e.arm["drafter"].get("name") for e in group]  # by the study
    parts = [[t] if t and (several or (t != PAPER and not own)) else [] for t, own in zip(trees, named, strict=True)]
    options = [dict(_options(e)) for e in group]
    for key in CELLS:
        if len({own.get(key, "") for own in options}) > 1:
            for part, own in zip(parts, options, strict=True):
                part += filter(None, [own.get(key)])
    keys = dict.fromkeys(key for own in options for key in own if key not in (*CELLS, LABEL))
    for key in (*keys, LABEL):
        values: dict[tuple[str, ...], set[str]] = {}  # by label so far
        for part, own in zip(parts, options, strict=True):
            values.setdefault(tuple(part), set()).add(own.get(key, ""))
        for part, own in zip(parts, options, strict=True):
            if len(values.get(tuple(part), ())) > 1 and own.get(key):
                part.append(own[key])
    return parts


def tree_name(e: Entry) -> str:
    """The tree policy in one word; empty for a drafter without one."""
    growth = _growth(e.arm["drafter"])
    if not growth:
        return ""
    if plain_options(growth) == _of_paper(str(e.arm["drafter"].get("name"))):
        return PAPER
    policy = str(growth.get("_target_", "")).rpartition(".")[2]
    return TREES.get(policy, policy.lower())


def _growth(drafter: Mapping[str, Any]) -> Mapping[str, Any]:
    """Tree policy of a drafter, or of the drafter that it wraps."""
    growth = drafter.get("growth") or (drafter.get("base") or {}).get("growth")
    return growth if isinstance(growth, Mapping) else {}


@functools.cache
def _of_paper(drafter: str) -> Any:
    """Options of the tree policy in a drafter's configuration file; None without one."""
    conf = FOLDER.parent
    files = {path.stem: path for path in Path(conf, "drafter").glob("*.yaml")}  # names from rows must not become paths
    if drafter not in files:
        return None
    defaults: Iterable[Any] = (read_yaml(files[drafter], Any) or {}).get("defaults", ())
    for line in defaults:
        if isinstance(line, dict) and "override /tree" in line:
            return plain_options(read_yaml(Path(conf, "tree", f"{line['override /tree']}.yaml"), Any))
    return None


def _options(e: Entry) -> Iterator[tuple[str, str]]:
    """Names and texts of options that can distinguish entries of one drafter, the most important first."""
    config, drafter = e.header["config"], e.arm["drafter"]
    sampler: Any = config["sampler"]
    link = (config.get("link") or {}).get("name", "local")
    yield "link", f"link={link}" if link != "local" else ""
    for name, neutral in (("top_p", 1), ("top_k", 0)):
        if sampler.get(name, neutral) != neutral:
            yield name, f"{name}={sampler[name]:g}"
    if e.lossy:
        verify: Any = e.arm.get("verify") or {}
        yield "rule", str(verify.get("_target_", "lossy")).rpartition(".")[2].lower()
    if served := e.arm.get("served"):  # a null option means the engine's own choice
        yield "precision", f"precision={served.get('precision')}"
    yield from _flat(_growth(drafter), "tree.")
    yield from _flat({key: v for key, v in drafter.items() if key not in ("growth", "name", "weights", "searched")})
    if checkpoint := e.arm.get("checkpoint"):
        yield "checkpoint", f"checkpoint={Path(str(checkpoint)).name}"
    yield LABEL, re.sub(rf"^{re.escape(str(drafter.get('name', e.name)))}($|[_·\s-])", "", e.name)


def _flat(options: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Scalar options, those of nested parts included."""
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif name != "_target_" and value is not None and not isinstance(value, (list, tuple)):
            yield f"{prefix}{name}", f"{name}={value}"
