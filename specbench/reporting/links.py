"""Drafters over a link to a server: measured and predicted tokens a second, and traffic."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from specbench.records.rows import LinkUse, Row
from specbench.remote.network_emulator import Network
from specbench.reporting.cells import Entry
from specbench.reporting.tables import ABSENT, shown

COLUMNS = (
    "drafter", "tokens/s", "predicted", "speed-up [95%]", "predicted ms a cycle: drafting / server / line / round trips",
    "round trips a token", "bytes sent a token", "received",
)  # fmt: skip


@dataclass(frozen=True)
class Prediction:
    """Tokens a second over a link, and seconds of a cycle: drafting, server's pass, transmission, round trips."""

    tokens_per_s: float
    draft_s: float
    server_s: float
    line_s: float
    trips_s: float


def predicted(rows: Sequence[Row], shape: Network) -> Prediction | None:
    """tau / (drafting + server's pass + bytes / bandwidth + round trips), from rows over any link; None without a cycle
    or seconds.

    The prompt, which is sent before decoding, does not count. Loss and jitter count with their mean. A stream has no round
    trip but the prompt's.
    """
    uses = _uses(rows)
    cycles = sum(len(row.accepted) for row in rows)
    if not cycles or len(uses) < len(rows):
        return None
    sent_and_received = sum(sum(u.sent.values()) + sum(u.received.values()) - u.prompt_bytes for u in uses)
    draft = sum(row.draft_s for row in rows) / cycles
    server = sum(u.server_s - u.prompt_s for u in uses) / cycles
    line = shape.transmission_s(sent_and_received) / cycles
    trips = 2 * shape.mean_latency_s() * sum(u.round_trips - 1 for u in uses) / cycles
    seconds = draft + server + line + trips
    return Prediction(_tokens(rows) / cycles / seconds, draft, server, line, trips) if seconds > 0 else None


def _uses(rows: Sequence[Row]) -> list[LinkUse]:
    return [row.link for row in rows if row.link is not None]


def _tokens(rows: Sequence[Row]) -> int:
    return sum(len(row.tokens) - 1 for row in rows)


def shape_of(link: Mapping[str, Any]) -> Network:
    """The network emulator's settings from a header's link."""
    return Network(**{key: link[key] for key in Network.__dataclass_fields__ if key in link})


def table(group: Sequence[Entry]) -> tuple[tuple[str, ...], list[list[str]]]:
    """Columns and lines: one line an arm with complete generations over a link."""
    rows = [(e, [row for row in e.rows if row.link is not None and not row.link.cut]) for e in group]
    return COLUMNS, [line for e, own in rows if own and (line := _line(e, own))]


def _line(e: Entry, rows: Sequence[Row]) -> list[str]:
    prediction = predicted(rows, shape_of(e.header["config"].get("link", {})))
    if prediction is None:
        return []
    tokens, uses = _tokens(rows), _uses(rows)
    sent, received = sum(sum(u.sent.values()) for u in uses), sum(sum(u.received.values()) for u in uses)
    trips = f"{sum(u.round_trips for u in uses) / tokens:.2f}"
    seconds = prediction.draft_s, prediction.server_s, prediction.line_s, prediction.trips_s
    parts = " / ".join(f"{1000 * part:.1f}" for part in seconds)
    speeds = [f"{e.summary.speed:.1f}", f"{prediction.tokens_per_s:.1f}", shown(e.summary.speed_up)]
    return [e.title, *speeds, parts, trips, f"{sent / tokens:,.0f}", f"{received / tokens:,.0f}"]


def clients(group: Sequence[Entry]) -> tuple[tuple[str, ...], list[list[str]]]:
    """Columns and lines: a server's tokens a second by number of clients, of all and of the slowest; medians."""
    measured = {e.title: e.measured["clients"] for e in group if e.measured.get("clients")}
    names = {name for repetitions in measured.values() for values in repetitions for name in values}
    counts = sorted(int(name.removeprefix("together_")) for name in names if name.startswith("together_"))
    columns = [f"{n} client{'s' * (n > 1)}, {which}" for which in ("all", "the slowest") for n in counts]
    keys = [f"{which}_{n}" for which in ("together", "slowest") for n in counts]
    return ("drafter", *columns), [[title, *(_median(own, key) for key in keys)] for title, own in measured.items()]


def _median(repetitions: Sequence[Mapping[str, float]], name: str) -> str:
    values = [values[name] for values in repetitions if name in values]
    return f"{median(values):.1f}" if values else ABSENT
