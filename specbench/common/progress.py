"""Progress of long work: a bar on a terminal, a line every few seconds in a log."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

LOG_INTERVAL_S = 20.0


def span(seconds: float) -> str:
    """An estimated duration: `about 40 s`, `about 6 min`, `about 2.5 h`."""
    if seconds < 90:
        return f"about {max(1, round(seconds))} s"
    return f"about {seconds / 60:.0f} min" if seconds < 5400 else f"about {seconds / 3600:.1f} h"


class _Bar(Progress):
    """A progress bar with text below it."""

    below = ""

    def get_renderables(self) -> Iterator[RenderableType]:
        yield from super().get_renderables()
        yield Text(self.below)


@contextmanager
def progress(title: str, total: int, unit: str, below: Callable[[], str] | None = None) -> Iterator[Callable[[int], None]]:
    """Yields a function to call with each count reached. The first count is that of work done earlier, for estimates.

    below: makes the text under a terminal's bar at every count; both are erased at the end. The bar is drawn at counts
    alone: a thread that draws it at intervals would run beside what is timed.
    """
    if sys.stderr.isatty():
        counts = TextColumn("{task.completed:,.0f}/{task.total:,.0f} " + unit)
        columns = TextColumn("{task.description}", markup=False), BarColumn(), counts, TimeRemainingColumn()
        console = Console(stderr=True)
        with _Bar(*columns, console=console, transient=below is not None, auto_refresh=False) as bar:
            task = bar.add_task(title, total=total)

            def reached(count: int) -> None:
                bar.below = below() if below is not None else ""
                bar.update(task, completed=count, refresh=True)

            yield reached
        return
    begin = printed = time.monotonic()
    first: int | None = None

    def line(count: int) -> None:
        nonlocal first, printed
        first = count if first is None else first
        now = time.monotonic()
        if now - printed >= LOG_INTERVAL_S or (count >= total > first):
            printed = now
            left = ""
            if count > first:
                left = f", about {(now - begin) / (count - first) * (total - count) / 60:.1f} min left"
            print(f"{title}: {count:,}/{total:,} {unit}{left}", file=sys.stderr, flush=True)

    yield line
