"""Fills a row with a generation that runs, without a wait for the device before its end."""

from collections.abc import Iterable
from dataclasses import replace

from specbench.common.timing import PhaseClock
from specbench.engine.decode import Prefill
from specbench.engine.interface import Step
from specbench.records.rows import Row
from specbench.remote.client import LinkLost


def fill(row: Row, events: Iterable[Prefill | Step], clock: PhaseClock) -> LinkLost | None:
    """Take the events of `decode`, which must be timed by the same clock; returns the loss of a link that ended them."""
    begin, cycles, lost = clock(), list[Step](), None
    try:
        for event in events:
            if isinstance(event, Prefill):
                row.tokens.append(event.token)
                row.prefill_s = event.seconds
                begin = clock()
            else:
                cycles.append(event)
    except LinkLost as error:
        lost = error
    spent = clock() - begin
    clock.wait()
    row.prefill_s, row.decode_s = float(row.prefill_s), float(spent)
    for step in cycles:
        row.add(in_seconds(step))
    return lost


def in_seconds(step: Step) -> Step:
    """A cycle whose times are numbers, see `PhaseClock`."""
    times = {name: float(getattr(step, name)) for name in ("draft_s", "target_s", "verify_s", "rest_s")}
    return replace(step, **times)  # type: ignore[arg-type]
