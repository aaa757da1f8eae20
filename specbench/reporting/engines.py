"""Other engines beside this one, decoding the same prompts in turn, and the least time that reading the model takes."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from specbench.records.metrics import BASELINE
from specbench.records.statistics import repeated
from specbench.reporting.cells import Entry
from specbench.reporting.tables import shown

COLUMNS = (
    "engine",
    "its weights",
    "its decoding",
    "tokens/s",
    "here",
    "tokens/s here",
    "here over it [95%]",
    "same answers",
)


SIDES = ("ours", "theirs", "ratio", "identical")  # of `generate`
QUALITY = ("perplexity", "original", "agreement")
FLOOR = ("bytes", "gb_per_s", "ms", "tokens_per_s")


def table(group: Sequence[Entry]) -> tuple[Sequence[str], list[list[str]]]:
    """Columns, and a line for each engine and way to decode that was measured; below them the bandwidth floor, if any."""
    lines = [_line(e, values) for e in group if (values := _complete(e, "generate", SIDES))]
    return COLUMNS, [*lines, *_floor_lines(group)]


def _complete(e: Entry, quantity: str, names: Sequence[str]) -> list[Mapping[str, float]]:
    """The repetitions of a quantity that have all of these names."""
    return [values for values in e.measured.get(quantity, ()) if set(names) <= set(values)]


def _line(e: Entry, values: Sequence[Mapping[str, float]]) -> list[str]:
    """The speeds of the repetition with the median ratio; of the share of identical answers the smallest."""
    middle = sorted(values, key=lambda v: v["ratio"])[len(values) // 2]
    here, theirs = (f"{middle[side]:.1f}" for side in ("ours", "theirs"))
    served = e.arm.get("served") or {}
    own = "plain" if served or e.name == BASELINE else e.title
    engine = _peer(served) if served else _transformers(e, own)
    ratio = shown(repeated([v["ratio"] for v in values]))
    return [*engine, theirs, own, here, ratio, f"{min(v['identical'] for v in values):.0%}"]


def _transformers(e: Entry, decoding: str) -> list[str]:
    versions: Mapping[str, Any] = e.header["versions"]
    return [f"Transformers {versions.get('transformers', '')}".strip(), e.precision, f"its own {decoding}"]


def _peer(served: Mapping[str, Any]) -> list[str]:
    """Of what a `Peer` reports of itself, see `specbench.engine.peer`."""
    weights = f"{served.get('precision')}{'' if served.get('exact') else ' (another target)'}"
    decoding = f"prompt lookup, {served['lookup']} tokens" if served.get("lookup") else "plain"
    arithmetic = f"{served.get('arithmetic')} arithmetic".replace("engine", "its own")
    return [f"{served.get('engine')} {served.get('version')}", f"{weights}, {arithmetic}", decoding]


def _floor_lines(group: Sequence[Entry]) -> Iterator[list[str]]:
    if (found := floor(group)) is not None:
        read = f"{found['bytes'] / 1e6:,.0f} MB a token at {found['gb_per_s']:.1f} GB/s"
        yield ["bandwidth floor", read, f"{found['ms']:.1f} ms a token", f"{found['tokens_per_s']:.1f}", "", "", "", ""]


def floor(group: Sequence[Entry]) -> dict[str, float] | None:
    """The least of the baseline's `bandwidth`, see `specbench.evaluation.costs`; None if no quiet machine measured it."""
    found = [] if any(e.busy for e in group) else _of_baseline(group, "bandwidth", FLOOR)
    return dict(min(found, key=lambda values: values["ms"])) if found else None


def quality(group: Sequence[Entry]) -> dict[str, float] | None:
    """The same of the `quality` of a quantised or adapted target; without `kl` in older rows."""
    return _medians(group, "quality", (*QUALITY, "kl")) or _medians(group, "quality", QUALITY)


def _medians(group: Sequence[Entry], quantity: str, names: Sequence[str]) -> dict[str, float] | None:
    values = _of_baseline(group, quantity, names)
    return {name: median(v[name] for v in values) for name in names} if values else None


def _of_baseline(group: Sequence[Entry], quantity: str, names: Sequence[str]) -> list[Mapping[str, float]]:
    return next((v for e in group if e.name == BASELINE and (v := _complete(e, quantity, names))), [])
