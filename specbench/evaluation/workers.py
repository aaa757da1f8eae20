"""Works through a plan: a process a cell, a slice of time each; replays and trainings side by side, timed work alone."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specbench.common import timing
from specbench.common.budget import Budget
from specbench.common.processes import dying_with_parent
from specbench.evaluation.plan import Scope, Task, all_tasks

SHORTEST = 30.0  # seconds that a slice must have
BUSY, WATCHED = 0.3, 2.0  # cores that others may keep busy while work is timed, and seconds of looking
PATIENCE = 300.0  # seconds that timed work waits for a busy machine to come to rest
LOW = 10  # priority of what does not count seconds, as `nice` has it


@dataclass(frozen=True)
class Settings:
    """scope: of the plan. data: folder of prompts that neither wheel nor cache has. slice: seconds of a cell at a time."""

    scope: Scope
    data: str | None
    slice: float


@dataclass
class Worker:
    """A process that measures a cell."""

    task: Task
    process: subprocess.Popen[bytes]


def work(tasks: Sequence[Task], settings: Settings, budget: Budget) -> list[Task]:
    """Measure cell after cell until the time is over; returns the cells whose study failed.

    A cell that comes no further within a slice makes room for the others.
    """
    queue, broken = list(tasks), list[Task]()
    running: list[Worker] = []
    slots = max(1, min(2, os.cpu_count() or 1))
    try:
        while queue or running:
            while queue and (task := _next(queue, [w.task for w in running], slots, budget)) and budget.allows(SHORTEST):
                queue.remove(task)
                running.append(_start(task, settings, budget))
            if not running:
                break
            worker = _ended(running)
            running.remove(worker)
            if worker.process.returncode:
                broken.append(worker.task)
            elif (task := _again(worker.task, settings)) is not None:
                queue.insert(0, task)
    finally:
        for worker in running:
            worker.process.terminate()
            worker.process.wait()
    for task in queue:
        print(f"{task.study}, cell {task.cell}: left at {task.done} of {task.planned} questions", file=sys.stderr)
    return broken


def _next(queue: Sequence[Task], running: Sequence[Task], slots: int, budget: Budget) -> Task | None:
    """What can begin now: work whose seconds count alone and on a machine that does nothing else, after waiting for it.

    A study trains its arms in one process at a time.
    """
    if len(running) >= slots or any(task.kind == "timed" for task in running):
        return None
    training = {task.study for task in running if task.kind == "trained"}
    untimed = [t for t in queue if t.kind == "replayed" or (t.kind == "trained" and t.study not in training)]
    if untimed or running:
        return untimed[0] if untimed else None
    return queue[0] if _quiet(budget) else None


def _quiet(budget: Budget) -> bool:
    """Wait until the machine does nothing else; False, with a line, if it does not come to that in time."""
    begin, waiting = time.monotonic(), False
    while (busy := _busy()) > BUSY:
        left = begin + PATIENCE - time.monotonic()
        if left <= 0 or not budget.allows(SHORTEST):
            print(f"specbench: timed work left out: other processes keep {busy:.1f} cores busy", file=sys.stderr)
            return False
        if not waiting:
            print(f"other processes keep {busy:.1f} cores busy; waiting up to {left / 60:.0f} minutes", file=sys.stderr)
            waiting = True
    return True


def _busy() -> float:
    """Cores that other processes keep busy; 0 where nobody can tell."""
    others = timing.BackgroundLoad()
    others.start()
    time.sleep(WATCHED)
    return others.read() or 0.0


def _start(task: Task, settings: Settings, budget: Budget) -> Worker:
    left = budget.left
    minutes = (settings.slice if left is None else min(settings.slice, left)) / 60
    scope = settings.scope
    flags = [word for word in scope.overrides if word.startswith("-")]  # which Hydra wants in front
    command = [
        sys.executable, "-m", "specbench.study", *flags, f"study={task.study}", f"cells=[{task.cell}]",
        f"minutes={minutes:.2f}", f"results={scope.results}", "show=false",
    ]  # fmt: skip
    command += [] if any(word.startswith("model=") for word in task.words) else [f"model={scope.model}"]
    if settings.data is not None and Path(settings.data, f"{task.dataset}.jsonl").is_file():
        command.append(f"data.root={settings.data}")
    if task.kind != "timed":
        command.append("threads=1")
    command += [word for word in scope.overrides if word not in flags]
    print(f"{task.study}, cell {task.cell}: {task.done} of {task.planned} questions so far", file=sys.stderr, flush=True)
    begin = dying_with_parent(0 if task.kind == "timed" else LOW)
    return Worker(task, subprocess.Popen(command, stdout=subprocess.DEVNULL, preexec_fn=begin))


def _ended(running: Sequence[Worker]) -> Worker:
    """The first one that is through."""
    while True:
        for worker in running:
            if worker.process.poll() is not None:
                return worker
        time.sleep(0.2)


def _again(task: Task, settings: Settings) -> Task | None:
    """The same cell as it stands now, if it came further and is not through."""
    tasks = all_tasks(settings.scope, [task.study])
    now = next(t for t in tasks if t.cell == task.cell)
    print(f"{now.study}, cell {now.cell}: {now.done} of {now.planned} questions", file=sys.stderr, flush=True)
    further = now.done > task.done or (now.measured and not task.measured) or (task.kind == "trained" and not now.done)
    return now if now.open and further else None
