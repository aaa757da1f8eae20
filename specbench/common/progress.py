"""How far long work is: a bar on a terminal, a plain line every few seconds in a log. Knows nothing else in the project."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

LINES_EVERY = 20.0  # seconds


def span(seconds: float) -> str:
    """`about 40 s`, `about 6 min`, `about 2.5 h`: no more digits than an estimate has."""
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
def progress(what: str, total: int, unit: str, below: Callable[[], str] | None = None) -> Iterator[Callable[[int], None]]:
    """Yields a function to call with the count reached so far. The first count is taken for what was there before.

    below: what stands under the bar of a terminal, asked for at every count, and goes with it.
    """
    if sys.stderr.isatty():
        counts = TextColumn("{task.completed:,.0f}/{task.total:,.0f} " + unit)
        columns = TextColumn("{task.description}", markup=False), BarColumn(), counts, TimeRemainingColumn()
        with _Bar(*columns, console=Console(stderr=True), transient=below is not None) as bar:
            task = bar.add_task(what, total=total)

            def reached(count: int) -> None:
                bar.below = below() if below is not None else ""
                bar.update(task, completed=count)

            yield reached
        return
    begin = printed = time.monotonic()
    first: int | None = None

    def line(count: int) -> None:
        nonlocal first, printed
        first = count if first is None else first
        now = time.monotonic()
        if now - printed >= LINES_EVERY or (count >= total > first):
            printed = now
            left = ""
            if count > first:
                left = f", about {(now - begin) / (count - first) * (total - count) / 60:.1f} min left"
            print(f"{what}: {count:,}/{total:,} {unit}{left}", file=sys.stderr, flush=True)

    yield line
