"""Works through a plan, one process a cell, each for a slice of time: timed work alone, other work side by side."""

import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from specbench.common import timing
from specbench.common.budget import Budget
from specbench.common.errors import warn
from specbench.common.processes import dying_with_parent, signal_of
from specbench.config.cli import composed
from specbench.data.prompts import file_below
from specbench.evaluation.plan import Scope, Task, all_tasks

MIN_SLICE_S = 30.0
MAX_BUSY = 0.3  # cores that others may keep busy during timed work
OBSERVED_S = 2.0  # seconds over which they are counted
MAX_WAIT_S = 300.0  # of timed work for an idle machine
LOW_PRIORITY = 10  # of untimed work, as a `nice` value


@dataclass(frozen=True)
class Settings:
    """scope: of the plan. data: folder of prompts. slice: seconds of work on a cell before the next one's turn."""

    scope: Scope
    data: str | None
    slice: float


Process = subprocess.Popen[bytes]


def work(tasks: Sequence[Task], settings: Settings, budget: Budget) -> list[Task]:
    """Measure cell after cell until the time is over; returns the cells whose process failed.

    A cell that makes no progress within a slice is not continued.
    """
    queue, failed = list(tasks), list[Task]()
    running: dict[Process, Task] = {}
    slots = max(1, min(2, os.cpu_count() or 1))
    try:
        while queue or running:
            while queue and (task := _next(queue, [*running.values()], slots, budget)) and budget.allows(MIN_SLICE_S):
                queue.remove(task)
                running[_start(task, settings, budget)] = task
            if not running:
                break
            process = _ended(running)
            ended = running.pop(process)
            if process.returncode:
                failed.append(ended)
                if ending := signal_of(process.returncode):
                    warn(f"{ended.study}, cell {ended.cell}: its process was ended by {ending}")
            elif (task := _again(ended, settings)) is not None:
                queue.insert(0, task)
    finally:
        for process in running:
            process.terminate()
            process.wait()
    for task in queue:
        print(f"{task.study}, cell {task.cell}: left at {task.done} of {task.planned} questions", file=sys.stderr)
    return failed


def _next(queue: Sequence[Task], running: Sequence[Task], slots: int, budget: Budget) -> Task | None:
    """The task that can begin now: untimed work, or timed work if nothing else runs and the machine becomes idle.

    A study trains its arms in one process at a time.
    """
    if len(running) >= slots or any(task.kind == "timed" for task in running):
        return None
    training = {task.study for task in running if task.kind == "trained"}
    untimed = [t for t in queue if t.kind == "replayed" or (t.kind == "trained" and t.study not in training)]
    if untimed or running:
        return untimed[0] if untimed else None
    return queue[0] if _wait_until_idle(budget) else None


def _wait_until_idle(budget: Budget) -> bool:
    """Wait until other processes leave the machine idle; False, with a line, if that takes too long."""
    begin, waiting = time.monotonic(), False
    while (busy := _busy()) > MAX_BUSY:
        left = begin + MAX_WAIT_S - time.monotonic()
        if left <= 0 or not budget.allows(MIN_SLICE_S):
            warn(f"timed work left out: other processes keep {busy:.1f} cores busy")
            return False
        if not waiting:
            print(f"other processes keep {busy:.1f} cores busy; waiting up to {left / 60:.0f} minutes", file=sys.stderr)
            waiting = True
    return True


def _busy() -> float:
    """Cores that other processes keep busy; 0 where the kernel does not say."""
    background = timing.BackgroundLoad()
    background.start()
    time.sleep(OBSERVED_S)
    return background.read() or 0.0


def _start(task: Task, settings: Settings, budget: Budget) -> Process:
    left = budget.left
    minutes = (settings.slice if left is None else min(settings.slice, left)) / 60
    scope = settings.scope
    flags = [word for word in scope.overrides if word.startswith("-")]  # Hydra requires them in front
    command = [
        sys.executable, "-m", "specbench.study", *flags, f"study={task.study}", f"cells=[{task.cell}]",
        f"minutes={minutes:.2f}", f"results={scope.results}", "show=false",
    ]  # fmt: skip
    command += [] if any(word.startswith("model=") for word in task.words) else [f"model={scope.model}"]
    if settings.data is not None and _is_below(Path(settings.data), task.options.dataset):
        command.append(f"data.root={settings.data}")
    if task.kind != "timed":
        command.append("threads=1")
    command += [word for word in scope.overrides if word not in flags]
    print(f"{task.study}, cell {task.cell}: {task.done} of {task.planned} questions so far", file=sys.stderr, flush=True)
    prepare = dying_with_parent(0 if task.kind == "timed" else LOW_PRIORITY)
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, preexec_fn=prepare)


def _is_below(root: Path, dataset: str) -> bool:
    """Has a folder the prompts of a data set?"""
    options = composed("run", [f"dataset={dataset}"]).dataset
    return file_below(root, options.name, options.get("shared")).is_file()


def _ended(running: Iterable[Process]) -> Process:
    """Wait for the first process that ends."""
    while True:
        for process in running:
            if process.poll() is not None:
                return process
        time.sleep(0.2)


def _again(task: Task, settings: Settings) -> Task | None:
    """The cell as it is now, if it made progress and is not complete."""
    tasks = all_tasks(settings.scope, [task.study])
    now = next(t for t in tasks if t.cell == task.cell)
    print(f"{now.study}, cell {now.cell}: {now.done} of {now.planned} questions", file=sys.stderr, flush=True)
    progress = now.records > task.records or (task.kind == "trained" and not now.done)
    return now if now.open and progress else None
