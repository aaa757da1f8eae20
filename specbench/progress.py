"""How far long work is: a bar on a terminal, a plain line every few seconds in a log. Knows nothing else in the project."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

LINES_EVERY = 20.0  # seconds


@contextmanager
def progress(what: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """Yields a function to call with the count reached so far. The first count is taken for what was there before."""
    if sys.stderr.isatty():
        counts = TextColumn("{task.completed:,.0f}/{task.total:,.0f} " + unit)
        columns = TextColumn("{task.description}", markup=False), BarColumn(), counts, TimeRemainingColumn()
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(what, total=total)
            yield lambda count: bar.update(task, completed=count)
        return
    begin = said = time.monotonic()
    first: int | None = None

    def line(count: int) -> None:
        nonlocal first, said
        first = count if first is None else first
        now = time.monotonic()
        if now - said >= LINES_EVERY or (count >= total > first):
            said = now
            left = ""
            if count > first:
                left = f", about {(now - begin) / (count - first) * (total - count) / 60:.1f} min left"
            print(f"{what}: {count:,}/{total:,} {unit}{left}", file=sys.stderr, flush=True)

    yield line
