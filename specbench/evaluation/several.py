"""Several studies in one command: one after the other, each in a process of its own, sharing the time."""

import re
import subprocess
import sys
from collections.abc import Callable, Sequence

from specbench.common.budget import Budget
from specbench.common.errors import SpecBenchError, warn
from specbench.common.processes import dying_with_parent, signal_of, was_interrupted

SIGNALLED = 128  # added to a signal's number, as shells do


def run_named(typed: Sequence[str], one: Callable[[], None]) -> None:
    """Run the studies that a command line names; a single one by `one`, in this process."""
    if studies := named(typed):
        sys.exit(run(*studies))
    one()


def named(typed: Sequence[str]) -> tuple[list[str], list[str], float | None] | None:
    """The studies of `study=a,b,c`, all words but the minutes, and these; None for a single study, and in a sweep."""
    words = [word for word in typed if word.startswith("study=")]
    names = words[-1].partition("=")[2].split(",") if words else []
    if len(names) < 2 or {"-m", "--multirun"} & set(typed):
        return None
    minutes = [word.partition("=")[2] for word in typed if word.startswith("minutes=")]
    last = max(i for i, word in enumerate(typed) if word.startswith("study="))
    rest = [word for i, word in enumerate(typed) if i == last or not word.startswith(("study=", "minutes="))]
    return [name for name in names if name], rest, _minutes(minutes[-1]) if minutes else None


def _minutes(text: str) -> float | None:
    if text == "null":
        return None
    if not re.fullmatch(r"\d+(\.\d*)?", text) or float(text) <= 0:
        raise SpecBenchError(f"minutes={text}: must be a number greater than 0")
    return float(text)


def run(names: Sequence[str], rest: Sequence[str], minutes: float | None) -> int:
    """Run all studies; returns the first exit code that is not 0. rest: words of the command line, one of them `study=`."""
    budget, code = Budget.of_minutes(minutes), 0
    for index, name in enumerate(names):
        left = budget.left
        if budget.over:
            print(f"{name}: no time left; run it again", file=sys.stderr)
            continue
        share = [] if left is None else [f"minutes={max(left / 60 / (len(names) - index), 0.01):.2f}"]
        words = [f"study={name}" if word.startswith("study=") else word for word in rest]  # flags stay in front
        command = [sys.executable, "-m", "specbench.study", *words, *share]
        done = subprocess.run(command, preexec_fn=dying_with_parent()).returncode
        if was_interrupted(done):
            raise KeyboardInterrupt
        if ending := signal_of(done):
            warn(f"{name}: its process was ended by {ending}")
        code = code or (done if done >= 0 else SIGNALLED - done)
    return code
