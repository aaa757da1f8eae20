"""What a link makes of a drafter: tokens a second, predicted and measured, and what travels. Rows of targets on servers."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specbench.records.rows import Row
from specbench.remote.network_emulator import Network
from specbench.reporting.cells import Entry
from specbench.reporting.tables import ABSENT, shown

COLUMNS = (
    "drafter", "tokens/s", "predicted", "speed-up [95%]", "predicted ms a cycle: drafting / server / line / round trips",
    "round trips a token", "bytes sent a token", "received",
)  # fmt: skip


@dataclass(frozen=True)
class Prediction:
    """Tokens a second over a link, and seconds of a cycle: drafting, the server's pass, bytes on the line, round trips."""

    tokens_per_s: float
    draft_s: float
    server_s: float
    line_s: float
    trips_s: float


def predicted(rows: Sequence[Row], shape: Network) -> Prediction | None:
    """Speed over a link from its round trip, and from the bytes, passes and acceptance of rows of any server.

    tau / (drafting + server's pass + bytes over bandwidth + round trips), the prompt left out: it is sent before decoding.
    What loss and jitter cost is their mean. Of a stream there is no round trip but the prompt's. None without a cycle.
    """
    used = [row.link for row in rows if row.link is not None]
    cycles = sum(len(row.accepted) for row in rows)
    if not cycles or len(used) < len(rows):
        return None
    tokens = sum(len(row.tokens) - 1 for row in rows)
    travelled = sum(sum(u.sent.values()) + sum(u.received.values()) - u.prompt_bytes for u in used)
    draft = sum(row.draft_s for row in rows) / cycles
    server = sum(u.server_s - u.prompt_s for u in used) / cycles
    line = shape.transmission_s(travelled) / cycles
    trips = 2 * shape.mean_latency_s() * sum(u.round_trips - 1 for u in used) / cycles
    return Prediction(tokens / cycles / (draft + server + line + trips), draft, server, line, trips)


def shape_of(link: Mapping[str, Any]) -> Network:
    """A header's link, as the network emulator takes it."""
    return Network(**{key: link[key] for key in Network.__dataclass_fields__ if key in link})


def table(group: Sequence[Entry]) -> tuple[tuple[str, ...], list[list[str]]]:
    """A line an arm."""
    found = [(e, [row for row in e.rows if row.link is not None and not row.link.cut]) for e in group]
    return COLUMNS, [line for e, rows in found if rows and (line := _line(e, rows))]


def _line(e: Entry, rows: Sequence[Row]) -> list[str]:
    prediction = predicted(rows, shape_of(e.header["config"].get("link", {})))
    if prediction is None:
        return []
    tokens = sum(len(row.tokens) - 1 for row in rows)
    used = [row.link for row in rows if row.link is not None]
    sent, received = sum(sum(u.sent.values()) for u in used), sum(sum(u.received.values()) for u in used)
    travelled = [f"{count / tokens:,.0f}" for count in (sent, received)]
    trips = f"{sum(u.round_trips for u in used) / tokens:.2f}"
    seconds = prediction.draft_s, prediction.server_s, prediction.line_s, prediction.trips_s
    parts = " / ".join(f"{1000 * part:.1f}" for part in seconds)
    speeds = [f"{e.summary.speed:.1f}", f"{prediction.tokens_per_s:.1f}", shown(e.summary.speed_up)]
    return [e.title, *speeds, parts, trips, *travelled]


def clients(group: Sequence[Entry]) -> tuple[tuple[str, ...], list[list[str]]]:
    """Tokens a second of a server by how many clients it has, all together and the slowest: medians over repetitions."""
    measured = {e.title: e.measured["clients"] for e in group if e.measured.get("clients")}
    together = {name for found in measured.values() for values in found for name in values if name.startswith("together_")}
    counts = sorted(int(name.removeprefix("together_")) for name in together)
    columns = [f"{n} client{'s' * (n > 1)}, {what}" for what in ("all", "the slowest") for n in counts]
    keys = [f"{what}_{n}" for what in ("together", "slowest") for n in counts]
    return ("drafter", *columns), [[name, *(_median(found, key) for key in keys)] for name, found in measured.items()]


def _median(measured: Sequence[Mapping[str, float]], name: str) -> str:
    values = [values[name] for values in measured if name in values]
    return f"{statistics.median(values):.1f}" if values else ABSENT
